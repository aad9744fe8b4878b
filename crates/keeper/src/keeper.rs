//! The keeper process: keeps descriptors, and a process that serves with them.
//!
//! The process has one thread and one `poll`. It never waits for the serving process, which may
//! stand still, be stopped in a debugger, or send anything.

use crate::arrival::{Facts, Sending, passed_name};
use crate::child::Serving;
use crate::packet;
use crate::restart::Pace;
use crate::signals::{Signals, UPGRADE, ends};
use crate::store::{Done, Kept, Store};
use crate::text::NO_UPGRADE;
use crate::upgrade::{Programs, Step, Upgrade};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::RecvFlags;
use rustix::process::{PidfdFlags, Signal, getpid, pidfd_open};
use rustix::time::{ClockId, clock_gettime};
use std::error::Error;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Messages that are handled between two looks at everything else.
const AT_ONCE: usize = 64;

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
pub struct Given {
    /// Name given by the service manager.
    pub name: String,
    /// The descriptor.
    pub fd: OwnedFd,
}

/// The keeper process.
pub struct Keeper<'a> {
    /// Programs that serve.
    pub programs: &'a mut dyn Programs,
    /// Most descriptors that are kept.
    pub most: usize,
    /// Descriptors that a service manager has opened.
    pub given: Vec<Given>,
    /// A socket that is connected to the service manager, if there is one.
    pub manager: Option<OwnedFd>,
}

/// End of the keeper process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this exit code.
    Code(u8),
    /// By this signal.
    Signal(i32),
    /// No process could be ended in order: data that was not flushed may not be durable.
    NotDurable,
}

/// Why there is no keeper.
#[derive(Debug, thiserror::Error)]
pub enum KeepFailed {
    /// A system call failed.
    #[error("{0}")]
    System(&'static str, #[source] io::Error),
    /// The process could not be confined as its caller wants it.
    #[error("the process cannot be confined")]
    Confine(#[source] Box<dyn Error + Send + Sync>),
}

struct Running<'a> {
    keeper: Keeper<'a>,
    upgrade: Upgrade,
    given: Vec<Kept>,
    store: Store,
    signals: Signals,
    pace: Pace,
    facts: Facts,
    serving: Option<Serving>,
    /// When the next serving process is started, while there is none.
    next_start: Instant,
    /// A serving process has been ready.
    has_served: bool,
    /// Somebody has asked for an upgrade, which begins when a process serves.
    upgrade_asked: bool,
    /// And not before.
    next_upgrade: Instant,
    /// The serving process has asked for the upgrade, and is to be notified of a refusal.
    tells_refusal: bool,
    /// The first signal that asked for the end.
    ordered: Option<Signal>,
    /// Signal that is passed on when a process serves that can make everything durable.
    held: Option<Signal>,
}

impl Keeper<'_> {
    /// Keeps and restarts until the serving process ends because it was to. `confine` is called
    /// before the first one is started.
    ///
    /// # Errors
    /// [`KeepFailed`]: nothing is served.
    pub fn run(
        self,
        confine: impl FnOnce() -> Result<(), Box<dyn Error + Send + Sync>>,
    ) -> Result<End, KeepFailed> {
        let signals = Signals::new().map_err(|error| KeepFailed::System("signals", error))?;
        confine().map_err(KeepFailed::Confine)?;
        let mut running = Running {
            store: Store::new(self.most),
            given: Vec::new(),
            keeper: self,
            upgrade: Upgrade::default(),
            signals,
            pace: Pace::default(),
            facts: Facts::default(),
            serving: None,
            next_start: Instant::now(),
            has_served: false,
            upgrade_asked: false,
            next_upgrade: Instant::now(),
            tells_refusal: false,
            ordered: None,
            held: None,
        };
        let given = std::mem::take(&mut running.keeper.given).into_iter();
        let given = given.map(|given| Kept {
            name: passed_name(&given.name),
            fd: Rc::new(given.fd),
        });
        running.given = given.collect();
        running.run()
    }
}

