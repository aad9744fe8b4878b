//! A controller memory buffer under Linux: its I/O submission queues lie there, fio verifies over
//! them, and what becomes of it in resets and with its process.

use crate::common::{Checks, Disks, LONG_TIMEOUT, kill_serving, run, run_for};
use anyhow::{Result, ensure};
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Guest};

/// `$d` is the disk, `$c` its controller, `$b` its PCI address. `verified NAME ...`: fio with these
/// arguments. `available`: how much of the buffer nobody uses.
const LIB: &str = r#"
d=$(wait_disk 1 1); c=$(ctrl 1); b=$(bdf 1)
available() { cat /sys/bus/pci/devices/$b/p2pmem/available; }
verified() {
    fio --filename=$d --ioengine=libaio --direct=1 --rw=randrw --iodepth=32 \
        --verify=crc32c --verify_fatal=1 --bsrange=4k-128k "$@" \
        >/tmp/fio 2>&1 || { cat /tmp/fio; exit 1; }
}
is() { [ "$1" = "$2" ] || { echo "$1, and not $2"; exit 1; }; }
"#;

fn script(guest: &Guest, text: &str) -> Result<String> {
    run_for(guest, LONG_TIMEOUT, &format!("{LIB}\n{text}"))
}

#[test]
fn linux_places_submission_queues_in_cmb() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip("cmb", "the buffer's size is vnvme's option");
        return Ok(());
    }
    let disks = Disks::new()?;
    let disk = disks.sparse("disk.raw", 512)?;
    let daemon = Daemon::builder("cmb")
        .arg("--keeper")
        .arg("process")
        .arg("--cmb-size")
        .arg("8M")
        .volume(disk)
        .start()?;
    let guest = Guest::builder("cmb")
        .newer_kernel()
        .memory_mib(768)
        .vfio_user(daemon.socket())
        .boot()?;
    let mut checks = Checks::new("cmb");
    checks.check("what Linux says", || says(&guest));
    checks.check("fio over queues there", || fio(&guest));
    checks.check("a controller reset", || {
        resets(&guest, "echo 1 >/sys/class/nvme/$c/reset_controller")
    });
    checks.check("a function level reset", || {
        resets(&guest, "echo 1 >/sys/bus/pci/devices/$b/reset")
    });
    checks.check("the driver is unbound and bound", || {
        resets(
            &guest,
            "echo $b >/sys/bus/pci/drivers/nvme/unbind; echo $b >/sys/bus/pci/drivers/nvme/bind",
        )
    });
    checks.check("the process is killed under load", || {
        killed(&guest, &daemon)
    });
    checks.check("reboot", || {
        guest.reboot()?;
        says(&guest)?;
        fio(&guest)
    });
    checks.finish();
    guest.poweroff()?;
    daemon.terminate()
}

/// The registers as `cmb` shows them, and the queues: the driver takes them from what it has
/// registered as peer-to-peer memory.
fn says(guest: &Guest) -> Result<()> {
    let text = script(
        guest,
        "dmesg | grep -i 'register the CMB' && exit 1
         cat /sys/class/nvme/$c/cmb
         is $(cat /sys/bus/pci/devices/$b/p2pmem/size) $((8 << 20))
         is $(cat /sys/bus/pci/devices/$b/p2pmem/published) 1
         echo used $(( (8 << 20) - $(available) ))
         sed -n 3p /sys/bus/pci/devices/$b/resource",
    )?;
    ensure!(text.contains("cmbloc : 0x00000062"), "{text}");
    ensure!(text.contains("cmbsz  : 0x0080001f"), "{text}");
    let used = text.lines().find_map(|line| line.strip_prefix("used "));
    let used: u64 = used.unwrap_or_default().parse()?;
    // A queue of 1024 entries is 64 KiB; there is one for each CPU at least.
    ensure!(used >= 128 << 10, "{used} bytes of it are in use: {text}");
    Ok(())
}

fn fio(guest: &Guest) -> Result<()> {
    script(
        guest,
        "verified --name=a --size=16m --numjobs=2 --offset_increment=128m
         mkfs.ext4 -q $d; mkdir -p /mnt/d; mount $d /mnt/d
         dd if=/dev/urandom of=/tmp/x bs=1M count=20 2>/dev/null; cp /tmp/x /mnt/d/x; umount /mnt/d
         mount $d /mnt/d; cmp /tmp/x /mnt/d/x; umount /mnt/d",
    )?;
    Ok(())
}

fn resets(guest: &Guest, how: &str) -> Result<()> {
    script(
        guest,
        &format!(
            "{how}
             d=$(wait_disk 1 1)
             verified --name=b --size=8m
             echo $(available)"
        ),
    )?;
    says(guest)
}

/// The process that serves is killed three times under verified load.
fn killed(guest: &Guest, daemon: &Daemon) -> Result<()> {
    run(
        guest,
        &format!(
            "{LIB}
             (verified --name=c --size=64m --loops=100 --time_based --runtime=12
              echo ok >/tmp/verified) >/tmp/job 2>&1 &"
        ),
    )?;
    for _ in 0..3 {
        std::thread::sleep(std::time::Duration::from_secs(2));
        kill_serving(daemon)?;
    }
    let text = script(
        guest,
        "for try in $(seq 200); do [ -e /tmp/verified ] && break; sleep 0.5; done
         cat /tmp/job; cat /tmp/verified
         dmesg | grep -i 'nvme.*\\(timeout\\|reset\\|abort\\|error\\)' | tail -3",
    );
    let text = text?;
    ensure!(text.contains("ok"), "{text}");
    Ok(())
}
