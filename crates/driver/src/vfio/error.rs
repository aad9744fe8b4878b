//! Why a device cannot be had through VFIO, in words that say what to do about it.

use super::address::Bdf;
use std::io;
use std::path::PathBuf;

/// A VFIO transport that could not be opened or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VfioError {
    /// Nothing at this address.
    #[error("there is no PCI device {bdf} (lspci -D lists them)")]
    NoDevice {
        /// Its address.
        bdf: Bdf,
    },
    /// The kernel, or nobody, drives the device.
    #[error("{bdf} {}; hand it over with: vnvme bind {bdf}", bound(.driver.as_deref()))]
    NotBound {
        /// Its address.
        bdf: Bdf,
        /// The driver that has it.
        driver: Option<String>,
    },
    /// No IOMMU.
    #[error(
        "{bdf} is in no IOMMU group: turn the IOMMU on in the firmware (VT-d, AMD-Vi, SMMU) and in the kernel \
         (intel_iommu=on on Intel)"
    )]
    NoIommu {
        /// Its address.
        bdf: Bdf,
    },
    /// VFIO's no-IOMMU mode.
    #[error(
        "{bdf} has only VFIO's no-IOMMU mode, in which the device could write to all memory: refused; turn a real IOMMU on"
    )]
    NoIommuMode {
        /// Its address.
        bdf: Bdf,
    },
    /// The kernel's part of VFIO is not there.
    #[error("{path} does not exist: {hint}", path = .path.display())]
    Missing {
        /// The device node.
        path: PathBuf,
        /// What brings it.
        hint: &'static str,
    },
    /// The device node may not be opened.
    #[error("no permission to open {path}: run as root, or give the node to this user (chown)", path = .path.display())]
    Permission {
        /// The device node.
        path: PathBuf,
    },
    /// Another process has the device.
    #[error("{path} is in use by another process", path = .path.display())]
    Busy {
        /// The device node.
        path: PathBuf,
    },
    /// Other devices of the IOMMU group belong to the kernel.
    #[error("IOMMU group {group} cannot be used while the kernel drives {}; hand all its devices over together", list(.blockers))]
    NotViable {
        /// The group's number.
        group: u32,
        /// Its devices that are held by other drivers.
        blockers: Vec<(Bdf, String)>,
    },
    /// Interrupts cannot be kept apart.
    #[error(
        "the IOMMU does not remap interrupts, so a device could forge them: refused by the kernel; turn interrupt \
         remapping on in the firmware, or accept the risk with {module}.allow_unsafe_interrupts=1"
    )]
    UnsafeInterrupts {
        /// The module that has the switch.
        module: &'static str,
    },
    /// The memory that may be locked is used up.
    #[error(
        "mapping {wanted} bytes for DMA would exceed the limit of locked memory ({}); raise it with ulimit -l or \
         LimitMEMLOCK=, to the size of all buffers", figure(.limit)
    )]
    LockedMemory {
        /// Bytes of the mapping that was refused.
        wanted: u64,
        /// RLIMIT_MEMLOCK in bytes; `None` for unlimited.
        limit: Option<u64>,
    },
    /// The kernel allows no further mapping.
    #[error(
        "all DMA mappings that the kernel allows are in use (dma_entry_limit of vfio_iommu_type1)"
    )]
    MappingsExhausted,
    /// The device lacks something that an NVMe controller has.
    #[error("{bdf} {what}")]
    Unsuitable {
        /// Its address.
        bdf: Bdf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// An offset outside of the region, or an access that is not aligned.
    #[error("no register of {width} bytes at {offset:#x}")]
    Register {
        /// Offset within BAR0.
        offset: u64,
        /// Bytes.
        width: usize,
    },
    /// An answer of the kernel that contradicts its own interface.
    #[error("the kernel's answer to {0} makes no sense")]
    Malformed(&'static str),
    /// Any other refusal of the kernel.
    #[error("{what}")]
    System {
        /// What was asked for: an ioctl's name, or a path.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl VfioError {
    /// A system call's failure.
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
    match names.is_empty() {
        true => "another device of it".into(),
        false => names.join(", "),
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
    fn messages_say_what_to_do() {
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
