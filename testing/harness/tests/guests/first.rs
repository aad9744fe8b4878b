//! One short boot for each front-end: the guest tests of `make test`. The other modules, which
//! `make test-guests` runs, try each front-end at length.

use crate::common::{Disks, LONG_TIMEOUT, kill_serving, run_for};
use crate::nvme_tcp_host::host;
use crate::vhost_blk::FIND;
use anyhow::{Result, ensure};
use harness::daemon::program;
use harness::progress::skip;
use harness::served::{Controller, Volumes};
use harness::{Daemon, Guest};

/// `verify DEVICE SIZE`: random writes and reads with comparison of the data.
const VERIFY: &str = r"
verify() {
    fio --name=v --filename=$1 --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-64k --iodepth=16 \
        --size=$2 --verify=crc32c --verify_fatal=1 --verify_state_save=0 >/tmp/fio 2>&1 ||
        { cat /tmp/fio; dmesg | tail -n 20; exit 1; }
}
";

/// Starts `verify` on a device in the background; `/tmp/status` gets its exit status.
const VERIFY_BEHIND: &str =
    "rm -f /tmp/status; { (verify $d 16m); echo $? >/tmp/status; } </dev/null >/tmp/out 2>&1 &
    for try in $(seq 600); do [ -s /tmp/fio ] && break; sleep 0.1; done";

/// Waits for a `verify` in the background.
const VERIFIED: &str = "for try in $(seq 1800); do [ -s /tmp/status ] && break; sleep 0.1; done
    [ \"$(cat /tmp/status)\" = 0 ] || { cat /tmp/out; exit 1; }";

#[test]
fn nvme_disk_verifies_through_reset_and_killed_daemon() -> Result<()> {
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 64)?;
    let served = Volumes::file("first-nvme", &file).serve()?;
    let guest = Guest::builder("first-nvme").disk(served.disk()).boot()?;
    let run = |script: &str| {
        run_for(
            &guest,
            LONG_TIMEOUT,
            &format!("{VERIFY}\nd=$(wait_disk 1 1)\n{script}"),
        )
    };
    run("verify $d 8m")?;
    run("nvme reset /dev/$(ctrl 1); d=$(wait_disk 1 1); verify $d 4m")?;
    if Controller::chosen()? == Controller::Vnvme {
        run(&format!("rm -f /tmp/fio; {VERIFY_BEHIND}"))?;
        kill_serving(served.daemon()?)?;
        run(VERIFIED)?;
    }
    guest.poweroff()?;
    served.finish()
}

#[test]
fn virtio_disk_verifies_through_killed_daemon() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip("first::virtio", "it needs vnvme");
        return Ok(());
    }
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 64)?;
    let dir = tempfile::Builder::new().prefix("vnvme-").tempdir()?;
    let socket = dir.path().join("v");
    let daemon = Daemon::builder("first-virtio")
        .volume("mem://1M")
        .arg("--vhost-user-blk")
        .arg(&socket)
        .arg(format!("{}?serial=VBLK0", file.display()))
        .start()?;
    let chardev = format!("socket,id=v0,path={},reconnect-ms=100", socket.display());
    let guest = Guest::builder("first-virtio")
        .qemu_args(["-chardev", &chardev])
        .qemu_args(["-device", "vhost-user-blk-pci,id=disk0,chardev=v0"])
        .boot()?;
    let run = |script: &str| run_for(&guest, LONG_TIMEOUT, &format!("{VERIFY}\n{FIND}\n{script}"));
    run("[ $(cat /sys/block/$q/size) = 131072 ]; verify $d 8m")?;
    run(&format!("rm -f /tmp/fio; {VERIFY_BEHIND}"))?;
    kill_serving(&daemon)?;
    run(VERIFIED)?;
    guest.poweroff()?;
    daemon.terminate()
}

#[test]
fn linux_host_verifies_nvme_tcp_namespace() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip("first::nvme_tcp", "the tests run against QEMU's controller");
        return Ok(());
    }
    let guest = Guest::builder("first-tcp").memory_mib(1024).boot()?;
    guest.push_programs(&[program()?])?;
    guest.run("modprobe nvme-tcp; ip link set lo up")?;
    let printed = host(
        &guest,
        "serve --nvme-tcp 127.0.0.1:4420 mem://64M --subnqn $N
         nvme connect -t tcp -a $A -s 4420 -n $N
         d=$(disk_of $N)
         verify $d 8m
         nvme reset /dev/$(ls -d /sys/class/nvme/nvme* | head -n 1 | sed 's:.*/::')
         verify $d 4m
         nvme disconnect -n $N
         end; echo verified",
    )?;
    ensure!(printed.contains("verified"), "{printed}");
    guest.poweroff()
}
