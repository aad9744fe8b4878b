//! What a virtual queue pair's way to the device is made of.

use crate::slice::Slice;

/// One virtual queue pair's way to the device.
#[derive(Clone, Copy, Debug)]
pub struct DirectOptions {
    /// The namespace as the guest numbers it: commands for another one are refused.
    pub nsid: u32,
    /// The blocks that it may reach.
    pub slice: Slice,
    /// The guest's memory page in bytes (its CC.MPS).
    pub page_size: u64,
    /// Bytes of data that the guest may put into one command (its MDTS): more is refused. What the
    /// device takes less of is split.
    pub max_transfer: u64,
    /// Commands that can be in flight on the physical queue pair, if one is made.
    pub depth: u32,
    /// Let the device interrupt, so that the worker can sleep
    /// ([`DirectQueue::waker`](crate::DirectQueue::waker)).
    pub interrupts: bool,
    /// Measure cycles from the start.
    pub measure: bool,
}

impl DirectOptions {
    /// Usual choices for a guest with pages of 4 KiB.
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
