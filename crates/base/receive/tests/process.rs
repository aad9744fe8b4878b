//! Server and receiver process, with clients that send what blocks.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use receive::{AcceptedDescriptors, Intake, Read, ReadError, Receiver, Socket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, accept_with, sendmsg,
    sockopt,
};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(30);
const WANTED: AcceptedDescriptors = AcceptedDescriptors {
    max_fds: 4,
    streams: true,
};
/// Set for a process that is to be the receiver process: a file that it makes.
const CHILD: &str = "VNVME_TEST_RECEIVER";

/// Not a test of its own: what [`receiver`] starts.
#[test]
fn child() {
    if let Some(path) = std::env::var_os(CHILD) {
        // A later one finds no folder any more.
        let _ = std::fs::write(path, "");
        receive::serve(std::io::stdin().as_fd(), || Ok(())).unwrap();
        std::process::exit(0);
    }
}

/// It runs, for the time limit of its first answer begins when it is asked for.
fn receiver() -> Receiver {
    let folder = tempfile::tempdir().unwrap();
    let runs = folder.path().join("runs");
    let start = {
        let runs = runs.clone();
        move || {
            let mut command = Command::new("/proc/self/exe");
            command.args(["--exact", "child"]).env(CHILD, &runs);
            command
        }
    };
    let receiver = Receiver::start(start).unwrap();
    let end = Instant::now() + LIMIT;
    while !runs.exists() {
        assert!(Instant::now() < end, "the receiver process does not run");
        std::thread::sleep(Duration::from_millis(1));
    }
    receiver
}

/// A server with one listening socket.
struct Server {
    directory: tempfile::TempDir,
    listener: UnixListener,
    intake: Intake,
}

impl Server {
    fn new(receiver: &Receiver) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
        let mut intake = Intake::new(receiver, WANTED);
        assert!(intake.connect(listener.as_fd()).unwrap());
        Server {
            directory,
            listener,
            intake,
        }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.directory.path().join("socket")).unwrap()
    }

    fn accept(&self) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        accept_with(&self.listener, flags).unwrap()
    }

    fn admitted(&mut self) -> (UnixStream, Socket) {
        let client = self.connect();
        let socket = self.accept();
        (client, self.intake.admit(socket))
    }

    /// Waits for the receiver process to say something, and takes it in.
    fn turn(&mut self) {
        // An event loop looks at the time once in each round.
        let now = Instant::now();
        match self.intake.fd() {
            Some(fd) => {
                let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
                poll(
                    &mut fds,
                    Some(&Timespec {
                        tv_sec: 0,
                        tv_nsec: 10_000_000,
                    }),
                )
                .unwrap();
                self.intake.ready();
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
        if self.intake.deadline().is_some_and(|at| now >= at) {
            let _ = self.intake.connect(self.listener.as_fd());
        }
    }

    /// What the next read brings that is not waited for.
    fn read(&mut self, socket: &mut Socket) -> Result<(Read, Vec<u8>, Vec<OwnedFd>), ReadError> {
        let end = Instant::now() + LIMIT;
        let (mut bytes, mut fds) = (vec![0; 4096], Vec::new());
        loop {
            let begin = Instant::now();
            let read = socket.read(&mut bytes, &mut fds)?;
            // What blocks here does for an hour.
            assert!(begin.elapsed() < LIMIT, "a read has blocked");
            match read {
                Read::Waiting => self.turn(),
                Read::Bytes { len, .. } => {
                    bytes.truncate(len);
                    return Ok((read, bytes, fds));
                }
                other => return Ok((other, Vec::new(), fds)),
            }
            assert!(Instant::now() < end, "no answer");
        }
    }

    /// What the next look shows that is not waited for.
    fn look(&mut self, socket: &mut Socket) -> (Vec<u8>, Vec<OwnedFd>) {
        let end = Instant::now() + LIMIT;
        let (mut bytes, mut fds) = (vec![0; 4096], Vec::new());
        loop {
            match socket.look(0, &mut bytes, &mut fds).unwrap() {
                Read::Waiting => self.turn(),
                Read::Bytes { len, .. } => {
                    bytes.truncate(len);
                    return (bytes, fds);
                }
                other => panic!("{other:?}"),
            }
            assert!(Instant::now() < end, "no answer");
        }
    }

    fn eventually(&mut self, what: &str, mut holds: impl FnMut(&mut Server) -> bool) {
        let end = Instant::now() + LIMIT;
        while !holds(self) {
            assert!(Instant::now() < end, "{what}");
            self.turn();
        }
    }
}

fn send(client: &UnixStream, bytes: &[u8], fds: &[impl AsFd], flags: SendFlags) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
    let sent = sendmsg(client, &[IoSlice::new(bytes)], &mut control, flags).unwrap();
    assert_eq!(sent, bytes.len());
}

