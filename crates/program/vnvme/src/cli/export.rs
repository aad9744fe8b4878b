//! `vnvme export`, `exports` and `unexport`.

use super::table::{Column, TextTable, size};
use super::target::{DaemonTarget, DiskName, parse_nsid};
use anyhow::{Context, Result};
use clap::Args;
use config::usage_error::UsageError;
use control::api::{Export, NewExport};
use output::outln;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::json;
use std::path::Path;

/// Characters that are percent-encoded in the query of a URI (RFC 3986, 2.2 and 2.3), except "/".
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/');

/// Options of `vnvme export`.
#[derive(Args)]
pub struct ExportArgs {
    #[command(flatten)]
    disk: DiskName,
    /// Address of the export: unix:PATH, in a folder that --allow names
    #[arg(long, value_name = "ADDRESS")]
    nbd: String,
    /// Namespace ID, for a controller
    #[arg(long, value_name = "NSID", default_value_t = 1)]
    #[arg(value_parser = parse_nsid)]
    nsid: u32,
    /// Let clients write, to restore the disk; the disk accepts no guest until "vnvme unexport"
    #[arg(long)]
    writable: bool,
    #[command(flatten)]
    target: DaemonTarget,
}

/// Returns an address with an absolute path: the daemon may run in another folder.
fn absolute(address: &str) -> Result<String> {
    let Some(path) = address.strip_prefix("unix:") else {
        let why = format!("--nbd {address}: an export is served at unix:PATH");
        return Err(UsageError::error(why));
    };
    let path = std::path::absolute(Path::new(path)).context("--nbd")?;
    Ok(format!("unix:{}", path.display()))
}

/// Returns the URI of an export for NBD clients.
fn uri(export: &Export) -> String {
    let path = export.nbd.trim_start_matches("unix:");
    let path = utf8_percent_encode(path, RESERVED);
    format!("nbd+unix:///?socket={path}")
}

impl ExportArgs {
    /// Exports the disk.
    pub fn run(self) -> Result<()> {
        let export = NewExport {
            disk: self.disk.name,
            nsid: Some(self.nsid),
            nbd: absolute(&self.nbd)?,
            writable: self.writable,
        };
        let export = self.target.client()?.export(&export)?;
        self.target.print(&export, |export| {
            let access = if export.writable {
                "for writing"
            } else {
                "read-only"
            };
            outln!("{} is exported {access} at {}", export.disk, uri(export));
            if export.encrypted {
                outln!("its volume is encrypted, and the export is plaintext");
            }
            Ok(())
        })
    }
}

/// Options of `vnvme exports`.
#[derive(Args)]
pub struct ExportsArgs {
    #[command(flatten)]
    target: DaemonTarget,
}

impl ExportsArgs {
    /// Prints all exports.
    pub fn run(self) -> Result<()> {
        let exports = self.target.client()?.exports()?;
        self.target.print(&exports, |exports| {
            let mut table = TextTable::new([
                Column::Left("DISK"),
                Column::Right("NSID"),
                Column::Right("SIZE"),
                Column::Left("ACCESS"),
                Column::Right("CLIENTS"),
                Column::Left("URI"),
            ]);
            for export in exports {
                let access = if export.writable {
                    "read-write"
                } else {
                    "read-only"
                };
                table.row([
                    export.disk.clone(),
                    export.nsid.to_string(),
                    size(export.bytes),
                    access.to_owned(),
                    export.clients.to_string(),
                    uri(export),
                ]);
            }
            Ok(table.print()?)
        })
    }
}

/// Options of `vnvme unexport`.
#[derive(Args)]
pub struct UnexportArgs {
    #[command(flatten)]
    disk: DiskName,
    #[command(flatten)]
    target: DaemonTarget,
}

impl UnexportArgs {
    /// Ends the exports of the disk.
    pub fn run(self) -> Result<()> {
        let name = &self.disk.name;
        self.target.client()?.unexport(name)?;
        let answer = json!({ "unexported": name });
        self.target.print(&answer, |_| {
            outln!("{name} is no longer exported");
            Ok(())
        })
    }
}
