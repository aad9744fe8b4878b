//! Commands of an ordinary guest: they do what they say, on the slice, with no copy.

use crate::common::model::{Config, Fate, Model};
use crate::common::*;
use driver::Options;
use mediate::{DirectOptions, DirectQueue, Slice};
use nvme::cmd::io::{DsmCdw10, DsmCdw11, RwCdw12, WriteZeroesCdw12};
use nvme::cmd::{Fuse, Psdt};
use nvme::sgl::SglDescriptor;
use nvme::{Command, NvmOpcode, Status};
use zerocopy::IntoBytes;

const FIRST: u64 = 1000;
const BLOCKS: u64 = 2000;
const MEMORY: u64 = 8 << 20;
const LIST: u64 = BASE + (6 << 20);

fn guest_on(config: Config, read_only: bool) -> (std::sync::Arc<Model>, driver::Device, Guest) {
    let model = Model::new(config);
    let device = open(&model, Options::default());
    let namespace = device.namespace(1).unwrap();
    let slice = Slice::new(&namespace, FIRST, BLOCKS, read_only).unwrap();
    let guest = Guest::new(&device, slice, MEMORY);
    model.take_log();
    (model, device, guest)
}

fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len)
        .map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ seed) as u8)
        .collect()
}

#[test]
fn reads_and_writes_of_every_shape_move_right_bytes() {
    for (sgl, mdts) in [(false, 8), (true, 8), (false, 1), (true, 2), (false, 0)] {
        let config = Config {
            sgl,
            mdts,
            ..Config::default()
        };
        let (model, _device, mut guest) = guest_on(config, false);
        for (data, blocks) in [
            (0u64, 1u32),
            (0, 8),
            (512, 8),
            (4, 1),
            (4092, 1),
            (4, 8),
            (0, 16),
            (0, 17),
            (2048, 16),
            (0, 64),
            (8, 64),
            (0, 500),
            (4092, 1024),
            (0, 1999),
        ] {
            let len = u64::from(blocks) * 512;
            let lba = (BLOCKS - u64::from(blocks)).min(u64::from(blocks) * 3);
            let bytes = pattern(len, len ^ data);
            guest.write_memory(BASE + data, &bytes);
            // A list that ends its page after a few entries, so that it chains.
            let list = LIST + 4096 - 8 * 5;
            let mut write = rw(NvmOpcode::WRITE, lba, blocks, 0, 0);
            prps(&guest, &mut write, BASE + data, len, list);
            assert_eq!(guest.run(&write), Status::SUCCESS, "{blocks} at {data}");
            let at = ((FIRST + lba) * 512) as usize;
            assert!(
                model.disk()[at..at + bytes.len()] == bytes,
                "{blocks} at {data}"
            );

            let to = BASE + (3 << 20) + data;
            let mut read = rw(NvmOpcode::READ, lba, blocks, 0, 0);
            prps(&guest, &mut read, to, len, list);
            assert_eq!(guest.run(&read), Status::SUCCESS);
            assert!(guest.read_memory(to, len as usize) == bytes);
            let mut compare = read;
            compare.opcode = NvmOpcode::COMPARE.0;
            assert_eq!(guest.run(&compare), Status::SUCCESS);
            guest.write_memory(to + len - 1, &[!bytes[len as usize - 1]]);
            assert_eq!(guest.run(&compare), Status::COMPARE_FAILURE);
        }
        let stats = guest.queue.stats();
        assert_eq!(stats.bounced(), 0);
        assert_eq!(stats.split() > 0, mdts == 1 || mdts == 2, "mdts {mdts}");
        assert!(model.faults().is_empty());
    }
}

