//! NVMe controller that a VMM uses over vfio-user: `[[controller]]`.

use super::{Address, Disk, disk_fields, disk_name};
use crate::access::SocketAccess;
use crate::check::{UniqueValues, check_config, refuse};
use crate::options::tables::{
    firmware, mdts, model, name, serial, socket, socket_group, socket_mode, socket_owner, subnqn,
    write_cache,
};
use crate::options::{Flag, Row, Size, Spec, file};
use crate::origin::Origin;
use crate::spec::NamespaceSpec;
use anyhow::{Result, anyhow};
use clap::ValueEnum;
use controller::{Cloud, ControllerConfig};
use serde::Deserialize;
use serde::de::MapAccess;
use std::path::{Path, PathBuf};

/// How a client rings doorbells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DoorbellMode {
    /// Each ring is a message; idle disks cost nothing. Guests with shadow doorbells (Linux) hardly
    /// ring.
    #[default]
    Trapped,
    /// The client maps the doorbell page and writes it directly; vnvme polls it all the time. For
    /// polling hosts.
    Mapped,
}

/// Configuration of one NVMe controller: a socket for the VMM, and namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControllerSpec {
    /// Name of the disk; `None` for one made from the socket's path.
    pub name: Option<String>,
    /// Path of the socket that the VMM connects to.
    pub socket: PathBuf,
    /// Owner, group and mode of the socket's file.
    pub access: SocketAccess,
    /// Model number that the controller reports.
    pub model: Option<String>,
    /// Cloud that the controller imitates in its identity.
    pub cloud: Option<Cloud>,
    /// Serial number; `None` for one made from the volumes' identities.
    pub serial: Option<String>,
    /// Firmware revision that the controller reports.
    pub firmware: Option<String>,
    /// NVM Subsystem NQN; `None` for one made from the serial number.
    pub subnqn: Option<String>,
    /// Name of the subsystem that the disk shares with other disks, if any.
    pub subsystem: Option<String>,
    /// Controller ID in the subsystem, unique there.
    pub cntlid: Option<u16>,
    /// Host Identifier of the host that uses the disk, in 32 hexadecimal digits.
    pub host_id: Option<String>,
    /// Whether the client traps doorbell writes or maps the doorbell page; `None` for trapped.
    pub doorbells: Option<DoorbellMode>,
    /// Whether the controller supports shadow doorbells (Doorbell Buffer Config).
    pub shadow_doorbells: Option<bool>,
    /// Size of the controller memory buffer in bytes; `None` for none.
    pub cmb_size: Option<Size>,
    /// File with the content of the Boot Partitions.
    pub boot_partition: Option<PathBuf>,
    /// Whether the volatile write cache is enabled after power-on.
    pub write_cache: Option<bool>,
    /// Number of I/O queue pairs that the guest can create.
    pub io_queues: Option<u16>,
    /// Maximum number of entries of each queue.
    pub queue_entries: Option<u32>,
    /// Maximum transfer size as MDTS: 4 KiB shifted left by this value.
    pub mdts: Option<u8>,
    /// Largest NSID that a namespace of the controller can ever have.
    pub max_namespaces: Option<u32>,
    /// Folder of the pool in which the guest creates namespaces, if any.
    pub pool: Option<PathBuf>,
    /// Capacity of the pool in bytes.
    pub pool_capacity: Option<Size>,
    /// Logical block size in bytes of namespaces in the pool.
    pub pool_block_size: Option<u32>,
    /// Whether a guest is to migrate to the disk, and another process still uses the volume.
    pub incoming: Option<bool>,
    /// Namespaces of the controller.
    pub namespaces: Vec<NamespaceSpec>,
    /// Location of the controller's table in the configuration file, for error messages.
    pub origin: Origin,
}

