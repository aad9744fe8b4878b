//! The package in a clean Debian with a real systemd: installed, started as a unit, used by a
//! guest, hung, restarted, upgraded and removed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{Checks, run};
use anyhow::{Context, Result, bail, ensure};
use harness::cache::checkout;
use harness::daemon::program;
use harness::progress::skip;
use harness::systemd::{Machine, PACKAGES, WAIT_TIMEOUT};
use harness::{Cache, Disk, Guest, Tree};

const UNIT: &str = "vnvme.service";
const OF_VM: &str = "vnvme@vm7.service";
/// Where the package is, inside.
const PACKAGE: &str = "/tmp/vnvme.deb";
const FILE: &str = "/var/lib/vnvme/vm0.raw";
/// What the guest writes, and where.
const WRITTEN: &[u8] = b"written by a guest";
const AT: u64 = 1 << 20;

/// The package of this checkout.
fn package(directory: &Path) -> Result<PathBuf> {
    let output = Command::new(checkout().join("packaging/deb.sh"))
        .args([&program()?, directory])
        // Nobody downloads it.
        .env("DPKG_DEB_COMPRESSOR_TYPE", "gzip")
        .env("DPKG_DEB_COMPRESSOR_LEVEL", "1")
        .env("DEBEMAIL", "vnvme@debian.org")
        .output()?;
    ensure!(output.status.success(), "deb.sh: {output:?}");
    Ok(String::from_utf8(output.stdout)?.trim().into())
}

/// Installs it; answers what was said, and whether that went well.
fn install(machine: &Machine, package: &Path) -> Result<(bool, String)> {
    fs::copy(package, machine.path(PACKAGE))?;
    let output = machine.output(&["dpkg", "--install", PACKAGE])?;
    let told = [output.stdout, output.stderr].concat();
    let told = String::from_utf8_lossy(&told).into_owned();
    Ok((output.status.success(), told))
}

/// All that is not as it was in the tree and would not be there without the package.
fn traces(machine: &Machine) -> Result<BTreeSet<String>> {
    let root = machine.changed();
    let (mut found, mut left) = (BTreeSet::new(), vec![root.clone()]);
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let path = entry.path();
            let name = path.strip_prefix(&root)?.display().to_string();
            let kind = entry.file_type()?;
            if kind.is_dir() {
                left.push(path);
            }
            // One that was removed (overlayfs).
            if name.contains("vnvme") && !kind.is_char_device() {
                found.insert(format!("/{name}"));
            }
        }
    }
    Ok(found)
}

/// Its process, as this machine sees it.
fn main_process(machine: &Machine, unit: &str) -> Result<String> {
    let pid = machine.property(unit, "MainPID")?;
    ensure!(pid != "0", "{unit} has no process");
    Ok(pid)
}

fn signal(machine: &Machine, name: &str) -> Result<()> {
    let pid = main_process(machine, UNIT)?;
    machine.run(&["kill", "-s", name, &pid]).map(drop)
}

