//! A queue's thread: requests of the kernel become requests of the volume, completions go back.

use crate::stats::QueueStats;
use crate::sys::{Arrival, QueueRing};
use crate::uapi::{self, IoDesc};
use dma::SegmentList;
use std::io;
use std::time::{Duration, Instant};
use volume::{Completion, Io, IoError, IoErrorKind, Op, PinnedMemory, Request, VolumeQueue};
use worker::{IdleWindow, Pace};

/// How long to sleep between two looks at the last flush.
const PAUSE: Duration = Duration::from_micros(100);

/// A tag that no request of the kernel's has.
const FLUSH_TAG: u64 = u64::MAX;

/// One queue, on its own thread.
pub(crate) struct Queue<'a> {
    pub ring: QueueRing,
    /// The volume's queue goes before the ring that it is on.
    pub volume: Box<dyn VolumeQueue>,
    pub io: Io,
    /// The tags' buffers, pinned for the ring's requests.
    _pinned: Option<PinnedMemory>,
    pub stats: &'a QueueStats,
    tags: Vec<Tag>,
    /// Tags that have requests, or may get some.
    live: usize,
    done: Vec<Completion>,
}

/// What a tag's request is, while the volume works on it.
#[derive(Default)]
struct Tag {
    op: u8,
    len: u32,
    /// Recycled.
    data: SegmentList,
}

impl<'a> Queue<'a> {
    pub(crate) fn new(
        ring: QueueRing,
        volume: Box<dyn VolumeQueue>,
        io: Io,
        pinned: Option<PinnedMemory>,
        depth: u16,
        stats: &'a QueueStats,
    ) -> Self {
        let mut tags = Vec::new();
        tags.resize_with(depth.into(), Tag::default);
        Self {
            ring,
            volume,
            io,
            _pinned: pinned,
            stats,
            tags,
            live: usize::from(depth),
            done: Vec::with_capacity(depth.into()),
        }
    }

    /// Asks for the first requests.
    pub(crate) fn fetch(&mut self) -> io::Result<()> {
        for tag in 0..self.tags.len() {
            self.ring.fetch(tag as u16)?;
        }
        self.ring.submit()
    }

    /// Serves until the device is stopped: the kernel ends all tags then.
    pub(crate) fn run(&mut self, idle_window: IdleWindow) -> io::Result<()> {
        let mut pace = Pace::new(idle_window, Instant::now());
        while self.live > 0 {
            let now = Instant::now();
            let mut worked = false;
            while let Some(arrival) = self.ring.next() {
                worked = true;
                if let Arrival::Tag(tag, result) = arrival {
                    self.arrived(tag, result)?;
                }
            }
            self.io.flush();
            let done = &mut self.done;
            self.io.poll(&mut |completion| done.push(completion));
            self.volume.poll(&mut |completion| done.push(completion));
            worked |= !self.done.is_empty();
            let mut done = std::mem::take(&mut self.done);
            for completion in done.drain(..) {
                self.complete(completion)?;
            }
            self.done = done;
            if worked {
                pace.worked(now);
            }
            if worked || self.volume.polled_in_flight() > 0 || pace.polls(now) {
                // Also where nothing is to be sent: the kernel may have requests that it delivers only in a call.
                self.ring.submit()?;
                std::hint::spin_loop();
            } else if self.io.arm() {
                self.sleep()?;
                pace.slept();
            }
        }
        Ok(())
    }

    fn sleep(&mut self) -> io::Result<()> {
        // Of one volume's completions come either through the ring or otherwise.
        if let Some(event) = self.io.event_fd().or_else(|| self.io.others_fd()) {
            self.ring.watch(event)?;
        }
        self.stats.sleeps.add(1);
        let limit = self.volume.next_deadline();
        self.ring
            .sleep(limit.map(|limit| limit.saturating_duration_since(Instant::now())))
    }

    /// A fetch command is over: there is a request, or there will never be one again.
    fn arrived(&mut self, tag: u16, result: i32) -> io::Result<()> {
        if result != uapi::RES_OK {
            if result != -libc::ENODEV {
                let error = io::Error::from_raw_os_error(-result);
                tracing::warn!(tag, %error, "ublk: a request could not be fetched");
            }
            self.live -= 1;
            return Ok(());
        }
        let started = match self.ring.descriptor(tag) {
            Some(descriptor) => self.start(tag, descriptor),
            None => Some(Err(IoErrorKind::Invalid.into())),
        };
        match started {
            Some(result) => self.commit(tag, result),
            None => Ok(()),
        }
    }

