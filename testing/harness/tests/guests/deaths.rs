//! The process that serves dies between any two of its stores, under a load that verifies what it
//! reads: at each crash point of the program, one after the other, by a signal.
//!
//! Each of them is a test for before a release: `cargo test -p harness --test deaths -- --ignored
//! --nocapture`. What the crates' own tests walk over, in one process, is in `controller` and
//! `vhost-blk`.
//!
//! `VNVME_DEATHS` says how often at each, `VNVME_CRASH_BIN` which program has the points.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Disks, LONG_TIMEOUT, number, run, run_for};
use anyhow::{Context, Result, bail, ensure};
use harness::cache::checkout;
use harness::daemon::DaemonBuilder;
use harness::daemon::{build_in, program};
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Guest};
use rustix::process::{Pid, Signal, kill_process};

/// Deaths at each point, where nothing else is said.
const DEATHS: usize = 1;
/// A process that has not come to its point by then never will.
const NOT_PASSED: Duration = Duration::from_secs(15);
/// Looks in a row for a point that is passed now and then only.
const MAX_ATTEMPTS: usize = 12;
const SIZE: &str = "16m";
/// For a process that follows one that has died.
const LIMIT: Duration = Duration::from_secs(30);

/// What begins the names of points that only volumes pass which answer at once.
const INLINE_POINTS: &str = "controller.answer.";

/// The same where a disk is made: under a load there is one already.
const MADE: &str = "vnvme.disk.";

/// Points that no load here passes, and where each is tested.
const ELSEWHERE: [&str; 19] = [
    // QEMU 11.1.3 ends by an assertion where a guest chooses its write cache while the daemon is
    // away: `vhost-blk/tests/it/deaths.rs`.
    "vhost-blk.write-cache.noted",
    // Of flushes, which this load has none of: `controller/tests/it/migration/deaths.rs`.
    "controller.submit.submitted",
    // Of a completion queue without room, which no load leaves full:
    // `controller/tests/it/migration/deaths.rs`.
    "controller.record.ended",
    // Of replies with descriptors, which this load's client does not ask for:
    // `vfio-user/tests/it/journal.rs`.
    "vfio-user.reply.head-noted",
    "vfio-user.reply.headed",
    "vfio-user.resume.heading",
    // Of zones: `controller/tests/it/zones/lasting.rs`, `workers.rs`.
    "controller.zone.",
    "controller.record.applied",
    // Of blocks marked as unreadable: `controller/tests/it/uncorrectable.rs`.
    "controller.mark.marked",
    "controller.mark.recorded",
    "controller.mark.saved",
    // Of metadata: `controller/tests/it/metadata/history.rs`.
    "controller.metadata.",
    // Of formats: `controller/tests/it/formats/lasting.rs`, `metadata/formats.rs`,
    // `vnvme/src/formats.rs`.
    "controller.format.",
    "vnvme.format.",
    "vnvme.metadata.",
    // Of placement handles: `controller/tests/it/placement/lasting.rs`.
    "controller.placement.",
    // Of namespaces that guests make: `controller/tests/it/namespaces/deaths.rs`,
    // `namespace-pool/tests/pool.rs`.
    "controller.pool.",
    "namespace-pool.",
    // Where tracking begins, with a guest's first start: `vhost-blk/tests/it/deaths.rs`.
    "vhost-blk.recover.cleared",
];

/// How often a point is passed before, at most: some are passed once in a process's life, others
/// with each command.
fn most(point: &str) -> u64 {
    let often = [
        ("controller.recover.posted", 1),
        ("controller.recover", 3),
        ("controller.admin", 6),
        ("controller.queue", 4),
        ("controller.commit", 30),
        ("controller.", 4000),
        ("state-memory.control", 30),
        ("state-memory.", 8),
        ("vfio-user.journal", 1),
        ("vfio-user.resume", 1),
        ("vfio-user.arriving", 4),
        ("vfio-user.connection", 1),
        ("vfio-user.version", 1),
        ("vfio-user.unmap", 1),
        ("vfio-user.", 40),
        ("keeper.", 8),
        ("vnvme.", 1),
        ("vhost-blk.message", 20),
        ("vhost-blk.recover", 1),
        ("vhost-blk.queue", 2),
        ("vhost-blk.write-cache", 1),
        ("vhost-blk.", 20),
    ];
    let found = often.iter().find(|(prefix, _)| point.starts_with(prefix));
    found.map_or(1, |(_, most)| *most)
}

