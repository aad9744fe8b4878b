//! Properties: no stream of bytes does harm, and how a stream is cut makes no difference.

use crate::common::*;
use proptest::prelude::*;
use std::os::fd::{AsFd, OwnedFd};
use vfio_user::wire::{self, Command, flags, irq_set};
use vfio_user::{ConnectionStatus, Errno, Interest, ServerLimits};
use zerocopy::IntoBytes;

/// A message of a client that keeps the rules.
#[derive(Debug, Clone)]
enum Step {
    Map { iova: u64, fd: bool },
    Unmap { fd: bool },
    Read { offset: u64, count: u32 },
    Write { count: usize, posted: bool },
    Irqs { count: u32, fds: bool },
    Info,
    Reset,
    Unknown { length: usize, posted: bool },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..1000u64, any::<bool>()).prop_map(|(page, fd)| Step::Map {
            iova: page << 14,
            fd
        }),
        any::<bool>().prop_map(|fd| Step::Unmap { fd }),
        (0..0x1800u64, 0..70u32).prop_map(|(offset, count)| Step::Read { offset, count }),
        (prop_oneof![Just(4usize), 0..200usize], any::<bool>())
            .prop_map(|(count, posted)| Step::Write { count, posted }),
        (1..17u32, any::<bool>()).prop_map(|(count, fds)| Step::Irqs { count, fds }),
        Just(Step::Info),
        Just(Step::Reset),
        (0..50usize, any::<bool>()).prop_map(|(length, posted)| Step::Unknown { length, posted }),
    ]
}

/// The message, and how many descriptors go with it.
fn encode(id: u16, step: &Step) -> (Vec<u8>, usize) {
    let posted = |posted: bool| if posted { flags::NO_REPLY } else { 0 };
    match *step {
        Step::Map { iova, fd } => (dma_map(id, iova), usize::from(fd)),
        Step::Unmap { fd } => (dma_unmap(id, 0x4000), usize::from(fd)),
        Step::Read { offset, count } => (region_read(id, CONFIG, offset, count), 0),
        Step::Write { count, posted: p } => (
            region_write(id, posted(p), BAR0, 0x10, &vec![id as u8; count]),
            0,
        ),
        Step::Irqs { count, fds } => {
            let flags = irq_set::DATA_EVENTFD | irq_set::ACTION_TRIGGER;
            (
                set_irqs(id, flags, MSIX, 3, count, &[]),
                if fds { count as usize } else { 0 },
            )
        }
        Step::Info => {
            let info = wire::DeviceInfo {
                argsz: 16,
                ..Default::default()
            };
            (
                message(id, Command::DEVICE_GET_INFO, 0, &[info.as_bytes()]),
                0,
            )
        }
        Step::Reset => (message(id, Command::DEVICE_RESET, 0, &[]), 0),
        Step::Unknown { length, posted: p } => (
            message(id, Command::DIRTY_PAGES, posted(p), &[&vec![1; length]]),
            0,
        ),
    }
}

/// A piece that is sent at once, and the files with descriptors sent along with its first byte.
struct Piece {
    bytes: Vec<u8>,
    fds: Vec<usize>,
}

/// Sends the pieces; after those for which `pump` says so the server works.
/// Returns all that it answered.
fn deliver(
    server: &mut Server,
    files: &[OwnedFd],
    pieces: &[Piece],
    mut pump: impl FnMut(usize) -> bool,
) -> Vec<u8> {
    let mut replies = Vec::new();
    for (i, piece) in pieces.iter().enumerate() {
        let mut rest = &piece.bytes[..];
        let mut fds: Vec<_> = piece.fds.iter().map(|file| files[*file].as_fd()).collect();
        while !rest.is_empty() {
            match try_send(server.peer.as_fd(), rest, &fds) {
                Ok(n) => {
                    rest = &rest[n..];
                    fds.clear();
                }
                Err(Errno::AGAIN) => work(server, &mut replies),
                Err(errno) => panic!("{errno}"),
            }
        }
        if pump(i) {
            work(server, &mut replies);
        }
    }
    work(server, &mut replies);
    replies
}

/// Lets the server work until it waits for input; deferred operations end at once.
fn work(server: &mut Server, replies: &mut Vec<u8>) {
    loop {
        let mut status = server.pump().unwrap();
        while status == ConnectionStatus::Pending {
            status = server
                .connection
                .complete(&mut server.device, Ok(()))
                .unwrap();
        }
        let mut buf = [0; 65536];
        loop {
            match rustix::net::recv(
                server.peer.as_fd(),
                &mut buf[..],
                rustix::net::RecvFlags::DONTWAIT,
            ) {
                Ok((n, _)) if n > 0 => replies.extend_from_slice(&buf[..n]),
                _ => break,
            }
        }
        // A budget that is used up by reading may leave bytes in the socket.
        let waiting = rustix::io::ioctl_fionread(server.connection.as_fd()).unwrap();
        if waiting == 0
            && status == ConnectionStatus::Open
            && server.connection.interest() == Interest::Readable
        {
            break;
        }
    }
}

