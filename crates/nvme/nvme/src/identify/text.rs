//! Text fields: ASCII padded with spaces (NVMe Base 2.1, 1.4), and NVMe Qualified Names (4.7).

use core::fmt;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// An ASCII field of `N` bytes, left justified and padded with spaces.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct Ascii<const N: usize>(pub [u8; N]);

impl<const N: usize> Ascii<N> {
    /// Creates a field with this text. Returns `None` when the text is longer than the field, or
    /// has a character outside 20h to 7Eh.
    #[expect(
        clippy::indexing_slicing,
        reason = "`i` is below the text's length, which is at most `N`; `const` has no iterators"
    )]
    pub const fn new(text: &str) -> Option<Self> {
        let text = text.as_bytes();
        if text.len() > N {
            return None;
        }
        let mut field = [b' '; N];
        let mut i = 0;
        while i < text.len() {
            if !matches!(text[i], 0x20..=0x7e) {
                return None;
            }
            field[i] = text[i];
            i += 1;
        }
        Some(Self(field))
    }

    /// Returns the bytes without padding: spaces, and zeroes that some devices use.
    pub const fn trimmed(&self) -> &[u8] {
        let mut bytes: &[u8] = &self.0;
        while let [rest @ .., b' ' | 0] = bytes {
            bytes = rest;
        }
        bytes
    }

    /// Returns the text without padding; `None` when the field contains anything but printable
    /// ASCII.
    pub fn as_str(&self) -> Option<&str> {
        let bytes = self.trimmed();
        if bytes.iter().all(|byte| matches!(byte, 0x20..=0x7e)) {
            core::str::from_utf8(bytes).ok()
        } else {
            None
        }
    }
}

impl<const N: usize> Default for Ascii<N> {
    /// Returns a field of spaces.
    fn default() -> Self {
        Self([b' '; N])
    }
}

impl<const N: usize> fmt::Display for Ascii<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.as_str() {
            Some(text) => f.pad(text),
            None => write!(f, "{}", self.trimmed().escape_ascii()),
        }
    }
}

impl<const N: usize> fmt::Debug for Ascii<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.trimmed().escape_ascii())
    }
}

/// An NVMe Qualified Name in its field of 256 bytes: UTF-8, ended by a zero
/// byte (NVMe Base 2.1, 4.7).
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct Nqn(pub [u8; 256]);

impl Nqn {
    /// Maximum length of a name in bytes, without the terminating zero.
    pub const MAX_LEN: usize = 223;

    /// Creates a field with this name. Returns `None` when the name is longer than [`Nqn::MAX_LEN`]
    /// or contains a zero byte.
    pub fn new(name: &str) -> Option<Self> {
        if name.len() > Self::MAX_LEN || name.bytes().any(|byte| byte == 0) {
            return None;
        }
        let mut field = Self::new_zeroed();
        field
            .0
            .get_mut(..name.len())?
            .copy_from_slice(name.as_bytes());
        Some(field)
    }

    /// Returns the bytes before the first zero byte.
    pub fn trimmed(&self) -> &[u8] {
        self.0.split(|&byte| byte == 0).next().unwrap_or_default()
    }

    /// Returns the name; `None` when it is not valid UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        core::str::from_utf8(self.trimmed()).ok()
    }
}

impl Default for Nqn {
    fn default() -> Self {
        Self::new_zeroed()
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.as_str() {
            Some(name) => f.pad(name),
            None => write!(f, "{}", self.trimmed().escape_ascii()),
        }
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.trimmed().escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::{format, string::ToString};

    use super::*;

    #[test]
    fn ascii_is_padded_and_validated() {
        let field = Ascii::<8>::new("vnvme 1").unwrap();
        assert_eq!(field.0, *b"vnvme 1 ");
        assert_eq!(field.as_str(), Some("vnvme 1"));
        assert_eq!(Ascii::<4>::new("12345"), None);
        assert_eq!(Ascii::<4>::new("a\n"), None);
        assert_eq!(Ascii::<4>::new("ä"), None);
        assert_eq!(Ascii::<4>::new("").unwrap().0, *b"    ");
        assert_eq!(Ascii::<4>::default().as_str(), Some(""));
    }

    #[test]
    fn ascii_of_device_may_hold_any_bytes() {
        assert_eq!(Ascii([0u8; 4]).as_str(), Some(""));
        assert_eq!(Ascii(*b"ab\0\0").to_string(), "ab");
        let odd = Ascii(*b"a\xff\0b");
        assert_eq!(odd.as_str(), None);
        assert_eq!(odd.to_string(), "a\\xff\\x00b");
        assert_eq!(format!("{odd:?}"), "\"a\\xff\\x00b\"");
    }

    #[test]
    fn nqn_ends_at_zero_byte() {
        let nqn = Nqn::new("nqn.2014-08.org.nvmexpress:uuid:x").unwrap();
        assert_eq!(nqn.as_str(), Some("nqn.2014-08.org.nvmexpress:uuid:x"));
        assert_eq!(nqn.0[33], 0);
        assert_eq!(Nqn::new(&"a".repeat(224)), None);
        assert!(Nqn::new(&"a".repeat(223)).is_some());
        assert_eq!(Nqn::new("a\0b"), None);
        assert_eq!(Nqn([b'a'; 256]).trimmed().len(), 256);
        assert_eq!(Nqn([0xff; 256]).as_str(), None);
    }
}
