//! Access to a real controller through the kernel's VFIO (vfio-pci).
//!
//! ```text
//! sysfs (driver, group, node) -> iommu (iommufd or group: device, address space) -> Vfio (registers, interrupts, reset)
//! ```
//!
//! [`sysfs`] reads the system's description of the device, [`iommu`] opens it by either of the
//! kernel's two interfaces, and [`Vfio`] implements [`Transport`](crate::transport::Transport).
//! `unsafe` is confined to `sys`, which makes the system calls. Rules of the kernel that shape this
//! module:
//! - A device is handed over with its whole IOMMU group, and only with a real IOMMU: the no-IOMMU
//!   mode is refused.
//! - Mapped memory is pinned and counts against RLIMIT_MEMLOCK, for the group's interface per
//!   container.
//! - Some IOVAs are reserved (on x86 FEE00000h to FEEFFFFFh, the window of interrupt messages); the
//!   kernel lists the usable ones.
//! - Closing the device ends its DMA and resets it; the address space must be removed afterwards.
//!
//! Without the cargo feature `vfio` this module has only names, errors and [`sysfs`].

mod address;
#[cfg(feature = "vfio")]
mod caps;
mod error;
#[cfg(feature = "vfio")]
mod function;
#[cfg(feature = "vfio")]
pub mod iommu;
#[cfg(feature = "vfio")]
#[allow(unsafe_code)]
mod sys;
pub mod sysfs;

pub use address::{BadAddress, Bdf};
pub use error::VfioError;
#[cfg(feature = "vfio")]
pub use function::{Vfio, VfioOptions};
#[cfg(feature = "vfio")]
pub use iommu::Interface;

#[cfg(feature = "vfio")]
#[cfg(test)]
mod tests;
