//! Bus Master Enable in a Linux guest, on its stock driver: cleared and set again while there is
//! I/O, by the function's configuration space in sysfs.

use crate::common::{Checks, Disks, LONG_TIMEOUT, Part, run, run_for};
use anyhow::{Context, Result, ensure};
use harness::served::{ServedVolumes, Volumes};
use harness::{Disk, Guest};

/// `command BDF`: the PCI command register. `set_command BDF N` writes it, `off BDF` and `on BDF`
/// change Bus Master Enable alone.
const PCI: &str = r#"
command() { od -An -tu2 -j4 -N2 /sys/bus/pci/devices/$1/config | tr -d ' '; }
set_command() {
    printf "\\$(printf %03o $(($2 & 255)))\\$(printf %03o $(($2 >> 8)))" >/tmp/command
    dd if=/tmp/command of=/sys/bus/pci/devices/$1/config bs=2 seek=2 count=1 conv=notrunc 2>/dev/null
}
off() { set_command $1 $(($(command $1) & ~4)); [ $(($(command $1) & 4)) = 0 ]; }
on() { set_command $1 $(($(command $1) | 4)); [ $(($(command $1) & 4)) = 4 ]; }
"#;

/// Milliseconds in which a read ends once the bit is set, however busy the machine is; the driver's
/// own time-out, which finds completions that were not signalled, is three times as long.
const COMPLETION_TIMEOUT_MS: u64 = 10_000;

/// How often the bit is cleared and set under one run of fio, at most.
const MAX_CYCLES: u32 = 40;

/// A read that is started without the bit does not end, and ends when the bit is set.
fn read_waits(guest: &Guest) -> Result<()> {
    for _ in 0..3 {
        let took = run(
            guest,
            &format!(
                "{PCI}
                 b=$(bdf 1); d=$(wait_disk 1 1)
                 off $b
                 dd if=$d of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null & pid=$!
                 sleep 2
                 kill -0 $pid || {{ echo the read has ended; exit 1; }}
                 now() {{ echo $(($(cut -d. -f1 /proc/uptime) * 1000)); }}
                 begin=$(now); on $b; wait $pid; echo $(($(now) - begin))"
            ),
        )?;
        let took: u64 = took.trim().parse().with_context(|| took.clone())?;
        ensure!(
            took < COMPLETION_TIMEOUT_MS,
            "{took} ms until the read ended"
        );
    }
    quiet(guest)
}

/// Cleared and set as long as there is I/O, with and without pauses; at least so many times.
fn under_fio(guest: &Guest, least: u32, pause: &str) -> Result<()> {
    let times = run_for(
        guest,
        LONG_TIMEOUT,
        &format!(
            "{PCI}
             b=$(bdf 1); d=$(wait_disk 1 1)
             fio --name=r --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-64k --iodepth=16 \
                 --size=32m --verify=crc32c --verify_fatal=1 --verify_state_save=0 --numjobs=2 \
                 --offset_increment=128m >/tmp/fio 2>&1 & pid=$!
             n=0
             # Not for ever: a guest that is emulated on a busy machine does little between two of them.
             while [ $n -lt {MAX_CYCLES} ] && kill -0 $pid 2>/dev/null; do
                 off $b; {pause}; on $b; {pause}
                 n=$((n + 1))
             done
             wait $pid || {{ cat /tmp/fio; exit 1; }}
             echo $n"
        ),
    )?;
    let times: u32 = times.trim().parse().with_context(|| times.clone())?;
    ensure!(times >= least, "only {times} times before fio was done");
    quiet(guest)
}

/// The driver had nothing to complain of: no time-out, no reset, no error.
fn quiet(guest: &Guest) -> Result<()> {
    let log = run(
        guest,
        "dmesg | grep -i 'nvme.*\\(timeout\\|reset\\|abort\\|error\\|polled\\)' || true",
    )?;
    ensure!(log.trim().is_empty(), "the guest's kernel says:\n{log}");
    Ok(())
}

/// The disk in a guest that others share.
pub struct BusMaster {
    served: ServedVolumes,
    _disks: Disks,
}

impl BusMaster {
    pub fn serve() -> Result<Option<Box<dyn Part>>> {
        let disks = Disks::new()?;
        let served = Volumes::file("bus-master", &disks.sparse("disk.raw", 512)?).serve()?;
        Ok(Some(Box::new(BusMaster {
            served,
            _disks: disks,
        })))
    }
}

impl Part for BusMaster {
    fn name(&self) -> &'static str {
        "bus master"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.served.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("a read waits for the bit", || read_waits(guest));
        checks.check("off and on under fio", || under_fio(guest, 4, "sleep 0.3"));
        checks.check("off and on without a pause", || under_fio(guest, 8, ":"));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.served.finish()
    }
}
