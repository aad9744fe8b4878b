//! Images with forbidden names or malicious tables.

use crate::Qcow2Volume;
use crate::chain::{Qcow2Options, open};
use crate::format::COPIED;
use crate::testing::EmptyImage;
use dma::{Buffer, SegmentList};
use std::path::{Path, PathBuf};
use volume::{IoErrorKind, Op, Volume};

fn dir() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let real = directory.path().canonicalize().unwrap();
    (directory, real)
}

fn refused(path: &Path, backing: Option<&Path>) -> String {
    let options = Qcow2Options {
        backing: backing.map(Path::to_owned),
        ..Qcow2Options::default()
    };
    match open(path, &options) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => error.to_string(),
    }
}

fn with_backing(path: &Path, name: &str, format: &str) {
    EmptyImage {
        backing: Some((name, format)),
        ..EmptyImage::default()
    }
    .image(path);
}

#[test]
fn backing_files_open_in_allowed_folders_only() {
    let (_directory, dir) = dir();
    let (inside, outside) = (dir.join("in"), dir.join("out"));
    for folder in [&inside, &outside] {
        std::fs::create_dir(folder).unwrap();
        std::fs::write(folder.join("base"), [1; 4096]).unwrap();
    }
    let disk = inside.join("disk");
    with_backing(&disk, "base", "raw");
    let text = refused(&disk, None);
    assert!(
        text.contains(&format!("backing={}", inside.display())),
        "{text}"
    );
    assert!(refused(&disk, Some(&outside)).contains("not below"));
    assert!(refused(&disk, Some(&dir.join("none"))).contains("names nothing"));
    for fine in [&inside, &inside.join("base"), &dir] {
        let options = Qcow2Options {
            backing: Some(fine.clone()),
            ..Qcow2Options::default()
        };
        assert_eq!(open(&disk, &options).unwrap().images.len(), 2);
    }
    // Ways out of the folder.
    std::os::unix::fs::symlink(outside.join("base"), inside.join("link")).unwrap();
    let absolute = outside.join("base").display().to_string();
    for name in ["../out/base", "link", &absolute] {
        with_backing(&disk, name, "raw");
        assert!(
            refused(&disk, Some(&inside)).contains("not below"),
            "{name}"
        );
    }
    for (name, word) in [
        ("nbd://host/x", "not a regular file"),
        ("json:{}", "not a regular file"),
        ("rbd:pool/x", "not a regular file"),
        ("gone", "cannot be found"),
    ] {
        with_backing(&disk, name, "raw");
        let text = refused(&disk, Some(&inside));
        assert!(text.contains(word), "{name}: {text}");
    }
}

#[test]
fn backing_format_is_not_guessed() {
    let (_directory, dir) = dir();
    let disk = dir.join("disk");
    assert!(refused(&disk, None).contains("qemu-img create -f qcow2"));
    EmptyImage::default().image(&dir.join("base"));
    with_backing(&disk, "base", "vmdk");
    assert!(refused(&disk, Some(&dir)).contains("\"vmdk\""));
    // The name alone, as older programs made it.
    with_backing(&disk, "base", "qcow2");
    let mut bytes = std::fs::read(&disk).unwrap();
    bytes[104..108].copy_from_slice(&0x1234_5678u32.to_be_bytes());
    std::fs::write(&disk, bytes).unwrap();
    assert!(refused(&disk, Some(&dir)).contains("qemu-img rebase -u"));
    // The first bytes of the file do not matter.
    with_backing(&disk, "base", "raw");
    let options = Qcow2Options {
        backing: Some(dir.clone()),
        ..Qcow2Options::default()
    };
    assert!(open(&disk, &options).unwrap().images[1].tables.is_none());
}

