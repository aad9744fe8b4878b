//! Tables made here by the standard, and the result of damage to them.

use super::*;
use crate::{Io, MemVolume, Op, Request};
use dma::{Buffer, SegmentList};
use proptest::prelude::*;

/// A disk image under construction.
struct Disk {
    sector: usize,
    bytes: Vec<u8>,
    entry_size: usize,
    entries: usize,
}

const KIND: [u8; 16] = [7; 16];

impl Disk {
    /// Creates a disk of `blocks` blocks with an empty table of 128 entries.
    fn new(sector: usize, blocks: usize) -> Self {
        let mut bytes = vec![0; sector * blocks];
        bytes[446 + 4] = 0xee;
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        Self {
            sector,
            bytes,
            entry_size: 128,
            entries: 128,
        }
    }

    fn table_blocks(&self) -> usize {
        (self.entries * self.entry_size).div_ceil(self.sector)
    }

    fn usable(&self) -> (u64, u64) {
        let blocks = self.bytes.len() / self.sector;
        let table = self.table_blocks();
        (2 + table as u64, (blocks - table - 2) as u64)
    }

    fn entry(&mut self, number: usize, first: u64, last: u64, label: &str) -> &mut Self {
        let mut entry = vec![0; self.entry_size];
        entry[..16].copy_from_slice(&KIND);
        entry[16..32].fill(number as u8);
        entry[32..40].copy_from_slice(&first.to_le_bytes());
        entry[40..48].copy_from_slice(&last.to_le_bytes());
        for (i, unit) in label.encode_utf16().enumerate() {
            entry[56 + 2 * i..58 + 2 * i].copy_from_slice(&unit.to_le_bytes());
        }
        let at = 2 * self.sector + (number - 1) * self.entry_size;
        self.bytes[at..at + self.entry_size].copy_from_slice(&entry);
        self
    }

    /// Writes both headers and the copy of the table; `edit` may change a header before its
    /// checksum is made.
    fn finish_with(&mut self, edit: impl Fn(&mut [u8])) -> &mut Self {
        let (sector, blocks) = (self.sector, self.bytes.len() / self.sector);
        let len = self.entries * self.entry_size;
        let table = self.bytes[2 * sector..2 * sector + len].to_vec();
        let (first, last) = self.usable();
        let copy = (last as usize + 1) * sector;
        self.bytes[copy..copy + len].copy_from_slice(&table);
        for (lba, other, at) in [(1, blocks - 1, 2), (blocks - 1, 1, last as usize + 1)] {
            let mut header = vec![0; 92];
            header[..8].copy_from_slice(b"EFI PART");
            header[8..12].copy_from_slice(&0x10000u32.to_le_bytes());
            header[12..16].copy_from_slice(&92u32.to_le_bytes());
            for (offset, value) in [
                (24, lba),
                (32, other),
                (40, first as usize),
                (48, last as usize),
                (72, at),
            ] {
                header[offset..offset + 8].copy_from_slice(&(value as u64).to_le_bytes());
            }
            header[80..84].copy_from_slice(&(self.entries as u32).to_le_bytes());
            header[84..88].copy_from_slice(&(self.entry_size as u32).to_le_bytes());
            header[88..92].copy_from_slice(&crc32fast::hash(&table).to_le_bytes());
            edit(&mut header);
            let crc = crc32fast::hash(&header);
            header[16..20].copy_from_slice(&crc.to_le_bytes());
            self.bytes[lba * sector..lba * sector + 92].copy_from_slice(&header);
        }
        self
    }

    fn finish(&mut self) -> &mut Self {
        self.finish_with(|_| {})
    }

    fn find(&self, which: PartitionSelector) -> Result<Partition, GptError> {
        find(&volume(&self.bytes), &which)
    }
}

fn volume(bytes: &[u8]) -> MemVolume {
    let volume = MemVolume::new(bytes.len() as u64).unwrap();
    let mut buffer = Buffer::new(bytes.len());
    buffer.copy_from_slice(bytes);
    let request = Request::transfer(0, Op::Write { fua: false }, 0, SegmentList::owned(buffer));
    let mut queue = volume.open(&Io::new(Default::default())).unwrap();
    let mut done = queue.submit(request);
    while done.is_none() {
        queue.poll(&mut |completion| done = Some(completion));
    }
    done.unwrap().result.unwrap();
    volume
}

