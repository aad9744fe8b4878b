//! Limits and weights of volumes as the control API shows and changes them.

use crate::manage::{DiskVolumes, VolumeRef};
use control::Error;
use control::api::{LimitChange, VolumeLimits};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;
use sync::Unpoisoned;
use volume::{IoLimits, LimitHandle, MAX_WEIGHT, ShareHandle, Volume};

/// Limits and weights of all volumes, under the names that the user gave the volumes.
#[derive(Clone, Default)]
pub struct LimitRegistry(Arc<Mutex<Vec<LimitEntry>>>);

/// Limits and share of one volume.
#[derive(Clone)]
struct LimitEntry {
    name: String,
    limits: Option<LimitHandle>,
    share: Option<ShareHandle>,
    /// Volume of the entry. The entry is removed when the volume is closed.
    volume: Weak<dyn Volume>,
}

impl LimitEntry {
    /// Returns the reason why a change cannot be applied to the volume; `None` if it can.
    fn obstacle(&self, change: &LimitChange) -> Option<String> {
        let name = &self.name;
        if change.wants_limits() && self.limits.is_none() {
            return Some(format!("{name} cannot have limits"));
        }
        if change.weight.is_some() && self.share.is_none() {
            return Some(format!(
                "{name} cannot have a weight: no other disk can have a share of this volume"
            ));
        }
        None
    }

    /// Returns whether the volume has, and has had, neither limits nor a weight.
    fn is_plain(&self) -> bool {
        let limits = self.limits.as_ref();
        let share = self.share.as_ref();
        !limits.is_some_and(LimitHandle::is_configured)
            && !share.is_some_and(ShareHandle::is_weighted)
    }

    fn reference(&self) -> VolumeRef {
        VolumeRef {
            name: self.name.clone(),
            volume: self.volume.clone(),
        }
    }

    fn apply(&self, change: &LimitChange) {
        if let (Some(weight), Some(share)) = (change.weight, &self.share) {
            share.set_weight(weight);
        }
        if let Some(limits) = &self.limits
            && change.wants_limits()
        {
            apply_limits(change, limits);
        }
    }

    fn shown(&self) -> VolumeLimits {
        let share = self.share.as_ref();
        let share = share.filter(|share| share.is_weighted());
        let limits = self.limits.as_ref();
        let limits = limits.filter(|limits| limits.is_configured() || share.is_none());
        let none = IoLimits {
            burst: Duration::ZERO,
            ..IoLimits::default()
        };
        let IoLimits { iops, bps, burst } = limits.map_or(none, LimitHandle::get);
        VolumeLimits {
            volume: self.name.clone(),
            iops: iops.total,
            read_iops: iops.read,
            write_iops: iops.write,
            bps: bps.total,
            read_bps: bps.read,
            write_bps: bps.write,
            burst_us: u64::try_from(burst.as_micros()).unwrap_or(u64::MAX),
            delayed: limits.map_or(0, LimitHandle::delayed),
            throttled_us: limits.map_or(0, |limits| {
                u64::try_from(limits.throttled().as_micros()).unwrap_or(u64::MAX)
            }),
            weight: share.map(ShareHandle::weight),
            share_depth: share.map(ShareHandle::depth),
            ..VolumeLimits::default()
        }
    }
}

/// Changes a volume's limits.
pub fn apply_limits(change: &LimitChange, handle: &LimitHandle) {
    let IoLimits {
        mut iops,
        mut bps,
        burst,
    } = handle.get();
    let fields = [
        (&mut iops.total, change.iops),
        (&mut iops.read, change.read_iops),
        (&mut iops.write, change.write_iops),
        (&mut bps.total, change.bps),
        (&mut bps.read, change.read_bps),
        (&mut bps.write, change.write_bps),
    ];
    for (field, wanted) in fields {
        *field = wanted.unwrap_or(*field);
    }
    let burst = change.burst_us.map_or(burst, Duration::from_micros);
    handle.set(IoLimits { iops, bps, burst });
}

/// Checks the values of a change, which other clients than this program may send.
fn check(change: &LimitChange) -> Result<(), Error> {
    change.check().map_err(Error::invalid)?;
    match change.weight {
        Some(weight) if !(1..=MAX_WEIGHT).contains(&weight) => Err(Error::invalid(format!(
            "a weight is 1 to {MAX_WEIGHT}, not {weight}"
        ))),
        _ => Ok(()),
    }
}

