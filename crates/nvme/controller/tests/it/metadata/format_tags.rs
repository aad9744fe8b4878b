//! Storage tags where a host chooses the format: the configured format has its own again whenever
//! the host returns to it, the others have the smallest, and the next process knows which.

use crate::common::*;
use crate::metadata::formats::{SIZE, asked, cdw10, checks, fill, is_unwritten, rest, works};
use crate::metadata::store::TestStore;
use crate::metadata::world::*;
use controller::{BlockFormat, Controller, ControllerConfig, DoorbellPage, Formats};
use controller::{NamespaceConfig, RestoreError};
use nvme::identify::NvmNamespace;
use nvme::{NvmOpcode, Status};
use protection::{Guard, StorageTag, Type};
use state_memory::StateMemory;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use volume::{Io, IoOptions};
use zerocopy::FromBytes;

/// Configured formats. The first has the index 0; the others follow, in the order of all formats.
fn firsts() -> [BlockFormat; 2] {
    let small = BlockFormat {
        metadata: 8,
        storage: StorageTag {
            bits: 16,
            mask: 0xff00,
        },
        protection: Some((Type::One, false)),
        ..BlockFormat::plain(512)
    };
    let large = BlockFormat {
        metadata: 64,
        guard: Guard::Bits32,
        storage: StorageTag {
            bits: 40,
            mask: 0x80_5555_5501,
        },
        extended: true,
        protection: Some((Type::Two, true)),
        ..BlockFormat::plain(4096)
    };
    [small, large]
}

/// The same LBA format, otherwise.
fn otherwise(first: BlockFormat, extended: bool, protection: Option<(Type, bool)>) -> BlockFormat {
    BlockFormat {
        extended,
        protection,
        ..first
    }
}

/// Dword 10 of a format, and that format: of the configured one's index, and of others.
fn targets(first: BlockFormat) -> Vec<(u32, BlockFormat)> {
    let other = |block, metadata, guard| {
        let protection = Some((Type::Two, false));
        let format = BlockFormat {
            metadata,
            guard,
            storage: StorageTag::least(guard),
            protection,
            ..BlockFormat::plain(block)
        };
        // In front of the configured one they are one further, behind it as they are in the order.
        let order = match (block, metadata, guard) {
            (512, 16, Guard::Bits16) => 3,
            (4096, 16, Guard::Bits32) => 8,
            _ => 10,
        };
        let own = if first.block == 512 { 2 } else { 9 };
        let index = order + usize::from(order < own);
        (cdw10(index, false, protection), format)
    };
    let here = |extended, protection| {
        let format = otherwise(first, extended, protection);
        (cdw10(0, extended, protection), format)
    };
    vec![
        other(512, 16, Guard::Bits16),
        other(4096, 16, Guard::Bits32),
        other(4096, 16, Guard::Bits64),
        (cdw10(2, false, None), BlockFormat::plain(4096)),
        here(false, Some((Type::Three, true))),
        here(true, Some((Type::One, false))),
        here(false, None),
    ]
}

fn back(first: BlockFormat) -> (u32, BlockFormat) {
    (cdw10(0, first.extended, first.protection), first)
}

/// The namespace as the store has it.
fn reload(first: BlockFormat, store: &Arc<TestStore>, config: &mut NamespaceConfig) {
    config.block_size = store.kept();
    config.metadata = store.metadata();
    let formats = Formats::with_metadata(first, store.format(), None, store.clone());
    config.formats = Some(formats);
}

/// A new controller of the namespace, and nothing of the one before.
fn begin(p: &mut Protected, first: BlockFormat, store: &Arc<TestStore>) {
    let mut config = ns(1, p.below.clone(), store.kept());
    reload(first, store, &mut config);
    let mut h = Host::with(ControllerConfig::default(), vec![config]);
    let kept = store.clone();
    h.reload = Some(Box::new(move |config| reload(first, &kept, config)));
    h.enable();
    h.create_pair(1, 64);
    assert_eq!(behaves(&mut h, &all_formats()), Status::SUCCESS);
    p.h = h;
    layout_of(p, &store.format());
}

/// A namespace of this configured format, and in that one.
fn world(first: BlockFormat, now: BlockFormat) -> (Protected, Arc<TestStore>) {
    let mut p = Protected::new(layout(4096, 8, None));
    let store = TestStore::of(now, SIZE);
    begin(&mut p, first, &store);
    (p, store)
}

