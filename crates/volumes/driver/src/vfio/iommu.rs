//! IOMMU address space of a device. Where the kernel supports it, an iommufd and the device's own
//! node; otherwise a container and the device's group. Both provide an open device and an address
//! space.

use super::caps;
use super::error::VfioError;
use super::sys::{self, size};
use super::sysfs::{Group, PciDevice};
use dma::Prot;
use iommufd_bindings::iommufd::{
    iommu_ioas_alloc, iommu_ioas_map, iommu_ioas_unmap,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA as IOAS_FIXED,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE as IOAS_READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE as IOAS_WRITEABLE,
};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CString;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_GROUP_FLAGS_VIABLE,
    VFIO_TYPE1v2_IOMMU, vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd, vfio_group_status,
    vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap,
};

/// Maximum number of mappings of an iommufd, which has no limit of its own. It keeps the kernel's
/// bookkeeping in the tens of megabytes.
const IOMMUFD_MAPPINGS: usize = 1 << 18;
/// Default `dma_entry_limit` of vfio_iommu_type1, for kernels that do not report the remaining
/// mappings.
const TYPE1_MAPPINGS: usize = 65535;
/// IOVAs that any IOMMU of a PC translates, except the window of interrupt messages; used with
/// kernels that do not report the usable IOVAs.
const USUAL_RANGES: [RangeInclusive<u64>; 2] = [0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff];

const NO_VFIO: &str = "load VFIO with: modprobe vfio-pci vfio_iommu_type1";
const NO_CDEV: &str = "this kernel has no device nodes for VFIO (CONFIG_VFIO_DEVICE_CDEV)";
const NO_IOMMUFD: &str = "load it with: modprobe iommufd (or this kernel has none, CONFIG_IOMMUFD)";

/// Kernel interface by which a device is accessed: iommufd, or container and group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interface {
    /// iommufd where it works for this device and user, otherwise container and group.
    #[default]
    Any,
    /// Device access through iommufd and the device's own node only.
    Iommufd,
    /// Device access through a vfio container and group only.
    Group,
}

/// IOMMU address space that a device is attached to.
#[derive(Debug)]
pub enum Iommu {
    /// Address space of an iommufd.
    Iommufd {
        /// Open file `/dev/iommu`.
        iommufd: OwnedFd,
        /// Identifier of the I/O address space (IOAS) in the iommufd.
        ioas: u32,
    },
    /// Type1 container with one group.
    Type1 {
        /// Open file `/dev/vfio/vfio`.
        container: OwnedFd,
        /// Open file `/dev/vfio/N`; closing it removes the container's address space.
        group: OwnedFd,
    },
}

/// Limits of DMA mappings in an IOMMU address space.
#[derive(Clone, Debug)]
pub struct MappingLimits {
    /// Ranges of IOVAs that may be used, ascending and disjoint.
    pub ranges: Vec<RangeInclusive<u64>>,
    /// Maximum number of DMA mappings at a time.
    pub mappings: usize,
    /// Granularity of DMA mappings in bytes.
    pub page_size: u64,
}

/// Opens a device that is bound to vfio-pci, and its address space. `dev` is normally `/dev`.
pub fn open(
    device: &PciDevice,
    group: &Group,
    interface: Interface,
    dev: &Path,
) -> Result<(OwnedFd, Iommu), VfioError> {
    let by_group = || open_group(device, group, dev);
    let by_iommufd = || open_iommufd(device, dev);
    match interface {
        Interface::Group => by_group(),
        Interface::Iommufd => by_iommufd(),
        Interface::Any if device.cdev().is_none() || !dev.join("iommu").exists() => by_group(),
        // Distributions have long given users access to the group's node, but not yet to the new
        // nodes.
        Interface::Any => match by_iommufd() {
            Err(refused @ VfioError::Permission { .. }) => by_group().map_err(|e| match e {
                VfioError::Permission { .. } | VfioError::Missing { .. } => refused,
                e => e,
            }),
            answer => answer,
        },
    }
}

fn open_node(path: PathBuf, hint: &'static str) -> Result<OwnedFd, VfioError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| match errno {
        // ENODEV, ENXIO: the node has no driver.
        Errno::NOENT | Errno::NODEV | Errno::NXIO => VfioError::Missing { path, hint },
        Errno::ACCESS | Errno::PERM => VfioError::Permission { path },
        Errno::BUSY => VfioError::Busy { path },
        errno => VfioError::system(path.display().to_string(), errno.into()),
    })
}

