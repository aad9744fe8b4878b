//! Shares of time and waiting times of several front-ends on one worker, with a counter that the
//! front-ends themselves advance.

use super::*;
use crate::{Context, Frontend, Handle, Interest, Options, Worker};
use rustix::event::{EventfdFlags, eventfd};
use std::cell::Cell;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Instant;
use volume::{Budget, Completion, Io, IoOptions};

thread_local! {
    /// Counter value in nanoseconds.
    static NOW: Cell<u64> = const { Cell::new(1) };
}

fn now() -> u64 {
    NOW.get()
}

/// Advances the counter.
fn pass(nanos: u64) {
    NOW.set(now() + nanos);
}

const fn us(micros: u64) -> u64 {
    micros * 1000
}

/// Load of a front-end's guest.
#[derive(Clone, Copy)]
enum Guest {
    /// Always has work, in pieces of `piece` nanoseconds.
    Busy { piece: u64 },
    /// Single pieces, the next one this long after the last one's end.
    Thinks { piece: u64, pause: u64 },
    /// A continuous flow of messages.
    Sends { message: u64 },
    /// A level-triggered descriptor, ready until a piece of work; a notification takes this long.
    Tells { telling: u64, piece: u64 },
    /// An edge-triggered descriptor that becomes ready again and again, with a notification each
    /// time.
    Edges { telling: u64, piece: u64 },
    /// Volumes that do a piece of their work in each round.
    Volumes { piece: u64 },
    /// No work.
    Idle,
}

/// Work done by a front-end.
#[derive(Default)]
struct Done {
    pieces: Cell<u64>,
    nanos: Cell<u64>,
    /// Longest time between two pieces of a guest with work.
    longest: Cell<u64>,
    ended: Cell<u64>,
}

impl Done {
    fn piece(&self, ready: u64, nanos: u64) {
        self.longest.set(self.longest.get().max(now() - ready));
        pass(nanos);
        self.pieces.set(self.pieces.get() + 1);
        self.nanos.set(self.nanos.get() + nanos);
        self.ended.set(now());
    }
}

struct Fake {
    guest: Rc<Cell<Guest>>,
    done: Rc<Done>,
    /// A descriptor in the worker's epoll set, always readable.
    readable: Option<OwnedFd>,
    told: bool,
}

/// Cost of a look that finds nothing.
const LOOK: u64 = 50;

impl Frontend for Fake {
    type Error = Infallible;

    fn poll(&mut self, _now: Instant, budget: &mut Budget) -> bool {
        pass(LOOK);
        let ended = self.done.ended.get();
        match self.guest.get() {
            Guest::Idle | Guest::Sends { .. } | Guest::Volumes { .. } => false,
            Guest::Tells { .. } | Guest::Edges { .. } if !std::mem::take(&mut self.told) => false,
            Guest::Tells { piece, .. } | Guest::Edges { piece, .. } => {
                self.done.piece(self.done.ended.get(), piece);
                true
            }
            Guest::Thinks { pause, .. } if now() < ended + pause => false,
            Guest::Thinks { piece, pause } => {
                self.done.piece(ended + pause, piece);
                budget.spend(1);
                true
            }
            Guest::Busy { piece } => {
                while !budget.is_spent() {
                    self.done.piece(self.done.ended.get(), piece);
                    // An estimate that is too low.
                    budget.spend(1 + (piece / us(4)) as u32);
                }
                true
            }
        }
    }

    fn has_news(&self) -> bool {
        match self.guest.get() {
            Guest::Thinks { pause, .. } => now() >= self.done.ended.get() + pause,
            Guest::Busy { .. } => true,
            _ => false,
        }
    }

    fn ready(&mut self, _token: u32) {
        if let Guest::Tells { telling, .. } | Guest::Edges { telling, .. } = self.guest.get() {
            if let Some(readable) = &self.readable {
                rustix::io::write(readable, &1u64.to_ne_bytes()).unwrap();
            }
            pass(telling);
            self.done.nanos.set(self.done.nanos.get() + telling);
            self.told = true;
        }
    }

    fn complete(&mut self, _completion: Completion) {}

    fn poll_volumes(&mut self, _: &mut Vec<Completion>) {
        if let Guest::Volumes { piece } = self.guest.get() {
            self.done.piece(self.done.ended.get(), piece);
        }
    }

    fn in_flight(&self) -> usize {
        usize::from(self.must_poll())
    }

