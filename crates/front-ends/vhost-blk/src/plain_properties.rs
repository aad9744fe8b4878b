//! Properties of the fast path: it does what the general path does, and survives any ring.

use crate::disk::{Disk, DiskOptions};
use crate::inflight::Inflight;
use crate::ring::{Ring, RingAddress, flag};
use crate::run::{Run, RunOptions, untag};
use crate::stats::Stats;
use crate::virtio::{feature, kind};
use dma::{DmaMap, Memory, Prot, SegmentList, View};
use probes::IoKind;
use proptest::collection::vec;
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::Waker;
use volume::{
    Budget, Completion, FastPath, Info, Io, IoError, IoOptions, MemVolume, Op, OpenQueue,
    QueueState, Request, Volume, VolumeError, VolumeQueue,
};

const SIZE: u16 = 256;
/// Descriptors of a request's own, and requests in a ring.
const EACH: u16 = 4;
const SLOTS: usize = (SIZE / EACH) as usize;
/// Layout: the parts of the ring, then a page for each request's header, table and status, then its
/// data.
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADS: u64 = 0x4000;
const DATA: u64 = 0x4_4000;
const DATA_BYTES: u64 = 0x3000;
/// End of the first window of guest memory. The second one follows it, in another memory.
const SPLIT: u64 = DATA + DATA_BYTES * SLOTS as u64;
const SECOND: u64 = 0x4000;
/// Size in bytes of the volume.
const VOLUME: u64 = 64 << 10;
const UNTOUCHED: u8 = 0xee;

/// Guest memory with a ring, the device's side of it, and a volume.
struct Side {
    memories: [Memory; 2],
    map: DmaMap,
    disk: Disk,
    volume: Arc<dyn Volume>,
    io: Rc<Io>,
    stats: Arc<Stats>,
    inflight: Inflight,
    run: Run,
    offered: u16,
    /// Bytes of which each slot's data has a part at first.
    pattern: Vec<u8>,
}

/// Everything that a guest, an operator or the next back-end may see of a side.
#[derive(Debug, PartialEq)]
struct Visible {
    memories: [Vec<u8>; 2],
    volume: Vec<u8>,
    /// Heads of the requests that the next back-end would begin again.
    resumed: Vec<u16>,
    next: u16,
    is_broken: bool,
    counters: Vec<u64>,
}

