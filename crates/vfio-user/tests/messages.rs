//! Every message, by itself.

mod common;

use common::*;
use std::os::fd::AsFd;
use vfio_user::wire::{self, Command, flags, irq_set};
use vfio_user::{DmaUnmapping, Errno, IrqAction, Limits, MmapArea, Status};
use zerocopy::{FromBytes, IntoBytes};

#[test]
fn version_without_json_is_answered_without() {
    let mut server = Server::new();
    let reply = server.accepted(&bare_version(7), &[]);
    assert_eq!(
        reply.payload,
        wire::Version { major: 0, minor: 0 }.as_bytes()
    );
    assert!(server.connection.is_negotiated());
}

fn version(text: &[u8], major: u16, minor: u16) -> Vec<u8> {
    message(
        3,
        Command::VERSION,
        0,
        &[wire::Version { major, minor }.as_bytes(), text],
    )
}

#[test]
fn version_reply_is_never_longer_than_the_request() {
    let long = br#"{"capabilities": {"max_msg_fds": 16, "write_multiple": true, "migration": {"pgsize": 4096}, "x": 123456789012345678901234567890}}"#;
    for length in 0..200 {
        let mut text = if length < 20 {
            b"{}".to_vec()
        } else {
            br#"{"capabilities":{}}"#.to_vec()
        };
        text.resize(length, b' ');
        if length < 2 {
            text.clear();
        }
        text.push(0);
        let request = version(&text, 0, 9);
        let mut server = Server::new();
        let reply = server.accepted(&request, &[]);
        assert!(reply.header.message_size as usize <= request.len());
        assert_eq!(&reply.payload[..4], &[0; 4], "version 0.0");
        if text.len() >= 3 {
            assert_eq!(reply.payload.last(), Some(&0));
            let json: &[u8] = &reply.payload[4..reply.payload.len() - 1];
            let stated = vfio_user::version::Capabilities::parse(json).unwrap();
            if text.len() >= 40 {
                assert_eq!(stated.max_msg_fds, 16, "the most important one comes first");
            }
        }
    }
    let mut text = long.to_vec();
    text.push(0);
    let reply = Server::new().accepted(&version(&text, 0, 0), &[]);
    let stated = vfio_user::version::Capabilities::parse(&reply.payload[4..]).unwrap();
    assert!(stated.write_multiple);
}

#[test]
fn write_multiple_is_stated_only_if_the_client_did() {
    let mut text = br#"{"capabilities":{"max_msg_fds":1,"max_data_xfer_size":1048576,"migration":{"pgsize":4096}}}"#.to_vec();
    text.resize(400, b' ');
    text.push(0);
    let reply = Server::new().accepted(&version(&text, 0, 1), &[]);
    let stated = vfio_user::version::Capabilities::parse(&reply.payload[4..]).unwrap();
    assert!(!stated.write_multiple);
    assert_eq!(stated.max_msg_fds, 16);
    assert_eq!(stated.max_data_xfer_size, 1 << 20);
}

#[test]
fn other_major_bad_json_and_a_second_version_are_refused() {
    let mut server = Server::new();
    assert_eq!(server.refused(&version(b"", 1, 0), &[]), Errno::NOTSUP);
    assert_eq!(server.refused(&version(b"{\0", 0, 0), &[]), Errno::INVAL);
    assert_eq!(server.refused(&version(b"[]\0", 0, 0), &[]), Errno::INVAL);
    assert_eq!(
        server.refused(&version(b"{\"capabilities\":3}\0", 0, 0), &[]),
        Errno::INVAL
    );
    assert_eq!(
        server.refused(
            &version(b"{\"capabilities\":{\"max_msg_fds\":\"a\"}}\0", 0, 0),
            &[]
        ),
        Errno::INVAL
    );
    assert_eq!(
        server.refused(&message(1, Command::VERSION, 0, &[&[0, 0]]), &[]),
        Errno::INVAL
    );
    assert!(!server.connection.is_negotiated());
    server.accepted(&version(b"{}\0", 0, 0), &[]);
    assert_eq!(server.refused(&version(b"{}\0", 0, 0), &[]), Errno::INVAL);
    assert!(server.device.calls.is_empty());
}

