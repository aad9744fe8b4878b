//! The end of the process: every worker makes everything durable and ends; a thread that stands
//! still is not waited for.

use crate::keep::KeeperSession;
use crate::log::stderr;
use crate::serve::watch::Watch;
use anyhow::{Result, anyhow};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Interval of checks on whether all threads have ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Minimum time for a worker to close something: the orderly shutdown of a device may take long.
const CLOSE_LIMIT: Duration = Duration::from_secs(60);

/// Exit code of a process that could not make all completed writes durable.
pub const NOT_DURABLE: u8 = 3;

/// Error text of a process that could not make all completed writes durable; the exit code is
/// [`NOT_DURABLE`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotDurable(pub String);

/// Receiver of the results with which the threads of the process end.
pub(crate) struct ThreadResults {
    told: Sender<(usize, Result<()>)>,
    ends: Receiver<(usize, Result<()>)>,
}

impl ThreadResults {
    /// Creates the results of threads that have yet to end.
    pub fn new() -> Self {
        let (told, ends) = channel();
        Self { told, ends }
    }

    /// Returns the function of the thread with this index: it calls `run` and sends the result,
    /// even after a panic, before the kernel ends the thread, which may take long.
    pub fn thread<F: FnOnce() -> Result<()>>(
        &self,
        index: usize,
        run: F,
    ) -> impl FnOnce() + use<F> {
        let told = self.told.clone();
        move || {
            let result = catch_unwind(AssertUnwindSafe(run));
            let result = result.unwrap_or_else(|payload| {
                // The payload's own drop may panic.
                std::mem::forget(payload);
                Err(anyhow!("a worker ended by a bug"))
            });
            let _ = told.send((index, result));
        }
    }

    /// Waits for `threads` threads, of which the first `workers` are workers. Those that make no
    /// round for `limit`, or for [`CLOSE_LIMIT`] while they close something, are given up when no
    /// other is left.
    ///
    /// The first error of a thread.
    ///
    /// # Errors
    /// Some threads have not ended, and nobody may wait for them: see [`exit`].
    pub fn wait(
        &self,
        threads: usize,
        workers: usize,
        limit: Duration,
        end_all: impl Fn(),
        watch: &mut Watch,
    ) -> Result<Result<()>, NotDurable> {
        let ordered = Instant::now();
        let mut left: BTreeSet<usize> = (0..threads).collect();
        let mut result = Ok(());
        while !left.is_empty() {
            match self.ends.recv_timeout(CHECK_INTERVAL) {
                Ok((index, end)) => {
                    left.remove(&index);
                    // A failed worker asks all others to end, too.
                    end_all();
                    result = result.and(end);
                }
                Err(RecvTimeoutError::Timeout) => {
                    watch.look();
                    let stuck = |&index: &usize| watch.is_stuck(index, limit, CLOSE_LIMIT);
                    let is_worker = |index: &&usize| **index < workers;
                    let of_workers = || left.iter().filter(is_worker);
                    // A thread that is no worker may wait for one that stands still.
                    if ordered.elapsed() >= limit
                        && of_workers().next().is_some()
                        && of_workers().all(stuck)
                    {
                        let stuck: Vec<usize> = of_workers().copied().collect();
                        return Err(give_up(&stuck, watch));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(result)
    }
}

/// Ends the process at once, although some of its threads have not ended.
pub fn exit(error: &NotDurable) -> ! {
    stderr::say(format_args!("{error}"));
    std::process::exit(NOT_DURABLE.into())
}

/// Ends a process that cannot serve, as if it were killed: the next one continues with the clients,
/// whom an orderly end would disconnect, and with the listening sockets, which the receiver process
/// would shut down for all processes.
pub fn exit_followed(error: &anyhow::Error, keeper: &KeeperSession) -> ! {
    keeper.tell_failure(error);
    stderr::say(format_args!("{error:#}"));
    std::process::exit(1)
}

/// Logs the workers that have not ended, and returns the error for the exit code.
fn give_up(stuck: &[usize], watch: &Watch) -> NotDurable {
    let mut lost = Vec::new();
    for &worker in stuck {
        tracing::error!(
            "worker-{worker} does not end: {}; the process ends without it",
            watch.describe(worker)
        );
        lost.extend(watch.names(worker));
    }
    let what = if lost.is_empty() {
        "no client was served yet".to_owned()
    } else {
        format!(
            "unflushed writes to these disks may not be durable: {}",
            lost.join(", ")
        )
    };
    NotDurable(format!("ended by force: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::front::Handle;
    use crate::serve::peers::Peers;
    use std::cell::Cell;
    use std::sync::Arc;

    fn watch() -> Watch {
        let peers = Peers::new(vec![Handle::new().unwrap()]);
        Watch::new(&Arc::new(peers))
    }

    #[test]
    fn first_error_or_panic_ends_daemon() {
        let ends = ThreadResults::new();
        let runs: [fn() -> Result<()>; 3] = [
            || Ok(()),
            || panic!("as a bug does"),
            || Err(anyhow!("later")),
        ];
        for (index, run) in runs.into_iter().enumerate() {
            let thread = ends.thread(index, run);
            std::thread::spawn(thread).join().unwrap();
        }
        let told = Cell::new(0);
        let limit = Duration::from_secs(60);
        let end = ends.wait(3, 1, limit, || told.set(told.get() + 1), &mut watch());
        let error = end.expect("all have ended").unwrap_err().to_string();
        assert!(error.contains("a bug"), "{error}");
        assert_eq!(told.get(), 3);
    }

    #[test]
    fn worker_start_times_out() {
        let ends = ThreadResults::new();
        let _hangs = ends.thread(0, || Ok(()));
        let waited = ends.wait(1, 1, Duration::from_millis(10), || (), &mut watch());
        let error = waited.expect_err("it has not ended").to_string();
        assert!(error.contains("no client was served yet"), "{error}");
    }
}
