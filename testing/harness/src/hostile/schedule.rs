//! Times that threads spent on a processor and waiting for one, as the system sees them.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The threads on which a neighbour's reads depend: the daemon's worker, and its own.
pub(super) struct Threads(Vec<PathBuf>);

/// Times of the threads at one moment.
pub(super) struct Times {
    at: Instant,
    /// Time of each thread on a processor, and waiting for one.
    threads: Vec<(Duration, Duration)>,
}

/// Returns the directory in `/proc` of a thread of these processes.
pub(super) fn thread(pids: &[u32], name: &str) -> Option<PathBuf> {
    let tasks = pids
        .iter()
        .map(|pid| fs::read_dir(format!("/proc/{pid}/task")));
    let mut tasks = tasks.flatten().flatten().flatten().map(|task| task.path());
    tasks.find(|task| {
        let found = fs::read_to_string(task.join("comm")).unwrap_or_default();
        found.trim() == name
    })
}

impl Threads {
    pub(super) fn new(threads: impl IntoIterator<Item = PathBuf>) -> Self {
        Self(threads.into_iter().collect())
    }

    pub(super) fn now(&self) -> Times {
        let times = |thread: &PathBuf| {
            // "TIME ON PROCESSORS, TIME IN RUN QUEUES, SLICES"; a kernel without it counts nothing.
            let text = fs::read_to_string(thread.join("schedstat")).unwrap_or_default();
            let mut numbers = text
                .split_whitespace()
                .map(|word| word.parse().unwrap_or(0));
            let mut next = || Duration::from_nanos(numbers.next().unwrap_or(0));
            (next(), next())
        };
        Times {
            at: Instant::now(),
            threads: self.0.iter().map(times).collect(),
        }
    }
}

impl Times {
    /// Returns the time since an earlier moment in which the threads had a processor when they
    /// wanted one. They work in turn, so that the wait of each holds the other up.
    pub(super) fn served_since(&self, before: &Times) -> Duration {
        let threads = || self.threads.iter().zip(&before.threads);
        let ran = threads().map(|(now, before)| now.0.saturating_sub(before.0));
        let waited: Duration = threads()
            .map(|(now, before)| now.1.saturating_sub(before.1))
            .sum();
        let served = (self.at - before.at).saturating_sub(waited);
        served.max(ran.max().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_for_a_processor_is_not_served_and_work_is() {
        let at = Instant::now();
        let of = |seconds, threads: [(u64, u64); 2]| Times {
            at: at + Duration::from_secs(seconds),
            threads: threads
                .map(|(ran, waited)| (Duration::from_secs(ran), Duration::from_secs(waited)))
                .to_vec(),
        };
        let before = of(0, [(1, 1), (1, 1)]);
        let served = |after: Times| after.served_since(&before).as_secs();
        assert_eq!(served(of(10, [(2, 1), (2, 1)])), 10);
        assert_eq!(served(of(10, [(2, 4), (2, 3)])), 5);
        assert_eq!(served(of(10, [(4, 6), (3, 7)])), 3);
    }

    #[test]
    fn thread_is_found_by_its_name() {
        let own = std::thread::Builder::new().name("schedule-test".into());
        let found = own.spawn(|| thread(&[std::process::id()], "schedule-test"));
        assert!(found.unwrap().join().unwrap().is_some());
        assert!(thread(&[std::process::id()], "no-such-thread").is_none());
    }
}
