//! Flexible Data Placement under Linux: nvme-cli and fio, by what they see and do to the counts.

use crate::common::{Checks, Disks, LONG_TIMEOUT, Part, kill_serving, run, run_for};
use anyhow::{Result, ensure};
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Disk, Guest};

/// `$d` is the disk, `$n` its character device, `$c` its controller. `left`: RUAMW of each handle.
/// `stats`: HBMW and MBMW.
const LIB: &str = r#"
d=$(wait_disk 1 1); c=/dev/$(ctrl 1); n=/dev/ng${d#/dev/nvme}
left() { nvme fdp status $n | sed -n 's/.*(RUAMW): //p' | tr -d , | xargs; }
stats() { nvme fdp stats $c -e 1 | sed -n 's/.*([HM]BMW): //p' | tr -d , | xargs; }
put() { nvme write $d --start-block=$1 --block-count=$(($2 - 1)) --data-size=$(($2 * 512)) --data=/dev/zero $3 >/dev/null; }
by() { put $1 $2 "--dir-type=2 --dir-spec=$3"; }
is() { [ "$1" = "$2" ] || { echo "$1, and not $2"; exit 1; }; }
"#;

/// Four handles with units of 1 MiB, 2048 blocks.
const HANDLES: &str = "fdp-handles=4&fdp-unit=1M";

fn script(guest: &Guest, text: &str) -> Result<String> {
    run_for(guest, LONG_TIMEOUT, &format!("{LIB}\n{text}"))
}

/// A disk with placement handles in a guest that others share.
pub struct Placed {
    daemon: Daemon,
    _disks: Disks,
}

impl Placed {
    pub fn serve() -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? == Controller::Qemu {
            skip("placement::placement_handles", "the handles are vnvme's");
            return Ok(None);
        }
        let disks = Disks::new()?;
        let disk = disks.sparse("disk.raw", 64)?;
        let table = disk.with_extension("fdp");
        let volume = format!("{}?{HANDLES}&fdp-table={}", disk.display(), table.display());
        let daemon = Daemon::builder("placement")
            .arg("--keeper")
            .arg("process")
            .volume(volume)
            .start()?;
        Ok(Some(Box::new(Placed {
            daemon,
            _disks: disks,
        })))
    }
}

impl Part for Placed {
    fn name(&self) -> &'static str {
        "placement"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.daemon.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("nvme-cli: what there is", || says(guest));
        checks.check("nvme-cli: writes, updates and events", || writes(guest));
        checks.check("fio --fdp", || fio(guest));
        checks.check("a file system, and the process is killed", || {
            killed(guest, &self.daemon)
        });
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.daemon.terminate()
    }
}

fn says(guest: &Guest) -> Result<()> {
    script(
        guest,
        "nvme id-ctrl $c | grep -q 'endgidmax *: *[1-9]'
         is $(( $(nvme id-ctrl $c | sed -n 's/^ctratt *: //p') & 0x80010 )) $((0x80010))
         is $(nvme id-ns $d | sed -n 's/^endgid *: //p') 1
         nvme list-endgrp $c | grep -q '1$'
         nvme endurance-log $c -g 1 | grep -q 'avl_spare.*: 100\\|available_spare.*: 100'
         nvme fdp configs $c -e 1 >/tmp/configs
         grep -q 'Reclaim Unit Nominal Size: 1048576' /tmp/configs
         is $(grep -c 'Initially Isolated' /tmp/configs) 4
         is $(nvme fdp usage $c -e 1 | grep -c 'Host Specified') 4
         nvme fdp feature $c -e 1 | grep -q '(FDPE) *: Yes'
         ! nvme fdp feature $c -e 1 --disable 2>/tmp/refused >&2 || exit 1
         nvme dir-receive $n --dir-type=0 --dir-oper=1 --human-readable | grep -qi 'data placement'
         is \"$(left)\" '2048 2048 2048 2048'; is \"$(stats)\" '0 0'",
    )?;
    Ok(())
}

