//! Sources of completions that do not arrive through the ring, for example a device's queue pair,
//! and the descriptors that wake a sleeping worker for them.
//!
//! Each source has a descriptor that becomes readable when completions are available. The worker
//! waits for only one descriptor, an epoll set of all of them, which stays the same while sources
//! are added and removed.

use rustix::event::epoll;
use rustix::io;
use std::cell::{OnceCell, RefCell};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Result of arming a source of completions before its worker sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// No completion is available, and the next one makes the descriptor readable.
    Quiet,
    /// A completion is available or would not be signalled: the worker must poll instead of
    /// sleeping.
    Waiting,
    /// The source of completions has been removed.
    Gone,
}

struct Source {
    /// Duplicate of the source's descriptor, which stays valid in the epoll set after the source
    /// closes its own.
    fd: OwnedFd,
    arm: Box<dyn FnMut() -> Armed>,
}

/// Sources of completions outside the ring (such as devices) that one worker watches.
#[derive(Default)]
pub(super) struct EventSources {
    set: OnceCell<OwnedFd>,
    sources: RefCell<Vec<Source>>,
}

impl std::fmt::Debug for EventSources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Others")
            .field("set", &self.set)
            .finish_non_exhaustive()
    }
}

impl EventSources {
    pub fn watch(
        &self,
        fd: BorrowedFd<'_>,
        arm: impl FnMut() -> Armed + 'static,
    ) -> io::Result<()> {
        let fd = fd.try_clone_to_owned().map_err(|error| {
            let code = error.raw_os_error().unwrap_or(0);
            io::Errno::from_raw_os_error(code)
        })?;
        let set = match self.set.get() {
            Some(set) => set,
            None => {
                let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
                self.set.get_or_init(|| set)
            }
        };
        epoll::add(
            set,
            &fd,
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN,
        )?;
        self.sources.borrow_mut().push(Source {
            fd,
            arm: Box::new(arm),
        });
        Ok(())
    }

    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.set.get().map(AsFd::as_fd)
    }

    /// Arms all sources before the worker sleeps. Returns `false` when the worker must poll
    /// instead.
    pub fn arm(&self) -> bool {
        let mut quiet = true;
        // Sources look at their own queues and at nothing of the worker's: they do not come back
        // here.
        let Ok(mut sources) = self.sources.try_borrow_mut() else {
            return false;
        };
        sources.retain_mut(|source| match (source.arm)() {
            Armed::Quiet => true,
            Armed::Waiting => {
                quiet = false;
                true
            }
            Armed::Gone => {
                if let Some(set) = self.set.get() {
                    // Closing is not enough: other holders may have duplicates of the descriptor.
                    let _ = epoll::delete(set, &source.fd);
                }
                false
            }
        });
        quiet
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
    use std::cell::Cell;
    use std::rc::Rc;

    fn readable(others: &EventSources) -> bool {
        let Some(fd) = others.fd() else {
            return false;
        };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        poll(&mut fds, Some(&Default::default())).unwrap() > 0
    }

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    #[test]
    fn every_source_wakes_worker() {
        let others = EventSources::default();
        assert!(others.fd().is_none() && others.arm());
        let events = [event(), event()];
        let says = [Armed::Quiet; 2].map(|armed| Rc::new(Cell::new(armed)));
        for (event, says) in events.iter().zip(&says) {
            let says = says.clone();
            others.watch(event.as_fd(), move || says.get()).unwrap();
        }
        assert!(others.arm() && !readable(&others));
        for (event, says) in events.iter().zip(&says) {
            rustix::io::write(event, &1u64.to_ne_bytes()).unwrap();
            assert!(readable(&others));
            rustix::io::read(event, &mut [0; 8]).unwrap();
            assert!(!readable(&others));
            says.set(Armed::Waiting);
            assert!(!others.arm());
            says.set(Armed::Quiet);
            assert!(others.arm());
        }
    }

    #[test]
    fn removed_source_wakes_no_worker() {
        let others = EventSources::default();
        let (left, stays) = (event(), event());
        let gone = Rc::new(Cell::new(Armed::Quiet));
        let says = gone.clone();
        others.watch(left.as_fd(), move || says.get()).unwrap();
        others.watch(stays.as_fd(), || Armed::Quiet).unwrap();
        gone.set(Armed::Gone);
        assert!(others.arm());
        // `left` is still open, and signalled.
        rustix::io::write(&left, &1u64.to_ne_bytes()).unwrap();
        assert!(!readable(&others));
        rustix::io::write(&stays, &1u64.to_ne_bytes()).unwrap();
        assert!(readable(&others));
    }
}
