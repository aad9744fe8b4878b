//! Atomic writes: the promise of a volume ([`AtomicWrites`]), and a volume that makes small writes
//! atomic with a journal ([`AtomicVolume`]).

mod file;
mod journal;
mod locks;
mod promise;
mod queue;
mod volume;

pub use promise::{AtomicWrites, MAX_ATOMIC_UNIT};
pub use volume::AtomicVolume;
