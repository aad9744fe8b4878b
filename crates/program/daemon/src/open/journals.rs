//! Folder for the journals of qcow2 images, beside the control socket: `control.journals` for
//! `control`.
//!
//! A journal is a mapped file that is never flushed. It outlives the process, its keeper and a
//! restart of the service, and is found by the next process that opens the image. A process without
//! a control socket has no journals, and neither has one whose folder another user could write: a
//! journal says where the guest's data lies.

use crate::parts::qcow2;
use crate::serve::options::ServeOptions;
use anyhow::{Context, Result, ensure};
use rustix::fs::{Mode, OFlags, fstat, fstatfs, open};
use rustix::process::geteuid;
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use volume::JournalFolder;

/// Identifier of the machine's present boot, as text.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Type of a file system in memory (tmpfs), by `statfs(2)`.
const TMPFS: u64 = 0x0102_1994;

/// Returns the path of the folder for the journals of a process with this control socket.
pub fn folder(control: &Path) -> PathBuf {
    let mut path = control.as_os_str().to_owned();
    path.push(".journals");
    path.into()
}

/// Folder for the journals of a process's images, made when an image is opened first.
pub struct Journals {
    control: Option<PathBuf>,
    made: OnceLock<JournalFolder>,
}

impl Journals {
    /// Returns the folder beside the control socket. A daemon makes it at once, since its sandbox
    /// does not permit that later. The folder of an earlier process is found now for the same
    /// reason: it may have the journal of a disk that is opened later.
    pub fn new(options: &ServeOptions) -> Self {
        let journals = Self {
            control: options.control.clone(),
            made: OnceLock::new(),
        };
        let control = journals.control.as_deref();
        if options.daemon.is_some() || control.is_some_and(|control| folder(control).exists()) {
            journals.made();
        }
        journals
    }

    fn made(&self) -> Option<&JournalFolder> {
        let path = folder(self.control.as_deref()?);
        Some(self.made.get_or_init(|| {
            let boot = make(&path).map_err(|error| format!("{error:#}"));
            let folder = JournalFolder { path, boot };
            // Outside of the sandbox, which hides the images of other disks.
            qcow2::remove_obsolete_journals(&folder);
            folder
        }))
    }

    /// Returns the folder for the journal of an image, by its URL. `None`: the process has no
    /// control socket, or the volume is no image.
    pub fn of(&self, url: &str) -> Option<JournalFolder> {
        if !is_image(url) {
            return None;
        }
        self.made().cloned()
    }
}

/// Returns whether the volume of a URL is a qcow2 image.
fn is_image(url: &str) -> bool {
    let mut options = url.rsplit_once('?').map_or("", |(_, all)| all).split('&');
    url.starts_with("qcow2://") || options.any(|option| option == "format=qcow2")
}

/// Makes the folder if it is missing. Returns the identifier of the boot for its files.
fn make(path: &Path) -> Result<[u8; 16]> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| path.display().to_string());
        }
        _ => {}
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = open(path, flags, Mode::empty());
    let folder = folder.with_context(|| path.display().to_string())?;
    let found = fstat(&folder)?;
    ensure!(
        found.st_uid == geteuid().as_raw() && found.st_mode & 0o022 == 0,
        "{}: another user may write it",
        path.display()
    );
    // A service may be denied the boot's identifier (ProcSubset=pid), and needs none there.
    if fstatfs(&folder)?.f_type as u64 == TMPFS {
        return Ok([0; 16]);
    }
    let text = fs::read_to_string(BOOT_ID).context(BOOT_ID)?;
    boot(&text).context(BOOT_ID)
}

/// Returns the identifier that a text has.
fn boot(text: &str) -> Result<[u8; 16]> {
    let digits: String = text.trim().split('-').collect();
    config::spec::hex("boot-id", &digits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::options::Daemon;
    use std::os::unix::fs::{PermissionsExt, symlink};

    const IMAGE: &str = "qcow2:///disks/vm0.qcow2";

    fn journals(control: Option<&Path>) -> Journals {
        let options = ServeOptions {
            control: control.map(Path::to_owned),
            ..ServeOptions::new(config::spec::ProcessSpec::default(), 1)
        };
        Journals::new(&options)
    }

    #[test]
    fn folder_of_journals_is_made_beside_control_socket() {
        let dir = tempfile::tempdir().unwrap();
        let control = dir.path().join("control.sock");
        let folder = dir.path().join("control.sock.journals");
        for url in ["/disks/vm0.raw", "/disks/qcow2", "mem://1M"] {
            assert_eq!(journals(Some(&control)).of(url), None);
        }
        assert!(!folder.exists(), "nobody needs it");
        let made = journals(Some(&control)).of(IMAGE).unwrap();
        assert_eq!(made.path, folder);
        let mode = fs::metadata(&folder).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let url = "/disks/vm0.qcow2?read-only=off&format=qcow2";
        assert_eq!(journals(Some(&control)).of(url), Some(made));
        assert_eq!(journals(None).of(IMAGE), None);
    }

    /// Inside the sandbox, no folder can be made, and that of an earlier process can be used only
    /// if it was found before.
    #[test]
    fn folder_of_journals_is_ready_before_sandbox() {
        let dir = tempfile::tempdir().unwrap();
        let control = dir.path().join("control");
        let folder = folder(&control);
        let options = ServeOptions {
            control: Some(control.clone()),
            ..ServeOptions::new(config::spec::ProcessSpec::default(), 1)
        };
        // A process whose disks are all known makes it when it opens the first image.
        assert!(Journals::new(&options).made.get().is_none());
        assert!(!folder.exists());
        let daemon = ServeOptions {
            daemon: Some(Daemon::default()),
            ..options.clone()
        };
        assert!(Journals::new(&daemon).made.get().is_some());
        assert!(folder.is_dir());
        let found = Journals::new(&options).made.get().cloned();
        assert_eq!(found.map(|found| found.path), Some(folder));
    }

    /// Files of processes that were killed before they began a journal.
    #[test]
    fn obsolete_journals_are_removed_from_folder_of_earlier_process() {
        let dir = tempfile::tempdir().unwrap();
        let control = dir.path().join("control");
        let folder = folder(&control);
        journals(Some(&control)).of(IMAGE).unwrap();
        fs::write(folder.join("qcow2-fe00-77"), [0; 4096]).unwrap();
        fs::write(folder.join("other"), [0; 4096]).unwrap();
        journals(Some(&control));
        assert_eq!(
            folder.join("qcow2-fe00-77").exists(),
            !cfg!(feature = "qcow2")
        );
        assert!(folder.join("other").exists());
    }

    #[test]
    fn folder_that_others_may_write_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let control = dir.path().join("control");
        let folder = journals(Some(&control)).of(IMAGE).unwrap().path;
        let is_refused = || journals(Some(&control)).of(IMAGE).unwrap().boot.is_err();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(is_refused());
        fs::remove_dir(&folder).unwrap();
        symlink(dir.path(), &folder).unwrap();
        assert!(is_refused(), "a link");
        fs::remove_file(&folder).unwrap();
        fs::write(&folder, "").unwrap();
        assert!(is_refused(), "a file");
    }

    #[test]
    fn boot_is_identified_by_sixteen_bytes() {
        let text = "3d1219c7-c4c5-404a-aa1f-6d2a48adfda4\n";
        assert_eq!(boot(text).unwrap()[..2], [0x3d, 0x12]);
        assert!(boot("3d12").is_err());
    }
}
