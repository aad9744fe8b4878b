//! A disk whose every request completes when the scheduler says so.
//!
//! Completed writes lie in a volatile cache until a flush, and each sector of the cache may be lost
//! by itself when the power fails. A flush covers only the writes whose completions were returned
//! before it was submitted, as the trait of volumes promises and no more.

use crate::random::Random;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use volume::{
    AtomicWrites, Completion, Info, Io, IoError, IoErrorKind, Kind, Op, OpenQueue, QueueState,
    Request, Volume, VolumeError, VolumeQueue,
};

/// Size of a sector in bytes, the unit that is never torn.
pub const SECTOR: usize = 512;

type Sector = [u8; SECTOR];

/// Way in which a disk fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// The disk works.
    #[default]
    None,
    /// Half of the requests fail with `EIO`. Failed writes may be done in part.
    Errors,
    /// Writes fail with `ENOSPC`.
    Full,
    /// Every request takes this long at least.
    Slow(Duration),
    /// No request completes.
    Silent,
    /// Every request fails: the disk is unplugged.
    Gone,
}

/// A written sector that is not durable yet.
#[derive(Debug)]
struct CachedWrite {
    write: u64,
    data: Sector,
}

#[derive(Debug)]
struct Cell {
    durable: Sector,
    cached: Vec<CachedWrite>,
}

impl Cell {
    fn current(&self) -> &Sector {
        self.cached.last().map_or(&self.durable, |last| &last.data)
    }
}

#[derive(Debug)]
struct Pending {
    number: u64,
    queue: u64,
    request: Request,
    /// Number of completions that had been returned when the request was submitted.
    barrier: u64,
    since: Duration,
    result: Option<Result<(), IoError>>,
    cancelled: bool,
}

#[derive(Debug, Default)]
struct State {
    cells: Vec<Cell>,
    has_cache: bool,
    /// Whether flushes and FUA have no effect: a defect that the oracle must find.
    lies: bool,
    fault: Fault,
    /// Process that may use the disk. Queues of earlier ones have no effect.
    process: u64,
    now: Duration,
    pending: Vec<Pending>,
    done: Vec<(u64, u64, Completion)>,
    returned: u64,
    returned_writes: BTreeMap<u64, u64>,
    next: u64,
    arrived: u64,
}

thread_local! {
    /// Disks of this thread by their numbers. Requests own memory that must not leave the thread,
    /// while a volume may be shared between threads.
    static DISKS: RefCell<BTreeMap<u64, State>> = const { RefCell::new(BTreeMap::new()) };
}

static NEXT: AtomicU64 = AtomicU64::new(1);

/// Number of a disk, whose state is removed with it.
#[derive(Debug)]
struct Number(u64);

impl Drop for Number {
    fn drop(&mut self) {
        // Thread-locals may already be destroyed, and the state with them.
        let _ = DISKS.try_with(|disks| {
            let state = disks.borrow_mut().remove(&self.0);
            drop(state);
        });
    }
}

/// A simulated disk, to be used by the thread that has made it. Clones are the same disk.
#[derive(Clone, Debug)]
pub struct Disk {
    name: &'static str,
    number: Arc<Number>,
}

/// Event of a disk, for the trace.
#[derive(Clone, Copy, Debug)]
pub enum DiskEvent {
    /// A request has taken effect and has not completed.
    Executed(Op, u64, u64),
    /// A request completes with this result.
    Completed(Op, Result<(), IoErrorKind>),
}

impl Disk {
    /// Creates a disk full of zeroes.
    pub fn new(name: &'static str, sectors: usize, has_cache: bool) -> Self {
        let cell = || Cell {
            durable: [0; SECTOR],
            cached: Vec::new(),
        };
        let state = State {
            cells: std::iter::repeat_with(cell).take(sectors).collect(),
            has_cache,
            ..State::default()
        };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        DISKS.with_borrow_mut(|disks| disks.insert(number, state));
        Self {
            name,
            number: Arc::new(Number(number)),
        }
    }

