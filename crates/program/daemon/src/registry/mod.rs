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
use crate::registry::alarms::Alarms;
use crate::registry::counters::{CountedDisk, Counters};
use crate::registry::descriptions::DiskDescriptions;
use crate::registry::guarded_list::{GuardedList, ListEntry};
use crate::registry::limits::LimitRegistry;
use crate::registry::on_error::OnErrorRegistry;
use crate::registry::settings::Settings;
use crate::registry::snapshot::{ProcessInfo, SnapshotBuilder};
use crate::serve::peers::Peers;
use crate::serve::rings::RingRegistry;
use crate::serve::watch;
use config::disk::DiskSpec;
use config::spec::Specs;
use control::api::Stats;
use control::{EventReceiver, EventSender};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// Registry of everything that is served, with its counters, for the management API and metrics.
#[derive(Clone, Default)]
pub struct Registry {
    /// Sockets in the order of the configuration: workers that start at the same time register
    /// their disks in any order.
    order: Arc<[PathBuf]>,
    fronts: GuardedList<CountedDisk>,
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

    /// Returns the counters of all disks, in the order of the configuration.
    fn sorted(&self) -> Vec<CountedDisk> {
        let mut list = self.fronts.all();
        // Disks that were added later are last.
        list.sort_by_cached_key(|(address, counters)| {
            let order = self.order.iter().position(|known| known == address);
            (
                counters.kind(),
                order.unwrap_or(usize::MAX),
                address.clone(),
            )
        });
        list
    }

    /// Returns whether another process may write the volume of the disk with this address.
    pub fn is_incoming(&self, address: &Path) -> bool {
        let mut disks = self.fronts.all().into_iter();
        disks.any(|(known, counters)| known == address && counters.is_incoming())
    }

    /// Registers the counters of a disk under its address, until the listing is dropped.
    pub fn enter(
        &self,
        address: &Path,
        counters: impl Counters + 'static,
    ) -> ListEntry<CountedDisk> {
        self.fronts.enter((address.to_owned(), Arc::new(counters)))
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
        let all = self.sorted().into_iter();
        all.map(|(address, counters)| counters.metrics(&address, self, &mut numbers))
            .collect()
    }

    /// Returns the current counters of all controllers and exports, for the management API.
    pub fn snapshot(&self) -> Stats {
        let mut stats = Stats {
            volumes: self.limits.list(),
            on_error: self.on_error.list(&self.described),
            devices: self.devices.list(),
            rings: self.rings.counters(),
            workers: self
                .workers
                .as_deref()
                .map_or_else(Vec::new, watch::counters),
            measured: self.numbers(),
            ..Stats::default()
        };
        for (address, counters) in self.sorted() {
            counters.add_to(&mut stats, &address, self);
        }
        stats
    }
}
