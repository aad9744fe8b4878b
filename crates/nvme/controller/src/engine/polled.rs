//! Order in which rounds poll submission queues. This module knows only the queue IDs.
//!
//! Hot queues had work recently, and are polled in every round. Idle queues are polled in turn,
//! each within [`IDLE_TURN`] rounds, so that many idle queues do not slow down a busy one. While no
//! queue is hot, all of them are polled in every round.
//!
//! ```text
//! queues:  [ hot | hot | hot | idle | idle | idle | idle ]
//!                              ^ hot         ^ next
//! ```
//!
//! To change sides, a queue swaps positions with the queue at the border.

/// Number of polls without a new entry after which a hot queue becomes an idle one.
const COOL_AFTER: u32 = 1024;
/// Number of rounds in which every idle queue is polled once, while other queues are hot. A queue
/// that is skipped because others become hot or idle meanwhile is polled in the next turn.
const IDLE_TURN: usize = 16;

/// Number of successive polls of one queue that found nothing. Stored in the queue, which a poll
/// accesses anyway.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct IdleRounds(u32);

impl IdleRounds {
    /// Resets the count of fruitless polls, because the queue had new entries.
    #[inline]
    pub fn reset(&mut self) {
        self.0 = 0;
    }

    /// Counts a poll that found no new entry. Returns whether the queue becomes idle.
    #[inline]
    pub fn count(&mut self) -> bool {
        self.0 += 1;
        self.0 >= COOL_AFTER
    }
}

/// Submission queues to fetch from, in polling order.
#[derive(Default)]
pub(super) struct PolledQueues {
    /// Queue IDs in polling order; hot queues (with recent work) come first.
    queues: Vec<u16>,
    /// Number of hot queues, which every round polls.
    hot: usize,
    /// Position of the idle queue that is polled next.
    next: usize,
    /// Number of idle queues when the current turn through them began.
    turn: usize,
    /// Polls of idle queues that are due, in units of 1/[`IDLE_TURN`].
    due: usize,
}

impl PolledQueues {
    /// Creates an empty list with capacity for `queues` queues.
    pub fn with_capacity(queues: usize) -> Self {
        PolledQueues {
            queues: Vec::with_capacity(queues),
            ..Self::default()
        }
    }

    /// Adds a queue, which the next round polls.
    pub fn insert(&mut self, qid: u16) {
        self.queues.retain(|&q| q != qid);
        self.queues.push(qid);
        self.poll_all();
    }

    /// Stops polling the queues for which `gone` returns `true`.
    pub fn remove(&mut self, gone: impl Fn(u16) -> bool) {
        self.queues.retain(|&q| !gone(q));
        self.poll_all();
    }

    /// Removes all queues from the polling order.
    pub fn clear(&mut self) {
        self.queues.clear();
        self.poll_all();
    }

    /// Makes the next round poll every queue.
    pub fn poll_all(&mut self) {
        self.hot = 0;
    }

    /// Makes the next round poll a queue that most likely has entries. Returns whether the queue
    /// was idle.
    pub fn expect(&mut self, qid: u16) -> bool {
        // If no queue is hot, the next round polls all of them.
        if self.hot == 0 {
            return false;
        }
        let mut idle = self.queues.iter().skip(self.hot);
        let Some(at) = idle.position(|&q| q == qid) else {
            return false;
        };
        self.found_work(self.hot + at);
        true
    }

    /// Returns all queues in polling order.
    pub fn iter(&self) -> impl Iterator<Item = u16> {
        self.queues.iter().copied()
    }

    /// Returns the hot queues in polling order.
    #[inline]
    pub fn hot(&self) -> impl Iterator<Item = u16> {
        self.queues.iter().take(self.hot).copied()
    }

    /// Returns the hot queue at this position, starting at 0.
    #[inline]
    pub fn hot_at(&self, at: usize) -> Option<u16> {
        if at < self.hot {
            self.queues.get(at).copied()
        } else {
            None
        }
    }

    /// Makes the hot queue at this position idle. Another queue may take its position.
    #[inline]
    pub fn cool(&mut self, at: usize) {
        self.hot = self.hot.saturating_sub(1);
        self.queues.swap(at, self.hot);
    }

    /// Ends the round after the hot queue at this position. The next round begins with the
    /// following queue.
    #[cold]
    pub fn begin_after(&mut self, at: usize) {
        if let Some(hot) = self.queues.get_mut(..self.hot)
            && at < hot.len()
        {
            hot.rotate_left(at + 1);
        }
    }

    /// Returns the number of idle queues that this round has to poll.
    #[inline]
    pub fn idle_share(&mut self) -> usize {
        let idle = self.queues.len().saturating_sub(self.hot);
        if idle == 0 {
            return 0;
        }
        if self.hot == 0 {
            // Begins again with the first queue. Queues that had work swap positions only with
            // queues that were polled already.
            self.next = 0;
            return idle;
        }
        // A remaining fraction counts in the next round. Queues that became hot in this turn do not
        // slow the turn down.
        self.due += idle.max(self.turn);
        let share = self.due / IDLE_TURN;
        self.due %= IDLE_TURN;
        share
    }

    /// Returns the next idle queue to poll, with its position.
    #[inline]
    pub fn next_idle(&mut self) -> Option<(usize, u16)> {
        // Skips queues that have become hot meanwhile.
        if self.next < self.hot || self.next >= self.queues.len() {
            self.next = self.hot;
            self.turn = self.queues.len().saturating_sub(self.hot);
        }
        let at = self.next;
        self.next += 1;
        Some((at, *self.queues.get(at)?))
    }

