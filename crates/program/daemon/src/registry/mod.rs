//! Registry of the served disks and their counters, for the control socket. Workers register their
//! disks here.

pub(crate) mod alarms;
pub(crate) mod counters;
pub(crate) mod descriptions;
pub(crate) mod guarded_list;
pub(crate) mod limits;
pub mod on_error;
pub(crate) mod settings;
pub(crate) mod sizes;
pub(crate) mod snapshot;

use crate::keep::KeeperSession;
use crate::open::devices::DeviceRegistry;
use crate::open::direct::PathRegistry;
use crate::parts::ublk::DiskStats;
use crate::parts::vhost_blk;
use crate::registry::alarms::Alarms;
use crate::registry::descriptions::DiskDescriptions;
use crate::registry::guarded_list::{GuardedList, ListEntry};
use crate::registry::limits::LimitRegistry;
use crate::registry::on_error::OnErrorRegistry;
use crate::registry::settings::Settings;
use crate::registry::snapshot::{ProcessInfo, SnapshotBuilder};
use crate::serve::peers::Peers;
use crate::serve::rings::RingRegistry;
use crate::serve::watch;
use config::disk::{DiskSpec, device};
use config::spec::Specs;
use control::api::{ControllerCounters, Stats};
use control::{EventReceiver, EventSender};
use controller::ControllerStats;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use worker::AcceptStats;

/// Registry of everything that is served, with its counters, for the management API and metrics.
#[derive(Clone, Default)]
pub struct Registry {
    /// Sockets in the order of the configuration: workers that start at the same time register
    /// their disks in any order.
    order: Arc<[PathBuf]>,
    controllers: GuardedList<ControllerEntry>,
    vhost_blk: GuardedList<VhostBlkEntry>,
    disks: GuardedList<DiskEntry>,
    /// Names of the disks that are unavailable.
    pub unserved: GuardedList<String>,
    /// I/O limits of volumes, through which they are changed.
    pub limits: LimitRegistry,
    /// Error policies of volumes, through which they are changed.
    pub on_error: OnErrorRegistry,
    /// Settings of volumes that were changed at run time.
    pub settings: Settings,
    /// Direct paths of namespaces to NVMe devices.
    pub paths: PathRegistry,
    /// NVMe devices and servers behind the volumes.
    pub devices: DeviceRegistry,
    /// Counters of the workers' io_urings.
    pub rings: RingRegistry,
    /// Sender of events to listeners of the management API.
    pub events: EventSender,
    alarms: Arc<Mutex<Alarms>>,
    /// Workers of the process; `None` in a process without workers.
    workers: Option<Arc<Peers>>,
    /// Session with the keeper.
    pub keeper: Arc<KeeperSession>,
    /// Version, start time and other constant facts about the process.
    pub about: ProcessInfo,
    /// Names and volumes of disks, by address.
    pub described: DiskDescriptions,
}

/// Volume name and counters of a ublk block device.
pub type DiskEntry = (String, Arc<DiskStats>);
/// Socket path and counters of an NVMe controller.
pub type ControllerEntry = (PathBuf, (Arc<ControllerStats>, Arc<AcceptStats>));
/// Socket path and counters of a vhost-user-blk export.
pub type VhostBlkEntry = (PathBuf, Arc<vhost_blk::Stats>);

impl Registry {
    /// Makes a registry that lists disks in the order of the configuration.
    pub fn new(specs: &Specs, workers: &Arc<Peers>, keeper: &Arc<KeeperSession>) -> Self {
        let sockets = specs.iter().filter_map(|disk| disk.socket());
        let described = DiskDescriptions::default();
        described.set(DiskSpec::all(specs).iter());
        Self {
            order: sockets.map(Path::to_owned).collect(),
            workers: Some(workers.clone()),
            keeper: keeper.clone(),
            described,
            ..Self::default()
        }
    }

