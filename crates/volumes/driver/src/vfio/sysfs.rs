//! Reader of sysfs for PCI devices: their drivers, IOMMU groups and VFIO nodes.
//!
//! Access is read-only. The root is a value, so that tests can use a tree of their own.

use super::address::Bdf;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Name of the kernel driver that gives userspace access to a device.
pub const VFIO_PCI: &str = "vfio-pci";

/// Drivers that may stay bound to other devices of a group that userspace uses: they do no DMA
/// themselves (`driver_managed_dma` in the kernel's sources).
const HARMLESS: [&str; 3] = [VFIO_PCI, "pci-stub", "pcieport"];

/// Tree of device information, `/sys` or a copy for tests.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
}

/// PCI function that is found in a sysfs tree.
#[derive(Clone, Debug)]
pub struct PciDevice {
    sysfs: Sysfs,
    path: PathBuf,
    /// PCI address of the function.
    pub bdf: Bdf,
}

/// An IOMMU group: functions that the IOMMU cannot distinguish, and that must have the same owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Number of the IOMMU group, the N of `/dev/vfio/N`.
    pub id: u32,
    /// Whether the group has no IOMMU (the kernel's no-IOMMU mode), so that DMA reaches all memory.
    pub noiommu: bool,
    /// PCI addresses of the group's devices in ascending order, each with its driver.
    pub members: Vec<(Bdf, Option<String>)>,
}

impl Sysfs {
    /// Returns the device information of the running system, `/sys`.
    pub fn system() -> Sysfs {
        Sysfs::at("/sys")
    }

    /// Returns the device information below another path, for tests.
    pub fn at(root: impl Into<PathBuf>) -> Sysfs {
        Sysfs { root: root.into() }
    }

    /// Returns the path of `below` within the tree.
    pub fn path(&self, below: impl AsRef<Path>) -> PathBuf {
        self.root.join(below)
    }

    /// Returns the PCI function with this address; `None` if there is none.
    pub fn device(&self, bdf: Bdf) -> Option<PciDevice> {
        let path = self.path("bus/pci/devices").join(bdf.to_string());
        path.is_dir().then(|| PciDevice {
            sysfs: self.clone(),
            path,
            bdf,
        })
    }

    /// Returns the directory of a PCI driver, which exists while the driver is loaded.
    pub fn driver(&self, name: &str) -> PathBuf {
        self.path("bus/pci/drivers").join(name)
    }
}

impl PciDevice {
    /// Returns the directory of the PCI function in sysfs.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the name of the driver that is bound to the function.
    pub fn driver(&self) -> Option<String> {
        link_name(&self.path.join("driver"))
    }

    /// Returns the only driver that may bind to the function (`driver_override`), if one is set.
    pub fn driver_override(&self) -> Option<String> {
        self.text("driver_override")
            .filter(|name| !name.is_empty() && name != "(null)")
    }

    /// Returns the PCI class code: class, subclass and programming interface in 24 bits.
    pub fn class(&self) -> Option<u32> {
        self.number("class")
    }

    /// Returns the PCI vendor ID and device ID.
    pub fn ids(&self) -> Option<(u16, u16)> {
        let id = |name| self.number(name).and_then(|n| u16::try_from(n).ok());
        Some((id("vendor")?, id("device")?))
    }

    /// Returns the function's IOMMU group; `None` without an enabled IOMMU.
    pub fn group(&self) -> Option<Group> {
        let dir = self.path.join("iommu_group");
        let id = link_name(&dir)?.parse().ok()?;
        let name = fs::read_to_string(dir.join("name")).unwrap_or_default();
        let mut members: Vec<(Bdf, Option<String>)> = entries(&dir.join("devices"))
            .iter()
            .filter_map(|name| name.parse().ok())
            .map(|bdf| (bdf, self.sysfs.device(bdf).and_then(|d| d.driver())))
            .collect();
        members.sort();
        Some(Group {
            id,
            noiommu: name.trim() == "vfio-noiommu",
            members,
        })
    }

    /// Returns the name of the function's VFIO character device (`vfio0`, in `/dev/vfio/devices`).
    /// Kernels with device cdevs create it while the function is bound to vfio-pci. Kernels without
    /// them also have the directory, but no device number in it.
    pub fn cdev(&self) -> Option<String> {
        let dir = self.path.join("vfio-dev");
        entries(&dir).into_iter().find(|name| {
            let number = name.strip_prefix("vfio").map(str::parse::<u32>);
            matches!(number, Some(Ok(_))) && dir.join(name).join("dev").exists()
        })
    }

    fn text(&self, attribute: &str) -> Option<String> {
        let text = fs::read_to_string(self.path.join(attribute)).ok()?;
        Some(text.trim().to_string())
    }

    fn number(&self, attribute: &str) -> Option<u32> {
        let text = self.text(attribute)?;
        u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
    }
}

