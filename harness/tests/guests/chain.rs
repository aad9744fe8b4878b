//! A disk whose volume is a namespace of another controller, driven by our own driver: guest,
//! vnvme, driver, vnvme, file.

use std::time::Duration;

use crate::common::{Disks, run_for};
use anyhow::Result;
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Guest};

#[test]
fn a_guest_uses_a_namespace_of_a_device_below() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip(
            "a disk on a device below",
            "the tests run against QEMU's controller",
        );
        return Ok(());
    }
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 256)?;
    let below = Daemon::builder("below").volume(&file).start()?;
    let url = format!("vfio-user://{}/1", below.socket().display());
    let above = Daemon::builder("above").volume(url).start()?;
    let guest = Guest::builder("chain").vfio_user(above.socket()).boot()?;
    run_for(
        &guest,
        Duration::from_secs(240),
        "d=$(wait_disk 1 1)
         fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-1m --size=48m \
             --iodepth=16 --verify=crc32c --verify_fatal=1 --verify_state_save=0 >/dev/null
         mkfs.ext4 -q $d; mkdir -p /tmp/m; mount $d /tmp/m; cp -r /bin /tmp/m/; umount /tmp/m; fsck.ext4 -fn $d
         blkdiscard -o 0 -l $((64 << 20)) $d
         blkdiscard -z -o $((64 << 20)) -l $((16 << 20)) $d
         nvme flush $d",
    )?;
    guest.poweroff()?;
    above.terminate()?;
    below.terminate()
}
