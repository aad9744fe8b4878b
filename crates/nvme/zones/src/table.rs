//! Encoded state of zones: a header, and a word for each zone.
//!
//! ```text
//! byte 0   header (64 bytes)   geometry of the zones, and identity of the namespace; never changes
//! byte 64  word 0, word 1, ..  one for each zone, little-endian
//! ```
//!
//! A word has the whole state of its zone, so that a change is stored by one write of one word. Its
//! checksum includes the zone's number, so that it is valid for no other zone. The bytes read are
//! untrusted: every field is checked, and allocations are bounded by the namespace's expected
//! geometry.

use crate::{Geometry, Zone, ZoneState, Zones};

/// Size in bytes of the zone table's header, before the first word.
pub const HEADER: usize = 64;
/// Size in bytes of a zone's word in the table.
pub const WORD: usize = 8;
/// Version of the zone table's format that this program writes.
pub const VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"vnvmezns";
/// Number of bits for the number of written blocks in a zone's word.
const WRITTEN_BITS: u32 = 48;
/// Bit of a word for a zone with a Zone Random Write Area. Programs that do not know the bit reject
/// the word as damaged.
const ZRWA: u64 = 1 << 52;

/// Reason why a zone table is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The zone table is truncated.
    #[error("it has {found} bytes instead of the {needed} of a table of these zones")]
    Short {
        /// Number of bytes that the table has.
        found: usize,
        /// Number of bytes that the geometry requires.
        needed: usize,
    },
    /// The magic number of the table does not match.
    #[error("not a zone table")]
    Magic,
    /// A newer program has written the table.
    #[error("unknown format version {0}")]
    Version(u32),
    /// The checksum of the header does not match.
    #[error("the header is damaged")]
    Checksum,
    /// The zone table belongs to another namespace.
    #[error("it has the zones of another namespace")]
    OtherNamespace,
    /// The zone table was written for another geometry.
    #[error(
        "it has {zones} zones of {size} blocks (capacity {capacity}) of {block} bytes, unlike the \
         configured namespace"
    )]
    OtherGeometry {
        /// Number of zones in the table.
        zones: u32,
        /// Zone size in blocks, as the table states it.
        size: u64,
        /// Zone capacity in blocks, as the table states it.
        capacity: u64,
        /// Block size in bytes, as the table states it.
        block: u32,
    },
    /// The word of the zone with this number is damaged.
    #[error("zone {0} has an invalid state")]
    Zone(u32),
    /// The zone has a Zone Random Write Area that the namespace's configuration does not allow: it
    /// has none, or another granularity.
    #[error(
        "zone {0} has a random write area, and the namespace is configured without, or not with \
         that granularity"
    )]
    Zrwa(u32),
}

/// Returns the size in bytes of a table for `zones` zones.
pub const fn len(zones: u32) -> usize {
    HEADER + zones as usize * WORD
}

/// Identity of the namespace that a zone table belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// NGUID of the namespace.
    pub namespace: [u8; 16],
    /// Logical block size of the namespace in bytes.
    pub block: u32,
}

/// Returns the bytes of the zone table's header.
pub fn header(geometry: &Geometry, identity: Identity) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    let fields: [&[u8]; 7] = [
        &MAGIC,
        &VERSION.to_le_bytes(),
        &identity.block.to_le_bytes(),
        &geometry.size.to_le_bytes(),
        &geometry.capacity.to_le_bytes(),
        &identity.namespace,
        &geometry.zones.to_le_bytes(),
    ];
    let fields = fields.into_iter().flatten();
    for (to, from) in bytes.iter_mut().zip(fields) {
        *to = *from;
    }
    let (content, sum) = bytes.split_at_mut(HEADER - 4);
    sum.copy_from_slice(&crc32fast::hash(content).to_le_bytes());
    bytes
}

/// Returns the word that the table stores for the zone with this number.
pub fn word(number: u32, zone: Zone) -> u64 {
    let zrwa = if zone.zrwa { ZRWA } else { 0 };
    let content = u64::from(zone.state.number()) << WRITTEN_BITS | zone.written | zrwa;
    content | check(number, content) << 56
}

