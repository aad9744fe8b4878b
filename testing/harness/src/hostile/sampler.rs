//! Sampler of the time for which the daemon's worker is blocked, as the system sees it.
//!
//! A thread that runs, or could run, is "running" in `/proc/PID/task/TID/syscall`; else the file
//! names the system call that it waits in, or -1 for a page fault. A worker may wait in
//! `epoll_wait`, when it has nothing to do, and nowhere else. Noise of the machine does not count:
//! a thread that waits for a processor could run.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::schedule;

/// `epoll_wait`, `epoll_pwait` and `epoll_pwait2`.
#[cfg(target_arch = "x86_64")]
const SLEEPS: [&str; 3] = ["232", "281", "441"];
#[cfg(not(target_arch = "x86_64"))]
const SLEEPS: [&str; 3] = ["22", "22", "441"];

/// Name of the daemon's worker.
pub(super) const WORKER: &str = "worker-0";
const PERIOD: Duration = Duration::from_millis(1);

/// A thread that looks.
pub(super) struct Sampler {
    stop: Arc<AtomicBool>,
    longest: Arc<AtomicU64>,
    thread: Option<JoinHandle<Option<String>>>,
}

impl Sampler {
    /// Watches the worker of one of these processes; `None` where the system does not show it.
    pub(super) fn start(pids: &[u32]) -> Option<Self> {
        let file = schedule::thread(pids, WORKER)?.join("syscall");
        fs::read_to_string(&file).ok()?;
        let (stop, longest) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (stopped, found) = (stop.clone(), longest.clone());
        let thread = std::thread::spawn(move || watch(file, &stopped, &found));
        Some(Self {
            stop,
            longest,
            thread: Some(thread),
        })
    }

    /// The longest time that the worker waited in one place, and the number of that system call.
    pub(super) fn end(mut self) -> (Duration, Option<String>) {
        self.stop.store(true, Ordering::Relaxed);
        let daemon = self.thread.take().and_then(|t| t.join().ok()).flatten();
        (
            Duration::from_micros(self.longest.load(Ordering::Relaxed)),
            daemon,
        )
    }
}

fn watch(file: PathBuf, stop: &AtomicBool, longest: &AtomicU64) -> Option<String> {
    let mut daemon = None;
    // The system call in which it waits, and the time since when.
    let mut waits: Option<(String, Instant)> = None;
    while !stop.load(Ordering::Relaxed) {
        let text = fs::read_to_string(&file).ok()?;
        let now = Instant::now();
        let call = text.split_whitespace().next().unwrap_or_default();
        let free = call.is_empty() || call == "running" || SLEEPS.contains(&call);
        // All of the line: another call of the same kind has other arguments, mostly.
        waits = match waits.take() {
            _ if free => None,
            Some((before, since)) if before == text => Some((before, since)),
            _ => Some((text.clone(), now)),
        };
        if let Some((_, since)) = &waits {
            let length = (now - *since).as_micros() as u64;
            if length > longest.load(Ordering::Relaxed) {
                longest.store(length, Ordering::Relaxed);
                daemon = Some(call.to_owned());
            }
        }
        std::thread::sleep(PERIOD);
    }
    daemon
}
