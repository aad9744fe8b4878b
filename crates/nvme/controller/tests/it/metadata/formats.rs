//! Format NVM between blocks with and without metadata: what the host is told of the formats, what
//! it can do with each, and what is there when the process has died meanwhile.

use crate::common::*;
use crate::metadata::store::TestStore;
use crate::metadata::world::*;
use controller::{BlockFormat, ConfigError, Controller, ControllerConfig, Formats};
use controller::{MetadataState, NamespaceConfig};
use nvme::aen::{AsyncEvent, Notice};
use nvme::feature::{Fid, HostBehavior};
use nvme::identify::{IdentifyNamespace, NvmController, NvmNamespace};
use nvme::log::Lid;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use protection::{Guard, StorageTag, Type};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;
use volume::{Effect, Fault, Io, IoOptions, OpKind, Volume};
use zerocopy::FromBytes;

/// Bytes of the namespace.
pub const SIZE: u64 = 64 << 12;
/// The formats by their indices: data, metadata, guard.
const FORMATS: [(u32, u16, Guard); 12] = [
    (512, 0, Guard::Bits16),
    (4096, 0, Guard::Bits16),
    (512, 8, Guard::Bits16),
    (512, 16, Guard::Bits16),
    (512, 64, Guard::Bits16),
    (4096, 8, Guard::Bits16),
    (4096, 16, Guard::Bits16),
    (4096, 64, Guard::Bits16),
    (4096, 16, Guard::Bits32),
    (4096, 64, Guard::Bits32),
    (4096, 16, Guard::Bits64),
    (4096, 64, Guard::Bits64),
];

/// Dword 10 of a format, by its index.
pub fn cdw10(index: usize, extended: bool, protection: Option<(Type, bool)>) -> u32 {
    let (kind, first) = protection.map_or((0, false), |(kind, first)| (kind as u32, first));
    index as u32 | u32::from(extended) << 4 | kind << 5 | u32::from(first) << 8
}

fn format_of(index: usize, extended: bool, protection: Option<(Type, bool)>) -> BlockFormat {
    let (block, metadata, guard) = FORMATS[index];
    BlockFormat {
        block,
        metadata,
        guard,
        storage: StorageTag::least(guard),
        extended,
        protection,
    }
}

/// All that there are.
fn all() -> Vec<(u32, BlockFormat)> {
    let mut all = Vec::new();
    for (index, (_, metadata, _)) in FORMATS.into_iter().enumerate() {
        for extended in [false, true] {
            if metadata == 0 && extended {
                continue;
            }
            let mut kinds = vec![None];
            if metadata > 0 {
                for kind in [Type::One, Type::Two, Type::Three] {
                    kinds.extend([Some((kind, false)), Some((kind, true))]);
                }
            }
            for protection in kinds {
                let format = format_of(index, extended, protection);
                all.push((cdw10(index, extended, protection), format));
            }
        }
    }
    all
}

fn formats(store: &Arc<TestStore>) -> Formats {
    let first = BlockFormat::plain(512);
    Formats::with_metadata(first, store.format(), store.volume(), store.clone())
}

/// The namespace as the store has it.
fn reload(store: &Arc<TestStore>, config: &mut NamespaceConfig) {
    config.block_size = store.kept();
    config.metadata = store.metadata();
    config.formats = Some(formats(store));
}

/// A namespace in that format.
fn world(now: BlockFormat) -> (Protected, Arc<TestStore>) {
    world_on(now, None)
}

/// The same, with metadata that this volume makes durable.
fn world_on(now: BlockFormat, table: Option<Arc<dyn Volume>>) -> (Protected, Arc<TestStore>) {
    let mut p = Protected::new(layout(4096, 8, None));
    let store = TestStore::flushed(now, SIZE, table);
    let mut config = ns(1, p.below.clone(), now.block);
    reload(&store, &mut config);
    // The file is the store's here.
    let mut h = Host::with(ControllerConfig::default(), vec![config]);
    let kept = store.clone();
    h.reload = Some(Box::new(move |config| reload(&kept, config)));
    h.enable();
    h.create_pair(1, 64);
    assert_eq!(behaves(&mut h, &all_formats()), Status::SUCCESS);
    p.h = h;
    look(&mut p, now);
    (p, store)
}