fn open_iommufd(device: &PciDevice, dev: &Path) -> Result<(OwnedFd, Iommu), VfioError> {
    let name = device.cdev();
    let node = dev.join("vfio/devices").join(name.unwrap_or_default());
    if device.cdev().is_none() {
        let (path, hint) = (node, NO_CDEV);
        return Err(VfioError::Missing { path, hint });
    }
    let iommufd = open_node(dev.join("iommu"), NO_IOMMUFD)?;
    let fd = open_node(node.clone(), NO_CDEV)?;
    let mut bind = vfio_device_bind_iommufd {
        argsz: size::<vfio_device_bind_iommufd>(),
        iommufd: iommufd.as_raw_fd(),
        ..vfio_device_bind_iommufd::default()
    };
    let bound = sys::call(fd.as_fd(), sys::DEVICE_BIND_IOMMUFD, &mut bind);
    bound.map_err(|e| match e.raw_os_error() {
        // A device that is already bound answers EINVAL; with its group in use, EBUSY.
        Some(libc::EBUSY | libc::EINVAL) => VfioError::Busy { path: node },
        Some(libc::EPERM) => VfioError::UnsafeInterrupts { module: "iommufd" },
        _ => VfioError::system("VFIO_DEVICE_BIND_IOMMUFD", e),
    })?;
    let mut alloc = iommu_ioas_alloc {
        size: size::<iommu_ioas_alloc>(),
        ..iommu_ioas_alloc::default()
    };
    sys::call(iommufd.as_fd(), sys::IOAS_ALLOC, &mut alloc)
        .map_err(|e| VfioError::system("IOMMU_IOAS_ALLOC", e))?;
    let ioas = alloc.out_ioas_id;
    let mut attach = vfio_device_attach_iommufd_pt {
        argsz: size::<vfio_device_attach_iommufd_pt>(),
        pt_id: ioas,
        ..vfio_device_attach_iommufd_pt::default()
    };
    sys::call(fd.as_fd(), sys::DEVICE_ATTACH_IOMMUFD_PT, &mut attach).map_err(|e| {
        match e.raw_os_error() {
            Some(libc::EPERM) => VfioError::UnsafeInterrupts { module: "iommufd" },
            _ => VfioError::system("VFIO_DEVICE_ATTACH_IOMMUFD_PT", e),
        }
    })?;
    Ok((fd, Iommu::Iommufd { iommufd, ioas }))
}

fn open_group(
    device: &PciDevice,
    group: &Group,
    dev: &Path,
) -> Result<(OwnedFd, Iommu), VfioError> {
    let container = open_node(dev.join("vfio/vfio"), NO_VFIO)?;
    let version = sys::plain(container.as_fd(), sys::GET_API_VERSION, 0)
        .map_err(|e| VfioError::system("VFIO_GET_API_VERSION", e))?;
    if u32::try_from(version) != Ok(VFIO_API_VERSION) {
        return Err(VfioError::Malformed("VFIO_GET_API_VERSION"));
    }
    let known = sys::plain(container.as_fd(), sys::CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU)
        .map_err(|e| VfioError::system("VFIO_CHECK_EXTENSION", e))?;
    if known == 0 {
        return Err(VfioError::Missing {
            path: "/sys/module/vfio_iommu_type1".into(),
            hint: NO_VFIO,
        });
    }
    let node = dev.join("vfio").join(group.id.to_string());
    let fd = open_node(node, NO_VFIO)?;
    let mut status = vfio_group_status {
        argsz: size::<vfio_group_status>(),
        flags: 0,
    };
    sys::call(fd.as_fd(), sys::GROUP_GET_STATUS, &mut status)
        .map_err(|e| VfioError::system("VFIO_GROUP_GET_STATUS", e))?;
    if status.flags & VFIO_GROUP_FLAGS_VIABLE == 0 {
        return Err(VfioError::NotViable {
            group: group.id,
            blockers: group.blockers(&[device.bdf]),
        });
    }
    let mut raw = container.as_raw_fd();
    sys::call(fd.as_fd(), sys::GROUP_SET_CONTAINER, &mut raw)
        .map_err(|e| VfioError::system("VFIO_GROUP_SET_CONTAINER", e))?;
    sys::plain(container.as_fd(), sys::SET_IOMMU, VFIO_TYPE1v2_IOMMU).map_err(|e| {
        match e.raw_os_error() {
            Some(libc::EPERM) => VfioError::UnsafeInterrupts {
                module: "vfio_iommu_type1",
            },
            _ => VfioError::system("VFIO_SET_IOMMU", e),
        }
    })?;
    let name = CString::new(device.bdf.to_string()).unwrap_or_default();
    let opened = sys::device_fd(fd.as_fd(), &name)
        .map_err(|e| VfioError::system("VFIO_GROUP_GET_DEVICE_FD", e))?;
    let iommu = Iommu::Type1 {
        container,
        group: fd,
    };
    Ok((opened, iommu))
}

