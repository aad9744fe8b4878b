//! A file in memory that is a disk with a volatile cache, and can break.

use crate::message::{Answer, EIO, ENOENT, Errno, Node, Operation, Request};
use crate::mount::{Mount, RequestHandler, Sender};
use crate::random::Random;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Unit of bytes that is written as a whole or not at all when the power is cut.
pub const SECTOR: usize = 512;

/// A kind of request to the simulated disk, by which [`Disk::fail`] selects the requests to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// Requests that read data.
    Read,
    /// Requests that write data.
    Write,
    /// Requests that zero a range or punch a hole into it (`fallocate`).
    Zero,
    /// Requests to make written data durable (fsync).
    Sync,
}

/// Fault injected into requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The requests fail with this `errno` and have no effect.
    Error(Errno),
    /// Half of the request's data is moved, in whole sectors of [`SECTOR`] bytes.
    Short,
    /// The requests are executed and answered after a delay.
    Slow(Duration),
    /// The requests are executed and answered when [`Disk::release`] is called.
    Held,
    /// The disk lies: it answers an fsync, but makes nothing durable. For [`RequestKind::Sync`]
    /// only.
    Lie,
}

/// Counts of the requests that the disk has received from the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Log {
    /// Number of read requests.
    pub reads: u64,
    /// Number of write requests.
    pub writes: u64,
    /// Number of fsyncs, and of writes that are durable at once.
    pub syncs: u64,
}

/// Effects of a simulated power cut on writes that were answered but not durable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cut {
    /// Number of writes that were not durable at the power cut.
    pub volatile: usize,
    /// Number of sectors of the volatile writes that the power cut has lost.
    pub lost: usize,
    /// Number of sectors of the volatile writes that have reached the medium nevertheless.
    pub kept: usize,
    /// Number of volatile writes that have lost a part of their sectors.
    pub torn: usize,
}

struct Rule {
    what: RequestKind,
    range: Range<u64>,
    times: u64,
    fault: Fault,
}

/// A change that was answered and is not durable.
struct Volatile {
    offset: u64,
    data: Vec<u8>,
}

impl Volatile {
    /// Returns the parts before and behind `range`, after newer data in `range` became durable.
    fn outside(self, range: &Range<u64>) -> impl Iterator<Item = Self> {
        let Self { offset, mut data } = self;
        let position = |at: u64| usize::try_from(at.saturating_sub(offset)).unwrap_or(usize::MAX);
        let end = position(range.end).min(data.len());
        let behind = data.split_off(end);
        data.truncate(position(range.start));
        let behind = Self {
            offset: offset + end as u64,
            data: behind,
        };
        let parts = [Self { offset, data }, behind];
        parts.into_iter().filter(|part| !part.data.is_empty())
    }
}

enum PendingOperation {
    Read {
        offset: u64,
        len: u32,
    },
    Write {
        offset: u64,
        data: Vec<u8>,
        durable: bool,
    },
    Sync,
}

struct HeldRequest {
    id: u64,
    todo: PendingOperation,
}

#[derive(Default)]
struct State {
    /// Content of the disk as reads return it, including data that is not durable.
    current: Vec<u8>,
    /// Content of the disk that survives a power cut.
    durable: Vec<u8>,
    volatile: Vec<Volatile>,
    rules: Vec<Rule>,
    held: Vec<HeldRequest>,
    /// Messages that are held before they are parsed: all, or those of one opcode.
    silence: Option<Option<u32>>,
    /// Messages of the kernel that came during the silence.
    messages: Vec<Vec<u8>>,
    log: Log,
    /// Whether the power is off, so that every request fails.
    off: bool,
    /// Requests left before the power is cut, and the generator that decides which sectors are
    /// lost.
    cut_after: Option<(u64, Random)>,
    /// Effects of the power cut that [`Disk::cut_after`] has scheduled, after it has happened.
    cut: Option<Cut>,
}

impl State {
    fn strike(&mut self, what: RequestKind, range: &Range<u64>) -> Option<Fault> {
        let hits = |rule: &&mut Rule| {
            let overlap = range.start < rule.range.end && rule.range.start < range.end;
            rule.what == what && (overlap || what == RequestKind::Sync)
        };
        let rule = self.rules.iter_mut().find(hits)?;
        rule.times -= 1;
        let fault = rule.fault;
        self.rules.retain(|rule| rule.times > 0);
        Some(fault)
    }

