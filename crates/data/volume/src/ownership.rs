//! Ownership of the volume: the lock of its file, which a disk hands to another process when its
//! guest migrates.
//!
//! ```text
//!          guest is started            lock is free
//!   Free ------------------> Taking -----------------> Held
//!    ^                                                  |  guest is stopped for a migration
//!    +------- Releasing <------- Flushing <-------------+
//! ```
//!
//! The destination of a migration begins in `Free`, the source in `Held`; after the migration their
//! roles are exchanged. The disk's queues run in `Held` only. Another process may take long to
//! release the lock, and a network file system to answer: both are waited for on a thread of their
//! own.

use crate::{FileLock, Volume};
use probes::LogLimit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::task::Waker;
use std::time::{Duration, Instant};

/// Pause between two attempts to take the lock.
const TAKE_INTERVAL: Duration = Duration::from_millis(10);
/// Interval between two log lines about a lock that is not released.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum time for which the front-end's request waits for the release of the lock.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

/// Call of the lock that runs on another thread.
struct Task {
    result: Receiver<Result<(), String>>,
    is_cancelled: Arc<AtomicBool>,
}

impl Task {
    /// Starts a thread, which calls `waker` at its end.
    fn start(
        waker: &Waker,
        work: impl FnOnce(&AtomicBool) -> Result<(), String> + Send + 'static,
    ) -> Result<Task, String> {
        let (tell, result) = channel();
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let (cancelled, waker) = (is_cancelled.clone(), waker.clone());
        let thread = std::thread::Builder::new().name("lock".into());
        let started = thread.spawn(move || {
            // The worker may have ended meanwhile.
            let _ = tell.send(work(&cancelled));
            waker.wake();
        });
        match started {
            Ok(_) => Ok(Task {
                result,
                is_cancelled,
            }),
            Err(error) => Err(format!("no thread can be started: {error}")),
        }
    }

    /// Returns the result, once the thread has one.
    fn result(&self) -> Option<Result<(), String>> {
        match self.result.try_recv() {
            Ok(result) => Some(result),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err("the thread has panicked".into())),
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }
}

enum State {
    Held,
    Free,
    Taking(Task),
    Flushing,
    Releasing(Task),
}

/// Result of [`Ownership::advance`] that the caller acts on.
#[derive(Debug, PartialEq, Eq)]
pub enum Change {
    /// The lock was taken: queues may run.
    Taken,
    /// The lock could not be taken, for this reason.
    Refused(String),
    /// The lock was released.
    Released,
}

/// Lock of a disk's volume, and its state.
pub struct Ownership {
    /// `None`: the disk has no lock that could be handed over, and keeps its volume.
    lock: Option<Arc<FileLock>>,
    volume: Arc<dyn Volume>,
    /// Maximum time for which a started disk waits until another process has released the lock.
    take_timeout: Duration,
    /// Whether the disk releases the lock when it has no front-end. A disk that has handed its
    /// volume over does so from then on.
    is_incoming: bool,
    state: State,
    /// Whether a started queue needs the lock.
    is_wanted: bool,
    /// Whether the last attempt to release the lock has failed; it is not repeated.
    has_failed: bool,
    /// Begin of the last attempt to release the lock.
    began: Instant,
    waker: Waker,
    /// Shown to other threads: another process may write the volume.
    shown: Arc<AtomicBool>,
    log: LogLimit,
}

impl Ownership {
    /// Creates the ownership of a volume, which is open with or without its lock. `waker` wakes the
    /// thread that calls [`Ownership::advance`]. While the disk does not have the lock, `shown` is
    /// true.
    pub fn new(
        volume: Arc<dyn Volume>,
        take_timeout: Duration,
        waker: Waker,
        shown: Arc<AtomicBool>,
    ) -> Ownership {
        let lock = volume.file_lock();
        let is_free = lock.as_ref().is_some_and(|lock| !lock.is_held());
        shown.store(is_free, Ordering::Relaxed);
        Ownership {
            lock,
            volume,
            take_timeout,
            is_incoming: is_free,
            state: if is_free { State::Free } else { State::Held },
            is_wanted: false,
            has_failed: false,
            began: Instant::now(),
            waker,
            shown,
            log: LogLimit::new(1, LOG_INTERVAL),
        }
    }

    /// Makes the disk one that releases the lock when it has no front-end, although it was opened
    /// with the lock.
    pub fn set_incoming(&mut self) {
        self.is_incoming = true;
    }

    /// Returns whether there is a lock that another process may get.
    pub fn has_lock(&self) -> bool {
        self.lock.is_some()
    }

    /// Returns the volume.
    pub fn volume(&self) -> &Arc<dyn Volume> {
        &self.volume
    }

    /// Returns whether the flush before the release is awaited, see [`Ownership::release`].
    pub fn is_flushing(&self) -> bool {
        matches!(self.state, State::Flushing)
    }

    /// Returns whether the disk may write its volume.
    pub fn is_held(&self) -> bool {
        matches!(self.state, State::Held)
    }