fn bytes(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

impl Side {
    /// A device whose volume completes requests at once. Without `fast`, the general path serves
    /// all of them.
    fn new(volume: Arc<dyn Volume>, fast: bool) -> Side {
        let memories = [SPLIT, SECOND].map(|len| Memory::anonymous(len as usize).unwrap());
        let mut map = DmaMap::new();
        for (at, memory) in [0, SPLIT].into_iter().zip(&memories) {
            let len = memory.len() as u64;
            map.map(at, len, Some((memory.clone(), 0)), Prot::RW)
                .unwrap();
        }
        let io = Rc::new(Io::new(IoOptions::default()));
        let options = DiskOptions::default();
        let stats = Stats::new(1, tracing::Span::none(), Arc::default());
        let stats = Arc::new(stats);
        let options = (&options, &stats, Waker::noop());
        let mut disk = Disk::open(volume.clone(), io.clone(), 3, 1024, options).unwrap();
        disk.negotiated(feature::FLUSH | feature::DISCARD | feature::WRITE_ZEROES);
        assert!(disk.is_immediate());
        if !fast {
            disk.use_general_path();
        }
        let at = RingAddress {
            descriptors: 0,
            available: AVAILABLE,
            used: USED,
        };
        let ring = Ring::resolve(&map, at, SIZE, true).unwrap();
        let inflight = Inflight::new(1, SIZE).unwrap();
        let options = RunOptions {
            index: 0,
            size: SIZE,
            event_idx: true,
            indirect: true,
            next: 0,
            tracker: inflight.tracker(0, SIZE),
        };
        let run = Run::new(options, ring, &stats);
        Side {
            memories,
            map,
            disk,
            volume,
            io,
            stats,
            inflight,
            run,
            offered: 0,
            pattern: (0..DATA_BYTES + SLOTS as u64).map(|i| i as u8).collect(),
        }
    }

    fn with_memory_volume(fast: bool) -> Side {
        let side = Side::new(Arc::new(MemVolume::new(VOLUME).unwrap()), fast);
        let pattern: Vec<u8> = (0..VOLUME).map(|i| (i / 512 * 7 + i) as u8).collect();
        let memory = Memory::anonymous(VOLUME as usize).unwrap();
        memory.write(0, &pattern).unwrap();
        side.transfer(Op::Write { fua: false }, &memory);
        side
    }

    /// Reads or writes the whole volume, beside the ring.
    fn transfer(&self, op: Op, memory: &Memory) {
        let mut map = DmaMap::new();
        map.map(0, VOLUME, Some((memory.clone(), 0)), Prot::RW)
            .unwrap();
        let access = match op {
            Op::Read => dma::Access::Write,
            _ => dma::Access::Read,
        };
        let mut data = SegmentList::new();
        map.segments(0, VOLUME, access, &mut data).unwrap();
        let mut queue = self.volume.open(&self.io).unwrap();
        let done = queue.submit(Request::transfer(0, op, 0, data)).unwrap();
        done.result.unwrap();
    }

    fn poke(&self, at: u64, bytes: &[u8]) {
        self.map.write(at, bytes).unwrap();
    }

    fn describe(&self, table: u64, index: u16, (addr, len): (u64, u32), flags: u16, next: u16) {
        let high = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        let at = table + u64::from(index) * 16;
        self.poke(at, &addr.to_le_bytes());
        self.poke(at + 8, &high.to_le_bytes());
    }

    fn offer(&mut self, head: u16) {
        let at = AVAILABLE + 4 + u64::from(self.offered % SIZE) * 2;
        self.poke(at, &head.to_le_bytes());
        self.offered = self.offered.wrapping_add(1);
    }

    fn show(&self, index: u16) {
        self.poke(AVAILABLE + 2, &index.to_le_bytes());
    }

    /// Prepares a request in a slot, and puts its head into the available ring.
    fn ask(&mut self, slot: usize, asked: &Asked) {
        let head_at = HEADS + slot as u64 * 0x1000;
        let data_at = DATA + slot as u64 * DATA_BYTES;
        let header_at = head_at + u64::from(asked.shift);
        let mut header = asked.kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(asked.sector.to_le_bytes());
        self.poke(header_at, &header);
        let status_at = match asked.status {
            Place::Own => head_at + 64,
            Place::Outside => u64::MAX - 7,
            Place::Border => SPLIT + 1 + slot as u64,
        };
        if asked.status == Place::Own {
            self.poke(status_at, &[UNTOUCHED]);
        }
        self.poke(data_at, &self.pattern[slot..slot + DATA_BYTES as usize]);
        let data = match asked.data {
            Place::Own => data_at,
            Place::Outside => SPLIT + SECOND,
            Place::Border => SPLIT - 512,
        };
        let write = if asked.kind == kind::OUT {
            0
        } else {
            flag::WRITE
        };
        let mut buffers = vec![(header_at, asked.header_len, 0)];
        if asked.halves {
            let half = asked.len / 2;
            buffers.push((data, half, write));
            buffers.push((data + u64::from(half), asked.len - half, write));
        } else {
            buffers.push((data, asked.len, write));
        }
        buffers.push((status_at, asked.status_len, flag::WRITE));
        let head = slot as u16 * EACH;
        let (table, first) = if asked.indirect {
            (head_at + 0x200, 0)
        } else {
            (0, head)
        };
        for (i, (addr, len, flags)) in buffers.iter().enumerate() {
            let (index, last) = (first + i as u16, i + 1 == buffers.len());
            let flags = flags | if last { 0 } else { flag::NEXT };
            self.describe(table, index, (*addr, *len), flags, index + 1);
        }
        if asked.indirect {
            let bytes = buffers.len() as u32 * 16;
            self.describe(0, head, (table, bytes), flag::INDIRECT, 0);
        }
        if let Some((index, word, value)) = asked.noise {
            let at = table + u64::from(first + index) * 16 + u64::from(word);
            self.poke(at, &value.to_le_bytes());
        }
        self.offer(head);
    }

    /// Serves until nothing waits. `units`: the budget of a round.
    fn serve(&mut self, units: u32) {
        for _ in 0..10_000 {
            let stats = self.stats.clone();
            let queue = &stats.queues[0];
            let mut budget = Budget::new(units);
            let mut worked = self
                .run
                .fetch(&mut self.disk, &self.map, queue, &mut budget);
            let mut done = Vec::new();
            self.disk.poll(&mut done);
            for completion in done {
                worked = true;
                self.disk.completed();
                let (_, slot) = untag(completion.tag);
                self.run
                    .complete(slot, completion, &mut self.disk, &self.map, queue);
            }
            self.run.publish(None, queue);
            if !worked {
                return;
            }
        }
        panic!("the queue never ends");
    }

    fn visible(&self) -> Visible {
        let volume = Memory::anonymous(VOLUME as usize).unwrap();
        self.transfer(Op::Read, &volume);
        let queue = &self.stats.queues[0];
        let mut counters = vec![queue.requests.get(), queue.io.all_failures()];
        counters.extend(IoKind::ALL.map(|kind| queue.io.operations(kind).get()));
        counters.extend([queue.io.bytes_read().get(), queue.io.bytes_written().get()]);
        // Numbers of measured latencies.
        counters.extend(IoKind::ALL.map(|kind| {
            let steps = queue.io.latency(kind).into_iter();
            steps
                .flat_map(|steps| steps.counts())
                .map(|(_, n)| n)
                .sum::<u64>()
        }));
        Visible {
            memories: self.memories.each_ref().map(bytes),
            volume: bytes(&volume),
            resumed: self.resumed(),
            next: self.run.next(),
            is_broken: self.run.is_broken(),
            counters,
        }
    }

    /// Returns the heads of the requests that the next back-end would begin again.
    fn resumed(&self) -> Vec<u16> {
        let mut tracker = self.inflight.tracker(0, SIZE).unwrap();
        tracker.recover(self.used_idx())
    }

    fn used_idx(&self) -> u16 {
        let mut index = [0; 2];
        self.map.read(USED + 2, &mut index).unwrap();
        u16::from_le_bytes(index)
    }

    fn byte(&self, at: u64) -> u8 {
        let mut byte = [0];
        self.map.read(at, &mut byte).unwrap();
        byte[0]
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Own,
    Outside,
    /// Across the border of two windows, or just behind it.
    Border,
}

/// A request of the guest, mostly a usual one.
#[derive(Clone, Debug)]
struct Asked {
    kind: u32,
    sector: u64,
    len: u32,
    header_len: u32,
    /// Offset of the header from its aligned place.
    shift: u8,
    data: Place,
    status: Place,
    status_len: u32,
    halves: bool,
    indirect: bool,
    /// Another value for a part of a descriptor.
    noise: Option<(u16, u8, u16)>,
}

fn place() -> impl Strategy<Value = Place> {
    prop_oneof![12 => Just(Place::Own), 1 => Just(Place::Outside), 1 => Just(Place::Border)]
}

fn asked() -> impl Strategy<Value = Asked> {
    let kinds = prop_oneof![
        8 => Just(kind::IN),
        8 => Just(kind::OUT),
        1 => Just(kind::FLUSH),
        1 => Just(kind::GET_ID),
        1 => any::<u32>()
    ];
    let sector = prop_oneof![12 => 0u64..112, 1 => 112u64..140, 1 => any::<u64>()];
    let len = prop_oneof![12 => (1u32..=16).prop_map(|n| n * 512), 1 => 0u32..2000];
    let header_len = prop_oneof![16 => Just(16u32), 1 => 0u32..40];
    let shift = prop_oneof![12 => Just(0u8), 1 => 0u8..16];
    let status_len = prop_oneof![16 => Just(1u32), 1 => 0u32..3];
    let noise = prop_oneof![
        16 => Just(None),
        1 => (0u16..4, prop_oneof![Just(12u8), Just(14)], any::<u16>()).prop_map(Some)
    ];
    let rare = || prop_oneof![12 => Just(false), 1 => Just(true)];
    let places = (place(), place());
    (
        kinds,
        sector,
        len,
        (header_len, shift, status_len),
        places,
        rare(),
        any::<bool>(),
        noise,
    )
        .prop_map(
            |(kind, sector, len, lens, (data, status), halves, indirect, noise)| Asked {
                kind,
                sector,
                len,
                header_len: lens.0,
                shift: lens.1,
                data,
                status,
                status_len: lens.2,
                halves,
                indirect,
                noise,
            },
        )
}

fn read(sector: u64) -> Asked {
    Asked {
        kind: kind::IN,
        sector,
        len: 512,
        header_len: 16,
        shift: 0,
        data: Place::Own,
        status: Place::Own,
        status_len: 1,
        halves: false,
        indirect: false,
        noise: None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, max_shrink_iters: 100, ..ProptestConfig::default() })]

    /// Both paths leave the same guest memory (data, statuses, used ring), volume, record of
    /// outstanding requests, and counters.
    #[test]
    fn fast_path_equals_general_path(
        rounds in vec(vec(asked(), 1..SLOTS), 1..4),
        units in prop_oneof![Just(1000u32), 1u32..20],
    ) {
        let mut sides = [true, false].map(Side::with_memory_volume);
        for side in &mut sides {
            for round in &rounds {
                for (slot, asked) in round.iter().enumerate() {
                    side.ask(slot, asked);
                }
                side.show(side.offered);
                side.serve(units);
            }
        }
        let [fast, general] = sides.each_ref().map(Side::visible);
        prop_assert_eq!(fast, general);
    }

    /// Any content of the ring, changed between rounds, leads to no more used entries than heads,
    /// and to an end.
    #[test]
    fn fast_path_survives_hostile_ring(
        descriptors in vec((
            prop_oneof![3 => HEADS..SPLIT + SECOND, 2 => 0..USED + 0x1000, 1 => any::<u64>()],
            prop_oneof![6 => Just(16u32), 6 => Just(1), 6 => Just(512), 2 => Just(48), 1 => any::<u32>()],
            prop_oneof![
                6 => Just(flag::NEXT), 4 => Just(flag::NEXT | flag::WRITE), 6 => Just(flag::WRITE),
                2 => Just(flag::INDIRECT), 1 => any::<u16>()
            ],
            prop_oneof![9 => 0..16u16, 1 => any::<u16>()],
        ), 16),
        heads in vec(prop_oneof![20 => 0..16u16, 1 => any::<u16>()], 1..120),
        jump in prop_oneof![3 => Just(0u16), 1 => any::<u16>()],
    ) {
        let mut side = Side::with_memory_volume(true);
        for (index, (addr, len, flags, next)) in (0..).zip(&descriptors) {
            side.describe(0, index, (*addr, *len), *flags, *next);
        }
        let before = side.offered;
        for head in &heads {
            side.offer(*head);
        }
        side.show(side.offered.wrapping_add(jump));
        let stats = side.stats.clone();
        let queue = &stats.queues[0];
        for _ in 0..200 {
            side.run.fetch(&mut side.disk, &side.map, queue, &mut Budget::new(100));
            side.run.publish(None, queue);
        }
        // Requests may overwrite the ring itself; the device's own indices stay in step.
        let fetched = side.run.next().wrapping_sub(before);
        prop_assert_eq!(queue.requests.get() as u16, fetched);
        prop_assert_eq!(side.run.in_flight(), 0);
    }
}