    /// Cuts the power: a random part of the volatile data is lost.
    fn lose(&mut self, random: &mut Random, sender: &Sender) -> Cut {
        self.off = true;
        for HeldRequest { id, .. } in std::mem::take(&mut self.held) {
            sender.answer(id, Answer::Error(EIO));
        }
        let mut volatile = std::mem::take(&mut self.volatile);
        let mut cut = Cut {
            volatile: volatile.len(),
            ..Cut::default()
        };
        // The share that is kept varies from nearly none to nearly all, and the order is random.
        let share = [0, 10, 50, 90, 100];
        let keep = share.get(random.below(5) as usize).copied().unwrap_or(50);
        for last in (1..volatile.len()).rev() {
            volatile.swap(last, random.below(last as u64 + 1) as usize);
        }
        for one in &volatile {
            let (mut kept, mut lost) = (0, 0);
            for (number, sector) in one.data.chunks(SECTOR).enumerate() {
                if random.percent(keep) {
                    let at = one.offset + (number * SECTOR) as u64;
                    store(&mut self.durable, at, sector);
                    kept += 1;
                } else {
                    lost += 1;
                }
            }
            cut.torn += usize::from(kept > 0 && lost > 0);
            cut.kept += kept;
            cut.lost += lost;
        }
        cut
    }

    fn carry_out(&mut self, todo: &PendingOperation) -> Answer {
        if self.off {
            return Answer::Error(EIO);
        }
        match todo {
            PendingOperation::Read { offset, len } => {
                let end = (self.current.len() as u64).min(offset.saturating_add((*len).into()));
                let range = (*offset).min(end) as usize..end as usize;
                Answer::Data(self.current.get(range).unwrap_or_default().to_vec())
            }
            PendingOperation::Write {
                offset,
                data,
                durable,
            } => {
                if !store(&mut self.current, *offset, data) {
                    return Answer::Error(27);
                }
                if !durable {
                    self.volatile.push(Volatile {
                        offset: *offset,
                        data: data.clone(),
                    });
                    return Answer::Done;
                }
                // Older data of the same place must not win later; the rest of those writes stays
                // volatile.
                let range = *offset..offset + data.len() as u64;
                let older = std::mem::take(&mut self.volatile).into_iter();
                self.volatile = older.flat_map(|one| one.outside(&range)).collect();
                store(&mut self.durable, *offset, data);
                Answer::Done
            }
            PendingOperation::Sync => {
                for one in self.volatile.drain(..) {
                    store(&mut self.durable, one.offset, &one.data);
                }
                Answer::Done
            }
        }
    }
}

/// Stores data within the file, which does not grow.
fn store(bytes: &mut [u8], offset: u64, data: &[u8]) -> bool {
    let start = offset as usize;
    match bytes.get_mut(start..start.saturating_add(data.len())) {
        Some(place) => {
            place.copy_from_slice(data);
            true
        }
        None => false,
    }
}

#[derive(Default)]
struct SharedDisk {
    state: Mutex<State>,
    /// Signalled when a request has been held, and when a scheduled power cut has happened.
    held: Condvar,
}

impl SharedDisk {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unpoisoned()
    }

    /// Counts a request, and cuts the power before it if that is due.
    fn count_down(&self, state: &mut State, sender: &Sender) {
        let Some((left, _)) = &mut state.cut_after else {
            return;
        };
        match left.checked_sub(1) {
            Some(fewer) => *left = fewer,
            None => {
                if let Some((_, mut random)) = state.cut_after.take() {
                    let cut = state.lose(&mut random, sender);
                    state.cut = Some(cut);
                    self.held.notify_all();
                }
            }
        }
    }
}

#[derive(Clone)]
struct Server {
    shared: Arc<SharedDisk>,
    sender: Sender,
}

impl RequestHandler for Server {
    fn accepts(&mut self, opcode: u32, message: &[u8]) -> bool {
        let mut state = self.shared.lock();
        let is_held = state
            .silence
            .is_some_and(|only| only.is_none_or(|only| only == opcode));
        if is_held {
            state.messages.push(message.to_vec());
            self.shared.held.notify_all();
        }
        !is_held
    }

