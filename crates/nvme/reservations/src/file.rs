//! File that keeps a namespace's reservations across a restart of the process, and with PTPL across
//! a power cut.
//!
//! The file has two slots of [`SLOT`] bytes, which are written alternately; each write is made
//! durable before it counts. One of them is therefore complete at any moment, and the newer
//! complete one is the state. Saving opens, creates or renames nothing, so the sandbox needs no
//! path. Only the first process creates the file: under another name, made durable, and then
//! renamed.
//!
//! The file belongs to the process that has locked it. Writes begun by a killed process hold its
//! lock, so they are finished when the next process gets it.

use crate::image::{
    Image, ImageError, MAX_EXECUTED, MAX_IMAGE_LEN, MAX_NOTICES, StoredReservations,
};
use crate::state::Reservations;
use rustix::fs::{CWD, OFlags, RenameFlags};
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Size in bytes of a slot, of which the file has two.
const SLOT: usize = 16 << 10;
const SIZE: usize = 2 * SLOT;
const _: () = assert!(MAX_IMAGE_LEN <= SLOT);

/// Interval between attempts to lock the file.
const LOCK_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Reason why a reservations file cannot be opened, read or written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// An operation on the file has failed.
    #[error("{}: {error}", path.display())]
    Io {
        /// Path of the reservations file.
        path: PathBuf,
        /// Error of the system call.
        error: io::Error,
    },
    /// The path leads to something that is not a regular file.
    #[error("{}: not a regular file", .0.display())]
    NoFile(PathBuf),
    /// Another process has locked the reservations file.
    #[error("{}: another process uses this reservation file and holds its lock", .0.display())]
    Locked(PathBuf),
    /// The size is not that of a reservations file.
    #[error(
        "{}: not a reservation file: it has {found} bytes instead of {SIZE}",
        path.display()
    )]
    Size {
        /// Path of the file with the wrong size.
        path: PathBuf,
        /// Size of the file in bytes.
        found: u64,
    },
    /// Neither slot of the file contains a valid state.
    #[error(
        "{}: no state of reservations can be read: {first}; {second}. To remove the file is to \
         release all reservations",
        path.display()
    )]
    Unreadable {
        /// Path of the damaged file.
        path: PathBuf,
        /// Reason why the first slot is invalid.
        first: ImageError,
        /// Reason why the second slot is invalid.
        second: ImageError,
    },
    /// A newer program has written the file.
    #[error(
        "{}: format version {version} of a newer program; this one does not know it",
        path.display()
    )]
    TooNew {
        /// Path of the file that a newer program has written.
        path: PathBuf,
        /// Version of the file's format.
        version: u32,
    },
    /// The file stores the reservations of another namespace.
    #[error(
        "{}: the file belongs to another namespace (NGUID {}), not to this one ({})",
        path.display(), hex(found), hex(wanted)
    )]
    OtherNamespace {
        /// Path of the other namespace's file.
        path: PathBuf,
        /// NGUID that the file contains.
        found: [u8; 16],
        /// NGUID of the namespace to be served.
        wanted: [u8; 16],
    },
}

