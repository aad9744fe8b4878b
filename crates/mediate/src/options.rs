//! Options of a virtual queue pair's path to the device.

use crate::slice::Slice;

/// Options of a virtual queue pair's path to the device.
#[derive(Clone, Copy, Debug)]
pub struct DirectOptions {
    /// The guest's namespace ID: commands for another namespace are refused.
    pub nsid: u32,
    /// Accessible blocks.
    pub slice: Slice,
    /// The guest's memory page in bytes (its CC.MPS).
    pub page_size: u64,
    /// Maximum data of a guest's command in bytes (its MDTS): more is refused. Commands that exceed
    /// the device's maximum are split.
    pub max_transfer: u64,
    /// Maximum number of outstanding commands on the physical queue pair, if one is created.
    pub depth: u32,
    /// Let the device interrupt, so that the worker can sleep
    /// ([`DirectQueue::waker`](crate::DirectQueue::waker)).
    pub interrupts: bool,
    /// Measure cycles from the start.
    pub measure: bool,
}

impl DirectOptions {
    /// Returns common options for a guest with pages of 4 KiB.
    pub fn new(nsid: u32, slice: Slice) -> Self {
        Self {
            nsid,
            slice,
            page_size: 4096,
            max_transfer: 1 << 20,
            depth: 1023,
            interrupts: true,
            measure: true,
        }
    }
}
