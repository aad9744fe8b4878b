//! The running disks by name, with the changes under way.

use super::DiskSpec;
use crate::check::check;
use crate::guarded_list::ListEntry;
use control::Error;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;
use sync::Unpoisoned;
use volume::Volume;

/// Source of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The configuration: a reload that does not find it there removes it.
    Config,
    /// A request: it stays until one removes it.
    Runtime,
}

/// Server of a disk: a worker or the thread of block devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskServer {
    /// A front-end of this number on the worker of this index.
    Worker { worker: usize, owner: u16 },
    /// The thread of block devices; the device of this number.
    Ublk(u32),
}

/// A disk that is served.
#[derive(Clone, Debug)]
pub struct ServedDisk {
    pub server: DiskServer,
    /// Volumes of the disk by their NSIDs, as weak references.
    pub volumes: Vec<(u32, Weak<dyn Volume>)>,
    /// To be written to when one of them was resized.
    pub resized: Arc<OwnedFd>,
}

/// A disk, as the table has it.
#[derive(Clone, Debug)]
pub struct DiskRecord {
    pub spec: DiskSpec,
    pub source: Source,
    /// Not while it is being added, and not of a disk that could not be.
    pub running: Option<ServedDisk>,
    /// Reason why an unavailable disk is not served; `None` for a served disk.
    pub failed: Option<Arc<DiskFailure>>,
    /// Description of the change that is under way.
    pub busy: Option<&'static str>,
    /// Result of a change that is recorded and has not taken effect yet.
    pub next: Option<Next>,
}

/// Result of a change of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// The disk as it is going to be.
    As(Box<DiskSpec>),
    /// The disk is going to be removed.
    Gone,
}

impl DiskRecord {
    /// Returns the disk as the next process has to know it; `None` for one that it must not serve.
    pub fn recorded(&self) -> Option<&DiskSpec> {
        match &self.next {
            Some(Next::As(spec)) => Some(spec),
            Some(Next::Gone) => None,
            // A disk that is being added counts when it is recorded.
            None if self.running.is_none() && self.failed.is_none() => None,
            None => Some(&self.spec),
        }
    }
}

/// Why a disk is not served.
#[derive(Debug)]
pub struct DiskFailure {
    pub why: String,
    /// A process has opened its volumes since it was configured.
    pub was_opened: bool,
    /// Entry in the list of unavailable disks, which counts them.
    pub _counted: Arc<ListEntry<String>>,
}

/// All disks of the process.
#[derive(Default)]
pub struct DiskTable {
    entries: Mutex<BTreeMap<String, DiskRecord>>,
    /// The control socket: no disk may have its place.
    control: Option<PathBuf>,
    /// All that is there from the start has been entered.
    complete: Mutex<bool>,
    completed: Condvar,
    /// A disk was removed, or the configuration was read again.
    changed: Condvar,
}

impl DiskTable {
    /// An empty one. `control` is the process's own socket.
    pub fn new(control: Option<PathBuf>) -> Self {
        Self {
            entries: Mutex::default(),
            control,
            complete: Mutex::default(),
            completed: Condvar::new(),
            changed: Condvar::new(),
        }
    }

    /// All that is served from the start has been entered, or never will be.
    pub fn complete(&self) {
        *self.complete.lock().unpoisoned() = true;
        self.completed.notify_all();
    }

    /// Waits until all disks of the start are known, for at most `limit`. Returns whether they are.
    pub fn wait_complete(&self, limit: Duration) -> bool {
        let complete = self.complete.lock().unpoisoned();
        let waited = self
            .completed
            .wait_timeout_while(complete, limit, |complete| !*complete);
        *waited.unpoisoned().0
    }

