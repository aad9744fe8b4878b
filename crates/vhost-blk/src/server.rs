//! The loop: one thread that owns an export, its client and its io_uring. While there is work it polls; after an idle
//! window it arms the queues and sleeps in the kernel.

use crate::disk::{Disk, DiskOptions};
use crate::error::{ClientError, Error};
use crate::memory::Attach;
use crate::session::{Session, Status};
use crate::stats::Stats;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{Completion, Io, Volume};
use worker::{IdleWindow, Pace};

/// Rounds between two looks at the sockets while polling: a system call each.
const ROUNDS_PER_LOOK: u32 = 64;
/// How long the volume may take to make everything durable when the thread is asked to end.
const FLUSH_LIMIT: Duration = Duration::from_secs(60);
/// Until the front-end, whose channel was full, is told of a new size again.
const TELL_AGAIN: Duration = Duration::from_millis(100);
/// A tag that no request has.
const FLUSH_TAG: u64 = u64::MAX;

const TOKEN_STOP: u64 = 0;
const TOKEN_RING: u64 = 1;
const TOKEN_LISTENER: u64 = 2;
const TOKEN_CLIENT: u64 = 3;
const TOKEN_SIZE: u64 = 4;
const TOKEN_KICK: u64 = 16;

pub(crate) fn kick_token(queue: u64) -> u64 {
    TOKEN_KICK + queue
}

/// How a server polls.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// How long polling goes on after the last work.
    pub idle_window: IdleWindow,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            idle_window: IdleWindow::Adaptive,
        }
    }
}

/// What a server needs.
pub struct Export {
    /// The volume.
    pub volume: Arc<dyn Volume>,
    /// The thread's own. With [`volume::IoOptions::fixed_buffers`] the guest's memory is pinned for its requests.
    pub io: Io,
    /// How the guest sees it.
    pub disk: DiskOptions,
    /// How it is served.
    pub server: ServerOptions,
    /// A listening Unix socket, non-blocking. Its file belongs to the caller.
    pub listener: OwnedFd,
    /// Readable when the server is to end.
    pub stop: OwnedFd,
    /// Makes what can reach a guest's memory by itself for every connection.
    pub attach: Option<Box<dyn Fn() -> Attach>>,
}

/// Serves one export on the thread that made it.
pub struct Server {
    disk: Disk,
    options: ServerOptions,
    listener: OwnedFd,
    stop: OwnedFd,
    attach: Option<Box<dyn Fn() -> Attach>>,
    epoll: Rc<OwnedFd>,
    session: Option<Session>,
    /// The front-end has gone, but requests of it are with the volume: no other one is taken until they are over.
    leaving: Option<Session>,
    listener_watched: bool,
    ring_watched: bool,
    /// The same of completions that do not come through it.
    others_watched: bool,
    client_flags: epoll::EventFlags,
    more: bool,
    stats: Arc<Stats>,
    completions: Vec<Completion>,
    /// Readable when the volume has been resized.
    resized: Option<Arc<OwnedFd>>,
    /// When to try again to tell the front-end of the volume's size.
    tell_again: Option<Instant>,
}

fn system(call: &'static str) -> impl Fn(Errno) -> Error {
    move |errno| Error::System { call, errno }
}

impl Server {
    /// Opens the volume for this thread.
    ///
    /// # Errors
    /// [`Error::Option`] for options that do not fit each other or the volume, [`Error::Volume`], [`Error::System`].
    pub fn new(export: Export) -> Result<Server, Error> {
        let disk = Disk::open(export.volume, export.io, &export.disk)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create1"))?;
        let server = Server {
            stats: Arc::new(Stats::new(disk.shape.queues)),
            disk,
            options: export.server,
            listener: export.listener,
            stop: export.stop,
            attach: export.attach,
            epoll: Rc::new(epoll),
            session: None,
            leaving: None,
            listener_watched: true,
            ring_watched: false,
            others_watched: false,
            client_flags: epoll::EventFlags::IN,
            more: false,
            completions: Vec::with_capacity(256),
            resized: None,
            tell_again: None,
        };
        server.watch(server.stop.as_fd(), TOKEN_STOP)?;
        server.watch(server.listener.as_fd(), TOKEN_LISTENER)?;
        Ok(server)
    }

