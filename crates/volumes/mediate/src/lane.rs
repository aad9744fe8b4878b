//! A physical queue pair, and the virtual queue pairs that use it.
//!
//! A lane serves one virtual queue pair, or several of one worker. When shared, each may have
//! outstanding commands up to its share of the room: the whole, divided by the number of virtual
//! queue pairs that are active or waiting. A single active one may use all of the room. A later one
//! waits only until the first has completed its excess commands.

use dma::{Access, DmaMap, SegmentList};
use driver::raw::{IovaRange, RawCompletionHandler, RawData};
use driver::{CommandError, Device, Error, QueueOptions, QueuePair, SubmitRefusal};
use nvme::cmd::io::{DSM_MAX_RANGES, RwCdw12};
use nvme::{Command, Status};
use std::collections::VecDeque;

use crate::bounce::copy;
use crate::check::{DataRequirement, Plan, Rules};
use crate::entry::{CompletedCommand, EntryUse, Parked, status_of};
use crate::flight::{Client, Flight};
use crate::options::DirectOptions;
use crate::stats::QueueStats;
use crate::translate::{Near, Translator, walk};

/// Queue pair of the device that several virtual queue pairs share, with its outstanding commands.
#[derive(Debug)]
pub(crate) struct Lane {
    pub queue: QueuePair,
    pub device: Device,
    flight: Flight,
    /// Commands that are split and of which parts are left to submit.
    parked: VecDeque<Parked>,
    /// Number of commands of a batch that were announced and have not been submitted yet. Parts of
    /// other commands leave a slot for each.
    promised: usize,
    /// Number of polls of the queue pair so far.
    round: u64,
    /// Empty segment list, kept to reuse its memory.
    walked: SegmentList,
    /// Empty list of device addresses, kept to reuse its memory.
    ranges: Vec<IovaRange>,
    /// Empty lists of address ranges, kept to reuse their memory.
    spare_ranges: Vec<Vec<IovaRange>>,
    /// Parts that have ended without a completion queue entry, for the next poll.
    over: Vec<(u16, Status, u32)>,
}

/// Everything that is needed to submit a command to the device.
pub(crate) struct Submission<'a> {
    pub client: usize,
    pub token: u64,
    pub guest: &'a Command,
    pub map: &'a DmaMap,
    pub rules: &'a Rules,
    pub translator: &'a mut Translator,
    pub stats: &'a QueueStats,
}

fn refusal(refusal: SubmitRefusal) -> Status {
    match refusal {
        SubmitRefusal::Full => Status::COMMAND_INTERRUPTED,
        SubmitRefusal::Gone => Status::INTERNAL_ERROR.with_dnr(true),
        _ => Status::INTERNAL_ERROR,
    }
}

impl Lane {
    pub fn new(device: &Device, options: &DirectOptions) -> Result<Self, Error> {
        let queue = device.queue(
            options.slice.nsid(),
            QueueOptions {
                depth: options.depth,
                interrupts: options.interrupts,
                polled: true,
                ..QueueOptions::default()
            },
        )?;
        let depth = queue.depth();
        Ok(Self {
            queue,
            device: device.clone(),
            flight: Flight::new(device, depth),
            parked: VecDeque::with_capacity(depth),
            promised: 0,
            round: 0,
            walked: SegmentList::with_capacity(1024),
            ranges: Vec::with_capacity(1024),
            spare_ranges: Vec::with_capacity(depth),
            over: Vec::with_capacity(depth),
        })
    }

    // ---- virtual queue pairs

    /// Registers a virtual queue pair, and returns its number.
    pub fn enter(&mut self) -> usize {
        let client = Client {
            open: true,
            inbox: Vec::with_capacity(self.flight.entries.len()),
            ..Client::default()
        };
        let free = self
            .flight
            .clients
            .iter()
            .position(|c| !c.open && c.in_flight == 0);
        match free.and_then(|at| Some((at, self.flight.clients.get_mut(at)?))) {
            Some((at, place)) => {
                *place = client;
                at
            }
            None => {
                self.flight.clients.push(client);
                self.flight.clients.len() - 1
            }
        }
    }

