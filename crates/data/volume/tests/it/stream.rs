//! Connections on a worker's ring: bytes and guest memory, in pieces; and their end, with
//! operations under way.

use crate::common::{BOUND, Guest, bytes};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;
use volume::{Incoming, Io, IoOptions, Outgoing, RingStream};

fn pair(io: &Io) -> (RingStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (io.streams().unwrap().open(OwnedFd::from(ours)), theirs)
}

fn wait<T>(io: &Io, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        io.flush();
        io.poll(&mut |_| panic!("no request was made"));
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < BOUND, "nothing comes");
        if io.arm() {
            crate::common::sleep(io);
        }
    }
}

/// Sends all of it, however often the socket is full.
fn send(io: &Io, stream: &RingStream, mut outgoing: Outgoing) -> Outgoing {
    loop {
        stream.send(outgoing).unwrap();
        let (sent, result) = wait(io, || stream.sent());
        outgoing = sent;
        outgoing.advance(result.unwrap());
        if outgoing.left() == 0 {
            return outgoing;
        }
    }
}

#[test]
fn bytes_and_memory_keep_order_when_sent() {
    let io = Io::new(IoOptions::default());
    let guest = Guest::new(4 << 20);
    let (stream, mut other) = pair(&io);
    let data: Vec<u8> = (0..1u32 << 20).map(|n| (n / 7) as u8).collect();
    let mut outgoing = Outgoing::new();
    outgoing.bytes(b"head");
    outgoing.bytes(b"er");
    outgoing.data(7, guest.holding(0, &data));
    outgoing.bytes(b"tail");
    // More pieces than one operation takes.
    let pieces: Vec<(u64, u64)> = (0..2000).map(|n| ((2 << 20) + n * 16, 8)).collect();
    let many = guest.list(&pieces);
    many.fill(9);
    outgoing.data(8, many);
    assert!(outgoing.holds(7) && outgoing.holds(8) && !outgoing.holds(9));
    let len = outgoing.left();
    let reader = std::thread::spawn(move || {
        let mut all = vec![0; len as usize];
        other.read_exact(&mut all).unwrap();
        all
    });
    let mut sent = send(&io, &stream, outgoing);
    let all = reader.join().unwrap();
    assert!(all == [b"header", &data[..], b"tail", &[9; 16_000]].concat());
    let mut names = Vec::new();
    sent.clear(|name, list| names.push((name, list.count())));
    assert_eq!(names, [(7, 1), (8, 2000)]);
    assert_eq!(sent.left(), 0);
}

#[test]
fn expected_data_is_received_in_place() {
    let io = Io::new(IoOptions::default());
    let guest = Guest::new(1 << 20);
    let (stream, mut other) = pair(&io);
    other.write_all(b"abcdefghijklmno").unwrap();
    let mut incoming = Incoming::new(8);
    let list = guest.list(&[(0, 4), (100, 4)]);
    list.fill(b'.');
    incoming.direct = Some((list, 2, 5));
    stream.receive(incoming).unwrap();
    let (mut incoming, result) = wait(&io, || stream.received());
    assert_eq!(incoming.received(result.unwrap()), 5);
    let (list, ..) = incoming.direct.take().unwrap();
    assert_eq!(bytes(&list), b"..abcde.");
    assert_eq!(incoming.bytes(), b"fghijklm");
    // There is no room before something is used.
    let mut incoming = stream.receive(incoming).unwrap_err();
    incoming.consume(6);
    stream.receive(incoming).unwrap();
    let (mut incoming, result) = wait(&io, || stream.received());
    assert_eq!(incoming.received(result.unwrap()), 0);
    assert_eq!(incoming.bytes(), b"lmno");
    drop(other);
    stream.receive(incoming).unwrap();
    let (_, result) = wait(&io, || stream.received());
    assert_eq!(result.unwrap(), 0);
}

/// The end does not wait for the other side; memory stays until the kernel has ended.
#[test]
fn connection_ends_with_operations_in_flight() {
    let guest = Guest::new(8 << 20);
    let io = Io::new(IoOptions::default());
    let (stream, other) = pair(&io);
    let mut outgoing = Outgoing::new();
    // More than the socket takes.
    outgoing.data(1, guest.piece(0, 8 << 20));
    stream.send(outgoing).unwrap();
    stream.receive(Incoming::new(100)).unwrap();
    assert!(stream.send(Outgoing::new()).is_err(), "two at a time");
    stream.push();
    assert!(stream.sent().is_none() && !stream.has_news());
    stream.shut_down();
    let (mut outgoing, result) = wait(&io, || stream.sent());
    assert!(result.is_err() || result.unwrap() < 8 << 20);
    outgoing.clear(|_, list| assert_eq!(list.len_bytes(), 8 << 20));
    assert_eq!(wait(&io, || stream.received()).1.unwrap(), 0);
    drop(other);
    // The stream is dropped before its operations end.
    let (stream, other) = pair(&io);
    let mut outgoing = Outgoing::new();
    outgoing.data(1, guest.piece(0, 8 << 20));
    stream.send(outgoing).unwrap();
    stream.receive(Incoming::new(100)).unwrap();
    stream.push();
    drop(stream);
    let (stream, mut third) = pair(&io);
    stream.receive(Incoming::new(100)).unwrap();
    third.write_all(b"new").unwrap();
    let (mut incoming, result) = wait(&io, || stream.received());
    incoming.received(result.unwrap());
    assert_eq!(
        incoming.bytes(),
        b"new",
        "a stale answer went to the new one"
    );
    stream.receive(incoming).unwrap();
    drop(stream);
    drop(io);
    drop(other);
}

