//! Disks that were added while the process ran, kept in a file (`state` of `[process]`), so that
//! they are there after a restart.

use super::table::Next;
use super::{Manager, Source};
use crate::check::check;
use crate::confine::path_check::PathAnswers;
use crate::keep::{KeeperSession, PreviousConfiguration, Unavailable};
use crate::open::prepare::UnavailableDisk;
use anyhow::{Context, Result, bail, ensure};
use config::disk::{DiskSpec, to_file};
use config::spec::{ProcessSpec, Specs};
use control::Error;
use rustix::fs::OFlags;
use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use sync::Unpoisoned;

const HEAD: &str = "# Disks that were added while vnvme ran; it writes this file itself.\n";

/// Reads the disks that an earlier process has kept. Empty if there is no file.
///
/// # Errors
/// The file cannot be read, or is no state.
pub fn read_state(path: &Path) -> Result<Specs> {
    // A path that cannot be examined may exist.
    let there = path.try_exists();
    if !there.with_context(|| format!("{}", path.display()))? {
        return Ok(Specs::default());
    }
    // To read a FIFO may take forever, and a folder cannot be replaced.
    ensure!(path.is_file(), "{}: this is no file", path.display());
    let specs = config::files::read(path)?;
    ensure!(
        specs.process == ProcessSpec::default(),
        "{}: [process] belongs into the configuration, not among the disks that were added",
        path.display()
    );
    let mut seen = BTreeSet::new();
    for name in names(&specs) {
        let path = path.display();
        ensure!(
            seen.insert(name.clone()),
            "{path}: two disks are called \"{name}\""
        );
    }
    Ok(specs)
}

/// No other process keeps its disks in the same file, as long as this is there.
#[derive(Debug)]
pub struct StateLock {
    _file: File,
}

impl StateLock {
    /// Takes the lock. The locked file stands beside the state, since the state's own file is
    /// replaced by each write.
    ///
    /// # Errors
    /// Another process has the lock; the file cannot be made, and so the state could not be.
    pub fn take(state: &Path) -> Result<Self> {
        let mut name = state
            .file_name()
            .context("state: it names no file")?
            .to_owned();
        name.push(".lock");
        let path = state.with_file_name(name);
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(&path);
        let file = file.with_context(|| {
            let (state, path) = (state.display(), path.display());
            format!("state {state}: what is added cannot be kept there: {path}")
        })?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => bail!(
                "state {}: another vnvme daemon keeps its disks there (it has locked {}): give \
                 each daemon a file of its own",
                state.display(),
                path.display()
            ),
            Err(TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("{}", path.display()))
            }
        }
    }
}

/// Splits kept disks into those that can be served beside the configured ones, and the rest.
pub fn beside(
    configured: &Specs,
    kept: &[DiskSpec],
    control: Option<&Path>,
    answers: &PathAnswers,
) -> (Specs, Vec<UnavailableDisk>) {
    let with = |more: &Specs| {
        let mut all = configured.clone();
        all.extend(more.clone());
        check(&all, control, answers)
    };
    let all = DiskSpec::specs(kept.iter());
    if with(&all).is_ok() {
        return (all, Vec::new());
    }
    let (mut served, mut rest) = (Specs::default(), Vec::new());
    for disk in kept {
        let mut more = served.clone();
        more.extend(DiskSpec::specs(std::iter::once(disk)));
        match with(&more) {
            Ok(()) => served = more,
            Err(error) => rest.push(UnavailableDisk::new(disk.clone(), &error)),
        }
    }
    (served, rest)
}

/// Removes disks from the state that are configured by now under the same name: the configuration
/// takes precedence, for example after `vnvme save`. Returns the remaining state.
pub fn without_configured(path: &Path, mut kept: Specs, configured: &Specs) -> Specs {
    let configured: BTreeSet<String> = names(configured).collect();
    let twice: Vec<String> = names(&kept)
        .filter(|name| configured.contains(name))
        .collect();
    if twice.is_empty() {
        return kept;
    }
    tracing::warn!(
        path = %path.display(),
        disks = twice.join(" "),
        "the configuration has disks of these names, too: it counts, and not what was added"
    );
    let twice: BTreeSet<String> = twice.into_iter().collect();
    kept.retain_disks(|name| !twice.contains(name));
    let disks = DiskSpec::all(&kept);
    // Otherwise a disk that is removed from the configuration later would return.
    tell_failure(path, write_state(path, disks.iter()));
    kept
}