    /// Removes a virtual queue pair. The results of its outstanding commands are discarded.
    pub fn leave(&mut self, client: usize) {
        if let Some(client) = self.flight.clients.get_mut(client) {
            client.open = false;
            client.hungry = None;
            client.inbox.clear();
        }
    }

    /// Returns the number of virtual queue pairs that use this queue pair of the device.
    pub fn users(&self) -> usize {
        self.flight
            .clients
            .iter()
            .filter(|client| client.open)
            .count()
    }

    /// Returns the number of a virtual queue pair's commands that are outstanding, or completed and
    /// still in its inbox.
    pub fn in_flight(&self, client: usize) -> usize {
        self.flight
            .clients
            .get(client)
            .map_or(0, |client| client.in_flight + client.inbox.len())
    }

    /// Returns how many commands a virtual queue pair may submit now. If there are none, it is
    /// recorded as waiting.
    #[inline]
    pub fn room(&mut self, client: usize) -> usize {
        self.promised = 0;
        if !self.parked.is_empty() {
            return 0;
        }
        let free = self.flight.free.len().min(self.queue.room());
        if self.flight.clients.len() == 1 {
            self.promised = free;
            return free;
        }
        let others = self.flight.clients.iter().enumerate();
        let others = others
            .filter(|(at, other)| *at != client && other.at_work(self.round))
            .count();
        let share = (self.flight.entries.len() / (others + 1)).max(1);
        let Some(client) = self.flight.clients.get_mut(client) else {
            return 0;
        };
        let room = free.min(share.saturating_sub(client.in_flight));
        client.hungry = (room == 0).then_some(self.round);
        self.promised = room;
        room
    }

    /// Prepares the worker's sleep. Returns `true` if nothing is pending for any virtual queue pair
    /// and later completions signal.
    pub fn arm(&mut self) -> bool {
        // Memory that was unregistered is released, although nothing may ever be submitted again.
        self.flight.tables.keep_up();
        let waits = self.flight.clients.iter().any(|c| !c.inbox.is_empty());
        self.queue.arm() && !waits && self.over.is_empty()
    }

    // ---- commands

    /// Translates a checked command and puts it on the physical queue. After an error, nothing was
    /// submitted.
    #[inline]
    pub fn start(&mut self, plan: &Plan, job: &mut Submission<'_>) -> Result<(), Status> {
        let Some(&index) = self.flight.free.last() else {
            // A host must not be asked to retry for ever.
            let gone = self.queue.is_gone();
            return Err(refusal(if gone {
                SubmitRefusal::Gone
            } else {
                SubmitRefusal::Full
            }));
        };
        self.promised = self.promised.saturating_sub(1);
        self.flight.tables.keep_up();
        job.translator.follow(job.map, self.flight.tables.number());
        let Some(entry) = self.flight.entries.get_mut(usize::from(index)) else {
            return Err(Status::INTERNAL_ERROR);
        };
        entry.parts = 1;
        entry.status = Status::SUCCESS;
        entry.read = false;
        let user_data = u64::from(index);
        let most = self.queue.max_bytes();
        match plan.wants {
            DataRequirement::Nothing => {
                let put = self
                    .queue
                    .submit_raw(&plan.command, RawData::None, user_data);
                put.map_err(refusal)?;
            }
            DataRequirement::Data { len, access } => {
                let table = self.flight.tables.current();
                let near = job.translator.near(job.map, table, job.guest, len, access);
                let pages;
                let data = match near {
                    _ if len > most => None,
                    Some(Near::One(iova)) => Some(RawData::At { iova, len }),
                    Some(Near::Two(two)) => {
                        pages = two;
                        let ranges = &pages;
                        let skip = 0;
                        self.queue.method(ranges).map(|method| RawData::Ranges {
                            method,
                            ranges,
                            skip,
                            len,
                        })
                    }
                    None => None,
                };
                match data {
                    Some(data) => {
                        let put = self.queue.submit_raw(&plan.command, data, user_data);
                        put.map_err(refusal)?;
                        entry.pin = Some(job.map.pin());
                    }
                    None => self.start_far(index, plan, job, len, access)?,
                }
            }
            DataRequirement::Ranges(count) => self.start_ranges(index, plan, job, count)?,
        }
        self.flight.free.pop();
        if let Some(entry) = self.flight.entries.get_mut(usize::from(index)) {
            // A command that was split may have failed already, with its last part still at the
            // device.
            let simple = entry.parts == 1 && !entry.copied && entry.status.is_success();
            entry.used = if simple {
                EntryUse::Simple
            } else {
                EntryUse::Composite
            };
            entry.client = job.client;
            entry.token = job.token;
            entry.table = self.flight.tables.number();
        }
        self.flight.tables.hold();
        if let Some(client) = self.flight.clients.get_mut(job.client) {
            client.in_flight += 1;
        }
        job.stats.command();
        Ok(())
    }

