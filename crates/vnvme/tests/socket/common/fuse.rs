//! A FUSE file system of one file. Its server stops answering, or is full, on request
//! ("linux/fuse.h").

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;

use super::eventually;

/// The file's name.
const NAME: &str = "disk.raw";
const ROOT: u64 = 1;
const FILE: u64 = 2;
/// Requests have a header of this length, answers one of 16 bytes.
const HEADER: usize = 40;
/// Longest write that the kernel sends.
const MAX_WRITE: u32 = 128 << 10;

pub const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
pub const GETATTR: u32 = 3;
pub const OPEN: u32 = 14;
const READ: u32 = 15;
pub const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
pub const FSYNC: u32 = 20;
/// At each `close`.
pub const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

const ENOENT: i32 = 2;
const ENOSPC: i32 = 28;
const ENOSYS: i32 = 38;

/// How the server treats its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Answers,
    /// Takes them, and answers none: a process that waits for one cannot be killed.
    Silent,
    /// Takes requests of this kind and answers none of them; answers all other requests.
    SilentAt(u32),
    /// Answers, and has no room.
    Full,
    Ends,
}

struct State {
    mode: Mode,
    data: Vec<u8>,
    /// Requests that were taken and not answered.
    held: VecDeque<Vec<u8>>,
}

/// A mounted file system with its server. The file system ends with this value, and callers that
/// wait for it get an error: drop it before a daemon that may wait for it.
pub struct Fuse {
    mount: PathBuf,
    shared: Arc<Mutex<State>>,
    server: Option<JoinHandle<()>>,
}

impl Fuse {
    /// Mounts a file system with a file of that size at `mount`, or returns the reason why that is
    /// impossible.
    pub fn mount(mount: &Path, size: usize) -> Result<Self, String> {
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.map_err(|error| format!("/dev/fuse: {}", error.kind()))?;
        rustix::fs::fcntl_setfl(&device, OFlags::RDWR | OFlags::NONBLOCK).unwrap();
        std::fs::create_dir(mount).unwrap();
        let mounted = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o"])
            .arg("fd=0,rootmode=40000,user_id=0,group_id=0")
            .arg("vnvme-test")
            .arg(mount)
            .stdin(device.try_clone().unwrap())
            .stderr(Stdio::null())
            .status();
        if !mounted.is_ok_and(|status| status.success()) {
            return Err("FUSE cannot be mounted".into());
        }
        let state = State {
            mode: Mode::Answers,
            data: vec![0; size],
            held: VecDeque::new(),
        };
        let shared = Arc::new(Mutex::new(state));
        let mine = shared.clone();
        let server = std::thread::spawn(move || serve(device, &mine));
        Ok(Self {
            mount: mount.into(),
            shared,
            server: Some(server),
        })
    }

    /// The file.
    pub fn file(&self) -> PathBuf {
        self.mount.join(NAME)
    }

    fn set(&self, mode: Mode) {
        self.shared.lock().unwrap().mode = mode;
    }

    /// Takes requests, and answers none.
    pub fn fall_silent(&self) {
        self.set(Mode::Silent);
    }

    /// Takes requests of this kind, and answers none of them.
    pub fn fall_silent_at(&self, code: u32) {
        self.set(Mode::SilentAt(code));
    }

    /// Has no room for writes.
    pub fn fill(&self) {
        self.set(Mode::Full);
    }

    /// Answers all requests that were taken, and all later ones.
    pub fn answer(&self) {
        self.set(Mode::Answers);
    }

    /// Waits until it holds so many requests.
    pub fn wait_held(&self, count: usize) {
        eventually("the file system is asked", || {
            self.shared.lock().unwrap().held.len() >= count
        });
    }

    /// The file's content.
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.shared.lock().unwrap().data[offset..offset + len].to_vec()
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        // Closing the device ends all requests, with an error.
        self.set(Mode::Ends);
        let _ = self.server.take().unwrap().join();
        let _ = Command::new("umount").arg("-l").arg(&self.mount).status();
    }
}

