//! Shell completion, including names of disks of the running process.

use anyhow::{Context, Result, anyhow};
use clap::{Args, ValueEnum};
use clap_complete::engine::CompletionCandidate;
use clap_complete::env::Shells;
use control::Client;
use daemon::api::client_paths;
use std::ffi::OsStr;
use std::io::Write;

/// Environment variable by which the shell asks this program for completions.
pub const VARIABLE: &str = "COMPLETE";

/// Shells with a completion script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Shell {
    /// In ~/.bashrc: source <(vnvme completion bash)
    Bash,
    /// In ~/.zshrc: source <(vnvme completion zsh)
    Zsh,
    /// In ~/.config/fish/completions/vnvme.fish
    Fish,
}

/// Options of `vnvme completion`.
#[derive(Args)]
pub struct CompletionArgs {
    /// Shell to complete for
    #[arg(value_enum)]
    shell: Shell,
}

impl CompletionArgs {
    /// Prints the completion script, which asks this program for candidates.
    pub fn run(self) -> Result<()> {
        let name = self.shell.to_possible_value();
        let name = name.as_ref().map_or("", |value| value.get_name());
        let shell = Shells::builtins();
        let shell = shell.completer(name).context("an unknown shell")?;
        let mut script = Vec::new();
        shell
            .write_registration(VARIABLE, "vnvme", "vnvme", "vnvme", &mut script)
            .map_err(|error| anyhow!(error))?;
        std::io::stdout().write_all(&script)?;
        Ok(())
    }
}

/// Returns the names of running disks that begin with `begin`; empty when no process answers.
pub fn disk_names(begin: &OsStr) -> Vec<CompletionCandidate> {
    let begin = begin.to_string_lossy();
    let disks = Client::new(client_paths(None)).and_then(|client| client.disks());
    let disks = disks.unwrap_or_default().into_iter();
    let disks = disks.filter(|disk| disk.name.starts_with(&*begin));
    disks
        .map(|disk| CompletionCandidate::new(disk.name).help(Some(disk.kind.name().into())))
        .collect()
}
