//! Limits, weights and error policies of the served disks: changed at run time, recorded before the
//! change takes effect, and written into a configuration that is saved.

use super::Manager;
use super::table::{DiskRecord, Next};
use crate::registry::settings::{DiskSettings, Setting, bare};
use config::disk::DiskSpec;
use config::spec::NamespaceSpec;
use config::volumes::is_within;
use control::Error;
use control::api::{ErrorChange, LimitChange, VolumeErrors, VolumeLimits};
use controller::NamespacePool;
use std::sync::{Arc, Weak};
use sync::Unpoisoned;
use volume::{Extras, Volume};
use worker::Frontend;

/// Volume that a change of settings selects.
pub struct VolumeRef {
    /// Path or URL of the volume, as the user gave it.
    pub name: String,
    pub volume: Weak<dyn Volume>,
}

/// Open volumes of a disk, by NSID.
pub struct DiskVolumes {
    open: Vec<(u32, Weak<dyn Volume>)>,
    /// NSIDs and names of volumes that only their worker has open.
    of_workers: Vec<(u32, String)>,
}

impl DiskVolumes {
    /// Returns the namespaces of the disk that show this volume.
    fn nsids_of(&self, name: &str, volume: &Weak<dyn Volume>) -> Vec<u32> {
        let open = self.open.iter().filter(|(_, own)| own.ptr_eq(volume));
        let named = self.of_workers.iter().filter(|(_, own)| own == name);
        let open = open.map(|(nsid, _)| *nsid);
        open.chain(named.map(|(nsid, _)| *nsid)).collect()
    }

    /// Returns whether the volume is the one of namespace `nsid`, or of any without a number.
    pub fn has(&self, nsid: Option<u32>, name: &str, volume: &Weak<dyn Volume>) -> bool {
        let nsids = self.nsids_of(name, volume);
        nsid.map_or(!nsids.is_empty(), |nsid| nsids.contains(&nsid))
    }

    /// Returns the open volume of this namespace.
    fn get(&self, nsid: u32) -> Option<Arc<dyn Volume>> {
        let mut open = self.open.iter();
        open.find(|(own, _)| *own == nsid)?.1.upgrade()
    }

    #[cfg(test)]
    pub fn new(open: Vec<(u32, Weak<dyn Volume>)>) -> Self {
        let of_workers = Vec::new();
        Self { open, of_workers }
    }
}

impl Manager {
    fn volumes_of(&self, name: &str, entry: &DiskRecord) -> DiskVolumes {
        let mut open = entry
            .running
            .as_ref()
            .map_or_else(Vec::new, |running| running.volumes.clone());
        if let Some(pool) = self.worker_context.opener.pools.of(name) {
            let pooled = pool.namespaces().into_iter();
            let pooled = pooled.filter_map(|ns| Some((ns.nsid, Arc::downgrade(&ns.volume?))));
            open.extend(pooled);
        }
        let of_workers = entry.spec.numbered();
        let of_workers = of_workers.map(|(nsid, namespace)| (nsid, namespace.volume.to_string()));
        DiskVolumes {
            open,
            of_workers: of_workers.filter(|(_, url)| is_within(url)).collect(),
        }
    }

    /// Changes limits and weights.
    ///
    /// # Errors
    /// See [`control::Daemon::limits`].
    pub fn limits(&self, change: &LimitChange) -> Result<Vec<VolumeLimits>, Error> {
        let volumes = self.meant(change.disk.as_deref())?;
        let limits = &self.registry().limits;
        let _one = self.setting.lock().unpoisoned();
        let changed = limits.change(change, volumes.as_ref(), |meant| {
            self.record_settings(meant, |setting| setting.add_limits(change))
        })?;
        if !change.is_question() {
            self.settings_changed();
        }
        Ok(changed)
    }

    /// Changes error policies.
    ///
    /// # Errors
    /// See [`control::Daemon::on_error`].
    pub fn on_error(&self, change: &ErrorChange) -> Result<Vec<VolumeErrors>, Error> {
        let volumes = self.meant(change.disk.as_deref())?;
        let registry = self.registry();
        let _one = self.setting.lock().unpoisoned();
        let (on_error, described) = (&registry.on_error, &registry.described);
        let changed = on_error.change(change, volumes.as_ref(), described, |meant| {
            self.record_settings(meant, |setting| setting.add_on_error(change))
        })?;
        if !change.is_question() {
            registry.paths.keep_settings();
        }
        Ok(changed)
    }

    /// Returns the volumes of the disk that a change names; `None` if it names no disk.
    fn meant(&self, disk: Option<&str>) -> Result<Option<DiskVolumes>, Error> {
        let Some(name) = disk else {
            return Ok(None);
        };
        self.wait_started()?;
        let entry = self.worker_context.table.get(name)?;
        Ok(Some(self.volumes_of(name, &entry)))
    }

