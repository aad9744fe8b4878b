//! Admission of admin commands. A command runs at once, unless it has to wait: while a queue that
//! it may concern is migrating, while a remote engine is behind with its orders, and while Bus
//! Master Enable is clear. Later commands wait behind it.

use super::Controller;
use crate::admin::table;
use nvme::Command;
use std::collections::VecDeque;

/// Admin commands that have arrived and wait to begin.
#[derive(Default)]
pub(crate) struct Admission {
    /// Waiting commands, in order of arrival.
    held: VecDeque<Command>,
}

impl Admission {
    /// Returns the admin commands that wait and have not begun, in order of arrival.
    pub fn held(&self) -> impl Iterator<Item = &Command> {
        self.held.iter()
    }

    /// Adds a waiting admin command of the previous process.
    pub fn hold(&mut self, command: Command) {
        self.held.push_back(command);
    }

    /// Returns whether any command waits.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        !self.held.is_empty()
    }

    /// Removes all waiting commands, in a controller-level reset.
    pub(super) fn clear(&mut self) {
        self.held.clear();
    }
}

impl Controller {
    fn must_hold(&self, command: &Command) -> bool {
        let concerns_queues = table::concerns_queues(command.admin_opcode());
        // The command's data cannot be accessed without Bus Master Enable.
        (self.migration.is_migrating() && concerns_queues)
            || self.migration.is_behind()
            || !self.engine.queues.is_master()
    }

    /// Runs an admin command that has arrived, or holds it until it need not wait any more.
    pub(super) fn admit(&mut self, command: &Command) {
        if !self.admission.is_waiting() && !self.must_hold(command) {
            return self.admin_command(command);
        }
        self.admission.hold(*command);
        self.cancel_migration();
        self.advance_migrations();
    }

    /// Runs held admin commands that need not wait any more. Returns whether there were any.
    pub(super) fn release_held(&mut self) -> bool {
        let mut worked = false;
        while let Some(command) = self.admission.held.front().copied()
            && !self.must_hold(&command)
        {
            self.admission.held.pop_front();
            self.admin_command(&command);
            worked = true;
        }
        worked
    }
}
