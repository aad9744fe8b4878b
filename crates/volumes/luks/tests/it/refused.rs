//! Wrong keys, and headers that are damaged, demand too much, or need what is not supported.

use crate::container::{Container, PASSPHRASE};
use luks::{Header, LuksError, LuksOptions, LuksVolume, unlock};
use serde_json::{Value, json};
use std::sync::Arc;
use volume::MemVolume;

fn error(header: &[u8]) -> LuksError {
    Header::read(header, false).expect_err("the header is refused")
}

/// Returns the error of a LUKS2 header after a change of its metadata.
fn changed(change: impl FnOnce(&mut Value)) -> LuksError {
    error(&Container::new(2, 64, 512).second(change))
}

#[test]
fn wrong_key_opens_no_slot() {
    for version in [1, 2] {
        let header = Container::new(version, 64, 512).header();
        let parsed = Header::read(header.as_slice(), false).unwrap();
        for key in [&b""[..], b"correct horse battery staple", b"x"] {
            let opened = unlock(&parsed, header.as_slice(), key);
            assert!(matches!(opened, Err(LuksError::WrongKey)), "{version}");
        }
        // A slot that is damaged opens no more.
        let mut damaged = header.clone();
        let slots = if version == 1 { 4096 } else { 32 << 10 };
        damaged[slots + 100] ^= 1;
        let opened = unlock(&parsed, damaged.as_slice(), PASSPHRASE);
        assert!(matches!(opened, Err(LuksError::WrongKey)), "{version}");
    }
}

#[test]
fn missing_and_truncated_headers_are_refused() {
    assert!(matches!(error(&[]), LuksError::NoHeader));
    assert!(matches!(error(&[0; 1 << 16]), LuksError::NoHeader));
    for version in [1, 2] {
        let header = Container::new(version, 64, 512).header();
        for len in [5, 591, 4095, 5000, 6000] {
            let cut = Header::read(&header[..len], false);
            if let Ok(parsed) = cut {
                // Version 1 has all of its fields in the first block: its slots are missing.
                let opened = unlock(&parsed, &header[..len], PASSPHRASE);
                assert!(matches!(opened, Err(LuksError::Read(_))), "{version} {len}");
            }
        }
        let mut other = header.clone();
        other[7] = 3;
        other[16 << 10..].fill(0);
        assert!(matches!(error(&other), LuksError::Version(3)));
    }
}

#[test]
fn every_changed_bit_of_both_copies_is_found() {
    let header = Container::new(2, 32, 512).header();
    // The field of the checksum is longer than this checksum.
    let unused = 480..512;
    for at in (0..16 << 10).step_by(37).filter(|at| !unused.contains(at)) {
        let mut damaged = header.clone();
        damaged[at] ^= 4;
        damaged[at + (16 << 10)] ^= 4;
        assert!(
            Header::read(damaged.as_slice(), false).is_err(),
            "byte {at}"
        );
    }
}

/// Asserts that a header is refused because this parameter exceeds its bound.
fn assert_too_expensive(header: &[u8], parameter: &str) {
    let error = error(header);
    assert!(
        matches!(error, LuksError::TooExpensive { what, .. } if what.starts_with(parameter)),
        "{parameter}: {error}"
    );
}