/// Waits until the journal has this of the unit, and answers it.
fn wait_journal(machine: &Machine, unit: &str, text: &str) -> Result<String> {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        let journal = machine.journal(unit)?;
        if journal.contains(text) {
            return Ok(journal);
        }
        if Instant::now() > deadline {
            bail!("no {text:?} in the journal:\n{journal}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn package_serves_guest_as_systemd_unit() -> Result<()> {
    let cache = Cache::open()?;
    if let Some(reason) = Machine::missing(&cache) {
        skip("systemd: a machine", reason);
        return Ok(());
    }
    let tree = Tree::fetch(&cache, &PACKAGES, |_| Ok(()))?;
    let machine = Machine::start(&cache, &tree)?;
    let dir = tempfile::tempdir()?;
    let package = package(dir.path())?;
    let (is_installed, told) = install(&machine, &package)?;
    if told.contains("vnvme depends on libc6 (>=") {
        skip("systemd: the package", "this machine's C library is newer");
        return Ok(());
    }
    ensure!(is_installed, "{told}");

    let mut checks = Checks::new("systemd");
    checks.check("nothing to complain of", || complaints(&machine));
    checks.check("started", || started(&machine));
    checks.check("a guest", || guest(&machine));
    checks.check("the journal", || journal(&machine));
    checks.check("reloaded", || reloaded(&machine));
    checks.check("sockets of systemd's", || activated(&machine));
    checks.check("the watchdog", || watchdog(&machine));
    checks.check("restarted and stopped", || restarted(&machine));
    checks.check("a mistake", || mistake(&machine));
    checks.check("a process for each VM", || of_vm(&machine));
    checks.check("upgraded", || upgraded(&machine, &package));
    checks.check("removed", || removed(&machine));
    checks.finish();
    Ok(())
}

/// systemd understands the units where they are, man its pages, and Debian's checker the package.
fn complaints(machine: &Machine) -> Result<()> {
    let found = machine.run(&["lintian", "--allow-root", "--profile=debian", PACKAGE])?;
    ensure!(found.is_empty(), "{found}");
    let units = "/usr/lib/systemd/system";
    for unit in [UNIT, "vnvme@.service"] {
        // Keys that it does not know are errors only in words.
        let output = machine.output(&["systemd-analyze", "verify", &format!("{units}/{unit}")])?;
        ensure!(
            output.status.success() && output.stdout.is_empty() && output.stderr.is_empty(),
            "{unit}: {output:?}"
        );
    }
    let pages = machine.run(&["find", "/usr/share/man", "-name", "vnvme*"])?;
    ensure!(pages.lines().count() > 10, "{pages}");
    for page in pages.lines() {
        // A command line of an example is longer than a line: lintian has nothing against that.
        let words = ["env", "MANWIDTH=80", "MANROFFSEQ=", "man", "--warnings"];
        let words = [&words[..], &["--encoding=UTF-8", "--local-file", page]].concat();
        let output = machine.output(&words)?;
        let told = String::from_utf8_lossy(&output.stderr);
        let mut told = told.lines().filter(|line| {
            !(line.is_empty() || line.contains("adjust line") || line.contains("break line"))
        });
        ensure!(
            output.status.success() && !output.stdout.is_empty(),
            "{output:?}"
        );
        ensure!(told.next().is_none(), "{page}: {output:?}");
    }
    Ok(())
}

/// The example of the package is served by the user of the package. It is up when it serves.
fn started(machine: &Machine) -> Result<()> {
    let example = "/usr/share/doc/vnvme/examples/vnvme.toml";
    let made = format!(
        "for vm in 0 1; do truncate -s 64M /var/lib/vnvme/vm$vm.raw; done
         chown vnvme: /var/lib/vnvme/*.raw
         cp {example} /etc/vnvme/"
    );
    machine.run(&["sh", "-ec", &made])?;
    let state = machine.property(UNIT, "ActiveState")?;
    ensure!(state == "inactive", "a package starts nothing: {state}");
    machine.run(&["systemctl", "enable", "--now", UNIT])?;
    ensure!(machine.property(UNIT, "ActiveState")? == "active");
    let journal = machine.journal(UNIT)?;
    // Starting the unit waits until it serves.
    let at = |text: &str| {
        journal
            .find(text)
            .with_context(|| format!("no {text}: {journal}"))
    };
    ensure!(at("READY=1")? < at("Started ")?, "{journal}");
    for socket in ["vm0.sock", "vm1.sock", "control.sock"] {
        let path = machine.path(&format!("/run/vnvme/{socket}"));
        UnixStream::connect(&path).with_context(|| format!("{socket}: {journal}"))?;
    }
    let mode = fs::metadata(machine.path("/run/vnvme/vm0.sock"))?
        .permissions()
        .mode();
    ensure!(mode & 0o777 == 0o660, "socket-group: {mode:o}");
    let listed = machine.run(&["vnvme", "list"])?;
    ensure!(
        listed.contains("vm0") && listed.contains("vm1"),
        "vnvme list: {listed}"
    );
    let user = machine.property(UNIT, "User")?;
    ensure!(user == "vnvme", "{user}");
    Ok(())
}

/// A guest's stock driver reads and writes.
fn guest(machine: &Machine) -> Result<()> {
    let socket = machine.path("/run/vnvme/vm0.sock");
    let guest = Guest::builder("systemd")
        .disk(Disk::VfioUser { socket })
        .boot()?;
    let text = String::from_utf8(WRITTEN.to_vec())?;
    let found = run(
        &guest,
        &format!(
            "d=$(wait_disk 1 1)
             {{ printf '{text}'; head -c 4096 /dev/zero; }} | head -c 4096 >/tmp/block
             dd if=/tmp/block of=$d bs=4096 seek={} oflag=direct conv=fsync 2>/dev/null
             dd if=$d bs=4096 skip={} count=1 iflag=direct 2>/dev/null | head -c {}",
            AT / 4096,
            AT / 4096,
            WRITTEN.len()
        ),
    )?;
    ensure!(found == text, "the guest reads {found:?}");
    guest.poweroff()?;
    is_written(machine)
}

fn is_written(machine: &Machine) -> Result<()> {
    let mut found = [0; WRITTEN.len()];
    File::open(machine.path(FILE))?.read_exact_at(&mut found, AT)?;
    ensure!(found == WRITTEN, "the file has {found:?}");
    Ok(())
}

/// Each line has its level there.
fn journal(machine: &Machine) -> Result<()> {
    let warning = "for a control socket";
    let deadline = Instant::now() + WAIT_TIMEOUT;
    // While the guest's client still leaves, a second one is refused before it is read from.
    while !machine.journal(UNIT)?.contains(warning) {
        ensure!(Instant::now() < deadline, "no {warning:?} in the journal");
        let mut client = UnixStream::connect(machine.path("/run/vnvme/vm0.sock"))?;
        let mut answer = Vec::new();
        let _ = client.write_all(b"GET / HTTP/1.1\r\n\r\n");
        let _ = client.read_to_end(&mut answer);
        std::thread::sleep(Duration::from_millis(50));
    }
    let at = |priority: &str| {
        let words = ["journalctl", "--no-pager", "-o", "cat", "-t", "vnvme"];
        machine.run(&[&words[..], &["-p", priority]].concat())
    };
    let (info, warnings) = (at("info")?, at("warning")?);
    ensure!(
        info.contains("listening") && !warnings.contains("listening"),
        "{info}\n-- warnings:\n{warnings}"
    );
    ensure!(warnings.contains(warning), "{info}\n-- of it:\n{warnings}");
    Ok(())
}

/// A reload adds what is new in the configuration to the same process; one that cannot be had
/// fails, says why, and changes nothing.
fn reloaded(machine: &Machine) -> Result<()> {
    let config = machine.path("/etc/vnvme/vnvme.toml");
    let example = fs::read_to_string(&config)?;
    // In its sandbox it gives no socket to a group.
    let plain = example.replace("socket-group =", "# socket-group =");
    fs::write(&config, &plain)?;
    machine.run(&["systemctl", "restart", UNIT])?;
    let result = reload(machine, &config, &plain);
    fs::write(&config, example)?;
    machine.run(&["systemctl", "restart", UNIT])?;
    result
}

fn reload(machine: &Machine, config: &Path, plain: &str) -> Result<()> {
    let before = main_process(machine, UNIT)?;
    let more = |volume: &str| {
        format!(
            "{plain}[[controller]]\nsocket = \"/run/vnvme/vm2.sock\"\n\
             namespace = [{{ volume = \"{volume}\" }}]\n"
        )
    };
    let socket = machine.path("/run/vnvme/vm2.sock");
    fs::write(config, more("/var/lib/vnvme/none.raw"))?;
    let output = machine.output(&["systemctl", "reload", UNIT])?;
    ensure!(!output.status.success(), "{output:?}");
    wait_journal(machine, UNIT, "/var/lib/vnvme/none.raw: ")?;
    ensure!(!socket.exists());
    fs::write(config, more("mem://16M"))?;
    machine.run(&["systemctl", "reload", UNIT])?;
    UnixStream::connect(&socket)?;
    let listed = machine.run(&["vnvme", "list"])?;
    ensure!(
        listed.contains("vm2") && listed.contains("16 MiB"),
        "{listed}"
    );
    fs::write(config, plain)?;
    machine.run(&["systemctl", "reload", UNIT])?;
    ensure!(!socket.exists(), "it is still there");
    ensure!(main_process(machine, UNIT)? == before, "another process");
    Ok(())
}

/// A socket that systemd opens: it exists while the daemon does not run, a connection starts the
/// daemon, and it is for a group that the daemon could not give it to in its sandbox.
fn activated(machine: &Machine) -> Result<()> {
    let unit = machine.path("/etc/systemd/system/vnvme.socket");
    fs::write(
        &unit,
        "[Socket]\nListenStream=/run/vnvme/control.sock\nListenStream=/run/vnvme/vm2.sock\n\
         SocketGroup=kvm\nSocketMode=0660\nRemoveOnStop=yes\n",
    )?;
    let config = machine.path("/etc/vnvme/vnvme.toml");
    let example = fs::read_to_string(&config)?;
    machine.run(&["systemctl", "stop", UNIT])?;
    machine.run(&["systemctl", "daemon-reload"])?;
    machine.run(&["systemctl", "start", "vnvme.socket"])?;
    ensure!(machine.property(UNIT, "ActiveState")? == "inactive");
    // The client waits for its answer; disks are entered while the daemon starts.
    machine.run(&["vnvme", "list"])?;
    machine.wait_property(UNIT, "ActiveState", |state| state == "active")?;
    let listed = machine.run(&["vnvme", "list"])?;
    ensure!(listed.contains("vm0"), "{listed}");
    // A disk that is added later has a socket for a group.
    let more = "[[controller]]\nsocket = \"/run/vnvme/vm2.sock\"\nsocket-group = \"kvm\"\n\
                namespace = [{ volume = \"mem://16M\" }]\n";
    fs::write(&config, format!("{example}{more}"))?;
    machine.run(&["systemctl", "reload", UNIT])?;
    let socket = machine.path("/run/vnvme/vm2.sock");
    let mode = || Ok::<_, anyhow::Error>(fs::metadata(&socket)?.permissions().mode() & 0o777);
    ensure!(mode()? == 0o660, "{:o}", mode()?);
    UnixStream::connect(&socket)?;
    wait_journal(machine, UNIT, "RELOADING=1")?;
    // It is there when the daemon is not.
    machine.run(&["systemctl", "restart", UNIT])?;
    let listed = machine.run(&["vnvme", "list"])?;
    ensure!(listed.contains("vm2"), "{listed}");
    machine.run(&["systemctl", "stop", "vnvme.socket", UNIT])?;
    ensure!(!socket.exists(), "systemd has removed it");
    fs::remove_file(unit)?;
    fs::write(&config, example)?;
    machine.run(&["systemctl", "daemon-reload"])?;
    // So many starts are no loop.
    machine.run(&["systemctl", "reset-failed", UNIT])?;
    machine.run(&["systemctl", "start", UNIT]).map(drop)
}

/// It says that it is alive; when it does not, systemd starts it again.
fn watchdog(machine: &Machine) -> Result<()> {
    let directory = machine.path(&format!("/etc/systemd/system/{UNIT}.d"));
    fs::create_dir_all(&directory)?;
    fs::write(directory.join("test.conf"), "[Service]\nWatchdogSec=5\n")?;
    machine.run(&["systemctl", "daemon-reload"])?;
    machine.run(&["systemctl", "restart", UNIT])?;
    let time = "WatchdogTimestampMonotonic";
    let first = machine.property(UNIT, time)?;
    machine.wait_property(UNIT, time, |now| now != first)?;
    let before = main_process(machine, UNIT)?;
    signal(machine, "STOP")?;
    wait_journal(machine, UNIT, "Watchdog timeout")?;
    let is_new = |pid: &str| pid != "0" && pid != before;
    machine.wait_property(UNIT, "MainPID", is_new)?;
    machine.wait_property(UNIT, "ActiveState", |state| state == "active")?;
    UnixStream::connect(machine.path("/run/vnvme/vm0.sock"))?;
    fs::remove_dir_all(&directory)?;
    machine.run(&["systemctl", "daemon-reload"])?;
    machine.run(&["systemctl", "restart", UNIT]).map(drop)
}

/// A restart is another process with the same disks; its end is clean, and announced.
fn restarted(machine: &Machine) -> Result<()> {
    // The starts of the checks before are no loop.
    machine.run(&["systemctl", "reset-failed", UNIT])?;
    let before = main_process(machine, UNIT)?;
    machine.run(&["systemctl", "restart", UNIT])?;
    let now = main_process(machine, UNIT)?;
    ensure!(now != before, "it is the same process");
    is_written(machine)?;
    let stops = |journal: String| journal.matches("STOPPING=1").count();
    let announced = stops(machine.journal(UNIT)?);
    ensure!(announced > 0, "a restart is a stop");
    machine.run(&["systemctl", "stop", UNIT])?;
    ensure!(machine.property(UNIT, "Result")? == "success");
    ensure!(machine.property(UNIT, "ActiveState")? == "inactive");
    ensure!(stops(machine.journal(UNIT)?) > announced);
    ensure!(
        machine.path("/run/vnvme").is_dir(),
        "the sockets of other units are there"
    );
    // One that is killed is started again.
    machine.run(&["systemctl", "start", UNIT])?;
    let before = main_process(machine, UNIT)?;
    signal(machine, "KILL")?;
    let is_new = |pid: &str| pid != "0" && pid != before;
    machine.wait_property(UNIT, "MainPID", is_new)?;
    machine.wait_property(UNIT, "ActiveState", |state| state == "active")?;
    Ok(())
}

/// One in the configuration is told by the journal, and the unit does not go on trying for ever.
/// A disk without its file is unavailable and stops nothing; a key that does not exist does.
fn mistake(machine: &Machine) -> Result<()> {
    let config = machine.path("/etc/vnvme/vnvme.toml");
    let right = fs::read_to_string(&config)?;
    fs::write(&config, right.replace("/vm1.raw", "/none.raw"))?;
    machine.run(&["systemctl", "restart", UNIT])?;
    ensure!(machine.property(UNIT, "ActiveState")? == "active");
    let journal = machine.journal(UNIT)?;
    ensure!(
        journal.contains("the disk is unavailable") && journal.contains("/none.raw: no such file"),
        "{journal}"
    );
    fs::write(&config, format!("no-such-key = 1\n{right}"))?;
    let output = machine.output(&["systemctl", "restart", UNIT])?;
    ensure!(!output.status.success(), "it started");
    machine.wait_property(UNIT, "ActiveState", |state| state == "failed")?;
    let journal = machine.journal(UNIT)?;
    ensure!(
        journal.contains("parse error at line 1") && journal.contains("no-such-key"),
        "{journal}"
    );
    fs::write(&config, right)?;
    machine.run(&["systemctl", "reset-failed", UNIT])?;
    machine.run(&["systemctl", "start", UNIT]).map(drop)
}

fn of_vm(machine: &Machine) -> Result<()> {
    fs::write(
        machine.path("/etc/vnvme/vm7.toml"),
        "[[controller]]\nsocket = \"/run/vnvme/vm7/nvme.sock\"\n\
         [[controller.namespace]]\nvolume = \"mem://16M\"\n",
    )?;
    machine.run(&["systemctl", "enable", "--now", OF_VM])?;
    UnixStream::connect(machine.path("/run/vnvme/vm7/nvme.sock"))?;
    ensure!(machine.property(UNIT, "ActiveState")? == "active");
    Ok(())
}

/// Running processes survive the upgrade of the package.
fn upgraded(machine: &Machine, package: &Path) -> Result<()> {
    let running = || -> Result<_> {
        let of = |unit| main_process(machine, unit);
        Ok([of(UNIT)?, of(OF_VM)?])
    };
    let before = running()?;
    let (is_installed, told) = install(machine, package)?;
    ensure!(is_installed, "{told}");
    ensure!(told.contains("the previous version until"), "{told}");
    ensure!(running()? == before, "its processes are others");
    Ok(())
}

/// Nothing runs any more, and nothing is left but configuration and disks; then these, too.
fn removed(machine: &Machine) -> Result<()> {
    let pids = [main_process(machine, UNIT)?, main_process(machine, OF_VM)?];
    machine.run(&["dpkg", "--remove", "vnvme"])?;
    for pid in &pids {
        ensure!(!machine.path("/proc").join(pid).exists(), "{pid} runs");
    }
    let mut wanted: BTreeSet<String> = [
        "/etc/apparmor.d/abstractions/libvirt-qemu.d/vnvme",
        "/etc/vnvme",
        "/etc/vnvme/vm7.toml",
        "/etc/vnvme/vnvme.toml",
        "/var/lib/dpkg/info/vnvme.list",
        "/var/lib/dpkg/info/vnvme.postrm",
        "/var/lib/vnvme",
        // What was added at run time: the example asks for it. And what keeps two processes from
        // one such file.
        "/var/lib/vnvme/added.disks",
        "/var/lib/vnvme/added.disks/vm0.toml",
        "/var/lib/vnvme/added.disks/vm1.toml",
        "/var/lib/vnvme/added.disks/vm2.toml",
        "/var/lib/vnvme/added.toml",
        "/var/lib/vnvme/added.toml.lock",
        "/var/lib/vnvme/vm0.raw",
        "/var/lib/vnvme/vm1.raw",
    ]
    .map(String::from)
    .into();
    ensure!(traces(machine)? == wanted, "{:#?}", traces(machine)?);
    ensure!(!machine.path("/run/vnvme").exists(), "/run/vnvme is left");

    machine.run(&["dpkg", "--purge", "vnvme"])?;
    // Disks are nobody's to remove.
    wanted.retain(|path| path == "/var/lib/vnvme" || path.ends_with(".raw"));
    ensure!(traces(machine)? == wanted, "{:#?}", traces(machine)?);
    Ok(())
}
