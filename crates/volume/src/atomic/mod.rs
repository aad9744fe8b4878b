//! Writes that are atomic: which ones a volume promises ([`AtomicWrites`]).

mod promise;

pub use promise::{AtomicWrites, MAX_ATOMIC_UNIT};
