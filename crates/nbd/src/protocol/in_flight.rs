//! Outstanding requests, found by their cookies.

use super::received::Received;

/// Properties of a request against which its reply is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestInfo {
    /// The reply carries data.
    pub read: bool,
    /// Offset of the first byte in the export.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// An outstanding request.
#[derive(Debug)]
pub struct InFlightRequest<T> {
    /// Properties of the request.
    pub info: RequestInfo,
    /// Caller's data for the request.
    pub item: T,
    /// Ranges of the request that have been announced or received.
    pub(super) received: Received,
    /// Error code of the first error chunk.
    pub(super) error: Option<u32>,
    /// Number of error chunks.
    pub(super) errors: u32,
    /// The last chunk of the reply has arrived.
    pub(super) ended: bool,
}

impl<T> InFlightRequest<T> {
    /// Returns the result of the request, with the error code if it failed; `None` until the whole
    /// reply was received.
    pub fn outcome(&self) -> Option<Option<u32>> {
        self.ended.then_some(self.error)
    }

    /// Forgets the reply received so far, before the request is sent again.
    pub fn ask_again(&mut self) {
        (self.ended, self.error) = (false, None);
    }
}

/// Table of outstanding requests. A cookie contains an index and a sequence number, so that stale
/// cookies are detected.
#[derive(Debug)]
pub struct InFlight<T> {
    places: Vec<(u32, Option<InFlightRequest<T>>)>,
    free: Vec<u32>,
}

impl<T> InFlight<T> {
    /// Creates a table for at most `room` requests.
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

    /// Returns whether the table is full.
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Adds a request and returns its cookie.
    ///
    /// # Errors
    /// Returns `item` if the table is full.
    pub fn insert(&mut self, info: RequestInfo, item: T) -> Result<u64, T> {
        let place = self.free.last().copied();
        let Some((place, (sequence, empty))) =
            place.and_then(|place| Some((place, self.places.get_mut(place as usize)?)))
        else {
            return Err(item);
        };
        self.free.pop();
        *sequence = sequence.wrapping_add(1);
        *empty = Some(InFlightRequest {
            info,
            item,
            received: Received::default(),
            error: None,
            errors: 0,
            ended: false,
        });
        Ok(u64::from(*sequence) << 32 | u64::from(place))
    }

    /// Returns the request with this cookie.
    pub fn get(&mut self, cookie: u64) -> Option<&mut InFlightRequest<T>> {
        let (sequence, entry) = self.places.get_mut(cookie as u32 as usize)?;
        entry
            .as_mut()
            .filter(|_| u64::from(*sequence) == cookie >> 32)
    }

    /// Removes and returns the request with this cookie.
    pub fn remove(&mut self, cookie: u64) -> Option<InFlightRequest<T>> {
        self.get(cookie)?;
        let place = cookie as u32;
        let entry = self.places.get_mut(place as usize)?.1.take();
        self.free.push(place);
        entry
    }

    /// Iterates over all requests, each with its cookie.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut InFlightRequest<T>)> {
        let places = (0u64..).zip(&mut self.places);
        places.filter_map(|(place, (sequence, entry))| {
            Some((u64::from(*sequence) << 32 | place, entry.as_mut()?))
        })
    }

    /// Removes and returns all requests.
    pub fn drain(&mut self) -> impl Iterator<Item = InFlightRequest<T>> {
        self.free.clear();
        self.free.extend((0..self.places.len() as u32).rev());
        self.places.iter_mut().filter_map(|(_, entry)| entry.take())
    }
}
