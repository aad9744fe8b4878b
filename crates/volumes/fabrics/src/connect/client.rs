//! Synchronous client for one queue: sends a command and waits for its completion. Used for Admin
//! queues, and for the first commands on I/O queues.

use super::error::ConversationError;
use nvme::aen::AsyncEvent;
use nvme::sgl::SglDescriptor;
use nvme::{AdminOpcode, Command, Completion};
use nvme_tcp::pdu::INITIALIZE;
use nvme_tcp::{Answer, Answers, CommandInfo, ConnectionLimits, Host, InFlight, Writer, digest};
use remote::Conversation;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Maximum number of outstanding commands: the one that is waited for, a Keep Alive, and
/// Asynchronous Event Requests.
const DEPTH: u16 = 15;
/// Size in bytes of the receive buffer of a connection.
const BUFFER: usize = 16 << 10;
/// Maximum number of data bytes of one command in this simple client.
const MAX_DATA_LEN: u32 = 1 << 20;

/// Data of a command, and its direction.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Data<'a> {
    None,
    /// Data that the controller sends, of this length in bytes.
    In(u32),
    /// Data that the host sends, in the command capsule.
    Out(&'a [u8]),
}

#[derive(Debug)]
struct Pending {
    data: Vec<u8>,
    answer: Option<Completion>,
    is_event: bool,
}

/// Blocking client of a queue's connection, for Connect and admin commands.
#[derive(Debug)]
pub(crate) struct Client {
    conversation: Conversation,
    writer: Writer,
    answers: Answers,
    commands: InFlight<Pending>,
    /// Received bytes that were not parsed yet.
    received: Vec<u8>,
    events: VecDeque<AsyncEvent>,
    /// Number of outstanding Asynchronous Event Requests.
    waiting: u16,
    last_sqhd: u16,
}

impl Client {
    /// Exchanges the initialization PDUs (ICReq and ICResp) on a new connection.
    pub(crate) fn new(
        mut conversation: Conversation,
        host: Host,
    ) -> Result<Self, ConversationError> {
        conversation.write_all(&host.request())?;
        let mut response = [0; INITIALIZE];
        read_exact(&mut conversation, &mut response)?;
        let limits = host.agree(&response)?;
        Ok(Self {
            conversation,
            writer: Writer::new(limits),
            answers: Answers::new(&limits),
            commands: InFlight::new(DEPTH),
            received: Vec::new(),
            events: VecDeque::new(),
            waiting: 0,
            last_sqhd: 0,
        })
    }

    pub(crate) fn limits(&self) -> ConnectionLimits {
        *self.writer.limits()
    }

    /// Sets the time until which sending and receiving must succeed.
    pub(crate) fn set_deadline(&mut self, deadline: Instant) {
        self.conversation.set_deadline(deadline);
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        self.conversation.fd()
    }

    /// Returns the socket, in blocking mode, for another user. No command may be outstanding.
    pub(crate) fn into_fd(self) -> Result<OwnedFd, ConversationError> {
        if !self.received.is_empty() {
            return Err(ConversationError::Unusable(
                "the reply is longer than requested",
            ));
        }
        Ok(self.conversation.into_blocking()?)
    }

    /// Returns the submission queue head (SQHD) in the last completion.
    pub(crate) fn last_sqhd(&self) -> u16 {
        self.last_sqhd
    }

    /// Sends a command and waits for it. Returns its completion and data. `name` is the command's
    /// name in error messages.
    pub(crate) fn execute(
        &mut self,
        name: &'static str,
        command: Command,
        data: Data<'_>,
    ) -> Result<(Completion, Vec<u8>), ConversationError> {
        let cid = self.submit(command, data, false)?;
        loop {
            if let Some((completion, data)) = self.take(cid) {
                let status = completion.status();
                return if status.is_success() {
                    Ok((completion, data))
                } else {
                    Err(ConversationError::Status {
                        command: name,
                        status,
                        dw0: completion.dw0.get(),
                    })
                };
            }
            self.receive()?;
        }
    }

    /// Sends a command without waiting; [`Client::take`] returns its completion later.
    pub(crate) fn begin(&mut self, command: Command) -> Result<u16, ConversationError> {
        self.submit(command, Data::None, false)
    }

    /// Returns the completion and data of the command with this identifier; `None` while it is
    /// outstanding.
    pub(crate) fn take(&mut self, cid: u16) -> Option<(Completion, Vec<u8>)> {
        let answer = self.commands.get(cid)?.item.answer?;
        let entry = self.commands.remove(cid)?;
        Some((answer, entry.item.data))
    }