    fn must_poll(&self) -> bool {
        matches!(self.guest.get(), Guest::Volumes { .. })
    }

    fn has_more(&self) -> bool {
        matches!(self.guest.get(), Guest::Sends { .. })
    }

    fn read_on(&mut self) {
        if let Guest::Sends { message } = self.guest.get() {
            self.done.piece(self.done.ended.get(), message);
        }
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn flush(&mut self) {}

    fn is_drained(&self) -> bool {
        true
    }
}

struct World {
    worker: Worker<Fake>,
    guests: Vec<(Rc<Cell<Guest>>, Rc<Done>)>,
}

fn counter() -> Counter {
    Counter {
        read: now,
        per_second: 1e9,
    }
}

impl World {
    fn of(guests: &[Guest]) -> Self {
        let io = Rc::new(Io::new(IoOptions::default()));
        let (handle, options) = (Handle::new().unwrap(), Options::default());
        let mut worker = Worker::with_counter(io, &handle, options, counter()).unwrap();
        let guests = guests.iter().map(|&guest| {
            let (guest, done) = (Rc::new(Cell::new(guest)), Rc::<Done>::default());
            done.ended.set(now());
            let make = |context: &Context<'_>| {
                let interest = match guest.get() {
                    Guest::Tells { .. } => Some(Interest::Readable),
                    Guest::Edges { .. } => Some(Interest::Edge),
                    _ => None,
                };
                let readable = interest.map(|interest| {
                    let readable = eventfd(1, EventfdFlags::empty()).unwrap();
                    context.descriptors.add(&readable, 0, interest).unwrap();
                    readable
                });
                Ok::<_, Infallible>(Fake {
                    guest: guest.clone(),
                    done: done.clone(),
                    readable,
                    told: false,
                })
            };
            worker.add(make).unwrap();
            (guest, done)
        });
        let guests = guests.collect();
        World { worker, guests }
    }

    /// Runs rounds for this long, with looks at the sockets in between. Returns the nanoseconds
    /// that each front-end had.
    fn run(&mut self, nanos: u64) -> Vec<u64> {
        let before: Vec<u64> = self.guests.iter().map(|(_, d)| d.nanos.get()).collect();
        let end = now() + nanos;
        while now() < end {
            self.worker.poll_once().unwrap();
            // A round without work takes time, too.
            pass(LOOK);
        }
        let after = self.guests.iter().map(|(_, done)| done.nanos.get());
        after
            .zip(before)
            .map(|(after, before)| after - before)
            .collect()
    }

    fn done(&self, at: usize) -> &Done {
        &self.guests[at].1
    }

    fn becomes(&self, at: usize, guest: Guest) {
        self.guests[at].0.set(guest);
        self.done(at).ended.set(now());
    }
}

/// Shares of the total time, in thousandths.
fn shares(had: &[u64]) -> Vec<u64> {
    let sum: u64 = had.iter().sum();
    had.iter().map(|had| had * 1000 / sum.max(1)).collect()
}

#[test]
fn busy_front_ends_get_equal_shares_for_any_piece() {
    for pieces in [
        [100, 100],
        [100, us(5)],
        [100, us(300)],
        [us(20), us(2000)],
        [us(10), us(90_000)],
    ] {
        let guests = pieces.map(|piece| Guest::Busy { piece });
        // The time allows many of each piece.
        let mut world = World::of(&guests);
        world.run(us(10_000));
        let had = world.run(pieces[1].max(us(100)) * 400);
        let shares = shares(&had);
        assert!((470..=530).contains(&shares[0]), "{pieces:?}: {shares:?}");
    }
}

#[test]
fn several_costly_front_ends_do_not_add_up() {
    let costly = Guest::Busy { piece: us(300) };
    let cheap = Guest::Busy { piece: us(1) };
    let had = World::of(&[costly, cheap, costly, costly, cheap]).run(us(200_000));
    let shares = shares(&had);
    assert!(shares.iter().all(|s| (180..=220).contains(s)), "{shares:?}");
}

#[test]
fn messages_and_commands_share_account() {
    for message in [us(1), us(20), us(300)] {
        let guests = [Guest::Busy { piece: 100 }, Guest::Sends { message }];
        let shares = shares(&World::of(&guests).run(us(200_000)));
        assert!(shares[0] >= 470, "{message}: {shares:?}");
    }
}

