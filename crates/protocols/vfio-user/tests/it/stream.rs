//! Messages in pieces, several at once, with descriptors, out of order, garbled.

use crate::common::*;
use std::os::fd::{AsFd, BorrowedFd};
use vfio_user::wire::{self, Command, Header, flags, irq_set};
use vfio_user::{
    ConnectionError, ConnectionStatus, DmaUnmapping, Errno, Interest, IrqAction, ServerLimits,
};
use zerocopy::IntoBytes;

/// Sends in one piece without letting the server work.
fn queue(server: &mut Server, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    server.peer.send(bytes, fds).unwrap();
}

fn map_call(iova: u64, file: Option<&std::os::fd::OwnedFd>) -> Call {
    Call::Map {
        map: mapping(iova),
        fd: file.map(file_id),
    }
}

#[test]
fn byte_by_byte_messages_are_handled() {
    let mut server = Server::new();
    let file = memfd();
    let stream = [
        (bare_version(1), None),
        (dma_map(2, 0x10000), Some(&file)),
        (region_write(3, 0, BAR0, 8, &[1, 2, 3, 4]), None),
        (dma_map(4, 0x20000), None),
    ];
    for (bytes, file) in &stream {
        for (i, byte) in bytes.iter().enumerate() {
            let fds: Vec<_> = file
                .iter()
                .filter(|_| i == 0)
                .map(|file| file.as_fd())
                .collect();
            assert!(server.silent());
            server.post(&[*byte], &fds);
        }
        assert_eq!(server.peer.recv().unwrap().header.error, 0);
    }
    let write = Call::Write {
        index: BAR0,
        offset: 8,
        data: vec![1, 2, 3, 4],
    };
    assert_eq!(
        server.take_calls(),
        [
            map_call(0x10000, Some(&file)),
            write,
            map_call(0x20000, None)
        ]
    );
}

#[test]
fn descriptors_stay_with_message_when_reads_coalesce() {
    // The burst that QEMU sends after the version: one sendmsg for each
    // message, some with a descriptor.
    let mut server = Server::negotiated();
    let files: Vec<_> = (0..4).map(|_| memfd()).collect();
    let with = |i: u64| (i % 3 == 2).then(|| &files[i as usize / 3]);
    for i in 0..12 {
        let fds: Vec<_> = with(i).into_iter().map(|file| file.as_fd()).collect();
        queue(&mut server, &dma_map(i as u16, i << 16), &fds);
    }
    queue(&mut server, &region_read(50, CONFIG, 0, 4), &[]);
    assert_eq!(server.pump(), Ok(ConnectionStatus::Open));
    let mut expected: Vec<_> = (0..12).map(|i| map_call(i << 16, with(i))).collect();
    expected.push(Call::Read {
        index: CONFIG,
        offset: 0,
        count: 4,
    });
    assert_eq!(server.take_calls(), expected);
    for _ in 0..13 {
        assert_eq!(server.peer.recv().unwrap().header.error, 0);
    }
}

#[test]
fn descriptors_at_start_of_packet_belong_to_first_message() {
    let mut server = Server::negotiated();
    let file = memfd();
    let mut packet = dma_map(2, 0x10000);
    packet.extend(region_read(3, CONFIG, 0, 4));
    packet.extend(region_write(4, flags::NO_REPLY, BAR0, 0, &[1]));
    // Split in the header behind the map: it is not yet known that the next message
    // cannot own the descriptor.
    server.post(&packet[..48 + 5], &[file.as_fd()]);
    server.post(&packet[48 + 5..], &[]);
    let calls = server.take_calls();
    assert_eq!(calls.len(), 3);
    assert_eq!(calls[0], map_call(0x10000, Some(&file)));
}

