//! The process that receives clients' descriptors, and the one that starts it, again if need be: in
//! the sandbox this one can start none. Both are this program under another name ([`receive`]).

use crate::confine::SandboxMode;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Process that receives descriptors from untrusted clients.
    Receive(SandboxMode),
    /// Starts receiver processes.
    Start(SandboxMode),
}

impl Role {
    const ALL: [Role; 4] = [
        Role::Receive(SandboxMode::On),
        Role::Receive(SandboxMode::Off),
        Role::Start(SandboxMode::On),
        Role::Start(SandboxMode::Off),
    ];

    /// The only arguments of such a process. They are no commands for people, so they are not among
    /// them.
    fn arguments(self) -> [&'static str; 2] {
        let (command, mode) = match self {
            Role::Receive(mode) => ("receive-descriptors", mode),
            Role::Start(mode) => ("start-receivers", mode),
        };
        match mode {
            SandboxMode::On => [command, "--sandbox=on"],
            SandboxMode::Off => [command, "--sandbox=off"],
        }
    }

    /// Parses arguments (without the program's name).
    pub fn wanted(args: impl Iterator<Item = OsString>) -> Option<Self> {
        // There may be many.
        let args: Vec<OsString> = args.take(3).collect();
        Self::ALL.into_iter().find(|role| args == role.arguments())
    }

    /// This program in this role. The same file is meant, also when another one has come to its
    /// place.
    fn command(self) -> Command {
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
        // Signals that end a server come to its whole group, or to all its processes: it needs
        // these until it has ended.
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
        }
        let input = std::io::stdin();
        match self {
            Role::Receive(mode) => {
                let _ = rustix::thread::set_name(c"vnvme-receiver");
                Ok(receive::serve(input.as_fd(), || confine(mode))?)
            }
            Role::Start(mode) => {
                let _ = rustix::thread::set_name(c"vnvme-spawner");
                if mode == SandboxMode::On {
                    sandbox::leave_files()?;
                }
                let command = || Role::Receive(mode).command();
                Ok(receive::start_receivers(input.as_fd(), command)?)
            }
        }
    }
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

/// Starts both.
///
/// # Errors
/// [`StartError`].
pub fn start(mode: SandboxMode) -> Result<Receiver, StartError> {
    Receiver::start_by(Spawner::start(Role::Start(mode).command())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_arguments_select_role() {
        for role in Role::ALL {
            let args = || role.arguments().into_iter().map(OsString::from);
            assert_eq!(Role::wanted(args()), Some(role));
            assert_eq!(Role::wanted(args().take(1)), None);
            assert_eq!(Role::wanted(args().chain(args())), None);
        }
        assert_eq!(Role::wanted(std::iter::empty()), None);
    }
}
