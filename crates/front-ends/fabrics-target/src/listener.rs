//! Front-end that accepts hosts: the listening socket, connections before their Connect command,
//! and discovery connections. Associations are separate front-ends, on any worker.

use crate::association::NewAssociation;
use crate::discovery::Discovery;
use crate::handshake::{Connected, PendingConnection, Progress, invalid};
use crate::link::{ConnectionEnd, shown};
use crate::target::Target;
use nvme::fabrics::{CNTLID_DYNAMIC, DISCOVERY_NQN, status};
use rustix::io::Errno;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;
use volume::{Budget, RingStreams};
use worker::{
    AcceptStats, Acceptor, ConnectPace, ConnectRate, Context, Descriptors, Frontend, Interest,
};

/// epoll token of the listening socket.
const LISTENER: u32 = 0;
/// epoll token of the eventfd that signals a changed size of a volume.
const RESIZED: u32 = (1 << 31) - 1;
/// Upper bound of the epoll tokens of discovery connections.
const LAST_TOKEN: u32 = 1 << 30;
/// Maximum number of discovery connections at a time.
const MAX_DISCOVERIES: usize = 32;
/// Maximum number of connections that one call accepts.
const MAX_ACCEPT_BATCH: usize = 4;
/// Number of accepted connections per association that is allowed in the same time. A silent
/// connection costs a few microseconds, an association a controller.
const CONNECTIONS_PER_ASSOCIATION: u32 = 20;

/// Callback that passes a new association to a worker, which creates it ([`NewAssociation::make`]).
pub type Launch = Box<dyn FnMut(NewAssociation)>;

/// Front-end that accepts the connections of hosts to an NVMe/TCP subsystem.
pub struct TargetListener {
    target: Arc<Target>,
    acceptor: Acceptor<OwnedFd>,
    descriptors: Descriptors,
    streams: RingStreams,
    /// Rate limit of new associations.
    pace: ConnectPace,
    /// New connections without a Connect command, by epoll token.
    newcomers: Vec<Option<PendingConnection>>,
    discoveries: Vec<(u32, Discovery)>,
    launch: Launch,
    resized: Option<Arc<OwnedFd>>,
    /// epoll token of the next discovery connection, above the tokens of new connections.
    next_token: u32,
    /// Whether the listening socket may have connections to accept.
    accepts: bool,
    /// epoll tokens of new connections with received bytes.
    ready: Vec<u32>,
    flushing: bool,
}

impl std::fmt::Debug for TargetListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Door")
            .field("target", &self.target)
            .finish_non_exhaustive()
    }
}

/// Reason why the front-end could not be created.
#[derive(Debug, thiserror::Error)]
pub enum ListenerError {
    /// The listening socket could not be used.
    #[error("the listening socket: {0}")]
    Socket(Errno),
    /// The worker's ring could not be used for connections.
    #[error(transparent)]
    Ring(#[from] volume::VolumeError),
}

impl From<Errno> for ListenerError {
    fn from(error: Errno) -> Self {
        Self::Socket(error)
    }
}

impl TargetListener {
    /// Creates the front-end of a listening socket, which must be in non-blocking mode. `rate`
    /// limits new associations; connections are accepted 20 times as fast, so that silent ones do
    /// not delay hosts. `resized` is an eventfd that becomes readable when the size of a volume has
    /// changed.
    ///
    /// # Errors
    /// [`ListenerError`] when the socket or the worker's ring cannot be used.
    pub fn new(
        target: Arc<Target>,
        listener: OwnedFd,
        rate: ConnectRate,
        resized: Option<Arc<OwnedFd>>,
        launch: Launch,
        context: &Context<'_>,
    ) -> Result<Self, ListenerError> {
        let descriptors = context.descriptors.clone();
        if let Some(resized) = &resized {
            descriptors.add(resized, RESIZED, Interest::Readable)?;
        }
        let connections = ConnectRate(rate.0.saturating_mul(CONNECTIONS_PER_ASSOCIATION));
        let places = u32::try_from(target.config.limits.associations).unwrap_or(u32::MAX);
        Ok(Self {
            acceptor: Acceptor::new(listener, descriptors.clone(), LISTENER, connections)?,
            // All slots may be needed at once, for example after a restart.
            pace: ConnectPace::new(ConnectRate(rate.0.max(places))),
            newcomers: (0..target.config.limits.newcomers).map(|_| None).collect(),
            next_token: 1 + target.config.limits.newcomers as u32,
            target,
            descriptors,
            streams: context.io.streams()?,
            discoveries: Vec::new(),
            launch,
            resized,
            accepts: false,
            ready: Vec::new(),
            flushing: false,
        })
    }

    /// Returns the counters of accepted and refused connections.
    pub fn accepts(&self) -> Arc<AcceptStats> {
        self.acceptor.stats()
    }

