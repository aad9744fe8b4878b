//! What others make of the metrics: Prometheus' own checker, and a real browser with the page.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use harness::cache::Cache;
use harness::daemon::{Daemon, program};
use harness::documents::{BY_PROMTOOL, Script};
use harness::progress::skip;
use harness::tree::{PackageSet, Tree};

const LIMIT: Duration = Duration::from_secs(60);
/// In which disks that are used do something.
const MOMENT: Duration = Duration::from_millis(250);

/// The checker of Prometheus.
const PROMTOOL: PackageSet = PackageSet {
    name: "promtool",
    suites: &["trixie"],
    release: None,
    packages: &["promtool"],
    without: &[],
};

/// A browser without windows.
const BROWSER: PackageSet = PackageSet {
    name: "browser",
    suites: &["trixie"],
    release: None,
    packages: &["chromium-headless-shell", "fonts-dejavu-core"],
    without: &["adduser", "debconf", "init-system", "systemd", "dbus"],
};

/// A tree of packages, or why there is none here.
fn tree(what: &str, wish: &PackageSet) -> Option<Tree> {
    let found = Cache::open().and_then(|cache| Tree::fetch(&cache, wish, |_| Ok(())));
    match found {
        Ok(tree) => Some(tree),
        Err(error) => {
            skip(what, format!("no package {}: {error:#}", wish.name));
            None
        }
    }
}

fn address(daemon: &Daemon) -> Result<SocketAddr> {
    let log = daemon.wait_log("metrics are served", LIMIT)?;
    let found = log.split("address=").nth(1).context("no address")?;
    Ok(found
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .parse()?)
}

fn get(address: SocketAddr) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no header")?;
    ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
    Ok(body.to_owned())
}

fn promtool(tree: &Tree, text: &str) -> Result<(bool, String)> {
    let mut child = tree
        .tool("promtool")?
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    child
        .stdin
        .take()
        .context("stdin")?
        .write_all(text.as_bytes())?;
    let out = child.wait_with_output()?;
    let told = [out.stdout, out.stderr].concat();
    Ok((
        out.status.success(),
        String::from_utf8_lossy(&told).into_owned(),
    ))
}

#[test]
fn promtool_accepts_metrics() -> Result<()> {
    let Some(tree) = tree("metrics::promtool", &PROMTOOL) else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let config = dir.path().join("vnvme.toml");
    let socket = dir.path().join("a.sock");
    let mut text = String::from("[process]\nmetrics = \"127.0.0.1:0\"\n");
    for name in ["a", "b \\\"quoted\\\" é"] {
        text.push_str(&format!(
            "[[controller]]\nsocket = \"{}/{name}.sock\"\n[[controller.namespace]]\nvolume = \
             \"mem://1M?iops=5\"\n",
            dir.path().display()
        ));
    }
    text.push_str(&format!(
        "[[vhost-user-blk]]\nsocket = \"{}/c.sock\"\nvolume = \"mem://1M\"\n",
        dir.path().display()
    ));
    fs::write(&config, text)?;
    let daemon = Daemon::builder("promtool")
        .config(&config, &socket)
        .start()?;
    // Something has been read and written.
    let target = format!("vfio-user://{}", socket.display());
    let load = Command::new(program()?)
        .args([
            "bench",
            &target,
            "--rw",
            "randrw",
            "--runtime",
            "1",
            "--size",
            "64k",
        ])
        .stdout(Stdio::null())
        .output()?;
    let loaded = load.status.success();
    let metrics = get(address(&daemon)?)?;
    for part in [
        "vnvme_operations_total{disk=\"a\"",
        "disk=\"b \\\"quoted\\\" é\"",
        "kind=\"vhost-user-blk\"",
        "vnvme_throttled_seconds_total",
    ] {
        ensure!(metrics.contains(part), "no {part} in\n{metrics}");
    }
    if loaded {
        ensure!(
            metrics.contains("latency_sampled_seconds_bucket"),
            "{metrics}"
        );
    }
    let (accepted, told) = promtool(&tree, &metrics)?;
    ensure!(accepted && told.trim().is_empty(), "promtool: {told}");
    let mut pages = Script::open(BY_PROMTOOL)?;
    let config = dir.path().join("prometheus.yml");
    fs::write(&config, &pages.take("# prometheus.yml")?.text)?;
    let mut check = tree.tool("promtool")?;
    let output = check.args(["check", "config"]).arg(&config).output()?;
    ensure!(output.status.success(), "docs/metrics.md: {output:?}");
    pages.finish()?;
    // It would have said something.
    let wrong = metrics.replace(
        "# TYPE vnvme_operations_total counter",
        "# TYPE vnvme_operations_total gauge",
    );
    let (accepted, told) = promtool(&tree, &wrong)?;
    ensure!(
        !accepted && told.contains("vnvme_operations_total"),
        "{told}"
    );
    let (accepted, _) = promtool(
        &tree,
        &format!("{metrics}vnvme_broken{{disk=\"a\nb\"}} 1\n"),
    )?;
    ensure!(!accepted, "promtool accepts a broken line");
    daemon.terminate()
}