/// Where the process before has to die for a point to be passed.
fn before(point: &str) -> Option<&'static str> {
    Some(match point {
        "vfio-user.resume.received" => "vfio-user.take.moved",
        "vfio-user.resume.drained" => "vfio-user.reply.writing",
        "vfio-user.resume.piped" => "vfio-user.reply.written",
        "controller.recover.posted" => "controller.record.posted",
        "controller.recover.replay" | "controller.recover.sq" | "controller.recover.cq" => {
            "controller.record.written"
        }
        "vhost-blk.recover.retired" => "vhost-blk.used.published",
        _ => return None,
    })
}

/// The crash points in the sources of these crates; if `VNVME_POINTS` is set, only those with a
/// part of its list in their names.
fn points(is_wanted: impl Fn(&Path) -> bool) -> Result<Vec<String>> {
    let mut directories = Vec::new();
    let folders = fs::read_dir(checkout().join("crates"))?;
    let crates = folders.flat_map(|folder| fs::read_dir(folder?.path()));
    for entry in crates.flatten() {
        let path = entry?.path();
        // Its points are examples.
        if !path.ends_with("crash") && is_wanted(&path) {
            directories.push(path.join("src"));
        }
    }
    let mut points = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten() {
            let path = entry?.path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap_or_default();
            let named = text.split("crash::point!(\"").skip(1);
            points.extend(named.filter_map(|rest| Some(rest.split('"').next()?.to_owned())));
        }
    }
    points.sort();
    points.dedup();
    ensure!(!points.is_empty(), "no points");
    if let Ok(only) = std::env::var("VNVME_POINTS") {
        let only: Vec<&str> = only.split(',').collect();
        points.retain(|point| only.iter().any(|part| point.contains(part)));
    }
    Ok(points)
}

/// Numbers that differ from run to run, and are told.
struct Chance(u64);

