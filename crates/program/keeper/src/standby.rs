//! The stand-by: a second keeper process, with duplicates of all that the keeper keeps. If the
//! keeper ends without notice, the stand-by is the keeper, and starts another stand-by.
//!
//! The keeper forwards each message of the serving process to the stand-by before it takes the
//! message from the serving process's socket, which both processes have. So a message is forwarded,
//! or the stand-by finds it in the socket, whenever the keeper dies. A message may be handled
//! twice, which has the effect of once.
//!
//! The keeper waits for the stand-by with nothing. A stand-by that takes no messages for a while is
//! replaced.

use crate::child::Serving;
use crate::handover::{HandoverSender, RestartHistory, facts_in, facts_text};
use crate::packet::{self, Packet};
use crate::text::{self, Request};
use crate::upgrade::Programs;
use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Maximum number of messages that wait for a stand-by; one that falls behind further is replaced.
const MAX_WAITING: usize = 1024;
/// Pause between the end of a stand-by and the start of the next one.
const PAUSE: Duration = Duration::from_secs(1);

/// Name of the message that a serving process was started: its process ID, and whether it is ready.
const SERVING: &str = "SERVING=";
/// Message that the serving process has ended; the [`RestartHistory`] follows.
const ENDED: &str = "ENDED=1\n";
/// Message that the keeper ends in an orderly way.
const QUIT: &str = "QUIT=1\n";

/// Stand-by process that the keeper has started.
#[derive(Debug)]
struct Started {
    child: Child,
    channel: OwnedFd,
    sending: HandoverSender,
}

/// A stand-by that the program before has started. It stands by until another one has all that the
/// keeper keeps, and then ends.
#[derive(Debug)]
struct Left {
    pid: Pid,
    /// `None`: it was told to end.
    channel: Option<OwnedFd>,
    sending: HandoverSender,
}

impl Left {
    /// Sends as much as there is room for. Returns whether the process still runs.
    fn go_on(&mut self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let runs = matches!(waitid(WaitId::Pid(self.pid), options), Ok(None));
        if runs
            && let Some(channel) = &self.channel
            && (self.sending.go_on(channel.as_fd(), 0).is_err() || self.sending.len() > MAX_WAITING)
        {
            self.kill();
        }
        runs
    }

    /// Has the process end, because another one stands by.
    fn dismiss(&mut self) {
        if let Some(channel) = &self.channel
            && (self.sending.is_under_way() || packet::send(channel.as_fd(), QUIT, &[]).is_err())
        {
            self.kill();
        }
        self.channel = None;
    }

    /// A stand-by whose socket is closed without notice would become the keeper.
    fn kill(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
        self.channel = None;
    }
}

/// The keeper's side: a stand-by, or the time when the next one is started.
#[derive(Debug, Default)]
pub(crate) struct Backup {
    started: Option<Started>,
    next_start: Option<Instant>,
    left: Option<Left>,
}

impl Backup {
    /// Returns whether a stand-by process has to be started now.
    pub fn is_wanted(&self) -> bool {
        let is_late = |at: Instant| Instant::now() >= at;
        self.started.is_none() && self.next_start.is_none_or(is_late)
    }

    /// Returns whether the stand-by has received everything that was sent.
    pub fn is_complete(&self) -> bool {
        let started = self.started.as_ref();
        started.is_none_or(|started| !started.sending.is_under_way())
    }

    /// Starts a stand-by process; `sending` contains everything that the keeper holds.
    pub fn start(
        &mut self,
        programs: &mut dyn Programs,
        sending: HandoverSender,
        serving: &Serving,
    ) -> io::Result<()> {
        self.next_start = Some(Instant::now() + PAUSE);
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (channel, theirs) = pair?;
        let child = programs.start_standby(theirs)?;
        self.started = Some(Started {
            child,
            channel,
            sending,
        });
        self.serves(serving)
    }

    /// Tells the stand-by which serving process was started.
    pub fn serves(&mut self, serving: &Serving) -> io::Result<()> {
        let Some(channel) = &serving.channel else {
            return Ok(());
        };
        let fds = vec![
            Rc::new(channel.try_clone()?),
            Rc::new(serving.pidfd().try_clone_to_owned()?),
        ];
        let (pid, ready) = (serving.pid().as_raw_nonzero(), u8::from(serving.is_ready));
        self.push(format!("{SERVING}{pid}:{ready}\n"), fds);
        Ok(())
    }

    /// Tells the stand-by that the serving process has ended.
    pub fn ended(&mut self, facts: &RestartHistory) {
        self.push(format!("{ENDED}{}", facts_text(facts)), Vec::new());
    }

    /// Forwards a message of the serving process, which was not taken from its socket yet.
    pub fn forward(&mut self, packet: Packet) {
        let Packet { text, mut fds, cut } = packet;
        if cut || !self.is_there() {
            return;
        }
        let (text, fd) = match (text::parse(&text), fds.pop(), fds.is_empty()) {
            (Some(Request::Store(name)), Some(fd), true) => (text::store(name), Some(fd)),
            (Some(Request::Remove(name)), None, true) => (text::remove(name), None),
            (Some(Request::Tell(lines)), None, true) => (lines.join("\n") + "\n", None),
            // The keeper's own answer to a barrier counts. An upgrade is asked for again.
            _ => return,
        };
        self.push(text, fd.map(Rc::new).into_iter().collect());
    }

