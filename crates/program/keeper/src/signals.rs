//! Signals that come to the keeper process, for the serving one.

use rustix::io::Errno;
use rustix::process::Signal;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Signals that request the end of the keeper and of the serving process.
const ENDING: [Signal; 4] = [Signal::TERM, Signal::INT, Signal::QUIT, Signal::XCPU];

/// Signal that requests an upgrade to another program.
pub(crate) const UPGRADE: Signal = Signal::USR2;

/// Signals that do not end the keeper and are passed on to the serving process.
const FORWARDED_SIGNALS: [Signal; 8] = [
    Signal::HUP,
    Signal::USR1,
    Signal::USR2,
    Signal::XFSZ,
    Signal::ALARM,
    Signal::VTALARM,
    Signal::PROF,
    Signal::IO,
];

/// Signals that the keeper has received, and a descriptor that becomes readable with them.
#[derive(Debug)]
pub(crate) struct Signals {
    come: UnixStream,
    flags: Vec<(Signal, Arc<AtomicBool>)>,
}

impl Signals {
    /// Starts to receive the keeper's signals, which make the descriptor readable from now on.
    pub(crate) fn new() -> io::Result<Self> {
        let (come, told) = UnixStream::pair()?;
        come.set_nonblocking(true)?;
        let mut flags = Vec::new();
        for signal in ENDING.into_iter().chain(FORWARDED_SIGNALS) {
            let flag = Arc::new(AtomicBool::new(false));
            // In this order: the flag is there when the descriptor is readable.
            signal_hook::flag::register(signal.as_raw(), flag.clone())?;
            signal_hook::low_level::pipe::register(signal.as_raw(), told.try_clone()?)?;
            flags.push((signal, flag));
        }
        Ok(Self { come, flags })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.come.as_fd()
    }

    /// Returns a function that tells whether no signal has arrived since the last
    /// [`Signals::take`].
    pub(crate) fn quiet(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let flags: Vec<_> = self.flags.iter().map(|(_, flag)| flag.clone()).collect();
        move || !flags.iter().any(|flag| flag.load(Ordering::Acquire))
    }

    /// Returns the signals that have arrived since the last call.
    pub(crate) fn take(&self) -> Vec<Signal> {
        let mut bytes = [0; 64];
        while let Ok(1..) | Err(Errno::INTR) = rustix::io::read(&self.come, &mut bytes) {}
        let come = self.flags.iter();
        let come = come.filter(|(_, flag)| flag.swap(false, Ordering::AcqRel));
        come.map(|(signal, _)| *signal).collect()
    }
}

/// Returns whether the signal requests the end of the keeper.
pub(crate) fn ends(signal: Signal) -> bool {
    ENDING.contains(&signal)
}
