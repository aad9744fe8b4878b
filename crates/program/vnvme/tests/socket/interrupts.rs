//! Interrupts are signalled by eventfds that the client shares, and may use in any way.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use vfio_user::IrqAction;
use vfio_user::client::Irqs;

use crate::common::*;
use crate::vhost_blk;

/// Maximum value: a further increment blocks.
const FULL: u64 = u64::MAX - 1;

/// An eventfd on which a write blocks, whatever the daemon has done to its flags: they and the
/// counter are set again and again, until this is dropped.
struct Trap {
    fd: OwnedFd,
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Trap {
    fn new() -> Trap {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (shared, over) = (fd.try_clone().unwrap(), Arc::new(AtomicBool::new(false)));
        let ended = over.clone();
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let flags = fcntl_getfl(&shared).unwrap();
                fcntl_setfl(&shared, flags | OFlags::NONBLOCK).unwrap();
                let _ = rustix::io::write(&shared, &FULL.to_ne_bytes());
                fcntl_setfl(&shared, flags - OFlags::NONBLOCK).unwrap();
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
        });
        Trap {
            fd,
            over,
            thread: Some(thread),
        }
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[test]
fn blocking_vector_blocks_nobody() {
    let test_dir = TestDir::new();
    let config = test_dir.path("vnvme.toml");
    let (bad, good) = (test_dir.path("bad.sock"), test_dir.path("good.sock"));
    let one = |socket| {
        let socket = text(socket);
        format!(
            "[[controller]]\nsocket = {socket:?}\n[[controller.namespace]]\nvolume = \"mem://4M\"\n"
        )
    };
    std::fs::write(&config, one(&bad) + &one(&good)).unwrap();
    // Both disks share a worker.
    let daemon = Daemon::spawn(&["serve", "--config", &text(&config)]);
    daemon.wait_listening(&bad);
    daemon.wait_listening(&good);
    let mut neighbour = Host::up(&good);
    let trap = Trap::new();
    let mut hostile = Host::attach(&bad);
    let vectors = [Some(trap.fd.as_fd()), Some(trap.fd.as_fd())];
    hostile
        .client
        .set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::Eventfds(&vectors))
        .unwrap();
    hostile.enable();
    hostile.create_queues(1, Some(1));
    for round in 0..200u64 {
        let data = pattern(round, 4096);
        hostile.write(1, 8, &data);
        assert!(hostile.read(1, 8, 4096) == data);
        neighbour.write(1, 16, &data);
        assert!(neighbour.read(1, 16, 4096) == data);
    }
    // The pin is one more eventfd.
    hostile.enable();
    let none: [Option<std::os::fd::BorrowedFd<'_>>; 2] = [None, None];
    hostile
        .client
        .set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::Eventfds(&none))
        .unwrap();
    let pin = [Some(trap.fd.as_fd())];
    hostile
        .client
        .set_irqs(INTX, 0, IrqAction::Trigger, Irqs::Eventfds(&pin))
        .unwrap();
    hostile.create_queues(1, Some(0));
    for round in 0..20u64 {
        hostile.write(1, 8, &pattern(round, 512));
        hostile
            .client
            .set_irqs(INTX, 0, IrqAction::Unmask, Irqs::All(1))
            .unwrap();
        neighbour.write(1, 16, &pattern(round, 512));
    }
    drop((hostile, neighbour, trap));
    daemon.end();
}

/// The error eventfd of a vhost-user queue, which is signalled when the guest breaks the queue.
#[test]
fn blocking_error_descriptor_of_export_blocks_nobody() {
    let test_dir = TestDir::new();
    let socket = test_dir.path("v.sock");
    let daemon = Daemon::serve(
        &test_dir,
        &["mem://4M", "--vhost-user-blk", &text(&socket), "mem://1M"],
    );
    daemon.wait_listening(&socket);
    let mut neighbour = Host::up(&test_dir.socket());
    let trap = Trap::new();
    let stream = UnixStream::connect(&socket).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    vhost_blk::break_queue(&stream, trap.fd.as_fd());
    daemon.wait_log(|line| line.contains("broken its queue"));
    neighbour.write(1, 16, &pattern(1, 4096));
    assert!(neighbour.read(1, 16, 4096) == pattern(1, 4096));
    assert_ne!(vhost_blk::features_of(&stream), 0, "it is served on");
    drop((stream, neighbour, trap));
    daemon.end();
}
