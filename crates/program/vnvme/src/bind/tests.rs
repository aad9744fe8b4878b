//! Both directions on a made-up system: two NVMe controllers in one group, one of them with a
//! partitioned disk.

use super::*;
use std::cell::RefCell;
use std::os::unix::fs::symlink;

const A: &str = "0000:01:00.0";
const B: &str = "0000:01:00.1";

/// A simulated kernel that changes a directory tree as Linux changes sysfs.
struct Fake {
    root: PathBuf,
    /// vfio-pci can be loaded.
    has_module: bool,
    /// vfio-pci takes devices.
    takes: bool,
    log: RefCell<Vec<String>>,
}

impl Fake {
    fn new(root: &Path) -> Fake {
        Fake {
            root: root.into(),
            has_module: true,
            takes: true,
            log: RefCell::default(),
        }
    }

    fn attach(&self, bdf: &str, driver: &str) {
        let dir = self.root.join("sys/bus/pci/drivers").join(driver);
        fs::create_dir_all(&dir).unwrap();
        symlink(dir, self.device(bdf).join("driver")).unwrap();
    }

    fn device(&self, bdf: &str) -> PathBuf {
        self.root.join("sys/bus/pci/devices").join(bdf)
    }
}

impl Kernel for Fake {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let attribute = path.file_name().unwrap().to_str().unwrap();
        self.log
            .borrow_mut()
            .push(format!("{attribute}={}", text.trim()));
        match attribute {
            "driver_override" => fs::write(path, text),
            "unbind" => fs::remove_file(self.device(text).join("driver")),
            "drivers_probe" => {
                let name = fs::read_to_string(self.device(text).join("driver_override"))?;
                match name.trim() {
                    "" => self.attach(text, "nvme"),
                    name if self.takes => self.attach(text, name),
                    _ => {}
                }
                Ok(())
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn modprobe(&self, module: &str) -> Result<(), String> {
        self.log.borrow_mut().push(format!("modprobe={module}"));
        if !self.has_module {
            return Err(format!("FATAL: Module {module} not found"));
        }
        fs::create_dir_all(self.root.join("sys/bus/pci/drivers").join(module)).unwrap();
        Ok(())
    }
}

struct Made {
    _dir: tempfile::TempDir,
    root: PathBuf,
    host: Host,
    kernel: Fake,
}

fn made() -> Made {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let make = |path: &str| {
        fs::create_dir_all(root.join(path)).unwrap();
        root.join(path)
    };
    for path in [
        "sys/bus/pci/devices",
        "sys/dev/block",
        "sys/dev/char",
        "proc/self",
        "dev/vfio",
    ] {
        make(path);
    }
    let group = make("sys/kernel/iommu_groups/7/devices");
    let kernel = Fake::new(&root);
    for bdf in [A, B] {
        let real = make(&format!("sys/devices/pci0000:00/{bdf}"));
        fs::write(real.join("class"), "0x010802\n").unwrap();
        symlink(&real, root.join("sys/bus/pci/devices").join(bdf)).unwrap();
        symlink(&real, group.join(bdf)).unwrap();
        symlink(group.parent().unwrap(), real.join("iommu_group")).unwrap();
    }
    kernel.attach(A, "nvme");
    let disk = make(&format!("sys/devices/pci0000:00/{A}/nvme/nvme0/nvme0n1"));
    let part = make(&format!(
        "sys/devices/pci0000:00/{A}/nvme/nvme0/nvme0n1/nvme0n1p1"
    ));
    fs::write(part.join("partition"), "1\n").unwrap();
    symlink(&disk, root.join("sys/dev/block/259:0")).unwrap();
    symlink(&part, root.join("sys/dev/block/259:1")).unwrap();
    symlink(disk.parent().unwrap(), root.join("sys/dev/char/240:0")).unwrap();
    for name in ["nvme0n1", "nvme0n1p1", "nvme0"] {
        fs::write(root.join("dev").join(name), "").unwrap();
    }
    let swaps = "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n";
    fs::write(root.join("proc/swaps"), swaps).unwrap();
    let mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n";
    fs::write(root.join("proc/self/mountinfo"), mounts).unwrap();
    Made {
        host: Host {
            sysfs: Sysfs::at(root.join("sys")),
            proc: root.join("proc"),
            dev: root.join("dev"),
        },
        _dir: dir,
        root,
        kernel,
    }
}

fn bdfs(texts: &[&str]) -> Vec<Bdf> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

impl Made {
    fn bind(&self, devices: &[&str]) -> Result<Vec<BindReport>> {
        bind(&self.host, &self.kernel, &bdfs(devices))
    }

    fn unbind(&self, devices: &[&str]) -> Result<Vec<BindReport>> {
        unbind(&self.host, &self.kernel, &bdfs(devices))
    }

    fn driver(&self, bdf: &str) -> Option<String> {
        let device = self.host.sysfs.device(bdf.parse().unwrap());
        device.and_then(|device| device.driver())
    }

    /// The device is refused in one line for a reason, and nothing was touched.
    fn refused(&self, reason: &str) {
        let text = format!("{:#}", self.bind(&[A]).unwrap_err());
        assert!(text.contains(reason), "{text}");
        assert_eq!(text.lines().count(), 1);
        assert_eq!(*self.kernel.log.borrow(), [""; 0]);
    }
}

#[test]
fn device_is_bound_to_vfio_and_back() {
    let made = made();
    let report = made.bind(&[A]).unwrap();
    assert_eq!(
        *made.kernel.log.borrow(),
        [
            "modprobe=vfio_iommu_type1",
            "modprobe=vfio-pci",
            "driver_override=vfio-pci",
            "unbind=0000:01:00.0",
            "drivers_probe=0000:01:00.0"
        ]
    );
    assert_eq!(
        report[0].to_string(),
        "0000:01:00.0: nvme -> vfio-pci (/dev/vfio/7)"
    );
    assert_eq!(report[0].iommu_group, Some(7));
    let again = made.bind(&[A]).unwrap();
    assert!(!again[0].changed);
    assert_eq!(
        again[0].to_string(),
        "0000:01:00.0: already bound to vfio-pci (/dev/vfio/7)"
    );
    let back = made.unbind(&[A]).unwrap();
    assert_eq!(back[0].to_string(), "0000:01:00.0: vfio-pci -> nvme");
    let json = serde_json::to_value(&back).unwrap();
    assert_eq!(json[0]["from"], "vfio-pci");
    assert_eq!(json[0]["driver"], "nvme");
    assert!(!made.unbind(&[A]).unwrap()[0].changed);
}

#[test]
fn mounted_disk_is_refused_for_any_source_name() {
    let made = made();
    let table = made.root.join("proc/self/mountinfo");
    fs::write(&table, "30 1 259:1 / /mnt rw - ext4 /dev/root rw\n").unwrap();
    made.refused("0000:01:00.0 is in use: /dev/nvme0n1p1 is mounted on /mnt");
    fs::write(
        &table,
        "30 1 0:44 / /data rw shared:1 - btrfs /dev/nvme0n1 rw\n",
    )
    .unwrap();
    made.refused("/dev/nvme0n1 is mounted on /data");
    fs::write(&table, "30 1 259:2 / /mnt rw - ext4 /dev/nvme0n1p11 rw\n").unwrap();
    made.bind(&[A]).unwrap();
}

#[test]
fn disk_is_in_use_when_its_partition_is() {
    let made = made();
    let table = made.root.join("proc/self/mountinfo");
    fs::write(&table, "30 1 259:1 / /mnt rw - ext4 /dev/nvme0n1p1 rw\n").unwrap();
    let mounted = "/dev/nvme0n1p1 is mounted on /mnt";
    assert_eq!(users(&made.host, "259:0").as_deref(), Some(mounted));
    assert_eq!(users(&made.host, "259:1").as_deref(), Some(mounted));
    let second = made.root.join(format!(
        "sys/devices/pci0000:00/{A}/nvme/nvme0/nvme0n1/nvme0n1p2"
    ));
    fs::create_dir_all(&second).unwrap();
    symlink(&second, made.root.join("sys/dev/block/259:2")).unwrap();
    assert_eq!(users(&made.host, "259:2"), None);
    assert_eq!(users(&made.host, "7:0"), None);
}

#[test]
fn swap_and_device_mapper_disks_are_refused() {
    let made = made();
    let swaps = made.root.join("proc/swaps");
    fs::write(&swaps, "Filename Type\n/dev/nvme0n1p1 partition 1 0 -2\n").unwrap();
    made.refused("/dev/nvme0n1p1 is swapped to");
    fs::write(&swaps, "Filename Type\n").unwrap();
    let holders = made.root.join("sys/dev/block/259:1/holders/dm-0");
    fs::create_dir_all(&holders).unwrap();
    made.refused("/dev/nvme0n1p1 is part of /dev/dm-0");
    fs::remove_dir(&holders).unwrap();
    made.bind(&[A]).unwrap();
}

#[test]
fn open_disk_or_controller_is_refused_naming_process() {
    let made = made();
    let process = made.root.join("proc/4711");
    fs::create_dir_all(process.join("fd")).unwrap();
    fs::write(process.join("comm"), "fio\n").unwrap();
    let fd = process.join("fd/3");
    for name in ["nvme0n1p1", "nvme0"] {
        let node = made.root.join("dev").join(name);
        symlink(&node, &fd).unwrap();
        made.refused(&format!("{} is open in process 4711 (fio)", node.display()));
        fs::remove_file(&fd).unwrap();
    }
    symlink("/dev/null", &fd).unwrap();
    made.bind(&[A]).unwrap();
    symlink(made.root.join("dev/vfio/7"), process.join("fd/4")).unwrap();
    let text = made.unbind(&[A]).unwrap_err().to_string();
    assert!(
        text.contains("dev/vfio/7 is open in process 4711 (fio)"),
        "{text}"
    );
    assert_eq!(made.driver(A).as_deref(), Some("vfio-pci"));
}

#[test]
fn shared_disks_of_subsystem_count() {
    let made = made();
    let subsystem = made
        .root
        .join("sys/devices/virtual/nvme-subsystem/nvme-subsys0");
    let head = subsystem.join("nvme1n1");
    fs::create_dir_all(&head).unwrap();
    fs::create_dir_all(made.root.join("sys/class/nvme-subsystem")).unwrap();
    symlink(
        &subsystem,
        made.root.join("sys/class/nvme-subsystem/nvme-subsys0"),
    )
    .unwrap();
    symlink(&head, made.root.join("sys/dev/block/259:9")).unwrap();
    let table = made.root.join("proc/self/mountinfo");
    fs::write(&table, "30 1 259:9 / /mnt rw - ext4 /dev/nvme1n1 rw\n").unwrap();
    made.bind(&[A]).unwrap();
    made.unbind(&[A]).unwrap();
    made.kernel.log.borrow_mut().clear();
    symlink(
        made.root.join("sys/dev/char/240:0"),
        subsystem.join("nvme0"),
    )
    .unwrap();
    made.refused("/dev/nvme1n1 is mounted on /mnt");
}

#[test]
fn iommu_group_is_bound_as_whole() {
    let made = made();
    made.kernel.attach(B, "nvme");
    made.refused("IOMMU group 7 cannot be used while the kernel drives 0000:01:00.1 (nvme)");
    let reports = made.bind(&[A, B]).unwrap();
    assert!(
        reports
            .iter()
            .all(|report| report.driver.as_deref() == Some("vfio-pci"))
    );
}

#[test]
fn refused_device_leaves_earlier_ones_unchanged() {
    let made = made();
    made.kernel.attach(B, "nvme");
    fs::write(made.kernel.device(B).join("class"), "0x020000\n").unwrap();
    let text = made.bind(&[A, B]).unwrap_err().to_string();
    assert_eq!(
        text,
        "0000:01:00.1 is not an NVMe controller (class code 020000h)"
    );
    assert_eq!(*made.kernel.log.borrow(), [""; 0]);
}

#[test]
fn device_refused_by_vfio_returns_to_driver() {
    let mut made = made();
    made.kernel.takes = false;
    let text = made.bind(&[A]).unwrap_err().to_string();
    assert!(text.contains("bound to nvme again"), "{text}");
    assert_eq!(made.driver(A).as_deref(), Some("nvme"));
    let left = fs::read_to_string(made.kernel.device(A).join("driver_override")).unwrap();
    assert_eq!(left, "\n");
}

#[test]
fn missing_iommu_and_devices_are_named() {
    let mut made = made();
    made.kernel.has_module = false;
    let text = made.bind(&[A]).unwrap_err().to_string();
    assert!(
        text.contains("modprobe vfio-pci fails: FATAL: Module vfio-pci not found"),
        "{text}"
    );
    assert_eq!(made.driver(A).as_deref(), Some("nvme"));
    made.kernel.log.borrow_mut().clear();
    fs::remove_file(made.kernel.device(A).join("iommu_group")).unwrap();
    made.refused("0000:01:00.0 is in no IOMMU group");
    let text = made.bind(&["0000:77:00.0"]).unwrap_err().to_string();
    assert!(
        text.starts_with("there is no PCI device 0000:77:00.0"),
        "{text}"
    );
}
