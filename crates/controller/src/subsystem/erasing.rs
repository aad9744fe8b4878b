//! A shared namespace that one of its controllers erases (Format NVM): it is closed to the others
//! meanwhile, and they have its new format when it is open again.

use super::inbox::Message;
use super::namespace::{Attached, Awaited, SharedNamespace, State};
use crate::formats::BlockFormat;
use nvme::Status;
use std::sync::Arc;

/// What erasing means to the controllers of a namespace.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Erasing {
    /// Commands on it end with this; `None`: it is open.
    pub closed: Option<Status>,
    /// The format that it was given; `None`: that of its configuration.
    pub format: Option<BlockFormat>,
    /// The controller that erases it.
    by: Option<u16>,
    /// It is not known which format is kept: a new one may be by now, or an earlier one is lost.
    unknown: bool,
    /// Percent that are still to be erased.
    left: u8,
}

impl State {
    /// Others than this controller are told that something has changed; with `awaited`, it waits
    /// until they know.
    fn tell_of_erasing(&mut self, nsid: u32, cntlid: u16, awaited: Option<&Arc<Awaited>>) {
        let others = self.attached.iter_mut().filter(|(id, _)| **id != cntlid);
        for (_, attached) in others {
            // Who waited for what was before does not any more.
            attached.erasing_awaited = awaited.cloned();
            if !std::mem::replace(&mut attached.told_of_erasing, true) {
                attached.inbox.leave(Message::Erasing { nsid });
            }
        }
    }

    /// A controller that goes erases nothing any more.
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
    /// What commands end with on a namespace whose format is not known.
    pub const UNKNOWN: Status = Status::NAMESPACE_NOT_READY.with_dnr(true);
}

impl SharedNamespace {
    /// What its controllers make of it now.
    pub fn erasing(&self) -> Erasing {
        self.lock().erasing
    }

    /// A controller begins to erase it: commands that reach it by the others end with this status
    /// from now on. It waits until they have dropped `awaited`: nothing of theirs is in flight
    /// then.
    ///
    /// # Errors
    /// What the command ends with: another controller erases it, or this one has not taken the end
    /// of that yet, and does not know the namespace's format.
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

    /// So many percent are still to be erased.
    pub fn set_left(&self, cntlid: u16, left: u8) {
        let mut state = self.lock();
        if state.erasing.by == Some(cntlid) {
            state.erasing.left = left;
        }
    }

    /// Percent of it that are to be erased by another controller than this one, if one does.
    pub fn left(&self, cntlid: u16) -> Option<u8> {
        let erasing = self.erasing();
        erasing.by.filter(|by| *by != cntlid)?;
        Some(erasing.left)
    }

    /// This controller erases it.
    pub fn is_erased_by(&self, cntlid: u16) -> bool {
        self.erasing().by == Some(cntlid)
    }

    /// From now on a new format may be kept.
    pub fn keeps_format(&self, cntlid: u16) {
        let mut state = self.lock();
        if state.erasing.by == Some(cntlid) {
            state.erasing.unknown = true;
        }
    }

    /// A controller does not erase it any more: it is open, or commands end with this status, and
    /// has that format, if one is named. The others drop `awaited` when they know. Nothing happens
    /// where this controller has not erased it.
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

    /// A controller takes its [`Message::Erasing`]: what to make of the namespace, and what it is
    /// to drop when that is done.
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
