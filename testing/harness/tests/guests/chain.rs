//! A disk on a namespace of another controller, driven by our own driver: guest, vnvme, driver,
//! vnvme, file.

use std::time::Duration;

use crate::common::{Checks, Disks, Part, run_for};
use anyhow::Result;
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Disk, Guest};

/// The disk in a guest that others share.
pub struct Chain {
    below: Daemon,
    above: Daemon,
    _disks: Disks,
}

impl Chain {
    pub fn serve() -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? != Controller::Vnvme {
            let reason = "the tests run against QEMU's controller";
            skip("a disk on a device below", reason);
            return Ok(None);
        }
        let disks = Disks::new()?;
        let file = disks.sparse("disk.raw", 256)?;
        let below = Daemon::builder("below").volume(&file).start()?;
        let url = format!("vfio-user://{}/1", below.socket().display());
        let above = Daemon::builder("above").volume(url).start()?;
        Ok(Some(Box::new(Chain {
            below,
            above,
            _disks: disks,
        })))
    }
}

impl Part for Chain {
    fn name(&self) -> &'static str {
        "chain"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.above.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("a namespace of a device below", || verify(guest));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.above.terminate()?;
        self.below.terminate()
    }
}

fn verify(guest: &Guest) -> Result<()> {
    run_for(
        guest,
        Duration::from_secs(240),
        "d=$(wait_disk 1 1)
         fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-1m --size=48m \
             --iodepth=16 --verify=crc32c --verify_fatal=1 --verify_state_save=0 >/dev/null
         mkfs.ext4 -q $d; mkdir -p /tmp/m; mount $d /tmp/m; cp -r /bin /tmp/m/; umount /tmp/m; fsck.ext4 -fn $d
         blkdiscard -o 0 -l $((64 << 20)) $d
         blkdiscard -z -o $((64 << 20)) -l $((16 << 20)) $d
         nvme flush $d",
    )
    .map(drop)
}
