//! Format NVM that changes the size of a namespace's blocks.

mod lasting;
pub mod store;

use crate::common::*;
use controller::{ConfigError, Controller, ControllerConfig, NamespaceConfig};
use nvme::aen::{AsyncEvent, Notice};
use nvme::cmd::io::RwCdw12;
use nvme::feature::Fid;
use nvme::identify::IdentifyNamespace;
use nvme::log::Lid;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::Arc;
use std::time::Instant;
use store::TestStore;
use volume::{Effect, Fault, Faults, Io, IoOptions, OpKind, Volume};
use zerocopy::FromBytes;

const ALL: u32 = 0xffff_ffff;
/// Bytes of each namespace.
const SIZE: u64 = 1 << 20;

/// What there is of a namespace below.
struct Below {
    store: Arc<TestStore>,
    volume: Arc<dyn Volume>,
    faults: Arc<Faults>,
}

/// A namespace with formats 0 and 1 of blocks of 512 and 4096 bytes; with `first` of 4096, the
/// other way round.
fn namespace(nsid: u32, first: u32) -> (NamespaceConfig, Below) {
    let (volume, faults) = faulty(SIZE);
    let store = TestStore::new(first);
    let config = NamespaceConfig {
        formats: Some(store.formats(first)),
        ..ns(nsid, volume.clone(), first)
    };
    let below = Below {
        store,
        volume,
        faults,
    };
    (config, below)
}

/// Namespaces 1 (of 512 bytes) and 3 (of 4096), full of data.
fn host() -> (Host, Below, Below) {
    let (one, below_one) = namespace(1, 512);
    let (three, below_three) = namespace(3, 4096);
    let config = ControllerConfig {
        max_namespaces: 4,
        ..Default::default()
    };
    let mut h = Host::with(config, vec![one, three]);
    h.enable();
    h.create_pair(1, 64);
    for nsid in [1, 3] {
        fill(&mut h, nsid, 0x5a);
    }
    let (stores, kept) = (below_one.store.clone(), below_three.store.clone());
    h.reload = Some(Box::new(move |ns| match ns.nsid {
        1 => ns.block_size = stores.kept(),
        3 => ns.block_size = kept.kept(),
        _ => {}
    }));
    (h, below_one, below_three)
}

fn identify(h: &mut Host, nsid: u32) -> IdentifyNamespace {
    let (status, page) = h.identify(0, nsid, 0);
    assert_eq!(status, Status::SUCCESS);
    IdentifyNamespace::read_from_bytes(&page).unwrap()
}

/// Bytes of a block, as the host finds it.
fn block(h: &mut Host, nsid: u32) -> u64 {
    let ns = identify(h, nsid);
    let size = u64::from(ns.formatted().unwrap().block_size().unwrap());
    assert_eq!((ns.nsze.get() * size, ns.ncap), (SIZE, ns.nsze));
    assert_eq!(ns.nvmcap.get(), u128::from(SIZE));
    size
}

/// Writes every block.
fn fill(h: &mut Host, nsid: u32, byte: u8) {
    let at_once = 64 << 10;
    h.write(DATA, &vec![byte; at_once]);
    let size = block(h, nsid);
    let blocks = at_once as u64 / size;
    for slba in (0..SIZE / size).step_by(blocks as usize) {
        let mut command = h.rw(NvmOpcode::WRITE, nsid, slba, blocks as u32, DATA);
        h.prps(&mut command, DATA, at_once as u64, LISTS);
        assert_eq!(h.io(command), Status::SUCCESS);
    }
}

/// Where PRP lists lie.
const LISTS: u64 = DATA + (1 << 20);

fn put(h: &mut Host, nsid: u32, slba: u64, byte: u8) -> Status {
    let size = block(h, nsid) as usize;
    h.write(DATA, &vec![byte; size]);
    let command = h.rw(NvmOpcode::WRITE, nsid, slba, 1, DATA);
    h.io(command)
}

fn get(h: &mut Host, nsid: u32, slba: u64) -> Vec<u8> {
    let size = block(h, nsid) as usize;
    h.write(DATA, &[0xee; 4096]);
    let command = h.rw(NvmOpcode::READ, nsid, slba, 1, DATA);
    assert_eq!(h.io(command), Status::SUCCESS, "{nsid} {slba}");
    assert_eq!(h.read(DATA, 4096)[size..], vec![0xee; 4096 - size]);
    h.read(DATA, size)
}

