//! Several portals: which path a request takes, and what becomes of one that is lost.

use super::*;

fn two(ana: bool) -> Target {
    Target::new(Setup {
        portals: 2,
        ana,
        ..Setup::default()
    })
}

fn portals(target: &Target) -> [usize; 2] {
    let log = target.log();
    [0, 1].map(|portal| log.iter().filter(|entry| entry.portal == portal).count())
}

#[test]
fn paths_share_load_by_policy() {
    for policy in [Policy::RoundRobin, Policy::QueueDepth] {
        let target = two(false);
        let volume = open(
            &target,
            FabricsOptions {
                policy,
                ..options()
            },
        );
        let mut worker = Worker::new(&volume);
        connected(&volume, &mut worker);
        for _ in 0..10 {
            for at in 0..10 {
                let list = worker.guest.piece(at * BLOCK, BLOCK);
                assert!(worker.start(Op::Read, at * BLOCK, BLOCK, list).1.is_none());
            }
            assert!(worker.wait(10).iter().all(|done| done.result.is_ok()));
        }
        let [one, other] = portals(&target);
        assert_eq!(one + other, 100);
        assert!((30..=70).contains(&one), "{policy:?}: {one} and {other}");
    }
}

#[test]
fn ana_state_selects_path() {
    let target = two(true);
    target.set_state(1, AnaState::NON_OPTIMIZED, false);
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    connected(&volume, &mut worker);
    // The worker takes a path's connection some time after the path is connected.
    let began = Instant::now();
    while portals(&target)[0] == 0 {
        assert!(began.elapsed() < BOUND);
        worker.read(0, 4096).unwrap();
    }
    let [one, other] = portals(&target);
    for _ in 0..20 {
        worker.read(0, 4096).unwrap();
    }
    assert_eq!(portals(&target), [one + 20, other]);
    // Told by an event.
    target.set_state(0, AnaState::INACCESSIBLE, true);
    let began = Instant::now();
    while portals(&target)[1] < 5 {
        assert!(began.elapsed() < BOUND);
        worker.read(0, 4096).unwrap();
    }
    let first = portals(&target)[0];
    for _ in 0..20 {
        worker.read(0, 4096).unwrap();
    }
    assert_eq!(portals(&target)[0], first);
    // Found out by a command: no event is sent.
    target.set_state(0, AnaState::OPTIMIZED, true);
    let began = Instant::now();
    while portals(&target)[0] == first {
        assert!(began.elapsed() < BOUND);
        worker.read(0, 4096).unwrap();
    }
    target.set_state(0, AnaState::INACCESSIBLE, false);
    for _ in 0..20 {
        worker.write(0, &[1; 4096]).unwrap();
    }
    // None: it waits, until there is one again.
    target.set_state(1, AnaState::CHANGE, false);
    let list = worker.guest.piece(0, 4096);
    assert!(worker.start(Op::Read, 0, 4096, list).1.is_none());
    let later = Instant::now() + Duration::from_millis(400);
    until(&mut worker, || Instant::now() >= later);
    target.set_state(1, AnaState::OPTIMIZED, true);
    assert_eq!(worker.wait(1)[0].result, Ok(()));
}

