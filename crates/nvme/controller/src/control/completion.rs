//! Completion of admin commands. A command's effect is committed to the state memory before its
//! completion is posted: a process that dies in between leaves both to the next one
//! ([`survival`](crate::survival)).

use super::Controller;
use crate::survival::Survival;
use crate::survival::state::AdminCompletion;
use nvme::Status;

impl Controller {
    /// Ends an admin command: its completion is posted when its effect is committed.
    pub(crate) fn finish_admin(&mut self, cid: u16, status: Status, result: u32) {
        self.touch();
        self.admin.rearm();
        self.endings.push(AdminCompletion {
            cid,
            status: status.into_bits(),
            result,
        });
    }

    /// Commits changes, and then makes them visible to the host.
    #[inline]
    pub(crate) fn settle(&mut self) {
        if self.survival.as_ref().is_some_and(Survival::is_dirty) {
            self.commit();
        }
        if !self.endings.is_empty() {
            self.post_endings();
        }
    }

    #[cold]
    fn commit(&mut self) {
        crash::point!("controller.commit.before");
        let state = self.control_state();
        if let Some(survival) = &mut self.survival {
            survival.commit(state);
        }
        self.marks_committed();
        crash::point!("controller.commit.after");
    }

    fn post_endings(&mut self) {
        for AdminCompletion {
            cid,
            status,
            result,
        } in std::mem::take(&mut self.endings)
        {
            let status = Status::from_bits(status);
            self.engine.finish(0, cid, status, result);
            crash::point!("controller.admin.posted");
        }
    }
}