/// Each parameter is beyond its own bound only.
#[test]
fn expensive_parameters_are_refused_before_they_are_used() {
    const MOST: u32 = 50_000_000;
    for (parameter, changes) in [
        ("passes", &[("time", u32::MAX)][..]),
        ("passes", &[("time", 33), ("memory", 1 << 20)]),
        ("KiB of memory", &[("memory", u32::MAX)]),
        ("KiB of memory", &[("memory", (1 << 20) + 1), ("time", 1)]),
        ("lanes", &[("cpus", 17)]),
        ("lanes", &[("cpus", u32::MAX)]),
    ] {
        let mut container = Container::new(2, 64, 512);
        container.kdf = "argon2id";
        let header = container.second(|json| {
            for (key, value) in changes {
                json["keyslots"]["0"]["kdf"][key] = json!(value);
            }
        });
        assert_too_expensive(&header, parameter);
    }
    for iterations in [MOST + 1, u32::MAX] {
        let container = Container::new(2, 64, 512);
        let slot =
            |json: &mut Value| json["keyslots"]["0"]["kdf"]["iterations"] = json!(iterations);
        assert_too_expensive(&container.second(slot), "PBKDF2");
        let digest = |json: &mut Value| json["digests"]["0"]["iterations"] = json!(iterations);
        assert_too_expensive(&container.second(digest), "PBKDF2");
        // The first slot, and the digest.
        for at in [212, 164] {
            let mut header = Container::new(1, 64, 512).header();
            header[at..][..4].copy_from_slice(&iterations.to_be_bytes());
            assert_too_expensive(&header, "PBKDF2");
        }
    }
    // Each slot is within the bounds, and all of them together are not.
    let mut container = Container::new(2, 64, 512);
    container.slots = (0..10).map(|n| (n, b"x".to_vec())).collect();
    let header = container.second(|json| {
        for slot in json["keyslots"].as_object_mut().unwrap().values_mut() {
            slot["kdf"]["iterations"] = json!(MOST);
        }
    });
    assert_too_expensive(&header, "work of all");
}

/// Lengths that a hostile header sets, each just beyond its bound.
#[test]
fn long_salts_and_impossible_stripes_are_refused() {
    let long = "A".repeat(1368);
    let salts: [fn(&mut Value, &str); 2] = [
        |json, salt| json["keyslots"]["0"]["kdf"]["salt"] = json!(salt),
        |json, salt| json["digests"]["0"]["salt"] = json!(salt),
    ];
    for (set, word) in salts.into_iter().zip(["salt", "digest"]) {
        // 1026 bytes; 1023 are allowed.
        let error = changed(|json| set(json, &long)).to_string();
        assert!(error.contains(word), "{error}");
        let fine = Container::new(2, 64, 512).second(|json| set(json, &long[4..]));
        assert!(Header::read(fine.as_slice(), false).is_ok(), "{word}");
    }
    for stripes in [0u32, 8001, u32::MAX] {
        let error = changed(|json| json["keyslots"]["0"]["af"]["stripes"] = json!(stripes));
        assert!(error.to_string().contains("stripes"), "{stripes}: {error}");
    }
}

