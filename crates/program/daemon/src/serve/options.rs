//! Options of the serving process with defaults applied, and the state with which it starts.

use crate::confine::path_check::PathAnswers;
use crate::keep::{KeeperSession, Unavailable};
use crate::manage::{Source, StateLock, beside};
use crate::open::prepare::UnavailableDisk;
use crate::registry::settings::AllSettings;
use config::access::Principal;
use config::choices::{IdentityRule, KeeperMode, SandboxMode, Spread};
use config::disk::DiskSpec;
use config::options::{Paths, Size};
use config::spec::{ProcessSpec, Specs};
use dma::MemoryLimits;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use volume::{IoOptions, PreviousProcess};
use worker::{ConnectRate, IdleWindow};

/// Time in seconds that the end waits for devices and servers that do not answer: less than an
/// administrator waits.
const STOP_TIMEOUT: u64 = 4;

/// Options of each thread that serves disks: polling and io_uring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopOptions {
    /// Time for which a thread polls on after the last work.
    pub idle_window: IdleWindow,
    /// Maximum interval between two polls of idle guests with mapped doorbells; `None`: the
    /// worker's default.
    pub max_poll_interval: Option<Duration>,
    /// Whether guest memory is pinned for io_uring (fixed buffers).
    pub pin_memory: bool,
    /// Whether a kernel thread takes requests from the io_uring (SQPOLL).
    pub sqpoll: bool,
    /// Maximum time that the end of the process waits for devices and servers that do not answer.
    pub stop_timeout: Duration,
}

impl LoopOptions {
    /// Returns the options of the thread's io_uring.
    pub fn io(&self) -> IoOptions {
        IoOptions {
            fixed_buffers: self.pin_memory,
            sqpoll: self.sqpoll,
            stop_timeout: self.stop_timeout,
            ..IoOptions::default()
        }
    }
}

/// Limits for each client: memory, descriptors and connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientLimits {
    /// Windows of guest memory that a client of a controller may map, which it is sent as
    /// `max_dma_maps`; the protocol's default if `None`.
    pub windows: Option<u16>,
    /// Maximum number of memory files of a client, and of bytes in them.
    pub memory: MemoryLimits,
    /// Maximum rate of connections to each socket.
    pub connects: ConnectRate,
}

/// Options of the whole process, with defaults applied.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Limits for each client.
    pub clients: ClientLimits,
    /// Polling and I/O options of each thread.
    pub polling: LoopOptions,
    /// Limits of the wait for files and block devices that a previous process has open.
    pub previous: PreviousProcess,
    /// Worker threads: controllers, exports and queues of block devices are assigned to them in
    /// turn.
    pub workers: u16,
    /// Distribution of a controller's queues over the workers.
    pub spread: Spread,
    /// CPUs to which the workers are pinned in turn; empty for no pinning.
    pub cpus: Vec<usize>,
    /// Path of the control socket, and whether it is the default.
    pub control: Option<PathBuf>,
    /// TCP address for Prometheus; `None` for no metrics over TCP.
    pub metrics: Option<SocketAddr>,
    /// Group with read-only access to the management API, by a socket of its own.
    pub control_group: Option<Principal>,
    /// Whether the process enters a sandbox.
    pub sandbox: SandboxMode,
    /// Holder of the disks' descriptors while the process restarts.
    pub keeper: KeeperMode,
    /// Path of the configuration file or folder that was read, if any.
    pub read_from: Option<PathBuf>,
    /// Folders, files and servers that may be opened at run time.
    pub allow: Vec<PathBuf>,
    /// File that stores the disks that were added at run time.
    pub state: Option<PathBuf>,
    /// Rule by which identifiers that are not configured are made.
    pub identity: IdentityRule,
    /// Options of a daemon. Its disks may change: room is left for them.
    pub daemon: Option<Daemon>,
    /// Whether this process is a new version that replaces the one that served
    /// (`KeeperSession::is_replacement`).
    pub is_replacement: bool,
    /// Answers of files to the checks of this process.
    pub answers: Arc<PathAnswers>,
    /// Disks that the previous process did not serve.
    pub unavailable: Unavailable,
    /// Settings of volumes that were changed while earlier processes served.
    pub settings: AllSettings,
}

