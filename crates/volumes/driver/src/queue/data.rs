//! Data pointers (PRP and SGL), which describe the memory of a command's data (NVMe Base 2.1, 4.3).

use nvme::cmd::{DataPointer, Flags, Psdt};
use nvme::sgl::SglDescriptor;
use zerocopy::IntoBytes;

use super::ring::Lists;

/// Contiguous range of device addresses (IOVAs).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IovaRange {
    /// First device address of the range.
    pub iova: u64,
    /// Length of the range in bytes.
    pub len: u64,
}

/// Forms of data pointers that the controller accepts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Memory page size in bytes (CC.MPS), to which PRPs refer.
    pub page: u64,
    /// Whether SGLs may be used, where they are shorter than PRP lists.
    pub sgl: bool,
}

/// Form of the data pointer for data in several ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// PRPs; every border between two ranges must be on a memory page boundary.
    Prp,
    /// SGL data pointer.
    Sgl,
}

impl Shape {
    /// Returns the type of data pointer for a scattered transfer, if one is possible. PRPs need
    /// every border between two ranges on a page boundary; otherwise an SGL segment is used if it
    /// fits into `list` bytes.
    pub fn method(&self, ranges: &[IovaRange], list: usize) -> Option<Method> {
        let mask = self.page - 1;
        let last = ranges.len().checked_sub(1)?;
        let prp = ranges.iter().enumerate().all(|(i, range)| {
            let start = if i == 0 { 3 } else { mask };
            let end = if i == last { 0 } else { mask };
            range.iova & start == 0 && (range.iova + range.len) & end == 0
        });
        if prp {
            return Some(Method::Prp);
        }
        // Dword alignment and granularity satisfy every controller with SGLs.
        let dwords = ranges.iter().all(|r| (r.iova | r.len) & 3 == 0);
        let short = ranges.iter().all(|r| u32::try_from(r.len).is_ok());
        (self.sgl && dwords && short && ranges.len() <= list / 16).then_some(Method::Sgl)
    }

    /// Sets the data pointer of a command to a contiguous transfer of at least one byte, which a
    /// list can describe.
    #[inline]
    pub fn contiguous(
        &self,
        iova: u64,
        len: u64,
        lists: &Lists,
        list: usize,
    ) -> (Flags, DataPointer) {
        let first = self.page - (iova & (self.page - 1));
        if len <= first {
            return (Flags::new(), DataPointer::prp(iova, 0));
        }
        let second = iova + first;
        if len <= first + self.page {
            return (Flags::new(), DataPointer::prp(iova, second));
        }
        if self.sgl
            && let Ok(short) = u32::try_from(len)
        {
            return sgl(SglDescriptor::data_block(iova, short));
        }
        let mut writer = Writer::new(self.page, lists, list);
        let pages = (len - first).div_ceil(self.page);
        for i in 0..pages {
            writer.push(second + i * self.page, i + 1 == pages);
        }
        (Flags::new(), DataPointer::prp(iova, lists.iova(list, 0)))
    }

    /// Sets the data pointer of a command to part of a scattered transfer: `len` bytes from byte
    /// `skip` on. [`Shape::method`] has returned `method` for the ranges.
    pub fn scattered(
        &self,
        method: Method,
        ranges: &[IovaRange],
        skip: u64,
        len: u64,
        lists: &Lists,
        list: usize,
    ) -> (Flags, DataPointer) {
        let pieces = || pieces(ranges, skip, len);
        let mut two = pieces();
        if let (Some(only), None) = (two.next(), two.next()) {
            return self.contiguous(only.iova, only.len, lists, list);
        }
        match method {
            Method::Sgl => {
                let mut count = 0;
                for piece in pieces() {
                    let descriptor = SglDescriptor::data_block(piece.iova, piece.len as u32);
                    let [low, high] = words(&descriptor);
                    lists.set(list, count * 2, low);
                    lists.set(list, count * 2 + 1, high);
                    count += 1;
                }
                sgl(SglDescriptor::last_segment(
                    lists.iova(list, 0),
                    count as u32 * 16,
                ))
            }
            Method::Prp => {
                // Every page after the first, which is in PRP1.
                let mut pages = pieces().flat_map(|piece| {
                    let start = piece.iova;
                    let aligned = start & !(self.page - 1);
                    let count = (start + piece.len - aligned).div_ceil(self.page);
                    (0..count).map(move |i| {
                        if i == 0 {
                            start
                        } else {
                            aligned + i * self.page
                        }
                    })
                });
                let prp1 = pages.next().unwrap_or(0);
                let Some(second) = pages.next() else {
                    return (Flags::new(), DataPointer::prp(prp1, 0));
                };
                let mut pages = pages.peekable();
                if pages.peek().is_none() {
                    return (Flags::new(), DataPointer::prp(prp1, second));
                }
                let mut writer = Writer::new(self.page, lists, list);
                writer.push(second, false);
                while let Some(page) = pages.next() {
                    writer.push(page, pages.peek().is_none());
                }
                (Flags::new(), DataPointer::prp(prp1, lists.iova(list, 0)))
            }
        }
    }
}

/// Returns the maximum size in bytes of the PRP list or SGL segment for a transfer of `len` bytes.
pub(crate) fn list_bytes(len: u64, page: u64) -> u64 {
    let entries = len.div_ceil(page) + 1;
    let per_page = page / 8 - 1;
    entries.div_ceil(per_page).max(1) * page
}

/// Writer of a PRP list, which chains the list's pages.
struct Writer<'a> {
    lists: &'a Lists,
    list: usize,
    /// Number of PRP entries in a page of the list.
    per_page: usize,
    at: usize,
}

impl<'a> Writer<'a> {
    fn new(page: u64, lists: &'a Lists, list: usize) -> Self {
        Self {
            lists,
            list,
            per_page: (page / 8) as usize,
            at: 0,
        }
    }

    #[inline]
    fn push(&mut self, entry: u64, last: bool) {
        if self.at % self.per_page == self.per_page - 1 && !last {
            let next = self.lists.iova(self.list, (self.at + 1) * 8);
            self.lists.set(self.list, self.at, next);
            self.at += 1;
        }
        self.lists.set(self.list, self.at, entry);
        self.at += 1;
    }
}

fn sgl(descriptor: SglDescriptor) -> (Flags, DataPointer) {
    let flags = Flags::new().with_psdt(Psdt::SGL_MPTR_BUFFER);
    (flags, DataPointer::sgl(descriptor))
}

fn words(descriptor: &SglDescriptor) -> [u64; 2] {
    let bytes = descriptor.as_bytes();
    let word = |at: usize| {
        let mut word = [0; 8];
        for (to, from) in word.iter_mut().zip(bytes.iter().skip(at)) {
            *to = *from;
        }
        u64::from_le_bytes(word)
    };
    [word(0), word(8)]
}

/// Returns `len` bytes of the ranges, from byte `skip` on, as contiguous pieces.
fn pieces(ranges: &[IovaRange], skip: u64, len: u64) -> impl Iterator<Item = IovaRange> + '_ {
    let (mut skip, mut left) = (skip, len);
    ranges.iter().filter_map(move |range| {
        let start = skip.min(range.len);
        skip -= start;
        let take = (range.len - start).min(left);
        left -= take;
        (take > 0).then_some(IovaRange {
            iova: range.iova + start,
            len: take,
        })
    })
}
