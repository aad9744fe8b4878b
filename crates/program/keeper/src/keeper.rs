//! The keeper process: keeps descriptors, and a process that serves with them.
//!
//! The process has one thread and one `poll`. It never waits for the serving process, which may
//! stand still, be stopped in a debugger, or send anything.

use crate::child::{Ended, Serving};
use crate::handover::{ArrivalError, HandoverSender, RestartHistory, Transfer, passed_name};
use crate::packet;
use crate::restart::Pace;
use crate::resume::{ResumeError, State, Written};
use crate::signals::{Signals, UPGRADE, ends};
use crate::standby::{Backup, News, next, succeeds};
use crate::store::{KeptDescriptor, MessageResult, Store};
use crate::text::{KEEPER, NO_UPGRADE};
use crate::upgrade::{Programs, Upgrade, UpgradeStep};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::RecvFlags;
use rustix::process::{PidfdFlags, Signal, getpid, pidfd_open};
use rustix::time::{ClockId, clock_gettime};
use std::error::Error;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};
use sync::readiness;

/// Messages that are handled between two looks at everything else.
const MAX_MESSAGE_BATCH: usize = 64;

/// Between the beginnings of two upgrades: a serving process that a client has taken over may ask
/// again and again, and has no more of the machine by that.
const UPGRADE_REST: Duration = Duration::from_secs(1);

/// Exit codes of a serving process that was meant to end. All other codes, and signals, are errors
/// of its own, after which the next one takes its place.
const MEANT: [i32; 3] = [0, 2, 3];
/// Exit code of a process that could not start, or that has found an error.
const ERROR: i32 = 1;

/// A descriptor that a service manager has opened for the keeper process: the serving one gets it
/// each time.
#[derive(Debug)]
pub struct PassedDescriptor {
    /// Name that the service manager has given the descriptor.
    pub name: String,
    /// Descriptor that the service manager has opened.
    pub fd: OwnedFd,
}

/// Configuration of a keeper process.
pub struct Keeper<'a> {
    /// Programs from which serving processes are started.
    pub programs: &'a mut dyn Programs,
    /// Maximum number of descriptors that are kept.
    pub most: usize,
    /// Descriptors that a service manager has opened for the service.
    pub given: Vec<PassedDescriptor>,
    /// Socket that is connected to the service manager, if there is one.
    pub manager: Option<OwnedFd>,
    /// Whether no other process may become the keeper after this one.
    pub is_last: bool,
}

/// How the keeper process is to end after the last serving process: with the same exit code, or by
/// the same signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeeperExit {
    /// Exit with this code.
    Code(u8),
    /// End by this signal.
    Signal(i32),
    /// No process could be ended in order: data that was not flushed may not be durable.
    NotDurable,
}

