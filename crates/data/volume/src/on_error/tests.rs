#![allow(clippy::unwrap_used)] // A test fails by a panic.

use super::*;
use crate::{Effect, Fault, FaultVolume, Faults, IoOptions, MemVolume, OpKind, Wake};
use dma::{Buffer, SegmentList};
use std::collections::VecDeque;
use std::time::Instant;

const EIO: IoError = IoError::from_errno(libc::EIO, true);
const ENOSPC: IoError = IoError::from_errno(libc::ENOSPC, true);
const BLOCK: u64 = 4096;
const WRITE: Op = Op::Write { fua: false };
/// Times at which failures are reported: within the call, and later.
const WAYS: [fn(IoError) -> Effect; 2] = [Effect::Fail, Effect::FailLater];

/// A clock that stands still until it is moved.
#[derive(Debug)]
struct Hand(Mutex<Instant>);

impl Clock for Hand {
    fn now(&self) -> Instant {
        *self.0.lock().unwrap()
    }
}

/// A client that offers failed requests to the policy, as front-ends do.
struct Client {
    io: Io,
    queue: OpenQueue,
    faults: Arc<Faults>,
    handle: OnErrorHandle,
    clock: Arc<Hand>,
    /// Requests that are under way: tag, operation, block, and the byte that is written.
    started: Vec<(u64, Op, u64)>,
    ended: VecDeque<(u64, Result<(), IoError>)>,
    memory: Arc<dyn Volume>,
}

impl Client {
    fn new(policy: OnError) -> Self {
        let memory: Arc<dyn Volume> = Arc::new(MemVolume::new(64 * BLOCK).unwrap());
        let faulty = Arc::new(FaultVolume::new(memory.clone()));
        let faults = faulty.faults();
        let clock = Arc::new(Hand(Mutex::new(Instant::now())));
        let volume = OnErrorVolume::with_clock(faulty, policy, "test", clock.clone());
        let io = Io::new(IoOptions::default());
        Self {
            queue: volume.open(&io).unwrap(),
            handle: volume.on_error().unwrap(),
            io,
            faults,
            clock,
            started: Vec::new(),
            ended: VecDeque::new(),
            memory,
        }
    }

    fn pass(&self, time: Duration) {
        *self.clock.0.lock().unwrap() += time;
    }

    fn fail(&self, times: u64, effect: Effect) {
        self.faults.add(Fault {
            op: OpKind::Any,
            range: None,
            skip: 0,
            times,
            effect,
        });
    }

    /// Writes the tag into the block of that number.
    fn write(&mut self, tag: u64) {
        let mut buffer = Buffer::new(BLOCK as usize);
        buffer.fill(tag as u8);
        self.start(tag, WRITE, tag * BLOCK, SegmentList::owned(buffer));
    }

    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) {
        self.started.push((tag, op, offset));
        let done = if op.has_data() {
            self.queue.start(tag, op, offset, data)
        } else {
            self.queue.submit(Request::transfer(tag, op, offset, data))
        };
        if let Some(done) = done {
            self.completed(done);
        }
    }

    fn completed(&mut self, done: Completion) {
        let at = self.started.iter().position(|one| one.0 == done.tag);
        let at = at.expect("of a request that is under way");
        let (tag, op, offset) = self.started[at];
        let failed = match done.result {
            Ok(()) => Some(done),
            Err(error) => {
                let request = Request::transfer(tag, op, offset, done.data);
                self.queue.failed(request, error)
            }
        };
        if let Some(done) = failed {
            self.started.swap_remove(at);
            self.ended.push_back((tag, done.result));
        }
    }

    /// Runs a few rounds of a worker.
    fn rounds(&mut self) -> Vec<(u64, Result<(), IoError>)> {
        for _ in 0..4 {
            let mut done = Vec::new();
            self.queue.poll(&mut |completion| done.push(completion));
            done.into_iter().for_each(|done| self.completed(done));
        }
        self.ended.drain(..).collect()
    }

    /// Returns the first byte of a block.
    fn byte(&self, block: u64) -> u8 {
        let mut queue = self.memory.open(&self.io).unwrap();
        let data = SegmentList::owned(Buffer::new(BLOCK as usize));
        let mut done = queue.start(1, Op::Read, block * BLOCK, data).unwrap();
        done.data.buffer().unwrap()[0]
    }
}

