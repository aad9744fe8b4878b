//! Disks on a real Ceph cluster of one host: under load with verification while its monitor stops
//! and its OSD is killed and started again; discard, snapshots, resize; no cluster, no library.
//! The daemons are in their sandbox.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::ceph::{Cluster, LIMIT, tree};
use crate::common::{Checks, run_for};
use anyhow::{Context, Result, ensure};
use harness::daemon::{DaemonBuilder, program};
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Guest};
use rustix::process::Signal;

/// A daemon that finds the cluster's library.
fn daemon(cluster: &Cluster, name: &str, url: impl Into<Option<String>>) -> DaemonBuilder {
    // Signals go to the process that serves.
    let builder = Daemon::builder(name).arg("--keeper").arg("off");
    let builder = url.into().into_iter().fold(builder, DaemonBuilder::volume);
    let library = cluster.library();
    library
        .iter()
        .fold(builder, |builder, (name, path)| builder.env(name, *path))
}

fn bench(daemon: &Daemon, words: &[&str], seconds: u64) -> Result<Child> {
    bench_of(daemon.socket(), words, seconds)
}

fn bench_of(socket: &Path, words: &[&str], seconds: u64) -> Result<Child> {
    let target = format!("vfio-user://{}", socket.display());
    let seconds = seconds.to_string();
    Ok(Command::new(program()?)
        .args([
            "bench",
            &target,
            "--bs",
            "4k",
            "--iodepth",
            "32",
            "--runtime",
            &seconds,
        ])
        .args(words)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?)
}

