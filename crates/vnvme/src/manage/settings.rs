//! Limits, weights and error policies of the served disks: changed at run time, recorded before the
//! change takes effect, and written into a configuration that is saved.

use super::table::DiskRecord;
use super::{DiskSpec, Manager};
use crate::open::is_within;
use crate::settings::Setting;
use crate::spec::NamespaceSpec;
use control::Error;
use control::api::{ErrorChange, LimitChange, VolumeErrors, VolumeLimits};
use controller::NamespacePool;
use std::sync::{Arc, Weak};
use sync::Unpoisoned;
use volume::Volume;

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
        let of_workers = match &entry.spec {
            DiskSpec::Controller(spec) => by_nsid(&spec.namespaces),
            DiskSpec::NvmeTcp(spec) => by_nsid(&spec.namespaces),
            DiskSpec::VhostBlk(spec) => vec![(1, spec.volume.to_string())],
            DiskSpec::Ublk(spec) => vec![(1, spec.volume.to_string())],
        };
        DiskVolumes {
            open,
            of_workers: of_workers
                .into_iter()
                .filter(|(_, url)| is_within(url))
                .collect(),
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
        limits.change(change, volumes.as_ref(), |meant| {
            self.record_settings(meant, |setting| setting.add_limits(change))
        })
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
        on_error.change(change, volumes.as_ref(), described, |meant| {
            self.record_settings(meant, |setting| setting.add_on_error(change))
        })
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

    /// Returns the disk with its present settings, as a configuration describes it.
    pub(super) fn with_settings(&self, spec: &DiskSpec) -> DiskSpec {
        let settings = self.registry().settings.of(&spec.name());
        let mut spec = spec.clone();
        let set = |namespaces: &mut Vec<NamespaceSpec>| {
            for (namespace, place) in namespaces.iter_mut().zip(1..) {
                if let Some(setting) = settings.get(&namespace.nsid.unwrap_or(place)) {
                    setting.write(namespace);
                }
            }
        };
        match &mut spec {
            DiskSpec::Controller(spec) => set(&mut spec.namespaces),
            DiskSpec::NvmeTcp(spec) => set(&mut spec.namespaces),
            DiskSpec::VhostBlk(spec) => {
                let mut one = vec![spec.namespace()];
                set(&mut one);
                if let Some(one) = one.pop() {
                    spec.volume = one.volume;
                    spec.on_read_error = one.on_read_error;
                    spec.on_write_error = one.on_write_error;
                }
            }
            DiskSpec::Ublk(spec) => {
                let mut one = vec![spec.namespace()];
                set(&mut one);
                if let Some(one) = one.pop() {
                    spec.volume = one.volume;
                    spec.on_read_error = one.on_read_error;
                    spec.on_write_error = one.on_write_error;
                }
            }
        }
        spec
    }
}

fn by_nsid(namespaces: &[NamespaceSpec]) -> Vec<(u32, String)> {
    let namespaces = namespaces.iter().zip(1..);
    let volumes = namespaces.map(|(ns, place)| (ns.nsid.unwrap_or(place), ns.volume.to_string()));
    volumes.collect()
}
