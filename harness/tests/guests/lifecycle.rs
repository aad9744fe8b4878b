//! Guests and daemons that come and go: what one leaves, the next must find;
//! what is wrong must be said.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common::{Disks, LONG, run, run_for};
use anyhow::{Result, bail, ensure};
use harness::progress::skip;
use harness::qemu::Accel;
use harness::served::{Controller, Volumes};
use harness::{Daemon, Guest};
use serde_json::json;

/// A guest that is killed in the middle of its work leaves a server that takes the next one, and a
/// disk that still holds what was flushed.
#[test]
fn a_second_guest_after_the_first_is_killed() -> Result<()> {
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 256)?;
    let served = Volumes::file("second-guest", &file).serve()?;
    let first = Guest::builder("first").disk(served.disk()).boot()?;
    let wanted = run_for(
        &first,
        LONG,
        "d=$(wait_disk 1 1); head -c $((4 << 20)) /dev/urandom >/tmp/r
         dd if=/tmp/r of=$d bs=1M oflag=direct conv=fsync 2>/dev/null
         (fio --name=busy --filename=$d --rw=randwrite --bs=64k --iodepth=32 --ioengine=io_uring --direct=1 \
             --offset=64m --size=128m --time_based --runtime=600 >/dev/null 2>&1 &) </dev/null >/dev/null 2>&1
         writes() { set -- $(cat /sys/block/$(basename $d)/stat); echo $5; }
         was=$(writes)
         for try in $(seq 2000); do [ $(writes) -ge $((was + 100)) ] && break; sleep 0.05; done
         [ $(writes) -ge $((was + 100)) ] || { echo fio does not write; exit 1; }
         sha256sum </tmp/r",
    )?;
    first.kill()?;
    let second = Guest::builder("second").disk(served.disk()).boot()?;
    let found = run(
        &second,
        "d=$(wait_disk 1 1); dd if=$d bs=1M count=4 iflag=direct 2>/dev/null | sha256sum
         dd if=/dev/zero of=$d bs=1M count=4 seek=200 oflag=direct conv=fsync 2>/dev/null",
    )?;
    ensure!(
        wanted == found,
        "the first guest wrote {wanted}, the second reads {found}"
    );
    second.poweroff()?;
    served.finish()
}

/// A guest that finds out for itself at what rate its counter runs is wrong on a busy host.
#[test]
fn an_emulated_guest_is_told_the_rate_of_its_clock() -> Result<()> {
    let guest = Guest::builder("clock").accel(Accel::Tcg).boot()?;
    // Where Linux has measured the processor to be another one, the clock's line comes behind that.
    let found = run(
        &guest,
        "dmesg | sed -n 's/.*tsc: Detected \\([0-9]*\\)[.].* MHz.*/\\1/p' | tail -n 1",
    )?;
    let told = run(
        &guest,
        "sed -n 's/.*tsc_early_khz=\\([0-9]*\\).*/\\1/p' /proc/cmdline",
    )?;
    let (found, told): (u64, u64) = (found.trim().parse()?, told.trim().parse()?);
    ensure!(
        found == told / 1000,
        "told {told} kHz, it takes {found} MHz"
    );
    guest.poweroff()
}

/// Behind an emulated IOMMU every transfer has its own short-lived mapping: the server's
/// map changes all the time.
#[test]
fn a_guest_behind_an_iommu_reads_what_it_wrote() -> Result<()> {
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 256)?;
    let served = Volumes::file("viommu", &file).serve()?;
    let guest = Guest::builder("viommu")
        .viommu()
        .append("iommu.strict=1")
        .disk(served.disk())
        .boot()?;
    run_for(
        &guest,
        Duration::from_secs(180),
        "[ -n \"$(ls /sys/kernel/iommu_groups)\" ] || { echo the guest has no IOMMU; exit 1; }
         d=$(wait_disk 1 1)
         fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-256k --iodepth=8 \
             --size=16m --verify=crc32c --verify_fatal=1 --verify_state_save=0 --numjobs=2 --offset_increment=64m
         nvme reset /dev/$(ctrl 1)
         d=$(wait_disk 1 1)
         mkfs.ext4 -q -F $d && mount $d /mnt && cp -a /tools/share/locale /mnt/ && umount /mnt
         e2fsck -f -n $d",
    )?;
    let log = guest.log().to_path_buf();
    guest.poweroff()?;
    // QEMU takes away whole ranges, whether something is mapped there or not, and writes a line for
    // each answer that is an error.
    let log = std::fs::read_to_string(log)?;
    let is_error = |line: &&str| line.contains("vfio") && !line.contains("warning:");
    let complaints: Vec<&str> = log.lines().filter(is_error).collect();
    ensure!(
        complaints.is_empty(),
        "{} lines of QEMU's, the first: {}",
        complaints.len(),
        complaints.first().unwrap_or(&"")
    );
    served.finish()
}

