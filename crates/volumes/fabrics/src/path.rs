//! A path: a portal, and the thread that keeps a connection to a controller there.
//!
//! ```text
//! connect, identify --> an I/O queue for each worker's --> Keep Alive, events, new queues
//!      ^                                                        | lost: by the Admin queue,
//!      | pause, and time to connect, longer each time           | or a worker reports it
//!      `-- Ended: replay -- all connections closed, or the <----'
//!                           controller's keep-alive time is over
//! ```
//!
//! An association has certainly ended in one of two cases. Either the controller has closed all of
//! its connections, or it has received nothing for its keep-alive time-out plus the time that it
//! needs to end commands. Before that, outstanding commands may still be executed, so workers hold
//! them until [`PathMessage::Ended`].

use crate::connect::{ConnectError, Controller, ConversationError, Portal, Queue, connect_queue};
use crate::queue::{PathMessage, Ready};
use crate::shared::{CONNECT_LIMIT, SharedVolume};
use nvme::log::AnaState;
use nvme::{AdminOpcode, Command};
use remote::{LOG_INTERVAL, pause};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::Shutdown;
use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::{Unpoisoned, readiness};

/// Time limit of a reconnection attempt, unless earlier attempts took longer. While a cable is
/// unplugged, TCP retransmits at growing intervals (the first packet after 1, 3 and 7 s), so a new
/// attempt notices the replugged cable sooner.
const FIRST_ATTEMPT: Duration = Duration::from_secs(1);
/// Time limit for a controller to close a connection after this host has closed the sending side.
const CLOSING: Duration = Duration::from_secs(1);
/// Time limit for the orderly shutdown of a controller when the volume is closed.
const SHUT_DOWN: Duration = Duration::from_secs(2);
/// Interval between reads of the ANA state after a command has reported a changed one.
const STATE_LOOK: Duration = Duration::from_millis(100);

/// Path (portal) to a subsystem: state shared by the path's thread and the workers' queues.
#[derive(Debug)]
pub(crate) struct Path {
    pub portal: Portal,
    /// ANA state of the namespace on this path, as a number ([`AnaState`]).
    ana: AtomicU8,
    connected: AtomicBool,
    /// Controller through which the volume was opened, until the path's thread takes it.
    first: Mutex<Option<Controller>>,
    /// Whether a thread serves the path.
    served: AtomicBool,
    reports: Mutex<Vec<QueueReport>>,
    /// Eventfd that wakes the thread; `None` if it could not be created, so that the thread polls
    /// instead.
    wake: Option<OwnedFd>,
}

/// Report of a worker's queue to the thread that serves a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueReport {
    /// A connection of the association with this number has failed.
    Broken { epoch: u64, why: &'static str },
    /// The connection of the queue is closed, by the controller or by this host alone.
    Closed {
        epoch: u64,
        qid: u16,
        by_controller: bool,
    },
    /// A command has completed with a status that implies this ANA state.
    State(AnaState),
}

impl Path {
    pub(crate) fn new(portal: Portal) -> Self {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Self {
            portal,
            ana: AtomicU8::new(AnaState::CHANGE.0),
            connected: AtomicBool::new(false),
            first: Mutex::default(),
            served: AtomicBool::new(false),
            reports: Mutex::default(),
            wake: eventfd(0, flags).ok(),
        }
    }

    /// Sets the controller that the path's thread uses first.
    pub(crate) fn keep(&self, controller: Controller) {
        self.set_state(controller.ana);
        *self.first.lock().unpoisoned() = Some(controller);
    }

    pub(crate) fn state(&self) -> AnaState {
        AnaState(self.ana.load(Ordering::Relaxed))
    }

