//! Worker front-end of an export: its client, its queues and its volume.

use crate::disk::{Disk, DiskOptions, MAX_QUEUES, is_flush};
use crate::error::{ClientError, Error};
use crate::memory::{Attach, GuestMemory};
use crate::session::{Session, SessionStatus};
use crate::stats::Stats;
use crate::wire::MAX_FDS;
use dma::{MemoryCache, MemoryLimits};
use receive::{AcceptedDescriptors, Intake, Receiver};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::UCred;
use rustix::net::sockopt::socket_peercred;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};
use sync::readiness;
use tracing::Span;
use volume::{Budget, Change, Completion, PinPace, Volume};
use worker::{Acceptor, ConnectRate, Context, Descriptors, Frontend, Interest};

/// Pause before a front-end with a full channel is notified of a new size again.
const TELL_AGAIN: Duration = Duration::from_millis(100);

const TOKEN_LISTENER: u32 = 0;
const TOKEN_CLIENT: u32 = 1;
const TOKEN_SIZE: u32 = 2;
/// epoll token of the connection to the receiver process.
const TOKEN_INTAKE: u32 = 3;
const TOKEN_KICK: u32 = 16;

/// Descriptors that a front-end may send: memory files, eventfds, and a channel for the back-end's
/// requests.
const WANTED: AcceptedDescriptors = AcceptedDescriptors {
    max_fds: MAX_FDS as u8,
    streams: true,
};

/// Returns the epoll token of the eventfd by which the guest kicks `queue`, one of at most 256.
pub(crate) fn kick_token(queue: u8) -> u32 {
    TOKEN_KICK + u32::from(queue)
}

/// Configuration of a vhost-user-blk export.
pub struct Export {
    /// Volume that is exported as a virtio block device.
    pub volume: Arc<dyn Volume>,
    /// Properties of the virtio block device that the guest sees.
    pub disk: DiskOptions,
    /// Maximum number of requests outstanding at the volume, at least 1.
    pub max_in_flight: usize,
    /// Limits of the memory files of each front-end.
    pub memory: MemoryLimits,
    /// Listening Unix socket in non-blocking mode. The caller removes its file.
    pub listener: OwnedFd,
    /// Maximum rate of connections of front-ends.
    pub connects: ConnectRate,
    /// Method of receiving front-ends' descriptors ([`intake`]). `None` receives them in place:
    /// front-ends are then trusted to send none that blocks on `close`.
    pub intake: Option<Intake>,
    /// Creates, for every connection, the hook for volumes that access guest memory by themselves.
    pub attach: Option<Box<dyn Fn() -> Attach>>,
    /// An eventfd that becomes readable when the volume has been resized. The worker's thread never
    /// queries the volume itself, which may take a device's time.
    pub resized: Option<Arc<OwnedFd>>,
    /// Span of the export's log lines, since the worker's thread serves several front-ends.
    pub span: Span,
}

/// Phases of an export from serving to its end.
enum BackendPhase {
    Serving,
    /// The export fetches no requests; earlier ones are outstanding at the volume.
    Draining,
    /// All requests have ended; the final flush is outstanding at the volume.
    Flushing,
    /// The final flush has completed, with this result.
    Flushed(Result<(), Error>),
}

/// Export on the worker that made it: the back-end of the protocol, a front-end of the worker.
pub struct Backend {
    disk: Disk,
    /// Cache without files, from which that of each front-end is made.
    memories: MemoryCache,
    acceptor: Acceptor<OwnedFd>,
    /// Reader of front-ends' sockets. It follows the listening socket, which must be closed first:
    /// the last owner to close it also closes connections that wait to be accepted.
    intake: Intake,
    attach: Option<Box<dyn Fn() -> Attach>>,
    descriptors: Descriptors,
    waker: Waker,
    session: Option<Session>,
    /// The front-end has disconnected with requests outstanding at the volume; the next one waits
    /// for them.
    leaving: Option<Session>,
    client_interest: Interest,
    more: bool,
    /// Whether front-ends have to wait ([`Backend::withhold`]).
    withheld: bool,
    stats: Arc<Stats>,
    /// Eventfd that becomes readable when the volume was resized.
    resized: Option<Arc<OwnedFd>>,
    /// Time of the next attempt to tell the front-end the volume's size, if one has failed.
    tell_again: Option<Instant>,
    end: BackendPhase,
}

fn system(call: &'static str) -> impl Fn(Errno) -> Error {
    move |errno| Error::System { call, errno }
}

