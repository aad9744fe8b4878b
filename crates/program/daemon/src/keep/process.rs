//! The keeper process: its arguments, and how the process that an operator has started becomes the
//! keeper.

use super::session::{KEPT, KeeperSession, WITH_KEEPER};
use super::versions::{VERSIONS, Versions};
use crate::confine::inherited::Inherited;
use crate::log::stderr;
use crate::manage::allows_ublk;
use crate::serve::notify;
use crate::serve::options::ServeOptions;
use anyhow::{Context, Result, bail};
use config::choices::{KeeperMode, SandboxMode};
use config::disk::{Disk, Specs};
use keeper::{Keeper, KeeperExit, MayGo, PROTOCOL, PassedDescriptor, ProgramSelector, Programs};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{
    Resource, Rlimit, Signal, getrlimit, parent_process_death_signal, setrlimit,
};
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

/// First arguments of a keeper process; the arguments of the serving process follow.
const ARGUMENTS: [&str; 2] = ["keep", "--sandbox=on"];
const WITHOUT_SANDBOX: &str = "--sandbox=off";
/// Second argument of a stand-by process, which becomes the keeper if the keeper dies.
const STANDBY: &str = "--stand-by";
/// Variable of a process that was the keeper before its program was replaced: the number of the
/// descriptor of its state.
const STATE: &str = "VNVME_KEEPER_STATE";
/// The number of the descriptor of the program before, which goes on if the new one cannot.
const BEFORE: &str = "VNVME_KEEPER_BEFORE";
/// Arguments of the process that closes the keeper's descriptors after its end ([`last`]).
pub const LAST: [&str; 2] = ["keep", "--last"];

/// Suffix that the kernel adds to the path of a replaced program (proc(5), /proc/pid/exe).
const GONE: &[u8] = b" (deleted)";

/// Variables of systemd's watchdog (sd_watchdog_enabled(3)): its interval, and the process that it
/// expects to notify it.
const WATCHDOG: [&str; 2] = ["WATCHDOG_USEC", "WATCHDOG_PID"];
/// Environment variables that only the keeper process has, not the serving process.
const OWN: [&str; 5] = [
    "NOTIFY_SOCKET",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    "FDSTORE",
];

/// First version of the keeper's protocol whose program continues as the keeper in this process.
const FIRST_TO_RESUME: u32 = 3;

/// Number of descriptors that the keeper process reserves for its own use.
const RESERVE: u64 = 64;
/// Maximum number of kept descriptors, regardless of the limit: more than any machine's disks need.
const MAX_DESCRIPTORS: u64 = 1 << 20;

impl KeeperSession {
    /// Selects the keeper. If a keeper process is needed, this process becomes it and starts the
    /// serving process: the function then does not return.
    ///
    /// # Errors
    /// A sentence for the user.
    pub(crate) fn begin(&mut self, specs: &Specs, options: &ServeOptions) -> Result<()> {
        if !self.is_kept() {
            self.choose(specs, options)?;
        }
        self.begin_attempts();
        Ok(())
    }

    fn choose(&mut self, specs: &Specs, options: &ServeOptions) -> Result<()> {
        let mode = match (options.keeper, obstacle(specs, options)) {
            (KeeperMode::Auto, Some(why)) => {
                // No message where a keeper would have nothing to keep.
                if has_clients(specs) {
                    tracing::info!("no keeper: {why}");
                }
                KeeperMode::Off
            }
            (KeeperMode::Auto, None) if room_of_systemd().is_some() => KeeperMode::Systemd,
            (KeeperMode::Auto, None) => KeeperMode::Process,
            (KeeperMode::Process | KeeperMode::Systemd, Some(why)) => bail!("keeper: {why}"),
            (mode, _) => mode,
        };
        if mode != KeeperMode::Systemd {
            self.leave_systemd();
        }
        match mode {
            KeeperMode::Off => Ok(()),
            KeeperMode::Systemd => self.take_systemd(room_of_systemd().context(
                "keeper = systemd: systemd keeps no descriptors for this service: it needs \
                 FileDescriptorStoreMax= in the unit, and systemd 254 or newer",
            )?),
            KeeperMode::Auto | KeeperMode::Process => {
                become_keeper(options.sandbox, &self.inherited)
            }
        }
    }