/// Memory is returned, and the connection continues.
#[test]
fn cancelled_operations_leave_connection_open() {
    let guest = Guest::new(8 << 20);
    let io = Io::new(IoOptions::default());
    let (stream, mut other) = pair(&io);
    let mut outgoing = Outgoing::new();
    outgoing.data(1, guest.piece(0, 8 << 20));
    stream.send(outgoing).unwrap();
    let mut incoming = Incoming::new(100);
    incoming.direct = Some((guest.piece(0, 4096), 0, 4096));
    stream.receive(incoming).unwrap();
    stream.push();
    stream.cancel();
    let (mut outgoing, sent) = wait(&io, || stream.sent());
    let sent = sent.unwrap_or(0);
    assert!(sent < 8 << 20);
    outgoing.clear(|_, list| assert_eq!(list.len_bytes(), 8 << 20));
    let (mut incoming, received) = wait(&io, || stream.received());
    assert_eq!(received.unwrap_err().raw_os_error(), Some(libc::ECANCELED));
    incoming.clear();
    // Sent bytes have arrived, and more can be sent and received.
    let reader = std::thread::spawn(move || {
        let mut all = vec![0; sent as usize + 4];
        other.read_exact(&mut all).unwrap();
        other.write_all(b"pong").unwrap();
        all.split_off(sent as usize)
    });
    outgoing.bytes(b"ping");
    send(&io, &stream, outgoing);
    stream.receive(incoming).unwrap();
    let (mut incoming, received) = wait(&io, || stream.received());
    assert_eq!(incoming.received(received.unwrap()), 0);
    assert_eq!(incoming.bytes(), b"pong");
    assert_eq!(reader.join().unwrap(), b"ping");
}

/// A worker that polls need not use the ring: bytes that have arrived are there after one look.
#[test]
fn sockets_are_read_directly_while_bytes_arrive_soon() {
    let io = Io::new(IoOptions::default());
    let (stream, mut other) = pair(&io);
    let mut incoming = Incoming::new(100);
    for _ in 0..100 {
        let mut outgoing = Outgoing::new();
        outgoing.bytes(b"ping");
        stream.send(outgoing).unwrap();
        assert_eq!(stream.sent().unwrap().1.unwrap(), 4, "sent at once");
        stream.receive(incoming).unwrap();
        other.write_all(b"pong").unwrap();
        io.poll(&mut |_| panic!("no request was made"));
        let (came, received) = stream.received().expect("received at once");
        incoming = came;
        incoming.received(received.unwrap());
        assert_eq!(incoming.bytes(), b"pong");
        incoming.clear();
    }
    let counters = io.counters();
    assert_eq!(counters.batches, 0, "{counters:?}");
    assert_eq!(counters.system_calls, 200, "{counters:?}");
}

/// Where bytes are late again and again, the socket is not asked: the ring waits for them.
#[test]
fn sockets_with_late_bytes_are_not_read_directly() {
    let io = Io::new(IoOptions::default());
    let (stream, mut other) = pair(&io);
    let mut incoming = Incoming::new(100);
    let calls = |io: &Io| io.counters().system_calls;
    for late in 0..20 {
        stream.receive(incoming).unwrap();
        let before = calls(&io);
        let began = Instant::now();
        let mut rounds = 0;
        while began.elapsed().as_millis() < 2 || rounds < 100 {
            io.flush();
            io.poll(&mut |_| panic!("no request was made"));
            rounds += 1;
        }
        // A single call gives it to the ring.
        let asked = calls(&io) - before;
        assert!(
            late < 8 || asked <= 1,
            "{asked} system calls the {late}th time"
        );
        other.write_all(b"late").unwrap();
        let (came, received) = wait(&io, || stream.received());
        incoming = came;
        incoming.received(received.unwrap());
        assert_eq!(incoming.bytes(), b"late");
        incoming.clear();
    }
}

/// However many connections there are, a round asks few sockets.
#[test]
fn round_reads_few_sockets_directly() {
    let io = Io::new(IoOptions::default());
    let mut pairs: Vec<_> = (0..30).map(|_| pair(&io)).collect();
    for (stream, _) in &pairs {
        stream.receive(Incoming::new(100)).unwrap();
    }
    io.flush();
    let before = io.counters().system_calls;
    io.poll(&mut |_| panic!("no request was made"));
    assert!(io.counters().system_calls - before <= 8);
    for (_, other) in &mut pairs {
        other.write_all(b"x").unwrap();
    }
    for (stream, _) in &pairs {
        let (mut incoming, received) = wait(&io, || stream.received());
        incoming.received(received.unwrap());
        assert_eq!(incoming.bytes(), b"x");
    }
}
