//! The `vnvme` daemon under test, as a user starts it: a program, a socket and a log.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use crate::cache::{Cache, checkout};
use crate::guest::tail;
use crate::machine::Disk;
use crate::process::Process;
use crate::progress::say;
use sync::Unpoisoned;

/// A `vnvme serve`, or `vnvme daemon`, to be.
#[derive(Clone, Debug)]
pub struct DaemonBuilder {
    name: String,
    args: Vec<OsString>,
    envs: Vec<(String, OsString)>,
    limit: Duration,
    command: &'static str,
    config: Option<(PathBuf, PathBuf)>,
    program: Option<PathBuf>,
}

/// A running one; dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    process: Process,
    socket: PathBuf,
    log: PathBuf,
    _dir: tempfile::TempDir,
}

impl Daemon {
    /// A daemon to be; `name` names its log.
    pub fn builder(name: &str) -> DaemonBuilder {
        DaemonBuilder {
            name: name.to_string(),
            args: Vec::new(),
            envs: Vec::new(),
            limit: Duration::from_secs(3600),
            command: "serve",
            config: None,
            program: None,
        }
    }

    /// The socket that it listens on.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The controller at that socket, for a guest.
    pub fn disk(&self) -> Disk {
        Disk::VfioUser {
            socket: self.socket.clone(),
        }
    }

    /// Returns the daemon's process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// The process that serves: its keeper's child, where it has one that keeps.
    pub fn serving(&self) -> u32 {
        testkit::serving(self.process.pid())
    }

