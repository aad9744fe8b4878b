//! Entries of submission and completion queues (NVMe Base 2.1, 4.1 and 4.2).

use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

/// Opcodes of admin commands that the host itself sends.
pub(crate) mod admin {
    pub(crate) const CREATE_IO_SQ: u8 = 0x01;
    pub(crate) const CREATE_IO_CQ: u8 = 0x05;
    pub(crate) const DOORBELL_BUFFER_CONFIG: u8 = 0x7c;
}

/// Submission queue entry, built by a chain of setters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct Command([[u8; 4]; 16]);

impl Command {
    /// Creates a command without identifier, which [`Command::with_cid`] or the host sets.
    pub fn new(opcode: u8, nsid: u32) -> Self {
        Self([[0; 4]; 16]).dw(0, opcode.into()).dw(1, nsid)
    }

    /// Copies an entry of another type, such as `nvme::Command`. Bytes past 64 are ignored.
    pub fn of(entry: &(impl IntoBytes + Immutable)) -> Self {
        let (words, _) = entry.as_bytes().as_chunks();
        let mut command = Self([[0; 4]; 16]);
        for (word, of) in command.0.iter_mut().zip(words) {
            *word = *of;
        }
        command
    }

    /// Sets command dword `n`, 0 to 15.
    pub fn dw(mut self, n: usize, value: u32) -> Self {
        if let Some(word) = self.0.get_mut(n) {
            *word = value.to_le_bytes();
        }
        self
    }

    /// Returns command dword `n`.
    pub fn dword(&self, n: usize) -> u32 {
        u32::from_le_bytes(self.0.get(n).copied().unwrap_or_default())
    }

    fn qw(self, n: usize, value: u64) -> Self {
        self.dw(n, value as u32).dw(n + 1, (value >> 32) as u32)
    }

    /// Sets the command identifier.
    pub fn with_cid(self, cid: u16) -> Self {
        let dw0 = self.dword(0) & 0xffff;
        self.dw(0, dw0 | u32::from(cid) << 16)
    }

    /// Sets FUSE and PSDT: bits 15:8 of dword 0.
    pub fn flags(self, flags: u8) -> Self {
        let dw0 = self.dword(0) & !0xff00;
        self.dw(0, dw0 | u32::from(flags) << 8)
    }

    /// Sets PRP entries 1 and 2.
    pub fn prp(self, prp1: u64, prp2: u64) -> Self {
        self.qw(6, prp1).qw(8, prp2)
    }

    /// Sets the first LBA of an I/O command.
    pub fn slba(self, slba: u64) -> Self {
        self.qw(10, slba)
    }

    /// Returns the opcode of the command.
    pub fn opcode(&self) -> u8 {
        self.dword(0) as u8
    }

    /// Returns PRP entry 1, the guest address of the command's data.
    pub fn prp1(&self) -> u64 {
        u64::from(self.dword(7)) << 32 | u64::from(self.dword(6))
    }
}

/// Completion queue entry of 16 bytes, as the controller has written it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct Completion([[u8; 4]; 4]);

impl Completion {
    fn get(&self, n: usize) -> u32 {
        u32::from_le_bytes(self.0.get(n).copied().unwrap_or_default())
    }

    /// Returns dword 0 of the completion, the command's result.
    pub fn dw0(&self) -> u32 {
        self.get(0)
    }

    /// Returns dword 1 of the completion, which few commands use.
    pub fn dw1(&self) -> u32 {
        self.get(1)
    }

    /// Returns the SQ Head Pointer: the controller has fetched the entries before this index.
    pub fn sqhd(&self) -> u16 {
        self.get(2) as u16
    }

    /// Returns the identifier of the submission queue to which the command was submitted.
    pub fn sqid(&self) -> u16 {
        (self.get(2) >> 16) as u16
    }

    /// Returns the identifier of the completed command.
    pub fn cid(&self) -> u16 {
        self.get(3) as u16
    }

    /// Returns the Phase Tag, which inverts with each pass of the controller through the queue.
    pub fn phase(&self) -> bool {
        self.get(3) >> 16 & 1 != 0
    }

    /// Status field, without the phase tag: 0 is success.
    pub fn status_bits(&self) -> u16 {
        (self.get(3) >> 17) as u16
    }

    /// Returns the entry as another type of 16 bytes, for example `nvme::Completion`.
    pub fn cast<T: FromBytes>(&self) -> Option<T> {
        T::read_from_bytes(self.as_bytes()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_fields_have_standard_offsets() {
        let command = Command::new(0x02, 0x0403_0201);
        let command = command.flags(0x41).with_cid(0xbeef);
        let command = command.prp(0x1122_3344_5566_7788, 9).slba(7).dw(12, 5);
        let bytes = command.as_bytes();
        assert_eq!(bytes[..8], [0x02, 0x41, 0xef, 0xbe, 1, 2, 3, 4]);
        assert_eq!(bytes[24..32], 0x1122_3344_5566_7788_u64.to_le_bytes());
        assert_eq!((bytes[32], bytes[40], bytes[48]), (9, 7, 5));
        assert_eq!(
            (command.opcode(), command.prp1()),
            (0x02, 0x1122_3344_5566_7788)
        );
        assert_eq!(Command::of(&command), command);
    }

    #[test]
    fn completion_fields_have_standard_offsets() {
        let bytes = [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 4, 0, 5, 0, 0x05, 0x80];
        let entry = Completion::read_from_bytes(&bytes).unwrap();
        assert_eq!((entry.dw0(), entry.dw1()), (1, 2));
        assert_eq!((entry.sqhd(), entry.sqid(), entry.cid()), (3, 4, 5));
        assert!(entry.phase());
        assert_eq!(entry.status_bits(), 0x4002);
        assert_eq!(entry.cast::<[u8; 16]>(), Some(bytes));
    }
}
