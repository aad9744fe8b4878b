//! Where writes count, and the I/O commands of handles, with every field out of range.

use crate::common::*;
use crate::placement::host::*;
use nvme::log::FdpEventType;
use nvme::{Command, NvmOpcode, Status};
use volume::{Effect, Fault, IoErrorKind, OpKind};

const RU_NOT_FULL: u8 = 0;
const INVALID_ID: u8 = 3;

#[test]
fn writes_consume_reclaim_unit_of_handle() {
    let mut p = Placed::new();
    assert_eq!(p.left(), [64, 64, 64]);
    assert_eq!(p.write(Some(1), 10), Status::SUCCESS);
    assert_eq!(p.write(Some(2), 63), Status::SUCCESS);
    // Without a directive it is the first handle, whatever stands in DSPEC.
    assert_eq!(p.write(None, 3), Status::SUCCESS);
    let stray = p.command(NvmOpcode::WRITE, 0, 1, 0, 2);
    assert_eq!(plain(p.h.io(stray)), Status::SUCCESS);
    assert_eq!(p.left(), [60, 54, 1]);
    // To the end, and beyond, by more than one unit.
    assert_eq!(p.write(Some(2), 1), Status::SUCCESS);
    assert_eq!(p.left(), [60, 54, 64]);
    assert_eq!(p.write(Some(1), 54 + 128 + 5), Status::SUCCESS);
    assert_eq!(p.left(), [60, 59, 64]);
    let blocks = 10 + 63 + 3 + 1 + 1 + 187;
    assert_eq!(p.bytes(), (blocks * 512, blocks * 512));
    // Reads, Compare and Flush write nothing, and another namespace's writes are no concern.
    let other = p.h.rw(NvmOpcode::WRITE, 2, 0, 4, DATA);
    assert_eq!(plain(p.h.io(other)), Status::SUCCESS);
    for opcode in [NvmOpcode::READ, NvmOpcode::COMPARE] {
        let command = p.command(opcode, 0, 4, PLACED, 1);
        assert_eq!(plain(p.h.io(command)), Status::SUCCESS);
    }
    assert_eq!(plain(p.h.io(Command::new(0, 0, 1))), Status::SUCCESS);
    assert_eq!(p.left(), [60, 59, 64]);
    // Data is where it was written, whatever handle that went by.
    p.h.write(DATA, &pattern(1, 1024));
    assert_eq!(p.write(Some(2), 2), Status::SUCCESS);
    p.h.write(DATA, &[0; 1024]);
    let read = p.command(NvmOpcode::READ, 0, 2, 0, 0);
    assert_eq!(plain(p.h.io(read)), Status::SUCCESS);
    assert_eq!(p.h.read(DATA, 1024), pattern(1, 1024));
}

#[test]
fn write_zeroes_and_copy_consume_reclaim_unit() {
    let mut p = Placed::new();
    let mut zeroes = p.command(NvmOpcode::WRITE_ZEROES, 8, 20, PLACED, 1);
    assert_eq!(plain(p.h.io(zeroes)), Status::SUCCESS);
    zeroes.cdw12 = (zeroes.cdw12.get() | 1 << 25).into();
    assert_eq!(plain(p.h.io(zeroes)), Status::SUCCESS);
    assert_eq!(p.left(), [64, 24, 64]);
    assert_eq!(p.bytes(), (40 * 512, 40 * 512));
    // What the controller copies is no write of the host's.
    let mut range = [0; 32];
    range[8..16].copy_from_slice(&100u64.to_le_bytes());
    range[16..18].copy_from_slice(&9u16.to_le_bytes());
    p.h.write(DATA, &range);
    let mut copy = Command::new(NvmOpcode::COPY.0, 0, 1);
    copy.set_slba(0);
    copy.cdw12 = (PLACED << 20).into();
    copy.cdw13 = (2 << 16).into();
    copy.set_prps(DATA, 0);
    assert_eq!(plain(p.h.io(copy)), Status::SUCCESS);
    assert_eq!(p.left(), [64, 24, 54]);
    assert_eq!(p.bytes(), (40 * 512, 50 * 512));
    // What is refused does not count, what fails does.
    p.h.write(DATA, &range);
    copy.set_slba(100);
    assert_eq!(plain(p.h.io(copy)), Status::OVERLAPPING_IO_RANGE);
    assert_eq!(p.left(), [64, 24, 54]);
    let error = IoErrorKind::MediaWrite.into();
    p.data
        .add(Fault::always(OpKind::Write, Effect::Fail(error)));
    assert_eq!(p.write(Some(1), 4), Status::WRITE_FAULT);
    assert_eq!(p.left(), [64, 20, 54]);
}

