//! Merging of concurrent flushes and durable writes of a file into fewer fsyncs.
//!
//! The kernel executes each fsync and each durable write on a thread of its own. Hundreds of them
//! would compete with the worker for processor time that is charged to no client. Therefore each
//! file has at most one fsync in flight. Flushes that arrive meanwhile wait for the next one, which
//! covers all writes completed before it began. Durable writes beyond [`MAX_WRITES`] are done as
//! plain writes, and then wait for such an fsync.

use super::RingCore;
use crate::io::job::{KernelOp, RingJob};
use crate::{IoError, IoErrorKind, Op};

/// Maximum number of durable writes of a file that the kernel works on at one time.
const MAX_WRITES: u32 = 8;

/// Slots of a file with requests that need an fsync, which they share.
#[derive(Debug, Default)]
pub(super) struct Durable {
    /// Slot of the fsync that the kernel is executing, if any.
    leader: Option<u32>,
    /// Slots of requests that complete with the fsync in flight.
    riders: Vec<u32>,
    /// Slots of requests that need an fsync that begins later.
    waiting: Vec<u32>,
    /// Number of durable writes of the file that the kernel is executing.
    writes: u32,
}

impl Durable {
    /// Returns whether the next operation of a slot is sent to the kernel. Otherwise the slot
    /// waits, and [`RingCore::synced`] continues it.
    #[inline]
    pub(super) fn admit(&mut self, slot: u32, job: &mut RingJob) -> bool {
        match job.step {
            KernelOp::Sync => {
                let leader = *self.leader.get_or_insert(slot);
                if leader != slot {
                    self.waiting.push(slot);
                }
                leader == slot
            }
            KernelOp::Durable | KernelOp::Bounce if job.request.op == (Op::Write { fua: true }) => {
                if self.writes >= MAX_WRITES {
                    job.synced_later = true;
                } else if !job.synced_later {
                    self.writes += 1;
                    job.is_durable_write = true;
                }
                true
            }
            _ => true,
        }
    }

    /// Updates the number of durable writes in flight after an operation of a request has
    /// completed.
    #[inline]
    pub(super) fn answered(&mut self, job: &mut RingJob) {
        if std::mem::take(&mut job.is_durable_write) {
            self.writes = self.writes.saturating_sub(1);
        }
    }
}

impl RingCore {
    /// Ends the request of a slot. If it was its file's fsync, the requests that waited for it end
    /// too, and the next fsync begins for all later ones.
    pub(super) fn synced(&mut self, slot: u32, file: usize, result: Result<(), IoError>) {
        let Some(open) = self.files.get_mut(file).and_then(Option::as_mut) else {
            return;
        };
        if open.durable.leader != Some(slot) {
            return;
        }
        open.durable.leader = None;
        let mut riders = std::mem::take(&mut open.durable.riders);
        let mut waiting = std::mem::take(&mut open.durable.waiting);
        // The leader was cancelled, but its riders were not.
        let cancelled = result.is_err_and(|error| error.kind == IoErrorKind::Aborted);
        if cancelled {
            waiting.splice(0..0, riders.drain(..));
        } else {
            for rider in riders.drain(..) {
                let ended = self.end_later(rider as usize, result);
                self.ready.extend(ended);
            }
        }
        let mut begun = 0;
        for &next in &waiting {
            begun += 1;
            let index = next as usize;
            let job = self.slots.get(index).and_then(|slot| slot.job.as_ref());
            let began = match job {
                Some(job) if job.cancelled => Err(IoErrorKind::Aborted),
                _ => self.operate(index),
            };
            let Err(kind) = began else {
                self.urgent = true;
                break;
            };
            let ended = self.end_later(index, Err(kind.into()));
            self.ready.extend(ended);
        }
        if let Some(open) = self.files.get_mut(file).and_then(Option::as_mut) {
            waiting.drain(..begun);
            open.durable.riders = waiting;
            // Empty, and its memory is used again.
            open.durable.waiting = riders;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // A test fails by a panic.
mod tests {
    use super::super::name;
    use super::*;
    use crate::{Completion, FileOptions, FileVolume, Io, IoOptions, Request, Volume};
    use dma::SegmentList;

    /// Completes the fsync in flight with `answer`. Returns the tag of each request that ends with
    /// it, and whether it succeeded.
    fn answer(core: &mut RingCore, answer: i32) -> Vec<(u64, bool)> {
        let open = core.files.iter().flatten().next().unwrap();
        let leader = open.durable.leader.unwrap() as usize;
        let generation = core.slots.get(leader).unwrap().generation;
        let own = core.answer(name(leader, generation), answer);
        let all = own.into_iter().chain(core.ready.drain(..));
        all.map(|Completion { tag, result, .. }| (tag, result.is_ok()))
            .collect()
    }

    /// Checks that cancelling a flush does not cancel other flushes that wait for its fsync.
    #[test]
    fn cancelled_flush_does_not_cancel_waiters() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.raw");
        std::fs::write(&path, [0; 4096]).unwrap();
        let io = Io::new(IoOptions::default());
        let volume = FileVolume::open(path, FileOptions::default()).unwrap();
        let mut queue = volume.open(&io).unwrap();
        for tag in 0..5 {
            let request = Request::transfer(tag, crate::Op::Flush, 0, SegmentList::new());
            assert!(queue.submit(request).is_none());
        }
        let Some(ring) = io.ring.get() else {
            return testkit::skip("volume: flushes that are cancelled", "there is no io_uring");
        };
        let mut core = ring.core();
        assert_eq!(answer(&mut core, 0), [(0, true)]);
        // The next one leads, and all remaining ones ride.
        assert_eq!(answer(&mut core, -libc::ECANCELED), [(1, false)]);
        assert_eq!(answer(&mut core, 0), [(2, true), (3, true), (4, true)]);
        assert_eq!(
            core.slots.iter().filter(|slot| slot.job.is_some()).count(),
            0
        );
    }
}
