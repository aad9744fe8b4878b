//! Latency measurement of commands, from the copy of their entry until their completion is posted,
//! and classification of their failures.
//!
//! After every [`TIMED_EVERY`](probes::TIMED_EVERY) reads and writes of a controller on one worker,
//! the next one is timed. Its batch ends with it, so that later commands do not count towards its
//! latency; earlier ones in the batch have delayed it and do count. The position of the timed
//! command in its batch varies. Batches that are not timed cost one comparison and one subtraction.
//! Every command that leaves a batch and is neither read nor write is timed, because such commands
//! cost many times as much.

use super::namespaces::NamespaceTable;
use super::slots::{Kind, Slots};
use super::{Event, Events};
use crate::stats::IoStats;
use nvme::status::StatusCodeType;
use nvme::{Command, NvmOpcode, Status};
use probes::{Failure, IoKind, IoRecord, cycles};
use std::sync::Arc;
use std::time::Instant;

impl Kind {
    pub(super) fn io_kind(self) -> IoKind {
        match self {
            Kind::Read => IoKind::Read,
            Kind::Write | Kind::DurableWrite => IoKind::Write,
            Kind::Flush => IoKind::Flush,
            Kind::Verify | Kind::Other => IoKind::Other,
        }
    }
}

/// Returns the class of failure as which the counters count this status.
pub(super) fn failure_of(status: Status) -> Failure {
    let is = |other: Status| status.is(other);
    if is(Status::COMPARE_FAILURE) {
        Failure::Miscompare
    } else if is(Status::CAPACITY_EXCEEDED) {
        Failure::NoSpace
    } else if is(Status::LBA_OUT_OF_RANGE) {
        Failure::OutOfRange
    } else if is(Status::NAMESPACE_WRITE_PROTECTED) {
        Failure::ReadOnly
    } else if is(Status::DATA_TRANSFER_ERROR) {
        Failure::Memory
    } else if is(Status::ABORT_REQUESTED) {
        Failure::Aborted
    } else if is(Status::COMMAND_INTERRUPTED) {
        Failure::Interrupted
    } else if is(Status::INTERNAL_ERROR) {
        Failure::Internal
    } else {
        match status.sct() {
            StatusCodeType::MEDIA => Failure::Media,
            StatusCodeType::PATH => Failure::Path,
            StatusCodeType::GENERIC | StatusCodeType::COMMAND_SPECIFIC => Failure::Invalid,
            _ => Failure::Internal,
        }
    }
}

/// State of the latency measurement, which samples commands.
#[derive(Default)]
pub(super) struct LatencySampling {
    /// Number of commands to fetch before the next measurement.
    pub until_timed: u32,
    /// Position in its batch of the command to measure.
    pub place: u32,
    /// Fetch time of the current command on the general path; 0 if it is not timed.
    pub fetched_at: u64,
}

/// I/O counters of an engine, and the measurements for them.
pub(crate) struct IoCounters {
    pub io: Arc<IoStats>,
    /// I/O counters of commands for namespaces that do not exist.
    nowhere: Arc<IoRecord>,
    pub(super) sampling: LatencySampling,
    /// Time of the current round.
    pub(super) now: Instant,
    /// Time since which any command is outstanding.
    busy_since: Option<Instant>,
}

impl IoCounters {
    pub(super) fn new(io: Arc<IoStats>) -> Self {
        IoCounters {
            nowhere: io.namespace(0),
            io,
            sampling: LatencySampling::default(),
            now: Instant::now(),
            busy_since: None,
        }
    }

    /// Begins to count the time as busy when any command is outstanding.
    #[inline(always)]
    pub(super) fn begin_busy(&mut self, slots: &Slots) {
        if self.busy_since.is_none() && slots.in_use() > 0 {
            self.busy_since = Some(self.now);
        }
    }

    /// Adds the elapsed time to the busy time when no command is outstanding any more. Called once
    /// per round instead of per command.
    #[inline]
    pub(super) fn count_busy(&mut self, slots: &Slots) {
        if slots.in_use() == 0
            && let Some(since) = self.busy_since.take()
        {
            let busy = self.now.saturating_duration_since(since);
            self.io.busy_ns.add(busy.as_nanos() as u64);
        }
    }

    /// Returns the fetch time of a command on the general path; 0 when the command is not timed.
    pub(super) fn time_general(&mut self, command: &Command) {
        let sampled = std::mem::take(&mut self.sampling.fetched_at);
        self.sampling.fetched_at = match command.nvm_opcode() {
            NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE => sampled,
            _ => cycles().max(1),
        };
    }

    /// Counts a command that fails because the controller cannot reach its namespace. The host's
    /// choice of a path is not an error of the disk, and must not fill the error log.
    pub(super) fn passed_by(&self, namespaces: &NamespaceTable, status: Status, nsid: u32) {
        self.record_of(namespaces, nsid).failed(failure_of(status));
    }

    /// Counts a failed I/O command, and notifies the control half.
    #[cold]
    #[inline(never)]
    pub(super) fn failed(
        &self,
        namespaces: &NamespaceTable,
        events: &mut Events,
        (sqid, cid, status, (nsid, lba)): (u16, u16, Status, (u32, u64)),
    ) {
        let marked = namespaces.is_marked(status, nsid, lba);
        // The host has requested this error by Write Uncorrectable: the medium is not at fault.
        let failure = if marked {
            Failure::Aborted
        } else {
            failure_of(status)
        };
        self.record_of(namespaces, nsid).failed(failure);
        events.push_back(Event::Failed {
            sqid,
            cid,
            status,
            nsid,
            lba,
            marked,
        });
    }

    fn record_of<'a>(&'a self, namespaces: &'a NamespaceTable, nsid: u32) -> &'a IoRecord {
        namespaces
            .of_nsid(nsid)
            .map_or(&self.nowhere, |ns| &ns.record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pathing_error_is_no_media_failure() {
        let failure = failure_of(Status::CONTROLLER_PATHING_ERROR);
        assert_eq!(failure, Failure::Path);
        assert_eq!(failure_of(Status::WRITE_FAULT), Failure::Media);
    }
}
