//! Upgrade to another program. The new program is asked first whether it reads the kept state. The
//! serving process is ended as if it had been killed, for its outstanding work is noted at any
//! time. If the new program does not serve soon, the previous one continues.

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Maximum time in which a new program has to report the formats that it reads.
const ASK_LIMIT: Duration = Duration::from_secs(5);
/// Longest time for it to serve. It usually takes a tenth of a second; on a machine that has much
/// else to do, or with many disks, more. No guest takes a disk for dead so soon.
const SERVE_LIMIT: Duration = Duration::from_secs(5);
/// Maximum length in bytes of a program's report.
const MAX_REPORT_LEN: usize = 1024;

/// Description of the end of a process that was replaced by an upgrade
/// ([`RestartHistory::how`](crate::RestartHistory::how)).
pub const REPLACED: &str = "it was replaced by another version";

/// Selects the present program or the one of an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramSelector {
    /// Program that serves, or has served last.
    Present,
    /// Program that an upgrade switches to.
    New,
}

/// Function that returns whether the program may be replaced now.
pub type MayGo = Box<dyn Fn() -> bool + Send + Sync>;

/// Programs from which a keeper process starts serving processes.
pub trait Programs {
    /// Starts a serving process with the socket as its standard input. It is to call
    /// [`Handover::receive`](crate::Handover::receive) with it, and to end when this process ends.
    ///
    /// # Errors
    /// The program cannot be started.
    fn start(&mut self, which: ProgramSelector, channel: OwnedFd) -> io::Result<Child>;

    /// Finds another program, and asks for the formats that it reads. The program writes them to
    /// this standard output, and ends.
    ///
    /// # Errors
    /// There is none, in words.
    fn ask(&mut self, output: Stdio) -> Result<Child, String>;

    /// Checks that the program that was found last, with this report, can continue with the kept
    /// state, and the present one with the state that the new one leaves.
    ///
    /// # Errors
    /// Why not, in words.
    fn fits(&mut self, said: &str) -> Result<(), String>;

    /// The new program is the present one from now on, or is not looked at any more.
    fn decide(&mut self, which: ProgramSelector);

    /// Starts a stand-by with the socket as its standard input, from the program of this process.
    /// It is to call [`Keeper::stand_by`](crate::Keeper::stand_by).
    ///
    /// # Errors
    /// The process cannot be started.
    fn start_standby(&mut self, channel: OwnedFd) -> io::Result<Child>;

    /// Replaces the program of this process by the present one of the serving process (execve(2)).
    /// The program gets the descriptors that are open across that, the last of which has the number
    /// `last`, and is to call [`Keeper::resume`](crate::Keeper::resume) with `state`. Signals are
    /// to be blocked, and then `may_go` asked, which is `false` when one has come that this program
    /// has to handle. Returns only if the program is not replaced, then with
    /// `ErrorKind::Interrupted`.
    fn replace(&mut self, state: BorrowedFd<'_>, last: RawFd, may_go: MayGo) -> io::Error;

    /// Starts a process that calls [`outlive`](crate::outlive) with its standard input, which is to
    /// be `keeper`, and ends. It inherits the open descriptors.
    ///
    /// # Errors
    /// The process cannot be started.
    fn start_last(&mut self, keeper: OwnedFd) -> io::Result<()>;

    /// Reports a line of text to the operator.
    fn say(&mut self, text: &str);
}

/// Next step of an upgrade, which the keeper carries out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum UpgradeStep {
    Nothing,
    /// The new program cannot take over, for this reason.
    Refused(String),
    /// End the serving process, which the new program follows.
    Replace,
    /// The new program serves, so the upgrade is complete.
    Done,
    /// The new program does not serve in time, and has to be ended.
    Late,
}

/// State of the keeper's upgrade to another program.
#[derive(Debug, Default)]
pub(crate) enum Upgrade {
    #[default]
    None,
    /// The new program was started to report the formats that it reads.
    Asked {
        child: Child,
        pidfd: OwnedFd,
        said: OwnedFd,
        end: Instant,
    },
    /// The new program is suitable. The process that served has ended by itself, and the next
    /// process must serve before the upgrade continues.
    Waiting,
    /// The process that served is being ended for the upgrade.
    Ending,
    /// A process of the new program has been started.
    Tried { end: Instant },
}

