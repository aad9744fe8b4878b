//! Guests and daemons that come and go: what one leaves, the next must find;
//! what is wrong must be said.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::{Checks, Disks, LONG_TIMEOUT, run, run_for};
use anyhow::{Result, bail, ensure};
use harness::progress::skip;
use harness::qemu::Accel;
use harness::served::{Controller, ServedVolumes, Volumes};
use harness::{Daemon, Guest, GuestBuilder};
use serde_json::json;

/// The place of each disk among the controllers of a guest. The plugged one is behind a port,
/// and so the last.
const BUSY: usize = 1;
const AGAIN: usize = 2;
const PRIVATE: usize = 3;
const FULL: usize = 4;

/// Disks that are served by a daemon of their own; QEMU's controller has none.
struct OfDaemons {
    again: ServedVolumes,
    private: ServedVolumes,
    plugged: ServedVolumes,
    /// `None` where no tmpfs can be mounted.
    full: Option<Full>,
}

impl OfDaemons {
    fn serve(disks: &Disks) -> Result<OfDaemons> {
        let serve = |name: &str| Volumes::file(name, disks.sparse(name, 64)?).serve();
        Ok(OfDaemons {
            again: serve("again")?,
            private: serve("private")?,
            plugged: serve("plugged")?,
            full: Full::serve(disks)?,
        })
    }
}

fn builder(name: &str) -> GuestBuilder {
    Guest::builder(name).qemu_args(["-device", "pcie-root-port,id=slot1,chassis=1,slot=1"])
}

/// Two guests have the same disks, one after the other, and the first of them is killed.
#[test]
fn a_second_guest_finds_what_the_first_left() -> Result<()> {
    let disks = Disks::new()?;
    let busy = Volumes::file("busy", disks.sparse("busy", 256)?).serve()?;
    let others = match Controller::chosen()? {
        Controller::Vnvme => Some(OfDaemons::serve(&disks)?),
        Controller::Qemu => {
            skip("lifecycle", "QEMU's controller has no daemon");
            None
        }
    };
    let mut checks = Checks::new("lifecycle");
    if let Some(others) = &others {
        let what = "memory that is not shared is explained";
        checks.check(what, || unshared(&others.private));
    }
    let mut guest = builder("first").disk(busy.disk());
    if let Some(others) = &others {
        guest = guest.disk(others.again.disk()).disk(others.private.disk());
        if let Some(full) = &others.full {
            guest = guest.disk(full.served.disk());
        }
    }
    let guest = guest.boot()?;
    let (mut written, mut plugged, mut identity) = Default::default();
    if let Some(others) = &others {
        checks.check("a guest after one without shared memory", || {
            reads(&guest, PRIVATE)
        });
        checks.check("a controller is plugged into a guest", || {
            let number = if others.full.is_some() { FULL } else { PRIVATE } + 1;
            plugged = plug(&guest, &others.plugged, number, true)?;
            Ok(())
        });
        checks.check("a disk before its daemon ends", || {
            identity = identify(&guest)?;
            Ok(())
        });
        if let Some(full) = &others.full {
            let what = "a full host filesystem fails the write and nothing else";
            checks.check(what, || full.fails_and_recovers(&guest));
        }
    }
    checks.check("a guest is killed in the middle of its work", || {
        written = works(&guest)?;
        guest.kill()
    });
    drop(guest);

    let mut second = builder("second").accel(Accel::Tcg).disk(busy.disk());
    let others = others.map(|others| -> Result<_> {
        // Ends well, and is started again.
        others.again.finish()?;
        let again = Volumes::file("again", disks.dir().join("again")).serve()?;
        Ok(OfDaemons { again, ..others })
    });
    let others = others.transpose()?;
    if let Some(others) = &others {
        second = second.disk(others.again.disk());
    }
    let guest = second.boot()?;
    checks.check("an emulated guest is told the rate of its clock", || {
        clock(&guest)
    });
    checks.check("the next guest finds what was flushed", || {
        finds(&guest, &written)
    });
    if let Some(others) = &others {
        checks.check("the daemon serves the same disk", || {
            let found = identify(&guest)?;
            ensure!(identity == found, "first {identity}\nthen {found}");
            ensure!(identity.contains("ONE"), "{identity}");
            Ok(())
        });
        checks.check("the controller is plugged into the next guest", || {
            let found = plug(&guest, &others.plugged, AGAIN + 1, false)?;
            ensure!(plugged == found, "written {plugged}, read {found}");
            Ok(())
        });
    }
    checks.check("power off and SIGTERM", || {
        guest.poweroff()?;
        busy.finish()?;
        let Some(others) = others else { return Ok(()) };
        for served in [others.again, others.private, others.plugged] {
            served.finish()?;
        }
        others.full.map_or(Ok(()), |full| full.served.finish())
    });
    checks.finish();
    Ok(())
}

