//! Sending of replies to the client.

use super::layout::{Phase, Word};
use super::{Journal, witness};
use crate::outbox::{Outbox, SendResult, send_with_fd};
use crate::wire::HEADER_SIZE;
use rustix::io::Errno;
use rustix::pipe::{SpliceFlags, splice};
use std::os::fd::{AsFd, BorrowedFd};

/// Flag of [`Word::Reply`]: the head of the reply is sent separately, with a descriptor.
pub(super) const WITH_HEAD: u64 = 1 << 32;

impl Journal {
    /// Returns whether a reply of a previous process is being sent, which is not in the outbox.
    pub(crate) fn is_replying(&self) -> bool {
        matches!(self.phase, Phase::Heading | Phase::Piped)
    }

    /// Sends the reply in the outbox, or the rest of one, as far as the socket accepts it.
    ///
    /// # Errors
    /// The kernel's error when writing to the socket fails.
    pub(crate) fn flush(
        &mut self,
        outbox: &mut Outbox,
        socket: BorrowedFd<'_>,
    ) -> Result<SendResult, Errno> {
        if self.phase == Phase::Handling && outbox.is_unsent() {
            self.write(outbox)?;
        }
        let sent = match self.phase {
            Phase::Heading => match self.send_head(socket)? {
                SendResult::All => self.send_rest(socket)?,
                sent => sent,
            },
            Phase::Piped => self.send_rest(socket)?,
            // The reply did not fit into the pipe.
            _ => return outbox.flush(socket),
        };
        if sent == SendResult::All {
            outbox.clear();
        }
        Ok(sent)
    }

    /// Writes a reply into the pipe. A reply that does not fit stays in the outbox.
    fn write(&mut self, outbox: &mut Outbox) -> Result<(), Errno> {
        let (bytes, fd) = outbox.whole();
        let witness = fd.map(|fd| witness::make(fd, self.place)).transpose();
        let witness = match witness {
            Ok(witness) => witness,
            Err(errno) => {
                tracing::debug!(%errno, "a descriptor is sent without a witness");
                return Ok(());
            }
        };
        let (head, rest) = match witness {
            Some(_) => bytes.split_at_checked(HEADER_SIZE).ok_or(Errno::INVAL)?,
            None => (&[][..], bytes),
        };
        for (n, word) in head.chunks_exact(8).enumerate() {
            let word = u64::from_ne_bytes(word.try_into().unwrap_or_default());
            self.words.store_at(Word::Head as usize + 8 * n, word);
        }
        let flag = if witness.is_some() { WITH_HEAD } else { 0 };
        self.words.store(Word::Reply, rest.len() as u64 | flag);
        self.enter(Phase::Writing);
        crash::point!("vfio-user.reply.writing");
        let written = rustix::io::write(&self.replies.writer, rest);
        crash::point!("vfio-user.reply.written");
        if written != Ok(rest.len()) {
            // A pipe has few pages when its user owns many pipes (pipe(7)).
            tracing::debug!(?written, "a reply does not fit into its pipe");
            self.enter(Phase::Handling);
            self.replies.drain();
            return Ok(());
        }
        self.piped = rest.len();
        self.witness = witness;
        self.enter(match self.witness {
            Some(_) => Phase::Heading,
            None => Phase::Piped,
        });
        crash::point!("vfio-user.reply.piped");
        Ok(())
    }

    /// Returns the head of a reply that the journal stores.
    fn head(&self) -> [u8; HEADER_SIZE] {
        let mut head = [0; HEADER_SIZE];
        for (n, word) in head.chunks_exact_mut(8).enumerate() {
            let noted = self.words.load_at(Word::Head as usize + 8 * n);
            word.copy_from_slice(&noted.to_ne_bytes());
        }
        head
    }

    fn send_head(&mut self, socket: BorrowedFd<'_>) -> Result<SendResult, Errno> {
        let witness = match self.witness.take() {
            Some(witness) => witness,
            // A missing witness was sent.
            None => {
                self.enter(Phase::Piped);
                return Ok(SendResult::All);
            }
        };
        let sent = send_with_fd(socket, &self.head(), Some(witness.as_fd()));
        crash::point!("vfio-user.reply.headed");
        match sent {
            Ok(HEADER_SIZE) => {
                // This process's copy is closed before the lock is tested again.
                drop(witness);
                self.enter(Phase::Piped);
                crash::point!("vfio-user.reply.head-noted");
                Ok(SendResult::All)
            }
            // The kernel accepts all sixteen bytes, or none.
            Ok(_) => Err(Errno::IO),
            Err(Errno::AGAIN) => {
                self.witness = Some(witness);
                Ok(SendResult::Blocked)
            }
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Ok(SendResult::PeerGone),
            Err(errno) => {
                // The head is sent again.
                self.witness = Some(witness);
                Err(errno)
            }
        }
    }

    /// Determines whether a previous process sent the head of a reply with a descriptor.
    pub(super) fn resume_head(&mut self, file: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let file = file.ok_or(Errno::BADF)?;
        if !witness::is_held(file, self.place)? {
            self.witness = Some(witness::make(file, self.place)?);
        }
        Ok(())
    }

    /// Moves the rest of the reply from the pipe into the client's socket.
    fn send_rest(&mut self, socket: BorrowedFd<'_>) -> Result<SendResult, Errno> {
        while self.piped > 0 {
            let reader = self.replies.reader.as_fd();
            let flags = SpliceFlags::NONBLOCK;
            match splice(reader, None, socket, None, self.piped, flags) {
                Ok(0) => return Err(Errno::IO),
                Ok(moved) => {
                    crash::point!("vfio-user.reply.moved");
                    self.piped = self.piped.saturating_sub(moved);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(SendResult::Blocked),
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                    return Ok(SendResult::PeerGone);
                }
                Err(errno) => return Err(errno),
            }
        }
        Ok(SendResult::All)
    }
}
