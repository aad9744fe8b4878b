//! LBA formats of namespaces: their options, and the file that stores the format that a host has
//! selected by Format NVM.
//!
//! The file contains two records, each in a page of its own, which are written alternately. Each
//! write is made durable before the format counts as changed. One record is therefore valid at any
//! moment, and the newer valid one is the current format.
//!
//! For a namespace with metadata, this file also determines the format of the metadata file. A new
//! format is recorded with a mark that the metadata must be initialized, and again without the mark
//! afterwards. If this process dies in between, the next process initializes the metadata. All data
//! has been erased by then.

use crate::NamespaceFiles;
use crate::metadata::{self, MetadataFile, SavedHeader};
use crate::table_file;
use anyhow::{Context, Result, bail, ensure};
use config::identity;
use config::spec::NamespaceSpec;
use controller::{BlockFormat, FormatSaved, FormatStore, Formats, KeptFormat, SavedFormat};
use controller::{MetadataState, NamespaceConfig};
use protection::{Guard, StorageTag, Type};
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
/// Version of the format file of a namespace that has only formats without metadata.
const PLAIN: u32 = 1;
/// Version of the format file of a namespace that may have formats with metadata.
const VERSION: u32 = 2;
/// Size of a record in bytes; the last four are the checksum of the others.
const LEN: usize = 64;
/// Distance in bytes between the two records of a format file.
const APART: usize = table_file::PAGE;

/// LBA formats of a namespace from which its host may choose, and the current one.
#[derive(Clone, Debug)]
pub struct Chosen {
    formats: Formats,
    block_size: u32,
    metadata: Option<Arc<MetadataState>>,
    /// Current block size in bytes, as the format file records it.
    now: Weak<AtomicU32>,
}

impl Chosen {
    /// Adds the LBA formats to a namespace's configuration, if the host may choose.
    pub fn shape(chosen: Option<Self>, config: NamespaceConfig) -> NamespaceConfig {
        match chosen {
            None => config,
            Some(chosen) => NamespaceConfig {
                block_size: chosen.block_size,
                metadata: chosen.metadata,
                formats: Some(chosen.formats),
                ..config
            },
        }
    }
}

/// Block sizes of namespaces for which hosts may choose them, by disk and NSID, for displays.
#[derive(Default)]
pub struct BlockSizes(Mutex<HashMap<(String, u32), Weak<AtomicU32>>>);

impl BlockSizes {
    /// Registers the block size of a namespace that was opened.
    pub fn enter(&self, disk: &str, nsid: u32, files: &NamespaceFiles) {
        let mut all = self.0.lock().unpoisoned();
        all.retain(|_, size| size.strong_count() > 0);
        if let Some(chosen) = &files.formats {
            all.insert((disk.to_owned(), nsid), chosen.now.clone());
        }
    }

    /// Returns the current block size of a namespace; `None` if it has only one format.
    pub fn of(&self, disk: &str, nsid: u32) -> Option<u32> {
        let all = self.0.lock().unpoisoned();
        let size = all.get(&(disk.to_owned(), nsid))?.upgrade()?;
        Some(size.load(Ordering::Relaxed))
    }
}

/// Opens the format file of a namespace; returns `None` if the namespace has only one format.
///
/// # Errors
/// A message for the user when the options conflict or a file cannot be opened.
pub fn open(
    spec: &NamespaceSpec,
    volume: &Arc<dyn Volume>,
    previous: PreviousProcess,
) -> Result<Option<Chosen>> {
    let Some(path) = &spec.format_file else {
        return Ok(None);
    };
    let url = &*spec.volume;
    let first = metadata::configured(spec, &**volume)?;
    let opened = open_files(path, spec.metadata.as_deref(), first, volume, previous);
    let (file, metadata) = opened.with_context(|| format!("{url}: format-file"))?;
    let format = file.newest.format;
    let now = Arc::new(AtomicU32::new(format.block));
    let table = file.metadata.as_ref().map(MetadataFile::volume);
    let store = Arc::new(FileStore {
        writer: Mutex::new(Writer::File(Box::new(file))),
        now: now.clone(),
    });
    Ok(Some(Chosen {
        now: Arc::downgrade(&now),
        formats: match table {
            Some(table) => Formats::with_metadata(first, format, Some(table), store),
            None => Formats::new(first.block, store),
        },
        block_size: format.block,
        metadata,
    }))
}

