//! Detection of a disk's content by its first and last bytes: signatures of filesystems, partition
//! tables, volume managers, encrypted and virtual disks. Used for the error that keeps a load from
//! overwriting data. Content without a known signature counts as data, too, unless it is all
//! zeroes.

use crate::lane::{Lane, Target};
use anyhow::{Result, bail, ensure};
use std::time::Duration;

/// Number of bytes examined at the start, which includes ZFS's first label.
const START: u64 = 256 << 10;
/// Number of bytes examined at the end. RAID superblocks are within 128 KiB of it.
const END: u64 = 128 << 10;
/// Number of bytes in one read of the target.
const CHUNK: u64 = 64 << 10;
/// Interval between two checks whether a read has completed.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Name, offset and bytes of a signature. Signatures that other formats also contain come last: a
/// filesystem's boot sector ends like a partition table.
type Signature = (&'static str, usize, &'static [u8]);

/// Signatures at offsets from the start.
const AT_START: &[Signature] = &[
    ("a LUKS encrypted volume", 0, b"LUKS\xba\xbe"),
    ("a qcow2 image", 0, b"QFI\xfb"),
    ("a QED image", 0, b"QED\0"),
    ("a VMDK image", 0, b"KDMV"),
    ("a VHDX image", 0, b"vhdxfile"),
    ("a VHD image", 0, b"conectix"),
    ("a VDI image", 0x40, b"\x7f\x10\xda\xbe"),
    ("a Ceph BlueStore device", 0, b"bluestore block device"),
    ("an XFS filesystem", 0, b"XFSB"),
    ("a squashfs filesystem", 0, b"hsqs"),
    ("an ext2, ext3 or ext4 filesystem", 0x438, b"\x53\xef"),
    ("an F2FS filesystem", 0x400, b"\x10\x20\xf5\xf2"),
    ("an EROFS filesystem", 0x400, b"\xe2\xe1\xf5\xe0"),
    ("an HFS+ filesystem", 0x400, b"H+"),
    ("an HFSX filesystem", 0x400, b"HX"),
    ("an APFS container", 0x20, b"NXSB"),
    ("a Btrfs filesystem", 0x1_0040, b"_BHRfS_M"),
    ("a ReiserFS filesystem", 0x1_0034, b"ReIsEr"),
    ("a GFS2 filesystem", 0x1_0000, b"\x01\x16\x19\x70"),
    ("a JFS filesystem", 0x8000, b"JFS1"),
    ("an OCFS2 filesystem", 0x1000, b"OCFSV2"),
    ("an ISO 9660 filesystem", 0x8001, b"CD001"),
    ("an NTFS filesystem", 3, b"NTFS    "),
    ("a ReFS filesystem", 3, b"ReFS"),
    ("an exFAT filesystem", 3, b"EXFAT   "),
    ("a BitLocker encrypted volume", 3, b"-FVE-FS-"),
    ("a FAT filesystem", 0x36, b"FAT"),
    ("a FAT filesystem", 0x52, b"FAT32"),
    (
        "a bcache device",
        0x1018,
        b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca",
    ),
    (
        "a bcachefs filesystem",
        0x1018,
        b"\xc6\x85\x73\xf6\x66\xce\x90\xa9",
    ),
    ("an LVM physical volume", 0, b"LABELONE"),
    ("an LVM physical volume", 0x200, b"LABELONE"),
    ("an LVM physical volume", 0x400, b"LABELONE"),
    ("an LVM physical volume", 0x600, b"LABELONE"),
    ("a member of a Linux RAID", 0, MD),
    ("a member of a Linux RAID", 0x1000, MD),
    // At the end of the first page, which has 4, 16 or 64 KiB.
    ("swap space", 0xff6, b"SWAPSPACE2"),
    ("swap space", 0x3ff6, b"SWAPSPACE2"),
    ("swap space", 0xfff6, b"SWAPSPACE2"),
    ("a GUID partition table", 0x200, b"EFI PART"),
    ("a GUID partition table", 0x1000, b"EFI PART"),
    ("a partition table or boot sector", 0x1fe, b"\x55\xaa"),
];

