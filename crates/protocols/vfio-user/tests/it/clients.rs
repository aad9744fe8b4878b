//! The sequences of real clients.

use crate::common::*;
use std::os::fd::AsFd;
use vfio_user::version::Capabilities;
use vfio_user::wire::{self, Command, flags, irq_set};
use vfio_user::{ConnectionStatus, IrqAction, MmapArea};
use zerocopy::{FromBytes, IntoBytes};

/// QEMU 10.1, `-device vfio-user-pci`, with its own limits on replies: none is longer than its
/// request unless QEMU said so.
#[test]
fn qemu_session_works() {
    let mut server = Server::new();
    let text = b"{\"capabilities\": {\"max_msg_fds\": 16, \"pgsizes\": 4096, \"max_data_xfer_size\": 1048576, \
        \"migration\": {\"pgsize\": 4096, \"max_bitmap_size\": 268435456}, \"max_dma_maps\": 65535, \
        \"write_multiple\": true}}\0";
    let version = message(
        0,
        Command::VERSION,
        0,
        &[wire::Version { major: 0, minor: 0 }.as_bytes(), text],
    );
    let reply = server.accepted(&version, &[]);
    assert!(reply.header.message_size as usize <= version.len());
    assert_eq!(reply.payload[..4], [0; 4]);
    assert_eq!(reply.payload.last(), Some(&0));
    let stated = Capabilities::parse(&reply.payload[4..]).unwrap();
    assert_eq!(
        (stated.max_msg_fds, stated.max_data_xfer_size),
        (16, 1 << 20)
    );
    assert_eq!((stated.pgsizes, stated.max_dma_maps), (4096, 65535));
    assert!(stated.write_multiple);
    assert_eq!(server.connection.client_capabilities().max_msg_fds, 16);

    // A transaction of the memory map: sent without waiting, answered one by
    // one, the last one waited for.
    let ram = memfd();
    server.peer.send(&dma_map(1, 0), &[ram.as_fd()]).unwrap();
    server.peer.send(&dma_map(2, 0xf000_0000), &[]).unwrap();
    server.peer.send(&dma_unmap(3, 0xf000_0000), &[]).unwrap();
    server
        .peer
        .send(&dma_map(4, 0x1_0000_0000), &[ram.as_fd()])
        .unwrap();
    assert_eq!(server.pump(), Ok(ConnectionStatus::Open));
    for (id, length) in [(1, 0), (2, 0), (3, 24), (4, 0)] {
        let reply = server.peer.recv().unwrap();
        assert_eq!(
            (
                reply.header.message_id,
                reply.header.error,
                reply.payload.len()
            ),
            (id, 0, length)
        );
    }
    let id = Some(file_id(&ram));
    let calls = server.take_calls();
    assert_eq!(
        calls[0],
        Call::Map {
            map: mapping(0),
            fd: id
        }
    );
    assert_eq!(
        calls[1],
        Call::Map {
            map: mapping(0xf000_0000),
            fd: None
        }
    );
    assert_eq!(
        calls[3],
        Call::Map {
            map: mapping(0x1_0000_0000),
            fd: id
        }
    );

    let info = wire::DeviceInfo {
        argsz: 16,
        ..Default::default()
    };
    let reply = server.accepted(
        &message(5, Command::DEVICE_GET_INFO, 0, &[info.as_bytes()]),
        &[],
    );
    let info = wire::DeviceInfo::read_from_bytes(&reply.payload).unwrap();
    assert!(info.flags & wire::device::PCI != 0 && (8..=100).contains(&info.num_regions));
    assert!((3..=50).contains(&info.num_irqs));

    let doorbells = memfd();
    server.device.mmap = Some((
        doorbells,
        0,
        vec![MmapArea {
            offset: 0x1000,
            size: 0x1000,
        }],
    ));
    for index in [0, 1, 2, 3, 4, 5, 7] {
        let mut argsz = 32;
        loop {
            let info = wire::RegionInfo {
                argsz,
                index,
                ..Default::default()
            };
            let reply = server.accepted(
                &message(6, Command::DEVICE_GET_REGION_INFO, 0, &[info.as_bytes()]),
                &[],
            );
            let (info, _) = wire::RegionInfo::read_from_prefix(&reply.payload).unwrap();
            // What QEMU checks.
            assert!(reply.payload.len() <= argsz as usize);
            assert!(reply.fds.len() <= 1);
            if info.flags & wire::region::CAPS != 0 {
                assert!(info.cap_offset >= 32 && info.cap_offset <= info.argsz);
            }
            if info.argsz <= argsz {
                assert_eq!(reply.fds.len(), usize::from(index == 0));
                break;
            }
            argsz = info.argsz;
        }
    }

    let reply = server.accepted(&region_read(7, CONFIG, 0, CONFIG_SIZE as u32), &[]);
    assert_eq!(reply.payload.len(), 16 + CONFIG_SIZE as usize);
    for count in [1, 2, 4] {
        server.accepted(&region_read(8, CONFIG, 0x34, count), &[]);
        server.accepted(
            &region_write(9, 0, CONFIG, 4, &[6, 0, 0, 0][..count as usize]),
            &[],
        );
    }
    for index in 0..5 {
        let info = wire::IrqInfo {
            argsz: 16,
            index,
            ..Default::default()
        };
        server.accepted(
            &message(10, Command::DEVICE_GET_IRQ_INFO, 0, &[info.as_bytes()]),
            &[],
        );
    }
    server.take_calls();

    // MSI-X: enabled without vectors, then assigned in chunks, then one
    // de-assigned, then all torn down.
    let assign = irq_set::DATA_EVENTFD | irq_set::ACTION_TRIGGER;
    let head = |start, count| {
        let set = wire::IrqSet {
            argsz: 20,
            flags: assign,
            index: MSIX,
            start,
            count,
        };
        message(11, Command::DEVICE_SET_IRQS, 0, &[set.as_bytes()])
    };
    let eventfds: Vec<_> = (0..20).map(|_| memfd()).collect();
    server.accepted(&head(0, 1), &[]);
    for (start, chunk) in [(0, &eventfds[..16]), (16, &eventfds[16..])] {
        let fds: Vec<_> = chunk.iter().map(|fd| fd.as_fd()).collect();
        server.accepted(&head(start, fds.len() as u32), &fds);
    }
    server.accepted(&head(3, 1), &[]);
    server.accepted(
        &set_irqs(
            12,
            irq_set::DATA_NONE | irq_set::ACTION_TRIGGER,
            MSIX,
            0,
            0,
            &[],
        ),
        &[],
    );
    let calls = server.take_calls();
    let last = Call::SetIrqs {
        index: MSIX,
        start: 0,
        count: 0,
        action: IrqAction::Trigger,
        data: Irqs::None,
    };
    assert_eq!((calls.len(), calls.last()), (5, Some(&last)));

    // At run time.
    server.post(
        &region_write(13, flags::NO_REPLY, BAR0, 0x1000, &[1, 0, 0, 0]),
        &[],
    );
    assert!(server.silent());
    server.accepted(&region_read(14, BAR0, 0x1c, 4), &[]);
    server.accepted(&message(15, Command::DEVICE_RESET, 0, &[]), &[]);
    rustix::net::shutdown(server.peer.as_fd(), rustix::net::Shutdown::Both).unwrap();
    assert_eq!(server.pump(), Ok(ConnectionStatus::Closed));
}

