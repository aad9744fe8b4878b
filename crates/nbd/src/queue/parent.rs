//! Requests of the volume's user, each of which is one command or several at the server.

use volume::{IoError, Op, Request};

/// Most bytes of data in one command.
const MOST_DATA: u32 = 1 << 20;
/// Most bytes that one command zeroes or trims: one that a server carries out by writing is
/// answered in time.
const MOST_ZEROED: u32 = 64 << 20;

/// What is still to be sent of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Todo {
    /// Its range, from this byte on.
    From(u64),
    /// A flush, when all else is answered: the server knows no durable writes.
    Flush,
    /// Nothing.
    Nothing,
}

/// A request that is not complete.
#[derive(Debug)]
pub(super) struct Parent {
    pub(super) request: Request,
    pub(super) todo: Todo,
    /// A flush follows its range.
    pub(super) then_flush: bool,
    /// Commands that are with the server, or are to be sent again.
    pub(super) parts: u32,
    pub(super) result: Result<(), IoError>,
    /// Nobody wants it any more; it waits only for memory that the kernel still uses.
    pub(super) cancelled: bool,
}

impl Parent {
    pub(super) fn new(request: Request, then_flush: bool) -> Self {
        Self {
            request,
            todo: Todo::From(0),
            then_flush,
            parts: 0,
            result: Ok(()),
            cancelled: false,
        }
    }

    /// Nothing is to be sent, and nothing to be waited for.
    pub(super) fn is_over(&self) -> bool {
        self.todo == Todo::Nothing && self.parts == 0
    }

    /// The next command's length, from byte `done` on; `data`: it carries data, of which the server
    /// takes `maximum` at a time.
    pub(super) fn piece(&self, done: u64, data: bool, maximum: u32) -> u32 {
        let most = match data {
            // Both are multiples of the server's block, or the smaller one is.
            true => maximum.min(MOST_DATA),
            false => MOST_ZEROED,
        };
        let left = self.request.len.saturating_sub(done);
        u32::try_from(left).map_or(most, |left| left.min(most))
    }

    /// After a command of `len` bytes from byte `done` on.
    pub(super) fn issued(&mut self, done: u64, len: u32) {
        let done = done.saturating_add(len.into());
        let over = self.request.op == Op::Flush || done >= self.request.len;
        self.parts += 1;
        self.todo = match over {
            true => Todo::Nothing,
            false => Todo::From(done),
        };
    }

    /// A command has ended.
    pub(super) fn answered(&mut self, result: Result<(), IoError>) {
        self.parts = self.parts.saturating_sub(1);
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// It fails, when its last command has ended; none is sent any more.
    pub(super) fn fail(&mut self, error: IoError) {
        if self.result.is_ok() {
            self.result = Err(error);
        }
        // What follows changes nothing of that.
        (self.todo, self.then_flush) = (Todo::Nothing, false);
    }
}

/// Requests by their places.
#[derive(Debug, Default)]
pub(super) struct Parents {
    places: Vec<Option<Parent>>,
    free: Vec<usize>,
}

impl Parents {
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub(super) fn insert(&mut self, parent: Parent) -> usize {
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

    pub(super) fn get(&mut self, place: usize) -> Option<&mut Parent> {
        self.places.get_mut(place)?.as_mut()
    }

    pub(super) fn remove(&mut self, place: usize) -> Option<Parent> {
        let parent = self.places.get_mut(place)?.take()?;
        self.free.push(place);
        Some(parent)
    }

    /// The place of a request.
    pub(super) fn find(&self, tag: u64) -> Option<usize> {
        let is_it = |parent: &Option<Parent>| {
            parent
                .as_ref()
                .is_some_and(|parent| parent.request.tag == tag && !parent.cancelled)
        };
        self.places.iter().position(is_it)
    }

    /// The tags of all.
    pub(super) fn tags(&self) -> Vec<u64> {
        let parents = self.places.iter().flatten();
        parents.map(|parent| parent.request.tag).collect()
    }
}