    /// Its counters.
    pub fn stats(&self) -> Arc<Stats> {
        self.stats.clone()
    }

    /// `resized`, an eventfd, becomes readable when the volume has been resized. This thread never
    /// asks the volume itself, which may take a device's time.
    ///
    /// # Errors
    /// [`Error::System`]: the descriptor cannot be waited for.
    pub fn watch_size(&mut self, resized: Arc<OwnedFd>) -> Result<(), Error> {
        self.watch(resized.as_fd(), TOKEN_SIZE)?;
        self.resized = Some(resized);
        Ok(())
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: u64) -> Result<(), Error> {
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN).map_err(system("epoll_ctl"))
    }

    /// Serves until asked to end, then answers what is in flight and makes everything durable.
    ///
    /// # Errors
    /// [`Error::System`] when the loop cannot go on, [`Error::Flush`].
    pub fn run(&mut self) -> Result<(), Error> {
        let mut pace = Pace::new(self.options.idle_window, Instant::now());
        let mut rounds = 0u32;
        loop {
            let now = Instant::now();
            let worked = self.round();
            if worked {
                pace.worked(now);
            }
            if self.tell_again.is_some_and(|at| now >= at) {
                self.tell_size();
            }
            if self.is_to_pin() {
                // Messages that have come meanwhile are answered first.
                if self.look(Some(Duration::ZERO))? {
                    break;
                }
                self.pin_next();
            } else if worked || self.must_poll() || (self.is_polled() && pace.polls(now)) {
                rounds = rounds.wrapping_add(1);
                if (self.more || rounds.is_multiple_of(ROUNDS_PER_LOOK))
                    && self.look(Some(Duration::ZERO))?
                {
                    break;
                }
                std::hint::spin_loop();
            } else if self.prepare_sleep() {
                let deadline = self
                    .tell_again
                    .into_iter()
                    .chain(self.disk.deadline())
                    .min();
                let timeout = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                if self.look(timeout)? {
                    break;
                }
                pace.slept();
            }
        }
        self.finish()
    }

    /// Looks once at everything and does what there is to do, without sleeping: for those that have a loop of their own.
    /// `true` when it is time to end, which [`Server::run`] then does.
    ///
    /// # Errors
    /// [`Error::System`] when the loop cannot go on.
    pub fn poll(&mut self) -> Result<bool, Error> {
        if self.look(Some(Duration::ZERO))? {
            return Ok(true);
        }
        let worked = self.round();
        while self.is_to_pin() && !self.more {
            self.pin_next();
        }
        if !worked {
            // Whoever polls may sleep now, with the rings armed.
            self.prepare_sleep();
        }
        Ok(false)
    }

    fn is_to_pin(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_to_pin)
    }

    /// Pins a piece of the guest's memory, unless there are messages to be answered.
    fn pin_next(&mut self) {
        if let Some(session) = &mut self.session
            && session.is_to_pin()
            && !self.more
        {
            session.memory.pin_next();
        }
    }

    /// One round: fetch and start, collect and answer.
    fn round(&mut self) -> bool {
        let mut worked = false;
        if let Some(session) = &mut self.session {
            worked |= session.fetch(&mut self.disk);
        }
        self.disk.poll(&mut self.completions);
        worked |= !self.completions.is_empty();
        for completion in self.completions.drain(..) {
            // There is no session while one is leaving.
            let session = self.session.as_mut().or(self.leaving.as_mut());
            if let Some(session) = session {
                session.complete(completion, &mut self.disk);
            }
        }
        if let Some(session) = &mut self.session {
            session.publish();
            if session.pending.is_some() {
                worked |= self.finish_pending();
            }
        }
        if self.leaving.as_ref().is_some_and(|s| !s.is_busy()) {
            self.leaving = None;
            worked = true;
            self.listen();
        }
        worked
    }

    fn finish_pending(&mut self) -> bool {
        let Some(session) = &mut self.session else {
            return false;
        };
        match session.finish_pending(&mut self.disk) {
            Ok(false) => false,
            Ok(true) => {
                // It may have sent more meanwhile.
                self.more = true;
                true
            }
            Err(error) => {
                self.let_go(Some(&error));
                true
            }
        }
    }

    /// Tells the front-end which size the volume has now.
    fn tell_size(&mut self) {
        let capacity = self.disk.capacity();
        let told = |session: &mut Session| session.announce_size(capacity);
        let told = self.session.as_mut().is_none_or(told);
        self.tell_again = (!told).then(|| Instant::now() + TELL_AGAIN);
    }

    fn must_poll(&self) -> bool {
        self.more || self.disk.must_poll() || self.session.as_ref().is_some_and(Session::must_poll)
    }

    /// Polling may find something: there are requests, or the guest may come with one at any time.
    fn is_polled(&self) -> bool {
        self.disk.in_flight() > 0 || self.session.as_ref().is_some_and(Session::is_fetching)
    }

    /// Arms everything that can wake this thread. `false` when something arrived meanwhile.
    fn prepare_sleep(&mut self) -> bool {
        let mut raced = self.session.as_mut().is_some_and(Session::arm);
        if !self.ring_watched
            && let Some(fd) = self.disk.io.event_fd()
        {
            match self.watch(fd, TOKEN_RING) {
                Ok(()) => self.ring_watched = true,
                Err(error) => {
                    tracing::warn!(%error, "the ring's completions cannot be waited for; polling");
                    raced |= self.disk.in_flight() > 0;
                }
            }
        }
        if !self.others_watched
            && let Some(fd) = self.disk.io.others_fd()
        {
            match self.watch(fd, TOKEN_RING) {
                Ok(()) => self.others_watched = true,
                Err(error) => {
                    tracing::warn!(%error, "the volume's completions cannot be waited for; polling");
                    raced |= self.disk.in_flight() > 0;
                }
            }
        }
        raced |= !self.disk.io.arm();
        !raced
    }

    /// Waits for the socket, the kicks, the ring and the end, and handles what is ready. `true` when it is time to end.
    fn look(&mut self, timeout: Option<Duration>) -> Result<bool, Error> {
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; 64];
        let timeout = timeout.map(|t| Timespec {
            tv_sec: t.as_secs() as i64,
            tv_nsec: i64::from(t.subsec_nanos()) as _,
        });
        let ready = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
            Ok((ready, _)) => ready,
            Err(Errno::INTR) => return Ok(false),
            Err(errno) => return Err(system("epoll_wait")(errno)),
        };
        let (mut connecting, mut resized) = (false, false);
        let mut client = std::mem::take(&mut self.more);
        for event in ready.iter() {
            match event.data.u64() {
                TOKEN_STOP => return Ok(true),
                TOKEN_RING => {}
                TOKEN_LISTENER => connecting = true,
                TOKEN_CLIENT => client = true,
                TOKEN_SIZE => resized = true,
                token => {
                    if let Some(session) = &self.session {
                        session.kicked(token.saturating_sub(TOKEN_KICK) as usize);
                    }
                }
            }
        }
        if resized {
            if let Some(resized) = &self.resized {
                let _ = rustix::io::read(resized, &mut [0; 8]);
            }
            self.tell_size();
        }
        if client {
            self.serve();
        }
        if connecting {
            self.accept();
        }
        Ok(false)
    }

    fn serve(&mut self) {
        let Some(session) = &mut self.session else {
            return;
        };
        match session.on_ready(&mut self.disk) {
            Ok(Status::Open) => self.rewatch(),
            Ok(Status::More) => self.more = true,
            Ok(Status::Closed) => self.let_go(None),
            Err(error) => self.let_go(Some(&error)),
        }
    }

    /// Keeps the epoll set in step with what the connection waits for. While an answer waits for requests in flight
    /// nothing is read, but a hang-up would come again and again: it is not waited for.
    fn rewatch(&mut self) {
        let Some(session) = &self.session else {
            return;
        };
        let wanted = match (session.wants_to_write(), session.pending.is_some()) {
            (true, _) => epoll::EventFlags::OUT,
            (false, false) => epoll::EventFlags::IN,
            (false, true) => epoll::EventFlags::ONESHOT,
        };
        if wanted == self.client_flags {
            return;
        }
        let data = epoll::EventData::new_u64(TOKEN_CLIENT);
        match epoll::modify(&self.epoll, session.fd(), data, wanted) {
            Ok(()) => self.client_flags = wanted,
            Err(error) => tracing::error!(%error, "epoll"),
        }
    }

    /// Ends the connection.
    fn let_go(&mut self, why: Option<&ClientError>) {
        let Some(mut session) = self.session.take() else {
            return;
        };
        self.stats.log.line(|left_out| match why {
            None => tracing::info!(left_out, "front-end disconnected"),
            Some(error) => tracing::warn!(%error, left_out, "front-end disconnected"),
        });
        let _ = epoll::delete(&self.epoll, session.fd());
        self.more = false;
        self.stats.set_connected(false);
        session.abandon();
        self.disk.reset();
        if session.is_busy() {
            self.leaving = Some(session);
            if std::mem::take(&mut self.listener_watched) {
                let _ = epoll::delete(&self.epoll, &self.listener);
            }
        }
    }

    /// Looks out for the next front-end again.
    fn listen(&mut self) {
        if self.listener_watched {
            return;
        }
        match self.watch(self.listener.as_fd(), TOKEN_LISTENER) {
            Ok(()) => self.listener_watched = true,
            Err(error) => tracing::error!(%error, "no front-end can connect any more"),
        }
    }

    fn accept(&mut self) {
        // The old client may be gone without our having noticed yet.
        let gone = self.session.as_ref().is_some_and(|session| {
            let mut fds = [PollFd::from_borrowed_fd(session.fd(), PollFlags::empty())];
            poll(&mut fds, Some(&Timespec::default())).is_ok()
                && fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
        });
        if gone {
            self.let_go(None);
        }
        if self.leaving.is_some() {
            return;
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match accept_with(&self.listener, flags) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(error) => {
                let log = &self.stats.log;
                log.line(|left_out| tracing::warn!(%error, left_out, "accept"));
                return;
            }
        };
        if self.session.is_some() {
            self.stats.log.line(|left_out| {
                tracing::warn!(
                    left_out,
                    "a second front-end was refused: this disk has one already"
                );
            });
            return;
        }
        if let Err(error) = self.watch(socket.as_fd(), TOKEN_CLIENT) {
            let log = &self.stats.log;
            log.line(|left_out| tracing::warn!(%error, left_out, "front-end"));
            return;
        }
        let log = &self.stats.log;
        log.line(|left_out| tracing::info!(left_out, "front-end connected"));
        self.stats.connections.add(1);
        self.stats.set_connected(true);
        self.client_flags = epoll::EventFlags::IN;
        let attach = self.attach.as_ref().map(|attach| attach());
        let (epoll, stats) = (self.epoll.clone(), self.stats.clone());
        self.session = Some(Session::new(socket, epoll, attach, stats, &self.disk));
    }

    /// Answers what is in flight, makes everything durable, and lets the front-end go.
    fn finish(&mut self) -> Result<(), Error> {
        if let Some(session) = &mut self.session {
            session.stop();
        }
        self.disk.end();
        let limit = Instant::now() + FLUSH_LIMIT;
        while self.disk.in_flight() > 0 {
            self.round();
            self.wait(limit)?;
        }
        self.round();
        let mut result = self.disk.flush(FLUSH_TAG).map(|done| done.result);
        while result.is_none() {
            self.disk.poll(&mut self.completions);
            result = self.completions.drain(..).next().map(|done| done.result);
            if result.is_none() {
                self.wait(limit)?;
            }
        }
        if let Some(Err(error)) = result {
            return Err(Error::Flush(error.to_string()));
        }
        self.let_go(None);
        Ok(())
    }

    fn wait(&self, limit: Instant) -> Result<(), Error> {
        if Instant::now() >= limit {
            return Err(Error::Flush(format!("not within {FLUSH_LIMIT:?}")));
        }
        std::thread::sleep(Duration::from_micros(50));
        Ok(())
    }
}
