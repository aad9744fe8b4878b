//! Opening an image, and the files behind it.
//!
//! The author of an image, perhaps a guest's owner, decides which files it names. A backing file
//! is opened only where the user allows it. Its format is taken from the image and never guessed
//! from its first bytes.

use crate::blocking::{Blocking, block_on, fill};
use crate::check::{CheckError, RefcountErrors, Skeleton, check};
use crate::deferred::Deferred;
use crate::error::ImageError;
use crate::format::{
    Geometry, HEADER_ROOM, Header, L2Entry, Mapping, table_entry, without_reserved,
};
use crate::image::{Image, ImageParts, Writer};
use crate::journal::{FileId, Journal, SLOTS};
use crate::ranges::Ranges;
use crate::refcounts::Refcounts;
use crate::store::Store;
use crate::tables::{L1, Tables, numbers};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use volume::{Direct, FileOptions, FileVolume, JournalFolder, PreviousProcess, VolumeError};

/// Maximum number of images in a backing chain.
const MAX_CHAIN: usize = 64;
/// Maximum size, in bytes, of a table that is kept in memory as a whole.
const LARGEST_TABLE: u64 = 1 << 30;
/// Smallest cluster size for access past the page cache: tables and clusters share no page.
const PAGE: u64 = 4096;

/// Options for opening a qcow2 image as a volume.
#[derive(Debug, Clone)]
pub struct Qcow2Options {
    /// Whether writes are refused, so that the image is never changed.
    pub read_only: bool,
    /// Block size of the disk in bytes; `None` for 512.
    pub block_size: Option<u32>,
    /// Whether I/O to the image's clusters bypasses the page cache.
    pub direct: Direct,
    /// Backing files may be this file, or lie below this folder; none may be opened otherwise.
    pub backing: Option<PathBuf>,
    /// Bytes of L2 tables that are kept in memory, for each image of the chain.
    pub l2_cache: u64,
    /// Limits of the wait for a previous process that still has the file locked.
    pub previous: PreviousProcess,
    /// Time limit for one operation on a file that may hang; the operation fails after it
    /// ([`FileOptions::timeout`]).
    pub timeout: Option<Duration>,
    /// Folder for the journal of table entries, by which a later process has all writes of this
    /// one. `None`: no journal, and every entry is written at once.
    pub journals: Option<JournalFolder>,
    /// Maximum number of entries in the journal, and so of entries that wait.
    pub journal_slots: usize,
}

impl Qcow2Options {
    /// The default of [`Qcow2Options::l2_cache`]: 256 GiB of disk in clusters of 64 KiB.
    pub const L2_CACHE: u64 = 32 << 20;
}

impl Default for Qcow2Options {
    fn default() -> Self {
        Self {
            read_only: false,
            block_size: None,
            direct: Direct::Auto,
            backing: None,
            l2_cache: Self::L2_CACHE,
            previous: PreviousProcess::default(),
            timeout: None,
            journals: None,
            journal_slots: SLOTS,
        }
    }
}

/// The images of a chain, the one that is served first, and their files for calls that wait.
pub(crate) struct Chain {
    pub(crate) images: Vec<Image>,
    pub(crate) files: Blocking,
}

/// File of the backing chain that was opened.
struct OpenedFile {
    path: PathBuf,
    volume: FileVolume,
    file: File,
    /// Length of the file in bytes.
    len: u64,
    is_device: bool,
    /// Device and inode number, by which a file that occurs twice in a chain is recognised.
    id: FileId,
}

