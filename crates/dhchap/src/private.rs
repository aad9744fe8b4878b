//! Files that hold secrets.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use zeroize::Zeroizing;

/// Maximum size of the file, in bytes.
const MOST: u64 = 1 << 20;
/// Permissions of everybody.
const OTHERS: u32 = 0o007;

/// Reads a file that only its owner and group may access.
///
/// # Errors
/// If the file cannot be read, everybody may access it, or it is not UTF-8.
pub fn read_private(path: &Path) -> io::Result<Zeroizing<String>> {
    let file = File::open(path)?;
    let about = file.metadata()?;
    if about.mode() & OTHERS != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "everybody may read it or write to it, and it holds a secret (chmod 600)",
        ));
    }
    // With all its room at once: nothing is left behind in memory that was too small.
    let len = about.len().min(MOST);
    let mut text = Zeroizing::new(String::with_capacity(len as usize + 1));
    file.take(MOST).read_to_string(&mut text)?;
    Ok(text)
}