    fn set_state(&self, state: AnaState) {
        self.ana.store(state.0, Ordering::Relaxed);
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Sends a report to the thread that serves the path.
    pub(crate) fn report(&self, report: QueueReport) {
        if let QueueReport::State(state) = report {
            self.set_state(state);
        }
        self.reports.lock().unpoisoned().push(report);
        self.wake();
    }

    pub(crate) fn wake(&self) {
        if let Some(wake) = &self.wake {
            // The eventfd belongs to this process and is non-blocking. If its counter is full, it
            // is already signalled.
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
    }

    /// Starts the thread that serves the path, unless it runs.
    pub(crate) fn start(&self, shared: &Arc<SharedVolume>, number: usize) -> io::Result<()> {
        if self.served.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let shared = shared.clone();
        let started = remote::spawn("nvme-tcp", move || {
            let Some(path) = shared.paths.get(number) else {
                return;
            };
            let mut keeper = Keeper::new(&shared, path, number);
            loop {
                keeper.run();
                path.served.store(false, Ordering::SeqCst);
                // A user added meanwhile saw the path as served.
                if !shared.is_used() || path.served.swap(true, Ordering::SeqCst) {
                    return;
                }
            }
        });
        if started.is_err() {
            self.served.store(false, Ordering::SeqCst);
        }
        started
    }

    /// Waits until the thread is woken, the Admin queue is readable, or `limit` has passed.
    fn wait(&self, admin: Option<&OwnedFd>, limit: Duration) {
        let timeout = Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        let fds = [self.wake.as_ref(), admin];
        let fds = fds.into_iter().flatten();
        let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let _ = poll(&mut fds, Some(&timeout));
        if let Some(wake) = &self.wake {
            let _ = rustix::io::read(wake, &mut [0; 8]);
        }
    }
}

/// Reason why an association with a controller has ended.
#[derive(Debug, thiserror::Error)]
enum AssociationError {
    #[error(transparent)]
    Trouble(#[from] ConversationError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("an I/O queue: {0}")]
    Queue(&'static str),
    #[error("the volume is closed")]
    Unused,
}

/// State of the thread that serves a path.
struct Keeper<'a> {
    shared: &'a SharedVolume,
    path: &'a Path,
    number: usize,
    /// Number of the present association with a controller, counted from 1.
    epoch: u64,
    /// Identifiers of queues that were created in this association. They are not created again,
    /// even after their worker has left.
    made: HashSet<u16>,
    /// Identifiers of those queues in `made` that have an open connection.
    open: HashSet<u16>,
    /// Whether all closed connections were closed by the controller.
    by_controller: bool,
    /// ANA state that was read last. The path may have a newer one, which a command reported.
    looked_at: AnaState,
}

impl<'a> Keeper<'a> {
    fn new(shared: &'a SharedVolume, path: &'a Path, number: usize) -> Self {
        Self {
            shared,
            path,
            number,
            epoch: 0,
            made: HashSet::new(),
            open: HashSet::new(),
            by_controller: true,
            looked_at: AnaState::CHANGE,
        }
    }
}

impl Keeper<'_> {
    fn run(&mut self) {
        let mut failures = 0;
        let mut attempts = Attempts::default();
        let mut said: Option<Instant> = None;
        let mut began = Instant::now();
        while self.shared.is_used() {
            let first = self.path.first.lock().unpoisoned().take();
            let is_first = first.is_some();
            let made = match first {
                Some(controller) => Ok(controller),
                None => {
                    self.rest(pause(failures));
                    if !self.shared.is_used() {
                        break;
                    }
                    let began = Instant::now();
                    let made = self.shared.connect(&self.path.portal, attempts.limit());
                    attempts.note(made.is_ok(), began.elapsed());
                    made
                }
            };
            let controller = match made {
                Ok(controller) => controller,
                Err(error) => {
                    failures += 1;
                    if said.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
                        said = Some(Instant::now());
                        tracing::warn!("{error}; retrying until it answers");
                    }
                    continue;
                }
            };
            let up = Instant::now();
            // The controller through which the volume was opened existed before this thread.
            let away = (!is_first).then(|| began.elapsed());
            let why = self.keep(controller, away);
            if matches!(why, AssociationError::Unused) {
                break;
            }
            self.shared.has_lost(self.number, &why);
            // A path that is lost right after connecting is not reconnected at once.
            failures = match up.elapsed() {
                kept if kept >= Duration::from_secs(1) => 1,
                _ => failures + 1,
            };
            (said, began) = (None, Instant::now());
        }
    }

    /// Sleeps for `time`, or until the volume is closed.
    fn rest(&self, time: Duration) {
        let now = Instant::now();
        let until = now.checked_add(time).unwrap_or(now);
        while self.shared.is_used() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.path.wait(None, left);
        }
    }

