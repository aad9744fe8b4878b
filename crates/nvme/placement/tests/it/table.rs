//! Damaged tables, and tables of other namespaces.

use placement::table::{check, encode, len};
use placement::{Geometry, GeometryError, Identity, Placement, TableError};

const GEOMETRY: Geometry = Geometry {
    handles: 3,
    unit: 100,
    block: 4096,
};
const IDENTITY: Identity = Identity { namespace: [7; 16] };

fn refused(bytes: &[u8]) -> TableError {
    check(bytes, &GEOMETRY, IDENTITY).unwrap_err()
}

#[test]
fn encoded_table_decodes() {
    let mut bytes = encode(&GEOMETRY, IDENTITY);
    assert_eq!(bytes.len(), len(3));
    assert_eq!(check(&bytes, &GEOMETRY, IDENTITY), Ok(()));
    // Whole pages of a file.
    bytes.resize(8192, 0xff);
    assert_eq!(check(&bytes, &GEOMETRY, IDENTITY), Ok(()));
}

#[test]
fn damaged_table_is_refused() {
    let good = encode(&GEOMETRY, IDENTITY);
    for end in [0, 63, 64, 127, good.len() - 1] {
        let error = refused(&good[..end]);
        assert!(matches!(error, TableError::Short { found, .. } if found == end));
    }
    for at in 0..64 {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        let error = refused(&bytes);
        match at {
            0..8 => assert_eq!(error, TableError::Magic),
            8..12 => assert!(matches!(error, TableError::Version(_))),
            _ => assert_eq!(error, TableError::Checksum, "{at}"),
        }
    }
    for (left, damaged) in [(0u64, true), (1, false), (100, false), (101, true)] {
        let mut bytes = good.clone();
        bytes[192..200].copy_from_slice(&left.to_ne_bytes());
        let expected = if damaged {
            Err(TableError::Handle(1))
        } else {
            Ok(())
        };
        assert_eq!(check(&bytes, &GEOMETRY, IDENTITY), expected, "{left}");
    }
}

#[test]
fn table_of_other_namespace_is_refused() {
    let good = encode(&GEOMETRY, IDENTITY);
    let other = Identity { namespace: [8; 16] };
    let found = check(&good, &GEOMETRY, other);
    assert_eq!(found, Err(TableError::OtherNamespace));
    let fewer = Geometry {
        handles: 2,
        ..GEOMETRY
    };
    let found = check(&good, &fewer, IDENTITY);
    let (handles, unit, block) = (3, 100, 4096);
    let expected = TableError::OtherGeometry {
        handles,
        unit,
        block,
    };
    assert_eq!(found, Err(expected));
}

#[test]
fn invalid_geometry_is_refused() {
    for handles in [0, 129] {
        let geometry = Geometry {
            handles,
            ..GEOMETRY
        };
        let made = Placement::new(geometry, Vec::new());
        assert_eq!(made.err(), Some(GeometryError::Handles(handles)));
    }
    for unit in [0, (1 << 40) + 1] {
        let geometry = Geometry { unit, ..GEOMETRY };
        let made = Placement::new(geometry, Vec::new());
        assert_eq!(made.err(), Some(GeometryError::Unit(unit)));
    }
}