/// Cloud Hypervisor: reads each reply as a structure of fixed size, so errors and other
/// lengths desynchronise it.
#[test]
fn cloud_hypervisor_session_works() {
    let mut server = Server::new();
    server.device.mmap = Some((
        memfd(),
        0,
        vec![MmapArea {
            offset: 0x1000,
            size: 0x1000,
        }],
    ));
    let text = b"{\"capabilities\":{\"max_msg_fds\":1,\"max_data_xfer_size\":1048576,\"migration\":{\"pgsize\":4096}}}\0";
    let version = message(
        0,
        Command::VERSION,
        0,
        &[wire::Version { major: 0, minor: 1 }.as_bytes(), text],
    );
    let reply = server.accepted(&version, &[]);
    // It requires this member.
    let json = std::str::from_utf8(&reply.payload[4..reply.payload.len() - 1]).unwrap();
    assert!(json.starts_with("{\"capabilities\":{"), "{json}");

    // Its argsz counts the header too.
    let info = wire::DeviceInfo {
        argsz: 32,
        ..Default::default()
    };
    let reply = server.accepted(
        &message(1, Command::DEVICE_GET_INFO, 0, &[info.as_bytes()]),
        &[],
    );
    let info = wire::DeviceInfo::read_from_bytes(&reply.payload).unwrap();
    // Every region is asked for, also those that are not there.
    for index in 0..info.num_regions {
        let request = wire::RegionInfo {
            argsz: 32,
            index,
            ..Default::default()
        };
        let request = message(2, Command::DEVICE_GET_REGION_INFO, 0, &[request.as_bytes()]);
        let reply = server.accepted(&request, &[]);
        let info = wire::RegionInfo::read_from_bytes(&reply.payload).unwrap();
        if info.argsz > 32 {
            let request = wire::RegionInfo {
                argsz: info.argsz,
                index,
                ..Default::default()
            };
            let request = message(3, Command::DEVICE_GET_REGION_INFO, 0, &[request.as_bytes()]);
            let reply = server.accepted(&request, &[]);
            assert_eq!(reply.payload.len(), info.argsz as usize);
            assert_eq!(reply.fds.len(), 1);
        } else {
            assert!(info.flags & wire::region::MMAP == 0);
        }
    }
    for index in 0..info.num_irqs {
        let info = wire::IrqInfo {
            argsz: 16,
            index,
            ..Default::default()
        };
        server.accepted(
            &message(4, Command::DEVICE_GET_IRQ_INFO, 0, &[info.as_bytes()]),
            &[],
        );
    }
    // BAR sizing, then interrupts in chunks of 16, whatever was stated, then memory.
    server.accepted(&region_write(5, 0, CONFIG, 0x10, &[0xff; 4]), &[]);
    assert_eq!(
        server
            .accepted(&region_read(6, CONFIG, 0x10, 4), &[])
            .payload
            .len(),
        20
    );
    let eventfds: Vec<_> = (0..16).map(|_| memfd()).collect();
    let fds: Vec<_> = eventfds.iter().map(|fd| fd.as_fd()).collect();
    let assign = irq_set::DATA_EVENTFD | irq_set::ACTION_TRIGGER;
    server.accepted(&set_irqs(7, assign, MSIX, 0, 16, &[]), &fds);
    let ram = memfd();
    assert!(
        server
            .accepted(&dma_map(8, 0), &[ram.as_fd()])
            .payload
            .is_empty()
    );
    assert_eq!(server.accepted(&dma_unmap(9, 0), &[]).payload.len(), 24);
    // Doorbells: each waits.
    assert_eq!(
        server
            .accepted(&region_write(10, 0, BAR0, 0x1000, &[1, 0, 0, 0]), &[])
            .payload
            .len(),
        16
    );
    server.accepted(&message(11, Command::DEVICE_RESET, 0, &[]), &[]);
}

