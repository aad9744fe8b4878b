//! Layout of the session's memory: words of eight bytes, then the received bytes.

use state_memory::Area;
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// Word of the journal's memory; the value is the word's byte offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Word {
    /// Keeper's number of the client's socket; zero without a client. See [`ABANDONED`].
    Client = 0,
    /// Stream offset of the first byte that was not received yet.
    Received = 8,
    /// Stream offset of the first byte that [`RING`] contains.
    Base = 16,
    /// State of the message that is being handled, see [`CurrentMessage`].
    Hand = 24,
    /// Value of `Received` at the beginning of the read in progress.
    TakeFrom = 32,
    /// Length of the take in progress and the pipe's level before, see [`PendingRead`]; zero for
    /// none.
    Take = 40,
    /// Length in bytes of the reply in the pipe, without a head that is sent separately.
    Reply = 48,
    /// First bytes (two words) of a reply that is sent with a descriptor.
    Head = 56,
    /// Stream offset of the message that `Hint` belongs to.
    HintFor = 72,
    /// Value in an answer that the next process cannot determine again.
    Hint = 80,
    /// Whether the version was negotiated, so that the following words are valid.
    Negotiated = 88,
    /// Capabilities that the client may rely on, [`CAPABILITIES`] words.
    Told = 96,
    /// Capabilities that the client has stated, [`CAPABILITIES`] words.
    Theirs = 136,
}

/// Number of words for the capabilities of one side.
pub(super) const CAPABILITIES: usize = 5;

/// Flag in [`Word::Client`]: the client's descriptors are no longer kept, and the next process
/// cannot continue with it.
pub(super) const ABANDONED: u64 = 1 << 32;

/// Byte offset of the ring of received bytes.
pub(super) const RING: usize = 4096;
/// Maximum number of received bytes: the longest message, and the bytes that a read brings beyond
/// it.
pub(super) const RING_LEN: usize = (1 << 20) + (128 << 10);

/// Version of the layout; it changes when a process could not use the previous version's state.
pub const SESSION_VERSION: u32 = 2;
/// Oldest version of the layout whose state can be continued.
pub const SESSION_OLDEST_READ: u32 = 1;
/// Size in bytes of the journal's memory for a client's session.
pub const SESSION: usize = RING + RING_LEN;

/// Progress of the first message that is not handled completely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The message was not handled, and may not have arrived completely.
    Idle,
    /// The message is being handled. The next process handles it again.
    Handling,
    /// The reply is being written into the pipe. If it is complete there, it is valid; otherwise
    /// the message is handled again.
    Writing,
    /// The reply is in the pipe except its head, which is sent with a descriptor.
    Heading,
    /// The rest of the reply is only in the pipe, from which the next process sends it.
    Piped,
}

impl Phase {
    const ALL: [Phase; 5] = [
        Phase::Idle,
        Phase::Handling,
        Phase::Writing,
        Phase::Heading,
        Phase::Piped,
    ];
}

/// The message in hand: one word, so that a single store ends one message and begins the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CurrentMessage {
    /// Lower 32 bits of the message's stream offset.
    pub place: u32,
    pub phase: Phase,
    /// Number of the first group of descriptors that no earlier message has used.
    pub group: u8,
    /// Number of groups of descriptors that belong to the message.
    pub groups: u8,
}

impl CurrentMessage {
    pub(super) fn to_word(self) -> u64 {
        u64::from(self.place) << 32
            | (self.phase as u64) << 16
            | u64::from(self.group) << 8
            | u64::from(self.groups)
    }

    pub(super) fn of_word(word: u64) -> Option<Self> {
        Some(Self {
            place: (word >> 32) as u32,
            phase: *Phase::ALL.get(usize::from((word >> 16) as u16))?,
            group: (word >> 8) as u8,
            groups: word as u8,
        })
    }
}

/// Read of bytes from the socket that is in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingRead {
    /// Number of bytes that the read takes, at least one.
    pub len: u32,
    /// Number of bytes in the counting pipe before the read.
    pub level: u32,
}

impl PendingRead {
    pub(super) fn to_word(self) -> u64 {
        u64::from(self.level) << 32 | u64::from(self.len)
    }

    pub(super) fn of_word(word: u64) -> Option<Self> {
        let (len, level) = (word as u32, (word >> 32) as u32);
        (len > 0).then_some(Self { len, level })
    }
}

