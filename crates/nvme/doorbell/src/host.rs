//! Host side: publication of doorbell values, and the decision whether the register must be
//! written.

use crate::{
    Cell, ProtocolAccess, Shadow,
    ring::{need_event, need_event_annex},
};

/// Kind of comparison with which a host decides from EventIdx whether to ring the register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compare {
    /// Linux: 16-bit wrapping differences ([`need_event`]).
    Linux,
    /// Annex of NVMe Base 2.1 (B.5): differences modulo the queue's depth ([`need_event_annex`]).
    Annex,
}

/// How a host uses the shadow entry of a doorbell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShadowUse {
    /// The host publishes in the shadow entry, and rings the register when EventIdx asks for it.
    WhenAsked,
    /// The host publishes in the shadow entry, and rings the register every time.
    AndRegister,
    /// The host never accesses the shadow entry.
    Never,
}

/// Source of the doorbell's previous value, for the comparison with EventIdx.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Previous {
    /// The host remembers the previous value in its own memory.
    Own,
    /// The host reads the previous value back from the shadow entry.
    Entry,
}

/// Behaviour of a host. A driver uses [`HostBehaviour::STANDARD`]; tests emulate the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostBehaviour {
    /// Use of the shadow entry.
    pub shadow: ShadowUse,
    /// Whether the host has a full barrier between shadow store and EventIdx load.
    pub barrier: bool,
    /// Kind of comparison with EventIdx, see [`Compare`].
    pub compare: Compare,
    /// Source of the doorbell's previous value, see [`Previous`].
    pub previous: Previous,
}

impl HostBehaviour {
    /// A host that follows the protocol fully.
    pub const STANDARD: Self = Self {
        shadow: ShadowUse::WhenAsked,
        barrier: true,
        compare: Compare::Linux,
        previous: Previous::Own,
    };
    /// Linux since 2018, which follows the standard.
    pub const LINUX: Self = Self {
        previous: Previous::Entry,
        ..Self::STANDARD
    };
    /// Linux before 2018, which lacks the barrier.
    pub const BARRIERLESS: Self = Self {
        barrier: false,
        ..Self::LINUX
    };
    /// A host that follows the standard's annex to the letter.
    pub const ANNEX: Self = Self {
        compare: Compare::Annex,
        ..Self::STANDARD
    };
    /// A host that rings the register and never accesses the shadow entry.
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

/// Decision whether the doorbell register must be written with the published value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Ring {
    /// The register must be written.
    Register,
    /// No register write is needed: the controller polls the shadow entry.
    Silent,
}

/// The host's view of one doorbell: an SQ tail or a CQ head. Plain data, owned by the queue's
/// owner.
#[derive(Debug, Clone)]
pub struct Publisher {
    old: u16,
    size: u32,
    behaviour: HostBehaviour,
}

impl Publisher {
    /// Creates a doorbell at index 0 of a new queue of `size` entries.
    #[must_use]
    pub const fn new(size: u32) -> Self {
        Self::with_behaviour(size, HostBehaviour::STANDARD)
    }

    /// Creates a doorbell at index 0 of a new queue of `size` entries, for a host with this
    /// behaviour.
    #[must_use]
    pub const fn with_behaviour(size: u32, behaviour: HostBehaviour) -> Self {
        Self {
            old: 0,
            size,
            behaviour,
        }
    }

    /// Publishes `new` in the shadow entry, if there is one, and returns whether the register must
    /// be written too.
    ///
    /// All earlier writes of the host (queue entries) are visible to a controller that sees `new`
    /// there. A write to the register must be ordered after those too, by the means of the
    /// register's memory.
    ///
    /// `shadow` is `None` until Doorbell Buffer Config has completed with success, and again once
    /// the controller is reset.
    #[inline]
    pub fn publish<C: Cell>(&mut self, shadow: Option<Shadow<'_, C>>, new: u16) -> Ring {
        let own = core::mem::replace(&mut self.old, new);
        let Some(Shadow { doorbell, eventidx }) = shadow else {
            return Ring::Register;
        };
        if self.behaviour.shadow == ShadowUse::Never {
            return Ring::Register;
        }
        // Only 16 bits matter: a ring has at most 65,536 entries, and Linux reads no more of a
        // cell.
        let old = match self.behaviour.previous {
            Previous::Own => own,
            Previous::Entry => doorbell.load(ProtocolAccess::HostPrevious) as u16,
        };
        doorbell.store(u32::from(new), ProtocolAccess::HostShadow);
        if self.behaviour.barrier {
            doorbell.fence(ProtocolAccess::HostFence);
        }
        let event_idx = eventidx.load(ProtocolAccess::HostEventIdx) as u16;
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
