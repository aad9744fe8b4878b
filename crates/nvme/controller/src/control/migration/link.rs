//! Connection from the control half to one remote engine.

use crate::engine::Order;
use crate::remote::{EngineReport, OPEN, Progress};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::task::Waker;

/// Channels to one remote engine: orders in one direction, reports and progress in the other.
pub(in crate::control) struct Link {
    pub worker: u16,
    pub orders: Sender<Order>,
    pub reports: Receiver<EngineReport>,
    pub waker: Waker,
    pub progress: Arc<Progress>,
    /// Number of orders sent to the remote engine so far.
    pub sent: u64,
    /// Number of the last order to the remote engine that removed guest memory.
    pub unmap: u64,
    /// Number of the last order to the remote engine about an interrupt receiver or the controller
    /// memory buffer.
    pub receiver: u64,
    /// Number of the last flush that the remote engine has completed.
    pub flushed: u64,
    /// Number of the last order to the remote engine that attached or detached a namespace.
    pub namespaces: u64,
}

/// Ends the remote engine when the controller is dropped: the engine's worker then removes the
/// engine.
impl Drop for Link {
    fn drop(&mut self) {
        let _ = self.orders.send(Order::End);
        self.waker.wake_by_ref();
    }
}

impl Link {
    pub fn send(&mut self, order: Order) {
        let unmap = order.takes_memory_away();
        let receiver = matches!(order, Order::Vector(..) | Order::DeviceMemory(_));
        let namespaces = matches!(order, Order::Attach(..) | Order::Detach(_));
        // Sending fails for an engine that could not be opened, which has no queues and needs no
        // orders.
        if self.orders.send(order).is_ok() {
            self.sent += 1;
            if unmap {
                self.unmap = self.sent;
            }
            if receiver {
                self.receiver = self.sent;
            }
            if namespaces {
                self.namespaces = self.sent;
            }
            self.waker.wake_by_ref();
        }
    }

    /// Returns whether the engine is open, so that it may have queues and outstanding commands.
    pub fn is_open(&self) -> bool {
        self.progress.state.load(Ordering::Acquire) == OPEN
    }

    pub fn handled(&self) -> u64 {
        self.progress.handled.load(Ordering::Acquire)
    }
}