fn disk() -> Disk {
    let mut disk = Disk::new(512, 2048);
    disk.entry(1, 40, 99, "boot")
        .entry(3, 100, 1999, "vm disk ü")
        .finish();
    disk
}

fn error(result: Result<Partition, GptError>) -> String {
    result.expect_err("this must be refused").to_string()
}

#[test]
fn partitions_are_found_by_number_label_and_guid() {
    for (sector, blocks) in [(512, 2048), (4096, 512)] {
        let mut disk = Disk::new(sector, blocks);
        disk.entry(1, 40, 99, "boot")
            .entry(3, 100, 400, "vm disk ü")
            .finish();
        let third = disk.find(PartitionSelector::Number(3)).unwrap();
        let unit = sector as u64;
        assert_eq!((third.offset, third.len), (100 * unit, 301 * unit));
        assert_eq!(third.label, "vm disk ü");
        assert_eq!(
            disk.find(PartitionSelector::Label("vm disk ü".into()))
                .unwrap(),
            third
        );
        assert_eq!(
            disk.find(PartitionSelector::Guid(third.guid)).unwrap(),
            third
        );
        assert_eq!(
            disk.find(PartitionSelector::Number(1)).unwrap().len,
            60 * unit
        );
    }
}

#[test]
fn missing_partition_error_lists_existing() {
    let text = error(disk().find(PartitionSelector::Number(2)));
    assert!(
        text.contains("no partition 2") && text.contains("1 (\"boot\"), 3 (\"vm disk ü\")"),
        "{text}"
    );
    assert!(
        error(disk().find(PartitionSelector::Label("Boot".into()))).contains("labelled \"Boot\"")
    );
    assert!(
        error(
            Disk::new(512, 2048)
                .finish()
                .find(PartitionSelector::Number(1))
        )
        .contains("no partitions")
    );
    let mut twins = Disk::new(512, 2048);
    twins.entry(1, 40, 99, "a").entry(2, 100, 199, "a").finish();
    assert!(error(twins.find(PartitionSelector::Label("a".into()))).contains("1 and 2"));
    assert!(twins.find(PartitionSelector::Number(2)).is_ok());
}

#[test]
fn disk_without_gpt_is_described() {
    let mut plain = disk();
    plain.bytes[510] = 0;
    assert!(error(plain.find(PartitionSelector::Number(1))).contains("not a boot record"));
    let mut old = disk();
    old.bytes[446 + 4] = 0x83;
    assert!(error(old.find(PartitionSelector::Number(1))).contains("MBR"));
    let mut empty = disk();
    empty.bytes[446 + 4] = 0;
    assert!(error(empty.find(PartitionSelector::Number(1))).contains("without partitions"));
    // A hybrid table has both.
    let mut hybrid = disk();
    hybrid.bytes[446 + 16 + 4] = 0x83;
    assert!(hybrid.find(PartitionSelector::Number(1)).is_ok());
}

#[test]
fn backup_header_replaces_damaged_primary() {
    // The signature, a byte below the checksum, a byte of the table.
    for at in [512, 512 + 50, 1024 + 40] {
        let mut disk = disk();
        disk.bytes[at] ^= 1;
        assert_eq!(
            disk.find(PartitionSelector::Number(1)).unwrap().offset,
            40 * 512,
            "byte {at}"
        );
        let last = disk.bytes.len() - 512;
        disk.bytes[last + 50] ^= 1;
        let text = error(disk.find(PartitionSelector::Number(1)));
        assert!(
            text.contains("first copy") && text.contains("second copy the header's checksum"),
            "{text}"
        );
    }
}

