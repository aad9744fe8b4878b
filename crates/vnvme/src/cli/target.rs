//! Which running process a command is for.

use super::completion::disk_names;
use crate::api::client_paths;
use anyhow::Result;
use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use control::Client;
use output::outln;
use serde::Serialize;
use std::path::PathBuf;

/// Which process is asked, and how its answer is printed.
#[derive(Args)]
pub struct Target {
    /// Control socket of the running vnvme [default: that of this user, else
    /// /run/vnvme/control.sock]
    #[arg(long, env = crate::api::VARIABLE, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Target {
    /// Of the socket that is looked for at first.
    pub fn client(&self) -> Result<Client> {
        Ok(Client::new(client_paths(self.control.as_deref()))?)
    }

    /// Prints an answer: as JSON if that is asked for, else for people.
    pub fn print<T: Serialize>(
        &self,
        answer: &T,
        print: impl FnOnce(&T) -> Result<()>,
    ) -> Result<()> {
        if self.json {
            outln!("{}", serde_json::to_string_pretty(answer)?);
            return Ok(());
        }
        print(answer)
    }

    /// The answer is to be JSON.
    pub fn is_json(&self) -> bool {
        self.json
    }
}

/// A namespace ID, as the command line has it.
///
/// # Errors
/// It is none, in words.
pub fn parse_nsid(text: &str) -> std::result::Result<u32, String> {
    let nsid = volume::parse_number::<u32, 1, { u32::MAX as u64 }>(text);
    nsid.map_err(|why| format!("{why}; vnvme show NAME has the namespaces' IDs"))
}

/// A disk of the process.
#[derive(Args)]
pub struct DiskName {
    /// The disk's name, as vnvme list shows it
    #[arg(value_name = "NAME", add = ArgValueCompleter::new(disk_names))]
    pub name: String,
}

/// A disk of the process, or all.
#[derive(Args)]
pub struct MaybeDisk {
    /// The disk's name, as vnvme list shows it [default: all]
    #[arg(value_name = "NAME", add = ArgValueCompleter::new(disk_names))]
    pub name: Option<String>,
}
