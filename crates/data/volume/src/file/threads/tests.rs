//! Files that hang: each operation waits here until the test lets it continue.

use super::*;
use crate::{
    Completion, FileOptions, FileVolume, Io, IoErrorKind, IoOptions, Request, VolumeQueue,
};
use dma::{Buffer, SegmentList};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use std::collections::BTreeSet;
use std::time::Instant;

/// Only a hang takes this long.
const BOUND: Duration = Duration::from_secs(60);
const WRITE: Op = Op::Write { fua: false };
const LEN: u64 = 4096;

/// Offsets of the operations that may continue, and those that have begun.
#[derive(Default)]
struct Gate {
    state: Mutex<(BTreeSet<u64>, Vec<u64>)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self, offset: u64) {
        let mut state = self.state.lock().unwrap();
        state.1.push(offset);
        self.changed.notify_all();
        let hangs = |state: &mut (BTreeSet<u64>, Vec<u64>)| state.0.contains(&offset);
        drop(self.changed.wait_while(state, hangs).unwrap());
    }

    fn close(&self, offset: u64) {
        self.state.lock().unwrap().0.insert(offset);
    }

    fn open(&self, offset: u64) {
        self.state.lock().unwrap().0.remove(&offset);
        self.changed.notify_all();
    }

    fn begun(&self, offset: u64) -> bool {
        self.state.lock().unwrap().1.contains(&offset)
    }

    fn wait_until_begun(&self, offset: u64) {
        let state = self.state.lock().unwrap();
        let waits = |state: &mut (BTreeSet<u64>, Vec<u64>)| !state.1.contains(&offset);
        let (_state, waited) = self
            .changed
            .wait_timeout_while(state, BOUND, waits)
            .unwrap();
        assert!(!waited.timed_out(), "{offset} never begins");
    }
}

/// A file of a local disk, treated as one that may hang.
struct Hanging {
    queue: ThreadsQueue,
    io: Io,
    gate: Arc<Gate>,
    volume: FileVolume,
    _file: tempfile::NamedTempFile,
}

impl Hanging {
    fn new(stop_timeout: Duration) -> Self {
        Self::with_timeout(stop_timeout, None)
    }

    fn with_timeout(stop_timeout: Duration, timeout: Option<Duration>) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(64 << 20).unwrap();
        let options = FileOptions {
            lock: false,
            timeout,
            ..FileOptions::default()
        };
        let volume = FileVolume::open(file.path(), options).unwrap();
        let gate = Arc::new(Gate::default());
        let io = Io::new(IoOptions {
            stop_timeout,
            ..IoOptions::default()
        });
        let shared = volume.shared.clone();
        let work_file = WorkFile {
            fd: shared.fd.clone(),
            abilities: shared.abilities.clone(),
            unit: shared.direct.map_or(1, |direct| direct.block.into()),
        };
        let pass = gate.clone();
        let threads = FileThreads::with(Box::new(move |work| {
            pass.pass(work.offset);
            work.carry_out(&work_file)
        }));
        let queue = ThreadsQueue::new(shared, Arc::new(threads), &io).unwrap();
        Self {
            queue,
            io,
            gate,
            volume,
            _file: file,
        }
    }

    fn submit(&mut self, tag: u64, op: Op, offset: u64, data: Option<&[u8]>) {
        let data = data.map_or_else(SegmentList::new, |data| {
            SegmentList::owned(Buffer::from_slice(data))
        });
        let len = if data.is_empty() && op != Op::Flush {
            LEN
        } else {
            data.len_bytes()
        };
        let request = Request {
            tag,
            op,
            offset,
            len,
            data,
        };
        assert!(self.queue.submit(request).is_none());
    }

    /// Sleeps as a worker does until there is a completion.
    fn complete(&mut self) -> Completion {
        let began = Instant::now();
        let mut done = Vec::new();
        loop {
            self.queue.poll(&mut |completion| done.push(completion));
            assert!(done.len() <= 1, "{done:?}");
            if let Some(done) = done.pop() {
                return done;
            }
            assert!(began.elapsed() < BOUND, "nothing completes");
            if self.io.arm() {
                let second = rustix::event::Timespec {
                    tv_sec: 10,
                    tv_nsec: 0,
                };
                let fd = self.io.others_fd().expect("its inbox");
                poll(
                    &mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)],
                    Some(&second),
                )
                .unwrap();
            }
        }
    }

    fn wait_for(&mut self, tag: u64, result: Result<(), IoError>) -> Vec<u8> {
        let completion = self.complete();
        assert_eq!((completion.tag, completion.result), (tag, result));
        completion
            .data
            .into_buffer()
            .map_or_else(Vec::new, |buffer| buffer.to_vec())
    }
}

