//! Tables that were damaged, or that an enemy has written.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use proptest::prelude::*;
use zones::table::{HEADER, Identity, TableError, WORD, decode, encode, header, len};
use zones::{Action, Geometry, GeometryError, MAX_ZONES, State, Zones};

const GEOMETRY: Geometry = Geometry {
    zones: 5,
    size: 64,
    capacity: 48,
    max_open: Some(2),
    max_active: Some(3),
};

const IDENTITY: Identity = Identity {
    namespace: [0xab; 16],
    block: 4096,
};

fn used() -> Zones {
    let mut zones = Zones::new(GEOMETRY).unwrap();
    zones.write(64, 48).unwrap();
    zones.write(128, 7).unwrap();
    zones.act(3, Action::Open).unwrap();
    zones.set_worn(4, true);
    zones
}

#[test]
fn what_was_kept_is_found_again() {
    let bytes = encode(&used(), IDENTITY);
    assert_eq!(bytes.len(), len(5));
    let mut longer = bytes.clone();
    longer.resize(4096, 0xff);
    for bytes in [bytes, longer] {
        let mut zones = decode(&bytes, GEOMETRY, IDENTITY).unwrap();
        for number in 0..5 {
            assert_eq!(zones.get(number), used().get(number));
        }
        assert_eq!((zones.open(), zones.active()), (2, 2));
        zones.power_lost();
        assert_eq!((zones.open(), zones.active()), (0, 1));
        assert_eq!(zones.get(3).unwrap().state, State::Empty);
    }
}

#[test]
fn each_bit_counts() {
    let bytes = encode(&used(), IDENTITY);
    for bit in 0..bytes.len() * 8 {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let error = decode(&bytes, GEOMETRY, IDENTITY).unwrap_err();
        match error {
            TableError::Magic => assert!(bit / 8 < 8),
            TableError::Version(_) => assert!((8..12).contains(&(bit / 8))),
            TableError::Checksum => assert!((12..HEADER).contains(&(bit / 8))),
            TableError::Zone(zone) => assert_eq!(zone as usize, (bit / 8 - HEADER) / WORD),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn words_of_other_zones_and_lost_ones_are_none() {
    let mut bytes = encode(&used(), IDENTITY);
    let word: [u8; WORD] = bytes[HEADER + WORD..HEADER + 2 * WORD].try_into().unwrap();
    bytes[HEADER..HEADER + WORD].copy_from_slice(&word);
    let error = decode(&bytes, GEOMETRY, IDENTITY).unwrap_err();
    assert_eq!(error, TableError::Zone(0));
    bytes[HEADER..].fill(0);
    let error = decode(&bytes, GEOMETRY, IDENTITY).unwrap_err();
    assert_eq!(error, TableError::Zone(0));
}

#[test]
fn tables_of_others_are_refused() {
    let bytes = encode(&used(), IDENTITY);
    let other = Identity {
        namespace: [0xac; 16],
        ..IDENTITY
    };
    let error = decode(&bytes, GEOMETRY, other).unwrap_err();
    assert_eq!(error, TableError::OtherNamespace);
    let larger = Geometry {
        size: 128,
        ..GEOMETRY
    };
    let error = decode(&bytes, larger, IDENTITY).unwrap_err();
    let found = TableError::OtherGeometry {
        zones: 5,
        size: 64,
        capacity: 48,
        block: 4096,
    };
    assert_eq!(error, found);
    // Limits are no matter of what was written.
    let limited = Geometry {
        max_open: Some(1),
        max_active: Some(1),
        ..GEOMETRY
    };
    assert!(decode(&bytes, limited, IDENTITY).is_ok());
    for end in 0..bytes.len() {
        let error = decode(&bytes[..end], GEOMETRY, IDENTITY).unwrap_err();
        assert!(matches!(error, TableError::Short { .. }), "{end}: {error}");
    }
    let mut newer = bytes;
    newer[8] = 2;
    let error = decode(&newer, GEOMETRY, IDENTITY).unwrap_err();
    assert_eq!(error, TableError::Version(2));
}

#[test]
fn geometries() {
    assert_eq!(GEOMETRY.check(), Ok(()));
    let with = |change: fn(&mut Geometry)| {
        let mut geometry = GEOMETRY;
        change(&mut geometry);
        geometry.check()
    };
    for zones in [0, MAX_ZONES + 1, u32::MAX] {
        let geometry = Geometry { zones, ..GEOMETRY };
        assert_eq!(geometry.check(), Err(GeometryError::Zones(zones)));
    }
    for size in [0, 48, 1 << 41, u64::MAX] {
        let geometry = Geometry { size, ..GEOMETRY };
        assert_eq!(geometry.check(), Err(GeometryError::Size(size)));
    }
    assert!(with(|g| g.capacity = 0).is_err());
    assert!(with(|g| g.capacity = 65).is_err());
    assert!(with(|g| g.max_open = Some(0)).is_err());
    assert!(with(|g| g.max_active = Some(1)).is_err());
    assert!(with(|g| g.max_open = None).is_err());
    assert!(with(|g| (g.max_open, g.max_active) = (None, None)).is_ok());
}

proptest! {
    #[test]
    fn hostile_tables_cause_no_panic(
        words in proptest::collection::vec(any::<u64>(), 0..8),
        flip in 0..40usize, value in any::<u8>(),
    ) {
        // With a header that is right, so that the words are looked at.
        let mut bytes = header(&GEOMETRY, IDENTITY).to_vec();
        for word in &words {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        let _ = decode(&bytes, GEOMETRY, IDENTITY);
        let mut bytes = encode(&used(), IDENTITY);
        bytes[HEADER + flip] = value;
        if let Ok(zones) = decode(&bytes, GEOMETRY, IDENTITY) {
            for number in 0..5 {
                prop_assert!(zones.get(number).unwrap().written <= GEOMETRY.capacity);
            }
        }
    }
}
