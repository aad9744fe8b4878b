//! Volumes that are resized while they are served: a thread asks them from time to time, as that
//! may take a device's time (tens of seconds, where it does not answer), and wakes the thread that
//! serves them: a worker, or the one that keeps the block devices. Those never ask a volume
//! themselves.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use volume::{Kind, Volume};

/// Between two looks at the volumes' sizes.
const INTERVAL: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

struct Watched {
    volume: Arc<dyn Volume>,
    /// As it was told last.
    size: u64,
    /// An eventfd of the thread that serves it.
    wake: Arc<OwnedFd>,
    failed: bool,
}

/// The volumes that are looked after.
#[derive(Default)]
pub struct Sizes(Mutex<Vec<Watched>>);

impl Sizes {
    /// Looks after a volume; `wake` becomes readable when it has been resized.
    pub fn watch(&self, volume: Arc<dyn Volume>, wake: &Arc<OwnedFd>) {
        let info = volume.info();
        if matches!(info.kind, Kind::Memory | Kind::Null) {
            return;
        }
        let mut list = self.0.lock().unpoisoned();
        list.push(Watched {
            volume,
            size: info.size,
            wake: wake.clone(),
            failed: false,
        });
    }

    /// Looks until asked to end.
    pub fn run(&self, stop: &OwnedFd) {
        loop {
            let mut fds = [PollFd::new(stop, PollFlags::IN)];
            match poll(&mut fds, Some(&INTERVAL)) {
                Ok(0) => self.look(stop),
                Err(rustix::io::Errno::INTR) => {}
                Ok(_) | Err(_) => return,
            }
        }
    }

    fn look(&self, stop: &OwnedFd) {
        let list = || self.0.lock().unpoisoned();
        // Not locked while a device is asked: others come to the list when they start.
        let mut watched = std::mem::take(&mut *list());
        for watched in &mut watched {
            let mut fds = [PollFd::new(stop, PollFlags::IN)];
            if poll(&mut fds, Some(&Timespec::default())) != Ok(0) {
                break;
            }
            match watched.volume.refresh() {
                Ok(_) => watched.failed = false,
                Err(error) => {
                    if !std::mem::replace(&mut watched.failed, true) {
                        tracing::warn!(%error, "a volume's size cannot be found out");
                    }
                }
            }
            // Somebody else may have found it out, too: a device's other namespaces are asked in the same breath.
            let size = watched.volume.info().size;
            if std::mem::replace(&mut watched.size, size) != size {
                let _ = rustix::io::write(watched.wake.as_fd(), &1u64.to_ne_bytes());
            }
        }
        list().append(&mut watched);
    }
}
