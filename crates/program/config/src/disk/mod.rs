//! Disks as they are configured, or as a control client describes them.
//!
//! Each kind of disk has a file with its structure, its table of options and its implementation of
//! [`Disk`]. [`disk_kinds!`](crate::disk_kinds) is the list of all kinds, from which [`DiskSpec`],
//! [`Specs`] and all code follow that differs between kinds by nothing but the type.

mod controller;
mod nvme_tcp;
#[cfg(test)]
mod toy;
mod ublk;
mod vhost_user_blk;

pub use self::controller::{ControllerSpec, DoorbellMode};
pub use self::nvme_tcp::NvmeTcpSpec;
pub use self::ublk::UblkSpec;
pub use self::vhost_user_blk::VhostBlkSpec;

use crate::access::SocketAccess;
use crate::check::UniqueValues;
use crate::options::{Row, Spec, file, url};
use crate::origin::Origin;
use crate::spec::{NamespaceSpec, ProcessSpec};
use ::control::api::DiskKind;
use anyhow::{Context, Result};
use serde::de::MapAccess;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use volume::path_of_url;

/// Passes the list of all kinds of disks to the macro `$callback`, behind other arguments in
/// braces: for each kind its name in `DiskKind`, the structure of its configuration, and the field
/// of `Specs` with the disks of that kind.
#[macro_export]
macro_rules! disk_kinds {
    ($callback:ident $($arguments:tt)*) => {
        $callback! {
            { $($arguments)* }
            /// NVMe controller that a VMM uses over vfio-user.
            Controller(ControllerSpec), controllers;
            /// virtio block device that a VMM uses over vhost-user.
            VhostUserBlk(VhostBlkSpec), vhost_user_blk;
            /// NVMe/TCP subsystem for other hosts.
            NvmeTcp(NvmeTcpSpec), nvme_tcp;
            /// ublk block device of this host.
            Ublk(UblkSpec), ublk;
        }
    };
}

/// Configuration of a disk of one kind. Only methods about features that most kinds lack have a
/// default; a new kind answers all other questions.
pub trait Disk: DiskTable {
    /// Returns the name of the disk; without a configured one, that of its socket or volume.
    fn name(&self) -> String;
    /// Returns the configured name.
    fn name_mut(&mut self) -> &mut Option<String>;
    /// Sets the values that would otherwise depend on the position: the disk's name, the IDs of its
    /// namespaces.
    fn complete(&mut self) {
        *self.name_mut() = Some(self.name());
        if self.has_namespace_tables() {
            complete_namespaces(self.namespaces_mut());
        }
    }
    /// Returns the location of the disk's table in the configuration file.
    fn origin(&self) -> &Origin;
    /// Returns the location of the disk's table, to be set.
    fn origin_mut(&mut self) -> &mut Origin;
    /// Returns the place where clients find the disk.
    fn address(&self) -> Address<'_>;
    /// Returns the subsystem whose namespaces the disk shares with other disks, if any.
    fn subsystem(&self) -> Option<&str> {
        None
    }
    /// Returns the folder of the pool in which the guest creates namespaces, if any.
    fn pool(&self) -> Option<&Path> {
        None
    }
    /// Returns the disk's volumes, with their options. A kind with one volume has one namespace.
    fn namespaces(&self) -> &[NamespaceSpec];
    /// Returns the disk's volumes, to be changed.
    fn namespaces_mut(&mut self) -> &mut [NamespaceSpec];
    /// Returns the files of the disk itself, with their configuration keys.
    fn own_files(&self) -> Vec<(&'static str, PathBuf)>;
    /// Refuses values that the disk cannot have, and values that a disk before it has.
    ///
    /// # Errors
    /// A sentence for the user.
    fn check(&self, seen: &mut UniqueValues<'_>) -> Result<()>;
    /// Refuses a disk that has no namespace, and can get none while its process runs.
    ///
    /// # Errors
    /// A sentence for the user.
    fn check_filled(&self) -> Result<()> {
        Ok(())
    }
}

/// Part of [`Disk`] that follows from the table of options ([`Spec`]).
pub trait DiskTable {
    /// Returns whether the namespaces have tables of their own in the configuration file. Otherwise
    /// their options stand in the disk's table.
    fn has_namespace_tables(&self) -> bool;
    /// Takes the options of the namespace or disk out of the volumes' URLs.
    ///
    /// # Errors
    /// An option cannot be read.
    fn take_url_options(&mut self) -> Result<()>;
}

impl<S: Spec + Disk> DiskTable for S {
    fn has_namespace_tables(&self) -> bool {
        !S::NESTED.is_empty()
    }

    fn take_url_options(&mut self) -> Result<()> {
        if !self.has_namespace_tables() {
            let taken = url::take(self);
            return self.origin().place("volume", taken);
        }
        self.namespaces_mut().iter_mut().try_for_each(|namespace| {
            let taken = url::take(namespace);
            namespace.origin.place("volume", taken)
        })
    }
}

/// Implements the methods of [`Disk`] that return the fields `name` and `origin`.
macro_rules! disk_fields {
    () => {
        fn name(&self) -> String {
            self.any_name()
        }

        fn name_mut(&mut self) -> &mut Option<String> {
            &mut self.name
        }

        fn origin(&self) -> &Origin {
            &self.origin
        }

        fn origin_mut(&mut self) -> &mut Origin {
            &mut self.origin
        }
    };
}
use disk_fields;

/// Place where clients find a disk.
#[derive(Clone, Copy, Debug)]
pub enum Address<'a> {
    /// Unix socket, and the configured access to it.
    Socket(&'a Path, &'a SocketAccess),
    /// TCP address.
    Tcp(SocketAddr),
    /// Block device of this host, by its number; `None` for one that the kernel will choose.
    Device(Option<u32>),
}

impl Address<'_> {
    /// Returns the address as a path, under which the disk is counted. `None` for a device without
    /// a number yet.
    pub fn to_path(self) -> Option<PathBuf> {
        match self {
            Self::Socket(path, _) => Some(path.to_owned()),
            Self::Tcp(address) => Some(format!("tcp://{address}").into()),
            Self::Device(id) => id.map(device),
        }
    }
}

