//! SIGTERM and SIGINT become a readable descriptor in the workers' event loops.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// The order to end, for any number of workers: each waits for its own descriptor to become readable. Nobody reads from
/// it, so that all see it.
pub struct Stop {
    reader: UnixStream,
    writer: UnixStream,
}

impl Stop {
    /// The order comes with the first SIGTERM or SIGINT. A second signal ends the process at once, as without this.
    pub fn on_signals() -> Result<Stop> {
        let (reader, writer) = UnixStream::pair().context("socket pair for signals")?;
        for signal in [SIGTERM, SIGINT] {
            let again = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
            // The order matters: the first handler ends the process if the second one was run before.
            signal_hook::flag::register_conditional_default(signal, again.clone())
                .context("signal handler")?;
            signal_hook::flag::register(signal, again).context("signal handler")?;
            let writer = writer.try_clone().context("socket pair for signals")?;
            signal_hook::low_level::pipe::register(signal, writer).context("signal handler")?;
        }
        Ok(Stop { reader, writer })
    }

    /// A descriptor that becomes readable when it is time to end.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        Ok(self
            .reader
            .try_clone()
            .context("socket pair for signals")?
            .into())
    }

    /// Gives the order.
    pub fn now(&self) {
        // A full socket is readable, too.
        let _ = (&self.writer).write(&[0]);
    }
}
