//! Copies ranges between two files that it creates in a directory, through the file system, and
//! prints the byte counts:
//!
//! ```text
//! cargo run --release -p vnvme-volume --example file_copy -- /mnt [auto|off] [off|reflink|on]
//! {"direct":true,"reflinked":8388608,"copied":1572864,"others":0,"requests":0,"seconds":0.02}
//! ```
//!
//! `others` are bytes that were read and written instead of copied. `requests` are the requests of
//! the ring for them. The program fails when the copied data differs. The project's guest tests run
//! it on Btrfs, XFS and ext4 (`testing/harness/tests/guests/file_copy.rs`).
#![allow(clippy::indexing_slicing)] // The ranges are its own.

use dma::{Buffer, SegmentList};
use std::error::Error;
use std::path::Path;
use std::time::Instant;
use volume::{
    Completion, CopyRequest, Direct, FastPath, FileCopy, FileOptions, FileVolume, Io, Op,
    OpenQueue, Volume,
};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const MIB: u64 = 1 << 20;
/// Size of each of the two files in bytes.
const SIZE: u64 = 12 * MIB;
/// Bytes that are read or written at a time, as a controller's Copy does.
const PIECE: u64 = 256 << 10;
/// Source, destination and length in bytes: in a file system's blocks, and not in them.
const RANGES: [(u64, u64, u64); 3] = [
    (0, 0, 8 * MIB),
    (8 * MIB + 512, 8 * MIB + 512, MIB),
    (10 * MIB, 10 * MIB + 1024, MIB / 2),
];

struct File {
    volume: FileVolume,
    queue: OpenQueue,
}

impl File {
    fn make(path: &Path, direct: Direct, copy: FileCopy, io: &Io) -> Outcome<Self> {
        std::fs::File::create(path)?.set_len(SIZE)?;
        let options = FileOptions {
            direct,
            copy,
            ..FileOptions::default()
        };
        let volume = FileVolume::open(path, options)?;
        let queue = volume.open(io)?;
        Ok(Self { volume, queue })
    }

    /// A piece's data.
    fn transfer(&mut self, io: &Io, op: Op, offset: u64, data: SegmentList) -> Outcome<Vec<u8>> {
        let mut done = match self.queue.start(0, op, offset, data) {
            Some(done) => done,
            None => wait(io, &mut *self.queue)?,
        };
        done.result?;
        Ok(done.data.buffer().unwrap_or_default().to_vec())
    }

    fn read(&mut self, io: &Io, offset: u64, len: u64) -> Outcome<Vec<u8>> {
        let data = SegmentList::owned(Buffer::new(len as usize));
        self.transfer(io, Op::Read, offset, data)
    }

    fn write(&mut self, io: &Io, offset: u64, bytes: &[u8]) -> Outcome {
        let data = SegmentList::owned(Buffer::from_slice(bytes));
        let op = Op::Write { fua: false };
        self.transfer(io, op, offset, data).map(drop)
    }
}

fn wait(io: &Io, queue: &mut dyn FastPath) -> Outcome<Completion> {
    let mut done = Vec::new();
    let began = Instant::now();
    while done.is_empty() {
        io.flush();
        io.poll(&mut |completion| done.push(completion));
        queue.poll(&mut |completion| done.push(completion));
        if began.elapsed().as_secs() > 300 {
            return Err("nothing completes".into());
        }
        std::thread::yield_now();
    }
    done.pop().ok_or_else(|| "nothing".into())
}

/// Contents of the source from `offset` on, for one piece; each block of 512 bytes differs.
fn pattern(offset: u64) -> Vec<u8> {
    let words = (offset / 512..(offset + PIECE) / 512).map(|block| {
        let byte = block.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[1];
        [byte; 512]
    });
    words.collect::<Vec<_>>().concat()
}

fn main() -> Outcome {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (directory, direct, copy) = match words.as_slice() {
        [directory] => (directory, Direct::Auto, FileCopy::On),
        [directory, direct, copy] => {
            let direct = match *direct {
                "off" => Direct::Off,
                _ => Direct::Auto,
            };
            let copy = match *copy {
                "off" => FileCopy::Off,
                "reflink" => FileCopy::Reflink,
                _ => FileCopy::On,
            };
            (directory, direct, copy)
        }
        _ => return Err("usage: file_copy DIRECTORY [auto|off off|reflink|on]".into()),
    };
    let io = Io::new(Default::default());
    let directory = Path::new(directory);
    let mut from = File::make(&directory.join("source"), direct, copy, &io)?;
    let mut to = File::make(&directory.join("destination"), direct, copy, &io)?;
    for offset in (0..SIZE).step_by(PIECE as usize) {
        from.write(&io, offset, &pattern(offset))?;
    }
    let (before, began) = (io.counters().requests, Instant::now());
    let mut others = 0;
    for (source, offset, len) in RANGES {
        let range = from.queue.copy_source(source, len);
        let taken = range.is_some_and(|source| {
            to.queue.copy(CopyRequest {
                tag: 1,
                source,
                offset,
                fua: false,
            })
        });
        if taken && wait(&io, &mut *to.queue)?.result.is_ok() {
            continue;
        }
        others += len;
        for at in (0..len).step_by(PIECE as usize) {
            let bytes = from.read(&io, source + at, PIECE)?;
            to.write(&io, offset + at, &bytes)?;
        }
    }
    let (seconds, requests) = (began.elapsed().as_secs_f64(), io.counters().requests);
    // The source's next bytes are its own.
    from.write(&io, 0, &[0xee; PIECE as usize])?;
    for (source, offset, len) in RANGES {
        for at in (0..len).step_by(PIECE as usize) {
            if to.read(&io, offset + at, PIECE)? != pattern(source + at) {
                return Err(format!("other data at {}", offset + at).into());
            }
        }
    }
    let copied = to.volume.copied();
    println!(
        "{{\"direct\":{},\"reflinked\":{},\"copied\":{},\"others\":{others},\"requests\":{},\
         \"seconds\":{seconds:.4}}}",
        to.volume.is_direct(),
        copied.reflinked,
        copied.copied,
        requests - before,
    );
    Ok(())
}
