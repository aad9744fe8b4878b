//! The good neighbour: a guest with harmless I/O, by the project's own driver.
//!
//! A neighbour reads at random, reads a register again and again, and writes data that must be
//! kept. It prints its counts to standard output, a line each [`PERIOD`]. It is a process of its
//! own, which can be killed at any time.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use driver::transport::Transport;
use driver::vfio_user::VfioUser;
use driver::{Device, DmaBuffer, Op, Options, QueueOptions, QueuePair, Request};

use super::client::nvme::REG_CSTS;
use super::test_daemon::{self, GOOD_FILE_NSID, GOOD_MEMORY_NSID, MEMORY_NSID, VOLUME_SIZE};

/// Interval of its output lines.
pub(super) const PERIOD: Duration = Duration::from_millis(50);
/// Name of the thread that reads.
pub(super) const READER: &str = "reader";
/// Reads in flight.
const DEPTH: u32 = 32;
const BLOCK: u64 = 4096;
const SECTORS: u32 = 8;
/// Blocks that are written in turn.
pub(super) const KEPT: u64 = 512;
/// Time-out of a request: it waits as long as needed; its process has an end.
const FOREVER: Duration = Duration::from_secs(600);

/// A line of its output.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NeighbourSample {
    /// Reads completed so far.
    pub(super) reads: u64,
    /// The longest register read since the last line, in microseconds; one that is not answered
    /// yet counts as long as it has taken so far.
    pub(super) longest: u64,
    /// Writes that are durable: all before this one.
    pub(super) kept: u64,
}

impl NeighbourSample {
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("seen ")?.split_whitespace();
        let mut next = || words.next()?.parse().ok();
        Some(Self {
            reads: next()?,
            longest: next()?,
            kept: next()?,
        })
    }
}

