//! A guest with disks served by a process that is killed again and again, at any moment, or
//! replaced by another version: it notices pauses, and nothing else.
//!
//! `VNVME_KILLS` has it killed, and `VNVME_UPGRADES` replaced, more often than a few times. Before
//! every third of these it is stopped for `VNVME_STOP_MS` milliseconds, as a process that gets no
//! processor.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::nbd::{ListenAddress, NBDKIT, QEMU, nbdkit, tree};
use crate::common::{Checks, Disks, LONG_TIMEOUT, number, run, run_for};
use anyhow::{Context, Result, ensure};
use harness::cache::checkout;
use harness::daemon::program;
use harness::progress::skip;
use harness::served::Controller;
use harness::systemd::{Machine, PACKAGES};
use harness::{Cache, Daemon, Guest, Tree};
use rustix::process::{Pid, Signal, kill_process};

/// Kills, where nothing else is said.
const KILLS: usize = 6;
/// Milliseconds for which it is stopped, where nothing else is said. QEMU 11 gives a disk up whose
/// server has not answered for 5 s.
const STOP_MS: usize = 200;
/// Kills of which some have to hit a request in flight.
const MORE_KILLS: usize = 12;
/// Upgrades between them, where nothing else is said.
const UPGRADES: usize = 2;
/// Microseconds between two of them, at most: a keeper lets a few within ten seconds follow at
/// once.
const BETWEEN: u64 = 4_600_000;
/// For a process that follows one that was killed.
const LIMIT: Duration = Duration::from_secs(20);
const MIB: u64 = 192;

/// Random reads and writes that are verified, flushes, and ranges that are trimmed, again and again
/// until the time is over. Each turn verifies all of what it has written. `load DISK NAME`.
const LOAD: &str = r#"
load() {
n=0
while [ $(date +%s) -lt $end ]; do
    n=$((n + 1))
    fio --direct=1 --ioengine=io_uring --verify=crc32c --verify_fatal=1 --verify_dump=0 --randseed=$n \
        --filename=$1 --name=many --offset=0 --size=24m --rw=randrw --bsrange=4k-64k --iodepth=16 \
            --verify_backlog=64 \
        --name=one --offset=64m --size=4m --rw=randwrite --bs=4k --iodepth=1 --fsync=16 \
        --name=flush --offset=80m --size=8m --rw=write --bs=16k --iodepth=4 --fdatasync=8 \
        --name=trims --offset=100m --size=24m --rw=randtrim --bs=8k --iodepth=8 --verify=0 \
        >/tmp/fio-$2.log 2>&1 || { cat /tmp/fio-$2.log; dmesg | tail -30; exit 1; }
done
echo "$2: $n turns"
}
"#;
/// Of a guest with two of them.
const BOTH: &str = "load $(wait_disk 2 1) other & other=$!\nload $(wait_disk 1 1) one\nwait $other";

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
    number("VNVME_KILLS", KILLS)
}

fn upgrades() -> Result<usize> {
    number("VNVME_UPGRADES", UPGRADES)
}

/// What serves, and has another process follow.
trait Keeps {
    /// Which process serves: another one than `before`, which has been ended.
    fn serving(&self, before: Option<i32>) -> Result<i32>;

    /// Sends it a signal.
    fn signal(&self, pid: i32, signal: Signal) -> Result<()>;

    /// Ends it as nobody expects.
    fn kill(&self, pid: i32) -> Result<()> {
        self.signal(pid, Signal::KILL)
    }

    /// Has one of the program that is there now take its place.
    fn upgrade(&self) -> Result<()>;
}

impl Keeps for Daemon {
    fn serving(&self, before: Option<i32>) -> Result<i32> {
        wait_serving(self, before)
    }

