//! The thread that answers on the control socket.
//!
//! It serves its clients at the same time and waits for none of them: each has so long for its
//! request and for taking our answer, and where there are too many the one that has been asking for
//! longest is dropped. What a device is to do takes its time, in a thread of its own. Descriptors
//! that clients send are left to the receiver process, with the sockets that they are in.

use super::peer::{Peer, Progress};
use super::requests::{Handled, change_device, handle};
use super::{Reply, TIMEOUT};
use crate::devices::DeviceChange;
use crate::registry::Registry;
use anyhow::{Context, Result};
use probes::LogLimit;
use receive::{Intake, Wanted};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use vfio_user::Listener;
use worker::{ConnectPace, ConnectRate};

/// Clients at a time.
const MAX_PEERS: usize = 32;
/// No descriptors.
const WANTED: Wanted = Wanted {
    max_fds: 0,
    streams: false,
};
/// Clients for which devices do something at a time: each is a thread.
const MAX_CHANGES: usize = 8;

/// How long the end waits for the thread. Without it the socket's file stays, and the next server
/// replaces it.
const END_LIMIT: Duration = Duration::from_secs(1);

/// The control socket, whose clients wait until they are answered.
pub struct ControlSocket(Server);

/// The control socket and its thread; both end, and the socket's file goes, when this is dropped.
pub struct ControlServer {
    stop: OwnedFd,
    /// Closed by the thread when it has ended.
    ended: Receiver<()>,
}

impl ControlSocket {
    /// Listens at `path`.
    pub fn listen(
        path: &Path,
        registry: &Registry,
        rate: ConnectRate,
        receiver: &receive::Receiver,
    ) -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let (reply, replies) = channel();
        let listener = Listener::bind(path)?;
        let mut intake = Intake::new(receiver, WANTED);
        intake.connect(listener.as_fd()).context("control socket")?;
        Ok(Self(Server {
            listener,
            intake,
            registry: registry.clone(),
            stop: eventfd(0, flags).context("eventfd")?,
            wake: Arc::new(eventfd(0, flags).context("eventfd")?),
            reply,
            replies,
            peers: Vec::new(),
            next: 0,
            changes: 0,
            pace: ConnectPace::new(rate),
            not_before: None,
            log: LogLimit::default(),
        }))
    }

    /// Starts the thread that answers.
    pub fn start(self) -> Result<ControlServer> {
        let Self(mut server) = self;
        let stop = server.stop.try_clone().context("eventfd")?;
        let (end, ended) = channel::<()>();
        let builder = std::thread::Builder::new().name("control".into());
        let run = move || {
            server.run();
            drop(server);
            drop(end);
        };
        builder.spawn(run).context("control thread")?;
        Ok(ControlServer { stop, ended })
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        let _ = self.ended.recv_timeout(END_LIMIT);
    }
}

/// A client's number: its place in the list changes.
type Number = u64;

struct Server {
    listener: Listener,
    /// How clients' sockets are read. Behind the listening socket, which is to be closed first: the
    /// last to close it also closes what waits to be accepted.
    intake: Intake,
    registry: Registry,
    /// Readable when it is time to end.
    stop: OwnedFd,
    /// Readable when a thread has left a reply.
    wake: Arc<OwnedFd>,
    reply: Sender<(Number, Reply)>,
    replies: Receiver<(Number, Reply)>,
    /// The oldest first.
    peers: Vec<(Number, Peer)>,
    next: Number,
    /// Threads at work.
    changes: usize,
    pace: ConnectPace,
    /// The next client is not looked for before.
    not_before: Option<Instant>,
    log: LogLimit,
}

/// What a wait has found.
struct Found {
    stop: bool,
    wake: bool,
    listener: bool,
    /// The receiver process says something.
    intake: bool,
    /// Clients whose sockets are ready.
    peers: Vec<Number>,
}

impl Server {
    fn run(&mut self) {
        loop {
            let found = match self.wait() {
                Ok(found) => found,
                Err(Errno::INTR) => continue,
                Err(error) => {
                    // Out of memory, most likely: not a reason to spin.
                    self.log
                        .line(|left_out| tracing::warn!(%error, left_out, "control socket"));
                    std::thread::sleep(TIMEOUT);
                    continue;
                }
            };
            if found.stop {
                return;
            }
            if found.wake {
                self.pass_replies();
            }
            if found.intake {
                self.intake.ready();
            }
            self.go_on(&found.peers);
            if found.listener {
                self.accept();
            }
        }
    }