/// The host finds this format: its commands are of it from now on.
fn look(p: &mut Protected, format: BlockFormat) {
    p.layout = format.layout().unwrap_or(layout(format.block, 0, None));
    let (status, page) = p.h.identify(0, 1, 0);
    assert_eq!(status, Status::SUCCESS);
    let ns = IdentifyNamespace::read_from_bytes(&page).unwrap();
    let index = FORMATS.iter().position(|(block, metadata, guard)| {
        (*block, *metadata, *guard) == (format.block, format.metadata, format.guard)
    });
    let flbas = index.unwrap() as u8 | u8::from(format.extended) << 4;
    assert_eq!(ns.flbas.into_bits(), flbas, "{format:?}");
    let (kind, first) = format.protection.unwrap_or((Type::One, false));
    let kind = format.protection.map_or(0, |_| kind as u8);
    assert_eq!(
        ns.dps.into_bits(),
        kind | u8::from(first) << 3,
        "{format:?}"
    );
    let blocks = SIZE / u64::from(format.block);
    assert_eq!((ns.nsze.get(), ns.ncap.get()), (blocks, blocks));
    assert_eq!(ns.nvmcap.get(), u128::from(SIZE));
}

pub fn asked(cdw10: u32) -> Command {
    let mut command = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
    command.cdw10 = cdw10.into();
    command
}

fn format(p: &mut Protected, cdw10: u32, format: BlockFormat) {
    p.h.submit(0, asked(cdw10));
    rest(&mut p.h);
    let done = p.h.reap(0).unwrap();
    assert_eq!(done.status(), Status::SUCCESS, "{format:?}");
    look(p, format);
}

/// Runs until nothing is left to be done.
pub fn rest(h: &mut Host) {
    h.until(|h| {
        h.now = h.now.max(Instant::now());
        !h.round() && h.c.in_flight() == 0 && h.c.deadline().is_none()
    });
}

/// Checks that a host can ask for.
pub fn checks(p: &Protected) -> u32 {
    match p.layout.protection {
        None => 0,
        Some(protection) if protection.kind == Type::Three => GUARD | APPLICATION,
        Some(_) => ALL,
    }
}

/// Writes every block.
pub fn fill(p: &mut Protected, seed: u64) {
    let prinfo = checks(p);
    for slba in (0..SIZE / u64::from(p.layout.block)).step_by(8) {
        p.fill(seed + slba, slba, 8);
        let status = p.status(NvmOpcode::WRITE, slba, 8, prinfo);
        assert_eq!(status, Status::SUCCESS, "{:?}", p.layout);
    }
}

/// No block was ever written.
pub fn is_unwritten(p: &mut Protected) {
    let mut unwritten = vec![0; usize::from(p.layout.metadata)];
    p.layout.unwritten(&mut unwritten);
    let prinfo = checks(p);
    for slba in (0..SIZE / u64::from(p.layout.block)).step_by(8) {
        let (data, metadata) = p.read(slba, 8, prinfo);
        assert!(data.iter().all(|byte| *byte == 0), "{slba}: {:?}", p.layout);
        assert_eq!(metadata, unwritten.repeat(8), "{slba}: {:?}", p.layout);
    }
    let mut bytes = vec![0xee; 32 << 10];
    let at_once = bytes.len() as u64;
    for part in 0..SIZE / at_once {
        crate::metadata::lasting::raw(p, part * at_once / u64::from(p.layout.block), &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0), "{part}");
    }
}

