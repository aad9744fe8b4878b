//! Configuration of the served disks, from the command line or a configuration file. An absent
//! option is `None`; [`crate::options`] defines the options and their syntax.

use crate::access::{Principal, SocketAccess};
use crate::ana::AnaState;
use crate::balance::Spread;
use crate::confine::SandboxMode;
use crate::direct::PathChoice;
use crate::keep::{self, KeeperMode, Unavailable};
use crate::manage::{DiskSpec, Source, StateLock, beside};
use crate::on_error::{self, OnReadError, OnWriteError};
use crate::options::{Bits, Names, Paths, Setting, Size, Url, file, url};
use crate::origin::{self, Origin};
use crate::prepare::UnavailableDisk;
use crate::record::IdentityRule;
use crate::registry::disk_name;
use crate::settings::AllSettings;
use anyhow::{Context, Result, anyhow, ensure};
use clap::ValueEnum;
use controller::Cloud;
use dma::MemoryLimits;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use volume::{IoOptions, PreviousProcess};
use worker::{ConnectRate, IdleWindow};

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

/// Configuration of one namespace: a volume and how it is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceSpec {
    /// Path or URL.
    pub volume: Url,
    /// Namespace ID; by position from 1 when not given.
    pub nsid: Option<u32>,
    /// Logical block size in bytes.
    pub block_size: Option<u32>,
    /// Refuse writes.
    pub read_only: Option<bool>,
    /// Error policy for reads.
    pub on_read_error: Option<OnReadError>,
    /// Error policy for other requests.
    pub on_write_error: Option<OnWriteError>,
    /// NGUID, 32 hexadecimal digits.
    pub nguid: Option<String>,
    /// EUI-64, 16 hexadecimal digits.
    pub eui64: Option<String>,
    /// Namespace UUID.
    pub uuid: Option<String>,
    /// How commands reach a device below; direct where that is possible when not given.
    pub path: Option<PathChoice>,
    /// File that keeps the reservations of a namespace of a subsystem.
    pub reservations: Option<PathBuf>,
    /// Bytes of a zone, if it is to be a zoned namespace.
    pub zone_size: Option<Size>,
    /// Bytes of a zone that can be written.
    pub zone_capacity: Option<Size>,
    /// Zones that may be open at a time.
    pub max_open_zones: Option<u32>,
    /// Zones that may be active at a time.
    pub max_active_zones: Option<u32>,
    /// Bytes of a zone's random write area, if zones may have any.
    pub zrwa_size: Option<Size>,
    /// Bytes that such an area is flushed by.
    pub zrwa_granularity: Option<Size>,
    /// Zones that may have such an area at a time.
    pub zrwa_resources: Option<u32>,
    /// File that keeps the zones.
    pub zone_table: Option<PathBuf>,
    /// Placement handles (Flexible Data Placement), if it is to have any.
    pub fdp_handles: Option<u32>,
    /// Bytes of a reclaim unit.
    pub fdp_unit: Option<Size>,
    /// File that keeps the placement handles' counts.
    pub fdp_table: Option<PathBuf>,
    /// File that keeps the metadata of its blocks.
    pub metadata: Option<PathBuf>,
    /// Bytes of metadata of a block, if it is to have any.
    pub metadata_size: Option<u16>,
    /// Hosts have metadata behind each block's data.
    pub metadata_extended: Option<bool>,
    /// Type of protection information in the metadata, 0 for none.
    pub protection: Option<u8>,
    /// Bits of its guard.
    pub guard: Option<u8>,
    /// The protection information is in the first bytes of the metadata.
    pub protection_first: Option<bool>,
    /// Bits of its storage tag.
    pub storage_tag: Option<u8>,
    /// Bits of the storage tag that are compared.
    pub storage_tag_mask: Option<Bits>,
    /// File that keeps the LBA format that its host has chosen.
    pub format_file: Option<PathBuf>,
    /// The ANA group of a namespace of a subsystem; the same for all disks.
    pub ana_group: Option<u32>,
    /// State of that group for this disk's host.
    pub ana_state: Option<AnaState>,
    /// Location in the configuration file.
    pub origin: Origin,
}

