//! The control half of Write Uncorrectable: notification of the other engines and controllers, the
//! commands that wait for them, and the commit that precedes completion. Module
//! [`marks`](crate::marks) describes the whole.

use super::Controller;
use super::migration::QueueOwner;
use crate::engine::{Change, Marking, Order};
use crate::marks::{MAX_INLINE_RANGES, MAX_RANGES, MarkTable, MarkedRanges, Marks};
use crate::subsystem::AwaitedRelease;
use nvme::Status;
use std::sync::{Arc, Weak};

/// A Write Uncorrectable command with marked blocks, waiting until every engine has applied the
/// marks.
struct WaitingCommand {
    place: QueueOwner,
    tag: u64,
    /// For each remote engine, the number of the order that the engine has to apply first.
    orders: Vec<u64>,
    /// Reference that expires when all other controllers have applied the changed marks.
    awaited: Weak<AwaitedRelease>,
}

/// Completion of a command that has changed marks.
struct MarkCompletion {
    place: QueueOwner,
    tag: u64,
    /// Status of the completion; `None` when the command's own status applies.
    status: Option<Status>,
}

/// Marks of a controller's namespaces, and the commands that wait for engines or the commit.
#[derive(Default)]
pub(crate) struct MarkingState {
    pub table: Arc<MarkTable>,
    waiting: Vec<WaitingCommand>,
    /// Commands that complete when their changes of marks are committed to the control state.
    uncommitted: Vec<MarkCompletion>,
}

impl MarkingState {
    /// Handles a controller-level reset: the waiting commands are dropped.
    pub fn reset(&mut self) {
        self.waiting.clear();
        self.uncommitted.clear();
    }

    /// Returns whether commands wait until every engine has applied their marks.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}

impl Controller {
    /// Changes marks on behalf of a command in the engine at `place`.
    pub(super) fn change_marks(&mut self, place: QueueOwner, marking: Marking) {
        let Marking { tag, ns, change } = marking;
        let found = self.engine.namespaces.get(ns);
        let Some((nsid, marks)) = found.map(|ns| (ns.config.nsid, ns.marks.clone())) else {
            let status = Some(Status::INTERNAL_ERROR);
            return self.end_marking(MarkCompletion { place, tag, status });
        };
        match change {
            Change::Mark(slba, blocks) => {
                if !marks.mark(slba, blocks, self.most_ranges(&marks, 2)) {
                    // No NVMe status fits a full mark table. Writes to marked blocks make room.
                    let status = Some(Status::INTERNAL_ERROR);
                    return self.end_marking(MarkCompletion { place, tag, status });
                }
                crash::point!("controller.mark.marked");
                self.order_all(|| Order::LookAtMarks(ns));
                let waiting = WaitingCommand {
                    place,
                    tag,
                    orders: self.migration.orders(),
                    awaited: self.tell_of_marks(nsid, true),
                };
                self.marks.waiting.push(waiting);
                self.migration.wait();
                self.end_waiting_marks();
                self.blocks_marked();
            }
            Change::Written(ranges) => {
                let most = self.most_ranges(&marks, 1);
                let status = (!marks.written(&ranges, most)).then_some(Status::INTERNAL_ERROR);
                self.marks_went(nsid, &marks);
                self.end_marking(MarkCompletion { place, tag, status });
            }
        }
    }

    /// Returns the maximum number of ranges of these marks: the controller's limit, divided by
    /// `share`, without the ranges of its other namespaces. Only this thread changes marks that the
    /// next process has to restore, so the count cannot change before the caller uses it.
    fn most_ranges(&self, marks: &Marks, share: usize) -> usize {
        let others = self.marks.table.len().saturating_sub(marks.len());
        let most = if self.saves_many_marks() {
            MAX_RANGES
        } else {
            // Half of the control state's room is for the copy that the host is reading.
            MAX_INLINE_RANGES / 2
        };
        (most / share).saturating_sub(others)
    }

    /// Handles the removal of marks. After the last one, the namespace's commands use the fast path
    /// again.
    fn marks_went(&mut self, nsid: u32, marks: &Marks) {
        self.touch();
        if marks.any() {
            return;
        }
        if let Ok(index) = self.engine.namespaces.index_of(nsid) {
            self.order_all(|| Order::LookAtMarks(index));
        }
        self.tell_of_marks(nsid, false);
    }

    /// Ends the commands whose marks every engine has applied. Returns whether there were any.
    pub(super) fn end_waiting_marks(&mut self) -> bool {
        let mut worked = false;
        for waiting in std::mem::take(&mut self.marks.waiting) {
            let known = self.migration.has_applied(&waiting.orders);
            if !known || waiting.awaited.strong_count() > 0 {
                self.marks.waiting.push(waiting);
                continue;
            }
            worked = true;
            let WaitingCommand { place, tag, .. } = waiting;
            let status = None;
            self.end_marking(MarkCompletion { place, tag, status });
        }
        worked
    }

    /// Completes a command once its changes of marks are committed.
    fn end_marking(&mut self, end: MarkCompletion) {
        self.touch();
        if self.survives() {
            self.marks.uncommitted.push(end)
        } else {
            self.send_end(end)
        }
    }

    fn send_end(&mut self, MarkCompletion { place, tag, status }: MarkCompletion) {
        self.order(place, Order::EndMarking(tag, status));
    }

    /// Completes the commands that waited for their changes of marks to be committed.
    pub(crate) fn marks_committed(&mut self) {
        crash::point!("controller.mark.committed");
        for end in std::mem::take(&mut self.marks.uncommitted) {
            self.send_end(end);
        }
    }

    // ---- other operations that remove marks

    /// Removes all marks of namespaces that were erased.
    pub(crate) fn unmark_all(&mut self, nsids: &[u32]) {
        for &nsid in nsids {
            self.cut_marks(nsid, 0);
        }
    }

    /// Removes the marks beyond a namespace's end, after it was resized to `blocks` blocks.
    pub(crate) fn cut_marks(&mut self, nsid: u32, blocks: u64) {
        let marks = self.marks.table.of(nsid);
        if marks.cut(blocks) {
            self.marks_went(nsid, &marks);
        }
    }

    // ---- restart

    /// Restores the marks of the previous process, limited to existing blocks and the maximum
    /// number of ranges. Shared namespaces have their marks already
    /// ([`Subsystem::expect`](crate::Subsystem::expect)).
    pub(crate) fn restore_marks(&mut self, saved: &MarkedRanges) {
        if self.is_shared() {
            return;
        }
        for (nsid, ranges) in saved {
            let Ok(index) = self.engine.namespaces.index_of(*nsid) else {
                continue;
            };
            let Some(ns) = self.engine.namespaces.get(index) else {
                continue;
            };
            let (marks, size) = (ns.marks.clone(), ns.blocks);
            for &(slba, blocks) in ranges {
                let there = blocks.min(size.saturating_sub(slba));
                marks.mark(slba, there, self.most_ranges(&marks, 1));
            }
            self.order_all(|| Order::LookAtMarks(index));
        }
    }
}
