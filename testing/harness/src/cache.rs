//! The cache below `target/harness`: directories that are complete or absent, never half made.
//!
//! Each artefact is a directory with a name that ends in a hash of everything it was made from. It
//! is made under another name and renamed when complete, under a file lock, so that tests that
//! start at the same time wait for one maker.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// A directory of artefacts, each complete or absent.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens `target/harness` of this checkout, or the directory in `VNVME_HARNESS_CACHE`.
    pub fn open() -> Result<Cache> {
        let root = match std::env::var_os("VNVME_HARNESS_CACHE") {
            Some(dir) => PathBuf::from(dir),
            None => checkout().join("target/harness"),
        };
        Cache::at(root)
    }

    /// Opens a cache at a given place.
    pub fn at(root: PathBuf) -> Result<Cache> {
        fs::create_dir_all(&root).with_context(|| format!("creating {}", root.display()))?;
        let root = root.canonicalize()?;
        Ok(Cache { root })
    }

    /// A path below the cache.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.root.join(name)
    }

    /// Takes the lock of `name`; it is released when the returned file is dropped.
    pub fn lock(&self, name: &str) -> Result<File> {
        let path = self.path(format!("{name}.lock"));
        let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        file.lock()
            .with_context(|| format!("locking {}", path.display()))?;
        Ok(file)
    }

    /// The directory `name-KEY`, made by `make` if it is not there yet. `make` gets
    /// an empty directory to fill.
    pub fn artefact(
        &self,
        name: &str,
        key: &str,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let done = self.path(format!("{name}-{key}"));
        if done.is_dir() {
            return Ok(done);
        }
        let _lock = self.lock(name)?;
        if done.is_dir() {
            return Ok(done);
        }
        let part = self.path(format!(".{name}-{key}.part"));
        remove_dir(&part)?;
        fs::create_dir_all(&part)?;
        make(&part).with_context(|| format!("making {}", done.display()))?;
        fs::rename(&part, &done)?;
        Ok(done)
    }

    /// The directory of logs, with those of earlier days removed.
    pub fn logs(&self) -> Result<PathBuf> {
        self.tidied("logs")
    }

    /// Creates a directory for disks, on the same filesystem as the cache (not a tmpfs: disks are
    /// opened with O_DIRECT). It is removed when the value is dropped.
    pub fn scratch(&self) -> Result<tempfile::TempDir> {
        let dir = self.tidied("scratch")?;
        Ok(tempfile::Builder::new().prefix("disk-").tempdir_in(dir)?)
    }

    /// Opens a directory below the cache, and removes files that a killed run left in it days ago.
    fn tidied(&self, name: &str) -> Result<PathBuf> {
        const KEEP: Duration = Duration::from_secs(2 * 24 * 3600);
        let dir = self.path(name);
        fs::create_dir_all(&dir)?;
        for entry in fs::read_dir(&dir)?.filter_map(std::io::Result::ok) {
            let Ok(meta) = entry.metadata() else { continue };
            let age = meta.modified().ok().and_then(|m| m.elapsed().ok());
            if age.is_some_and(|age| age > KEEP) {
                // Another process may have removed it first.
                let _ = if meta.is_dir() {
                    fs::remove_dir_all(entry.path())
                } else {
                    fs::remove_file(entry.path())
                };
            }
        }
        Ok(dir)
    }

    /// Removes the artefacts called `name` except `keep`: those of an older recipe.
    pub fn prune(&self, name: &str, keep: &Path) -> Result<()> {
        let prefix = format!("{name}-");
        for entry in fs::read_dir(&self.root)? {
            let entry = entry?;
            let stale = entry.file_name().to_str().is_some_and(|n| {
                n.strip_prefix(&prefix)
                    .is_some_and(|key| key.len() == KEY_LEN && !key.contains('-'))
            });
            if stale && entry.path() != keep {
                remove_dir(&entry.path())?;
            }
        }
        Ok(())
    }
}

/// Length of a key in hexadecimal digits.
const KEY_LEN: usize = 16;

/// A short name for some content: the first 64 bits of its SHA-256, in hexadecimal.
pub fn key(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let mut hex = hex(&hash.finalize());
    hex.truncate(KEY_LEN);
    hex
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// SHA-256 of a file, in hexadecimal.
pub fn sha256_file(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let mut hash = Sha256::new();
    std::io::copy(&mut file, &mut hash)?;
    Ok(hex(&hash.finalize()))
}

/// The root of the checkout that this crate was built from.
pub fn checkout() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

fn remove_dir(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artefact_is_built_once_and_failure_leaves_nothing() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let cache = Cache::at(dir.path().join("c"))?;
        let failed = cache.artefact("a", "0123456789abcdef", |part| {
            fs::write(part.join("half"), "x")?;
            anyhow::bail!("no luck")
        });
        assert!(failed.is_err());
        assert!(!cache.path("a-0123456789abcdef").exists());
        let made = cache.artefact("a", "0123456789abcdef", |part| {
            assert_eq!(fs::read_dir(part)?.count(), 0, "left-overs must be gone");
            Ok(fs::write(part.join("whole"), "x")?)
        })?;
        let again = cache.artefact("a", "0123456789abcdef", |_| anyhow::bail!("made twice"))?;
        assert_eq!(made, again);
        let other = cache.artefact("a", "fedcba9876543210", |_| Ok(()))?;
        cache.prune("a", &other)?;
        assert!(!made.exists() && other.exists());
        Ok(())
    }

    #[test]
    fn cache_key_depends_on_part_boundaries() {
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(key(&["ab"]).len(), KEY_LEN);
    }
}