    fn signal(&self, pid: i32, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_raw(pid).context("pid")?, signal)?)
    }

    fn upgrade(&self) -> Result<()> {
        let said = |words: &str| Ok::<_, anyhow::Error>(self.log()?.matches(words).count());
        let (before, began) = (said("upgraded: ")?, Instant::now());
        let mut refused = said("no upgrade")?;
        let keeper = i32::try_from(self.process().pid())?;
        let ask = || {
            kill_process(Pid::from_raw(keeper).context("pid")?, Signal::USR2)
                .map_err(anyhow::Error::from)
        };
        ask()?;
        while said("upgraded: ")? == before {
            self.must_live()?;
            ensure!(began.elapsed() < 3 * LIMIT, "no upgrade:\n{}", self.log()?);
            // On a machine that is busy a new program may take longer than it is waited for.
            let again = said("no upgrade")?;
            if again > refused {
                refused = again;
                ask()?;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
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

/// Kills what serves, at any moment, and has others take its place, while the guest works. Answers
/// how often each was.
fn kill_under_load(
    guest: &Guest,
    keeps: &dyn Keeps,
    (kills, upgrades): (usize, usize),
    loads: &str,
) -> Result<(usize, usize)> {
    let ended = AtomicBool::new(false);
    let (mut killed, mut upgraded) = (0, 0);
    let all = kills + upgrades;
    let stop = Duration::from_millis(number("VNVME_STOP_MS", STOP_MS)? as u64);
    let turns = std::thread::scope(|scope| -> Result<String> {
        let load = scope.spawn(|| {
            let stopped = all.div_ceil(3) as u64 * stop.as_secs();
            let seconds = seconds_for(all) + stopped + 2;
            let limit = LONG_TIMEOUT + Duration::from_secs(2 * seconds);
            let script = format!("end=$(($(date +%s) + {seconds}))\n{LOAD}\n{loads}");
            let turns = run_for(guest, limit, &script);
            ended.store(true, Ordering::Release);
            turns
        });
        let mut chance = Chance::new();
        let mut pid = keeps.serving(None)?;
        std::thread::sleep(Duration::from_secs(2));
        while killed + upgraded < all && !ended.load(Ordering::Acquire) {
            if (killed + upgraded) % 3 == 0 {
                keeps.signal(pid, Signal::STOP)?;
                std::thread::sleep(stop);
                keeps.signal(pid, Signal::CONT)?;
            }
            std::thread::sleep(Duration::from_micros(20_000 + chance.below(BETWEEN)));
            let left = (all - killed - upgraded) as u64;
            if chance.below(left) < (upgrades - upgraded) as u64 {
                keeps.upgrade()?;
                upgraded += 1;
            } else {
                keeps.kill(pid)?;
                killed += 1;
            }
            pid = keeps.serving(Some(pid))?;
        }
        load.join().unwrap()
    })?;
    let turns = turns.trim().replace('\n', ", ");
    eprintln!("survival: {killed} kills, {upgraded} upgrades; {turns}");
    run(guest, NOTHING_SAID)?;
    ensure!(
        2 * (killed + upgraded) >= all,
        "killed {killed} times only, and upgraded {upgraded} times"
    );
    Ok((killed, upgraded))
}

/// For so many kills.
fn seconds_for(kills: usize) -> u64 {
    4 + kills as u64 * (20_000 + BETWEEN / 2) / 1_000_000
}

/// How long its guest may live.
fn life(kills: usize) -> Duration {
    Duration::from_secs(900 + 4 * seconds_for(kills))
}

/// When a line of the log was written, in seconds of the day.
fn written_at(line: &str) -> Option<f64> {
    let (_, time) = line.split_whitespace().next()?.split_once('T')?;
    let mut parts = time.trim_end_matches('Z').split(':');
    let mut next = || parts.next()?.parse::<f64>().ok();
    Some(next()? * 3600.0 + next()? * 60.0 + next()?)
}

/// How long a virtio disk's front-end waited after each end of its back-end, in milliseconds: from
/// when it was killed until its queues ran again, however many processes started and ended
/// meanwhile.
fn front_end_pauses(log: &str) -> Vec<f64> {
    let served: Vec<f64> = log
        .lines()
        .filter(|line| line.contains("front-end is served"))
        .filter_map(written_at)
        .collect();
    // A process says how long ago the one before it had ended when it began to serve.
    let ended = log.lines().filter_map(|line| {
        let (_, rest) = line.split_once("pause_ms=")?;
        let pause: f64 = rest.split_whitespace().next()?.parse().ok()?;
        Some(written_at(line)? - pause / 1e3)
    });
    let mut pauses: Vec<f64> = ended
        .filter_map(|end| {
            let next = served.iter().find(|at| **at > end)?;
            Some((next - end) * 1e3)
        })
        .collect();
    pauses.sort_by(f64::total_cmp);
    pauses
}

/// A guest with a disk of each kind. The client of NVMe by vfio-user does not notice; the front-end
/// of virtio by vhost-user connects again and reports the requests in flight.
#[test]
fn guest_with_both_disk_kinds_survives_death_of_daemon() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip("survival::both", "the tests run against QEMU's controller");
        return Ok(());
    }
    let (kills, upgrades) = (number("VNVME_KILLS", MORE_KILLS)?, upgrades()?);
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", MIB)?;
    let other = disks.sparse("virtio.raw", MIB)?;
    let socket = disks.dir().join("v");
    let daemon = Daemon::builder("survival-both")
        .arg("--keeper")
        .arg("process")
        .volume(&file)
        .arg("--vhost-user-blk")
        .arg(&socket)
        // Slow, so that there is always something in flight.
        .arg(format!(
            "{}?iops=1500&queues=2&serial=VBLK0",
            other.display()
        ))
        .limit(Duration::from_secs(600) + LIMIT * (kills + upgrades) as u32)
        .start()?;
    let chardev = format!("socket,id=v0,path={},reconnect-ms=10", socket.display());
    let guest = Guest::builder("survival-both")
        .disk(harness::Disk::VfioUser {
            socket: daemon.socket().to_path_buf(),
        })
        .qemu_args(["-chardev", &chardev])
        .qemu_args(["-device", "vhost-user-blk-pci,chardev=v0"])
        .boot()?;
    let loads = r#"
for s in /sys/block/vd*/serial; do [ "$(cat $s)" = VBLK0 ] && q=$(basename ${s%/serial}); done
load /dev/$q virtio & other=$!
load $(wait_disk 1 1) nvme
wait $other"#;
    let (killed, upgraded) = kill_under_load(&guest, &daemon, (kills, upgrades), loads)?;
    let log = daemon.log()?;
    let ended = killed + upgraded;
    let least = ended.div_ceil(2);
    for (what, pauses) in [
        ("NVMe, beside virtio", pauses(&log)),
        ("virtio", front_end_pauses(&log)),
    ] {
        // One that is killed before it serves says nothing; most are not.
        ensure!(
            (least..=ended).contains(&pauses.len()),
            "{what}: {} pauses of {killed} kills and {upgraded} upgrades",
            pauses.len()
        );
        say(what, &pauses);
    }
    let again: u64 = log
        .lines()
        .filter(|line| line.contains("begun again"))
        .filter_map(|line| line.split_once("requests=")?.1.split_whitespace().next())
        .filter_map(|number| number.parse::<u64>().ok())
        .sum();
    eprintln!("survival: virtio: {again} requests were begun again");
    ensure!(again > 0, "nothing was in flight");
    let memory = anonymous(daemon.process().pid())?;
    eprintln!("survival: the keeper has {} KiB of its own", memory >> 10);
    ensure!(memory < 2 << 20, "the keeper has {memory} bytes");
    // A front-end that connects while no process serves waits: none was ever refused.
    ensure!(!log.contains("refused"), "{log}");
    guest.poweroff()?;
    daemon.terminate()?;
    ensure!(!socket.exists(), "the socket is left behind");
    Ok(())
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

/// Kills of what serves each kind of volume, on daemons beside each other: a kill every few seconds
/// leaves a processor idle. The NBD server is slow: it has much of what a killed process has sent,
/// and does it late.
#[test]
fn verified_data_survives_on_every_kind_of_volume() -> Result<()> {
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 64)?;
    let mut volumes: Vec<(&'static str, OsString)> =
        vec![("a file", file.into()), ("memory", "mem://64M".into())];
    let image = disks.dir().join("disk.qcow2").display().to_string();
    let qemu = tree(&QEMU);
    if let Some(tree) = &qemu {
        tree.run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "64M"])?;
        volumes.push(("an image", format!("qcow2://{image}").into()));
    }
    let slow = disks.sparse("slow.raw", 64)?.display().to_string();
    let place = ListenAddress::Unix(disks.dir().join("nbd.sock"));
    let words = [
        "filter:delay",
        "plugin:file",
        &slow,
        "rdelay=1ms",
        "wdelay=20ms",
    ];
    let server = tree(&NBDKIT).map(|tree| nbdkit(&tree, &place, &words));
    let _server = server.transpose()?.inspect(|_| {
        volumes.push(("an NBD server", place.url().into()));
    });
    let kills = kills()?.div_ceil(3);
    let results = std::thread::scope(|scope| {
        let all = volumes.into_iter().map(|(what, volume)| {
            let run = scope.spawn(move || kill_under_bench(what, volume, kills));
            (what, run)
        });
        let all: Vec<_> = all.collect();
        let all = all.into_iter();
        all.map(|(what, run)| (what, run.join().unwrap()))
            .collect::<Vec<_>>()
    });
    let mut checks = Checks::new("survival");
    for (what, result) in results {
        checks.check(what, || result);
    }
    if let Some(tree) = &qemu {
        checks.check("qemu-img finds the image whole", || {
            tree.run("qemu-img", &["check", "-q", &image]).map(drop)
        });
    }
    checks.finish();
    Ok(())
}