#[test]
fn device_info() {
    let mut server = Server::negotiated();
    let ask = |argsz| {
        message(
            2,
            Command::DEVICE_GET_INFO,
            0,
            &[wire::DeviceInfo {
                argsz,
                ..Default::default()
            }
            .as_bytes()],
        )
    };
    for argsz in [16, 32] {
        let reply = server.accepted(&ask(argsz), &[]);
        let info = wire::DeviceInfo::read_from_bytes(&reply.payload).unwrap();
        assert_eq!(
            info,
            wire::DeviceInfo {
                argsz: 16,
                flags: 3,
                num_regions: 9,
                num_irqs: 5
            }
        );
    }
    assert_eq!(server.refused(&ask(15), &[]), Errno::INVAL);
    assert_eq!(
        server.refused(&message(2, Command::DEVICE_GET_INFO, 0, &[&[0; 15]]), &[]),
        Errno::INVAL
    );
}

fn ask_region(index: u32, argsz: u32) -> Vec<u8> {
    let info = wire::RegionInfo {
        argsz,
        index,
        ..Default::default()
    };
    message(2, Command::DEVICE_GET_REGION_INFO, 0, &[info.as_bytes()])
}

#[test]
fn region_info_of_plain_absent_and_unknown_regions() {
    let mut server = Server::negotiated();
    let reply = server.accepted(&ask_region(CONFIG, 32), &[]);
    let info = wire::RegionInfo::read_from_bytes(&reply.payload).unwrap();
    let expected = wire::RegionInfo {
        argsz: 32,
        flags: 3,
        index: CONFIG,
        size: CONFIG_SIZE,
        ..Default::default()
    };
    assert_eq!(info, expected);

    let reply = server.accepted(&ask_region(8, 32), &[]);
    let info = wire::RegionInfo::read_from_bytes(&reply.payload).unwrap();
    assert_eq!(
        info,
        wire::RegionInfo {
            argsz: 32,
            index: 8,
            ..Default::default()
        }
    );

    assert_eq!(server.refused(&ask_region(9, 32), &[]), Errno::INVAL);
    assert_eq!(server.refused(&ask_region(u32::MAX, 32), &[]), Errno::INVAL);
    assert_eq!(server.refused(&ask_region(0, 31), &[]), Errno::INVAL);

    // One polling host pads the request to the size of the reply that it can take.
    let info = wire::RegionInfo {
        argsz: 4000,
        index: CONFIG,
        ..Default::default()
    };
    let padded = message(
        2,
        Command::DEVICE_GET_REGION_INFO,
        0,
        &[info.as_bytes(), &[0xaa; 3968]],
    );
    assert_eq!(server.accepted(&padded, &[]).payload, expected.as_bytes());
}

#[test]
fn region_info_gives_capabilities_and_descriptor_when_they_fit() {
    let mut server = Server::negotiated();
    let file = memfd();
    let id = file_id(&file);
    let areas = vec![
        MmapArea {
            offset: 0x1000,
            size: 0x1000,
        },
        MmapArea {
            offset: 0x3000,
            size: 0x1000,
        },
    ];
    server.device.mmap = Some((file, 0x8000, areas));

    let reply = server.accepted(&ask_region(BAR0, 32), &[]);
    let info = wire::RegionInfo::read_from_bytes(&reply.payload).unwrap();
    assert_eq!(info.argsz, 32 + 16 + 32);
    assert_eq!(info.cap_offset, 0);
    assert_eq!(
        info.flags,
        wire::region::READ | wire::region::WRITE | wire::region::MMAP
    );
    assert!(reply.fds.is_empty());

    let short = server.accepted(&ask_region(BAR0, info.argsz - 1), &[]);
    assert_eq!(short.payload.len(), 32);

    let reply = server.accepted(&ask_region(BAR0, info.argsz), &[]);
    let (info, rest) = wire::RegionInfo::read_from_prefix(&reply.payload).unwrap();
    assert_eq!((info.argsz, info.cap_offset, info.offset), (80, 32, 0x8000));
    assert_eq!(info.flags, 0xf);
    let (cap, rest) = wire::CapHeader::read_from_prefix(rest).unwrap();
    assert_eq!(
        cap,
        wire::CapHeader {
            id: 1,
            version: 1,
            next: 0
        }
    );
    let (sparse, rest) = wire::SparseMmap::read_from_prefix(rest).unwrap();
    assert_eq!(sparse.nr_areas, 2);
    let areas = <[wire::SparseArea; 2]>::read_from_bytes(rest).unwrap();
    assert_eq!(
        areas[1],
        wire::SparseArea {
            offset: 0x3000,
            size: 0x1000
        }
    );
    let files: Vec<_> = reply.fds.iter().map(file_id).collect();
    assert_eq!(files, [id]);
}