/// A TCP socket with a last `close` that blocks until this is dropped.
struct Poison {
    _peer: TcpStream,
    socket: TcpStream,
}

impl Poison {
    fn new() -> Poison {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        sockopt::set_socket_linger(&socket, Some(Duration::from_secs(3600))).unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 65536]).is_ok() {}
        Poison {
            _peer: peer,
            socket,
        }
    }

    /// Only those to whom it was sent hold it from now on.
    fn sent(self) -> TcpStream {
        self._peer
    }
}

/// Sends poison, which is held up by what is returned.
fn poison(client: &UnixStream, bytes: &[u8], flags: SendFlags) -> TcpStream {
    let poison = Poison::new();
    send(client, bytes, &[&poison.socket], flags);
    poison.sent()
}

/// Runs something that must not block.
fn promptly(what: &str, f: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        f();
        let _ = done.send(());
    });
    let done = is_done.recv_timeout(Duration::from_secs(10));
    assert!(done.is_ok(), "it blocks: {what}");
}

fn memory() -> OwnedFd {
    memfd_create("memory", MemfdFlags::CLOEXEC).unwrap()
}

fn same_file(one: &OwnedFd, other: &OwnedFd) -> bool {
    let of = |fd| {
        rustix::fs::fstat(fd)
            .map(|stat| (stat.st_dev, stat.st_ino))
            .unwrap()
    };
    of(one) == of(other)
}

#[test]
fn bytes_and_harmless_descriptors_arrive_in_order() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let (client, mut socket) = server.admitted();
    assert_eq!(server.read(&mut socket).unwrap().0, Read::Blocked);
    let none: [OwnedFd; 0] = [];
    let files = [memory(), memory()];
    send(&client, b"one", &none, SendFlags::empty());
    send(&client, b"two", &none, SendFlags::empty());
    assert_eq!(server.read(&mut socket).unwrap().1, b"onetwo");
    send(&client, b"three", &none, SendFlags::empty());
    send(&client, b"four", &files, SendFlags::empty());
    send(&client, b"five", &none, SendFlags::empty());
    let (read, bytes, fds) = server.read(&mut socket).unwrap();
    assert_eq!(bytes, b"threefour");
    assert_eq!(read, Read::Bytes { len: 9, more: true });
    assert_eq!(fds.len(), 2);
    assert!(same_file(&fds[0], &files[0]) && same_file(&fds[1], &files[1]));
    let (_, bytes, fds) = server.read(&mut socket).unwrap();
    assert!(bytes == b"five" && fds.is_empty());
    // More than one read of the receiver process.
    let long: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
    let writer = std::thread::spawn({
        let (client, long, file) = (client.try_clone().unwrap(), long.clone(), memory());
        move || {
            send(&client, &long[..1], &[file], SendFlags::empty());
            (&client).write_all(&long[1..]).unwrap();
        }
    });
    let (mut got, mut fds) = (Vec::new(), 0);
    while got.len() < long.len() {
        let (_, bytes, came) = server.read(&mut socket).unwrap();
        got.extend(bytes);
        fds += came.len();
    }
    assert!(got == long && fds == 1);
    writer.join().unwrap();
    drop(client);
    assert_eq!(server.read(&mut socket).unwrap().0, Read::Eof);
}