impl NamespaceSpec {
    /// Files that keep something beside the volume, by their keys.
    pub fn kept_files(&self) -> Vec<(&'static str, PathBuf)> {
        let tables = [
            ("zone-table", &self.zone_table),
            ("fdp-table", &self.fdp_table),
            ("metadata", &self.metadata),
            ("format-file", &self.format_file),
        ];
        let tables = tables.into_iter();
        let tables = tables.filter_map(|(key, path)| Some((key, path.clone()?)));
        let journal = volume::journal_of_url(&self.volume);
        let journal = journal.map(|path| ("atomic-journal", path));
        tables.chain(journal).collect()
    }

    /// ANA group of a subsystem's namespace.
    pub fn ana_group(&self) -> u32 {
        self.ana_group.unwrap_or(1)
    }

    /// Writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only.unwrap_or(false)
    }

    /// Returns the error policy.
    pub fn on_error(&self) -> volume::OnError {
        on_error::policy(self.on_read_error, self.on_write_error)
    }
}

/// Configuration of one controller: a socket and its namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControllerSpec {
    /// Name of the disk.
    pub name: Option<String>,
    /// Socket for the VMM.
    pub socket: PathBuf,
    /// Access to the socket.
    pub access: SocketAccess,
    /// Model number.
    pub model: Option<String>,
    /// Cloud to imitate.
    pub cloud: Option<Cloud>,
    /// Serial number.
    pub serial: Option<String>,
    /// Firmware revision.
    pub firmware: Option<String>,
    /// NVM subsystem NQN.
    pub subnqn: Option<String>,
    /// Names the subsystem that it shares with other disks.
    pub subsystem: Option<String>,
    /// Controller ID in the subsystem.
    pub cntlid: Option<u16>,
    /// The host that uses it, 32 hexadecimal digits.
    pub host_id: Option<String>,
    /// Doorbells trapped or mapped; trapped when not given.
    pub doorbells: Option<DoorbellMode>,
    /// Offer shadow doorbells (Doorbell Buffer Config).
    pub shadow_doorbells: Option<bool>,
    /// Bytes of the controller memory buffer.
    pub cmb_size: Option<Size>,
    /// File that the Boot Partitions hold.
    pub boot_partition: Option<PathBuf>,
    /// Volatile write cache on after power-on.
    pub write_cache: Option<bool>,
    /// I/O queue pairs.
    pub io_queues: Option<u16>,
    /// Entries per queue.
    pub queue_entries: Option<u32>,
    /// Largest transfer: 4 KiB shifted left by this.
    pub mdts: Option<u8>,
    /// Largest NSID that a namespace may ever have.
    pub max_namespaces: Option<u32>,
    /// Folder of the namespaces that the guest makes.
    pub pool: Option<PathBuf>,
    /// Bytes that these may have together.
    pub pool_capacity: Option<Size>,
    /// Their logical block size in bytes.
    pub pool_block_size: Option<u32>,
    /// Namespaces of the controller.
    pub namespaces: Vec<NamespaceSpec>,
    /// Location in the configuration file.
    pub origin: Origin,
}

/// Configuration of one export: a socket and its volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VhostBlkSpec {
    /// Name of the disk.
    pub name: Option<String>,
    /// Socket for the VMM.
    pub socket: PathBuf,
    /// Access to the socket.
    pub access: SocketAccess,
    /// Path or URL.
    pub volume: Url,
    /// Most request queues.
    pub queues: Option<u16>,
    /// Entries of a queue that requests are made for.
    pub queue_size: Option<u16>,
    /// Serial number.
    pub serial: Option<String>,
    /// Logical block size in bytes.
    pub block_size: Option<u32>,
    /// Refuse writes.
    pub read_only: Option<bool>,
    /// Error policy for reads.
    pub on_read_error: Option<OnReadError>,
    /// Error policy for other requests.
    pub on_write_error: Option<OnWriteError>,
    /// Volatile write cache on at first.
    pub write_cache: Option<bool>,
    /// Location in the configuration file.
    pub origin: Origin,
}

