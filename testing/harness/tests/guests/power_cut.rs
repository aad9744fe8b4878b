//! The power of the disk below is cut under load: what was acknowledged as durable must be there.
//!
//! The disk is a FUSE file (`fuse_disk::Disk`), or a block device on it, that keeps what was not
//! flushed in memory; a cut loses a random part of that, sector by sector, and what the kernel
//! still holds. The load is that of this project's own driver, or of a guest with ext4.
//!
//! `VNVME_CUTS` is how often the power is cut in each way (10; before a release: 200).

mod units;

use std::collections::HashMap;
use std::ops::Range;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{Disks, LONG_TIMEOUT, run, run_for};
use anyhow::{Context, Result, bail, ensure};
use dma::{Buffer, SegmentList};
use fuse_disk::{Disk, Fault, Random, RequestKind, SECTOR};
use harness::served::Volumes;
use harness::{Daemon, Guest};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use volume::{Completion, Io, Op, OpenQueue, Request, Volume};

const BLOCK: usize = 4096;
const BLOCKS: usize = 1024;
/// Requests in flight.
const DEPTH: usize = 16;
/// After a cut, until nothing more is expected of a process that was killed before it.
const SILENCE: Duration = Duration::from_secs(1);
/// Only a hang takes so long.
const BOUND: Duration = Duration::from_secs(60);

fn cuts() -> u64 {
    let said = std::env::var("VNVME_CUTS").ok();
    said.and_then(|text| text.parse().ok()).unwrap_or(10)
}