#[test]
fn invalid_table_with_valid_checksum_is_refused() {
    let wrong = |edit: &dyn Fn(&mut [u8]), expected: &str| {
        let mut disk = disk();
        disk.finish_with(edit);
        let text = error(disk.find(PartitionSelector::Number(1)));
        assert!(text.contains(expected), "{expected}: {text}");
    };
    let put = |at: usize, value: u64| {
        move |header: &mut [u8]| header[at..at + 8].copy_from_slice(&value.to_le_bytes())
    };
    wrong(&put(24, 2), "another block");
    wrong(&put(40, 1), "begins where the first");
    wrong(&put(40, 2020), "ends before it begins");
    wrong(&put(48, 2048), "outside of the device");
    wrong(&put(48, u64::MAX), "outside of the device");
    wrong(&put(72, 0), "must not");
    wrong(&put(72, u64::MAX - 1), "outside");
    wrong(&|h| h[80..84].fill(0xff), "too large");
    wrong(&|h| h[80..84].fill(0), "no entries");
    wrong(
        &|h| h[84..88].copy_from_slice(&96u32.to_le_bytes()),
        "impossible size",
    );
    wrong(
        &|h| h[84..88].copy_from_slice(&0u32.to_le_bytes()),
        "impossible size",
    );
    wrong(
        &|h| h[84..88].copy_from_slice(&(1u32 << 31).to_le_bytes()),
        "impossible size",
    );
    wrong(
        &|h| h[12..16].copy_from_slice(&91u32.to_le_bytes()),
        "impossible size",
    );
    wrong(
        &|h| h[12..16].copy_from_slice(&u32::MAX.to_le_bytes()),
        "impossible size",
    );
    wrong(&|h| h[10] = 2, "unknown revision");
}

#[test]
fn partitions_out_of_bounds_or_overlapping_are_refused() {
    for (first, last) in [
        (1, 50),
        (33, 50),
        (50, 49),
        (1900, 2048),
        (50, u64::MAX),
        (u64::MAX, u64::MAX),
    ] {
        let mut disk = Disk::new(512, 2048);
        disk.entry(1, first, last, "").finish();
        let text = error(disk.find(PartitionSelector::Number(1)));
        assert!(text.contains("partition 1 claims"), "{text}");
    }
    let mut disk = Disk::new(512, 2048);
    disk.entry(1, 40, 100, "")
        .entry(2, 100, 200, "")
        .entry(3, 300, 400, "")
        .finish();
    assert!(error(disk.find(PartitionSelector::Number(1))).contains("1 and 2 overlap"));
    assert!(error(disk.find(PartitionSelector::Number(2))).contains("2 and 1 overlap"));
    assert!(disk.find(PartitionSelector::Number(3)).is_ok());
}

#[test]
fn table_with_larger_entries_is_read() {
    let mut disk = Disk::new(512, 2048);
    (disk.entry_size, disk.entries) = (256, 8);
    disk.entry(8, 40, 99, "eighth").finish();
    assert_eq!(
        disk.find(PartitionSelector::Number(8)).unwrap().label,
        "eighth"
    );
}

#[test]
fn tiny_disks_have_no_table() {
    for blocks in 1..6 {
        let disk = Disk::new(512, blocks);
        assert!(error(disk.find(PartitionSelector::Number(1))).contains("too small"));
    }
}

proptest! {
    /// Checks that for any contents of a disk, a returned partition lies inside the disk and behind
    /// the table.
    #[test]
    fn random_tables_never_lead_outside(
        changes in prop::collection::vec((0usize..1 << 16, any::<u8>()), 0..8),
        fields in prop::collection::vec((0usize..9, prop_oneof![any::<u64>(), 0u64..4096]), 0..3),
        sums in any::<bool>(),
    ) {
        let mut disk = disk();
        if sums {
            // Right checksums over wrong values.
            disk.finish_with(|header| {
                for (field, value) in &fields {
                    let at = [10, 12, 24, 40, 48, 72, 80, 84, 86][*field].min(84);
                    header[at..at + 8].copy_from_slice(&value.to_le_bytes());
                }
            });
        }
        for (at, value) in changes {
            // Mostly where the tables are.
            let len = disk.bytes.len();
            let at = if at & 1 == 0 { at % (34 * 512) } else { len - 1 - at % (34 * 512) };
            disk.bytes[at] = value;
        }
        for which in [PartitionSelector::Number(1), PartitionSelector::Number(3)] {
            if let Ok(found) = disk.find(which) {
                prop_assert!(found.offset >= 3 * 512);
                prop_assert!(found.len > 0 && found.offset.checked_add(found.len).unwrap() <= disk.bytes.len() as u64);
            }
        }
    }
}
