//! Locks that stay usable after a panic, drops that may block, and descriptors asked without
//! waiting.
//!
//! A thread that panics while it holds a lock of the standard library poisons it, and every later
//! `lock` is an error. In this workspace the data under locks (registries, lists of descriptors,
//! states) is changed by single steps that keep it consistent. One client's fault must not end the
//! service of the remaining ones, so [`Unpoisoned`] ignores the error in one place.
//!
//! Values that may block when they are dropped, above all descriptors of a client, are dropped by
//! threads that nothing waits for: [`discard()`]. Whether a descriptor is ready, or its peer has
//! closed it, is asked by [`readiness()`], which no signal disturbs.
#![forbid(unsafe_code)]

mod affinity;
mod discard;
mod readiness;

use std::sync::{LockResult, PoisonError};

pub use affinity::leave_cpu;
pub use discard::discard;
pub use readiness::readiness;

/// Access to the value of a lock, even after a thread has panicked while holding it.
pub trait Unpoisoned {
    /// Guard, reference or value that the lock returns.
    type Value;

    /// Returns the value, whether the lock is poisoned or not.
    ///
    /// ```
    /// use std::sync::Mutex;
    /// use sync::Unpoisoned;
    ///
    /// let count = Mutex::new(1);
    /// *count.lock().unpoisoned() += 1;
    /// assert_eq!(count.into_inner().unpoisoned(), 2);
    /// ```
    fn unpoisoned(self) -> Self::Value;
}

impl<T> Unpoisoned for LockResult<T> {
    type Value = T;

    fn unpoisoned(self) -> T {
        self.unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Condvar, Mutex};
    use std::time::Duration;

    #[test]
    fn mutex_is_usable_after_panic() {
        let (mut mutex, condvar) = (Mutex::new(1), Condvar::new());
        let panicked = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let _guard = mutex.lock().unpoisoned();
                panic!("under the lock");
            });
            thread.join().is_err()
        });
        assert!(panicked && mutex.is_poisoned());
        let guard = mutex.lock().unpoisoned();
        let (mut guard, _) = condvar.wait_timeout(guard, Duration::ZERO).unpoisoned();
        *guard += 1;
        drop(guard);
        *mutex.get_mut().unpoisoned() += 1;
        assert_eq!(mutex.into_inner().unpoisoned(), 3);
    }
}