#[test]
fn damaged_metadata_is_refused() {
    type Damage = (&'static str, fn(&mut Value));
    let damages: [Damage; 17] = [
        ("segments", |json| json["segments"] = json!({})),
        ("segments", |json| {
            json["segments"]["1"] = json["segments"]["0"].clone();
        }),
        ("segment", |json| {
            json["segments"]["0"]["type"] = json!("linear");
        }),
        ("integrity", |json| {
            json["segments"]["0"]["integrity"] = json!({"type": "aead"});
        }),
        ("cipher", |json| {
            json["segments"]["0"]["encryption"] = json!("aes-cbc-essiv:sha256");
        }),
        ("sector", |json| {
            json["segments"]["0"]["sector_size"] = json!(8192);
        }),
        ("sector", |json| {
            json["segments"]["0"]["sector_size"] = json!(0);
        }),
        ("number", |json| {
            json["segments"]["0"]["offset"] = json!("-1");
        }),
        ("begin on", |json| {
            json["segments"]["0"]["offset"] = json!("100");
        }),
        ("whole sectors", |json| {
            json["segments"]["0"]["size"] = json!("0");
        }),
        ("requirement", |json| {
            json["config"]["requirements"] = json!({"mandatory": ["online-reencrypt"]});
        }),
        ("digest", |json| json["digests"] = json!({})),
        ("length", |json| json["digests"]["0"]["digest"] = json!("")),
        ("stripes", |json| {
            json["keyslots"]["0"]["af"]["stripes"] = json!(u32::MAX);
        }),
        ("hash", |json| {
            json["keyslots"]["0"]["af"]["hash"] = json!("whirlpool\u{7}");
        }),
        ("key length", |json| {
            json["keyslots"]["0"]["key_size"] = json!(48);
        }),
        ("usable", |json| json["keyslots"] = json!({})),
    ];
    for (word, damage) in damages {
        let error = changed(damage).to_string();
        assert!(error.contains(word), "{word}: {error}");
        assert!(!error.contains('\u{7}'), "{error}");
    }
    let error = changed(|json| *json = json!([[[1]]])).to_string();
    assert!(error.contains("JSON"), "{error}");
    let mut slots = Container::new(2, 32, 512);
    slots.slots = (0..33).map(|n| (n % 12, b"x".to_vec())).collect();
    assert!(Header::read(slots.header().as_slice(), false).is_ok());
    let error = changed(|json| {
        for n in 0..40 {
            json["keyslots"][n.to_string()] = json["keyslots"]["0"].clone();
        }
    });
    assert!(error.to_string().contains("too many"), "{error}");
}

#[test]
fn first_version_refuses_other_ciphers_and_overlaps() {
    let header = Container::new(1, 64, 512).header();
    let with = |at: usize, bytes: &[u8]| {
        let mut header = header.clone();
        header[at..][..bytes.len()].copy_from_slice(bytes);
        error(&header).to_string()
    };
    assert!(with(8, b"twofish").contains("twofish-xts-plain64"));
    assert!(with(40, b"cbc-essiv:sha256").contains("aes-cbc-essiv:sha256"));
    assert!(with(72, b"ripemd160").contains("ripemd160"));
    assert!(with(108, &48u32.to_be_bytes()).contains("384 bits"));
    assert!(with(104, &[0; 4]).contains("overlaps"));
    assert!(with(164, &[0; 4]).contains("is 0"));
    assert!(with(252, &[0xff; 4]).contains("stripes"));
    assert!(with(208, &[0; 4]).contains("no usable key slot"));
    assert!(with(8, &[0xff, 0xfe]).contains("no text"));
}

#[test]
fn payload_outside_of_its_volume_is_refused() {
    let header = Container::new(2, 64, 512).header();
    let parsed = Header::read(header.as_slice(), false).unwrap();
    let key = unlock(&parsed, header.as_slice(), PASSPHRASE).unwrap();
    let open = |bytes| {
        let memory = Arc::new(MemVolume::new(bytes).unwrap());
        LuksVolume::new(memory, &parsed, &key, LuksOptions::default())
    };
    assert!(matches!(open(1 << 20), Err(LuksError::Payload { .. })));
    assert!(matches!(open(512), Err(LuksError::Payload { .. })));
    assert!(open((1 << 20) + 512).is_ok());
    let memory = Arc::new(MemVolume::new(2 << 20).unwrap());
    let wrong = LuksVolume::new(memory, &parsed, &key[..32], LuksOptions::default());
    assert!(matches!(wrong, Err(LuksError::WrongKey)));
}

#[test]
fn errors_and_debug_texts_contain_no_key() {
    let header = Container::new(2, 64, 512).header();
    let parsed = Header::read(header.as_slice(), false).unwrap();
    let key = unlock(&parsed, header.as_slice(), PASSPHRASE).unwrap();
    let memory = Arc::new(MemVolume::new(2 << 20).unwrap());
    let volume = LuksVolume::new(memory, &parsed, &key, LuksOptions::default()).unwrap();
    let text = format!("{key:?} {volume:?} {parsed:?}");
    let bytes: Vec<String> = key.iter().take(4).map(u8::to_string).collect();
    assert!(!text.contains(&bytes.join(", ")), "{text}");
    assert!(text.contains("SecretBytes(..)") && text.contains("Xts(..)"));
}
