//! Record of the served configuration, for the next process. The next process serves the same
//! disks, even if the configuration file has changed meanwhile. Each record is a new numbered
//! memory file, and the highest number counts.
//!
//! A process that a client has taken over may write anything there, and the next process opens
//! everything before it enters its sandbox. The first record is written before there are clients,
//! stays with the keeper unchanged, and defines the process. From a later record only those disks
//! are used that could have been added inside the sandbox.
//!
//! With systemd no record is kept, because a process may replace descriptors that systemd holds.
//! Each process reads its configuration and the file of added disks (`state`).

use super::disk::settled;
use super::session::KeeperSession;
use crate::confine::path_check::check_at_start;
use crate::confine::socket_maker::Grants;
use crate::manage::Allow;
use crate::registry::settings::AllSettings;
use crate::serve::options::ServeOptions;
use anyhow::{Context, Result, ensure};
use config::disk::{DiskSpec, to_file};
use config::options::file::to_table;
use config::origin;
use config::spec::{ProcessSpec, Specs, parse_config};
use keeper::LASTING;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use sync::Unpoisoned;

/// Name of the first configuration record with the keeper, after [`LASTING`].
const FIRST: &str = "served";
/// Prefix of the names of later configuration records; a number follows.
const PREFIX: &str = "vnvme.c";
/// Maximum length in bytes of a configuration record that is read.
const MAX_CONFIGURATION_LEN: u64 = 64 << 20;

/// Record of the served disks and the process options, each in the syntax of a configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Text {
    /// Disks of the configuration, and process options including those of the command line.
    configured: String,
    /// Disks that were added at run time.
    added: String,
    /// Process options of the configuration file, without the command line.
    process: String,
    /// Disks that are unavailable. A record without this key is from a version that served all
    /// disks.
    #[serde(default)]
    unavailable: Unavailable,
    /// Settings of volumes that were changed at run time.
    #[serde(default)]
    settings: AllSettings,
    /// Disk tables of the configuration file (TOML) as it was read last. `None` in the record of an
    /// older version, whose disks are taken as the file describes them.
    #[serde(default)]
    file: Option<String>,
}

/// Disks that are configured and cannot be served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unavailable {
    /// Names of all unavailable disks.
    pub disks: BTreeSet<String>,
    /// Names of the unavailable disks with volumes that no process has opened since they were
    /// configured.
    pub never_opened: BTreeSet<String>,
}

/// Configuration that a process serves, as recorded for the next process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreviousConfiguration {
    /// Disks of the configuration, and process options including those of the command line.
    pub configured: Specs,
    /// Disks that were added at run time.
    pub added: Vec<DiskSpec>,
    /// Process options of the configuration file, without the command line.
    pub process: ProcessSpec,
    /// Disks that the previous process did not serve.
    pub unavailable: Unavailable,
    /// Settings of volumes that were changed at run time.
    pub settings: AllSettings,
    /// Disks of the configuration file as it was read last. A process that reads it again compares
    /// with these, and opens none of them.
    pub file: BTreeMap<String, DiskSpec>,
}

/// Configuration records that the keeper has.
#[derive(Debug, Default)]
pub struct ConfigurationRecord {
    /// Number of the last record.
    last: Mutex<u32>,
    /// Whether a process before this one has recorded its configuration.
    was_noted: bool,
}

