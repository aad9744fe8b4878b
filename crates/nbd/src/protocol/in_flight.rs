//! Requests that have been sent and are not answered, by their cookies.

use super::received::Received;

/// Properties of a request that its reply is checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// The reply carries data.
    pub read: bool,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// A request in flight.
#[derive(Debug)]
pub struct Entry<T> {
    /// Properties of the request.
    pub asked: Asked,
    /// The sender's own data about the request.
    pub item: T,
    /// Bytes of the request that have been announced or received.
    pub(super) received: Received,
    /// The first error chunk's number.
    pub(super) error: Option<u32>,
    /// Error chunks.
    pub(super) errors: u32,
    /// The last chunk of the reply has been received.
    pub(super) ended: bool,
}

impl<T> Entry<T> {
    /// Returns the error in the reply, if there is one, once the whole reply has been received.
    pub fn outcome(&self) -> Option<Option<u32>> {
        self.ended.then_some(self.error)
    }

    /// Discards the reply.
    pub fn ask_again(&mut self) {
        (self.ended, self.error) = (false, None);
    }
}

/// Requests in flight. A cookie has a place and a sequence, so that a stale one is known.
#[derive(Debug)]
pub struct InFlight<T> {
    places: Vec<(u32, Option<Entry<T>>)>,
    free: Vec<u32>,
}

impl<T> InFlight<T> {
    /// Creates a table with room for so many requests.
    pub fn new(room: u32) -> Self {
        Self {
            places: (0..room).map(|_| (0, None)).collect(),
            free: (0..room).rev().collect(),
        }
    }

    /// Returns the number of requests.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Returns whether there are no requests.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether there is no room.
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Enters a request and returns its cookie.
    ///
    /// # Errors
    /// `item`, if there is no room.
    pub fn insert(&mut self, asked: Asked, item: T) -> Result<u64, T> {
        let place = self.free.last().copied();
        let Some((place, (sequence, empty))) =
            place.and_then(|place| Some((place, self.places.get_mut(place as usize)?)))
        else {
            return Err(item);
        };
        self.free.pop();
        *sequence = sequence.wrapping_add(1);
        *empty = Some(Entry {
            asked,
            item,
            received: Received::default(),
            error: None,
            errors: 0,
            ended: false,
        });
        Ok(u64::from(*sequence) << 32 | u64::from(place))
    }

    /// Returns the request of a cookie.
    pub fn get(&mut self, cookie: u64) -> Option<&mut Entry<T>> {
        let (sequence, entry) = self.places.get_mut(cookie as u32 as usize)?;
        entry
            .as_mut()
            .filter(|_| u64::from(*sequence) == cookie >> 32)
    }

    /// Removes a request.
    pub fn remove(&mut self, cookie: u64) -> Option<Entry<T>> {
        self.get(cookie)?;
        let place = cookie as u32;
        let entry = self.places.get_mut(place as usize)?.1.take();
        self.free.push(place);
        entry
    }

    /// Iterates over all requests, with their cookies.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut Entry<T>)> {
        let places = (0u64..).zip(&mut self.places);
        places.filter_map(|(place, (sequence, entry))| {
            Some((u64::from(*sequence) << 32 | place, entry.as_mut()?))
        })
    }

    /// Removes all requests.
    pub fn drain(&mut self) -> impl Iterator<Item = Entry<T>> {
        self.free.clear();
        self.free.extend((0..self.places.len() as u32).rev());
        self.places.iter_mut().filter_map(|(_, entry)| entry.take())
    }
}
