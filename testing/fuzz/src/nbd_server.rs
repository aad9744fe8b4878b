//! A hostile client of an export: whatever it sends, the storage gets only whole blocks within the
//! export, no changes through a read-only export, and the replies stay in proportion.

use nbd_protocol::server::{Allocation, ExportInfo, Storage, StorageError, negotiate, transmit};
use std::io::{self, Read, Write};

const SIZE: u64 = 256 << 10;
const BLOCK: u64 = 512;

/// The first byte of the input chooses: read-only or not, and a storage that fails. The client
/// sends the rest.
pub fn nbd_server(input: &[u8]) {
    let Some((&first, input)) = input.split_first() else {
        return;
    };
    let export = ExportInfo {
        name: "vm0".into(),
        description: "a disk".into(),
        size: SIZE,
        block_size: BLOCK as u32,
        preferred: 4096,
        read_only: first & 1 == 0,
    };
    let mut client = Client {
        sends: input,
        received: 0,
    };
    let mut disk = Disk {
        bytes: vec![first | 1; SIZE as usize],
        read_only: export.read_only,
        fails: first & 2 != 0,
    };
    disk.bytes[64 << 10..].fill(0);
    if let Ok(Some(negotiated)) = negotiate(&mut client, &export) {
        let _ = transmit(&mut client, &export, negotiated, &mut disk);
    }
    // Each option takes 16 bytes at least, each request 28.
    let messages = input.len() as u64 / 16 + 1;
    assert!(client.received <= messages * (SIZE + 4096));
}

struct Client<'a> {
    sends: &'a [u8],
    received: u64,
}

impl Read for Client<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.sends.read(buffer)
    }
}

impl Write for Client<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.received += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Disk {
    bytes: Vec<u8>,
    read_only: bool,
    fails: bool,
}

impl Disk {
    fn range(&mut self, offset: u64, len: u64, changes: bool) -> Result<&mut [u8], StorageError> {
        assert!(len > 0 && (offset | len).is_multiple_of(BLOCK));
        assert!(offset < SIZE && len <= SIZE - offset);
        assert!(!changes || !self.read_only);
        if self.fails && offset >= SIZE / 2 {
            return Err(StorageError::Failed);
        }
        Ok(&mut self.bytes[offset as usize..][..len as usize])
    }
}

impl Storage for Disk {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), StorageError> {
        data.copy_from_slice(self.range(offset, data.len() as u64, false)?);
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8], _: bool) -> Result<(), StorageError> {
        self.range(offset, data.len() as u64, true)?
            .copy_from_slice(data);
        Ok(())
    }

    fn zero(&mut self, offset: u64, len: u64, _: bool, _: bool) -> Result<(), StorageError> {
        self.range(offset, len, true)?.fill(0);
        Ok(())
    }

    fn trim(&mut self, offset: u64, len: u64) -> Result<(), StorageError> {
        self.range(offset, len, true)?.fill(0);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), StorageError> {
        assert!(!self.read_only);
        Ok(())
    }

    fn allocation(&mut self, offset: u64, len: u64) -> (Allocation, u64) {
        assert!(len > 0 && offset < SIZE && len <= SIZE - offset);
        let state = if (offset / 4096).is_multiple_of(2) {
            Allocation::Data
        } else {
            Allocation::Hole
        };
        (state, len.min(4096 - offset % 4096))
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn mutated_clients_cause_no_panic() {
        crate::chance::run_mutated("nbd_server", super::nbd_server);
    }
}
