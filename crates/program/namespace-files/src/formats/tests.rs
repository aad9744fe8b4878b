//! Format files, and the metadata beside them, as one process leaves them to the next.

use super::*;
use config::options::url::parse;
use std::time::Duration;

fn volume() -> Arc<dyn Volume> {
    Arc::new(volume::MemVolume::new(1 << 20).unwrap())
}

fn opened(path: &Path, volume: &Arc<dyn Volume>) -> Result<Chosen> {
    let url = format!("mem://1M?format-file={}", path.display());
    let previous = PreviousProcess {
        limit: Duration::from_secs(10),
        ..PreviousProcess::default()
    };
    Ok(open(&parse(&url).unwrap(), volume, previous)?.unwrap())
}

fn keep(path: &Path, volume: &Arc<dyn Volume>, size: u32) {
    let namespace = identity::nguid("format", 1, &volume.id());
    let first = BlockFormat::plain(512);
    let opened = FormatFile::open(path, first, namespace, PreviousProcess::default());
    opened.unwrap().save(BlockFormat::plain(size)).unwrap();
}

#[test]
fn newest_format_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (path, volume) = (folder.path().join("format"), volume());
    let none = parse("mem://1M").unwrap();
    assert!(
        open(&none, &volume, PreviousProcess::default())
            .unwrap()
            .is_none()
    );
    assert_eq!(opened(&path, &volume).unwrap().block_size, 512);
    for size in [4096, 512, 4096, 4096] {
        keep(&path, &volume, size);
        assert_eq!(opened(&path, &volume).unwrap().block_size, size);
    }
    // A torn write has no effect.
    let before = std::fs::read(&path).unwrap();
    keep(&path, &volume, 512);
    let after = std::fs::read(&path).unwrap();
    let at: Vec<usize> = (0..after.len())
        .filter(|at| before[*at] != after[*at])
        .collect();
    for cut in at.iter().skip(1) {
        let mut torn = before.clone();
        torn[..*cut].copy_from_slice(&after[..*cut]);
        std::fs::write(&path, &torn).unwrap();
        assert_eq!(opened(&path, &volume).unwrap().block_size, 4096, "{cut}");
    }
    std::fs::write(&path, &after).unwrap();
    assert_eq!(opened(&path, &volume).unwrap().block_size, 512);
}

#[test]
fn format_file_of_other_volume_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (path, ours) = (folder.path().join("format"), volume());
    opened(&path, &ours).unwrap();
    let error = |volume: &Arc<dyn Volume>| format!("{:#}", opened(&path, volume).unwrap_err());
    let other: Arc<dyn Volume> = Arc::new(volume::MemVolume::new(2 << 20).unwrap());
    if other.id() != ours.id() {
        assert!(
            error(&other).contains("another volume"),
            "{}",
            error(&other)
        );
    }
    let good = std::fs::read(&path).unwrap();
    let newer = |version: u32| {
        let mut bytes = good.clone();
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        let sum = crc32fast::hash(&bytes[..LEN - 4]).to_le_bytes();
        bytes[LEN - 4..LEN].copy_from_slice(&sum);
        bytes
    };
    std::fs::write(&path, newer(3)).unwrap();
    assert!(error(&ours).contains("version 3"), "{}", error(&ours));
    for bad in [vec![7; 8192], vec![0; 4096], good[..32].to_vec()] {
        std::fs::write(&path, bad).unwrap();
        error(&ours);
    }
    std::fs::write(&path, &good).unwrap();
    opened(&path, &ours).unwrap();
}

#[test]
fn save_request_is_answered() {
    let folder = tempfile::tempdir().unwrap();
    let (path, volume) = (folder.path().join("format"), volume());
    let namespace = identity::nguid("format", 1, &volume.id());
    let first = BlockFormat::plain(512);
    let file = FormatFile::open(&path, first, namespace, PreviousProcess::default());
    let store = FileStore {
        writer: Mutex::new(Writer::File(Box::new(file.unwrap()))),
        now: Arc::default(),
    };
    let (told, answer) = channel();
    for size in [4096, 512, 4096] {
        let told = told.clone();
        store.save(
            BlockFormat::plain(size),
            Box::new(move |kept| told.send(matches!(kept, SavedFormat::New(_))).unwrap()),
        );
        assert!(answer.recv_timeout(Duration::from_secs(30)).unwrap());
        assert_eq!(store.now.load(Ordering::Relaxed), size);
    }
    drop(store);
    assert_eq!(opened(&path, &volume).unwrap().block_size, 4096);
}