/// Takes what was looked at from the socket.
fn consume(socket: &mut Socket, pipe: &(OwnedFd, OwnedFd), len: usize) {
    let mut taken = 0;
    while taken < len {
        taken += socket.consume(pipe.1.as_fd(), len - taken).unwrap();
    }
    socket.consumed();
    let level = rustix::io::ioctl_fionread(&pipe.0).unwrap();
    assert_eq!(level, len as u64, "the pipe counts");
    assert_eq!(rustix::io::read(&pipe.0, &mut vec![0; len]), Ok(len));
}

#[test]
fn peeked_message_stays_until_consumed() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let (client, mut socket) = server.admitted();
    let pipe = rustix::pipe::pipe().unwrap();
    let none: [OwnedFd; 0] = [];
    let file = memory();
    send(&client, b"one", &none, SendFlags::empty());
    assert_eq!(server.look(&mut socket).0, b"one");
    send(&client, b"two", &[&file], SendFlags::empty());
    send(&client, b"three", &none, SendFlags::empty());
    for _ in 0..3 {
        let (bytes, fds) = server.look(&mut socket);
        assert_eq!(bytes, b"onetwo");
        assert!(fds.len() == 1 && same_file(&fds[0], &file));
    }
    consume(&mut socket, &pipe, 6);
    let (bytes, fds) = server.look(&mut socket);
    assert!(bytes == b"three" && fds.is_empty());
    // A part of it is enough, and the rest is there still.
    consume(&mut socket, &pipe, 2);
    assert_eq!(server.look(&mut socket).0, b"ree");
    drop(client);
    consume(&mut socket, &pipe, 3);
    let end = socket.look(0, &mut [0; 9], &mut Vec::new());
    assert_eq!(end, Ok(Read::Eof));
}

#[test]
fn look_leaves_out_bytes_that_were_seen() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let (by_receiver, mut received) = server.admitted();
    let (in_place, socket) = UnixStream::pair().unwrap();
    let mut in_place_socket = Socket::in_place(socket.into(), 4);
    let pipe = rustix::pipe::pipe().unwrap();
    let none: [OwnedFd; 0] = [];
    let sockets = [
        (by_receiver, &mut received, true),
        (in_place, &mut in_place_socket, false),
    ];
    for (client, socket, asks_receiver) in sockets {
        let (mut bytes, mut fds) = ([0; 9], Vec::new());
        let all = |len, more| Ok(Read::Bytes { len, more });
        send(&client, b"one", &none, SendFlags::empty());
        assert_eq!(socket.look(0, &mut bytes, &mut fds), all(3, false));
        assert_eq!(socket.look(3, &mut bytes, &mut fds), Ok(Read::Blocked));
        send(&client, b"three", &none, SendFlags::empty());
        assert_eq!(socket.look(3, &mut bytes, &mut fds), all(5, false));
        assert_eq!(bytes[..5], *b"three");
        assert_eq!(socket.look(4, &mut bytes[..2], &mut fds), all(2, true));
        assert_eq!(bytes[..2], *b"hr");
        // Descriptors are seen at the front of the socket.
        send(&client, b"x", &[memory()], SendFlags::empty());
        consume(socket, &pipe, 3);
        if asks_receiver {
            assert_eq!(socket.look(5, &mut bytes, &mut fds), Ok(Read::Blocked));
            assert!(!socket.is_waiting());
        } else {
            assert_eq!(socket.look(5, &mut bytes, &mut fds), all(1, true));
            assert_eq!((bytes[0], fds.len()), (b'x', 1));
        }
        consume(socket, &pipe, 5);
        let (bytes, fds) = server.look(socket);
        assert_eq!((bytes.as_slice(), fds.len()), (&b"x"[..], 1));
        // So is the end.
        drop(client);
        let end = socket.look(1, &mut [0; 9], &mut Vec::new());
        assert_eq!(end, Ok(Read::Blocked));
        consume(socket, &pipe, 1);
        let end = socket.look(0, &mut [0; 9], &mut Vec::new());
        assert_eq!(end, Ok(Read::Eof));
    }
}

