//! Suite `file`: a file behind a controller, and the same file straight through io_uring.

use super::super::device::DeviceTarget;
use super::super::job::{Job, Rw};
use super::super::load;
use super::super::results::Case;
use super::super::stats::Measured;
use super::super::uring::UringTarget;
use super::server::{Serve, Server};
use super::{Cores, Outcome, Plan, pingpong};
use anyhow::{Context, Result, anyhow, ensure};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SUITE: &str = "file";
const DEPTHS: [u16; 3] = [1, 8, 32];
const SIZE: u64 = 512 << 20;
/// `TMPFS_MAGIC`, statfs(2).
const TMPFS_MAGIC: i64 = 0x0102_1994;
const TMPFS: &str = "tmpfs";
const DISK: &str = "disk";
const MEDIA: [&str; 2] = [TMPFS, DISK];
const DIRECTIONS: [Rw; 2] = [Rw::RandRead, Rw::RandWrite];
const WAYS: [&str; 5] = ["bare", "beside", "plain", "vnvme", "pinned"];

struct Medium {
    word: &'static str,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

/// Pieces of a run of a case. All ways to a file take turns in each piece, so that a machine or a disk that is slow for a
/// while is slow for all of them.
const SLICES: u32 = 60;
/// A slice is measured again when a thread of it had to wait for a CPU for more than this share of it: somebody else had the
/// CPU, and the way that needs two of them suffers more than the way that needs one.
const DISTURBED: f64 = 0.15;
/// How often.
const RETRIES: u32 = 3;

/// Whether somebody else had the CPU for much of a slice. On a tmpfs the kernel does the work of a bare ring in threads of its
/// own, on the CPU of the ring's owner, which waits for them: that is the way itself.
fn is_disturbed(way: &Way, medium: &Medium, share: f64) -> bool {
    let own = medium.word == TMPFS && !matches!(way, Way::Served(..));
    share > DISTURBED && !own
}

/// A way to the file.
enum Way {
    /// io_uring straight on it, with registered buffers or without, by a thread on the CPU that the worker has otherwise: the disk's interrupts, and what the
    /// kernel does after them, meet the same thread on both ways.
    Bare(UringTarget, Vec<usize>),
    /// The same, while the client's CPU polls for nothing, as it polls on the way through a controller: where CPUs share what
    /// they stand on, that alone has its price.
    Beside(UringTarget, Vec<usize>, Vec<usize>),
    /// Through a controller. The target goes before its server does.
    Served(DeviceTarget, Server, Vec<usize>),
}

impl Way {
    /// Measures a slice; also how much of it somebody waited for a CPU.
    fn slice(&self, job: &Job) -> Result<(Measured, f64)> {
        let on = |cpus: &[usize]| Job {
            cpus: cpus.to_vec(),
            ..job.clone()
        };
        let (measured, of_server) = match self {
            Way::Bare(target, cpus) => (load::run(target, &on(cpus), &mut ())?, Duration::ZERO),
            Way::Beside(target, cpus, other) => {
                let job = on(cpus);
                let measured = beside_a_poller(other, || load::run(target, &job, &mut ()))?;
                (measured, Duration::ZERO)
            }
            Way::Served(target, server, cpus) => {
                let before = server.waited();
                let measured = load::run(target, &on(cpus), &mut ())?;
                (measured, server.waited().saturating_sub(before))
            }
        };
        let waited = measured.waited.max(of_server);
        let share = waited.as_secs_f64() / (job.runtime + job.ramp).as_secs_f64().max(1e-9);
        Ok((measured, share))
    }
}

/// Does something while a thread on those CPUs polls for nothing.
fn beside_a_poller<T>(cpus: &[usize], f: impl FnOnce() -> Result<T>) -> Result<T> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let poller = scope.spawn(|| {
            let pinned = load::pin(cpus, 0);
            while pinned.is_ok() && !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            pinned
        });
        let result = f();
        over.store(true, Ordering::Relaxed);
        let pinned = poller.join();
        pinned.map_err(|_| anyhow!("the polling thread ended by a bug"))??;
        result
    })
}

/// Refuses words that choose nothing.
pub fn check_only(only: &[String]) -> Result<()> {
    let known = [&MEDIA[..], &WAYS, &DIRECTIONS.map(Rw::word)].concat();
    for word in only {
        ensure!(
            known.contains(&word.as_str()) || DEPTHS.iter().any(|d| d.to_string() == *word),
            "--only {word}: the suite file has no such cases"
        );
    }
    Ok(())
}

