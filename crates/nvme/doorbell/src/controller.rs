//! Controller side: detection of new doorbell values, and the position of EventIdx.

use crate::{
    Cell, ProtocolAccess,
    ring::{before, distance},
};

/// Minimum size of rings for which EventIdx is moved lazily; see [`Watch::park`].
const LAZY_FROM: u32 = 128;

/// The two shared cells of one doorbell in the buffers of Doorbell Buffer
/// Config (NVMe Base 2.1, 5.2.5).
#[derive(Debug)]
pub struct Shadow<'a, C> {
    /// Entry of the Shadow Doorbell buffer, written by the host.
    pub doorbell: &'a C,
    /// Entry of the EventIdx buffer, written by the controller.
    pub eventidx: &'a C,
}

impl<C> Clone for Shadow<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<C> Copy for Shadow<'_, C> {}

/// Cells of one doorbell, borrowed for one call.
#[derive(Debug)]
pub struct Cells<'a, C> {
    /// The doorbell register's cell: the last trapped write, or the mapped doorbell page.
    pub register: &'a C,
    /// The shadow cells, from Doorbell Buffer Config (or the queue's creation, if later) until the
    /// next controller-level reset.
    pub shadow: Option<Shadow<'a, C>>,
}

impl<C> Clone for Cells<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<C> Copy for Cells<'_, C> {}

/// Cell that a doorbell value was read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The value was in the doorbell register.
    Register,
    /// The value was in the Shadow Doorbell buffer.
    Shadow,
}

/// A doorbell value that is not an index of the ring. Such a value is never used; the doorbell
/// keeps its last valid value.
///
/// The standard's response is the asynchronous event Invalid Doorbell Write Value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Invalid {
    /// The value as the host wrote it.
    pub value: u32,
    /// Cell that held the value.
    pub source: Source,
}

impl core::fmt::Display for Invalid {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let place = match self.source {
            Source::Register => "register",
            Source::Shadow => "shadow entry",
        };
        write!(
            f,
            "doorbell value {} in the {place} is outside the ring",
            self.value
        )
    }
}

impl core::error::Error for Invalid {}

/// Result of the check for a new value after EventIdx was armed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Armed {
    /// No new value: a host with the memory barrier will ring the register for its next value.
    /// Before an unlimited sleep, call [`Watch::recheck`] once, a few microseconds later, for hosts
    /// without the barrier.
    Idle,
    /// The host has meanwhile moved the doorbell to this index, so the controller must not sleep.
    Raced(u32),
}

/// State of a [`Watch`], for a controller that is restarted or migrated. The cells themselves are
/// in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchState {
    /// Number of entries in the ring.
    pub size: u32,
    /// Newest index seen.
    pub current: u32,
    /// Shadow entry as last read or initialised, valid or not.
    pub last_shadow: u32,
    /// Register value as last read, valid or not.
    pub last_register: u32,
    /// Whether the host uses the shadow entry.
    pub shadow_live: bool,
    /// EventIdx as last stored.
    pub eventidx: u32,
}

/// The controller's view of one doorbell: an SQ tail or a CQ head. Plain data, owned by one worker.
///
/// # Authoritative cell
///
/// The register is authoritative until the shadow entry is seen to change; from then on only the
/// shadow entry is. This serves hosts that use registers only, hosts that use the shadow entry, and
/// hosts that switch to it after some time (Doorbell Buffer Config on a live queue). A register
/// write of a shadow host is a wake-up and never a value. Its value was in the shadow entry before,
/// and the write may arrive late, when the entry is already ahead of it. If the shadow cells
/// disappear while the queue lives (their memory is unmapped), the register is authoritative again
/// from its next change on, until the entry is back and changes.
///
/// # Life of a queue
///
/// | event | call | cells written |
/// |---|---|---|
/// | queue created, or created again | [`Watch::create`], before the command completes | register := 0; shadow := 0 and EventIdx := 0, if buffers are in use |
/// | Doorbell Buffer Config, queue exists | [`Watch::attach`], before the command completes | shadow := current, EventIdx := current |
/// | Doorbell Buffer Config again | [`Watch::poll`] with the old cells, then [`Watch::attach`] with the new | as above |
/// | buffers' memory unmapped | calls without shadow cells, until it is mapped again | none |
/// | queue deleted | drop | none |
/// | controller-level reset | drop, before CSTS.RDY reads 0 | none, ever again |
///
/// The controller *writes* the shadow entry, which is the host's, because it may hold a value of an
/// earlier life. Older Linux does not clear the buffers on reset, no version clears an entry when
/// it recreates a queue, and a host that ran on registers before the command finds zeroes there.
/// Such a value must not be taken for a doorbell (entries of the earlier life would be executed).
/// It must not hide one either (the host's first value may be equal to it, and the entry would not
/// change). Linux also takes its own previous value from the entry. QEMU's controller writes the
/// entry at Doorbell Buffer Config too, but not at queue creation. The host may not publish before
/// the command completes (NVMe Base 2.1, B.5), so none of its values is overwritten; Linux keeps
/// its I/O queues empty across the command.
#[derive(Debug, Clone)]
pub struct Watch {
    s: WatchState,
    /// Number of entries by which EventIdx may lag behind its best position while the controller
    /// polls.
    slack: u32,
}

