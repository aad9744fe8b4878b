//! Threads for a file that may hang.
//!
//! A file on FUSE or a network file system depends on another process or machine for its answers,
//! and no call on it can be ended from here: not by a cancellation of io_uring, and mostly not by
//! SIGKILL either. No worker therefore makes calls on such a file. It has threads of its own, which
//! make plain system calls and may hang in any of them. The workers' rings, and the kernel's
//! threads behind these, never see it. The threads have no guest memory either: data is copied, so
//! that a request can be given up while its system call still hangs (its client was reset or has
//! disconnected, or the process ends).
//!
//! A change that was given up may still happen, whenever the file answers. All later requests
//! therefore wait until it has: a guest that was reset must not find its old write on top of its
//! new one.

mod queue;
#[cfg(test)]
mod tests;
mod work;

pub(super) use queue::ThreadsQueue;
pub(super) use work::read;

use crate::file::FileDescription;
use crate::io::job::Abilities;
use crate::{Inbox, IoError, IoErrorKind, Op};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use sync::Unpoisoned;
use work::{ThreadWork, WorkFile};

/// Maximum number of threads that access one file, shared by all workers.
const MAX_THREADS: usize = 32;
/// Idle time after which a file's thread ends, unless it is the last idle one.
const IDLE_LIMIT: Duration = Duration::from_secs(10);

/// Stack size in bytes of a thread that accesses a file. The thread only makes system calls.
const STACK: usize = 256 << 10;

/// Threads of one file. After this is dropped, each thread ends when its last call returns. The
/// file is closed by a thread, because closing may hang.
pub(super) struct FileThreads(Arc<ThreadsState>);

impl std::fmt::Debug for FileThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FileThreads").field(&self.0.state).finish()
    }
}

/// Function that executes a piece of work. Both the call and its drop may hang.
type CarryOut = Box<dyn Fn(&mut ThreadWork) -> Result<(), IoError> + Send + Sync>;

struct ThreadsState {
    /// Function by which threads execute work on the file; removed when they have to end.
    carry_out: Option<CarryOut>,
    state: Mutex<State>,
    /// Signalled when work is queued, or when the threads have to end.
    due: Condvar,
}

#[derive(Debug, Default)]
struct State {
    due: VecDeque<Job>,
    running: Vec<RunningWork>,
    threads: usize,
    /// Number of the file's threads that wait for work.
    idle: usize,
    last_id: u64,
    ending: bool,
}

/// Result of work that a thread has finished.
#[derive(Debug)]
struct FinishedWork {
    id: u64,
    work: ThreadWork,
    result: Result<(), IoError>,
}

/// Work in the queue that no thread has started.
#[derive(Debug)]
struct Job {
    id: u64,
    work: ThreadWork,
    inbox: Arc<Inbox<FinishedWork>>,
}

/// Work that a thread is executing now.
#[derive(Debug)]
struct RunningWork {
    id: u64,
    changes: bool,
    given_up: bool,
}

impl State {
    /// Returns the next queued work that a thread may start now, if any.
    fn next(&mut self) -> Option<Job> {
        let changes = |running: &RunningWork| running.given_up && running.changes;
        if self.running.iter().any(changes) {
            return None;
        }
        self.due.pop_front()
    }

    /// Returns whether all threads are busy and another one may be started.
    fn wants_thread(&self) -> bool {
        self.idle == 0 && self.threads < MAX_THREADS
    }
}

impl FileThreads {
    /// Creates the threads' state for an open file that is accessed in multiples of `unit` bytes.
    /// [`FileThreads::begin`] starts the first thread.
    pub(super) fn new(fd: Arc<FileDescription>, abilities: Arc<Abilities>, unit: u64) -> Self {
        let file = WorkFile {
            fd,
            abilities,
            unit,
        };
        Self::with(Box::new(move |work| work.carry_out(&file)))
    }