const ABORTED: Result<(), IoError> = Err(IoError::new(IoErrorKind::Aborted));

#[test]
fn hanging_requests_block_no_other() {
    let mut file = Hanging::new(BOUND);
    for hang in 0..8 {
        file.gate.close(hang * LEN);
        file.submit(hang, Op::Read, hang * LEN, Some(&[1; LEN as usize]));
    }
    let data = vec![7; 1 << 20];
    file.submit(100, WRITE, 8 << 20, Some(&data));
    file.wait_for(100, Ok(()));
    // The offset of a flush has no meaning.
    file.submit(101, Op::Flush, 8 << 20, None);
    file.wait_for(101, Ok(()));
    file.submit(102, Op::Read, 8 << 20, Some(&vec![0; 1 << 20]));
    assert_eq!(file.wait_for(102, Ok(())), data);
    for hang in 0..8 {
        file.gate.open(hang * LEN);
        assert_eq!(file.wait_for(hang, Ok(())), [0; LEN as usize]);
    }
    assert_eq!(file.queue.state(), crate::QueueState::IDLE);
}

#[test]
fn hanging_request_ends_at_cancellation() {
    let mut file = Hanging::new(BOUND);
    file.gate.close(0);
    file.submit(1, Op::Read, 0, Some(&[5; LEN as usize]));
    file.gate.wait_until_begun(0);
    file.queue.cancel(1);
    assert_eq!(file.queue.state().wake, crate::Wake::Poll);
    let data = file.wait_for(1, ABORTED);
    assert_eq!(data, [5; LEN as usize], "nobody writes there any more");
    // A read that was given up holds up nobody.
    file.submit(2, WRITE, 1 << 20, Some(&[3; LEN as usize]));
    file.wait_for(2, Ok(()));
    file.gate.open(0);
}

#[test]
fn requests_wait_for_end_of_cancelled_write() {
    let mut file = Hanging::new(BOUND);
    file.gate.close(0);
    file.submit(1, WRITE, 0, Some(&[1; LEN as usize]));
    file.gate.wait_until_begun(0);
    file.queue.cancel(1);
    file.wait_for(1, ABORTED);
    let other = 1 << 20;
    file.submit(2, WRITE, other, Some(&[2; LEN as usize]));
    file.submit(3, Op::Read, 2 << 20, Some(&[9; LEN as usize]));
    // Long enough for a thread that wrongly begins.
    std::thread::sleep(Duration::from_millis(50));
    assert!(!file.gate.begun(other) && !file.gate.begun(2 << 20));
    // Waiting requests can be given up, too, and never happen then.
    file.queue.cancel(2);
    file.wait_for(2, ABORTED);
    file.gate.open(0);
    file.wait_for(3, Ok(()));
    assert!(!file.gate.begun(other));
}

#[test]
fn threads_and_copies_of_hanging_requests_are_bounded() {
    let mut file = Hanging::new(BOUND);
    let many = 200;
    for hang in 0..many {
        file.gate.close(hang * LEN);
        file.submit(hang, Op::Read, hang * LEN, Some(&[0; LEN as usize]));
    }
    file.gate.wait_until_begun((MAX_THREADS as u64 - 1) * LEN);
    {
        let state = file.queue.threads.0.lock();
        assert_eq!(
            (state.threads, state.running.len()),
            (MAX_THREADS, MAX_THREADS)
        );
        assert!(state.due.len() < 64);
    }
    assert_eq!(file.queue.state().in_flight as u64, many);
    // A client that is reset gets all of them back at once.
    (0..many).for_each(|tag| file.queue.cancel(tag));
    let mut ended = 0;
    file.queue.poll(&mut |done| {
        assert_eq!(done.result, ABORTED);
        ended += 1;
    });
    assert_eq!(ended, many);
    (0..many).for_each(|hang| file.gate.open(hang * LEN));
    file.submit(many, WRITE, 0, Some(&[2; LEN as usize]));
    file.wait_for(many, Ok(()));
}

