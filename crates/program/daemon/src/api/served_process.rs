//! Answers of a process on its control socket.

use crate::manage::Manager;
use crate::open::devices::Action;
use control::api::{
    AnaChange, AnaStatus, DeviceStatus, Disk, DiskKind, ErrorChange, Export, LimitChange,
    Namespace, NewExport, PathChange, PathState, Plan, Stats, VolumeErrors, VolumeLimits,
};
use control::{Daemon, Error, EventReceiver};
use keeper::UpgradeError;
use serde_json::{Map, Value};
use std::convert::Infallible;
use std::sync::Arc;

/// Implementation of the management API for the process that serves disks.
pub struct ServedProcess(Arc<Manager>);

impl ServedProcess {
    /// Creates the management API of a process; `manager` changes the process's disks.
    pub fn new(manager: Arc<Manager>) -> Self {
        Self(manager)
    }

    /// Returns the manager of a daemon, which may change disks. The disks of `vnvme serve` do not
    /// change: its sandbox is closed.
    fn changing(&self) -> Result<&Arc<Manager>, Error> {
        if self.0.may_change() {
            self.started()
        } else {
            fixed()
        }
    }

    /// Returns the manager of disks, or an error until all disks of the start are known.
    fn started(&self) -> Result<&Arc<Manager>, Error> {
        self.0.wait_started()?;
        Ok(&self.0)
    }
}

fn fixed<T>() -> Result<T, Error> {
    let message = "this process cannot add or remove disks: start vnvme daemon instead of vnvme \
                   serve";
    Err(Error::unsupported(message))
}

impl Daemon for ServedProcess {
    fn disks(&self) -> Result<Vec<Disk>, Error> {
        Ok(self.started()?.disks())
    }

    fn disk(&self, name: &str) -> Result<Disk, Error> {
        self.started()?.disk(name)
    }

    fn add(&self, kind: DiskKind, table: Map<String, Value>) -> Result<Disk, Error> {
        self.changing()?.add(kind, table)
    }

    fn remove(&self, name: &str, force: bool) -> Result<(), Error> {
        self.changing()?.remove(name, force)
    }

    fn accept(&self, name: &str) -> Result<(), Error> {
        self.started()?.accept(name)
    }

    fn apply(&self, config: Map<String, Value>, dry_run: bool) -> Result<Plan, Error> {
        self.changing()?.apply(config, dry_run)
    }

    fn reload(&self) -> Result<Plan, Error> {
        self.changing()?.reload()
    }

    fn upgrade(&self) -> Result<Infallible, Error> {
        self.started()?;
        let Some(link) = self.0.keeper().link() else {
            return Err(Error::unsupported(
                "no keeper holds the disks of this process: start it with --keeper",
            ));
        };
        link.upgrade().map_err(|error| match error {
            UpgradeError::Systemd => Error::unsupported(error.to_string()),
            UpgradeError::Refused(_) => Error::conflict(error.to_string()),
            UpgradeError::Late(_) | UpgradeError::Unreachable(_) => {
                Error::failed(error.to_string())
            }
        })
    }

    fn attach(&self, name: &str, namespace: Map<String, Value>) -> Result<Namespace, Error> {
        self.changing()?.attach(name, namespace)
    }

    fn detach(&self, name: &str, nsid: u32) -> Result<(), Error> {
        self.changing()?.detach(name, nsid)
    }

    fn resize(&self, name: &str, nsid: u32, bytes: u64) -> Result<Namespace, Error> {
        self.changing()?.resize(name, nsid, bytes)
    }

    fn exports(&self) -> Result<Vec<Export>, Error> {
        Ok(self.started()?.exports())
    }

    fn export(&self, export: &NewExport) -> Result<Export, Error> {
        self.changing()?.export(export)
    }

    fn unexport(&self, disk: &str) -> Result<(), Error> {
        self.started()?.unexport(disk)
    }

    fn limits(&self, change: &LimitChange) -> Result<Vec<VolumeLimits>, Error> {
        self.0.limits(change)
    }

    fn on_error(&self, change: &ErrorChange) -> Result<Vec<VolumeErrors>, Error> {
        self.0.on_error(change)
    }

    fn path(&self, change: &PathChange) -> Result<Vec<PathState>, Error> {
        if let Some(disk) = &change.disk {
            self.started()?.ensure_known(disk)?;
        }
        let registry = self.0.registry();
        registry.paths.change(change, &registry.described)
    }

    fn ana(&self, change: &AnaChange) -> Result<Vec<AnaStatus>, Error> {
        self.started()?.ana(change)
    }

    fn suspend(&self, device: &str) -> Result<DeviceStatus, Error> {
        self.0.registry().devices.change(device, Action::Suspend)
    }

    fn resume(&self, device: &str) -> Result<DeviceStatus, Error> {
        self.0.registry().devices.change(device, Action::Resume)
    }

    fn save(&self) -> Result<String, Error> {
        self.started()?.save()
    }

    fn stats(&self) -> Stats {
        self.0.registry().snapshot()
    }

    fn metrics(&self) -> Result<String, Error> {
        Ok(self.0.registry().numbers().prometheus())
    }

    fn page(&self) -> Result<&'static str, Error> {
        Ok(metrics::PAGE)
    }

    fn events(&self) -> EventReceiver {
        self.0.registry().listen()
    }
}
