//! Random histories of a namespace shared by many hosts, compared with a naive model.
//!
//! `VNVME_RESERVATION_STEPS` says how many steps (1,000,000).

use reservations::{
    Access, Change, HostId, Image, Notice, Notification, Operation, ReservationRefusal,
    ReservationType, Reservations,
};
use std::collections::{BTreeMap, BTreeSet};

/// Reproducible pseudorandom numbers (Marsaglia's xorshift64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 16
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// Naive model of the standard's rules: keys by host, the set of holders, and the type as a number
/// (0 for none). Uses sets where the program distinguishes cases.
#[derive(Clone, Default)]
struct Model {
    keys: BTreeMap<HostId, u64>,
    holders: BTreeSet<HostId>,
    rtype: u8,
    generation: u32,
    ptpl: bool,
    can_persist: bool,
}

type Outcome = Result<(BTreeSet<(HostId, Notification)>, BTreeSet<HostId>), ReservationRefusal>;

impl Model {
    /// Table from "Command Behavior in the Presence of a Reservation": rows by type, columns by the
    /// host's role (not registered, registrant, holder), each for reads and writes.
    const TABLE: [[&'static str; 3]; 7] = [
        ["rw", "rw", "rw"],
        ["r-", "r-", "rw"],
        ["--", "--", "rw"],
        ["r-", "rw", "rw"],
        ["--", "rw", "rw"],
        ["r-", "rw", "rw"],
        ["--", "rw", "rw"],
    ];

    fn access(&self, host: &HostId) -> Access {
        let who = match (self.keys.contains_key(host), self.holders.contains(host)) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => 2,
        };
        let allowed = Self::TABLE[usize::from(self.rtype)][who];
        Access {
            read: allowed.contains('r'),
            write: allowed.contains('w'),
        }
    }

    fn all_registrants(&self) -> bool {
        self.rtype >= 5
    }

    /// Restores the invariants: holders are registrants, and with the last two types all
    /// registrants are holders.
    fn settle(&mut self) {
        let keys = &self.keys;
        self.holders.retain(|host| keys.contains_key(host));
        if self.all_registrants() {
            self.holders = self.keys.keys().copied().collect();
        }
        if self.holders.is_empty() {
            self.rtype = 0;
        }
    }

    fn others(&self, host: HostId) -> BTreeSet<HostId> {
        self.keys.keys().copied().filter(|h| *h != host).collect()
    }

