//! Error policy of requests, as the control API shows and changes it.

use crate::manage::{DiskVolumes, VolumeRef};
use crate::registry::descriptions::DiskDescriptions;
use config::error_policy::{OnReadError, OnWriteError, shown};
use control::Error;
use control::api::{ErrorChange, Trouble, TroubleState, VolumeErrors};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant, UNIX_EPOCH};
use sync::Unpoisoned;
use volume::{OnError, OnErrorHandle, OnErrorStatus, Volume};

/// Time for which a disk counts as failing after the last error that its guest has got.
const FAILING_TIME: Duration = Duration::from_secs(60);
/// Time limit for the repetition of held requests. A sleeping worker notices after 100 ms.
const RESUME_TIMEOUT: Duration = Duration::from_secs(2);
/// Time within which a repeated request that fails again does so.
const FAILS_AGAIN: Duration = Duration::from_millis(100);

/// Returns the failing requests of a volume.
pub fn trouble(volume: &Arc<dyn Volume>) -> Option<Trouble> {
    let status = volume.on_error()?.status();
    let (at, error) = status.last?;
    let failed = status.read_errors + status.write_errors;
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    // A clock that was set back makes the error recent.
    let is_recent = at.elapsed().unwrap_or_default() < FAILING_TIME;
    let (state, requests) = match (status.held, status.waiting) {
        (0, 0) if is_recent => (TroubleState::Failing, failed),
        (0, 0) => return None,
        (0, waiting) => (TroubleState::Retrying, count(waiting)),
        (held, _) => (TroubleState::Stopped, count(held)),
    };
    let error = error.to_string();
    Some(Trouble {
        state,
        requests,
        error,
    })
}

/// The policies of the volumes that are open, under the names that the user gave the volumes.
#[derive(Clone, Default)]
pub struct OnErrorRegistry(Arc<Mutex<Vec<Entry>>>);

#[derive(Clone)]
struct Entry {
    name: String,
    handle: OnErrorHandle,
    /// Volume of the entry. The entry is removed when the volume is closed.
    volume: Weak<dyn Volume>,
}

impl Entry {
    fn shown(&self, described: &DiskDescriptions) -> VolumeErrors {
        let (policy, status) = (self.handle.get(), self.handle.status());
        let (disk, nsid) = described.place(&self.name).unwrap_or_default();
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        let when = status.last.and_then(|(at, _)| {
            let since = at.duration_since(UNIX_EPOCH).ok()?;
            u64::try_from(since.as_millis()).ok()
        });
        VolumeErrors {
            disk,
            nsid,
            volume: self.name.clone(),
            on_read_error: shown(policy.read),
            on_write_error: shown(policy.write),
            stopped: status.held > 0,
            held: count(status.held),
            waiting: count(status.waiting),
            read_errors: status.read_errors,
            write_errors: status.write_errors,
            no_space: status.no_space,
            repeated: status.repeated,
            stops: status.stops,
            last_error: status.last.map(|(_, error)| error.to_string()),
            last_error_ms: when,
        }
    }

    fn reference(&self) -> VolumeRef {
        VolumeRef {
            name: self.name.clone(),
            volume: self.volume.clone(),
        }
    }

    fn apply(&self, change: &ErrorChange) {
        apply(change, &self.handle);
        if change.resume {
            tracing::info!("{}: resumed", self.name);
            self.handle.resume();
        }
    }

    /// Waits until the held requests of a resumed volume have been repeated. Returns whether there
    /// were any.
    fn wait_resumed(&self, before: OnErrorStatus) -> bool {
        let since = Instant::now();
        let is_held = || {
            let now = self.handle.status();
            now.held > 0 && now.stops == before.stops
        };
        while is_held() && since.elapsed() < RESUME_TIMEOUT {
            std::thread::sleep(Duration::from_millis(2));
        }
        before.held > 0
    }
}

/// Changes the error policy of a volume.
pub fn apply(change: &ErrorChange, handle: &OnErrorHandle) {
    let now = handle.get();
    handle.set(OnError {
        read: change
            .on_read_error
            .map_or(now.read, |action| OnReadError::from(action).into()),
        write: change
            .on_write_error
            .map_or(now.write, |action| OnWriteError::from(action).into()),
    });
}

impl OnErrorRegistry {
    /// Registers the error policy of a volume.
    pub fn enter(&self, name: &str, volume: &Arc<dyn Volume>) {
        if let Some(handle) = volume.on_error() {
            self.lock().push(Entry {
                name: name.to_owned(),
                handle,
                volume: Arc::downgrade(volume),
            });
        }
    }

