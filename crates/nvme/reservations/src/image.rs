//! Encoding of the state.
//!
//! ```text
//!   0  magic "VNVMERSV"        40  generation            72  namespace (NGUID), 16 bytes
//!   8  version                 44  type, 0 for none      88  registrants, 32 bytes each
//!  12  length of it all        45  flags                     operations, 24 bytes each
//!  16  sequence                46  registrants               CRC-32 of everything before it
//!  24  boot, 16 bytes          48  index of the holder       notices, 32 bytes each
//!                              50  operations, 52 notices
//! ```
//!
//! Integers are little endian. Reserved fields are 0, and anything else is refused. Values that no
//! [`Reservations`] can have are refused as well, because the file may have been written by
//! anybody.

use crate::host::HostId;
use crate::state::{MAX_REGISTRANTS, Registrant, Reservation, Reservations};
use crate::types::{Notification, ReservationType};
use nvme::Status;
use nvme::cmd::reservation::Rtype;
use nvme::log::ReservationNotificationType;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 8] = *b"VNVMERSV";
const VERSION: u32 = 2;
/// Version of images without notices, which have zeroes in their place.
const WITHOUT_NOTICES: u32 = 1;
/// Value of the holder's index when no single registrant holds the reservation.
const NO_HOLDER: u16 = 0xffff;

const PTPL: u8 = 1;

/// Maximum number of operations in an image.
pub const MAX_EXECUTED: usize = 96;
/// Maximum number of notices in an image.
pub const MAX_NOTICES: usize = 64;

/// Size of the largest image in bytes.
pub(crate) const MAX_IMAGE_LEN: usize = length(MAX_REGISTRANTS, MAX_EXECUTED, MAX_NOTICES);

/// Returns the size in bytes of an image with these numbers of entries.
const fn length(registrants: usize, executed: usize, notices: usize) -> usize {
    size_of::<Header>()
        + registrants * size_of::<Entry>()
        + executed * size_of::<Operation>()
        + notices * size_of::<NoticeEntry>()
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
    notices: U16,
    reserved: [u8; 18],
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

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct NoticeEntry {
    host: [u8; 16],
    number: U64,
    extended: u8,
    kind: u8,
    reserved: [u8; 6],
}

const _: () = assert!(size_of::<NoticeEntry>() == 32);

/// An executed operation. After a restart of the process, a repeated command is answered from this
/// record instead of being executed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Executed {
    /// Unique identifier of the command that has executed the operation.
    pub token: [u8; 16],
    /// Status with which the command was completed.
    pub status: Status,
}

/// A notification of a host, with its number. A controller that continues after a restart of the
/// process adds the notices with greater numbers than the last one that it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberedNotice {
    /// Number of the notice, from 1, which increases with each notice of the namespace.
    pub number: u64,
    /// Host that is notified.
    pub host: HostId,
    /// Kind of the notification.
    pub notification: Notification,
}

/// State of a namespace's reservations with everything that the next process needs beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredReservations {
    /// Registrants and reservation.
    pub state: Reservations,
    /// Operations executed last, oldest first, at most [`MAX_EXECUTED`].
    pub executed: Vec<Executed>,
    /// Newest notices, oldest first, at most [`MAX_NOTICES`].
    pub notices: Vec<NumberedNotice>,
}

impl From<Reservations> for StoredReservations {
    fn from(state: Reservations) -> Self {
        Self {
            state,
            ..Self::default()
        }
    }
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
    /// Newest notices, oldest first, at most [`MAX_NOTICES`].
    pub notices: Vec<NumberedNotice>,
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
        let length = length(
            state.registrants.len(),
            self.executed.len(),
            self.notices.len(),
        );
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
            notices: (self.notices.len() as u16).into(),
            reserved: [0; 18],
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
        for notice in &self.notices {
            let entry = NoticeEntry {
                host: *notice.host.bytes(),
                number: notice.number.into(),
                extended: notice.host.is_extended().into(),
                kind: notice.notification.log_page_type().0,
                reserved: [0; 6],
            };
            bytes.extend(entry.as_bytes());
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
        let is_known = (WITHOUT_NOTICES..=VERSION).contains(&version);
        ensure!(is_known, "there is no such version");
        let has_none = header.notices == U16::ZERO;
        ensure!(
            version > WITHOUT_NOTICES || has_none,
            "it has notices, which its version does not know"
        );
        let entries = body.get(size_of::<Header>()..).unwrap_or_default();
        Self::checked(header, entries)
    }

    /// Decodes the entries after the header, and checks that the values are consistent.
    fn checked(header: &Header, rest: &[u8]) -> Result<Self, ImageError> {
        let count = usize::from(header.registrants.get());
        let operations = usize::from(header.executed.get());
        let notices = usize::from(header.notices.get());
        let parts = || {
            let (entries, rest) = <[Entry]>::ref_from_prefix_with_elems(rest, count).ok()?;
            let executed = <[Operation]>::ref_from_prefix_with_elems(rest, operations);
            let (executed, rest) = executed.ok()?;
            let notices = <[NoticeEntry]>::ref_from_bytes_with_elems(rest, notices);
            Some((entries, executed, notices.ok()?))
        };
        let Some((entries, operations, notices)) = parts() else {
            return Err(ImageError::Contradiction("its length"));
        };
        ensure!(count <= MAX_REGISTRANTS, "there are too many registrants");
        ensure!(
            operations.len() <= MAX_EXECUTED,
            "there are too many operations"
        );
        ensure!(notices.len() <= MAX_NOTICES, "there are too many notices");
        ensure!(
            header.flags & !PTPL == 0 && header.reserved == [0; 18],
            "something is set that means nothing"
        );
        let mut registrants: Vec<Registrant> = Vec::with_capacity(count);
        for entry in entries {
            ensure!(
                entry.extended <= 1 && entry.reserved == [0; 7],
                "something of a registrant is set that means nothing"
            );
            let host = host_of(entry.host, entry.extended)?;
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
        let mut kept = Vec::with_capacity(notices.len());
        let mut last = 0;
        for entry in notices {
            let number = entry.number.get();
            ensure!(
                entry.extended <= 1 && entry.reserved == [0; 6],
                "something of a notice is set that means nothing"
            );
            ensure!(number > last, "notices are not in order");
            last = number;
            let notification = Notification::of(ReservationNotificationType(entry.kind));
            let Some(notification) = notification else {
                return Err(ImageError::Contradiction("there is no such notice"));
            };
            kept.push(NumberedNotice {
                number,
                host: host_of(entry.host, entry.extended)?,
                notification,
            });
        }
        Ok(Image {
            notices: kept,
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

/// Decodes a Host Identifier, which is `extended` or has only its first eight bytes.
fn host_of(bytes: [u8; 16], extended: u8) -> Result<HostId, ImageError> {
    if extended == 1 {
        return Ok(HostId::extended(bytes));
    }
    let [low @ .., _, _, _, _, _, _, _, _] = bytes;
    let host = HostId::short(u64::from_le_bytes(low));
    ensure!(*host.bytes() == bytes, "a Host Identifier is too long");
    Ok(host)
}
