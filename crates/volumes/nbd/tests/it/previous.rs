//! A connection that outlives its process: what was sent on it is over before anything is sent on
//! another one.

use crate::server::{Answer, Server, Setup};
use dma::{Buffer, SegmentList};
use nbd::protocol::{Command, negotiate};
use nbd::{NbdOptions, NbdServer as Named, NbdVolume};
use remote::{ConnectionGuard, ConnectionKeeper, PreviousError, end_previous};
use std::io::Write;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use volume::{Io, Op, Request, Volume};

/// Only a hang takes so long.
const BOUND: Duration = Duration::from_secs(60);
const LEN: usize = 4096;
const OLD: u8 = 0xaa;
const NEW: u8 = 0xbb;

/// A server that holds the first request back.
fn slow_server() -> Server {
    Server::new(Setup {
        answer: Box::new(|number, _| match number {
            0 => Answer::Held,
            _ => Answer::Right,
        }),
        ..Setup::default()
    })
}

/// What a process has left behind that sent a write and was killed.
fn left_behind(server: &Server) -> OwnedFd {
    let mut stream = UnixStream::connect(&server.path).unwrap();
    negotiate(&mut stream, "").unwrap();
    let write = Command::Write { fua: false }.header(7, 0, LEN as u32);
    stream.write_all(&write).unwrap();
    stream.write_all(&[OLD; LEN]).unwrap();
    let began = Instant::now();
    while server.count(|state| &state.requests) == 0 {
        assert!(began.elapsed() < BOUND, "the write has not come");
        std::thread::yield_now();
    }
    stream.into()
}

fn write(server: &Server, byte: u8) {
    let named = Named::unix("/", server.path.to_str().unwrap()).unwrap();
    let volume = NbdVolume::open(named, NbdOptions::default()).unwrap();
    let io = Io::new(Default::default());
    let mut queue = volume.open(&io).unwrap();
    let mut buffer = Buffer::new(LEN);
    buffer.fill(byte);
    let data = SegmentList::owned(buffer);
    let request = Request::transfer(1, Op::Write { fua: false }, 0, data);
    let mut done = queue.submit(request);
    let began = Instant::now();
    while done.is_none() {
        assert!(began.elapsed() < BOUND, "it is not written");
        io.flush();
        io.poll(&mut |_| {});
        queue.poll(&mut |completion| done = Some(completion));
    }
    assert_eq!(done.unwrap().result, Ok(()));
}

#[test]
fn old_write_does_not_overtake_newer() {
    let server = slow_server();
    let left = left_behind(&server);
    let (written, is_written) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            end_previous(&server.url(), vec![left], BOUND).unwrap();
            write(&server, NEW);
            written.send(()).unwrap();
        });
        // Until it waits for the old connection, or has overtaken it.
        let began = Instant::now();
        let overtaken = loop {
            assert!(began.elapsed() < BOUND, "neither");
            if is_written.try_recv().is_ok() {
                break true;
            }
            if server.has_client_stopped(0) {
                break false;
            }
            std::thread::yield_now();
        };
        let before = server.state.data.lock().unwrap()[..LEN].to_vec();
        server.release();
        if !overtaken {
            assert_eq!(before, [0; LEN]);
            is_written.recv_timeout(BOUND).unwrap();
        }
        // The old one is carried out, whenever that is.
        let began = Instant::now();
        while server.count(|state| &state.requests) < 2 || server.is_held() {
            assert!(began.elapsed() < BOUND);
            std::thread::yield_now();
        }
        assert!(!overtaken, "the new write has overtaken the old one");
        let now = server.state.data.lock().unwrap()[..LEN].to_vec();
        assert_eq!(now, [NEW; LEN], "the old write is on top of the new one");
    });
}

