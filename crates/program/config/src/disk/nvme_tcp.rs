//! NVMe/TCP subsystem for other hosts: `[[nvme-tcp]]`.

use super::{Address, Disk, disk_fields};
use crate::check::{UniqueValues, check_config};
use crate::options::tables::{firmware, mdts, model, name, serial, subnqn, write_cache};
use crate::options::{Flag, Names, Row, Setting, Spec, file, url};
use crate::origin::Origin;
use crate::spec::NamespaceSpec;
use anyhow::{Result, anyhow};
use controller::ControllerConfig;
use nvme::identify::Nqn;
use serde::de::MapAccess;
use std::ffi::OsStr;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;

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

    /// Returns the controller configuration of an NVMe/TCP subsystem for other hosts.
    pub fn config(&self, serial: String) -> ControllerConfig {
        let default = ControllerConfig::default();
        ControllerConfig {
            name: self.any_name(),
            model: self.model.clone().unwrap_or(default.model),
            firmware: self.firmware.clone().unwrap_or(default.firmware),
            serial,
            mdts: self.mdts.unwrap_or(default.mdts),
            write_cache: self.write_cache.unwrap_or(default.write_cache),
            ..ControllerConfig::default()
        }
    }

    /// Returns the name, or the address of a subsystem without a name.
    pub fn any_name(&self) -> String {
        let own = self.name.clone();
        own.unwrap_or_else(|| format!("tcp-{}", self.listen()))
    }
}

/// Address that stands for a missing one; nothing can listen there.
const NOWHERE: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));

impl Spec for NvmeTcpSpec {
    const TABLE: &'static str = "[[nvme-tcp]]";
    const NAMES: &'static str = "NVMe/TCP subsystems";
    const ABOUT: &'static str = "Volumes for other hosts, by NVMe over TCP; there may be several. Each has \
         `[[nvme-tcp.namespace]]` tables, at least one, with the keys of those of controllers.";
    const ROWS: &'static [Row<Self>] = &[
        name::<Self>(|t| &mut t.name).or("tcp- and the address"),
        Row::<Self>::new(
            "listen",
            "ADDRESS:PORT",
            "address to listen on; the standard port is 4420",
            |t| &mut t.listen,
        )
        .required(),
        Row::<Self>::new("hosts", "NQNS", "NQNs of the hosts that may connect", |t| {
            &mut t.hosts
        })
        .or("every host that can reach the address"),
        Row::<Self>::new(
            "host-keys",
            "PATH",
            "file of the hosts that may connect and their DH-HMAC-CHAP secrets: on each line an \
             NQN, its DHHC-1 secret, and optionally the secret of the subsystem. Without it, only \
             a loopback address can be listened on",
            |t| &mut t.host_keys,
        )
        .serve(Flag::default("host-keys")),
        write_cache(|t| &mut t.write_cache),
        model(|t| &mut t.model),
        serial(|t| &mut t.serial),
        firmware(|t| &mut t.firmware),
        subnqn(|t| &mut t.subnqn),
        Row::<Self>::new("io-queues", "N", "I/O queues of each host", |t| {
            &mut t.io_queues
        })
        .range(1, 64)
        .or("16"),
        Row::<Self>::new("queue-entries", "N", "entries of each I/O queue", |t| {
            &mut t.queue_entries
        })
        .range(2, 256)
        .or("128"),
        mdts(|t| &mut t.mdts),
        Row::<Self>::new("max-hosts", "N", "maximum number of connected hosts", |t| {
            &mut t.max_hosts
        })
        .range(1, 1024)
        .or("64"),
    ];
    const NESTED: &'static [(&'static str, bool)] = &[("namespace", true)];

    fn nested<'de, A: MapAccess<'de>>(&mut self, _: &str, map: &mut A) -> Result<(), A::Error> {
        self.namespaces = file::tables(map, "namespace", Self::TABLE)?;
        Ok(())
    }
}

impl Disk for NvmeTcpSpec {
    disk_fields!();

    fn address(&self) -> Address<'_> {
        Address::Tcp(self.listen())
    }

    fn namespaces(&self) -> &[NamespaceSpec] {
        &self.namespaces
    }

    fn namespaces_mut(&mut self) -> &mut [NamespaceSpec] {
        &mut self.namespaces
    }

    fn own_files(&self) -> Vec<(&'static str, PathBuf)> {
        let keys = self.host_keys.clone();
        keys.into_iter().map(|path| ("host-keys", path)).collect()
    }

    fn check(&self, seen: &mut UniqueValues<'_>) -> Result<()> {
        let (listen, origin) = (self.listen(), &self.origin);
        let address = listen.to_string();
        origin.place("listen", seen.enter("address", &address, &address))?;
        // Without host keys no host is authenticated.
        if !listen.ip().is_loopback() && self.host_keys.is_none() {
            let why = format!(
                "{listen}: hosts are not authenticated without a file of their secrets (host-keys): \
                 only an address of this host's own (127.0.0.0/8, [::1]) can be listened at"
            );
            return Err(origin.error("listen", why));
        }
        if let Some(Names(hosts)) = &self.hosts
            && hosts.is_empty()
        {
            // Not the same as no list, by which all may.
            let why = "an empty list: no host could connect".to_owned();
            return Err(origin.error("hosts", why));
        }
        if let Some(Names(hosts)) = &self.hosts
            && let Some(host) = hosts.iter().find(|host| Nqn::new(host).is_none())
        {
            let why = format!("\"{host}\" is not a valid host NQN");
            return Err(origin.error("hosts", why));
        }
        let serial = self.serial.clone().unwrap_or_default();
        let config = ControllerConfig {
            subnqn: self.subnqn.clone(),
            ..self.config(serial)
        };
        check_config(&config, origin)?;
        if self.namespaces.is_empty() {
            let why = format!("{listen}: no volume to serve");
            return Err(origin.error("", why));
        }
        seen.check_names(&self.serial, &self.subnqn, origin)?;
        seen.check_namespaces(None, &self.namespaces)
    }
}
