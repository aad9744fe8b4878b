//! The README's way from a clone to a guest with a disk, as printed.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use harness::cache::checkout;
use harness::daemon::{build, program};
use harness::documents::{ON_HOST, Script};
use harness::process::Process;
use harness::progress::skip;
use harness::served::Controller;
use harness::{Cache, Guest};
use rustix::process::Signal;

use crate::common::run;

/// Bounds the start and the end of the server.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// A folder where commands of the pages run, with a program that stands for cargo.
struct Place {
    cache: Cache,
    work: tempfile::TempDir,
    /// Instead of /tmp. The path of a socket has to be short.
    tmp: tempfile::TempDir,
}

impl Place {
    fn new() -> Result<Place> {
        let cache = Cache::open()?;
        let work = cache.scratch()?;
        let cargo = work.path().join("cargo");
        let programs = [
            program()?,
            build("demo", &["-p", "harness", "--bin", "demo"])?,
        ];
        let [vnvme, demo] = programs.each_ref().map(|path| path.display());
        fs::write(
            &cargo,
            format!(
                "#!/bin/sh\n[ \"$1\" = build ] || exit 1\nmkdir -p target/release\n\
                 ln -sf '{vnvme}' target/release/vnvme\nln -sf '{demo}' target/release/demo\n"
            ),
        )?;
        fs::set_permissions(&cargo, Permissions::from_mode(0o755))?;
        let tmp = tempfile::Builder::new().prefix("vnvme-").tempdir()?;
        Ok(Place { cache, work, tmp })
    }

    /// Returns the words that run a script in a folder, as in a terminal that was just opened.
    fn words(&self, folder: &Path, script: &str) -> Result<Vec<String>> {
        let repository = format!("'{}'", checkout().display());
        let tmp = format!("{}/", self.tmp.path().display());
        // The repository may lie in /tmp.
        let script = script
            .replace("/tmp/", &tmp)
            .replace("<this repository>", &repository);
        let path = format!(
            "PATH={}:{}",
            self.work.path().display(),
            std::env::var("PATH")?
        );
        let cache = format!("VNVME_HARNESS_CACHE={}", self.cache.path("").display());
        let mut words = vec![
            "env".to_owned(),
            "-C".to_owned(),
            folder.display().to_string(),
        ];
        // Variables of the cargo and the make that run this test.
        for name in [
            "CARGO",
            "CARGO_TARGET_DIR",
            "CARGO_MAKEFLAGS",
            "MAKEFLAGS",
            "MFLAGS",
            "MAKELEVEL",
        ] {
            words.extend(["-u".to_owned(), name.to_owned()]);
        }
        words.extend([path, cache, "sh".to_owned(), "-c".to_owned(), script]);
        Ok(words)
    }

    /// Runs a script in a folder; it must succeed. Answers both outputs.
    fn run(&self, folder: &Path, script: &str) -> Result<String> {
        let script = format!("exec 2>&1 </dev/null\n{script}");
        let words = self.words(folder, &script)?;
        let (program, args) = words.split_first().context("no command")?;
        let output = Command::new(program).args(args).output()?;
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "{told}");
        Ok(told)
    }
}

/// A clone boots a guest by `make demo`; then the README's daemon serves a disk, and the README's
/// QEMU has it.
#[test]
fn guest_of_readme_has_disk() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip("documents", "it needs vnvme");
        return Ok(());
    }
    let place = Place::new()?;
    let mut pages = Script::open(ON_HOST)?;
    let clone = place.work.path().join("vnvme");

    let told = place.run(
        place.work.path(),
        &pages.take("git clone <this repository>")?.script(),
    )?;
    ensure!(told.contains("demo: ok"), "{told}");

    let server = pages.take("cargo build --release\n")?.server_script();
    let words = place.words(&clone, &server)?.into_iter().map(Into::into);
    let log = place.work.path().join("log");
    let words: Vec<_> = words.collect();
    let server = Process::start("readme", &words, &[], &log, 20 * WAIT_TIMEOUT)?;
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let told = || fs::read_to_string(&log);
    while !told()?.contains("listening") {
        let is_alive = server.ended().is_none() && Instant::now() < deadline;
        ensure!(is_alive, "no socket: {}", told()?);
        std::thread::sleep(Duration::from_millis(20));
    }

    let qemu = &pages.take("qemu-system-x86_64 -enable-kvm")?.text;
    let split = format!("set -- {qemu}\nprintf '%s\\n' \"$@\"");
    let words = place.run(&clone, &split)?;
    let words = words.lines().map(str::to_owned).collect();
    let guest = Guest::builder("readme").printed(words).boot()?;
    let found = run(
        &guest,
        "d=$(wait_disk 1 1); echo $d $(blockdev --getsize64 $d)",
    )?;
    ensure!(
        found.trim() == format!("/dev/nvme0n1 {}", 20u64 << 30),
        "{found}"
    );
    guest.poweroff()?;
    server.signal(Signal::TERM)?;
    let status = server.wait(WAIT_TIMEOUT)?;
    ensure!(status.success(), "{status}: {}", told()?);
    pages.finish()
}

/// bpftrace finds the probe and the arguments that the page prints in the program.
#[test]
fn probe_of_operations_page_is_in_program() -> Result<()> {
    let mut pages = Script::open(&[])?;
    let text = &pages.take("bpftrace -e 'usdt:")?.text;
    let mut parts = text.split(':').skip(2);
    let (provider, probe) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
    let probe = probe.split(' ').next().unwrap_or("");
    let last = (0..10).rfind(|number| text.contains(&format!("arg{number}")));
    // .note.stapsdt: names of the provider and of the probe, and the places of its arguments.
    let name = format!("{provider}\0{probe}\0");
    let program = fs::read(program()?)?;
    let at = program
        .windows(name.len())
        .position(|window| window == name.as_bytes());
    let at = at.with_context(|| format!("{provider}:{probe} is not in the program"))?;
    let places = program[at + name.len()..].split(|&b| b == 0).next();
    let places = String::from_utf8_lossy(places.unwrap_or(&[])).into_owned();
    let count = places.split(' ').count();
    ensure!(last.is_some_and(|last| last < count), "{probe}: {places}");
    Ok(())
}
