//! Version 2: a binary header of 4096 bytes and metadata in JSON, stored twice ("LUKS2 On-Disk
//! Format Specification", 2 and 3).

use super::{
    BINARY, Header, KeyDigest, MAGIC, MAX_SLOTS, Payload, SECOND_MAGIC, Slot, check_cipher,
    checked, field, text,
};
use crate::error::LuksError;
use crate::kdf::{Hash, Kdf};
use crate::source::HeaderSource;
use base64ct::{Base64, Encoding};
use serde::Deserialize;
use sha2::digest::Digest;
use sha2::{Sha256, Sha512};
use std::collections::BTreeMap;

/// Sizes of a header with its JSON area, which are also the possible offsets of the second header.
const SIZES: [usize; 9] = [
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
];
/// Range of the checksum's field in the binary header.
const CHECKSUM: std::ops::Range<usize> = 448..512;
/// The only segment of a container that is not being re-encrypted.
const SEGMENT: &str = "0";

/// Valid copy of the header: its sequence number, and its metadata.
struct Copy {
    sequence: u64,
    json: Vec<u8>,
    size: usize,
}

/// Reads both copies of a header, and parses the newer valid one.
pub(super) fn read(source: &(impl HeaderSource + ?Sized)) -> Result<Header, LuksError> {
    let first = copy(source, 0);
    let second = match &first {
        Ok(first) => copy(source, first.size as u64),
        // The first copy does not tell where the second one is.
        Err(_) => SIZES
            .iter()
            .map(|size| copy(source, *size as u64))
            .find(Result::is_ok)
            .unwrap_or(Err(LuksError::NoHeader)),
    };
    let newer = match (first, second) {
        (Ok(first), Ok(second)) if second.sequence > first.sequence => second,
        (Ok(first), _) => first,
        (Err(_), Ok(second)) => second,
        (Err(error), Err(_)) => return Err(error),
    };
    parse(&newer.json)
}

/// Reads the copy of the header at byte `offset`, and checks it.
fn copy(source: &(impl HeaderSource + ?Sized), offset: u64) -> Result<Copy, LuksError> {
    let mut binary = [0; BINARY];
    source
        .read(offset, &mut binary)
        .map_err(|error| match error {
            LuksError::Read(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                LuksError::NoHeader
            }
            error => error,
        })?;
    let magic: [u8; 6] = field(&binary, 0);
    let version = u16::from_be_bytes(field(&binary, 6));
    if magic != (if offset == 0 { MAGIC } else { SECOND_MAGIC }) || version != 2 {
        return Err(LuksError::NoHeader);
    }
    let number = |offset| u64::from_be_bytes(field(&binary, offset));
    let size = usize::try_from(number(8)).unwrap_or(0);
    if !SIZES.contains(&size) {
        return Err(LuksError::Damaged("the size of the metadata is impossible"));
    }
    if number(256) != offset {
        return Err(LuksError::Damaged("a copy is at a wrong offset"));
    }
    let sequence = number(16);
    let algorithm: [u8; 32] = field(&binary, 72);
    let checksum: [u8; 64] = field(&binary, CHECKSUM.start);
    let mut json = vec![0; size - BINARY];
    source.read(offset + BINARY as u64, &mut json)?;
    if let Some(field) = binary.get_mut(CHECKSUM) {
        field.fill(0);
    }
    let valid = match text(&algorithm)? {
        "sha256" => is_digest::<Sha256>(&[&binary, &json], &checksum),
        "sha512" => is_digest::<Sha512>(&[&binary, &json], &checksum),
        name => {
            let supported = "sha256 and sha512 are";
            return Err(LuksError::unsupported("header checksum", name, supported));
        }
    };
    if !valid {
        return Err(LuksError::Damaged("its checksum is wrong"));
    }
    Ok(Copy {
        sequence,
        json,
        size,
    })
}

fn is_digest<D: Digest>(parts: &[&[u8]], expected: &[u8]) -> bool {
    let mut hash = D::new();
    parts.iter().for_each(|part| hash.update(part));
    expected.starts_with(&hash.finalize())
}

