//! Suite `file`: a file behind a controller, compared with direct access through io_uring.

use super::scratch::Scratch;
use super::server::{Server, ServerConfig};
use super::{Cores, Plan, SuiteResults, pingpong};
use crate::results::Case;
use anyhow::{Context, Result, anyhow, ensure};
use load::device::DeviceTarget;
use load::job::{Job, Rw};
use load::stats::Measured;
use load::uring::UringTarget;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SUITE: &str = "file";
const DEPTHS: [u16; 3] = [1, 8, 32];
const SIZE: u64 = 512 << 20;
/// Filesystem type of tmpfs (`TMPFS_MAGIC`, statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;
const TMPFS: &str = "tmpfs";
const DISK: &str = "disk";
const MEDIA: [&str; 2] = [TMPFS, DISK];
const DIRECTIONS: [Rw; 2] = [Rw::RandRead, Rw::RandWrite];
const WAYS: [&str; 6] = ["bare", "waiting", "beside", "plain", "vnvme", "pinned"];

struct Medium {
    word: &'static str,
    path: PathBuf,
    _dir: Scratch,
}

/// Number of slices in a run of a case. All ways of access take turns in each slice, so that a
/// temporarily slow machine or disk affects all of them.
const SLICES: u32 = 60;
/// Share of a slice, beyond that of the case's best slice, for which a thread may wait for a CPU or
/// lose it to the host. Above it, another process disturbed the slice, which is measured again;
/// ways that need two CPUs suffer more than ways that need one. Nine of ten read slices are below
/// it. A kernel thread that scans memory now and then takes up to 8% of a slice. For direct writes,
/// a kernel thread on the same CPU ends them, which costs all ways 8 to 10% of the time.
const DISTURBED: f64 = 0.02;
/// Maximum number of repeated slices; they take at most twice the time of a case.
const RETRIES: u32 = 3;

/// Returns whether another process disturbed a slice; `usual` is the smallest share so far. On a
/// tmpfs, the kernel does all work of a bare ring in threads on the CPU of the ring's owner, which
/// waits for them. Such waiting belongs to the way itself.
fn is_disturbed(way: &FileAccess, medium: &Medium, share: f64, usual: f64) -> bool {
    let own = medium.word == TMPFS && !matches!(way, FileAccess::Served(..));
    share > usual + DISTURBED && !own
}

/// A way to access the file.
enum FileAccess {
    /// io_uring directly on the file, with or without registered buffers. The thread runs on the
    /// CPU that the worker has otherwise, so that the disk's interrupts and the kernel's work after
    /// them are handled on the same CPU in both ways.
    Bare(UringTarget, Vec<usize>),
    /// io_uring as in `Bare`, but waiting in the kernel for outstanding requests, as fio's engine
    /// does.
    Waiting(UringTarget, Vec<usize>),
    /// io_uring as in `Bare`, while the client's CPU polls without purpose, as it does with a
    /// controller. This alone costs time where the CPUs share hardware.
    Beside(UringTarget, Vec<usize>, Vec<usize>),
    /// Access through a controller. The target is dropped before its server.
    Served(DeviceTarget, Box<Server>, Vec<usize>),
}

impl FileAccess {
    /// Returns the CPUs that this way keeps busy.
    fn cpus(&self, cores: &Cores) -> Vec<usize> {
        match self {
            FileAccess::Bare(_, cpus) | FileAccess::Waiting(_, cpus) => cpus.clone(),
            FileAccess::Beside(..) | FileAccess::Served(..) => {
                [&cores.client[..], &cores.server].concat()
            }
        }
    }

    /// Measures a slice. Also returns the share of it for which a thread waited for a CPU or the
    /// host took the CPU away.
    fn slice(&self, job: &Job, cores: &Cores) -> Result<(Measured, f64)> {
        let cpus = self.cpus(cores);
        let before = stolen(&cpus);
        let on = |cpus: &[usize]| Job {
            cpus: cpus.to_vec(),
            ..job.clone()
        };
        let (measured, of_server) = match self {
            FileAccess::Bare(target, cpus) => {
                (load::run(target, &on(cpus), &mut ())?, Duration::ZERO)
            }
            FileAccess::Waiting(target, cpus) => {
                let job = Job {
                    interrupt: true,
                    ..on(cpus)
                };
                (load::run(target, &job, &mut ())?, Duration::ZERO)
            }
            FileAccess::Beside(target, cpus, other) => {
                let job = on(cpus);
                let measured = beside_a_poller(other, || load::run(target, &job, &mut ()))?;
                (measured, Duration::ZERO)
            }
            FileAccess::Served(target, server, cpus) => {
                let before = server.waited();
                let measured = load::run(target, &on(cpus), &mut ())?;
                (measured, server.waited().saturating_sub(before))
            }
        };
        let stolen = stolen(&cpus).saturating_sub(before);
        let waited = measured.waited.max(of_server) + stolen;
        let share = waited.as_secs_f64() / (job.runtime + job.ramp).as_secs_f64().max(1e-9);
        Ok((measured, share))
    }
}

/// Returns the total time for which the host of a virtual machine took these CPUs away. The
/// resolution is a hundredth of a second, so shorter times are noticed only occasionally.
pub fn stolen(cpus: &[usize]) -> Duration {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Duration::from_nanos(stolen_ticks(&text, cpus).saturating_mul(1_000_000_000 / per_second))
}

/// Returns the sum of the eighth number in the lines of these CPUs (proc_stat(5)).
fn stolen_ticks(stat: &str, cpus: &[usize]) -> u64 {
    let of_line = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let cpu: usize = fields.next()?.strip_prefix("cpu")?.parse().ok()?;
        let ticks = fields.nth(7)?.parse::<u64>().ok()?;
        cpus.contains(&cpu).then_some(ticks)
    };
    stat.lines().filter_map(of_line).sum()
}

