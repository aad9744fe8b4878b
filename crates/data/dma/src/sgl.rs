//! Scatter Gather Lists (NVMe Base 2.1, 4.3.2): a command's descriptor and the segments behind it.
//!
//! Data Block, Segment and Last Segment descriptors are supported, with addresses (subtype 0),
//! without any alignment of data. Bit Buckets are not: a segment list cannot represent discarded
//! bytes, and the controller does not announce them (Identify Controller, SGLS bit 16).
//!
//! A list may describe more than the command's data (SGLS bit 18): Linux sends passthrough commands
//! with all of the caller's buffer. The excess is cut off; its memory is not accessed and need not
//! exist. All descriptors of a segment that is read are checked, as NVMe Base 2.1, 4.3.2 demands. A
//! segment behind the end of the data is not read, because unused parts need not be examined (NVMe
//! Base 2.2, 4.3.2).

use crate::{Access, DmaError, DmaMap, SegmentList};

/// Reason why an SGL was refused. Each variant is named after its status in the standard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SglError {
    /// Invalid SGL Segment Descriptor (0Dh): a length that is zero or not a multiple of 16, an
    /// unaligned address, or a segment descriptor inside the last segment.
    #[error("invalid SGL segment descriptor")]
    InvalidSegmentDescriptor,
    /// Invalid Number of SGL Descriptors (0Eh): a segment descriptor that is not the last one of
    /// its segment, or more than [`max_descriptors`] or [`MAX_SEGMENTS`] segments.
    #[error("invalid number of SGL descriptors")]
    InvalidDescriptorCount,
    /// Data SGL Length Invalid (0Fh), or Metadata SGL Length Invalid (10h) for metadata: the list
    /// describes less than the command's data, or the range of a descriptor wraps.
    #[error("data SGL length invalid")]
    DataLengthInvalid,
    /// SGL Descriptor Type Invalid (11h): a type or subtype that is not supported.
    #[error("SGL descriptor type {0:#04x} invalid")]
    DescriptorTypeInvalid(
        /// Last byte of the descriptor: type in bits 7:4, subtype in bits 3:0.
        u8,
    ),
    /// An address of data or of a segment cannot be accessed (Data Transfer Error, 04h).
    #[error(transparent)]
    Dma(#[from] DmaError),
}

/// Maximum number of SGL segments in one list.
pub const MAX_SEGMENTS: u32 = 256;
/// Maximum number of descriptors in one list, over all its segments and for any length of data:
/// enough for 4 MiB in blocks of 512 bytes.
pub const MAX_DESCRIPTORS: u32 = 8192 + MAX_SEGMENTS;

/// Returns the maximum number of descriptors in one list, over all its segments, for a command of
/// `len` bytes: one for each block of 512 bytes, and 256 more. The cost of a list is therefore
/// proportional to the data, as are its segments in host memory: at most descriptors plus pages of
/// the data.
pub fn max_descriptors(len: u64) -> u32 {
    let blocks = u32::try_from(len.div_ceil(512)).unwrap_or(u32::MAX);
    blocks.saturating_add(MAX_SEGMENTS).min(MAX_DESCRIPTORS)
}

/// Number of SGL descriptors copied from guest memory at once.
const CHUNK: usize = 32;
/// Size of an SGL descriptor in bytes.
const SIZE: u32 = 16;

/// Parsed SGL descriptor.
struct Descriptor {
    address: u64,
    length: u32,
    kind: u8,
}

impl Descriptor {
    const DATA_BLOCK: u8 = 0x00;
    const SEGMENT: u8 = 0x20;
    const LAST_SEGMENT: u8 = 0x30;

    fn parse(bytes: [u8; 16]) -> Descriptor {
        let word = u128::from_le_bytes(bytes);
        Descriptor {
            address: word as u64,
            length: (word >> 64) as u32,
            kind: (word >> 120) as u8,
        }
    }
}