/// Has a process receive the descriptors of an export's front-ends. The intake may be connected to
/// the listening socket ([`Intake::connect`]) before the export is created.
pub fn intake(receiver: &Receiver) -> Intake {
    Intake::new(receiver, WANTED).ending_with_process()
}

impl Backend {
    /// Opens the volume for the worker's thread.
    ///
    /// # Errors
    /// [`Error::Option`] for options that conflict with each other or the volume. [`Error::Volume`]
    /// when the volume cannot be opened, [`Error::System`] when a system call fails.
    pub fn new(export: Export, context: &Context<'_>) -> Result<Backend, Error> {
        let (io, owner) = (context.io.clone(), context.owner);
        let in_place = || Intake::in_place(MAX_FDS);
        let intake = export.intake.unwrap_or_else(in_place);
        eventfd::prepare()?;
        let acceptor = Acceptor::new(
            export.listener,
            context.descriptors.clone(),
            TOKEN_LISTENER,
            export.connects,
        );
        let acceptor = acceptor.map_err(system("epoll_ctl"))?;
        let queues = export.disk.queues.min(MAX_QUEUES);
        let stats = Stats::new(queues, export.span, acceptor.stats());
        let stats = Arc::new(stats);
        let options = (&export.disk, &stats, &context.waker);
        let disk = Disk::open(export.volume, io, owner, export.max_in_flight, options)?;
        let mut backend = Backend {
            intake,
            stats,
            disk,
            memories: MemoryCache::with_limits(export.memory),
            acceptor,
            attach: export.attach,
            descriptors: context.descriptors.clone(),
            waker: context.waker.clone(),
            session: None,
            leaving: None,
            client_interest: Interest::Readable,
            more: false,
            withheld: false,
            resized: export.resized,
            tell_again: None,
            end: BackendPhase::Serving,
        };
        let listener = backend.acceptor.listener().as_fd();
        backend
            .intake
            .connect(listener)
            .map_err(system("sendmsg"))?;
        if let Some(fd) = backend.intake.fd() {
            let added = backend
                .descriptors
                .add(fd, TOKEN_INTAKE, Interest::Readable);
            added.map_err(system("epoll_ctl"))?;
        }
        if let Some(resized) = &backend.resized {
            let watched = backend
                .descriptors
                .add(resized, TOKEN_SIZE, Interest::Readable);
            watched.map_err(system("epoll_ctl"))?;
        }
        Ok(backend)
    }

    /// Returns the parts that may be closed on another thread, in this order: the listening socket,
    /// and the reader of front-ends' sockets.
    pub fn into_sockets(self) -> (OwnedFd, Intake) {
        (self.acceptor.into_listener(), self.intake)
    }

    /// Returns the counters of the export.
    pub fn stats(&self) -> Arc<Stats> {
        self.stats.clone()
    }

    /// Returns the session that owns the outstanding requests. There is no current session while an
    /// old one is leaving.
    fn owner_of_requests(&mut self) -> (Option<&mut Session>, &mut Disk) {
        let session = self.session.as_mut().or(self.leaving.as_mut());
        (session, &mut self.disk)
    }

    /// Starts the final flush, once no request is outstanding. Returns whether it was started.
    fn flush_everything(&mut self) -> bool {
        let busy = self.disk.in_flight() > 0 || !self.disk.has_room();
        if !matches!(self.end, BackendPhase::Draining) || busy {
            return false;
        }
        self.end = match self.disk.flush() {
            None => BackendPhase::Flushing,
            Some(completion) => BackendPhase::flushed(completion),
        };
        true
    }

    fn finish_pending(&mut self) -> bool {
        let Some(session) = &mut self.session else {
            return false;
        };
        match session.finish_pending(&mut self.disk) {
            Ok(false) => false,
            Ok(true) => {
                // The client may have sent more meanwhile.
                self.more = true;
                true
            }
            Err(error) => {
                self.disconnect(Some(&error));
                true
            }
        }
    }

    /// Tells the front-end the present size of the volume.
    fn tell_size(&mut self) {
        let capacity = self.disk.capacity();
        let told = |session: &mut Session| session.announce_size(capacity);
        let told = self.session.as_mut().is_none_or(told);
        self.tell_again = (!told).then(|| Instant::now() + TELL_AGAIN);
    }

    fn serve(&mut self) {
        let Some(session) = &mut self.session else {
            return;
        };
        match session.on_ready(&mut self.disk) {
            Ok(SessionStatus::Open) => self.rewatch(),
            Ok(SessionStatus::More) => self.more = true,
            Ok(SessionStatus::Closed) => self.disconnect(None),
            Err(error) => self.disconnect(Some(&error)),
        }
    }