const UNIT: &str = "vnvme.service";
const DISKS: &str = r#"
[process]
workers = 2
keeper = "systemd"
[[controller]]
socket = "/run/vnvme/vm0.sock"
namespace = [{ volume = "/var/lib/vnvme/vm0.raw" }]
[[controller]]
socket = "/run/vnvme/vm1.sock"
namespace = [{ volume = "mem://192M" }]
"#;
/// Enough for both disks and their clients.
const MAX_DESCRIPTORS: usize = 512;

/// The unit of the package, in a machine with a real systemd, which keeps at most so many
/// descriptors for it.
fn configure(machine: &Machine, most: usize) -> Result<()> {
    let place = "/etc/systemd/system";
    let unit = fs::read_to_string(checkout().join("packaging/systemd/vnvme.service"))?;
    // There is no such user.
    let unit = unit.replace("User=vnvme\n", "");
    fs::write(machine.path(&format!("{place}/{UNIT}")), unit)?;
    let directory = machine.path(&format!("{place}/{UNIT}.d"));
    fs::create_dir_all(&directory)?;
    // What the documentation has one write beside the unit, and that nothing is closed at the end.
    let text = fs::read_to_string(checkout().join("docs/survival.md"))?;
    let text = text
        .split("```")
        .find(|part| part.contains("FileDescriptorStoreMax="));
    let text = text.context("docs/survival.md has a drop-in")?;
    let text = text.replace("StoreMax=4096", &format!("StoreMax={most}"));
    let text = format!("{text}FileDescriptorStorePreserve=yes\n");
    fs::write(directory.join("keeper.conf"), text)?;
    machine.run(&["systemctl", "daemon-reload"]).map(drop)
}

