//! What disks that come and go cost their neighbours, and whether they leave anything behind.
//!
//! Usage: `churn [DISKS [ROUNDS [SECONDS]]]` (1000, 5 and 8). A `vnvme daemon` with one worker on a
//! CPU of its own serves two disks; on each a process writes and reads 4 KiB at random, 2000 times
//! a second, one at a time, sleeps until the answer comes, and verifies what it reads. Phases in
//! which nothing else happens alternate with phases in which controllers and vhost-user-blk
//! exports, in memory and on files, are added and removed by the control socket: DISKS in all.
//! Printed are the neighbours' times, phase by phase and as medians, and the daemon's resident
//! memory, descriptors and threads before and after; and again after many were there at a time.
//!
//! All else shares the other CPUs. The loads come first there where `chrt` may say so: else, on few
//! CPUs, the time is measured that they wait for the changes' own work.
#![forbid(unsafe_code)]

use std::fmt;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use control::Client;
use control::api::DiskKind;
use driver::vfio_user::VfioUser;
use driver::{Device, Op, QueueOptions, Request};
use harness::Daemon;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::{Map, Value, json};

/// Disks that are there at a time beside loads, and the neighbours.
const AT_A_TIME: usize = 8;
/// And without loads: what a usual limit of descriptors lasts for.
const MANY: usize = 400;
/// Disks before the daemon is looked at first: tables have their size then.
const WARM_UP: usize = 100;
/// Of those files, and of memory.
const SIZE: u64 = 16 << 20;
const NEIGHBOURS: [&str; 2] = ["a", "b"];
/// The neighbours' size, and what is written to them at once.
const NEIGHBOUR: u64 = 4 << 20;
const BLOCK: usize = 4096;
const SECTORS: u64 = 8;
/// From request to request.
const PAUSE: Duration = Duration::from_micros(500);
/// A request takes no longer.
const LIMIT: Duration = Duration::from_secs(60);
/// Requests of a piece of a load: half a second's, at the most.
const PIECE: usize = 1000;
/// The first argument of a load.
const LOAD: &str = "--load";

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
        return load(Path::new(socket), seconds.parse()?);
    }
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
    Times::of(vec![start_load(dir, "a", 1)?, start_load(dir, "b", 1)?])?;
    churn(&client, dir, WARM_UP, AT_A_TIME, Duration::ZERO)?;
    let before = Usage::of(&daemon)?;
    let phase = Duration::from_secs(seconds as u64);
    let mut measured = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        let order = [round % 2, (round + 1) % 2];
        for changes in order {
            let loads = vec![
                start_load(dir, "a", seconds)?,
                start_load(dir, "b", seconds)?,
            ];
            let mut what = "nothing else".to_owned();
            if changes == 1 {
                let count = disks.div_ceil(rounds);
                let took = churn(&client, dir, count, AT_A_TIME, phase)?;
                what = format!("{count} disks in {:.1} s", took.as_secs_f32());
            }
            let times = Times::of(loads)?;
            println!("{what}: {times}");
            if let Some(measured) = measured.get_mut(changes) {
                measured.push(times);
            }
        }
    }
    println!("before: {before}\nafter:  {}", Usage::of(&daemon)?);
    let took = churn(&client, dir, disks, MANY, Duration::ZERO)?.as_secs_f32();
    println!("{disks} disks, {MANY} of them at a time, in {took:.1} s");
    println!("after these: {}", Usage::of(&daemon)?);
    let medians = |of: fn(&Times) -> f64| {
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
    daemon.terminate()
}

/// This process, and what it starts, leaves the first of its CPUs to the worker, where it has more
/// than one. Its number.
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

/// Has a neighbour used for so many seconds.
fn start_load(dir: &Path, name: &str, seconds: usize) -> Result<Child> {
    let real_time = Command::new("chrt").args(["-f", "5", "true"]).status();
    let own = std::env::current_exe()?;
    let mut command = match real_time.is_ok_and(|status| status.success()) {
        true => {
            let mut command = Command::new("chrt");
            command.args(["-f", "5"]).arg(own);
            command
        }
        false => Command::new(own),
    };
    let command = command.arg(LOAD).arg(dir.join(name));
    let command = command.arg(seconds.to_string()).stdout(Stdio::piped());
    command.spawn().context("a load")
}