/// Consuming drops the descriptors that are in the socket: they are the receiver process's, too.
#[test]
fn consume_blocks_nobody() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let pipe = rustix::pipe::pipe().unwrap();
    let mut held = Vec::new();
    for flags in [SendFlags::empty(), SendFlags::OOB] {
        let (client, mut socket) = server.admitted();
        held.push(poison(&client, b"x", flags));
        let (bytes, fds) = server.look(&mut socket);
        assert!(bytes == b"x" && fds.len() == 1);
        held.push(poison(&client, b"y", flags));
        let pipe = (pipe.0.try_clone().unwrap(), pipe.1.try_clone().unwrap());
        promptly("consume", move || {
            consume(&mut socket, &pipe, 1);
            drop(socket);
        });
    }
    promptly("the end", move || drop(server));
    drop(held);
}

#[test]
fn peek_survives_receiver_process() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let (client, mut socket) = server.admitted();
    let file = memory();
    send(&client, b"x", &[&file], SendFlags::empty());
    let (mut bytes, mut fds) = ([0; 16], Vec::new());
    assert_eq!(socket.look(0, &mut bytes, &mut fds), Ok(Read::Waiting));
    let receiving = Pid::from_raw(receiver.id() as i32).unwrap();
    kill_process(receiving, Signal::KILL).unwrap();
    // It may have answered before, and then holds nothing any more.
    let (bytes, fds) = server.look(&mut socket);
    assert!(bytes == b"x" && same_file(&fds[0], &file));
}

fn signal(receiver: u32, signal: Signal) {
    kill_process(Pid::from_raw(receiver as i32).unwrap(), signal).unwrap();
}

/// Peeked bytes are consumed only while a receiver process has their descriptors.
#[test]
fn peeked_descriptors_are_held_by_the_next_receiver_process() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let (client, mut socket) = server.admitted();
    let pipe = rustix::pipe::pipe().unwrap();
    send(&client, b"xy", &[memory()], SendFlags::empty());
    assert_eq!(server.look(&mut socket).0, b"xy");
    assert_eq!(socket.hold(), Ok(true));
    let first = receiver.id();
    signal(first, Signal::KILL);
    server.eventually("there is another one", |_| receiver.id() != first);
    let consumed = socket.consume(pipe.1.as_fd(), 2);
    assert_eq!(consumed, Err(ReadError::ReceiverGone));
    server.eventually("it is held", |_| socket.hold().unwrap());
    consume(&mut socket, &pipe, 2);
}

fn is_alive(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// A stopped process is one that gets no processor: it is not judged. The client continues beside
/// it, and after it runs again.
#[test]
fn a_receiver_process_that_does_not_run_is_replaced() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let (client, mut socket) = server.admitted();
    let (idle, mut idle_socket) = {
        let mut other = Server::new(&receiver);
        let (client, socket) = other.admitted();
        ((other, client), socket)
    };
    let (mut idle, idle_client) = idle;
    send(&client, b"a", &[memory()], SendFlags::empty());
    assert_eq!(server.read(&mut socket).unwrap().1, b"a");
    let first = receiver.id();
    signal(first, Signal::STOP);
    for _ in 0..3 {
        send(&client, b"b", &[memory()], SendFlags::empty());
        let (_, bytes, fds) = server.read(&mut socket).unwrap();
        assert!(bytes == b"b" && fds.len() == 1);
    }
    assert_ne!(receiver.id(), first);
    assert!(is_alive(first));
    signal(first, Signal::CONT);
    server.eventually("the first one ends", |_| !is_alive(first));
    // Neither client was shut down with it.
    idle.eventually("it is reconnected", |idle| {
        idle.intake.fd().is_some() && idle.intake.deadline().is_none()
    });
    for (server, socket, client) in [
        (&mut server, &mut socket, &client),
        (&mut idle, &mut idle_socket, &idle_client),
    ] {
        send(client, b"c", &[memory()], SendFlags::empty());
        let (_, bytes, fds) = server.read(socket).unwrap();
        assert!(bytes == b"c" && fds.len() == 1);
    }
}

