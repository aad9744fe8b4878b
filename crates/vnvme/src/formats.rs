//! LBA formats of namespaces: what a user says of them, and the file that keeps the one that a host
//! has chosen (Format NVM).
//!
//! The file has a place in each of two pages, which are written in turn, each write made durable
//! before it counts: so one of them is whole at any moment, and the newer one of those that are
//! whole is the format.

use crate::identity;
use crate::spec::NamespaceSpec;
use crate::table_file;
use anyhow::{Context, Result, bail, ensure};
use controller::{BlockFormat, FormatSaved, FormatStore, Formats, NamespaceConfig};
use rustix::fs::OFlags;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use sync::Unpoisoned;
use volume::{FileVolume, PreviousProcess, Volume};

const MAGIC: [u8; 8] = *b"vnvmefmt";
/// The form of the file.
const VERSION: u32 = 1;
/// Bytes of what a place holds; its last four are the checksum of the others.
const LEN: usize = 64;
/// Between the two places.
const APART: usize = table_file::PAGE;

/// The formats that a namespace can have, and bytes of its blocks.
#[derive(Clone, Debug)]
pub struct Chosen {
    formats: Formats,
    block_size: u32,
    /// The same, as it is kept now.
    now: Weak<AtomicU32>,
}

impl Chosen {
    /// A namespace has its blocks so, if there is something to choose.
    pub fn shape(chosen: Option<Self>, config: NamespaceConfig) -> NamespaceConfig {
        match chosen {
            None => config,
            Some(chosen) => NamespaceConfig {
                block_size: chosen.block_size,
                formats: Some(chosen.formats),
                ..config
            },
        }
    }
}

/// Bytes of a block of the namespaces that can have several formats, by disk and NSID, for those
/// who show them.
#[derive(Default)]
pub struct BlockSizes(Mutex<HashMap<(String, u32), Weak<AtomicU32>>>);

impl BlockSizes {
    /// A namespace was opened.
    pub fn enter(&self, disk: &str, nsid: u32, chosen: Option<&Chosen>) {
        let mut all = self.0.lock().unpoisoned();
        all.retain(|_, size| size.strong_count() > 0);
        if let Some(chosen) = chosen {
            all.insert((disk.to_owned(), nsid), chosen.now.clone());
        }
    }

    /// What is kept of it; `None`: it has one format.
    pub fn of(&self, disk: &str, nsid: u32) -> Option<u32> {
        let all = self.0.lock().unpoisoned();
        let size = all.get(&(disk.to_owned(), nsid))?.upgrade()?;
        Some(size.load(Ordering::Relaxed))
    }
}

/// The formats of a namespace on this volume, if it is to have several.
///
/// # Errors
/// A sentence for the user.
pub fn open(
    spec: &NamespaceSpec,
    volume: &Arc<dyn Volume>,
    previous: PreviousProcess,
) -> Result<Option<Chosen>> {
    let Some(path) = &spec.format_file else {
        return Ok(None);
    };
    let url = &*spec.volume;
    let block = spec.block_size;
    let first = block.unwrap_or_else(|| volume.info().block_size.max(512));
    let namespace = identity::nguid("format", 1, &volume.id());
    let opened = FormatFile::open(path, first, namespace, previous);
    let (file, block_size) = opened.with_context(|| format!("{url}: format-file"))?;
    let now = Arc::new(AtomicU32::new(block_size));
    let store = FileStore {
        writer: Mutex::new(Writer::File(Box::new(file))),
        now: now.clone(),
    };
    Ok(Some(Chosen {
        now: Arc::downgrade(&now),
        formats: Formats::new(first, Arc::new(store)),
        block_size,
    }))
}

/// What a place holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kept {
    block_size: u32,
    /// Of the namespace.
    namespace: [u8; 16],
    /// The higher one is the newer one.
    sequence: u64,
}