/// Calls `f` while a thread on these CPUs polls without purpose.
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

/// Refuses words that select no cases.
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

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let cores = Cores::pair()?;
    let mut outcome = SuiteResults::default();
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
                    let totals = turns(&ways, medium, &job, &cores)?;
                    let round_trip = (before + round_trip(&cores, plan)?) / 2.0;
                    for ((word, _), total) in ways.iter().zip(totals) {
                        let measured = total.measured;
                        disturbed += total.again;
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
                        // Waiting time of the slices that count.
                        c.add(case, "waited", "1", total.waited / f64::from(SLICES));
                        c.add(case, "slices_again", "1", total.again.into());
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

/// Measures the round trip of a cache line between the two CPUs in nanoseconds: the lower bound of
/// the time that a controller adds to each I/O.
fn round_trip(cores: &Cores, plan: &Plan) -> Result<f64> {
    let source = plan.memory.source();
    match (cores.client.first(), cores.server.first()) {
        (Some(&client), Some(&server)) => {
            Ok(pingpong::measure(client, server, pingpong::SPAN, &source)?.line)
        }
        _ => Err(anyhow!("it needs two CPUs")),
    }
}

/// Returns the ways to access the file. Only one of them can lock it at a time, so there is a
/// second server only for a disk that can be shared.
fn ways(medium: &Medium, cores: &Cores, plan: &Plan) -> Result<Vec<(&'static str, FileAccess)>> {
    let cpus = cores.server.get(..1).unwrap_or_default();
    let mut ways = Vec::new();
    for word in plan.chosen(&WAYS) {
        let pin_memory = word == "pinned";
        if matches!(word, "pinned" | "plain") && medium.word == TMPFS {
            // On tmpfs nothing passes through a ring, and no page is looked up.
            continue;
        }
        let bare = || -> Result<UringTarget> {
            let target = UringTarget::open(&medium.path, true)?;
            Ok(target.with_memory(plan.memory.source()))
        };
        let way = match word {
            "bare" => FileAccess::Bare(bare()?, cpus.to_vec()),
            "waiting" => FileAccess::Waiting(bare()?, cpus.to_vec()),
            "plain" => FileAccess::Bare(bare()?.unregistered(), cpus.to_vec()),
            "beside" => FileAccess::Beside(bare()?, cpus.to_vec(), cores.client.clone()),
            _ => {
                let volume = format!("{}?lock=off", medium.path.display());
                let server = Server::start(
                    &plan.vnvme,
                    &ServerConfig {
                        pin_memory,
                        ..ServerConfig::one(&volume, false, cpus)
                    },
                )?;
                let target = DeviceTarget::open(&server.url(0), &plan.job(1, &cores.client))?;
                FileAccess::Served(target, Box::new(server), cores.client.clone())
            }
        };
        ways.push((word, way));
    }
    Ok(ways)
}

/// Totals over the slices of one way of access to the file.
#[derive(Clone, Default)]
struct Total {
    measured: Measured,
    /// Sum of the slices' shares of time waiting for a CPU.
    waited: f64,
    /// Number of slices that were measured again because another process had disturbed them.
    again: u32,
    /// Smallest share of waiting time so far.
    usual: Option<f64>,
}

/// Measures all ways in turn, [`SLICES`] times, in reverse order every second time.
fn turns(
    ways: &[(&'static str, FileAccess)],
    medium: &Medium,
    job: &Job,
    cores: &Cores,
) -> Result<Vec<Total>> {
    let mut totals = vec![Total::default(); ways.len()];
    let mut budget = SLICES * ways.len() as u32;
    for slice in 0..SLICES {
        for step in 0..ways.len() {
            let index = if slice % 2 == 0 {
                step
            } else {
                ways.len() - 1 - step
            };
            let (Some((_, way)), Some(total)) = (ways.get(index), totals.get_mut(index)) else {
                continue;
            };
            let (mut best, mut least) = way.slice(job, cores)?;
            for _ in 0..RETRIES {
                let usual = total.usual.map_or(least, |usual| usual.min(least));
                total.usual = Some(usual);
                if budget == 0 || !is_disturbed(way, medium, least, usual) {
                    break;
                }
                budget -= 1;
                total.again += 1;
                let (measured, share) = way.slice(job, cores)?;
                if share < least {
                    (best, least) = (measured, share);
                }
            }
            total.measured.append(&best);
            total.waited += least;
        }
    }
    Ok(totals)
}

/// Creates a file full of data, without holes, on the medium with this name.
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
    let temp = Scratch::new_in(dir)?;
    let path = temp.path().join("disk.raw");
    let mut file = File::create(&path)?;
    let mut chunk = vec![0; 1 << 20];
    for offset in (0..SIZE).step_by(chunk.len()) {
        load::pattern::fill(&mut chunk, offset, 1);
        file.write_all(&chunk)?;
    }
    file.sync_all()?;
    // Direct writes must drop the file's pages from the page cache, which is not to be measured.
    if !wants_tmpfs {
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(Medium {
        word,
        path: std::fs::canonicalize(path)?,
        _dir: temp,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stolen_ticks_are_summed_per_cpu() {
        let stat = "cpu  1 2 3 4 5 6 7 30 9 10\ncpu0 1 2 3 4 5 6 7 10 9 10\ncpu1 1 2 3 4 5 6 7 20 9 10\nintr 5\n";
        assert_eq!(stolen_ticks(stat, &[0, 1]), 30);
        assert_eq!(stolen_ticks(stat, &[1]), 20);
        assert_eq!(stolen_ticks(stat, &[7]), 0);
        assert_eq!(stolen_ticks("cpu0 1 2", &[0]), 0);
    }
}
