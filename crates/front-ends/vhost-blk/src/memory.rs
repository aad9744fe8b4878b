//! Guest memory as described by the front-end. Each region is a piece of a file, with a
//! guest-physical address (in descriptors) and an address of the front-end (for the rings).

use crate::error::RequestRefusal;
use crate::pins::Pins;
use crate::wire::Region;
use dma::{DmaMap, Import, MapError, Memory, MemoryCache, PendingImport, Prot};
use rustix::fs::fstat;
use std::any::Any;
use std::os::fd::OwnedFd;
use std::task::Waker;
use volume::{PinPace, Pinner};

/// Hook called with every memory file of a client, for volumes that access it without copies (a
/// device). Its result is dropped when the memory is no longer in use.
pub type Attach = Box<dyn Fn(&Memory) -> Option<Box<dyn Any>>>;

/// Memory of a guest that a front-end has described, and its maps.
pub(crate) struct GuestMemory {
    map: DmaMap,
    files: MemoryCache,
    regions: Vec<(Region, Memory)>,
    attach: Option<Attach>,
    attached: Vec<(Memory, Option<Box<dyn Any>>)>,
    /// Results for files that are no longer mapped, but perhaps in use by outstanding requests.
    leaving: Vec<Option<Box<dyn Any>>>,
    pins: Pins,
}

impl GuestMemory {
    /// Creates a memory without regions for a front-end whose files have the limits of this cache.
    pub(crate) fn new(
        files: MemoryCache,
        attach: Option<Attach>,
        pinner: Option<Pinner>,
    ) -> GuestMemory {
        GuestMemory {
            map: DmaMap::new(),
            files,
            regions: Vec::new(),
            attach,
            attached: Vec::new(),
            leaving: Vec::new(),
            pins: Pins::new(pinner),
        }
    }

    /// Returns whether memory waits to be pinned for the ring: [`GuestMemory::pin`], when no
    /// front-end waits for an answer.
    pub(crate) fn is_pinning(&self) -> bool {
        self.pins.is_pinning()
    }

    /// Pins a further part of the guest memory, in as much time as `pace` allows.
    pub(crate) fn pin(&mut self, pace: &mut PinPace) {
        self.pins.pin(pace);
    }

    pub(crate) fn map(&self) -> &DmaMap {
        &self.map
    }

    pub(crate) fn regions(&self) -> usize {
        self.regions.len()
    }

    /// Begins to map a file of the front-end up to byte `end` on another thread, which calls
    /// `waker` at the end.
    pub(crate) fn begin_import(
        &mut self,
        fd: OwnedFd,
        end: u64,
        waker: &Waker,
    ) -> Result<Import, MapError> {
        self.files.begin(fd, end, true, waker)
    }

    /// Returns the result of a pending import, once it is there.
    pub(crate) fn finish_import(
        &mut self,
        pending: &PendingImport,
    ) -> Option<Result<Memory, MapError>> {
        self.files.finish(pending)
    }

    fn map_one(&mut self, region: Region, memory: Memory) -> Result<(), RequestRefusal> {
        let backing = Some((memory.clone(), region.mmap_offset));
        self.map
            .map(region.guest_address, region.size, backing, Prot::RW)?;
        if !self
            .attached
            .iter()
            .any(|(known, _)| known.is_same(&memory))
        {
            let attachment = self.attach.as_ref().and_then(|attach| attach(&memory));
            self.attached.push((memory.clone(), attachment));
        }
        self.regions.push((region, memory));
        Ok(())
    }

    /// Replaces all regions of guest memory by a table, unless its files could not be mapped. After
    /// an error there are none.
    pub(crate) fn replace(
        &mut self,
        table: Result<Vec<(Region, Memory)>, MapError>,
    ) -> Result<(), RequestRefusal> {
        // Pinned pieces may be part of the new memory, too.
        self.unmap_all();
        let mapped = table.map_err(Into::into).and_then(|table| {
            let mut table = table.into_iter();
            table.try_for_each(|(region, memory)| self.map_one(region, memory))
        });
        if mapped.is_err() {
            self.unmap_all();
        }
        self.pins.update(&self.regions);
        mapped
    }

    /// Adds a region of guest memory.
    pub(crate) fn add(&mut self, region: Region, memory: Memory) -> Result<(), RequestRefusal> {
        self.map_one(region, memory)?;
        self.pins.update(&self.regions);
        Ok(())
    }

