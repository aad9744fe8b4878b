//! The running disks by name, with the changes under way.

use crate::check::check;
use crate::confine::path_check::{PathAnswers, opening_for};
use crate::registry::guarded_list::ListEntry;
use config::disk::DiskSpec;
use control::Error;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use volume::Volume;

/// Origin of a disk: the configuration, or a request at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The disk is in the configuration. A reload removes it when the configuration no longer names
    /// it.
    Config,
    /// A request has added the disk at run time. Only a request removes it.
    Runtime,
}

/// Thread that serves a disk: a worker, or the thread of block devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskServer {
    /// Front-end with the number `owner` on the worker with the index `worker`.
    Worker { worker: usize, owner: u16 },
    /// Number of the block device that the thread of block devices serves.
    Ublk(u32),
}

/// Disk that is being served, with the thread that serves it.
#[derive(Clone, Debug)]
pub struct ServedDisk {
    pub server: DiskServer,
    /// Volumes of the disk by their NSIDs, as weak references.
    pub volumes: Vec<(u32, Weak<dyn Volume>)>,
    /// Eventfd to be written to after one of the disk's volumes was resized.
    pub resized: Arc<OwnedFd>,
}

/// Entry of a disk in the table of all disks.
#[derive(Clone, Debug)]
pub struct DiskRecord {
    pub spec: DiskSpec,
    pub source: Source,
    /// Not while it is being added, and not of a disk that could not be.
    pub running: Option<ServedDisk>,
    /// Reason why an unavailable disk is not served; `None` for a served disk.
    pub failed: Option<Arc<DiskFailure>>,
    /// Description of the change of the disk that is in progress; `None` if there is none.
    pub busy: Option<&'static str>,
    /// Result of a change that is recorded for the next process and has not taken effect yet.
    pub next: Option<Next>,
}

/// Result of a change of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Configuration that the disk will have after the change.
    As(Box<DiskSpec>),
    /// The change removes the disk.
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

/// Reason why a disk is not served.
#[derive(Debug)]
pub struct DiskFailure {
    /// Reason as a text. [`DiskFailure::text`] has the time of an opening that hangs.
    pub why: String,
    /// Time since when the disk's files have not answered, if that is the reason.
    pub since: Option<Instant>,
    /// Whether any process has opened the disk's volumes since it was configured.
    pub was_opened: bool,
    /// Entry in the list of unavailable disks, by which they are counted.
    pub _counted: Arc<ListEntry<String>>,
}

impl DiskFailure {
    /// Returns the reason as a text for the operator.
    pub fn text(&self) -> String {
        let hanging = self.since.map(|since| opening_for(since.elapsed()));
        hanging.unwrap_or_else(|| self.why.clone())
    }
}

/// Table of all disks of the process, served or not.
#[derive(Default)]
pub struct DiskTable {
    entries: Mutex<BTreeMap<String, DiskRecord>>,
    /// Path of the control socket, which no disk may use.
    control: Option<PathBuf>,
    answers: Arc<PathAnswers>,
    /// Whether all disks of the start are in the table.
    complete: Mutex<bool>,
    completed: Condvar,
    /// Signalled when a disk was removed or the configuration was read again.
    changed: Condvar,
}

impl DiskTable {
    /// Creates an empty table. `control` is the path of the process's control socket.
    pub fn new(control: Option<PathBuf>, answers: Arc<PathAnswers>) -> Self {
        Self {
            entries: Mutex::default(),
            control,
            answers,
            complete: Mutex::default(),
            completed: Condvar::new(),
            changed: Condvar::new(),
        }
    }

    /// Records that all disks of the start are in the table, and wakes waiting callers.
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

    /// Sets or clears the recorded result of the change of a disk that is in progress.
    pub(super) fn set_next(&self, name: &str, next: Option<Next>) {
        if let Some(entry) = self.lock().get_mut(name) {
            entry.next = next;
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, DiskRecord>> {
        self.entries.lock().unpoisoned()
    }

    /// Adds a disk that is served from the start.
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

    /// Adds a disk that cannot be served now.
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

    /// Returns the configuration of an unavailable disk, and why it is not served.
    pub fn unavailable(&self, name: &str) -> Option<(DiskSpec, Arc<DiskFailure>)> {
        let entries = self.lock();
        let entry = entries.get(name)?;
        Some((entry.spec.clone(), entry.failed.clone()?))
    }

    /// Replaces the reason why a disk is unavailable. Returns whether it differs from the one
    /// before.
    pub fn fails_again(&self, name: &str, before: &Arc<DiskFailure>, now: DiskFailure) -> bool {
        let mut entries = self.lock();
        let is_new = (&now.why, now.since) != (&before.why, before.since);
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
        check(&together, self.control.as_deref(), &self.answers)
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

    /// Wakes the threads that retry to serve unavailable disks.
    pub fn try_again(&self) {
        self.changed.notify_all();
    }

    /// Adds an entry again that was removed, unless another disk has its name.
    pub fn remember(&self, entry: DiskRecord) {
        self.lock().entry(entry.spec.name()).or_insert(entry);
    }

    /// Returns the entries of all disks, sorted by name.
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

    /// Returns the entry of the disk with this name.
    ///
    /// # Errors
    /// There is no such disk.
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

    /// Marks disks again as added at run time, after an applied configuration was undone.
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
                    failed.text()
                ),
                (None, None) => format!("{there}; choose another name, or remove that disk first"),
            }));
        }
        let alone = DiskSpec::specs(std::iter::once(&spec));
        check(&alone, None, &self.answers).map_err(|error| Error::invalid(format!("{error:#}")))?;
        let others = entries.values().filter(|entry| entry.failed.is_none());
        let others = others.map(|entry| &entry.spec);
        let together = DiskSpec::specs(others.chain(std::iter::once(&spec)));
        check(&together, self.control.as_deref(), &self.answers)
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

    /// Stores that the disk reserved as `taken` is served. Returns its name.
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
            let why = entry.failed.as_ref().map(|failed| failed.text());
            let why = why.unwrap_or_else(|| "it is being added".to_owned());
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
    let remedy = if name.contains("://") {
        "it looks like a volume, and the name of the disk comes first"
    } else {
        "vnvme list shows the names"
    };
    Error::not_found(format!("no disk is called \"{name}\"; {remedy}"))
}

/// Reserved name of a disk that is being added. Dropping it frees the name again.
pub struct ReservedName {
    table: Arc<DiskTable>,
    name: Option<String>,
}

impl ReservedName {
    /// Returns the name of the disk, and the recorded result of its change.
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
    /// Stores that the disk is served again. Returns its name.
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

/// Disk that is reserved for a change until this value is dropped.
pub struct BusyDisk {
    table: Arc<DiskTable>,
    pub name: String,
    pub spec: DiskSpec,
    pub source: Source,
    pub running: ServedDisk,
}

impl BusyDisk {
    /// Removes the disk from the table of disks.
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
