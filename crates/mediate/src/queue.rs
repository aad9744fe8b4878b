//! A virtual queue pair's way to the device.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Instant;

use dma::DmaMap;
use driver::{Device, Error};
use nvme::{Command, NvmOpcode, Status};

use crate::check::{Rules, Wants};
use crate::entry::Done;
use crate::lane::{Lane, Submission};
use crate::options::DirectOptions;
use crate::slice::Slice;
use crate::stats::QueueStats;
use crate::translate::Translator;

/// A virtual queue pair's way to its slice of a device: a physical queue pair of its own, or a
/// share of one. One worker thread's, together with the guest's map.
///
/// ```text
/// for every fetched command: submit     then: ring     now and then: poll     before sleep: Waker::arm
/// ```
pub struct DirectQueue {
    lane: Rc<RefCell<Lane>>,
    client: usize,
    rules: Rules,
    translator: Translator,
    max_transfer: u64,
    stats: Arc<QueueStats>,
    /// Recycled.
    done: Vec<Done>,
}

/// What wakes a worker that sleeps while commands are in flight: of a physical queue pair, for all
/// virtual ones that share it.
#[derive(Debug)]
pub struct Waker {
    lane: Weak<RefCell<Lane>>,
    eventfd: OwnedFd,
}

impl Waker {
    /// Readable when the device has completed something after [`Waker::arm`].
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Before the worker sleeps on [`Waker::event_fd`]. `Some(false)`: poll again, there is
    /// something already. `None`: the physical queue pair does not exist any more.
    pub fn arm(&self) -> Option<bool> {
        let lane = self.lane.upgrade()?;
        // Its owner is at work.
        Some(lane.try_borrow_mut().is_ok_and(|mut lane| lane.arm()))
    }
}

impl std::fmt::Debug for DirectQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectQueue")
            .field("slice", &self.rules.slice)
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

impl DirectQueue {
    /// Takes a physical queue pair of the device for it alone.
    ///
    /// # Errors
    /// [`Error::NoQueue`] when all are taken, or what the controller says.
    pub fn reserve(device: &Device, options: DirectOptions) -> Result<Self, Error> {
        let lane = Lane::new(device, &options)?;
        Self::on(Rc::new(RefCell::new(lane)), options)
    }

    /// Another virtual queue pair on the same physical one, which then is shared fairly.
    ///
    /// # Errors
    /// [`Error::Unusable`] for a slice of a namespace with another size of blocks.
    pub fn share(&self, options: DirectOptions) -> Result<Self, Error> {
        Self::on(self.lane.clone(), options)
    }

    pub(crate) fn on(lane: Rc<RefCell<Lane>>, options: DirectOptions) -> Result<Self, Error> {
        let busy = Error::Unusable("the physical queue pair is at work");
        let (client, rules, depth) = {
            let Ok(mut at) = lane.try_borrow_mut() else {
                return Err(busy);
            };
            if at.queue.block_size() != 1 << options.slice.block_shift() {
                return Err(Error::Unusable(
                    "its queue pairs are for blocks of another size",
                ));
            }
            let rules = Rules::new(options.nsid, options.slice, &at.device.limits());
            (at.enter(), rules, at.queue.depth())
        };
        Ok(Self {
            lane,
            client,
            rules,
            translator: Translator::new(options.page_size),
            max_transfer: options.max_transfer,
            stats: Arc::new(QueueStats::new(options.measure)),
            done: Vec::with_capacity(depth),
        })
    }

    pub(crate) fn lane(&self) -> &Rc<RefCell<Lane>> {
        &self.lane
    }

