//! LUKS1 and LUKS2 containers as volumes: encryption at rest.
//!
//! A container is a header and a payload. The header has key slots, each with the volume key
//! encrypted under a passphrase, and lies before the payload or in a file of its own. [`Header`]
//! parses it, [`unlock`] opens a slot, and [`LuksVolume`] encrypts and decrypts the payload of any
//! volume below. Headers are only read: containers are made and changed by `cryptsetup` and
//! `qemu-img`.
//!
//! Supported are AES-XTS with plain64 tweaks and keys of 256 and 512 bits, sectors of 512 to 4096
//! bytes, and key slots with PBKDF2, Argon2i and Argon2id. Formats: "LUKS1 On-Disk Format
//! Specification 1.2.3" and "LUKS2 On-Disk Format Specification 1.1.1".
//!
//! - **A header is untrusted.** Sizes, offsets and the cost of key derivation are bounded before
//!   anything is allocated or computed; each violation is a [`LuksError`].
//! - **Ciphertext is private.** A guest's data is copied once into a buffer of this process and
//!   encrypted there. The guest neither sees nor changes data between encryption and disk.
//! - **Keys stay in [`SecretBytes`].** They are zeroed when dropped, excluded from core dumps, and
//!   have no text form.
//!
//! This crate knows no worker, front-end or NVMe. It keeps a volume key for a later process in
//! sealed memory ([`keep`]), and leaves it to the program who holds the descriptor.
#![forbid(unsafe_code)]

mod cipher;
mod error;
mod header;
mod kdf;
mod kept;
mod key;
mod open;
mod pool;
mod queue;
mod secret;
mod source;
mod unlock;
mod volume;

pub use cipher::{MAX_SECTOR, Xts};
pub use error::LuksError;
pub use header::{Header, MAX_SLOTS, Payload};
pub use kept::{keep, kept};
pub use key::KeySource;
pub use open::open;
pub use secret::SecretBytes;
pub use source::{HeaderFile, HeaderSource, HeaderVolume};
pub use unlock::{unlock, verify};
pub use volume::{LuksOptions, LuksVolume};
