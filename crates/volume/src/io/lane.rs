//! Requests that a volume makes for itself, on its worker's ring.
//!
//! The completions of a ring's requests are returned to the ring's poller, which knows them by
//! their tags. Some volumes read and write for purposes of their own (an image's tables, one
//! guest's request in several parts). Such a volume opens the volume below by a [`Lane`]: its
//! completions wait there, and its tags are its own.

use super::Io;
use crate::{Completion, VolumeError};
use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

/// Queue of a lane's completions for their owner.
#[derive(Debug, Default)]
pub(crate) struct LaneEnd(RefCell<VecDeque<Completion>>);

impl LaneEnd {
    pub(super) fn put(&self, completion: Completion) {
        self.0.borrow_mut().push_back(completion);
    }
}

/// A worker's ring, for requests that complete to the lane's owner.
///
/// Requests of volumes that are opened on [`Lane::io`] count among the requests in flight of the
/// worker's ring, and are sent with all others. Only their completions are returned by
/// [`Lane::poll`], after the worker has polled its ring. An owner that waits for some reports so by
/// its [`QueueState`](crate::QueueState) as long as [`Lane::has_news`].
#[derive(Debug)]
pub struct Lane {
    io: Io,
    end: Rc<LaneEnd>,
}

impl Io {
    /// A lane of this worker's ring.
    ///
    /// # Errors
    /// [`VolumeError::NoIoUring`].
    pub fn lane(&self) -> Result<Lane, VolumeError> {
        let end = Rc::<LaneEnd>::default();
        let io = Io {
            options: self.options,
            ring: OnceCell::from(self.ring()?),
            shared: RefCell::default(),
            others: self.others.clone(),
            ending: self.ending.clone(),
            given_up: self.given_up.clone(),
            stats: self.stats.clone(),
            sleep_hints: self.sleep_hints.clone(),
            lane: Some(end.clone()),
        };
        Ok(Lane { io, end })
    }
}

impl Lane {
    /// Returns the `Io` on which volumes are opened. It has no other use: the worker itself polls
    /// and flushes.
    pub fn io(&self) -> &Io {
        &self.io
    }

    /// Calls `done` with each completion that has come, and returns their number. `done` may start
    /// new requests.
    pub fn poll(&self, done: &mut dyn FnMut(Completion)) -> usize {
        let mut count = 0;
        // Completions that arrive meanwhile are left for the next call.
        let all = self.end.0.borrow().len();
        while count < all {
            let Some(completion) = self.end.0.borrow_mut().pop_front() else {
                break;
            };
            count += 1;
            done(completion);
        }
        count
    }

    /// Returns whether [`Lane::poll`] would find something.
    #[inline]
    pub fn has_news(&self) -> bool {
        !self.end.0.borrow().is_empty()
    }
}