/// The caller gets the recorded format, or that it is unknown.
#[test]
fn save_request_returns_stored_or_unknown_format() {
    let folder = tempfile::tempdir().unwrap();
    let (path, volume) = (folder.path().join("format"), volume());
    let namespace = identity::nguid("format", 1, &volume.id());
    let first = BlockFormat::plain(512);
    let file = FormatFile::open(&path, first, namespace, PreviousProcess::default());
    let mut file = file.unwrap();
    file.file = File::open(&path).unwrap();
    let store = FileStore {
        writer: Mutex::new(Writer::File(Box::new(file))),
        now: Arc::default(),
    };
    let (told, answer) = channel();
    let ask = |format| {
        let told = told.clone();
        store.save(format, Box::new(move |kept| told.send(kept).unwrap()));
        answer.recv_timeout(Duration::from_secs(30)).unwrap()
    };
    let metadata = protected(512, 8, Guard::Bits16);
    assert!(matches!(ask(metadata), SavedFormat::Before));
    let plain = BlockFormat::plain(4096);
    assert!(matches!(ask(plain), SavedFormat::Unknown));
    assert!(matches!(ask(metadata), SavedFormat::Unknown));
    *store.writer.lock().unwrap() = Writer::None;
    assert!(matches!(ask(plain), SavedFormat::Before));
}

/// A format with metadata.
fn protected(block: u32, metadata: u16, guard: Guard) -> BlockFormat {
    BlockFormat {
        metadata,
        guard,
        storage: StorageTag::least(guard),
        extended: guard == Guard::Bits64,
        protection: Some((Type::Two, guard == Guard::Bits32)),
        ..BlockFormat::plain(block)
    }
}

/// Returns a protected format with a storage tag.
fn tagged(block: u32, metadata: u16, guard: Guard, bits: u8, mask: u64) -> BlockFormat {
    BlockFormat {
        storage: StorageTag { bits, mask },
        ..protected(block, metadata, guard)
    }
}

fn all() -> [BlockFormat; 6] {
    [
        BlockFormat::plain(512),
        tagged(512, 8, Guard::Bits16, 16, 0xff00),
        protected(4096, 64, Guard::Bits64),
        BlockFormat::plain(4096),
        tagged(4096, 16, Guard::Bits32, 64, 0x8000_0000_0000_0001),
        BlockFormat {
            protection: None,
            ..protected(4096, 16, Guard::Bits64)
        },
    ]
}

/// Files in a folder, for a volume of 1 MiB.
struct Both {
    folder: tempfile::TempDir,
    volume: Arc<dyn Volume>,
}