    /// Gives the serving process of a keeper its name.
    pub(crate) fn name_process(&self) {
        if self.is_kept()
            && let Ok(name) = std::ffi::CString::new(SERVING)
        {
            let _ = rustix::thread::set_name(&name);
        }
    }
}

/// Returns the number of descriptors that systemd keeps for this service, if it is there and keeps
/// any (systemd.exec(5), `$FDSTORE`).
fn room_of_systemd() -> Option<usize> {
    let text = std::env::var("FDSTORE").ok()?;
    std::env::var_os("NOTIFY_SOCKET")?;
    text.parse().ok().filter(|most| *most > 0)
}

/// Returns whether any disk needs a keeper, or may be added that does.
fn has_clients(specs: &Specs) -> bool {
    specs.is_empty() || specs.iter().any(|disk| !disk.is_device())
}

/// Returns the reason why a keeper is impossible, as a text; `None` if it is possible.
fn obstacle(specs: &Specs, options: &ServeOptions) -> Option<String> {
    // The kernel has such a disk from one process until it is given to another: not tried yet.
    if specs.iter().any(<dyn Disk>::is_device) || allows_ublk(options) {
        return Some("not together with ublk disks: serve those with another process".to_owned());
    }
    let path = options.read_from.iter().find(|path| !is_lasting(path))?;
    Some(format!(
        "{}: a process that follows could not read this again: with a keeper the configuration has \
         to be a file or a folder",
        path.display()
    ))
}

/// Returns whether a path can be read more than once, unlike a pipe.
fn is_lasting(path: &Path) -> bool {
    path.is_file() || path.is_dir()
}

/// This program, as the same file, also when another one has come to its place.
const PROGRAM: &str = "/proc/self/exe";

/// Name of the serving process in ps(1). Its program is started through a link of `/proc`, whose
/// name the kernel would show otherwise.
const SERVING: &str = "vnvme-worker";

fn program(file: &str) -> Command {
    let mut command = Command::new(file);
    command.arg0("vnvme");
    command
}

/// Replaces the program of this process (`execve`) by the keeper. The process number stays, and
/// nothing that was read is needed.
fn become_keeper(sandbox: SandboxMode, inherited: &Inherited) -> Result<()> {
    inherited.pass_on();
    let mode = match sandbox {
        SandboxMode::On => ARGUMENTS[1],
        SandboxMode::Off => WITHOUT_SANDBOX,
    };
    let mut command = program(PROGRAM);
    command
        .args([ARGUMENTS[0], mode])
        .args(std::env::args_os().skip(1));
    Err(command.exec()).context("the keeper process")
}

/// Arguments with which a keeper process was started.
#[derive(Debug, PartialEq, Eq)]
pub struct Wanted {
    sandbox: SandboxMode,
    is_standby: bool,
    /// Arguments with which the keeper starts serving processes.
    args: Vec<OsString>,
}

/// Returns whether the keeper is killed with its parent, and all of its processes with it
/// (prctl(2), PR_SET_PDEATHSIG).
fn ends_all() -> bool {
    parent_process_death_signal() == Ok(Some(Signal::KILL))
}

/// Parses the arguments of a keeper process (without the program's name).
pub fn wanted(args: impl Iterator<Item = OsString>) -> Option<Wanted> {
    let mut args = args;
    if args.next()? != ARGUMENTS[0] {
        return None;
    }
    let mut mode = args.next()?;
    let is_standby = mode == STANDBY;
    if is_standby {
        mode = args.next()?;
    }
    let sandbox = match () {
        () if mode == ARGUMENTS[1] => SandboxMode::On,
        () if mode == WITHOUT_SANDBOX => SandboxMode::Off,
        () => return None,
    };
    let args = args.collect();
    Some(Wanted {
        sandbox,
        is_standby,
        args,
    })
}

