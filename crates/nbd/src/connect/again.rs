//! A thread that connects again after a connection has ended, with growing pauses.

use super::Inbox;
use crate::export::Shared;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The first pause; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Bytes of stack of the thread.
const STACK: usize = 256 << 10;
/// Between two log lines of a server that stays away.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The pause before an attempt, after so many failures in a row.
fn pause(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        failures => {
            let times = 1u32 << (failures - 1).min(16);
            FIRST_PAUSE.saturating_mul(times).min(LONGEST_PAUSE)
        }
    }
}

/// Starts a thread that leaves a connection in `inbox`, as soon as there is one. It ends when
/// nobody waits any more. `failures`: connections in a row that were of no use.
///
/// # Errors
/// No thread can be had.
pub(crate) fn connect_again(
    shared: &Arc<Shared>,
    inbox: &Arc<Inbox>,
    link: usize,
    failures: u32,
) -> std::io::Result<()> {
    let shared = shared.clone();
    let inbox = Arc::downgrade(inbox);
    let builder = std::thread::Builder::new()
        .name("nbd".into())
        .stack_size(STACK);
    // Never joined: every step has its time limit.
    builder
        .spawn(move || run(&shared, &inbox, link, failures))
        .map(drop)
}

fn run(shared: &Shared, inbox: &Weak<Inbox>, link: usize, mut failures: u32) {
    sync::leave_cpu();
    let began = Instant::now();
    let mut said: Option<Instant> = None;
    loop {
        std::thread::sleep(pause(failures));
        if inbox.strong_count() == 0 {
            return;
        }
        match shared.connect() {
            Ok(connected) => {
                if let Some(inbox) = inbox.upgrade() {
                    shared.made_again(began.elapsed());
                    inbox.put((link, connected));
                }
                return;
            }
            Err(error) => {
                failures = failures.saturating_add(1);
                if said.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
                    said = Some(Instant::now());
                    tracing::warn!("{error}; trying again until it answers");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_end_growing() {
        assert_eq!(pause(0), Duration::ZERO);
        assert_eq!(pause(1), FIRST_PAUSE);
        assert_eq!(pause(2), FIRST_PAUSE * 2);
        assert_eq!(pause(u32::MAX), LONGEST_PAUSE);
    }
}
