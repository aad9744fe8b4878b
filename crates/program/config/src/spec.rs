//! Configuration of the served disks, from the command line or a configuration file. An absent
//! option is `None`; [`crate::options`] defines the options and their syntax.

use crate::access::{Principal, SocketAccess};
use crate::ana::AnaState;
use crate::choices::{IdentityRule, KeeperMode, PathChoice, SandboxMode, Spread};
use crate::disk::no_disks;
use crate::error_policy::{self, OnReadError, OnWriteError};
use crate::options::{Bits, Paths, Size, Url};
use crate::origin::{self, Origin};
use anyhow::{Context, Result, ensure};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use worker::IdleWindow;

pub use crate::disk::{ControllerSpec, DoorbellMode, NvmeTcpSpec, Specs, UblkSpec, VhostBlkSpec};

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

/// Maximum number of worker threads.
pub const MAX_WORKERS: u16 = 256;

/// Process options as configured, whatever the process serves; `None` stands for the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessSpec {
    /// Time for which a worker polls on after the last work.
    pub idle_window: Option<IdleWindow>,
    /// Maximum interval in microseconds between two polls of idle guests with mapped doorbells.
    pub max_poll_interval: Option<u32>,
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

/// Reads a configuration that has to name something to serve.
pub fn read_config(path: &Path) -> Result<Specs> {
    let specs = crate::files::read(path)?;
    ensure!(!specs.is_empty(), "{}: {}", path.display(), no_disks());
    Ok(specs)
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
    use crate::options::{Spec, url};

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
        assert_eq!(
            read.vhost_user_blk[0].namespace.volume.0,
            "/disks/c.raw?iops=1000"
        );
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
        assert_eq!(spec.namespace.volume.0, "/d/a.raw?direct=off&iops=9");
        assert_eq!((spec.queues, spec.queue_size), (Some(4), Some(256)));
        assert_eq!(spec.serial.as_deref(), Some("ROOT"));
        assert_eq!(
            (spec.write_cache, spec.namespace.read_only),
            (Some(false), None)
        );
        let plain = VhostBlkSpec::parse("s", "mem://1G?block-size=4096").unwrap();
        let plain = plain.namespace;
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
