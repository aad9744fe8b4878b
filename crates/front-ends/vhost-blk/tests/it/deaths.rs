//! A back-end that dies between any two of its stores, under load: the next one continues, each
//! request ends once, no interrupt is missing, and the disk has what was written last.

use crate::common::driver::{FLUSH, SIZE};
use crate::common::*;
use crash::Crashed;
use dma::Memory;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VringConfigData};
use vhost_blk::DiskOptions;
use volume::{IoOptions, MemVolume, Volume};
use worker::IdleWindow;

/// All crash points of this crate, and how often each is passed before at most.
const POINTS: [(&str, u64); 26] = [
    ("vhost-blk.call.sent", 30),
    ("vhost-blk.fetch.found", 60),
    ("vhost-blk.inflight.batched", 60),
    ("vhost-blk.inflight.begun", 60),
    ("vhost-blk.inflight.chained", 60),
    ("vhost-blk.inflight.counted", 60),
    ("vhost-blk.inflight.retired", 60),
    ("vhost-blk.inflight.settled", 30),
    ("vhost-blk.message.answered", 12),
    ("vhost-blk.message.handled", 20),
    ("vhost-blk.message.taken", 20),
    ("vhost-blk.plain.answered", 60),
    ("vhost-blk.plain.batched", 30),
    ("vhost-blk.plain.chained", 30),
    ("vhost-blk.plain.written", 60),
    ("vhost-blk.queue.begun", 2),
    ("vhost-blk.queue.recovered", 2),
    ("vhost-blk.recover.cleared", 2 * SIZE as u64),
    ("vhost-blk.recover.retired", 1),
    ("vhost-blk.recover.settled", 2),
    ("vhost-blk.status.written", 60),
    ("vhost-blk.submit.before", 60),
    ("vhost-blk.submit.submitted", 60),
    ("vhost-blk.used.published", 30),
    ("vhost-blk.used.written", 60),
    ("vhost-blk.write-cache.noted", 1),
];
/// How often it dies at each (6; before a release: 20).
fn deaths() -> u64 {
    let said = std::env::var("VNVME_DEATHS").ok();
    said.and_then(|text| text.parse().ok()).unwrap_or(6)
}

/// Sectors that one request at a time is on.
const PLACE: u64 = 8;
const PLACES: usize = 48;
/// Requests that are in flight at most, of each queue.
const DEPTH: usize = 12;
const QUEUES: usize = 2;

/// Numbers that are the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// A request in flight.
enum InFlight {
    Write(usize, u64),
    Read(usize),
    Flush,
}

/// A guest with back-ends that die.
struct World {
    random: Random,
    memory: Memory,
    queues: Vec<Driver>,
    asked: Vec<BTreeMap<u16, InFlight>>,
    /// It waits for an interrupt of the queue, whatever becomes of the back-end meanwhile.
    asleep: [bool; QUEUES],
    /// What was written last of each place, and whether a request is on it now.
    places: Vec<(u64, bool)>,
    writes: u64,
    ended: u64,
    inflight: Option<(VhostUserInflight, File)>,
}

/// The back-end has closed the connection.
struct BackendClosed;

impl<E: std::error::Error> From<E> for BackendClosed {
    fn from(_: E) -> BackendClosed {
        BackendClosed
    }
}

fn content(place: usize, write: u64) -> Vec<u8> {
    match write {
        0 => vec![0; PLACE as usize * 512],
        write => pattern(write << 8 | place as u64, PLACE as usize * 512),
    }
}

impl World {
    fn new() -> World {
        let memory = Memory::anonymous(MEMORY).unwrap();
        let features = F_VERSION_1 | F_EVENT_IDX | F_INDIRECT;
        let queue = |index| Driver::new(&memory, index, index as u64 * (1 << 20), features);
        World {
            random: Random(0x9e37_79b9_7f4a_7c15),
            queues: (0..QUEUES).map(queue).collect(),
            memory,
            asked: (0..QUEUES).map(|_| BTreeMap::new()).collect(),
            asleep: [false; QUEUES],
            places: vec![(0, false); PLACES],
            writes: 0,
            ended: 0,
            inflight: None,
        }
    }

