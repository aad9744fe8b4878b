//! The driver against a controller in another process, over a vfio-user
//! socket, in both modes of BAR0.

use crate::server;

use crate::common::*;
use driver::transport::Transport;
use driver::vfio_user::VfioUser;
use driver::{CommandError, Device, DeviceTarget, Options, QueueOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const SOCKET: &str = "VNVME_TEST_SOCKET";
const MAPPED: &str = "VNVME_TEST_MAPPED";

/// Not a test of its own: what the other process runs. It ends with its parent.
#[test]
fn serve_when_asked_to() {
    let Some(path) = std::env::var_os(SOCKET) else {
        return;
    };
    let parent = rustix::process::getppid();
    let mapped = std::env::var_os(MAPPED).is_some();
    server::serve(Path::new(&path), mapped, 4 * MIB, || {
        rustix::process::getppid() == parent
    });
}

struct Other {
    child: Child,
    dir: tempfile::TempDir,
}

impl Other {
    fn start(mapped: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "socket::serve_when_asked_to", "--nocapture"]);
        command
            .env(SOCKET, dir.path().join("s"))
            .stdout(Stdio::null());
        if mapped {
            command.env(MAPPED, "1");
        }
        let other = Other {
            child: command.spawn().unwrap(),
            dir,
        };
        let start = Instant::now();
        // A socket has its name before it listens.
        while std::os::unix::net::UnixStream::connect(other.path()).is_err() {
            assert!(start.elapsed() < LIMIT);
            std::thread::sleep(Duration::from_millis(5));
        }
        other
    }
    fn path(&self) -> PathBuf {
        self.dir.path().join("s")
    }
    fn device(&self, options: Options) -> (Arc<VfioUser>, Device) {
        let transport = VfioUser::connect(self.path(), Duration::from_secs(20)).unwrap();
        let device = Device::open(transport.clone(), options).unwrap();
        (transport, device)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn random_io_between_two_processes_matches_array() {
    for mapped in [false, true] {
        let other = Other::start(mapped);
        let (transport, device) = other.device(Options::default());
        assert_eq!(transport.has_mapped_doorbells(), mapped);
        for (nsid, block) in [(1, 512), (2, 4096)] {
            let mut queue = device
                .queue(
                    nsid,
                    QueueOptions {
                        depth: 24,
                        ..Default::default()
                    },
                )
                .unwrap();
            let mut model = Exerciser::new(4 * MIB, block, MIB, 41);
            model.run(&device, &mut queue, 500, 24);
            device.reset().unwrap();
            model.run(&device, &mut queue, 200, 24);
            model.verify(&mut queue);
            assert_eq!(queue.counters().stale, 0);
        }
        assert!(device.service().unwrap().is_empty());
        // The socket is free for the next client after the last handle was dropped.
        drop((transport, device));
        let (_, device) = other.device(Options::default());
        assert_eq!(device.namespaces().len(), 2);
    }
}

#[test]
fn sleeping_between_two_processes_is_interrupted() {
    let other = Other::start(false);
    let (transport, device) = other.device(Options::default());
    assert!(transport.msix_vectors() > 1);
    let options = QueueOptions {
        poll_window: Duration::ZERO,
        ..Default::default()
    };
    let mut queue = device.queue(1, options).unwrap();
    for i in 0..200 {
        queue
            .submit_read(i, 1, device.allocate(512).unwrap(), i)
            .unwrap();
        let mut got = 0;
        let start = Instant::now();
        while got == 0 {
            got += queue
                .wait(Duration::from_secs(60), |done| done.result.unwrap())
                .unwrap();
            assert!(start.elapsed() < LIMIT);
        }
    }
}

#[test]
fn dead_server_counts_as_lost_device() {
    for mapped in [false, true] {
        let mut other = Other::start(mapped);
        let (_, device) = other.device(impatient());
        let mut queue = device.queue(1, QueueOptions::default()).unwrap();
        for i in 0..40 {
            queue
                .submit_read(i, 1, device.allocate(512).unwrap(), i)
                .unwrap();
        }
        other.child.kill().unwrap();
        other.child.wait().unwrap();
        let later = (40..60).filter(|&i| {
            let buffer = device.allocate(512).unwrap();
            queue.submit_read(i, 1, buffer, i).is_ok()
        });
        let submitted = 40 + later.count();
        let done = drain(&mut queue);
        assert_eq!(done.len(), submitted);
        let gone = |result: &Result<(), _>| matches!(result, Err(CommandError::Gone));
        assert!(
            done.iter().any(|done| gone(&done.result)),
            "all were served"
        );
        for done in done {
            assert!(
                matches!(done.result, Ok(()) | Err(CommandError::Gone)),
                "{:?}",
                done.result
            );
        }
        assert!(device.is_gone());
    }
}

#[test]
fn volume_urls_reach_sockets() {
    let other = Other::start(true);
    let url = format!(
        "vfio-user://{}/2?depth=3&shadow=off&queues=2",
        other.path().display()
    );
    let target = DeviceTarget::parse(&url).unwrap();
    let device = target.open().unwrap();
    assert_eq!(device.limits().io_queues, 2);
    let mut queue = device.queue(target.nsid, target.queue).unwrap();
    assert_eq!((queue.depth(), queue.block_size()), (3, 4096));
    queue.write(0, &[7; 8192], false).unwrap();
    assert_eq!(queue.counters().silent_doorbells, 0);
    drop((queue, device));
    let volume = driver::open(&url).unwrap();
    assert_eq!(volume::Volume::info(&volume).size, 4 * MIB);
    assert!(driver::open("vfio-user:///nowhere/at/all.sock/1").is_err());
}
