//! A namespace that controllers of a subsystem share, with its reservations. Reservation operations
//! run one at a time.

use super::{ControlMessage, Erasing, Inbox, ReservationStore, Subsystem};
use crate::marks::Marks;
use crate::zoned::ZonedState;
use nvme::Status;
use reservations::{Access, Change, HostId, Operation, Reservations};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use sync::Unpoisoned;

/// A reservation operation that a controller has submitted.
#[derive(Clone, Debug)]
pub(crate) struct Submitted {
    /// ID of the controller that received the command.
    pub cntlid: u16,
    pub operation: Operation,
    /// Number by which the controller identifies the operation.
    pub ticket: u64,
}

/// State of the reservation operation that a shared namespace is executing.
#[derive(Debug)]
enum CurrentOperation {
    /// The new reservations are being stored.
    Saving {
        submitted: Submitted,
        next: Reservations,
        change: Change,
    },
    /// The new reservations are in effect, and some controllers have yet to answer.
    Settling {
        submitted: Submitted,
        waiting_for: BTreeSet<u16>,
    },
}

/// Entry of a shared namespace for a controller that it is attached to.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) inbox: Arc<Inbox>,
    host: HostId,
    /// Zones of the namespace in the controller; dangling if the namespace has no zones.
    zones: Weak<ZonedState>,
    /// Access rights of the host under reservations, as last sent to the controller.
    access: Access,
    marked: MarkNotice,
    /// Whether the controller's inbox contains a message about changed marks.
    told_of_marks: bool,
    /// Whether the controller's inbox contains a message about an erasure.
    pub(super) told_of_erasing: bool,
    /// Reference that the controller drops when it has applied the message about an erasure.
    pub(super) erasing_awaited: Option<Arc<AwaitedRelease>>,
}

/// Changes of marks by other controllers that a controller has not handled yet.
#[derive(Debug, Default)]
pub(crate) struct MarkNotice {
    /// Whether other controllers have marked blocks as uncorrectable since this controller last
    /// checked.
    pub news: bool,
    /// References to drop when the controller's engine has checked the marks.
    pub awaited: Vec<Arc<AwaitedRelease>>,
}

/// Reference counted by [`Arc`], which the awaited controllers hold. When the last of them drops
/// it, the waiting controller is woken.
#[derive(Debug)]
pub(crate) struct AwaitedRelease(Arc<Inbox>);

impl AwaitedRelease {
    /// Creates a reference that wakes the waiting controller, the owner of this inbox.
    pub fn by(inbox: &Arc<Inbox>) -> Arc<Self> {
        Arc::new(AwaitedRelease(inbox.clone()))
    }
}

impl Drop for AwaitedRelease {
    fn drop(&mut self) {
        self.0.wake();
    }
}

#[derive(Debug)]
pub(super) struct NamespaceState {
    reservations: Reservations,
    pub(super) attached: BTreeMap<u16, Attached>,
    pub(super) erasing: Erasing,
    waiting: VecDeque<Submitted>,
    running: Option<CurrentOperation>,
    /// Number of the last [`ControlMessage::Access`] message; controllers answer with this number.
    number: u64,
}

/// A namespace that controllers of a subsystem share.
pub(crate) struct SharedNamespace {
    nsid: u32,
    /// ANA group that the namespace belongs to (ANAGRPID).
    group: u32,
    subsystem: Weak<Subsystem>,
    store: Option<Box<dyn ReservationStore>>,
    marks: Arc<Marks>,
    state: Mutex<NamespaceState>,
}

impl fmt::Debug for SharedNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedNamespace")
            .field("nsid", &self.nsid)
            .finish_non_exhaustive()
    }
}

impl SharedNamespace {
    pub fn new(
        nsid: u32,
        group: u32,
        subsystem: Weak<Subsystem>,
        reservations: Reservations,
        store: Option<Box<dyn ReservationStore>>,
    ) -> Arc<Self> {
        Arc::new(SharedNamespace {
            nsid,
            group,
            subsystem,
            store,
            marks: Arc::default(),
            state: Mutex::new(NamespaceState {
                reservations,
                attached: BTreeMap::new(),
                erasing: Erasing::default(),
                waiting: VecDeque::new(),
                running: None,
                number: 0,
            }),
        })
    }

