//! A stock Linux guest on its stock virtio driver, with a disk that vnvme serves by vhost-user.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{Checks, Disks, LONG_TIMEOUT, allocated};
use anyhow::{Context, Result, ensure};
use harness::served::Controller;
use harness::{Daemon, Guest};
use serde_json::Value;

const MIB: u64 = 256;
pub const SERIAL: &str = "VBLK0";

/// `$d` is the device of the disk with serial number `VBLK0`, `$q` its name.
pub const FIND: &str = r#"
set -e
for s in /sys/block/vd*/serial; do [ "$(cat $s)" = VBLK0 ] && q=$(basename ${s%/serial}); done
[ -n "$q" ] || { echo "no such disk" >&2; exit 1; }
d=/dev/$q
"#;

pub fn run(guest: &Guest, script: &str) -> Result<String> {
    guest.run_for(LONG_TIMEOUT, &format!("{FIND}\n{script}"))
}

/// A disk's file, and the sockets that outlive the daemon that serves it.
pub struct Export {
    file: PathBuf,
    dir: tempfile::TempDir,
}

impl Export {
    pub fn new(file: &Path) -> Result<Export> {
        Ok(Export {
            file: file.to_path_buf(),
            dir: tempfile::Builder::new().prefix("vnvme-").tempdir()?,
        })
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("v")
    }

    pub fn control(&self) -> PathBuf {
        self.dir.path().join("c")
    }

    /// Beside a controller, which nobody uses here.
    pub fn serve(&self, options: &str) -> Result<Daemon> {
        let file = self.file.display();
        let volume = format!("{file}?serial={SERIAL}&queues=8{options}");
        Daemon::builder("vhost-blk")
            .volume("mem://1M")
            .arg("--control")
            .arg(self.control())
            .arg("--vhost-user-blk")
            .arg(self.socket())
            .arg(volume)
            .start()
    }

    pub fn stats(&self) -> Result<Value> {
        Ok(self.ask("stats")?["vhost_user_blk"][0].clone())
    }