    /// Stops accepting connections, and ends the associations of all hosts.
    pub fn dismiss(&mut self) {
        self.flushing = true;
        self.acceptor.close();
        self.newcomers.iter_mut().for_each(|place| *place = None);
        self.discoveries.clear();
        self.target.end();
    }

    /// Returns the listening socket, which any thread may close.
    pub fn into_listener(self) -> OwnedFd {
        self.acceptor.into_listener()
    }

    /// Returns the subsystem for which connections are accepted.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    fn accept(&mut self, now: Instant) {
        self.accepts = false;
        for _ in 0..MAX_ACCEPT_BATCH {
            match self.acceptor.accept(now) {
                Ok(Some(fd)) => {
                    if let Some(vacant) = self.make_room() {
                        self.put(vacant as u32 + 1, PendingConnection::new(fd, now));
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    self.target.log.refused.line(|left_out| {
                        tracing::warn!(left_out, "hosts cannot connect now: {error}");
                    });
                    return;
                }
            }
        }
        self.accepts = true;
    }

    /// Returns the index of a free slot for a connection. If all are used, closes the oldest
    /// connection of the address that has the most of them, so that a flood displaces itself.
    fn make_room(&mut self) -> Option<usize> {
        if let Some(vacant) = self.newcomers.iter().position(Option::is_none) {
            return Some(vacant);
        }
        let taken = || self.newcomers.iter().flatten();
        let from = |address| taken().filter(|other| other.address == address).count();
        let oldest = taken()
            .map(|newcomer| (from(newcomer.address), std::cmp::Reverse(newcomer.began)))
            .enumerate()
            .max_by_key(|(_, rank)| *rank)
            .map(|(index, _)| index)?;
        self.newcomers.get_mut(oldest)?.take();
        self.refused(&ConnectionEnd::Refused(
            "displaced by a newer connection before its Connect",
        ));
        Some(oldest)
    }

    fn place(&mut self, token: u32) -> Option<&mut Option<PendingConnection>> {
        self.newcomers.get_mut((token as usize).checked_sub(1)?)
    }

    /// Stores a new connection under its epoll token, and waits for its bytes.
    fn put(&mut self, token: u32, newcomer: PendingConnection) {
        let added = self
            .descriptors
            .add(newcomer.fd(), token, Interest::Readable);
        if added.is_ok()
            && let Some(vacant) = self.place(token)
        {
            *vacant = Some(newcomer);
        }
    }

    /// Reads from the new connection with this epoll token.
    fn read(&mut self, token: u32, now: Instant) {
        let Some(place) = self.place(token) else {
            return;
        };
        let Some(newcomer) = place.take() else {
            return;
        };
        match newcomer.read() {
            Ok(Progress::Waits(newcomer)) => *place = Some(newcomer),
            Ok(Progress::Connected(connected)) => {
                // Later bytes belong to the connection's queue.
                let _ = self.descriptors.remove(&connected.fd);
                self.connected(connected, now);
            }
            Err(why) => self.refused(&why),
        }
    }

    fn refused(&self, why: &ConnectionEnd) {
        self.target.stats().refused.count();
        self.target.log.refused.line(|left_out| {
            tracing::info!(left_out, "a connection that became no queue: {why}");
        });
    }

    /// Handles a connection whose host has sent its Connect command.
    fn connected(&mut self, connected: Box<Connected>, now: Instant) {
        let refuse = |connected: &Connected, why, at: Option<(u16, bool)>, words| {
            let dw0 = at.map_or(0, |(at, in_data)| invalid(at, in_data));
            connected.refuse(why, dw0);
            self.refused(&ConnectionEnd::Refused(words));
        };
        let wrong = status::CONNECT_INVALID_PARAMETERS;
        if connected.subnqn == DISCOVERY_NQN {
            return match connected.connect.qid {
                0 => self.discover(&connected, now),
                _ => {
                    let words = "a discovery controller's I/O queue";
                    refuse(&connected, wrong, Some((42, false)), words);
                }
            };
        }
        if connected.subnqn != self.target.config.nqn {
            connected.refuse(wrong, invalid(256, true));
            return self.refused(&ConnectionEnd::OtherSubsystem {
                host: shown(&connected.hostnqn),
                asked: shown(&connected.subnqn),
                here: self.target.config.nqn.clone(),
            });
        }
        if !self.target.admits(&connected.hostnqn) {
            connected.refuse(status::CONNECT_INVALID_HOST, 0);
            return self.refused(&ConnectionEnd::NotListed {
                host: shown(&connected.hostnqn),
            });
        }
        if self.flushing {
            let words = "a host that comes at the end";
            return refuse(&connected, status::CONNECT_CONTROLLER_BUSY, None, words);
        }
        let reservation = if connected.connect.qid != 0 {
            if let Err(why) = self.target.owns(&connected) {
                let at = (why == wrong).then_some((16, true));
                let words = "a queue of no association of its host's";
                return refuse(&connected, why, at, words);
            }
            None
        } else if connected.data.cntlid.get() != CNTLID_DYNAMIC {
            let words = "a host that asks for a controller of a number";
            return refuse(&connected, wrong, Some((16, true)), words);
        } else if connected.connect.sqsize_z == 0 {
            let words = "a host that asks for a queue of one entry";
            return refuse(&connected, wrong, Some((44, false)), words);
        } else {
            if self.pace.next(now) > now {
                let words = "more new associations in a second than there may be";
                return refuse(&connected, status::CONNECT_CONTROLLER_BUSY, None, words);
            }
            match self.target.reserve(&connected) {
                Ok(reservation) => Some(reservation),
                Err(why) => {
                    return refuse(&connected, why, None, "more associations than there may be");
                }
            }
        };
        if let Some(reservation) = reservation {
            self.pace.take(now);
            let target = self.target.clone();
            (self.launch)(NewAssociation::new(target, connected, reservation));
        } else if let Err((connected, why)) = self.target.pass(connected) {
            connected.refuse(why, 0);
            self.refused(&ConnectionEnd::Refused(
                "a queue of no association of its host's",
            ));
        }
    }