    /// Waits until there is something to do. Clients whose time is up are dropped.
    fn wait(&mut self) -> Result<Found, Errno> {
        let now = Instant::now();
        let over = |peer: &Peer| peer.deadline().is_some_and(|deadline| deadline <= now);
        self.peers.retain(|(_, peer)| !over(peer));
        if self.not_before.is_some_and(|until| until <= now) {
            self.not_before = None;
        }
        if self.intake.deadline().is_some_and(|until| until <= now) {
            // The receiver process has ended; it is tried again later if there is none yet.
            let _ = self.intake.connect(self.listener.as_fd());
        }
        let deadlines = self.peers.iter().filter_map(|(_, peer)| peer.deadline());
        let others = [self.not_before, self.intake.deadline()];
        let until = deadlines.chain(others.into_iter().flatten()).min();
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(now);
            Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()) as _,
            }
        });
        let listening = self.not_before.is_none() && !self.intake.is_crowded();
        let interest = match listening {
            true => PollFlags::IN,
            false => PollFlags::empty(),
        };
        let mut fds = vec![
            PollFd::new(&self.stop, PollFlags::IN),
            PollFd::new(&*self.wake, PollFlags::IN),
            PollFd::new(&self.listener, interest),
        ];
        let peers = self.peers.iter();
        fds.extend(peers.map(|(_, peer)| PollFd::new(peer, peer.interest())));
        let intake = self.intake.fd();
        fds.extend(intake.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        poll(&mut fds, timeout.as_ref())?;
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let mut next = || ready.next().unwrap_or(false);
        let (stop, wake, listener) = (next(), next(), next());
        let peers = self.peers.iter().zip(&mut ready);
        let peers = peers.filter_map(|((number, _), ready)| ready.then_some(*number));
        Ok(Found {
            stop,
            wake,
            listener: listener && listening,
            peers: peers.collect(),
            intake: ready.next().unwrap_or(false),
        })
    }

    /// Takes a client in, and looks whether its request is there already.
    fn accept(&mut self) {
        let now = Instant::now();
        let next = self.pace.next(now);
        if next > now {
            self.not_before = Some(next);
            return;
        }
        let socket = match self.listener.accept() {
            Ok(Some(socket)) => socket,
            Ok(None) => return,
            Err(error) => {
                // Out of descriptors, most likely: not a reason to spin.
                self.log
                    .line(|left_out| tracing::warn!(%error, left_out, "control socket"));
                self.not_before = Some(now + TIMEOUT);
                return;
            }
        };
        self.pace.take(now);
        if self.peers.len() >= MAX_PEERS {
            // Who sends a request at once is answered at once: these have not.
            let slowest = self.peers.iter().position(|(_, peer)| peer.is_asking());
            self.peers.remove(slowest.unwrap_or(0));
        }
        let mut peer = Peer::new(self.intake.admit_plain(socket), now);
        let progress = peer.go_on();
        if let Some(peer) = self.after(self.next, peer, progress) {
            self.peers.push((self.next, peer));
        }
        self.next = self.next.wrapping_add(1);
    }

    /// Goes on with clients whose sockets are ready.
    fn go_on(&mut self, ready: &[Number]) {
        for number in ready {
            // A reply that was passed on may have ended it.
            let Some(at) = self.peers.iter().position(|(of, _)| of == number) else {
                continue;
            };
            let (number, mut peer) = self.peers.remove(at);
            let progress = peer.go_on();
            if let Some(peer) = self.after(number, peer, progress) {
                self.peers.insert(at, (number, peer));
            }
        }
    }

    /// What follows from a look at a client's socket: the client, unless it is over with it.
    fn after(&mut self, number: Number, mut peer: Peer, progress: Progress) -> Option<Peer> {
        let line = match progress {
            Progress::Blocked => return Some(peer),
            Progress::Over => return None,
            Progress::Asked(line) => line,
        };
        let reply = match handle(&line, &self.registry) {
            Handled::Answered(reply) => reply,
            Handled::Device(change) => match self.change(number, change) {
                Ok(()) => {
                    peer.wait();
                    return Some(peer);
                }
                Err(why) => Reply::Error(why),
            },
        };
        match peer.answer(&reply, Instant::now()) {
            Progress::Over => None,
            Progress::Blocked | Progress::Asked(_) => Some(peer),
        }
    }

    /// Has a thread do what a device is to do.
    fn change(&mut self, number: Number, change: DeviceChange) -> Result<(), String> {
        if self.changes >= MAX_CHANGES {
            return Err(format!(
                "{MAX_CHANGES} devices are busy with earlier requests"
            ));
        }
        let (registry, reply) = (self.registry.clone(), self.reply.clone());
        let wake = self.wake.clone();
        let work = move || {
            let _ = reply.send((number, change_device(&registry, &change)));
            let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
        };
        let builder = std::thread::Builder::new().name("device".into());
        builder
            .spawn(work)
            .map_err(|error| format!("thread: {error}"))?;
        self.changes += 1;
        Ok(())
    }

    /// Threads have left replies: their clients are answered, if they are still there.
    fn pass_replies(&mut self) {
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        while let Ok((number, reply)) = self.replies.try_recv() {
            self.changes = self.changes.saturating_sub(1);
            let Some(at) = self.peers.iter().position(|(of, _)| *of == number) else {
                continue;
            };
            let (_, mut peer) = self.peers.remove(at);
            if peer.answer(&reply, Instant::now()) == Progress::Blocked {
                self.peers.insert(at, (number, peer));
            }
        }
    }
}