/// Blocks can be written, and are read with their metadata; what is checked is checked.
pub fn works(p: &mut Protected, seed: u64) {
    let last = SIZE / u64::from(p.layout.block) - 2;
    let prinfo = checks(p);
    let (data, metadata) = p.fill(seed, last, 2);
    let status = p.status(NvmOpcode::WRITE, last, 2, prinfo);
    assert_eq!(status, Status::SUCCESS, "{:?}", p.layout);
    assert_eq!(p.read(last, 2, prinfo), (data.clone(), metadata.clone()));
    let beyond = p.status(NvmOpcode::READ, last + 1, 2, prinfo);
    assert_eq!(beyond, Status::LBA_OUT_OF_RANGE, "{:?}", p.layout);
    if p.layout.protection.is_some() {
        let mut other = data.clone();
        other[17] ^= 1;
        p.put(&other, &metadata);
        let status = p.status(NvmOpcode::WRITE, last, 2, prinfo);
        assert_eq!(status, Status::GUARD_CHECK_ERROR, "{:?}", p.layout);
        assert_eq!(p.read(last, 2, prinfo), (data, metadata));
    }
}

#[test]
fn every_format_can_replace_every_other() {
    let (mut p, store) = world(BlockFormat::plain(512));
    fill(&mut p, 1);
    for (number, (cdw10, to)) in all().into_iter().enumerate() {
        format(&mut p, cdw10, to);
        assert_eq!(store.format(), to);
        is_unwritten(&mut p);
        works(&mut p, number as u64);
        fill(&mut p, 1000 + number as u64);
        if number % 10 == 0 {
            p.h.die();
            look(&mut p, to);
            works(&mut p, number as u64);
            // Nothing else is changed: all of it is erased.
            format(&mut p, cdw10, to);
            is_unwritten(&mut p);
            fill(&mut p, 2000 + number as u64);
        }
    }
    // And from any to any.
    let (mut at, all) = (0, all());
    for number in 0..40 {
        at = (at + 37) % all.len();
        let (cdw10, to) = all[at];
        format(&mut p, cdw10, to);
        is_unwritten(&mut p);
        fill(&mut p, 3000 + number);
    }
}

fn flush(p: &mut Protected) -> Status {
    p.h.io(Command::new(NvmOpcode::FLUSH.0, 0, 1))
}

/// Others have cut the file of the metadata: the next format has a new one, also where it is the
/// same format.
#[test]
fn format_replaces_truncated_metadata_file() {
    let protection = Some((Type::One, false));
    let one = (cdw10(2, false, protection), format_of(2, false, protection));
    let other = (cdw10(6, true, None), format_of(6, true, None));
    let (table, faults) = faulty(1 << 20);
    let (mut p, store) = world_on(one.1, Some(cached(table)));
    for (number, (cdw10, to)) in [one, other, other, one, one].into_iter().enumerate() {
        fill(&mut p, number as u64);
        assert_eq!(flush(&mut p), Status::SUCCESS);
        store.cut();
        let prinfo = checks(&p);
        let read = p.status(NvmOpcode::READ, 0, 8, prinfo);
        assert_ne!(read, Status::SUCCESS);
        assert_ne!(flush(&mut p), Status::SUCCESS);
        let saves = store.saves().len();
        format(&mut p, cdw10, to);
        assert_eq!(store.saves().len(), saves + 1);
        is_unwritten(&mut p);
        works(&mut p, number as u64);
        fill(&mut p, 100 + number as u64);
        assert_eq!(flush(&mut p), Status::SUCCESS);
        // One that is not lost stays.
        format(&mut p, cdw10, to);
        assert_eq!(store.saves().len(), saves + 1);
        is_unwritten(&mut p);
    }
    // What is not durable for another reason is not.
    let error = volume::IoError::from(volume::IoErrorKind::MediaWrite);
    faults.add(Fault::always(OpKind::Flush, Effect::FailLater(error)));
    p.h.submit(0, asked(other.0));
    rest(&mut p.h);
    assert_ne!(p.h.reap(0).unwrap().status(), Status::SUCCESS);
    assert_eq!(store.format(), one.1);
}