/// A load: prints the time of each request in nanoseconds.
fn load(socket: &Path, seconds: u64) -> Result<()> {
    let transport = VfioUser::connect(socket, LIMIT)?;
    let device = Device::open(transport, driver::Options::default())?;
    let options = QueueOptions {
        poll_window: Duration::ZERO,
        ..QueueOptions::default()
    };
    let mut queue = device.queue(1, options)?;
    let mut buffer = device.allocate(BLOCK)?;
    let mut found = [0; BLOCK];
    let blocks = NEIGHBOUR / BLOCK as u64;
    let mut written = vec![None; usize::try_from(blocks)?];
    let mut times = Vec::new();
    let mut random = u64::from(std::process::id());
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(seconds) {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let block = (random >> 33) % blocks;
        let known = written
            .get_mut(usize::try_from(block)?)
            .context("a block")?;
        // What is read is what was written last.
        let op = match (&known, random >> 63) {
            (Some(_), 0) => Op::Read,
            _ => {
                *known = Some(random);
                buffer.write(0, &random.to_le_bytes().repeat(BLOCK / 8))?;
                Op::Write { fua: false }
            }
        };
        let is_read = matches!(op, Op::Read);
        let request = Request {
            op,
            lba: block * SECTORS,
            blocks: SECTORS,
            buffer: Some(buffer),
            user_data: 0,
        };
        let sent = Instant::now();
        let done = queue.execute(request).map_err(|refused| refused.why)?;
        let took = sent.elapsed();
        times.push(took.as_nanos().to_string());
        done.result?;
        buffer = done.buffer.context("the buffer is gone")?;
        if is_read {
            buffer.read(0, &mut found)?;
            let right = known.unwrap_or(0).to_le_bytes().repeat(BLOCK / 8);
            ensure!(right == found, "block {block} is another one");
        }
        std::thread::sleep(PAUSE.saturating_sub(took));
    }
    println!("{}", times.join("\n"));
    Ok(())
}

/// What loads measured, in microseconds.
struct Times {
    p50: f64,
    p99: f64,
    /// The median of the 99th percentiles of pieces of [`PIECE`] requests: what comes all the time,
    /// and not what the machine did once.
    usual_p99: f64,
    requests: usize,
}

impl Times {
    /// An error if a load read something wrong.
    fn of(loads: Vec<Child>) -> Result<Self> {
        let (mut all, mut pieces) = (Vec::new(), Vec::new());
        for load in loads {
            let output = load.wait_with_output()?;
            ensure!(output.status.success(), "a load failed: {}", output.status);
            let text = String::from_utf8(output.stdout)?;
            let times = text.lines().map(|line| Ok(line.parse::<f64>()? / 1e3));
            let times: Vec<f64> = times.collect::<Result<_>>()?;
            let whole = times.chunks_exact(PIECE);
            pieces.extend(whole.map(|piece| percentile(piece.to_vec(), 99)));
            all.extend(times);
        }
        Ok(Self {
            requests: all.len(),
            p50: percentile(all.clone(), 50),
            p99: percentile(all, 99),
            usual_p99: percentile(pieces, 50),
        })
    }
}

impl fmt::Display for Times {
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

/// What the daemon has.
struct Usage {
    resident_kib: u64,
    descriptors: usize,
    threads: usize,
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (resident, threads) = (self.resident_kib, self.threads);
        let descriptors = self.descriptors;
        write!(
            f,
            "{resident} KiB resident, {descriptors} descriptors, {threads} threads"
        )
    }
}

impl Usage {
    fn of(daemon: &Daemon) -> Result<Self> {
        // Threads of changes end a little after they have answered.
        std::thread::sleep(Duration::from_secs(1));
        let process = Path::new("/proc").join(daemon.process().pid().to_string());
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
