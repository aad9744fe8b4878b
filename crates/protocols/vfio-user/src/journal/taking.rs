//! Transfer of bytes from the client's socket into the session's memory.
//!
//! Posted messages, such as a guest's doorbells, are handled before their bytes are taken from the
//! socket: one call then takes those of several looks. The next process finds the number of bytes
//! that were taken, which is less than the offset of the message in hand. The bytes between are
//! messages that were handled, which it takes from the socket and discards.

use super::layout::{DescriptorRecord, PLACE_BITS, PendingRead, Phase, RING, RING_LEN, Word};
use super::{Journal, REFUSED, SENT, pipe_error};
use receive::{MAX_SEEN, ReadError, Socket, kind};
use rustix::io::Errno;
use state_memory::{LedgerError, Ticket};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};

/// Number of calls after which the counting pipe is emptied. Each call's bytes use one of its
/// buffers, of which there are normally sixteen.
const EMPTY_AFTER: u32 = 8;

/// Maximum number of looks whose bytes are taken together.
const MAX_LOOKS: u8 = 4;
/// Number of looks whose bytes are taken at once after nothing else came for the bytes of one look.
const LOOKS_AT_ONCE: u8 = 8;

/// Looks that left their bytes in the socket.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// Number of looks since bytes were last taken.
    count: u8,
    /// Number of the next looks whose bytes are to be taken at once.
    at_once: u8,
}

/// Bytes that were peeked at, with descriptors that the keeper has yet to hold.
#[derive(Debug)]
pub(crate) struct Arriving {
    pub len: usize,
    pub fds: Vec<OwnedFd>,
    pub numbers: Vec<Option<NonZeroU32>>,
    ticket: Ticket,
}

impl Journal {
    /// Returns the number of bytes that the journal can still store.
    pub(crate) fn room(&self) -> usize {
        let held = self.found.wrapping_sub(self.place);
        RING_LEN.saturating_sub(usize::try_from(held).unwrap_or(RING_LEN))
    }

    /// Returns the number of bytes that the journal stores and that are still in the socket.
    pub(crate) fn seen(&self) -> usize {
        usize::try_from(self.found.wrapping_sub(self.received)).unwrap_or(0)
    }

    /// Sends the descriptors of peeked bytes to the keeper, before the bytes are read.
    pub(crate) fn arrive(&mut self, len: usize, fds: Vec<OwnedFd>) {
        let group = self.next_group;
        let kept = if self.has_failed() {
            None
        } else {
            match self.keep_all(len, group, &fds) {
                Ok(kept) => Some(kept),
                Err(error) => {
                    self.abandon(&error);
                    None
                }
            }
        };
        let (numbers, ticket) = match kept {
            Some((numbers, ticket)) => (numbers, Some(ticket)),
            None => (vec![None; fds.len()], None),
        };
        self.arriving = Some(Arriving {
            len,
            fds,
            numbers,
            ticket: ticket.unwrap_or(Ticket::ANSWERED),
        });
    }

    fn keep_all(
        &self,
        len: usize,
        group: u8,
        fds: &[OwnedFd],
    ) -> Result<(Vec<Option<NonZeroU32>>, Ticket), LedgerError> {
        let mut ledger = self.ledger.borrow_mut();
        let end = self.received.wrapping_add(len as u64);
        let mut numbers = Vec::new();
        for (index, fd) in (0..).zip(fds) {
            let detail = DescriptorRecord {
                end: end as u32 & ((1 << PLACE_BITS) - 1),
                len: u16::try_from(len).unwrap_or(u16::MAX),
                group,
                index,
                count: u8::try_from(fds.len()).unwrap_or(u8::MAX),
            };
            let detail = detail.to_detail();
            let number = if kind::is_memory(fd) || kind::is_eventfd(fd) {
                ledger.keep(SENT, detail, fd.as_fd())?
            } else {
                // The device refuses the descriptor; the next process gets a stand-in of such a
                // kind.
                ledger.note(REFUSED, detail)?
            };
            numbers.push(Some(number));
        }
        crash::point!("vfio-user.arriving.asked");
        Ok((numbers, ledger.barrier()?))
    }

    /// Returns whether the keeper holds the descriptors of the peeked bytes, or cannot.
    pub(super) fn has_arrived(&mut self) -> bool {
        let Some(ticket) = self.arriving.as_ref().map(|arriving| arriving.ticket) else {
            return true;
        };
        ticket == Ticket::ANSWERED
            || self.ledger.borrow().is_answered(ticket)
            || self.has_failed()
            || self.falls_behind()
    }

    /// Returns whether peeked bytes with descriptors have not been taken.
    pub(crate) fn is_arriving(&self) -> bool {
        self.arriving.is_some()
    }

    /// Returns the peeked bytes after the keeper has answered, so that they can be read.
    pub(crate) fn take_arrived(&mut self) -> Option<Arriving> {
        if !self.has_arrived() {
            return None;
        }
        let arrived = self.arriving.take();
        if arrived.is_some() {
            crash::point!("vfio-user.arriving.kept");
            self.next_group = self.next_group.wrapping_add(1);
        }
        arrived
    }

    /// Takes peeked bytes from the socket into the session's memory.
    ///
    /// # Errors
    /// [`ReadError`] when the stream cannot be read any more.
    pub(crate) fn take(&mut self, socket: &mut Socket, bytes: &[u8]) -> Result<(), ReadError> {
        self.find(bytes)?;
        self.take_found(socket)
    }

