//! Translation of guest addresses to device addresses.
//!
//! A guest address is looked up in the guest's map, which yields memory of this process; that is
//! then looked up in the table of memory registered with the device. The combined result is cached
//! by window. A guest window inside one registration has a constant offset to its device address,
//! so a page costs one compare and one addition. Other cases, and all lists, take the slow path
//! ([`walk`], [`Translator::resolve`]), with the same copy-once walkers as every other access to
//! guest memory.

use dma::{Access, DmaMap, Prot, SegmentList};
use driver::iova::RegionTable;
use driver::raw::IovaRange;
use nvme::cmd::Psdt;
use nvme::{Command, Status};

/// Number of cached guest memory windows: for low memory, high memory, and two more.
const WAYS: usize = 4;

/// Window of guest memory with its device address.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u64,
    last: u64,
    device: u64,
    prot: Prot,
}

impl Span {
    /// Window that contains no address.
    const NONE: Span = Span {
        start: 1,
        last: 0,
        device: 0,
        prot: Prot {
            read: false,
            write: false,
        },
    };

    /// Returns the device address of `len` bytes from `at` on, if the window contains them and
    /// allows the access.
    #[inline]
    fn find(&self, at: u64, len: u64, access: Access) -> Option<u64> {
        let allowed = match access {
            Access::Read => self.prot.read,
            Access::Write => self.prot.write,
        };
        // `last - at` cannot wrap once `at` is inside; `len` is at least 1.
        let inside = self.start <= at && at <= self.last && len - 1 <= self.last - at;
        (inside && allowed).then(|| self.device + (at - self.start))
    }
}

/// Device addresses of a command's data, as far as the fast path finds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Near {
    /// Contiguous range that contains all of the data, by its first device address.
    One(u64),
    /// Two memory pages that are not adjacent.
    Two([IovaRange; 2]),
}

/// Cache of translations from guest addresses to device addresses, for one guest.
#[derive(Debug)]
pub(crate) struct Translator {
    /// Mask of the byte offset within a memory page of the guest.
    mask: u64,
    spans: [Span; WAYS],
    recent: usize,
    /// Map ID, map generation and table number for which the cached spans are valid.
    of: (u64, u64, u64),
}

impl Translator {
    pub fn new(page_size: u64) -> Self {
        let mut translator = Self {
            mask: 0,
            spans: [Span::NONE; WAYS],
            recent: 0,
            of: (0, 0, 0),
        };
        translator.set_page_size(page_size);
        translator
    }

    /// Sets the memory page size of the guest's controller. The smallest size is always safe.
    pub fn set_page_size(&mut self, page_size: u64) {
        let usable = page_size.is_power_of_two() && page_size >= 4096;
        self.mask = if usable { page_size - 1 } else { 4095 };
    }

    pub fn page_size(&self) -> u64 {
        self.mask + 1
    }

    /// Clears the cache if the map or the table changed. To be called at the start of every
    /// command.
    #[inline]
    pub fn follow(&mut self, map: &DmaMap, table: u64) {
        let of = (map.id(), map.generation(), table);
        if of != self.of {
            self.of = of;
            self.spans = [Span::NONE; WAYS];
        }
    }

    /// Returns the device address of a command's data in the simple case: PRPs of at most two
    /// pages, both in fully registered windows. All other cases, including errors, take the slow
    /// path.
    #[inline]
    pub fn near(
        &mut self,
        map: &DmaMap,
        table: &RegionTable,
        command: &Command,
        len: u64,
        access: Access,
    ) -> Option<Near> {
        let prp1 = command.prp1();
        let first = (self.mask + 1 - (prp1 & self.mask)).min(len);
        if len == 0 || len - first > self.mask + 1 || command.flags.psdt() != Psdt::PRP {
            return None;
        }
        let one = self.find(map, table, prp1, first, access)?;
        // Both addresses must be dword-aligned, because the VMM chooses their offset.
        if (prp1 | one) & 3 != 0 {
            return None;
        }
        let left = len - first;
        if left == 0 {
            return Some(Near::One(one));
        }
        let prp2 = command.prp2();
        if prp2 & self.mask != 0 {
            return None;
        }
        let two = self.find(map, table, prp2, left, access)?;
        if two == one + first {
            return Some(Near::One(one));
        }
        let at = |iova, len| IovaRange { iova, len };
        Some(Near::Two([at(one, first), at(two, left)]))
    }

