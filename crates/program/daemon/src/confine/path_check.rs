//! Check of whether the files of disks answer, before this process touches them.
//!
//! A file system that does not answer (FUSE, a dead network file system) holds each thread that
//! asks it, some of them even against SIGKILL. A process with such a thread can neither end nor
//! leave its locks to the next one. Another process therefore opens the files first, read-only and
//! without locks, as `vnvme check` does. This process touches them when the other one has answered.
//! A checking process that hangs has nothing open but these files, and nobody waits for its end.
//!
//! At the start one process checks all disks ([`check_at_start`]). Later, in the sandbox, the
//! process that starts receivers starts one for each attempt ([`PathChecker`]).

use crate::confine::receiver::Role;
use crate::manage::places;
use crate::open::devices::DeviceRegistry;
use crate::open::kinds;
use crate::serve::options::ServeOptions;
use anyhow::Result;
use config::choices::SandboxMode;
use config::disk::{DiskSpec, paths_of_volume};
use config::volumes::is_within;
use receive::Spawner;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions as FileOptions;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use volume::OpenOptions;

/// Number of the request for a checking process ([`Spawner::request`]).
pub const REQUEST: u32 = u32::MAX;
/// Maximum number of checking processes of the process that starts receivers.
const MAX_PROCESSES: usize = 256;

/// Time after which a disk is left out at the start. It is served when its files answer.
pub const LIMIT: Duration = Duration::from_secs(3);
/// Limit of a disk that was unavailable before: all other disks would wait in each upgrade.
const UNAVAILABLE_LIMIT: Duration = Duration::from_millis(500);

/// Interval of checks of these limits.
const INTERVAL: Duration = Duration::from_millis(50);

/// Bytes that are read of each file.
const READ_LEN: usize = 512;

/// Answers of files to the checks of this process.
#[derive(Debug, Default)]
pub struct PathAnswers {
    /// Disks of the start whose files have not answered, with the beginning of the check.
    hanging: Mutex<BTreeMap<String, Instant>>,
    /// Paths that could not be resolved in time. This process does not touch them.
    unanswered: Mutex<BTreeSet<PathBuf>>,
    /// Disks that were checked at the start.
    checked: Mutex<BTreeSet<String>>,
}

impl PathAnswers {
    /// Returns since when the files of a disk have not answered, if they have not at the start.
    pub fn hanging_since(&self, disk: &str) -> Option<Instant> {
        self.hanging.lock().unpoisoned().get(disk).copied()
    }

    /// Returns whether a path could not be resolved in time.
    pub fn is_unanswered(&self, path: &Path) -> bool {
        let unanswered = self.unanswered.lock().unpoisoned();
        !unanswered.is_empty() && unanswered.contains(&absolute(path))
    }

    /// Resolves the links of a path (realpath(3)).
    ///
    /// # Errors
    /// The error of the system call; `TimedOut` for a path that could not be resolved in time.
    pub fn canonicalize(&self, path: &Path) -> io::Result<PathBuf> {
        if self.is_unanswered(path) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        path.canonicalize()
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Text for an operator about a disk whose files do not answer.
pub fn opening_for(time: Duration) -> String {
    format!(
        "has been opening for {} s: its file system does not answer",
        time.as_secs()
    )
}

/// Files to be opened: of a disk, or a folder of the option `allow`.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Item {
    paths: Vec<PathBuf>,
    /// URLs of volumes on files of this host.
    volumes: Vec<String>,
}

impl Item {
    fn of(disk: &DiskSpec) -> Self {
        let is_local = |url: &&str| !paths_of_volume(url).is_empty() && !is_within(url);
        let volumes = disk.volumes().into_iter().filter(is_local);
        // A path that is no UTF-8 does not come from a configuration. Its volume is not checked.
        let mut paths: Vec<PathBuf> = disk.files().iter().map(|path| absolute(path)).collect();
        paths.retain(|path| path.to_str().is_some());
        Self {
            paths,
            volumes: volumes.map(str::to_owned).collect(),
        }
    }