fn open_file(path: &Path, options: FileOptions) -> Result<OpenedFile, ImageError> {
    let volume = FileVolume::open_unlocked(path, options).map_err(|error| match error {
        VolumeError::NotFound { path } => ImageError::Missing { path },
        error => error.into(),
    })?;
    // An image opened for reading locks only the bytes by which programs exclude writers: QEMU may
    // have the same backing file open.
    volume.lock(0, options.read_only.then_some(0))?;
    let failed = |what| {
        let path = path.to_owned();
        move |error| ImageError::Io { path, what, error }
    };
    let mut file = volume
        .reopen_file()
        .map_err(failed("cannot be opened a second time"))?;
    let metadata = file.metadata().map_err(failed("cannot be examined"))?;
    let is_device = metadata.file_type().is_block_device();
    let len = file
        .seek(SeekFrom::End(0))
        .map_err(failed("has no length"))?;
    Ok(OpenedFile {
        path: path.to_owned(),
        volume,
        file,
        len,
        is_device,
        id: if is_device {
            (u64::MAX, metadata.rdev())
        } else {
            (metadata.dev(), metadata.ino())
        },
    })
}

/// Opens an image with all that is behind it.
pub(crate) fn open(path: &Path, options: &Qcow2Options) -> Result<Chain, ImageError> {
    open_with(path, options, |files| files)
}

/// Opens an image like [`open`]. `store`: makes the store by which the image is prepared for
/// writing.
pub(crate) fn open_with<S: Store>(
    path: &Path,
    options: &Qcow2Options,
    store: impl Fn(Blocking) -> S,
) -> Result<Chain, ImageError> {
    let (mut images, mut files, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
    let file_options = |read_only| FileOptions {
        read_only,
        block_size: options.block_size,
        direct: options.direct,
        image: true,
        previous: options.previous,
        timeout: options.timeout,
        ..FileOptions::default()
    };
    let mut next = Some((open_file(path, file_options(options.read_only))?, true));
    while let Some((opened, is_image)) = next.take() {
        seen.insert(opened.id);
        let layer = images.len();
        if !is_image {
            let (image, file) = raw(opened, layer)?;
            images.push(image);
            files.push(file);
            break;
        }
        let header = header(&opened)?;
        if let Some(name) = &header.backing {
            let backing = Backing {
                image: &opened.path,
                name,
                allowed: options.backing.as_deref(),
            };
            if layer + 1 >= MAX_CHAIN {
                return Err(backing.refuse("would be one of more than 64 in the chain"));
            }
            let is_image = backing.is_image(header.backing_format.as_deref())?;
            let below = backing.open(&seen, file_options(true))?;
            next = Some((below, is_image));
        }
        let write = layer == 0 && !options.read_only;
        let (image, file) = image(opened, &header, layer, write, options, &store)?;
        images.push(image);
        files.push(file);
    }
    one_unit(&mut images)?;
    write_back(&images, &files);
    Ok(Chain {
        images,
        files: Blocking::new(files),
    })
}

/// Starts write-back of dirty pages of the backing files that another process wrote through the
/// page cache; `qemu-img convert` leaves a whole image that way. A direct read of a range with
/// dirty pages is not executed in the submitting call: the kernel hands it to a worker thread,
/// which writes the pages first. This function does not wait. The image itself is left out, because
/// an error that its flush would report must not be consumed here.
fn write_back(images: &[Image], files: &[File]) {
    let behind = images.iter().zip(files).skip(1);
    let direct = behind.filter(|(image, _)| image.data.is_direct() && !image.data.has_threads());
    let files: Vec<File> = direct
        .filter_map(|(_, file)| file.try_clone().ok())
        .collect();
    if files.is_empty() {
        return;
    }
    let write = move || {
        for file in files {
            if let Err(error) = file.sync_data() {
                tracing::debug!("a backing file's page cache could not be written: {error}");
            }
        }
    };
    // Without it reads are slower for as long as the kernel leaves it in the cache.
    let _ = std::thread::Builder::new()
        .name("qcow2".into())
        .spawn(write);
}

/// Makes requests of the disk's block size fit every file of the chain: a file with larger blocks
/// than the disk can have is accessed through the page cache.
fn one_unit(images: &mut [Image]) -> Result<(), ImageError> {
    let unit = images
        .iter()
        .map(|image| image.data.unit())
        .max()
        .unwrap_or(1);
    let size = images.first().map_or(0, Image::size);
    if !size.is_multiple_of(unit) {
        for image in images.iter_mut().filter(|image| image.data.unit() > 512) {
            image.go_through_cache()?;
        }
    }
    Ok(())
}

fn header(opened: &OpenedFile) -> Result<Header, ImageError> {
    let path = &opened.path;
    let room = opened.len.min(HEADER_ROOM as u64);
    let mut bytes = vec![0; usize::try_from(room).unwrap_or(HEADER_ROOM)];
    fill(&opened.file, &mut bytes, 0).map_err(|error| ImageError::Io {
        path: path.clone(),
        what: "its header cannot be read",
        error,
    })?;
    Header::parse(&bytes).map_err(|why| ImageError::Format {
        path: path.clone(),
        why,
    })
}

/// Backing file that an image names, with its format if that is named, too.
struct Backing<'a> {
    image: &'a Path,
    name: &'a str,
    allowed: Option<&'a Path>,
}

