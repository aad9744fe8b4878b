//! Removal of journals that no image needs: of images that were deleted or replaced, that another
//! program has written since, or that were closed in order by a process with another folder.
//!
//! A journal is removed only while its file is locked, so no process uses it, and only where its
//! entries are certain to be useless. Whatever cannot be examined is kept: a journal of a mounted
//! network file system is, since a call on it may never return, and so is one of a block device.

use crate::format::{HEADER_ROOM, Header};
use crate::journal::{FileId, Journal, JournalError};
use rustix::fs::{OFlags, makedev};
use rustix::time::{ClockId, clock_gettime};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirEntryExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;
use volume::JournalFolder;

/// Time for which an image must have been missing before its journal with entries is removed: the
/// image may have been moved to another folder, and keeps its journal there.
const MISSING_TIME: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Types of file systems on disks of this machine or in its memory, on which calls return.
const LOCAL: [&str; 9] = [
    "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs",
];

/// Removes the journals of a folder that no image needs. Journals in use by any process are left
/// alone. Opens only images on file systems of this machine, each for one read.
pub fn remove_obsolete_journals(folder: &JournalFolder) {
    let Ok(mounts) = fs::read_to_string("/proc/self/mountinfo") else {
        return;
    };
    let now = clock_gettime(ClockId::Boottime).tv_sec;
    // 0 stands for an image that was not missed.
    remove(folder, &local_devices(&mounts), now.unsigned_abs().max(1));
}

/// Removes obsolete journals. `local`: numbers of the devices whose file systems do not hang.
/// `now`: time since the host's boot, in seconds.
fn remove(folder: &JournalFolder, local: &HashSet<u64>, now: u64) {
    let Ok(files) = fs::read_dir(&folder.path) else {
        return;
    };
    for id in files.flatten().filter_map(|file| id_of(&file)) {
        let journal = match Journal::look(folder, id) {
            Ok(Some(journal)) => journal,
            Ok(None) => continue,
            Err(error) => {
                let path = Journal::path(folder, id);
                tracing::debug!("{}: cannot be examined: {error}", path.display());
                continue;
            }
        };
        if !is_needed(&journal, id, local, now) {
            let path = Journal::path(folder, id);
            tracing::info!("{}: removed, no image needs this journal", path.display());
            journal.remove();
        }
    }
}

/// Returns the identity of the image whose journal has this name ([`Journal::path`]).
fn id_of(file: &fs::DirEntry) -> Option<FileId> {
    let name = file.file_name();
    let (device, inode) = name.to_str()?.strip_prefix("qcow2-")?.split_once('-')?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    Some((number(device)?, number(inode)?))
}

/// Returns the device numbers of the local file systems in a text of `/proc/PID/mountinfo`.
fn local_devices(mounts: &str) -> HashSet<u64> {
    let device = |line: &str| {
        // Identifier, parent, device, root, mount point, options, optional fields, "-", type.
        let (mount, file_system) = line.split_once(" - ")?;
        let kind = file_system.split(' ').next()?;
        let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
        let device = makedev(major.parse().ok()?, minor.parse().ok()?);
        LOCAL.contains(&kind).then_some(device)
    };
    mounts.lines().filter_map(device).collect()
}

/// Returns whether an image may need this journal.
fn is_needed(journal: &Journal, id: FileId, local: &HashSet<u64>, now: u64) -> bool {
    let recorded = match journal.recorded() {
        Ok(Some(recorded)) => recorded,
        // A process was killed before it began the journal, or before the host was booted.
        Ok(None) | Err(JournalError::Boot) => return false,
        // The journal may be of a later version.
        Err(_) => return true,
    };
    let Some(path) = journal.image_path() else {
        return true;
    };
    match find(&path, id, local) {
        Ok(Some(header)) => {
            journal.found();
            header.is_dirty() && header.journal() == recorded.number
        }
        Ok(None) => {
            let missing = now.saturating_sub(journal.missed(now));
            missing < MISSING_TIME.as_secs()
        }
        Err(_) => true,
    }
}