    fn with<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        DISKS.with_borrow_mut(|disks| act(disks.entry(self.number.0).or_default()))
    }

    /// Returns the disk's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the disk as a volume of a process.
    pub fn volume(&self, process: u64) -> DiskVolume {
        DiskVolume {
            disk: self.clone(),
            process,
        }
    }

    /// Sets the way in which the disk fails.
    pub fn set_fault(&self, fault: Fault) {
        self.with(|state| state.fault = fault);
    }

    /// Lets flushes and FUA have no effect, as on a disk that lies about its cache.
    pub fn set_lying(&self, lies: bool) {
        self.with(|state| state.lies = lies);
    }

    /// Returns the way in which the disk fails.
    pub fn fault(&self) -> Fault {
        self.with(|state| state.fault)
    }

    /// Tells the disk the time.
    pub fn set_now(&self, now: Duration) {
        self.with(|state| state.now = now);
    }

    /// Returns the number of requests that are outstanding.
    pub fn outstanding(&self) -> usize {
        self.with(|state| state.pending.len() + state.done.len())
    }

    /// Returns the number of requests other than flushes that have arrived so far.
    pub fn arrived(&self) -> u64 {
        self.with(|state| state.arrived)
    }

    /// Does one thing: a random request takes effect, completes, or both. `None` when there is no
    /// request, or the disk is silent or slow.
    pub fn step(&self, random: &mut Random) -> Option<DiskEvent> {
        self.with(|state| step(state, random))
    }

    /// Ends the process: each request has an effect, or part of one, or none.
    pub fn kill(&self, process: u64, random: &mut Random) {
        self.with(|state| kill(state, process, random));
    }

    /// Ends the process by a loss of power: each sector keeps one of the contents that it had
    /// since it was last durable.
    pub fn lose_power(&self, process: u64, random: &mut Random) {
        self.with(|state| {
            kill(state, process, random);
            lose_cache(state, random);
        });
    }
}

fn step(state: &mut State, random: &mut Random) -> Option<DiskEvent> {
    let (fault, now) = (state.fault, state.now);
    let can = |pending: &Pending| match fault {
        Fault::Silent => pending.cancelled,
        Fault::Slow(time) => pending.cancelled || now >= pending.since + time,
        _ => true,
    };
    let able = state.pending.iter().enumerate();
    let able = able.filter(|(_, pending)| can(pending)).map(|(at, _)| at);
    let able: Vec<usize> = able.collect();
    let at = *random.pick(&able)?;
    let completes = random.one_in(2);
    let mut pending = state.pending.swap_remove(at);
    if pending.result.is_some() {
        return Some(complete(state, pending));
    }
    let result = if pending.cancelled && (fault == Fault::Silent || random.one_in(2)) {
        Err(IoErrorKind::Aborted)
    } else {
        outcome(fault, pending.request.op, random)
    };
    // A failed change may have been made in part.
    let happens = match result {
        Err(IoErrorKind::Aborted | IoErrorKind::Gone) => random.one_in(2),
        _ => true,
    };
    if happens {
        execute(state, &pending, result.is_err().then_some(&mut *random));
    }
    pending.result = Some(result.map_err(IoError::from));
    let request = &pending.request;
    let event = DiskEvent::Executed(request.op, request.offset, request.len);
    if completes {
        return Some(complete(state, pending));
    }
    state.pending.push(pending);
    Some(event)
}

fn kill(state: &mut State, process: u64, random: &mut Random) {
    state.process = process;
    state.done.clear();
    for pending in std::mem::take(&mut state.pending) {
        if pending.result.is_none() && random.one_in(2) {
            let whole = random.one_in(2);
            execute(state, &pending, (!whole).then_some(&mut *random));
        }
    }
    // The next process opens the disk after the requests of this one have ended.
    state.returned += 1;
    for cached in state.cells.iter().flat_map(|cell| &cell.cached) {
        let returned = state.returned_writes.entry(cached.write);
        returned.or_insert(state.returned);
    }
}

fn lose_cache(state: &mut State, random: &mut Random) {
    let how = random.below(3);
    for cell in &mut state.cells {
        let cached = std::mem::take(&mut cell.cached);
        let kept = match how {
            // Everything is lost.
            0 => None,
            1 => random.pick(&cached),
            _ if random.one_in(2) => None,
            _ => cached.last(),
        };
        if let Some(kept) = kept {
            cell.durable = kept.data;
        }
    }
}

/// Returns the result of a request that is about to take effect.
fn outcome(fault: Fault, op: Op, random: &mut Random) -> Result<(), IoErrorKind> {
    match fault {
        Fault::None | Fault::Slow(_) | Fault::Silent => Ok(()),
        Fault::Gone => Err(IoErrorKind::Gone),
        Fault::Full if op.changes() && op != Op::Flush => Err(IoErrorKind::NoSpace),
        Fault::Errors if random.one_in(2) => Err(match op {
            Op::Read => IoErrorKind::MediaRead,
            Op::Flush => IoErrorKind::NotDurable,
            _ => IoErrorKind::MediaWrite,
        }),
        Fault::Full | Fault::Errors => Ok(()),
    }
}

fn complete(state: &mut State, pending: Pending) -> DiskEvent {
    let result = pending.result.unwrap_or(Ok(()));
    let event = DiskEvent::Completed(pending.request.op, result.map_err(|error| error.kind));
    let completion = pending.request.complete(result);
    state.done.push((pending.queue, pending.number, completion));
    event
}

