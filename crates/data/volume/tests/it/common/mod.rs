//! Helpers of the tests of volumes: a worker with one queue, and guest memory for requests.

// Each test program uses its own part.
#![allow(dead_code)]

use dma::{Access, DmaMap, Memory, Prot, SegmentList};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use volume::{Completion, FastPath, Io, IoError, IoOptions, Op, OpenQueue, Request, Volume, Wake};

/// Upper bound of a wait, which only a hang reaches.
pub const BOUND: Duration = Duration::from_secs(60);

/// Creates a directory on a disk, inside the build directory.
pub fn disk() -> tempfile::TempDir {
    // A crate's own unit tests have none.
    tempfile::tempdir_in(option_env!("CARGO_TARGET_TMPDIR").unwrap_or("/tmp"))
        .expect("a directory for test files")
}

/// Creates a directory in memory; `None` (with a line in the log) where there is none.
pub fn memory() -> Option<tempfile::TempDir> {
    match tempfile::tempdir_in("/dev/shm") {
        Ok(directory) => Some(directory),
        Err(error) => {
            testkit::skip("volume: files in /dev/shm", error);
            None
        }
    }
}

/// Creates a sparse file of `size` bytes.
pub fn sparse(directory: &tempfile::TempDir, size: u64) -> PathBuf {
    let path = directory.path().join("disk.raw");
    let file = std::fs::File::create(&path).expect("a test file");
    file.set_len(size).expect("its size");
    path
}

/// Guest memory for requests.
pub struct Guest {
    pub memory: Memory,
    map: DmaMap,
}

impl Guest {
    pub fn new(len: usize) -> Self {
        let memory = Memory::anonymous(len).expect("guest memory");
        let mut map = DmaMap::new();
        map.map(
            0,
            len as u64,
            Some((memory.clone(), 0)),
            Prot {
                read: true,
                write: true,
            },
        )
        .expect("a window");
        Self { memory, map }
    }

    /// Returns a list of these ranges (offset and length) of guest memory.
    pub fn list(&self, pieces: &[(u64, u64)]) -> SegmentList {
        let mut list = SegmentList::new();
        list.begin(&self.map);
        for &(offset, len) in pieces {
            self.map
                .segments(offset, len, Access::Write, &mut list)
                .expect("a piece of guest memory");
        }
        list
    }

    /// Returns a list of one range.
    pub fn piece(&self, offset: u64, len: u64) -> SegmentList {
        let mut list = SegmentList::new();
        assert!(list.begin_piece(&self.map, offset, len, Access::Write));
        list
    }

    /// Returns a list of one range that contains `data`.
    pub fn holding(&self, offset: u64, data: &[u8]) -> SegmentList {
        let list = self.list(&[(offset, data.len() as u64)]);
        assert_eq!(list.copy_from(0, data), data.len());
        list
    }
}

/// Returns all bytes of a list.
pub fn bytes(list: &SegmentList) -> Vec<u8> {
    let mut bytes = vec![0; list.len_bytes() as usize];
    assert_eq!(list.copy_to(0, &mut bytes), bytes.len());
    bytes
}

/// Method of starting reads and writes. Other requests are always submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubmitCall {
    /// [`volume::VolumeQueue::submit`].
    Submit,
    /// [`FastPath::start`].
    Start,
}

/// All methods.
pub const WAYS: [SubmitCall; 2] = [SubmitCall::Submit, SubmitCall::Start];

impl SubmitCall {
    /// Starts a request by this method.
    pub fn begin(self, queue: &mut dyn FastPath, request: Request) -> Option<Completion> {
        let plain = request.op.has_data() && request.len == request.data.len_bytes();
        if self == Self::Submit || !plain {
            return queue.submit(request);
        }
        let Request {
            tag,
            op,
            offset,
            data,
            ..
        } = request;
        queue.start(tag, op, offset, data)
    }
}

/// A worker with one queue. The queue is dropped first: fields are dropped in order.
pub struct Worker {
    pub queue: OpenQueue,
    pub io: Io,
    pub guest: Guest,
    pub way: SubmitCall,
    tag: u64,
}

