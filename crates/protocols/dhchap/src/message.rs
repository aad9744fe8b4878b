//! Messages on the wire ("NVMe Base 2.1", 8.3.5.4 and 8.3.5.5). All numbers are little-endian.

use crate::group::Group;
use crate::hash::Hash;

/// Maximum size of a message in bytes: a reply with the largest hash and group.
pub const MAX_MESSAGE_LEN: usize = 16 + 2 * 64 + 1024;

/// Type and identifier of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind(pub u8, pub u8);

impl Kind {
    pub const NEGOTIATE: Kind = Kind(0, 0);
    pub const CHALLENGE: Kind = Kind(1, 1);
    pub const REPLY: Kind = Kind(1, 2);
    pub const SUCCESS1: Kind = Kind(1, 3);
    pub const SUCCESS2: Kind = Kind(1, 4);
    /// Failure message of the host.
    pub const FAILURE2: Kind = Kind(0, 0xf0);
    /// Failure message of the controller.
    pub const FAILURE1: Kind = Kind(0, 0xf1);
}

/// Reason for a failed transaction, as sent to the other side (reason code explanation).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure(pub u8);

impl Failure {
    /// Authentication failed.
    pub const FAILED: Failure = Failure(1);
    /// The two sides have no authentication protocol in common.
    pub const PROTOCOL: Failure = Failure(2);
    /// Secure channel concatenation is not supported.
    pub const CONCATENATION: Failure = Failure(3);
    /// The two sides have no hash function in common.
    pub const HASH: Failure = Failure(4);
    /// The two sides have no Diffie-Hellman group in common.
    pub const GROUP: Failure = Failure(5);
    /// A message has invalid contents.
    pub const PAYLOAD: Failure = Failure(6);
    /// The message is out of order.
    pub const ORDER: Failure = Failure(7);
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match *self {
            Self::FAILED => "authentication failed",
            Self::PROTOCOL => "no authentication protocol in common",
            Self::CONCATENATION => "secure channel concatenation mismatch",
            Self::HASH => "no hash function in common",
            Self::GROUP => "no Diffie-Hellman group in common",
            Self::PAYLOAD => "a message with wrong contents",
            Self::ORDER => "a message out of turn",
            _ => "authentication failed for an unknown reason",
        })
    }
}

/// Parser of a message's fields.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (these, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(these)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
}

/// Returns the kind and the transaction identifier of a message, from its first 6 bytes.
pub(crate) fn head(message: &[u8]) -> Option<(Kind, u16)> {
    let mut reader = Reader::new(message);
    let kind = Kind(reader.u8()?, reader.u8()?);
    reader.u16()?;
    Some((kind, reader.u16()?))
}

/// Returns the contents of a message, or a failure reason unless it has this kind and transaction.
fn body(message: &[u8], wanted: Kind, transaction: u16) -> Result<Reader<'_>, Failure> {
    let (kind, of) = head(message).ok_or(Failure::PAYLOAD)?;
    if kind != wanted {
        return Err(Failure::ORDER);
    }
    if of != transaction {
        return Err(Failure::PAYLOAD);
    }
    Ok(Reader::new(message.get(6..).unwrap_or_default()))
}

fn begin(kind: Kind, transaction: u16) -> Vec<u8> {
    let mut message = vec![kind.0, kind.1, 0, 0];
    message.extend(transaction.to_le_bytes());
    message
}

/// Builds the host's AUTH_Negotiate message.
pub(crate) fn negotiate(transaction: u16, hashes: &[Hash], groups: &[Group]) -> Vec<u8> {
    let mut message = begin(Kind::NEGOTIATE, transaction);
    // No secure channel, and one authentication protocol.
    message.extend([0, 1]);
    message.extend([1, 0, hashes.len() as u8, groups.len() as u8]);
    let mut list = [0; 60];
    for (place, hash) in list.iter_mut().zip(hashes) {
        *place = hash.id();
    }
    for (place, group) in list.iter_mut().skip(30).zip(groups) {
        *place = group.id();
    }
    message.extend(list);
    message
}

/// Returns the transaction identifier of an AUTH_Negotiate message, and which of `hashes` and
/// `groups` the host offers.
pub(crate) fn negotiated(
    message: &[u8],
    hashes: &[Hash],
    groups: &[Group],
) -> Result<(u16, Hash, Group), Failure> {
    let (_, transaction) = head(message).ok_or(Failure::PAYLOAD)?;
    let mut reader = body(message, Kind::NEGOTIATE, transaction)?;
    let (concatenation, count) = (reader.u8(), reader.u8());
    let (Some(concatenation), Some(count @ 1..)) = (concatenation, count) else {
        return Err(Failure::PAYLOAD);
    };
    if message.len() < 8 + 64 * usize::from(count) {
        return Err(Failure::PAYLOAD);
    }
    if concatenation != 0 {
        return Err(Failure::CONCATENATION);
    }
    for _ in 0..count {
        let (Some(protocol), Some(_)) = (reader.u8(), reader.u8()) else {
            return Err(Failure::PAYLOAD);
        };
        let lengths = (reader.u8(), reader.u8());
        let (Some(hash_len @ ..=30), Some(group_len @ ..=30)) = lengths else {
            return Err(Failure::PAYLOAD);
        };
        let lists = (reader.bytes(30), reader.bytes(30));
        let (Some(offered), Some(offered_groups)) = lists else {
            return Err(Failure::PAYLOAD);
        };
        if protocol != 1 {
            continue;
        }
        let offers = |list: &[u8], len: u8, id: u8| list.iter().take(len.into()).any(|o| *o == id);
        let hash = hashes
            .iter()
            .find(|hash| offers(offered, hash_len, hash.id()));
        let group = groups
            .iter()
            .find(|group| offers(offered_groups, group_len, group.id()));
        return Ok((
            transaction,
            *hash.ok_or(Failure::HASH)?,
            *group.ok_or(Failure::GROUP)?,
        ));
    }
    Err(Failure::PROTOCOL)
}