impl Spec for ControllerSpec {
    const TABLE: &'static str = "[[controller]]";
    const NAMES: &'static str = "NVMe controllers";
    const ABOUT: &'static str = "An NVMe controller; there may be several.";
    const ROWS: &'static [Row<Self>] = &[
        name::<Self>(|c| &mut c.name).or("the name of the socket's file, without .sock"),
        socket(|c| &mut c.socket),
        socket_owner(|c| &mut c.access.owner),
        socket_group(|c| &mut c.access.group),
        socket_mode(|c| &mut c.access.mode),
        Row::<Self>::new(
            "doorbells",
            "MODE",
            "doorbell writes of the client: trapped (by message) or mapped (a shared page, polled \
             at intervals while the guest is idle)",
            |c| &mut c.doorbells,
        )
        .or("trapped")
        .serve(Flag::default("doorbells")),
        Row::<Self>::new(
            "shadow-doorbells",
            "on|off",
            "offer shadow doorbells (Doorbell Buffer Config)",
            |c| &mut c.shadow_doorbells,
        )
        .or("on")
        .serve(
            Flag::overrides("no-shadow-doorbells")
                .help("do not offer shadow doorbells (Doorbell Buffer Config)"),
        ),
        Row::<Self>::new(
            "cmb-size",
            "SIZE",
            "size of the controller memory buffer (CMB) for the guest's queues, lists and data: a \
             power of two from 4K to 64M; Linux needs at least 2M",
            |c| &mut c.cmb_size,
        )
        .or("none")
        .serve(Flag::default("cmb-size")),
        Row::<Self>::new(
            "boot-partition",
            "PATH",
            "image of both Boot Partitions, which firmware reads before it creates queues; up to \
             64M, read when the disk is opened",
            |c| &mut c.boot_partition,
        )
        .or("none")
        .serve(Flag::default("boot-partition")),
        write_cache(|c| &mut c.write_cache),
        model(|c| &mut c.model),
        Row::<Self>::new(
            "cloud",
            "CLOUD",
            "imitate a cloud's disk: amazon:DEVICE, google:NAME or azure. Sets the vendor-specific \
             bytes in which the cloud's images look for device names, the PCI IDs, and the model \
             number unless model is set",
            |c| &mut c.cloud,
        )
        .or("none")
        .serve(Flag::refused("cloud", "names one controller")),
        serial(|c| &mut c.serial),
        firmware(|c| &mut c.firmware),
        subnqn(|c| &mut c.subnqn),
        Row::<Self>::new(
            "subsystem",
            "TEXT",
            "name of the disk's NVM subsystem. Disks of a subsystem share the namespaces of equal \
             NSID, with reservations; each disk is served by one worker",
            |c| &mut c.subsystem,
        )
        .or("a subsystem for each disk"),
        Row::<Self>::new(
            "cntlid",
            "N",
            "controller ID, unique in its subsystem; required with subsystem",
            |c| &mut c.cntlid,
        )
        .range(0, 65_519)
        .or("1"),
        Row::<Self>::new(
            "host-id",
            "HEX",
            "with subsystem: Host Identifier of the disk's guest, 32 hexadecimal digits, which \
             owns its reservations. All disks of a guest have the same; the guest cannot change it",
            |c| &mut c.host_id,
        )
        .or("derived from the disk's name"),
        Row::<Self>::new("io-queues", "N", "I/O queue pairs, 1 to 128", |c| {
            &mut c.io_queues
        })
        .or("64")
        .serve(Flag::default("io-queues")),
        Row::<Self>::new(
            "queue-entries",
            "N",
            "entries of each queue, a power of two from 2 to 4096",
            |c| &mut c.queue_entries,
        )
        .or("4096")
        .serve(Flag::default("queue-entries")),
        mdts(|c| &mut c.mdts),
        Row::<Self>::new(
            "max-namespaces",
            "N",
            "highest NSID of the controller (NN); leaves room for namespaces attached at run time",
            |c| &mut c.max_namespaces,
        )
        .range(1, 1024)
        .or("the highest configured; at least 16 under vnvme daemon, and with pool"),
        Row::<Self>::new(
            "pool",
            "PATH",
            "existing folder for namespaces that the guest creates, each a file (nvme create-ns, \
             attach-ns, detach-ns, delete-ns); belongs to one disk",
            |c| &mut c.pool,
        )
        .or("none"),
        Row::<Self>::new(
            "pool-capacity",
            "SIZE",
            "total capacity of the guest's namespaces (TNVMCAP; UNVMCAP is the unallocated part); \
             the files are sparse",
            |c| &mut c.pool_capacity,
        )
        .or("required with pool"),
        Row::<Self>::new(
            "pool-block-size",
            "512|4096",
            "logical block size in bytes of namespaces that the guest creates from now on",
            |c| &mut c.pool_block_size,
        )
        .or("512"),
        Row::<Self>::new(
            "incoming",
            "on|off",
            "open the volume while another process serves it, and take it over from there when a \
             migrated guest starts",
            |c| &mut c.incoming,
        )
        .or("off"),
    ];
    const NESTED: &'static [(&'static str, bool)] = &[("namespace", true)];
    const PROCESS_FLAGS: &'static [&'static str] = &["spread"];

    fn nested<'de, A: MapAccess<'de>>(&mut self, _: &str, map: &mut A) -> Result<(), A::Error> {
        self.namespaces = file::tables(map, "namespace", Self::TABLE)?;
        Ok(())
    }
}

impl ControllerSpec {
    /// Returns the name, or the name of the socket's file for a controller without a name.
    pub fn any_name(&self) -> String {
        let own = self.name.clone();
        own.unwrap_or_else(|| disk_name(&self.socket))
    }