#[test]
fn a_wholly_mappable_region_needs_no_capability() {
    let mut server = Server::negotiated();
    server.device.mmap = Some((memfd(), 0, Vec::new()));
    let reply = server.accepted(&ask_region(BAR0, 32), &[]);
    let info = wire::RegionInfo::read_from_bytes(&reply.payload).unwrap();
    assert_eq!((info.argsz, info.flags, info.cap_offset), (32, 7, 0));
    assert_eq!(reply.fds.len(), 1);
}

#[test]
fn irq_info() {
    let mut server = Server::negotiated();
    let ask = |index, argsz| {
        let info = wire::IrqInfo {
            argsz,
            index,
            ..Default::default()
        };
        message(2, Command::DEVICE_GET_IRQ_INFO, 0, &[info.as_bytes()])
    };
    let mut info = |index| {
        wire::IrqInfo::read_from_bytes(&server.accepted(&ask(index, 16), &[]).payload).unwrap()
    };
    assert_eq!(
        info(MSIX),
        wire::IrqInfo {
            argsz: 16,
            flags: 9,
            index: MSIX,
            count: 33
        }
    );
    assert_eq!(
        info(0),
        wire::IrqInfo {
            argsz: 16,
            flags: 7,
            index: 0,
            count: 1
        }
    );
    assert_eq!(
        info(4),
        wire::IrqInfo {
            argsz: 16,
            flags: 0,
            index: 4,
            count: 0
        }
    );
    assert_eq!(server.refused(&ask(5, 16), &[]), Errno::INVAL);
    assert_eq!(server.refused(&ask(0, 8), &[]), Errno::INVAL);
}

#[test]
fn region_reads() {
    let mut server = Server::negotiated();
    for (offset, count) in [(0, 1), (0x10, 8), (0, 0x1000), (0xfff, 1)] {
        let reply = server.accepted(&region_read(2, CONFIG, offset, count), &[]);
        let (access, data) = wire::RegionAccess::read_from_prefix(&reply.payload).unwrap();
        assert_eq!(
            access,
            wire::RegionAccess {
                offset,
                region: CONFIG,
                count
            }
        );
        let expected: Vec<u8> = (0..u64::from(count))
            .map(|i| pattern(CONFIG, offset + i))
            .collect();
        assert_eq!(data, expected);
    }
    // The largest that is allowed, which does not fit into the socket at once.
    server
        .peer
        .send(&region_read(2, 2, 0, 1 << 20), &[])
        .unwrap();
    let reader = std::thread::spawn({
        let mut peer = vfio_user::client::RawClient::from_fd(
            server.peer.as_fd().try_clone_to_owned().unwrap(),
            std::time::Duration::from_secs(20),
        )
        .unwrap();
        move || peer.recv().unwrap()
    });
    while !reader.is_finished() {
        assert_eq!(server.pump(), Ok(Status::Open));
        if server.connection.interest() == vfio_user::Interest::Readable {
            break;
        }
        std::thread::yield_now();
    }
    let reply = reader.join().unwrap();
    assert_eq!(reply.payload.len(), 16 + (1 << 20));
    assert!(
        reply.payload[16..]
            .iter()
            .enumerate()
            .all(|(i, byte)| *byte == pattern(2, i as u64))
    );

    server.take_calls();
    for (region, offset, count) in [
        (CONFIG, 0, 0),
        (CONFIG, 0xfff, 2),
        (CONFIG, 0x1000, 1),
        (CONFIG, u64::MAX, 1),
        (CONFIG, u64::MAX - 3, 8),
        (8, 0, 1),
        (99, 0, 1),
        (2, 0, (1 << 20) + 1),
        (2, 0, u32::MAX),
    ] {
        assert_eq!(
            server.refused(&region_read(2, region, offset, count), &[]),
            Errno::INVAL
        );
    }
    assert!(
        server.take_calls().is_empty(),
        "the device sees no bad access"
    );
    server.device.fail = Some(Errno::IO);
    assert_eq!(
        server.refused(&region_read(2, CONFIG, 0, 4), &[]),
        Errno::IO
    );
}

