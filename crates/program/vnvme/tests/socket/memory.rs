//! Guest memory of every wrong kind, and interrupts that are none.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nvme::Status;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vfio_user::client::{Client, ClientError, Irqs};
use vfio_user::{DmaMapping, DmaUnmapping, Errno, IrqAction};

use crate::common::*;

fn is_refused(result: Result<(), ClientError>) -> bool {
    matches!(result, Err(ClientError::Refused { .. }))
}

#[test]
fn non_memory_descriptors_are_refused() {
    let test_dir = TestDir::new();
    let mut daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    let open = daemon.settled_descriptors();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let short = memfd(4096);
    let path = test_dir.path("read-only");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let wrong: Vec<(&str, OwnedFd)> = vec![
        ("pipe, read", reader),
        ("pipe, write", writer),
        ("directory", File::open(test_dir.path(".")).unwrap().into()),
        ("eventfd", new_eventfd()),
        ("a file that is too short", short.into()),
        (
            "a file that may only be read",
            File::open(&path).unwrap().into(),
        ),
        (
            "/dev/null",
            File::options()
                .read(true)
                .write(true)
                .open("/dev/null")
                .unwrap()
                .into(),
        ),
        ("socket", host.client.as_fd().try_clone_to_owned().unwrap()),
    ];
    for (what, fd) in &wrong {
        let map = window(0x2000_0000, 1 << 20);
        assert!(
            is_refused(host.client.dma_map(map, Some(fd.as_fd()))),
            "{what}"
        );
        assert!(daemon.is_alive(), "{what}");
    }
    // An offset that overflows, or lies behind the end.
    let ram = host.ram.try_clone().unwrap();
    for offset in [RAM_SIZE, u64::MAX - 4095, 1 << 63] {
        let map = DmaMapping {
            offset,
            ..window(0x2000_0000, 4096)
        };
        assert!(
            is_refused(host.client.dma_map(map, Some(ram.as_fd()))),
            "{offset:#x}"
        );
    }
    // None of these mappings is kept, and the rest still works.
    daemon.wait_descriptors(open);
    host.write(1, 0, &pattern(1, 4096));
    drop(host);
    daemon.end();
}

#[test]
fn non_eventfd_interrupts_are_refused() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    let open = daemon.settled_descriptors();
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    let directory = OwnedFd::from(File::open(test_dir.path(".")).unwrap());
    let file = OwnedFd::from(memfd(4096));
    let good = new_eventfd();
    for fd in [&writer, &directory, &file] {
        for (index, count) in [(MSIX, 2), (INTX, 1)] {
            let mut fds: Vec<Option<BorrowedFd<'_>>> = vec![Some(good.as_fd()); count];
            fds[count - 1] = Some(fd.as_fd());
            let result = host
                .client
                .set_irqs(index, 0, IrqAction::Trigger, Irqs::Eventfds(&fds));
            assert!(is_refused(result));
        }
    }
    // Vectors that are not there.
    let count = host.client.irq_info(MSIX).unwrap().count;
    let fds = [Some(good.as_fd()); 2];
    let result = host
        .client
        .set_irqs(MSIX, count - 1, IrqAction::Trigger, Irqs::Eventfds(&fds));
    assert!(is_refused(result));
    let result = host.client.set_irqs(9, 0, IrqAction::Trigger, Irqs::All(0));
    assert!(is_refused(result));
    daemon.wait_descriptors(open);
    host.assign_vectors(1);
    drop(host);
    daemon.end();
}

#[test]
fn full_eventfd_does_not_stop_others() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut host = Host::attach(&test_dir.socket());
    // Blocking, and full: a write to it would wait for ever.
    let full = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let fds = [Some(full.as_fd())];
    host.client
        .set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::Eventfds(&fds))
        .unwrap();
    host.enable();
    host.create_queues(1, Some(0));
    for _ in 0..4 {
        host.write(1, 0, &pattern(1, 512));
    }
    drop(host);
    daemon.end();
}