/// Reason why a keeper process could not begin.
#[derive(Debug, thiserror::Error)]
pub enum KeepFailed {
    /// The named system call has failed.
    #[error("{0}")]
    System(&'static str, #[source] io::Error),
    /// The keeper process could not enter its sandbox.
    #[error("the process cannot be confined")]
    Confine(#[source] Box<dyn Error + Send + Sync>),
    /// The keeper that this process stands by for has not sent all that it keeps.
    #[error("the keeper")]
    StandBy(#[source] ArrivalError),
}

struct RunningKeeper<'a> {
    keeper: Keeper<'a>,
    upgrade: Upgrade,
    given: Vec<KeptDescriptor>,
    store: Store,
    signals: Signals,
    pace: Pace,
    facts: RestartHistory,
    serving: Option<Serving>,
    /// Time at which the next serving process is started, while there is none.
    next_start: Instant,
    /// Whether any serving process has been ready so far.
    has_served: bool,
    /// Whether an upgrade was requested, which begins when a process serves.
    upgrade_asked: bool,
    /// Earliest time at which a requested upgrade may begin.
    next_upgrade: Instant,
    /// The serving process has asked for the upgrade, and is to be notified of a refusal.
    tells_refusal: bool,
    /// First signal that has requested the end of the keeper.
    ordered: Option<Signal>,
    /// Signal that is held until a process serves, which can then make all data durable.
    held: Option<Signal>,
    /// Stand-by processes, one of which becomes the keeper if this process dies.
    backup: Backup,
    /// The program of this process is to be replaced by that of the serving process.
    replaces_itself: bool,
}

impl<'a> Keeper<'a> {
    /// Keeps and restarts until the serving process ends because it was to. `confine` is called
    /// before the first one is started.
    ///
    /// # Errors
    /// [`KeepFailed`]: nothing is served.
    pub fn run(
        self,
        confine: impl FnOnce() -> Result<(), Box<dyn Error + Send + Sync>>,
    ) -> Result<KeeperExit, KeepFailed> {
        let mut running = self.begin()?;
        confine().map_err(KeepFailed::Confine)?;
        running.run()
    }

    /// Stands by for the keeper at the other end of `channel`: receives all that it keeps, and
    /// becomes the keeper when it ends without notice, and no other stand-by comes first. `None`:
    /// the keeper has ended in order.
    ///
    /// # Errors
    /// [`KeepFailed`].
    pub fn stand_by(
        self,
        channel: OwnedFd,
        confine: impl FnOnce() -> Result<(), Box<dyn Error + Send + Sync>>,
    ) -> Result<Option<KeeperExit>, KeepFailed> {
        let mut running = self.begin()?;
        confine().map_err(KeepFailed::Confine)?;
        let mut all = Transfer::receive(channel.as_fd()).map_err(KeepFailed::StandBy)?;
        let (mut channel, mut ahead) = (channel, all.ahead.take());
        let (mut behind, mut before) = (None, None);
        running.take_over(all);
        loop {
            match next(&channel) {
                News::Request(packet) => {
                    if let MessageResult::Tell(lines) = running.store.handle(packet)
                        && let Some(serving) = &mut running.serving
                    {
                        serving.told(&lines);
                    }
                }
                News::Serving(serving) => running.serving = Some(serving),
                News::Ended(facts) => {
                    running.serving = None;
                    running.facts = facts;
                }
                News::Before(pidfd) => before = Some(pidfd),
                News::Complete => before = None,
                News::Quit => {
                    // This process is the last one that closes what was kept.
                    while !matches!(next(&channel), News::Gone) {}
                    // The kernel closes all of it at the end of this process, standard output
                    // first: nobody waits for a close that takes long.
                    std::mem::forget(running);
                    return Ok(None);
                }
                News::Behind(pid, pidfd, socket) => behind = Some((pid, pidfd, socket)),
                // The first stand-by is the keeper now, or has ended, too.
                News::Gone => match ahead.take() {
                    Some(socket) => channel = socket,
                    None => break,
                },
            }
        }
        drop(channel);
        if let Some(before) = before
            && !succeeds(&before, running.serving.as_ref())
        {
            std::mem::forget(running);
            return Ok(None);
        }
        if let Some((pid, pidfd, socket)) = behind {
            running.backup.leave(pid, pidfd, socket);
        }
        running.promote();
        running.run().map(Some)
    }

    /// Continues as the keeper that this process was before its program was replaced. `state` and
    /// `open` were left by the program before, which has blocked signals: `unblock` is called when
    /// they are handled.
    ///
    /// # Errors
    /// [`ResumeError`]: the program before is to take its place again. The descriptors are open
    /// then.
    pub fn resume(
        self,
        state: BorrowedFd<'_>,
        open: Vec<OwnedFd>,
        unblock: impl FnOnce(),
    ) -> Result<Result<KeeperExit, KeepFailed>, (ResumeError, Vec<OwnedFd>)> {
        let state = State::read(state, open)?;
        crash::point!("keeper.resumed");
        let mut running = match self.begin() {
            Ok(running) => running,
            Err(error) => return Ok(Err(error)),
        };
        unblock();
        running.has_served = true;
        running.given = state.given;
        for kept in state.kept {
            running.store.enter(kept);
        }
        running.facts = state.facts;
        running.serving = Some(state.serving);
        running.next_upgrade = Instant::now() + UPGRADE_REST;
        // The stand-by of the program before stays until this program has one.
        if let Some((pid, channel)) = state.standby
            && let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty())
        {
            running.backup.leave(pid, pidfd, channel);
        }
        running.say("the keeper runs the new program, too");
        Ok(running.run())
    }

    fn begin(self) -> Result<RunningKeeper<'a>, KeepFailed> {
        let signals = Signals::new().map_err(|error| KeepFailed::System("signals", error))?;
        let mut running = RunningKeeper {
            store: Store::new(self.most),
            given: Vec::new(),
            keeper: self,
            upgrade: Upgrade::default(),
            signals,
            pace: Pace::default(),
            facts: RestartHistory::default(),
            serving: None,
            next_start: Instant::now(),
            has_served: false,
            upgrade_asked: false,
            next_upgrade: Instant::now(),
            tells_refusal: false,
            ordered: None,
            held: None,
            backup: Backup::default(),
            replaces_itself: false,
        };
        let given = std::mem::take(&mut running.keeper.given).into_iter();
        let given = given.map(|given| KeptDescriptor {
            name: passed_name(&given.name),
            fd: Rc::new(given.fd),
        });
        running.given = given.collect();
        Ok(running)
    }
}

