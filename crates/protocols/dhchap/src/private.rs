//! Files that hold secrets.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use zeroize::Zeroizing;

/// Maximum size of the file in bytes.
const MAX_FILE_SIZE: u64 = 1 << 20;
/// Permission bits of users other than owner and group.
const OTHER_USERS_MODE: u32 = 0o007;

/// Reads a file that only its owner and group may access.
///
/// # Errors
/// The I/O error when the file cannot be read, all users may access it, or it is not UTF-8.
pub fn read_private(path: &Path) -> io::Result<Zeroizing<String>> {
    let file = File::open(path)?;
    let about = file.metadata()?;
    if about.mode() & OTHER_USERS_MODE != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "everybody may read it or write to it, and it holds a secret (chmod 600)",
        ));
    }
    // All memory is allocated at once, so that growing leaves no copy of the secret behind.
    let len = about.len().min(MAX_FILE_SIZE);
    let mut text = Zeroizing::new(String::with_capacity(len as usize + 1));
    file.take(MAX_FILE_SIZE).read_to_string(&mut text)?;
    Ok(text)
}
