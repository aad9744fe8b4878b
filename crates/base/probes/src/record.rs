//! Record of a front-end's completed commands: by kind, with bytes, failures and latencies. One
//! thread writes a record, any thread reads it.

use crate::{Counter, Histogram};
use std::sync::OnceLock;

/// Sampling interval of a queue's reads and writes for timing. A prime, so that a load with a
/// period of its own does not show the same command each time.
pub const TIMED_EVERY: u32 = 61;

/// Kind of a command, as counters and metrics distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// Transfers data to the host, or compares data.
    Read,
    /// Transfers data from the host.
    Write,
    /// Makes written data durable.
    Flush,
    /// Other commands: deallocation, zeroing, verification, and unknown ones.
    Other,
}

impl IoKind {
    /// All kinds of commands.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Flush, Self::Other];

    /// Returns the name of the kind in metrics and statistics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Other => "other",
        }
    }

    /// Returns whether only one command in [`TIMED_EVERY`] of this kind is timed, instead of each.
    pub const fn is_sampled(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}

/// Reason of a command's failure, as far as operators need to distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The volume could not read or write its medium.
    Media,
    /// The volume has no room left.
    NoSpace,
    /// The blocks lie beyond the end of the namespace.
    OutOfRange,
    /// A write to read-only data.
    ReadOnly,
    /// The host's memory was missing, or not at the address in the command.
    Memory,
    /// The host aborted the command, or reset the controller.
    Aborted,
    /// The command was interrupted before its execution; the host should retry it.
    Interrupted,
    /// Compare found different data.
    Miscompare,
    /// The command is malformed or unsupported.
    Invalid,
    /// The volume's server could not be reached.
    Path,
    /// The device below was lost, or any other error.
    Internal,
}

impl Failure {
    /// All classes of failures.
    pub const ALL: [Self; 11] = [
        Self::Media,
        Self::NoSpace,
        Self::OutOfRange,
        Self::ReadOnly,
        Self::Memory,
        Self::Aborted,
        Self::Interrupted,
        Self::Miscompare,
        Self::Invalid,
        Self::Path,
        Self::Internal,
    ];

    /// Returns the name of the failure class in metrics and statistics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Media => "media",
            Self::NoSpace => "no_space",
            Self::OutOfRange => "out_of_range",
            Self::ReadOnly => "read_only",
            Self::Memory => "memory",
            Self::Aborted => "aborted",
            Self::Interrupted => "interrupted",
            Self::Miscompare => "miscompare",
            Self::Invalid => "invalid",
            Self::Path => "path",
            Self::Internal => "internal",
        }
    }
}

/// Record of completed commands, written by one thread for one namespace or for one queue of an
/// export.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct IoRecord {
    /// Numbers of completed commands, by [`IoKind`]. An array, because the kind of a completed
    /// command is available as a number.
    operations: [Counter; IoKind::ALL.len()],
    /// Number of bytes read, and number of bytes written.
    bytes: [Counter; 2],
    failures: [Counter; Failure::ALL.len()],
    /// Latencies by [`IoKind`], each allocated when the first one is recorded, because many are
    /// never used.
    latencies: [OnceLock<Box<Histogram>>; IoKind::ALL.len()],
    depth: OnceLock<Box<Histogram>>,
}

impl IoRecord {
    /// Returns the counter of completed commands of one kind, including failed ones.
    #[inline(always)]
    pub const fn operations(&self, kind: IoKind) -> &Counter {
        let [reads, writes, flushes, others] = &self.operations;
        match kind {
            IoKind::Read => reads,
            IoKind::Write => writes,
            IoKind::Flush => flushes,
            IoKind::Other => others,
        }
    }

    /// Returns the counter of bytes that the host has read.
    #[inline(always)]
    pub const fn bytes_read(&self) -> &Counter {
        let [read, _] = &self.bytes;
        read
    }

    /// Returns the counter of bytes that the host has written.
    #[inline(always)]
    pub const fn bytes_written(&self) -> &Counter {
        let [_, written] = &self.bytes;
        written
    }