    /// Keeps an association alive until it ends. `away` is the time without a connection before it.
    fn keep(&mut self, mut controller: Controller, away: Option<Duration>) -> AssociationError {
        self.epoch += 1;
        self.made.clear();
        self.open.clear();
        self.by_controller = true;
        self.looked_at = controller.ana;
        self.path.set_state(controller.ana);
        let portal = &self.path.portal.place;
        let after = away.map_or_else(String::new, |away| format!(" after {away:.1?}"));
        self.shared.log.connected.line(|left_out| {
            tracing::info!(
                left_out,
                "{}: connected by {portal}{after} (controller {:#x}, {})",
                self.shared.subsystem,
                controller.cntlid,
                controller.ana
            );
        });
        let why = match self.serve(&mut controller) {
            Ok(never) => match never {},
            Err(why) => why,
        };
        self.path.connected.store(false, Ordering::Relaxed);
        self.path.set_state(AnaState::CHANGE);
        self.end(controller, &why);
        why
    }

    fn serve(
        &mut self,
        controller: &mut Controller,
    ) -> Result<std::convert::Infallible, AssociationError> {
        let kato = controller.kato;
        let interval = kato / 4;
        let mut keep_alive: Option<(u16, Instant)> = None;
        let mut sent = Instant::now();
        let mut looked: Option<Instant> = None;
        let mut changed = false;
        loop {
            if !self.shared.is_used() {
                return Err(AssociationError::Unused);
            }
            let mut broken = None;
            // All reports are handled, because a queue reports the end of its connection only once.
            for report in std::mem::take(&mut *self.path.reports.lock().unpoisoned()) {
                match report {
                    QueueReport::Broken { epoch, why } if epoch == self.epoch => broken = Some(why),
                    QueueReport::Broken { .. } => {}
                    QueueReport::State(_) => changed = true,
                    QueueReport::Closed {
                        epoch,
                        qid,
                        by_controller,
                    } => self.note_closed(epoch, qid, by_controller),
                }
            }
            if let Some(why) = broken {
                return Err(AssociationError::Queue(why));
            }
            self.make_queues(controller)?;
            self.path.connected.store(true, Ordering::Relaxed);
            let now = Instant::now();
            let deadline = now.checked_add(kato / 2).unwrap_or(now);
            controller.client.set_deadline(deadline);
            if changed && looked.is_none_or(|at| now.duration_since(at) >= STATE_LOOK) {
                (changed, looked) = (false, Some(now));
                self.look(controller)?;
            }
            // Without an answer for half of the keep-alive time-out the controller is considered
            // lost.
            match keep_alive {
                Some((cid, at)) => {
                    if controller.client.take(cid).is_some() {
                        keep_alive = None;
                    } else if now.duration_since(at) >= kato / 2
                        // An answer that arrived while this thread did not run is handled first.
                        && !is_readable(controller.client.fd())
                    {
                        return Err(ConversationError::Silent.into());
                    }
                }
                None if now.duration_since(sent) >= interval => {
                    let command = Command::new(AdminOpcode::KEEP_ALIVE.0, 0, 0);
                    keep_alive = Some((controller.client.begin(command)?, now));
                    sent = now;
                }
                None => {}
            }
            let next = match keep_alive {
                Some((_, at)) => (kato / 2).saturating_sub(now.duration_since(at)),
                None => interval.saturating_sub(now.duration_since(sent)),
            };
            let next = if changed { next.min(STATE_LOOK) } else { next };
            self.path.wait(Some(controller.client.fd()), next);
            if is_readable(controller.client.fd()) {
                controller.client.receive()?;
            }
            if controller.handle_events()? {
                self.look(controller)?;
            }
        }
    }

