//! Huge pages of the host for a test.

use std::fs::{self, File};
use std::io;

/// Number of huge pages of 2 MiB that no process uses, and of all.
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
const ALL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Huge pages that were added to the host's pool until this is dropped.
#[derive(Debug)]
pub struct HugePages {
    /// Number of pages before.
    before: u64,
    /// Other tests wait: the pool belongs to the host.
    _lock: File,
}

impl HugePages {
    /// Adds `count` pages of 2 MiB to the pool. Waits for other tests that have done so.
    ///
    /// # Errors
    /// The reason why the test has to be skipped.
    pub fn add(count: u64) -> Result<HugePages, String> {
        let failed = |error: io::Error| format!("the host's pool cannot grow: {}", error.kind());
        let lock = File::create(std::env::temp_dir().join("vnvme-huge-pages")).map_err(failed)?;
        lock.lock().map_err(failed)?;
        let before = number(ALL).map_err(failed)?;
        let pages = HugePages {
            before,
            _lock: lock,
        };
        fs::write(ALL, (before + count).to_string()).map_err(failed)?;
        match number(FREE).map_err(failed)? {
            free if free >= count => Ok(pages),
            _ => Err("the host's memory is too fragmented for huge pages".to_owned()),
        }
    }

    /// Returns the number of pages that no process uses.
    ///
    /// # Panics
    /// If the kernel does not tell.
    #[must_use]
    #[expect(clippy::expect_used, reason = "the test fails")]
    pub fn free(&self) -> u64 {
        number(FREE).expect("free huge pages")
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // Without privileges nothing was changed.
        let _ = fs::write(ALL, self.before.to_string());
    }
}

fn number(path: &str) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    text.trim().parse().map_err(io::Error::other)
}
