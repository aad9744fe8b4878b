//! Reconnection: a thread that replaces an ended connection, with growing pauses between attempts.

use super::Inbox;
use crate::export::SharedExport;
use remote::{LOG_INTERVAL, pause};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Starts a thread that connects again and puts the connection into `inbox`. It ends when the
/// receiver is dropped. `failures`: number of consecutive connections that failed before any reply.
///
/// # Errors
/// The I/O error when no thread can be started.
pub(crate) fn connect_again(
    shared: &Arc<SharedExport>,
    inbox: &Arc<Inbox>,
    link: usize,
    failures: u32,
) -> std::io::Result<()> {
    let shared = shared.clone();
    let inbox = Arc::downgrade(inbox);
    remote::spawn("nbd", move || run(&shared, &inbox, link, failures))
}

fn run(shared: &SharedExport, inbox: &Weak<Inbox>, link: usize, mut failures: u32) {
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
                    tracing::warn!("{error}; retrying until it answers");
                }
            }
        }
    }
}
