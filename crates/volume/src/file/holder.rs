//! Who has a file open: for the message that says why it cannot be had.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Most processes named in a message.
const NAMED: usize = 3;

/// The other processes that have `path` open, in words. Best effort: processes of other users may
/// be invisible.
pub(super) fn holder(path: &Path) -> String {
    let names = match fs::metadata(path) {
        Ok(file) => others(file.dev(), file.ino()),
        Err(_) => Vec::new(),
    };
    match names.as_slice() {
        [] => "another process, or by this one a second time".into(),
        names => names.join(", "),
    }
}

fn others(dev: u64, ino: u64) -> Vec<String> {
    let Ok(processes) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|&pid| pid != std::process::id() && has_open(pid, dev, ino))
        .take(NAMED)
        .map(
            |pid| match fs::read_to_string(format!("/proc/{pid}/comm")) {
                Ok(name) => format!("process {pid} ({})", name.trim_end()),
                Err(_) => format!("process {pid}"),
            },
        )
        .collect()
}

fn has_open(pid: u32, dev: u64, ino: u64) -> bool {
    fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|mut fds| {
        fds.any(|entry| {
            entry
                .and_then(|entry| fs::metadata(entry.path()))
                .is_ok_and(|file| file.dev() == dev && file.ino() == ino)
        })
    })
}
