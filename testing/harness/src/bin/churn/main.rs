//! Measures the cost of added and removed disks for their neighbours, and resources that they leave
//! behind.
//!
//! Usage: `churn [--guests] [DISKS [ROUNDS [SECONDS]]]` (1000, 5 and 8). A `vnvme daemon` with one
//! worker on a CPU of its own serves two disks; on each a process writes and reads 4 KiB at random,
//! 2000 times a second, one at a time, sleeps until the answer arrives, and verifies the data. Idle
//! phases alternate with phases in which controllers and vhost-user-blk exports, in memory and on
//! files, are added and removed by the control socket: DISKS in all. The program prints the
//! neighbours' times, phase by phase and as medians, and the daemon's resident memory, descriptors
//! and threads before and after. It prints them again after many disks at a time.
//!
//! With `--guests` a Linux guest in QEMU has each of the two disks, and fio verifies there.
//!
//! All other processes share the other CPUs. Loads that are processes get a real-time priority
//! there if `chrt` is allowed: else, on few CPUs, their times include the wait for the changes' own
//! work. Guests get none: their times are their processors' most of all.
#![forbid(unsafe_code)]

mod guests;
mod processes;

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use control::Client;
use control::api::DiskKind;
use harness::{Daemon, Guest};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::{Map, Value, json};

/// Disks that are there at a time beside loads, and the neighbours.
const AT_A_TIME: usize = 8;
/// Disks at a time without loads: as many as a usual limit of descriptors allows.
const MAX_DISKS: usize = 400;
/// Disks before the daemon is looked at first: tables have their size then.
const WARM_UP: usize = 100;
/// Size of those files, and of memory.
const SIZE: u64 = 16 << 20;
const NEIGHBOURS: [&str; 2] = ["a", "b"];
/// Size of the neighbours' disks, and of each write to them.
const NEIGHBOUR: u64 = 4 << 20;
const BLOCK: usize = 4096;
const SECTORS: u64 = 8;
/// Time from request to request.
const REQUEST_INTERVAL: Duration = Duration::from_micros(500);
/// A request takes no longer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Requests of a piece of a load: half a second's, at the most.
const PIECE: usize = 1000;
/// The first argument of a load.
const LOAD: &str = "--load";
/// Another first argument.
const GUESTS: &str = "--guests";

fn main() {
    if let Err(error) = run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        eprintln!("churn: {error:#}");
        std::process::exit(1);
    }
}

