//! Clients that send descriptors whose `close` blocks as long as they like. No other client
//! notices, and the process ends when it is asked to.
//!
//! A program of its own: a process that is started while a test holds such a descriptor inherits
//! it, and may hang when it closes it on exec. Here the one excludes the other ([`APART`]).
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "../socket/common/mod.rs"]
#[allow(dead_code, unused_imports)] // What the tests of the sockets use.
mod common;
mod export;
mod lingering;

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::SendFlags;
use rustix::process::Signal;
use vfio_user::wire::{self, Command, Header};
use zerocopy::IntoBytes;

use crate::common::*;
use crate::lingering::{Lingering, send_fds};

/// Held while a process is started, or a descriptor whose `close` blocks is in this one.
static APART: Mutex<()> = Mutex::new(());

fn apart() -> MutexGuard<'static, ()> {
    APART.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Long for an answer, short for one that waits for poison: that lasts an hour.
const PROMPT: Duration = Duration::from_secs(10);

fn message(command: Command, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        message_id: 7,
        command,
        message_size: 16 + payload.len() as u32,
        flags: 0,
        error: 0,
    };
    [header.as_bytes(), payload].concat()
}

fn version() -> Vec<u8> {
    let version = wire::Version { major: 0, minor: 0 };
    message(Command::VERSION, version.as_bytes())
}

fn dma_map() -> Vec<u8> {
    let map = wire::DmaMap {
        argsz: size_of::<wire::DmaMap>() as u32,
        flags: wire::dma::READ | wire::dma::WRITE,
        offset: 0,
        address: 1 << 32,
        size: 1 << 20,
    };
    message(Command::DMA_MAP, map.as_bytes())
}

/// Message that sets one eventfd for each of the first vectors.
fn set_irqs(count: u32) -> Vec<u8> {
    let set = wire::IrqSet {
        argsz: size_of::<wire::IrqSet>() as u32,
        flags: wire::irq_set::DATA_EVENTFD | wire::irq_set::ACTION_TRIGGER,
        index: MSIX,
        start: 0,
        count,
    };
    message(Command::DEVICE_SET_IRQS, set.as_bytes())
}

/// Bytes and descriptors that a hostile client sends: before, with, and after the descriptors.
struct Attack {
    what: &'static str,
    before: Vec<u8>,
    with: Vec<u8>,
    flags: SendFlags,
    fds: usize,
    times: usize,
    /// The descriptor is in a Unix socket, which is sent.
    nested: bool,
}