/// Delivers the messages one by one, then cut at `cuts` (stream offsets), the server working
/// after those pieces for which `pumps`, over and over, says so: both make the same calls
/// and have the same replies.
fn calls_by_split(steps: &[Step], cuts: &[usize], pumps: &[bool], defer: bool, work_per_call: u32) {
    let files: Vec<_> = (0..16).map(|_| memfd()).collect();
    let mut next_file = 0;
    let mut messages = vec![Piece {
        bytes: bare_version(0),
        fds: vec![],
    }];
    for (i, step) in steps.iter().enumerate() {
        let (bytes, count) = encode(i as u16, step);
        let fds = (0..count).map(|n| (next_file + n) % files.len()).collect();
        next_file += count;
        messages.push(Piece { bytes, fds });
    }

    // One by one.
    let mut server = Server::new();
    server.device.defer = defer;
    let replies = deliver(&mut server, &files, &messages, |_| true);
    let calls = server.take_calls();

    // Cut anywhere, but so that no packet with descriptors also has the beginning of another
    // message that may have some: no client does that, and no server could tell which is meant.
    let mut pieces: Vec<Piece> = Vec::new();
    let mut position = 0;
    for message in &messages {
        let command = Command(u16::from_ne_bytes([message.bytes[2], message.bytes[3]]));
        for (i, byte) in message.bytes.iter().enumerate() {
            let forced = i == 0 && (command.may_carry_fds() || !message.fds.is_empty());
            if forced || position == 0 || cuts.contains(&position) {
                pieces.push(Piece {
                    bytes: vec![],
                    fds: if i == 0 { message.fds.clone() } else { vec![] },
                });
            }
            pieces.last_mut().unwrap().bytes.push(*byte);
            position += 1;
        }
    }
    let mut server = Server::with_limits(ServerLimits {
        work_per_call,
        ..ServerLimits::default()
    });
    server.device.defer = defer;
    let cut_replies = deliver(&mut server, &files, &pieces, |i| pumps[i % pumps.len()]);
    assert_eq!(server.take_calls(), calls);
    assert_eq!(cut_replies, replies);
}

/// Three messages' descriptors come before the first one can be delivered.
#[test]
fn descriptors_of_three_messages_are_held() {
    let irqs = || Step::Irqs {
        count: 16,
        fds: true,
    };
    let steps = [irqs(), irqs(), irqs()];
    let version = bare_version(0).len();
    let size = encode(0, &irqs()).0.len();
    // The first two arrive byte first.
    let cuts = [version + 1, version + size + 1];
    calls_by_split(&steps, &cuts, &[false], false, 70);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_split_yields_same_calls(
        steps in prop::collection::vec(step(), 1..30),
        cuts in prop::collection::vec(0..2000usize, 0..60),
        pumps in prop::collection::vec(any::<bool>(), 16),
        defer in any::<bool>(),
        work_per_call in 1..70u32,
    ) {
        calls_by_split(&steps, &cuts, &pumps, defer, work_per_call);
    }

    #[test]
    fn random_bytes_do_no_harm(
        negotiate in any::<bool>(),
        chunks in prop::collection::vec(
            (
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 1..200),
                    // Something like a message.
                    (0..20u16, 0..80u32, prop_oneof![Just(0u32), Just(16), any::<u32>()], prop::collection::vec(0..40u8, 0..64))
                        .prop_map(|(command, size, flags, payload)| {
                            let mut bytes = message(1, Command(command), flags, &[&payload]);
                            if size < 16 {
                                bytes[4..8].copy_from_slice(&size.to_ne_bytes());
                            }
                            bytes
                        }),
                    step().prop_map(|step| encode(1, &step).0),
                ],
                prop_oneof![4 => Just(0usize), 1 => 1..20usize],
            ),
            0..40,
        ),
    ) {
        let file = memfd();
        let mut server = if negotiate { Server::negotiated() } else { Server::new() };
        let mut closed = false;
        for (bytes, fds) in &chunks {
            let fds = vec![file.as_fd(); *fds];
            match try_send(server.peer.as_fd(), bytes, &fds) {
                Ok(_) | Err(Errno::AGAIN) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    prop_assert!(closed);
                    break;
                }
                Err(errno) => panic!("{errno}"),
            }
            match server.pump() {
                Ok(ConnectionStatus::Open) => prop_assert!(!closed),
                Ok(ConnectionStatus::Closed) | Err(_) => closed = true,
                Ok(status) => panic!("{status:?}"),
            }
        }
        let ends = server.device.calls.iter().filter(|call| **call == Call::Disconnected).count();
        prop_assert_eq!(ends, usize::from(closed));
    }
}
