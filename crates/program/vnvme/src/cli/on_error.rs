//! `vnvme on-error`.

use super::target::{DaemonTarget, MaybeDisk, parse_nsid};
use anyhow::Result;
use clap::Args;
use config::error_policy::{OnReadError, OnWriteError, shown};
use config::usage_error::UsageError;
use control::api::{ErrorChange, VolumeErrors};
use output::{OutputError, outln};

/// Options of `vnvme on-error`.
#[derive(Args)]
pub struct OnErrorArgs {
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
    /// Error policy for reads
    #[arg(long, value_enum, value_name = "ACTION")]
    on_read_error: Option<OnReadError>,
    /// Error policy for writes, zeroing and deallocation
    #[arg(long, value_enum, value_name = "ACTION")]
    on_write_error: Option<OnWriteError>,
    #[command(flatten)]
    target: DaemonTarget,
}

impl OnErrorArgs {
    /// Changes the requested policies, and prints all policies.
    pub fn run(self) -> Result<()> {
        let change = ErrorChange {
            disk: self.disk.name,
            nsid: self.nsid,
            volume: self.volume,
            all: self.all,
            on_read_error: self.on_read_error.map(|action| shown(action.into())),
            on_write_error: self.on_write_error.map(|action| shown(action.into())),
            resume: false,
        };
        change.check().map_err(UsageError::error)?;
        let list = self.target.client()?.on_error(&change)?;
        self.target.print(&list, |list| {
            if list.is_empty() {
                outln!("no volume is open");
            }
            Ok(list.iter().try_for_each(print)?)
        })
    }
}

/// Prints the error policy of a volume for people.
pub fn print(e: &VolumeErrors) -> Result<(), OutputError> {
    match &*e.disk {
        "" => outln!("{}", e.volume),
        disk => outln!("{disk}  namespace {}  ({})", e.nsid, e.volume),
    }
    outln!(
        "  on read errors {}   on write errors {}",
        e.on_read_error.name(),
        e.on_write_error.name()
    );
    if e.read_errors + e.write_errors > 0 {
        outln!(
            "  failed reads {}   others {}   of them for want of space {}   repeated {}",
            e.read_errors,
            e.write_errors,
            e.no_space,
            e.repeated
        );
    }
    if let Some(error) = &e.last_error {
        outln!("  last error: {error}");
    }
    if e.stopped {
        outln!("  STOPPED: {} requests wait for vnvme resume", e.held);
    } else if e.waiting > 0 {
        outln!("  requests that wait to be repeated {}", e.waiting);
    }
    Ok(())
}