type Hook = Box<dyn FnMut(u64, View<'_>) -> Option<Result<(), IoError>> + Send>;

/// A volume without bytes. A closure is called with the offset and the memory of each request that
/// could be executed at once.
struct Hooked(Arc<Mutex<Hook>>);

impl std::fmt::Debug for Hooked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hooked")
    }
}

impl Volume for Hooked {
    fn info(&self) -> Info {
        MemVolume::new(VOLUME).unwrap().info()
    }

    fn open(&self, _: &Io) -> Result<OpenQueue, VolumeError> {
        let hook = self.0.clone();
        let held = Vec::new();
        Ok(OpenQueue::with_fast_path(HookedQueue { hook, held }))
    }

    fn id(&self) -> Vec<u8> {
        Vec::new()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }
}

/// Offset of requests that a [`HookedQueue`] never completes.
const HELD: u64 = 32 << 10;

struct HookedQueue {
    hook: Arc<Mutex<Hook>>,
    held: Vec<Request>,
}

impl VolumeQueue for HookedQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if request.offset == HELD {
            self.held.push(request);
            return None;
        }
        Some(request.complete(Ok(())))
    }

    fn poll(&mut self, _: &mut dyn FnMut(Completion)) -> usize {
        0
    }

    fn state(&self) -> QueueState {
        QueueState::IDLE
    }

    fn cancel(&mut self, _: u64) {}
}