/// Runs the process that closes all descriptors that a keeper has kept.
pub fn last() -> ExitCode {
    let outlived = keeper::outlive(io::stdin());
    outlived.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
}

/// Runs the keeper process until it ends.
pub fn run(wanted: &Wanted) -> ExitCode {
    let kept = if wanted.is_standby {
        stand_by(wanted)
    } else {
        keep(wanted).map(Some)
    };
    match kept {
        // The keeper has ended in order, and this process was not needed.
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(end)) => ended(end),
        Err(error) => {
            stderr::say(format_args!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn ended(end: KeeperExit) -> ExitCode {
    match end {
        KeeperExit::Code(code) => ExitCode::from(code),
        KeeperExit::Signal(signal) => {
            // Ends by the signal, as a process without a keeper does.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
            ExitCode::FAILURE
        }
        KeeperExit::NotDurable => {
            stderr::say(format_args!(
                "the process that served could not end in order: what its clients wrote and did \
                 not flush may not be durable"
            ));
            ExitCode::from(crate::serve::shutdown::NOT_DURABLE)
        }
    }
}

fn stand_by(wanted: &Wanted) -> Result<Option<KeeperExit>> {
    let channel = io::stdin().as_fd().try_clone_to_owned();
    let channel = channel.context("the keeper's socket")?;
    // The end of the socket shows the end of the keeper.
    let null = open("/dev/null", OFlags::RDONLY, Mode::empty()).context("/dev/null")?;
    rustix::stdio::dup2_stdin(null).context("standard input")?;
    with_keeper(wanted, Vec::new(), |keeper, confine| {
        Ok(keeper.stand_by(channel, confine)?)
    })
}

fn keep(wanted: &Wanted) -> Result<KeeperExit> {
    let open = inherit::take_named();
    let number = |name| std::env::var(name).ok()?.parse::<RawFd>().ok();
    let Some(state) = number(STATE) else {
        let given = open
            .into_iter()
            .map(|(name, fd)| PassedDescriptor { name, fd });
        return with_keeper(wanted, given.collect(), |keeper, confine| {
            Ok(keeper.run(confine)?)
        });
    };
    let mut open: Vec<OwnedFd> = open.into_iter().map(|(_, fd)| fd).collect();
    let mut take = |number: Option<RawFd>| {
        let place = open.iter().position(|fd| Some(fd.as_raw_fd()) == number);
        place.map(|place| open.swap_remove(place))
    };
    let before = take(number(BEFORE)).context("the program before is missing")?;
    let state = take(Some(state)).context("the state of the keeper is missing")?;
    with_keeper(wanted, Vec::new(), |keeper, _| {
        // The sandbox of the program before has no end.
        match keeper.resume(state.as_fd(), open, inherit::unblock_signals) {
            Ok(end) => Ok(end?),
            Err((error, open)) => {
                stderr::say(format_args!(
                    "the new program cannot be the keeper: {error}"
                ));
                let error = go_back(wanted, &state, &before, &open);
                Err(error).context("the program before cannot be the keeper again")
            }
        }
    })
}

/// Has the program before be this process again, because the new one failed. Returns only if that
/// cannot be done.
fn go_back(wanted: &Wanted, state: &OwnedFd, before: &OwnedFd, open: &[OwnedFd]) -> io::Error {
    let all = open.iter().chain([state, before]);
    for fd in all.clone() {
        if let Err(errno) = fcntl_setfd(fd, FdFlags::empty()) {
            return errno.into();
        }
    }
    let last = all.map(AsRawFd::as_raw_fd).max().unwrap_or(0);
    let mut command = program(&opened(before));
    again(&mut command, wanted, (state.as_fd(), before.as_fd()), last);
    // Signals are blocked still, and handled by that program.
    inherit::replace_program(&mut command, || true)
}

/// Sets the arguments and the environment of the program that replaces the keeper's program.
fn again(
    command: &mut Command,
    wanted: &Wanted,
    (state, before): (BorrowedFd<'_>, BorrowedFd<'_>),
    last: RawFd,
) {
    let mode = match wanted.sandbox {
        SandboxMode::On => ARGUMENTS[1],
        SandboxMode::Off => WITHOUT_SANDBOX,
    };
    command.args([ARGUMENTS[0], mode]).args(&wanted.args);
    command.env(STATE, state.as_raw_fd().to_string());
    command.env(BEFORE, before.as_raw_fd().to_string());
    // All open descriptors are taken, by number (crate `inherit`).
    command.env("LISTEN_PID", std::process::id().to_string());
    command.env("LISTEN_FDS", last.saturating_sub(2).to_string());
    command.env_remove("LISTEN_FDNAMES");
}

/// Function that puts a keeper process into its sandbox.
type Confine = fn() -> Result<(), Box<dyn Error + Send + Sync>>;

fn with_keeper<T>(
    wanted: &Wanted,
    given: Vec<PassedDescriptor>,
    run: impl FnOnce(Keeper<'_>, Confine) -> Result<T>,
) -> Result<T> {
    let _ = rustix::thread::set_name(c"vnvme-keeper");
    // This process is to have no more descriptors than there is room for in a serving one.
    let limit = raised_limit();
    let most = limit
        .saturating_sub(RESERVE)
        .clamp(RESERVE, MAX_DESCRIPTORS)
        / 2;
    // Owner of the service manager's watchdog: this process or another one.
    let own = std::process::id().to_string();
    let other = std::env::var(WATCHDOG[1]).is_ok_and(|process| process != own);
    let mut programs = Binaries {
        path: std::env::current_exe().ok(),
        present: PROGRAM.into(),
        versions: Versions::own(),
        new: None,
        wanted,
        sets_watchdog: !other,
        kept_open: None,
        speaks: PROTOCOL,
    };
    let keeper = Keeper {
        programs: &mut programs,
        most: usize::try_from(most).unwrap_or(usize::MAX),
        given,
        manager: notify::socket().map(Into::into),
        is_last: ends_all(),
    };
    let confine: Confine = match wanted.sandbox {
        SandboxMode::On => || sandbox::leave_user().map_err(|error| Box::new(error).into()),
        SandboxMode::Off => || Ok(()),
    };
    run(keeper, confine)
}

/// Program files from which the keeper starts serving processes.
struct Binaries<'a> {
    /// Path of the program. An upgrade may have replaced the file.
    path: Option<PathBuf>,
    present: String,
    /// Versions of state that the present program reads and writes.
    versions: Versions,
    new: Option<New>,
    wanted: &'a Wanted,
    /// Whether the service manager's watchdog expects notifications of the serving process.
    sets_watchdog: bool,
    /// Open file of the present program; `None` if it is the keeper's own.
    kept_open: Option<OwnedFd>,
    /// Version of the keeper's protocol that the present program uses.
    speaks: u32,
}

/// Program file with another version, to which an upgrade switches.
struct New {
    file: OwnedFd,
    versions: Versions,
}

/// Returns the path of an open file in /proc, which always names the same file.
fn opened(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

impl Programs for Binaries<'_> {
    fn start(&mut self, which: ProgramSelector, channel: OwnedFd) -> io::Result<Child> {
        let file = match (which, &self.new) {
            (ProgramSelector::New, Some(new)) => opened(&new.file),
            _ => self.present.clone(),
        };
        let mut command = program(&file);
        command
            .arg0(SERVING)
            .args(&self.wanted.args)
            .env(KEPT, if ends_all() { WITH_KEEPER } else { "1" })
            .stdin(Stdio::from(channel));
        for name in OWN.iter().chain(&WATCHDOG[1..]).chain(&[STATE, BEFORE]) {
            command.env_remove(name);
        }
        if !self.sets_watchdog {
            command.env_remove(WATCHDOG[0]);
        }
        command.spawn()
    }

    fn ask(&mut self, output: Stdio) -> Result<Child, String> {
        let path = self
            .path
            .as_ref()
            .ok_or("nobody knows where this program was")?;
        let name = path.as_os_str().as_bytes();
        let path = Path::new(OsStr::from_bytes(name.strip_suffix(GONE).unwrap_or(name)));
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let file = File::open(path).map_err(failed)?.into();
        let mut command = program(&opened(&file));
        command.args(VERSIONS).env_clear();
        command.stdin(Stdio::null()).stdout(output);
        let child = command.spawn().map_err(failed)?;
        let versions = Versions::default();
        self.new = Some(New { file, versions });
        Ok(child)
    }

    fn fits(&mut self, said: &str) -> Result<(), String> {
        let new = self.new.as_mut().ok_or("there is none")?;
        new.versions = Versions::read(said).ok_or("the new program does not know how")?;
        new.versions.follows(&self.versions)
    }

    fn decide(&mut self, which: ProgramSelector) {
        // A file that is not the present one any more is closed.
        if let (ProgramSelector::New, Some(new)) = (which, self.new.take()) {
            self.present = opened(&new.file);
            self.versions = new.versions;
            self.speaks = self.versions.keeper();
            self.kept_open = Some(new.file);
        }
    }

    fn start_standby(&mut self, channel: OwnedFd) -> io::Result<Child> {
        let mode = match self.wanted.sandbox {
            SandboxMode::On => ARGUMENTS[1],
            SandboxMode::Off => WITHOUT_SANDBOX,
        };
        let mut command = program(PROGRAM);
        command
            .args([ARGUMENTS[0], STANDBY, mode])
            .args(&self.wanted.args);
        for name in ["LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", STATE, BEFORE] {
            command.env_remove(name);
        }
        command.stdin(Stdio::from(channel)).spawn()
    }

    fn replace(&mut self, state: BorrowedFd<'_>, last: RawFd, may_go: MayGo) -> io::Error {
        if self.speaks < FIRST_TO_RESUME {
            return io::Error::other("the new program does not know how to be the keeper");
        }
        // The file is open across the end of this program.
        let before = match open(PROGRAM, OFlags::RDONLY, Mode::empty()) {
            Ok(before) => before,
            Err(errno) => return errno.into(),
        };
        let last = last.max(before.as_raw_fd());
        let mut command = program(&self.present);
        again(&mut command, self.wanted, (state, before.as_fd()), last);
        inherit::replace_program(&mut command, may_go)
    }

    fn start_last(&mut self, keeper: OwnedFd) -> io::Result<()> {
        let mut command = program(PROGRAM);
        command.args(LAST).env_clear().stdin(keeper);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(drop)
    }

    fn say(&mut self, text: &str) {
        stderr::say(format_args!("{text}"));
    }
}

/// Raises the limit of open descriptors to its maximum, and returns that.
fn raised_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let now = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    now.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keep_arguments_start_keeper() {
        let of = |args: &[&str]| wanted(args.iter().map(OsString::from));
        let wanted = |sandbox, is_standby, args: &[&str]| {
            let args = args.iter().map(OsString::from).collect();
            Some(Wanted {
                sandbox,
                is_standby,
                args,
            })
        };
        assert_eq!(
            of(&["keep", "--sandbox=on", "serve", "-s", "x"]),
            wanted(SandboxMode::On, false, &["serve", "-s", "x"])
        );
        assert_eq!(
            of(&["keep", "--sandbox=off"]),
            wanted(SandboxMode::Off, false, &[])
        );
        assert_eq!(
            of(&["keep", "--stand-by", "--sandbox=off", "serve"]),
            wanted(SandboxMode::Off, true, &["serve"])
        );
        for other in [
            &["keep"][..],
            &["keep", "--stand-by"],
            &["serve"],
            &["keep", "serve"],
            &[],
        ] {
            assert_eq!(of(other), None, "{other:?}");
        }
    }
}
