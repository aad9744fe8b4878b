//! Access to fields of data structures by the offsets in the standard. The layouts of crate `nvme`
//! are not used for data from a controller, because an error in them would then go unnoticed.

/// Returns the byte at offset `at`; 0 beyond the end.
pub fn u8_at(bytes: &[u8], at: usize) -> u8 {
    bytes.get(at).copied().unwrap_or(0)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    for (i, byte) in array.iter_mut().enumerate() {
        *byte = u8_at(bytes, at + i);
    }
    array
}

/// Returns the little-endian 16-bit value at byte offset `at`.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

/// Returns the little-endian 32-bit value at byte offset `at`.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

/// Returns the little-endian 64-bit value at byte offset `at`.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// Returns the little-endian 128-bit value at byte offset `at`.
pub fn u128_at(bytes: &[u8], at: usize) -> u128 {
    u128::from_le_bytes(array(bytes, at))
}

/// Returns the bytes from offset `from` to `to`, exclusive; fewer if `bytes` ends earlier.
pub fn slice(bytes: &[u8], from: usize, to: usize) -> &[u8] {
    let to = to.min(bytes.len());
    bytes.get(from.min(to)..to).unwrap_or_default()
}

/// Returns the offset of the first nonzero byte between `from` and `to`, if there is one.
pub fn first_nonzero(bytes: &[u8], from: usize, to: usize) -> Option<usize> {
    let at = slice(bytes, from, to).iter().position(|byte| *byte != 0)?;
    Some(from + at)
}

/// Returns `len` bytes of test data that differ for each block and each seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
