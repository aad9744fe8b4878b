//! A controller's outstanding requests to transfer (R2T).

use crate::violation::Violation;

/// Request to transfer (R2T) that a controller has sent and the host has not fulfilled.
#[derive(Debug)]
pub struct Grant<T> {
    /// Data of the caller that belongs to the request.
    pub item: T,
    /// Identifier of the command that the requested data belongs to.
    pub cid: u16,
    /// Byte offset within the command's data of the next byte to receive.
    pub(crate) next: u32,
    /// Byte offset within the command's data after the last requested byte.
    pub(crate) end: u32,
}

/// Table of the requests to transfer of a queue, by tag. A tag contains an index and a sequence
/// number, so that stale tags are detected.
#[derive(Debug)]
pub struct Grants<T> {
    places: Vec<(u16, Option<Grant<T>>)>,
    free: Vec<u16>,
    bits: u32,
}

impl<T> Grants<T> {
    /// Creates an empty table for at most `room` outstanding requests to transfer, 1 to 4096.
    pub fn new(room: u16) -> Self {
        let room = room.clamp(1, 4096);
        Self {
            places: (0..room).map(|_| (0, None)).collect(),
            free: (0..room).rev().collect(),
            bits: u32::from(room).next_power_of_two().trailing_zeros(),
        }
    }

    /// Returns the number of outstanding requests to transfer.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Returns whether no request to transfer is outstanding.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a request for `len` bytes of a command's data from `from` on, and returns its tag.
    ///
    /// # Errors
    /// Returns `item` if the table is full, `len` is 0, or the range exceeds 32 bits.
    pub fn insert(&mut self, cid: u16, from: u32, len: u32, item: T) -> Result<u16, T> {
        let bits = self.bits;
        let end = from.checked_add(len).filter(|_| len > 0);
        let place = self.free.last().copied();
        let Some((end, place, (sequence, empty))) = end
            .zip(place)
            .and_then(|(end, place)| Some((end, place, self.places.get_mut(usize::from(place))?)))
        else {
            return Err(item);
        };
        self.free.pop();
        *sequence = sequence.wrapping_add(1);
        *empty = Some(Grant {
            item,
            cid,
            next: from,
            end,
        });
        Ok(sequence.wrapping_shl(bits) | place)
    }

    /// Returns the outstanding request with this transfer tag.
    pub fn get(&mut self, tag: u16) -> Option<&mut Grant<T>> {
        let (place, bits) = (self.place(tag), self.bits);
        let (sequence, grant) = self.places.get_mut(place)?;
        let named = sequence.wrapping_shl(bits) | place as u16 == tag;
        grant.as_mut().filter(|_| named)
    }

    fn place(&self, tag: u16) -> usize {
        usize::from(tag & ((1u32 << self.bits) - 1) as u16)
    }

    /// Removes and returns the outstanding request with this transfer tag.
    pub fn remove(&mut self, tag: u16) -> Option<Grant<T>> {
        self.get(tag)?;
        let place = self.place(tag);
        let grant = self.places.get_mut(place)?.1.take();
        self.free.push(place as u16);
        grant
    }

    /// Checks the range of received data against its request; returns whether it completes the
    /// request.
    pub(crate) fn announce(
        &mut self,
        tag: u16,
        cid: u16,
        offset: u32,
        len: u32,
    ) -> Result<bool, Violation> {
        let grant = self.get(tag).filter(|grant| grant.cid == cid);
        let grant = grant.ok_or(Violation::Tag(tag))?;
        let expected = grant.next;
        let end = offset.checked_add(len).filter(|end| *end <= grant.end);
        match end.filter(|_| offset == expected && len > 0) {
            Some(end) => {
                grant.next = end;
                Ok(end == grant.end)
            }
            None => Err(Violation::Range {
                offset,
                len,
                expected,
            }),
        }
    }
}
