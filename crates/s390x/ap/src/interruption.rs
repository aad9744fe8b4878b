//! Interruptions performed by software, for a machine whose PSW a program outside it can change.
//! The old PSW and the interruption code are stored in the prefix area, and the new PSW is loaded
//! from there (z/Architecture Principles of Operation, chapter 6; offsets as in Linux's `struct
//! lowcore`).

use crate::command::{ProgramException, Subclass};

/// A program status word (PSW) of z/Architecture, of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Psw {
    /// Left half of the PSW: masks, modes and condition code.
    pub mask: u64,
    /// Address of the next instruction.
    pub address: u64,
}

impl Psw {
    /// Bit 6 of the PSW: I/O interruptions are enabled.
    pub const IO: u64 = 1 << 57;
    /// Bits 18-19 of the PSW: the condition code.
    pub const CONDITION: u64 = 3 << 44;

    /// Decodes a PSW from storage.
    pub const fn from_bytes(bytes: [u8; 16]) -> Psw {
        let psw = u128::from_be_bytes(bytes);
        Psw {
            mask: (psw >> 64) as u64,
            address: psw as u64,
        }
    }

    /// Encodes the PSW for storage.
    pub const fn to_bytes(self) -> [u8; 16] {
        ((self.mask as u128) << 64 | self.address as u128).to_be_bytes()
    }

    /// Returns the PSW with a condition code.
    pub const fn with_condition(self, code: u8) -> Psw {
        let code = (code as u64 & 3) << 44;
        Psw {
            mask: self.mask & !Psw::CONDITION | code,
            ..self
        }
    }
}

/// Access to absolute storage.
pub trait Absolute {
    /// Loads bytes; returns false if the address has no storage.
    fn load(&mut self, address: u64, into: &mut [u8]) -> bool;

    /// Stores bytes; returns false if the address has no storage.
    fn store(&mut self, address: u64, bytes: &[u8]) -> bool;
}

const PROGRAM_OLD: u64 = 0x150;
const PROGRAM_NEW: u64 = 0x1d0;
const PROGRAM_CODE: u64 = 0x8c;
const IO_OLD: u64 = 0x170;
const IO_NEW: u64 = 0x1f0;
const IO_CODE: u64 = 0xb8;

/// Returns whether a processor accepts an adapter interruption of a subclass: the PSW enables I/O
/// interruptions, and control register 6 the subclass.
pub const fn is_open(psw_mask: u64, cr6: u64, subclass: Subclass) -> bool {
    psw_mask & Psw::IO != 0 && cr6 & subclass.mask() != 0
}

/// Performs an adapter interruption: stores `old` and the subclass below the prefix, and returns
/// the new PSW.
pub fn adapter(
    storage: &mut impl Absolute,
    prefix: u64,
    old: Psw,
    subclass: Subclass,
) -> Option<Psw> {
    // No subchannel, no parameter; the identification word has "adapter" in bit 0 and the subclass
    // in bits 2-4.
    let word = 1 << 31 | u32::from(subclass.get()) << 27;
    let mut code = [0; 12];
    code[8..].copy_from_slice(&word.to_be_bytes());
    take(storage, prefix, [IO_OLD, IO_NEW, IO_CODE], old, &code)
}

/// Performs a program interruption for a suppressed instruction of four bytes; `old` contains the
/// address after it.
pub fn program(
    storage: &mut impl Absolute,
    prefix: u64,
    old: Psw,
    exception: ProgramException,
) -> Option<Psw> {
    const LENGTH: u16 = 4;
    let [length, code] = [LENGTH, exception.code()].map(u16::to_be_bytes);
    let code = [length[0], length[1], code[0], code[1]];
    take(
        storage,
        prefix,
        [PROGRAM_OLD, PROGRAM_NEW, PROGRAM_CODE],
        old,
        &code,
    )
}

fn take(
    storage: &mut impl Absolute,
    prefix: u64,
    [old_at, new_at, code_at]: [u64; 3],
    old: Psw,
    code: &[u8],
) -> Option<Psw> {
    let mut new = [0; 16];
    let done = storage.load(prefix.wrapping_add(new_at), &mut new)
        && storage.store(prefix.wrapping_add(code_at), code)
        && storage.store(prefix.wrapping_add(old_at), &old.to_bytes());
    done.then(|| Psw::from_bytes(new))
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    struct Storage(Vec<u8>);

    impl Absolute for Storage {
        fn load(&mut self, address: u64, into: &mut [u8]) -> bool {
            let from = self
                .0
                .get(address as usize..)
                .and_then(|s| s.get(..into.len()));
            from.map(|from| into.copy_from_slice(from)).is_some()
        }

        fn store(&mut self, address: u64, bytes: &[u8]) -> bool {
            let to = self.0.get_mut(address as usize..);
            let to = to.and_then(|s| s.get_mut(..bytes.len()));
            to.map(|to| to.copy_from_slice(bytes)).is_some()
        }
    }

    const OLD: Psw = Psw {
        mask: 0x0705_2001_8000_0000,
        address: 0x1234_5678,
    };

    #[test]
    fn adapter_interruption_swaps_psw_in_lowcore() {
        let mut storage = Storage(vec![0; 0x4000]);
        let new = Psw {
            mask: 0x0404_0001_8000_0000,
            address: 0xabcd,
        };
        storage.0[0x21f0..0x2200].copy_from_slice(&new.to_bytes());
        assert_eq!(
            adapter(&mut storage, 0x2000, OLD, Subclass::new(6)),
            Some(new)
        );
        assert_eq!(storage.0[0x2170..0x2180], OLD.to_bytes());
        let code = [0, 0, 0, 0, 0, 0, 0, 0, 0xb0, 0, 0, 0];
        assert_eq!(storage.0[0x20b8..0x20c4], code);
    }

    #[test]
    fn program_interruption_swaps_psw_in_lowcore() {
        let mut storage = Storage(vec![0; 0x4000]);
        storage.0[0x21d0..0x21e0].copy_from_slice(&OLD.to_bytes());
        let exception = ProgramException::PrivilegedOperation;
        assert_eq!(program(&mut storage, 0x2000, OLD, exception), Some(OLD));
        assert_eq!(storage.0[0x2150..0x2160], OLD.to_bytes());
        assert_eq!(storage.0[0x208c..0x2090], [0, 4, 0, 2]);
    }

    #[test]
    fn interruption_without_storage_fails() {
        let mut storage = Storage(vec![0; 0x100]);
        assert_eq!(adapter(&mut storage, 0, OLD, Subclass::new(0)), None);
    }

    #[test]
    fn interruption_needs_psw_and_subclass_mask() {
        let six = Subclass::new(6);
        assert_eq!(six.mask(), 0x0200_0000);
        assert!(is_open(Psw::IO, 0x0200_0000, six));
        assert!(!is_open(0, 0xff00_0000, six));
        assert!(!is_open(Psw::IO, 0xfd00_0000, six));
    }

    #[test]
    fn psw_with_condition_sets_condition_code() {
        assert_eq!(OLD.with_condition(3).mask, 0x0705_3001_8000_0000);
        assert_eq!(OLD.with_condition(0).mask, 0x0705_0001_8000_0000);
    }
}
