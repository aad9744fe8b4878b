//! Format NVM on namespaces that controllers of a subsystem share: how a controller closes a
//! namespace to the others while it erases the namespace, and how it reacts to an erasure by
//! another one.
//!
//! 1. The erasing controller closes the namespaces to the others, and waits until none of their
//!    commands is outstanding.
//! 2. It erases the namespaces, as it erases private ones ([`erase`](mod@crate::admin)).
//! 3. It reopens the namespaces to the others, with the new format, and waits until they have
//!    applied that. Only then does the Format NVM command complete.
//!
//! If a reset ends the command early, the namespaces are reopened only when none of the erasing
//! controller's own requests is outstanding: a late one would overwrite data that others write by
//! then.

use super::Controller;
use super::sharing::DrainWaiter;
use crate::admin::TestSelection;
use crate::prefix;
use crate::subsystem::{AwaitedRelease, Erasing};
use nvme::Status;
use nvme::cmd::NSID_BROADCAST;
use nvme::log::SelfTestOutcome;
use reservations::CommandGroup;
use std::sync::{Arc, Weak};

impl Controller {
    /// Checks whether the host may erase a namespace.
    ///
    /// # Errors
    /// The path-related status when the controller cannot reach the namespace, or a reservation
    /// conflict when another host has reserved it ("NVMe Base 2.1", 8.1.1 and 8.1.22).
    pub(crate) fn may_erase(&self, nsid: u32) -> Result<(), Status> {
        if let Some(status) = self.engine.namespaces.unreached(nsid) {
            return Err(status);
        }
        let index = self.engine.namespaces.index_of(nsid)?;
        let ns = self.engine.namespaces.get(index);
        if ns.is_none_or(|ns| ns.access.allows(CommandGroup::Write)) {
            Ok(())
        } else {
            Err(Status::RESERVATION_CONFLICT.with_dnr(true))
        }
    }

    /// Closes these namespaces to other controllers: from now on, their commands on the namespaces
    /// end with `status`. The returned [`Weak`] expires when none of their earlier commands is
    /// outstanding.
    ///
    /// # Errors
    /// The status for the command when another controller is erasing one of the namespaces. Nothing
    /// has changed then.
    pub(crate) fn close_to_others(
        &mut self,
        nsids: &[u32],
        status: Status,
    ) -> Result<Weak<AwaitedRelease>, Status> {
        let Some(sharing) = &self.sharing else {
            return Ok(Weak::new());
        };
        let awaited = AwaitedRelease::by(&sharing.inbox);
        for (at, nsid) in nsids.iter().enumerate() {
            let shared = sharing.namespace(*nsid);
            let begun =
                shared.map(|shared| shared.begin_erasing(sharing.cntlid(), status, &awaited));
            if let Some(Err(status)) = begun {
                self.open_to_others(prefix(nsids, at));
                return Err(status);
            }
        }
        Ok(Arc::downgrade(&awaited))
    }

    /// Records that a new format of the namespace may be stored from now on.
    pub(crate) fn tell_of_keeping(&self, nsid: u32) {
        if let Some(sharing) = &self.sharing
            && let Some(shared) = sharing.namespace(nsid)
        {
            shared.keeps_format(sharing.cntlid());
        }
    }

    /// Publishes to the other controllers the percentage of the namespace that is still to be
    /// erased.
    pub(crate) fn tell_of_progress(&self, nsid: u32, left: u8) {
        if let Some(sharing) = &self.sharing
            && let Some(shared) = sharing.namespace(nsid)
        {
            shared.set_left(sharing.cntlid(), left);
        }
    }

    /// Returns the percentage of the namespace that another controller still has to erase; `None`
    /// when no other controller erases it.
    pub(crate) fn left_by_others(&self, nsid: u32) -> Option<u8> {
        let sharing = self.sharing.as_ref()?;
        sharing.namespace(nsid)?.left(sharing.cntlid())
    }

    /// Returns whether another controller erases the namespace, or any namespace for the broadcast
    /// NSID.
    pub(crate) fn others_erase(&self, nsid: u32) -> bool {
        let Some(sharing) = &self.sharing else {
            return false;
        };
        let erased = self.shared_where(|shared| shared.left(sharing.cntlid()).is_some());
        let mut concerned = erased
            .iter()
            .filter(|of| nsid == NSID_BROADCAST || **of == nsid);
        concerned.next().is_some()
    }

