//! State of one image of a chain, shared by all queues.

use crate::deferred::Deferred;
use crate::epoch::Epochs;
use crate::format::{COPIED, DIRTY, Geometry, Header, L2Entry, Mapping, OFFSET_FEATURES};
use crate::inflate::Inflated;
use crate::ranges::Ranges;
use crate::refcounts::{NoRun, Refcounts, Run, Settle};
use crate::store::Store;
use crate::tables::{Slice, TableLookup, Tables, checked};
use crate::wait::{RangeLocks, wait};
use probes::LogLimit;
use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use sync::Unpoisoned;
use volume::{Direct, Extent, FileVolume, IoError, IoErrorKind, Op, Volume, VolumeError};

/// Maximum number of clusters that one operation punches out of the file.
const MAX_PUNCHED_CLUSTERS: u64 = 1024;

/// Image of a backing chain, or the raw file at the lower end of the chain.
pub(crate) struct Image {
    pub(crate) path: PathBuf,
    /// Index of the image in the backing chain; 0 is the image that is served.
    pub(crate) layer: usize,
    /// File of the image, opened for I/O to clusters.
    pub(crate) data: FileVolume,
    /// The opening that holds the file's lock, when it is not one of the other two.
    locked: Option<FileVolume>,
    /// The file, opened through the page cache for access to tables; `None` for a raw file.
    pub(crate) tables_file: Option<FileVolume>,
    /// Size of the virtual disk in bytes, which changes when the image is resized.
    pub(crate) size: AtomicU64,
    /// L1 table and cached L2 tables; `None` for a raw file.
    pub(crate) tables: Option<Tables>,
    pub(crate) geometry: Geometry,
    /// State for writing the image; `None` for an image that is only read.
    pub(crate) writer: Option<Writer>,
    /// Cache of clusters that were decompressed recently.
    pub(crate) inflated: Inflated,
    log: LogLimit,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image")
            .field("path", &self.path)
            .field("layer", &self.layer)
            .finish_non_exhaustive()
    }
}

impl Drop for Image {
    /// Removes the journal, which nobody needs, while the file is still locked.
    fn drop(&mut self) {
        if let Some(writer) = &self.writer {
            writer.remove_journal();
        }
    }
}

/// Parts from which an [`Image`] is created.
pub(crate) struct ImageParts {
    pub(crate) path: PathBuf,
    pub(crate) layer: usize,
    pub(crate) data: FileVolume,
    pub(crate) tables_file: Option<FileVolume>,
    pub(crate) size: u64,
    pub(crate) tables: Option<Tables>,
    pub(crate) geometry: Geometry,
    pub(crate) writer: Option<Writer>,
}

impl Image {
    pub(crate) fn new(parts: ImageParts) -> Self {
        Self {
            path: parts.path,
            layer: parts.layer,
            data: parts.data,
            locked: None,
            tables_file: parts.tables_file,
            size: AtomicU64::new(parts.size),
            tables: parts.tables,
            inflated: Inflated::new(parts.geometry.cluster_size()),
            geometry: parts.geometry,
            writer: parts.writer,
            log: LogLimit::default(),
        }
    }

    /// Prepares the first write to the image: corrected refcounts are written, and the refcount
    /// table is enlarged if necessary.
    pub(crate) async fn prepare(&self, writer: &Writer, store: &impl Store) -> Result<(), IoError> {
        writer.settle_all(store).await?;
        self.make_room(writer, store, self.size()).await
    }

    /// Returns the size of the disk in bytes.
    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Switches I/O to clusters to the page cache, instead of direct I/O.
    pub(crate) fn go_through_cache(&mut self) -> Result<(), VolumeError> {
        let buffered = self.data.reopen(Direct::Off)?;
        let opened = std::mem::replace(&mut self.data, buffered);
        self.locked.get_or_insert(opened);
        Ok(())
    }

    /// Returns the entry of the image's file in the registry of open volumes.
    pub(crate) fn extent(&self) -> Option<Extent> {
        self.locked.as_ref().unwrap_or(&self.data).extent()
    }

