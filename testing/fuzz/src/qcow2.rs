//! Hostile images: for any header and tables, no data lands in metadata, written data is read back,
//! and no file beyond the image is opened.

use dma::{Buffer, SegmentList};
use qcow2::{Qcow2Options, Qcow2Volume};
use rustix::fs::{MemfdFlags, memfd_create};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};
use volume::{Completion, Direct, Io, IoOptions, Op, OpenQueue, PreviousProcess, Request, Volume};

const CLUSTER: usize = 512;
/// Clusters of the image that is changed: header, refcount table, its block, L1 table, two L2
/// tables, data.
const TABLES: usize = 6;
const CLUSTERS: usize = 24;
/// Bytes of the disk.
const DISK: u64 = 48 << 10;
const COPIED: u64 = 1 << 63;
/// Byte of written data; the tables contain no such run of it.
const MARK: u8 = 0xa5;
/// For a request, however busy the machine is.
const TIMEOUT: Duration = Duration::from_secs(15);

/// A good image: of its clusters some are allocated, zeroes, or compressed.
fn image() -> Vec<u8> {
    let mut image = vec![0; CLUSTERS * CLUSTER];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = image.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(0, b"QFI\xfb\0\0\0\x03");
    put(20, &9u32.to_be_bytes());
    put(24, &DISK.to_be_bytes());
    put(36, &2u32.to_be_bytes());
    put(40, &(3 * CLUSTER as u64).to_be_bytes());
    put(48, &(CLUSTER as u64).to_be_bytes());
    put(56, &1u32.to_be_bytes());
    put(96, &4u32.to_be_bytes());
    put(100, &104u32.to_be_bytes());
    put(CLUSTER, &(2 * CLUSTER as u64).to_be_bytes());
    for cluster in 0..CLUSTERS - 4 {
        put(2 * CLUSTER + cluster * 2, &[0, 1]);
    }
    for table in 0..2u64 {
        let entry = ((4 + table) * CLUSTER as u64) | COPIED;
        put(3 * CLUSTER + table as usize * 8, &entry.to_be_bytes());
    }
    for cluster in TABLES..CLUSTERS - 6 {
        let entry = (cluster * CLUSTER) as u64 | COPIED;
        let at = (cluster - TABLES) * 24;
        put(4 * CLUSTER + at, &entry.to_be_bytes());
        put(cluster * CLUSTER, &[cluster as u8; CLUSTER]);
    }
    put(4 * CLUSTER + 8, &1u64.to_be_bytes());
    // Raw deflate, one stored block.
    let compressed = 1u64 << 62 | 1 << 61 | (18 * CLUSTER as u64);
    put(5 * CLUSTER, &compressed.to_be_bytes());
    put(18 * CLUSTER, &[1, 0, 2, 0xff, 0xfd]);
    put(18 * CLUSTER + 5, &[7; CLUSTER]);
    image
}

thread_local! {
    /// `None`: there is no io_uring here.
    static IO: Option<Io> = {
        let io = Io::new(IoOptions { capacity: 64, ..IoOptions::default() });
        io.make_ring().is_ok().then_some(io)
    };
}