fn layout_of(p: &mut Protected, now: &BlockFormat) {
    p.layout = now.layout().unwrap_or(layout(now.block, 0, None));
}

fn format(p: &mut Protected, (cdw10, to): (u32, BlockFormat)) {
    p.h.submit(0, asked(cdw10));
    rest(&mut p.h);
    let done = p.h.reap(0).unwrap();
    assert_eq!(done.status(), Status::SUCCESS, "{to:?}");
    layout_of(p, &to);
}

fn identified(p: &mut Protected) -> NvmNamespace {
    let (status, page) = p.h.identify(5, 1, 0);
    assert_eq!(status, Status::SUCCESS);
    NvmNamespace::read_from_bytes(&page).unwrap()
}

/// The host is told of the storage tags of all formats, and of the mask of the one that is there.
fn is_told(p: &mut Protected, first: &BlockFormat, now: &BlockFormat) {
    let nvm = identified(p);
    let pif = |guard| match guard {
        Guard::Bits16 => 0,
        Guard::Bits32 => 1 << 7,
        Guard::Bits64 => 2 << 7,
    };
    let mut wanted = vec![pif(first.guard) | u32::from(first.storage.bits)];
    let pif32 = pif(Guard::Bits32) | 16;
    let large = [pif32; 2].into_iter().chain([pif(Guard::Bits64); 2]);
    // The configured format is in front of the others.
    let skipped = if first.guard == Guard::Bits32 { 1 } else { 0 };
    wanted.resize(8 + skipped, 0);
    wanted.extend(large.skip(skipped));
    wanted.resize(64, 0);
    let elbaf: Vec<u32> = nvm.elbaf.iter().map(|format| format.get()).collect();
    assert_eq!(elbaf, wanted, "{now:?}");
    let mask = now.protection.map_or(0, |_| now.storage.mask);
    assert_eq!(nvm.lbstm.get(), mask, "{now:?}");
    // 16BPISTS and STCRS: there are formats with other guards, and some with storage tags.
    assert_eq!(nvm.pic.into_bits(), 5, "{now:?}");
}

/// The storage tag of the blocks that are written here.
fn tag(now: &BlockFormat) -> u64 {
    0x8123_4567_89ab_cdef & StorageTag::of(now.storage.bits).mask
}

/// Blocks with tuples can be written.
fn write(p: &mut Protected, now: &BlockFormat) {
    if now.protection.is_none() {
        return;
    }
    p.storage = tag(now);
    p.fill(1, 5, 2);
    let prinfo = checks(p) | STC;
    let status = p.status(NvmOpcode::WRITE, 5, 2, prinfo);
    assert_eq!(status, Status::SUCCESS, "{now:?}");
    p.storage = 0;
}

/// Of the tags of those blocks each bit is compared, or is not.
fn is_compared(p: &mut Protected, now: &BlockFormat) {
    if now.protection.is_none() {
        return;
    }
    let StorageTag { bits, mask } = now.storage;
    let prinfo = checks(p);
    p.storage = tag(now);
    let status = p.status(NvmOpcode::READ, 5, 2, prinfo | STC);
    assert_eq!(status, Status::SUCCESS, "{now:?}");
    for bit in 0..bits {
        p.storage = tag(now) ^ 1 << bit;
        let wanted = match mask >> bit & 1 {
            0 => Status::SUCCESS,
            _ => Status::STORAGE_TAG_CHECK_ERROR,
        };
        let status = p.status(NvmOpcode::READ, 5, 2, prinfo | STC);
        assert_eq!(status, wanted, "{bit} of {now:?}");
        let unchecked = p.status(NvmOpcode::READ, 5, 2, prinfo);
        assert_eq!(unchecked, Status::SUCCESS, "{bit} of {now:?}");
    }
    p.storage = 0;
}

