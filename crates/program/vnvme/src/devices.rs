//! `vnvme devices`: lists devices of this machine that can be used as volumes, and their present
//! users.
//!
//! The information is read from sysfs without opening a device. Tests use an artificial directory
//! tree.

use crate::bind::{Host, users};
use anyhow::Result;
use clap::Args;
use daemon::open::kinds;
use driver::vfio::Bdf;
use driver::vfio::sysfs::{PciDevice, VFIO_PCI, entries};
use output::outln;
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// Options of `vnvme devices`.
#[derive(Args)]
pub struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Read /sys, /proc and /dev below this directory instead
    #[arg(long, hide = true, value_name = "DIRECTORY", default_value = "/")]
    root: PathBuf,
}

impl DevicesArgs {
    /// Prints the list of devices.
    pub fn run(self) -> Result<()> {
        let found = DiscoveredDevices::on(&Host::below(&self.root));
        if self.json {
            outln!("{}", serde_json::to_string_pretty(&found)?);
        } else {
            for line in found.lines() {
                outln!("{line}");
            }
        }
        Ok(())
    }
}

/// Devices and kernel features that `vnvme devices` has found.
#[derive(Debug, Serialize)]
struct DiscoveredDevices {
    /// NVMe controllers of the machine, sorted by PCI address.
    nvme: Vec<Nvme>,
    /// ublk block devices that vnvme serves on this machine.
    ublk: Vec<Ublk>,
    /// Features of the running kernel that vnvme can use.
    kernel: Kernel,
}

/// NVMe controller of the machine, with its driver and users.
#[derive(Debug, Serialize)]
struct Nvme {
    /// PCI address of the controller.
    address: String,
    /// Model as the controller reports it; available only with the kernel's NVMe driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    serial: Option<String>,
    /// Kernel driver that is bound to the controller, such as nvme or vfio-pci.
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<String>,
    /// IOMMU group; all devices of a group must have one owner.
    #[serde(skip_serializing_if = "Option::is_none")]
    iommu_group: Option<u32>,
    /// PCI addresses of the other devices in the IOMMU group.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    group_members: Vec<String>,
    /// Block devices that the kernel's driver shows for the controller.
    namespaces: Vec<Namespace>,
    /// Possible next step with vnvme: a command, or a URL to serve.
    next: String,
}

/// Namespace of a controller for which the kernel has a block device.
#[derive(Debug, Serialize)]
struct Namespace {
    /// Path of the namespace's block device, such as `/dev/nvme0n1`.
    node: String,
    /// Size of the namespace in bytes.
    bytes: u64,
    /// Namespace ID; `None` if the kernel does not show it.
    #[serde(skip_serializing_if = "Option::is_none")]
    nsid: Option<u32>,
    /// User of the block device: a mount point, swap, another device. `None` if it is unused.
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<String>,
}

/// A block device that a userspace process serves through ublk.
#[derive(Debug, Serialize)]
struct Ublk {
    node: String,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<String>,
}

/// Features of the kernel that vnvme can use.
#[derive(Debug, Serialize)]
struct Kernel {
    /// The machine has an enabled IOMMU.
    iommu: bool,
    /// The vfio-pci driver is loaded.
    vfio_pci: bool,
    /// The ublk driver (`ublk_drv`) is available.
    ublk: bool,
    /// Supported kinds of volumes, as URLs.
    volumes: Vec<String>,
    /// Supported front-ends; only ublk needs a kernel driver.
    front_ends: [&'static str; 4],
}

impl DiscoveredDevices {
    fn on(host: &Host) -> Self {
        let pci = entries(&host.sysfs.path("bus/pci/devices"));
        let addresses = pci.iter().filter_map(|name| name.parse::<Bdf>().ok());
        let controllers = addresses.filter_map(|bdf| host.sysfs.device(bdf));
        let nvme = controllers
            .filter(|device| device.class().is_some_and(|class| class >> 8 == 0x01_08))
            .map(|device| Nvme::of(host, &device));
        let nvme: Vec<Nvme> = nvme.collect();
        let disks = entries(&host.sysfs.path("class/block"));
        let disks = disks.into_iter().filter(|name| {
            let number = name.strip_prefix("ublkb");
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        });
        let ublk = disks.map(|name| {
            let path = host.sysfs.path("class/block").join(&name);
            Ublk {
                node: format!("/dev/{name}"),
                bytes: bytes(&path),
                used: used(host, &path),
            }
        });
        Self {
            ublk: ublk.collect(),
            kernel: Kernel {
                iommu: !entries(&host.sysfs.path("kernel/iommu_groups")).is_empty(),
                vfio_pci: host.sysfs.driver(VFIO_PCI).is_dir(),
                ublk: host.sysfs.path("class/misc/ublk-control").exists()
                    || host.dev.join("ublk-control").exists(),
                volumes: kinds(daemon::open::devices::DeviceRegistry::default())
                    .schemes()
                    .map(volume::Scheme::url)
                    .collect(),
                front_ends: [
                    "vfio-user (NVMe, --socket)",
                    "vhost-user-blk (virtio, --vhost-user-blk)",
                    "NVMe/TCP (other hosts, [[nvme-tcp]] in a configuration)",
                    "ublk (block devices of this machine, vnvme ublk)",
                ],
            },
            nvme,
        }
    }