impl Both {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            volume: volume(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn opened(&self, metadata: bool) -> Result<(FormatFile, Option<Arc<MetadataState>>)> {
        self.opened_as(BlockFormat::plain(512), metadata)
    }

    /// Opens both files with `first` as the configured format.
    fn opened_as(
        &self,
        first: BlockFormat,
        metadata: bool,
    ) -> Result<(FormatFile, Option<Arc<MetadataState>>)> {
        let previous = PreviousProcess {
            limit: Duration::from_secs(10),
            ..PreviousProcess::default()
        };
        let table = self.path("metadata");
        let table = metadata.then_some(&*table);
        open_files(&self.path("format"), table, first, &self.volume, previous)
    }

    /// Checks the format that the next process finds.
    fn finds(&self, format: BlockFormat) -> Option<Arc<MetadataState>> {
        let (file, state) = self.opened(true).unwrap();
        assert_eq!((file.newest.format, file.newest.remake), (format, false));
        let found = state.as_ref().map(|state| *state.layout());
        assert_eq!(found, format.layout());
        let size = std::fs::metadata(self.path("metadata")).unwrap().len();
        let blocks = (1 << 20) / u64::from(format.block);
        assert_eq!(Some(size), protection::table::len(blocks, format.metadata));
        state
    }

    /// Bytes behind the header that are not zero, as a block has them that was written.
    fn soil(&self) {
        let path = self.path("metadata");
        let len = std::fs::metadata(&path).unwrap().len();
        let file = File::options().write(true).open(path).unwrap();
        let all = vec![0x5a; len as usize - APART];
        file.write_all_at(&all, APART as u64).unwrap();
    }

    fn is_clean(&self) -> bool {
        let bytes = std::fs::read(self.path("metadata")).unwrap();
        bytes[APART..].iter().all(|byte| *byte == 0)
    }
}

#[test]
fn metadata_matches_format() {
    let both = Both::new();
    both.finds(BlockFormat::plain(512));
    for from in all() {
        for to in all() {
            for format in [from, to] {
                let (mut file, _) = both.opened(true).unwrap();
                both.soil();
                let kept = file.save(format).unwrap();
                let found = kept.metadata.as_ref().map(|state| *state.layout());
                assert_eq!(found, format.layout());
                assert!(both.is_clean());
                drop((file, kept));
                both.finds(format);
            }
        }
    }
}

/// Wherever a process dies between the two files, the next one finds the old format, or the new
/// one of blocks that were never written.
#[test]
fn format_file_decides_after_death_between_files() {
    for from in all() {
        for to in all() {
            let both = Both::new();
            let (mut file, _) = both.opened(true).unwrap();
            file.save(from).unwrap();
            both.soil();
            let table = file.metadata.take().unwrap();
            // Not yet announced.
            let old = table.before(from, 1 << 20).unwrap().unwrap();
            table.grow(to, 1 << 20, Some(&old)).unwrap();
            drop((file, table));
            both.finds(from);
            assert!(from.metadata == 0 || !both.is_clean());
            // Announced, and the file is as it was; cut; of the new length; made.
            let path = both.path("metadata");
            let before = std::fs::read(&path).unwrap();
            for step in 0..4 {
                let (mut file, _) = both.opened(true).unwrap();
                both.soil();
                file.keep(to, true).unwrap();
                let table = file.metadata.take().unwrap();
                let len = before.len() as u64;
                let raw = File::options().write(true).open(&path).unwrap();
                match step {
                    0 => {}
                    1 => raw.set_len(APART as u64).unwrap(),
                    2 => raw.set_len(len.max(1 << 20)).unwrap(),
                    _ => table.remake(to, 1 << 20).unwrap(),
                }
                drop((file, table));
                both.finds(to);
                assert!(both.is_clean(), "{step}");
                let (mut file, _) = both.opened(true).unwrap();
                file.save(from).unwrap();
            }
            // Metadata that cannot be made is given up.
            let (file, _) = both.opened(true).unwrap();
            let table = file.metadata.as_ref().unwrap();
            let old = table.before(from, 1 << 20).unwrap().unwrap();
            table.remake(to, 1 << 20).unwrap();
            table.restore(&old).unwrap();
            drop(file);
            both.finds(from);
        }
    }
}

/// A process dies at each of its points.
#[test]
fn format_and_metadata_survive_death_at_every_point() {
    let mut names = std::collections::BTreeSet::new();
    for from in all() {
        for to in all() {
            let both = Both::new();
            let mut points = Vec::new();
            for round in 0.. {
                let (mut file, _) = both.opened(true).unwrap();
                file.save(from).unwrap();
                both.soil();
                let point = match round {
                    0 => None,
                    round => match points.get(round - 1) {
                        Some(point) => Some(*point),
                        None => break,
                    },
                };
                match point {
                    Some(point) => crash::arm(point, 1),
                    None => crash::disarm(),
                }
                let save = || file.save(to).map(drop);
                let saved = std::panic::catch_unwind(std::panic::AssertUnwindSafe(save));
                if point.is_none() {
                    points.extend(crash::passed().into_keys());
                }
                crash::disarm();
                assert_eq!(saved.is_err(), point.is_some());
                drop(file);
                let old = point == Some("vnvme.format.grown");
                both.finds(if old { from } else { to });
                assert!(old || both.is_clean(), "{point:?}");
            }
            names.extend(points);
        }
    }
    let all = ["announced", "grown", "kept", "made"].map(|name| format!("vnvme.format.{name}"));
    let of_file = ["written", "zeroed"].map(|name| format!("vnvme.metadata.{name}"));
    assert!(names.into_iter().eq(all.iter().chain(&of_file)));
}

/// The namespace continues with its old format, and so does the next process.
#[test]
fn failed_save_keeps_old_format() {
    let [_, from, to, ..] = all();
    let mut both = Both::new();
    let (mut file, _) = both.opened(true).unwrap();
    let kept = file.save(from).unwrap().metadata.unwrap();
    // No file of the format can be written any more.
    let path = both.path("format");
    let closed = File::open(&path).unwrap();
    let written = std::mem::replace(&mut file.file, closed);
    assert!(file.save(to).is_err());
    drop((file, written, kept));
    let state = both.finds(from).unwrap();
    drop(state);
    // Nor one of the metadata.
    let (mut file, _) = both.opened(true).unwrap();
    let table = File::open(both.path("metadata")).unwrap();
    let table = file.metadata.as_mut().unwrap().exchange(table);
    assert!(file.save(to).is_err());
    assert!(file.known && !file.newest.remake);
    file.metadata.as_mut().unwrap().exchange(table);
    both.volume = volume();
    assert!(file.save(to).is_err(), "the volume is closed");
    assert_eq!((file.newest.format, file.known), (from, true));
}

/// A file with these bytes that can be grown and be cut, and not be written.
fn sealed(bytes: &[u8]) -> File {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let file = memfd_create("sealed", MemfdFlags::ALLOW_SEALING).unwrap();
    let file = File::from(file);
    file.write_all_at(bytes, 0).unwrap();
    fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
    file
}

/// The format is unknown after a write with an unknown result, until a write succeeds.
#[test]
fn uncertain_save_makes_format_unknown() {
    let [plain, from, to, ..] = all();
    let both = Both::new();
    let (mut file, _) = both.opened(true).unwrap();
    file.save(from).unwrap();
    let closed = || File::open(both.path("format")).unwrap();
    for format in [to, from, plain] {
        let written = std::mem::replace(&mut file.file, closed());
        assert!(file.save(format).is_err());
        assert!(!file.known);
        // Another reason than that.
        file.file = written;
        let volume = file.volume.replace(Weak::<volume::MemVolume>::new());
        assert!(file.save(format).is_err());
        assert!(!file.known);
        file.volume = volume;
        file.save(format).unwrap();
        assert!(file.known);
    }
    // The metadata is of neither, and is made anew for the one before.
    file.save(from).unwrap();
    let bytes = std::fs::read(both.path("metadata")).unwrap();
    let table = file.metadata.as_mut().unwrap().exchange(sealed(&bytes));
    assert!(file.save(to).is_err());
    assert_eq!((file.known, file.newest.remake), (false, true));
    drop(file);
    both.soil();
    both.finds(from);
    assert!(both.is_clean());
    // The next one is of no format before.
    let (mut file, _) = both.opened(true).unwrap();
    let table = file.metadata.as_mut().unwrap().exchange(table);
    file.keep(from, true).unwrap();
    file.known = false;
    let (raw, table) = (table.metadata().unwrap().len(), sealed(&bytes));
    assert_eq!(raw, bytes.len() as u64);
    let table = file.metadata.as_mut().unwrap().exchange(table);
    assert!(file.save(to).is_err());
    assert!(!file.known);
    file.metadata.as_mut().unwrap().exchange(table);
    file.save(to).unwrap();
    drop(file);
    both.finds(to);
}

/// A file that another program has cut cannot be restored, and is remade.
#[test]
fn truncated_metadata_file_is_recreated() {
    let both = Both::new();
    for format in all() {
        for len in [0, 100, APART as u64] {
            let (mut file, _) = both.opened(true).unwrap();
            file.save(format).unwrap();
            let raw = File::options().write(true).open(both.path("metadata"));
            raw.unwrap().set_len(len).unwrap();
            file.save(format).unwrap();
            assert!(both.is_clean());
            drop(file);
            both.finds(format);
        }
    }
}

/// A path that belongs to another owner is never overwritten when metadata is remade.
#[test]
fn only_own_metadata_file_is_recreated() {
    let [_, from, to, ..] = all();
    let both = Both::new();
    let (mut file, _) = both.opened(true).unwrap();
    file.save(from).unwrap();
    file.keep(to, true).unwrap();
    drop(file);
    let path = both.path("metadata");
    let ours = std::fs::read(&path).unwrap();
    let mut other = ours.clone();
    other[16] ^= 1;
    let sum = crc32fast::hash(&other[..48]).to_le_bytes();
    other[48..52].copy_from_slice(&sum);
    for (bytes, said) in [
        (vec![7; 1 << 20], "not a metadata file"),
        (vec![0; 8192], "not a metadata file"),
        (vec![7; 512], ""),
        (Vec::new(), ""),
        (other, "another volume"),
    ] {
        std::fs::write(&path, &bytes).unwrap();
        let error = format!("{:#}", both.opened(true).err().unwrap());
        assert!(error.contains(said), "{error}");
        assert!(said.is_empty() || error.contains("removing the file"));
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "{error}");
    }
    // The namespace's own file is remade, even if it is incomplete.
    let mut torn = ours;
    torn[45] ^= 1;
    std::fs::write(&path, torn).unwrap();
    both.finds(to);
    assert!(both.is_clean());
    let (mut file, _) = both.opened(true).unwrap();
    file.keep(from, true).unwrap();
    drop(file);
    std::fs::remove_file(&path).unwrap();
    both.finds(from);
}