    /// Reads the size and the ANA state of the namespace again.
    fn look(&mut self, controller: &mut Controller) -> Result<(), AssociationError> {
        let size = controller.read_size()?;
        // A temporarily unavailable namespace keeps its size, because it may return.
        if size > 0 {
            self.shared.set_size(size);
        }
        controller.read_ana()?;
        let state = controller.ana;
        let found = self.path.state();
        self.path.set_state(state);
        let before = std::mem::replace(&mut self.looked_at, state);
        if state != found {
            self.shared.tell_all(&PathMessage::Look);
        }
        if state != before {
            self.shared.log.states.line(|left_out| {
                let (subsystem, portal) = (&self.shared.subsystem, &self.path.portal.place);
                tracing::info!(left_out, "{subsystem}: {state} by {portal} (was {before})");
            });
        }
        Ok(())
    }

    /// Creates the I/O queues that workers need and that do not exist yet.
    fn make_queues(&mut self, controller: &Controller) -> Result<(), AssociationError> {
        let each = usize::from(self.shared.options.queues.max(1));
        for (place, inbox) in self.shared.queues() {
            for link in 0..each {
                let qid = place.saturating_mul(each).saturating_add(link + 1);
                let qid = u16::try_from(qid).unwrap_or(u16::MAX);
                if self.made.contains(&qid) {
                    continue;
                }
                if qid > controller.queues {
                    self.made.insert(qid);
                    self.shared.log.queues.line(|left_out| {
                        let portal = &self.path.portal.place;
                        let most = controller.queues;
                        tracing::error!(
                            left_out,
                            "{portal}: the controller permits this host only {most} I/O queues; \
                             worker queue {place} has none on this path"
                        );
                    });
                    continue;
                }
                let ready = self.make_queue(controller, qid)?;
                self.made.insert(qid);
                self.open.insert(qid);
                self.shared.has_path();
                inbox.put(PathMessage::Ready {
                    path: self.number,
                    link,
                    ready,
                });
            }
        }
        Ok(())
    }

    fn make_queue(&self, controller: &Controller, qid: u16) -> Result<Ready, AssociationError> {
        let now = Instant::now();
        let limit = CONNECT_LIMIT.min(controller.kato / 2);
        let deadline = now.checked_add(limit).unwrap_or(now);
        // A queue of N entries holds N - 1 commands.
        let depth = u32::from(self.shared.options.depth);
        let entries = (depth + 1).min(controller.entries).max(2);
        let queue = Queue {
            qid,
            entries,
            cntlid: controller.cntlid,
            kato: Duration::ZERO,
        };
        let (client, _) = connect_queue(&self.path.portal, queue, deadline)?;
        let limits = client.limits();
        Ok(Ready {
            limits,
            epoch: self.epoch,
            qid,
            depth: u16::try_from(entries - 1).unwrap_or(u16::MAX),
            in_capsule: controller.in_capsule,
            fd: client.into_fd().map_err(AssociationError::Trouble)?,
        })
    }

    fn note_closed(&mut self, epoch: u64, qid: u16, by_controller: bool) {
        if epoch == self.epoch && self.open.remove(&qid) {
            self.by_controller &= by_controller;
        }
    }