#[test]
fn invalid_placement_identifier_uses_first_handle() {
    let mut p = Placed::new();
    // The write is done by the first handle, and that may say so.
    assert_eq!(p.write(Some(3), 2), Status::SUCCESS);
    assert_eq!(p.write(Some(u16::MAX), 2), Status::SUCCESS);
    assert_eq!((p.left(), p.events().len()), (vec![60, 64, 64], 0));
    assert_eq!(p.set_events(1, 1, &[INVALID_ID], true), Status::SUCCESS);
    assert_eq!(p.write(Some(3), 1), Status::SUCCESS);
    assert_eq!(p.events().len(), 0);
    assert_eq!(p.set_events(1, 0, &[INVALID_ID], true), Status::SUCCESS);
    assert_eq!(p.write(Some(0x8001), 1), Status::SUCCESS);
    assert_eq!(p.write(Some(2), 1), Status::SUCCESS);
    let events = p.events();
    assert_eq!(events.len(), 1);
    let event = events[0];
    assert_eq!(event.fdpet, FdpEventType::INVALID_PLACEMENT_IDENTIFIER);
    assert_eq!(event.fdpef.into_bits(), 7);
    assert_eq!((event.pid.get(), event.ruhid.get()), (0x8001, 0));
    assert_eq!((event.nsid.get(), event.rgid.get()), (1, 0));
    assert_eq!(p.left(), [58, 64, 63]);
    // Other directives are invalid while this one is enabled; nothing is written then.
    for (dtype, opcode) in [
        (1, NvmOpcode::WRITE),
        (3, NvmOpcode::WRITE),
        (15, NvmOpcode::WRITE),
        (1, NvmOpcode::WRITE_ZEROES),
    ] {
        let command = p.command(opcode, 0, 1, dtype, 1);
        assert_eq!(plain(p.h.io(command)), Status::INVALID_FIELD, "{dtype}");
    }
    assert_eq!(p.left(), [58, 64, 63]);
    // Without it none means anything.
    assert_eq!(p.enable(1, false), Status::SUCCESS);
    for dtype in [1, 2, 15] {
        let command = p.command(NvmOpcode::WRITE, 0, 1, dtype, 0x8001);
        assert_eq!(plain(p.h.io(command)), Status::SUCCESS, "{dtype}");
    }
    assert_eq!((p.left(), p.events().len()), (vec![55, 64, 63], 1));
    // Nor does it where there are no handles.
    let mut other = p.command(NvmOpcode::WRITE, 0, 1, 1, 7);
    other.nsid = 2.into();
    assert_eq!(plain(p.h.io(other)), Status::SUCCESS);
}