#[test]
fn identify_lists_all_formats() {
    let (mut p, _) = world(BlockFormat::plain(512));
    for (cdw10, to) in [(0, format_of(0, false, None)), {
        let protection = Some((Type::Two, true));
        (cdw10(11, true, protection), format_of(11, true, protection))
    }] {
        format(&mut p, cdw10, to);
        let (_, page) = p.h.identify(0, 1, 0);
        let ns = IdentifyNamespace::read_from_bytes(&page).unwrap();
        assert_eq!(ns.nlbaf_z, 11);
        for (found, (block, metadata, _)) in ns.lbaf.iter().zip(FORMATS) {
            let shown = (1u32 << found.lbads, found.ms.get());
            assert_eq!(shown, (block, metadata));
        }
        assert_eq!((ns.mc.into_bits(), ns.dpc.into_bits()), (3, 0x1f));
        let (status, page) = p.h.identify(5, 1, 0);
        assert_eq!(status, Status::SUCCESS);
        let nvm = NvmNamespace::read_from_bytes(&page).unwrap();
        let elbaf: Vec<u32> = nvm.elbaf.iter().map(|format| format.get()).collect();
        assert_eq!(elbaf[..8], [0; 8]);
        let (pif32, pif64) = (16 | 1 << 7, 2 << 7);
        assert_eq!(elbaf[8..12], [pif32, pif32, pif64, pif64]);
        assert_eq!(elbaf[12..], [0; 52]);
        // Linux asks once: before any format has metadata.
        let (_, page) = p.h.identify(6, 0, 0);
        let nvm = NvmController::read_from_bytes(&page).unwrap();
        assert_eq!(nvm.wzsl, p.h.c.config().mdts);
    }
}

#[test]
fn unsupported_format_is_refused() {
    let protected = format_of(2, false, Some((Type::One, false)));
    let (mut p, store) = world(protected);
    fill(&mut p, 1);
    let refused = Status::INVALID_FORMAT;
    for (cdw10, wanted) in [
        // Beyond NLBAF.
        (12, refused),
        (15, refused),
        (1 << 12, refused),
        (2 | 1 << 12, refused),
        // Protection information has no room.
        (1 << 5, refused),
        (1 | 3 << 5 | 1 << 8, refused),
        // Reserved types.
        (2 | 4 << 5, Status::INVALID_FIELD),
        (2 | 7 << 5, Status::INVALID_FIELD),
        // Reserved and cryptographic erasures.
        (5 | 1 << 5 | 2 << 9, Status::INVALID_FIELD),
        (5 | 1 << 5 | 3 << 9, Status::INVALID_FIELD),
    ] {
        let status = p.h.admin(asked(cdw10)).status();
        assert_eq!((plain(status), status.dnr()), (wanted, true), "{cdw10:#x}");
    }
    assert_eq!((store.format(), store.saves()), (protected, vec![]));
    look(&mut p, protected);
    works(&mut p, 1);
    // What means nothing is passed over.
    let none = BlockFormat::plain(4096);
    format(&mut p, 1 | 1 << 4 | 1 << 8, none);
    let separate = format_of(5, false, None);
    format(&mut p, 5 | 1 << 8, separate);
    works(&mut p, 2);
    // One that has only one format keeps it.
    let mut p = Protected::new(usual());
    for (cdw10, wanted) in [
        (1 << 5, Status::SUCCESS),
        (0, refused),
        (2 << 5, refused),
        (1 << 5 | 1 << 4, refused),
        (1 << 5 | 1 << 8, refused),
        (1, refused),
    ] {
        assert_eq!(
            plain(p.h.admin(asked(cdw10)).status()),
            wanted,
            "{cdw10:#x}"
        );
    }
}

