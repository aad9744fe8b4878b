//! Content of a disk's record, and its text.

use super::ids::Ids;
use anyhow::{Context, Result, ensure};
use config::choices::IdentityRule;
use config::spec::{self, hex};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Version of a record's text. A program does not use a record of a later version.
const VERSION: u32 = 1;

/// Record of a disk: the facts that its guest relies on, compared when the disk is opened again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Record {
    version: u32,
    /// Name of the disk in the configuration.
    pub disk: String,
    /// Kind of disk, as in the configuration.
    pub kind: String,
    /// Name of the subsystem that the disk belongs to, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subsystem: Option<String>,
    /// Rule by which the identifiers that are not configured were made.
    pub identity: IdentityRule,
    /// Serial number that the guest sees.
    pub serial: String,
    /// Subsystem NQN that the guest sees, if the kind of disk has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnqn: Option<String>,
    /// Files of the disk other than volumes, by their configuration keys.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, PathBuf>,
    /// Records of the disk's namespaces.
    #[serde(default)]
    pub namespace: Vec<NamespaceRecord>,
}

/// Record of a namespace: identifiers, size and volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NamespaceRecord {
    /// Namespace ID (NSID).
    pub nsid: u32,
    /// Path or URL of the namespace's volume.
    pub volume: String,
    /// Format of the volume: [`RAW`], or another one that its URL names.
    pub format: String,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Size of the namespace in bytes.
    pub size: u64,
    /// Storage objects in which the bytes are stored ([`volume::Volume::media`]).
    #[serde(default)]
    pub media: Vec<String>,
    nguid: String,
    eui64: String,
    uuid: String,
    /// Files beside the volume (such as zone tables), by their configuration keys.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, PathBuf>,
}

/// Format of a volume that contains the disk's bytes unchanged.
pub const RAW: &str = "raw";

impl Record {
    /// Creates a record of a disk without namespaces.
    pub fn new(disk: &str, kind: &str, identity: IdentityRule) -> Self {
        Self {
            version: VERSION,
            disk: disk.to_owned(),
            kind: kind.to_owned(),
            subsystem: None,
            identity,
            serial: String::new(),
            subnqn: None,
            files: BTreeMap::new(),
            namespace: Vec::new(),
        }
    }

    /// Parses the text of a record.
    ///
    /// # Errors
    /// The text is no record, or one of a later version.
    pub fn of_text(text: &str) -> Result<Self> {
        let record: Self = toml::from_str(text).context("not understood")?;
        record.check()?;
        Ok(record)
    }

    /// Checks a record that was read.
    ///
    /// # Errors
    /// It has a later version, or an identifier that is none.
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.version <= VERSION,
            "version {} of the record is not known",
            self.version
        );
        let mut namespaces = self.namespace.iter();
        namespaces.try_for_each(|namespace| namespace.checked_ids().map(drop))
    }

    /// Returns the text of the record.
    ///
    /// # Errors
    /// The text would be read as another record.
    pub fn to_text(&self) -> Result<String> {
        let text = toml::to_string(self)?;
        ensure!(Self::of_text(&text)? == *self, "it would be read otherwise");
        Ok(text)
    }

    /// Returns the record of the namespace with this ID.
    pub fn get(&self, nsid: u32) -> Option<&NamespaceRecord> {
        self.namespace.iter().find(|ns| ns.nsid == nsid)
    }

    /// Puts a namespace in the place of the one of its ID, if there is one.
    pub fn put(&mut self, namespace: NamespaceRecord) {
        self.namespace.retain(|ns| ns.nsid != namespace.nsid);
        self.namespace.push(namespace);
        self.namespace.sort_by_key(|ns| ns.nsid);
    }
}

impl NamespaceRecord {
    /// Creates a record of a namespace with a volume of which only the name is known.
    pub fn new(nsid: u32, volume: &str, ids: Ids) -> Self {
        Self {
            nsid,
            volume: volume.to_owned(),
            format: String::new(),
            block_size: 512,
            size: 0,
            media: Vec::new(),
            nguid: spec::to_hex(&ids.nguid),
            eui64: spec::to_hex(&ids.eui64),
            uuid: spec::to_hex(&ids.uuid),
            files: BTreeMap::new(),
        }
    }

    fn checked_ids(&self) -> Result<Ids> {
        Ok(Ids {
            nguid: hex("nguid", &self.nguid)?,
            eui64: hex("eui64", &self.eui64)?,
            uuid: hex("uuid", &self.uuid)?,
        })
    }

    /// Returns the identifiers of the namespace.
    pub fn ids(&self) -> Ids {
        // The identifiers were checked when the record was read or made.
        self.checked_ids().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_is_read_as_it_was_written_and_damage_is_refused() {
        let mut record = Record::new("vm/0", "controller", IdentityRule::Machine);
        record.serial = "VN1".to_owned();
        record.files.insert("pool".into(), "/p".into());
        let ids = Ids {
            nguid: [0xab; 16],
            eui64: [1; 8],
            uuid: [2; 16],
        };
        let mut namespace = NamespaceRecord::new(3, "/a \"b\".raw", ids);
        namespace.media = vec!["inode 1".to_owned()];
        record.put(namespace);
        record.put(NamespaceRecord::new(1, "mem://1M", Ids::default()));
        assert_eq!(record.get(3).unwrap().ids(), ids);
        assert_eq!(record.namespace.first().unwrap().nsid, 1);
        let text = record.to_text().unwrap();
        assert_eq!(Record::of_text(&text).unwrap(), record);
        for damaged in [
            String::new(),
            text.replace("version = 1", "version = 2"),
            text.replace("abab", "xyxy"),
            text.get(..text.len() / 2).unwrap().to_owned() + "\n[",
        ] {
            assert!(Record::of_text(&damaged).is_err(), "{damaged}");
        }
    }
}
