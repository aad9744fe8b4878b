//! `vnvme suspend` and `vnvme resume`.

use super::target::Target;
use crate::devices::Action;
use anyhow::Result;
use clap::Args;
use control::api::{DeviceState, DeviceStatus};
use output::{OutputError, outln};

/// Options of `vnvme suspend` and `vnvme resume`.
#[derive(Args)]
pub struct DeviceArgs {
    /// The device: its PCI address, or its URL without the namespace as it was given
    #[arg(value_name = "DEVICE")]
    device: String,
    #[command(flatten)]
    target: Target,
}

impl DeviceArgs {
    /// Has it done, and prints how the device is then.
    pub fn run(self, action: Action) -> Result<()> {
        let client = self.target.client()?;
        let status = match action {
            Action::Suspend => client.suspend(&self.device)?,
            Action::Resume => client.resume(&self.device)?,
        };
        self.target.print(&status, |status| Ok(print(status)?))
    }
}

/// For people.
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