fn names(specs: &Specs) -> impl Iterator<Item = String> {
    DiskSpec::all(specs).into_iter().map(|disk| disk.name())
}

fn write_state<'a>(path: &Path, disks: impl Iterator<Item = &'a DiskSpec>) -> Result<()> {
    let text = to_file(None, disks)?;
    replace(path, &format!("{HEAD}{text}"))
}

fn tell_failure(path: &Path, kept: Result<()>) {
    if let Err(error) = kept {
        tracing::error!(
            path = %path.display(),
            error = format_args!("{error:#}"),
            "what was added will not be there after a restart"
        );
    }
}

/// Puts `text` into the file's place, as a whole or not at all. When it returns, that outlasts a
/// power failure: the name is on the disk, too.
pub fn replace(path: &Path, text: &str) -> Result<()> {
    let mut name = path.file_name().context("it has no name")?.to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let written = || -> std::io::Result<()> {
        // The owner alone reads the disks' places, whatever the umask is. A file that an earlier
        // process left would keep its mode.
        if fs::symlink_metadata(&new).is_ok_and(|left| left.is_file()) {
            fs::remove_file(&new)?;
        }
        let mut file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        File::open(folder)?.sync_all()
    };
    written()
        .inspect_err(|_| {
            // A part of the text would only take room that a full file system needs.
            let _ = fs::remove_file(&new);
        })
        .with_context(|| format!("{}", new.display()))
}

impl Manager {
    /// Records the served disks, as `Manager::record`, after a change that has taken effect: an
    /// error is logged.
    pub fn keep_state(&self) {
        if let Err(error) = self.record() {
            tracing::error!("what is served by now will not be there after a restart: {error}");
        }
    }

    /// Records the served disks, with the changes that are about to take effect, in the state file
    /// and for the next process.
    ///
    /// # Errors
    /// The disks cannot be recorded.
    pub(super) fn record(&self) -> Result<(), Error> {
        // The lock keeps the writes in the order of the changes.
        let recorded = &mut *self.recorded.lock().unpoisoned();
        let table = self.worker_context.table.all();
        let there = table
            .iter()
            .filter_map(|(_, entry)| Some((entry.source, entry.recorded()?)));
        let (configured, added): (Vec<_>, Vec<_>) =
            there.partition(|(source, _)| *source == Source::Config);
        let configured = configured.into_iter().map(|(_, spec)| spec);
        let added: Vec<DiskSpec> = added.into_iter().map(|(_, spec)| spec.clone()).collect();
        if let Some(path) = &self.worker_context.options.state {
            let with_settings: Vec<_> = added.iter().map(|spec| self.with_settings(spec)).collect();
            let written = recorded.write_state(path, &with_settings);
            written.map_err(|error| {
                let path = path.display();
                Error::failed(format!("the state cannot be written: {path}: {error:#}"))
            })?;
        }
        let failed = table.iter().filter_map(|(name, entry)| {
            let failed = entry.failed.as_ref()?;
            Some((name.clone(), failed.was_opened))
        });
        let (mut disks, mut never_opened) = (BTreeSet::new(), BTreeSet::new());
        for (name, was_opened) in failed {
            if !was_opened {
                never_opened.insert(name.clone());
            }
            disks.insert(name);
        }
        let mut settings = self.registry().settings.all();
        settings.retain(|disk, _| {
            let mut there = table.iter();
            there.any(|(name, entry)| name == disk && entry.recorded().is_some())
        });
        let file = self.file.lock().unpoisoned();
        let now = PreviousConfiguration {
            unavailable: Unavailable {
                disks,
                never_opened,
            },
            settings,
            file: file.clone(),
            ..PreviousConfiguration::new(configured, &self.process, added, &self.said)
        };
        drop(file);
        recorded.note(now, self.keeper()).map_err(|error| {
            Error::failed(format!(
                "the keeper does not record the change for the next process: {error:#}"
            ))
        })
    }