    /// As a VMM connects (again).
    fn connect(&mut self, path: &Path) -> Result<Frontend, BackendClosed> {
        let mut frontend = Frontend::connect(path, 128)?;
        frontend.set_owner()?;
        let features = frontend.get_features()?;
        frontend.set_features(features)?;
        let protocol = frontend.get_protocol_features()?;
        frontend.set_protocol_features(protocol)?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_mem_table(&[region(&self.memory)])?;
        if self.inflight.is_none() {
            let asked = VhostUserInflight::new(0, 0, QUEUES as u16, SIZE);
            self.inflight = Some(frontend.get_inflight_fd(&asked)?);
        }
        let (description, file) = self.inflight.as_ref().unwrap();
        frontend.set_inflight_fd(description, file.as_raw_fd())?;
        frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[1])?;
        for driver in &self.queues {
            let user = |guest: u64| USER_BASE + guest;
            let config = VringConfigData {
                queue_max_size: SIZE,
                queue_size: SIZE,
                flags: 0,
                desc_table_addr: user(driver.descriptors()),
                used_ring_addr: user(driver.used()),
                avail_ring_addr: user(driver.available()),
                log_addr: None,
            };
            let index = driver.index;
            frontend.set_vring_num(index, SIZE)?;
            // As QEMU, which knows no better when its back-end is dead.
            frontend.set_vring_base(index, driver.used_idx())?;
            frontend.set_vring_addr(index, &config)?;
            frontend.set_vring_call(index, &driver.call)?;
            frontend.set_vring_kick(index, &driver.kick)?;
            frontend.set_vring_enable(index, true)?;
            driver.kick.write(1).unwrap();
        }
        Ok(frontend)
    }

    /// A few new requests on a queue.
    fn ask(&mut self, queue: usize) {
        for _ in 0..self.random.below(6) + 1 {
            if self.asked[queue].len() >= DEPTH {
                break;
            }
            let place = self.random.below(PLACES as u64) as usize;
            let sector = place as u64 * PLACE;
            if self.places[place].1 {
                continue;
            }
            let (slot, asked) = match self.random.below(16) {
                0 => {
                    let request = Req::new(FLUSH, 0, Data::None);
                    (self.queues[queue].post(request), InFlight::Flush)
                }
                1..7 => {
                    let request = Req::read(sector, PLACE as usize * 512);
                    (self.queues[queue].post(request), InFlight::Read(place))
                }
                _ => {
                    self.writes += 1;
                    let bytes = content(place, self.writes);
                    let slot = self.queues[queue].post(Req::write(sector, &bytes));
                    (slot, InFlight::Write(place, self.writes))
                }
            };
            if let InFlight::Write(place, _) | InFlight::Read(place) = asked {
                self.places[place].1 = true;
            }
            assert!(self.asked[queue].insert(slot, asked).is_none());
        }
        self.queues[queue].ring();
    }

    /// Waits for an interrupt, and by no other means, and takes in the ended requests. `Err`:
    /// `is_gone` reports that no back-end is there to interrupt.
    fn reap(&mut self, queue: usize, is_gone: &dyn Fn() -> bool) -> Result<(), BackendClosed> {
        let driver = &self.queues[queue];
        driver.interrupt_after(driver.seen);
        self.asleep[queue] |= driver.used_idx() == driver.seen;
        if self.asleep[queue] {
            let since = Instant::now();
            while driver.call.read().is_err() {
                if is_gone() {
                    return Err(BackendClosed);
                }
                assert!(since.elapsed() < TIMEOUT, "no interrupt came");
                std::thread::sleep(Duration::from_micros(20));
            }
            self.asleep[queue] = false;
        }
        while self.queues[queue].used_idx() != self.queues[queue].seen {
            let (slot, status, data) = self.queues[queue].finish();
            assert_eq!(status, 0);
            let asked = self.asked[queue].remove(&slot).expect("it was asked for");
            self.ended += 1;
            match asked {
                InFlight::Flush => {}
                InFlight::Write(place, write) => self.places[place] = (write, false),
                InFlight::Read(place) => {
                    let (write, _) = self.places[place];
                    assert!(
                        data == content(place, write),
                        "place {place}, write {write}"
                    );
                    self.places[place].1 = false;
                }
            }
        }
        Ok(())
    }

    /// Uses the disk until its back-end dies, or for so many requests.
    fn load(&mut self, is_gone: &dyn Fn() -> bool, requests: u64) -> Result<(), BackendClosed> {
        let end = self.ended + requests;
        while self.ended < end {
            for queue in 0..QUEUES {
                self.ask(queue);
            }
            for queue in 0..QUEUES {
                if !self.asked[queue].is_empty() {
                    self.reap(queue, is_gone)?;
                }
            }
        }
        self.drain(is_gone)
    }

    fn drain(&mut self, is_gone: &dyn Fn() -> bool) -> Result<(), BackendClosed> {
        for queue in 0..QUEUES {
            while !self.asked[queue].is_empty() {
                self.reap(queue, is_gone)?;
            }
        }
        Ok(())
    }

    /// With a back-end that dies at the `count`th passing of a point, if there is one. Answers
    /// where it has died.
    fn serve(
        &mut self,
        at: &Path,
        volume: Arc<dyn Volume>,
        dies: Option<(&'static str, u64)>,
    ) -> Option<Crashed> {
        let disk = DiskOptions {
            queues: QUEUES as u16,
            ..DiskOptions::default()
        };
        let arm = move || match dies {
            Some((point, count)) => crash::arm(point, count),
            None => crash::disarm(),
        };
        let how = (IdleWindow::default(), IoOptions::default());
        let served = Served::after(at.to_path_buf(), volume, disk, how, arm);
        let is_gone = || served.is_over();
        // The front-end's part of it is dropped with it.
        let used = match self.connect(at) {
            Ok(_frontend) => self.load(&is_gone, 400),
            Err(BackendClosed) => Err(BackendClosed),
        };
        if used.is_ok() && !served.is_over() {
            served.stop();
            return None;
        }
        eventually("its end", || served.is_over());
        Some(*served.panicked().downcast().expect("it dies at a point"))
    }
}

