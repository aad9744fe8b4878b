//! Slots of a queue, one for each command that was received and not answered yet.

use crate::memory::Block;
use nvme::Command;

/// Direction of the data of a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Direction {
    #[default]
    None,
    /// Data goes from the controller to the host.
    In,
    /// Data goes from the host to the controller.
    Out,
}

/// Sender of a command that the controller executes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Sender {
    #[default]
    Host,
    /// The association itself, to create or delete the rings of a queue.
    Own {
        /// Identifier of the queue that is created or deleted.
        qid: u16,
        /// Step of the creation or deletion that the command executes.
        step: QueueStep,
    },
}

/// Steps in which the rings of a queue are created and deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueStep {
    CreateCq,
    CreateSq,
    DeleteSq,
    DeleteCq,
}

/// Command of a host that was received and not completed yet.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Slot {
    pub used: bool,
    pub sender: Sender,
    /// Command identifier that the host has chosen.
    pub cid: u16,
    /// The command as the host has sent it.
    pub command: Command,
    pub direction: Direction,
    /// Length of the command's data in bytes.
    pub len: u32,
    pub block: Option<Block>,
    /// Whether the command was passed to the controller.
    pub started: bool,
    /// Whether the digest of the command's data did not match.
    pub corrupt: bool,
}

/// Received commands of one queue that are not completed yet.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u16>,
}

impl Slots {
    /// Creates a table for at most `room` commands.
    pub(crate) fn new(room: u16) -> Self {
        Self {
            slots: vec![Slot::default(); usize::from(room)],
            free: (0..room).rev().collect(),
        }
    }

    /// Returns whether there is room for another command.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns the number of commands in the table.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Stores a command in a free slot, and returns the slot's index; `None` if there is none.
    pub(crate) fn take(&mut self, slot: Slot) -> Option<u16> {
        let place = self.free.pop()?;
        let vacant = self.slots.get_mut(usize::from(place))?;
        *vacant = Slot { used: true, ..slot };
        Some(place)
    }

    /// Returns the command in the slot with this index.
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

    /// Returns the indices of all slots with commands.
    pub(crate) fn places(&self) -> Vec<u16> {
        let places = (0u16..).zip(&self.slots);
        places
            .filter(|(_, slot)| slot.used)
            .map(|(place, _)| place)
            .collect()
    }
}
