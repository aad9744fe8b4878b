//! A writer of containers, independent of the crate's code: another XTS, another splitter.

use aes::cipher::KeyInit;
use aes::{Aes128, Aes256};
use argon2::{Algorithm, Argon2, Params, Version};
use base64ct::{Base64, Encoding};
use pbkdf2::pbkdf2_hmac;
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256, Sha512};
use xts_mode::{Xts128, get_tweak_default};

pub const PASSPHRASE: &[u8] = b"correct horse battery staple\n";

/// Reproducible bytes without a pattern.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 32);
    let mut count: u64 = 0;
    while bytes.len() < len {
        let mut hash = Sha256::new();
        hash.update(seed.to_le_bytes());
        hash.update(count.to_le_bytes());
        bytes.extend_from_slice(&hash.finalize());
        count += 1;
    }
    bytes.truncate(len);
    bytes
}

/// Encrypts sectors; `iv` is the tweak of the first one in units of 512 bytes.
pub fn encrypt(key: &[u8], data: &mut [u8], sector: usize, iv: u64) {
    for (n, part) in data.chunks_mut(sector).enumerate() {
        let tweak = get_tweak_default(u128::from(iv) + (n * sector / 512) as u128);
        let (one, two) = key.split_at(key.len() / 2);
        if key.len() == 32 {
            let (one, two) = (Aes128::new(one.into()), Aes128::new(two.into()));
            Xts128::new(one, two).encrypt_sector(part, tweak);
        } else {
            let (one, two) = (Aes256::new(one.into()), Aes256::new(two.into()));
            Xts128::new(one, two).encrypt_sector(part, tweak);
        }
    }
}

fn hash(name: &str, parts: &[&[u8]]) -> Vec<u8> {
    fn of<D: Digest>(parts: &[&[u8]]) -> Vec<u8> {
        let mut hash = D::new();
        parts.iter().for_each(|part| hash.update(part));
        hash.finalize().to_vec()
    }
    match name {
        "sha1" => of::<Sha1>(parts),
        "sha256" => of::<Sha256>(parts),
        "sha512" => of::<Sha512>(parts),
        _ => panic!("{name}"),
    }
}

fn pbkdf2(name: &str, secret: &[u8], salt: &[u8], iterations: u32, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    match name {
        "sha1" => pbkdf2_hmac::<Sha1>(secret, salt, iterations, &mut out),
        "sha256" => pbkdf2_hmac::<Sha256>(secret, salt, iterations, &mut out),
        "sha512" => pbkdf2_hmac::<Sha512>(secret, salt, iterations, &mut out),
        _ => panic!("{name}"),
    }
    out
}

/// Splits a key into stripes (LUKS1, 2.4).
fn split(name: &str, key: &[u8], stripes: usize, seed: u64) -> Vec<u8> {
    let mut all = noise(seed, key.len() * (stripes - 1));
    let mut sum = vec![0; key.len()];
    for stripe in all.chunks(key.len()) {
        sum.iter_mut()
            .zip(stripe)
            .for_each(|(to, from)| *to ^= from);
        let size = hash(name, &[]).len();
        let parts = sum.chunks(size).enumerate().flat_map(|(n, part)| {
            let mut hash = hash(name, &[&(n as u32).to_be_bytes(), part]);
            hash.truncate(part.len());
            hash
        });
        sum = parts.collect();
    }
    all.extend(sum.iter().zip(key).map(|(sum, key)| sum ^ key));
    all
}

/// Description of a container to be written.
#[derive(Clone, Debug)]
pub struct Container {
    pub version: u16,
    pub key: Vec<u8>,
    pub sector: usize,
    pub hash: &'static str,
    /// `pbkdf2`, `argon2i` or `argon2id`.
    pub kdf: &'static str,
    /// Passphrase of each slot, and its number.
    pub slots: Vec<(usize, Vec<u8>)>,
    pub stripes: usize,
    pub payload: u64,
    /// Fixed length of the payload, and a number that is added to its tweaks.
    pub len: Option<u64>,
    pub iv_offset: u64,
}

impl Container {
    pub fn new(version: u16, key_len: usize, sector: usize) -> Self {
        Self {
            version,
            key: noise(99, key_len),
            sector,
            hash: "sha256",
            kdf: "pbkdf2",
            slots: vec![(0, PASSPHRASE.to_vec())],
            stripes: 40,
            payload: 1 << 20,
            len: None,
            iv_offset: 0,
        }
    }

    /// Returns the header with its slots.
    pub fn header(&self) -> Vec<u8> {
        match self.version {
            1 => self.first(),
            _ => self.second(|_| {}),
        }
    }

    fn material(&self, number: usize, derived: &[u8]) -> Vec<u8> {
        let mut stripes = split(self.hash, &self.key, self.stripes, number as u64);
        stripes.resize(stripes.len().next_multiple_of(512), 0);
        encrypt(derived, &mut stripes, 512, 0);
        stripes
    }

