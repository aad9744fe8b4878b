//! The mediated matrix device: gives a guest access to a matrix of queues, and holds the resources
//! for their interrupts.
//!
//! A queue whose interrupts are on holds one `Registration`: the pinned page of the notification
//! byte and the registered subclass. It is a value that is made once and consumed once, so nothing
//! is freed twice. After interrupts are turned off it is *leaving*: the queue may write the byte
//! until its interrupt bit reads zero, and the page stays pinned until a TAPQ has reported that. A
//! queue that does not get there in time keeps the page, and [`Mediated::poll`] checks again later.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use thiserror::Error;

use crate::command::{InterruptControl, Subclass};
use crate::information::{Configuration, Hardware};
use crate::matrix::{Apqn, Matrix};
use crate::outside::{
    Clock, GuestPage, HostAddress, InterruptTarget, PAGE_SIZE, Pages, Queues, Reply, RequestPart,
    Subclasses,
};
use crate::registration::{InterruptResources, QueueRecord, Registration};
use crate::status::{QueueStatus, Response};

/// Maximum number of attempts at an instruction on a busy queue, and of checks of the interrupt bit
/// (as in vfio_ap).
const MAX_ATTEMPTS: u32 = 5;
/// Pause in nanoseconds between two attempts at an instruction on a busy queue.
const RETRY_INTERVAL: u64 = 20_000_000;

/// Interfaces to everything outside the crate.
#[derive(Debug)]
pub struct Outside<P, S, C, Q> {
    /// Access to the guest's memory, to pin pages of notification bytes.
    pub pages: P,
    /// Registry of the guest's interruption subclasses.
    pub subclasses: S,
    /// Clock for pauses between attempts.
    pub clock: C,
    /// Queues of the host, on which the guest's instructions are executed.
    pub queues: Q,
}

/// Error: at least one queue still uses its notification byte. The page must stay, and
/// [`Mediated::poll`] be called later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{0} notification bytes are still in use by their queues")]
pub struct StillHeld(pub usize);

/// Mediated device of a guest: its matrix of AP queues, and the interrupts of these queues.
#[derive(Debug)]
pub struct Mediated<P, S, C, Q> {
    outside: Outside<P, S, C, Q>,
    matrix: Matrix,
    bound: BTreeSet<Apqn>,
    attached: bool,
    kept: BTreeMap<Apqn, QueueRecord>,
}

impl<P: Pages, S: Subclasses, C: Clock, Q: Queues> Mediated<P, S, C, Q> {
    /// Creates a device with an empty matrix and no guest.
    pub fn new(outside: Outside<P, S, C, Q>) -> Mediated<P, S, C, Q> {
        Mediated {
            outside,
            matrix: Matrix::default(),
            bound: BTreeSet::new(),
            attached: false,
            kept: BTreeMap::new(),
        }
    }

    /// Returns the guest's matrix.
    pub fn matrix(&self) -> &Matrix {
        &self.matrix
    }

    /// Returns the interfaces to the outside.
    pub fn outside(&mut self) -> &mut Outside<P, S, C, Q> {
        &mut self.outside
    }

    /// Assigns an adapter to the guest.
    pub fn assign_adapter(&mut self, adapter: u8) {
        self.matrix.adapters.insert(adapter);
    }

    /// Assigns a domain to the guest.
    pub fn assign_domain(&mut self, domain: u8) {
        self.matrix.domains.insert(domain);
    }

    /// Assigns a domain to the guest for administration.
    pub fn assign_control_domain(&mut self, domain: u8) {
        self.matrix.control_domains.insert(domain);
    }

    /// Unassigns an adapter, even while it is in use: its queues are reset, and afterwards hold no
    /// resources.
    pub fn unassign_adapter(&mut self, adapter: u8) -> Result<(), StillHeld> {
        let gone: Vec<Apqn> = self
            .matrix
            .queues()
            .filter(|q| q.adapter() == adapter)
            .collect();
        self.matrix.adapters.remove(adapter);
        self.abandon(&gone)
    }

