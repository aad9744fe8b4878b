//! Memories behind the windows of a map, each stored once.

use crate::Memory;

/// Memories of a map, each with a small number and a count of its windows.
#[derive(Debug, Default)]
pub(crate) struct Memories {
    /// Mapped memories by number, as many as the client has mapped; often there is only one.
    places: Vec<Option<MemoryUse>>,
}

#[derive(Debug)]
struct MemoryUse {
    memory: Memory,
    windows: usize,
}

impl Memories {
    /// Adds a window to the count of `memory`. Returns the memory's number.
    pub(crate) fn hold(&mut self, memory: Memory) -> u32 {
        let is_it =
            |place: &Option<MemoryUse>| place.as_ref().is_some_and(|h| h.memory.is_same(&memory));
        let known = self.places.iter().position(is_it);
        let at = known.or_else(|| self.places.iter().position(Option::is_none));
        let at = at.unwrap_or(self.places.len());
        match self.places.get_mut(at) {
            Some(Some(held)) => held.windows += 1,
            Some(place) => *place = Some(MemoryUse { memory, windows: 1 }),
            None => self.places.push(Some(MemoryUse { memory, windows: 1 })),
        }
        // The number of memories is small, so it fits.
        at as u32
    }

    pub(crate) fn get(&self, number: u32) -> Option<&Memory> {
        let place = self.places.get(number as usize)?;
        place.as_ref().map(|held| &held.memory)
    }

    /// Removes a window from the count of a memory. Returns the memory after its last window.
    pub(crate) fn release(&mut self, number: u32) -> Option<Memory> {
        let place = self.places.get_mut(number as usize)?;
        let held = place.as_mut()?;
        held.windows -= 1;
        if held.windows > 0 {
            return None;
        }
        place.take().map(|held| held.memory)
    }

    /// Removes all windows from all memories. Returns the memories.
    pub(crate) fn release_all(&mut self) -> Vec<Memory> {
        let places = std::mem::take(&mut self.places);
        places
            .into_iter()
            .flatten()
            .map(|held| held.memory)
            .collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Memory> {
        self.places.iter().flatten().map(|held| &held.memory)
    }
}