    fn first(&self) -> Vec<u8> {
        let mut header = vec![0; 256 << 10];
        let mut put = |at: usize, bytes: &[u8]| header[at..][..bytes.len()].copy_from_slice(bytes);
        put(0, b"LUKS\xba\xbe\0\x01aes");
        put(40, b"xts-plain64");
        put(72, self.hash.as_bytes());
        put(104, &((self.payload / 512) as u32).to_be_bytes());
        put(108, &(self.key.len() as u32).to_be_bytes());
        let salt = noise(1, 32);
        put(112, &pbkdf2(self.hash, &self.key, &salt, 10, 20));
        put(132, &salt);
        put(164, &10u32.to_be_bytes());
        put(168, b"0f0e0d0c-0b0a-0908-0706-050403020100");
        for number in 0..8 {
            let at = 208 + number * 48;
            put(at, &0x0000_DEADu32.to_be_bytes());
            put(at + 44, &(self.stripes as u32).to_be_bytes());
        }
        for (number, passphrase) in &self.slots {
            let (at, place) = (208 + number * 48, 4096 + number * 8192);
            let salt = noise(10 + *number as u64, 32);
            put(at, &0x00AC_71F3u32.to_be_bytes());
            put(at + 4, &7u32.to_be_bytes());
            put(at + 8, &salt);
            put(at + 40, &((place / 512) as u32).to_be_bytes());
            let derived = pbkdf2(self.hash, passphrase, &salt, 7, self.key.len());
            put(place, &self.material(*number, &derived));
        }
        header
    }

    /// Returns a LUKS2 header whose metadata `change` has changed before it was summed.
    pub fn second(&self, change: impl FnOnce(&mut Value)) -> Vec<u8> {
        const SIZE: usize = 16 << 10;
        let mut header = vec![0; 256 << 10];
        let mut slots = serde_json::Map::new();
        for (number, passphrase) in &self.slots {
            let place = 2 * SIZE + number * 8192;
            let salt = noise(10 + *number as u64, 32);
            let (kdf, derived) = self.kdf(passphrase, &salt);
            let slot = json!({
                "type": "luks2", "key_size": self.key.len(), "kdf": kdf,
                "af": {"type": "luks1", "stripes": self.stripes, "hash": self.hash},
                "area": {
                    "type": "raw", "offset": place.to_string(), "size": "8192",
                    "encryption": "aes-xts-plain64", "key_size": self.key.len(),
                },
            });
            slots.insert(number.to_string(), slot);
            let material = self.material(*number, &derived);
            header[place..][..material.len()].copy_from_slice(&material);
        }
        let names: Vec<&String> = slots.keys().collect();
        let salt = noise(1, 32);
        let digest = pbkdf2(self.hash, &self.key, &salt, 10, 32);
        let size = self.len.map_or("dynamic".to_owned(), |len| len.to_string());
        let mut json = json!({
            "digests": {"0": {
                "type": "pbkdf2", "keyslots": names, "segments": ["0"], "hash": self.hash,
                "iterations": 10, "salt": Base64::encode_string(&salt),
                "digest": Base64::encode_string(&digest),
            }},
            "segments": {"0": {
                "type": "crypt", "offset": self.payload.to_string(), "size": size,
                "iv_tweak": self.iv_offset.to_string(), "encryption": "aes-xts-plain64",
                "sector_size": self.sector,
            }},
            "config": {"json_size": "12288", "keyslots_size": "131072"},
            "tokens": {}, "keyslots": slots,
        });
        change(&mut json);
        let json = serde_json::to_vec(&json).unwrap();
        for (at, magic) in [(0, b"LUKS\xba\xbe"), (SIZE, b"SKUL\xba\xbe")] {
            let copy = &mut header[at..][..SIZE];
            copy[..6].copy_from_slice(magic);
            copy[6..8].copy_from_slice(&2u16.to_be_bytes());
            copy[8..16].copy_from_slice(&(SIZE as u64).to_be_bytes());
            copy[16..24].copy_from_slice(&3u64.to_be_bytes());
            copy[72..78].copy_from_slice(b"sha256");
            copy[256..264].copy_from_slice(&(at as u64).to_be_bytes());
            copy[4096..][..json.len()].copy_from_slice(&json);
            let sum = Sha256::digest(&*copy);
            copy[448..480].copy_from_slice(&sum);
        }
        header
    }

    fn kdf(&self, passphrase: &[u8], salt: &[u8]) -> (Value, Vec<u8>) {
        let text = Base64::encode_string(salt);
        let algorithm = match self.kdf {
            "argon2i" => Algorithm::Argon2i,
            "argon2id" => Algorithm::Argon2id,
            _ => {
                let derived = pbkdf2(self.hash, passphrase, salt, 7, self.key.len());
                let kdf =
                    json!({"type": "pbkdf2", "hash": self.hash, "iterations": 7, "salt": text});
                return (kdf, derived);
            }
        };
        let params = Params::new(64, 4, 2, None).unwrap();
        let mut derived = vec![0; self.key.len()];
        Argon2::new(algorithm, Version::V0x13, params)
            .hash_password_into(passphrase, salt, &mut derived)
            .unwrap();
        let kdf = json!({"type": self.kdf, "time": 4, "memory": 64, "cpus": 2, "salt": text});
        (kdf, derived)
    }
}
