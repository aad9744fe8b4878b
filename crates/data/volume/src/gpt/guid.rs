//! GUIDs in their on-disk and text forms.

/// Globally unique identifier (GUID), stored in the order in which it is written.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Guid([u8; 16]);

impl Guid {
    /// Converts a GUID from its on-disk bytes, where the first three fields are little-endian (UEFI
    /// 2.10, appendix A).
    pub(super) fn from_disk(raw: &[u8]) -> Option<Self> {
        let mut bytes: [u8; 16] = raw.try_into().ok()?;
        for field in [0..4, 4..6, 6..8] {
            bytes.get_mut(field)?.reverse();
        }
        Some(Self(bytes))
    }
}

impl std::str::FromStr for Guid {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORM: &str = "a GUID is written as 32 hexadecimal digits in groups of 8-4-4-4-12";
        let groups: Vec<&str> = text.split('-').collect();
        if groups.iter().map(|group| group.len()).ne([8, 4, 4, 4, 12]) {
            return Err(FORM);
        }
        let mut bytes = [0; 16];
        let digits = groups.concat();
        for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
            for &digit in pair {
                let digit = char::from(digit).to_digit(16).ok_or(FORM)?;
                *byte = *byte << 4 | digit as u8;
            }
        }
        Ok(Self(bytes))
    }
}

impl std::fmt::Display for Guid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Guid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guid_starts_with_little_endian_fields() {
        // The EFI system partition's type, as the UEFI specification writes it and as disks hold
        // it.
        let text = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b";
        let disk = [
            0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e,
            0xc9, 0x3b,
        ];
        let guid = Guid::from_disk(&disk).unwrap();
        assert_eq!(guid.to_string(), text);
        assert_eq!(text.to_uppercase().parse(), Ok(guid));
        for wrong in [
            "",
            "c12a7328",
            "c12a7328f81f11d2ba4b00a0c93ec93b",
            "c12a7328-f81f-11d2-ba4b-00a0c93ec93g",
            "é12a732-f81f-11d2-ba4b-00a0c93ec93b",
        ] {
            assert!(wrong.parse::<Guid>().is_err(), "{wrong}");
        }
    }
}