    /// Sends an Asynchronous Event Request.
    pub(crate) fn request_event(&mut self) -> Result<(), ConversationError> {
        let command = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
        self.submit(command, Data::None, true)?;
        self.waiting += 1;
        Ok(())
    }

    /// Returns the number of outstanding Asynchronous Event Requests.
    pub(crate) fn event_requests(&self) -> u16 {
        self.waiting
    }

    /// Returns the oldest asynchronous event that was reported and not returned yet.
    pub(crate) fn next_event(&mut self) -> Option<AsyncEvent> {
        self.events.pop_front()
    }

    fn submit(
        &mut self,
        mut command: Command,
        data: Data<'_>,
        is_event: bool,
    ) -> Result<u16, ConversationError> {
        let (expected, out) = match data {
            Data::None => (0, &[][..]),
            Data::In(len) => (len.min(MAX_DATA_LEN), &[][..]),
            Data::Out(bytes) => (0, bytes),
        };
        // In a capsule of the Admin queue 8 KiB fit.
        let len = out.len() as u32;
        command.set_sgl(match data {
            Data::Out(_) => SglDescriptor::in_capsule(0, len),
            _ => SglDescriptor::transport(expected),
        });
        let asked = CommandInfo {
            data_in: expected,
            whole: false,
            data_out: 0,
        };
        let item = Pending {
            data: Vec::new(),
            answer: None,
            is_event,
        };
        let cid = self.commands.insert(asked, item);
        let cid = cid.map_err(|_| ConversationError::Silent)?;
        command.cid = cid.into();
        let mut capsule = self.writer.command(&command, len).to_vec();
        capsule.extend_from_slice(out);
        if !out.is_empty() && self.writer.data_digest() {
            capsule.extend_from_slice(&digest::crc32c(out).to_le_bytes());
        }
        self.conversation.write_all(&capsule)?;
        Ok(cid)
    }

    /// Waits for at least one byte from the controller, and receives all available ones.
    pub(crate) fn receive(&mut self) -> Result<(), ConversationError> {
        let had = self.received.len();
        self.received.resize(had + BUFFER, 0);
        let room = self.received.get_mut(had..).unwrap_or_default();
        let got = self.conversation.read(room);
        let len = *got.as_ref().unwrap_or(&0);
        self.received.truncate(had + len);
        if got? == 0 {
            return Err(ConversationError::Closed);
        }
        let mut used_up = 0;
        let result = loop {
            let input = self.received.get(used_up..).unwrap_or_default();
            let (used, answer) = match self.answers.next(input, &mut self.commands) {
                Ok(next) => next,
                Err(violation) => {
                    // Best effort: nothing depends on the delivery of this PDU.
                    let _ = self.conversation.write(&violation.h2c_term_req());
                    break Err(violation.into());
                }
            };
            used_up += used;
            match answer {
                Answer::More if used == 0 => break Ok(()),
                Answer::More => {}
                Answer::Data { cid, bytes, .. } => {
                    if let Some(entry) = self.commands.get(cid) {
                        entry.item.data.extend_from_slice(bytes);
                    }
                }
                Answer::End {
                    cid,
                    completion,
                    corrupt,
                } => {
                    if corrupt {
                        break Err(ConversationError::Unusable("data with a wrong digest"));
                    }
                    self.last_sqhd = completion.sqhd.get();
                    self.ended(cid, completion);
                }
                // Data to the controller is always in the capsule.
                Answer::Transfer { .. } => {
                    break Err(ConversationError::Unusable("it asks for data again"));
                }
                Answer::Terminated(why) => break Err(ConversationError::Terminated(why)),
            }
        };
        self.received.drain(..used_up);
        result
    }

    fn ended(&mut self, cid: u16, completion: Completion) {
        let Some(entry) = self.commands.get(cid) else {
            return;
        };
        if !entry.item.is_event {
            entry.item.answer = Some(completion);
            return;
        }
        self.commands.remove(cid);
        self.waiting = self.waiting.saturating_sub(1);
        if completion.status().is_success() {
            let event = AsyncEvent::from_bits(completion.dw0.get());
            self.events.push_back(event);
        }
    }
}

fn read_exact(conversation: &mut Conversation, buffer: &mut [u8]) -> Result<(), ConversationError> {
    conversation
        .read_exact(buffer)
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => ConversationError::Closed,
            _ => ConversationError::Io(error),
        })
}
