//! The payload of a container as a volume.

use crate::cipher::Xts;
use crate::error::LuksError;
use crate::header::{Header, Payload};
use crate::pool::LARGEST;
use crate::queue::LuksQueue;
use crate::secret::SecretBytes;
use dma::Buffer;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use volume::{AtomicWrites, Extent, Info, Io, IoError, IoErrorKind, Kind};
use volume::{OpenQueue, Volume, VolumeError};

/// Options of an opened container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LuksOptions {
    /// Whether deallocation is passed to the volume below. It then shows which sectors are unused,
    /// and deallocated sectors read as noise.
    pub discard: bool,
}

/// Payload of a LUKS container: encrypts and decrypts what passes to and from the volume below.
#[derive(Debug)]
pub struct LuksVolume {
    below: Arc<dyn Volume>,
    shared: Arc<Shared>,
    description: String,
    /// Sealed memory with the volume key, for the process that opens the container next.
    kept: Option<OwnedFd>,
    /// Whether the volume key is missing, so that there is no I/O.
    is_locked: bool,
}

/// Parts of a container that its queues use.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) xts: Xts,
    pub(crate) payload: Payload,
    pub(crate) discard: bool,
    pub(crate) read_only: bool,
    /// Smallest unit of a request in bytes.
    pub(crate) block_size: u32,
    /// Size of the payload in bytes.
    pub(crate) size: AtomicU64,
}

impl Shared {
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Returns the tweak of the sector at byte `offset` of the payload.
    pub(crate) fn iv(&self, offset: u64) -> u64 {
        self.payload.iv_offset.wrapping_add(offset / 512)
    }

    pub(crate) fn encrypt(&self, offset: u64, data: &mut [u8]) {
        let sector = self.payload.sector as usize;
        self.xts.encrypt(data, sector, self.iv(offset));
    }

    pub(crate) fn decrypt(&self, offset: u64, data: &mut [u8]) {
        let sector = self.payload.sector as usize;
        self.xts.decrypt(data, sector, self.iv(offset));
    }
}

/// Returns the size of a payload in a volume of `below` bytes, in whole blocks.
fn payload_size(payload: &Payload, below: u64, block_size: u32) -> u64 {
    let rest = below.saturating_sub(payload.offset);
    let size = payload.len.map_or(rest, |len| len.min(rest));
    size - size % u64::from(block_size)
}

impl LuksVolume {
    /// Opens the container with this header whose payload lies in `below`. `key` is its volume key
    /// ([`unlock`](crate::unlock)).
    ///
    /// # Errors
    /// [`LuksError::WrongKey`] for a key of another length, [`LuksError::Payload`] when the payload
    /// does not lie in `below` on its blocks.
    pub fn new(
        below: Arc<dyn Volume>,
        header: &Header,
        key: &[u8],
        options: LuksOptions,
    ) -> Result<Self, LuksError> {
        if key.len() != header.key_len {
            return Err(LuksError::WrongKey);
        }
        let (payload, info) = (header.payload, below.info());
        let wrong = |why| LuksError::Payload {
            offset: payload.offset,
            why,
        };
        let block_size = info.block_size.max(payload.sector);
        if !payload.offset.is_multiple_of(info.block_size.max(1).into()) {
            return Err(wrong("it does not begin on a block of that volume"));
        }
        let size = payload_size(&payload, info.size, block_size);
        if size == 0 || payload.len.is_some_and(|len| size < len) {
            return Err(wrong("that volume is too short"));
        }
        let (version, bits, sector) = (header.version, header.key_bits(), payload.sector);
        Ok(Self {
            description: format!(
                "LUKS{version}, aes-xts-plain64 with {bits} bits, sectors of {sector} bytes, on "
            ),
            shared: Arc::new(Shared {
                xts: Xts::new(key)?,
                payload,
                discard: options.discard && info.deallocate,
                read_only: info.read_only,
                block_size,
                size: size.into(),
            }),
            below,
            kept: None,
            is_locked: false,
        })
    }

    /// Describes a container without its key. There is no I/O on it.
    ///
    /// # Errors
    /// [`LuksError::Payload`] as for [`LuksVolume::new`].
    pub fn locked(
        below: Arc<dyn Volume>,
        header: &Header,
        options: LuksOptions,
    ) -> Result<Self, LuksError> {
        let key = SecretBytes::new(header.key_len);
        let volume = Self::new(below, header, &key, options)?;
        Ok(Self {
            is_locked: true,
            ..volume
        })
    }

