//! State of one image of a chain, shared by all queues.

use crate::epoch::Epochs;
use crate::format::{COPIED, DIRTY, Entry, Geometry, Header, Mapping, OFFSET_FEATURES};
use crate::inflate::Inflated;
use crate::ranges::Ranges;
use crate::refcounts::{NoRun, Refcounts, Run, Settle};
use crate::store::Store;
use crate::tables::{Look, Slice, Tables, checked};
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

/// Clusters that are given to the file system at one time.
const MOST_PUNCHED: u64 = 1024;

/// Image of a chain, or a raw file at its lower end.
pub(crate) struct Image {
    pub(crate) path: PathBuf,
    /// Index in the chain; 0 is the image that is served.
    pub(crate) layer: usize,
    /// The file opened for its clusters.
    pub(crate) data: FileVolume,
    /// The opening that holds the lock, where that is another one.
    locked: Option<FileVolume>,
    /// The file opened through the page cache, for the image's tables; `None` for a raw file.
    pub(crate) tables_file: Option<FileVolume>,
    /// Size of the disk in bytes.
    pub(crate) size: AtomicU64,
    /// `None`: it is a raw file.
    pub(crate) tables: Option<Tables>,
    pub(crate) geometry: Geometry,
    /// State for writing the image; `None` for an image that is only read.
    pub(crate) writer: Option<Writer>,
    /// Cache of recently decompressed clusters.
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

/// The parts of an [`Image`].
pub(crate) struct Parts {
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
    pub(crate) fn new(parts: Parts) -> Self {
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

    /// Prepares the first write of the image: corrected refcounts are written, and the refcount
    /// table gets room for more clusters.
    pub(crate) async fn prepare(&self, writer: &Writer, store: &impl Store) -> Result<(), IoError> {
        writer.settle_all(store).await?;
        self.make_room(writer, store, self.size()).await
    }

    /// Returns the size of the disk in bytes.
    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Switches access to the clusters to the page cache.
    pub(crate) fn go_through_cache(&mut self) -> Result<(), VolumeError> {
        let buffered = self.data.reopen(Direct::Off)?;
        let opened = std::mem::replace(&mut self.data, buffered);
        self.locked.get_or_insert(opened);
        Ok(())
    }

    /// Returns the extent in which the image's file lies.
    pub(crate) fn extent(&self) -> Option<Extent> {
        self.locked.as_ref().unwrap_or(&self.data).extent()
    }

    /// Returns the entry in the form in which it may be used. An invalid entry becomes
    /// [`Entry::INVALID`]. An entry that leads to an uncounted cluster or to a table's cluster is
    /// made unwritable.
    pub(crate) fn check(&self, entry: Entry) -> Entry {
        let checked = checked(entry, &self.geometry);
        let Some(writer) = &self.writer else {
            return checked;
        };
        let mut clusters = match checked.mapping(&self.geometry) {
            Mapping::Invalid => return checked,
            // With compressed data, too: where it is replaced its clusters are freed.
            _ => self.clusters_of(checked),
        };
        match clusters.all(|cluster| writer.owns(cluster)) {
            true => checked,
            false => {
                self.complain("leads to a cluster that is not its own");
                Entry::INVALID
            }
        }
    }

    /// Logs that a table has an invalid entry.
    pub(crate) fn complain(&self, what: &str) {
        self.log.line(|left_out| {
            let path = self.path.display();
            tracing::error!(
                left_out,
                "{path}: an entry of its tables {what}; the image is damaged, see qemu-img check"
            );
        });
    }

    /// Looks up the slice with this number in the image's L2 tables.
    pub(crate) async fn look(&self, store: &impl Store, slice: u64) -> Result<Look, IoError> {
        match &self.tables {
            Some(tables) => tables.look(store, slice, |entry| self.check(entry)).await,
            None => Ok(Look::NoTable),
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
///    a loss of power.
/// 4. A cluster that was freed is used again when its removal is durable, it reads as zeroes
///    durably, and no request can still be on its way to it ([`crate::epoch`]).
///
/// All of that is on the disk, or in the kernel's page cache, before the guest is answered: if this
/// process is killed and started again, the guest finds the data that it has written.
pub(crate) struct Writer {
    /// Locks on guest clusters during changes of their mapping.
    pub(crate) clusters: RangeLocks,
    /// Tables that are being made: everything that has a place in L1 or the refcount table.
    pub(crate) structure: RangeLocks,
    pub(crate) epochs: Epochs,
    refcounts: Mutex<Refcounts>,
    /// Clusters of the image's own tables.
    own: Mutex<HashSet<u64>>,
    dirty: Mutex<Dirty>,
    /// An operation has failed and left refcounts wrong until the image is checked.
    pub(crate) unsound: AtomicBool,
    /// Counts changes of L1 and L2 tables.
    changes: AtomicU64,
    /// Number of changes that are durable.
    durable: AtomicU64,
    limbo: Mutex<Limbo>,
    /// Length of the limbo's first list.
    waiting: AtomicU64,
    /// A task is processing the limbo.
    pub(crate) reaping: AtomicBool,
    /// The byte of the refcount table.
    pub(crate) reftable: AtomicU64,
}

/// Clusters between their removal and their next use.
#[derive(Debug, Default)]
struct Limbo {
    /// Removed clusters, with the epoch from which on no request is on its way to them.
    removed: Vec<(u64, Ranges)>,
    /// Clusters that read as zeroes now, and durably after the next flush.
    zeroed: Ranges,
}

#[derive(Debug, Default)]
struct Dirty {
    phase: Phase,
    /// Number of changes in progress.
    users: usize,
    waiters: Vec<Waker>,
}

/// State of the header's dirty bit.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Phase {
    #[default]
    Clean,
    /// The dirty bit is being written.
    Changing,
    Dirty,
}

impl Writer {
    /// Creates the writer of an image with these refcounts. `own`: clusters of the image's tables.
    /// `unknown`: free clusters with unknown content. `dirty`: the header's dirty bit is set.
    pub(crate) fn new(
        refcounts: Refcounts,
        own: HashSet<u64>,
        unknown: Ranges,
        dirty: bool,
        header: &Header,
    ) -> Self {
        let waiting = unknown.len();
        let phase = match dirty {
            true => Phase::Dirty,
            false => Phase::Clean,
        };
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
            limbo: Mutex::new(Limbo {
                removed: vec![(0, unknown)],
                zeroed: Ranges::default(),
            }),
            waiting: AtomicU64::new(waiting),
            reaping: AtomicBool::new(false),
            reftable: AtomicU64::new(header.reftable_offset),
        }
    }

    pub(crate) fn refcounts(&self) -> MutexGuard<'_, Refcounts> {
        self.refcounts.lock().unpoisoned()
    }

    /// Returns whether the cluster is counted, and none of the image's tables is in it.
    fn owns(&self, cluster: u64) -> bool {
        self.refcounts().get(cluster) > 0 && !self.own.lock().unpoisoned().contains(&cluster)
    }

    /// Records that a table lies in these clusters.
    pub(crate) fn enter_own(&self, clusters: Range<u64>) {
        self.own.lock().unpoisoned().extend(clusters);
    }

    /// Records that no table lies in these clusters any more.
    pub(crate) fn leave_own(&self, clusters: Range<u64>) {
        let mut own = self.own.lock().unpoisoned();
        for cluster in clusters {
            own.remove(&cluster);
        }
    }

    /// Counts a change of L1 or L2 tables on the disk.
    pub(crate) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the number of changes of L1 and L2 tables.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns whether all changes of L1 and L2 tables are durable.
    #[inline]
    pub(crate) fn is_durable(&self) -> bool {
        self.durable.load(Ordering::Acquire) == self.changes.load(Ordering::Acquire)
    }

    /// Makes everything durable that has been written.
    pub(crate) async fn flush(&self, store: &impl Store) -> Result<(), IoError> {
        let changes = self.changes();
        let zeroed = Zeroed {
            writer: self,
            clusters: std::mem::take(&mut self.limbo().zeroed),
        };
        store.flush().await?;
        self.durable.fetch_max(changes, Ordering::AcqRel);
        self.refcounts().free(zeroed.done());
        Ok(())
    }

    fn limbo(&self) -> MutexGuard<'_, Limbo> {
        self.limbo.lock().unpoisoned()
    }

