//! Requests that are split because they exceed a command, or because their data is scattered.

use std::collections::VecDeque;

use super::data::{IovaRange, Method};
use super::request::Op;
use crate::buffer::DmaBuffer;
use crate::error::CommandError;

/// Request that is executed as several commands, because it exceeds the controller's limit.
#[derive(Debug)]
pub(crate) struct SplitRequest {
    pub op: Op,
    /// LBA of the next block to submit; the number of remaining blocks follows.
    pub lba: u64,
    pub left: u64,
    /// Number of bytes of the request that were submitted so far.
    pub offset: u64,
    /// Device address ranges of the data; empty for operations without data.
    pub ranges: Vec<IovaRange>,
    pub method: Method,
    pub hold: Option<DmaBuffer>,
    pub user_data: u64,
    pub in_flight: u32,
    pub error: Option<CommandError>,
    /// Whether the entry belongs to a request in progress.
    pub busy: bool,
}

/// Requests of a queue pair that are executed as several commands.
#[derive(Debug, Default)]
pub(crate) struct SplitRequests {
    parents: Vec<SplitRequest>,
    free: Vec<u32>,
    /// Indices of the requests of which parts are left to submit, in order.
    pub waiting: VecDeque<u32>,
}

impl SplitRequests {
    pub fn add(&mut self, parent: SplitRequest) -> u32 {
        if let Some(index) = self.free.pop()
            && let Some(place) = self.parents.get_mut(index as usize)
        {
            *place = parent;
            return index;
        }
        self.parents.push(parent);
        (self.parents.len() - 1) as u32
    }

    pub fn get(&mut self, index: u32) -> Option<&mut SplitRequest> {
        self.parents.get_mut(index as usize)
    }

    /// Frees the entry of a completed request; returns its buffer and its list of ranges.
    pub fn end(&mut self, index: u32) -> Option<(Option<DmaBuffer>, Vec<IovaRange>)> {
        let parent = self.parents.get_mut(index as usize)?;
        if !std::mem::take(&mut parent.busy) {
            return None;
        }
        self.free.push(index);
        Some((parent.hold.take(), std::mem::take(&mut parent.ranges)))
    }

    /// Returns the indexes of the requests in progress.
    pub fn busy(&self) -> Vec<u32> {
        let busy = self.parents.iter().enumerate().filter(|(_, p)| p.busy);
        busy.map(|(index, _)| index as u32).collect()
    }

    pub fn in_flight(&self) -> usize {
        self.parents.len() - self.free.len()
    }

    /// Returns the buffers of all split requests.
    pub fn into_holds(self) -> Vec<DmaBuffer> {
        self.parents.into_iter().filter_map(|p| p.hold).collect()
    }
}