/// Returns the path of the ublk block device with this number.
pub fn device(id: u32) -> PathBuf {
    format!("/dev/ublkb{id}").into()
}

impl dyn Disk + '_ {
    /// Returns the path of the disk's socket; `None` for a kind without one.
    pub fn socket(&self) -> Option<&Path> {
        match self.address() {
            Address::Socket(path, _) => Some(path),
            Address::Tcp(_) | Address::Device(_) => None,
        }
    }

    /// Returns the configured access to the disk's socket; `None` for a kind without one.
    pub fn access(&self) -> Option<&SocketAccess> {
        match self.address() {
            Address::Socket(_, access) => Some(access),
            Address::Tcp(_) | Address::Device(_) => None,
        }
    }

    /// Returns whether the disk is a block device of this host.
    pub fn is_device(&self) -> bool {
        matches!(self.address(), Address::Device(_))
    }

    /// Returns the description of the disk in messages about its table, behind its kind.
    pub(crate) fn label(&self) -> String {
        match self.address() {
            Address::Socket(path, _) => path.display().to_string(),
            Address::Tcp(address) => address.to_string(),
            Address::Device(_) => self.volumes().join(", "),
        }
    }

    /// Returns whether the disk shares its namespaces with other disks.
    pub fn is_in_subsystem(&self) -> bool {
        self.subsystem().is_some()
    }

    /// Returns the disk's volumes with their options, by their NSIDs.
    pub fn numbered(&self) -> impl Iterator<Item = (u32, &NamespaceSpec)> {
        let namespaces = self.namespaces().iter().zip(1..);
        namespaces.map(|(namespace, place)| (namespace.nsid.unwrap_or(place), namespace))
    }

    /// Returns the NSIDs of the disk's volumes.
    pub fn nsids(&self) -> Vec<u32> {
        self.numbered().map(|(nsid, _)| nsid).collect()
    }

    /// Returns the disk's volumes by their NSIDs, to be changed.
    pub fn numbered_mut(&mut self) -> impl Iterator<Item = (u32, &mut NamespaceSpec)> {
        let namespaces = self.namespaces_mut().iter_mut().zip(1..);
        namespaces.map(|(namespace, place)| (namespace.nsid.unwrap_or(place), namespace))
    }

    /// Returns the paths or URLs of the disk's volumes.
    pub fn volumes(&self) -> Vec<&str> {
        let namespaces = self.namespaces().iter();
        namespaces.map(|namespace| &*namespace.volume).collect()
    }

    /// Returns the namespaces that have tables of their own in the configuration file.
    pub fn namespace_tables(&self) -> &[NamespaceSpec] {
        if self.has_namespace_tables() {
            self.namespaces()
        } else {
            &[]
        }
    }

    /// Returns the identifiers of the disk's namespaces that are configured.
    pub fn identifiers(&self) -> Vec<&str> {
        let ids = self.namespaces().iter();
        let ids = ids.flat_map(|ns| [&ns.nguid, &ns.eui64, &ns.uuid]);
        ids.flatten().map(String::as_str).collect()
    }

    /// Returns all files of the disk: those of its volumes, those beside them, and its own.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = Vec::new();
        for url in self.volumes() {
            files.extend(paths_of_volume(url));
            files.extend(path_option(url, "backing").map(Path::to_owned));
        }
        let beside = self.namespaces().iter();
        let beside = beside.flat_map(NamespaceSpec::kept_files);
        files.extend(beside.chain(self.own_files()).map(|(_, path)| path));
        files
    }
}

