//! The keeper's state across an `execve` by which another version of the program takes its place.
//! The process keeps its number, its child and its descriptors; the state is a memory file that
//! names each descriptor.

use crate::child::Serving;
use crate::handover::{Lines, RestartHistory, facts_in, facts_text};
use crate::store::KeptDescriptor;
use crate::text::{OLDEST_PROTOCOL, PROTOCOL, is_name};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{Errno, FdFlags, fcntl_setfd, pread};
use rustix::process::Pid;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

/// Maximum size in bytes of a keeper's saved state, far more than all descriptors need.
pub const MAX_STATE: usize = 64 << 20;

/// Reason why a new program cannot continue as the keeper.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResumeError {
    /// The saved state of the keeper cannot be read.
    #[error("the state of the keeper cannot be read: {0}")]
    Read(Errno),
    /// The saved state of the keeper has an unsupported version.
    #[error(
        "the state of the keeper has version {0}, and {OLDEST_PROTOCOL} to {PROTOCOL} are read"
    )]
    Version(u32),
    /// The saved state of the keeper is damaged.
    #[error("the state of the keeper is damaged: {0}")]
    Damaged(&'static str),
}

/// State of a keeper that a new program continues: descriptors, history and serving process.
#[derive(Debug)]
pub(crate) struct State {
    pub given: Vec<KeptDescriptor>,
    pub kept: Vec<KeptDescriptor>,
    pub facts: RestartHistory,
    pub serving: Serving,
    /// Process ID and socket of the stand-by, which the next program replaces.
    pub standby: Option<(Pid, OwnedFd)>,
}

/// A memory file with the state of the keeper; the descriptors that it names stay open across an
/// `execve` while this exists.
#[derive(Debug)]
pub(crate) struct Written<'a> {
    pub file: OwnedFd,
    /// Highest descriptor number that the state names.
    pub last: RawFd,
    open: Vec<BorrowedFd<'a>>,
}

impl<'a> Written<'a> {
    pub(crate) fn new(
        given: &'a [KeptDescriptor],
        kept: &'a [KeptDescriptor],
        facts: &RestartHistory,
        serving: &'a Serving,
        standby: Option<(Pid, BorrowedFd<'a>)>,
    ) -> Result<Self, std::io::Error> {
        let mut open = Vec::new();
        let mut number = |fd: BorrowedFd<'a>| {
            open.push(fd);
            fd.as_raw_fd()
        };
        let mut text = format!("PROTOCOL={PROTOCOL}\n{}", facts_text(facts));
        for (key, all) in [("GIVEN", given), ("KEPT", kept)] {
            for one in all {
                let _ = writeln!(text, "{key}:{}:{}", one.name, number(one.fd.as_fd()));
            }
        }
        let channel = serving.channel.as_ref().ok_or(Errno::PIPE)?;
        let (channel, pidfd) = (number(channel.as_fd()), number(serving.pidfd()));
        let pid = serving.pid().as_raw_nonzero();
        let _ = writeln!(text, "SERVING={pid}\nCHANNEL={channel}\nPIDFD={pidfd}");
        if let Some((pid, channel)) = standby {
            let (pid, channel) = (pid.as_raw_nonzero(), number(channel));
            let _ = writeln!(text, "STANDBY={channel}\nSTANDBY_PID={pid}");
        }
        let mut file = File::from(memfd_create("vnvme-keeper", MemfdFlags::CLOEXEC)?);
        file.write_all(text.as_bytes())?;
        let file = OwnedFd::from(file);
        let last = open.iter().map(AsRawFd::as_raw_fd).max().unwrap_or(0);
        let written = Self {
            last: last.max(file.as_raw_fd()),
            file,
            open,
        };
        written.set_flags(FdFlags::empty())?;
        Ok(written)
    }

    fn set_flags(&self, flags: FdFlags) -> Result<(), Errno> {
        fcntl_setfd(&self.file, flags)?;
        self.open.iter().try_for_each(|fd| fcntl_setfd(fd, flags))
    }
}

