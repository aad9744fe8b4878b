//! Units that are promised to be atomic are whole after each cut; without the promise they are not.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use dma::{Buffer, SegmentList};
use fuse_disk::{Disk, Random, SECTOR};
use harness::Daemon;
use volume::{AtomicVolume, Completion, Io, Op, OpenQueue, Request, Volume};

use crate::common::Disks;
use crate::power_cut::{BOUND, Loop, SILENCE, cuts, url};

const UNIT: usize = 16 << 10;
const UNITS: usize = 64;
/// Requests in flight.
const DEPTH: usize = 8;

/// What a unit holds, as far as has been acknowledged, and a write that has not been.
#[derive(Clone)]
struct Unit {
    known: Vec<u8>,
    /// First byte, and data.
    write: Option<(usize, Vec<u8>)>,
}

impl Unit {
    fn with_write(&self) -> Vec<u8> {
        let mut bytes = self.known.clone();
        if let Some((at, data)) = &self.write {
            bytes[*at..at + data.len()].copy_from_slice(data);
        }
        bytes
    }
}

/// What was found after the cuts.
#[derive(Debug, Default)]
struct CutResults {
    writes: u64,
    /// Units with a last write under way: it is there, it is not, or in part.
    new: usize,
    old: usize,
    torn: usize,
}

struct Load {
    units: Vec<Unit>,
    random: Random,
    /// Units by the tags of their writes.
    asked: HashMap<u64, usize>,
    next_tag: u64,
    found: CutResults,
}

impl Load {
    fn new(seed: u64) -> Self {
        let unit = Unit {
            known: vec![0; UNIT],
            write: None,
        };
        Self {
            units: vec![unit; UNITS],
            random: Random::new(seed),
            asked: HashMap::new(),
            next_tag: 0,
            found: CutResults::default(),
        }
    }

    /// A durable write of any length within a unit.
    fn request(&mut self) -> Request {
        self.next_tag += 1;
        let number = loop {
            let number = self.random.below(UNITS as u64) as usize;
            if self.units[number].write.is_none() {
                break number;
            }
        };
        let sectors = (UNIT / SECTOR) as u64;
        let first = self.random.below(sectors);
        let count = 1 + self.random.below(sectors - first);
        let stamp = self.next_tag.to_le_bytes();
        let bytes = stamp.iter().cycle().copied();
        let data: Vec<u8> = bytes.take(count as usize * SECTOR).collect();
        let at = first as usize * SECTOR;
        let offset = (number * UNIT + at) as u64;
        let buffer = SegmentList::owned(Buffer::from_slice(&data));
        self.units[number].write = Some((at, data));
        self.asked.insert(self.next_tag, number);
        Request::transfer(self.next_tag, Op::Write { fua: true }, offset, buffer)
    }

    fn completed(&mut self, done: &Completion) -> bool {
        let Some(number) = self.asked.remove(&done.tag) else {
            return true;
        };
        let unit = &mut self.units[number];
        if done.result.is_ok() {
            unit.known = unit.with_write();
            unit.write = None;
            self.found.writes += 1;
        }
        done.result.is_ok()
    }

    /// Works until the power is off, and nothing completes any more.
    fn work(&mut self, io: &Io, queue: &mut OpenQueue, disk: &Disk) -> Result<()> {
        let (began, mut cut_at, mut failed) = (Instant::now(), None, false);
        let mut arrived = Vec::new();
        loop {
            ensure!(began.elapsed() < BOUND, "{} hang", self.asked.len());
            while !failed && self.asked.len() < DEPTH {
                let request = self.request();
                arrived.extend(queue.submit(request));
            }
            queue.push();
            io.flush();
            io.poll(&mut |completion| arrived.push(completion));
            queue.poll(&mut |completion| arrived.push(completion));
            for completion in arrived.drain(..) {
                failed |= !self.completed(&completion);
            }
            if disk.wait_cut(std::time::Duration::ZERO).is_some() {
                cut_at.get_or_insert_with(Instant::now);
            }
            if failed || cut_at.is_some_and(|at| at.elapsed() > SILENCE) {
                return Ok(());
            }
        }
    }

    /// Compares what is there with what may be.
    fn check(&mut self, bytes: &[u8]) -> Result<()> {
        self.asked.clear();
        for (number, found) in bytes.chunks(UNIT).enumerate().take(UNITS) {
            let unit = &mut self.units[number];
            let after = unit.with_write();
            if unit.write.take().is_none() {
                ensure!(
                    *found == *unit.known,
                    "unit {number} has lost what was durable"
                );
                continue;
            }
            match found {
                found if *found == *after => self.found.new += 1,
                found if *found == *unit.known => self.found.old += 1,
                _ => self.found.torn += 1,
            }
            unit.known = found.to_vec();
        }
        Ok(())
    }
}