/// Makes a request take effect, for some of its sectors if `partly`.
fn execute(state: &mut State, pending: &Pending, mut partly: Option<&mut Random>) {
    let request = &pending.request;
    let (has_cache, lies) = (state.has_cache, state.lies);
    if request.op == Op::Flush {
        if partly.is_some() || state.lies {
            return;
        }
        let returned = &state.returned_writes;
        let is_covered = |cached: &CachedWrite| {
            let at = returned.get(&cached.write);
            at.is_some_and(|at| *at <= pending.barrier)
        };
        for cell in &mut state.cells {
            if let Some(last) = cell.cached.iter().rposition(is_covered) {
                let rest = cell.cached.split_off(last + 1);
                if let Some(last) = cell.cached.pop() {
                    cell.durable = last.data;
                }
                cell.cached = rest;
            }
        }
        return;
    }
    let first = request.offset as usize / SECTOR;
    let count = request.len as usize / SECTOR;
    for (n, cell) in state.cells.iter_mut().skip(first).take(count).enumerate() {
        if let Some(random) = &mut partly
            && random.one_in(2)
        {
            continue;
        }
        let at = (n * SECTOR) as u64;
        let (data, fua) = match request.op {
            Op::Read => {
                request.data.copy_from(at, cell.current());
                continue;
            }
            Op::Write { fua } => {
                let mut data = [0; SECTOR];
                request.data.copy_to(at, &mut data);
                (data, fua)
            }
            Op::WriteZeroes { fua, .. } => ([0; SECTOR], fua),
            Op::Deallocate | Op::Flush => ([0; SECTOR], false),
        };
        if fua && !lies || !has_cache {
            cell.cached.clear();
            cell.durable = data;
        } else {
            let write = pending.number;
            cell.cached.push(CachedWrite { write, data });
        }
    }
}

/// The disk, as one process has opened it.
#[derive(Debug)]
pub struct DiskVolume {
    disk: Disk,
    process: u64,
}

impl Volume for DiskVolume {
    fn info(&self) -> Info {
        self.disk.with(|state| Info {
            size: (state.cells.len() * SECTOR) as u64,
            block_size: SECTOR as u32,
            optimal_io: 4096,
            read_only: false,
            volatile_cache: state.has_cache,
            deallocate: true,
            deallocate_granularity: SECTOR as u32,
            zeroes_after_deallocate: true,
            write_zeroes: true,
            kind: Kind::BlockDevice,
            description: self.disk.name.into(),
        })
    }

    fn open(&self, _: &Io) -> Result<OpenQueue, VolumeError> {
        let number = self.disk.with(|state| {
            state.next += 1;
            state.next
        });
        Ok(OpenQueue::new(DiskQueue {
            info: self.info(),
            number,
            disk: self.disk.clone(),
            process: self.process,
        }))
    }

    fn id(&self) -> Vec<u8> {
        self.disk.name.into()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    fn atomic_writes(&self) -> AtomicWrites {
        AtomicWrites::NONE
    }
}

struct DiskQueue {
    info: Info,
    number: u64,
    disk: Disk,
    process: u64,
}

impl VolumeQueue for DiskQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if let Err(error) = request.check_info(&self.info) {
            return Some(request.complete(Err(error)));
        }
        self.disk.with(|state| {
            if state.process != self.process || state.fault == Fault::Gone {
                return Some(request.complete(Err(IoErrorKind::Gone.into())));
            }
            state.next += 1;
            state.arrived += u64::from(request.op != Op::Flush);
            let pending = Pending {
                number: state.next,
                queue: self.number,
                request,
                barrier: state.returned,
                since: state.now,
                result: None,
                cancelled: false,
            };
            state.pending.push(pending);
            None
        })
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let ended: Vec<_> = self.disk.with(|state| {
            let mine = |one: &mut (u64, u64, Completion)| one.0 == self.number;
            let ended: Vec<_> = state.done.extract_if(.., mine).collect();
            for (_, number, _) in &ended {
                state.returned += 1;
                state.returned_writes.insert(*number, state.returned);
            }
            ended
        });
        let count = ended.len();
        ended.into_iter().for_each(|(_, _, ended)| done(ended));
        count
    }

    fn state(&self) -> QueueState {
        // The world wakes its worker when a request completes.
        QueueState::of_ring(self.disk.with(|state| {
            let pending = state.pending.iter();
            let done = state.done.iter().filter(|done| done.0 == self.number);
            pending.filter(|one| one.queue == self.number).count() + done.count()
        }))
    }

    fn cancel(&mut self, tag: u64) {
        self.disk.with(|state| {
            let mine = |one: &&mut Pending| one.queue == self.number && one.request.tag == tag;
            if let Some(pending) = state.pending.iter_mut().find(mine) {
                pending.cancelled = true;
            }
        });
    }
}

impl Drop for DiskQueue {
    fn drop(&mut self) {
        let mine = self.number;
        let (pending, done) = self.disk.with(|state| {
            let pending = state.pending.extract_if(.., |one| one.queue == mine);
            let pending: Vec<_> = pending.collect();
            let done: Vec<_> = state.done.extract_if(.., |done| done.0 == mine).collect();
            (pending, done)
        });
        drop((pending, done));
    }
}
