//! `vnvme path`.

use super::table::{Column, TextTable};
use super::target::{DaemonTarget, MaybeDisk, parse_nsid};
use anyhow::Result;
use clap::Args;
use config::choices::PathChoice;
use config::usage_error::UsageError;
use control::api::PathChange;
use output::outln;

/// Options of `vnvme path`.
#[derive(Args)]
pub struct PathArgs {
    #[command(flatten)]
    disk: MaybeDisk,
    /// Path for new commands; outstanding commands complete on theirs
    #[arg(long, value_enum, value_name = "direct|generic")]
    set: Option<PathChoice>,
    /// Change only this namespace
    #[arg(long, value_name = "NSID", value_parser = parse_nsid)]
    nsid: Option<u32>,
    /// Change all disks of the process
    #[arg(long, conflicts_with = "name")]
    all: bool,
    #[command(flatten)]
    target: DaemonTarget,
}

impl PathArgs {
    /// Changes the requested paths, and prints all paths.
    pub fn run(self) -> Result<()> {
        let change = PathChange {
            disk: self.disk.name,
            nsid: self.nsid,
            path: self.set.map(Into::into),
            all: self.all,
        };
        change.check().map_err(UsageError::error)?;
        let states = self.target.client()?.paths(&change)?;
        self.target.print(&states, |states| {
            if states.is_empty() {
                outln!("no namespace has a direct path");
                return Ok(());
            }
            let columns = [
                Column::Left("NAME"),
                Column::Right("NSID"),
                Column::Left("PATH"),
            ];
            let mut table = TextTable::new(columns);
            for state in states {
                let path = state.path.name().to_owned();
                table.row([state.disk.clone(), state.nsid.to_string(), path]);
            }
            Ok(table.print()?)
        })
    }
}
