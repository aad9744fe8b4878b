//! Queue of one worker to a namespace: NVMe/TCP for [`RemoteQueue`].
//!
//! A command uses one of the paths with the best ANA state ([`Routes`]). Commands of an ended
//! association are sent again on any available path. Those that change no data are sent at once.
//! The rest wait until the association has certainly ended, because a controller that still
//! executed them later would overwrite newer writes. Requests fail when no path is usable for too
//! long.

mod encode;
mod routes;
mod session;

use crate::path::QueueReport;
use crate::shared::{QueueInbox, SharedVolume};
use encode::Subrequest;
use nvme::Status;
use nvme::log::AnaState;
use nvme::status::StatusCodeType;
use remote::queue::{Broken, ClosedBy, CommandLimits, Outcome, Protocol, RemoteQueue};
use routes::Routes;
pub(crate) use session::Ready;
use session::{Answered, FabricsFailure, FabricsSession};
use std::sync::Arc;
use std::time::Instant;
use volume::{DrainWatch, IoErrorKind, Op, RingStreams};

/// Maximum number of retries of a command after errors that the controller marks as retryable.
const MAX_RETRIES: u8 = 5;

type Link = remote::queue::Link<FabricsSession>;

/// Message from the thread of a path to a worker's queue.
#[derive(Debug)]
pub(crate) enum PathMessage {
    /// A connection for this queue was established.
    Ready {
        path: usize,
        link: usize,
        ready: Ready,
    },
    /// The association has failed, so its connections must be closed.
    Broken { path: usize, epoch: u64 },
    /// The association has certainly ended at this time, and its controller executes no more
    /// commands.
    Ended {
        path: usize,
        epoch: u64,
        at: Instant,
    },
    /// The size or the ANA state of the namespace has changed.
    Look,
}

impl PathMessage {
    /// Returns a copy for another queue; `None` for a message with a connection.
    pub(crate) const fn copy(&self) -> Option<Self> {
        Some(match *self {
            Self::Ready { .. } => return None,
            Self::Broken { path, epoch } => Self::Broken { path, epoch },
            Self::Ended { path, epoch, at } => Self::Ended { path, epoch, at },
            Self::Look => Self::Look,
        })
    }
}

/// Commands of a failed association, which its controller may still execute.
struct LostCommands {
    path: usize,
    epoch: u64,
    /// Time at which the controller certainly executes no more of the commands; `None` until it is
    /// known.
    ends: Option<Instant>,
    parts: Vec<Subrequest>,
}

/// Protocol of one worker's queue to a namespace.
pub(crate) struct FabricsProtocol {
    shared: Arc<SharedVolume>,
    /// Index of this queue among the volume's queues, which determines its queue identifiers.
    place: usize,
    routes: Routes,
    lost_commands: Vec<LostCommands>,
    /// New connections that wait for closing ones to leave their slots, with path and number.
    early: Vec<(usize, usize, Ready)>,
    /// Time since which no path has been usable; `None` while one is.
    lost: Option<Instant>,
}

/// Creates the queue of a worker, for which the threads of the paths make connections.
pub(crate) fn open(
    shared: Arc<SharedVolume>,
    streams: RingStreams,
    inbox: Arc<QueueInbox>,
    ending: DrainWatch,
) -> RemoteQueue<FabricsProtocol> {
    let each = usize::from(shared.options.queues.max(1));
    let links = shared.paths.len() * each;
    let limits = CommandLimits {
        data: shared.facts.max_data,
        zeroed: shared.facts.max_zeroed,
        deallocated: shared.facts.max_deallocated,
        fua: true,
        timeout: shared.options.timeout,
    };
    let info = shared.info();
    let protocol = FabricsProtocol {
        place: shared.enter(&inbox),
        routes: Routes::new(each, shared.options.policy),
        lost_commands: Vec::new(),
        early: Vec::new(),
        lost: Some(Instant::now()),
        shared,
    };
    RemoteQueue::new(protocol, links, info, limits, streams, inbox, ending)
}

impl FabricsProtocol {
    fn report(&self, path: usize, report: QueueReport) {
        if let Some(path) = self.shared.paths.get(path) {
            path.report(report);
        }
    }

