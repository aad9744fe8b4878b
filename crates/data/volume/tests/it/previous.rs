//! A process takes over a disk after the previous process was killed while the kernel still held
//! one of its writes: the old write must not end up on top of a newer one (`file::fence`).
//!
//! The disk is below the kernel: a file of a FUSE server in this process, which puts the old write
//! off; both processes are this program, started anew.

use crate::common::{BOUND, Guest, Worker, disk};
use fuse_disk::{Disk, Fault, RequestKind};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use volume::{FileOptions, FileVolume, Io, Op, PreviousProcess, Request, Volume, VolumeError};

/// The process is one of those that use the disk: its part, and the disk's path.
const PART: &str = "VNVME_TEST_PREVIOUS_PART";
const PATH: &str = "VNVME_TEST_PREVIOUS_PATH";
const LIMIT: &str = "VNVME_TEST_PREVIOUS_LIMIT";

const SIZE: usize = 4 << 20;
const LEN: usize = 4096;
/// Time without output after which a process hangs; one that does not hang writes much sooner.
const HANGING: Duration = Duration::from_secs(2);
const OLD: u8 = 0xaa;
const NEW: u8 = 0xbb;

/// A process that uses the disk, and its output.
struct User {
    child: Child,
    lines: Receiver<String>,
}

impl User {
    fn start(part: &str, path: &Path, limit: Duration) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "previous::child_opens_volume", "--nocapture"])
            .env(PART, part)
            .env(PATH, path)
            .env(LIMIT, limit.as_millis().to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (say, lines) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                eprintln!("{line}");
                let _ = say.send(line);
            }
        });
        Self { child, lines }
    }

    /// The first line that has one of these words in it: which of them.
    fn wait_for(&self, words: &[&str]) -> usize {
        self.said_within(BOUND, words).expect("it says nothing")
    }

    fn said_within(&self, limit: Duration, words: &[&str]) -> Option<usize> {
        loop {
            let line = self.lines.recv_timeout(limit).ok()?;
            let found = words.iter().position(|word| line.contains(word));
            if found.is_some() {
                return found;
            }
        }
    }

    /// Sends SIGKILL. The process may not end for long: a thread of it hangs in a call.
    fn kill(mut self) {
        self.child.kill().unwrap();
        std::thread::spawn(move || self.child.wait());
    }
}