    /// Returns the JSON that a command of the program prints.
    pub fn ask(&self, command: &str) -> Result<Value> {
        let output = Command::new(harness::daemon::program()?)
            .args([command, "--control"])
            .arg(self.control())
            .arg("--json")
            .output()?;
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Returns the number of requests that the disk has completed.
    pub fn requests(&self) -> Result<u64> {
        let stats = self.stats()?;
        let queues = stats["queues"].as_array();
        Ok(queues.map_or(0, |all| {
            all.iter().filter_map(|q| q["requests"].as_u64()).sum()
        }))
    }

    /// Waits until the disk has completed so many more requests.
    pub fn wait_requests(&self, more: u64, limit: Duration) -> Result<()> {
        let enough = self.requests()? + more;
        let deadline = Instant::now() + limit;
        while self.requests()? < enough {
            ensure!(Instant::now() < deadline, "the guest makes no requests");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

#[test]
fn linux_guest_uses_virtio_disk() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        harness::progress::skip("linux_guest_uses_virtio_disk", "it needs vnvme");
        return Ok(());
    }
    let disks = Disks::new()?;
    let export = Export::new(&disks.sparse("disk.raw", MIB)?)?;
    let daemon = export.serve("")?;
    let chardev = format!(
        "socket,id=v0,path={},reconnect-ms=100",
        export.socket().display()
    );
    // A second disk stands on another vnvme's namespace, driven by vnvme itself: guest
    // memory is registered with it.
    let below = Daemon::builder("vhost-below").volume("mem://64M").start()?;
    let second = export.dir.path().join("w");
    let above = Daemon::builder("vhost-above")
        .volume("mem://1M")
        .arg("--vhost-user-blk")
        .arg(&second)
        .arg(format!(
            "vfio-user://{}/1?serial=VBLK1&block-size=4096",
            below.socket().display()
        ))
        .start()?;
    let chardev1 = format!("socket,id=v1,path={}", second.display());
    let guest = Guest::builder("vhost-blk")
        .qemu_args(["-chardev", &chardev, "-chardev", &chardev1])
        .qemu_args(["-device", "vhost-user-blk-pci,id=disk0,chardev=v0"])
        .qemu_args(["-device", "vhost-user-blk-pci,id=disk1,chardev=v1"])
        .boot()?;
    let mut checks = Checks::new("vhost-user-blk");
    checks.check("what the driver sees", || sees(&guest));
    checks.check("fio verify on two queues", || verify(&guest, &export));
    checks.check(
        "fio verify on another vnvme's namespace, 4 KiB blocks",
        || chained(&guest),
    );
    checks.check("discard and write zeroes", || discard(&guest, &export.file));
    checks.check("ext4", || filesystem(&guest));
    checks.check("write cache", || write_cache(&guest));
    checks.check("resize", || resize(&guest, &export.file));
    let mut daemon = Some(daemon);
    for (name, killed) in [("restart under fio", false), ("SIGKILL under fio", true)] {
        checks.check(name, || restart(&guest, &export, &mut daemon, killed));
    }
    checks.check("machine reset", || {
        guest.hard_reset()?;
        run(&guest, "dd if=$d of=/dev/null bs=1M count=8 iflag=direct").map(|_| ())
    });
    checks.check("power off and SIGTERM", || {
        guest.poweroff()?;
        daemon.take().context("no daemon")?.terminate()?;
        above.terminate()?;
        below.terminate()
    });
    checks.finish();
    Ok(())
}

fn sees(guest: &Guest) -> Result<()> {
    let text = run(
        guest,
        "cd /sys/block/$q; cat size cache_type queue/logical_block_size queue/physical_block_size
         ls mq | wc -l; cat queue/discard_max_bytes queue/write_zeroes_max_bytes ro",
    )?;
    let sectors = (MIB << 11).to_string();
    let words: Vec<&str> = text.lines().collect();
    let wanted = [
        &sectors,
        "write back",
        "512",
        "4096",
        "2",
        "2147483648",
        "2147483648",
        "0",
    ];
    ensure!(words == wanted, "{words:?}");
    Ok(())
}

fn verify(guest: &Guest, export: &Export) -> Result<()> {
    run(
        guest,
        "fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=512-256k --iodepth=16 \
            --size=24m --verify=crc32c --verify_fatal=1 --verify_state_save=0 --numjobs=2 --offset_increment=64m \
            --cpus_allowed=0,1 --cpus_allowed_policy=split --fsync=64",
    )?;
    let stats = export.stats()?;
    let queues = stats["queues"].as_array().context("no queues")?;
    let sum = |name: &str| -> u64 { queues.iter().filter_map(|q| q[name].as_u64()).sum() };
    ensure!(queues.len() == 2, "both queues are used: {stats}");
    ensure!(sum("errors") == 0 && sum("requests") > 500, "{stats}");
    // EVENT_IDX: a busy guest seldom rings, and is seldom interrupted more than once for a request.
    ensure!(sum("kicks") < sum("requests"), "{stats}");
    ensure!(sum("notifications") <= sum("requests"), "{stats}");
    Ok(())
}

fn chained(guest: &Guest) -> Result<()> {
    guest.run_for(
        LONG_TIMEOUT,
        &format!(
            "{}\n[ $(cat /sys/block/$q/size) = 131072 ]; [ $(cat /sys/block/$q/queue/logical_block_size) = 4096 ]
             fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-64k --iodepth=16 \
                 --size=8m --verify=crc32c --verify_fatal=1 --verify_state_save=0",
            FIND.replace("VBLK0", "VBLK1")
        ),
    )?;
    Ok(())
}

fn discard(guest: &Guest, file: &Path) -> Result<()> {
    run(
        guest,
        "tr '\\0' x </dev/zero |
             dd of=$d bs=1M count=16 iflag=fullblock oflag=direct conv=fsync 2>/dev/null",
    )?;
    let before = allocated(file)?;
    run(guest, "blkdiscard -o $((2 << 20)) -l $((8 << 20)) $d")?;
    let freed = before.saturating_sub(allocated(file)?);
    ensure!(freed == 8 << 20, "{freed} bytes were deallocated");
    let text = run(
        guest,
        "blkdiscard -z -o $((12 << 20)) -l $((2 << 20)) $d
         x() { dd if=$d bs=1M skip=$1 count=$2 iflag=direct 2>/dev/null | tr -d x | wc -c; }
         x 0 2; x 2 8; x 10 2; x 12 2; x 14 2",
    )?;
    let bytes: Vec<&str> = text.lines().collect();
    ensure!(bytes == ["0", "8388608", "0", "2097152", "0"], "{bytes:?}");
    Ok(())
}

fn filesystem(guest: &Guest) -> Result<()> {
    run(
        guest,
        "mkfs.ext4 -q -F $d; mount -o discard $d /mnt
         cp -a /tools/share/locale /mnt/; sync; (cd /mnt && find locale -type f | sort | xargs sha256sum) >/tmp/was
         umount /mnt; echo 3 >/proc/sys/vm/drop_caches; e2fsck -f -n $d
         mount $d /mnt; (cd /mnt && sha256sum -c /tmp/was >/dev/null); fstrim /mnt; umount /mnt",
    )?;
    Ok(())
}

fn write_cache(guest: &Guest) -> Result<()> {
    let text = run(
        guest,
        "cd /sys/block/$q; echo 'write through' >cache_type; cat cache_type
         dd if=/dev/zero of=$d bs=4k count=16 oflag=direct 2>/dev/null
         echo 'write back' >cache_type; cat cache_type",
    )?;
    ensure!(text == "write through\nwrite back\n", "{text}");
    Ok(())
}

fn resize(guest: &Guest, file: &Path) -> Result<()> {
    let bigger = MIB + 64;
    std::fs::File::options()
        .write(true)
        .open(file)?
        .set_len(bigger << 20)?;
    let text = run(
        guest,
        &format!(
            "for try in $(seq 300); do [ \"$(cat /sys/block/$q/size)\" = {} ] && break; sleep 0.1; done
             cat /sys/block/$q/size; dmesg | grep $q | tail -1
             dd if=/dev/zero of=$d bs=1M seek={} count=1 oflag=direct conv=fsync 2>/dev/null",
            bigger << 11,
            bigger - 1
        ),
    )?;
    ensure!(
        text.starts_with(&format!("{}\n", bigger << 11)) && text.contains("capacity change"),
        "{text}"
    );
    Ok(())
}

/// The daemon ends while fio writes and verifies, and is started again: fio notices nothing. Where
/// it is killed, its volume is slower than any guest asks, so that there are requests in flight.
fn restart(
    guest: &Guest,
    export: &Export,
    daemon: &mut Option<Daemon>,
    killed: bool,
) -> Result<()> {
    let (options, size, some) = if killed {
        ("&iops=100", "8m --loops=1", 100)
    } else {
        ("", "48m --loops=1", 500)
    };
    if killed {
        daemon.take().context("no daemon")?.terminate()?;
        *daemon = Some(export.serve(options)?);
    }
    run(
        guest,
        &format!(
            "rm -f /tmp/fio.*; (fio --name=r --filename=$d --ioengine=io_uring --direct=1 --rw=randwrite --bsrange=4k-64k \
            --iodepth=32 --size={size} --verify=crc32c --verify_fatal=1 --verify_state_save=0 --numjobs=2 \
            --offset_increment=64m >/tmp/fio.log 2>&1; echo $? >/tmp/fio.status) </dev/null >/dev/null 2>&1 &"
        ),
    )?;
    for _ in 0..2 {
        export.wait_requests(some, Duration::from_secs(60))?;
        let old = daemon.take().context("no daemon")?;
        if killed {
            old.kill()?;
        } else {
            old.terminate()?;
        }
        drop(old);
        let new = export.serve(options)?;
        new.wait_log("front-end connected", Duration::from_secs(30))?;
        *daemon = Some(new);
    }
    let text = run(
        guest,
        "for try in $(seq 1200); do [ -e /tmp/fio.status ] && break; sleep 0.1; done
         [ \"$(cat /tmp/fio.status)\" = 0 ] || { tail -20 /tmp/fio.log; dmesg | tail -5; exit 1; }
         grep -c err= /tmp/fio.log",
    )?;
    ensure!(!text.is_empty());
    let stats = export.stats()?;
    let resubmitted = stats["resubmitted"].as_u64().unwrap_or(0);
    ensure!(
        (resubmitted > 0) == killed,
        "a daemon that is killed leaves requests in flight, one that ends well does not: {stats}"
    );
    Ok(())
}
