//! `vnvme limits`.

use super::target::{DaemonTarget, MaybeDisk, parse_nsid};
use anyhow::Result;
use clap::Args;
use config::usage_error::UsageError;
use control::api::{LimitChange, VolumeLimits};
use output::{OutputError, outln};
use std::time::Duration;
use volume::{MAX_WEIGHT, parse_count, parse_duration, parse_number, parse_size};

/// Options of `vnvme limits`.
#[derive(Args)]
pub struct LimitsArgs {
    #[command(flatten)]
    disk: MaybeDisk,
    /// Change only this namespace
    #[arg(long, value_name = "NSID", requires = "name", value_parser = parse_nsid)]
    nsid: Option<u32>,
    /// Volume instead of a disk: its path or URL as it was given
    #[arg(long, value_name = "URL", conflicts_with = "name")]
    volume: Option<String>,
    /// Change all volumes of the process
    #[arg(long, conflicts_with_all = ["name", "volume"])]
    all: bool,
    /// Requests per second; 0 for no limit
    #[arg(long, value_parser = parse_count, value_name = "N")]
    iops: Option<u64>,
    /// Reads per second
    #[arg(long, value_parser = parse_count, value_name = "N")]
    read_iops: Option<u64>,
    /// Writes per second
    #[arg(long, value_parser = parse_count, value_name = "N")]
    write_iops: Option<u64>,
    /// Bytes per second, like 100M; 0 for no limit
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    bps: Option<u64>,
    /// Bytes read per second
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    read_bps: Option<u64>,
    /// Bytes written per second
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    write_bps: Option<u64>,
    /// Burst after a pause, as the time in which the limits allow as much, like 50ms
    #[arg(long, value_parser = microseconds, value_name = "DURATION")]
    burst: Option<u64>,
    /// Share of the device among its slices with a weight, 1 to 10000
    #[arg(long, value_name = "N")]
    #[arg(value_parser = parse_number::<u32, 1, { MAX_WEIGHT as u64 }>)]
    weight: Option<u32>,
    #[command(flatten)]
    target: DaemonTarget,
}

fn microseconds(text: &str) -> Result<u64, &'static str> {
    u64::try_from(parse_duration(text)?.as_micros()).map_err(|_| "the duration is too long")
}

impl LimitsArgs {
    /// Changes the requested limits, and prints all limits.
    pub fn run(self) -> Result<()> {
        let change = LimitChange {
            disk: self.disk.name,
            nsid: self.nsid,
            volume: self.volume,
            all: self.all,
            iops: self.iops,
            read_iops: self.read_iops,
            write_iops: self.write_iops,
            bps: self.bps,
            read_bps: self.read_bps,
            write_bps: self.write_bps,
            burst_us: self.burst,
            weight: self.weight,
        };
        change.check().map_err(UsageError::error)?;
        let list = self.target.client()?.limits(&change)?;
        self.target.print(&list, |list| {
            if list.is_empty() {
                outln!("no volume has limits or a weight");
            }
            Ok(list.iter().try_for_each(print)?)
        })
    }
}

/// Prints the I/O limits of a volume as text.
pub fn print(l: &VolumeLimits) -> Result<(), OutputError> {
    match (&*l.disk, l.nsid) {
        ("", _) => outln!("{}", l.volume),
        (disk, nsid) => outln!("{disk}  namespace {nsid}  ({})", l.volume),
    }
    let rate = |rate: u64| match rate {
        0 => "-".to_owned(),
        rate => rate.to_string(),
    };
    // Without a burst there are no limits.
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
            "  burst {:?}   requests that waited {}",
            Duration::from_micros(l.burst_us),
            l.delayed
        );
    }
    if let (Some(weight), Some((depth, most))) = (l.weight, l.share_depth) {
        outln!("  weight {weight}   requests in the device {depth} of {most} at most");
    }
    Ok(())
}
