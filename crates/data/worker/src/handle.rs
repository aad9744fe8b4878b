//! A worker's handle for other threads: wake-up, jobs, load figures, names.

use crate::{Error, Frontend, Pulse, Stalls, WakeFlag, Worker};
use probes::Counter;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

/// Function to be run on a worker's thread, between two rounds.
type Job<F> = Box<dyn FnOnce(&mut Worker<F>) + Send>;

/// Time that a worker has spent busy, polling and asleep. Only the worker writes it; any thread
/// reads it.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Load {
    busy_ns: AtomicU64,
    polling_ns: AtomicU64,
    /// Total sleeping time in nanoseconds while the worker is awake. While it sleeps, with flag
    /// [`ASLEEP`]: the worker's age minus that total at the start of the sleep. A single number, so
    /// that a reader never sees half of an update.
    asleep: AtomicU64,
    wake_ups: Counter,
    began: OnceLock<Instant>,
}

/// Flag bit in `asleep`: the worker is asleep now.
const ASLEEP: u64 = 1 << 63;

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Load {
    /// Returns the time that the worker has spent with work since it began.
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.busy_ns.load(Ordering::Relaxed))
    }

    /// Returns the time that the worker has spent polling without finding work since it began.
    pub fn polling(&self) -> Duration {
        Duration::from_nanos(self.polling_ns.load(Ordering::Relaxed))
    }

    /// Returns the time that the worker has slept since it began, including a sleep that still
    /// lasts.
    pub fn asleep(&self) -> Duration {
        self.asleep_at(Instant::now())
    }

    fn asleep_at(&self, now: Instant) -> Duration {
        let asleep = self.asleep.load(Ordering::Relaxed);
        let total = match asleep & ASLEEP {
            0 => asleep,
            _ => self.age(now).saturating_sub(asleep ^ ASLEEP),
        };
        Duration::from_nanos(total)
    }

    /// Returns how many times the worker has woken up after a sleep.
    pub fn wake_ups(&self) -> u64 {
        self.wake_ups.get()
    }

    fn age(&self, now: Instant) -> u64 {
        let began = self.began.get();
        began.map_or(0, |began| {
            nanoseconds(now.saturating_duration_since(*began))
        })
    }

    pub(crate) fn begin(&self, now: Instant) {
        self.began.get_or_init(|| now);
    }

    pub(crate) fn fall_asleep(&self, now: Instant) {
        let asleep = nanoseconds(self.asleep_at(now));
        let reference = self.age(now).saturating_sub(asleep);
        self.asleep.store(ASLEEP | reference, Ordering::Relaxed);
    }

    pub(crate) fn wake_up(&self, now: Instant) {
        let asleep = nanoseconds(self.asleep_at(now));
        self.asleep.store(asleep & !ASLEEP, Ordering::Relaxed);
        self.wake_ups.add(1);
    }

    /// Adds a nap of an awake worker to its time asleep. It is no sleep that a wake-up ends.
    pub(crate) fn napped(&self, time: Duration) {
        let asleep = self.asleep.load(Ordering::Relaxed);
        if asleep & ASLEEP == 0 {
            let asleep = asleep.saturating_add(nanoseconds(time)) & !ASLEEP;
            self.asleep.store(asleep, Ordering::Relaxed);
        }
    }

    pub(crate) fn set_busy(&self, busy: Duration) {
        self.busy_ns.store(nanoseconds(busy), Ordering::Relaxed);
    }

    pub(crate) fn set_polling(&self, polling: Duration) {
        self.polling_ns
            .store(nanoseconds(polling), Ordering::Relaxed);
    }
}

/// Lets the flag serve as the standard library's waker.
impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.raise();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.raise();
    }
}

/// Handle of a worker for other threads: it wakes the worker, posts jobs to it, and reads its load.
/// It is created before the worker; clones refer to the same worker.
pub struct Handle<F: Frontend>(Arc<WorkerState<F>>);

struct WorkerState<F: Frontend> {
    flag: Arc<WakeFlag>,
    /// Eventfd that becomes readable when the flag is raised while the worker sleeps.
    wake: Arc<OwnedFd>,
    /// Jobs that other threads have posted; `None` after the worker has ended.
    jobs: Mutex<Option<VecDeque<Job<F>>>>,
    load: Load,
    pulse: Arc<Pulse>,
    stalls: Arc<Stalls>,
    /// Name of each front-end, with its number on the worker.
    names: Mutex<Vec<(u16, String)>>,
}

impl<F: Frontend> Clone for Handle<F> {
    fn clone(&self) -> Self {
        Handle(self.0.clone())
    }
}

impl<F: Frontend> std::fmt::Debug for Handle<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle")
            .field("load", &self.0.load)
            .finish_non_exhaustive()
    }
}

