//! State that is committed as a whole, in two buffers of which the newer is valid.

use crate::layout::Kind;
use crate::{StateError, StateMemory};
use dma::ROW;
use std::sync::atomic::{AtomicU64, Ordering};

/// Size in bytes of the header of a control state's buffer: length, checksum and sequence number.
const HEAD: usize = 16;

/// The two buffers of the control state, or of marked ranges. A commit writes the buffer that is
/// not valid, and then the sequence number that makes it so. A process that dies in between leaves
/// the previous state.
#[derive(Debug)]
pub struct Control {
    state: StateMemory,
    kind: Kind,
    /// Size of each buffer in bytes, including its header.
    size: usize,
    /// Number of allocated bytes in each buffer.
    allocated: [usize; 2],
}

fn checksum(sequence: u64, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&sequence.to_le_bytes());
    hasher.update(bytes);
    hasher.finalize()
}

impl Control {
    pub(crate) fn new(state: StateMemory, kind: Kind, size: usize) -> Control {
        Control {
            state,
            kind,
            size,
            allocated: [0; 2],
        }
    }

    /// Returns the maximum size of a state in bytes.
    pub fn capacity(&self) -> usize {
        self.size - HEAD
    }

    fn published(&self) -> Result<&AtomicU64, StateError> {
        let section = self.state.section(self.kind);
        if section.len < ROW + 2 * self.size {
            return Err(StateError::Damaged("no room for the control state"));
        }
        let word = self.state.memory().atomic_u64(section.offset);
        word.ok_or(StateError::OutOfRange)
    }

    /// Returns the offset in the section of the buffer for a sequence number.
    fn buffer(&self, sequence: u64) -> usize {
        ROW + (sequence & 1) as usize * self.size
    }

    /// Allocates the first bytes of a buffer.
    fn prepare(&mut self, sequence: u64, bytes: usize) -> Result<(), StateError> {
        let from = self.buffer(sequence);
        let [even, odd] = &mut self.allocated;
        let allocated = if sequence & 1 == 0 { even } else { odd };
        if bytes > *allocated {
            self.state.prepare_range(self.kind, from, bytes)?;
            *allocated = bytes;
        }
        Ok(())
    }

    /// Returns the sequence number of the committed state; 0 when there is none.
    pub fn sequence(&self) -> u64 {
        self.published()
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Commits `bytes` as the new state.
    ///
    /// # Errors
    /// [`StateError::OutOfRange`] when there are too many bytes, [`StateError::Memory`] when no
    /// memory is left. The previous state then stays valid.
    pub fn commit(&mut self, bytes: &[u8]) -> Result<(), StateError> {
        if bytes.len() > self.capacity() {
            return Err(StateError::OutOfRange);
        }
        let sequence = self.sequence().wrapping_add(1).max(1);
        let (at, len) = (self.buffer(sequence), bytes.len());
        self.prepare(sequence, HEAD + len)?;
        let published = self.published()?;
        let mut head = [0; HEAD];
        let (numbers, last) = head.split_at_mut(8);
        let (length, sum) = numbers.split_at_mut(4);
        length.copy_from_slice(&(len as u32).to_le_bytes());
        sum.copy_from_slice(&checksum(sequence, bytes).to_le_bytes());
        last.copy_from_slice(&sequence.to_le_bytes());
        let place = self.state.section(self.kind).offset + at;
        let memory = self.state.memory();
        memory.write(place, &head)?;
        crash::point!("state-memory.control.head");
        memory.write(place + HEAD, bytes)?;
        crash::point!("state-memory.control.written");
        published.store(sequence, Ordering::Release);
        crash::point!("state-memory.control.published");
        Ok(())
    }

    /// Withdraws the committed state, because it is outdated and the new one cannot be committed.
    pub fn withdraw(&mut self) {
        if let Ok(published) = self.published() {
            published.store(0, Ordering::Release);
        }
    }

    /// Returns the committed state; `None` when there is none.
    ///
    /// # Errors
    /// [`StateError::Damaged`] when the state is inconsistent.
    pub fn read(&self) -> Result<Option<Vec<u8>>, StateError> {
        let sequence = self.published()?.load(Ordering::Acquire);
        if sequence == 0 {
            return Ok(None);
        }
        let place = self.state.section(self.kind).offset + self.buffer(sequence);
        let memory = self.state.memory();
        let mut head = [0; HEAD];
        memory.read(place, &mut head)?;
        let [a, b, c, d, e, f, g, h, last @ ..] = head;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        let sum = u32::from_le_bytes([e, f, g, h]);
        let damaged = StateError::Damaged("the control state is not what was committed");
        if len > self.capacity() || u64::from_le_bytes(last) != sequence {
            return Err(damaged);
        }
        let mut bytes = vec![0; len];
        memory.read(place + HEAD, &mut bytes)?;
        if checksum(sequence, &bytes) != sum {
            return Err(damaged);
        }
        Ok(Some(bytes))
    }
}