impl Backing<'_> {
    fn refuse(&self, why: impl Into<String>) -> ImageError {
        ImageError::Backing {
            path: self.image.to_owned(),
            name: self.name.to_owned(),
            why: why.into(),
        }
    }

    /// Returns whether the backing file is a qcow2 image, and not a raw disk.
    fn is_image(&self, format: Option<&str>) -> Result<bool, ImageError> {
        match format {
            Some("qcow2") => Ok(true),
            Some("raw") => Ok(false),
            Some(other) => Err(self.refuse(format!(
                "is of the format \"{other}\", and raw and qcow2 are known"
            ))),
            None => Err(self.refuse(format!(
                "is of a format that the image does not name; have it do so with: qemu-img rebase -u -b '{}' -F raw (or qcow2) {}",
                self.name,
                self.image.display()
            ))),
        }
    }

    /// Returns the path of the backing file.
    fn path(&self) -> Result<PathBuf, ImageError> {
        let name = self.name;
        let protocol = name.split(['/', ':']).next().unwrap_or("");
        if name
            .get(protocol.len()..)
            .is_some_and(|rest| rest.starts_with(':'))
        {
            return Err(self.refuse("is not a regular file; only files can back an image"));
        }
        // Relative names begin where the image lies.
        let folder = self.image.parent().unwrap_or(Path::new(""));
        let path = folder.join(name);
        path.canonicalize()
            .map_err(|error| self.refuse(format!("cannot be found as {}: {error}", path.display())))
    }

    fn open(
        &self,
        seen: &HashSet<(u64, u64)>,
        options: FileOptions,
    ) -> Result<OpenedFile, ImageError> {
        let path = self.path()?;
        let Some(allowed) = self.allowed else {
            let folder = path.parent().unwrap_or(&path).display();
            return Err(self.refuse(format!(
                "may not be opened: backing files are opened only where that is allowed, here by \
                 backing={folder}"
            )));
        };
        let allowed = allowed.canonicalize().map_err(|error| {
            self.refuse(format!(
                "may not be opened: backing={} names nothing: {error}",
                allowed.display()
            ))
        })?;
        let outside = |path: &Path| {
            let (path, allowed) = (path.display(), allowed.display());
            self.refuse(format!(
                "may not be opened: it is {path}, which is not below {allowed} (backing=)"
            ))
        };
        if !path.starts_with(&allowed) {
            return Err(outside(&path));
        }
        // Before it is locked, for it may be one that is locked already.
        let metadata = fs::metadata(&path).map_err(|error| self.refuse(error.to_string()))?;
        let id = if metadata.file_type().is_block_device() {
            (u64::MAX, metadata.rdev())
        } else {
            (metadata.dev(), metadata.ino())
        };
        if seen.contains(&id) {
            return Err(self.refuse("is an image of the chain already: it leads back to itself"));
        }
        let opened = open_file(&path, options)?;
        // Resolve the path of the descriptor that was opened; the name may refer to another file by
        // now.
        let real = fs::read_link(format!("/proc/self/fd/{}", opened.file.as_raw_fd()));
        match real {
            Ok(real) if real.starts_with(&allowed) && opened.id == id => Ok(opened),
            _ => Err(outside(&path)),
        }
    }
}

