//! Block device of this host (ublk): `[[ublk]]`.

use super::{Address, Disk, disk_fields};
use crate::check::UniqueValues;
use crate::options::tables::{block_size, name, on_read_error, on_write_error, read_only, volume};
use crate::options::{Flag, Row, Spec, Url};
use crate::origin::Origin;
use crate::spec::NamespaceSpec;
use anyhow::Result;
use std::path::PathBuf;
use std::slice;

/// Configuration of one block device of this host (ublk).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UblkSpec {
    /// Name of the disk; `None` for that of its device.
    pub name: Option<String>,
    /// Volume that stores the blocks.
    pub namespace: NamespaceSpec,
    /// Number N of the device `/dev/ublkbN`; `None` for one that the kernel chooses.
    pub id: Option<u32>,
    /// Number of queues, each of which one worker serves.
    pub queues: Option<u16>,
    /// Maximum number of outstanding requests of each queue.
    pub depth: Option<u16>,
    /// Whether the device outlives a killed process, and waits for the next one.
    pub recover: Option<bool>,
    /// Location of the device's table in the configuration file, for error messages.
    pub origin: Origin,
}

impl UblkSpec {
    /// Returns the number of queues of the device, with the default.
    pub fn queues(&self) -> u16 {
        self.queues.unwrap_or(1)
    }

    /// Returns the maximum number of outstanding requests of each queue, with the default.
    pub fn depth(&self) -> u16 {
        self.depth.unwrap_or(128)
    }

    /// Returns the name, or the name of the device; `ublk` if the kernel chooses the device's
    /// number.
    pub fn any_name(&self) -> String {
        match (&self.name, self.id) {
            (Some(name), _) => name.clone(),
            (None, Some(id)) => format!("ublkb{id}"),
            (None, None) => "ublk".to_owned(),
        }
    }
}

impl Spec for UblkSpec {
    const TABLE: &'static str = "[[ublk]]";
    const NAMES: &'static str = "block devices";
    const ABOUT: &'static str = "A volume as a block device of this host; there may be several.";
    const ROWS: &'static [Row<Self>] = &[
        name::<Self>(|d| &mut d.name).or("the name of the device, ublkbN"),
        volume(|d| &mut d.namespace.volume),
        Row::<Self>::new("id", "N", "number of the device, N in /dev/ublkbN", |d| {
            &mut d.id
        })
        .or("a free number")
        .ublk(
            Flag::default("id")
                .help("number of the first device, N in /dev/ublkbN; the other devices follow"),
        ),
        Row::<Self>::new("queues", "N", "queues of each device", |d| &mut d.queues)
            .or("1")
            .ublk(Flag::default("queues")),
        Row::<Self>::new("depth", "N", "requests of each queue", |d| &mut d.depth)
            .or("128")
            .ublk(Flag::default("depth")),
        block_size(|d| &mut d.namespace.block_size),
        on_read_error(|d| &mut d.namespace.on_read_error),
        on_write_error(|d| &mut d.namespace.on_write_error),
        read_only(|d| &mut d.namespace.read_only),
        Row::<Self>::new(
            "recover",
            "on|off",
            "keep the device when the process is killed: requests wait for the next process with \
             the same id",
            |d| &mut d.recover,
        )
        .or("off")
        .ublk(Flag::overrides("recover").requires("id")),
    ];
    const REFUSED: &'static [(&'static str, &'static str)] = &[(
        "no-write-cache",
        "devices have a write cache that cannot be turned off",
    )];

    fn volume(&mut self) -> Option<&mut Url> {
        Some(&mut self.namespace.volume)
    }
}

impl Disk for UblkSpec {
    disk_fields!();

    fn complete(&mut self) {
        // A device without a number has no lasting name.
        if self.id.is_some() {
            self.name = Some(self.any_name());
        }
    }

    fn address(&self) -> Address<'_> {
        Address::Device(self.id)
    }

    fn namespaces(&self) -> &[NamespaceSpec] {
        slice::from_ref(&self.namespace)
    }

    fn namespaces_mut(&mut self) -> &mut [NamespaceSpec] {
        slice::from_mut(&mut self.namespace)
    }

    fn own_files(&self) -> Vec<(&'static str, PathBuf)> {
        Vec::new()
    }

    fn check(&self, seen: &mut UniqueValues<'_>) -> Result<()> {
        let Some(id) = self.id else {
            return Ok(());
        };
        let id = id.to_string();
        self.origin.place("id", seen.enter("ublk device", &id, &id))
    }
}