impl LimitRegistry {
    /// Registers a volume with its I/O limits and weight under a name.
    pub fn enter(&self, name: &str, volume: &Arc<dyn Volume>) {
        let entry = LimitEntry {
            name: name.to_owned(),
            limits: volume.limits(),
            share: volume.share(),
            volume: Arc::downgrade(volume),
        };
        self.lock().push(entry);
    }

    /// Locks the list, and removes the entries of closed volumes.
    fn lock(&self) -> MutexGuard<'_, Vec<LimitEntry>> {
        let mut list = self.0.lock().unpoisoned();
        list.retain(|entry| entry.volume.strong_count() > 0);
        list
    }

    /// Returns the volumes that have limits or a weight, or have had any.
    pub fn list(&self) -> Vec<VolumeLimits> {
        let list = self.lock();
        let all = list.iter().filter(|entry| !entry.is_plain());
        all.map(LimitEntry::shown).collect()
    }

    /// Changes limits and weights, and returns those of the selected volumes. `volumes` are those
    /// of the disk that the change names, if it names one. `record` is called with the selected
    /// volumes before anything changes.
    ///
    /// # Errors
    /// No volume is selected, or a selected volume cannot have these limits, or the error of
    /// `record`; nothing is changed then.
    pub fn change(
        &self,
        change: &LimitChange,
        volumes: Option<&DiskVolumes>,
        record: impl FnOnce(&[VolumeRef]) -> Result<(), Error>,
    ) -> Result<Vec<VolumeLimits>, Error> {
        check(change)?;
        let list = self.lock().clone();
        let mut meant: Vec<&LimitEntry> = list.iter().collect();
        meant.sort_by(|one, other| one.name.cmp(&other.name));
        if let Some(volumes) = volumes {
            meant.retain(|entry| volumes.has(change.nsid, &entry.name, &entry.volume));
        }
        if let Some(volume) = &change.volume {
            meant.retain(|entry| entry.name == *volume);
        }
        if change.is_question() && !change.names_one() {
            meant.retain(|entry| !entry.is_plain());
            return Ok(meant.into_iter().map(LimitEntry::shown).collect());
        }
        if !change.names_one() {
            // All that can be changed that way.
            meant.retain(|entry| entry.obstacle(change).is_none());
        } else if let Some(why) = meant.iter().find_map(|entry| entry.obstacle(change)) {
            return Err(Error::conflict(why));
        }
        if meant.is_empty() {
            return Err(Error::not_found(nothing_meant(change, &list)));
        }
        if !change.is_question() {
            let refs = meant.iter().map(|entry| entry.reference());
            record(&refs.collect::<Vec<_>>())?;
            meant.iter().for_each(|entry| entry.apply(change));
        }
        Ok(meant.into_iter().map(LimitEntry::shown).collect())
    }
}

