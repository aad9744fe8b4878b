//! How much memory the daemon keeps for itself.

use driver::{DeviceTarget, QueueOptions};
use std::fmt::Write as _;

use crate::common::{Daemon, TestDir, eventually, text};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// Resident memory of a process in bytes that is its own: anonymous and shared memory (`RssAnon`,
/// `RssShmem`), without pages of the program's file: all processes share them, and their number
/// depends on how it was built.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let kib = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name));
        let kib = line.unwrap().trim().trim_end_matches("kB").trim();
        kib.parse::<u64>().unwrap()
    };
    (kib("RssAnon:") + kib("RssShmem:")) * KIB
}

/// Resident memory with that many controllers, all of them attached and used at depth 32.
fn with(controllers: usize) -> u64 {
    let test_dir = TestDir::new();
    let mut config = String::new();
    let socket = |i: usize| test_dir.path(&format!("{i}.sock"));
    for i in 0..controllers {
        let socket = text(&socket(i));
        writeln!(
            config,
            "[[controller]]\nsocket = {socket:?}\n[[controller.namespace]]\nvolume = \"null://1T\""
        )
        .unwrap();
    }
    let path = test_dir.path("config.toml");
    std::fs::write(&path, config).unwrap();
    let daemon = Daemon::spawn(&["serve", "--config", &text(&path)]);
    daemon.wait_listening(&socket(controllers - 1));
    let devices = (0..controllers).map(|i| {
        let target = DeviceTarget::parse(&format!("vfio-user://{}/1", text(&socket(i)))).unwrap();
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
fn controller_memory_is_small() {
    let (one, many) = (with(1), with(17));
    assert!(one < 6 * MIB, "{one} bytes with one controller");
    let each = many.saturating_sub(one) / 16;
    assert!(each < MIB, "{each} bytes for each further controller");
}

/// Names of a process's threads.
fn threads(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).collect()
}

#[test]
fn thread_count_is_independent_of_exports() {
    let test_dir = TestDir::new();
    let mut config = String::new();
    for i in 0..20 {
        let disk = test_dir.disk(&format!("{i}.raw"), MIB);
        let (nvme, virtio) = (
            test_dir.path(&format!("n{i}")),
            test_dir.path(&format!("v{i}")),
        );
        let (nvme, virtio) = (text(&nvme), text(&virtio));
        write!(
            config,
            "[[controller]]\nsocket = {nvme:?}\n[[controller.namespace]]\nvolume = {disk:?}\n\
             [[vhost-user-blk]]\nsocket = {virtio:?}\nvolume = \"mem://1M\"\n"
        )
        .unwrap();
    }
    let path = test_dir.path("config.toml");
    std::fs::write(&path, config).unwrap();
    let control = text(&test_dir.path("control"));
    let process = ["--workers", "2", "--control", &control];
    let config = text(&path);
    let daemon = Daemon::spawn(&[&["serve", "--config", &config], &process[..]].concat());
    daemon.wait_listening(&test_dir.path("v19"));
    // The last thread: files' sizes are asked for a second later.
    eventually("sizes are asked for", || {
        threads(daemon.pid()).contains(&"sizes".to_owned())
    });
    let threads = threads(daemon.pid());
    assert!(threads.len() <= 2 + 4, "{threads:?}");
    daemon.end();
}
