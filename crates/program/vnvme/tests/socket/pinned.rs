//! Guest memory that the kernel pins, and a kernel thread that submits.

use nvme::{NvmOpcode, Status};
use vfio_user::{DmaMapping, DmaUnmapping};

use crate::common::*;

/// Another window, at the second half of the memory.
const SECOND: DmaMapping = DmaMapping {
    iova: 0x40_0000_0000,
    size: RAM_SIZE / 2,
    offset: RAM_SIZE / 2,
    read: true,
    write: true,
};

fn pinned(daemon: &Daemon) -> u64 {
    status_kib(daemon.pid(), "VmPin")
}

#[test]
fn memory_is_pinned_while_mapped() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let daemon = Daemon::serve(&test_dir, &["--pin-memory", &disk]);
    for _ in 0..2 {
        let mut host = Host::up(&test_dir.socket());
        eventually("memory is pinned", || pinned(&daemon) >= RAM_SIZE >> 10);
        let ram = host.ram.try_clone().unwrap();
        let alone = pinned(&daemon);
        for round in 0..8u64 {
            let data = pattern(round, 64 << 10);
            host.client
                .dma_map(SECOND, Some(std::os::fd::AsFd::as_fd(&ram)))
                .unwrap();
            // In half of the rounds the memory is unmapped while it is being pinned.
            if round % 2 == 0 {
                eventually("the window is pinned", || {
                    pinned(&daemon) == alone + (SECOND.size >> 10)
                });
            }
            std::os::unix::fs::FileExt::write_all_at(&ram, &data, SECOND.offset).unwrap();
            // Page by page, so that PRP lists are not needed: all are in flight when their memory
            // is unmapped.
            for page in 0..16 {
                let mut command = host.transfer(NvmOpcode::WRITE, 1, page * 8, 4096, 0);
                command.set_prps(SECOND.iova + page * 4096, 0);
                host.submit(1, command);
            }
            let (iova, size) = (SECOND.iova, SECOND.size);
            let unmap = DmaUnmapping::Range { iova, size };
            host.client.dma_unmap(unmap).unwrap();
            // Answered means that the kernel has released it, whatever was in flight.
            assert_eq!(pinned(&daemon), alone);
            let mut written = 0;
            for _ in 0..16 {
                written += usize::from(host.completion(1).status() == Status::SUCCESS);
            }
            if written == 16 {
                assert!(host.read(1, 0, data.len()) == data);
            }
        }
        // Transfers that a message announced before the unmap may be too late; a transfer in
        // time is complete.
        let data = pattern(99, 64 << 10);
        host.write(1, 0, &data);
        assert!(host.read(1, 0, data.len()) == data);
        drop(host);
        eventually("nothing stays pinned", || pinned(&daemon) == 0);
    }
    daemon.end();
}

/// Queues go from worker to worker all the time: each has the memory pinned for itself, and lets it
/// go in time.
#[test]
fn memory_is_pinned_on_every_worker_with_queues() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let control = text(&test_dir.path("control"));
    let mut args = vec!["--workers", "2", "--spread", "stir", "--pin-memory"];
    args.extend(["--control", &control, &disk]);
    let daemon = Daemon::serve(&test_dir, &args);
    let mut host = Host::up(&test_dir.socket());
    host.use_shadow_doorbells();
    let through_both = |host: &mut Host| {
        let data = pattern(7, 4096);
        host.write(1, 0, &data);
        assert!(host.read(1, 0, data.len()) == data);
        let all = all_stats(&control);
        let rings = all["rings"].as_array().unwrap();
        let fixed = rings.iter().map(|ring| ring["fixed"].as_u64().unwrap());
        rings.len() == 2 && fixed.min() > Some(0)
    };
    eventually("both workers use it", || through_both(&mut host));
    let alone = pinned(&daemon);
    assert!(alone >= 2 * (RAM_SIZE >> 10), "{alone}");
    let ram = host.ram.try_clone().unwrap();
    for _ in 0..20 {
        host.client
            .dma_map(SECOND, Some(std::os::fd::AsFd::as_fd(&ram)))
            .unwrap();
        eventually("both have the window", || {
            through_both(&mut host) && pinned(&daemon) == alone + 2 * (SECOND.size >> 10)
        });
        let (iova, size) = (SECOND.iova, SECOND.size);
        let unmap = DmaUnmapping::Range { iova, size };
        host.client.dma_unmap(unmap).unwrap();
        // Answered means that both have released it.
        assert_eq!(pinned(&daemon), alone);
    }
    drop(host);
    eventually("nothing stays pinned", || pinned(&daemon) == 0);
    daemon.end();
}

