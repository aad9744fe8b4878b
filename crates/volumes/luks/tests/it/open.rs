//! Opening by URL options: the source of the key, keys that an earlier process has left, and
//! detached headers.

use crate::common::Disk;
use crate::container::{Container, PASSPHRASE, encrypt, noise};
use luks::{keep, open};
use std::fs::Permissions;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use volume::{Encryption, MemVolume, MemoryPlace, OpenError, OpenOptions, Volume, VolumeError};

const SIZE: u64 = 4 << 20;

fn container(key: u64) -> Container {
    let mut container = Container::new(2, 64, 512);
    container.key = noise(key, 64);
    container
}

/// Returns a volume that begins with these bytes.
fn memory(start: &[u8]) -> Arc<dyn Volume> {
    let memory = Arc::new(MemVolume::new(SIZE).unwrap());
    Disk::new(&*memory).write(0, start, false).unwrap();
    memory
}

fn passphrase(dir: &Path) -> Encryption {
    let path = dir.join("key");
    std::fs::write(&path, PASSPHRASE).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    Encryption {
        key: path.to_str().unwrap().to_owned(),
        header: None,
        discard: false,
    }
}

fn with(key_memory: MemoryPlace) -> OpenOptions {
    OpenOptions {
        key_memory,
        ..OpenOptions::default()
    }
}

fn left(file: OwnedFd) -> OpenOptions {
    with(MemoryPlace::Kept(Arc::new(file)))
}

/// Asserts that a volume writes data under this key to the payload of the volume below.
fn assert_encrypts(volume: &dyn Volume, below: &dyn Volume, payload: u64, key: &[u8]) {
    let plain = noise(payload, 8192);
    Disk::new(volume).write(4096, &plain, false).unwrap();
    let mut cipher = plain;
    encrypt(key, &mut cipher, 512, 8);
    let found = Disk::new(below).read(payload + 4096, cipher.len());
    assert!(found.unwrap() == cipher);
}

#[test]
fn key_that_was_left_replaces_passphrase() {
    let dir = tempfile::tempdir().unwrap();
    let (container, encryption) = (container(1), passphrase(dir.path()));
    let below = memory(&container.header());
    let first = open(below.clone(), &encryption, &with(MemoryPlace::New)).unwrap();
    let kept = first.kept_key().unwrap().try_clone_to_owned().unwrap();
    drop(first);
    std::fs::remove_file(&encryption.key).unwrap();
    let next = open(below.clone(), &encryption, &left(kept)).unwrap();
    assert_encrypts(&*next, &*below, container.payload, &container.key);
    assert!(next.kept_key().is_some(), "the process after this one");
    // Without a keeper, no memory has the key longer than the process.
    let refused = open(below.clone(), &encryption, &OpenOptions::default());
    assert!(matches!(refused, Err(OpenError::Encryption(_))));
    passphrase(dir.path());
    let alone = open(below, &encryption, &OpenOptions::default()).unwrap();
    assert!(alone.kept_key().is_none());
}

/// The file at the volume's path may be another container by now: data under the former key would
/// be lost.
#[test]
fn key_of_other_container_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let (container, encryption) = (container(1), passphrase(dir.path()));
    let below = memory(&container.header());
    let mut almost = container.key.clone();
    almost[63] ^= 1;
    let short = container.key[..32].to_vec();
    for other in [noise(2, 64), almost, short] {
        let volume = open(below.clone(), &encryption, &left(keep(&other).unwrap())).unwrap();
        assert_encrypts(&*volume, &*below, container.payload, &container.key);
        let kept = luks::kept(volume.kept_key().unwrap()).unwrap();
        assert!(
            *kept == *container.key,
            "the next process has the right one"
        );
    }
    // The passphrase is needed again.
    std::fs::remove_file(&encryption.key).unwrap();
    let refused = open(below, &encryption, &left(keep(&noise(2, 64)).unwrap()));
    assert!(matches!(refused, Err(OpenError::Encryption(_))));
}

/// The volume begins with a container of another key, which is data under a detached header.
#[test]
fn detached_header_takes_the_place_of_the_one_in_the_volume() {
    let dir = tempfile::tempdir().unwrap();
    let header = dir.path().join("header");
    let encryption = Encryption {
        header: Some(header.clone()),
        ..passphrase(dir.path())
    };
    let inner = container(1);
    for (version, payload) in [(1, 0), (2, 0), (1, 1 << 20), (2, 1 << 20)] {
        let mut detached = Container::new(version, 64, 512);
        detached.payload = payload;
        std::fs::write(&header, detached.header()).unwrap();
        let below = memory(&inner.header());
        let volume = open(below.clone(), &encryption, &OpenOptions::default()).unwrap();
        assert_eq!(volume.info().size, SIZE - payload, "{version} {payload}");
        assert_encrypts(&*volume, &*below, payload, &detached.key);
    }
    std::fs::remove_file(&header).unwrap();
    let below = memory(&inner.header());
    let missing = open(below, &encryption, &OpenOptions::default()).expect_err("no header");
    assert!(missing.to_string().contains("luks-header="), "{missing}");
}

#[test]
fn checked_volume_is_described_without_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let encryption = passphrase(dir.path());
    std::fs::write(&encryption.key, "a wrong one").unwrap();
    let options = OpenOptions {
        is_check: true,
        ..OpenOptions::default()
    };
    let volume = open(memory(&container(1).header()), &encryption, &options).unwrap();
    assert_eq!(volume.info().size, SIZE - (1 << 20));
    let io = volume::Io::new(volume::IoOptions::default());
    assert!(matches!(volume.open(&io), Err(VolumeError::NoKey)));
}
