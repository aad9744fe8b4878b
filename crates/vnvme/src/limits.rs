//! Limits of volumes as the control socket and `vnvme limits` show and change them.

use crate::control;
use anyhow::{Context, Result};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use volume::{LimitHandle, Limits, parse_duration, parse_size};

/// The limits of the volumes that have any, under the names that the user gave the volumes.
#[derive(Clone, Default)]
pub struct LimitRegistry(Arc<Mutex<Vec<(String, LimitHandle)>>>);

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
    /// Requests that had to wait so far.
    pub delayed: u64,
}

/// What to change; what is absent stays as it is.
#[derive(Debug, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Change {
    /// The volume: its path or URL as vnvme serve was given it, or a part of that which only it has [default: all]
    #[arg(value_name = "VOLUME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
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
}

fn microseconds(text: &str) -> Result<u64, &'static str> {
    u64::try_from(parse_duration(text)?.as_micros()).map_err(|_| "the duration is too long")
}

impl Change {
    /// It only asks.
    fn is_question(&self) -> bool {
        let volume = self.volume.clone();
        *self
            == Self {
                volume,
                ..Self::default()
            }
    }

    fn apply(&self, handle: &LimitHandle) {
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
    /// Enters a volume's limits.
    pub fn enter(&self, volume: &str, handle: LimitHandle) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.push((volume.to_owned(), handle));
    }

    /// Changes limits, and answers those of the volumes that were meant. The error is a sentence for the user.
    pub fn change(&self, change: &Change) -> Result<Vec<VolumeLimits>, String> {
        let list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut meant: Vec<_> = list.iter().collect();
        if let Some(text) = &change.volume {
            meant.retain(|(name, _)| name.contains(text));
            if meant.iter().any(|(name, _)| name == text) {
                meant.retain(|(name, _)| name == text);
            }
            let [_] = meant.as_slice() else {
                let names: Vec<&str> = list.iter().map(|(name, _)| name.as_str()).collect();
                return Err(format!(
                    "{} volumes are called \"{text}\"; those with limits are: {}",
                    meant.len(),
                    if names.is_empty() {
                        "none".into()
                    } else {
                        names.join(", ")
                    }
                ));
            };
        }
        if meant.is_empty() && !change.is_question() {
            return Err(
                "no volume has limits; start with iops=0 in its URL to set them later".into(),
            );
        }
        if !change.is_question() {
            meant.iter().for_each(|(_, handle)| change.apply(handle));
        }
        Ok(meant
            .iter()
            .map(|(name, handle)| VolumeLimits::of(name, handle))
            .collect())
    }
}

impl VolumeLimits {
    fn of(volume: &str, handle: &LimitHandle) -> Self {
        let Limits { iops, bps, burst } = handle.get();
        Self {
            volume: volume.to_owned(),
            iops: iops.total,
            read_iops: iops.read,
            write_iops: iops.write,
            bps: bps.total,
            read_bps: bps.read,
            write_bps: bps.write,
            burst_us: u64::try_from(burst.as_micros()).unwrap_or(u64::MAX),
            delayed: handle.delayed(),
        }
    }
}

/// Options of `vnvme limits`.
#[derive(Args)]
pub struct LimitsArgs {
    /// The control socket of a running vnvme serve --control PATH
    #[arg(value_name = "PATH")]
    control: PathBuf,
    #[command(flatten)]
    change: Change,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl LimitsArgs {
    /// Changes what was asked for and prints what there is.
    pub fn run(self) -> Result<()> {
        let list = control::limits(&self.control, &self.change)?;
        if self.json {
            println!("{}", serde_json::to_string_pretty(&list).context("JSON")?);
            return Ok(());
        }
        if list.is_empty() {
            println!("no volume has limits");
        }
        for l in list {
            println!("{}", l.volume);
            let rate = |rate: u64| match rate {
                0 => "-".to_owned(),
                rate => rate.to_string(),
            };
            println!(
                "  requests/s {:>10}   reads {:>10}   writes {:>10}",
                rate(l.iops),
                rate(l.read_iops),
                rate(l.write_iops)
            );
            println!(
                "  bytes/s {:>13}   read {:>11}   written {:>8}",
                rate(l.bps),
                rate(l.read_bps),
                rate(l.write_bps)
            );
            println!(
                "  burst {} us   requests that waited {}",
                l.burst_us, l.delayed
            );
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
            registry.enter(name, volume.limits().unwrap());
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
}
