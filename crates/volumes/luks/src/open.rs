//! Opening of the encrypted volume that a URL names (`?luks=KEYSOURCE`).

use crate::error::LuksError;
use crate::header::Header;
use crate::kept;
use crate::key::KeySource;
use crate::secret::SecretBytes;
use crate::source::{HeaderFile, HeaderSource, HeaderVolume};
use crate::unlock::{unlock, verify};
use crate::volume::{LuksOptions, LuksVolume};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use volume::{Encryption, MemoryPlace, OpenError, OpenOptions, Volume};

/// Opens the container in `below`. Reads the key from its source, unless an earlier process has
/// left the volume key in [`OpenOptions::key_memory`]. A check reads no key, and returns a volume
/// that is locked.
///
/// # Errors
/// [`OpenError::Value`] for a source that is none, [`OpenError::Encryption`] with a [`LuksError`].
pub fn open(
    below: Arc<dyn Volume>,
    encryption: &Encryption,
    options: &OpenOptions,
) -> Result<Arc<dyn Volume>, OpenError> {
    let source = KeySource::parse(&encryption.key).map_err(|why| OpenError::Value {
        key: "luks".into(),
        value: encryption.key.clone(),
        why,
    })?;
    let opened = match &encryption.header {
        Some(path) => {
            let file = File::open(path).map_err(|error| LuksError::HeaderFile {
                path: path.clone(),
                error,
            });
            file.and_then(|file| {
                let storage = HeaderFile(file);
                open_with(below, &storage, &source, encryption, options)
            })
        }
        None => {
            let storage = below.clone();
            let storage = HeaderVolume(&*storage);
            open_with(below, &storage, &source, encryption, options)
        }
    };
    let volume = opened.map_err(|error| OpenError::Encryption(error.into()))?;
    Ok(Arc::new(volume))
}

fn open_with(
    below: Arc<dyn Volume>,
    storage: &impl HeaderSource,
    source: &KeySource,
    encryption: &Encryption,
    options: &OpenOptions,
) -> Result<LuksVolume, LuksError> {
    let header = Header::read(storage, encryption.header.is_some())?;
    let own = LuksOptions {
        discard: encryption.discard,
    };
    if options.is_check {
        // Credentials are there only for the service.
        if let KeySource::File(_) = source {
            source.check()?;
        }
        return LuksVolume::locked(below, &header, own);
    }
    if let MemoryPlace::Kept(file) = &options.key_memory {
        // The file at the volume's path may be another one by now.
        let key = kept::kept(file.as_fd()).filter(|key| verify(&header, key));
        if let (Some(key), Ok(file)) = (key, file.try_clone()) {
            let mut volume = LuksVolume::new(below, &header, &key, own)?;
            volume.keep_in(file);
            return Ok(volume);
        }
    }
    let passphrase = source.read()?;
    let key = unlock(&header, storage, &passphrase)?;
    drop(passphrase);
    let mut volume = LuksVolume::new(below, &header, &key, own)?;
    if !matches!(options.key_memory, MemoryPlace::Process) {
        volume.keep_in(new_memory(&key)?);
    }
    Ok(volume)
}

fn new_memory(key: &SecretBytes) -> Result<OwnedFd, LuksError> {
    kept::keep(key).map_err(LuksError::Keep)
}
