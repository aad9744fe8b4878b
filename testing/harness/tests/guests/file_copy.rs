//! Copies that a file system does between the files of volumes, on the file systems of a Linux
//! guest: which of them moves no data, and that what arrives is right.

use crate::common::{Checks, Disks, LONG_TIMEOUT, boot_with_device, run_for};
use anyhow::{Result, ensure};
use harness::Guest;
use harness::daemon::build;
use harness::progress::say;

const MIB: u64 = 1 << 20;
/// What the program copies: in blocks of a file system, and not in them.
const ALIGNED: u64 = 8 * MIB;
const REST: u64 = MIB + MIB / 2;

/// What the program says, of a directory on a new file system.
fn copies(guest: &Guest, make: &str, options: &str) -> Result<serde_json::Value> {
    let out = run_for(
        guest,
        LONG_TIMEOUT,
        &format!(
            "d=$(wait_disk 1 1); {make} $d >/dev/null 2>&1; mount $d /mnt; status=0
             LD_LIBRARY_PATH=/tools/lib:/tmp /tmp/file_copy /mnt {options} 2>&1 || status=$?
             umount /mnt; exit $status"
        ),
    )?;
    say(format!("{make} {options}: {}", out.trim()));
    let line = out.lines().rfind(|line| line.starts_with('{'));
    Ok(serde_json::from_str(line.unwrap_or_default())?)
}

#[test]
fn file_system_copies_blocks() -> Result<()> {
    let program = build(
        "file_copy",
        &["-p", "vnvme-volume", "--example", "file_copy"],
    )?;
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 1024)?;
    let guest = boot_with_device("file_copy", &file, None, &[program])?;
    let mut checks = Checks::new("file_copy");
    for (name, make) in [
        ("btrfs", "modprobe btrfs; mkfs.btrfs -q -f"),
        ("xfs", "modprobe xfs; mkfs.xfs -q -f -m reflink=1"),
    ] {
        checks.check(name, || {
            for direct in ["auto", "off"] {
                let all = copies(&guest, make, &format!("{direct} on"))?;
                ensure!(all["direct"] == (direct == "auto"), "{all}");
                ensure!(
                    all["reflinked"] == ALIGNED && all["copied"] == REST,
                    "{all}"
                );
                ensure!(all["requests"] == 0, "data passed through: {all}");
            }
            let only = copies(&guest, make, "auto reflink")?;
            ensure!(
                only["reflinked"] == ALIGNED && only["copied"] == 0,
                "{only}"
            );
            ensure!(only["others"] == REST, "{only}");
            Ok(())
        });
    }
    checks.check("ext4", || {
        for direct in ["auto", "off"] {
            let all = copies(&guest, "mkfs.ext4 -q -F", &format!("{direct} on"))?;
            ensure!(
                all["reflinked"] == 0 && all["copied"] == ALIGNED + REST,
                "{all}"
            );
            ensure!(all["requests"] == 0, "data passed through: {all}");
            let none = copies(&guest, "mkfs.ext4 -q -F", &format!("{direct} reflink"))?;
            ensure!(none["others"] == ALIGNED + REST, "{none}");
            let off = copies(&guest, "mkfs.ext4 -q -F", &format!("{direct} off"))?;
            ensure!(off["others"] == ALIGNED + REST, "{off}");
        }
        Ok(())
    });
    guest.poweroff()?;
    checks.finish();
    Ok(())
}
