//! Front-end interface through which a worker serves an association.

use super::*;

impl Frontend for Association {
    type Error = Infallible;

    fn update_volumes(&mut self) {
        self.controller.update_volumes();
    }

    fn poll(&mut self, now: Instant, budget: &mut Budget) -> bool {
        self.now = now;
        let mut worked = false;
        if self.life != AssociationState::Open {
            self.controller.poll_within(now, budget);
            return self.go_on_ending();
        }
        if self.inbox.has_news() {
            self.read_mail();
            worked = true;
        }
        if !self.early.is_empty() {
            for connected in std::mem::take(&mut self.early) {
                self.arrive(connected);
            }
        }
        self.after_reset();
        match self.read_admin() {
            Ok(found) => worked |= found,
            Err(why) => {
                self.end(&why);
                return true;
            }
        }
        self.admit();
        let max_transfer = self.max_transfer();
        self.admin.feed(&mut QueueContext {
            controller: &mut self.controller,
            pool: &mut self.pool,
            max_transfer,
            prover: self.target.prover.as_ref(),
            inbox: &self.inbox,
        });
        worked |= self.read_io();
        self.admin.rings.ring(&mut self.controller);
        worked |= self.controller.poll_within(now, budget);
        worked |= self.respond();
        worked |= self.end_queues();
        worked
    }

    #[inline]
    fn complete(&mut self, completion: volume::Completion) {
        self.controller.complete(completion);
    }

    #[inline]
    fn poll_volumes(&mut self, out: &mut Vec<volume::Completion>) {
        self.controller.poll_volumes(out);
    }

    fn finish_round(&mut self) -> bool {
        match self.life {
            AssociationState::Open => self.respond(),
            AssociationState::Ending | AssociationState::Over => false,
        }
    }

    #[inline]
    fn has_news(&self) -> bool {
        self.io.iter().any(Queue::has_news) || self.admin.has_news()
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.controller.in_flight()
    }

    #[inline]
    fn must_poll(&self) -> bool {
        self.controller.needs_polling() || self.has_news() || self.inbox.has_news()
    }

    /// Returns whether polling on may spare a wake-up, because the next command arrives on the
    /// ring.
    fn keeps_window(&self) -> bool {
        self.in_flight() > 0 || self.io.iter().any(|queue| queue.phase == Phase::Open)
    }

    fn arm(&mut self) -> bool {
        self.controller.arm() || self.has_news() || self.inbox.has_news()
    }

    fn deadline(&self) -> Option<Instant> {
        let ending =
            (self.life == AssociationState::Ending).then(|| self.now.checked_add(ENDING_LOOK));
        let alive = match self.keep_alive.timeout().is_zero() {
            false => self.keep_alive.deadline(),
            true if self.cc.en() => None,
            true => self.began.checked_add(ENABLING),
        };
        let limit = self.target.config.limits.handshake;
        let queues = std::iter::once(&self.admin).chain(&self.io);
        let proof = queues.filter_map(|queue| queue.proof.since()?.checked_add(limit));
        let deadlines = [ending.flatten(), alive, self.controller.deadline()];
        deadlines.into_iter().flatten().chain(proof).min()
    }

    fn drain_messages(&mut self) -> bool {
        self.controller.drain_messages()
    }

    fn ready(&mut self, token: u32) {
        let queues = std::iter::once(&mut self.admin).chain(&mut self.io);
        let told = queues.filter(|queue| u32::from(queue.qid) == token);
        told.for_each(|queue| queue.link.tell());
    }

    fn housekeeping(&mut self, now: Instant) {
        self.now = now;
        if self.life == AssociationState::Open {
            self.check_time();
        }
    }

    fn flush(&mut self) {
        self.flushing = true;
        self.controller.flush();
    }

    fn is_drained(&self) -> bool {
        self.controller.is_drained()
    }

    fn has_ended(&self) -> bool {
        self.life == AssociationState::Over
    }
}