    /// Returns the entries of a list in the order of the configuration.
    fn sorted<T: Clone>(&self, list: &GuardedList<(PathBuf, T)>) -> Vec<(PathBuf, T)> {
        let mut list = list.all();
        // Disks that were added later are last.
        list.sort_by_cached_key(|(socket, _)| {
            let order = self.order.iter().position(|known| known == socket);
            (order.unwrap_or(usize::MAX), socket.clone())
        });
        list
    }

    /// Registers a controller under its socket, until the listing is dropped. The other `enter_`
    /// functions do so for their kinds.
    pub fn enter(
        &self,
        socket: &Path,
        stats: Arc<ControllerStats>,
        accepts: Arc<AcceptStats>,
    ) -> ListEntry<ControllerEntry> {
        self.controllers
            .enter((socket.to_owned(), (stats, accepts)))
    }

    /// Registers a vhost-user-blk export under the path of its socket.
    pub fn enter_vhost_blk(
        &self,
        socket: &Path,
        stats: Arc<vhost_blk::Stats>,
    ) -> ListEntry<VhostBlkEntry> {
        self.vhost_blk.enter((socket.to_owned(), stats))
    }

    /// Registers a ublk block device under the name of its volume.
    pub fn enter_disk(&self, volume: &str, stats: Arc<DiskStats>) -> ListEntry<DiskEntry> {
        self.disks.enter((volume.to_owned(), stats))
    }

    /// Returns a receiver of all events from now on.
    pub fn listen(&self) -> EventReceiver {
        let is_first = !self.events.has_listeners();
        let receiver = self.events.receiver();
        if is_first {
            // Changes before the first listener cause no event.
            *self.alarms.lock().unpoisoned() = Alarms::default();
            self.look();
        }
        receiver
    }

    /// Sends the events that only counters show, if there is a listener. Called from time to time.
    pub fn look(&self) {
        if self.events.has_listeners() {
            let stats = self.snapshot();
            self.alarms.lock().unpoisoned().look(&stats, &self.events);
        }
    }

    /// Returns the workers of the process, if it has any.
    pub fn peers(&self) -> Option<&Peers> {
        self.workers.as_deref()
    }

    /// Returns the metrics of all served disks, as of now.
    pub(crate) fn disks(&self, mut numbers: SnapshotBuilder<'_>) -> Vec<metrics::Disk> {
        let mut all = Vec::new();
        for (socket, (stats, accepts)) in self.sorted(&self.controllers) {
            let direct = self.paths.of(&socket);
            all.push(numbers.controller(&socket, (&stats, &accepts), &direct));
        }
        for (socket, stats) in self.sorted(&self.vhost_blk) {
            all.push(numbers.export(&socket, &stats));
        }
        for (volume, stats) in self.disks.all() {
            all.push(numbers.block_device(&volume, &stats));
        }
        all
    }

    /// Returns the current counters of all controllers and exports, for the management API.
    pub fn snapshot(&self) -> Stats {
        let (list, exports) = (self.sorted(&self.controllers), self.sorted(&self.vhost_blk));
        let measured = self.numbers();
        let disks = self.disks.all();
        Stats {
            controllers: list
                .iter()
                .map(|(socket, (stats, accepts))| ControllerCounters {
                    direct: self.paths.of(socket),
                    ..counters::controller(&self.described.name(socket), socket, stats, accepts)
                })
                .collect(),
            vhost_user_blk: exports
                .iter()
                .map(|(socket, stats)| {
                    counters::vhost_blk(&self.described.name(socket), socket, stats)
                })
                .collect(),
            ublk: disks
                .iter()
                .map(|(volume, stats)| {
                    counters::ublk(&self.described.name(&device(stats.id)), volume, stats)
                })
                .collect(),
            volumes: self.limits.list(),
            on_error: self.on_error.list(&self.described),
            devices: self.devices.list(),
            rings: self.rings.counters(),
            workers: self
                .workers
                .as_deref()
                .map_or_else(Vec::new, watch::counters),
            measured,
        }
    }
}
