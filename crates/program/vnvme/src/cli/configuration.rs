//! `vnvme apply`, `reload` and `save`.

use super::target::DaemonTarget;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use config::files;
use control::api::Plan;
use output::outln;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Options of `vnvme apply`.
#[derive(Args)]
pub struct ApplyArgs {
    /// Configuration file or folder, as for vnvme daemon --config. Relative paths in it are
    /// relative to the working directory of the running process
    #[arg(value_name = "FILE|DIR")]
    file: PathBuf,
    /// Print the changes without making them
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    target: DaemonTarget,
}

impl ApplyArgs {
    /// Applies the configuration file to the running process.
    pub fn run(self) -> Result<()> {
        let config = read(&self.file)?;
        let plan = self.target.client()?.apply(&config, self.dry_run)?;
        tell(&self.target, &plan)
    }
}

/// Reads and validates a configuration file or folder; errors name files and lines.
fn read(path: &Path) -> Result<Map<String, Value>> {
    files::read(path)?;
    let files = files::files(path)?;
    // An empty configuration would remove all disks.
    ensure!(
        !files.is_empty(),
        "{}: the folder has no file *.toml",
        path.display()
    );
    let mut all = toml::Table::new();
    for file in files {
        let name = || file.display().to_string();
        let text = std::fs::read_to_string(&file).with_context(name)?;
        let table: toml::Table = text.parse().with_context(name)?;
        for (key, value) in table {
            match (all.get_mut(&key), value) {
                (Some(toml::Value::Array(known)), toml::Value::Array(more)) => known.extend(more),
                (_, value) => drop(all.insert(key, value)),
            }
        }
    }
    match serde_json::to_value(all)? {
        Value::Object(config) => Ok(config),
        _ => bail!("{}: no table", path.display()),
    }
}

/// Prints the changes that a configuration causes. Returns an error if any of them is refused.
fn tell(target: &DaemonTarget, plan: &Plan) -> Result<()> {
    target.print(plan, |plan| {
        // With a refusal, nothing was changed.
        let is_done = !plan.dry_run && plan.refused.is_empty();
        let would = if is_done { "" } else { "would be " };
        for (what, names) in [
            ("added", &plan.added),
            ("removed", &plan.removed),
            ("changed", &plan.changed),
        ] {
            for name in names {
                outln!("{would}{what}: {name}");
            }
        }
        for refusal in &plan.refused {
            match &*refusal.disk {
                "" => outln!("refused: {}", refusal.reason),
                disk => outln!("refused: {disk}: {}", refusal.reason),
            }
        }
        if plan.is_empty() {
            outln!("nothing to do");
        }
        Ok(())
    })?;
    match plan.refused.len() {
        0 => Ok(()),
        1 => bail!("one change is refused, so nothing was changed"),
        count => bail!("{count} changes are refused, so nothing was changed"),
    }
}

/// Options of `vnvme reload`.
#[derive(Args)]
pub struct ReloadArgs {
    #[command(flatten)]
    target: DaemonTarget,
}

impl ReloadArgs {
    /// Has the running process reread its configuration.
    pub fn run(self) -> Result<()> {
        let plan = self.target.client()?.reload()?;
        tell(&self.target, &plan)
    }
}

/// Options of `vnvme save`.
#[derive(Args)]
pub struct SaveArgs {
    /// Output file [default: standard output]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    target: DaemonTarget,
}

impl SaveArgs {
    /// Writes the disks of the running process as a configuration file.
    pub fn run(self) -> Result<()> {
        let text = self.target.client()?.save()?;
        if let Some(path) = &self.file {
            return std::fs::write(path, text).with_context(|| path.display().to_string());
        }
        self.target.print(&json!({ "config": text }), |_| {
            outln!("{}", text.trim_end());
            Ok(())
        })
    }
}
