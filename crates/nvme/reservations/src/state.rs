//! Reservations of one namespace, and the operations on them ("NVMe Base 2.1", 8.1.22).

use crate::host::HostId;
use crate::operation::Operation;
use crate::types::{Access, Notification, ReservationRefusal, ReservationType};

/// Maximum number of registrants of a namespace. Without a limit, a host could register repeatedly
/// under new Host Identifiers.
pub const MAX_REGISTRANTS: usize = 256;

/// Host that has registered a reservation key for a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registrant {
    /// Host Identifier of the registrant.
    pub host: HostId,
    /// Reservation key that the host has registered.
    pub key: u64,
}

/// Reservation that is held on a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Type of the reservation.
    pub rtype: ReservationType,
    /// Registrant that holds the reservation; `None` when all registrants do.
    pub holder: Option<HostId>,
}

/// Registrants and reservation of a namespace.
///
/// Invariants: hosts are distinct, and at most [`MAX_REGISTRANTS`]. A reservation has a holder
/// unless all registrants hold it, and the holder is a registrant. Without registrants there is no
/// reservation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservations {
    pub(crate) generation: u32,
    pub(crate) ptpl: bool,
    pub(crate) can_persist: bool,
    pub(crate) reservation: Option<Reservation>,
    /// Registrants, in the order of registration.
    pub(crate) registrants: Vec<Registrant>,
}

/// Reservation notification to a host, for each of its controllers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Notice {
    /// Host that has to be notified.
    pub host: HostId,
    /// Kind of the notification.
    pub notification: Notification,
}

/// Effects of an executed operation on other hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Notifications to send, in the order in which the hosts have registered.
    pub notices: Vec<Notice>,
    /// Hosts that were unregistered by a preemption. Preempt and Abort is complete only when their
    /// outstanding commands on the namespace have ended.
    pub preempted: Vec<HostId>,
}

impl Reservations {
    /// Creates a state without registrants. `can_persist`: whether the state can be kept across a
    /// power cut (RESCAP.PTPLS).
    pub fn new(can_persist: bool) -> Self {
        Reservations {
            can_persist,
            ..Self::default()
        }
    }

    /// Returns whether Persist Through Power Loss can be enabled.
    pub fn can_persist(&self) -> bool {
        self.can_persist
    }

    /// Returns whether Persist Through Power Loss (PTPL) is enabled.
    pub fn ptpl(&self) -> bool {
        self.ptpl
    }

    /// Returns the generation counter (GEN), which counts changes of registrants and wraps.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Returns the reservation that is held, if there is one.
    pub fn reservation(&self) -> Option<&Reservation> {
        self.reservation.as_ref()
    }

    /// Returns all registrants in the order of their registration.
    pub fn registrants(&self) -> &[Registrant] {
        &self.registrants
    }

    /// Returns the access rights of the host to the namespace.
    pub fn access(&self, host: &HostId) -> Access {
        let Some(Reservation { rtype, holder }) = &self.reservation else {
            return Access::FULL;
        };
        let admitted = if rtype.admits_registrants() {
            self.is_registrant(host)
        } else {
            holder.as_ref() == Some(host)
        };
        Access {
            read: admitted || !rtype.excludes_reads(),
            write: admitted,
        }
    }

    /// Returns whether the host has registered.
    pub fn is_registrant(&self, host: &HostId) -> bool {
        self.key_of(host).is_some()
    }

    /// Returns whether the host holds the reservation, alone or with all registrants.
    pub fn is_holder(&self, host: &HostId) -> bool {
        match &self.reservation {
            Some(held) if held.rtype.held_by_all() => self.is_registrant(host),
            Some(held) => held.holder.as_ref() == Some(host),
            None => false,
        }
    }

    fn key_of(&self, host: &HostId) -> Option<u64> {
        let mut registrants = self.registrants.iter();
        let found = registrants.find(|registrant| registrant.host == *host)?;
        Some(found.key)
    }

    /// Removes the state that a loss of power does not preserve.
    pub fn power_lost(&mut self) {
        if !self.ptpl {
            self.registrants.clear();
            self.reservation = None;
            self.generation = 0;
        }
    }