/// Opens a raw disk at the lower end of a chain.
fn raw(opened: OpenedFile, layer: usize) -> Result<(Image, File), ImageError> {
    let unit = opened.volume.unit().max(512);
    let parts = ImageParts {
        path: opened.path,
        layer,
        data: opened.volume,
        tables_file: None,
        // Zeroes follow behind the end of a file.
        size: opened.len.next_multiple_of(unit),
        tables: None,
        geometry: Geometry {
            version: 3,
            cluster_bits: 16,
            refcount_order: 4,
        },
        writer: None,
    };
    Ok((Image::new(parts), opened.file))
}

/// Opens an image of a chain, for reading or for writing.
fn image<S: Store>(
    opened: OpenedFile,
    header: &Header,
    layer: usize,
    write: bool,
    options: &Qcow2Options,
    store: impl Fn(Blocking) -> S,
) -> Result<(Image, File), ImageError> {
    let path = opened.path.clone();
    let geometry = header.geometry;
    let failed = |what: &'static str| {
        let path = path.clone();
        move |error| ImageError::Io { path, what, error }
    };
    let file = &opened.file;
    let mut bytes = vec![0; header.l1_entries as usize * 8];
    fill(file, &mut bytes, header.l1_offset).map_err(failed("its L1 table cannot be read"))?;
    let l1: Vec<u64> = numbers(&bytes).collect();
    let invalid = |entry: &&u64| table_entry(**entry, &geometry).is_none();
    let damaged = l1.iter().filter(invalid).count();
    if damaged > 0 {
        if write {
            return Err(ImageError::Damaged {
                path,
                what: "an entry of its L1 table is against the rules".into(),
            });
        }
        // Data that other entries lead to can be rescued. Reads by an entry that leads nowhere
        // fail.
        tracing::warn!(
            "{}: {damaged} entries of its L1 table are against the rules; the data behind them may \
             be unreadable, see qemu-img check",
            path.display()
        );
        let entries = l1.iter().map(|&entry| without_reserved(entry, &geometry));
        bytes = entries.flat_map(u64::to_be_bytes).collect();
    }
    let (writer, replayed) = if write {
        let (writer, replayed) = writer(&opened, header, &l1, options)?;
        (Some(writer), replayed)
    } else {
        if has_journal(header) {
            tracing::warn!(
                "{}: was not closed cleanly; what was written last may be in its journal, and shows \
                 once the image was opened for writing",
                path.display()
            );
        }
        (None, Vec::new())
    };
    let l1 = L1::new(header.l1_offset, &bytes);
    let tables = Tables::new(geometry, layer, l1, options.l2_cache);
    let tables_file = opened.volume.reopen(Direct::Off)?;
    let cluster_is_fine = geometry.cluster_size() >= PAGE;
    let mut size = header.size;
    if layer == 0 && !write {
        // The rest of the last block is in its cluster, or reads as zeroes.
        size = size.next_multiple_of(512);
    }
    if !size.is_multiple_of(512) {
        return Err(ImageError::Size {
            path,
            bytes: header.size,
            why: "a disk consists of blocks of 512 bytes; change it with qemu-img resize, or serve it \
                  with read-only=on",
        });
    }
    let mut image = Image::new(ImageParts {
        path: path.clone(),
        layer,
        data: opened.volume,
        tables_file: Some(tables_file),
        size,
        tables: Some(tables),
        geometry,
        writer,
    });
    if image.data.is_direct() && !cluster_is_fine {
        image.go_through_cache()?;
    }
    if let Some(writer) = &image.writer {
        let store = store(Blocking::new(vec![
            opened.file.try_clone().map_err(failed("no descriptor"))?,
        ]));
        prepare(&image, writer, &store, header, &replayed)?;
    }
    Ok((image, opened.file))
}

