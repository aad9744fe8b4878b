//! Memory for keys.

use dma::Buffer;
use std::fmt;
use std::ops::{Deref, DerefMut};
use zeroize::Zeroize;

/// Size in bytes of the pages that are excluded from core dumps.
const PAGE: usize = 4096;

/// Bytes of a key or passphrase: zeroed when dropped, excluded from core dumps, and never printed.
pub struct SecretBytes {
    /// Whole pages, so that no other data shares their treatment.
    pages: Buffer,
    len: usize,
}

impl SecretBytes {
    /// Allocates `len` zero bytes. The caller has bounded the length.
    pub fn new(len: usize) -> Self {
        let pages = Buffer::new(len.next_multiple_of(PAGE).max(PAGE));
        dma::dumps::exclude(&*pages);
        Self { pages, len }
    }

    /// Copies bytes whose owner zeroes the original.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut secret = Self::new(bytes.len());
        secret.copy_from_slice(bytes);
        secret
    }

    /// Shortens the secret to its first `len` bytes; a longer one stays as it is.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl Deref for SecretBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.pages.get(..self.len).unwrap_or_default()
    }
}

impl DerefMut for SecretBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.pages.get_mut(..self.len).unwrap_or_default()
    }
}

impl Drop for SecretBytes {
    fn drop(&mut self) {
        self.pages.zeroize();
        dma::dumps::include(&*self.pages);
    }
}

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretBytes(..)")
    }
}
