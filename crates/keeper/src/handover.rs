//! State that a serving process receives at its start: all kept descriptors, and the end of the
//! process before it.

use crate::link::{Keeping, Link};
use crate::packet;
use crate::store::KeptDescriptor;
use crate::text::{OLDEST_PROTOCOL, PROTOCOL, is_name};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::fmt::Write as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

/// Maximum number of descriptors in one packet; the packet's text contains their names.
const IN_PACKET: usize = 48;

/// History of the serving processes, which a new one gets from the keeper.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestartHistory {
    /// Number of processes that have served before this one, since the keeper was started.
    pub restarts: u32,
    /// Number of most recent processes in a row that ended before they were ready.
    pub failures: u32,
    /// Time at which the last process ended, since the machine's start (CLOCK_MONOTONIC).
    pub ended_at: Option<Duration>,
    /// Description of how the last process ended.
    pub how: Option<String>,
}

/// Everything that a serving process gets from its keeper when it starts.
#[derive(Debug)]
pub struct Handover {
    /// Connection to the keeper.
    pub link: Link,
    /// Kept descriptors, with their names.
    pub kept: Vec<(String, OwnedFd)>,
    /// Descriptors that a service manager has passed to the keeper process, with their names.
    pub given: Vec<(String, OwnedFd)>,
    /// History of the serving processes.
    pub facts: RestartHistory,
}

/// Reason why a serving process cannot receive its descriptors from the keeper.
#[derive(Debug, thiserror::Error)]
pub enum ArrivalError {
    /// The keeper process has ended.
    #[error("the keeper process has ended")]
    Gone,
    /// The socket to the keeper cannot be read.
    #[error("the keeper process's socket")]
    System(#[from] Errno),
    /// A message of the keeper process cannot be parsed.
    #[error("the keeper process says what is not understood")]
    Unknown,
    /// The keeper process speaks another version of the protocol.
    #[error(
        "the keeper process speaks version {0} of the protocol, and this program \
         {OLDEST_PROTOCOL} to {PROTOCOL}"
    )]
    Version(u32),
    /// The keeper process has sent fewer descriptors than it has announced.
    #[error("descriptors are missing: this process may not have as many open as are kept")]
    Missing,
}

/// First messages of a keeper to a serving process or a stand-by.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub kept: Vec<(String, OwnedFd)>,
    pub given: Vec<(String, OwnedFd)>,
    pub facts: RestartHistory,
    /// Process ID of the keeper.
    pub keeper: u32,
    pub most: usize,
    /// Socket to the first stand-by, for the second one.
    pub ahead: Option<OwnedFd>,
}