/// A loop device that passes requests to the file below, several at a time.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path) -> Result<Self, String> {
        let losetup = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file)
            .output()
            .map_err(|error| format!("losetup: {error}"))?;
        if !losetup.status.success() {
            let text = String::from_utf8_lossy(&losetup.stderr).trim().to_owned();
            return Err(format!("losetup: {text}"));
        }
        let path = PathBuf::from(String::from_utf8_lossy(&losetup.stdout).trim());
        let name = path.file_name().unwrap().to_str().unwrap();
        let direct = std::fs::read_to_string(format!("/sys/block/{name}/loop/dio"));
        let device = Self(path);
        match direct.as_deref() {
            Ok("1\n") => Ok(device),
            _ => Err("losetup: no direct I/O".into()),
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// Creates a disk below the kernel; `None` (with a line in the log) where there is none.
fn held_disk(what: &str, directory: &tempfile::TempDir) -> Option<Disk> {
    match Disk::new(&directory.path().join("mount"), SIZE) {
        Ok(disk) => Some(disk),
        Err(error) => {
            testkit::skip(what, format!("/dev/fuse: {error}"));
            None
        }
    }
}

/// The old process is killed while its write is held. The new one takes over, and logs the reason
/// of its wait. It may hang before that, as opening the file takes a lock of the kernel's that the
/// old write has.
fn take_over(disk: &Disk, path: &Path, may_hang: bool) {
    disk.fail(RequestKind::Write, 0..LEN as u64, 1, Fault::Held);
    let old = User::start("old", path, BOUND);
    old.wait_for(&["started"]);
    assert!(disk.wait_held(1, BOUND), "the write has not come");
    old.kill();
    let new = User::start("new", path, BOUND);
    // The test is about the order of these two; then the old write continues.
    let words = [
        "has written",
        "waiting for the last requests of the previous",
    ];
    let waited = if may_hang {
        new.said_within(HANGING, &words) != Some(0)
    } else {
        new.wait_for(&words) == 1
    };
    let early = disk.bytes(0..LEN);
    assert_eq!(disk.release(), 1);
    if waited {
        assert_eq!(early, [0; LEN], "the new process did not wait");
        new.wait_for(&["has written"]);
    }
    let mut new = new;
    assert!(new.child.wait().unwrap().success());
    let found = disk.bytes(0..LEN);
    assert_eq!(found, [NEW; LEN], "the old write is on top of the new one");
    assert!(waited);
}

#[test]
fn old_write_to_block_device_does_not_overtake_newer() {
    let what = "volume::previous::old_write_to_block_device_does_not_overtake_newer";
    let directory = disk();
    let Some(disk) = held_disk(what, &directory) else {
        return;
    };
    let device = match Loop::new(&disk.path()) {
        Ok(device) => device,
        Err(why) => return testkit::skip(what, why),
    };
    take_over(&disk, &device.0, false);
}

#[test]
fn old_write_to_file_does_not_overtake_newer() {
    let directory = disk();
    if let Some(disk) = held_disk(
        "volume::previous::old_write_to_file_does_not_overtake_newer",
        &directory,
    ) {
        take_over(&disk, &disk.path(), true);
    }
}

#[test]
fn wait_for_silent_disk_times_out() {
    let what = "volume::previous::wait_for_silent_disk_times_out";
    let directory = disk();
    let Some(disk) = held_disk(what, &directory) else {
        return;
    };
    let device = match Loop::new(&disk.path()) {
        Ok(device) => device,
        Err(why) => return testkit::skip(what, why),
    };
    disk.fail(RequestKind::Write, 0..LEN as u64, 1, Fault::Held);
    let old = User::start("old", &device.0, BOUND);
    old.wait_for(&["started"]);
    assert!(disk.wait_held(1, BOUND));
    old.kill();
    let new = User::start("new", &device.0, Duration::from_millis(500));
    assert_eq!(new.wait_for(&["has written", "refused: "]), 1);
    // The new process has touched nothing, and can be tried again.
    assert_eq!(disk.release(), 1);
    assert_eq!(disk.bytes(0..LEN), [OLD; LEN]);
    let new = User::start("new", &device.0, BOUND);
    new.wait_for(&["has written"]);
    assert_eq!(disk.bytes(0..LEN), [NEW; LEN]);
}

/// Not a test: the processes of the other tests.
#[test]
fn child_opens_volume() {
    let Ok(part) = std::env::var(PART) else {
        return;
    };
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let limit = std::env::var(LIMIT).unwrap().parse().unwrap();
    let options = FileOptions {
        previous: PreviousProcess {
            limit: Duration::from_millis(limit),
            taken_over: true,
        },
        ..FileOptions::default()
    };
    let volume = match FileVolume::open(std::env::var(PATH).unwrap(), options) {
        Ok(volume) => volume,
        Err(error @ VolumeError::PreviousProcess { .. }) => return eprintln!("refused: {error}"),
        Err(error) => panic!("{error}"),
    };
    if part == "new" {
        let mut worker = Worker::new(&volume);
        assert_eq!(worker.write(0, &[NEW; LEN]), Ok(()));
        assert_eq!(worker.without_data(Op::Flush, 0, 0), Ok(()));
        return eprintln!("has written");
    }
    let io = Io::new(Default::default());
    let mut queue = volume.open(&io).unwrap();
    let guest = Guest::new(1 << 20);
    let data = guest.holding(0, &[OLD; LEN]);
    let write = Request::transfer(1, Op::Write { fua: false }, 0, data);
    assert!(queue.submit(write).is_none());
    io.flush();
    eprintln!("started");
    std::thread::sleep(BOUND);
    std::process::exit(1);
}