    /// Returns an entry in the form in which it may be used. An invalid entry becomes
    /// [`L2Entry::INVALID`]. An entry that refers to a cluster without refcount or to a table's
    /// cluster becomes read-only.
    pub(crate) fn check(&self, entry: L2Entry) -> L2Entry {
        let checked = checked(entry, &self.geometry);
        let Some(writer) = &self.writer else {
            return checked;
        };
        let mut clusters = match checked.mapping(&self.geometry) {
            Mapping::Invalid => return checked,
            // With compressed data, too: where it is replaced its clusters are freed.
            _ => self.clusters_of(checked),
        };
        if clusters.all(|cluster| writer.owns(cluster)) {
            checked
        } else {
            self.complain("leads to a cluster that is not its own");
            L2Entry::INVALID
        }
    }

    /// Logs that a table of the image has an invalid entry.
    pub(crate) fn complain(&self, what: &str) {
        self.log.line(|left_out| {
            let path = self.path.display();
            tracing::error!(
                left_out,
                "{path}: an entry of its tables {what}; the image is damaged, see qemu-img check"
            );
        });
    }

    /// Looks up slice number `slice` of the L2 tables in the cache.
    pub(crate) async fn look(
        &self,
        store: &impl Store,
        slice: u64,
    ) -> Result<TableLookup, IoError> {
        match &self.tables {
            Some(tables) => tables.look(store, slice, |entry| self.check(entry)).await,
            None => Ok(TableLookup::NoTable),
        }
    }
}

/// State for writing an image.
///
/// The order of writes to the disk keeps an image consistent, whenever this process is killed and
/// whenever the machine loses its power:
/// 1. The header's dirty bit is durable before anything else is written: refcounts may be wrong
///    then.
/// 2. A cluster is counted before an entry leads to it, and an entry is removed before its
///    cluster's count is. So a kill leaves at most clusters that are counted and not used. A dirty
///    image's next opening finds them ([`crate::check`]).
/// 3. A table is durable before anything leads to it. A cluster that replaces anything but zeroes
///    is durable before its entry is written, because the old data was durable elsewhere. Data that
///    a guest has written becomes durable with its flush; until then it finds old or new data after
///    a loss of power. With a journal, many entries wait in memory for that ([`crate::deferred`]).
/// 4. A cluster that was freed is used again when its removal is durable, it reads as zeroes
///    durably, and no request can still be on its way to it ([`crate::epoch`]).
///
/// All of that is on the disk, in the kernel's page cache, or in the journal, before the guest is
/// answered: if this process is killed and started again, the guest finds the data that it has
/// written.
pub(crate) struct Writer {
    /// Locks on guest clusters while their L2 entries are changed.
    pub(crate) clusters: RangeLocks,
    /// Locks on the L1 and the refcount table, held while tables are created or replaced.
    pub(crate) structure: RangeLocks,
    pub(crate) epochs: Epochs,
    refcounts: Mutex<Refcounts>,
    /// Host clusters that contain the image's own tables.
    own: Mutex<HashSet<u64>>,
    dirty: Mutex<Dirty>,
    /// Whether an operation has failed in such a way that refcounts are wrong until the image is
    /// checked.
    pub(crate) unsound: AtomicBool,
    /// Number of changes made to L1 and L2 tables on the disk.
    changes: AtomicU64,
    /// Number of those changes that are durable.
    durable: AtomicU64,
    /// Error of a flush that no request of the guest has asked for. The system reports such an
    /// error once, so the guest's next flush reports it again.
    missed: Mutex<Option<IoError>>,
    removed_clusters: Mutex<RemovedClusters>,
    /// Number of freed clusters that wait for the end of older requests.
    waiting: AtomicU64,
    /// Whether a task is checking for freed clusters that can be reused.
    pub(crate) reaping: AtomicBool,
    /// Byte offset of the refcount table in the file.
    pub(crate) reftable: AtomicU64,
    /// Compatible features of the image, which are not changed.
    compatible: u64,
    /// L2 entries that are not in the image yet; `None` where every entry is written at once.
    pub(crate) deferred: Option<Deferred>,
}