macro_rules! define_disks {
    ({} $($(#[$doc:meta])* $kind:ident($spec:ident), $list:ident;)*) => {
        /// Configuration of one disk, of any kind of front-end.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum DiskSpec {
            $($(#[$doc])* $kind($spec),)*
        }

        /// Configuration of a process: its disks by kind, and the process options.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Specs {
            $($(#[$doc])* pub $list: Vec<$spec>,)*
            /// Options of the process itself.
            pub process: ProcessSpec,
        }

        impl Deref for DiskSpec {
            type Target = dyn Disk;

            fn deref(&self) -> &Self::Target {
                match self {
                    $(Self::$kind(spec) => spec,)*
                }
            }
        }

        impl DerefMut for DiskSpec {
            fn deref_mut(&mut self) -> &mut Self::Target {
                match self {
                    $(Self::$kind(spec) => spec,)*
                }
            }
        }

        impl DiskSpec {
            /// Returns all disks of a configuration, with their defaults.
            pub fn all(specs: &Specs) -> Vec<Self> {
                let mut all = Vec::new();
                $(all.extend(specs.$list.iter().cloned().map(Self::$kind));)*
                all.iter_mut().for_each(|disk: &mut Self| disk.complete());
                all
            }

            /// Returns the kind of front-end that serves the disk.
            pub fn kind(&self) -> DiskKind {
                match self {
                    $(Self::$kind(_) => DiskKind::$kind,)*
                }
            }

            /// Reads the table of a disk of this kind.
            pub(crate) fn read(kind: DiskKind, table: toml::Value) -> Result<Self, toml::de::Error> {
                Ok(match kind {
                    $(DiskKind::$kind => Self::$kind($spec::deserialize(table)?),)*
                })
            }

            /// Returns the disk's table for a configuration file.
            pub fn to_table(&self) -> toml::Table {
                let mut table = match self {
                    $(Self::$kind(spec) => file::to_table(spec),)*
                };
                if self.has_namespace_tables() {
                    let namespaces = self.namespaces().iter().map(file::to_table);
                    let namespaces = namespaces.map(toml::Value::Table).collect();
                    table.insert("namespace".into(), toml::Value::Array(namespaces));
                }
                table
            }
        }

        impl Specs {
            /// Returns all disks, by kind.
            pub fn iter(&self) -> impl Iterator<Item = &dyn Disk> {
                let mut all: Vec<&dyn Disk> = Vec::new();
                $(all.extend(self.$list.iter().map(|disk| disk as &dyn Disk));)*
                all.into_iter()
            }

            /// Returns all disks with their kinds, to be changed.
            pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut dyn Disk> {
                let mut all: Vec<&mut dyn Disk> = Vec::new();
                $(all.extend(self.$list.iter_mut().map(|disk| disk as &mut dyn Disk));)*
                all.into_iter()
            }

            /// Adds a disk.
            pub fn push(&mut self, disk: DiskSpec) {
                match disk {
                    $(DiskSpec::$kind(spec) => self.$list.push(spec),)*
                }
            }

            /// Adds the disks of another configuration to this one.
            pub fn extend(&mut self, other: Self) {
                $(self.$list.extend(other.$list);)*
            }

            /// Removes all disks except those with a wanted name.
            pub fn retain_disks(&mut self, wanted: impl Fn(&str) -> bool) {
                $(self.$list.retain(|disk| wanted(&disk.name()));)*
            }
        }

        impl Spec for Specs {
            const TABLE: &'static str = "(the file)";
            const NAMES: &'static str = "files";
            const ABOUT: &'static str = "The whole file.";
            const ROWS: &'static [Row<Self>] = &[];
            const NESTED: &'static [(&'static str, bool)] =
                &[$((DiskKind::$kind.name(), false),)* ("process", false)];

            fn nested<'de, A: MapAccess<'de>>(
                &mut self,
                key: &str,
                map: &mut A,
            ) -> Result<(), A::Error> {
                $(if key == DiskKind::$kind.name() {
                    self.$list = file::tables(map, key, "")?;
                    return Ok(());
                })*
                self.process = map.next_value()?;
                Ok(())
            }
        }

        /// Kinds of disks in the order in which a process lists and opens them.
        pub const KINDS: &[DiskKind] = &[$(DiskKind::$kind,)*];

        tables!(Specs, ProcessSpec, NamespaceSpec, $($spec),*);
    };
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

disk_kinds!(define_disks);

impl DiskSpec {
    /// Returns all disks of a configuration by name.
    pub fn by_name(specs: &Specs) -> BTreeMap<String, Self> {
        let all = Self::all(specs).into_iter();
        all.map(|disk| (disk.name(), disk)).collect()
    }

    /// Returns the configuration that consists of these disks.
    pub fn specs<'a>(disks: impl Iterator<Item = &'a Self>) -> Specs {
        let mut specs = Specs::default();
        disks.for_each(|disk| specs.push(disk.clone()));
        specs
    }

    /// Returns the configuration of the disk with all defaults written out.
    pub fn completed(mut self) -> Self {
        self.complete();
        self
    }
}

impl Specs {
    /// Takes the options of the namespace or disk out of all volumes' URLs.
    ///
    /// # Errors
    /// An option cannot be read.
    pub fn take_url_options(&mut self) -> Result<()> {
        self.iter_mut().try_for_each(|disk| disk.take_url_options())
    }

    /// Returns whether the configuration names no disk.
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }
}

/// Returns the error text for a configuration without disks.
pub fn no_disks() -> String {
    let tables: Vec<_> = KINDS.iter().map(|kind| format!("[[{kind}]]")).collect();
    let tables = tables.join(", ");
    let (others, last) = tables.rsplit_once(", ").unwrap_or_default();
    format!(
        "describes no disk; add a table {others} or {last}, with a volume (docs/reference.md has \
         the keys)"
    )
}

/// Gives each namespace without an NSID the NSID of its position.
fn complete_namespaces(namespaces: &mut [NamespaceSpec]) {
    for (namespace, nsid) in namespaces.iter_mut().zip(1..) {
        namespace.nsid.get_or_insert(nsid);
    }
}

/// Returns the paths that a volume may have: that of a file with a question mark in its name also
/// looks like one with options. The file system is not asked.
pub fn paths_of_volume(url: &str) -> Vec<PathBuf> {
    match url.split_once('?') {
        Some((name, _)) if !url.contains("://") => {
            let last = url.rsplit_once('?').map_or(name, |(name, _)| name);
            vec![last.into(), url.into()]
        }
        _ => path_of_url(url).into_iter().collect(),
    }
}

/// The option of a volume's URL that names a file: `backing` of an image, for example.
pub fn path_option<'a>(url: &'a str, key: &str) -> Option<&'a Path> {
    let (_, query) = url.rsplit_once('?')?;
    let mut options = query.split('&').filter_map(|option| option.split_once('='));
    let found = options.find(|(name, _)| *name == key);
    found.map(|(_, path)| Path::new(path))
}

