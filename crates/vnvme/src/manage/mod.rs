//! What is served changes while the process runs: disks and namespaces come and go, by request
//! ([`control::Daemon`]) or by a new configuration.
//!
//! [`Table`] has what runs, under its names. A change takes its disk out of all others' hands, is
//! done on a thread that may hang, and has its effect in one step or not at all. A configuration is
//! compared with the table ([`plan`]); what it cannot have is said before anything is done, and
//! what fails on the way is undone.

mod allow;
mod ana;
mod api;
mod bounded;
mod change;
mod disk;
mod namespaces;
mod plan;
mod refused;
mod reload;
mod request;
mod resize;
mod state;
mod table;
mod unavailable;

pub use allow::{Allow, allows_ublk, places, servers};
pub use disk::{DiskSpec, to_file};
pub use state::{StateLock, beside, read_state, without_configured};
pub use table::{Failed, Running, Server, Source, Table};

use crate::check::check;
use crate::crew::Crew;
use crate::descriptors::Room;
use crate::registry::Registry;
use crate::spec::ProcessSpec;
use control::Error;
use control::api::EventKind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Changes what a process serves.
pub struct Manager {
    crew: Arc<Crew>,
    allow: Allow,
    /// What the descriptors last for.
    room: Room,
    /// The process as it was configured.
    process: ProcessSpec,
    /// The same without the command line's flags.
    said: ProcessSpec,
    /// The configuration that it was started with, to be read again.
    config: Option<PathBuf>,
    /// One configuration at a time.
    applying: Mutex<()>,
}

impl Manager {
    /// Of a process that serves.
    pub fn new(crew: Arc<Crew>, room: Room, process: ProcessSpec) -> Arc<Self> {
        let daemon = crew.options.daemon.clone().unwrap_or_default();
        Arc::new(Self {
            allow: Allow::new(&crew.options, &process.access),
            room,
            process,
            said: daemon.process,
            config: daemon.config,
            applying: Mutex::default(),
            crew,
        })
    }

    /// Disks come and go.
    pub fn may_change(&self) -> bool {
        self.crew.options.daemon.is_some()
    }

    /// Counters, limits, devices.
    pub fn registry(&self) -> &Registry {
        &self.crew.registry
    }

    /// The volumes of a disk, as they were named.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn volumes(&self, name: &str) -> Result<Vec<String>, Error> {
        let entry = self.crew.table.get(name)?;
        let volumes = entry.spec.volumes().into_iter();
        Ok(volumes.map(str::to_owned).collect())
    }

    /// What has to be unique is, and there are descriptors for all.
    fn check_all<'a>(&self, disks: impl Iterator<Item = &'a DiskSpec>) -> Result<(), Error> {
        let specs = DiskSpec::specs(disks);
        let checked = check(&specs, self.crew.options.control.as_deref());
        checked.map_err(|error| Error::conflict(format!("{error:#}")))?;
        let room = self.room.check(&specs);
        room.map_err(|error| Error::conflict(format!("{error:#}")))
    }

    /// Nothing of a disk is wrong whatever else is there.
    fn check_alone(&self, disk: &DiskSpec) -> Result<(), Error> {
        let checked = check(&DiskSpec::specs(std::iter::once(disk)), None);
        checked.map_err(|error| Error::invalid(format!("{error:#}")))
    }

    /// The same of a disk beside all others.
    fn check_beside(&self, name: &str, disk: &DiskSpec) -> Result<(), Error> {
        let table = self.crew.table.served();
        let others = table.iter().filter(|(other, _)| other != name);
        let others = others.map(|(_, entry)| &entry.spec);
        self.check_all(others.chain(std::iter::once(disk)))
    }

    /// Tells who listens.
    fn tell(&self, kind: EventKind, disk: &str, nsid: Option<u32>) {
        let table = self.crew.table.served();
        let disks = table.iter().map(|(_, entry)| &entry.spec);
        self.crew.registry.described.set(disks);
        self.crew.registry.events.send(kind, disk, nsid, None);
        self.keep_state();
    }
}
