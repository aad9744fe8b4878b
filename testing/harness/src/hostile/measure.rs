//! Measurement of one attack on one daemon: first beside an honest client, then under attack, then
//! after the client has disconnected, then during the daemon's end while it is attacked again.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::attacks::{Attack, Fuse};
use super::child::{Child, Skip};
use super::client::fuse;
use super::neighbour::{self, NeighbourSample};
use super::outcome::AttackOutcome;
use super::sampler::{Sampler, WORKER};
use super::schedule::{self, Threads};
use super::test_daemon::{self, Footprint, TestDaemon};

/// Durations of the parts.
#[derive(Clone, Copy)]
pub(super) struct AttackTimes {
    /// Beside the honest client.
    honest: Duration,
    /// Under attack.
    attack: Duration,
    /// Under the second attack, before the daemon is asked to end.
    again: Duration,
    pub(super) long: bool,
}

impl AttackTimes {
    pub(super) const LONG: Self = Self {
        honest: Duration::from_millis(1200),
        attack: Duration::from_millis(3000),
        again: Duration::from_millis(500),
        long: true,
    };
    pub(super) const SHORT: Self = Self {
        honest: Duration::from_millis(400),
        attack: Duration::from_millis(700),
        again: Duration::from_millis(150),
        long: false,
    };
}

/// Limit of a short measurement, on a machine whose other work leaves the neighbour little time.
const SERVED: Duration = Duration::from_secs(10);
/// Until the first figures, while a client starts or leaves.
const SETTLE: Duration = Duration::from_millis(200);
/// Time until a client's resources must be free.
const FREE: Duration = Duration::from_secs(4);
/// A daemon that has not ended by then does not.
const END: Duration = Duration::from_secs(8);
const START: Duration = Duration::from_secs(20);
/// Time in which the first command of an attack must end; else the attack was not tried. Zeroes of
/// 32 MiB on each of 16 queues take 20 s of an unoptimized program, and end at about the same time.
const TRIED: Duration = Duration::from_secs(90);

/// Runs one attack; values that could not be measured are `None`.
pub(super) fn run(program: &Path, attack: &Attack, times: AttackTimes) -> Result<AttackOutcome> {
    let dir = tempfile::Builder::new()
        .prefix("vnvme-hostile-")
        .tempdir()?;
    let result = attacked(program, attack, times, dir.path());
    fuse::unmount_all(dir.path());
    match result {
        Err(error) if error.is::<Skip>() => {
            let mut outcome = AttackOutcome::new(attack);
            outcome.skipped = Some(format!("{error:#}"));
            Ok(outcome)
        }
        other => other,
    }
}

fn fuse_server(attack: &Attack, dir: &Path) -> Result<Option<Child>> {
    if attack.fuse == Fuse::No {
        return Ok(None);
    }
    let mut server = Child::start("fuse", "-", dir, false)?;
    server.wait_for("ready", START)?;
    Ok(Some(server))
}

/// Returns the number of an attack's attempts so far: commands, messages, connections.
fn tried(hostile: &Child) -> u64 {
    let did = hostile.said("did ");
    did.and_then(|did| did.parse().ok()).unwrap_or(0)
}