impl FastPath for HookedQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.submit(Request::transfer(tag, op, offset, data))
    }

    fn push(&mut self) {}

    fn is_immediate(&self) -> bool {
        true
    }

    fn try_now(&mut self, _: Op, offset: u64, data: View<'_>) -> Option<Result<(), IoError>> {
        (self.hook.lock().unwrap())(offset, data)
    }

    fn prefetches(&self) -> bool {
        false
    }

    fn prefetch(&mut self, _: Op, _: u64, _: u64) {}
}

/// A side whose volume calls `hook` with the side's first memory, the offset and the data.
fn hooked(
    mut hook: impl FnMut(&Memory, u64, View<'_>) -> Option<Result<(), IoError>> + Send + 'static,
) -> Side {
    let at: Arc<Mutex<Hook>> = Arc::new(Mutex::new(Box::new(|_, _| None)));
    let mut side = Side::new(Arc::new(Hooked(at.clone())), true);
    let memory = side.memories[0].clone();
    // The first request, whose latency is measured, takes the general path.
    side.ask(SLOTS - 1, &read(0));
    side.show(1);
    side.serve(1000);
    assert_eq!(side.used_idx(), 1);
    *at.lock().unwrap() = Box::new(move |offset, data| hook(&memory, offset, data));
    side
}

#[test]
fn descriptors_changed_after_copy_have_no_effect() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let mut side = hooked(move |memory, offset, data| {
        noted
            .lock()
            .unwrap()
            .push((offset, data.segments()[0].as_ptr().addr()));
        // All descriptors of all requests now lead outside of memory, and the used ring too.
        for index in 0..usize::from(SIZE) {
            memory.write(index * 16, &[0xff; 8]).unwrap();
        }
        Some(Ok(()))
    });
    for slot in 0..4 {
        side.ask(slot, &read(slot as u64 * 8));
    }
    side.show(5);
    side.serve(1000);
    let start = side.memories[0].segment(0, 1).unwrap().as_ptr().addr();
    let wanted: Vec<(u64, usize)> = (0..4)
        .map(|slot| {
            let at = (DATA + slot * DATA_BYTES) as usize;
            (slot * 8 * 512, start + at)
        })
        .collect();
    assert_eq!(*seen.lock().unwrap(), wanted);
    for slot in 0..4 {
        assert_eq!(side.byte(HEADS + slot * 0x1000 + 64), 0, "status of {slot}");
    }
}

