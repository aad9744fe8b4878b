//! A block device of the kernel's, used past its page cache by several
//! threads, each with a part of it.

use crate::Outcome;
use crate::pattern::{Model, Random};
use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom, fallocate, fsync, open, seek};
use rustix::io::{pread, pwrite};
use std::time::Instant;

const BLOCK: u64 = 512;
const THREADS: u64 = 4;
/// Bytes of a request, at most.
const MAX_REQUEST_BYTES: u64 = 256 << 10;

/// Loads the device, and returns its expected contents.
pub fn run(device: &str, end: Instant) -> Outcome<Vec<u8>> {
    let file = open(device, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let blocks = seek(&file, SeekFrom::End(0))? / BLOCK;
    let share = blocks / THREADS;
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..THREADS)
            .map(|i| {
                let last = i + 1 == THREADS;
                let blocks = if last { blocks - i * share } else { share };
                scope.spawn(move || load(device, i * share, blocks, end).map_err(|e| e.to_string()))
            })
            .collect();
        let mut all = Vec::new();
        for part in parts {
            all.extend(part.join().map_err(|_| "a thread panicked")??);
        }
        Ok(all)
    })
}

/// Memory for a request; its data begin at a page, as O_DIRECT wants it.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn new() -> Buffer {
        let bytes = vec![0u8; MAX_REQUEST_BYTES as usize + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        Buffer { bytes, start }
    }

    fn slice(&mut self, len: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + len]
    }
}

fn load(device: &str, first: u64, blocks: u64, end: Instant) -> Outcome<Vec<u8>> {
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let file = open(device, flags, Mode::empty())?;
    let mut random = Random(first + 5);
    let mut model = Model::new(first, blocks, BLOCK as u32);
    let mut buffer = Buffer::new();
    // From a known state.
    fallocate(
        &file,
        FallocateFlags::ZERO_RANGE,
        first * BLOCK,
        blocks * BLOCK,
    )?;
    let mut requests = 0u64;
    let read = |model: &Model, buffer: &mut Buffer, lba: u64, count: u64| -> Outcome {
        let bytes = buffer.slice((count * BLOCK) as usize);
        let got = pread(&file, &mut *bytes, lba * BLOCK)? as u64;
        crate::ensure(
            got == count * BLOCK,
            format!("{got} bytes read at block {lba}"),
        )?;
        model.check(lba, bytes)
    };
    while Instant::now() < end {
        requests += 1;
        let most = [16, MAX_REQUEST_BYTES / BLOCK][usize::from(random.below(8) == 0)];
        let count = 1 + random.below(most);
        let lba = first + random.below(blocks - count + 1);
        match random.below(64) {
            0 => fsync(&file)?,
            1 => {
                fallocate(
                    &file,
                    FallocateFlags::ZERO_RANGE,
                    lba * BLOCK,
                    count * BLOCK,
                )?;
                model.zero(lba, count);
            }
            2 => {
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                match fallocate(&file, punch, lba * BLOCK, count * BLOCK) {
                    Ok(()) => model.zero(lba, count),
                    Err(rustix::io::Errno::OPNOTSUPP) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            3..=33 => {
                let bytes = buffer.slice((count * BLOCK) as usize);
                bytes.copy_from_slice(&model.write(lba, count));
                let put = pwrite(&file, bytes, lba * BLOCK)? as u64;
                crate::ensure(
                    put == count * BLOCK,
                    format!("{put} bytes written at {lba}"),
                )?;
            }
            _ => read(&model, &mut buffer, lba, count)?,
        }
    }
    let mut lba = first;
    while lba < first + blocks {
        let count = (MAX_REQUEST_BYTES / BLOCK).min(first + blocks - lba);
        read(&model, &mut buffer, lba, count)?;
        lba += count;
    }
    fsync(&file)?;
    println!("{requests} requests from block {first} on");
    Ok(model.expected(first, blocks))
}
