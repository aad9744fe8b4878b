//! Record of a front-end's completed commands: by kind, with bytes, failures and latencies. One
//! thread writes a record, any thread reads it.

use crate::{Counter, Histogram};
use std::sync::OnceLock;

/// Sampling interval of a queue's reads and writes for timing. A prime, so that a load with a
/// period of its own does not show the same command each time.
pub const TIMED_EVERY: u32 = 61;

/// Kinds of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// Data is transferred to the host; includes Compare.
    Read,
    /// Data is transferred from the host.
    Write,
    /// Makes written data durable.
    Flush,
    /// Remaining kinds: deallocation, zeroing, verification, and unknown commands.
    Other,
}

impl IoKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Flush, Self::Other];

    /// In metrics and statistics.
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

/// Reason of a command's failure, as far as operators must distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The volume could not read or write its medium.
    Media,
    /// The volume has no room left.
    NoSpace,
    /// Blocks beyond the end.
    OutOfRange,
    /// A write to read-only data.
    ReadOnly,
    /// The host's memory was missing, or not at the address in the command.
    Memory,
    /// The host asked for it, or reset.
    Aborted,
    /// The command did not get its turn; the host should send it again.
    Interrupted,
    /// Compare found other data.
    Miscompare,
    /// A malformed or unsupported command.
    Invalid,
    /// The volume's server could not be reached.
    Path,
    /// A lost device below, and all remaining errors.
    Internal,
}

impl Failure {
    /// All of them.
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

    /// In metrics and statistics.
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

/// Record of one thread for one namespace, or of one queue of an export.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct IoRecord {
    /// By [`IoKind`]: arrays, because the kind of a command that ends is at hand as a number.
    operations: [Counter; IoKind::ALL.len()],
    /// By the first two kinds.
    bytes: [Counter; 2],
    failures: [Counter; Failure::ALL.len()],
    /// Made when the first one is recorded: many are never used.
    latencies: [OnceLock<Box<Histogram>>; IoKind::ALL.len()],
    depth: OnceLock<Box<Histogram>>,
}

impl IoRecord {
    /// Commands of a kind that ended, well or not.
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

    /// Bytes that the host has read.
    #[inline(always)]
    pub const fn bytes_read(&self) -> &Counter {
        let [read, _] = &self.bytes;
        read
    }

    /// Bytes that the host has written.
    #[inline(always)]
    pub const fn bytes_written(&self) -> &Counter {
        let [_, written] = &self.bytes;
        written
    }

    /// Records the end of a read or write (number 0 or 1) of this many bytes. Only the owner calls
    /// this.
    #[inline(always)]
    pub fn ended(&self, kind: usize, bytes: u64) {
        if let (Some(commands), Some(moved)) = (self.operations.get(kind), self.bytes.get(kind)) {
            commands.add(1);
            moved.add(bytes);
        }
    }

    /// Commands of all kinds that ended.
    pub fn all_operations(&self) -> u64 {
        let counts = IoKind::ALL.map(|kind| self.operations(kind).get());
        counts.into_iter().fold(0, u64::wrapping_add)
    }

    /// Commands that failed for this reason.
    pub fn failures(&self, failure: Failure) -> u64 {
        self.failures
            .get(failure as usize)
            .map_or(0, |counter| counter.get())
    }

    /// Commands that failed.
    pub fn all_failures(&self) -> u64 {
        let counts = self.failures.iter().map(Counter::get);
        counts.fold(0, u64::wrapping_add)
    }

    /// Records a failed command. Only the owner calls this.
    #[cold]
    pub fn failed(&self, failure: Failure) {
        if let Some(counter) = self.failures.get(failure as usize) {
            counter.add(1);
        }
    }

    /// Records the [`cycles`](crate::cycles) of a command of this kind, from fetch to post. Only
    /// the owner calls this.
    #[cold]
    pub fn timed(&self, kind: IoKind, cycles: u64) {
        if let Some(histogram) = self.latencies.get(kind as usize) {
            histogram.get_or_init(Box::default).record(cycles);
        }
    }

    /// Records the number of outstanding commands of a queue when a command was fetched that is
    /// timed by [`TIMED_EVERY`]. Only the owner calls this.
    #[cold]
    pub fn depth_seen(&self, commands: u64) {
        self.depth.get_or_init(Box::default).record(commands);
    }

    /// The times of the commands of a kind that were timed ([`IoKind::is_sampled`]), in
    /// [`cycles`](crate::cycles); none as long as there is none.
    pub fn latency(&self, kind: IoKind) -> Option<&Histogram> {
        self.latencies.get(kind as usize)?.get().map(|h| &**h)
    }

    /// Returns the histogram of outstanding commands of its queues, as seen when a timed command
    /// was fetched.
    pub fn depth(&self) -> Option<&Histogram> {
        self.depth.get().map(|h| &**h)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_and_each_failure_has_its_own_place() {
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
    fn a_counter_begins_again_behind_its_last_value() {
        let counter = Counter::default();
        counter.set(u64::MAX);
        counter.add(3);
        assert_eq!(counter.get(), 2);
    }
}