    fn with(carry_out: CarryOut) -> Self {
        Self(Arc::new(ThreadsState {
            carry_out: Some(carry_out),
            state: Mutex::default(),
            due: Condvar::new(),
        }))
    }

    /// Starts the first thread, if none is running; more are started on demand.
    ///
    /// # Errors
    /// The system's error when a thread cannot be created.
    fn begin(&self) -> std::io::Result<()> {
        let state = self.0.lock();
        match state.threads {
            0 => self.0.clone().spawn(state),
            _ => Ok(()),
        }
    }

    /// Queues work for the threads. Returns its ID, with which the result is put into `inbox`.
    fn start(&self, work: ThreadWork, inbox: &Arc<Inbox<FinishedWork>>) -> u64 {
        let mut state = self.0.lock();
        state.last_id += 1;
        let id = state.last_id;
        state.due.push_back(Job {
            id,
            work,
            inbox: inbox.clone(),
        });
        if state.wants_thread() && state.running.len() == state.threads {
            // The thread that was to be the next one could not be had.
            let _ = self.0.clone().spawn(state);
        } else {
            drop(state);
            self.0.due.notify_one();
        }
        id
    }

    /// Abandons the work with this ID: its result is dropped when the system call ends.
    fn give_up(&self, id: u64) {
        let mut state = self.0.lock();
        state.due.retain(|job| job.id != id);
        if let Some(running) = state.running.iter_mut().find(|running| running.id == id) {
            running.given_up = true;
        }
    }
}

impl Drop for FileThreads {
    fn drop(&mut self) {
        self.0.lock().ending = true;
        self.0.due.notify_all();
    }
}

/// Drops the threads' function, and the file with it, on another thread: the last owner may be a
/// worker, and closing the file may hang.
impl Drop for ThreadsState {
    fn drop(&mut self) {
        sync::discard(self.carry_out.take());
    }
}

impl ThreadsState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unpoisoned()
    }

    fn spawn(self: Arc<Self>, mut state: MutexGuard<'_, State>) -> std::io::Result<()> {
        state.threads += 1;
        drop(state);
        let mine = self.clone();
        let builder = std::thread::Builder::new()
            .name("file".into())
            .stack_size(STACK);
        // Never joined: it may hang.
        let spawned = builder.spawn(move || mine.run());
        if let Err(error) = &spawned {
            self.lock().threads -= 1;
            tracing::debug!(%error, "no further thread for a file");
        }
        spawned.map(drop)
    }

    /// Runs the main loop of a file's thread: takes queued work and executes it.
    fn run(self: Arc<Self>) {
        sync::leave_cpu();
        let mut state = self.lock();
        while !state.ending {
            let Some(job) = state.next() else {
                state.idle += 1;
                let (woken, waited) = self.due.wait_timeout(state, IDLE_LIMIT).unpoisoned();
                state = woken;
                state.idle -= 1;
                if waited.timed_out() && state.idle > 0 {
                    break;
                }
                continue;
            };
            state.running.push(RunningWork {
                id: job.id,
                changes: !matches!(job.work.op, Op::Read | Op::Flush),
                given_up: false,
            });
            // Before this one hangs.
            if state.wants_thread() {
                let _ = self.clone().spawn(state);
            } else {
                drop(state);
            }
            self.carry_out(job);
            state = self.lock();
        }
        state.threads -= 1;
    }

    fn carry_out(&self, job: Job) {
        let Job {
            id,
            mut work,
            inbox,
        } = job;
        let result = match &self.carry_out {
            Some(carry_out) => carry_out(&mut work),
            None => Err(IoErrorKind::Aborted.into()),
        };
        let mut state = self.lock();
        let at = state.running.iter().position(|running| running.id == id);
        let given_up = at.is_some_and(|at| state.running.swap_remove(at).given_up);
        drop(state);
        if given_up {
            // Jobs that waited for the end of this one may begin.
            self.due.notify_all();
        } else {
            inbox.put(FinishedWork { id, work, result });
        }
    }
}