/// The first byte of the input chooses how the image is opened; then come places, lengths and bytes
/// that are put there.
pub fn qcow2(input: &[u8]) {
    let Some((&how, mut input)) = input.split_first() else {
        return;
    };
    let mut bytes = image();
    while let [high, low, len, rest @ ..] = input {
        let at = usize::from(u16::from_be_bytes([*high, *low])) % bytes.len();
        let len = (usize::from(*len) % 9).min(rest.len());
        let (value, rest) = rest.split_at(len);
        let end = (at + len).min(bytes.len());
        if let Some(place) = bytes.get_mut(at..end) {
            place.copy_from_slice(&value[..place.len()]);
        }
        input = rest;
    }
    let fd = memfd_create("image", MemfdFlags::CLOEXEC).unwrap();
    let file = std::fs::File::from(fd);
    file.write_all_at(&bytes, 0).unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let options = Qcow2Options {
        read_only: how & 1 == 1,
        direct: Direct::Off,
        // The kernel may have a file of the ring until the ring's owner, which is this thread,
        // enters it again: then the second opening is refused.
        previous: PreviousProcess {
            limit: Duration::from_secs(3),
            ..PreviousProcess::default()
        },
        ..Qcow2Options::default()
    };
    let Ok(volume) = Qcow2Volume::open(Path::new(&path), &options) else {
        return;
    };
    let size = volume.info().size;
    let mut some = Buffer::new(4096);
    for at in (0..size.min(64 << 10)).step_by(4096) {
        let _ = volume.read_at(at, &mut some);
    }
    IO.with(|io| {
        if let Some(io) = io
            && let Ok(mut queue) = volume.open(io)
        {
            work(io, &mut queue, size, options.read_only);
            drop(queue);
            // The queue's requests in the ring still hold the file and its lock, as in a worker.
            let begun = Instant::now();
            while io.in_flight() > 0 {
                io.flush();
                io.poll(&mut |_| ());
                assert!(begun.elapsed() < TIMEOUT, "{} stay", io.in_flight());
            }
        }
    });
    drop(volume);
    let mut header = [0; CLUSTER];
    file.read_exact_at(&mut header, 0).unwrap();
    let place = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().unwrap());
    for table in [0, place(40), place(48)] {
        // A damaged image may name a place that no file has.
        if i64::try_from(table).is_err() {
            continue;
        }
        let mut cluster = [0; CLUSTER];
        let read = file.read_at(&mut cluster, table).unwrap();
        assert!(
            read < CLUSTER || cluster != [MARK; CLUSTER],
            "data in a table"
        );
    }
    if options.read_only {
        let mut after = vec![0; bytes.len()];
        file.read_exact_at(&mut after, 0).unwrap();
        assert!(after == bytes, "a read-only image was written");
    } else {
        // Whatever it is now, it is opened or refused.
        drop(Qcow2Volume::open(Path::new(&path), &options));
    }
}

/// Executes some requests, and checks their results.
fn work(io: &Io, queue: &mut OpenQueue, size: u64, read_only: bool) {
    for at in [0, 512, 1024, 12 << 10, 32 << 10, 40 << 10]
        .into_iter()
        .filter(|at| at + 1024 <= size)
    {
        let data = SegmentList::owned(Buffer::from_slice(&[MARK; 1024]));
        let written = run(io, queue, Op::Write { fua: false }, at, 1024, data);
        assert!(!read_only || written.result.is_err());
        let data = SegmentList::owned(Buffer::new(1024));
        let read = run(io, queue, Op::Read, at, 1024, data);
        if written.result.is_ok() && read.result.is_ok() {
            // Two entries may lead to one cluster; then the second part is on top of the first.
            assert!(read.data.equals(512, &[MARK; 512]), "it was not written");
        }
    }
    for op in [
        Op::WriteZeroes {
            deallocate: false,
            fua: false,
        },
        Op::Deallocate,
        Op::Flush,
    ] {
        let len = if op == Op::Flush {
            0
        } else {
            size.min(16 << 10) & !511
        };
        let _ = run(io, queue, op, 0, len, SegmentList::new()).result;
    }
}

fn run(
    io: &Io,
    queue: &mut OpenQueue,
    op: Op,
    offset: u64,
    len: u64,
    data: SegmentList,
) -> Completion {
    let request = Request {
        tag: 1,
        op,
        offset,
        len,
        data,
    };
    let begun = Instant::now();
    let mut done = queue.submit(request);
    loop {
        if let Some(done) = done {
            return done;
        }
        io.flush();
        io.poll(&mut |completion| done = Some(completion));
        queue.poll(&mut |completion| done = Some(completion));
        assert!(
            begun.elapsed() < TIMEOUT,
            "{op:?} at {offset} does not end: {} in the ring, {:?}",
            io.in_flight(),
            queue.state()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::qcow2;
    use crate::chance::Chance;

    /// Fields of the tables, changed here and there, most of them by entries that look right.
    #[test]
    fn mutated_images_cause_no_panic() {
        let mut chance = Chance::new();
        let mut below = |bound: usize| chance.next() as usize % bound;
        for _ in 0..4000 {
            let mut input = vec![below(4) as u8];
            for _ in 0..1 + below(4) {
                let at = match below(3) {
                    0 => below(112),
                    1 => 512 + below(4) * 8,
                    _ => (1024 + below(5 * 512)) & !7,
                };
                let entry = (below(30) * 512) as u64 | [0, 1 << 63, 1, 1 << 62][below(4)];
                let value = match below(3) {
                    0 => vec![below(256) as u8],
                    _ => entry.to_be_bytes().to_vec(),
                };
                input.extend((at as u16).to_be_bytes());
                input.push(value.len() as u8);
                input.extend(value);
            }
            qcow2(&input);
        }
    }
}
