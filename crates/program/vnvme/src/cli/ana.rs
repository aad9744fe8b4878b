//! `vnvme ana`.

use super::table::{Column, TextTable};
use super::target::{DaemonTarget, MaybeDisk};
use anyhow::Result;
use clap::Args;
use config::ana::AnaState;
use config::usage_error::UsageError;
use control::api::{AnaChange, AnaStatus};
use controller::MAX_ANA_GROUP;
use output::outln;

fn parse_group(text: &str) -> std::result::Result<u32, String> {
    let group = volume::parse_number::<u32, 1, { MAX_ANA_GROUP as u64 }>(text);
    group.map_err(|why| format!("{why}; vnvme ana lists the groups of all disks"))
}

/// Options of `vnvme ana`.
#[derive(Args)]
pub struct AnaArgs {
    #[command(flatten)]
    disk: MaybeDisk,
    /// New state. Outstanding commands complete as before; vnvme ana returns when no command
    /// remains that the new state refuses
    #[arg(long, value_enum, value_name = "STATE", requires = "name")]
    set: Option<AnaState>,
    /// Change only this ANA group
    #[arg(long, value_name = "N", requires = "name", value_parser = parse_group)]
    group: Option<u32>,
    #[command(flatten)]
    target: DaemonTarget,
}

impl AnaArgs {
    /// Changes the requested states, and prints all states.
    pub fn run(self) -> Result<()> {
        let change = AnaChange {
            disk: self.disk.name,
            group: self.group,
            state: self.set.map(Into::into),
        };
        change.check().map_err(UsageError::error)?;
        let states = self.target.client()?.ana(&change)?;
        self.target.print(&states, |states| {
            if states.is_empty() {
                outln!("no disk is in a subsystem");
                return Ok(());
            }
            print(states)
        })
    }
}

fn print(states: &[AnaStatus]) -> Result<()> {
    let mut table = TextTable::new([
        Column::Left("NAME"),
        Column::Left("SUBSYSTEM"),
        Column::Right("CNTLID"),
        Column::Right("GROUP"),
        Column::Left("STATE"),
        Column::Left("NAMESPACES"),
    ]);
    for status in states {
        let nsids: Vec<String> = status.nsids.iter().map(u32::to_string).collect();
        table.row([
            status.disk.clone(),
            status.subsystem.clone(),
            status.cntlid.to_string(),
            status.group.to_string(),
            status.state.name().to_owned(),
            nsids.join(" "),
        ]);
    }
    Ok(table.print()?)
}
