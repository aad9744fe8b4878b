//! SIGTERM and SIGINT become a readable descriptor in the worker's event loop.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// A descriptor that becomes readable at the first SIGTERM or SIGINT. A second one ends the process at once, as without
/// this.
pub fn stop_descriptor() -> Result<OwnedFd> {
    let (reader, writer) = UnixStream::pair().context("socket pair for signals")?;
    for signal in [SIGTERM, SIGINT] {
        let again = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        // Order matters: the shutdown is conditional on the flag, which the handlers after it set.
        signal_hook::flag::register_conditional_default(signal, again.clone())
            .context("signal handler")?;
        signal_hook::flag::register(signal, again).context("signal handler")?;
        let writer = writer.try_clone().context("socket pair for signals")?;
        signal_hook::low_level::pipe::register(signal, writer).context("signal handler")?;
    }
    Ok(reader.into())
}
