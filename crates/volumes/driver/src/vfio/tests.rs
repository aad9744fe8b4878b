//! Tests of devices that are refused before the kernel is called, on artificial sysfs trees. A
//! guest tests the kernel's own behaviour (`testing/harness/tests/guests/vfio.rs`).

use super::caps::Region;
use super::function::place;
use super::sysfs::Sysfs;
use super::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

const BDF: &str = "0000:01:00.0";

fn options(root: &Path) -> VfioOptions {
    VfioOptions {
        interface: Interface::Any,
        sysfs: Sysfs::at(root),
        dev: root.join("dev"),
    }
}

fn refusal(root: &Path) -> String {
    let bdf = BDF.parse().unwrap();
    Vfio::open(bdf, &options(root)).unwrap_err().to_string()
}

fn bind(root: &Path, driver: &str) {
    let dir = root.join("bus/pci/drivers").join(driver);
    fs::create_dir_all(&dir).unwrap();
    let link = root.join("bus/pci/devices").join(BDF).join("driver");
    let _ = fs::remove_file(&link);
    symlink(dir, link).unwrap();
}

#[test]
fn each_missing_step_has_own_message() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    assert!(refusal(root).starts_with("there is no PCI device 0000:01:00.0"));
    let device = root.join("bus/pci/devices").join(BDF);
    fs::create_dir_all(&device).unwrap();
    assert!(refusal(root).contains("not bound to vfio-pci; hand it over with: vnvme bind 0000:01"));
    bind(root, "nvme");
    assert!(refusal(root).contains("belongs to the kernel's driver nvme"));
    bind(root, "vfio-pci");
    fs::write(device.join("class"), "0x010601\n").unwrap();
    assert!(refusal(root).contains("is not an NVMe controller"));
    fs::write(device.join("class"), "0x010802\n").unwrap();
    assert!(refusal(root).contains("is in no IOMMU group"));
    let group = root.join("kernel/iommu_groups/4");
    fs::create_dir_all(group.join("devices")).unwrap();
    fs::write(group.join("name"), "vfio-noiommu\n").unwrap();
    symlink(&group, device.join("iommu_group")).unwrap();
    assert!(refusal(root).contains("no-IOMMU mode"));
    fs::remove_file(group.join("name")).unwrap();
    assert!(refusal(root).contains("dev/vfio/vfio does not exist"));
    bind(root, "mlx5_vfio_pci");
    assert!(refusal(root).contains("dev/vfio/vfio does not exist"));
}

#[test]
fn access_outside_region_is_refused() {
    let region = Region {
        size: 0x4000,
        offset: 7 << 40,
        mappable: Vec::new(),
    };
    assert_eq!(place(&region, 0x3ffc, 4).unwrap(), (7 << 40) + 0x3ffc);
    for offset in [0x3ffd, 0x4000, u64::MAX] {
        assert!(place(&region, offset, 4).is_err(), "{offset:#x}");
    }
}
