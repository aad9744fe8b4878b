//! Live migration of the guest: the controller stops, gives its state away or takes it over, and
//! logs the guest pages that it writes.
//!
//! At the source, [`Controller::pause`] ends fetching; when [`Controller::is_quiet`] is true,
//! nothing of the host is outstanding, and [`Controller::save_stream`] describes the controller. At
//! the destination, a paused controller without a host takes the state over
//! ([`Controller::load_stream`]). [`Controller::unpause`] starts either of them.

use super::Controller;
use super::lifecycle::LifecycleState;
use crate::survival::RestoreError;
use crate::survival::stream::MovedState;
use nvme::Status;
use std::sync::Arc;
use std::time::Instant;
use volume::Volume;

/// Flush before the volume is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandOverFlush {
    /// The flush with this number, or a later one, has yet to end.
    Outstanding(u64),
    /// The flush has ended, with this error if it has failed.
    Ended(Option<Status>),
}

impl Controller {
    /// Returns why the guest cannot migrate with a controller of this configuration; `None` if it
    /// can.
    pub fn cannot_migrate(&self) -> Option<&'static str> {
        let namespaces = self.engine.namespaces.iter();
        let mut plain = namespaces.map(|ns| {
            let config = &ns.config;
            config.zones.is_none()
                && config.placement.is_none()
                && config.metadata.is_none()
                && config.formats.is_none()
                && ns.passthrough.is_none()
        });
        if self.is_shared() {
            Some("it belongs to a subsystem")
        } else if self.config.pool.is_some() {
            Some("its host creates namespaces in a pool")
        } else if self.config.cmb_size.is_some() {
            Some("it has a controller memory buffer")
        } else if self.config.workers > 1 {
            Some("its queues may move between workers")
        } else if !plain.all(|plain| plain) {
            Some("a namespace has zones, placement handles, metadata, formats or a direct path")
        } else {
            None
        }
    }

    /// Returns whether the controller has exactly one namespace, which is on this volume.
    pub fn is_only_volume(&self, volume: &Arc<dyn Volume>) -> bool {
        let mut all = self.active();
        let only = all.next().filter(|_| all.next().is_none());
        only.is_some_and(|ns| Arc::ptr_eq(&ns.config.volume, volume))
    }

    /// Fails the controller (CSTS.CFS) because its host cannot be served. The host may reset it.
    pub fn refuse_host(&mut self, why: &str) {
        self.fatal(why);
        self.touch();
        self.settle();
    }

    /// Returns why the guest cannot migrate at this moment; `None` if it can.
    pub fn is_busy_for_migration(&self) -> Option<&'static str> {
        if self.admin.erasure.is_running() {
            Some("namespaces are being erased")
        } else if self.admin.self_test.is_running() {
            Some("a self-test is running")
        } else if self.admin.management.is_running() || self.attaching.is_some() {
            Some("namespaces are being attached or detached")
        } else if self.engine.queues.has_backlog() {
            Some("the host has left no room for completions")
        } else {
            None
        }
    }

    /// Stops fetching commands. Outstanding commands complete.
    pub fn pause(&mut self) {
        self.engine.pause();
    }

    /// Returns whether [`Controller::pause`] has stopped the controller.
    pub fn is_paused(&self) -> bool {
        self.engine.queues.is_paused()
    }

    /// Starts a paused controller.
    pub fn unpause(&mut self) {
        if !self.is_paused() {
            return;
        }
        // The time of the pause is not the host's.
        self.now = Instant::now();
        let timeout = self.keep_alive();
        if self.admin.keep_alive.deadline().is_some() {
            self.set_keep_alive(timeout);
        }
        self.engine.unpause();
        self.deliver_events();
        self.admin.rearm();
        self.touch();
        self.settle();
        self.engine.end_round();
    }

    /// Returns whether a paused controller has no command of the host in hand, except those that
    /// wait for an event, and is not being reset or shut down.
    pub fn is_quiet(&self) -> bool {
        let idle = self.admin.cache_flushes.is_empty()
            && self.admin.deletions.is_empty()
            && self.admin.aborts.save().is_empty()
            && self.migration.configuring().next().is_none()
            && !self.admission.is_waiting()
            && !self.marks.is_waiting();
        idle && self.endings.is_empty()
            && self.engine.drained()
            && self.engine.events.is_empty()
            && self.state != LifecycleState::Resetting
            && self.shutdown != super::Shutdown::Occurring
    }

    /// Begins to flush all data, before the volume is handed over.
    pub fn begin_hand_over(&mut self) {
        self.hand_over = Some(HandOverFlush::Outstanding(self.next_flush()));
        self.flush_everywhere();
    }

    /// Returns the result of [`Controller::begin_hand_over`], once and when there is one.
    pub fn hand_over_result(&mut self) -> Option<Result<(), Status>> {
        let Some(HandOverFlush::Ended(failed)) = self.hand_over else {
            return None;
        };
        self.hand_over = None;
        Some(failed.map_or(Ok(()), Err))
    }

    /// Returns whether the result of [`Controller::begin_hand_over`] is to come, or to be taken. A
    /// reset ends the flush without a result.
    pub fn is_handing_over(&self) -> bool {
        self.hand_over.is_some()
    }

    pub(super) fn hand_over_flushed(&mut self, number: u64, failed: Option<Status>) {
        if let Some(HandOverFlush::Outstanding(wanted)) = self.hand_over
            && number >= wanted
        {
            self.hand_over = Some(HandOverFlush::Ended(failed));
        }
    }

    /// Withdraws the state memory's content while the guest migrates, or commits it again: a
    /// process that dies in a migration leaves no state for the next one.
    pub fn suspend_survival(&mut self, suspended: bool) {
        if let Some(survival) = &mut self.survival {
            survival.suspend(suspended);
        }
        self.settle();
    }

    /// Returns the state of a paused, quiet controller for the destination.
    ///
    /// # Errors
    /// [`RestoreError::Form`] when the state is too large.
    pub fn save_stream(&self) -> Result<Vec<u8>, RestoreError> {
        let moved = MovedState {
            control: self.control_state(),
            queues: self.engine.moved_queues(),
        };
        moved.encode()
    }

    /// Takes over the state of a controller at the source of a migration. This controller is paused
    /// and was reset; guest memory is mapped. After an error it has to be reset again.
    ///
    /// # Errors
    /// [`RestoreError`] when the stream is damaged, contradictory, newer than this program, or of
    /// another disk.
    pub fn load_stream(&mut self, stream: &[u8]) -> Result<(), RestoreError> {
        if self.state != LifecycleState::Disabled || !self.is_paused() {
            return Err(RestoreError::Contradiction("the controller is in use"));
        }
        let mut moved = MovedState::decode(stream)?;
        self.load(&mut moved)?;
        self.touch();
        self.settle();
        Ok(())
    }

    /// Begins to log the guest pages that the controller writes. The log is complete from the time
    /// on when [`Controller::dma_quiesced`] returns `true`.
    pub fn start_dirty_log(&mut self) {
        self.engine.start_dirty_log();
    }

    /// Ends the log of written pages.
    pub fn stop_dirty_log(&mut self) {
        self.engine.dma.stop_dirty_log();
    }

    /// Returns whether written pages are logged.
    pub fn is_logging(&self) -> bool {
        self.engine.dma.is_logging()
    }

    /// Removes the written pages of a range from the log, and calls `each` with the address of
    /// every one. A page is in the log when the command that has written it is over.
    pub fn take_dirty(&mut self, iova: u64, len: u64, each: &mut dyn FnMut(u64)) {
        self.engine.take_dirty(iova, len, each);
    }
}