#[test]
fn region_writes() {
    let mut server = Server::negotiated();
    let reply = server.accepted(&region_write(2, 0, BAR0, 0x1000, &[1, 2, 3, 4]), &[]);
    assert_eq!(
        reply.payload,
        wire::RegionAccess {
            offset: 0x1000,
            region: BAR0,
            count: 4
        }
        .as_bytes()
    );
    assert_eq!(
        server.take_calls(),
        [Call::Write {
            index: BAR0,
            offset: 0x1000,
            data: vec![1, 2, 3, 4]
        }]
    );

    // Posted: no reply, neither to a good nor to a bad one.
    server.post(&region_write(3, flags::NO_REPLY, BAR0, 0x1008, &[5]), &[]);
    server.post(
        &region_write(4, flags::NO_REPLY, BAR0, BAR0_SIZE, &[5]),
        &[],
    );
    assert!(server.silent());
    assert_eq!(
        server.take_calls(),
        [Call::Write {
            index: BAR0,
            offset: 0x1008,
            data: vec![5]
        }]
    );
    assert_eq!(server.connection.counters().posted, 2);
    assert_eq!(server.connection.counters().refused, 1);

    // More or less data than is said, none, and a region that cannot be written.
    let access = wire::RegionAccess {
        offset: 0,
        region: BAR0,
        count: 4,
    };
    for data in [&[0; 3][..], &[0; 5][..], &[]] {
        let bad = message(5, Command::REGION_WRITE, 0, &[access.as_bytes(), data]);
        assert_eq!(server.refused(&bad, &[]), Errno::INVAL);
    }
    assert_eq!(
        server.refused(&region_write(5, 0, BAR0, 0, &[]), &[]),
        Errno::INVAL
    );
    assert_eq!(
        server.refused(&region_write(5, 0, 2, 0, &[1]), &[]),
        Errno::INVAL
    );
    assert!(server.take_calls().is_empty());
}

#[test]
fn max_data_xfer_size_applies_once_it_is_stated() {
    let limits = Limits {
        max_data_xfer_size: 4096,
        ..Limits::default()
    };
    let mut text = vec![b' '; 200];
    text[..2].copy_from_slice(b"{}");
    text.push(0);
    let mut server = Server::with_limits(limits);
    server.accepted(&version(&text, 0, 0), &[]);
    server.accepted(&region_read(2, 2, 0, 4096), &[]);
    assert_eq!(
        server.refused(&region_read(2, 2, 0, 4097), &[]),
        Errno::INVAL
    );
    // A client that was not told goes by the default.
    let mut server = Server::with_limits(limits);
    server.accepted(&bare_version(1), &[]);
    server.accepted(&region_read(2, 2, 0, 8192), &[]);
}

fn multi(entries: &[(u64, u32, u32, [u8; 8])], count: u64, flags: u32) -> Vec<u8> {
    let mut payload = count.as_bytes().to_vec();
    for &(offset, region, count, data) in entries {
        payload.extend_from_slice(
            wire::MultiWrite {
                offset,
                region,
                count,
                data,
            }
            .as_bytes(),
        );
    }
    message(9, Command::REGION_WRITE_MULTI, flags, &[&payload])
}