    /// Unassigns a domain from the guest, even while it is in use.
    pub fn unassign_domain(&mut self, domain: u8) -> Result<(), StillHeld> {
        let gone: Vec<Apqn> = self
            .matrix
            .queues()
            .filter(|q| q.domain() == domain)
            .collect();
        self.matrix.domains.remove(domain);
        self.abandon(&gone)
    }

    /// Removes the guest's right to administer a domain.
    pub fn unassign_control_domain(&mut self, domain: u8) {
        self.matrix.control_domains.remove(domain);
    }

    /// Adds a queue of the host to this driver (probe).
    pub fn bind(&mut self, apqn: Apqn) {
        self.bound.insert(apqn);
    }

    /// Removes a queue of the host (remove), whether or not a guest uses it.
    pub fn remove(&mut self, apqn: Apqn) -> Result<(), StillHeld> {
        if !self.bound.remove(&apqn) {
            return Ok(());
        }
        self.abandon(&[apqn])
    }

    /// Attaches a guest that opens the device. Its queues are reset.
    pub fn attach(&mut self) -> Result<(), StillHeld> {
        let all: Vec<Apqn> = self.matrix.queues().collect();
        self.abandon(&all)?;
        self.attached = true;
        Ok(())
    }

    /// Detaches a guest that is destroyed or releases the device. No vCPU may be in the hook any
    /// more ([`crate::gate`]).
    pub fn detach(&mut self) -> Result<(), StillHeld> {
        self.attached = false;
        let mut all: Vec<Apqn> = self.matrix.queues().collect();
        all.extend(self.kept.keys().filter(|q| !self.matrix.contains(**q)));
        self.abandon(&all)
    }

    /// Prepares guest pages for unmapping. After `Ok` no queue writes to them; after an error they
    /// must stay mapped, and [`Mediated::poll`] must be called later.
    pub fn unmap(&mut self, first: GuestPage, count: u64) -> Result<(), StillHeld> {
        let within = |kept: &QueueRecord| {
            let page = kept.registration().map(Registration::page);
            page.is_some_and(|page| page.0.wrapping_sub(first.0) < count)
        };
        let users = self.kept.iter().filter(|(_, kept)| within(kept));
        let users: Vec<Apqn> = users.map(|(apqn, _)| *apqn).collect();
        for apqn in &users {
            self.disable(*apqn);
            // A queue that was too busy for the request gets it again.
            if let Some(kept) = self.kept.get_mut(apqn) {
                kept.leave(false);
            }
            self.settle(*apqn, MAX_ATTEMPTS);
        }
        match self.kept.values().filter(|kept| within(kept)).count() {
            0 => Ok(()),
            left => Err(StillHeld(left)),
        }
    }

    /// Checks the queues that still hold notification bytes, and releases those that are done; call
    /// it periodically.
    pub fn poll(&mut self) -> Result<(), StillHeld> {
        let all: Vec<Apqn> = self.kept.keys().copied().collect();
        for apqn in all {
            self.settle(apqn, 1);
        }
        match self.kept.values().filter(|kept| kept.is_leaving()).count() {
            0 => Ok(()),
            left => Err(StillHeld(left)),
        }
    }

    /// Returns the resources held for a queue: the page of its notification byte and the subclass.
    /// They are also held while it waits for the interrupt bit to clear.
    pub fn registration(&self, apqn: Apqn) -> Option<(GuestPage, Subclass)> {
        let registration = self.kept.get(&apqn)?.registration()?;
        Some((registration.page(), registration.subclass()))
    }

    /// Returns whether the guest has a queue: it is in the matrix, and the host has bound it to
    /// this driver.
    pub fn owns(&self, apqn: Apqn) -> bool {
        self.attached && self.matrix.contains(apqn) && self.bound.contains(&apqn)
    }

