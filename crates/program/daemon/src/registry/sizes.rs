//! Detection of volumes that are resized while they are served. Volumes are queried periodically,
//! which may block for tens of seconds if a device does not answer. A changed size wakes the thread
//! that serves the volume: a worker, or the thread of the block devices. Those threads never query
//! a volume themselves.
//!
//! One thread keeps the time ([`Sizes::run`]). Once in an interval it wakes an asker, a thread that
//! queries the volumes which are due, one after the other. A volume that hangs blocks its asker; in
//! the next interval another asker continues with the rest. There are [`MAX_THREADS`] at most, and
//! one while none hangs.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;
use sync::Unpoisoned;
use volume::{Kind, Volume};

/// Interval at which volumes are asked for their sizes.
const INTERVAL: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};
/// Maximum number of threads that wait for volumes. While all of them hang, no volume's size is
/// queried.
const MAX_THREADS: usize = 8;
/// Time that the end waits for askers, so that their volumes are closed in order.
const END_LIMIT: Duration = Duration::from_secs(1);

struct WatchedVolume {
    /// Volume to ask, as a weak reference, so that it can be closed meanwhile.
    volume: Weak<dyn Volume>,
    /// Size of the volume in bytes that was last reported.
    size: u64,
    /// Eventfd that wakes the thread which serves the volume.
    wake: Arc<OwnedFd>,
    failed: bool,
}

impl WatchedVolume {
    /// Asks the volume for its size. Returns whether it has changed.
    fn ask(&mut self) -> bool {
        let Some(volume) = self.volume.upgrade() else {
            return false;
        };
        match volume.refresh() {
            Ok(_) => self.failed = false,
            Err(error) => {
                if !std::mem::replace(&mut self.failed, true) {
                    tracing::warn!(%error, "the size of a volume is unknown");
                }
            }
        }
        // Another one may have found it out, too: a device's other namespaces are asked with it.
        let size = volume.info().size;
        let has_changed = std::mem::replace(&mut self.size, size) != size;
        if has_changed {
            let _ = rustix::io::write(self.wake.as_fd(), &1u64.to_ne_bytes());
        }
        has_changed
    }
}

/// Watch on the sizes of volumes, which asks each of them once in an interval.
#[derive(Clone, Default)]
pub struct Sizes(Arc<SharedState>);

#[derive(Default)]
struct SharedState {
    state: Mutex<State>,
    /// Signalled when volumes are due to be asked, or when the threads have to end.
    due: Condvar,
    /// Signalled when an asking thread waits for volumes again, or has ended.
    idle: Condvar,
}

impl SharedState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unpoisoned()
    }
}

#[derive(Default)]
struct State {
    /// Volumes that were asked in this interval.
    asked: Vec<WatchedVolume>,
    /// Volumes that are due to be asked. A volume that is being asked is in neither list.
    due: VecDeque<WatchedVolume>,
    askers: usize,
    /// Number of asking threads that wait for volumes to be due: one at most.
    idle: usize,
    /// Whether the warning about too many hanging volumes was logged.
    said: bool,
    /// Whether a size has changed since the last call of [`Sizes::have_changed`].
    changed: bool,
    /// Whether the threads have to end.
    ending: bool,
}

/// Thread that asks volumes for their sizes, which may block.
struct Asker(Arc<SharedState>);

impl Asker {
    fn run(self) {
        let shared = &*self.0;
        let mut state = shared.lock();
        while !state.ending {
            if let Some(mut watched) = state.due.pop_front() {
                // Not locked while a device is asked.
                drop(state);
                let has_changed = watched.ask();
                state = shared.lock();
                state.changed |= has_changed;
                state.asked.push(watched);
            } else if state.idle > 0 {
                // Another asker took this one's place while its volume did not answer.
                break;
            } else {
                state.idle += 1;
                shared.idle.notify_all();
                state = shared.due.wait(state).unpoisoned();
                state.idle -= 1;
            }
        }
    }
}

/// Also where a volume panics.
impl Drop for Asker {
    fn drop(&mut self) {
        self.0.lock().askers -= 1;
        self.0.idle.notify_all();
    }
}