/// A guest that shrinks its memory while the controller works in it: an access there by a copy is a
/// SIGBUS.
#[test]
fn shrunk_guest_memory_fails_command_or_controller() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let daemon = Daemon::serve(&test_dir, &[&disk, "mem://4M"]);
    let data = pattern(1, 64 << 10);
    for nsid in [1, 2] {
        let mut host = Host::up(&test_dir.socket());
        host.write(1, 0, &data);
        let end = 8 << 20;
        host.ram.set_len(end).unwrap();
        // Only the data's place went, but that is not how memory behaves: the controller ends in
        // CSTS.CFS.
        let command = host.transfer(nvme::NvmOpcode::WRITE, nsid, 0, 64 << 10, end);
        host.submit(1, command);
        let mut completed = None;
        eventually("the command fails, or the controller", || {
            completed = completed.or_else(|| host.try_completion(1));
            completed.is_some() || host.read32(0x1c) & 2 != 0
        });
        if let Some(completion) = completed {
            assert_ne!(completion.status(), Status::SUCCESS);
        } else {
            daemon.wait_log(|line| line.contains("shrank"));
        }
        // All memory is unmapped while commands are in flight, including queues and lists.
        for i in 0..20u64 {
            let nsid = 1 + i as u32 % 2;
            let command = host.transfer(nvme::NvmOpcode::READ, nsid, 1024, 65_536, 1 << 20);
            host.submit(1, command);
        }
        host.ram.set_len(0).unwrap();
        host.write_register(0x1008, &5u32.to_le_bytes());
        eventually("the controller fails", || host.read32(0x1c) & 2 != 0);
        host.client.reset().unwrap();
        assert_eq!(host.read32(0x1c), 0);
    }
    // The next client has memory that stays.
    let mut host = Host::up(&test_dir.socket());
    assert!(host.read(1, 0, data.len()) == data);
    drop(host);
    daemon.end();
}

#[test]
fn sealed_memory_is_accepted() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let sealed = File::from(memfd_create("sealed", flags).unwrap());
    sealed.set_len(RAM_SIZE).unwrap();
    fcntl_add_seals(&sealed, SealFlags::SHRINK | SealFlags::SEAL).unwrap();
    let client = Client::connect(test_dir.socket(), WAIT_TIMEOUT).unwrap();
    let mut host = Host::with_memory(client, sealed);
    host.map_ram();
    host.enable();
    host.create_queues(1, None);
    host.write(1, 0, &pattern(1, 4096));
    drop(host);
    daemon.end();
}

fn errno<T>(result: Result<T, ClientError>) -> Option<Errno> {
    match result {
        Err(ClientError::Refused { errno, .. }) => errno,
        _ => None,
    }
}

/// DMA_MAP and DMA_UNMAP answer as VFIO_IOMMU_MAP_DMA and VFIO_IOMMU_UNMAP_DMA (type1 v2) do:
/// QEMU's callers are the same. With a virtual IOMMU it takes whole address spaces away.
#[test]
fn dma_map_and_unmap_answer_like_vfio_type1() {
    const AT: u64 = 0x40_0000_0000;
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    let ram = host.ram.try_clone().unwrap();
    let range = |iova, size| DmaUnmapping::Range { iova, size };
    let client = &mut host.client;
    let map = |client: &mut Client, iova, size| {
        let fd = (iova != AT + 0x4000).then_some(ram.as_fd());
        client.dma_map(window(iova, size), fd)
    };
    // The range is not mapped.
    assert_eq!(client.dma_unmap(range(AT, 0x1000)).unwrap(), 0);
    // Several windows, one of them without memory, with room before, between and behind.
    for (iova, size) in [(AT + 0x1000, 0x2000), (AT + 0x4000, 0x1000)] {
        map(client, iova, size).unwrap();
        assert_eq!(errno(map(client, iova, size)), Some(Errno::EXIST));
        assert_eq!(errno(map(client, iova, 0x1000)), Some(Errno::EXIST));
    }
    // A window is never split, and nothing is taken away then.
    for (iova, size) in [
        (AT + 0x1000, 0x1000),
        (AT + 0x2000, 0x1000),
        (AT + 0x2000, 0x8000),
        (AT, 0x2000),
    ] {
        let refused = client.dma_unmap(range(iova, size));
        assert_eq!(errno(refused), Some(Errno::INVAL), "{iova:#x}");
    }
    assert_eq!(client.dma_unmap(range(AT, 0x1000)).unwrap(), 0);
    assert_eq!(client.dma_unmap(range(AT + 0x3000, 0x1000)).unwrap(), 0);
    assert_eq!(client.dma_unmap(range(AT, 1 << 38)).unwrap(), 0x3000);
    assert_eq!(client.dma_unmap(range(AT, 1 << 38)).unwrap(), 0);
    // Empty, and over the end of the address space.
    for (iova, size) in [(AT, 0), (u64::MAX - 0xfff, 0x2000)] {
        assert_eq!(errno(map(client, iova, size)), Some(Errno::INVAL));
        let refused = client.dma_unmap(range(iova, size));
        assert_eq!(errno(refused), Some(Errno::INVAL), "{iova:#x}");
    }
    assert_eq!(client.dma_unmap(range(AT, u64::MAX - AT)).unwrap(), 0);
    // The guest's RAM is still there, and its disk answers.
    host.write(1, 0, &pattern(1, 4096));
    assert_eq!(host.client.dma_unmap(DmaUnmapping::All).unwrap(), RAM_SIZE);
    assert_eq!(host.client.dma_unmap(DmaUnmapping::All).unwrap(), 0);
    drop(host);
    daemon.end();
}

