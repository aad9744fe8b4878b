//! `vnvme` as a child process.
#![allow(unsafe_code)] // `pre_exec`.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, kill_process, kill_process_group,
    set_parent_process_death_signal, setrlimit,
};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

use super::{TestDir, WAIT_TIMEOUT, eventually, text};

/// A variable for daemons with the keeper of the configuration, or the default one.
pub const KEEPER_AS_CONFIGURED: (&str, &str) = ("VNVME_TEST_KEEPER", "as configured");

/// A variable for daemons that do not end with the test's process.
const OUTLIVES: (&str, &str) = ("VNVME_TEST_OUTLIVES", "1");

/// A daemon; it ends with this value, and with the test.
pub struct Daemon {
    child: Child,
    log: Arc<Mutex<Vec<String>>>,
    /// The log is read to its next line, and then closed.
    last_line: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
    /// The daemon is a process group, which ends with this value.
    is_group: bool,
}

/// How a daemon ended.
#[derive(Debug)]
pub struct DaemonExit {
    pub status: ExitStatus,
    /// Lines that the daemon logged.
    pub log: Vec<String>,
}

impl Daemon {
    /// Starts `vnvme` with these arguments.
    pub fn spawn(args: &[impl AsRef<OsStr>]) -> Daemon {
        Self::start(Command::new(env!("CARGO_BIN_EXE_vnvme")), args)
    }

    /// Starts `vnvme` with a keeper that does not end with this process: its processes outlive it.
    /// All of them end with this value.
    pub fn spawn_outliving(variables: &[(&str, &str)], args: &[impl AsRef<OsStr>]) -> Daemon {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
        command.envs(variables.iter().copied()).process_group(0);
        command.env(OUTLIVES.0, OUTLIVES.1);
        let mut daemon = Self::start(command, args);
        daemon.is_group = true;
        daemon
    }

    /// Starts another program file than the one that was built.
    pub fn spawn_program(program: &Path, args: &[impl AsRef<OsStr>]) -> Daemon {
        Self::start(Command::new(program), args)
    }

