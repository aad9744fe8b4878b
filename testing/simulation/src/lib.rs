//! Deterministic simulation of a host: its disks, the process that serves virtual disks on them,
//! and their guests run on one thread, under a virtual clock, in an order that a seed decides.
//!
//! # Model
//! - *Real*: controllers with their state memory and crash points, and the layers of volumes:
//!   slices, atomic writes, limits, error policies.
//! - *Simulated*: disks ([`disk`]), the worker's loop, the clock, the process boundary, guests.
//! - *Events*: submissions, rounds of the worker, effects and completions of requests, faults and
//!   their ends, deaths of the process between events and at every crash point, losses of power,
//!   resets, aborts, deletions of queues, changes by the operator.
//!
//! # Properties
//! [`guest`] and [`oracle`] check that each command completes at most once, and exactly once unless
//! its queue is reset; that a read returns a value that the order of writes allows; that durable
//! data survives a loss of power; that commands of a disk without faults succeed; that I/O limits
//! hold; and that everything completes within a bound of virtual time after the last fault. No code
//! may panic, and each process accepts the state that the one before has left.
//!
//! # Plans
//! A [`Plan`] lists steps. Each step has random numbers of its own, so that [`shrink`] can leave
//! out steps of a failing plan.
#![forbid(unsafe_code)]

pub mod clock;
pub mod disk;
pub mod guest;
pub mod hostile;
pub mod machine;
pub mod oracle;
pub mod random;
mod shrink;
pub mod trace;
mod world;

pub use shrink::{format_steps, parse_steps, shrink};
pub use world::{Plan, Report, run};

/// Steps of a run that has no plan of its own.
pub const STEPS: u32 = 4000;

#[cfg(test)]
mod tests;
