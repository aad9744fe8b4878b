//! Admin commands, with effects and completions that are committed together: `survival` in small.
//! The committed state is in two buffers, of which a sequence names the newer one.

use crate::model::explore::{Model, fails, holds};

/// Entries of the completion queue.
const CQ: u8 = 3;
const COMMANDS: u8 = 4;
const DEATHS: u8 = 3;

/// A rule that is taken away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Without {
    Nothing,
    /// The commit precedes the completions.
    CommitFirst,
    /// The commit contains the completions.
    EndingsCommitted,
    /// The next process posts only what is not posted yet.
    PostedCompared,
    /// What is posted is counted.
    Counted,
    /// A commit writes the buffer that does not count.
    TwoBuffers,
    /// The sequence is written last.
    SequenceLast,
}

/// What is committed.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Committed {
    fetched: u8,
    /// Executions of each command.
    effects: [u8; COMMANDS as usize],
    /// Completions posted before, and those that are to come.
    tail: u8,
    endings: Vec<u8>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Step {
    Idle,
    /// Commits in two halves, then publishes.
    Write,
    WriteRest,
    Publish,
    Post,
    Count,
    Dead,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    submitted: u8,
    consumed: u8,
    completions: [u8; COMMANDS as usize],
    /// The completion queue: command and turn.
    cq: [Option<(u8, u8)>; CQ as usize],
    /// Two buffers; `None`: half of something.
    buffers: [Option<Committed>; 2],
    sequence: u8,
    /// Completions posted, as counted behind each.
    counted: u8,
    step: Step,
    /// What the process knows.
    now: Committed,
    deaths: u8,
}

struct Admin {
    without: Without,
}

impl Admin {
    fn process(&self, s: &State, next: &mut Vec<(&'static str, State)>) {
        let mut add = |name, change: &dyn Fn(&mut State)| {
            let mut after = s.clone();
            change(&mut after);
            next.push((name, after));
        };
        let target = |s: &State| match self.without {
            Without::TwoBuffers => usize::from(s.sequence % 2),
            _ => usize::from((s.sequence + 1) % 2),
        };
        match s.step {
            Step::Idle => {
                for count in 1..=s.submitted - s.now.fetched {
                    add("execute", &|s| {
                        for number in s.now.fetched..s.now.fetched + count {
                            s.now.effects[usize::from(number)] += 1;
                            s.now.endings.push(number);
                        }
                        s.now.fetched += count;
                        s.step = match self.without {
                            Without::CommitFirst => Step::Post,
                            Without::SequenceLast => Step::Publish,
                            _ => Step::Write,
                        };
                    });
                }
                if !s.now.endings.is_empty() {
                    add("go on posting", &|s| s.step = Step::Post);
                }
            }
            Step::Write => add("write half", &|s| {
                let at = target(s);
                s.buffers[at] = None;
                s.step = Step::WriteRest;
            }),
            Step::WriteRest => add("write the rest", &|s| {
                let at = match self.without {
                    // It is published already.
                    Without::SequenceLast => usize::from(s.sequence % 2),
                    _ => target(s),
                };
                let mut committed = s.now.clone();
                if self.without == Without::EndingsCommitted {
                    committed.endings.clear();
                }
                s.buffers[at] = Some(committed);
                s.step = match self.without {
                    Without::SequenceLast => Step::Post,
                    _ => Step::Publish,
                };
            }),
            Step::Publish => add("publish", &|s| {
                if self.without != Without::TwoBuffers {
                    s.sequence += 1;
                }
                s.step = match self.without {
                    Without::SequenceLast => Step::WriteRest,
                    Without::CommitFirst => Step::Idle,
                    _ => Step::Post,
                };
            }),
            Step::Post => {
                // Without one of the rules it may be behind.
                let room = s.now.tail.saturating_sub(s.consumed) < CQ - 1;
                match s.now.endings.first() {
                    Some(&number) if room => add("post", &|s| {
                        s.cq[usize::from(s.now.tail % CQ)] = Some((number, s.now.tail / CQ));
                        s.now.tail += 1;
                        s.now.endings.remove(0);
                        s.step = Step::Count;
                    }),
                    None if self.without == Without::CommitFirst => {
                        add("commit at last", &|s| s.step = Step::Write);
                    }
                    _ => add("no more", &|s| s.step = Step::Idle),
                }
            }
            Step::Count => add("count", &|s| {
                if self.without != Without::Counted {
                    s.counted = s.now.tail;
                }
                s.step = Step::Post;
            }),
            Step::Dead => {
                let committed = s.buffers[usize::from(s.sequence % 2)].clone();
                let mut after = s.clone();
                after.step = Step::Idle;
                // A damaged state is refused: nothing is served any more, which is wrong here.
                after.now = committed.unwrap_or(Committed {
                    effects: [9; COMMANDS as usize],
                    ..Committed::default()
                });
                let posted = |tail: u8| {
                    s.cq[usize::from(tail % CQ)].is_some_and(|(_, turn)| turn == tail / CQ)
                };
                // The host is less than a turn behind.
                let tail = (s.consumed..s.consumed + CQ).find(|tail| !posted(*tail));
                let tail = tail.unwrap_or(s.consumed);
                // As counted; the last may be in the queue, too.
                let counted = s.counted.max(after.now.tail);
                let mut done = counted - after.now.tail;
                if self.without != Without::PostedCompared && counted % CQ != tail % CQ {
                    done += 1;
                }
                let endings = &mut after.now.endings;
                endings.drain(..usize::from(done).min(endings.len()));
                (after.now.tail, after.counted) = (tail, tail);
                next.push(("the next process", after));
            }
        }
        if s.step != Step::Dead && s.deaths < DEATHS {
            let mut dead = s.clone();
            dead.deaths += 1;
            dead.step = Step::Dead;
            dead.now = Committed::default();
            next.push(("die", dead));
        }
    }
}

impl Model for Admin {
    type State = State;

