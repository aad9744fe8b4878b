//! Error policy: failed requests are reported, repeated, or held until a user has resumed the
//! volume.
//!
//! A request that succeeds passes none of this. A front-end that gets a failed completion offers
//! the request to [`OpenQueue::failed`]. Only then does the volume's policy decide, which can be
//! changed at any time through the [`OnErrorHandle`]. A request that is to wait or to be repeated
//! enters a queue that is put in front of the volume's own at its first failure ([`held`]).
//!
//! Several errors are always reported. Written data that could not be made durable
//! ([`IoErrorKind::NotDurable`], and every failed flush) may be lost, and a repeated fsync would
//! succeed all the same: the system forgets the data that it could not write. A request that is at
//! fault itself (its range, its memory) fails again.

mod held;

use crate::clock::{Clock, SystemClock};
use crate::{
    AtomicWrites, Completion, Info, Io, IoError, IoErrorKind, Op, OpenQueue, Request, Volume,
};
use crate::{VolumeError, limit::NAP};
pub(crate) use held::QueuePolicy;
use probes::LogLimit;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use sync::Unpoisoned;

/// A request is repeated for so long, from its first failure on; then it fails. Below the time-out
/// of a guest's driver (Linux: 30 s), which would take the whole controller for dead.
pub const RETRY_FOR: Duration = Duration::from_secs(20);

/// Action for a request that failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum ErrorAction {
    /// The error is reported to the guest.
    #[default]
    Report = 0,
    /// The request is repeated, with growing pauses, for [`RETRY_FOR`].
    Retry = 1,
    /// The request waits, and all later ones do, until the volume is resumed.
    Stop = 2,
    /// Acts like `Stop` where there is no space left; else like `Report`. For requests that change
    /// the volume.
    EnospcStop = 3,
}

impl ErrorAction {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Report, Self::Retry, Self::Stop, Self::EnospcStop];

    /// Returns the name in URLs and configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::Retry => "retry",
            Self::Stop => "stop",
            Self::EnospcStop => "enospc-stop",
        }
    }

    fn of(number: u8) -> Self {
        let found = Self::ALL.into_iter().find(|one| *one as u8 == number);
        found.unwrap_or_default()
    }
}

/// Actions for requests that failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OnError {
    /// Reads. [`ErrorAction::EnospcStop`] is as [`ErrorAction::Report`].
    pub read: ErrorAction,
    /// Everything else.
    pub write: ErrorAction,
}

/// Counters of requests that failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OnErrorStatus {
    /// Reads that failed, each time that they did.
    pub read_errors: u64,
    /// Other requests.
    pub write_errors: u64,
    /// Failures of both for want of space.
    pub no_space: u64,
    /// Failed requests that were started once more.
    pub repeated: u64,
    /// Times that requests began to be held.
    pub stops: u64,
    /// Requests that are held now until the volume is resumed, including later ones.
    pub held: usize,
    /// Requests that wait to be repeated.
    pub waiting: usize,
    /// The last failure: when, and which.
    pub last: Option<(SystemTime, IoError)>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    clock: Arc<dyn Clock>,
    /// For log lines.
    name: String,
    read: AtomicU8,
    write: AtomicU8,
    /// Counts calls of [`OnErrorHandle::resume`].
    resumes: AtomicU64,
    read_errors: AtomicU64,
    write_errors: AtomicU64,
    no_space: AtomicU64,
    repeated: AtomicU64,
    stops: AtomicU64,
    held: AtomicUsize,
    waiting: AtomicUsize,
    last: Mutex<Option<(SystemTime, IoError)>>,
    log: LogLimit,
}

impl Shared {
    /// Returns the action for a request that failed with this error.
    fn action(&self, op: Op, error: IoError) -> ErrorAction {
        let may_pass = match error.kind {
            IoErrorKind::MediaRead
            | IoErrorKind::MediaWrite
            | IoErrorKind::NoSpace
            | IoErrorKind::Truncated
            | IoErrorKind::Gone
            | IoErrorKind::Unreachable => op != Op::Flush,
            IoErrorKind::NotDurable
            | IoErrorKind::ReadOnly
            | IoErrorKind::OutOfRange
            | IoErrorKind::Invalid
            | IoErrorKind::Memory
            | IoErrorKind::Aborted
            | IoErrorKind::Unsupported
            | IoErrorKind::Busy => false,
        };
        if !may_pass {
            return ErrorAction::Report;
        }
        let number = if op.changes() {
            &self.write
        } else {
            &self.read
        };
        // Relaxed: it stands for itself.
        match ErrorAction::of(number.load(Ordering::Relaxed)) {
            ErrorAction::EnospcStop if op.changes() && error.kind == IoErrorKind::NoSpace => {
                ErrorAction::Stop
            }
            ErrorAction::EnospcStop => ErrorAction::Report,
            action => action,
        }
    }

