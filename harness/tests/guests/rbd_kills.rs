//! A disk on a real Ceph cluster of one host under a guest's load with verification, while its
//! daemon is killed again and again. The next one takes the image's lock over, the cluster serves
//! the dead one no more, and the guest goes on without an error. A daemon that stands still while
//! another one takes its lock writes nothing more either.
//!
//! `VNVME_KILLS` has it killed more often than a few times.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::LONG;
use crate::common::ceph::{Cluster, LIMIT, tree};
use crate::common::rounds::{rounds, wait_requests};
use anyhow::{Context, Result, ensure};
use harness::daemon::{DaemonBuilder, program};
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Guest};
use rustix::process::Signal;

/// Kills, where nothing else is said.
const KILLS: usize = 4;

/// `$d` is the disk's device.
const FIND: &str = "set -e
for s in /sys/block/vd*/serial; do [ $(cat $s) = IMAGE ] && d=/dev/$(basename ${s%/serial}); done
[ $d ] || { echo no such disk >&2; exit 1; }";

fn run(guest: &Guest, script: &str) -> Result<String> {
    guest.run_for(LONG, &format!("{FIND}\n{script}"))
}

struct Export {
    dir: tempfile::TempDir,
    cluster: Cluster,
}

impl Export {
    fn builder(&self) -> DaemonBuilder {
        let library = self.cluster.library();
        // Signals go to the process that serves.
        let builder = Daemon::builder("rbd-kills").arg("--keeper").arg("off");
        library
            .iter()
            .fold(builder, |builder, (name, path)| builder.env(name, *path))
    }

    fn serve(&self) -> Result<Daemon> {
        let url = self.cluster.url("rbd/img");
        // A controller stands beside it, which nobody uses.
        self.builder()
            .volume("mem://1M")
            .arg("--control")
            .arg(self.dir.path().join("c"))
            .arg("--vhost-user-blk")
            .arg(self.dir.path().join("v"))
            .arg(format!("{url}&queues=2&serial=IMAGE"))
            .start()
    }

    /// Waits until the guest has made so many more.
    fn wait_requests(&self, more: u64) -> Result<()> {
        wait_requests(&self.dir.path().join("c"), more, LIMIT)
    }
}

/// Clients that the cluster serves no more.
fn fenced(cluster: &Cluster) -> Result<usize> {
    let said = cluster.ceph(&["osd", "blocklist", "ls", "--format", "json"])?;
    // Newer versions print a second list, of ranges.
    Ok(said.matches("\"addr\"").count())
}

#[test]
fn a_guest_goes_on_when_its_daemon_is_killed() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip("rbd::kills", "the tests run against QEMU's controller");
        return Ok(());
    }
    let Some(tree) = tree() else {
        return Ok(());
    };
    let kills = match std::env::var("VNVME_KILLS") {
        Ok(text) => text.parse().context("VNVME_KILLS is a number")?,
        Err(_) => KILLS,
    };
    let export = Export {
        dir: tempfile::Builder::new().prefix("vnvme-").tempdir()?,
        cluster: Cluster::start(tree, 256)?,
    };
    let mut daemon = export.serve()?;
    let chardev = format!(
        "socket,id=v0,path={},reconnect-ms=100",
        export.dir.path().join("v").display()
    );
    let guest = Guest::builder("rbd-kills")
        .qemu_args(["-chardev", &chardev])
        .qemu_args(["-device", "vhost-user-blk-pci,chardev=v0"])
        .boot()?;
    run(&guest, &rounds(":"))?;
    let works = || {
        let said = || run(&guest, "cat /tmp/status /tmp/fio.log; true").unwrap_or_default();
        export.wait_requests(100).with_context(said)
    };
    let mut longest = Duration::ZERO;
    for kill in 0..kills {
        works()?;
        // At another moment each time.
        std::thread::sleep(Duration::from_millis(7 * kill as u64 % 100));
        let began = Instant::now();
        daemon.kill()?;
        daemon = export.serve()?;
        daemon.wait_log("the lock is taken from", LIMIT)?;
        works().with_context(|| daemon.log().unwrap_or_default())?;
        longest = longest.max(began.elapsed());
    }
    let rounds = run(
        &guest,
        "touch /tmp/stop
         for try in $(seq 900); do [ -s /tmp/status ] && break; sleep 0.1; done
         grep -q '^[0-9][0-9]*$' /tmp/status || { cat /tmp/status; tail -20 /tmp/fio.log; exit 1; }
         ! dmesg | grep -i 'i/o error' || exit 1
         cat /tmp/status",
    );
    let rounds = rounds.with_context(|| daemon.log().unwrap_or_default())?;
    let fenced = fenced(&export.cluster)?;
    eprintln!(
        "rbd: {kills} kills, {} rounds of fio, {longest:.1?} at most until the guest worked again; \
         the cluster serves {fenced} clients no more",
        rounds.trim()
    );
    ensure!(fenced >= kills, "{fenced} of {kills} were fenced");
    guest.poweroff()?;
    daemon.terminate()
}

/// A process that is not dead, only slow: what it still has in hand comes to nothing.
#[test]
fn who_lost_the_lock_writes_no_more() -> Result<()> {
    let Some(tree) = tree() else {
        return Ok(());
    };
    let export = Export {
        dir: tempfile::Builder::new().prefix("vnvme-").tempdir()?,
        cluster: Cluster::start(tree, 64)?,
    };
    let url = export.cluster.url("rbd/img");
    let bench = |daemon: &Daemon, words: &[&str]| {
        let target = format!("vfio-user://{}", daemon.socket().display());
        let load = ["bench", &target, "--bs", "4k", "--size", "32m"];
        let mut command = Command::new(program()?);
        let command = command.args(load).args(words);
        anyhow::Ok(
            command
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?,
        )
    };
    let verified = ["--rw", "randrw", "--verify", "--destroy-data"];
    let first = export.builder().volume(url.clone()).start()?;
    let words = ["--rw", "randwrite", "--destroy-data", "--iodepth", "32"];
    let load = bench(&first, &[&words[..], &["--runtime", "60"]].concat())?;
    std::thread::sleep(Duration::from_secs(2));
    first.process().signal(Signal::STOP)?;
    let second = export
        .builder()
        .volume(format!("{url}&lock=break"))
        .start()?;
    let during = bench(&second, &[&verified[..], &["--runtime", "6"]].concat())?;
    second.wait_log("the lock is taken from", LIMIT)?;
    std::thread::sleep(Duration::from_secs(2));
    ensure!(fenced(&export.cluster)? >= 1, "nobody was fenced");
    // Its writes are on their way again, while the other one verifies its own.
    first.process().signal(Signal::CONT)?;
    let during = during.wait_with_output()?;
    let said = String::from_utf8_lossy(&during.stderr).into_owned();
    ensure!(during.status.success(), "{said}\n{}", second.log()?);
    let load = load.wait_with_output()?;
    ensure!(!load.status.success(), "the first one has written");
    first.must_live()?;
    second.terminate()
}
