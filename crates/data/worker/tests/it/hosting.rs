//! A worker and its front-ends: each message and descriptor wakes it, front-ends are added and
//! removed, and nothing of a removed front-end reaches the next one in its slot.

use rustix::event::{EventfdFlags, eventfd};
use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use volume::{Budget, Completion, Io, IoOptions, MemVolume, OpenQueue, Request, Volume};
use worker::{Context, Frontend, Handle, IdleWindow, Interest, Options, Worker};

const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error, PartialEq)]
#[error("not durable")]
struct NotDurable;

/// Source of commands for the tests' front-end.
enum Source {
    /// A memory cell that the host stores to; it rings when the cell is armed.
    Memory(Arc<Cell>),
    /// By a channel: the wake flag is raised.
    Channel(Receiver<u64>),
    /// By an eventfd.
    Descriptor(OwnedFd),
}

/// A doorbell with its event index, as the loop sees it.
#[derive(Default)]
struct Cell {
    value: AtomicU64,
    armed: std::sync::atomic::AtomicBool,
}

struct Echo {
    source: Source,
    seen: u64,
    ready: bool,
    answers: SyncSender<u64>,
    flushed: bool,
    fails: bool,
    ended: Rc<std::cell::Cell<bool>>,
}

impl Echo {
    fn new(source: Source, context: &Context<'_>) -> (Echo, Receiver<u64>) {
        let (answers, answered) = sync_channel(16);
        if let Source::Descriptor(fd) = &source {
            context.descriptors.add(fd, 7, Interest::Readable).unwrap();
        }
        let echo = Echo {
            source,
            seen: 0,
            ready: false,
            answers,
            flushed: false,
            fails: false,
            ended: Rc::default(),
        };
        (echo, answered)
    }

    fn answer(&mut self, value: u64) -> bool {
        if value == self.seen {
            return false;
        }
        self.seen = value;
        self.answers.send(value).unwrap();
        true
    }
}

impl Frontend for Echo {
    type Error = NotDurable;

    fn poll(&mut self, _now: Instant, _budget: &mut Budget) -> bool {
        match &self.source {
            Source::Memory(cell) => {
                let value = cell.value.load(Ordering::Acquire);
                self.answer(value)
            }
            Source::Descriptor(fd) if std::mem::take(&mut self.ready) => {
                let mut count = [0; 8];
                rustix::io::read(fd, &mut count).unwrap();
                self.answer(self.seen + u64::from_ne_bytes(count))
            }
            _ => false,
        }
    }

    fn complete(&mut self, _completion: Completion) {}

    fn in_flight(&self) -> usize {
        0
    }

    fn arm(&mut self) -> bool {
        let Source::Memory(cell) = &self.source else {
            return false;
        };
        cell.armed.store(true, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::SeqCst);
        cell.value.load(Ordering::Relaxed) != self.seen
    }

    fn drain_messages(&mut self) -> bool {
        let Source::Channel(receiver) = &self.source else {
            return false;
        };
        let value = receiver.try_iter().last();
        value.is_some_and(|value| self.answer(value))
    }

    fn ready(&mut self, token: u32) {
        assert_eq!(token, 7);
        self.ready = true;
    }

    fn flush(&mut self) {
        self.flushed = true;
    }

    fn is_drained(&self) -> bool {
        self.flushed
    }

    fn close(&mut self) -> Result<(), NotDurable> {
        if self.fails { Err(NotDurable) } else { Ok(()) }
    }

    fn has_ended(&self) -> bool {
        self.ended.get()
    }
}

/// Runs a worker that sleeps at once, on a thread of its own, until `act` has ended.
fn beside(act: impl FnOnce(&Handle<Echo>)) {
    let handle = Handle::new().unwrap();
    std::thread::scope(|scope| {
        let theirs = handle.clone();
        scope.spawn(move || {
            let options = Options {
                idle_window: IdleWindow::Fixed(Duration::ZERO),
                ..Options::default()
            };
            let io = Rc::new(Io::new(IoOptions::default()));
            Worker::new(io, &theirs, options).unwrap().run().unwrap();
        });
        act(&handle);
        handle.post(|worker| worker.stop());
    });
}

