//! One controller's queues on several workers, all run by the test's thread in any order: whatever
//! the host and the owner do meanwhile, each command is executed once and completed once, and
//! nothing touches memory that was unmapped.

mod attach;
mod bus_master;
mod deaths;
mod histories;
mod interrupts;
mod late;
pub mod other_worker;
mod pressure;
mod resize;
mod rules;
mod world;