    /// Returns the lines of text that `vnvme devices` prints.
    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.nvme.is_empty() {
            lines.push("no NVMe controllers on this machine's PCI buses".to_owned());
        }
        for device in &self.nvme {
            let unknown = || "unknown model".to_owned();
            let group = device.iommu_group.map_or_else(
                || "no IOMMU group".to_owned(),
                |group| format!("IOMMU group {group}"),
            );
            lines.push(format!(
                "{}  {}  driver {}  {group}",
                device.address,
                device.model.clone().unwrap_or_else(unknown),
                device.driver.as_deref().unwrap_or("none"),
            ));
            if !device.group_members.is_empty() {
                let members = device.group_members.join(", ");
                lines.push(format!("  the group has other devices: {members}"));
            }
            for namespace in &device.namespaces {
                lines.push(disk(&namespace.node, namespace.bytes, &namespace.used));
            }
            lines.push(format!("  {}", device.next));
        }
        for ublk in &self.ublk {
            lines.push(disk(&ublk.node, ublk.bytes, &ublk.used));
        }
        let yes_or_no = |yes| if yes { "yes" } else { "no" };
        lines.push(format!(
            "IOMMU: {}   vfio-pci loaded: {}   ublk: {}",
            yes_or_no(self.kernel.iommu),
            yes_or_no(self.kernel.vfio_pci),
            yes_or_no(self.kernel.ublk),
        ));
        lines.push(format!("volumes: {}", self.kernel.volumes.join(", ")));
        lines.push(format!("served by: {}", self.kernel.front_ends.join(", ")));
        lines
    }
}

/// Returns the line of text about a block device: path, size and user.
fn disk(node: &str, bytes: u64, used: &Option<String>) -> String {
    let state = used
        .as_deref()
        .map_or_else(|| "free".to_owned(), |user| format!("in use: {user}"));
    format!("  {node}  {}  {state}", size(bytes))
}

/// Formats a size with binary units, as `--size` and URLs accept it.
fn size(bytes: u64) -> String {
    let units = ["", "K", "M", "G", "T", "P"];
    let mut value = bytes as f64;
    let mut unit = "";
    for next in units {
        unit = next;
        if value < 1024.0 {
            break;
        }
        if next != "P" {
            value /= 1024.0;
        }
    }
    match unit {
        "" => format!("{bytes} bytes"),
        unit => format!("{value:.1}{unit}"),
    }
}