impl PreviousConfiguration {
    /// Creates the record; `process` contains the options of the configuration file alone.
    pub fn new<'a>(
        configured: impl Iterator<Item = &'a DiskSpec>,
        with: &ProcessSpec,
        added: Vec<DiskSpec>,
        process: &ProcessSpec,
    ) -> Self {
        let configured = Specs {
            process: with.clone(),
            ..DiskSpec::specs(configured)
        };
        Self {
            configured,
            added,
            process: process.clone(),
            ..Self::default()
        }
    }

    /// Applies the changes of a later record, as far as they can have been made inside the sandbox.
    fn with_changes(self, changed: Self, keeper: &KeeperSession) -> Self {
        let process = self.configured.process.clone();
        let access = process.access.clone();
        let known = [DiskSpec::all(&self.configured), self.added].concat();
        let mut options = ServeOptions::new(process.clone(), 1);
        options.unavailable = changed.unavailable.clone();
        options.answers.clone_from(&keeper.answers);
        let next = DiskSpec::all(&changed.configured);
        let must_serve =
            |name: &str| keeper.is_replacement() && !changed.unavailable.disks.contains(name);
        check_at_start(next.iter().chain(&changed.added), &options, must_serve);
        let grants = Grants::new(&options, &access, &known);
        let allow = Allow::new(&options, &access, grants, &keeper.inherited);
        let is_fine = |disk: &DiskSpec| match allow.check_beside(disk, &known) {
            Ok(()) => true,
            Err(error) => {
                let disk = disk.name();
                tracing::error!(disk, %error, "a disk is given up");
                false
            }
        };
        let mut configured = DiskSpec::all(&changed.configured);
        let mut added = changed.added;
        configured.retain(&is_fine);
        added.retain(&is_fine);
        Self {
            configured: Specs {
                process,
                ..DiskSpec::specs(configured.iter())
            },
            added,
            process: self.process,
            unavailable: changed.unavailable,
            settings: changed.settings,
            file: changed.file,
        }
    }

    fn to_text(&self) -> Result<Text> {
        let process =
            |process: &ProcessSpec| (*process != ProcessSpec::default()).then(|| to_table(process));
        let configured = DiskSpec::all(&self.configured);
        let text = Text {
            configured: to_file(process(&self.configured.process), configured.iter())?,
            added: to_file(None, self.added.iter())?,
            process: to_file(process(&self.process), std::iter::empty())?,
            unavailable: self.unavailable.clone(),
            settings: self.settings.clone(),
            file: Some(to_file(None, self.file.values())?),
        };
        // A record that cannot be read again would keep the next process from serving anything.
        let again = Self::of_text(&text)?;
        ensure!(again == *self, "it would be read as something else");
        Ok(text)
    }

    fn of_text(text: &Text) -> Result<Self> {
        let read = |what: &str, text: &str| {
            let mut specs = parse_config(Path::new(what), text)?;
            origin::forget(&mut specs);
            Ok::<_, anyhow::Error>(specs)
        };
        let configured = read("what was configured", &text.configured)?;
        let before = Self::new(
            DiskSpec::all(&configured).iter(),
            &configured.process,
            DiskSpec::all(&read("what was added", &text.added)?),
            &read("the process", &text.process)?.process,
        );
        let file = match &text.file {
            Some(file) => DiskSpec::by_name(&read("the configuration file", file)?),
            None => DiskSpec::by_name(&before.configured),
        };
        Ok(Self {
            unavailable: text.unavailable.clone(),
            settings: text.settings.clone(),
            file,
            ..before
        })
    }
}

impl KeeperSession {
    /// Returns the recorded configuration of a previous process that has not ended in order.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn previous_configuration(&mut self) -> Result<Option<PreviousConfiguration>> {
        let Some(first) = self.take(&format!("{LASTING}{FIRST}")) else {
            return Ok(None);
        };
        let first = read(first).context("what was configured cannot be read again")?;
        let names = self.names().into_iter();
        let number = |name: &String| name.strip_prefix(PREFIX)?.parse::<u32>().ok();
        let last = names.filter_map(|name| number(&name)).max();
        self.configuration = ConfigurationRecord {
            last: Mutex::new(last.unwrap_or(0)),
            was_noted: true,
        };
        let Some(last) = last else {
            return Ok(Some(first));
        };
        let file = self.take(&format!("{PREFIX}{last}"));
        let changed = file.context("it is not kept").and_then(read);
        match changed {
            Ok(changed) => Ok(Some(first.with_changes(changed, self))),
            Err(error) => {
                let error = format_args!("{error:#}");
                tracing::error!(
                    error,
                    "changes of what is served cannot be read, and are lost"
                );
                Ok(Some(first))
            }
        }
    }

    /// Returns whether a process before this one has recorded its configuration.
    pub(crate) fn was_noted(&self) -> bool {
        self.configuration.was_noted
    }

    /// Records the configuration at the start, which the keeper holds unchanged.
    ///
    /// # Errors
    /// The keeper does not hold the record: the next process would not know which disks to serve.
    pub(crate) fn note_first(&self, now: &PreviousConfiguration) -> Result<()> {
        if self.process_client().is_some() {
            let file = to_file_of_memory(now)?;
            self.store(&format!("{LASTING}{FIRST}"), file.as_fd())?;
        }
        Ok(())
    }

    /// Records the present configuration for the next process.
    ///
    /// # Errors
    /// The next process would not know the last changes.
    pub(crate) fn note(&self, now: &PreviousConfiguration) -> Result<()> {
        let Some(mut keeper_client) = self.process_client() else {
            return Ok(());
        };
        let mut last = self.configuration.last.lock().unpoisoned();
        let file = to_file_of_memory(now)?;
        let next = last.checked_add(1).context("too many changes")?;
        keeper_client.store(&format!("{PREFIX}{next}"), file.as_fd())?;
        settled(&mut keeper_client)?;
        if *last > 0 {
            keeper_client.remove(&format!("{PREFIX}{last}"))?;
        }
        *last = next;
        Ok(())
    }
}

