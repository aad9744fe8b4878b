//! GUID partition tables (UEFI 2.10, 5.3): from a partition's number, label or GUID to its bytes.
//!
//! The table is read through the [`Volume`] itself, so that it works on every kind of volume. Its
//! contents are not trusted: checksums, sizes and ranges are checked before use, and a table that
//! contradicts itself gives no partition.

mod guid;
mod header;

use crate::read::{ReadError, Reader};
use crate::{IoError, Volume, VolumeError};
pub use guid::Guid;
use header::{Header, TableCopy};

/// Sizes in bytes that a partition entry may have.
const ENTRY: std::ops::RangeInclusive<u32> = 128..=4096;
/// Maximum size in bytes of the partition entries that are read; usual tables have 16 KiB.
const TABLE_MAX: u64 = 1 << 20;
/// Maximum number of partitions listed in the message about a missing one.
const NAMED: usize = 16;

/// Partition of a volume, found in its GUID partition table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// Number of the partition: its entry in the table, counted from 1 (the `p1` of
    /// `/dev/nvme0n1p1`).
    pub number: u32,
    /// Byte offset of the partition in the volume.
    pub offset: u64,
    /// Length of the partition in bytes.
    pub len: u64,
    /// Label of the partition; may be empty.
    pub label: String,
    /// Unique GUID of the partition (not the GUID of its type).
    pub guid: Guid,
}

/// Selects a partition by number, label or GUID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartitionSelector {
    /// Partition number, starting at 1.
    Number(u32),
    /// Label of the partition.
    Label(String),
    /// Unique GUID of the partition.
    Guid(Guid),
}

impl std::fmt::Display for PartitionSelector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number) => write!(f, "partition {number}"),
            Self::Label(label) => write!(f, "partition labelled {label:?}"),
            Self::Guid(guid) => write!(f, "partition with GUID {guid}"),
        }
    }
}

/// Error while looking up a partition.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GptError {
    /// The volume could not be opened for reading the table.
    #[error("the partition table cannot be read: {0}")]
    Open(VolumeError),
    /// The table could not be read.
    #[error("the partition table cannot be read: {0}")]
    Read(IoError),
    /// The volume has no GUID partition table.
    #[error("there is no GUID partition table: {what}")]
    None {
        /// Description of the contents of block 0.
        what: &'static str,
    },
    /// Both copies of the table are damaged.
    #[error(
        "the partition table is damaged: in the first copy {primary}, in the second copy {backup}"
    )]
    Damaged {
        /// Damage of the primary copy.
        primary: &'static str,
        /// Damage of the backup copy.
        backup: &'static str,
    },
    /// The requested partition does not exist.
    #[error("there is no {wanted}; {there}")]
    Missing {
        /// Partition that was requested.
        wanted: PartitionSelector,
        /// List of the partitions that exist, for the message.
        there: String,
    },
    /// Several partitions have the requested label or GUID.
    #[error("two partitions match {wanted}: {first} and {second}; choose by partition=NUMBER")]
    Ambiguous {
        /// Label or GUID that was requested.
        wanted: PartitionSelector,
        /// Number of the first partition that matches.
        first: u32,
        /// Number of the second partition that matches.
        second: u32,
    },
    /// The partition exceeds the usable blocks that the header declares.
    #[error(
        "partition {number} claims blocks {first} to {last}, but partitions lie in blocks {usable_first} to \
         {usable_last}: the partition table is damaged"
    )]
    Outside {
        /// Number of the requested partition.
        number: u32,
        /// Number of the partition's first block.
        first: u64,
        /// Number of the partition's last block.
        last: u64,
        /// Number of the first block that partitions may use.
        usable_first: u64,
        /// Number of the last block that partitions may use.
        usable_last: u64,
    },
    /// The requested partition overlaps another one.
    #[error("partitions {number} and {other} overlap: the partition table is damaged")]
    Overlap {
        /// Number of the requested partition.
        number: u32,
        /// Number of the partition that overlaps it.
        other: u32,
    },
}

impl From<ReadError> for GptError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Open(error) => Self::Open(error),
            ReadError::Read(error) => Self::Read(error),
        }
    }
}

/// Used entry of a partition table, with block numbers as stored there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    number: u32,
    first: u64,
    last: u64,
    guid: Guid,
    label: String,
}

/// Partition table of which one copy has passed its checks.
struct Table {
    header: Header,
    entries: Vec<Entry>,
}

/// Finds a partition of a volume.
///
/// # Errors
/// [`GptError`] when the table cannot be read, is missing or damaged, or does not have exactly one
/// such partition.
pub fn find(volume: &dyn Volume, which: &PartitionSelector) -> Result<Partition, GptError> {
    let info = volume.info();
    let mut reader = Reader::new(volume);
    let table = read(&mut reader, info.size, info.block_size)?;
    let mut found = table.entries.iter().filter(|entry| match which {
        PartitionSelector::Number(number) => entry.number == *number,
        PartitionSelector::Label(label) => entry.label == *label,
        PartitionSelector::Guid(guid) => entry.guid == *guid,
    });
    let Some(entry) = found.next() else {
        return Err(GptError::Missing {
            wanted: which.clone(),
            there: list(&table.entries),
        });
    };
    if let Some(second) = found.next() {
        return Err(GptError::Ambiguous {
            wanted: which.clone(),
            first: entry.number,
            second: second.number,
        });
    }
    table.partition(entry)
}

