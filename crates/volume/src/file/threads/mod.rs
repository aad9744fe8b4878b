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
use work::{Work, WorkFile};

/// Most threads for one file, for all workers together.
const MOST_THREADS: usize = 32;
/// A thread that had nothing to do for so long ends, when it is not the last that is idle.
const IDLE_LIMIT: Duration = Duration::from_secs(10);

/// Bytes of stack that a thread has: it makes system calls, and little else.
const STACK: usize = 256 << 10;

/// The threads of one file. When this is dropped they end, each when its last call returns. The
/// file is closed by a thread that may hang.
pub(super) struct FileThreads(Arc<Shared>);

impl std::fmt::Debug for FileThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FileThreads").field(&self.0.state).finish()
    }
}

/// Does a piece of work, and may hang in it; its drop may, too.
type CarryOut = Box<dyn Fn(&mut Work) -> Result<(), IoError> + Send + Sync>;

struct Shared {
    /// There until the end.
    carry_out: Option<CarryOut>,
    state: Mutex<State>,
    /// Work is due, or the end has come.
    due: Condvar,
}

#[derive(Debug, Default)]
struct State {
    due: VecDeque<Job>,
    running: Vec<Running>,
    threads: usize,
    /// Threads among these that wait for work.
    idle: usize,
    last_id: u64,
    ending: bool,
}

/// Work that has been finished.
#[derive(Debug)]
struct Done {
    id: u64,
    work: Work,
    result: Result<(), IoError>,
}

/// Work that no thread has taken yet.
#[derive(Debug)]
struct Job {
    id: u64,
    work: Work,
    inbox: Arc<Inbox<Done>>,
}

/// Work that a thread is at.
#[derive(Debug)]
struct Running {
    id: u64,
    changes: bool,
    given_up: bool,
}

impl State {
    /// Returns the next job that a thread may begin now.
    fn next(&mut self) -> Option<Job> {
        let changes = |running: &Running| running.given_up && running.changes;
        if self.running.iter().any(changes) {
            return None;
        }
        self.due.pop_front()
    }

    /// Returns whether all threads are busy and another one may be started.
    fn wants_thread(&self) -> bool {
        self.idle == 0 && self.threads < MOST_THREADS
    }
}

impl FileThreads {
    /// For an open file, which is accessed in multiples of `unit` bytes. No thread yet:
    /// [`FileThreads::begin`].
    pub(super) fn new(fd: Arc<FileDescription>, abilities: Arc<Abilities>, unit: u64) -> Self {
        let file = WorkFile {
            fd,
            abilities,
            unit,
        };
        Self::with(Box::new(move |work| work.carry_out(&file)))
    }

    fn with(carry_out: CarryOut) -> Self {
        Self(Arc::new(Shared {
            carry_out: Some(carry_out),
            state: Mutex::default(),
            due: Condvar::new(),
        }))
    }

    /// There is a thread from now on; more come when they are needed.
    ///
    /// # Errors
    /// No thread can be had.
    fn begin(&self) -> std::io::Result<()> {
        let state = self.0.lock();
        match state.threads {
            0 => self.0.clone().spawn(state),
            _ => Ok(()),
        }
    }

    /// Queues work for a thread. Returns its number, under which `inbox` gets the result.
    fn start(&self, work: Work, inbox: &Arc<Inbox<Done>>) -> u64 {
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

    /// Gives up the work: its request no longer waits.
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

/// The last to have it may be a worker.
impl Drop for Shared {
    fn drop(&mut self) {
        sync::discard(self.carry_out.take());
    }
}

impl Shared {
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

    /// A thread's life.
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
            state.running.push(Running {
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
            inbox.put(Done { id, work, result });
        }
    }
}