impl Chance {
    fn new() -> Self {
        let seed = std::env::var("VNVME_SEED").ok();
        let seed = seed.and_then(|text| text.parse().ok());
        let time = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        let seed = seed.unwrap_or(time.as_micros() as u64 | 1);
        eprintln!("deaths: VNVME_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// A daemon with processes that die at chosen points.
struct Crashing {
    daemon: Daemon,
    /// What the next processes die at, a line for each.
    plan: PathBuf,
    chance: Chance,
    /// Of the log that was read.
    read: usize,
    died: BTreeMap<String, usize>,
    /// Ends at no point.
    killed: usize,
    /// The process that runs now serves.
    serves: bool,
}

impl Crashing {
    fn start(directory: &Path, serves: &[&str]) -> Result<Self> {
        let builder = Daemon::builder("deaths").arg("--keeper").arg("process");
        let serves = serves.iter();
        Self::of(directory, serves.fold(builder, |to, arg| to.arg(*arg)))
    }

    fn of(directory: &Path, builder: DaemonBuilder) -> Result<Self> {
        let plan = directory.join("plan");
        fs::write(&plan, "")?;
        let builder = builder
            .program(crash_program()?)
            .env("VNVME_CRASH", &plan)
            .limit(Duration::from_secs(7200));
        let daemon = builder.start()?;
        daemon.wait_log("listening", Duration::from_secs(30))?;
        // One that ends before the keeper knows that it serves is not followed.
        std::thread::sleep(Duration::from_secs(1));
        Ok(Self {
            daemon,
            plan,
            chance: Chance::new(),
            read: 0,
            died: BTreeMap::new(),
            killed: 0,
            serves: true,
        })
    }

    /// The process that serves.
    fn serving(&self) -> Option<Pid> {
        let keeper = self.daemon.process().pid();
        let children = format!("/proc/{keeper}/task/{keeper}/children");
        let children = fs::read_to_string(children).ok()?;
        Pid::from_raw(children.split_whitespace().next()?.parse().ok()?)
    }

    /// Counts the deaths that were said since the last look.
    fn look(&mut self) -> Result<()> {
        let log = self.daemon.log()?;
        let (whole, _) = log.split_at(log.rfind('\n').map_or(0, |end| end + 1));
        let new = whole.get(self.read..).unwrap_or_default();
        for line in new.lines() {
            if let Some(point) = line.strip_prefix("crash point ") {
                *self.died.entry(point.to_owned()).or_default() += 1;
                self.serves = false;
            }
            self.serves |= line.contains("this one goes on");
        }
        self.read = whole.len();
        Ok(())
    }

    fn deaths_at(&self, point: &str) -> usize {
        self.died.get(point).copied().unwrap_or(0)
    }

    /// A process that does not serve yet is waited for: many in a row that never serve would be the
    /// end of the keeper.
    fn wait_until_it_serves(&mut self) -> Result<()> {
        let began = Instant::now();
        while !self.serves {
            self.daemon.must_live()?;
            ensure!(began.elapsed() < LIMIT, "no process serves");
            std::thread::sleep(Duration::from_millis(2));
            self.look()?;
        }
        Ok(())
    }

    /// Ends the process that serves.
    fn kill(&mut self) -> Result<()> {
        if let Some(pid) = self.serving() {
            self.killed += 1;
            self.serves = false;
            kill_process(pid, Signal::KILL)?;
        }
        Ok(())
    }

    /// Lets processes die at a point, so many times. `false`: it is not passed.
    fn die_at(&mut self, point: &str, times: usize) -> Result<bool> {
        let (mut done, mut failed) = (0, 0);
        while done < times {
            let count = self.chance.below(most(point)) + 1;
            let mut lines = String::new();
            if let Some(before) = before(point) {
                let count = self.chance.below(most(before)) + 1;
                lines.push_str(&format!("{before}:{count}\n"));
            }
            lines.push_str(&format!("{point}:{count}\n"));
            // The process after this one is to take the first line: one that has just begun would
            // take it, too, and be killed with it.
            self.wait_until_it_serves()?;
            let new = self.plan.with_extension("next");
            fs::write(&new, lines)?;
            fs::rename(new, &self.plan)?;
            let wanted = self.deaths_at(point) + 1;
            let first = before(point).map(|before| (before, self.deaths_at(before)));
            // The one that has no point makes place for one that has.
            self.kill()?;
            let began = Instant::now();
            let limit = NOT_PASSED * if before(point).is_some() { 2 } else { 1 };
            loop {
                self.look()?;
                if self.deaths_at(point) >= wanted {
                    (done, failed) = (done + 1, 0);
                    break;
                }
                // What a process passes when it takes over it has passed when it serves. A
                // front-end of a virtio disk connects only then.
                let is_past = !point.starts_with("vhost-blk.")
                    && first.is_some_and(|(before, n)| self.deaths_at(before) > n);
                if is_past && self.serves || began.elapsed() > limit {
                    failed += 1;
                    break;
                }
                self.daemon.must_live()?;
                std::thread::sleep(Duration::from_millis(5));
            }
            if failed == MAX_ATTEMPTS {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The program with crash points: it has a directory of its own, for it is not what others are to
/// find as the program.
fn crash_program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("VNVME_CRASH_BIN").filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    let args = ["-p", "vnvme", "--features", "crash-points"];
    build_in(
        "vnvme",
        &args,
        Some(&checkout().join("target/crash-points")),
    )
}

/// Loads, one after the other, until the end: each connects anew. Three of four write over what
/// the ones before have written with other bytes, and read back all of it; the fourth deallocates.
/// Answers how many there were.
fn loads(socket: &Path, end: &AtomicBool) -> Result<usize> {
    let target = format!("vfio-user://{}", socket.display());
    let mut loads = 0;
    let mut turned_away = 0;
    while !end.load(Ordering::Acquire) {
        loads += 1;
        let doorbells = ["shadow", "mmio"][loads % 2];
        let seed = loads.to_string();
        // Deallocation takes the general path, with nothing to verify.
        let rw: &[&str] = match loads % 4 {
            0 => &["--rw", "randtrim"],
            _ => &["--rw", "randrw", "--verify"],
        };
        let output = Command::new(program()?)
            .args(["bench", &target, "--bs", "4k"])
            .args(rw)
            .args(["--iodepth", "16", "--size", SIZE])
            .args(["--destroy-data", "--runtime", "0.5", "--seed", &seed])
            .args(["--doorbells", doorbells, "--queues", "2"])
            .args((loads % 3 == 0).then_some("--interrupt"))
            .stdin(Stdio::null())
            .output()?;
        if output.status.success() {
            continue;
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // A client that was accepted, and was not kept yet, has to connect again; so has one if
        // processes start and end during its whole run.
        let idle = said.contains("takes no client now") || said.contains("not one I/O ended");
        if idle && 2 * turned_away < loads {
            turned_away += 1;
            eprintln!("deaths: turned away: {}", said.trim());
            continue;
        }
        bail!(
            "load {loads}: {said}{}",
            String::from_utf8_lossy(&output.stdout)
        );
    }
    eprintln!("deaths: {turned_away} of {loads} loads had to connect again");
    Ok(loads)
}

/// How often it dies at each point.
fn deaths() -> Result<usize> {
    number("VNVME_DEATHS", DEATHS)
}

impl Crashing {
    /// Walks over points until `end`. Those that were not passed must be tested elsewhere.
    fn walk(&mut self, points: &[String], end: &AtomicBool) -> Result<()> {
        let times = deaths()?;
        let mut not_passed = Vec::new();
        for point in points {
            if ELSEWHERE.iter().any(|name| point.starts_with(name)) {
                continue;
            }
            if end.load(Ordering::Acquire) {
                return Ok(());
            }
            let began = Instant::now();
            if !self.die_at(point, times)? {
                not_passed.push(&**point);
            }
            let deaths = self.deaths_at(point);
            let seconds = began.elapsed().as_secs();
            eprintln!("deaths: {point}: {deaths} in {seconds} s");
        }
        let deaths: usize = self.died.values().sum();
        eprintln!(
            "deaths: {deaths} at {} points, and {} kills",
            self.died.len(),
            self.killed
        );
        ensure!(not_passed.is_empty(), "not passed: {not_passed:?}");
        Ok(())
    }

    /// Nobody has died of anything else, and no client was disconnected.
    fn end(self) -> Result<()> {
        let log = self.daemon.log()?;
        for wrong in [
            "is disconnected",
            "will not outlive",
            "panicked",
            "ended=\"exit",
        ] {
            ensure!(!log.contains(wrong), "{wrong}:\n{log}");
        }
        self.daemon.terminate()
    }
}

/// Walks over points of a program, under a load by vfio-user and while something is done besides.
fn walk_under_load(
    mut crashing: Crashing,
    points: &[String],
    besides: impl Fn(&AtomicBool) + Sync,
) -> Result<()> {
    let socket = crashing.daemon.socket().to_path_buf();
    let end = AtomicBool::new(false);
    let (walked, loads) = std::thread::scope(|scope| {
        scope.spawn(|| besides(&end));
        let loads = scope.spawn(|| {
            let loads = loads(&socket, &end);
            end.store(true, Ordering::Release);
            loads
        });
        let walked = crashing.walk(points, &end);
        end.store(true, Ordering::Release);
        (walked, loads.join().unwrap())
    });
    let log = || crashing.daemon.log().unwrap_or_default();
    eprintln!("deaths: {} loads", loads.with_context(log)?);
    walked?;
    crashing.end()
}

#[test]
#[ignore = "takes an hour: make test-long"]
fn disk_survives_death_at_every_point() -> Result<()> {
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 16)?.display().to_string();
    let mut points = points(|path| !path.ends_with("vhost-blk"))?;
    points.retain(|point| !point.starts_with(INLINE_POINTS) && !point.starts_with(MADE));
    let crashing = Crashing::start(disks.dir(), &[&file])?;
    walk_under_load(crashing, &points, |_| ())
}

#[test]
#[ignore = "takes an hour: make test-long"]
fn memory_disk_survives_death_at_every_point() -> Result<()> {
    let disks = Disks::new()?;
    let mut points = points(|path| path.ends_with("controller"))?;
    points.retain(|point| point.starts_with(INLINE_POINTS));
    let crashing = Crashing::start(disks.dir(), &["mem://16M"])?;
    walk_under_load(crashing, &points, |_| ())
}

#[test]
#[ignore = "takes an hour: make test-long"]
fn managed_disks_survive_death_at_every_point() -> Result<()> {
    let disks = Disks::new()?;
    let more = disks.sparse("more.raw", 16)?.display().to_string();
    disks.sparse("disk.raw", 16)?;
    let files = disks.dir().display();
    let path = |name: &str| format!("{files}/{name}");
    let (control, socket) = (path("control"), format!("socket={}", path("more")));
    let config = format!(
        "[process]\ncontrol = \"{control}\"\nallow = [\"{files}\"]\n\
         [[controller]]\nsocket = \"{files}/disk\"\n\
         [[controller.namespace]]\nvolume = \"{files}/disk.raw\"\n"
    );
    fs::write(path("vnvme.toml"), config)?;
    let builder = Daemon::builder("deaths");
    let builder = builder.managed(path("vnvme.toml").as_ref(), path("disk").as_ref());
    let crashing = Crashing::of(disks.dir(), builder)?;
    let program = program()?;
    let did = |words: &[&str]| {
        let mut command = Command::new(&program);
        let command = command.args(words).arg("--control").arg(&control);
        command.output().is_ok_and(|output| output.status.success())
    };
    let mut points = points(|path| path.ends_with("vnvme") || path.ends_with("keeper"))?;
    points.retain(|point| point.starts_with(MADE));
    let made = AtomicUsize::new(0);
    walk_under_load(crashing, &points, |end| {
        while !end.load(Ordering::Acquire) {
            // The process may end in the middle of both; then the disk is there, or it is not.
            let added = did(&["add", "controller", "name=more", &socket, &more]);
            made.fetch_add(added.into(), Ordering::Relaxed);
            did(&["remove", "more"]);
        }
    })?;
    let made = made.into_inner();
    eprintln!("deaths: {made} disks were made");
    ensure!(made > 0, "no disk was made");
    Ok(())
}

/// In the background of the guest, until `/tmp/stop` is there.
const GUEST: &str = r#"
for s in /sys/block/vd*/serial; do [ "$(cat $s)" = VBLK0 ] && q=$(basename ${s%/serial}); done
work() {
    n=0
    while [ ! -e /tmp/stop ]; do
        n=$((n + 1))
        fio --direct=1 --ioengine=io_uring --verify=crc32c --verify_fatal=1 --verify_dump=0 --randseed=$n \
            --filename=/dev/$q --name=many --offset=0 --size=6m --rw=randrw --bsrange=4k-32k --iodepth=16 \
                --verify_backlog=64 \
            --name=flush --offset=8m --size=2m --rw=write --bs=16k --iodepth=4 --fdatasync=8 \
            --name=trims --offset=12m --size=4m --rw=randtrim --bs=8k --iodepth=8 --verify=0 || return 1
    done
    echo $n turns >/tmp/turns
}
rm -f /tmp/stop /tmp/ended
(work >/tmp/fio.log 2>&1; echo $? >/tmp/ended) </dev/null >/dev/null 2>&1 &
"#;
const ENDED: &str = r#"
touch /tmp/stop
for try in $(seq 2000); do [ -e /tmp/ended ] && break; sleep 0.1; done
[ "$(cat /tmp/ended)" = 0 ] || { tail -20 /tmp/fio.log; dmesg | tail -5; exit 1; }
# Debian's kernel says of each of its modules that it is not verified.
dmesg | grep -v 'module verification' | grep -Ei 'virtio.*(fail|error)|I/O error' && exit 1
cat /tmp/turns
"#;

/// The same of a disk with QEMU's front-end, which connects again.
#[test]
#[ignore = "takes an hour: make test-long"]
fn virtio_disk_survives_death_at_every_point() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip("deaths::virtio", "the tests run against QEMU's controller");
        return Ok(());
    }
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 16)?.display().to_string();
    let socket = disks.dir().join("v").display().to_string();
    let points = points(|path| path.ends_with("vhost-blk"))?;
    let volume = format!("{file}?serial=VBLK0");
    let serves = ["null://1M", "--vhost-user-blk", &socket, &volume];
    let mut crashing = Crashing::start(disks.dir(), &serves)?;
    let chardev = format!("socket,id=v0,path={socket},reconnect-ms=10");
    let guest = Guest::builder("deaths")
        .qemu_args(["-chardev", &chardev])
        .qemu_args(["-device", "vhost-user-blk-pci,chardev=v0"])
        .boot()?;
    run(&guest, GUEST)?;
    let walked = crashing.walk(&points, &AtomicBool::new(false));
    let log = || crashing.daemon.log().unwrap_or_default();
    let turns = run_for(&guest, LONG_TIMEOUT, ENDED).with_context(log)?;
    eprintln!("deaths: {}", turns.trim());
    walked?;
    guest.poweroff()?;
    crashing.end()
}
