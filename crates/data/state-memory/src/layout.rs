//! Layout of a state memory: the header, and the sections that it lists.

use crate::StateError;
use dma::{Memory, ROW};

/// Version of the state memory's layout that this crate writes.
pub const VERSION: u32 = 1;
/// Oldest version of the state memory's layout that this crate reads.
pub const OLDEST_READ: u32 = 1;
/// Oldest version of this crate that can read this layout: newer sections are skipped.
const READER: u32 = 1;

/// Magic number at the beginning of a state memory: "vnvmest" and a zero byte.
const MAGIC: u64 = u64::from_le_bytes(*b"vnvmest\0");
/// Alignment in bytes of the sections of a state memory.
pub(crate) const PAGE: usize = 4096;
/// Size in bytes of the header of a state memory.
const HEADER: usize = PAGE;
/// Number of words of the header before the list of sections.
const LIST: usize = 4;
/// Maximum number of sections that a header can list.
const MAX_SECTIONS: u64 = 64;
/// Maximum size of the file in bytes: more than any layout needs, and far from overflow in sums.
const MAX_FILE_SIZE: usize = 1 << 32;

/// Size in bytes of each of the two control buffers, including its header.
pub(crate) const CONTROL_BUFFER: usize = 128 << 10;
/// Size in bytes of each of the two buffers of marked ranges, including its header.
pub(crate) const MARKS_BUFFER: usize = 384 << 10;
/// Size of the identity section in bytes.
const IDENTITY: usize = PAGE;

/// Capacity of a state memory: numbers of queues, commands, windows and descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of queue pairs with a row for their state, including the admin queue.
    pub queues: u16,
    /// Number of shares: one for each worker that records commands.
    pub shares: u16,
    /// Maximum number of recorded commands in each share.
    pub commands: u16,
    /// Maximum number of guest memory windows.
    pub windows: u32,
    /// Maximum number of kept descriptors.
    pub descriptors: u32,
    /// Size in bytes of the section for the client's session.
    pub session: usize,
}

/// Kind of a section, and its index in the array and in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Identity = 0,
    Session = 1,
    Control = 2,
    Windows = 3,
    Descriptors = 4,
    Hot = 5,
    Records = 6,
    /// Marked ranges that have no room in the control state. Older versions have no such section.
    Marks = 7,
}

/// Number of kinds of sections.
pub(crate) const KINDS: usize = 8;

/// Location of a section in the memory file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Section {
    /// Byte offset of the section in the file.
    pub offset: usize,
    /// Size of the section in bytes.
    pub len: usize,
    /// Size in bytes of each share, for the section of command records.
    pub stride: usize,
}

/// Locations of all sections, by [`Kind`].
pub(crate) type Sections = [Section; KINDS];

/// Returns the size of one share's records in bytes: one row for the share itself, and one for each
/// record.
fn share_bytes(commands: u16) -> usize {
    ((usize::from(commands) + 1) * ROW).next_multiple_of(PAGE)
}

/// Returns the size of a table in bytes: one row for the table itself, and one for each entry.
fn table_bytes(entries: u32) -> Option<usize> {
    (entries as usize).checked_add(1)?.checked_mul(ROW)
}

impl Layout {
    /// Returns the locations of all sections, and the size of the file in bytes.
    pub(crate) fn sections(&self) -> Result<(Sections, usize), StateError> {
        let share = share_bytes(self.commands);
        let lens = [
            (Some(IDENTITY), 0),
            (Some(self.session), 0),
            (Some(ROW + 2 * CONTROL_BUFFER), 0),
            (table_bytes(self.windows), 0),
            (table_bytes(self.descriptors), 0),
            (Some(usize::from(self.queues) * ROW), 0),
            (Some(usize::from(self.shares) * share), share),
            (Some(ROW + 2 * MARKS_BUFFER), 0),
        ];
        let (mut sections, mut at) = (Sections::default(), HEADER);
        for (section, (len, stride)) in sections.iter_mut().zip(lens) {
            let len = len.filter(|len| *len <= MAX_FILE_SIZE);
            let len = len.ok_or(StateError::OutOfRange)?;
            *section = Section {
                offset: at,
                len,
                stride,
            };
            at = (at + len).next_multiple_of(PAGE);
        }
        if at > MAX_FILE_SIZE {
            return Err(StateError::OutOfRange);
        }
        Ok((sections, at))
    }
}

fn put(memory: &Memory, word: usize, value: u64) -> Result<(), StateError> {
    Ok(memory.write(word * 8, &value.to_le_bytes())?)
}

fn get(memory: &Memory, word: usize) -> Result<u64, StateError> {
    let mut bytes = [0; 8];
    memory.read(word * 8, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Writes the header of a new state memory.
pub(crate) fn write_header(memory: &Memory, sections: &Sections) -> Result<(), StateError> {
    put(memory, 1, u64::from(VERSION) | u64::from(READER) << 32)?;
    put(memory, 2, KINDS as u64)?;
    for (kind, section) in sections.iter().enumerate() {
        let at = LIST + kind * 4;
        put(memory, at, kind as u64)?;
        put(memory, at + 1, section.offset as u64)?;
        put(memory, at + 2, section.len as u64)?;
        put(memory, at + 3, section.stride as u64)?;
    }
    // The file is a state memory from now on.
    put(memory, 0, MAGIC)
}

/// Reads the header of a file that another process has written. Sections that it does not list are
/// empty.
pub(crate) fn read_header(memory: &Memory) -> Result<Sections, StateError> {
    let foreign = |_| StateError::Foreign;
    if get(memory, 0).map_err(foreign)? != MAGIC {
        return Err(StateError::Foreign);
    }
    let versions = get(memory, 1)?;
    let (version, reader) = (versions as u32, (versions >> 32) as u32);
    if reader > VERSION {
        return Err(StateError::TooNew { version, reader });
    }
    if version < OLDEST_READ {
        return Err(StateError::TooOld { version });
    }
    let count = get(memory, 2)?;
    if count > MAX_SECTIONS {
        return Err(StateError::Damaged("too many sections"));
    }
    let mut sections = Sections::default();
    for listed in 0..count as usize {
        let at = LIST + listed * 4;
        let kind = get(memory, at)? as usize;
        // The section belongs to a newer version.
        let Some(section) = sections.get_mut(kind) else {
            continue;
        };
        *section = read_section(memory, at)?;
    }
    Ok(sections)
}

fn read_section(memory: &Memory, at: usize) -> Result<Section, StateError> {
    let damaged = StateError::Damaged("a section is not within the file");
    let [offset, len, stride] = [1, 2, 3].map(|word| get(memory, at + word));
    let [offset, len, stride] = [offset?, len?, stride?].map(usize::try_from);
    let (offset, len) = (offset.map_err(|_| damaged)?, len.map_err(|_| damaged)?);
    let stride = stride.map_err(|_| damaged)?;
    let end = offset.checked_add(len).ok_or(damaged)?;
    if offset < HEADER || end > memory.len() || !(offset | stride).is_multiple_of(PAGE) {
        return Err(damaged);
    }
    Ok(Section {
        offset,
        len,
        stride,
    })
}