impl Iommu {
    /// Closes the IOMMU's descriptors in place, although other references to this value exist.
    pub(super) fn close_in_place(&self) -> std::io::Result<()> {
        match self {
            Iommu::Iommufd { iommufd, .. } => sys::close_in_place(iommufd.as_fd()),
            Iommu::Type1 { container, group } => {
                sys::close_in_place(group.as_fd())?;
                sys::close_in_place(container.as_fd())
            }
        }
    }

    /// Returns the name of the interface in use: `iommufd` or `group`.
    pub fn name(&self) -> &'static str {
        match self {
            Iommu::Iommufd { .. } => "iommufd",
            Iommu::Type1 { .. } => "group",
        }
    }

    /// Returns the present limits of DMA mappings in the address space.
    pub fn limits(&self) -> Result<MappingLimits, VfioError> {
        let page = rustix::param::page_size() as u64;
        let (ranges, mappings, page_size) = match self {
            Iommu::Iommufd { iommufd, ioas } => {
                let (ranges, alignment) = sys::iova_ranges(iommufd.as_fd(), *ioas)
                    .map_err(|e| VfioError::system("IOMMU_IOAS_IOVA_RANGES", e))?;
                (Some(ranges), IOMMUFD_MAPPINGS, alignment)
            }
            Iommu::Type1 { container, .. } => {
                let bytes = sys::sized(container.as_fd(), sys::IOMMU_GET_INFO, 0)
                    .map_err(|e| VfioError::system("VFIO_IOMMU_GET_INFO", e))?;
                let info =
                    caps::type1(&bytes).ok_or(VfioError::Malformed("VFIO_IOMMU_GET_INFO"))?;
                let smallest = 1u64.checked_shl(info.page_sizes.trailing_zeros());
                let left = info
                    .available
                    .map(|n| usize::try_from(n).unwrap_or(usize::MAX));
                (
                    info.ranges,
                    left.unwrap_or(TYPE1_MAPPINGS),
                    smallest.unwrap_or(page),
                )
            }
        };
        Ok(MappingLimits {
            ranges: match ranges {
                Some(ranges) => ordered(ranges),
                None => USUAL_RANGES.to_vec(),
            },
            mappings,
            page_size: page_size.max(page).max(4096),
        })
    }

    /// Maps `len` bytes of this process's memory at `address` for DMA at `iova`.
    pub fn map(&self, iova: u64, address: u64, len: u64, prot: Prot) -> Result<(), VfioError> {
        let flags = |read: u32, write: u32| {
            let chosen = |on: bool, flag: u32| if on { flag } else { 0 };
            chosen(prot.read, read) | chosen(prot.write, write)
        };
        let answer = match self {
            Iommu::Iommufd { iommufd, ioas } => {
                let mut argument = iommu_ioas_map {
                    size: size::<iommu_ioas_map>(),
                    flags: IOAS_FIXED | flags(IOAS_READABLE, IOAS_WRITEABLE),
                    ioas_id: *ioas,
                    user_va: address,
                    length: len,
                    iova,
                    ..iommu_ioas_map::default()
                };
                sys::call(iommufd.as_fd(), sys::IOAS_MAP, &mut argument)
            }
            Iommu::Type1 { container, .. } => {
                let mut argument = vfio_iommu_type1_dma_map {
                    argsz: size::<vfio_iommu_type1_dma_map>(),
                    flags: flags(VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE),
                    vaddr: address,
                    iova,
                    size: len,
                };
                sys::call(container.as_fd(), sys::IOMMU_MAP_DMA, &mut argument)
            }
        };
        answer.map_err(|e| match e.raw_os_error() {
            Some(libc::ENOMEM) => VfioError::LockedMemory {
                wanted: len,
                limit: rustix::process::getrlimit(rustix::process::Resource::Memlock).current,
            },
            Some(libc::ENOSPC) => VfioError::MappingsExhausted,
            _ => VfioError::system(format!("mapping {len:#x} bytes at IOVA {iova:#x}"), e),
        })
    }

    /// Removes the DMA mapping of exactly these `len` bytes at `iova`.
    pub fn unmap(&self, iova: u64, len: u64) -> Result<(), VfioError> {
        let failed =
            |e| VfioError::system(format!("unmapping {len:#x} bytes at IOVA {iova:#x}"), e);
        let unmapped = match self {
            Iommu::Iommufd { iommufd, ioas } => {
                let mut argument = iommu_ioas_unmap {
                    size: size::<iommu_ioas_unmap>(),
                    ioas_id: *ioas,
                    iova,
                    length: len,
                };
                sys::call(iommufd.as_fd(), sys::IOAS_UNMAP, &mut argument).map_err(failed)?;
                argument.length
            }
            Iommu::Type1 { container, .. } => {
                let mut argument = vfio_iommu_type1_dma_unmap {
                    argsz: size::<vfio_iommu_type1_dma_unmap>(),
                    iova,
                    size: len,
                    ..vfio_iommu_type1_dma_unmap::default()
                };
                sys::call(container.as_fd(), sys::IOMMU_UNMAP_DMA, &mut argument)
                    .map_err(failed)?;
                argument.size
            }
        };
        if unmapped == len {
            return Ok(());
        }
        // Type1 removes all mappings wholly within the range, and returns their total length.
        Err(failed(io::Error::other(format!(
            "only {unmapped:#x} bytes were mapped"
        ))))
    }
}