#[test]
fn descriptors_after_message_start_are_accepted() {
    let mut server = Server::negotiated();
    let (a, b) = (memfd(), memfd());
    let bytes = set_irqs(
        2,
        irq_set::DATA_EVENTFD | irq_set::ACTION_TRIGGER,
        MSIX,
        0,
        2,
        &[],
    );
    queue(&mut server, &bytes[..16], &[a.as_fd()]);
    queue(&mut server, &bytes[16..20], &[b.as_fd()]);
    server.post(&bytes[20..], &[]);
    let data = Irqs::Eventfd(vec![Some(file_id(&a)), Some(file_id(&b))]);
    let call = Call::SetIrqs {
        index: MSIX,
        start: 0,
        count: 2,
        action: IrqAction::Trigger,
        data,
    };
    assert_eq!(server.take_calls(), [call]);
}

#[test]
fn sixteen_descriptors_in_chunks_are_received() {
    let mut server = Server::negotiated();
    let files: Vec<_> = (0..33).map(|_| memfd()).collect();
    for (i, chunk) in files.chunks(16).enumerate() {
        let fds: Vec<_> = chunk.iter().map(|file| file.as_fd()).collect();
        let start = i as u32 * 16;
        let flags = irq_set::DATA_EVENTFD | irq_set::ACTION_TRIGGER;
        queue(
            &mut server,
            &set_irqs(i as u16, flags, MSIX, start, chunk.len() as u32, &[]),
            &fds,
        );
    }
    assert_eq!(server.pump(), Ok(ConnectionStatus::Open));
    let calls = server.take_calls();
    assert_eq!(calls.len(), 3);
    let got: Vec<_> = calls
        .into_iter()
        .flat_map(|call| match call {
            Call::SetIrqs {
                data: Irqs::Eventfd(fds),
                ..
            } => fds,
            other => panic!("{other:?}"),
        })
        .collect();
    let expected: Vec<_> = files.iter().map(|file| Some(file_id(file))).collect();
    assert_eq!(got, expected);
}