fn run(args: &[String]) -> Result<()> {
    if let [word, socket, seconds] = args
        && word == LOAD
    {
        return processes::run(Path::new(socket), seconds.parse()?);
    }
    let (in_guests, args) = match args {
        [word, args @ ..] if word == GUESTS => (true, args),
        args => (false, args),
    };
    let number = |place: usize, default: usize| {
        let given = args.get(place);
        given.map_or(Ok(default), |text| {
            text.parse().with_context(|| format!("{text}: no number"))
        })
    };
    let (disks, rounds, seconds) = (number(0, 1000)?, number(1, 5)?.max(1), number(2, 8)?.max(1));
    let worker = leave_first_cpu()?;
    let place = tempfile::Builder::new().prefix("churn-").tempdir()?;
    let dir = place.path();
    let config = dir.join("churn.toml");
    fs::write(&config, configuration(dir, worker))?;
    let daemon = Daemon::builder("churn").managed(&config, &dir.join("b"));
    let daemon = daemon.start()?;
    let client = Client::new(vec![dir.join("control")])?;
    let neighbours = if in_guests {
        Neighbours::Guests(guests::boot(dir)?)
    } else {
        Neighbours::Processes(dir.to_owned())
    };
    neighbours.measure(1, || Ok(()))?;
    churn(&client, dir, WARM_UP, AT_A_TIME, Duration::ZERO)?;
    let before = DaemonResources::of(&daemon)?;
    let phase = Duration::from_secs(seconds as u64);
    let mut measured = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        let order = [round % 2, (round + 1) % 2];
        for changes in order {
            let count = disks.div_ceil(rounds);
            let (times, what) = neighbours.measure(seconds, || match changes {
                0 => Ok("nothing else".to_owned()),
                _ => {
                    let took = churn(&client, dir, count, AT_A_TIME, phase)?;
                    Ok(format!("{count} disks in {:.1} s", took.as_secs_f32()))
                }
            })?;
            println!("{what}: {times}");
            if let Some(measured) = measured.get_mut(changes) {
                measured.push(times);
            }
        }
    }
    println!(
        "before: {before}\nafter:  {}",
        DaemonResources::of(&daemon)?
    );
    let took = churn(&client, dir, disks, MAX_DISKS, Duration::ZERO)?.as_secs_f32();
    println!("{disks} disks, {MAX_DISKS} of them at a time, in {took:.1} s");
    println!("after these: {}", DaemonResources::of(&daemon)?);
    let medians = |of: fn(&LoadTimes) -> f64| {
        measured
            .each_ref()
            .map(|times| percentile(times.iter().map(of).collect(), 50))
    };
    for (name, of) in [
        ("p50", medians(|times| times.p50)),
        ("p99", medians(|times| times.p99)),
        ("usual p99", medians(|times| times.usual_p99)),
    ] {
        let [without, with] = of;
        let more = (with / without - 1.0) * 100.0;
        println!("{name}: median {without:.1} us, with changes {with:.1} us: {more:+.1} %");
    }
    drop(neighbours);
    daemon.terminate()
}

/// Users of the two disks that stay.
enum Neighbours {
    /// Processes, which are started for each phase, and where the disks' sockets are.
    Processes(PathBuf),
    Guests(Vec<Guest>),
}

impl Neighbours {
    /// Loads both disks for `seconds`, runs `body` meanwhile, and returns the times of the loads'
    /// I/Os. An error if a load read something wrong.
    fn measure<T>(
        &self,
        seconds: usize,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<(LoadTimes, T)> {
        match self {
            Self::Processes(dir) => {
                let start = |name: &&str| processes::start(dir, name, seconds);
                let loads: Vec<_> = NEIGHBOURS.iter().map(start).collect::<Result<_>>()?;
                let done = body()?;
                let times = loads.into_iter().map(processes::times);
                Ok((LoadTimes::of(times.collect::<Result<_>>()?), done))
            }
            Self::Guests(guests) => std::thread::scope(|scope| {
                let load = |guest| scope.spawn(move || guests::load(guest, seconds));
                let loads: Vec<_> = guests.iter().map(load).collect();
                let done = body()?;
                let times = loads.into_iter().map(|load| {
                    let ended = load.join();
                    ended.map_err(|_| anyhow!("a load ended by a bug"))?
                });
                Ok((LoadTimes::of(times.collect::<Result<_>>()?), done))
            }),
        }
    }
}

/// Leaves the first CPU of this process and its children to the worker, where there is more than
/// one. Returns its number.
fn leave_first_cpu() -> Result<usize> {
    let mut cpus = sched_getaffinity(None)?;
    let all = 0..CpuSet::MAX_CPU;
    let first = all.clone().find(|cpu| cpus.is_set(*cpu)).unwrap_or(0);
    if cpus.count() > 1 {
        cpus.unset(first);
        sched_setaffinity(None, &cpus)?;
    }
    Ok(first)
}

fn configuration(dir: &Path, worker: usize) -> String {
    let dir = dir.display();
    let mut text = format!(
        "[process]\nworkers = 1\ncpus = [\"{worker}\"]\ncontrol = \"{dir}/control\"\n\
         allow = [\"{dir}\"]\n"
    );
    for name in NEIGHBOURS {
        text += &format!(
            "[[controller]]\nsocket = \"{dir}/{name}\"\n\
             namespace = [{{ volume = \"mem://{NEIGHBOUR}\" }}]\n"
        );
    }
    text
}

/// Measurements of loads, in microseconds.
struct LoadTimes {
    p50: f64,
    p99: f64,
    /// The median of the 99th percentiles of pieces of [`PIECE`] requests: the usual value, without
    /// single events of the machine.
    usual_p99: f64,
    requests: usize,
}

impl LoadTimes {
    /// Combines the measurements of loads, each of which has some.
    fn of(loads: Vec<Vec<f64>>) -> Self {
        let (mut all, mut pieces) = (Vec::new(), Vec::new());
        for times in loads {
            let whole = times.chunks_exact(PIECE.min(times.len().max(1)));
            pieces.extend(whole.map(|piece| percentile(piece.to_vec(), 99)));
            all.extend(times);
        }
        Self {
            requests: all.len(),
            p50: percentile(all.clone(), 50),
            p99: percentile(all, 99),
            usual_p99: percentile(pieces, 50),
        }
    }
}

impl fmt::Display for LoadTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (requests, p50, p99) = (self.requests, self.p50, self.p99);
        let usual = self.usual_p99;
        write!(
            f,
            "{requests} requests, p50 {p50:.1} us, p99 {p99:.1} us, usually {usual:.1} us"
        )
    }
}