    /// Returns the configuration of a controller, as far as it does not depend on the volumes.
    pub fn config(&self, serial: String) -> ControllerConfig {
        let default = ControllerConfig::default();
        let cloud = self.cloud.as_ref();
        let model = cloud.map_or(default.model, |cloud| cloud.model().into());
        ControllerConfig {
            name: self.any_name(),
            model: self.model.clone().unwrap_or(model),
            pci: cloud.map_or(default.pci, Cloud::pci),
            cloud: self.cloud.clone(),
            firmware: self.firmware.clone().unwrap_or(default.firmware),
            subnqn: self.subnqn.clone(),
            serial,
            cntlid: self.cntlid.unwrap_or(default.cntlid),
            io_queues: self.io_queues.unwrap_or(default.io_queues),
            queue_entries: self.queue_entries.unwrap_or(default.queue_entries),
            mdts: self.mdts.unwrap_or(default.mdts),
            mapped_doorbells: self.doorbells == Some(DoorbellMode::Mapped),
            shadow_doorbells: self.shadow_doorbells.unwrap_or(default.shadow_doorbells),
            cmb_size: self.cmb_size.map(|Size(bytes)| bytes),
            write_cache: self.write_cache.unwrap_or(default.write_cache),
            ..ControllerConfig::default()
        }
    }

    /// Checks that a disk to which a guest is to migrate has nothing that does not migrate.
    fn check_incoming(&self) -> Result<()> {
        if !self.incoming.unwrap_or(false) {
            return Ok(());
        }
        let hindrance = if self.namespaces.len() != 1 {
            "has exactly one namespace"
        } else if self.pool.is_some() {
            "has no pool"
        } else if self.subsystem.is_some() {
            "belongs to no subsystem"
        } else if self.cmb_size.is_some() {
            "has no controller memory buffer"
        } else {
            return Ok(());
        };
        let why = format!("a disk to which a guest migrates {hindrance}");
        Err(self.origin.error("incoming", why))
    }

    /// Checks the options of the pool, in which the guest creates namespaces.
    fn check_pool(&self, seen: &mut UniqueValues<'_>) -> Result<()> {
        let origin = &self.origin;
        let Some(path) = &self.pool else {
            let said = [
                ("pool-capacity", self.pool_capacity.is_some()),
                ("pool-block-size", self.pool_block_size.is_some()),
            ];
            return refuse(origin, &said, "has no effect without pool");
        };
        if self.subsystem.is_some() {
            let why = "a disk with subsystem cannot have a pool";
            return Err(origin.error("pool", why));
        }
        if self.pool_capacity.is_none_or(|Size(bytes)| bytes == 0) {
            let why = "a pool needs pool-capacity, the total size of its namespaces";
            return Err(origin.error("pool", why));
        }
        let block_size = self.pool_block_size;
        if let Some(size) = block_size.filter(|size| !matches!(size, 512 | 4096)) {
            let why = format!("a block size of {size} bytes is not possible: it is 512 or 4096");
            return Err(origin.error("pool-block-size", why));
        }
        origin.place("pool", seen.enter_path("pool", path))
    }
}

impl Disk for ControllerSpec {
    disk_fields!();

    fn address(&self) -> Address<'_> {
        Address::Socket(&self.socket, &self.access)
    }

    fn subsystem(&self) -> Option<&str> {
        self.subsystem.as_deref()
    }

    fn pool(&self) -> Option<&Path> {
        self.pool.as_deref()
    }

    fn namespaces(&self) -> &[NamespaceSpec] {
        &self.namespaces
    }

    fn namespaces_mut(&mut self) -> &mut [NamespaceSpec] {
        &mut self.namespaces
    }

    fn own_files(&self) -> Vec<(&'static str, PathBuf)> {
        let files = [
            ("pool", &self.pool),
            ("boot-partition", &self.boot_partition),
        ];
        let files = files.into_iter();
        files
            .filter_map(|(key, path)| Some((key, path.clone()?)))
            .collect()
    }

    fn check(&self, seen: &mut UniqueValues<'_>) -> Result<()> {
        let serial = self.serial.clone().unwrap_or_default();
        check_config(&self.config(serial), &self.origin)?;
        self.check_pool(seen)?;
        self.check_incoming()?;
        // Disks of one subsystem share its names.
        if seen.check_subsystem(self)? {
            seen.check_names(&self.serial, &self.subnqn, &self.origin)?;
        }
        seen.check_namespaces(Some(self), &self.namespaces)
    }

    fn check_filled(&self) -> Result<()> {
        let (socket, origin) = (self.socket.display(), &self.origin);
        let empty = self.namespaces.is_empty() && self.pool.is_none();
        if empty && self.max_namespaces.is_none() {
            return Err(if origin.is_known() {
                origin.error("", "no volume to serve")
            } else {
                anyhow!("{socket}: no volume to serve")
            });
        }
        Ok(())
    }
}
