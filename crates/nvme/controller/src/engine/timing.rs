//! Latency measurement of commands, from the copy of their entry until their completion is posted,
//! and classification of their failures.
//!
//! After every [`TIMED_EVERY`] reads and writes of a controller on one worker, the next one is
//! timed. Its batch ends with it, so that later commands do not count towards its latency; earlier
//! ones in the batch have delayed it and do count. The position of the timed command in its batch
//! varies. Batches that are not timed cost one comparison and one subtraction. Every command that
//! leaves a batch and is neither read nor write is timed, because such commands cost many times as
//! much.

use super::run::BatchOutcome;
use super::slots::Kind;
use super::{Engine, Event};
use doorbell::distance;
use nvme::status::StatusCodeType;
use nvme::{Command, NvmOpcode, Status};
use probes::{Failure, IoKind, TIMED_EVERY, cycles};

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

impl Engine {
    /// Runs a batch like [`Engine::run`], and measures the latency of its last command.
    #[cold]
    #[inline(never)]
    pub(super) fn run_timed(&mut self, qid: u16, limit: u32) -> (u32, BatchOutcome) {
        let Some(Some(sq)) = self.sqs.get(usize::from(qid)) else {
            return self.run(qid, limit);
        };
        let (outstanding, free) = (sq.outstanding, self.slots.free());
        let pending = distance(sq.head, sq.tail, sq.size).min(free);
        // The position of the timed command differs from batch to batch.
        self.sampling.place = self.sampling.place.wrapping_add(1);
        let wanted = (self.sampling.place % limit.max(1) + 1).min(pending).max(1);
        let slot = self.slots.upcoming(wanted as usize - 1);
        let begun = cycles().max(1);
        let (fetched, next) = self.run(qid, wanted);
        if fetched < wanted {
            // The batch ended before the command to be timed, so the next batch is timed instead.
            return (fetched, next);
        }
        self.sampling.until_timed = fetched.saturating_add(TIMED_EVERY - 1);
        let last = self.entries.get(fetched as usize - 1);
        let command: Option<&Command> = match &next {
            BatchOutcome::General(command)
            | BatchOutcome::Failed(command, _)
            | BatchOutcome::Refused(command, ..) => Some(command),
            _ => last.map(|entry| zerocopy::transmute_ref!(entry)),
        };
        let Some(command) = command else {
            return (fetched, next);
        };
        let ns = self.namespace_index(command.nsid.get()).ok();
        let Some(ns) = ns.and_then(|index| self.namespaces.get(index)) else {
            return (fetched, next);
        };
        let record = &ns.record;
        record.depth_seen(u64::from(outstanding) + u64::from(fetched));
        match &next {
            BatchOutcome::Idle if self.slots.free() == free => {
                let kind = match command.nvm_opcode() {
                    NvmOpcode::WRITE => IoKind::Write,
                    _ => IoKind::Read,
                };
                record.timed(kind, cycles().saturating_sub(begun));
            }
            BatchOutcome::Idle | BatchOutcome::Completed(_) => {
                if let Some(slot) = slot.and_then(|slot| self.slots.get(slot))
                    && slot.kind.io_kind().is_sampled()
                {
                    slot.fetched_at = begun;
                }
            }
            BatchOutcome::General(_) => self.sampling.fetched_at = begun,
            // A failed command is not timed, because it has not done its work.
            BatchOutcome::Failed(..) | BatchOutcome::Refused(..) => {}
        }
        (fetched, next)
    }

    /// Returns the fetch time of a command on the general path; 0 when the command is not timed.
    pub(super) fn time_general(&mut self, command: &Command) {
        let sampled = std::mem::take(&mut self.sampling.fetched_at);
        self.sampling.fetched_at = match command.nvm_opcode() {
            NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE => sampled,
            _ => cycles().max(1),
        };
    }

    /// Records in the counters the latency of a command that was fetched at `fetched_at`, in
    /// cycles.
    #[cold]
    #[inline(never)]
    pub(super) fn timed(&self, ns: usize, kind: Kind, fetched_at: u64) {
        if let Some(ns) = self.namespaces.get(ns) {
            let cycles = cycles().saturating_sub(fetched_at);
            ns.record.timed(kind.io_kind(), cycles);
        }
    }

    /// Counts a command that fails because the controller cannot reach its namespace. The host's
    /// choice of a path is not an error of the disk, and must not fill the error log.
    pub(super) fn passed_by(&self, status: Status, nsid: u32) {
        let index = self.namespace_index(nsid).ok();
        let ns = index.and_then(|index| self.namespaces.get(index));
        let record = ns.map_or(&self.nowhere, |ns| &ns.record);
        record.failed(failure_of(status));
    }

    /// Counts a failed I/O command, and notifies the control half.
    #[cold]
    #[inline(never)]
    pub(super) fn failed(&mut self, sqid: u16, cid: u16, status: Status, (nsid, lba): (u32, u64)) {
        let index = self.namespace_index(nsid).ok();
        let ns = index.and_then(|index| self.namespaces.get(index));
        let record = ns.map_or(&self.nowhere, |ns| &ns.record);
        let marked = self.is_marked(status, nsid, lba);
        // The host has requested this error by Write Uncorrectable: the medium is not at fault.
        let failure = if marked {
            Failure::Aborted
        } else {
            failure_of(status)
        };
        record.failed(failure);
        self.events.push_back(Event::Failed {
            sqid,
            cid,
            status,
            nsid,
            lba,
            marked,
        });
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
