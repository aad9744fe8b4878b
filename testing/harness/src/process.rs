//! Child processes that cannot outlive the harness and have a time limit of their own.
//!
//! Each child is started and watched by a thread that lives as long as the child. That matters: the
//! kernel's parent-death signal is tied to the *thread* that started a child, and a test's thread
//! ends before the next test that shares its guest does.

use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::apt::on_path;
use sync::Unpoisoned;

/// Interval of the watching thread.
const TICK: Duration = Duration::from_millis(10);

/// A watched child process; dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    shared: Arc<SharedProcess>,
}

#[derive(Debug, Default)]
struct SharedProcess {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    pid: Option<u32>,
    failed: Option<std::io::Error>,
    ended: Option<ExitStatus>,
    overdue: bool,
}

impl SharedProcess {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unpoisoned()
    }
}

impl Process {
    /// Starts `words` with both outputs appended to `log`. It is killed `limit` from now,
    /// and when this process ends.
    pub fn start(
        name: &str,
        words: &[OsString],
        envs: &[(String, OsString)],
        log: &Path,
        limit: Duration,
    ) -> Result<Process> {
        let mut words = words.to_vec();
        if on_path("setpriv") {
            let wrap = ["setpriv", "--pdeathsig", "KILL", "--"];
            words.splice(0..0, wrap.iter().map(OsString::from));
        }
        let (program, args) = words.split_first().context("an empty command")?;
        let out = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("opening {}", log.display()))?;
        let mut command = Command::new(program);
        command
            .args(args)
            .envs(envs.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out);
        let shared = Arc::new(SharedProcess::default());
        let watched = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(format!("watch-{name}"))
            .spawn(move || watch(&watched, command, limit))?;
        let mut state = shared.state();
        while state.pid.is_none() && state.failed.is_none() {
            state = shared.changed.wait(state).unpoisoned();
        }
        if let Some(e) = state.failed.take() {
            return Err(e).with_context(|| format!("starting {}", program.to_string_lossy()));
        }
        drop(state);
        Ok(Process {
            name: name.to_string(),
            shared,
        })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.shared.state().pid.unwrap_or(0)
    }

    /// Returns the exit status, if the process has ended.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.shared.state().ended
    }

    /// Returns whether it was killed because its time had passed.
    pub fn overdue(&self) -> bool {
        self.shared.state().overdue
    }

    /// Sends a signal; to a process that has ended, nothing.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let state = self.shared.state();
        // The lock is held: the watching thread cannot reap it in between, so the
        // id is still this process.
        if state.ended.is_none()
            && let Some(pid) = state.pid.and_then(|p| Pid::from_raw(p.cast_signed()))
        {
            kill_process(pid, signal).with_context(|| format!("signalling {}", self.name))?;
        }
        Ok(())
    }

    /// Waits for its end.
    pub fn wait(&self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        let mut state = self.shared.state();
        loop {
            if let Some(status) = state.ended {
                return Ok(status);
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                bail!("{} did not end within {} s", self.name, limit.as_secs());
            };
            state = self.shared.changed.wait_timeout(state, left).unpoisoned().0;
        }
    }

    /// Kills the process and waits for its end.
    pub fn kill(&self) -> Result<()> {
        self.signal(Signal::KILL)?;
        self.wait(Duration::from_secs(30))?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A process that does not die is left.
        let _ = self.kill();
    }
}

fn watch(shared: &SharedProcess, mut command: Command, limit: Duration) {
    let mut child: Child = match command.spawn() {
        Ok(child) => child,
        Err(e) => {
            shared.state().failed = Some(e);
            shared.changed.notify_all();
            return;
        }
    };
    shared.state().pid = Some(child.id());
    shared.changed.notify_all();
    let deadline = Instant::now() + limit;
    loop {
        {
            let mut state = shared.state();
            if let Ok(Some(status)) = child.try_wait() {
                state.ended = Some(status);
                shared.changed.notify_all();
                return;
            }
            if Instant::now() >= deadline && !state.overdue {
                state.overdue = true;
                // A child that has just ended cannot be killed; the next turn sees its end.
                let _ = child.kill();
            }
        }
        std::thread::sleep(TICK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(limit: Duration) -> Result<Process> {
        let log = tempfile::NamedTempFile::new()?;
        let words = ["sleep", "600"].map(OsString::from);
        Process::start("sleep", &words, &[], log.path(), limit)
    }

    #[test]
    fn process_past_limit_is_killed() -> Result<()> {
        let process = sleeper(Duration::from_millis(50))?;
        let status = process.wait(Duration::from_secs(20))?;
        assert!(!status.success() && process.overdue());
        Ok(())
    }

    #[test]
    fn process_outlives_starting_thread_but_not_handle() -> Result<()> {
        let process = std::thread::spawn(|| sleeper(Duration::from_secs(600)))
            .join()
            .map_err(|_| anyhow::anyhow!("panicked"))??;
        std::thread::sleep(Duration::from_millis(100));
        assert!(process.ended().is_none(), "it must survive the thread");
        let pid = process.pid();
        drop(process);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
        Ok(())
    }

    #[test]
    fn missing_program_is_error_or_failed_process() -> Result<()> {
        let log = tempfile::NamedTempFile::new()?;
        let words = [OsString::from("/nonexistent/program")];
        let started = Process::start("none", &words, &[], log.path(), Duration::from_secs(9));
        if let Ok(process) = started {
            assert!(!process.wait(Duration::from_secs(20))?.success());
        }
        Ok(())
    }
}
