//! `vnvme bind` and `vnvme unbind`: bind an NVMe device to vfio-pci, and return it to the kernel.
//!
//! Everything is checked for all devices before anything is changed for the first one. A device
//! with a disk in use is refused; the disks are claimed exclusively from that check until the
//! kernel's driver has released them, so that none is mounted in between. When vfio-pci does not
//! take a device, the kernel's driver gets it back.

mod usage;

#[cfg(test)]
mod tests;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use driver::vfio::sysfs::{Group, PciDevice, Sysfs, VFIO_PCI};
use driver::vfio::{Bdf, VfioError};
use output::outln;
use serde::Serialize;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use usage::DeviceClaim;
pub use usage::users;

/// Devices, and how to report.
#[derive(Args)]
pub struct BindArgs {
    /// PCI addresses of NVMe controllers, like 0000:44:00.0 (lspci -D). All controllers of an IOMMU
    /// group must be given together
    #[arg(required = true, value_name = "BDF")]
    devices: Vec<Bdf>,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

impl BindArgs {
    /// Binds the devices to the driver vfio-pci, so that userspace can drive them.
    pub fn bind(&self) -> Result<()> {
        daemon::parts::check_vfio()?;
        self.print(&bind(&Host::system(), &System, &self.devices)?)
    }

    /// Binds the devices to the kernel's own driver again.
    pub fn unbind(&self) -> Result<()> {
        self.print(&unbind(&Host::system(), &System, &self.devices)?)
    }

    fn print(&self, reports: &[BindReport]) -> Result<()> {
        if self.json {
            outln!("{}", serde_json::to_string_pretty(reports)?);
        } else {
            for report in reports {
                outln!("{report}");
            }
        }
        Ok(())
    }
}

/// Directories with the system's device information, `/sys`, `/proc` and `/dev`.
pub struct Host {
    pub sysfs: Sysfs,
    pub proc: PathBuf,
    pub dev: PathBuf,
}

impl Host {
    /// Returns the directories of the running system.
    pub fn system() -> Host {
        Host::below(Path::new("/"))
    }

    /// Returns the directories below `root`, for tests and for `--root`.
    pub fn below(root: &Path) -> Host {
        Host {
            sysfs: Sysfs::at(root.join("sys")),
            proc: root.join("proc"),
            dev: root.join("dev"),
        }
    }
}

/// Operations of the kernel that change the system. Tests replace the implementation.
trait Kernel {
    /// Writes `text` to the sysfs attribute at `path`.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
    /// Loads a kernel module. The error is a text for the user.
    fn modprobe(&self, module: &str) -> Result<(), String>;
}

struct System;

impl Kernel for System {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        fs::write(path, text)
    }

    fn modprobe(&self, module: &str) -> Result<(), String> {
        let output = Command::new("modprobe")
            .arg(module)
            .output()
            .map_err(|e| e.to_string())?;
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).trim().to_string())
        }
    }
}

/// Result of binding or unbinding one device, as printed.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct BindReport {
    /// PCI address of the device.
    device: String,
    /// Driver of the device before the command; `None` if none was bound.
    from: Option<String>,
    /// Driver of the device after the command; `None` if none is bound.
    driver: Option<String>,
    /// Whether the command changed the driver.
    changed: bool,
    /// Number of the device's IOMMU group, if the device is in one.
    iommu_group: Option<u32>,
    /// The device nodes that a user needs, for a device that is bound to vfio-pci.
    nodes: Vec<String>,
}

impl fmt::Display for BindReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |driver: &Option<String>| driver.clone().unwrap_or_else(|| "no driver".into());
        write!(f, "{}: ", self.device)?;
        if self.changed {
            write!(f, "{} -> {}", name(&self.from), name(&self.driver))?
        } else {
            write!(f, "already bound to {}", name(&self.driver))?
        }
        if !self.nodes.is_empty() {
            write!(f, " ({})", self.nodes.join(", "))?;
        }
        Ok(())
    }
}

impl BindReport {
    fn new(device: &PciDevice, from: Option<String>, changed: bool) -> BindReport {
        let driver = device.driver();
        let group = device.group();
        let mut nodes = Vec::new();
        if is_vfio(driver.as_deref()) {
            let cdev = device.cdev();
            nodes.extend(cdev.map(|name| format!("/dev/vfio/devices/{name}")));
            nodes.extend(
                group
                    .as_ref()
                    .map(|group| format!("/dev/vfio/{}", group.id)),
            );
        }
        BindReport {
            device: device.bdf.to_string(),
            from,
            driver,
            changed,
            iommu_group: group.map(|group| group.id),
            nodes,
        }
    }
}

fn is_vfio(driver: Option<&str>) -> bool {
    driver.is_some_and(|name| name.replace('_', "-").ends_with(VFIO_PCI))
}

