//! Requests with memory files. Another thread maps the files first, and only then is the request
//! handled: the worker serves other front-ends meanwhile.

use crate::log::DirtyLog;
use crate::memory::GuestMemory;
use crate::wire::{InflightDescription, LogDescription, Region};
use dma::{Import, MapError, Memory, PendingImport};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::task::Waker;

/// Request of a front-end that carries memory files.
#[derive(Clone, Debug)]
pub(crate) enum MemoryRequest {
    /// SET_MEM_TABLE, with a file for each region.
    Table(Vec<Region>),
    /// ADD_MEM_REG.
    Region(Region),
    /// SET_INFLIGHT_FD.
    Inflight(InflightDescription),
    /// SET_LOG_BASE.
    Log(LogDescription),
}

impl MemoryRequest {
    /// Returns the required length of the file with this index; `None` if it overflows.
    fn file_end(&self, index: usize) -> Option<u64> {
        match self {
            Self::Table(regions) => regions.get(index)?.file_end(),
            Self::Region(region) => region.file_end(),
            Self::Log(log) => DirtyLog::file_end(log),
            Self::Inflight(inflight) => inflight.mmap_offset.checked_add(inflight.mmap_size),
        }
    }
}

/// Request whose memory files are being mapped, one after the other.
pub(crate) struct FileImport {
    pub(crate) request: MemoryRequest,
    /// Files that remain.
    files: VecDeque<OwnedFd>,
    pending: Option<PendingImport>,
    /// Memory of the files before.
    pub(crate) memories: Vec<Memory>,
}

impl FileImport {
    pub(crate) fn new(request: MemoryRequest, files: Vec<OwnedFd>) -> FileImport {
        FileImport {
            request,
            files: files.into(),
            pending: None,
            memories: Vec::new(),
        }
    }

    /// Continues. Returns whether all files are mapped; `waker` is called when there is more to do.
    pub(crate) fn advance(
        &mut self,
        memory: &mut GuestMemory,
        waker: &Waker,
    ) -> Result<bool, MapError> {
        loop {
            if let Some(pending) = &self.pending {
                let Some(mapped) = memory.finish_import(pending) else {
                    return Ok(false);
                };
                self.pending = None;
                self.memories.push(mapped?);
            }
            let Some(file) = self.files.pop_front() else {
                return Ok(true);
            };
            let end = self.request.file_end(self.memories.len());
            let end = end.ok_or(MapError::Overflow)?;
            match memory.begin_import(file, end, waker)? {
                Import::Done(mapped) => self.memories.push(mapped),
                Import::Pending(pending) => self.pending = Some(pending),
            }
        }
    }
}
