//! The driver against vfio-user servers of others: what they want of a client, and what they may do
//! to one.

use crate::server;

use crate::common::*;
use driver::vfio_user::VfioUser;
use driver::{Device, Options, QueueOptions, QueuePair};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use server::{DoorbellFile, Foreign, Strict};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A server in a thread of this process.
struct ServerThread {
    dir: tempfile::TempDir,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ServerThread {
    fn start(foreign: Foreign) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let end = Arc::new(AtomicBool::new(false));
        let (ended, (listens, listening)) = (end.clone(), channel());
        let body = move || {
            server::serve_foreign(&path, foreign, MIB, || {
                let _ = listens.send(());
                !ended.load(Ordering::Relaxed)
            });
        };
        let thread = Some(std::thread::spawn(body));
        listening.recv_timeout(LIMIT).unwrap();
        ServerThread { dir, end, thread }
    }

    fn connect(&self) -> Arc<VfioUser> {
        VfioUser::connect(self.dir.path().join("s"), Duration::from_secs(20)).unwrap()
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

/// Writes and reads back, `count` times.
fn exercise(queue: &mut QueuePair, count: u64) {
    for i in 0..count {
        let data = vec![i as u8; 512];
        queue.write(i % 64, &data, false).unwrap();
        let mut read = vec![0; 512];
        queue.read(i % 64, &mut read).unwrap();
        assert_eq!(read, data);
    }
}

#[test]
fn server_without_eventfd_serves_polling_client() {
    let strict = Arc::new(Strict::default());
    let foreign = Foreign {
        strict: Some(strict.clone()),
        ..Foreign::default()
    };
    let server = ServerThread::start(foreign);
    let options = Options {
        interrupts: false,
        ..Options::default()
    };
    let device = Device::open(server.connect(), options).unwrap();
    let mut queue = device.queue(1, QueueOptions::default()).unwrap();
    exercise(&mut queue, 100);
    device.reset().unwrap();
    exercise(&mut queue, 100);
    assert!(!strict.failed.load(Ordering::Relaxed));
    assert_eq!(strict.sent.load(Ordering::Relaxed), 0, "INTx is disabled");
}

#[test]
fn server_checking_msix_enable_interrupts_sleeping_client() {
    let strict = Arc::new(Strict::default());
    let foreign = Foreign {
        strict: Some(strict.clone()),
        ..Foreign::default()
    };
    let server = ServerThread::start(foreign);
    let device = Device::open(server.connect(), Options::default()).unwrap();
    let options = QueueOptions {
        poll_window: Duration::ZERO,
        ..QueueOptions::default()
    };
    let mut queue = device.queue(1, options).unwrap();
    for i in 0..100 {
        let before = strict.sent.load(Ordering::Relaxed);
        let buffer = device.allocate(512).unwrap();
        queue.submit_read(i, 1, buffer, i).unwrap();
        while queue.in_flight() > 0 {
            let done = queue.wait(LIMIT, |done| done.result.unwrap());
            done.unwrap();
        }
        // The entry is there before its interrupt is.
        let start = std::time::Instant::now();
        while strict.sent.load(Ordering::Relaxed) == before {
            assert!(start.elapsed() < LIMIT, "no interrupt");
            std::thread::yield_now();
        }
    }
    assert!(!strict.failed.load(Ordering::Relaxed));
}

#[test]
fn interrupt_replaced_by_polling_keeps_eventfd() {
    let strict = Arc::new(Strict::default());
    let foreign = Foreign {
        strict: Some(strict.clone()),
        ..Foreign::default()
    };
    let server = ServerThread::start(foreign);
    let options = Options {
        io_queues: 2,
        ..Options::default()
    };
    let device = Device::open(server.connect(), options).unwrap();
    let options = QueueOptions {
        polled: true,
        ..QueueOptions::default()
    };
    let mut queue = device.queue(1, options).unwrap();
    assert!(queue.can_wake());
    // Enough of them for the queue pair to give its interrupt up.
    for i in 0..1000 {
        let buffer = device.allocate(512).unwrap();
        queue.submit_read(i % 64, 1, buffer, i).unwrap();
        for done in drain(&mut queue) {
            done.result.unwrap();
        }
    }
    assert!(!strict.failed.load(Ordering::Relaxed));
    assert_eq!(device.resets(), 0);
}

fn file(len: u64) -> OwnedFd {
    let file = memfd_create("doorbells", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

fn with_file(fd: OwnedFd, offset: u64) -> ServerThread {
    ServerThread::start(Foreign {
        file: Some(DoorbellFile { fd, offset }),
        ..Foreign::default()
    })
}

#[test]
fn doorbell_file_too_short_is_not_used() {
    for (len, offset) in [
        (0, 0),
        (0x1000, 0),
        (0x1fff, 0),
        (0x2000, 0x1000),
        (0x2000, u64::MAX - 0xfff),
        (0x2000, u64::MAX - 0x1fff),
        // The doorbells are there, and no 32-bit register is.
        (0x3000, 1),
    ] {
        let server = with_file(file(len), offset);
        let transport = server.connect();
        assert!(!transport.has_mapped_doorbells(), "{len:#x} {offset:#x}");
        let device = Device::open(transport, Options::default()).unwrap();
        let mut queue = device.queue(1, QueueOptions::default()).unwrap();
        exercise(&mut queue, 10);
    }
}

#[test]
fn shrunk_doorbell_file_only_loses_stores() {
    let file = file(0x2000);
    let server = with_file(file.try_clone().unwrap(), 0);
    let transport = server.connect();
    assert!(transport.has_mapped_doorbells());
    ftruncate(&file, 0).unwrap();
    let device = Device::open(transport, Options::default()).unwrap();
    let mut queue = device.queue(1, QueueOptions::default()).unwrap();
    exercise(&mut queue, 100);
    assert_eq!(device.resets(), 0);
}
