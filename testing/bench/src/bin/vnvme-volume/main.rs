//! Requests of volumes, and of the NVMe/TCP target, for counting their instructions:
//! `vnvme-volume VOLUME read|write REQUESTS DIRECTORY`.
//!
//! VOLUME is a kind of qcow2 image, `nbd`, `rbd` or `nvme-tcp` ([`Kind`]). Images are made in
//! DIRECTORY. Client and server are on one thread and take turns, so that the count is the same in
//! each run. The suite `cost` of `vnvme-bench` counts the instructions of function `client_step`,
//! one round of a worker's volume queue, or of function `target_step`, one round of the worker that
//! serves the target. Waiting is outside of both.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A measurement fails by a panic.
#![allow(clippy::indexing_slicing)]
#![forbid(unsafe_code)]

#[allow(dead_code, missing_docs)]
#[path = "../../../../../crates/volumes/qcow2/src/testing.rs"]
mod images;
mod nbd_server;
mod tcp_target;

use anyhow::{Context, Result, bail, ensure};
use dma::{Access, DmaMap, Memory, Prot, SegmentList};
use fabrics_target::Association;
use images::EmptyImage;
use nbd_server::NbdServer;
use remote::{RemoteKind, volume_kinds};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tcp_target::TcpTarget;
use volume::{Completion, Io, IoOptions, Op, OpenOptions, OpenQueue, Registry, Volume};
use worker::Worker;

const BLOCK: usize = 4096;
/// Size in bytes of a cluster of an image.
const CLUSTER: u64 = 64 << 10;
/// Number of blocks between one request and the next, modulo the number of blocks.
const STRIDE: u64 = 1021;
/// Number of requests before those that are counted.
const WARM_UP: u64 = 64;
/// Time limit of a sleep while connections are made, of which the client's ring learns nothing.
const MOMENT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};
/// Time limit of a sleep until requests end.
const LONG: Timespec = Timespec {
    tv_sec: 60,
    tv_nsec: 0,
};
/// Upper bound of a wait, which only a hang reaches.
const BOUND: Duration = Duration::from_secs(60);

/// Kind of volume whose requests are counted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// qcow2 image that has a cluster for each request.
    Allocated,
    /// qcow2 image without clusters: reads return zeroes, and each write is a cluster's first.
    Unallocated,
    /// qcow2 image without clusters over a raw file full of data: reads are of that file, and each
    /// write copies the rest of its cluster.
    Backing,
    /// Export of an NBD server.
    Nbd,
    /// Image of a Ceph cluster, in a library that takes librbd's place (`librbd.c`): the variable
    /// `VNVME_LIBRBD` names its directory.
    Rbd,
    /// Namespace of this project's NVMe/TCP target.
    NvmeTcp,
}

impl Kind {
    fn parse(word: &str) -> Result<Self> {
        Ok(match word {
            "allocated" => Self::Allocated,
            "unallocated" => Self::Unallocated,
            "backing" => Self::Backing,
            "nbd" => Self::Nbd,
            "rbd" => Self::Rbd,
            "nvme-tcp" => Self::NvmeTcp,
            other => {
                bail!("{other}: expected allocated, unallocated, backing, nbd, rbd or nvme-tcp")
            }
        })
    }

    /// Returns the number of requests that are made together. A disk completes those of an image
    /// in any order, and together or not, which costs more or less. A server on this thread has
    /// them all before it answers.
    const fn depth(self) -> u64 {
        match self {
            Self::Nbd | Self::NvmeTcp => 8,
            _ => 1,
        }
    }

    /// Returns the size of the volume in bytes. A first write takes as long as a disk flushes, and
    /// the backing file has to be written.
    const fn size(self) -> u64 {
        match self {
            Self::Allocated => 8 << 20,
            Self::Backing => 32 << 20,
            _ => 64 << 20,
        }
    }

    /// Returns the block of a request.
    fn block(self, request: u64, is_write: bool) -> u64 {
        let is_first_write = is_write && matches!(self, Self::Unallocated | Self::Backing);
        if is_first_write {
            request * CLUSTER / BLOCK as u64
        } else {
            request * STRIDE % (self.size() / BLOCK as u64)
        }
    }
}

/// Server of a volume, on the client's thread.
enum Server {
    /// The kernel or a library, on threads of their own.
    Other,
    Nbd(NbdServer),
    NvmeTcp(Box<TcpTarget>),
}

