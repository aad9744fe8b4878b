//! A disk as it is described: a table of a configuration file, or of a control client's request.

use crate::access::SocketAccess;
use crate::options::file;
use crate::origin::Origin;
use crate::spec::{ControllerSpec, NamespaceSpec, NvmeTcpSpec, Specs, UblkSpec, VhostBlkSpec};
use anyhow::{Context, Result};
use control::api::DiskKind;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use volume::path_of_url;

/// Configuration of one disk, of any kind of front-end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskSpec {
    /// NVMe controller that a VMM uses over vfio-user.
    Controller(ControllerSpec),
    /// virtio block device that a VMM uses over vhost-user.
    VhostBlk(VhostBlkSpec),
    /// NVMe/TCP subsystem for other hosts.
    NvmeTcp(NvmeTcpSpec),
    /// ublk block device of this host.
    Ublk(UblkSpec),
}

impl DiskSpec {
    /// Returns all disks of a configuration, with their defaults.
    pub fn all(specs: &Specs) -> Vec<Self> {
        let controllers = specs.controllers.iter().cloned().map(Self::Controller);
        let exports = specs.vhost_user_blk.iter().cloned().map(Self::VhostBlk);
        let targets = specs.nvme_tcp.iter().cloned().map(Self::NvmeTcp);
        let disks = specs.ublk.iter().cloned().map(Self::Ublk);
        let all = controllers.chain(exports).chain(targets).chain(disks);
        let mut all: Vec<Self> = all.collect();
        all.iter_mut().for_each(Self::complete);
        all
    }

    /// Returns all disks of a configuration by name.
    pub fn by_name(specs: &Specs) -> BTreeMap<String, Self> {
        let all = Self::all(specs).into_iter();
        all.map(|disk| (disk.name(), disk)).collect()
    }

    /// Returns the configuration that consists of these disks.
    pub fn specs<'a>(disks: impl Iterator<Item = &'a Self>) -> Specs {
        let mut specs = Specs::default();
        for disk in disks {
            match disk {
                Self::Controller(spec) => specs.controllers.push(spec.clone()),
                Self::VhostBlk(spec) => specs.vhost_user_blk.push(spec.clone()),
                Self::NvmeTcp(spec) => specs.nvme_tcp.push(spec.clone()),
                Self::Ublk(spec) => specs.ublk.push(spec.clone()),
            }
        }
        specs
    }

    /// Returns the configuration of the disk with all defaults written out.
    pub fn completed(mut self) -> Self {
        self.complete();
        self
    }

    /// Sets the values that would otherwise depend on the position: the disk's name, the IDs of its
    /// namespaces.
    pub fn complete(&mut self) {
        match self {
            Self::Controller(spec) => {
                spec.name = Some(spec.any_name());
                spec.number_namespaces();
            }
            Self::VhostBlk(spec) => spec.name = Some(spec.any_name()),
            Self::NvmeTcp(spec) => {
                spec.name = Some(spec.any_name());
                spec.number_namespaces();
            }
            Self::Ublk(spec) if spec.id.is_some() => spec.name = Some(spec.any_name()),
            Self::Ublk(_) => {}
        }
    }

    /// Returns the kind of front-end that serves the disk.
    pub fn kind(&self) -> DiskKind {
        match self {
            Self::Controller(_) => DiskKind::Controller,
            Self::VhostBlk(_) => DiskKind::VhostUserBlk,
            Self::NvmeTcp(_) => DiskKind::NvmeTcp,
            Self::Ublk(_) => DiskKind::Ublk,
        }
    }

    /// Returns the name of the disk; without a configured one, that of its socket or volume.
    pub fn name(&self) -> String {
        match self {
            Self::Controller(spec) => spec.any_name(),
            Self::VhostBlk(spec) => spec.any_name(),
            Self::NvmeTcp(spec) => spec.any_name(),
            Self::Ublk(spec) => spec.any_name(),
        }
    }

    /// Returns the location of the disk's table in the configuration file.
    pub fn origin(&self) -> &Origin {
        match self {
            Self::Controller(spec) => &spec.origin,
            Self::VhostBlk(spec) => &spec.origin,
            Self::NvmeTcp(spec) => &spec.origin,
            Self::Ublk(spec) => &spec.origin,
        }
    }

    /// Returns whether the disk shares its namespaces with other disks.
    pub fn is_in_subsystem(&self) -> bool {
        matches!(self, Self::Controller(spec) if spec.subsystem.is_some())
    }

    /// Returns the path of the disk's socket; `None` for a kind without one.
    pub fn socket(&self) -> Option<&Path> {
        match self {
            Self::Controller(spec) => Some(&spec.socket),
            Self::VhostBlk(spec) => Some(&spec.socket),
            Self::NvmeTcp(_) | Self::Ublk(_) => None,
        }
    }

    /// Returns the configured access to the disk's socket; `None` for a kind without one.
    pub fn access(&self) -> Option<&SocketAccess> {
        match self {
            Self::Controller(spec) => Some(&spec.access),
            Self::VhostBlk(spec) => Some(&spec.access),
            Self::NvmeTcp(_) | Self::Ublk(_) => None,
        }
    }

    /// Returns the paths or URLs of the disk's volumes.
    pub fn volumes(&self) -> Vec<&str> {
        match self {
            Self::Controller(spec) => spec.namespaces.iter().map(|ns| &*ns.volume).collect(),
            Self::VhostBlk(spec) => vec![&spec.volume],
            Self::NvmeTcp(spec) => spec.namespaces.iter().map(|ns| &*ns.volume).collect(),
            Self::Ublk(spec) => vec![&spec.volume],
        }
    }

    /// Returns the identifiers of the disk's namespaces that are configured.
    pub fn identifiers(&self) -> Vec<&str> {
        let namespaces = match self {
            Self::Controller(spec) => &spec.namespaces[..],
            Self::NvmeTcp(spec) => &spec.namespaces,
            Self::VhostBlk(_) | Self::Ublk(_) => &[],
        };
        let ids = namespaces.iter();
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
        let mut of_namespace = |namespace: &NamespaceSpec| {
            files.extend(namespace.kept_files().into_iter().map(|(_, path)| path));
        };
        match self {
            Self::Controller(spec) => {
                spec.namespaces.iter().for_each(&mut of_namespace);
                let own = [&spec.boot_partition, &spec.pool];
                files.extend(own.into_iter().flatten().cloned());
            }
            Self::NvmeTcp(spec) => {
                spec.namespaces.iter().for_each(&mut of_namespace);
                files.extend(spec.host_keys.clone());
            }
            Self::VhostBlk(_) | Self::Ublk(_) => {}
        }
        files
    }

    /// Returns the disk's table for a configuration file.
    pub fn to_table(&self) -> toml::Table {
        match self {
            Self::Controller(spec) => with_namespaces(file::to_table(spec), &spec.namespaces),
            Self::NvmeTcp(spec) => with_namespaces(file::to_table(spec), &spec.namespaces),
            Self::VhostBlk(spec) => file::to_table(spec),
            Self::Ublk(spec) => file::to_table(spec),
        }
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

fn with_namespaces(mut table: toml::Table, namespaces: &[NamespaceSpec]) -> toml::Table {
    let namespaces = namespaces.iter().map(file::to_table);
    let namespaces = namespaces.map(toml::Value::Table).collect();
    table.insert("namespace".into(), toml::Value::Array(namespaces));
    table
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
        let names: Vec<String> = disks.iter().map(DiskSpec::name).collect();
        assert_eq!(names, ["root", "b", "c", "tcp-127.0.0.1:4420", "ublkb4"]);
    }
}