#[test]
fn end_abandons_hanging_file() {
    let mut file = Hanging::new(Duration::from_millis(20));
    file.gate.close(0);
    file.submit(1, WRITE, 0, Some(&[1; LEN as usize]));
    file.submit(2, WRITE, 1 << 20, Some(&[1; LEN as usize]));
    file.wait_for(2, Ok(()));
    assert_eq!(file.queue.poll(&mut |_| panic!("the end has not begun")), 0);
    file.io.end();
    let began = Instant::now();
    let mut ended = Vec::new();
    while ended.is_empty() {
        assert!(began.elapsed() < BOUND, "waits for ever");
        file.queue
            .poll(&mut |done| ended.push((done.tag, done.result)));
    }
    assert_eq!(ended, [(1, ABORTED)]);
    assert_eq!(file.io.given_up(), [file.volume.shared.description.clone()]);
    file.gate.open(0);
}

#[test]
fn unanswered_request_times_out() {
    let limit = Duration::from_secs(2);
    let mut file = Hanging::with_timeout(BOUND, Some(limit));
    file.gate.close(0);
    file.submit(1, WRITE, 0, Some(&[1; LEN as usize]));
    file.gate.wait_until_begun(0);
    assert_ne!(file.queue.state().wake, crate::Wake::Event);
    let began = Instant::now();
    file.wait_for(1, Err(IoErrorKind::Unreachable.into()));
    assert!(began.elapsed() < BOUND / 2);
    // The write may still happen: later requests wait for it, and their time runs out as well.
    file.submit(2, WRITE, 1 << 20, Some(&[2; LEN as usize]));
    file.wait_for(2, Err(IoErrorKind::Unreachable.into()));
    assert!(!file.gate.begun(1 << 20));
    file.gate.open(0);
    file.submit(3, WRITE, 1 << 20, Some(&[3; LEN as usize]));
    file.wait_for(3, Ok(()));
    assert_eq!(file.queue.state(), crate::QueueState::IDLE);
}

/// Checks that a completion that arrived in time is not a time-out, even if the next round comes
/// late.
#[test]
fn answer_seen_late_is_no_timeout() {
    let limit = Duration::from_millis(100);
    let mut file = Hanging::with_timeout(BOUND, Some(limit));
    file.submit(1, WRITE, 0, Some(&[1; LEN as usize]));
    let began = Instant::now();
    while !file.queue.inbox.has_news() {
        assert!(began.elapsed() < BOUND, "it is not written");
        std::thread::yield_now();
    }
    std::thread::sleep(2 * limit);
    file.wait_for(1, Ok(()));
}

#[test]
fn dropped_queue_leaves_hanging_requests_behind() {
    let mut file = Hanging::new(BOUND);
    file.gate.close(0);
    file.submit(1, WRITE, 0, Some(&[1; LEN as usize]));
    file.submit(2, WRITE, LEN, Some(&[1; LEN as usize]));
    file.gate.wait_until_begun(0);
    let Hanging {
        queue,
        gate,
        io,
        volume,
        ..
    } = file;
    let began = Instant::now();
    while !queue.inbox.has_news() {
        assert!(began.elapsed() < BOUND, "the other one is not written");
        std::thread::yield_now();
    }
    assert!(!io.arm(), "its completion waits");
    let threads = Arc::downgrade(&queue.threads.0);
    drop(queue);
    assert!(io.arm(), "nobody waits for anything, though a thread hangs");
    gate.open(0);
    let began = Instant::now();
    while threads.strong_count() > 0 {
        assert!(began.elapsed() < BOUND, "threads do not end");
        std::thread::yield_now();
    }
    drop(volume);
}

