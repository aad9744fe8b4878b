//! Answered requests of a queue: used entries that were written, published and signalled.

use crate::eventfd::Signal;
use crate::inflight::Tracker;
use crate::log::UsedRingLog;
use crate::ring::{Ring, RingEntries, UsedIndex, need_event};
use crate::stats::QueueStats;
use std::sync::atomic::{Ordering, fence};

/// The device's side of the used ring, with the record of outstanding requests.
///
/// A used entry passes three steps, each at an index of its own: it is written, published with the
/// used index, and signalled by an interrupt if the driver wants one. A driver that polls sees a
/// published entry at once; a batch has one interrupt, after its last entry.
pub(crate) struct UsedEntries {
    /// Index of the next used entry to write.
    next: u16,
    /// Used index that the driver sees.
    published: u16,
    /// Used index at which the driver's wish for an interrupt was last examined.
    signalled: u16,
    /// Record of outstanding requests, if the front-end uses inflight tracking.
    tracker: Option<Tracker>,
    /// Dirty log of the used ring, if its writes are logged.
    log: Option<UsedRingLog>,
}

impl UsedEntries {
    /// Continues with a used ring at used index `used_idx`.
    pub(crate) fn new(used_idx: u16, tracker: Option<Tracker>) -> UsedEntries {
        UsedEntries {
            next: used_idx,
            published: used_idx,
            signalled: used_idx,
            tracker,
            log: None,
        }
    }

    /// Sets the dirty log of the used ring, or ends logging.
    pub(crate) fn set_log(&mut self, log: Option<UsedRingLog>) {
        self.log = log;
    }

    /// Marks `len` bytes from byte `offset` of the used ring on, if its writes are logged.
    #[inline]
    pub(crate) fn mark(&self, offset: u64, len: u64) {
        if let Some(log) = &self.log {
            log.mark(offset, len);
        }
    }

    /// Returns the heads of requests that an earlier back-end fetched and did not answer, oldest
    /// first.
    pub(crate) fn recover(&mut self) -> Vec<u16> {
        let tracker = self.tracker.as_mut();
        tracker.map_or_else(Vec::new, |tracker| tracker.recover(self.published))
    }

    /// Stops recording outstanding requests.
    pub(crate) fn abandon(&mut self) {
        self.tracker = None;
    }

    /// Returns the index of the next used entry to write.
    #[inline(always)]
    pub(crate) fn next(&self) -> u16 {
        self.next
    }

    /// Returns the used index that the driver sees.
    #[inline(always)]
    pub(crate) fn published(&self) -> u16 {
        self.published
    }

    /// Returns the number of used entries that were written and not published.
    #[inline(always)]
    pub(crate) fn unpublished(&self) -> u16 {
        self.next.wrapping_sub(self.published)
    }

    /// Records a fetched request as outstanding.
    #[inline(always)]
    pub(crate) fn begin(&mut self, head: u16) {
        if let Some(tracker) = &mut self.tracker {
            tracker.begin(head);
        }
    }

    /// Writes the used entry of a request.
    #[inline(always)]
    pub(crate) fn post(&mut self, ring: &Ring, head: u16, len: u32) {
        ring.set_used(self.next, head, len);
        crash::point!("vhost-blk.used.written");
        if let Some(tracker) = &mut self.tracker {
            tracker.answer(head, self.published);
        }
        self.next = self.next.wrapping_add(1);
    }

    /// Writes the used entry of a request that was not recorded as outstanding. All entries from
    /// the last publication on are then of such requests.
    #[inline(always)]
    pub(crate) fn post_unrecorded(&mut self, entries: &RingEntries<'_>, head: u16, len: u32) {
        entries.set_used(self.next, head, len);
        crash::point!("vhost-blk.plain.written");
        self.next = self.next.wrapping_add(1);
    }

    /// Publishes the entries of [`UsedEntries::post_unrecorded`]. `head` is that of one of them.
    #[inline(always)]
    pub(crate) fn publish_unrecorded(&mut self, entries: &RingEntries<'_>, head: u16) {
        if self.next == self.published {
            return;
        }
        if let Some(tracker) = &mut self.tracker {
            tracker.answer_unrecorded(head, self.published);
        }
        self.publish(entries);
    }

    /// Publishes the written entries, which then are no longer outstanding.
    #[inline(always)]
    pub(crate) fn publish(&mut self, ring: &impl UsedIndex) {
        if self.next == self.published {
            return;
        }
        ring.publish_used(self.next);
        crash::point!("vhost-blk.used.published");
        self.published = self.next;
        if let Some(tracker) = &mut self.tracker {
            tracker.published(self.next);
        }
    }

    /// Publishes the written entries, and interrupts the guest if it wants an interrupt for any
    /// entry since the last call.
    #[inline]
    pub(crate) fn signal(
        &mut self,
        ring: &Ring,
        event_idx: bool,
        call: Option<&Signal>,
        stats: &QueueStats,
    ) {
        self.publish(ring);
        if self.signalled != self.published {
            self.interrupt(ring, event_idx, call, stats);
        }
    }

    fn interrupt(
        &mut self,
        ring: &Ring,
        event_idx: bool,
        call: Option<&Signal>,
        stats: &QueueStats,
    ) {
        let old = std::mem::replace(&mut self.signalled, self.published);
        if let Some(log) = &self.log {
            ring.mark_used(log, old, self.published);
        }
        let Some(call) = call else {
            return;
        };
        // The used index must be visible before the driver's interrupt request is read (virtio 1.2,
        // 2.7.7.2).
        fence(Ordering::SeqCst);
        let wanted = if event_idx {
            need_event(ring.used_event(), self.published, old)
        } else {
            !ring.no_interrupt()
        };
        if wanted {
            stats.notifications.add(1);
            call.send();
            crash::point!("vhost-blk.call.sent");
        }
    }
}