/// Metadata of a container (LUKS2, 3.1). Unknown members are ignored.
#[derive(Deserialize)]
struct Metadata {
    keyslots: BTreeMap<String, JsonSlot>,
    segments: BTreeMap<String, JsonSegment>,
    digests: BTreeMap<String, JsonDigest>,
    config: JsonConfig,
}

#[derive(Deserialize)]
struct JsonConfig {
    #[serde(default)]
    requirements: JsonRequirements,
}

#[derive(Deserialize, Default)]
struct JsonRequirements {
    #[serde(default)]
    mandatory: Vec<String>,
}

#[derive(Deserialize)]
struct JsonSlot {
    r#type: String,
    #[serde(default)]
    key_size: usize,
    /// 0: used only when it is named; 1: normal; 2: tried first.
    priority: Option<u8>,
    area: Option<JsonArea>,
    kdf: Option<JsonKdf>,
    af: Option<JsonSplitter>,
}

#[derive(Deserialize)]
struct JsonArea {
    r#type: String,
    offset: String,
    #[serde(default)]
    encryption: String,
    #[serde(default)]
    key_size: usize,
}

#[derive(Deserialize)]
struct JsonSplitter {
    r#type: String,
    stripes: u32,
    hash: String,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum JsonKdf {
    Pbkdf2 {
        hash: String,
        iterations: u32,
        salt: String,
    },
    Argon2i(JsonArgon2),
    Argon2id(JsonArgon2),
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct JsonArgon2 {
    time: u32,
    memory: u32,
    cpus: u32,
    salt: String,
}

#[derive(Deserialize)]
struct JsonSegment {
    r#type: String,
    offset: String,
    size: String,
    #[serde(default)]
    iv_tweak: String,
    #[serde(default)]
    encryption: String,
    #[serde(default)]
    sector_size: u32,
    integrity: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct JsonDigest {
    r#type: String,
    keyslots: Vec<String>,
    segments: Vec<String>,
    hash: String,
    iterations: u32,
    salt: String,
    digest: String,
}

fn parse(json: &[u8]) -> Result<Header, LuksError> {
    let json = json.split(|byte| *byte == 0).next().unwrap_or_default();
    let metadata: Metadata = serde_json::from_slice(json)
        .map_err(|_| LuksError::Damaged("its metadata is no valid JSON"))?;
    if let Some(name) = metadata.config.requirements.mandatory.first() {
        let supported = "containers without mandatory requirements are (finish a re-encryption \
                         with: cryptsetup reencrypt --resume-only)";
        return Err(LuksError::unsupported("requirement", name, supported));
    }
    let payload = payload(&metadata.segments)?;
    let digest = metadata
        .digests
        .values()
        .find(|digest| digest.segments.iter().any(|segment| segment == SEGMENT))
        .ok_or(LuksError::Damaged("the payload has no key digest"))?;
    if digest.r#type != "pbkdf2" {
        return Err(LuksError::unsupported(
            "digest",
            &digest.r#type,
            "pbkdf2 is",
        ));
    }
    if metadata.keyslots.len() > MAX_SLOTS {
        return Err(LuksError::Damaged("there are too many key slots"));
    }
    let mut slots = Vec::new();
    let mut failed = None;
    for name in metadata.keyslots.keys() {
        let Some(json) = metadata.keyslots.get(name) else {
            continue;
        };
        if json.r#type != "luks2" || json.priority == Some(0) || !digest.keyslots.contains(name) {
            continue;
        }
        // A slot that is not supported leaves the others usable.
        match slot(json) {
            Ok(slot) => slots.push((json.priority.unwrap_or(1), json.key_size, slot)),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    let Some(key_len) = slots.first().map(|(_, key_len, _)| *key_len) else {
        return Err(failed.unwrap_or(LuksError::NoSlot));
    };
    if slots.iter().any(|(_, len, _)| *len != key_len) {
        return Err(LuksError::Damaged("key slots have keys of two lengths"));
    }
    slots.sort_by_key(|(priority, ..)| std::cmp::Reverse(*priority));
    checked(Header {
        version: 2,
        payload,
        key_len,
        slots: slots.into_iter().map(|(_, _, slot)| slot).collect(),
        digest: KeyDigest {
            hash: Hash::parse(&digest.hash)?,
            iterations: digest.iterations,
            salt: bytes(&digest.salt)?,
            digest: bytes(&digest.digest)?,
        },
    })
}

fn payload(segments: &BTreeMap<String, JsonSegment>) -> Result<Payload, LuksError> {
    let (Some(segment), 1) = (segments.get(SEGMENT), segments.len()) else {
        return Err(LuksError::unsupported(
            "number of segments",
            &segments.len().to_string(),
            "one segment, number 0, is",
        ));
    };
    if segment.r#type != "crypt" {
        let supported = "segments of type crypt are";
        return Err(LuksError::unsupported(
            "segment",
            &segment.r#type,
            supported,
        ));
    }
    if segment.integrity.is_some() {
        let supported = "segments without it are";
        return Err(LuksError::unsupported("data integrity", "", supported));
    }
    // Key lengths are those of the slots, which are checked with them.
    check_cipher(&segment.encryption, 64)?;
    let len = match segment.size.as_str() {
        "dynamic" => None,
        size => Some(number(size)?),
    };
    let sector = u64::from(segment.sector_size).max(1);
    if len.is_some_and(|len| len == 0 || !len.is_multiple_of(sector)) {
        return Err(LuksError::Damaged(
            "the payload does not consist of whole sectors",
        ));
    }
    Ok(Payload {
        offset: number(&segment.offset)?,
        len,
        sector: segment.sector_size,
        iv_offset: number(&segment.iv_tweak)?,
    })
}

fn slot(json: &JsonSlot) -> Result<Slot, LuksError> {
    let (Some(area), Some(kdf), Some(af)) = (&json.area, &json.kdf, &json.af) else {
        return Err(LuksError::Damaged("a key slot is incomplete"));
    };
    if area.r#type != "raw" || af.r#type != "luks1" {
        return Err(LuksError::Damaged("a key slot has an unknown form"));
    }
    check_cipher(&area.encryption, area.key_size)?;
    check_cipher(&area.encryption, json.key_size)?;
    let argon2 = |is_id, json: &JsonArgon2| -> Result<Kdf, LuksError> {
        Ok(Kdf::Argon2 {
            is_id,
            passes: json.time,
            memory_kib: json.memory,
            lanes: json.cpus,
            salt: bytes(&json.salt)?,
        })
    };
    let slot = Slot {
        kdf: match kdf {
            JsonKdf::Pbkdf2 {
                hash,
                iterations,
                salt,
            } => Kdf::Pbkdf2 {
                hash: Hash::parse(hash)?,
                iterations: *iterations,
                salt: bytes(salt)?,
            },
            JsonKdf::Argon2i(json) => argon2(false, json)?,
            JsonKdf::Argon2id(json) => argon2(true, json)?,
            JsonKdf::Other => {
                let supported = "pbkdf2, argon2i and argon2id are";
                return Err(LuksError::unsupported("key derivation", "", supported));
            }
        },
        area_key_len: area.key_size,
        offset: number(&area.offset)?,
        stripes: af.stripes,
        hash: Hash::parse(&af.hash)?,
    };
    slot.check()?;
    Ok(slot)
}

/// Parses a number that JSON stores as a text, because it may exceed 53 bits.
fn number(text: &str) -> Result<u64, LuksError> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| digits);
    number.ok_or(LuksError::Damaged("a number of its metadata is invalid"))
}

fn bytes(text: &str) -> Result<Vec<u8>, LuksError> {
    Base64::decode_vec(text).map_err(|_| LuksError::Damaged("a value of its metadata is no base64"))
}
