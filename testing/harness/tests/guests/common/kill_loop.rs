//! A guest's vhost-user-blk disk under verified load, while its daemon is killed again and again.
//! The guest must continue without an error.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use harness::daemon::{DaemonBuilder, program};
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Guest};
use serde_json::Value;

use super::{LONG_TIMEOUT, number};

/// Limit for the guest to connect again and to make [`REQUESTS`].
const LIMIT: Duration = Duration::from_secs(90);

/// Requests of the guest between two kills, at least.
const REQUESTS: u64 = 100;

/// Finds the device of the disk with the serial number IMAGE, `$d`.
const FIND: &str = "set -e
for s in /sys/block/vd*/serial; do [ $(cat $s) = IMAGE ] && d=/dev/$(basename ${s%/serial}); done
[ $d ] || { echo no such disk >&2; exit 1; }";

/// Runs a script in which `$d` is the disk's device.
pub fn run(guest: &Guest, script: &str) -> Result<String> {
    guest.run_for(LONG_TIMEOUT, &format!("{FIND}\n{script}"))
}

/// Tells whether a test can kill the daemon; otherwise records the test as skipped.
pub fn possible(name: &str) -> Result<bool> {
    let vnvme = Controller::chosen()? == Controller::Vnvme;
    if !vnvme {
        skip(name, "the tests run against QEMU's controller");
    }
    Ok(vnvme)
}

/// Number of kills: `VNVME_KILLS`, or this test's default.
pub fn kills(default: usize) -> Result<usize> {
    number("VNVME_KILLS", default)
}

/// A disk, and its daemon's life.
pub struct KillLoop<'a> {
    /// Name of the guest and in reports.
    pub name: &'static str,
    /// Daemon without its volumes and sockets.
    pub daemon: DaemonBuilder,
    /// Volume of the disk: a URL that has a query already.
    pub volume: String,
    /// Guest's command after each round of load; `$part` is the MiB at which the round's 16 MiB
    /// began, `$rounds` the number of rounds before it.
    pub each_round: &'static str,
    /// Log line by which a new daemon says that it has taken over.
    pub taken_over: &'static str,
    /// Check of the volume between two daemons, after the kill of this number.
    pub after_kill: Box<dyn FnMut(usize) -> Result<()> + 'a>,
}

impl KillLoop<'_> {
    /// Kills the daemon `kills` times, then ends the load, runs `verify` in the guest, and shuts
    /// guest and daemon down.
    pub fn run(mut self, kills: usize, verify: impl FnOnce(&Guest) -> Result<()>) -> Result<()> {
        let dir = tempfile::Builder::new().prefix("vnvme-").tempdir()?;
        let mut daemon = self.serve(dir.path())?;
        let chardev = format!(
            "socket,id=v0,path={},reconnect-ms=100",
            dir.path().join("v").display()
        );
        let guest = Guest::builder(self.name)
            .qemu_args(["-chardev", &chardev])
            .qemu_args(["-device", "vhost-user-blk-pci,chardev=v0"])
            .boot()?;
        run(&guest, &load(self.each_round))?;
        let works = |daemon: &Daemon| {
            let said = || {
                let guest = run(&guest, "cat /tmp/status /tmp/fio.log; true");
                [guest, daemon.log()]
                    .map(Result::unwrap_or_default)
                    .concat()
            };
            wait_requests(&dir.path().join("c"), REQUESTS).with_context(said)
        };
        works(&daemon)?;
        let mut longest = Duration::ZERO;
        for kill in 0..kills {
            // Another moment of the load each time.
            std::thread::sleep(Duration::from_millis(7 * kill as u64 % 100));
            let began = Instant::now();
            daemon.kill()?;
            (self.after_kill)(kill).with_context(|| format!("after kill {kill}"))?;
            daemon = self.serve(dir.path())?;
            daemon.wait_log(self.taken_over, LIMIT)?;
            works(&daemon)?;
            longest = longest.max(began.elapsed());
        }
        let rounds = run(
            &guest,
            "touch /tmp/stop
             for try in $(seq 900); do [ -s /tmp/status ] && break; sleep 0.1; done
             grep -q '^[0-9][0-9]*$' /tmp/status || {
                 cat /tmp/status; tail -20 /tmp/fio.log; exit 1
             }
             ! dmesg | grep -i 'i/o error' || exit 1
             cat /tmp/status",
        );
        let rounds = rounds.with_context(|| daemon.log().unwrap_or_default())?;
        eprintln!(
            "{}: {kills} kills, {} rounds of fio, {longest:.1?} at most until the guest worked \
             again",
            self.name,
            rounds.trim()
        );
        verify(&guest)?;
        guest.poweroff()?;
        daemon.terminate()
    }

    fn serve(&self, dir: &Path) -> Result<Daemon> {
        // A front-end that is not used: a daemon has one NVMe controller at least.
        let daemon = self.daemon.clone().volume("mem://1M");
        daemon
            .arg("--control")
            .arg(dir.join("c"))
            .arg("--vhost-user-blk")
            .arg(dir.join("v"))
            .arg(format!("{}&queues=2&serial=IMAGE", self.volume))
            .start()
    }
}

/// Script that starts verified random reads and writes of `$d`, round after round, each on a part
/// of its own that begins at `$part` MiB, until there is a file /tmp/stop. /tmp/status has the
/// number of rounds then, or that a round has failed.
fn load(each_round: &str) -> String {
    format!(
        "rm -f /tmp/stop /tmp/status
         (rounds=0
          while [ ! -e /tmp/stop ]; do
              part=$((rounds % 4 * 16))
              fio --name=r --filename=$d --ioengine=io_uring --direct=1 --rw=randrw \
                  --bsrange=4k-64k --iodepth=32 --size=16m --offset=${{part}}m \
                  --fsync=100 --verify=crc32c --verify_fatal=1 --verify_state_save=0 \
                  >/tmp/fio.log 2>&1 || {{ echo failed >/tmp/status; exit; }}
              {each_round}
              rounds=$((rounds + 1))
          done
          echo $rounds >/tmp/status) </dev/null >/dev/null 2>&1 &"
    )
}

/// Returns the requests of the first export's guest that the daemon behind a control socket has
/// carried out since its start.
fn requests(control: &Path) -> Result<u64> {
    let output = Command::new(program()?)
        .args(["stats", "--json", "--control"])
        .arg(control)
        .output()?;
    let stats: Value = serde_json::from_slice(&output.stdout)?;
    let queues = stats["vhost_user_blk"][0]["queues"].as_array();
    Ok(queues.map_or(0, |all| {
        all.iter().filter_map(|q| q["requests"].as_u64()).sum()
    }))
}

/// Waits until the guest has made this many more requests.
fn wait_requests(control: &Path, more: u64) -> Result<()> {
    let (began, before) = (Instant::now(), requests(control)?);
    while requests(control)? < before + more {
        ensure!(began.elapsed() < LIMIT, "the guest does not work");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
