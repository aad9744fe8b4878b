//! Places of the records: a memory file that the keeper holds for the next process, and a folder
//! that outlasts the machine's restart.

use super::entry::Record;
use crate::keep::{KeeperSession, RecordsFile};
use crate::manage::replace_file;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const HEAD: &str = "# What the guest of this disk relies on; vnvme writes this file itself.\n";
/// Maximum length in bytes of a disk's name, in its encoded form, as part of a file name.
const MAX_NAME: usize = 160;

/// Records of all disks, by disk name.
pub type All = BTreeMap<String, Record>;

/// Places where the records of disks are stored: a folder, and a memory file that the keeper holds.
#[derive(Debug, Default)]
pub struct Store {
    folder: Option<PathBuf>,
    kept: Option<RecordsFile>,
}

/// Returns the folder for the records of a daemon that has this state file.
fn folder(state: &Path) -> PathBuf {
    state.with_extension("disks")
}

impl Store {
    /// Opens the places, and reads all records. Those that the process before has left with the
    /// keeper count more than those in the folder.
    pub fn open(state: Option<&Path>, keeper: &KeeperSession) -> (Self, All) {
        let folder = state.map(folder);
        let mut all = All::new();
        let mut usable = None;
        if let Some(folder) = folder {
            match read_folder(&folder) {
                Ok(read) => {
                    all = read;
                    usable = Some(folder);
                }
                Err(error) => tracing::error!(
                    "records of disks cannot be kept in {}: {error:#}; a disk may be shown to its \
                     guest with another identity after a restart of the machine",
                    folder.display()
                ),
            }
        }
        let (kept, text) = match RecordsFile::open(keeper) {
            Some((kept, text)) => (Some(kept), text),
            None => (None, None),
        };
        match text.map(|text| read_all(&text)).transpose() {
            Ok(found) => all.extend(found.unwrap_or_default()),
            Err(error) if keeper.is_successor() => {
                tracing::warn!("the records of the disks are damaged, and are made anew: {error:#}")
            }
            Err(_) => {}
        }
        let store = Self {
            folder: usable,
            kept,
        };
        (store, all)
    }

    /// Writes the record of a disk, of all records; `None`: the disk has none any more. An error is
    /// logged: a disk is served without its record, too.
    pub fn write(&self, disk: &str, record: Option<&Record>, all: &All) {
        if let Some(kept) = &self.kept {
            let written = serde_json::to_string(all).context("records");
            let written = written.and_then(|text| kept.write(&text));
            tell_failure(disk, written);
        }
        if let Some(folder) = &self.folder {
            let path = folder.join(file_name(disk));
            let written = match record {
                Some(record) => record
                    .to_text()
                    .and_then(|text| replace_file(&path, &format!("{HEAD}{text}"))),
                None => remove(&path),
            };
            tell_failure(disk, written);
        }
    }
}

fn tell_failure(disk: &str, written: Result<()>) {
    if let Err(error) = written {
        tracing::error!(disk, "the disk's record cannot be written: {error:#}");
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| path.display().to_string())
        }
        _ => Ok(()),
    }
}

fn read_all(text: &str) -> Result<All> {
    let all: All = serde_json::from_str(text).context("not understood")?;
    for record in all.values() {
        // A record in memory is checked as one in a file.
        record.check()?;
    }
    Ok(all)
}

fn read_folder(folder: &Path) -> Result<All> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error).context("it cannot be made");
        }
        _ => {}
    }
    let mut all = All::new();
    for entry in fs::read_dir(folder).context("it cannot be read")? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        match read(&path) {
            Ok(record) => drop(all.insert(record.disk.clone(), record)),
            Err(error) => tracing::warn!(
                "{}: this record of a disk is damaged, and is made anew: {error:#}",
                path.display()
            ),
        }
    }
    Ok(all)
}

fn read(path: &Path) -> Result<Record> {
    ensure!(path.is_file(), "this is no file");
    let record = Record::of_text(&fs::read_to_string(path)?)?;
    let name = file_name(&record.disk);
    let is_its = path.file_name().is_some_and(|file| *file == *name);
    ensure!(is_its, "it is the record of the disk {}", record.disk);
    Ok(record)
}

/// Returns the name of a record's file: the disk's name, with `%XX` for bytes that are unusual in
/// file names.
fn file_name(disk: &str) -> String {
    let mut name = String::new();
    for (at, byte) in disk.bytes().enumerate() {
        match byte {
            b'.' if at == 0 => name += "%2E",
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => name.push(byte.into()),
            _ => name += &format!("%{byte:02X}"),
        }
    }
    if name.len() > MAX_NAME {
        name.truncate(MAX_NAME);
        name += &config::identity::record(disk);
    }
    name + ".toml"
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::choices::IdentityRule;

    fn record(disk: &str) -> Record {
        Record::new(disk, "controller", IdentityRule::Machine)
    }

    #[test]
    fn records_of_any_names_are_found_again_and_damaged_ones_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("added.toml");
        let (store, all) = Store::open(Some(&state), &KeeperSession::default());
        assert!(all.is_empty());
        let long = "n".repeat(255);
        let names = ["a", "/run/vm 0.sock", ".hidden", "Ünï", &long];
        for name in names {
            store.write(name, Some(&record(name)), &All::new());
        }
        let (_, all) = Store::open(Some(&state), &KeeperSession::default());
        assert_eq!(all.len(), names.len());
        assert!(names.iter().all(|name| all.contains_key(*name)));
        let a = folder(&state).join("a.toml");
        fs::write(&a, "version = ").unwrap();
        // A record under the name of another disk.
        fs::copy(
            folder(&state).join("%2Ehidden.toml"),
            folder(&state).join("b.toml"),
        )
        .unwrap();
        let (store, all) = Store::open(Some(&state), &KeeperSession::default());
        assert_eq!(all.len(), names.len() - 1);
        store.write(&long, None, &All::new());
        let (_, all) = Store::open(Some(&state), &KeeperSession::default());
        assert_eq!(all.len(), names.len() - 2);
    }

    #[test]
    fn folder_that_cannot_be_made_is_no_obstacle() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("added.toml");
        fs::write(folder(&state), "").unwrap();
        let (store, all) = Store::open(Some(&state), &KeeperSession::default());
        assert!(all.is_empty());
        store.write("a", Some(&record("a")), &All::new());
    }
}