/// Appends the memory of `len` bytes that a command's SGL describes to `out`. `descriptor` is
/// the command's own (SGL1).
///
/// All of the data lies in the device's own memory ([`DmaMap::set_device_memory`]), or none of it;
/// segments of descriptors may lie in either.
///
/// The list must describe at least `len` bytes; `out` receives the first `len` of them. Each
/// descriptor is copied once, before it is examined. The number of descriptors is bounded by `len`
/// ([`max_descriptors`]), and that of segments, too. Only segments in `out` are allocated. After an
/// error `out` may hold a part of them.
///
/// # Errors
/// [`SglError`] when a descriptor is invalid, the list describes too little data, or an address
/// cannot be accessed.
#[inline]
pub fn walk(
    map: &DmaMap,
    descriptor: [u8; 16],
    len: u64,
    access: Access,
    out: &mut SegmentList,
) -> Result<(), SglError> {
    walk_any(map, descriptor, len, access, out)?;
    Ok(map.unmixed(out)?)
}

/// Walks the SGL like [`walk`], without the check for mixed guest and device memory.
fn walk_any(
    map: &DmaMap,
    descriptor: [u8; 16],
    len: u64,
    access: Access,
    out: &mut SegmentList,
) -> Result<(), SglError> {
    let mut walk = Walk {
        map,
        access,
        left: len,
        descriptors: max_descriptors(len),
    };
    let mut next = walk.descriptor(Descriptor::parse(descriptor), out)?;
    let mut segments = 0;
    while walk.left > 0
        && let Some(segment) = next
    {
        segments += 1;
        if segments > MAX_SEGMENTS {
            return Err(SglError::InvalidDescriptorCount);
        }
        next = walk.segment(&segment, out)?;
    }
    if walk.left == 0 {
        Ok(())
    } else {
        Err(SglError::DataLengthInvalid)
    }
}

struct Walk<'a> {
    map: &'a DmaMap,
    access: Access,
    /// Number of data bytes that no descriptor has described yet.
    left: u64,
    /// Number of descriptors that are still allowed in further segments.
    descriptors: u32,
}

impl Walk<'_> {
    /// Handles a descriptor: appends the needed part of a data block, or returns a segment to
    /// follow.
    fn descriptor(
        &mut self,
        descriptor: Descriptor,
        out: &mut SegmentList,
    ) -> Result<Option<Descriptor>, SglError> {
        let length = u64::from(descriptor.length);
        // A range that ends above the address space counts as a wrong length (NVMe Base 2.1,
        // Figures 117, 119 and 120).
        let wraps = length > 0 && descriptor.address.checked_add(length - 1).is_none();
        match descriptor.kind {
            Descriptor::DATA_BLOCK if wraps => Err(SglError::DataLengthInvalid),
            Descriptor::DATA_BLOCK => {
                let used = length.min(self.left);
                self.left -= used;
                self.map
                    .segments(descriptor.address, used, self.access, out)?;
                Ok(None)
            }
            Descriptor::SEGMENT | Descriptor::LAST_SEGMENT => {
                if length == 0
                    || !length.is_multiple_of(SIZE.into())
                    || !descriptor.address.is_multiple_of(8)
                {
                    return Err(SglError::InvalidSegmentDescriptor);
                }
                if wraps {
                    return Err(SglError::DataLengthInvalid);
                }
                Ok(Some(descriptor))
            }
            kind => Err(SglError::DescriptorTypeInvalid(kind)),
        }
    }

    /// Walks a segment; returns the next one. A segment that was not announced as the last may
    /// still be the last.
    fn segment(
        &mut self,
        segment: &Descriptor,
        out: &mut SegmentList,
    ) -> Result<Option<Descriptor>, SglError> {
        let mut left = segment.length / SIZE;
        self.descriptors = self
            .descriptors
            .checked_sub(left)
            .ok_or(SglError::InvalidDescriptorCount)?;
        let mut at = segment.address;
        let mut bytes = [0; CHUNK * SIZE as usize];
        while left > 0 {
            let count = left.min(CHUNK as u32);
            let (chunk, _) = bytes.split_at_mut((count * SIZE) as usize);
            self.map.read(at, chunk)?;
            at = at.wrapping_add(u64::from(count * SIZE));
            let (copied, _) = chunk.as_chunks::<{ SIZE as usize }>();
            for descriptor in copied {
                left -= 1;
                let Some(next) = self.descriptor(Descriptor::parse(*descriptor), out)? else {
                    continue;
                };
                if segment.kind == Descriptor::LAST_SEGMENT {
                    return Err(SglError::InvalidSegmentDescriptor);
                }
                if left > 0 {
                    return Err(SglError::InvalidDescriptorCount);
                }
                return Ok(Some(next));
            }
        }
        Ok(None)
    }
}