    /// Records changed settings of volumes: all disks that show one of them have it.
    fn record_settings(
        &self,
        meant: &[VolumeRef],
        change: impl Fn(&mut Setting),
    ) -> Result<(), Error> {
        let settings = &self.registry().settings;
        let before = settings.all();
        let mut now = before.clone();
        for (name, entry) in self.worker_context.table.served() {
            let volumes = self.volumes_of(&name, &entry);
            for VolumeRef { name: url, volume } in meant {
                for nsid in volumes.nsids_of(url, volume) {
                    change(
                        now.entry(name.clone())
                            .or_default()
                            .entry(nsid)
                            .or_default(),
                    );
                }
            }
        }
        settings.set(now);
        self.record().inspect_err(|_| settings.set(before))
    }

    /// Has the queues of all volumes take over settings that were changed, and namespaces leave
    /// the direct path that their settings do not allow.
    fn settings_changed(&self) {
        self.registry().paths.keep_settings();
        for handle in self.worker_context.peers.handles() {
            handle.post(|worker| {
                worker
                    .fronts()
                    .for_each(|(_, front)| front.update_volumes());
            });
        }
    }

    /// Returns the disk with its present settings, as a configuration describes it.
    pub(super) fn with_settings(&self, spec: &DiskSpec) -> DiskSpec {
        let settings = self.registry().settings.of(&spec.name());
        let mut spec = spec.clone();
        for (nsid, namespace) in spec.numbered_mut() {
            if let Some(setting) = settings.get(&nsid) {
                setting.write(namespace);
            }
        }
        spec
    }

    /// Returns whether one configuration of a served disk becomes the other by its limits, weights
    /// and error policies alone.
    ///
    /// # Errors
    /// A volume cannot have the weight.
    pub(super) fn differs_in_settings(
        &self,
        entry: &DiskRecord,
        wanted: &DiskSpec,
    ) -> Result<bool, Error> {
        if bare_disk(&entry.spec) != bare_disk(wanted) {
            return Ok(false);
        }
        let volumes = self.volumes_of(&entry.spec.name(), entry);
        for (nsid, namespace) in changed(&entry.spec, wanted) {
            let Some(volume) = volumes.get(nsid) else {
                return Ok(false);
            };
            let split = Extras::split(&namespace.volume);
            let wants_weight = split.is_ok_and(|(_, extras)| extras.weight().is_some());
            if wants_weight && volume.share().is_none() {
                return Err(Error::conflict(format!(
                    "{} cannot have a weight: no other disk can have a share of this volume",
                    namespace.volume
                )));
            }
        }
        Ok(true)
    }

    /// Gives a served disk the limits, weights and error policies of a configuration, which differs
    /// in nothing else. Returns the disk and its settings as they were.
    ///
    /// # Errors
    /// The change cannot be recorded; nothing is changed then.
    pub(super) fn reconfigure(
        &self,
        name: &str,
        wanted: &DiskSpec,
    ) -> Result<(DiskSpec, DiskSettings), Error> {
        let mut taken = self.worker_context.table.take(name, "being changed")?;
        let _one = self.setting.lock().unpoisoned();
        let settings = &self.registry().settings;
        let before = (taken.spec.clone(), settings.of(name));
        let new = changed(&taken.spec, wanted);
        // The configuration has changed after these.
        settings.retain(name, |nsid| new.iter().all(|(own, _)| *own != nsid));
        let next = Next::As(Box::new(wanted.clone()));
        let intent = self.intend(name, next);
        let intent = intent.inspect_err(|_| settings.put(name, before.1.clone()))?;
        let entry = self.worker_context.table.get(name)?;
        let volumes = self.volumes_of(name, &entry);
        for (nsid, namespace) in &new {
            if let Some(volume) = volumes.get(*nsid) {
                crate::registry::settings::reconfigure(namespace, &*volume);
            }
        }
        taken.spec = wanted.clone();
        taken.changed();
        intent.done();
        self.settings_changed();
        Ok(before)
    }

    /// Undoes [`Manager::reconfigure`].
    ///
    /// # Errors
    /// The change cannot be recorded.
    pub(super) fn restore(
        &self,
        name: &str,
        (before, settings): (DiskSpec, DiskSettings),
    ) -> Result<(), Error> {
        self.reconfigure(name, &before)?;
        let entry = self.worker_context.table.get(name)?;
        let volumes = self.volumes_of(name, &entry);
        let _one = self.setting.lock().unpoisoned();
        for (nsid, setting) in &settings {
            if let Some(volume) = volumes.get(*nsid) {
                setting.apply(&*volume);
            }
        }
        self.registry().settings.put(name, settings);
        self.settings_changed();
        self.record()
    }
}

/// Returns a disk without limits, weights and error policies.
fn bare_disk(spec: &DiskSpec) -> DiskSpec {
    let mut spec = spec.clone();
    for (_, namespace) in spec.numbered_mut() {
        *namespace = bare(namespace);
    }
    spec
}

/// Returns the namespaces of `wanted` that differ from those of `now`, with their NSIDs.
fn changed(now: &DiskSpec, wanted: &DiskSpec) -> Vec<(u32, NamespaceSpec)> {
    let before: Vec<_> = now.numbered().collect();
    let wanted = wanted.numbered();
    let changed = wanted.filter(|one| !before.contains(one));
    changed
        .map(|(nsid, namespace)| (nsid, namespace.clone()))
        .collect()
}
