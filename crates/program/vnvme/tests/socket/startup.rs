//! Start-up sequences of known clients, in their order and with their habits, until the disk reads
//! the data that was written.

use std::os::fd::{AsFd, BorrowedFd};

use nvme::Status;
use vfio_user::client::{Client, ClientError, Irqs, RawClient};
use vfio_user::wire::{self, Command, MultiWrite, RegionAccess};
use vfio_user::{DmaMapping, DmaUnmapping, IrqAction};
use zerocopy::{FromBytes, IntoBytes};

use crate::common::*;

const QEMU: &[u8] =
    b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576,\"pgsizes\":4096,\
    \"max_dma_maps\":65535,\"write_multiple\":true,\"migration\":{\"pgsize\":4096}}}\0";
const CLOUD_HYPERVISOR: &[u8] =
    b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576,\
    \"migration\":{\"pgsize\":4096}}}\0";

/// Identify, a queue pair with an interrupt, and data of several lengths there and back.
fn exercise(host: &mut Host, vector: u16) {
    host.enable();
    let controller = host.identify_controller();
    assert_eq!(controller.nn.get(), 1);
    let namespace = host.identify_namespace(1).unwrap();
    assert_eq!(namespace.nsze.get() * 512, 64 << 20);
    host.create_queues(2, Some(vector));
    host.interrupts(vector.into());
    for (i, len) in [512, 4096, 8192, 1 << 20].into_iter().enumerate() {
        let data = pattern(i as u64 + u64::from(vector), len);
        let lba = 3 + 4096 * i as u64;
        host.write(1, lba, &data);
        assert!(host.interrupt(vector.into()) > 0);
        assert!(host.read(1, lba, len) == data, "{len} bytes");
        assert!(host.interrupt(vector.into()) > 0);
    }
    host.flush(1);
}

/// All of configuration space by single accesses; walks the capabilities and gives their
/// identifiers.
fn capabilities(client: &mut Client) -> Vec<u8> {
    let mut byte = |offset: u8| {
        let mut data = [0];
        client
            .region_read(CONFIG, offset.into(), &mut data)
            .unwrap();
        data[0]
    };
    let (mut at, mut found) = (byte(0x34), Vec::new());
    while at != 0 {
        found.push(byte(at));
        assert!(found.len() < 48, "the list does not end");
        at = byte(at + 1);
    }
    found
}