    /// Starts a process that may lock only so many bytes of memory, also as root.
    pub fn spawn_with_locked_memory(bytes: u64, args: &[impl AsRef<OsStr>]) -> Daemon {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
        // SAFETY: the closure makes two system calls and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                let limit = Rlimit {
                    current: Some(bytes),
                    maximum: Some(bytes),
                };
                setrlimit(Resource::Memlock, limit)?;
                // Root has no limit with this capability. A process without the right to drop the
                // capability does not have it, either.
                let _ = remove_capability_from_bounding_set(CapabilitySet::IPC_LOCK);
                Ok(())
            });
        }
        Self::start(command, args)
    }

    /// Starts a process that may have only so many descriptors.
    pub fn spawn_with_descriptors(count: u64, args: &[impl AsRef<OsStr>]) -> Daemon {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
        let limit = Rlimit {
            current: Some(count),
            maximum: Some(count),
        };
        // SAFETY: the closure makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(move || Ok(setrlimit(Resource::Nofile, limit)?));
        }
        Self::start(command, args)
    }

    /// Starts a process with a variable in its environment.
    pub fn spawn_with(name: &str, value: &str, args: &[impl AsRef<OsStr>]) -> Daemon {
        Self::spawn_with_all(&[(name, value)], args)
    }

    /// Starts a process with several variables in its environment.
    pub fn spawn_with_all(variables: &[(&str, &str)], args: &[impl AsRef<OsStr>]) -> Daemon {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
        command.envs(variables.iter().copied());
        Self::start(command, args)
    }

    /// Starts a process with several variables in its environment.
    pub fn spawn_in(variables: &[(&str, &str)], args: &[impl AsRef<OsStr>]) -> Daemon {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
        command.envs(variables.iter().copied());
        Self::start(command, args)
    }

    /// Starts a copy of the program as another user.
    pub fn spawn_as(user: u32, program: &Path, args: &[impl AsRef<OsStr>]) -> Daemon {
        let mut command = Command::new(program);
        command.uid(user).gid(user);
        Self::start(command, args)
    }

    /// Starts a copy of the program as another user, with a limit of open descriptors.
    pub fn spawn_limited_as(
        user: u32,
        count: u64,
        program: &Path,
        args: &[impl AsRef<OsStr>],
    ) -> Daemon {
        let mut command = Command::new(program);
        command.uid(user).gid(user);
        let limit = Rlimit {
            current: Some(count),
            maximum: Some(count),
        };
        // SAFETY: the closure makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(move || Ok(setrlimit(Resource::Nofile, limit)?));
        }
        Self::start(command, args)
    }

    /// Starts a process that inherits an open socket, as service managers pass it
    /// (sd_listen_fds(3)).
    pub fn spawn_with_socket(socket: OwnedFd, args: &[impl AsRef<OsStr>]) -> Daemon {
        let mut command = Command::new("sh");
        let script = "export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$0\" \"$@\" 3<&0 </dev/null";
        command.args(["-c", script, env!("CARGO_BIN_EXE_vnvme")]);
        Self::start_reading(command, socket.into(), args)
    }

    fn start(command: Command, args: &[impl AsRef<OsStr>]) -> Daemon {
        Self::start_reading(command, Stdio::null(), args)
    }

    fn start_reading(mut command: Command, input: Stdio, args: &[impl AsRef<OsStr>]) -> Daemon {
        // Daemons that run beside each other have no control socket unless a test sets its path.
        if !command.get_envs().any(|(name, _)| name == "VNVME_CONTROL") {
            command.env("VNVME_CONTROL", "none");
        }
        command.args(args).env_remove("VNVME_LOG");
        // Tests examine the process that serves, and send signals to it.
        let names: Vec<&OsStr> = args.iter().map(AsRef::as_ref).collect();
        let serves = matches!(
            names.first().and_then(|n| n.to_str()),
            Some("serve" | "daemon")
        );
        let says = names.iter().any(|name| *name == "--keeper")
            || command
                .get_envs()
                .any(|(name, _)| name == KEEPER_AS_CONFIGURED.0);
        if serves && !says {
            command.args(["--keeper", "off"]);
        }
        let outlives = command.get_envs().any(|(name, _)| name == OUTLIVES.0);
        let signal = (!outlives).then_some(Signal::KILL);
        command.stdin(input).stderr(Stdio::piped());
        // SAFETY: the closure makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(move || Ok(set_parent_process_death_signal(signal)?));
        }
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let last_line = Arc::new(AtomicBool::new(false));
        let (lines, last) = (log.clone(), last_line.clone());
        let reader = std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let lock = lines.lock();
                lock.unwrap_or_else(PoisonError::into_inner).push(line);
                if last.load(Ordering::Acquire) {
                    break;
                }
            }
        });
        Daemon {
            child,
            log,
            last_line,
            reader: Some(reader),
            is_group: false,
        }
    }

    /// Serves volumes at a place's socket; more arguments may stand among them.
    pub fn serve(test_dir: &TestDir, args: &[&str]) -> Daemon {
        let socket = text(&test_dir.socket());
        let mut all = vec!["serve", "--socket", &socket];
        all.extend(args);
        let daemon = Self::spawn(&all);
        daemon.wait_listening(&test_dir.socket());
        daemon
    }

    /// Waits until the daemon logs that it listens.
    pub fn wait_listening(&self, socket: &Path) {
        let socket = text(socket);
        self.wait_log(|line| line.contains("listening") && line.contains(&socket));
    }

    /// Closes the pipe of the log. `say_something` makes the daemon write to it once more.
    pub fn close_log(&self, say_something: impl FnOnce(&Daemon)) {
        self.last_line.store(true, Ordering::Release);
        say_something(self);
        eventually("the log is closed", || {
            self.reader.as_ref().unwrap().is_finished()
        });
    }

    /// Reads nothing more of its log, which is full from now on, until the result is dropped.
    pub fn stop_reading(&self) -> MutexGuard<'_, Vec<String>> {
        let lines = self.log.lock().unwrap();
        let nonblock = OFlags::WRONLY | OFlags::NONBLOCK;
        let pipe = format!("/proc/{}/fd/2", self.pid());
        let pipe = rustix::fs::open(pipe, nonblock, Mode::empty()).unwrap();
        let mut refused = 0;
        // The reader takes some of it before it waits.
        while refused < 20 {
            match rustix::io::write(&pipe, &[b'\n'; 4096]) {
                Ok(_) => refused = 0,
                Err(_) => refused += 1,
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        lines
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the lines that were logged until now.
    pub fn log(&self) -> Vec<String> {
        let lines = self.log.lock();
        lines.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Number of lines that contain a text.
    pub fn count(&self, text: &str) -> usize {
        self.log().iter().filter(|line| line.contains(text)).count()
    }

    /// Waits for a line; returns it.
    pub fn wait_log(&self, wanted: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let log = self.log();
            if let Some(line) = log.iter().find(|line| wanted(line)) {
                return line.clone();
            }
            assert!(
                Instant::now() < deadline && !self.reader.as_ref().unwrap().is_finished(),
                "the daemon never said it; it said: {log:#?}"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Waits for its end.
    pub fn wait(mut self) -> DaemonExit {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(
                Instant::now() < deadline,
                "it does not end: {:#?}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(2));
        };
        self.reader.take().unwrap().join().unwrap();
        DaemonExit {
            status,
            log: self.log(),
        }
    }

    /// Ends it as an init system would; it must end well.
    pub fn end(self) -> DaemonExit {
        self.signal(Signal::TERM);
        let ended = self.wait();
        // The last lines first: reports of failures are cut.
        let (status, lines) = (ended.status, ended.log.iter().rev());
        let lines: Vec<&String> = lines.take(40).collect();
        assert_eq!(status.code(), Some(0), "{status:?}: {lines:#?}");
        ended
    }

    /// Ends it as the out-of-memory killer would.
    pub fn kill(self) {
        self.signal(Signal::KILL);
        assert_eq!(self.wait().status.signal(), Some(9));
    }

    /// Whether it runs.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Returns the number of the daemon's descriptors when it opens and closes nothing more. Its
    /// main thread still opens one when its workers serve already, and a client's descriptors are
    /// closed a moment after it has disconnected.
    pub fn settled_descriptors(&self) -> usize {
        let mut before = super::descriptors(self.pid());
        eventually("its descriptors stay the same", || {
            std::thread::sleep(Duration::from_millis(300));
            let last = std::mem::replace(&mut before, super::descriptors(self.pid()));
            before == last
        });
        before
    }

    /// Waits until its counter of descriptors is back at `count`.
    pub fn wait_descriptors(&self, count: usize) {
        eventually("descriptors are closed", || {
            super::descriptors(self.pid()) <= count
        });
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.reader.is_none() {
            return;
        }
        let group = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        if let Some(group) = group.filter(|_| self.is_group) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the daemon's log: {:#?}", self.log());
        }
    }
}