/// All that the volume has.
fn content(below: &Below) -> Vec<u8> {
    let io = Io::new(IoOptions::default());
    let mut queue = below.volume.inner().unwrap().open(&io).unwrap();
    let mut all = Vec::new();
    let len = 64 << 10;
    for offset in (0..SIZE).step_by(len) {
        let done = queue.submit(volume::Request::transfer(
            0,
            volume::Op::Read,
            offset,
            dma::SegmentList::owned(dma::Buffer::new(len)),
        ));
        let mut done = done.unwrap();
        assert_eq!(done.result, Ok(()));
        all.extend(done.data.buffer().unwrap().iter());
    }
    all
}

fn is_zero(below: &Below) -> bool {
    content(below).iter().all(|byte| *byte == 0)
}

fn format(nsid: u32, cdw10: u32) -> Command {
    let mut command = Command::new(AdminOpcode::FORMAT_NVM.0, 0, nsid);
    command.cdw10 = cdw10.into();
    command
}

/// Runs until nothing is left to be done.
fn rest(h: &mut Host) {
    h.until(|h| {
        // A process may have begun since.
        h.now = h.now.max(Instant::now());
        !h.round() && h.c.in_flight() == 0 && h.c.deadline().is_none()
    });
}

fn reset(h: &mut Host) {
    h.disable();
    h.until(|h| !h.csts().rdy());
    h.enable();
    h.create_pair(1, 64);
}

fn held(op: OpKind) -> Fault {
    Fault::always(op, Effect::Hold)
}

#[test]
fn format_changes_block_size_and_back() {
    let (mut h, one, three) = host();
    let before = identify(&mut h, 1);
    assert_eq!((before.nlbaf_z, before.flbas.into_bits()), (1, 0));
    assert_eq!((before.lbaf[0].lbads, before.lbaf[1].lbads), (9, 12));
    assert_eq!(before.nsze.get(), 2048);
    for (lbaf, size) in [(1, 4096), (0, 512), (1, 4096), (1, 4096)] {
        let blocks = SIZE / size;
        assert_eq!(h.admin(format(1, lbaf)).status(), Status::SUCCESS);
        let ns = identify(&mut h, 1);
        assert_eq!(u32::from(ns.flbas.into_bits()), lbaf);
        assert_eq!(
            (block(&mut h, 1), u64::from(one.store.kept())),
            (size, size)
        );
        assert_eq!((ns.nguid, ns.lbaf), (before.nguid, before.lbaf));
        assert_eq!(u64::from(ns.npwg_z.get()), (4096 / size).max(1) - 1);
        assert!(is_zero(&one));
        for slba in [0, 1, blocks - 1] {
            assert_eq!(get(&mut h, 1, slba), vec![0; size as usize]);
            assert_eq!(put(&mut h, 1, slba, 0xa5), Status::SUCCESS);
            assert_eq!(get(&mut h, 1, slba), vec![0xa5; size as usize]);
        }
        let last = size as usize;
        let (all, end) = (content(&one), SIZE as usize);
        assert!(all[end - last..].iter().all(|byte| *byte == 0xa5));
        assert_eq!(all[end - last - 1], 0);
        assert_eq!(plain(put(&mut h, 1, blocks, 1)), Status::LBA_OUT_OF_RANGE);
    }
    // Its neighbour is as it was.
    assert_eq!(block(&mut h, 3), 4096);
    assert!(content(&three).iter().all(|byte| *byte == 0x5a));
    assert_eq!(h.c.deadline(), None);
    // Only what was another one before was kept.
    assert_eq!(one.store.saves(), [4096, 512, 4096]);
}