/// Returns address ranges in ascending order, without invalid ones.
fn ordered(mut ranges: Vec<(u64, u64)>) -> Vec<RangeInclusive<u64>> {
    ranges.retain(|(first, last)| first <= last);
    ranges.sort_unstable();
    ranges
        .into_iter()
        .map(|(first, last)| first..=last)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfio::sysfs::Sysfs;
    use std::fs;

    fn fake() -> (tempfile::TempDir, PciDevice, Group) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("bus/pci/devices/0000:01:00.0")).unwrap();
        fs::create_dir_all(dir.path().join("dev/vfio")).unwrap();
        let device = Sysfs::at(dir.path()).device("01:00.0".parse().unwrap());
        let group = Group {
            id: 3,
            noiommu: false,
            members: Vec::new(),
        };
        (dir, device.unwrap(), group)
    }

    #[test]
    fn missing_device_node_is_named() {
        let (dir, device, group) = fake();
        let dev = dir.path().join("dev");
        let open = |interface| {
            open(&device, &group, interface, &dev)
                .unwrap_err()
                .to_string()
        };
        let text = open(Interface::Group);
        assert!(
            text.contains("dev/vfio/vfio does not exist") && text.contains("modprobe"),
            "{text}"
        );
        let text = open(Interface::Iommufd);
        assert!(text.contains("CONFIG_VFIO_DEVICE_CDEV"), "{text}");
        assert_eq!(open(Interface::Any), open(Interface::Group));
        // The device has a node, but /dev/iommu is missing: the group is used, unless iommufd was
        // requested explicitly.
        fs::create_dir_all(device.path().join("vfio-dev/vfio0")).unwrap();
        fs::write(device.path().join("vfio-dev/vfio0/dev"), "511:0\n").unwrap();
        assert_eq!(open(Interface::Any), open(Interface::Group));
        let text = open(Interface::Iommufd);
        assert!(text.contains("dev/iommu does not exist"), "{text}");
    }

    #[test]
    fn file_instead_of_container_is_error() {
        let (dir, device, group) = fake();
        let dev = dir.path().join("dev");
        fs::write(dev.join("vfio/vfio"), "").unwrap();
        let e = open(&device, &group, Interface::Any, &dev).unwrap_err();
        assert!(matches!(e, VfioError::System { .. }), "{e}");
    }

    #[test]
    fn iommu_ranges_are_sorted() {
        let ranges = ordered(vec![(0xfef0_0000, u64::MAX), (9, 3), (0, 0xfedf_ffff)]);
        assert_eq!(ranges, [0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX]);
    }
}