/// Freed clusters that must not be reused yet.
#[derive(Debug, Default)]
struct RemovedClusters {
    /// Freed clusters, each with the epoch from which no request can access them.
    removed: Vec<(u64, Ranges)>,
    /// Freed clusters that read as zeroes now, and will durably do so after the next flush.
    zeroed: Ranges,
}

#[derive(Debug, Default)]
struct Dirty {
    phase: Phase,
    /// Number of changes to the image in progress, during which the dirty bit stays set.
    users: usize,
    waiters: Vec<Waker>,
}

/// State of the dirty bit in the image's header.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Phase {
    #[default]
    Clean,
    /// The dirty bit is being written to the header.
    Changing,
    Dirty,
}

impl Writer {
    /// Creates the writing state of an image with these refcounts. `own`: clusters of the image's
    /// tables. `unknown`: free clusters with unknown content. `dirty`: whether the header's dirty
    /// bit is set. `deferred`: list for entries that are written later, if that is possible.
    pub(crate) fn new(
        refcounts: Refcounts,
        own: HashSet<u64>,
        unknown: Ranges,
        dirty: bool,
        header: &Header,
        deferred: Option<Deferred>,
    ) -> Self {
        let waiting = unknown.len();
        let phase = if dirty { Phase::Dirty } else { Phase::Clean };
        Self {
            clusters: RangeLocks::default(),
            structure: RangeLocks::default(),
            epochs: Epochs::default(),
            refcounts: Mutex::new(refcounts),
            own: Mutex::new(own),
            dirty: Mutex::new(Dirty {
                phase,
                ..Dirty::default()
            }),
            unsound: AtomicBool::new(false),
            changes: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            missed: Mutex::new(None),
            removed_clusters: Mutex::new(RemovedClusters {
                removed: vec![(0, unknown)],
                zeroed: Ranges::default(),
            }),
            waiting: AtomicU64::new(waiting),
            reaping: AtomicBool::new(false),
            reftable: AtomicU64::new(header.reftable_offset),
            compatible: header.compatible,
            deferred,
        }
    }