#[test]
fn format_notifies_host_of_namespace_change() {
    let (mut h, ..) = host();
    h.set_feature(Fid::ASYNC_EVENT_CONFIG, 1 << 8);
    for (lbaf, told) in [(1, true), (1, false), (0, true)] {
        let aer = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
        let aer = h.submit(0, aer);
        let cid = h.submit(0, format(1, lbaf));
        rest(&mut h);
        let mut done = h.reap_all(0);
        done.sort_by_key(|done| done.cid.get());
        let cids: Vec<u16> = done.iter().map(|done| done.cid.get()).collect();
        if !told {
            assert_eq!(cids, [cid]);
            reset(&mut h);
            h.set_feature(Fid::ASYNC_EVENT_CONFIG, 1 << 8);
            continue;
        }
        assert_eq!(cids, [aer, cid]);
        let notice = Notice::NAMESPACE_ATTRIBUTE_CHANGED;
        let notice = AsyncEvent::notice(notice, Lid::CHANGED_NAMESPACE_LIST);
        assert_eq!(done[0].dw0.get(), notice.into_bits());
        let (_, changed) = h.log(Lid::CHANGED_NAMESPACE_LIST.0, 4096, 0, false);
        assert_eq!(changed[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    }
}

#[test]
fn unsupported_format_is_refused() {
    let (mut h, one, _) = host();
    for (nsid, cdw10) in [
        (1, 2),
        (1, 15),
        (1, 1 << 12),
        (1, 1 | 1 << 12),
        (1, 1 | 1 << 5),
        (ALL, 2),
    ] {
        let status = h.admin(format(nsid, cdw10)).status();
        assert_eq!(
            plain(status),
            Status::INVALID_FORMAT,
            "{nsid:#x} {cdw10:#x}"
        );
        assert!(status.dnr());
    }
    let status = h.admin(format(1, 1 | 2 << 9)).status();
    assert_eq!(plain(status), Status::INVALID_FIELD);
    assert!(content(&one).iter().all(|byte| *byte == 0x5a));
    assert_eq!((block(&mut h, 1), one.store.saves()), (512, vec![]));
    assert_eq!(put(&mut h, 1, 0, 1), Status::SUCCESS);
}

/// All of them have to be able to.
#[test]
fn format_of_all_namespaces_is_all_or_nothing() {
    let (one, below) = namespace(1, 512);
    let config = ControllerConfig::default();
    let mut h = Host::with(config, vec![one, ns(2, mem(SIZE), 512)]);
    h.enable();
    h.create_pair(1, 64);
    fill(&mut h, 1, 0x5a);
    let status = h.admin(format(ALL, 1)).status();
    assert_eq!(plain(status), Status::INVALID_FORMAT);
    assert!(content(&below).iter().all(|byte| *byte == 0x5a));
    assert_eq!(h.admin(format(2, 0)).status(), Status::SUCCESS);
    // By their indices, which may mean different sizes.
    let (mut h, one, three) = host();
    assert_eq!(h.admin(format(ALL, 1)).status(), Status::SUCCESS);
    assert_eq!((block(&mut h, 1), block(&mut h, 3)), (4096, 512));
    assert_eq!((one.store.kept(), three.store.kept()), (4096, 512));
    assert!(is_zero(&one) && is_zero(&three));
    for nsid in [1, 3] {
        fill(&mut h, nsid, 0xa5);
    }
    assert!(content(&one).iter().all(|byte| *byte == 0xa5));
    assert!(content(&three).iter().all(|byte| *byte == 0xa5));
}

#[test]
fn volume_decides_supported_formats() {
    let with = |size: u64, block: u32, first: u32| {
        let volume = described(mem(size), move |info| volume::Info {
            block_size: block,
            ..info
        });
        let store = TestStore::new(first);
        let config = NamespaceConfig {
            formats: Some(store.formats(first)),
            ..ns(1, volume, first)
        };
        let mut h = Host::ready_with(vec![config]);
        let (_, page) = h.identify(0, 1, 0);
        let ns = IdentifyNamespace::read_from_bytes(&page).unwrap();
        let shown: Vec<u8> = ns.lbaf.iter().map(|format| format.lbads).collect();
        let other = h.admin(format(1, 1)).status();
        (ns.nlbaf_z, shown[..3].to_vec(), plain(other))
    };
    let refused = Status::INVALID_FORMAT;
    assert_eq!(with(SIZE, 512, 512), (1, vec![9, 12, 0], Status::SUCCESS));
    assert_eq!(with(SIZE, 512, 4096), (1, vec![12, 9, 0], Status::SUCCESS));
    assert_eq!(with(SIZE, 4096, 4096), (0, vec![12, 0, 0], refused));
    assert_eq!(with(SIZE + 512, 512, 512), (0, vec![9, 0, 0], refused));
    // What a namespace keeps account of in blocks has one format.
    let (mut config, _) = namespace(1, 512);
    let layout = protection::Layout {
        block: 512,
        metadata: 8,
        extended: false,
        protection: None,
    };
    let metadata = controller::MetadataState::in_memory(layout, SIZE / 512).unwrap();
    config.metadata = Some(Arc::new(metadata));
    let io = Io::new(IoOptions::default());
    let made = Controller::new(3, ControllerConfig::default(), vec![config], &io);
    assert!(matches!(made.err(), Some(ConfigError::FixedFormat(1))));
}

/// What is in flight has the old blocks: it is over before anything is erased.
#[test]
fn commands_in_flight_keep_old_block_size() {
    for opcode in [NvmOpcode::WRITE, NvmOpcode::WRITE_ZEROES, NvmOpcode::COPY] {
        let (mut h, one, _) = host();
        let op = match opcode {
            NvmOpcode::WRITE_ZEROES => OpKind::WriteZeroes,
            NvmOpcode::COPY => OpKind::Read,
            _ => OpKind::Write,
        };
        one.faults.add(held(op));
        h.write(DATA, &[0xa5; 4096]);
        let mut command = h.rw(opcode, 1, 1024, 8, DATA);
        if opcode == NvmOpcode::COPY {
            let mut range = [0; 32];
            range[16..18].copy_from_slice(&7u16.to_le_bytes());
            h.write(DATA, &range);
            command.cdw12 = 0.into();
        } else {
            command.cdw12 = RwCdw12::new().with_nlb_z(7).into_bits().into();
        }
        let first = h.submit(1, command);
        h.run_held(&one.faults, 1);
        let cid = h.submit(0, format(1, 1));
        for _ in 0..8 {
            h.round();
        }
        assert!(h.reap(0).is_none(), "it has not waited");
        assert!(one.store.saves().is_empty());
        // Later commands are refused, with whichever blocks.
        let late = h.rw(NvmOpcode::WRITE, 1, 255, 1, DATA);
        let late = h.submit(1, late);
        one.faults.clear();
        one.faults.release();
        rest(&mut h);
        let done = h.reap(0).unwrap();
        assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
        let mut over = h.reap_all(1);
        over.sort_by_key(|done| done.cid.get());
        let ends: Vec<_> = over
            .iter()
            .map(|d| (d.cid.get(), plain(d.status())))
            .collect();
        let ended = (first, Status::SUCCESS);
        assert_eq!(
            ends,
            [ended, (late, Status::FORMAT_IN_PROGRESS)],
            "{opcode}"
        );
        assert!(is_zero(&one), "{opcode}");
        assert_eq!(block(&mut h, 1), 4096);
    }
}

/// Until it is kept nothing has changed for the host, and the namespace is closed.
#[test]
fn format_waits_until_stored() {
    let (mut h, one, _) = host();
    one.store.hold();
    let cid = h.submit(0, format(1, 1));
    rest(&mut h);
    assert_eq!(one.store.saves(), [4096]);
    assert!(h.reap(0).is_none());
    assert_eq!(block(&mut h, 1), 512);
    assert_eq!(plain(put(&mut h, 1, 0, 1)), Status::FORMAT_IN_PROGRESS);
    assert_eq!(h.c.deadline(), None, "it is woken");
    one.store.release();
    rest(&mut h);
    let done = h.reap(0).unwrap();
    assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
    assert_eq!(block(&mut h, 1), 4096);
}

#[test]
fn failed_format_store_changes_nothing() {
    let (mut h, one, three) = host();
    one.store.fail(true);
    let status = h.admin(format(1, 1)).status();
    assert_eq!(plain(status), Status::INTERNAL_ERROR);
    assert_eq!(block(&mut h, 1), 512);
    assert_eq!(put(&mut h, 1, 2047, 1), Status::SUCCESS);
    // Of several, those that are kept count.
    one.store.fail(false);
    three.store.fail(true);
    let status = h.admin(format(ALL, 1)).status();
    assert_eq!(plain(status), Status::INTERNAL_ERROR);
    assert_eq!((block(&mut h, 1), block(&mut h, 3)), (4096, 4096));
    assert_eq!((one.store.kept(), three.store.kept()), (4096, 4096));
    // What cannot be erased is not formatted.
    let (mut h, one, _) = host();
    let error = volume::IoError::from(volume::IoErrorKind::MediaWrite);
    let fault = Fault::always(OpKind::WriteZeroes, Effect::FailLater(error));
    one.faults.add(fault);
    let status = h.admin(format(1, 1)).status();
    assert_eq!(plain(status), Status::WRITE_FAULT);
    assert_eq!((block(&mut h, 1), one.store.saves()), (512, vec![]));
}

fn is_not_ready(h: &mut Host) {
    let status = put(h, 1, 0, 1);
    assert_eq!(plain(status), Status::NAMESPACE_NOT_READY);
    assert!(status.dnr());
    assert_eq!(put(h, 3, 0, 1), Status::SUCCESS);
}

/// Nobody uses the namespace, and no reset or other command opens it, until a format is kept.
#[test]
fn unknown_format_closes_namespace_until_stored() {
    for fails in [false, true] {
        let (mut h, one, _) = host();
        let store = &one.store;
        store.lose(true);
        store.fail(fails);
        let status = h.admin(format(1, 1)).status();
        assert_eq!(plain(status), Status::INTERNAL_ERROR);
        assert_eq!(block(&mut h, 1), 512);
        is_not_ready(&mut h);
        reset(&mut h);
        is_not_ready(&mut h);
        // With others, too.
        for command in [format(3, 0), format(ALL, 1), {
            let mut sanitize = Command::new(AdminOpcode::SANITIZE.0, 0, 0);
            sanitize.cdw10 = 2.into();
            sanitize
        }] {
            h.admin(command);
            rest(&mut h);
            is_not_ready(&mut h);
        }
        // Of which one the store says that it is the one before is not known either.
        store.lose(false);
        store.fail(true);
        let status = h.admin(format(1, 1)).status();
        assert_eq!(plain(status), Status::INTERNAL_ERROR);
        is_not_ready(&mut h);
        // A format ends before it is kept by a reset.
        store.fail(false);
        let saves = store.saves();
        one.faults.add(held(OpKind::WriteZeroes));
        h.submit(0, format(1, 0));
        h.run_held(&one.faults, 1);
        h.disable();
        one.faults.clear();
        one.faults.release();
        h.until(|h| !h.csts().rdy());
        h.enable();
        h.create_pair(1, 64);
        rest(&mut h);
        assert_eq!(store.saves(), saves);
        is_not_ready(&mut h);
        // The one that it had is another one then.
        assert_eq!(h.admin(format(1, 0)).status(), Status::SUCCESS);
        assert_eq!((block(&mut h, 1), store.kept()), (512, 512));
        assert_eq!(store.saves().len(), saves.len() + 1);
        assert_eq!(put(&mut h, 1, 2047, 1), Status::SUCCESS);
        assert_eq!(h.admin(format(1, 0)).status(), Status::SUCCESS);
        assert_eq!(store.saves().len(), saves.len() + 1);
    }
}

/// What is attached in its place is open.
#[test]
fn replacement_of_closed_namespace_is_open() {
    let (mut h, one, _) = host();
    one.store.lose(true);
    h.admin(format(1, 1));
    is_not_ready(&mut h);
    assert!(h.c.detach(1));
    rest(&mut h);
    let (config, two) = namespace(1, 512);
    h.c.attach(config, &h.io).unwrap();
    rest(&mut h);
    assert_eq!(put(&mut h, 1, 0, 1), Status::SUCCESS);
    two.store.fail(true);
    assert_ne!(h.admin(format(1, 1)).status(), Status::SUCCESS);
    assert_eq!(put(&mut h, 1, 0, 1), Status::SUCCESS);
    assert_eq!(h.admin(format(1, 0)).status(), Status::SUCCESS);
    assert_eq!(put(&mut h, 1, 0, 1), Status::SUCCESS);
}

/// Nor is one that has come before the answer.
#[test]
fn late_store_answer_does_not_change_new_namespace() {
    let (mut h, one, _) = host();
    one.store.lose(true);
    one.store.hold();
    h.submit(0, format(1, 1));
    rest(&mut h);
    assert!(h.c.detach(1));
    rest(&mut h);
    let (config, two) = namespace(1, 512);
    h.c.attach(config, &h.io).unwrap();
    one.store.release();
    rest(&mut h);
    assert_eq!(plain(h.reap(0).unwrap().status()), Status::INTERNAL_ERROR);
    assert_eq!(put(&mut h, 1, 2047, 1), Status::SUCCESS);
    two.store.fail(true);
    assert_ne!(h.admin(format(1, 1)).status(), Status::SUCCESS);
    assert_eq!(put(&mut h, 1, 2047, 1), Status::SUCCESS);
}

/// They are of blocks that are there no more.
#[test]
fn format_clears_marked_blocks() {
    let (mut h, ..) = host();
    let mark = h.rw(NvmOpcode::WRITE_UNCORRECTABLE, 1, 3, 1, DATA);
    assert_eq!(h.io(mark), Status::SUCCESS);
    let read = h.rw(NvmOpcode::READ, 1, 3, 1, DATA);
    assert_eq!(plain(h.io(read)), Status::UNRECOVERED_READ_ERROR);
    assert_eq!(h.admin(format(1, 1)).status(), Status::SUCCESS);
    assert_eq!(get(&mut h, 1, 3), vec![0; 4096]);
    assert_eq!(get(&mut h, 1, 0), vec![0; 4096]);
}
