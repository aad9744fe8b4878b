//! The device in the hands of a guest.

use crate::guest::{Guest, message};
use controller::pci;
use nvme::pci::msix;
use nvme::{Command, NvmOpcode};
use std::sync::Arc;
use std::time::Duration;
use volume::{FileOptions, FileVolume, MemVolume};

fn flush() -> Command {
    Command::new(NvmOpcode::FLUSH.0, 0, 1)
}

/// Waits until the controller keeps the I/O queue's interrupt in the pending bit array.
fn wait_until_pending(guest: &mut Guest) {
    let mut pending = [0; 8];
    while pending[0] & 2 == 0 {
        let sent = guest.interrupts.try_recv();
        assert!(sent.is_err(), "a masked vector was signalled");
        guest.device.bar0_read(pci::MSIX_PBA_OFFSET, &mut pending);
    }
}

#[test]
fn guest_writes_file_and_reads_back() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(16 << 20).unwrap();
    let volume = FileVolume::open(file.path(), FileOptions::default()).unwrap();
    let mut guest = Guest::new(Arc::new(volume)).unwrap();
    // Twice around the queues of 16 entries.
    for turn in 0..40 {
        let data = vec![turn; 1024];
        guest.write(u64::from(turn) * 2, &data).unwrap();
        assert_eq!(guest.read(u64::from(turn) * 2, 1024).unwrap(), data);
    }
    guest.flush().unwrap();
    drop(guest);
    let stored = std::fs::read(file.path()).unwrap();
    for turn in 0..40 {
        assert!(
            stored[turn * 1024..][..1024]
                .iter()
                .all(|b| usize::from(*b) == turn)
        );
    }
}

#[test]
fn interrupt_of_masked_vector_waits_for_unmask() {
    let mut guest = Guest::new(Arc::new(MemVolume::new(1 << 20).unwrap())).unwrap();
    guest.set_entry(1, true);
    guest.submit(1, flush()).unwrap();
    wait_until_pending(&mut guest);
    guest.set_entry(1, false);
    guest.complete(1).unwrap();
}

#[test]
fn function_mask_holds_all_interrupts() {
    let mut guest = Guest::new(Arc::new(MemVolume::new(1 << 20).unwrap())).unwrap();
    guest.set_msix_control(msix::CONTROL_ENABLE | msix::CONTROL_FUNCTION_MASK);
    guest.submit(1, flush()).unwrap();
    wait_until_pending(&mut guest);
    guest.set_msix_control(msix::CONTROL_ENABLE);
    let seen = guest.interrupts.recv_timeout(Duration::from_secs(60));
    assert_eq!(seen.unwrap(), message(1));
}

#[test]
fn msix_table_reads_as_written() {
    let mut guest = Guest::new(Arc::new(MemVolume::new(1 << 20).unwrap())).unwrap();
    let table = guest.msix.1;
    let mut word = [0; 4];
    guest.device.bar0_read(table + 16 + 8, &mut word);
    assert_eq!(u32::from_le_bytes(word), message(1).data);
    // Vectors that the driver does not use are masked.
    guest.device.bar0_read(table + 2 * 16 + 12, &mut word);
    assert_eq!(u32::from_le_bytes(word), 1);
}
