//! Asynchronous Event Request ("NVMe Base 2.1", 5.1.2): requests are parked until an event occurs.

use super::{AdminOutcome, AdminResult};
use crate::control::Controller;
use nvme::aen::{AsyncEvent, EventType};
use nvme::{Command, Status};
use std::collections::VecDeque;

/// Maximum number of Asynchronous Event Requests that wait for an event. (AERL of Identify
/// Controller is this value minus one.)
pub(super) const MAX_EVENT_REQUESTS: usize = 4;
/// Maximum number of events that wait for a request. An event equal to a waiting one is not added.
const PENDING: usize = 16;

/// Asynchronous Event Requests that wait for an event, and events that wait for a request.
#[derive(Default)]
pub(crate) struct AsyncEvents {
    parked: VecDeque<u16>,
    pending: VecDeque<AsyncEvent>,
    /// Bit mask of reported event types, which are masked until the host reads their log page.
    masked: u8,
}

/// Returns the bit of an event type in [`AsyncEvents::masked`]; 0 for types above 7, which the
/// three bits of a completion cannot report ("NVMe Base 2.1", 5.1.2.1).
fn bit(ty: EventType) -> u8 {
    1u8.checked_shl(ty.0.into()).unwrap_or(0)
}

impl AsyncEvents {
    /// Returns the state for the next process: parked requests, waiting events as completion dwords
    /// 0, and masked event types.
    pub fn save(&self) -> (Vec<u16>, Vec<u32>, u8) {
        let pending = self.pending.iter().map(|event| event.into_bits());
        let parked = self.parked.iter().copied();
        (parked.collect(), pending.collect(), self.masked)
    }

    /// Restores the state saved by [`AsyncEvents::save`], up to the maximum numbers of requests and
    /// events.
    pub fn restore(parked: &[u16], pending: &[u32], masked: u8) -> Self {
        let pending = pending.iter().take(PENDING);
        AsyncEvents {
            parked: parked.iter().take(MAX_EVENT_REQUESTS).copied().collect(),
            pending: pending.map(|bits| AsyncEvent::from_bits(*bits)).collect(),
            masked,
        }
    }

    /// Returns the number of Asynchronous Event Requests that wait for an event.
    pub fn parked(&self) -> usize {
        self.parked.len()
    }

    /// Removes a waiting Asynchronous Event Request, to abort it. Returns `false` when none has
    /// this command identifier.
    pub fn take(&mut self, cid: u16) -> bool {
        let found = self.parked.iter().position(|&c| c == cid);
        found.is_some_and(|at| self.parked.remove(at).is_some())
    }

    /// Removes the oldest parked request, for an event that is reported whether or not its type is
    /// masked.
    pub fn take_oldest(&mut self) -> Option<u16> {
        self.parked.pop_front()
    }

    fn next(&mut self) -> Option<(u16, AsyncEvent)> {
        let at = self
            .pending
            .iter()
            .position(|e| self.masked & bit(e.aet()) == 0)?;
        let cid = self.parked.pop_front()?;
        let event = self.pending.remove(at)?;
        self.masked |= bit(event.aet());
        Some((cid, event))
    }
}

impl Controller {
    pub(super) fn async_event_request(&mut self, command: &Command) -> AdminResult {
        if self.admin.events.parked.len() >= MAX_EVENT_REQUESTS {
            return Err(Status::AER_LIMIT_EXCEEDED.with_dnr(true));
        }
        self.admin.events.parked.push_back(command.cid.get());
        self.deliver_events();
        Ok(AdminOutcome::Later)
    }

    /// Reports an event to the host, as soon as a request is parked and its type is not masked.
    pub(crate) fn notify(&mut self, event: AsyncEvent) {
        let events = &mut self.admin.events;
        if !events.pending.contains(&event) && events.pending.len() < PENDING {
            events.pending.push_back(event);
        }
        self.deliver_events();
    }

    /// Unmasks an event type after the host has read its log page without Retain Asynchronous
    /// Event.
    pub(super) fn clear_events(&mut self, ty: EventType) {
        self.admin.events.masked &= !bit(ty);
        self.deliver_events();
    }

    /// Completes parked requests with the events that wait for them. While the controller is
    /// paused, nothing is posted: the destination of a migration may have its state already.
    pub(crate) fn deliver_events(&mut self) {
        if self.is_paused() {
            return;
        }
        while let Some((cid, event)) = self.admin.events.next() {
            self.finish_admin(cid, Status::SUCCESS, event.into_bits());
        }
    }
}