/// The controller is plugged into running machines, one after the other. It is not pulled out of
/// them: QEMU 11.1 itself aborts when a vfio-user-pci device is (an assertion in
/// memory_region_del_subregion).
#[test]
fn a_controller_is_plugged_into_running_guests() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip(
            "a_controller_is_plugged_into_running_guests",
            "only vfio-user is plugged",
        );
        return Ok(());
    }
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 64)?;
    let served = Volumes::file("hotplug", &file).serve()?;
    let plugged = |name: &str| -> Result<Guest> {
        let guest = Guest::builder(name)
            .qemu_args(["-device", "pcie-root-port,id=slot1,chassis=1,slot=1"])
            .boot()?;
        let socket = json!({"type": "unix", "path": served.daemon()?.socket()});
        let device =
            json!({"driver": "vfio-user-pci", "id": "hot", "bus": "slot1", "socket": socket});
        guest.qmp("device_add", device)?;
        Ok(guest)
    };
    let guest = plugged("plugged-first")?;
    let wanted = run(
        &guest,
        "d=$(wait_disk 1 1); head -c 1048576 /dev/urandom >/tmp/r
         dd if=/tmp/r of=$d bs=1M oflag=direct conv=fsync 2>/dev/null; sha256sum </tmp/r",
    )?;
    guest.poweroff()?;
    let guest = plugged("plugged-second")?;
    let found = run(
        &guest,
        "d=$(wait_disk 1 1); dd if=$d bs=1M count=1 iflag=direct 2>/dev/null | sha256sum",
    )?;
    ensure!(wanted == found, "written {wanted}, read {found}");
    guest.poweroff()?;
    served.finish()
}

/// A daemon that is asked to end and started again serves the same disk, under the same identity.
#[test]
fn a_daemon_that_is_started_again_serves_the_same_disk() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip(
            "a_daemon_that_is_started_again",
            "QEMU's controller has no daemon",
        );
        return Ok(());
    }
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 64)?;
    let mut seen = Vec::new();
    for name in ["before", "after"] {
        let served = Volumes::file("again", &file).serve()?;
        let guest = Guest::builder(name).disk(served.disk()).boot()?;
        seen.push(run(
            &guest,
            "d=$(wait_disk 1 1); nvme id-ctrl $d | grep -E '^(sn|mn|fr|subnqn)'; nvme id-ns $d | grep -E '^(nguid|eui64)'
             dd if=$d bs=1M count=1 iflag=direct 2>/dev/null | sha256sum >/tmp/was
             grep -q ^30e14955ebf1352266dc2ff8067e68104607e750abb9d3b36582b8af909fcb58 /tmp/was && echo ONE | dd of=$d bs=512 conv=sync oflag=direct 2>/dev/null
             dd if=$d bs=3 count=1 2>/dev/null; echo",
        )?);
        guest.poweroff()?;
        served.finish()?;
    }
    ensure!(seen[0] == seen[1], "first {}\nthen {}", seen[0], seen[1]);
    ensure!(seen[0].contains("ONE"), "{}", seen[0]);
    Ok(())
}

/// A guest whose memory cannot be shared gets no disk, and the log says which
/// QEMU option was left out.
#[test]
fn memory_that_is_not_shared_is_explained() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip(
            "memory_that_is_not_shared",
            "QEMU's controller needs no shared memory",
        );
        return Ok(());
    }
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 64)?;
    let served = Volumes::file("private", &file).serve()?;
    // Whether QEMU starts at all is its affair.
    let guest = Guest::builder("private")
        .disk(served.disk())
        .private_memory()
        .boot();
    served
        .daemon()?
        .wait_log("share=on", Duration::from_secs(30))?;
    drop(guest);
    served.daemon()?.must_live()?;
    let guest = Guest::builder("shared").disk(served.disk()).boot()?;
    run(
        &guest,
        "d=$(wait_disk 1 1); dd if=$d of=/dev/null bs=1M count=1 iflag=direct",
    )?;
    guest.poweroff()?;
    served.finish()
}

