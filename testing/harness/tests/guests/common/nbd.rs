//! NBD servers of Debian's packages, and where they listen.

use std::ffi::OsString;
use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use harness::cache::Cache;
use harness::process::Process;
use harness::progress::skip;
use harness::tree::{PackageSet, Tree};

/// For what takes a moment.
pub const LIMIT: Duration = Duration::from_secs(60);

/// nbdkit, with its plugins and filters.
pub const NBDKIT: PackageSet = PackageSet {
    name: "nbdkit",
    suites: &["trixie"],
    release: None,
    packages: &["nbdkit"],
    without: &[
        "perl",
        "python3",
        "guestfs",
        "libguestfs",
        "adduser",
        "debconf",
        "systemd",
    ],
};

/// qemu-nbd, qemu-img and qemu-io.
pub const QEMU: PackageSet = PackageSet {
    name: "qemu-utils",
    suites: &["trixie"],
    release: None,
    packages: &["qemu-utils"],
    without: &["perl", "python3", "adduser", "debconf", "systemd"],
};

/// A tree of packages, or why there is none here.
pub fn tree(wish: &PackageSet) -> Option<Tree> {
    let found = Cache::open().and_then(|cache| Tree::fetch(&cache, wish, |_| Ok(())));
    match found {
        Ok(tree) => Some(tree),
        Err(error) => {
            let name = wish.name;
            skip(
                &format!("nbd::{name}"),
                format!("no package {name}: {error:#}"),
            );
            None
        }
    }
}

/// Where a server listens.
#[derive(Clone, Debug)]
pub enum ListenAddress {
    Unix(PathBuf),
    Tcp(u16),
}

impl ListenAddress {
    pub fn url(&self) -> String {
        match self {
            Self::Unix(path) => format!("nbd+unix:///?socket={}", path.display()),
            Self::Tcp(port) => format!("nbd://127.0.0.1:{port}/"),
        }
    }

    /// nbdkit's options for it.
    fn words(&self) -> Vec<String> {
        match self {
            Self::Unix(path) => vec!["--unix".into(), path.display().to_string()],
            Self::Tcp(port) => vec!["--ipaddr=127.0.0.1".into(), format!("--port={port}")],
        }
    }

    fn wait(&self) -> Result<()> {
        let began = Instant::now();
        loop {
            let there = match self {
                Self::Unix(path) => UnixStream::connect(path).is_ok(),
                Self::Tcp(port) => std::net::TcpStream::connect(("127.0.0.1", *port)).is_ok(),
            };
            if there {
                return Ok(());
            }
            ensure!(began.elapsed() < LIMIT, "no server at {self:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A port that is free now.
pub fn port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

pub fn start(name: &str, words: Vec<OsString>, address: &ListenAddress) -> Result<Process> {
    if let ListenAddress::Unix(path) = address {
        let _ = fs::remove_file(path);
    }
    let log = Cache::open()?
        .logs()?
        .join(format!("{name}-{}.log", std::process::id()));
    let process = Process::start(name, &words, &[], &log, Duration::from_secs(600))?;
    address.wait().with_context(|| {
        let text = fs::read(&log).unwrap_or_default();
        String::from_utf8_lossy(&text).into_owned()
    })?;
    Ok(process)
}

/// nbdkit with these filters, plugin and parameters.
pub fn nbdkit(tree: &Tree, address: &ListenAddress, words: &[&str]) -> Result<Process> {
    let lib = format!("usr/lib/{}-linux-gnu/nbdkit", std::env::consts::ARCH);
    let lib = tree.root().join(lib);
    let mut all = tree.tool_words(&tree.program("nbdkit")?)?;
    all.extend(["--foreground".into(), "--threads=8".into()]);
    all.extend(address.words());
    for word in words {
        // Plugins and filters by their files: nbdkit looks for them where it is installed.
        let word = match (word.strip_prefix("filter:"), word.strip_prefix("plugin:")) {
            (Some(name), _) => {
                let file = lib.join(format!("filters/nbdkit-{name}-filter.so"));
                format!("--filter={}", file.display())
            }
            (_, Some(name)) => {
                let file = lib.join(format!("plugins/nbdkit-{name}-plugin.so"));
                file.display().to_string()
            }
            _ => (*word).to_owned(),
        };
        all.push(word);
    }
    start(
        "nbdkit",
        all.into_iter().map(OsString::from).collect(),
        address,
    )
}

/// qemu-nbd with an image, as `vm0`, for clients with several connections.
pub fn qemu_nbd(tree: &Tree, socket: &Path, image: &str) -> Result<Process> {
    let mut words = tree.tool_words(&tree.program("qemu-nbd")?)?;
    let options = [
        "--persistent",
        "--shared=0",
        "--discard=unmap",
        "-f",
        "qcow2",
        "-x",
        "vm0",
    ];
    words.extend(options.map(str::to_owned));
    words.extend([format!("--socket={}", socket.display()), image.to_owned()]);
    start(
        "qemu-nbd",
        words.into_iter().map(OsString::from).collect(),
        &ListenAddress::Unix(socket.to_owned()),
    )
}
