//! Early end of a command, on behalf of Abort ("NVMe Base 2.1", 5.1.1).

use super::namespaces::NamespaceTable;
use super::queues::Queues;
use super::slots::Slots;
use super::{Event, Events};

/// Maximum number of command identifiers in each queue's list of commands to abort when fetched.
const WAITING: usize = 64;

impl Queues {
    /// Tries to end a command early, whether it is outstanding in a volume or was submitted and not
    /// fetched yet. [`Event::AbortDone`] reports the outcome. Returns `false` when the command does
    /// not exist.
    #[must_use]
    pub(super) fn abort(
        &mut self,
        slots: &mut Slots,
        namespaces: &mut NamespaceTable,
        (sqid, cid): (u16, u16),
    ) -> bool {
        if let Some(index) = slots.find(sqid, cid) {
            let tag = slots.tag(index);
            if let Some(slot) = slots.get(index) {
                slot.abort = true;
                namespaces.cancel(slot.ns, tag);
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
    pub(super) fn forget_aborts(&mut self, sqid: u16, events: &mut Events) {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(sqid)) else {
            return;
        };
        for cid in std::mem::take(&mut sq.abort_on_fetch) {
            events.push_back(Event::AbortDone {
                sqid,
                cid,
                aborted: false,
            });
        }
    }
}