    pub fn nsid(&self) -> u32 {
        self.nsid
    }

    /// Returns the namespace's ANA group (ANAGRPID), which is equal for all controllers.
    pub fn group(&self) -> u32 {
        self.group
    }

    /// Returns the IDs of the controllers that the namespace is attached to, in ascending order.
    pub fn controllers(&self) -> Vec<u16> {
        self.lock().attached.keys().copied().collect()
    }

    /// Returns whether Persist Through Power Loss is enabled for reservations, and whether the
    /// namespace supports it.
    pub fn persistence(&self) -> (bool, bool) {
        let state = self.lock();
        (state.reservations.ptpl(), state.reservations.can_persist())
    }

    /// Returns the data of Reservation Report, in the extended structure if requested.
    pub fn report(&self, extended: bool) -> Vec<u8> {
        let subsystem = self.subsystem.upgrade();
        let controller = |host: &HostId| subsystem.as_ref()?.controller_of(host);
        self.lock().reservations.report(extended, controller)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, NamespaceState> {
        self.state.lock().unpoisoned()
    }

    /// Attaches the namespace to a controller, which is notified of later changes of its host's
    /// access. Returns the present access; `None` when the other controllers use different zones
    /// for the namespace.
    pub fn attach(
        &self,
        cntlid: u16,
        host: HostId,
        inbox: &Arc<Inbox>,
        zones: Option<&Arc<ZonedState>>,
    ) -> Option<Access> {
        let zones = zones.map_or_else(Weak::new, Arc::downgrade);
        let mut state = self.lock();
        let mut others = state.attached.values();
        if others.any(|other| !other.zones.ptr_eq(&zones)) {
            return None;
        }
        let access = state.reservations.access(&host);
        let attached = Attached {
            inbox: inbox.clone(),
            host,
            zones,
            access,
            marked: MarkNotice::default(),
            told_of_marks: false,
            told_of_erasing: false,
            erasing_awaited: None,
        };
        state.attached.insert(cntlid, attached);
        Some(access)
    }

    /// Returns the marks of the namespace's blocks, which all its controllers share.
    pub fn marks(&self) -> &Arc<Marks> {
        &self.marks
    }

    /// Notifies the other controllers that controller `cntlid` has changed marks. With `awaited`,
    /// that controller has marked blocks, and waits until the others have checked the marks.
    pub fn tell_of_marks(&self, cntlid: u16, awaited: Option<&Arc<AwaitedRelease>>) {
        let nsid = self.nsid;
        let mut state = self.lock();
        let others = state.attached.iter_mut().filter(|(id, _)| **id != cntlid);
        for (_, attached) in others {
            attached.marked.news |= awaited.is_some();
            attached.marked.awaited.extend(awaited.cloned());
            if !std::mem::replace(&mut attached.told_of_marks, true) {
                attached.inbox.leave(ControlMessage::Marks { nsid });
            }
        }
    }

    /// Takes the changes that a [`ControlMessage::Marks`] announced to controller `cntlid`.
    pub fn take_marked(&self, cntlid: u16) -> MarkNotice {
        let mut state = self.lock();
        let Some(attached) = state.attached.get_mut(&cntlid) else {
            return MarkNotice::default();
        };
        attached.told_of_marks = false;
        std::mem::take(&mut attached.marked)
    }

    /// Detaches the namespace from controller `cntlid`, which has no outstanding command on the
    /// namespace and will begin none.
    pub fn detach(self: &Arc<Self>, cntlid: u16) {
        let mut state = self.lock();
        state.attached.remove(&cntlid);
        state.end_erasing_of(self.nsid, cntlid);
        state.withdraw(cntlid);
        self.answered(state, cntlid);
    }

    /// Submits a reservation operation of a controller's host. [`ControlMessage::Done`] reports its
    /// end.
    pub fn submit(self: &Arc<Self>, submitted: Submitted) {
        let mut state = self.lock();
        state.waiting.push_back(submitted);
        self.go_on(state);
    }

    /// Drops the waiting operations of a controller. An operation in progress continues.
    pub fn withdraw(&self, cntlid: u16) {
        self.lock().withdraw(cntlid);
    }

    /// Handles the answer of a controller to the [`ControlMessage::Access`] with this number.
    pub fn answer(self: &Arc<Self>, cntlid: u16, number: u64) {
        let state = self.lock();
        if number == state.number {
            self.answered(state, cntlid);
        }
    }

    fn answered(self: &Arc<Self>, mut state: MutexGuard<'_, NamespaceState>, cntlid: u16) {
        if let Some(CurrentOperation::Settling { waiting_for, .. }) = &mut state.running {
            waiting_for.remove(&cntlid);
            self.go_on(state);
        }
    }

    /// Executes the waiting reservation operations, until one has to wait for the store or for
    /// controllers.
    fn go_on(self: &Arc<Self>, mut state: MutexGuard<'_, NamespaceState>) {
        loop {
            match state.running.take() {
                None => {}
                Some(CurrentOperation::Settling {
                    submitted,
                    waiting_for,
                }) if waiting_for.is_empty() => state.reply(&submitted, Status::SUCCESS),
                running => {
                    state.running = running;
                    return;
                }
            }
            let Some(submitted) = state.waiting.pop_front() else {
                return;
            };
            let Some(host) = state.host(submitted.cntlid) else {
                // The namespace was detached from that controller meanwhile.
                continue;
            };
            let mut next = state.reservations.clone();
            let change = match next.execute(&host, &submitted.operation) {
                Ok(change) => change,
                Err(refusal) => {
                    state.reply(&submitted, refusal.status());
                    continue;
                }
            };
            if next == state.reservations {
                state.reply(&submitted, Status::SUCCESS);
                continue;
            }
            let Some(store) = &self.store else {
                state.install(self.nsid, submitted, next, &change);
                continue;
            };
            state.running = Some(CurrentOperation::Saving {
                submitted,
                next: next.clone(),
                change,
            });
            drop(state);
            let shared = Arc::downgrade(self);
            let done = move |kept| {
                if let Some(shared) = shared.upgrade() {
                    shared.saved(kept);
                }
            };
            return store.save(next, Box::new(done));
        }
    }

    fn saved(self: &Arc<Self>, kept: bool) {
        let mut state = self.lock();
        match state.running.take() {
            Some(CurrentOperation::Saving {
                submitted,
                next,
                change,
            }) => {
                if kept {
                    state.install(self.nsid, submitted, next, &change)
                } else {
                    // The save failed, so the next process may find either state.
                    state.reply(&submitted, Status::INTERNAL_ERROR)
                }
            }
            running => state.running = running,
        }
        self.go_on(state);
    }
}

impl NamespaceState {
    fn host(&self, cntlid: u16) -> Option<HostId> {
        self.attached.get(&cntlid).map(|attached| attached.host)
    }

