//! Guest memory of the host: a memory file that is read and written by system calls, so that no
//! test needs a mapping of its own. It is mapped for shadow doorbells only.

use std::fs::File;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicU32;

use dma::Memory;
use test_host::{Error, GuestMemory, Result};

use super::{RAM_BASE, RAM_SIZE, memfd};

/// Guest memory, whose file is read and written by offsets.
pub struct Ram {
    pub file: File,
    mapping: Option<Memory>,
}

impl Ram {
    pub fn new() -> Self {
        Self {
            file: memfd(RAM_SIZE),
            mapping: None,
        }
    }

    pub fn map(&mut self) {
        let file = self.file.try_clone().unwrap().into();
        self.mapping = Some(Memory::from_fd(file, RAM_SIZE, true).unwrap());
    }
}

impl Deref for Ram {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl GuestMemory for Ram {
    fn read(&self, iova: u64, data: &mut [u8]) -> Result {
        let (at, len) = (iova.wrapping_sub(RAM_BASE), data.len());
        let read = match &self.mapping {
            Some(ram) => ram.read(at as usize, data).ok(),
            None => self.file.read_exact_at(data, at).ok(),
        };
        read.ok_or(Error::Memory { iova, len })
    }

    fn write(&self, iova: u64, data: &[u8]) -> Result {
        let written = self.file.write_all_at(data, iova.wrapping_sub(RAM_BASE));
        let len = data.len();
        written.map_err(|_| Error::Memory { iova, len })
    }

    fn cell(&self, iova: u64) -> Result<&AtomicU32> {
        let at = iova.wrapping_sub(RAM_BASE) as usize;
        let cell = self.mapping.as_ref().and_then(|ram| ram.atomic_u32(at));
        cell.ok_or(Error::Memory { iova, len: 4 })
    }
}
