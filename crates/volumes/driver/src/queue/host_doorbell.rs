//! Doorbells as the host writes them: the shadow entry first, then the register if the controller
//! asks for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use doorbell::{HostBehaviour, Publisher, Ring};

use super::ring::ShadowCells;
use crate::transport::{DoorbellCell, Transport};

/// Doorbell (submission queue tail or completion queue head) that the driver writes.
#[derive(Debug)]
pub(crate) struct HostDoorbell {
    publisher: Publisher,
    shadow: Option<ShadowCells>,
    cell: Option<DoorbellCell>,
    transport: Arc<dyn Transport>,
    /// Byte offset of the doorbell register in BAR0.
    offset: u64,
    behaviour: HostBehaviour,
    size: u32,
    /// Number of writes of the doorbell register.
    pub registers: u64,
    /// Number of updates of the shadow doorbell that needed no register write.
    pub silent: u64,
}

impl HostDoorbell {
    pub fn new(
        transport: &Arc<dyn Transport>,
        offset: u64,
        size: u32,
        behaviour: HostBehaviour,
    ) -> Self {
        Self {
            publisher: Publisher::with_behaviour(size, behaviour),
            shadow: None,
            cell: transport.doorbell(offset),
            transport: transport.clone(),
            offset,
            behaviour,
            size,
            registers: 0,
            silent: 0,
        }
    }

    /// Resets the doorbell for newly created queues: index 0, and no shadow doorbell yet.
    pub fn reset(&mut self) {
        self.publisher = Publisher::with_behaviour(self.size, self.behaviour);
        self.shadow = None;
    }

    /// Starts to use a shadow doorbell, while the queue's index is 0.
    pub fn attach(&mut self, cells: Option<ShadowCells>) {
        self.shadow = cells;
    }

    /// Zeroes a shadow doorbell and its EventIdx, before the queue is created.
    pub fn clear(cells: &ShadowCells) {
        let cells = cells.get();
        cells.doorbell.store(0, Ordering::Relaxed);
        cells.eventidx.store(0, Ordering::Relaxed);
    }

    /// Publishes a new index of the queue. The controller sees the entries written before, when it
    /// sees the index.
    #[inline]
    pub fn publish(&mut self, index: u32) {
        let shadow = self.shadow.as_ref().map(ShadowCells::get);
        match self.publisher.publish(shadow, index as u16) {
            Ring::Silent => self.silent += 1,
            Ring::Register => {
                self.registers += 1;
                let stored = self.cell.as_ref().is_some_and(|cell| cell.ring(index));
                if !stored {
                    self.send(index);
                }
            }
        }
    }

    /// Writes the doorbell through the transport, when the register is not mapped or can no longer
    /// be stored to.
    fn send(&mut self, index: u32) {
        if self.cell.take().is_some() {
            let offset = self.offset;
            tracing::error!(
                offset,
                "the server's doorbell file shrank; doorbells are messages"
            );
        }
        // The next check of the device finds that it is lost.
        drop(self.transport.write32(self.offset, index));
    }
}
