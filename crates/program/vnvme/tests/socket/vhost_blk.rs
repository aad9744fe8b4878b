//! vhost-user-blk exports beside a controller: started, counted, and ended with it.

use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::common::*;

/// Asks a vhost-user back-end a question that is answered by a number.
fn ask(socket: &UnixStream, request: u32) -> u64 {
    let mut message = request.to_ne_bytes().to_vec();
    message.extend(1u32.to_ne_bytes());
    message.extend(0u32.to_ne_bytes());
    (&*socket).write_all(&message).unwrap();
    let mut answer = [0; 20];
    (&*socket).read_exact(&mut answer).unwrap();
    u64::from_ne_bytes(answer[12..].try_into().unwrap())
}

const GET_FEATURES: u32 = 1;
const RO: u64 = 1 << 5;
const DISCARD: u64 = 1 << 13;

fn features(socket: &Path) -> u64 {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    features_of(&stream)
}

/// Features that are offered, once everything before was handled.
pub fn features_of(stream: &UnixStream) -> u64 {
    ask(stream, GET_FEATURES)
}

fn stats(control: &str) -> serde_json::Value {
    let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["stats", "--control", control, "--json"])
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A message of the front-end's, with a descriptor.
fn send(socket: &UnixStream, request: u32, payload: &[u8], fd: Option<BorrowedFd<'_>>) {
    let mut message = request.to_ne_bytes().to_vec();
    message.extend(1u32.to_ne_bytes());
    message.extend((payload.len() as u32).to_ne_bytes());
    message.extend(payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fd.into_iter().collect();
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    let bytes = [std::io::IoSlice::new(&message)];
    sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_ERR: u32 = 14;
const SET_PROTOCOL_FEATURES: u32 = 16;
const GET_CONFIG: u32 = 24;
/// Address of the guest's memory in the front-end.
const USER: u64 = 0x7f00_0000_0000;

/// Starts queue 0, somewhere in the guest's memory.
fn start_queue(socket: &UnixStream) {
    // Index 0, 128 entries; no flags, descriptors, used ring, available ring, log; a queue that is
    // polled.
    send(socket, SET_VRING_NUM, &words(&[128 << 32]), None);
    let address = [0, USER, USER + 0x2000, USER + 0x1000, 0];
    send(socket, SET_VRING_ADDR, &words(&address), None);
    send(socket, SET_VRING_KICK, &words(&[0x100]), None);
}

/// Starts queue 0 in memory of its own, and breaks it at once: the back-end signals that by
/// `error`.
pub fn break_queue(socket: &UnixStream, error: BorrowedFd<'_>) {
    let ram = memfd(1 << 20);
    // Entries that nobody made: the available index is further than there are entries.
    std::os::unix::fs::FileExt::write_all_at(&ram, &1000u16.to_ne_bytes(), 0x1002).unwrap();
    let table = words(&[1, 0, 1 << 20, USER, 0]);
    send(socket, SET_MEM_TABLE, &table, Some(ram.as_fd()));
    send(socket, SET_VRING_ERR, &words(&[0]), Some(error));
    start_queue(socket);
}

/// A disk's size, in sectors: the first field of its configuration space.
fn capacity(socket: &UnixStream) -> u64 {
    let mut payload = words(&[8 << 32, 0]);
    payload.truncate(12);
    payload.extend([0; 8]);
    send(socket, GET_CONFIG, &payload, None);
    let mut answer = [0; 32];
    (&*socket).read_exact(&mut answer).unwrap();
    u64::from_ne_bytes(answer[24..].try_into().unwrap())
}

#[test]
fn export_size_follows_file() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let socket = test_dir.path("v.sock");
    let daemon = Daemon::spawn(&["serve", "--vhost-user-blk", &text(&socket), &disk]);
    daemon.wait_listening(&socket);
    let stream = UnixStream::connect(&socket).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    send(&stream, SET_PROTOCOL_FEATURES, &words(&[1 << 9]), None);
    assert_eq!(capacity(&stream), 2048);
    let file = std::fs::OpenOptions::new().write(true).open(&disk);
    file.unwrap().set_len(4 << 20).unwrap();
    eventually("the new size is known", || capacity(&stream) == 8192);
    drop(stream);
    daemon.end();
}

#[test]
fn front_end_without_guest_memory_does_not_fill_log() {
    let test_dir = TestDir::new();
    let socket = test_dir.path("v.sock");
    let args = ["serve", "--vhost-user-blk", &text(&socket), "mem://1M"];
    let daemon = Daemon::spawn(&args);
    daemon.wait_listening(&socket);
    let start = Instant::now();
    for _ in 0..100 {
        let stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        start_queue(&stream);
        assert_eq!((&stream).read(&mut [0; 8]).unwrap(), 0, "it is closed");
    }
    daemon.wait_log(|line| line.contains("share=on"));
    // A line at once, and another one each minute. Of each other kind there are ten at once, and
    // then one in ten seconds.
    let seconds = start.elapsed().as_secs() as usize;
    let told = daemon.count("share=on");
    assert!(told <= 1 + seconds / 60, "{told}: {:#?}", daemon.log());
    let lines = daemon.log().len();
    assert!(
        lines < 45 + seconds / 3,
        "{lines} lines: {:#?}",
        daemon.log()
    );
    daemon.end();
}

/// Behaves as QEMU before 9 does with `memory-backend-memfd,share=off`.
#[test]
fn memory_file_without_contents_is_reported() {
    let test_dir = TestDir::new();
    for stored in [false, true] {
        let socket = test_dir.path("v.sock");
        let args = ["serve", "--vhost-user-blk", &text(&socket), "mem://1M"];
        let daemon = Daemon::spawn(&args);
        daemon.wait_listening(&socket);
        let stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        let ram = memfd(1 << 20);
        if stored {
            std::os::unix::fs::FileExt::write_all_at(&ram, &[0; 4096], 1 << 19).unwrap();
        }
        let table = words(&[1, 0, 1 << 20, USER, 0]);
        send(&stream, SET_MEM_TABLE, &table, Some(ram.as_fd()));
        start_queue(&stream);
        // The answer follows the effects of earlier messages.
        ask(&stream, GET_FEATURES);
        drop(stream);
        let ended = daemon.end();
        let told = ended.log.iter().filter(|line| line.contains("share=on"));
        assert_eq!(told.count(), usize::from(!stored), "{ended:#?}");
    }
}

#[test]
fn exports_work_beside_controller() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let (first, second) = (test_dir.path("v0.sock"), test_dir.path("v1.sock"));
    let control = text(&test_dir.path("control.sock"));
    let daemon = Daemon::serve(
        &test_dir,
        &[
            "mem://4M",
            "--control",
            &control,
            "--vhost-user-blk",
            &text(&first),
            &format!("{disk}?queues=2&serial=FIRST"),
            "--vhost-user-blk",
            &text(&second),
            "mem://1M?read-only=on",
        ],
    );
    daemon.wait_listening(&first);
    daemon.wait_listening(&second);
    assert_eq!(features(&first) & (RO | DISCARD), DISCARD);
    assert_eq!(features(&second) & (RO | DISCARD), RO);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    let told = stats(&control);
    let exports = told["vhost_user_blk"].as_array().unwrap();
    assert_eq!(exports.len(), 2);
    let of = |socket: &Path| {
        let socket = text(socket);
        exports.iter().find(|e| e["socket"] == socket).unwrap()
    };
    assert_eq!(of(&first)["connections"], 1);
    assert_eq!(told["controllers"][0]["host_writes"], 1);
    drop(host);
    daemon.end();
    assert!(!first.exists() && !second.exists());
}

