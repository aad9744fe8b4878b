//! The serving process that runs now.

use crate::arrival::Sending;
use crate::upgrade::{Programs, Which};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, ExitStatus};

/// A serving process, and the objects that the keeper shares with it.
#[derive(Debug)]
pub(crate) struct Serving {
    child: Child,
    pidfd: OwnedFd,
    /// None when it has closed its end.
    pub channel: Option<OwnedFd>,
    pub sending: Sending,
    /// The process has reported that it serves.
    pub is_ready: bool,
    /// Last status that the process reported (sd_notify(3), `STATUS=`).
    pub status: Option<String>,
}

impl Serving {
    /// Starts a process with a socket as its standard input.
    pub(crate) fn start(
        programs: &mut dyn Programs,
        which: Which,
        sending: Sending,
    ) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (ours, theirs) = pair?;
        let mut child = programs.start(which, theirs)?;
        let pidfd = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pidfd = pidfd.ok_or(Errno::SRCH);
        let pidfd = pidfd.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
        match pidfd {
            Ok(pidfd) => Ok(Self {
                child,
                pidfd,
                channel: Some(ours),
                sending,
                is_ready: false,
                status: None,
            }),
            Err(errno) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(errno.into())
            }
        }
    }

    /// Passes a signal on. It has not been waited for, so its number is not another's.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Returns the exit status, if the process has ended.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Adds the descriptors to wait for: the end of the process, and its messages.
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
