//! A Ceph cluster of one host, of Debian's packages: a monitor and an OSD with bluestore.

use std::ffi::OsString;
use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use harness::cache::Cache;
use harness::process::Process;
use harness::progress::skip;
use harness::tree::{PackageSet, Tree};
use tempfile::TempDir;

/// For what takes a moment.
pub const LIMIT: Duration = Duration::from_secs(90);

/// Ceph of a release with a C library no newer than those of the machines that run the tests: the
/// program loads librbd into itself.
const CEPH: PackageSet = PackageSet {
    name: "ceph",
    suites: &["bookworm"],
    release: None,
    packages: &["ceph-mon", "ceph-osd", "ceph-common", "librbd1"],
    without: &["systemd", "adduser", "debconf", "perl", "dbus", "sudo"],
};

/// What belongs to the C library, which the program has already.
const LIBC: [&str; 12] = [
    "ld-linux",
    "libc.so",
    "libm.so",
    "libmvec",
    "libpthread",
    "libdl",
    "librt.",
    "libresolv",
    "libutil",
    "libanl",
    "libnss_",
    "libthread_db",
];

const FSID: &str = "3f1a7d0e-6f0b-4b43-9d0e-9c1f2b7a5e10";
const OSD: &str = "8d1f0a52-7a8e-4c8e-8b7e-0f6a2d9c4b31";

/// The packages, or why there are none here.
pub fn tree() -> Option<Tree> {
    let found = Cache::open().and_then(|cache| Tree::fetch(&cache, &CEPH, |_| Ok(())));
    match found {
        Ok(tree) => Some(tree),
        Err(error) => {
            skip("rbd::ceph", format!("no packages of Ceph: {error:#}"));
            None
        }
    }
}

/// A running cluster; dropping it ends it.
pub struct Cluster {
    tree: Tree,
    dir: TempDir,
    lib: PathBuf,
    port: u16,
    mon: Option<Process>,
    osd: Option<Process>,
}

impl Cluster {
    /// One that is up, with an image of so many MiB.
    pub fn start(tree: Tree, image_mib: u64) -> Result<Self> {
        let mut cluster = Self::prepare(tree)?;
        cluster.create(image_mib)?;
        Ok(cluster)
    }