fn serve(mut device: File, shared: &Mutex<State>) {
    let mut buffer = vec![0; HEADER + 4096 + MAX_WRITE as usize];
    loop {
        let mut guard = shared.lock().unwrap();
        let state = &mut *guard;
        if state.mode == Mode::Ends {
            return;
        }
        if state.mode == Mode::Answers {
            while let Some(request) = state.held.pop_front() {
                answer(&mut device, &mut state.data, &request);
            }
        }
        let moment = Timespec {
            tv_sec: 0,
            tv_nsec: 2_000_000,
        };
        drop(guard);
        let mut fds = [PollFd::new(&device, PollFlags::IN)];
        if poll(&mut fds, Some(&moment)) == Ok(0) {
            continue;
        }
        let request = match device.read(&mut buffer) {
            Ok(len) => buffer[..len].to_vec(),
            // The file system was unmounted.
            Err(error) if error.raw_os_error() == Some(19) => return,
            // A request was interrupted before it was read.
            Err(_) => continue,
        };
        let mut guard = shared.lock().unwrap();
        let state = &mut *guard;
        match state.mode {
            Mode::Silent => state.held.push_back(request),
            Mode::SilentAt(code) if word(&request, 4) == code => state.held.push_back(request),
            Mode::Full if word(&request, 4) == WRITE => tell(&mut device, &request, Err(ENOSPC)),
            _ => answer(&mut device, &mut state.data, &request),
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// `struct fuse_attr`.
fn attributes(node: u64, size: usize) -> Vec<u8> {
    let (mode, links): (u32, u32) = match node {
        ROOT => (0o040_755, 2),
        _ => (0o100_600, 1),
    };
    let mut bytes = Vec::new();
    for long in [node, size as u64, size as u64 / 512, 0, 0, 0] {
        bytes.extend(long.to_le_bytes());
    }
    for word in [0, 0, 0, mode, links, 0, 0, 0, 4096, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

/// Returns the content of the answer to a request, or the error number; `None` for no answer.
fn result(data: &mut [u8], request: &[u8]) -> Option<Result<Vec<u8>, i32>> {
    let (code, node, body) = (word(request, 4), long(request, 16), &request[HEADER..]);
    // Attributes and names may be asked for each time.
    let size = data.len();
    let answer = match code {
        FORGET | BATCH_FORGET | INTERRUPT => return None,
        INIT => {
            let mut bytes = Vec::new();
            for word in [7, 31, 0, 1 | 1 << 5, 12 | 9 << 16, MAX_WRITE, 1] {
                bytes.extend(u32::to_le_bytes(word));
            }
            bytes.resize(64, 0);
            bytes
        }
        LOOKUP if body == format!("{NAME}\0").as_bytes() => {
            let mut bytes = FILE.to_le_bytes().to_vec();
            bytes.resize(40, 0);
            bytes.extend(attributes(FILE, size));
            bytes
        }
        LOOKUP => return Some(Err(ENOENT)),
        GETATTR => {
            let mut bytes = vec![0; 16];
            bytes.extend(attributes(node, size));
            bytes
        }
        OPEN => vec![0; 16],
        READ => {
            let from = (long(body, 8) as usize).min(size);
            let to = (from + word(body, 16) as usize).min(size);
            data[from..to].to_vec()
        }
        WRITE => {
            let (from, len) = (long(body, 8) as usize, word(body, 16) as usize);
            data[from..from + len].copy_from_slice(&body[40..40 + len]);
            let mut bytes = (len as u32).to_le_bytes().to_vec();
            bytes.resize(8, 0);
            bytes
        }
        STATFS => vec![0; 80],
        RELEASE | FSYNC | FLUSH => Vec::new(),
        _ => return Some(Err(ENOSYS)),
    };
    Some(Ok(answer))
}

fn answer(device: &mut File, data: &mut [u8], request: &[u8]) {
    if let Some(result) = result(data, request) {
        tell(device, request, result);
    }
}

fn tell(device: &mut File, request: &[u8], result: Result<Vec<u8>, i32>) {
    let (error, body) = match result {
        Ok(body) => (0, body),
        Err(errno) => (-errno, Vec::new()),
    };
    let mut bytes = (16 + body.len() as u32).to_le_bytes().to_vec();
    bytes.extend(error.to_le_bytes());
    bytes.extend(&request[8..16]);
    bytes.extend(body);
    // The caller does not wait any more, or the file system was unmounted.
    let _ = device.write_all(&bytes);
}