#[test]
fn multiple_writes() {
    let mut server = Server::negotiated();
    // As QEMU sends it: posted, 200 entries.
    let entries: Vec<_> = (0..200u64)
        .map(|i| (i * 8, BAR0, 1 + (i % 8) as u32, i.to_ne_bytes()))
        .collect();
    server.post(&multi(&entries, 200, flags::NO_REPLY), &[]);
    assert!(server.silent());
    let expected: Vec<_> = (0..200u64)
        .map(|i| Call::Write {
            index: BAR0,
            offset: i * 8,
            data: i.to_ne_bytes()[..1 + (i % 8) as usize].to_vec(),
        })
        .collect();
    assert_eq!(server.take_calls(), expected);

    let reply = server.accepted(&multi(&entries[..3], 3, 0), &[]);
    assert_eq!(reply.payload, 3u64.to_ne_bytes());
    assert_eq!(server.take_calls().len(), 3);

    // A bad entry does not keep the others back.
    let mixed = [
        (0, BAR0, 4, [1; 8]),
        (BAR0_SIZE, BAR0, 4, [2; 8]),
        (0, BAR0, 9, [3; 8]),
        (8, BAR0, 4, [4; 8]),
    ];
    assert_eq!(server.refused(&multi(&mixed, 4, 0), &[]), Errno::INVAL);
    assert_eq!(server.take_calls().len(), 2);

    for count in [4, 1 << 40, u64::MAX] {
        assert_eq!(
            server.refused(&multi(&entries[..3], count, 0), &[]),
            Errno::INVAL
        );
    }
    assert!(server.take_calls().is_empty());
}

#[test]
fn dma_maps() {
    let mut server = Server::negotiated();
    let file = memfd();
    server.accepted(&dma_map(2, 0x10000), &[file.as_fd()]);
    server.accepted(&dma_map(2, 0x20000), &[]);
    assert_eq!(
        server.take_calls(),
        [
            Call::Map {
                map: mapping(0x10000),
                fd: Some(file_id(&file))
            },
            Call::Map {
                map: mapping(0x20000),
                fd: None
            },
        ]
    );
    server.device.fail = Some(Errno::EXIST);
    assert_eq!(
        server.refused(&dma_map(2, 0x10000), &[file.as_fd()]),
        Errno::EXIST
    );
    server.take_calls();

    // The last page of the address space can be mapped.
    let map = wire::DmaMap {
        argsz: 32,
        flags: 1,
        offset: 0,
        address: u64::MAX - 4095,
        size: 4096,
    };
    server.accepted(&message(2, Command::DMA_MAP, 0, &[map.as_bytes()]), &[]);
    server.take_calls();
    let good = wire::DmaMap {
        argsz: 32,
        flags: 1,
        offset: 0,
        address: 0x1000,
        size: 0x1000,
    };
    for bad in [
        wire::DmaMap { argsz: 31, ..good },
        wire::DmaMap { flags: 0, ..good },
        wire::DmaMap { flags: 5, ..good },
        wire::DmaMap { size: 0, ..good },
        wire::DmaMap {
            address: u64::MAX - 4094,
            ..good
        },
        wire::DmaMap {
            offset: u64::MAX,
            ..good
        },
        wire::DmaMap {
            offset: i64::MAX as u64,
            ..good
        },
    ] {
        assert_eq!(
            server.refused(
                &message(2, Command::DMA_MAP, 0, &[bad.as_bytes()]),
                &[file.as_fd()]
            ),
            Errno::INVAL
        );
    }
    assert_eq!(
        server.refused(&dma_map(2, 0), &[file.as_fd(), file.as_fd()]),
        Errno::INVAL
    );
    assert_eq!(
        server.refused(&message(2, Command::DMA_MAP, 0, &[&[0; 31]]), &[]),
        Errno::INVAL
    );
    assert!(server.take_calls().is_empty());
}

