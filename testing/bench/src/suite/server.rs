//! `vnvme serve` processes for the measurements.

use super::counters::{self, ControllerCounters};
use super::scratch::Scratch;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::fmt::Write as _;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for the start and for the end of a server.
const START_STOP_TIMEOUT: Duration = Duration::from_secs(20);

const END_WITH_PARENT: &str = "--end-with-parent";

/// Returns whether `vnvme serve` knows an option. A compared program may be older than the option.
fn has_option(vnvme: &Path, option: &str) -> Result<bool> {
    // Hidden options are not in the help. One that is known is refused without its value, too,
    // for another reason.
    let asked = Command::new(vnvme).args(["serve", option]).output();
    let asked = asked.with_context(|| format!("{} serve", vnvme.display()))?;
    Ok(!String::from_utf8_lossy(&asked.stderr).contains("unexpected argument"))
}

/// A `vnvme` program to measure, and additional arguments for it.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// Path of the `vnvme` binary.
    pub path: PathBuf,
    /// Additional arguments for `vnvme serve`.
    pub args: Vec<String>,
}

/// Configuration of the `vnvme` server that a suite starts.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Specifications of volumes, each for one vfio-user controller.
    pub volumes: Vec<String>,
    /// Specifications of volumes, each for one vhost-user-blk export.
    pub exports: Vec<String>,
    /// Specifications of volumes, each for one NVMe/TCP subsystem on a port of this machine.
    pub subsystems: Vec<String>,
    /// Whether doorbells are in a mapped page, instead of being sent by message.
    pub mapped: bool,
    pub workers: usize,
    pub cpus: Vec<usize>,
    /// Idle window in microseconds; `None` for the program's default.
    pub idle_window: Option<u64>,
    /// Path of all namespaces to a device below: `direct` or `generic`.
    pub path: Option<&'static str>,
    /// Whether the kernel pins the client's memory.
    pub pin_memory: bool,
}

impl ServerConfig {
    /// Returns a configuration with one controller, on one worker bound to these CPUs.
    pub fn one(volume: &str, mapped: bool, cpus: &[usize]) -> Self {
        Self {
            volumes: vec![volume.to_owned()],
            exports: Vec::new(),
            subsystems: Vec::new(),
            mapped,
            workers: 1,
            cpus: cpus.to_vec(),
            idle_window: None,
            path: None,
            pin_memory: false,
        }
    }
}

/// A running `vnvme` server, which is ended when this value is dropped.
pub struct Server {
    child: Child,
    dir: Scratch,
    controllers: usize,
    /// TCP ports of the subsystems.
    ports: Vec<u16>,
    started_in: Duration,
}

/// Memory, processes and threads that a server and its children use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Footprint {
    /// Memory in bytes, with the proportional part of shared memory (`Pss`, proc_pid_smaps(5)).
    pub memory: u64,
    /// Number of processes: the server and its children.
    pub processes: u64,
    pub threads: u64,
}

impl Footprint {
    /// Adds the resources of a process and its children.
    fn add(&mut self, pid: &str) -> Result<()> {
        let path = format!("/proc/{pid}/smaps_rollup");
        let text = std::fs::read_to_string(&path).context(path)?;
        let pss = text.lines().find_map(|line| line.strip_prefix("Pss:"));
        let kib = pss.and_then(|line| line.split_ascii_whitespace().next());
        let kib: u64 = kib.context("no Pss")?.parse().context("Pss")?;
        self.memory += kib << 10;
        self.processes += 1;
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            self.threads += 1;
            let children = std::fs::read_to_string(task?.path().join("children"))?;
            for child in children.split_ascii_whitespace() {
                self.add(child)?;
            }
        }
        Ok(())
    }
}