    /// Asks for all of it. The result does not matter: errors are found again by the process that
    /// serves the disk.
    fn open(&self, resolved: impl FnOnce()) {
        for path in &self.paths {
            // The sandbox asks for the folder.
            let target = path.canonicalize().ok();
            for path in [Some(path), target.as_ref()].into_iter().flatten() {
                let _ = path.parent().map(Path::metadata);
            }
        }
        resolved();
        let read: Vec<_> = self.paths.iter().map(|path| read(path)).collect();
        if read.contains(&Err(io::ErrorKind::Unsupported)) {
            return;
        }
        let kinds = kinds(DeviceRegistry::default());
        for url in &self.volumes {
            let options = OpenOptions {
                read_only: true,
                is_check: true,
                ..OpenOptions::default()
            };
            drop(kinds.open(url, options));
        }
    }
}

/// Reads the beginning of a file or block device. Opening anything else could have an effect.
///
/// # Errors
/// The kind of the error; `Unsupported` for any other file, which is not opened.
fn read(path: &Path) -> Result<(), io::ErrorKind> {
    let read = || {
        let metadata = path.metadata()?;
        let kind = metadata.file_type();
        if metadata.is_dir() {
            return Ok(());
        }
        if !metadata.is_file() && !kind.is_block_device() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let file = FileOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(path)?;
        file.read_at(&mut [0; READ_LEN], 0).map(drop)
    };
    read().map_err(|error: io::Error| error.kind())
}

/// Runs the checking process: reads the items from its standard input, and answers there.
///
/// # Errors
/// A sentence for the user.
pub fn run() -> Result<()> {
    let mut socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut text = Vec::new();
    socket.read_to_end(&mut text)?;
    let items: Vec<Item> = serde_json::from_slice(&text)?;
    std::thread::scope(|scope| {
        for (number, item) in items.iter().enumerate() {
            let socket = &socket;
            // The other process may have ended.
            let tell = move |what: char| {
                let _ = (&*socket).write_all(format!("{what}{number}\n").as_bytes());
            };
            let check = move || {
                item.open(|| tell(RESOLVED));
                tell(OPENED);
            };
            // Without a thread, the disk is opened without a check.
            let thread = std::thread::Builder::new().name("check".into());
            if thread.spawn_scoped(scope, check).is_err() {
                tell(RESOLVED);
                tell(OPENED);
            }
        }
    });
    Ok(())
}

/// First character of an answer: all paths of an item are resolved, and their folders answer. The
/// number of the item follows.
const RESOLVED: char = 'r';
/// First character of an answer: an item was opened, or could not be.
const OPENED: char = 'o';

/// Items that another process opens now.
#[derive(Debug)]
pub struct PathCheck {
    socket: UnixStream,
    /// Received text after the last whole line.
    rest: Vec<u8>,
    items: Vec<CheckedItem>,
    began: Instant,
    answers: Arc<PathAnswers>,
}

#[derive(Debug)]
struct CheckedItem {
    paths: Vec<PathBuf>,
    is_resolved: bool,
    is_open: bool,
}

impl PathCheck {
    fn start(
        mut socket: UnixStream,
        items: Vec<Item>,
        answers: &Arc<PathAnswers>,
    ) -> io::Result<Self> {
        socket.write_all(&serde_json::to_vec(&items)?)?;
        socket.shutdown(Shutdown::Write)?;
        let items = items.into_iter().map(|item| CheckedItem {
            paths: item.paths,
            is_resolved: false,
            is_open: false,
        });
        Ok(Self {
            socket,
            rest: Vec::new(),
            items: items.collect(),
            began: Instant::now(),
            answers: answers.clone(),
        })
    }

    /// Returns when the check has begun.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// Waits until everything was opened, for `limit` at most. Returns whether it was.
    pub fn wait(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            if self.items.iter().all(|item| item.is_open) {
                return true;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.advance(left);
        }
    }

    /// Reads answers, for which it waits at most `limit`.
    fn advance(&mut self, limit: Duration) {
        let limit = Timespec::try_from(limit).unwrap_or_default();
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        if !matches!(poll(&mut fds, Some(&limit)), Ok(1..)) {
            return;
        }
        let mut bytes = [0; 4096];
        match self.socket.read(&mut bytes) {
            Ok(len @ 1..) => self
                .rest
                .extend_from_slice(bytes.get(..len).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Without a checking process, disks are opened without a check.
            Ok(0) | Err(_) => (0..self.items.len()).for_each(|number| {
                self.note(RESOLVED, number);
                self.note(OPENED, number);
            }),
        }
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            let mut line = line.trim_end().chars();
            if let (Some(what), Ok(number)) = (line.next(), line.as_str().parse()) {
                self.note(what, number);
            }
        }
    }

    fn note(&mut self, what: char, number: usize) {
        let Some(item) = self.items.get_mut(number) else {
            return;
        };
        match what {
            RESOLVED => {
                item.is_resolved = true;
                let mut unanswered = self.answers.unanswered.lock().unpoisoned();
                unanswered.retain(|path| !item.paths.contains(path));
            }
            _ => item.is_open = true,
        }
    }
}

/// Starts a checking process. Returns it with the socket to it.
fn start_process(mode: SandboxMode) -> io::Result<(Child, OwnedFd)> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = Role::Check(mode).command();
    command.stdin(Stdio::from(OwnedFd::from(theirs)));
    // Neither output, which a reader may wait for, nor a folder that hangs.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Ok((command.spawn()?, ours.into()))
}

