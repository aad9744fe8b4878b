//! Where in the session's memory what is: words of eight bytes, then the bytes received.

use state_memory::Area;
use std::sync::atomic::{AtomicU64, Ordering};

/// A word, by its place in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Word {
    /// Number of the client's socket; zero: there is no client. See [`ABANDONED`].
    Client = 0,
    /// Place in the stream of the first byte that has not been received.
    Received = 8,
    /// Place in the stream of the byte that lies first in [`RING`].
    Base = 16,
    /// The message in hand, see [`Hand`].
    Hand = 24,
    /// What `Received` was when bytes began to be taken from the socket.
    TakeFrom = 32,
    /// How many, and the pipe's level before, see [`Take`]; zero: none.
    Take = 40,
    /// The reply in the pipe: its length, or the length of what follows its head.
    Reply = 48,
    /// The reply's head, which is sent with a descriptor: two words.
    Head = 56,
    /// The message whose answer is in `Hint`: its place in the stream.
    HintFor = 72,
    /// What an answer says that could not be found out again.
    Hint = 80,
    /// The version is negotiated: what follows counts.
    Negotiated = 88,
    /// What the client may rely on: [`CAPABILITIES`] words.
    Told = 96,
    /// What the client has stated: as many.
    Theirs = 136,
}

/// Words of one side's capabilities.
pub(super) const CAPABILITIES: usize = 5;

/// In [`Word::Client`]: the client's descriptors are not kept any more, and the next process cannot
/// go on with it.
pub(super) const ABANDONED: u64 = 1 << 32;

/// Where the bytes received lie.
pub(super) const RING: usize = 4096;
/// How many there may be: the longest message, and what a read brings beyond it.
pub(super) const RING_LEN: usize = (1 << 20) + (128 << 10);

/// Changed where a process could not go on with what one of the version before has left.
pub const SESSION_VERSION: u32 = 1;
/// Bytes of a session.
pub const SESSION: usize = RING + RING_LEN;

/// What is being done with the message at the front of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nothing yet: it may not have come.
    Idle,
    /// It is handled. The next process does so again.
    Handling,
    /// Its reply goes into the pipe. If it is there in full, it counts; else the message is handled
    /// again.
    Writing,
    /// The reply is in the pipe, but for its head, which is sent with a descriptor.
    Heading,
    /// What is left of the reply is in the pipe, and nowhere else.
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
pub(super) struct Hand {
    /// Its place in the stream, without the upper half.
    pub place: u32,
    pub phase: Phase,
    /// Number of the first group of descriptors that no earlier message has had.
    pub group: u8,
    /// Groups that are this message's.
    pub groups: u8,
}

impl Hand {
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

/// Bytes that are being taken from the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Take {
    /// How many, at least one.
    pub len: u32,
    /// The level of the pipe that counts them, before.
    pub level: u32,
}

impl Take {
    pub(super) fn to_word(self) -> u64 {
        u64::from(self.level) << 32 | u64::from(self.len)
    }

    pub(super) fn of_word(word: u64) -> Option<Self> {
        let (len, level) = (word as u32, (word >> 32) as u32);
        (len > 0).then_some(Self { len, level })
    }
}

/// What a kept descriptor's note says: with which read it came, and as which of its descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Came {
    /// Place in the stream behind the read's last byte: its lower 20 bits.
    pub end: u32,
    /// Bytes of the read.
    pub len: u16,
    /// The read's number among those that brought descriptors.
    pub group: u8,
    /// Which of the read's descriptors.
    pub index: u8,
    /// How many the read brought.
    pub count: u8,
}

/// Bits of a place in the stream that a note has.
pub(super) const PLACE_BITS: u32 = 20;

impl Came {
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

/// The words, all of which are there: [`Words::new`] has seen to it.
#[derive(Clone, Debug)]
pub(super) struct Words(Area);

impl Words {
    /// Of a session's memory. `None`: it is too small, or has no pages.
    pub(super) fn new(area: Area) -> Option<Self> {
        let is_large = area.len() >= SESSION && area.prepare(RING).is_ok();
        is_large.then_some(Self(area))
    }

    pub(super) fn area(&self) -> &Area {
        &self.0
    }

    fn at(&self, offset: usize) -> Option<&AtomicU64> {
        self.0.word(offset)
    }

    pub(super) fn load(&self, word: Word) -> u64 {
        self.load_at(word as usize)
    }

    /// Everything that was stored before it is there when it is.
    pub(super) fn store(&self, word: Word, value: u64) {
        self.store_at(word as usize, value);
    }

    pub(super) fn load_at(&self, offset: usize) -> u64 {
        self.at(offset)
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    pub(super) fn store_at(&self, offset: usize, value: u64) {
        if let Some(word) = self.at(offset) {
            word.store(value, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_say_what_was_meant(place: u32, group: u8, groups: u8, len: u16, index: u8) {
            for phase in Phase::ALL {
                let hand = Hand { place, phase, group, groups };
                prop_assert_eq!(Hand::of_word(hand.to_word()), Some(hand));
            }
            let end = place & ((1 << PLACE_BITS) - 1);
            let came = Came { end, len, group, index, count: groups };
            prop_assert_eq!(Came::of_detail(came.to_detail()), came);
            let take = Take { len: place, level: u32::from(len) };
            prop_assert_eq!(Take::of_word(take.to_word()), (place > 0).then_some(take));
        }

        #[test]
        fn any_word_may_be_there(word: u64) {
            if let Some(hand) = Hand::of_word(word) {
                prop_assert_eq!(Hand::of_word(hand.to_word()), Some(hand));
            }
        }
    }
}
