//! Error policy: failed requests are reported, repeated, or held until a user has resumed the
//! volume.
//!
//! Successful requests bypass all of this. A front-end that receives a failed completion offers the
//! request to [`OpenQueue::failed`], where the volume's policy decides. The policy can be changed
//! at any time through the [`OnErrorHandle`]. A request that has to wait or to be repeated enters a
//! queue that is put in front of the volume's own queue at the first failure ([`held`]).
//!
//! Several errors are always reported. Written data that could not be made durable
//! ([`IoErrorKind::NotDurable`], and every failed flush) may be lost, and a repeated fsync would
//! succeed all the same, because the kernel discards data that it could not write. A request that
//! is invalid itself (its range, its memory) would fail again.

mod held;

use crate::clock::{Clock, SystemClock};
use crate::{
    Allocation, AtomicWrites, Completion, Info, Io, IoError, IoErrorKind, Op, OpenQueue, Request,
    Volume,
};
use crate::{VolumeError, limit::MAX_SLEEP};
pub(crate) use held::QueuePolicy;
use probes::LogLimit;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use sync::Unpoisoned;

/// Time for which a request is repeated, from its first failure on; then it fails. Shorter than the
/// I/O time-out of a guest's driver (Linux: 30 s), which would reset the whole controller.
pub const RETRY_FOR: Duration = Duration::from_secs(20);