/// Returns the header of an image; `None` if its file system is mounted, and its file is neither at
/// this path nor elsewhere in the same folder.
///
/// # Errors
/// The image cannot be examined, and may be there.
fn find(path: &Path, id: FileId, local: &HashSet<u64>) -> io::Result<Option<Header>> {
    if !local.contains(&id.0) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let id_of = |metadata: &fs::Metadata| (metadata.dev(), metadata.ino());
    let found = match fs::symlink_metadata(path) {
        Ok(metadata) => id_of(&metadata) == id,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(error),
    };
    if !found {
        let folder = path.parent().ok_or(io::ErrorKind::NotFound)?;
        if fs::metadata(folder)?.dev() != id.0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        for file in fs::read_dir(folder)? {
            if file?.ino() == id.1 {
                return Err(io::ErrorKind::InvalidFilename.into());
            }
        }
        return Ok(None);
    }
    let flags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if id_of(&file.metadata()?) != id {
        return Err(io::ErrorKind::NotFound.into());
    }
    let mut bytes = Vec::new();
    file.take(HEADER_ROOM as u64).read_to_end(&mut bytes)?;
    Header::parse(&bytes).map(Some).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::L2Entry;
    use crate::journal::SLOTS;
    use crate::testing::EmptyImage;
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;

    const WEEK: u64 = MISSING_TIME.as_secs();

    /// An image that was not closed cleanly, and a folder with its journal.
    struct Case {
        directory: tempfile::TempDir,
        path: PathBuf,
        id: FileId,
        folder: JournalFolder,
        local: HashSet<u64>,
    }

    impl Case {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let root = directory.path().canonicalize().unwrap();
            let (disks, path) = (root.join("disks"), root.join("disks/vm0"));
            fs::create_dir(&disks).unwrap();
            fs::create_dir(root.join("journals")).unwrap();
            EmptyImage::default().image(&path);
            let file = fs::metadata(&path).unwrap();
            let id = (file.dev(), file.ino());
            let case = Self {
                directory,
                id,
                folder: JournalFolder {
                    path: root.join("journals"),
                    boot: Ok([1; 16]),
                },
                local: HashSet::from([id.0]),
                path,
            };
            let journal = case.open();
            journal.begin();
            journal.record(0, 0x40010, L2Entry::data(0x60000));
            case.set_header(1, journal.number());
            case
        }

        fn open(&self) -> Journal {
            Journal::open(&self.folder, self.id, self.path.clone(), SLOTS).unwrap()
        }

        fn set_header(&self, dirty: u64, number: u32) {
            let features = [dirty, 0, Header::autoclear_of(number)];
            let bytes: Vec<u8> = features.into_iter().flat_map(u64::to_be_bytes).collect();
            let file = File::options().write(true).open(&self.path).unwrap();
            file.write_all_at(&bytes, 72).unwrap();
        }

        /// Returns whether the journal is there after a removal of obsolete ones at this time.
        fn stays(&self, now: u64) -> bool {
            remove(&self.folder, &self.local, now);
            Journal::path(&self.folder, self.id).exists()
        }
    }

    #[test]
    fn journal_that_image_needs_stays() {
        let case = Case::new();
        assert!(case.stays(1));
        assert!(case.stays(1 + 2 * WEEK));
        assert_eq!(case.open().recorded().unwrap().unwrap().entries.len(), 1);
    }

    #[test]
    fn journal_of_image_with_other_number_is_removed() {
        let case = Case::new();
        let number = case.open().recorded().unwrap().unwrap().number;
        case.set_header(1, number ^ 1);
        assert!(!case.stays(1));
    }

    /// Another program has repaired the image, or a process with another folder has closed it.
    #[test]
    fn journal_of_clean_image_is_removed() {
        let case = Case::new();
        let number = case.open().recorded().unwrap().unwrap().number;
        case.set_header(0, number);
        assert!(!case.stays(1));
    }

    #[test]
    fn journal_in_use_stays() {
        let case = Case::new();
        case.set_header(0, 0);
        let journal = case.open();
        assert!(case.stays(1));
        drop(journal);
        assert!(!case.stays(1));
    }

    #[test]
    fn journal_of_missing_image_is_removed_after_week() {
        let case = Case::new();
        fs::remove_file(&case.path).unwrap();
        assert!(case.stays(5));
        assert!(case.stays(4 + WEEK));
        assert!(!case.stays(5 + WEEK));
        // The image is replaced by another one.
        let case = Case::new();
        let other = case.path.with_extension("new");
        EmptyImage::default().image(&other);
        fs::rename(&other, &case.path).unwrap();
        assert!(case.stays(5));
        assert!(!case.stays(5 + WEEK));
    }

    #[test]
    fn journal_of_image_that_has_returned_stays() {
        let case = Case::new();
        let elsewhere = case.directory.path().join("elsewhere");
        fs::rename(&case.path, &elsewhere).unwrap();
        assert!(case.stays(5));
        fs::rename(&elsewhere, &case.path).unwrap();
        assert!(case.stays(5 + WEEK));
        // The image is missed from now on.
        fs::rename(&case.path, &elsewhere).unwrap();
        assert!(case.stays(6 + WEEK));
        assert!(case.stays(5 + 2 * WEEK));
    }

    #[test]
    fn journal_of_renamed_image_stays() {
        let case = Case::new();
        fs::rename(&case.path, case.path.with_extension("old")).unwrap();
        assert!(case.stays(5));
        assert!(case.stays(5 + WEEK));
    }

    /// The image's file system is not mounted, is one that may hang, or its folder cannot be found.
    #[test]
    fn journal_of_image_that_cannot_be_examined_stays() {
        let case = Case::new();
        fs::remove_file(&case.path).unwrap();
        let unmounted = Case {
            local: HashSet::new(),
            ..case
        };
        assert!(unmounted.stays(5));
        assert!(unmounted.stays(5 + WEEK));
        let case = Case::new();
        fs::remove_dir_all(case.path.parent().unwrap()).unwrap();
        assert!(case.stays(5));
        assert!(case.stays(5 + WEEK));
        // No image any more, or a damaged one.
        let case = Case::new();
        let file = File::options().write(true).open(&case.path).unwrap();
        file.write_all_at(&[0; 4], 0).unwrap();
        assert!(case.stays(5));
        assert!(case.stays(5 + WEEK));
    }

    #[test]
    fn journal_that_never_began_or_of_earlier_boot_is_removed() {
        let mut case = Case::new();
        case.folder.boot = Ok([2; 16]);
        assert!(!case.stays(1));
        drop(case.open());
        assert!(!case.stays(1));
    }

    #[test]
    fn damaged_or_foreign_files_stay() {
        let case = Case::new();
        let journal = Journal::path(&case.folder, case.id);
        fs::remove_file(&case.path).unwrap();
        let others = ["qcow2-1", "qcow2-x-y", "other", "qcow2-7-8"];
        for name in others {
            fs::copy(&journal, case.folder.path.join(name)).unwrap();
        }
        // A byte of a slot's entry.
        let file = File::options().write(true).open(&journal).unwrap();
        file.write_all_at(&[0x55], 128 + 8).unwrap();
        assert!(case.stays(5));
        assert!(case.stays(5 + WEEK));
        for name in others {
            assert!(case.folder.path.join(name).exists(), "{name}");
        }
    }

    #[test]
    fn local_file_systems_are_recognised() {
        let mounts = "22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n\
                      23 22 0:40 / /srv rw shared:2 master:1 - nfs4 host:/srv rw\n\
                      24 22 0:41 / /run rw - tmpfs tmpfs rw\n\
                      no mount\n";
        let expected = [makedev(254, 1), makedev(0, 41)];
        assert_eq!(local_devices(mounts), HashSet::from(expected));
    }
}
