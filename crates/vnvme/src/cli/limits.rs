//! `vnvme limits`.

use crate::control;
use crate::limits::{Change, VolumeLimits};
use crate::usage::Usage;
use anyhow::{Context, Result};
use clap::Args;
use output::outln;
use std::path::PathBuf;

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
        self.change.check().map_err(Usage::error)?;
        let list = control::limits(&self.control, &self.change)?;
        if self.json {
            outln!("{}", serde_json::to_string_pretty(&list).context("JSON")?);
            return Ok(());
        }
        if list.is_empty() {
            outln!("no volume has limits or a weight");
        }
        list.iter().try_for_each(VolumeLimits::print)?;
        Ok(())
    }
}
