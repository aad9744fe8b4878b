//! The table of mappings is bounded. Alone in its process, because it fills the table.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use dma::sigbus::MAX_MAPPINGS;
use dma::{MapError, Memory};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn mapping_beyond_limit_is_error() {
    // Each memory keeps its file open.
    let limit = getrlimit(Resource::Nofile);
    let needed = MAX_MAPPINGS as u64 + 100;
    if limit.maximum.is_some_and(|maximum| maximum < needed) {
        let what = "dma::full::mapping_beyond_limit_is_error";
        return testkit::skip(what, "too few open files are allowed (ulimit -Hn)");
    }
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(needed),
            maximum: limit.maximum,
        },
    )
    .unwrap();
    let mut memories: Vec<Memory> = (0..MAX_MAPPINGS)
        .map(|_| Memory::anonymous(4096).unwrap())
        .collect();
    assert_eq!(Memory::anonymous(4096).err(), Some(MapError::TableFull));
    // The last slot works like the first; a slot that was freed works again, unpoisoned.
    for _ in 0..2 {
        let last = memories.pop().unwrap();
        rustix::fs::ftruncate(last.fd(), 0).unwrap();
        assert!(last.read(0, &mut [0]).is_err());
        drop(last);
        // A thread of its own undoes the mapping.
        let freed = (0..30_000).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            Memory::anonymous(4096).ok()
        });
        memories.push(freed.unwrap());
        assert!(memories.iter().all(|memory| !memory.is_poisoned()));
        assert_eq!(Memory::anonymous(4096).err(), Some(MapError::TableFull));
    }
}
