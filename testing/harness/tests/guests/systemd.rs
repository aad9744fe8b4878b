//! The package in a clean Debian with a real systemd: installed, started as a unit, used by a
//! guest, hung, restarted, upgraded and removed.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{Checks, run};
use anyhow::{Context, Result, bail, ensure};
use harness::cache::checkout;
use harness::daemon::program;
use harness::documents::{IN_MACHINE, Script};
use harness::progress::skip;
use harness::systemd::{Machine, OLDER_PACKAGES, PACKAGES, WAIT_TIMEOUT};
use harness::tree::PackageSet;
use harness::{Cache, Disk, Guest, Tree};

const UNIT: &str = "vnvme.service";
const OF_VM: &str = "vnvme@vm7.service";
/// Where the package is, inside.
const PACKAGE: &str = "/run/vnvme.deb";
/// Copy of this checkout in the machine, in which commands of the pages run. Traces of the package
/// are not searched there. The first unit empties /tmp on Debian 12.
const SOURCE: &str = "/run/source";
/// Programs that stand for others there: the built program, and scripts instead of a compiler.
const SHIMS: &str = "/run/shims";
/// Root needs no password; another user is taken with its groups.
const SUDO: &str = r#"[ "$1" != -u ] || { user=$2; shift 2
    set -- setpriv --reuid="$user" --regid="$user" --init-groups -- "$@"; }
exec "$@""#;
const FILE: &str = "/var/lib/vnvme/vm0.raw";
/// What the guest writes, and where.
const WRITTEN: &[u8] = b"written by a guest";
const AT: u64 = 1 << 20;

/// Copies the program and the parts of this checkout that a package is made of into the machine.
/// Answers whether the program runs there.
fn copy_source(machine: &Machine) -> Result<bool> {
    let source = machine.path(SOURCE);
    fs::create_dir_all(&source)?;
    let parts = "Cargo.toml Makefile *.md docs testing/harness/setup.sh packaging";
    let copied = Command::new("sh")
        .args([
            "-ec",
            &format!("git ls-files -z -- {parts} | tar --null -T - -c | tar -x -C \"$0\""),
        ])
        .arg(&source)
        .current_dir(checkout())
        .output()?;
    ensure!(copied.status.success(), "{copied:?}");
    let shims = machine.path(SHIMS);
    fs::create_dir(&shims)?;
    // Without symbols, of which a program that was built for tests has many.
    let small = Command::new("strip")
        .args([
            "--strip-unneeded",
            "--remove-section=.comment",
            "--remove-section=.note",
            "-o",
        ])
        .arg(shims.join("built"))
        .arg(program()?)
        .status();
    if !small.is_ok_and(|status| status.success()) {
        fs::copy(program()?, shims.join("built"))?;
    }
    for (name, script) in [
        (
            "cargo",
            "mkdir -p target/release && cp /run/shims/built target/release/vnvme",
        ),
        ("cc", ""),
        ("sudo", SUDO),
    ] {
        let path = shims.join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n"))?;
        fs::set_permissions(path, Permissions::from_mode(0o755))?;
    }
    let output = machine.output(&["/run/shims/built", "--version"])?;
    let told = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() || told.contains("GLIBC_"), "{told}");
    Ok(output.status.success())
}

/// Runs a script in the machine, in the copied checkout; it must succeed. Answers both outputs.
fn run_script(machine: &Machine, script: &str) -> Result<String> {
    let script = format!(
        "exec 2>&1 </dev/null
         export PATH={SHIMS}:$PATH TERM=linux DEBEMAIL=vnvme@debian.org
         # Nobody downloads the package.
         export DPKG_DEB_COMPRESSOR_TYPE=gzip DPKG_DEB_COMPRESSOR_LEVEL=1
         cd {SOURCE} || exit
         {script}"
    );
    let output = machine.output(&["sh", "-c", &script])?;
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{told}");
    Ok(told)
}

/// Runs the commands of a page as printed.
fn run_printed(machine: &Machine, pages: &mut Script, name: &'static str) -> Result<String> {
    run_script(machine, &pages.take(name)?.script())
}

