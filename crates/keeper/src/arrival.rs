//! State that a serving process receives at its start: all kept descriptors, and the end of the
//! process before it.

use crate::link::{Keeping, Link};
use crate::packet;
use crate::store::Kept;
use crate::text::is_name;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::fmt::Write as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

/// Most descriptors in one packet: their names are in its text.
const IN_PACKET: usize = 48;

/// History of the serving processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Processes that have served before this one, since the keeper was started.
    pub restarts: u32,
    /// Number of last processes, in a row, that did not become ready.
    pub failures: u32,
    /// When the last one ended: time since the machine's start (CLOCK_MONOTONIC).
    pub ended_at: Option<Duration>,
    /// Description of its end.
    pub how: Option<String>,
}

/// All of it.
#[derive(Debug)]
pub struct Arrival {
    /// The way to the keeper.
    pub link: Link,
    /// Descriptors by their names.
    pub kept: Vec<(String, OwnedFd)>,
    /// Descriptors that a service manager had opened for the keeper process.
    pub given: Vec<(String, OwnedFd)>,
    /// History of the serving processes.
    pub facts: Facts,
}

/// Why a serving process cannot have it.
#[derive(Debug, thiserror::Error)]
pub enum ArrivalError {
    /// The keeper process has ended.
    #[error("the keeper process has ended")]
    Gone,
    /// The socket cannot be read.
    #[error("the keeper process's socket")]
    System(#[from] Errno),
    /// A message of the keeper process is not understood.
    #[error("the keeper process says what is not understood")]
    Unknown,
    /// Descriptors are missing.
    #[error("descriptors are missing: this process may not have as many open as are kept")]
    Missing,
}

impl Arrival {
    /// Receives the keeper process's first messages at the other end of `channel`. Waits for them.
    ///
    /// # Errors
    /// [`ArrivalError`].
    pub fn receive(channel: OwnedFd) -> Result<Self, ArrivalError> {
        let (mut kept, mut given) = (Vec::new(), Vec::new());
        loop {
            let packet = packet::receive(channel.as_fd(), RecvFlags::empty())?;
            let packet = packet.ok_or(ArrivalError::Gone)?;
            if packet.cut {
                return Err(ArrivalError::Missing);
            }
            let text = String::from_utf8(packet.text).map_err(|_| ArrivalError::Unknown)?;
            let lines = Lines(&text);
            if let Some(keeper) = lines.number("KEEPER") {
                let most = lines.number("MOST").ok_or(ArrivalError::Unknown)?;
                let facts = Facts {
                    restarts: lines.number("RESTARTS").unwrap_or(0),
                    failures: lines.number("FAILURES").unwrap_or(0),
                    ended_at: lines.number("ENDED_NSEC").map(Duration::from_nanos),
                    how: lines.value("HOW").map(str::to_owned),
                };
                let names = kept
                    .iter()
                    .map(|(name, _): &(String, OwnedFd)| name.clone());
                let link = Link::new(channel, Keeping::Process(keeper), most, names);
                return Ok(Self {
                    link,
                    kept,
                    given,
                    facts,
                });
            }
            let (names, all) = match (lines.value("KEPT"), lines.value("GIVEN")) {
                (Some(names), None) => (names, &mut kept),
                (None, Some(names)) => (names, &mut given),
                _ => return Err(ArrivalError::Unknown),
            };
            let names: Vec<&str> = names.split(':').collect();
            if names.len() != packet.fds.len() {
                return Err(ArrivalError::Missing);
            }
            all.extend(names.into_iter().map(str::to_owned).zip(packet.fds));
        }
    }
}

/// Lines of names and values.
struct Lines<'a>(&'a str);

impl<'a> Lines<'a> {
    fn value(&self, name: &str) -> Option<&'a str> {
        let mut lines = self.0.lines().filter_map(|line| line.split_once('='));
        lines.find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    fn number<N: FromStr>(&self, name: &str) -> Option<N> {
        self.value(name)?.parse().ok()
    }
}

/// The keeper process's side: packets that are to be sent.
#[derive(Debug, Default)]
pub(crate) struct Sending {
    packets: std::collections::VecDeque<(String, Vec<Rc<OwnedFd>>)>,
}

impl Sending {
    pub(crate) fn new(kept: &[Kept], given: &[Kept], most: usize, facts: &Facts) -> Self {
        let mut packets = std::collections::VecDeque::new();
        for (key, all) in [("GIVEN", given), ("KEPT", kept)] {
            for some in all.chunks(IN_PACKET) {
                let names: Vec<&str> = some.iter().map(|kept| &*kept.name).collect();
                let fds = some.iter().map(|kept| kept.fd.clone()).collect();
                packets.push_back((format!("{key}={}\n", names.join(":")), fds));
            }
        }
        let mut last = format!("KEEPER={}\nMOST={most}\n", std::process::id());
        let _ = writeln!(
            last,
            "RESTARTS={}\nFAILURES={}",
            facts.restarts, facts.failures
        );
        if let Some(at) = facts.ended_at {
            let _ = writeln!(last, "ENDED_NSEC={}", at.as_nanos());
        }
        if let Some(how) = &facts.how {
            let _ = writeln!(last, "HOW={}", how.replace('\n', " "));
        }
        packets.push_back((last, Vec::new()));
        Self { packets }
    }

    /// Something is left to be sent.
    pub(crate) fn is_under_way(&self) -> bool {
        !self.packets.is_empty()
    }

    /// Sends as much as there is room for.
    pub(crate) fn go_on(&mut self, channel: BorrowedFd<'_>) -> Result<(), Errno> {
        while let Some((text, fds)) = self.packets.front() {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
            match packet::send(channel, text, &fds) {
                Ok(()) => drop(self.packets.pop_front()),
                Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::NOBUFS) => return Ok(()),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

/// Returns the name under which a service manager's descriptor is passed on: its own, if that is a
/// valid name.
pub(crate) fn passed_name(name: &str) -> Rc<str> {
    match is_name(name) {
        true => name.into(),
        false => "given".into(),
    }
}
