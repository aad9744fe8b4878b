//! virtio block device that a VMM uses over vhost-user: `[[vhost-user-blk]]`.

use super::{Address, Disk, disk_fields, disk_name};
use crate::access::SocketAccess;
use crate::check::UniqueValues;
use crate::options::tables::{
    block_size, name, on_read_error, on_write_error, read_only, socket, socket_group, socket_mode,
    socket_owner, volume, write_cache,
};
use crate::options::{Row, Spec, Url, url};
use crate::origin::Origin;
use crate::spec::NamespaceSpec;
use anyhow::Result;
use std::path::PathBuf;
use std::slice;

/// Configuration of one vhost-user-blk export: a socket for the VMM, and a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VhostBlkSpec {
    /// Name of the disk; `None` for one made from the socket's path.
    pub name: Option<String>,
    /// Path of the socket that the VMM connects to.
    pub socket: PathBuf,
    /// Owner, group and mode of the socket's file.
    pub access: SocketAccess,
    /// Volume that stores the blocks.
    pub namespace: NamespaceSpec,
    /// Maximum number of request queues.
    pub queues: Option<u16>,
    /// Number of entries of a queue for which request slots are allocated.
    pub queue_size: Option<u16>,
    /// Serial number that the guest sees.
    pub serial: Option<String>,
    /// Whether the volatile write cache is enabled at first.
    pub write_cache: Option<bool>,
    /// Whether a guest is to migrate to the disk, and another process still uses the volume.
    pub incoming: Option<bool>,
    /// Location of the export's table in the configuration file, for error messages.
    pub origin: Origin,
}

impl VhostBlkSpec {
    /// An export of a volume at a socket; the URL's options that are the export's are taken out of
    /// it.
    ///
    /// # Errors
    /// One of them cannot be read.
    pub fn parse(socket: &str, text: &str) -> Result<Self> {
        let spec = VhostBlkSpec {
            socket: socket.into(),
            ..url::parse(text)?
        };
        Ok(spec)
    }

    /// Returns the name, or the name of the socket's file for an export without a name.
    pub fn any_name(&self) -> String {
        let own = self.name.clone();
        own.unwrap_or_else(|| disk_name(&self.socket))
    }
}

impl Spec for VhostBlkSpec {
    const TABLE: &'static str = "[[vhost-user-blk]]";
    const NAMES: &'static str = "vhost-user-blk exports";
    const ABOUT: &'static str =
        "A vhost-user-blk disk for a guest with a virtio driver; there may be several.";
    const ROWS: &'static [Row<Self>] = &[
        name::<Self>(|e| &mut e.name).or("the name of the socket's file, without .sock"),
        socket(|e| &mut e.socket),
        socket_owner(|e| &mut e.access.owner),
        socket_group(|e| &mut e.access.group),
        socket_mode(|e| &mut e.access.mode),
        volume(|e| &mut e.namespace.volume),
        Row::<Self>::new("queues", "N", "maximum number of request queues", |e| {
            &mut e.queues
        })
        .or("128")
        .in_url(),
        Row::<Self>::new(
            "queue-size",
            "N",
            "entries of a queue to size requests for (seg_max is two less)",
            |e| &mut e.queue_size,
        )
        .or("128")
        .in_url(),
        Row::<Self>::new(
            "serial",
            "TEXT",
            "serial number, up to 20 characters",
            |e| &mut e.serial,
        )
        .or("derived from the volume, stable")
        .in_url(),
        block_size(|e| &mut e.namespace.block_size),
        on_read_error(|e| &mut e.namespace.on_read_error),
        on_write_error(|e| &mut e.namespace.on_write_error),
        read_only(|e| &mut e.namespace.read_only),
        write_cache::<Self>(|e| &mut e.write_cache).in_url(),
        Row::<Self>::new(
            "incoming",
            "on|off",
            "open the volume while another process serves it, and take it over from there when a \
             migrated guest starts",
            |e| &mut e.incoming,
        )
        .or("off")
        .in_url(),
    ];

    fn volume(&mut self) -> Option<&mut Url> {
        Some(&mut self.namespace.volume)
    }
}

impl Disk for VhostBlkSpec {
    disk_fields!();

    fn address(&self) -> Address<'_> {
        Address::Socket(&self.socket, &self.access)
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

    fn check(&self, _: &mut UniqueValues<'_>) -> Result<()> {
        // The serial number is a name for the guest alone ("ROOT"), and may be repeated.
        Ok(())
    }
}
