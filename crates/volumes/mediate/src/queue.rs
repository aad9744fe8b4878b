//! A virtual queue pair on a physical device.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Instant;

use dma::DmaMap;
use driver::{Device, Error};
use nvme::{Command, NvmOpcode, Status};

use crate::check::{DataRequirement, Rules};
use crate::entry::CompletedCommand;
use crate::lane::{Lane, Submission};
use crate::options::DirectOptions;
use crate::slice::Slice;
use crate::stats::QueueStats;
use crate::translate::Translator;

/// A virtual queue pair on a slice of a device, with a physical queue pair of its own, or sharing
/// one with others. Belongs to one worker thread, together with the guest's memory map.
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
    /// Empty list of results, kept to reuse its memory.
    done: Vec<CompletedCommand>,
}

/// Wake-up source for a worker that sleeps with outstanding commands. Belongs to a physical queue
/// pair, on behalf of all virtual ones that share it.
#[derive(Debug)]
pub struct Waker {
    lane: Weak<RefCell<Lane>>,
    eventfd: OwnedFd,
}

impl Waker {
    /// Returns a descriptor that becomes readable when a command completes after [`Waker::arm`].
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Prepares the worker's sleep on [`Waker::event_fd`]. `Some(false)`: completions are pending,
    /// so poll again. `None`: the physical queue pair no longer exists.
    pub fn arm(&self) -> Option<bool> {
        let lane = self.lane.upgrade()?;
        // A borrowed lane is in use.
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
    /// Takes a physical queue pair of the device for exclusive use.
    ///
    /// # Errors
    /// [`Error::NoQueue`] when all are taken; otherwise the error of the driver.
    pub fn reserve(device: &Device, options: DirectOptions) -> Result<Self, Error> {
        let lane = Lane::new(device, &options)?;
        Self::on(Rc::new(RefCell::new(lane)), options)
    }

    /// Creates a further virtual queue pair on the same physical one, which is then shared fairly.
    ///
    /// # Errors
    /// [`Error::Unusable`] for a slice of a namespace with another block size.
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

    /// Returns the counters and measured cycles of the virtual queue pair.
    pub fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }

    /// Returns whether the device supports a command. A caller may emulate unsupported commands in
    /// another way.
    #[inline]
    pub fn supports(&self, opcode: NvmOpcode) -> bool {
        self.rules.supports(opcode)
    }

    /// Sets the memory page size of the guest's controller after it has changed.
    pub fn set_page_size(&mut self, page_size: u64) {
        self.translator.set_page_size(page_size);
    }

    /// Replaces the slice after it was resized; later commands are checked against it. First block
    /// and namespace must not change.
    pub fn set_slice(&mut self, slice: Slice) {
        self.rules.slice = slice;
    }

    /// Sets the state of the guest's volatile write cache. When off, every write is made durable
    /// before its completion.
    pub fn set_write_cache(&mut self, on: bool) {
        self.rules.force_fua = !on;
    }

    /// Returns how many commands may be submitted now. To be called while there are any: on a
    /// shared physical queue pair the result is limited to the share, and a call without success
    /// makes the others leave room.
    #[inline]
    pub fn room(&mut self) -> usize {
        let client = self.client;
        self.lane
            .try_borrow_mut()
            .map_or(0, |mut lane| lane.room(client))
    }

    /// Checks a command, translates it and puts it on the physical queue. `command` is a copy that
    /// the guest cannot access; `map` is the guest's memory; `token` is returned with the result.
    /// The doorbell is not rung.
    ///
    /// # Errors
    /// The status to report to the guest at once. Nothing was submitted then.
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
        if let DataRequirement::Data { len, .. } = plan.wants
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

    /// Rings one doorbell for all commands submitted so far.
    #[inline]
    pub fn ring(&mut self) {
        if let Ok(mut lane) = self.lane.try_borrow_mut() {
            lane.queue.ring();
        }
    }

    /// Rings, delivers completed commands (token, status, dword 0), and returns their number. Never
    /// blocks except for recovery: a device that must be reset is reset here, and the commands are
    /// repeated.
    #[inline]
    pub fn poll(&mut self, done: &mut dyn FnMut(u64, Status, u32)) -> usize {
        let Ok(mut lane) = self.lane.try_borrow_mut() else {
            return 0;
        };
        let start = lane.reap(self.client, &mut self.done, self.stats.is_measuring());
        // The callback may call this queue pair again.
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

    /// Returns the number of the guest's commands that have not completed.
    pub fn in_flight(&self) -> usize {
        self.lane
            .try_borrow()
            .map_or(0, |lane| lane.in_flight(self.client))
    }

    /// Requests an early end of a command, for the guest's Abort. `true`: it will end with Command
    /// Abort Requested, unless it has failed before. `false`: all of it has been submitted to the
    /// device, so the device ends it; the driver handles time-outs.
    pub fn abort(&mut self, token: u64) -> bool {
        let client = self.client;
        self.lane
            .try_borrow_mut()
            .is_ok_and(|mut lane| lane.abort(client, token))
    }

    /// Returns the wake-up source for a worker that sleeps with outstanding commands. `None` if the
    /// worker must poll: without interrupts, or with too few of them.
    pub fn waker(&self) -> Option<Waker> {
        let lane = self.lane.try_borrow().ok()?;
        let eventfd = lane.queue.eventfd().filter(|_| lane.queue.can_wake())?;
        Some(Waker {
            lane: Rc::downgrade(&self.lane),
            eventfd: eventfd.try_clone_to_owned().ok()?,
        })
    }

    /// Returns the latest time of the next poll, so that a command's time-out is noticed.
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