    fn start(&self) -> State {
        State {
            submitted: 0,
            consumed: 0,
            completions: [0; COMMANDS as usize],
            cq: [None; CQ as usize],
            buffers: [Some(Committed::default()), None],
            sequence: 0,
            counted: 0,
            step: Step::Idle,
            now: Committed::default(),
            deaths: 0,
        }
    }

    fn steps(&self, s: &State) -> Vec<(&'static str, State)> {
        let mut next = Vec::new();
        if s.submitted < COMMANDS {
            let mut after = s.clone();
            after.submitted += 1;
            next.push(("submit", after));
        }
        if let Some((number, turn)) = s.cq[usize::from(s.consumed % CQ)]
            && turn == s.consumed / CQ
        {
            let mut after = s.clone();
            after.consumed += 1;
            after.completions[usize::from(number)] += 1;
            next.push(("consume", after));
        }
        self.process(s, &mut next);
        next
    }

    fn wrong(&self, s: &State) -> Option<&'static str> {
        if s.completions.iter().any(|count| *count > 1) {
            return Some("a command completes twice");
        }
        if s.step == Step::Dead {
            return None;
        }
        if s.now.effects.iter().any(|count| *count > 1) {
            return Some("a command has its effect twice");
        }
        let pairs = s.completions.iter().zip(s.now.effects);
        if pairs
            .clone()
            .any(|(completed, effects)| *completed > effects)
        {
            return Some("a command that has completed has no effect");
        }
        let rest = s.step == Step::Idle
            && s.now.fetched == s.submitted
            && s.now.endings.is_empty()
            && s.consumed == s.now.tail;
        let all = s.completions.iter().take(s.submitted.into());
        if rest && all.clone().any(|count| *count == 0) {
            return Some("a command is lost");
        }
        None
    }
}

#[test]
fn every_admin_command_takes_effect_once() {
    holds(&Admin {
        without: Without::Nothing,
    });
}

#[test]
fn each_commit_rule_is_needed() {
    for without in [
        Without::CommitFirst,
        Without::EndingsCommitted,
        Without::PostedCompared,
        Without::Counted,
        Without::TwoBuffers,
        Without::SequenceLast,
    ] {
        fails(&format!("{without:?}"), &Admin { without });
    }
}
