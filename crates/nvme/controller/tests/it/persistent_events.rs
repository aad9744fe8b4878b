//! The Persistent Event log: its context, and what is in it.

use crate::reservations::world;

use crate::common::*;
use nvme::feature::Fid;
use nvme::identify::IdentifyController;
use nvme::log::{
    FormatCompletion, FormatStart, HardwareError, HardwareErrorCode, Lid, PersistentEvent,
    PersistentEventAction as Action, PersistentEventHeader, PersistentEventType as Type,
    PowerOnOrReset, SanitizeCompletion, SanitizeOutcome, SanitizeStart, Smart, TimestampChange,
};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::time::Instant;
use world::World;
use zerocopy::FromBytes;

const HEADER: usize = 512;

fn get(h: &mut Host, action: Action, len: usize, offset: u64) -> (Status, Vec<u8>) {
    let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 0xffff_ffff);
    let numd = (len / 4 - 1) as u32;
    let lid = u32::from(Lid::PERSISTENT_EVENT.0);
    command.cdw10 = (lid | u32::from(action.0) << 8 | numd << 16).into();
    command.cdw12 = (offset as u32).into();
    h.write(DATA, &vec![0xee; len]);
    h.prps(&mut command, DATA, len as u64, PAGE);
    let status = h.admin(command).status();
    (status, h.read(DATA, len))
}

fn release(h: &mut Host) -> Status {
    get(h, Action::RELEASE, 4, 0).0
}

/// The header, and the events with their data, of a new context.
fn read(h: &mut Host) -> (PersistentEventHeader, Vec<(PersistentEvent, Vec<u8>)>) {
    assert_eq!(release(h), Status::SUCCESS);
    let (status, first) = get(h, Action::ESTABLISH_AND_READ_HEADER, HEADER, 0);
    assert_eq!(status, Status::SUCCESS);
    let header = PersistentEventHeader::read_from_bytes(&first).unwrap();
    assert_eq!((header.rv, header.lhl.get()), (3, 492));
    let size = header.tll.get() as usize;
    let (status, page) = get(h, Action::READ, size, 0);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(page[..374], first[..374]);
    let mut rest = &page[HEADER..];
    let mut events = Vec::new();
    while !rest.is_empty() {
        let (event, after) = PersistentEvent::read_from_prefix(rest).unwrap();
        assert_eq!((event.ehl, event.etr), (21, 1));
        let bit = header.seb[usize::from(event.etype.0 / 8)] >> (event.etype.0 % 8) & 1;
        assert_eq!(bit, 1, "{}", event.etype);
        let (data, after) = after.split_at(event.el.get().into());
        events.push((event, data.to_vec()));
        rest = after;
    }
    assert_eq!(header.tnev.get() as usize, events.len());
    assert_eq!(release(h), Status::SUCCESS);
    (header, events)
}

/// Without the snapshot, which is the first.
fn types(h: &mut Host) -> Vec<Type> {
    let (_, events) = read(h);
    let mut types: Vec<Type> = events.iter().map(|(event, _)| event.etype).collect();
    assert_eq!(types.remove(0), Type::SMART);
    types
}

fn data<T: FromBytes>(data: &[u8]) -> T {
    T::read_from_bytes(data).ok().unwrap()
}

fn reset(h: &mut Host) {
    h.disable();
    h.until(|h| !h.csts().rdy());
    h.enable();
    h.create_pair(1, 64);
}

#[test]
fn context_is_established_and_released() {
    let mut h = Host::ready();
    let sequence = Status::COMMAND_SEQUENCE_ERROR;
    assert_eq!(plain(get(&mut h, Action::READ, HEADER, 0).0), sequence);
    assert_eq!(release(&mut h), Status::SUCCESS, "of none");
    let (status, first) = get(&mut h, Action::ESTABLISH_AND_READ, 1024, 0);
    assert_eq!(status, Status::SUCCESS);
    for action in [
        Action::ESTABLISH_AND_READ,
        Action::ESTABLISH_AND_READ_HEADER,
    ] {
        assert_eq!(plain(get(&mut h, action, HEADER, 0).0), sequence);
    }
    // What happens now is not in it.
    let value = 0x1234_5678u64.to_le_bytes();
    set_timestamp(&mut h, value);
    let (status, page) = get(&mut h, Action::READ, 1024, 0);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(page[..374], first[..374]);
    assert_eq!(page[378..], first[378..]);
    assert_eq!((first[376] & 4, page[376] & 4), (0, 4), "RCE");
    // By parts.
    let (status, part) = get(&mut h, Action::READ, 512, 512);
    assert_eq!((status, &part[..]), (Status::SUCCESS, &page[512..]));
    // No data is transferred.
    let (status, untouched) = get(&mut h, Action::RELEASE, 512, 0);
    assert_eq!((status, untouched), (Status::SUCCESS, vec![0xee; 512]));
    assert_eq!(plain(get(&mut h, Action::READ, HEADER, 0).0), sequence);
    for (len, offset) in [(508, 0), (516, 0), (512, 4)] {
        let status = get(&mut h, Action::ESTABLISH_AND_READ_HEADER, len, offset).0;
        assert_eq!(plain(status), Status::INVALID_FIELD);
    }
    let generation = |page: &[u8]| u16::from_le_bytes([page[372], page[373]]);
    let (_, second) = get(&mut h, Action::ESTABLISH_AND_READ, 1024, 0);
    assert_eq!(generation(&second), generation(&first) + 1);
    reset(&mut h);
    assert_eq!(plain(get(&mut h, Action::READ, HEADER, 0).0), sequence);
}

