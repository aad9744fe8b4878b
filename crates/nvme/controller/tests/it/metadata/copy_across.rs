//! Copy between namespaces that look the same, and between one with protection information and one
//! without: that is inserted, or stripped. And ranges of more than a piece.

use crate::common::*;
use crate::metadata::world::*;
use controller::{ControllerConfig, MetadataState, NamespaceConfig};
use nvme::feature::HostBehavior;
use nvme::{NvmOpcode, Status};
use protection::{Guard, Layout, StorageTag, Type};
use std::sync::Arc;
use volume::{FileCopy, FileOptions, FileVolume};

/// Blocks of the others.
const MANY: u64 = 2048;
const INCOMPATIBLE: Status = Status::INCOMPATIBLE_NAMESPACE_OR_FORMAT;

/// Namespace 1 and others, of a host that uses descriptors of formats 2h and 3h.
fn beside(first: Layout, others: &[Layout]) -> Protected {
    let others: Vec<_> = others.iter().map(|layout| (*layout, MANY)).collect();
    let mut p = Protected::beside(first, &others);
    says(&mut p);
    p
}

fn says(p: &mut Protected) {
    let says = HostBehavior {
        cdfe: 12.into(),
        ..all_formats()
    };
    assert_eq!(behaves(&mut p.h, &says), Status::SUCCESS);
}

/// Commands are namespace `nsid`'s from now on.
fn on(p: &mut Protected, nsid: u32, layout: Layout) {
    (p.nsid, p.layout) = (nsid, layout);
}

fn of(nsid: u32, range: From) -> From {
    From { nsid, ..range }
}

/// No metadata at all.
fn bare(block: u32) -> Layout {
    layout(block, 0, None)
}

#[test]
fn copy_between_same_formats_carries_metadata() {
    for (layout, format) in [
        (usual(), 2),
        (layout(512, 16, None), 2),
        (layout(4096, 16, Some((Type::Two, Guard::Bits64, false))), 3),
    ] {
        // Where the host has the metadata is its own affair.
        let other = Layout {
            extended: true,
            ..layout
        };
        let mut p = beside(layout, &[other]);
        on(&mut p, 2, other);
        let (data, mut metadata) = p.written(1, 8, 4);
        on(&mut p, 1, layout);
        let own = p.written(2, 20, 1);
        let ranges = [of(2, from(8, 4)), from(20, 1)];
        let command = p.copy(format, 40, [ALL, GUARD | APPLICATION], &ranges);
        assert_eq!(p.copied(command), (Status::SUCCESS, 0), "{layout:?}");
        assert!(p.read(40, 4, GUARD) == (data.clone(), metadata.clone()));
        assert!(p.read(44, 1, GUARD) == own);
        let command = p.copy(format, 40, [PRACT | ALL, PRACT], &ranges);
        assert_eq!(p.copied(command), (Status::SUCCESS, 0), "{layout:?}");
        p.protect(&data, &mut metadata, 40);
        assert!(p.read(40, 4, ALL) == (data, metadata));
    }
}

#[test]
fn copy_between_formats_inserts_and_strips_tuples() {
    for (with, format) in [
        (usual(), 2),
        (layout(4096, 16, Some((Type::One, Guard::Bits32, false))), 3),
        (layout(4096, 16, Some((Type::Two, Guard::Bits64, false))), 3),
    ] {
        let without = bare(with.block);
        let mut p = beside(with, &[without]);
        on(&mut p, 2, without);
        let (data, _) = p.written(1, 8, 4);
        on(&mut p, 1, with);
        let command = p.copy(format, 40, [0, PRACT], &[of(2, from(8, 4))]);
        assert_eq!(p.copied(command), (Status::SUCCESS, 0), "{with:?}");
        let mut metadata = vec![0; 4 * usize::from(with.metadata)];
        p.protect(&data, &mut metadata, 40);
        assert!(p.read(40, 4, ALL) == (data.clone(), metadata), "{with:?}");
        // And back, with checks.
        on(&mut p, 2, without);
        let source = of(1, from(40, 4));
        let wrong = From {
            application: 1,
            ..source
        };
        let command = p.copy(format, 100, [PRACT | ALL, 0], &[wrong]);
        let status = Status::APPLICATION_TAG_CHECK_ERROR;
        assert_eq!(p.copied(command), (status, 0), "{with:?}");
        let command = p.copy(format, 100, [PRACT | ALL, 0], &[source]);
        assert_eq!(p.copied(command), (Status::SUCCESS, 0), "{with:?}");
        assert!(p.read(100, 4, 0).0 == data, "{with:?}");
        // Descriptors say the tags of the side that has some.
        let command = p.copy(format ^ 1, 100, [PRACT | ALL, 0], &[source]);
        assert_eq!(p.copied(command), (Status::INVALID_FORMAT, 0));
    }
}

