//! A machine with a real systemd: process 1 of namespaces of its own, in a tree of Debian packages
//! that looks freshly installed. Its programs run on this machine's kernel, so it is up at once.
//! Its changes are kept apart from the tree and thrown away in the end.
//!
//! The machine has no network and no devices. Its units see a cgroup of their own. Other processes
//! reach its files, and sockets, by [`Machine::path`].

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::apt::on_path;
use crate::cache::{Cache, checkout};
use crate::guest::tail;
use crate::process::Process;
use crate::tree::{PackageSet, Tree};

/// Debian 13: systemd, dpkg, a shell, and checkers of packages and manual pages.
pub const PACKAGES: PackageSet = PackageSet {
    name: "systemd",
    suites: &["trixie"],
    release: None,
    packages: &[
        "base-files",
        "base-passwd",
        "bash",
        "bsdutils",
        "coreutils",
        "dash",
        "debianutils",
        "diffutils",
        "dpkg",
        "findutils",
        "grep",
        "gzip",
        "libc-bin",
        "lintian",
        "make",
        "man-db",
        "sed",
        "systemd",
        "tar",
        "util-linux",
    ],
    without: &[],
};

/// Debian 12: systemd, dpkg and a shell.
pub const OLDER_PACKAGES: PackageSet = PackageSet {
    name: "systemd-older",
    suites: &["bookworm"],
    release: None,
    packages: &[
        "base-files",
        "base-passwd",
        "bash",
        "bsdutils",
        "coreutils",
        "dash",
        "debianutils",
        "diffutils",
        "dpkg",
        "findutils",
        "grep",
        "gzip",
        "libc-bin",
        "make",
        "sed",
        "systemd",
        "tar",
        "util-linux",
    ],
    without: &[],
};

/// Target without other units: neither udev, nor a login, nor a message bus.
const TARGET: &str = "[Unit]\nDescription=The journal\nDefaultDependencies=no\n\
                      Wants=systemd-journald.service\n";

/// Search path of commands. Before Debian 13 some were outside /usr, and `make install` has its own
/// place.
const PATH_OF_COMMANDS: &str = "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Bounds a start, and each wait.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// A running machine; dropping it ends all that runs in it.
#[derive(Debug)]
pub struct Machine {
    // In this order: processes end before their cgroup and their files go.
    process: Process,
    _cgroup: Cgroup,
    work: tempfile::TempDir,
    init: u32,
}

/// A directory of the cgroup2 file system. It is removed when the value is dropped.
#[derive(Debug)]
struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes one below that of this process.
    fn new() -> Result<Cgroup> {
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        // proc_pid_mountinfo(5): the fifth field is the place, and the type follows " - ".
        let place = mounts.lines().find_map(|line| {
            let (fields, source) = line.split_once(" - ")?;
            let is_cgroup2 = source.split(' ').next() == Some("cgroup2");
            is_cgroup2.then(|| fields.split(' ').nth(4)).flatten()
        });
        let place = Path::new(place.context("no cgroup2 file system is mounted")?);
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vnvme-systemd-{}-{count}", std::process::id());
        let path = place.join(own.unwrap_or_default()).join(name);
        fs::create_dir(&path).with_context(|| format!("cgroup {}", path.display()))?;
        Ok(Cgroup(path))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        // Processes that were killed leave it a moment later.
        while remove_cgroup(&self.0).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The innermost first.
fn remove_cgroup(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_cgroup(&entry.path())?;
        }
    }
    fs::remove_dir(path)
}

impl Machine {
    /// Why this machine cannot have one, if it cannot.
    pub fn missing(cache: &Cache) -> Option<String> {
        if !rustix::process::geteuid().is_root() {
            return Some("needs root".into());
        }
        let tools = ["unshare", "nsenter", "dpkg-deb"];
        if let Some(tool) = tools.into_iter().find(|tool| !on_path(tool)) {
            return Some(format!("no {tool}"));
        }
        let tried = Cgroup::new().and_then(|_cgroup| Machine::try_mounts(cache));
        tried.err().map(|error| format!("{error:#}"))
    }

