//! Direct path: passes a controller's commands to an NVMe device queue to queue, bypassing the
//! volume.
//!
//! A namespace on an NVMe device can be reached in two ways: through its volume, which supports
//! everything (generic), and by mediation of queues (direct). Both access the same blocks and may
//! be used at the same time. The path can therefore be changed while commands are outstanding, by a
//! flag that the worker checks for each batch; the control socket sets it.

use crate::registry::descriptions::DiskDescriptions;
use crate::registry::guarded_list::{GuardedList, ListEntry};
use anyhow::{Result, ensure};
use config::choices::PathChoice;
use control::Error;
use control::api::{Cycles, LaneCounters, PathChange, PathCounters, PathState};
use controller::{Passthrough, PassthroughResult};
use dma::DmaMap;
use driver::Device;
use mediate::{DirectOptions, DirectQueue, QueuePairPool, QueueStats, Slice};
use nvme::{Command, Status};
use probes::Summary;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Instant;
use sync::Unpoisoned;
use volume::{Armed, OnError, Volume, Watcher};

/// Maximum number of physical queue pairs of a namespace. Its virtual queues are assigned to them
/// in turn; one worker drives them all, so more pairs would only add doorbell writes.
const LANES: usize = 4;
/// Number of rounds without an outstanding command after which a device with interrupts is polled
/// again.
const IDLE_ROUNDS: u32 = 1024;

/// Configuration of the direct path of a namespace's commands to an NVMe device.
#[derive(Clone, Debug)]
pub struct Direct {
    pub device: Device,
    pub slice: Slice,
    /// Maximum number of outstanding commands on each queue pair of the device.
    pub depth: u32,
    /// Whether the device's interrupts wake a sleeping worker.
    pub interrupts: bool,
    /// Initial path.
    pub choice: PathChoice,
    /// Volume of the generic path, with the limits that the direct path would bypass.
    pub volume: Weak<dyn Volume>,
}

/// Entry of the registry for a namespace with a direct path to a device.
#[derive(Clone)]
pub struct PathEntry {
    socket: PathBuf,
    nsid: u32,
    generic: Arc<AtomicBool>,
    lanes: Arc<Mutex<Vec<Arc<QueueStats>>>>,
    volume: Weak<dyn Volume>,
}

/// Registry of the namespaces that have a direct path.
#[derive(Clone, Default)]
pub struct PathRegistry(GuardedList<PathEntry>);

fn lock<T>(list: &Mutex<Vec<T>>) -> MutexGuard<'_, Vec<T>> {
    // If a thread panicked while it held the lock, the list is still consistent.
    list.lock().unpoisoned()
}

/// Converts a summary of processor cycles to the type of the management API.
pub fn cycles(s: Summary) -> Cycles {
    Cycles {
        count: s.count,
        total: s.total,
        average: s.average,
        average_ns: s.average / probes::cycles_per_second() * 1e9,
        p50: s.p50,
        p90: s.p90,
        p99: s.p99,
        p999: s.p999,
        max: s.max,
    }
}

fn lane(stats: &QueueStats) -> LaneCounters {
    LaneCounters {
        commands: stats.commands(),
        refused: stats.refused(),
        split: stats.split(),
        bounced: stats.bounced(),
        bounced_bytes: stats.bounced_bytes(),
        translate: cycles(stats.translate.summary()),
        complete: cycles(stats.complete.summary()),
    }
}

impl PathEntry {
    fn path(&self) -> control::api::PathChoice {
        if self.generic.load(Ordering::Relaxed) {
            control::api::PathChoice::Generic
        } else {
            control::api::PathChoice::Direct
        }
    }

    /// Returns whether the volume has settings that apply on the generic path only.
    fn needs_generic(&self) -> bool {
        self.volume.upgrade().is_some_and(|volume| {
            volume.limits().is_some_and(|limits| limits.is_limited())
                || volume.share().is_some_and(|share| share.is_weighted())
                || volume
                    .on_error()
                    .is_some_and(|policy| policy.get() != OnError::default())
        })
    }

    fn state(&self, described: &DiskDescriptions) -> PathState {
        PathState {
            disk: described.name(&self.socket),
            nsid: self.nsid,
            path: self.path(),
        }
    }

    fn counters(&self) -> PathCounters {
        PathCounters {
            nsid: self.nsid,
            path: self.path(),
            lanes: lock(&self.lanes).iter().map(|stats| lane(stats)).collect(),
        }
    }
}

