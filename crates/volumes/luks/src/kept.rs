//! Volume keys in sealed memory, for a process that opens the container next.

use crate::secret::SecretBytes;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use rustix::io::{pread, pwrite};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Lengths in bytes of the keys that are kept.
const KEY_LENGTHS: [u64; 2] = [32, 64];

/// Seals of a kept key: nobody can change it, not even the process that has made it.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::WRITE)
    .union(SealFlags::SEAL);

/// Copies a volume key into a new sealed memory file.
///
/// # Errors
/// The system's error.
pub fn keep(key: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("volume-key", flags)?;
    if pwrite(&file, key, 0)? != key.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Reads a key that [`keep`] has made; `None` for any other file. The caller verifies the key
/// against the header.
pub fn kept(file: BorrowedFd<'_>) -> Option<SecretBytes> {
    if !fcntl_get_seals(file).ok()?.contains(SEALS) {
        return None;
    }
    let len = u64::try_from(fstat(file).ok()?.st_size).ok()?;
    if !KEY_LENGTHS.contains(&len) {
        return None;
    }
    let mut key = SecretBytes::new(usize::try_from(len).ok()?);
    let read = pread(file, &mut *key, 0).ok()?;
    (read == key.len()).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn kept_key_is_sealed_and_read_back() {
        let key = [7; 64];
        let file = keep(&key).unwrap();
        assert_eq!(*kept(file.as_fd()).unwrap(), key);
        assert!(pwrite(&file, b"x", 0).is_err());
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        let strange = memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        pwrite(&strange, &key, 0).unwrap();
        assert!(kept(strange.as_fd()).is_none(), "not sealed");
        assert!(kept(keep(b"short").unwrap().as_fd()).is_none());
    }
}
