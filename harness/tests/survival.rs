//! A guest whose disk is served by a process that is killed again and again, at any moment: it
//! notices pauses, and nothing else.
//!
//! `VNVME_KILLS` has it killed more often than a few times.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod common;

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use common::nbd::{NBDKIT, Place, QEMU, nbdkit, tree};
use common::{Disks, LONG, run, run_for};
use harness::daemon::program;
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Guest};
use rustix::process::{Pid, Signal, kill_process};

/// Kills, where nothing else is said.
const KILLS: usize = 12;
/// Microseconds between two of them, at most: a keeper lets a few within ten seconds follow at
/// once.
const BETWEEN: u64 = 4_600_000;
/// For a process that follows one that was killed.
const LIMIT: Duration = Duration::from_secs(20);
const MIB: u64 = 192;

/// Random reads and writes that are verified, flushes, and ranges that are trimmed, again and again
/// until the time is over. Each turn verifies all of what it has written.
const LOAD: &str = r#"
n=0
while [ $(date +%s) -lt $end ]; do
    n=$((n + 1))
    fio --direct=1 --ioengine=io_uring --verify=crc32c --verify_fatal=1 --verify_dump=0 --randseed=$n \
        --filename=$d --name=many --offset=0 --size=24m --rw=randrw --bsrange=4k-64k --iodepth=16 \
            --verify_backlog=64 \
        --name=one --offset=64m --size=4m --rw=randwrite --bs=4k --iodepth=1 --fsync=16 \
        --name=flush --offset=80m --size=8m --rw=write --bs=16k --iodepth=4 --fdatasync=8 \
        --name=trims --offset=100m --size=24m --rw=randtrim --bs=8k --iodepth=8 --verify=0 \
        >/tmp/fio.log 2>&1 || { cat /tmp/fio.log; dmesg | tail -30; exit 1; }
done
echo turns $n
"#;

/// Numbers that differ from run to run, and are told.
struct Chance(u64);