    /// Executes the guest's PQAP(AQIC), which turns interrupts of a queue on or off.
    pub fn aqic(&mut self, apqn: Apqn, control: InterruptControl) -> QueueStatus {
        if !self.owns(apqn) {
            return QueueStatus::of(Response::QUEUE_NOT_AVAILABLE);
        }
        match control {
            InterruptControl::Enable {
                subclass,
                notification,
            } => self.enable(apqn, subclass, notification),
            InterruptControl::Disable => self.disable(apqn),
        }
    }

    /// Executes the guest's PQAP(TAPQ), which tests a queue.
    pub fn tapq(&mut self, apqn: Apqn) -> (QueueStatus, Hardware) {
        if !self.owns(apqn) {
            let status = QueueStatus::of(Response::QUEUE_NOT_AVAILABLE);
            return (status, Hardware::default());
        }
        self.settle(apqn, 1);
        self.outside.queues.tapq(apqn)
    }

    /// Executes the guest's PQAP(RAPQ), which resets a queue.
    pub fn rapq(&mut self, apqn: Apqn) -> QueueStatus {
        self.guest_reset(apqn, Q::rapq)
    }

    /// Executes the guest's PQAP(ZAPQ), which resets a queue and clears its secrets.
    pub fn zapq(&mut self, apqn: Apqn) -> QueueStatus {
        self.guest_reset(apqn, Q::zapq)
    }

    /// Executes PQAP(QCI): returns the machine's maxima with the guest's matrix, without adapters
    /// that have no bound queue.
    pub fn qci(&mut self) -> Configuration {
        let mut configuration = self.outside.queues.qci();
        let mut matrix = self.matrix;
        if !self.attached {
            matrix = Matrix::default();
        }
        for adapter in self.matrix.adapters.iter() {
            let mut queues = self.matrix.domains.iter().map(|d| Apqn::new(adapter, d));
            if !queues.any(|apqn| self.bound.contains(&apqn)) {
                matrix.adapters.remove(adapter);
            }
        }
        configuration.matrix = matrix;
        configuration
    }

    /// Executes the guest's NQAP, which enqueues a request or a part of one.
    pub fn nqap(&mut self, apqn: Apqn, part: RequestPart<'_>) -> QueueStatus {
        if !self.owns(apqn) {
            return QueueStatus::of(Response::QUEUE_NOT_AVAILABLE);
        }
        self.outside.queues.nqap(apqn, part)
    }

    /// Executes DQAP.
    pub fn dqap(
        &mut self,
        apqn: Apqn,
        room: usize,
        continued: bool,
    ) -> (QueueStatus, Option<Reply>) {
        if !self.owns(apqn) {
            return (QueueStatus::of(Response::QUEUE_NOT_AVAILABLE), None);
        }
        self.outside.queues.dqap(apqn, room, continued)
    }

    fn enable(&mut self, apqn: Apqn, subclass: Subclass, notification: u64) -> QueueStatus {
        let Outside {
            pages,
            subclasses,
            queues,
            ..
        } = &mut self.outside;
        let page = GuestPage::of(notification);
        let (registration, frame, host) =
            match Registration::take(pages, subclasses, page, subclass) {
                Ok(taken) => taken,
                Err(response) => return QueueStatus::of(response),
            };
        let target = InterruptTarget {
            notification: HostAddress(frame.0 + notification % PAGE_SIZE),
            guest: subclass,
            host,
        };
        let status = queues.aqic(apqn, Some(target));
        if status.response != Response::NORMAL {
            // The queue keeps its earlier settings, so the new resources are released.
            registration.release(pages, subclasses);
            return status;
        }
        // The queue accepted new settings, so its interrupts were off, and it no longer uses the
        // resources held for it. This happens when a reset of the queue by the guest was not seen
        // here.
        let kept = self.kept.entry(apqn).or_default();
        kept.release(pages, subclasses);
        kept.held = InterruptResources::Active(registration);
        status
    }

