//! Completion queue entry (NVMe Base 2.1, 4.2.1).
//!
//! Controllers create completions and drivers parse them:
//!
//! ```
//! use nvme::{Completion, Status};
//!
//! let entry = Completion {
//!     dw0: 0x0003_0003.into(),
//!     sqhd: 5.into(),
//!     sqid: 1.into(),
//!     cid: 0x42.into(),
//!     status_phase: Completion::pack_status(Status::SUCCESS, true),
//!     ..Default::default()
//! };
//! assert!(entry.phase());
//! assert_eq!(entry.status().into_result(), Ok(()));
//! assert_eq!(entry.cid.get(), 0x42);
//! ```

use zerocopy::little_endian::{U16, U32};

use crate::Status;
use crate::macros::wire_struct;

wire_struct! {
    /// A completion queue entry, 16 bytes.
    pub struct Completion(16) {
        /// Dword 0: result, specific to the command.
        pub dw0 @ 0: U32,
        /// Dword 1: result, specific to the command.
        pub dw1 @ 4: U32,
        /// SQ Head Pointer at the time when the entry was created.
        pub sqhd @ 8: U16,
        /// Identifier of the submission queue.
        pub sqid @ 10: U16,
        /// Identifier of the completed command.
        pub cid @ 12: U16,
        /// Phase Tag in bit 0, status in bits 15:1; see [`Completion::status`]
        /// and [`Completion::phase`].
        pub status_phase @ 14: U16,
    }
}

impl Completion {
    /// Size of an entry as a power of two, for CC.IOCQES and the CQES field of Identify.
    pub const SIZE_LOG2: u8 = 4;

    /// Returns the status without the phase tag.
    #[inline]
    pub const fn status(&self) -> Status {
        Status::from_bits(self.status_phase.get() >> 1)
    }

    /// Sets the status and keeps the phase tag.
    #[inline]
    pub const fn set_status(&mut self, status: Status) {
        self.status_phase = Self::pack_status(status, self.phase());
    }

    /// Returns the phase tag.
    #[inline]
    pub const fn phase(&self) -> bool {
        self.status_phase.get() & 1 != 0
    }

    /// Sets the phase tag and keeps the status.
    #[inline]
    pub const fn set_phase(&mut self, phase: bool) {
        self.status_phase = U16::new((self.status_phase.get() & !1) | phase as u16);
    }

    /// Combines status and phase tag to the last 16-bit word of an entry.
    #[inline]
    pub const fn pack_status(status: Status, phase: bool) -> U16 {
        U16::new((status.into_bits() << 1) | phase as u16)
    }

    /// Returns both result dwords as one number, with `dw0` in the lower half.
    #[inline]
    pub const fn result64(&self) -> u64 {
        (self.dw1.get() as u64) << 32 | self.dw0.get() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromBytes, IntoBytes};

    #[test]
    fn status_and_phase_share_word() {
        let mut completion = Completion {
            cid: U16::new(0x1234),
            ..Default::default()
        };
        let status = Status::INVALID_FIELD.with_dnr(true);
        completion.set_phase(true);
        completion.set_status(status);
        assert_eq!(completion.status_phase.get(), 0x8000 | 2 << 1 | 1);
        assert_eq!((completion.status(), completion.phase()), (status, true));
        completion.set_phase(false);
        assert_eq!((completion.status(), completion.phase()), (status, false));
        assert_eq!(completion.as_bytes()[12..], [0x34, 0x12, 0x04, 0x80]);
    }

    #[test]
    fn any_bytes_are_completion_entry() {
        let bytes = [0xff; 16];
        let completion = Completion::read_from_bytes(&bytes).unwrap();
        assert_eq!(completion.as_bytes(), bytes);
        assert_eq!(completion.status().name(), None);
        assert_eq!(completion.result64(), u64::MAX);
    }
}