#[test]
fn harmful_descriptor_is_replaced() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let (client, mut socket) = server.admitted();
    let pipe = rustix::pipe::pipe().unwrap().0;
    let file = memory();
    send(
        &client,
        b"x",
        &[file.as_fd(), pipe.as_fd()],
        SendFlags::empty(),
    );
    let (_, _, fds) = server.read(&mut socket).unwrap();
    assert_eq!(fds.len(), 2);
    assert!(same_file(&fds[0], &file));
    let null = std::fs::File::open("/dev/null").unwrap().into();
    assert!(same_file(&fds[1], &null));
    // One more than are wanted.
    send(
        &client,
        b"x",
        &[(); 5].map(|()| memory()),
        SendFlags::empty(),
    );
    assert_eq!(server.read(&mut socket).err(), Some(ReadError::TooManyFds));
}

#[test]
fn blocking_descriptor_blocks_nobody() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let mut held = Vec::new();
    for flags in [SendFlags::empty(), SendFlags::OOB] {
        let (client, mut socket) = server.admitted();
        held.push(poison(&client, b"x", flags));
        // The first is answered: what it was closed for comes after.
        let (_, bytes, fds) = server.read(&mut socket).unwrap();
        assert!(bytes == b"x" && fds.len() == 1);
        // The thread of this client hangs, not that of another.
        let mut other = Server::new(&receiver);
        let (second, mut its) = other.admitted();
        send(&second, b"y", &[memory()], SendFlags::empty());
        assert_eq!(other.read(&mut its).unwrap().1, b"y");
        // Unread.
        held.push(poison(&client, b"z", flags));
        promptly("close", move || drop(socket));
        server.eventually("it is leaving", |s| s.intake.fd().is_some());
    }
    // In a client that is refused.
    let client = server.connect();
    held.push(poison(&client, b"x", SendFlags::empty()));
    let socket = server.accept();
    server.intake.dismiss(socket);
    // In one that nobody has accepted.
    let client = server.connect();
    held.push(poison(&client, b"x", SendFlags::empty()));
    promptly("the end", move || drop(server));
    drop(held);
}

/// Of a protocol without descriptors: many clients at a time.
#[test]
fn plain_clients_are_read_without_blocking() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let none: [OwnedFd; 0] = [];
    let mut clients = Vec::new();
    for _ in 0..4 {
        let client = server.connect();
        let socket = server.accept();
        clients.push((client, server.intake.admit_plain(socket)));
    }
    let mut buf = [0; 64];
    for (client, socket) in &mut clients {
        assert_eq!(socket.read(&mut buf), Ok(Read::Blocked));
        send(client, b"one", &none, SendFlags::empty());
        let read = Read::Bytes {
            len: 3,
            more: false,
        };
        assert_eq!(socket.read(&mut buf), Ok(read));
        assert_eq!(&buf[..3], b"one");
    }
    let mut held = Vec::new();
    for (at, (client, socket)) in clients.into_iter().enumerate() {
        let flags = match at {
            0 => SendFlags::OOB,
            _ => SendFlags::empty(),
        };
        send(&client, b"two", &none, SendFlags::empty());
        held.push(poison(&client, b"x", flags));
        if at == 3 {
            // The process that has a duplicate is gone: another thread closes it.
            let before = Pid::from_raw(receiver.id() as i32).unwrap();
            kill_process(before, Signal::KILL).unwrap();
            // Its successor begins with duplicates of our descriptors, and closes them: none of
            // those may be the last of a client's socket. (A server's is started by a process
            // that has no clients.)
            let first = before.as_raw_nonzero().get() as u32;
            server.eventually("it is there again", |s| {
                receiver.id() != first && s.intake.fd().is_some()
            });
        }
        promptly("it is read and closed", move || {
            // Bytes before what is out of band come by themselves.
            let mut refused = socket.read(&mut [0; 64]);
            if flags == SendFlags::OOB {
                assert!(refused.is_ok());
                refused = socket.read(&mut [0; 64]);
            }
            assert_eq!(refused, Err(ReadError::TooManyFds));
            drop(socket);
        });
        // It sees the end: that of a socket with something unread.
        let end = std::io::Read::read(&mut &client, &mut [0; 8]);
        let reset = std::io::ErrorKind::ConnectionReset;
        assert!(matches!(&end, Ok(0)) || end.is_err_and(|error| error.kind() == reset));
    }
    // Those that sent none leave nothing.
    for _ in 0..100 {
        let client = server.connect();
        let socket = server.accept();
        let socket = server.intake.admit_plain(socket);
        drop(client);
        assert_eq!(socket.read(&mut buf), Ok(Read::Eof));
        drop(socket);
        server.eventually("there is room", |s| !s.intake.is_crowded());
    }
    drop(held);
}