#[test]
fn header_is_read_once() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let mut side = hooked(move |memory, offset, _| {
        noted.lock().unwrap().push(offset);
        // The sector of this request and of all others is now beyond the end of any volume.
        for slot in 0..12 {
            let header = HEADS as usize + slot * 0x1000;
            memory.write(header + 8, &[0xff; 8]).unwrap();
        }
        Some(Ok(()))
    });
    for slot in 0..12 {
        side.ask(slot, &read(slot as u64 * 8));
    }
    side.show(13);
    side.serve(1000);
    // The headers of a group were copied before its first request was executed.
    let group: Vec<u64> = (0..8).map(|slot| slot * 8 * 512).collect();
    assert_eq!(*seen.lock().unwrap(), group);
    for slot in 0..12 {
        let status = side.byte(HEADS + slot * 0x1000 + 64);
        // The others fail by their own headers.
        assert_eq!(status, u8::from(slot >= 8), "status of {slot}");
    }
}

#[test]
fn used_index_is_published_before_last_request_is_executed() {
    for (waiting, each) in [(4, 1), (60, 7)] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = seen.clone();
        let mut side = hooked(move |memory, _, _| {
            let mut index = [0; 2];
            memory.read(USED as usize + 2, &mut index).unwrap();
            noted.lock().unwrap().push(u16::from_le_bytes(index));
            Some(Ok(()))
        });
        for slot in 0..waiting {
            side.ask(slot, &read(0));
        }
        side.show(1 + waiting as u16);
        side.serve(1000);
        let wanted: Vec<u16> = (0..waiting as u16).map(|i| 1 + i / each * each).collect();
        assert_eq!(*seen.lock().unwrap(), wanted, "{waiting} waiting");
        assert_eq!(side.used_idx(), 1 + waiting as u16);
    }
}