impl VhostBlkSpec {
    /// Returns the volume as a namespace, to be opened like one.
    pub fn namespace(&self) -> NamespaceSpec {
        NamespaceSpec {
            volume: self.volume.clone(),
            block_size: self.block_size,
            read_only: self.read_only,
            on_read_error: self.on_read_error,
            on_write_error: self.on_write_error,
            ..NamespaceSpec::default()
        }
    }

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
}

/// Configuration of one NVM subsystem for other hosts, by NVMe over TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmeTcpSpec {
    /// Name of the disk.
    pub name: Option<String>,
    /// Address for hosts.
    pub listen: Option<SocketAddr>,
    /// NQNs of the permitted hosts; all hosts are permitted without it.
    pub hosts: Option<Names>,
    /// File of the permitted hosts, with the secrets that authenticate them.
    pub host_keys: Option<PathBuf>,
    /// Model number.
    pub model: Option<String>,
    /// Serial number.
    pub serial: Option<String>,
    /// Firmware revision.
    pub firmware: Option<String>,
    /// The subsystem's NQN.
    pub subnqn: Option<String>,
    /// Volatile write cache on after power-on.
    pub write_cache: Option<bool>,
    /// I/O queues of each host.
    pub io_queues: Option<u16>,
    /// Entries of each of these.
    pub queue_entries: Option<u16>,
    /// Largest transfer: 4 KiB shifted left by this.
    pub mdts: Option<u8>,
    /// Associations at a time.
    pub max_hosts: Option<u16>,
    /// Namespaces of the subsystem.
    pub namespaces: Vec<NamespaceSpec>,
    /// Location in the configuration file.
    pub origin: Origin,
}

impl NvmeTcpSpec {
    /// A subsystem of one volume at an address; the URL's options that are the namespace's are
    /// taken out of it.
    ///
    /// # Errors
    /// One of them, or the address, cannot be read.
    pub fn parse(address: &str, volume: &str) -> Result<Self> {
        let mut spec = Self {
            namespaces: vec![url::parse(volume)?],
            ..Self::default()
        };
        let listen = spec.listen.set_text(OsStr::new(address));
        listen.map_err(|why| anyhow!("{address}: {why}"))?;
        Ok(spec)
    }

    /// Returns the address where hosts connect, which a configuration has to state.
    pub fn listen(&self) -> SocketAddr {
        self.listen.unwrap_or(NOWHERE)
    }

    /// Returns the address in the form of a path, like those of sockets.
    pub fn address(&self) -> PathBuf {
        format!("tcp://{}", self.listen()).into()
    }

    /// Returns the name, or the address of a subsystem without a name.
    pub fn any_name(&self) -> String {
        let own = self.name.clone();
        own.unwrap_or_else(|| format!("tcp-{}", self.listen()))
    }

    /// Sets the NSIDs of namespaces that have none.
    pub fn number_namespaces(&mut self) {
        number(&mut self.namespaces);
    }

    /// The IDs of its namespaces.
    pub fn nsids(&self) -> Vec<u32> {
        nsids(&self.namespaces)
    }
}

/// No address that anybody could listen at.
const NOWHERE: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));

fn nsids(namespaces: &[NamespaceSpec]) -> Vec<u32> {
    let namespaces = namespaces.iter().zip(1..);
    let nsids = namespaces.map(|(namespace, place)| namespace.nsid.unwrap_or(place));
    nsids.collect()
}

/// Sets the NSIDs of namespaces that have none, by their positions.
fn number(namespaces: &mut [NamespaceSpec]) {
    for (namespace, nsid) in namespaces.iter_mut().zip(1..) {
        namespace.nsid.get_or_insert(nsid);
    }
}

