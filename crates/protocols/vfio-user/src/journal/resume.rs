//! Start of a process with the state of the previous one.

use super::layout::{
    ABANDONED, CurrentMessage, DescriptorRecord, PLACE_BITS, PendingRead, Phase, RING_LEN, Word,
};
use super::replies::WITH_HEAD;
use super::{Journal, JournalError, JournalSetup, Pipe, REFUSED, SENT, SETTLED};
use crate::inbox::{FdGroup, Inbox};
use receive::MAX_SEEN;
use rustix::io::Errno;
use state_memory::Descriptor;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Half of the number of stream offsets that the entry of a descriptor can distinguish.
const HALF: u32 = 1 << (PLACE_BITS - 1);
const PLACES: u32 = 1 << PLACE_BITS;

/// State of a connection that a previous process has left.
#[derive(Debug)]
pub(crate) struct PreviousConnection {
    pub inbox: Inbox,
    /// Numbers under which the keeper holds the descriptors of messages that were handled: those
    /// that the device uses (guest memory, eventfds), and those that it has dropped.
    pub earlier: Vec<NonZeroU32>,
    /// Whether the first message was being handled, so that it is handled again.
    pub again: bool,
}

impl Journal {
    /// Begins with the client of a previous process. `fd` returns descriptors by their numbers, and
    /// `file` the file that is sent with the reply to a message.
    ///
    /// # Errors
    /// [`JournalError`] when no process can continue with the client.
    pub(crate) fn resume<'a>(
        setup: JournalSetup,
        mut fd: impl FnMut(NonZeroU32) -> Option<OwnedFd>,
        file: impl Fn(&[u8]) -> Option<BorrowedFd<'a>>,
    ) -> Result<(Self, PreviousConnection), JournalError> {
        let mut journal = Self::new(setup)?;
        if journal.words.load(Word::Client) & ABANDONED != 0 {
            return Err(JournalError::Abandoned);
        }
        journal.client = journal.client();
        if journal.client.is_none() {
            return Err(JournalError::Damaged("there is no client"));
        }
        journal.resume_take()?;
        journal.resume_place()?;
        let bytes = journal.get().ok_or(JournalError::Damaged("bytes"))?;
        let (groups, earlier) = journal.resume_groups(&mut fd)?;
        let again = journal.resume_phase(|| file(&bytes))?;
        crash::point!("vfio-user.resume.done");
        let inbox = Inbox::resumed(bytes, journal.place, groups);
        let left = PreviousConnection {
            inbox,
            earlier,
            again,
        };
        Ok((journal, left))
    }

    /// Completes an interrupted take: the counting pipe holds the number of bytes taken from the
    /// socket.
    fn resume_take(&mut self) -> Result<(), JournalError> {
        let level = self.counter.level().map_err(JournalError::Pipe)?;
        let level = u32::try_from(level).map_err(|_| JournalError::Damaged("a pipe"))?;
        let Some(take) = PendingRead::of_word(self.words.load(Word::Take)) else {
            self.empty_counter();
            return Ok(());
        };
        let moved = level.checked_sub(take.level);
        let moved = moved.filter(|moved| *moved <= take.len);
        let moved = moved.ok_or(JournalError::Damaged("bytes that were taken"))?;
        self.received = self.words.load(Word::TakeFrom).wrapping_add(moved.into());
        self.words.store(Word::Received, self.received);
        crash::point!("vfio-user.resume.received");
        self.words.store(Word::Take, 0);
        self.empty_counter();
        Ok(())
    }

    fn resume_place(&mut self) -> Result<(), JournalError> {
        let hand = CurrentMessage::of_word(self.words.load(Word::Hand));
        let hand = hand.ok_or(JournalError::Damaged("the message in hand"))?;
        // Messages without reply may have been handled, and still be in the socket.
        let handled = hand.place.wrapping_sub(self.received as u32);
        let held = (self.received as u32).wrapping_sub(hand.place);
        self.place = if handled as usize <= MAX_SEEN {
            self.received.wrapping_add(handled.into())
        } else if held as usize <= RING_LEN {
            self.received.wrapping_sub(held.into())
        } else {
            return Err(JournalError::Damaged("places in the stream"));
        };
        self.found = self.received.max(self.place);
        self.base = self.words.load(Word::Base);
        let from_base = self.place.wrapping_sub(self.base);
        if from_base > i64::MAX as u64 {
            return Err(JournalError::Damaged("places in the stream"));
        }
        self.phase = hand.phase;
        self.group = hand.group;
        self.groups = hand.groups;
        Ok(())
    }

    /// Restores the descriptors of bytes that have not been handled. The remaining received ones
    /// belong to the device, or are unused.
    fn resume_groups(
        &mut self,
        fd: &mut impl FnMut(NonZeroU32) -> Option<OwnedFd>,
    ) -> Result<(Vec<FdGroup>, Vec<NonZeroU32>), JournalError> {
        let noted = self.ledger.borrow().noted();
        let noted = noted.into_iter();
        let sent = noted.filter(|noted| [SENT, REFUSED].contains(&noted.kind));
        let mut earlier = Vec::new();
        let mut groups = BTreeMap::<u8, Vec<(DescriptorRecord, Descriptor)>>::new();
        for descriptor in sent {
            if descriptor.detail == SETTLED {
                earlier.push(descriptor.number);
                continue;
            }
            let came = DescriptorRecord::of_detail(descriptor.detail);
            let behind = (self.received as u32).wrapping_sub(came.end) % PLACES;
            let before = came.group.wrapping_sub(self.group) >= 0x80;
            if behind >= HALF {
                // The descriptor was never taken from the socket, where it still is.
                self.ledger.borrow_mut().forget(descriptor.number);
            } else if before {
                earlier.push(descriptor.number);
            } else {
                let nth = came.group.wrapping_sub(self.group);
                groups.entry(nth).or_default().push((came, descriptor));
            }
        }
        let mut resumed = Vec::new();
        for (nth, mut all) in groups {
            all.sort_by_key(|(came, _)| came.index);
            let first = all.first().map(|(came, _)| *came);
            let first = first.ok_or(JournalError::Damaged("descriptors"))?;
            let whole = all.iter().zip(0..).all(|((came, _), index)| {
                let same = DescriptorRecord { index, ..first };
                *came == same
            });
            if !whole || all.len() != usize::from(first.count) || usize::from(nth) != resumed.len()
            {
                return Err(JournalError::Damaged("descriptors"));
            }
            let behind = (self.received as u32).wrapping_sub(first.end) % PLACES;
            let end = self.received.wrapping_sub(behind.into());
            let start = end.wrapping_sub(first.len.into());
            let mut fds = Vec::new();
            for (_, Descriptor { number, kind, .. }) in all {
                let fd = if kind == REFUSED {
                    useless().map_err(JournalError::Pipe)?
                } else {
                    fd(number).ok_or(JournalError::Missing)?
                };
                fds.push((fd, Some(number)));
            }
            let is_in_hand = nth < self.groups;
            let owner = is_in_hand.then_some(self.place);
            resumed.push(FdGroup::resumed(start..end, owner, fds));
        }
        if resumed.len() < usize::from(self.groups) {
            return Err(JournalError::Missing);
        }
        let count = u8::try_from(resumed.len()).unwrap_or(u8::MAX);
        self.next_group = self.group.wrapping_add(count);
        Ok((resumed, earlier))
    }

    /// Restores the message that was being handled. Returns whether it has to be handled again.
    fn resume_phase<'a>(
        &mut self,
        file: impl Fn() -> Option<BorrowedFd<'a>>,
    ) -> Result<bool, JournalError> {
        let reply = self.words.load(Word::Reply);
        let level = self.replies.level().map_err(JournalError::Pipe)?;
        self.piped = level;
        match self.phase {
            Phase::Idle => {
                self.replies.drain();
                Ok(false)
            }
            Phase::Handling => {
                self.replies.drain();
                Ok(true)
            }
            Phase::Writing if level as u64 != u64::from(reply as u32) => {
                self.replies.drain();
                crash::point!("vfio-user.resume.drained");
                self.enter(Phase::Handling);
                Ok(true)
            }
            // The phase is noted before the first byte is sent. Otherwise the next process would
            // take a sent reply for one that was never written.
            Phase::Writing if reply & WITH_HEAD == 0 => {
                self.enter(Phase::Piped);
                crash::point!("vfio-user.resume.piped");
                Ok(false)
            }
            Phase::Writing | Phase::Heading => {
                self.enter(Phase::Heading);
                crash::point!("vfio-user.resume.heading");
                self.resume_head(file()).map_err(JournalError::Pipe)?;
                Ok(false)
            }
            Phase::Piped => Ok(false),
        }
    }
}

/// Returns a stand-in for a descriptor of a kind that no device accepts; a pipe is of such a kind,
/// too.
fn useless() -> Result<OwnedFd, Errno> {
    Ok(Pipe::new()?.reader)
}