#[test]
fn round_copies_bounded_amount() {
    let mut file = Hanging::new(BOUND);
    let len = 1 << 20;
    let many = 40;
    for tag in 0..many {
        file.submit(tag, Op::Read, tag << 20, Some(&vec![1; len]));
    }
    let (mut ended, mut rounds) = (0, 0);
    let began = Instant::now();
    while ended < many {
        // Waits until all possible reads are done.
        let busy = |state: &State| !state.due.is_empty() || !state.running.is_empty();
        while busy(&file.queue.threads.0.lock()) {
            assert!(began.elapsed() < BOUND, "nothing is read");
            std::thread::yield_now();
        }
        assert!(began.elapsed() < BOUND, "nothing completes");
        file.queue.poll(&mut |done| {
            assert_eq!(done.result, Ok(()));
            ended += 1;
        });
        rounds += 1;
        if file.queue.goes_on() {
            assert_eq!(file.queue.state().wake, crate::Wake::Poll);
        }
    }
    // 1 MiB in each round, and a piece.
    assert!(rounds >= 32, "{rounds} rounds for 40 MiB");
}

#[test]
fn dropped_threads_do_not_wait_for_close() {
    struct Closes(std::sync::mpsc::Receiver<()>);
    impl Drop for Closes {
        fn drop(&mut self) {
            let _ = self.0.recv_timeout(BOUND);
        }
    }
    let (answer, answers) = std::sync::mpsc::channel();
    let closes = Mutex::new(Closes(answers));
    let threads = FileThreads::with(Box::new(move |_| {
        drop(closes.lock());
        Ok(())
    }));
    let began = Instant::now();
    drop(threads);
    assert!(began.elapsed() < BOUND / 2);
    drop(answer);
}

#[test]
fn file_threads_are_not_bound_to_worker_cpu() {
    let all = sched_getaffinity(Some(rustix::process::getpid())).unwrap();
    let found = Arc::new(Mutex::new(None));
    let mine = found.clone();
    std::thread::spawn(move || {
        let first = (0..1024).find(|&cpu| all.is_set(cpu)).unwrap();
        let mut one = rustix::thread::CpuSet::new();
        one.set(first);
        sched_setaffinity(None, &one).unwrap();
        let threads = FileThreads::with(Box::new(move |_| {
            *mine.lock().unwrap() = Some(sched_getaffinity(None).unwrap());
            Ok(())
        }));
        threads.begin().unwrap();
        let inbox = Inbox::new(&Io::new(IoOptions::default())).unwrap();
        let work = ThreadWork {
            op: Op::Flush,
            offset: 0,
            len: 0,
            buffer: None,
        };
        threads.start(work, &inbox);
        while !inbox.has_news() {
            std::thread::yield_now();
        }
    })
    .join()
    .unwrap();
    assert_eq!(found.lock().unwrap().unwrap(), all);
}

#[test]
fn every_operation_matches_ring() {
    let mut file = Hanging::new(BOUND);
    let mib = vec![9; 1 << 20];
    let zero = |deallocate| Op::WriteZeroes {
        deallocate,
        fua: true,
    };
    for op in [zero(false), zero(true), Op::Deallocate] {
        file.submit(1, Op::Write { fua: true }, 0, Some(&mib));
        file.wait_for(1, Ok(()));
        file.submit(2, op, LEN, None);
        file.wait_for(2, Ok(()));
        file.submit(3, Op::Read, 0, Some(&mib));
        let now = file.wait_for(3, Ok(()));
        assert_eq!(now[..LEN as usize], mib[..LEN as usize], "{op:?}");
        assert_eq!(
            now[LEN as usize..2 * LEN as usize],
            [0; LEN as usize],
            "{op:?}"
        );
        assert_eq!(now[2 * LEN as usize..], mib[2 * LEN as usize..], "{op:?}");
    }
    // A filesystem that supports neither.
    let abilities = &file.volume.shared.abilities;
    abilities.cannot_punch();
    abilities.cannot_zero();
    file.submit(4, zero(true), 0, None);
    file.wait_for(4, Ok(()));
    let deallocate = Request::without_data(5, Op::Deallocate, 0, LEN);
    let refused = file.queue.submit(deallocate).expect("at once");
    assert_eq!(refused.result, Err(IoErrorKind::Unsupported.into()));
    // The file has become shorter.
    std::fs::File::options()
        .write(true)
        .open(&file.volume.shared.path)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    file.submit(6, Op::Read, 1 << 20, Some(&mib));
    file.wait_for(6, Err(IoErrorKind::Truncated.into()));
}