    #[inline]
    fn find(
        &mut self,
        map: &DmaMap,
        table: &RegionTable,
        at: u64,
        len: u64,
        access: Access,
    ) -> Option<u64> {
        let recent = self.spans.get(self.recent);
        if let Some(found) = recent.and_then(|span| span.find(at, len, access)) {
            return Some(found);
        }
        self.find_slowly(map, table, at, len, access)
    }

    #[cold]
    #[inline(never)]
    fn find_slowly(
        &mut self,
        map: &DmaMap,
        table: &RegionTable,
        at: u64,
        len: u64,
        access: Access,
    ) -> Option<u64> {
        for (way, span) in self.spans.iter().enumerate() {
            if let Some(found) = span.find(at, len, access) {
                self.recent = way;
                return Some(found);
            }
        }
        let window = map.window_at(at)?;
        let (memory, offset) = window.backing.as_ref()?;
        if memory.is_poisoned() {
            return None;
        }
        let bytes = usize::try_from(window.len).ok()?;
        let host = memory.segment(usize::try_from(*offset).ok()?, bytes)?;
        let (_, device) = table.find(host.as_ptr().addr(), window.len)?;
        let span = Span {
            start: window.iova,
            // The length was at least one when passed in, and does not wrap.
            last: window.iova + (window.len - 1),
            device,
            prot: window.prot,
        };
        let way = (self.recent + 1) % WAYS;
        if let Some(place) = self.spans.get_mut(way) {
            *place = span;
            self.recent = way;
        }
        span.find(at, len, access)
    }

    /// Resolves a walked list to ranges of device addresses, as the second step of the slow path.
    /// Returns `false` when a part of it is not registered.
    pub fn resolve(table: &RegionTable, list: &SegmentList, ranges: &mut Vec<IovaRange>) -> bool {
        ranges.clear();
        for segment in list.segments() {
            let len = segment.len() as u64;
            let Some((_, iova)) = table.find(segment.as_ptr().addr(), len) else {
                return false;
            };
            match ranges.last_mut() {
                Some(last) if last.iova + last.len == iova => last.len += len,
                _ => ranges.push(IovaRange { iova, len }),
            }
        }
        !ranges.is_empty()
    }
}

/// Pins and collects the memory of this process behind a command's data pointer, as the first step
/// of the slow path.
pub(crate) fn walk(
    map: &DmaMap,
    command: &Command,
    len: u64,
    page_size: u64,
    access: Access,
    list: &mut SegmentList,
) -> Result<(), Status> {
    list.begin(map);
    match command.flags.psdt() {
        Psdt::PRP => {
            let (prp1, prp2) = (command.prp1(), command.prp2());
            dma::prp::walk(map, prp1, prp2, len, page_size, access, list).map_err(prp_status)
        }
        Psdt::SGL_MPTR_BUFFER | Psdt::SGL_MPTR_SGL => {
            dma::sgl::walk(map, command.dptr.0, len, access, list).map_err(sgl_status)
        }
        _ => Err(Status::INVALID_FIELD.with_dnr(true)),
    }
}

fn dma_status(error: dma::DmaError) -> Status {
    match error {
        // A part of the data is in the controller memory buffer ("NVMe Base 2.1", 8.2.1).
        dma::DmaError::Mixed => Status::INVALID_USE_OF_CMB.with_dnr(true),
        _ => Status::DATA_TRANSFER_ERROR,
    }
}

fn prp_status(error: dma::PrpError) -> Status {
    match error {
        dma::PrpError::OffsetInvalid { .. } => Status::PRP_OFFSET_INVALID.with_dnr(true),
        dma::PrpError::Dma(error) => dma_status(error),
    }
}

fn sgl_status(error: dma::SglError) -> Status {
    use dma::SglError as E;
    match error {
        E::InvalidSegmentDescriptor => Status::INVALID_SGL_SEGMENT_DESCRIPTOR.with_dnr(true),
        E::InvalidDescriptorCount => Status::INVALID_SGL_DESCRIPTOR_COUNT.with_dnr(true),
        E::DataLengthInvalid => Status::DATA_SGL_LENGTH_INVALID.with_dnr(true),
        E::DescriptorTypeInvalid(_) => Status::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr(true),
        E::Dma(error) => dma_status(error),
    }
}