/// Configuration of one block device of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UblkSpec {
    /// Name of the disk.
    pub name: Option<String>,
    /// Path or URL.
    pub volume: Url,
    /// N of `/dev/ublkbN`; the kernel's choice when not given.
    pub id: Option<u32>,
    /// Queues: each is served by one worker.
    pub queues: Option<u16>,
    /// Requests of each queue.
    pub depth: Option<u16>,
    /// Logical block size in bytes.
    pub block_size: Option<u32>,
    /// Refuse writes.
    pub read_only: Option<bool>,
    /// Error policy for reads.
    pub on_read_error: Option<OnReadError>,
    /// Error policy for other requests.
    pub on_write_error: Option<OnWriteError>,
    /// The device outlives a killed process, and waits for the next one.
    pub recover: Option<bool>,
    /// Location in the configuration file.
    pub origin: Origin,
}

impl UblkSpec {
    /// Queues of the device.
    pub fn queues(&self) -> u16 {
        self.queues.unwrap_or(1)
    }

    /// Requests of each queue.
    pub fn depth(&self) -> u16 {
        self.depth.unwrap_or(128)
    }

    /// Returns the volume as a namespace, to be opened like one.
    pub fn namespace(&self) -> NamespaceSpec {
        NamespaceSpec {
            volume: self.volume.clone(),
            block_size: self.block_size,
            read_only: self.read_only,
            on_read_error: self.on_read_error,
            on_write_error: self.on_write_error,
            origin: self.origin.clone(),
            ..NamespaceSpec::default()
        }
    }
}

/// Workers at most.
pub const MAX_WORKERS: u16 = 256;

/// Time in seconds that the end waits for devices and servers that do not answer: less than an
/// administrator waits.
const STOP_TIMEOUT: u64 = 4;

/// Options of every thread that serves, whatever it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopOptions {
    /// How long to poll after the last work.
    pub idle_window: IdleWindow,
    /// Register guests' memory with the kernel (io_uring's fixed buffers).
    pub pin_memory: bool,
    /// A thread of the kernel takes the requests (io_uring's SQPOLL).
    pub sqpoll: bool,
    /// Time that the end waits for devices and servers that do not answer.
    pub stop_timeout: Duration,
}

impl LoopOptions {
    /// Returns the options of a thread's ring.
    pub fn io(&self) -> IoOptions {
        IoOptions {
            fixed_buffers: self.pin_memory,
            sqpoll: self.sqpoll,
            stop_timeout: self.stop_timeout,
            ..IoOptions::default()
        }
    }
}

/// Limits of each client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientLimits {
    /// Windows of guest memory that a client of a controller may map, which it is sent as
    /// `max_dma_maps`; the protocol's default if `None`.
    pub windows: Option<u16>,
    /// Memory files and their bytes.
    pub memory: MemoryLimits,
    /// Maximum number of connections to each socket in a second.
    pub connects: ConnectRate,
}

/// Options of the whole process.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Limits of each client.
    pub clients: ClientLimits,
    /// Polling and I/O options of each thread.
    pub polling: LoopOptions,
    /// Time limit for files and block devices that another process had before.
    pub previous: PreviousProcess,
    /// Worker threads: controllers, exports and queues of block devices are assigned to them in
    /// turn.
    pub workers: u16,
    /// Distribution of a controller's queues over several workers.
    pub spread: Spread,
    /// CPUs to pin the workers to, one each, in turn; no pinning when empty.
    pub cpus: Vec<usize>,
    /// The control socket.
    pub control: Option<PathBuf>,
    /// Address for Prometheus.
    pub metrics: Option<SocketAddr>,
    /// Group with read-only access, at a socket beside the control socket.
    pub control_group: Option<Principal>,
    /// Sandbox of the process.
    pub sandbox: SandboxMode,
    /// Keeper of the disks' descriptors, for the next process.
    pub keeper: KeeperMode,
    /// The configuration file, or folder, that the process has read.
    pub read_from: Option<PathBuf>,
    /// Folders, files and servers that may be opened at run time.
    pub allow: Vec<PathBuf>,
    /// File of the disks that were added at run time.
    pub state: Option<PathBuf>,
    /// Rule for default identifiers.
    pub identity: IdentityRule,
    /// Options of a daemon. Its disks may change: room is left for them.
    pub daemon: Option<Daemon>,
    /// Disks that the process before did not serve.
    pub unavailable: Unavailable,
    /// Settings of volumes that were changed while earlier processes served.
    pub settings: AllSettings,
}

