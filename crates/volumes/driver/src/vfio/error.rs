//! Errors of VFIO, with remedies in their messages.

use super::address::Bdf;
use std::io;
use std::path::PathBuf;

/// Reason why a VFIO transport could not be opened or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VfioError {
    /// No PCI device has this address.
    #[error("there is no PCI device {bdf} (lspci -D lists them)")]
    NoDevice {
        /// PCI address at which no device exists.
        bdf: Bdf,
    },
    /// A kernel driver, or none, is bound to the device.
    #[error("{bdf} {}; hand it over with: vnvme bind {bdf}", bound(.driver.as_deref()))]
    NotBound {
        /// PCI address of the device.
        bdf: Bdf,
        /// Driver that is bound to the device; `None` without a driver.
        driver: Option<String>,
    },
    /// The device is not behind an IOMMU.
    #[error(
        "{bdf} is in no IOMMU group: turn the IOMMU on in the firmware (VT-d, AMD-Vi, SMMU) and in the kernel \
         (intel_iommu=on on Intel)"
    )]
    NoIommu {
        /// PCI address of the device without an IOMMU.
        bdf: Bdf,
    },
    /// The device has only VFIO's no-IOMMU mode.
    #[error(
        "{bdf} has only VFIO's no-IOMMU mode, in which the device could write to all memory: refused; turn a real IOMMU on"
    )]
    NoIommuMode {
        /// PCI address of the device.
        bdf: Bdf,
    },
    /// A part of the kernel's VFIO interface is missing.
    #[error("{path} does not exist: {hint}", path = .path.display())]
    Missing {
        /// Path of the missing device node.
        path: PathBuf,
        /// Command or kernel option that provides the device node.
        hint: &'static str,
    },
    /// The process may not open the device node.
    #[error("no permission to open {path}: run as root, or give the node to this user (chown)", path = .path.display())]
    Permission {
        /// Path of the device node that may not be opened.
        path: PathBuf,
    },
    /// Another process uses the device.
    #[error("{path} is in use by another process", path = .path.display())]
    Busy {
        /// Path of the device node that another process has open.
        path: PathBuf,
    },
    /// Other devices of the IOMMU group are bound to kernel drivers.
    #[error("IOMMU group {group} cannot be used while the kernel drives {}; hand all its devices over together", list(.blockers))]
    NotViable {
        /// Number of the IOMMU group.
        group: u32,
        /// Devices of the group that are bound to other drivers, each with its driver.
        blockers: Vec<(Bdf, String)>,
    },
    /// The IOMMU does not remap interrupts.
    #[error(
        "the IOMMU does not remap interrupts, so a device could forge them: refused by the kernel; turn interrupt \
         remapping on in the firmware, or accept the risk with {module}.allow_unsafe_interrupts=1"
    )]
    UnsafeInterrupts {
        /// Kernel module with the parameter that overrides the check.
        module: &'static str,
    },
    /// The limit of locked memory (RLIMIT_MEMLOCK) is reached.
    #[error(
        "mapping {wanted} bytes for DMA would exceed the limit of locked memory ({}); raise it with ulimit -l or \
         LimitMEMLOCK=, to the size of all buffers", figure(.limit)
    )]
    LockedMemory {
        /// Length in bytes of the refused mapping.
        wanted: u64,
        /// RLIMIT_MEMLOCK in bytes; `None` for unlimited.
        limit: Option<u64>,
    },
    /// The kernel's limit on DMA mappings is reached.
    #[error(
        "all DMA mappings that the kernel allows are in use (dma_entry_limit of vfio_iommu_type1)"
    )]
    MappingsExhausted,
    /// The device lacks a feature of NVMe controllers.
    #[error("{bdf} {what}")]
    Unsuitable {
        /// PCI address of the device.
        bdf: Bdf,
        /// Feature of NVMe controllers that the device lacks.
        what: &'static str,
    },
    /// A register access exceeds the region, or is not aligned.
    #[error("no register of {width} bytes at {offset:#x}")]
    Register {
        /// Byte offset of the access within BAR0.
        offset: u64,
        /// Width of the access in bytes.
        width: usize,
    },
    /// The kernel's answer violates its own interface.
    #[error("the kernel's answer to {0} makes no sense")]
    Malformed(&'static str),
    /// Another system call failed.
    #[error("{what}")]
    System {
        /// Operation that failed: an ioctl's name, or a path.
        what: String,
        /// Error of the system call.
        source: io::Error,
    },
}

impl VfioError {
    /// Creates the error of a system call.
    #[cfg(feature = "vfio")]
    pub(super) fn system(what: impl Into<String>, source: io::Error) -> VfioError {
        let what = what.into();
        VfioError::System { what, source }
    }
}

fn bound(driver: Option<&str>) -> String {
    match driver {
        Some(driver) => format!("belongs to the kernel's driver {driver}"),
        None => "is not bound to vfio-pci".into(),
    }
}

fn list(devices: &[(Bdf, String)]) -> String {
    let names: Vec<String> = devices
        .iter()
        .map(|(bdf, driver)| format!("{bdf} ({driver})"))
        .collect();
    if names.is_empty() {
        "another device of it".into()
    } else {
        names.join(", ")
    }
}

fn figure(bytes: &Option<u64>) -> String {
    match bytes {
        Some(bytes) => format!("{bytes} bytes, {} MiB", bytes >> 20),
        None => "unlimited for this process, so perhaps a control group's".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_messages_name_remedy() {
        let bdf = "44:00.0".parse().unwrap();
        let text = |e: VfioError| e.to_string();
        let driver = Some("nvme".into());
        assert_eq!(
            text(VfioError::NotBound { bdf, driver }),
            "0000:44:00.0 belongs to the kernel's driver nvme; hand it over with: vnvme bind 0000:44:00.0"
        );
        let blockers = vec![(bdf, "nvme".to_string()), (bdf, "ahci".to_string())];
        let not_viable = text(VfioError::NotViable { group: 3, blockers });
        assert!(not_viable.contains("0000:44:00.0 (nvme), 0000:44:00.0 (ahci)"));
        let memlock = text(VfioError::LockedMemory {
            wanted: 4096,
            limit: Some(8 << 20),
        });
        assert!(memlock.contains("(8388608 bytes, 8 MiB)"), "{memlock}");
    }
}