#[test]
fn unclosable_clients_are_counted() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let mut held = Vec::new();
    while !server.intake.is_crowded() {
        assert!(held.len() < 100, "no end of clients");
        let client = server.connect();
        held.push(poison(&client, b"x", SendFlags::empty()));
        let socket = server.accept();
        server.intake.dismiss(socket);
    }
    held.clear();
    server.eventually("their sockets are closed", |s| !s.intake.is_crowded());
    // Others leave no trace.
    for _ in 0..200 {
        let (_client, socket) = server.admitted();
        drop(socket);
        server.eventually("there is room", |s| !s.intake.is_crowded());
    }
}

/// Threads of the receiver process.
fn threads(receiver: &Receiver) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", receiver.id()));
    tasks.unwrap().count()
}

#[test]
fn client_threads_are_limited_and_hanging_client_is_ended() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let (client, mut socket) = server.admitted();
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(poison(&client, b"x", SendFlags::empty()));
    }
    // The first answer comes before its descriptor is closed.
    assert_eq!(server.read(&mut socket).unwrap().1, b"x");
    let before = threads(&receiver);
    assert_eq!(server.read(&mut socket).err(), Some(ReadError::Stuck));
    assert!(threads(&receiver) <= before + 1);
    promptly("close", move || drop(socket));
    // This one hangs before its answer: the socket that it sends is emptied first.
    let (client, mut socket) = server.admitted();
    let (peer, stream) = UnixStream::pair().unwrap();
    held.push(poison(&peer, b"x", SendFlags::empty()));
    send(&client, b"x", &[&stream], SendFlags::empty());
    drop((stream, peer));
    assert_eq!(server.read(&mut socket).err(), Some(ReadError::Stuck));
    promptly("close", move || drop(socket));
    assert!(threads(&receiver) <= before + 3);
}

#[test]
fn killed_receiver_process_is_restarted() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let (client, mut socket) = server.admitted();
    send(&client, b"x", &[memory()], SendFlags::empty());
    server.read(&mut socket).unwrap();
    for _ in 0..3 {
        let before = receiver.id();
        kill_process(Pid::from_raw(before as i32).unwrap(), Signal::KILL).unwrap();
        server.eventually("it is noticed", |_| receiver.id() != before);
        // Asked for while there is none: it waits.
        send(&client, b"x", &[memory()], SendFlags::empty());
        let (_, bytes, fds) = server.read(&mut socket).unwrap();
        assert!(bytes == b"x" && fds.len() == 1);
        assert_ne!(receiver.id(), before);
    }
}