#[test]
fn circular_backing_chain_is_refused() {
    let (_directory, dir) = dir();
    let path = |name: &str| dir.join(name);
    with_backing(&path("self"), "self", "qcow2");
    assert!(refused(&path("self"), Some(&dir)).contains("leads back to itself"));
    with_backing(&path("a"), "b", "qcow2");
    with_backing(&path("b"), "c", "qcow2");
    with_backing(&path("c"), "a", "qcow2");
    assert!(refused(&path("a"), Some(&dir)).contains("leads back to itself"));
    for n in 0..70 {
        with_backing(&path(&format!("n{n}")), &format!("n{}", n + 1), "qcow2");
    }
    assert!(refused(&path("n0"), Some(&dir)).contains("more than 64"));
}

/// Creates an image with changed bytes at some offsets.
fn changed(changes: &[(usize, &[u8])]) -> (tempfile::TempDir, PathBuf) {
    let (directory, dir) = dir();
    let path = dir.join("disk");
    let mut bytes = EmptyImage::default().bytes();
    bytes.resize(20 << 16, 0);
    for (at, change) in changes {
        bytes[*at..at + change.len()].copy_from_slice(change);
    }
    std::fs::write(&path, bytes).unwrap();
    (directory, path)
}

const CLUSTER: usize = 1 << 16;