impl RunningKeeper<'_> {
    /// Takes over the descriptors and the history that another keeper has sent.
    fn take_over(&mut self, all: Transfer) {
        let kept = |(name, fd): (String, OwnedFd)| KeptDescriptor {
            name: name.into(),
            fd: Rc::new(fd),
        };
        self.given = all.given.into_iter().map(kept).collect();
        for one in all.kept.into_iter().map(kept) {
            self.store.enter(one);
        }
        self.facts = all.facts;
        // A keeper has a stand-by only when a process serves.
        self.has_served = true;
    }

    /// Makes this stand-by process the keeper, after the keeper has ended.
    fn promote(&mut self) {
        // Signals until now were meant for the other keeper.
        self.signals.take();
        let keeper = std::process::id();
        self.say(&format!(
            "the keeper has ended without notice, and another one goes on: process {keeper}"
        ));
        let Some(serving) = &self.serving else {
            return;
        };
        match &serving.channel {
            Some(channel) if serving.is_ready => {
                let _ = packet::send(channel.as_fd(), &format!("{KEEPER}{keeper}\n"), &[]);
            }
            // The process may wait for more of the other keeper. The next one gets all.
            _ => serving.signal(Signal::KILL),
        }
    }

    /// Starts a stand-by process, if one is missing and a process serves.
    fn start_backup(&mut self) {
        let Some(serving) = self.serving.as_ref().filter(|serving| serving.is_ready) else {
            return;
        };
        let is_busy = self.ordered.is_some() || self.upgrade.is_under_way();
        if self.keeper.is_last || is_busy || !self.backup.is_wanted() {
            return;
        }
        let (kept, most) = (self.store.all(), self.store.most());
        let sending = HandoverSender::new(&kept, &self.given, most, &self.facts);
        let programs = &mut *self.keeper.programs;
        if let Err(error) = self.backup.start(programs, sending, serving) {
            self.say(&format!("there is no stand-by for the keeper: {error}"));
        }
    }

    /// Replaces the program of this process by that of the serving process, after an upgrade.
    fn replace(&mut self) {
        let is_upgraded = !self.upgrade_asked && !self.upgrade.is_under_way();
        let is_quiet = is_upgraded && self.ordered.is_none() && self.backup.is_complete();
        let Some(serving) = &self.serving else {
            return;
        };
        if !self.replaces_itself || !is_quiet || serving.sending.is_under_way() {
            return;
        }
        self.replaces_itself = false;
        // The new program takes one stand-by over.
        self.backup.leave_first();
        let kept = self.store.all();
        let standby = self.backup.place();
        let written = Written::new(&self.given, &kept, &self.facts, serving, standby);
        let error = match &written {
            Ok(state) => {
                let may_go = Box::new(self.signals.quiet());
                let (state, last) = (state.file.as_fd(), state.last);
                self.keeper.programs.replace(state, last, may_go)
            }
            Err(error) => io::Error::new(error.kind(), error.to_string()),
        };
        drop(written);
        if error.kind() == io::ErrorKind::Interrupted {
            // A signal is handled first.
            self.replaces_itself = true;
            return;
        }
        self.say(&format!(
            "the keeper goes on with the program before: {error}"
        ));
    }
}