/// Options of a process that adds and removes disks.
#[derive(Clone, Debug, Default)]
pub struct Daemon {
    /// Path of the configuration, for a reload.
    pub config: Option<PathBuf>,
    /// Process options of the configuration.
    pub process: ProcessSpec,
    /// Disks that an earlier process has kept because they were added at run time.
    pub kept: Vec<DiskSpec>,
    /// Disks of the configuration as it was read last. The served ones may have changed since.
    pub file: BTreeMap<String, DiskSpec>,
    /// No other process keeps its disks in the same file.
    pub _lock: Option<Arc<StateLock>>,
}

impl ServeOptions {
    /// Returns the source of a disk of this name, among those that are served from the start.
    pub fn source(&self, name: &str) -> Source {
        let kept = self.daemon.iter().flat_map(|daemon| &daemon.kept);
        if kept.into_iter().any(|disk| disk.name() == name) {
            Source::Runtime
        } else {
            Source::Config
        }
    }

    /// Returns whether a disk may be unavailable if its volumes cannot be opened, while all other
    /// disks are served. A process that replaces another version has to serve all disks that the
    /// other version serves.
    pub fn may_be_unavailable(&self, name: &str) -> bool {
        if keep::is_replacement() {
            self.unavailable.disks.contains(name)
        } else {
            self.daemon.is_some() || keep::is_successor()
        }
    }

    /// Whether a disk is left out that cannot be served although its volumes are open.
    pub fn may_be_left_out(&self, name: &str) -> bool {
        if keep::is_replacement() {
            self.unavailable.disks.contains(name)
        } else {
            self.source(name) == Source::Runtime || keep::is_successor()
        }
    }

    /// Splits the disks that an earlier process has kept into those that can be served beside the
    /// configured ones, and the rest.
    pub fn kept_beside(&self, configured: &Specs) -> (Specs, Vec<UnavailableDisk>) {
        let kept = self.daemon.as_ref().map_or(&[][..], |daemon| &daemon.kept);
        beside(configured, kept, self.control.as_deref())
    }
}

/// The process, whatever it serves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessSpec {
    /// How long a worker polls after the last work.
    pub idle_window: Option<IdleWindow>,
    /// Register guests' memory with the kernel.
    pub pin_memory: Option<bool>,
    /// A thread of the kernel takes requests.
    pub sqpoll: Option<bool>,
    /// Seconds that the end waits for devices and servers that do not answer.
    pub stop_timeout: Option<u16>,
    /// Seconds that volumes are waited for which a killed process had before.
    pub previous_timeout: Option<u32>,
    /// Worker threads.
    pub workers: Option<u16>,
    /// Distribution of a controller's queues over workers.
    pub spread: Option<Spread>,
    /// CPUs of the workers.
    pub cpus: Option<Vec<usize>>,
    /// Windows of guest memory of one client.
    pub client_windows: Option<u16>,
    /// Bytes of one client's memory files.
    pub client_memory: Option<Size>,
    /// Maximum number of one client's memory files.
    pub client_files: Option<u32>,
    /// Clients that may connect to each socket in a second.
    pub client_connects: Option<u32>,
    /// Default access of sockets.
    pub access: SocketAccess,
    /// Control socket.
    pub control: Option<PathBuf>,
    /// Address for Prometheus.
    pub metrics: Option<SocketAddr>,
    /// Group with read-only access.
    pub control_group: Option<Principal>,
    /// Sandbox of the process.
    pub sandbox: Option<SandboxMode>,
    /// Keeper of the disks' descriptors.
    pub keeper: Option<KeeperMode>,
    /// Folders, files and servers that may be opened at run time.
    pub allow: Option<Paths>,
    /// File of the disks that were added at run time.
    pub state: Option<PathBuf>,
    /// Rule for default identifiers.
    pub identity: Option<IdentityRule>,
}

