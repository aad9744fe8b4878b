//! A pool's folder: what is kept, what is refused, and what a process leaves that dies.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use namespace_pool::{MANIFEST, New, Nguid, PoolError, PoolFolder};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

fn open(path: &Path) -> Result<PoolFolder, PoolError> {
    PoolFolder::open(path, Duration::ZERO)
}

fn new(nsid: u32, blocks: u64) -> New {
    New {
        nsid,
        nguid: Nguid([nsid as u8; 16]),
        blocks,
        block_size: 512,
        shared: nsid.is_multiple_of(2),
    }
}

fn nguid(nsid: u32) -> Nguid {
    new(nsid, 1).nguid
}

/// NSID, blocks, controllers.
fn found(pool: &PoolFolder) -> Vec<(u32, u64, Vec<u16>)> {
    let all = pool.namespaces().iter();
    all.map(|ns| {
        (
            ns.nsid(),
            ns.blocks(),
            ns.attached().iter().copied().collect(),
        )
    })
    .collect()
}

/// Names of the folder's files.
fn files(path: &Path) -> BTreeSet<String> {
    let all = fs::read_dir(path).unwrap();
    all.map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

fn error(path: &Path) -> String {
    open(path).unwrap_err().to_string()
}

#[test]
fn namespaces_are_restored_as_stored() {
    let dir = tempfile::tempdir().unwrap();
    let mut pool = open(dir.path()).unwrap();
    assert!(pool.namespaces().is_empty());
    pool.create(&new(5, 8)).unwrap();
    pool.create(&new(2, 16)).unwrap();
    let file = fs::File::options()
        .write(true)
        .open(pool.file(nguid(5)))
        .unwrap();
    file.write_all_at(&[7; 512], 512).unwrap();
    pool.set_attached(nguid(5), 1, true).unwrap();
    pool.set_attached(nguid(5), 9, true).unwrap();
    pool.set_attached(nguid(5), 1, false).unwrap();
    let mode = fs::metadata(pool.file(nguid(5)))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let before = found(&pool);
    assert_eq!(before, [(2, 16, vec![]), (5, 8, vec![9])]);
    // What is there, or is not, is so again.
    pool.create(&new(5, 99)).unwrap();
    pool.set_attached(nguid(5), 9, true).unwrap();
    pool.set_attached(nguid(7), 9, false).unwrap();
    pool.delete(nguid(7)).unwrap();
    let unknown = pool.set_attached(nguid(7), 9, true);
    assert!(matches!(unknown, Err(PoolError::Unknown(_))));
    assert!(matches!(open(dir.path()), Err(PoolError::Locked(_))));
    drop(pool);
    let mut pool = open(dir.path()).unwrap();
    assert_eq!(found(&pool), before);
    assert!(!pool.namespaces()[1].shared() && pool.namespaces()[0].shared());
    assert_eq!(fs::read(pool.file(nguid(5))).unwrap()[512..1024], [7; 512]);
    pool.delete(nguid(5)).unwrap();
    assert_eq!(files(dir.path()).len(), 2);
    drop(pool);
    assert_eq!(found(&open(dir.path()).unwrap()), [(2, 16, vec![])]);
}

#[test]
fn unremovable_file_blocks_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let mut pool = open(dir.path()).unwrap();
    (1..=3).for_each(|nsid| pool.create(&new(nsid, 8)).unwrap());
    let [first, second, third] = [1, 2, 3].map(|nsid| pool.file(nguid(nsid)));
    fs::remove_file(&first).unwrap();
    fs::create_dir(&first).unwrap();
    pool.delete(nguid(1)).unwrap();
    pool.delete(nguid(2)).unwrap();
    assert!(first.exists() && !second.exists());
    let manifest = fs::read_to_string(dir.path().join(MANIFEST)).unwrap();
    let is_pending = |nsid| manifest.contains(&nguid(nsid).to_string());
    assert!(is_pending(1) && !is_pending(2), "{manifest}");
    // Nor does it keep the others from the next process.
    drop(pool);
    let mut pool = open(dir.path()).unwrap();
    assert_eq!(pool.namespaces().len(), 1);
    // It is tried again with the next deletion.
    fs::remove_dir(&first).unwrap();
    fs::write(&first, "").unwrap();
    pool.delete(nguid(3)).unwrap();
    assert!(!first.exists() && !third.exists());
}