#[test]
fn scattered_pages_and_sgls_keep_order() {
    for sgl in [false, true] {
        let config = Config {
            sgl,
            ..Config::default()
        };
        let (model, _device, mut guest) = guest_on(config, false);
        // Pages in an order of their own.
        let pages: Vec<u64> = (0..9).map(|i| BASE + ((i * 7) % 9 + 20) * PAGE).collect();
        let bytes = pattern(9 * PAGE, 1);
        for (page, data) in pages.iter().zip(bytes.chunks(PAGE as usize)) {
            guest.write_memory(*page, data);
        }
        let list: Vec<u8> = pages[1..].iter().flat_map(|p| p.to_le_bytes()).collect();
        guest.write_memory(LIST, &list);
        let write = rw(NvmOpcode::WRITE, 8, 72, pages[0], LIST);
        assert_eq!(guest.run(&write), Status::SUCCESS);
        let at = ((FIRST + 8) * 512) as usize;
        assert!(model.disk()[at..at + bytes.len()] == bytes);

        // Pieces of odd lengths, over two segments: by an SGL if the device
        // has it, else through a copy.
        let bytes = pattern(4096, 7);
        let lens = [100u32, 4, 900, 1020, 8, 2064];
        let mut descriptors = Vec::new();
        let mut done = 0;
        for (i, len) in lens.iter().enumerate() {
            let at = BASE + 0x20_0000 + i as u64 * 0x3000 + 4;
            guest.write_memory(at, &bytes[done..done + *len as usize]);
            done += *len as usize;
            descriptors.push(SglDescriptor::data_block(at, *len));
        }
        let tail = descriptors.split_off(3);
        descriptors.push(SglDescriptor::last_segment(LIST + 0x1000, 48));
        guest.write_memory(LIST, descriptors.as_bytes());
        guest.write_memory(LIST + 0x1000, tail.as_bytes());
        let mut write = rw(NvmOpcode::WRITE, 0, 8, 0, 0);
        write.set_sgl(SglDescriptor::segment(LIST, 64));
        assert_eq!(guest.run(&write), Status::SUCCESS);
        let at = (FIRST * 512) as usize;
        assert!(model.disk()[at..at + 4096] == bytes);
        assert_eq!(guest.queue.stats().bounced(), u64::from(!sgl));
        // Back again by one descriptor.
        let mut read = rw(NvmOpcode::READ, 0, 8, 0, 0);
        read.set_sgl(SglDescriptor::data_block(BASE + 12, 4096));
        assert_eq!(guest.run(&read), Status::SUCCESS);
        assert!(guest.read_memory(BASE + 12, 4096) == bytes);
        assert!(model.faults().is_empty());
    }
}

/// Descriptors, and the address and length of each piece of memory that the data lies in.
type Shape<'a> = (&'a [SglDescriptor], &'a [(u64, u64)]);

/// An SGL that is longer than the data: the device is given the data's part of it, and nothing of
/// what is behind.
#[test]
fn sgl_longer_than_data_is_cut() {
    for sgl in [false, true] {
        let config = Config {
            sgl,
            ..Config::default()
        };
        let (model, _device, mut guest) = guest_on(config, false);
        let block = SglDescriptor::data_block;
        let top = BASE + MEMORY;
        let shapes: [Shape<'_>; 4] = [
            (&[block(BASE, 8192)], &[(BASE, 4096)]),
            // Where the guest has no memory any more.
            (&[block(top - 4096, u32::MAX)], &[(top - 4096, 4096)]),
            (&[block(BASE + 4, 4100)], &[(BASE + 4, 4096)]),
            (
                &[
                    block(BASE, 512),
                    block(BASE + 0x5000, 8192),
                    block(top, 512),
                    SglDescriptor::segment(top, 16),
                ],
                &[(BASE, 512), (BASE + 0x5000, 3584)],
            ),
        ];
        for (descriptors, used) in shapes {
            let command = |guest: &Guest, opcode| {
                let mut command = rw(opcode, 8, 8, 0, 0);
                match descriptors {
                    [one] => command.set_sgl(*one),
                    _ => {
                        guest.write_memory(LIST, descriptors.as_bytes());
                        let bytes = size_of_val(descriptors) as u32;
                        command.set_sgl(SglDescriptor::segment(LIST, bytes));
                    }
                }
                command
            };
            let bytes = pattern(4096, 11);
            let put = |guest: &Guest, bytes: &[u8]| {
                let mut rest = bytes;
                for (at, len) in used {
                    let (now, later) = rest.split_at(*len as usize);
                    guest.write_memory(*at, now);
                    rest = later;
                }
            };
            let behind = used.last().map(|(at, len)| at + len).unwrap();
            let behind = (behind < top).then_some(behind);
            model.set_disk((FIRST * 512) as usize, &vec![0; 32 * 512]);
            put(&guest, &bytes);
            if let Some(behind) = behind {
                guest.write_memory(behind, &[0xa5; 512]);
            }
            let write = command(&guest, NvmOpcode::WRITE);
            assert_eq!(guest.run(&write), Status::SUCCESS, "{descriptors:?}");
            let at = ((FIRST + 8) * 512) as usize;
            assert!(model.disk()[at..at + 4096] == bytes);
            assert!(model.disk()[at + 4096..at + 8192] == [0; 4096]);
            put(&guest, &[0; 4096]);
            let read = command(&guest, NvmOpcode::READ);
            assert_eq!(guest.run(&read), Status::SUCCESS);
            let got: Vec<u8> = used
                .iter()
                .flat_map(|(at, len)| guest.read_memory(*at, *len as usize))
                .collect();
            assert!(got == bytes, "{descriptors:?}");
            if let Some(behind) = behind {
                assert!(guest.read_memory(behind, 512) == [0xa5; 512]);
            }
        }
        // The ranges of Dataset Management, likewise.
        let mut trim = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 1, 1);
        trim.cdw11 = DsmCdw11::new().with_ad(true).into_bits().into();
        guest.write_memory(BASE, &[0; 16]);
        trim.set_sgl(block(BASE, 4096));
        assert_eq!(guest.run(&trim), Status::SUCCESS);
        // The model compares the length of each command's data with what its PRPs or SGL describe.
        assert!(model.faults().is_empty());
    }
}