    /// Removes the region of guest memory with the same addresses and size.
    pub(crate) fn remove(&mut self, region: &Region) -> Result<(), RequestRefusal> {
        let same = |known: &Region| {
            known.guest_address == region.guest_address
                && known.user_address == region.user_address
                && known.size == region.size
        };
        let index = self.regions.iter().position(|(known, _)| same(known));
        let index = index.ok_or(RequestRefusal::Address(region.guest_address))?;
        self.map.unmap(region.guest_address, region.size)?;
        self.regions.remove(index);
        self.pins.update(&self.regions);
        self.detach_unused();
        Ok(())
    }

    /// Removes all regions of guest memory.
    pub(crate) fn clear(&mut self) {
        self.unmap_all();
        self.pins.update(&[]);
    }

    fn unmap_all(&mut self) {
        self.regions.clear();
        self.map.unmap_all();
        self.detach_unused();
    }

    fn detach_unused(&mut self) {
        let (regions, leaving) = (&self.regions, &mut self.leaving);
        self.attached.retain_mut(|(memory, attachment)| {
            let used = regions.iter().any(|(_, known)| known.is_same(memory));
            if !used {
                leaving.push(attachment.take());
            }
            used
        });
    }

    /// Returns whether no outstanding request can still access removed guest memory.
    pub(crate) fn quiesced(&mut self) -> bool {
        let quiesced = self.map.quiesced();
        if quiesced {
            self.leaving.clear();
        }
        quiesced
    }

    /// Returns whether the address lies in a memory file to which nothing was ever stored. A driver
    /// with a queue has stored something. Its memory must then be private to the front-end, which
    /// has passed the file's descriptor all the same (QEMU before 9).
    pub(crate) fn is_untouched(&self, user: u64) -> bool {
        let holds = |region: &Region| {
            let offset = user.checked_sub(region.user_address);
            offset.is_some_and(|offset| offset < region.size)
        };
        let found = self.regions.iter().find(|(region, _)| holds(region));
        found.is_some_and(|(_, memory)| fstat(memory.fd()).is_ok_and(|stat| stat.st_blocks == 0))
    }

    /// Returns the guest-physical address behind the last region.
    pub(crate) fn end(&self) -> u64 {
        let ends = self.regions.iter();
        let ends = ends.map(|(region, _)| region.guest_address.saturating_add(region.size));
        ends.max().unwrap_or(0)
    }