    fn dirty(&self) -> MutexGuard<'_, Dirty> {
        self.dirty.lock().unpoisoned()
    }

    /// Sets the header's dirty bit, which stays set at least as long as the result lives.
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
            let mut turn = Turn {
                writer: self,
                end: Phase::Clean,
            };
            self.write_features(store, DIRTY).await?;
            store.flush().await?;
            turn.end = Phase::Dirty;
            self.dirty().users += 1;
        }
        Ok(Change(self))
    }

    /// Writes the incompatible features. All set features are known to this crate; the compatible
    /// features behind them stay.
    async fn write_features(&self, store: &impl Store, incompatible: u64) -> Result<(), IoError> {
        store
            .write(OFFSET_FEATURES, &incompatible.to_be_bytes())
            .await
    }

    /// Clears the header's dirty bit, if no change is in progress and the image is sound.
    pub(crate) async fn end(&self, store: &impl Store) -> Result<(), IoError> {
        {
            let mut dirty = self.dirty();
            let unsound = self.unsound.load(Ordering::Acquire);
            if dirty.phase != Phase::Dirty || dirty.users > 0 || unsound {
                return Ok(());
            }
            dirty.phase = Phase::Changing;
        }
        let mut turn = Turn {
            writer: self,
            end: Phase::Dirty,
        };
        self.settle_all(store).await?;
        self.flush(store).await?;
        self.write_features(store, 0).await?;
        store.flush().await?;
        turn.end = Phase::Clean;
        Ok(())
    }

    /// Returns whether the dirty bit is set while no change is in progress.
    pub(crate) fn is_at_rest(&self) -> bool {
        let dirty = self.dirty();
        dirty.phase == Phase::Dirty && dirty.users == 0
    }

    /// Returns whether removed clusters wait for their next use.
    #[inline]
    pub(crate) fn has_limbo(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Enters clusters that no entry leads to and that are not counted any more into the limbo.
    fn removed(&self, clusters: Ranges) {
        if clusters.len() == 0 {
            return;
        }
        let count = clusters.len();
        let epoch = self.epochs.advance();
        self.limbo().removed.push((epoch, clusters));
        self.waiting.fetch_add(count, Ordering::Relaxed);
    }

    /// Takes clusters out of the limbo that no request is on its way to any more.
    fn take_ripe(&self) -> Ranges {
        let oldest = self.epochs.oldest();
        let mut limbo = self.limbo();
        let mut ripe = Ranges::default();
        limbo.removed.retain_mut(|(epoch, clusters)| {
            while *epoch <= oldest
                && ripe.len() < MOST_PUNCHED
                && let Some(range) = clusters.take(MOST_PUNCHED)
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
    /// Zeroes removed clusters, so that they can be used again, and returns their space to the file
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
            writer.limbo().zeroed.insert(range);
        }
        // A guest that never flushes would have the file grow.
        if writer.limbo().zeroed.len() >= MOST_PUNCHED {
            writer.flush(store).await?;
        }
        Ok(true)
    }

    /// Allocates clusters that lie beside each other, at most so many. They are counted in memory:
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

    /// Returns the slice of an L2 table, and creates the table if there is none.
    pub(crate) async fn slice_to_write(
        &self,
        writer: &Writer,
        store: &impl Store,
        slice: u64,
    ) -> Result<Arc<Slice>, IoError> {
        loop {
            if let Look::Slice(slice) = self.look(store, slice).await? {
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
        store.flush().await?;
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

    /// Sets adjacent entries of a slice, first on the disk and then in memory. The caller has
    /// locked their clusters. The clusters that they led to before are freed. The operation runs to
    /// its end even when its request is cancelled.
    pub(crate) async fn set_entries(
        &self,
        writer: &Writer,
        store: &impl Store,
        slice: &Slice,
        first: usize,
        entries: &[Entry],
    ) -> Result<(), IoError> {
        let _shield = store.shield();
        let bytes: Vec<u8> = entries
            .iter()
            .flat_map(|entry| entry.0.to_be_bytes())
            .collect();
        let before: Vec<Entry> = (first..first + entries.len())
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

    /// Returns the clusters that an entry leads to.
    fn clusters_of(&self, entry: Entry) -> Range<u64> {
        let bits = self.geometry.cluster_bits;
        match entry.mapping(&self.geometry) {
            Mapping::Data { host, .. } | Mapping::Zero { host: Some(host) } => {
                host >> bits..(host >> bits) + 1
            }
            Mapping::Compressed { host, len } => host >> bits..((host + len - 1) >> bits) + 1,
            _ => 0..0,
        }
    }

    /// Removes a reference of each of these clusters.
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
    /// Writes the refcounts of these clusters to the disk.
    pub(crate) async fn settle(
        &self,
        store: &impl Store,
        clusters: &Range<u64>,
    ) -> Result<(), IoError> {
        let versions = self.refcounts().versions(clusters);
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

    /// Writes all refcounts to the disk.
    pub(crate) async fn settle_all(&self, store: &impl Store) -> Result<(), IoError> {
        loop {
            let next = self.refcounts().settle_any();
            match next {
                Some((index, step)) => self.write_block(store, index, step).await?,
                None => return Ok(()),
            };
        }
    }

    /// Writes the bytes that [`Refcounts::settle`] returns. `false`: no bytes had to be written.
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

/// A change in progress; the header's dirty bit stays set until it is dropped.
#[must_use = "the header says that the image is in order when this is dropped"]
pub(crate) struct Change<'a>(&'a Writer);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.0.dirty().users -= 1;
    }
}

/// Exclusive right to write the header's dirty bit.
struct Turn<'a> {
    writer: &'a Writer,
    end: Phase,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut dirty = self.writer.dirty();
        dirty.phase = self.end;
        dirty.waiters.drain(..).for_each(Waker::wake);
    }
}

/// A part of a refcount block is being written.
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

/// Entries that are being written. If the write fails, the content of the disk is unknown. The
/// entries in memory are then made invalid as well, because a request through them might be lost
/// with the next start.
struct Setting<'a> {
    writer: &'a Writer,
    slice: &'a Slice,
    first: usize,
    entries: &'a [Entry],
    done: bool,
}

impl Drop for Setting<'_> {
    fn drop(&mut self) {
        for (at, &entry) in self.entries.iter().enumerate() {
            let at = self.first + at;
            match self.done {
                true => self.slice.set(at, entry),
                // Entries that do not change have the same bytes on the disk in any case.
                false if self.slice.get(at) != entry => self.slice.set(at, Entry::INVALID),
                false => {}
            }
        }
        self.writer.changed();
        if !self.done {
            self.writer.unsound.store(true, Ordering::Release);
        }
    }
}

/// Clusters that read as zeroes, durably when the flush has succeeded that this waits for.
struct Zeroed<'a> {
    writer: &'a Writer,
    clusters: Ranges,
}

impl Zeroed<'_> {
    fn done(mut self) -> Ranges {
        std::mem::take(&mut self.clusters)
    }
}

impl Drop for Zeroed<'_> {
    fn drop(&mut self) {
        let clusters = std::mem::take(&mut self.clusters);
        if clusters.len() > 0 {
            self.writer.limbo().zeroed.extend(clusters);
        }
    }
}

/// Clusters that were allocated, and that nothing leads to yet: they are freed with this, unless
/// they are kept.
#[must_use = "dropping it frees the clusters"]
pub(crate) struct Allocated<'a> {
    writer: &'a Writer,
    pub(crate) run: Run,
    kept: bool,
}

impl Allocated<'_> {
    /// Writes the refcounts of the clusters to the disk, before anything leads to them.
    pub(crate) async fn settle(&self, store: &impl Store) -> Result<(), IoError> {
        self.writer.settle(store, &self.run.clusters).await
    }

    /// Keeps the clusters allocated, because an entry that leads to them was to be written. After a
    /// failed write the content of the disk is unknown, and the image counts as unsound.
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
