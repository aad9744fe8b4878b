//! A client that does what it can to make an interrupt block.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use eventfd::{ClientEventfd, KindError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
const FULL: u64 = u64::MAX - 1;

fn new(flags: EventfdFlags) -> OwnedFd {
    rustix::event::eventfd(0, flags | EventfdFlags::CLOEXEC).unwrap()
}

fn add(fd: &OwnedFd, count: u64) {
    rustix::io::write(fd, &count.to_ne_bytes()).unwrap();
}

fn take(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count).unwrap();
    u64::from_ne_bytes(count)
}

/// Does something in a thread, which must end.
fn in_time(act: impl FnOnce() + Send + 'static) {
    let (tell, told) = channel();
    std::thread::spawn(move || {
        act();
        let _ = tell.send(());
    });
    assert!(told.recv_timeout(WAIT_TIMEOUT).is_ok(), "it is blocked");
}

#[test]
fn every_signal_is_counted() {
    let theirs = new(EventfdFlags::NONBLOCK);
    let eventfd = ClientEventfd::new(theirs.try_clone().unwrap()).unwrap();
    for _ in 0..1000 {
        eventfd.signal();
    }
    assert_eq!(take(&theirs), 1000);
}

#[test]
fn full_counter_blocks_nobody_and_stays_signalled() {
    let theirs = new(EventfdFlags::empty());
    add(&theirs, FULL);
    let eventfd = ClientEventfd::new(theirs.try_clone().unwrap()).unwrap();
    in_time(move || (0..1000).for_each(|_| eventfd.signal()));
    // The largest value of all: the kernel's own signals go further than a write may.
    assert_eq!(take(&theirs), u64::MAX);
    // After that it is as ever.
    let eventfd = ClientEventfd::new(theirs.try_clone().unwrap()).unwrap();
    eventfd.signal();
    assert_eq!(take(&theirs), 1);
}

/// The client takes O_NONBLOCK away and fills the counter without end, as fast as it can.
#[test]
fn client_cannot_block_signal_by_any_timing() {
    static OVER: AtomicBool = AtomicBool::new(false);
    let theirs = new(EventfdFlags::NONBLOCK);
    let (flags, filler) = (theirs.try_clone().unwrap(), theirs.try_clone().unwrap());
    let hostile = std::thread::spawn(move || {
        let with = fcntl_getfl(&flags).unwrap() | OFlags::NONBLOCK;
        while !OVER.load(Ordering::Relaxed) {
            fcntl_setfl(&flags, with).unwrap();
            // It is full already, or it will be.
            let _ = rustix::io::write(&filler, &FULL.to_ne_bytes());
            fcntl_setfl(&flags, with - OFlags::NONBLOCK).unwrap();
        }
    });
    let eventfd = ClientEventfd::new(theirs.try_clone().unwrap()).unwrap();
    in_time(move || (0..200_000).for_each(|_| eventfd.signal()));
    OVER.store(true, Ordering::Relaxed);
    hostile.join().unwrap();
}

#[test]
fn waiting_client_is_woken() {
    let theirs = new(EventfdFlags::NONBLOCK);
    let eventfd = ClientEventfd::new(theirs.try_clone().unwrap()).unwrap();
    let waiter = std::thread::spawn(move || {
        let limit = Timespec {
            tv_sec: WAIT_TIMEOUT.as_secs() as i64,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(&theirs, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&limit)), Ok(1));
        take(&theirs)
    });
    eventfd.signal();
    assert_eq!(waiter.join().unwrap(), 1);
}

#[test]
fn non_eventfd_from_client_is_refused() {
    let memory = rustix::fs::memfd_create("anon_inode:[eventfd", rustix::fs::MemfdFlags::CLOEXEC);
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    let (pipe, _) = rustix::pipe::pipe().unwrap();
    for fd in [memory.unwrap(), socket.into(), pipe] {
        let refused = ClientEventfd::new(fd);
        assert!(matches!(refused, Err(KindError::WrongKind)), "{refused:?}");
    }
}

/// Each thread that signals has a context of its own, and gives it back to the system.
#[test]
fn threads_leave_no_aio_context() {
    let theirs = new(EventfdFlags::NONBLOCK);
    for _ in 0..100 {
        let fd = theirs.try_clone().unwrap();
        let signal = move || ClientEventfd::new(fd).unwrap().signal();
        std::thread::spawn(signal).join().unwrap();
    }
    assert_eq!(take(&theirs), 100);
    let contexts = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mine = contexts.matches("[aio]").count();
    assert!(mine < 50, "{mine} contexts are left");
}