/// Runs a server's command of a page; once it has printed a text, another script, which must
/// succeed; and then ends the server. `rest` stands for the command's `...`.
fn run_server(
    machine: &Machine,
    pages: &mut Script,
    name: &'static str,
    rest: &str,
    (ready, script): (&str, &str),
) -> Result<String> {
    let server = pages.take(name)?.server_script().replace("...", rest);
    run_script(
        machine,
        &format!(
            "sh >/run/server.log 2>&1 <<'END' &\n{server}\nEND
             server=$!
             for try in $(seq 600); do
                 grep -q '{ready}' /run/server.log && break
                 kill -0 $server || break
                 sleep 0.1
             done
             grep -q '{ready}' /run/server.log && ({script}) || {{ cat /run/server.log; exit 1; }}
             kill -TERM $server
             wait $server || {{ cat /run/server.log; exit 1; }}"
        ),
    )
}

/// Installs the package; answers its output, and whether that went well.
fn install(machine: &Machine) -> Result<(bool, String)> {
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

/// Lets systemd forget the starts of earlier checks, which would look like a loop.
fn forget_starts(machine: &Machine) -> Result<()> {
    machine.run(&["systemctl", "reset-failed", UNIT]).map(drop)
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

/// A machine of these packages, with the checkout to install from.
fn start(packages: &PackageSet) -> Result<Option<Machine>> {
    let cache = Cache::open()?;
    if let Some(reason) = Machine::missing(&cache) {
        skip("systemd: a machine", reason);
        return Ok(None);
    }
    let tree = Tree::fetch(&cache, packages, |_| Ok(()))?;
    let machine = Machine::start(&cache, &tree)?;
    if !copy_source(&machine)? {
        skip("systemd: the package", "this machine's C library is newer");
        return Ok(None);
    }
    Ok(Some(machine))
}

#[test]
fn package_serves_guest_as_systemd_unit() -> Result<()> {
    let Some(machine) = start(&PACKAGES)? else {
        return Ok(());
    };
    let mut pages = Script::open(IN_MACHINE)?;
    let mut checks = Checks::new("systemd");
    checks.check("make install", || installed_by_make(&machine, &mut pages));
    checks.check("a package", || packaged(&machine, &mut pages));
    checks.check("nothing to complain of", || complaints(&machine));
    checks.check("started", || started(&machine, &mut pages));
    checks.check("a guest", || guest(&machine));
    checks.check("the journal", || journal(&machine, &mut pages));
    checks.check("printed commands", || operated(&machine, &mut pages));
    checks.check("reloaded", || reloaded(&machine));
    checks.check("metrics", || metrics(&machine, &mut pages));
    checks.check("sockets of systemd's", || activated(&machine, &mut pages));
    checks.check("the watchdog", || watchdog(&machine));
    checks.check("restarted and stopped", || restarted(&machine));
    checks.check("a mistake", || mistake(&machine));
    checks.check("a process for each VM", || of_vm(&machine));
    checks.check("upgraded", || upgraded(&machine));
    checks.check("removed", || removed(&machine));
    checks.check("all commands of the pages", || pages.finish());
    checks.finish();
    Ok(())
}

/// Debian 12 has systemd 252, whose options are fewer.
#[test]
fn package_is_used_and_removed_on_debian_12() -> Result<()> {
    let Some(machine) = start(&OLDER_PACKAGES)? else {
        return Ok(());
    };
    let mut pages = Script::open(IN_MACHINE)?;
    let mut checks = Checks::new("systemd 252");
    checks.check("make install", || installed_by_make(&machine, &mut pages));
    checks.check("a package", || packaged(&machine, &mut pages));
    checks.check("started", || started(&machine, &mut pages));
    checks.check("the journal", || journal(&machine, &mut pages));
    checks.check("printed commands", || operated(&machine, &mut pages));
    checks.check("reloaded", || reloaded(&machine));
    checks.check("metrics", || metrics(&machine, &mut pages));
    checks.check("sockets of systemd's", || activated(&machine, &mut pages));
    checks.check("a process for each VM", || of_vm(&machine));
    checks.check("upgraded", || upgraded(&machine));
    checks.check("removed", || removed(&machine));
    checks.check("all commands of the pages", || pages.finish());
    checks.finish();
    Ok(())
}

/// Installed below /usr/local and removed again, nothing is left but configuration and folders.
fn installed_by_make(machine: &Machine, pages: &mut Script) -> Result<()> {
    run_printed(
        machine,
        pages,
        "cargo build --release -p vnvme && sudo make install",
    )?;
    let user = machine.run(&["stat", "-c", "%U %a", "/run/vnvme", "/var/lib/vnvme"])?;
    ensure!(user == "vnvme 755\nvnvme 750\n", "{user}");
    let path = machine.property(UNIT, "FragmentPath")?;
    ensure!(
        path == "/usr/local/lib/systemd/system/vnvme.service",
        "{path}"
    );
    run_printed(machine, pages, "systemctl disable --now vnvme")?;
    run_printed(machine, pages, "make uninstall")?;
    let left = [
        "/etc/apparmor.d/abstractions/libvirt-qemu.d/vnvme",
        "/etc/vnvme",
        "/var/lib/vnvme",
    ];
    let left: BTreeSet<String> = left.map(String::from).into();
    ensure!(traces(machine)? == left, "{:#?}", traces(machine)?);
    Ok(())
}

/// The file of this architecture in `VNVME_PACKAGES`, a directory that `make packages` has filled.
fn released(ending: &str) -> Result<Option<PathBuf>> {
    let Some(directory) = std::env::var_os("VNVME_PACKAGES") else {
        return Ok(None);
    };
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with(ending) {
            return Ok(Some(path));
        }
    }
    bail!("VNVME_PACKAGES has no {ending}");
}

/// The package is made and installed; with `VNVME_PACKAGES`, the released one is installed instead.
fn packaged(machine: &Machine, pages: &mut Script) -> Result<()> {
    if let Some(package) = released("_amd64.deb")? {
        pages.take("make package && sudo dpkg")?;
        fs::copy(package, machine.path(PACKAGE))?;
        let (is_installed, told) = install(machine)?;
        ensure!(is_installed, "{told}");
    } else {
        run_printed(machine, pages, "make package && sudo dpkg")?;
        run_script(machine, &format!("cp target/debian/vnvme_*.deb {PACKAGE}"))?;
    }
    let path = machine.property(UNIT, "FragmentPath")?;
    ensure!(path == "/usr/lib/systemd/system/vnvme.service", "{path}");
    Ok(())
}

/// The pages' commands for a running daemon do as the pages say.
fn operated(machine: &Machine, pages: &mut Script) -> Result<()> {
    forget_starts(machine)?;
    for (name, wanted) in [
        ("systemctl status", ""),
        ("systemctl status vnvme", "active (running)"),
        ("systemctl reload vnvme", ""),
        ("vnvme reload", ""),
        ("vnvme check /etc/vnvme", ""),
        ("vnvme save", "[[controller]]"),
        ("vnvme stats", "vm0"),
        ("vnvme stats --json", "\"measured\""),
        ("vnvme list --all", "vm0"),
        ("vnvme metrics --all", "vnvme_instance_up"),
        ("vnvme devices", ""),
        ("vnvme upgrade", ""),
        ("systemd-analyze security --offline", "OK"),
    ] {
        let told = run_printed(machine, pages, name)?;
        ensure!(told.contains(wanted), "{name}: {told}");
    }
    let info = pages.take("vnvme info disk.raw")?.script();
    let told = run_script(machine, &format!("truncate -s 16M disk.raw\n{info}"))?;
    ensure!(told.contains("16 MiB"), "{told}");
    // A terminal, at which somebody types `q` once the disk is shown.
    let all = pages.take("vnvme top --all")?.text.clone();
    let top = &pages.take("vnvme top")?.text;
    let keys = "for try in $(seq 600); do grep -q vm0 /run/top.log && printf q; sleep 0.1; done";
    let shown = format!(
        ": >/run/top.log
         {{ {keys}; }} 2>/dev/null | script -qec '{top}' --flush /run/top.log"
    );
    for shown in [shown.clone(), shown.replace(top, &all)] {
        let told = run_script(machine, &shown)?;
        ensure!(told.contains("vm0") && !told.contains("-0 IOPS"), "{told}");
    }
    machine.run(&["systemctl", "stop", UNIT])?;
    run_server(
        machine,
        pages,
        "sudo -u vnvme vnvme daemon --config",
        "",
        ("listening", "vnvme list | grep vm0"),
    )?;
    machine.run(&["systemctl", "start", UNIT]).map(drop)
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
fn started(machine: &Machine, pages: &mut Script) -> Result<()> {
    let state = machine.property(UNIT, "ActiveState")?;
    ensure!(state == "inactive", "a package starts nothing: {state}");
    let listed = run_printed(
        machine,
        pages,
        "cp /usr/share/doc/vnvme/examples/vnvme.toml",
    )?;
    ensure!(
        listed.contains("vm0") && listed.contains("vm1") && !listed.contains("unavailable"),
        "vnvme list: {listed}"
    );
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
fn journal(machine: &Machine, pages: &mut Script) -> Result<()> {
    let warning = "for a control socket";
    let deadline = Instant::now() + WAIT_TIMEOUT;
    // While the guest's client still leaves, a second one is refused before it is read from.
    while !machine.journal(UNIT)?.contains(warning) {
        ensure!(Instant::now() < deadline, "no {warning:?} in the journal");
        let mut client = UnixStream::connect(machine.path("/run/vnvme/vm0.sock"))?;
        client.set_read_timeout(Some(WAIT_TIMEOUT))?;
        let mut answer = Vec::new();
        let _ = client.write_all(b"GET / HTTP/1.1\r\n\r\n");
        let _ = client.read_to_end(&mut answer);
        std::thread::sleep(Duration::from_millis(50));
    }
    let at = |priority: &str| {
        let words = ["journalctl", "--no-pager", "-o", "cat", "-t", "vnvme"];
        machine.run(&[&words[..], &["-p", priority]].concat())
    };
    let warnings = run_printed(machine, pages, "journalctl -u vnvme -p warning")?;
    let info = at("info")?;
    ensure!(
        info.contains("listening") && !warnings.contains("listening"),
        "{info}\n-- warnings:\n{warnings}"
    );
    ensure!(warnings.contains(warning), "{info}\n-- of it:\n{warnings}");
    // Kernels differ in the number of Landlock's ABI.
    let parts = |line: &str| {
        let (before, after) = line.split_once("ABI ")?;
        let after = after.trim_start_matches(|c: char| c.is_ascii_digit());
        Some((before.to_owned(), after.to_owned()))
    };
    let printed = parts(pages.take("sandbox: landlock")?.text.trim()).context("no ABI")?;
    let found: Vec<_> = info.lines().filter_map(parts).collect();
    // The module stands before the text.
    let is_found = found
        .iter()
        .any(|(before, after)| before.ends_with(&printed.0) && *after == printed.1);
    ensure!(is_found, "no {printed:?} in {found:?}");
    Ok(())
}

/// A reload adds what is new in the configuration to the same process; one that cannot be had
/// fails, says why, and changes nothing.
fn reloaded(machine: &Machine) -> Result<()> {
    forget_starts(machine)?;
    let config = machine.path("/etc/vnvme/vnvme.toml");
    let example = fs::read_to_string(&config)?;
    let result = reload(machine, &config, &example);
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
    let of = |name: &str| -> Result<_> {
        let found = fs::metadata(machine.path(&format!("/run/vnvme/{name}.sock")))?;
        Ok((found.uid(), found.gid(), found.permissions().mode() & 0o777))
    };
    ensure!(of("vm2")? == of("vm0")?, "the group may not connect");
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

/// The metrics address of docs/metrics.md is served by the packaged unit, and without a unit.
fn metrics(machine: &Machine, pages: &mut Script) -> Result<()> {
    forget_starts(machine)?;
    let scrape = "bash -ec 'exec 3<>/dev/tcp/127.0.0.1/9469
        printf \"GET /metrics HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n\" >&3
        cat <&3'";
    let told = run_server(
        machine,
        pages,
        "vnvme serve --metrics 127.0.0.1:9469 ...",
        "--socket /run/metrics.sock mem://16M",
        ("metrics are served", scrape),
    )?;
    ensure!(told.contains("vnvme_build_info"), "{told}");
    let config = machine.path("/etc/vnvme/vnvme.toml");
    let example = fs::read_to_string(&config)?;
    let setting = &pages.take("metrics = \"127.0.0.1:9469\"")?.text;
    let process = format!("[process]\n{setting}\n");
    fs::write(&config, example.replace("[process]\n", &process))?;
    machine.run(&["systemctl", "restart", UNIT])?;
    let told = run_script(machine, scrape)?;
    ensure!(told.contains("vnvme_build_info"), "{told}");
    fs::write(&config, example)?;
    machine.run(&["systemctl", "restart", UNIT]).map(drop)
}

/// Sockets that systemd opens exist while the daemon does not run, a connection starts the daemon,
/// and their group is that of the unit. The page's unit has the sockets of the example's disks; a
/// unit for the control socket stands beside it.
fn activated(machine: &Machine, pages: &mut Script) -> Result<()> {
    forget_starts(machine)?;
    let units = ["vnvme.socket", "vnvme-control.socket"];
    let paths = units.map(|unit| machine.path(&format!("/etc/systemd/system/{unit}")));
    let [disks, control] = &paths;
    fs::write(disks, &pages.take("[Unit]\nBefore=vnvme.service")?.text)?;
    fs::write(
        control,
        "[Socket]\nListenStream=/run/vnvme/control.sock\nListenStream=/run/vnvme/vm2.sock\n\
         SocketGroup=kvm\nSocketMode=0660\nRemoveOnStop=yes\nService=vnvme.service\n",
    )?;
    let config = machine.path("/etc/vnvme/vnvme.toml");
    let example = fs::read_to_string(&config)?;
    machine.run(&["systemctl", "stop", UNIT])?;
    machine.run(&["systemctl", "daemon-reload"])?;
    machine.run(&["systemctl", "enable", "--now", "vnvme.socket"])?;
    machine.run(&["systemctl", "start", "vnvme-control.socket"])?;
    ensure!(machine.property(UNIT, "ActiveState")? == "inactive");
    let sockets = ["vm0", "vm1", "vm2"].map(|name| format!("/run/vnvme/{name}.sock"));
    let group = |socket: &String| machine.run(&["stat", "-c", "%G %a", socket]);
    for socket in &sockets {
        let found = group(socket)?;
        ensure!(found == "kvm 660\n", "{socket}: {found}");
    }
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
    for socket in &sockets {
        UnixStream::connect(machine.path(socket))?;
    }
    wait_journal(machine, UNIT, "RELOADING=1")?;
    // It is there when the daemon is not.
    machine.run(&["systemctl", "restart", UNIT])?;
    let listed = machine.run(&["vnvme", "list"])?;
    ensure!(listed.contains("vm2"), "{listed}");
    machine.run(&["systemctl", "disable", "vnvme.socket"])?;
    machine.run(&["systemctl", "stop", units[0], units[1], UNIT])?;
    let socket = machine.path("/run/vnvme/vm2.sock");
    ensure!(!socket.exists(), "systemd has removed it");
    for path in &paths {
        fs::remove_file(path)?;
    }
    fs::write(&config, example)?;
    machine.run(&["systemctl", "daemon-reload"])?;
    forget_starts(machine)?;
    machine.run(&["systemctl", "start", UNIT]).map(drop)
}

/// It says that it is alive; when it does not, systemd starts it again.
fn watchdog(machine: &Machine) -> Result<()> {
    forget_starts(machine)?;
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
    forget_starts(machine)?;
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
    forget_starts(machine)?;
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
    forget_starts(machine)?;
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
fn upgraded(machine: &Machine) -> Result<()> {
    let running = || -> Result<_> {
        let of = |unit| main_process(machine, unit);
        Ok([of(UNIT)?, of(OF_VM)?])
    };
    let before = running()?;
    let (is_installed, told) = install(machine)?;
    ensure!(is_installed, "{told}");
    ensure!(told.contains("the previous version until"), "{told}");
    ensure!(running()? == before, "its processes are others");
    Ok(())
}

/// Nothing runs any more, and nothing is left but configuration and disks; then these, too.
fn removed(machine: &Machine) -> Result<()> {
    let pids = [main_process(machine, UNIT)?, main_process(machine, OF_VM)?];
    let output = machine.output(&["dpkg", "--remove", "vnvme"])?;
    let told = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && !told.contains("unrecognized"),
        "{output:?}"
    );
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
