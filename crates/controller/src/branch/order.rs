//! What a control half and its branches tell each other.

use crate::engine::{Coalescing, Event, Parcel, Sq};
use crate::irq::IrqSink;
use dma::{Memory, Prot};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64};

/// From the control half to a branch.
pub(crate) enum Order {
    /// These queues live there from now on.
    Adopt(Box<Parcel>),
    /// So does this new submission queue, whose completion queue does already.
    InstallSq(u16, Box<Sq>),
    /// This completion queue is to leave, with its submission queues: answered by [`Event::Left`] or [`Event::Stayed`].
    Recall(u16),
    /// It is to stay after all, if it has not left: answered, at once, by whichever of the two became true.
    Stay,
    /// Answered by [`Event::SqDrained`].
    DeleteSq(u16),
    DeleteCq(u16),
    /// Answered by [`Event::AbortDone`] or [`Event::AbortMissed`].
    Abort {
        sqid: u16,
        cid: u16,
    },
    /// Doorbell Buffer Config.
    Shadow {
        shadow: u64,
        eventidx: u64,
    },
    Map {
        iova: u64,
        len: u64,
        backing: Option<(Memory, u64)>,
        prot: Prot,
    },
    /// Over when [`Progress::quiesced`] has counted it.
    Unmap {
        iova: u64,
        len: u64,
    },
    /// As `Unmap`.
    UnmapAll,
    /// Bus Master Enable, and how often it was set so far. Where it was cleared, as `Unmap`.
    Master {
        on: bool,
        masterings: u64,
    },
    /// Commands in flight are to end early: Bus Master Enable was cleared a while ago.
    Interrupt,
    /// The namespace of this index has so many blocks now.
    Resized {
        index: usize,
        blocks: u64,
    },
    Vector(u16, Option<Arc<dyn IrqSink>>),
    ForgetSinks,
    Features {
        write_cache: bool,
        coalescing: Coalescing,
    },
    /// The controller was enabled.
    Enable {
        page_size: u64,
    },
    StopFetching,
    /// A flush on the controller's own account, by number: answered by [`Event::Flushed`].
    Flush(u64),
    /// A controller-level reset, by number: over when [`Progress::stopped`] says so.
    Stop(u64),
}

/// From a branch to the control half.
pub(crate) struct Report {
    /// The last [`Order::Stop`] before it: what happened before a reset concerns nobody after it.
    pub epoch: u64,
    /// The last [`Order::Flush`] before it.
    pub flush: u64,
    pub event: Event,
}

/// The seed has not been opened yet, and may never be.
pub(crate) const OPENING: u8 = 0;
/// It may be given queues.
pub(crate) const OPEN: u8 = 1;
/// It could not be opened.
pub(crate) const CLOSED: u8 = 2;

/// How far a branch is. Written by it alone.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Progress {
    /// One of the constants above.
    pub state: AtomicU8,
    /// Orders carried out.
    pub handled: AtomicU64,
    /// Orders carried out when no command in flight could touch memory that they had taken away.
    pub quiesced: AtomicU64,
    /// The last reset after which nothing was in flight any more.
    pub stopped: AtomicU64,
}