/// Entry of a kept descriptor: the read that received it, and its index among the read's
/// descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DescriptorRecord {
    /// Lower 20 bits of the stream offset after the read's last byte.
    pub end: u32,
    /// Number of bytes that the read has received.
    pub len: u16,
    /// Number of the read among those that received descriptors.
    pub group: u8,
    /// Index of the descriptor among those of the read.
    pub index: u8,
    /// Number of descriptors that the read has received.
    pub count: u8,
}

/// Number of bits of a stream offset in the entry of a descriptor.
pub(super) const PLACE_BITS: u32 = 20;

impl DescriptorRecord {
    pub(super) fn to_detail(self) -> u64 {
        u64::from(self.end & ((1 << PLACE_BITS) - 1)) << 40
            | u64::from(self.len) << 24
            | u64::from(self.group) << 16
            | u64::from(self.index) << 8
            | u64::from(self.count)
    }

    pub(super) fn of_detail(detail: u64) -> Self {
        Self {
            end: (detail >> 40) as u32 & ((1 << PLACE_BITS) - 1),
            len: (detail >> 24) as u16,
            group: (detail >> 16) as u8,
            index: (detail >> 8) as u8,
            count: detail as u8,
        }
    }
}

/// Words of the journal's memory. [`SessionWords::new`] has checked that all of them exist.
#[derive(Debug)]
pub(super) struct SessionWords {
    area: Area,
    /// Whether a word could not be accessed, so that the memory no longer describes the session.
    is_lost: Cell<bool>,
}

impl SessionWords {
    /// Opens the journal's memory. `None` if it is too small or has no pages.
    pub(super) fn new(area: Area) -> Option<Self> {
        let is_large = area.len() >= SESSION && area.prepare(RING).is_ok();
        is_large.then_some(Self {
            area,
            is_lost: Cell::new(false),
        })
    }

    pub(super) fn area(&self) -> &Area {
        &self.area
    }

    /// Returns whether a word could not be accessed, so that the memory no longer describes the
    /// session.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.get()
    }

    /// Marks the session as one that the next process cannot continue, because a word is
    /// inaccessible. The mark is set at once: this process may end before it can do anything else.
    #[cold]
    fn lose(&self, offset: usize) {
        if self.is_lost.replace(true) {
            return;
        }
        if let Some(client) = self.area.word(Word::Client as usize) {
            client.fetch_or(ABANDONED, Ordering::Release);
        }
        tracing::error!(offset, "the session's memory has no word at this offset");
    }

    pub(super) fn load(&self, word: Word) -> u64 {
        self.load_at(word as usize)
    }

    /// Stores a word. All earlier stores become visible before it.
    pub(super) fn store(&self, word: Word, value: u64) {
        self.store_at(word as usize, value);
    }

    pub(super) fn load_at(&self, offset: usize) -> u64 {
        match self.area.word(offset) {
            Some(word) => word.load(Ordering::Acquire),
            None => {
                self.lose(offset);
                0
            }
        }
    }

    pub(super) fn store_at(&self, offset: usize, value: u64) {
        match self.area.word(offset) {
            Some(word) => word.store(value, Ordering::Release),
            None => self.lose(offset),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use state_memory::{Layout, StateMemory};

    #[test]
    fn store_to_missing_word_abandons_session() {
        let state = StateMemory::create(Layout {
            queues: 0,
            shares: 0,
            commands: 0,
            windows: 0,
            descriptors: 1,
            session: SESSION,
        });
        let words = SessionWords::new(state.unwrap().session()).unwrap();
        words.store(Word::Client, 7);
        assert!(!words.is_lost());
        words.store_at(SESSION, 1);
        assert!(words.is_lost());
        assert_eq!(words.load(Word::Client), 7 | ABANDONED);
    }

    proptest! {
        #[test]
        fn journal_words_round_trip(place: u32, group: u8, groups: u8, len: u16, index: u8) {
            for phase in Phase::ALL {
                let hand = CurrentMessage { place, phase, group, groups };
                prop_assert_eq!(CurrentMessage::of_word(hand.to_word()), Some(hand));
            }
            let end = place & ((1 << PLACE_BITS) - 1);
            let came = DescriptorRecord { end, len, group, index, count: groups };
            prop_assert_eq!(DescriptorRecord::of_detail(came.to_detail()), came);
            let take = PendingRead { len: place, level: u32::from(len) };
            prop_assert_eq!(PendingRead::of_word(take.to_word()), (place > 0).then_some(take));
        }

        #[test]
        fn any_journal_word_is_decoded(word: u64) {
            if let Some(hand) = CurrentMessage::of_word(word) {
                prop_assert_eq!(CurrentMessage::of_word(hand.to_word()), Some(hand));
            }
        }
    }
}