#[test]
fn request_that_volume_cannot_complete_at_once_takes_general_path() {
    let mut side = hooked(|_, offset, _| (offset != 8 * 512).then_some(Ok(())));
    for slot in 0..4 {
        side.ask(slot, &read(slot as u64 * 8));
    }
    side.show(5);
    side.serve(1000);
    assert_eq!(side.used_idx(), 5);
    let statuses = [0, 1, 2, 3].map(|slot| side.byte(HEADS + slot * 0x1000 + 64));
    assert_eq!(statuses, [0; 4]);
    let queue = &side.stats.queues[0];
    assert_eq!(queue.requests.get(), 5);
    assert_eq!(queue.io.operations(IoKind::Read).get(), 5);
}

#[test]
fn error_of_volume_becomes_status() {
    let unsupported = IoError::from(volume::IoErrorKind::Unsupported);
    let media = IoError::from(volume::IoErrorKind::MediaRead);
    let mut side = hooked(move |_, offset, _| {
        Some(match offset {
            0 => Ok(()),
            4096 => Err(unsupported),
            _ => Err(media),
        })
    });
    for slot in 0..3 {
        side.ask(slot, &read(slot as u64 * 8));
    }
    side.show(4);
    side.serve(1000);
    let statuses = [0, 1, 2].map(|slot| side.byte(HEADS + slot * 0x1000 + 64));
    assert_eq!(statuses, [0, 2, 1]);
    let queue = &side.stats.queues[0];
    assert_eq!(
        (queue.io.all_failures(), queue.io.bytes_read().get()),
        (2, 1024)
    );
}

/// Plain requests are not recorded as outstanding. Wherever the process dies among them, the next
/// back-end begins the others again that the guest has not seen end, and fetches from the first
/// plain one on that the guest has not seen end.
#[test]
fn death_in_fast_path_loses_no_request() {
    let points = [
        "vhost-blk.plain.answered",
        "vhost-blk.plain.written",
        "vhost-blk.plain.chained",
        "vhost-blk.plain.batched",
        "vhost-blk.used.published",
        "vhost-blk.inflight.settled",
    ];
    /// Offset of a request that the volume completes at once, but not in the fast path.
    const LATER: u64 = 48 << 10;
    for point in points {
        for count in 1..=20 {
            let mut side = hooked(|_, offset, _| (offset < HELD).then_some(Ok(())));
            // The first request ended in the last batch with a record; it is now outstanding.
            side.ask(SLOTS - 1, &read(HELD / 512));
            side.ask(SLOTS - 2, &read(LATER / 512));
            for slot in 0..20 {
                side.ask(slot, &read(slot as u64));
            }
            side.show(23);
            crash::arm(point, count);
            let served = catch_unwind(AssertUnwindSafe(|| side.serve(1000)));
            crash::disarm();
            let used = side.used_idx();
            let mut wanted = vec![(SLOTS - 1) as u16 * EACH, (SLOTS - 2) as u16 * EACH];
            wanted.truncate(if used < 2 { 2 } else { 1 });
            assert_eq!(side.resumed(), wanted, "{point}, {count}");
            if served.is_ok() {
                assert_eq!(used, 22, "{point}, {count}");
            }
            let ended = (0..20).filter(|slot| side.byte(HEADS + slot * 0x1000 + 64) == 0);
            assert!(ended.count() + 2 >= used.into(), "{point}, {count}");
        }
    }
}
