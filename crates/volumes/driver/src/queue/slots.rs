//! Command slots of a queue pair: one for each command that can be outstanding.

use nvme::Command;

use crate::buffer::DmaBuffer;

/// Value of `parent` for a command that is not a part of a larger request.
pub(crate) const SINGLE: u32 = u32::MAX;

/// State of an outstanding command, in two cache lines. The first is written at submission and
/// normally not read again; the second has the values that its completion needs.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct CommandSlot {
    /// Submitted command, kept so that it can be submitted again after a reset.
    pub command: Command,
    pub hold: Option<DmaBuffer>,
    pub user_data: u64,
    /// Index of the request that the command is a part of, or [`SINGLE`].
    pub parent: u32,
    /// Time of the command's submission in ticks of the queue pair.
    pub tick: u32,
    /// Current command identifier: the slot's number in the low bits, a sequence number above them.
    pub cid: u16,
    pub busy: bool,
    /// Whether the controller was asked to abort the command.
    pub aborted: bool,
    pub tries: u8,
}

const _: () = assert!(size_of::<CommandSlot>() == 2 * 64);

/// Slots for the outstanding commands of a queue pair.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<CommandSlot>,
    free: Vec<u16>,
    /// Number of low bits of a command identifier that contain the slot's number.
    bits: u32,
}

impl Slots {
    /// Creates `count` free slots, 1 to 32,767.
    pub fn new(count: u32) -> Self {
        let count = count.clamp(1, 0x7fff) as u16;
        // No slot has all bits set, so no CID is FFFFh.
        let bits = u32::from(count + 1).next_power_of_two().trailing_zeros();
        Self {
            slots: (0..count)
                .map(|index| CommandSlot {
                    command: Command::default(),
                    hold: None,
                    user_data: 0,
                    parent: SINGLE,
                    tick: 0,
                    cid: index,
                    busy: false,
                    aborted: false,
                    tries: 0,
                })
                .collect(),
            free: (0..count).rev().collect(),
            bits,
        }
    }

    pub fn count(&self) -> usize {
        self.slots.len()
    }

    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the number of the slot that the next command gets.
    #[inline]
    pub fn next(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Allocates the slot returned by [`Slots::next`], with a new CID.
    #[inline]
    pub fn begin(&mut self, index: u16) -> Option<&mut CommandSlot> {
        if self.free.last() != Some(&index) {
            return None;
        }
        self.free.pop();
        let bits = self.bits;
        let slot = self.slots.get_mut(usize::from(index))?;
        slot.renew(bits);
        slot.busy = true;
        slot.tries = 0;
        Some(slot)
    }

    /// Returns the outstanding command with this CID and its slot number; `None` when there is
    /// none.
    #[inline]
    pub fn named(&mut self, cid: u16) -> Option<(u16, &mut CommandSlot)> {
        let index = cid & ((1u32 << self.bits) - 1) as u16;
        let slot = self.slots.get_mut(usize::from(index))?;
        (slot.busy && slot.cid == cid).then_some((index, slot))
    }

    /// Returns the slot with this number.
    pub fn get(&mut self, index: u16) -> Option<&mut CommandSlot> {
        self.slots.get_mut(usize::from(index))
    }

    /// Assigns a new CID to a command that is submitted again.
    pub fn renew(&mut self, index: u16) -> Option<&mut CommandSlot> {
        let bits = self.bits;
        let slot = self.slots.get_mut(usize::from(index))?;
        slot.renew(bits);
        Some(slot)
    }

    /// Frees the slot of a completed command.
    #[inline]
    pub fn end(&mut self, index: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(index)) {
            slot.busy = false;
            self.free.push(index);
        }
    }

    /// Returns the slot numbers of outstanding commands.
    pub fn busy(&self) -> Vec<u16> {
        let busy = self.slots.iter().enumerate().filter(|(_, slot)| slot.busy);
        busy.map(|(index, _)| index as u16).collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = &CommandSlot> {
        self.slots.iter()
    }

    /// Returns the buffers of all outstanding commands.
    pub fn into_holds(self) -> Vec<DmaBuffer> {
        self.slots
            .into_iter()
            .filter_map(|slot| slot.hold)
            .collect()
    }
}

impl CommandSlot {
    #[inline]
    fn renew(&mut self, bits: u32) {
        self.cid = self.cid.wrapping_add((1u32 << bits) as u16);
        self.command.cid = self.cid.into();
        self.aborted = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn cids_name_one_use_of_slot() {
        for count in [1, 2, 3, 127, 128, 1023, 4095, 32767] {
            let mut slots = Slots::new(count);
            let mut seen = HashSet::new();
            let uses = (1u32 << 16 >> slots.bits).min(16);
            for _ in 0..uses {
                for _ in 0..count {
                    let index = slots.next().unwrap();
                    let cid = slots.begin(index).unwrap().cid;
                    assert_ne!(cid, 0xffff);
                    assert!(seen.insert(cid), "{cid:#x} again within {uses} uses");
                    assert_eq!(slots.named(cid).unwrap().0, index);
                }
                assert!(slots.next().is_none());
                for index in slots.busy() {
                    let cid = slots.get(index).unwrap().cid;
                    slots.end(index);
                    assert!(slots.named(cid).is_none(), "a second completion");
                }
            }
        }
    }

    #[test]
    fn stale_cid_names_nothing() {
        let mut slots = Slots::new(8);
        let index = slots.next().unwrap();
        let first = slots.begin(index).unwrap().cid;
        slots.end(index);
        let second = slots.begin(index).unwrap().cid;
        assert!(slots.named(first).is_none());
        assert!(slots.named(second).is_some());
        let third = slots.renew(index).unwrap().cid;
        assert!(slots.named(second).is_none() && slots.named(third).is_some());
        assert!(slots.named(0xffff).is_none() && slots.named(9).is_none());
    }
}
