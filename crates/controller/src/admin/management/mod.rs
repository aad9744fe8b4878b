//! Namespace Management and Namespace Attachment ("NVMe Base 2.1", 5.1.21 and 5.1.20): namespaces
//! that a host makes, of a pool ([`NamespacePool`]), one command after the other.
//!
//! | command | 1 | 2 | 3 |
//! |---|---|---|---|
//! | create | | the pool makes it | |
//! | attach | | the pool opens it, and keeps that it is attached | the engines open it |
//! | detach | no command finds it, those in flight end | the pool keeps that | |
//! | delete | the same, if it is attached | the pool removes it | |
//!
//! What is to be done is committed before the first step, and the pool's steps are in a later
//! round. So a process that dies leaves a command that the next one does again from its beginning:
//! each step names the namespace by its NGUID, and has no effect when it was done before. A reset
//! of the controller takes the host's interest away, but what was begun is done.
//!
//! Namespaces of the configuration are not the host's to delete or to detach: Operation Denied.

mod commands;
mod steps;

use super::answers::Answers;
use crate::pool::{PoolError, PooledNamespace};
use crate::survival::state::{HeldCommand, ManagementState};
use nvme::{Command, Status};
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

/// After this time, commands in flight on a namespace that goes end early.
const GRACE: Duration = Duration::from_secs(5);
/// Between two looks at what does not tell of its end.
const LOOK: Duration = Duration::from_millis(2);

const DENIED: Status = Status::OPERATION_DENIED.with_dnr(true);
const CONTROLLERS: Status = Status::CONTROLLER_LIST_INVALID.with_dnr(true);
const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true);

/// What a command is to do. Namespaces by their NGUIDs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Task {
    Create {
        nsid: u32,
        blocks: u64,
        /// Of a block.
        block_size: u32,
        nguid: [u8; 16],
        shared: bool,
    },
    /// The first is at work.
    Delete(VecDeque<[u8; 16]>),
    Attach([u8; 16]),
    Detach([u8; 16]),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The task is to be committed.
    Begin,
    /// It is.
    Ready,
    /// Commands in flight on the namespace end, from this time on; early, if `true`.
    Leaving(Instant, bool),
    /// The pool is at work: the number of the change.
    Changing(u64),
    /// It is to be opened by all engines.
    Show,
    Showing,
    /// One of them could not.
    NotShown,
}

struct Running {
    /// The command, unless a reset was meanwhile.
    cid: Option<u16>,
    nsid: u32,
    task: Task,
    stage: Stage,
    failed: Option<Status>,
    /// What is to be deleted, as it was.
    before: Option<PooledNamespace>,
}

/// The command at work, and those that wait for it.
#[derive(Default)]
pub(crate) struct Management {
    running: Option<Running>,
    waiting: VecDeque<Command>,
    answers: Arc<Answers<Result<(), PoolError>>>,
    /// Of the last change.
    number: u64,
    /// When to look again.
    look: Option<Instant>,
}

impl Management {
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Commands without a completion.
    pub fn outstanding(&self) -> usize {
        let running = self.running.as_ref().and_then(|running| running.cid);
        usize::from(running.is_some()) + self.waiting.len()
    }

    /// A controller-level reset: no command waits any more.
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

    /// As [`Management::save`] said: from the beginning. `None`: there is no such task.
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
            // None: of a pool that had none, when all of it was to be deleted.
            (2, _) => Some(Task::Delete(nguids.iter().copied().collect())),
            (3, [nguid]) => Some(Task::Attach(*nguid)),
            (4, [nguid]) => Some(Task::Detach(*nguid)),
            _ => return None,
        };
        let waiting = saved.waiting.iter().map(HeldCommand::command);
        rest.is_empty().then_some(Management {
            running: task.map(|task| Running {
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
