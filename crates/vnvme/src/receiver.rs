//! The process that receives clients' descriptors: this program under another name ([`receive`]).

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The only argument of such a process. Not a command for people, so it is not among them.
const ARGUMENT: &str = "receive-descriptors";

/// Starts this program as such a process. The same file is meant, also when another one has come to
/// its place.
pub fn command() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("vnvme").arg(ARGUMENT).env_clear();
    command
}

/// Whether these arguments (without the program's name) ask for it.
pub fn wanted(mut args: impl Iterator<Item = OsString>) -> bool {
    args.next().is_some_and(|arg| arg == ARGUMENT) && args.next().is_none()
}

/// Receives until the server has gone.
///
/// # Errors
/// A sentence for the user.
pub fn run() -> anyhow::Result<()> {
    // Signals that end a server come to its whole group, or to all its processes: it needs this one
    // until it has ended.
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    let _ = rustix::thread::set_name(c"vnvme-receiver");
    Ok(receive::serve(std::io::stdin().as_fd())?)
}