/// One with the program, and its disks. `None`: it has been said why not.
fn machine() -> Result<Option<Machine>> {
    let cache = Cache::open()?;
    if let Some(reason) = Machine::missing(&cache) {
        skip("systemd: a machine", reason);
        return Ok(None);
    }
    let tree = Tree::fetch(&cache, &PACKAGES, |_| Ok(()))?;
    let machine = Machine::start(&cache, &tree)?;
    fs::copy(program()?, machine.path("/usr/bin/vnvme"))?;
    let version = machine.output(&["vnvme", "--version"])?;
    if String::from_utf8_lossy(&version.stderr).contains("GLIBC") {
        skip("systemd: the package", "this machine's C library is newer");
        return Ok(None);
    }
    ensure!(version.status.success(), "{version:?}");
    for directory in ["/etc/vnvme", "/var/lib/vnvme"] {
        fs::create_dir_all(machine.path(directory))?;
    }
    fs::write(machine.path("/etc/vnvme/vnvme.toml"), DISKS)?;
    let file = fs::File::create(machine.path("/var/lib/vnvme/vm0.raw"))?;
    file.set_len(MIB << 20)?;
    configure(&machine, MAX_DESCRIPTORS)?;
    // systemd keeps nothing of a unit that nobody wants when it stops.
    machine.run(&["systemctl", "add-wants", "test.target", UNIT])?;
    machine.run(&["systemctl", "start", UNIT])?;
    Ok(Some(machine))
}

