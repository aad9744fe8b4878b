//! Requests of a vhost-user-blk export, for counting their instructions:
//! `vnvme-export VOLUME read|write REQUESTS`.
//!
//! Driver, worker and export are on one thread, so that the count is the same each time. The driver
//! makes 32 requests available at once and waits until all have ended. The suite `cost` of
//! `vnvme-bench` counts the instructions of function `step`, one round of the worker. Sockets are
//! read outside of it.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A measurement fails by a panic.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, anyhow, bail};
use load::job::Job;
use load::lane::{Lane, Target};
use load::virtio::{VirtioLane, VirtioTarget};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::rc::Rc;
use vhost_blk::{Backend, DiskOptions, Export};
use volume::{Io, IoOptions, OpenOptions, open_url};
use worker::{Frontend, Handle, Options, Worker};

const DEPTH: u16 = 32;
const BLOCK: u64 = 4096;
/// Number of blocks that the requests address, visited by a stride.
const BLOCKS: u64 = 4096;
const STRIDE: u64 = 1021;
/// epoll tokens of an export's listening socket and of its client's.
const SOCKETS: [u32; 2] = [0, 1];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [volume, direction, requests] = arguments.as_slice() else {
        bail!("usage: vnvme-export VOLUME read|write REQUESTS");
    };
    let is_write = match direction.as_str() {
        "read" => false,
        "write" => true,
        other => bail!("{other}: expected read or write"),
    };
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("export.sock");
    let listener = UnixListener::bind(&socket)?;
    listener.set_nonblocking(true)?;
    let export = Export {
        volume: open_url(volume, OpenOptions::default())?,
        disk: DiskOptions::default(),
        max_in_flight: 1024,
        memory: dma::MemoryLimits::DEFAULT,
        listener: listener.into(),
        connects: worker::ConnectRate::UNLIMITED,
        intake: None,
        attach: None,
        resized: None,
        span: tracing::Span::none(),
    };
    let handle = Handle::new()?;
    let io = Rc::new(Io::new(IoOptions::default()));
    let mut worker = Worker::new(io, &handle, Options::default())?;
    let owner = worker.add(|context| Backend::new(export, context))?;
    let owner = owner.context("no front-end")?;
    let mut lane = connect(&mut worker, owner, &socket)?;
    let mut block = 0;
    for _ in 0..requests.parse::<u64>()? / u64::from(DEPTH) {
        for slot in 0..DEPTH {
            block = (block + STRIDE) % BLOCKS;
            lane.submit(slot, is_write, block * BLOCK)?;
        }
        lane.kick()?;
        let (mut ended, mut failed) = (0, None);
        while ended < usize::from(DEPTH) {
            step(&mut worker);
            ended += lane.poll(&mut |_, result| failed = failed.take().or(result.err()))?;
        }
        if let Some(failed) = failed {
            bail!("a request failed: {failed}");
        }
    }
    Ok(())
}

/// Runs one round of the worker.
#[inline(never)]
fn step(worker: &mut Worker<Backend>) {
    worker.step();
}

/// Starts a queue of the export. The front-end waits for answers on a thread of its own.
fn connect(worker: &mut Worker<Backend>, owner: u16, socket: &Path) -> Result<VirtioLane> {
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let job = Job {
                depth: DEPTH,
                ..Job::default()
            };
            VirtioTarget::open(socket, &job)?.lane(0, DEPTH, BLOCK as usize)
        });
        while !client.is_finished() {
            if let Some(backend) = worker.front_mut(owner) {
                SOCKETS.into_iter().for_each(|token| backend.ready(token));
            }
            worker.step();
            std::thread::yield_now();
        }
        client
            .join()
            .map_err(|_| anyhow!("the front-end has panicked"))?
    })
}
