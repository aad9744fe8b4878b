//! Metadata file: which files are refused, and the metadata found for a block after any history of
//! completed and interrupted writes.

use proptest::prelude::*;
use protection::table::{self, Block, BlockLookup, HEADER, Identity, TableError};
use protection::{Guard, Layout, Protection, StorageTag, Type};

const LAYOUT: Layout = Layout {
    block: 4096,
    metadata: 8,
    extended: false,
    protection: Some(Protection {
        kind: Type::One,
        guard: Guard::Bits16,
        storage: StorageTag::of(0),
        first: false,
    }),
};
const WHOSE: Identity = Identity {
    namespace: [3; 16],
    blocks: 1000,
};

fn size() -> u64 {
    table::len(1000, 8).unwrap()
}

fn with_storage(guard: Guard, storage: StorageTag) -> Layout {
    let protection = LAYOUT.protection.map(|protection| Protection {
        guard,
        storage,
        ..protection
    });
    Layout {
        metadata: 16,
        protection,
        ..LAYOUT
    }
}

/// Checks that files of version 1, byte by byte as older programs wrote them, are read with the
/// smallest storage tags.
#[test]
fn table_of_version_1_is_read() {
    let size = table::len(1000, 16).unwrap();
    for (guard, bits) in [
        (Guard::Bits16, 16),
        (Guard::Bits32, 32),
        (Guard::Bits64, 64),
    ] {
        let least = with_storage(guard, StorageTag::least(guard));
        let mut bytes = b"vnvmemet".to_vec();
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend(4096_u32.to_le_bytes());
        bytes.extend([3; 16]);
        bytes.extend(1000_u64.to_le_bytes());
        bytes.extend(16_u16.to_le_bytes());
        bytes.extend([1, bits, 0, 0, 0, 0]);
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes.resize(table::GENERATION, 0);
        bytes.extend(5_u64.to_le_bytes());
        bytes.resize(HEADER, 0);
        assert_eq!(table::decode(&bytes, size, &least, WHOSE), Ok(5));
        // The mask is not the file's.
        let storage = StorageTag {
            mask: 0,
            ..StorageTag::least(guard)
        };
        let masked = with_storage(guard, storage);
        assert_eq!(table::decode(&bytes, size, &masked, WHOSE), Ok(5));
        // Such a file is still made as it was, so that those programs read it.
        bytes[table::GENERATION] = 1;
        assert!(table::encode(&least, WHOSE) == bytes);
        let other = with_storage(guard, StorageTag::of(24));
        let error = table::decode(&bytes, size, &other, WHOSE).unwrap_err();
        let bits = StorageTag::least(guard).bits;
        assert!(matches!(error, TableError::OtherLayout { storage, .. } if storage == bits));
    }
}

/// Checks that a file with larger storage tags has version 2, and matches only that size.
#[test]
fn table_with_other_storage_tag_is_refused() {
    let size = table::len(1000, 16).unwrap();
    let layout = |bits| with_storage(Guard::Bits32, StorageTag::of(bits));
    let bytes = table::encode(&layout(24), WHOSE);
    assert_eq!(bytes[8..12], 2_u32.to_le_bytes());
    assert_eq!(table::decode(&bytes, size, &layout(24), WHOSE), Ok(1));
    for bits in [16, 25] {
        let error = table::decode(&bytes, size, &layout(bits), WHOSE).unwrap_err();
        assert!(matches!(error, TableError::OtherLayout { storage: 24, .. }));
        assert!(error.to_string().contains("storage tag of 24"));
    }
}

#[test]
fn table_header_belongs_to_one_namespace() {
    let bytes = table::encode(&LAYOUT, WHOSE);
    assert_eq!(bytes.len(), HEADER);
    assert_eq!(size(), 4096 + 8 * 4096);
    assert_eq!(table::decode(&bytes, size(), &LAYOUT, WHOSE), Ok(1));
    for found in [size() - 4096, size() + 4096] {
        let needed = size();
        let error = TableError::Size { found, needed };
        assert_eq!(table::decode(&bytes, found, &LAYOUT, WHOSE), Err(error));
    }
    let other = Identity {
        namespace: [4; 16],
        ..WHOSE
    };
    let error = table::decode(&bytes, size(), &LAYOUT, other);
    assert_eq!(error, Err(TableError::OtherNamespace));
    // The owner is also known of an incomplete table.
    let owner = |bytes: &[u8], namespace| table::check_owner(bytes, namespace);
    assert_eq!(owner(&bytes[..32], WHOSE.namespace), Ok(()));
    assert_eq!(owner(&bytes, [4; 16]), Err(TableError::OtherNamespace));
    for other in [&bytes[1..], &bytes[..7], &[]] {
        assert_eq!(owner(other, WHOSE.namespace), Err(TableError::Magic));
    }
    let short = owner(&bytes[..31], WHOSE.namespace);
    assert_eq!(short, Err(TableError::OtherNamespace));
    let other = Layout {
        protection: None,
        ..LAYOUT
    };
    let error = table::decode(&bytes, size(), &other, WHOSE).unwrap_err();
    assert!(matches!(
        error,
        TableError::OtherLayout {
            protection: 1,
            guard: 16,
            ..
        }
    ));
    assert_eq!(table::len(u64::MAX / 8, 64), None);
}

