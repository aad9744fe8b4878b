//! `vnvme suspend` and `vnvme resume`.

use crate::control;
use crate::devices::{Action, DeviceChange};
use anyhow::{Context, Result};
use clap::Args;
use output::outln;
use std::path::PathBuf;

/// Options of `vnvme suspend` and `vnvme resume`.
#[derive(Args)]
pub struct DeviceArgs {
    /// The control socket of a running vnvme serve --control PATH
    #[arg(value_name = "PATH")]
    control: PathBuf,
    /// The device: its URL as vnvme serve was given it, without the namespace, or a part of that
    /// which only it has
    #[arg(value_name = "DEVICE")]
    device: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl DeviceArgs {
    /// Has it done, and prints how the device is then.
    pub fn run(self, action: Action) -> Result<()> {
        let change = DeviceChange {
            device: self.device,
            action,
        };
        let status = control::device(&self.control, &change)?;
        if self.json {
            outln!("{}", serde_json::to_string_pretty(&status).context("JSON")?);
        } else {
            status.print()?;
        }
        Ok(())
    }
}