#[test]
fn dma_unmaps() {
    let mut server = Server::negotiated();
    let request = dma_unmap(2, 0x10000);
    let reply = server.accepted(&request, &[]);
    assert_eq!(
        reply.payload,
        request[16..],
        "the reply repeats the request"
    );
    // One polling host sends the mapping's descriptor along.
    let file = memfd();
    server.accepted(&request, &[file.as_fd()]);
    let all = wire::DmaUnmap {
        argsz: 24,
        flags: wire::dma::UNMAP_ALL,
        address: 0,
        size: 0,
    };
    server.accepted(&message(2, Command::DMA_UNMAP, 0, &[all.as_bytes()]), &[]);
    let range = Call::Unmap(DmaUnmapping::Range {
        iova: 0x10000,
        size: 0x2000,
    });
    assert_eq!(
        server.take_calls(),
        [range.clone(), range, Call::Unmap(DmaUnmapping::All)]
    );

    let good = wire::DmaUnmap {
        argsz: 24,
        flags: 0,
        address: 0x1000,
        size: 0x1000,
    };
    for (bad, errno) in [
        (
            wire::DmaUnmap {
                flags: wire::dma::UNMAP_DIRTY_BITMAP,
                ..good
            },
            Errno::NOTSUP,
        ),
        (wire::DmaUnmap { flags: 3, ..good }, Errno::NOTSUP),
        (wire::DmaUnmap { flags: 2, ..good }, Errno::INVAL),
        (wire::DmaUnmap { flags: 4, ..good }, Errno::INVAL),
        (wire::DmaUnmap { argsz: 23, ..good }, Errno::INVAL),
        (wire::DmaUnmap { size: 0, ..good }, Errno::INVAL),
        (
            wire::DmaUnmap {
                address: u64::MAX,
                ..good
            },
            Errno::INVAL,
        ),
    ] {
        assert_eq!(
            server.refused(&message(2, Command::DMA_UNMAP, 0, &[bad.as_bytes()]), &[]),
            errno
        );
    }
    assert!(server.take_calls().is_empty());
    server.device.fail = Some(Errno::NOENT);
    assert_eq!(server.refused(&request, &[]), Errno::NOENT);
}