    /// Starts a request; the result, if it is over at once.
    fn start(&mut self, tag: u16, descriptor: IoDesc) -> Option<Result<(), IoError>> {
        let op = descriptor.op_flags as u8;
        let has = |flag| descriptor.op_flags & flag != 0;
        let fua = has(uapi::IO_F_FUA);
        let operation = match op {
            uapi::OP_READ => Op::Read,
            uapi::OP_WRITE => Op::Write { fua },
            uapi::OP_FLUSH => Op::Flush,
            uapi::OP_DISCARD => Op::Deallocate,
            uapi::OP_WRITE_ZEROES => Op::WriteZeroes {
                deallocate: !has(uapi::IO_F_NOUNMAP),
                fua,
            },
            _ => return Some(Err(IoErrorKind::Unsupported.into())),
        };
        let slot = self.tags.get_mut(usize::from(tag))?;
        (slot.op, slot.len) = (op, 0);
        let mut request = Request {
            tag: tag.into(),
            op: operation,
            offset: 0,
            len: 0,
            data: std::mem::take(&mut slot.data),
        };
        request.data.clear();
        if operation != Op::Flush {
            request.len = u64::from(descriptor.nr_sectors) * 512;
            let Some(offset) = descriptor.start_sector.checked_mul(512) else {
                return Some(Err(IoErrorKind::OutOfRange.into()));
            };
            request.offset = offset;
        }
        if operation.has_data() {
            slot.len = request.len as u32;
            if !self.ring.data(tag, request.len, &mut request.data) {
                return Some(Err(IoErrorKind::Invalid.into()));
            }
        }
        let completion = self.volume.submit(request)?;
        slot.data = completion.data;
        Some(completion.result)
    }

    fn complete(&mut self, completion: Completion) -> io::Result<()> {
        let tag = completion.tag as u16;
        if let Some(slot) = self.tags.get_mut(usize::from(tag)) {
            slot.data = completion.data;
        }
        self.commit(tag, completion.result)
    }

    fn commit(&mut self, tag: u16, result: Result<(), IoError>) -> io::Result<()> {
        let Some(slot) = self.tags.get_mut(usize::from(tag)) else {
            return Ok(());
        };
        // Recycled, but not holding what it held.
        slot.data.clear();
        let result = match result {
            Ok(()) => {
                let bytes = u64::from(slot.len);
                match slot.op {
                    uapi::OP_READ => {
                        self.stats.reads.add(1);
                        self.stats.bytes_read.add(bytes);
                    }
                    uapi::OP_WRITE => {
                        self.stats.writes.add(1);
                        self.stats.bytes_written.add(bytes);
                    }
                    uapi::OP_FLUSH => self.stats.flushes.add(1),
                    _ => self.stats.discards.add(1),
                }
                i32::try_from(slot.len).unwrap_or(i32::MAX)
            }
            Err(error) => {
                self.stats.errors.add(1);
                tracing::debug!(tag, op = slot.op, %error, "ublk: a request failed");
                -errno(error)
            }
        };
        self.ring.commit(tag, result)
    }

    /// Makes everything durable, when all requests are over.
    pub(crate) fn flush(&mut self) -> Result<(), IoError> {
        let mut over = self.volume.submit(Request {
            tag: FLUSH_TAG,
            op: Op::Flush,
            offset: 0,
            len: 0,
            data: SegmentList::new(),
        });
        while over.is_none() {
            // After an error of the ring, others may end still.
            let mut look = |completion: Completion| {
                if completion.tag == FLUSH_TAG {
                    over = Some(completion);
                }
            };
            self.io.flush();
            self.io.poll(&mut look);
            self.volume.poll(&mut look);
            if over.is_none() {
                std::thread::sleep(PAUSE);
            }
        }
        over.map_or(Ok(()), |completion| completion.result)
    }
}

/// What the block layer is told: it knows a handful of reasons (`blk_errors` in `block/blk-core.c`).
fn errno(error: IoError) -> i32 {
    match error.kind {
        IoErrorKind::NoSpace => libc::ENOSPC,
        IoErrorKind::Unsupported => libc::EOPNOTSUPP,
        IoErrorKind::Busy => libc::EAGAIN,
        IoErrorKind::MediaRead => libc::ENODATA,
        _ => libc::EIO,
    }
}