    /// Its counters and times.
    pub fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }

    /// Whether the device has a command at all. One that it has not may still be emulated by a
    /// caller that has another path.
    #[inline]
    pub fn supports(&self, opcode: NvmOpcode) -> bool {
        self.rules.supports(opcode)
    }

    /// The guest has another memory page size now.
    pub fn set_page_size(&mut self, page_size: u64) {
        self.translator.set_page_size(page_size);
    }

    /// The slice has been resized: commands are checked against this one from now on. Its first
    /// block and its namespace stay.
    pub fn set_slice(&mut self, slice: Slice) {
        self.rules.slice = slice;
    }

    /// The guest turned its volatile write cache on or off: off, every write is
    /// durable when it completes.
    pub fn set_write_cache(&mut self, on: bool) {
        self.rules.force_fua = !on;
    }

    /// How many commands it may submit now; to be asked while there are any. With a shared physical
    /// queue pair that is its share, and asking without success makes the others leave room.
    #[inline]
    pub fn room(&mut self) -> usize {
        let client = self.client;
        self.lane
            .try_borrow_mut()
            .map_or(0, |mut lane| lane.room(client))
    }

    /// Checks a command, translates it and puts it on the physical queue. `command` is a
    /// copy that the guest cannot reach; `map` is the guest's memory; `token` comes back
    /// with its end. Nothing is rung.
    ///
    /// # Errors
    /// The status that the guest is to be told at once. Nothing has happened then.
    #[inline]
    pub fn submit(&mut self, command: &Command, map: &DmaMap, token: u64) -> Result<(), Status> {
        let start = self.stats.start();
        let result = self.start(command, map, token);
        match (&result, start) {
            (Ok(()), Some(start)) => self.stats.translate.record(QueueStats::since(start)),
            (Ok(()), None) => {}
            (Err(_), _) => self.stats.refuse(),
        }
        result
    }

    #[inline]
    fn start(&mut self, guest: &Command, map: &DmaMap, token: u64) -> Result<(), Status> {
        let plan = self.rules.check(guest)?;
        if let Wants::Data { len, .. } = plan.wants
            && len > self.max_transfer
        {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        let Ok(mut lane) = self.lane.try_borrow_mut() else {
            return Err(Status::COMMAND_INTERRUPTED);
        };
        lane.start(
            &plan,
            &mut Submission {
                client: self.client,
                token,
                guest,
                map,
                rules: &self.rules,
                translator: &mut self.translator,
                stats: &self.stats,
            },
        )
    }

    /// Tells the device of everything submitted so far: one doorbell for all of it.
    #[inline]
    pub fn ring(&mut self) {
        if let Ok(mut lane) = self.lane.try_borrow_mut() {
            lane.queue.ring();
        }
    }

    /// Rings, delivers the commands that have completed (token, status, dword 0), and returns how
    /// many that are. Never blocks, but for recovery: a device that has to be reset is reset here,
    /// and the commands are repeated.
    #[inline]
    pub fn poll(&mut self, done: &mut dyn FnMut(u64, Status, u32)) -> usize {
        let Ok(mut lane) = self.lane.try_borrow_mut() else {
            return 0;
        };
        let start = lane.reap(self.client, &mut self.done, self.stats.is_measuring());
        // The callee may come back here.
        drop(lane);
        let count = self.done.len();
        if count == 0 {
            return 0;
        }
        for over in &self.done {
            done(over.token, over.status(), over.dw0());
        }
        self.done.clear();
        if let Some(start) = start {
            let each = QueueStats::since(start) / count as u64;
            self.stats.complete.record_many(each, count as u64);
        }
        count
    }

    /// Its commands that are not over.
    pub fn in_flight(&self) -> usize {
        self.lane
            .try_borrow()
            .map_or(0, |lane| lane.in_flight(self.client))
    }

    /// Asks that a command end early, for the guest's Abort. `true`: it will, as Command Abort
    /// Requested, unless it failed before. `false`: it is all on the device, and ends as the device
    /// says; time-outs are the driver's affair.
    pub fn abort(&mut self, token: u64) -> bool {
        let client = self.client;
        self.lane
            .try_borrow_mut()
            .is_ok_and(|mut lane| lane.abort(client, token))
    }

    /// What wakes a worker that sleeps while commands are in flight; `None` when nothing does, and
    /// it has to poll: without interrupts, or with too few of them.
    pub fn waker(&self) -> Option<Waker> {
        let lane = self.lane.try_borrow().ok()?;
        let eventfd = lane.queue.eventfd().filter(|_| lane.queue.can_wake())?;
        Some(Waker {
            lane: Rc::downgrade(&self.lane),
            eventfd: eventfd.try_clone_to_owned().ok()?,
        })
    }

    /// When to poll at the latest, asleep or not: a command may be late.
    pub fn deadline(&self) -> Option<Instant> {
        let time = self.lane.try_borrow().ok()?.queue.until_tick()?;
        Some(Instant::now() + time)
    }
}

impl Drop for DirectQueue {
    fn drop(&mut self) {
        if let Ok(mut lane) = self.lane.try_borrow_mut() {
            lane.leave(self.client);
        }
    }
}