/// A block and its entry in a file, under writes of which some never reach the data.
struct Model {
    entry: Vec<u8>,
    generation: u32,
    data: u8,
    metadata: Option<u8>,
}

impl Model {
    fn block(&self, data: u8) -> Block {
        let checksum = table::checksum(&[data; 512]);
        Block {
            lba: 77,
            checksum,
            generation: self.generation,
        }
    }

    fn put(&mut self, data: u8, metadata: u8, half: bool) {
        let (at, word) = table::put(&self.entry, self.block(data), &[metadata; 8]);
        self.entry[at + 8..at + 16].fill(metadata);
        if !half {
            self.store((at, word));
        }
    }

    fn store(&mut self, (at, word): (usize, u64)) {
        self.entry[at..at + 8].copy_from_slice(&word.to_le_bytes());
    }

    /// Resolves a doubt about the entry, as the program does before a write.
    fn settle(&mut self) {
        if table::is_in_doubt(&self.entry, self.generation) {
            let settled = table::settle(&self.entry, self.block(self.data));
            self.store(settled.unwrap());
        }
        assert!(!table::is_in_doubt(&self.entry, self.generation));
    }
}

proptest! {
    /// Checks that an interrupted write, before its data or in the middle of its metadata, leaves
    /// the block as it was.
    #[test]
    fn interrupted_write_keeps_old_metadata(steps in prop::collection::vec((any::<u8>(), 0..6_u8), 1..600)) {
        let mut model = Model { entry: vec![0; 32], generation: 1, data: 0, metadata: None };
        for (value, how) in steps {
            let metadata = !value;
            match how {
                // It dies before its data is there, or with it, and the next process finds that.
                0 | 1 if model.metadata.is_some() => {
                    model.settle();
                    model.put(value, metadata, how == 0);
                }
                3 if model.metadata.is_some() => {
                    model.settle();
                    model.put(value, metadata, false);
                    (model.data, model.metadata) = (value, Some(metadata));
                }
                2 => {
                    model.generation = table::next_generation(model.generation);
                    model.metadata = None;
                }
                _ => {
                    model.settle();
                    model.put(value, metadata, false);
                    let done = table::done(&model.entry, model.generation);
                    model.store(done.unwrap());
                    (model.data, model.metadata) = (value, Some(metadata));
                }
            }
            let found = table::find(&model.entry, model.block(model.data));
            match model.metadata {
                None => prop_assert_eq!(found, BlockLookup::Unwritten),
                Some(byte) => {
                    prop_assert_eq!(found, BlockLookup::Written(&[byte; 8][..]));
                    let elsewhere = Block { lba: 78, ..model.block(model.data) };
                    let found = table::find(&model.entry, elsewhere);
                    prop_assert!(matches!(found, BlockLookup::Damaged(_)));
                }
            }
        }
    }

    /// Checks that any bytes of a file are refused or read without a panic.
    #[test]
    fn random_bytes_cause_no_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        at in 0..HEADER, bit in 0..8_u8, size: u64,
    ) {
        prop_assert!(table::decode(&bytes, size, &LAYOUT, WHOSE).is_err());
        let block = Block { lba: 1, checksum: 2, generation: 3 };
        for len in 0..bytes.len() {
            let _ = table::find(&bytes[..len], block);
            let _ = table::put(&bytes[..len], block, &[0; 8]);
            let _ = table::settle(&bytes[..len], block);
            let _ = table::done(&bytes[..len], 3);
            let _ = table::is_in_doubt(&bytes[..len], 3);
        }
        let mut header = table::encode(&LAYOUT, WHOSE);
        header[at] ^= 1 << bit;
        let read = table::decode(&header, self::size(), &LAYOUT, WHOSE);
        // What no check is of: the generation, which is data, and what is reserved.
        prop_assert!(at >= 52 || read.is_err());
    }
}

#[test]
fn generation_is_never_zero() {
    assert_eq!(table::next_generation(1), 2);
    assert_eq!(table::next_generation((1 << 24) - 1), 1);
    assert_eq!(table::next_generation(u32::MAX), 1);
}