    fn step(&mut self, host: HostId, operation: Operation) -> Outcome {
        let before = self.clone();
        let mine = self.keys.get(&host).copied();
        let mut told = BTreeSet::new();
        let mut preempted = BTreeSet::new();
        let mut tell = |hosts: BTreeSet<HostId>, what| {
            told.extend(hosts.into_iter().map(|host| (host, what)));
        };
        let wants_ptpl = |ptpl: Option<bool>| ptpl == Some(true) && !before.can_persist;
        match operation {
            Operation::Register { key, ptpl } => {
                if wants_ptpl(ptpl) {
                    return Err(ReservationRefusal::InvalidField);
                }
                if mine.is_some_and(|mine| mine != key) {
                    return Err(ReservationRefusal::Conflict);
                }
                self.keys.insert(host, key);
                self.ptpl = ptpl.unwrap_or(self.ptpl);
                self.generation = self.generation.wrapping_add(1);
            }
            Operation::Replace { key, new, ptpl } => {
                if wants_ptpl(ptpl) {
                    return Err(ReservationRefusal::InvalidField);
                }
                if key.is_some() && key != mine {
                    return Err(ReservationRefusal::Conflict);
                }
                self.keys.insert(host, new);
                self.ptpl = ptpl.unwrap_or(self.ptpl);
                self.generation = self.generation.wrapping_add(1);
            }
            Operation::Unregister { key, ptpl } => {
                if wants_ptpl(ptpl) {
                    return Err(ReservationRefusal::InvalidField);
                }
                if key.is_some() && key != mine {
                    return Err(ReservationRefusal::Conflict);
                }
                self.keys.remove(&host);
                self.settle();
                if self.rtype == 0 && matches!(before.rtype, 3 | 4) {
                    tell(self.others(host), Notification::ReservationReleased);
                }
                self.ptpl = ptpl.unwrap_or(self.ptpl);
                self.generation = self.generation.wrapping_add(1);
            }
            Operation::Acquire { key, rtype } => {
                if mine != Some(key) {
                    return Err(ReservationRefusal::Conflict);
                }
                let rtype = rtype.rtype().0;
                let again = self.holders.contains(&host) && self.rtype == rtype;
                if self.rtype != 0 && !again {
                    return Err(ReservationRefusal::Conflict);
                }
                if self.rtype == 0 {
                    self.rtype = rtype;
                    self.holders.insert(host);
                }
            }
            Operation::Preempt {
                key, victim, rtype, ..
            } => {
                if mine != Some(key) {
                    return Err(ReservationRefusal::Conflict);
                }
                let victims: BTreeSet<HostId> = self
                    .keys
                    .iter()
                    .filter(|(_, key)| **key == victim)
                    .map(|(host, _)| *host)
                    .collect();
                let all = self.all_registrants();
                let holds = self.holders.iter().any(|host| victims.contains(host));
                let (gone, takes) = match (self.rtype, all) {
                    (0, _) => (victims, false),
                    (_, true) if victim == 0 => (self.others(host), true),
                    (_, true) if victims.is_empty() => return Err(ReservationRefusal::Conflict),
                    (_, true) => (victims, false),
                    (_, false) if holds => (&victims & &self.others(host), true),
                    (_, false) if victim == 0 => return Err(ReservationRefusal::InvalidField),
                    (_, false) => (victims, false),
                };
                self.keys.retain(|host, _| !gone.contains(host));
                if takes {
                    self.rtype = rtype.rtype().0;
                    self.holders = BTreeSet::from([host]);
                }
                self.settle();
                preempted = gone.into_iter().filter(|gone| *gone != host).collect();
                tell(preempted.clone(), Notification::RegistrationPreempted);
                if before.rtype != 0 && before.rtype != self.rtype {
                    tell(self.others(host), Notification::ReservationReleased);
                }
                self.generation = self.generation.wrapping_add(1);
            }
            Operation::Release { key, rtype } => {
                if mine != Some(key) {
                    return Err(ReservationRefusal::Conflict);
                }
                if !self.holders.contains(&host) {
                    return Ok((told, preempted));
                }
                if self.rtype != rtype.rtype().0 {
                    return Err(ReservationRefusal::InvalidField);
                }
                self.rtype = 0;
                self.holders.clear();
                if before.rtype > 2 {
                    tell(self.others(host), Notification::ReservationReleased);
                }
            }
            Operation::Clear { key } => {
                if mine != Some(key) {
                    return Err(ReservationRefusal::Conflict);
                }
                tell(self.others(host), Notification::ReservationPreempted);
                self.keys.clear();
                self.holders.clear();
                self.rtype = 0;
                self.generation = self.generation.wrapping_add(1);
            }
            Operation::Persist { ptpl } => {
                if wants_ptpl(Some(ptpl)) {
                    return Err(ReservationRefusal::InvalidField);
                }
                self.ptpl = ptpl;
            }
        }
        // A host that registers under a reservation of all is one of its holders.
        self.settle();
        Ok((told, preempted))
    }

    fn power_lost(&mut self) {
        if !self.ptpl {
            *self = Model {
                can_persist: self.can_persist,
                ..Model::default()
            };
        }
    }
}

/// Converts a result to sets, because the order of its elements is irrelevant.
fn outcome(result: Result<Change, ReservationRefusal>) -> Outcome {
    let change = result?;
    let told: Vec<_> = change.notices.iter().collect();
    let set: BTreeSet<_> = told
        .iter()
        .map(|Notice { host, notification }| (*host, *notification))
        .collect();
    assert_eq!(set.len(), told.len(), "told twice: {told:?}");
    let preempted: BTreeSet<_> = change.preempted.iter().copied().collect();
    assert_eq!(preempted.len(), change.preempted.len());
    Ok((set, preempted))
}

/// Creates a random operation with few distinct keys, including 0, so that keys are often equal.
fn operation(chance: &mut Chance, keys: &BTreeMap<HostId, u64>, host: HostId) -> Operation {
    let any = |chance: &mut Chance| chance.below(4);
    // Mostly the right one.
    let own = |chance: &mut Chance| match keys.get(&host) {
        Some(key) if !chance.once_in(8) => *key,
        _ => chance.below(4),
    };
    let ptpl = match chance.below(6) {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    };
    let rtype = chance.pick(&ReservationType::ALL);
    match chance.below(20) {
        0..=3 => Operation::Register {
            key: own(chance),
            ptpl,
        },
        4 => Operation::Unregister {
            key: (!chance.once_in(3)).then(|| own(chance)),
            ptpl,
        },
        5 => Operation::Replace {
            key: (!chance.once_in(3)).then(|| own(chance)),
            new: any(chance),
            ptpl,
        },
        6..=10 => Operation::Acquire {
            key: own(chance),
            rtype,
        },
        11..=14 => Operation::Preempt {
            key: own(chance),
            victim: any(chance),
            rtype,
            abort: chance.once_in(2),
        },
        15..=17 => Operation::Release {
            key: own(chance),
            rtype,
        },
        18 => Operation::Clear { key: own(chance) },
        _ => Operation::Persist {
            ptpl: chance.once_in(2),
        },
    }
}

