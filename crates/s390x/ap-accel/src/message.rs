//! Type 50 requests, type 80 replies and type 82 errors, as
//! `drivers/s390/crypto/zcrypt_msgtype50.c` and `zcrypt_error.h` of Linux describe them. All
//! numbers are big-endian; operands are right-justified in their fields.
//!
//! | key block | modulus field | fields after the 16-byte head |
//! |---|---|---|
//! | 0x0001, 0x0002, 0x0003 | 128, 256, 512 bytes | exponent, modulus, message |
//! | 0x0011, 0x0012, 0x0013 | 128, 256, 512 bytes | p, q, dp, dq, u (half the size each), message |

use alloc::vec;
use alloc::vec::Vec;

use crate::rsa;

/// Reason why a card rejects a request: the reply code of a type 82 message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error(pub u8);

impl Error {
    /// The request is not a message of type 50.
    pub const MESSAGE_TYPE: Error = Error(0x20);
    /// The length in the head is not that of the message or of its format.
    pub const MESSAGE_LENGTH: Error = Error(0x23);
    /// A reserved field of the request is not zero.
    pub const RESERVED_FIELD: Error = Error(0x24);
    /// The request has a key block format that does not exist.
    pub const FORMAT: Error = Error(0x29);
    /// The modulus or a prime is below 2, the exponent is zero, or the message or a coefficient is
    /// not less than its modulus.
    pub const OPERAND_INVALID: Error = Error(0x82);
    /// The modulus, or a prime, is even.
    pub const EVEN_MODULUS: Error = Error(0x85);
}

const HEAD: usize = 16;
const TYPE_50: u8 = 0x50;
const TYPE_80: u8 = 0x80;
const TYPE_82: u8 = 0x82;

/// A request to the card, with its operands still in their big-endian fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// `message ^ exponent mod modulus`.
    ModularExponentiation {
        /// The exponent, big-endian.
        exponent: &'a [u8],
        /// The modulus, big-endian.
        modulus: &'a [u8],
        /// The base of the exponentiation, big-endian.
        message: &'a [u8],
    },
    /// Modular exponentiation with the primes of the modulus.
    Crt {
        /// The private key: p, q, dp, dq and u = q^-1 mod p.
        key: rsa::CrtKey<'a>,
        /// The base of the exponentiation, big-endian.
        message: &'a [u8],
    },
}

impl<'a> Request<'a> {
    /// Parses a request message of type 50; an error holds the reply code for the guest.
    pub fn parse(bytes: &'a [u8]) -> Result<Request<'a>, Error> {
        let (head, body) = bytes.split_at_checked(HEAD).ok_or(Error::MESSAGE_LENGTH)?;
        let &[
            r0,
            kind,
            l0,
            l1,
            r1,
            _ignored,
            r2,
            r3,
            f0,
            f1,
            ref rest @ ..,
        ] = head
        else {
            return Err(Error::MESSAGE_LENGTH);
        };
        if kind != TYPE_50 {
            return Err(Error::MESSAGE_TYPE);
        }
        if usize::from(u16::from_be_bytes([l0, l1])) != bytes.len() {
            return Err(Error::MESSAGE_LENGTH);
        }
        if [r0, r1, r2, r3].iter().chain(rest).any(|byte| *byte != 0) {
            return Err(Error::RESERVED_FIELD);
        }
        let format = u16::from_be_bytes([f0, f1]);
        let field = match format & 0xf {
            1 => 128,
            2 => 256,
            3 => 512,
            _ => return Err(Error::FORMAT),
        };
        match format >> 4 {
            0 => {
                let [exponent, modulus, message] = fields(body, [field; 3])?;
                Ok(Request::ModularExponentiation {
                    exponent,
                    modulus,
                    message,
                })
            }
            1 => {
                let half = field / 2;
                let [p, q, dp, dq, u, message] =
                    fields(body, [half, half, half, half, half, field])?;
                let key = rsa::CrtKey { p, q, dp, dq, u };
                Ok(Request::Crt { key, message })
            }
            _ => Err(Error::FORMAT),
        }
    }

    /// Computes the result of the request, which is as long as the request's message field.
    pub fn compute(&self) -> Result<Vec<u8>, Error> {
        match self {
            Request::ModularExponentiation {
                exponent,
                modulus,
                message,
            } => rsa::modular_exponentiation(message, exponent, modulus),
            Request::Crt { key, message } => rsa::crt(message, key),
        }
    }

    /// Encodes the request, as the driver would send it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (kind, fields): (u16, Vec<&[u8]>) = match *self {
            Request::ModularExponentiation {
                exponent,
                modulus,
                message,
            } => (0, vec![exponent, modulus, message]),
            Request::Crt {
                key: rsa::CrtKey { p, q, dp, dq, u },
                message,
            } => (1, vec![p, q, dp, dq, u, message]),
        };
        let size = match fields.last().map_or(0, |message| message.len()) {
            0..=128 => 1,
            129..=256 => 2,
            _ => 3,
        };
        let length = HEAD + fields.iter().map(|field| field.len()).sum::<usize>();
        let mut head = [0; HEAD];
        head[1] = TYPE_50;
        (head[2], head[3]) = halves(u16::try_from(length).unwrap_or(u16::MAX));
        (head[8], head[9]) = halves(kind << 4 | size);
        let mut bytes = head.to_vec();
        bytes.extend(fields.concat());
        bytes
    }
}

/// Cuts a body into fields of these sizes; nothing may be left over.
fn fields<const N: usize>(mut body: &[u8], sizes: [usize; N]) -> Result<[&[u8]; N], Error> {
    let mut fields = [&[][..]; N];
    for (field, size) in fields.iter_mut().zip(sizes) {
        (*field, body) = body.split_at_checked(size).ok_or(Error::MESSAGE_LENGTH)?;
    }
    if body.is_empty() {
        Ok(fields)
    } else {
        Err(Error::MESSAGE_LENGTH)
    }
}

/// Encodes a type 80 reply with a result.
pub fn reply(result: &[u8]) -> Vec<u8> {
    let length = u16::try_from(HEAD + result.len()).unwrap_or(u16::MAX);
    let mut head = [0; HEAD];
    head[1] = TYPE_80;
    (head[2], head[3]) = halves(length);
    let mut bytes = head.to_vec();
    bytes.extend_from_slice(result);
    bytes
}

/// Returns the two bytes of a field, the high one first.
const fn halves(value: u16) -> (u8, u8) {
    let [high, low] = value.to_be_bytes();
    (high, low)
}

/// Encodes a type 82 reply.
pub fn error_reply(error: Error) -> [u8; 8] {
    [0, TYPE_82, 0, 0, error.0, 0, 0, 0]
}