    fn serve(&mut self, request: &Request<'_>) -> Answer {
        if request.node != Node::file(0) {
            return Answer::Error(ENOENT);
        }
        let mut state = self.shared.lock();
        if let Operation::Read { .. } | Operation::Write { .. } | Operation::Sync =
            request.operation
        {
            self.shared.count_down(&mut state, &self.sender);
        }
        let everywhere = 0..u64::MAX;
        let (what, range, todo) = match request.operation {
            Operation::Size => return Answer::Size(state.current.len() as u64),
            Operation::Resize(size) => {
                state.current.resize(size as usize, 0);
                state.durable.resize(size as usize, 0);
                return Answer::Size(size);
            }
            Operation::Read { offset, len } => {
                state.log.reads += 1;
                let range = offset..offset.saturating_add(len.into());
                (
                    RequestKind::Read,
                    range,
                    PendingOperation::Read { offset, len },
                )
            }
            Operation::Write {
                offset,
                data,
                durable,
            } => {
                state.log.writes += 1;
                state.log.syncs += u64::from(durable);
                let todo = PendingOperation::Write {
                    offset,
                    data: data.to_vec(),
                    durable,
                };
                (RequestKind::Write, offset..offset + data.len() as u64, todo)
            }
            Operation::Zero { offset, len } => {
                let size = state.current.len() as u64;
                let end = offset.saturating_add(len).min(size);
                if offset >= end {
                    return Answer::Done;
                }
                let todo = PendingOperation::Write {
                    offset,
                    data: vec![0; (end - offset) as usize],
                    durable: false,
                };
                (RequestKind::Zero, offset..end, todo)
            }
            Operation::Sync => {
                state.log.syncs += 1;
                (RequestKind::Sync, everywhere, PendingOperation::Sync)
            }
        };
        match state.strike(what, &range) {
            None => state.carry_out(&todo),
            Some(Fault::Error(errno)) => Answer::Error(errno),
            Some(Fault::Lie) => Answer::Done,
            Some(Fault::Short) => short(&mut state, todo),
            Some(Fault::Held) => {
                state.held.push(HeldRequest {
                    id: request.id,
                    todo,
                });
                self.shared.held.notify_all();
                Answer::Later
            }
            Some(Fault::Slow(delay)) => {
                let (shared, sender, id) = (self.shared.clone(), self.sender.clone(), request.id);
                // A thread for each: a test has few of them.
                let slow = std::thread::Builder::new().spawn(move || {
                    std::thread::sleep(delay);
                    let answer = shared.lock().carry_out(&todo);
                    sender.answer(id, answer);
                });
                match slow {
                    Ok(_) => Answer::Later,
                    Err(_) => Answer::Error(EIO),
                }
            }
        }
    }
}

/// Executes the first half of a request, and returns an answer for that half.
fn short(state: &mut State, todo: PendingOperation) -> Answer {
    let half = |len: usize| len / 2 / SECTOR * SECTOR;
    match todo {
        PendingOperation::Read { offset, len } => {
            let len = half(len as usize) as u32;
            state.carry_out(&PendingOperation::Read { offset, len })
        }
        PendingOperation::Write {
            offset,
            mut data,
            durable,
        } => {
            data.truncate(half(data.len()));
            let len = data.len() as u32;
            let todo = PendingOperation::Write {
                offset,
                data,
                durable,
            };
            match state.carry_out(&todo) {
                Answer::Done => Answer::Short(len),
                other => other,
            }
        }
        todo => state.carry_out(&todo),
    }
}

/// A file system with one file, of a fixed size. Written data is volatile until an fsync, or is
/// durable at once if the write asks for it.
pub struct Disk {
    shared: Arc<SharedDisk>,
    server: Server,
    mount: Arc<Mount>,
    thread: Option<JoinHandle<()>>,
}

impl Disk {
    /// Mounts a disk of `size` zero bytes at the directory `point`; only root may mount.
    pub fn new(point: &Path, size: usize) -> io::Result<Self> {
        let mount = Arc::new(Mount::new(point)?);
        let shared = Arc::new(SharedDisk::default());
        let mut state = shared.lock();
        state.current = vec![0; size];
        state.durable = vec![0; size];
        drop(state);
        let server = Server {
            shared: shared.clone(),
            sender: mount.sender(),
        };
        let (serving, mut serves) = (mount.clone(), server.clone());
        let thread = std::thread::Builder::new().name("fuse-disk".into());
        let thread = thread.spawn(move || serving.serve(&mut serves))?;
        Ok(Self {
            shared,
            server,
            mount,
            thread: Some(thread),
        })
    }

    /// Returns the path of the file that stands for the disk's medium.
    pub fn path(&self) -> PathBuf {
        self.mount.file(0)
    }

    /// Adds a rule: the next `times` requests of a kind that touch `range` (bytes) have a fault.
    /// Earlier rules take precedence.
    pub fn fail(&self, what: RequestKind, range: Range<u64>, times: u64, fault: Fault) {
        let rule = Rule {
            what,
            range,
            times: times.max(1),
            fault,
        };
        self.shared.lock().rules.push(rule);
    }

