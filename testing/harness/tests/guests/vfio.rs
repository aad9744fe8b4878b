//! The userspace driver over the kernel's real VFIO, in a guest with an emulated IOMMU, against
//! QEMU's own controller: by the group with Debian's kernel, by iommufd with a kernel that has it.

use std::path::{Path, PathBuf};

use crate::common::{
    Checks, Disks, LONG_TIMEOUT, boot_with_device, json, newer_kernel, run, run_for,
};
use anyhow::{Result, ensure};
use harness::Guest;
use harness::daemon::{build, program};
use harness::progress::{say, skip};

/// Where the driver's own test program is in the guest.
const SELFTEST: &str = "/tmp/vfio_selftest";

fn boot(name: &str, file: &Path, kernel: Option<PathBuf>) -> Result<Guest> {
    let selftest = build(
        "vfio_selftest",
        &["-p", "vnvme-driver", "--example", "vfio_selftest"],
    )?;
    boot_with_device(name, file, kernel, &[program()?, selftest])
}

/// The environment of the pushed programs.
const ENV: &str = "export LD_LIBRARY_PATH=/tools/lib:/tmp\n";

/// `started NAME`: waits until the last process in the background is this program, with its
/// redirections made.
const STARTED: &str = r#"
started() {
    for try in $(seq 600); do [ "$(cat /proc/$!/comm)" = $1 ] && return 0; sleep 0.05; done
    echo "$1 does not start"; return 1
}
"#;

/// Runs `vnvme` where it must refuse, in one line; answers the line.
fn refused(guest: &Guest, script: &str) -> Result<String> {
    let out = guest.sh(&format!("{}{ENV}{STARTED}{script}", crate::common::LIB))?;
    let text = out.text();
    ensure!(out.status == 1, "status {} of {script}: {text}", out.status);
    ensure!(text.trim().lines().count() == 1, "not one line: {text}");
    Ok(text)
}

/// What bind refuses, and that it does no harm.
fn refusals(guest: &Guest) -> Result<()> {
    let mounted = refused(
        guest,
        "d=$(wait_disk 1 1); mkfs.ext4 -q -F $d >/dev/null 2>&1; mount $d /mnt
         /tmp/vnvme bind $(bdf 1) 2>&1",
    )?;
    ensure!(mounted.contains("is mounted on /mnt"), "{mounted}");
    let moved = refused(
        guest,
        "umount /mnt; d=$(wait_disk 1 1); unshare -m sh -c \"mount $d /mnt && exec sleep 1000\" & started sleep
         /tmp/vnvme bind $(bdf 1) 2>&1; status=$?; kill $!; exit $status",
    )?;
    ensure!(moved.contains("something holds /dev/nvme"), "{moved}");
    let opened = refused(
        guest,
        "sleep 1; d=$(wait_disk 1 1); sleep 1000 <$d & started sleep
         /tmp/vnvme bind $(bdf 1) 2>&1; status=$?; kill $!; exit $status",
    )?;
    ensure!(
        opened.contains("is open in process") && opened.contains("(sleep)"),
        "{opened}"
    );
    let other = refused(guest, "/tmp/vnvme bind 0000:00:00.0 2>&1")?;
    ensure!(other.contains("is not an NVMe controller"), "{other}");
    let unbound = refused(guest, "/tmp/vfio_selftest $(bdf 1) 2>&1")?;
    ensure!(
        unbound.contains("belongs to the kernel's driver nvme"),
        "{unbound}"
    );
    Ok(())
}

fn bind(guest: &Guest) -> Result<()> {
    let report = json(
        guest,
        &format!("{ENV}/tmp/vnvme bind --json $(bdf 1) | sed 's/^[][]//'"),
    )?;
    ensure!(
        report["from"] == "nvme" && report["driver"] == "vfio-pci",
        "{report}"
    );
    ensure!(report["iommu_group"].is_u64(), "{report}");
    say(format!("vfio: {report}"));
    Ok(())
}

