//! A queue's commands that have come and are not answered.

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
    /// This side, to create or delete a queue of this identifier.
    Own {
        /// The queue's identifier.
        qid: u16,
        /// Step of the creation or deletion.
        step: Step,
    },
}

/// Steps of making and removing a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    CreateCq,
    CreateSq,
    DeleteSq,
    DeleteCq,
}

/// A command.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Slot {
    pub used: bool,
    pub sender: Sender,
    /// The host's identifier of it.
    pub cid: u16,
    /// The command as received.
    pub command: Command,
    pub direction: Direction,
    /// Bytes of its data.
    pub len: u32,
    pub block: Option<Block>,
    /// The controller has it.
    pub started: bool,
    /// The digest of some of its data does not match.
    pub corrupt: bool,
}

/// The commands of one queue.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u16>,
}

impl Slots {
    /// Creates so many slots.
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

    /// Takes a free slot; returns its place.
    pub(crate) fn take(&mut self, slot: Slot) -> Option<u16> {
        let place = self.free.pop()?;
        let vacant = self.slots.get_mut(usize::from(place))?;
        *vacant = Slot { used: true, ..slot };
        Some(place)
    }

    /// Returns the command of a place, if there is one.
    pub(crate) fn get(&mut self, place: u16) -> Option<&mut Slot> {
        self.slots
            .get_mut(usize::from(place))
            .filter(|slot| slot.used)
    }

    /// Frees a place; the memory of its command.
    pub(crate) fn free(&mut self, place: u16) -> Option<Block> {
        let slot = self.get(place)?;
        slot.used = false;
        let block = slot.block.take();
        self.free.push(place);
        block
    }

    /// Places of the commands that the host calls so, and that the controller has.
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

    /// Returns the places of all slots in use.
    pub(crate) fn places(&self) -> Vec<u16> {
        let places = (0u16..).zip(&self.slots);
        places
            .filter(|(_, slot)| slot.used)
            .map(|(place, _)| place)
            .collect()
    }
}