    /// Sets or clears the result of the change that is under way.
    pub(super) fn set_next(&self, name: &str, next: Option<Next>) {
        if let Some(entry) = self.lock().get_mut(name) {
            entry.next = next;
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, DiskRecord>> {
        self.entries.lock().unpoisoned()
    }

    /// Enters a disk that is served from the start.
    pub fn enter(&self, spec: DiskSpec, source: Source, running: ServedDisk) {
        let entry = DiskRecord {
            spec,
            source,
            running: Some(running),
            failed: None,
            busy: None,
            next: None,
        };
        self.lock().insert(entry.spec.name(), entry);
    }

    /// Enters a disk that cannot be served.
    pub fn enter_failed(&self, spec: DiskSpec, source: Source, failed: DiskFailure) {
        let entry = DiskRecord {
            spec,
            source,
            running: None,
            failed: Some(Arc::new(failed)),
            busy: None,
            next: None,
        };
        self.lock().insert(entry.spec.name(), entry);
    }

    /// Removes a disk from the table if it is unavailable and not busy. Returns its entry.
    pub fn forget(&self, name: &str) -> Option<DiskRecord> {
        let mut entries = self.lock();
        let entry = entries.get(name)?;
        if entry.failed.is_none() || entry.busy.is_some() {
            return None;
        }
        self.changed.notify_all();
        entries.remove(name)
    }

    /// A disk that is unavailable, and why.
    pub fn unavailable(&self, name: &str) -> Option<(DiskSpec, Arc<DiskFailure>)> {
        let entries = self.lock();
        let entry = entries.get(name)?;
        Some((entry.spec.clone(), entry.failed.clone()?))
    }

    /// Replaces the reason why a disk is unavailable. Returns whether it differs from the one
    /// before.
    pub fn fails_again(&self, name: &str, before: &Arc<DiskFailure>, now: DiskFailure) -> bool {
        let mut entries = self.lock();
        let is_new = now.why != before.why;
        if let Some(entry) = entries.get_mut(name)
            && is_same(entry, before)
        {
            entry.failed = Some(Arc::new(now));
        }
        is_new
    }

    /// Takes an unavailable disk, after its volumes were opened, to serve it.
    ///
    /// # Errors
    /// The disk has been removed or changed; another disk has one of its unique values.
    pub fn take_unavailable(
        self: &Arc<Self>,
        name: &str,
        failed: &Arc<DiskFailure>,
    ) -> Result<RetriedDisk, Error> {
        let mut entries = self.lock();
        let others = entries.values().filter(|entry| entry.failed.is_none());
        let others: Vec<DiskSpec> = others.map(|entry| entry.spec.clone()).collect();
        let entry = entries.get_mut(name);
        let entry = entry.filter(|entry| is_same(entry, failed) && entry.busy.is_none());
        let Some(entry) = entry else {
            return Err(Error::conflict(format!("\"{name}\" has been removed")));
        };
        let together = DiskSpec::specs(others.iter().chain(std::iter::once(&entry.spec)));
        check(&together, self.control.as_deref())
            .map_err(|error| Error::conflict(format!("{error:#}")))?;
        entry.busy = Some("being added");
        Ok(RetriedDisk {
            table: self.clone(),
            name: name.to_owned(),
        })
    }

    /// Waits until something has changed that unavailable disks may depend on, for so long at most.
    pub fn wait_changed(&self, limit: Duration) {
        let entries = self.lock();
        drop(self.changed.wait_timeout(entries, limit).unpoisoned());
    }

    /// Has unavailable disks tried again now.
    pub fn try_again(&self) {
        self.changed.notify_all();
    }

    /// Enters one again that was forgotten, if its name is free.
    pub fn remember(&self, entry: DiskRecord) {
        self.lock().entry(entry.spec.name()).or_insert(entry);
    }

    /// All disks, by their names.
    pub fn all(&self) -> Vec<(String, DiskRecord)> {
        let entries = self.lock();
        let all = entries.iter();
        all.map(|(name, entry)| (name.clone(), entry.clone()))
            .collect()
    }

    /// Returns all disks except the unavailable ones, which do not block the names and values of
    /// other disks.
    pub fn served(&self) -> Vec<(String, DiskRecord)> {
        let mut all = self.all();
        all.retain(|(_, entry)| entry.failed.is_none());
        all
    }

    /// A disk.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, name: &str) -> Result<DiskRecord, Error> {
        let found = self.lock().get(name).cloned();
        found.ok_or_else(|| unknown(name))
    }

    /// Makes these disks the configuration's, which removes them when it loses them. Returns those
    /// that had been added by request.
    pub fn adopt<'a>(&self, names: impl Iterator<Item = &'a String>) -> Vec<String> {
        let mut entries = self.lock();
        let mut adopted = Vec::new();
        for name in names {
            if let Some(entry) = entries.get_mut(name)
                && entry.source != Source::Config
            {
                entry.source = Source::Config;
                adopted.push(name.clone());
            }
        }
        adopted
    }

    /// Makes disks again those that were added by request.
    pub fn unadopt(&self, adopted: &[String]) {
        let mut entries = self.lock();
        for name in adopted {
            if let Some(entry) = entries.get_mut(name) {
                entry.source = Source::Runtime;
            }
        }
    }

    /// Takes a name, and all else that has to be unique, for a disk that is to come.
    ///
    /// # Errors
    /// It is taken.
    pub fn reserve(
        self: &Arc<Self>,
        spec: DiskSpec,
        source: Source,
    ) -> Result<ReservedName, Error> {
        let name = spec.name();
        let mut entries = self.lock();
        if let Some(entry) = entries.get(&name) {
            let there = format!("a disk \"{name}\" is there already");
            return Err(Error::conflict(match (entry.busy, &entry.failed) {
                (Some(what), _) => format!("{there}, and is {what}"),
                (None, Some(failed)) => format!(
                    "{there}, and is not served ({}): vnvme remove {name} forgets it",
                    failed.why
                ),
                (None, None) => format!("{there}; choose another name, or remove that disk first"),
            }));
        }
        let alone = DiskSpec::specs(std::iter::once(&spec));
        check(&alone, None).map_err(|error| Error::invalid(format!("{error:#}")))?;
        let others = entries.values().filter(|entry| entry.failed.is_none());
        let others = others.map(|entry| &entry.spec);
        let together = DiskSpec::specs(others.chain(std::iter::once(&spec)));
        check(&together, self.control.as_deref())
            .map_err(|error| Error::conflict(format!("{error:#}")))?;
        let entry = DiskRecord {
            spec,
            source,
            running: None,
            failed: None,
            busy: Some("being added"),
            next: None,
        };
        entries.insert(name.clone(), entry);
        Ok(ReservedName {
            table: self.clone(),
            name: Some(name),
        })
    }

