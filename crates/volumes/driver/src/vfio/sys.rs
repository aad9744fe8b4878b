//! System calls of VFIO (`linux/vfio.h`) and iommufd (`linux/iommufd.h`). `unsafe` covers the
//! system call itself. The tables below pair each request with its structure.
//!
//! Structures and constants are those of the kernel's headers, from generated bindings. Every
//! structure begins with its own size, so a newer structure works on an older kernel as long
//! as the new fields are zero.

use rustix::event::EventfdFlags;
use std::ffi::CStr;
use std::io;
use std::marker::PhantomData;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use iommufd_bindings::iommufd::{
    IOMMUFD_CMD_IOAS_ALLOC, IOMMUFD_CMD_IOAS_IOVA_RANGES, IOMMUFD_CMD_IOAS_MAP,
    IOMMUFD_CMD_IOAS_UNMAP, iommu_ioas_alloc, iommu_ioas_iova_ranges, iommu_ioas_map,
    iommu_ioas_unmap, iommu_iova_range,
};
use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_TYPE, vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd,
    vfio_device_info, vfio_group_status, vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap,
    vfio_irq_info, vfio_irq_set,
};

/// Encodes `_IO(';', number)`: neither direction nor size is part of these requests (see both
/// headers).
const fn io_request(number: u32) -> u32 {
    (VFIO_TYPE as u32) << 8 | number
}

const fn vfio(number: u32) -> u32 {
    io_request(VFIO_BASE + number)
}

/// A request that takes a structure of one fixed size and may write back to it.
#[derive(Clone, Copy, Debug)]
pub struct Fixed<T>(u32, PhantomData<T>);

/// A request that takes a structure with its true size in the first word, and writes at most that
/// many bytes.
#[derive(Clone, Copy, Debug)]
pub struct Sized(u32);

/// An ioctl request with plain numbers as argument and result.
#[derive(Clone, Copy, Debug)]
pub struct Plain(u32);

const fn fixed<T>(request: u32) -> Fixed<T> {
    Fixed(request, PhantomData)
}

/// ioctl of a container that returns the version of the VFIO interface.
pub const GET_API_VERSION: Plain = Plain(vfio(0));
/// ioctl of a container that returns whether a type of IOMMU is supported.
pub const CHECK_EXTENSION: Plain = Plain(vfio(1));
/// ioctl of a container with a group that selects the type of IOMMU.
pub const SET_IOMMU: Plain = Plain(vfio(2));
/// ioctl of a group that returns whether the group is viable.
pub const GROUP_GET_STATUS: Fixed<vfio_group_status> = fixed(vfio(3));
/// ioctl of a group that adds it to a container; the argument is the container's descriptor.
pub const GROUP_SET_CONTAINER: Fixed<i32> = fixed(vfio(4));
const GROUP_GET_DEVICE_FD: u32 = vfio(6);
/// ioctl of a device that returns flags, and the numbers of regions and interrupts.
pub const DEVICE_GET_INFO: Fixed<vfio_device_info> = fixed(vfio(7));
/// ioctl of a device that returns size, offset and capabilities of a region.
pub const DEVICE_GET_REGION_INFO: Sized = Sized(vfio(8));
/// ioctl of a device that returns the properties of an interrupt type.
pub const DEVICE_GET_IRQ_INFO: Fixed<vfio_irq_info> = fixed(vfio(9));
const DEVICE_SET_IRQS: u32 = vfio(10);
/// ioctl of a device that resets its PCI function.
pub const DEVICE_RESET: Plain = Plain(vfio(11));
/// ioctl of a container that returns the IOMMU's page sizes and capabilities.
pub const IOMMU_GET_INFO: Sized = Sized(vfio(12));
/// ioctl of a container that maps memory for DMA.
pub const IOMMU_MAP_DMA: Fixed<vfio_iommu_type1_dma_map> = fixed(vfio(13));
/// ioctl of a container that unmaps memory.
pub const IOMMU_UNMAP_DMA: Fixed<vfio_iommu_type1_dma_unmap> = fixed(vfio(14));
/// ioctl of a device that binds it to an iommufd.
pub const DEVICE_BIND_IOMMUFD: Fixed<vfio_device_bind_iommufd> = fixed(vfio(18));
/// ioctl of a device that attaches it to an address space of its iommufd.
pub const DEVICE_ATTACH_IOMMUFD_PT: Fixed<vfio_device_attach_iommufd_pt> = fixed(vfio(19));
/// ioctl of an iommufd that creates an address space (IOAS).
pub const IOAS_ALLOC: Fixed<iommu_ioas_alloc> = fixed(io_request(IOMMUFD_CMD_IOAS_ALLOC));
const IOAS_IOVA_RANGES: u32 = io_request(IOMMUFD_CMD_IOAS_IOVA_RANGES);
/// ioctl of an iommufd that maps memory for DMA in an address space.
pub const IOAS_MAP: Fixed<iommu_ioas_map> = fixed(io_request(IOMMUFD_CMD_IOAS_MAP));
/// ioctl of an iommufd that unmaps memory from an address space.
pub const IOAS_UNMAP: Fixed<iommu_ioas_unmap> = fixed(io_request(IOMMUFD_CMD_IOAS_UNMAP));

