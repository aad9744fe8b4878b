//! Interface to the list of a disk's kept descriptors, for crates that know no keeper.

use crate::{Descriptor, DescriptorKind, StateError};
use std::fmt::Debug;
use std::num::NonZeroU32;
use std::os::fd::BorrowedFd;

/// Number of a question to the keeper whether it has done all that it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(
    /// Number of the question; the first one has number 1.
    pub u64,
);

impl Ticket {
    /// Number before that of the first question. A question with this number counts as answered.
    pub const ANSWERED: Self = Self(0);
}

/// Reason why a descriptor of a disk cannot be kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// The keeper does not keep the descriptor, with its reason.
    #[error("{0}")]
    Keeper(String),
    /// The disk's state memory has no room for the descriptor's entry.
    #[error("state memory: {0}")]
    State(String),
}

impl From<StateError> for LedgerError {
    fn from(error: StateError) -> Self {
        Self::State(error.to_string())
    }
}

/// Descriptors of a disk that outlive the process. Each is noted in the state memory before the
/// keeper gets it. After the first error nothing more is kept.
pub trait DescriptorLedger: Debug {
    /// Returns all descriptors that are noted in the state memory.
    fn noted(&self) -> Vec<Descriptor>;

    /// Notes a descriptor and has it kept. A later [`barrier`](Self::barrier) shows that it is.
    ///
    /// # Errors
    /// The descriptor cannot be noted or kept.
    fn keep(
        &mut self,
        kind: DescriptorKind,
        detail: u64,
        fd: BorrowedFd<'_>,
    ) -> Result<NonZeroU32, LedgerError>;

    /// Notes a descriptor that is not kept.
    ///
    /// # Errors
    /// The errors of [`keep`](Self::keep).
    fn note(&mut self, kind: DescriptorKind, detail: u64) -> Result<NonZeroU32, LedgerError>;

    /// Changes the detail in the entry of a descriptor, by a single store.
    fn set_detail(&mut self, number: NonZeroU32, detail: u64);

    /// Removes a descriptor from the keeper and its entry from the state memory.
    fn forget(&mut self, number: NonZeroU32);

    /// Asks the keeper whether it has done all that it was asked for.
    ///
    /// # Errors
    /// The errors of [`keep`](Self::keep).
    fn barrier(&mut self) -> Result<Ticket, LedgerError>;

    /// Returns whether the keeper has answered a barrier.
    fn is_answered(&self, ticket: Ticket) -> bool;

    /// Returns whether an answer of the keeper is outstanding.
    fn is_waiting(&self) -> bool;

    /// Returns whether the keeper needs longer for an answer than a client can wait.
    fn is_late(&self) -> bool;

    /// Returns whether everything has been sent to the keeper.
    fn is_sent(&self) -> bool;

    /// Returns the number of requests that are not sent yet.
    fn backlog(&self) -> usize;

    /// Returns the error after which no further descriptor is kept, if there was one.
    fn failed(&self) -> Option<&LedgerError>;
}