impl ProcessSpec {
    /// Returns the options with defaults for absent ones; the default of `workers` depends on the
    /// command.
    pub fn options(self, workers: u16) -> ServeOptions {
        let memory = MemoryLimits::DEFAULT;
        ServeOptions {
            clients: ClientLimits {
                windows: self.client_windows,
                memory: MemoryLimits {
                    mappings: self.client_files.map_or(memory.mappings, u64::from),
                    bytes: self.client_memory.map_or(memory.bytes, |Size(bytes)| bytes),
                },
                connects: self.client_connects.map(ConnectRate).unwrap_or_default(),
            },
            polling: LoopOptions {
                idle_window: self.idle_window.unwrap_or_default(),
                pin_memory: self.pin_memory.unwrap_or(false),
                sqpoll: self.sqpoll.unwrap_or(false),
                stop_timeout: Duration::from_secs(
                    self.stop_timeout.map_or(STOP_TIMEOUT, u64::from),
                ),
            },
            previous: PreviousProcess {
                limit: self.previous_timeout.map_or_else(
                    || PreviousProcess::default().limit,
                    |seconds| Duration::from_secs(seconds.into()),
                ),
                ..PreviousProcess::default()
            },
            workers: self.workers.unwrap_or(workers),
            spread: self.spread.unwrap_or_default(),
            cpus: self.cpus.unwrap_or_default(),
            control: self.control,
            metrics: self.metrics,
            control_group: self.control_group,
            sandbox: self.sandbox.unwrap_or_default(),
            keeper: self.keeper.unwrap_or_default(),
            read_from: None,
            allow: self.allow.map(|Paths(paths)| paths).unwrap_or_default(),
            state: self.state,
            identity: self.identity.unwrap_or_default(),
            daemon: None,
            unavailable: Unavailable::default(),
            settings: AllSettings::default(),
        }
    }
}

/// Configuration of all disks of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Specs {
    /// NVMe controllers.
    pub controllers: Vec<ControllerSpec>,
    /// virtio block devices.
    pub vhost_user_blk: Vec<VhostBlkSpec>,
    /// Subsystems for other hosts.
    pub nvme_tcp: Vec<NvmeTcpSpec>,
    /// Block devices of the host.
    pub ublk: Vec<UblkSpec>,
    /// The process itself.
    pub process: ProcessSpec,
}

/// Each is read as a table of a configuration file.
macro_rules! tables {
    ($($spec:ty),*) => {$(
        impl<'de> Deserialize<'de> for $spec {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                file::table(deserializer)
            }
        }
    )*};
}

tables!(
    Specs,
    ProcessSpec,
    ControllerSpec,
    NamespaceSpec,
    VhostBlkSpec,
    NvmeTcpSpec,
    UblkSpec
);

/// Parses a configuration file; [`Origin`] of each part names the file and the line.
///
/// # Errors
/// The text is not TOML, has keys that are unknown, or values that cannot be read.
pub fn parse_config(path: &Path, text: &str) -> Result<Specs> {
    let mut specs: Specs = toml::from_str(text).with_context(|| format!("{}", path.display()))?;
    origin::note(&mut specs, path, text);
    // The options of a volume's URL have the same meaning as on the command line.
    specs.take_url_options()?;
    Ok(specs)
}

/// Error text for a configuration without disks.
pub const NO_DISKS: &str = "describes no disk; add a table [[controller]], [[vhost-user-blk]], \
                            [[nvme-tcp]] or [[ublk]], with a volume (docs/reference.md has the keys)";

/// Reads a configuration that has to name something to serve.
pub fn read_config(path: &Path) -> Result<Specs> {
    let specs = crate::config::read(path)?;
    ensure!(!specs.is_empty(), "{}: {NO_DISKS}", path.display());
    Ok(specs)
}

impl Specs {
    /// Takes the options of the namespace or export out of all volumes' URLs.
    ///
    /// # Errors
    /// An option cannot be read.
    pub fn take_url_options(&mut self) -> Result<()> {
        let of_targets = self.nvme_tcp.iter_mut().flat_map(|t| &mut t.namespaces);
        let namespaces = self.controllers.iter_mut().flat_map(|c| &mut c.namespaces);
        for namespace in namespaces.chain(of_targets) {
            let taken = url::take(namespace);
            namespace.origin.place("volume", taken)?;
        }
        for export in &mut self.vhost_user_blk {
            let taken = url::take(export);
            export.origin.place("volume", taken)?;
        }
        for disk in &mut self.ublk {
            let taken = url::take(disk);
            disk.origin.place("volume", taken)?;
        }
        Ok(())
    }