    /// Starts a command on the slow path: lists, several ranges, more data than one command of the
    /// device can transfer, or a copy.
    #[inline(never)]
    fn start_far(
        &mut self,
        index: u16,
        plan: &Plan,
        job: &mut Submission<'_>,
        len: u64,
        access: Access,
    ) -> Result<(), Status> {
        let Some(entry) = self.flight.entries.get_mut(usize::from(index)) else {
            return Err(Status::INTERNAL_ERROR);
        };
        entry.read = access == Access::Write;
        let page = job.translator.page_size();
        let started = walk(job.map, job.guest, len, page, access, &mut self.walked)
            .and_then(|()| self.start_walked(index, plan, job, len));
        self.walked.clear();
        match (&started, self.flight.entries.get_mut(usize::from(index))) {
            (Ok(()), Some(entry)) => entry.pin = Some(job.map.pin()),
            _ => self.flight.drop_copy(index),
        }
        started
    }

    fn start_walked(
        &mut self,
        index: u16,
        plan: &Plan,
        job: &mut Submission<'_>,
        len: u64,
    ) -> Result<(), Status> {
        let Some(entry) = self.flight.entries.get_mut(usize::from(index)) else {
            return Err(Status::INTERNAL_ERROR);
        };
        let known =
            Translator::resolve(self.flight.tables.current(), &self.walked, &mut self.ranges);
        let method = if known {
            self.queue.method(&self.ranges)
        } else {
            None
        };
        let method = match method {
            Some(method) => method,
            None => {
                let buffer = self.flight.bounces.take(len)?;
                let iova = buffer.iova();
                let whole = entry.read || copy(&self.walked, &buffer, true);
                let walked = std::mem::take(&mut self.walked);
                self.flight.keep_copy(index, (buffer, walked));
                if !whole {
                    return Err(Status::DATA_TRANSFER_ERROR);
                }
                job.stats.bounce(len);
                self.ranges.clear();
                self.ranges.push(IovaRange { iova, len });
                driver::raw::Method::Prp
            }
        };
        let most = self.queue.max_bytes();
        if len > most {
            return self.split(index, plan, job, method, len, most);
        }
        let data = RawData::Ranges {
            method,
            ranges: &self.ranges,
            skip: 0,
            len,
        };
        let put = self.queue.submit_raw(&plan.command, data, u64::from(index));
        put.map_err(refusal)
    }

    /// Splits a command that has more data than the device's maximum transfer.
    fn split(
        &mut self,
        index: u16,
        plan: &Plan,
        job: &mut Submission<'_>,
        method: driver::raw::Method,
        len: u64,
        most: u64,
    ) -> Result<(), Status> {
        let Some(entry) = self.flight.entries.get_mut(usize::from(index)) else {
            return Err(Status::INTERNAL_ERROR);
        };
        let parts = u32::try_from(len.div_ceil(most.max(1)));
        entry.parts = parts.map_err(|_| Status::INVALID_FIELD.with_dnr(true))?;
        let spare = self.spare_ranges.pop().unwrap_or_default();
        self.parked.push_back(Parked {
            entry: index,
            command: plan.command,
            method,
            ranges: std::mem::replace(&mut self.ranges, spare),
            skip: 0,
            left: len,
        });
        job.stats.one_split();
        // The command has begun: later errors are reported as a completion.
        self.go_on();
        Ok(())
    }

