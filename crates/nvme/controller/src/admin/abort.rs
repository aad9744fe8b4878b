//! Abort command ("NVMe Base 2.1", 5.1.1), which tries to end another command early.

use super::{AdminOutcome, AdminResult};
use crate::control::Controller;
use nvme::cmd::admin::{AbortCdw10, AbortResult};
use nvme::{Command, Status};

/// Maximum number of waiting Abort commands. (ACL of Identify Controller, a zero-based value.)
pub(super) const MAX_ABORTS: usize = 8;

struct WaitingAbort {
    /// Command identifier of the Abort command.
    cid: u16,
    /// Submission queue ID and command identifier of the command to abort.
    target: (u16, u16),
}

/// Abort commands that wait until the command to abort has ended.
#[derive(Default)]
pub(crate) struct Aborts(Vec<WaitingAbort>);

impl Aborts {
    /// Returns the waiting Abort commands for the next process: command identifier, then queue ID
    /// and command identifier of the command to abort.
    pub fn save(&self) -> Vec<(u16, u16, u16)> {
        let waiting = self.0.iter();
        waiting.map(|w| (w.cid, w.target.0, w.target.1)).collect()
    }
}

fn not_aborted(ianp: bool) -> u32 {
    AbortResult::new().with_ianp(ianp).into_bits()
}

impl Controller {
    pub(super) fn abort_command(&mut self, command: &Command) -> AdminResult {
        let target = AbortCdw10::from_bits(command.cdw10.get());
        if self.admin.aborts.0.len() >= MAX_ABORTS {
            return Err(Status::ABORT_COMMAND_LIMIT_EXCEEDED);
        }
        if target.sqid() == 0 {
            // Among admin commands, only Asynchronous Event Requests are outstanding long enough to
            // be aborted.
            let aborted = self.admin.events.take(target.cid());
            if aborted {
                self.finish_admin(target.cid(), Status::ABORT_REQUESTED, 0);
            }
            return Ok(AdminOutcome::Done(not_aborted(!aborted)));
        }
        let (sqid, cid) = (target.sqid(), target.cid());
        if !self.begin_abort(command.cid.get(), (sqid, cid)) {
            return Ok(AdminOutcome::Done(not_aborted(true)));
        }
        Ok(AdminOutcome::Later)
    }

    /// Begins an Abort command, which waits until the command to abort has ended. Returns `false`
    /// when the submission queue does not exist.
    fn begin_abort(&mut self, cid: u16, target: (u16, u16)) -> bool {
        let found = self.abort(target.0, target.1);
        if found {
            self.admin.aborts.0.push(WaitingAbort { cid, target });
        }
        found
    }

    /// Restores the Abort commands of the previous process: the commands to abort are looked up
    /// again. One that has completed meanwhile counts as not aborted.
    pub(crate) fn restore_aborts(&mut self, saved: &[(u16, u16, u16)]) {
        for &(cid, sqid, target) in saved.iter().take(MAX_ABORTS) {
            if !self.begin_abort(cid, (sqid, target)) {
                self.finish_admin(cid, Status::SUCCESS, not_aborted(true));
            }
        }
    }

    /// Completes the Abort commands for a command that has ended.
    pub(crate) fn abort_done(&mut self, sqid: u16, cid: u16, aborted: bool) {
        self.answer_aborts((sqid, cid), not_aborted(!aborted));
    }

    /// Completes the Abort commands for a command that was not found in its queue.
    pub(crate) fn abort_missed(&mut self, sqid: u16, cid: u16) {
        self.answer_aborts((sqid, cid), not_aborted(true));
    }

    fn answer_aborts(&mut self, target: (u16, u16), dw0: u32) {
        let waiting = std::mem::take(&mut self.admin.aborts.0);
        for wait in waiting {
            if wait.target == target {
                self.finish_admin(wait.cid, Status::SUCCESS, dw0);
            } else {
                self.admin.aborts.0.push(wait);
            }
        }
    }
}