    fn push(&mut self, text: String, fds: Vec<Rc<OwnedFd>>) {
        if let Some(left) = self.left.as_mut().filter(|left| left.channel.is_some()) {
            left.sending.push(text.clone(), fds.clone());
        }
        if let Some(started) = &mut self.started {
            started.sending.push(text, fds);
            if started.sending.len() > MAX_WAITING {
                self.replace();
            }
        }
        self.go_on();
    }

    /// Ends the stand-by process; another one is started later.
    fn replace(&mut self) {
        if let Some(mut started) = self.started.take() {
            let _ = started.child.kill();
            let _ = started.child.wait();
        }
        self.next_start = Some(Instant::now() + PAUSE);
    }

    /// Sends as much as there is room for, and notices the end of the stand-by.
    pub fn go_on(&mut self) {
        let mut left = self.left.take();
        if left.as_mut().is_some_and(|left| !left.go_on()) {
            left = None;
        }
        let Some(started) = &mut self.started else {
            self.left = left;
            return;
        };
        // The one that was left ends before the other one has the last message: of two complete
        // stand-bys, both would become the keeper.
        let stands_by = left.as_ref().is_some_and(|left| left.channel.is_some());
        let mut sent = Ok(());
        if stands_by {
            sent = started.sending.go_on(started.channel.as_fd(), 1);
        }
        if sent.is_ok() && (!stands_by || started.sending.len() == 1) {
            left.iter_mut().for_each(Left::dismiss);
            sent = started.sending.go_on(started.channel.as_fd(), 0);
        }
        self.left = left;
        let has_ended = !matches!(started.child.try_wait(), Ok(None));
        if sent.is_err() || has_ended {
            self.replace();
        }
    }

    /// Returns whether a stand-by process exists.
    pub fn is_there(&self) -> bool {
        let left = self.left.as_ref();
        self.started.is_some() || left.is_some_and(|left| left.channel.is_some())
    }

    /// Returns the process ID and the socket of the stand-by.
    pub fn place(&self) -> Option<(Pid, BorrowedFd<'_>)> {
        let Some(started) = &self.started else {
            let left = self.left.as_ref()?;
            return Some((left.pid, left.channel.as_ref()?.as_fd()));
        };
        let pid = Pid::from_raw(started.child.id().try_into().ok()?)?;
        Some((pid, started.channel.as_fd()))
    }

    /// Keeps a stand-by that the program before has started, until this program has started one.
    pub fn leave(&mut self, pid: Pid, channel: OwnedFd) {
        self.left = Some(Left {
            pid,
            channel: Some(channel),
            sending: HandoverSender::default(),
        });
    }

    /// Adds the descriptor to wait for, and returns the time of the next start.
    pub fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) -> Option<Instant> {
        if let Some(left) = &self.left
            && let Some(channel) = left
                .channel
                .as_ref()
                .filter(|_| left.sending.is_under_way())
        {
            fds.push(PollFd::new(channel, PollFlags::OUT));
        }
        let Some(started) = &self.started else {
            // A start that is due waits for a process that serves.
            return self.next_start.filter(|at| *at > Instant::now());
        };
        let wanted = if started.sending.is_under_way() {
            PollFlags::OUT
        } else {
            PollFlags::empty()
        };
        fds.push(PollFd::new(&started.channel, wanted));
        None
    }

    /// Has the stand-by close all that it keeps when this process has ended. `false`: there is no
    /// stand-by that would.
    pub fn dismiss(&mut self) -> bool {
        self.push(QUIT.to_owned(), Vec::new());
        let left = self.left.take();
        let left = left.filter(|left| left.channel.is_some());
        let is_told = left.is_some_and(|mut left| {
            let is_told = !left.sending.is_under_way();
            if !is_told {
                left.kill();
            }
            is_told
        });
        match self.started.take() {
            Some(started) if !started.sending.is_under_way() => true,
            Some(mut started) => {
                let _ = started.child.kill();
                let _ = started.child.wait();
                is_told
            }
            None => is_told,
        }
    }
}

/// Message of the keeper that its stand-by has received.
#[derive(Debug)]
pub(crate) enum News {
    /// Request of the serving process that changes the kept descriptors.
    Request(Packet),
    /// A serving process was started.
    Serving(Serving),
    /// The serving process has ended.
    Ended(RestartHistory),
    /// The keeper ends in an orderly way, so the stand-by ends, too.
    Quit,
    /// The keeper has died, and all of its messages were read.
    Gone,
}

/// Waits for the next message of the keeper to its stand-by.
pub(crate) fn next(channel: &OwnedFd) -> News {
    loop {
        let packet = match packet::receive(channel.as_fd(), RecvFlags::empty()) {
            Ok(Some(packet)) => packet,
            Ok(None) | Err(_) => return News::Gone,
        };
        let text = String::from_utf8_lossy(&packet.text);
        if let Some(rest) = text.strip_prefix(SERVING) {
            if let Some(serving) = serving_in(rest, packet.fds) {
                return News::Serving(serving);
            }
            continue;
        }
        if let Some(facts) = text.strip_prefix(ENDED) {
            return News::Ended(facts_in(facts));
        }
        return if &*text == QUIT {
            News::Quit
        } else {
            News::Request(packet)
        };
    }
}

fn serving_in(text: &str, fds: Vec<OwnedFd>) -> Option<Serving> {
    let (pid, ready) = text.trim_end().split_once(':')?;
    let pid = Pid::from_raw(pid.parse().ok()?)?;
    let [channel, pidfd] = <[OwnedFd; 2]>::try_from(fds).ok()?;
    Some(Serving::adopted(pid, pidfd, Some(channel), ready == "1"))
}
