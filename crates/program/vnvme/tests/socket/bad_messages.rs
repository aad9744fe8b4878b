//! Messages that no correct client sends: the connection ends, or the command is refused, and the
//! server continues.

use std::os::fd::AsFd;

use vfio_user::client::{Client, ClientError, RawClient};
use vfio_user::wire::{self, Command, Header, flags};
use zerocopy::IntoBytes;

use crate::common::*;

pub fn message(command: u16, flags: u32, size: Option<u32>, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        message_id: 7,
        command: Command(command),
        message_size: size.unwrap_or(16 + payload.len() as u32),
        flags,
        error: 0,
    };
    [header.as_bytes(), payload].concat()
}

pub fn version(major: u16, text: &[u8]) -> Vec<u8> {
    let version = wire::Version { major, minor: 0 };
    message(1, 0, None, &[version.as_bytes(), text].concat())
}

/// Reads messages until the server closes the connection.
fn closed(client: &mut RawClient) -> Vec<u32> {
    let mut errors = Vec::new();
    loop {
        match client.recv() {
            Ok(frame) => errors.push(frame.header.error),
            Err(ClientError::Closed) => return errors,
            Err(error) => panic!("not closed: {error}"),
        }
    }
}

/// Sends, although the server may close meanwhile.
fn send(client: &mut RawClient, bytes: &[u8]) {
    match client.send(bytes, &[]) {
        Ok(()) | Err(ClientError::Closed) => {}
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn malformed_message_ends_connection() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let mut daemon = Daemon::serve(&test_dir, &[&disk]);
    let data = pattern(1, 4096);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &data);
    drop(host);
    let open = daemon.settled_descriptors();

    let info = message(
        4,
        0,
        None,
        &[16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    );
    let negotiated = version(0, b"");
    let after = |bytes: &[u8]| [&negotiated, bytes].concat();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("noise", pattern(2, 4096)),
        ("zeroes", vec![0; 4096]),
        ("ones", vec![0xff; 4096]),
        // An HTTP request is answered: `crate::errors`.
        ("a command before the version", info.clone()),
        ("a reply first", message(1, flags::REPLY, None, &[0; 4])),
        ("another major version", version(7, b"")),
        ("a version too short", message(1, 0, None, &[0, 0])),
        ("a text that is no JSON", version(0, b"capabilities?\0")),
        ("a text without its end", version(0, b"{}")),
        (
            "a text that is deep",
            version(0, &[vec![b'['; 60_000], vec![0]].concat()),
        ),
        (
            "sixteen bytes that say fifteen",
            message(1, 0, Some(15), &[]),
        ),
        ("a size of nothing", message(1, 0, Some(0), &[])),
        ("a size of all ones", message(1, 0, Some(u32::MAX), &[])),
        (
            "later: a size of nothing",
            after(&message(4, 0, Some(0), &[])),
        ),
        (
            "later: a size of all ones",
            after(&message(4, 0, Some(u32::MAX), &[])),
        ),
        (
            "later: a write of 1 GiB",
            after(&message(10, 0, Some(1 << 30), &[0; 16])),
        ),
        ("later: noise", after(&pattern(3, 8192))),
    ];
    for (what, bytes) in &cases {
        let mut client = RawClient::connect(&test_dir.socket(), WAIT_TIMEOUT).unwrap();
        send(&mut client, bytes);
        // The server waits for the rest of a message until the client has disconnected.
        rustix::net::shutdown(client.as_fd(), rustix::net::Shutdown::Write).unwrap();
        closed(&mut client);
        assert!(daemon.is_alive(), "{what}");
    }
    // The next client finds a working controller and its data.
    let mut host = Host::up(&test_dir.socket());
    assert!(host.read(1, 0, 4096) == data);
    drop(host);
    daemon.wait_descriptors(open);
    daemon.end();
}

/// These end the connection without the client's help: the server must not wait for more.
#[test]
fn fatal_message_ends_connection_at_once() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let negotiated = version(0, b"");
    let cases = [
        ("a size of nothing", message(1, 0, Some(0), &[])),
        ("a size of all ones", message(1, 0, Some(u32::MAX), &[])),
        ("a command before the version", message(13, 0, None, &[])),
        (
            "later: a size of nothing",
            [&negotiated[..], &message(13, 0, Some(0), &[])].concat(),
        ),
        (
            "later: a size of all ones",
            [&negotiated[..], &message(13, 0, Some(u32::MAX), &[])].concat(),
        ),
    ];
    for (what, bytes) in &cases {
        let mut client = RawClient::connect(&test_dir.socket(), WAIT_TIMEOUT).unwrap();
        send(&mut client, bytes);
        let replies = closed(&mut client);
        assert!(replies.len() < 2, "{what}: {replies:?}");
    }
    // The log has the reason for each of them.
    eventually("a reason for each", || {
        let log = daemon.log();
        let reasons = log
            .iter()
            .filter(|line| line.contains("client disconnected") && line.contains("error="));
        reasons.count() == cases.len()
    });
    daemon.end();
}

