//! Changes of the served disks at run time: disks and namespaces are added and removed by request
//! ([`control::Daemon`]) or by a new configuration.
//!
//! `DiskTable` lists the running disks by name. A change reserves its disk, runs on a thread that
//! may hang, and takes effect in one step or not at all. A configuration is compared with the table
//! (`plan`): changes that are impossible are refused before anything is done, and a change that
//! fails midway is undone.

mod allow;
mod ana;
mod api;
mod bounded;
mod change;
mod exports;
mod namespaces;
mod plan;
mod refused;
mod reload;
mod resize;
mod settings;
mod state;
mod table;
mod unavailable;

pub(crate) use allow::{Allow, allows_ublk, places, servers};
pub(crate) use settings::{DiskVolumes, VolumeRef};
pub use state::{StateLock, read_state, without_configured};
pub(crate) use state::{beside, replace as replace_file};
pub(crate) use table::{DiskFailure, DiskServer, DiskTable, ServedDisk, Source};

use crate::check::check;
use crate::confine::descriptors::Room;
use crate::keep::KeeperSession;
use crate::registry::Registry;
use crate::serve::worker_context::WorkerContext;
use config::disk::DiskSpec;
use config::spec::ProcessSpec;
use control::Error;
use control::api::{DiskKind, EventKind};
use exports::Exports;
use state::Recorded;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Manager that adds, removes and changes the disks of a serving process.
pub struct Manager {
    worker_context: Arc<WorkerContext>,
    allow: Allow,
    /// Limit of descriptors, from which it follows whether another disk fits.
    room: Room,
    /// Process options that are in effect.
    process: ProcessSpec,
    /// Process options of the configuration file, without those of the command line.
    said: ProcessSpec,
    /// Path of the configuration with which the process was started, read again by a reload.
    config: Option<PathBuf>,
    /// Lock that is held while a configuration is applied, so that one is applied at a time.
    applying: Mutex<()>,
    /// Lock that is held while a disk is retried whose recovery has ended earlier processes.
    alone: Mutex<()>,
    /// Lock that is held while settings of volumes are changed.
    setting: Mutex<()>,
    /// Disks of the configuration file as it was read last, by name.
    file: Mutex<BTreeMap<String, DiskSpec>>,
    /// Exports of disks over NBD.
    exports: Exports,
    /// Last written records of the served disks; locked while a record is written.
    recorded: Mutex<Recorded>,
}

impl Manager {
    /// Creates the manager of a serving process.
    pub fn new(worker_context: Arc<WorkerContext>, room: Room, process: ProcessSpec) -> Arc<Self> {
        let daemon = worker_context.options.daemon.clone().unwrap_or_default();
        Arc::new(Self {
            allow: Allow::new(
                &worker_context.options,
                &process.access,
                worker_context.socket_maker.grants().clone(),
                &worker_context.opener.keeper.inherited,
            ),
            room,
            process,
            said: daemon.process,
            config: daemon.config,
            applying: Mutex::default(),
            alone: Mutex::default(),
            setting: Mutex::default(),
            file: Mutex::new(daemon.file),
            exports: Exports::default(),
            recorded: Mutex::default(),
            worker_context,
        })
    }

    /// Returns whether disks may be added and removed at run time.
    pub fn may_change(&self) -> bool {
        self.worker_context.options.daemon.is_some()
    }

    /// Returns the registry of counters, limits and devices.
    pub fn registry(&self) -> &Registry {
        &self.worker_context.registry
    }

    /// Returns the session with the keeper.
    pub fn keeper(&self) -> &Arc<KeeperSession> {
        &self.worker_context.opener.keeper
    }

    /// Checks that there is a disk with this name.
    ///
    /// # Errors
    /// There is no such disk.
    pub fn ensure_known(&self, name: &str) -> Result<(), Error> {
        self.worker_context.table.get(name).map(drop)
    }

    /// Checks that no two disks have a value that must be unique, and that descriptors suffice for
    /// all disks.
    fn check_all<'a>(&self, disks: impl Iterator<Item = &'a DiskSpec>) -> Result<(), Error> {
        let specs = DiskSpec::specs(disks);
        let options = &self.worker_context.options;
        let checked = check(&specs, options.control.as_deref(), &options.answers);
        checked.map_err(|error| Error::conflict(format!("{error:#}")))?;
        let room = self.room.check(&specs);
        room.map_err(|error| Error::conflict(format!("{error:#}")))
    }

    /// Checks the configuration of a disk by itself, without regard to other disks.
    fn check_alone(&self, disk: &DiskSpec) -> Result<(), Error> {
        let specs = DiskSpec::specs(std::iter::once(disk));
        let checked = check(&specs, None, &self.worker_context.options.answers);
        checked.map_err(|error| Error::invalid(format!("{error:#}")))
    }

    /// Checks the configuration of a disk for conflicts with all other disks.
    fn check_beside(&self, name: &str, disk: &DiskSpec) -> Result<(), Error> {
        let table = self.worker_context.table.served();
        let others = table.iter().filter(|(other, _)| other != name);
        let others = others.map(|(_, entry)| &entry.spec);
        self.check_all(others.chain(std::iter::once(disk)))
    }

    /// Sends an event to all listeners, and records the new state.
    fn tell(&self, kind: EventKind, disk: &str, nsid: Option<u32>) {
        let table = self.worker_context.table.served();
        let disks = table.iter().map(|(_, entry)| &entry.spec);
        self.worker_context.registry.described.set(disks);
        let all = self.worker_context.table.all().into_iter();
        let controllers = all.filter(|(_, entry)| entry.spec.kind() == DiskKind::Controller);
        self.keeper().expect_disks(controllers.count());
        self.worker_context
            .registry
            .events
            .send(kind, disk, nsid, None);
        self.keep_state();
    }
}