/// Returns the default name of a disk with a socket: the socket's path without its directory and
/// `.sock`.
pub fn disk_name(socket: &Path) -> String {
    let name = socket.file_name().unwrap_or(socket.as_os_str());
    let name = name.to_string_lossy();
    name.strip_suffix(".sock").unwrap_or(&name).to_owned()
}

/// Writes a configuration file with this process table and these disks.
///
/// # Errors
/// The configuration cannot be written as a file.
pub fn to_file<'a>(
    process: Option<toml::Table>,
    disks: impl Iterator<Item = &'a DiskSpec>,
) -> Result<String> {
    let mut root = toml::Table::new();
    if let Some(process) = process {
        root.insert("process".into(), toml::Value::Table(process));
    }
    for disk in disks {
        let list = root.entry(disk.kind().name());
        let list = list.or_insert_with(|| toml::Value::Array(Vec::new()));
        if let toml::Value::Array(list) = list {
            list.push(toml::Value::Table(disk.to_table()));
        }
    }
    toml::to_string(&root).context("the configuration cannot be written down")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::parse_config;

    #[test]
    fn volume_with_question_mark_has_both_paths_it_may_have() {
        for (url, paths) in [
            ("a.raw", &["a.raw"][..]),
            ("a.raw?iops=5", &["a.raw", "a.raw?iops=5"]),
            ("a?b?iops=5", &["a?b", "a?b?iops=5"]),
            ("file:///a%20b?iops=5", &["/a b"]),
            ("mem://1M?iops=5", &[]),
        ] {
            let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
            assert_eq!(paths_of_volume(url), paths, "{url}");
        }
    }

    #[test]
    fn journal_of_atomic_writes_is_file_of_every_kind() {
        let namespace = "[[{kind}.namespace]]\n";
        for (kind, place) in [
            ("controller", "socket = \"s\"\n{tables}"),
            ("vhost-user-blk", "socket = \"s\"\n"),
            ("nvme-tcp", "listen = \"127.0.0.1:4420\"\n{tables}"),
            ("ublk", ""),
        ] {
            let place = place.replace("{tables}", &namespace.replace("{kind}", kind));
            for (query, journal) in [
                ("atomic=16K", "/d/a.raw.atomic"),
                ("atomic=16K&atomic-journal=/j/a", "/j/a"),
            ] {
                let text = format!("[[{kind}]]\n{place}volume = \"/d/a.raw?{query}\"\n");
                let disks = DiskSpec::all(&toml::from_str(&text).unwrap());
                let files = disks.first().unwrap().files();
                assert!(files.contains(&journal.into()), "{kind}: {files:?}");
            }
        }
    }

    #[test]
    fn stored_disk_reads_back_identically() {
        let text = r#"
            [[controller]]
            name = "root"
            socket = "/run/a.sock"
            write-cache = false
            io-queues = 3
            socket-group = "kvm"
            socket-mode = "0660"
            doorbells = "mapped"
            [[controller.namespace]]
            volume = "mem://1M?iops=1000&nsid=7"
            [[controller.namespace]]
            volume = { url = "b.raw", bps = "1M" }
            read-only = true
            [[controller]]
            socket = "/run/b.sock"
            namespace = [{ volume = "mem://1M" }]
            [[vhost-user-blk]]
            socket = "/run/c.sock"
            volume = "mem://1M?queues=2"
            [[nvme-tcp]]
            listen = "127.0.0.1:4420"
            hosts = ["nqn.2014-08.org.example:a", "nqn.2014-08.org.example:b"]
            max-hosts = 3
            namespace = [{ volume = "mem://1M" }, { volume = "mem://2M", nsid = 4 }]
            [[ublk]]
            volume = "c.raw"
            id = 4
            [process]
            idle-window = 30
            cpus = ["1-2"]
            socket-owner = 7
            metrics = "127.0.0.1:9469"
            client-memory = "4G"
            spread = "off"
            allow = ["/d", "ublk"]
        "#;
        let first = parse_config(Path::new("f.toml"), text).unwrap();
        let disks = DiskSpec::all(&first);
        let process = file::to_table(&first.process);
        let written = to_file(Some(process), disks.iter()).unwrap();
        let second = parse_config(Path::new("g.toml"), &written).unwrap();
        assert_eq!(DiskSpec::all(&second), disks, "{written}");
        assert_eq!(second.process, first.process, "{written}");
        let names: Vec<String> = disks.iter().map(|disk| disk.name()).collect();
        assert_eq!(names, ["root", "b", "c", "tcp-127.0.0.1:4420", "ublkb4"]);
    }
}