fn hex(bytes: &[u8; 16]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// File that stores the reservations of one namespace. Every call may block.
#[derive(Debug)]
pub struct ReservationFile {
    file: File,
    path: PathBuf,
    /// Sequence number of the newest stored state.
    sequence: u64,
    /// Index of the slot for the next write, which does not contain the newest state.
    next: usize,
    boot: [u8; 16],
    namespace: [u8; 16],
}

impl ReservationFile {
    /// Opens the file of a namespace (`namespace` is its NGUID), or creates one without
    /// registrants. `boot` identifies the host's boot ([`ReservationFile::boot`]): a state saved
    /// during an earlier boot is treated as after a power cut. Waits at most `limit` for a previous
    /// process to release its lock.
    ///
    /// # Errors
    /// [`FileError`] when the file cannot be opened, is locked or invalid, or belongs to another
    /// namespace.
    pub fn open(
        path: &Path,
        namespace: [u8; 16],
        boot: [u8; 16],
        limit: Duration,
    ) -> Result<(Self, StoredReservations), FileError> {
        let begun = Instant::now();
        let file = loop {
            let file = match open_there(path)? {
                Some(file) => file,
                None => make(path, namespace, boot, begun + limit)?,
            };
            lock(&file, path, begun + limit)?;
            // Another process may have put one in its place meanwhile.
            if is_at(&file, path)? {
                break file;
            }
        };
        Self::read(file, path, namespace, boot)
    }

    /// Opens the memory file that another process has made with [`ReservationFile::new_memory`].
    /// The state does not persist across a loss of power. `name` stands for the file in errors.
    ///
    /// # Errors
    /// [`FileError`] when the memory cannot be read, or has no valid state of this namespace.
    pub fn open_memory(
        file: File,
        name: &Path,
        namespace: [u8; 16],
    ) -> Result<(Self, StoredReservations), FileError> {
        let (file, mut stored) = Self::read(file, name, namespace, [0; 16])?;
        stored.state.can_persist = false;
        stored.state.ptpl = false;
        Ok((file, stored))
    }

    /// Writes a state without registrants into an empty memory file.
    ///
    /// # Errors
    /// [`FileError`] when the memory cannot be written.
    pub fn new_memory(file: File, name: &Path, namespace: [u8; 16]) -> Result<Self, FileError> {
        let written = write_first(&file, [0; 16], namespace);
        written.map_err(|error| io_error(name, error))?;
        let (file, _) = Self::read(file, name, namespace, [0; 16])?;
        Ok(file)
    }

    fn read(
        file: File,
        path: &Path,
        namespace: [u8; 16],
        boot: [u8; 16],
    ) -> Result<(Self, StoredReservations), FileError> {
        let mut bytes = vec![0; SIZE];
        read(&file, path, &mut bytes)?;
        let (first, second) = bytes.split_at(SLOT);
        let (image, next) = newest(path, Image::decode(first), Image::decode(second))?;
        if image.namespace != namespace {
            return Err(FileError::OtherNamespace {
                path: path.into(),
                found: image.namespace,
                wanted: namespace,
            });
        }
        let mut stored = StoredReservations {
            state: image.state,
            executed: image.executed,
            notices: image.notices,
        };
        if image.boot != boot {
            stored.state.power_lost();
            stored.executed.clear();
            stored.notices.clear();
        }
        let file = ReservationFile {
            file,
            path: path.into(),
            sequence: image.sequence,
            next,
            boot,
            namespace,
        };
        Ok((file, stored))
    }

    /// Returns the ID of the host's current boot.
    ///
    /// # Errors
    /// The system's error when `/proc` cannot be read.
    pub fn boot() -> io::Result<[u8; 16]> {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let mut boot = [0; 16];
        let digits: Vec<u8> = text
            .chars()
            .filter_map(|c| c.to_digit(16))
            .map(|digit| digit as u8)
            .collect();
        for (byte, digits) in boot.iter_mut().zip(digits.chunks(2)) {
            *byte = digits.iter().fold(0, |byte, digit| byte << 4 | digit);
        }
        Ok(boot)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Saves a state, with the newest of its operations and notices. When this returns, they
    /// survive the end of the process and, except in memory, a loss of power.
    ///
    /// # Errors
    /// [`FileError`] when the write fails. The next process may then find this state or the
    /// previous one. Later saves may succeed.
    pub fn save(&mut self, stored: &StoredReservations) -> Result<(), FileError> {
        let image = Image {
            sequence: self.sequence + 1,
            boot: self.boot,
            namespace: self.namespace,
            state: stored.state.clone(),
            executed: newest_of(&stored.executed, MAX_EXECUTED),
            notices: newest_of(&stored.notices, MAX_NOTICES),
        };
        let mut bytes = image.encode();
        bytes.resize(SLOT, 0);
        let written = self
            .file
            .write_all_at(&bytes, (self.next * SLOT) as u64)
            .and_then(|()| self.file.sync_data());
        written.map_err(|error| io_error(&self.path, error))?;
        self.sequence = image.sequence;
        self.next = 1 - self.next;
        Ok(())
    }
}

/// Returns the last `most` of these.
fn newest_of<T: Copy>(all: &[T], most: usize) -> Vec<T> {
    let begin = all.len().saturating_sub(most);
    all.get(begin..).unwrap_or_default().to_vec()
}

/// Writes the first state, without registrants.
fn write_first(file: &File, boot: [u8; 16], namespace: [u8; 16]) -> io::Result<()> {
    let image = Image {
        sequence: 1,
        boot,
        namespace,
        state: Reservations::new(true),
        executed: Vec::new(),
        notices: Vec::new(),
    };
    let mut bytes = image.encode();
    bytes.resize(SIZE, 0);
    file.write_all_at(&bytes, 0)?;
    file.set_len(SIZE as u64)
}

fn io_error(path: &Path, error: io::Error) -> FileError {
    FileError::Io {
        path: path.into(),
        error,
    }
}

/// Opens the file at the path; `None` if it does not exist.
fn open_there(path: &Path) -> Result<Option<File>, FileError> {
    let opened = File::options()
        .read(true)
        .write(true)
        // A FIFO would be waited for.
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open(path);
    match opened {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
            Err(FileError::NoFile(path.into()))
        }
        Err(error) => Err(io_error(path, error)),
    }
}

fn lock(file: &File, path: &Path, until: Instant) -> Result<(), FileError> {
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() < until => {
                std::thread::sleep(LOCK_CHECK_INTERVAL)
            }
            Err(TryLockError::WouldBlock) => return Err(FileError::Locked(path.into())),
            Err(TryLockError::Error(error)) => return Err(io_error(path, error)),
        }
    }
}

