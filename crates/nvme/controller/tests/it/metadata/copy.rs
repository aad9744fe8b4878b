//! Copy within a namespace with metadata: the metadata that is copied along, and each check of
//! blocks that are read and written.

use crate::metadata::lasting::overwrite;
use crate::metadata::world::*;
use nvme::{NvmOpcode, Status};
use protection::{Guard, Layout, Type};

/// Data and metadata.
type Both = (Vec<u8>, Vec<u8>);

fn extended(layout: Layout) -> Layout {
    Layout {
        extended: true,
        ..layout
    }
}

fn guards() -> [(Layout, u32); 7] {
    [
        (usual(), 0),
        (extended(usual()), 0),
        (layout(512, 16, None), 0),
        (extended(layout(4096, 64, None)), 0),
        (layout(512, 64, Some((Type::Two, Guard::Bits16, true))), 0),
        (layout(4096, 16, Some((Type::Two, Guard::Bits32, false))), 1),
        (
            layout(4096, 64, Some((Type::Three, Guard::Bits64, false))),
            1,
        ),
    ]
}

/// Everything that is checked of a type.
fn all(layout: &Layout) -> u32 {
    match layout.protection.map(|protection| protection.kind) {
        Some(Type::Three) => GUARD | APPLICATION,
        _ => ALL,
    }
}

fn concat(parts: &[&Both]) -> Both {
    let data = parts.iter().flat_map(|part| part.0.clone()).collect();
    (data, parts.iter().flat_map(|part| part.1.clone()).collect())
}

/// It is the source's, with its tags, which are those of other blocks.
#[test]
fn copy_carries_metadata_with_source_tags() {
    for (layout, format) in guards() {
        let mut p = Protected::new(layout);
        let (one, two) = (p.written(1, 8, 4), p.written(2, 20, 1));
        let ranges = [from(8, 4), from(20, 1)];
        let command = p.copy(format, 40, [all(&layout), GUARD | APPLICATION], &ranges);
        assert_eq!(p.copied(command), (Status::SUCCESS, 0), "{layout:?}");
        assert!(p.read(40, 5, GUARD) == concat(&[&one, &two]), "{layout:?}");
        assert!(p.read(8, 4, GUARD) == one, "{layout:?}");
        // Those that were never written are so there, too, whatever was there.
        p.written(3, 50, 2);
        let command = p.copy(format, 50, [all(&layout); 2], &[from(0, 2)]);
        assert_eq!(p.copied(command), (Status::SUCCESS, 0), "{layout:?}");
        assert!(p.read(50, 2, all(&layout)) == p.read(0, 2, 0), "{layout:?}");
    }
}

/// With PRACT on both sides the tuples are generated anew; other metadata is copied along.
#[test]
fn copy_generates_tuples() {
    for (layout, format) in guards() {
        if layout.protection.is_none() {
            continue;
        }
        let mut p = Protected::new(layout);
        let (data, mut metadata) = p.written(1, 8, 4);
        let prinfo = [PRACT | all(&layout), PRACT];
        let command = p.copy(format, 40, prinfo, &[from(8, 4)]);
        assert_eq!(p.copied(command), (Status::SUCCESS, 0), "{layout:?}");
        p.protect(&data, &mut metadata, 40);
        assert!(
            p.read(40, 4, all(&layout)) == (data, metadata),
            "{layout:?}"
        );
    }
}

/// What each wrong field ends with, in the second of three ranges: the first has been copied, and
/// the others have not.
fn second_fails(p: &mut Protected, status: Status, lead: &str, wrong: From, prinfo: [u32; 2]) {
    let before = p.read(41, 6, 0);
    let first = p.written(7, 30, 1);
    let command = p.copy(0, 40, prinfo, &[from(30, 1), wrong, from(30, 1)]);
    assert_eq!(p.copied(command), (status, 1), "{lead}");
    assert!(p.read(40, 1, 0) == first, "{lead}");
    assert!(p.read(41, 6, 0) == before, "{lead}");
}

#[test]
fn copy_with_wrong_source_tags_fails() {
    let two = layout(512, 8, Some((Type::Two, Guard::Bits16, false)));
    let mut p = Protected::new(two);
    p.written(1, 8, 4);
    p.written(2, 41, 6);
    let good = from(8, 4);
    let application = From {
        application: 0x1235,
        ..good
    };
    let reference = From {
        reference: 9,
        ..good
    };
    let wrong = Status::APPLICATION_TAG_CHECK_ERROR;
    second_fails(&mut p, wrong, "application", application, [ALL, 0]);
    let wrong = Status::REFERENCE_TAG_CHECK_ERROR;
    second_fails(&mut p, wrong, "reference", reference, [ALL, 0]);
    // Bits that are not compared, and what is not checked.
    let masked = From {
        mask: 0xfffe,
        ..application
    };
    let prinfos = [
        (masked, ALL),
        (application, GUARD | REFERENCE),
        (reference, GUARD | APPLICATION),
    ];
    for (range, prinfor) in prinfos {
        let command = p.copy(0, 50, [prinfor, 0], &[range]);
        assert_eq!(p.copied(command), (Status::SUCCESS, 0), "{range:?}");
    }
    // Damage is the guard's, or where that is not checked the medium's; at the range's last block.
    let mut damaged = p.read(11, 1, 0).0;
    damaged[100] ^= 4;
    overwrite(&p, 11, &damaged);
    let wrong = Status::GUARD_CHECK_ERROR;
    second_fails(&mut p, wrong, "guard", good, [ALL, 0]);
    let wrong = Status::UNRECOVERED_READ_ERROR;
    second_fails(&mut p, wrong, "medium", good, [APPLICATION | REFERENCE, 0]);
    // Before it, all is well.
    let command = p.copy(0, 40, [ALL, 0], &[from(8, 3)]);
    assert_eq!(p.copied(command), (Status::SUCCESS, 0));
}