/// Returns the recorded format. If it has the configured LBA format, its storage tag is taken from
/// the configuration. With protection information, the size of the tag cannot change, only its
/// mask.
fn configured(kept: BlockFormat, first: &BlockFormat) -> BlockFormat {
    let sized = kept.protection.is_none() || kept.storage.bits == first.storage.bits;
    if kept.is_lba_format_of(first) && sized {
        BlockFormat {
            storage: first.storage,
            ..kept
        }
    } else {
        kept
    }
}

/// Opens the format file and the metadata file of a namespace, so that both match.
fn open_files(
    path: &Path,
    metadata: Option<&Path>,
    first: BlockFormat,
    volume: &Arc<dyn Volume>,
    previous: PreviousProcess,
) -> Result<(FormatFile, Option<Arc<MetadataState>>)> {
    let namespace = identity::nguid("format", 1, &volume.id());
    let mut file = FormatFile::open(path, first, namespace, previous)?;
    file.newest.format = configured(file.newest.format, &first);
    let FormatRecord { format, remake, .. } = file.newest;
    let Some(metadata) = metadata else {
        ensure!(
            format.metadata == 0 && !remake,
            "{}: the guest has chosen a format with metadata, which needs the key metadata, the \
             file of the blocks' metadata",
            path.display()
        );
        return Ok((file, None));
    };
    let size = volume.info().size;
    let table = MetadataFile::open(metadata, format, (&**volume, size), previous)?;
    if remake {
        // The user may have configured another file since.
        table.check_owner()?;
        table.remake(format, size)?;
        file.keep(format, false)?;
    }
    let state = table.state(format, size)?;
    table.shorten(format, size)?;
    file.metadata = Some(table);
    file.volume = Some(Arc::downgrade(volume));
    Ok((file, state))
}

/// Record in a format file: the LBA format that a host has chosen for a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FormatRecord {
    format: BlockFormat,
    /// Whether the metadata has still to be initialized for this format.
    remake: bool,
    /// NGUID of the namespace to which the file belongs.
    namespace: [u8; 16],
    /// Sequence number; the record with the higher one is newer.
    sequence: u64,
}

impl FormatRecord {
    fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        let format = self.format;
        let plain = format == BlockFormat::plain(format.block) && !self.remake;
        let version = if plain { PLAIN } else { VERSION };
        let (kind, first) = match format.protection {
            Some((kind, first)) => (kind as u8, first),
            None => (0, false),
        };
        let flags = [format.extended, first, self.remake];
        let flags = flags.into_iter().zip(0..);
        let flags = flags.map(|(flag, bit)| u8::from(flag) << bit).sum();
        // Files of version 1 have zeroes after the sequence number.
        let guard = if plain { 0 } else { format.guard.bits() };
        let StorageTag { bits, mask } = format.storage;
        let fields: [&[u8]; 8] = [
            &MAGIC,
            &version.to_le_bytes(),
            &format.block.to_le_bytes(),
            &self.namespace,
            &self.sequence.to_le_bytes(),
            &format.metadata.to_le_bytes(),
            &[guard, kind, flags, bits],
            &mask.to_le_bytes(),
        ];
        let fields = fields.into_iter().flatten();
        for (to, from) in bytes.iter_mut().zip(fields) {
            *to = *from;
        }
        let (content, sum) = bytes.split_at_mut(LEN - 4);
        sum.copy_from_slice(&crc32fast::hash(content).to_le_bytes());
        bytes
    }

    /// Decodes a record and its file version; `None` if it is invalid.
    fn decode(bytes: &[u8]) -> Option<(u32, Self)> {
        let bytes = bytes.get(..LEN)?;
        let (content, sum) = bytes.split_at(LEN - 4);
        let whole = content.starts_with(&MAGIC) && sum == crc32fast::hash(content).to_le_bytes();
        let at = |from: usize| content.get(from..).filter(|_| whole);
        let word = |from| Some(u32::from_le_bytes(*at(from)?.first_chunk()?));
        let [guard, kind, flags, bits] = *at(42)?.first_chunk()?;
        let guard = Guard::of(guard).unwrap_or(Guard::Bits16);
        let mask = u64::from_le_bytes(*at(46)?.first_chunk()?);
        let kept = FormatRecord {
            format: BlockFormat {
                block: word(12)?,
                metadata: u16::from_le_bytes(*at(40)?.first_chunk()?),
                guard,
                storage: StorageTag { bits, mask },
                extended: flags & 1 != 0,
                protection: Type::of(kind).map(|kind| (kind, flags & 2 != 0)),
            },
            remake: flags & 4 != 0,
            namespace: *at(16)?.first_chunk()?,
            sequence: u64::from_le_bytes(*at(32)?.first_chunk()?),
        };
        Some((word(8)?, kept))
    }
}

