//! Parts of one disk for several controllers: nothing passes from one to the other, and overlaps
//! are refused by name.

use std::fs;

use crate::common::*;

const MIB: usize = 1 << 20;

/// A configuration with one controller for each volume.
fn config(test_dir: &TestDir, volumes: &[&str]) -> (String, Vec<std::path::PathBuf>) {
    let path = test_dir.path("slices.toml");
    let sockets: Vec<_> = (0..volumes.len())
        .map(|i| test_dir.path(&format!("s{i}.sock")))
        .collect();
    let tables: Vec<String> = sockets
        .iter()
        .zip(volumes)
        .map(|(socket, volume)| {
            let socket = text(socket);
            format!("[[controller]]\nsocket = \"{socket}\"\n[[controller.namespace]]\nvolume = \"{volume}\"\n")
        })
        .collect();
    fs::write(&path, tables.concat()).unwrap();
    (text(&path), sockets)
}

/// Fills each slice from its first to its last byte, reads it back, and tries to get beyond its
/// end.
fn fill(sockets: &[std::path::PathBuf], blocks: u64) {
    for (seed, socket) in (0..).zip(sockets) {
        let mut host = Host::up(socket);
        assert_eq!(host.identify_namespace(1).unwrap().nsze.get(), blocks);
        host.write(1, 0, &pattern(seed, MIB));
        host.write(1, blocks - 2048, &pattern(seed + 10, MIB));
        host.flush(1);
        assert!(host.read(1, 0, MIB) == pattern(seed, MIB));
        let beyond = host.write_with(1, blocks - 1, &[0xee; 1024], false);
        assert!(beyond.is(nvme::Status::LBA_OUT_OF_RANGE), "{beyond:?}");
    }
}

fn check(test_dir: &TestDir, slices: u64, len: u64) {
    for slice in 0..slices {
        assert!(test_dir.bytes("disk.raw", slice * len, MIB) == pattern(slice, MIB));
        let last = test_dir.bytes("disk.raw", (slice + 1) * len - MIB as u64, MIB);
        assert!(last == pattern(slice + 10, MIB), "end of slice {slice}");
    }
}

#[test]
fn slices_of_file_and_device_work() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 12 << 20);
    for below in [false, true] {
        let daemon = below.then(|| Daemon::serve(&test_dir, &[&disk]));
        let whole = if below {
            format!("vfio-user://{}/1", text(&test_dir.socket()))
        } else {
            disk.clone()
        };
        let volumes = ["offset=0&length=4M", "offset=4M&length=4M", "offset=8M"]
            .map(|part| format!("{whole}?{part}"));
        let (path, sockets) = config(&test_dir, &volumes.each_ref().map(String::as_str));
        for workers in ["1", "2"] {
            let above = Daemon::spawn(&["serve", "--config", &path, "--workers", workers]);
            sockets.iter().for_each(|s| above.wait_listening(s));
            fill(&sockets, 4 << 11);
            above.end();
            check(&test_dir, 3, 4 << 20);
        }
        if let Some(daemon) = daemon {
            daemon.end();
        }
        fs::write(&disk, vec![0; 12 << 20]).unwrap();
    }
}

#[test]
fn overlapping_slices_are_refused_by_name() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 8 << 20);
    let below = Daemon::serve(&test_dir, &["null://8M"]);
    let device = format!("vfio-user://{}/1", text(&test_dir.socket()));
    for whole in [&disk, &device] {
        for parts in [
            ["?offset=0&length=4M", "?offset=3M"],
            ["", "?offset=4M"],
            ["?offset=1M&read-only=on", "?length=2M"],
        ] {
            let volumes = parts.map(|part| format!("{whole}{part}"));
            let (path, _) = config(&test_dir, &volumes.each_ref().map(String::as_str));
            let ended = Daemon::spawn(&["serve", "--config", &path]).wait();
            assert_eq!(ended.status.code(), Some(1));
            let said = ended.log.join("\n");
            assert!(
                said.contains(&format!("{} overlaps {}, which", volumes[1], volumes[0])),
                "{said}"
            );
        }
        let volumes =
            ["?read-only=on", "?read-only=on&offset=1M"].map(|part| format!("{whole}{part}"));
        let (path, sockets) = config(&test_dir, &volumes.each_ref().map(String::as_str));
        let readers = Daemon::spawn(&["serve", "--config", &path]);
        sockets.iter().for_each(|s| readers.wait_listening(s));
        let status = Host::up(&sockets[1]).write_with(1, 0, &[1; 512], false);
        assert!(
            status.is(nvme::Status::NAMESPACE_WRITE_PROTECTED),
            "{status:?}"
        );
        readers.end();
    }
    below.end();
}
