//! Guest memory of rust-vmm's crate `vm-memory`, as windows of a device.
//!
//! Each region must lie in a memory file (memfd, tmpfs, hugetlbfs) that is mapped shared. The file
//! is mapped once more, so the windows stay valid when the VMM drops its own mapping, and a file
//! that shrinks is detected ([`crate::sigbus`]).
//!
//! ```
//! use dma::{DmaMap, Memory, vm_memory};
//! use ::vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A VMM's 2 MiB of memory at guest address 0, in a memfd.
//! let memfd = Memory::anonymous(2 << 20)?.fd().try_clone_to_owned()?;
//! let file = FileOffset::new(memfd.into(), 0);
//! let range = (GuestAddress(0), 2 << 20, Some(file));
//! let memory = GuestMemoryMmap::<()>::from_ranges_with_files([range])?;
//!
//! let mut map = DmaMap::new();
//! for window in vm_memory::windows(&memory)? {
//!     map.map(window.iova, window.len, window.backing, window.prot)?;
//! }
//! memory.write_slice(b"from the guest", GuestAddress(0x1000))?;
//! let (seen, _) = map.windows().next().and_then(|window| window.backing).ok_or("a window")?;
//! let mut data = [0; 14];
//! seen.read(0x1000, &mut data)?;
//! assert_eq!(&data, b"from the guest");
//! # Ok(()) }
//! ```

use std::fs::File;
use std::sync::Arc;

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

use crate::{MapError, Memory, Prot, Window};

/// Reason why guest memory has no windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuestMemoryError {
    /// A region is private memory of the VMM.
    #[error(
        "guest memory at {address:#x} is in no file: create it with \
         GuestMemoryMmap::from_ranges_with_files, in a memfd"
    )]
    NoFile {
        /// Guest address of the region.
        address: u64,
    },
    /// The file of a region was refused.
    #[error("guest memory at {address:#x}: {error}")]
    File {
        /// Guest address of the region.
        address: u64,
        /// Reason of the refusal.
        error: MapError,
    },
}

/// Returns a window for each region of guest memory, readable and writable by the device, in the
/// order of the regions. Regions in the same [`File`] share one mapping.
///
/// # Errors
/// [`GuestMemoryError::NoFile`] for anonymous memory, [`GuestMemoryError::File`] when the file is
/// no memory file, is shorter than the region, or cannot be mapped.
pub fn windows(memory: &impl GuestMemoryBackend) -> Result<Vec<Window>, GuestMemoryError> {
    let mut mapped: Vec<(Arc<File>, Memory)> = Vec::new();
    let mut windows = Vec::new();
    for region in memory.iter() {
        let (address, len) = (region.start_addr().raw_value(), region.len());
        let place = region.file_offset();
        let place = place.ok_or(GuestMemoryError::NoFile { address })?;
        let failed = |error| GuestMemoryError::File { address, error };
        let known = mapped
            .iter()
            .find(|(file, _)| Arc::ptr_eq(file, place.arc()));
        let memory = match known {
            Some((_, memory)) => memory.clone(),
            None => {
                let fd = rustix::io::fcntl_dupfd_cloexec(place.file(), 0);
                let fd = fd.map_err(crate::memory::system("fcntl")).map_err(failed)?;
                let end = place.start().saturating_add(len);
                let memory = Memory::from_fd(fd, end, true).map_err(failed)?;
                mapped.push((place.arc().clone(), memory.clone()));
                memory
            }
        };
        windows.push(Window {
            iova: address,
            len,
            backing: Some((memory, place.start())),
            prot: Prot::RW,
        });
    }
    Ok(windows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DmaMap;
    use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

    /// Returns a memory file of this many bytes.
    fn memfd(len: u64) -> File {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::ALLOW_SEALING);
        let file = File::from(file.unwrap());
        file.set_len(len).unwrap();
        file
    }

    fn guest<const N: usize>(ranges: [(u64, usize, Option<FileOffset>); N]) -> GuestMemoryMmap<()> {
        let ranges = ranges.map(|(at, len, file)| (GuestAddress(at), len, file));
        GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()
    }

    #[test]
    fn regions_of_one_file_share_a_mapping_and_keep_their_offsets() {
        let file = Arc::new(memfd(3 << 20));
        let low = FileOffset::from_arc(file.clone(), 0);
        let high = FileOffset::from_arc(file, 1 << 20);
        let hole = 0x1_0000_0000;
        let memory = guest([(0, 1 << 20, Some(low)), (hole, 2 << 20, Some(high))]);
        let windows = windows(&memory).unwrap();
        let shapes: Vec<_> = windows.iter().map(|w| (w.iova, w.len)).collect();
        assert_eq!(shapes, [(0, 1 << 20), (hole, 2 << 20)]);
        let backing = |at: usize| windows[at].backing.clone().unwrap();
        assert!(backing(0).0.is_same(&backing(1).0));

        let mut map = DmaMap::new();
        for window in windows.clone() {
            map.map(window.iova, window.len, window.backing, window.prot)
                .unwrap();
        }
        memory
            .write_slice(b"high", GuestAddress(hole + 0x2000))
            .unwrap();
        let mut list = crate::SegmentList::default();
        crate::prp::walk(
            &map,
            hole + 0x2000,
            0,
            4,
            4096,
            crate::Access::Read,
            &mut list,
        )
        .unwrap();
        let mut data = [0; 4];
        assert_eq!(list.copy_to(0, &mut data), 4);
        assert_eq!(&data, b"high");
    }

    #[test]
    fn windows_outlive_mapping_of_vmm() {
        let memory = guest([(0, 4096, Some(FileOffset::new(memfd(4096), 0)))]);
        memory.write_slice(b"kept", GuestAddress(8)).unwrap();
        let windows = windows(&memory).unwrap();
        drop(memory);
        let mut data = [0; 4];
        let (seen, _) = windows[0].backing.as_ref().unwrap();
        seen.read(8, &mut data).unwrap();
        assert_eq!(&data, b"kept");
    }

    #[test]
    fn memory_without_shared_file_is_refused() {
        let anonymous = guest([(0x8000, 4096, None)]);
        let error = windows(&anonymous).unwrap_err();
        assert_eq!(error, GuestMemoryError::NoFile { address: 0x8000 });
        assert!(error.to_string().contains("0x8000"), "{error}");
    }
}
