//! The host's side: publish a doorbell value and decide whether the register has to be rung.

use crate::{
    Cell, Shadow, Step,
    ring::{need_event, need_event_annex},
};

/// How a host compares with EventIdx.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compare {
    /// As Linux: 16-bit wrapping differences ([`need_event`]).
    Linux,
    /// As the annex of NVMe Base 2.1 (B.5): differences modulo the queue's
    /// depth ([`need_event_annex`]).
    Annex,
}

/// What a host does with the shadow entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShadowUse {
    /// Publishes there and rings when EventIdx asks for it.
    WhenAsked,
    /// Publishes there and rings every time.
    AndRegister,
    /// Never touches it.
    Never,
}

/// Where a host takes the doorbell's previous value from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Previous {
    /// From its own memory.
    Own,
    /// From the shadow entry.
    Entry,
}

/// What kind of host plays. A driver uses [`HostBehaviour::STANDARD`]; tests play the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostBehaviour {
    /// What it does with the shadow entry.
    pub shadow: ShadowUse,
    /// Whether there is a full barrier between shadow store and EventIdx load.
    pub barrier: bool,
    /// How it compares with EventIdx.
    pub compare: Compare,
    /// Where it takes the previous value from.
    pub previous: Previous,
}

impl HostBehaviour {
    /// A host that does everything right.
    pub const STANDARD: Self = Self {
        shadow: ShadowUse::WhenAsked,
        barrier: true,
        compare: Compare::Linux,
        previous: Previous::Own,
    };
    /// Linux since 2018.
    pub const LINUX: Self = Self {
        previous: Previous::Entry,
        ..Self::STANDARD
    };
    /// Linux before 2018: no barrier.
    pub const BARRIERLESS: Self = Self {
        barrier: false,
        ..Self::LINUX
    };
    /// A host that follows the standard's annex to the letter.
    pub const ANNEX: Self = Self {
        compare: Compare::Annex,
        ..Self::STANDARD
    };
    /// A host that rings the register and never touches the shadow entry.
    pub const REGISTER_ONLY: Self = Self {
        shadow: ShadowUse::Never,
        ..Self::STANDARD
    };
    /// A host that writes the shadow entry and rings the register every time.
    pub const ALWAYS_RINGS: Self = Self {
        shadow: ShadowUse::AndRegister,
        ..Self::STANDARD
    };
}

/// Whether the doorbell register has to be written with the value just published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Ring {
    /// Write the register.
    Register,
    /// The controller sees the shadow entry by itself.
    Silent,
}

/// One doorbell as the host sees it: an SQ tail or a CQ head. Plain data,
/// owned by the queue's owner.
#[derive(Debug, Clone)]
pub struct Publisher {
    old: u16,
    size: u32,
    behaviour: HostBehaviour,
}

impl Publisher {
    /// A doorbell at index 0 of a new queue of `size` entries.
    #[must_use]
    pub const fn new(size: u32) -> Self {
        Self::with_behaviour(size, HostBehaviour::STANDARD)
    }

    /// A doorbell of a host that behaves as told.
    #[must_use]
    pub const fn with_behaviour(size: u32, behaviour: HostBehaviour) -> Self {
        Self {
            old: 0,
            size,
            behaviour,
        }
    }

    /// Publishes `new` in the shadow entry, if there is one, and says whether the
    /// register has to be written too.
    ///
    /// Everything that the host wrote before (queue entries) is visible to a controller that
    /// sees `new` there. A write to the register has to be ordered after those too, by the means
    /// of the register's memory.
    ///
    /// `shadow` is `None` until Doorbell Buffer Config has completed with success, and again from
    /// the moment that the controller is reset.
    #[inline]
    pub fn publish<C: Cell>(&mut self, shadow: Option<Shadow<'_, C>>, new: u16) -> Ring {
        let own = core::mem::replace(&mut self.old, new);
        let Some(Shadow { doorbell, eventidx }) = shadow else {
            return Ring::Register;
        };
        if self.behaviour.shadow == ShadowUse::Never {
            return Ring::Register;
        }
        // Only 16 bits count: a ring has at most 65,536 entries, and Linux reads no more of a cell.
        let old = match self.behaviour.previous {
            Previous::Own => own,
            Previous::Entry => doorbell.load(Step::HostPrevious) as u16,
        };
        doorbell.store(u32::from(new), Step::HostShadow);
        if self.behaviour.barrier {
            doorbell.fence(Step::HostFence);
        }
        let event_idx = eventidx.load(Step::HostEventIdx) as u16;
        let asked = match self.behaviour.compare {
            Compare::Linux => need_event(event_idx, new, old),
            Compare::Annex => need_event_annex(event_idx, new, old, self.size),
        };
        if asked || self.behaviour.shadow == ShadowUse::AndRegister {
            Ring::Register
        } else {
            Ring::Silent
        }
    }
}
