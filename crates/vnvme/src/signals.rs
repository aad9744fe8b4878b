//! Signal handling: a signal ends the process in order, with all data durable, or changes nothing.
//!
//! Nearly all signals end a process at once by default. Here each signal from outside has a defined
//! effect: [`ENDING`] ask for the end, [`OTHERS`] are logged and change nothing. SIGPIPE is ignored
//! by Rust's start-up code; SIGBUS belongs to `dma`.

use crate::confine::{SandboxMode, spawn_early};
use crate::keep::is_systemd;
use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{
    SIGALRM, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM,
    SIGXCPU, SIGXFSZ,
};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Each of them asks for the end. SIGXCPU is among them because the kernel kills the process a
/// little later (setrlimit(2), RLIMIT_CPU).
const ENDING: [i32; 4] = [SIGTERM, SIGINT, SIGQUIT, SIGXCPU];

/// Signals that do not end the process. SIGHUP is also sent when the terminal closes from which the
/// process was started. SIGXFSZ is sent for a write beyond the file size limit (RLIMIT_FSIZE),
/// which a guest can cause: only the write fails.
const OTHERS: [i32; 8] = [
    SIGHUP, SIGUSR1, SIGUSR2, SIGXFSZ, SIGALRM, SIGVTALRM, SIGPROF, SIGIO,
];

/// A further signal within this time after the first is the same order once more: timeout(1) sends
/// two, one to the process and one to its group, and so does an init system beside a terminal.
const SAME_ORDER: Duration = Duration::from_secs(1);

/// Between two log lines about signals that change nothing.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// The order to end, for any number of workers: each waits for its own descriptor to become
/// readable. Nobody reads from it, so that all see it.
pub struct Stop {
    reader: UnixStream,
    writer: UnixStream,
    /// Receiver of SIGHUP.
    hangups: Hangups,
}

type Hangups = Arc<Mutex<Option<SyncSender<()>>>>;

impl Stop {
    /// Starts the handling of signals. The first of [`ENDING`] orders the end. A second one more
    /// than [`SAME_ORDER`] later ends the process at once, by its default action. All other signals
    /// change nothing.
    pub fn on_signals(sandbox: SandboxMode) -> Result<Stop> {
        let (reader, writer) = UnixStream::pair().context("socket pair for signals")?;
        // With systemd as the keeper, SIGUSR2 acts as a kill: the next process continues.
        let others = OTHERS.iter();
        let others = others.filter(|signal| **signal != SIGUSR2 || !is_systemd());
        let signals = Signals::new(ENDING.iter().chain(others)).context("signal handlers")?;
        let order = writer.try_clone().context("socket pair for signals")?;
        let hangups = Hangups::default();
        let told = hangups.clone();
        spawn_early("signals", sandbox, move || answer(signals, &order, &told))?;
        Ok(Stop {
            reader,
            writer,
            hangups,
        })
    }

    /// SIGHUP from now on; several that come while one is handled are one.
    pub fn hangups(&self) -> Receiver<()> {
        let (told, hangups) = sync_channel(1);
        *self.hangups.lock().unpoisoned() = Some(told);
        hangups
    }

    /// A descriptor that becomes readable when it is time to end.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        Ok(self
            .reader
            .try_clone()
            .context("socket pair for signals")?
            .into())
    }

    /// Whether the order was given.
    pub fn is_ordered(&self) -> bool {
        let mut fds = [PollFd::new(&self.reader, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Gives the order.
    pub fn now(&self) {
        give(&self.writer);
    }
}

fn give(mut order: &UnixStream) {
    // A full socket is readable, too.
    let _ = order.write(&[0]);
}

/// The thread for signals; it lives as long as the process.
fn answer(mut signals: Signals, order: &UnixStream, hangups: &Hangups) {
    let mut first: Option<Instant> = None;
    let mut logged: Option<Instant> = None;
    for signal in signals.forever() {
        let name = signal_name(signal).unwrap_or("signal");
        if signal == SIGHUP
            && let Some(told) = &*hangups.lock().unpoisoned()
        {
            let _ = told.try_send(());
            continue;
        }
        if !ENDING.contains(&signal) {
            if logged.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
                logged = Some(Instant::now());
                tell(signal, name);
            }
            continue;
        }
        match first {
            None => {
                first = Some(Instant::now());
                give(order);
            }
            Some(at) if at.elapsed() < SAME_ORDER => {}
            Some(_) => {
                tracing::warn!(
                    "a second {name}: ending at once; unflushed writes may be lost with the \
                     machine's power"
                );
                let _ = emulate_default_handler(signal);
            }
        }
    }
}

/// Logs that a signal changes nothing.
fn tell(signal: i32, name: &str) {
    match signal {
        SIGHUP => tracing::info!(
            "{name} has no effect: only vnvme daemon rereads its configuration; SIGTERM stops the \
             process"
        ),
        SIGUSR1 | SIGUSR2 => {
            tracing::info!("{name} has no effect; \"vnvme stats\" shows the counters")
        }
        SIGXFSZ => tracing::warn!(
            "a write went beyond the limit of files' sizes and failed; raise it with: \
             ulimit -f unlimited"
        ),
        _ => tracing::info!("{name} has no effect"),
    }
}
