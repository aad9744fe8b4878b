//! Secrets for DH-HMAC-CHAP, and their text representation.

use crate::hash::Hash;
use base64ct::{Base64, Encoding};
use zeroize::Zeroizing;

/// HMAC suffix for a transformed secret ("NVMe Base 2.1", 8.3.5.5.7).
const FABRICS: &[u8] = b"NVMe-over-Fabrics";

/// A secret of a host or of a subsystem.
#[derive(Clone)]
pub struct Secret {
    bytes: Zeroizing<Vec<u8>>,
    /// Hash function of the transformation before use; `None` without transformation.
    transform: Option<Hash>,
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Reason why the text of a secret is invalid. The error contains nothing of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// The text does not have the form `DHHC-1:HH:BASE64:`.
    #[error("a secret has the form DHHC-1:HH:BASE64: (as `nvme gen-dhchap-key` prints it)")]
    Form,
    /// The identifier of the transformation's hash function is unknown.
    #[error("the secret's hash function is none of 00, 01, 02 and 03")]
    Hash,
    /// The base64 part is invalid.
    #[error("the secret's base64 is damaged")]
    Base64,
    /// The secret has an invalid length.
    #[error("the secret has neither 32, 48 nor 64 bytes")]
    Length,
    /// The checksum does not match.
    #[error("the secret's checksum does not match: it is damaged")]
    Checksum,
}

impl Secret {
    /// Parses `DHHC-1:HH:BASE64:`. HH identifies the transformation, and the base64 text encodes
    /// the secret and its CRC-32, little-endian ("NVMe Base 2.1", 8.3.5.5.7).
    ///
    /// # Errors
    /// [`SecretError`] when a part of the text is invalid.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let rest = text.trim().strip_prefix("DHHC-1:");
        let rest = rest.and_then(|rest| rest.strip_suffix(':'));
        let (hash, base64) = rest
            .and_then(|rest| rest.split_once(':'))
            .ok_or(SecretError::Form)?;
        let transform = match hash {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            "03" => Some(Hash::Sha512),
            _ => return Err(SecretError::Hash),
        };
        let bytes = Base64::decode_vec(base64).map_err(|_| SecretError::Base64)?;
        let mut bytes = Zeroizing::new(bytes);
        let len = bytes.len().saturating_sub(4);
        if !matches!(len, 32 | 48 | 64) {
            return Err(SecretError::Length);
        }
        let (secret, sum) = bytes.split_at(len);
        if crc32fast::hash(secret).to_le_bytes() != sum {
            return Err(SecretError::Checksum);
        }
        bytes.truncate(len);
        Ok(Self { bytes, transform })
    }

    /// Returns the HMAC key: the secret, transformed with the NQN of its owner if required.
    pub(crate) fn key(&self, nqn: &str) -> Zeroizing<Vec<u8>> {
        match self.transform {
            Some(hash) => hash.hmac(&self.bytes, &[nqn.as_bytes(), FABRICS]),
            None => self.bytes.clone(),
        }
    }
}

/// Comparison that is not in constant time, for secrets of the same owner.
impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        *self.bytes == *other.bytes && self.transform == other.transform
    }
}

impl Eq for Secret {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Example secret from the documentation of nvme-cli.
    const TEXT: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";

    #[test]
    fn secret_form_matches_nvme_cli() {
        let secret = Secret::parse(TEXT).unwrap();
        assert_eq!(secret.bytes.len(), 32);
        assert_eq!(secret.bytes[..4], [0x89, 0xae, 0xb3, 0x1a]);
        assert_eq!(*secret.key("nqn.x"), *secret.bytes);
        let other = Secret::parse(&TEXT.replace(":00:", ":01:")).unwrap();
        assert_ne!(*other.key("nqn.x"), *other.bytes);
        assert_ne!(*other.key("nqn.x"), *other.key("nqn.y"));
        assert!(secret != other && secret == secret.clone());
        assert!(Secret::parse(&format!("{TEXT}\n")).is_ok());
    }

    #[test]
    fn malformed_secret_is_refused_and_not_shown() {
        let base64 = "ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n";
        for (text, error) in [
            (String::new(), SecretError::Form),
            (base64.into(), SecretError::Form),
            (TEXT.replace("DHHC-1", "DHHC-2"), SecretError::Form),
            (TEXT.trim_end_matches(':').into(), SecretError::Form),
            (TEXT.replace(":00:", ":04:"), SecretError::Hash),
            (TEXT.replace(":00:", ":0:"), SecretError::Hash),
            (TEXT.replace("ia6z", "ia6*"), SecretError::Base64),
            (TEXT.replace("ia6z", ""), SecretError::Length),
            (TEXT.replace(base64, ""), SecretError::Length),
            (TEXT.replace("ia6z", "ia6y"), SecretError::Checksum),
        ] {
            let found = Secret::parse(&text).unwrap_err();
            assert_eq!(found, error, "{text}");
            assert!(!found.to_string().contains("ia6"));
        }
        let shown = format!("{:?}", Secret::parse(TEXT).unwrap());
        assert_eq!(shown, "Secret(..)");
    }
}