    /// Returns the guest-physical address of `len` bytes at an address of the front-end; they must
    /// lie in one region.
    pub(crate) fn guest_address(&self, user: u64, len: usize) -> Result<u64, RequestRefusal> {
        let found = self.regions.iter().find_map(|(region, _)| {
            let offset = user.checked_sub(region.user_address)?;
            let end = offset.checked_add(len as u64)?;
            (end <= region.size).then(|| region.guest_address.checked_add(offset))?
        });
        found.ok_or(RequestRefusal::Address(user))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dma::MemoryLimits;
    use std::cell::RefCell;
    use std::rc::Rc;

    fn region(guest: u64, size: u64, user: u64, offset: u64) -> Region {
        Region {
            guest_address: guest,
            size,
            user_address: user,
            mmap_offset: offset,
        }
    }

    fn file(len: usize) -> (Memory, impl Fn() -> OwnedFd) {
        let memory = Memory::anonymous(len).unwrap();
        let fd = memory.clone();
        (memory, move || fd.fd().try_clone_to_owned().unwrap())
    }

    impl GuestMemory {
        /// Maps the file of a region on this thread.
        fn import(&mut self, region: &Region, fd: OwnedFd) -> Result<Memory, MapError> {
            let end = region.file_end().ok_or(MapError::Overflow)?;
            self.files.import(fd, end, true)
        }

        fn replace_files(&mut self, table: Vec<(Region, OwnedFd)>) -> Result<(), RequestRefusal> {
            let table = table.into_iter();
            let table = table.map(|(region, fd)| Ok((region, self.import(&region, fd)?)));
            let table = table.collect();
            self.replace(table)
        }

        fn add_file(&mut self, region: Region, fd: OwnedFd) -> Result<(), RequestRefusal> {
            let memory = self.import(&region, fd)?;
            self.add(region, memory)
        }
    }

    #[test]
    fn front_end_address_is_found_in_single_region() {
        let (_, fd) = file(0x4000);
        let mut memory = GuestMemory::new(MemoryCache::new(), None, None);
        let table = vec![
            (region(0x1000, 0x1000, 0x7000_0000, 0), fd()),
            (region(0x8000, 0x2000, 0x7000_1000, 0x2000), fd()),
        ];
        memory.replace_files(table).unwrap();
        assert_eq!(memory.guest_address(0x7000_0010, 16).unwrap(), 0x1010);
        assert_eq!(memory.guest_address(0x7000_1000, 0x2000).unwrap(), 0x8000);
        for (user, len) in [
            (0x7000_0ff8, 16),
            (0x6fff_ffff, 1),
            (0x7000_3000, 1),
            (u64::MAX, 2),
            (0x7000_0000, usize::MAX),
        ] {
            assert!(memory.guest_address(user, len).is_err(), "{user:#x}");
        }
        assert_eq!(memory.map().window_count(), 2);
    }

    #[test]
    fn invalid_memory_table_leaves_nothing() {
        let (_, fd) = file(0x4000);
        let mut memory = GuestMemory::new(MemoryCache::new(), None, None);
        let good = region(0x1000, 0x1000, 0x1000, 0);
        for bad in [
            region(0x1800, 0x1000, 0x5000, 0),
            region(0x9000, 0, 0x5000, 0),
            region(0x9000, 0x1000, 0x5000, 0x3001),
            region(0x9000, 0x1000, 0x5000, u64::MAX),
            region(0x9000, 0x1000, u64::MAX, 0),
            region(u64::MAX, 0x1000, 0x5000, 0),
            region(0x9001, 0x1000, 0x5000, 0),
            region(0x9000, 0x800, 0x5000, 0),
            region(0x9000, 0x1000, 0x5000, 0x800),
        ] {
            assert!(
                memory
                    .replace_files(vec![(good, fd()), (bad, fd())])
                    .is_err(),
                "{bad:x?}"
            );
            assert_eq!((memory.regions(), memory.map().window_count()), (0, 0));
        }
        let socket = std::os::unix::net::UnixStream::pair().unwrap().0;
        assert!(memory.add_file(good, socket.into()).is_err());
    }

    #[test]
    fn memory_files_and_bytes_are_limited_per_front_end() {
        let limits = MemoryLimits {
            mappings: 2,
            bytes: 0x5000,
        };
        let mut memory = GuestMemory::new(MemoryCache::with_limits(limits), None, None);
        let at = |i: u64| region(i << 32, 0x1000, i << 32, 0);
        let (small, large) = (file(0x1000), file(0x4000));
        memory.add_file(at(0), large.1()).unwrap();
        memory.add_file(at(1), large.1()).unwrap();
        memory.add_file(at(2), small.1()).unwrap();
        assert!(memory.add_file(at(3), file(0x1000).1()).is_err());
        assert!(memory.import(&at(4), small.1()).is_ok());
        let mut memory = GuestMemory::new(MemoryCache::with_limits(limits), None, None);
        memory.add_file(at(0), large.1()).unwrap();
        assert!(memory.import(&at(4), file(0x2000).1()).is_err());
    }

    #[test]
    fn memory_regions_are_added_and_removed_singly() {
        let (_, fd) = file(0x4000);
        let mut memory = GuestMemory::new(MemoryCache::new(), None, None);
        let (a, b) = (
            region(0, 0x1000, 0, 0),
            region(0x1000, 0x1000, 0x1000, 0x1000),
        );
        memory.add_file(a, fd()).unwrap();
        memory.add_file(b, fd()).unwrap();
        assert!(memory.add_file(b, fd()).is_err());
        assert!(memory.remove(&region(0, 0x2000, 0, 0)).is_err());
        memory.remove(&a).unwrap();
        assert!(memory.remove(&a).is_err());
        assert!(memory.guest_address(0, 1).is_err());
        assert!(memory.guest_address(0x1000, 1).is_ok());
    }

    #[test]
    fn attachments_last_until_requests_end() {
        let alive = Rc::new(RefCell::new(0));
        struct Token(Rc<RefCell<i32>>);
        impl Drop for Token {
            fn drop(&mut self) {
                *self.0.borrow_mut() -= 1;
            }
        }
        let handle = alive.clone();
        let attach: Attach = Box::new(move |_| {
            *handle.borrow_mut() += 1;
            Some(Box::new(Token(handle.clone())))
        });
        let mut memory = GuestMemory::new(MemoryCache::new(), Some(attach), None);
        let (_, fd) = file(0x2000);
        memory.add_file(region(0, 0x1000, 0, 0), fd()).unwrap();
        memory
            .add_file(region(0x1000, 0x1000, 0x1000, 0), fd())
            .unwrap();
        assert_eq!(*alive.borrow(), 1, "once for a file");
        memory.remove(&region(0, 0x1000, 0, 0)).unwrap();
        assert!(memory.quiesced());
        assert_eq!(*alive.borrow(), 1, "the other region still needs it");
        let pin = memory.map().pin();
        memory.clear();
        assert!(!memory.quiesced());
        assert_eq!(*alive.borrow(), 1);
        drop(pin);
        assert!(memory.quiesced());
        assert_eq!(*alive.borrow(), 0);
    }
}