    /// Removes all fault rules of the disk; requests that are already held stay held.
    pub fn heal(&self) {
        self.shared.lock().rules.clear();
    }

    /// Holds all messages of the kernel from now on, or those with one opcode ([`op`]), lookups and
    /// closes included. A process that waits for an answer cannot be killed.
    ///
    /// [`op`]: crate::op
    pub fn silence(&self, opcode: Option<u32>) {
        self.shared.lock().silence = Some(opcode);
    }

    /// Waits until `count` requests or messages are held; returns `false` if that takes longer than
    /// `limit`.
    pub fn wait_held(&self, count: usize, limit: Duration) -> bool {
        let began = Instant::now();
        let mut state = self.shared.lock();
        while state.held.len() + state.messages.len() < count {
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                return false;
            }
            state = self.shared.held.wait_timeout(state, left).unpoisoned().0;
        }
        true
    }

    /// Executes and answers the held requests in their order, then the held messages, and ends a
    /// silence; returns their number.
    pub fn release(&self) -> usize {
        let mut state = self.shared.lock();
        let held = std::mem::take(&mut state.held);
        let messages = std::mem::take(&mut state.messages);
        state.silence = None;
        let count = held.len() + messages.len();
        for HeldRequest { id, todo } in held {
            let answer = state.carry_out(&todo);
            self.server.sender.answer(id, answer);
        }
        drop(state);
        let mut server = self.server.clone();
        for message in messages {
            self.mount.process(&mut server, &message);
        }
        count
    }

    /// Returns the disk's content in `range` (bytes) as a reader sees it now; empty if out of
    /// range.
    pub fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        let state = self.shared.lock();
        state.current.get(range).unwrap_or_default().to_vec()
    }

    /// Returns the counts of requests that the disk has received so far.
    pub fn log(&self) -> Log {
        self.shared.lock().log
    }

    /// Cuts the power: a random part of the volatile data is lost, sector by sector, and held
    /// requests are never executed. Until [`Disk::power_on`] every request fails.
    pub fn cut(&self, random: &mut Random) -> Cut {
        self.shared.lock().lose(random, &self.server.sender)
    }

    /// Cuts the power, as [`Disk::cut`] does, after `requests` more requests: between two of them,
    /// whatever is under way.
    pub fn cut_after(&self, requests: u64, random: Random) {
        let mut state = self.shared.lock();
        state.cut = None;
        state.cut_after = Some((requests, random));
    }

    /// Waits for the power cut that [`Disk::cut_after`] scheduled, and returns its effects; `None`
    /// if it has not happened within `limit`.
    pub fn wait_cut(&self, limit: Duration) -> Option<Cut> {
        let began = Instant::now();
        let mut state = self.shared.lock();
        while state.cut.is_none() {
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                return None;
            }
            state = self.shared.held.wait_timeout(state, left).unpoisoned().0;
        }
        state.cut
    }

    /// Restores the power after a cut: the content of the medium can be read and written again.
    pub fn power_on(&self) {
        let mut state = self.shared.lock();
        let durable = state.durable.clone();
        state.current = durable;
        state.volatile.clear();
        state.cut_after = None;
        state.off = false;
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.mount.abort();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing)] // A test fails by a panic.
mod tests {
    use super::*;

    const SECTORS: usize = 16;

    /// Whatever is durable by itself, an older write never takes its place.
    #[test]
    fn medium_after_sync_matches_written_data() {
        let mut random = Random::new(7);
        for _ in 0..1000 {
            let mut state = State {
                current: vec![0; SECTORS * SECTOR],
                durable: vec![0; SECTORS * SECTOR],
                ..State::default()
            };
            for version in 1..=8 {
                let first = random.below(SECTORS as u64) as usize;
                let count = 1 + random.below((SECTORS - first) as u64) as usize;
                let (offset, len) = (first * SECTOR, count * SECTOR);
                let durable = random.percent(30);
                let write = PendingOperation::Write {
                    offset: offset as u64,
                    data: vec![version; len],
                    durable,
                };
                assert!(matches!(state.carry_out(&write), Answer::Done));
                let medium = &state.durable[offset..offset + len];
                assert!(!durable || medium.iter().all(|byte| *byte == version));
            }
            assert!(matches!(
                state.carry_out(&PendingOperation::Sync),
                Answer::Done
            ));
            assert_eq!(state.durable, state.current);
        }
    }
}