impl Worker {
    pub fn new(volume: &dyn Volume) -> Self {
        let io = Io::new(IoOptions {
            capacity: 64,
            ..IoOptions::default()
        });
        let queue = volume.open(&io).expect("a queue");
        Self {
            queue,
            io,
            guest: Guest::new(8 << 20),
            way: SubmitCall::Submit,
            tag: 0,
        }
    }

    /// Creates a worker with requests that enter the queue by `way`.
    pub fn by(way: SubmitCall, volume: &dyn Volume) -> Self {
        Self {
            way,
            ..Self::new(volume)
        }
    }

    /// Starts a request. Returns its tag, and its completion when it completes immediately.
    pub fn start(
        &mut self,
        op: Op,
        offset: u64,
        len: u64,
        data: SegmentList,
    ) -> (u64, Option<Completion>) {
        self.tag += 1;
        let tag = self.tag;
        let request = Request {
            tag,
            op,
            offset,
            len,
            data,
        };
        (tag, self.way.begin(&mut *self.queue, request))
    }

    /// Waits for `count` completions, sleeping like a worker.
    pub fn wait(&mut self, count: usize) -> Vec<Completion> {
        let began = Instant::now();
        let mut done = Vec::new();
        while done.len() < count {
            assert!(
                began.elapsed() < BOUND,
                "{} of {count} completions came",
                done.len()
            );
            self.io.flush();
            let came = self.io.poll(&mut |completion| done.push(completion))
                + self.queue.poll(&mut |completion| done.push(completion));
            if came > 0 {
                continue;
            }
            match self.queue.state().wake {
                Wake::Event if self.io.arm() => sleep(&self.io),
                Wake::After(time) if self.io.arm() => drop(sleep_for(&self.io, time)),
                _ => {}
            }
        }
        done
    }

    /// Runs a request from start to end.
    pub fn run(&mut self, op: Op, offset: u64, len: u64, data: SegmentList) -> Completion {
        let (tag, at_once) = self.start(op, offset, len, data);
        let completion = match at_once {
            Some(completion) => completion,
            None => self.wait(1).pop().expect("one completion"),
        };
        assert_eq!(completion.tag, tag);
        completion
    }

    /// Runs a request like [`Worker::run`], on the fast path for immediate transfers where the
    /// volume has one.
    pub fn run_now(&mut self, op: Op, offset: u64, len: u64, data: SegmentList) -> Completion {
        match self.queue.try_now(op, offset, data.view()) {
            Some(result) => {
                assert!(self.queue.is_immediate());
                Completion {
                    tag: 0,
                    result,
                    data,
                }
            }
            None => {
                assert!(!self.queue.is_immediate());
                self.run(op, offset, len, data)
            }
        }
    }

    pub fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        let data = self.guest.list(&[(0, len)]);
        data.fill(0xEE);
        let completion = self.run(Op::Read, offset, len, data);
        completion.result.map(|()| bytes(&completion.data))
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        let list = self.guest.holding(0, data);
        self.run(Op::Write { fua: false }, offset, data.len() as u64, list)
            .result
    }

    pub fn without_data(&mut self, op: Op, offset: u64, len: u64) -> Result<(), IoError> {
        self.run(op, offset, len, SegmentList::new()).result
    }
}

/// Sleeps until an event descriptor is readable.
pub fn sleep(io: &Io) {
    let woken = sleep_for(io, BOUND);
    assert!(woken, "a completion came and nobody was woken up");
}

/// Sleeps for `time` at most. `false`: no descriptor became readable.
fn sleep_for(io: &Io, time: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let events = io.event_fd().into_iter().chain(io.others_fd());
    let mut fds: Vec<PollFd<'_>> = events
        .map(|event| PollFd::from_borrowed_fd(event, PollFlags::IN))
        .collect();
    let bound = Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: time.subsec_nanos().into(),
    };
    fds.is_empty() || poll(&mut fds, Some(&bound)).expect("poll") > 0
}
