//! Requests that block in the call that submits them. Their memory makes them block: its pages are
//! missing until a thread of the test provides them (`userfaultfd`).
#![allow(unsafe_code)]

use super::super::job::Abilities;
use super::super::ring::{Alignment, RingFile};
use super::*;
use crate::MemVolume;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

const PAGE: usize = 4096;
const PAGES: usize = 8;
/// Delay of a page that is provided automatically: the file is not trusted for many times as long.
const DELAY: Duration = Duration::from_millis(200);
/// Delay of a page that is provided on request.
const NEVER: Duration = Duration::from_secs(20);

// From `linux/userfaultfd.h`.
const UFFD_API: u64 = 0xaa;
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_ZEROPAGE: u64 = 0xc020_aa04;
const MODE_MISSING: u64 = 1;

/// Time at which the requested page is provided.
enum Come {
    Later,
    WhenCalled,
}

/// Memory with pages that arrive late.
struct LateMemory {
    memory: Memory,
    next: usize,
    orders: Sender<Come>,
    call: Sender<()>,
    /// Whether each page arrived as it should: not because the request for it was missing.
    came: Receiver<bool>,
    thread: Option<JoinHandle<()>>,
}

fn ioctl(fd: &OwnedFd, request: u64, words: &mut [u64]) -> io::Result<()> {
    // SAFETY: the words are the structure of the request; its fields are all 64 bits wide.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, words.as_mut_ptr()) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

impl LateMemory {
    fn new() -> io::Result<Self> {
        let memory = Memory::anonymous(PAGES * PAGE).map_err(io::Error::other)?;
        // SAFETY: it takes flags and gives a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor has no owner yet.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        ioctl(&fd, UFFDIO_API, &mut [UFFD_API, 0, 0])?;
        let start = memory.segment(0, PAGE).map_or(0, |s| s.as_ptr().addr());
        let range = [start as u64, (PAGES * PAGE) as u64];
        ioctl(
            &fd,
            UFFDIO_REGISTER,
            &mut [range[0], range[1], MODE_MISSING, 0],
        )?;
        let (orders, ordered) = channel();
        let (call, called) = channel();
        let (tell, came) = channel();
        let thread = std::thread::spawn(move || {
            for order in ordered {
                let mut message = [0u64; 4];
                let bytes: &mut [u8] = bytes_of(&mut message);
                rustix::io::read(&fd, bytes).unwrap();
                let in_time = match order {
                    Come::Later => {
                        std::thread::sleep(DELAY);
                        true
                    }
                    Come::WhenCalled => called.recv_timeout(NEVER).is_ok(),
                };
                let page = message[2] & !(PAGE as u64 - 1);
                ioctl(&fd, UFFDIO_ZEROPAGE, &mut [page, PAGE as u64, 0, 0]).unwrap();
                tell.send(in_time).unwrap();
            }
        });
        Ok(Self {
            memory,
            next: 0,
            orders,
            call,
            came,
            thread: Some(thread),
        })
    }

    /// Returns the memory of the next page.
    fn page(&mut self, come: Come) -> SegmentList {
        self.orders.send(come).unwrap();
        self.next += 1;
        self.memory
            .segments((self.next - 1) * PAGE, PAGE)
            .expect("a page")
    }
}

impl Drop for LateMemory {
    fn drop(&mut self) {
        drop(std::mem::replace(&mut self.orders, channel().0));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn bytes_of(words: &mut [u64; 4]) -> &mut [u8] {
    // SAFETY: plain integers, seen as their bytes, for as long as they are borrowed.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of::<[u64; 4]>()) }
}

/// Creates a file with all blocks allocated, or returns why there is none that is of use here.
fn direct(directory: &tempfile::TempDir) -> io::Result<RingFile> {
    let path = directory.path().join("direct.raw");
    std::fs::write(&path, [7; PAGES * PAGE])?;
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let file = options.custom_flags(libc::O_DIRECT).open(&path)?;
    file.sync_all()?;
    Ok(RingFile {
        fd: Arc::new(OwnedFd::from(file).into()),
        direct: Some(Alignment {
            memory: 4096,
            block: 4096,
        }),
        abilities: Arc::new(Abilities::new(true, true)),
        lane: None,
    })
}

fn finish(io: &Io, tag: u64) {
    let (began, mut came) = (Instant::now(), Vec::new());
    while came.is_empty() {
        assert!(began.elapsed() < BOUND, "nothing comes");
        io.flush();
        io.poll(&mut |completion| came.push((completion.tag, completion.result)));
    }
    assert_eq!(came, [(tag, Ok(()))]);
}

/// Writes a page that is provided on request, and requests it once the call that submitted the
/// write has returned.
fn worker_goes_on(io: &Io, file: usize, late: &mut LateMemory, tag: u64) {
    let ring = io.ring().unwrap();
    let volume = MemVolume::new(1 << 20).unwrap();
    let mut memory = volume.open(io).unwrap();
    let data = late.page(Come::WhenCalled);
    assert!(
        ring.transfer(file, tag, Op::Write { fua: false }, 0, data)
            .is_none()
    );
    io.flush();
    // Another volume of the worker has its turn while that request hangs.
    let data = SegmentList::owned(Buffer::new(PAGE));
    let answer = memory.try_now(Op::Read, 0, data.view());
    assert_eq!(answer, Some(Ok(())));
    late.call.send(()).unwrap();
    finish(io, tag);
    assert!(late.came.recv().unwrap(), "the worker waited for the page");
}

#[test]
fn file_blocks_worker_once() {
    for mode in [Mode::Deferred, Mode::Cooperative, Mode::Plain] {
        let (Some(io), Some(mut late), Some(file)) = made(mode) else {
            return;
        };
        let ring = io.ring().unwrap();
        let file = ring.open(file);
        // The first write of an opened file has more to do, and the kernel gives it to a thread by
        // itself.
        let data = SegmentList::owned(Buffer::new(PAGE));
        let write = Op::Write { fua: false };
        assert!(ring.transfer(file, 0, write, 0, data).is_none());
        finish(&io, 0);
        let data = late.page(Come::Later);
        assert!(
            ring.transfer(file, 1, Op::Write { fua: false }, 0, data)
                .is_none()
        );
        io.flush();
        finish(&io, 1);
        assert!(late.came.recv().unwrap());
        for tag in 2..5 {
            worker_goes_on(&io, file, &mut late, tag);
        }
        ring.close(file);
    }
}

#[test]
fn kernel_thread_request_uses_no_pinned_buffer() {
    let directory = tempfile::tempdir().unwrap();
    let (io, _queue) = pinning(&directory);
    let Ok(file) = direct(&directory) else {
        println!("skipped: no direct I/O here");
        return;
    };
    let ring = io.ring().unwrap();
    let file = ring.open(file);
    ring.distrust();
    let memory = Memory::anonymous(4 << 20).unwrap();
    for tag in 0..50 {
        let pinned = io.pinner().unwrap().pin(&memory, MIB, MIB).unwrap();
        let data = memory.segments(MIB as usize, PAGE).unwrap();
        assert!(ring.transfer(file, tag, WRITE, 0, data).is_none());
        // The thread may look for the buffer after this.
        drop(pinned);
        finish(&io, tag);
    }
    assert_eq!(io.counters().fixed, 0);
    ring.close(file);
}

fn made(mode: Mode) -> (Option<Io>, Option<LateMemory>, Option<RingFile>) {
    let directory = tempfile::tempdir().unwrap();
    let late = LateMemory::new().inspect_err(|error| println!("skipped: no userfaultfd: {error}"));
    let file = direct(&directory);
    let file = file.inspect_err(|error| println!("skipped: no direct I/O here: {error}"));
    (io(mode), late.ok(), file.ok())
}