fn writes(guest: &Guest) -> Result<()> {
    script(
        guest,
        "put 0 8; by 8 8 1; by 16 120 3
         is \"$(left)\" '2040 2040 2048 1928'; is \"$(stats)\" '69632 69632'
         # Without an event that is enabled nothing is said of a handle that is not there.
         by 0 8 77; is \"$(left)\" '2032 2040 2048 1928'
         nvme fdp events $c -e 1 --host-events >/tmp/events; ! grep -q 'Event Type' /tmp/events || exit 1
         nvme fdp set-events $n -p 0 -t 0,3 -e; nvme fdp set-events $n -p 1 -t 0,3 -e
         by 0 8 77; is \"$(left)\" '2024 2040 2048 1928'
         nvme fdp update $n -p 1,2,3
         is \"$(left)\" '2024 2048 2048 2048'
         nvme fdp events $c -e 1 --host-events >/tmp/events
         is $(grep -c 'Event Type: ' /tmp/events) 2
         grep -q 'Invalid Placement Identifier' /tmp/events
         grep -q 'Placement Identifier (PID): 0x4d' /tmp/events
         grep -q 'Reclaim Unit Not Fully Written' /tmp/events
         ! nvme fdp update $n -p 4 2>/dev/null >&2 || exit 1
         nvme fdp set-events $n -p 1 -t 0,3
         by 0 8 1; nvme fdp update $n -p 1
         is $(nvme fdp events $c -e 1 --host-events | grep -c 'Event Type: ') 2
         # Another directive is none, while this one is enabled.
         ! put 0 8 '--dir-type=1 --dir-spec=1' 2>/dev/null || exit 1
         nvme dir-send $n --dir-type=0 --dir-oper=1 --target-dir=2 --endir=0
         by 0 8 3; is \"$(left)\" '2016 2048 2048 2048'
         nvme dir-send $n --dir-type=0 --dir-oper=1 --target-dir=2 --endir=1
         by 0 8 3; is \"$(left)\" '2016 2048 2048 2040'
         nvme copy $d --sdlba=100 --slbs=0 --blocks=7 --dir-type=2 --dir-spec=2
         is \"$(left)\" '2016 2048 2040 2040'",
    )?;
    Ok(())
}

/// 8 MiB by two handles in turn, 4 MiB each; then 48 KiB by a third one.
fn fio(guest: &Guest) -> Result<()> {
    script(
        guest,
        "before=$(stats | cut -d' ' -f1); l=$(left)
         fio --name=fdp --filename=$n --ioengine=io_uring_cmd --cmd_type=nvme --rw=write --bs=32k \\
             --size=8m --iodepth=8 --fdp=1 --fdp_pli=1,3 --output-format=terse >/tmp/fio 2>&1 \\
             || { cat /tmp/fio; exit 1; }
         after=$(stats | cut -d' ' -f1)
         is $((after - before)) 8388608
         # Four whole units each.
         is \"$(left)\" \"$l\"
         fio --name=fdp --filename=$n --ioengine=io_uring_cmd --cmd_type=nvme --rw=write --bs=4k \\
             --size=48k --iodepth=1 --fdp=1 --fdp_pli=2 --output-format=terse >/tmp/fio 2>&1 \\
             || { cat /tmp/fio; exit 1; }
         is \"$(left)\" '2016 2048 1944 2040'",
    )?;
    Ok(())
}

/// A process that is killed leaves its counts; those of a file system go by the first handle.
fn killed(guest: &Guest, daemon: &Daemon) -> Result<()> {
    run(guest, &format!("{LIB}\nmkfs.ext4 -q $d; sync"))?;
    let seen =
        "echo $(left) $(stats) $(nvme fdp events $c -e 1 --host-events | grep -c 'Event Type: ')";
    let before = script(guest, seen)?;
    kill_serving(daemon)?;
    let after = script(guest, seen)?;
    ensure!(before == after, "{before:?}, then {after:?}");
    ensure!(!before.starts_with("2016 "), "{before}");
    Ok(())
}