const GIB: u64 = 1 << 30;

#[test]
fn large_window_is_pinned_after_reply() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let daemon = Daemon::serve(&test_dir, &["--pin-memory", &disk]);
    let mut host = Host::up(&test_dir.socket());
    eventually("memory is pinned", || pinned(&daemon) >= RAM_SIZE >> 10);
    let alone = pinned(&daemon);
    // Sparse: pinning it means allocating it.
    let ram = memfd(2 * GIB);
    let large = window(SECOND.iova, 2 * GIB);
    let (iova, size) = (large.iova, large.size);
    let fd = std::os::fd::AsFd::as_fd(&ram);
    for whole in [false, true] {
        host.client.dma_map(large, Some(fd)).unwrap();
        let at_once = pinned(&daemon);
        assert!(at_once < alone + (GIB >> 10), "{at_once} KiB are pinned");
        // Commands are served meanwhile, into memory that is pinned and into memory that is not.
        for round in 0..20u64 {
            let data = pattern(round, 4096);
            let at = round * (GIB / 16);
            std::os::unix::fs::FileExt::write_all_at(&ram, &data, at).unwrap();
            let mut command = host.transfer(NvmOpcode::WRITE, 1, 0, 4096, 0);
            command.set_prps(iova + at, 0);
            assert_eq!(host.run(1, command).status(), Status::SUCCESS);
            assert!(host.read(1, 0, 4096) == data);
        }
        if whole {
            eventually("all of it is pinned", || {
                pinned(&daemon) == alone + (size >> 10)
            });
        }
        let unmap = DmaUnmapping::Range { iova, size };
        host.client.dma_unmap(unmap).unwrap();
        assert_eq!(pinned(&daemon), alone);
    }
    drop(host);
    eventually("nothing stays pinned", || pinned(&daemon) == 0);
    daemon.end();
}

#[test]
fn memory_beyond_lock_limit_is_reported_and_served_unpinned() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let daemon = Daemon::spawn_with_locked_memory(
        4 << 20,
        &[
            "serve",
            "--socket",
            &text(&test_dir.socket()),
            "--pin-memory",
            &disk,
        ],
    );
    daemon.wait_listening(&test_dir.socket());
    for round in 0..3u64 {
        let mut host = Host::up(&test_dir.socket());
        let line = daemon.wait_log(|line| line.contains("guest memory is not pinned"));
        assert!(line.contains("(4096 KiB)"), "{line}");
        assert!(line.contains("ulimit -l"), "{line}");
        let data = pattern(round, 64 << 10);
        host.write(1, 0, &data);
        assert!(host.read(1, 0, data.len()) == data);
        drop(host);
        eventually("nothing stays pinned", || pinned(&daemon) == 0);
    }
    assert_eq!(daemon.count("guest memory is not pinned"), 1);
    daemon.end();
}

#[test]
fn memory_is_not_pinned_by_default() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let daemon = Daemon::serve(&test_dir, &[&disk]);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    assert_eq!(pinned(&daemon), 0);
    drop(host);
    daemon.end();
}

#[test]
fn sqpoll_thread_submits_requests() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let daemon = Daemon::serve(&test_dir, &["--sqpoll", "--pin-memory", &disk]);
    let mut host = Host::up(&test_dir.socket());
    for round in 0..20u64 {
        let data = pattern(round, 64 << 10);
        host.write(1, round, &data);
        host.flush(1);
        assert!(host.read(1, round, data.len()) == data);
    }
    drop(host);
    daemon.end();
}
