//! Disks on Linux's NVMe/TCP target, which is in a guest: under load with verification, with and
//! without digests, while one of its two ports closes, or has its cable pulled, again and again;
//! and in another guest. The daemons are in their sandbox.
//!
//! `VNVME_PATH_SECONDS` is the duration of each loss of a port.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::nvmet::{NQN, Nvmet, PROVEN_NQN};
use crate::common::{Checks, LONG_TIMEOUT, run_for};
use anyhow::{Context, Result, bail, ensure};
use harness::daemon::program;
use harness::progress::{say, skip};
use harness::served::Controller;
use harness::{Daemon, Guest};
use serde_json::Value;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);

/// Random reads and writes, verified, of a daemon's disk.
fn load(daemon: &Daemon, seconds: u64, bs: &str) -> Result<Child> {
    let target = format!("vfio-user://{}", daemon.socket().display());
    let child = Command::new(program()?)
        .args(["bench", &target, "--rw", "randrw", "--iodepth", "16"])
        .args(["--size", "32m", "--verify", "--destroy-data", "--json"])
        .args(["--bs", bs, "--runtime", &seconds.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    Ok(child)
}

/// It has verified all; the longest time of a command.
fn verified(load: Child, daemon: &Daemon) -> Result<Duration> {
    let output: Output = load.wait_with_output()?;
    if !output.status.success() {
        bail!(
            "{}\n{}\n{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
            daemon.log()?
        );
    }
    let figures: Value = serde_json::from_slice(&output.stdout)?;
    let of = |flow: &str| figures["jobs"][0][flow]["clat_ns"]["max"].as_u64();
    let longest = of("read").max(of("write"));
    Ok(Duration::from_nanos(longest.context("no longest time")?))
}

/// For how long a port is lost again and again, and whether that is the long form.
fn path_seconds(default: u64) -> (u64, bool) {
    let told = std::env::var("VNVME_PATH_SECONDS").ok();
    let told = told.and_then(|text| text.parse().ok());
    (told.unwrap_or(default), told.is_some())
}

/// All that one target is asked for, so that it is booted once.
#[test]
fn linux_target_serves_nvme_tcp_volume() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip("nvme-tcp::linux", "the tests run against QEMU's controller");
        return Ok(());
    }
    // Two policies that lose ports, and one that loses cables.
    let (seconds, _) = path_seconds(0);
    let limit = LONG_TIMEOUT * 3 + Duration::from_secs(4 * seconds);
    let target = Nvmet::start("nvmet", 192, limit)?;
    let mut checks = Checks::new("nvme-tcp");
    checks.check("discovery", || discovered(&target));
    checks.check("digests on and off", || digests(&target));
    checks.check("one of two ports closes", || ports_close(&target));
    checks.check("the cable of one of two is pulled", || cables(&target));
    checks.check("states of the namespace", || states(&target));
    checks.check("another size", || resized(&target));
    checks.check("DH-HMAC-CHAP", || proven(&target));
    checks.check("fio in a guest", || in_a_guest(&target));
    checks.finish();
    Ok(())
}

fn discovered(target: &Nvmet) -> Result<()> {
    let output = Command::new(program()?)
        .args(["discover", "--json"])
        .arg(format!("tcp://127.0.0.1:{}", target.port()))
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{said}");
    let found: Value = serde_json::from_slice(&output.stdout)?;
    let records = found["records"].as_array().context("no records")?;
    let record = records.iter().find(|record| record["subnqn"] == NQN);
    let record = record.with_context(|| found.to_string())?;
    ensure!(
        record["transport"] == "tcp" && record["service"] == "4421",
        "{record}"
    );
    Ok(())
}

fn digests(target: &Nvmet) -> Result<()> {
    let all = ["", "?hdgst=on&ddgst=on&queues=2", "?hdgst=on", "?ddgst=on"];
    let (_, long) = path_seconds(0);
    for options in all.into_iter().take(if long { 4 } else { 2 }) {
        let url = format!("{}{options}", target.url());
        let daemon = Daemon::builder("nvmet-digests").volume(url).start()?;
        for bs in ["4k", "128k"] {
            verified(load(&daemon, 1, bs)?, &daemon).with_context(|| format!("{options} {bs}"))?;
        }
        let log = daemon.log()?;
        ensure!(!log.contains("connecting again"), "{options}:\n{log}");
        ensure!(log.contains("sandbox: landlock"), "no sandbox:\n{log}");
        daemon.terminate()?;
    }
    Ok(())
}