#[test]
fn contradicting_tables_are_refused() {
    let table = |cluster: u64| ((cluster << 16) | COPIED).to_be_bytes();
    let counted = |cluster: usize| (2 * CLUSTER + cluster * 2, &[0u8, 1][..]);
    for (changes, word) in [
        (vec![(3 * CLUSTER, &table(2)[..])], "cluster 2"),
        (vec![(3 * CLUSTER, &table(0)[..])], "against the rules"),
        (vec![(3 * CLUSTER, &table(1)[..])], "cluster 1"),
        (
            vec![(3 * CLUSTER, &(5u64 << 16).to_be_bytes()[..]), counted(5)],
            "shared",
        ),
        (vec![(3 * CLUSTER, &table(5)[..])], "not counted"),
        (
            vec![(3 * CLUSTER, &7u64.to_be_bytes()[..])],
            "against the rules",
        ),
        (
            vec![(CLUSTER, &(3u64 << 16).to_be_bytes()[..])],
            "cluster 3",
        ),
        (
            vec![(CLUSTER, &(5u64 << 16 | 1).to_be_bytes()[..])],
            "against the rules",
        ),
        (vec![(2 * CLUSTER, &[0, 0][..])], "cluster 0 has a table"),
    ] {
        println!("{word}");
        let (_directory, path) = changed(&changes);
        let text = refused(&path, None);
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn entries_to_tables_or_free_clusters_are_errors() {
    let l2 = 4usize;
    let entry = |cluster: u64| ((cluster << 16) | COPIED).to_be_bytes();
    let entries = [
        entry(0),
        entry(2),
        entry(l2 as u64),
        entry(6),
        entry(7),
        entry(1 << 38),
    ];
    let mut changes: Vec<(usize, &[u8])> = Vec::new();
    let table = entry(l2 as u64);
    changes.push((3 * CLUSTER, &table));
    for (n, entry) in entries.iter().enumerate() {
        changes.push((l2 * CLUSTER + n * 8, entry));
    }
    changes.push((2 * CLUSTER + l2 * 2, &[0, 1]));
    changes.push((2 * CLUSTER + 7 * 2, &[0, 1]));
    let (_directory, path) = changed(&changes);
    let before = std::fs::read(&path).unwrap();
    let volume = Qcow2Volume::open(&path, &Qcow2Options::default()).unwrap();
    let io = volume::Io::new(Default::default());
    let Ok(mut queue) = Volume::open(&volume, &io) else {
        return testkit::skip("qcow2: harmful entries", "there is no io_uring");
    };
    for n in 0..entries.len() as u64 {
        for op in [Op::Read, Op::Write { fua: false }] {
            let data = SegmentList::owned(Buffer::new(4096));
            let done =
                super::queues::finish(&io, &mut queue, |queue| queue.start(n, op, n << 16, data));
            match n {
                4 => done.result.unwrap(),
                _ => {
                    let kind = done.result.unwrap_err().kind;
                    let expected = [IoErrorKind::MediaRead, IoErrorKind::MediaWrite];
                    assert!(expected.contains(&kind), "{n} {op:?}: {kind:?}");
                }
            }
        }
    }
    drop((queue, volume));
    let after = std::fs::read(&path).unwrap();
    let changed: Vec<usize> = (0..before.len() >> 16)
        .filter(|n| before[n << 16..][..CLUSTER] != after[n << 16..][..CLUSTER])
        .collect();
    // The image had no data before, and only zeroes were written.
    assert!(changed.is_empty(), "{changed:?}");
}

/// Compressed clusters with no, too few or too many bytes, or with bytes behind the file's end.
#[test]
fn invalid_compressed_cluster_fails_alone() {
    let (l2, stream) = (4usize, 8usize);
    // Raw deflate of stored blocks, each of `len` bytes, the last of them marked.
    let stored = |blocks: usize, len: u16| -> Vec<u8> {
        let block = |n: usize| {
            let mut bytes = vec![u8::from(n + 1 == blocks)];
            bytes.extend(len.to_le_bytes());
            bytes.extend((!len).to_le_bytes());
            bytes.extend(vec![7; usize::from(len)]);
            bytes
        };
        (0..blocks).flat_map(block).collect()
    };
    // Layout of the clusters, of 64 KiB each.
    let streams = [
        stored(2, 0x8000),
        stored(1, 0x4000),
        vec![0xff; 512],
        stored(3, 0x8000),
    ];
    let at = |n: usize| (stream + 2 * n) as u64 * CLUSTER as u64;
    let compressed = |host: u64| (1u64 << 62 | 255 << 54 | host).to_be_bytes();
    let entries = [
        (compressed(at(0)), true),
        (compressed(at(1)), false),
        (compressed(at(2)), false),
        // There is more: a cluster of it counts.
        (compressed(at(3)), true),
        (compressed(1 << 50), false),
        (compressed((1 << 54) - 1), false),
        // The image's own header.
        (compressed(0), false),
    ];
    let table = ((l2 as u64) << 16 | COPIED).to_be_bytes();
    let mut changes: Vec<(usize, &[u8])> = vec![(3 * CLUSTER, &table)];
    for (n, (entry, _)) in entries.iter().enumerate() {
        changes.push((l2 * CLUSTER + n * 8, entry));
    }
    let counted: Vec<usize> = [l2].into_iter().chain(stream..stream + 9).collect();
    for cluster in &counted {
        changes.push((2 * CLUSTER + cluster * 2, &[0, 1]));
    }
    for (n, bytes) in streams.iter().enumerate() {
        changes.push(((stream + 2 * n) * CLUSTER, bytes));
    }
    let (_directory, path) = changed(&changes);
    let before = std::fs::read(&path).unwrap();
    let volume = Qcow2Volume::open(&path, &Qcow2Options::default()).unwrap();
    let io = volume::Io::new(Default::default());
    let Ok(mut queue) = Volume::open(&volume, &io) else {
        return testkit::skip(
            "qcow2: compressed clusters that lie",
            "there is no io_uring",
        );
    };
    let mut go = |op, n: usize| {
        let data = SegmentList::owned(Buffer::from_slice(&[9; 4096]));
        super::queues::finish(&io, &mut queue, |q| {
            q.start(n as u64, op, (n as u64) << 16, data)
        })
    };
    for (n, &(_, good)) in entries.iter().enumerate() {
        let done = go(Op::Read, n);
        if good {
            done.result.unwrap();
            let mut bytes = [0; 4096];
            done.data.copy_to(0, &mut bytes);
            assert_eq!(bytes, [7; 4096], "{n}");
        } else {
            let kind = done.result.unwrap_err().kind;
            assert_eq!(kind, IoErrorKind::MediaRead, "{n}");
            // A part of the cluster cannot be written: the content around it is unknown.
            go(Op::Write { fua: false }, n).result.unwrap_err();
        }
    }
    drop((queue, volume));
    let after = std::fs::read(&path).unwrap();
    assert!(before == after[..before.len()], "it was written to");
}

#[test]
fn dirty_image_is_repaired_or_left_alone() {
    let dirty: (usize, &[u8]) = (72, &1u64.to_be_bytes());
    // A cluster that is counted and not used, and one the other way.
    let table = (4u64 << 16 | COPIED).to_be_bytes();
    let data = (6u64 << 16 | COPIED).to_be_bytes();
    let (_directory, path) = changed(&[
        dirty,
        (3 * CLUSTER, &table),
        (4 * CLUSTER, &data),
        (2 * CLUSTER + 9 * 2, &[0, 1]),
    ]);
    let seen = crate::testing::see(&std::fs::read(&path).unwrap(), &[]);
    assert_eq!((seen.leaked, seen.wrong.len(), seen.dirty), (1, 2, true));
    drop(open(&path, &Qcow2Options::default()).unwrap());
    let seen = crate::testing::see(&std::fs::read(&path).unwrap(), &[]);
    assert_eq!((seen.leaked, seen.wrong.len(), seen.dirty), (0, 0, false));
    // Two entries for one cluster: its owner is unknown.
    let (_directory, path) = changed(&[
        dirty,
        (3 * CLUSTER, &table),
        (4 * CLUSTER, &data),
        (4 * CLUSTER + 8, &data),
    ]);
    let before = std::fs::read(&path).unwrap();
    assert!(refused(&path, None).contains("cluster 6 is used by two"));
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn image_in_use_is_refused() {
    let (_directory, dir) = dir();
    let path = dir.join("disk");
    EmptyImage::default().image(&path);
    let _one = open(&path, &Qcow2Options::default()).unwrap();
    assert!(refused(&path, None).contains("in use"));
}

/// Reads at each of these offsets: the first byte, or the kind of the error.
fn read_at(
    path: &Path,
    options: &Qcow2Options,
    at: &[u64],
) -> Option<Vec<Result<u8, IoErrorKind>>> {
    let volume = Qcow2Volume::open(path, options).unwrap();
    let io = volume::Io::new(Default::default());
    let Ok(mut queue) = Volume::open(&volume, &io) else {
        testkit::skip("qcow2: reads of damaged images", "there is no io_uring");
        return None;
    };
    let read = at.iter().map(|&offset| {
        let data = SegmentList::owned(Buffer::new(4096));
        let done = super::queues::finish(&io, &mut queue, |queue| {
            queue.start(1, Op::Read, offset, data)
        });
        let mut bytes = [0; 4096];
        done.data.copy_to(0, &mut bytes);
        done.result.map(|()| bytes[0]).map_err(|error| error.kind)
    });
    Some(read.collect())
}

fn read_only() -> Qcow2Options {
    Qcow2Options {
        read_only: true,
        ..Qcow2Options::default()
    }
}

/// Bytes of the disk that an L1 entry covers.
const COVERED: u64 = 512 << 20;

/// Creates an image of three L2 tables, each with one data cluster: 4 to 6, and 7 to 9.
fn image_with_data() -> Vec<u8> {
    let mut bytes = EmptyImage {
        size: 3 * COVERED,
        ..EmptyImage::default()
    }
    .bytes();
    bytes.resize(10 * CLUSTER, 0);
    for n in 0..3 {
        let entry = |cluster: usize| ((cluster as u64) << 16 | COPIED).to_be_bytes();
        bytes[3 * CLUSTER + n * 8..][..8].copy_from_slice(&entry(4 + n));
        bytes[(4 + n) * CLUSTER..][..8].copy_from_slice(&entry(7 + n));
        bytes[(7 + n) * CLUSTER..][..CLUSTER].fill(n as u8 + 1);
        for cluster in [4 + n, 7 + n] {
            bytes[2 * CLUSTER + cluster * 2 + 1] = 1;
        }
    }
    bytes
}

/// A reader needs no refcounts, and only those entries of tables that lead to its data.
#[test]
fn damaged_image_is_served_read_only() {
    let (_directory, dir) = dir();
    let path = dir.join("disk");
    let table = |bits: u64| (4u64 << 16 | COPIED | bits).to_be_bytes();
    let fine = Ok(1);
    let lost = Err(IoErrorKind::MediaRead);
    for (at, value, first, refusal) in [
        (3 * CLUSTER, &table(1)[..], fine, "against the rules"),
        (3 * CLUSTER, &table(3 << 56), fine, "against the rules"),
        (3 * CLUSTER, &table(0x200), lost, "against the rules"),
        (
            3 * CLUSTER,
            &[0x80, 0, 0, 0, 0, 0, 0, 0],
            lost,
            "against the rules",
        ),
        (CLUSTER, &[0xff; 8], fine, "refcount table is against"),
        (CLUSTER, &[0; 8], fine, "not counted"),
        (2 * CLUSTER, &[0; 20], fine, "not counted"),
        (
            48,
            &0x10100u64.to_be_bytes(),
            fine,
            "refcount table at byte",
        ),
        (56, &0u32.to_be_bytes(), fine, "refcount table of 0"),
        (
            24,
            &(3 * COVERED - 100).to_be_bytes(),
            fine,
            "blocks of 512 bytes",
        ),
    ] {
        let mut bytes = image_with_data();
        bytes[at..at + value.len()].copy_from_slice(value);
        std::fs::write(&path, &bytes).unwrap();
        let text = refused(&path, None);
        assert!(
            text.contains(refusal) && text.contains("read-only=on"),
            "{text}"
        );
        let all = [0, COVERED, 2 * COVERED, COVERED - 4096, 3 * COVERED - 4096];
        let Some(read) = read_at(&path, &read_only(), &all) else {
            return;
        };
        let hole = if first.is_ok() { Ok(0) } else { lost };
        assert_eq!(read, [first, Ok(2), Ok(3), hole, Ok(0)], "{refusal}");
        assert!(std::fs::read(&path).unwrap() == bytes, "it was written to");
    }
}

/// One to four bytes of the tables are changed. Only the header can make an image unreadable.
#[test]
fn image_with_randomly_damaged_tables_is_served_read_only() {
    let (_directory, dir) = dir();
    let path = dir.join("disk");
    let mut random = super::Chance::new(41);
    for case in 0..300 {
        let (start, len) = [
            (3 * CLUSTER, 24),
            (4 * CLUSTER, 16),
            (CLUSTER, 16),
            (2 * CLUSTER, 24),
            (48, 12),
        ][case % 5];
        let mut bytes = image_with_data();
        for _ in 0..=random.below(4) {
            bytes[start + random.below(len) as usize] = random.next() as u8;
        }
        std::fs::write(&path, &bytes).unwrap();
        let Some(read) = read_at(&path, &read_only(), &[0, COVERED, 2 * COVERED]) else {
            return;
        };
        if !matches!(start / CLUSTER, 3 | 4) {
            assert_eq!(
                read,
                [Ok(1), Ok(2), Ok(3)],
                "{case}: readers need no refcounts"
            );
        }
    }
}

#[test]
fn empty_backing_file_reads_as_zeroes() {
    let (_directory, dir) = dir();
    let path = dir.join("disk");
    std::fs::write(dir.join("base"), b"").unwrap();
    with_backing(&path, "base", "raw");
    for read_only in [true, false] {
        let options = Qcow2Options {
            backing: Some(dir.clone()),
            read_only,
            ..Qcow2Options::default()
        };
        assert_eq!(open(&path, &options).unwrap().images.len(), 2);
        if let Some(read) = read_at(&path, &options, &[0, (8 << 20) - 4096]) {
            assert_eq!(read, [Ok(0), Ok(0)]);
        }
    }
    // An empty name is no backing file, as in QEMU.
    with_backing(&path, "", "raw");
    for read_only in [true, false] {
        let options = Qcow2Options {
            read_only,
            ..Qcow2Options::default()
        };
        assert_eq!(open(&path, &options).unwrap().images.len(), 1);
    }
    // An empty file is no image, and no disk.
    std::fs::write(&path, b"").unwrap();
    assert!(refused(&path, None).contains("is empty"));
    let error = open(&path, &read_only()).err().unwrap().to_string();
    assert!(error.contains("ends within its header"), "{error}");
}
