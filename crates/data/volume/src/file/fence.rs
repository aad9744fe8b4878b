//! The fence between a process and the one that had the file before.
//!
//! A process that is killed leaves requests behind: the kernel continues those that its ring has
//! started, and a write may reach the disk long after the process has ended. A successor that wrote
//! meanwhile would find the old bytes on top of its new ones. Each such request holds the open file
//! description that it was started on, and with it the lock of that description (`F_OFD_SETLK`).
//! The lock is therefore free when the last of them is over, and not before. A process that has the
//! lock may write.
//!
//! A call that a thread of the previous process hangs in has the same effect: its descriptors are
//! closed when the last of its threads has ended.

use super::holder::{self, Holders};
use crate::{VolumeError, WaitLog};
use std::path::Path;
use std::time::Duration;

/// Interval between two attempts to lock a file that another process has locked.
const LOCK_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Longest wait for a file that another living process holds. That process may be about to end.
const LIVE_OWNER_TIMEOUT: Duration = Duration::from_secs(1);
/// Limits of the wait for the previous process's outstanding requests when a volume is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreviousProcess {
    /// Maximum duration of the wait. When it has passed, opening the volume fails.
    pub limit: Duration,
    /// Whether the volume is taken over from a process that has ended or is about to. Then a living
    /// holder of the file is assumed to be that process, and waited for up to `limit`. Otherwise a
    /// living holder is waited for at most one second.
    pub taken_over: bool,
}

impl Default for PreviousProcess {
    fn default() -> Self {
        Self {
            limit: Duration::from_secs(30),
            taken_over: false,
        }
    }
}

/// Wait until the previous process has released its lock of a file.
pub(super) struct Fence<'a> {
    path: &'a Path,
    /// Whether the whole file is to be locked, not only a range of it.
    whole: bool,
    previous: PreviousProcess,
    log: WaitLog,
}

impl<'a> Fence<'a> {
    pub(super) fn new(path: &'a Path, whole: bool, previous: PreviousProcess) -> Self {
        Self {
            path,
            whole,
            previous,
            log: WaitLog::default(),
        }
    }

    /// Waits a while after the file was found locked, before the caller tries again.
    ///
    /// # Errors
    /// [`VolumeError::PreviousProcess`] or [`VolumeError::Locked`] when the wait has reached its
    /// limit.
    pub(super) fn wait(&mut self, read_only: bool) -> Result<(), VolumeError> {
        let waited = self.log.elapsed();
        let due = self.log.due().is_some();
        // Found out rarely: it looks at all processes.
        if due || waited >= self.previous.limit.min(LIVE_OWNER_TIMEOUT) {
            let holders = holder::holders(self.path, self.whole);
            let other = holders != Holders::Kernel && !self.previous.taken_over;
            let limit = if other {
                self.previous.limit.min(LIVE_OWNER_TIMEOUT)
            } else {
                self.previous.limit
            };
            if waited >= limit {
                return Err(self.over(waited, &holders, read_only));
            }
            if due && !other {
                tracing::warn!(
                    "{}: waiting for the last requests of the previous process: in use by \
                     {holders} (for {waited:.1?}, at most {limit:.0?})",
                    self.path.display()
                );
            }
        }
        std::thread::sleep(LOCK_CHECK_INTERVAL);
        Ok(())
    }

    fn over(&self, waited: Duration, holders: &Holders, read_only: bool) -> VolumeError {
        let path = self.path.to_path_buf();
        match holders {
            Holders::Kernel => VolumeError::PreviousProcess { path, waited },
            holders => VolumeError::Locked {
                path,
                holder: holders.to_string(),
                read_only,
            },
        }
    }

    /// Logs how long the wait has lasted, if it was logged before, once this process has locked the
    /// file.
    pub(super) fn passed(&self) {
        if let Some(waited) = self.log.said() {
            tracing::warn!(
                "{}: the previous process released it after {waited:.1?}",
                self.path.display()
            );
        }
    }
}
