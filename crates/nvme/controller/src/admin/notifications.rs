//! Reservation notifications ("NVMe Base 2.1", 5.1.12.1.32): a queue of log pages, each of which is
//! read once.

use crate::control::Controller;
use crate::survival::state::NotificationState;
use nvme::aen::{AsyncEvent, EventType, IoCommandEvent};
use nvme::log::{Lid, ReservationNotification, ReservationNotificationType};
use reservations::Notification;
use std::collections::VecDeque;
use zerocopy::{FromZeros, IntoBytes};

/// Maximum number of reservation notifications that the host has not read yet; more are lost.
const WAITING: usize = 64;

/// A reservation notification that the host has not read yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Page {
    count: u64,
    kind: ReservationNotificationType,
    nsid: u32,
}

/// Reservation notifications that the host has not read yet, and the number of all so far.
#[derive(Debug, Default)]
pub(crate) struct Notifications {
    waiting: VecDeque<Page>,
    /// Number of the last reservation notification, counting lost ones (Log Page Count).
    count: u64,
}

impl Notifications {
    pub fn save(&self) -> NotificationState {
        let waiting = self.waiting.iter();
        NotificationState {
            count: self.count,
            waiting: waiting
                .map(|page| (page.count, page.kind.0, page.nsid))
                .collect(),
        }
    }

    pub fn restore(saved: &NotificationState) -> Self {
        let waiting = saved.waiting.iter().take(WAITING);
        let page = |&(count, kind, nsid): &(u64, u8, u32)| Page {
            count,
            kind: ReservationNotificationType(kind),
            nsid,
        };
        Notifications {
            waiting: waiting.map(page).collect(),
            count: saved.count,
        }
    }

    /// Advances the notification number, even if the notification is lost.
    fn count(&mut self) {
        // Number 0 means that there is no notification.
        self.count = self.count.checked_add(1).unwrap_or(1);
    }

    fn add(&mut self, kind: ReservationNotificationType, nsid: u32) {
        self.count();
        if self.waiting.len() >= WAITING {
            return self.lose();
        }
        let count = self.count;
        self.waiting.push_back(Page { count, kind, nsid });
    }

    /// Records the loss of a notification: the newest unread one gets its number.
    fn lose(&mut self) {
        if let Some(last) = self.waiting.back_mut() {
            last.count = self.count;
        }
    }

    /// Returns the oldest unread notification as the Reservation Notification log page.
    fn page(&self) -> ReservationNotification {
        let mut log = ReservationNotification::new_zeroed();
        if let Some(page) = self.waiting.front() {
            log.lpc = page.count.into();
            log.rnlpt = page.kind;
            log.nalp = (self.waiting.len() - 1).min(255) as u8;
            log.nsid = page.nsid.into();
        }
        log
    }
}

impl Controller {
    /// Notifies the host of a reservation event, unless the host has masked it.
    pub(crate) fn reservation_notice(&mut self, nsid: u32, notification: Notification) {
        let mask = self.admin.features.notification_mask(nsid);
        if notification.is_masked(mask) {
            return;
        }
        let kind = notification.log_page_type();
        self.admin.notifications.add(kind, nsid);
        self.tell_notifications();
    }

    /// Counts notifications that were lost because the inbox was full.
    pub(crate) fn lost_notices(&mut self, lost: u64) {
        for _ in 0..lost {
            self.admin.notifications.count();
        }
        self.admin.notifications.lose();
    }

    fn tell_notifications(&mut self) {
        self.notify(AsyncEvent::of(
            EventType::IO_COMMAND_SPECIFIC,
            IoCommandEvent::RESERVATION_LOG_AVAILABLE.0,
            Lid::RESERVATION_NOTIFICATION,
        ));
    }

    /// Returns the Reservation Notification log page.
    pub(super) fn notification_log(&self) -> Vec<u8> {
        self.admin.notifications.page().as_bytes().to_vec()
    }

    /// Removes the reservation notification that the host has read. Notifies the host if more are
    /// unread.
    pub(super) fn notification_read(&mut self) {
        self.admin.notifications.waiting.pop_front();
        self.clear_events(EventType::IO_COMMAND_SPECIFIC);
        if !self.admin.notifications.waiting.is_empty() {
            self.tell_notifications();
        }
    }
}
