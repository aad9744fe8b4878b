//! The stand-bys: two more keeper processes, with duplicates of all that the keeper keeps. If the
//! keeper ends without notice, the first stand-by is the keeper, and starts another one. If the
//! keeper and its first stand-by end at one time, the second stand-by is the keeper.
//!
//! The two stand-bys have a socket pair. The second one reads from there when the keeper has ended:
//! the first one forwards messages there as the keeper, or its end of the pair is closed. A new
//! stand-by has its end of the pair with the last descriptor that it gets, after the other one has
//! got its end: so there is no moment in which both would become the keeper.
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
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::rc::Rc;
use std::time::{Duration, Instant};
use sync::readiness;

/// Maximum number of messages that wait for a stand-by; one that falls behind further is replaced.
const MAX_WAITING: usize = 1024;
/// Time limit for the end of a dismissed stand-by. Its keeper has died, so it only has
/// to notice that.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Pause between the end of a stand-by and the start of the next one.
const PAUSE: Duration = Duration::from_secs(1);

/// Name of the message that a serving process was started: its process ID, and whether it is ready.
const SERVING: &str = "SERVING=";
/// Message that the serving process has ended; the [`RestartHistory`] follows.
const ENDED: &str = "ENDED=1\n";
/// Name of the message that another stand-by, of the program or keeper before, stands by until
/// [`COMPLETE`]: its process ID. With its pidfd.
const BEFORE: &str = "BEFORE=";
/// Last message to a stand-by beside another one, which was dismissed before.
const COMPLETE: &str = "COMPLETE=1\n";
/// Message that the keeper ends in an orderly way.
const QUIT: &str = "QUIT=1\n";
/// Name of the message to the first stand-by that there is a second one: its process ID. With its
/// pidfd and a socket to it.
const BEHIND: &str = "BEHIND=";

/// Number of stand-bys.
const STANDBYS: usize = 2;

/// Stand-by process that the keeper has started.
#[derive(Debug)]
struct Started {
    child: Child,
    channel: OwnedFd,
    sending: HandoverSender,
}