    pub(crate) fn refcounts(&self) -> MutexGuard<'_, Refcounts> {
        self.refcounts.lock().unpoisoned()
    }

    /// Returns whether the cluster has a refcount and is none of the image's own tables.
    fn owns(&self, cluster: u64) -> bool {
        self.refcounts().get(cluster) > 0 && !self.own.lock().unpoisoned().contains(&cluster)
    }

    /// Records that these host clusters contain tables of the image.
    pub(crate) fn enter_own(&self, clusters: Range<u64>) {
        self.own.lock().unpoisoned().extend(clusters);
    }

    /// Records that these host clusters no longer contain tables of the image.
    pub(crate) fn leave_own(&self, clusters: Range<u64>) {
        let mut own = self.own.lock().unpoisoned();
        for cluster in clusters {
            own.remove(&cluster);
        }
    }

    /// Counts a change of L1 or L2 tables that was written to the disk, or was deferred.
    pub(crate) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the number of changes of L1 and L2 tables so far.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns whether a flush has made all changes of L1 and L2 tables durable.
    #[inline]
    pub(crate) fn is_durable(&self) -> bool {
        self.durable.load(Ordering::Acquire) == self.changes.load(Ordering::Acquire)
    }

    /// Makes all completed writes to the image durable, for a flush or a durable write of the
    /// guest, and reports an error of an earlier flush that the guest has not asked for.
    pub(crate) async fn flush(&self, store: &impl Store) -> Result<(), IoError> {
        let flushed = self.flush_all(store).await;
        let missed = self.missed.lock().unpoisoned().take();
        flushed.and(missed.map_or(Ok(()), Err))
    }

    /// Makes all completed writes to the image durable. The guest's next flush reports an error
    /// again.
    pub(crate) async fn flush_all(&self, store: &impl Store) -> Result<(), IoError> {
        let changes = self.changes();
        self.write_back(store).await?;
        let zeroed = ZeroedClusters {
            writer: self,
            clusters: std::mem::take(&mut self.removed_clusters().zeroed),
        };
        self.barrier(store).await?;
        // The changes before a failed flush may be lost, also if the next one succeeds.
        if self.missed.lock().unpoisoned().is_none() {
            self.durable.fetch_max(changes, Ordering::AcqRel);
        }
        self.refcounts().free(zeroed.done());
        Ok(())
    }

    /// Flushes the image's file. The system reports an error once, and the guest's next flush
    /// reports it again.
    pub(crate) async fn barrier(&self, store: &impl Store) -> Result<(), IoError> {
        let mut barrier = Barrier {
            writer: self,
            result: Err(IoErrorKind::NotDurable.into()),
        };
        barrier.result = store.flush().await;
        barrier.result
    }

    fn removed_clusters(&self) -> MutexGuard<'_, RemovedClusters> {
        self.removed_clusters.lock().unpoisoned()
    }

    fn dirty(&self) -> MutexGuard<'_, Dirty> {
        self.dirty.lock().unpoisoned()
    }

    /// Sets the header's dirty bit. The bit stays set at least until the result is dropped.
    pub(crate) async fn begin(&self, store: &impl Store) -> Result<Change<'_>, IoError> {
        let writes = wait(store, |context| {
            let mut dirty = self.dirty();
            match dirty.phase {
                Phase::Dirty => {
                    dirty.users += 1;
                    Poll::Ready(false)
                }
                Phase::Clean => {
                    dirty.phase = Phase::Changing;
                    Poll::Ready(true)
                }
                Phase::Changing => {
                    dirty.waiters.push(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await?;
        if writes {
            let mut turn = DirtyBitGuard {
                writer: self,
                end: Phase::Clean,
            };
            let journal = self.deferred.as_ref().map_or(0, Deferred::number);
            self.write_features(store, DIRTY, journal).await?;
            self.barrier(store).await?;
            turn.end = Phase::Dirty;
            self.dirty().users += 1;
        }
        Ok(Change(self))
    }

    /// Writes the header's features, with the number of the journal that continues the image. All
    /// incompatible features of the image are known to this crate. Autoclear features that are not
    /// known here do not hold any more.
    async fn write_features(
        &self,
        store: &impl Store,
        incompatible: u64,
        journal: u32,
    ) -> Result<(), IoError> {
        let autoclear = Header::autoclear_of(journal);
        let features = [incompatible, self.compatible, autoclear];
        let bytes: Vec<u8> = features.into_iter().flat_map(u64::to_be_bytes).collect();
        store.write(OFFSET_FEATURES, &bytes).await
    }

    /// Clears the header's dirty bit, unless a change is in progress or refcounts are wrong.
    pub(crate) async fn end(&self, store: &impl Store) -> Result<(), IoError> {
        {
            let mut dirty = self.dirty();
            let unsound = self.unsound.load(Ordering::Acquire);
            if dirty.phase != Phase::Dirty || dirty.users > 0 || unsound {
                return Ok(());
            }
            dirty.phase = Phase::Changing;
        }
        let mut turn = DirtyBitGuard {
            writer: self,
            end: Phase::Dirty,
        };
        self.settle_all(store).await?;
        self.flush_all(store).await?;
        // Whatever becomes of these two, the next change sets the bit again.
        turn.end = Phase::Clean;
        self.write_features(store, 0, 0).await?;
        self.barrier(store).await
    }

    /// Removes the journal's file if the image is in order without it.
    fn remove_journal(&self) {
        if let Some(deferred) = &self.deferred
            && self.dirty().phase == Phase::Clean
        {
            deferred.remove();
        }
    }

    /// Returns whether the dirty bit is set although no change is in progress.
    pub(crate) fn is_at_rest(&self) -> bool {
        let dirty = self.dirty();
        dirty.phase == Phase::Dirty && dirty.users == 0
    }

    /// Returns whether any freed cluster waits for its reuse.
    #[inline]
    pub(crate) fn has_limbo(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Adds freed clusters to the limbo: no entry refers to them, and their refcount is zero.
    fn removed(&self, clusters: Ranges) {
        if clusters.len() == 0 {
            return;
        }
        let count = clusters.len();
        let epoch = self.epochs.advance();
        self.removed_clusters().removed.push((epoch, clusters));
        self.waiting.fetch_add(count, Ordering::Relaxed);
    }

    /// Removes and returns the freed clusters that no outstanding request can access.
    fn take_ripe(&self) -> Ranges {
        let oldest = self.epochs.oldest();
        let mut removed_clusters = self.removed_clusters();
        let mut ripe = Ranges::default();
        removed_clusters.removed.retain_mut(|(epoch, clusters)| {
            while *epoch <= oldest
                && ripe.len() < MAX_PUNCHED_CLUSTERS
                && let Some(range) = clusters.take(MAX_PUNCHED_CLUSTERS)
            {
                ripe.insert(range);
            }
            clusters.len() > 0
        });
        self.waiting.fetch_sub(ripe.len(), Ordering::Relaxed);
        ripe
    }
}

impl Image {
    /// Zeroes freed clusters, so that they can be reused, and returns their space to the file
    /// system. Returns whether there were any.
    pub(crate) async fn reap(&self, store: &impl Store) -> Result<bool, IoError> {
        let Some(writer) = &self.writer else {
            return Ok(false);
        };
        let ripe = writer.take_ripe();
        if ripe.len() == 0 {
            return Ok(false);
        }
        let bits = self.geometry.cluster_bits;
        let op = Op::WriteZeroes {
            deallocate: true,
            fua: false,
        };
        for range in ripe.iter() {
            let len = (range.end - range.start) << bits;
            // Clusters that cannot be zeroed stay unused until the image is opened the next time.
            store.change(op, range.start << bits, len).await?;
            writer.removed_clusters().zeroed.insert(range);
        }
        // A guest that never flushes would have the file grow.
        if writer.removed_clusters().zeroed.len() >= MAX_PUNCHED_CLUSTERS {
            writer.flush_all(store).await?;
        }
        Ok(true)
    }

    /// Allocates up to `most` adjacent clusters. Their refcounts are changed only in memory; see
    /// [`Allocated::settle`].
    pub(crate) async fn allocate<'a>(
        &self,
        writer: &'a Writer,
        store: &impl Store,
        most: u64,
    ) -> Result<Allocated<'a>, IoError> {
        loop {
            let taken = writer.refcounts().take(most);
            match taken {
                Ok(run) => {
                    return Ok(Allocated {
                        writer,
                        run,
                        kept: false,
                    });
                }
                Err(NoRun::Block(index)) => self.add_block(writer, store, index).await?,
                Err(NoRun::Full) => return Err(IoErrorKind::NoSpace.into()),
            }
        }
    }

    /// Returns a slice of an L2 table for writing, and creates the table if there is none.
    pub(crate) async fn slice_to_write(
        &self,
        writer: &Writer,
        store: &impl Store,
        slice: u64,
    ) -> Result<Arc<Slice>, IoError> {
        loop {
            if let TableLookup::Slice(slice) = self.look(store, slice).await? {
                return Ok(slice);
            }
            self.add_table(writer, store, slice).await?;
        }
    }

    async fn add_table(
        &self,
        writer: &Writer,
        store: &impl Store,
        slice: u64,
    ) -> Result<(), IoError> {
        let tables = self.tables.as_ref().ok_or(IoErrorKind::Invalid)?;
        let index = tables.l1_index(slice);
        let _turn = writer.structure.lock(store, 1..2).await?;
        // Not replaced while this holds the lock.
        let l1 = tables.l1();
        if l1.get(index) != 0 {
            return Ok(());
        }
        if index >= l1.len() {
            return Err(IoErrorKind::OutOfRange.into());
        }
        let new = self.allocate(writer, store, 1).await?;
        let cluster = new.run.clusters.start;
        let at = cluster << self.geometry.cluster_bits;
        new.settle(store).await?;
        store
            .write(at, &vec![0; 1 << self.geometry.cluster_bits])
            .await?;
        writer.barrier(store).await?;
        let entry = at | COPIED;
        let _shield = store.shield();
        let written = store
            .write(l1.at + index as u64 * 8, &entry.to_be_bytes())
            .await;
        new.keep(&written);
        written?;
        writer.enter_own(cluster..cluster + 1);
        l1.set(index, entry);
        writer.changed();
        Ok(())
    }

    /// Sets adjacent entries of a slice, first on the disk and then in memory, and frees the
    /// clusters that they referred to before. The caller has locked the guest clusters. The
    /// operation runs to its end even when its request is cancelled.
    pub(crate) async fn set_entries(
        &self,
        writer: &Writer,
        store: &impl Store,
        slice: &Slice,
        first: usize,
        entries: &[L2Entry],
    ) -> Result<(), IoError> {
        let _shield = store.shield();
        let bytes: Vec<u8> = entries
            .iter()
            .flat_map(|entry| entry.0.to_be_bytes())
            .collect();
        let end = slice.place(first) + bytes.len() as u64;
        if writer.has_deferred(slice.place(first)..end) {
            writer.write_back(store).await?;
        }
        let before: Vec<L2Entry> = (first..first + entries.len())
            .map(|at| slice.get(at))
            .collect();
        let mut setting = Setting {
            writer,
            slice,
            first,
            entries,
            done: false,
        };
        store.write(slice.place(first), &bytes).await?;
        setting.done = true;
        drop(setting);
        let mut unused = Vec::new();
        for (before, now) in before.iter().zip(entries) {
            let (was, is) = (self.clusters_of(*before), self.clusters_of(*now));
            if was != is {
                unused.push(was);
            }
        }
        self.release(writer, store, unused).await
    }

    /// Returns the host clusters that an L2 entry refers to.
    fn clusters_of(&self, entry: L2Entry) -> Range<u64> {
        let bits = self.geometry.cluster_bits;
        match entry.mapping(&self.geometry) {
            Mapping::Data { host, .. } | Mapping::Zero { host: Some(host) } => {
                host >> bits..(host >> bits) + 1
            }
            Mapping::Compressed { host, len } => host >> bits..((host + len - 1) >> bits) + 1,
            _ => 0..0,
        }
    }

    /// Decrements the refcounts of these host clusters, in memory.
    pub(crate) async fn release(
        &self,
        writer: &Writer,
        store: &impl Store,
        clusters: Vec<Range<u64>>,
    ) -> Result<(), IoError> {
        let mut unused = Ranges::default();
        {
            let mut refcounts = writer.refcounts();
            for cluster in clusters.iter().cloned().flatten() {
                if refcounts.release(cluster) {
                    unused.insert(cluster..cluster + 1);
                }
            }
        }
        writer.removed(unused);
        for range in clusters {
            writer.settle(store, &range).await?;
        }
        Ok(())
    }
}

impl Writer {
    /// Writes the refcounts of these host clusters to the disk.
    pub(crate) async fn settle(
        &self,
        store: &impl Store,
        clusters: &Range<u64>,
    ) -> Result<(), IoError> {
        let versions = self.refcounts().versions(clusters);
        self.settle_blocks(store, versions).await
    }

    /// Writes all changed refcounts of the image to the disk.
    pub(crate) async fn settle_all(&self, store: &impl Store) -> Result<(), IoError> {
        let versions = self.refcounts().unsettled();
        self.settle_blocks(store, versions).await
    }

    /// Writes refcount blocks, by their indices, to the disk, at least in these versions.
    async fn settle_blocks(
        &self,
        store: &impl Store,
        versions: Vec<(usize, u64)>,
    ) -> Result<(), IoError> {
        for (index, version) in versions {
            loop {
                let step = wait(store, |context| {
                    let mut refcounts = self.refcounts();
                    match refcounts.settle(index, version, context.waker()) {
                        Settle::Wait => Poll::Pending,
                        step => Poll::Ready(step),
                    }
                })
                .await?;
                if !self.write_block(store, index, step).await? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Writes the part of a refcount block that [`Refcounts::settle`] returned. Returns `false`
    /// when nothing had to be written.
    async fn write_block(
        &self,
        store: &impl Store,
        index: usize,
        step: Settle,
    ) -> Result<bool, IoError> {
        let Settle::Write {
            at,
            bytes,
            range,
            version,
        } = step
        else {
            return Ok(false);
        };
        let mut writing = Writing {
            writer: self,
            index,
            range,
            version: None,
        };
        store.write(at, &bytes).await?;
        writing.version = Some(version);
        Ok(true)
    }
}

/// Change of an image in progress. The dirty bit in the header stays set until this is dropped.
#[must_use = "the header says that the image is in order when this is dropped"]
pub(crate) struct Change<'a>(&'a Writer);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.0.dirty().users -= 1;
    }
}

/// Exclusive right to write the dirty bit in the image's header.
struct DirtyBitGuard<'a> {
    writer: &'a Writer,
    end: Phase,
}

impl Drop for DirtyBitGuard<'_> {
    fn drop(&mut self) {
        let mut dirty = self.writer.dirty();
        dirty.phase = self.end;
        dirty.waiters.drain(..).for_each(Waker::wake);
    }
}

