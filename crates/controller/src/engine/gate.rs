//! What the host may do on a namespace that it shares with others: reservations ("NVMe Base 2.1",
//! 8.1.22).
//!
//! The control half says so. A namespace on which everything is allowed is found by the short way
//! ([`run`](super::run)), which knows nothing of this; any other one is not, so that its commands
//! take the general way, each of them checked ([`Engine::conflict`]).

use super::{Engine, NO_NAMESPACE, commands};
use nvme::cmd::NSID_BROADCAST;
use nvme::{Command, Status};
use reservations::Access;

impl Engine {
    /// From now on this is allowed on the namespace of this index.
    pub fn set_access(&mut self, index: usize, access: Access) {
        match self.namespaces.get_mut(index) {
            Some(ns) => ns.access = access,
            None => return self.broken("what is allowed on a namespace that is not there"),
        }
        self.index_namespaces();
    }

    /// The commands that are in flight on the namespace of this index are waited for:
    /// [`Engine::fenced`]. They are not asked to end early: what a volume gives up may still
    /// happen, and come after what others write then.
    pub fn fence(&mut self, index: usize) {
        for tag in self.slots.touching(index) {
            if !self.fences.contains(&tag) {
                self.fences.push(tag);
            }
        }
    }

    /// Nothing is left of what is waited for.
    pub fn fenced(&mut self) -> bool {
        let slots = &mut self.slots;
        self.fences.retain(|tag| slots.is_in_flight(*tag));
        self.fences.is_empty()
    }

    /// What a command ends with that is not allowed on its namespace.
    pub(super) fn conflict(&self, command: &Command) -> Option<Status> {
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
        self.open_by_nsid.clone_from(&self.by_nsid);
        for found in &mut self.open_by_nsid {
            let ns = self.namespaces.get(usize::from(*found));
            if ns.is_some_and(|ns| ns.access != Access::FULL) {
                *found = NO_NAMESPACE;
            }
        }
    }
}