#[test]
fn interrupts() {
    use irq_set::*;
    let mut server = Server::negotiated();
    let (a, b) = (memfd(), memfd());
    let set = |flags, start, count, data: &[u8]| set_irqs(2, flags, MSIX, start, count, data);
    server.accepted(
        &set(DATA_EVENTFD | ACTION_TRIGGER, 5, 2, &[]),
        &[a.as_fd(), b.as_fd()],
    );
    server.accepted(&set(DATA_EVENTFD | ACTION_TRIGGER, 5, 2, &[]), &[]);
    server.accepted(&set(DATA_NONE | ACTION_TRIGGER, 0, 0, &[]), &[]);
    server.accepted(&set(DATA_NONE | ACTION_MASK, 0, 33, &[]), &[]);
    server.accepted(&set(DATA_BOOL | ACTION_UNMASK, 1, 3, &[0, 1, 2]), &[]);
    let call = |start, count, action, data| Call::SetIrqs {
        index: MSIX,
        start,
        count,
        action,
        data,
    };
    assert_eq!(
        server.take_calls(),
        [
            call(
                5,
                2,
                IrqAction::Trigger,
                Irqs::Eventfd(vec![Some(file_id(&a)), Some(file_id(&b))])
            ),
            call(5, 2, IrqAction::Trigger, Irqs::Eventfd(vec![None, None])),
            call(0, 0, IrqAction::Trigger, Irqs::None),
            call(0, 33, IrqAction::Mask, Irqs::None),
            call(1, 3, IrqAction::Unmask, Irqs::Bool(vec![false, true, true])),
        ]
    );
    // Tearing down is possible even for a type without interrupts.
    server.accepted(&set_irqs(2, DATA_NONE | ACTION_TRIGGER, 1, 0, 0, &[]), &[]);
    server.take_calls();

    for (flags, start, count, data, fds) in [
        (DATA_EVENTFD | ACTION_TRIGGER, 0, 3, &[][..], 2),
        (DATA_EVENTFD | ACTION_TRIGGER, 0, 1, &[], 2),
        (DATA_EVENTFD | ACTION_TRIGGER, 0, 0, &[], 0),
        (DATA_NONE | ACTION_TRIGGER, 0, 1, &[], 1),
        (DATA_NONE | ACTION_MASK, 0, 0, &[], 0),
        (DATA_NONE | ACTION_TRIGGER, 1, 0, &[], 0),
        (DATA_NONE | ACTION_TRIGGER, 33, 1, &[], 0),
        (DATA_NONE | ACTION_TRIGGER, 0, 34, &[], 0),
        (DATA_NONE | ACTION_TRIGGER, u32::MAX, 1, &[], 0),
        (DATA_NONE | ACTION_TRIGGER, 1, u32::MAX, &[], 0),
        (DATA_BOOL | ACTION_TRIGGER, 0, 3, &[1, 1], 0),
        (DATA_BOOL | ACTION_TRIGGER, 0, 1, &[1], 1),
        (DATA_NONE, 0, 1, &[], 0),
        (ACTION_TRIGGER, 0, 1, &[], 0),
        (DATA_NONE | DATA_BOOL | ACTION_TRIGGER, 0, 1, &[1], 0),
        (DATA_NONE | ACTION_TRIGGER | ACTION_MASK, 0, 1, &[], 0),
        (DATA_NONE | ACTION_TRIGGER | 1 << 6, 0, 1, &[], 0),
    ] {
        let fds = &[a.as_fd(), b.as_fd()][..fds];
        assert_eq!(
            server.refused(&set(flags, start, count, data), fds),
            Errno::INVAL,
            "{flags:#x} {start} {count}"
        );
    }
    assert_eq!(
        server.refused(&set_irqs(2, DATA_NONE | ACTION_TRIGGER, 5, 0, 0, &[]), &[]),
        Errno::INVAL
    );
    assert_eq!(
        server.refused(&message(2, Command::DEVICE_SET_IRQS, 0, &[&[0; 19]]), &[]),
        Errno::INVAL
    );
    assert!(server.take_calls().is_empty());
}

#[test]
fn reset() {
    let mut server = Server::negotiated();
    assert!(
        server
            .accepted(&message(2, Command::DEVICE_RESET, 0, &[]), &[])
            .payload
            .is_empty()
    );
    assert_eq!(server.take_calls(), [Call::Reset]);
    server.device.can_reset = false;
    assert_eq!(
        server.refused(&message(2, Command::DEVICE_RESET, 0, &[]), &[]),
        Errno::NOTSUP
    );
    assert!(server.take_calls().is_empty());
}

#[test]
fn what_is_not_supported_is_refused_and_the_stream_goes_on() {
    let mut server = Server::negotiated();
    let commands = [6, 11, 12, 14, 16, 17, 18, 0, 999, u16::MAX];
    for command in commands {
        for payload in [&[][..], &[0xff; 16], &[0; 1000]] {
            assert_eq!(
                server.refused(&message(2, Command(command), 0, &[payload]), &[]),
                Errno::NOTSUP
            );
            server.post(
                &message(2, Command(command), flags::NO_REPLY, &[payload]),
                &[],
            );
            assert!(server.silent());
        }
    }
    assert_eq!(
        server.connection.counters().refused,
        commands.len() as u64 * 6
    );
    server.accepted(&region_read(2, CONFIG, 0, 4), &[]);
}

#[test]
fn descriptors_where_none_belong_are_refused() {
    let mut server = Server::negotiated();
    let file = memfd();
    assert_eq!(
        server.refused(&region_read(2, CONFIG, 0, 4), &[file.as_fd()]),
        Errno::INVAL
    );
    assert!(server.take_calls().is_empty());
    server.accepted(&region_read(2, CONFIG, 0, 4), &[]);
}
