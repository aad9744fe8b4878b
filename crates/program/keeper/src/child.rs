//! The serving process that runs now.

use crate::handover::HandoverSender;
use crate::upgrade::{ProgramSelector, Programs};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use sync::readiness;

/// End of a serving process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The process has exited with this code.
    Code(i32),
    /// The process was killed by this signal.
    Signal(i32),
    /// The end of the process is not known in detail, because its parent was the previous keeper.
    Unknown,
}

/// Running serving process, with the channel between it and the keeper.
#[derive(Debug)]
pub(crate) struct Serving {
    pid: Pid,
    pidfd: OwnedFd,
    /// Socket to the process; `None` after the process has closed its end.
    pub channel: Option<OwnedFd>,
    pub sending: HandoverSender,
    /// Whether the process has reported that it serves clients.
    pub is_ready: bool,
    /// Whether the process has reported that it ends in an orderly way.
    is_stopping: bool,
    /// Last status that the process reported (sd_notify(3), `STATUS=`).
    pub status: Option<String>,
}

impl Serving {
    /// Starts a serving process with one end of a socket pair as its standard input.
    pub(crate) fn start(
        programs: &mut dyn Programs,
        which: ProgramSelector,
        sending: HandoverSender,
    ) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (ours, theirs) = pair?;
        let mut child = programs.start(which, theirs)?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let opened = pid.ok_or(Errno::SRCH);
        let opened = opened.and_then(|pid| Ok((pid, pidfd_open(pid, PidfdFlags::empty())?)));
        match opened {
            // The process is waited for by its descriptor.
            Ok((pid, pidfd)) => Ok(Self {
                sending,
                ..Self::adopted(pid, pidfd, Some(ours), false)
            }),
            Err(errno) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(errno.into())
            }
        }
    }

    /// Creates the record of a process that another keeper, or this process's former program, has
    /// started.
    pub(crate) fn adopted(
        pid: Pid,
        pidfd: OwnedFd,
        channel: Option<OwnedFd>,
        is_ready: bool,
    ) -> Self {
        Self {
            pid,
            pidfd,
            channel,
            sending: HandoverSender::default(),
            is_ready,
            is_stopping: false,
            status: None,
        }
    }

    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Handles the status lines that the process has sent (sd_notify(3)).
    pub(crate) fn told(&mut self, lines: &str) {
        self.is_ready |= lines.lines().any(|line| line == "READY=1");
        self.is_stopping |= lines.lines().any(|line| line == "STOPPING=1");
        let status = lines.lines().find_map(|line| line.strip_prefix("STATUS="));
        self.status = status.map(str::to_owned).or(self.status.take());
    }

    /// Sends a signal to the serving process.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }

    /// Returns how the process has ended, if it has.
    pub(crate) fn ended(&self) -> Result<Option<Ended>, Errno> {
        if readiness(&self.pidfd, PollFlags::IN).is_empty() {
            return Ok(None);
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        match waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
            Ok(Some(status)) => Ok(Some(match status.exit_status() {
                Some(code) => Ended::Code(code),
                None => Ended::Signal(status.terminating_signal().unwrap_or(0)),
            })),
            Ok(None) => Ok(None),
            // The process is the child of another keeper.
            Err(Errno::CHILD) if self.is_stopping => Ok(Some(Ended::Code(0))),
            Err(Errno::CHILD) => Ok(Some(Ended::Unknown)),
            Err(errno) => Err(errno),
        }
    }

    /// Adds the descriptors that the keeper waits for: the process's end and messages.
    pub(crate) fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        fds.push(PollFd::new(&self.pidfd, PollFlags::IN));
        if let Some(channel) = &self.channel {
            let mut wanted = PollFlags::IN;
            if self.sending.is_under_way() {
                wanted |= PollFlags::OUT;
            }
            fds.push(PollFd::from_borrowed_fd(channel.as_fd(), wanted));
        }
    }
}
