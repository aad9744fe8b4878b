//! Messages exactly once: a strict client, and a server that dies at every point there is.
//!
//! What outlives the server is what a keeper and the kernel have: the session's memory, pipes,
//! sockets, descriptors. The device is a part of it, as a controller with its state memory is.

mod client;
mod world;

use client::Client;
use crash::Crashed;
use state_memory::{DescriptorKind, DescriptorLedger};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use world::{DEPTH, Random, World, inode};

/// Dies now and then; how often at which point.
struct Deaths {
    random: Random,
    points: Vec<&'static str>,
    seen: BTreeMap<&'static str, u32>,
}

impl Deaths {
    /// Chooses where to die next. `has_died`: the next process begins, and may die of that, too.
    fn arm(&mut self, has_died: bool) {
        if self.points.is_empty() {
            return;
        }
        // A process that always dies again gets nowhere.
        if has_died && self.random.below(3) == 0 {
            return crash::disarm();
        }
        let of_resumption: Vec<&str> = self
            .points
            .iter()
            .copied()
            .filter(|point| OF_RESUMPTION.contains(point))
            .collect();
        let points = if has_died && !of_resumption.is_empty() && self.random.below(2) == 0 {
            &of_resumption
        } else {
            &self.points
        };
        let point = points[self.random.below(points.len() as u64) as usize];
        crash::arm(point, 1 + self.random.below(3));
    }

    /// Runs a part of a process. `None`: it has died.
    fn run<T>(&mut self, part: impl FnOnce() -> T) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(part)) {
            Ok(done) => Some(done),
            Err(payload) => match payload.downcast::<Crashed>() {
                Ok(crashed) => {
                    *self.seen.entry(crashed.0).or_default() += 1;
                    self.arm(true);
                    None
                }
                Err(payload) => std::panic::resume_unwind(payload),
            },
        }
    }
}

/// Has a client talk to a server that dies at these points, until it has had so many answers.
fn talk(points: &[&'static str], answers: u32, seed: u64) -> BTreeMap<&'static str, u32> {
    let (mut world, peer) = World::new();
    talk_in(&mut world, peer, points, answers, seed)
}

/// Has a client talk to a server in this world.
fn talk_in(
    world: &mut World,
    peer: OwnedFd,
    points: &[&'static str],
    answers: u32,
    seed: u64,
) -> BTreeMap<&'static str, u32> {
    let mut random = Random(seed);
    let mut client = Client::new(peer);
    let mut deaths = Deaths {
        random: Random(seed ^ 0x5555),
        points: points.to_vec(),
        seen: BTreeMap::new(),
    };
    crash::disarm();
    deaths.arm(false);
    let mut process = None;
    let (mut idle, mut turns) = (0, 0);
    while client.answered < answers || !client.expected.is_empty() {
        if client.answered < answers && client.expected.len() < DEPTH && random.below(3) > 0 {
            client.post(&mut random);
        }
        client.send();
        turns += 1;
        if turns % 200 == 0 {
            // The last one was not passed any more.
            deaths.arm(false);
        }
        world.disk.defer = random.below(2) == 0;
        let complete = random.below(3) > 0;
        process = match process {
            None => deaths.run(|| world.start()),
            Some(mut running) => deaths
                .run(|| world.turn(&mut running, complete))
                .map(|()| running),
        };
        if process.is_none() {
            // An operation that was under way is begun again.
            world.disk.end_operation(false);
        }
        if random.below(4) > 0 {
            world.keeper.handle();
        }
        let before = client.answered;
        if random.below(4) > 0 {
            client.take();
        }
        idle = if client.answered == before {
            idle + 1
        } else {
            0
        };
        assert!(
            idle < 10_000,
            "{} answers, then none; died {:?}, {points:?} seed {seed:#x}",
            client.answered,
            deaths.seen,
        );
    }
    crash::disarm();
    // Posted writes at the end, and what the keeper is told.
    let mut running = process.unwrap_or_else(|| world.start());
    for _ in 0..20 {
        world.keeper.handle();
        world.turn(&mut running, true);
    }
    client.take();
    assert!(client.expected.is_empty());
    assert!(
        world.disk.bar == client.bar,
        "every write counts once, in order"
    );
    assert!(world.disk.resets >= client.resets);
    assert_eq!(world.disk.disconnects, 0);
    let files: BTreeMap<u64, u64> = world
        .disk
        .windows
        .iter()
        .map(|(at, w)| (*at, w.1))
        .collect();
    let sent: BTreeMap<u64, u64> = client
        .windows
        .iter()
        .map(|(at, fd)| (*at, inode(fd)))
        .collect();
    assert_eq!(files, sent);
    let vectors: Vec<u32> = world.disk.vectors.keys().copied().collect();
    assert!(client.vectors.keys().copied().eq(vectors));
    // Nothing is kept that is not needed, and nothing is missing.
    let mut needed: BTreeSet<String> = world
        .disk
        .needed()
        .iter()
        .map(|number| format!("d1.{number}"))
        .collect();
    assert_eq!(needed.len(), files.len() + client.vectors.len());
    let client_number = running.ledger.borrow().noted().into_iter();
    let mut clients = client_number.filter(|noted| noted.kind == DescriptorKind::CLIENT);
    needed.insert(format!("d1.{}", clients.next().unwrap().number));
    assert!(clients.next().is_none());
    let kept: BTreeSet<String> = world.keeper.kept.keys().cloned().collect();
    assert_eq!(kept, needed);
    assert_eq!(running.ledger.borrow().noted().len(), needed.len());
    // The end is the end.
    running.connection.close(&mut world.disk);
    world.keeper.handle();
    assert!(world.keeper.kept.is_empty() && running.ledger.borrow().noted().is_empty());
    deaths.seen
}

/// Points that are passed only by a process that goes on with another's client.
const OF_RESUMPTION: &[&str] = &[
    "vfio-user.resume.received",
    "vfio-user.resume.drained",
    "vfio-user.resume.piped",
    "vfio-user.resume.heading",
    "vfio-user.resume.done",
];

/// Of the end of a connection.
const OF_END: &[&str] = &["vfio-user.connection.shut", "vfio-user.journal.ended"];

fn all_points() -> Vec<&'static str> {
    crash::disarm();
    talk(&[], 300, 7);
    let mut points = passed_points();
    points.extend(OF_RESUMPTION);
    points
}

/// Those that a conversation without deaths passes.
fn passed_points() -> Vec<&'static str> {
    let (mut world, peer) = World::new();
    let mut random = Random(99);
    let mut client = Client::new(peer);
    crash::disarm();
    let mut process = world.start();
    for _ in 0..3000 {
        if client.expected.len() < DEPTH {
            client.post(&mut random);
        }
        client.send();
        world.disk.defer = random.below(2) == 0;
        world.keeper.handle();
        world.turn(&mut process, true);
        client.take();
    }
    let mut passed: Vec<&'static str> = crash::passed().into_keys().collect();
    passed.retain(|point| !OF_END.contains(point));
    passed
}