    /// Keeps the epoll set in step with the needs of the connection. The socket is not read while
    /// an answer waits for outstanding requests. A hang-up would then be reported again and again,
    /// so it is watched for one event only.
    fn rewatch(&mut self) {
        let Some(session) = &self.session else {
            return;
        };
        let waits = session.pending.is_some() || session.is_receiving();
        let wanted = match (session.wants_to_write(), waits) {
            (true, _) if session.is_crowded() => Interest::HangUp,
            (true, _) => Interest::Writable,
            (false, false) => Interest::Readable,
            (false, true) => Interest::HangUp,
        };
        if wanted == self.client_interest {
            return;
        }
        match self.descriptors.modify(session.fd(), TOKEN_CLIENT, wanted) {
            Ok(()) => self.client_interest = wanted,
            Err(error) => {
                let log = &self.stats.log;
                log.line(
                    "epoll",
                    |left_out| tracing::error!(%error, left_out, "epoll"),
                );
            }
        }
    }

    /// Returns process, user and group of the front-end at the time of its connect.
    pub fn peer(&self) -> Option<UCred> {
        let session = self.session.as_ref()?;
        socket_peercred(session.fd()).ok()
    }

    /// Ends the connection.
    fn disconnect(&mut self, why: Option<&ClientError>) {
        let Some(mut session) = self.session.take() else {
            return;
        };
        self.stats.log.line("disconnected", |left_out| match why {
            None => tracing::info!(left_out, "front-end disconnected"),
            Some(error) => tracing::warn!(%error, left_out, "front-end disconnected"),
        });
        let _ = self.descriptors.remove(session.fd());
        self.more = false;
        self.stats.set_connected(false);
        session.abandon();
        self.disk.reset();
        if session.is_busy() {
            self.leaving = Some(session);
            self.acceptor.close();
        }
    }

    /// Returns the time at which a request that waits for the release of the volume is answered.
    fn release_deadline(&self) -> Option<Instant> {
        let waits = self.session.as_ref().is_some_and(|s| s.pending.is_some());
        self.disk.ownership.deadline().filter(|_| waits)
    }

    /// Hands back the volume of an incoming disk that no front-end uses any more.
    fn release_idle(&mut self) {
        if self.session.is_none() && self.leaving.is_none() && self.disk.ownership.is_idle() {
            self.disk.release();
        }
    }

    /// Continues when the thread that takes or releases the volume's lock has a result.
    fn advance_ownership(&mut self) -> bool {
        let Some(change) = self.disk.ownership.advance() else {
            return false;
        };
        let log = &self.stats.log;
        let result = match change {
            Change::Taken => {
                log.line("taken", |left_out| {
                    tracing::info!(left_out, "the volume was taken over")
                });
                self.tell_size();
                let (session, disk) = (self.session.as_mut(), &mut self.disk);
                session.map_or(Ok(()), |session| session.begin_all(disk))
            }
            Change::Released => {
                log.line("released", |left_out| {
                    tracing::info!(left_out, "the volume was released for another process")
                });
                Ok(())
            }
            Change::Refused(why) => Err(ClientError::Volume(why)),
        };
        if let Err(error) = result {
            self.disconnect(Some(&error));
        }
        true
    }

    /// Watches the listening socket again, if a front-end may connect.
    fn listen(&mut self) {
        let receiving = self.session.as_ref().is_some_and(Session::is_receiving);
        let closed =
            self.withheld || self.leaving.is_some() || self.intake.is_crowded() || receiving;
        if closed {
            return;
        }
        let opened = self.acceptor.open(Instant::now());
        self.say_closed(opened);
    }

    fn say_closed(&self, result: Result<(), Errno>) {
        if let Err(error) = result {
            let log = &self.stats.accept_log;
            log.line(|left_out| tracing::error!(%error, left_out, "no front-end can connect"));
        }
    }

    /// Handles a message of the receiver process.
    fn intake_ready(&mut self) {
        self.intake.ready();
        if self.session.as_ref().is_some_and(Session::is_receiving) {
            self.serve();
        }
        self.listen();
    }