/// Returns whether the image was not closed cleanly, and its deferred entries are in a journal.
fn has_journal(header: &Header) -> bool {
    header.is_dirty() && header.journal() != 0
}

/// Returns the journal of an image. `None`: every entry is written at once.
///
/// # Errors
/// The journal of an image that was not closed cleanly is there, and cannot be read: opening the
/// image would lose the entries in it.
fn journal(
    opened: &OpenedFile,
    header: &Header,
    options: &Qcow2Options,
) -> Result<Option<Journal>, ImageError> {
    let Some(folder) = &options.journals else {
        return Ok(None);
    };
    // Where the path is not known, the journal is kept for as long as the host is up.
    let path = opened.path.canonicalize().unwrap_or_default();
    let error = match Journal::open(folder, opened.id, path, options.journal_slots) {
        Ok(journal) => return Ok(Some(journal)),
        Err(error) => error,
    };
    let is_missing = matches!(Journal::path(folder, opened.id).try_exists(), Ok(false));
    if has_journal(header) && !is_missing {
        return Err(ImageError::Io {
            path: Journal::path(folder, opened.id),
            what: "the journal of an image that was not closed cleanly cannot be opened",
            error,
        });
    }
    let (path, folder) = (opened.path.display(), folder.path.display());
    tracing::warn!("{path}: no journal in {folder}, first writes are slower: {error}");
    Ok(None)
}

/// Returns the entries of the journal that the image lacks, and that continue it.
///
/// # Errors
/// A table cannot be read. The journal stays as it is.
fn recorded(
    opened: &OpenedFile,
    header: &Header,
    tables: &HashSet<u64>,
    journal: Option<&Journal>,
) -> Result<Vec<(u64, L2Entry)>, CheckError> {
    let path = opened.path.display();
    let is_open = has_journal(header);
    let found = match journal.map_or(Ok(None), Journal::recorded) {
        Ok(found) => found,
        Err(_) if !is_open => return Ok(Vec::new()),
        Err(error) => {
            tracing::warn!(
                "{path}: its journal is not used: {error}; what was written to the image and not \
                 flushed may be lost"
            );
            return Ok(Vec::new());
        }
    };
    let entries = match found {
        Some(found) if is_open && found.number == header.journal() => found.entries,
        Some(found) if !found.entries.is_empty() => {
            complain_of_change(opened);
            return Ok(Vec::new());
        }
        _ if is_open => {
            tracing::warn!(
                "{path}: was not closed cleanly, and its journal is not there: the host was booted \
                 since, or the process before had another control socket; what was written to the \
                 image and not flushed may be lost"
            );
            return Ok(Vec::new());
        }
        _ => return Ok(Vec::new()),
    };
    if !continues(opened, &header.geometry, tables, &entries)? {
        complain_of_change(opened);
        return Ok(Vec::new());
    }
    Ok(entries)
}

fn complain_of_change(opened: &OpenedFile) {
    tracing::error!(
        "{}: another program has changed it since the previous process was killed; what was \
         written to it and not flushed is lost",
        opened.path.display()
    );
}

