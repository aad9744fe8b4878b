//! Signal handling: a signal either shuts the process down in order, with all data durable, or has
//! no effect.
//!
//! The default action of nearly all signals ends a process at once. Here each external signal has a
//! defined effect: [`ENDING`] request the shutdown, [`IGNORED_SIGNALS`] are only logged. SIGPIPE is
//! ignored by Rust's start-up code; SIGBUS is handled by `dma`.

use crate::confine::{Unconfined, spawn_early};
use crate::keep::KeeperSession;
use anyhow::{Context, Result};
use config::choices::SandboxMode;
use rustix::event::PollFlags;
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
use sync::{Unpoisoned, readiness};

/// Signals that request the shutdown. SIGXCPU is included because the kernel kills the process a
/// little later (setrlimit(2), RLIMIT_CPU).
const ENDING: [i32; 4] = [SIGTERM, SIGINT, SIGQUIT, SIGXCPU];

/// Signals without effect on the process. SIGHUP is also sent when the terminal of the process
/// closes. SIGXFSZ is sent for a write beyond the file size limit (RLIMIT_FSIZE), which a guest can
/// cause; only the write fails.
const IGNORED_SIGNALS: [i32; 8] = [
    SIGHUP, SIGUSR1, SIGUSR2, SIGXFSZ, SIGALRM, SIGVTALRM, SIGPROF, SIGIO,
];

/// Time after the first signal in which another one counts as the same request. timeout(1) sends
/// two, one to the process and one to its group, and so may an init system and a terminal.
const SAME_ORDER: Duration = Duration::from_secs(1);

/// Minimum interval between log messages about signals that have no effect.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Shutdown request, shared by all workers. Each waits until its own descriptor becomes readable;
/// nothing reads from it, so that all workers see the request.
pub struct StopSignal {
    reader: UnixStream,
    writer: UnixStream,
    /// Receiver of notifications about SIGHUP.
    hangups: Hangups,
}

type Hangups = Arc<Mutex<Option<SyncSender<()>>>>;

impl StopSignal {
    /// Starts handling signals. The first of [`ENDING`] requests the shutdown. Another one more
    /// than [`SAME_ORDER`] later ends the process at once, by its default action. All other signals
    /// have no effect.
    pub fn on_signals(
        _outside: &Unconfined,
        sandbox: SandboxMode,
        keeper: &Arc<KeeperSession>,
    ) -> Result<StopSignal> {
        let (reader, writer) = UnixStream::pair().context("socket pair for signals")?;
        // With systemd as the keeper, SIGUSR2 kills the process, and the next process continues.
        let others = IGNORED_SIGNALS.iter();
        let others = others.filter(|signal| **signal != SIGUSR2 || !keeper.is_systemd());
        let signals = Signals::new(ENDING.iter().chain(others)).context("signal handlers")?;
        let order = writer.try_clone().context("socket pair for signals")?;
        let hangups = Hangups::default();
        let told = hangups.clone();
        let keeper = keeper.clone();
        let answer = move || answer(signals, &order, &told, &keeper);
        spawn_early("signals", sandbox, answer)?;
        Ok(StopSignal {
            reader,
            writer,
            hangups,
        })
    }

    /// Starts receiving SIGHUP; several signals during the handling of one are combined.
    pub fn hangups(&self) -> Receiver<()> {
        let (told, hangups) = sync_channel(1);
        *self.hangups.lock().unpoisoned() = Some(told);
        hangups
    }

    /// Returns a descriptor that becomes readable when the shutdown is requested.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        Ok(self
            .reader
            .try_clone()
            .context("socket pair for signals")?
            .into())
    }

    /// Returns whether the shutdown of the process was requested.
    pub fn is_ordered(&self) -> bool {
        !readiness(&self.reader, PollFlags::IN).is_empty()
    }

    /// Requests the shutdown of the process, as SIGTERM does.
    pub fn now(&self) {
        give(&self.writer);
    }
}

fn give(mut order: &UnixStream) {
    // A full socket is also readable.
    let _ = order.write(&[0]);
}

/// Runs the thread that receives signals, which ends with the process.
fn answer(mut signals: Signals, order: &UnixStream, hangups: &Hangups, keeper: &KeeperSession) {
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
                keeper.own_sockets();
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

/// Logs that a signal has no effect.
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