    /// One of which there is only the configuration.
    pub fn prepare(tree: Tree) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("ceph-").tempdir()?;
        for name in ["mon", "osd", "run", "log", "lib"] {
            fs::create_dir(dir.path().join(name))?;
        }
        let lib = dir.path().join("lib");
        let packages = tree.root().join("usr/lib/x86_64-linux-gnu");
        for name in ["librados.so.2", "librbd.so.1"] {
            let library = packages.join(name);
            let mut all = tree.libraries_of(&library)?;
            all.insert(name.to_owned(), library);
            for (name, path) in all {
                if !LIBC.iter().any(|own| name.starts_with(own)) && !lib.join(&name).exists() {
                    symlink(path, lib.join(name))?;
                }
            }
        }
        let d = dir.path().display();
        let l = packages.display();
        let port = super::nbd::port()?;
        // A monitor ends where a hundredth of the file system is free, which may be gigabytes.
        let text = format!(
            "[global]\nfsid = {FSID}\nmon initial members = a\n\
             mon host = [v2:127.0.0.1:{port}/0]\npublic network = 127.0.0.1/32\n\
             ms bind msgr1 = false\nms bind port min = 43301\nms bind port max = 43340\n\
             auth cluster required = none\nauth service required = none\n\
             auth client required = none\nosd pool default size = 1\n\
             osd pool default min size = 1\nosd pool default pg autoscale mode = off\n\
             osd crush chooseleaf type = 0\nmon allow pool size one = true\n\
             mon data avail crit = -1\nmon data avail warn = -1\nrun dir = {d}/run\n\
             log file = {d}/log/$name.log\nmon data = {d}/mon\nosd data = {d}/osd\n\
             osd class dir = {l}/rados-classes\nerasure code dir = {l}/ceph/erasure-code\n\
             plugin dir = {l}/ceph\nkeyring = {d}/keyring\nosd objectstore = bluestore\n\
             bluestore block size = 4294967296\nosd memory target = 939524096\n"
        );
        fs::write(dir.path().join("ceph.conf"), text)?;
        Ok(Self {
            tree,
            dir,
            lib,
            port,
            mon: None,
            osd: None,
        })
    }

    /// Makes what was prepared, starts it, and makes an image of so many MiB.
    pub fn create(&mut self, image_mib: u64) -> Result<()> {
        let keyring = self.path("keyring");
        let conf = fs::read_to_string(self.conf())?;
        let host = conf
            .lines()
            .find_map(|line| line.strip_prefix("mon host = "));
        let host = host.context("no monitor")?.to_owned();
        let admin = [
            "--create-keyring",
            &keyring,
            "--gen-key",
            "-n",
            "client.admin",
        ];
        let caps = ["--cap", "mon", "allow *", "--cap", "osd", "allow *"];
        self.run("ceph-authtool", &[&admin[..], &caps].concat())?;
        let mon = [
            &keyring,
            "--gen-key",
            "-n",
            "mon.",
            "--cap",
            "mon",
            "allow *",
        ];
        self.run("ceph-authtool", &mon)?;
        let map = self.path("monmap");
        let words = ["--create", "--fsid", FSID, "--addv", "a", &host, &map];
        self.run("monmaptool", &words)?;
        let words = ["--mkfs", "-i", "a", "--monmap", &map, "--keyring", &keyring];
        self.run("ceph-mon", &words)?;
        self.start_mon()?;
        self.ceph(&["osd", "new", OSD])?;
        self.run("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", OSD])?;
        self.start_osd()?;
        self.ceph(&["osd", "pool", "create", "rbd", "8", "8"])?;
        self.rbd(&["pool", "init", "rbd"])?;
        self.rbd(&["create", "--size", &format!("{image_mib}M"), "img"])?;
        Ok(())
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    pub fn conf(&self) -> PathBuf {
        self.dir.path().join("ceph.conf")
    }

    /// Where the program finds librbd and what it needs, as environment variables.
    pub fn library(&self) -> [(&'static str, &Path); 2] {
        [("VNVME_LIBRBD", &self.lib), ("LD_LIBRARY_PATH", &self.lib)]
    }

    pub fn url(&self, name: &str) -> String {
        let conf = self.conf();
        format!("rbd://{name}?conf={}&ports=43301-43340", conf.display())
    }

    fn words(&self, program: &str, args: &[&str]) -> Result<Vec<OsString>> {
        let mut words = self.tree.tool_words(&self.tree.program(program)?)?;
        words.extend(args.iter().map(|arg| (*arg).to_owned()));
        Ok(words.into_iter().map(OsString::from).collect())
    }

    fn daemon(&self, program: &str, id: &str) -> Result<Process> {
        let words = self.words(program, &["-i", id, "-f"])?;
        let envs = [("CEPH_CONF".to_owned(), self.conf().into_os_string())];
        let log = Cache::open()?
            .logs()?
            .join(format!("{program}-{}.log", std::process::id()));
        Process::start(program, &words, &envs, &log, Duration::from_secs(900))
    }

    /// Commands wait long for a monitor that has ended, and do not say why it has.
    pub fn start_mon(&mut self) -> Result<()> {
        let mon = self.daemon("ceph-mon", "a")?;
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if let Some(status) = mon.ended() {
                let log = fs::read_to_string(self.path("log/mon.a.log"))?;
                let mut errors = log.lines().filter(|line| line.contains(" -1 "));
                bail!("the monitor has ended: {status}: {:?}", errors.next_back());
            }
            ensure!(began.elapsed() < LIMIT, "no monitor listens");
            std::thread::sleep(Duration::from_millis(20));
        }
        self.mon = Some(mon);
        Ok(())
    }

    pub fn start_osd(&mut self) -> Result<()> {
        self.osd = Some(self.daemon("ceph-osd", "0")?);
        Ok(())
    }

    pub fn mon(&self) -> Result<&Process> {
        self.mon.as_ref().context("no monitor runs")
    }

    pub fn osd(&self) -> Result<&Process> {
        self.osd.as_ref().context("no OSD runs")
    }

    fn output(&self, words: &[OsString], envs: &[(&str, OsString)]) -> Result<Output> {
        // It may hang for ever, and ignores SIGTERM.
        let seconds = LIMIT.as_secs().to_string();
        let mut command = Command::new("timeout");
        command
            .args(["-s", "KILL", &seconds])
            .args(words)
            .env("CEPH_CONF", self.conf());
        command.envs(envs.iter().map(|(name, value)| (name, value)));
        Ok(command.output()?)
    }

    pub fn run(&self, program: &str, args: &[&str]) -> Result<String> {
        said(
            &self.output(&self.words(program, args)?, &[])?,
            program,
            args,
        )
    }

    /// The command `rbd`.
    pub fn rbd(&self, args: &[&str]) -> Result<String> {
        self.run("rbd", args)
    }

    /// The command `ceph`, which is in Python.
    pub fn ceph(&self, args: &[&str]) -> Result<String> {
        let python = fs::read_dir(self.tree.root().join("usr/bin"))?.flatten();
        let mut python = python.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let python = python.find(|name| {
            name.strip_prefix("python3.")
                .is_some_and(|minor| minor.parse::<u8>().is_ok())
        });
        let mut words = self.words(&python.context("no Python")?, &[])?;
        let lib = self.tree.root().join("usr/lib/x86_64-linux-gnu");
        // Its modules are libraries of their own, and need more than Python.
        if let Some(path) = words.get_mut(2) {
            path.push(format!(":{0}:{0}/ceph", lib.display()));
        }
        words.push(self.tree.program("ceph")?.into());
        words.extend(args.iter().map(OsString::from));
        let usr = self.tree.root().join("usr");
        let envs = [
            ("PYTHONHOME", usr.clone().into_os_string()),
            (
                "PYTHONPATH",
                usr.join("lib/python3/dist-packages").into_os_string(),
            ),
        ];
        let began = Instant::now();
        loop {
            let output = self.output(&words, &envs)?;
            if output.status.success() || began.elapsed() > LIMIT {
                return said(&output, "ceph", args);
            }
        }
    }
}

fn said(output: &Output, program: &str, args: &[&str]) -> Result<String> {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let errors = text(&output.stderr);
    ensure!(
        output.status.success(),
        "{program} {args:?}: {}: {errors}",
        output.status
    );
    Ok(text(&output.stdout))
}
