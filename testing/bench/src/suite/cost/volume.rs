//! Cases of volumes on servers and in images, and of the NVMe/TCP target, counted in the program
//! `vnvme-volume`. Client and server take turns on one thread there, and only one of them counts.
//!
//! Requests of images are made one at a time, because a disk completes several in any order. Those
//! of servers are made eight at a time.
//!
//! Images of Ceph clusters come from a library in librbd's place, which a C compiler makes of
//! `librbd.c`. Its instructions do not count.

use super::counted;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Case of a volume or of the target.
pub struct Volume {
    pub case: &'static str,
    /// Kind of the volume, in the words of the program.
    kind: &'static str,
    direction: &'static str,
    counted: &'static str,
}

/// Function in which the program runs a round of the volume's queue.
const CLIENT: &str = "vnvme_volume::client_step";
/// Function in which the program runs a round of the target's worker.
const TARGET: &str = "vnvme_volume::target_step";
/// Name of the program beside `vnvme`.
const PROGRAM: &str = "vnvme-volume";
const RBD: &str = "rbd";
/// Number of counted requests.
const REQUESTS: u64 = 800;
/// Number of counted first writes, each of which needs a cluster of its own and takes as long as a
/// disk flushes.
const FIRST_WRITES: u64 = 200;

/// Functions of the library in librbd's place.
const LIBRARY: &str = "rbd_aio_*";
const LIBRARY_SOURCE: &str = include_str!("../../bin/vnvme-volume/librbd.c");

pub const CASES: [Volume; 14] = [
    volume("qcow2 read", "allocated", "read", CLIENT),
    volume("qcow2 write", "allocated", "write", CLIENT),
    volume("qcow2 read, unallocated", "unallocated", "read", CLIENT),
    volume("qcow2 first write", "unallocated", "write", CLIENT),
    volume("qcow2 read, backing file", "backing", "read", CLIENT),
    volume(
        "qcow2 first write, backing file",
        "backing",
        "write",
        CLIENT,
    ),
    volume("NBD read", "nbd", "read", CLIENT),
    volume("NBD write", "nbd", "write", CLIENT),
    volume("RBD read", RBD, "read", CLIENT),
    volume("RBD write", RBD, "write", CLIENT),
    volume("NVMe/TCP initiator, read", "nvme-tcp", "read", CLIENT),
    volume("NVMe/TCP initiator, write", "nvme-tcp", "write", CLIENT),
    volume("NVMe/TCP target, read", "nvme-tcp", "read", TARGET),
    volume("NVMe/TCP target, write", "nvme-tcp", "write", TARGET),
];

const fn volume(
    case: &'static str,
    kind: &'static str,
    direction: &'static str,
    counted: &'static str,
) -> Volume {
    Volume {
        case,
        kind,
        direction,
        counted,
    }
}

/// Returns the path of the program that has the volumes.
pub fn program(vnvme: &Path) -> PathBuf {
    vnvme.with_file_name(PROGRAM)
}

impl Volume {
    /// Returns the number of requests that the program makes together.
    pub fn depth(&self) -> u16 {
        match self.kind {
            "nbd" | "nvme-tcp" => 8,
            _ => 1,
        }
    }

    /// Makes what the case needs beside the program, in an empty directory. Returns the reason if
    /// that is not possible on this machine.
    pub fn missing(&self, dir: &Path) -> Result<Option<String>> {
        if self.kind != RBD {
            return Ok(None);
        }
        let source = dir.join("librbd.c");
        std::fs::write(&source, LIBRARY_SOURCE)?;
        let library = dir.join("librbd.so.1");
        let words = ["-shared", "-fPIC", "-O1", "-pthread", "-o"];
        let made = Command::new("cc")
            .args(words)
            .arg(&library)
            .arg(source)
            .output();
        let made = match made {
            Err(error) => return Ok(Some(format!("there is no C compiler: cc: {error}"))),
            Ok(made) => made,
        };
        let said = String::from_utf8_lossy(&made.stderr);
        ensure!(made.status.success(), "cc: {said}");
        std::fs::copy(&library, dir.join("librados.so.2"))?;
        Ok(None)
    }
}

/// Returns the number of instructions for a request. `dir` is a directory for images, with what
/// [`Volume::missing`] has made.
pub fn instructions(program: &Path, volume: &Volume, dir: &Path) -> Result<f64> {
    let requests = match (volume.kind, volume.direction) {
        ("unallocated" | "backing", "write") => FIRST_WRITES,
        _ => REQUESTS,
    };
    // A disk that is late for the first look costs a further round.
    let runs = match volume.kind {
        "allocated" | "backing" => 2,
        _ => 1,
    };
    let mut command = Command::new(program);
    let dir = dir.canonicalize().context("the directory of images")?;
    command
        .args([volume.kind, volume.direction, &requests.to_string()])
        .arg(&dir)
        .env("VNVME_LIBRBD", &dir);
    let counts = (0..runs).map(|_| counted([volume.counted, LIBRARY], &command));
    let counts = counts.collect::<Result<Vec<u64>>>()?;
    let least = counts.into_iter().min().context("no run")?;
    Ok(least as f64 / requests as f64)
}