impl Transfer {
    /// Receives the first messages of a keeper. Blocks until they have arrived.
    pub(crate) fn receive(channel: BorrowedFd<'_>) -> Result<Self, ArrivalError> {
        let (mut kept, mut given) = (Vec::new(), Vec::new());
        loop {
            let packet = packet::receive(channel, RecvFlags::empty())?;
            let packet = packet.ok_or(ArrivalError::Gone)?;
            if packet.cut {
                return Err(ArrivalError::Missing);
            }
            let text = String::from_utf8(packet.text).map_err(|_| ArrivalError::Unknown)?;
            let lines = Lines(&text);
            if let Some(keeper) = lines.number("KEEPER") {
                // A keeper of version 2 does not state its version.
                let version = lines.number("PROTOCOL").unwrap_or(OLDEST_PROTOCOL);
                // A later keeper may understand this version, too.
                let oldest = lines.number("OLDEST").unwrap_or(version);
                if version < OLDEST_PROTOCOL || oldest > PROTOCOL {
                    return Err(ArrivalError::Version(version));
                }
                return Ok(Self {
                    kept,
                    given,
                    facts: facts_in(&text),
                    keeper,
                    most: lines.number("MOST").ok_or(ArrivalError::Unknown)?,
                    ahead: packet.fds.into_iter().next(),
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

impl Handover {
    /// Receives the keeper process's first messages at the other end of `channel`. Waits for them.
    ///
    /// # Errors
    /// [`ArrivalError`].
    pub fn receive(channel: OwnedFd) -> Result<Self, ArrivalError> {
        let all = Transfer::receive(channel.as_fd())?;
        let names = all.kept.iter().map(|(name, _)| name.clone());
        let link = Link::new(channel, Keeping::Process(all.keeper), all.most, names);
        Ok(Self {
            link,
            kept: all.kept,
            given: all.given,
            facts: all.facts,
        })
    }
}

/// Returns the history of the serving processes as lines of text.
pub(crate) fn facts_text(facts: &RestartHistory) -> String {
    let (restarts, failures) = (facts.restarts, facts.failures);
    let mut text = format!("RESTARTS={restarts}\nFAILURES={failures}\n");
    if let Some(at) = facts.ended_at {
        let _ = writeln!(text, "ENDED_NSEC={}", at.as_nanos());
    }
    if let Some(how) = &facts.how {
        let _ = writeln!(text, "HOW={}", how.replace('\n', " "));
    }
    text
}

/// Parses the history of the serving processes from lines of text.
pub(crate) fn facts_in(text: &str) -> RestartHistory {
    let lines = Lines(text);
    RestartHistory {
        restarts: lines.number("RESTARTS").unwrap_or(0),
        failures: lines.number("FAILURES").unwrap_or(0),
        ended_at: lines.number("ENDED_NSEC").map(Duration::from_nanos),
        how: lines.value("HOW").map(str::to_owned),
    }
}

/// Text that consists of lines `NAME=VALUE`.
pub(crate) struct Lines<'a>(pub &'a str);

impl<'a> Lines<'a> {
    pub fn value(&self, name: &str) -> Option<&'a str> {
        let mut lines = self.0.lines().filter_map(|line| line.split_once('='));
        lines.find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    pub fn number<N: FromStr>(&self, name: &str) -> Option<N> {
        self.value(name)?.parse().ok()
    }
}

/// Packets that the keeper process still has to send to a process.
#[derive(Debug, Default)]
pub(crate) struct HandoverSender {
    packets: std::collections::VecDeque<(String, Vec<Rc<OwnedFd>>)>,
}

impl HandoverSender {
    pub(crate) fn new(
        kept: &[KeptDescriptor],
        given: &[KeptDescriptor],
        most: usize,
        facts: &RestartHistory,
    ) -> Self {
        let mut packets = std::collections::VecDeque::new();
        for (key, all) in [("GIVEN", given), ("KEPT", kept)] {
            for some in all.chunks(IN_PACKET) {
                let names: Vec<&str> = some.iter().map(|kept| &*kept.name).collect();
                let fds = some.iter().map(|kept| kept.fd.clone()).collect();
                packets.push_back((format!("{key}={}\n", names.join(":")), fds));
            }
        }
        let keeper = std::process::id();
        let versions = format!("PROTOCOL={PROTOCOL}\nOLDEST={OLDEST_PROTOCOL}\n");
        let last = format!(
            "{versions}KEEPER={keeper}\nMOST={most}\n{}",
            facts_text(facts)
        );
        packets.push_back((last, Vec::new()));
        Self { packets }
    }

    /// Adds a descriptor to the last packet.
    pub(crate) fn give(&mut self, fd: OwnedFd) {
        if let Some((_, fds)) = self.packets.back_mut() {
            fds.push(Rc::new(fd));
        }
    }

    /// Adds a packet with this text and these descriptors.
    pub(crate) fn push(&mut self, text: String, fds: Vec<Rc<OwnedFd>>) {
        self.packets.push_back((text, fds));
    }

    /// Returns the number of packets that are left to be sent.
    pub(crate) fn len(&self) -> usize {
        self.packets.len()
    }

    /// Returns whether packets are left to be sent.
    pub(crate) fn is_under_way(&self) -> bool {
        !self.packets.is_empty()
    }

    /// Sends as much as there is room for, but for the last `held_back` messages.
    pub(crate) fn go_on(&mut self, channel: BorrowedFd<'_>, held_back: usize) -> Result<(), Errno> {
        while self.packets.len() > held_back
            && let Some((text, fds)) = self.packets.front()
        {
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
    if is_name(name) {
        name.into()
    } else {
        "given".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    /// Sends messages as a keeper of some version does, and receives them.
    fn arrive(last: &str) -> Result<Handover, ArrivalError> {
        let flags = SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let memory = memfd_create("kept", MemfdFlags::CLOEXEC).unwrap();
        packet::send(theirs.as_fd(), "KEPT=d1.s\n", &[memory.as_fd()]).unwrap();
        packet::send(theirs.as_fd(), last, &[]).unwrap();
        Handover::receive(ours)
    }

    #[test]
    fn keeper_of_this_version_and_of_the_one_before_is_understood() {
        let rest = "KEEPER=7\nMOST=100\nRESTARTS=3\nFAILURES=1\nENDED_NSEC=5\nHOW=signal 9\n";
        for (version, is_known) in [
            // Version 2 did not state it.
            ("", true),
            ("PROTOCOL=1\n", false),
            ("PROTOCOL=2\n", true),
            ("PROTOCOL=3\nOLDEST=2\n", true),
            ("PROTOCOL=4\nOLDEST=3\n", true),
            ("PROTOCOL=4\nOLDEST=4\n", false),
        ] {
            let arrival = arrive(&format!("{version}{rest}"));
            assert_eq!(arrival.is_ok(), is_known, "{version}: {arrival:?}");
            let Ok(arrival) = arrival else {
                continue;
            };
            assert_eq!(arrival.kept[0].0, "d1.s");
            assert_eq!(arrival.link.keeping(), Keeping::Process(7));
            assert_eq!((arrival.link.most(), arrival.facts.restarts), (100, 3));
            assert_eq!(arrival.facts.how.as_deref(), Some("signal 9"));
        }
        // Lines that a later version adds are ignored.
        arrive(&format!("LATER=1\n{rest}")).unwrap();
        assert!(matches!(arrive("MOST=1\n"), Err(ArrivalError::Unknown)));
    }
}
