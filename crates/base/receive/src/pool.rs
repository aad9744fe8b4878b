//! Threads of the receiver process. Each may hang in a client's descriptor, and then serves no
//! further task. There are as many as running tasks; idle threads end after a second.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Time after which an idle thread of the pool ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// Stack size. The largest objects on a thread's stack are control messages, of about a kilobyte.
const STACK: usize = 128 << 10;

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Tasks {
    waiting: VecDeque<Task>,
    /// Number of threads of the pool that wait for a task.
    idle: usize,
}

/// Pool of threads that are created on demand. Clones refer to the same pool.
#[derive(Clone, Default)]
pub(crate) struct ThreadPool(Arc<(Mutex<Tasks>, Condvar)>);

impl ThreadPool {
    /// Runs a task at once, on an idle thread or on a new one.
    pub(crate) fn run(&self, task: impl FnOnce() + Send + 'static) {
        let (tasks, news) = &*self.0;
        let enough = {
            let mut tasks = tasks.lock().unpoisoned();
            tasks.waiting.push_back(Box::new(task));
            tasks.waiting.len() <= tasks.idle
        };
        news.notify_one();
        if !enough {
            self.grow();
        }
    }

    /// Returns whether tasks wait because no thread could be created.
    pub(crate) fn is_behind(&self) -> bool {
        let tasks = self.0.0.lock().unpoisoned();
        tasks.waiting.len() > tasks.idle
    }

    /// Creates another thread. If that fails, tasks wait until a later call succeeds.
    pub(crate) fn grow(&self) {
        let pool = self.clone();
        let builder = std::thread::Builder::new().name("receive".into());
        let _ = builder.stack_size(STACK).spawn(move || pool.work());
    }

    fn work(&self) {
        while let Some(task) = self.next() {
            task();
        }
    }

    fn next(&self) -> Option<Task> {
        let (tasks, news) = &*self.0;
        let mut tasks = tasks.lock().unpoisoned();
        let end = Instant::now() + IDLE_TIMEOUT;
        loop {
            if let Some(task) = tasks.waiting.pop_front() {
                return Some(task);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            tasks.idle += 1;
            tasks = news.wait_timeout(tasks, left).unpoisoned().0;
            tasks.idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn hanging_tasks_block_no_other() {
        let pool = ThreadPool::default();
        let mut held = Vec::new();
        for _ in 0..20 {
            let (release, hangs) = mpsc::channel::<()>();
            pool.run(move || {
                let _ = hangs.recv();
            });
            held.push(release);
            let (done, is_done) = mpsc::channel();
            pool.run(move || done.send(()).unwrap());
            is_done.recv_timeout(LIMIT).unwrap();
        }
        assert!(!pool.is_behind());
    }

    #[test]
    fn idle_pool_threads_end() {
        let pool = ThreadPool::default();
        for _ in 0..4 {
            pool.run(|| ());
        }
        // Each thread holds a clone.
        let end = Instant::now() + LIMIT;
        while Arc::strong_count(&pool.0) > 1 {
            assert!(Instant::now() < end, "they go on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