/// Serves a volume under load, and has its back-end die at each of the points.
fn die_at(
    points: impl Iterator<Item = (&'static str, u64)>,
    at: &Path,
    volume: impl Fn() -> Arc<dyn Volume>,
) -> World {
    let (mut world, deaths) = (World::new(), deaths());
    for (point, most) in points {
        let mut died = 0;
        for turn in 0..16 * deaths {
            if point == "vhost-blk.recover.cleared" {
                // It is passed where tracking begins only.
                assert!(world.serve(at, volume(), None).is_none());
                world.inflight = None;
            } else if turn > 0 && point.starts_with("vhost-blk.recover") {
                // There is something to be recovered only after a death in the middle of a batch.
                let before = ["vhost-blk.used.published", "vhost-blk.inflight.retired"];
                let count = world.random.below(20) + 1;
                world.serve(at, volume(), Some((before[turn as usize % 2], count)));
            }
            let count = world.random.below(most) + 1;
            if let Some(Crashed(name)) = world.serve(at, volume(), Some((point, count))) {
                assert_eq!(name, point);
                died += 1;
            }
            if died == deaths {
                break;
            }
        }
        assert_eq!(died, deaths, "{point} is seldom passed");
    }
    assert!(world.serve(at, volume(), None).is_none());
    assert!(world.places.iter().all(|(_, busy)| !busy));
    world
}

#[test]
fn next_back_end_resumes_after_death_at_any_point() {
    let dir = tempfile::tempdir().unwrap();
    let (file, volume) = file_volume(&dir, 4);
    drop(volume);
    // A file does not complete requests at once.
    let points = POINTS.into_iter().filter(|(point, _)| !is_plain(point));
    let world = die_at(points, &dir.path().join("s"), || open(&file));
    let bytes = std::fs::read(&file).unwrap();
    for (place, (write, _)) in world.places.iter().enumerate() {
        let start = place * PLACE as usize * 512;
        let wanted = content(place, *write);
        assert!(
            bytes[start..start + wanted.len()] == wanted,
            "place {place}"
        );
    }
    eprintln!("{} requests, {} writes", world.ended, world.writes);
}

/// Requests on memory are executed within the fetch. The volume outlives its back-ends, as one in
/// kept memory does.
#[test]
fn next_back_end_resumes_after_death_in_fast_path() {
    let dir = tempfile::tempdir().unwrap();
    let memory: Arc<dyn Volume> = Arc::new(MemVolume::new(4 << 20).unwrap());
    let points = POINTS.into_iter().filter(|(point, _)| {
        let stores = [
            "vhost-blk.inflight",
            "vhost-blk.used.published",
            "vhost-blk.call",
        ];
        is_plain(point) || stores.iter().any(|start| point.starts_with(start))
    });
    // Of 400 requests, only the 25 or so that flush are recorded one by one.
    let points = points.map(|(point, most)| {
        let is_rare = point.starts_with("vhost-blk.inflight");
        (point, if is_rare { most.min(8) } else { most })
    });
    let world = die_at(points, &dir.path().join("s"), || memory.clone());
    eprintln!("{} requests, {} writes", world.ended, world.writes);
}

/// Returns whether only the fast path passes the point.
fn is_plain(point: &str) -> bool {
    point.starts_with("vhost-blk.plain")
}

/// Every point of this crate's is in the list.
#[test]
fn all_crash_points_are_known() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    for file in std::fs::read_dir(source).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        let points = text.split("crash::point!(\"").skip(1);
        found.extend(points.map(|rest| rest.split('"').next().unwrap().to_owned()));
    }
    found.sort_unstable();
    assert_eq!(found, POINTS.map(|(point, _)| point));
}