impl Kept {
    fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        let fields: [&[u8]; 5] = [
            &MAGIC,
            &VERSION.to_le_bytes(),
            &self.block_size.to_le_bytes(),
            &self.namespace,
            &self.sequence.to_le_bytes(),
        ];
        let fields = fields.into_iter().flatten();
        for (to, from) in bytes.iter_mut().zip(fields) {
            *to = *from;
        }
        let (content, sum) = bytes.split_at_mut(LEN - 4);
        sum.copy_from_slice(&crc32fast::hash(content).to_le_bytes());
        bytes
    }

    /// `None`: it is not whole.
    fn decode(bytes: &[u8]) -> Option<(u32, Self)> {
        let bytes = bytes.get(..LEN)?;
        let (content, sum) = bytes.split_at(LEN - 4);
        let whole = content.starts_with(&MAGIC) && sum == crc32fast::hash(content).to_le_bytes();
        let at = |from: usize| content.get(from..).filter(|_| whole);
        let word = |from| Some(u32::from_le_bytes(*at(from)?.first_chunk()?));
        let kept = Kept {
            block_size: word(12)?,
            namespace: *at(16)?.first_chunk()?,
            sequence: u64::from_le_bytes(*at(32)?.first_chunk()?),
        };
        Some((word(8)?, kept))
    }
}

/// The file of a namespace. Every call may block.
struct FormatFile {
    path: PathBuf,
    file: File,
    /// Whose lock is the file's.
    _locked: FileVolume,
    newest: Kept,
    /// The place that is written next.
    next: usize,
}

impl FormatFile {
    /// Opens the file, which is made if it is not there, of blocks of `first` bytes; and bytes of a
    /// block.
    fn open(
        path: &Path,
        first: u32,
        namespace: [u8; 16],
        previous: PreviousProcess,
    ) -> Result<(Self, u32)> {
        let new = Kept {
            block_size: first,
            namespace,
            sequence: 1,
        };
        let fresh = || {
            let mut bytes = new.encode().to_vec();
            bytes.resize(2 * APART, 0);
            Ok(bytes)
        };
        let (locked, pages) = table_file::open(path, fresh, previous)?;
        let shown = path.display();
        let bytes = table_file::read(&pages, 2 * APART)?;
        drop(pages);
        let (first, second) = bytes.split_at(bytes.len().min(APART));
        let (newest, next) = match (Kept::decode(first), Kept::decode(second)) {
            (Some(a), Some(b)) if a.1.sequence > b.1.sequence => (a, 1),
            (_, Some(b)) => (b, 0),
            (Some(a), None) => (a, 1),
            (None, None) => bail!(
                "{shown}: this is no file of an LBA format. To remove it is to have the namespace \
                 with the configured one, whatever is in its blocks"
            ),
        };
        let (version, newest) = newest;
        ensure!(
            version == VERSION,
            "{shown}: its form is version {version}, which this program does not know"
        );
        ensure!(
            newest.namespace == namespace,
            "{shown}: it has the LBA format of another volume"
        );
        let size = newest.block_size;
        ensure!(
            matches!(size, 512 | 4096),
            "{shown}: a block size of {size} bytes is not possible"
        );
        let file = File::options()
            .write(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(path)
            .with_context(|| shown.to_string())?;
        let file = FormatFile {
            path: path.into(),
            file,
            _locked: locked,
            newest,
            next,
        };
        Ok((file, size))
    }

    /// When this returns, the format outlasts the process and a loss of power.
    fn save(&mut self, block_size: u32) -> std::io::Result<()> {
        let before = self.newest;
        let kept = Kept {
            block_size,
            sequence: before.sequence + 1,
            ..before
        };
        if let Err(error) = self.write(kept) {
            // It may be there for all that: the one before is to count.
            let again = Kept {
                sequence: kept.sequence + 1,
                ..before
            };
            if self.write(again).is_ok() {
                (self.newest, self.next) = (again, 1 - self.next);
            }
            return Err(error);
        }
        (self.newest, self.next) = (kept, 1 - self.next);
        Ok(())
    }

    fn write(&self, kept: Kept) -> std::io::Result<()> {
        let at = (self.next * APART) as u64;
        self.file.write_all_at(&kept.encode(), at)?;
        self.file.sync_data()
    }
}

/// Writes to the file, on a thread that is started when there is something to be written: born in
/// the sandbox, if there is one.
struct FileStore {
    writer: Mutex<Writer>,
    /// Bytes of a block, as they are kept.
    now: Arc<AtomicU32>,
}

enum Writer {
    File(Box<FormatFile>),
    Thread(Sender<(u32, FormatSaved)>),
    /// No thread could be had.
    None,
}

impl std::fmt::Debug for FileStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileStore").finish_non_exhaustive()
    }
}