/// Sends bytes and expects the connection to be closed because of them.
fn closed_by(server: &mut Server, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> ConnectionError {
    let error = server.send(bytes, fds).unwrap_err();
    assert_eq!(server.device.calls.last(), Some(&Call::Disconnected));
    assert_eq!(
        server
            .device
            .calls
            .iter()
            .filter(|call| **call == Call::Disconnected)
            .count(),
        1
    );
    // It stays closed, quietly, and the peer sees it.
    assert_eq!(server.pump(), Ok(ConnectionStatus::Closed));
    assert_eq!(server.connection.interest(), Interest::None);
    server.connection.close(&mut server.device);
    assert_eq!(
        server
            .device
            .calls
            .iter()
            .filter(|call| **call == Call::Disconnected)
            .count(),
        1
    );
    loop {
        match server.peer.recv() {
            Ok(_) => {}
            Err(vfio_user::client::ClientError::Closed) => return error,
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn commands_before_version_end_connection() {
    let mut server = Server::new();
    let command = Command::DEVICE_GET_INFO;
    server
        .peer
        .send(&message(9, command, 0, &[&[16, 0, 0, 0], &[0; 12]]), &[])
        .unwrap();
    assert_eq!(
        server.pump(),
        Err(ConnectionError::NotNegotiated { command })
    );
    let reply = server.peer.recv().unwrap();
    assert_eq!(
        (reply.header.message_id, reply.header.error),
        (9, Errno::PROTO.raw_os_error() as u32)
    );
    assert_eq!(server.take_calls(), [Call::Disconnected]);

    let error = closed_by(
        &mut Server::new(),
        &region_write(1, flags::NO_REPLY, 0, 0, &[1]),
        &[],
    );
    assert_eq!(
        error,
        ConnectionError::NotNegotiated {
            command: Command::REGION_WRITE
        }
    );
}

#[test]
fn invalid_message_sizes_end_connection() {
    let header = |size| Header {
        message_id: 1,
        command: Command::REGION_WRITE,
        message_size: size,
        flags: 0,
        error: 0,
    };
    for size in [0, 1, 15] {
        let error = closed_by(&mut Server::negotiated(), header(size).as_bytes(), &[]);
        assert_eq!(error, ConnectionError::ShortMessage { size });
    }
    let limit = 32 + (1 << 20);
    for size in [limit as u32 + 1, u32::MAX] {
        let error = closed_by(&mut Server::negotiated(), header(size).as_bytes(), &[]);
        assert_eq!(error, ConnectionError::LongMessage { size, limit });
    }
    // Before negotiation much less is accepted.
    let error = closed_by(&mut Server::new(), header(0x10000).as_bytes(), &[]);
    assert_eq!(
        error,
        ConnectionError::LongMessage {
            size: 0x10000,
            limit: 8192
        }
    );
    // The limit itself is a message like any other.
    let mut server = Server::negotiated();
    server.post(header(limit as u32).as_bytes(), &[]);
    assert_eq!(server.connection.interest(), Interest::Readable);
}

#[test]
fn replies_and_unknown_types_end_connection() {
    for flags in [
        flags::REPLY,
        flags::REPLY | flags::ERROR,
        2,
        0xf,
        0xffff_ffff,
    ] {
        let error = closed_by(
            &mut Server::negotiated(),
            &message(1, Command::DMA_READ, flags, &[]),
            &[],
        );
        assert_eq!(error, ConnectionError::NotACommand { flags });
    }
}

#[test]
fn connection_end_within_message_is_error() {
    // Between messages it is an end, within one an error.
    let mut server = Server::negotiated();
    rustix::net::shutdown(server.peer.as_fd(), rustix::net::Shutdown::Both).unwrap();
    assert_eq!(server.pump(), Ok(ConnectionStatus::Closed));
    assert_eq!(server.take_calls(), [Call::Disconnected]);

    let mut server = Server::negotiated();
    queue(&mut server, &region_read(1, CONFIG, 0, 4)[..20], &[]);
    rustix::net::shutdown(server.peer.as_fd(), rustix::net::Shutdown::Write).unwrap();
    assert_eq!(server.pump(), Ok(ConnectionStatus::Open));
    assert_eq!(server.pump(), Err(ConnectionError::Truncated));
    assert_eq!(server.take_calls(), [Call::Disconnected]);
}

/// Open descriptors of files that the test made.
fn open_count(file: &impl AsFd) -> usize {
    use std::os::unix::fs::MetadataExt;
    let id = file_id(file);
    let inode = |path: std::path::PathBuf| std::fs::metadata(path).map(|metadata| metadata.ino());
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    entries
        .filter(|entry| inode(entry.as_ref().unwrap().path()).is_ok_and(|inode| inode == id))
        .count()
}

#[test]
fn excess_descriptors_are_closed_with_connection() {
    let file = memfd();
    let mut server = Server::negotiated();
    let fds = vec![file.as_fd(); 17];
    server.peer.send(&dma_map(1, 0), &fds).unwrap();
    assert_eq!(server.pump(), Err(ConnectionError::TooManyFds));
    assert_eq!(open_count(&file), 1);

    // Sixteen with each byte of one message.
    let mut server = Server::negotiated();
    let bytes = dma_map(1, 0);
    let fds = vec![file.as_fd(); 16];
    let mut result = Ok(ConnectionStatus::Open);
    for byte in &bytes[..10] {
        server.peer.send(&[*byte], &fds).unwrap();
        result = server.pump();
        if result.is_err() {
            break;
        }
        // Those of three messages.
        assert!(open_count(&file) <= 1 + 48);
    }
    assert_eq!(result, Err(ConnectionError::TooManyFds));
    assert_eq!(open_count(&file), 1);
}

#[test]
fn unused_descriptors_are_closed() {
    let file = memfd();
    let mut server = Server::negotiated();
    assert_eq!(
        server.refused(&region_read(1, CONFIG, 0, 4), &[file.as_fd()]),
        Errno::INVAL
    );
    assert_eq!(
        server.refused(&dma_map(1, 0), &[file.as_fd(), file.as_fd()]),
        Errno::INVAL
    );
    server.accepted(&dma_unmap(1, 0), &[file.as_fd()]);
    assert_eq!(open_count(&file), 1);
    server.post(&dma_map(1, 0)[..20], &[file.as_fd()]);
    assert_eq!(open_count(&file), 2);
    server.connection.close(&mut server.device);
    assert_eq!(open_count(&file), 1);
}

#[test]
fn pending_operation_blocks_later_messages() {
    let mut server = Server::negotiated();
    server.device.defer = true;
    let mut packet = dma_unmap(2, 0x10000);
    packet.extend(region_write(3, 0, BAR0, 0, &[1, 2, 3, 4]));
    packet.extend(message(4, Command::DEVICE_RESET, 0, &[]));
    packet.extend(region_read(5, CONFIG, 0, 4));
    assert_eq!(server.send(&packet, &[]), Ok(ConnectionStatus::Pending));
    assert_eq!(server.connection.interest(), Interest::None);
    assert_eq!(server.pump(), Ok(ConnectionStatus::Pending));
    assert!(server.silent());
    let unmap = Call::Unmap(DmaUnmapping::Range {
        iova: 0x10000,
        size: 0x2000,
    });
    assert_eq!(server.take_calls(), [unmap]);

    assert_eq!(
        server.connection.complete(&mut server.device, Ok(())),
        Ok(ConnectionStatus::Pending)
    );
    let reply = server.peer.recv().unwrap();
    assert_eq!(
        (reply.header.message_id, reply.header.flags),
        (2, flags::REPLY)
    );
    assert_eq!(reply.payload, packet[16..40]);
    assert_eq!(server.peer.recv().unwrap().header.message_id, 3);
    assert!(server.silent());
    let write = Call::Write {
        index: BAR0,
        offset: 0,
        data: vec![1, 2, 3, 4],
    };
    assert_eq!(server.take_calls(), [write, Call::Reset]);

    assert_eq!(
        server
            .connection
            .complete(&mut server.device, Err(Errno::TIMEDOUT)),
        Ok(ConnectionStatus::Open)
    );
    let reply = server.peer.recv().unwrap();
    assert_eq!(
        (reply.header.message_id, reply.header.error),
        (4, Errno::TIMEDOUT.raw_os_error() as u32)
    );
    assert_eq!(server.peer.recv().unwrap().header.message_id, 5);
    assert_eq!(server.connection.interest(), Interest::Readable);

    // Nothing is pending now: a stray completion answers nothing.
    assert_eq!(
        server.connection.complete(&mut server.device, Ok(())),
        Ok(ConnectionStatus::Open)
    );
    assert!(server.silent());
}

#[test]
fn dma_map_may_be_deferred() {
    let mut server = Server::negotiated();
    server.device.defer = true;
    let file = memfd();
    let fds = [file.as_fd()];
    let pending = Ok(ConnectionStatus::Pending);
    assert_eq!(server.send(&dma_map(2, 0x10000), &fds), pending);
    server
        .peer
        .send(&region_read(3, CONFIG, 0, 4), &[])
        .unwrap();
    assert_eq!(server.pump(), pending);
    assert!(server.silent());
    assert_eq!(server.take_calls().len(), 1);
    let refused = Err(Errno::NOSPC);
    let status = server.connection.complete(&mut server.device, refused);
    assert_eq!(status, Ok(ConnectionStatus::Open));
    let answers = [(2, Errno::NOSPC.raw_os_error() as u32), (3, 0)];
    for (id, error) in answers {
        let reply = server.peer.recv().unwrap();
        assert_eq!((reply.header.message_id, reply.header.error), (id, error));
    }
    // A mapping without a reply holds up the messages behind it all the same.
    let mut posted = dma_map(4, 0x20000);
    posted[8] |= flags::NO_REPLY as u8;
    assert_eq!(server.send(&posted, &fds), pending);
    let status = server.connection.complete(&mut server.device, Ok(()));
    assert_eq!(status, Ok(ConnectionStatus::Open));
    assert!(server.silent());
}

#[test]
fn set_irqs_may_be_deferred() {
    let mut server = Server::negotiated();
    server.device.defer = true;
    let none = irq_set::DATA_NONE | irq_set::ACTION_TRIGGER;
    let message = set_irqs(2, none, MSIX, 0, 0, &[]);
    assert_eq!(server.send(&message, &[]), Ok(ConnectionStatus::Pending));
    assert!(server.silent());
    assert_eq!(
        server.connection.complete(&mut server.device, Ok(())),
        Ok(ConnectionStatus::Open)
    );
    let reply = server.peer.recv().unwrap();
    assert_eq!(
        (reply.header.message_id, reply.header.flags),
        (2, flags::REPLY)
    );
    assert!(reply.payload.is_empty());
}

#[test]
fn pending_operation_without_reply_completes() {
    let mut server = Server::negotiated();
    server.device.defer = true;
    assert_eq!(
        server.send(
            &message(2, Command::DEVICE_RESET, flags::NO_REPLY, &[]),
            &[]
        ),
        Ok(ConnectionStatus::Pending)
    );
    assert_eq!(
        server.connection.complete(&mut server.device, Ok(())),
        Ok(ConnectionStatus::Open)
    );
    assert!(server.silent());
}

#[test]
fn client_leaves_during_pending_operation() {
    let mut server = Server::negotiated();
    server.device.defer = true;
    assert_eq!(
        server.send(&message(2, Command::DEVICE_RESET, 0, &[]), &[]),
        Ok(ConnectionStatus::Pending)
    );
    rustix::net::shutdown(server.peer.as_fd(), rustix::net::Shutdown::Both).unwrap();
    assert_eq!(server.pump(), Ok(ConnectionStatus::Pending));
    assert_eq!(
        server.connection.complete(&mut server.device, Ok(())),
        Ok(ConnectionStatus::Closed)
    );
    assert_eq!(server.take_calls(), [Call::Reset, Call::Disconnected]);
}

#[test]
fn work_per_call_is_bounded() {
    let mut server = Server::with_limits(ServerLimits {
        work_per_call: 8,
        ..ServerLimits::default()
    });
    server.accepted(&bare_version(1), &[]);
    let packet: Vec<u8> = (0..100)
        .flat_map(|i| region_write(i, flags::NO_REPLY, BAR0, 0, &[0; 4]))
        .collect();
    queue(&mut server, &packet, &[]);
    let mut calls = 0;
    loop {
        let status = server.connection.on_ready(&mut server.device).unwrap();
        calls += 1;
        assert!(server.take_calls().len() <= 8);
        if status != ConnectionStatus::MoreWork {
            break;
        }
    }
    assert!(calls >= 100 / 8);
    assert_eq!(server.connection.counters().messages, 101);
}

#[test]
fn client_without_reads_is_not_read_from() {
    let mut server = Server::negotiated();
    let mut sent = 0u16;
    // Replies of 64 KiB fill the socket soon.
    while server.connection.interest() == Interest::Readable {
        server.post(&region_read(sent, 2, 0, 64 << 10), &[]);
        sent += 1;
    }
    assert_eq!(server.connection.interest(), Interest::Writable);
    server.take_calls();
    for _ in 0..4 {
        server.post(&region_read(sent, 2, 0, 64 << 10), &[]);
        sent += 1;
    }
    assert!(server.take_calls().is_empty());
    for id in 0..sent {
        let frame = loop {
            // The rest of a reply follows only when there is room.
            assert_eq!(server.pump(), Ok(ConnectionStatus::Open));
            if !server.silent() {
                break recv_slowly(&mut server);
            }
        };
        assert_eq!(frame.header.message_id, id);
        assert!(
            frame.payload[16..]
                .iter()
                .enumerate()
                .all(|(i, byte)| *byte == pattern(2, i as u64))
        );
    }
    assert!(server.silent());
    assert_eq!(server.connection.interest(), Interest::Readable);
}

/// Receives a message, while the server goes on sending it.
fn recv_slowly(server: &mut Server) -> vfio_user::client::Frame {
    let fd = server.peer.as_fd().try_clone_to_owned().unwrap();
    let mut peer =
        vfio_user::client::RawClient::from_fd(fd, std::time::Duration::from_secs(20)).unwrap();
    let reader = std::thread::spawn(move || peer.recv().unwrap());
    while !reader.is_finished() {
        assert_eq!(server.pump(), Ok(ConnectionStatus::Open));
        std::thread::yield_now();
    }
    reader.join().unwrap()
}

#[test]
fn messages_of_every_alignment_share_packet() {
    let mut server = Server::negotiated();
    let mut packet = Vec::new();
    for i in 1..=100u16 {
        packet.extend(region_write(
            i,
            flags::NO_REPLY,
            BAR0,
            0,
            &vec![i as u8; i as usize],
        ));
    }
    // Larger than the buffer that is used for most messages.
    packet.extend(region_write(0, flags::NO_REPLY, BAR0, 0, &[7; 0x4000]));
    packet.extend(region_write(0, 0, BAR0, 0, &[8; 1]));
    server.post(&packet, &[]);
    let calls = server.take_calls();
    let expected: Vec<_> = (1..=100u8)
        .map(|i| vec![i; i as usize])
        .chain([vec![7; 0x4000], vec![8]])
        .map(|data| Call::Write {
            index: BAR0,
            offset: 0,
            data,
        })
        .collect();
    assert_eq!(calls, expected);
    assert_eq!(
        server.peer.recv().unwrap().payload.len(),
        size_of::<wire::RegionAccess>()
    );
}

/// Configuration space holds bits that take effect only when commands in flight have completed.
#[test]
fn region_write_may_be_deferred() {
    let mut server = Server::negotiated();
    server.device.defer = true;
    let write = region_write(2, 0, CONFIG, 4, &[6, 0]);
    assert_eq!(server.send(&write, &[]), Ok(ConnectionStatus::Pending));
    assert!(server.silent());
    assert_eq!(
        server.connection.complete(&mut server.device, Ok(())),
        Ok(ConnectionStatus::Open)
    );
    let reply = server.peer.recv().unwrap();
    assert_eq!(
        (reply.header.message_id, reply.header.flags),
        (2, flags::REPLY)
    );
    let access = wire::RegionAccess {
        offset: 4,
        region: CONFIG,
        count: 2,
    };
    assert_eq!(reply.payload, access.as_bytes());

    // Several at once are answered together, when the device says so; a posted one holds back what
    // is behind it.
    let entry = |region| wire::MultiWrite {
        offset: 4,
        region,
        count: 2,
        data: [0; 8],
    };
    let count = 3u64.to_ne_bytes();
    let entries = [entry(BAR0), entry(CONFIG), entry(BAR0)];
    let several = message(
        3,
        Command::REGION_WRITE_MULTI,
        0,
        &[&count, entries.as_bytes()],
    );
    server.take_calls();
    assert_eq!(server.send(&several, &[]), Ok(ConnectionStatus::Pending));
    assert_eq!(server.take_calls().len(), 3);
    assert!(server.silent());
    assert_eq!(
        server.connection.complete(&mut server.device, Ok(())),
        Ok(ConnectionStatus::Open)
    );
    assert_eq!(server.peer.recv().unwrap().payload, count);

    let mut posted = region_write(4, flags::NO_REPLY, CONFIG, 4, &[6, 0]);
    posted.extend(region_read(5, CONFIG, 0, 4));
    assert_eq!(server.send(&posted, &[]), Ok(ConnectionStatus::Pending));
    assert!(server.silent());
    assert_eq!(
        server.connection.complete(&mut server.device, Ok(())),
        Ok(ConnectionStatus::Open)
    );
    assert_eq!(server.peer.recv().unwrap().header.message_id, 5);
    assert!(server.silent());
}
