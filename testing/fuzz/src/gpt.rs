//! Hostile partition tables: every accepted partition lies within the disk and behind the table.

use dma::{Buffer, SegmentList};
use volume::gpt::{PartitionSelector, find};
use volume::{Io, IoOptions, MemVolume, Op, Request, Volume};

const BLOCK: usize = 512;
/// Blocks of the disk. The table has one block: four entries.
const BLOCKS: usize = 64;
const LAST: usize = BLOCKS - 1;

/// A good table with two partitions: the protective record, both headers, both copies.
fn disk() -> Vec<u8> {
    let mut disk = vec![0; BLOCK * BLOCKS];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = disk.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(450, &[0xee]);
    put(510, &[0x55, 0xaa]);
    for (header, other, table) in [(1, LAST, 2), (LAST, 1, LAST - 1)] {
        let at = header * BLOCK;
        put(at, b"EFI PART\0\0\x01\0\x5c\0\0\0");
        let fields = [
            (24, header),
            (32, other),
            (40, 3),
            (48, LAST - 2),
            (72, table),
        ];
        for (field, value) in fields {
            put(at + field, &(value as u64).to_le_bytes());
        }
        put(at + 80, &4u32.to_le_bytes());
        put(at + 84, &128u32.to_le_bytes());
        for (i, (first, last)) in [(3u64, 20u64), (21, 50)].into_iter().enumerate() {
            let at = table * BLOCK + i * 128;
            put(at, &[1; 16]);
            put(at + 16, &[i as u8 + 1; 16]);
            put(at + 32, &first.to_le_bytes());
            put(at + 40, &last.to_le_bytes());
            put(at + 56, &[b'a' + i as u8, 0]);
        }
    }
    disk
}

/// Makes the checksums of a header and its table right, as far as they can be.
fn sum(disk: &mut [u8], header: usize) {
    let number = |at: usize| {
        let bytes = disk.get(at..at + 8).and_then(|b| b.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    };
    let at = header * BLOCK;
    let table = number(at + 72).saturating_mul(BLOCK as u64);
    let entries = number(at + 80);
    let len = (entries & 0xffff_ffff).saturating_mul(entries >> 32);
    let range = usize::try_from(table).ok().zip(usize::try_from(len).ok());
    let all = range.and_then(|(start, len)| disk.get(start..start.checked_add(len)?));
    let crc = all.map_or(0, crc32fast::hash);
    let len = number(at + 8) >> 32;
    if let Some(place) = disk.get_mut(at + 88..at + 92) {
        place.copy_from_slice(&crc.to_le_bytes());
    }
    if let Some(place) = disk.get_mut(at + 16..at + 20) {
        place.fill(0);
    }
    let covered = disk.get(at..at + (len as usize).min(BLOCK));
    let crc = covered.map_or(0, crc32fast::hash);
    if let Some(place) = disk.get_mut(at + 16..at + 20) {
        place.copy_from_slice(&crc.to_le_bytes());
    }
}

/// Changes bytes of a disk, corrects checksums as the input selects, and searches for partitions.
///
/// # Panics
/// When a partition does not lie where partitions may.
pub fn gpt(data: &[u8]) {
    let mut disk = disk();
    let Some((&flags, changes)) = data.split_first() else {
        return;
    };
    for change in changes.chunks_exact(4) {
        let [kind, low, high, value] = *change else {
            return;
        };
        // Mostly headers and tables: anything else is data.
        let wide = usize::from(u16::from_le_bytes([low, high]));
        let at = match kind % 4 {
            0 => wide % (BLOCK * BLOCKS),
            1 => BLOCK + wide % 92,
            2 => LAST * BLOCK + wide % 92,
            _ => 2 * BLOCK + wide % BLOCK,
        };
        if let Some(byte) = disk.get_mut(at) {
            *byte = value;
        }
    }
    if flags & 1 != 0 {
        sum(&mut disk, 1);
    }
    if flags & 2 != 0 {
        sum(&mut disk, LAST);
    }
    let size = disk.len() as u64;
    let Some(volume) = volume(&disk) else {
        return;
    };
    let label = PartitionSelector::Label("b".into());
    for which in [
        PartitionSelector::Number(1),
        PartitionSelector::Number(4),
        label,
    ] {
        let Ok(found) = find(&volume, &which) else {
            continue;
        };
        assert!(found.len > 0 && found.offset >= 3 * BLOCK as u64);
        assert!(
            found
                .offset
                .checked_add(found.len)
                .is_some_and(|end| end <= size)
        );
        assert!(found.offset.is_multiple_of(512) && found.len.is_multiple_of(512));
    }
}

fn volume(disk: &[u8]) -> Option<MemVolume> {
    let volume = MemVolume::new(disk.len() as u64).ok()?;
    let mut data = Buffer::new(disk.len());
    data.copy_from_slice(disk);
    let io = Io::new(IoOptions::default());
    let written = volume.open(&io).ok()?.submit(Request::transfer(
        0,
        Op::Write { fua: false },
        0,
        SegmentList::owned(data),
    ));
    written?.result.ok()?;
    Some(volume)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unchanged_disk_has_partitions() {
        let mut disk = disk();
        sum(&mut disk, 1);
        sum(&mut disk, LAST);
        let good = volume(&disk).unwrap();
        assert_eq!(
            find(&good, &PartitionSelector::Number(2)).unwrap().offset,
            21 * 512
        );
        // The second copy alone, too.
        disk[BLOCK] = 0;
        let good = volume(&disk).unwrap();
        assert_eq!(
            find(&good, &PartitionSelector::Label("a".into()))
                .unwrap()
                .len,
            18 * 512
        );
    }
}