/// A notification of any length leaves the front-end time for the work that it announces.
#[test]
fn notified_front_end_gets_turn() {
    for telling in [us(1), us(20), us(30), us(500)] {
        let piece = us(2);
        let guests = [Guest::Busy { piece: 100 }, Guest::Tells { telling, piece }];
        let mut world = World::of(&guests);
        let shares = shares(&world.run(us(200_000)));
        assert!(shares[0] >= 450, "{telling}: {shares:?}");
        // No second notification arrives before that turn.
        let (pieces, nanos) = (world.done(1).pieces.get(), world.done(1).nanos.get());
        assert!(pieces > 0, "{telling}: no turn in {nanos} ns");
        assert!(
            nanos / pieces <= 2 * (telling + piece),
            "{telling}: {nanos} {pieces}"
        );
    }
}

/// An overdrawn front-end waits although events arrive all the time.
#[test]
fn edge_events_give_no_extra_share() {
    let (telling, piece) = (us(1), us(500));
    let guests = [Guest::Busy { piece: 100 }, Guest::Edges { telling, piece }];
    let shares = shares(&World::of(&guests).run(us(200_000)));
    assert!((400..=600).contains(&shares[0]), "{shares:?}");
}

/// Zeroing of memory, for example, proceeds piece by piece, and nothing completes meanwhile.
#[test]
fn volume_work_is_charged_to_front_end() {
    for piece in [us(25), us(50), us(3000)] {
        let cheap = Guest::Busy { piece: us(1) };
        let mut world = World::of(&[cheap, cheap]);
        world.run(us(1000));
        world.becomes(1, Guest::Volumes { piece });
        world.run(us(10_000));
        let shares = shares(&world.run(us(1_000_000)));
        assert!((470..=600).contains(&shares[0]), "{piece}: {shares:?}");
        assert!(world.worker.accounts.is_shared());
        // The second front-end is alone now.
        world.becomes(0, Guest::Idle);
        world.run(us(10_000));
        let had = world.run(us(100_000));
        assert!(had[1] * 100 >= us(100_000) * 95, "{piece}: {had:?}");
    }
}

#[test]
fn single_front_end_is_not_slowed() {
    for piece in [100, us(30), us(5000)] {
        let guests = [Guest::Busy { piece }, Guest::Idle, Guest::Idle];
        let mut world = World::of(&guests);
        let time = us(100_000);
        let had = world.run(time);
        assert!(had[0] * 100 >= time * 99, "{piece}: {had:?}");
        assert!(!world.worker.accounts.is_shared());
        // A second front-end had work for a moment, and has none any more.
        world.becomes(1, Guest::Busy { piece: us(1) });
        world.run(us(200));
        assert!(world.worker.accounts.is_shared());
        world.becomes(1, Guest::Idle);
        let had = world.run(time);
        assert!(had[0] * 100 >= time * 99, "{piece}: {had:?}");
        assert!(!world.worker.accounts.is_shared());
    }
}

/// The guest has one command at a time, and sends the next one a little after the last one's end.
/// The neighbour's debt is not forgiven in between.
#[test]
fn single_command_guest_rarely_waits_for_long_pieces() {
    let thinks = Guest::Thinks {
        piece: us(1),
        pause: us(3),
    };
    let commands = |piece| {
        let mut world = World::of(&[thinks, Guest::Busy { piece }]);
        world.run(us(10_000));
        world.done(0).pieces.set(0);
        world.done(0).longest.set(0);
        world.run(us(200_000));
        (world.done(0).pieces.get(), world.done(0).longest.get())
    };
    // Between the short pieces of a neighbour the light front-end is served at once.
    let one = us(1) + us(3) + LOOK;
    let (beside_honest, _) = commands(100);
    assert!(
        beside_honest * one * 10 >= us(200_000) * 8,
        "{beside_honest}"
    );
    for piece in [us(50), us(300), us(2000)] {
        let (beside_costly, longest) = commands(piece);
        // The light front-end has half of the time.
        assert!(
            beside_costly * one * 10 >= us(100_000) * 8,
            "{piece}: {beside_costly}"
        );
        // The longest wait is 32 estimated units and a piece.
        assert!(longest <= piece + us(32 * 4 + 50), "{piece}: {longest}");
    }
}