impl Watch {
    /// Creates a doorbell at index 0 of a new queue of `size` entries (1 to 65,536) with cells that
    /// all hold 0.
    #[must_use]
    pub const fn new(size: u32) -> Self {
        Self::with(WatchState {
            size,
            current: 0,
            last_shadow: 0,
            last_register: 0,
            shadow_live: false,
            eventidx: 0,
        })
    }

    const fn with(s: WatchState) -> Self {
        let slack = if s.size >= LAZY_FROM { s.size / 4 } else { 0 };
        Self { s, slack }
    }

    /// Creates a doorbell of a new queue of `size` entries, and initialises every cell, regardless
    /// of an earlier queue of the same number. Call it before Create I/O Submission or Completion
    /// Queue completes.
    pub fn create<C: Cell>(size: u32, cells: Cells<'_, C>) -> Self {
        let mut watch = Self::new(size);
        cells.register.store(0, ProtocolAccess::Initialise);
        if let Some(shadow) = cells.shadow {
            watch.attach(shadow);
        }
        watch
    }

    /// Starts to use shadow cells for an existing queue, before Doorbell Buffer Config completes.
    /// When the command names different buffers than before, [`Watch::poll`] the old cells one last
    /// time first.
    ///
    /// EventIdx is armed: the host's first move rings, so that the time of the worker's first look
    /// does not matter.
    pub fn attach<C: Cell>(&mut self, shadow: Shadow<'_, C>) {
        shadow
            .doorbell
            .store(self.s.current, ProtocolAccess::Initialise);
        shadow
            .eventidx
            .store(self.s.current, ProtocolAccess::Initialise);
        self.s.last_shadow = self.s.current;
        self.s.eventidx = self.s.current;
    }

    /// Returns the state for a restarted or migrated controller.
    #[must_use]
    pub const fn state(&self) -> WatchState {
        self.s
    }

    /// Continues from another controller's state, without a write to any cell. `None` when the
    /// state is inconsistent.
    #[must_use]
    pub const fn from_state(state: WatchState) -> Option<Self> {
        if state.current < state.size && state.eventidx < state.size && state.size <= 1 << 16 {
            Some(Self::with(state))
        } else {
            None
        }
    }

    /// Returns the doorbell's index as last read, below the ring's size.
    #[inline]
    #[must_use]
    pub const fn current(&self) -> u32 {
        self.s.current
    }

    /// Returns the number of entries in the ring.
    #[inline]
    #[must_use]
    pub const fn size(&self) -> u32 {
        self.s.size
    }

    /// Returns whether the shadow entry is authoritative, because the host was seen to use it.
    #[inline]
    #[must_use]
    pub const fn shadow_live(&self) -> bool {
        self.s.shadow_live
    }

    /// Returns the newest value of the doorbell: an index of the ring. Entries that the host wrote
    /// before it are visible.
    ///
    /// # Errors
    /// [`Invalid`], once per value, when the host wrote a value outside the ring; the next call
    /// returns the last good index again.
    #[inline]
    pub fn poll<C: Cell>(&mut self, cells: Cells<'_, C>) -> Result<u32, Invalid> {
        self.look(
            cells,
            ProtocolAccess::PollShadow,
            ProtocolAccess::PollRegister,
        )
    }

    /// Returns whether [`Watch::poll`] would return a new value. Only a hint for when to call it.
    #[inline]
    #[must_use]
    pub fn has_news<C: Cell>(&self, cells: Cells<'_, C>) -> bool {
        let register = || cells.register.load(ProtocolAccess::PollRegister) != self.s.last_register;
        match cells.shadow {
            Some(shadow) => {
                shadow.doorbell.load(ProtocolAccess::PollShadow) != self.s.last_shadow
                    || (!self.s.shadow_live && register())
            }
            None => self.s.shadow_live || register(),
        }
    }

    /// Keeps EventIdx where a host does not ring, not even when the ring wraps, while the
    /// controller polls. For SQ tails, after each [`Watch::poll`] that found a new value.
    ///
    /// The best position is one entry behind the newest value (see [`ring`](crate::ring)). EventIdx
    /// entries of eight queues share a cache line that every host CPU reads at each doorbell. In
    /// rings of 128 entries and more EventIdx is therefore moved only when it lags by more than a
    /// quarter of the ring. A host then rings needlessly only if it publishes more than three
    /// quarters of the ring between two looks, and at most once per three quarters of a ring.
    #[inline]
    pub fn park<C: Cell>(&mut self, cells: Cells<'_, C>) {
        // The host's furthest index, less the slack. The slack is below the size, so nothing wraps
        // twice.
        let furthest = before(self.s.current, self.s.size);
        let lag = if furthest >= self.slack {
            furthest - self.slack
        } else {
            furthest + self.s.size - self.slack
        };
        self.park_until(cells, lag);
    }