fn open(socket: &Path) -> Result<(Device, Arc<VfioUser>)> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match VfioUser::connect(socket, FOREVER) {
            Ok(transport) => {
                let options = Options {
                    command_timeout: FOREVER,
                    admin_timeout: FOREVER,
                    status_interval: FOREVER,
                    ..Options::default()
                };
                return Ok((Device::open(transport.clone(), options)?, transport));
            }
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Reads at random, for ever; counts.
fn read(device: &Device, nsid: u32, reads: &AtomicU64) -> Result<()> {
    let options = QueueOptions {
        depth: DEPTH,
        poll_window: Duration::ZERO,
        ..QueueOptions::default()
    };
    let mut queue = device.queue(nsid, options)?;
    let mut idle = (0..DEPTH)
        .map(|_| device.allocate(BLOCK as usize))
        .collect::<Result<Vec<_>, _>>()?;
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    loop {
        while let Some(buffer) = idle.pop() {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let block = (state >> 33) % (VOLUME_SIZE / BLOCK);
            let lba = block * u64::from(SECTORS);
            queue.submit_read(lba, SECTORS, buffer, 0)?;
        }
        queue.ring();
        let mut failed = None;
        let count = queue.wait(Duration::from_secs(1), |completion| {
            failed = completion.result.err();
            idle.extend(completion.buffer);
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        reads.fetch_add(count as u64, Ordering::Relaxed);
    }
}

/// Executes a request from beginning to end.
fn execute(
    queue: &mut QueuePair,
    op: Op,
    lba: u64,
    blocks: u64,
    buffer: Option<DmaBuffer>,
) -> Result<Option<DmaBuffer>> {
    let completion = queue.execute(Request {
        op,
        lba,
        blocks,
        buffer,
        user_data: 0,
    });
    let completion = completion.map_err(|refused| refused.why)?;
    completion.result?;
    Ok(completion.buffer)
}

/// Returns the contents of block `number % KEPT` after write `number`.
pub(super) fn content(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK as usize / 8)
}

/// Writes numbers that are durable when they are counted: by Flush, or by FUA.
fn keep(device: &Device, kept: &AtomicU64) -> Result<()> {
    let mut queue = device.queue(GOOD_FILE_NSID, QueueOptions::default())?;
    let mut buffer = device.allocate(BLOCK as usize)?;
    for number in 1.. {
        let fua = number % 2 == 0;
        buffer.write(0, &content(number))?;
        let lba = number % KEPT * u64::from(SECTORS);
        let write = Op::Write { fua };
        let blocks = u64::from(SECTORS);
        let done = execute(&mut queue, write, lba, blocks, Some(buffer))?;
        buffer = done.context("the buffer is gone")?;
        if !fua {
            execute(&mut queue, Op::Flush, 0, 0, None)?;
        }
        kept.store(number, Ordering::Release);
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Returns the first durable write with wrong contents in its block.
pub(super) fn first_lost(dir: &Path, kept: u64) -> Result<Option<u64>> {
    let bytes = std::fs::read(test_daemon::good_file(dir))?;
    for number in kept.saturating_sub(KEPT - 1).max(1)..=kept {
        let at = (number % KEPT * BLOCK) as usize;
        let block = bytes.get(at..at + BLOCK as usize).context("a short file")?;
        // A later write may be there, whole.
        let found = u64::from_le_bytes(block[..8].try_into()?);
        if found < number || found % KEPT != number % KEPT || block != content(found) {
            return Ok(Some(number));
        }
    }
    Ok(None)
}

/// The neighbour's process.
pub(super) fn good(dir: &Path) -> Result<()> {
    let (device, transport) = open(&test_daemon::good_socket(dir))?;
    let (reads, kept) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let spawn = |name: &str, work: Box<dyn FnOnce() -> Result<()> + Send>| {
        let thread = std::thread::Builder::new().name(name.into());
        thread.spawn(move || {
            if let Err(error) = work() {
                println!("failed {error:#}");
            }
        })
    };
    let (device_of, reads_of) = (device.clone(), reads.clone());
    spawn(
        READER,
        Box::new(move || read(&device_of, GOOD_MEMORY_NSID, &reads_of)),
    )?;
    let kept_of = kept.clone();
    spawn("keeps", Box::new(move || keep(&device, &kept_of)))?;
    // When the present register read began, in microseconds from the start, and the longest.
    let start = Instant::now();
    let (began, longest) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (began_of, longest_of) = (began.clone(), longest.clone());
    let registers = move || {
        loop {
            let before = start.elapsed().as_micros() as u64;
            began_of.store(before, Ordering::Relaxed);
            transport.read32(REG_CSTS)?;
            began_of.store(u64::MAX, Ordering::Relaxed);
            let took = start.elapsed().as_micros() as u64 - before;
            longest_of.fetch_max(took, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    spawn("registers", Box::new(registers))?;
    loop {
        std::thread::sleep(PERIOD);
        let now = start.elapsed().as_micros() as u64;
        let waiting = now.saturating_sub(began.load(Ordering::Relaxed));
        let longest = longest.swap(0, Ordering::Relaxed).max(waiting);
        let reads = reads.load(Ordering::Relaxed);
        println!("seen {reads} {longest} {}", kept.load(Ordering::Acquire));
    }
}

/// Writes the disk in memory once where the other client will be, so that all of it is there.
pub(super) fn fill(dir: &Path) -> Result<()> {
    let (device, _) = open(&test_daemon::bad_socket(dir))?;
    let mut queue = device.queue(MEMORY_NSID, QueueOptions::default())?;
    let mut buffer = device.allocate(1 << 20)?;
    let blocks = (1u64 << 20) / 512;
    for piece in 0..VOLUME_SIZE >> 20 {
        let op = Op::Write { fua: false };
        let done = execute(&mut queue, op, piece * blocks, blocks, Some(buffer))?;
        buffer = done.context("the buffer is gone")?;
    }
    Ok(())
}