/// Writes and flushes the disk's beginning, and leaves fio at work behind that. Returns the
/// checksum of the beginning.
fn works(guest: &Guest) -> Result<String> {
    run_for(
        guest,
        LONG_TIMEOUT,
        &format!(
            "d=$(wait_disk {BUSY} 1); head -c $((4 << 20)) /dev/urandom >/tmp/r
             dd if=/tmp/r of=$d bs=1M oflag=direct conv=fsync 2>/dev/null
             (fio --name=busy --filename=$d --rw=randwrite --bs=64k --iodepth=32 --ioengine=io_uring --direct=1 \
                 --offset=64m --size=128m --time_based --runtime=600 >/dev/null 2>&1 &) </dev/null >/dev/null 2>&1
             writes() {{ set -- $(cat /sys/block/$(basename $d)/stat); echo $5; }}
             was=$(writes)
             for try in $(seq 2000); do [ $(writes) -ge $((was + 100)) ] && break; sleep 0.05; done
             [ $(writes) -ge $((was + 100)) ] || {{ echo fio does not write; exit 1; }}
             sha256sum </tmp/r"
        ),
    )
}

fn finds(guest: &Guest, written: &str) -> Result<()> {
    let found = run(
        guest,
        &format!(
            "d=$(wait_disk {BUSY} 1); dd if=$d bs=1M count=4 iflag=direct 2>/dev/null | sha256sum
             dd if=/dev/zero of=$d bs=1M count=4 seek=200 oflag=direct conv=fsync 2>/dev/null"
        ),
    )?;
    ensure!(
        written == found,
        "the first guest wrote {written}, the second reads {found}"
    );
    Ok(())
}

/// A guest that finds out for itself at what rate its counter runs is wrong on a busy host.
fn clock(guest: &Guest) -> Result<()> {
    // Where Linux has measured the processor to be another one, the clock's line follows that.
    let found = run(
        guest,
        "dmesg | sed -n 's/.*tsc: Detected \\([0-9]*\\)[.].* MHz.*/\\1/p' | tail -n 1",
    )?;
    let told = run(
        guest,
        "sed -n 's/.*tsc_early_khz=\\([0-9]*\\).*/\\1/p' /proc/cmdline",
    )?;
    let (found, told): (u64, u64) = (found.trim().parse()?, told.trim().parse()?);
    ensure!(
        found == told / 1000,
        "told {told} kHz, it takes {found} MHz"
    );
    Ok(())
}

/// Plugs a controller into a running guest, and returns the checksum of its first MiB, written
/// there before if that is wanted. The controller is not pulled out: QEMU 11.1 itself aborts when
/// a vfio-user-pci device is (an assertion in memory_region_del_subregion).
fn plug(guest: &Guest, served: &ServedVolumes, number: usize, write: bool) -> Result<String> {
    let socket = json!({"type": "unix", "path": served.daemon()?.socket()});
    let device = json!({"driver": "vfio-user-pci", "id": "hot", "bus": "slot1", "socket": socket});
    guest.qmp("device_add", device)?;
    let write = if write {
        "head -c 1048576 /dev/urandom | dd of=$d bs=1M iflag=fullblock oflag=direct conv=fsync 2>/dev/null"
    } else {
        ":"
    };
    run(
        guest,
        &format!(
            "d=$(wait_disk {number} 1); {write}
             dd if=$d bs=1M count=1 iflag=direct 2>/dev/null | sha256sum"
        ),
    )
}

/// Identity of the disk and its first bytes, which are written where there are only zeroes.
fn identify(guest: &Guest) -> Result<String> {
    run(
        guest,
        &format!(
            "d=$(wait_disk {AGAIN} 1); nvme id-ctrl $d | grep -E '^(sn|mn|fr|subnqn)'; nvme id-ns $d | grep -E '^(nguid|eui64)'
             cmp -s -n 1048576 $d /dev/zero && echo ONE | dd of=$d bs=512 conv=sync oflag=direct 2>/dev/null
             dd if=$d bs=512 count=1 iflag=direct 2>/dev/null | head -c 3; echo"
        ),
    )
}

