//! Drops that may block, on threads where that is harmless.
//!
//! `close` of a descriptor from another process may block as long as its sender likes, and `munmap`
//! of gigabytes takes time. A thread with other duties leaves both to this module.
//!
//! One thread drops the values, in order, and another stands ready. When a drop takes longer than
//! [`DropPool::stuck_after`], the ready thread continues with the next values, and starts another
//! ready one. Up to [`DropPool::most`] drops may thus be stuck; further values then wait. Threads
//! without work end after [`DropPool::idle`]: a process that discards nothing has none.

use crate::{Unpoisoned, leave_cpu};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The process's pool of threads.
static PROCESS: DropPool = DropPool::new(16, Duration::from_millis(100), Duration::from_secs(5));

/// Stack size of a thread in bytes. Drops are shallow.
const STACK: usize = 256 << 10;

/// Drops a value on a thread that may block. Neither the caller nor the end of the process waits
/// for it. The order of drops is unspecified.
///
/// Values wait in memory while 16 drops are stuck, or while no thread can be started. The code that
/// creates values for a client must bound their number. A panic of the drop ends there.
///
/// ```
/// use std::sync::mpsc::channel;
///
/// let (sender, receiver) = channel::<()>();
/// sync::discard(sender);
/// assert!(receiver.recv().is_err());
/// ```
pub fn discard(value: impl Send + 'static) {
    PROCESS.discard(Box::new(value));
}

/// A value to be dropped on another thread, because dropping it may block.
type Value = Box<dyn Send>;

/// Queue of values to be dropped, and the threads that drop them.
struct DropPool {
    state: Mutex<State>,
    /// Signalled when a value was queued or a drop has ended.
    news: Condvar,
    /// Maximum number of threads.
    most: usize,
    /// Duration of a drop after which another thread continues with the next values.
    stuck_after: Duration,
    /// Time after which an idle thread ends.
    idle: Duration,
}

struct State {
    values: VecDeque<Value>,
    /// Number of threads that run or are being started.
    threads: usize,
    /// Number of threads that drop nothing now.
    ready: usize,
    /// Number and start time of the newest drop; `None` when it has ended.
    newest: Option<(u64, Instant)>,
    drops: u64,
}

impl State {
    /// Returns how long an idle thread waits before it continues with the next values, while the
    /// newest drop is in progress.
    fn leaves(&self, stuck_after: Duration) -> Duration {
        self.newest.map_or(Duration::ZERO, |(_, began)| {
            stuck_after.saturating_sub(began.elapsed())
        })
    }
}

impl DropPool {
    const fn new(most: usize, stuck_after: Duration, idle: Duration) -> DropPool {
        DropPool {
            state: Mutex::new(State {
                values: VecDeque::new(),
                threads: 0,
                ready: 0,
                newest: None,
                drops: 0,
            }),
            news: Condvar::new(),
            most,
            stuck_after,
            idle,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unpoisoned()
    }

    fn discard(&'static self, value: Value) {
        let mut state = self.lock();
        state.values.push_back(value);
        let wanted = state.ready == 0 && state.leaves(self.stuck_after).is_zero();
        self.news.notify_one();
        if wanted {
            // The first one, or one for which there was no memory before. The others are started by
            // threads of this module: a start needs the lock of the process's mappings, which may
            // be taken while a drop unmaps memory.
            self.start(state);
        }
    }

    /// Starts a thread, unless the maximum is reached. If that fails, the values wait for the next
    /// attempt.
    fn start(&'static self, mut state: MutexGuard<'_, State>) {
        if state.threads >= self.most {
            return;
        }
        state.threads += 1;
        state.ready += 1;
        drop(state);
        let thread = std::thread::Builder::new()
            .name("discard".to_owned())
            .stack_size(STACK);
        if thread.spawn(move || self.run()).is_err() {
            let mut state = self.lock();
            state.threads -= 1;
            state.ready -= 1;
        }
    }

    /// Runs a thread of the pool.
    fn run(&'static self) {
        leave_cpu();
        while let Some((value, number)) = self.next() {
            // The panic's payload may panic in its own drop, so it is leaked.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
                std::mem::forget(payload);
            }
            let mut state = self.lock();
            state.ready += 1;
            if state.newest.is_some_and(|(newest, _)| newest == number) {
                state.newest = None;
            }
        }
    }

