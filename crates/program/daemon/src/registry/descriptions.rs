//! Names and volumes of disks by address, for counters and events, which know only addresses.

use config::disk::{DiskSpec, disk_name};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// A disk's name, its volumes by their NSIDs, as they were given, and where its other namespaces
/// are: those that its guest has made.
#[derive(Clone)]
struct Description {
    name: String,
    volumes: Vec<(u32, String)>,
    pool: String,
}

/// Names and volumes of the process's disks by address (socket or device path). Clones share the
/// list.
#[derive(Clone, Default)]
pub struct DiskDescriptions(Arc<Mutex<BTreeMap<PathBuf, Description>>>);

fn description(disk: &DiskSpec) -> Description {
    let volumes = disk.numbered();
    let volumes = volumes.map(|(nsid, namespace)| (nsid, namespace.volume.to_string()));
    let pool = disk.pool();
    Description {
        name: disk.name(),
        volumes: volumes.collect(),
        pool: pool.map_or_else(String::new, |pool| pool.display().to_string()),
    }
}

impl DiskDescriptions {
    /// Adds a disk to the list, or updates its entry.
    pub fn add(&self, disk: &DiskSpec) {
        if let Some(address) = disk.address().to_path() {
            self.0
                .lock()
                .unpoisoned()
                .insert(address, description(disk));
        }
    }

    /// Replaces the whole list by the entries of these disks.
    pub fn set<'a>(&self, disks: impl Iterator<Item = &'a DiskSpec>) {
        let all = disks.filter_map(|disk| Some((disk.address().to_path()?, description(disk))));
        *self.0.lock().unpoisoned() = all.collect();
    }

    /// Returns the name of the disk at this address; without an entry, the file's name. An address
    /// below a disk's (a host's controller) has its own name appended.
    pub fn name(&self, address: &Path) -> String {
        let told = self.0.lock().unpoisoned();
        let name = told.get(address).map(|of| of.name.clone());
        let within = || {
            let of = told.get(address.parent()?)?;
            let own = address.file_name()?.to_string_lossy();
            Some(format!("{}/{own}", of.name))
        };
        name.or_else(within).unwrap_or_else(|| disk_name(address))
    }

    /// The disk and namespace that show a volume, which is named as it was given; the first, where
    /// there are several.
    pub fn place(&self, volume: &str) -> Option<(String, u32)> {
        let told = self.0.lock().unpoisoned();
        told.values().find_map(|disk| {
            let (nsid, _) = disk.volumes.iter().find(|(_, of)| of == volume)?;
            Some((disk.name.clone(), *nsid))
        })
    }

    /// Returns the volume of a namespace. For a namespace that the guest has made, returns its
    /// pool. Empty without an entry.
    pub fn volume(&self, address: &Path, nsid: u32) -> String {
        let told = self.0.lock().unpoisoned();
        let entry = told.get(address).or_else(|| told.get(address.parent()?));
        let Some(disk) = entry else {
            return String::new();
        };
        let found = disk.volumes.iter().find(|(of, _)| *of == nsid);
        found.map_or_else(|| disk.pool.clone(), |(_, volume)| volume.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::spec::parse_config;

    #[test]
    fn disks_are_described_by_address() {
        let text = "[[controller]]\nsocket = \"/run/a.sock\"\nname = \"root\"\n\
            namespace = [{ volume = \"x\" }, { volume = \"y\", nsid = 7 }]\n\
            [[vhost-user-blk]]\nsocket = \"/run/b.sock\"\nvolume = \"z\"\n\
            [[nvme-tcp]]\nlisten = \"127.0.0.1:4420\"\nname = \"far\"\n\
            namespace = [{ volume = \"v\" }]\n\
            [[ublk]]\nid = 3\nname = \"swap\"\nvolume = \"w\"\n";
        let specs = parse_config(Path::new("f.toml"), text).unwrap();
        let all = DiskSpec::all(&specs);
        let described = DiskDescriptions::default();
        all.iter().for_each(|disk| described.add(disk));
        let told = |address: &str, nsid| {
            let address = Path::new(address);
            (described.name(address), described.volume(address, nsid))
        };
        let is = |name: &str, volume: &str| (name.to_owned(), volume.to_owned());
        assert_eq!(told("/run/a.sock", 1), is("root", "x"));
        assert_eq!(told("/run/a.sock", 7), is("root", "y"));
        assert_eq!(told("/run/a.sock", 2), is("root", ""));
        assert_eq!(told("/run/b.sock", 1), is("b", "z"));
        assert_eq!(told("/dev/ublkb3", 1), is("swap", "w"));
        assert_eq!(described.place("y"), Some(("root".into(), 7)));
        assert_eq!(described.place("none"), None);
        assert_eq!(told("tcp://127.0.0.1:4420", 1), is("far", "v"));
        assert_eq!(told("tcp://127.0.0.1:4420/7", 1), is("far/7", "v"));
        described.set(all.iter().skip(1));
        assert_eq!(told("/run/a.sock", 1), is("a", ""));
        assert_eq!(told("/run/b.sock", 1), is("b", "z"));
    }
}
