//! Completion in the shell, which knows the disks of the running process.

use crate::api::client_paths;
use anyhow::{Context, Result, anyhow};
use clap::{Args, ValueEnum};
use clap_complete::engine::CompletionCandidate;
use clap_complete::env::Shells;
use control::Client;
use std::ffi::OsStr;
use std::io::Write;

/// The variable by which the shell asks this program.
pub const VARIABLE: &str = "COMPLETE";

/// Shells that there is a script for.
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
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

impl CompletionArgs {
    /// Prints the script that the shell reads. It asks this program for what may follow.
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

/// Names of disks that begin like this. None, where no process answers: there is nobody to tell it.
pub fn disk_names(begin: &OsStr) -> Vec<CompletionCandidate> {
    let begin = begin.to_string_lossy();
    let disks = Client::new(client_paths(None)).and_then(|client| client.disks());
    let disks = disks.unwrap_or_default().into_iter();
    let disks = disks.filter(|disk| disk.name.starts_with(&*begin));
    disks
        .map(|disk| CompletionCandidate::new(disk.name).help(Some(disk.kind.name().into())))
        .collect()
}
