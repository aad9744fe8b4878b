//! Erasure (Format NVM) of a shared namespace by one of its controllers. The namespace is closed to
//! the others meanwhile, which adopt its new format when it is reopened.

use super::inbox::ControlMessage;
use super::namespace::{Attached, AwaitedRelease, NamespaceState, SharedNamespace};
use crate::formats::BlockFormat;
use nvme::Status;
use std::sync::Arc;

/// State of a shared namespace while a controller of the subsystem erases it, and afterwards.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Erasing {
    /// Status with which all commands fail while the namespace is closed; `None` while it is open.
    pub closed: Option<Status>,
    /// Block format that the last erasure has set; `None` for the format of the configuration.
    pub format: Option<BlockFormat>,
    /// ID of the controller that is erasing the namespace, if any.
    by: Option<u16>,
    /// Whether the stored format is unknown: a new one may be stored by now, or an earlier one is
    /// lost.
    unknown: bool,
    /// Percentage of the namespace that is left to be erased.
    left: u8,
}

impl NamespaceState {
    /// Notifies the other controllers of a change of the erasure state. With `awaited`, the caller
    /// waits until they have applied it.
    fn tell_of_erasing(&mut self, nsid: u32, cntlid: u16, awaited: Option<&Arc<AwaitedRelease>>) {
        let others = self.attached.iter_mut().filter(|(id, _)| **id != cntlid);
        for (_, attached) in others {
            // A change that was not applied yet is superseded, and its waiter with it.
            attached.erasing_awaited = awaited.cloned();
            if !std::mem::replace(&mut attached.told_of_erasing, true) {
                attached.inbox.leave(ControlMessage::Erasing { nsid });
            }
        }
    }

    /// Ends the erasure by a controller that leaves the subsystem or detaches the namespace.
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
        awaited: Option<&Arc<AwaitedRelease>>,
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
    /// Status of commands for a namespace with an unknown stored format.
    pub const UNKNOWN: Status = Status::NAMESPACE_NOT_READY.with_dnr(true);

    /// Returns the state of a namespace that controller `cntlid` was erasing in the previous
    /// process, and is to continue erasing.
    pub(super) fn left(cntlid: u16, status: Status) -> Self {
        Erasing {
            closed: Some(status),
            by: Some(cntlid),
            left: 100,
            ..Erasing::default()
        }
    }
}

impl SharedNamespace {
    /// Returns the erasure state of the namespace.
    pub fn erasing(&self) -> Erasing {
        self.lock().erasing
    }

    /// Begins the erasure by controller `cntlid`: commands through the other controllers end with
    /// `status` from now on. The controller waits until the others have dropped `awaited`, when
    /// none of their earlier commands is outstanding.
    ///
    /// # Errors
    /// `status` when another controller erases the namespace, or when `cntlid` has not handled the
    /// end of an earlier erasure yet, and so does not know the namespace's format.
    pub fn begin_erasing(
        &self,
        cntlid: u16,
        status: Status,
        awaited: &Arc<AwaitedRelease>,
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

    /// Sets the percentage that controller `cntlid` has left to erase, which other controllers
    /// report.
    pub fn set_left(&self, cntlid: u16, left: u8) {
        let mut state = self.lock();
        if state.erasing.by == Some(cntlid) {
            state.erasing.left = left;
        }
    }

    /// Returns the percentage that a controller other than `cntlid` still has to erase; `None` when
    /// no other controller erases the namespace.
    pub fn left(&self, cntlid: u16) -> Option<u8> {
        let erasing = self.erasing();
        erasing.by.filter(|by| *by != cntlid)?;
        Some(erasing.left)
    }

    /// Returns whether controller `cntlid` is erasing the namespace.
    pub fn is_erased_by(&self, cntlid: u16) -> bool {
        self.erasing().by == Some(cntlid)
    }

    /// Records that the erasing controller `cntlid` may store a new format from now on.
    pub fn keeps_format(&self, cntlid: u16) {
        let mut state = self.lock();
        if state.erasing.by == Some(cntlid) {
            state.erasing.unknown = true;
        }
    }

    /// Ends the erasure by controller `cntlid`. The namespace opens, unless `closed` is the status
    /// with which its commands still end, and adopts `format`, if any. The other controllers drop
    /// `awaited` when they have applied that. Has no effect when `cntlid` does not erase the
    /// namespace.
    pub fn end_erasing(
        &self,
        cntlid: u16,
        closed: Option<Status>,
        format: Option<BlockFormat>,
        awaited: &Arc<AwaitedRelease>,
    ) {
        let mut state = self.lock();
        if state.erasing.by == Some(cntlid) {
            state.end_erasing(self.nsid(), cntlid, closed, format, Some(awaited));
        }
    }

    /// Handles the [`ControlMessage::Erasing`] of controller `cntlid`. Returns the state to apply,
    /// and the reference to drop afterwards.
    pub fn take_erasing(&self, cntlid: u16) -> (Erasing, Option<Arc<AwaitedRelease>>) {
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