fn on_write(write: ErrorAction) -> OnError {
    OnError {
        write,
        ..OnError::default()
    }
}

#[test]
fn errors_are_reported_by_default() {
    for way in WAYS {
        let mut client = Client::new(OnError::default());
        client.fail(1, way(EIO));
        client.write(1);
        assert_eq!(client.rounds(), [(1, Err(EIO))]);
        let status = client.handle.status();
        assert_eq!((status.write_errors, status.repeated), (1, 0));
        assert_eq!(status.last.unwrap().1, EIO);
    }
    let mut queue = MemVolume::new(BLOCK)
        .unwrap()
        .open(&Io::new(IoOptions::default()))
        .unwrap();
    let request = Request::transfer(1, Op::Flush, 0, SegmentList::new());
    assert_eq!(queue.failed(request, EIO).unwrap().result, Err(EIO));
    assert!(!queue.keeps_failed(WRITE, EIO));
}

#[test]
fn retried_request_succeeds_under_own_tag() {
    for way in WAYS {
        let mut client = Client::new(on_write(ErrorAction::Retry));
        client.fail(3, way(EIO));
        client.write(1);
        client.write(2);
        assert_eq!(client.rounds().len(), 0);
        assert_eq!(client.byte(1), 0);
        assert_eq!(client.handle.status().waiting, 2);
        assert_ne!(client.queue.state().wake, Wake::Event);
        for _ in 0..3 {
            client.pass(Duration::from_secs(2));
            client
                .rounds()
                .into_iter()
                .for_each(|end| client.ended.push_back(end));
        }
        let mut ended: Vec<_> = client.ended.drain(..).collect();
        ended.sort_by_key(|end| end.0);
        assert_eq!(ended, [(1, Ok(())), (2, Ok(()))]);
        assert_eq!((client.byte(1), client.byte(2)), (1, 2));
        let status = client.handle.status();
        assert_eq!((status.write_errors, status.repeated), (3, 3));
        assert_eq!((status.held, status.waiting), (0, 0));
        assert_eq!(client.queue.state(), crate::QueueState::IDLE);
    }
}

#[test]
fn retry_gives_up_after_limit_with_error() {
    for way in WAYS {
        let mut client = Client::new(on_write(ErrorAction::Retry));
        client.fail(u64::MAX, way(EIO));
        client.write(1);
        let mut passed = Duration::ZERO;
        loop {
            let ended = client.rounds();
            if !ended.is_empty() {
                assert_eq!(ended, [(1, Err(EIO))]);
                break;
            }
            client.pass(Duration::from_millis(500));
            passed += Duration::from_millis(500);
        }
        assert!(passed >= RETRY_FOR && passed < RETRY_FOR * 2, "{passed:?}");
        assert!(client.handle.status().repeated > 10);
    }
}

#[test]
fn stopped_volume_holds_requests_until_resume() {
    for way in WAYS {
        let mut client = Client::new(on_write(ErrorAction::Stop));
        client.fail(1, way(ENOSPC));
        client.write(1);
        assert_eq!(client.rounds(), []);
        // Later requests wait, too: also those that would succeed.
        client.write(2);
        client.start(3, Op::Flush, 0, SegmentList::new());
        client.pass(Duration::from_secs(1000));
        assert_eq!(client.rounds(), []);
        assert_eq!((client.byte(1), client.byte(2)), (0, 0));
        let status = client.handle.status();
        assert_eq!((status.held, status.stops, status.repeated), (3, 1, 0));
        assert_eq!(client.queue.state().in_flight, 3);
        assert!(!client.queue.is_immediate());
        client.handle.resume();
        let ended = client.rounds();
        assert_eq!(ended, [(1, Ok(())), (2, Ok(())), (3, Ok(()))]);
        assert_eq!((client.byte(1), client.byte(2)), (1, 2));
        let status = client.handle.status();
        assert_eq!((status.held, status.waiting, status.repeated), (0, 0, 1));
        // The volume may stop again.
        client.fail(1, way(ENOSPC));
        client.write(4);
        assert_eq!(client.rounds(), []);
        assert_eq!(client.handle.status().stops, 2);
        client.handle.resume();
        assert_eq!(client.rounds(), [(4, Ok(()))]);
    }
}