/// One of two ports closes again and again under load: nothing fails, and nothing is lost.
fn ports_close(target: &Nvmet) -> Result<()> {
    let (seconds, long) = path_seconds(5);
    let pause = Duration::from_millis(if long { 2500 } else { 300 });
    for policy in ["round-robin", "queue-depth"]
        .into_iter()
        .take(1 + usize::from(long))
    {
        let url = format!("{}?policy={policy}", target.url());
        let daemon = Watched::start("nvmet-ports", url)?;
        let mut load = load(&daemon, seconds, "4k")?;
        let mut closed = 0;
        // Each port once, however long that takes beside other tests.
        while closed < 2 || load.try_wait()?.is_none() {
            let number = closed % 2 + 1;
            target.close(number)?;
            std::thread::sleep(pause);
            target.open(number)?;
            closed += 1;
            daemon.wait_connected(closed)?;
            std::thread::sleep(pause);
        }
        let longest = verified(load, &daemon)?;
        say(format!(
            "nvme-tcp: {policy}: one of two ports closed {closed} times, 0 errors, longest pause \
             {longest:.2?}"
        ));
        daemon.terminate()?;
    }
    Ok(())
}

/// Nothing is answered by one of two ports, again and again: what is in flight there waits until it
/// is certain that the target does it no more.
fn cables(target: &Nvmet) -> Result<()> {
    let (seconds, long) = path_seconds(7);
    let most = if long { usize::MAX } else { 2 };
    let url = format!("{}?kato=2s&timeout=1s", target.url());
    let daemon = Watched::start("nvmet-cables", url)?;
    let mut load = load(&daemon, seconds, "4k")?;
    let mut pulled = 0;
    let mut away = Duration::ZERO;
    while load.try_wait()?.is_none() && pulled < most {
        let number = pulled % 2 + 1;
        let before = daemon.ended()?;
        target.set_cable(number, false)?;
        std::thread::sleep(Duration::from_secs(2));
        // Until that is seen, which it is by what is in flight there.
        let began = Instant::now();
        while daemon.ended()? == before && load.try_wait()?.is_none() {
            ensure!(began.elapsed() < LIMIT, "{}", daemon.log()?);
            std::thread::sleep(Duration::from_millis(50));
        }
        let is_seen = daemon.ended()? > before;
        target.set_cable(number, true)?;
        if !is_seen {
            break;
        }
        pulled += 1;
        away = away.max(daemon.wait_connected(pulled)?);
    }
    ensure!(pulled > 0, "no cable was missed: {}", daemon.log()?);
    let longest = verified(load, &daemon)?;
    let log = daemon.log()?;
    ensure!(log.contains("connecting again"), "{log}");
    say(format!(
        "nvme-tcp: the cable of one of two ports pulled {pulled} times for 2 s, 0 errors, longest \
         pause {longest:.2?}; back after {away:.2?} at most"
    ));
    daemon.terminate()
}

/// A daemon, and the socket by which it tells how its paths are.
struct Watched {
    daemon: Daemon,
    control: PathBuf,
    _folder: TempDir,
}

impl std::ops::Deref for Watched {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl Watched {
    /// Starts a daemon and waits for all paths of its disk.
    fn start(name: &str, url: String) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let control = folder.path().join("control.sock");
        let builder = Daemon::builder(name).arg("--control").arg(&control);
        let daemon = builder.volume(url).start()?;
        let watched = Self {
            daemon,
            control,
            _folder: folder,
        };
        watched.wait_connected(0)?;
        Ok(watched)
    }