/// A guest with memory that cannot be shared gets no disk, and the log names the missing QEMU
/// option.
fn unshared(served: &ServedVolumes) -> Result<()> {
    // Whether QEMU starts at all is its affair; firmware would wait long for the disk.
    let guest = Guest::builder("private")
        .disk(served.disk())
        .private_memory()
        .boot_from_disk()
        .boot();
    let daemon = served.daemon()?;
    daemon.wait_log("share=on", Duration::from_secs(30))?;
    drop(guest);
    daemon.must_live()
}

fn reads(guest: &Guest, number: usize) -> Result<()> {
    let text = "of=/dev/null bs=1M count=1 iflag=direct";
    run(guest, &format!("dd if=$(wait_disk {number} 1) {text}")).map(drop)
}

/// A tmpfs that is unmounted when dropped.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(at: &Path, options: &str) -> Result<Tmpfs> {
        std::fs::create_dir_all(at)?;
        let out = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(at)
            .output()?;
        if !out.status.success() {
            bail!("{}", String::from_utf8_lossy(&out.stderr).trim());
        }
        Ok(Tmpfs(at.to_path_buf()))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Lazily, for a failed test may still have a daemon on it; there is nobody to tell.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A disk in a filesystem of the host that runs full.
struct Full {
    served: ServedVolumes,
    ballast: PathBuf,
    _tmpfs: Tmpfs,
}

impl Full {
    fn serve(disks: &Disks) -> Result<Option<Full>> {
        let place = disks.dir().join("small");
        let tmpfs = match Tmpfs::mount(&place, "size=24m") {
            Ok(tmpfs) => tmpfs,
            Err(e) => {
                let reason = format!("a tmpfs cannot be mounted: {e:#}");
                skip("full_host_filesystem_fails_write_only", reason);
                return Ok(None);
            }
        };
        let file = place.join("disk.raw");
        std::fs::File::create(&file)?.set_len(64 << 20)?;
        let ballast = place.join("ballast");
        std::fs::write(&ballast, vec![1; 12 << 20])?;
        Ok(Some(Full {
            served: Volumes::file("full", &file).serve()?,
            ballast,
            _tmpfs: tmpfs,
        }))
    }

    /// The guest's write fails, everything else continues; when there is room again, writes
    /// succeed.
    fn fails_and_recovers(&self, guest: &Guest) -> Result<()> {
        let text = run_for(
            guest,
            Duration::from_secs(120),
            &format!(
                "d=$(wait_disk {FULL} 1)
                 tr '\\0' a </dev/zero | dd of=$d bs=1M count=8 iflag=fullblock oflag=direct conv=fsync 2>/dev/null
                 dd if=/dev/zero of=$d bs=1M count=40 seek=8 oflag=direct conv=fsync 2>&1 && echo 'WROTE ALL' || echo 'write failed'
                 wait_disk {FULL} 1 >/dev/null
                 dd if=$d bs=1M count=8 iflag=direct 2>/dev/null | tr -d a | wc -c"
            ),
        )?;
        ensure!(
            text.contains("write failed") && !text.contains("WROTE ALL"),
            "{text}"
        );
        ensure!(
            text.trim_end().ends_with("\n0"),
            "what was written before must still be there: {text}"
        );
        self.served.daemon()?.must_live()?;
        std::fs::remove_file(&self.ballast)?;
        run(
            guest,
            &format!(
                "d=$(wait_disk {FULL} 1); dd if=/dev/zero of=$d bs=1M count=1 seek=60 oflag=direct conv=fsync
                 nvme smart-log $d >/dev/null"
            ),
        )
        .map(drop)
    }
}

/// Behind an emulated IOMMU every transfer has its own short-lived mapping: the server's
/// map changes all the time.
#[test]
fn guest_behind_iommu_reads_back_writes() -> Result<()> {
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

/// A volume that another daemon serves is refused, by a line that names it.
#[test]
fn disk_served_by_other_daemon_is_refused() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip(
            "disk_served_by_other_daemon_is_refused",
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