/// Guard of a flush. The result of one that is dropped before its end is unknown, and counts as an
/// error.
struct Barrier<'a> {
    writer: &'a Writer,
    result: Result<(), IoError>,
}

impl Drop for Barrier<'_> {
    fn drop(&mut self) {
        // A cancelled flush has not failed.
        if let Err(error) = self.result
            && error.kind != IoErrorKind::Aborted
        {
            *self.writer.missed.lock().unpoisoned() = Some(error);
        }
    }
}

/// Guard that a part of a refcount block is being written to the disk.
struct Writing<'a> {
    writer: &'a Writer,
    index: usize,
    range: Range<usize>,
    version: Option<u64>,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let range = self.range.clone();
        self.writer
            .refcounts()
            .written(self.index, range, self.version);
    }
}

/// Guard of a write to entries. If the write fails, the content of the disk is unknown. The entries
/// in memory then become invalid, too, because data written through them might be lost at the next
/// start.
struct Setting<'a> {
    writer: &'a Writer,
    slice: &'a Slice,
    first: usize,
    entries: &'a [L2Entry],
    done: bool,
}

impl Drop for Setting<'_> {
    fn drop(&mut self) {
        // Before anybody finds the entries: an FUA write through one waits for it to be durable.
        self.writer.changed();
        for (at, &entry) in self.entries.iter().enumerate() {
            let at = self.first + at;
            match self.done {
                true => self.slice.set(at, entry),
                // Entries that do not change have the same bytes on the disk in any case.
                false if self.slice.get(at) != entry => self.slice.set(at, L2Entry::INVALID),
                false => {}
            }
        }
        if !self.done {
            self.writer.unsound.store(true, Ordering::Release);
        }
    }
}