#[test]
fn connections_are_refused_after_server_end() {
    let receiver = receiver();
    let process = receiver.id();
    let mut server = Server::new(&receiver);
    let (client, mut socket) = server.admitted();
    let held = poison(&client, b"x", SendFlags::empty());
    server.read(&mut socket).unwrap();
    let waiting = server.connect();
    let path = server.directory.path().join("socket");
    // As at the end of a server that is killed: its descriptors go, nothing is said.
    let Server {
        directory,
        listener,
        intake,
    } = server;
    std::mem::forget(socket);
    drop((intake, listener, receiver));
    let end = Instant::now() + LIMIT;
    let refused = || UnixStream::connect(&path).is_err();
    while !refused() {
        assert!(Instant::now() < end, "it is still listened to");
        std::thread::sleep(Duration::from_millis(2));
    }
    drop((held, waiting, directory));
    let ended = || std::fs::read_to_string(format!("/proc/{process}/stat"));
    while ended().is_ok_and(|stat| !stat.contains(") Z ")) {
        assert!(Instant::now() < end, "it does not end");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn in_place_socket_passes_descriptors_unchanged() {
    let (client, ours) = UnixStream::pair().unwrap();
    let mut socket = Socket::in_place(ours.into(), 2);
    let pipe = rustix::pipe::pipe().unwrap().0;
    send(&client, b"x", &[pipe], SendFlags::empty());
    let (mut bytes, mut fds) = ([0; 16], Vec::new());
    let read = socket.read(&mut bytes, &mut fds).unwrap();
    assert_eq!(read, Read::Bytes { len: 1, more: true });
    assert_eq!(fds.len(), 1);
    assert_eq!(socket.read(&mut bytes, &mut fds).unwrap(), Read::Blocked);
    send(
        &client,
        b"x",
        &[(); 3].map(|()| memory()),
        SendFlags::empty(),
    );
    let error = socket.read(&mut bytes, &mut fds);
    assert_eq!(error, Err(ReadError::TooManyFds));
    drop(client);
    assert_eq!(socket.read(&mut bytes, &mut fds).unwrap(), Read::Eof);
}

/// Length of a message's header, as of vhost-user.
const HEADER: usize = 12;
const NO_FDS: [OwnedFd; 0] = [];

impl Server {
    /// Reads a whole message as a protocol does that reads a header, then its payload.
    fn message(&mut self, socket: &mut Socket, payload: usize) -> (Vec<u8>, Vec<OwnedFd>) {
        let end = Instant::now() + LIMIT;
        let (mut bytes, mut fds, mut have) = (vec![0; HEADER + payload], Vec::new(), 0);
        while have < bytes.len() {
            let part = if have < HEADER { HEADER } else { bytes.len() };
            match socket.read(&mut bytes[have..part], &mut fds).unwrap() {
                Read::Bytes { len, .. } => have += len,
                Read::Waiting | Read::Blocked => self.turn(),
                Read::Eof => panic!("the end"),
            }
            assert!(Instant::now() < end, "no message");
        }
        (bytes, fds)
    }
}

/// Descriptors come with the first byte of their message, wherever reads and writes end.
#[test]
fn descriptors_stay_with_the_message_of_their_first_byte() {
    let receiver = receiver();
    let mut server = Server::new(&receiver);
    let (client, mut socket) = server.admitted();
    let pause = Duration::from_millis(5);
    let payload = 20;
    for cut in [0, 1, 5, HEADER - 1, HEADER, HEADER + 1, HEADER + payload] {
        for behind in [0, 1, HEADER, HEADER + payload] {
            let files = [memory(), memory()];
            let first: Vec<u8> = (0..(HEADER + payload) as u8).collect();
            let second: Vec<u8> = first.iter().map(|byte| byte ^ 0x80).collect();
            let writer = std::thread::spawn({
                let (client, first, second) =
                    (client.try_clone().unwrap(), first.clone(), second.clone());
                let files = files.each_ref().map(|file| file.try_clone().unwrap());
                move || {
                    // Without descriptors, with two, and with one, back to back.
                    send(&client, &first, &NO_FDS, SendFlags::empty());
                    let begin = cut.max(1);
                    send(&client, &second[..begin], &files, SendFlags::empty());
                    if cut > 0 && cut < second.len() {
                        std::thread::sleep(pause);
                    }
                    if begin < second.len() {
                        send(&client, &second[begin..], &NO_FDS, SendFlags::empty());
                    }
                    let begin = behind.max(1);
                    send(&client, &first[..begin], &files[..1], SendFlags::empty());
                    if begin < first.len() {
                        send(&client, &first[begin..], &NO_FDS, SendFlags::empty());
                    }
                }
            });
            let (bytes, fds) = server.message(&mut socket, payload);
            assert!(
                bytes == first && fds.is_empty(),
                "{cut} {behind}: {}",
                fds.len()
            );
            let (bytes, fds) = server.message(&mut socket, payload);
            assert!(
                bytes == second && fds.len() == 2,
                "{cut} {behind}: {}",
                fds.len()
            );
            assert!(same_file(&fds[0], &files[0]) && same_file(&fds[1], &files[1]));
            let (bytes, fds) = server.message(&mut socket, payload);
            assert!(
                bytes == first && fds.len() == 1,
                "{cut} {behind}: {}",
                fds.len()
            );
            assert!(same_file(&fds[0], &files[0]));
            writer.join().unwrap();
        }
    }
}
