//! Configuration of the served disks, from the command line or a configuration file. An absent
//! option is `None`; [`crate::options`] defines the options and their syntax.

use crate::access::{Principal, SocketAccess};
use crate::ana::AnaState;
use crate::choices::{IdentityRule, KeeperMode, PathChoice, SandboxMode, Spread};
use crate::disk::disk_name;
use crate::error_policy::{self, OnReadError, OnWriteError};
use crate::options::{Bits, Names, Paths, Setting, Size, Url, file, url};
use crate::origin::{self, Origin};
use anyhow::{Context, Result, anyhow, ensure};
use clap::ValueEnum;
use controller::Cloud;
use serde::{Deserialize, Deserializer};
use std::ffi::OsStr;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use worker::IdleWindow;

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

/// Configuration of one namespace: a volume, and how hosts see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceSpec {
    /// Path or URL of the volume that stores the blocks.
    pub volume: Url,
    /// Namespace ID; `None` for its position in the configuration, starting at 1.
    pub nsid: Option<u32>,
    /// Logical block size in bytes; `None` for that of the volume.
    pub block_size: Option<u32>,
    /// Whether writes are refused.
    pub read_only: Option<bool>,
    /// Error policy for failed reads.
    pub on_read_error: Option<OnReadError>,
    /// Error policy for failed requests other than reads.
    pub on_write_error: Option<OnWriteError>,
    /// NGUID in 32 hexadecimal digits; `None` for one made from the volume's identity.
    pub nguid: Option<String>,
    /// EUI-64 in 16 hexadecimal digits; `None` for one made from the volume's identity.
    pub eui64: Option<String>,
    /// Namespace UUID; `None` for one made from the NGUID, or for none, by the rule for
    /// identifiers.
    pub uuid: Option<String>,
    /// Path of commands to an NVMe device; `None` for the direct path where it is possible.
    pub path: Option<PathChoice>,
    /// File that stores the reservations of a namespace in a subsystem.
    pub reservations: Option<PathBuf>,
    /// Zone size in bytes; `None` for a namespace without zones.
    pub zone_size: Option<Size>,
    /// Writable capacity of each zone in bytes.
    pub zone_capacity: Option<Size>,
    /// Maximum number of open zones.
    pub max_open_zones: Option<u32>,
    /// Maximum number of active zones.
    pub max_active_zones: Option<u32>,
    /// Size in bytes of a Zone Random Write Area (ZRWA); `None` if zones have none.
    pub zrwa_size: Option<Size>,
    /// Granularity in bytes in which a Zone Random Write Area is flushed.
    pub zrwa_granularity: Option<Size>,
    /// Maximum number of zones that have a Zone Random Write Area at a time.
    pub zrwa_resources: Option<u32>,
    /// File that stores the states of the zones.
    pub zone_table: Option<PathBuf>,
    /// Number of placement handles (Flexible Data Placement); `None` for none.
    pub fdp_handles: Option<u32>,
    /// Size of a reclaim unit in bytes.
    pub fdp_unit: Option<Size>,
    /// File that stores the counts of the placement handles.
    pub fdp_table: Option<PathBuf>,
    /// File that stores the metadata of the blocks.
    pub metadata: Option<PathBuf>,
    /// Metadata size of a block in bytes; `None` for blocks without metadata.
    pub metadata_size: Option<u16>,
    /// Whether hosts transfer metadata interleaved with the data (extended LBA).
    pub metadata_extended: Option<bool>,
    /// Type of protection information in the metadata, 1 to 3; 0 for none.
    pub protection: Option<u8>,
    /// Size of the protection information guard in bits: 16, 32 or 64.
    pub guard: Option<u8>,
    /// Whether protection information is in the first bytes of the metadata, not in the last.
    pub protection_first: Option<bool>,
    /// Size of the storage tag in protection information, in bits.
    pub storage_tag: Option<u8>,
    /// Bit mask of the storage tag bits that are compared.
    pub storage_tag_mask: Option<Bits>,
    /// File that stores the LBA format that the host has chosen.
    pub format_file: Option<PathBuf>,
    /// ANA group of a namespace in a subsystem, equal for all disks of the subsystem.
    pub ana_group: Option<u32>,
    /// ANA state of that group for the host of this disk.
    pub ana_state: Option<AnaState>,
    /// Location of the namespace's table in the configuration file, for error messages.
    pub origin: Origin,
}