    /// Returns whether the disk gives the lock away now, because no front-end uses it.
    pub fn is_idle(&self) -> bool {
        self.is_incoming && self.is_held()
    }

    /// Returns whether the disk has the lock and keeps it, also without a front-end.
    pub fn is_kept(&self) -> bool {
        self.is_held() && !(self.is_incoming && self.has_lock())
    }

    /// Requests the lock for a started queue. Returns whether the disk has it; otherwise
    /// [`Ownership::advance`] reports the result.
    pub fn take(&mut self) -> bool {
        self.is_wanted = true;
        self.has_failed = false;
        match self.state {
            State::Held => true,
            // The lock has not been released yet.
            State::Flushing => {
                self.state = State::Held;
                true
            }
            State::Free => {
                self.begin_to_take();
                false
            }
            State::Taking(_) | State::Releasing(_) => false,
        }
    }

    fn begin_to_take(&mut self) {
        let Some(lock) = self.lock.clone() else {
            self.state = State::Held;
            return;
        };
        let (volume, timeout) = (self.volume.clone(), self.take_timeout);
        self.start(State::Taking, move |is_cancelled| {
            let begin = Instant::now();
            while !lock.try_lock().map_err(|error| error.to_string())? {
                if is_cancelled.load(Ordering::Relaxed) {
                    return Err("the disk was removed".into());
                }
                if begin.elapsed() >= timeout {
                    return Err(lock.refusal().to_string());
                }
                std::thread::sleep(TAKE_INTERVAL);
            }
            if is_cancelled.load(Ordering::Relaxed) {
                return lock.unlock().map_err(|error| error.to_string());
            }
            // The other process may have resized it. Requests beyond a wrong end are refused.
            let _ = volume.refresh();
            Ok(())
        });
    }

    fn start(
        &mut self,
        state: fn(Task) -> State,
        work: impl FnOnce(&AtomicBool) -> Result<(), String> + Send + 'static,
    ) {
        let failed = |why| {
            let (tell, result) = channel();
            let _ = tell.send(Err(why));
            self.waker.wake_by_ref();
            let is_cancelled = Arc::default();
            Task {
                result,
                is_cancelled,
            }
        };
        let task = Task::start(&self.waker, work).unwrap_or_else(failed);
        self.state = state(task);
    }

    /// Ends the use of the volume by the front-end. Returns whether the flush before the release is
    /// to be started, whose result goes to [`Ownership::flushed`].
    pub fn release(&mut self) -> bool {
        self.is_wanted = false;
        if self.lock.is_none() || self.has_failed || !self.is_held() {
            return false;
        }
        self.began = Instant::now();
        self.state = State::Flushing;
        true
    }

    /// Returns whether a request of the front-end waits for the release. It does not wait for long:
    /// the destination waits for the lock, too.
    pub fn is_releasing(&self, now: Instant) -> bool {
        self.deadline().is_some_and(|at| now < at)
    }

    /// Returns the time at which a request that waits for the release is answered anyway.
    pub fn deadline(&self) -> Option<Instant> {
        matches!(self.state, State::Flushing | State::Releasing(_))
            .then(|| self.began + RELEASE_TIMEOUT)
    }

    /// Continues after the flush: releases the lock, unless the data are not durable.
    pub fn flushed(&mut self, result: Result<(), String>) {
        if !matches!(self.state, State::Flushing) {
            return;
        }
        match (result, self.lock.clone()) {
            (Ok(()), Some(lock)) => self.start(State::Releasing, move |_| {
                lock.unlock().map_err(|error| error.to_string())
            }),
            (Ok(()), None) => self.state = State::Held,
            (Err(why), _) => {
                self.state = State::Held;
                self.has_failed = true;
                self.say_kept(&why);
            }
        }
    }

    fn say_kept(&self, why: &str) {
        self.log.line(|left_out| {
            tracing::error!(
                why,
                left_out,
                "the volume is not handed over, and the destination of the migration will not get it"
            );
        });
    }

    /// Returns whether a thread works on the lock.
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, State::Taking(_) | State::Releasing(_))
    }

    /// Continues when the thread has a result.
    pub fn advance(&mut self) -> Option<Change> {
        let change = match &self.state {
            State::Taking(task) => match task.result()? {
                Ok(()) => {
                    self.state = State::Held;
                    Change::Taken
                }
                Err(why) => {
                    self.state = State::Free;
                    Change::Refused(why)
                }
            },
            State::Releasing(task) => {
                if let Err(why) = task.result()? {
                    self.say_kept(&why);
                }
                self.state = State::Free;
                // The former source waits for its guest as a destination does.
                self.is_incoming = true;
                if self.is_wanted {
                    self.begin_to_take();
                }
                Change::Released
            }
            State::Held | State::Free | State::Flushing => return None,
        };
        self.shown.store(!self.is_held(), Ordering::Relaxed);
        Some(change)
    }
}