/// A polling host driver: no JSON, padded requests, one reply buffer of 4096 bytes,
/// descriptors with unmaps too.
#[test]
fn polling_host_session_works() {
    let mut server = Server::new();
    let doorbells = memfd();
    server.device.mmap = Some((
        doorbells,
        0,
        vec![MmapArea {
            offset: 0x1000,
            size: 0x1000,
        }],
    ));
    assert_eq!(server.accepted(&bare_version(0), &[]).payload.len(), 4);
    let info = wire::RegionInfo {
        argsz: 4064,
        index: BAR0,
        ..Default::default()
    };
    let request = message(
        0,
        Command::DEVICE_GET_REGION_INFO,
        0,
        &[info.as_bytes(), &[0; 4032]],
    );
    let reply = server.accepted(&request, &[]);
    assert!(reply.payload.len() <= 4096);
    assert_eq!(reply.fds.len(), 1);
    let (info, _) = wire::RegionInfo::read_from_prefix(&reply.payload).unwrap();
    assert!(info.flags & wire::region::CAPS != 0);
    let ram = memfd();
    server.accepted(&dma_map(0, 0), &[ram.as_fd()]);
    server.accepted(&region_write(0, 0, BAR0, 0x14, &[1, 0, 0x46, 0]), &[]);
    server.accepted(&region_read(0, BAR0, 0, 8), &[]);
    server.accepted(&dma_unmap(0, 0), &[ram.as_fd()]);
}
