//! Limits and weights of volumes as the control socket and `vnvme limits` show and change them.

use anyhow::Result;
use clap::Args;
use output::{OutputError, outln};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use sync::Unpoisoned;
use volume::{LimitHandle, Limits, MAX_WEIGHT, ShareHandle, Volume, parse_duration, parse_size};

/// The limits and weights of the volumes that have any, under the names that the user gave the
/// volumes.
#[derive(Clone, Default)]
pub struct LimitRegistry(Arc<Mutex<Vec<LimitEntry>>>);

/// One volume's; it has at least one of both.
struct LimitEntry {
    name: String,
    limits: Option<LimitHandle>,
    share: Option<ShareHandle>,
}

/// Limits of one volume; per second, 0: none.
#[derive(Debug, Serialize, Deserialize)]
pub struct VolumeLimits {
    /// Path or URL, as it was given.
    pub volume: String,
    /// Requests.
    pub iops: u64,
    pub read_iops: u64,
    pub write_iops: u64,
    /// Bytes.
    pub bps: u64,
    pub read_bps: u64,
    pub write_bps: u64,
    /// Microseconds whose work may be done at once after a pause.
    pub burst_us: u64,
    /// Requests that had to wait for the limits so far.
    pub delayed: u64,
    /// Weight among the slices of its device; absent where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Requests of those slices in the device while several want it, as found out, and at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_depth: Option<(usize, usize)>,
}

/// What to change; what is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Change {
    /// The volume: its path or URL as vnvme serve was given it, or a part of that which only it has
    /// [default: show all]
    #[arg(value_name = "VOLUME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// Change all volumes that have limits, or a weight
    #[arg(long, conflicts_with = "volume")]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    /// Requests per second; 0: no limit
    #[arg(long, value_parser = parse_size, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Reads per second
    #[arg(long, value_parser = parse_size, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<u64>,
    /// Writes per second
    #[arg(long, value_parser = parse_size, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<u64>,
    /// Bytes per second, like 100M; 0: no limit
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps: Option<u64>,
    /// Bytes read per second
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bps: Option<u64>,
    /// Bytes written per second
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_bps: Option<u64>,
    /// After a pause, as much may be done at once as the limits allow in this time, like 50ms
    #[arg(long = "burst", value_parser = microseconds, value_name = "DURATION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_us: Option<u64>,
    /// Share of the device, 1 to 10000, among its slices that have a weight
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_WEIGHT)), value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

fn microseconds(text: &str) -> Result<u64, &'static str> {
    u64::try_from(parse_duration(text)?.as_micros()).map_err(|_| "the duration is too long")
}

impl Change {
    /// It only asks.
    fn is_question(&self) -> bool {
        let (volume, all) = (self.volume.clone(), self.all);
        *self
            == Self {
                volume,
                all,
                ..Self::default()
            }
    }

    /// A change says of which volume, so that none reaches more guests than was meant.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn check(&self) -> Result<(), String> {
        if self.is_question() || self.all || self.volume.is_some() {
            return Ok(());
        }
        Err("which volume is to change? Name it (vnvme limits PATH shows all), or say --all".into())
    }

    /// It is about limits, not only about the weight.
    fn wants_limits(&self) -> bool {
        !Self {
            weight: None,
            ..self.clone()
        }
        .is_question()
    }

    /// Why it cannot be applied to a volume, if it cannot.
    fn obstacle(&self, entry: &LimitEntry) -> Option<String> {
        if self.wants_limits() && entry.limits.is_none() {
            let name = &entry.name;
            return Some(format!(
                "{name} has no limits; start with iops=0 in its URL to set them later"
            ));
        }
        if self.weight.is_some() && entry.share.is_none() {
            let name = &entry.name;
            return Some(format!(
                "{name} has no weight; start with weight=100 in its URL to change it later"
            ));
        }
        None
    }

    fn apply(&self, entry: &LimitEntry) {
        if let (Some(weight), Some(share)) = (self.weight, &entry.share) {
            share.set_weight(weight);
        }
        if let Some(limits) = &entry.limits
            && self.wants_limits()
        {
            self.apply_limits(limits);
        }
    }

    fn apply_limits(&self, handle: &LimitHandle) {
        let Limits {
            mut iops,
            mut bps,
            burst,
        } = handle.get();
        let fields = [
            (&mut iops.total, self.iops),
            (&mut iops.read, self.read_iops),
            (&mut iops.write, self.write_iops),
            (&mut bps.total, self.bps),
            (&mut bps.read, self.read_bps),
            (&mut bps.write, self.write_bps),
        ];
        for (field, wanted) in fields {
            *field = wanted.unwrap_or(*field);
        }
        let burst = self.burst_us.map_or(burst, Duration::from_micros);
        handle.set(Limits { iops, bps, burst });
    }
}