#[test]
fn qemu_startup_works() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 64 << 20);
    let daemon = Daemon::serve(&test_dir, &[&disk]);
    let mut client = Client::new(RawClient::connect(&test_dir.socket(), WAIT_TIMEOUT).unwrap());

    // The reply must not be longer than the request.
    let version = wire::Version { major: 0, minor: 0 };
    client
        .send(Command::VERSION, 0, &[version.as_bytes(), QEMU], &[])
        .unwrap();
    let reply = client.raw().recv().unwrap();
    assert_eq!(reply.header.error, 0);
    assert!(reply.payload.len() <= 4 + QEMU.len());
    assert_eq!(reply.payload.last(), Some(&0));
    let text = std::str::from_utf8(&reply.payload[4..]).unwrap();
    assert!(text.contains("\"max_msg_fds\":16"), "{text}");
    let multiple = text.contains("\"write_multiple\":true");

    // A burst of maps before anything is known of the device: RAM with its file, ROMs and other
    // devices without.
    let mut host = Host::over(client);
    let ram = host.ram.try_clone().unwrap();
    let map = |iova, size, offset, flags, fd: Option<BorrowedFd<'_>>, client: &mut Client| {
        let map = wire::DmaMap {
            argsz: 32,
            flags,
            offset,
            address: iova,
            size,
        };
        client
            .send(Command::DMA_MAP, 0, &[map.as_bytes()], fd.as_slice())
            .unwrap();
    };
    map(
        RAM_BASE,
        RAM_SIZE,
        0,
        3,
        Some(ram.as_fd()),
        &mut host.client,
    );
    map(0, 0xa0000, 0, 3, Some(ram.as_fd()), &mut host.client);
    map(0xc0000, 0x20000, 0, 1, None, &mut host.client);
    map(0xfffc_0000, 0x40000, 0, 1, None, &mut host.client);
    map(0xfd00_0000, 0x100_0000, 0, 3, None, &mut host.client);
    for _ in 0..5 {
        let reply = host.client.raw().recv().unwrap();
        assert_eq!(
            (reply.header.command, reply.header.error),
            (Command::DMA_MAP, 0)
        );
    }
    // Firmware moves its windows.
    for size in [0xa0000, 0x9f000, 0xa0000] {
        let unmap = DmaUnmapping::Range { iova: 0, size };
        host.client.dma_unmap(unmap).unwrap();
        map(
            0,
            if size == 0xa0000 { 0x9f000 } else { 0xa0000 },
            0,
            3,
            Some(ram.as_fd()),
            &mut host.client,
        );
        assert_eq!(host.client.raw().recv().unwrap().header.error, 0);
    }

    let info = host.client.device_info().unwrap();
    assert!(info.pci && info.reset);
    assert!((8..=100).contains(&info.num_regions) && (3..=50).contains(&info.num_irqs));
    for index in [0, 1, 2, 3, 4, 5, 7] {
        let region = host.client.region_info(index).unwrap();
        assert_eq!(
            region.size > 0,
            matches!(index, BAR0 | CONFIG),
            "region {index}"
        );
        assert!(region.mmap.is_none(), "posted writes would be off");
    }
    let mut config = [0; 256];
    host.client.region_read(CONFIG, 0, &mut config).unwrap();
    // Class 010802h: NVMe.
    assert_eq!(config[9..12], [0x02, 0x08, 0x01]);
    let found = capabilities(&mut host.client);
    for wanted in [0x01, 0x10, 0x11] {
        assert!(found.contains(&wanted), "capability {wanted:#x}");
    }
    assert!(host.client.irq_info(MSIX).unwrap().count > 1);
    assert_eq!(host.client.irq_info(INTX).unwrap().count, 1);
    // Bus master and memory; then MSI-X on, without a vector at first: vector 0 = -1.
    host.client.region_write(CONFIG, 4, &[6, 0]).unwrap();
    let none = Irqs::Eventfds(&[None]);
    host.client
        .set_irqs(MSIX, 0, IrqAction::Trigger, none)
        .unwrap();
    host.client
        .set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::All(0))
        .unwrap();
    host.assign_vectors(33);

    host.posted = true;
    exercise(&mut host, 17);

    // The doorbells of a batch in one message, where that was offered.
    if multiple {
        let command = host.transfer(nvme::NvmOpcode::READ, 1, 0, 512, 1 << 20);
        let (_, offset, tail) = host.test_dir(1, command);
        let mut entry = MultiWrite {
            offset,
            region: BAR0,
            count: 4,
            data: [0; 8],
        };
        entry.data[..4].copy_from_slice(&tail.to_le_bytes());
        let count = 1u64.to_ne_bytes();
        host.client
            .send(
                Command::REGION_WRITE_MULTI,
                wire::flags::NO_REPLY,
                &[&count, entry.as_bytes()],
                &[],
            )
            .unwrap();
        assert_eq!(host.completion(1).status(), Status::SUCCESS);
    }

    // The guest reboots: reset, and everything again.
    host.client.reset().unwrap();
    assert_eq!(host.read32(0x14), 0, "CC after a reset");
    exercise(&mut host, 3);
    drop(host);
    daemon.wait_log(|line| line.contains("client disconnected"));
    daemon.end();
}

