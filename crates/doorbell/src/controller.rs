//! The controller's side: what the newest doorbell value is, and where EventIdx stands.

use crate::{
    Cell, Step,
    ring::{advance, before, distance},
};

/// The two shared cells of one doorbell in the buffers of Doorbell Buffer Config.
#[derive(Debug)]
pub struct Shadow<'a, C> {
    /// The entry of the Shadow Doorbell buffer: written by the host.
    pub doorbell: &'a C,
    /// The entry of the EventIdx buffer: written by the controller.
    pub eventidx: &'a C,
}

impl<C> Clone for Shadow<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<C> Copy for Shadow<'_, C> {}

/// All cells of one doorbell, borrowed for one call.
#[derive(Debug)]
pub struct Cells<'a, C> {
    /// The doorbell register's cell: where a trapped write is kept, or the mapped doorbell page.
    pub register: &'a C,
    /// The shadow cells, while the buffers of Doorbell Buffer Config are in use for this queue.
    pub shadow: Option<Shadow<'a, C>>,
}

impl<C> Clone for Cells<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<C> Copy for Cells<'_, C> {}

/// Where a doorbell value came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The doorbell register.
    Register,
    /// The Shadow Doorbell buffer.
    Shadow,
}

/// A doorbell value that is no index of the ring. It is never used; the doorbell keeps its last good value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Invalid {
    /// The value as the host wrote it.
    pub value: u32,
    /// Where it was found.
    pub source: Source,
}

/// What was found after EventIdx had been armed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Armed {
    /// Nothing new: a host with the barrier rings the register for its next value. Call [`Watch::recheck`] once, a few
    /// microseconds later, before a sleep without end.
    Idle,
    /// The host moved the doorbell meanwhile, to this index: do not sleep.
    Raced(u32),
}

/// One doorbell as the controller sees it: an SQ tail or a CQ head. Plain data, owned by one worker.
#[derive(Debug, Clone)]
pub struct Watch {
    size: u32,
    current: u32,
    last_shadow: u32,
    last_register: u32,
    shadow_live: bool,
    eventidx: u32,
    slack: u32,
}

impl Watch {
    /// A doorbell of a queue of `size` entries that was just created, at index 0. The register's cell must hold 0.
    #[must_use]
    pub const fn new(size: u32) -> Self {
        Self {
            size,
            current: 0,
            last_shadow: 0,
            last_register: 0,
            shadow_live: false,
            eventidx: 0,
            slack: size / 4,
        }
    }

    /// Starts to use shadow cells: at Doorbell Buffer Config for a queue that exists, at queue creation afterwards.
    pub fn attach<C: Cell>(&mut self, shadow: Shadow<'_, C>) {
        shadow.doorbell.store(self.current, Step::Initialise);
        self.last_shadow = self.current;
        self.shadow_live = false;
        self.eventidx = before(self.current, self.size);
        shadow.eventidx.store(self.eventidx, Step::Initialise);
    }

    /// The index that the last poll found.
    #[inline]
    #[must_use]
    pub const fn current(&self) -> u32 {
        self.current
    }

    /// Entries in the ring.
    #[inline]
    #[must_use]
    pub const fn size(&self) -> u32 {
        self.size
    }

    /// Whether the host has been seen to use the shadow entry.
    #[inline]
    #[must_use]
    pub const fn shadow_live(&self) -> bool {
        self.shadow_live
    }

    /// The newest value of the doorbell.
    ///
    /// # Errors
    /// [`Invalid`], once per value, when the host wrote a value outside the ring.
    #[inline]
    pub fn poll<C: Cell>(&mut self, cells: Cells<'_, C>) -> Result<u32, Invalid> {
        self.look(cells, Step::PollShadow, Step::PollRegister)
    }

    /// Places EventIdx for a controller that polls: the host does not ring, not even when the ring wraps.
    #[inline]
    pub fn park<C: Cell>(&mut self, cells: Cells<'_, C>) {
        let Some(shadow) = cells.shadow else { return };
        let silent_from = advance(self.eventidx, 1, self.size);
        if distance(silent_from, self.current, self.size) > self.slack {
            self.eventidx = before(self.current, self.size);
            shadow.eventidx.store(self.eventidx, Step::Park);
        }
    }

    /// Places EventIdx so that the host's next move rings, and looks once more.
    ///
    /// # Errors
    /// As [`Watch::poll`].
    pub fn arm<C: Cell>(&mut self, cells: Cells<'_, C>) -> Result<Armed, Invalid> {
        if let Some(shadow) = cells.shadow {
            self.eventidx = self.current;
            shadow.eventidx.store(self.eventidx, Step::ArmEventIdx);
            C::fence(Step::ArmFence);
        }
        self.recheck(cells)
    }

    /// Looks once more after [`Armed::Idle`], for hosts that lack the barrier between shadow store and EventIdx load.
    ///
    /// # Errors
    /// As [`Watch::poll`].
    pub fn recheck<C: Cell>(&mut self, cells: Cells<'_, C>) -> Result<Armed, Invalid> {
        let armed_at = self.current;
        let now = self.look(cells, Step::ArmShadow, Step::ArmRegister)?;
        Ok(if now == armed_at {
            Armed::Idle
        } else {
            Armed::Raced(now)
        })
    }

    #[inline]
    fn look<C: Cell>(
        &mut self,
        cells: Cells<'_, C>,
        shadow_step: Step,
        register_step: Step,
    ) -> Result<u32, Invalid> {
        if let Some(shadow) = cells.shadow {
            let value = shadow.doorbell.load(shadow_step);
            if value != self.last_shadow {
                self.last_shadow = value;
                self.shadow_live = true;
                return self.take(value, Source::Shadow);
            }
            if self.shadow_live {
                return Ok(self.current);
            }
        }
        let value = cells.register.load(register_step);
        if value != self.last_register {
            self.last_register = value;
            return self.take(value, Source::Register);
        }
        Ok(self.current)
    }

    #[inline]
    fn take(&mut self, value: u32, source: Source) -> Result<u32, Invalid> {
        if value >= self.size {
            return Err(Invalid { value, source });
        }
        self.current = value;
        Ok(value)
    }
}