    /// Keeps EventIdx where a host that stays within the index `horizon` does not ring; stores only
    /// if necessary.
    ///
    /// For CQ heads: the host cannot pass the CQ's tail, so call it with the new tail as `horizon`
    /// before entries are posted. No head ever rings then, at the cost of about one store per turn
    /// of the ring.
    #[inline]
    pub fn park_until<C: Cell>(&mut self, cells: Cells<'_, C>, horizon: u32) {
        let Some(shadow) = cells.shadow else {
            return;
        };
        if let Some(best) = self.better_park(horizon) {
            self.s.eventidx = best;
            shadow.eventidx.store(best, ProtocolAccess::Park);
        }
    }

    /// Returns whether [`Watch::park_until`] would store, assuming that there are shadow cells.
    /// Called before the cells are looked up.
    #[inline]
    #[must_use]
    pub const fn needs_park(&self, horizon: u32) -> bool {
        self.better_park(horizon).is_some()
    }

    /// Returns the new position of EventIdx for this horizon, if it has to move.
    #[inline]
    const fn better_park(&self, horizon: u32) -> Option<u32> {
        let WatchState {
            size,
            current,
            eventidx,
            shadow_live,
            ..
        } = self.s;
        let best = if !shadow_live {
            // EventIdx stays armed while the register is authoritative. A host that switches to the
            // shadow entry then rings with its first value, even if the ring has wrapped and the
            // entry held that value already.
            current
        } else if distance(current, eventidx, size) < distance(current, horizon, size) {
            before(current, size)
        } else {
            return None;
        };
        if best == eventidx { None } else { Some(best) }
    }

    /// Places EventIdx so that the host's next move rings, and then checks for a new value once
    /// more.
    ///
    /// For SQ tails before the worker sleeps; for CQ heads when the CQ is full and completions wait
    /// for room. On [`Armed::Raced`] the controller continues as after a poll and parks again, or
    /// arms again.
    ///
    /// # Errors
    /// The error of [`Watch::poll`]: the host wrote a value meanwhile; arm again before a sleep.
    pub fn arm<C: Cell>(&mut self, cells: Cells<'_, C>) -> Result<Armed, Invalid> {
        if let Some(shadow) = cells.shadow {
            self.s.eventidx = self.s.current;
            shadow
                .eventidx
                .store(self.s.eventidx, ProtocolAccess::ArmEventIdx);
            shadow.doorbell.fence(ProtocolAccess::ArmFence);
        }
        self.recheck(cells)
    }

    /// Checks for a new value once more after [`Armed::Idle`], for hosts without a barrier between
    /// shadow store and EventIdx load (Linux before 2018, on any machine whose stores may pass
    /// later loads).
    ///
    /// Such a host may have read the parked EventIdx, decided not to ring, and still have its
    /// shadow store in the CPU's store buffer when [`Watch::arm`] looked. The store cannot stay
    /// there: wait some microseconds before this call.
    ///
    /// # Errors
    /// [`Invalid`], as from [`Watch::poll`], when the host wrote a value outside the ring.
    pub fn recheck<C: Cell>(&mut self, cells: Cells<'_, C>) -> Result<Armed, Invalid> {
        let armed_at = self.s.current;
        let now = self.look(
            cells,
            ProtocolAccess::ArmShadow,
            ProtocolAccess::ArmRegister,
        )?;
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
        shadow_step: ProtocolAccess,
        register_step: ProtocolAccess,
    ) -> Result<u32, Invalid> {
        if let Some(shadow) = cells.shadow {
            let value = shadow.doorbell.load(shadow_step);
            if value != self.s.last_shadow {
                self.s.last_shadow = value;
                self.s.shadow_live = true;
                return self.take(value, Source::Shadow);
            }
            if self.s.shadow_live {
                return Ok(self.s.current);
            }
        } else if self.s.shadow_live {
            // The register's present value was rung for an index that the entry had long shown.
            self.s.shadow_live = false;
            self.s.last_register = cells.register.load(register_step);
            return Ok(self.s.current);
        }
        let value = cells.register.load(register_step);
        if value != self.s.last_register {
            self.s.last_register = value;
            // A shadow host stored the entry before it rang, perhaps between the two loads above.
            // If its entry were not read now, it could return to the value of `last_shadow`
            // unnoticed.
            if let Some(shadow) = cells.shadow {
                let value = shadow.doorbell.load(shadow_step);
                if value != self.s.last_shadow {
                    self.s.last_shadow = value;
                    self.s.shadow_live = true;
                    return self.take(value, Source::Shadow);
                }
            }
            return self.take(value, Source::Register);
        }
        Ok(self.s.current)
    }

    #[inline]
    fn take(&mut self, value: u32, source: Source) -> Result<u32, Invalid> {
        if value >= self.s.size {
            return Err(Invalid { value, source });
        }
        self.s.current = value;
        Ok(value)
    }
}