impl Chance {
    fn new() -> Chance {
        let seed = std::env::var("VNVME_SEED")
            .ok()
            .and_then(|text| text.parse().ok());
        let time = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        let seed = seed.unwrap_or(time.as_micros() as u64 | 1);
        eprintln!("survival: VNVME_SEED={seed}");
        Chance(seed)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// The process that serves under this keeper.
fn serving(keeper: u32) -> Option<i32> {
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

fn wait_serving(daemon: &Daemon, before: Option<i32>) -> Result<i32> {
    let began = Instant::now();
    loop {
        match serving(daemon.process().pid()) {
            Some(pid) if Some(pid) != before => return Ok(pid),
            _ => daemon.must_live()?,
        }
        ensure!(began.elapsed() < LIMIT, "no process follows");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How long the clients of each process waited, in milliseconds, as its successor says.
fn pauses(log: &str) -> Vec<f64> {
    let said = log.lines().filter_map(|line| line.split_once("pause_ms="));
    let said = said.filter_map(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
    let mut pauses: Vec<f64> = said.collect();
    pauses.sort_by(f64::total_cmp);
    pauses
}

fn say(what: &str, pauses: &[f64]) {
    let at = |part: f64| pauses[((pauses.len() - 1) as f64 * part) as usize];
    let some = [0.0, 0.5, 0.9, 0.99, 1.0].map(at);
    eprintln!(
        "survival: {what}: {} pauses, in ms: least {:.1}, median {:.1}, p90 {:.1}, p99 {:.1}, most {:.1}",
        pauses.len(),
        some[0],
        some[1],
        some[2],
        some[3],
        some[4]
    );
}

/// What the guest's kernel would say of a disk that fails, or is reset.
const NOTHING_SAID: &str = r"
dmesg | grep -v 'module verification' |
    grep -Ei 'nvme.*(timeout|timed out|abort|reset|error|fail|down|dead)|virtio.*(fail|error)|I/O error' \
    >/tmp/said && { cat /tmp/said; exit 1; }
true";

fn kills() -> Result<usize> {
    match std::env::var("VNVME_KILLS") {
        Ok(text) => text.parse().context("VNVME_KILLS is a number"),
        Err(_) => Ok(KILLS),
    }
}

/// Bytes of anonymous memory of a process.
fn anonymous(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib: u64 = line
        .and_then(|line| line.split_whitespace().next()?.parse().ok())
        .context("RssAnon")?;
    Ok(kib << 10)
}

/// Kills what serves, at any moment, while the guest works. How often.
fn kill_under_load(guest: &Guest, daemon: &Daemon, kills: usize, find: &str) -> Result<usize> {
    let ended = AtomicBool::new(false);
    let mut killed = 0;
    let turns = std::thread::scope(|scope| -> Result<String> {
        let load = scope.spawn(|| {
            let seconds = seconds_for(kills) + 2;
            let limit = LONG + Duration::from_secs(2 * seconds);
            let script = format!("end=$(($(date +%s) + {seconds}))\n{find}\n{LOAD}");
            let turns = run_for(guest, limit, &script);
            ended.store(true, Ordering::Release);
            turns
        });
        let mut chance = Chance::new();
        let mut pid = wait_serving(daemon, None)?;
        std::thread::sleep(Duration::from_secs(2));
        while killed < kills && !ended.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(20_000 + chance.below(BETWEEN)));
            kill_process(Pid::from_raw(pid).context("pid")?, Signal::KILL)?;
            pid = wait_serving(daemon, Some(pid))?;
            killed += 1;
        }
        load.join().unwrap()
    })?;
    eprintln!("survival: {killed} kills, {}", turns.trim());
    run(guest, NOTHING_SAID)?;
    Ok(killed)
}

/// For so many kills.
fn seconds_for(kills: usize) -> u64 {
    4 + kills as u64 * (20_000 + BETWEEN / 2) / 1_000_000
}

#[test]
fn a_guest_survives_its_disks_process() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip("survival::nvme", "the tests run against QEMU's controller");
        return Ok(());
    }
    let kills = kills()?;
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", MIB)?;
    let daemon = Daemon::builder("survival")
        .arg("--keeper")
        .arg("process")
        .volume(&file)
        .limit(Duration::from_secs(600) + LIMIT * kills as u32)
        .start()?;
    let guest = Guest::builder("survival")
        .disk(harness::Disk::VfioUser {
            socket: daemon.socket().to_path_buf(),
        })
        .boot()?;
    let killed = kill_under_load(&guest, &daemon, kills, "d=$(wait_disk 1 1)")?;
    let pauses = pauses(&daemon.log()?);
    // One that is killed before it serves says nothing; most are not.
    ensure!(
        (killed.div_ceil(2)..=killed).contains(&pauses.len()),
        "{} pauses of {killed} kills",
        pauses.len()
    );
    ensure!(2 * killed >= kills, "killed {killed} times only");
    say("NVMe, a file", &pauses);
    let memory = anonymous(daemon.process().pid())?;
    eprintln!("survival: the keeper has {} KiB of its own", memory >> 10);
    ensure!(memory < 2 << 20, "the keeper has {memory} bytes");
    guest.poweroff()?;
    daemon.terminate()
}

/// A verified load of a daemon's disk, without a guest: as fast as this machine is.
fn load(socket: &Path, seconds: u64) -> Result<Child> {
    let target = format!("vfio-user://{}", socket.display());
    let child = Command::new(program()?)
        .args([
            "bench",
            &target,
            "--rw",
            "randrw",
            "--bs",
            "4k",
            "--iodepth",
            "32",
        ])
        .args([
            "--size",
            "32m",
            "--verify",
            "--destroy-data",
            "--runtime",
            &seconds.to_string(),
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    Ok(child)
}

/// Kills what serves a volume under a verified load.
fn kill_under_bench(what: &str, volume: impl Into<OsString>, kills: usize) -> Result<()> {
    let daemon = Daemon::builder("survival-bench")
        .arg("--keeper")
        .arg("process")
        .volume(volume)
        .limit(Duration::from_secs(600) + LIMIT * kills as u32)
        .start()?;
    let mut chance = Chance::new();
    let mut pid = wait_serving(&daemon, None)?;
    let mut load = load(daemon.socket(), seconds_for(kills))?;
    let mut killed = 0;
    // Before the keeper has been told that it is ready an end is the end of everything.
    std::thread::sleep(Duration::from_secs(2));
    while load.try_wait()?.is_none() {
        std::thread::sleep(Duration::from_micros(20_000 + chance.below(BETWEEN)));
        kill_process(Pid::from_raw(pid).context("pid")?, Signal::KILL)?;
        pid = wait_serving(&daemon, Some(pid))?;
        killed += 1;
    }
    let output = load.wait_with_output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(
        output.status.success(),
        "{}\n{}\n{}",
        text(&output.stdout),
        text(&output.stderr),
        daemon.log()?
    );
    daemon.terminate()?;
    let log = daemon.log()?;
    ensure!(!log.contains("ERROR"), "{log}");
    eprintln!("survival: {what}: {killed} kills");
    let pauses = pauses(&log);
    ensure!(!pauses.is_empty(), "nobody says how long it was:\n{log}");
    say(what, &pauses);
    Ok(())
}

#[test]
fn verified_data_survives_on_files_and_memory() -> Result<()> {
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 64)?;
    let kills = kills()?.div_ceil(3);
    kill_under_bench("a file", &file, kills)?;
    kill_under_bench("memory", "mem://64M", kills)
}

#[test]
fn verified_data_survives_in_an_image() -> Result<()> {
    let Some(tree) = tree(&QEMU) else {
        return Ok(());
    };
    let disks = Disks::new()?;
    let image = disks.dir().join("disk.qcow2").display().to_string();
    tree.run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "64M"])?;
    let url = format!("qcow2://{image}");
    kill_under_bench("an image", url, kills()?.div_ceil(3))?;
    tree.run("qemu-img", &["check", "-q", &image])?;
    Ok(())
}

/// The server is slow: it has much of what a killed process has sent, and does it late.
#[test]
fn verified_data_survives_on_a_slow_nbd_server() -> Result<()> {
    let Some(tree) = tree(&NBDKIT) else {
        return Ok(());
    };
    let disks = Disks::new()?;
    let disk = disks.sparse("disk.raw", 64)?.display().to_string();
    let place = Place::Unix(disks.dir().join("nbd.sock"));
    let words = [
        "filter:delay",
        "plugin:file",
        &disk,
        "rdelay=1ms",
        "wdelay=20ms",
    ];
    let _server = nbdkit(&tree, &place, &words)?;
    kill_under_bench("an NBD server", place.url(), kills()?.div_ceil(3))
}