    /// Copies peeked bytes into the session's memory, and may leave them in the socket. They are
    /// whole messages without reply.
    ///
    /// # Errors
    /// [`ReadError`] when the stream cannot be read any more.
    pub(crate) fn see(&mut self, socket: &mut Socket, bytes: &[u8]) -> Result<(), ReadError> {
        self.find(bytes)?;
        if self.looks.at_once > 0 {
            self.looks.at_once -= 1;
            return self.take_found(socket);
        }
        self.looks.count += 1;
        if self.looks.count >= MAX_LOOKS || self.seen() > MAX_SEEN {
            return self.take_found(socket);
        }
        crash::point!("vfio-user.take.deferred");
        Ok(())
    }

    /// Takes bytes of earlier looks, behind which nothing was found that may be handled before.
    ///
    /// # Errors
    /// [`ReadError`] when the stream cannot be read any more.
    pub(crate) fn take_seen(&mut self, socket: &mut Socket) -> Result<(), ReadError> {
        if self.looks.count == 1 {
            self.looks.at_once = LOOKS_AT_ONCE;
        }
        self.take_found(socket)
    }

    /// Adds peeked bytes to the session's memory.
    fn find(&mut self, bytes: &[u8]) -> Result<(), ReadError> {
        if self.found == self.place && self.phase == Phase::Idle {
            // The ring restarts at its beginning, so that a session without backlog uses few pages.
            self.base = self.found;
            self.words.store(Word::Base, self.base);
        }
        self.put(bytes).ok_or(pipe_error(Errno::NOMEM))?;
        self.found = self.found.wrapping_add(bytes.len() as u64);
        crash::point!("vfio-user.take.copied");
        Ok(())
    }

    /// Takes all bytes from the socket that the session's memory has.
    ///
    /// # Errors
    /// [`ReadError`] when the stream cannot be read any more.
    pub(crate) fn take_found(&mut self, socket: &mut Socket) -> Result<(), ReadError> {
        self.looks.count = 0;
        if self.seen() == 0 {
            return Ok(());
        }
        while self.seen() > 0 {
            self.consume(socket, self.seen())?;
        }
        socket.consumed();
        Ok(())
    }

    /// Stores received bytes after those in the ring.
    fn put(&self, bytes: &[u8]) -> Option<()> {
        if bytes.len() > self.room() {
            return None;
        }
        let from = usize::try_from(self.found.wrapping_sub(self.base)).ok()? % RING_LEN;
        let (first, second) = bytes
            .split_at_checked(RING_LEN - from)
            .unwrap_or((bytes, &[]));
        let area = self.words.area();
        area.store(RING + from, first).ok()?;
        area.store(RING, second).ok()
    }

    /// Returns a copy of the received bytes that are not handled yet.
    pub(super) fn get(&self) -> Option<Vec<u8>> {
        let len = usize::try_from(self.found.wrapping_sub(self.place)).ok()?;
        let from = usize::try_from(self.place.wrapping_sub(self.base)).ok()? % RING_LEN;
        let mut bytes = vec![0; len];
        let (first, second) = bytes
            .split_at_mut_checked(RING_LEN - from)
            .unwrap_or_default();
        if first.is_empty() && second.is_empty() {
            self.words.area().load(RING + from, &mut bytes).ok()?;
        } else {
            self.words.area().load(RING + from, first).ok()?;
            self.words.area().load(RING, second).ok()?;
        }
        Some(bytes)
    }

    /// Moves at most `len` bytes from the socket into the counting pipe.
    fn consume(&mut self, socket: &mut Socket, len: usize) -> Result<(), ReadError> {
        if self.counted >= EMPTY_AFTER {
            self.empty_counter();
        }
        let take = self.note_take(len);
        crash::point!("vfio-user.take.noted");
        let moved = match socket.consume(self.counter.writer.as_fd(), take.len as usize) {
            Err(ReadError::System(Errno::AGAIN)) if take.level > 0 => {
                // The pipe may have used up its buffers.
                self.words.store(Word::Take, 0);
                self.empty_counter();
                return Ok(());
            }
            moved => moved?,
        };
        crash::point!("vfio-user.take.moved");
        if moved == 0 {
            // The peeked bytes have disappeared: another process reads the socket.
            return Err(pipe_error(Errno::IO));
        }
        self.counted += 1;
        self.level = self
            .level
            .wrapping_add(u32::try_from(moved).unwrap_or(u32::MAX));
        self.received = self.received.wrapping_add(moved as u64);
        self.words.store(Word::Received, self.received);
        crash::point!("vfio-user.take.received");
        self.words.store(Word::Take, 0);
        Ok(())
    }

    fn note_take(&self, len: usize) -> PendingRead {
        let take = PendingRead {
            len: u32::try_from(len).unwrap_or(u32::MAX),
            level: self.level,
        };
        self.words.store(Word::TakeFrom, self.received);
        self.words.store(Word::Take, take.to_word());
        take
    }

    /// Empties the counting pipe, while no read is in progress.
    pub(super) fn empty_counter(&mut self) {
        self.counter.drain();
        self.counted = 0;
        self.level = 0;
    }
}