    /// Executes an operation of a host.
    ///
    /// # Errors
    /// [`ReservationRefusal`] when the operation is not allowed; nothing has changed then.
    pub fn execute(
        &mut self,
        host: &HostId,
        operation: &Operation,
    ) -> Result<Change, ReservationRefusal> {
        match *operation {
            Operation::Register { key, ptpl } => {
                self.check_ptpl(ptpl)?;
                self.register(host, key)?;
                self.registered(ptpl);
                Ok(Change::default())
            }
            Operation::Replace { key, new, ptpl } => {
                self.check_ptpl(ptpl)?;
                self.replace(host, key, new)?;
                self.registered(ptpl);
                Ok(Change::default())
            }
            Operation::Unregister { key, ptpl } => {
                self.check_ptpl(ptpl)?;
                let change = self.unregister(host, key)?;
                self.registered(ptpl);
                Ok(change)
            }
            Operation::Acquire { key, rtype } => {
                self.check_key(host, key)?;
                self.acquire(host, rtype)
            }
            Operation::Preempt {
                key, victim, rtype, ..
            } => {
                self.check_key(host, key)?;
                let change = self.preempt(host, victim, rtype)?;
                self.count();
                Ok(change)
            }
            Operation::Release { key, rtype } => {
                self.check_key(host, key)?;
                self.release(host, rtype)
            }
            Operation::Clear { key } => {
                self.check_key(host, key)?;
                let change = self.clear(host);
                self.count();
                Ok(change)
            }
            Operation::Persist { ptpl } => {
                self.check_ptpl(Some(ptpl))?;
                self.ptpl = ptpl;
                Ok(Change::default())
            }
        }
    }

    fn check_ptpl(&self, ptpl: Option<bool>) -> Result<(), ReservationRefusal> {
        match ptpl {
            Some(true) if !self.can_persist => Err(ReservationRefusal::InvalidField),
            _ => Ok(()),
        }
    }

    /// Checks that the host is registered with this key, otherwise Reservation Conflict.
    fn check_key(&self, host: &HostId, key: u64) -> Result<(), ReservationRefusal> {
        match self.key_of(host) {
            Some(found) if found == key => Ok(()),
            _ => Err(ReservationRefusal::Conflict),
        }
    }

    /// Increments the generation counter and sets PTPL after a successful Reservation Register.
    fn registered(&mut self, ptpl: Option<bool>) {
        self.ptpl = ptpl.unwrap_or(self.ptpl);
        self.count();
    }

