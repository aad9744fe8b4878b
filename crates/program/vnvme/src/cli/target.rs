//! Selection of the running process that a command talks to.

use super::completion::disk_names;
use anyhow::Result;
use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use control::Client;
use daemon::api::client_paths;
use output::outln;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Control socket of a running process.
#[derive(Args)]
pub struct ControlSocket {
    /// Control socket of the running vnvme [default: that of the user, else
    /// /run/vnvme/control.sock]
    #[arg(long, env = daemon::api::VARIABLE, value_name = "PATH")]
    control: Option<PathBuf>,
}

impl ControlSocket {
    /// Returns the path that the user has named.
    pub fn path(&self) -> Option<&Path> {
        self.control.as_deref()
    }

    /// Connects to the first control socket that exists.
    pub fn client(&self) -> Result<Client> {
        Ok(Client::new(client_paths(self.path()))?)
    }
}

/// Control socket and output format of a command for a running process.
#[derive(Args)]
pub struct DaemonTarget {
    #[command(flatten)]
    pub socket: ControlSocket,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl DaemonTarget {
    /// Connects to the first control socket that exists.
    pub fn client(&self) -> Result<Client> {
        self.socket.client()
    }

    /// Prints an answer as JSON (`--json`) or for people.
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

    /// Returns whether the output is JSON.
    pub fn is_json(&self) -> bool {
        self.json
    }
}

/// Parses a namespace ID.
///
/// # Errors
/// A text for the user when the ID is invalid.
pub fn parse_nsid(text: &str) -> std::result::Result<u32, String> {
    let nsid = volume::parse_number::<u32, 1, { u32::MAX as u64 }>(text);
    nsid.map_err(|why| format!("{why}; vnvme show NAME lists the namespace IDs"))
}

/// A disk of the process.
#[derive(Args)]
pub struct DiskName {
    /// Name of the disk in vnvme list
    #[arg(value_name = "NAME", add = ArgValueCompleter::new(disk_names))]
    pub name: String,
}

/// A disk of the process, or all.
#[derive(Args)]
pub struct MaybeDisk {
    /// Name of the disk in vnvme list [default: all]
    #[arg(value_name = "NAME", add = ArgValueCompleter::new(disk_names))]
    pub name: Option<String>,
}