#[test]
fn volume_and_controller_limit_formats() {
    // Larger blocks only.
    let volume = described(mem(SIZE), |info| volume::Info {
        block_size: 4096,
        ..info
    });
    let store = TestStore::of(BlockFormat::plain(4096), SIZE);
    let first = BlockFormat::plain(4096);
    let config = NamespaceConfig {
        formats: Some(Formats::with_metadata(first, first, None, store)),
        ..ns(1, volume, 4096)
    };
    let mut h = Host::ready_with(vec![config.clone()]);
    let (_, page) = h.identify(0, 1, 0);
    let ns = IdentifyNamespace::read_from_bytes(&page).unwrap();
    let shown: Vec<u8> = ns.lbaf.iter().take(12).map(|format| format.lbads).collect();
    assert_eq!(shown, [12, 0, 0, 0, 0, 12, 12, 12, 12, 12, 12, 12]);
    for lbaf in 1..=4 {
        let status = h.admin(asked(lbaf)).status();
        assert_eq!(plain(status), Status::INVALID_FORMAT, "{lbaf}");
    }
    assert_eq!(h.admin(asked(5 | 1 << 5)).status(), Status::SUCCESS);
    // One worker, which has all metadata.
    let io = Io::new(IoOptions::default());
    let two = ControllerConfig {
        workers: 2,
        ..ControllerConfig::default()
    };
    let made = Controller::new(3, two, vec![config.clone()], &io);
    assert!(matches!(made.err(), Some(ConfigError::SharedMetadata(1))));
    // Metadata of a namespace with other formats that have none.
    let plain = Formats::new(4096, TestStore::new(4096));
    let metadata = MetadataState::in_memory(layout(4096, 8, None), 64).unwrap();
    let config = NamespaceConfig {
        formats: Some(plain),
        metadata: Some(Arc::new(metadata)),
        ..config
    };
    let made = Controller::new(3, ControllerConfig::default(), vec![config], &io);
    assert!(matches!(made.err(), Some(ConfigError::FixedFormat(1))));
}

/// Formats with larger guards or storage tags are of hosts that have enabled them; without
/// protection information there is neither.
#[test]
fn extended_formats_are_hidden_without_lbafee() {
    let (mut p, store) = world(BlockFormat::plain(512));
    let says = HostBehavior::default();
    assert_eq!(behaves(&mut p.h, &says), Status::SUCCESS);
    let protection = Some((Type::One, false));
    for index in 8..12 {
        let status = p.h.admin(asked(cdw10(index, false, protection))).status();
        assert_eq!(plain(status), Status::INVALID_NAMESPACE_OR_FORMAT);
    }
    assert!(store.saves().is_empty());
    for (index, protection) in [(10, None), (5, protection)] {
        format(
            &mut p,
            cdw10(index, false, protection),
            format_of(index, false, protection),
        );
        works(&mut p, 4);
    }
    assert_eq!(behaves(&mut p.h, &all_formats()), Status::SUCCESS);
    format(
        &mut p,
        cdw10(10, false, protection),
        format_of(10, false, protection),
    );
    works(&mut p, 5);
}

/// Pairs of formats, the first of which is left for the second.
fn changes() -> [[(u32, BlockFormat); 2]; 3] {
    let of = |index, extended, protection| {
        let format = format_of(index, extended, protection);
        (cdw10(index, extended, protection), format)
    };
    let protected = of(2, false, Some((Type::One, false)));
    [
        [protected, of(11, true, Some((Type::Two, true)))],
        [protected, of(1, false, None)],
        [of(1, false, None), protected],
    ]
}