impl Nvme {
    fn of(host: &Host, device: &PciDevice) -> Self {
        let driver = device.driver();
        let group = device.group();
        let controllers = entries(&device.path().join("nvme"));
        let text = |name: &str| {
            let controller = device.path().join("nvme").join(controllers.first()?);
            let text = fs::read_to_string(controller.join(name)).ok()?;
            Some(text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        let namespaces = namespaces(host, device.path(), &controllers);
        let others = group.iter().flat_map(|group| &group.members);
        let others = others.filter(|(bdf, _)| *bdf != device.bdf);
        let members: Vec<String> = others
            .map(|(bdf, driver)| match driver {
                Some(driver) => format!("{bdf} ({driver})"),
                None => bdf.to_string(),
            })
            .collect();
        let next = next(device.bdf, driver.as_deref(), group.is_some(), &namespaces);
        Self {
            address: device.bdf.to_string(),
            model: text("model"),
            serial: text("serial"),
            iommu_group: group.as_ref().map(|group| group.id),
            group_members: members,
            namespaces,
            next,
            driver,
        }
    }
}

/// Returns the possible next step with vnvme for a controller.
fn next(bdf: Bdf, driver: Option<&str>, has_group: bool, namespaces: &[Namespace]) -> String {
    if driver == Some(VFIO_PCI) {
        return format!("serve it: nvme://{bdf}/1 (vnvme info nvme://{bdf} shows it)");
    }
    if let Some(used) = namespaces.iter().find_map(|one| one.used.as_deref()) {
        return format!("not free: {used}");
    }
    if has_group {
        format!("free: vnvme bind {bdf} hands it to {VFIO_PCI}, for nvme://{bdf}/1")
    } else {
        "free, but behind no IOMMU: its disks can be served as block devices".to_owned()
    }
}

/// Returns the kernel's block devices on a controller: its own, or those of its subsystem with
/// native multipath.
fn namespaces(host: &Host, device: &Path, controllers: &[String]) -> Vec<Namespace> {
    let own = controllers
        .iter()
        .map(|name| device.join("nvme").join(name));
    let subsystems = host.sysfs.path("class/nvme-subsystem");
    let shared = entries(&subsystems).into_iter().filter(|subsystem| {
        let has = |name: &String| subsystems.join(subsystem).join(name).exists();
        controllers.iter().any(has)
    });
    let directories = own.chain(shared.map(|subsystem| subsystems.join(subsystem)));
    let mut found = Vec::new();
    for directory in directories {
        // "nvme0n1" is a block device; "nvme0c0n1" is a path to one of a subsystem, and has no
        // node.
        let is_disk = |name: &&String| {
            let rest = name.strip_prefix("nvme").unwrap_or_default();
            let number = rest.split_once('n');
            number.is_some_and(|(a, b)| a.parse::<u32>().is_ok() && b.parse::<u32>().is_ok())
        };
        for name in entries(&directory).iter().filter(is_disk) {
            let path = directory.join(name);
            let nsid = fs::read_to_string(path.join("nsid")).ok();
            found.push(Namespace {
                node: format!("/dev/{name}"),
                bytes: bytes(&path),
                nsid: nsid.and_then(|text| text.trim().parse().ok()),
                used: used(host, &path),
            });
        }
    }
    found
}

/// Returns a block device's size in bytes. Sysfs counts in units of 512 bytes, whatever the block
/// size.
fn bytes(path: &Path) -> u64 {
    let text = fs::read_to_string(path.join("size")).unwrap_or_default();
    let sectors: u64 = text.trim().parse().unwrap_or(0);
    sectors.saturating_mul(512)
}

/// Returns a description of what uses the block device; `None` if it is free.
fn used(host: &Host, path: &Path) -> Option<String> {
    let number = fs::read_to_string(path.join("dev")).ok()?;
    users(host, number.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Creates a sysfs tree with three controllers (one with a mounted partition, one unused, one
    /// bound to vfio-pci), a ublk disk, and a network card.
    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("sys");
        let devices = [
            ("0000:01:00.0", Some("nvme"), 7, "0x010802"),
            ("0000:02:00.0", Some("nvme"), 8, "0x010802"),
            ("0000:03:00.0", Some("vfio-pci"), 9, "0x010802"),
            ("0000:04:00.0", Some("e1000"), 9, "0x020000"),
        ];
        for (bdf, driver, group, class) in devices {
            let real = root.join("devices").join(bdf);
            fs::create_dir_all(&real).unwrap();
            fs::write(real.join("class"), format!("{class}\n")).unwrap();
            fs::create_dir_all(root.join("bus/pci/devices")).unwrap();
            symlink(&real, root.join("bus/pci/devices").join(bdf)).unwrap();
            if let Some(driver) = driver {
                let drivers = root.join("bus/pci/drivers").join(driver);
                fs::create_dir_all(&drivers).unwrap();
                symlink(&drivers, real.join("driver")).unwrap();
            }
            let group = root.join(format!("kernel/iommu_groups/{group}"));
            fs::create_dir_all(group.join("devices")).unwrap();
            symlink(&real, group.join("devices").join(bdf)).unwrap();
            symlink(&group, real.join("iommu_group")).unwrap();
        }
        let disk = |path: PathBuf, number: &str, sectors: u64| {
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("dev"), format!("{number}\n")).unwrap();
            fs::write(path.join("size"), format!("{sectors}\n")).unwrap();
            fs::create_dir_all(root.join("dev/block")).unwrap();
            symlink(&path, root.join("dev/block").join(number)).unwrap();
        };
        for (bdf, n, minor) in [("0000:01:00.0", 0, 0), ("0000:02:00.0", 1, 8)] {
            let controller = root.join(format!("devices/{bdf}/nvme/nvme{n}"));
            fs::create_dir_all(&controller).unwrap();
            fs::write(controller.join("model"), format!("Model {n}   \n")).unwrap();
            fs::write(controller.join("serial"), format!("S{n}\n")).unwrap();
            let namespace = controller.join(format!("nvme{n}n1"));
            disk(namespace.clone(), &format!("259:{minor}"), 2 << 20);
            fs::write(namespace.join("nsid"), "1\n").unwrap();
            let partition = namespace.join(format!("nvme{n}n1p1"));
            disk(partition.clone(), &format!("259:{}", minor + 1), 1 << 20);
            fs::write(partition.join("partition"), "1\n").unwrap();
        }
        let ublk = root.join("devices/virtual/block/ublkb3");
        disk(ublk.clone(), "260:3", 2048);
        fs::create_dir_all(root.join("class/block")).unwrap();
        symlink(&ublk, root.join("class/block/ublkb3")).unwrap();
        let mounts = "36 35 259:1 / /srv rw - ext4 /dev/nvme0n1p1 rw\n";
        fs::create_dir_all(dir.path().join("proc/self")).unwrap();
        fs::write(dir.path().join("proc/self/mountinfo"), mounts).unwrap();
        fs::create_dir_all(dir.path().join("dev")).unwrap();
        fs::write(dir.path().join("dev/ublk-control"), "").unwrap();
        dir
    }

    #[test]
    fn discovery_lists_controllers_with_users() {
        let tree = tree();
        let found = DiscoveredDevices::on(&Host::below(tree.path()));
        let [first, second, third] = found.nvme.as_slice() else {
            panic!("{found:?}");
        };
        assert_eq!(first.model.as_deref(), Some("Model 0"));
        assert_eq!(first.namespaces[0].node, "/dev/nvme0n1");
        assert_eq!(first.namespaces[0].bytes, 1 << 30);
        assert_eq!(first.namespaces[0].nsid, Some(1));
        let used = first.namespaces[0].used.as_deref().unwrap();
        assert_eq!(used, "/dev/nvme0n1p1 is mounted on /srv");
        assert_eq!(first.next, format!("not free: {used}"));
        assert_eq!(second.namespaces[0].used, None);
        assert!(
            second.next.contains("vnvme bind 0000:02:00.0"),
            "{}",
            second.next
        );
        assert_eq!(
            (third.driver.as_deref(), third.iommu_group),
            (Some("vfio-pci"), Some(9))
        );
        assert_eq!(third.group_members, ["0000:04:00.0 (e1000)"]);
        assert!(
            third.next.contains("nvme://0000:03:00.0/1"),
            "{}",
            third.next
        );
        assert_eq!(found.ublk.len(), 1);
        assert_eq!(
            (&*found.ublk[0].node, found.ublk[0].bytes),
            ("/dev/ublkb3", 1 << 20)
        );
        assert!(found.kernel.iommu && found.kernel.vfio_pci && found.kernel.ublk);

        let text = found.lines().join("\n");
        for line in [
            "0000:01:00.0  Model 0  driver nvme  IOMMU group 7",
            "  /dev/nvme0n1  1.0G  in use: /dev/nvme0n1p1 is mounted on /srv",
            "  /dev/nvme1n1  1.0G  free",
            "0000:03:00.0  unknown model  driver vfio-pci  IOMMU group 9",
            "  /dev/ublkb3  1.0M  free",
            "IOMMU: yes   vfio-pci loaded: yes   ublk: yes",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        let json = serde_json::to_value(&found).unwrap();
        assert_eq!(json["nvme"][0]["namespaces"][0]["used"], used);
        assert!(json["nvme"][1]["namespaces"][0].get("used").is_none());
    }

    #[test]
    fn discovery_on_empty_machine_explains() {
        let dir = tempfile::tempdir().unwrap();
        let found = DiscoveredDevices::on(&Host::below(dir.path()));
        let lines = found.lines();
        assert!(lines[0].starts_with("no NVMe controllers"), "{lines:?}");
        assert!(lines[1].contains("IOMMU: no"), "{lines:?}");
        assert!(
            lines[2].contains("file://PATH") && lines[2].contains("nvme://"),
            "{lines:?}"
        );
    }

    #[test]
    fn sizes_are_printed_with_units() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1 << 20, "1.0M"),
            (3 << 29, "1.5G"),
            (u64::MAX, "16384.0P"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }
}