/// Maximum length in bytes of a kernel's answer of variable length.
const MAX_ANSWER_LEN: usize = 64 << 10;

/// Returns the size of a structure for its field `size` or `argsz`.
pub const fn size<T>() -> u32 {
    // Structures of the interface are far smaller than 4 GiB.
    size_of::<T>() as u32
}

/// # Safety
/// `argument` must match the request: a number, or the address of memory that the request may read
/// and write.
unsafe fn ioctl(fd: BorrowedFd<'_>, request: u32, argument: usize) -> io::Result<i32> {
    loop {
        // SAFETY: the descriptor is open, and the caller vouches for the argument.
        let answer = unsafe { libc::ioctl(fd.as_raw_fd(), request as libc::Ioctl, argument) };
        if answer >= 0 {
            return Ok(answer);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Executes an ioctl request with a structure as its argument.
pub fn call<T>(fd: BorrowedFd<'_>, request: Fixed<T>, argument: &mut T) -> io::Result<()> {
    let address = std::ptr::from_mut(argument).expose_provenance();
    // SAFETY: the table above pairs the request with its structure, which the kernel may write
    // while it is borrowed. Memory that a mapping request names by address is only handed to the
    // device: the contract of `Transport::map` makes its owner keep it in place.
    unsafe { ioctl(fd, request.0, address) }.map(drop)
}

/// Executes an ioctl request with a number as its argument.
pub fn plain(fd: BorrowedFd<'_>, request: Plain, argument: u32) -> io::Result<i32> {
    // SAFETY: these requests take no address.
    unsafe { ioctl(fd, request.0, argument as usize) }
}

/// Executes an ioctl request with a variable-length answer; `index` is stored in the third word.
/// Returns the whole answer.
pub fn sized(fd: BorrowedFd<'_>, request: Sized, index: u32) -> io::Result<Vec<u8>> {
    let mut len = 256;
    loop {
        let mut bytes = vec![0; len];
        for (place, word) in bytes.chunks_exact_mut(4).zip([len as u32, 0, index]) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        let address = bytes.as_mut_ptr().expose_provenance();
        // SAFETY: the kernel writes at most the number of bytes in the first word, which is the
        // buffer's length.
        unsafe { ioctl(fd, request.0, address)? };
        let wanted = bytes.first_chunk().map_or(0, |w| u32::from_ne_bytes(*w));
        match usize::try_from(wanted) {
            Ok(wanted) if wanted <= len => return Ok(bytes),
            Ok(wanted) if wanted <= MAX_ANSWER_LEN => len = wanted,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Opens the device with this name in a group.
pub fn device_fd(group: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let address = name.as_ptr().expose_provenance();
    // SAFETY: the request reads a string up to its NUL.
    let fd = unsafe { ioctl(group, GROUP_GET_DEVICE_FD, address)? };
    // SAFETY: the kernel created this descriptor for the caller, and nothing else refers to it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Executes `VFIO_DEVICE_SET_IRQS` for the vectors from `start` on. `flags` are the data type and
/// action; there is a descriptor number (or -1) for each vector.
pub fn set_irqs(
    device: BorrowedFd<'_>,
    index: u32,
    start: u32,
    flags: u32,
    fds: &[i32],
) -> io::Result<()> {
    let count = u32::try_from(fds.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let bytes = size::<vfio_irq_set>().checked_add(count.saturating_mul(4));
    let argsz = bytes.ok_or(io::ErrorKind::InvalidInput)?;
    let mut message: Vec<u8> = [argsz, flags, index, start, count]
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .chain(fds.iter().flat_map(|fd| fd.to_ne_bytes()))
        .collect();
    let address = message.as_mut_ptr().expose_provenance();
    // SAFETY: the message has the length in its first word, and the number of descriptors in its
    // fifth.
    unsafe { ioctl(device, DEVICE_SET_IRQS, address) }.map(drop)
}

/// Closes the object behind a descriptor although the descriptor still has users, by replacing it
/// with an eventfd, on which device ioctls fail. An eventfd has no path, so a sandboxed process can
/// create one.
pub fn close_in_place(fd: BorrowedFd<'_>) -> io::Result<()> {
    let nothing = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    // SAFETY: both descriptors are open; the number stays its owner's, and names an
    // open file before and after.
    let answer = unsafe { libc::dup3(nothing.as_raw_fd(), fd.as_raw_fd(), libc::O_CLOEXEC) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Returns the IOVAs that an address space may use (first and last), and the alignment of mappings
/// in bytes.
pub fn iova_ranges(iommufd: BorrowedFd<'_>, ioas: u32) -> io::Result<(Vec<(u64, u64)>, u64)> {
    let mut ranges = vec![iommu_iova_range::default(); 16];
    loop {
        let mut argument = iommu_ioas_iova_ranges {
            size: size::<iommu_ioas_iova_ranges>(),
            ioas_id: ioas,
            num_iovas: u32::try_from(ranges.len()).unwrap_or(u32::MAX),
            allowed_iovas: ranges.as_mut_ptr().expose_provenance() as u64,
            ..iommu_ioas_iova_ranges::default()
        };
        let address = std::ptr::from_mut(&mut argument).expose_provenance();
        // SAFETY: the kernel writes the structure, and at most `num_iovas`
        // ranges behind `allowed_iovas`.
        let answer = unsafe { ioctl(iommufd, IOAS_IOVA_RANGES, address) };
        let count = usize::try_from(argument.num_iovas).unwrap_or(usize::MAX);
        match answer {
            Ok(_) => {
                ranges.truncate(count);
                let pairs = ranges.iter().map(|r| (r.start, r.last)).collect();
                return Ok((pairs, argument.out_iova_alignment));
            }
            Err(e) if e.raw_os_error() != Some(libc::EMSGSIZE) => return Err(e),
            Err(_) if count <= ranges.len() || count > MAX_ANSWER_LEN / 16 => {
                return Err(io::ErrorKind::InvalidData.into());
            }
            Err(_) => ranges.resize(count, iommu_iova_range::default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    /// Checks sizes and request numbers against values copied by hand from `linux/vfio.h` and
    /// `linux/iommufd.h`.
    #[test]
    fn ioctls_and_structures_match_kernel_headers() {
        assert_eq!(GET_API_VERSION.0, 0x3b64);
        assert_eq!(GROUP_GET_STATUS.0, 0x3b67);
        assert_eq!(DEVICE_GET_REGION_INFO.0, 0x3b6c);
        assert_eq!(DEVICE_SET_IRQS, 0x3b6e);
        assert_eq!(IOMMU_MAP_DMA.0, 0x3b71);
        assert_eq!(IOMMU_UNMAP_DMA.0, 0x3b72);
        assert_eq!(DEVICE_BIND_IOMMUFD.0, 0x3b76);
        assert_eq!(DEVICE_ATTACH_IOMMUFD_PT.0, 0x3b77);
        assert_eq!(IOAS_ALLOC.0, 0x3b81);
        assert_eq!(IOAS_IOVA_RANGES, 0x3b84);
        assert_eq!(IOAS_MAP.0, 0x3b85);
        assert_eq!(IOAS_UNMAP.0, 0x3b86);
        let sizes = [
            size::<vfio_group_status>(),
            size::<vfio_device_info>(),
            size::<vfio_irq_info>(),
            size::<vfio_irq_set>(),
            size::<vfio_iommu_type1_dma_map>(),
            size::<vfio_iommu_type1_dma_unmap>(),
            size::<vfio_device_bind_iommufd>(),
            size::<vfio_device_attach_iommufd_pt>(),
            size::<iommu_ioas_alloc>(),
            size::<iommu_ioas_map>(),
            size::<iommu_ioas_unmap>(),
            size::<iommu_ioas_iova_ranges>(),
        ];
        assert_eq!(sizes, [8, 24, 16, 20, 32, 24, 24, 16, 12, 40, 24, 32]);
    }

    #[test]
    fn wrong_kind_of_descriptor_is_refused() {
        let memfd = rustix::fs::memfd_create("no vfio", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let fd = memfd.as_fd();
        let wrong = |e: io::Error| assert_eq!(e.raw_os_error(), Some(libc::ENOTTY));
        wrong(plain(fd, GET_API_VERSION, 0).unwrap_err());
        wrong(call(fd, GROUP_GET_STATUS, &mut vfio_group_status::default()).unwrap_err());
        wrong(sized(fd, DEVICE_GET_REGION_INFO, 0).unwrap_err());
        wrong(device_fd(fd, c"0000:00:00.0").unwrap_err());
        wrong(set_irqs(fd, 2, 0, 0, &[-1, 3]).unwrap_err());
        wrong(iova_ranges(fd, 1).unwrap_err());
    }
}