#[test]
fn commands_without_data_are_translated() {
    let (model, _device, mut guest) = guest_on(Config::default(), false);
    model.set_disk(0, &vec![0xa5; 4096 * 512]);
    let mut zeroes = Command::new(NvmOpcode::WRITE_ZEROES.0, 1, 1);
    zeroes.set_slba(10);
    let cdw12 = WriteZeroesCdw12::new().with_nlb_z(4).with_deac(true);
    zeroes.cdw12 = cdw12.into_bits().into();
    assert_eq!(guest.run(&zeroes), Status::SUCCESS);
    let mut verify = rw(NvmOpcode::VERIFY, 1999, 1, 0, 0);
    assert_eq!(guest.run(&verify), Status::SUCCESS);
    verify.set_slba(2000);
    assert_eq!(guest.run(&verify), Status::LBA_OUT_OF_RANGE.with_dnr(true));
    assert_eq!(
        guest.run(&Command::new(NvmOpcode::FLUSH.0, 0, 1)),
        Status::SUCCESS
    );

    let ranges: [(u64, u64); 4] = [(100, 1), (0, 0), (1990, 10), (50, 7)];
    let bytes: Vec<u8> = ranges
        .iter()
        .flat_map(|(lba, nlb)| [nlb << 32 | 0xffff, *lba])
        .flat_map(u64::to_le_bytes)
        .collect();
    // Over a page border, by two PRPs.
    let at = BASE + PAGE - 24;
    guest.write_memory(at, &bytes);
    let mut dsm = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, 1);
    dsm.cdw10 = DsmCdw10::new().with_nr_z(3).into_bits().into();
    dsm.cdw11 = DsmCdw11::new().with_ad(true).into_bits().into();
    dsm.set_prps(at, BASE + PAGE);
    assert_eq!(guest.run(&dsm), Status::SUCCESS);
    let disk = model.disk();
    for lba in 0..4096u64 {
        let zero = [(1010, 5), (1100, 1), (2990, 10), (1050, 7)]
            .iter()
            .any(|(first, n)| (*first..first + n).contains(&lba));
        let block = &disk[lba as usize * 512..][..512];
        assert!(
            block.iter().all(|&b| b == if zero { 0 } else { 0xa5 }),
            "{lba}"
        );
    }
    // One range over the edge: none of it happens.
    let log = model.take_log().len();
    guest.write_memory(at + 40, &1991u64.to_le_bytes());
    assert_eq!(guest.run(&dsm), Status::LBA_OUT_OF_RANGE.with_dnr(true));
    assert!(log > 0 && model.take_log().is_empty());
}

