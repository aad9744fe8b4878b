//! Access control for namespaces: reservations ("NVMe Base 2.1", 8.1.22), paths that the ANA state
//! makes unusable (8.1.1), namespaces closed during an erasure, and formats that the host has not
//! enabled (LBAFEE, "NVM Command Set 1.1", 4.1.3.6.1).
//!
//! The control half sets the access. The fast path ([`run`](super::run)) finds only namespaces with
//! full access, and does no such checks. Commands for other namespaces take the general path, which
//! checks each of them ([`NamespaceTable::unreached`], [`NamespaceTable::conflict`]).

use super::namespaces::{NO_NAMESPACE, NamespaceTable};
use super::slots::Slots;
use super::{Namespace, commands};
use crate::ana;
use nvme::cmd::NSID_BROADCAST;
use nvme::{Command, NvmOpcode, Status};
use reservations::{Access, CommandGroup};

impl NamespaceTable {
    /// Changes the access to the namespace at this index. Returns `false` when there is none.
    #[must_use]
    pub(super) fn change(&mut self, index: usize, change: impl FnOnce(&mut Namespace)) -> bool {
        let ns = self.get_mut(index).map(change);
        self.index_namespaces();
        ns.is_some()
    }

    /// Sets whether the host has enabled extended protection information formats.
    pub(super) fn enable_formats(&mut self, lbafee: bool) {
        if std::mem::replace(&mut self.lbafee, lbafee) != lbafee {
            self.index_namespaces();
        }
    }

    /// Returns the status of commands that access blocks of `ns`, if the host has not enabled the
    /// namespace's format.
    fn not_enabled(&self, ns: &Namespace) -> Option<Status> {
        let disabled = !self.lbafee && ns.has_extended_format();
        disabled.then_some(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true))
    }

    /// Returns the status of a command for a namespace with a format that the host has not enabled.
    /// Flush and reservation commands are allowed: they neither read nor change blocks.
    fn disabled(&self, command: &Command) -> Option<Status> {
        let opcode = command.nvm_opcode();
        if opcode == NvmOpcode::FLUSH || commands::group(opcode).is_none() {
            return None;
        }
        self.not_enabled(self.of_nsid(command.nsid.get())?)
    }

    /// Returns the status with which commands for the namespace fail while it is closed; `None` if
    /// it is open.
    fn closed(&self, nsid: u32) -> Option<Status> {
        match nsid {
            NSID_BROADCAST => self.active().find_map(|ns| ns.closed),
            nsid => self.of_nsid(nsid)?.closed,
        }
    }

    /// Returns the status of commands for a namespace that this controller cannot reach in its ANA
    /// state.
    pub fn unreached(&self, nsid: u32) -> Option<Status> {
        match nsid {
            // A command for all namespaces gets the status of the first one that cannot be reached.
            NSID_BROADCAST => self.active().find_map(|ns| ana::refusal(ns.ana)),
            nsid => ana::refusal(self.of_nsid(nsid)?.ana),
        }
    }

    /// Fences the namespace at this index: [`NamespaceTable::fenced`] reports when the commands
    /// that are outstanding now have ended. They are not cancelled, because a cancelled volume
    /// request may still take effect after later writes by others.
    pub fn fence(&mut self, slots: &Slots, index: usize) {
        for tag in slots.touching(index) {
            if !self.fences.contains(&(index, tag)) {
                self.fences.push((index, tag));
            }
        }
    }

    /// Returns whether all fenced commands of the namespace at this index have ended.
    pub fn fenced(&mut self, slots: &mut Slots, index: usize) -> bool {
        self.fences.retain(|(_, tag)| slots.is_in_flight(*tag));
        self.fences.iter().all(|(of, _)| *of != index)
    }

    /// Returns the status with which a command has to be refused; `None` if it may be executed.
    /// `shared`: the controller belongs to a subsystem.
    pub(super) fn barred(&self, command: &Command, shared: bool) -> Option<Status> {
        if !shared && !self.any_closed {
            return None;
        }
        let nsid = command.nsid.get();
        let unreached = self.unreached(nsid);
        // Reservation commands are allowed, since they do not access blocks and can end another
        // host's erasure.
        let reserves = shared && commands::group(command.nvm_opcode()).is_none();
        let closed = unreached.or_else(|| self.closed(nsid).filter(|_| !reserves));
        let disabled = closed.or_else(|| self.disabled(command));
        disabled.or_else(|| self.conflict(command))
    }

    /// Returns the status of a command that reads this additional namespace, if it has to be
    /// refused.
    pub(super) fn barred_source(&self, nsid: u32) -> Option<Status> {
        let barred = self.unreached(nsid).or_else(|| self.closed(nsid));
        barred.or_else(|| {
            let ns = self.of_nsid(nsid)?;
            let allowed = ns.access.allows(CommandGroup::Read);
            let conflict = Status::RESERVATION_CONFLICT.with_dnr(true);
            let disabled = self.not_enabled(ns);
            disabled.or_else(|| (!allowed).then_some(conflict))
        })
    }

    /// Returns the status of a command that a reservation on its namespace forbids; `None` if it is
    /// allowed.
    fn conflict(&self, command: &Command) -> Option<Status> {
        let group = commands::group(command.nvm_opcode())?;
        let allowed = match command.nsid.get() {
            // Only Flush allows the broadcast NSID, for all active namespaces.
            NSID_BROADCAST => self.active().all(|ns| ns.access.allows(group)),
            nsid => self.of_nsid(nsid)?.access.allows(group),
        };
        (!allowed).then_some(Status::RESERVATION_CONFLICT.with_dnr(true))
    }

    /// Rebuilds the index of namespaces that the fast path finds.
    pub(super) fn index_namespaces(&mut self) {
        let barred = |ns: &Namespace| ns.closed.is_some() || self.not_enabled(ns).is_some();
        let any_closed = self.active().any(barred);
        let any_placed = self.active().any(Namespace::is_placed);
        (self.any_closed, self.any_placed) = (any_closed, any_placed);
        self.open.clone_from(&self.all);
        for found in &mut self.open {
            let ns = self.list.get(usize::from(*found));
            // The fast path cannot check zone writes one by one, count writes by placement handle,
            // check marks, or store metadata.
            let open = |ns: &Namespace| {
                let plain = !ns.is_fixed() && !ns.is_placed() && !ns.watched;
                let reached = ana::refusal(ns.ana).is_none() && plain;
                ns.access == Access::FULL && reached && ns.closed.is_none()
            };
            if ns.is_some_and(|ns| !open(ns)) {
                *found = NO_NAMESPACE;
            }
        }
    }
}
