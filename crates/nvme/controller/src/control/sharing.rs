//! The control half of a controller in a subsystem: its host's access to each namespace,
//! reservation commands, and messages from the other controllers. Module [`subsystem`] describes
//! the whole.
//!
//! [`subsystem`]: crate::subsystem

use super::Controller;
use crate::ana::{self, AnaGroupEntry};
use crate::config::{ConfigError, InSubsystem, NamespaceConfig};
use crate::engine::{ReservationCommand, ReservationEnd, ReservationRequest};
use crate::marks::MarkTable;
use crate::subsystem::{
    AwaitedRelease, ControlMessage, Inbox, Membership, SharedNamespace, Submitted, Token,
};
use crate::survival::state::SharingState;
use nvme::Status;
use nvme::cmd::NSID_BROADCAST;
use nvme::log::AnaState;
use reservations::{Access, HostId, Notification, Operation};
use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::task::Waker;

/// A shared namespace that is attached to the controller, or detached but not released yet.
pub(super) struct Attachment {
    pub(super) shared: Arc<SharedNamespace>,
    /// Index of the namespace in the engine's table of namespaces.
    pub(super) index: usize,
    access: Access,
    /// Number of the last reservation notice.
    noticed: u64,
    leaving: bool,
}

/// ANA state of the controller's path to one group of namespaces.
#[derive(Clone, Copy)]
struct Group {
    state: AnaState,
    /// Number of changes of the group's ANA state so far, starting at 1.
    changes: u64,
}

/// Requester that is notified when certain commands of this controller are no longer outstanding.
pub(super) enum DrainWaiter {
    /// A shared namespace, with the number of the [`ControlMessage::Access`] to answer.
    Access(Arc<SharedNamespace>, u64),
    /// A caller that has changed a group's ANA state; notified by dropping the sender.
    Ana(u32, Sender<()>),
    /// A controller that erases a namespace; notified by dropping the [`Arc`].
    Erasing(u32, Arc<AwaitedRelease>),
}

impl DrainWaiter {
    fn is_about(&self, namespace: &SharedNamespace) -> bool {
        match self {
            DrainWaiter::Access(shared, _) => shared.nsid() == namespace.nsid(),
            DrainWaiter::Ana(group, _) => namespace.group() == *group,
            DrainWaiter::Erasing(nsid, _) => namespace.nsid() == *nsid,
        }
    }
}

/// Command that waits for the end of a reservation operation on a shared namespace.
enum Ticket {
    Command(Box<ReservationCommand>),
    /// A Set Features command, which may wait for the operations of several namespaces.
    Admin(u16),
}

/// A Set Features command that waits for reservation operations.
struct WaitingFeature {
    cid: u16,
    /// Namespace of the feature; `None` for all.
    nsid: Option<u32>,
    ptpl: bool,
    /// Number of operations that have not ended yet.
    operations: usize,
    /// Status for the command's completion: the first error of the operations, or success.
    status: Status,
}

/// State of a controller as a member of its subsystem.
pub(super) struct Sharing {
    pub(super) inbox: Arc<Inbox>,
    host: HostId,
    pub(super) attachments: Vec<Attachment>,
    tickets: BTreeMap<u64, Ticket>,
    last_ticket: u64,
    /// Requesters to notify when the commands that they wait for are no longer outstanding.
    pub(super) unanswered: Vec<DrainWaiter>,
    groups: BTreeMap<u32, Group>,
    /// Number of changes of the ANA log page since the last controller-level reset (Change Count).
    ana_changes: u64,
    waiting: Vec<WaitingFeature>,
    membership: Membership,
}

impl Drop for Sharing {
    fn drop(&mut self) {
        let cntlid = self.membership.cntlid();
        for attachment in &self.attachments {
            attachment.shared.detach(cntlid);
        }
    }
}

impl Sharing {
    /// Joins a controller to its subsystem under this controller ID.
    pub fn join(place: &InSubsystem, cntlid: u16) -> Result<Self, ConfigError> {
        let InSubsystem { subsystem, host } = place;
        if host.is_zero() {
            return Err(ConfigError::NoHost);
        }
        let inbox = Arc::default();
        Ok(Sharing {
            membership: subsystem.join(cntlid, *host, &inbox)?,
            host: *host,
            inbox,
            attachments: Vec::new(),
            tickets: BTreeMap::new(),
            last_ticket: 0,
            unanswered: Vec::new(),
            groups: BTreeMap::new(),
            ana_changes: 0,
            waiting: Vec::new(),
        })
    }

