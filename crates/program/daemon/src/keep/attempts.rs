//! Records of disks under recovery, in a memory file that the keeper holds. If the process dies
//! during a recovery, the next process knows which disk it was. After [`MAX_DEATHS`] deaths in a
//! row the disk is left out, and all other disks are served.
//!
//! A process that a client has taken over may write anything into the file. The worst effect is
//! that other disks are served a little later.

use super::session::KeeperSession;
use anyhow::{Context, Result, ensure};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sync::Unpoisoned;

/// Name under which the keeper keeps the memory file of recovery attempts.
const NAME: &str = "vnvme.attempts";
/// Maximum length in bytes of the memory file's content that is read.
const MAX_LEN: usize = 1 << 20;
/// Number of processes that die in a row while they recover a disk before the disk is left out. A
/// single death may be a coincidence.
const MAX_DEATHS: u32 = 2;
/// Until a disk that was left out is tried again, which may end the process: as many seconds as two
/// to the power of its deaths, at most this.
const MAX_PAUSE: Duration = Duration::from_secs(600);

/// Record of disks whose recovery has ended processes, kept in a memory file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct AttemptRecord {
    under_way: BTreeSet<String>,
    /// Processes in a row that died while they recovered a disk.
    deaths: BTreeMap<String, u32>,
}

/// Attempts to recover disks, noted in the memory file.
#[derive(Debug)]
pub struct Attempts {
    file: File,
    noted: AttemptRecord,
}

impl AttemptRecord {
    /// Counts a death for each disk that the process was recovering when it died.
    fn after_death(mut self) -> Self {
        for disk in std::mem::take(&mut self.under_way) {
            let deaths = self.deaths.entry(disk).or_default();
            *deaths = deaths.saturating_add(1);
        }
        self
    }
}

impl Attempts {
    fn open(keeper: &KeeperSession) -> Result<Self> {
        let Some(file) = keeper.take(NAME) else {
            let file = File::from(memfd_create("vnvme-attempts", MemfdFlags::CLOEXEC)?);
            keeper.store(NAME, file.as_fd())?;
            let noted = AttemptRecord::default();
            return Ok(Self { file, noted });
        };
        let file = File::from(file);
        // Another version may do better.
        let noted = if keeper.is_replacement() {
            AttemptRecord::default()
        } else {
            read(&file).unwrap_or_default().after_death()
        };
        let attempts = Self { file, noted };
        attempts.write();
        Ok(attempts)
    }

    fn write(&self) {
        let written = || -> Result<()> {
            let text = serde_json::to_vec(&self.noted)?;
            let len = u32::try_from(text.len())?.to_le_bytes();
            // A single write call: after a kill, the content is the old one, the new one, or
            // unreadable. Unreadable content counts as no record.
            self.file.write_all_at(&[&len[..], &text].concat(), 0)?;
            Ok(())
        };
        if let Err(error) = written() {
            let error = format_args!("{error:#}");
            tracing::warn!(error, "disks that are being recovered are not noted");
        }
    }
}

fn read(file: &File) -> Result<AttemptRecord> {
    let mut len = [0; 4];
    file.read_exact_at(&mut len, 0)?;
    let len = u32::from_le_bytes(len) as usize;
    ensure!(len <= MAX_LEN, "too long");
    let mut text = vec![0; len];
    file.read_exact_at(&mut text, 4)?;
    serde_json::from_slice(&text).context("not understood")
}

impl KeeperSession {
    /// Begins to note which disks are being recovered, and finds out which ones were when the
    /// process before died.
    pub(super) fn begin_attempts(&mut self) {
        if self.process_client().is_none() {
            return;
        }
        match Attempts::open(self) {
            Ok(attempts) => self.attempts = Some(Mutex::new(attempts)),
            Err(error) => {
                let error = format_args!("{error:#}");
                tracing::warn!(error, "disks that are being recovered are not noted");
            }
        }
    }

    /// Returns the reason to leave a disk out at the start of this process, if earlier processes
    /// died while they recovered it.
    pub(crate) fn deaths_of(&self, disk: &str) -> Option<String> {
        let deaths = self.deaths(disk);
        (deaths >= MAX_DEATHS).then(|| {
            format!(
                "{deaths} processes in a row have died while they recovered this disk; it is tried \
                 again in {} s",
                pause(deaths).as_secs()
            )
        })
    }