    fn opened(
        &mut self,
        (path, number, ready): (usize, usize, Ready),
        links: &mut [Link],
        streams: &RingStreams,
    ) {
        match links.get_mut(self.routes.number(path, number)) {
            Some(link) if link.is_down() => {
                let session = FabricsSession::new(&ready, &self.shared.facts);
                link.open(streams, ready.fd, session);
            }
            // The new connection replaces one that is still closing.
            Some(_) => self.early.push((path, number, ready)),
            None => {}
        }
    }

    /// Drops connections of an ended association that this queue has not used yet.
    fn drop_early(&mut self, path: usize, epoch: u64) {
        let early = std::mem::take(&mut self.early);
        for (of, number, ready) in early {
            if of == path && ready.epoch == epoch {
                let (qid, by_controller) = (ready.qid, false);
                drop(ready);
                let closed = QueueReport::Closed {
                    epoch,
                    qid,
                    by_controller,
                };
                self.report(path, closed);
            } else {
                self.early.push((of, number, ready));
            }
        }
    }

    /// Returns the held commands of an association, after creating an empty entry if there is none.
    fn limbo_of(&mut self, path: usize, epoch: u64) -> Option<&mut LostCommands> {
        let known = |lost_commands: &LostCommands| {
            lost_commands.path == path && lost_commands.epoch == epoch
        };
        let place = self.lost_commands.iter().position(known);
        let place = place.unwrap_or_else(|| {
            self.lost_commands.push(LostCommands {
                path,
                epoch,
                ends: None,
                parts: Vec::new(),
            });
            self.lost_commands.len() - 1
        });
        self.lost_commands.get_mut(place)
    }
}

/// Returns whether the connection belongs to this association, and is open or closing.
fn is_of(link: &Link, epoch: u64) -> bool {
    link.session().is_some_and(|session| session.epoch == epoch)
}

impl Protocol for FabricsProtocol {
    type Session = FabricsSession;
    type Message = PathMessage;

    fn log_cancelled(&self, requests: usize) {
        let subsystem = &self.shared.subsystem;
        tracing::error!("{subsystem}: no answer; cancelling {requests} requests");
    }

    fn size(&self) -> u64 {
        self.shared.size()
    }

    fn receive(
        &mut self,
        message: PathMessage,
        links: &mut [Link],
        streams: &RingStreams,
        now: Instant,
    ) {
        match message {
            PathMessage::Ready { path, link, ready } => {
                self.opened((path, link, ready), links, streams);
            }
            PathMessage::Broken { path, epoch } => {
                for link in self.routes.links(path, links) {
                    if is_of(link, epoch) {
                        link.close(&Broken::Protocol(FabricsFailure::Association), now);
                    }
                }
                self.drop_early(path, epoch);
            }
            // Connections may still be closing: their commands arrive later.
            PathMessage::Ended { path, epoch, at } => {
                if let Some(lost_commands) = self.limbo_of(path, epoch) {
                    lost_commands.ends = Some(at);
                }
            }
            PathMessage::Look => {}
        }
    }

    /// Opens new connections whose slots are free by now.
    fn make_connections(&mut self, links: &mut [Link], streams: &RingStreams, _: Instant) {
        for early in std::mem::take(&mut self.early) {
            self.opened(early, links, streams);
        }
    }

    fn choose(&mut self, links: &[Link]) -> Option<usize> {
        self.routes.choose(links, &self.shared.paths)
    }

    fn has_room(&self, links: &[Link]) -> bool {
        self.routes.has_room(links, &self.shared.paths)
    }

    fn is_overdue(&mut self, links: &[Link], _: bool, now: Instant) -> bool {
        if self.routes.is_usable(links, &self.shared.paths) {
            self.lost = None;
            return false;
        }
        let lost = *self.lost.get_or_insert(now);
        let overdue = now.saturating_duration_since(lost) >= self.shared.options.reconnect_delay;
        if overdue {
            self.shared.is_overdue();
        }
        overdue
    }

