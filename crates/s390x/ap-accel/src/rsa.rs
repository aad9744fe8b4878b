//! The arithmetic: checked operands, then `crypto-bigint`.

use alloc::vec;
use alloc::vec::Vec;

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::zeroize::Zeroize;
use crypto_bigint::{BoxedUint, NonZero, Odd, Resize};

use crate::message::Error;

/// A private key by its primes, big-endian numbers of any length. `u` is the
/// inverse of `q` modulo `p`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of PKCS #1")]
pub struct CrtKey<'a> {
    pub p: &'a [u8],
    pub q: &'a [u8],
    pub dp: &'a [u8],
    pub dq: &'a [u8],
    pub u: &'a [u8],
}

/// An odd modulus of more than one.
struct Modulus {
    params: BoxedMontyParams,
    value: NonZero<BoxedUint>,
}

impl Modulus {
    fn new(bytes: &[u8]) -> Result<Modulus, Error> {
        let bytes = significant(bytes);
        // Neither nothing nor one: there would be no number below it that is not zero.
        if bytes.is_empty() || bytes == [1] {
            return Err(Error::OPERAND_INVALID);
        }
        let value = number(bytes, bits(bytes))?;
        let odd: Option<Odd<BoxedUint>> = value.to_odd().into();
        let value: Option<NonZero<BoxedUint>> = value.into_nz().into();
        match (odd, value) {
            (Some(odd), Some(value)) => Ok(Modulus {
                params: BoxedMontyParams::new_vartime(odd),
                value,
            }),
            _ => Err(Error::EVEN_MODULUS),
        }
    }

    fn precision(&self) -> u32 {
        self.params.bits_precision()
    }

    /// Decodes a number below the modulus.
    fn residue(&self, bytes: &[u8]) -> Result<BoxedUint, Error> {
        let value = number(significant(bytes), self.precision())?;
        if value < *self.value {
            Ok(value)
        } else {
            Err(Error::OPERAND_INVALID)
        }
    }

    /// Returns the modulus in more bits.
    fn wide(&self, precision: u32) -> BoxedUint {
        Resize::resize(&*self.value, precision)
    }

    fn reduce(&self, value: &BoxedUint) -> BoxedUint {
        value.rem(&self.value)
    }

    fn form(&self, value: BoxedUint) -> BoxedMontyForm {
        BoxedMontyForm::new(value, &self.params)
    }

    /// Returns `base ^ exponent`. The time depends on the exponent's length in bytes, not on its
    /// bits.
    fn pow(&self, base: BoxedUint, exponent: &[u8]) -> Result<BoxedMontyForm, Error> {
        let exponent = significant(exponent);
        if exponent.is_empty() {
            return Err(Error::OPERAND_INVALID);
        }
        let length = bits(exponent);
        let mut exponent = number(exponent, length)?;
        let power = self.form(base).pow_bounded_exp(&exponent, length);
        exponent.zeroize();
        Ok(power)
    }
}

/// Returns `message ^ exponent mod modulus`, as long as `message`.
pub fn modular_exponentiation(
    message: &[u8],
    exponent: &[u8],
    modulus: &[u8],
) -> Result<Vec<u8>, Error> {
    let modulus = Modulus::new(modulus)?;
    let power = modulus.pow(modulus.residue(message)?, exponent)?;
    fit(&power.retrieve(), message.len())
}

/// Performs the private operation by the Chinese remainder theorem; the result is as long as
/// `message` (RFC 8017, 5.1.2).
pub fn crt(message: &[u8], key: &CrtKey<'_>) -> Result<Vec<u8>, Error> {
    let (p, q) = (Modulus::new(key.p)?, Modulus::new(key.q)?);
    let whole = p.precision() + q.precision();
    let modulus = p.wide(whole).wrapping_mul(q.wide(whole));
    let message_number = number(significant(message), whole)?;
    if message_number >= modulus {
        return Err(Error::OPERAND_INVALID);
    }
    let m1 = p.pow(p.reduce(&message_number), key.dp)?;
    let mut m2 = q.pow(q.reduce(&message_number), key.dq)?.retrieve();
    let difference = m1.sub(&p.form(p.reduce(&m2)));
    let mut h = p.form(p.residue(key.u)?).mul(&difference).retrieve();
    let mut result = Resize::resize(&h, whole)
        .wrapping_mul(q.wide(whole))
        .wrapping_add(Resize::resize(&m2, whole));
    let bytes = fit(&result, message.len());
    for secret in [&mut m2, &mut h, &mut result] {
        secret.zeroize();
    }
    bytes
}

/// Returns a big-endian number without its leading zeros.
fn significant(bytes: &[u8]) -> &[u8] {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    bytes.get(zeros..).unwrap_or_default()
}

fn bits(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).map_or(u32::MAX, |len| len.saturating_mul(8))
}

/// Decodes the number, if it fits.
fn number(bytes: &[u8], precision: u32) -> Result<BoxedUint, Error> {
    BoxedUint::from_be_slice(bytes, precision).map_err(|_| Error::OPERAND_INVALID)
}

/// Encodes the number in `length` bytes, right-justified.
fn fit(value: &BoxedUint, length: usize) -> Result<Vec<u8>, Error> {
    let bytes = value.to_be_bytes();
    let bytes = significant(&bytes);
    let zeros = length.checked_sub(bytes.len());
    let mut result = vec![0; zeros.ok_or(Error::OPERAND_INVALID)?];
    result.extend_from_slice(bytes);
    Ok(result)
}