    fn count(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    // ---- registrants

    fn register(&mut self, host: &HostId, key: u64) -> Result<(), ReservationRefusal> {
        match self.key_of(host) {
            Some(found) if found == key => Ok(()),
            Some(_) => Err(ReservationRefusal::Conflict),
            None => self.add(host, key),
        }
    }

    fn add(&mut self, host: &HostId, key: u64) -> Result<(), ReservationRefusal> {
        if self.registrants.len() >= MAX_REGISTRANTS {
            return Err(ReservationRefusal::Full);
        }
        self.registrants.push(Registrant { host: *host, key });
        Ok(())
    }

    fn replace(
        &mut self,
        host: &HostId,
        key: Option<u64>,
        new: u64,
    ) -> Result<(), ReservationRefusal> {
        if let Some(key) = key {
            self.check_key(host, key)?;
        }
        let mut registrants = self.registrants.iter_mut();
        match registrants.find(|registrant| registrant.host == *host) {
            Some(registrant) => registrant.key = new,
            None => self.add(host, new)?,
        }
        Ok(())
    }

    fn unregister(
        &mut self,
        host: &HostId,
        key: Option<u64>,
    ) -> Result<Change, ReservationRefusal> {
        if let Some(key) = key {
            self.check_key(host, key)?;
        }
        let held = self.reservation;
        self.remove(|registrant| registrant.host == *host);
        let mut change = Change::default();
        // The last holder of an all-registrants reservation leaves nobody to notify.
        if let (Some(held), None) = (held, self.reservation)
            && held.rtype.admits_registrants()
        {
            self.notify_all_but(host, Notification::ReservationReleased, &mut change);
        }
        Ok(change)
    }

    /// Removes the selected registrants, and the reservation when no holder is left. Returns the
    /// removed hosts.
    fn remove(&mut self, which: impl Fn(&Registrant) -> bool) -> Vec<HostId> {
        let gone = self.registrants.iter().filter(|&one| which(one));
        let gone: Vec<HostId> = gone.map(|registrant| registrant.host).collect();
        self.registrants.retain(|registrant| !which(registrant));
        let held = self.reservation.filter(|held| match held.holder {
            Some(holder) => self.is_registrant(&holder),
            None => !self.registrants.is_empty(),
        });
        self.reservation = held;
        gone
    }

    fn notify_all_but(&self, host: &HostId, notification: Notification, change: &mut Change) {
        let others = self.registrants.iter().map(|registrant| registrant.host);
        let others = others.filter(|other| other != host);
        change
            .notices
            .extend(others.map(|host| Notice { host, notification }));
    }

    // ---- the reservation

    fn take(&mut self, host: &HostId, rtype: ReservationType) {
        self.reservation = Some(Reservation {
            rtype,
            holder: (!rtype.held_by_all()).then_some(*host),
        });
    }

    fn acquire(
        &mut self,
        host: &HostId,
        rtype: ReservationType,
    ) -> Result<Change, ReservationRefusal> {
        match self.reservation {
            None => self.take(host, rtype),
            Some(held) if held.rtype == rtype && self.is_holder(host) => {}
            Some(_) => return Err(ReservationRefusal::Conflict),
        }
        Ok(Change::default())
    }

    fn release(
        &mut self,
        host: &HostId,
        rtype: ReservationType,
    ) -> Result<Change, ReservationRefusal> {
        let mut change = Change::default();
        let Some(held) = self.reservation.filter(|_| self.is_holder(host)) else {
            return Ok(change);
        };
        if held.rtype != rtype {
            return Err(ReservationRefusal::InvalidField);
        }
        self.reservation = None;
        if rtype.admits_registrants() {
            self.notify_all_but(host, Notification::ReservationReleased, &mut change);
        }
        Ok(change)
    }

    fn clear(&mut self, host: &HostId) -> Change {
        let mut change = Change::default();
        self.notify_all_but(host, Notification::ReservationPreempted, &mut change);
        self.registrants.clear();
        self.reservation = None;
        change
    }

    fn preempt(
        &mut self,
        host: &HostId,
        victim: u64,
        rtype: ReservationType,
    ) -> Result<Change, ReservationRefusal> {
        let held = self.reservation;
        let has_key = |registrant: &Registrant| registrant.key == victim;
        let other = |registrant: &Registrant| registrant.host != *host;
        let takes_over = match held {
            None => false,
            Some(Reservation { holder: None, .. }) => {
                if victim != 0 && !self.registrants.iter().any(has_key) {
                    return Err(ReservationRefusal::Conflict);
                }
                victim == 0
            }
            Some(Reservation {
                holder: Some(holder),
                ..
            }) => {
                let of_holder = self.key_of(&holder) == Some(victim);
                if !of_holder && victim == 0 {
                    return Err(ReservationRefusal::InvalidField);
                }
                of_holder
            }
        };
        let gone = match (takes_over, held) {
            (true, Some(Reservation { holder: None, .. })) => self.remove(other),
            (true, _) => self.remove(|registrant| has_key(registrant) && other(registrant)),
            (false, _) => self.remove(has_key),
        };
        if takes_over {
            self.take(host, rtype);
        }
        let preempted: Vec<HostId> = gone.into_iter().filter(|gone| gone != host).collect();
        let mut change = Change::default();
        change.notices.extend(preempted.iter().map(|host| Notice {
            host: *host,
            notification: Notification::RegistrationPreempted,
        }));
        change.preempted = preempted;
        let type_of = |reservation: Option<Reservation>| reservation.map(|held| held.rtype);
        if type_of(held) != type_of(self.reservation) {
            self.notify_all_but(host, Notification::ReservationReleased, &mut change);
        }
        Ok(change)
    }
}