    /// Returns all log output so far.
    pub fn log(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&fs::read(&self.log)?).into_owned())
    }

    /// Waits until its log holds `text`.
    pub fn wait_log(&self, text: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let log = self.log()?;
            if log.contains(text) {
                return Ok(log);
            }
            if Instant::now() >= deadline {
                bail!(
                    "the daemon never logged {text:?}{}",
                    tail("vnvme", &self.log)
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Fails, with its log, unless it is still running.
    pub fn must_live(&self) -> Result<()> {
        match self.process.ended() {
            None => Ok(()),
            Some(status) => bail!("the daemon ended ({status}){}", tail("vnvme", &self.log)),
        }
    }

    /// Asks it to end (SIGTERM) and waits for a clean end.
    pub fn terminate(&self) -> Result<()> {
        self.must_live()?;
        self.process.signal(Signal::TERM)?;
        let status = self.process.wait(Duration::from_secs(30));
        let status = status.with_context(|| tail("vnvme", &self.log))?;
        if !status.success() {
            bail!(
                "SIGTERM ended the daemon with {status}{}",
                tail("vnvme", &self.log)
            );
        }
        Ok(())
    }

    /// Kills it (SIGKILL), as a crash would, and waits for the process that its keeper has started.
    pub fn kill(&self) -> Result<()> {
        self.must_live()?;
        let serving = PathBuf::from(format!("/proc/{}", self.serving()));
        self.process.kill()?;
        let deadline = Instant::now() + Duration::from_secs(30);
        while serving.exists() {
            if Instant::now() >= deadline {
                bail!("{} does not end", serving.display());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl DaemonBuilder {
    /// Adds a volume: a path, `mem://SIZE` or `null://SIZE`.
    pub fn volume(self, volume: impl Into<OsString>) -> Self {
        self.arg(volume)
    }

    /// Adds an option or its value.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.envs.push((name.to_string(), value.into()));
        self
    }

    /// Serves the disks of a configuration file instead of volumes; `socket` is the last of its
    /// sockets.
    pub fn config(mut self, file: &Path, socket: &Path) -> Self {
        self.config = Some((file.to_path_buf(), socket.to_path_buf()));
        self
    }

    /// Serves the configuration as `vnvme daemon`, which adds and removes disks at run time.
    pub fn managed(self, file: &Path, socket: &Path) -> Self {
        let command = "daemon";
        Self {
            command,
            ..self.config(file, socket)
        }
    }

    /// Another program than [`program`].
    pub fn program(mut self, program: PathBuf) -> Self {
        self.program = Some(program);
        self
    }

    /// Bounds its life.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Starts it and waits until it listens.
    pub fn start(self) -> Result<Daemon> {
        let (process, socket, log, dir) = self.spawn()?;
        let daemon = Daemon {
            process,
            socket,
            log,
            _dir: dir,
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        while !listening(&daemon.socket)? {
            daemon.must_live()?;
            if Instant::now() >= deadline {
                bail!("the daemon does not listen{}", tail("vnvme", &daemon.log));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(daemon)
    }

    /// Starts the daemon where it must refuse to run; returns its exit status and its output.
    pub fn refuse(self) -> Result<(ExitStatus, String)> {
        let (process, _, log, _dir) = self.spawn()?;
        let status = process.wait(Duration::from_secs(30))?;
        let printed = String::from_utf8_lossy(&fs::read(log)?).into_owned();
        Ok((status, printed))
    }

    fn spawn(&self) -> Result<(Process, PathBuf, PathBuf, tempfile::TempDir)> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let program = self.program.clone().map_or_else(program, Ok)?;
        let cache = Cache::open()?;
        let log = cache.logs()?.join(format!(
            "{}-{}-{}.vnvme",
            self.name,
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        ));
        let dir = tempfile::Builder::new().prefix("vnvme-").tempdir()?;
        let (option, value, socket) = match &self.config {
            Some((file, socket)) => ("--config", file.clone(), socket.clone()),
            None => {
                let socket = dir.path().join("socket");
                ("--socket", socket.clone(), socket)
            }
        };
        let mut words = vec![
            program.into(),
            self.command.into(),
            option.into(),
            value.into(),
        ];
        words.extend(self.args.iter().cloned());
        let name = format!("vnvme-{}", self.name);
        let process = Process::start(&name, &words, &self.envs, &log, self.limit)?;
        Ok((process, socket, log, dir))
    }
}

/// Whether something listens at a socket, without disturbing it by a connection (proc_net_unix: the
/// sixteenth bit of the flags is set for a socket that accepts).
fn listening(socket: &Path) -> Result<bool> {
    const ACCEPTS: u32 = 1 << 16;
    let table = fs::read_to_string("/proc/net/unix").context("reading /proc/net/unix")?;
    let path = socket.display().to_string();
    Ok(table.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let flags = words.get(3).and_then(|f| u32::from_str_radix(f, 16).ok());
        words.get(7) == Some(&path.as_str()) && flags.is_some_and(|f| f & ACCEPTS != 0)
    }))
}

/// The `vnvme` program: `VNVME_BIN`, else built once, with the same
/// optimisation as the harness itself.
pub fn program() -> Result<PathBuf> {
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    if let Some(path) = std::env::var_os("VNVME_BIN").filter(|v| !v.is_empty()) {
        return Ok(PathBuf::from(path));
    }
    let mut built = BUILT.lock().unpoisoned();
    if let Some(path) = &*built {
        return Ok(path.clone());
    }
    let path = build("vnvme", &["-p", "vnvme"])?;
    *built = Some(path.clone());
    Ok(path)
}

/// Builds a program of the workspace, with the same optimisation as the harness
/// itself; answers where it is. One that is in the directory `VNVME_PROGRAMS` was built before.
pub fn build(name: &str, args: &[&str]) -> Result<PathBuf> {
    built(name).map_or_else(|| build_in(name, args, None), Ok)
}

/// Returns a program, an example or a library that lies in the directory `VNVME_PROGRAMS`. Where it
/// is used, a test does not wait for other builds of the same target directory.
pub fn built(name: &str) -> Option<PathBuf> {
    let directory = std::env::var_os("VNVME_PROGRAMS").filter(|v| !v.is_empty())?;
    let directory = Path::new(&directory);
    let mut places = [directory.join(name), directory.join("examples").join(name)].into_iter();
    places.find(|place| place.exists())
}

/// Builds the program in a directory of its own, if one is given.
pub fn build_in(name: &str, args: &[&str], target: Option<&Path>) -> Result<PathBuf> {
    say(format!("building {name}"));
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir(checkout())
        .arg("build")
        .args(args)
        .arg("--message-format=json-render-diagnostics")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    if !cfg!(debug_assertions) {
        command.arg("--release");
    }
    if let Some(target) = target {
        command.arg("--target-dir").arg(target);
    }
    let out = command.output().context("running cargo build")?;
    if !out.status.success() {
        bail!("cargo build of {name} failed");
    }
    String::from_utf8_lossy(&out.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| Some(PathBuf::from(message["executable"].as_str()?)))
        .with_context(|| format!("cargo build named no executable of {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_follows_socket_state() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("s");
        assert!(!listening(&path)?);
        let listener = std::os::unix::net::UnixListener::bind(&path)?;
        assert!(listening(&path)?);
        drop(listener);
        assert!(!listening(&path)?);
        Ok(())
    }
}
