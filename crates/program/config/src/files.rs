//! The configuration: a file, or a folder of fragments (`*.toml`, in the order of their names).
//!
//! Errors name the file, the line, and the disk that they concern.

use crate::spec::{Specs, parse_config};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Reads a file, or all fragments of a folder.
///
/// # Errors
/// It cannot be read, or is no configuration.
pub fn read(path: &Path) -> Result<Specs> {
    let mut specs = Specs::default();
    let mut process: Option<PathBuf> = None;
    for file in files(path)? {
        let mut one = read_file(&file)?;
        let own = std::mem::take(&mut one.process);
        specs.extend(one);
        if own == Default::default() {
            continue;
        }
        if let Some(before) = &process {
            bail!(
                "{}: [process] is already in {}; only one fragment may have it",
                file.display(),
                before.display()
            );
        }
        specs.process = own;
        process = Some(file);
    }
    Ok(specs)
}

/// Returns the files of a configuration: the file itself, or the fragments of a folder.
///
/// # Errors
/// The folder cannot be read, or a fragment is no file.
pub fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if path.is_dir() {
        fragments(path)
    } else {
        Ok(vec![path.to_owned()])
    }
}

/// The fragments of a folder. Hidden files are none: editors leave such.
fn fragments(folder: &Path) -> Result<Vec<PathBuf>> {
    let name = || folder.display().to_string();
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(name)? {
        let path = entry.with_context(name)?.path();
        let hidden = path.file_name().is_none_or(|name| {
            let name = name.as_encoded_bytes();
            name.starts_with(b".")
        });
        if !hidden
            && path
                .extension()
                .is_some_and(|extension| extension == "toml")
        {
            // To read a FIFO may take forever.
            ensure!(path.is_file(), "{}: not a regular file", path.display());
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn read_file(path: &Path) -> Result<Specs> {
    let shown = path.display();
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => bail!(
            "{shown}: no such configuration file; name one that exists, or write it (the manual \
             page vnvme.toml(5) lists its keys)"
        ),
        read => read.with_context(|| format!("{shown}"))?,
    };
    parse_config(path, &text)
}
