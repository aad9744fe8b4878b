//! The manifest: a list of the pool's namespaces, as text that an administrator can read.

use crate::New;
use crate::error::PoolError;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// File name of the manifest.
pub const MANIFEST: &str = "pool.toml";

/// Version of the format that is written, and the newest that is accepted.
const VERSION: u32 = 1;
/// Maximum number of namespaces, and the largest NSID.
const MAX_NAMESPACES: u32 = 1024;
/// Maximum number of controllers of a subsystem, and thus of attachments of a namespace.
const CONTROLLERS: usize = 65_520;

const HEAD: &str = "# The namespaces of a pool; vnvme writes this file itself.\n";

/// Namespace Globally Unique Identifier (NGUID), from which the name of the namespace's file is
/// made.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nguid(pub [u8; 16]);

impl Nguid {
    /// Creates a new NGUID: a random UUID (RFC 9562, version 4).
    ///
    /// # Errors
    /// The error of the system's random number generator.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut id = [0; 16];
        getrandom::fill(&mut id)?;
        id[6] = id[6] & 0x0f | 0x40;
        id[8] = id[8] & 0x3f | 0x80;
        Ok(Self(id))
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        let hex = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        let mut id = [0; 16];
        let (pairs, rest) = digits.as_chunks::<2>();
        if pairs.len() != id.len() || !rest.is_empty() {
            return None;
        }
        for (byte, [high, low]) in id.iter_mut().zip(pairs) {
            *byte = hex(*high)? << 4 | hex(*low)?;
        }
        Some(Self(id))
    }
}

impl fmt::Display for Nguid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Nguid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nguid({self})")
    }
}

impl Serialize for Nguid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Nguid {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let wanted =
            || de::Error::custom(format!("\"{text}\": 32 hexadecimal digits are expected"));
        Self::parse(&text).ok_or_else(wanted)
    }
}

/// A namespace that the manifest lists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PoolEntry {
    nsid: u32,
    nguid: Nguid,
    blocks: u64,
    block_size: u32,
    shared: bool,
    attached: BTreeSet<u16>,
}

impl PoolEntry {
    pub(crate) fn new(new: &New) -> Self {
        Self {
            nsid: new.nsid,
            nguid: new.nguid,
            blocks: new.blocks,
            block_size: new.block_size,
            shared: new.shared,
            attached: BTreeSet::new(),
        }
    }

    /// Returns the namespace ID.
    pub fn nsid(&self) -> u32 {
        self.nsid
    }

    /// Returns the NGUID, which never changes.
    pub fn nguid(&self) -> Nguid {
        self.nguid
    }

    /// Returns the size in logical blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns the logical block size in bytes.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_size.into())
    }

    /// Returns whether several controllers may attach the namespace.
    pub fn shared(&self) -> bool {
        self.shared
    }

    /// Returns the IDs of the controllers to which the namespace is attached.
    pub fn attached(&self) -> &BTreeSet<u16> {
        &self.attached
    }
}

/// Contents of the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    version: u32,
    /// NGUIDs whose files, if they exist, belong to no namespace.
    #[serde(default)]
    pending: BTreeSet<Nguid>,
    #[serde(default, rename = "namespace")]
    namespaces: Vec<PoolEntry>,
}

impl Default for Manifest {
    fn default() -> Self {
        Self {
            version: VERSION,
            pending: BTreeSet::new(),
            namespaces: Vec::new(),
        }
    }
}

