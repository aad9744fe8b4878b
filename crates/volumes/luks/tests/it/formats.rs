//! Twelve containers: versions, key lengths, sectors, key slots and places of the header.

use crate::common::Disk;
use crate::container::{Container, PASSPHRASE, encrypt, noise};
use luks::{Header, HeaderVolume, LuksOptions, LuksVolume, unlock, verify};
use std::sync::Arc;
use volume::{MemVolume, Volume};

/// Size in bytes of the volumes below.
const SIZE: u64 = 4 << 20;

fn containers() -> Vec<(&'static str, Container, bool)> {
    let of = Container::new;
    let slots = |numbers: &[usize]| {
        let of = |number: &usize| (*number, PASSPHRASE.to_vec());
        numbers.iter().map(of).collect::<Vec<_>>()
    };
    let others = |count: usize, last: usize| {
        let mut all: Vec<_> = (0..count).map(|n| (n, noise(n as u64, 9))).collect();
        all.push((last, PASSPHRASE.to_vec()));
        all
    };
    let mut list = vec![
        ("1, 256 bits, sha1", of(1, 32, 512), false),
        ("1, 512 bits, slot 7", of(1, 64, 512), false),
        ("1, 512 bits, sha512, five slots", of(1, 64, 512), false),
        ("1, 256 bits, detached", of(1, 32, 512), true),
        ("2, 256 bits, pbkdf2", of(2, 32, 512), false),
        ("2, 512 bits, argon2id", of(2, 64, 512), false),
        ("2, 256 bits, 4096, argon2i", of(2, 32, 4096), false),
        ("2, 512 bits, 4096, detached", of(2, 64, 4096), true),
        ("2, 512 bits, 2048, sha512", of(2, 64, 2048), false),
        ("2, 512 bits, ten slots", of(2, 64, 4096), false),
        ("2, fixed length, tweaks", of(2, 64, 512), false),
        ("2, 1024, detached, offset 0", of(2, 32, 1024), true),
    ];
    list[0].1.hash = "sha1";
    list[1].1.slots = slots(&[7]);
    list[2].1.hash = "sha512";
    list[2].1.slots = others(4, 4);
    list[5].1.kdf = "argon2id";
    list[6].1.kdf = "argon2i";
    list[7].1.kdf = "argon2id";
    list[8].1.hash = "sha512";
    list[9].1.slots = others(9, 9);
    list[10].1.len = Some(1 << 20);
    list[10].1.iv_offset = 123_456_789_012;
    list[11].1.payload = 0;
    list[3].1.payload = 0;
    list
}

#[test]
fn every_form_of_container_is_read_and_written() {
    let all = containers();
    assert_eq!(all.len(), 12);
    for (name, container, is_detached) in all {
        let memory = Arc::new(MemVolume::new(SIZE).unwrap());
        let header = container.header();
        let mut raw = Disk::new(&*memory);
        let parsed = if is_detached {
            Header::read(header.as_slice(), true)
        } else {
            raw.write(0, &header, false).unwrap();
            Header::read(&HeaderVolume(&*memory), false)
        };
        let parsed = parsed.unwrap_or_else(|error| panic!("{name}: {error}"));
        let key = unlock(&parsed, header.as_slice(), PASSPHRASE).unwrap();
        assert_eq!(*key, container.key, "{name}");
        assert!(verify(&parsed, &key) && !verify(&parsed, &vec![1; key.len()]));
        assert_eq!(parsed.version(), container.version);
        // Data that another program has written.
        let (sector, place) = (container.sector, container.payload);
        let plain = noise(5, 128 << 10);
        let mut cipher = plain.clone();
        encrypt(&container.key, &mut cipher, sector, container.iv_offset);
        raw.write(place, &cipher, false).unwrap();
        let options = LuksOptions::default();
        let volume = LuksVolume::new(memory.clone(), &parsed, &key, options).unwrap();
        let size = container.len.unwrap_or(SIZE - place);
        assert_eq!(volume.info().size, size, "{name}");
        assert_eq!(volume.info().block_size as usize, sector, "{name}");
        assert!(volume.is_encrypted());
        let mut disk = Disk::new(&volume);
        assert!(disk.read(0, plain.len()).unwrap() == plain, "{name}");
        // Data that this crate writes, in the middle and at the end.
        for at in [256 << 10, size - (64 << 10)] {
            let plain = noise(at, 64 << 10);
            disk.write(at, &plain, false).unwrap();
            let mut cipher = plain.clone();
            let iv = container.iv_offset + at / 512;
            encrypt(&container.key, &mut cipher, sector, iv);
            assert!(
                raw.read(place + at, cipher.len()).unwrap() == cipher,
                "{name}"
            );
            assert!(disk.read(at, plain.len()).unwrap() == plain, "{name}");
        }
        if !is_detached {
            assert!(
                raw.read(0, header.len()).unwrap() == header,
                "{name}: changed"
            );
        }
    }
}

/// A crash while cryptsetup writes one copy of a LUKS2 header leaves the other.
#[test]
fn second_copy_replaces_damaged_first() {
    let container = Container::new(2, 64, 512);
    let header = container.header();
    for damage in [0, 9, 500, 5000] {
        let mut damaged = header.clone();
        damaged[damage] ^= 1;
        let parsed = Header::read(damaged.as_slice(), false).unwrap();
        let key = unlock(&parsed, damaged.as_slice(), PASSPHRASE).unwrap();
        assert_eq!(*key, container.key);
    }
    // The newer copy is used.
    let mut newer = container.clone();
    newer.payload = 2 << 20;
    let second = &mut newer.header()[16 << 10..32 << 10].to_vec();
    second[23] += 1;
    second[448..512].fill(0);
    let sum = <sha2::Sha256 as sha2::Digest>::digest(&*second);
    second[448..480].copy_from_slice(&sum);
    let mut both = header;
    both[16 << 10..32 << 10].copy_from_slice(second);
    let parsed = Header::read(both.as_slice(), false).unwrap();
    assert_eq!(parsed.payload().offset, 2 << 20);
}

#[test]
fn preferred_slot_is_tried_first_and_ignored_one_never() {
    let mut container = Container::new(2, 32, 512);
    container.slots = vec![(0, b"a".to_vec()), (1, b"b".to_vec())];
    let header = container.second(|json| json["keyslots"]["1"]["priority"] = 0.into());
    let parsed = Header::read(header.as_slice(), false).unwrap();
    assert!(unlock(&parsed, header.as_slice(), b"a").is_ok());
    assert!(unlock(&parsed, header.as_slice(), b"b").is_err());
}
