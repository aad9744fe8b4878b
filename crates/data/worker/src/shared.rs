//! Round while several front-ends have work: each has a turn, as long as its account allows.

use crate::Frontend;
use crate::accounts::SHARED_UNITS;
use crate::watchdog::Activity;
use crate::worker_loop::{Worker, complete};
use volume::{Budget, Completion};

impl<F: Frontend + 'static> Worker<F> {
    /// Runs one round over all front-ends and the ring, as [`Worker::round`] does, and charges the
    /// front-ends' accounts.
    #[inline(never)]
    pub(crate) fn shared_round(&mut self) -> bool {
        self.accounts.skip();
        let mut worked = self.take_completions();
        worked |= self.handle.flag().take() && self.drain_messages();
        self.accounts.skip();
        let mut place = 0;
        while let Some(at) = self.run_queue.hot_at(place) {
            place += 1;
            // A front-end that is left out may have work.
            if self.take_turn(at) || !self.accounts.may_work(at) {
                worked = true;
                self.run_queue.worked(place - 1);
            } else if self.run_queue.was_quiet(place - 1) {
                place -= usize::from(self.demote(place - 1));
            }
        }
        // The idle front-ends get as many looks as all hot ones together.
        let units = if worked { u32::MAX } else { 0 };
        for _ in 0..self.run_queue.idle_share(units) {
            worked |= self.visit_idle();
        }
        self.send();
        worked |= self.poll_volumes();
        let mut ended = false;
        for at in self.run_queue.hot() {
            let Some(Some(front)) = self.fronts.get_mut(at) else {
                continue;
            };
            self.pulse.enter(Activity::Finishing(at as u16));
            let finished = front.finish_round();
            worked |= finished;
            if finished || self.accounts.is_active(at) {
                self.accounts.charge(at);
            }
            ended |= front.has_ended();
        }
        self.pulse.enter(Activity::Round);
        self.accounts.settle(self.run_queue.hot());
        worked |= ended && self.remove_ended();
        // A front-end with work waits for its turn: the processor must not be yielded.
        worked | self.accounts.anyone_left_out()
    }

    /// Passes the ring's completions to their front-ends, and charges each front-end the time.
    /// Returns whether there were any.
    fn take_completions(&mut self) -> bool {
        let (fronts, accounts) = (&mut self.fronts, &mut self.accounts);
        let mut current = None;
        let completed = self.io.poll(&mut |completion: Completion| {
            let owner = (completion.tag >> 48) as usize;
            if current != Some(owner) {
                match current {
                    Some(before) => {
                        accounts.charge(before);
                    }
                    None => accounts.skip(),
                }
                accounts.worked(owner);
                current = Some(owner);
            }
            complete(fronts, completion);
        });
        if let Some(last) = current {
            self.accounts.charge(last);
        }
        completed > 0
    }

    /// Gives a front-end its turn: until it has no work, or its quantum is used up.
    fn take_turn(&mut self, at: usize) -> bool {
        let (mut worked, mut undone) = (false, true);
        let before = self.accounts.spent(at);
        let mut told = self.accounts.was_told(at);
        while (self.accounts.may_work(at) || std::mem::take(&mut told))
            && let Some(Some(front)) = self.fronts.get_mut(at)
        {
            self.pulse.enter(Activity::Polling(at as u16));
            let mut budget = Budget::new(SHARED_UNITS);
            let found = front.poll(self.turns.now, &mut budget);
            self.accounts.charge(at);
            if !found {
                undone = false;
                break;
            }
            worked = true;
            self.accounts.worked(at);
            if self.accounts.started(at, budget.spent()) {
                self.send();
            }
            self.serve_light(at);
            if !budget.is_spent() {
                undone = false;
                break;
            }
        }
        if worked {
            self.accounts.end_turn(at, before, undone);
        }
        worked
    }

    /// Polls front-ends with short turns between two pieces of the work of front-end `working`.
    fn serve_light(&mut self, working: usize) {
        let mut place = 0;
        while let Some(at) = self.accounts.light_at(place) {
            place += 1;
            if at == working || !self.accounts.may_interrupt(at) {
                continue;
            }
            let Some(Some(front)) = self
                .fronts
                .get_mut(at)
                .filter(|f| f.as_ref().is_some_and(F::has_news))
            else {
                continue;
            };
            self.pulse.enter(Activity::Polling(at as u16));
            let mut budget = Budget::new(SHARED_UNITS);
            let found = front.poll(self.turns.now, &mut budget);
            self.accounts.charge(at);
            if found {
                self.accounts.worked(at);
                self.accounts.interrupted(at);
                if self.accounts.started(at, budget.spent()) {
                    self.send();
                }
            }
        }
    }

    /// Submits the started requests, and charges the time to the front-ends that started them.
    fn send(&mut self) {
        self.pulse.enter(Activity::Submitting);
        self.io.flush();
        self.accounts.sent();
    }

    /// Delivers completions that do not come through the ring. Front-ends that are left out wait,
    /// since some volumes do their work here.
    fn poll_volumes(&mut self) -> bool {
        let mut worked = false;
        for at in self.run_queue.hot() {
            if self.accounts.is_left_out(at) {
                continue;
            }
            let Some(Some(front)) = self.fronts.get_mut(at) else {
                continue;
            };
            let waits = front.in_flight() > 0;
            // A volume may do its work in this call.
            self.pulse.enter(Activity::Polling(at as u16));
            front.poll_volumes(&mut self.completions);
            let found = !self.completions.is_empty();
            if !found && !waits && !self.accounts.is_active(at) {
                continue;
            }
            for completion in self.completions.drain(..) {
                complete(&mut self.fronts, completion);
            }
            if self.accounts.charge(at) || found {
                self.accounts.worked(at);
                worked = true;
            }
        }
        worked
    }
}