#[test]
fn changed_file_is_not_attached() {
    let dir = tempfile::tempdir().unwrap();
    let mut pool = open(dir.path()).unwrap();
    pool.create(&new(1, 8)).unwrap();
    let path = pool.file(nguid(1));
    let file = fs::File::options().write(true).open(&path).unwrap();
    for len in [4095, 8192] {
        file.set_len(len).unwrap();
        let error = pool.set_attached(nguid(1), 1, true).unwrap_err();
        assert!(matches!(error, PoolError::File { nsid: 1, .. }), "{error}");
    }
    assert_eq!(found(&pool), [(1, 8, vec![])]);
    file.set_len(4096).unwrap();
    pool.set_attached(nguid(1), 1, true).unwrap();
    // It can be detached, whatever has become of it.
    file.set_len(0).unwrap();
    pool.set_attached(nguid(1), 1, false).unwrap();
}

#[test]
fn invalid_namespace_is_not_created() {
    let dir = tempfile::tempdir().unwrap();
    let mut pool = open(dir.path()).unwrap();
    pool.create(&new(2, 8)).unwrap();
    let files_before = files(dir.path());
    for wrong in [
        New {
            nguid: nguid(9),
            ..new(2, 8)
        },
        new(0, 8),
        new(1025, 8),
        new(3, 0),
        new(3, u64::MAX),
        New {
            block_size: 1024,
            ..new(3, 8)
        },
    ] {
        assert!(pool.create(&wrong).is_err(), "{wrong:?}");
        assert_eq!(files(dir.path()), files_before);
    }
    // As large as a number can be, and no file system's file.
    let large = pool.create(&new(4, i64::MAX as u64 / 512));
    match large {
        Err(error) => assert!(error.is_full(), "{error}"),
        Ok(()) => pool.delete(nguid(4)).unwrap(),
    }
    assert_eq!(files(dir.path()), files_before);
    drop(pool);
    assert_eq!(found(&open(dir.path()).unwrap()), [(2, 8, vec![])]);
}

#[test]
fn foreign_files_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["disk.raw", "namespace-x.raw", "notes"] {
        fs::write(dir.path().join(name), name).unwrap();
    }
    fs::create_dir(dir.path().join("folder")).unwrap();
    let mut pool = open(dir.path()).unwrap();
    pool.create(&new(1, 8)).unwrap();
    // One that has the name of a namespace's, and that the manifest does not know.
    let other = pool.file(nguid(77));
    fs::write(&other, "a copy").unwrap();
    drop(pool);
    let mut pool = open(dir.path()).unwrap();
    pool.delete(nguid(1)).unwrap();
    drop(pool);
    let name = other.file_name().unwrap().to_str().unwrap().to_owned();
    let there = [
        MANIFEST,
        "disk.raw",
        "folder",
        "namespace-x.raw",
        "notes",
        &name,
    ];
    assert_eq!(files(dir.path()), there.map(str::to_owned).into());
    // Nor is one overwritten.
    let mut pool = open(dir.path()).unwrap();
    assert!(pool.create(&new(77, 8)).is_err());
    drop(pool);
}

#[test]
fn linked_file_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    fs::hard_link(&victim, dir.path().join("pool.toml.new")).unwrap();
    let mut pool = open(dir.path()).unwrap();
    pool.create(&new(1, 8)).unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert_eq!(pool.namespaces().len(), 1);
}