    /// Makes such namespaces, and mounts in them.
    fn try_mounts(cache: &Cache) -> Result<()> {
        let script = "mount --make-rprivate / && cd \"$0\" && mkdir lower upper overlay root \
                      && mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=overlay \
                         overlay root \
                      && mount -t proc proc root && mount -t cgroup2 cgroup2 root";
        let work = cache.scratch()?;
        let output = Command::new("unshare")
            .args([
                "--mount", "--pid", "--fork", "--cgroup", "--ipc", "--uts", "--net",
            ])
            .args(["sh", "-c", script])
            .arg(work.path())
            .output()?;
        let told = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}", told.trim());
        Ok(())
    }

    /// Starts one and waits until systemd takes orders.
    pub fn start(cache: &Cache, tree: &Tree) -> Result<Machine> {
        let work = cache.scratch()?;
        let changed = work.path().join("upper");
        for directory in ["etc/systemd/system", "var/lib/dpkg"] {
            fs::create_dir_all(changed.join(directory))?;
        }
        fs::write(changed.join("etc/systemd/system/test.target"), TARGET)?;
        // The state that the maintainer scripts of its packages would have left.
        for name in ["passwd", "group"] {
            let master = format!("usr/share/base-passwd/{name}.master");
            fs::copy(tree.root().join(master), changed.join("etc").join(name))?;
        }
        let packages = fs::read_to_string(tree.root().join("packages.txt"))?;
        fs::write(
            changed.join("var/lib/dpkg/status"),
            packages.lines().map(installed).collect::<String>(),
        )?;
        let info = changed.join("var/lib/dpkg/info");
        fs::create_dir(&info)?;
        for name in packages.lines().filter_map(|line| line.split(' ').next()) {
            fs::write(info.join(format!("{name}.list")), "/.\n")?;
        }

        let cgroup = Cgroup::new()?;
        let log = cache
            .logs()?
            .join(format!("{}-{}", tree.id(), std::process::id()));
        let script = checkout().join("testing/harness/assets/systemd.sh");
        let words = ["sh".into(), script.into_os_string()];
        let places = [tree.root(), work.path(), &cgroup.0].map(|path| path.as_os_str().to_owned());
        let words = [&words[..], &places[..]].concat();
        let process = Process::start("systemd", &words, &[], &log, 40 * WAIT_TIMEOUT)?;
        let deadline = Instant::now() + WAIT_TIMEOUT;
        let init = loop {
            if let Some(init) = init(process.pid()) {
                break init;
            }
            if process.ended().is_some() || Instant::now() > deadline {
                bail!("systemd does not start{}", tail("it", &log));
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        Ok(Machine {
            process,
            _cgroup: cgroup,
            work,
            init,
        })
    }

    /// A file of it, as other processes of this machine reach it.
    pub fn path(&self, inside: &str) -> PathBuf {
        self::inside(self.init, inside)
    }

    /// The directory with all files that are not as they were in the tree, and nothing else. Those
    /// that were removed are character devices in it, and /run and /tmp are never there.
    pub fn changed(&self) -> PathBuf {
        self.work.path().join("upper")
    }

    /// Runs a command in it, as root.
    pub fn output(&self, words: &[&str]) -> Result<Output> {
        ensure!(self.process.ended().is_none(), "the machine has ended");
        Command::new("nsenter")
            .arg(format!("--target={}", self.init))
            .args(["--mount", "--pid", "--cgroup", "--ipc", "--uts", "--net"])
            .args(["--root", "--wd", "env", "-i"])
            .args([PATH_OF_COMMANDS, "LC_ALL=C.UTF-8"])
            .args(["SYSTEMD_PAGER=", "SYSTEMD_COLORS=0"])
            .args(words)
            .output()
            .with_context(|| format!("{words:?}"))
    }

    /// Runs a command that must succeed; returns its output.
    pub fn run(&self, words: &[&str]) -> Result<String> {
        let output = self.output(words)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, error) = (text(&output.stdout), text(&output.stderr));
        ensure!(output.status.success(), "{words:?}: {out}{error}");
        Ok(out)
    }

    /// A property of a unit (org.freedesktop.systemd1(5)).
    pub fn property(&self, unit: &str, name: &str) -> Result<String> {
        let text = self.run(&["systemctl", "show", "--value", "--property", name, unit])?;
        Ok(text.trim().to_owned())
    }

    /// Waits until a property of a unit is as it should be.
    pub fn wait_property(
        &self,
        unit: &str,
        name: &str,
        is_right: impl Fn(&str) -> bool,
    ) -> Result<String> {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            // While systemd executes itself anew it answers no requests.
            let value = self.property(unit, name);
            if let Ok(value) = &value
                && is_right(value)
            {
                return Ok(value.clone());
            }
            if Instant::now() > deadline {
                let journal = self.journal(unit).unwrap_or_default();
                bail!("{name} of {unit} stays {value:?}:\n{journal}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the journal of a unit: the unit's own lines, and systemd's lines about it.
    pub fn journal(&self, unit: &str) -> Result<String> {
        // Recent lines may not have been read yet.
        self.run(&["journalctl", "--sync"])?;
        self.run(&["journalctl", "--no-pager", "--output=cat", "--unit", unit])
    }
}

/// The socket at which systemd takes orders, in its own namespaces.
const SYSTEMD_SOCKET: &str = "/run/systemd/private";

/// A file as a process has it, as other processes reach it.
fn inside(pid: u32, path: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/root")).join(path.trim_start_matches('/'))
}

/// Process 1 as this machine sees it, once it takes orders: the child of the one that made its
/// namespaces.
fn init(parent: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let init = children.ok()?.split_whitespace().next()?.parse().ok()?;
    let name = fs::read_to_string(format!("/proc/{init}/comm")).ok()?;
    (name.trim() == "systemd" && inside(init, SYSTEMD_SOCKET).exists()).then_some(init)
}

/// A package as dpkg notes one that is installed, from its name and version.
fn installed(line: &str) -> String {
    let (name, version) = line.split_once(' ').unwrap_or((line, "0"));
    format!(
        "Package: {name}\nStatus: install ok installed\nMaintainer: Debian\nArchitecture: amd64\n\
         Version: {version}\nDescription: of the tree\n\n"
    )
}