fn compare(state: &Reservations, model: &Model, hosts: &[HostId], what: &dyn Fn() -> String) {
    let keys: BTreeMap<HostId, u64> = state
        .registrants()
        .iter()
        .map(|registrant| (registrant.host, registrant.key))
        .collect();
    assert_eq!(keys, model.keys, "{}", what());
    let rtype = state.reservation().map_or(0, |held| held.rtype.rtype().0);
    assert_eq!(rtype, model.rtype, "{}", what());
    assert_eq!(state.generation(), model.generation, "{}", what());
    assert_eq!(state.ptpl(), model.ptpl, "{}", what());
    for host in hosts {
        assert_eq!(state.access(host), model.access(host), "{}", what());
        let holds = model.holders.contains(host);
        assert_eq!(state.is_holder(host), holds, "{host} {}", what());
    }
}

/// Checks the report by parsing its bytes.
fn check_report(state: &Reservations, model: &Model, extended: bool) {
    let bytes = state.report(extended, |host| Some(u16::from(host.bytes()[0])));
    let number = |at: usize, len: usize| {
        let bytes = bytes[at..at + len].iter().rev();
        bytes.fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let (first, each, host_at, key_at) = if extended {
        (64, 64, 16, 8)
    } else {
        (24, 24, 8, 16)
    };
    assert_eq!(number(0, 4), model.generation.into());
    assert_eq!(number(4, 1), model.rtype.into());
    assert_eq!(number(5, 2), model.keys.len() as u64);
    assert_eq!(number(9, 1), model.ptpl.into());
    assert_eq!(bytes.len(), first + each * model.keys.len());
    let mut seen = BTreeSet::new();
    for i in 0..model.keys.len() {
        let at = first + i * each;
        let found = model.keys.iter().find(|(host, _)| {
            if extended {
                host.bytes()[..] == bytes[at + host_at..at + host_at + 16]
            } else {
                host.bytes()[..8] == bytes[at + host_at..at + host_at + 8]
            }
        });
        let (host, key) = found.unwrap();
        assert!(seen.insert(*host));
        assert_eq!(number(at, 2), host.bytes()[0].into());
        assert_eq!(number(at + 2, 1), model.holders.contains(host).into());
        assert_eq!(number(at + key_at, 8), *key);
    }
}

#[test]
fn random_histories_match_naive_model() {
    let steps = std::env::var("VNVME_RESERVATION_STEPS");
    let steps = steps.map_or(1_000_000, |steps| steps.parse::<u64>().unwrap());
    let hosts: Vec<HostId> = (1..=6)
        .map(|i| match i {
            6 => HostId::short(6),
            i => HostId::extended([i; 16]),
        })
        .collect();
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let mut state = Reservations::new(true);
    let mut model = Model {
        can_persist: true,
        ..Model::default()
    };
    let (mut carried_out, mut refused, mut restarts) = (0_u64, [0_u64; 2], 0_u64);
    let mut types = [0_u64; 7];
    for step in 0..steps {
        if chance.once_in(5000) {
            // Another namespace, which may not have a file.
            let can_persist = !chance.once_in(4);
            state = Reservations::new(can_persist);
            model = Model {
                can_persist,
                ..Model::default()
            };
        }
        if chance.once_in(100) {
            // A process after this one, or a loss of power.
            restarts += 1;
            if model.can_persist {
                let image = Image {
                    sequence: step,
                    boot: [1; 16],
                    namespace: [2; 16],
                    state: state.clone(),
                    executed: Vec::new(),
                    notices: Vec::new(),
                };
                let read = Image::decode(&image.encode()).unwrap();
                assert_eq!(read, image);
                state = read.state;
            }
            if chance.once_in(2) {
                state.power_lost();
                model.power_lost();
            }
        }
        let host = chance.pick(&hosts);
        let operation = operation(&mut chance, &model.keys, host);
        let before = state.clone();
        let result = state.execute(&host, &operation);
        let what = || format!("step {step}: {host} {operation:?}\n{before:#?}");
        match &result {
            Ok(_) => carried_out += 1,
            Err(refusal) => {
                refused[usize::from(*refusal == ReservationRefusal::Conflict)] += 1;
                assert_eq!(state, before, "{}", what());
            }
        }
        assert_eq!(outcome(result), model.step(host, operation), "{}", what());
        compare(&state, &model, &hosts, &what);
        types[usize::from(model.rtype)] += 1;
        if step.is_multiple_of(16) {
            check_report(&state, &model, true);
            check_report(&state, &model, false);
        }
    }
    println!(
        "{steps} steps: {carried_out} carried out, {} conflicts, {} invalid; {restarts} restarts; \
         steps under each type: {types:?}",
        refused[1], refused[0]
    );
    // A history in which little happens would prove nothing.
    if steps >= 100_000 {
        assert!(carried_out > steps / 3 && refused.iter().all(|times| *times > steps / 100));
        assert!(types.iter().all(|times| *times > steps / 100), "{types:?}");
    }
}