#[test]
fn damaged_pool_folder_is_refused_with_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    assert!(error(&path.join("nowhere")).contains("No such file"));
    fs::write(path.join("file"), "").unwrap();
    assert!(error(&path.join("file")).contains("not a folder"));
    fs::remove_file(path.join("file")).unwrap();
    let mut pool = open(path).unwrap();
    pool.create(&new(1, 8)).unwrap();
    pool.create(&new(2, 8)).unwrap();
    let file = pool.file(nguid(2));
    drop(pool);
    let manifest = path.join(MANIFEST);
    let good = fs::read_to_string(&manifest).unwrap();
    fs::remove_file(&manifest).unwrap();
    assert!(error(path).contains("without manifest"));
    let id = nguid(2).to_string();
    for (text, said) in [
        ("", "missing field"),
        ("version = 0", "no version 0"),
        ("version = 2\nmore = 1", "newer program"),
        ("\u{0}\u{1}", "not a valid manifest of a pool"),
        (&good.replace("nsid = 2", "nsid = 1"), "two namespaces 1"),
        (&good.replace("nsid = 2", "nsid = 0"), "1 to 1024"),
        (
            &good.replace("blocks = 8", "blocks = 0"),
            "size that there cannot be",
        ),
        (&good.replace("blocks = 8", "blocks = 9"), "has 4096 bytes"),
        (
            &good.replace("block-size = 512", "block-size = 513"),
            "size that",
        ),
        (&good.replace(&id, &nguid(1).to_string()), "there twice"),
        (&good.replace(&id, "../../../etc/passwd"), "32 hexadecimal"),
        (&good.replace(&id, &nguid(3).to_string()), "is not there"),
        (
            &good.replace("pending = []", "pending = [1]"),
            "invalid type",
        ),
        (&format!("{good}colour = 1\n"), "unknown field"),
    ] {
        fs::write(&manifest, text).unwrap();
        let error = error(path);
        assert!(error.contains(said), "{said}: {error}");
    }
    fs::write(&manifest, [0xff; 100]).unwrap();
    assert!(error(path).contains("not UTF-8"));
    fs::remove_file(&manifest).unwrap();
    symlink("elsewhere", &manifest).unwrap();
    open(path).unwrap_err();
    fs::remove_file(&manifest).unwrap();
    fs::create_dir(&manifest).unwrap();
    open(path).unwrap_err();
    fs::remove_dir(&manifest).unwrap();
    fs::write(&manifest, &good).unwrap();
    fs::remove_file(&file).unwrap();
    symlink("/etc/passwd", &file).unwrap();
    assert!(error(path).contains("is not a regular file"));
    fs::remove_file(&file).unwrap();
    fs::write(&file, [0; 4096]).unwrap();
    open(path).unwrap();
}

/// A namespace keeps its size in bytes, and its file.
#[test]
fn namespace_block_size_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let mut pool = open(dir.path()).unwrap();
    pool.create(&new(1, 16)).unwrap();
    pool.create(&new(2, 9)).unwrap();
    let file = pool.file(nguid(1));
    fs::write(&file, [7; 8192]).unwrap();
    pool.set_attached(nguid(1), 1, true).unwrap();
    for (size, blocks) in [(4096, 2), (4096, 2), (512, 16), (4096, 2)] {
        pool.set_block_size(nguid(1), size).unwrap();
        drop(pool);
        pool = open(dir.path()).unwrap();
        let entry = &pool.namespaces()[0];
        assert_eq!((entry.block_size(), entry.blocks()), (size, blocks));
        assert_eq!((entry.bytes(), entry.attached().len()), (8192, 1));
        assert_eq!(fs::read(&file).unwrap(), [7; 8192]);
    }
    let odd = pool.set_block_size(nguid(2), 4096).unwrap_err();
    assert!(odd.to_string().contains("does not divide"), "{odd}");
    for size in [0, 1024, 8192] {
        pool.set_block_size(nguid(1), size).unwrap_err();
    }
    let unknown = pool.set_block_size(nguid(3), 4096).unwrap_err();
    assert!(matches!(unknown, PoolError::Unknown(_)));
    assert_eq!(found(&pool), [(1, 2, vec![1]), (2, 9, vec![])]);
}