impl Server {
    /// Takes new connections, and answers requests.
    fn attend(&mut self) -> Result<()> {
        match self {
            Self::Other => Ok(()),
            Self::Nbd(server) => server.turn(),
            Self::NvmeTcp(target) => target.attend(),
        }
    }

    /// Answers all requests that have arrived.
    fn turn(&mut self) -> Result<()> {
        match self {
            Self::Other => Ok(()),
            Self::Nbd(server) => server.turn(),
            Self::NvmeTcp(target) => {
                while target_step(&mut target.worker) {}
                Ok(())
            }
        }
    }
}

/// A queue of the volume, with the memory of its requests.
struct Client {
    queue: OpenQueue,
    io: Io,
    /// Requests to start in the next round: tag, operation, and offset in bytes.
    pending: Vec<(u64, Op, u64)>,
    lists: Vec<Option<SegmentList>>,
    ended: u64,
    failed: Option<String>,
    _map: DmaMap,
}

impl Client {
    fn new(volume: &dyn Volume, depth: u64) -> Result<Self> {
        let io = Io::new(IoOptions::default());
        let queue = volume.open(&io)?;
        let len = depth as usize * BLOCK;
        let memory = Memory::anonymous(len)?;
        memory.write(0, &vec![0x5a; len])?;
        let mut map = DmaMap::new();
        map.map(0, len as u64, Some((memory, 0)), Prot::RW)?;
        let lists = (0..depth).map(|slot| {
            let mut list = SegmentList::new();
            let at = slot * BLOCK as u64;
            let is_taken = list.begin_piece(&map, at, BLOCK as u64, Access::Write);
            ensure!(is_taken, "no memory for request {slot}");
            Ok(Some(list))
        });
        Ok(Self {
            queue,
            io,
            pending: Vec::with_capacity(depth as usize),
            lists: lists.collect::<Result<_>>()?,
            ended: 0,
            failed: None,
            _map: map,
        })
    }

    /// Starts the pending requests, and takes completions, as a round of a worker does.
    #[inline(always)]
    fn round(&mut self) {
        let mut done = |completion: Completion| {
            self.ended += 1;
            if let Err(error) = completion.result {
                self.failed = Some(error.to_string());
            }
            self.lists[completion.tag as usize] = Some(completion.data);
        };
        self.io.poll(&mut done);
        self.queue.poll(&mut done);
        let started = !self.pending.is_empty();
        for (tag, op, offset) in self.pending.drain(..) {
            // The first taker of a slot's list is the last one that has put it back.
            let Some(list) = self.lists[tag as usize].take() else {
                continue;
            };
            if let Some(completion) = self.queue.start(tag, op, offset, list) {
                self.ended += 1;
                self.lists[tag as usize] = Some(completion.data);
                if let Err(error) = completion.result {
                    self.failed = Some(error.to_string());
                }
            }
        }
        if started {
            self.queue.push();
        }
        self.io.flush();
    }

    /// Sleeps until there are completions to take, or for `limit`. The kernel's threads may need
    /// this thread's processor.
    fn wait(&self, limit: Timespec) -> Result<()> {
        if self.io.has_news() || !self.io.arm() {
            return Ok(());
        }
        let fds = [self.io.event_fd(), self.io.others_fd()];
        let fds = fds.iter().flatten();
        let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        poll(&mut fds, Some(&limit))?;
        Ok(())
    }
}

/// Runs one round of the client. The suite `cost` counts the instructions below it.
#[inline(never)]
fn client_step(client: &mut Client) {
    client.round();
}

/// Runs one round of the target's worker. The suite `cost` counts the instructions below it.
#[inline(never)]
fn target_step(worker: &mut Worker<Association>) -> bool {
    worker.step()
}

/// Requests to run: `op` on the blocks that `block` returns for their numbers.
struct Requests<B> {
    op: Op,
    block: B,
    numbers: Range<u64>,
    /// Number of requests that are made together.
    depth: u64,
}

