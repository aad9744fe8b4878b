//! Slots of a queue, one for each command that was received and not answered yet.

use crate::memory::Block;
use nvme::Command;

/// Direction of a command's data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Direction {
    #[default]
    None,
    /// Data for the host.
    In,
    /// Data from the host.
    Out,
}

/// Sender of a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Sender {
    #[default]
    Host,
    /// This side, to create or delete the queue with this identifier.
    Own {
        /// The queue's identifier.
        qid: u16,
        /// Step of the creation or deletion.
        step: QueueStep,
    },
}

/// Steps of creating and deleting a queue's rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueStep {
    CreateCq,
    CreateSq,
    DeleteSq,
    DeleteCq,
}

/// A received command.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Slot {
    pub used: bool,
    pub sender: Sender,
    /// Command identifier that the host has assigned.
    pub cid: u16,
    /// The command as received.
    pub command: Command,
    pub direction: Direction,
    /// Length of its data in bytes.
    pub len: u32,
    pub block: Option<Block>,
    /// The command was passed to the controller.
    pub started: bool,
    /// The digest of its data did not match.
    pub corrupt: bool,
}

/// Table of the commands of one queue.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u16>,
}

impl Slots {
    /// Creates a table with `room` slots.
    pub(crate) fn new(room: u16) -> Self {
        Self {
            slots: vec![Slot::default(); usize::from(room)],
            free: (0..room).rev().collect(),
        }
    }

    /// Returns whether there is a free slot.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns the number of slots in use.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Allocates a slot, and returns its index; `None` if all are used.
    pub(crate) fn take(&mut self, slot: Slot) -> Option<u16> {
        let place = self.free.pop()?;
        let vacant = self.slots.get_mut(usize::from(place))?;
        *vacant = Slot { used: true, ..slot };
        Some(place)
    }

    /// Returns the command in a slot.
    pub(crate) fn get(&mut self, place: u16) -> Option<&mut Slot> {
        self.slots
            .get_mut(usize::from(place))
            .filter(|slot| slot.used)
    }

    /// Frees a slot, and returns the memory of its command.
    pub(crate) fn free(&mut self, place: u16) -> Option<Block> {
        let slot = self.get(place)?;
        slot.used = false;
        let block = slot.block.take();
        self.free.push(place);
        block
    }

    /// Returns the index of a command with the host's identifier `cid` that was passed to the
    /// controller.
    pub(crate) fn named(&self, cid: u16) -> Option<u16> {
        let places = (0u16..).zip(&self.slots);
        let is_it = |slot: &Slot| {
            slot.used && slot.started && slot.cid == cid && slot.sender == Sender::Host
        };
        places
            .filter(|(_, slot)| is_it(slot))
            .map(|(place, _)| place)
            .next()
    }

    /// Returns the indexes of all used slots.
    pub(crate) fn places(&self) -> Vec<u16> {
        let places = (0u16..).zip(&self.slots);
        places
            .filter(|(_, slot)| slot.used)
            .map(|(place, _)| place)
            .collect()
    }
}
