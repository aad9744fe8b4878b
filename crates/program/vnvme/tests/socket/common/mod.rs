//! The daemon as a process, and an NVMe host driver that is as small as can be.

mod daemon;
mod frozen;
mod host;
mod lone;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

pub use daemon::{Daemon, KEEPER_AS_CONFIGURED};
pub use frozen::Frozen;
use fuse_disk::Disk;
pub use host::flood::Flood;
pub use host::{BAR0, CONFIG, Host, INTX, MSIX, RAM_BASE, RAM_SIZE, leave, memfd, new_eventfd};
pub use lone::{Lone, all_stats, stats};
use vfio_user::DmaMapping;

/// No single step takes longer than this on any machine; what is waited for this long has failed.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// A directory with room for a socket and a disk.
pub struct TestDir(tempfile::TempDir);

impl TestDir {
    pub fn new() -> Self {
        TestDir(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.path("vm.sock")
    }

    /// A file of zeroes, as an argument.
    pub fn disk(&self, name: &str, size: u64) -> String {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(size).unwrap();
        text(&path)
    }

    /// The file's bytes from `offset` on.
    pub fn bytes(&self, name: &str, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let file = File::open(self.path(name)).unwrap();
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, offset).unwrap();
        bytes
    }
}

/// Makes a disk that can hang and fail, for the test `test` ("module::name"). `None`, with a line
/// that says so, where FUSE cannot be mounted. Drop it before a daemon that may wait for it.
pub fn breaking(test: &str, test_dir: &TestDir, size: usize) -> Option<Disk> {
    let disk = Disk::new(&test_dir.path("mnt"), size);
    disk.map_err(|error| testkit::skip(&format!("vnvme::{test}"), format!("/dev/fuse: {error}")))
        .ok()
}

/// A window of guest memory from the file's first byte on, readable and writable.
pub const fn window(iova: u64, size: u64) -> DmaMapping {
    DmaMapping {
        iova,
        size,
        offset: 0,
        read: true,
        write: true,
    }
}

/// A path as an argument.
pub fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Installs a copy of a program with mode 755. Another process writes it: a descriptor of this
/// process that is open for writing would be inherited by a child that another thread starts just
/// then, and a file that is open for writing cannot be executed (execve(2), ETXTBSY).
pub fn put_program(from: impl AsRef<OsStr>, to: &Path) {
    let mut install = Command::new("install");
    let put = install.args(["-m", "755"]).arg(from.as_ref()).arg(to);
    assert!(put.status().unwrap().success());
}

/// Waits until something holds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !holds() {
        assert!(
            Instant::now() < deadline,
            "it did not happen in time: {what}"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes that differ from block to block and from seed to seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Number of open descriptors of a process.
pub fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// A size in a process's status, in KiB: `VmRSS`, `VmSize`.
pub fn status_kib(pid: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Processor time of a process so far, in clock ticks (proc(5), stat fields 14 and 15).
pub fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_name = stat.rsplit(')').next().unwrap();
    after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<u64>().unwrap())
        .sum()
}