impl PathRegistry {
    /// Returns the path counters of a controller's namespaces.
    pub fn of(&self, socket: &Path) -> Vec<PathCounters> {
        self.0.look(|list| {
            let mine = list.filter(|entry| entry.socket == socket);
            mine.map(PathEntry::counters).collect()
        })
    }

    /// Moves the namespaces to the generic path whose volumes have settings that apply there only.
    pub fn keep_settings(&self) {
        for entry in self.0.all() {
            if entry.needs_generic() && !entry.generic.swap(true, Ordering::Relaxed) {
                tracing::info!(
                    socket = %entry.socket.display(),
                    nsid = entry.nsid,
                    "using the generic path, where limits, weights and error policies apply"
                );
            }
        }
    }

    /// Changes the path of a disk's namespaces, and returns their counters.
    ///
    /// # Errors
    /// [`Error`] when the disk does not exist or has no direct path; nothing was changed then.
    pub fn change(
        &self,
        change: &PathChange,
        described: &DiskDescriptions,
    ) -> Result<Vec<PathState>, Error> {
        change.check().map_err(Error::invalid)?;
        let list = self.0.all();
        let meant = |entry: &&PathEntry| {
            let named = |disk: &String| described.name(&entry.socket) == *disk;
            change.disk.as_ref().is_none_or(named)
                && change.nsid.is_none_or(|nsid| nsid == entry.nsid)
        };
        let meant: Vec<_> = list.iter().filter(meant).collect();
        if meant.is_empty() && change.path.is_some() {
            return Err(Error::not_found(
                "no such namespace has a direct path: it needs a device below and no limits",
            ));
        }
        if change.path == Some(control::api::PathChoice::Direct)
            && let Some(entry) = meant.iter().find(|entry| entry.needs_generic())
        {
            return Err(Error::conflict(format!(
                "namespace {} of \"{}\" has limits, a weight or an error policy, which apply on \
                 the generic path only: remove them first (vnvme limits, vnvme on-error)",
                entry.nsid,
                described.name(&entry.socket)
            )));
        }
        for entry in &meant {
            if let Some(path) = change.path {
                let generic = path == control::api::PathChoice::Generic;
                entry.generic.store(generic, Ordering::Relaxed);
            }
        }
        let mut states: Vec<_> = meant.iter().map(|entry| entry.state(described)).collect();
        states.sort_by(|one, other| (&one.disk, one.nsid).cmp(&(&other.disk, other.nsid)));
        Ok(states)
    }
}

/// Direct path of a namespace's commands from one worker to the device, queue to queue.
pub struct DirectPath {
    pool: QueuePairPool,
    options: DirectOptions,
    /// Queue pairs of the device, to which the guest's queues are assigned in turn.
    lanes: Vec<DirectQueue>,
    /// Whether the device has no further queue pair to offer.
    full: bool,
    /// Whether interrupts of all queue pairs wake the worker, so that it may sleep.
    wakes: bool,
    watcher: Watcher,
    in_flight: usize,
    idle: u32,
    entry: PathEntry,
    /// Registration of the path for the management API, which ends with this field.
    _entered: ListEntry<PathEntry>,
}

impl DirectPath {
    /// Creates the direct path of namespace `nsid` of the controller at `socket`. Commands carry at
    /// most `max_transfer` bytes. Opens the first queue pair of the device.
    pub fn new(
        direct: &Direct,
        nsid: u32,
        socket: &Path,
        max_transfer: u64,
        registry: &PathRegistry,
        watcher: Watcher,
    ) -> Result<Self> {
        let entry = PathEntry {
            socket: socket.to_owned(),
            nsid,
            generic: Arc::new(AtomicBool::new(direct.choice == PathChoice::Generic)),
            lanes: Arc::default(),
            volume: direct.volume.clone(),
        };
        if entry.needs_generic() {
            entry.generic.store(true, Ordering::Relaxed);
        }
        let mut path = Self {
            pool: QueuePairPool::new(direct.device.clone()),
            options: DirectOptions {
                max_transfer,
                depth: direct.depth,
                interrupts: direct.interrupts,
                ..DirectOptions::new(nsid, direct.slice)
            },
            lanes: Vec::new(),
            full: false,
            wakes: true,
            watcher,
            in_flight: 0,
            idle: 0,
            _entered: registry.0.enter(entry.clone()),
            entry,
        };
        path.open()?;
        Ok(path)
    }