    /// Records a change of a disk that is about to take effect.
    ///
    /// # Errors
    /// The change cannot be recorded, and must not take effect.
    pub(super) fn intend(&self, name: &str, next: Next) -> Result<Intent<'_>, Error> {
        self.worker_context.table.set_next(name, Some(next));
        let recorded = self.record();
        let mut intent = Intent {
            manager: self,
            name: name.to_owned(),
            is_open: true,
        };
        match recorded {
            Ok(()) => Ok(intent),
            Err(error) => {
                intent.is_open = false;
                self.worker_context.table.set_next(name, None);
                // A part may have been recorded. The error of the other part is reported already.
                let _ = self.record();
                Err(Error {
                    message: format!("nothing was changed: {}", error.message),
                    ..error
                })
            }
        }
    }
}

/// A recorded change of a disk. If it has no effect, the record is written as before.
pub(super) struct Intent<'a> {
    manager: &'a Manager,
    name: String,
    is_open: bool,
}

impl Intent<'_> {
    /// Records that the change has taken effect, and is in the table of disks.
    pub fn done(mut self) {
        self.is_open = false;
    }
}

impl Drop for Intent<'_> {
    fn drop(&mut self) {
        if self.is_open {
            self.manager.worker_context.table.set_next(&self.name, None);
            self.manager.keep_state();
        }
    }
}

/// Last written records of the served disks. An equal record is not written again.
#[derive(Default)]
pub(super) struct Recorded {
    state: Option<String>,
    noted: Option<PreviousConfiguration>,
}

impl Recorded {
    fn write_state(&mut self, path: &Path, disks: &[DiskSpec]) -> Result<()> {
        let text = format!("{HEAD}{}", to_file(None, disks.iter())?);
        if self.state.as_ref() != Some(&text) {
            self.state = None;
            replace(path, &text)?;
            self.state = Some(text);
        }
        Ok(())
    }

    fn note(&mut self, now: PreviousConfiguration, keeper: &KeeperSession) -> Result<()> {
        if self.noted.as_ref() != Some(&now) {
            self.noted = None;
            keeper.note(&now)?;
            self.noted = Some(now);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_missing_state_file_is_empty_state() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        assert_eq!(read_state(&path("a")).unwrap(), Specs::default());
        fs::write(path("file"), "").unwrap();
        fs::create_dir(path("folder")).unwrap();
        std::os::unix::fs::symlink("loop", path("loop")).unwrap();
        // Paths that cannot be examined. For root, no permission is missing.
        for (name, why) in [
            ("file/state", "Not a directory"),
            ("loop", "symbolic links"),
            ("folder", "no file"),
        ] {
            let error = format!("{:#}", read_state(&path(name)).unwrap_err());
            assert!(error.contains(why) && error.contains(name), "{error}");
        }
    }

    #[test]
    fn state_file_is_replaced_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        replace(&path, "# one\n").unwrap();
        // A file that an earlier process left may be readable by everybody.
        fs::write(dir.path().join("state.new"), "[[contr").unwrap();
        let all = Permissions::from_mode(0o666);
        fs::set_permissions(dir.path().join("state.new"), all).unwrap();
        replace(&path, "# two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "# two\n");
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{mode:o}");
        // A file that was left half written does not matter. A failed write leaves the old file.
        fs::write(dir.path().join("state.new"), "[[contr").unwrap();
        replace(&path, "# three\n").unwrap();
        assert_eq!(read_state(&path).unwrap(), Specs::default());
        fs::create_dir(dir.path().join("state.new")).unwrap();
        assert!(replace(&path, "# four\n").is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "# three\n");
    }
}