    /// Makes the idle queue at this position hot, because it had work.
    #[inline]
    pub fn found_work(&mut self, at: usize) {
        self.queues.swap(at, self.hot);
        self.hot += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a round in which the queues of `busy` have work. Returns the queues that were polled.
    fn round(polled: &mut PolledQueues, busy: &[u16]) -> Vec<u16> {
        let mut seen = Vec::new();
        let mut at = 0;
        while let Some(qid) = polled.hot_at(at) {
            seen.push(qid);
            at += 1;
        }
        for _ in 0..polled.idle_share() {
            let Some((at, qid)) = polled.next_idle() else {
                break;
            };
            seen.push(qid);
            if busy.contains(&qid) {
                polled.found_work(at);
            }
        }
        seen
    }

    fn sorted(mut queues: Vec<u16>) -> Vec<u16> {
        queues.sort_unstable();
        queues
    }

    fn of(count: u16) -> PolledQueues {
        let mut polled = PolledQueues::with_capacity(usize::from(count));
        (1..=count).for_each(|qid| polled.insert(qid));
        polled
    }

    #[test]
    fn queues_without_hot_ones_are_polled_once_per_round() {
        let mut polled = of(40);
        for _ in 0..3 {
            assert_eq!(
                sorted(round(&mut polled, &[])),
                (1..=40).collect::<Vec<_>>()
            );
        }
        // The assertion holds even though some queues become hot in the middle of the round.
        assert_eq!(
            sorted(round(&mut polled, &[7, 8, 40])),
            (1..=40).collect::<Vec<_>>()
        );
        assert_eq!(sorted(polled.hot().collect()), [7, 8, 40]);
    }

    #[test]
    fn hot_queues_are_polled_each_round_and_idle_once_per_turn() {
        for idle in [1, 5, 15, 16, 17, 40, 63] {
            let mut polled = of(idle + 2);
            round(&mut polled, &[1, 2]);
            // Completes the turn that began before any queue was hot.
            (0..IDLE_TURN).for_each(|_| drop(round(&mut polled, &[])));
            let mut looks = vec![0; usize::from(idle) + 3];
            for _ in 0..IDLE_TURN * 10 {
                let seen = round(&mut polled, &[]);
                assert_eq!(sorted(seen.iter().copied().take(2).collect()), [1, 2]);
                assert!(seen.len() <= 2 + usize::from(idle).div_ceil(IDLE_TURN));
                seen.iter().for_each(|&q| looks[usize::from(q)] += 1);
            }
            assert!(looks[3..].iter().all(|&n| n == 10), "{idle}: {looks:?}");
        }
    }

    #[test]
    fn newly_hot_queues_do_not_delay_idle_turn() {
        let mut polled = of(41);
        round(&mut polled, &[1]);
        let busy: Vec<u16> = (1..=40).collect();
        let rounds = (0..IDLE_TURN * 2).map(|_| round(&mut polled, &busy));
        let looks: Vec<bool> = rounds.map(|seen| seen.contains(&41)).collect();
        let first = looks.iter().position(|&looked| looked);
        assert!(first.is_some_and(|round| round <= IDLE_TURN), "{looks:?}");
    }

    #[test]
    fn interrupted_round_continues_at_next_queue() {
        let mut polled = of(5);
        round(&mut polled, &[1, 2, 3, 4]);
        assert_eq!(polled.hot().collect::<Vec<_>>(), [1, 2, 3, 4]);
        polled.begin_after(1);
        assert_eq!(polled.hot().collect::<Vec<_>>(), [3, 4, 1, 2]);
        // Position of the last hot queue, after which all hot queues were polled.
        polled.begin_after(3);
        assert_eq!(polled.hot().collect::<Vec<_>>(), [3, 4, 1, 2]);
        polled.begin_after(4);
        assert_eq!(sorted(polled.iter().collect()), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn cooled_queue_is_polled_in_turn() {
        let mut polled = of(3);
        round(&mut polled, &[1, 2, 3]);
        assert_eq!(sorted(polled.hot().collect()), [1, 2, 3]);
        let at = polled.hot().position(|qid| qid == 2).unwrap();
        polled.cool(at);
        assert_eq!(sorted(polled.hot().collect()), [1, 3]);
        let rounds = (0..IDLE_TURN * 2).map(|_| round(&mut polled, &[]));
        let looks = rounds.filter(|seen| seen.contains(&2)).count();
        assert_eq!(looks, 2);
    }

    #[test]
    fn queue_with_doorbell_is_polled_next_round() {
        let mut polled = of(40);
        assert!(!polled.expect(9), "every queue is polled anyway");
        round(&mut polled, &[1]);
        assert!(polled.expect(9));
        assert!(!polled.expect(9), "it is hot already");
        assert!(!polled.expect(77), "there is no such queue");
        assert!(round(&mut polled, &[]).contains(&9));
    }

    #[test]
    fn created_queue_is_polled_next_round_but_deleted_is_not() {
        let mut polled = of(40);
        round(&mut polled, &[1]);
        polled.insert(50);
        polled.insert(50);
        let seen = round(&mut polled, &[1]);
        assert_eq!(seen.iter().filter(|&&qid| qid == 50).count(), 1);
        polled.remove(|qid| qid == 50 || qid == 1);
        let seen = round(&mut polled, &[]);
        assert!(!seen.contains(&50) && !seen.contains(&1) && seen.len() == 39);
        round(&mut polled, &[2, 3]);
        polled.clear();
        assert!(round(&mut polled, &[]).is_empty());
        assert_eq!(polled.hot().count(), 0);
    }

    #[test]
    fn queue_is_idle_after_rounds_without_work() {
        let mut idle = IdleRounds::default();
        assert!((1..COOL_AFTER).all(|_| !idle.count()));
        assert!(idle.count());
        idle.reset();
        assert!(!idle.count());
    }
}
