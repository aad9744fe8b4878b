//! A host's outstanding commands, by their identifiers.

/// Properties of a sent command, against which the controller's PDUs are checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CommandInfo {
    /// Maximum number of data bytes that the controller may send.
    pub data_in: u32,
    /// Whether a successful command requires all `data_in` bytes.
    pub whole: bool,
    /// Maximum number of data bytes that the controller may request, besides in-capsule data.
    pub data_out: u32,
}

/// Command that was sent to the controller and has not completed.
#[derive(Debug)]
pub struct InFlightCommand<T> {
    /// Properties of the command, against which the controller's PDUs are checked.
    pub info: CommandInfo,
    /// Data of the caller that belongs to the command.
    pub item: T,
    /// Number of the command's data bytes that were announced or received.
    pub(crate) received: u32,
    /// Number of the command's data bytes that the controller has requested.
    pub(crate) requested: u32,
    /// Whether the digest of any of the command's data did not match.
    pub(crate) corrupt: bool,
    /// Whether the controller has completed the command.
    pub(crate) ended: bool,
}

/// Table of the outstanding commands of a queue. An identifier contains an index and a sequence
/// number, so that stale ones are detected; none is FFFFh.
#[derive(Debug)]
pub struct InFlight<T> {
    places: Vec<(u16, Option<InFlightCommand<T>>)>,
    free: Vec<u16>,
    /// Number of low bits of a command identifier that contain the index in the table.
    bits: u32,
}

impl<T> InFlight<T> {
    /// Maximum number of outstanding commands in a table.
    pub const MAX_COMMANDS: u16 = 4096;

    /// Creates an empty table for at most `room` outstanding commands, 1 to [`Self::MAX_COMMANDS`].
    pub fn new(room: u16) -> Self {
        let room = room.clamp(1, Self::MAX_COMMANDS);
        Self {
            places: (0..room).map(|_| (0, None)).collect(),
            free: (0..room).rev().collect(),
            // No command has the index with all bits set.
            bits: (u32::from(room) + 1).next_power_of_two().trailing_zeros(),
        }
    }

    /// Returns the number of outstanding commands.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Returns whether no command is outstanding.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the maximum number of commands is outstanding.
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Adds a command and returns its identifier.
    ///
    /// # Errors
    /// Returns `item` if the table is full.
    pub fn insert(&mut self, info: CommandInfo, item: T) -> Result<u16, T> {
        let bits = self.bits;
        let place = self.free.last().copied();
        let Some((place, (sequence, empty))) =
            place.and_then(|place| Some((place, self.places.get_mut(usize::from(place))?)))
        else {
            return Err(item);
        };
        self.free.pop();
        *sequence = sequence.wrapping_add(1);
        *empty = Some(InFlightCommand {
            info,
            item,
            received: 0,
            requested: 0,
            corrupt: false,
            ended: false,
        });
        Ok(name(place, *sequence, bits))
    }

    fn place(&self, cid: u16) -> usize {
        // Room for no more than 12 bits.
        usize::from(cid & ((1u32 << self.bits) - 1) as u16)
    }

    /// Returns the outstanding command with this identifier.
    #[inline]
    pub fn get(&mut self, cid: u16) -> Option<&mut InFlightCommand<T>> {
        let (place, bits) = (self.place(cid), self.bits);
        let (sequence, entry) = self.places.get_mut(place)?;
        let named = name(place as u16, *sequence, bits) == cid;
        entry.as_mut().filter(|_| named)
    }

    /// Returns the command with this identifier, unless it has completed.
    #[inline]
    pub(crate) fn open(&mut self, cid: u16) -> Option<&mut InFlightCommand<T>> {
        self.get(cid).filter(|entry| !entry.ended)
    }

    /// Removes and returns the command with this identifier.
    pub fn remove(&mut self, cid: u16) -> Option<InFlightCommand<T>> {
        self.get(cid)?;
        let place = self.place(cid);
        let entry = self.places.get_mut(place)?.1.take();
        self.free.push(place as u16);
        entry
    }

    /// Returns all outstanding commands, each with its identifier.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut InFlightCommand<T>)> {
        let bits = self.bits;
        let places = (0u16..).zip(&mut self.places);
        places.filter_map(move |(place, (sequence, entry))| {
            Some((name(place, *sequence, bits), entry.as_mut()?))
        })
    }

    /// Removes and returns all outstanding commands.
    pub fn drain(&mut self) -> impl Iterator<Item = InFlightCommand<T>> {
        self.free.clear();
        self.free.extend((0..self.places.len() as u16).rev());
        self.places.iter_mut().filter_map(|(_, entry)| entry.take())
    }
}

impl<T> InFlightCommand<T> {
    /// Returns whether the command has completed, and its sender only keeps the entry.
    pub fn has_ended(&self) -> bool {
        self.ended
    }
}

/// Combines an index and the low bits of a sequence number into an identifier.
fn name(place: u16, sequence: u16, bits: u32) -> u16 {
    sequence.wrapping_shl(bits) | place
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn command_ids_name_one_use_of_slot() {
        for room in [1, 2, 31, 128, 1000, 4095, 4096] {
            let mut commands = InFlight::new(room);
            let uses = (1u32 << 16 >> commands.bits).min(8);
            let mut seen = HashSet::new();
            for _ in 0..uses {
                let cids: Vec<u16> = (0..room)
                    .map(|item| commands.insert(CommandInfo::default(), item).unwrap())
                    .collect();
                assert!(commands.is_full());
                assert_eq!(commands.insert(CommandInfo::default(), 7), Err(7));
                for (item, cid) in (0..room).zip(cids) {
                    assert!(cid != u16::MAX && seen.insert(cid), "{cid:#x}");
                    assert_eq!(commands.get(cid).unwrap().item, item);
                    assert_eq!(commands.remove(cid).unwrap().item, item);
                    assert!(commands.remove(cid).is_none());
                }
                assert!(commands.is_empty());
            }
        }
    }

    #[test]
    fn stale_and_unknown_command_ids_name_nothing() {
        let mut commands = InFlight::new(3);
        let first = commands.insert(CommandInfo::default(), ()).unwrap();
        commands.remove(first);
        let second = commands.insert(CommandInfo::default(), ()).unwrap();
        assert_ne!(first, second);
        assert!(commands.get(first).is_none() && commands.get(second).is_some());
        assert!(commands.get(u16::MAX).is_none());
        assert_eq!(commands.iter_mut().count(), 1);
        assert_eq!(commands.drain().count(), 1);
        assert!(commands.is_empty() && commands.get(second).is_none());
    }
}
