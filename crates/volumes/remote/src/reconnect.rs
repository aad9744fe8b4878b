//! Threads that reconnect to a server, with growing pauses between attempts.

use std::time::Duration;

/// Pause before the second attempt to connect; each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// Maximum pause between two attempts to connect.
const MAX_PAUSE: Duration = Duration::from_secs(2);
/// Stack size in bytes of a thread that connects to a server.
const STACK: usize = 256 << 10;

/// Interval between log lines about a server that stays unreachable.
pub const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Returns the pause before the next attempt to connect after `failures` failures in a row.
pub fn pause(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        failures => {
            let times = 1u32 << (failures - 1).min(16);
            FIRST_PAUSE.saturating_mul(times).min(MAX_PAUSE)
        }
    }
}

/// Starts a thread that connects to a server. It may run on any CPU of the process, not only on
/// that of the worker that starts it. It is never joined, so each of its steps must have a time
/// limit.
///
/// # Errors
/// The I/O error when no thread can be started.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let builder = std::thread::Builder::new();
    let builder = builder.name(name.into()).stack_size(STACK);
    let thread = builder.spawn(move || {
        sync::leave_cpu();
        run();
    });
    thread.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_pauses_grow_up_to_limit() {
        assert_eq!(pause(0), Duration::ZERO);
        assert_eq!(pause(1), FIRST_PAUSE);
        assert_eq!(pause(2), FIRST_PAUSE * 2);
        assert_eq!(pause(u32::MAX), MAX_PAUSE);
    }
}
