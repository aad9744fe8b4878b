//! Ends of what other threads do for a controller, which wake its worker.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::task::Waker;
use sync::Unpoisoned;

/// Ends by the numbers of what was asked for.
pub(super) struct Answers<T> {
    answers: Mutex<VecDeque<(u64, T)>>,
    /// Wakes the controller's worker, once that is known.
    waker: Mutex<Option<Waker>>,
}

impl<T> Default for Answers<T> {
    fn default() -> Self {
        Self {
            answers: Mutex::default(),
            waker: Mutex::default(),
        }
    }
}

impl<T> Answers<T> {
    /// The worker is woken by this from now on.
    pub fn set_waker(&self, waker: Waker) {
        *self.waker.lock().unpoisoned() = Some(waker);
    }

    pub fn leave(&self, number: u64, result: T) {
        self.answers.lock().unpoisoned().push_back((number, result));
        self.wake();
    }

    pub fn wake(&self) {
        if let Some(waker) = &*self.waker.lock().unpoisoned() {
            waker.wake_by_ref();
        }
    }

    /// The end of what has this number; those before are forgotten.
    pub fn take(&self, number: u64) -> Option<T> {
        let mut answers = self.answers.lock().unpoisoned();
        while let Some((answered, result)) = answers.pop_front() {
            if answered == number {
                return Some(result);
            }
        }
        None
    }
}