impl Sizes {
    /// Adds a volume to the watch; `wake` becomes readable when the volume was resized.
    pub fn watch(&self, volume: &Arc<dyn Volume>, wake: &Arc<OwnedFd>) {
        let info = volume.info();
        if matches!(info.kind, Kind::Memory | Kind::Null) {
            return;
        }
        self.0.lock().asked.push(WatchedVolume {
            volume: Arc::downgrade(volume),
            size: info.size,
            wake: wake.clone(),
            failed: false,
        });
    }

    /// Returns whether a size has changed since the last call.
    pub fn have_changed(&self) -> bool {
        std::mem::take(&mut self.0.lock().changed)
    }

    /// Has them asked until it is to end; `each` is called once in an interval.
    pub fn run(&self, stop: &OwnedFd, mut each: impl FnMut()) {
        loop {
            let mut fds = [PollFd::new(stop, PollFlags::IN)];
            match poll(&mut fds, Some(&INTERVAL)) {
                Ok(0) => {
                    self.begin_interval();
                    each();
                }
                Err(rustix::io::Errno::INTR) => {}
                Ok(_) | Err(_) => break,
            }
        }
    }

    /// Ends the queries of sizes, and drops the handles of the volumes that are kept here. Queries
    /// in progress get a moment to end.
    pub fn end(&self) {
        let mut state = self.0.lock();
        state.ending = true;
        self.0.due.notify_all();
        let done = (
            std::mem::take(&mut state.asked),
            std::mem::take(&mut state.due),
        );
        drop(state);
        // Closing a file or a device may take long: not under the lock.
        drop(done);
        let state = self.0.lock();
        let waited = self
            .0
            .idle
            .wait_timeout_while(state, END_LIMIT, |state| state.askers > 0);
        drop(waited);
    }

    /// Makes all volumes due that are not being asked now.
    fn begin_interval(&self) {
        let mut state = self.0.lock();
        let State { asked, due, .. } = &mut *state;
        let kept = asked.drain(..);
        due.extend(kept.filter(|watched| watched.volume.strong_count() > 0));
        if state.due.is_empty() {
            return;
        }
        if state.idle > 0 {
            self.0.due.notify_one();
            return;
        }
        if state.askers == MAX_THREADS {
            if !std::mem::replace(&mut state.said, true) {
                tracing::warn!(
                    "{MAX_THREADS} volumes do not answer queries of their size; no further volume is \
                     queried"
                );
            }
            return;
        }
        state.askers += 1;
        drop(state);
        let asker = Asker(self.0.clone());
        let thread = std::thread::Builder::new().name("sizes".into());
        // Not joined: it may hang. Where there is no thread to be had, the next interval tries
        // again.
        if let Err(error) = thread.spawn(move || asker.run()) {
            tracing::debug!(%error, "no thread to ask volumes for their sizes");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::sync::atomic::{AtomicU64, Ordering};
    use volume::{Info, Io, MemVolume, OpenQueue, VolumeError};

    /// Only a hang takes this long.
    const BOUND: Duration = Duration::from_secs(60);

    /// Answers when it is allowed to, and has grown each time.
    #[derive(Debug)]
    struct Slow {
        memory: MemVolume,
        may_answer: Arc<(Mutex<bool>, Condvar)>,
        asked: AtomicU64,
        size: AtomicU64,
    }

    impl Slow {
        fn new(may_answer: bool) -> Arc<Self> {
            Arc::new(Self {
                memory: MemVolume::new(4096).unwrap(),
                may_answer: Arc::new((Mutex::new(may_answer), Condvar::new())),
                asked: AtomicU64::new(0),
                size: AtomicU64::new(4096),
            })
        }

        fn answer(&self) {
            *self.may_answer.0.lock().unwrap() = true;
            self.may_answer.1.notify_all();
        }

        fn wait_until_asked(&self) {
            wait_until(|| self.asked.load(Ordering::SeqCst) > 0);
        }
    }

    impl Volume for Slow {
        fn info(&self) -> Info {
            Info {
                kind: Kind::BlockDevice,
                size: self.size.load(Ordering::SeqCst),
                ..self.memory.info()
            }
        }

        fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
            self.memory.open(io)
        }

        fn id(&self) -> Vec<u8> {
            self.memory.id()
        }

        fn inner(&self) -> Option<&dyn Volume> {
            None
        }

        fn refresh(&self) -> Result<bool, VolumeError> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            let (may_answer, allowed) = &*self.may_answer;
            let lock = may_answer.lock().unwrap();
            drop(allowed.wait_while(lock, |may| !*may).unwrap());
            self.size.fetch_add(4096, Ordering::SeqCst);
            Ok(true)
        }
    }

