//! vhost-user-blk exports beside a controller: started, counted, and ended with it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

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
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    ask(&stream, GET_FEATURES)
}

fn stats(control: &str) -> serde_json::Value {
    let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["stats", control, "--json"])
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn exports_stand_beside_a_controller() {
    let place = Place::new();
    let disk = place.disk("disk.raw", 1 << 20);
    let (first, second) = (place.path("v0.sock"), place.path("v1.sock"));
    let control = text(&place.path("control.sock"));
    let daemon = Daemon::serve(
        &place,
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
    let mut host = Host::up(&place.socket());
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
fn exports_alone_and_from_a_configuration_file() {
    let place = Place::new();
    let socket = place.path("v.sock");
    let daemon = Daemon::spawn(&["serve", "--vhost-user-blk", &text(&socket), "mem://1M"]);
    daemon.wait_listening(&socket);
    assert_ne!(features(&socket), 0);
    daemon.end();
    let config = place.path("vnvme.toml");
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
fn an_export_that_cannot_be_has_a_line_of_its_own() {
    let place = Place::new();
    let socket = text(&place.path("v.sock"));
    let missing = text(&place.path("missing.raw"));
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
        assert!(!place.path("v.sock").exists());
    }
}
