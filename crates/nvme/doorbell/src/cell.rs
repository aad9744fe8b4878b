//! Interface to memory: one 32-bit doorbell or EventIdx cell, and the fences between accesses to
//! cells.
//!
//! # Why these orders are sufficient and necessary
//!
//! *Entries.* A host writes its queue entries, then the doorbell with release; the controller reads
//! the doorbell with acquire, then the entries. Without either the controller may fetch the
//! previous content of the entry.
//!
//! *Wake-ups.* Host: store shadow, [`HostFence`](ProtocolAccess::HostFence), load EventIdx.
//! Controller: store EventIdx, [`ArmFence`](ProtocolAccess::ArmFence), load shadow. Each side
//! writes its own cell and then reads the peer's. Only full fences on both sides exclude that both
//! read the old value; the host would then not ring and the controller would sleep. With them,
//! either the host sees the armed EventIdx and rings, or the controller sees the new doorbell and
//! stays awake. Release and acquire are not sufficient, on x86-64 either: its stores may pass later
//! loads.
//!
//! `tests/loom.rs` removes each of them in turn and asserts that the model then finds a failure.

use core::sync::atomic::{AtomicU32, Ordering, fence};

/// A named access of the protocol to shared memory.
///
/// The name identifies an access or fence of the protocol; [`ProtocolAccess::ordering`] is the
/// memory order that it needs. A model or a fault injector implements [`Cell`] and treats single
/// steps differently, in the production code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProtocolAccess {
    /// Host loads the previous value of the shadow doorbell, if it keeps no copy of its own.
    HostPrevious,
    /// Host stores the shadow doorbell: the queue entries written before become
    /// visible with it (release).
    HostShadow,
    /// Host: full fence between its shadow store and its EventIdx load.
    HostFence,
    /// Host loads EventIdx.
    HostEventIdx,
    /// Host writes the doorbell register (release, as a store to device
    /// memory behind a write barrier).
    HostRegister,
    /// Controller loads the shadow doorbell (acquire: the entries before that index are visible).
    PollShadow,
    /// Controller loads the doorbell register's cell (acquire).
    PollRegister,
    /// Controller stores EventIdx while it polls.
    Park,
    /// Controller stores EventIdx before it sleeps.
    ArmEventIdx,
    /// Controller: full fence between its EventIdx store and its last read of the doorbells.
    ArmFence,
    /// Controller's last read of the shadow doorbell, after [`ProtocolAccess::ArmFence`] (acquire).
    ArmShadow,
    /// Controller's last read of the doorbell register's cell (acquire).
    ArmRegister,
    /// Controller stores the first value of a cell when a queue or the buffers come into use.
    Initialise,
}

impl ProtocolAccess {
    /// Returns the memory order of the step.
    #[inline]
    #[must_use]
    pub const fn ordering(self) -> Ordering {
        match self {
            Self::HostShadow | Self::HostRegister => Ordering::Release,
            Self::PollShadow | Self::PollRegister | Self::ArmShadow | Self::ArmRegister => {
                Ordering::Acquire
            }
            Self::HostFence | Self::ArmFence => Ordering::SeqCst,
            Self::HostPrevious
            | Self::HostEventIdx
            | Self::Park
            | Self::ArmEventIdx
            | Self::Initialise => Ordering::Relaxed,
        }
    }
}

/// A 32-bit memory cell that the peer maps too. Values are passed in native byte order; in memory
/// they are little-endian.
pub trait Cell {
    /// Reads the cell.
    fn load(&self, step: ProtocolAccess) -> u32;
    /// Writes the cell.
    fn store(&self, value: u32, step: ProtocolAccess);
    /// Orders this thread's memory accesses before and after the fence, for all cells and not only
    /// this one.
    fn fence(&self, step: ProtocolAccess);
}

impl Cell for AtomicU32 {
    #[inline]
    fn load(&self, step: ProtocolAccess) -> u32 {
        u32::from_le(AtomicU32::load(self, step.ordering()))
    }

    #[inline]
    fn store(&self, value: u32, step: ProtocolAccess) {
        AtomicU32::store(self, value.to_le(), step.ordering());
    }

    #[inline]
    fn fence(&self, step: ProtocolAccess) {
        fence(step.ordering());
    }
}
