//! The messages about regions, by themselves.

use crate::common::*;
use std::os::fd::AsFd;
use vfio_user::wire::{self, Command, flags};
use vfio_user::{ConnectionStatus, Errno, MmapArea, ServerLimits};
use zerocopy::{FromBytes, IntoBytes};

fn version(text: &[u8], major: u16, minor: u16) -> Vec<u8> {
    message(
        3,
        Command::VERSION,
        0,
        &[wire::Version { major, minor }.as_bytes(), text],
    )
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
fn region_info_covers_plain_absent_and_unknown_regions() {
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
fn region_info_has_capabilities_and_descriptor_within_argsz() {
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
fn fully_mappable_region_needs_no_capability() {
    let mut server = Server::negotiated();
    server.device.mmap = Some((memfd(), 0, Vec::new()));
    let reply = server.accepted(&ask_region(BAR0, 32), &[]);
    let info = wire::RegionInfo::read_from_bytes(&reply.payload).unwrap();
    assert_eq!((info.argsz, info.flags, info.cap_offset), (32, 7, 0));
    assert_eq!(reply.fds.len(), 1);
}

#[test]
fn region_reads_return_data() {
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
        assert_eq!(server.pump(), Ok(ConnectionStatus::Open));
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
fn region_writes_reach_device() {
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
fn max_data_xfer_size_applies_when_stated() {
    let limits = ServerLimits {
        max_data_xfer_size: 4096,
        ..ServerLimits::default()
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
fn multiple_writes_reach_device() {
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

    // As many as one message may have, and one more.
    let many: Vec<_> = (0..257).map(|i| (i * 8, BAR0, 4, [5; 8])).collect();
    server.accepted(&multi(&many[..256], 256, 0), &[]);
    assert_eq!(server.take_calls().len(), 256);
    assert_eq!(server.refused(&multi(&many, 257, 0), &[]), Errno::INVAL);
    assert!(server.take_calls().is_empty());
}
