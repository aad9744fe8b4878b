//! Encoded state of a placement: rows of eight words of 64 bits, in the processor's byte order.
//!
//! ```text
//! row 0          header      geometry of the placement, and its namespace; never changes
//! row 1          counters    bytes that the host wrote, bytes written, flags, events so far
//! row 2, 3, ..   handles     blocks left in the unit, bytes written, units begun, events enabled
//! then 63 rows   events      number of the event (from 1; 0: none), time, what and where
//! ```
//!
//! Each word is stored at once. A process that dies leaves them as they are. The words read are
//! untrusted, and are bounded by the namespace's expected geometry.

use crate::Geometry;
use nvme::log::FDP_EVENTS;
use std::sync::atomic::AtomicU64;

/// Row of the placement table: eight 64-bit words.
pub type Row = [AtomicU64; 8];
/// Size of a row of the placement table in bytes.
pub const ROW: usize = size_of::<Row>();
/// Version of the placement table's format that this program writes.
pub const VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"vnvmefdp";
/// Index of the row with the counters of the namespace.
pub(crate) const COUNTERS: usize = 1;
/// Index of the first placement handle's row.
pub(crate) const HANDLES: usize = 2;

/// Storage of a placement table's rows, in memory or in a mapped file.
pub trait WordStore {
    /// Returns the row with this index; `None` if it does not exist.
    fn row(&self, number: usize) -> Option<&Row>;
}

impl WordStore for Vec<Row> {
    fn row(&self, number: usize) -> Option<&Row> {
        self.get(number)
    }
}

/// Reason why a placement table is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The placement table is truncated.
    #[error("it has {found} bytes instead of the {needed} of a table of these handles")]
    Short {
        /// Number of bytes that the table has.
        found: usize,
        /// Number of bytes that the geometry requires.
        needed: usize,
    },
    /// The magic number of the table does not match.
    #[error("not a table of placement handles")]
    Magic,
    /// A newer program has written the table.
    #[error("unknown format version {0}")]
    Version(u32),
    /// The checksum of the header does not match.
    #[error("the header is damaged")]
    Checksum,
    /// The placement table belongs to another namespace.
    #[error("it has the placement handles of another namespace")]
    OtherNamespace,
    /// The placement table was written for another geometry.
    #[error(
        "it has {handles} handles with units of {unit} blocks of {block} bytes, unlike the \
         configured namespace"
    )]
    OtherGeometry {
        /// Number of placement handles, as the table states it.
        handles: u16,
        /// Size of a reclaim unit in blocks, as the table states it.
        unit: u64,
        /// Block size in bytes, as the table states it.
        block: u32,
    },
    /// The words of the placement handle with this number are damaged.
    #[error("handle {0} has an invalid state")]
    Handle(u16),
}

/// Identity of the namespace that a placement table belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// NGUID of the namespace.
    pub namespace: [u8; 16],
}

/// Returns the number of rows in a table for `handles` handles.
pub const fn rows(handles: u16) -> usize {
    HANDLES + handles as usize + FDP_EVENTS
}

/// Returns the size in bytes of a table for `handles` handles.
pub const fn len(handles: u16) -> usize {
    rows(handles) * ROW
}

/// Returns the bytes of the placement table's header.
fn header(geometry: &Geometry, identity: Identity) -> [u8; ROW] {
    let mut bytes = [0; ROW];
    let fields: [&[u8]; 6] = [
        &MAGIC,
        &VERSION.to_ne_bytes(),
        &geometry.block.to_ne_bytes(),
        &geometry.unit.to_ne_bytes(),
        &u64::from(geometry.handles).to_ne_bytes(),
        &identity.namespace,
    ];
    let fields = fields.into_iter().flatten();
    for (to, from) in bytes.iter_mut().zip(fields) {
        *to = *from;
    }
    let (content, sum) = bytes.split_at_mut(ROW - 4);
    sum.copy_from_slice(&crc32fast::hash(content).to_ne_bytes());
    bytes
}

/// Returns the bytes of a placement table in which nothing was written yet.
pub fn encode(geometry: &Geometry, identity: Identity) -> Vec<u8> {
    let mut bytes = header(geometry, identity).to_vec();
    bytes.resize(HANDLES * ROW, 0);
    for _ in 0..geometry.handles {
        bytes.extend_from_slice(&geometry.unit.to_ne_bytes());
        bytes.resize(bytes.len().next_multiple_of(ROW), 0);
    }
    bytes.resize(len(geometry.handles), 0);
    bytes
}

/// Returns a placement table in memory in which nothing was written yet.
pub fn empty(geometry: Geometry, identity: Identity) -> Vec<Row> {
    words(&encode(&geometry, identity))
}

/// Returns the rows that the bytes of a placement table contain.
pub fn words(bytes: &[u8]) -> Vec<Row> {
    let (rows, _) = bytes.as_chunks::<ROW>();
    let word = |row: &[u8; ROW], at: usize| {
        let bytes = row.as_chunks::<8>().0.get(at);
        AtomicU64::new(bytes.map_or(0, |bytes| u64::from_ne_bytes(*bytes)))
    };
    let row = |row: &[u8; ROW]| std::array::from_fn(|at| word(row, at));
    rows.iter().map(row).collect()
}

/// Checks that the bytes are the table of the namespace with this identity and geometry. Bytes
/// behind its end are ignored.
///
/// # Errors
/// [`TableError`] when the table is damaged, or does not match this namespace.
pub fn check(bytes: &[u8], geometry: &Geometry, identity: Identity) -> Result<(), TableError> {
    let needed = len(geometry.handles);
    let short = TableError::Short {
        found: bytes.len(),
        needed,
    };
    let found = bytes.first_chunk().ok_or(short)?;
    check_header(found, geometry, identity)?;
    let (rows, _) = bytes.get(..needed).ok_or(short)?.as_chunks::<ROW>();
    for (handle, row) in (0..geometry.handles).zip(rows.iter().skip(HANDLES)) {
        if !(1..=geometry.unit).contains(&field(row, 0)) {
            return Err(TableError::Handle(handle));
        }
    }
    Ok(())
}

fn field(row: &[u8; ROW], at: usize) -> u64 {
    let bytes = row.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

fn field32(row: &[u8; ROW], at: usize) -> u32 {
    let bytes = row.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

fn check_header(
    found: &[u8; ROW],
    geometry: &Geometry,
    identity: Identity,
) -> Result<(), TableError> {
    let (magic, _) = found.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(TableError::Magic);
    }
    let version = field32(found, 8);
    if version != VERSION {
        return Err(TableError::Version(version));
    }
    let (content, sum) = found.split_at(ROW - 4);
    if sum != crc32fast::hash(content).to_ne_bytes() {
        return Err(TableError::Checksum);
    }
    if *found == header(geometry, identity) {
        return Ok(());
    }
    let (block, unit) = (field32(found, 12), field(found, 16));
    let handles = u16::try_from(field(found, 24)).unwrap_or(u16::MAX);
    let same = (handles, unit, block) == (geometry.handles, geometry.unit, geometry.block);
    if same {
        Err(TableError::OtherNamespace)
    } else {
        Err(TableError::OtherGeometry {
            handles,
            unit,
            block,
        })
    }
}