    /// Sets the sealed memory with the volume key ([`keep`](crate::keep)), which
    /// [`Volume::kept_key`] returns.
    pub fn keep_in(&mut self, file: OwnedFd) {
        self.kept = Some(file);
    }
}

impl Volume for LuksVolume {
    fn info(&self) -> Info {
        let info = self.below.info();
        let shared = &*self.shared;
        Info {
            size: shared.size(),
            block_size: shared.block_size,
            optimal_io: info.optimal_io.max(shared.block_size),
            deallocate: shared.discard,
            deallocate_granularity: if shared.discard {
                info.deallocate_granularity.max(shared.block_size)
            } else {
                0
            },
            // Zeroes of the volume below decrypt to noise.
            zeroes_after_deallocate: false,
            write_zeroes: false,
            description: format!("{}{}", self.description, info.description),
            ..info
        }
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        if self.is_locked {
            return Err(VolumeError::NoKey);
        }
        // Volumes in memory complete at once, and need no ring.
        let lane = match self.below.info().kind {
            Kind::Memory | Kind::Null => None,
            Kind::File | Kind::BlockDevice => Some(io.lane()?),
        };
        let below = self
            .below
            .open(lane.as_ref().map_or(io, |lane| lane.io()))?;
        let queue = LuksQueue::new(self.shared.clone(), below, lane);
        Ok(OpenQueue::new(queue))
    }

    fn id(&self) -> Vec<u8> {
        [&self.below.id()[..], b"+luks"].concat()
    }

    /// Returns an identifier of its own: the volume below shows other data under the inner one.
    fn own_id(&self) -> Option<Vec<u8>> {
        Some([&self.below.own_id()?[..], b"+luks"].concat())
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.below)
    }

    /// Returns the promise of the volume below for requests that are passed on in one piece.
    fn atomic_writes(&self) -> AtomicWrites {
        let below = self.below.atomic_writes();
        below
            .from_byte(self.shared.payload.offset)
            .at_most(LARGEST as u32)
    }

    fn extent(&self) -> Option<Extent> {
        let Payload { offset, len, .. } = self.shared.payload;
        Some(self.below.extent()?.part(offset, len))
    }

    fn is_encrypted(&self) -> bool {
        true
    }

    fn kept_key(&self) -> Option<BorrowedFd<'_>> {
        self.kept.as_ref().map(AsFd::as_fd)
    }

    fn resize(&self, bytes: u64) -> Result<(), VolumeError> {
        let payload = &self.shared.payload;
        if payload.len.is_some() {
            return Err(VolumeError::FixedSize);
        }
        if bytes == 0 || !bytes.is_multiple_of(self.shared.block_size.into()) {
            return Err(VolumeError::Size {
                size: bytes,
                why: "it is not a whole number of blocks",
            });
        }
        let whole = bytes.checked_add(payload.offset);
        let whole = whole.ok_or(VolumeError::Size {
            size: bytes,
            why: "it is too large",
        })?;
        self.below.resize(whole)?;
        self.refresh().map(drop)
    }

    fn read_at(&self, offset: u64, buffer: &mut Buffer) -> Option<Result<(), IoError>> {
        if self.is_locked {
            return Some(Err(IoErrorKind::Unsupported.into()));
        }
        let (shared, len) = (&*self.shared, buffer.len() as u64);
        let block = u64::from(shared.block_size);
        if (offset | len) & (block - 1) != 0 {
            return Some(Err(IoErrorKind::Invalid.into()));
        }
        if offset
            .checked_add(len)
            .is_none_or(|end| end > shared.size())
        {
            return Some(Err(IoErrorKind::OutOfRange.into()));
        }
        let read = self
            .below
            .read_at(offset.saturating_add(shared.payload.offset), buffer)?;
        Some(read.map(|()| shared.decrypt(offset, buffer)))
    }

    fn refresh(&self) -> Result<bool, VolumeError> {
        self.below.refresh()?;
        let shared = &*self.shared;
        let size = payload_size(&shared.payload, self.below.info().size, shared.block_size);
        Ok(shared.size.swap(size, Ordering::Relaxed) != size)
    }
}