    /// Opens one more queue pair of the device.
    fn open(&mut self) -> Result<()> {
        let queue = self.pool.queue(self.options)?;
        lock(&self.entry.lanes).push(queue.stats().clone());
        self.wakes &= self.watch(&queue);
        self.lanes.push(queue);
        Ok(())
    }

    /// Makes a queue pair's interrupt wake the worker. Returns whether that is possible; otherwise
    /// the worker polls while commands are outstanding.
    fn watch(&self, queue: &DirectQueue) -> bool {
        let Some(waker) = queue.waker() else {
            return false;
        };
        // The watch needs a duplicate of the descriptor, because the original moves into the
        // callback.
        let Ok(fd) = waker.event_fd().try_clone_to_owned() else {
            return false;
        };
        let watched = self.watcher.watch(fd.as_fd(), move || match waker.arm() {
            Some(true) => Armed::Quiet,
            Some(false) => Armed::Waiting,
            None => Armed::Gone,
        });
        if let Err(error) = &watched {
            tracing::warn!(%error, "waiting for the device's interrupt failed; polling");
        }
        watched.is_ok()
    }

    /// Returns the index of the queue pair for a virtual queue, after opening it if there are too
    /// few.
    fn lane(&mut self, qid: u16) -> usize {
        let wanted = usize::from(qid.saturating_sub(1)) % LANES;
        if wanted >= self.lanes.len() && !self.full {
            self.grow(wanted);
        }
        wanted % self.lanes.len().max(1)
    }

    #[cold]
    fn grow(&mut self, wanted: usize) {
        while self.lanes.len() <= wanted && !self.full {
            if let Err(error) = self.open() {
                tracing::debug!(%error, lanes = self.lanes.len(), "no more queue pairs of the device");
                self.full = true;
            }
        }
    }
}

impl Passthrough for DirectPath {
    fn begin(&mut self, qid: u16, page_size: u64, write_cache: bool) -> Option<usize> {
        if self.entry.generic.load(Ordering::Relaxed) {
            return None;
        }
        let lane = self.lane(qid);
        let lane = self.lanes.get_mut(lane)?;
        lane.set_page_size(page_size);
        lane.set_write_cache(write_cache);
        Some(lane.room())
    }

    fn submit(
        &mut self,
        qid: u16,
        command: &Command,
        map: &DmaMap,
        token: u64,
    ) -> PassthroughResult {
        let lane = self.lane(qid);
        let Some(lane) = self.lanes.get_mut(lane) else {
            return PassthroughResult::NotMine;
        };
        if !lane.supports(command.nvm_opcode()) {
            return PassthroughResult::NotMine;
        }
        match lane.submit(command, map, token) {
            Ok(()) => {
                self.in_flight += 1;
                PassthroughResult::Taken
            }
            Err(status) => PassthroughResult::Refused(status),
        }
    }

    fn poll(&mut self, done: &mut dyn FnMut(u64, Status, u32)) -> usize {
        if self.in_flight == 0 {
            // An occasional poll finds events without a command, such as memory to be released or a
            // device reset.
            self.idle = self.idle.wrapping_add(1);
            if !self.idle.is_multiple_of(IDLE_ROUNDS) {
                return 0;
            }
        }
        let mut count = 0;
        for lane in &mut self.lanes {
            count += lane.poll(done);
        }
        self.in_flight -= count.min(self.in_flight);
        count
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn needs_polling(&self) -> bool {
        self.in_flight > 0 && !self.wakes
    }

    fn deadline(&self) -> Option<Instant> {
        if self.in_flight == 0 {
            return None;
        }
        self.lanes.iter().filter_map(DirectQueue::deadline).min()
    }

    fn resized(&mut self, blocks: u64) {
        let before = self.options.slice;
        let namespace = self.pool.device().namespace(before.nsid());
        let slice = namespace.ok().and_then(|namespace| {
            Slice::new(&namespace, before.first_lba(), blocks, before.read_only()).ok()
        });
        // The device itself refuses all commands to a namespace that no longer exists.
        let Some(slice) = slice else {
            return;
        };
        self.options.slice = slice;
        for lane in &mut self.lanes {
            lane.set_slice(slice);
        }
    }

    fn abort(&mut self, token: u64) {
        for lane in &mut self.lanes {
            lane.abort(token);
        }
    }
}

/// Checks that the direct path supports a namespace with this block size.
pub fn check_block_size(direct: &Direct, block_size: u32) -> Result<()> {
    let device = 1u32 << direct.slice.block_shift();
    ensure!(
        block_size == device,
        "the direct path needs the device's block size of {device} bytes"
    );
    Ok(())
}