#[test]
fn settled_connection_leaves_no_handled_message_in_socket() {
    let (mut world, peer) = World::new();
    let mut client = Client::new(peer);
    crash::disarm();
    let mut process = world.start();
    while client.answered == 0 {
        client.send();
        world.keeper.handle();
        world.turn(&mut process, true);
        client.take();
    }
    let waiting = |world: &World| rustix::io::ioctl_fionread(&world.client).unwrap();
    client.counts = 2;
    for count in 1..=2 {
        client.post(&mut Random(1));
        client.send();
        world.turn(&mut process, false);
        assert_eq!(world.disk.bar, client.bar, "write {count} is handled");
        assert!(waiting(&world) > 0);
    }
    process.connection.settle();
    assert_eq!(waiting(&world), 0);
}

#[test]
fn living_server_answers_every_message() {
    talk(&[], 2000, 1);
}

/// Leaves intended deaths out of the output.
fn report_panics() {
    std::panic::set_hook(Box::new(|info| {
        if info.payload().downcast_ref::<Crashed>().is_none() {
            eprintln!("{info}");
        }
    }));
}

/// Messages are handled before a late keeper has answered. It handles all requests of a process
/// that has died before it starts the next one, so nothing is missing there.
#[test]
fn server_may_die_while_keeper_is_late() {
    report_panics();
    let points = all_points();
    let (mut seen, mut behind) = (BTreeSet::new(), 0);
    for seed in 1..=60 {
        let (mut world, peer) = World::new();
        world.is_late = true;
        let deaths = talk_in(&mut world, peer, &points, 300, seed * 0x9e37);
        seen.extend(deaths.into_keys());
        behind += world.behind;
    }
    assert!(seen.len() > 20 && behind > 0, "{seen:?} {behind}");
}

#[test]
fn server_may_die_at_every_point() {
    report_panics();
    let points = all_points();
    assert!(points.len() > 20, "{points:?}");
    let mut seen = BTreeMap::<&str, u32>::new();
    let mut add = |deaths: BTreeMap<&'static str, u32>| {
        for (point, times) in deaths {
            *seen.entry(point).or_default() += times;
        }
    };
    let rounds = std::env::var("VNVME_DEATHS").map_or(1, |text| text.parse().unwrap());
    for seed in 1..=4 * rounds {
        add(talk(&points, 6000, seed * 0x9e37));
    }
    // Then each by itself, and what leads to it; also at the start of a conversation.
    for &point in &points {
        let before: &[&str] = match point {
            "vfio-user.resume.received" => &["vfio-user.take.moved"],
            "vfio-user.resume.drained" | "vfio-user.resume.piped" => &[
                "vfio-user.reply.writing",
                "vfio-user.reply.written",
                "vfio-user.reply.moved",
                "vfio-user.message.answered",
            ],
            "vfio-user.resume.heading" => &["vfio-user.reply.written", "vfio-user.reply.headed"],
            "vfio-user.resume.done" => &["vfio-user.message.handled"],
            _ => &[],
        };
        let these = [before, &[point]].concat();
        let (mut times, mut seed) = (0, 1);
        while times < 20 * rounds as u32 {
            let deaths = talk(&these, if seed % 2 == 0 { 5 } else { 100 }, seed * 0x79b9);
            times += deaths.get(point).copied().unwrap_or(0);
            add(deaths);
            seed += 1;
            assert!(seed < 1000 * rounds, "{point} is passed {times} times only");
        }
    }
    let total: u32 = seen.values().sum();
    println!("died {total} times: {seen:#?}");
    for point in points {
        let times = seen.get(point).copied().unwrap_or(0);
        assert!(times >= 20, "{point}: {times}");
    }
}
