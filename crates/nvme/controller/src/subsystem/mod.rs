//! An NVM subsystem of several controllers: its members, the hosts that use them, and the
//! namespaces that they share, with their reservations ("NVMe Base 2.1", 2.4.1 and 8.1.22).
//!
//! ```text
//!  controller P (a worker)             SharedNamespace              controller F (another worker)
//!   control half -- submit ----------> one operation at a time
//!                                       execute on a copy
//!                                       save (a thread) . . . . . .
//!                                       install -- Access (inbox) -> control half: the engine
//!                                       answer <------------------   checks each command from
//!                                        :                           now on; of those in flight,
//!   control half <-- Done (inbox) ---- all have answered             with abort, none is left
//! ```
//!
//! The controllers of a subsystem may belong to different workers, and no controller waits for
//! another one: messages go to the other's [`Inbox`], and its worker is woken. No blocking call
//! is made under the locks here. They are taken by reservation commands, and when controllers and
//! namespaces are added or removed; by no read or write.
//!
//! *A fenced host is fenced when the command that fences it completes.* An operation completes
//! ([`ControlMessage::Done`]) only when each controller whose host lost or gained rights by it has
//! answered the [`ControlMessage::Access`] with the new rights. The controller answers when its
//! engine has applied them; that occurs between two commands, on the thread that fetches them.
//! After the answer, every command that the engine begins is checked against the new rights, and an
//! earlier one has either completed or is in flight. With Preempt and Abort the controller answers
//! only when all of these have ended, in the volume, too. A process that dies on the way leaves the
//! state before or the one after it.
//!
//! *An operation takes effect once*, also if the process dies. Each command has a [`Token`] in its
//! record, which is stored with the effect of the operation. The next process executes the command
//! again, finds the token, and answers from it. Notices are stored with the operation, too, and
//! numbered: a controller that continues adds those that its state does not contain.

mod erasing;
mod inbox;
mod namespace;
mod previous;

pub(crate) use erasing::Erasing;
pub(crate) use inbox::{ControlMessage, Inbox};
pub(crate) use namespace::{AwaitedRelease, SharedNamespace, Submitted, Token};
use previous::LeftNamespaces;

use crate::admin::EventLog;
use crate::ana::{AnaChange, FIRST_GROUP};
use crate::config::ConfigError;
use nvme::log::AnaState;
use reservations::{HostId, StoredReservations};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// Largest valid controller ID (CNTLID); higher values are reserved ("NVMe Base 2.1", 5.1.13.2.1).
pub const MAX_CNTLID: u16 = 0xffef;

/// Callback that receives whether [`ReservationStore::save`] succeeded.
pub type Saved = Box<dyn FnOnce(bool) + Send>;

/// Storage of a namespace's reservations, from which the next process reads them (Persist Through
/// Power Loss).
pub trait ReservationStore: Send + Sync {
    /// Stores the reservations. Must not block. Calls `done` once, on any thread: with `true` when
    /// the state survives the end of the process and, with PTPL, a loss of power. The namespace
    /// makes one call at a time. If `done` is dropped without a call, the host's command never
    /// completes.
    fn save(&self, stored: StoredReservations, done: Saved);
}

/// An NVM subsystem: its controllers, and the namespaces that they share.
#[derive(Debug, Default)]
pub struct Subsystem {
    /// Controllers of the subsystem, by controller ID.
    members: Mutex<BTreeMap<u16, Member>>,
    namespaces: Mutex<BTreeMap<u32, Arc<SharedNamespace>>>,
    /// ANA states that were set, by controller ID and group. A state may be set before its
    /// controller joins.
    ana: Mutex<BTreeMap<(u16, u32), AnaState>>,
    /// State that controllers of the previous process have left of the namespaces.
    left: LeftNamespaces,
    /// Persistent event log, common to all controllers of the subsystem.
    events: Arc<EventLog>,
}

/// A controller that belongs to the subsystem.
#[derive(Debug)]
struct Member {
    /// Host Identifier of the host that uses the controller.
    host: HostId,
    inbox: Arc<Inbox>,
}