fn set_timestamp(h: &mut Host, value: [u8; 8]) {
    h.write(PAGE, &value);
    let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    command.cdw10 = u32::from(Fid::TIMESTAMP.0).into();
    command.set_prps(PAGE, 0);
    assert_eq!(h.admin(command).status(), Status::SUCCESS);
}

#[test]
fn persistent_event_log_lists_newest_first() {
    let mut h = Host::ready();
    let (header, events) = read(&mut h);
    let (_, page) = h.identify(1, 0, 0);
    let id = IdentifyController::read_from_bytes(&page).unwrap();
    assert!(id.lpa.pes());
    assert!(u64::from(id.pels.get()) << 16 >= header.tll.get());
    assert_eq!(
        (header.sn, header.mn, header.subnqn),
        (id.sn, id.mn, id.subnqn)
    );
    assert_eq!((header.vid, header.ssvid), (id.vid, id.ssvid));
    let smart: Smart = data(&events[0].1);
    assert_eq!(smart.pwrc.get(), 1);
    let on: PowerOnOrReset = data(&events[1].1);
    assert_eq!((on.fr, on.cntlid, on.operation), (id.fr.0, id.cntlid, 0));
    assert_eq!(on.power_cycle.get(), 1);
    assert_eq!(events.len(), 2);

    set_timestamp(&mut h, 0x7000_0000u64.to_le_bytes());
    set_timestamp(&mut h, 0x1000_0000u64.to_le_bytes());
    reset(&mut h);
    h.set32(nvme::regs::NSSR, 0x4e56_4d65);
    h.until(|h| !h.csts().rdy());
    h.enable();
    h.c.reset();
    h.until(|h| !h.c.is_resetting());
    h.enable();
    let (_, events) = read(&mut h);
    let types: Vec<Type> = events.iter().map(|(event, _)| event.etype).collect();
    let expected = [
        Type::SMART,
        Type::POWER_ON_OR_RESET,
        Type::HARDWARE_ERROR,
        Type::POWER_ON_OR_RESET,
        Type::POWER_ON_OR_RESET,
        Type::TIMESTAMP_CHANGE,
        Type::TIMESTAMP_CHANGE,
        Type::POWER_ON_OR_RESET,
    ];
    assert_eq!(types, expected);
    let error: HardwareError = data(&events[2].1);
    assert_eq!(error.code.get(), HardwareErrorCode::UNSAFE_SHUTDOWN.0);
    let second: TimestampChange = data(&events[5].1);
    let first: TimestampChange = data(&events[6].1);
    let near = |bytes: [u8; 8], value: u64| {
        let ms = u64::from_le_bytes(bytes) & 0xffff_ffff_ffff;
        (value..value + 600_000).contains(&ms)
    };
    assert!(
        near(second.previous, 0x7000_0000) && second.previous[6] == 2,
        "set by the host"
    );
    assert!(near(first.previous, 0) && first.previous[6] == 0);
    assert!(near(events[5].0.ets, 0x1000_0000));
}