    fn outcome(
        &mut self,
        number: usize,
        subrequest: &mut Subrequest,
        answer: Answered,
        now: Instant,
    ) -> Outcome {
        let Answered { status, corrupt } = answer;
        if status.is_success() && !corrupt {
            return Outcome::Ended(Ok(()));
        }
        let state = match status.without_flags() {
            Status::ANA_PERSISTENT_LOSS => Some(AnaState::PERSISTENT_LOSS),
            Status::ANA_INACCESSIBLE => Some(AnaState::INACCESSIBLE),
            Status::ANA_TRANSITION => Some(AnaState::CHANGE),
            _ => None,
        };
        let retries = match status.sct() {
            _ if corrupt => true,
            StatusCodeType::GENERIC | StatusCodeType::PATH => !status.dnr(),
            _ => false,
        };
        let waited = now.saturating_duration_since(subrequest.made);
        if let Some(state) = state
            && waited < self.shared.options.reconnect_delay
        {
            // Does not count as a retry: the path is not used before its state is read again.
            self.report(self.routes.path(number), QueueReport::State(state));
            return Outcome::Again;
        }
        subrequest.tries += 1;
        if retries && subrequest.tries < MAX_RETRIES {
            return Outcome::Again;
        }
        Outcome::Ended(Err(match (corrupt, state) {
            (true, _) => subrequest.failed().into(),
            (false, Some(_)) => IoErrorKind::Unreachable.into(),
            (false, None) => nvme_volume::status_error(status, subrequest.op != Op::Read),
        }))
    }

    fn broken(&mut self, number: usize, link: &Link, why: &Broken<FabricsFailure>, _: Instant) {
        let Some(FabricsSession { epoch, qid, .. }) = link.session() else {
            return;
        };
        let (path, unanswered) = (self.routes.path(number), link.outstanding());
        tracing::debug!(path, qid, unanswered, "I/O queue: {why}");
        let (epoch, why) = (*epoch, reason(why));
        self.report(path, QueueReport::Broken { epoch, why });
    }

    fn closed(&mut self, number: usize, session: &FabricsSession, by: ClosedBy, _: Instant) {
        let closed = QueueReport::Closed {
            epoch: session.epoch,
            qid: session.qid,
            by_controller: by == ClosedBy::Server,
        };
        self.report(self.routes.path(number), closed);
    }

    /// Holds a command that the controller of a failed association may still execute.
    fn lost(
        &mut self,
        number: usize,
        session: &FabricsSession,
        subrequest: Subrequest,
    ) -> Option<Subrequest> {
        if !subrequest.changes() || subrequest.unsent {
            return Some(subrequest);
        }
        let path = self.routes.path(number);
        if let Some(lost_commands) = self.limbo_of(path, session.epoch) {
            lost_commands.parts.push(subrequest);
        }
        None
    }

    fn held(&mut self) -> impl Iterator<Item = &mut Subrequest> {
        let lost_commands = self.lost_commands.iter_mut();
        lost_commands.flat_map(|lost_commands| &mut lost_commands.parts)
    }

    /// Releases held commands whose associations have certainly ended.
    fn released(&mut self, links: &[Link], now: Instant) -> Vec<Subrequest> {
        let mut released = Vec::new();
        let routes = &self.routes;
        self.lost_commands.retain_mut(|lost_commands| {
            let (path, epoch) = (lost_commands.path, lost_commands.epoch);
            let is_over = lost_commands.ends.is_some_and(|at| at <= now);
            // Connections that are still closing may add more.
            let of_path = links.iter().enumerate();
            let mut of_path = of_path.filter(|(number, _)| routes.path(*number) == path);
            if !is_over || of_path.any(|(_, link)| is_of(link, epoch)) {
                return true;
            }
            released.append(&mut lost_commands.parts);
            false
        });
        released
    }

    fn is_timed(&self) -> bool {
        !self.lost_commands.is_empty()
    }
}

/// Returns the reason as a text, for the thread that serves the path.
fn reason(why: &Broken<FabricsFailure>) -> &'static str {
    match why {
        Broken::Closed => "the controller has closed the connection",
        Broken::Io(_) => "the connection has failed",
        Broken::Protocol(FabricsFailure::Violation(_)) => "the controller breaks the protocol",
        Broken::Protocol(FabricsFailure::Terminated(_)) => "the controller ends the connection",
        Broken::Protocol(FabricsFailure::Association) => "its association has ended",
        Broken::TimeOut(_) => "a command was not answered in time",
        Broken::GivenUp => "a request was cancelled while it was sent or received",
    }
}

impl Drop for FabricsProtocol {
    fn drop(&mut self) {
        self.shared.leave(self.place);
    }
}
