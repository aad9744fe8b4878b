//! Disks that were added while the process ran, kept in a file (`state` of `[process]`), so that
//! they are there after a restart.

use super::{DiskSpec, Manager, Source, to_file};
use crate::spec::{ProcessSpec, Specs};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

const HEAD: &str = "# Disks that were added while vnvme ran; it writes this file itself.\n";

/// Reads what an earlier process has kept. Nothing, where there was none.
///
/// # Errors
/// The file cannot be read, or is no state.
pub fn read_state(path: &Path) -> Result<Specs> {
    if !path.exists() {
        return Ok(Specs::default());
    }
    let specs = crate::config::read(path)?;
    ensure!(
        specs.process == ProcessSpec::default(),
        "{}: [process] belongs into the configuration, not among the disks that were added",
        path.display()
    );
    Ok(specs)
}

/// Puts `text` into the file's place, as a whole or not at all.
fn replace(path: &Path, text: &str) -> Result<()> {
    let mut name = path.file_name().context("it has no name")?.to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let written = || -> std::io::Result<()> {
        let mut file = File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    written().with_context(|| format!("{}", new.display()))
}

impl Manager {
    /// Writes down what was added while the process ran.
    pub(super) fn keep_state(&self) {
        let Some(path) = &self.crew.options.state else {
            return;
        };
        // In the order of what happens.
        let _writing = self.crew.table.writing();
        let table = self.crew.table.all();
        let added = table.iter().filter(|(_, entry)| {
            entry.source == Source::Runtime && (entry.running.is_some() || entry.busy.is_none())
        });
        let disks: Vec<&DiskSpec> = added.map(|(_, entry)| &entry.spec).collect();
        let kept = to_file(None, disks.into_iter())
            .and_then(|text| replace(path, &format!("{HEAD}{text}")));
        if let Err(error) = kept {
            tracing::error!(
                path = %path.display(),
                error = format_args!("{error:#}"),
                "what was added will not be there after a restart"
            );
        }
    }
}