impl Server {
    /// Starts a server, and waits until it listens.
    pub fn start(program: &Program, serve: &ServerConfig) -> Result<Server> {
        let dir = Scratch::new()?;
        let mut config = String::new();
        for (i, volume) in serve.volumes.iter().enumerate() {
            let socket = socket(&dir, i);
            let mode = if serve.mapped { "mapped" } else { "trapped" };
            // Debug formatting of a string is a TOML basic string, for the characters of paths and
            // URLs.
            writeln!(
                config,
                "[[controller]]\nsocket = {socket:?}\ndoorbells = \"{mode}\"\n[[controller.namespace]]\nvolume = {volume:?}"
            )?;
            if let Some(path) = serve.path {
                writeln!(config, "path = \"{path}\"")?;
            }
        }
        for (i, volume) in serve.exports.iter().enumerate() {
            let socket = export(&dir, i);
            writeln!(
                config,
                "[[vhost-user-blk]]\nsocket = {socket:?}\nvolume = {volume:?}"
            )?;
        }
        let ports = free_ports(serve.subsystems.len())?;
        for ((i, volume), port) in serve.subsystems.iter().enumerate().zip(&ports) {
            let subnqn = nqn(i);
            writeln!(
                config,
                "[[nvme-tcp]]\nlisten = \"127.0.0.1:{port}\"\nsubnqn = \"{subnqn}\"\n[[nvme-tcp.namespace]]\nvolume = {volume:?}"
            )?;
        }
        let path = dir.path().join("config.toml");
        std::fs::write(&path, config)?;
        let log = File::create(dir.path().join("log"))?;
        let mut command = Command::new(&program.path);
        command
            .arg("serve")
            .arg("--config")
            .arg(&path)
            .arg("--control")
            .arg(dir.path().join("control"));
        if has_option(&program.path, END_WITH_PARENT)? {
            // However this process ends, its servers do too.
            command.args([END_WITH_PARENT, &std::process::id().to_string()]);
        }
        if !serve.volumes.is_empty() || !serve.subsystems.is_empty() {
            command.args(["--workers", &serve.workers.to_string()]);
        }
        if !serve.cpus.is_empty() {
            let list: Vec<String> = serve.cpus.iter().map(usize::to_string).collect();
            command.args(["--cpus", &list.join(",")]);
        }
        if serve.pin_memory {
            command.arg("--pin-memory");
        }
        if let Some(micros) = serve.idle_window {
            command.args(["--idle-window", &micros.to_string()]);
        }
        command.args(&program.args);
        let start = Instant::now();
        let child = command
            .env("VNVME_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("starting vnvme serve")?;
        let mut server = Server {
            child,
            dir,
            controllers: serve.volumes.len(),
            ports,
            started_in: Duration::ZERO,
        };
        loop {
            if let Ok(stats) = counters::ask(&server.dir.path().join("control"))
                && stats.controllers.len() == server.controllers
                && stats.vhost_user_blk.len() == serve.exports.len()
            {
                server.started_in = start.elapsed();
                return Ok(server);
            }
            if let Some(status) = server.child.try_wait()? {
                bail!("vnvme serve ended ({status}): {}", server.log());
            }
            if start.elapsed() > START_STOP_TIMEOUT {
                bail!("vnvme serve does not listen: {}", server.log());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the time from the start to the first answer about the server's disks.
    pub fn started_in(&self) -> Duration {
        self.started_in
    }

    /// Returns the resources in use now.
    pub fn footprint(&self) -> Result<Footprint> {
        let mut footprint = Footprint::default();
        footprint.add(&self.child.id().to_string())?;
        Ok(footprint)
    }

    /// Returns the driver's URL for the first namespace of controller `index`.
    pub fn url(&self, index: usize) -> String {
        format!("vfio-user://{}/1", socket(&self.dir, index).display())
    }

    /// Returns the socket path of vhost-user-blk export `index`.
    pub fn export(&self, index: usize) -> PathBuf {
        export(&self.dir, index)
    }

    /// Returns the address of subsystem `index`.
    pub fn subsystem(&self, index: usize) -> SocketAddr {
        let port = self.ports.get(index).copied().unwrap_or_default();
        (Ipv4Addr::LOCALHOST, port).into()
    }

    /// Returns the NQN of a subsystem.
    pub fn nqn(&self, index: usize) -> String {
        nqn(index)
    }

    /// Stops or continues the process, for servers that poll on the same CPU in turn.
    pub fn stand_still(&self, still: bool) -> Result<()> {
        let signal = if still { Signal::STOP } else { Signal::CONT };
        kill_process(self.serving().context("no process")?, signal).context("signal")
    }

    /// Returns the serving process. With a keeper, it differs from the started one.
    fn serving(&self) -> Option<Pid> {
        Pid::from_raw(testkit::serving(self.child.id()) as i32)
    }

    /// Returns the counters of the server's controllers.
    pub fn counters(&self) -> Result<Vec<ControllerCounters>> {
        Ok(counters::ask(&self.dir.path().join("control"))?.controllers)
    }

    /// Returns the number of MMIO doorbells per command so far, over all I/O queues.
    pub fn mmio_per_io(&self) -> Result<f64> {
        let (mut mmio, mut commands) = (0, 0);
        for controller in self.counters()? {
            for queue in controller.queues.iter().filter(|q| q.qid > 0) {
                mmio += queue.mmio_doorbells;
                commands += queue.commands;
            }
        }
        Ok(mmio as f64 / commands.max(1) as f64)
    }

    /// Returns the total time for which the server's threads have waited for a CPU.
    pub fn waited(&self) -> Duration {
        let serving = testkit::serving(self.child.id());
        let tasks = std::fs::read_dir(format!("/proc/{serving}/task"));
        let each = tasks.into_iter().flatten().flatten();
        each.map(|task| load::waited(&task.path().join("schedstat").display().to_string()))
            .sum()
    }

    fn log(&self) -> String {
        let text = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(5).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
    }
}

fn socket(dir: &Scratch, index: usize) -> PathBuf {
    dir.path().join(format!("{index}.sock"))
}

fn nqn(index: usize) -> String {
    format!("nqn.2014-08.org.vnvme:bench-{index}")
}

/// Returns TCP ports that are currently free.
fn free_ports(count: usize) -> Result<Vec<u16>> {
    // All at a time, so that they differ.
    let listeners = (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)));
    let listeners = listeners.collect::<Result<Vec<_>, _>>().context("a port")?;
    let ports = listeners.iter().map(|l| Ok(l.local_addr()?.port()));
    ports.collect()
}

fn export(dir: &Scratch, index: usize) -> PathBuf {
    dir.path().join(format!("export-{index}.sock"))
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
            let _ = self.serving().map(|pid| kill_process(pid, Signal::CONT));
        }
        let start = Instant::now();
        while start.elapsed() < START_STOP_TIMEOUT {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