/// What a user without privileges is told; the last two stop the test program at its first mapping.
fn unprivileged(guest: &Guest, interface: &str) -> Result<()> {
    let user = |script: &str| {
        refused(
            guest,
            &format!(
                "mkdir -p /etc; echo 'u:x:1000:1000::/tmp:/bin/sh' >/etc/passwd; echo 'u:x:1000:' >/etc/group
                 b=$(bdf 1); g=/dev/vfio/$(basename $(readlink /sys/bus/pci/devices/$b/iommu_group))
                 {script}; status=$?; chown 0 /dev/vfio/* /dev/vfio/devices/* /dev/iommu 2>/dev/null; exit $status"
            ),
        )
    };
    let run = |options: &str| {
        format!(
            "su u -c \"ulimit -l 1024; LD_LIBRARY_PATH=/tools/lib:/tmp {SELFTEST} $b {options} 2>&1 >/tmp/out\""
        )
    };
    let denied = user(&run(interface))?;
    ensure!(denied.contains("no permission to open /dev/"), "{denied}");
    let short = "mapping 2097152 bytes for DMA would exceed the limit of locked memory (1048576 bytes, 1 MiB)";
    let nodes = "chown u $g /dev/vfio/devices/vfio0 /dev/iommu 2>/dev/null";
    let limited = user(&format!("{nodes}; {}", run(interface)))?;
    ensure!(limited.contains(short), "{limited}");
    // A user with access to the group alone gets it, also where the kernel has iommufd.
    let group = user(&format!(
        "chown u $g; {}; status=$?; grep -q ^group: /tmp/out || echo no group; [ $status = 1 ] || exit 0; false",
        run("")
    ))?;
    ensure!(group.contains(short), "{group}");
    Ok(())
}

/// The kernel's driver fills the disk's first 4 MiB for ours to read.
fn fill(guest: &Guest) -> Result<()> {
    run_for(guest, LONG_TIMEOUT, &format!("d=$(wait_disk 1 1); fio --name=fill --filename=$d --rw=write --size=4m {PATTERN} --do_verify=0"))
        .map(drop)
}

/// The kernel's driver finds in the next 4 MiB what ours left there.
fn found(guest: &Guest) -> Result<()> {
    run_for(guest, LONG_TIMEOUT, &format!("d=$(wait_disk 1 1); fio --name=found --filename=$d --rw=read --offset=4m --size=4m {PATTERN}"))
        .map(drop)
}

/// Each 64-bit word of a block of 4 KiB is the block's offset.
const PATTERN: &str =
    "--bs=4k --direct=1 --ioengine=psync --verify=pattern --verify_pattern=%o --verify_fatal=1";

/// The driver against QEMU's controller by one of the kernel's interfaces, then the
/// kernel again on the same disk.
fn drive(guest: &Guest, interface: &str) -> Result<()> {
    let out = run_for(
        guest,
        LONG_TIMEOUT,
        &format!("{ENV}/tmp/vfio_selftest $(bdf 1) {interface}"),
    )?;
    say(format!("vfio: {}", out.trim().replace('\n', "\nvfio: ")));
    ensure!(
        out.contains(&format!("{interface}: ")),
        "another interface was taken: {out}"
    );
    Ok(())
}

/// Somebody takes the device away from a daemon that serves it: the kernel asks for it, and gets
/// it, while the daemon lives.
fn released(guest: &Guest) -> Result<()> {
    let out = run_for(
        guest,
        LONG_TIMEOUT,
        &format!(
            "{ENV}b=$(bdf 1)
             /tmp/vnvme serve --socket /tmp/s.sock nvme://$b/1 >/tmp/serve.log 2>&1 & pid=$!
             for i in $(seq 100); do grep -q listening /tmp/serve.log && break; sleep 0.1; done
             echo $b >/tmp/bdf
             timeout 60 sh -c 'cat /tmp/bdf >/sys/bus/pci/drivers/vfio-pci/unbind' || {{ cat /tmp/serve.log; exit 1; }}
             status=0
             [ ! -e /sys/bus/pci/devices/$b/driver ] && kill -0 $pid && echo still there
             kill $pid && wait $pid || status=$?
             cat /tmp/serve.log; echo status $status
             /tmp/vnvme bind $b || true"
        ),
    )?;
    ensure!(out.contains("the device was released"), "{out}");
    ensure!(
        out.contains("drained=true") && out.contains("still there"),
        "{out}"
    );
    Ok(())
}

fn unbind(guest: &Guest) -> Result<()> {
    let busy = refused(
        guest,
        "g=$(basename $(readlink /sys/bus/pci/devices/$(bdf 1)/iommu_group)); sleep 1000 <>/dev/vfio/$g & started sleep
         /tmp/vnvme unbind $(bdf 1) 2>&1; status=$?; kill $!; exit $status",
    )?;
    ensure!(busy.contains("is open in process"), "{busy}");
    let out = run(
        guest,
        &format!("{ENV}/tmp/vnvme unbind $(bdf 1)\nwait_disk 1 1"),
    )?;
    ensure!(out.contains("vfio-pci -> nvme"), "{out}");
    Ok(())
}

fn has_cdev(guest: &Guest) -> Result<bool> {
    let found = guest.sh("[ -e /dev/iommu ] && ls /sys/class/vfio-dev 2>/dev/null")?;
    Ok(found.status == 0)
}

#[test]
fn vfio_device_opens_by_group() -> Result<()> {
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 32)?;
    let guest = boot("vfio-group", &file, None)?;
    let mut checks = Checks::new("vfio group");
    checks.check("refusals", || refusals(&guest));
    checks.check("fill", || fill(&guest));
    checks.check("bind", || bind(&guest));
    checks.check("unprivileged", || unprivileged(&guest, "group"));
    checks.check("drive", || drive(&guest, "group"));
    checks.check("released", || released(&guest));
    checks.check("unbind", || unbind(&guest));
    checks.check("found", || found(&guest));
    guest.poweroff()?;
    checks.finish();
    Ok(())
}

#[test]
fn vfio_device_opens_by_iommufd() -> Result<()> {
    const NAME: &str = "vfio::vfio_device_opens_by_iommufd";
    // The newer one has iommufd; Debian's has not.
    let Some(kernel) = newer_kernel() else {
        skip(NAME, "no kernel with iommufd is given (VNVME_KERNEL)");
        return Ok(());
    };
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 32)?;
    let guest = boot("vfio-iommufd", &file, Some(kernel))?;
    let mut checks = Checks::new("vfio iommufd");
    checks.check("fill", || fill(&guest));
    checks.check("bind", || bind(&guest));
    if has_cdev(&guest)? {
        checks.check("unprivileged", || unprivileged(&guest, "iommufd"));
        checks.check("drive", || drive(&guest, "iommufd"));
        checks.check("unbind", || unbind(&guest));
        checks.check("found", || found(&guest));
    } else {
        skip(NAME, "the kernel that is given has no iommufd");
    }
    guest.poweroff()?;
    checks.finish();
    Ok(())
}
