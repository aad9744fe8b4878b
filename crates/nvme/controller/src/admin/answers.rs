//! Results of work that other threads do for a controller. Each result wakes the controller's
//! worker.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::task::Waker;
use sync::Unpoisoned;

/// Results of requests that other threads execute for a controller, each with its request number.
pub(super) struct Answers<T> {
    answers: Mutex<VecDeque<(u64, T)>>,
    /// Waker that wakes the controller's worker when a result arrives; `None` until it is set.
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
    /// Sets the waker by which results wake the controller's worker.
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

    /// Removes and returns the result of the request with this number. Results of earlier requests
    /// are dropped.
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
