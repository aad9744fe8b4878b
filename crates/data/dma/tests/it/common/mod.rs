//! What the property tests share: a guest address space of scattered pages, and its naive model.
#![allow(dead_code)]

use dma::{Access, DmaError, DmaMap, Memory, Prot, SegmentList};

/// The unit in which the address space is scattered.
pub const PAGE: u64 = 4096;

/// An address space of `n` pages from `base` on: page `i` lies in memory
/// page `places[i]`, or nowhere.
pub struct Space {
    pub map: DmaMap,
    pub memory: Memory,
    pub base: u64,
    pub places: Vec<Option<usize>>,
}

impl Space {
    /// `places` are indices of memory pages; equal ones are aliases, which is allowed.
    pub fn new(base: u64, places: Vec<Option<usize>>) -> Space {
        let pages = places.iter().flatten().max().map_or(1, |last| last + 1);
        let memory = Memory::anonymous(pages * PAGE as usize).unwrap();
        let mut map = DmaMap::new();
        for (i, place) in places.iter().enumerate() {
            if let Some(place) = place {
                let backing = Some((memory.clone(), *place as u64 * PAGE));
                map.map(base + i as u64 * PAGE, PAGE, backing, Prot::RW)
                    .unwrap();
            }
        }
        Space {
            map,
            memory,
            base,
            places,
        }
    }

    /// The memory offset behind an address.
    pub fn offset(&self, iova: u64) -> Result<usize, DmaError> {
        let unmapped = DmaError::Unmapped { iova };
        let at = iova.checked_sub(self.base).ok_or(unmapped)?;
        let page = usize::try_from(at / PAGE).map_err(|_| unmapped)?;
        let place = self.places.get(page).copied().flatten().ok_or(unmapped)?;
        Ok(place * PAGE as usize + (at % PAGE) as usize)
    }

    /// The memory pieces of a range, (offset, length), page by page.
    pub fn pieces(&self, iova: u64, len: u64) -> Result<Vec<(usize, usize)>, DmaError> {
        if len > 0 {
            iova.checked_add(len - 1).ok_or(DmaError::Overflow)?;
        }
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < len {
            let at = iova + done;
            let bytes = (PAGE - at % PAGE).min(len - done);
            pieces.push((self.offset(at)?, bytes as usize));
            done += bytes;
        }
        Ok(pieces)
    }

    /// One byte.
    pub fn byte(&self, iova: u64) -> Result<u8, DmaError> {
        let mut byte = [0];
        self.memory.read(self.offset(iova)?, &mut byte).unwrap();
        Ok(byte[0])
    }

    /// Little-endian bytes, one by one.
    pub fn bytes<const N: usize>(&self, iova: u64) -> Result<[u8; N], DmaError> {
        let mut bytes = [0; N];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = self.byte(iova.checked_add(i as u64).ok_or(DmaError::Overflow)?)?;
        }
        Ok(bytes)
    }
}

/// Asserts that the list consists of exactly these pieces of the memory, in this order, in as
/// few segments as possible.
pub fn assert_places(list: &SegmentList, memory: &Memory, pieces: &[(usize, usize)]) {
    let base = memory.segment(0, 1).unwrap().as_ptr().addr();
    let got: Vec<(usize, usize)> = list
        .segments()
        .iter()
        .map(|s| (s.as_ptr().addr() - base, s.len()))
        .collect();
    let mut merged: Vec<(usize, usize)> = Vec::new();
    for &(offset, len) in pieces.iter().filter(|(_, len)| *len > 0) {
        match merged.last_mut() {
            Some(last) if last.0 + last.1 == offset => last.1 += len,
            _ => merged.push((offset, len)),
        }
    }
    assert_eq!(got, merged);
    assert_eq!(
        list.len_bytes(),
        merged.iter().map(|(_, len)| *len as u64).sum::<u64>()
    );
}

/// Both directions.
pub const BOTH: [Access; 2] = [Access::Read, Access::Write];