pub fn run(plan: &Plan) -> Result<Outcome> {
    let cores = Cores::pair()?;
    let mut outcome = Outcome::default();
    let mut media = Vec::new();
    for word in plan.chosen(&MEDIA) {
        let dir = match word {
            TMPFS => Path::new("/dev/shm"),
            _ => plan.output.as_path(),
        };
        match medium(word, dir) {
            Ok(medium) => media.push(medium),
            Err(error) => outcome.leave_out(word, format!("{error:#}")),
        }
    }
    let words = plan.chosen(&DIRECTIONS.map(Rw::word));
    let directions: Vec<Rw> = DIRECTIONS
        .into_iter()
        .filter(|rw| words.contains(&rw.word()))
        .collect();
    let words = DEPTHS.map(|depth| depth.to_string());
    let words = plan.chosen(&words.each_ref().map(String::as_str));
    let depths: Vec<u16> = DEPTHS
        .into_iter()
        .filter(|depth| words.contains(&depth.to_string().as_str()))
        .collect();
    let mut disturbed = 0;
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for medium in &media {
            let ways = ways(medium, &cores, plan)?;
            for rw in directions.iter().copied() {
                for depth in depths.iter().copied() {
                    let job = Job {
                        rw,
                        runtime: plan.runtime / SLICES,
                        ramp: plan.ramp / SLICES,
                        ..plan.job(depth, &[])
                    };
                    let before = round_trip(&cores, plan)?;
                    let (all, again) = turns(&ways, medium, &job)?;
                    let round_trip = (before + round_trip(&cores, plan)?) / 2.0;
                    disturbed += again;
                    for ((word, _), measured) in ways.iter().zip(all) {
                        let case = format!("{} {word} {}", rw.word(), medium.word);
                        let case = Case {
                            suite: SUITE,
                            case: &case,
                            depth: depth.into(),
                            queues: 1,
                        };
                        let both = measured.both();
                        let c = &mut outcome.collector;
                        c.add(case, "iops", "1/s", measured.iops());
                        c.add(case, "p50_ns", "ns", both.percentile(50.0) as f64);
                        c.add(case, "p99_ns", "ns", both.percentile(99.0) as f64);
                        c.add(case, "rtt_ns", "ns", round_trip);
                    }
                }
            }
        }
    }
    if disturbed > 0 {
        eprintln!("  {disturbed} slices were measured again: something else had the CPUs");
    }
    Ok(outcome)
}

/// Nanoseconds of a cache line's way between the two CPUs and back: what a controller adds at least to each I/O.
fn round_trip(cores: &Cores, plan: &Plan) -> Result<f64> {
    let source = plan.memory.source();
    match (cores.client.first(), cores.server.first()) {
        (Some(&client), Some(&server)) => {
            Ok(pingpong::measure(client, server, pingpong::SPAN, &source)?.line)
        }
        _ => Err(anyhow!("it needs two CPUs")),
    }
}

/// The ways to a file. Only one of them locks it at a time, so the second server is for a disk that can be shared with the
/// first.
fn ways(medium: &Medium, cores: &Cores, plan: &Plan) -> Result<Vec<(&'static str, Way)>> {
    let cpus = cores.server.get(..1).unwrap_or_default();
    let mut ways = Vec::new();
    for word in plan.chosen(&WAYS) {
        let pin_memory = word == "pinned";
        if matches!(word, "pinned" | "plain") && medium.word == TMPFS {
            // Nothing goes through a ring there, and no page is looked up.
            continue;
        }
        let bare = || -> Result<UringTarget> {
            let target = UringTarget::open(&medium.path, true)?;
            Ok(target.with_memory(plan.memory.source()))
        };
        let way = match word {
            "bare" => Way::Bare(bare()?, cpus.to_vec()),
            "plain" => Way::Bare(bare()?.unregistered(), cpus.to_vec()),
            "beside" => Way::Beside(bare()?, cpus.to_vec(), cores.client.clone()),
            _ => {
                let volume = format!("{}?lock=off", medium.path.display());
                let server = Server::start(&Serve {
                    pin_memory,
                    ..Serve::one(&volume, false, cpus)
                })?;
                let target = DeviceTarget::open(&server.url(0), &plan.job(1, &cores.client))?;
                Way::Served(target, server, cores.client.clone())
            }
        };
        ways.push((word, way));
    }
    Ok(ways)
}

/// All ways in turn, [`SLICES`] times, every second time in the other order; the sums, and how many slices were measured
/// again.
fn turns(ways: &[(&'static str, Way)], medium: &Medium, job: &Job) -> Result<(Vec<Measured>, u32)> {
    let mut sums = vec![Measured::default(); ways.len()];
    let mut again = 0;
    for slice in 0..SLICES {
        for step in 0..ways.len() {
            let index = if slice % 2 == 0 {
                step
            } else {
                ways.len() - 1 - step
            };
            let (Some((_, way)), Some(sum)) = (ways.get(index), sums.get_mut(index)) else {
                continue;
            };
            let (mut best, mut least) = way.slice(job)?;
            for _ in 0..RETRIES {
                if !is_disturbed(way, medium, least) {
                    break;
                }
                again += 1;
                let (measured, share) = way.slice(job)?;
                if share < least {
                    (best, least) = (measured, share);
                }
            }
            sum.append(&best);
        }
    }
    Ok((sums, again))
}

/// A file full of data, not of holes, where the word says.
fn medium(word: &'static str, dir: &Path) -> Result<Medium> {
    let wants_tmpfs = word == TMPFS;
    let statfs = rustix::fs::statfs(dir).with_context(|| format!("{}", dir.display()))?;
    let is_tmpfs = statfs.f_type as i64 == TMPFS_MAGIC;
    ensure!(
        is_tmpfs == wants_tmpfs,
        "{} is {}on a tmpfs",
        dir.display(),
        if is_tmpfs { "" } else { "not " }
    );
    let free = statfs.f_bavail.saturating_mul(statfs.f_bsize as u64);
    ensure!(
        free > 2 * SIZE,
        "{} has less than {} MiB free",
        dir.display(),
        SIZE >> 19
    );
    let temp = tempfile::Builder::new()
        .prefix("vnvme-bench-")
        .tempdir_in(dir)?;
    let path = temp.path().join("disk.raw");
    let mut file = File::create(&path)?;
    let mut chunk = vec![0; 1 << 20];
    for offset in (0..SIZE).step_by(chunk.len()) {
        super::super::pattern::fill(&mut chunk, offset, 1);
        file.write_all(&chunk)?;
    }
    file.sync_all()?;
    // Direct writes must drop what the page cache holds of the file, and that is nothing to measure.
    if !wants_tmpfs {
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(Medium {
        word,
        path: std::fs::canonicalize(path)?,
        _dir: temp,
    })
}