/// Room that the file has is not given up before another format is kept: it might be had no
/// more. No file of this process can be made longer here.
#[test]
fn format_with_less_metadata_needs_no_space() {
    const LIMITED: &str = "VNVME_TEST_LIMITED";
    const NAME: &str = "formats::tests::format_with_less_metadata_needs_no_space";
    const SHELL: &str = "trap '' XFSZ; exec \"$0\" \"$@\"";
    let both = Both::new();
    let probe = File::create(both.path("probe")).unwrap();
    let flags = rustix::fs::FallocateFlags::ZERO_RANGE;
    if let Err(error) = rustix::fs::fallocate(&probe, flags, 0, 4096) {
        return eprintln!("skipped: no file here is zeroed where it is: {error}");
    }
    if std::env::var_os(LIMITED).is_none() {
        // The limit is of a whole process, and its signal is ignored from the start.
        let mut alone = std::process::Command::new("sh");
        alone
            .args(["-c", SHELL])
            .arg(std::env::current_exe().unwrap());
        alone.args(["--exact", NAME]).env(LIMITED, "1");
        let out = alone.output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let [plain, from, to, ..] = all();
    let limit = |current| {
        use rustix::process::{Resource, getrlimit, setrlimit};
        let all = getrlimit(Resource::Fsize);
        setrlimit(Resource::Fsize, rustix::process::Rlimit { current, ..all }).unwrap();
    };
    for to in [to, plain] {
        let (mut file, _) = both.opened(true).unwrap();
        file.save(from).unwrap();
        both.soil();
        // After a change that is given up, the old metadata still has its space.
        let table = file.metadata.as_ref().unwrap();
        let old = table.before(from, 1 << 20).unwrap().unwrap();
        limit(Some(2 * APART as u64));
        assert!(table_file::allocate(&probe, 3 * APART as u64).is_err());
        table.remake(to, 1 << 20).unwrap();
        table.restore(&old).unwrap();
        assert!(both.is_clean());
        file.save(to).unwrap();
        // The room is given up by now.
        assert!(file.save(from).is_err());
        assert!(file.known);
        drop(file);
        both.finds(to);
        limit(None);
    }
}

#[test]
fn mismatched_files_are_refused() {
    let [plain, format, other, ..] = all();
    let both = Both::new();
    let error = |metadata| format!("{:#}", both.opened(metadata).err().unwrap());
    let (mut file, _) = both.opened(true).unwrap();
    file.save(format).unwrap();
    let ours = std::fs::read(both.path("metadata")).unwrap();
    file.save(other).unwrap();
    drop(file);
    // Without the file nobody knows the tuples.
    assert!(
        error(false).contains("needs the key metadata"),
        "{}",
        error(false)
    );
    std::fs::write(both.path("metadata"), ours).unwrap();
    assert!(
        error(true).contains("unlike the configured namespace"),
        "{}",
        error(true)
    );
    assert!(error(true).contains("removing the file"), "{}", error(true));
    std::fs::remove_file(both.path("metadata")).unwrap();
    both.finds(other);
    // A format file of before has one without metadata.
    let (mut file, _) = both.opened(true).unwrap();
    file.save(plain).unwrap();
    drop(file);
    let bytes = std::fs::read(both.path("format")).unwrap();
    let newest = bytes
        .chunks(APART)
        .map(|place| FormatRecord::decode(place).unwrap());
    let newest = newest.max_by_key(|(_, kept)| kept.sequence).unwrap();
    assert_eq!(newest.0, PLAIN);
    assert!(both.opened(false).is_ok());
}

/// The present format has the configured mask and the tag size of its tuples; other formats are as
/// they were kept.
#[test]
fn storage_mask_is_configured_and_size_is_stored() {
    let with = |bits, mask| tagged(512, 8, Guard::Bits16, bits, mask);
    let (first, masked, longer) = (with(16, 0xff00), with(16, 0xff), with(17, 0x1ff00));
    let both = Both::new();
    let finds = |configured: BlockFormat, wanted: BlockFormat| {
        let (file, state) = both.opened_as(configured, true).unwrap();
        assert_eq!(file.newest.format, wanted);
        let found = state.as_ref().map(|state| *state.layout());
        assert_eq!(found, wanted.layout());
        file
    };
    finds(first, first);
    finds(masked, masked);
    finds(longer, first);
    finds(with(0, 0), first);
    finds(BlockFormat::plain(512), first);
    // Where there are no tuples, nothing has a size.
    let bare = |format| BlockFormat {
        protection: None,
        ..format
    };
    finds(first, first).save(bare(first)).unwrap();
    finds(longer, bare(longer));
    // Not its own, the format is another one.
    let other = protected(512, 16, Guard::Bits16);
    finds(first, bare(first)).save(other).unwrap();
    finds(longer, other);
    // A new format operation takes the configured format.
    finds(longer, other).save(longer).unwrap();
    finds(longer, longer);
    // A file of tuples of another size is noticed.
    let ours = std::fs::read(both.path("metadata")).unwrap();
    finds(longer, longer).save(first).unwrap();
    std::fs::write(both.path("metadata"), ours).unwrap();
    let error = format!("{:#}", both.opened_as(first, true).err().unwrap());
    assert!(error.contains("storage tag of 17"), "{error}");
}

#[test]
fn record_holds_whole_format() {
    for format in all() {
        for remake in [false, true] {
            let kept = FormatRecord {
                format,
                remake,
                namespace: [7; 16],
                sequence: 9,
            };
            let bytes = kept.encode();
            let plain = format.metadata == 0 && !remake;
            let version = if plain { PLAIN } else { VERSION };
            assert_eq!(FormatRecord::decode(&bytes), Some((version, kept)));
            assert!(!plain || bytes[40..60].iter().all(|byte| *byte == 0));
            for at in 0..LEN {
                let mut other = bytes;
                other[at] ^= 1;
                assert_eq!(FormatRecord::decode(&other), None, "{at}");
            }
        }
    }
}