/// How many descriptors systemd has for the unit.
fn stored(machine: &Machine) -> Result<usize> {
    let text = machine.property(UNIT, "NFileDescriptorStore")?;
    text.parse().context("NFileDescriptorStore")
}

fn wait_stored(machine: &Machine, wanted: usize) -> Result<()> {
    let is_right = |text: &str| text.parse() == Ok(wanted);
    machine
        .wait_property(UNIT, "NFileDescriptorStore", is_right)
        .map(drop)
}

impl Keeps for Machine {
    fn serving(&self, before: Option<i32>) -> Result<i32> {
        let is_next =
            |pid: &str| matches!(pid.parse::<i32>(), Ok(pid) if pid > 0 && Some(pid) != before);
        let pid = self.wait_property(UNIT, "MainPID", is_next)?;
        Ok(pid.parse()?)
    }

    fn signal(&self, pid: i32, signal: Signal) -> Result<()> {
        let signal = format!("-{}", signal.as_raw());
        self.run(&["kill", &signal, &pid.to_string()]).map(drop)
    }

    fn upgrade(&self) -> Result<()> {
        let program = self.path("/usr/bin/vnvme");
        let new = self.path("/usr/bin/vnvme.new");
        fs::copy(&program, &new)?;
        fs::rename(&new, &program)?;
        self.run(&["systemctl", "restart", UNIT]).map(drop)
    }
}

/// Kills between resets, at most: they are about messages, of which one reset has many.
const MAX_RESETS: usize = 40;

/// Resets of both controllers, again and again: many messages, in between which the process is
/// killed.
const RESETS: &str = r#"
one=$(wait_disk 1 1) other=$(wait_disk 2 1) n=0
while [ $(date +%s) -lt $end ]; do
    for disk in $one $other; do
        dd if=/dev/urandom of=/tmp/wanted bs=64k count=1 2>/dev/null
        dd if=/tmp/wanted of=$disk bs=64k seek=2400 oflag=direct 2>/dev/null
        echo 1 >/sys/class/nvme/$(basename ${disk%n*})/reset_controller
        dd if=$disk bs=64k skip=2400 count=1 iflag=direct 2>/dev/null | cmp - /tmp/wanted
        n=$((n + 1))
    done
done
echo $n resets
"#;
const NOTHING_FAILED: &str = r"
dmesg | grep -Ei 'nvme.*(timeout|timed out|abort|error|fail|down|dead|remov)|I/O error' \
    >/tmp/said && { cat /tmp/said; exit 1; }
true";

