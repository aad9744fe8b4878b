//! A namespace that controllers of a subsystem share, with its reservations. Reservation operations
//! run one at a time.

use super::previous::LeftNamespace;
use super::{ControlMessage, Erasing, Inbox, ReservationStore, Subsystem};
use crate::marks::Marks;
use crate::zoned::ZonedState;
use nvme::Status;
use reservations::{
    Access, Change, Executed, HostId, MAX_NOTICES, NumberedNotice, Operation, Reservations,
    StoredReservations,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use sync::Unpoisoned;

/// Unique identifier of a reservation command: a number that no other command has, and the ID of
/// its controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub number: u64,
    pub cntlid: u16,
}

impl Token {
    fn bytes(self) -> [u8; 16] {
        let cntlid = u64::from(self.cntlid).to_le_bytes();
        zerocopy::transmute!([self.number.to_le_bytes(), cntlid])
    }

    /// Returns whether an executed operation was a command of this controller.
    fn is_of(executed: &Executed, cntlid: u16) -> bool {
        let [_, number]: [u64; 2] = zerocopy::transmute!(executed.token);
        u64::from_le(number) == u64::from(cntlid)
    }
}

/// Maximum number of stored operations with commands that the next process would execute again.
/// Further operations wait.
const MAX_UNACKNOWLEDGED: usize = 32;
/// Maximum number of operations of earlier processes that are remembered.
const MAX_EARLIER: usize = 64;