impl NamespaceSpec {
    /// Returns the files that store something beside the volume, with their configuration keys.
    pub fn kept_files(&self) -> Vec<(&'static str, PathBuf)> {
        let tables = [
            ("zone-table", &self.zone_table),
            ("fdp-table", &self.fdp_table),
            ("metadata", &self.metadata),
            ("format-file", &self.format_file),
            ("reservations", &self.reservations),
        ];
        let tables = tables.into_iter();
        let tables = tables.filter_map(|(key, path)| Some((key, path.clone()?)));
        let journal = volume::journal_of_url(&self.volume);
        let journal = journal.map(|path| ("atomic-journal", path));
        tables.chain(journal).collect()
    }

    /// Returns the ANA group of the namespace in its subsystem.
    pub fn ana_group(&self) -> u32 {
        self.ana_group.unwrap_or(1)
    }

    /// Returns whether writes to the namespace are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only.unwrap_or(false)
    }

    /// Returns the error policy of the namespace's volume.
    pub fn on_error(&self) -> volume::OnError {
        error_policy::policy(self.on_read_error, self.on_write_error)
    }
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
    /// Namespaces of the controller.
    pub namespaces: Vec<NamespaceSpec>,
    /// Location of the controller's table in the configuration file, for error messages.
    pub origin: Origin,
}

/// Configuration of one vhost-user-blk export: a socket for the VMM, and a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VhostBlkSpec {
    /// Name of the disk; `None` for one made from the socket's path.
    pub name: Option<String>,
    /// Path of the socket that the VMM connects to.
    pub socket: PathBuf,
    /// Owner, group and mode of the socket's file.
    pub access: SocketAccess,
    /// Path or URL of the volume that stores the blocks.
    pub volume: Url,
    /// Maximum number of request queues.
    pub queues: Option<u16>,
    /// Number of entries of a queue for which request slots are allocated.
    pub queue_size: Option<u16>,
    /// Serial number that the guest sees.
    pub serial: Option<String>,
    /// Logical block size in bytes; `None` for that of the volume.
    pub block_size: Option<u32>,
    /// Whether writes are refused.
    pub read_only: Option<bool>,
    /// Error policy for failed reads.
    pub on_read_error: Option<OnReadError>,
    /// Error policy for failed requests other than reads.
    pub on_write_error: Option<OnWriteError>,
    /// Whether the volatile write cache is enabled at first.
    pub write_cache: Option<bool>,
    /// Location of the export's table in the configuration file, for error messages.
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

/// Configuration of one NVM subsystem that other hosts reach over NVMe/TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmeTcpSpec {
    /// Name of the disk; `None` for its address.
    pub name: Option<String>,
    /// TCP address on which hosts connect.
    pub listen: Option<SocketAddr>,
    /// NQNs of the permitted hosts; `None` permits all hosts.
    pub hosts: Option<Names>,
    /// File with the NQNs of the permitted hosts and the secrets that authenticate them.
    pub host_keys: Option<PathBuf>,
    /// Model number that the controllers report.
    pub model: Option<String>,
    /// Serial number that the controllers report.
    pub serial: Option<String>,
    /// Firmware revision that the controllers report.
    pub firmware: Option<String>,
    /// NQN of the subsystem.
    pub subnqn: Option<String>,
    /// Whether the volatile write cache is enabled after power-on.
    pub write_cache: Option<bool>,
    /// Number of I/O queues that each host can create.
    pub io_queues: Option<u16>,
    /// Maximum number of entries of each I/O queue.
    pub queue_entries: Option<u16>,
    /// Maximum transfer size as MDTS: 4 KiB shifted left by this value.
    pub mdts: Option<u8>,
    /// Maximum number of hosts that are connected at a time (associations).
    pub max_hosts: Option<u16>,
    /// Namespaces of the subsystem.
    pub namespaces: Vec<NamespaceSpec>,
    /// Location of the subsystem's table in the configuration file, for error messages.
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

    /// Gives each namespace without an NSID the NSID of its position.
    pub fn number_namespaces(&mut self) {
        number(&mut self.namespaces);
    }

    /// Returns the IDs of the subsystem's namespaces.
    pub fn nsids(&self) -> Vec<u32> {
        nsids(&self.namespaces)
    }
}

/// Address that stands for a missing one; nothing can listen there.
const NOWHERE: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));

fn nsids(namespaces: &[NamespaceSpec]) -> Vec<u32> {
    let namespaces = namespaces.iter().zip(1..);
    let nsids = namespaces.map(|(namespace, place)| namespace.nsid.unwrap_or(place));
    nsids.collect()
}

