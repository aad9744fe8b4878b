//! A host's commands that have been sent and are not answered, by their identifiers.

/// Properties of a command that its answer is checked against.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Asked {
    /// Maximum of bytes that the controller may send.
    pub data_in: u32,
    /// The controller sends all `data_in` bytes, if the command succeeds.
    pub whole: bool,
    /// Maximum of bytes that the controller may request, without those in the capsule.
    pub data_out: u32,
}

/// A command in flight.
#[derive(Debug)]
pub struct Entry<T> {
    /// Properties of the command.
    pub asked: Asked,
    /// Data of the caller about the command.
    pub item: T,
    /// Bytes of data that have been announced, or come.
    pub(crate) received: u32,
    /// Bytes of data that have been asked for.
    pub(crate) requested: u32,
    /// The digest of some of its data did not match.
    pub(crate) corrupt: bool,
    /// The command was answered.
    pub(crate) ended: bool,
}

/// Commands in flight of one queue. An identifier has a place and a sequence, so that a stale one
/// is known; none is FFFFh.
#[derive(Debug)]
pub struct InFlight<T> {
    places: Vec<(u16, Option<Entry<T>>)>,
    free: Vec<u16>,
    /// Low bits of an identifier that are the place.
    bits: u32,
}

impl<T> InFlight<T> {
    /// Maximum number of places.
    pub const MOST: u16 = 4096;

    /// Creates a table with room for so many commands, 1 to [`Self::MOST`].
    pub fn new(room: u16) -> Self {
        let room = room.clamp(1, Self::MOST);
        Self {
            places: (0..room).map(|_| (0, None)).collect(),
            free: (0..room).rev().collect(),
            // The place with all bits set is never there.
            bits: (u32::from(room) + 1).next_power_of_two().trailing_zeros(),
        }
    }

    /// Returns the number of commands.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Returns whether there are no commands.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether there is no room.
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Enters a command and returns its identifier.
    ///
    /// # Errors
    /// `item`, if there is no room.
    pub fn insert(&mut self, asked: Asked, item: T) -> Result<u16, T> {
        let bits = self.bits;
        let place = self.free.last().copied();
        let Some((place, (sequence, empty))) =
            place.and_then(|place| Some((place, self.places.get_mut(usize::from(place))?)))
        else {
            return Err(item);
        };
        self.free.pop();
        *sequence = sequence.wrapping_add(1);
        *empty = Some(Entry {
            asked,
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

    /// Returns the command of an identifier.
    #[inline]
    pub fn get(&mut self, cid: u16) -> Option<&mut Entry<T>> {
        let (place, bits) = (self.place(cid), self.bits);
        let (sequence, entry) = self.places.get_mut(place)?;
        let named = name(place as u16, *sequence, bits) == cid;
        entry.as_mut().filter(|_| named)
    }

    /// Returns the unanswered command of an identifier.
    #[inline]
    pub(crate) fn open(&mut self, cid: u16) -> Option<&mut Entry<T>> {
        self.get(cid).filter(|entry| !entry.ended)
    }

    /// Removes a command.
    pub fn remove(&mut self, cid: u16) -> Option<Entry<T>> {
        self.get(cid)?;
        let place = self.place(cid);
        let entry = self.places.get_mut(place)?.1.take();
        self.free.push(place as u16);
        entry
    }

    /// Iterates over all commands, with their identifiers.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut Entry<T>)> {
        let bits = self.bits;
        let places = (0u16..).zip(&mut self.places);
        places.filter_map(move |(place, (sequence, entry))| {
            Some((name(place, *sequence, bits), entry.as_mut()?))
        })
    }

    /// Removes all commands.
    pub fn drain(&mut self) -> impl Iterator<Item = Entry<T>> {
        self.free.clear();
        self.free.extend((0..self.places.len() as u16).rev());
        self.places.iter_mut().filter_map(|(_, entry)| entry.take())
    }
}

impl<T> Entry<T> {
    /// Returns whether the command was answered, and is only kept by its sender.
    pub fn has_ended(&self) -> bool {
        self.ended
    }
}

/// Makes an identifier of a place, and of as many bits of a sequence as there is room for.
fn name(place: u16, sequence: u16, bits: u32) -> u16 {
    sequence.wrapping_shl(bits) | place
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn an_identifier_names_one_use_of_one_place() {
        for room in [1, 2, 31, 128, 1000, 4095, 4096] {
            let mut commands = InFlight::new(room);
            let uses = (1u32 << 16 >> commands.bits).min(8);
            let mut seen = HashSet::new();
            for _ in 0..uses {
                let cids: Vec<u16> = (0..room)
                    .map(|item| commands.insert(Asked::default(), item).unwrap())
                    .collect();
                assert!(commands.is_full());
                assert_eq!(commands.insert(Asked::default(), 7), Err(7));
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
    fn stale_and_unknown_identifiers_name_nothing() {
        let mut commands = InFlight::new(3);
        let first = commands.insert(Asked::default(), ()).unwrap();
        commands.remove(first);
        let second = commands.insert(Asked::default(), ()).unwrap();
        assert_ne!(first, second);
        assert!(commands.get(first).is_none() && commands.get(second).is_some());
        assert!(commands.get(u16::MAX).is_none());
        assert_eq!(commands.iter_mut().count(), 1);
        assert_eq!(commands.drain().count(), 1);
        assert!(commands.is_empty() && commands.get(second).is_none());
    }
}