impl RunningKeeper<'_> {
    fn run(&mut self) -> Result<KeeperExit, KeepFailed> {
        let end = loop {
            match self.step() {
                Ok(None) => {}
                Ok(Some(end)) => break Ok(end),
                Err(error) => break Err(error),
            }
        };
        self.leave();
        end
    }

    /// Has another process close the kept descriptors. In a socket's queue there may be a
    /// descriptor whose close lasts as long as its sender likes (`SO_LINGER`), and the end of this
    /// process is waited for. The last process to close one waits: that process outlives this one.
    fn leave(&mut self) {
        let kept = self.store.all();
        // The stand-by closes what it keeps after the end of this process.
        if self.backup.dismiss() || kept.is_empty() {
            return;
        }
        for kept in &kept {
            // A descriptor for which this fails is closed here.
            let _ = fcntl_setfd(&*kept.fd, FdFlags::empty());
        }
        let this = pidfd_open(getpid(), PidfdFlags::empty()).map_err(io::Error::from);
        let started = this.and_then(|this| self.keeper.programs.start_last(this));
        if let Err(error) = started {
            self.say(&format!(
                "nobody closes what is kept but this process: {error}"
            ));
        }
    }

    /// Waits for the next event and handles it. Returns the result when the keeper ends.
    fn step(&mut self) -> Result<Option<KeeperExit>, KeepFailed> {
        if self.serving.is_none()
            && Instant::now() >= self.next_start
            && let Some(end) = self.start()?
        {
            return Ok(Some(end));
        }
        self.start_backup();
        self.wait()?;
        for signal in self.signals.take() {
            if signal == UPGRADE {
                self.upgrade_asked = true;
                continue;
            }
            if ends(signal) && self.order(signal) {
                continue;
            }
            if let Some(serving) = &self.serving {
                serving.signal(signal);
            }
        }
        self.backup.go_on();
        self.read();
        self.ask_new();
        if self.has_served_now()
            && let Some(signal) = self.held.take()
            && let Some(serving) = &self.serving
        {
            serving.signal(signal);
        }
        self.upgrade();
        self.replace();
        let ended = match &self.serving {
            Some(serving) => {
                let ended = serving.ended();
                ended.map_err(|errno| KeepFailed::System("wait", errno.into()))?
            }
            // Data that the last process was to make durable cannot be flushed.
            None if self.ordered.is_some() && self.held.is_none() => {
                return Ok(Some(KeeperExit::NotDurable));
            }
            None => None,
        };
        Ok(ended.and_then(|end| self.ended(end)))
    }

    /// Handles a signal that asks for the end. `true`: it waits until the next process serves,
    /// which can make the last one's data durable; a further signal does not wait.
    fn order(&mut self, signal: Signal) -> bool {
        let is_first = self.ordered.is_none();
        self.ordered.get_or_insert(signal);
        let waits = is_first && self.has_served && !self.has_served_now();
        self.held = waits.then_some(signal);
        waits
    }

    fn wait(&self) -> Result<(), KeepFailed> {
        let signals = self.signals.fd();
        let mut fds = vec![PollFd::from_borrowed_fd(signals, PollFlags::IN)];
        let mut end = self.upgrade.watch(&mut fds);
        match &self.serving {
            Some(serving) => serving.watch(&mut fds),
            None => end = Some(end.map_or(self.next_start, |end| end.min(self.next_start))),
        }
        if self.may_upgrade() {
            end = Some(end.map_or(self.next_upgrade, |end| end.min(self.next_upgrade)));
        }
        if let Some(start) = self.backup.watch(&mut fds) {
            end = Some(end.map_or(start, |end| end.min(start)));
        }
        let timeout = end.map(|end| end.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(KeepFailed::System("poll", errno.into())),
        }
    }

    /// Starts a serving process. One that cannot be started counts as one that has ended.
    fn start(&mut self) -> Result<Option<KeeperExit>, KeepFailed> {
        self.store.begin();
        self.backup.ended(&self.facts);
        let (kept, most) = (self.store.all(), self.store.most());
        let sending = HandoverSender::new(&kept, &self.given, most, &self.facts);
        match Serving::start(self.keeper.programs, self.upgrade.which(), sending) {
            Ok(serving) => {
                if let Err(error) = self.backup.serves(&serving) {
                    self.say(&format!("the stand-by of the keeper: {error}"));
                }
                self.serving = Some(serving);
                Ok(None)
            }
            Err(error) if self.upgrade.is_tried() => {
                self.back(&format!("it could not be started: {error}"));
                Ok(None)
            }
            Err(error) if !self.has_served => Err(KeepFailed::System("start", error)),
            Err(error) => {
                self.facts.how = Some(format!("it could not be started: {error}"));
                self.start_later(false);
                Ok(None)
            }
        }
    }

    /// Handles messages of the serving process, and sends those that wait for it.
    fn read(&mut self) {
        let Some(serving) = &mut self.serving else {
            return;
        };
        for _ in 0..MAX_MESSAGE_BATCH {
            let Some(channel) = &serving.channel else {
                return;
            };
            if serving.sending.is_under_way() && serving.sending.go_on(channel.as_fd(), 0).is_err()
            {
                serving.channel = None;
                return;
            }
            // The stand-by has a message before this process takes it.
            if self.backup.is_there() {
                let peeked =
                    packet::receive(channel.as_fd(), RecvFlags::DONTWAIT | RecvFlags::PEEK);
                if let Ok(Some(packet)) = peeked {
                    self.backup.forward(packet);
                    crash::point!("keeper.forwarded");
                }
            }
            match packet::receive(channel.as_fd(), RecvFlags::DONTWAIT) {
                Ok(Some(packet)) => match self.store.handle(packet) {
                    MessageResult::Tell(lines) => {
                        serving.told(&lines);
                        tell(self.keeper.manager.as_ref(), &lines);
                    }
                    MessageResult::Upgrade => {
                        self.upgrade_asked = true;
                        self.tells_refusal = true;
                    }
                    MessageResult::Handled | MessageResult::Refused => {}
                },
                Err(Errno::AGAIN) => return,
                Ok(None) | Err(_) => serving.channel = None,
            }
        }
    }

    /// Handles the end of the serving process. Returns the result when the keeper ends, too.
    fn ended(&mut self, end: Ended) -> Option<KeeperExit> {
        // Messages that it has sent before its end count.
        while self.serving.as_ref().is_some_and(is_readable) {
            self.read();
        }
        let serving = self.serving.take();
        let was_ready = serving.as_ref().is_some_and(|serving| serving.is_ready);
        let status_text = serving.and_then(|serving| serving.status);
        self.tells_refusal = false;
        self.has_served |= was_ready;
        let ended = clock_gettime(ClockId::Monotonic);
        self.facts.ended_at = Duration::try_from(ended).ok();
        self.facts.how = Some(in_words(end));
        if self.ordered.is_none() && self.upgrade.ended(&mut self.facts.how) {
            self.facts.restarts = self.facts.restarts.saturating_add(1);
            self.next_start = Instant::now();
            return None;
        }
        if self.ordered.is_none() && self.upgrade.is_tried() && !was_ready {
            self.facts.restarts = self.facts.restarts.saturating_add(1);
            self.back(&status_text.unwrap_or_else(|| in_words(end)));
            return None;
        }
        match end {
            Ended::Code(code) if MEANT.contains(&code) => return Some(end_with(code)),
            // The process has found an error and reported it: another would find the same. But the
            // first one after one that has served may find something free a moment later.
            Ended::Code(code @ ERROR) if was_ready || !self.has_served => {
                return Some(end_with(code));
            }
            Ended::Code(code) if !self.has_served => return Some(end_with(code)),
            Ended::Signal(signal) if self.ordered.is_some() || !self.has_served => {
                return Some(KeeperExit::Signal(signal));
            }
            _ if self.ordered.is_some() => return Some(KeeperExit::NotDurable),
            _ => {}
        }
        self.start_later(was_ready);
        None
    }

    fn start_later(&mut self, was_ready: bool) {
        let now = Instant::now();
        let pause = self.pace.ended(was_ready, now);
        self.facts.restarts = self.facts.restarts.saturating_add(1);
        self.facts.failures = self.pace.failures();
        self.next_start = now + pause;
        self.backup.ended(&self.facts);
        if !was_ready && !pause.is_zero() {
            let (failures, how) = (self.pace.failures(), self.facts.how.as_deref());
            self.say(&format!(
                "{failures} processes in a row have ended before they served ({}): the next one \
                 is started in {:.1} s",
                how.unwrap_or("nobody knows how"),
                pause.as_secs_f64()
            ));
        }
    }
}

