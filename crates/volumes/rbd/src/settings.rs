//! Settings of a cluster and its client, which librados needs before it connects.
//!
//! Files are read and names resolved when a volume is opened, because a sandboxed process can do
//! neither when it reconnects.

use crate::error::RbdError;
use crate::ffi::Cluster;
use std::fs;
use std::io;
use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Default TCP ports of monitors, one for each version of the messenger protocol.
const MONITORS: [u16; 2] = [3300, 6789];
/// Default TCP ports of all Ceph daemons except monitors.
const DAEMONS: Ports = Ports {
    first: 6800,
    last: 7568,
};
/// Maximum number of TCP ports that a sandbox permits for a cluster.
const MAX_PORTS: u16 = 2048;

/// Range of TCP ports, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports {
    /// First TCP port of the range.
    pub first: u16,
    /// Last TCP port of the range.
    pub last: u16,
}

impl FromStr for Ports {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = "it is FIRST-LAST, two port numbers, and at most 2048 ports";
        let (first, last) = text.split_once('-').ok_or(wrong)?;
        let (first, last): (u16, u16) = match (first.parse(), last.parse()) {
            (Ok(first), Ok(last)) => (first, last),
            _ => return Err(wrong),
        };
        if first > 0 && first <= last && last - first < MAX_PORTS {
            Ok(Self { first, last })
        } else {
            Err(wrong)
        }
    }
}

/// Configuration of a Ceph cluster and of the client that connects to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Path of the configuration file; `None` for the one that librados finds.
    pub conf: Option<PathBuf>,
    /// Name of the Ceph client, the NAME in `client.NAME`.
    pub id: String,
    /// File with the client's key; `None` for the one in the configuration.
    pub keyring: Option<PathBuf>,
    /// TCP ports of the cluster's daemons; `None` for the defaults.
    pub ports: Option<Ports>,
}

/// Settings of librados as text, from which a client is created without reading files.
#[derive(Debug, Clone)]
pub(crate) struct SettingsText {
    id: String,
    key: Option<String>,
    monitors: Option<String>,
    /// Names and values of the settings that were read from files.
    settings: Vec<(String, String)>,
}

/// Configuration settings that concern a client. They are saved and set again, because a sandboxed
/// process cannot read the configuration file.
const RETAINED_SETTINGS: [&str; 22] = [
    "fsid",
    "mon_host",
    "mon_initial_members",
    "auth_client_required",
    "auth_cluster_required",
    "auth_service_required",
    "ms_bind_msgr1",
    "ms_client_mode",
    "ms_mon_client_mode",
    "ms_mode",
    "public_network",
    "rados_osd_op_timeout",
    "rados_mon_op_timeout",
    "rbd_default_data_pool",
    "rbd_discard_granularity_bytes",
    "ms_compress_secure",
    "ms_bind_ipv4",
    "ms_bind_ipv6",
    "ms_connection_mode",
    "crush_location",
    "rbd_read_from_replica_policy",
    "rados_replica_read_policy",
];

impl Settings {
    fn error(&self, what: &'static str, error: io::Error) -> RbdError {
        RbdError::Settings {
            conf: match &self.conf {
                Some(conf) => format!("conf={}", conf.display()),
                None => {
                    "the cluster's configuration (/etc/ceph/ceph.conf, or that of conf=PATH)".into()
                }
            },
            what,
            error,
        }
    }

    /// Creates a client of the cluster that has read the configuration file.
    fn read(&self) -> Result<Cluster, RbdError> {
        let cluster = Cluster::new(&self.id).map_err(|error| self.error("no client", error))?;
        let conf = self
            .conf
            .as_deref()
            .map(|conf| conf.to_string_lossy().into_owned());
        let read = cluster.read_settings(conf.as_deref());
        read.map_err(|error| self.error("cannot be read", error))?;
        if let Some(keyring) = &self.keyring {
            let set = cluster.set("keyring", &keyring.to_string_lossy());
            set.map_err(|error| self.error("keyring=", error))?;
        }
        Ok(cluster)
    }