    /// Reopens namespaces to other controllers with their current format and state. The returned
    /// [`Weak`] expires when the other controllers have applied that.
    pub(crate) fn open_to_others(&self, nsids: &[u32]) -> Weak<AwaitedRelease> {
        let Some(sharing) = &self.sharing else {
            return Weak::new();
        };
        let awaited = AwaitedRelease::by(&sharing.inbox);
        for nsid in nsids {
            let ns = self.engine.namespaces.of_nsid(*nsid);
            let format = ns.map(|ns| ns.config.format());
            if let Some(shared) = sharing.namespace(*nsid) {
                let closed = self.admin.erasure.at_rest(*nsid);
                shared.end_erasing(sharing.cntlid(), closed, format, &awaited);
            }
        }
        Arc::downgrade(&awaited)
    }

    /// Returns whether the namespace is private, or this controller is still the one that erases
    /// it.
    pub(crate) fn may_still_erase(&self, nsid: u32) -> bool {
        let sharing = self.sharing.as_ref();
        let shared = sharing.and_then(|sharing| Some((sharing.namespace(nsid)?, sharing.cntlid())));
        shared.is_none_or(|(shared, cntlid)| shared.is_erased_by(cntlid))
    }

    /// Opens namespaces that this controller has erased, to itself and to others, except those that
    /// another controller erases by now. The returned [`Weak`] expires when the others have applied
    /// that.
    pub(crate) fn open_erased(&mut self, nsids: &[u32]) -> Weak<AwaitedRelease> {
        let awaited = self.open_to_others(nsids);
        for nsid in nsids {
            let sharing = self.sharing.as_ref();
            let mut attachments = sharing.iter().flat_map(|sharing| &sharing.attachments);
            let attachment = attachments.find(|attachment| attachment.shared.nsid() == *nsid);
            match attachment.map(|attachment| (attachment.index, attachment.shared.erasing())) {
                Some((index, erasing)) => self.apply_erasing(index, erasing),
                None => self.close(&[*nsid], None),
            }
        }
        awaited
    }

    /// Handles the beginning or end of an erasure by another controller.
    pub(super) fn erasing_changed(&mut self, nsid: u32) {
        let Some(sharing) = &self.sharing else {
            return;
        };
        let mut attachments = sharing.attachments.iter();
        let Some(attachment) = attachments.find(|attachment| attachment.shared.nsid() == nsid)
        else {
            // The namespace was detached since.
            return;
        };
        let (erasing, awaited) = attachment.shared.take_erasing(sharing.cntlid());
        let index = attachment.index;
        self.apply_erasing(index, erasing);
        if erasing.closed.is_some() {
            self.engine.namespaces.fence(&self.engine.slots, index);
        }
        if self.others_erase(nsid) {
            self.end_test_of(SelfTestOutcome::FORMATTED, TestSelection::Some(&[nsid]));
        }
        if let Some(sharing) = &mut self.sharing
            && let Some(awaited) = awaited
        {
            let before =
                |owed: &DrainWaiter| matches!(owed, DrainWaiter::Erasing(of, _) if *of == nsid);
            // An earlier waiter for the same namespace is superseded.
            sharing.unanswered.retain(|owed| !before(owed));
            sharing.unanswered.push(DrainWaiter::Erasing(nsid, awaited));
        }
        self.migration.wait();
        self.answer_others();
    }

    /// Closes the namespace at this index to commands, or opens it with the format of `erasing`.
    pub(super) fn apply_erasing(&mut self, index: usize, erasing: Erasing) {
        let Some(ns) = self.engine.namespaces.get(index) else {
            return;
        };
        let (nsid, before, closed) = (ns.config.nsid, ns.config.format(), ns.closed);
        let unknown = erasing.closed == Some(Erasing::UNKNOWN);
        if erasing.closed.is_none() || unknown {
            self.admin.erasure.set_unknown(nsid, unknown);
            if let Some(format) = erasing.format.filter(|format| *format != before) {
                self.reformat(nsid, format, None, closed);
            }
        }
        self.close(&[nsid], erasing.closed);
    }
}
