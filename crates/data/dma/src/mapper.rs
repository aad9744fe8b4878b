//! Thread that maps clients' memory files for threads that must not wait.
//!
//! mmap(2) and munmap(2) of a file wait for the lock of the file's mappings (`i_mmap_rwsem` in
//! Linux). Other processes can hold that lock for seconds: a file that is mapped some hundred
//! thousand times is punched under it. The lock of the process's own mappings (`mmap_lock`) is
//! held meanwhile, so a second file cannot be mapped by another thread either. One thread
//! therefore maps all files, one after the other. Each client has at most one file waiting here,
//! so clients take turns, and the time that a client's files wait in the kernel is limited by its
//! [`Pace`].
//!
//! Other threads go on meanwhile: page faults take a lock of their own mapping (Linux 6.4).
//! docs/hostile-clients.md lists the operations that still wait for `mmap_lock`.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::Waker;
use std::time::Instant;

use rustix::io::Errno;
use sync::Unpoisoned;

use crate::backing::Backing;
use crate::memory::system;
use crate::pace::Standstill;
use crate::quota::Account;
use crate::{MapError, Memory};

/// Stack size of the thread in bytes.
const STACK: usize = 256 << 10;

static QUEUE: Mutex<Queue> = Mutex::new(Queue {
    jobs: VecDeque::new(),
    is_mapping: false,
    runs: false,
});
/// Signalled when a job was queued.
static NEWS: Condvar = Condvar::new();

struct Queue {
    jobs: VecDeque<Job>,
    /// Whether the thread maps a file now.
    is_mapping: bool,
    /// Whether the thread was started. It never ends.
    runs: bool,
}

/// A file to be mapped.
struct Job {
    fd: OwnedFd,
    backing: Backing,
    writable: bool,
    account: Arc<Account>,
    outcome: Arc<Outcome>,
    waker: Waker,
}

/// Result of a job, for the thread that waits for it.
#[derive(Debug, Default)]
struct Outcome {
    done: AtomicBool,
    result: Mutex<Option<Result<Memory, MapError>>>,
}

/// Mapping of a file by the mapping thread. Dropping this value cancels it.
#[derive(Debug)]
pub(crate) struct Mapped(Arc<Outcome>);

impl Mapped {
    /// Queues a file that has passed the checks for memory files. `waker` is called when it was
    /// mapped, or could not be.
    pub(crate) fn begin(
        fd: OwnedFd,
        backing: Backing,
        writable: bool,
        account: &Arc<Account>,
        waker: &Waker,
    ) -> Result<Mapped, MapError> {
        let outcome = Arc::new(Outcome::default());
        let job = Job {
            fd,
            backing,
            writable,
            account: account.clone(),
            outcome: outcome.clone(),
            waker: waker.clone(),
        };
        let mut queue = QUEUE.lock().unpoisoned();
        if !queue.runs {
            if let Err(errno) = start() {
                drop(queue);
                sync::discard(job.fd);
                return Err(system("clone")(errno));
            }
            queue.runs = true;
        }
        queue.jobs.push_back(job);
        NEWS.notify_one();
        Ok(Mapped(outcome))
    }

    /// Returns whether there is a result.
    pub(crate) fn is_done(&self) -> bool {
        self.0.done.load(Ordering::Acquire)
    }

    /// Returns the result, once.
    pub(crate) fn take(&self) -> Option<Result<Memory, MapError>> {
        self.0.result.lock().unpoisoned().take()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if self.is_done() {
            return;
        }
        let mut queue = QUEUE.lock().unpoisoned();
        let is_own = |job: &Job| Arc::ptr_eq(&job.outcome, &self.0);
        let at = queue.jobs.iter().position(is_own);
        let job = at.and_then(|at| queue.jobs.remove(at));
        drop(queue);
        // A file that is being mapped is unmapped with the outcome's last owner.
        if let Some(job) = job {
            sync::discard(job.fd);
        }
    }
}

/// Waits until no memory file is being mapped; returns whether any was. For tests that drive a
/// front-end on one thread.
pub fn wait_for_mappings() -> bool {
    let is_busy = || {
        let queue = QUEUE.lock().unpoisoned();
        queue.is_mapping || !queue.jobs.is_empty()
    };
    let was_busy = is_busy();
    while is_busy() {
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
    was_busy
}

fn start() -> Result<(), Errno> {
    let thread = std::thread::Builder::new().name("map-memory".to_owned());
    let spawned = thread.stack_size(STACK).spawn(|| {
        sync::leave_cpu();
        loop {
            next().run();
            QUEUE.lock().unpoisoned().is_mapping = false;
        }
    });
    let errno = |error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN);
    spawned.map(drop).map_err(errno)
}

/// Waits for the next job of a client that has not spent its budget.
fn next() -> Job {
    let mut queue = QUEUE.lock().unpoisoned();
    loop {
        let now = Instant::now();
        let delays = queue.jobs.iter().map(|job| job.account.pace().delay(now));
        let soonest = delays.enumerate().min_by_key(|(_, delay)| *delay);
        queue = match soonest {
            None => NEWS.wait(queue).unpoisoned(),
            Some((at, delay)) if delay.is_zero() => match queue.jobs.remove(at) {
                Some(job) => {
                    queue.is_mapping = true;
                    return job;
                }
                None => queue,
            },
            Some((_, delay)) => NEWS.wait_timeout(queue, delay).unpoisoned().0,
        };
    }
}

impl Job {
    fn run(self) {
        let standstill = Standstill::begin();
        let account = Some(&self.account);
        let result = Memory::map_file(self.fd, self.backing, self.writable, account);
        standstill.charge(self.account.pace());
        *self.outcome.result.lock().unpoisoned() = Some(result);
        self.outcome.done.store(true, Ordering::Release);
        self.waker.wake();
    }
}