/// A reservation operation that a controller has submitted.
#[derive(Clone, Debug)]
pub(crate) struct Submitted {
    /// ID of the controller that received the command.
    pub cntlid: u16,
    pub operation: Operation,
    /// Number by which the controller identifies the operation.
    pub ticket: u64,
    /// Identifier of the command; `None` for an operation that may be executed twice.
    pub token: Option<Token>,
    /// Whether the previous process may have executed the operation.
    pub is_repeated: bool,
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
    /// Stored operations with commands that the next process would execute again.
    executed: Vec<Executed>,
    /// Operations that earlier processes have stored: their commands may be executed again.
    earlier: Vec<Executed>,
    /// Newest notices, for controllers that the previous process had and this one has not yet.
    notices: VecDeque<NumberedNotice>,
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
    pub(super) fn new(
        nsid: u32,
        group: u32,
        subsystem: Weak<Subsystem>,
        stored: StoredReservations,
        store: Option<Box<dyn ReservationStore>>,
        left: LeftNamespace,
    ) -> Arc<Self> {
        let mut earlier = stored.executed;
        earlier.drain(..earlier.len().saturating_sub(MAX_EARLIER));
        Arc::new(SharedNamespace {
            nsid,
            group,
            subsystem,
            store,
            marks: Arc::new(left.marks),
            state: Mutex::new(NamespaceState {
                reservations: stored.state,
                executed: Vec::new(),
                earlier,
                notices: stored.notices.into(),
                attached: BTreeMap::new(),
                erasing: left.erasing,
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
    /// access. Returns the present access and the number of the last notice; `None` when the other
    /// controllers use different zones for the namespace.
    pub fn attach(
        &self,
        cntlid: u16,
        host: HostId,
        inbox: &Arc<Inbox>,
        zones: Option<&Arc<ZonedState>>,
    ) -> Option<(Access, u64)> {
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
        Some((access, state.last_notice()))
    }

    /// Returns the notices of a host after the one with this number, oldest first.
    pub fn notices_after(&self, number: u64, host: &HostId) -> Vec<NumberedNotice> {
        let state = self.lock();
        let notices = state.notices.iter();
        let later = notices.filter(|notice| notice.number > number && notice.host == *host);
        later.copied().collect()
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
        state
            .executed
            .retain(|executed| !Token::is_of(executed, cntlid));
        if let Some(CurrentOperation::Settling { waiting_for, .. }) = &mut state.running {
            waiting_for.remove(&cntlid);
        }
        self.go_on(state);
    }

    /// Forgets an executed operation: the next process does not execute its command again.
    pub fn acknowledge(self: &Arc<Self>, token: Token) {
        let token = token.bytes();
        let mut state = self.lock();
        state.earlier.retain(|executed| executed.token != token);
        state.executed.retain(|executed| executed.token != token);
        self.go_on(state);
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
        let mut state = self.lock();
        if number == state.number
            && let Some(CurrentOperation::Settling { waiting_for, .. }) = &mut state.running
        {
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
                }) if waiting_for.is_empty() => {
                    state.reply(self.nsid, &submitted, Status::SUCCESS);
                }
                running => {
                    state.running = running;
                    return;
                }
            }
            if state.executed.len() >= MAX_UNACKNOWLEDGED {
                return;
            }
            let Some(submitted) = state.waiting.pop_front() else {
                return;
            };
            let Some(host) = state.host(submitted.cntlid) else {
                // The namespace was detached from that controller meanwhile.
                continue;
            };
            if let Some(status) = state.earlier_status(&submitted) {
                state.reply(self.nsid, &submitted, status);
                continue;
            }
            let mut next = state.reservations.clone();
            let change = match next.execute(&host, &submitted.operation) {
                Ok(change) => change,
                Err(refusal) => {
                    state.reply(self.nsid, &submitted, refusal.status());
                    continue;
                }
            };
            if next == state.reservations {
                state.reply(self.nsid, &submitted, Status::SUCCESS);
                continue;
            }
            let Some(store) = &self.store else {
                state.install(self.nsid, submitted, next, &change);
                continue;
            };
            let stored = state.stored(&submitted, &next, &change);
            state.running = Some(CurrentOperation::Saving {
                submitted,
                next,
                change,
            });
            drop(state);
            crash::point!("controller.reservation.executed");
            let shared = Arc::downgrade(self);
            let done = move |kept| {
                if let Some(shared) = shared.upgrade() {
                    shared.saved(kept);
                }
            };
            return store.save(stored, Box::new(done));
        }
    }

    fn saved(self: &Arc<Self>, kept: bool) {
        crash::point!("controller.reservation.stored");
        let mut state = self.lock();
        match state.running.take() {
            Some(CurrentOperation::Saving {
                submitted,
                next,
                change,
            }) => {
                if kept {
                    state.executed.extend(NamespaceState::executed(&submitted));
                    state.install(self.nsid, submitted, next, &change)
                } else {
                    // The save failed, so the next process may find either state.
                    state.reply(self.nsid, &submitted, Status::INTERNAL_ERROR)
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

    fn last_notice(&self) -> u64 {
        self.notices.back().map_or(0, |notice| notice.number)
    }

    /// Returns the status with which an earlier process has executed the operation; `None` when
    /// none has.
    fn earlier_status(&self, submitted: &Submitted) -> Option<Status> {
        let token = submitted.token.filter(|_| submitted.is_repeated)?.bytes();
        let mut earlier = self.earlier.iter();
        let found = earlier.find(|executed| executed.token == token)?;
        Some(found.status)
    }

    /// Returns the record of an operation that is stored with its effect.
    fn executed(submitted: &Submitted) -> Option<Executed> {
        let token = submitted.token?.bytes();
        let status = Status::SUCCESS;
        Some(Executed { token, status })
    }

    /// Numbers the notices of a change.
    fn numbered<'a>(&self, change: &'a Change) -> impl Iterator<Item = NumberedNotice> + 'a {
        let numbers = (1..).map({
            let last = self.last_notice();
            move |number| last + number
        });
        let notices = change.notices.iter().zip(numbers);
        notices.map(|(notice, number)| NumberedNotice {
            number,
            host: notice.host,
            notification: notice.notification,
        })
    }

    /// Returns the content of the store after an operation.
    fn stored(
        &self,
        submitted: &Submitted,
        next: &Reservations,
        change: &Change,
    ) -> StoredReservations {
        let executed = self.earlier.iter().chain(&self.executed).copied();
        let notices = self.notices.iter().copied().chain(self.numbered(change));
        StoredReservations {
            state: next.clone(),
            executed: executed.chain(Self::executed(submitted)).collect(),
            notices: notices.collect(),
        }
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
        let notices: Vec<NumberedNotice> = self.numbered(change).collect();
        self.notices.extend(&notices);
        let old = self.notices.len().saturating_sub(MAX_NOTICES);
        self.notices.drain(..old);
        for (cntlid, attached) in &mut self.attached {
            let host = attached.host;
            for notice in notices.iter().filter(|notice| notice.host == host) {
                attached.inbox.leave(ControlMessage::Notice {
                    nsid,
                    notification: notice.notification,
                    number: notice.number,
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

    fn reply(&self, nsid: u32, submitted: &Submitted, status: Status) {
        if let Some(attached) = self.attached.get(&submitted.cntlid) {
            attached.inbox.leave(ControlMessage::Done {
                nsid,
                ticket: submitted.ticket,
                token: submitted.token,
                status,
            });
        }
    }
}
