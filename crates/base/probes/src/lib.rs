//! Static trace points (USDT) of the doorbell protocol, provider `vnvme`: values that the
//! controller receives by doorbells, and values that it publishes by EventIdx.
//!
//! An untraced probe is one `nop`. The probes are listed by
//! `bpftrace -l 'usdt:target/release/vnvme:vnvme:*'` or `perf list sdt`, and traced by name:
//!
//! ```text
//! bpftrace -e 'usdt:target/release/vnvme:vnvme:mmio_doorbell { @[arg1, arg2] = count(); }' -p PID
//! ```
//!
//! | probe | arguments |
//! |---|---|
//! | `dbbuf_config` | controller, IOVA of the shadow buffer, IOVA of the EventIdx buffer |
//! | `mmio_doorbell` | controller, queue, 0 for an SQ tail or 1 for a CQ head, value written |
//! | `shadow_doorbell` | controller, queue, 0 or 1, value found in memory |
//! | `eventidx` | controller, queue, 0 or 1, value stored |
//!
//! The same events are sent to `tracing` at trace level, target `vnvme::doorbell` (`vnvme --log
//! vnvme::doorbell=trace`).
//!
//! The controller is its number within its worker. This crate exists because a probe is a line of
//! inline assembly: the crates that use it stay free of unsafe code.
//!
//! For the same reason it contains the measurement of the data path: [`cycles`] reads the
//! processor's counter, and a [`Histogram`] records the difference of two readings. Every front-end
//! has log lines that its clients can cause: a [`LogLimit`] keeps them few. An [`IoRecord`] holds
//! results and times of commands, in the same way for every kind of front-end.

mod counter;
#[allow(unsafe_code)] // The instruction that reads the counter.
mod cycles;
mod histogram;
mod log_limit;
mod record;

pub use counter::Counter;
pub use cycles::{cycles, cycles_per_second};
pub use histogram::{Histogram, Summary};
pub use log_limit::{LogLimit, LogLimits};
pub use record::{Failure, IoKind, IoRecord, TIMED_EVERY};

/// Doorbell of a queue pair that a trace point reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbell {
    /// Submission queue tail doorbell.
    SqTail = 0,
    /// Completion queue head doorbell.
    CqHead = 1,
}

/// Trace point: the controller has accepted Doorbell Buffer Config with these guest addresses.
#[inline(always)]
pub fn dbbuf_config(controller: u16, shadow: u64, eventidx: u64) {
    probe::probe!(vnvme, dbbuf_config, u64::from(controller), shadow, eventidx);
    tracing::trace!(target: "vnvme::doorbell", controller, shadow, eventidx, "dbbuf_config");
}

/// Trace point: a message has written this value to a doorbell register.
#[inline(always)]
pub fn mmio_doorbell(controller: u16, qid: u16, which: Doorbell, value: u32) {
    probe::probe!(
        vnvme,
        mmio_doorbell,
        u64::from(controller),
        u64::from(qid),
        which as u64,
        u64::from(value)
    );
    tracing::trace!(target: "vnvme::doorbell", controller, qid, ?which, value, "mmio_doorbell");
}

/// Trace point: a queue's shadow doorbell has this new value.
#[inline(always)]
pub fn shadow_doorbell(controller: u16, qid: u16, which: Doorbell, value: u32) {
    probe::probe!(
        vnvme,
        shadow_doorbell,
        u64::from(controller),
        u64::from(qid),
        which as u64,
        u64::from(value)
    );
    tracing::trace!(target: "vnvme::doorbell", controller, qid, ?which, value, "shadow_doorbell");
}

/// Trace point: this value was stored as EventIdx of a doorbell.
#[inline(always)]
pub fn eventidx(controller: u16, qid: u16, which: Doorbell, value: u32) {
    probe::probe!(
        vnvme,
        eventidx,
        u64::from(controller),
        u64::from(qid),
        which as u64,
        u64::from(value)
    );
    tracing::trace!(target: "vnvme::doorbell", controller, qid, ?which, value, "eventidx");
}