/// Adds a front-end to a running worker; returns its answers.
fn add(handle: &Handle<Echo>, source: Source) -> Receiver<u64> {
    let (tell, told) = channel();
    handle.post(move |worker| {
        let added = worker.add(|context| {
            let (echo, answers) = Echo::new(source, context);
            tell.send(answers).unwrap();
            Ok::<_, std::convert::Infallible>(echo)
        });
        assert!(matches!(added, Ok(Some(_))));
    });
    told.recv_timeout(TIMEOUT).unwrap()
}

const ROUNDS: u64 = 10_000;

#[test]
fn wake_up_for_command_in_memory_is_never_lost() {
    beside(|handle| {
        let cell = Arc::<Cell>::default();
        let answers = add(handle, Source::Memory(cell.clone()));
        for n in 1..=ROUNDS {
            cell.value.store(n, Ordering::Release);
            std::sync::atomic::fence(Ordering::SeqCst);
            // A host checks in this way whether to ring its doorbell register.
            if cell.armed.swap(false, Ordering::Relaxed) {
                handle.waker().wake();
            }
            assert_eq!(answers.recv_timeout(TIMEOUT), Ok(n));
        }
    });
}

#[test]
fn wake_up_for_message_is_never_lost() {
    beside(|handle| {
        let (send, receive) = channel();
        let answers = add(handle, Source::Channel(receive));
        for n in 1..=ROUNDS {
            send.send(n).unwrap();
            handle.waker().wake_by_ref();
            assert_eq!(answers.recv_timeout(TIMEOUT), Ok(n));
        }
    });
}

#[test]
fn wake_up_for_descriptor_is_never_lost() {
    beside(|handle| {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let answers = add(handle, Source::Descriptor(fd.try_clone().unwrap()));
        for n in 1..=ROUNDS {
            rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
            assert_eq!(answers.recv_timeout(TIMEOUT), Ok(n));
        }
    });
}

/// One of a hundred front-ends is busy: it is served, and the idle ones remain reachable.
#[test]
fn busy_front_end_leaves_turns_to_others() {
    beside(|handle| {
        let cells: Vec<_> = (0..100).map(|_| Arc::<Cell>::default()).collect();
        let sources = cells.iter().map(|cell| Source::Memory(cell.clone()));
        let answers: Vec<_> = sources.map(|source| add(handle, source)).collect();
        let stop = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (flood, flooded) = channel();
                let busy = add(handle, Source::Channel(flooded));
                let mut n = 0;
                while stop.load(Ordering::Relaxed) == 0 {
                    n += 1;
                    flood.send(n).unwrap();
                    handle.waker().wake_by_ref();
                    assert_eq!(busy.recv_timeout(TIMEOUT), Ok(n));
                }
            });
            for (cell, answers) in cells.iter().zip(&answers) {
                cell.value.store(5, Ordering::Release);
                handle.waker().wake_by_ref();
                assert_eq!(answers.recv_timeout(TIMEOUT), Ok(5));
            }
            stop.store(1, Ordering::Relaxed);
        });
    });
}

fn worker() -> Worker<Echo> {
    let io = Rc::new(Io::new(IoOptions::default()));
    Worker::new(io, &Handle::new().unwrap(), Options::default()).unwrap()
}

fn idle(worker: &mut Worker<Echo>) -> u16 {
    let cell = Arc::<Cell>::default();
    let added = worker.add(|context| {
        Ok::<_, std::convert::Infallible>(Echo::new(Source::Memory(cell), context).0)
    });
    added.unwrap().unwrap()
}

#[test]
fn removed_front_end_is_closed_when_durable_and_frees_number() {
    let mut worker = worker();
    assert_eq!([idle(&mut worker), idle(&mut worker)], [0, 1]);
    worker.front_mut(0).unwrap().fails = true;
    let told = Rc::new(RefCell::new(None));
    let tell = told.clone();
    assert!(worker.remove(0, move |_, result| *tell.borrow_mut() = Some(result)));
    assert!(!worker.remove(0, |_, _| ()), "it is being removed");
    assert!(!worker.remove(2, |_, _| ()), "there is none");
    assert_eq!(*told.borrow(), None);
    worker.step();
    assert_eq!(*told.borrow(), Some(Err(NotDurable)));
    assert!(worker.front(0).is_none() && worker.front(1).is_some());
    assert_eq!(idle(&mut worker), 0);
}

#[test]
fn ended_front_end_is_removed() {
    let mut worker = worker();
    idle(&mut worker);
    worker.front_mut(0).unwrap().ended.set(true);
    worker.poll_once().unwrap();
    worker.poll_once().unwrap();
    assert!(worker.front(0).is_none());
}

