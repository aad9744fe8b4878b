//! Doorbell cells of all queues: the register page, and the shadow buffers once the host has
//! configured them.

use dma::{Access, DmaError, DmaMap, SharedPages};
use doorbell::{Cells, Shadow};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use crate::pci::DOORBELL_OFFSET;

/// Kind of doorbell: submission queue tail or completion queue head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DoorbellKind {
    SqTail,
    CqHead,
}

impl From<DoorbellKind> for probes::Doorbell {
    fn from(which: DoorbellKind) -> Self {
        match which {
            DoorbellKind::SqTail => probes::Doorbell::SqTail,
            DoorbellKind::CqHead => probes::Doorbell::CqHead,
        }
    }
}

/// Triggers the trace point of an EventIdx store, if EventIdx has changed.
#[inline]
pub(super) fn trace_eventidx(
    controller: u16,
    qid: u16,
    which: DoorbellKind,
    before: u32,
    watch: &doorbell::Watch,
) {
    let now = watch.state().eventidx;
    if now != before {
        probes::eventidx(controller, qid, which.into(), now);
    }
}

/// Returns the index of a doorbell in the register page and in the shadow buffers (CAP.DSTRD is 0).
pub(super) fn index(qid: u16, which: DoorbellKind) -> usize {
    usize::from(qid) * 2 + usize::from(which == DoorbellKind::CqHead)
}

/// Memory of the shadow doorbell buffer and of the EventIdx buffer.
pub(super) type FoundBuffers = (dma::Cells, dma::Cells);

struct Buffers {
    shadow_iova: u64,
    eventidx_iova: u64,
    found: Option<FoundBuffers>,
}

pub(super) struct Doorbells {
    page: Arc<SharedPages>,
    buffers: Option<Buffers>,
    cells: usize,
}

impl Doorbells {
    pub fn new(page: Arc<SharedPages>, queues: u16) -> Self {
        Doorbells {
            page,
            buffers: None,
            cells: usize::from(queues) * 2,
        }
    }

    pub fn page(&self) -> &Arc<SharedPages> {
        &self.page
    }

    /// Replaces the page, while there is no queue.
    pub fn replace(&mut self, page: Arc<SharedPages>) {
        self.page = page;
    }

    /// Returns the register cell of one doorbell; `None` if the queue ID is too large.
    pub fn register(&self, qid: u16, which: DoorbellKind) -> Option<&AtomicU32> {
        self.page
            .cell(DOORBELL_OFFSET as usize / 4 + index(qid, which))
    }

    /// Returns all cells of one doorbell: register, shadow entry and EventIdx.
    #[inline]
    pub fn cells(&self, qid: u16, which: DoorbellKind) -> Option<Cells<'_, AtomicU32>> {
        let at = index(qid, which);
        let register = self.page.cell(DOORBELL_OFFSET as usize / 4 + at)?;
        let shadow = match &self.buffers {
            Some(Buffers {
                found: Some((shadow, eventidx)),
                ..
            }) => Some(Shadow {
                doorbell: shadow.get(at)?,
                eventidx: eventidx.get(at)?,
            }),
            _ => None,
        };
        Some(Cells { register, shadow })
    }

    /// Returns whether shadow buffers are configured and their memory is mapped.
    pub fn shadowed(&self) -> bool {
        self.buffers.as_ref().is_some_and(|b| b.found.is_some())
    }

    /// Sets the buffers of Doorbell Buffer Config. If `found` is `None`, their memory is looked up
    /// when a window is mapped.
    pub fn configure(&mut self, shadow_iova: u64, eventidx_iova: u64, found: Option<FoundBuffers>) {
        self.buffers = Some(Buffers {
            shadow_iova,
            eventidx_iova,
            found,
        });
    }

    /// Looks up the memory of both shadow buffers.
    pub fn find(&self, dma: &DmaMap, shadow: u64, eventidx: u64) -> Result<FoundBuffers, DmaError> {
        // The controller writes the initial values of doorbells to the shadow buffer.
        let shadow = dma::Cells::resolve(dma, shadow, self.cells, Access::Write)?;
        let eventidx = dma::Cells::resolve(dma, eventidx, self.cells, Access::Write)?;
        Ok((shadow, eventidx))
    }

    /// Returns the guest addresses of the two shadow buffers, if configured.
    pub fn buffers(&self) -> Option<(u64, u64)> {
        let buffers = self.buffers.as_ref()?;
        Some((buffers.shadow_iova, buffers.eventidx_iova))
    }

    /// Returns the size of each shadow buffer in bytes, as far as it is used.
    pub fn buffer_size(&self) -> u64 {
        self.cells as u64 * 4
    }

    /// Removes the shadow buffers in a controller-level reset, after which they are never accessed.
    pub fn forget(&mut self) {
        self.buffers = None;
    }

    /// Sets all doorbell registers to zero.
    pub fn clear(&self) {
        for at in 0..self.cells {
            if let Some(cell) = self.page.cell(DOORBELL_OFFSET as usize / 4 + at) {
                cell.store(0, std::sync::atomic::Ordering::Relaxed);
            }
        }
    }

    /// Returns whether a part of the shadow buffers lies in this range of IOVAs.
    pub fn lie_in(&self, iova: u64, len: u64) -> bool {
        let bytes = self.buffer_size();
        let hit = |at: u64| iova < at.saturating_add(bytes) && at < iova.saturating_add(len);
        matches!(&self.buffers, Some(b) if hit(b.shadow_iova) || hit(b.eventidx_iova))
    }

    /// Releases the shadow buffers after their memory was unmapped.
    pub fn release(&mut self) {
        if let Some(buffers) = &mut self.buffers {
            buffers.found = None;
        }
    }

    /// Looks up unmapped shadow buffers after a window was mapped. Returns whether they were found.
    pub fn mapped(&mut self, dma: &DmaMap) -> bool {
        let Some(Buffers {
            shadow_iova,
            eventidx_iova,
            found: None,
        }) = self.buffers
        else {
            return false;
        };
        let Ok(found) = self.find(dma, shadow_iova, eventidx_iova) else {
            return false;
        };
        self.configure(shadow_iova, eventidx_iova, Some(found));
        true
    }
}