    /// Removes the first command of which parts are left to submit.
    fn unpark(&mut self) {
        if let Some(mut parked) = self.parked.pop_front() {
            parked.ranges.clear();
            self.spare_ranges.push(parked.ranges);
        }
    }

    /// Submits parts of split commands while the queue pair has room.
    fn go_on(&mut self) {
        let most = self.queue.max_bytes();
        while let Some(parked) = self.parked.front_mut() {
            let Some(entry) = self.flight.entries.get_mut(usize::from(parked.entry)) else {
                return;
            };
            let shift = parked_shift(&self.queue);
            if parked.left == 0 {
                self.unpark();
                continue;
            }
            if !entry.status.is_success() {
                // The remaining parts cannot repair the failure.
                let rest = parked.left.div_ceil(most.max(1)) as u32;
                let index = parked.entry;
                self.unpark();
                self.drop_parts(index, rest);
                continue;
            }
            if self.queue.room() <= self.promised {
                return;
            }
            let len = parked.left.min(most);
            let blocks = len >> shift;
            let cdw12 = RwCdw12::from_bits(parked.command.cdw12.get());
            let cdw12 = cdw12.with_nlb_z(blocks.wrapping_sub(1) as u16);
            parked.command.cdw12 = cdw12.into_bits().into();
            let data = RawData::Ranges {
                method: parked.method,
                ranges: &parked.ranges,
                skip: parked.skip,
                len,
            };
            let user_data = u64::from(parked.entry);
            match self.queue.submit_raw(&parked.command, data, user_data) {
                Ok(()) => {
                    parked.skip += len;
                    parked.left -= len;
                    let next = parked.command.slba().wrapping_add(blocks);
                    parked.command.set_slba(next);
                }
                Err(SubmitRefusal::Full) => return,
                Err(why) => entry.status = refusal(why),
            }
        }
    }

    /// Counts parts of a command that were never submitted as completed.
    fn drop_parts(&mut self, index: u16, parts: u32) {
        if let Some(entry) = self.flight.entries.get_mut(usize::from(index)) {
            entry.parts = entry.parts.saturating_sub(parts);
            if entry.parts == 0 {
                // Delivered by the next poll, with its own status.
                self.over.push((index, Status::SUCCESS, entry.dw0));
                entry.parts = 1;
            }
        }
    }

    /// Starts Dataset Management: the ranges are copied, checked one by one, and sent from a page
    /// that belongs to the queue.
    #[inline(never)]
    fn start_ranges(
        &mut self,
        index: u16,
        plan: &Plan,
        job: &mut Submission<'_>,
        count: usize,
    ) -> Result<(), Status> {
        let mut bytes = [0; DSM_MAX_RANGES * 16];
        let mut words = [0; DSM_MAX_RANGES * 2];
        let bytes = bytes.get_mut(..count * 16).ok_or(Status::INTERNAL_ERROR)?;
        let (len, page) = (bytes.len() as u64, job.translator.page_size());
        let list = &mut self.walked;
        let walked = walk(job.map, job.guest, len, page, Access::Read, list);
        let copied = list.copy_to(0, bytes);
        // Guest memory is not accessed any more from here on.
        list.clear();
        walked?;
        if copied != bytes.len() {
            return Err(Status::DATA_TRANSFER_ERROR);
        }
        let words = job.rules.ranges(bytes, &mut words)?;
        let put = self
            .queue
            .submit_raw(&plan.command, RawData::Words(words), index.into());
        put.map_err(refusal)
    }

    /// Aborts a command that is not completely submitted yet. Returns `false` when there is no such
    /// command.
    pub fn abort(&mut self, client: usize, token: u64) -> bool {
        let entries = &mut self.flight.entries;
        let parked = self.parked.iter().map(|parked| usize::from(parked.entry));
        let mut parked = parked.filter(|&at| {
            let entry = entries.get(at);
            entry.is_some_and(|entry| (entry.client, entry.token) == (client, token))
        });
        let Some(entry) = parked.next().and_then(|at| entries.get_mut(at)) else {
            return false;
        };
        entry.status = Status::ABORT_REQUESTED;
        self.go_on();
        true
    }

