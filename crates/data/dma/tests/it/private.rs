//! Memory of this process alone, against a vector of bytes.

use dma::{Memory, PrivateMemory};
use proptest::prelude::*;

const LEN: usize = 70_001;

fn get(memory: &PrivateMemory, offset: u64, len: usize) -> Option<Vec<u8>> {
    let place = Memory::anonymous(len.max(1)).unwrap();
    let list = place.segments(0, len).unwrap();
    let mut bytes = vec![0; len];
    let copied = memory.copy_out(offset, list.view());
    place.read(0, &mut bytes).unwrap();
    assert!(copied == len as u64 || (copied == 0 && bytes.iter().all(|&byte| byte == 0)));
    (copied == len as u64).then_some(bytes)
}

fn put(memory: &PrivateMemory, offset: u64, bytes: &[u8]) -> u64 {
    let place = Memory::anonymous(bytes.len().max(1)).unwrap();
    place.write(0, bytes).unwrap();
    memory.copy_in(offset, place.segments(0, bytes.len()).unwrap().view())
}

#[derive(Clone, Debug)]
enum Deed {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    Release(u64, u64),
}

fn deed() -> impl Strategy<Value = Deed> {
    let offset = || prop_oneof![0..LEN as u64 + 10, Just(4096), Just(8192), Just(u64::MAX)];
    let len = || prop_oneof![0..20_000u64, Just(4096), Just(LEN as u64), Just(u64::MAX)];
    prop_oneof![
        (offset(), prop::collection::vec(1..=255u8, 1..9000))
            .prop_map(|(offset, bytes)| Deed::Write(offset, bytes)),
        (offset(), len()).prop_map(|(offset, len)| Deed::Zero(offset, len)),
        (offset(), len()).prop_map(|(offset, len)| Deed::Release(offset, len)),
    ]
}

/// Memory of both kinds.
fn both() -> [PrivateMemory; 2] {
    [
        PrivateMemory::new(LEN).unwrap(),
        PrivateMemory::kept(LEN, None).unwrap(),
    ]
}

proptest! {
    /// What is inside happens exactly, to the byte; what is not, not at all.
    #[test]
    fn private_memory_matches_byte_vector(deeds in prop::collection::vec(deed(), 1..30)) {
        for memory in both() {
        let mut model = vec![0u8; LEN];
        for deed in &deeds {
            let (offset, len) = match deed {
                Deed::Write(offset, bytes) => (*offset, bytes.len() as u64),
                Deed::Zero(offset, len) | Deed::Release(offset, len) => (*offset, *len),
            };
            let end = offset.checked_add(len).filter(|&end| end <= LEN as u64);
            let done = match deed {
                Deed::Write(_, bytes) => put(&memory, offset, bytes),
                Deed::Zero(..) => memory.zero(offset, len),
                Deed::Release(..) => memory.release(offset, len),
            };
            prop_assert_eq!(done, if end.is_some() { len } else { 0 });
            memory.prefetch::<4>(offset, len);
            if let Some(end) = end {
                let range = &mut model[offset as usize..end as usize];
                match deed {
                    Deed::Write(_, bytes) => range.copy_from_slice(bytes),
                    _ => range.fill(0),
                }
            }
            prop_assert!(get(&memory, 0, LEN).unwrap() == model);
        }
        memory.collapse(usize::MAX);
        prop_assert!(get(&memory, 0, LEN).unwrap() == model);
        // Another mapping of the file shows all of it.
        if let Some(file) = memory.file() {
            let file = file.try_clone_to_owned().unwrap();
            drop(memory);
            let again = PrivateMemory::kept(LEN, Some(file)).unwrap();
            prop_assert!(get(&again, 0, LEN).unwrap() == model);
        }
        }
    }
}

#[test]
fn invalid_private_memory_size_is_refused() {
    assert!(PrivateMemory::new(0).is_err());
    assert!(PrivateMemory::new(usize::MAX).is_err());
    assert!(PrivateMemory::new(usize::MAX / 2).is_err());
    assert_eq!(PrivateMemory::new(5).unwrap().len(), 5);
}

/// A terabyte costs nothing before it is written.
#[test]
fn private_memory_is_allocated_on_write() {
    let memory = PrivateMemory::new(1 << 40).unwrap();
    let last = (1 << 40) - 8;
    assert_eq!(put(&memory, last, b"the last"), 8);
    assert_eq!(get(&memory, last, 8).unwrap(), b"the last");
    assert_eq!(get(&memory, 1 << 39, 4096).unwrap(), [0; 4096]);
    assert!(!memory.is_poisoned());
}

#[test]
fn foreign_file_is_not_mapped() {
    let memory = PrivateMemory::kept(LEN, None).unwrap();
    let file = || memory.file().unwrap().try_clone_to_owned().unwrap();
    // Of another length, by whole pages.
    assert!(PrivateMemory::kept(LEN + 4096, Some(file())).is_err());
    assert!(PrivateMemory::kept(LEN - 8192, Some(file())).is_err());
    assert!(PrivateMemory::kept(LEN, Some(file())).is_ok());
    let plain = tempfile::tempfile().unwrap();
    plain.set_len(LEN as u64).unwrap();
    assert!(PrivateMemory::kept(LEN, Some(plain.into())).is_err());
    // One that could shrink under its mapping.
    let unsealed = Memory::anonymous(LEN.next_multiple_of(4096)).unwrap();
    let unsealed = unsealed.fd().try_clone_to_owned().unwrap();
    assert!(PrivateMemory::kept(LEN, Some(unsealed)).is_err());
    // Nobody makes ours longer or shorter.
    let file = std::fs::File::from(file());
    assert!(file.set_len(1).is_err() && file.set_len(1 << 30).is_err());
    assert!(PrivateMemory::new(LEN).unwrap().file().is_none());
}