/// Signatures at offsets back from the end.
const AT_END: &[Signature] = &[
    ("a GUID partition table", 0x200, b"EFI PART"),
    ("a GUID partition table", 0x1000, b"EFI PART"),
    ("a VHD image", 0x200, b"conectix"),
    (
        "a member of an Intel RAID",
        0x400,
        b"Intel Raid ISM Cfg Sig. ",
    ),
    ("a member of a DDF RAID", 0x200, b"\xde\x11\xde\x11"),
];

/// Magic number of every version of Linux's superblocks.
const MD: &[u8] = b"\xfc\x4e\x2b\xa9";
/// Magic number of ZFS uberblocks, in either byte order. The upper half of the first label has
/// slots of one KiB for them.
const ZFS: [&[u8]; 2] = [b"\x0c\xb1\xba\0\0\0\0\0", b"\0\0\0\0\0\xba\xb1\x0c"];
const ZFS_FROM: usize = 128 << 10;

/// Returns a description of the target's content; `None` if all examined bytes are zero.
pub fn of<T: Target>(target: &T) -> Result<Option<String>> {
    let geometry = target.geometry();
    let (size, block) = (geometry.size, u64::from(geometry.block_size.max(1)));
    let chunk = if size >= CHUNK && CHUNK.is_multiple_of(block) {
        CHUNK
    } else {
        block
    };
    if size < chunk {
        return Ok(None);
    }
    let bytes = usize::try_from(chunk)?;
    let mut lane = target.lane(0, 1, bytes)?;
    let mut part = |from: u64, to: u64| -> Result<Vec<u8>> {
        let mut all = Vec::new();
        let mut data = vec![0; bytes];
        for offset in (from..to).step_by(bytes) {
            read(&mut lane, offset, &mut data)?;
            all.extend_from_slice(&data);
        }
        Ok(all)
    };
    let start = part(0, START.min(size) / chunk * chunk)?;
    // Whole chunks, the last of which ends with the last whole block.
    let last = size / block * block;
    let first = last - END.min(last) / chunk * chunk;
    let end = part(first, last)?;
    Ok(identify(size, &start, first, &end))
}

fn read<L: Lane>(lane: &mut L, offset: u64, data: &mut [u8]) -> Result<()> {
    let mut over = None;
    lane.submit(0, false, offset)?;
    lane.kick()?;
    while over.is_none() {
        lane.wait(POLL_INTERVAL, &mut |_, outcome| over = Some(outcome))?;
    }
    if let Some(Err(error)) = over {
        bail!("reading at offset {offset}: {error}");
    }
    lane.get(0, data);
    Ok(())
}

/// Identifies the content of a disk of `size` bytes by its first bytes, and by its last bytes,
/// which begin at byte `first`.
fn identify(size: u64, start: &[u8], first: u64, end: &[u8]) -> Option<String> {
    let holds = |bytes: &[u8], at: usize, magic: &[u8]| {
        let found = at.checked_add(magic.len()).and_then(|to| bytes.get(at..to));
        found == Some(magic)
    };
    let at_end = |offset: Option<u64>, magic: &[u8]| {
        let within = offset.and_then(|offset| usize::try_from(offset.checked_sub(first)?).ok());
        within.is_some_and(|at| holds(end, at, magic))
    };
    let mut slots = (ZFS_FROM..start.len()).step_by(1 << 10);
    if slots.any(|at| ZFS.iter().any(|magic| holds(start, at, magic))) {
        return Some("a member of a ZFS pool".into());
    }
    let found = AT_START
        .iter()
        .find(|(_, at, magic)| holds(start, *at, magic));
    if let Some((what, ..)) = found {
        return Some((*what).into());
    }
    let found = AT_END
        .iter()
        .find(|(_, back, magic)| at_end(size.checked_sub(*back as u64), magic));
    if let Some((what, ..)) = found {
        return Some((*what).into());
    }
    // Version 1.0: at least 8 KiB before the end, on a border of 4 KiB; version 0.90: of 64 KiB.
    let one = size.checked_sub(8 << 10).map(|at| at / 4096 * 4096);
    let old = (size / (64 << 10) * (64 << 10)).checked_sub(64 << 10);
    if [one, old].into_iter().any(|at| at_end(at, MD)) {
        return Some("a member of a Linux RAID".into());
    }
    let data = |bytes: &[u8]| bytes.iter().position(|byte| *byte != 0).map(|at| at as u64);
    let at = data(start).or_else(|| Some(first + data(end)?));
    at.map(|at| format!("data of unknown kind (at offset {at}, for example)"))
}