impl Writer {
    fn start(mut file: Box<FormatFile>, now: Arc<AtomicU32>) -> Self {
        let (sizes, written) = channel::<(u32, FormatSaved)>();
        let builder = std::thread::Builder::new().name("format".into());
        let thread = builder.spawn(move || {
            for (size, done) in written {
                let kept = file.save(size);
                now.store(file.newest.block_size, Ordering::Relaxed);
                if let Err(error) = &kept {
                    let path = file.path.display();
                    tracing::error!(%path, %error, "an LBA format cannot be kept");
                }
                done(kept.is_ok());
            }
        });
        match thread {
            Ok(_) => Self::Thread(sizes),
            Err(error) => {
                tracing::error!(%error, "an LBA format cannot be kept: no thread");
                Self::None
            }
        }
    }
}

impl FormatStore for FileStore {
    fn save(&self, format: BlockFormat, done: FormatSaved) {
        let mut writer = self.writer.lock().unpoisoned();
        *writer = match std::mem::replace(&mut *writer, Writer::None) {
            Writer::File(file) => Writer::start(file, self.now.clone()),
            other => other,
        };
        let left = match &*writer {
            Writer::Thread(sizes) => {
                let sent = sizes.send((format.block, done));
                sent.err().map(|unsent| unsent.0.1)
            }
            _ => Some(done),
        };
        drop(writer);
        if let Some(done) = left {
            done(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::url::parse;
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
        let opened = FormatFile::open(path, 512, namespace, PreviousProcess::default());
        opened.unwrap().0.save(size).unwrap();
    }

    #[test]
    fn the_newest_format_is_found() {
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
        // Of a write that was cut off nothing counts.
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
    fn a_file_that_is_another_one_is_refused() {
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
        std::fs::write(&path, newer(2)).unwrap();
        assert!(error(&ours).contains("version 2"), "{}", error(&ours));
        for bad in [vec![7; 8192], vec![0; 4096], good[..32].to_vec()] {
            std::fs::write(&path, bad).unwrap();
            error(&ours);
        }
        std::fs::write(&path, &good).unwrap();
        opened(&path, &ours).unwrap();
    }

    #[test]
    fn who_asks_is_answered() {
        let folder = tempfile::tempdir().unwrap();
        let (path, volume) = (folder.path().join("format"), volume());
        let namespace = identity::nguid("format", 1, &volume.id());
        let file = FormatFile::open(&path, 512, namespace, PreviousProcess::default());
        let store = FileStore {
            writer: Mutex::new(Writer::File(Box::new(file.unwrap().0))),
            now: Arc::default(),
        };
        let (told, answer) = channel();
        for size in [4096, 512, 4096] {
            let told = told.clone();
            store.save(
                BlockFormat::plain(size),
                Box::new(move |kept| told.send(kept).unwrap()),
            );
            assert!(answer.recv_timeout(Duration::from_secs(30)).unwrap());
            assert_eq!(store.now.load(Ordering::Relaxed), size);
        }
        drop(store);
        assert_eq!(opened(&path, &volume).unwrap().block_size, 4096);
    }
}