/// Passes what a browser sends to the control socket, and the answers: as `ssh -L` does. A browser
/// with virtual time waits for nothing else, so each answer takes a moment in which the disks do
/// something.
fn pass_on(listener: &TcpListener, control: &Path) {
    for browser in listener.incoming() {
        let Ok(mut browser) = browser else { return };
        let control = control.to_owned();
        std::thread::spawn(move || {
            let mut daemon = UnixStream::connect(control)?;
            let (mut from, mut to) = (browser.try_clone()?, daemon.try_clone()?);
            std::thread::spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                to.shutdown(Shutdown::Write)
            });
            let mut piece = vec![0; 1 << 16];
            loop {
                let len = daemon.read(&mut piece)?;
                std::thread::sleep(MOMENT);
                if len == 0 {
                    return browser.shutdown(Shutdown::Both);
                }
                browser.write_all(piece.get(..len).unwrap_or_default())?;
            }
        });
    }
}

/// A browser that is ready to be started. It looks for its files beside the program that runs,
/// which is the tree's dynamic linker, and starts that program again for its pages: so it gets a
/// directory with everything, and a script that starts it.
struct Browser {
    script: PathBuf,
    fonts: PathBuf,
    home: PathBuf,
}

impl Browser {
    fn new(tree: &Tree, home: &Path) -> Result<Browser> {
        let fonts = home.join("fonts.conf");
        fs::write(
            &fonts,
            format!(
                "<?xml version=\"1.0\"?><!DOCTYPE fontconfig SYSTEM \"fonts.dtd\">\
                 <fontconfig><dir>{}</dir><cachedir>{}</cachedir></fontconfig>",
                tree.root().join("usr/share/fonts").display(),
                home.join("fonts").display()
            ),
        )?;
        let here = home.join("browser");
        fs::create_dir(&here)?;
        let files = tree.root().join("usr/lib/chromium");
        for file in fs::read_dir(&files)? {
            let file = file?;
            symlink(file.path(), here.join(file.file_name()))?;
        }
        let shell = here.join("chromium-headless-shell");
        let words = tree.tool_words(&files.join("chromium-headless-shell"))?;
        let [linker, option, path, _] = &*words else {
            bail!("{words:?}");
        };
        let loader = here.join("loader");
        fs::copy(linker, &loader)?;
        // Some are loaded only when they are wanted.
        let all = tree.root().join("usr/lib/x86_64-linux-gnu");
        let (all, nss) = (all.display(), all.join("nss"));
        let script = here.join("start");
        let line = format!(
            "exec {} {option} {path}:{all}:{} {} \"$@\"",
            loader.display(),
            nss.display(),
            shell.display()
        );
        fs::write(&script, format!("#!/bin/sh\n{line}\n"))?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
        Ok(Browser {
            script,
            fonts,
            home: home.to_owned(),
        })
    }

    /// What it prints about a page, after some seconds of its own time.
    fn run(&self, url: &str, what: &str) -> Result<String> {
        let out = Command::new("timeout")
            .args(["--kill-after=5", "120"])
            .arg(&self.script)
            .arg(format!(
                "--browser-subprocess-path={}",
                self.script.display()
            ))
            .args([
                "--no-sandbox",
                "--no-zygote",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--window-size=1200,900",
                "--virtual-time-budget=8000",
            ])
            .arg(format!(
                "--user-data-dir={}",
                self.home.join("profile").display()
            ))
            .args([what, url])
            .env("HOME", &self.home)
            .env("FONTCONFIG_FILE", &self.fonts)
            .stdin(Stdio::null())
            .output()?;
        let told = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "{}: {told}", out.status);
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }
}