impl LimitRegistry {
    /// Enters what a volume has of both.
    pub fn enter(&self, name: &str, volume: &dyn Volume) {
        let entry = LimitEntry {
            name: name.to_owned(),
            limits: volume.limits(),
            share: volume.share(),
        };
        if entry.limits.is_some() || entry.share.is_some() {
            self.lock().push(entry);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<LimitEntry>> {
        self.0.lock().unpoisoned()
    }

    /// All there are.
    pub fn list(&self) -> Vec<VolumeLimits> {
        self.lock().iter().map(VolumeLimits::of).collect()
    }

    /// Changes limits and weights, and answers those of the volumes that were meant. The error is a
    /// sentence for the user; nothing was changed then.
    pub fn change(&self, change: &Change) -> Result<Vec<VolumeLimits>, String> {
        change.check()?;
        let list = self.lock();
        let mut meant: Vec<&LimitEntry> = list.iter().collect();
        if let Some(text) = &change.volume {
            meant.retain(|entry| entry.name.contains(text));
            if meant.iter().any(|entry| entry.name == *text) {
                meant.retain(|entry| entry.name == *text);
            }
            let [only] = meant.as_slice() else {
                let names: Vec<&str> = list.iter().map(|entry| entry.name.as_str()).collect();
                return Err(format!(
                    "{} volumes are called \"{text}\"; those with limits or weights are: {}",
                    meant.len(),
                    if names.is_empty() {
                        "none".into()
                    } else {
                        names.join(", ")
                    }
                ));
            };
            if let Some(why) = change.obstacle(only) {
                return Err(why);
            }
        } else if !change.is_question() {
            // All that can be changed that way.
            meant.retain(|entry| change.obstacle(entry).is_none());
        }
        if meant.is_empty() && !change.is_question() {
            return Err(match change.wants_limits() {
                true => "no volume has limits; start with iops=0 in its URL to set them later",
                false => {
                    "no volume has a weight; start with weight=100 in its URL to change it later"
                }
            }
            .into());
        }
        meant.iter().for_each(|entry| change.apply(entry));
        Ok(meant.into_iter().map(VolumeLimits::of).collect())
    }
}

impl VolumeLimits {
    fn of(entry: &LimitEntry) -> Self {
        let limits = entry.limits.as_ref();
        let none = Limits {
            burst: Duration::ZERO,
            ..Limits::default()
        };
        let Limits { iops, bps, burst } = limits.map_or(none, LimitHandle::get);
        Self {
            volume: entry.name.clone(),
            iops: iops.total,
            read_iops: iops.read,
            write_iops: iops.write,
            bps: bps.total,
            read_bps: bps.read,
            write_bps: bps.write,
            burst_us: u64::try_from(burst.as_micros()).unwrap_or(u64::MAX),
            delayed: limits.map_or(0, LimitHandle::delayed),
            weight: entry.share.as_ref().map(ShareHandle::weight),
            share_depth: entry.share.as_ref().map(ShareHandle::depth),
        }
    }

    /// For people.
    pub fn print(&self) -> Result<(), OutputError> {
        let l = self;
        outln!("{}", l.volume);
        let rate = |rate: u64| match rate {
            0 => "-".to_owned(),
            rate => rate.to_string(),
        };
        // What has no burst has no limits that could be changed.
        if l.burst_us > 0 || l.weight.is_none() {
            outln!(
                "  requests/s {:>10}   reads {:>10}   writes {:>10}",
                rate(l.iops),
                rate(l.read_iops),
                rate(l.write_iops)
            );
            outln!(
                "  bytes/s {:>13}   read {:>11}   written {:>8}",
                rate(l.bps),
                rate(l.read_bps),
                rate(l.write_bps)
            );
            outln!(
                "  burst {} us   requests that waited {}",
                l.burst_us,
                l.delayed
            );
        }
        if let (Some(weight), Some((depth, most))) = (l.weight, l.share_depth) {
            outln!("  weight {weight}   requests in the device {depth} of {most} at most");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volume::open_url;

    #[test]
    fn volumes_are_found_by_a_part_of_their_name() {
        let registry = LimitRegistry::default();
        let change = |volume: &str, iops: Option<u64>| {
            registry.change(&Change {
                volume: (!volume.is_empty()).then(|| volume.into()),
                all: volume.is_empty(),
                iops,
                ..Change::default()
            })
        };
        assert!(change("", None).unwrap().is_empty());
        assert!(change("", Some(1)).unwrap_err().contains("iops=0"));
        for name in [
            "null://1M?iops=0",
            "null://2M?bps=1M&burst=1s",
            "null://2M?bps=1M&burst=1s&x",
        ] {
            let volume = open_url(name.trim_end_matches("&x"), Default::default()).unwrap();
            registry.enter(name, &*volume);
        }
        assert_eq!(change("1M?", Some(7)).unwrap()[0].iops, 7);
        let second = &change("null://2M?bps=1M&burst=1s", Some(9)).unwrap()[0];
        assert_eq!(
            (second.iops, second.bps, second.burst_us),
            (9, 1 << 20, 1_000_000)
        );
        assert!(
            change("2M", Some(1))
                .unwrap_err()
                .contains("2 volumes are called \"2M\"")
        );
        assert!(change("3M", Some(1)).unwrap_err().contains("0 volumes"));
        let all: Vec<u64> = change("", None).unwrap().iter().map(|l| l.iops).collect();
        assert_eq!(all, [7, 9, 0]);
        change("", Some(3)).unwrap();
        assert!(change("", None).unwrap().iter().all(|l| l.iops == 3));
    }

    #[test]
    fn a_change_names_a_volume_or_all() {
        let registry = LimitRegistry::default();
        let url = "null://1M?iops=5";
        registry.enter(url, &*open_url(url, Default::default()).unwrap());
        let change = Change {
            iops: Some(1),
            ..Change::default()
        };
        // Also from a client that is not this program.
        let error = registry.change(&change).unwrap_err();
        assert!(error.contains("--all"), "{error}");
        assert_eq!(registry.list()[0].iops, 5);
        let all = Change {
            all: true,
            ..change
        };
        assert_eq!(registry.change(&all).unwrap()[0].iops, 1);
        assert_eq!(registry.change(&Change::default()).unwrap().len(), 1);
    }

    #[test]
    fn weights_are_changed_where_there_are_any() {
        let registry = LimitRegistry::default();
        let open = |url: &str| {
            let volume = open_url(url, Default::default()).unwrap();
            registry.enter(url, &*volume);
            volume
        };
        let weight = |volume: Option<&str>, weight| {
            registry.change(&Change {
                volume: volume.map(Into::into),
                all: volume.is_none(),
                weight: Some(weight),
                ..Change::default()
            })
        };
        assert!(weight(None, 5).unwrap_err().contains("weight=100"));
        let shared = open("null://1G?name=limits-test&weight=7");
        let _limited = open("null://2G?iops=9");
        assert!(weight(Some("2G"), 5).unwrap_err().contains("has no weight"));
        let told = weight(Some("1G"), 5).unwrap();
        assert_eq!((told.len(), told[0].weight), (1, Some(5)));
        assert_eq!(shared.share().unwrap().weight(), 5);
        assert_eq!(
            weight(None, 6).unwrap().len(),
            1,
            "only those that have one"
        );
        let limit = Change {
            volume: Some("1G".into()),
            iops: Some(1),
            ..Change::default()
        };
        assert!(
            registry
                .change(&limit)
                .unwrap_err()
                .contains("has no limits")
        );
        assert_eq!(registry.list().len(), 2);
    }
}