    fn as_volume(volume: &Arc<Slow>) -> Arc<dyn Volume> {
        volume.clone()
    }

    fn wait_until(mut holds: impl FnMut() -> bool) {
        let began = std::time::Instant::now();
        while !holds() {
            assert!(began.elapsed() < BOUND, "never");
            std::thread::yield_now();
        }
    }

    fn event() -> Arc<OwnedFd> {
        Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
    }

    /// Starts intervals until `event` is readable.
    fn wait_for(sizes: &Sizes, event: &OwnedFd, what: &str) {
        let began = std::time::Instant::now();
        let moment = Timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        };
        let mut fds = [PollFd::new(event, PollFlags::IN)];
        while poll(&mut fds, Some(&moment)) == Ok(0) {
            assert!(began.elapsed() < BOUND, "{what}");
            sizes.begin_interval();
        }
        rustix::io::read(event, &mut [0; 8]).unwrap();
    }

    /// Until no asker asks a volume.
    fn wait_for_askers(sizes: &Sizes) {
        let state = sizes.0.lock();
        let (state, waited) = sizes
            .0
            .idle
            .wait_timeout_while(state, BOUND, |state| state.askers > state.idle)
            .unwrap();
        assert!(!waited.timed_out(), "{} askers do not end", state.askers);
    }

    #[test]
    fn hanging_volume_does_not_block_size_checks() {
        let sizes = Sizes::default();
        let hangs = [(); 3].map(|()| Slow::new(false));
        let answers = [(); 3].map(|()| (Slow::new(true), event()));
        let unused = event();
        for (hangs, (answers, wake)) in hangs.iter().zip(&answers) {
            sizes.watch(&as_volume(hangs), &unused);
            sizes.watch(&as_volume(answers), wake);
        }
        for _ in 0..3 {
            for (_, wake) in &answers {
                wait_for(&sizes, wake, "its new size is told");
            }
        }
        hangs.iter().for_each(|volume| volume.wait_until_asked());
        let asked = |volume: &Slow| volume.asked.load(Ordering::SeqCst);
        assert!(hangs.iter().all(|volume| asked(volume) == 1));
        // Late answers count, and the volumes are queried again.
        hangs.iter().for_each(|volume| volume.answer());
        wait_for_askers(&sizes);
        wait_for(&sizes, &unused, "late, but told");
        wait_until(|| {
            sizes.begin_interval();
            hangs.iter().all(|volume| asked(volume) >= 2)
        });
        // The askers that waited for them have ended.
        wait_until(|| sizes.0.lock().askers == 1);
    }

    #[test]
    fn size_check_threads_are_bounded() {
        let sizes = Sizes::default();
        let hangs = [(); MAX_THREADS + 2].map(|()| Slow::new(false));
        for volume in &hangs {
            sizes.watch(&as_volume(volume), &event());
        }
        wait_until(|| {
            sizes.begin_interval();
            hangs[..MAX_THREADS]
                .iter()
                .all(|v| v.asked.load(Ordering::SeqCst) > 0)
        });
        sizes.begin_interval();
        {
            let state = sizes.0.lock();
            assert_eq!((state.askers, state.due.len()), (MAX_THREADS, 2));
        }
        // The end does not wait for them for ever.
        let stop = event();
        rustix::io::write(&*stop, &1u64.to_ne_bytes()).unwrap();
        sizes.run(&stop, || panic!("no interval has passed"));
        sizes.end();
        hangs.iter().for_each(|volume| volume.answer());
        wait_for_askers(&sizes);
    }

    #[test]
    fn end_releases_volumes() {
        let sizes = Sizes::default();
        let volume = Slow::new(true);
        sizes.watch(&as_volume(&volume), &event());
        sizes.end();
        assert_eq!(Arc::strong_count(&volume), 1, "its file is open still");
    }
}