impl<F: Frontend + 'static> Handle<F> {
    /// Creates the handle of a worker that does not exist yet.
    ///
    /// # Errors
    /// [`Error::System`] when there is no descriptor left.
    pub fn new() -> Result<Self, Error<F::Error>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(eventfd(0, flags).map_err(Error::system("eventfd"))?);
        let signal = wake.clone();
        let flag = Arc::new(WakeFlag::new(move || {
            // The eventfd belongs to this process and is non-blocking. A full counter is signalled
            // already.
            let _ = rustix::io::write(&*signal, &1u64.to_ne_bytes());
        }));
        Ok(Handle(Arc::new(WorkerState {
            flag,
            wake,
            jobs: Mutex::new(Some(VecDeque::new())),
            load: Load::default(),
            pulse: Arc::default(),
            stalls: Arc::default(),
            names: Mutex::default(),
        })))
    }

    /// Posts a job to the worker's thread, for example one that adds a front-end ([`Worker::add`]).
    /// Jobs run in the order in which they were posted. Returns `false` and drops the job when the
    /// worker has ended; a channel end in the job reports that.
    pub fn post(&self, job: impl FnOnce(&mut Worker<F>) + Send + 'static) -> bool {
        let posted = match &mut *self.jobs() {
            Some(jobs) => {
                jobs.push_back(Box::new(job));
                true
            }
            None => false,
        };
        self.0.flag.raise();
        posted
    }

    /// Returns a waker that makes the worker look for messages.
    pub fn waker(&self) -> Waker {
        Waker::from(self.0.flag.clone())
    }

    /// Returns the worker's busy, polling and sleeping time.
    pub fn load(&self) -> &Load {
        &self.0.load
    }

    /// Returns the present activity of the worker, for a watchdog.
    pub fn pulse(&self) -> &Arc<Pulse> {
        &self.0.pulse
    }

    /// Returns the worker's stalls, as a [`Watchdog`](crate::Watchdog) has found them.
    pub fn stalls(&self) -> &Arc<Stalls> {
        &self.0.stalls
    }

    /// Sets the name of the front-end with this owner number, for logs and errors.
    pub fn set_name(&self, owner: u16, name: impl Into<String>) {
        let mut names = self.0.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.retain(|(known, _)| *known != owner);
        names.push((owner, name.into()));
    }

    /// Removes the name of the front-end with this number, which has ended.
    pub(crate) fn forget_name(&self, owner: u16) {
        let mut names = self.0.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.retain(|(known, _)| *known != owner);
    }

    /// Returns the names of all front-ends.
    pub fn names(&self) -> Vec<String> {
        let names = self.0.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().map(|(_, name)| name.clone()).collect()
    }

    /// Returns the name of the front-end with this number, if it has one.
    pub fn name(&self, owner: u16) -> Option<String> {
        let names = self.0.names.lock().unwrap_or_else(PoisonError::into_inner);
        let found = names.iter().find(|(known, _)| *known == owner);
        found.map(|(_, name)| name.clone())
    }

    pub(crate) fn flag(&self) -> &Arc<WakeFlag> {
        &self.0.flag
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }

    /// Empties the eventfd after it has woken the worker.
    pub(crate) fn woken(&self) {
        // An empty eventfd means that something else ended the sleep.
        let _ = rustix::io::read(&*self.0.wake, &mut [0; 8]);
    }

    pub(crate) fn next_job(&self) -> Option<Job<F>> {
        self.jobs().as_mut()?.pop_front()
    }
}

impl<F: Frontend> Handle<F> {
    /// Closes the job list, because the worker has ended or will never be created. Pending and
    /// future jobs are dropped.
    pub fn close(&self) {
        let left = self.jobs().take();
        // Dropped jobs may post, so the lock is released by now.
        drop(left);
    }

    /// Locks the list of jobs, which is consistent even if a thread panicked while it held the
    /// lock.
    fn jobs(&self) -> MutexGuard<'_, Option<VecDeque<Job<F>>>> {
        self.0.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_counts_during_and_after() {
        let (load, start) = (Load::default(), Instant::now());
        let at = |micros: u64| start + Duration::from_micros(micros);
        let asleep = |now| load.asleep_at(at(now)).as_micros();
        load.begin(start);
        assert_eq!(asleep(10), 0);
        load.fall_asleep(at(100));
        assert_eq!((asleep(100), asleep(150)), (0, 50));
        load.wake_up(at(180));
        assert_eq!((asleep(180), asleep(500), load.wake_ups()), (80, 80, 1));
        load.fall_asleep(at(600));
        assert_eq!((asleep(600), asleep(640)), (80, 120));
        load.wake_up(at(650));
        assert_eq!((asleep(700), load.wake_ups()), (130, 2));
        load.napped(Duration::from_micros(70));
        assert_eq!((asleep(800), load.wake_ups()), (200, 2));
    }
}
