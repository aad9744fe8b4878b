//! `vnvme suspend` and `vnvme resume`.

use super::completion::disk_names;
use super::target::DaemonTarget;
use anyhow::Result;
use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use control::api::{DeviceState, DeviceStatus, ErrorChange};
use output::{OutputError, outln};

/// Options of `vnvme suspend`.
#[derive(Args)]
pub struct SuspendArgs {
    /// PCI address of the device, or its URL as it was given, without the namespace
    #[arg(value_name = "DEVICE")]
    device: String,
    #[command(flatten)]
    target: DaemonTarget,
}

impl SuspendArgs {
    /// Suspends the device, and prints its state.
    pub fn run(self) -> Result<()> {
        let status = self.target.client()?.suspend(&self.device)?;
        self.target.print(&status, |status| Ok(print(status)?))
    }
}

/// Options of `vnvme resume`.
#[derive(Args)]
pub struct ResumeArgs {
    /// Name of the disk; or PCI address of the device, or its URL as it was given, without the
    /// namespace
    #[arg(value_name = "DISK|DEVICE", add = ArgValueCompleter::new(disk_names))]
    what: String,
    #[command(flatten)]
    target: DaemonTarget,
}

impl ResumeArgs {
    /// Resumes the disk or device, and prints its state.
    pub fn run(self) -> Result<()> {
        let client = self.target.client()?;
        if !client.disks()?.iter().any(|disk| disk.name == self.what) {
            let status = client.resume(&self.what)?;
            return self.target.print(&status, |status| Ok(print(status)?));
        }
        let change = ErrorChange {
            disk: Some(self.what),
            resume: true,
            ..ErrorChange::default()
        };
        let list = client.on_error(&change)?;
        self.target.print(&list, |list| {
            Ok(list.iter().try_for_each(super::on_error::print)?)
        })
    }
}

/// Prints the state of a device for people.
pub fn print(status: &DeviceStatus) -> Result<(), OutputError> {
    let state = match status.state {
        DeviceState::Live => "at work",
        DeviceState::Connecting => "connecting: commands wait for the server",
        DeviceState::Suspended => "suspended: commands wait for vnvme resume",
        DeviceState::Gone => "gone",
    };
    outln!("{}  {state}   resets {}", status.device, status.resets);
    Ok(())
}
