//! Every message, by itself.

use crate::common::*;
use std::os::fd::AsFd;
use vfio_user::wire::{self, Command, flags, irq_set};
use vfio_user::{DmaUnmapping, Errno, IrqAction};
use zerocopy::{FromBytes, IntoBytes};

#[test]
fn version_without_json_gets_reply_without_json() {
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
fn version_reply_is_never_longer_than_request() {
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
fn write_multiple_is_stated_only_when_client_does() {
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
fn other_major_bad_json_and_second_version_are_refused() {
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
fn device_info_is_reported() {
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

#[test]
fn irq_info_is_reported() {
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
fn dma_map_reaches_device() {
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
fn dma_unmap_reaches_device() {
    let mut server = Server::negotiated();
    let request = dma_unmap(2, 0x10000);
    let reply = server.accepted(&request, &[]);
    assert_eq!(
        reply.payload,
        request[16..],
        "the reply repeats the request"
    );
    // But for the size of what was mapped there: nothing, or several mappings with room between
    // them.
    for size in [0, 0x1000] {
        server.device.mapped = Some(size);
        let reply = server.accepted(&request, &[]);
        assert_eq!(reply.payload[..16], request[16..32]);
        assert_eq!(reply.payload[16..], size.to_le_bytes());
    }
    server.device.mapped = None;
    server.take_calls();
    server.accepted(&request, &[]);
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
            Errno::INVAL,
        ),
        (wire::DmaUnmap { flags: 3, ..good }, Errno::INVAL),
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
fn set_irqs_reaches_device() {
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
fn device_reset_reaches_device() {
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
fn unsupported_message_is_refused_and_stream_continues() {
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
fn misplaced_descriptors_are_refused() {
    let mut server = Server::negotiated();
    let file = memfd();
    assert_eq!(
        server.refused(&region_read(2, CONFIG, 0, 4), &[file.as_fd()]),
        Errno::INVAL
    );
    assert!(server.take_calls().is_empty());
    server.accepted(&region_read(2, CONFIG, 0, 4), &[]);
}