    /// Reconnects to the receiver process if necessary, and checks its time limit.
    fn check_intake(&mut self, now: Instant) {
        if self.intake.deadline().is_some_and(|at| now >= at)
            && let Ok(true) = self.intake.connect(self.acceptor.listener().as_fd())
            && let Some(fd) = self.intake.fd()
        {
            let added = self.descriptors.add(fd, TOKEN_INTAKE, Interest::Readable);
            if let Err(error) = added {
                let log = &self.stats.log;
                log.line(
                    "epoll",
                    |left_out| tracing::error!(%error, left_out, "epoll"),
                );
            }
            self.listen();
        }
        let deadline = self.session.as_ref().and_then(Session::deadline);
        if deadline.is_some_and(|at| now >= at) {
            self.serve();
            self.listen();
        }
    }

    /// Keeps front-ends from connecting, until [`Backend::admit_clients`]. `false`: there is one,
    /// requests of one are outstanding, or another process may get the volume.
    pub fn withhold(&mut self) -> bool {
        let is_used = self.session.is_some() || self.leaving.is_some();
        if is_used || !self.disk.ownership.is_kept() {
            return false;
        }
        self.withheld = true;
        self.acceptor.close();
        true
    }

    /// Lets front-ends connect again; one may be waiting.
    pub fn admit_clients(&mut self) {
        self.withheld = false;
        self.listen();
    }

    fn accept(&mut self) {
        if self.withheld {
            self.acceptor.close();
            return;
        }
        // The old client may have disconnected unnoticed: its remaining data is handled first.
        self.serve();
        let receiving = self.session.as_ref().is_some_and(Session::is_receiving);
        if self.intake.is_crowded() || receiving {
            // The receiver process must answer first.
            self.acceptor.close();
            return;
        }
        let gone = self.session.as_ref().is_some_and(|session| {
            readiness(session.fd(), PollFlags::empty()).contains(PollFlags::HUP)
        });
        if gone {
            self.disconnect(None);
        }
        if self.leaving.is_some() {
            return;
        }
        let socket = match self.acceptor.accept(Instant::now()) {
            Ok(Some(socket)) => socket,
            Ok(None) => return,
            Err(error) => {
                let log = &self.stats.accept_log;
                log.line(|left_out| tracing::warn!(%error, left_out, "accept"));
                return;
            }
        };
        if self.session.is_some() {
            self.stats.log.line("second front-end", |left_out| {
                tracing::warn!(
                    left_out,
                    "refused a second front-end: the disk already has one"
                );
            });
            self.intake.dismiss(socket);
            return;
        }
        let watched = self
            .descriptors
            .add(&socket, TOKEN_CLIENT, Interest::Readable);
        if let Err(error) = watched {
            let log = &self.stats.log;
            log.line(
                "not watched",
                |left_out| tracing::warn!(%error, left_out, "front-end"),
            );
            self.intake.dismiss(socket);
            return;
        }
        let socket = self.intake.admit(socket);
        let log = &self.stats.log;
        log.line("connected", |left_out| {
            tracing::info!(left_out, "front-end connected")
        });
        self.stats.connections.add(1);
        self.stats.set_connected(true);
        self.client_interest = Interest::Readable;
        let attach = self.attach.as_ref().map(|attach| attach());
        let handles = (self.descriptors.clone(), self.waker.clone());
        let memories = self.memories.next_client();
        let memory = GuestMemory::new(memories, attach, self.disk.io.pinner());
        let session = Session::new(socket, handles, memory, self.stats.clone(), &self.disk);
        self.session = Some(session);
    }
}

impl BackendPhase {
    fn flushed(completion: Completion) -> BackendPhase {
        let result = completion.result;
        BackendPhase::Flushed(result.map_err(|error| Error::Flush(error.to_string())))
    }
}

impl Frontend for Backend {
    type Error = Error;

    #[inline]
    fn poll(&mut self, now: Instant, budget: &mut Budget) -> bool {
        if self.tell_again.is_some_and(|at| now >= at) {
            let stats = self.stats.clone();
            stats.span.in_scope(|| self.tell_size());
        }
        let fetched = match &mut self.session {
            Some(session) => session.fetch(&mut self.disk, budget),
            None => false,
        };
        fetched | self.flush_everything()
    }

    #[inline]
    fn complete(&mut self, completion: Completion) {
        self.disk.completed();
        if is_flush(completion.tag) && !matches!(self.end, BackendPhase::Flushing) {
            self.disk.released(completion);
        } else if is_flush(completion.tag) {
            self.end = BackendPhase::flushed(completion);
        } else if let (Some(session), disk) = self.owner_of_requests() {
            session.complete(completion, disk);
        }
    }

    #[inline]
    fn poll_volumes(&mut self, out: &mut Vec<Completion>) {
        self.disk.poll(out);
    }