#[test]
fn invalid_message_is_refused_and_connection_continues() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    let mut refused = |command: u16, payload: &[u8]| {
        host.client
            .send(Command(command), 0, &[payload], &[])
            .unwrap();
        let reply = host.client.raw().recv().unwrap();
        assert_eq!(reply.header.command, Command(command));
        assert_ne!(reply.header.error, 0, "command {command}");
    };
    // Unknown commands, those that only a server sends, and every known one too short or full of
    // ones (which Get Info takes: it ignores what follows its size).
    for command in [0, 11, 12, 14, 17, 99, u16::MAX] {
        refused(command, &[0; 32]);
    }
    for command in [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15] {
        refused(command, &[0xff; 3]);
        if command != 4 {
            refused(command, &[0xff; 200]);
        }
    }
    // An empty map, a map that overflows, a map over an existing one.
    for (address, size) in [(0u64, 0u64), (u64::MAX - 4095, 8192), (RAM_BASE, 4096)] {
        let fields = [32u64 | 3 << 32, 0, address, size];
        refused(2, fields.as_bytes());
    }
    host.write(1, 0, &pattern(1, 512));
    drop(host);
    daemon.end();
}

#[test]
fn byte_by_byte_messages_are_handled() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut raw = RawClient::connect(&test_dir.socket(), WAIT_TIMEOUT).unwrap();
    for byte in [
        version(0, b""),
        message(
            4,
            0,
            None,
            &[16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ),
    ]
    .concat()
    {
        raw.send(&[byte], &[]).unwrap();
    }
    assert_eq!(raw.recv().unwrap().header.error, 0);
    assert_eq!(raw.recv().unwrap().payload.len(), 16);
    // The rest of a message is never sent.
    raw.send(&message(13, 0, None, &[])[..9], &[]).unwrap();
    leave(raw);
    Client::connect(test_dir.socket(), WAIT_TIMEOUT).unwrap();
    daemon.end();
}

#[test]
fn excess_descriptors_end_connection() {
    let test_dir = TestDir::new();
    let mut daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    leave(Client::connect(test_dir.socket(), WAIT_TIMEOUT).unwrap());
    daemon.wait_log(|line| line.contains("client disconnected"));
    let open = daemon.settled_descriptors();
    let file = memfd(4096);
    for count in [1, 16, 17, 32] {
        let mut client = RawClient::connect(&test_dir.socket(), WAIT_TIMEOUT).unwrap();
        client.send(&version(0, b""), &[]).unwrap();
        client.recv().unwrap();
        let fds = vec![file.as_fd(); count];
        // Device reset takes none.
        client.send(&message(13, 0, None, &[]), &fds).unwrap();
        rustix::net::shutdown(client.as_fd(), rustix::net::Shutdown::Write).unwrap();
        closed(&mut client);
    }
    assert!(daemon.is_alive());
    daemon.wait_descriptors(open);
    daemon.end();
}

#[test]
fn client_without_reads_uses_bounded_memory() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let mut client = RawClient::connect(&test_dir.socket(), WAIT_TIMEOUT).unwrap();
    client.send(&version(0, b""), &[]).unwrap();
    client.recv().unwrap();
    // 4 KiB come back for each of these; when the socket is full the server must wait, not collect.
    let read = wire::RegionAccess {
        offset: 0,
        region: CONFIG,
        count: 4096,
    };
    let read = message(9, 0, None, read.as_bytes());
    rustix::net::sockopt::set_socket_timeout(
        client.as_fd(),
        rustix::net::sockopt::Timeout::Send,
        Some(std::time::Duration::from_millis(300)),
    )
    .unwrap();
    let before = status_kib(daemon.pid(), "VmRSS");
    let mut sent = 0;
    while client.send(&read, &[]).is_ok() {
        sent += 1;
        assert!(sent < 1_000_000, "replies are collected without bound");
    }
    let grown = status_kib(daemon.pid(), "VmRSS").saturating_sub(before);
    assert!(grown < 64 << 10, "{grown} KiB more after {sent} messages");
    // The process does not spin meanwhile (50 ticks would be all of the time), and ends when told
    // so.
    let before = ticks(daemon.pid());
    std::thread::sleep(std::time::Duration::from_millis(500));
    let used = ticks(daemon.pid()) - before;
    assert!(used < 20, "{used} ticks");
    daemon.end();
}