/// A format in which the process dies at the `count`th passing of a point.
fn history(
    [(_, from), (cdw10, to)]: [(u32, BlockFormat); 2],
    point: Option<(&'static str, u64)>,
) -> (u32, BTreeMap<&'static str, u64>) {
    let (mut p, store) = world(from);
    fill(&mut p, 7);
    let before = p.h.deaths;
    match point {
        Some((name, count)) => crash::arm(name, count),
        None => crash::disarm(),
    }
    let cid = p.h.submit(0, asked(cdw10));
    rest(&mut p.h);
    let passed = crash::passed();
    crash::disarm();
    let done = p.h.reap(0).unwrap();
    let end = (done.cid.get(), done.status());
    assert_eq!(end, (cid, Status::SUCCESS), "{point:?}");
    for _ in 0..2 {
        assert_eq!(store.format(), to, "{point:?}");
        look(&mut p, to);
        is_unwritten(&mut p);
        p.h.die();
        rest(&mut p.h);
    }
    works(&mut p, 3);
    let prinfo = checks(&p);
    let last = SIZE / u64::from(to.block) - 2;
    let written = p.read(last, 2, prinfo);
    p.h.die();
    rest(&mut p.h);
    assert_eq!(p.read(last, 2, prinfo), written, "{point:?}");
    (p.h.deaths - before, passed)
}

#[test]
fn format_takes_effect_with_death_at_every_point() {
    let mut names = BTreeSet::new();
    for change in changes() {
        let (quiet, passed) = history(change, None);
        for (name, count) in passed {
            for nth in 1..=count {
                let (deaths, _) = history(change, Some((name, nth)));
                assert!(deaths > quiet, "{name} {nth}");
                names.insert(name);
            }
        }
    }
    for name in [
        "controller.format.before",
        "controller.format.saved",
        "controller.format.open",
        "controller.commit.after",
    ] {
        assert!(names.contains(name), "{name}");
    }
}

/// No process continues: a new controller has the one format, or the other on what is erased. And
/// where the controller is reset, it is what is kept.
#[test]
fn format_at_any_round_leaves_old_or_new() {
    for [(back, from), (cdw10, to)] in changes() {
        let mut found = BTreeSet::new();
        for round in 0..48 {
            let (mut p, store) = world(from);
            fill(&mut p, 7);
            let holds = round % 2 == 1;
            if holds {
                store.hold();
            }
            p.h.submit(0, asked(cdw10));
            for _ in 0..round / 2 {
                p.h.round();
            }
            if holds {
                p.h.disable();
                p.h.until(|h| !h.csts().rdy());
                p.h.enable();
                p.h.create_pair(1, 64);
                assert_eq!(behaves(&mut p.h, &all_formats()), Status::SUCCESS);
                store.release();
                rest(&mut p.h);
                assert!(p.h.reap(0).is_none(), "{round}: nobody waits any more");
            } else {
                let kept = store.format();
                let mut config = ns(1, p.below.clone(), kept.block);
                reload(&store, &mut config);
                let config = vec![config];
                p.h = Host::ready_with(config);
                assert_eq!(behaves(&mut p.h, &all_formats()), Status::SUCCESS);
                p.h.reload = Some(Box::new({
                    let store = store.clone();
                    move |config| reload(&store, config)
                }));
            }
            let kept = store.format();
            look(&mut p, kept);
            found.insert(kept == to);
            if kept == to {
                is_unwritten(&mut p);
            }
            works(&mut p, round);
            p.h.die();
            rest(&mut p.h);
            look(&mut p, kept);
            works(&mut p, round);
            format(&mut p, back, from);
            is_unwritten(&mut p);
        }
        assert_eq!(found, BTreeSet::from([false, true]));
    }
}

#[test]
fn failed_format_store_changes_nothing() {
    let [from, to] = changes()[0];
    let (mut p, store) = world(from.1);
    fill(&mut p, 1);
    store.fail(true);
    let status = p.h.admin(asked(to.0)).status();
    assert_eq!(plain(status), Status::INTERNAL_ERROR);
    look(&mut p, from.1);
    is_unwritten(&mut p);
    works(&mut p, 1);
    store.fail(false);
    // Until it is kept, the namespace is closed.
    store.hold();
    let cid = p.h.submit(0, asked(to.0));
    rest(&mut p.h);
    assert!(p.h.reap(0).is_none());
    look(&mut p, from.1);
    let status = p.status(NvmOpcode::READ, 0, 1, 0);
    assert_eq!(status, Status::FORMAT_IN_PROGRESS);
    store.release();
    rest(&mut p.h);
    let done = p.h.reap(0).unwrap();
    assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
    look(&mut p, to.1);
    works(&mut p, 2);
}

/// A process has kept the new format, and ends before it knows. The next one has it from the
/// beginning, and says so, whether or not it can erase once more: there are as many blocks.
#[test]
fn next_process_reports_changed_format() {
    let protection = Some((Type::One, false));
    let (mut p, store) = world(BlockFormat::plain(512));
    p.h.set_feature(Fid::ASYNC_EVENT_CONFIG, 1 << 8);
    store.hold();
    p.h.submit(0, asked(cdw10(2, false, protection)));
    let aer = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
    let aer = p.h.submit(0, aer);
    rest(&mut p.h);
    assert!(p.h.reap(0).is_none());
    assert_eq!(store.format(), format_of(2, false, protection));
    p.h.die();
    rest(&mut p.h);
    let done = p.h.reap(0).expect("the event, while the format goes on");
    assert_eq!(done.cid.get(), aer);
    let notice = Notice::NAMESPACE_ATTRIBUTE_CHANGED;
    let notice = AsyncEvent::notice(notice, Lid::CHANGED_NAMESPACE_LIST);
    assert_eq!(done.dw0.get(), notice.into_bits());
}

/// Writes, reads, formats and deaths, against a model.
#[test]
fn random_formats_with_deaths_match_model() {
    let mut seed = 0xf0f0_u64;
    let mut random = move |below: u64| {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (seed >> 33) % below
    };
    let all = all();
    let (mut p, store) = world(BlockFormat::plain(512));
    let mut now = store.format();
    // What was written, by number of the block.
    let mut blocks = BTreeMap::new();
    let points = [
        "controller.format.before",
        "controller.format.saved",
        "controller.format.open",
        "controller.commit.after",
    ];
    let (mut deaths, mut formats) = (0, 0);
    for step in 0..600 {
        let slba = random(SIZE / u64::from(now.block));
        let prinfo = checks(&p);
        match random(8) {
            0 => {
                let (cdw10, to) = all[random(all.len() as u64) as usize];
                if random(2) == 0 {
                    crash::arm(points[random(4) as usize], random(2) + 1);
                }
                let before = p.h.deaths;
                p.h.submit(0, asked(cdw10));
                rest(&mut p.h);
                crash::disarm();
                deaths += p.h.deaths - before;
                assert_eq!(p.h.reap(0).unwrap().status(), Status::SUCCESS);
                look(&mut p, to);
                (now, formats) = (to, formats + 1);
                blocks.clear();
            }
            1 => p.h.die(),
            2..5 => {
                let written = p.fill(step, slba, 1);
                let status = p.status(NvmOpcode::WRITE, slba, 1, prinfo);
                assert_eq!(status, Status::SUCCESS, "{now:?}");
                blocks.insert(slba, written);
            }
            _ => {
                let mut unwritten = vec![0; usize::from(now.metadata)];
                p.layout.unwritten(&mut unwritten);
                let nothing = (vec![0; now.block as usize], unwritten);
                let found = p.read(slba, 1, prinfo);
                assert_eq!(&found, blocks.get(&slba).unwrap_or(&nothing), "{now:?}");
                for (slba, written) in &blocks {
                    assert_eq!(&p.read(*slba, 1, prinfo), written, "{now:?}");
                }
            }
        }
    }
    assert!(deaths > 10 && formats > 40, "{deaths} {formats}");
}