#[test]
fn invalid_commands_are_refused_before_device() {
    let (model, _device, mut guest) = guest_on(Config::default(), true);
    let read = rw(NvmOpcode::READ, 0, 8, BASE, 0);
    let dnr = |status: Status| status.with_dnr(true);
    let mut cases: Vec<(Command, Status)> = Vec::new();
    let mut with = |change: &dyn Fn(&mut Command), status| {
        let mut command = read;
        change(&mut command);
        cases.push((command, status));
    };
    for fuse in [Fuse::FIRST, Fuse::SECOND, Fuse(3)] {
        with(&|c| c.flags.set_fuse(fuse), dnr(Status::INVALID_FIELD));
    }
    with(&|c| c.flags.set_psdt(Psdt(3)), dnr(Status::INVALID_FIELD));
    for nsid in [0, 2, u32::MAX] {
        let status = dnr(Status::INVALID_NAMESPACE_OR_FORMAT);
        with(&|c| c.nsid = nsid.into(), status);
    }
    for lba in [BLOCKS - 7, BLOCKS, u64::MAX, u64::MAX - 7, 1 << 63] {
        with(&|c| c.set_slba(lba), dnr(Status::LBA_OUT_OF_RANGE));
    }
    for opcode in [NvmOpcode::WRITE, NvmOpcode::WRITE_ZEROES] {
        let status = dnr(Status::NAMESPACE_WRITE_PROTECTED);
        with(&|c| c.opcode = opcode.0, status);
    }
    for opcode in [0x04, 0x0d, 0x11, 0x12, 0x19, 0x1d, 0x7f, 0x80, 0xff] {
        with(&|c| c.opcode = opcode, dnr(Status::INVALID_OPCODE));
    }
    with(
        &|c| c.set_prps(BASE + 1, 0),
        dnr(Status::PRP_OFFSET_INVALID),
    );
    with(
        &|c| c.set_prps(BASE + 8, BASE + 12),
        dnr(Status::PRP_OFFSET_INVALID),
    );
    with(&|c| c.set_prps(BASE - 4096, 0), Status::DATA_TRANSFER_ERROR);
    with(
        &|c| c.set_prps(BASE + MEMORY, 0),
        Status::DATA_TRANSFER_ERROR,
    );
    with(
        &|c| c.set_prps(BASE + MEMORY - 512, BASE + MEMORY),
        Status::DATA_TRANSFER_ERROR,
    );
    with(
        &|c| c.set_prps(u64::MAX - 4095, 0),
        Status::DATA_TRANSFER_ERROR,
    );
    let sgl = |c: &mut Command, address, len| c.set_sgl(SglDescriptor::data_block(address, len));
    with(
        &|c| sgl(c, BASE, 4095),
        dnr(Status::DATA_SGL_LENGTH_INVALID),
    );
    with(
        &|c| sgl(c, BASE + MEMORY - 1, 4096),
        Status::DATA_TRANSFER_ERROR,
    );
    for (command, status) in &cases {
        assert_eq!(guest.run(command), *status, "{command:?}");
    }
    assert!(model.take_log().is_empty());
    assert_eq!(guest.queue.stats().refused(), cases.len() as u64);
    // The guest's own limit of a transfer.
    let mut large = rw(NvmOpcode::READ, 0, 1999, 0, 0);
    prps(&guest, &mut large, BASE, 1999 * 512, LIST);
    assert_eq!(guest.run(&large), Status::SUCCESS);
    let mut options = DirectOptions::new(1, guest.slice);
    options.max_transfer = 64 << 10;
    guest.queue = guest.queue.share(options).unwrap();
    assert_eq!(guest.run(&large), dnr(Status::INVALID_FIELD));
}

