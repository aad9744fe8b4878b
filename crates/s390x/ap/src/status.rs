//! AP queue status word, which every AP instruction stores in general register 1.

/// Response code of an AP instruction (`AP_RESPONSE_*` in Linux, `drivers/s390/crypto/ap_bus.h`).
/// Unknown codes are passed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Response(pub u8);

impl Response {
    /// The function was performed.
    pub const NORMAL: Response = Response(0x00);
    /// The queue does not exist, or this program may not use it.
    pub const QUEUE_NOT_AVAILABLE: Response = Response(0x01);
    /// A reset of the queue is in progress.
    pub const RESET_IN_PROGRESS: Response = Response(0x02);
    /// The adapter is deconfigured.
    pub const DECONFIGURED: Response = Response(0x03);
    /// The adapter is in the check-stop state.
    pub const CHECKSTOPPED: Response = Response(0x04);
    /// The queue is busy with an earlier function; the program should try again.
    pub const BUSY: Response = Response(0x05);
    /// The notification byte's address cannot be used.
    pub const INVALID_ADDRESS: Response = Response(0x06);
    /// Interrupts of the queue already have the requested state.
    pub const OTHERWISE_CHANGED: Response = Response(0x07);
    /// The guest's interruption state area cannot be used.
    pub const INVALID_GISA: Response = Response(0x08);
    /// NQAP: the queue is full.
    pub const QUEUE_FULL: Response = Response(0x10);
    /// DQAP: the queue has no reply. Same code as [`Response::QUEUE_FULL`].
    pub const NO_PENDING_REPLY: Response = Response(0x10);
    /// The part of a message lacks its first part.
    pub const NO_FIRST_PART: Response = Response(0x13);
    /// The message exceeds the maximum of the queue.
    pub const MESSAGE_TOO_BIG: Response = Response(0x15);
    /// The message needs a facility that is not installed.
    pub const FACILITY_NOT_INSTALLED: Response = Response(0x16);

    /// Returns whether the queue is no longer operational: it can neither execute requests nor
    /// write a notification byte.
    pub const fn is_gone(self) -> bool {
        matches!(self, Response(0x01 | 0x03 | 0x04))
    }
}

/// The AP queue status word, 32 bits; bits 3-6 and 16-31 are zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStatus {
    /// Bit 0: the queue contains neither requests nor replies.
    pub empty: bool,
    /// Bit 1: the queue contains replies.
    pub replies_waiting: bool,
    /// Bit 2: the queue accepts no further request.
    pub full: bool,
    /// Bit 7: interrupts are enabled (the interrupt bit).
    pub interrupts: bool,
    /// Bits 8-15: response code.
    pub response: Response,
}

impl QueueStatus {
    /// Creates a status with this response code and all other bits zero.
    pub const fn of(response: Response) -> QueueStatus {
        QueueStatus {
            empty: false,
            replies_waiting: false,
            full: false,
            interrupts: false,
            response,
        }
    }

    /// Returns this status with another response code.
    pub const fn with(self, response: Response) -> QueueStatus {
        QueueStatus { response, ..self }
    }

    /// Encodes the word, as it is in bits 32-63 of general register 1.
    pub const fn word(self) -> u32 {
        (self.empty as u32) << 31
            | (self.replies_waiting as u32) << 30
            | (self.full as u32) << 29
            | (self.interrupts as u32) << 24
            | (self.response.0 as u32) << 16
    }

    /// Decodes a word.
    pub const fn from_word(word: u32) -> QueueStatus {
        QueueStatus {
            empty: word >> 31 & 1 == 1,
            replies_waiting: word >> 30 & 1 == 1,
            full: word >> 29 & 1 == 1,
            interrupts: word >> 24 & 1 == 1,
            response: Response((word >> 16 & 0xff) as u8),
        }
    }

    /// Returns the condition code of the status: 0 for a normal response, otherwise 3.
    pub const fn condition_code(self) -> u8 {
        if self.response.0 == 0 { 0 } else { 3 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_status_encodes_each_field() {
        let status = QueueStatus {
            empty: true,
            replies_waiting: false,
            full: true,
            interrupts: true,
            response: Response::OTHERWISE_CHANGED,
        };
        assert_eq!(status.word(), 0xa107_0000);
        assert_eq!(status.condition_code(), 3);
        assert_eq!(QueueStatus::default().condition_code(), 0);
        for word in (0..=0xff).map(|byte: u32| byte << 16 | 0x4000_0000) {
            assert_eq!(QueueStatus::from_word(word).word(), word);
        }
    }
}