#[test]
fn format_keeps_configured_storage_tag() {
    for first in firsts() {
        let (mut p, store) = world(first, first);
        for (number, to) in targets(first).into_iter().enumerate() {
            for change in [back(first), to] {
                let now = change.1;
                format(&mut p, change);
                assert_eq!(store.format(), now);
                is_told(&mut p, &first, &now);
                is_unwritten(&mut p);
                works(&mut p, number as u64);
                write(&mut p, &now);
                is_compared(&mut p, &now);
                // The same for the process that continues, and for one that knows nothing.
                p.h.die();
                is_told(&mut p, &first, &now);
                is_compared(&mut p, &now);
                begin(&mut p, first, &store);
                is_told(&mut p, &first, &now);
                is_compared(&mut p, &now);
                // It is there already: all of it is erased.
                let saves = store.saves().len();
                format(&mut p, change);
                assert_eq!(store.saves().len(), saves, "{now:?}");
                is_unwritten(&mut p);
            }
        }
    }
}

/// Blocks keep the size that they were formatted with, whatever is configured by now, and the host
/// is told so; formatted again, they have the configured one.
#[test]
fn configured_storage_tag_applies_from_next_format() {
    for now in firsts() {
        let first = BlockFormat {
            storage: StorageTag::of(20),
            ..now
        };
        let (mut p, store) = world(first, now);
        is_told(&mut p, &now, &now);
        write(&mut p, &now);
        is_compared(&mut p, &now);
        format(&mut p, back(first));
        assert_eq!(store.format(), first);
        is_told(&mut p, &first, &first);
        is_unwritten(&mut p);
        write(&mut p, &first);
        is_compared(&mut p, &first);
    }
}

/// A format in which the process dies at the `count`th passing of a point.
fn history(
    first: BlockFormat,
    [from, to]: [(u32, BlockFormat); 2],
    point: Option<(&'static str, u64)>,
) -> (u64, BTreeMap<&'static str, u64>) {
    let (mut p, store) = world(first, from.1);
    fill(&mut p, 7);
    let before = p.h.deaths;
    match point {
        Some((name, count)) => crash::arm(name, count),
        None => crash::disarm(),
    }
    format(&mut p, to);
    let passed = crash::passed();
    crash::disarm();
    let now = to.1;
    for _ in 0..2 {
        assert_eq!(store.format(), now, "{point:?}");
        is_told(&mut p, &first, &now);
        is_unwritten(&mut p);
        p.h.die();
        rest(&mut p.h);
    }
    write(&mut p, &now);
    is_compared(&mut p, &now);
    (u64::from(p.h.deaths - before), passed)
}

/// The state of the controller has the tag of a format that is not yet there.
#[test]
fn storage_tag_takes_effect_with_death_at_every_point() {
    for first in firsts() {
        let other = targets(first).swap_remove(1);
        let own = back(first);
        for change in [[own, other], [other, own]] {
            let (quiet, passed) = history(first, change, None);
            assert!(passed.contains_key("controller.format.saved"));
            for (name, count) in passed {
                for nth in 1..=count {
                    let (deaths, _) = history(first, change, Some((name, nth)));
                    assert!(deaths > quiet, "{name} {nth}");
                }
            }
        }
    }
}

/// A host that continues has read size and mask: the next process must have them.
#[test]
fn restart_with_other_storage_tag_is_refused() {
    for first in firsts() {
        let of = |bits, mask| BlockFormat {
            storage: StorageTag { bits, mask },
            ..first
        };
        let StorageTag { bits, mask } = first.storage;
        let least = StorageTag::least(first.guard);
        for (next, same) in [
            (first, true),
            (of(bits, mask ^ 1 << (bits - 1)), false),
            (of(bits + 1, mask), false),
            (of(least.bits, least.mask), false),
        ] {
            let (p, _) = world(first, first);
            let store = TestStore::of(next, SIZE);
            let mut namespaces: Vec<NamespaceConfig> = p.h.c.namespaces().cloned().collect();
            reload(next, &store, &mut namespaces[0]);
            let page = p.h.c.doorbell_page().as_fd().try_clone_to_owned();
            let state = p.h.state.fd().try_clone_to_owned();
            let restored = Controller::restore(
                3,
                p.h.c.config().clone(),
                namespaces,
                &Io::new(IoOptions::default()),
                DoorbellPage::from_fd(page.unwrap()).unwrap(),
                StateMemory::open(state.unwrap()).unwrap(),
                &mut p.h.keeper(),
            );
            match restored {
                Ok(_) => assert!(same, "{next:?}"),
                Err(RestoreError::Differs { what, .. }) => {
                    assert_eq!((what, same), ("LBA format", false), "{next:?}");
                }
                Err(error) => panic!("{error}: {next:?}"),
            }
        }
    }
}