    /// Returns the next value to drop and the number of its drop; `None` when the thread is to end.
    fn next(&'static self) -> Option<(Value, u64)> {
        let mut state = self.lock();
        let mut since = Instant::now();
        loop {
            let leaves = state.leaves(self.stuck_after);
            if leaves.is_zero()
                && let Some(value) = state.values.pop_front()
            {
                state.drops += 1;
                let number = state.drops;
                state.newest = Some((number, Instant::now()));
                state.ready -= 1;
                if state.ready == 0 {
                    // Before the drop: afterwards it may be too late.
                    self.start(state);
                }
                return Some((value, number));
            }
            if !state.values.is_empty() {
                since = Instant::now();
            }
            // A ready thread remains while a drop is in progress.
            let is_last = state.ready == 1 && state.threads > 1;
            if since.elapsed() >= self.idle && !is_last {
                state.threads -= 1;
                state.ready -= 1;
                return None;
            }
            // While values wait, they may be left to another thread for so long.
            let wait = if state.values.is_empty() {
                self.idle
            } else {
                self.idle.min(leaves)
            };
            (state, _) = self.news.wait_timeout(state, wait).unpoisoned();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Long enough for every machine, when something does happen.
    const BOUND: Duration = Duration::from_secs(60);

    fn pool(most: usize, stuck_after: u64, idle: u64) -> &'static DropPool {
        let millis = Duration::from_millis;
        Box::leak(Box::new(DropPool::new(
            most,
            millis(stuck_after),
            millis(idle),
        )))
    }

    /// A value with a drop that reports its start, then waits until it may end.
    struct Stuck(Sender<()>, Receiver<()>);

    impl Drop for Stuck {
        fn drop(&mut self) {
            let _ = self.0.send(());
            let _ = self.1.recv();
        }
    }

    /// Discards a value with a stuck drop, which ends when the returned sender is dropped.
    fn stuck(pool: &'static DropPool) -> Sender<()> {
        let (begun, begins) = channel();
        let (end, ends) = channel();
        pool.discard(Box::new(Stuck(begun, ends)));
        begins.recv_timeout(BOUND).unwrap();
        end
    }

    /// Discards a value, and returns a channel that reports its drop.
    fn witness(pool: &'static DropPool) -> Receiver<()> {
        let (sender, receiver) = channel();
        pool.discard(Box::new(sender));
        receiver
    }

    fn is_dropped(receiver: &Receiver<()>) -> bool {
        use std::sync::mpsc::RecvTimeoutError::Disconnected;
        receiver.recv_timeout(BOUND) == Err(Disconnected)
    }

    fn wait_until(pool: &DropPool, what: impl Fn(&State) -> bool) {
        let end = Instant::now() + BOUND;
        while !what(&pool.lock()) {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn stuck_drop_blocks_no_other() {
        let pool = pool(16, 10, 50);
        let ends: Vec<_> = (0..5).map(|_| stuck(pool)).collect();
        assert!(is_dropped(&witness(pool)));
        drop(ends);
        wait_until(pool, |state| state.threads == 0);
    }

    #[test]
    fn value_behind_stuck_drop_is_dropped_without_further_call() {
        let pool = pool(16, 10, 50);
        let (begun, _begins) = channel();
        let (_end, ends) = channel();
        pool.discard(Box::new(Stuck(begun, ends)));
        assert!(is_dropped(&witness(pool)));
    }

    #[test]
    fn values_wait_behind_maximum_of_stuck_drops() {
        let pool = pool(3, 1, 50);
        let mut ends: Vec<_> = (0..3).map(|_| stuck(pool)).collect();
        let waiting: Vec<_> = (0..100).map(|_| witness(pool)).collect();
        wait_until(pool, |state| state.ready == 0 && state.values.len() == 100);
        assert_eq!(pool.lock().threads, 3);
        ends.pop();
        assert!(waiting.iter().all(is_dropped));
    }

    #[test]
    fn quick_drops_need_few_threads_and_idle_threads_end() {
        let pool = pool(16, 60_000, 20);
        let all: Vec<_> = (0..1000).map(|_| witness(pool)).collect();
        assert!(all.iter().all(is_dropped));
        assert!(pool.lock().threads <= 2);
        wait_until(pool, |state| state.threads == 0 && state.ready == 0);
        assert!(is_dropped(&witness(pool)));
    }

    #[test]
    fn one_thread_is_ready_while_drop_is_stuck() {
        let pool = pool(16, 1, 1);
        let end = stuck(pool);
        std::thread::sleep(Duration::from_millis(50));
        {
            let state = pool.lock();
            assert_eq!((state.threads, state.ready), (2, 1));
        }
        assert!(is_dropped(&witness(pool)));
        drop(end);
        wait_until(pool, |state| state.threads == 0);
    }

    #[test]
    fn drop_within_limit_is_waited_for() {
        let pool = pool(16, 60_000, 20);
        let end = stuck(pool);
        let behind = witness(pool);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(pool.lock().values.len(), 1);
        drop(end);
        assert!(is_dropped(&behind));
    }

    #[test]
    fn panic_in_drop_is_contained() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                std::panic::resume_unwind(Box::new(PanicsToo));
            }
        }
        struct PanicsToo;
        impl Drop for PanicsToo {
            fn drop(&mut self) {
                std::panic::resume_unwind(Box::new(()));
            }
        }
        let pool = pool(1, 60_000, 20);
        pool.discard(Box::new(Panics));
        assert!(is_dropped(&witness(pool)));
        wait_until(pool, |state| state.threads == 0);
    }

    #[test]
    fn values_wait_until_thread_can_start() {
        let pool = pool(1, 60_000, 20);
        // A missing thread is simulated.
        pool.lock().threads = 1;
        let first = witness(pool);
        assert_eq!(pool.lock().values.len(), 1);
        pool.lock().threads = 0;
        let second = witness(pool);
        assert!(is_dropped(&first) && is_dropped(&second));
    }
}
