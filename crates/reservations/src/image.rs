//! Encoding of the state.
//!
//! ```text
//!   0  magic "VNVMERSV"        40  generation            72  namespace (NGUID), 16 bytes
//!   8  version                 44  type, 0 for none      88  registrants, 32 bytes each
//!  12  length of it all        45  flags                     operations, 24 bytes each
//!  16  sequence                46  registrants               CRC-32 of everything before it
//!  24  boot, 16 bytes          48  index of the holder
//!                              50  operations that were executed
//! ```
//!
//! Integers are little endian. Reserved fields are 0, and anything else is refused. Values that no
//! [`Reservations`] can have are refused as well, because the file may have been written by
//! anybody.

use crate::host::HostId;
use crate::state::{MAX_REGISTRANTS, Registrant, Reservation, Reservations};
use crate::types::ReservationType;
use nvme::Status;
use nvme::cmd::reservation::Rtype;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 8] = *b"VNVMERSV";
const VERSION: u32 = 1;
/// Value of the holder's index when no single registrant holds the reservation.
const NO_HOLDER: u16 = 0xffff;

const PTPL: u8 = 1;

/// Maximum number of operations in an image.
pub const MAX_EXECUTED: usize = 32;

/// Size of the largest image in bytes.
pub(crate) const MAX_IMAGE_LEN: usize = length(MAX_REGISTRANTS, MAX_EXECUTED);

/// Returns the size in bytes of an image with these numbers of entries.
const fn length(registrants: usize, executed: usize) -> usize {
    size_of::<Header>()
        + registrants * size_of::<Entry>()
        + executed * size_of::<Operation>()
        + size_of::<U32>()
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U32,
    length: U32,
    sequence: U64,
    boot: [u8; 16],
    generation: U32,
    rtype: u8,
    flags: u8,
    registrants: U16,
    holder: U16,
    executed: U16,
    reserved: [u8; 20],
    namespace: [u8; 16],
}

const _: () = assert!(size_of::<Header>() == 88);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Entry {
    host: [u8; 16],
    key: U64,
    extended: u8,
    reserved: [u8; 7],
}

const _: () = assert!(size_of::<Entry>() == 32);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Operation {
    token: [u8; 16],
    status: U16,
    reserved: [u8; 6],
}

const _: () = assert!(size_of::<Operation>() == 24);

/// An executed operation. After a restart of the process, a repeated command is answered from this
/// record instead of being executed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Executed {
    /// Unique identifier of the command that has executed the operation.
    pub token: [u8; 16],
    /// Status with which the command was completed.
    pub status: Status,
}

/// A saved state of reservations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Sequence number of the image. Each saved image has a higher one.
    pub sequence: u64,
    /// Boot during which the image was written. A different current boot means that the power was
    /// off.
    pub boot: [u8; 16],
    /// NGUID of the namespace to which the reservations belong.
    pub namespace: [u8; 16],
    /// State of the reservations, with persistence supported.
    pub state: Reservations,
    /// Operations executed last, oldest first, at most [`MAX_EXECUTED`].
    pub executed: Vec<Executed>,
}

/// Reason why bytes cannot be decoded as an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// All bytes of the image are zero, because nothing was ever written.
    #[error("nothing was written")]
    Empty,
    /// The bytes are not an image of reservations.
    #[error("not a reservation state")]
    Foreign,
    /// The image was only partly written, or is damaged.
    #[error("damaged: the checksum is wrong")]
    Damaged,
    /// A newer program has written the image.
    #[error("format version {0} of a newer program; this one knows version {VERSION}")]
    TooNew(u32),
    /// The checksum is valid, but the values contradict each other.
    #[error("contradictory: {0}")]
    Contradiction(&'static str),
}

/// Returns [`ImageError::Contradiction`] unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $what:literal) => {
        if !$condition {
            return Err(ImageError::Contradiction($what));
        }
    };
}

impl Image {
    /// Returns the image as bytes with a checksum.
    pub fn encode(&self) -> Vec<u8> {
        let state = &self.state;
        let held = state.reservation;
        let holder = held.and_then(|held| held.holder).and_then(|holder| {
            let mut registrants = state.registrants.iter();
            registrants.position(|registrant| registrant.host == holder)
        });
        let length = length(state.registrants.len(), self.executed.len());
        let flags = if state.ptpl { PTPL } else { 0 };
        let header = Header {
            magic: MAGIC,
            version: VERSION.into(),
            length: (length as u32).into(),
            sequence: self.sequence.into(),
            boot: self.boot,
            generation: state.generation.into(),
            rtype: held.map_or(Rtype::NONE, |held| held.rtype.rtype()).0,
            flags,
            registrants: (state.registrants.len() as u16).into(),
            holder: holder.map_or(NO_HOLDER, |holder| holder as u16).into(),
            executed: (self.executed.len() as u16).into(),
            reserved: [0; 20],
            namespace: self.namespace,
        };
        let mut bytes = Vec::with_capacity(length);
        bytes.extend(header.as_bytes());
        for registrant in &state.registrants {
            let entry = Entry {
                host: *registrant.host.bytes(),
                key: registrant.key.into(),
                extended: registrant.host.is_extended().into(),
                reserved: [0; 7],
            };
            bytes.extend(entry.as_bytes());
        }
        for Executed { token, status } in &self.executed {
            let operation = Operation {
                token: *token,
                status: status.into_bits().into(),
                reserved: [0; 6],
            };
            bytes.extend(operation.as_bytes());
        }
        let crc = U32::new(crc32fast::hash(&bytes));
        bytes.extend(crc.as_bytes());
        bytes
    }