impl Started {
    fn pid(&self) -> io::Result<Pid> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        pid.ok_or_else(|| Errno::SRCH.into())
    }

    fn end(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A stand-by that the program before, or the keeper before, has started. It stands by until
/// another one has all that the keeper keeps, and then ends.
#[derive(Debug)]
struct Left {
    pid: Pid,
    pidfd: OwnedFd,
    /// `None`: it was told to end.
    channel: Option<OwnedFd>,
    sending: HandoverSender,
}

impl Left {
    /// Sends as much as there is room for. Returns whether the process still runs.
    fn go_on(&mut self) -> bool {
        let runs = readiness(&self.pidfd, PollFlags::IN).is_empty();
        if !runs {
            // Fails for a child of another keeper.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), options);
        }
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
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        self.channel = None;
    }
}

/// The keeper's side: the stand-bys, and the time when the next one is started.
#[derive(Debug, Default)]
pub(crate) struct Backup {
    /// The first one becomes the keeper first. A new one is the last.
    started: Vec<Started>,
    next_start: Option<Instant>,
    left: Option<Left>,
}

impl Backup {
    /// Returns whether a stand-by process has to be started now.
    pub fn is_wanted(&self) -> bool {
        let is_late = |at: Instant| Instant::now() >= at;
        self.has_room() && self.next_start.is_none_or(is_late)
    }

    /// Returns whether a stand-by is missing. The first one of this keeper takes the place of one
    /// that was left.
    fn has_room(&self) -> bool {
        match self.started.as_slice() {
            [] => true,
            started => {
                let is_left = self
                    .left
                    .as_ref()
                    .is_some_and(|left| left.channel.is_some());
                started.len() < STANDBYS && self.is_complete() && !is_left
            }
        }
    }

    /// Returns whether the stand-bys have received everything that was sent.
    pub fn is_complete(&self) -> bool {
        let mut started = self.started.iter();
        started.all(|started| !started.sending.is_under_way())
    }

    /// Starts a stand-by process; `sending` contains everything that the keeper holds.
    pub fn start(
        &mut self,
        programs: &mut dyn Programs,
        mut sending: HandoverSender,
        serving: &Serving,
    ) -> io::Result<()> {
        self.next_start = Some(Instant::now() + PAUSE);
        let pair = || {
            let flags = SocketFlags::CLOEXEC;
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        };
        let (channel, theirs) = pair()?;
        let (first_end, second_end) = pair()?;
        let is_second = !self.started.is_empty();
        if is_second {
            sending.give(second_end);
        }
        let left = self.left.as_ref().filter(|left| left.channel.is_some());
        if let Some(left) = left {
            let pidfd = Rc::new(left.pidfd.try_clone()?);
            sending.push(
                format!("{BEFORE}{}\n", left.pid.as_raw_nonzero()),
                vec![pidfd],
            );
        }
        if let Some((text, fds)) = serving_text(serving)? {
            sending.push(text, fds);
        }
        if left.is_some() {
            sending.push(COMPLETE.to_owned(), Vec::new());
        }
        let started = Started {
            child: programs.start_standby(theirs)?,
            channel,
            sending,
        };
        let told = started.pid().and_then(|pid| {
            let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
            let fds = vec![Rc::new(first_end), Rc::new(pidfd)];
            Ok((format!("{BEHIND}{}\n", pid.as_raw_nonzero()), fds))
        });
        match (told, self.started.first_mut()) {
            (Ok((text, fds)), Some(first)) => first.sending.push(text, fds),
            (Ok(_), None) => {}
            (Err(error), _) => {
                started.end();
                return Err(error);
            }
        }
        self.started.push(started);
        self.go_on();
        Ok(())
    }

    /// Tells the stand-bys which serving process was started.
    pub fn serves(&mut self, serving: &Serving) -> io::Result<()> {
        if let Some((text, fds)) = serving_text(serving)? {
            self.push(text, fds);
        }
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
        for started in &mut self.started {
            started.sending.push(text.clone(), fds.clone());
        }
        let mut behind = self.started.iter();
        if let Some(place) = behind.position(|started| started.sending.len() > MAX_WAITING) {
            self.replace(place);
        }
        self.go_on();
    }

    /// Ends a stand-by process; another one is started later.
    fn replace(&mut self, place: usize) {
        self.started.remove(place).end();
        self.next_start = Some(Instant::now() + PAUSE);
    }

    /// Ends all stand-by processes but the first.
    pub fn leave_first(&mut self) {
        while self.started.len() > 1 {
            self.replace(1);
        }
    }

    /// Sends as much as there is room for, and notices the end of the stand-bys.
    pub fn go_on(&mut self) {
        let mut left = self.left.take();
        if left.as_mut().is_some_and(|left| !left.go_on()) {
            left = None;
        }
        let [started, second @ ..] = self.started.as_mut_slice() else {
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
        let mut failed = vec![sent.is_err()];
        // The first one has its end of the socket pair before the second one has anything.
        let first_knows = !started.sending.is_under_way();
        for second in second {
            let sent = if first_knows {
                second.sending.go_on(second.channel.as_fd(), 0)
            } else {
                Ok(())
            };
            failed.push(sent.is_err());
        }
        for (place, failed) in failed.into_iter().enumerate().rev() {
            let started = self.started.get_mut(place);
            let has_ended =
                started.is_some_and(|started| !matches!(started.child.try_wait(), Ok(None)));
            if failed || has_ended {
                self.replace(place);
            }
        }
    }

    /// Returns whether a stand-by process exists.
    pub fn is_there(&self) -> bool {
        let left = self.left.as_ref();
        !self.started.is_empty() || left.is_some_and(|left| left.channel.is_some())
    }

    /// Returns the process ID and the socket of the stand-by.
    pub fn place(&self) -> Option<(Pid, BorrowedFd<'_>)> {
        let Some(started) = self.started.first() else {
            let left = self.left.as_ref()?;
            return Some((left.pid, left.channel.as_ref()?.as_fd()));
        };
        Some((started.pid().ok()?, started.channel.as_fd()))
    }

    /// Keeps a stand-by that the program before, or the keeper before, has started, until this
    /// keeper has started one.
    pub fn leave(&mut self, pid: Pid, pidfd: OwnedFd, channel: OwnedFd) {
        self.left = Some(Left {
            pid,
            pidfd,
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
        for started in &self.started {
            let wanted = if started.sending.is_under_way() {
                PollFlags::OUT
            } else {
                PollFlags::empty()
            };
            fds.push(PollFd::new(&started.channel, wanted));
        }
        // A start that is due waits for a process that serves.
        let next = self.next_start.filter(|_| self.has_room());
        next.filter(|at| *at > Instant::now())
    }

    /// Has the stand-by close all that it keeps when this process has ended. `false`: there is no
    /// stand-by that would.
    pub fn dismiss(&mut self) -> bool {
        self.push(QUIT.to_owned(), Vec::new());
        let left = self.left.take();
        let left = left.filter(|left| left.channel.is_some());
        let mut is_told = left.is_some_and(|mut left| {
            let is_told = !left.sending.is_under_way();
            if !is_told {
                left.kill();
            }
            is_told
        });
        for started in self.started.drain(..) {
            if started.sending.is_under_way() {
                started.end();
            } else {
                is_told = true;
            }
        }
        is_told
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
    /// A second stand-by was started: its process ID, its pidfd and the socket to it.
    Behind(Pid, OwnedFd, OwnedFd),
    /// Another process, with this pidfd, stands by until [`News::Complete`].
    Before(OwnedFd),
    /// The other process was dismissed.
    Complete,
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
        if let Some(pid) = text.strip_prefix(BEHIND) {
            let pid = pid.trim_end().parse().ok().and_then(Pid::from_raw);
            if let (Some(pid), Ok([socket, pidfd])) = (pid, <[OwnedFd; 2]>::try_from(packet.fds)) {
                return News::Behind(pid, pidfd, socket);
            }
            continue;
        }
        if text.starts_with(BEFORE) {
            match packet.fds.into_iter().next() {
                Some(pidfd) => return News::Before(pidfd),
                None => continue,
            }
        }
        return match &*text {
            QUIT => News::Quit,
            COMPLETE => News::Complete,
            _ => News::Request(packet),
        };
    }
}

/// Returns whether this stand-by becomes the keeper, when the keeper has died before the last
/// message ([`COMPLETE`]). `before` is the pidfd of the other stand-by. If it was dismissed, it
/// has ended or does so now; otherwise it is the keeper. If it has been the keeper and has ended in
/// an orderly way, the serving process has ended, too.
pub(crate) fn succeeds(before: &OwnedFd, serving: Option<&Serving>) -> bool {
    let limit = Instant::now() + END_LIMIT;
    let has_ended = loop {
        let left = limit.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs().cast_signed(),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(before, PollFlags::IN)], Some(&timeout)) {
            Err(Errno::INTR) => {}
            result => break matches!(result, Ok(1..)),
        }
    };
    let serves = |serving: &Serving| readiness(serving.pidfd(), PollFlags::IN).is_empty();
    has_ended && serving.is_some_and(serves)
}

/// Returns the message that this process serves, unless it has closed its socket.
fn serving_text(serving: &Serving) -> io::Result<Option<(String, Vec<Rc<OwnedFd>>)>> {
    let Some(channel) = &serving.channel else {
        return Ok(None);
    };
    let fds = vec![
        Rc::new(channel.try_clone()?),
        Rc::new(serving.pidfd().try_clone_to_owned()?),
    ];
    let (pid, ready) = (serving.pid().as_raw_nonzero(), u8::from(serving.is_ready));
    Ok(Some((format!("{SERVING}{pid}:{ready}\n"), fds)))
}

fn serving_in(text: &str, fds: Vec<OwnedFd>) -> Option<Serving> {
    let (pid, ready) = text.trim_end().split_once(':')?;
    let pid = Pid::from_raw(pid.parse().ok()?)?;
    let [channel, pidfd] = <[OwnedFd; 2]>::try_from(fds).ok()?;
    Some(Serving::adopted(pid, pidfd, Some(channel), ready == "1"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    /// A process that ends with the other end of its standard input.
    fn child() -> Child {
        let mut command = Command::new("cat");
        let command = command.stdin(Stdio::piped()).stdout(Stdio::null());
        command.spawn().unwrap()
    }

    /// Returns the text of a message that has arrived.
    fn next(socket: &OwnedFd) -> Option<String> {
        let packet = packet::receive(socket.as_fd(), RecvFlags::DONTWAIT).ok()??;
        Some(String::from_utf8(packet.text).unwrap())
    }

    /// Starts a stand-by that has yet to receive as many messages and a last one, beside one that
    /// was left. Returns the process and the sockets of both.
    fn beside_left(messages: usize) -> (Backup, Child, OwnedFd, OwnedFd) {
        let former = child();
        let pid = Pid::from_raw(former.id().try_into().unwrap()).unwrap();
        let (channel, former_socket) = pair();
        let mut backup = Backup::default();
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        backup.leave(pid, pidfd, channel);
        let (channel, socket) = pair();
        let mut sending = HandoverSender::default();
        for _ in 0..messages {
            sending.push("x".repeat(1000), Vec::new());
        }
        sending.push("the last one".to_owned(), Vec::new());
        backup.started.push(Started {
            child: child(),
            channel,
            sending,
        });
        (backup, former, former_socket, socket)
    }

    fn end(mut backup: Backup, mut former: Child) {
        former.kill().unwrap();
        former.wait().unwrap();
        backup.replace(0);
    }

    /// A keeper may be killed at any moment. Of two stand-bys that have everything, both would
    /// become the keeper.
    #[test]
    fn earlier_standby_is_dismissed_before_its_successor_has_the_last_message() {
        // More than the socket takes at a time.
        let (mut backup, former, former_socket, socket) = beside_left(2000);
        let waiting = |backup: &Backup| backup.started.first().unwrap().sending.len();
        backup.go_on();
        while waiting(&backup) > 1 {
            assert_eq!(next(&former_socket), None, "the new one is not complete");
            next(&socket).unwrap();
            backup.go_on();
        }
        // The socket is still full.
        assert_eq!(waiting(&backup), 1);
        assert_eq!(next(&former_socket).as_deref(), Some(QUIT));
        while waiting(&backup) > 0 {
            next(&socket).unwrap();
            backup.go_on();
        }
        let received = std::iter::from_fn(|| next(&socket));
        assert_eq!(received.last().unwrap(), "the last one");
        end(backup, former);
    }

    #[test]
    fn earlier_standby_is_dismissed_where_everything_is_sent_at_once() {
        let (mut backup, former, former_socket, socket) = beside_left(1);
        backup.go_on();
        assert_eq!(next(&former_socket).as_deref(), Some(QUIT));
        let received = std::iter::from_fn(|| next(&socket));
        assert_eq!(received.last().unwrap(), "the last one");
        end(backup, former);
    }

    /// Returns a process that ends with its pipe, as another process sees it.
    fn adopted(child: &Child) -> (OwnedFd, Serving) {
        let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
        let pidfd = || pidfd_open(pid, PidfdFlags::empty()).unwrap();
        (pidfd(), Serving::adopted(pid, pidfd(), None, true))
    }

    #[test]
    fn incomplete_standby_succeeds_only_dismissed_one_beside_living_process() {
        let (mut before, mut serving) = (child(), child());
        let (before_pidfd, _) = adopted(&before);
        let (_, serves) = adopted(&serving);
        before.kill().unwrap();
        before.wait().unwrap();
        assert!(succeeds(&before_pidfd, Some(&serves)));
        assert!(!succeeds(&before_pidfd, None));
        // The other one was the keeper, and has ended in an orderly way.
        serving.kill().unwrap();
        serving.wait().unwrap();
        assert!(!succeeds(&before_pidfd, Some(&serves)));
    }
}