    /// Returns the shared namespaces that are attached to the controller and visible to its host.
    fn shared(&self) -> impl Iterator<Item = &Arc<SharedNamespace>> {
        let there = self
            .attachments
            .iter()
            .filter(|attachment| !attachment.leaving);
        there.map(|attachment| &attachment.shared)
    }

    /// Returns the controller's ID.
    pub(super) fn cntlid(&self) -> u16 {
        self.membership.cntlid()
    }

    /// Returns the shared namespace with this ID, if it is attached to the controller.
    pub(super) fn namespace(&self, nsid: u32) -> Option<&Arc<SharedNamespace>> {
        self.shared().find(|shared| shared.nsid() == nsid)
    }

    /// Attaches a shared namespace; `index` is its index in the engine.
    pub fn attach(&mut self, ns: &NamespaceConfig, index: usize) -> Result<(), ConfigError> {
        let nsid = ns.nsid;
        let shared = self.membership.subsystem().namespace(nsid);
        let shared = shared.ok_or(ConfigError::NotShared(nsid))?;
        if self
            .attachments
            .iter()
            .any(|attachment| attachment.shared.nsid() == nsid)
        {
            return Err(ConfigError::DuplicateNamespace(nsid));
        }
        let (cntlid, group) = (self.membership.cntlid(), shared.group());
        let access = shared.attach(cntlid, self.host, &self.inbox, ns.zones.as_ref());
        let (access, noticed) = access.ok_or(ConfigError::OtherZones(nsid))?;
        let subsystem = self.membership.subsystem();
        self.groups.entry(group).or_insert_with(|| Group {
            state: subsystem.ana_state(cntlid, group),
            changes: 1,
        });
        self.ana_changes += 1;
        self.attachments.push(Attachment {
            shared,
            index,
            access,
            noticed,
            leaving: false,
        });
        Ok(())
    }

    /// Puts the marks of all shared namespaces into `table`, so that their controllers have them in
    /// common.
    pub fn share_marks(&self, table: &MarkTable) {
        for shared in self.shared() {
            table.share(shared.nsid(), shared.marks().clone());
        }
    }

    /// Detaches the namespaces for which `which` returns `true`, and removes their entries.
    fn forget(&mut self, which: impl Fn(&Attachment) -> bool) {
        let cntlid = self.membership.cntlid();
        for attachment in self
            .attachments
            .extract_if(.., |attachment| which(attachment))
        {
            attachment.shared.detach(cntlid);
        }
    }

    fn submit(&mut self, shared: &Arc<SharedNamespace>, ticket: Ticket, operation: Operation) {
        self.last_ticket += 1;
        let cntlid = self.membership.cntlid();
        let (token, is_repeated) = match &ticket {
            Ticket::Command(command) => {
                let number = command.number;
                (Some(Token { number, cntlid }), command.is_repeated)
            }
            // The state of Persist Through Power Loss may be set twice.
            Ticket::Admin(_) => (None, false),
        };
        self.tickets.insert(self.last_ticket, ticket);
        shared.submit(Submitted {
            cntlid,
            operation,
            ticket: self.last_ticket,
            token,
            is_repeated,
        });
    }
}

impl Controller {
    /// Passes the host's access, ANA state and erasure state of each shared namespace to the
    /// engine.
    pub(super) fn set_gates(&mut self) {
        let Some(sharing) = &self.sharing else {
            return;
        };
        for attachment in &sharing.attachments {
            let access = attachment.access;
            self.engine
                .set_access(attachment.index, |ns| ns.access = access);
            let group = sharing.groups.get(&attachment.shared.group());
            if let Some(group) = group {
                let state = group.state;
                self.engine
                    .set_access(attachment.index, |ns| ns.ana = state);
            }
        }
        let attachments = sharing
            .attachments
            .iter()
            .filter(|attachment| !attachment.leaving);
        let attachments: Vec<_> = attachments.map(|p| (p.index, p.shared.erasing())).collect();
        for (index, erasing) in attachments {
            self.apply_erasing(index, erasing);
        }
    }