/// The maximum number of windows that the client was sent, and no more: they cost memory of this
/// process.
#[test]
fn window_count_is_limited() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut client = Client::connect(test_dir.socket(), WAIT_TIMEOUT).unwrap();
    let most = client.server_capabilities().max_dma_maps;
    let at = |i: u64| window(i * 4096, 4096);
    for i in 0..most {
        client.dma_map(at(i), None).unwrap();
    }
    assert_eq!(errno(client.dma_map(at(most), None)), Some(Errno::NOSPC));
    let last = DmaUnmapping::Range {
        iova: at(most - 1).iova,
        size: 4096,
    };
    assert_eq!(client.dma_unmap(last).unwrap(), 4096);
    client.dma_map(at(most), None).unwrap();
    assert_eq!(
        errno(client.dma_map(at(most - 1), None)),
        Some(Errno::NOSPC)
    );
    let all = client.dma_unmap(DmaUnmapping::All).unwrap();
    assert_eq!(all, most * 4096);
    drop(client);
    daemon.end();
}

/// A guest with a virtual IOMMU maps and unmaps single pages, thousands of them.
#[test]
fn thousands_of_small_windows_are_mapped_and_released() {
    const WINDOWS: u64 = 8000;
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    let ram = host.ram.try_clone().unwrap();
    let before = (descriptors(daemon.pid()), status_kib(daemon.pid(), "VmRSS"));
    let started = std::time::Instant::now();
    let page = |i: u64| DmaMapping {
        offset: i * 4096 % RAM_SIZE,
        ..window(0x40_0000_0000 + i * 8192, 4096)
    };
    for i in 0..WINDOWS {
        host.client.dma_map(page(i), Some(ram.as_fd())).unwrap();
    }
    // A transfer uses the last of them.
    let last = WINDOWS - 1;
    let data = pattern(7, 4096);
    std::os::unix::fs::FileExt::write_all_at(&ram, &data, page(last).offset).unwrap();
    let mut command = host.transfer(nvme::NvmOpcode::WRITE, 1, 0, 4096, 0);
    command.set_prps(page(last).iova, 0);
    assert_eq!(host.run(1, command).status(), Status::SUCCESS);
    assert!(host.read(1, 0, 4096) == data);
    let grown = descriptors(daemon.pid()) - before.0;
    assert!(grown < 16, "{grown} descriptors for windows on one file");
    for i in 0..WINDOWS {
        let DmaMapping { iova, size, .. } = page(i);
        host.client
            .dma_unmap(DmaUnmapping::Range { iova, size })
            .unwrap();
    }
    // The bound is far more than needed, and far less than if each map examined all existing ones
    // by system calls.
    assert!(
        started.elapsed() < 2 * WAIT_TIMEOUT,
        "{:?}",
        started.elapsed()
    );
    command.set_prps(page(last).iova, 0);
    assert_ne!(host.run(1, command).status(), Status::SUCCESS, "unmapped");
    let grown = status_kib(daemon.pid(), "VmRSS").saturating_sub(before.1);
    assert!(grown < 64 << 10, "{grown} KiB are kept");
    drop(host);
    daemon.end();
}