    /// Locks the list, and removes the entries of closed volumes.
    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        let mut list = self.0.lock().unpoisoned();
        list.retain(|entry| entry.volume.strong_count() > 0);
        list
    }

    /// Returns the volumes with a changed policy or with errors.
    pub fn list(&self, described: &DiskDescriptions) -> Vec<VolumeErrors> {
        let list = self.lock();
        let all = list.iter().map(|entry| entry.shown(described));
        all.filter(|one| !one.is_plain()).collect()
    }

    /// Changes policies, and returns those of the selected volumes. `volumes` are those of the disk
    /// that the change names, if it names one. `record` is called with the selected volumes before
    /// a policy changes.
    ///
    /// # Errors
    /// No volume is selected, or the error of `record`; nothing is changed then.
    pub fn change(
        &self,
        change: &ErrorChange,
        volumes: Option<&DiskVolumes>,
        described: &DiskDescriptions,
        record: impl FnOnce(&[VolumeRef]) -> Result<(), Error>,
    ) -> Result<Vec<VolumeErrors>, Error> {
        change.check().map_err(Error::invalid)?;
        let list = self.lock().clone();
        let mut meant: Vec<&Entry> = list.iter().collect();
        meant.sort_by(|one, other| one.name.cmp(&other.name));
        if let Some(volumes) = volumes {
            meant.retain(|entry| volumes.has(change.nsid, &entry.name, &entry.volume));
        }
        if let Some(volume) = &change.volume {
            meant.retain(|entry| entry.name == *volume);
        }
        if meant.is_empty() && (change.names_one() || !change.is_question()) {
            let named = change.volume.as_ref().or(change.disk.as_ref());
            let named = named.map_or("", |name| name);
            return Err(Error::not_found(format!(
                "\"{named}\" has no volume that is open"
            )));
        }
        if !change.is_question() {
            if change.on_read_error.is_some() || change.on_write_error.is_some() {
                let refs = meant.iter().map(|entry| entry.reference());
                record(&refs.collect::<Vec<_>>())?;
            }
            let before = meant.iter().map(|entry| entry.handle.status());
            let before: Vec<_> = before.collect();
            meant.iter().for_each(|entry| entry.apply(change));
            if change.resume {
                let resumed = meant.iter().zip(before);
                let resumed = resumed.filter(|(entry, before)| entry.wait_resumed(*before));
                if resumed.count() > 0 {
                    // The answer shows a volume that has stopped again.
                    std::thread::sleep(FAILS_AGAIN);
                }
            }
        }
        Ok(meant.iter().map(|entry| entry.shown(described)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::{ErrorKind, api};
    use volume::{MemVolume, OnErrorVolume};

    fn open(registry: &OnErrorRegistry, name: &str) -> Arc<dyn Volume> {
        let memory = Arc::new(MemVolume::new(4096).unwrap());
        let volume = OnErrorVolume::new(memory, OnError::default(), name);
        let volume: Arc<dyn Volume> = Arc::new(volume);
        registry.enter(name, &volume);
        volume
    }

    #[test]
    fn error_policy_changes_selected_volumes_only() {
        let (registry, described) = (OnErrorRegistry::default(), DiskDescriptions::default());
        let change = |change: ErrorChange, volumes: Option<&DiskVolumes>| {
            registry.change(&change, volumes, &described, |_| Ok(()))
        };
        let (a, b) = ("a.raw".to_owned(), "b.raw".to_owned());
        let (_a, gone) = (open(&registry, &a), open(&registry, &b));
        let volumes = DiskVolumes::new(vec![(1, Arc::downgrade(&_a))]);
        assert_eq!(change(ErrorChange::default(), None).unwrap().len(), 2);
        assert!(registry.list(&described).is_empty(), "nothing to tell");
        drop(gone);
        let of = |disk: &str, on_write_error| ErrorChange {
            disk: Some(disk.into()),
            on_write_error: Some(on_write_error),
            ..ErrorChange::default()
        };
        let stop = of("vm0", api::ErrorAction::EnospcStop);
        let told = change(stop.clone(), Some(&volumes)).unwrap();
        assert_eq!(told[0].on_write_error, api::ErrorAction::EnospcStop);
        assert_eq!(told[0].on_read_error, api::ErrorAction::Report);
        assert_eq!(registry.list(&described).len(), 1);
        let error = change(stop, Some(&DiskVolumes::new(Vec::new()))).unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotFound, "{error}");
        let nobody = ErrorChange {
            resume: true,
            ..ErrorChange::default()
        };
        let error = change(nobody, None).unwrap_err();
        assert!(error.message.contains("--all"), "{error}");
        let read = ErrorChange {
            volume: Some(a),
            on_read_error: Some(api::ErrorAction::EnospcStop),
            ..ErrorChange::default()
        };
        let error = change(read, None).unwrap_err();
        assert!(error.message.contains("for writes only"), "{error}");
    }
}