impl Subsystem {
    /// Creates a subsystem without controllers.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Adds a namespace to the subsystem. `reservations` are those that `store` has stored so far.
    /// Without a store, reservations end with the subsystem. If the namespace exists, it stays
    /// unchanged.
    pub fn add_namespace(
        self: &Arc<Self>,
        nsid: u32,
        reservations: impl Into<StoredReservations>,
        store: Option<Box<dyn ReservationStore>>,
    ) {
        self.add_namespace_to(FIRST_GROUP, nsid, reservations, store);
    }

    /// Adds a namespace to ANA group `group`, 1 to [`MAX_ANA_GROUP`](crate::MAX_ANA_GROUP).
    pub fn add_namespace_to(
        self: &Arc<Self>,
        group: u32,
        nsid: u32,
        reservations: impl Into<StoredReservations>,
        store: Option<Box<dyn ReservationStore>>,
    ) {
        let mut namespaces = self.namespaces.lock().unpoisoned();
        namespaces.entry(nsid).or_insert_with(|| {
            let subsystem = Arc::downgrade(self);
            let stored = reservations.into();
            SharedNamespace::new(nsid, group, subsystem, stored, store, self.left.take(nsid))
        });
    }

    /// Returns whether the subsystem has a namespace with this ID.
    pub fn has_namespace(&self, nsid: u32) -> bool {
        self.namespace(nsid).is_some()
    }

    pub(crate) fn events(&self) -> &Arc<EventLog> {
        &self.events
    }

    pub(crate) fn namespace(&self, nsid: u32) -> Option<Arc<SharedNamespace>> {
        self.namespaces.lock().unpoisoned().get(&nsid).cloned()
    }

    /// Returns the IDs of the subsystem's controllers in ascending order.
    pub fn controllers(&self) -> Vec<u16> {
        self.members.lock().unpoisoned().keys().copied().collect()
    }

    /// Returns the ANA state of the path from a controller to a group of namespaces. The default is
    /// optimized.
    pub fn ana_state(&self, cntlid: u16, group: u32) -> AnaState {
        let states = self.ana.lock().unpoisoned();
        let state = states.get(&(cntlid, group));
        state.copied().unwrap_or(AnaState::OPTIMIZED)
    }

    /// Sets the ANA state of the path from a controller to a group of namespaces. The controller's
    /// host is notified, if it has enabled that. The controller need not have joined yet.
    pub fn set_ana_state(&self, cntlid: u16, group: u32, state: AnaState) -> AnaChange {
        let (done, change) = AnaChange::new();
        // The lock is held while the controller is notified, so that it learns of changes in order.
        let mut states = self.ana.lock().unpoisoned();
        states.insert((cntlid, group), state);
        if let Some(member) = self.members.lock().unpoisoned().get(&cntlid) {
            member
                .inbox
                .leave(ControlMessage::Ana { group, state, done });
        }
        change
    }

    /// Adds a controller to the subsystem and returns its membership.
    pub(crate) fn join(
        self: &Arc<Self>,
        cntlid: u16,
        host: HostId,
        inbox: &Arc<Inbox>,
    ) -> Result<Membership, ConfigError> {
        let mut members = self.members.lock().unpoisoned();
        if members.contains_key(&cntlid) {
            return Err(ConfigError::DuplicateController(cntlid));
        }
        let inbox = inbox.clone();
        members.insert(cntlid, Member { host, inbox });
        Ok(Membership {
            subsystem: self.clone(),
            cntlid,
        })
    }

    /// Returns the ID of a controller that the given host uses, if there is one.
    pub(crate) fn controller_of(&self, host: &HostId) -> Option<u16> {
        let members = self.members.lock().unpoisoned();
        let mut members = members.iter();
        let found = members.find(|(_, member)| member.host == *host);
        found.map(|(cntlid, _)| *cntlid)
    }
}

/// A controller's membership in its subsystem; dropping it frees the controller ID.
#[derive(Debug)]
pub(crate) struct Membership {
    subsystem: Arc<Subsystem>,
    cntlid: u16,
}

impl Membership {
    pub fn subsystem(&self) -> &Arc<Subsystem> {
        &self.subsystem
    }

    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut members = self.subsystem.members.lock().unpoisoned();
        members.remove(&self.cntlid);
    }
}
