//! Namespace Management and Namespace Attachment ("NVMe Base 2.1", 5.1.21 and 5.1.20): a host
//! manages namespaces in a pool ([`NamespacePool`]), by one command at a time.
//!
//! | command | 1 | 2 | 3 |
//! |---|---|---|---|
//! | create | | the pool creates it | |
//! | attach | | the pool opens it, and stores that it is attached | the engines open it |
//! | detach | new commands no longer find it, outstanding ones end | the pool stores that | |
//! | delete | as for detach, if it is attached | the pool removes it | |
//!
//! The task is committed before the first step, and the pool's steps follow in a later round. After
//! a crash, the next process repeats the command from its beginning: each step identifies the
//! namespace by its NGUID, and has no effect if it was already done. After a controller-level reset
//! no completion is posted, but a command that was begun is finished.
//!
//! The host cannot delete or detach namespaces of the configuration: Operation Denied.

mod commands;
mod steps;

use super::answers::Answers;
use crate::pool::{PoolError, PooledNamespace};
use crate::survival::state::{HeldCommand, ManagementState};
use nvme::{Command, Status};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

/// Delay until outstanding commands on a detached or deleted namespace are asked to end early.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of checks on operations of the pool or the engines that do not report their end.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

const DENIED: Status = Status::OPERATION_DENIED.with_dnr(true);
const CONTROLLERS: Status = Status::CONTROLLER_LIST_INVALID.with_dnr(true);
const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true);

/// Task of a management command. NGUIDs identify the namespaces.
#[derive(Clone, PartialEq, Eq)]
enum Task {
    Create {
        nsid: u32,
        blocks: u64,
        /// Logical block size of the new namespace in bytes.
        block_size: u32,
        nguid: [u8; 16],
        shared: bool,
    },
    /// NGUIDs of the namespaces to delete; the first one is being deleted.
    Delete(VecDeque<[u8; 16]>),
    Attach([u8; 16]),
    Detach([u8; 16]),
}

/// Form in log lines, with NGUIDs in hexadecimal digits.
impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create {
                nsid,
                blocks,
                block_size,
                nguid,
                shared,
            } => write!(
                f,
                "create namespace {nsid} ({blocks} blocks of {block_size} bytes, shared: {shared}, \
                 nguid {})",
                Hex(nguid)
            ),
            Self::Delete(all) => {
                f.write_str("delete")?;
                all.iter()
                    .try_for_each(|nguid| write!(f, " {}", Hex(nguid)))
            }
            Self::Attach(nguid) => write!(f, "attach {}", Hex(nguid)),
            Self::Detach(nguid) => write!(f, "detach {}", Hex(nguid)),
        }
    }
}

/// Bytes of an identifier, written as hexadecimal digits.
struct Hex<'a>(&'a [u8; 16]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The task has yet to be committed to the state memory.
    Begin,
    /// The task is committed to the state memory, and its first step can begin.
    Ready,
    /// Outstanding commands on the namespace are awaited since this time. If `true`, they were
    /// asked to end early.
    Leaving(Instant, bool),
    /// The namespace pool is making the change with this number.
    Changing(u64),
    /// Every engine of the controller has yet to open the namespace.
    Show,
    Showing,
    /// An engine could not open the namespace, which therefore is detached again.
    NotShown,
}

struct ManagementOperation {
    /// Identifier of the management command; `None` after a reset, when no completion is posted.
    cid: Option<u16>,
    nsid: u32,
    task: Task,
    stage: Stage,
    failed: Option<Status>,
    /// State of the pool's namespace before its deletion, for the persistent event log.
    before: Option<PooledNamespace>,
}

/// Namespace management: the current command, and the commands that wait for its end.
#[derive(Default)]
pub(crate) struct Management {
    running: Option<ManagementOperation>,
    waiting: VecDeque<Command>,
    answers: Arc<Answers<Result<(), PoolError>>>,
    /// Number of the last change that was requested from the namespace pool.
    number: u64,
    /// Time of the next check on operations that do not report their end; `None` if there are none.
    look: Option<Instant>,
}

impl Management {
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Returns the number of management commands without a completion.
    pub fn outstanding(&self) -> usize {
        let running = self.running.as_ref().and_then(|running| running.cid);
        usize::from(running.is_some()) + self.waiting.len()
    }

    /// Handles a controller-level reset: no completions are posted, and waiting commands are
    /// dropped.
    pub fn reset(&mut self) {
        self.waiting.clear();
        if let Some(running) = &mut self.running {
            running.cid = None;
        }
    }

    pub fn set_waker(&self, waker: Waker) {
        self.answers.set_waker(waker);
    }

    pub fn save(&self) -> Option<ManagementState> {
        let running = self.running.as_ref();
        if running.is_none() && self.waiting.is_empty() {
            return None;
        }
        let mut state = ManagementState {
            waiting: self.waiting.iter().map(HeldCommand::new).collect(),
            ..ManagementState::default()
        };
        let Some(running) = running else {
            return Some(state);
        };
        state.cid = running.cid;
        state.nsid = running.nsid;
        state.failed = running.failed.map(Status::into_bits);
        let nguids = match &running.task {
            Task::Create {
                blocks,
                block_size,
                nguid,
                shared,
                ..
            } => {
                (state.task, state.blocks, state.shared) = (1, *blocks, *shared);
                state.block_size = *block_size;
                nguid.to_vec()
            }
            Task::Delete(nguids) => {
                state.task = 2;
                nguids.iter().flatten().copied().collect()
            }
            Task::Attach(nguid) => {
                state.task = 3;
                nguid.to_vec()
            }
            Task::Detach(nguid) => {
                state.task = 4;
                nguid.to_vec()
            }
        };
        state.nguids = nguids;
        Some(state)
    }

    /// Restores the task saved by [`Management::save`], which begins again. Returns `None` when the
    /// saved task is invalid.
    pub fn restore(saved: &ManagementState) -> Option<Self> {
        let (nguids, rest) = saved.nguids.as_chunks::<16>();
        let task = match (saved.task, nguids) {
            (0, []) => None,
            (1, [nguid]) => Some(Task::Create {
                nsid: saved.nsid,
                blocks: saved.blocks,
                block_size: saved.block_size,
                nguid: *nguid,
                shared: saved.shared,
            }),
            // An empty list is valid: the command deletes all namespaces of a pool without any.
            (2, _) => Some(Task::Delete(nguids.iter().copied().collect())),
            (3, [nguid]) => Some(Task::Attach(*nguid)),
            (4, [nguid]) => Some(Task::Detach(*nguid)),
            _ => return None,
        };
        let waiting = saved.waiting.iter().map(HeldCommand::command);
        rest.is_empty().then_some(Management {
            running: task.map(|task| ManagementOperation {
                cid: saved.cid,
                nsid: saved.nsid,
                task,
                stage: Stage::Begin,
                failed: saved.failed.map(Status::from_bits),
                before: None,
            }),
            waiting: waiting.collect::<Option<_>>()?,
            ..Management::default()
        })
    }
}