#[test]
fn failed_resume_holds_request_again() {
    for way in WAYS {
        let mut client = Client::new(on_write(ErrorAction::Stop));
        client.fail(2, way(ENOSPC));
        client.write(1);
        client.rounds();
        client.handle.resume();
        assert_eq!(client.rounds(), []);
        assert_eq!(client.handle.status().held, 1);
        client.handle.resume();
        assert_eq!(client.rounds(), [(1, Ok(()))]);
    }
}

#[test]
fn enospc_stop_waits_for_space_only() {
    for way in WAYS {
        let mut client = Client::new(OnError {
            read: ErrorAction::EnospcStop,
            write: ErrorAction::EnospcStop,
        });
        client.fail(1, way(EIO));
        client.write(1);
        assert_eq!(client.rounds(), [(1, Err(EIO))]);
        client.fail(1, way(ENOSPC));
        client.write(2);
        assert_eq!(client.rounds(), []);
        client.handle.resume();
        assert_eq!(client.rounds(), [(2, Ok(()))]);
        client.fail(1, way(ENOSPC));
        let data = SegmentList::owned(Buffer::new(BLOCK as usize));
        client.start(3, Op::Read, 0, data);
        assert_eq!(client.rounds(), [(3, Err(ENOSPC))], "a read needs none");
        assert_eq!(client.handle.status().no_space, 2);
    }
}

#[test]
fn durability_errors_are_reported_under_every_policy() {
    for &write in ErrorAction::ALL {
        for way in WAYS {
            let mut client = Client::new(on_write(write));
            client.fail(1, way(EIO));
            client.start(1, Op::Flush, 0, SegmentList::new());
            assert_eq!(client.rounds(), [(1, Err(EIO))], "{write:?}");
            let lost = IoError::of_sync(libc::EIO);
            client.fail(1, way(lost));
            client.write(2);
            assert_eq!(client.rounds(), [(2, Err(lost))], "{write:?}");
            // Requests at fault themselves are not held either.
            client.start(3, WRITE, 64 * BLOCK, SegmentList::owned(Buffer::new(512)));
            assert_eq!(client.rounds(), [(3, Err(IoErrorKind::OutOfRange.into()))]);
        }
    }
}

#[test]
fn held_requests_are_cancelled_and_follow_policy_change() {
    for way in WAYS {
        let mut client = Client::new(on_write(ErrorAction::Stop));
        client.fail(1, way(EIO));
        client.write(1);
        assert_eq!(client.rounds(), []);
        client.write(2);
        client.write(3);
        assert_eq!(client.rounds(), []);
        client.queue.cancel(3);
        assert_eq!(client.queue.state().wake, Wake::Poll);
        assert_eq!(client.rounds(), [(3, Err(IoErrorKind::Aborted.into()))]);
        client.handle.set(OnError::default());
        let mut ended = client.rounds();
        ended.sort_by_key(|end| end.0);
        assert_eq!(ended, [(1, Err(EIO)), (2, Ok(()))]);
        assert_eq!(client.handle.status().held, 0);
        assert_eq!(client.started, []);
    }
}

#[test]
fn ending_worker_fails_held_requests() {
    for way in WAYS {
        let mut client = Client::new(on_write(ErrorAction::Stop));
        client.fail(1, way(ENOSPC));
        client.write(1);
        client.rounds();
        client.write(2);
        assert_eq!(client.rounds(), []);
        client.io.end();
        assert_eq!(client.queue.state().wake, Wake::Poll);
        let mut ended = client.rounds();
        ended.sort_by_key(|end| end.0);
        assert_eq!(ended, [(1, Err(ENOSPC)), (2, Ok(()))]);
    }
}

#[test]
fn dropped_queue_leaves_held_counters() {
    let mut client = Client::new(on_write(ErrorAction::Stop));
    client.fail(1, Effect::Fail(EIO));
    client.write(1);
    client.rounds();
    assert_eq!(client.handle.status().held, 1);
    let Client { queue, handle, .. } = client;
    drop(queue);
    assert_eq!(handle.status().held, 0);
}