    /// Turns interrupts off. Resources remain held only if the queue does not finish in time.
    fn disable(&mut self, apqn: Apqn) -> QueueStatus {
        let mut status = self.outside.queues.aqic(apqn, None);
        for _ in 1..MAX_ATTEMPTS {
            if !is_busy(status.response) {
                break;
            }
            self.outside.clock.wait(RETRY_INTERVAL);
            status = self.outside.queues.aqic(apqn, None);
        }
        let told = accepts_off(status.response);
        if let Some(kept) = self
            .kept
            .get_mut(&apqn)
            .filter(|_| told || status.response.is_gone())
        {
            kept.leave(told);
            self.settle(apqn, MAX_ATTEMPTS);
        }
        status
    }

    fn guest_reset(
        &mut self,
        apqn: Apqn,
        instruction: fn(&mut Q, Apqn) -> QueueStatus,
    ) -> QueueStatus {
        if !self.owns(apqn) {
            return QueueStatus::of(Response::QUEUE_NOT_AVAILABLE);
        }
        let status = instruction(&mut self.outside.queues, apqn);
        if status.response == Response::NORMAL {
            let kept = self.kept.entry(apqn).or_default();
            kept.resetting = true;
            kept.leave(true);
            self.settle(apqn, 1);
        }
        status
    }

    /// Resets queues that no longer belong to the guest, and releases the resources held for them.
    fn abandon(&mut self, queues: &[Apqn]) -> Result<(), StillHeld> {
        for apqn in queues {
            let mut status = self.outside.queues.zapq(*apqn);
            for _ in 1..MAX_ATTEMPTS {
                if !is_busy(status.response) {
                    break;
                }
                self.outside.clock.wait(RETRY_INTERVAL);
                status = self.outside.queues.zapq(*apqn);
            }
            let kept = self.kept.entry(*apqn).or_default();
            kept.resetting = !status.response.is_gone();
            kept.leave(accepts_off(status.response));
        }
        for apqn in queues {
            self.settle(*apqn, MAX_ATTEMPTS);
        }
        let kept = queues.iter().filter_map(|apqn| self.kept.get(apqn));
        match kept.filter(|kept| kept.is_leaving()).count() {
            0 => Ok(()),
            left => Err(StillHeld(left)),
        }
    }

    /// Releases the resources of a queue as soon as its interrupt bit reads zero; checks up to
    /// `tries` times.
    fn settle(&mut self, apqn: Apqn, tries: u32) {
        let Outside {
            pages,
            subclasses,
            clock,
            queues,
        } = &mut self.outside;
        let Some(kept) = self.kept.get_mut(&apqn) else {
            return;
        };
        for attempt in 0..tries {
            if !kept.is_leaving() && !kept.resetting {
                break;
            }
            if attempt > 0 {
                clock.wait(RETRY_INTERVAL);
            }
            if let InterruptResources::Leaving { told, .. } = &mut kept.held
                && !*told
            {
                *told = accepts_off(queues.aqic(apqn, None).response);
            }
            let (status, _) = queues.tapq(apqn);
            if status.response.is_gone() {
                kept.release(pages, subclasses);
                kept.resetting = false;
                continue;
            }
            let in_reset = status.response == Response::RESET_IN_PROGRESS;
            if status.response == Response::NORMAL {
                kept.resetting = false;
            } else if !in_reset {
                continue;
            }
            if !status.interrupts
                && matches!(kept.held, InterruptResources::Leaving { told: true, .. })
            {
                kept.release(pages, subclasses);
            }
        }
        if kept.is_idle() {
            self.kept.remove(&apqn);
        }
    }
}

/// Returns whether interrupts are off, or will be, after this response to a request to turn them
/// off: it was accepted, they were off before, or a reset is in progress.
/// accepted, they were off before, or a reset is under way, which ends them too.
fn accepts_off(response: Response) -> bool {
    let off = [
        Response::NORMAL,
        Response::OTHERWISE_CHANGED,
        Response::RESET_IN_PROGRESS,
    ];
    off.contains(&response)
}

fn is_busy(response: Response) -> bool {
    matches!(response, Response::RESET_IN_PROGRESS | Response::BUSY)
}
