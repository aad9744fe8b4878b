//! How much memory the daemon keeps for itself.

use driver::{QueueOptions, Target};
use std::fmt::Write as _;

use crate::common::{Daemon, Place, text};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// Resident memory of a process in bytes, all kinds of it (`VmRSS`).
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line.unwrap().trim().trim_end_matches("kB").trim();
    kib.parse::<u64>().unwrap() * KIB
}

/// Resident memory with that many controllers, all of them attached and used at depth 32.
fn with(controllers: usize) -> u64 {
    let place = Place::new();
    let mut config = String::new();
    let socket = |i: usize| place.path(&format!("{i}.sock"));
    for i in 0..controllers {
        let socket = text(&socket(i));
        writeln!(
            config,
            "[[controller]]\nsocket = {socket:?}\n[[controller.namespace]]\nvolume = \"null://1T\""
        )
        .unwrap();
    }
    let path = place.path("config.toml");
    std::fs::write(&path, config).unwrap();
    let daemon = Daemon::spawn(&["serve", "--config", &text(&path)]);
    daemon.wait_listening(&socket(controllers - 1));
    let devices = (0..controllers).map(|i| {
        let target = Target::parse(&format!("vfio-user://{}/1", text(&socket(i)))).unwrap();
        let device = target.open().unwrap();
        let options = QueueOptions {
            depth: 32,
            ..QueueOptions::default()
        };
        let mut queue = device.queue(1, options).unwrap();
        for round in 0..64 {
            for i in 0..32 {
                let buffer = device.allocate(4096).unwrap();
                queue.submit_read(round * 32 + i, 1, buffer, i).unwrap();
            }
            let mut left = 32;
            while left > 0 {
                left -= queue.poll(|completion| completion.result.unwrap());
            }
        }
        (queue, device)
    });
    let devices: Vec<_> = devices.collect();
    let bytes = resident(daemon.pid());
    println!("{controllers} controllers: {} KiB", bytes / KIB);
    drop(devices);
    daemon.end();
    bytes
}

#[test]
fn a_controller_takes_little_memory() {
    let (one, many) = (with(1), with(17));
    // Of a build without optimisation, the program itself is larger than it has to be.
    assert!(one < 16 * MIB, "{one} bytes with one controller");
    let each = many.saturating_sub(one) / 16;
    assert!(each < MIB, "{each} bytes for each further controller");
}