/// Options of a process that adds and removes disks at run time.
#[derive(Clone, Debug, Default)]
pub struct Daemon {
    /// Path of the configuration, which a reload reads again.
    pub config: Option<PathBuf>,
    /// Process options of the configuration file.
    pub process: ProcessSpec,
    /// Disks that were added at run time to an earlier process, and are served again.
    pub kept: Vec<DiskSpec>,
    /// Disks of the configuration as it was read last. The served ones may have changed since.
    pub file: BTreeMap<String, DiskSpec>,
    /// Lock that keeps other processes from using the same state file.
    pub _lock: Option<Arc<StateLock>>,
}

impl ServeOptions {
    /// Returns the options with defaults for absent ones; the default of `workers` depends on the
    /// command.
    pub fn new(process: ProcessSpec, workers: u16) -> Self {
        let memory = MemoryLimits::DEFAULT;
        Self {
            clients: ClientLimits {
                windows: process.client_windows,
                memory: MemoryLimits {
                    mappings: process.client_files.map_or(memory.mappings, u64::from),
                    bytes: process
                        .client_memory
                        .map_or(memory.bytes, |Size(bytes)| bytes),
                },
                connects: process.client_connects.map(ConnectRate).unwrap_or_default(),
            },
            polling: LoopOptions {
                idle_window: process.idle_window.unwrap_or_default(),
                max_poll_interval: process
                    .max_poll_interval
                    .map(|micros| Duration::from_micros(micros.into())),
                pin_memory: process.pin_memory.unwrap_or(false),
                sqpoll: process.sqpoll.unwrap_or(false),
                stop_timeout: Duration::from_secs(
                    process.stop_timeout.map_or(STOP_TIMEOUT, u64::from),
                ),
            },
            previous: PreviousProcess {
                limit: process.previous_timeout.map_or_else(
                    || PreviousProcess::default().limit,
                    |seconds| Duration::from_secs(seconds.into()),
                ),
                ..PreviousProcess::default()
            },
            workers: process.workers.unwrap_or(workers),
            spread: process.spread.unwrap_or_default(),
            cpus: process.cpus.unwrap_or_default(),
            control: process.control,
            metrics: process.metrics,
            control_group: process.control_group,
            sandbox: process.sandbox.unwrap_or_default(),
            keeper: process.keeper.unwrap_or_default(),
            read_from: None,
            allow: process.allow.map(|Paths(paths)| paths).unwrap_or_default(),
            state: process.state,
            identity: process.identity.unwrap_or_default(),
            daemon: None,
            is_replacement: false,
            answers: Arc::default(),
            unavailable: Unavailable::default(),
            settings: AllSettings::default(),
        }
    }

    /// Enters how this process has begun: alone, or after another one.
    pub fn begin(&mut self, keeper: &KeeperSession) {
        self.previous.taken_over = keeper.is_successor();
        self.is_replacement = keeper.is_replacement();
        self.answers.clone_from(&keeper.answers);
    }

    /// Returns the source of a disk of this name, among those that are served from the start.
    pub fn source(&self, name: &str) -> Source {
        let kept = self.daemon.iter().flat_map(|daemon| &daemon.kept);
        if kept.into_iter().any(|disk| disk.name() == name) {
            Source::Runtime
        } else {
            Source::Config
        }
    }

    /// Returns whether a disk may be unavailable if its volumes cannot be opened, while all other
    /// disks are served. A process that replaces another version has to serve all disks that the
    /// other version serves.
    pub fn may_be_unavailable(&self, name: &str) -> bool {
        if self.is_replacement {
            self.unavailable.disks.contains(name)
        } else {
            self.daemon.is_some() || self.previous.taken_over
        }
    }

    /// Whether a disk is left out that cannot be served although its volumes are open.
    pub fn may_be_left_out(&self, name: &str) -> bool {
        if self.is_replacement {
            self.unavailable.disks.contains(name)
        } else {
            self.source(name) == Source::Runtime || self.previous.taken_over
        }
    }

    /// Returns the error of a disk that keeps the process from serving any.
    pub fn not_served(&self, name: &str, error: anyhow::Error) -> anyhow::Error {
        // The operator of an upgrade has not named the disk.
        if self.is_replacement {
            error.context(format!("disk {name} cannot be served"))
        } else {
            error
        }
    }

    /// Splits the disks that an earlier process has kept into those that can be served beside the
    /// configured ones, and the rest.
    pub fn kept_beside(&self, configured: &Specs) -> (Specs, Vec<UnavailableDisk>) {
        let kept = self.daemon.as_ref().map_or(&[][..], |daemon| &daemon.kept);
        beside(configured, kept, self.control.as_deref(), &self.answers)
    }
}