#[test]
fn cloud_hypervisor_startup_works() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 64 << 20);
    let daemon = Daemon::serve(&test_dir, &[&disk]);
    let mut client = Client::new(RawClient::connect(&test_dir.socket(), WAIT_TIMEOUT).unwrap());
    client.negotiate_with(0, CLOUD_HYPERVISOR).unwrap();
    let info = client.device_info().unwrap();
    for index in 0..info.num_regions {
        client.region_info(index).unwrap();
    }
    for index in 0..info.num_irqs {
        client.irq_info(index).unwrap();
    }
    // BAR sizing.
    for offset in (0x10..0x28).step_by(4) {
        client.region_write(CONFIG, offset, &[0xff; 4]).unwrap();
        let mut data = [0; 4];
        client.region_read(CONFIG, offset, &mut data).unwrap();
        let bar = u32::from_le_bytes(data);
        match offset {
            0x10 => assert_eq!(bar, !(0x4000 - 1) | 4, "64-bit memory of 16 KiB"),
            0x14 => assert_eq!(bar, u32::MAX),
            _ => assert_eq!(bar, 0, "no BAR at {offset:#x}"),
        }
        client.region_write(CONFIG, offset, &[0; 4]).unwrap();
    }
    assert!(capabilities(&mut client).contains(&0x11));
    client
        .set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::All(0))
        .unwrap();
    client.reset().unwrap();

    let mut host = Host::over(client);
    host.map_ram();
    host.assign_vectors(33);
    exercise(&mut host, 32);
    // A stopped VM takes everything back.
    host.client
        .set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::All(0))
        .unwrap();
    let range = DmaUnmapping::Range {
        iova: RAM_BASE,
        size: RAM_SIZE,
    };
    assert_eq!(host.client.dma_unmap(range).unwrap(), RAM_SIZE);
    assert_eq!(host.client.dma_unmap(range).unwrap(), 0);
    drop(host);
    daemon.end();
}

#[test]
fn polling_host_with_mapped_doorbells_works() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 64 << 20);
    let daemon = Daemon::serve(&test_dir, &["--doorbells", "mapped", &disk]);
    let mut client = Client::new(RawClient::connect(&test_dir.socket(), WAIT_TIMEOUT).unwrap());
    // Version without any text.
    client.negotiate_with(0, &[]).unwrap();
    let mut host = Host::over(client);
    host.map_ram();
    host.map_doorbells();
    host.assign_vectors(1);
    exercise(&mut host, 0);
    // The registers beside the page stay messages.
    assert_eq!(host.read32(0x8) >> 16, 2, "VS");
    // The page of the next client is clean: no doorbell of this one is rung in its name.
    drop(host);
    let mut host = Host::attach(&test_dir.socket());
    host.map_doorbells();
    host.assign_vectors(1);
    exercise(&mut host, 0);
    drop(host);
    daemon.end();
}

#[test]
fn registers_read_alike_as_one_or_two_dwords() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut host = Host::attach(&test_dir.socket());
    let mut whole = [0; 8];
    host.client.region_read(BAR0, 0, &mut whole).unwrap();
    let halves = [host.read32(0), host.read32(4)];
    assert_eq!(<[u32; 2]>::read_from_bytes(&whole).unwrap(), halves);
    // An access that lies across the end of a region, or in no region, is refused.
    for (region, offset) in [(BAR0, 0x3ffe), (CONFIG, 0xffe), (3, 0), (8, 0), (100, 0)] {
        let mut data = [0; 4];
        let refused = host.client.region_read(region, offset, &mut data);
        assert!(
            matches!(refused, Err(ClientError::Refused { .. })),
            "{region}"
        );
    }
    let access = RegionAccess {
        offset: u64::MAX,
        region: BAR0,
        count: 4,
    };
    host.client
        .send(Command::REGION_READ, 0, &[access.as_bytes()], &[])
        .unwrap();
    assert_ne!(host.client.raw().recv().unwrap().header.error, 0);
    host.enable();
    drop(host);
    daemon.end();
}

#[test]
fn unshared_memory_is_explained() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut client = Client::connect(test_dir.socket(), WAIT_TIMEOUT).unwrap();
    let map = |iova, size, write| DmaMapping {
        iova,
        size,
        offset: 0,
        read: true,
        write,
    };
    // A ROM is no reason to complain.
    client
        .dma_map(map(0xfffc_0000, 0x40000, false), None)
        .unwrap();
    client.dma_map(map(0, 512 << 20, true), None).unwrap();
    client.dma_map(map(1 << 32, 512 << 20, true), None).unwrap();
    let line = daemon.wait_log(|line| line.contains("WARN"));
    for word in [
        "not shared",
        "memory-backend-memfd",
        "share=on",
        "size=512M",
    ] {
        assert!(line.contains(word), "{word}: {line}");
    }
    drop(client);
    let ended = daemon.end();
    let warnings = ended.log.iter().filter(|line| line.contains("not shared"));
    assert_eq!(warnings.count(), 1, "once for each client");
}