/// A loop device, taken away when it is dropped.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path) -> Result<Self> {
        Self::with(file, &[])
    }

    /// Of `len` bytes from byte `from` on.
    fn part(file: &Path, from: usize, len: usize) -> Result<Self> {
        let place = [format!("--offset={from}"), format!("--sizelimit={len}")];
        Self::with(file, &place)
    }

    fn with(file: &Path, place: &[String]) -> Result<Self> {
        let losetup = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .args(place)
            .arg(file)
            .output()
            .context("losetup")?;
        let said = String::from_utf8_lossy(&losetup.stderr);
        ensure!(losetup.status.success(), "losetup: {}", said.trim());
        Ok(Self(String::from_utf8_lossy(&losetup.stdout).trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// A disk with power that can be cut, and the way to reach it.
struct BackingDisk {
    // Dropped first.
    device: Option<Loop>,
    disk: Disk,
}

impl BackingDisk {
    /// Nothing, with a line that says so, where it cannot be had.
    fn new(what: &str, dir: &Path, size: usize, block_device: bool) -> Option<Self> {
        let skip = |why: String| {
            testkit::skip(&format!("power_cut::{what}"), why);
            None
        };
        let disk = match Disk::new(&dir.join("mount"), size) {
            Ok(disk) => disk,
            Err(error) => return skip(format!("/dev/fuse: {error}")),
        };
        let device = match block_device.then(|| Loop::new(&disk.path())).transpose() {
            Ok(device) => device,
            Err(error) => return skip(format!("{error:#}")),
        };
        Some(Self { device, disk })
    }

    fn path(&self) -> PathBuf {
        let device = self.device.as_ref().map(|device| device.0.clone());
        device.unwrap_or_else(|| self.disk.path())
    }
}

/// Versions of a block: each write has its own, and every sector of it names it.
#[derive(Clone, Copy, Default)]
struct State {
    /// Of the last write that was submitted.
    submitted: u32,
    /// Of the last one that has completed.
    completed: u32,
    /// At least this one must be there after a cut.
    durable: u32,
    in_flight: bool,
}

enum SentRequest {
    Write {
        blocks: Range<usize>,
        fua: bool,
    },
    /// What had completed when it was submitted.
    Flush(Vec<u32>),
}

/// What has happened in all.
#[derive(Debug, Default)]
struct Tally {
    writes: u64,
    durable_writes: u64,
    flushes: u64,
    volatile: usize,
    lost: usize,
    torn: usize,
}

/// The load, and what must be left of it.
struct Load {
    random: Random,
    blocks: Vec<State>,
    asked: HashMap<u64, SentRequest>,
    next_tag: u64,
    /// Of a hundred requests so many are flushes, and of a hundred writes so many are durable.
    flushes: u64,
    durable: u64,
    tally: Tally,
}

fn sector(block: usize, version: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(block as u64).to_le_bytes());
    bytes[8..].copy_from_slice(&u64::from(version).to_le_bytes());
    bytes
}

impl Load {
    fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            blocks: vec![State::default(); BLOCKS],
            asked: HashMap::new(),
            next_tag: 1,
            flushes: 25,
            durable: 20,
            tally: Tally::default(),
        }
    }

    fn request(&mut self) -> Request {
        self.next_tag += 1;
        let tag = self.next_tag;
        if self.random.percent(self.flushes) {
            let completed = self.blocks.iter().map(|block| block.completed).collect();
            self.asked.insert(tag, SentRequest::Flush(completed));
            return Request::transfer(tag, Op::Flush, 0, SegmentList::new());
        }
        let (first, count) = loop {
            let count = 1 + self.random.below(8) as usize;
            let first = self.random.below((BLOCKS - count) as u64) as usize;
            if !self.blocks[first..first + count]
                .iter()
                .any(|b| b.in_flight)
            {
                break (first, count);
            }
        };
        let mut buffer = Buffer::new(count * BLOCK);
        for (number, bytes) in (first..).zip(buffer.chunks_mut(BLOCK)) {
            let state = &mut self.blocks[number];
            state.submitted += 1;
            state.in_flight = true;
            let words = sector(number, state.submitted);
            bytes
                .chunks_mut(16)
                .for_each(|part| part.copy_from_slice(&words));
        }
        let fua = self.random.percent(self.durable);
        let blocks = first..first + count;
        self.asked.insert(tag, SentRequest::Write { blocks, fua });
        let (op, at) = (Op::Write { fua }, (first * BLOCK) as u64);
        Request::transfer(tag, op, at, SegmentList::owned(buffer))
    }

    fn completed(&mut self, done: &Completion) -> bool {
        let ok = done.result.is_ok();
        match self.asked.remove(&done.tag) {
            Some(SentRequest::Write { blocks, fua }) => {
                for block in &mut self.blocks[blocks] {
                    block.in_flight = false;
                    if ok {
                        block.completed = block.submitted;
                        block.durable = if fua { block.submitted } else { block.durable };
                    }
                }
                self.tally.writes += u64::from(ok);
                self.tally.durable_writes += u64::from(ok && fua);
            }
            Some(SentRequest::Flush(covered)) if ok => {
                self.tally.flushes += 1;
                for (block, version) in self.blocks.iter_mut().zip(covered) {
                    block.durable = block.durable.max(version);
                }
            }
            _ => {}
        }
        ok
    }

    /// Works until a request fails, and what is in flight then has ended; or, without that, until
    /// the power is off.
    fn work(
        &mut self,
        io: &Io,
        queue: &mut OpenQueue,
        disk: &Disk,
        to_the_end: bool,
    ) -> Result<()> {
        // Loads that sync after each few writes, as databases do, and those that rarely do.
        self.flushes = [2, 10, 25, 50][self.random.below(4) as usize];
        self.durable = [0, 5, 20][self.random.below(3) as usize];
        let began = Instant::now();
        let (mut arrived, mut failed, mut cut_at) = (Vec::new(), false, None);
        while !(failed && self.asked.is_empty()) {
            ensure!(
                began.elapsed() < BOUND,
                "{} requests hang",
                self.asked.len()
            );
            while !failed && self.asked.len() < DEPTH {
                let request = self.request();
                arrived.extend(queue.submit(request));
            }
            queue.push();
            io.flush();
            io.poll(&mut |completion| arrived.push(completion));
            queue.poll(&mut |completion| arrived.push(completion));
            for completion in arrived.drain(..) {
                let ok = self.completed(&completion);
                let cut = || disk.wait_cut(Duration::ZERO).is_some();
                ensure!(ok || cut(), "before the cut: {:?}", completion.result);
                failed |= !ok;
            }
            // A process that was killed, and finds no disk when it is started again, sends nothing
            // any more.
            if disk.wait_cut(Duration::ZERO).is_some() {
                cut_at.get_or_insert_with(Instant::now);
            }
            let late = cut_at.is_some_and(|at| at.elapsed() > SILENCE);
            if (failed || late) && !to_the_end {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Compares what is left with what must be.
    fn check(&mut self, bytes: &[u8]) -> Result<()> {
        for (number, data) in bytes.chunks(BLOCK).enumerate().take(BLOCKS) {
            let state = &mut self.blocks[number];
            let mut oldest = u32::MAX;
            for (at, found) in data.chunks(SECTOR).enumerate() {
                let version = u64::from_le_bytes(found[8..16].try_into()?) as u32;
                let whole = match version {
                    0 => found.iter().all(|byte| *byte == 0),
                    _ => found.chunks(16).all(|part| part == sector(number, version)),
                };
                ensure!(
                    whole,
                    "sector {at} of block {number} is nothing that was written"
                );
                ensure!(
                    (state.durable..=state.submitted).contains(&version),
                    "sector {at} of block {number} has version {version}; {} was acknowledged as \
                     durable, and {} was the last",
                    state.durable,
                    state.submitted
                );
                oldest = oldest.min(version);
            }
            *state = State {
                submitted: state.submitted,
                // What is on the medium now stays there.
                completed: oldest,
                durable: oldest,
                in_flight: false,
            };
        }
        Ok(())
    }
}

fn url(daemon: &Daemon) -> String {
    format!("vfio-user://{}/1", daemon.socket().display())
}

/// Kills the process that serves a few times, until that or the disk's power is over. Answers how
/// often.
fn kill_meanwhile(daemon: &Daemon, disk: &Disk, random: &mut Random) -> Result<u64> {
    let mut killed = 0;
    // More in ten seconds, and the keeper has each wait for a second.
    for _ in 0..1 + random.below(3) {
        std::thread::sleep(Duration::from_millis(random.below(90)));
        if disk.wait_cut(Duration::ZERO).is_some() {
            break;
        }
        let serving = i32::try_from(daemon.serving())?;
        if serving == i32::try_from(daemon.process().pid())? {
            // The next one is about to be started.
            continue;
        }
        match kill_process(Pid::from_raw(serving).context("pid")?, Signal::KILL) {
            // It has found no disk, and has ended by itself.
            Err(Errno::SRCH) => continue,
            sent => sent?,
        }
        killed += 1;
    }
    Ok(killed)
}

/// Serves, works, cuts the power, looks, again and again; with the process killed in between, if
/// that is to be. Answers how often it was.
fn cut_again_and_again(
    below: &BackingDisk,
    load: &mut Load,
    cuts: u64,
    kills: bool,
) -> Result<u64> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("manager");
    let manager = UnixDatagram::bind(&path)?;
    manager.set_read_timeout(Some(BOUND))?;
    let mut killed = 0;
    for number in 0..cuts {
        let daemon = Daemon::builder("power-cut")
            .env("NOTIFY_SOCKET", &path)
            .arg("--keeper")
            .arg(if kills { "process" } else { "off" })
            .volume(below.path())
            .start()?;
        // One that is killed before it serves is not followed.
        let mut message = [0; 64];
        while !message.starts_with(b"READY=1") {
            message = [0; 64];
            manager.recv(&mut message)?;
        }
        let device = driver::open(&url(&daemon)).map_err(|error| anyhow::anyhow!("{error}"))?;
        let io = Io::new(Default::default());
        let mut queue = device.open(&io)?;
        // Between any two requests of the kernel's; most come soon.
        let after = [50, 300, 1000][load.random.below(3) as usize];
        let after = load.random.below(after);
        let seed = load.random.below(u64::MAX);
        below.disk.cut_after(after, Random::new(seed));
        // Sometimes the machine stops with its disk, sometimes the answers still arrive.
        let to_the_end = !kills && load.random.percent(50);
        let mut random = Random::new(load.random.below(u64::MAX));
        killed += std::thread::scope(|scope| -> Result<u64> {
            let killer =
                kills.then(|| scope.spawn(|| kill_meanwhile(&daemon, &below.disk, &mut random)));
            load.work(&io, &mut queue, &below.disk, to_the_end)?;
            killer.map_or(Ok(0), |killer| killer.join().unwrap())
        })?;
        let cut = below.disk.wait_cut(BOUND).context("no cut")?;
        load.tally.volatile += cut.volatile;
        load.tally.lost += cut.lost;
        load.tally.torn += cut.torn;
        // A process that found no disk has ended, and its keeper with it.
        match daemon.kill() {
            Err(_) if kills && daemon.must_live().is_err() => {}
            killed => killed?,
        }
        drop((queue, io, device));
        load.asked.clear();
        drop(daemon);
        below.disk.power_on();
        let bytes = below.disk.bytes(0..BLOCKS * BLOCK);
        load.check(&bytes)
            .with_context(|| format!("after cut {number}, {:?}", load.tally))?;
    }
    Ok(killed)
}

fn nothing_durable_is_lost(what: &str, block_device: bool, kills: bool) -> Result<()> {
    let disks = Disks::new()?;
    let Some(below) = BackingDisk::new(what, disks.dir(), BLOCKS * BLOCK, block_device) else {
        return Ok(());
    };
    let mut load = Load::new(if block_device { 11 } else { 7 });
    let cuts = cuts();
    let (mut done, mut killed) = (0, 0);
    // On a machine that is busy little has happened when the power is cut, or it is cut before the
    // process is killed: then there are more cuts.
    let says_something = |tally: &Tally, killed: u64| {
        let durable = tally.flushes > cuts && tally.durable_writes > cuts;
        durable && tally.lost > 0 && tally.torn > 0 && (!kills || killed >= cuts / 4)
    };
    while done < 10 * cuts && !says_something(&load.tally, killed) {
        killed += cut_again_and_again(&below, &mut load, cuts, kills)?;
        done += cuts;
    }
    let tally = &load.tally;
    eprintln!("power_cut: {what}: {done} cuts, {killed} kills: {tally:?}");
    ensure!(says_something(tally, killed), "{killed} kills, {tally:?}");
    Ok(())
}

#[test]
fn file_survives_power_loss() -> Result<()> {
    nothing_durable_is_lost("file", false, false)
}

#[test]
fn block_device_survives_power_loss() -> Result<()> {
    nothing_durable_is_lost("block_device", true, false)
}

#[test]
fn disk_survives_kills_and_power_loss() -> Result<()> {
    nothing_durable_is_lost("file_and_kills", false, true)?;
    nothing_durable_is_lost("block_device_and_kills", true, true)
}

/// The check itself can fail: a disk that answers flushes and does nothing loses what it promised.
#[test]
fn lying_disk_is_detected() -> Result<()> {
    let disks = Disks::new()?;
    let Some(below) = BackingDisk::new("lying_disk", disks.dir(), BLOCKS * BLOCK, false) else {
        return Ok(());
    };
    below
        .disk
        .fail(RequestKind::Sync, 0..u64::MAX, u64::MAX, Fault::Lie);
    let mut load = Load::new(5);
    match cut_again_and_again(&below, &mut load, 20, false) {
        Ok(_) => bail!("nobody noticed: {:?}", load.tally),
        Err(error) if format!("{error:#}").contains("acknowledged as durable") => Ok(()),
        Err(error) => Err(error),
    }
}

/// A guest writes files and syncs each; after the cut its file system is whole, and every file is
/// there that it said was synced.
#[test]
fn synced_guest_files_survive_power_loss() -> Result<()> {
    let disks = Disks::new()?;
    let what = "a_guest";
    let Some(below) = BackingDisk::new(what, disks.dir(), 192 << 20, true) else {
        return Ok(());
    };
    let mut random = Random::new(3);
    for round in 0..2 {
        let served = Volumes::file("power-cut-guest", below.path()).serve()?;
        let guest = Guest::builder("power-cut").disk(served.disk()).boot()?;
        if round == 0 {
            run_for(
                &guest,
                LONG_TIMEOUT,
                "d=$(wait_disk 1 1); mkfs.ext4 -q -F -E nodiscard $d; sync",
            )?;
        }
        // Each file has its own name in it, many times, and is told of when its fsync is over,
        // which on ext4 makes its name durable, too.
        run(
            &guest,
            &format!(
                "d=$(wait_disk 1 1); mount $d /mnt; mkdir -p /mnt/{round}
                 work() {{
                     n=0
                     while :; do
                         n=$((n + 1)); f=/mnt/{round}/$1-$n
                         yes $1-$n | head -c $((4096 * (1 + n % 9))) |
                             dd of=$f bs=64k iflag=fullblock conv=fsync && echo synced $1-$n >&4
                     done
                 }}
                 for w in a b c; do (work $w </dev/null >/dev/null 2>&1 &); done"
            ),
        )?;
        let enough = |lines: &[String]| synced(lines).len() >= 60;
        guest.events().wait(Duration::from_secs(120), enough)?;
        std::thread::sleep(Duration::from_millis(random.below(400)));
        let cut = below.disk.cut(&mut random);
        let names = synced(&guest.events().all());
        guest.kill()?;
        served.daemon()?.kill()?;
        drop((guest, served));
        below.disk.power_on();
        eprintln!(
            "power_cut: guest: {} files were synced; {cut:?}",
            names.len()
        );

        let served = Volumes::file("power-cut-after", below.path()).serve()?;
        let guest = Guest::builder("power-cut-after")
            .disk(served.disk())
            .boot()?;
        let list = names.join(" ");
        run_for(
            &guest,
            LONG_TIMEOUT,
            &format!(
                "d=$(wait_disk 1 1); mount $d /mnt
                 for f in {list}; do
                     [ -s /mnt/{round}/$f ] || {{ echo $f is lost; exit 1; }}
                     n=${{f#*-}}; want=$((4096 * (1 + n % 9)))
                     [ $(stat -c %s /mnt/{round}/$f) = $want ] || {{ echo $f is short; exit 1; }}
                     yes $f | head -c $want | cmp - /mnt/{round}/$f || {{ echo $f differs; exit 1; }}
                 done
                 umount /mnt; e2fsck -f -n $d"
            ),
        )?;
        guest.poweroff()?;
        served.finish()?;
    }
    Ok(())
}

/// What the guest has told of; the last line may be cut off.
fn synced(lines: &[String]) -> Vec<String> {
    let told = lines.iter().filter_map(|line| line.strip_prefix("synced "));
    told.map(str::to_owned).collect()
}