    /// Adds the disks of another configuration.
    pub fn extend(&mut self, other: Specs) {
        self.controllers.extend(other.controllers);
        self.vhost_user_blk.extend(other.vhost_user_blk);
        self.nvme_tcp.extend(other.nvme_tcp);
        self.ublk.extend(other.ublk);
    }

    /// Removes all disks except those with a wanted name.
    pub fn retain_disks(&mut self, wanted: impl Fn(&str) -> bool) {
        self.controllers.retain(|spec| wanted(&spec.any_name()));
        self.vhost_user_blk.retain(|spec| wanted(&spec.any_name()));
        self.nvme_tcp.retain(|spec| wanted(&spec.any_name()));
        self.ublk.retain(|spec| wanted(&spec.any_name()));
    }

    /// Returns whether there is no disk.
    pub fn is_empty(&self) -> bool {
        self.controllers.is_empty()
            && self.vhost_user_blk.is_empty()
            && self.nvme_tcp.is_empty()
            && self.ublk.is_empty()
    }
}

impl ControllerSpec {
    /// Returns the name, or the name of the socket's file for a controller without a name.
    pub fn any_name(&self) -> String {
        let own = self.name.clone();
        own.unwrap_or_else(|| disk_name(&self.socket))
    }

    /// Sets the NSIDs of namespaces that have none.
    pub fn number_namespaces(&mut self) {
        number(&mut self.namespaces);
    }

    /// The IDs of its namespaces.
    pub fn nsids(&self) -> Vec<u32> {
        nsids(&self.namespaces)
    }
}

impl VhostBlkSpec {
    /// Returns the name, or the name of the socket's file for an export without a name.
    pub fn any_name(&self) -> String {
        let own = self.name.clone();
        own.unwrap_or_else(|| disk_name(&self.socket))
    }
}