impl Group {
    /// Returns the devices, other than `except`, whose drivers prevent userspace from using the
    /// group.
    pub fn blockers(&self, except: &[Bdf]) -> Vec<(Bdf, String)> {
        self.members
            .iter()
            .filter(|(bdf, _)| !except.contains(bdf))
            .filter_map(|(bdf, driver)| Some((*bdf, driver.clone()?)))
            .filter(|(_, driver)| !HARMLESS.contains(&driver.as_str()))
            .collect()
    }
}

/// Returns the last component of a symbolic link's target.
fn link_name(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    Some(target.file_name()?.to_str()?.to_string())
}

/// Returns the names in a directory; none when it cannot be read.
pub fn entries(dir: &Path) -> Vec<String> {
    let names = || -> io::Result<Vec<String>> {
        Ok(fs::read_dir(dir)?
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect())
    };
    let mut names = names().unwrap_or_default();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Two functions of a group and a bridge: the second function belongs to another driver.
    fn tree() -> (tempfile::TempDir, Sysfs) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for (bdf, driver) in [
            ("0000:01:00.0", Some("vfio-pci")),
            ("0000:01:00.1", Some("nvme")),
            ("0000:00:01.0", Some("pcieport")),
            ("0000:02:00.0", None),
        ] {
            let real = root.join("devices/pci0000:00").join(bdf);
            fs::create_dir_all(&real).unwrap();
            fs::write(real.join("class"), "0x010802\n").unwrap();
            fs::write(real.join("vendor"), "0x1b36\n").unwrap();
            fs::write(real.join("device"), "0x0010\n").unwrap();
            fs::write(real.join("driver_override"), "(null)\n").unwrap();
            fs::create_dir_all(root.join("bus/pci/devices")).unwrap();
            symlink(&real, root.join("bus/pci/devices").join(bdf)).unwrap();
            if let Some(driver) = driver {
                let drivers = root.join("bus/pci/drivers").join(driver);
                fs::create_dir_all(&drivers).unwrap();
                symlink(&drivers, real.join("driver")).unwrap();
            }
            if !bdf.starts_with("0000:02") {
                let group = root.join("kernel/iommu_groups/7");
                fs::create_dir_all(group.join("devices")).unwrap();
                symlink(&real, group.join("devices").join(bdf)).unwrap();
                symlink(&group, real.join("iommu_group")).unwrap();
            }
        }
        let nodes = root.join("bus/pci/devices/0000:01:00.0/vfio-dev");
        fs::create_dir_all(nodes.join("vfio3")).unwrap();
        fs::write(nodes.join("vfio3/dev"), "511:3\n").unwrap();
        let sysfs = Sysfs::at(root);
        (dir, sysfs)
    }

    fn bdf(text: &str) -> Bdf {
        text.parse().unwrap()
    }

    #[test]
    fn device_reports_driver_group_and_node() {
        let (_dir, sysfs) = tree();
        let device = sysfs.device(bdf("01:00.0")).unwrap();
        assert_eq!(device.driver().as_deref(), Some(VFIO_PCI));
        assert_eq!(device.driver_override(), None);
        assert_eq!(device.class(), Some(0x01_08_02));
        assert_eq!(device.ids(), Some((0x1b36, 0x10)));
        assert_eq!(device.cdev().as_deref(), Some("vfio3"));
        fs::remove_file(device.path().join("vfio-dev/vfio3/dev")).unwrap();
        assert_eq!(device.cdev(), None, "a kernel without device cdevs");
        let group = device.group().unwrap();
        assert_eq!((group.id, group.noiommu), (7, false));
        assert_eq!(group.members.len(), 3);
        assert!(sysfs.device(bdf("05:00.0")).is_none());
    }

    #[test]
    fn group_names_blocking_devices() {
        let (_dir, sysfs) = tree();
        let group = sysfs.device(bdf("01:00.0")).unwrap().group().unwrap();
        let nvme = (bdf("01:00.1"), "nvme".to_string());
        assert_eq!(group.blockers(&[bdf("01:00.0")]), [nvme]);
        assert!(group.blockers(&[bdf("01:00.1")]).is_empty());
    }

    #[test]
    fn device_without_iommu_has_no_group_or_node() {
        let (dir, sysfs) = tree();
        let device = sysfs.device(bdf("02:00.0")).unwrap();
        assert_eq!(device.group(), None);
        assert_eq!((device.driver(), device.cdev()), (None, None));
        let group = dir.path().join("kernel/iommu_groups/9");
        fs::create_dir_all(group.join("devices")).unwrap();
        fs::write(group.join("name"), "vfio-noiommu\n").unwrap();
        symlink(&group, device.path().join("iommu_group")).unwrap();
        assert!(device.group().unwrap().noiommu);
    }
}