fn bind(host: &Host, kernel: &impl Kernel, bdfs: &[Bdf]) -> Result<Vec<BindReport>> {
    let mut checked = Vec::new();
    for bdf in bdfs {
        let device = find(host, *bdf)?;
        if is_vfio(device.driver().as_deref()) {
            checked.push((device, None));
            continue;
        }
        usable_group(&device, bdfs)?;
        let usage = DeviceClaim::of(host, &device)?;
        checked.push((device, Some(usage)));
    }
    if checked.iter().any(|(_, usage)| usage.is_some()) {
        load(host, kernel)?;
    }
    let mut reports = Vec::new();
    for (device, usage) in checked {
        let from = device.driver();
        let changed = usage.is_some();
        if let Some(claims) = usage {
            hand_over(host, kernel, &device, Some(VFIO_PCI))?;
            drop(claims);
            let got = device.driver();
            if got.as_deref() != Some(VFIO_PCI) {
                hand_over(host, kernel, &device, None)?;
                let now = device.driver();
                bail!(
                    "vfio-pci refused {} (dmesg may have the reason); it is bound to {} again",
                    device.bdf,
                    now.as_deref().unwrap_or("no driver")
                );
            }
        }
        reports.push(BindReport::new(&device, from, changed));
    }
    Ok(reports)
}

fn unbind(host: &Host, kernel: &impl Kernel, bdfs: &[Bdf]) -> Result<Vec<BindReport>> {
    let mut devices = Vec::new();
    for bdf in bdfs {
        let device = find(host, *bdf)?;
        let from = device.driver();
        if is_vfio(from.as_deref()) {
            // Without this check the kernel would wait for the user to go away, and this process
            // with it.
            usage::vfio_users(host, &device)?;
        }
        devices.push((device, from));
    }
    let mut reports = Vec::new();
    for (device, from) in devices {
        // A device without a driver is offered to the kernel's drivers, too.
        let changed = is_vfio(from.as_deref()) || from.is_none();
        if changed {
            hand_over(host, kernel, &device, None)?;
            let now = device.driver();
            ensure!(
                !is_vfio(now.as_deref()),
                "{} is still bound to {}",
                device.bdf,
                now.unwrap_or_default()
            );
        }
        reports.push(BindReport::new(&device, from, changed));
    }
    Ok(reports)
}

/// Finds an NVMe controller. Other devices are refused, since the system may depend on them in ways
/// that are not checked here.
fn find(host: &Host, bdf: Bdf) -> Result<PciDevice> {
    let found = host.sysfs.device(bdf);
    let device = found.ok_or(VfioError::NoDevice { bdf })?;
    let class = device.class().unwrap_or(0);
    ensure!(
        class >> 8 == 0x01_08,
        "{bdf} is not an NVMe controller (class code {class:06x}h)"
    );
    Ok(device)
}

/// The group must be able to belong to userspace once all of `bdfs` are handed over.
fn usable_group(device: &PciDevice, bdfs: &[Bdf]) -> Result<Group> {
    let bdf = device.bdf;
    let group = device.group().ok_or(VfioError::NoIommu { bdf })?;
    ensure!(!group.noiommu, VfioError::NoIommuMode { bdf });
    let blockers = group.blockers(bdfs);
    let group_id = group.id;
    ensure!(
        blockers.is_empty(),
        VfioError::NotViable {
            group: group_id,
            blockers
        }
    );
    Ok(group)
}

fn load(host: &Host, kernel: &impl Kernel) -> Result<()> {
    // The group's interface needs it, and nothing loads it by itself; kernels with iommufd go
    // without.
    if !host.sysfs.path("module/vfio_iommu_type1").exists() {
        let _ = kernel.modprobe("vfio_iommu_type1");
    }
    let driver = host.sysfs.driver(VFIO_PCI);
    if driver.is_dir() {
        return Ok(());
    }
    let loaded = kernel.modprobe(VFIO_PCI);
    if driver.is_dir() {
        return Ok(());
    }
    match loaded {
        Ok(()) => bail!("the kernel has no driver vfio-pci, although the module was loaded"),
        Err(why) => {
            bail!("the kernel's driver vfio-pci is not loaded, and modprobe vfio-pci fails: {why}")
        }
    }
}

/// Binds a device to `driver`, or to the kernel's default driver without one.
fn hand_over(
    host: &Host,
    kernel: &impl Kernel,
    device: &PciDevice,
    driver: Option<&str>,
) -> Result<()> {
    let write = |path: PathBuf, text: &str| {
        let written = kernel.write(&path, text);
        written.with_context(|| match driver {
            Some(driver) => format!(
                "{} cannot be handed to {driver}: {}",
                device.bdf,
                path.display()
            ),
            None => format!("{} cannot be handed back: {}", device.bdf, path.display()),
        })
    };
    // An empty line takes the override away.
    let text = driver.map_or("\n".into(), |driver| format!("{driver}\n"));
    write(device.path().join("driver_override"), &text)?;
    let done = (|| {
        if device.driver().is_some() {
            write(device.path().join("driver/unbind"), &device.bdf.to_string())?;
        }
        write(
            host.sysfs.path("bus/pci/drivers_probe"),
            &device.bdf.to_string(),
        )
    })();
    if done.is_err() && driver.is_some() {
        // Back to how it was, as far as the kernel lets us; the first error is the one to report.
        let _ = kernel.write(&device.path().join("driver_override"), "\n");
        let _ = kernel.write(
            &host.sysfs.path("bus/pci/drivers_probe"),
            &device.bdf.to_string(),
        );
    }
    done
}