    // ---- completions

    /// Polls the physical queue pair. Returns the completions of one virtual queue pair in `out`,
    /// and keeps those of the others in their inboxes. Returns the cycle counter at the first
    /// entry, if `measure` is set.
    #[inline]
    pub fn reap(
        &mut self,
        client: usize,
        out: &mut Vec<CompletedCommand>,
        measure: bool,
    ) -> Option<u64> {
        // Unregistered memory is released even if nothing is ever submitted again.
        self.flight.tables.keep_up();
        self.round = self.round.wrapping_add(1);
        if let Some(me) = self.flight.clients.get_mut(client)
            && !me.inbox.is_empty()
        {
            out.append(&mut me.inbox);
        }
        let Self {
            queue,
            flight,
            over,
            ..
        } = self;
        let mut harvest = CompletionDispatch {
            flight: &mut *flight,
            over: &mut *over,
            client,
            out: &mut *out,
            measure,
            start: None,
        };
        queue.look(&mut harvest);
        let start = harvest.start;
        if !over.is_empty() {
            let wild = queue.is_wild();
            for (index, status, dw0) in over.drain(..) {
                if let Some((owner, done)) = flight.part_over(index, status, dw0, wild) {
                    flight.deliver(owner, done, client, out);
                }
            }
        }
        // The batch has ended: a queue with more asks again.
        self.promised = 0;
        if !self.parked.is_empty() {
            self.go_on();
            self.queue.ring();
        }
        start
    }

    /// Returns whether no command is outstanding on the queue pair.
    fn is_idle(&self) -> bool {
        self.flight.free.len() == self.flight.entries.len()
    }
}

/// Receiver of the device's completions, which passes them to the virtual queue pairs.
struct CompletionDispatch<'a> {
    flight: &'a mut Flight,
    /// Parts that have ended without a completion queue entry; see [`Lane::over`].
    over: &'a mut Vec<(u16, Status, u32)>,
    /// Number of the virtual queue pair that is polled, and its results.
    client: usize,
    out: &'a mut Vec<CompletedCommand>,
    /// Whether the cycles of completing commands are measured.
    measure: bool,
    /// Value of the cycle counter at the first completion queue entry of the poll.
    start: Option<u64>,
}

impl CompletionDispatch<'_> {
    #[inline(always)]
    fn begin(&mut self) {
        if self.measure && self.start.is_none() {
            self.start = Some(probes::cycles());
        }
    }

    #[inline(always)]
    fn deliver(&mut self, ended: Option<(usize, CompletedCommand)>) {
        if let Some((owner, done)) = ended {
            self.flight.deliver(owner, done, self.client, self.out);
        }
    }
}

impl RawCompletionHandler for CompletionDispatch<'_> {
    #[inline(always)]
    fn worked(&mut self, user_data: u64, dw0: u32) {
        self.begin();
        let ended = self.flight.worked(user_data as u16, dw0);
        self.deliver(ended);
    }

    #[inline(never)]
    fn failed(&mut self, user_data: u64, error: CommandError, dw0: u32) {
        self.begin();
        let (index, status) = (user_data as u16, status_of(error));
        if error == CommandError::Gone {
            // Only after the poll it is known whether the device may still write.
            self.over.push((index, status, dw0));
            return;
        }
        let ended = self.flight.part_over(index, status, dw0, false);
        self.deliver(ended);
    }
}

/// Returns the block size of the namespace, as a power of two in bytes.
fn parked_shift(queue: &QueuePair) -> u32 {
    queue.block_size().max(1).trailing_zeros()
}

impl Drop for Lane {
    /// Waits for outstanding commands, because guest memory must not be freed while the device may
    /// access it. The wait is bounded: commands without a completion time out, and then the
    /// controller is reset or given up.
    fn drop(&mut self) {
        let mut out = Vec::new();
        let mut rounds = 0u32;
        while !self.is_idle() {
            self.reap(usize::MAX, &mut out, false);
            out.clear();
            rounds = rounds.saturating_add(1);
            if rounds > 4096 {
                std::thread::yield_now();
            }
        }
    }
}