    /// A request has failed, whatever becomes of it.
    fn count(&self, op: Op, error: IoError) {
        let counter = match op.changes() {
            true => &self.write_errors,
            false => &self.read_errors,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        if error.kind == IoErrorKind::NoSpace {
            self.no_space.fetch_add(1, Ordering::Relaxed);
        }
        *self.last.lock().unpoisoned() = Some((SystemTime::now(), error));
    }

    /// Requests begin to be held.
    fn stopped(&self, op: Op, error: IoError) {
        self.stops.fetch_add(1, Ordering::Relaxed);
        let what = if op.changes() { "write" } else { "read" };
        self.log.line(|left_out| {
            tracing::error!(
                left_out,
                "{}: stopped because a {what} failed: {error}; its requests wait until vnvme \
                 resume",
                self.name
            );
        });
    }

    fn resumes(&self) -> u64 {
        self.resumes.load(Ordering::Acquire)
    }
}

/// A volume's policy, to be read and changed by anyone while the volume is in use.
#[derive(Debug, Clone)]
pub struct OnErrorHandle(Arc<Shared>);

impl OnErrorHandle {
    fn new(policy: OnError, name: &str, clock: Arc<dyn Clock>) -> Self {
        let handle = Self(Arc::new(Shared {
            clock,
            name: name.to_owned(),
            read: AtomicU8::default(),
            write: AtomicU8::default(),
            resumes: AtomicU64::default(),
            read_errors: AtomicU64::default(),
            write_errors: AtomicU64::default(),
            no_space: AtomicU64::default(),
            repeated: AtomicU64::default(),
            stops: AtomicU64::default(),
            held: AtomicUsize::default(),
            waiting: AtomicUsize::default(),
            last: Mutex::default(),
            log: LogLimit::default(),
        }));
        handle.set(policy);
        handle
    }

    /// Sets another policy: also for requests that wait already. A worker that sleeps notices
    /// within a tenth of a second.
    pub fn set(&self, policy: OnError) {
        self.0.read.store(policy.read as u8, Ordering::Relaxed);
        self.0.write.store(policy.write as u8, Ordering::Relaxed);
    }

    /// The policy as it is.
    pub fn get(&self) -> OnError {
        let of = |number: &AtomicU8| ErrorAction::of(number.load(Ordering::Relaxed));
        OnError {
            read: of(&self.0.read),
            write: of(&self.0.write),
        }
    }

    /// Restarts all waiting requests, those of other workers within a tenth of a second. A request
    /// that fails again waits again.
    pub fn resume(&self) {
        self.0.resumes.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the counters so far.
    pub fn status(&self) -> OnErrorStatus {
        let shared = &*self.0;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        OnErrorStatus {
            read_errors: of(&shared.read_errors),
            write_errors: of(&shared.write_errors),
            no_space: of(&shared.no_space),
            repeated: of(&shared.repeated),
            stops: of(&shared.stops),
            held: shared.held.load(Ordering::Relaxed),
            waiting: shared.waiting.load(Ordering::Relaxed),
            last: *shared.last.lock().unpoisoned(),
        }
    }
}

/// Another volume with a policy for requests that fail. Its queues are the other volume's own.
#[derive(Debug)]
pub struct OnErrorVolume {
    volume: Arc<dyn Volume>,
    handle: OnErrorHandle,
}

impl OnErrorVolume {
    /// `volume` with this policy; `name` is for log lines.
    pub fn new(volume: Arc<dyn Volume>, policy: OnError, name: &str) -> Self {
        Self::with_clock(volume, policy, name, Arc::new(SystemClock))
    }

    /// Creates the volume with another clock, for tests.
    pub fn with_clock(
        volume: Arc<dyn Volume>,
        policy: OnError,
        name: &str,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            volume,
            handle: OnErrorHandle::new(policy, name, clock),
        }
    }

    /// The policy, to be changed while the volume is in use.
    pub fn handle(&self) -> OnErrorHandle {
        self.handle.clone()
    }
}

impl Volume for OnErrorVolume {
    fn info(&self) -> Info {
        self.volume.info()
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        let policy = QueuePolicy::new(self.handle.0.clone(), io.ending());
        Ok(self.volume.open(io)?.with_policy(policy))
    }

    fn id(&self) -> Vec<u8> {
        self.volume.id()
    }

    /// Requests are repeated as a whole.
    fn atomic_writes(&self) -> AtomicWrites {
        self.volume.atomic_writes()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.volume)
    }

    fn on_error(&self) -> Option<OnErrorHandle> {
        Some(self.handle())
    }
}

#[cfg(test)]
mod tests;