/// Returns the error message for a change that selects no volume.
fn nothing_meant(change: &LimitChange, list: &[LimitEntry]) -> String {
    if change.names_one() {
        let mut names: Vec<&str> = list.iter().map(|entry| entry.name.as_str()).collect();
        names.sort_unstable();
        let named = change.volume.as_ref().or(change.disk.as_ref());
        return format!(
            "\"{}\" has no volume that is open; open volumes: {}",
            named.map_or("", |name| name),
            if names.is_empty() {
                "none".to_owned()
            } else {
                names.join(", ")
            }
        );
    }
    (if list.is_empty() {
        "no volume is open"
    } else {
        "no volume can have a weight: no other disk can have a share of any of them"
    })
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::ErrorKind;
    use std::sync::Arc;
    use volume::open_url;

    fn open(registry: &LimitRegistry, url: &str) -> Arc<dyn Volume> {
        let volume = open_url(url, Default::default()).unwrap();
        registry.enter(url, &volume);
        volume
    }

    fn no_record(_: &[VolumeRef]) -> Result<(), Error> {
        Ok(())
    }

    fn iops(volume: &str, iops: u64) -> LimitChange {
        LimitChange {
            volume: (!volume.is_empty()).then(|| volume.into()),
            all: volume.is_empty(),
            iops: Some(iops),
            ..LimitChange::default()
        }
    }

    #[test]
    fn limits_find_volume_by_name_or_disk() {
        let registry = LimitRegistry::default();
        let list = || {
            registry
                .change(&LimitChange::default(), None, no_record)
                .unwrap()
        };
        assert!(list().is_empty());
        let error = registry.change(&iops("", 1), None, no_record).unwrap_err();
        assert!(error.message.contains("no volume is open"), "{error}");
        let (first, second) = ("null://2M?bps=1M&burst=1s", "null://1M?iops=0");
        let _first = open(&registry, first);
        let gone = open(&registry, second);
        drop(gone);
        assert_eq!(list().len(), 1, "it has gone");
        let _second = open(&registry, second);
        assert_eq!(
            registry.change(&iops(second, 7), None, no_record).unwrap()[0].iops,
            7
        );
        let told = &registry.change(&iops(first, 9), None, no_record).unwrap()[0];
        assert_eq!(
            (told.iops, told.bps, told.burst_us),
            (9, 1 << 20, 1_000_000)
        );
        // A part of a name is none.
        for part in ["1M", "null://1M", "2M?bps=1M&burst=1s", "?"] {
            let error = registry
                .change(&iops(part, 1), None, no_record)
                .unwrap_err();
            assert_eq!(error.kind, ErrorKind::NotFound, "{part}: {error}");
            assert!(error.message.contains(second), "{error}");
        }
        let of_disk = LimitChange {
            disk: Some("vm0".into()),
            all: false,
            ..iops("", 4)
        };
        let volumes = DiskVolumes::new(vec![(1, Arc::downgrade(&_first))]);
        let told = registry
            .change(&of_disk, Some(&volumes), no_record)
            .unwrap();
        assert_eq!((told.len(), told[0].iops), (1, 4));
        let error = registry
            .change(&of_disk, Some(&DiskVolumes::new(Vec::new())), no_record)
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotFound, "{error}");
        // Sorted.
        let all: Vec<_> = list().into_iter().map(|l| (l.volume, l.iops)).collect();
        assert_eq!(all, [(second.to_owned(), 7), (first.to_owned(), 4)]);
        registry.change(&iops("", 3), None, no_record).unwrap();
        assert!(list().iter().all(|limits| limits.iops == 3));
    }

    #[test]
    fn limit_change_needs_volume_or_all() {
        let registry = LimitRegistry::default();
        let _volume = open(&registry, "null://1M?iops=5");
        let change = LimitChange {
            iops: Some(1),
            ..LimitChange::default()
        };
        // Also from a client that is not this program.
        let error = registry.change(&change, None, no_record).unwrap_err();
        assert!(error.message.contains("--all"), "{error}");
        assert_eq!(registry.list()[0].iops, 5);
        let both = LimitChange {
            all: true,
            ..iops("null://1M?iops=5", 1)
        };
        assert!(registry.change(&both, None, no_record).is_err());
        assert_eq!(registry.list()[0].iops, 5);
        assert_eq!(
            registry.change(&iops("", 1), None, no_record).unwrap()[0].iops,
            1
        );
    }

    #[test]
    fn weight_changes_where_volume_can_be_shared() {
        let registry = LimitRegistry::default();
        let weight = |volume: Option<&str>, weight| {
            let change = LimitChange {
                volume: volume.map(Into::into),
                all: volume.is_none(),
                weight: Some(weight),
                ..LimitChange::default()
            };
            registry.change(&change, None, no_record)
        };
        let error = weight(None, 5).unwrap_err();
        assert!(error.message.contains("no volume is open"), "{error}");
        let (with, without) = ("null://1G?name=limits-test&weight=7", "null://2G?iops=9");
        let shared = open(&registry, with);
        let _limited = open(&registry, without);
        let error = weight(Some(without), 5).unwrap_err();
        assert!(error.message.contains("cannot have a weight"), "{error}");
        for wrong in [0, MAX_WEIGHT + 1, u32::MAX] {
            let error = weight(Some(with), wrong).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid, "{wrong}: {error}");
        }
        let told = weight(Some(with), 5).unwrap();
        assert_eq!((told.len(), told[0].weight), (1, Some(5)));
        assert_eq!(shared.share().unwrap().weight(), 5);
        assert_eq!(
            weight(None, 6).unwrap().len(),
            1,
            "only those that have one"
        );
        assert_eq!(registry.list().len(), 2);
        // A volume with neither is not listed until it gets one.
        let plain = "null://1G?name=limits-test-plain";
        let _plain = open(&registry, plain);
        assert_eq!(registry.list().len(), 2);
        let told = registry.change(&iops(plain, 1), None, no_record).unwrap();
        assert_eq!((told[0].iops, told[0].weight), (1, None));
        let told = weight(Some(plain), 3).unwrap();
        assert_eq!((told[0].iops, told[0].weight), (1, Some(3)));
        assert_eq!(registry.list().len(), 3);
    }
}