    /// Waits until so many associations have ended, and all paths are there; how long that was.
    fn wait_connected(&self, ended: usize) -> Result<Duration> {
        let began = Instant::now();
        loop {
            let device = self.device()?;
            let lost = ended_of(&device)?;
            let waited = began.elapsed();
            if device["state"] == "live" && lost >= ended as u64 {
                return Ok(waited);
            }
            ensure!(waited < LIMIT, "{ended} ended: {device}\n{}", self.log()?);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// How many associations have ended.
    fn ended(&self) -> Result<u64> {
        ended_of(&self.device()?)
    }

    /// How the subsystem is reached.
    fn device(&self) -> Result<Value> {
        let output = Command::new(program()?)
            .args(["stats", "--json", "--control"])
            .arg(&self.control)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{said}");
        let stats: Value = serde_json::from_slice(&output.stdout)?;
        Ok(stats["devices"][0].clone())
    }
}

/// Associations of a device that have ended.
fn ended_of(device: &Value) -> Result<u64> {
    let ended = device["resets"].as_u64();
    ended.with_context(|| device.to_string())
}

/// The target says by which port the namespace is to be reached, and by which it cannot be.
fn states(target: &Nvmet) -> Result<()> {
    let daemon = Watched::start("nvmet-states", target.url())?;
    let load = load(&daemon, 4, "4k")?;
    for (number, state, logged) in [
        (1, "inaccessible", "Inaccessible"),
        (2, "non-optimized", "Non-Optimized"),
        (1, "optimized", "Optimized"),
        (2, "change", "Change"),
        (2, "optimized", "Optimized"),
    ] {
        target.set_state(number, state)?;
        daemon.wait_log(&format!("ANA {logged} by "), LIMIT)?;
        std::thread::sleep(Duration::from_millis(500));
    }
    let longest = verified(load, &daemon)?;
    say(format!(
        "nvme-tcp: states change: longest pause {longest:.2?}"
    ));
    let log = daemon.log()?;
    ensure!(log.contains("(was ANA Optimized)"), "{log}");
    ensure!(!log.contains("connecting again"), "{log}");
    daemon.terminate()
}

fn resized(target: &Nvmet) -> Result<()> {
    let daemon = Daemon::builder("nvmet-resize")
        .volume(target.url())
        .start()?;
    target.resize(200)?;
    daemon.wait_log(&format!(" to {} bytes", 200 << 20), LIMIT)?;
    target.resize(192)?;
    daemon.wait_log(&format!(" to {} bytes", 192 << 20), LIMIT)?;
    daemon.terminate()
}

/// Secrets of a host, and of a subsystem, as `nvme gen-dhchap-key` makes them.
const SECRET: &str = "DHHC-1:01:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
const OWN_SECRET: &str =
    "DHHC-1:02:ZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXp7fH1+f4CBgoOEhYaHiImKi4yNjo+QkZKTvGwQfg==:";

/// Target and host authenticate each other.
fn proven(target: &Nvmet) -> Result<()> {
    let host = "nqn.2014-08.org.vnvme:harness";
    target.add_proven(host, SECRET, OWN_SECRET)?;
    let folder = tempfile::tempdir()?;
    let file = |name: &str, secret: &str| -> Result<String> {
        let path = folder.path().join(name);
        std::fs::write(&path, secret)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        Ok(path.display().to_string())
    };
    let (mine, theirs) = (file("mine", SECRET)?, file("theirs", OWN_SECRET)?);
    let url = |options: &str| {
        let port = target.port();
        format!("nvme+tcp://127.0.0.1:{port}/{PROVEN_NQN}/1?hostnqn={host}{options}")
    };
    let good = format!("&dhchap-secret-file={mine}");
    let both = format!("{good}&dhchap-ctrl-secret-file={theirs}");
    for (hash, group, options) in [
        ("sha256", "null", &good),
        ("sha384", "ffdhe2048", &both),
        ("sha512", "ffdhe3072", &both),
    ] {
        target.set_proof(host, hash, group)?;
        let daemon = Daemon::builder("nvmet-proven")
            .volume(url(options))
            .start()?;
        verified(load(&daemon, 1, "4k")?, &daemon).with_context(|| format!("{hash} {group}"))?;
        let log = daemon.log()?;
        ensure!(!log.contains("AQIDBA"), "a secret:\n{log}");
        daemon.terminate()?;
        say(format!(
            "nvme-tcp: DH-HMAC-CHAP with {hash}, {group}: proven"
        ));
    }
    for (options, why) in [
        (String::new(), "dhchap-secret-file"),
        (
            format!("&dhchap-secret-file={theirs}"),
            "authentication failed",
        ),
        (
            format!("{good}&dhchap-ctrl-secret-file={mine}"),
            "authentication failed",
        ),
    ] {
        let socket = folder.path().join("none.sock");
        let output = Command::new(program()?)
            .arg("serve")
            .arg("--socket")
            .arg(socket)
            .arg(url(&options))
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success() && said.contains(why), "{said}");
    }
    Ok(())
}

/// A guest's own fio and file system, while the ports close.
fn in_a_guest(target: &Nvmet) -> Result<()> {
    let url = format!("{}?ddgst=on", target.url());
    let daemon = Watched::start("nvmet-guest", url)?;
    let guest = Guest::builder("nvmet-client")
        .vfio_user(daemon.socket())
        .boot()?;
    std::thread::scope(|scope| -> Result<()> {
        let work = scope.spawn(|| {
            run_for(
                &guest,
                LONG_TIMEOUT,
                "d=$(wait_disk 1 1)
                 fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw \
                     --bsrange=4k-256k --size=16m --iodepth=16 --fsync=50 --verify=crc32c \
                     --verify_fatal=1 --verify_state_save=0 >/dev/null
                 mkfs.ext4 -q $d; mkdir -p /tmp/m; mount $d /tmp/m; cp -r /bin /tmp/m/; umount /tmp/m
                 e2fsck -fn $d >/dev/null",
            )
        });
        let mut closed = 0;
        while !work.is_finished() {
            let number = closed % 2 + 1;
            target.close(number)?;
            std::thread::sleep(Duration::from_millis(500));
            target.open(number)?;
            closed += 1;
            daemon.wait_connected(closed)?;
            std::thread::sleep(Duration::from_secs(1));
        }
        work.join().unwrap()?;
        say(format!(
            "nvme-tcp: fio in a guest: ports closed {closed} times"
        ));
        Ok(())
    })?;
    guest.poweroff()?;
    daemon.terminate()
}
