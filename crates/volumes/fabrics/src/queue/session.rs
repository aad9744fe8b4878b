//! NVMe/TCP on the connection of one I/O queue: capsules, answers, and requested data.

use super::encode::{self, DataWriter, PIECE, Subrequest};
use crate::connect::NamespaceProperties;
use dma::SegmentList;
use nvme::Status;
use nvme::sgl::SglDescriptor;
use nvme_tcp::{
    Answer, Answers, CommandInfo, ConnectionLimits, InFlight, Terminated, Violation, Writer,
};
use remote::queue::{Event, Expected, Failure, Session};
use std::os::fd::OwnedFd;
use std::time::Duration;
use volume::Outgoing;
use zerocopy::IntoBytes;

/// Connection of an I/O queue that a path's thread has established for a worker.
#[derive(Debug)]
pub(crate) struct Ready {
    pub fd: OwnedFd,
    pub limits: ConnectionLimits,
    /// Number of the path's association that the connection belongs to.
    pub epoch: u64,
    pub qid: u16,
    /// Maximum number of outstanding commands on the queue.
    pub depth: u16,
    /// Maximum number of bytes of in-capsule data.
    pub in_capsule: u32,
}

/// Completion that a controller has sent for a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answered {
    pub status: Status,
    /// Whether the digest of the command's data did not match.
    pub corrupt: bool,
}

/// Reason of the protocol for the end of a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FabricsFailure {
    #[error("the controller breaks the protocol: {0}")]
    Violation(Violation),
    #[error("the controller ends the connection: {0}")]
    Terminated(Terminated),
    #[error("its association has ended")]
    Association,
}

impl From<Violation> for FabricsFailure {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

impl Failure for FabricsFailure {
    const PEER: &'static str = "controller";

    fn is_blamed(&self) -> bool {
        !matches!(self, Self::Association)
    }
}

/// State of the protocol on one connection.
pub(crate) struct FabricsSession {
    in_flight: InFlight<Subrequest>,
    answers: Answers,
    writer: DataWriter,
    in_capsule: u32,
    nsid: u32,
    block_shift: u8,
    pub(super) epoch: u64,
    pub(super) qid: u16,
}

impl FabricsSession {
    pub(super) fn new(ready: &Ready, facts: &NamespaceProperties) -> Self {
        Self {
            in_flight: InFlight::new(ready.depth),
            answers: Answers::new(&ready.limits),
            writer: DataWriter::new(Writer::new(ready.limits)),
            in_capsule: ready.in_capsule,
            nsid: facts.namespace.nsid,
            block_shift: facts.namespace.block_shift,
            epoch: ready.epoch,
            qid: ready.qid,
        }
    }
}

impl Session for FabricsSession {
    type Answer = Answered;
    type Failure = FabricsFailure;
    const CLOSING: Duration = Duration::from_secs(1);
    const REQUESTS_DATA: bool = true;

    fn outstanding(&self) -> usize {
        self.in_flight.len()
    }

    fn is_full(&self) -> bool {
        self.in_flight.is_full()
    }

    fn get(&mut self, name: u64) -> Option<&mut Subrequest> {
        // The identifier is in the low bits.
        self.in_flight.get(name as u16).map(|entry| &mut entry.item)
    }

    fn remove(&mut self, name: u64) -> Option<Subrequest> {
        self.in_flight.remove(name as u16).map(|entry| entry.item)
    }

    fn commands(&mut self) -> impl Iterator<Item = &mut Subrequest> {
        self.in_flight.iter_mut().map(|(_, entry)| &mut entry.item)
    }

    fn drain(&mut self) -> impl Iterator<Item = Subrequest> {
        self.in_flight.drain().map(|entry| entry.item)
    }

    fn stage(
        &mut self,
        mut subrequest: Subrequest,
        message: &mut Outgoing,
    ) -> Result<(), Subrequest> {
        let (mut command, range) = encode::command(&subrequest, self.nsid, self.block_shift);
        let (data_in, data_out) = (encode::data_in(&subrequest), encode::data_out(&subrequest));
        let inside = data_out > 0 && data_out <= self.in_capsule;
        let range = range.as_ref().map(IntoBytes::as_bytes);
        let range_len = range.map_or(0, |range| range.len() as u32);
        let capsule = if inside { data_out } else { range_len };
        let info = CommandInfo {
            data_in,
            whole: true,
            data_out: if inside { 0 } else { data_out },
        };
        command.set_sgl(match capsule {
            // Length in bytes: the data of a read, or of a write that is sent in messages of its
            // own.
            0 => SglDescriptor::transport(data_in.max(data_out)),
            capsule => SglDescriptor::in_capsule(0, capsule),
        });
        subrequest.owed = info.data_out;
        let cid = self.in_flight.insert(info, subrequest)?;
        command.cid = cid.into();
        message.bytes(&self.writer.pdus.command(&command, capsule));
        if let Some(range) = range {
            self.writer.bytes(message, range);
        } else if inside && let Some(entry) = self.in_flight.get(cid) {
            self.writer.data(message, cid, &mut entry.item, 0, data_out);
        }
        Ok(())
    }

    fn next<'a>(
        &mut self,
        input: &'a [u8],
        message: &mut Outgoing,
    ) -> Result<(usize, Event<'a, Answered>), FabricsFailure> {
        let (used, answer) = self.answers.next(input, &mut self.in_flight)?;
        let event = match answer {
            Answer::More => Event::More,
            Answer::Data { cid, at, bytes } => {
                let name = cid.into();
                Event::Data { name, at, bytes }
            }
            Answer::Transfer { cid, tag, at, len } => {
                if let Some(entry) = self.in_flight.get(cid) {
                    let range = (at, len);
                    let subrequest = &mut entry.item;
                    self.writer.transfer(message, cid, subrequest, tag, range);
                }
                Event::More
            }
            Answer::End {
                cid,
                completion,
                corrupt,
            } => {
                let status = completion.status();
                let answer = Answered { status, corrupt };
                let name = cid.into();
                Event::End { name, answer }
            }
            Answer::Terminated(why) => return Err(FabricsFailure::Terminated(why)),
        };
        Ok((used, event))
    }

    fn expects(&self) -> Option<Expected> {
        let nvme_tcp::Expected { cid, at, left } = self.answers.expects()?;
        let name = cid.into();
        Some(Expected { name, at, left })
    }

    fn took(&mut self, len: u32) {
        self.answers.took(len);
    }

    fn returned(&mut self, name: u64, list: SegmentList) -> u64 {
        let cid = name & !PIECE;
        let subrequest = self.get(cid);
        if let Some(subrequest) = subrequest {
            subrequest.lent = subrequest.lent.saturating_sub(1);
            if name == cid {
                subrequest.list = list;
                return cid;
            }
        }
        if name != cid {
            self.writer.keep(list);
        }
        cid
    }

    /// Adds an H2CTermReq PDU that reports a violation.
    fn farewell(&self, why: Option<&FabricsFailure>, message: &mut Outgoing) {
        if let Some(FabricsFailure::Violation(violation)) = why {
            message.bytes(&violation.h2c_term_req());
        }
    }
}