    fn withdraw(&mut self, cntlid: u16) {
        self.waiting.retain(|submitted| submitted.cntlid != cntlid);
    }

    /// Puts new reservations into effect. Notifies the controllers of hosts with changed access,
    /// and waits for their answers.
    fn install(&mut self, nsid: u32, submitted: Submitted, next: Reservations, change: &Change) {
        self.reservations = next;
        self.number += 1;
        let number = self.number;
        let mut waiting_for = BTreeSet::new();
        for (cntlid, attached) in &mut self.attached {
            let host = attached.host;
            for notice in change.notices.iter().filter(|notice| notice.host == host) {
                attached.inbox.leave(ControlMessage::Notice {
                    nsid,
                    notification: notice.notification,
                });
            }
            let access = self.reservations.access(&host);
            let abort = submitted.operation.aborts() && change.preempted.contains(&host);
            if std::mem::replace(&mut attached.access, access) != access || abort {
                waiting_for.insert(*cntlid);
                attached.inbox.leave(ControlMessage::Access {
                    nsid,
                    access,
                    abort,
                    number,
                });
            }
        }
        self.running = Some(CurrentOperation::Settling {
            submitted,
            waiting_for,
        });
    }

    fn reply(&self, submitted: &Submitted, status: Status) {
        if let Some(attached) = self.attached.get(&submitted.cntlid) {
            attached.inbox.leave(ControlMessage::Done {
                ticket: submitted.ticket,
                status,
            });
        }
    }
}
