//! A vhost-user-blk export as a target: a front-end and a driver of one virtqueue, without a guest.
//!
//! Memory of this process replaces the guest's. Each I/O owns three descriptors permanently
//! (header, data, status), so that it costs one header, one entry in the available ring and, where
//! the export asks for it, one kick.

mod frontend;

use crate::job::Job;
use crate::lane::{Geometry, IoResult, Lane, Target};
use anyhow::{Context, Result, bail, ensure};
use dma::{Access, Area, DmaMap, Memory, Prot};
use driver::MemorySource;
use frontend::{Frontend, Vring};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;
use vhost_blk::kind;

const SECTOR: u64 = 512;
const PAGE: usize = 4096;
/// Size of a descriptor in bytes.
const DESCRIPTOR: usize = 16;
/// Number of descriptors for an I/O.
const EACH: u16 = 3;
/// Space in bytes for the header and status of an I/O.
const HEAD: usize = 64;
const STATUS: usize = 32;
/// Status value that no device writes.
const NO_STATUS: u32 = 0xff;

// Virtio 1.2, 2.7.5.
const DESC_NEXT: u32 = 1;
const DESC_WRITE: u32 = 2;

/// An export behind a vhost-user socket.
pub struct VirtioTarget {
    /// Front-end, taken when the single queue is opened: an export accepts one front-end at a time.
    frontend: Mutex<Option<Frontend>>,
    geometry: Geometry,
    /// Source of the memory of the queue and its data.
    memory: MemorySource,
}

impl VirtioTarget {
    /// Connects to the export at this socket.
    pub fn open(socket: &Path, job: &Job) -> Result<Self> {
        ensure!(
            job.queues == 1,
            "a vhost-user-blk export is loaded through one queue, not {}",
            job.queues
        );
        let mut frontend = Frontend::connect(socket)?;
        let sectors = frontend.capacity()?;
        Ok(Self {
            geometry: Geometry {
                size: sectors.saturating_mul(SECTOR),
                block_size: SECTOR as u32,
                description: format!("{}: vhost-user-blk", socket.display()),
            },
            frontend: Mutex::new(Some(frontend)),
            memory: job.memory.clone(),
        })
    }
}

impl Target for VirtioTarget {
    type Lane = VirtioLane;

    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn lane(&self, _index: u16, depth: u16, bytes: usize) -> Result<VirtioLane> {
        let frontend = self.frontend.lock().ok().and_then(|mut one| one.take());
        VirtioLane::start(
            frontend.context("the export has a queue already")?,
            &self.memory,
            depth,
            bytes,
        )
    }
}

/// Layout of the shared memory.
struct Layout {
    /// Number of entries in each ring.
    size: u16,
    available: usize,
    used: usize,
    heads: usize,
    data: usize,
    /// Distance in bytes from one I/O's data to the next.
    stride: usize,
    len: usize,
}

impl Layout {
    fn new(depth: u16, bytes: usize) -> Result<Self> {
        let size = depth
            .checked_mul(EACH)
            .and_then(u16::checked_next_power_of_two);
        let size = size.context("too many I/Os for a virtqueue")?;
        let entries = usize::from(size);
        let page = |at: usize| at.next_multiple_of(PAGE);
        let available = page(entries * DESCRIPTOR);
        let used = page(available + 6 + entries * 2);
        let heads = page(used + 6 + entries * 8);
        let data = page(heads + usize::from(depth) * HEAD);
        let stride = page(bytes.max(1));
        Ok(Self {
            size,
            available,
            used,
            heads,
            data,
            stride,
            len: data + usize::from(depth) * stride,
        })
    }

    fn head(&self, slot: u16) -> usize {
        self.heads + usize::from(slot) * HEAD
    }

    fn data(&self, slot: u16) -> usize {
        self.data + usize::from(slot) * self.stride
    }

    /// Returns the offset of an entry in the available ring.
    fn offered(&self, index: u16) -> usize {
        self.available + 4 + usize::from(index % self.size) * 2
    }

    /// Returns the offset of an entry in the used ring.
    fn ended(&self, index: u16) -> usize {
        self.used + 4 + usize::from(index % self.size) * 8
    }