    /// Decodes an image, which may be followed by further bytes.
    ///
    /// # Errors
    /// [`ImageError`] when the bytes are not a valid image.
    pub fn decode(bytes: &[u8]) -> Result<Self, ImageError> {
        let (header, _) = Header::ref_from_prefix(bytes).map_err(|_| ImageError::Foreign)?;
        if header.magic != MAGIC {
            let empty = bytes.iter().all(|byte| *byte == 0);
            return Err(if empty {
                ImageError::Empty
            } else {
                ImageError::Foreign
            });
        }
        // Common to every version: magic, version, length, and the checksum at the end.
        let length = header.length.get() as usize;
        let body = length.checked_sub(size_of::<U32>());
        let (body, crc) = body
            .and_then(|body| bytes.get(..length)?.split_at_checked(body))
            .ok_or(ImageError::Damaged)?;
        if crc != crc32fast::hash(body).to_le_bytes() {
            return Err(ImageError::Damaged);
        }
        let version = header.version.get();
        if version > VERSION {
            return Err(ImageError::TooNew(version));
        }
        ensure!(version == VERSION, "there is no such version");
        let entries = body.get(size_of::<Header>()..).unwrap_or_default();
        Self::checked(header, entries)
    }

    /// Decodes the entries after the header, and checks that the values are consistent.
    fn checked(header: &Header, rest: &[u8]) -> Result<Self, ImageError> {
        let count = usize::from(header.registrants.get());
        let operations = usize::from(header.executed.get());
        let entries = <[Entry]>::ref_from_prefix_with_elems(rest, count);
        let Some((entries, operations)) = entries.ok().and_then(|(entries, rest)| {
            let executed = <[Operation]>::ref_from_bytes_with_elems(rest, operations);
            Some((entries, executed.ok()?))
        }) else {
            return Err(ImageError::Contradiction("its length"));
        };
        ensure!(count <= MAX_REGISTRANTS, "there are too many registrants");
        ensure!(
            operations.len() <= MAX_EXECUTED,
            "there are too many operations"
        );
        ensure!(
            header.flags & !PTPL == 0 && header.reserved == [0; 20],
            "something is set that means nothing"
        );
        let mut registrants: Vec<Registrant> = Vec::with_capacity(count);
        for entry in entries {
            ensure!(
                entry.extended <= 1 && entry.reserved == [0; 7],
                "something of a registrant is set that means nothing"
            );
            let host = if entry.extended == 1 {
                HostId::extended(entry.host)
            } else {
                let [low @ .., _, _, _, _, _, _, _, _] = entry.host;
                let host = HostId::short(u64::from_le_bytes(low));
                ensure!(*host.bytes() == entry.host, "a Host Identifier is too long");
                host
            };
            ensure!(
                registrants.iter().all(|other| other.host != host),
                "a host is registered twice"
            );
            let key = entry.key.get();
            registrants.push(Registrant { host, key });
        }
        let holder = match header.holder.get() {
            NO_HOLDER => None,
            index => {
                let holder = registrants.get(usize::from(index));
                ensure!(holder.is_some(), "the holder is no registrant");
                holder.map(|registrant| registrant.host)
            }
        };
        let reservation = match Rtype(header.rtype) {
            Rtype::NONE => {
                ensure!(holder.is_none(), "somebody holds nothing");
                None
            }
            rtype => {
                let Some(rtype) = ReservationType::of(rtype) else {
                    return Err(ImageError::Contradiction("there is no such type"));
                };
                ensure!(
                    holder.is_none() == rtype.held_by_all(),
                    "the holder does not fit the type"
                );
                ensure!(!registrants.is_empty(), "nobody holds the reservation");
                Some(Reservation { rtype, holder })
            }
        };
        let mut executed = Vec::with_capacity(operations.len());
        for operation in operations {
            let status = Status::from_bits(operation.status.get());
            ensure!(
                operation.reserved == [0; 6] && status.into_bits() < 0x8000,
                "something of an operation is set that means nothing"
            );
            let token = operation.token;
            executed.push(Executed { token, status });
        }
        Ok(Image {
            sequence: header.sequence.get(),
            boot: header.boot,
            namespace: header.namespace,
            state: Reservations {
                generation: header.generation.get(),
                ptpl: header.flags & PTPL != 0,
                can_persist: true,
                reservation,
                registrants,
            },
            executed,
        })
    }
}