impl Upgrade {
    /// Starts the new program so that it reports the formats that it reads.
    pub(crate) fn ask(&mut self, programs: &mut dyn Programs) -> Result<(), String> {
        if !matches!(self, Self::None) {
            return Err("one is under way".to_owned());
        }
        let system = |errno: Errno| errno.to_string();
        let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
        let (said, output) = pipe_with(flags).map_err(system)?;
        let mut child = programs.ask(output.into())?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pidfd = pid.ok_or(Errno::SRCH);
        let pidfd = pidfd.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
        let pidfd = pidfd.map_err(|errno| {
            end(&mut child);
            system(errno)
        })?;
        *self = Self::Asked {
            child,
            pidfd,
            said,
            end: Instant::now() + ASK_LIMIT,
        };
        Ok(())
    }

    /// Advances the upgrade. `serves` is whether the running process has reported that it serves.
    pub(crate) fn advance(
        &mut self,
        programs: &mut dyn Programs,
        serves: bool,
        now: Instant,
    ) -> UpgradeStep {
        match self {
            Self::Asked {
                child,
                said,
                end: limit,
                ..
            } => {
                let fits = match child.try_wait() {
                    Ok(None) if now < *limit => return UpgradeStep::Nothing,
                    Ok(Some(status)) if status.success() => programs.fits(&read(said)),
                    Ok(Some(status)) => {
                        Err(format!("the new program does not know how ({status})"))
                    }
                    Ok(None) | Err(_) => {
                        end(child);
                        Err("the new program does not answer".to_owned())
                    }
                };
                match fits {
                    Ok(()) if serves => {
                        *self = Self::Ending;
                        UpgradeStep::Replace
                    }
                    Ok(()) => {
                        *self = Self::Waiting;
                        UpgradeStep::Nothing
                    }
                    Err(why) => {
                        self.give_up(programs);
                        UpgradeStep::Refused(why)
                    }
                }
            }
            Self::Waiting if serves => {
                *self = Self::Ending;
                UpgradeStep::Replace
            }
            Self::Tried { .. } if serves => {
                programs.decide(ProgramSelector::New);
                *self = Self::None;
                UpgradeStep::Done
            }
            Self::Tried { end } if now >= *end => {
                // The end of the process is waited for then.
                *end = now + SERVE_LIMIT;
                UpgradeStep::Late
            }
            Self::None | Self::Waiting | Self::Ending | Self::Tried { .. } => UpgradeStep::Nothing,
        }
    }

    /// Handles the end of the process that served. Returns `true` if the upgrade has ended it; then
    /// the new program's process follows, and `how` is set.
    pub(crate) fn ended(&mut self, how: &mut Option<String>) -> bool {
        if !matches!(self, Self::Ending) {
            return false;
        }
        *how = Some(REPLACED.to_owned());
        *self = Self::Tried {
            end: Instant::now() + SERVE_LIMIT,
        };
        true
    }

    /// Returns whether an upgrade was requested and is not decided.
    pub(crate) fn is_under_way(&self) -> bool {
        !matches!(self, Self::None)
    }

    /// Returns whether a process of the new program was started and has yet to serve.
    pub(crate) fn is_tried(&self) -> bool {
        matches!(self, Self::Tried { .. })
    }

    /// Returns the program from which the next serving process is started.
    pub(crate) fn which(&self) -> ProgramSelector {
        if self.is_tried() {
            ProgramSelector::New
        } else {
            ProgramSelector::Present
        }
    }

    /// Ends the upgrade; the present program stays.
    pub(crate) fn give_up(&mut self, programs: &mut dyn Programs) {
        programs.decide(ProgramSelector::Present);
        *self = Self::None;
    }

    /// Adds the descriptors that the keeper waits for. Returns the upgrade's deadline.
    pub(crate) fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) -> Option<Instant> {
        match self {
            Self::Asked { pidfd, end, .. } => {
                fds.push(PollFd::new(pidfd, PollFlags::IN));
                Some(*end)
            }
            Self::Tried { end } => Some(*end),
            Self::None | Self::Waiting | Self::Ending => None,
        }
    }
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Returns the report of a program, read up to [`MAX_REPORT_LEN`] bytes.
fn read(said: &OwnedFd) -> String {
    let mut bytes = [0; MAX_REPORT_LEN];
    let len = rustix::io::read(said, &mut bytes).unwrap_or(0);
    let text = bytes.get(..len).map(|bytes| String::from_utf8_lossy(bytes));
    text.unwrap_or_default().into_owned()
}