#[test]
fn end_reports_front_end_close_failure() {
    let mut worker = worker();
    idle(&mut worker);
    idle(&mut worker);
    worker.front_mut(1).unwrap().fails = true;
    worker.stop();
    assert!(matches!(
        worker.run(),
        Err(worker::Error::Frontend(NotDurable))
    ));
    assert_eq!(worker.fronts().count(), 0);
}

/// A duplicate keeps the removed front-end's descriptor in the epoll set: its events have no
/// recipient.
#[test]
fn events_of_removed_front_end_do_not_reach_next() {
    let mut worker = worker();
    let fd = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
    let source = Source::Descriptor(fd.try_clone().unwrap());
    worker
        .add(|context| Ok::<_, std::convert::Infallible>(Echo::new(source, context).0))
        .unwrap();
    assert!(worker.remove(0, |_, _| ()));
    worker.step();
    assert_eq!(idle(&mut worker), 0);
    // The `ready` of the tests wants a descriptor's token, and would be called with one.
    worker.poll_once().unwrap();
    assert!(!worker.front(0).unwrap().ready);
}

#[test]
fn jobs_run_in_order_and_are_dropped_with_worker() {
    let handle = Handle::new().unwrap();
    let io = Rc::new(Io::new(IoOptions::default()));
    let mut worker = Worker::<Echo>::new(io, &handle, Options::default()).unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    for n in 0..3 {
        let order = order.clone();
        handle.post(move |_| order.lock().unwrap().push(n));
    }
    assert!(worker.step());
    assert_eq!(*order.lock().unwrap(), [0, 1, 2]);
    let (tell, told) = channel::<()>();
    handle.post(move |_| drop(tell));
    drop(worker);
    assert!(told.recv().is_err(), "dropped, not run");
    let (tell, told) = channel::<()>();
    handle.post(move |_| tell.send(()).unwrap());
    assert!(told.recv_timeout(TIMEOUT).is_err());
}

/// Completions are passed to the front-end with the number in their tag.
struct Reader {
    queue: OpenQueue,
    owner: u16,
    submit: u64,
    got: Vec<u64>,
}

impl Frontend for Reader {
    type Error = std::convert::Infallible;

    fn poll(&mut self, _now: Instant, _budget: &mut Budget) -> bool {
        let Some(left) = self.submit.checked_sub(1) else {
            return false;
        };
        self.submit = left;
        let tag = u64::from(self.owner) << 48 | left;
        let request = Request::flush(tag);
        if let Some(done) = self.queue.submit(request) {
            self.complete(done);
        }
        true
    }

    fn complete(&mut self, completion: Completion) {
        assert_eq!((completion.tag >> 48) as u16, self.owner);
        self.got.push(completion.tag as u16 as u64);
    }

    fn poll_volumes(&mut self, out: &mut Vec<Completion>) {
        self.queue.poll(&mut |done| out.push(done));
    }

    fn in_flight(&self) -> usize {
        self.queue.state().in_flight
    }

    fn arm(&mut self) -> bool {
        self.submit > 0
    }

    fn flush(&mut self) {}

    fn is_drained(&self) -> bool {
        self.submit == 0 && self.queue.state().in_flight == 0
    }
}

#[test]
fn completions_of_shared_ring_reach_requester() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let url = file.path().display().to_string();
    let on_disk = volume::open_url(&url, volume::OpenOptions::default()).unwrap();
    let memory: Arc<dyn Volume> = Arc::new(MemVolume::new(1 << 20).unwrap());
    let io = Rc::new(Io::new(IoOptions::default()));
    let mut worker = Worker::new(io, &Handle::new().unwrap(), Options::default()).unwrap();
    for volume in [&on_disk, &memory, &on_disk] {
        worker
            .add(|context| {
                Ok::<_, volume::VolumeError>(Reader {
                    queue: volume.open(context.io)?,
                    owner: context.owner,
                    submit: 9,
                    got: Vec::new(),
                })
            })
            .unwrap();
    }
    worker.stop();
    let limit = Instant::now() + TIMEOUT;
    while worker.fronts().any(|(_, reader)| reader.got.len() < 9) {
        worker.step();
        assert!(Instant::now() < limit);
    }
    for (_, reader) in worker.fronts() {
        reader.got.sort_unstable();
        assert_eq!(reader.got, (0..9).collect::<Vec<_>>());
    }
    worker.run().unwrap();
}