    /// Returns the offset of `used_event` (virtio 1.2, 2.7.7).
    fn used_event(&self) -> usize {
        self.available + 4 + usize::from(self.size) * 2
    }

    /// Returns the offset of `avail_event` (virtio 1.2, 2.7.10).
    fn avail_event(&self) -> usize {
        self.used + 4 + usize::from(self.size) * 8
    }
}

/// A virtqueue, as a lane.
pub struct VirtioLane {
    _frontend: Frontend,
    layout: Layout,
    memory: Memory,
    /// Structures of the virtqueue in shared memory.
    area: Area,
    kick: OwnedFd,
    call: OwnedFd,
    depth: u16,
    /// `next`: next place in the available ring. `told`: the place that the export was last
    /// notified of. `seen`: next place in the used ring.
    next: u16,
    told: u16,
    seen: u16,
}

impl VirtioLane {
    fn start(
        mut frontend: Frontend,
        memory: &MemorySource,
        depth: u16,
        bytes: usize,
    ) -> Result<Self> {
        let layout = Layout::new(depth, bytes)?;
        let memory = memory.make(layout.len)?;
        // The memory may have been that of another queue.
        memory.write(0, &vec![0; layout.heads])?;
        let mut map = DmaMap::new();
        let all = Some((memory.clone(), 0));
        map.map(0, layout.len as u64, all, Prot::RW)?;
        let area = Area::resolve(&map, 0, layout.len, 8, Access::Write)?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (kick, call) = (event()?, event()?);
        frontend.share(&memory)?;
        frontend.start(&Vring {
            size: layout.size,
            available: layout.available as u64,
            used: layout.used as u64,
            kick: kick.as_fd(),
            call: call.as_fd(),
        })?;
        let lane = Self {
            _frontend: frontend,
            layout,
            memory,
            area,
            kick,
            call,
            depth,
            next: 0,
            told: 0,
            seen: 0,
        };
        for slot in 0..depth {
            lane.prepare(slot, bytes);
        }
        Ok(lane)
    }

    /// Writes the constant parts of a slot's descriptors and header.
    fn prepare(&self, slot: u16, bytes: usize) {
        let first = slot * EACH;
        let head = self.layout.head(slot);
        // Not more than 1 GiB.
        let len = bytes as u32;
        self.describe(first, head, 16, DESC_NEXT);
        self.describe(first + 1, self.layout.data(slot), len, DESC_NEXT);
        self.describe(first + 2, head + STATUS, 1, DESC_WRITE);
    }

    fn describe(&self, index: u16, address: usize, len: u32, flags: u32) {
        let at = usize::from(index) * DESCRIPTOR;
        self.area.store32(at, address as u32);
        self.area.store32(at + 4, (address as u64 >> 32) as u32);
        self.area.store32(at + 8, len);
        self.area
            .store32(at + 12, flags | u32::from(index + 1) << 16);
    }

    /// Requests an interrupt for the next completed I/O. Returns `false` when one has completed
    /// already.
    fn arm(&self) -> bool {
        self.area.store16(self.layout.used_event(), self.seen);
        // Before the last look: else both sides may miss each other (virtio 1.2, 2.7.7.2).
        fence(Ordering::SeqCst);
        self.area.load16_acquire(self.layout.used + 2) == self.seen
    }
}

