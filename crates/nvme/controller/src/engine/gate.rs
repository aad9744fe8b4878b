//! Access control for namespaces: reservations ("NVMe Base 2.1", 8.1.22), paths that the ANA state
//! makes unusable (8.1.1), namespaces closed during an erasure, and formats that the host has not
//! enabled (LBAFEE, "NVM Command Set 1.1", 4.1.3.6.1).
//!
//! The control half sets the access. The fast path ([`run`](super::run)) finds only namespaces with
//! full access, and does no such checks. Commands for other namespaces take the general path, which
//! checks each of them ([`Engine::unreached`], [`Engine::conflict`]).

use super::{Engine, NO_NAMESPACE, Namespace, commands};
use crate::ana;
use nvme::cmd::NSID_BROADCAST;
use nvme::log::AnaState;
use nvme::{Command, NvmOpcode, Status};
use reservations::{Access, CommandGroup};

/// Namespaces of an engine by NSID.
pub(super) struct NsidTable {
    /// Index of each NSID's namespace in [`Engine::namespaces`], or [`NO_NAMESPACE`].
    pub all: Vec<u16>,
    /// Index of each NSID's namespace that the fast path may use, because it restricts no command;
    /// otherwise [`NO_NAMESPACE`].
    pub open: Vec<u16>,
    /// Whether any namespace is closed to hosts, or has a format that the host has not enabled.
    pub any_closed: bool,
    /// Whether any namespace has placement handles (Flexible Data Placement).
    pub any_placed: bool,
}

impl NsidTable {
    /// Creates a table of namespaces without restrictions.
    pub fn new(all: Vec<u16>) -> Self {
        NsidTable {
            open: all.clone(),
            all,
            any_closed: false,
            any_placed: false,
        }
    }
}

impl Engine {
    /// Sets the access rights under reservations for the namespace at this index.
    pub fn set_access(&mut self, index: usize, access: Access) {
        match self.namespaces.get_mut(index) {
            Some(ns) => ns.access = access,
            None => return self.broken("what is allowed on a namespace that is not there"),
        }
        self.index_namespaces();
    }

    /// Sets the ANA state of the namespace at this index.
    pub fn set_ana_state(&mut self, index: usize, state: AnaState) {
        match self.namespaces.get_mut(index) {
            Some(ns) => ns.ana = state,
            None => return self.broken("how a namespace is reached that is not there"),
        }
        self.index_namespaces();
    }

    /// Closes the namespace at this index, so that its commands end with `status`; `None` opens it.
    pub(super) fn close(&mut self, index: usize, status: Option<Status>) {
        match self.namespaces.get_mut(index) {
            Some(ns) => ns.closed = status,
            None => return self.broken("a namespace is closed that is not there"),
        }
        self.index_namespaces();
    }

    /// Sets whether the host has enabled extended protection information formats.
    pub(super) fn enable_formats(&mut self, lbafee: bool) {
        if std::mem::replace(&mut self.features.lbafee, lbafee) != lbafee {
            self.index_namespaces();
        }
    }

    /// Returns the status of commands that access blocks of `ns`, if the host has not enabled the
    /// namespace's format.
    fn not_enabled(&self, ns: &Namespace) -> Option<Status> {
        let disabled = !self.features.lbafee && ns.has_extended_format();
        disabled.then_some(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true))
    }

    /// Returns the status of a command for a namespace with a format that the host has not enabled.
    /// Flush and reservation commands are allowed: they neither read nor change blocks.
    fn disabled(&self, command: &Command) -> Option<Status> {
        let opcode = command.nvm_opcode();
        if opcode == NvmOpcode::FLUSH || commands::group(opcode).is_none() {
            return None;
        }
        let index = self.namespace_index(command.nsid.get()).ok()?;
        self.not_enabled(self.namespaces.get(index)?)
    }

    /// Returns whether some namespace refuses some commands, so that each command has to be
    /// checked.
    pub(super) fn is_gated(&self) -> bool {
        self.offer.shared || self.nsids.any_closed
    }

    /// Returns the status with which commands for the namespace fail while it is closed; `None` if
    /// it is open.
    fn closed(&self, nsid: u32) -> Option<Status> {
        match nsid {
            NSID_BROADCAST => self.active().find_map(|ns| ns.closed),
            nsid => {
                let index = self.namespace_index(nsid).ok()?;
                self.namespaces.get(index)?.closed
            }
        }
    }

    /// Returns the status of commands for a namespace that this controller cannot reach in its ANA
    /// state.
    pub fn unreached(&self, nsid: u32) -> Option<Status> {
        match nsid {
            // A command for all namespaces gets the status of the first one that cannot be reached.
            NSID_BROADCAST => self.active().find_map(|ns| ana::refusal(ns.ana)),
            nsid => {
                let index = self.namespace_index(nsid).ok()?;
                ana::refusal(self.namespaces.get(index)?.ana)
            }
        }
    }

    /// Fences the namespace at this index: [`Engine::fenced`] reports when the commands that are
    /// outstanding now have ended. They are not cancelled, because a cancelled volume request may
    /// still take effect after later writes by others.
    pub fn fence(&mut self, index: usize) {
        for tag in self.slots.touching(index) {
            if !self.fences.contains(&(index, tag)) {
                self.fences.push((index, tag));
            }
        }
    }

    /// Returns whether all fenced commands of the namespace at this index have ended.
    pub fn fenced(&mut self, index: usize) -> bool {
        let slots = &mut self.slots;
        self.fences.retain(|(_, tag)| slots.is_in_flight(*tag));
        self.fences.iter().all(|(of, _)| *of != index)
    }

    /// Returns the status with which a command has to be refused; `None` if it may be executed.
    pub(super) fn barred(&self, command: &Command) -> Option<Status> {
        let nsid = command.nsid.get();
        let unreached = self.unreached(nsid);
        // Reservation commands are allowed, since they do not access blocks and can end another
        // host's erasure.
        let reserves = self.offer.shared && commands::group(command.nvm_opcode()).is_none();
        let closed = unreached.or_else(|| self.closed(nsid).filter(|_| !reserves));
        let disabled = closed.or_else(|| self.disabled(command));
        disabled.or_else(|| self.conflict(command))
    }

    /// Returns the status of a command that reads this additional namespace, if it has to be
    /// refused.
    pub(super) fn barred_source(&self, nsid: u32) -> Option<Status> {
        let barred = self.unreached(nsid).or_else(|| self.closed(nsid));
        barred.or_else(|| {
            let index = self.namespace_index(nsid).ok()?;
            let ns = self.namespaces.get(index)?;
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
            nsid => {
                let index = self.namespace_index(nsid).ok()?;
                self.namespaces.get(index)?.access.allows(group)
            }
        };
        (!allowed).then_some(Status::RESERVATION_CONFLICT.with_dnr(true))
    }

    /// Rebuilds the index of namespaces that the fast path finds.
    pub(super) fn index_namespaces(&mut self) {
        let barred = |ns: &Namespace| ns.closed.is_some() || self.not_enabled(ns).is_some();
        let closed = self.active().any(barred);
        self.nsids.any_closed = closed;
        let placed = self.active().any(Namespace::is_placed);
        self.nsids.any_placed = placed;
        self.nsids.open.clone_from(&self.nsids.all);
        for found in &mut self.nsids.open {
            let ns = self.namespaces.get(usize::from(*found));
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