/// Returns an error if the target contains data, unless the user has permitted its destruction.
pub fn refuse_data<T: Target>(name: &str, target: &T, destroy: bool) -> Result<()> {
    if destroy {
        return Ok(());
    }
    let found = of(target)?;
    let found = found.as_deref();
    ensure!(
        found.is_none(),
        "{name} holds {}; --destroy-data overwrites it",
        found.unwrap_or_default()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uring::UringTarget;
    use std::os::unix::fs::FileExt;

    fn found(size: u64, writes: &[(u64, &[u8])]) -> Option<String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(size).unwrap();
        for (offset, bytes) in writes {
            file.as_file().write_all_at(bytes, *offset).unwrap();
        }
        of(&UringTarget::open(file.path(), false).unwrap()).unwrap()
    }

    #[test]
    fn zeroed_disk_has_no_signature() {
        for size in [512, 4096, 65536, 100 * 512, 1 << 20, (1 << 20) + 512] {
            assert_eq!(found(size, &[]), None, "{size}");
        }
    }

    #[test]
    fn every_signature_is_found_at_its_offset() {
        const SIZE: u64 = 5 << 20;
        for (what, at, magic) in AT_START {
            assert_eq!(found(SIZE, &[(*at as u64, magic)]).as_deref(), Some(*what));
        }
        for (what, back, magic) in AT_END {
            // The size is a multiple of blocks only.
            for size in [SIZE, SIZE + 512] {
                let at = size - *back as u64;
                assert_eq!(found(size, &[(at, magic)]).as_deref(), Some(*what));
            }
        }
        for magic in ZFS {
            let at = ZFS_FROM as u64 + 7 * 1024;
            let what = found(SIZE, &[(at, magic)]);
            assert_eq!(what.as_deref(), Some("a member of a ZFS pool"));
        }
        for back in [8 << 10, 64 << 10] {
            let what = found(SIZE, &[(SIZE - back, MD)]);
            assert_eq!(what.as_deref(), Some("a member of a Linux RAID"), "{back}");
        }
    }

    #[test]
    fn filesystem_with_boot_sector_is_named_as_filesystem() {
        let what = found(1 << 20, &[(0x1fe, b"\x55\xaa"), (3, b"NTFS    ")]);
        assert_eq!(what.as_deref(), Some("an NTFS filesystem"));
        let what = found(1 << 20, &[(0x1fe, b"\x55\xaa"), (0x200, b"EFI PART")]);
        assert_eq!(what.as_deref(), Some("a GUID partition table"));
    }

    #[test]
    fn unknown_data_at_start_or_end_is_reported() {
        for at in [
            0,
            4095,
            (256 << 10) - 1,
            (1 << 20) - 1,
            (1 << 20) - (128 << 10),
        ] {
            let what = found(1 << 20, &[(at, b"x")]).unwrap();
            assert!(what.contains(&format!("at offset {at},")), "{what}");
        }
        assert_eq!(found(1 << 20, &[(512 << 10, b"x")]), None, "far from both");
        // The target is smaller than the examined bytes.
        assert!(found(1024, &[(1023, b"x")]).is_some());
        assert!(found((96 << 10) + 512, &[((96 << 10) + 511, b"x")]).is_some());
    }
}
