//! The one loop of the process: it polls, arms and sleeps, and hosts any front-end.
//!
//! *Purpose.* A [`Worker`] is one thread's loop. It owns an [`Io`](volume::Io) (the thread's
//! io_uring), an epoll set, and front-ends: sources of commands for volumes. The loop polls them
//! while there is work, and continues for an adaptive window after the last work ([`Window`]). It
//! then arms everything that can wake the thread, looks once more, and sleeps. Other threads use
//! the worker's [`Handle`] to post jobs, wake the worker up and read its load.
//!
//! *Scope.* This crate uses the ring through `volume::Io`, the epoll set and the clock. Queues,
//! protocols and guest memory belong to the [`Frontend`]. There is no unsafe code.
//!
//! # One round
//!
//! ```text
//! ring completions -> Frontend::complete     the host waits for them: first
//! messages         -> Handle's jobs, Frontend::drain_messages     when the wake flag is up
//! Frontend::poll                             fetch commands and start them, within a budget
//! Io::flush                                  one system call sends what was started
//! Frontend::poll_volumes -> complete         completions that come otherwise than by the ring
//! Frontend::finish_round                     publish, answer what waited
//! ```
//!
//! # An example
//!
//! A front-end that counts the rounds until it has ended:
//!
//! ```
//! use std::rc::Rc;
//! use std::time::Instant;
//! use volume::{Budget, Completion, Io, IoOptions};
//! use worker::{Frontend, Handle, Options, Worker};
//!
//! struct Countdown(u32);
//!
//! impl Frontend for Countdown {
//!     type Error = std::convert::Infallible;
//!     fn poll(&mut self, _now: Instant, _budget: &mut Budget) -> bool {
//!         self.0 = self.0.saturating_sub(1);
//!         self.0 > 0
//!     }
//!     fn complete(&mut self, _completion: Completion) {}
//!     fn in_flight(&self) -> usize {
//!         0
//!     }
//!     fn arm(&mut self) -> bool {
//!         false // nothing arrived meanwhile
//!     }
//!     fn flush(&mut self) {}
//!     fn is_drained(&self) -> bool {
//!         self.0 == 0
//!     }
//! }
//!
//! let handle = Handle::new()?;
//! let io = Rc::new(Io::new(IoOptions::default()));
//! let mut worker = Worker::new(io, &handle, Options::default())?;
//! worker.add(|_| Ok::<_, std::convert::Infallible>(Countdown(3))).unwrap();
//! handle.post(|worker| worker.stop());
//! worker.run()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod acceptor;
mod accounts;
mod armed;
mod contention;
mod descriptors;
mod error;
mod frontend;
mod handle;
mod meter;
mod pace;
mod run_queue;
mod shared;
mod sleep;
mod unannounced;
mod wake;
mod watchdog;
mod window;
#[path = "worker.rs"]
mod worker_loop;

/// Atomic types of the wake flag, which the loom model replaces.
mod sync {
    pub use std::sync::atomic::{AtomicBool, Ordering, fence};
}

pub use acceptor::{AcceptError, AcceptStats, Acceptor, ConnectPace, ConnectRate};
pub use descriptors::{Descriptors, Interest};
pub use error::Error;
pub use frontend::Frontend;
pub use handle::{Handle, Load};
pub use pace::Pace;
pub use unannounced::DEFAULT_MAX_POLL_INTERVAL;
pub use wake::WakeFlag;
pub use watchdog::{Activity, Finding, Pulse, Stalls, Watchdog};
pub use window::{IdleWindow, Window, WindowError};
pub use worker_loop::{Context, Options, Worker};
