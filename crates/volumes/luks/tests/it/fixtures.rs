//! A container that cryptsetup 2.6.1 has made, and encrypted data with it. In an empty folder:
//!
//! ```sh
//! printf 'correct horse' >key
//! yes 'plain text of the disk' | head -c 3M >disk
//! cp disk plain
//! truncate -s 4M disk
//! cryptsetup reencrypt --encrypt --type luks2 --reduce-device-size 2M --force-offline-reencrypt \
//!     --luks2-metadata-size 16k --luks2-keyslots-size 512k --sector-size 4096 -q \
//!     --cipher aes-xts-plain64 --key-size 256 --pbkdf argon2id --pbkdf-memory 32 \
//!     --pbkdf-force-iterations 4 --pbkdf-parallel 1 --key-file key disk
//! head -c 164K disk >header; tail -c +1048577 disk | head -c 16K >payload
//! ```

use crate::common::{Disk, open};
use luks::Header;
use std::sync::Arc;
use volume::{MemVolume, Volume};

const HEADER: &[u8] = include_bytes!("../fixtures/header");
const PAYLOAD: &[u8] = include_bytes!("../fixtures/payload");

#[test]
fn container_of_cryptsetup_is_read() {
    let header = Header::read(HEADER, false).unwrap();
    assert_eq!((header.version(), header.key_bits()), (2, 256));
    assert_eq!(header.payload().sector, 4096);
    let memory = Arc::new(MemVolume::new(2 << 20).unwrap());
    let mut raw = Disk::new(&*memory);
    raw.write(header.payload().offset, PAYLOAD, false).unwrap();
    let volume = open(memory, HEADER, b"correct horse", false);
    assert_eq!(volume.info().block_size, 4096);
    let line = b"plain text of the disk\n";
    let plain: Vec<u8> = line.iter().copied().cycle().take(PAYLOAD.len()).collect();
    assert!(Disk::new(&volume).read(0, PAYLOAD.len()).unwrap() == plain);
}