    /// A disk is served from now on. Its name.
    fn is_served(&self, taken: &str, running: ServedDisk) -> String {
        let mut entries = self.lock();
        let Some(mut entry) = entries.remove(taken) else {
            return taken.to_owned();
        };
        if let (DiskSpec::Ublk(spec), DiskServer::Ublk(id)) = (&mut entry.spec, running.server) {
            spec.id = Some(id);
            let name = spec.any_name();
            let free = !entries.contains_key(&name);
            spec.name = Some(if free { name } else { taken.to_owned() });
        }
        entry.running = Some(running);
        entry.failed = None;
        entry.busy = None;
        entry.next = None;
        let name = entry.spec.name();
        entries.insert(name.clone(), entry);
        name
    }

    /// Takes a disk to do something to it: nobody else may meanwhile.
    ///
    /// # Errors
    /// There is none, or something is being done to it.
    pub fn take(self: &Arc<Self>, name: &str, what: &'static str) -> Result<BusyDisk, Error> {
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(name) else {
            return Err(unknown(name));
        };
        if let Some(busy) = entry.busy {
            return Err(Error::conflict(format!("\"{name}\" is {busy}")));
        }
        let Some(running) = entry.running.clone() else {
            let why = entry.failed.as_ref().map(|failed| &*failed.why);
            let why = why.unwrap_or("it is being added");
            return Err(Error::conflict(format!("\"{name}\" is not served: {why}")));
        };
        entry.busy = Some(what);
        Ok(BusyDisk {
            table: self.clone(),
            name: name.to_owned(),
            spec: entry.spec.clone(),
            source: entry.source,
            running,
        })
    }
}

fn is_same(entry: &DiskRecord, failed: &Arc<DiskFailure>) -> bool {
    let now = entry.failed.as_ref();
    now.is_some_and(|now| Arc::ptr_eq(now, failed))
}

fn unknown(name: &str) -> Error {
    Error::not_found(format!(
        "no disk is called \"{name}\"; vnvme list shows the names"
    ))
}

/// A name that was taken; it is free again unless [`ReservedName::serve`] is called.
pub struct ReservedName {
    table: Arc<DiskTable>,
    name: Option<String>,
}

impl ReservedName {
    /// Returns the disk's name, and the disk as it is going to be.
    pub fn next(&self) -> Option<(String, Next)> {
        let name = self.name.clone()?;
        let spec = self.table.get(&name).ok()?.spec;
        Some((name, Next::As(Box::new(spec))))
    }

    /// The disk is served. Its name: of a block device, the kernel has chosen it by now.
    pub fn serve(mut self, running: ServedDisk) -> String {
        let Some(taken) = self.name.take() else {
            return String::new();
        };
        self.table.is_served(&taken, running)
    }
}

impl Drop for ReservedName {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            self.table.lock().remove(name);
        }
    }
}

/// An unavailable disk that is about to be served; it stays unavailable unless
/// [`RetriedDisk::serve`] is called.
pub struct RetriedDisk {
    table: Arc<DiskTable>,
    name: String,
}

impl RetriedDisk {
    /// The disk is served. Its name.
    pub fn serve(self, running: ServedDisk) -> String {
        self.table.is_served(&self.name, running)
    }
}

impl Drop for RetriedDisk {
    fn drop(&mut self) {
        if let Some(entry) = self.table.lock().get_mut(&self.name)
            && entry.failed.is_some()
        {
            entry.busy = None;
        }
    }
}

/// A disk to which something is being done, until this is dropped.
pub struct BusyDisk {
    table: Arc<DiskTable>,
    pub name: String,
    pub spec: DiskSpec,
    pub source: Source,
    pub running: ServedDisk,
}

impl BusyDisk {
    /// Removes the disk from the table.
    pub fn gone(self) {
        self.table.lock().remove(&self.name);
    }

    /// Stores this disk's changes in the table.
    pub fn changed(&self) {
        if let Some(entry) = self.table.lock().get_mut(&self.name) {
            entry.next = None;
            entry.spec = self.spec.clone();
            entry.source = self.source;
            entry.running = Some(self.running.clone());
        }
    }
}

impl Drop for BusyDisk {
    fn drop(&mut self) {
        if let Some(entry) = self.table.lock().get_mut(&self.name) {
            entry.busy = None;
        }
    }
}