    /// Returns the time after the start until a disk is tried again that was left out for that
    /// reason.
    pub(crate) fn pause_after_deaths(&self, disk: &str) -> Option<Duration> {
        let deaths = self.deaths(disk);
        (deaths >= MAX_DEATHS).then(|| pause(deaths))
    }

    fn deaths(&self, disk: &str) -> u32 {
        let attempts = self.attempts.as_ref();
        let attempts = attempts.map(|attempts| attempts.lock().unpoisoned());
        let deaths = attempts.and_then(|attempts| attempts.noted.deaths.get(disk).copied());
        deaths.unwrap_or(0)
    }

    fn note_attempt(&self, change: impl FnOnce(&mut AttemptRecord)) {
        if let Some(attempts) = &self.attempts {
            let attempts = &mut *attempts.lock().unpoisoned();
            change(&mut attempts.noted);
            attempts.write();
        }
    }
}

fn pause(deaths: u32) -> Duration {
    MAX_PAUSE.min(Duration::from_secs(1 << deaths.min(16)))
}

/// A disk that is being recovered, until this is dropped: not by a panic, which the process may die
/// of.
#[must_use = "the attempt ends with it"]
pub struct Attempt {
    keeper: Arc<KeeperSession>,
    disk: String,
    /// Whether the end of this attempt clears the count of earlier deaths.
    is_whole: bool,
}

impl Attempt {
    /// Records that the recovery of this disk is in progress.
    pub fn new(keeper: &Arc<KeeperSession>, disk: &str) -> Self {
        keeper.note_attempt(|noted| {
            noted.under_way.insert(disk.to_owned());
        });
        Self {
            keeper: keeper.clone(),
            disk: disk.to_owned(),
            is_whole: true,
        }
    }

    /// Notes that a part of the disk's recovery is under way: its end does not make up for deaths.
    pub fn part(keeper: &Arc<KeeperSession>, disk: &str) -> Self {
        let mut part = Self::new(keeper, disk);
        part.is_whole = false;
        part
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.keeper.note_attempt(|noted| {
            noted.under_way.remove(&self.disk);
            if self.is_whole {
                noted.deaths.remove(&self.disk);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempts(noted: AttemptRecord) -> Attempts {
        let file = File::from(memfd_create("attempts", MemfdFlags::CLOEXEC).unwrap());
        Attempts { file, noted }
    }

    #[test]
    fn attempt_ending_with_process_counts_as_death() {
        let mut attempts = attempts(AttemptRecord::default());
        for deaths in 1..4 {
            attempts.noted.under_way.insert("a".to_owned());
            attempts.write();
            attempts.noted = read(&attempts.file).unwrap().after_death();
            assert_eq!(attempts.noted.deaths["a"], deaths);
            assert!(attempts.noted.under_way.is_empty());
        }
        // Nonsense is as good as nothing.
        for nonsense in [&[0xff; 8][..], b"\x02\0\0\0[}", b""] {
            attempts.file.set_len(0).unwrap();
            attempts.file.write_all_at(nonsense, 0).unwrap();
            assert!(read(&attempts.file).is_err());
        }
        assert_eq!(pause(2), Duration::from_secs(4));
        assert_eq!(pause(u32::MAX), MAX_PAUSE);
    }

    #[test]
    fn whole_recovery_alone_forgives_deaths() {
        let mut noted = AttemptRecord::default();
        noted.deaths.insert("a".to_owned(), MAX_DEATHS);
        let mut keeper = KeeperSession::default();
        keeper.attempts = Some(Mutex::new(attempts(noted)));
        let keeper = Arc::new(keeper);
        let is_under_way = || {
            let attempts = keeper.attempts.as_ref().unwrap().lock().unwrap();
            read(&attempts.file).unwrap().under_way.contains("a")
        };
        drop(Attempt::part(&keeper, "a"));
        assert!(!is_under_way());
        assert!(keeper.deaths_of("a").is_some(), "a part forgives nothing");
        let attempt = Attempt::new(&keeper, "a");
        let bug = std::thread::spawn(move || {
            let _attempt = attempt;
            panic!("as a bug does");
        });
        assert!(
            bug.join().is_err() && is_under_way(),
            "the panic is a death"
        );
        drop(Attempt::new(&keeper, "a"));
        assert!(!is_under_way() && keeper.deaths_of("a").is_none());
    }
}