    /// Returns the first epoll token above those of new connections.
    fn first_token(&self) -> u32 {
        self.newcomers.len() as u32 + 1
    }

    fn discover(&mut self, connected: &Connected, now: Instant) {
        if self.discoveries.len() >= MAX_DISCOVERIES {
            connected.refuse(status::CONNECT_CONTROLLER_BUSY, 0);
            return self.refused(&ConnectionEnd::Refused(
                "more discoveries than there may be",
            ));
        }
        let token = self.next_token;
        self.next_token = match token {
            LAST_TOKEN.. => self.first_token(),
            _ => token + 1,
        };
        let target = self.target.clone();
        let made = Discovery::new(
            target,
            connected,
            &self.streams,
            &self.descriptors,
            token,
            now,
        );
        match made {
            Ok(discovery) => self.discoveries.push((token, discovery)),
            Err(errno) => self.refused(&ConnectionEnd::Io(errno.into())),
        }
    }

    /// Closes new connections that have sent no Connect command in time.
    fn expire(&mut self, now: Instant) {
        let limit = self.target.config.limits.handshake;
        let mut late = 0;
        for place in &mut self.newcomers {
            let is_late = |began: Instant| now.saturating_duration_since(began) >= limit;
            if place
                .as_ref()
                .is_some_and(|newcomer| is_late(newcomer.began))
            {
                *place = None;
                late += 1;
            }
        }
        (0..late).for_each(|_| {
            self.refused(&ConnectionEnd::Refused("the host sent no Connect in time"))
        });
    }

    /// Accepts connections again after a pause. If that fails, it is tried again later.
    fn resume(&mut self, now: Instant) {
        if !self.flushing {
            let _ = self.acceptor.resume(now);
        }
    }
}

impl Frontend for TargetListener {
    type Error = Infallible;

    fn poll(&mut self, now: Instant, _: &mut Budget) -> bool {
        let mut worked = self.accepts || !self.ready.is_empty();
        if !self.ready.is_empty() {
            for token in std::mem::take(&mut self.ready) {
                self.read(token, now);
            }
            self.resume(now);
        }
        if self.accepts {
            self.accept(now);
        }
        self.discoveries.retain_mut(|(_, discovery)| {
            worked |= discovery.has_news();
            discovery.poll(now)
        });
        worked
    }

    fn complete(&mut self, _: volume::Completion) {}

    fn has_news(&self) -> bool {
        let mut discoveries = self.discoveries.iter();
        discoveries.any(|(_, discovery)| discovery.has_news())
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn must_poll(&self) -> bool {
        self.accepts || !self.ready.is_empty() || self.has_news()
    }

    fn arm(&mut self) -> bool {
        self.must_poll()
    }

    fn deadline(&self) -> Option<Instant> {
        let limit = self.target.config.limits.handshake;
        let newcomers = self.newcomers.iter().flatten();
        let newcomers = newcomers.filter_map(|newcomer| newcomer.began.checked_add(limit));
        let discoveries = self.discoveries.iter();
        let discoveries = discoveries.filter_map(|(_, discovery)| discovery.deadline());
        newcomers
            .chain(discoveries)
            .chain(self.acceptor.deadline())
            .min()
    }

    fn housekeeping(&mut self, now: Instant) {
        self.expire(now);
        self.resume(now);
    }

    fn ready(&mut self, token: u32) {
        match token {
            LISTENER => self.accepts = true,
            RESIZED => {
                if let Some(resized) = &self.resized {
                    let _ = rustix::io::read(resized, &mut [0; 8]);
                    self.target.sizes_changed();
                }
            }
            token if token as usize <= self.newcomers.len() => self.ready.push(token),
            // Tokens of discovery connections; their completions are on the ring.
            _ => {}
        }
    }

    fn flush(&mut self) {
        self.flushing = true;
    }

    fn is_drained(&self) -> bool {
        true
    }
}
