//! Outstanding requests, found by their cookies.

use super::received::Received;

/// Properties of a sent request, against which its reply is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestInfo {
    /// Whether the reply has to contain data (a read).
    pub read: bool,
    /// Byte offset of the request in the export.
    pub offset: u64,
    /// Length of the request in bytes.
    pub len: u32,
}

/// Request that was sent to the server and has not been answered completely.
#[derive(Debug)]
pub struct InFlightRequest<T> {
    /// Properties of the request, against which its reply is checked.
    pub info: RequestInfo,
    /// Data of the caller that belongs to the request.
    pub item: T,
    /// Parts of a read that were announced or received.
    pub(super) received: Received,
    /// NBD error code of the reply's first error chunk, if there was any.
    pub(super) error: Option<u32>,
    /// Number of error chunks in the reply.
    pub(super) errors: u32,
    /// Whether the last chunk of the reply has arrived.
    pub(super) ended: bool,
}

/// Table of outstanding requests. A cookie contains an index and a sequence number, so that stale
/// cookies are detected.
#[derive(Debug)]
pub struct InFlight<T> {
    places: Vec<(u32, Option<InFlightRequest<T>>)>,
    free: Vec<u32>,
}

impl<T> InFlight<T> {
    /// Creates an empty table for at most `room` outstanding requests.
    pub fn new(room: u32) -> Self {
        Self {
            places: (0..room).map(|_| (0, None)).collect(),
            free: (0..room).rev().collect(),
        }
    }

    /// Returns the number of outstanding requests.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Returns whether no request is outstanding.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the maximum number of requests is outstanding.
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

    /// Returns the outstanding request with this cookie.
    pub fn get(&mut self, cookie: u64) -> Option<&mut InFlightRequest<T>> {
        let (sequence, entry) = self.places.get_mut(cookie as u32 as usize)?;
        entry
            .as_mut()
            .filter(|_| u64::from(*sequence) == cookie >> 32)
    }

    /// Removes and returns the outstanding request with this cookie.
    pub fn remove(&mut self, cookie: u64) -> Option<InFlightRequest<T>> {
        self.get(cookie)?;
        let place = cookie as u32;
        let entry = self.places.get_mut(place as usize)?.1.take();
        self.free.push(place);
        entry
    }

    /// Returns all outstanding requests, each with its cookie.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut InFlightRequest<T>)> {
        let places = (0u64..).zip(&mut self.places);
        places.filter_map(|(place, (sequence, entry))| {
            Some((u64::from(*sequence) << 32 | place, entry.as_mut()?))
        })
    }

    /// Removes and returns all outstanding requests.
    pub fn drain(&mut self) -> impl Iterator<Item = InFlightRequest<T>> {
        self.free.clear();
        self.free.extend((0..self.places.len() as u32).rev());
        self.places.iter_mut().filter_map(|(_, entry)| entry.take())
    }
}