/// Clusters that read as zeroes. They do so durably after the flush that this guard waits for.
struct ZeroedClusters<'a> {
    writer: &'a Writer,
    clusters: Ranges,
}

impl ZeroedClusters<'_> {
    fn done(mut self) -> Ranges {
        std::mem::take(&mut self.clusters)
    }
}

impl Drop for ZeroedClusters<'_> {
    fn drop(&mut self) {
        let clusters = std::mem::take(&mut self.clusters);
        if clusters.len() > 0 {
            self.writer.removed_clusters().zeroed.extend(clusters);
        }
    }
}

/// Allocated clusters that no entry refers to yet. They are freed when this is dropped, unless they
/// are kept.
#[must_use = "dropping it frees the clusters"]
pub(crate) struct Allocated<'a> {
    writer: &'a Writer,
    pub(crate) run: Run,
    kept: bool,
}

impl Allocated<'_> {
    /// Writes the refcounts of the clusters to the disk, before any entry refers to them.
    pub(crate) async fn settle(&self, store: &impl Store) -> Result<(), IoError> {
        self.writer.settle(store, &self.run.clusters).await
    }

    /// Keeps the clusters allocated, because an entry that refers to them was written. `written`:
    /// result of that write. After a failure the content of the disk is unknown, and the refcounts
    /// count as wrong.
    pub(crate) fn keep(mut self, written: &Result<(), IoError>) {
        self.kept = true;
        if written.is_err() {
            self.writer.unsound.store(true, Ordering::Release);
        }
    }
}

impl Drop for Allocated<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let mut unused = Ranges::default();
        {
            let mut refcounts = self.writer.refcounts();
            for cluster in self.run.clusters.clone() {
                if refcounts.release(cluster) {
                    unused.insert(cluster..cluster + 1);
                }
            }
        }
        self.writer.removed(unused);
    }
}