/// A message of a vhost-user front-end, of 32-bit words.
fn request(number: u32, payload: &[u32]) -> Vec<u8> {
    let size = size_of_val(payload) as u32;
    let words = [&[number, 1, size], payload].concat();
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Attacks of a hostile front-end ("Vhost-user Protocol", Front-end message types).
fn front_end_attacks() -> Vec<Attack> {
    // BACKEND_REQ is protocol feature 5.
    let channel = request(16, &[1 << 5, 0]);
    let table = [1, 0, 0, 0, 0x10_0000, 0, 0, 0, 0, 0];
    vec![
        attack("garbage of a front-end", Vec::new(), pattern(6, 300)),
        attack("SET_OWNER", Vec::new(), request(3, &[])),
        attack("SET_MEM_TABLE", request(3, &[]), request(5, &table)),
        attack("SET_VRING_KICK", request(3, &[]), request(12, &[0, 0])),
        attack("SET_VRING_CALL", request(3, &[]), request(13, &[0, 0])),
        attack("SET_BACKEND_REQ_FD", channel.clone(), request(21, &[])),
        Attack {
            nested: true,
            ..attack("a channel with poison in it", channel, request(21, &[]))
        },
        Attack {
            fds: 253,
            times: 5,
            ..attack("as many as there can be", Vec::new(), request(5, &table))
        },
        Attack {
            flags: SendFlags::OOB,
            ..attack("out of band", request(3, &[]), vec![1])
        },
    ]
}

/// Attacks of a hostile client of the control socket. Its protocol has no descriptors.
fn control_attacks() -> Vec<Attack> {
    let request = || b"GET /v1/stats HTTP/1.1\r\nHost: x\r\n\r\n".to_vec();
    let events = b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n".to_vec();
    let post = b"POST /v1/apply HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".to_vec();
    vec![
        attack("a request", Vec::new(), request()),
        attack("half a request", b"GET /v1/st".to_vec(), b"a".to_vec()),
        attack("behind a request", request(), request()),
        attack("nonsense behind a request", request(), pattern(7, 300)),
        attack("a body", post, b"{}".to_vec()),
        attack("as a listener", events, pattern(9, 8)),
        Attack {
            fds: 253,
            times: 5,
            ..attack("as many as there can be", Vec::new(), pattern(8, 8))
        },
        Attack {
            flags: SendFlags::OOB,
            ..attack("out of band", b"G".to_vec(), vec![1])
        },
    ]
}

fn attack(what: &'static str, before: Vec<u8>, with: Vec<u8>) -> Attack {
    Attack {
        what,
        before,
        with,
        flags: SendFlags::empty(),
        fds: 1,
        times: 1,
        nested: false,
    }
}

fn attacks() -> Vec<Attack> {
    vec![
        attack("DMA_MAP before VERSION", Vec::new(), dma_map()),
        attack("VERSION", Vec::new(), version()),
        attack("garbage", Vec::new(), pattern(5, 300)),
        attack("piece of a header", Vec::new(), vec![1, 2, 3]),
        attack("DMA_MAP", version(), dma_map()),
        attack("SET_IRQS", version(), set_irqs(1)),
        attack(
            "a command that brings none",
            version(),
            message(Command::DEVICE_RESET, &[]),
        ),
        Attack {
            fds: 16,
            ..attack("SET_IRQS, sixteen", version(), set_irqs(16))
        },
        Attack {
            fds: 253,
            times: 20,
            ..attack("as many as there can be", version(), dma_map())
        },
        Attack {
            times: 30,
            ..attack("again and again", version(), dma_map())
        },
        Attack {
            flags: SendFlags::OOB,
            ..attack("out of band", version(), vec![1])
        },
    ]
}

/// Sends an attack while the server is stopped, so that only the server has the descriptor when it
/// continues.
fn strike(daemon: &Daemon, client: &UnixStream, attack: &Attack, poison: &Lingering) {
    let _apart = apart();
    daemon.signal(Signal::STOP);
    eventually("it is stopped", || is_stopped(daemon.pid()));
    send_attack(client, attack, poison);
    daemon.signal(Signal::CONT);
}

fn is_stopped(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut states = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")));
    states.all(|stat| stat.is_ok_and(|stat| stat.contains(") T ")))
}

fn send_attack(client: &UnixStream, attack: &Attack, poison: &Lingering) {
    let none: [BorrowedFd<'_>; 0] = [];
    if !attack.before.is_empty() {
        let _ = send_fds(client, &attack.before, &none, SendFlags::empty());
    }
    for _ in 0..attack.times {
        let mut fd = poison.descriptor();
        if attack.nested {
            let (ours, sent) = UnixStream::pair().unwrap();
            send_fds(&ours, &[1], &[fd.as_fd()], SendFlags::empty()).unwrap();
            drop(std::mem::replace(&mut fd, sent.into()));
        }
        let fds = vec![fd.as_fd(); attack.fds];
        if send_fds(client, &attack.with, &fds, attack.flags).is_err() {
            // The server has closed the connection, so this is the last: it would block here.
            std::mem::forget(fd);
            return;
        }
    }
}

/// A daemon with a disk for the attacker and one for its neighbour, on one worker.
struct Victim {
    test_dir: TestDir,
    daemon: Daemon,
    neighbour: Host,
}

impl Victim {
    fn new() -> Victim {
        let test_dir = TestDir::new();
        let daemon = Self::daemon(&test_dir);
        let neighbour = Host::up(&test_dir.path("neighbour"));
        Victim {
            test_dir,
            daemon,
            neighbour,
        }
    }

    fn daemon(test_dir: &TestDir) -> Daemon {
        Self::daemon_with(test_dir, "")
    }

    /// With more keys of the process.
    fn daemon_with(test_dir: &TestDir, keys: &str) -> Daemon {
        let control = text(&test_dir.path("control"));
        let mut config = format!("[process]\nworkers = 1\ncontrol = {control:?}\n{keys}\n");
        for name in ["attacked", "neighbour"] {
            let socket = text(&test_dir.path(name));
            config += &format!(
                "[[controller]]\nsocket = {socket:?}\n[[controller.namespace]]\n\
                 volume = \"mem://1M\"\n"
            );
        }
        let socket = text(&test_dir.path("exported"));
        config += &format!("[[vhost-user-blk]]\nsocket = {socket:?}\nvolume = \"mem://1M\"\n");
        let path = test_dir.path("config.toml");
        std::fs::write(&path, config).unwrap();
        let starting = apart();
        let daemon = Daemon::spawn(&["serve", "--config", &text(&path)]);
        drop(starting);
        daemon.wait_listening(&test_dir.path("exported"));
        daemon
    }

    fn connect(&self, name: &str) -> UnixStream {
        connect(&self.test_dir.path(name))
    }

    /// The neighbour is served.
    fn check(&mut self, what: &str) {
        let begin = Instant::now();
        self.neighbour
            .client
            .region_read(BAR0, 0, &mut [0; 8])
            .unwrap();
        let data = pattern(begin.elapsed().as_nanos() as u64, 4096);
        self.neighbour.write(1, 0, &data);
        assert!(self.neighbour.read(1, 0, 4096) == data);
        // The administrator is served, too.
        let control = self.connect("control");
        control.set_read_timeout(Some(PROMPT)).unwrap();
        let request = b"GET /v1/stats HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        (&control).write_all(request).unwrap();
        let mut answer = String::new();
        (&control).read_to_string(&mut answer).expect(what);
        assert!(answer.contains("controllers"), "{what}: {answer}");
        assert!(begin.elapsed() < PROMPT, "{what}: {:?}", begin.elapsed());
    }
}

/// Also where the server does not accept for a moment.
fn connect(path: &Path) -> UnixStream {
    let mut socket = None;
    eventually("it listens", || {
        socket = UnixStream::connect(path).ok();
        socket.is_some()
    });
    socket.unwrap()
}

fn attack_all(name: &str, attacks: Vec<Attack>, poison: &Lingering) {
    for attack in attacks {
        let what = attack.what;
        let mut victim = Victim::new();
        let client = victim.connect(name);
        strike(&victim.daemon, &client, &attack, poison);
        victim.check(what);
        // The attack also works in a client that is refused, and in one that has disconnected.
        let second = victim.connect(name);
        strike(&victim.daemon, &second, &attack, poison);
        drop(second);
        victim.check(what);
        drop(client);
        victim.check(what);
        let begin = Instant::now();
        victim.daemon.end();
        assert!(begin.elapsed() < PROMPT, "{what}: {:?}", begin.elapsed());
    }
}

/// Attacks from all sides, timed just before the end of the process.
fn everywhere(victim: &Victim, poison: &Lingering) -> Vec<UnixStream> {
    let mut clients = Vec::new();
    let ways = [
        ("attacked", attacks()),
        ("exported", front_end_attacks()),
        ("control", control_attacks()),
    ];
    for (name, attacks) in ways {
        for attack in attacks {
            let client = victim.connect(name);
            strike(&victim.daemon, &client, &attack, poison);
            clients.push(client);
        }
    }
    clients
}

fn sigkill_frees_the_sockets(poison: &Lingering) {
    let mut victim = Victim::new();
    let clients = everywhere(&victim, poison);
    victim.check("before the end");
    let Victim {
        test_dir,
        daemon,
        neighbour,
    } = victim;
    let begin = Instant::now();
    daemon.kill();
    assert!(begin.elapsed() < PROMPT, "{:?}", begin.elapsed());
    drop(neighbour);
    // At once, though the receiver process may still have the old one's.
    let daemon = Victim::daemon(&test_dir);
    Host::up(&test_dir.path("neighbour"));
    daemon.end();
    drop(clients);
}

#[test]
fn lingering_sockets_block_nobody() {
    attack_all("attacked", attacks(), &Lingering::new());
}

#[test]
fn lingering_sockets_of_front_end_block_nobody() {
    attack_all("exported", front_end_attacks(), &Lingering::new());
}

#[test]
fn lingering_sockets_of_control_client_block_nobody() {
    attack_all("control", control_attacks(), &Lingering::new());
}

#[test]
fn lingering_sockets_end_with_sigkill() {
    sigkill_frees_the_sockets(&Lingering::new());
}

/// Too many clients in a second, and then too many that hang: the worker has nothing to do.
#[test]
fn paused_crowded_socket_costs_no_cpu() {
    let poison = Lingering::new();
    let test_dir = TestDir::new();
    let daemon = Victim::daemon_with(&test_dir, "client-connects = 8");
    for (name, attack) in [
        ("attacked", attack("DMA_MAP", version(), dma_map())),
        ("exported", attack("SET_OWNER", Vec::new(), request(3, &[]))),
    ] {
        let path = test_dir.path(name);
        let first = connect(&path);
        let mut refused = Vec::new();
        for _ in 0..7 {
            let client = connect(&path);
            strike(&daemon, &client, &attack, &poison);
            refused.push(client);
        }
        strike(&daemon, &first, &attack, &poison);
        let waiting: Vec<UnixStream> = (0..12).map(|_| connect(&path)).collect();
        daemon.wait_log(|line| line.contains("the next ones wait") && line.contains(name));
        drop(first);
        std::thread::sleep(Duration::from_secs(3));
        let before = ticks(daemon.pid());
        std::thread::sleep(Duration::from_secs(2));
        let spent = ticks(daemon.pid()) - before;
        // A clock tick is 10 ms: a loop without pause would take hundreds of them.
        assert!(spent < 50, "{name}: {spent}");
        drop((refused, waiting));
    }
    daemon.end();
}

#[test]
fn sigterm_ends_daemon_with_lingering_sockets() {
    let poison = Lingering::new();
    let victim = Victim::new();
    let clients = everywhere(&victim, &poison);
    let begin = Instant::now();
    victim.daemon.signal(Signal::TERM);
    let ended = victim.daemon.wait();
    assert!(begin.elapsed() < PROMPT, "{ended:#?}");
    assert_eq!(ended.status.code(), Some(0), "{ended:#?}");
    drop(clients);
}

#[test]
fn lingering_sockets_leave_nothing_and_disk_is_served_again() {
    let poison = Lingering::new();
    let victim = Victim::new();
    let open = victim.daemon.settled_descriptors();
    for attack in attacks() {
        let client = victim.connect("attacked");
        strike(&victim.daemon, &client, &attack, &poison);
        drop(client);
        victim.daemon.wait_descriptors(open);
    }
    drop(poison);
    Host::up(&victim.test_dir.path("attacked"));
    victim.daemon.wait_descriptors(open);
    victim.daemon.end();
}
