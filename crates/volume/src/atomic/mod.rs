//! Writes that are atomic: which ones a volume promises ([`AtomicWrites`]), and a volume that makes
//! them so by a journal ([`AtomicVolume`]).

mod file;
mod journal;
mod locks;
mod promise;
mod queue;
mod volume;

pub use promise::{AtomicWrites, MAX_ATOMIC_UNIT};
pub use volume::AtomicVolume;
