//! The keeper process: its arguments, and how the process that an operator has started becomes the
//! keeper.

use super::KeeperMode;
use super::mode::room_of_systemd;
use super::pool::{KEPT, is_kept, leave_systemd, take_systemd};
use super::versions::{VERSIONS, Versions};
use crate::confine::SandboxMode;
use crate::inherited;
use crate::manage::allows_ublk;
use crate::notify;
use crate::spec::{ServeOptions, Specs};
use crate::stderr;
use anyhow::{Context, Result, bail};
use keeper::{End, Given, Keeper, Programs, Which};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

/// The first argument of a keeper process; the serving process's own follow.
const ARGUMENTS: [&str; 2] = ["keep", "--sandbox=on"];
const WITHOUT_SANDBOX: &str = "--sandbox=off";
/// The arguments of the process that a keeper process leaves ([`last`]).
pub const LAST: [&str; 2] = ["keep", "--last"];

/// Suffix that the kernel adds to the path of a replaced program (proc(5), /proc/pid/exe).
const GONE: &[u8] = b" (deleted)";

/// Variables of systemd's watchdog (sd_watchdog_enabled(3)): its interval, and the process that it
/// expects to notify it.
const WATCHDOG: [&str; 2] = ["WATCHDOG_USEC", "WATCHDOG_PID"];
/// Variables of the environment that belong to the keeper process alone.
const OWN: [&str; 5] = [
    "NOTIFY_SOCKET",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    "FDSTORE",
];

/// Descriptors that the keeper process leaves for itself, of those that it may have.
const RESERVE: u64 = 64;
/// Maximum number of kept descriptors, regardless of the limit: more than any machine's disks need.
const MOST: u64 = 1 << 20;

/// Selects the keeper. If a keeper process is needed, this process becomes it and starts the
/// serving process: the function then does not return.
///
/// # Errors
/// A sentence for the user.
pub fn begin(specs: &Specs, options: &ServeOptions) -> Result<()> {
    if is_kept() {
        return Ok(());
    }
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
        leave_systemd();
    }
    match mode {
        KeeperMode::Off => Ok(()),
        KeeperMode::Systemd => take_systemd(room_of_systemd().context(
            "keeper = systemd: systemd keeps no descriptors for this service: it needs \
             FileDescriptorStoreMax= in the unit, and systemd 254 or newer",
        )?),
        KeeperMode::Auto | KeeperMode::Process => become_keeper(options.sandbox),
    }
}

/// There are disks that a keeper is for, or there may be some.
fn has_clients(specs: &Specs) -> bool {
    let others = specs.controllers.len() + specs.vhost_user_blk.len() + specs.nvme_tcp.len();
    others > 0 || specs.ublk.is_empty()
}

/// Why there can be no keeper, in words.
fn obstacle(specs: &Specs, options: &ServeOptions) -> Option<String> {
    // The kernel has such a disk from one process until it is given to another: not tried yet.
    if !specs.ublk.is_empty() || allows_ublk(options) {
        return Some("not together with ublk disks: serve those with another process".to_owned());
    }
    let path = options.read_from.iter().find(|path| !is_lasting(path))?;
    Some(format!(
        "{}: a process that follows could not read this again: with a keeper the configuration has \
         to be a file or a folder",
        path.display()
    ))
}

/// Returns whether a path can be read repeatedly.
fn is_lasting(path: &Path) -> bool {
    path.is_file() || path.is_dir()
}

/// This program, as the same file, also when another one has come to its place.
const PROGRAM: &str = "/proc/self/exe";

fn program(file: &str) -> Command {
    let mut command = Command::new(file);
    command.arg0("vnvme");
    command
}