/// Returns the 8-bit checksum of a word's content, in which the zone's number is included.
fn check(number: u32, content: u64) -> u64 {
    let mut bytes = [0; 12];
    let (first, second) = bytes.split_at_mut(8);
    first.copy_from_slice(&content.to_le_bytes());
    second.copy_from_slice(&number.to_le_bytes());
    u64::from(crc32fast::hash(&bytes) >> 24)
}

/// Decodes the word that the table stores for the zone with this number.
fn zone(number: u32, word: u64, geometry: &Geometry) -> Result<Zone, TableError> {
    let damaged = TableError::Zone(number);
    let content = word & ((1 << 56) - 1);
    let zrwa = content & ZRWA != 0;
    let state = ZoneState::of(((content & !ZRWA) >> WRITTEN_BITS) as u8).ok_or(damaged)?;
    let written = content & ((1 << WRITTEN_BITS) - 1);
    let possible = match state {
        ZoneState::Empty => written == 0,
        ZoneState::Full | ZoneState::ReadOnly | ZoneState::Offline => written <= geometry.capacity,
        _ => written < geometry.capacity,
    };
    let whole = word >> 56 == check(number, content);
    if !possible || !whole || (zrwa && !state.is_active()) {
        return Err(damaged);
    }
    let moves = |by: u16| by > 0 && written.is_multiple_of(u64::from(by));
    if zrwa && !geometry.zrwa.is_some_and(|zrwa| moves(zrwa.granularity)) {
        return Err(TableError::Zrwa(number));
    }
    Ok(Zone {
        state,
        written,
        zrwa,
        resetting: false,
    })
}

/// Returns the bytes of the whole zone table.
pub fn encode(zones: &Zones, identity: Identity) -> Vec<u8> {
    let geometry = zones.geometry();
    let mut bytes = header(geometry, identity).to_vec();
    for number in 0..geometry.zones {
        let word = zones.get(number).map_or(0, |zone| word(number, zone));
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Decodes a table of the namespace with this identity and geometry. Bytes behind its end are
/// ignored.
///
/// # Errors
/// [`TableError`] when the table is damaged, or does not match this namespace.
pub fn decode(bytes: &[u8], geometry: Geometry, identity: Identity) -> Result<Zones, TableError> {
    let short = |needed| TableError::Short {
        found: bytes.len(),
        needed,
    };
    let (found, words) = bytes.split_first_chunk().ok_or(short(HEADER))?;
    check_header(found, &geometry, identity)?;
    let needed = len(geometry.zones);
    let (words, _) = words.as_chunks::<WORD>();
    let words = words.get(..geometry.zones as usize);
    let words = words.ok_or(short(needed))?;
    let zones = (0..).zip(words).map(|(number, word)| {
        let word = u64::from_le_bytes(*word);
        zone(number, word, &geometry)
    });
    Ok(Zones::of(geometry, zones.collect::<Result<_, _>>()?))
}

fn check_header(
    found: &[u8; HEADER],
    geometry: &Geometry,
    identity: Identity,
) -> Result<(), TableError> {
    let field = |at: usize| {
        let bytes = found.get(at..).and_then(|rest| rest.first_chunk());
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    };
    let (magic, _) = found.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(TableError::Magic);
    }
    let version = field(8) as u32;
    if version != VERSION {
        return Err(TableError::Version(version));
    }
    let (content, sum) = found.split_at(HEADER - 4);
    if sum != crc32fast::hash(content).to_le_bytes() {
        return Err(TableError::Checksum);
    }
    let wanted = header(geometry, identity);
    if *found == wanted {
        return Ok(());
    }
    let (zones, block) = (field(48) as u32, (field(8) >> 32) as u32);
    let (size, capacity) = (field(16), field(24));
    let same = (zones, size, capacity) == (geometry.zones, geometry.size, geometry.capacity);
    if same && block == identity.block {
        return Err(TableError::OtherNamespace);
    }
    Err(TableError::OtherGeometry {
        zones,
        size,
        capacity,
        block,
    })
}