impl Table {
    /// Returns the partition that an entry describes, after checking its range.
    fn partition(&self, entry: &Entry) -> Result<Partition, GptError> {
        let Header {
            sector,
            first_usable,
            last_usable,
            ..
        } = self.header;
        let Entry { first, last, .. } = *entry;
        let outside = GptError::Outside {
            number: entry.number,
            first,
            last,
            usable_first: first_usable,
            usable_last: last_usable,
        };
        if first < first_usable || first > last || last > last_usable {
            return Err(outside);
        }
        let crossing = |other: &&Entry| {
            other.number != entry.number && other.first <= last && other.last >= first
        };
        if let Some(other) = self.entries.iter().find(crossing) {
            return Err(GptError::Overlap {
                number: entry.number,
                other: other.number,
            });
        }
        let bytes = (last - first)
            .checked_add(1)
            .and_then(|n| n.checked_mul(sector));
        match (first.checked_mul(sector), bytes) {
            (Some(offset), Some(len)) => Ok(Partition {
                number: entry.number,
                offset,
                len,
                label: entry.label.clone(),
                guid: entry.guid,
            }),
            _ => Err(outside),
        }
    }
}

/// Reads the primary partition table, or the backup when the primary is damaged.
fn read(reader: &mut Reader<'_>, size: u64, block_size: u32) -> Result<Table, GptError> {
    let unit = u64::from(block_size.max(512));
    protective_mbr(&reader.read(0, unit.min(size) as usize)?)?;
    // The blocks of the table are those of the disk that it was made on: an image may have been
    // moved.
    let mut damage = None;
    let mut sectors = vec![unit];
    sectors.extend([512, 4096].into_iter().filter(|&s| s > unit));
    for sector in sectors {
        match copy(reader, sector, size, TableCopy::First)? {
            Ok(table) => return Ok(table),
            Err(why) if why != header::NO_SIGNATURE => return backup(reader, sector, size, why),
            Err(why) => damage = damage.or(Some(why)),
        }
    }
    // Without the signature of a first copy, the size of blocks is unknown.
    backup(reader, unit, size, damage.unwrap_or(header::NO_SIGNATURE))
}

fn backup(
    reader: &mut Reader<'_>,
    sector: u64,
    size: u64,
    primary: &'static str,
) -> Result<Table, GptError> {
    match copy(reader, sector, size, TableCopy::Last)? {
        Ok(table) => {
            tracing::warn!(
                "partition table: the first copy is damaged ({primary}), using the second"
            );
            Ok(table)
        }
        Err(backup) => Err(GptError::Damaged { primary, backup }),
    }
}

/// Reads and checks one copy of the partition table; the inner error describes its damage.
fn copy(
    reader: &mut Reader<'_>,
    sector: u64,
    size: u64,
    place: TableCopy,
) -> Result<Result<Table, &'static str>, GptError> {
    let blocks = size / sector;
    let lba = match place {
        TableCopy::First => 1,
        TableCopy::Last => blocks.saturating_sub(1),
    };
    if blocks < 6 {
        return Ok(Err("the device is too small for one"));
    }
    let raw = reader.read(lba * sector, sector as usize)?;
    let header = match Header::parse(&raw, lba, blocks, place) {
        Ok(header) => header,
        Err(why) => return Ok(Err(why)),
    };
    let raw = reader.read(header.table * sector, header.table_bytes() as usize)?;
    let Some(raw) = raw.get(..header.entries as usize * header.entry_size as usize) else {
        return Ok(Err("the table is cut short"));
    };
    if crc32fast::hash(raw) != header.table_crc {
        return Ok(Err("the table's checksum is wrong"));
    }
    let entries = raw
        .chunks_exact(header.entry_size as usize)
        .zip(1..)
        .filter_map(|(raw, number)| entry(raw, number))
        .collect();
    Ok(Ok(Table { header, entries }))
}

/// Checks block 0, which marks the disk as used for tools that know no GPT (UEFI 2.10, 5.2.3).
fn protective_mbr(block: &[u8]) -> Result<(), GptError> {
    const PROTECTIVE: u8 = 0xee;
    let none = |what| Err(GptError::None { what });
    if block.get(510..512) != Some(&[0x55, 0xaa]) {
        return none(
            "block 0 is not a boot record; create one with: sgdisk, or parted mklabel gpt",
        );
    }
    let kinds = (0..4).filter_map(|i| block.get(446 + 16 * i + 4).copied());
    if kinds.clone().any(|kind| kind == PROTECTIVE) {
        return Ok(());
    }
    if kinds.into_iter().all(|kind| kind == 0) {
        return none("block 0 is a boot record without partitions");
    }
    none(
        "it has an MBR partition table; convert it (sgdisk --mbrtogpt), or use offset= and length=",
    )
}

fn entry(raw: &[u8], number: u32) -> Option<Entry> {
    let kind = Guid::from_disk(raw.get(..16)?)?;
    if kind == Guid::default() {
        return None;
    }
    let units = raw.get(56..128)?.chunks_exact(2).map(|pair| match *pair {
        [low, high] => u16::from_le_bytes([low, high]),
        _ => 0,
    });
    let label = char::decode_utf16(units.take_while(|&unit| unit != 0))
        .map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER))
        .collect();
    Some(Entry {
        number,
        first: header::u64_at(raw, 32)?,
        last: header::u64_at(raw, 40)?,
        guid: Guid::from_disk(raw.get(16..32)?)?,
        label,
    })
}

fn list(entries: &[Entry]) -> String {
    if entries.is_empty() {
        return "the table has no partitions".into();
    }
    let one = |entry: &Entry| match entry.label.as_str() {
        "" => entry.number.to_string(),
        label => format!("{} ({label:?})", entry.number),
    };
    let mut names: Vec<String> = entries.iter().take(NAMED).map(one).collect();
    if entries.len() > NAMED {
        names.push(format!("and {} more", entries.len() - NAMED));
    }
    format!("there are {}", names.join(", "))
}

#[cfg(test)]
mod tests;
