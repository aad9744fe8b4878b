//! Queue of one worker to an export: the NBD protocol for [`RemoteQueue`].
//!
//! A command is sent on the connection with the fewest outstanding commands. A thread replaces each
//! broken connection. A closing connection is read until the server has closed it, so a write that
//! was sent on it is never executed after a write on the next connection: its commands are sent
//! again at once.
//!
//! A server counts as lost from the end of a connection until a reply arrives on another one.

mod session;

use crate::connect::{Connected, Inbox, connect_again};
use crate::export::SharedExport;
use crate::protocol::wire::export_flags as flags;
use remote::queue::{
    Broken, ClosedBy, Command, CommandLimits, Link, Outcome, Protocol, RemoteQueue,
};
use session::{Answer, NbdFailure, NbdSession};
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{DrainWatch, RingStreams};

/// Interval between attempts to start a connecting thread after one has failed.
const THREADS: Duration = Duration::from_secs(1);
/// Maximum number of data bytes of one command.
const MAX_DATA_LEN: u32 = 1 << 20;
/// Maximum number of bytes that one command zeroes or trims. A server may implement it by writing,
/// and must answer in time.
const MAX_ZEROED_BYTES: u32 = 64 << 20;

/// History of a link's connections.
struct Attempts {
    /// Number of connections in a row that have ended before any reply.
    failures: u32,
    /// Whether any reply was received on the present connection.
    answered: bool,
    /// Time at which a connection first failed since the last reply.
    lost: Option<Instant>,
    /// Time at which no thread could be started for the next connection.
    forsaken: Option<Instant>,
}

/// Protocol of one worker's queue to an export.
pub(crate) struct NbdProtocol {
    shared: Arc<SharedExport>,
    inbox: Arc<Inbox>,
    attempts: Vec<Attempts>,
    /// Number of connections that are down and that the queue waits for.
    awaited: usize,
}

/// Creates the queue of a worker, and starts threads that make its connections.
pub(crate) fn open(
    shared: Arc<SharedExport>,
    streams: RingStreams,
    inbox: Arc<Inbox>,
    ending: DrainWatch,
) -> RemoteQueue<NbdProtocol> {
    let now = Instant::now();
    let links = shared.options.connections.max(1);
    let attempts = (0..links).map(|_| Attempts {
        failures: 0,
        answered: false,
        lost: Some(now),
        forsaken: None,
    });
    let mut protocol = NbdProtocol {
        attempts: attempts.collect(),
        awaited: links,
        inbox: inbox.clone(),
        shared: shared.clone(),
    };
    shared.awaits(links);
    let first = shared.take_first();
    for number in usize::from(first.is_some())..links {
        protocol.connect(number, now);
    }
    if let Some(connected) = first {
        inbox.put((0, connected));
    }
    // Both are multiples of the server's block, or the smaller one is.
    let data = shared.export.maximum.min(MAX_DATA_LEN);
    let limits = CommandLimits {
        data,
        zeroed: MAX_ZEROED_BYTES,
        deallocated: MAX_ZEROED_BYTES,
        fua: shared.has(flags::SEND_FUA),
        timeout: shared.options.timeout,
    };
    RemoteQueue::new(
        protocol,
        links,
        shared.info(),
        limits,
        streams,
        inbox,
        ending,
    )
}

impl NbdProtocol {
    /// Starts a thread that makes the next connection of link `number`.
    fn connect(&mut self, number: usize, now: Instant) {
        let Some(attempts) = self.attempts.get_mut(number) else {
            return;
        };
        attempts.forsaken =
            match connect_again(&self.shared, &self.inbox, number, attempts.failures) {
                Ok(()) => None,
                Err(error) => {
                    self.shared.no_thread(&error);
                    Some(now)
                }
            };
    }
}

impl Protocol for NbdProtocol {
    type Session = NbdSession;
    type Message = (usize, Connected);

    fn log_cancelled(&self, requests: usize) {
        let server = &self.shared.server;
        tracing::error!("{server}: no answer; cancelling {requests} requests");
    }

    fn size(&self) -> u64 {
        self.shared.size()
    }

    fn receive(
        &mut self,
        (number, connected): (usize, Connected),
        links: &mut [Link<NbdSession>],
        streams: &RingStreams,
        _: Instant,
    ) {
        let (link, attempts) = (links.get_mut(number), self.attempts.get_mut(number));
        if let (Some(link), Some(attempts)) = (link, attempts) {
            let session = NbdSession::new(connected.export.structured, connected.kept);
            link.open(streams, connected.fd, session);
            attempts.answered = false;
            self.awaited = self.awaited.saturating_sub(1);
            self.shared.connected();
        }
    }

    /// Retries to start threads for connections for which that has failed.
    fn make_connections(&mut self, _: &mut [Link<NbdSession>], _: &RingStreams, now: Instant) {
        for number in 0..self.attempts.len() {
            let attempts = self.attempts.get(number);
            let since = attempts.and_then(|attempts| attempts.forsaken);
            if since.is_some_and(|at| now.saturating_duration_since(at) >= THREADS) {
                self.connect(number, now);
            }
        }
    }

    fn choose(&mut self, links: &[Link<NbdSession>]) -> Option<usize> {
        let links = links.iter().enumerate();
        let open = links.filter(|(_, link)| link.has_room());
        let (number, _) = open.min_by_key(|(_, link)| link.outstanding())?;
        Some(number)
    }

    fn has_room(&self, links: &[Link<NbdSession>]) -> bool {
        links.iter().any(Link::has_room)
    }

    fn is_overdue(&mut self, links: &[Link<NbdSession>], resends: bool, now: Instant) -> bool {
        let limit = self.shared.options.reconnect_delay;
        let mut overdue = true;
        for (link, attempts) in links.iter().zip(&mut self.attempts) {
            if link.is_open() && link.outstanding() == 0 && !resends {
                attempts.lost = None;
            }
            let late = |lost| now.saturating_duration_since(lost) >= limit;
            overdue &= !link.is_open() && attempts.lost.is_some_and(late);
        }
        if overdue {
            self.shared.overdue();
        }
        overdue
    }

    fn note_answers(&mut self, number: usize) {
        if let Some(attempts) = self.attempts.get_mut(number) {
            (attempts.answered, attempts.failures, attempts.lost) = (true, 0, None);
        }
    }

    fn outcome(
        &mut self,
        _: usize,
        subrequest: &mut Command<Self>,
        answer: Answer,
        _: Instant,
    ) -> Outcome {
        Outcome::Ended(session::result(answer, subrequest))
    }

    fn broken(
        &mut self,
        number: usize,
        link: &Link<NbdSession>,
        why: &Broken<NbdFailure>,
        now: Instant,
    ) {
        self.awaited += 1;
        self.shared.broken(why, link.outstanding());
        if let Some(attempts) = self.attempts.get_mut(number) {
            if !attempts.answered {
                attempts.failures = attempts.failures.saturating_add(1);
            }
            attempts.failures = attempts.failures.max(1);
            attempts.lost.get_or_insert(now);
        }
    }

    fn closed(&mut self, number: usize, _: &NbdSession, _: ClosedBy, now: Instant) {
        self.connect(number, now);
    }

    fn is_timed(&self) -> bool {
        self.attempts.iter().any(|link| link.forsaken.is_some())
    }
}

impl Drop for NbdProtocol {
    fn drop(&mut self) {
        self.shared.close_queue(self.awaited);
    }
}
