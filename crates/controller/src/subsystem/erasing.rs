//! A shared namespace that one of its controllers erases (Format NVM): it is closed to the others
//! meanwhile, and they adopt its new format when it is reopened.

use super::inbox::Message;
use super::namespace::{Attached, Awaited, SharedNamespace, State};
use crate::formats::BlockFormat;
use nvme::Status;
use std::sync::Arc;

/// Erasure state of a shared namespace.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Erasing {
    /// Status of all commands while the namespace is closed; `None`: it is open.
    pub closed: Option<Status>,
    /// The format set by an erasure; `None`: that of its configuration.
    pub format: Option<BlockFormat>,
    /// The controller that erases the namespace.
    by: Option<u16>,
    /// The stored format is unknown: a new one may be stored by now, or an earlier one is lost.
    unknown: bool,
    /// Percentage that is still to be erased.
    left: u8,
}

impl State {
    /// Notifies the other controllers of a change; with `awaited`, the caller waits until they
    /// have applied it.
    fn tell_of_erasing(&mut self, nsid: u32, cntlid: u16, awaited: Option<&Arc<Awaited>>) {
        let others = self.attached.iter_mut().filter(|(id, _)| **id != cntlid);
        for (_, attached) in others {
            // An earlier waiter is superseded.
            attached.erasing_awaited = awaited.cloned();
            if !std::mem::replace(&mut attached.told_of_erasing, true) {
                attached.inbox.leave(Message::Erasing { nsid });
            }
        }
    }

    /// Ends the erasure by a controller that leaves.
    pub(super) fn end_erasing_of(&mut self, nsid: u32, cntlid: u16) {
        if self.erasing.by == Some(cntlid) {
            let closed = self.erasing.unknown.then_some(Erasing::UNKNOWN);
            self.end_erasing(nsid, cntlid, closed, None, None);
        }
    }

    fn end_erasing(
        &mut self,
        nsid: u32,
        cntlid: u16,
        closed: Option<Status>,
        format: Option<BlockFormat>,
        awaited: Option<&Arc<Awaited>>,
    ) {
        self.erasing = Erasing {
            closed,
            unknown: closed == Some(Erasing::UNKNOWN),
            format: format.or(self.erasing.format),
            ..Erasing::default()
        };
        self.tell_of_erasing(nsid, cntlid, awaited);
    }
}

impl Erasing {
    /// Status of commands on a namespace with an unknown format.
    pub const UNKNOWN: Status = Status::NAMESPACE_NOT_READY.with_dnr(true);
}

impl SharedNamespace {
    /// Returns the erasure state.
    pub fn erasing(&self) -> Erasing {
        self.lock().erasing
    }

    /// Begins the erasure by a controller: commands through the other controllers end with this
    /// status from now on. The controller waits until the others have dropped `awaited`: none of
    /// their commands is in flight then.
    ///
    /// # Errors
    /// The status for the command when another controller erases the namespace, or when this one
    /// has not handled the end of that erasure yet, and does not know the namespace's format.
    pub fn begin_erasing(
        &self,
        cntlid: u16,
        status: Status,
        awaited: &Arc<Awaited>,
    ) -> Result<(), Status> {
        let mut state = self.lock();
        let attached = state.attached.get(&cntlid);
        let is_stale = attached.is_some_and(|attached| attached.told_of_erasing);
        if state.erasing.by.is_some() || is_stale {
            return Err(status);
        }
        state.erasing = Erasing {
            closed: Some(status),
            format: state.erasing.format,
            by: Some(cntlid),
            unknown: state.erasing.unknown,
            left: 100,
        };
        state.tell_of_erasing(self.nsid(), cntlid, Some(awaited));
        Ok(())
    }

    /// Sets the percentage that is still to be erased.
    pub fn set_left(&self, cntlid: u16, left: u8) {
        let mut state = self.lock();
        if state.erasing.by == Some(cntlid) {
            state.erasing.left = left;
        }
    }

    /// Returns the percentage that another controller than this one still has to erase, if one
    /// erases.
    pub fn left(&self, cntlid: u16) -> Option<u8> {
        let erasing = self.erasing();
        erasing.by.filter(|by| *by != cntlid)?;
        Some(erasing.left)
    }

    /// Returns whether this controller erases the namespace.
    pub fn is_erased_by(&self, cntlid: u16) -> bool {
        self.erasing().by == Some(cntlid)
    }

    /// Notes that a new format may be stored from now on.
    pub fn keeps_format(&self, cntlid: u16) {
        let mut state = self.lock();
        if state.erasing.by == Some(cntlid) {
            state.erasing.unknown = true;
        }
    }

    /// Ends the erasure by a controller: the namespace is open, or its commands end with this
    /// status, and it has `format`, if there is one. The other controllers drop `awaited` when
    /// they have applied that. Has no effect when this controller does not erase the namespace.
    pub fn end_erasing(
        &self,
        cntlid: u16,
        closed: Option<Status>,
        format: Option<BlockFormat>,
        awaited: &Arc<Awaited>,
    ) {
        let mut state = self.lock();
        if state.erasing.by == Some(cntlid) {
            state.end_erasing(self.nsid(), cntlid, closed, format, Some(awaited));
        }
    }

    /// Takes the [`Message::Erasing`] of a controller. Returns the state to apply, and the
    /// reference to drop when that is done.
    pub fn take_erasing(&self, cntlid: u16) -> (Erasing, Option<Arc<Awaited>>) {
        let mut state = self.lock();
        let erasing = state.erasing;
        let attached: Option<&mut Attached> = state.attached.get_mut(&cntlid);
        let awaited = attached.and_then(|attached| {
            attached.told_of_erasing = false;
            attached.erasing_awaited.take()
        });
        (erasing, awaited)
    }
}
