//! Limits, weights and error policies that were changed at run time. The keeper's record has them
//! for the next process ([`crate::keep`]), and a saved configuration has them as options.

use config::error_policy::{OnReadError, OnWriteError};
use config::options::Url;
use config::spec::NamespaceSpec;
use control::api::{ErrorChange, LimitChange};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use volume::{Extras, Volume};

/// Settings of one volume that were changed since it was configured, as absolute values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    #[serde(default)]
    limits: LimitChange,
    #[serde(default)]
    on_error: ErrorChange,
}

/// Changed settings of the volumes of one disk, by NSID.
pub type DiskSettings = BTreeMap<u32, Setting>;
/// Changed settings of all disks, by disk name.
pub type AllSettings = BTreeMap<String, DiskSettings>;

/// Changed settings of all volumes of the process. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Settings(Arc<Mutex<AllSettings>>);

impl Setting {
    /// Merges a later change of limits or weight into the settings.
    pub fn add_limits(&mut self, change: &LimitChange) {
        let now = &mut self.limits;
        let pairs = [
            (&mut now.iops, change.iops),
            (&mut now.read_iops, change.read_iops),
            (&mut now.write_iops, change.write_iops),
            (&mut now.bps, change.bps),
            (&mut now.read_bps, change.read_bps),
            (&mut now.write_bps, change.write_bps),
            (&mut now.burst_us, change.burst_us),
        ];
        for (value, changed) in pairs {
            *value = changed.or(*value);
        }
        now.weight = change.weight.or(now.weight);
    }

    /// Merges a later change of the error policy into the settings.
    pub fn add_on_error(&mut self, change: &ErrorChange) {
        let now = &mut self.on_error;
        now.on_read_error = change.on_read_error.or(now.on_read_error);
        now.on_write_error = change.on_write_error.or(now.on_write_error);
    }

    /// Applies the settings to a volume that was opened as it is configured.
    pub fn apply(&self, volume: &dyn Volume) {
        if let Some(limits) = volume.limits()
            && self.limits.wants_limits()
        {
            crate::registry::limits::apply_limits(&self.limits, &limits);
        }
        if let (Some(weight), Some(share)) = (self.limits.weight, volume.share()) {
            share.set_weight(weight);
        }
        if let Some(handle) = volume.on_error() {
            crate::registry::on_error::apply(&self.on_error, &handle);
        }
    }

    /// Writes the settings into the configuration of a namespace.
    pub fn write(&self, namespace: &mut NamespaceSpec) {
        let ErrorChange {
            on_read_error,
            on_write_error,
            ..
        } = self.on_error;
        let read = on_read_error.map(OnReadError::from);
        namespace.on_read_error = read.or(namespace.on_read_error);
        let write = on_write_error.map(OnWriteError::from);
        namespace.on_write_error = write.or(namespace.on_write_error);
        if let Some(url) = with_limits(&namespace.volume, &self.limits) {
            namespace.volume = Url(url);
        }
    }
}

/// Options of URLs that can be changed while the volume is open.
const OPTIONS: [&str; 8] = [
    "iops",
    "read-iops",
    "write-iops",
    "bps",
    "read-bps",
    "write-bps",
    "burst",
    "weight",
];

/// Returns the options of a URL's query, without those of these keys.
fn without<'a>(query: &'a str, keys: &[&str]) -> Vec<&'a str> {
    let is_kept = |pair: &&str| {
        let key = pair.split_once('=').map_or(*pair, |(key, _)| key);
        !pair.is_empty() && !keys.contains(&key)
    };
    query.split('&').filter(is_kept).collect()
}

/// Returns a namespace without its limits, its weight and its error policy.
pub fn bare(namespace: &NamespaceSpec) -> NamespaceSpec {
    let url = &*namespace.volume;
    let volume = url.rsplit_once('?').and_then(|(name, query)| {
        let (_, extras) = Extras::split(url).ok()?;
        extras.is_limited().then(|| {
            let rest = without(query, &OPTIONS).join("&");
            if rest.is_empty() {
                name.to_owned()
            } else {
                format!("{name}?{rest}")
            }
        })
    });
    NamespaceSpec {
        volume: Url(volume.unwrap_or_else(|| url.to_owned())),
        on_read_error: None,
        on_write_error: None,
        ..namespace.clone()
    }
}

/// Applies the limits, the weight and the error policy of a changed configuration to its open
/// volume. A weight that is gone becomes the default weight until the volume is opened again.
pub fn reconfigure(namespace: &NamespaceSpec, volume: &dyn Volume) {
    let split = Extras::split(&namespace.volume);
    let extras = split.map_or_else(|_| Extras::default(), |(_, extras)| extras);
    if let Some(handle) = volume.limits() {
        handle.set(extras.limits().unwrap_or_default());
    }
    if let Some(share) = volume.share()
        && (extras.weight().is_some() || share.is_weighted())
    {
        share.set_weight(extras.weight().unwrap_or(volume::DEFAULT_WEIGHT));
    }
    if let Some(handle) = volume.on_error() {
        handle.set(namespace.on_error());
    }
}