    #[inline]
    fn finish_round(&mut self) -> bool {
        let mut worked = false;
        if let Some(session) = &mut self.session {
            session.publish();
            if session.pending.is_some() {
                let stats = self.stats.clone();
                worked |= stats.span.in_scope(|| self.finish_pending());
            }
        }
        if self.leaving.as_ref().is_some_and(|s| !s.is_busy()) {
            self.leaving = None;
            worked = true;
            let stats = self.stats.clone();
            stats.span.in_scope(|| self.listen());
        }
        if self.session.is_none() {
            self.release_idle();
        }
        worked
    }

    #[inline]
    fn has_news(&self) -> bool {
        self.session.as_ref().is_some_and(Session::has_news)
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.disk.in_flight()
    }

    #[inline]
    fn must_poll(&self) -> bool {
        self.disk.must_poll() || self.session.as_ref().is_some_and(Session::must_poll)
    }

    #[inline]
    fn keeps_window(&self) -> bool {
        self.disk.in_flight() > 0 || self.session.as_ref().is_some_and(Session::is_fetching)
    }

    #[inline]
    fn has_more(&self) -> bool {
        self.more
    }

    fn arm(&mut self) -> bool {
        self.session.as_mut().is_some_and(Session::arm)
    }

    fn deadline(&self) -> Option<Instant> {
        self.tell_again
            .into_iter()
            .chain(self.disk.deadline())
            .chain(self.release_deadline())
            .chain(self.intake.deadline())
            .chain(self.session.as_ref().and_then(Session::deadline))
            .chain(self.acceptor.deadline())
            .min()
    }

    fn housekeeping(&mut self, now: Instant) {
        let client = self.session.as_ref().and_then(Session::deadline);
        if self.intake.deadline().or(client).is_some() {
            let stats = self.stats.clone();
            stats.span.in_scope(|| self.check_intake(now));
        }
        if self.acceptor.deadline().is_some_and(|until| now >= until) {
            let stats = self.stats.clone();
            let _span = stats.span.enter();
            let resumed = self.acceptor.resume(now);
            self.say_closed(resumed);
        }
    }

    /// Continues with a request whose memory files another thread has mapped.
    fn drain_messages(&mut self) -> bool {
        let importing = self.session.as_ref().is_some_and(|s| s.import.is_some());
        let stats = self.stats.clone();
        let _span = stats.span.enter();
        let advanced = self.disk.ownership.is_waiting() && self.advance_ownership();
        advanced | (importing && self.finish_pending())
    }

    fn update_volumes(&mut self) {
        self.disk.update_volume();
    }

    /// Pinning waits while an answer is pending, because the front-end waits for it.
    fn is_pinning(&self) -> bool {
        !self.more && self.session.as_ref().is_some_and(Session::is_pinning)
    }

    fn pin(&mut self, pace: &mut PinPace) {
        if let Some(session) = &mut self.session {
            session.memory.pin(pace);
        }
    }

    fn ready(&mut self, token: u32) {
        let stats = self.stats.clone();
        let _span = stats.span.enter();
        match token {
            TOKEN_LISTENER => self.accept(),
            TOKEN_CLIENT => self.serve(),
            TOKEN_INTAKE => self.intake_ready(),
            TOKEN_SIZE => {
                if let Some(resized) = &self.resized {
                    let _ = rustix::io::read(resized, &mut [0; 8]);
                }
                self.tell_size();
            }
            kick => {
                if let Some(session) = &self.session {
                    session.kicked(kick.saturating_sub(TOKEN_KICK) as usize);
                }
            }
        }
    }

    fn read_on(&mut self) {
        self.more = false;
        let stats = self.stats.clone();
        stats.span.in_scope(|| self.serve());
    }

    fn flush(&mut self) {
        if let Some(session) = &mut self.session {
            session.stop();
        }
        if matches!(self.end, BackendPhase::Serving) {
            self.end = BackendPhase::Draining;
        }
    }

    fn is_drained(&self) -> bool {
        matches!(self.end, BackendPhase::Flushed(_))
    }

    fn close(&mut self) -> Result<(), Error> {
        let stats = self.stats.clone();
        stats.span.in_scope(|| self.disconnect(None));
        // The receiver process has a duplicate, which would stay in the epoll set.
        self.acceptor.close();
        match std::mem::replace(&mut self.end, BackendPhase::Serving) {
            BackendPhase::Flushed(result) => result,
            _ => Err(Error::Flush("it was closed before".into())),
        }
    }
}