/// systemd keeps what a process has that is killed, or replaced by `systemctl restart`.
#[test]
fn guest_survives_restart_under_systemd() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip(
            "survival::systemd",
            "the tests run against QEMU's controller",
        );
        return Ok(());
    }
    let Some(machine) = machine()? else {
        return Ok(());
    };
    let (kills, upgrades) = (kills()?, upgrades()?);
    let idle = stored(&machine)?;
    ensure!(idle > 0, "nothing is stored");
    let disk = |name: &str| harness::Disk::VfioUser {
        socket: machine.path(&format!("/run/vnvme/{name}.sock")),
    };
    let guest = Guest::builder("survival-systemd")
        .disk(disk("vm0"))
        .disk(disk("vm1"))
        .limit(life(kills + upgrades))
        .boot()?;
    kill_under_load(&guest, &machine, (kills, upgrades), BOTH)?;
    let busy = stored(&machine)?;
    ensure!(
        busy > idle,
        "{busy} are stored, and {idle} without a client"
    );
    ensure!(busy < MAX_DESCRIPTORS, "{busy} are stored");
    // In between messages.
    std::thread::scope(|scope| -> Result<()> {
        let resets = scope.spawn(|| {
            let seconds = seconds_for(kills.min(MAX_RESETS));
            let limit = 2 * LONG_TIMEOUT + Duration::from_secs(seconds);
            run_for(
                &guest,
                limit,
                &format!("end=$(($(date +%s) + {seconds}))\n{RESETS}"),
            )
        });
        let mut chance = Chance::new();
        let mut pid = machine.serving(None)?;
        while !resets.is_finished() {
            std::thread::sleep(Duration::from_micros(20_000 + chance.below(BETWEEN / 2)));
            machine.kill(pid)?;
            pid = machine.serving(Some(pid))?;
        }
        eprintln!("survival: {}", resets.join().unwrap()?.trim());
        Ok(())
    })?;
    run(&guest, NOTHING_FAILED).with_context(|| machine.journal(UNIT).unwrap_or_default())?;
    // What systemd does meanwhile is of no interest.
    for command in ["daemon-reload", "daemon-reexec"] {
        machine.run(&["systemctl", command])?;
        let pid = machine.serving(None)?;
        machine.kill(pid)?;
        machine.serving(Some(pid))?;
    }
    run(
        &guest,
        "dd if=$(wait_disk 2 1) of=/dev/null bs=1M count=8 iflag=direct 2>/dev/null",
    )?;
    guest.poweroff()?;
    let journal = machine.journal(UNIT)?;
    ensure!(
        !journal.contains("is disconnected") && !journal.contains("will not outlive"),
        "{journal}"
    );
    // Nothing of the clients is left, and at the end nothing at all.
    wait_stored(&machine, idle)?;
    machine.run(&["systemctl", "stop", UNIT])?;
    wait_stored(&machine, 0)
}

/// A store that is full is done without.
#[test]
fn full_systemd_store_is_reported() -> Result<()> {
    let Some(machine) = machine()? else {
        return Ok(());
    };
    let idle = stored(&machine)?;
    machine.run(&["systemctl", "stop", UNIT])?;
    wait_stored(&machine, 0)?;
    // There is room for the client's socket, and not for its memory.
    configure(&machine, idle + 1)?;
    machine.run(&["systemctl", "start", UNIT])?;
    let socket = machine.path("/run/vnvme/vm1.sock");
    let output = load(&socket, 2)?.wait_with_output()?;
    let journal = machine.journal(UNIT)?;
    ensure!(output.status.success(), "{output:?}\n{journal}");
    ensure!(
        journal.contains("descriptors are kept already"),
        "{journal}"
    );
    // One that does not outlive its process is there for the next client.
    let pid = machine.serving(None)?;
    machine.kill(pid)?;
    machine.serving(Some(pid))?;
    machine.wait_property(UNIT, "ActiveState", |state| state == "active")?;
    let output = load(&socket, 1)?.wait_with_output()?;
    ensure!(
        output.status.success(),
        "{output:?}\n{}",
        machine.journal(UNIT)?
    );
    machine.run(&["systemctl", "stop", UNIT])?;
    wait_stored(&machine, 0)
}