/// Replaces the program of this process (`execve`) by the keeper. The process number stays, and
/// nothing that was read is needed.
fn become_keeper(sandbox: SandboxMode) -> Result<()> {
    inherited::pass_on();
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

/// Parses arguments (without the program's name): the sandbox, and the serving process's arguments.
pub fn wanted(args: impl Iterator<Item = OsString>) -> Option<(SandboxMode, Vec<OsString>)> {
    let mut args = args;
    if args.next()? != ARGUMENTS[0] {
        return None;
    }
    let mode = args.next()?;
    let mode = match () {
        () if mode == ARGUMENTS[1] => SandboxMode::On,
        () if mode == WITHOUT_SANDBOX => SandboxMode::Off,
        () => return None,
    };
    Some((mode, args.collect()))
}

/// Runs the process that closes all that a keeper has kept.
pub fn last() -> ExitCode {
    let outlived = keeper::outlive(io::stdin());
    outlived.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
}

/// Is the keeper process until it ends.
pub fn run(sandbox: SandboxMode, args: &[OsString]) -> ExitCode {
    match keep(sandbox, args) {
        Ok(End::Code(code)) => ExitCode::from(code),
        Ok(End::Signal(signal)) => {
            // The same end as that of a process without a keeper.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
            ExitCode::FAILURE
        }
        Ok(End::NotDurable) => {
            stderr::say(format_args!(
                "the process that served could not end in order: what its clients wrote and did \
                 not flush may not be durable"
            ));
            ExitCode::from(crate::ending::NOT_DURABLE)
        }
        Err(error) => {
            stderr::say(format_args!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn keep(sandbox: SandboxMode, args: &[OsString]) -> Result<End> {
    let _ = rustix::thread::set_name(c"vnvme-keeper");
    let given = inherit::take_named().into_iter();
    let given = given.map(|(name, fd)| Given { name, fd }).collect();
    // This process is to have no more descriptors than there is room for in a serving one.
    let limit = raised_limit();
    let most = limit.saturating_sub(RESERVE).clamp(RESERVE, MOST) / 2;
    // Owner of the service manager's watchdog: this process or another one.
    let own = std::process::id().to_string();
    let other = std::env::var(WATCHDOG[1]).is_ok_and(|process| process != own);
    let mut programs = Binaries {
        path: std::env::current_exe().ok(),
        present: PROGRAM.into(),
        versions: Versions::own(),
        new: None,
        args,
        sets_watchdog: !other,
        kept_open: None,
    };
    let keeper = Keeper {
        programs: &mut programs,
        most: usize::try_from(most).unwrap_or(usize::MAX),
        given,
        manager: notify::socket().map(Into::into),
    };
    let confine = || match sandbox {
        SandboxMode::On => {
            sandbox::leave_user().map_err(|e| Box::new(e) as Box<dyn Error + Send + Sync>)
        }
        SandboxMode::Off => Ok(()),
    };
    Ok(keeper.run(confine)?)
}

/// The files that serving processes are started from.
struct Binaries<'a> {
    /// Path of this program; another version may be there later.
    path: Option<PathBuf>,
    present: String,
    /// Versions of state that the program reads and writes.
    versions: Versions,
    new: Option<New>,
    args: &'a [OsString],
    /// The service manager's watchdog is the serving process's business.
    sets_watchdog: bool,
    /// The present one, if it is not the keeper's own.
    kept_open: Option<OwnedFd>,
}

/// Another version of this program.
struct New {
    file: OwnedFd,
    versions: Versions,
}

/// Open, so that it stays the same file.
fn opened(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

impl Programs for Binaries<'_> {
    fn start(&mut self, which: Which, channel: OwnedFd) -> io::Result<Child> {
        let file = match (which, &self.new) {
            (Which::New, Some(new)) => opened(&new.file),
            _ => self.present.clone(),
        };
        let mut command = program(&file);
        command
            .args(self.args)
            .env(KEPT, "1")
            .stdin(Stdio::from(channel));
        for name in OWN.iter().chain(&WATCHDOG[1..]) {
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

    fn decide(&mut self, which: Which) {
        // A file that is not the present one any more is closed.
        if let (Which::New, Some(new)) = (which, self.new.take()) {
            self.present = opened(&new.file);
            self.versions = new.versions;
            self.kept_open = Some(new.file);
        }
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

/// Raises the limit of open descriptors to its maximum, and returns the limit.
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
    fn only_its_own_arguments_make_a_keeper() {
        let of = |args: &[&str]| wanted(args.iter().map(OsString::from));
        assert_eq!(
            of(&["keep", "--sandbox=on", "serve", "-s", "x"]),
            Some((
                SandboxMode::On,
                vec!["serve".into(), "-s".into(), "x".into()]
            ))
        );
        assert_eq!(
            of(&["keep", "--sandbox=off"]),
            Some((SandboxMode::Off, vec![]))
        );
        for other in [&["keep"][..], &["serve"], &["keep", "serve"], &[]] {
            assert_eq!(of(other), None, "{other:?}");
        }
    }
}
