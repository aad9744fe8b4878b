//! Requests that are split because they exceed a command, or because their data is scattered.

use std::collections::VecDeque;

use super::data::{IovaRange, Method};
use super::request::Op;
use crate::buffer::DmaBuffer;
use crate::error::CommandError;

/// A request that is executed as several commands.
#[derive(Debug)]
pub(crate) struct SplitRequest {
    pub op: Op,
    /// Next block to submit; the number of remaining blocks follows.
    pub lba: u64,
    pub left: u64,
    /// Number of bytes submitted so far.
    pub offset: u64,
    /// Ranges of the data; empty for operations without data.
    pub ranges: Vec<IovaRange>,
    pub method: Method,
    pub hold: Option<DmaBuffer>,
    pub user_data: u64,
    pub in_flight: u32,
    pub error: Option<CommandError>,
    /// The entry is in use.
    pub busy: bool,
}

/// All split requests of a queue pair.
#[derive(Debug, Default)]
pub(crate) struct SplitRequests {
    parents: Vec<SplitRequest>,
    free: Vec<u32>,
    /// Requests with unsubmitted parts, in order.
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
