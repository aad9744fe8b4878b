//! Early end of a command, on behalf of Abort ("NVMe Base 2.1", 5.1.1).

use super::{Engine, Event};

/// Maximum number of command identifiers in each queue's list of commands to abort when fetched.
const WAITING: usize = 64;

impl Engine {
    /// Tries to end a command early, whether it is outstanding in a volume or was submitted and not
    /// fetched yet. [`Event::AbortDone`] reports the outcome, or [`Event::AbortMissed`] that no
    /// such command exists.
    pub(super) fn abort(&mut self, sqid: u16, cid: u16) {
        if !self.begin_abort(sqid, cid) {
            self.events.push_back(Event::AbortMissed { sqid, cid });
        }
    }

    /// Begins the abort of a command. Returns `false` when the command does not exist.
    fn begin_abort(&mut self, sqid: u16, cid: u16) -> bool {
        if let Some(index) = self.slots.find(sqid, cid) {
            let tag = self.slots.tag(index);
            if let Some(slot) = self.slots.get(index) {
                slot.abort = true;
                if let Some(ns) = self.namespaces.get_mut(slot.ns) {
                    ns.queue.cancel(tag);
                    if let Some(passthrough) = &mut ns.passthrough {
                        passthrough.abort(tag);
                    }
                }
            }
            return true;
        }
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(sqid)) else {
            return false;
        };
        let Some(ring) = sq.memory.ring() else {
            return false;
        };
        if sq.deleting || sq.abort_on_fetch.len() >= WAITING {
            return false;
        }
        let mut at = sq.head;
        while at != sq.tail {
            let [_, _, low, high, ..] = ring.load64(at);
            if u16::from_le_bytes([low, high]) == cid {
                if !sq.abort_on_fetch.contains(&cid) {
                    sq.abort_on_fetch.push(cid);
                }
                return true;
            }
            at = if at + 1 == sq.size { 0 } else { at + 1 };
        }
        false
    }

    /// Completes Abort commands that wait for unfetched commands of a queue from which nothing is
    /// fetched any more.
    pub(super) fn forget_aborts(&mut self, sqid: u16) {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(sqid)) else {
            return;
        };
        for cid in std::mem::take(&mut sq.abort_on_fetch) {
            self.events.push_back(Event::AbortDone {
                sqid,
                cid,
                aborted: false,
            });
        }
    }
}
