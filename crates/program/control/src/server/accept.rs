//! Acceptance of clients at a socket, and the choice of the client to drop when there are too many.

use super::answer::{RequestSlots, ServerState, answer};
use super::clock::{Clock, Phase};
use super::pace::Pace;
use super::stream::Stream;
use super::{Endpoint, HEAD_MAX, Listening, MAX_CLIENTS, MAX_HEADERS};
use crate::daemon::Daemon;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use probes::LogLimit;
use receive::Intake;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

/// Pause after a client could not be accepted.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Client that is connected to a socket of the management API.
struct Client {
    clock: Rc<Clock>,
    task: AbortHandle,
}

/// Listening socket of the management API, and its clients.
pub(super) struct Acceptor {
    /// Duplicate of the listening socket, for tokio.
    accepting: UnixListener,
    listener: Box<dyn Listening>,
    /// Connection to the receiver process for the socket's clients, see [`Endpoint::intake`].
    intake: Intake,
    /// Connection to the receiver process: readable when it has sent a message. A duplicate, used
    /// only for waiting.
    channel: Option<UnixStream>,
    pace: Pace,
    /// Time before which no further client is accepted.
    not_before: Option<Instant>,
    /// Connected clients, the oldest first.
    clients: Vec<Client>,
    tasks: JoinSet<()>,
    shared: Rc<ServerState>,
    log: Rc<LogLimit>,
}

impl Acceptor {
    /// # Errors
    /// The socket cannot be waited for.
    pub(super) fn new(
        endpoint: Endpoint,
        daemon: Arc<dyn Daemon>,
        limits: Rc<RequestSlots>,
    ) -> io::Result<Self> {
        let Endpoint {
            listener,
            intake,
            access,
            rate,
        } = endpoint;
        let mut acceptor = Self {
            accepting: UnixListener::from_std(duplicate(listener.as_fd())?.into())?,
            listener,
            intake,
            channel: None,
            pace: Pace::new(rate),
            not_before: None,
            clients: Vec::new(),
            tasks: JoinSet::new(),
            shared: Rc::new(ServerState::new(daemon, limits, access, rate)),
            log: Rc::default(),
        };
        acceptor.watch_intake();
        Ok(acceptor)
    }

    /// Accepts and serves clients until the future is dropped.
    pub(super) async fn run(mut self) {
        loop {
            let now = Instant::now();
            self.not_before = self.not_before.filter(|until| *until > now);
            if self.intake.deadline().is_some_and(|due| due <= now.into()) {
                // The receiver process has ended; it is tried again later if there is none yet.
                let _ = self.intake.connect(self.listener.as_fd());
                self.watch_intake();
            }
            let due = self.intake.deadline().map(Instant::from);
            let due = [due, self.not_before].into_iter().flatten().min();
            let listening = self.not_before.is_none() && !self.intake.is_crowded();
            let channel = self.channel.as_ref();
            tokio::select! {
                _ = async { channel?.readable().await.ok() }, if channel.is_some() => {
                    self.intake_ready();
                }
                socket = self.accepting.accept(), if listening => {
                    self.admit(socket.map(|(socket, _)| socket));
                }
                () = sleep_until(due.unwrap_or(now)), if due.is_some() => {}
                Some(_) = self.tasks.join_next(), if !self.tasks.is_empty() => {
                    self.clients.retain(|client| !client.task.is_finished());
                }
            }
        }
    }

    /// Handles a message of the receiver process.
    fn intake_ready(&mut self) {
        let Self {
            intake, channel, ..
        } = self;
        if let Some(channel) = channel {
            // All of it is read, so that tokio waits for more.
            let _ = channel.try_io(Interest::READABLE, || {
                intake.ready();
                Err::<(), _>(io::ErrorKind::WouldBlock.into())
            });
        }
        if self.intake.fd().is_none() {
            self.channel = None;
        }
    }

    fn watch_intake(&mut self) {
        let watch = |fd| UnixStream::from_std(net::UnixStream::from(duplicate(fd)?));
        self.channel = match self.intake.fd().map(watch).transpose() {
            Ok(channel) => channel,
            Err(error) => {
                self.warn(&error);
                None
            }
        };
    }

    fn warn(&self, error: &io::Error) {
        self.log
            .line(|left_out| tracing::warn!(%error, left_out, "control socket"));
    }

    /// Admits a client, or handles the error of accepting it.
    fn admit(&mut self, socket: io::Result<UnixStream>) {
        let now = Instant::now();
        let socket = match socket {
            Ok(socket) => socket,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => return,
            Err(error) => {
                // Out of descriptors, most likely: not a reason to spin.
                self.warn(&error);
                self.not_before = Some(now + RETRY_INTERVAL);
                return;
            }
        };
        self.pace.take(now.into());
        let next = Instant::from(self.pace.next(now.into()));
        self.not_before = Some(next).filter(|next| *next > now);
        if self.clients.len() >= MAX_CLIENTS {
            self.drop_one();
        }
        let clock = Rc::new(Clock::new());
        let stream = Stream::new(self.intake.admit_plain(socket), clock.clone());
        let (shared, log) = (self.shared.clone(), self.log.clone());
        let task = serve(stream, clock.clone(), shared, log);
        let task = self.tasks.spawn_local(task);
        self.clients.push(Client { clock, task });
    }

    /// Drops a client, because there are too many. Idle clients are dropped first: a request that
    /// is sent at once is answered at once.
    fn drop_one(&mut self) {
        let rank = |phase| match phase {
            Phase::Idle => 0,
            Phase::Asking => 1,
            Phase::Answering | Phase::Answered => 2,
            Phase::Listening => 3,
            Phase::Waiting => 4,
        };
        // The first of several with the same rank is the oldest.
        let client = (0..self.clients.len())
            .min_by_key(|at| self.clients.get(*at).map(|one| rank(one.clock.phase())));
        if let Some(at) = client {
            self.clients.remove(at).task.abort();
        }
    }
}

/// Returns a non-blocking duplicate for tokio. The flag is shared with the original; its owner
/// either requests non-blocking calls in each call, or makes none.
fn duplicate(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let fd = fd.try_clone_to_owned()?;
    rustix::io::ioctl_fionbio(&fd, true)?;
    Ok(fd)
}

/// Serves the requests of a client until the client disconnects or is too slow.
async fn serve(stream: Stream, clock: Rc<Clock>, shared: Rc<ServerState>, log: Rc<LogLimit>) {
    let service = service_fn({
        let clock = clock.clone();
        move |request| answer(shared.clone(), clock.clone(), request)
    });
    let mut http = http1::Builder::new();
    http.max_buf_size(HEAD_MAX)
        .max_headers(MAX_HEADERS)
        // All times are the clock's.
        .header_read_timeout(None);
    let mut connection = pin!(http.serve_connection(stream, service));
    let mut sleep = pin!(sleep_until(Instant::now()));
    let ended = poll_fn(|cx| {
        if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
            return Poll::Ready(Some(ended));
        }
        let Some(deadline) = clock.deadline() else {
            return Poll::Pending;
        };
        if sleep.deadline() != deadline {
            sleep.as_mut().reset(deadline);
        }
        sleep.as_mut().poll(cx).map(|()| None)
    });
    if let Some(Err(error)) = ended.await
        && error.is_parse()
    {
        log.line(|left_out| {
            tracing::warn!(
                %error,
                left_out,
                "a client of the control socket does not speak HTTP; connect VMMs to the socket \
                 of a disk"
            );
        });
    }
}
