//! Controllers of one subsystem and the reservations of their namespace: commands, what they do to
//! others' reads and writes, notifications, and hosts that mean harm; and by which of them a
//! namespace is reached (ANA).
//!
//! `VNVME_RESERVATION_STEPS` says how many steps the random histories have (20,000), and
//! `VNVME_FENCING_LOOPS` how often hosts fence each other (1,000).

mod ana;
mod deaths;
mod fencing;
mod histories;
mod hostile;
mod says;
mod stores;
pub mod world;