    /// Reads all files and resolves all names that the settings refer to.
    pub(crate) fn told(&self) -> Result<SettingsText, RbdError> {
        crate::ffi::load()?;
        let cluster = self.read()?;
        let get = |name: &str| cluster.get(name).ok().filter(|value| !value.is_empty());
        let kept = RETAINED_SETTINGS
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), get(name)?)));
        let settings: Vec<(String, String)> = kept.collect();
        let key = match get("key") {
            Some(key) => Some(key),
            None => get("keyring").and_then(|list| key(&list, &self.id)),
        };
        let wants_key = get("auth_client_required").is_none_or(|how| how != "none");
        if key.is_none() && wants_key {
            let places = get("keyring").unwrap_or_default();
            return Err(RbdError::NoKey {
                client: self.id.clone(),
                places: places.replace(',', ", "),
            });
        }
        let monitors = get("mon_host");
        let Some(hosts) = &monitors else {
            return Err(self.error(
                "names no monitors (mon host)",
                io::ErrorKind::NotFound.into(),
            ));
        };
        Ok(SettingsText {
            id: self.id.clone(),
            key,
            monitors: Some(addresses(hosts).unwrap_or_else(|| hosts.clone())),
            settings,
        })
    }

    /// Returns the TCP ports of the cluster's monitors and all other daemons.
    pub(crate) fn ports(&self) -> Result<Vec<u16>, RbdError> {
        crate::ffi::load()?;
        let cluster = self.read()?;
        let number = |name: &str| cluster.get(name).ok()?.parse::<u16>().ok();
        let daemons = self.ports.unwrap_or_else(|| {
            let (first, last) = (number("ms_bind_port_min"), number("ms_bind_port_max"));
            match first.zip(last) {
                Some((first, last)) if first <= last && last - first < MAX_PORTS => {
                    Ports { first, last }
                }
                _ => DAEMONS,
            }
        });
        let hosts = cluster.get("mon_host").unwrap_or_default();
        let mut ports: Vec<u16> = monitor_ports(&hosts);
        ports.extend(MONITORS);
        ports.extend(daemons.first..=daemons.last);
        ports.sort_unstable();
        ports.dedup();
        Ok(ports)
    }
}

impl SettingsText {
    /// Connects to the cluster within `limit`. `brief`: the client makes a single query, which must
    /// not take longer either.
    ///
    /// # Errors
    /// The error code of librados, as an I/O error.
    pub(crate) fn connect(&self, limit: Duration, brief: bool) -> io::Result<Cluster> {
        let cluster = Cluster::new(&self.id)?;
        for (name, value) in &self.settings {
            let _ = cluster.set(name, value);
        }
        if let Some(monitors) = &self.monitors {
            cluster.set("mon_host", monitors)?;
        }
        if let Some(key) = &self.key {
            cluster.set("key", key)?;
        }
        let seconds = limit.as_secs().max(1).to_string();
        cluster.set("client_mount_timeout", &seconds)?;
        if brief {
            cluster.set("rados_mon_op_timeout", &seconds)?;
            cluster.set("rados_osd_op_timeout", &seconds)?;
        }
        // A completed write must be in the cluster, because the guest continues if this process is
        // killed.
        cluster.set("rbd_cache", "false")?;
        for (name, value) in [
            // Requests must not block a worker until others have completed; the queue
            // limits their number.
            ("objecter_inflight_ops", "0"),
            ("objecter_inflight_op_bytes", "0"),
            // The library must not write a log file of its own.
            ("log_file", ""),
            ("log_to_stderr", "false"),
            ("err_to_stderr", "false"),
            ("log_to_syslog", "false"),
            ("admin_socket", ""),
        ] {
            let _ = cluster.set(name, value);
        }
        cluster.connect()?;
        Ok(cluster)
    }

    /// Returns whether the library copies written data within the call that starts the request.
    pub(crate) fn copies(cluster: &Cluster) -> bool {
        cluster.set("rbd_disable_zero_copy_writes", "true").is_ok()
    }
}

/// Reads the client's key from the first existing file in a list.
fn key(list: &str, id: &str) -> Option<String> {
    let paths = list.split([',', ';', ' ']).filter(|path| !path.is_empty());
    let mut files = paths.filter_map(|path| fs::read_to_string(Path::new(path)).ok());
    files.find_map(|text| key_in(&text, id))
}

/// Returns the key of `client.ID` in the text of a keyring, if there is one.
fn key_in(text: &str, id: &str) -> Option<String> {
    let section = format!("[client.{id}]");
    let lines = text.lines().map(str::trim);
    let mut of_client = lines.skip_while(|line| *line != section).skip(1);
    of_client
        .by_ref()
        .take_while(|line| !line.starts_with('['))
        .find_map(|line| {
            let (name, value) = line.split_once('=')?;
            (name.trim() == "key").then(|| value.trim().to_owned())
        })
}

