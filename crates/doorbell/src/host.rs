//! The host's side: publish a doorbell value and decide whether the register has to be rung.

use crate::{
    Cell, Step,
    ring::{need_event, need_event_annex},
};

/// How a host compares with EventIdx.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compare {
    /// As Linux: 16-bit wrapping differences ([`need_event`]).
    #[default]
    Linux,
    /// As the annex of NVMe Base 2.1 (B.5.2): differences modulo the queue's depth ([`need_event_annex`]).
    Annex,
}

/// What kind of host plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HostBehaviour {
    /// Shadow doorbells with the full barrier (Linux since 2018).
    #[default]
    Shadow,
    /// Shadow doorbells without a barrier between shadow store and EventIdx load (Linux before 2018).
    Barrierless,
    /// Rings the register and never touches the shadow entry.
    RegisterOnly,
    /// Writes the shadow entry and rings the register every time.
    Both,
}

/// Whether the doorbell register has to be written with the value just published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Ring {
    /// The controller asked for it: write the register.
    Register,
    /// The controller sees the shadow entry by itself.
    Silent,
}

/// One doorbell as the host sees it: an SQ tail or a CQ head.
#[derive(Debug, Clone)]
pub struct Publisher {
    old: u16,
    size: u32,
    behaviour: HostBehaviour,
    compare: Compare,
}

impl Publisher {
    /// A doorbell of a new queue of `size` entries, at index 0, of a host with the barrier that compares as Linux does.
    #[must_use]
    pub const fn new(size: u32) -> Self {
        Self::with_behaviour(size, HostBehaviour::Shadow, Compare::Linux)
    }

    /// A doorbell of a host that behaves as told.
    #[must_use]
    pub const fn with_behaviour(size: u32, behaviour: HostBehaviour, compare: Compare) -> Self {
        Self {
            old: 0,
            size,
            behaviour,
            compare,
        }
    }

    /// Publishes `new` in the shadow entry and says whether the register has to be written too.
    #[inline]
    pub fn publish<C: Cell>(&mut self, shadow: &C, eventidx: &C, new: u16) -> Ring {
        let old = core::mem::replace(&mut self.old, new);
        if self.behaviour == HostBehaviour::RegisterOnly {
            return Ring::Register;
        }
        shadow.store(u32::from(new), Step::HostShadow);
        if self.behaviour != HostBehaviour::Barrierless {
            C::fence(Step::HostFence);
        }
        // Only 16 bits count: a ring has at most 65,536 entries, and Linux reads no more of the entry.
        let event_idx = eventidx.load(Step::HostEventIdx) as u16;
        let ring = match self.compare {
            Compare::Linux => need_event(event_idx, new, old),
            Compare::Annex => need_event_annex(event_idx, new, old, self.size),
        };
        if ring || self.behaviour == HostBehaviour::Both {
            Ring::Register
        } else {
            Ring::Silent
        }
    }
}