fn read(file: OwnedFd) -> Result<PreviousConfiguration> {
    let file = File::from(file);
    let len = file.metadata()?.len();
    ensure!(len <= MAX_CONFIGURATION_LEN, "it is too long");
    let mut bytes = vec![0; usize::try_from(len)?];
    file.read_exact_at(&mut bytes, 0)?;
    PreviousConfiguration::of_text(&serde_json::from_slice(&bytes)?)
}

fn to_file_of_memory(now: &PreviousConfiguration) -> Result<File> {
    let text = serde_json::to_vec(&now.to_text()?)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("vnvme-served", flags)?);
    file.write_all(&text)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    fcntl_add_seals(&file, seals)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_configuration_reads_back_identically() {
        let text = r#"
            [process]
            workers = 3
            allow = ["/a", "/b"]
            previous-timeout = 7
            [[controller]]
            name = "root"
            socket = "/run/a.sock"
            [[controller.namespace]]
            volume = "mem://1M?iops=1000&nsid=7"
            [[vhost-user-blk]]
            socket = "/run/b.sock"
            volume = "b.raw"
        "#;
        let configured = parse_config(Path::new("f"), text).unwrap();
        let disks = DiskSpec::all(&configured);
        let process = &configured.process;
        let setting = r#"{"root": {"7": {"limits": {"iops": 5}}}}"#;
        let before = PreviousConfiguration {
            settings: serde_json::from_str(setting).unwrap(),
            file: DiskSpec::by_name(&configured),
            ..PreviousConfiguration::new(disks.iter(), process, disks.clone(), process)
        };
        let text = before.to_text().unwrap();
        assert_eq!(PreviousConfiguration::of_text(&text).unwrap(), before);
        let same = before
            .clone()
            .with_changes(before.clone(), &KeeperSession::default());
        assert_eq!(same, before);
        let none = PreviousConfiguration::default();
        assert_eq!(
            PreviousConfiguration::of_text(&none.to_text().unwrap()).unwrap(),
            none
        );
    }

    /// A record as an attacker who has taken the process over would write it.
    #[test]
    fn restart_state_cannot_widen_sandbox() {
        let read = |text: &str| parse_config(Path::new("f"), text).unwrap();
        let of = |text: &str| {
            let configured = read(text);
            let disks = DiskSpec::all(&configured);
            let process = &configured.process;
            PreviousConfiguration::new(disks.iter(), process, Vec::new(), process)
        };
        let disk = |name: &str, socket: &str, volume: &str| {
            format!(
                "[[controller]]\nname = \"{name}\"\nsocket = \"{socket}\"\n\
                 namespace = [{{ volume = \"{volume}\" }}]\n"
            )
        };
        let a = disk("a", "/nowhere/a.sock", "/nowhere/a.raw");
        let first = of(&format!("[process]\nallow = [\"/fine\"]\n{a}"));
        for (changed, left) in [
            (a.clone(), 1),
            (disk("a", "/nowhere/a.sock", "/etc/shadow"), 0),
            (disk("a", "/etc/a.sock", "/nowhere/a.raw"), 0),
            (disk("a", "/nowhere/a.sock", "mem://1M"), 1),
            (disk("b", "/fine/b.sock", "/fine/b.raw"), 1),
            (disk("b", "/fine/b.sock", "nvme://0000:01:00.0"), 0),
            (disk("b", "/fine/b.sock", "nbd://10.0.0.1/a"), 0),
        ] {
            let sandbox = "[process]\nsandbox = \"off\"\nallow = [\"/\"]\n";
            let changed_record = of(&format!("{sandbox}{changed}"));
            let keeper = KeeperSession::default();
            let next = first.clone().with_changes(changed_record, &keeper);
            let process = &first.configured.process;
            assert_eq!(
                (&next.configured.process, &next.process),
                (process, process)
            );
            assert_eq!(DiskSpec::all(&next.configured).len(), left, "{changed}");
        }
    }
}
