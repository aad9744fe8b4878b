//! Bounce buffers for data in guest memory that the device cannot access.

use dma::SegmentList;
use driver::{Device, DmaBuffer};
use nvme::Status;

/// Maximum number of buffers kept for later transfers. Buffers larger than [`KEPT_BYTES`] are not
/// kept.
const MAX_SPARE_BUFFERS: usize = 64;
const KEPT_BYTES: usize = 1 << 20;
/// Limit for the bytes in use at one time. Without it, a guest could use as much as its queue depth
/// allows.
const MAX_BOUNCE_BYTES: usize = 64 << 20;

/// Pool of bounce buffers for a queue pair of the device.
#[derive(Debug)]
pub(crate) struct Bounces {
    device: Device,
    spare: Vec<DmaBuffer>,
    used: usize,
}

impl Bounces {
    pub fn new(device: Device) -> Self {
        Self {
            device,
            spare: Vec::new(),
            used: 0,
        }
    }

    /// Returns a bounce buffer of at least `len` bytes.
    pub fn take(&mut self, len: u64) -> Result<DmaBuffer, Status> {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        if len > MAX_BOUNCE_BYTES - self.used.min(MAX_BOUNCE_BYTES) {
            // The host should retry after other commands have completed.
            return Err(Status::COMMAND_INTERRUPTED);
        }
        let found = self.spare.iter().position(|spare| spare.len() >= len);
        let buffer = match found {
            Some(at) => self.spare.swap_remove(at),
            None => {
                let size = if len <= KEPT_BYTES {
                    len.next_power_of_two().max(4096)
                } else {
                    len
                };
                self.device.allocate(size).map_err(|error| {
                    tracing::warn!(%error, "no bounce buffer");
                    Status::INTERNAL_ERROR
                })?
            }
        };
        self.used += buffer.len();
        Ok(buffer)
    }

    /// Returns an unused bounce buffer to the pool.
    pub fn recycle(&mut self, buffer: DmaBuffer) {
        self.used -= buffer.len().min(self.used);
        if self.spare.len() < MAX_SPARE_BUFFERS && buffer.len() <= KEPT_BYTES {
            self.spare.push(buffer);
        }
    }
}

/// Copies between a guest's data and a bounce buffer. Returns `false` when the copy was incomplete.
pub(crate) fn copy(data: &SegmentList, buffer: &DmaBuffer, into: bool) -> bool {
    let len = data.len_bytes();
    let piece = buffer
        .memory()
        .and_then(|(memory, at)| memory.segments(at, usize::try_from(len).ok()?));
    piece.is_some_and(|piece| {
        let copied = if into {
            piece.copy_list(data)
        } else {
            data.copy_list(&piece)
        };
        copied == len
    })
}