impl RunningKeeper<'_> {
    /// Another program is to take the present one's place, if that was asked for: as soon as there
    /// is a process that serves, and no other upgrade.
    fn ask_new(&mut self) {
        if self.upgrade_asked && self.ordered.is_some() {
            self.upgrade_asked = false;
            return self.refuse("the end was asked for");
        }
        if !self.may_upgrade() || Instant::now() < self.next_upgrade {
            return;
        }
        self.upgrade_asked = false;
        self.next_upgrade = Instant::now() + UPGRADE_REST;
        if let Err(why) = self.upgrade.ask(self.keeper.programs) {
            self.refuse(&why);
        }
    }

    /// Returns whether a requested upgrade may begin; only the pause between upgrades may delay it.
    fn may_upgrade(&self) -> bool {
        self.upgrade_asked && self.has_served_now() && !self.upgrade.is_under_way()
    }

    /// Logs why an upgrade is impossible, and notifies the requester.
    fn refuse(&mut self, why: &str) {
        self.say(&format!("no upgrade: {why}"));
        let channel = self.serving.as_ref().and_then(|s| s.channel.as_ref());
        if std::mem::take(&mut self.tells_refusal)
            && let Some(channel) = channel
        {
            let why = why.replace('\n', " ");
            // Where there is no room, the requester gives up after its own limit.
            let _ = packet::send(channel.as_fd(), &format!("{NO_UPGRADE}{why}\n"), &[]);
        }
    }

    fn has_served_now(&self) -> bool {
        self.serving
            .as_ref()
            .is_some_and(|serving| serving.is_ready)
    }

    /// Advances the upgrade in progress as far as possible.
    fn upgrade(&mut self) {
        let now = Instant::now();
        let serves = self.has_served_now();
        match self.upgrade.advance(self.keeper.programs, serves, now) {
            UpgradeStep::Nothing => {}
            UpgradeStep::Refused(why) => self.refuse(&why),
            UpgradeStep::Replace => {
                if let Some(serving) = &self.serving {
                    serving.signal(Signal::KILL);
                }
            }
            UpgradeStep::Done => {
                self.say("upgraded: the new program serves");
                self.replaces_itself = true;
            }
            UpgradeStep::Late => {
                if let Some(serving) = &self.serving {
                    serving.signal(Signal::KILL);
                }
            }
        }
    }

    /// Returns to the previous program, because the new one does not serve.
    fn back(&mut self, why: &str) {
        self.upgrade.give_up(self.keeper.programs);
        let said = format!("no upgrade, and back to the program before: {why}");
        self.say(&said);
        self.facts.how = Some(said);
        self.next_start = Instant::now();
    }

    fn say(&mut self, text: &str) {
        self.keeper.programs.say(text);
    }
}

/// Returns whether the serving process has sent messages that were not read.
fn is_readable(serving: &Serving) -> bool {
    let channel = serving.channel.as_ref();
    channel.is_some_and(|channel| readiness(channel, PollFlags::IN).contains(PollFlags::IN))
}

fn tell(manager: Option<&OwnedFd>, lines: &str) {
    if let Some(manager) = manager {
        // The service manager will find out by itself.
        let _ = packet::send(manager.as_fd(), lines, &[]);
    }
}

fn end_with(code: i32) -> KeeperExit {
    KeeperExit::Code(u8::try_from(code).unwrap_or(u8::MAX))
}

fn in_words(end: Ended) -> String {
    match end {
        Ended::Signal(signal) => format!("signal {signal}"),
        Ended::Code(code) => format!("exit code {code}"),
        Ended::Unknown => "in a way that only the keeper before knew".to_owned(),
    }
}
