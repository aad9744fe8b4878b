//! Requests to a remote volume, each of which is split into one or more commands for the server.

use volume::{IoError, Op, Request};

/// Part of a request for which no command was sent yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remaining {
    /// The rest of the request's range, from this byte offset within the request on.
    From(u64),
    /// A flush after all commands of the request, because the server lacks Force Unit Access.
    Flush,
    /// No command was sent, because all commands of the request were sent before.
    Nothing,
}

/// Request to a network volume that is executed by one or several commands.
#[derive(Debug)]
pub(crate) struct SplitRequest {
    /// Request as submitted. A single command that covers the whole request holds its memory
    /// meanwhile.
    pub request: Request,
    /// Part of the request for which no command was sent yet.
    pub todo: Remaining,
    /// Whether a flush must follow the request's range.
    pub then_flush: bool,
    /// Number of the request's commands that are outstanding or will be sent again.
    pub parts: u32,
    /// First error of the request's commands; success while there is none.
    pub result: Result<(), IoError>,
    /// Whether the request was cancelled, and waits only until the kernel returns its memory.
    pub cancelled: bool,
}

impl SplitRequest {
    /// Creates the state of a request before its first command.
    pub fn new(request: Request, then_flush: bool) -> Self {
        Self {
            request,
            todo: Remaining::From(0),
            then_flush,
            parts: 0,
            result: Ok(()),
            cancelled: false,
        }
    }

    /// Returns whether all commands of the request were sent and have ended.
    pub fn is_over(&self) -> bool {
        self.todo == Remaining::Nothing && self.parts == 0
    }

    /// Returns the length of the next command, from byte `done` of the request on, limited to
    /// `most` bytes.
    pub fn piece(&self, done: u64, most: u32) -> u32 {
        let left = self.request.len.saturating_sub(done);
        u32::try_from(left).map_or(most, |left| left.min(most))
    }

    /// Records that a command was created for `len` bytes, from byte `done` of the request on.
    pub fn issued(&mut self, done: u64, len: u32) {
        let done = done.saturating_add(len.into());
        let over = self.request.op == Op::Flush || done >= self.request.len;
        self.parts += 1;
        self.todo = if over {
            Remaining::Nothing
        } else {
            Remaining::From(done)
        };
    }

    /// Records the result of one of the request's commands.
    pub fn answered(&mut self, result: Result<(), IoError>) {
        self.parts = self.parts.saturating_sub(1);
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// Fails the request. No more commands are sent, and the request completes after its last
    /// outstanding command.
    pub fn fail(&mut self, error: IoError) {
        if self.result.is_ok() {
            self.result = Err(error);
        }
        // The flush after the range is not sent, either.
        (self.todo, self.then_flush) = (Remaining::Nothing, false);
    }
}

/// Requests that have not ended, by index.
#[derive(Debug, Default)]
pub(crate) struct SplitRequests {
    places: Vec<Option<SplitRequest>>,
    free: Vec<usize>,
}

impl SplitRequests {
    /// Returns the number of requests that have not ended.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Returns whether all requests have ended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a request, and returns its index.
    pub fn insert(&mut self, parent: SplitRequest) -> usize {
        match self.free.pop() {
            Some(place) => {
                if let Some(vacant) = self.places.get_mut(place) {
                    *vacant = Some(parent);
                }
                place
            }
            None => {
                self.places.push(Some(parent));
                self.places.len() - 1
            }
        }
    }

    /// Returns the request with this index.
    pub fn get(&mut self, place: usize) -> Option<&mut SplitRequest> {
        self.places.get_mut(place)?.as_mut()
    }

    /// Removes and returns the request with this index.
    pub fn remove(&mut self, place: usize) -> Option<SplitRequest> {
        let parent = self.places.get_mut(place)?.take()?;
        self.free.push(place);
        Some(parent)
    }

    /// Returns the index of the request with this tag.
    pub fn find(&self, tag: u64) -> Option<usize> {
        let is_it = |parent: &Option<SplitRequest>| {
            parent
                .as_ref()
                .is_some_and(|parent| parent.request.tag == tag && !parent.cancelled)
        };
        self.places.iter().position(is_it)
    }

    /// Returns the tags of all requests that have not ended.
    pub fn tags(&self) -> Vec<u64> {
        let parents = self.places.iter().flatten();
        parents.map(|parent| parent.request.tag).collect()
    }
}