/// How the way to the cluster is.
fn state(control: &Path) -> Result<String> {
    let mut command = Command::new(program()?);
    let output = command.args(["stats", "--control"]).arg(control).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Random reads and writes, verified.
const LOAD: [&str; 6] = [
    "--rw",
    "randrw",
    "--size",
    "32m",
    "--verify",
    "--destroy-data",
];

fn fine(output: &Output, daemon: &Daemon) -> Result<String> {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (said, errors) = (text(&output.stdout), text(&output.stderr));
    ensure!(
        output.status.success(),
        "{said}\n{errors}\n{}",
        daemon.log()?
    );
    Ok(said)
}

fn verified(daemon: &Daemon, seconds: u64) -> Result<()> {
    fine(&bench(daemon, &LOAD, seconds)?.wait_with_output()?, daemon).map(drop)
}

/// In one test: a cluster takes its time to start, and to answer again.
#[test]
fn a_cluster_serves_images_and_a_guest() -> Result<()> {
    let Some(tree) = tree() else {
        return Ok(());
    };
    let mut cluster = Cluster::prepare(tree)?;
    let url = cluster.url("rbd/img");
    let mut checks = Checks::new("rbd");
    checks.check("a disk before its cluster", || early(&mut cluster, &url));
    let mut holder = None;
    checks.check("the exclusive lock", || {
        holder = Some(locked(&cluster, &url)?);
        Ok(())
    });
    let second = holder.context("no daemon has the image")?;
    checks.check("an image that is resized", || {
        cluster.rbd(&["resize", "--no-progress", "--size", "96M", "img"])?;
        second.wait_log(" to 100663296 bytes", LIMIT).map(drop)
    });
    let mut user = None;
    if Controller::chosen()? == Controller::Vnvme {
        checks.check("a guest verifies, discards, and sees a new size", || {
            let booted = user.insert(User::boot(&cluster)?);
            booted.verifies(&cluster)
        });
    } else {
        skip("rbd::guest", "the tests run against QEMU's controller");
    }
    checks.check("the OSD is killed and the monitor stops", || {
        hurt(&mut cluster, &second, user.as_ref())
    });
    checks.check("a snapshot is read, and not written", || {
        snapshot(&cluster)?;
        second.terminate()
    });
    checks.check("namespaces, and names that there are not", || {
        named(&cluster)
    });
    checks.check("an image is loaded without a daemon", || loaded(&cluster));
    checks.check("no library", || no_library(url));
    if let Some(user) = user {
        checks.check("power off and SIGTERM", || user.end());
    }
    checks.finish();
    Ok(())
}

/// There is no cluster yet: the disk is there, and slow.
fn early(cluster: &mut Cluster, url: &str) -> Result<()> {
    let refused = daemon(cluster, "rbd-away", format!("{url}&wait=1s")).refuse()?;
    ensure!(
        !refused.0.success() && refused.1.contains("with size="),
        "{}",
        refused.1
    );
    let dir = tempfile::tempdir()?;
    let [control, config, image, memory] =
        ["control", "config", "image", "memory"].map(|name| dir.path().join(name));
    let controller = |socket: &Path, volume: &str| {
        format!(
            "[[controller]]\nsocket = {socket:?}\n[[controller.namespace]]\nvolume = {volume:?}\n"
        )
    };
    let both = [
        controller(&image, &format!("{url}&wait=1s&size=32M")),
        controller(&memory, "mem://32M"),
    ];
    std::fs::write(&config, both.concat())?;
    let early = daemon(cluster, "rbd-early", None)
        .config(&config, &memory)
        .arg("--workers")
        .arg("1")
        .arg("--control")
        .arg(&control)
        .start()?;
    early.wait_log("did not answer in 1s", LIMIT)?;
    ensure!(
        state(&control)?.contains("connecting"),
        "{}",
        state(&control)?
    );
    // Its requests wait, and nobody else's, although all are one worker's.
    let mut waits = bench_of(&image, &LOAD, 1)?;
    let beside = bench_of(&memory, &LOAD, 2)?.wait_with_output()?;
    fine(&beside, &early)?;
    ensure!(waits.try_wait()?.is_none(), "it does not wait");
    cluster.create(64)?;
    early.wait_log("connected after", LIMIT)?;
    early.wait_log(" to 67108864 bytes", LIMIT)?;
    // All of its time may have passed meanwhile.
    waits.wait_with_output()?;
    ensure!(state(&control)?.contains("at work"), "{}", state(&control)?);
    fine(&bench_of(&image, &LOAD, 2)?.wait_with_output()?, &early)?;
    let log = early.log()?;
    ensure!(log.contains("sandbox: landlock"), "no sandbox:\n{log}");
    early.terminate()
}

/// The owner of the lock keeps it; a killed process does not. Returns the last owner.
fn locked(cluster: &Cluster, url: &str) -> Result<Daemon> {
    let first = daemon(cluster, "rbd-lock", url.to_owned()).start()?;
    verified(&first, 1)?;
    let waits = daemon(cluster, "rbd-waits", url.to_owned()).start()?;
    let waiting = bench(&waits, &LOAD, 1)?;
    waits.wait_log("its exclusive lock is", LIMIT)?;
    verified(&first, 3)?;
    ensure!(
        !waits.log()?.contains("the lock is taken"),
        "{}",
        waits.log()?
    );
    // Its requests are given up, and that is no clean end.
    waits.process().signal(Signal::TERM)?;
    let status = waits.process().wait(LIMIT)?;
    ensure!(status.code() == Some(3), "{status}: {}", waits.log()?);
    let output = waiting.wait_with_output()?;
    ensure!(!output.status.success(), "it was written");
    first.kill()?;
    let second = daemon(cluster, "rbd-lock", url.to_owned()).start()?;
    verified(&second, 2)?;
    second.wait_log("the lock is taken from", LIMIT)?;
    Ok(second)
}

/// The OSD is killed; the monitor stops for a while. Neither is an error to users of an image.
fn hurt(cluster: &mut Cluster, second: &Daemon, user: Option<&User>) -> Result<()> {
    let daemons = || std::iter::once(second).chain(user.map(|user| &user.daemon));
    if let Some(user) = user {
        user.works()?;
    }
    let load = bench(second, &LOAD, 45)?;
    std::thread::sleep(Duration::from_secs(3));
    cluster.osd()?.kill()?;
    for daemon in daemons() {
        daemon.wait_log("no answer to", LIMIT)?;
    }
    cluster.start_osd()?;
    for daemon in daemons() {
        daemon.wait_log("answers again", LIMIT)?;
    }
    std::thread::sleep(Duration::from_secs(2));
    cluster.mon()?.signal(Signal::STOP)?;
    std::thread::sleep(Duration::from_secs(20));
    cluster.mon()?.signal(Signal::CONT)?;
    fine(&load.wait_with_output()?, second)?;
    user.map_or(Ok(()), User::worked)
}

fn snapshot(cluster: &Cluster) -> Result<()> {
    cluster.rbd(&["snap", "create", "--no-progress", "img@s"])?;
    let snapshot = daemon(cluster, "rbd-snapshot", cluster.url("rbd/img@s")).start()?;
    let reads = bench(&snapshot, &["--rw", "randread"], 1)?.wait_with_output()?;
    fine(&reads, &snapshot)?;
    let writes = bench(&snapshot, &LOAD, 1)?.wait_with_output()?;
    ensure!(!writes.status.success(), "a snapshot was written");
    snapshot.terminate()
}

/// A namespace of the pool; and what is not there is named.
fn named(cluster: &Cluster) -> Result<()> {
    cluster.rbd(&["namespace", "create", "rbd/n"])?;
    cluster.rbd(&["create", "--size", "64M", "rbd/n/other"])?;
    let other = daemon(cluster, "rbd-namespace", cluster.url("rbd/n/other")).start()?;
    verified(&other, 1)?;
    other.terminate()?;
    for (name, said) in [
        ("rbd/nothing", "rbd ls POOL"),
        ("nopool/img", "ceph osd pool ls"),
        ("rbd/img@nosnap", "the image"),
    ] {
        let (status, log) = daemon(cluster, "rbd-refused", cluster.url(name)).refuse()?;
        ensure!(!status.success() && log.contains(said), "{name}: {log}");
    }
    Ok(())
}

/// Loads an image by `vnvme bench`, which opens it itself.
fn loaded(cluster: &Cluster) -> Result<()> {
    cluster.rbd(&["create", "--size", "32M", "loaded"])?;
    let output = Command::new(program()?)
        .args(["bench", &cluster.url("rbd/loaded"), "--ios", "500"])
        .args(LOAD)
        .envs(cluster.library())
        .output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(())
}

fn no_library(url: String) -> Result<()> {
    let began = Instant::now();
    let (status, log) = Daemon::builder("rbd-library")
        .volume(url)
        .env("VNVME_LIBRBD", "/nonexistent")
        .refuse()?;
    ensure!(
        !status.success() && log.contains("install the package librbd1"),
        "{log}"
    );
    ensure!(began.elapsed() < LIMIT, "it took its time");
    Ok(())
}

/// A guest with an image of its own.
struct User {
    daemon: Daemon,
    guest: Guest,
}

impl User {
    fn boot(cluster: &Cluster) -> Result<User> {
        cluster.rbd(&["create", "--size", "256M", "guest"])?;
        let daemon = daemon(cluster, "rbd-guest", cluster.url("rbd/guest")).start()?;
        // On a machine that is busy a cluster is away for longer than the driver waits (30 s).
        let guest = Guest::builder("rbd")
            .append("nvme_core.io_timeout=255")
            .vfio_user(daemon.socket())
            .boot()?;
        Ok(User { daemon, guest })
    }

    /// Verified data, discard, write-zeroes and a new size.
    fn verifies(&self, cluster: &Cluster) -> Result<()> {
        let work = run_for(
            &self.guest,
            Duration::from_secs(240),
            "d=$(wait_disk 1 1)
         fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-512k \
             --size=64m --iodepth=16 --fsync=50 --verify=crc32c --verify_fatal=1 \
             --verify_state_save=0 >/dev/null
         mkfs.ext4 -q $d; mkdir -p /tmp/m; mount $d /tmp/m; cp -r /bin /tmp/m/; umount /tmp/m
         fsck.ext4 -fn $d
         dd if=/dev/urandom of=$d bs=1M count=96 oflag=direct 2>/dev/null
         blkdiscard -o 0 -l $((64 << 20)) $d
         blkdiscard -z -o $((64 << 20)) -l $((16 << 20)) $d
         nvme flush $d
         zeroes $d 0 80; ! zeroes $d 80 16",
        );
        work.with_context(|| self.daemon.log().unwrap_or_default())?;
        let used = cluster.rbd(&["du", "--format", "json", "guest"])?;
        let used: serde_json::Value = serde_json::from_str(&used)?;
        cluster.rbd(&["resize", "--no-progress", "--size", "320M", "guest"])?;
        let seen = run_for(
        &self.guest,
        Duration::from_secs(60),
        "d=$(wait_disk 1 1)
         for i in $(seq 100); do [ $(blockdev --getsize64 $d) = $((320 << 20)) ] && exit 0; sleep 0.2; done
         exit 1",
    );
        seen.with_context(|| self.daemon.log().unwrap_or_default())?;
        // What was discarded is the cluster's again, and what was written is not.
        let size = used["images"][0]["used_size"].as_u64().unwrap_or(0);
        ensure!((16 << 20..128 << 20).contains(&size), "{used}");
        Ok(())
    }

    /// Starts verified reads and writes, which go on until [`User::worked`].
    fn works(&self) -> Result<()> {
        run_for(
            &self.guest,
            Duration::from_secs(60),
            "d=$(wait_disk 1 1); rm -f /tmp/stop /tmp/status; dmesg -c >/dev/null
         (while [ ! -e /tmp/stop ]; do
              fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bs=4k \
                  --size=16m --iodepth=16 --fsync=50 --verify=crc32c --verify_fatal=1 \
                  --verify_state_save=0 >/tmp/fio.log 2>&1 || { echo failed >/tmp/status; exit; }
          done
          echo fine >/tmp/status) </dev/null >/dev/null 2>&1 &",
        )
        .map(drop)
    }

    /// What was read was right, and nothing was an error.
    fn worked(&self) -> Result<()> {
        let verified = run_for(
            &self.guest,
            Duration::from_secs(120),
            "touch /tmp/stop
         for try in $(seq 1000); do [ -s /tmp/status ] && break; sleep 0.1; done
         [ \"$(cat /tmp/status)\" = fine ] || { cat /tmp/status; tail -20 /tmp/fio.log; exit 1; }
         ! dmesg | grep -i -e 'i/o error' -e timeout -e abort || exit 1",
        );
        verified
            .with_context(|| self.daemon.log().unwrap_or_default())
            .map(drop)
    }

    fn end(self) -> Result<()> {
        self.guest.poweroff()?;
        self.daemon.terminate()
    }
}