/// The version field, which every version of the format contains.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Manifest {
    pub fn parse(path: &Path, text: &str) -> Result<Self, PoolError> {
        let wrong = |error: toml::de::Error| PoolError::Manifest {
            path: path.into(),
            why: error.message().to_owned(),
        };
        let Versioned { version } = toml::from_str(text).map_err(wrong)?;
        if version > VERSION {
            let path = path.into();
            return Err(PoolError::TooNew { path, version });
        }
        let manifest: Self = toml::from_str(text).map_err(wrong)?;
        manifest.check(path)?;
        Ok(manifest)
    }

    /// Formats the manifest as TOML. Returns `None` if it cannot be serialized, which is a bug.
    pub fn text(&self) -> Option<String> {
        let text = toml::to_string(self).ok()?;
        Some(format!("{HEAD}{text}"))
    }

    /// Checks the manifest for contradictions.
    pub fn check(&self, path: &Path) -> Result<(), PoolError> {
        let wrong = |why: String| PoolError::Manifest {
            path: path.into(),
            why,
        };
        if self.version != VERSION {
            return Err(wrong(format!("there is no version {}", self.version)));
        }
        let (mut nsids, mut nguids) = (BTreeSet::new(), self.pending.clone());
        for entry in &self.namespaces {
            let PoolEntry { nsid, nguid, .. } = entry;
            if !(1..=MAX_NAMESPACES).contains(nsid) {
                return Err(wrong(format!(
                    "namespace {nsid}: 1 to {MAX_NAMESPACES} are allowed"
                )));
            }
            if !nsids.insert(*nsid) {
                return Err(wrong(format!("there are two namespaces {nsid}")));
            }
            if !nguids.insert(*nguid) {
                return Err(wrong(format!("{nguid} is there twice")));
            }
            let bytes = entry.blocks.checked_mul(entry.block_size.into());
            let whole = matches!(entry.block_size, 512 | 4096) && entry.blocks > 0;
            if !whole || bytes.is_none_or(|bytes| bytes > i64::MAX as u64) {
                return Err(wrong(format!(
                    "namespace {nsid} has a size that there cannot be"
                )));
            }
            if entry.attached.len() > CONTROLLERS {
                return Err(wrong(format!("namespace {nsid} has too many controllers")));
            }
        }
        Ok(())
    }

    pub fn namespaces(&self) -> &[PoolEntry] {
        &self.namespaces
    }

    pub fn pending(&self) -> &BTreeSet<Nguid> {
        &self.pending
    }

    pub fn find(&self, nguid: Nguid) -> Option<&PoolEntry> {
        self.namespaces.iter().find(|entry| entry.nguid == nguid)
    }

    // ---- next states

    pub fn with_pending(&self, nguid: Nguid) -> Self {
        let mut next = self.clone();
        next.pending.insert(nguid);
        next
    }

    pub fn without_pending(&self, removed: &BTreeSet<Nguid>) -> Self {
        let mut next = self.clone();
        next.pending.retain(|nguid| !removed.contains(nguid));
        next
    }

    pub fn with(&self, entry: PoolEntry) -> Self {
        let mut next = self.clone();
        next.pending.remove(&entry.nguid);
        next.namespaces.push(entry);
        next.namespaces.sort_by_key(|entry| entry.nsid);
        next
    }

    pub fn without(&self, nguid: Nguid) -> Self {
        let mut next = self.with_pending(nguid);
        next.namespaces.retain(|entry| entry.nguid != nguid);
        next
    }

    /// Returns the manifest with a new block size of a namespace; `None` if the namespace's size is
    /// not a multiple of it.
    pub fn with_block_size(&self, nguid: Nguid, block_size: u32) -> Option<Self> {
        let mut next = self.clone();
        for entry in &mut next.namespaces {
            if entry.nguid == nguid {
                let bytes = entry.bytes();
                if block_size == 0 || !bytes.is_multiple_of(block_size.into()) {
                    return None;
                }
                entry.blocks = bytes / u64::from(block_size);
                entry.block_size = block_size;
            }
        }
        Some(next)
    }

    pub fn with_attached(&self, nguid: Nguid, cntlid: u16, attached: bool) -> Self {
        let mut next = self.clone();
        for entry in &mut next.namespaces {
            if entry.nguid == nguid {
                if attached {
                    entry.attached.insert(cntlid)
                } else {
                    entry.attached.remove(&cntlid)
                };
            }
        }
        next
    }
}