    /// Joins the shared namespace that is being attached at this index, and fetches the host's
    /// access.
    pub(super) fn share(&mut self, ns: &NamespaceConfig, index: usize) -> Result<(), ConfigError> {
        match &mut self.sharing {
            Some(sharing) => {
                sharing.attach(ns, index)?;
                sharing.share_marks(&self.marks.table);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Marks a shared namespace as leaving, so that new commands no longer find it.
    pub(super) fn stop_sharing(&mut self, nsid: u32) {
        let attachments = self.sharing.iter_mut();
        for attachment in attachments.flat_map(|sharing| &mut sharing.attachments) {
            attachment.leaving |= attachment.shared.nsid() == nsid;
        }
    }

    /// Forgets the detached namespaces, all of which have been released.
    pub(super) fn stopped_sharing(&mut self) {
        if let Some(sharing) = &mut self.sharing {
            sharing.forget(|attachment| attachment.leaving);
        }
    }

    /// Begins a controller-level reset: the commands that wait for operations are dropped.
    pub(super) fn reset_sharing(&mut self) {
        let Some(sharing) = &mut self.sharing else {
            return;
        };
        sharing.tickets.clear();
        sharing.waiting.clear();
        sharing.ana_changes = 0;
        for attachment in &sharing.attachments {
            attachment.shared.withdraw(sharing.membership.cntlid());
        }
    }

    /// Sets the waker by which messages from other controllers wake this worker.
    pub(super) fn wake_for_others(&self, waker: Waker) {
        if let Some(sharing) = &self.sharing {
            sharing.inbox.set_waker(waker);
        }
    }

    /// Handles messages from the other controllers. Returns whether there were any.
    pub(super) fn take_inbox(&mut self) -> bool {
        let Some(sharing) = &self.sharing else {
            return false;
        };
        let inbox = sharing.inbox.clone();
        let mut any = false;
        while let Some(message) = inbox.take() {
            any = true;
            self.touch();
            match message {
                ControlMessage::Access {
                    nsid,
                    access,
                    abort,
                    number,
                } => self.access_changed(nsid, access, abort, number),
                ControlMessage::Ana { group, state, done } => {
                    self.ana_state_changed(group, state, done)
                }
                ControlMessage::Marks { nsid } => self.marks_changed(nsid),
                ControlMessage::Erasing { nsid } => self.erasing_changed(nsid),
                ControlMessage::Notice {
                    nsid,
                    notification,
                    number,
                } => self.noticed(nsid, notification, number),
                ControlMessage::Done {
                    nsid,
                    ticket,
                    token,
                    status,
                } => {
                    self.operation_done(ticket, status);
                    let shared = self.attached(nsid).map(|attached| attached.shared.clone());
                    if let (Some(shared), Some(token)) = (shared, token) {
                        crash::point!("controller.reservation.answered");
                        shared.acknowledge(token);
                    }
                }
            }
        }
        let lost = inbox.take_lost();
        if lost > 0 {
            self.touch();
            self.lost_notices(lost);
        }
        any
    }

    fn attached(&mut self, nsid: u32) -> Option<&mut Attachment> {
        let mut attachments = self.sharing.as_mut()?.attachments.iter_mut();
        attachments.find(|attachment| attachment.shared.nsid() == nsid)
    }

    /// Handles a reservation notice, unless this controller has handled it already.
    fn noticed(&mut self, nsid: u32, notification: Notification, number: u64) {
        match self.attached(nsid) {
            Some(attachment) if attachment.noticed < number => attachment.noticed = number,
            _ => return,
        }
        self.reservation_notice(nsid, notification);
    }

    fn access_changed(&mut self, nsid: u32, access: Access, abort: bool, number: u64) {
        let Some(sharing) = &mut self.sharing else {
            return;
        };
        let mut attachments = sharing.attachments.iter_mut();
        let Some(attachment) = attachments.find(|attachment| attachment.shared.nsid() == nsid)
        else {
            // The namespace was detached in the meantime, which counts as the answer.
            return;
        };
        attachment.access = access;
        self.engine
            .set_access(attachment.index, |ns| ns.access = access);
        if !abort {
            return attachment
                .shared
                .answer(sharing.membership.cntlid(), number);
        }
        self.engine
            .namespaces
            .fence(&self.engine.slots, attachment.index);
        let shared = attachment.shared.clone();
        sharing.unanswered.push(DrainWaiter::Access(shared, number));
        let status = Status::ABORTED_PREEMPT_AND_ABORT;
        self.end_erasing_early(status, |shared| shared.nsid() == nsid);
        self.migration.wait();
        self.answer_others();
    }

    /// Handles a change of marks that another controller has made.
    fn marks_changed(&mut self, nsid: u32) {
        let Some(sharing) = &self.sharing else {
            return;
        };
        let mut attachments = sharing.attachments.iter();
        let Some(attachment) = attachments.find(|attachment| attachment.shared.nsid() == nsid)
        else {
            // The namespace was detached in the meantime.
            return;
        };
        let marked = attachment.shared.take_marked(sharing.membership.cntlid());
        self.engine.look_at_marks(attachment.index);
        // The engine has checked the marks, as the other controller requires.
        drop(marked.awaited);
        if marked.news {
            self.blocks_marked();
        }
    }

    /// Notifies the other controllers that marks of a namespace have changed. With `waits`, blocks
    /// were marked, and the returned [`Weak`] expires when all controllers have applied that.
    pub(super) fn tell_of_marks(&self, nsid: u32, waits: bool) -> Weak<AwaitedRelease> {
        let Some(sharing) = &self.sharing else {
            return Weak::new();
        };
        let Some(shared) = sharing.namespace(nsid) else {
            return Weak::new();
        };
        let awaited = waits.then(|| AwaitedRelease::by(&sharing.inbox));
        shared.tell_of_marks(sharing.membership.cntlid(), awaited.as_ref());
        awaited.as_ref().map_or_else(Weak::new, Arc::downgrade)
    }

    fn ana_state_changed(&mut self, group: u32, state: AnaState, done: Sender<()>) {
        let Some(sharing) = &mut self.sharing else {
            return;
        };
        let Some(known) = sharing.groups.get_mut(&group) else {
            // No namespace of the group has been attached. Namespaces attached later start with the
            // new state.
            return;
        };
        let is_new = std::mem::replace(&mut known.state, state) != state;
        if is_new {
            known.changes += 1;
            sharing.ana_changes += 1;
        }
        let is_reached = ana::refusal(state).is_none();
        for attachment in &sharing.attachments {
            if attachment.shared.group() == group {
                self.engine
                    .set_access(attachment.index, |ns| ns.ana = state);
                if !is_reached {
                    self.engine
                        .namespaces
                        .fence(&self.engine.slots, attachment.index);
                }
            }
        }
        if !is_reached {
            sharing.unanswered.push(DrainWaiter::Ana(group, done));
            self.migration.wait();
        }
        if let Some(status) = ana::refusal(state) {
            self.end_erasing_early(status, |shared| shared.group() == group);
        }
        if is_new {
            self.ana_changed();
        }
        self.answer_others();
    }

    /// Returns the IDs of the shared namespaces for which `such` returns `true`.
    pub(crate) fn shared_where(&self, such: impl Fn(&SharedNamespace) -> bool) -> Vec<u32> {
        let shared = self.sharing.iter().flat_map(|sharing| &sharing.attachments);
        let shared = shared.filter(|attachment| such(&attachment.shared));
        shared.map(|attachment| attachment.shared.nsid()).collect()
    }

    /// Returns whether other controllers of the subsystem wait for outstanding commands of this
    /// one.
    pub(super) fn owes_answers(&self) -> bool {
        let sharing = self.sharing.as_ref();
        sharing.is_some_and(|sharing| !sharing.unanswered.is_empty())
    }

    /// Notifies each waiting party after all commands that it awaits have ended. Returns whether
    /// there were any.
    pub(super) fn answer_others(&mut self) -> bool {
        let Some(sharing) = &mut self.sharing else {
            return false;
        };
        let (erasure, engine) = (&self.admin.erasure, &mut self.engine);
        let cntlid = sharing.membership.cntlid();
        let before = sharing.unanswered.len();
        for waiter in std::mem::take(&mut sharing.unanswered) {
            // A namespace that was released has no outstanding commands.
            let attachments = sharing.attachments.iter();
            let mut attachments =
                attachments.filter(|attachment| waiter.is_about(&attachment.shared));
            // A waiting party also waits for the end of this controller's erasure of the namespace.
            // A controller that erases never waits for another erasing one.
            let waits = attachments.any(|attachment| {
                let erases = || erasure.erases(attachment.shared.nsid());
                !engine
                    .namespaces
                    .fenced(&mut engine.slots, attachment.index)
                    || !matches!(waiter, DrainWaiter::Erasing(..)) && erases()
            });
            match waiter {
                waiter if waits => sharing.unanswered.push(waiter),
                DrainWaiter::Access(shared, number) => shared.answer(cntlid, number),
                DrainWaiter::Ana(_, done) => drop(done),
                DrainWaiter::Erasing(_, awaited) => drop(awaited),
            }
        }
        sharing.unanswered.len() < before
    }

    // ---- state reported to the host

    /// Returns whether the controller belongs to a subsystem.
    pub(crate) fn is_shared(&self) -> bool {
        self.sharing.is_some()
    }

    /// Returns the identifier of the host that uses the controller; `None` outside a subsystem.
    pub(crate) fn host(&self) -> Option<HostId> {
        self.sharing.as_ref().map(|sharing| sharing.host)
    }

    /// Returns the IDs of the subsystem's controllers; outside a subsystem, only this controller's
    /// ID.
    pub(crate) fn controllers(&self) -> Vec<u16> {
        match &self.sharing {
            Some(sharing) => sharing.membership.subsystem().controllers(),
            None => vec![self.config.cntlid],
        }
    }

    /// Returns the IDs of the controllers that a namespace is attached to.
    pub(crate) fn controllers_with(&self, nsid: u32) -> Vec<u16> {
        match &self.sharing {
            Some(sharing) => match sharing.namespace(nsid) {
                Some(shared) => shared.controllers(),
                None => Vec::new(),
            },
            None => vec![self.config.cntlid],
        }
    }

    /// Returns the ANA group of a shared namespace and the group's state.
    pub(crate) fn ana_of(&self, nsid: u32) -> Option<(u32, AnaState)> {
        let sharing = self.sharing.as_ref()?;
        let group = sharing.namespace(nsid)?.group();
        let state = sharing.groups.get(&group)?.state;
        Some((group, state))
    }

    /// Returns the ANA log page of a controller in a subsystem; `None` outside one.
    pub(crate) fn shared_ana_log(&self, groups_only: bool) -> Option<Vec<u8>> {
        let sharing = self.sharing.as_ref()?;
        let told = |(group, now): (&u32, &Group)| {
            let of = sharing.shared().filter(|shared| shared.group() == *group);
            let mut nsids: Vec<u32> = of.map(|shared| shared.nsid()).collect();
            // A group without attached namespaces is not listed.
            let there = !nsids.is_empty();
            nsids.sort_unstable();
            if groups_only {
                nsids.clear();
            }
            there.then_some(AnaGroupEntry {
                group: *group,
                state: now.state,
                changes: now.changes,
                nsids,
            })
        };
        let groups: Vec<AnaGroupEntry> = sharing.groups.iter().filter_map(told).collect();
        Some(ana::log_page(sharing.ana_changes, &groups))
    }

    /// Returns whether Persist Through Power Loss of a shared namespace is enabled, and whether the
    /// namespace supports it.
    pub(crate) fn persistence(&self, nsid: u32) -> Option<(bool, bool)> {
        let shared = self.sharing.as_ref()?.namespace(nsid)?;
        Some(shared.persistence())
    }

    // ---- restart

    /// Returns the state of the membership for the next process.
    pub(crate) fn save_sharing(&self) -> Option<SharingState> {
        let sharing = self.sharing.as_ref()?;
        let groups = sharing.groups.iter();
        let notices = sharing.attachments.iter();
        let waiting = sharing.waiting.iter();
        Some(SharingState {
            host: *sharing.host.bytes(),
            ana_changes: sharing.ana_changes,
            groups: groups
                .map(|(group, known)| (*group, known.state.0, known.changes))
                .collect(),
            notices: notices
                .map(|attachment| (attachment.shared.nsid(), attachment.noticed))
                .collect(),
            persistence: waiting
                .map(|waiting| {
                    (
                        waiting.cid,
                        waiting.nsid.unwrap_or(NSID_BROADCAST),
                        waiting.ptpl,
                    )
                })
                .collect(),
        })
    }

    /// Restores the membership of the previous process's controller, after the other state: adds
    /// the notices that the state does not contain, and restarts the commands that waited for
    /// operations.
    pub(crate) fn restore_sharing(&mut self, saved: &SharingState) {
        let Some(sharing) = &mut self.sharing else {
            return;
        };
        sharing.ana_changes = saved.ana_changes;
        let mut is_new = false;
        for &(group, state, changes) in &saved.groups {
            if let Some(known) = sharing.groups.get_mut(&group) {
                let has_changed = known.state.0 != state;
                known.changes = changes.saturating_add(has_changed.into());
                sharing.ana_changes = sharing.ana_changes.saturating_add(has_changed.into());
                is_new |= has_changed;
            }
        }
        let host = sharing.host;
        let mut missed = Vec::new();
        for &(nsid, number) in &saved.notices {
            if let Some(attachment) = self.attached(nsid) {
                attachment.noticed = number;
                let notices = attachment.shared.notices_after(number, &host);
                missed.extend(notices.into_iter().map(|notice| (nsid, notice)));
            }
        }
        for (nsid, notice) in missed {
            self.noticed(nsid, notice.notification, notice.number);
        }
        if is_new {
            self.ana_changed();
        }
        for &(cid, nsid, ptpl) in &saved.persistence {
            let one = (nsid != NSID_BROADCAST).then_some(nsid);
            if !self.set_persistence(cid, one, ptpl) {
                self.finish_admin(cid, Status::SUCCESS, 0);
            }
        }
        self.touch();
    }

    /// Ends the erasure that a previous process's controller of this ID has begun, and that nobody
    /// continues.
    pub(super) fn abandon_left_erasure(&mut self) {
        let Some(sharing) = &self.sharing else {
            return;
        };
        let cntlid = sharing.cntlid();
        let nsids = self.shared_where(|shared| shared.is_erased_by(cntlid));
        self.open_erased(&nsids);
    }

    // ---- reservation commands

    /// Executes a fetched reservation command.
    pub(super) fn reservation(&mut self, command: ReservationCommand) {
        let nsid = command.command.nsid.get();
        let Some(sharing) = &mut self.sharing else {
            return self.end_reservation(command, Err(Status::INTERNAL_ERROR));
        };
        let Some(shared) = sharing.namespace(nsid).cloned() else {
            return self.end_reservation(command, Err(Status::INVALID_FIELD.with_dnr(true)));
        };
        match command.asked {
            ReservationRequest::Operation(operation) => {
                let ticket = Ticket::Command(Box::new(command));
                sharing.submit(&shared, ticket, operation);
                // The operation may have ended already, and nothing wakes this worker, which is
                // awake.
                self.take_inbox();
            }
            ReservationRequest::Report { extended } => {
                let report = shared.report(extended);
                self.end_reservation(command, Ok(report));
            }
        }
    }

    /// Sets Persist Through Power Loss of one shared namespace, or of all. Returns whether the Set
    /// Features command `cid` has to wait for that.
    pub(crate) fn set_persistence(&mut self, cid: u16, nsid: Option<u32>, ptpl: bool) -> bool {
        let Some(sharing) = &mut self.sharing else {
            return false;
        };
        let wanted = sharing
            .shared()
            .filter(|shared| nsid.is_none_or(|nsid| shared.nsid() == nsid));
        let wanted: Vec<_> = wanted.cloned().collect();
        if wanted.is_empty() {
            return false;
        }
        sharing.waiting.push(WaitingFeature {
            cid,
            nsid,
            ptpl,
            operations: wanted.len(),
            status: Status::SUCCESS,
        });
        for shared in wanted {
            sharing.submit(&shared, Ticket::Admin(cid), Operation::Persist { ptpl });
        }
        self.take_inbox();
        true
    }

    fn operation_done(&mut self, ticket: u64, status: Status) {
        let Some(sharing) = &mut self.sharing else {
            return;
        };
        match sharing.tickets.remove(&ticket) {
            // A reset has dropped the command.
            None => {}
            Some(Ticket::Command(command)) => {
                let result = if status.is_success() {
                    Ok(Vec::new())
                } else {
                    Err(status)
                };
                self.end_reservation(*command, result);
            }
            Some(Ticket::Admin(cid)) => self.persistence_set(cid, status),
        }
    }

    fn persistence_set(&mut self, cid: u16, status: Status) {
        let Some(sharing) = &mut self.sharing else {
            return;
        };
        let of = |waiting: &WaitingFeature| waiting.cid == cid;
        let Some(at) = sharing.waiting.iter().position(of) else {
            return;
        };
        let Some(waiting) = sharing.waiting.get_mut(at) else {
            return;
        };
        if waiting.status.is_success() {
            waiting.status = status;
        }
        waiting.operations = waiting.operations.saturating_sub(1);
        if waiting.operations > 0 {
            return;
        }
        let status = waiting.status;
        sharing.waiting.remove(at);
        if !status.is_success() {
            self.failed(0, cid, status, 0, 0);
        }
        self.finish_admin(cid, status, 0);
    }

    fn end_reservation(&mut self, command: ReservationCommand, result: Result<Vec<u8>, Status>) {
        let end = ReservationEnd { command, result };
        self.engine.end_reservation(end);
    }
}