#[test]
fn reserved_fields_of_guest_do_not_reach_device() {
    let (model, _device, mut guest) = guest_on(Config::default(), false);
    let mut command = rw(NvmOpcode::WRITE, 3, 8, BASE, 0xdead_beef_0000);
    command.cid = 0xabcd.into();
    command.cdw2 = u32::MAX.into();
    command.cdw3 = u32::MAX.into();
    command.mptr = u64::MAX.into();
    for dword in [&mut command.cdw13, &mut command.cdw14, &mut command.cdw15] {
        *dword = u32::MAX.into();
    }
    let all = RwCdw12::from_bits(!0xffff | 7);
    command.cdw12 = all.into_bits().into();
    assert_eq!(guest.run(&command), Status::SUCCESS);
    let seen = model.take_log().remove(0).command;
    assert_eq!((seen.nsid.get(), seen.slba()), (1, FIRST + 3));
    assert_eq!(
        (seen.cdw2.get(), seen.cdw3.get(), seen.mptr.get()),
        (0, 0, 0)
    );
    assert_eq!(
        (seen.cdw13.get(), seen.cdw14.get(), seen.cdw15.get()),
        (0, 0, 0)
    );
    let kept = RwCdw12::new().with_nlb_z(7).with_fua(true).with_lr(true);
    assert_eq!(seen.cdw12.get(), kept.into_bits());
    assert_eq!(seen.prp2(), 0);
    // With the write cache off, every write is durable.
    guest.queue.set_write_cache(false);
    assert_eq!(
        guest.run(&rw(NvmOpcode::WRITE, 3, 8, BASE, 0)),
        Status::SUCCESS
    );
    assert_eq!(
        guest.run(&rw(NvmOpcode::READ, 3, 8, BASE, 0)),
        Status::SUCCESS
    );
    let log = model.take_log();
    let fua = |i: usize| RwCdw12::from_bits(log[i].command.cdw12.get()).fua();
    assert!(fua(0) && !fua(1));
}

#[test]
fn device_status_and_result_are_returned_unchanged() {
    let (model, _device, mut guest) = guest_on(Config::default(), false);
    let read = rw(NvmOpcode::READ, 0, 8, BASE, 0);
    let all = Status::UNRECOVERED_READ_ERROR
        .with_dnr(true)
        .with_more(true)
        .with_crd(2);
    for (status, dw0) in [
        (all, 0x1234_5678),
        (Status::from_bits(0x7fff), u32::MAX),
        (Status::from_bits(0x2ff), 0),
        (Status::SUCCESS, 0xcafe),
    ] {
        model.hook(move |_| Fate::End(status, dw0));
        let token = guest.submit(&read).unwrap();
        assert_eq!(guest.wait(token), (status, dw0));
    }
    // A completion that comes twice is nobody's the second time.
    model.hook(|_| Fate::Twice);
    for _ in 0..50 {
        assert_eq!(guest.run(&read), Status::SUCCESS);
    }
    guest.drain();
    assert!(guest.ended.is_empty());
}

#[test]
fn batch_rings_one_doorbell_and_fills_queue() {
    let model = Model::new(Config::default());
    let device = open(&model, Options::default());
    let slice = Slice::whole(&device.namespace(1).unwrap(), false).unwrap();
    let mut options = DirectOptions::new(1, slice);
    options.depth = 20;
    let mut guest = Guest::with(&device, options, MEMORY);
    model.freeze(true);
    let read = rw(NvmOpcode::READ, 0, 8, BASE, 0);
    for left in (1..=20).rev() {
        assert_eq!(guest.queue.room(), left);
        guest.submit(&read).unwrap();
    }
    assert_eq!(guest.queue.room(), 0);
    assert_eq!(guest.submit(&read), Err(Status::COMMAND_INTERRUPTED));
    guest.queue.ring();
    guest.poll();
    assert_eq!((guest.queue.in_flight(), guest.ended.len()), (20, 0));
    model.freeze(false);
    guest.drain();
    assert_eq!(guest.ended.len(), 20);
    assert_eq!(guest.queue.room(), 20);
    let stats = guest.queue.stats();
    assert_eq!(
        (
            stats.translate.summary().count,
            stats.complete.summary().count
        ),
        (20, 20)
    );
    stats.set_measuring(false);
    assert_eq!(guest.run(&read), Status::SUCCESS);
    assert_eq!(
        (stats_count(&guest.queue), guest.queue.stats().commands()),
        (20, 21)
    );
}

fn stats_count(queue: &DirectQueue) -> u64 {
    queue.stats().translate.summary().count
}
