//! Comparison of a configuration with the files of this host, for `vnvme check`: the volumes,
//! folders, users and groups that the daemon would miss when it starts.
//!
//! Volumes are opened as the daemon opens them, but without locks, because the daemon may be
//! serving them. Servers and devices are left alone: a connection or an opened device could disturb
//! the process that uses it.

use crate::front::kind::front_end;
use crate::open::devices::DeviceRegistry;
use crate::open::subsystems::memory_owner;
use crate::open::{DeviceNamespace, kinds};
use anyhow::{Result, anyhow};
use config::access::SocketAccess;
use config::disk::DiskSpec;
use config::origin::Origin;
use config::spec::{NamespaceSpec, Specs};
use config::volumes::Kind;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use volume::{OpenError, OpenOptions, Registry, Volume, VolumeError};

/// Folder that systemd makes when it starts the packaged service.
const RUNTIME_FOLDER: &str = "/run/vnvme";

/// Findings of a comparison.
#[derive(Default)]
pub struct Findings {
    /// Reasons why the daemon would refuse a disk or would not start.
    pub errors: Vec<anyhow::Error>,
    /// Volumes that another process has open at the moment: the daemon itself, or another program.
    pub in_use: Vec<anyhow::Error>,
}

/// Compares all disks with this host.
pub fn check_files(specs: &Specs) -> Findings {
    let mut check = FileCheck {
        kinds: kinds(DeviceRegistry::default()),
        shared: BTreeSet::new(),
        opened: Vec::new(),
        found: Findings::default(),
    };
    for disk in DiskSpec::all(specs) {
        check.disk(&disk, &specs.process.access);
    }
    check.found
}

struct FileCheck {
    kinds: Registry<DeviceNamespace>,
    /// Namespaces of subsystems, which several disks name and which are opened once.
    shared: BTreeSet<(String, u32)>,
    /// Volumes so far. They stay open, so that two disks with one file are found.
    opened: Vec<Arc<dyn Volume>>,
    found: Findings,
}

impl FileCheck {
    fn disk(&mut self, disk: &DiskSpec, usual: &SocketAccess) {
        let origin = disk.origin();
        if let (Some(socket), Some(access)) = (disk.socket(), disk.access()) {
            self.note(origin.place("socket", folder_exists(socket)));
            let access = access.or(usual);
            let owner = access.owner.map_or(Ok(()), |owner| owner.user().map(drop));
            self.note(origin.place("socket-owner", owner));
            let group = access.group.map_or(Ok(()), |group| group.group().map(drop));
            self.note(origin.place("socket-group", group));
        }
        for (nsid, namespace) in disk.numbered() {
            let shared = disk.is_in_subsystem();
            if shared && !self.shared.insert((memory_owner(&**disk), nsid)) {
                continue;
            }
            if disk.has_namespace_tables() {
                self.namespace(namespace, &namespace.origin);
            } else {
                self.namespace(namespace, origin);
            }
        }
        self.note(front_end(disk).check_files());
        let pool = disk.pool().map_or(Ok(()), folder_exists);
        self.note(origin.place("pool", pool));
    }

    fn namespace(&mut self, spec: &NamespaceSpec, origin: &Origin) {
        for (key, path) in spec.kept_files() {
            self.note(origin.place(key, folder_exists(&path)));
        }
        self.volume(spec, origin);
    }

    fn volume(&mut self, spec: &NamespaceSpec, origin: &Origin) {
        let url = &*spec.volume;
        let is_elsewhere = match Kind::of(url) {
            Some(Kind::Device(_) | Kind::Within(_)) => true,
            // A URL that cannot be parsed is refused before anything is connected.
            Some(Kind::Remote(kind)) => kind.servers(url).is_some(),
            Some(Kind::Image(_)) | None => false,
        };
        if is_elsewhere {
            return;
        }
        let options = OpenOptions {
            read_only: spec.is_read_only(),
            block_size: spec.block_size,
            is_check: true,
            ..OpenOptions::default()
        };
        match self.kinds.open(url, options) {
            Ok(opened) => self.opened.push(opened.volume),
            Err(error) => {
                let in_use = matches!(error, OpenError::Volume(VolumeError::Locked { .. }));
                let list = if in_use {
                    &mut self.found.in_use
                } else {
                    &mut self.found.errors
                };
                list.extend(origin.place("volume", Err::<(), _>(error.into())).err());
            }
        }
    }

    fn note(&mut self, result: Result<()>) {
        self.found.errors.extend(result.err());
    }
}

/// Checks that the folder of a file that the daemon makes is there.
fn folder_exists(path: &Path) -> Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => return Ok(()),
    };
    if folder.is_dir() || folder.starts_with(RUNTIME_FOLDER) {
        return Ok(());
    }
    let (path, folder) = (path.display(), folder.display());
    Err(anyhow!(
        "{path}: the folder {folder} does not exist; make it with: mkdir -p {folder}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_folder_of_journal_is_found_for_every_kind() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("a.raw");
        std::fs::write(&image, [0; 4096]).unwrap();
        let journal = dir.path().join("missing/journal");
        let url = format!(
            "{}?atomic=16K&atomic-journal={}",
            image.display(),
            journal.display()
        );
        for disk in [
            format!("[[controller]]\nsocket = \"s\"\n[[controller.namespace]]\nvolume = \"{url}\""),
            format!("[[vhost-user-blk]]\nsocket = \"s\"\nvolume = \"{url}\""),
            format!(
                "[[nvme-tcp]]\nlisten = \"127.0.0.1:4420\"\n[[nvme-tcp.namespace]]\nvolume = \"{url}\""
            ),
            format!("[[ublk]]\nvolume = \"{url}\""),
        ] {
            let found = check_files(&toml::from_str(&disk).unwrap());
            let errors: Vec<_> = found.errors.iter().map(|one| format!("{one:#}")).collect();
            let journals = errors.iter().filter(|one| one.contains("mkdir -p"));
            assert_eq!(journals.count(), 1, "{disk}: {errors:?}");
        }
    }
}