/// Returns whether these entries continue the image: each is of new data, and belongs to one of the
/// L2 tables, which has the entry or an entry without data at its place.
fn continues(
    opened: &OpenedFile,
    geometry: &Geometry,
    tables: &HashSet<u64>,
    entries: &[(u64, L2Entry)],
) -> Result<bool, CheckError> {
    for &(at, entry) in entries {
        let table = at & !(geometry.cluster_size() - 1);
        let Mapping::Data { host, copied: true } = entry.mapping(geometry) else {
            return Ok(false);
        };
        if !at.is_multiple_of(8) || !tables.contains(&table) {
            return Ok(false);
        }
        let mut bytes = [0; 8];
        fill(&opened.file, &mut bytes, at).map_err(CheckError::Read)?;
        let present = L2Entry(u64::from_be_bytes(bytes));
        let replaces = match present.mapping(geometry) {
            Mapping::Unallocated | Mapping::Zero { host: None } => true,
            Mapping::Zero { host: Some(own) } => own == host,
            _ => present == entry,
        };
        if !replaces {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Prepares an image for its first write: writes the entries that a previous process has deferred,
/// begins a new journal, and clears the dirty bit and all autoclear features. The number of the
/// former journal stays in the header until the image has its entries.
fn prepare(
    image: &Image,
    writer: &Writer,
    store: &impl Store,
    header: &Header,
    replayed: &[(u64, L2Entry)],
) -> Result<(), ImageError> {
    let failed = |error: volume::IoError| ImageError::Io {
        path: image.path.clone(),
        what: "its tables cannot be written",
        error: match error.errno {
            0 => io::Error::other(error.kind.as_str()),
            errno => io::Error::from_raw_os_error(errno),
        },
    };
    block_on(async {
        let is_open = header.autoclear != 0 || header.is_dirty();
        let change = if is_open {
            Some(writer.begin(store).await?)
        } else {
            None
        };
        image.prepare(writer, store).await?;
        if !replayed.is_empty() {
            // Their clusters come first, as in `Writer::write_back`.
            store.flush().await?;
            for (at, entry) in replayed {
                store.write(*at, &entry.0.to_be_bytes()).await?;
                crash::point!("qcow2.replay.written");
            }
            // The journal is emptied next: the image has to have its entries for certain.
            store.flush().await?;
        }
        if let Some(deferred) = &writer.deferred {
            deferred.begin();
            crash::point!("qcow2.journal.begun");
        }
        drop(change);
        if is_open {
            writer.end(store).await?;
        }
        Ok(())
    })
    .map_err(failed)
}

/// Clusters that contain the image's own tables. No cluster may occur twice.
struct TableClusters<'a> {
    path: &'a Path,
    clusters: HashSet<u64>,
}

impl TableClusters<'_> {
    fn damaged(&self, what: impl Into<String>) -> ImageError {
        ImageError::Damaged {
            path: self.path.to_owned(),
            what: what.into(),
        }
    }

    fn enter(&mut self, clusters: Range<u64>) -> Result<(), ImageError> {
        for cluster in clusters {
            if !self.clusters.insert(cluster) {
                return Err(self.damaged(format!("two of its tables lie in cluster {cluster}")));
            }
        }
        Ok(())
    }
}

/// Returns the state for writing an image, and the deferred entries of a previous process that have
/// to be written to it.
fn writer(
    opened: &OpenedFile,
    header: &Header,
    l1: &[u64],
    options: &Qcow2Options,
) -> Result<(Writer, Vec<(u64, L2Entry)>), ImageError> {
    let path = &opened.path;
    header.check_writable().map_err(|why| ImageError::Format {
        path: path.clone(),
        why,
    })?;
    let geometry = header.geometry;
    let (bits, size) = (geometry.cluster_bits, geometry.cluster_size());
    let mut own = TableClusters {
        path,
        clusters: HashSet::new(),
    };
    let clusters = |offset: u64, bytes: u64| {
        let first = offset >> bits;
        first..first + geometry.clusters(bytes).max(1)
    };
    let reftable = u64::from(header.reftable_clusters) * size;
    let parts = vec![
        0..1,
        clusters(header.l1_offset, u64::from(header.l1_entries) * 8),
        clusters(header.reftable_offset, reftable),
    ];
    for part in &parts {
        own.enter(part.clone())?;
    }
    let mut refcounts = read_refcounts(opened, header, &mut own)?;
    let mut tables = HashSet::new();
    for &entry in l1 {
        let Some((table, copied)) = table_entry(entry, &geometry) else {
            continue;
        };
        if table != 0 && !copied {
            return Err(own.damaged("an L2 table of it is shared"));
        }
        if table != 0 {
            own.enter(table >> bits..(table >> bits) + 1)?;
            tables.insert(table);
        }
    }
    let journal = journal(opened, header, options)?;
    let mut replayed = recorded(opened, header, &tables, journal.as_ref())
        .map_err(|error| own.damaged(format!("{error}")))?;
    if header.is_dirty() {
        let skeleton = Skeleton {
            geometry,
            l1,
            parts,
        };
        let mut found = check_with(opened, &skeleton, &mut refcounts, &replayed);
        if matches!(&found, Err(error) if !matches!(error, CheckError::Read(_)))
            && !replayed.is_empty()
        {
            complain_of_change(opened);
            replayed.clear();
            found = check_with(opened, &skeleton, &mut refcounts, &replayed);
        }
        let RefcountErrors { leaked, uncounted } =
            found.map_err(|error| own.damaged(format!("{error}")))?;
        tracing::info!(
            "{}: was not closed cleanly; repaired its refcounts: {leaked} clusters were leaked, \
             {uncounted} used without a refcount",
            path.display()
        );
    }
    if let Some(cluster) = own
        .clusters
        .iter()
        .find(|&&cluster| refcounts.get(cluster) == 0)
    {
        return Err(own.damaged(format!("cluster {cluster} has a table, and is not counted")));
    }
    let unknown: Ranges = refcounts.begin(if opened.is_device { 0 } else { opened.len });
    let dirty = header.is_dirty();
    let deferred = journal.map(Deferred::new);
    let clusters = own.clusters;
    let writer = Writer::new(refcounts, clusters, unknown, dirty, header, deferred);
    Ok((writer, replayed))
}

/// Corrects the refcounts, as if the image had these entries at their byte offsets already.
fn check_with(
    opened: &OpenedFile,
    skeleton: &Skeleton<'_>,
    refcounts: &mut Refcounts,
    entries: &[(u64, L2Entry)],
) -> Result<RefcountErrors, CheckError> {
    check(skeleton, refcounts, |at, bytes| {
        fill(&opened.file, bytes, at)?;
        for (place, entry) in entries {
            let offset = place.checked_sub(at).and_then(|n| usize::try_from(n).ok());
            let field = offset.and_then(|offset| bytes.get_mut(offset..offset.checked_add(8)?));
            if let Some(field) = field {
                field.copy_from_slice(&entry.0.to_be_bytes());
            }
        }
        Ok(())
    })
}

fn read_refcounts(
    opened: &OpenedFile,
    header: &Header,
    own: &mut TableClusters<'_>,
) -> Result<Refcounts, ImageError> {
    let geometry = header.geometry;
    let (bits, size) = (geometry.cluster_bits, geometry.cluster_size());
    let failed = |error| ImageError::Io {
        path: opened.path.clone(),
        what: "its refcounts cannot be read",
        error,
    };
    let mut table = vec![0; (header.reftable_clusters as usize) << bits];
    fill(&opened.file, &mut table, header.reftable_offset).map_err(failed)?;
    let blocks: Vec<(usize, u64)> = numbers(&table)
        .enumerate()
        .filter(|(_, at)| *at != 0)
        .collect();
    let bytes = blocks.len() as u64 * size;
    if bytes > LARGEST_TABLE {
        return Err(ImageError::Large {
            path: opened.path.clone(),
            what: "refcounts",
            mib: bytes >> 20,
        });
    }
    let end = opened.is_device.then_some(opened.len >> bits);
    let mut refcounts = Refcounts::new(geometry, table.len() / 8, end);
    for (index, entry) in blocks {
        let at = match table_entry(entry, &geometry) {
            Some((at, false)) => at,
            _ => return Err(own.damaged("an entry of its refcount table is against the rules")),
        };
        own.enter(at >> bits..(at >> bits) + 1)?;
        let mut block = vec![0; 1 << bits];
        fill(&opened.file, &mut block, at).map_err(failed)?;
        refcounts.enter(index, at, block.into());
    }
    Ok(refcounts)
}