#[test]
fn wait_for_previous_connection_times_out() {
    let server = slow_server();
    let left = left_behind(&server);
    let error = end_previous("nbd://test", vec![left], Duration::from_millis(300)).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, PreviousError::Open { open: 1, .. }));
    assert!(
        text.contains("nbd://test") && text.contains("--previous-timeout"),
        "{text}"
    );
}

/// Keeps a descriptor of each connection until it is over.
#[derive(Debug, Default, Clone)]
struct Keeper(Arc<Mutex<Vec<(u32, OwnedFd)>>>);

struct PreviousOwner(Keeper, u32);

impl Drop for PreviousOwner {
    fn drop(&mut self) {
        self.0
            .0
            .lock()
            .unwrap()
            .retain(|(number, _)| *number != self.1);
    }
}

impl ConnectionKeeper for Keeper {
    fn end_previous(&self, server: &str) -> Result<(), PreviousError> {
        let left = std::mem::take(&mut *self.0.lock().unwrap());
        let left = left.into_iter().map(|(_, fd)| fd).collect();
        end_previous(server, left, BOUND)
    }

    fn keep(&self, server: &str, connection: BorrowedFd<'_>) -> Option<ConnectionGuard> {
        assert!(server.starts_with("nbd+unix://"), "{server}");
        let mut all = self.0.lock().unwrap();
        let number = all.last().map_or(0, |(number, _)| number + 1);
        all.push((number, connection.try_clone_to_owned().unwrap()));
        Some(Box::new(PreviousOwner(self.clone(), number)))
    }
}

/// The connections of a process are kept before anything is sent on them; the next owner can end
/// the requests that the process has left behind.
#[test]
fn keeper_holds_every_connection_until_closed() {
    let server = slow_server();
    let keeper = Keeper::default();
    let named = Named::unix("/", server.path.to_str().unwrap()).unwrap();
    let kept = Arc::new(keeper.clone());
    let volume = NbdVolume::open_kept(named, NbdOptions::default(), Some(kept)).unwrap();
    let count = || keeper.0.lock().unwrap().len();
    assert_eq!(count(), 1);
    let io = Io::new(Default::default());
    let mut queue = volume.open(&io).unwrap();
    let mut buffer = Buffer::new(LEN);
    buffer.fill(OLD);
    let write = Op::Write { fua: false };
    assert!(
        queue
            .start(1, write, 0, SegmentList::owned(buffer))
            .is_none()
    );
    let began = Instant::now();
    while server.count(|state| &state.requests) == 0 {
        assert!(began.elapsed() < BOUND, "the write has not come");
        io.flush();
        io.poll(&mut |_| {});
        queue.poll(&mut |_| panic!("it is held"));
    }
    // As if the process had died: its requests have ended before anything else is sent.
    let left = keeper.0.lock().unwrap()[0].1.try_clone().unwrap();
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| end_previous(&server.url(), vec![left], BOUND));
        while !server.has_client_stopped(0) {
            assert!(began.elapsed() < BOUND);
            std::thread::yield_now();
        }
        server.release();
        ended.join().unwrap().unwrap();
    });
    assert_eq!(server.state.data.lock().unwrap()[..LEN], [OLD; LEN]);
    drop((queue, volume));
    drop(io);
    let began = Instant::now();
    while count() > 0 {
        assert!(began.elapsed() < BOUND, "it is kept although it is over");
        std::thread::yield_now();
    }
}

#[test]
fn closed_previous_connection_is_not_waited_for() {
    let server = slow_server();
    let left = left_behind(&server);
    server.stop();
    end_previous("nbd://test", vec![left], BOUND).unwrap();
    end_previous("nbd://test", Vec::new(), Duration::ZERO).unwrap();
}

#[test]
fn descriptor_other_than_socket_is_refused() {
    let file = tempfile::tempfile().unwrap();
    let error = end_previous("nbd://test", vec![file.into()], BOUND).unwrap_err();
    assert!(
        matches!(error, PreviousError::NoConnection { .. }),
        "{error}"
    );
}
