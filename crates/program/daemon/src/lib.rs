//! The daemon: opens volumes, serves disks to their front-ends, changes them at run time, and keeps
//! their state for the next process.
//!
//! [`serve::serve`] starts from a configuration (crate `config`) and returns when the process has
//! to end. [`open`] opens volumes with everything that their options add. Module `front` has the
//! front-ends of the workers. [`manage`] adds, removes and changes disks, on behalf of [`api`].
//! [`keep`] and `record` hold the state that outlives the process. [`confine`] has the sandbox and
//! the processes outside of it, [`registry`] the counters, limits and descriptions of open disks.
#![forbid(unsafe_code)]

pub mod api;
pub mod check;
pub mod confine;
mod export;
mod front;
pub mod keep;
pub mod log;
pub mod manage;
pub mod open;
pub mod parts;
mod record;
pub mod registry;
pub mod serve;
