//! What a process answers whose disks stay as they were when it began.

use crate::devices::Action;
use crate::registry::{Registry, disk_name};
use crate::spec::Specs;
use control::api::{
    DeviceStatus, Disk, DiskKind, LimitChange, Namespace, PathChange, PathState, Plan, Stats,
    VolumeLimits,
};
use control::{Daemon, Error, EventReceiver};
use serde_json::{Map, Value};
use std::path::Path;

/// A disk and its volumes, as the configuration has them.
struct Entry {
    disk: Disk,
    volumes: Vec<String>,
}

impl Entry {
    fn new(kind: DiskKind, socket: &Path, volumes: Vec<String>) -> Self {
        let disk = Disk {
            name: disk_name(socket),
            kind,
            socket: Some(socket.display().to_string()),
            device: None,
            attached: false,
            client_pid: None,
            namespaces: Vec::new(),
        };
        Self { disk, volumes }
    }
}

/// Such a process.
pub struct Served {
    registry: Registry,
    entries: Vec<Entry>,
}

impl Served {
    /// One that serves this.
    pub fn new(registry: &Registry, specs: &Specs) -> Self {
        let controllers = specs.controllers.iter().map(|spec| {
            let volumes = spec.namespaces.iter().map(|ns| ns.volume.to_string());
            Entry::new(DiskKind::Controller, &spec.socket, volumes.collect())
        });
        let exports = specs.vhost_user_blk.iter().map(|spec| {
            let volumes = vec![spec.volume.to_string()];
            Entry::new(DiskKind::VhostUserBlk, &spec.socket, volumes)
        });
        let mut entries: Vec<Entry> = controllers.chain(exports).collect();
        entries.sort_by(|one, other| one.disk.name.cmp(&other.disk.name));
        Self {
            registry: registry.clone(),
            entries,
        }
    }

    fn entry(&self, name: &str) -> Result<&Entry, Error> {
        let mut found = self.entries.iter().filter(|entry| entry.disk.name == name);
        match (found.next(), found.next()) {
            (Some(entry), None) => Ok(entry),
            (Some(_), Some(_)) => Err(Error::conflict(format!(
                "several disks are called \"{name}\""
            ))),
            (None, _) => Err(Error::not_found(format!("no disk is called \"{name}\""))),
        }
    }
}

fn fixed<T>() -> Result<T, Error> {
    let message = "what this process serves stays as it is until it ends";
    Err(Error::unsupported(message))
}

impl Daemon for Served {
    fn disks(&self) -> Vec<Disk> {
        let entries = self.entries.iter();
        entries.map(|entry| entry.disk.clone()).collect()
    }

    fn disk(&self, name: &str) -> Result<Disk, Error> {
        self.entry(name).map(|entry| entry.disk.clone())
    }

    fn add(&self, _: DiskKind, _: Map<String, Value>) -> Result<Disk, Error> {
        fixed()
    }

    fn remove(&self, _: &str, _: bool) -> Result<(), Error> {
        fixed()
    }

    fn apply(&self, _: Map<String, Value>, _: bool) -> Result<Plan, Error> {
        fixed()
    }

    fn reload(&self) -> Result<Plan, Error> {
        fixed()
    }

    fn attach(&self, _: &str, _: Map<String, Value>) -> Result<Namespace, Error> {
        fixed()
    }

    fn detach(&self, _: &str, _: u32) -> Result<(), Error> {
        fixed()
    }

    fn resize(&self, _: &str, _: u32, _: u64) -> Result<Namespace, Error> {
        fixed()
    }

    fn limits(&self, change: &LimitChange) -> Result<Vec<VolumeLimits>, Error> {
        let disk = change.disk.as_ref();
        let entry = disk.map(|name| self.entry(name)).transpose()?;
        let volumes = entry.map(|entry| entry.volumes.as_slice());
        self.registry.limits.change(change, volumes)
    }

    fn path(&self, change: &PathChange) -> Result<Vec<PathState>, Error> {
        if let Some(disk) = &change.disk {
            self.entry(disk)?;
        }
        self.registry.paths.change(change)
    }

    fn suspend(&self, device: &str) -> Result<DeviceStatus, Error> {
        self.registry.devices.change(device, Action::Suspend)
    }

    fn resume(&self, device: &str) -> Result<DeviceStatus, Error> {
        self.registry.devices.change(device, Action::Resume)
    }

    fn save(&self) -> Result<String, Error> {
        fixed()
    }

    fn stats(&self) -> Stats {
        self.registry.snapshot()
    }

    fn metrics(&self) -> Result<String, Error> {
        Ok(self.registry.numbers().prometheus())
    }

    fn page(&self) -> Result<&'static str, Error> {
        Ok(metrics::PAGE)
    }

    fn events(&self) -> EventReceiver {
        self.registry.listen()
    }
}
