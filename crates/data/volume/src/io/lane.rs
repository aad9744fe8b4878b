//! Requests that a volume makes for its own purposes on its worker's ring.
//!
//! Completions normally go to the ring's poller, which knows the requests by their tags. Some
//! volumes also read and write by themselves: the tables of an image, or one guest request in
//! several parts. Such a volume opens the volume below with a [`Lane`], which collects these
//! completions separately and has its own tags.

use super::Io;
use crate::{Completion, VolumeError};
use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

/// Completions of a lane, a separate path for the requests of one queue, until its owner takes
/// them.
#[derive(Debug, Default)]
pub(crate) struct LaneEnd(RefCell<VecDeque<Completion>>);

impl LaneEnd {
    pub(super) fn put(&self, completion: Completion) {
        self.0.borrow_mut().push_back(completion);
    }
}

/// A view of a worker's ring that returns the completions of its requests to the lane's owner.
///
/// Requests of volumes that are opened on [`Lane::io`] count among the outstanding requests of the
/// worker's ring and are submitted with all others. Only their completions are separate:
/// [`Lane::poll`] returns them after the worker has polled its ring. While [`Lane::has_news`], an
/// owner that waits for completions reports in its [`QueueState`](crate::QueueState) that it needs
/// a poll.
#[derive(Debug)]
pub struct Lane {
    io: Io,
    end: Rc<LaneEnd>,
}

impl Io {
    /// Creates a lane on this worker's ring.
    ///
    /// # Errors
    /// [`VolumeError::NoIoUring`] when the kernel refuses to create a ring.
    pub fn lane(&self) -> Result<Lane, VolumeError> {
        let end = Rc::<LaneEnd>::default();
        let io = Io {
            options: self.options,
            ring: OnceCell::from(self.ring()?),
            shared: Rc::default(),
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
    /// Returns the `Io` for opening volumes on the lane. Only for that purpose: the worker itself
    /// polls and flushes.
    pub fn io(&self) -> &Io {
        &self.io
    }

    /// Calls `done` with each completion that has arrived, and returns their number. `done` may
    /// start new requests.
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

    /// Returns whether [`Lane::poll`] would return completions.
    #[inline]
    pub fn has_news(&self) -> bool {
        !self.end.0.borrow().is_empty()
    }
}