/// One portal or the other is always being killed, and no request fails.
#[test]
fn alternating_path_loss_fails_no_request() {
    let target = Arc::new(two(false));
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    connected(&volume, &mut worker);
    let killer = target.clone();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = stop.clone();
    let watch = volume.watch();
    let thread = std::thread::spawn(move || {
        for round in 0..12 {
            let lost = watch.look().unwrap().lost;
            killer.stop(round % 2);
            // That is seen by the path's own thread.
            while watch.look().unwrap().lost == lost {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(50));
            killer.restart(round % 2);
            while !watch.look().unwrap().connected {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        stopped.store(true, Ordering::SeqCst);
    });
    let mut longest = Duration::ZERO;
    let mut round = 0u64;
    while !stop.load(Ordering::SeqCst) {
        round += 1;
        let began = Instant::now();
        for at in 0..8 {
            let data = pattern((round + at) as u8, BLOCK);
            let list = worker.guest.holding(at * BLOCK, &data);
            assert!(worker.start(WRITE, at * BLOCK, BLOCK, list).1.is_none());
        }
        assert!(worker.wait(8).iter().all(|done| done.result.is_ok()));
        for at in 0..8 {
            let data = pattern((round + at) as u8, BLOCK);
            assert_eq!(
                worker.read(at * BLOCK, BLOCK).unwrap(),
                data,
                "round {round}"
            );
        }
        longest = longest.max(began.elapsed());
    }
    thread.join().unwrap();
    assert!(volume.watch().look().unwrap().lost >= 12);
    println!("{round} rounds, the longest {longest:?}");
}

/// An attempt to connect that gets no answer is soon followed by another one, so that a portal
/// which is there again is found soon. The other path serves meanwhile.
#[test]
fn unanswered_connect_delays_no_path() {
    let target = two(false);
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    connected(&volume, &mut worker);
    target.set_mute(1, true);
    target.end_controllers(1);
    let unanswered = |count| target.count(|s| &s.unanswered) >= count;
    until(&mut worker, || unanswered(1));
    let began = Instant::now();
    until(&mut worker, || unanswered(3));
    // Of an attempt's longest time there would be two between them; it is 3 s.
    assert!(began.elapsed() < Duration::from_secs(15));
    worker.write(0, &[1; 4096]).unwrap();
    target.set_mute(1, false);
    connected(&volume, &mut worker);
    let before = portals(&target)[1];
    for _ in 0..4 {
        worker.read(0, 4096).unwrap();
    }
    assert!(portals(&target)[1] > before);
}

/// A write that a lost controller may still carry out is not sent again before that is over: here
/// the controller closes no connection, so its keep-alive time must pass. Reads do not wait.
#[test]
fn write_retry_waits_for_end_of_association() {
    let target = Target::new(Setup {
        portals: 2,
        stubborn: true,
        answer: Box::new(|number, _| match number {
            0 | 1 => Answer::Held,
            _ => Answer::Right,
        }),
        ..Setup::default()
    });
    let options = FabricsOptions {
        kato: Duration::from_secs(2),
        timeout: Duration::from_millis(300),
        ..options()
    };
    let volume = open(&target, options);
    let mut worker = Worker::new(&volume);
    connected(&volume, &mut worker);
    let began = Instant::now();
    let list = worker.guest.holding(0, &[1; 4096]);
    let (write, _) = worker.start(WRITE, 0, 4096, list);
    let list = worker.guest.piece(8192, 4096);
    let (read, _) = worker.start(Op::Read, 8192, 4096, list);
    worker.queue.push();
    let first = worker.wait(1);
    assert_eq!((first[0].tag, first[0].result), (read, Ok(())));
    let read_after = began.elapsed();
    let second = worker.wait(1);
    assert_eq!((second[0].tag, second[0].result), (write, Ok(())));
    let after = began.elapsed();
    println!("read after {read_after:?}, write after {after:?}");
    // 300 ms until it is lost, a second in which it could close, and two from the last sign on.
    assert!(after >= Duration::from_millis(3300), "{after:?}");
    target.release();
}

/// The same where the controller closes everything: then it has ended, and nothing waits.
#[test]
fn write_is_retried_at_once_after_close() {
    let target = Target::new(Setup {
        portals: 2,
        answer: Box::new(|number, _| match number {
            0 => Answer::CloseAll,
            _ => Answer::Right,
        }),
        ..Setup::default()
    });
    let options = FabricsOptions {
        kato: Duration::from_secs(60),
        ..options()
    };
    let volume = open(&target, options.clone());
    let mut worker = Worker::new(&volume);
    connected(&volume, &mut worker);
    let began = Instant::now();
    worker.write(0, &[1; 4096]).unwrap();
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(target.count(|s| &s.requests), 2);
    // One that says that it takes a second to end commands is believed.
    let target = Target::new(Setup {
        cqt: 1000,
        answer: Box::new(|number, _| match number {
            0 => Answer::CloseAll,
            _ => Answer::Right,
        }),
        ..Setup::default()
    });
    let volume = open(&target, options);
    let mut worker = Worker::new(&volume);
    let began = Instant::now();
    worker.write(0, &[1; 4096]).unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1));
}

/// A controller with a silent Admin queue is lost, though no request is outstanding.
#[test]
fn idle_path_is_kept_alive_and_monitored() {
    let target = Target::new(Setup::default());
    let options = FabricsOptions {
        kato: Duration::from_secs(1),
        ..options()
    };
    let volume = open(&target, options);
    let worker = Worker::new(&volume);
    let began = Instant::now();
    while target.count(|s| &s.keep_alives) < 4 {
        assert!(began.elapsed() < BOUND);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(target.count(|s| &s.connections), 2);
    drop(worker);
}

#[test]
fn queues_and_workers_have_own_connections() {
    let target = Target::new(Setup::default());
    let several = FabricsOptions {
        queues: 3,
        ..options()
    };
    let volume = open(&target, several);
    let mut worker = Worker::new(&volume);
    until(&mut worker, || target.count(|s| &s.connections) >= 4);
    worker.read(0, 4096).unwrap();
    let mut other = Worker::new(&volume);
    other.write(0, &[3; 4096]).unwrap();
    until(&mut other, || target.count(|s| &s.connections) >= 7);
    assert_eq!(worker.read(0, 4096).unwrap(), [3; 4096]);
}