/// Returns `mon_host` with addresses instead of names; `None` if it contains no names.
fn addresses(hosts: &str) -> Option<String> {
    if hosts.contains('[') {
        // The text contains addresses already (`[v2:1.2.3.4:3300,v1:...]`), or IPv6 ones.
        return None;
    }
    let mut named = false;
    let resolved: Vec<String> = hosts
        .split([',', ';', ' '])
        .filter(|host| !host.is_empty())
        .map(|host| {
            let (name, port) = match host.rsplit_once(':') {
                Some((name, port)) if port.parse::<u16>().is_ok() => (name, Some(port)),
                _ => (host, None),
            };
            if name.parse::<std::net::IpAddr>().is_ok()
                || name.starts_with("v1:")
                || name.starts_with("v2:")
            {
                return host.to_owned();
            }
            let Some(address) = (name, 0u16)
                .to_socket_addrs()
                .ok()
                .and_then(|mut all| all.next())
            else {
                return host.to_owned();
            };
            named = true;
            let ip = match address.ip() {
                std::net::IpAddr::V4(ip) => ip.to_string(),
                std::net::IpAddr::V6(ip) => format!("[{ip}]"),
            };
            match port {
                Some(port) => format!("{ip}:{port}"),
                None => ip,
            }
        })
        .collect();
    named.then(|| resolved.join(","))
}

/// Returns the TCP ports in the setting `mon_host`.
fn monitor_ports(hosts: &str) -> Vec<u16> {
    let words = hosts.split([',', ';', ' ', '[', ']']);
    let port = |word: &str| {
        // `v2:1.2.3.4:3300/0`
        let word = word.split('/').next()?;
        word.rsplit_once(':')?.1.parse().ok()
    };
    words.filter_map(port).filter(|port| *port > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monitor_port_is_bounded() {
        assert_eq!(
            "6800-7300".parse(),
            Ok(Ports {
                first: 6800,
                last: 7300
            })
        );
        for wrong in [
            "",
            "6800",
            "7300-6800",
            "0-5",
            "1-65535",
            "a-b",
            "6800-7300-1",
        ] {
            assert!(wrong.parse::<Ports>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn missing_configuration_is_named_with_its_option() {
        let mut settings = Settings {
            conf: Some("/nowhere/other.conf".into()),
            id: "admin".into(),
            keyring: None,
            ports: None,
        };
        let missing = "cannot be read: No such file or directory (os error 2)";
        let error = settings.told().unwrap_err().to_string();
        assert_eq!(error, format!("conf=/nowhere/other.conf: {missing}"));
        // The library's own path has no option.
        settings.conf = None;
        let error = settings.error("cannot be read", io::Error::from_raw_os_error(2));
        let name = "the cluster's configuration (/etc/ceph/ceph.conf, or that of conf=PATH)";
        assert_eq!(error.to_string(), format!("{name}: {missing}"));
    }

    #[test]
    fn keyring_finds_key_of_client() {
        let text = "[mon.]\n\tkey = AAA==\n[client.admin]\n\tkey = BBB==\n\tcaps mon = \"allow *\"\n\
                    [client.other]\ncaps = x\nkey=CCC==\n";
        assert_eq!(key_in(text, "admin").as_deref(), Some("BBB=="));
        assert_eq!(key_in(text, "other").as_deref(), Some("CCC=="));
        assert_eq!(key_in(text, "nobody"), None);
        assert_eq!(key_in("[client.a]\n[client.b]\nkey = D", "a"), None);
    }

    #[test]
    fn monitor_addresses_are_parsed() {
        let v2 = "[v2:127.0.0.1:43300/0],[v2:10.0.0.1:3300/0,v1:10.0.0.1:6789/0]";
        assert_eq!(monitor_ports(v2), [43300, 3300, 6789]);
        assert_eq!(monitor_ports("10.0.0.1, 10.0.0.2:7000"), [7000]);
        assert_eq!(addresses(v2), None);
        assert_eq!(addresses("10.0.0.1,10.0.0.2:6789"), None);
        let localhost = addresses("localhost:6789 10.0.0.1").unwrap();
        assert!(localhost == "127.0.0.1:6789,10.0.0.1" || localhost == "[::1]:6789,10.0.0.1");
    }
}