/// What is written is checked by the command's tags; they go on from range to range.
#[test]
fn copy_with_wrong_destination_tags_writes_nothing() {
    let two = layout(512, 8, Some((Type::Two, Guard::Bits16, false)));
    let mut p = Protected::new(two);
    p.written(1, 8, 4);
    p.written(2, 41, 6);
    let before = p.read(41, 6, 0);
    let ranges = [from(8, 2), from(10, 2)];
    // The tuples are those of blocks 8 to 11.
    let mut command = p.copy(0, 41, [ALL; 2], &ranges);
    for (cdw14, cdw15, status) in [
        (9, 0xffff_1234, Status::REFERENCE_TAG_CHECK_ERROR),
        (41, 0xffff_1234, Status::REFERENCE_TAG_CHECK_ERROR),
        (8, 0xffff_1134, Status::APPLICATION_TAG_CHECK_ERROR),
    ] {
        command.cdw14 = cdw14.into();
        command.cdw15 = cdw15.into();
        assert_eq!(p.copied(command), (status, 0), "{cdw14} {cdw15:#x}");
        assert!(p.read(41, 6, 0) == before);
        command = p.copy(0, 41, [ALL; 2], &ranges);
    }
    command.cdw14 = 8.into();
    command.cdw15 = 0xf0ff_1f34.into();
    assert_eq!(p.copied(command), (Status::SUCCESS, 0));
    // The second range fails where its tags do not follow those of the first one.
    let mut command = p.copy(0, 51, [ALL; 2], &[from(8, 2), from(11, 1)]);
    command.cdw14 = 8.into();
    let wrong = Status::REFERENCE_TAG_CHECK_ERROR;
    assert_eq!(p.copied(command), (wrong, 1));
}

/// What the fields say for themselves, before anything is read.
#[test]
fn copy_with_invalid_protection_fields_is_refused() {
    for (layout, format) in guards() {
        let mut p = Protected::new(layout);
        let other = p.copy(format ^ 1, 40, [0, 0], &[from(8, 1)]);
        assert_eq!(p.copied(other), (Status::INVALID_FORMAT, 0), "{layout:?}");
        let ranges = [from(30, 1), from(8, 4)];
        let mut status = |prinfo, reference, to| {
            let [first, mut second] = ranges;
            second.reference = reference;
            let command = p.copy(format, 40, prinfo, &[first, second]);
            let mut command = command;
            command.cdw14 = to;
            p.copied(command)
        };
        let kind = layout.protection.map(|protection| protection.kind);
        // Where there is no protection information, these fields say nothing.
        let succeeds = (Status::SUCCESS, 0);
        let expect = |wrong: bool, status| if wrong { (status, 0) } else { succeeds };
        let invalid = Status::INVALID_FIELD;
        let wrong = kind.is_some();
        assert_eq!(status([PRACT, 0], 8, 40.into()), expect(wrong, invalid));
        assert_eq!(status([0, PRACT], 8, 40.into()), expect(wrong, invalid));
        let invalid = Status::INVALID_PROTECTION_INFORMATION;
        let wrong = kind == Some(Type::One);
        assert_eq!(
            status([REFERENCE, 0], 9, 40.into()),
            expect(wrong || kind == Some(Type::Three), invalid)
        );
        assert_eq!(
            status([0, REFERENCE], 8, 41.into()),
            expect(wrong || kind == Some(Type::Three), invalid)
        );
        assert_eq!(status([0, 0], 9, 41.into()), succeeds);
    }
    let mut p = Protected::new(usual());
    for (to, ranges, status) in [
        (0, from(BLOCKS - 1, 2), Status::LBA_OUT_OF_RANGE),
        (BLOCKS - 1, from(0, 2), Status::LBA_OUT_OF_RANGE),
        (8, from(6, 3), Status::OVERLAPPING_IO_RANGE),
    ] {
        let command = p.copy(0, to, [0, 0], &[ranges]);
        assert_eq!(p.copied(command), (status, 0));
    }
    // A namespace with metadata has the command.
    let command = p.command(NvmOpcode::COPY, 0, 1, 0);
    assert_ne!(p.copied(command).0, Status::INVALID_OPCODE);
}