/// Open file that stores the LBA format of a namespace. Every call may block.
struct FormatFile {
    path: PathBuf,
    file: File,
    /// Volume with a lock that also protects the format file; kept open for the lock.
    _locked: FileVolume,
    newest: FormatRecord,
    /// True if the next process will find `newest`, with metadata that matches or will be
    /// initialized, and the namespace has that format.
    known: bool,
    /// Index of the record that is written next, 0 or 1.
    next: usize,
    /// Metadata file, if the formats have metadata, and the volume to which it belongs.
    metadata: Option<MetadataFile>,
    volume: Option<Weak<dyn Volume>>,
}

impl FormatFile {
    /// Opens the format file, or creates it with the format `first`.
    fn open(
        path: &Path,
        first: BlockFormat,
        namespace: [u8; 16],
        previous: PreviousProcess,
    ) -> Result<Self> {
        let new = FormatRecord {
            format: first,
            remake: false,
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
        let (newest, next) = match (FormatRecord::decode(first), FormatRecord::decode(second)) {
            (Some(a), Some(b)) if a.1.sequence > b.1.sequence => (a, 1),
            (_, Some(b)) => (b, 0),
            (Some(a), None) => (a, 1),
            (None, None) => bail!(
                "{shown}: not a file of an LBA format. Removing it resets the namespace to the \
                 configured format, whatever its blocks contain"
            ),
        };
        let (version, newest) = newest;
        ensure!(
            (PLAIN..=VERSION).contains(&version),
            "{shown}: unknown version {version} of the file's format"
        );
        ensure!(
            newest.namespace == namespace,
            "{shown}: the file has the LBA format of another volume"
        );
        let checked = newest.format.check();
        checked.with_context(|| format!("{shown}: unknown LBA format"))?;
        let file = File::options()
            .write(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(path)
            .with_context(|| shown.to_string())?;
        Ok(FormatFile {
            path: path.into(),
            file,
            _locked: locked,
            newest,
            known: true,
            next,
            metadata: None,
            volume: None,
        })
    }

    /// Records a new format, and initializes the metadata for it. On success both survive a kill
    /// and a power loss; the metadata is that of blocks that were never written.
    ///
    /// # Errors
    /// A message for the log. If `known` is true, the previous format is still in effect.
    fn save(&mut self, format: BlockFormat) -> Result<KeptFormat> {
        let Some(volume) = self.volume.as_ref().map(Weak::upgrade) else {
            ensure!(format.metadata == 0, "there is no file for its metadata");
            self.keep(format, false)?;
            return Ok(KeptFormat { metadata: None });
        };
        let size = volume.context("the volume is closed")?.info().size;
        let before = self.newest.format;
        let table = self.metadata.as_ref().context("there is no such file")?;
        let old = if self.known {
            table.before(before, size)?
        } else {
            None
        };
        table.grow(format, size, old.as_ref())?;
        crash::point!("vnvme.format.grown");
        let kept = self.remake(format, size);
        if kept.is_err() && self.newest.remake {
            // The namespace continues with its old format if possible.
            let restored = self.restore(old.as_ref());
            if let Err(error) = &restored {
                tracing::error!(
                    path = %self.path.display(),
                    "the metadata file was not created; the next process retries: {error:#}"
                );
            }
            let again = self.keep(before, restored.is_err());
            self.known = restored.is_ok() && again.is_ok();
        }
        kept
    }

    /// Restores the metadata file of the previous format after a change has failed.
    fn restore(&self, old: Option<&SavedHeader>) -> Result<()> {
        let table = self.metadata.as_ref().context("there is no such file")?;
        table.restore(old.context("it was of no format")?)
    }

    /// Stores the format and initializes the metadata for it; `size` is the volume's size in bytes.
    fn remake(&mut self, format: BlockFormat, size: u64) -> Result<KeptFormat> {
        self.keep(format, true)?;
        crash::point!("vnvme.format.announced");
        let table = self.metadata.as_ref().context("there is no such file")?;
        table.remake(format, size)?;
        crash::point!("vnvme.format.made");
        let metadata = table.state(format, size)?;
        self.keep(format, false)?;
        crash::point!("vnvme.format.kept");
        if let Some(Err(error)) = self.metadata.as_ref().map(|t| t.shorten(format, size)) {
            tracing::warn!(
                path = %self.path.display(),
                "the metadata file could not be shortened: {error:#}"
            );
        }
        Ok(KeptFormat { metadata })
    }

    /// Records a format durably; `remake` marks that its metadata must be initialized.
    ///
    /// # Errors
    /// The error of the failed write. The file contains the old format if `known` is true.
    fn keep(&mut self, format: BlockFormat, remake: bool) -> std::io::Result<()> {
        let before = self.newest;
        let kept = FormatRecord {
            format,
            remake,
            sequence: before.sequence + 1,
            ..before
        };
        if let Err(error) = self.write(kept) {
            // The failed write may still have reached the file, so a newer record restores the old
            // format.
            let again = FormatRecord {
                sequence: kept.sequence + 1,
                ..before
            };
            let written = self.write(again);
            if written.is_ok() {
                (self.newest, self.next) = (again, 1 - self.next);
            }
            self.known = written.is_ok();
            return Err(error);
        }
        (self.newest, self.next) = (kept, 1 - self.next);
        self.known = true;
        Ok(())
    }

    fn write(&self, kept: FormatRecord) -> std::io::Result<()> {
        let at = (self.next * APART) as u64;
        self.file.write_all_at(&kept.encode(), at)?;
        self.file.sync_data()
    }
}

/// Writer of the format file on its own thread, which is started on the first write. The thread
/// inherits the sandbox of the process.
struct FileStore {
    writer: Mutex<Writer>,
    /// Current block size of the namespace in bytes.
    now: Arc<AtomicU32>,
}

enum Writer {
    File(Box<FormatFile>),
    Thread(Sender<(BlockFormat, FormatSaved)>),
    /// No thread could be started that writes the format file.
    None,
}

impl std::fmt::Debug for FileStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileStore").finish_non_exhaustive()
    }
}