macro_rules! define_actions {
    ($($(#[$doc:meta])* $action:ident,)*) => {
        /// Action of the error policy for a failed request.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[repr(u8)]
        pub enum ErrorAction {
            $($(#[$doc])* $action,)*
        }

        impl ErrorAction {
            /// All actions of the error policy, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$action),*];
        }
    };
}

define_actions! {
    /// Report the error to the guest.
    #[default]
    Report,
    /// Repeat the request with growing pauses for [`RETRY_FOR`], then report the error.
    Retry,
    /// Hold the request and all later ones until the operator resumes the volume.
    Stop,
    /// Acts like `Stop` when there is no space left, otherwise like `Report`. For requests that
    /// change the volume.
    EnospcStop,
}

impl ErrorAction {
    fn of(number: u8) -> Self {
        Self::ALL
            .get(usize::from(number))
            .copied()
            .unwrap_or_default()
    }
}

/// Effect of the policy on one failed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// The guest gets the error.
    Report,
    /// The request is repeated for [`RETRY_FOR`].
    Retry,
    /// The request waits until the operator resumes the volume.
    Stop,
}

/// Error policy of a volume: the actions for failed requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OnError {
    /// Action for failed reads. [`ErrorAction::EnospcStop`] acts like [`ErrorAction::Report`] here.
    pub read: ErrorAction,
    /// Action for failed requests of all other kinds.
    pub write: ErrorAction,
}

/// Counters and state of a volume's failed requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OnErrorStatus {
    /// Number of failures of reads; a repeated request counts each time.
    pub read_errors: u64,
    /// Number of failures of other requests; a repeated request counts each time.
    pub write_errors: u64,
    /// Number of failures because the storage had no space left.
    pub no_space: u64,
    /// Number of repetitions of failed requests.
    pub repeated: u64,
    /// Number of times that a failure has stopped the volume.
    pub stops: u64,
    /// Requests that wait until the volume is resumed, including those that arrived after the stop.
    pub held: usize,
    /// Number of failed requests that wait to be repeated.
    pub waiting: usize,
    /// Time and error of the last failure; `None` if no request has failed.
    pub last: Option<(SystemTime, IoError)>,
}

#[derive(Debug)]
pub(crate) struct OnErrorState {
    clock: Arc<dyn Clock>,
    /// Name of the volume in log messages.
    name: String,
    read: AtomicU8,
    write: AtomicU8,
    /// Number of times that the operator has resumed the volume.
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
    /// Limit of the log lines about failures that are reported to the guest.
    reported: LogLimit,
}

/// Returns whether the storage has failed, so that the request may succeed later.
fn is_of_storage(kind: IoErrorKind) -> bool {
    match kind {
        IoErrorKind::MediaRead
        | IoErrorKind::MediaWrite
        | IoErrorKind::NoSpace
        | IoErrorKind::Truncated
        | IoErrorKind::Gone
        | IoErrorKind::Unreachable => true,
        IoErrorKind::NotDurable
        | IoErrorKind::ReadOnly
        | IoErrorKind::OutOfRange
        | IoErrorKind::Invalid
        | IoErrorKind::Memory
        | IoErrorKind::Aborted
        | IoErrorKind::Unsupported
        | IoErrorKind::Busy => false,
    }
}

impl OnErrorState {
    /// Returns the effect of the policy on a request that failed with this error.
    fn effect(&self, op: Op, error: IoError) -> Effect {
        if !is_of_storage(error.kind) || op == Op::Flush {
            return Effect::Report;
        }
        let number = if op.changes() {
            &self.write
        } else {
            &self.read
        };
        // Relaxed: it stands for itself.
        match ErrorAction::of(number.load(Ordering::Relaxed)) {
            ErrorAction::Report => Effect::Report,
            ErrorAction::Retry => Effect::Retry,
            ErrorAction::Stop => Effect::Stop,
            ErrorAction::EnospcStop if op.changes() && error.kind == IoErrorKind::NoSpace => {
                Effect::Stop
            }
            ErrorAction::EnospcStop => Effect::Report,
        }
    }

    /// Counts a failed request, whatever the policy does with it.
    fn count(&self, op: Op, error: IoError) {
        let counter = if op.changes() {
            &self.write_errors
        } else {
            &self.read_errors
        };
        counter.fetch_add(1, Ordering::Relaxed);
        if error.kind == IoErrorKind::NoSpace {
            self.no_space.fetch_add(1, Ordering::Relaxed);
        }
        *self.last.lock().unpoisoned() = Some((SystemTime::now(), error));
    }

    /// Logs a failure of the storage that is reported to the guest.
    fn reported(&self, op: Op, error: IoError) {
        if !is_of_storage(error.kind) && error.kind != IoErrorKind::NotDurable {
            return;
        }
        let what = match op {
            Op::Read => "read",
            Op::Flush => "flush",
            _ => "write",
        };
        self.reported.line(|left_out| {
            tracing::error!(
                left_out,
                "{}: a {what} failed, and the guest gets the error: {error}",
                self.name
            );
        });
    }

    /// Records and logs that the volume was stopped by a failure.
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

/// Handle to a volume's error policy. Any thread may read and change the policy while the volume is
/// in use.
#[derive(Debug, Clone)]
pub struct OnErrorHandle(Arc<OnErrorState>);

impl OnErrorHandle {
    fn new(policy: OnError, name: &str, clock: Arc<dyn Clock>) -> Self {
        let handle = Self(Arc::new(OnErrorState {
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
            reported: LogLimit::default(),
        }));
        handle.set(policy);
        handle
    }

    /// Changes the policy, also for waiting requests. A sleeping worker notices within a tenth of a
    /// second.
    pub fn set(&self, policy: OnError) {
        self.0.read.store(policy.read as u8, Ordering::Relaxed);
        self.0.write.store(policy.write as u8, Ordering::Relaxed);
    }

    /// Returns the error policy that is in effect.
    pub fn get(&self) -> OnError {
        let of = |number: &AtomicU8| ErrorAction::of(number.load(Ordering::Relaxed));
        OnError {
            read: of(&self.0.read),
            write: of(&self.0.write),
        }
    }

    /// Repeats all waiting requests; those of other workers within a tenth of a second. A request
    /// that fails again waits again.
    pub fn resume(&self) {
        self.0.resumes.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the counters of failed requests so far.
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

/// A wrapper that applies an error policy to a volume. Its queues are those of the inner volume
/// until a request fails.
#[derive(Debug)]
pub struct OnErrorVolume {
    volume: Arc<dyn Volume>,
    handle: OnErrorHandle,
}

impl OnErrorVolume {
    /// Wraps `volume` with this policy; `name` appears in log messages.
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

    /// Returns the handle for changing the policy while the volume is in use.
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

    /// Returns the promise of the inner volume. Requests are repeated as a whole.
    fn atomic_writes(&self) -> AtomicWrites {
        self.volume.atomic_writes()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.volume)
    }

    fn allocation(&self, offset: u64, len: u64) -> Option<(Allocation, u64)> {
        self.volume.allocation(offset, len)
    }

    fn on_error(&self) -> Option<OnErrorHandle> {
        Some(self.handle())
    }
}

#[cfg(test)]
mod tests;
