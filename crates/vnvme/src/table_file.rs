//! The file of a table that is mapped: it is memory of the process, and there when that has ended.

use anyhow::{Context, Result};
use dma::SharedPages;
use rustix::fs::{CWD, FallocateFlags, OFlags, RenameFlags};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use volume::{Direct, FileOptions, FileVolume, Format, PreviousProcess};

/// The file is whole pages.
pub const PAGE: usize = 4096;

/// Opens the file and its pages. The file's lock protects the table: the previous process has ended
/// when this one has the lock. `fresh` makes the content of a new file.
///
/// # Errors
/// A sentence for the user.
pub fn open(
    path: &Path,
    fresh: impl FnOnce() -> Result<Vec<u8>>,
    previous: PreviousProcess,
) -> Result<(FileVolume, SharedPages)> {
    open_sized(path, 0, fresh, previous)
}

/// Opens a file as [`open`] does. A new one has zeroes behind its content, `size` bytes in all, in
/// allocated blocks: later stores find space.
///
/// # Errors
/// A sentence for the user.
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

/// Reads the first `len` bytes of the file, or all of it.
pub fn read(pages: &SharedPages, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; pages.len().min(len)];
    pages.memory().read(0, &mut bytes)?;
    Ok(bytes)
}

/// Makes the file: under another name, made durable, and then renamed.
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
        // Another process was first.
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

/// Makes the file as long as that, with room for all of it where its file system can promise that.
///
/// # Errors
/// There is none.
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

/// Makes the bytes of the file from `from` to `end` zeroes, and extends a shorter file to `end`.
/// Allocated space is kept where the file system can do that; elsewhere all behind `from` is
/// released and allocated anew.
///
/// # Errors
/// There is no space. The bytes may then have any value.
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