impl Writer {
    fn start(mut file: Box<FormatFile>, now: Arc<AtomicU32>) -> Self {
        let (formats, written) = channel::<(BlockFormat, FormatSaved)>();
        let builder = std::thread::Builder::new().name("format".into());
        let thread = builder.spawn(move || {
            for (format, done) in written {
                let kept = file.save(format);
                now.store(file.newest.format.block, Ordering::Relaxed);
                done(match kept {
                    Ok(kept) => SavedFormat::New(kept),
                    Err(error) => {
                        let path = file.path.display();
                        tracing::error!(%path, "an LBA format cannot be stored: {error:#}");
                        if file.known {
                            SavedFormat::Before
                        } else {
                            SavedFormat::Unknown
                        }
                    }
                });
            }
        });
        match thread {
            Ok(_) => Self::Thread(formats),
            Err(error) => {
                tracing::error!(%error, "an LBA format cannot be stored: no thread");
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
            Writer::Thread(formats) => {
                let sent = formats.send((format, done));
                // The thread ended while handling a request.
                let unsent = sent.err().map(|unsent| unsent.0.1);
                unsent.map(|done| (done, SavedFormat::Unknown))
            }
            _ => Some((done, SavedFormat::Before)),
        };
        drop(writer);
        if let Some((done, end)) = left {
            done(end);
        }
    }
}

#[cfg(test)]
mod tests;