#[test]
fn copy_between_incompatible_formats_is_refused() {
    let one = |metadata, first| layout(512, metadata, Some((Type::One, Guard::Bits16, first)));
    let two = layout(512, 8, Some((Type::Two, Guard::Bits16, false)));
    let tagged = |bits, mask| stored(one(8, false), StorageTag { bits, mask });
    let plain = layout(512, 8, None);
    // From, to, PRACT of what is read and of what is written.
    for (from_layout, to_layout, pracs, fits) in [
        (one(8, false), one(8, false), [0, 0], true),
        (one(8, false), one(8, false), [PRACT, PRACT], true),
        (one(8, false), one(8, false), [PRACT, 0], false),
        (one(8, false), one(8, false), [0, PRACT], false),
        (one(8, false), two, [0, 0], false),
        (one(8, false), two, [PRACT, PRACT], false),
        (one(16, false), one(8, false), [PRACT, PRACT], false),
        (tagged(8, 0xff), tagged(8, 0xff), [0, 0], true),
        (tagged(8, 0xff), tagged(8, 0x7f), [PRACT, PRACT], false),
        (tagged(8, 0xff), tagged(9, 0xff), [PRACT, PRACT], false),
        (one(8, false), tagged(8, 0xff), [PRACT, PRACT], false),
        (bare(512), tagged(8, 0xff), [0, PRACT], true),
        (tagged(8, 0xff), bare(512), [PRACT, 0], true),
        (one(16, false), one(16, true), [PRACT, PRACT], false),
        (bare(512), one(8, false), [0, PRACT], true),
        (bare(512), one(8, false), [0, 0], false),
        (bare(512), one(8, false), [PRACT, 0], false),
        (bare(512), one(16, false), [0, PRACT], false),
        (plain, one(8, false), [0, PRACT], false),
        (one(8, false), bare(512), [PRACT, 0], true),
        (one(8, false), bare(512), [0, 0], false),
        (one(8, false), bare(512), [0, PRACT], false),
        (one(16, false), bare(512), [PRACT, 0], false),
        (one(8, false), plain, [PRACT, 0], false),
        (plain, plain, [0, 0], true),
        (plain, bare(512), [0, 0], false),
        (bare(512), plain, [0, 0], false),
        (plain, layout(512, 16, None), [0, 0], false),
        (plain, layout(4096, 8, None), [0, 0], false),
    ] {
        let mut p = beside(usual(), &[from_layout, to_layout]);
        on(&mut p, 3, to_layout);
        let command = p.copy(2, 40, pracs, &[of(2, from(8, 1))]);
        let status = if fits { Status::SUCCESS } else { INCOMPATIBLE };
        let what = (from_layout, to_layout, pracs);
        assert_eq!(p.copied(command), (status, 0), "{what:?}");
    }
}

/// Tags go on from piece to piece, of what is read and of what is written; and a wrong one far
/// behind is found, where the pieces before it have been written.
#[test]
fn copy_checks_tags_of_long_ranges() {
    let two = layout(512, 8, Some((Type::Two, Guard::Bits16, false)));
    let mut p = beside(usual(), &[two]);
    on(&mut p, 2, two);
    let (data, mut metadata) = p.written(1, 0, 900);
    for prinfo in [[ALL; 2], [PRACT | ALL, PRACT]] {
        let mut command = p.copy(0, 1000, prinfo, &[from(0, 700), from(700, 200)]);
        command.cdw14 = 0.into();
        assert_eq!(p.copied(command), (Status::SUCCESS, 0));
        assert!(p.read(1000, 900, GUARD) == (data.clone(), metadata.clone()));
    }
    // Another tag in a block of the second piece.
    let at = 600;
    p.protect(&data[..512], &mut metadata[at * 8..at * 8 + 8], 9);
    let block = &data[at * 512..(at + 1) * 512];
    p.protect(block, &mut metadata[at * 8..at * 8 + 8], 9);
    p.put(block, &metadata[at * 8..at * 8 + 8]);
    let write = p.status(NvmOpcode::WRITE, 600, 1, GUARD);
    assert_eq!(write, Status::SUCCESS);
    let unwritten = p.read(1900, 100, 0);
    let command = p.copy(0, 1100, [ALL, 0], &[from(0, 500), from(500, 200)]);
    let wrong = Status::REFERENCE_TAG_CHECK_ERROR;
    assert_eq!(p.copied(command), (wrong, 1));
    assert!(p.read(1100, 500, GUARD).0 == data[..500 * 512]);
    assert!(p.read(1900, 100, 0) == unwritten);
}

/// The file system knows nothing of metadata: it is not asked, on whichever side that is.
#[test]
fn copy_with_metadata_bypasses_file_system() {
    let dir = tempfile::tempdir().unwrap();
    let len = MANY * 512;
    let all = [1, 2, 3].map(|nsid| {
        let path = dir.path().join(nsid.to_string());
        std::fs::File::create(&path).unwrap().set_len(len).unwrap();
        let options = FileOptions {
            copy: FileCopy::On,
            ..FileOptions::default()
        };
        let volume = Arc::new(FileVolume::open(&path, options).unwrap());
        let state = (nsid < 3).then(|| MetadataState::in_memory(usual(), MANY).unwrap());
        NamespaceConfig {
            metadata: state.map(Arc::new),
            ..ns(nsid, volume, 512)
        }
    });
    let mut h = Host::with(ControllerConfig::default(), all.to_vec());
    h.enable();
    h.create_pair(1, 64);
    let mut p = beside(usual(), &[]);
    p.h = h;
    says(&mut p);
    let (data, _) = p.written(1, 0, 400);
    // Within, to another like it, to one without, and back.
    for (nsid, source, to, pracs) in [
        (1, 1, 1000, [PRACT, PRACT]),
        (2, 1, 0, [PRACT, PRACT]),
        (3, 1, 0, [PRACT, 0]),
        (1, 3, 500, [0, PRACT]),
    ] {
        let layout = if nsid == 3 { bare(512) } else { usual() };
        on(&mut p, nsid, layout);
        let command = p.copy(2, to, pracs, &[of(source, from(0, 400))]);
        assert_eq!(p.copied(command), (Status::SUCCESS, 0), "{source} {nsid}");
        let checks = if nsid == 3 { 0 } else { ALL };
        let mut metadata = vec![0; 400 * usize::from(layout.metadata)];
        p.protect(&data, &mut metadata, to);
        let found = p.read(to, 400, checks);
        assert!(found == (data.clone(), metadata), "{source} {nsid}");
    }
}
