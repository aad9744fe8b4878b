//! The kernel's VFIO: a real controller, given to this process by vfio-pci.
//!
//! ```text
//! sysfs (driver, group, node) -> iommu (iommufd or group: device, address space) -> Vfio (registers, interrupts, reset)
//! ```
//!
//! [`sysfs`] reads what the system knows of the device, [`iommu`] opens it by either of the
//! kernel's two interfaces, and [`Vfio`] is the
//! [`Transport`](crate::transport::Transport). `unsafe` is in `sys` alone, where
//! the system calls are made. Rules of the kernel that shape this module:
//! - A device comes with its whole IOMMU group, and only with a real IOMMU: the
//!   no-IOMMU mode is refused.
//! - Mapped memory is pinned and counts against RLIMIT_MEMLOCK, for the
//!   group's interface per container.
//! - Some IOVAs are reserved (on x86 FEE00000h to FEEFFFFFh, where interrupt messages go);
//!   the kernel lists the others.
//! - Closing the device ends its DMA and resets it; the address space goes after it.
//!
//! Without the cargo feature `vfio` only names, errors and [`sysfs`] are here.

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