impl UblkSpec {
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

/// Returns bytes as hexadecimal digits.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `N` bytes from 2*`N` hexadecimal digits; dashes are ignored, so that UUIDs may be given as they
/// are written.
pub fn hex<const N: usize>(name: &str, text: &str) -> Result<[u8; N]> {
    let digits: Vec<u32> = text
        .chars()
        .filter(|c| *c != '-')
        .map(|c| c.to_digit(16).unwrap_or(16))
        .collect();
    ensure!(
        digits.len() == 2 * N && digits.iter().all(|d| *d < 16),
        "{name} \"{text}\": {} hexadecimal digits are needed",
        2 * N
    );
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair.iter().fold(0, |acc, d| acc << 4 | *d as u8);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Spec;

    #[test]
    fn every_documented_namespace_option_is_parsed() {
        let mut count = 0;
        for row in NamespaceSpec::ROWS.iter().filter(|row| row.url) {
            let values = match row.form {
                "N" => "7",
                "HEX" => "0123456789abcdef",
                alternatives => alternatives,
            };
            for value in values.split('|') {
                let value = match value {
                    "SIZE" => "64K",
                    "PATH" => "b.raw",
                    "BITS" => "0xff00",
                    value => value,
                };
                let text = format!("a.raw?{}={value}", row.key);
                let spec: NamespaceSpec = url::parse(&text).unwrap();
                assert_eq!(spec.volume.0, "a.raw");
                assert_ne!(spec, url::parse("a.raw").unwrap(), "{text}");
                count += 1;
            }
        }
        assert_eq!(count, 39);
    }

    #[test]
    fn namespace_options_are_removed_from_url() {
        let text = "/d/a.raw?direct=off&block-size=4096&nsid=3&lock=off";
        let spec = url::parse::<NamespaceSpec>(text).unwrap();
        assert_eq!(spec.volume.0, "/d/a.raw?direct=off&lock=off");
        assert_eq!((spec.block_size, spec.nsid), (Some(4096), Some(3)));
        assert_eq!(
            url::parse::<NamespaceSpec>("mem://1G?nsid=2")
                .unwrap()
                .volume
                .0,
            "mem://1G"
        );
        for bad in ["a?block-size=big", "a?what", "a?nsid=1&nsid=1"] {
            assert!(url::parse::<NamespaceSpec>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn hex_identifiers_are_parsed() {
        assert_eq!(
            hex::<8>("eui64", "0011223344556677").unwrap(),
            [0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77]
        );
        assert_eq!(hex::<2>("x", "ab-CD").unwrap(), [0xab, 0xcd]);
        for bad in ["", "00", "0011223344556677ff", "001122334455667g", "äöüß"] {
            assert!(hex::<8>("eui64", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn config_file_is_parsed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vnvme.toml");
        std::fs::write(
            &path,
            r#"
            [[controller]]
            socket = "/run/vm0.sock"
            doorbells = "mapped"
            write-cache = false
            [[controller.namespace]]
            volume = "/disks/a.raw"
            block-size = 4096
            [[controller.namespace]]
            volume = "null://1T"
            read-only = true
            [[controller.namespace]]
            volume = { url = "/disks/b.raw", direct = false, iops = 1000, partlabel = "a&b" }
            [[vhost-user-blk]]
            socket = "/run/vm1.sock"
            volume = { url = "/disks/c.raw", iops = 1000 }
            queue-size = 256
            "#,
        )
        .unwrap();
        let read = read_config(&path).unwrap();
        assert_eq!(read.vhost_user_blk.len(), 1);
        assert_eq!(read.vhost_user_blk[0].volume.0, "/disks/c.raw?iops=1000");
        assert_eq!(read.vhost_user_blk[0].queue_size, Some(256));
        assert_eq!(read.vhost_user_blk[0].write_cache, None);
        let specs = read.controllers;
        assert_eq!(specs.len(), 1);
        assert_eq!(specs[0].doorbells, Some(DoorbellMode::Mapped));
        assert_eq!(
            (specs[0].write_cache, specs[0].shadow_doorbells),
            (Some(false), None)
        );
        assert_eq!(specs[0].namespaces[0].block_size, Some(4096));
        assert!(specs[0].namespaces[1].is_read_only());
        let options = specs[0].namespaces[2].volume.split_once('?').unwrap().1;
        let options: std::collections::BTreeSet<&str> = options.split('&').collect();
        let wanted = ["direct=off", "iops=1000", "partlabel=a%26b"];
        assert_eq!(options, wanted.into());
        std::fs::write(
            &path,
            "[[controller]]\nsocket = \"a\"\nserail = \"typo\"\nnamespace = []",
        )
        .unwrap();
        let error = format!("{:#}", read_config(&path).unwrap_err());
        assert!(error.contains("serail"), "{error}");
    }

    #[test]
    fn export_options_are_removed_from_url() {
        let text = "/d/a.raw?direct=off&queues=4&serial=ROOT&queue-size=256&write-cache=off&iops=9";
        let spec = VhostBlkSpec::parse("/run/a", text).unwrap();
        assert_eq!(spec.socket, Path::new("/run/a"));
        assert_eq!(spec.volume.0, "/d/a.raw?direct=off&iops=9");
        assert_eq!((spec.queues, spec.queue_size), (Some(4), Some(256)));
        assert_eq!(spec.serial.as_deref(), Some("ROOT"));
        assert_eq!((spec.write_cache, spec.read_only), (Some(false), None));
        let plain = VhostBlkSpec::parse("s", "mem://1G?block-size=4096").unwrap();
        assert_eq!((&*plain.volume, plain.block_size), ("mem://1G", Some(4096)));
        for bad in [
            "a?queues=many",
            "a?queues=70000",
            "a?write-cache=maybe",
            "a?what",
        ] {
            assert!(VhostBlkSpec::parse("s", bad).is_err(), "{bad}");
        }
    }
}
