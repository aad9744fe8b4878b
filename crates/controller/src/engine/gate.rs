//! What the host may do on a namespace that it shares with others: reservations ("NVMe Base 2.1",
//! 8.1.22), whether it is reached by this controller at all (ANA, 8.1.1), whether it is closed,
//! because it is being erased, and whether the host has enabled its format (LBAFEE, "NVM Command
//! Set 1.1", 4.1.3.6.1).
//!
//! The control half says so. A namespace on which everything is allowed is found by the short way
//! ([`run`](super::run)), which knows nothing of this; any other one is not, so that its commands
//! take the general way, each of them checked ([`Engine::unreached`], [`Engine::conflict`]).

use super::{Engine, NO_NAMESPACE, Namespace, commands};
use crate::ana;
use nvme::cmd::NSID_BROADCAST;
use nvme::log::AnaState;
use nvme::{Command, NvmOpcode, Status};
use reservations::{Access, CommandGroup};

impl Engine {
    /// From now on this is allowed on the namespace of this index.
    pub fn set_access(&mut self, index: usize, access: Access) {
        match self.namespaces.get_mut(index) {
            Some(ns) => ns.access = access,
            None => return self.broken("what is allowed on a namespace that is not there"),
        }
        self.index_namespaces();
    }

    /// From now on the namespace of this index is reached so.
    pub fn set_ana_state(&mut self, index: usize, state: AnaState) {
        match self.namespaces.get_mut(index) {
            Some(ns) => ns.ana = state,
            None => return self.broken("how a namespace is reached that is not there"),
        }
        self.index_namespaces();
    }

    /// From now on commands on the namespace of this index end with this status.
    pub(super) fn close(&mut self, index: usize, status: Option<Status>) {
        match self.namespaces.get_mut(index) {
            Some(ns) => ns.closed = status,
            None => return self.broken("a namespace is closed that is not there"),
        }
        self.index_namespaces();
    }

    /// The host has enabled extended protection information formats, or not.
    pub(super) fn enable_formats(&mut self, lbafee: bool) {
        if std::mem::replace(&mut self.lbafee, lbafee) != lbafee {
            self.index_namespaces();
        }
    }

    /// What commands for the namespace's blocks end with, as the host has not enabled its format.
    fn not_enabled(&self, ns: &Namespace) -> Option<Status> {
        let disabled = !self.lbafee && ns.has_extended_format();
        disabled.then_some(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true))
    }

    /// What a command ends with whose namespace has a format that the host has not enabled. Flush
    /// and reservations are of no format: they neither read nor change blocks.
    fn disabled(&self, command: &Command) -> Option<Status> {
        let opcode = command.nvm_opcode();
        if opcode == NvmOpcode::FLUSH || commands::group(opcode).is_none() {
            return None;
        }
        let index = self.namespace_index(command.nsid.get()).ok()?;
        self.not_enabled(self.namespaces.get(index)?)
    }

    /// There may be commands that are not to be done.
    pub(super) fn is_gated(&self) -> bool {
        self.offer.shared || self.closed
    }

    /// What a command ends with on a namespace that is closed.
    fn closed(&self, nsid: u32) -> Option<Status> {
        match nsid {
            NSID_BROADCAST => self.active().find_map(|ns| ns.closed),
            nsid => {
                let index = self.namespace_index(nsid).ok()?;
                self.namespaces.get(index)?.closed
            }
        }
    }

    /// What a command for a namespace ends with, whatever it is, that is not reached by this
    /// controller: nothing of it can be done.
    pub fn unreached(&self, nsid: u32) -> Option<Status> {
        match nsid {
            // All: as of the first that is not reached.
            NSID_BROADCAST => self.active().find_map(|ns| ana::refusal(ns.ana)),
            nsid => {
                let index = self.namespace_index(nsid).ok()?;
                ana::refusal(self.namespaces.get(index)?.ana)
            }
        }
    }

    /// The commands that are in flight on the namespace of this index are waited for:
    /// [`Engine::fenced`]. They are not asked to end early: what a volume gives up may still
    /// happen, and come after what others write then.
    pub fn fence(&mut self, index: usize) {
        for tag in self.slots.touching(index) {
            if !self.fences.contains(&(index, tag)) {
                self.fences.push((index, tag));
            }
        }
    }

    /// Nothing is left of what is waited for on the namespace of this index.
    pub fn fenced(&mut self, index: usize) -> bool {
        let slots = &mut self.slots;
        self.fences.retain(|(_, tag)| slots.is_in_flight(*tag));
        self.fences.iter().all(|(of, _)| *of != index)
    }

    /// What a command ends with that is not to be done, for whichever reason.
    pub(super) fn barred(&self, command: &Command) -> Option<Status> {
        let nsid = command.nsid.get();
        let unreached = self.unreached(nsid);
        // Reservations neither read nor change blocks, and end what another host erases.
        let reserves = self.offer.shared && commands::group(command.nvm_opcode()).is_none();
        let closed = unreached.or_else(|| self.closed(nsid).filter(|_| !reserves));
        let disabled = closed.or_else(|| self.disabled(command));
        disabled.or_else(|| self.conflict(command))
    }

    /// What a command ends with that would read this namespace, too.
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

    /// What a command ends with that is not allowed on its namespace.
    fn conflict(&self, command: &Command) -> Option<Status> {
        let group = commands::group(command.nvm_opcode())?;
        let allowed = match command.nsid.get() {
            // Flush is the only one, and of all namespaces that are there.
            NSID_BROADCAST => self.active().all(|ns| ns.access.allows(group)),
            nsid => {
                let index = self.namespace_index(nsid).ok()?;
                self.namespaces.get(index)?.access.allows(group)
            }
        };
        (!allowed).then_some(Status::RESERVATION_CONFLICT.with_dnr(true))
    }

    /// Lists anew which namespaces the short way finds.
    pub(super) fn index_namespaces(&mut self) {
        let barred = |ns: &Namespace| ns.closed.is_some() || self.not_enabled(ns).is_some();
        let closed = self.active().any(barred);
        self.closed = closed;
        let placed = self.active().any(Namespace::is_placed);
        self.placed = placed;
        self.open_by_nsid.clone_from(&self.by_nsid);
        for found in &mut self.open_by_nsid {
            let ns = self.namespaces.get(usize::from(*found));
            // Of writes to zones each is checked, of those by handles each is counted, of commands
            // where blocks are marked each is looked at, and blocks with metadata are not the
            // volume's alone.
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