    /// Closes an association. The workers are notified when the controller certainly executes no
    /// more of its commands.
    fn end(&mut self, mut controller: Controller, why: &AssociationError) {
        let epoch = self.epoch;
        let (path, number) = (self.path, self.number);
        self.shared.tell_all(&PathMessage::Broken {
            path: number,
            epoch,
        });
        let began = Instant::now();
        let until = began.checked_add(CLOSING).unwrap_or(began);
        let mut admin_closed =
            matches!(why, AssociationError::Trouble(trouble) if trouble.is_closed());
        if matches!(why, AssociationError::Unused) {
            let until = began.checked_add(SHUT_DOWN).unwrap_or(began);
            controller.client.set_deadline(until);
            if let Err(error) = controller.shut_down() {
                tracing::debug!("{}: shutdown: {error}", path.portal.place);
            }
        }
        if !admin_closed {
            let _ = rustix::net::shutdown(controller.client.fd(), Shutdown::Write);
        }
        loop {
            for report in std::mem::take(&mut *path.reports.lock().unpoisoned()) {
                if let QueueReport::Closed {
                    epoch,
                    qid,
                    by_controller,
                } = report
                {
                    self.note_closed(epoch, qid, by_controller);
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || (self.open.is_empty() && admin_closed) {
                break;
            }
            if self.shared.queues().is_empty() {
                // No queue is waited for any more.
                self.open.clear();
            }
            let admin = (!admin_closed).then(|| controller.client.fd());
            path.wait(admin, left);
            controller.client.set_deadline(Instant::now());
            if !admin_closed && is_readable(controller.client.fd()) {
                let received = controller.client.receive();
                admin_closed = received.is_err_and(|trouble| trouble.is_closed());
            }
        }
        let closed = self.open.is_empty() && self.by_controller && admin_closed;
        let lingers = controller.lingers;
        let quiesces = controller.quiesces;
        // Closing drops everything that was not sent.
        drop(controller);
        let now = Instant::now();
        let after = if closed { quiesces } else { lingers };
        tracing::debug!(epoch, closed, ?after, "{}: ended", path.portal.place);
        self.shared.tell_all(&PathMessage::Ended {
            path: number,
            epoch,
            at: now.checked_add(after).unwrap_or(now),
        });
    }
}

/// Time limits of attempts to connect, adapted to the duration of previous ones.
#[derive(Debug, Default)]
struct Attempts {
    /// Duration of the last successful attempt to connect.
    usual: Duration,
    /// Number of attempts in a row that have timed out.
    silent: u32,
}

impl Attempts {
    /// Returns the time limit of the next attempt: twice the duration of the last successful
    /// attempt, but at least [`FIRST_ATTEMPT`], doubled for each attempt that timed out.
    fn limit(&self) -> Duration {
        let first = FIRST_ATTEMPT.max(self.usual.saturating_mul(2));
        let times = 1u32 << self.silent.min(16);
        first.saturating_mul(times).min(CONNECT_LIMIT)
    }

    /// Records the end of an attempt. A refused attempt tells nothing about the time that the next
    /// one needs.
    fn note(&mut self, made: bool, took: Duration) {
        if made {
            (self.usual, self.silent) = (took, 0);
        } else if took >= self.limit() {
            self.silent = self.silent.saturating_add(1);
        }
    }
}

/// Returns whether the socket has bytes to receive.
fn is_readable(fd: &OwnedFd) -> bool {
    !readiness(fd, PollFlags::IN).is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_limit_grows_after_silence() {
        let mut attempts = Attempts::default();
        let limits: Vec<u64> = (0..6)
            .map(|_| {
                let limit = attempts.limit();
                attempts.note(false, limit);
                limit.as_secs()
            })
            .collect();
        assert_eq!(limits, [1, 2, 4, 8, 10, 10]);
        // The attempt is refused at once.
        attempts.note(true, Duration::from_millis(5));
        attempts.note(false, Duration::from_millis(1));
        assert_eq!(attempts.limit(), FIRST_ATTEMPT);
    }

    #[test]
    fn slow_controller_keeps_longer_connect_limit() {
        let mut attempts = Attempts::default();
        attempts.note(false, FIRST_ATTEMPT);
        attempts.note(true, Duration::from_millis(1500));
        assert_eq!(attempts.limit(), Duration::from_secs(3));
        attempts.note(true, Duration::from_secs(9));
        assert_eq!(attempts.limit(), CONNECT_LIMIT);
        attempts.note(true, Duration::from_millis(2));
        assert_eq!(attempts.limit(), FIRST_ATTEMPT);
    }
}
