//! File of a table that is mapped into memory, so that its contents outlast the process.

use anyhow::{Context, Result};
use dma::SharedPages;
use rustix::fs::{CWD, FallocateFlags, OFlags, RenameFlags};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use volume::{Direct, FileOptions, FileVolume, Format, PreviousProcess};

/// Page size in bytes; a table file consists of whole pages.
pub const PAGE: usize = 4096;

/// Opens a table file and maps its pages. The file's lock protects the table: a process that gets
/// the lock knows that the previous one has ended. `fresh` returns the contents of a new file.
///
/// # Errors
/// A message for the user when the file cannot be created, locked or mapped.
pub fn open(
    path: &Path,
    fresh: impl FnOnce() -> Result<Vec<u8>>,
    previous: PreviousProcess,
) -> Result<(FileVolume, SharedPages)> {
    open_sized(path, 0, fresh, previous)
}

/// Opens a table file as [`open`] does. A new file is extended with zeroes to `size` bytes and its
/// blocks are allocated, so that later stores find space.
///
/// # Errors
/// A message for the user when the file cannot be created, locked or mapped.
pub fn open_sized(
    path: &Path,
    size: u64,
    fresh: impl FnOnce() -> Result<Vec<u8>>,
    previous: PreviousProcess,
) -> Result<(FileVolume, SharedPages)> {
    let shown = path.display();
    if !path.exists() {
        make(path, fresh()?, size).with_context(|| shown.to_string())?;
    }
    let options = FileOptions {
        direct: Direct::Off,
        format: Format::Raw,
        previous,
        ..FileOptions::default()
    };
    let volume = FileVolume::open(path, options)?;
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open(path)
        .with_context(|| shown.to_string())?;
    let pages = SharedPages::of_file(file.into()).with_context(|| shown.to_string())?;
    Ok((volume, pages))
}

/// Returns the first `len` bytes of the mapped file, or all of it if it is shorter.
pub fn read(pages: &SharedPages, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; pages.len().min(len)];
    pages.memory().read(0, &mut bytes)?;
    Ok(bytes)
}

/// Creates the file atomically: writes it under another name, makes it durable, and renames it.
fn make(path: &Path, mut bytes: Vec<u8>, size: u64) -> Result<()> {
    bytes.resize(bytes.len().next_multiple_of(PAGE), 0);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new: PathBuf = path.with_file_name(name);
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags((OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32)
        .open(&new)?;
    let written = file.write_all(&bytes).map_err(anyhow::Error::from);
    let allocated = written.and_then(|()| allocate(&file, size));
    if let Err(error) = allocated {
        drop(file);
        let _ = std::fs::remove_file(&new);
        return Err(error);
    }
    file.sync_all()?;
    match rustix::fs::renameat_with(CWD, &new, CWD, path, RenameFlags::NOREPLACE) {
        Ok(()) => {}
        // Another process has created the file.
        Err(rustix::io::Errno::EXIST) => std::fs::remove_file(&new)?,
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => std::fs::rename(&new, path)?,
        Err(error) => return Err(error.into()),
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    File::open(folder)?.sync_all()?;
    Ok(())
}

/// Extends the file to `size` bytes, and allocates space for all of it where the file system
/// supports that.
///
/// # Errors
/// The file cannot be extended, for example because no space is left.
pub fn allocate(file: &File, size: u64) -> Result<()> {
    if size == 0 {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(file.set_len(size)?),
        Err(error) => Err(error).with_context(|| format!("{size} bytes of metadata")),
    }
}

/// Zeroes the bytes of the file from `from` to `end`, and extends a shorter file to `end`.
/// Allocated space is kept where the file system supports that; otherwise everything after `from`
/// is released and allocated again.
///
/// # Errors
/// No space is left. The bytes may then have any value.
pub fn zero(file: &File, from: u64, end: u64) -> Result<()> {
    let Some(len) = end.checked_sub(from).filter(|len| *len > 0) else {
        return Ok(());
    };
    match rustix::fs::fallocate(file, FallocateFlags::ZERO_RANGE, from, len) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            file.set_len(from)?;
            allocate(file, end)
        }
        Err(error) => Err(error).with_context(|| format!("{end} bytes of metadata")),
    }
}