    /// Records a completed read or write (kind 0 or 1) of this many bytes. Only the owning thread
    /// may call this.
    #[inline(always)]
    pub fn ended(&self, kind: usize, bytes: u64) {
        if let (Some(commands), Some(moved)) = (self.operations.get(kind), self.bytes.get(kind)) {
            commands.add(1);
            moved.add(bytes);
        }
    }

    /// Returns the number of completed commands of all kinds.
    pub fn all_operations(&self) -> u64 {
        let counts = IoKind::ALL.map(|kind| self.operations(kind).get());
        counts.into_iter().fold(0, u64::wrapping_add)
    }

    /// Returns the number of commands that have failed for this class of reasons.
    pub fn failures(&self, failure: Failure) -> u64 {
        self.failures
            .get(failure as usize)
            .map_or(0, |counter| counter.get())
    }

    /// Returns the number of commands that have failed for any reason.
    pub fn all_failures(&self) -> u64 {
        let counts = self.failures.iter().map(Counter::get);
        counts.fold(0, u64::wrapping_add)
    }

    /// Records a failed command. Only the owning thread may call this.
    #[cold]
    pub fn failed(&self, failure: Failure) {
        if let Some(counter) = self.failures.get(failure as usize) {
            counter.add(1);
        }
    }

    /// Records the [`cycles`](crate::cycles) that a command of this kind took from its fetch to its
    /// posted completion. Only the owning thread may call this.
    #[cold]
    pub fn timed(&self, kind: IoKind, cycles: u64) {
        if let Some(histogram) = self.latencies.get(kind as usize) {
            histogram.get_or_init(Box::default).record(cycles);
        }
    }

    /// Records the number of a queue's outstanding commands, when a timed command is fetched
    /// ([`TIMED_EVERY`]). Only the owning thread may call this.
    #[cold]
    pub fn depth_seen(&self, commands: u64) {
        self.depth.get_or_init(Box::default).record(commands);
    }

    /// Returns the latencies of timed commands of a kind ([`IoKind::is_sampled`]), in
    /// [`cycles`](crate::cycles); `None` when there are none yet.
    pub fn latency(&self, kind: IoKind) -> Option<&Histogram> {
        self.latencies.get(kind as usize)?.get().map(|h| &**h)
    }

    /// Returns the histogram of the queues' outstanding commands, sampled when a timed command was
    /// fetched.
    pub fn depth(&self) -> Option<&Histogram> {
        self.depth.get().map(|h| &**h)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_and_failure_has_own_counter() {
        let record = IoRecord::default();
        for (i, kind) in IoKind::ALL.into_iter().enumerate() {
            assert!(record.latency(kind).is_none());
            record.operations(kind).add(i as u64 + 1);
            record.timed(kind, 1000 * (i as u64 + 1));
        }
        for (i, failure) in Failure::ALL.into_iter().enumerate() {
            (0..=i).for_each(|_| record.failed(failure));
        }
        for (i, kind) in IoKind::ALL.into_iter().enumerate() {
            assert_eq!(record.operations(kind).get(), i as u64 + 1);
            let summary = record.latency(kind).map(Histogram::summary);
            assert_eq!(summary.map(|s| s.max), Some(1000 * (i as u64 + 1)));
        }
        for (i, failure) in Failure::ALL.into_iter().enumerate() {
            assert_eq!(record.failures(failure), i as u64 + 1, "{failure:?}");
        }
        let sum_to = |count: usize| (count * (count + 1) / 2) as u64;
        let sums = (sum_to(IoKind::ALL.len()), sum_to(Failure::ALL.len()));
        assert_eq!((record.all_operations(), record.all_failures()), sums);
    }

    #[test]
    fn counter_wraps_at_maximum() {
        let counter = Counter::default();
        counter.set(u64::MAX);
        counter.add(3);
        assert_eq!(counter.get(), 2);
    }
}