fn attacked(
    program: &Path,
    attack: &Attack,
    times: AttackTimes,
    dir: &Path,
) -> Result<AttackOutcome> {
    let mut outcome = AttackOutcome::new(attack);
    let mut server = fuse_server(attack, dir)?;
    let kept = attack.before.map(|before| before(dir)).transpose()?;
    let daemon = match TestDaemon::start(program, dir, attack.fuse == Fuse::Volume) {
        Ok(daemon) => daemon,
        Err(error) => {
            outcome.note(format!("{error:#}"));
            return Ok(outcome);
        }
    };
    outcome.started = true;
    let mut good = Child::start("good", "-", dir, times.long)?;
    good.wait_for("seen ", START)
        .context("the good neighbour")?;

    let mut honest = Child::start("honest", "-", dir, times.long)?;
    honest
        .wait_for("ready", START)
        .context("the honest client")?;
    std::thread::sleep(SETTLE);
    let worker = schedule::thread(&daemon.family(), WORKER);
    let reader = schedule::thread(&[good.pid()], neighbour::READER);
    let reads = Reads::new(&good, worker.into_iter().chain(reader));
    std::thread::sleep(times.honest);
    outcome.honest = Some(reads.rate(&good, times.honest, times.long));
    honest.end(Duration::from_secs(1));
    std::thread::sleep(SETTLE);
    let before = daemon.footprint();
    outcome.before = Some(before);
    let log = daemon.log_bytes();

    let mut hostile = Child::start("attack", attack.name, dir, times.long)?;
    hostile.wait_for("ready", START).context("the attack")?;
    let sampler = Sampler::start(&daemon.family());
    let reads = reads.again(&good);
    std::thread::sleep(times.attack / 2);
    let probes = Probes::start(dir, attack.after.is_none());
    std::thread::sleep(times.attack / 2);
    // A machine with much other work gives no time to an attack that yields to all other processes.
    let tries = Instant::now() + TRIED;
    while tried(&hostile) == 0 && hostile.said("skip ").is_none() && Instant::now() < tries {
        std::thread::sleep(Duration::from_millis(20));
    }
    let rate = reads.rate(&good, times.attack, times.long);
    let until = Instant::now();
    if let Some(why) = hostile.said("skip ") {
        drop((hostile, server));
        daemon.kill(END);
        return Err(super::child::skip(why));
    }
    outcome.attacked = Some(rate);
    outcome.longest_read = Some(window(&good, reads.from, until).1);
    if let Some(sampler) = sampler {
        let (blocked, call) = sampler.end();
        outcome.blocked = Some(blocked);
        if let Some(call) = call {
            outcome.blocked_in = Some(call);
        }
    }
    let log = daemon.log_bytes().saturating_sub(log);
    outcome.log_rate = Some(log as f64 / times.attack.as_secs_f64());
    probes.finish(&mut outcome);

    hostile.end(Duration::from_millis(1500));
    outcome.tried = tried(&hostile);
    if let Some(why) = hostile.said("failed ").or_else(|| hostile.said("refused ")) {
        outcome.note(format!("the client saw: {why}"));
    }
    drop(hostile);
    if attack.fuse == Fuse::Files {
        drop(server.take());
    }
    outcome.after = Some(freed(&daemon, before));
    outcome.alive = daemon.is_alive();
    if outcome.alive {
        end(&daemon, attack, times, &mut server, &mut outcome)?;
    } else {
        outcome.note(daemon.tail());
    }
    drop(server);
    // Both directions of every socket are closed now; the neighbour's counts are final.
    std::thread::sleep(neighbour::PERIOD * 2);
    if let Some(kept) = last(&good) {
        outcome.kept = kept.kept;
        outcome.lost = Some(neighbour::first_lost(dir, kept.kept)?.is_some());
    }
    if let Some(after) = attack.after
        && let Err(error) = after(dir)
    {
        outcome.broken = true;
        outcome.note(format!("{error:#}"));
    }
    drop(kept);
    daemon.kill(END);
    Ok(outcome)
}