/// Returns the number of disks with timed reads.
fn busy(control: &Path) -> Result<usize> {
    let output = Command::new(program()?)
        .args(["stats", "--json", "--control"])
        .arg(control)
        .output()?;
    let stats: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let disks = stats["measured"]["disks"].as_array().context("no disks")?;
    let is_busy =
        |disk: &&serde_json::Value| disk["namespaces"][0]["latency"]["read"]["steps"][0].is_array();
    Ok(disks.iter().filter(is_busy).count())
}

#[test]
fn browser_shows_metrics_page() -> Result<()> {
    let Some(tree) = tree("metrics::browser", &BROWSER) else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let control = dir.path().join("control.sock");
    let config = dir.path().join("vnvme.toml");
    let socket = |name: &str| dir.path().join(format!("{name}.sock"));
    // Fast, limited, hardly used, and not used at all.
    let disks = [
        ("database", "mem://64M"),
        ("web <b>0", "mem://64M?iops=20000"),
        ("backup", "mem://64M?iops=200"),
        ("idle", "mem://64M"),
    ];
    let text = disks.map(|(name, volume)| {
        format!(
            "[[controller]]\nsocket = \"{}\"\n[[controller.namespace]]\nvolume = \"{volume}\"\n",
            socket(name).display()
        )
    });
    fs::write(&config, text.concat())?;
    let daemon = Daemon::builder("page")
        .config(&config, &socket("idle"))
        .arg("--control")
        .arg(&control)
        .start()?;
    let loads = disks[..3].iter().map(|(name, _)| {
        let target = format!("vfio-user://{}", socket(name).display());
        Command::new(program()?)
            .args(["bench", &target, "--rw", "randrw", "--runtime", "120"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("bench")
    });
    let mut loads = loads.collect::<Result<Vec<_>>>()?;
    let deadline = Instant::now() + LIMIT;
    while busy(&control)? < loads.len() {
        ensure!(Instant::now() < deadline, "the loads do not begin");
        std::thread::sleep(Duration::from_millis(50));
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}/", listener.local_addr()?);
    let at = control.clone();
    std::thread::spawn(move || pass_on(&listener, &at));
    let picture = |name: &str| Cache::open().map(|cache| cache.path(name));
    let (all, one) = (picture("page.png")?, picture("page-disk.png")?);
    let browser = Browser::new(&tree, dir.path())?;
    let shown = browser.run(&url, "--dump-dom");
    let drawn = browser.run(&url, &format!("--screenshot={}", all.display()));
    let url = format!("{url}#backup");
    let opened = browser.run(&url, "--dump-dom");
    let drawn_one = browser.run(&url, &format!("--screenshot={}", one.display()));
    for load in &mut loads {
        let _ = load.kill();
        let _ = load.wait();
    }
    let (shown, opened) = (shown?, opened?);
    drawn?;
    drawn_one?;
    // What a script has made of the daemon's numbers.
    for part in [
        "4 disks, ",
        "<td>controller</td>",
        "cpu ",
        "<td>database</td>",
        // Names are no markup.
        "<td>web &lt;b&gt;0</td>",
    ] {
        ensure!(shown.contains(part), "no {part} in\n{shown}");
    }
    ensure!(!shown.contains("connecting"), "{shown}");
    // One of 61 commands is timed, and yet the times of all that are used are known.
    let cells = |name: &str| -> Result<Vec<String>> {
        let row = shown.split("<tr").find(|row| row.contains(name));
        let row = row.with_context(|| format!("no {name} in\n{shown}"))?;
        let cells = row.split("<td>").skip(1);
        Ok(cells
            .filter_map(|cell| Some(cell.split_once("</td>")?.0.to_owned()))
            .collect())
    };
    for name in ["database", "web", "backup"] {
        let cells = cells(name)?;
        ensure!(cells[5] != "-" && cells[6] != "-", "{name}: {cells:?}");
    }
    ensure!(cells("idle")?[5] == "-", "{:?}", cells("idle")?);
    ensure!(cells("backup")?[6].ends_with('*'), "{:?}", cells("backup")?);
    for part in ["backup, /", "<td>mem://64M", "interrupts/command"] {
        ensure!(opened.contains(part), "no {part} in\n{opened}");
    }
    for picture in [all, one] {
        ensure!(fs::metadata(&picture)?.len() > 10_000, "an empty picture");
    }
    daemon.terminate()
}