impl Lane for VirtioLane {
    fn submit(&mut self, slot: u16, write: bool, offset: u64) -> Result<()> {
        let (area, first) = (&self.area, slot * EACH);
        let head = self.layout.head(slot);
        let (what, flags) = if write {
            (kind::OUT, DESC_NEXT)
        } else {
            (kind::IN, DESC_NEXT | DESC_WRITE)
        };
        let sector = offset / SECTOR;
        area.store32(head, what);
        area.store32(head + 8, sector as u32);
        area.store32(head + 12, (sector >> 32) as u32);
        area.store32(head + STATUS, NO_STATUS);
        let data = usize::from(first + 1) * DESCRIPTOR;
        area.store32(data + 12, flags | u32::from(first + 2) << 16);
        area.store16(self.layout.offered(self.next), first);
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    fn kick(&mut self) -> Result<()> {
        if self.next == self.told {
            return Ok(());
        }
        let told = std::mem::replace(&mut self.told, self.next);
        self.area
            .store16_release(self.layout.available + 2, self.next);
        // The store must precede the check of the export's notification setting (virtio 1.2,
        // 2.7.13.4.1).
        fence(Ordering::SeqCst);
        let event = self.area.load16(self.layout.avail_event());
        // vring_need_event: the index moved over the one that it waits for.
        if self.next.wrapping_sub(event).wrapping_sub(1) < self.next.wrapping_sub(told) {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes())?;
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        let mut count = 0;
        let ended = self.area.load16_acquire(self.layout.used + 2);
        while self.seen != ended {
            let first = self.area.load16(self.layout.ended(self.seen));
            self.seen = self.seen.wrapping_add(1);
            let slot = first / EACH;
            if slot >= self.depth || !first.is_multiple_of(EACH) {
                bail!("the export ended something that was never begun");
            }
            let status = self.area.load16(self.layout.head(slot) + STATUS) as u8;
            let outcome = match status {
                0 => Ok(()),
                status => Err(format!("status {status}")),
            };
            done(slot, outcome);
            count += 1;
        }
        Ok(count)
    }

    fn wait(&mut self, limit: Duration, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        if self.arm() {
            let limit = Timespec::try_from(limit)?;
            match poll(&mut [PollFd::new(&self.call, PollFlags::IN)], Some(&limit)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            // The eventfd may not be signalled: then there is nothing to reset.
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
        self.poll(done)
    }

    fn put(&mut self, slot: u16, data: &[u8]) {
        // A failed write is detected when the data is read back.
        let _ = self.memory.write(self.layout.data(slot), data);
    }

    fn get(&self, slot: u16, data: &mut [u8]) {
        let _ = self.memory.read(self.layout.data(slot), data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Rw;
    use crate::run;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::Arc;
    use vhost_blk::{DiskOptions, Export, Server};
    use volume::{Io, IoOptions, OpenOptions, Volume, open_url};

    fn job() -> Job {
        Job {
            rw: Rw::RandMixed,
            depth: 9,
            ios: Some(2000),
            verify: true,
            ..Job::default()
        }
    }

    /// Serves a volume while `client` is at work.
    fn with_export(url: &str, client: impl FnOnce(&Path)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let volume: Arc<dyn Volume> = open_url(url, OpenOptions::default()).unwrap();
        let server = std::thread::spawn(move || {
            let export = Export {
                volume,
                disk: DiskOptions::default(),
                listener: listener.into(),
                connects: worker::ConnectRate::UNLIMITED,
                max_in_flight: 1024,
                memory: dma::MemoryLimits::DEFAULT,
                intake: None,
                attach: None,
                resized: None,
                span: tracing::Span::none(),
            };
            let options = worker::Options {
                stop: Some(stopped.into()),
                ..worker::Options::default()
            };
            let io = Io::new(IoOptions::default());
            Server::new(export, io, options).unwrap().run().unwrap();
        });
        client(&path);
        drop(stop);
        server.join().unwrap();
    }

    #[test]
    fn virtio_target_reads_back_writes() {
        with_export("mem://32M", |path| {
            for interrupt in [false, true] {
                // Rings come round many times.
                for depth in [1, 9, 128] {
                    let job = Job {
                        interrupt,
                        depth,
                        ..job()
                    };
                    let target = VirtioTarget::open(path, &job).unwrap();
                    assert_eq!(target.geometry().size, 32 << 20);
                    let measured = run(&target, &job, &mut ()).unwrap();
                    assert_eq!(measured.read.ios + measured.write.ios, 2000);
                    assert!(measured.verified > 0);
                }
            }
        });
    }

    #[test]
    fn virtio_target_detects_lost_writes() {
        with_export("null://1M", |path| {
            let target = VirtioTarget::open(path, &job()).unwrap();
            let error = run(&target, &job(), &mut ()).unwrap_err().to_string();
            assert!(error.contains("wrong data"), "{error}");
        });
    }
}