impl<B: Fn(u64) -> u64> Requests<B> {
    /// Runs the requests. Only those with `is_counted` go through the counted functions; the others
    /// also wait for connections.
    fn run(self, client: &mut Client, server: &mut Server, is_counted: bool) -> Result<()> {
        let mut next = self.numbers.start;
        while next < self.numbers.end {
            let batch = self.depth.min(self.numbers.end - next);
            for slot in 0..batch {
                let offset = (self.block)(next + slot) * BLOCK as u64;
                client.pending.push((slot, self.op, offset));
            }
            next += batch;
            client.ended = 0;
            let began = Instant::now();
            if is_counted {
                client_step(client);
            }
            while client.ended < batch {
                ensure!(began.elapsed() < BOUND, "no completion within {BOUND:?}");
                if is_counted {
                    server.turn()?;
                    client.wait(LONG)?;
                    client_step(client);
                } else {
                    client.round();
                    server.attend()?;
                    if client.ended < batch {
                        client.wait(MOMENT)?;
                    }
                }
            }
            if let Some(failed) = client.failed.take() {
                bail!("a request failed: {failed}");
            }
        }
        Ok(())
    }
}

/// Writes a file full of data.
fn full(path: &Path, size: u64) -> Result<()> {
    let mut file = std::fs::File::create(path)?;
    for _ in 0..size >> 20 {
        file.write_all(&[0xa5; 1 << 20])?;
    }
    Ok(file.sync_all()?)
}

/// Makes the volume of a kind, and starts its server. Returns the volume's URL.
fn make(kind: Kind, dir: &Path) -> Result<(String, Server)> {
    let image = dir.join("disk.qcow2");
    let backing = (kind == Kind::Backing).then_some(("base.raw", "raw"));
    match kind {
        Kind::Nbd => {
            let (url, server) = NbdServer::start(&dir.join("nbd.sock"), kind.size())?;
            return Ok((url, Server::Nbd(server)));
        }
        Kind::NvmeTcp => {
            let (url, target) = TcpTarget::start(kind.size())?;
            return Ok((url, Server::NvmeTcp(Box::new(target))));
        }
        Kind::Rbd => return Ok(("rbd://pool/image?lock=off".into(), Server::Other)),
        Kind::Backing => full(&dir.join("base.raw"), kind.size())?,
        Kind::Allocated | Kind::Unallocated => {}
    }
    let empty = EmptyImage {
        size: kind.size(),
        backing,
        ..EmptyImage::default()
    };
    empty.image(&image);
    std::fs::File::open(&image)?.sync_all()?;
    let url = format!("qcow2://{}?backing={}", image.display(), dir.display());
    Ok((url, Server::Other))
}

/// Opens a volume, whose server answers meanwhile.
fn open(url: &str, server: &mut Server) -> Result<Arc<dyn Volume>> {
    let protocols: [&'static dyn RemoteKind; 3] = [&nbd::Nbd, &fabrics::NvmeTcp, &rbd::Rbd];
    let remote = protocols
        .into_iter()
        .flat_map(|kind| volume_kinds(kind, |_| {}, None));
    let formats = Registry::<()>::new().with_format(qcow2::kind());
    let kinds = remote.fold(formats, Registry::with);
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| kinds.open(url, OpenOptions::default()));
        while !opening.is_finished() {
            server.attend()?;
            std::thread::yield_now();
        }
        let opened = opening.join().ok().context("opening has panicked")?;
        Ok(opened.with_context(|| url.to_owned())?.volume)
    })
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, direction, requests, dir] = arguments.as_slice() else {
        bail!("usage: vnvme-volume VOLUME read|write REQUESTS DIRECTORY");
    };
    let write = Op::Write { fua: false };
    let (kind, requests) = (Kind::parse(kind)?, requests.parse::<u64>()?);
    let op = match direction.as_str() {
        "read" => Op::Read,
        "write" => write,
        other => bail!("{other}: expected read or write"),
    };
    let dir = Path::new(dir).canonicalize()?;
    let (url, mut server) = make(kind, &dir)?;
    let volume = open(&url, &mut server)?;
    let depth = kind.depth();
    let mut client = Client::new(&*volume, depth)?;
    if kind == Kind::Allocated {
        let clusters = Requests {
            op: write,
            block: |cluster| cluster * CLUSTER / BLOCK as u64,
            numbers: 0..kind.size() / CLUSTER,
            depth,
        };
        clusters.run(&mut client, &mut server, false)?;
    }
    let block = |request| kind.block(request, op == write);
    let last = WARM_UP + requests;
    ensure!(
        block(last) * (BLOCK as u64) < kind.size(),
        "too many requests"
    );
    for (numbers, is_counted) in [(0..WARM_UP, false), (WARM_UP..last, true)] {
        let requests = Requests {
            op,
            block,
            numbers,
            depth,
        };
        requests.run(&mut client, &mut server, is_counted)?;
    }
    Ok(())
}