/// Everything, as a client reads it.
fn read(io: &Io, queue: &mut OpenQueue) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for number in 0..UNITS {
        let data = SegmentList::owned(Buffer::new(UNIT));
        let request = Request::transfer(1, Op::Read, (number * UNIT) as u64, data);
        let (began, mut done) = (Instant::now(), queue.submit(request));
        while done.is_none() {
            ensure!(began.elapsed() < BOUND, "a read hangs");
            queue.push();
            io.flush();
            io.poll(&mut |completion| done = Some(completion));
            queue.poll(&mut |completion| done = Some(completion));
        }
        let done = done.context("a completion")?;
        ensure!(done.result.is_ok(), "{:?}", done.result);
        let buffer = done.data.into_buffer().context("its buffer")?;
        bytes.extend_from_slice(&buffer);
    }
    Ok(bytes)
}

/// Cuts the power again and again under writes of one unit each. Nothing, with a line that says so,
/// where it cannot be.
fn cut_again_and_again(what: &str, atomic: bool) -> Result<Option<CutResults>> {
    let skip = |why: String| {
        testkit::skip(&format!("power_cut::units::{what}"), why);
        Ok(None)
    };
    let disks = Disks::new()?;
    let volume = UNITS * UNIT;
    let journal = AtomicVolume::journal_len(UNIT as u32) as usize;
    let disk = match Disk::new(&disks.dir().join("mount"), volume + journal) {
        Ok(disk) => disk,
        Err(error) => return skip(format!("/dev/fuse: {error}")),
    };
    // Both on one disk, which has one power.
    let devices = [(0, volume), (volume, journal)];
    let devices = devices.map(|(from, len)| Loop::part(&disk.path(), from, len));
    let [data, journal] = match devices {
        [Ok(data), Ok(journal)] => [data, journal],
        [Err(error), _] | [_, Err(error)] => return skip(format!("{error:#}")),
    };
    let served = if atomic {
        format!(
            "{}?atomic=16K&atomic-journal={}",
            data.0.display(),
            journal.0.display()
        )
    } else {
        data.0.display().to_string()
    };
    let expected = if atomic { UNIT as u32 } else { SECTOR as u32 };
    let mut load = Load::new(21);
    // Whether one is torn is a matter of chance: until one is.
    let most = if atomic { cuts() } else { 10 * cuts() };
    for number in 0..most {
        if !atomic && load.found.torn > 0 {
            break;
        }
        let start = || -> Result<_> {
            let daemon = Daemon::builder("power-cut-units")
                .arg("--keeper")
                .arg("off")
                .volume(&served)
                .start()?;
            let device = driver::open(&url(&daemon)).map_err(|error| anyhow::anyhow!("{error}"))?;
            let io = Io::new(Default::default());
            let queue = device.open(&io)?;
            ensure!(device.atomic_writes().unit() == expected, "the promise");
            Ok((daemon, io, queue, device))
        };
        let (daemon, io, mut queue, device) = start()?;
        let longest = [50, 300, 1000][load.random.below(3) as usize];
        let after = load.random.below(longest);
        let seed = load.random.below(u64::MAX);
        disk.cut_after(after, Random::new(seed));
        load.work(&io, &mut queue, &disk)?;
        disk.wait_cut(BOUND).context("no cut")?;
        daemon.kill()?;
        drop((queue, io, device, daemon));
        disk.power_on();
        let (daemon, io, mut queue, device) = start()?;
        let bytes = read(&io, &mut queue)?;
        load.check(&bytes)
            .with_context(|| format!("after cut {number}, {:?}", load.found))?;
        drop((queue, io, device));
        daemon.kill()?;
    }
    eprintln!("power_cut: units: {what}: {:?}", load.found);
    Ok(Some(load.found))
}

#[test]
fn promised_units_are_whole_after_every_cut() -> Result<()> {
    if let Some(found) = cut_again_and_again("promised", true)? {
        ensure!(found.torn == 0, "{found:?}");
        // Else it says nothing.
        ensure!(found.new > 0 && found.old > 0, "{found:?}");
    }
    Ok(())
}

/// The check itself can fail.
#[test]
fn unpromised_units_are_torn() -> Result<()> {
    if let Some(found) = cut_again_and_again("not_promised", false)? {
        ensure!(found.torn > 0, "{found:?}");
    }
    Ok(())
}
