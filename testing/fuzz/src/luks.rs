//! Hostile LUKS headers: an accepted header is within its bounds, and no key slot leads to a panic.

use luks::{Header, LuksOptions, LuksVolume, unlock};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use volume::{MemVolume, Volume};

/// Size in bytes of a header of version 2 with its metadata, and of the whole storage.
const SIZE: usize = 16 << 10;
const STORAGE: usize = 64 << 10;
/// Metadata of a container with one slot that costs little.
const JSON: &str = r#"{"keyslots":{"0":{"type":"luks2","key_size":32,"af":{"type":"luks1","stripes":4,"hash":"sha256"},"area":{"type":"raw","offset":"32768","size":"8192","encryption":"aes-xts-plain64","key_size":32},"kdf":{"type":"argon2id","time":1,"memory":8,"cpus":1,"salt":"AAECAwQFBgcICQ=="}}},"segments":{"0":{"type":"crypt","offset":"49152","size":"dynamic","iv_tweak":"0","encryption":"aes-xts-plain64","sector_size":512}},"digests":{"0":{"type":"pbkdf2","keyslots":["0"],"segments":["0"],"hash":"sha256","iterations":3,"salt":"AAEC","digest":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}},"config":{}}"#;

fn put(storage: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = storage.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// A good header of version 1.
fn first() -> Vec<u8> {
    let mut storage = vec![0; STORAGE];
    put(&mut storage, 0, b"LUKS\xba\xbe\0\x01aes");
    put(&mut storage, 40, b"xts-plain64");
    put(&mut storage, 72, b"sha1");
    for (at, number) in [(104, 96u32), (108, 32), (164, 3), (208, 0x00AC_71F3)] {
        put(&mut storage, at, &number.to_be_bytes());
    }
    for (at, number) in [(212, 3u32), (248, 8), (252, 4)] {
        put(&mut storage, at, &number.to_be_bytes());
    }
    storage
}

/// A header of version 2 with this metadata, in both copies.
fn second(json: &[u8]) -> Vec<u8> {
    let mut storage = vec![0; STORAGE];
    let json = json.get(..SIZE - 4096).unwrap_or(json);
    for (at, magic) in [(0, b"LUKS\xba\xbe\0\x02"), (SIZE, b"SKUL\xba\xbe\0\x02")] {
        put(&mut storage, at, magic);
        put(&mut storage, at + 8, &(SIZE as u64).to_be_bytes());
        put(&mut storage, at + 72, b"sha256");
        put(&mut storage, at + 256, &(at as u64).to_be_bytes());
        put(&mut storage, at + 4096, json);
    }
    storage
}

/// Makes the checksums of a header of version 2 right.
fn sum(storage: &mut [u8]) {
    for at in [0, SIZE] {
        put(storage, at + 448, &[0; 64]);
        let sum = Sha256::digest(&storage[at..at + SIZE]);
        put(storage, at + 448, &sum);
    }
}

/// The first byte of the input chooses: changes of a good header of either version, or metadata.
///
/// # Panics
/// When an accepted header is not within its bounds.
pub fn luks(input: &[u8]) {
    let Some((&flags, rest)) = input.split_first() else {
        return;
    };
    let mut storage = match flags & 3 {
        0 => first(),
        1 => second(JSON.as_bytes()),
        _ => second(rest),
    };
    if flags & 2 == 0 {
        for change in rest.chunks_exact(3) {
            let [low, high, value] = *change else {
                return;
            };
            let at = usize::from(u16::from_le_bytes([low, high])) % STORAGE;
            storage[at] = value;
        }
    }
    if flags & 4 == 0 && flags & 3 != 0 {
        sum(&mut storage);
    }
    let Ok(header) = Header::read(storage.as_slice(), flags & 8 != 0) else {
        return;
    };
    let payload = header.payload();
    assert!(payload.offset.is_multiple_of(512));
    assert!([512, 1024, 2048, 4096].contains(&payload.sector));
    assert!([256, 512].contains(&header.key_bits()));
    assert!(header.work() <= 8000);
    // Others take too long for a fuzz target.
    if header.work() == 0 {
        assert!(unlock(&header, storage.as_slice(), b"key").is_err());
    }
    let Ok(memory) = MemVolume::new(STORAGE as u64) else {
        return;
    };
    let key = vec![1; header.key_bits() / 8];
    if let Ok(volume) = LuksVolume::new(Arc::new(memory), &header, &key, LuksOptions::default()) {
        let size = volume.info().size;
        assert!(size > 0 && size.is_multiple_of(payload.sector.into()));
        assert!(payload.offset + size <= STORAGE as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unchanged_headers_are_accepted() {
        assert!(Header::read(first().as_slice(), false).is_ok());
        let mut storage = second(JSON.as_bytes());
        sum(&mut storage);
        let header = Header::read(storage.as_slice(), false).unwrap();
        assert_eq!((header.key_bits(), header.work()), (256, 0));
    }
}