/// A tmpfs that is unmounted when dropped.
struct Tmpfs<'a>(&'a Path);

impl<'a> Tmpfs<'a> {
    fn mount(at: &'a Path, options: &str) -> Result<Tmpfs<'a>> {
        std::fs::create_dir_all(at)?;
        let out = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(at)
            .output()?;
        if !out.status.success() {
            bail!("{}", String::from_utf8_lossy(&out.stderr).trim());
        }
        Ok(Tmpfs(at))
    }
}

impl Drop for Tmpfs<'_> {
    fn drop(&mut self) {
        // Lazily, for a failed test may still have a daemon on it; there is nobody to tell.
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

/// The filesystem below a volume runs full: the guest's write fails, everything else goes on; when
/// there is room again, writes succeed.
#[test]
fn a_full_host_filesystem_fails_the_write_and_nothing_else() -> Result<()> {
    let name = "a_full_host_filesystem";
    if Controller::chosen()? == Controller::Qemu {
        skip(name, "QEMU pauses its guest when its disk is full");
        return Ok(());
    }
    let disks = Disks::new()?;
    let place = disks.dir().join("small");
    let _tmpfs = match Tmpfs::mount(&place, "size=24m") {
        Ok(tmpfs) => tmpfs,
        Err(e) => {
            skip(name, format!("a tmpfs cannot be mounted: {e:#}"));
            return Ok(());
        }
    };
    let file = place.join("disk.raw");
    std::fs::File::create(&file)?.set_len(64 << 20)?;
    let ballast = place.join("ballast");
    std::fs::write(&ballast, vec![1; 12 << 20])?;
    let served = Volumes::file("full", &file).serve()?;
    let guest = Guest::builder("full").disk(served.disk()).boot()?;
    let text = run_for(
        &guest,
        Duration::from_secs(120),
        "d=$(wait_disk 1 1)
         tr '\\0' a </dev/zero | dd of=$d bs=1M count=8 iflag=fullblock oflag=direct conv=fsync 2>/dev/null
         dd if=/dev/zero of=$d bs=1M count=40 seek=8 oflag=direct conv=fsync 2>&1 && echo 'WROTE ALL' || echo 'write failed'
         wait_disk 1 1 >/dev/null
         dd if=$d bs=1M count=8 iflag=direct 2>/dev/null | tr -d a | wc -c",
    )?;
    ensure!(
        text.contains("write failed") && !text.contains("WROTE ALL"),
        "{text}"
    );
    ensure!(
        text.trim_end().ends_with("\n0"),
        "what was written before must still be there: {text}"
    );
    served.daemon()?.must_live()?;
    std::fs::remove_file(&ballast)?;
    run(
        &guest,
        "d=$(wait_disk 1 1); dd if=/dev/zero of=$d bs=1M count=1 seek=60 oflag=direct conv=fsync
         nvme smart-log $d >/dev/null",
    )?;
    guest.poweroff()?;
    served.finish()
}

/// A volume that another daemon serves is refused, by a line that names it.
#[test]
fn a_disk_that_is_served_already_is_refused() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip(
            "a_disk_that_is_served_already",
            "QEMU's controller has no daemon",
        );
        return Ok(());
    }
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 64)?;
    let daemon = Daemon::builder("holder").volume(&file).start()?;
    let (status, printed) = Daemon::builder("intruder").volume(&file).refuse()?;
    ensure!(!status.success(), "two daemons on one disk");
    ensure!(
        printed.contains("disk.raw"),
        "the line must name the disk: {printed}"
    );
    let (status, printed) = Daemon::builder("missing")
        .volume(disks.dir().join("none.raw"))
        .refuse()?;
    ensure!(
        !status.success() && printed.contains("none.raw"),
        "{printed}"
    );
    daemon.terminate()
}
