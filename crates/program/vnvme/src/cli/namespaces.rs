//! `vnvme attach`, `detach` and `resize`.

use super::disks::print_namespaces;
use super::given;
use super::target::{DaemonTarget, DiskName, parse_nsid};
use anyhow::Result;
use clap::Args;
use config::spec::NamespaceSpec;
use config::usage_error::UsageError;
use output::outln;
use serde_json::{Value, json};
use volume::parse_size;

/// Options of `vnvme attach`.
#[derive(Args)]
pub struct AttachArgs {
    #[command(flatten)]
    disk: DiskName,
    /// Volume, and keys of the namespace's table in a configuration file, like nsid=2
    #[arg(required = true, value_name = "VOLUME|KEY=VALUE")]
    words: Vec<String>,
    #[command(flatten)]
    target: DaemonTarget,
}

impl AttachArgs {
    /// Attaches a namespace to a controller.
    pub fn run(self) -> Result<()> {
        let (mut table, volumes) = given::table::<NamespaceSpec>(&self.words)?;
        let [volume] = volumes.as_slice() else {
            return Err(UsageError::error("a namespace has one volume"));
        };
        table.insert("volume".to_owned(), Value::from(volume.as_str()));
        let namespace = self.target.client()?.attach(&self.disk.name, &table)?;
        self.target.print(&namespace, |namespace| {
            print_namespaces(std::slice::from_ref(namespace))
        })
    }
}

/// Options of `vnvme detach`.
#[derive(Args)]
pub struct DetachArgs {
    #[command(flatten)]
    disk: DiskName,
    /// Namespace ID
    #[arg(value_name = "NSID", value_parser = parse_nsid)]
    nsid: u32,
    #[command(flatten)]
    target: DaemonTarget,
}

impl DetachArgs {
    /// Detaches a namespace from a controller.
    pub fn run(self) -> Result<()> {
        let (name, nsid) = (&self.disk.name, self.nsid);
        self.target.client()?.detach(name, nsid)?;
        let answer = json!({ "disk": name, "detached": nsid });
        self.target.print(&answer, |_| {
            outln!("namespace {nsid} of {name} is detached");
            Ok(())
        })
    }
}

/// Options of `vnvme resize`.
#[derive(Args)]
pub struct ResizeArgs {
    #[command(flatten)]
    disk: DiskName,
    /// New size of the volume, like 20G
    #[arg(value_name = "SIZE", value_parser = parse_size)]
    size: u64,
    /// Namespace ID, for a controller
    #[arg(long, value_name = "NSID", default_value_t = 1)]
    #[arg(value_parser = parse_nsid)]
    nsid: u32,
    #[command(flatten)]
    target: DaemonTarget,
}

impl ResizeArgs {
    /// Resizes a namespace.
    pub fn run(self) -> Result<()> {
        let client = self.target.client()?;
        let namespace = client.resize(&self.disk.name, self.nsid, self.size)?;
        self.target.print(&namespace, |namespace| {
            print_namespaces(std::slice::from_ref(namespace))
        })
    }
}
