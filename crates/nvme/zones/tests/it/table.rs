//! Damaged and forged tables.

use proptest::prelude::*;
use zones::table::{HEADER, Identity, TableError, WORD, decode, encode, header, len};
use zones::{Action, Geometry, GeometryError, MAX_ZONES, ZoneState, Zones, Zrwa};

const GEOMETRY: Geometry = Geometry {
    zones: 5,
    size: 64,
    capacity: 48,
    max_open: Some(2),
    max_active: Some(3),
    zrwa: None,
};

/// Geometry with Zone Random Write Areas.
const RANDOM: Geometry = Geometry {
    zrwa: Some(Zrwa {
        size: 16,
        granularity: 4,
        resources: Some(2),
    }),
    ..GEOMETRY
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
fn encoded_table_decodes() {
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
        assert_eq!(zones.get(3).unwrap().state, ZoneState::Empty);
    }
}

/// Checks that a zone keeps its Zone Random Write Area, and that a table written before there were
/// such areas is still read.
#[test]
fn zrwa_state_is_restored() {
    let mut zones = Zones::new(RANDOM).unwrap();
    for number in [0, 2] {
        zones.open_with_zrwa(number).unwrap();
    }
    zones.write(128 + 4, 16).unwrap();
    let pointer = zones.get(2).unwrap().written;
    assert_eq!(pointer, 4, "of 20 blocks all but 16 are flushed");
    let bytes = encode(&zones, IDENTITY);
    let mut found = decode(&bytes, RANDOM, IDENTITY).unwrap();
    assert_eq!((found.zrwas(), found.open()), (2, 2));
    found.power_lost();
    for (number, written) in [(0, 0), (2, 4)] {
        let zone = found.get(number).unwrap();
        let closed = (ZoneState::Closed, written, true);
        assert_eq!((zone.state, zone.written, zone.zrwa), closed);
    }
    assert_eq!(found.check_write(7, 5), Ok(()));
    assert_eq!(found.check_write(128 + 4, 32), Ok(()));
    // Without areas, or with others, the zone is not what it was.
    let coarse = Zrwa {
        size: 16,
        granularity: 8,
        resources: None,
    };
    for (zrwa, zone) in [(None, 0), (Some(coarse), 2)] {
        let geometry = Geometry { zrwa, ..GEOMETRY };
        let error = decode(&bytes, geometry, IDENTITY).unwrap_err();
        assert_eq!(error, TableError::Zrwa(zone));
    }
    let older = encode(&used(), IDENTITY);
    let found = decode(&older, RANDOM, IDENTITY).unwrap();
    assert_eq!(encode(&found, IDENTITY), older);
    assert_eq!(found.zrwas(), 0);
    // A flag that no such zone can have.
    let mut full = used().get(1).unwrap();
    full.zrwa = true;
    let mut bytes = older;
    let word = zones::table::word(1, full).to_le_bytes();
    bytes[HEADER + WORD..HEADER + 2 * WORD].copy_from_slice(&word);
    let error = decode(&bytes, RANDOM, IDENTITY).unwrap_err();
    assert_eq!(error, TableError::Zone(1));
}

#[test]
fn each_flipped_bit_is_detected() {
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
fn misplaced_and_missing_words_are_refused() {
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
fn foreign_tables_are_refused() {
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
fn geometries_are_validated() {
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
    let area = |size, granularity, resources| {
        let zrwa = Some(Zrwa {
            size,
            granularity,
            resources,
        });
        let geometry = Geometry { zrwa, ..GEOMETRY };
        geometry.check().map(|()| geometry.zrwa_resources())
    };
    assert_eq!(GEOMETRY.zrwa_resources(), None);
    assert_eq!(area(16, 4, None), Ok(Some(3)));
    assert_eq!(area(48, 48, Some(2)), Ok(Some(2)));
    for (size, granularity) in [(0, 1), (16, 0), (6, 4), (64, 4), (10, 5), (60, 12)] {
        let error = area(size, granularity, None).unwrap_err();
        assert!(matches!(error, GeometryError::Zrwa { .. }), "{size}");
    }
    for resources in [0, 4] {
        let error = area(16, 4, Some(resources)).unwrap_err();
        assert_eq!(error, GeometryError::ZrwaResources);
    }
}

proptest! {
    #[test]
    fn random_tables_cause_no_panic(
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