#[test]
fn erases_are_in_persistent_event_log() {
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    let mut format = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
    format.cdw10 = (1 << 9).into();
    assert_eq!(h.admin(format).status(), Status::SUCCESS);
    let (_, events) = read(&mut h);
    let end: FormatCompletion = data(&events[1].1);
    let start: FormatStart = data(&events[2].1);
    assert_eq!(events[1].0.etype, Type::FORMAT_COMPLETION);
    assert_eq!(events[2].0.etype, Type::FORMAT_START);
    assert_eq!((start.nsid.get(), start.cdw10.get()), (1, 1 << 9));
    assert_eq!((end.nsid.get(), end.smallest_fpi, end.status), (1, 0, 0));

    let fails = volume::Effect::FailLater(volume::IoErrorKind::MediaWrite.into());
    faults.add(volume::Fault::always(volume::OpKind::WriteZeroes, fails));
    let status = h.admin(format).status();
    assert_eq!(plain(status), Status::WRITE_FAULT);
    let mut sanitize = Command::new(AdminOpcode::SANITIZE.0, 0, 0);
    (sanitize.cdw10, sanitize.cdw11) = (2.into(), 7.into());
    assert_eq!(h.admin(sanitize).status(), Status::SUCCESS);
    h.now = Instant::now();
    h.until(|h| !h.round() && h.c.in_flight() == 0 && h.c.deadline().is_none());
    let (_, events) = read(&mut h);
    let types: Vec<Type> = events
        .iter()
        .map(|(event, _)| event.etype)
        .take(5)
        .collect();
    let expected = [
        Type::SMART,
        Type::SANITIZE_COMPLETION,
        Type::SANITIZE_START,
        Type::FORMAT_COMPLETION,
        Type::FORMAT_START,
    ];
    assert_eq!(types, expected);
    let end: SanitizeCompletion = data(&events[1].1);
    assert_eq!(end.sstat.sos(), SanitizeOutcome::FAILED);
    let start: SanitizeStart = data(&events[2].1);
    assert_eq!((start.cdw10.get(), start.cdw11.get()), (2, 7));
    let end: FormatCompletion = data(&events[3].1);
    assert_eq!((end.smallest_fpi, end.status), (100, 1));
    assert_eq!(
        end.status_field.get() as u16,
        Status::WRITE_FAULT.into_bits()
    );
}

#[test]
fn oldest_events_are_dropped() {
    let mut h = Host::ready();
    for nth in 0..100u64 {
        set_timestamp(&mut h, (nth << 32).to_le_bytes());
    }
    let (header, events) = read(&mut h);
    assert_eq!(events.len(), 65);
    assert!(header.tll.get() <= 1 << 16);
    let previous = |nth: usize| data::<TimestampChange>(&events[nth].1).previous;
    assert_eq!(u64::from_le_bytes(previous(1)) >> 32 & 0xffff, 98);
    assert_eq!(u64::from_le_bytes(previous(64)) >> 32 & 0xffff, 35);
}

/// Each event has the ID of its controller; each controller has a context of its own.
#[test]
fn subsystem_controllers_share_one_log() {
    let mut w = World::of(&[1, 2]);
    let format = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
    assert_eq!(w.admin(1, format).status(), Status::SUCCESS);
    let (status, _) = get(&mut w.hosts[0], Action::ESTABLISH_AND_READ, HEADER, 0);
    assert_eq!(status, Status::SUCCESS);
    let all: Vec<_> = (0..2).map(|who| read(&mut w.hosts[who]).1).collect();
    for (cntlid, events) in (1..).zip(&all) {
        let told = events
            .iter()
            .map(|(event, _)| (event.etype, event.cntlid.get()));
        let expected = [
            (Type::SMART, cntlid),
            (Type::FORMAT_COMPLETION, 2),
            (Type::FORMAT_START, 2),
            (Type::POWER_ON_OR_RESET, 2),
            (Type::POWER_ON_OR_RESET, 1),
        ];
        assert_eq!(told.collect::<Vec<_>>(), expected);
    }
    // A controller with many events has its own dropped.
    for nth in 0..100u64 {
        set_timestamp(&mut w.hosts[0], (nth << 32).to_le_bytes());
    }
    let (_, events) = read(&mut w.hosts[0]);
    assert_eq!(events.len(), 65);
    let of_another = events.iter().filter(|(event, _)| event.cntlid.get() == 2);
    assert_eq!(of_another.count(), 3);
    // Where both have many, each keeps half.
    for nth in 0..100u64 {
        set_timestamp(&mut w.hosts[1], (nth << 32).to_le_bytes());
    }
    let (_, events) = read(&mut w.hosts[0]);
    let of_another = events.iter().filter(|(event, _)| event.cntlid.get() == 2);
    assert_eq!((events.len(), of_another.count()), (65, 32));
    // Events stay when their controller is removed, and later controllers find them.
    w.hosts.remove(1);
    let (_, events) = read(&mut w.hosts[0]);
    assert_eq!(events.len(), 65);
}

#[test]
fn event_log_and_context_survive_process() {
    let mut h = Host::ready();
    set_timestamp(&mut h, [1, 0, 0, 0, 0, 0, 0, 0]);
    let before = types(&mut h);
    assert_eq!(before, [Type::TIMESTAMP_CHANGE, Type::POWER_ON_OR_RESET]);
    let (status, first) = get(&mut h, Action::ESTABLISH_AND_READ_HEADER, HEADER, 0);
    assert_eq!(status, Status::SUCCESS);
    h.die();
    let (status, page) = get(&mut h, Action::READ, HEADER, 0);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(page[4..16], first[4..16], "as many events");
    assert_eq!(types(&mut h), before);
    let write = h.rw(NvmOpcode::WRITE, 1, 0, 1, DATA);
    assert_eq!(h.io(write), Status::SUCCESS);
}