/// Waits until memory and descriptors are back to their former size, up to a limit.
fn freed(daemon: &TestDaemon, before: Footprint) -> Footprint {
    let deadline = Instant::now() + FREE;
    loop {
        let now = daemon.footprint();
        if AttackOutcome::is_freed(before, now) || Instant::now() > deadline || !daemon.is_alive() {
            return now;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Attacks again, and asks the daemon to end meanwhile.
fn end(
    daemon: &TestDaemon,
    attack: &Attack,
    times: AttackTimes,
    server: &mut Option<Child>,
    outcome: &mut AttackOutcome,
) -> Result<()> {
    let dir = &daemon.dir;
    if attack.fuse == Fuse::Files {
        fuse::unmount_all(dir);
        let _ = std::fs::remove_file(fuse::silence(dir));
        *server = fuse_server(attack, dir)?;
    }
    let hostile = Child::start("attack", attack.name, dir, times.long)?;
    std::thread::sleep(SETTLE + times.again);
    match daemon.terminate(END) {
        Some((took, well)) => {
            outcome.end = Some(took);
            if !well {
                outcome.note(format!("it ended with an error: {}", daemon.tail()));
            }
        }
        None if !daemon.kill(Duration::from_secs(5)) => {
            outcome.note("SIGKILL did not end it".to_owned());
            // The object for which it waits is dropped now.
            drop(server.take());
            drop(hostile);
            daemon.kill(END);
        }
        None => {}
    }
    Ok(())
}

/// Returns the last report of the neighbour.
fn last(good: &Child) -> Option<NeighbourSample> {
    good.said("seen ")
        .and_then(|rest| NeighbourSample::parse(&format!("seen {rest}")))
}

/// The beginning of a measurement of the neighbour's reads.
struct Reads {
    threads: Threads,
    from: Instant,
    reads: u64,
    times: schedule::Times,
}

impl Reads {
    fn new(good: &Child, threads: impl IntoIterator<Item = PathBuf>) -> Self {
        Self::of(good, Threads::new(threads))
    }

    fn of(good: &Child, threads: Threads) -> Self {
        Self {
            from: Instant::now(),
            reads: last(good).unwrap_or_default().reads,
            times: threads.now(),
            threads,
        }
    }

    /// Begins once more, with the same threads.
    fn again(self, good: &Child) -> Self {
        Self::of(good, self.threads)
    }

    /// Returns the neighbour's reads per second. A long measurement has its machine alone. A short
    /// one counts only time in which other work of the machine did not keep the threads waiting,
    /// and lasts until there was enough of it.
    fn rate(&self, good: &Child, enough: Duration, long: bool) -> f64 {
        if long {
            return window(good, self.from, Instant::now()).0;
        }
        loop {
            let now = self.threads.now();
            let served = now.served_since(&self.times);
            if served >= enough || self.from.elapsed() > SERVED {
                let reads = last(good).unwrap_or_default().reads - self.reads;
                return reads as f64 / served.max(neighbour::PERIOD).as_secs_f64();
            }
            std::thread::sleep(neighbour::PERIOD);
        }
    }
}

/// The neighbour's median reads per second in a time, and its longest register read.
fn window(good: &Child, from: Instant, until: Instant) -> (f64, Duration) {
    let lines = good.lines();
    let seen: Vec<(Instant, NeighbourSample)> = lines
        .iter()
        .filter(|(at, _)| (from..=until).contains(at))
        .filter_map(|(at, line)| Some((*at, NeighbourSample::parse(line)?)))
        .collect();
    let mut rates: Vec<f64> = seen
        .windows(2)
        .filter_map(|pair| {
            let [(then, before), (now, after)] = pair else {
                return None;
            };
            let time = (*now - *then).as_secs_f64();
            Some((after.reads - before.reads) as f64 / time)
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    let median = rates.get(rates.len() / 2).copied().unwrap_or(0.0);
    // The first line covers an earlier time, too.
    let longest = seen.iter().skip(1).map(|(_, seen)| seen.longest).max();
    (median, Duration::from_micros(longest.unwrap_or(0)))
}

/// Further clients that use the daemon while it is attacked.
struct Probes {
    control: Option<JoinHandle<()>>,
    answers: mpsc::Receiver<(bool, Result<Duration>)>,
}

impl Probes {
    fn start(dir: &Path, control: bool) -> Self {
        let (tell, answers) = mpsc::channel();
        let spawn = |is_control: bool, ask: fn(&Path) -> Result<Duration>| {
            let (dir, tell) = (dir.to_owned(), tell.clone());
            std::thread::spawn(move || {
                // The receiver may have been dropped.
                let _ = tell.send((is_control, ask(&dir)));
            })
        };
        let control = control.then(|| spawn(true, test_daemon::control_answers));
        spawn(false, test_daemon::newcomer);
        Self { control, answers }
    }

    fn finish(self, outcome: &mut AttackOutcome) {
        outcome.asked_control = self.control.is_some();
        let deadline = Instant::now() + Duration::from_secs(6);
        let wanted = 1 + usize::from(self.control.is_some());
        for _ in 0..wanted {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((is_control, answer)) = self.answers.recv_timeout(left) else {
                break;
            };
            let daemon = if is_control {
                &mut outcome.control
            } else {
                &mut outcome.newcomer
            };
            match answer {
                Ok(took) => *daemon = Some(took),
                Err(error) => {
                    let who = if is_control { "control" } else { "newcomer" };
                    outcome.note(format!("{who}: {error:#}"));
                }
            }
        }
    }
}
