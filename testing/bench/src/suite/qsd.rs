//! qemu-storage-daemon with one vhost-user-blk export.

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Default path of the program.
pub const QSD: &str = "qemu-storage-daemon";
/// Time limit for the start and for the end of the process.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Parameters of a qemu-storage-daemon process.
pub struct Start<'a> {
    pub program: &'a Path,
    /// Values of `--blockdev`. The last one has the node name `q` and is exported.
    pub blockdevs: &'a [String],
    pub socket: &'a Path,
    /// CPUs of the threads; empty: no restriction.
    pub cpus: &'a [usize],
}

/// A running qemu-storage-daemon, which is ended when this is dropped.
pub struct Qsd {
    child: Child,
    pub socket: PathBuf,
}

impl Qsd {
    pub fn start(start: &Start<'_>) -> Result<Self> {
        let export = format!(
            "type=vhost-user-blk,id=e,node-name=q,addr.type=unix,addr.path={},writable=on,iothread=t",
            start.socket.display()
        );
        let mut command = match start.cpus {
            [] => Command::new(start.program),
            cpus => {
                let list: Vec<String> = cpus.iter().map(usize::to_string).collect();
                let mut command = Command::new("taskset");
                command.args(["-c", &list.join(",")]).arg(start.program);
                command
            }
        };
        command.args(["--object", "iothread,id=t"]);
        for blockdev in start.blockdevs {
            command.args(["--blockdev", blockdev]);
        }
        let child = command
            .args(["--export", &export])
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| start.program.display().to_string())?;
        let mut qsd = Self {
            child,
            socket: start.socket.to_owned(),
        };
        let began = Instant::now();
        while UnixStream::connect(start.socket).is_err() {
            if let Some(status) = qsd.child.try_wait()? {
                bail!("{QSD} ended ({status})");
            }
            ensure!(began.elapsed() < START_TIMEOUT, "{QSD} does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(qsd)
    }
}

impl Drop for Qsd {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let began = Instant::now();
        while began.elapsed() < START_TIMEOUT {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