#[test]
fn exports_work_alone_and_from_configuration() {
    let test_dir = TestDir::new();
    let socket = test_dir.path("v.sock");
    let daemon = Daemon::spawn(&["serve", "--vhost-user-blk", &text(&socket), "mem://1M"]);
    daemon.wait_listening(&socket);
    assert_ne!(features(&socket), 0);
    daemon.end();
    let config = test_dir.path("vnvme.toml");
    let table = format!(
        "[[vhost-user-blk]]\nsocket = {:?}\nvolume = \"mem://1M\"\nread-only = true\nqueues = 4\n",
        text(&socket)
    );
    std::fs::write(&config, table).unwrap();
    let daemon = Daemon::spawn(&["serve", "--config", &text(&config)]);
    daemon.wait_listening(&socket);
    assert_eq!(features(&socket) & RO, RO);
    daemon.end();
}

#[test]
fn unusable_export_has_own_error() {
    let test_dir = TestDir::new();
    let socket = text(&test_dir.path("v.sock"));
    let missing = text(&test_dir.path("missing.raw"));
    for (volume, word) in [
        (missing.as_str(), "no such file"),
        ("mem://1M?queues=0", "1 to 256"),
        ("mem://1M?queue-size=100", "power of two"),
        ("mem://1M?block-size=100", "block size"),
        (
            "mem://1M?block-size=4096&serial=a-serial-that-is-too-long",
            "20 bytes",
        ),
        ("mem://1536?block-size=1024", "multiple"),
    ] {
        let ended = Daemon::spawn(&["serve", "--vhost-user-blk", &socket, volume]).wait();
        assert_eq!(ended.status.code(), Some(1), "{ended:#?}");
        let line = ended.log.last().unwrap();
        assert!(line.contains(word), "\"{word}\" is not in: {line}");
        assert!(!test_dir.path("v.sock").exists());
    }
}
