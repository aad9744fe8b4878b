//! One submission queue and its completion queue, with another submission queue that completes
//! there: `engine::journal` and `engine::recover` in small.
//!
//! Commands of one kind are answered within the call and leave no record; those of the other wait,
//! and have one. The host uses an identifier again as soon as it may. The process may die between
//! any two stores.

use crate::model::explore::{Model, fails, holds};

/// Entries of the submission queue.
const SQ: u8 = 3;
/// Entries of the completion queue.
const CQ: u8 = 3;
/// Commands that the host submits.
const COMMANDS: u8 = 5;
/// Completions of the other submission queue.
const OTHERS: u8 = 4;
/// Deaths.
const DEATHS: u8 = 2;
/// Records.
const SLOTS: usize = 2;
/// The queue that is not looked at closely.
const OTHER: u8 = 99;

/// A rule that is taken away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Without {
    Nothing,
    /// The record is written before the note that covers the command.
    RecordBeforeNote,
    /// The record is removed after the completion is posted.
    RecordUntilPosted,
    /// A batch begins with a note that has the tail.
    NoteBefore,
    /// The newest completion says how many more were fetched.
    NewestHead,
    /// Only one that was posted after the note says so.
    TailCompared,
    /// A record with a posted completion is not executed again.
    PostedFound,
    /// SQ Head Pointer tells an earlier completion of the same identifier.
    HeadCompared,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Entry {
    cid: u8,
    sqhd: u8,
    phase: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Step {
    /// Waits for work.
    Idle,
    /// A batch of commands that are answered within the call: how many are left.
    Answer(u8),
    /// The batch is over, and is to be noted.
    Note,
    /// A batch of commands that wait: how many are left.
    Start(u8),
    /// The command in this slot was posted: its record is to be removed.
    Remove(usize),
    /// The record was removed already, its completion is to be posted.
    Post(u8),
    /// The process has died.
    Dead,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    // The host.
    submitted: u8,
    /// As the newest completion that it has consumed says, commands in all.
    known: u8,
    consumed: u8,
    /// Completions of each command.
    completions: [u8; COMMANDS as usize],
    others: u8,
    // Memory, which outlives the process.
    cq: [Option<Entry>; CQ as usize],
    note: (u8, u8),
    records: [Option<u8>; SLOTS],
    // The process.
    step: Step,
    fetched: u8,
    posted: u8,
    noted_tail: u8,
    deaths: u8,
}

struct Queues {
    without: Without,
    /// Whether each command waits.
    waits: [bool; COMMANDS as usize],
}

/// The host's name for a command: used again when the one before is over.
fn cid(number: u8) -> u8 {
    number % (SQ - 1)
}

fn phase(posted: u8) -> bool {
    (posted / CQ).is_multiple_of(2)
}

impl State {
    fn has_room(&self) -> bool {
        self.posted - self.consumed < CQ - 1
    }

    fn post(&mut self, cid: u8) {
        let entry = Entry {
            cid,
            sqhd: self.fetched % SQ,
            phase: phase(self.posted),
        };
        self.cq[usize::from(self.posted % CQ)] = Some(entry);
        self.posted += 1;
    }

    fn write_note(&mut self) {
        self.note = (self.fetched, self.posted % CQ);
        self.noted_tail = self.posted % CQ;
    }

    fn free(&self) -> usize {
        self.records
            .iter()
            .filter(|record| record.is_none())
            .count()
    }

    /// Where the phase changes; with the consumed entries for the turns that went before.
    fn tail(&self) -> u8 {
        let of = |at: u8| {
            self.cq[usize::from(at)]
                .as_ref()
                .is_some_and(|entry| entry.phase)
        };
        let first = of(0);
        let index = (1..CQ).find(|at| of(*at) != first);
        let (index, phase) = index.map_or((0, !first), |index| (index, first));
        // The host is less than a turn behind.
        (self.consumed..self.consumed + CQ)
            .find(|posted| posted % CQ == index && self::phase(*posted) == phase)
            .unwrap()
    }
}

impl Queues {
    /// The next process finds the queue. As many steps as it takes: it dies between none of them
    /// here, for each leaves what the next one finds the same.
    fn recover(&self, old: &State) -> State {
        let mut s = old.clone();
        s.posted = s.tail();
        let newest = s
            .posted
            .checked_sub(1)
            .and_then(|at| s.cq[usize::from(at % CQ)].clone());
        let (noted, tail) = s.note;
        s.fetched = noted;
        let later = s.posted % CQ != tail || self.without == Without::TailCompared;
        if let Some(newest) = newest
            .as_ref()
            .filter(|newest| newest.cid != OTHER && later)
            && self.without != Without::NewestHead
        {
            s.fetched += (newest.sqhd + SQ - noted % SQ) % SQ;
        }
        for number in s.records.iter().flatten() {
            s.fetched = s.fetched.max(number + 1);
        }
        for record in &mut s.records {
            if let (Some(number), Some(newest)) = (*record, &newest)
                && newest.cid == cid(number)
            {
                let behind = (s.fetched % SQ + SQ - newest.sqhd) % SQ;
                let beyond = s.fetched.saturating_sub(behind) > number;
                let found = beyond || self.without == Without::HeadCompared;
                if found && self.without != Without::PostedFound {
                    *record = None;
                }
            }
        }
        s.write_note();
        s.step = Step::Idle;
        s
    }

    fn process(&self, s: &State, next: &mut Vec<(&'static str, State)>) {
        let mut add = |name, change: &dyn Fn(&mut State)| {
            let mut after = s.clone();
            change(&mut after);
            next.push((name, after));
        };
        let waits = |number: u8| self.waits[usize::from(number)];
        match s.step {
            Step::Idle => {
                let pending = s.submitted - s.fetched;
                for count in 1..=pending {
                    let all = s.fetched..s.fetched + count;
                    if all.clone().all(&waits) && usize::from(count) <= s.free() {
                        let early = self.without == Without::RecordBeforeNote;
                        add("start a batch", &|s| {
                            if early {
                                s.note = (s.fetched + count, s.posted % CQ);
                            }
                            s.step = Step::Start(count);
                        });
                    }
                    let room = CQ - 1 - (s.posted - s.consumed);
                    if !all.clone().any(&waits) && count <= room {
                        add("answer a batch", &|s| {
                            if self.without != Without::NoteBefore && s.noted_tail != s.posted % CQ
                            {
                                s.write_note();
                            }
                            s.step = Step::Answer(count);
                        });
                    }
                }
                for (slot, record) in s.records.iter().enumerate() {
                    if let Some(number) = *record
                        && s.has_room()
                    {
                        add("end a command", &|s| match self.without {
                            Without::RecordUntilPosted => {
                                s.records[slot] = None;
                                s.step = Step::Post(number);
                            }
                            _ => {
                                s.post(cid(number));
                                s.step = Step::Remove(slot);
                            }
                        });
                    }
                }
                if s.others < OTHERS && s.has_room() {
                    add("another queue's completion", &|s| {
                        s.others += 1;
                        s.post(OTHER);
                    });
                }
            }
            Step::Answer(left) => add("answer", &|s| {
                let number = s.fetched;
                s.fetched += 1;
                s.post(cid(number));
                s.step = if left > 1 {
                    Step::Answer(left - 1)
                } else {
                    Step::Note
                };
            }),
            Step::Start(left) => add("record", &|s| {
                let slot = s.records.iter().position(Option::is_none).unwrap();
                s.records[slot] = Some(s.fetched);
                s.fetched += 1;
                s.step = if left > 1 {
                    Step::Start(left - 1)
                } else {
                    Step::Note
                };
            }),
            Step::Note => add("note", &|s| {
                s.write_note();
                s.step = Step::Idle;
            }),
            Step::Remove(slot) => add("remove the record", &|s| {
                s.records[slot] = None;
                s.step = Step::Idle;
            }),
            Step::Post(number) => add("post", &|s| {
                s.post(cid(number));
                s.step = Step::Idle;
            }),
            Step::Dead => next.push(("the next process", self.recover(s))),
        }
        if s.step != Step::Dead && s.deaths < DEATHS {
            let mut dead = s.clone();
            dead.deaths += 1;
            dead.step = Step::Dead;
            // Nothing of what it knew.
            (dead.fetched, dead.posted, dead.noted_tail) = (0, 0, 0);
            next.push(("die", dead));
        }
    }
}

impl Model for Queues {
    type State = State;

    fn start(&self) -> State {
        State {
            submitted: 0,
            known: 0,
            consumed: 0,
            completions: [0; COMMANDS as usize],
            others: 0,
            cq: [const { None }; CQ as usize],
            note: (0, 0),
            records: [None; SLOTS],
            step: Step::Idle,
            fetched: 0,
            posted: 0,
            noted_tail: 0,
            deaths: 0,
        }
    }

    fn steps(&self, s: &State) -> Vec<(&'static str, State)> {
        let mut next = Vec::new();
        // The host: an entry is free when a completion has said so, an identifier when its command
        // is over.
        let over = |number: u8| s.completions[usize::from(number)] > 0;
        let before = s.submitted.checked_sub(SQ - 1);
        if s.submitted < COMMANDS && s.submitted - s.known < SQ - 1 && before.is_none_or(over) {
            let mut after = s.clone();
            after.submitted += 1;
            next.push(("submit", after));
        }
        if let Some(entry) = &s.cq[usize::from(s.consumed % CQ)]
            && entry.phase == phase(s.consumed)
        {
            let mut after = s.clone();
            after.consumed += 1;
            if entry.cid != OTHER {
                // The one that it waits for under this name, or else the last.
                let numbers = (0..s.submitted).filter(|number| cid(*number) == entry.cid);
                let waiting = numbers.clone().find(|number| !over(*number));
                let number = waiting.or(numbers.max()).unwrap_or(0);
                after.completions[usize::from(number)] += 1;
                after.known += (entry.sqhd + SQ - s.known % SQ) % SQ;
            }
            next.push(("consume", after));
        }
        self.process(s, &mut next);
        next
    }

    fn wrong(&self, s: &State) -> Option<&'static str> {
        if s.completions.iter().any(|count| *count > 1) {
            return Some("a command completes twice");
        }
        if s.step != Step::Dead && s.fetched > s.submitted {
            return Some("an entry is fetched that was not submitted");
        }
        let rest = s.step == Step::Idle
            && s.fetched == s.submitted
            && s.records.iter().all(Option::is_none)
            && s.consumed == s.posted;
        let all = s.completions.iter().take(s.submitted.into());
        if rest && all.clone().any(|count| *count == 0) {
            return Some("a command is lost");
        }
        None
    }
}

/// Which commands wait: all, none, and both in turns.
const KINDS: [[bool; COMMANDS as usize]; 4] = [
    [true; 5],
    [false; 5],
    [false, true, false, true, false],
    [true, false, false, true, true],
];

#[test]
fn every_command_completes_once() {
    for waits in KINDS {
        let without = Without::Nothing;
        holds(&Queues { without, waits });
    }
}

#[test]
fn each_queue_rule_is_needed() {
    for (without, kind) in [
        (Without::RecordBeforeNote, 0),
        (Without::RecordUntilPosted, 0),
        (Without::NoteBefore, 1),
        (Without::NewestHead, 1),
        (Without::TailCompared, 0),
        (Without::PostedFound, 0),
        (Without::HeadCompared, 0),
    ] {
        let waits = KINDS[kind];
        fails(&format!("{without:?}"), &Queues { without, waits });
    }
}