/// Contents of the controller's challenge message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Challenge<'a> {
    pub hash: u8,
    pub group: u8,
    pub sequence: u32,
    pub challenge: &'a [u8],
    pub public: &'a [u8],
}

impl<'a> Challenge<'a> {
    pub(crate) fn message(&self, transaction: u16) -> Vec<u8> {
        let mut message = begin(Kind::CHALLENGE, transaction);
        message.extend([self.challenge.len() as u8, 0, self.hash, self.group]);
        message.extend((self.public.len() as u16).to_le_bytes());
        message.extend(self.sequence.to_le_bytes());
        message.extend(self.challenge);
        message.extend(self.public);
        message
    }

    pub(crate) fn parse(message: &'a [u8], transaction: u16) -> Result<Self, Failure> {
        let mut reader = body(message, Kind::CHALLENGE, transaction)?;
        let mut parse = || {
            let (len, _) = (reader.u8()?, reader.u8()?);
            let (hash, group) = (reader.u8()?, reader.u8()?);
            let public_len = reader.u16()?;
            Some(Self {
                hash,
                group,
                sequence: reader.u32()?,
                challenge: reader.bytes(len.into())?,
                public: reader.bytes(public_len.into())?,
            })
        };
        parse().ok_or(Failure::PAYLOAD)
    }
}

/// Contents of the host's reply message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reply<'a> {
    pub response: &'a [u8],
    /// The host's own challenge, if the controller must authenticate.
    pub challenge: Option<&'a [u8]>,
    pub sequence: u32,
    pub public: &'a [u8],
}

impl<'a> Reply<'a> {
    pub(crate) fn message(&self, transaction: u16) -> Vec<u8> {
        let mut message = begin(Kind::REPLY, transaction);
        let valid = u8::from(self.challenge.is_some());
        message.extend([self.response.len() as u8, 0, valid, 0]);
        message.extend((self.public.len() as u16).to_le_bytes());
        message.extend(self.sequence.to_le_bytes());
        message.extend(self.response);
        match self.challenge {
            Some(challenge) => message.extend(challenge),
            None => message.extend(std::iter::repeat_n(0, self.response.len())),
        }
        message.extend(self.public);
        message
    }

    pub(crate) fn parse(message: &'a [u8], transaction: u16, hash: Hash) -> Result<Self, Failure> {
        let mut reader = body(message, Kind::REPLY, transaction)?;
        let mut parse = || {
            let (len, _) = (reader.u8()?, reader.u8()?);
            let (valid, _) = (reader.u8()?, reader.u8()?);
            let public_len = reader.u16()?;
            let sequence = reader.u32()?;
            if usize::from(len) != hash.len() {
                return None;
            }
            let response = reader.bytes(hash.len())?;
            let challenge = reader.bytes(hash.len())?;
            Some(Self {
                response,
                challenge: (valid & 1 != 0).then_some(challenge),
                sequence,
                public: reader.bytes(public_len.into())?,
            })
        };
        parse().ok_or(Failure::PAYLOAD)
    }
}

/// Builds the Success1 message, with the controller's response if the host asked for it.
pub(crate) fn success1(transaction: u16, hash: Hash, response: Option<&[u8]>) -> Vec<u8> {
    let mut message = begin(Kind::SUCCESS1, transaction);
    let valid = u8::from(response.is_some());
    message.extend([hash.len() as u8, 0, valid, 0, 0, 0, 0, 0, 0, 0]);
    message.extend(response.unwrap_or_default());
    message
}

/// Parses the response in a Success1 message.
pub(crate) fn response(
    message: &[u8],
    transaction: u16,
    hash: Hash,
) -> Result<Option<&[u8]>, Failure> {
    let mut reader = body(message, Kind::SUCCESS1, transaction)?;
    let mut parse = || {
        let (len, _, valid) = (reader.u8()?, reader.u8()?, reader.u8()?);
        reader.bytes(7)?;
        match valid & 1 {
            0 => Some(None),
            _ if usize::from(len) == hash.len() => reader.bytes(hash.len()).map(Some),
            _ => None,
        }
    };
    parse().ok_or(Failure::PAYLOAD)
}

/// Builds the Success2 message, which confirms the controller's response.
pub(crate) fn success2(transaction: u16) -> Vec<u8> {
    let mut message = begin(Kind::SUCCESS2, transaction);
    message.extend([0; 10]);
    message
}

/// Encodes a message that ends a transaction, from the host or the controller.
pub(crate) fn failure(kind: Kind, transaction: u16, why: Failure) -> Vec<u8> {
    let mut message = begin(kind, transaction);
    message.extend([1, why.0]);
    message
}

/// Returns the failure reason if this message ends the transaction.
pub(crate) fn failed(message: &[u8], kind: Kind) -> Option<Failure> {
    let (found, _) = head(message)?;
    (found == kind).then(|| Failure(message.get(7).copied().unwrap_or_default()))
}