/// A light guest does not wait until sixteen neighbours have used up their quanta.
#[test]
fn single_command_guest_is_served_between_pieces_of_many() {
    let busy = Guest::Busy { piece: 100 };
    let piece = 300;
    for pause in [200, us(1), us(30), us(300)] {
        let mut guests = vec![busy; 16];
        guests.push(Guest::Thinks { piece, pause });
        let mut world = World::of(&guests);
        world.run(us(10_000));
        let light = world.done(16);
        light.pieces.set(0);
        light.longest.set(0);
        let had = world.run(us(200_000));
        let light = world.done(16);
        // The bound is a neighbour's piece and the wait that the share imposes; twice, since some
        // looks are late.
        let longest = light.longest.get();
        let bound = 2 * (32 * 100 + 17 * (piece + LOOK) / LIGHT_SHARES);
        assert!(longest <= bound, "{pause}: {longest} of {bound}");
        // The light front-end has no more than its share, and leaves the rest to its neighbours.
        let shares = shares(&had);
        assert!(
            shares[16] <= 1000 * LIGHT_SHARES / 17 + 5,
            "{pause}: {shares:?}"
        );
        let equal = (1000 - shares[16]) / 16;
        assert!(
            shares[..16].iter().all(|s| s.abs_diff(equal) <= 2),
            "{pause}: {shares:?}"
        );
    }
}

#[test]
fn debt_is_bounded_and_sleeper_gets_no_credit() {
    let (cheap, idle) = (Guest::Busy { piece: us(2) }, Guest::Idle);
    let mut world = World::of(&[cheap, idle]);
    world.run(us(10_000));
    // A machine that stood still for a minute.
    world.becomes(
        1,
        Guest::Busy {
            piece: us(60_000_000),
        },
    );
    world.run(us(10));
    world.becomes(1, cheap);
    // Half of the time, except for the debt at its beginning.
    let had = world.run(us(1_000_000));
    let most = MAX_DEBT.as_nanos() as u64;
    assert!(
        had[1] * 2 + most + us(1000) >= us(1_000_000) * 97 / 100,
        "{had:?}"
    );
    // A front-end that slept gets no larger share when it wakes.
    world.becomes(1, idle);
    world.run(us(1_000_000));
    world.becomes(1, cheap);
    let had = world.run(us(10_000));
    let shares = shares(&had);
    assert!((470..=530).contains(&shares[1]), "{shares:?}");
}

/// For any guests and pieces, a front-end that always has work gets at least its fair share, less
/// one turn of each neighbour.
#[test]
fn random_front_ends_get_fair_share() {
    let mut state = 88_172_645_463_325_252u64;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for case in 0..24 {
        let count = 2 + random(6) as usize;
        let mut guests = Vec::new();
        for _ in 0..count {
            let longest = [200, us(10), us(400)][random(3) as usize];
            let piece = 50 + random(longest);
            guests.push(match random(5) {
                0 => Guest::Thinks {
                    piece,
                    pause: random(us(200)),
                },
                1 => Guest::Sends { message: piece },
                4 => Guest::Volumes { piece },
                2 => Guest::Idle,
                _ => Guest::Busy { piece },
            });
        }
        guests.push(Guest::Busy { piece: us(1) });
        let time = us(100_000);
        let had = World::of(&guests).run(time)[count];
        let fair = time / (count as u64 + 1);
        assert!(had * 100 >= fair * 80, "{case}: {had} of {fair}");
    }
}

/// A shared system call is charged to each front-end in proportion to its started units.
#[test]
fn shared_call_is_charged_proportionally() {
    let mut accounts = Accounts::new(counter());
    (0..2).for_each(|at| accounts.open(at));
    accounts.worked_alone(0);
    assert!(!accounts.is_shared());
    accounts.worked_alone(1);
    assert!(accounts.is_shared());
    assert!(!accounts.started(0, 3));
    assert!(!accounts.started(1, 12));
    assert!(accounts.started(0, 1), "{FLUSH_UNITS} are enough");
    pass(us(160));
    accounts.sent();
    let spent = |at: usize| accounts.accounts[at].spent;
    assert_eq!([spent(0), spent(1)], [us(40), us(120)]);
    accounts.settle(0..2);
    let spent = |at: usize| accounts.accounts[at].spent;
    assert_eq!([spent(0), spent(1)], [us(15), us(95)]);
    assert!(accounts.may_work(0) && !accounts.may_work(1));
    assert!(accounts.anyone_left_out());
}
