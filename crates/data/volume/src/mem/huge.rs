//! Huge pages for volumes in memory files.
//!
//! Private memory gets huge pages when it is first written. A memory file mostly gets none
//! (`/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `never` on most systems), and a volume
//! in small pages is slower because of TLB misses. A background thread therefore collapses written
//! memory into huge pages, while the workers run on.

use dma::{PrivateMemory, WeakMemory};
use rustix::process::nice;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Interval between two passes over the memory while it is being written. [`QUIET`] applies
/// otherwise.
const BUSY: Duration = Duration::from_millis(50);
const IDLE: Duration = Duration::from_secs(1);
/// Nice value of the thread that makes huge pages: the lowest priority.
const STANDS_BACK: i32 = 19;
/// Maximum number of pieces processed in one pass for a volume, before other volumes get their
/// turn.
const PIECES: usize = 64;

/// Memory files that the single background thread processes. The thread runs while there are any.
static MEMORIES: Mutex<Vec<WeakMemory>> = Mutex::new(Vec::new());

/// Registers a volume's memory, whose written parts a background thread turns into huge pages.
pub(super) fn make(memory: &PrivateMemory) {
    let mut memories = MEMORIES.lock().unwrap_or_else(PoisonError::into_inner);
    memories.push(memory.downgrade());
    if memories.len() > 1 {
        return;
    }
    let thread = std::thread::Builder::new().name("huge-pages".into());
    // Never joined: it ends with the last volume. Without it they are slower.
    if let Err(error) = thread.stack_size(64 << 10).spawn(run) {
        memories.clear();
        tracing::debug!(%error, "no thread that makes huge pages");
    }
}

/// Returns the message of an error of a volume in the host's huge pages: how many it needs, and how
/// many are free.
pub(super) fn shortage(size: u64, error: &std::io::Error) -> String {
    let needed = size.div_ceil(2 << 20);
    // Cannot be read in the sandbox.
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free = free.map_or_else(
        |_| String::new(),
        |free| format!(", {} are free", free.trim()),
    );
    format!(
        "{error}: huge=2M needs {needed} huge pages of 2 MiB from the host's pool{free} \
         (vm.nr_hugepages; a control group may allow fewer)"
    )
}

fn run() {
    // In Linux the nice value is the thread's alone. The workers' time is worth more than a huge
    // page soon; in the sandbox, where the call is not allowed, the thread keeps its priority.
    let _ = nice(STANDS_BACK);
    let mut pause = IDLE;
    loop {
        std::thread::sleep(pause);
        let mut memories = MEMORIES.lock().unwrap_or_else(PoisonError::into_inner);
        memories.retain(|memory| memory.upgrade().is_some());
        if memories.is_empty() {
            return;
        }
        let now: Vec<WeakMemory> = memories.clone();
        drop(memories);
        let upgraded = now.iter().filter_map(WeakMemory::upgrade);
        let made: usize = upgraded.map(|memory| memory.collapse(PIECES)).sum();
        pause = if made > 0 { BUSY } else { IDLE };
    }
}