/// Carries out a request for a checking process, in the process that starts receivers, which has
/// `processes` of them.
///
/// # Errors
/// `AGAIN` when there are too many; otherwise the error of the system call that failed.
pub fn carry_out(mode: SandboxMode, processes: &Arc<AtomicUsize>) -> Result<OwnedFd, Errno> {
    if processes.fetch_add(1, Ordering::Relaxed) >= MAX_PROCESSES {
        processes.fetch_sub(1, Ordering::Relaxed);
        return Err(Errno::AGAIN);
    }
    let failed = |error: io::Error| {
        processes.fetch_sub(1, Ordering::Relaxed);
        Errno::from_io_error(&error).unwrap_or(Errno::IO)
    };
    let (mut child, socket) = start_process(mode).map_err(failed)?;
    let waiting = std::thread::Builder::new().name("wait".into());
    let ended = processes.clone();
    let wait = move || {
        let _ = child.wait();
        ended.fetch_sub(1, Ordering::Relaxed);
    };
    waiting.spawn(wait).map_err(failed)?;
    Ok(socket)
}

/// Starter of checks while the process runs.
#[derive(Clone, Debug)]
pub struct PathChecker {
    spawner: Arc<Spawner>,
    answers: Arc<PathAnswers>,
}

impl PathChecker {
    /// Creates the starter. Checks are made by processes of `spawner`.
    pub fn new(spawner: Arc<Spawner>, answers: Arc<PathAnswers>) -> Self {
        Self { spawner, answers }
    }

    /// Starts the check of a disk's files; `None` for a disk without files, and without the process
    /// that starts checks.
    ///
    /// # Errors
    /// A text for the user: too many checks are under way.
    pub fn start(&self, disk: &DiskSpec) -> Result<Option<PathCheck>, String> {
        let item = Item::of(disk);
        if item.paths.is_empty() {
            return Ok(None);
        }
        let socket = match self.spawner.request(REQUEST, &[]) {
            Ok(socket) => socket,
            Err(errno @ (Errno::AGAIN | Errno::TIMEDOUT)) => {
                return Err(format!("its files cannot be checked now: {errno}"));
            }
            Err(errno) => {
                tracing::warn!(disk = disk.name(), %errno, "files are opened without a check");
                return Ok(None);
            }
        };
        Ok(PathCheck::start(socket.into(), vec![item], &self.answers).ok())
    }
}

/// Has the files of these disks opened by another process, and the folders of the option `allow`.
/// Returns when each has answered, or has had its time. `must_serve` says whether a disk has to be
/// served: it is waited for without limit. Disks that an earlier call has had are not opened again.
pub fn check_at_start<'a>(
    disks: impl Iterator<Item = &'a DiskSpec>,
    options: &ServeOptions,
    must_serve: impl Fn(&str) -> bool,
) {
    let answers = &options.answers;
    let (mut items, mut names) = (Vec::new(), Vec::new());
    let mut checked = answers.checked.lock().unpoisoned();
    let is_first = checked.is_empty();
    for disk in disks {
        let item = Item::of(disk);
        if checked.insert(disk.name()) && !item.paths.is_empty() {
            items.push(item);
            names.push(Some(disk.name()));
        }
    }
    drop(checked);
    for place in places(options).into_iter().filter(|_| is_first) {
        items.push(Item {
            paths: vec![absolute(&place)],
            volumes: Vec::new(),
        });
        names.push(None);
    }
    if items.is_empty() {
        return;
    }
    let started = start_process(options.sandbox)
        .and_then(|(child, socket)| Ok((child, PathCheck::start(socket.into(), items, answers)?)));
    let (mut child, mut check) = match started {
        Ok(started) => started,
        Err(error) => {
            tracing::warn!(%error, "files are opened without a check of whether they answer");
            return;
        }
    };
    let mut warned = false;
    loop {
        let time = check.began.elapsed();
        let waits = |(item, name): &(&CheckedItem, &Option<String>)| {
            let name = name.as_deref();
            let was_unavailable = name.is_some_and(|name| options.unavailable.disks.contains(name));
            let limit = if was_unavailable {
                UNAVAILABLE_LIMIT
            } else {
                LIMIT
            };
            !item.is_open && (time < limit || name.is_some_and(&must_serve))
        };
        let waiting: Vec<_> = check.items.iter().zip(&names).filter(waits).collect();
        if waiting.is_empty() {
            break;
        }
        if time >= LIMIT && !std::mem::replace(&mut warned, true) {
            for disk in waiting.iter().filter_map(|(_, name)| name.as_ref()) {
                tracing::warn!(disk, "the disk {}", opening_for(time));
            }
        }
        check.advance(INTERVAL);
    }
    if check.wait(Duration::ZERO) {
        // The process ends with its last answer.
        let _ = child.wait();
    }
    for (item, name) in check
        .items
        .iter()
        .zip(&names)
        .filter(|(item, _)| !item.is_open)
    {
        match name {
            Some(name) => {
                let mut hanging = answers.hanging.lock().unpoisoned();
                hanging.insert(name.clone(), check.began);
            }
            None => {
                let place = item.paths.first().map(|path| path.display().to_string());
                tracing::warn!(
                    place,
                    "a folder of the option allow does not answer: this process opens nothing in it"
                );
            }
        }
        if !item.is_resolved {
            let mut unanswered = answers.unanswered.lock().unpoisoned();
            unanswered.extend(item.paths.iter().cloned());
        }
    }
}