impl Drop for Written<'_> {
    /// Sets close-on-exec again on the descriptors, because the program was not replaced.
    fn drop(&mut self) {
        let _ = self.set_flags(FdFlags::CLOEXEC);
    }
}

impl State {
    /// Reads the state. `open` are the descriptors that the program before has left open.
    ///
    /// # Errors
    /// [`ResumeError`], with the descriptors.
    pub(crate) fn read(
        file: BorrowedFd<'_>,
        mut open: Vec<OwnedFd>,
    ) -> Result<Self, (ResumeError, Vec<OwnedFd>)> {
        match Self::take(file, &mut open) {
            Ok(state) => Ok(state),
            Err(error) => Err((error, open)),
        }
    }

    fn take(file: BorrowedFd<'_>, open: &mut Vec<OwnedFd>) -> Result<Self, ResumeError> {
        let text = read_all(file).map_err(ResumeError::Read)?;
        let text = String::from_utf8(text).map_err(|_| ResumeError::Damaged("no text"))?;
        let lines = Lines(&text);
        let version = lines.number("PROTOCOL");
        let version = version.ok_or(ResumeError::Damaged("no version"))?;
        // Version 2 never left one.
        if !(OLDEST_PROTOCOL..=PROTOCOL).contains(&version) {
            return Err(ResumeError::Version(version));
        }
        let missing = ResumeError::Damaged("a descriptor is missing");
        // All descriptors are checked before any is taken: the previous program may need them.
        let mut named = BTreeSet::new();
        for line in text.lines() {
            let keys = ["CHANNEL=", "PIDFD=", "STANDBY="];
            let single = keys.iter().find_map(|key| line.strip_prefix(key));
            let is_listed = line.starts_with("GIVEN:") || line.starts_with("KEPT:");
            let listed = line.rsplit_once(':').filter(|_| is_listed);
            let listed = listed.map(|(_, number)| number);
            let Some(number) = single.or(listed) else {
                continue;
            };
            let number: RawFd = number.parse().map_err(|_| missing.clone())?;
            if !named.insert(number) || open.iter().all(|fd| fd.as_raw_fd() != number) {
                return Err(missing);
            }
        }
        let pid = |key| lines.number(key).and_then(Pid::from_raw);
        let serving = pid("SERVING").ok_or(ResumeError::Damaged("no serving process"))?;
        let listed = |line: &&str| line.starts_with("GIVEN:") || line.starts_with("KEPT:");
        let names = text.lines().filter(listed);
        let mut names = names.map(|line| line.split(':').nth(1).unwrap_or_default());
        if !names.all(is_name) {
            return Err(ResumeError::Damaged("a name is none"));
        }
        if ["CHANNEL", "PIDFD"]
            .iter()
            .any(|key| lines.value(key).is_none())
        {
            return Err(missing);
        }
        let mut take = |number: Option<RawFd>| {
            let place = open.iter().position(|fd| Some(fd.as_raw_fd()) == number);
            place
                .map(|place| open.swap_remove(place))
                .ok_or(missing.clone())
        };
        let (mut given, mut kept) = (Vec::new(), Vec::new());
        for line in text.lines() {
            let mut words = line.split(':');
            let (Some(key), Some(name), Some(number)) = (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let all = match key {
                "GIVEN" => &mut given,
                "KEPT" => &mut kept,
                _ => continue,
            };
            all.push(KeptDescriptor {
                name: name.into(),
                fd: Rc::new(take(number.parse().ok())?),
            });
        }
        let (channel, pidfd) = (take(lines.number("CHANNEL"))?, take(lines.number("PIDFD"))?);
        let standby = match (pid("STANDBY_PID"), lines.number("STANDBY")) {
            (Some(pid), Some(number)) => Some((pid, take(Some(number))?)),
            _ => None,
        };
        Ok(Self {
            given,
            kept,
            facts: facts_in(&text),
            serving: Serving::adopted(serving, pidfd, Some(channel), true),
            standby,
        })
    }
}

fn read_all(file: BorrowedFd<'_>) -> Result<Vec<u8>, Errno> {
    let mut text = Vec::new();
    let mut bytes = vec![0; 1 << 16];
    loop {
        match pread(file, &mut bytes, text.len() as u64)? {
            0 => return Ok(text),
            len => text.extend_from_slice(bytes.get(..len).unwrap_or_default()),
        }
        if text.len() > MAX_STATE {
            return Err(Errno::FBIG);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{dup, fcntl_getfd};
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC).unwrap()
    }

    fn kept(name: &str) -> KeptDescriptor {
        KeptDescriptor {
            name: name.into(),
            fd: Rc::new(event()),
        }
    }

    fn file(text: &str) -> OwnedFd {
        let mut file = File::from(memfd_create("state", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(text.as_bytes()).unwrap();
        file.into()
    }

    #[test]
    fn state_is_read_as_it_was_written_with_its_descriptors() {
        let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let serving = Serving::adopted(getpid(), pidfd, Some(event()), true);
        let (given, all) = ([kept("control")], [kept("d1.s"), kept("d1.2")]);
        let facts = RestartHistory {
            restarts: 3,
            how: Some("signal 9".into()),
            ..RestartHistory::default()
        };
        let standby = event();
        let fds = || {
            let ours = given.iter().chain(&all).map(|kept| kept.fd.as_fd());
            let channel = serving.channel.as_ref().unwrap().as_fd();
            ours.chain([channel, serving.pidfd(), standby.as_fd()])
        };
        let written = Written::new(
            &given,
            &all,
            &facts,
            &serving,
            Some((getpid(), standby.as_fd())),
        )
        .unwrap();
        for fd in fds() {
            assert_eq!(fcntl_getfd(fd).unwrap(), FdFlags::empty());
            assert!(fd.as_raw_fd() <= written.last);
        }
        // The next program has the same numbers. Here they are duplicates.
        let mut text = String::from_utf8(read_all(written.file.as_fd()).unwrap()).unwrap();
        let mut open = Vec::new();
        for fd in fds() {
            let copy = dup(fd).unwrap();
            for key in [":", "CHANNEL=", "PIDFD=", "STANDBY="] {
                let (from, to) = (fd.as_raw_fd(), copy.as_raw_fd());
                text = text.replace(&format!("{key}{from}\n"), &format!("{key}{to}\n"));
            }
            open.push(copy);
        }
        let state = State::read(file(&text).as_fd(), open).unwrap();
        let names =
            |all: &[KeptDescriptor]| all.iter().map(|k| k.name.to_string()).collect::<Vec<_>>();
        assert_eq!(names(&state.given), ["control"]);
        assert_eq!(names(&state.kept), ["d1.s", "d1.2"]);
        assert_eq!(
            (state.facts, state.serving.pid()),
            (facts.clone(), getpid())
        );
        assert!(state.standby.is_some());
        drop(written);
        for fd in fds() {
            assert_eq!(fcntl_getfd(fd).unwrap(), FdFlags::CLOEXEC);
        }
    }

    #[test]
    fn state_of_another_version_or_without_a_descriptor_is_refused() {
        let read = |text: &str| {
            let (error, open) = State::read(file(text).as_fd(), vec![event()]).unwrap_err();
            assert_eq!(open.len(), 1, "the program before gets it again");
            error
        };
        assert_eq!(read("PROTOCOL=4\n"), ResumeError::Version(4));
        assert_eq!(read("PROTOCOL=1\n"), ResumeError::Version(1));
        for text in [
            "",
            "PROTOCOL=3\n",
            "PROTOCOL=3\nKEPT:a:77\n",
            "PROTOCOL=3\nKEPT:a b:77\n",
            "PROTOCOL=3\nSERVING=1\nCHANNEL=7\nPIDFD=8\n",
        ] {
            assert!(matches!(read(text), ResumeError::Damaged(_)), "{text}");
        }
    }
}