#[test]
fn handle_update_starts_new_reclaim_unit() {
    let mut p = Placed::new();
    for handle in 0..3 {
        let types = [RU_NOT_FULL, INVALID_ID, 0x81];
        assert_eq!(p.set_events(1, handle, &types, true), Status::SUCCESS);
    }
    assert_eq!(p.write(Some(1), 10), Status::SUCCESS);
    assert_eq!(p.write(Some(2), 64), Status::SUCCESS);
    // What nothing was written to stays, and says nothing.
    assert_eq!(p.update(&[0, 1, 2]), Status::SUCCESS);
    assert_eq!(p.left(), [64, 64, 64]);
    let events = p.events();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].fdpet, FdpEventType::UNIT_NOT_FULLY_WRITTEN);
    assert_eq!((events[0].pid.get(), events[0].ruhid.get()), (1, 1));
    // Where one identifier is invalid, nothing happens.
    assert_eq!(p.write(Some(0), 1), Status::SUCCESS);
    for ids in [&[0, 3][..], &[0x100, 0], &[0, 0, 0xffff]] {
        assert_eq!(p.update(ids), Status::INVALID_FIELD, "{ids:?}");
    }
    // More than there are handles.
    assert_eq!(p.update(&[0, 0, 0, 0]), Status::INVALID_FIELD);
    assert_eq!((p.left(), p.events().len()), (vec![63, 64, 64], 1));
    // The same twice is one update.
    assert_eq!(p.update(&[0, 0]), Status::SUCCESS);
    assert_eq!((p.left(), p.events().len()), (vec![64, 64, 64], 2));
    // Handles that are not to record it do not.
    assert_eq!(p.set_events(1, 0, &[RU_NOT_FULL], false), Status::SUCCESS);
    assert_eq!(p.write(Some(0), 1), Status::SUCCESS);
    assert_eq!(p.update(&[0]), Status::SUCCESS);
    assert_eq!((p.left(), p.events().len()), (vec![64, 64, 64], 2));
    // Nothing was written by an update.
    assert_eq!(p.bytes().0, 76 * 512);
    let send = |cdw10: u32, nsid: u32| {
        let mut command = Command::new(NvmOpcode::IO_MANAGEMENT_SEND.0, 0, nsid);
        command.cdw10 = cdw10.into();
        command.set_prps(DATA, 0);
        command
    };
    let invalid = Status::INVALID_FIELD;
    let nowhere = Status::INVALID_NAMESPACE_OR_FORMAT;
    for (cdw10, nsid, status) in [
        (0, 1, invalid),
        (2, 1, invalid),
        (0xff, 1, invalid),
        (0xffff_0001, 1, invalid),
        (1, 2, Status::FDP_DISABLED),
        (1, 0, nowhere),
        (1, u32::MAX, nowhere),
    ] {
        let found = plain(p.h.io(send(cdw10, nsid)));
        assert_eq!(found, status, "{cdw10:#x} {nsid}");
    }
    let mut odd = send(1, 1);
    odd.set_prps(DATA + 2, 0);
    assert_eq!(plain(p.h.io(odd)), Status::PRP_OFFSET_INVALID);
    odd.set_prps(0xdead_0000_0000, 0);
    assert_eq!(plain(p.h.io(odd)), Status::DATA_TRANSFER_ERROR);
}

/// The oldest event makes room.
#[test]
fn full_event_buffer_drops_oldest() {
    let mut p = Placed::new();
    assert_eq!(p.set_events(1, 0, &[INVALID_ID], true), Status::SUCCESS);
    for id in 100..170 {
        assert_eq!(p.write(Some(id), 1), Status::SUCCESS);
    }
    let ids: Vec<u16> = p.events().iter().map(|event| event.pid.get()).collect();
    assert_eq!(ids, (107..170).collect::<Vec<u16>>());
}

#[test]
fn reclaim_unit_status_is_reported() {
    let mut p = Placed::new();
    assert_eq!(p.write(Some(2), 5), Status::SUCCESS);
    let whole = p.receive(1, 1, 16 + 3 * 32).unwrap();
    assert_eq!(whole[14..16], [3, 0]);
    assert_eq!(whole[16 + 64..16 + 68], [2, 0, 2, 0]);
    assert_eq!(whole[16 + 64 + 8], 59);
    // As much as there is room for, and zeroes behind the end.
    for bytes in [4, 16, 44, 48, 108] {
        assert_eq!(p.receive(1, 1, bytes).unwrap(), whole[..bytes]);
    }
    let more = p.receive(1, 1, 4096).unwrap();
    assert_eq!(more[..112], whole[..]);
    assert!(more[112..].iter().all(|byte| *byte == 0));
    let invalid = Err(Status::INVALID_FIELD);
    for mo in [0, 2, 0xff] {
        assert_eq!(p.receive(1, mo, 64), invalid);
    }
    // Longer than any transfer.
    let mut long = Command::new(NvmOpcode::IO_MANAGEMENT_RECEIVE.0, 0, 1);
    long.cdw10 = 1.into();
    for numd in [(1 << 18) + 1, u32::MAX] {
        long.cdw11 = numd.into();
        assert_eq!(plain(p.h.io(long)), Status::INVALID_FIELD);
    }
    assert_eq!(p.receive(2, 1, 64), Err(Status::FDP_DISABLED));
    for nsid in [0, 9, u32::MAX] {
        let nowhere = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        assert_eq!(p.receive(nsid, 1, 64), nowhere);
    }
    long.cdw11 = 3.into();
    long.set_prps(0xdead_0000_0000, 0);
    assert_eq!(plain(p.h.io(long)), Status::DATA_TRANSFER_ERROR);
}