impl Running<'_> {
    fn run(&mut self) -> Result<End, KeepFailed> {
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
        if kept.is_empty() {
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

    /// Waits until there is something to do, and does it.
    fn step(&mut self) -> Result<Option<End>, KeepFailed> {
        if self.serving.is_none()
            && Instant::now() >= self.next_start
            && let Some(end) = self.start()?
        {
            return Ok(Some(end));
        }
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
        self.read();
        self.ask_new();
        if self.has_served_now()
            && let Some(signal) = self.held.take()
            && let Some(serving) = &self.serving
        {
            serving.signal(signal);
        }
        self.upgrade();
        let ended = match &mut self.serving {
            Some(serving) => serving.ended().map_err(|e| KeepFailed::System("wait", e))?,
            // Data that the last process was to make durable cannot be flushed.
            None if self.ordered.is_some() && self.held.is_none() => {
                return Ok(Some(End::NotDurable));
            }
            None => None,
        };
        Ok(ended.and_then(|status| self.ended(status)))
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
        let timeout = end.map(|end| end.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(KeepFailed::System("poll", errno.into())),
        }
    }

    /// Starts a serving process. One that cannot be started counts as one that has ended.
    fn start(&mut self) -> Result<Option<End>, KeepFailed> {
        self.store.begin();
        let (kept, most) = (self.store.all(), self.store.most());
        let sending = Sending::new(&kept, &self.given, most, &self.facts);
        match Serving::start(self.keeper.programs, self.upgrade.which(), sending) {
            Ok(serving) => {
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

    /// Handles messages of the serving process, and sends those for it.
    fn read(&mut self) {
        let Some(serving) = &mut self.serving else {
            return;
        };
        for _ in 0..AT_ONCE {
            let Some(channel) = &serving.channel else {
                return;
            };
            if serving.sending.is_under_way() && serving.sending.go_on(channel.as_fd()).is_err() {
                serving.channel = None;
                return;
            }
            match packet::receive(channel.as_fd(), RecvFlags::DONTWAIT) {
                Ok(Some(packet)) => match self.store.handle(packet) {
                    Done::Tell(lines) => {
                        serving.is_ready |= lines.lines().any(|line| line == "READY=1");
                        let status = lines.lines().find_map(|line| line.strip_prefix("STATUS="));
                        serving.status = status.map(str::to_owned).or(serving.status.take());
                        tell(self.keeper.manager.as_ref(), &lines);
                    }
                    Done::Upgrade => {
                        self.upgrade_asked = true;
                        self.tells_refusal = true;
                    }
                    Done::Handled | Done::Refused => {}
                },
                Err(Errno::AGAIN) => return,
                Ok(None) | Err(_) => serving.channel = None,
            }
        }
    }

    /// The serving process has ended.
    fn ended(&mut self, status: ExitStatus) -> Option<End> {
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
        self.facts.how = Some(in_words(status));
        if self.ordered.is_none() && self.upgrade.ended(&mut self.facts.how) {
            self.facts.restarts = self.facts.restarts.saturating_add(1);
            self.next_start = Instant::now();
            return None;
        }
        if self.ordered.is_none() && self.upgrade.is_tried() && !was_ready {
            self.facts.restarts = self.facts.restarts.saturating_add(1);
            self.back(&status_text.unwrap_or_else(|| in_words(status)));
            return None;
        }
        match (status.code(), status.signal()) {
            (Some(code), _) if MEANT.contains(&code) => return Some(end_with(code)),
            // The process has found an error and reported it: another would find the same. But the
            // first one after one that has served may find something free a moment later.
            (Some(code @ ERROR), _) if was_ready || !self.has_served => {
                return Some(end_with(code));
            }
            (Some(code), _) if !self.has_served => return Some(end_with(code)),
            (_, Some(signal)) if self.ordered.is_some() || !self.has_served => {
                return Some(End::Signal(signal));
            }
            _ if self.ordered.is_some() => return Some(End::NotDurable),
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

impl Running<'_> {
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

    /// Logs that there is no upgrade, and notifies the requester.
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

    /// Continues an upgrade, as far as possible.
    fn upgrade(&mut self) {
        let now = Instant::now();
        let serves = self.has_served_now();
        match self.upgrade.advance(self.keeper.programs, serves, now) {
            Step::Nothing => {}
            Step::Refused(why) => self.refuse(&why),
            Step::Replace => {
                if let Some(serving) = &self.serving {
                    serving.signal(Signal::KILL);
                }
            }
            Step::Done => self.say("upgraded: the new program serves"),
            Step::Late => {
                if let Some(serving) = &self.serving {
                    serving.signal(Signal::KILL);
                }
            }
        }
    }

    /// Restores the previous program, because the new one does not serve.
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

/// Messages are left that have been sent.
fn is_readable(serving: &Serving) -> bool {
    let Some(channel) = &serving.channel else {
        return false;
    };
    let mut fds = [PollFd::new(channel, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok()
        && fds.iter().any(|fd| fd.revents().contains(PollFlags::IN))
}

fn tell(manager: Option<&OwnedFd>, lines: &str) {
    if let Some(manager) = manager {
        // The service manager will find out by itself.
        let _ = packet::send(manager.as_fd(), lines, &[]);
    }
}

fn end_with(code: i32) -> End {
    End::Code(u8::try_from(code).unwrap_or(u8::MAX))
}

fn in_words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (_, Some(signal)) => format!("signal {signal}"),
        (Some(code), _) => format!("exit code {code}"),
        _ => status.to_string(),
    }
}
