//! Registry of the byte ranges that this process serves. Two exports must not write to the same
//! bytes.
//!
//! Files are also locked against other processes (`file::lock`). This registry covers everything
//! that can be opened twice in one process, including devices that the process itself drives, and
//! knows the names of both exports.

use crate::Volume;
use std::ops::Bound;
use std::sync::{Arc, Mutex, Weak};
use sync::Unpoisoned;

/// Location of a volume's bytes in an object that can be opened more than once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Name of the object that stores the bytes, such as a file; equal for all openings of the
    /// object.
    pub root: String,
    /// Byte offset in the object at which the extent begins.
    pub offset: u64,
    /// Number of bytes; `None`: up to the end of the object, even if it grows.
    pub len: Option<u64>,
}

impl Extent {
    /// Creates the extent of all bytes of `root`.
    pub fn whole(root: String) -> Self {
        Self {
            root,
            offset: 0,
            len: None,
        }
    }

    /// Returns the part of this extent that begins at byte `offset`, with `len` bytes (`None`: all
    /// remaining bytes).
    pub fn part(self, offset: u64, len: Option<u64>) -> Self {
        let rest = self.len.map(|all| all.saturating_sub(offset));
        Self {
            root: self.root,
            offset: self.offset.saturating_add(offset),
            len: match (len, rest) {
                (Some(len), Some(rest)) => Some(len.min(rest)),
                (len, rest) => len.or(rest),
            },
        }
    }

    /// Returns the end of the extent, which is the byte after the last one or unbounded.
    fn end(&self) -> Bound<u64> {
        match self.len.and_then(|len| self.offset.checked_add(len)) {
            Some(end) => Bound::Excluded(end),
            None => Bound::Unbounded,
        }
    }

    /// Returns the bytes that both extents have in common.
    fn common(&self, other: &Self) -> Option<(u64, Bound<u64>)> {
        if self.root != other.root {
            return None;
        }
        let start = self.offset.max(other.offset);
        let end = match (self.end(), other.end()) {
            (Bound::Excluded(a), Bound::Excluded(b)) => Bound::Excluded(a.min(b)),
            (Bound::Unbounded, end) | (end, _) => end,
        };
        let empty = matches!(end, Bound::Excluded(end) if end <= start);
        (!empty).then_some((start, end))
    }
}

/// Error: two exports of one process have bytes in common, and at least one of them writes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{new} overlaps {old}, which is in use by this process, too: both have {range} of {root}; \
     give them ranges apart, or serve both read-only"
)]
pub struct Overlap {
    /// Name of the export that was refused.
    pub new: String,
    /// Name of the export that already serves the bytes.
    pub old: String,
    /// Description of the bytes that both exports would serve.
    pub range: String,
    /// Name of the object that stores the bytes, such as a file.
    pub root: String,
}

struct Entry {
    volume: Weak<dyn Volume>,
    extent: Extent,
    writable: bool,
    name: String,
}

/// Open volumes of this process on objects that can be opened more than once.
static ENTRIES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

/// Registers a volume under a name. Fails when the volume shares bytes with a registered one and at
/// least one of the two writes. The registration ends when the volume is dropped.
pub fn claim(volume: &Arc<dyn Volume>, name: &str) -> Result<(), Overlap> {
    let Some(extent) = volume.extent() else {
        return Ok(());
    };
    let writable = !volume.info().read_only;
    let mut entries = ENTRIES.lock().unpoisoned();
    entries.retain(|entry| entry.volume.strong_count() > 0);
    for entry in entries.iter().filter(|entry| entry.writable || writable) {
        if let Some((start, end)) = entry.extent.common(&extent) {
            let range = match end {
                Bound::Excluded(end) => format!("bytes {start} to {}", end - 1),
                _ if start == 0 => "all bytes".into(),
                _ => format!("the bytes from {start} on"),
            };
            return Err(Overlap {
                new: name.into(),
                old: entry.name.clone(),
                range,
                root: extent.root,
            });
        }
    }
    entries.push(Entry {
        volume: Arc::downgrade(volume),
        extent,
        writable,
        name: name.into(),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent(offset: u64, len: Option<u64>) -> Extent {
        Extent {
            root: "r".into(),
            offset,
            len,
        }
    }

    proptest! {
        #[test]
        fn extent_overlap_matches_sets(
            a in (0u64..20, proptest::option::of(1u64..20)),
            b in (0u64..20, proptest::option::of(1u64..20)),
        ) {
            let has = |(offset, len): (u64, Option<u64>), at: u64| at >= offset && len.is_none_or(|len| at < offset + len);
            let both: Vec<u64> = (0..50).filter(|&at| has(a, at) && has(b, at)).collect();
            let common = extent(a.0, a.1).common(&extent(b.0, b.1));
            prop_assert_eq!(common.map(|(start, _)| start), both.first().copied());
            if let Some((_, Bound::Excluded(end))) = common {
                prop_assert_eq!(Some(end - 1), both.last().copied());
            }
        }

        #[test]
        fn part_of_part_lies_in_both(a in (0u64..100, 1u64..100), b in (0u64..100, proptest::option::of(1u64..100))) {
            let part = extent(0, None).part(a.0, Some(a.1)).part(b.0, b.1);
            prop_assert_eq!(part.offset, a.0 + b.0);
            let len = part.len.unwrap();
            prop_assert!(len <= a.1.saturating_sub(b.0) && b.1.is_none_or(|wanted| len <= wanted));
        }
    }
}