type Step = fn(&mut PoolFolder) -> Result<(), PoolError>;

const STEPS: [Step; 7] = [
    |pool| pool.create(&new(1, 8)),
    |pool| pool.set_block_size(nguid(1), 4096),
    |pool| pool.create(&new(2, 16)),
    |pool| pool.set_attached(nguid(1), 1, true),
    |pool| pool.delete(nguid(2)),
    |pool| pool.set_attached(nguid(1), 1, false),
    |pool| pool.delete(nguid(1)),
];

type Points = BTreeMap<&'static str, u64>;

/// The steps up to this one, in which the process dies at a point. What it passed, and whether it
/// died.
fn die_in(at: usize, point: Option<(&'static str, u64)>, path: &Path) -> (Points, bool) {
    let mut pool = open(path).unwrap();
    for step in &STEPS[..at] {
        step(&mut pool).unwrap();
    }
    match point {
        Some((name, count)) => crash::arm(name, count),
        None => crash::disarm(),
    }
    let died = catch_unwind(AssertUnwindSafe(|| STEPS[at](&mut pool))).is_err();
    let passed = crash::passed();
    crash::disarm();
    (passed, died)
}

/// Wherever the process dies, the next one finds the state before the step or the one after it, no
/// file that nobody has, and does the step again.
#[test]
fn pool_survives_death_at_every_point() {
    let dir = tempfile::tempdir().unwrap();
    let mut pool = open(dir.path()).unwrap();
    let mut states = vec![found(&pool)];
    for step in STEPS {
        step(&mut pool).unwrap();
        states.push(found(&pool));
    }
    let mut points = Points::new();
    for at in 0..STEPS.len() {
        let dir = tempfile::tempdir().unwrap();
        let (passed, died) = die_in(at, None, dir.path());
        assert!(!passed.is_empty() && !died);
        let each = |(name, count)| (1..=count).map(move |nth| (name, nth));
        for point in passed.into_iter().flat_map(each) {
            let dir = tempfile::tempdir().unwrap();
            let (_, died) = die_in(at, Some(point), dir.path());
            assert!(died, "{at} {point:?}");
            *points.entry(point.0).or_default() += 1;
            let mut pool = open(dir.path()).unwrap();
            let now = found(&pool);
            let known = now == states[at] || now == states[at + 1];
            assert!(known, "{at} {point:?}: {now:?}");
            let mut wanted: BTreeSet<String> = [MANIFEST.to_owned()].into();
            for ns in pool.namespaces() {
                let path = pool.file(ns.nguid());
                wanted.insert(path.file_name().unwrap().to_str().unwrap().to_owned());
            }
            let mut there = files(dir.path());
            there.remove("pool.toml.new");
            assert_eq!(there, wanted, "{at} {point:?}");
            STEPS[at](&mut pool).unwrap();
            assert_eq!(found(&pool), states[at + 1], "{at} {point:?}");
        }
    }
    for point in [
        "create.pending",
        "file.made",
        "create.made",
        "delete.pending",
        "formatted",
        "removed",
    ] {
        let name = format!("namespace-pool.{point}");
        assert!(points.contains_key(name.as_str()), "{name}: {points:?}");
    }
}

#[test]
fn pool_of_previous_process_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open(dir.path()).unwrap();
    let ends = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(pool);
    });
    PoolFolder::open(dir.path(), Duration::from_secs(20)).unwrap();
    ends.join().unwrap();
}

#[test]
fn random_nguids_are_unique_uuids() {
    let all: BTreeSet<Nguid> = (0..64).map(|_| Nguid::random().unwrap()).collect();
    assert_eq!(all.len(), 64);
    assert!(all.iter().all(|id| id.0[6] >> 4 == 4 && id.0[8] >> 6 == 2));
}