/// Gives each namespace without an NSID the NSID of its position.
fn number(namespaces: &mut [NamespaceSpec]) {
    for (namespace, nsid) in namespaces.iter_mut().zip(1..) {
        namespace.nsid.get_or_insert(nsid);
    }
}

/// Configuration of one block device of this host (ublk).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UblkSpec {
    /// Name of the disk; `None` for that of its device.
    pub name: Option<String>,
    /// Path or URL of the volume that stores the blocks.
    pub volume: Url,
    /// Number N of the device `/dev/ublkbN`; `None` for one that the kernel chooses.
    pub id: Option<u32>,
    /// Number of queues, each of which one worker serves.
    pub queues: Option<u16>,
    /// Maximum number of outstanding requests of each queue.
    pub depth: Option<u16>,
    /// Logical block size in bytes; `None` for that of the volume.
    pub block_size: Option<u32>,
    /// Whether writes are refused.
    pub read_only: Option<bool>,
    /// Error policy for failed reads.
    pub on_read_error: Option<OnReadError>,
    /// Error policy for failed requests other than reads.
    pub on_write_error: Option<OnWriteError>,
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

/// Maximum number of worker threads.
pub const MAX_WORKERS: u16 = 256;

/// Process options as configured, whatever the process serves; `None` stands for the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessSpec {
    /// Time for which a worker polls on after the last work.
    pub idle_window: Option<IdleWindow>,
    /// Whether guest memory is pinned for io_uring (fixed buffers).
    pub pin_memory: Option<bool>,
    /// Whether a kernel thread takes requests from the io_uring (SQPOLL).
    pub sqpoll: Option<bool>,
    /// Maximum time in seconds that the end waits for devices and servers that do not answer.
    pub stop_timeout: Option<u16>,
    /// Maximum time in seconds to wait for volumes that a killed process had open.
    pub previous_timeout: Option<u32>,
    /// Number of worker threads.
    pub workers: Option<u16>,
    /// Distribution of a controller's queues over the workers.
    pub spread: Option<Spread>,
    /// CPUs to which the workers are pinned.
    pub cpus: Option<Vec<usize>>,
    /// Maximum number of guest memory windows of one client.
    pub client_windows: Option<u16>,
    /// Maximum total size in bytes of one client's memory files.
    pub client_memory: Option<Size>,
    /// Maximum number of one client's memory files.
    pub client_files: Option<u32>,
    /// Maximum number of clients that may connect to each socket in a second.
    pub client_connects: Option<u32>,
    /// Owner, group and mode of sockets for which none are configured.
    pub access: SocketAccess,
    /// Path of the control socket.
    pub control: Option<PathBuf>,
    /// TCP address for Prometheus.
    pub metrics: Option<SocketAddr>,
    /// Group with read-only access to the management API.
    pub control_group: Option<Principal>,
    /// Whether the process enters a sandbox.
    pub sandbox: Option<SandboxMode>,
    /// Holder of the disks' descriptors while the process restarts.
    pub keeper: Option<KeeperMode>,
    /// Folders, files and servers that may be opened at run time.
    pub allow: Option<Paths>,
    /// File that stores the disks that were added at run time.
    pub state: Option<PathBuf>,
    /// Rule by which identifiers that are not configured are made.
    pub identity: Option<IdentityRule>,
}

/// Configuration of a process: its disks, and the process options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Specs {
    /// NVMe controllers that VMMs use over vfio-user.
    pub controllers: Vec<ControllerSpec>,
    /// virtio block devices that VMMs use over vhost-user.
    pub vhost_user_blk: Vec<VhostBlkSpec>,
    /// NVMe/TCP subsystems for other hosts.
    pub nvme_tcp: Vec<NvmeTcpSpec>,
    /// ublk block devices of this host.
    pub ublk: Vec<UblkSpec>,
    /// Options of the process itself.
    pub process: ProcessSpec,
}

/// Implements reading of these types from tables of a configuration file.
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
    let specs = crate::files::read(path)?;
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

    /// Adds the disks of another configuration to this one.
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

    /// Returns whether the configuration names no disk.
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

    /// Gives each namespace without an NSID the NSID of its position.
    pub fn number_namespaces(&mut self) {
        number(&mut self.namespaces);
    }

    /// Returns the IDs of the controller's namespaces.
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