/// Returns a volume's URL with other limits. `None` when nothing changes. No limit (0) is left out
/// unless the URL has the option.
fn with_limits(url: &str, change: &LimitChange) -> Option<String> {
    if *change == LimitChange::default() {
        return None;
    }
    Extras::split(url).ok()?;
    let (name, query) = url.rsplit_once('?').unwrap_or((url, ""));
    let has = |key: &str| {
        let mut pairs = query.split('&');
        pairs.any(|pair| pair.split_once('=').is_some_and(|(own, _)| own == key))
    };
    let number = |value: Option<u64>| value.map(|value| value.to_string());
    let values = [
        number(change.iops),
        number(change.read_iops),
        number(change.write_iops),
        number(change.bps),
        number(change.read_bps),
        number(change.write_bps),
        change.burst_us.map(|us| format!("{us}us")),
        number(change.weight.map(u64::from)),
    ];
    let changed = OPTIONS.into_iter().zip(values);
    let changed = changed.filter_map(|(key, value)| Some((key, value?)));
    let changed = changed.filter(|(key, value)| value != "0" || has(key));
    let changed: Vec<(&str, String)> = changed.collect();
    let keys: Vec<&str> = changed.iter().map(|(key, _)| *key).collect();
    let kept = without(query, &keys).into_iter().map(str::to_owned);
    let new = changed.iter().map(|(key, value)| format!("{key}={value}"));
    let all: Vec<String> = kept.chain(new).collect();
    Some(if all.is_empty() {
        url.to_owned()
    } else {
        format!("{name}?{}", all.join("&"))
    })
}

impl Settings {
    /// Returns the changed settings of all disks.
    pub fn all(&self) -> AllSettings {
        self.0.lock().unpoisoned().clone()
    }

    /// Replaces the changed settings of all disks.
    pub fn set(&self, settings: AllSettings) {
        *self.0.lock().unpoisoned() = settings;
    }

    /// Returns the changed settings of the volumes of a disk, by NSID.
    pub fn of(&self, disk: &str) -> DiskSettings {
        let all = self.0.lock().unpoisoned();
        all.get(disk).cloned().unwrap_or_default()
    }

    /// Applies the settings of a namespace of this disk to its volume, which was just opened.
    pub fn apply(&self, disk: &str, nsid: u32, volume: &dyn Volume) {
        if let Some(setting) = self.of(disk).get(&nsid) {
            setting.apply(volume);
        }
    }

    /// Replaces the settings of a disk.
    pub fn put(&self, disk: &str, settings: DiskSettings) {
        let mut all = self.0.lock().unpoisoned();
        if settings.is_empty() {
            all.remove(disk);
        } else {
            all.insert(disk.to_owned(), settings);
        }
    }

    /// Keeps only those settings of a disk that `is_kept` accepts, by NSID.
    pub fn retain(&self, disk: &str, is_kept: impl Fn(u32) -> bool) {
        let mut all = self.0.lock().unpoisoned();
        if let Some(settings) = all.get_mut(disk) {
            settings.retain(|nsid, _| is_kept(*nsid));
            if settings.is_empty() {
                all.remove(disk);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::api::ErrorAction;

    fn change() -> LimitChange {
        LimitChange {
            iops: Some(7),
            write_bps: Some(0),
            burst_us: Some(1500),
            weight: Some(3),
            ..LimitChange::default()
        }
    }

    #[test]
    fn url_with_changed_limits_is_opened_with_them() {
        let url = "mem://1M?iops=100&read-iops=9&weight=8";
        let changed = with_limits(url, &change()).unwrap();
        assert_eq!(changed, "mem://1M?read-iops=9&iops=7&burst=1500us&weight=3");
        // An option of the kind of volume stays where it is.
        let socket = "nbd+unix:///?socket=/run/a&iops=0";
        let changed = with_limits(socket, &change()).unwrap();
        assert!(changed.starts_with("nbd+unix:///?socket=/run/a&iops=7&"));
        // A volume without limits gets those that are not 0.
        let changed = with_limits("a.raw", &change()).unwrap();
        assert_eq!(changed, "a.raw?iops=7&burst=1500us&weight=3");
        assert_eq!(with_limits(url, &LimitChange::default()), None);
    }

    #[test]
    fn later_changes_count_and_the_rest_stays() {
        let mut setting = Setting::default();
        setting.add_limits(&change());
        setting.add_limits(&LimitChange {
            iops: Some(9),
            ..LimitChange::default()
        });
        setting.add_on_error(&ErrorChange {
            on_write_error: Some(ErrorAction::EnospcStop),
            ..ErrorChange::default()
        });
        let volume = volume::open_url("null://1M?iops=5&read-iops=4", Default::default()).unwrap();
        setting.apply(&*volume);
        let limits = volume.limits().unwrap().get();
        assert_eq!((limits.iops.total, limits.iops.read), (9, 4));
        let mut namespace = NamespaceSpec {
            volume: Url("null://1M?iops=5&read-iops=4".into()),
            ..NamespaceSpec::default()
        };
        setting.write(&mut namespace);
        assert_eq!(namespace.on_write_error, Some(OnWriteError::EnospcStop));
        assert_eq!(namespace.on_read_error, None);
        assert!(namespace.volume.contains("read-iops=4&iops=9"));
    }
}