/// Returns whether the path still leads to the open file.
fn is_at(file: &File, path: &Path) -> Result<bool, FileError> {
    let mine = file.metadata().map_err(|error| io_error(path, error))?;
    match std::fs::metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (mine.dev(), mine.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io_error(path, error)),
    }
}

fn read(file: &File, path: &Path, bytes: &mut [u8]) -> Result<(), FileError> {
    let metadata = file.metadata().map_err(|error| io_error(path, error))?;
    if !metadata.is_file() {
        return Err(FileError::NoFile(path.into()));
    }
    if metadata.len() != SIZE as u64 {
        return Err(FileError::Size {
            path: path.into(),
            found: metadata.len(),
        });
    }
    let read = file.read_exact_at(bytes, 0);
    read.map_err(|error| io_error(path, error))
}

/// Returns the newest valid state in the file, and the index of the slot for the next write.
fn newest(
    path: &Path,
    first: Result<Image, ImageError>,
    second: Result<Image, ImageError>,
) -> Result<(Image, usize), FileError> {
    let path = || PathBuf::from(path);
    match (first, second) {
        // The other slot is older than the state that a newer program has written.
        (Err(ImageError::TooNew(version)), _) | (_, Err(ImageError::TooNew(version))) => {
            let path = path();
            Err(FileError::TooNew { path, version })
        }
        (Ok(first), Ok(second)) if first.sequence > second.sequence => Ok((first, 1)),
        (Ok(_), Ok(second)) => Ok((second, 0)),
        (Ok(first), Err(_)) => Ok((first, 1)),
        (Err(_), Ok(second)) => Ok((second, 0)),
        (Err(first), Err(second)) => Err(FileError::Unreadable {
            path: path(),
            first,
            second,
        }),
    }
}

/// Creates the file, locked and without registrants. If another process has created it meanwhile,
/// the next attempt opens that one.
fn make(
    path: &Path,
    namespace: [u8; 16],
    boot: [u8; 16],
    until: Instant,
) -> Result<File, FileError> {
    let failed = |error: io::Error| io_error(path, error);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags((OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32)
        .open(&new)
        .map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(FileError::NoFile(new));
    }
    // The lock moves with the file to its new name: a later owner of the lock finds the file there.
    lock(&file, &new, until)?;
    if !is_at(&file, &new)? {
        // The file was renamed meanwhile.
        return Ok(file);
    }
    write_first(&file, boot, namespace)
        .and_then(|()| file.sync_all())
        .map_err(failed)?;
    let renamed = rustix::fs::renameat_with(CWD, &new, CWD, path, RenameFlags::NOREPLACE);
    match renamed {
        Ok(()) => {}
        // Another one is there by now.
        Err(rustix::io::Errno::EXIST) => {
            std::fs::remove_file(&new).map_err(failed)?;
            return Ok(file);
        }
        // The file system does not support RENAME_NOREPLACE.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            std::fs::rename(&new, path).map_err(failed)?;
        }
        Err(error) => return Err(failed(error.into())),
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let folder = File::open(folder).and_then(|folder| folder.sync_all());
    folder.map_err(failed)?;
    Ok(file)
}
