//! Interface of the daemon that the server calls.

use crate::api::{
    AnaChange, AnaStatus, DeviceStatus, Disk, DiskKind, ErrorChange, Export, LimitChange,
    Namespace, NewExport, PathChange, PathState, Plan, Stats, VolumeErrors, VolumeLimits,
};
use crate::error::Error;
use crate::events::EventReceiver;
use serde_json::{Map, Value};
use std::convert::Infallible;

/// The process behind a control socket.
///
/// Its methods may block: the server calls them on threads that may, several at a time. A method
/// that is refused has changed nothing. Tables have the keys of the configuration file.
pub trait Daemon: Send + Sync + 'static {
    /// All disks, sorted by their names.
    ///
    /// # Errors
    /// It is not known yet: the process is starting. So also below.
    fn disks(&self) -> Result<Vec<Disk>, Error>;

    /// Returns the disk with this name.
    ///
    /// # Errors
    /// There is no such disk.
    fn disk(&self, name: &str) -> Result<Disk, Error>;

    /// Serves a further disk.
    ///
    /// # Errors
    /// The table is wrong, its name or socket is taken, or something of it cannot be opened.
    fn add(&self, kind: DiskKind, table: Map<String, Value>) -> Result<Disk, Error>;

    /// Stops serving a disk, after all that is in flight has ended.
    ///
    /// # Errors
    /// There is none of this name; or a client is attached, and `force` is not set.
    fn remove(&self, name: &str, force: bool) -> Result<(), Error>;

    /// Confirms that the volumes found at the places of an unavailable disk's volumes are to be its
    /// volumes, although its guest has others.
    ///
    /// # Errors
    /// There is no disk of this name, or it does not wait for that.
    fn accept(&self, name: &str) -> Result<(), Error>;

    /// Applies a configuration. With `dry_run` it only returns the changes. Impossible changes are
    /// listed in [`Plan::refused`]; if there are any, nothing was done.
    ///
    /// # Errors
    /// The configuration is invalid, or a change failed midway.
    fn apply(&self, config: Map<String, Value>, dry_run: bool) -> Result<Plan, Error>;

    /// Reads the configuration that the process was started with once more, and applies it.
    ///
    /// # Errors
    /// It was started without one; or as [`Daemon::apply`].
    fn reload(&self) -> Result<Plan, Error>;

    /// Adds a namespace to a controller. Its client notices without a reset.
    ///
    /// # Errors
    /// There is no such disk, it is no controller, or the namespace cannot be opened.
    fn attach(&self, name: &str, namespace: Map<String, Value>) -> Result<Namespace, Error>;

    /// Removes a namespace of a controller, after all that is in flight on it has ended.
    ///
    /// # Errors
    /// There is no such disk or namespace.
    fn detach(&self, name: &str, nsid: u32) -> Result<(), Error>;

    /// Changes the size of a namespace's volume, in bytes. Disks of other kinds have the namespace
    /// 1.
    ///
    /// # Errors
    /// There is no such namespace, or its volume cannot have that size.
    fn resize(&self, name: &str, nsid: u32, bytes: u64) -> Result<Namespace, Error>;

    /// Returns all exports of disks over NBD.
    ///
    /// # Errors
    /// It is not known yet: the process is starting.
    fn exports(&self) -> Result<Vec<Export>, Error>;

    /// Exports a disk over NBD.
    ///
    /// # Errors
    /// There is no such disk or namespace, the socket cannot be made, or the disk is in use and the
    /// export writable.
    fn export(&self, export: &NewExport) -> Result<Export, Error>;

    /// Ends all exports of a disk.
    ///
    /// # Errors
    /// The disk has no export, or its volume has not answered all requests of one that has ended.
    fn unexport(&self, disk: &str) -> Result<(), Error>;

    /// Changes limits and weights; returns those of the selected volumes.
    ///
    /// # Errors
    /// No volume is selected, or a selected volume cannot have these limits.
    fn limits(&self, change: &LimitChange) -> Result<Vec<VolumeLimits>, Error>;

    /// Changes error policies, or repeats requests that wait; returns the policies of the selected
    /// volumes.
    ///
    /// # Errors
    /// No volume is selected.
    fn on_error(&self, change: &ErrorChange) -> Result<Vec<VolumeErrors>, Error>;

    /// Changes how namespaces reach a device below; returns the paths of the selected namespaces.
    ///
    /// # Errors
    /// No namespace is selected, or a selected one has no direct path.
    fn path(&self, change: &PathChange) -> Result<Vec<PathState>, Error>;

    /// Changes the ANA states of a disk's groups; returns the states of the selected groups.
    ///
    /// # Errors
    /// No group is selected, or commands in flight before the change do not end.
    fn ana(&self, change: &AnaChange) -> Result<Vec<AnaStatus>, Error>;

    /// Shuts a device below down; commands wait until it is resumed.
    ///
    /// # Errors
    /// There is none of this name, or it does not shut down.
    fn suspend(&self, device: &str) -> Result<DeviceStatus, Error>;

    /// Brings a suspended device up again; commands that waited are repeated.
    ///
    /// # Errors
    /// There is none of this name, it is not suspended, or it does not come up.
    fn resume(&self, device: &str) -> Result<DeviceStatus, Error>;

    /// Replaces this process by the program that is now installed at its path. Returns only if that
    /// is refused, since otherwise this process is ended.
    ///
    /// # Errors
    /// Always: there is no keeper for the disks, or the program cannot replace this one.
    fn upgrade(&self) -> Result<Infallible, Error>;

    /// Returns the running configuration as a configuration file (TOML).
    ///
    /// # Errors
    /// The configuration cannot be written as a file.
    fn save(&self) -> Result<String, Error>;

    /// Returns all counters of the process, as of one moment.
    fn stats(&self) -> Stats;

    /// Returns the metrics in Prometheus' text format.
    ///
    /// # Errors
    /// This process has none.
    fn metrics(&self) -> Result<String, Error>;

    /// The page that shows the disks in a browser, as HTML: one file that loads no other.
    ///
    /// # Errors
    /// This program has none.
    fn page(&self) -> Result<&'static str, Error>;

    /// Returns a receiver of events from now on.
    fn events(&self) -> EventReceiver;
}