/// NaN of nothing.
fn percentile(mut times: Vec<f64>, percent: usize) -> f64 {
    times.sort_by(f64::total_cmp);
    let at = times.len() * percent / 100;
    times.get(at).copied().unwrap_or(f64::NAN)
}

/// Adds and removes `count` disks, evenly over a time.
fn churn(
    client: &Client,
    dir: &Path,
    count: usize,
    at_a_time: usize,
    over: Duration,
) -> Result<Duration> {
    let begin = Instant::now();
    let mut there = Vec::new();
    for i in 0..count {
        let name = format!("disk{i}");
        let file = dir.join(format!("{name}.raw"));
        let volume = match i % 4 {
            0 | 1 => {
                File::create(&file)?.set_len(SIZE)?;
                file.display().to_string()
            }
            _ => format!("mem://{SIZE}"),
        };
        let socket = dir.join(format!("{name}.sock"));
        let (kind, table) = match i % 2 {
            0 => (
                DiskKind::Controller,
                json!({"socket": socket, "namespace": [{"volume": volume}]}),
            ),
            _ => (
                DiskKind::VhostUserBlk,
                json!({"socket": socket, "volume": volume}),
            ),
        };
        let table: Map<String, Value> = serde_json::from_value(table)?;
        client.add(kind, table)?;
        there.push((name, file));
        while there.len() > at_a_time || (i + 1 == count && !there.is_empty()) {
            let (name, file) = there.remove(0);
            client.remove(&name, false)?;
            if file.exists() {
                fs::remove_file(file)?;
            }
        }
        let due = begin + over.mul_f64((i + 1) as f64 / count as f64);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    Ok(begin.elapsed())
}

/// Resources of the daemon.
struct DaemonResources {
    resident_kib: u64,
    descriptors: usize,
    threads: usize,
}

impl fmt::Display for DaemonResources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (resident, threads) = (self.resident_kib, self.threads);
        let descriptors = self.descriptors;
        write!(
            f,
            "{resident} KiB resident, {descriptors} descriptors, {threads} threads"
        )
    }
}

impl DaemonResources {
    fn of(daemon: &Daemon) -> Result<Self> {
        // Threads of changes end a little after they have answered.
        std::thread::sleep(Duration::from_secs(1));
        let process = Path::new("/proc").join(daemon.serving().to_string());
        let status = fs::read_to_string(process.join("status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = line.and_then(|line| line.split_whitespace().next());
        Ok(Self {
            resident_kib: resident.context("no VmRSS")?.parse()?,
            descriptors: fs::read_dir(process.join("fd"))?.count(),
            threads: fs::read_dir(process.join("task"))?.count(),
        })
    }
}
