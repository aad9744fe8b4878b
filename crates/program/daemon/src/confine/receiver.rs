//! The process that receives clients' descriptors, and the one that starts it, again if need be: in
//! the sandbox this one can start none. Both are this program under another name ([`receive`]).

use crate::confine::Unconfined;
use crate::confine::path_check::{self, PathChecker};
use crate::confine::socket_maker::{Grants, SocketMaker, SocketRights};
use crate::serve::options::ServeOptions;
use config::choices::SandboxMode;
use receive::{Receiver, Spawner, StartError};
use sandbox::{Needs, Sandbox};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const LIBRARIES: &str = "LD_LIBRARY_PATH";

/// Role of a helper process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Process that receives descriptors from untrusted clients.
    Receive(SandboxMode),
    /// Starts receiver processes, and makes sockets.
    Start(SandboxMode, SocketRights),
    /// Opens files of disks, which may hang (`path_check`).
    Check(SandboxMode),
}

const RECEIVE: &str = "receive-descriptors";
const START: &str = "start-receivers";
const CHECK: &str = "check-paths";
const ON: &str = "--sandbox=on";
const OFF: &str = "--sandbox=off";

impl Role {
    /// The only arguments of such a process. They are no commands for people, so they are not among
    /// them.
    fn arguments(&self) -> Vec<OsString> {
        let (command, mode, rights) = match self {
            Role::Receive(mode) => (RECEIVE, mode, Vec::new()),
            Role::Start(mode, rights) => (START, mode, rights.arguments()),
            Role::Check(mode) => (CHECK, mode, Vec::new()),
        };
        let mode = match mode {
            SandboxMode::On => ON,
            SandboxMode::Off => OFF,
        };
        let own = [command, mode].map(OsString::from);
        own.into_iter().chain(rights).collect()
    }

    /// Parses arguments (without the program's name).
    pub fn wanted(mut args: impl Iterator<Item = OsString>) -> Option<Self> {
        let command = args.next()?;
        if ![RECEIVE, START, CHECK]
            .iter()
            .any(|known| command == *known)
        {
            return None;
        }
        let mode = match args.next()?.to_str()? {
            ON => SandboxMode::On,
            OFF => SandboxMode::Off,
            _ => return None,
        };
        if command == START {
            let rights: Vec<OsString> = args.collect();
            return Some(Role::Start(mode, SocketRights::parse(&rights)?));
        }
        let role = if command == CHECK {
            Role::Check(mode)
        } else {
            Role::Receive(mode)
        };
        args.next().is_none().then_some(role)
    }

    /// This program in this role. The same file is meant, also when another one has come to its
    /// place.
    pub fn command(&self) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("vnvme").args(self.arguments()).env_clear();
        // Where the program's libraries are, if that is another place than the system's.
        if let Some(libraries) = std::env::var_os(LIBRARIES) {
            command.env(LIBRARIES, libraries);
        }
        command
    }

    /// Runs the role until the server has ended.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn run(self) -> anyhow::Result<()> {
        let input = std::io::stdin();
        match self {
            Role::Check(_) => {
                let _ = rustix::thread::set_name(c"vnvme-checker");
                path_check::run()
            }
            Role::Receive(mode) => {
                outlive_signals()?;
                let _ = rustix::thread::set_name(c"vnvme-receiver");
                Ok(receive::serve(input.as_fd(), || confine(mode))?)
            }
            Role::Start(mode, rights) => {
                outlive_signals()?;
                let _ = rustix::thread::set_name(c"vnvme-spawner");
                if mode == SandboxMode::On {
                    sandbox::leave_files(&rights.below)?;
                }
                let command = || Role::Receive(mode).command();
                let checks = Arc::default();
                let make = move |number, path: &[u8]| match number {
                    path_check::REQUEST => path_check::carry_out(mode, &checks),
                    number => rights.make(number, path),
                };
                Ok(receive::start_receivers(input.as_fd(), command, make)?)
            }
        }
    }
}

/// Ignores signals that end a server, which come to its whole group or to all its processes: it
/// needs this process until it has ended.
fn outlive_signals() -> std::io::Result<()> {
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    Ok(())
}

/// The receiver process needs nothing but open descriptors, and the number of descriptors that wait
/// in each.
fn confine(mode: SandboxMode) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    if mode == SandboxMode::Off {
        return Ok(());
    }
    let sandbox = Sandbox::new(Needs {
        read_below: vec!["/proc/self/fdinfo".into()],
        ..Needs::default()
    });
    sandbox.enter()?;
    Ok(sandbox.seal()?)
}

/// Starts both. The starter makes the sockets that are granted, and starts checks of paths.
///
/// # Errors
/// [`StartError`].
pub fn start(
    _outside: &Unconfined,
    options: &ServeOptions,
    grants: Grants,
) -> Result<(Receiver, SocketMaker, PathChecker), StartError> {
    let role = Role::Start(options.sandbox, grants.rights().clone());
    let spawner = Arc::new(Spawner::start(role.command())?);
    let receiver = Receiver::start_by(spawner.clone())?;
    let checker = PathChecker::new(spawner.clone(), options.answers.clone());
    Ok((receiver, SocketMaker::new(grants, spawner), checker))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_arguments_select_role() {
        let rights = [OsString::from("--sockets-below=/run")];
        let rights = SocketRights::parse(&rights).unwrap();
        for mode in [SandboxMode::On, SandboxMode::Off] {
            for role in [
                Role::Receive(mode),
                Role::Check(mode),
                Role::Start(mode, SocketRights::default()),
                Role::Start(mode, rights.clone()),
            ] {
                let args = || role.arguments().into_iter();
                assert_eq!(Role::wanted(args().take(1)), None);
                assert_eq!(Role::wanted(args().chain(args())), None);
                assert_eq!(Role::wanted(args()), Some(role));
            }
        }
        assert_eq!(Role::wanted(std::iter::empty()), None);
    }
}
