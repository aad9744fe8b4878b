//! Records of disks: what the guest of a disk was shown, and relies on. Each disk has one, by its
//! name: identifiers, format, block size, size, and the storage objects of its volumes.
//!
//! A record is written before the disk is served. The next process finds it with the keeper, and
//! the next daemon in the folder beside its state file ([`Store`]). A record that is missing or
//! damaged is made anew, from the state of the disk's guest where there is one.
//!
//! While a guest is attached, a process that opens the disk's volumes compares them with the
//! record. Another file at the same path would be another disk's data for the guest, so the disk is
//! then unavailable until the former file is back, or [`Records::accept`] confirms the new one.

mod entry;
mod ids;
mod store;

pub use ids::Ids;

use crate::keep::KeeperSession;
use crate::open::subsystems;
use crate::serve::options::ServeOptions;
use anyhow::{Result, anyhow, bail};
use config::choices::IdentityRule;
use config::disk::DiskSpec;
use config::identity;
use config::spec::{NamespaceSpec, hex};
use config::volumes::is_within;
use controller::{ShownIdentity, ShownNamespace};
use entry::{NamespaceRecord, RAW, Record};
use ids::Source;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, Once};
use store::{All, Store};
use sync::Unpoisoned;
use volume::{Kind, Volume};

/// Guest of a disk, as far as the previous process has left it.
#[derive(Clone, Debug, Default)]
pub struct Guest {
    /// Whether a guest is attached to the disk, or may be.
    pub is_attached: bool,
    /// Identifiers of the disk that the guest has seen.
    pub shown: Option<ShownIdentity>,
}

/// Identifiers of a disk and its namespaces, as guests see them.
#[derive(Clone, Debug, Default)]
pub struct Shown {
    pub serial: String,
    namespaces: BTreeMap<u32, Ids>,
}

impl Shown {
    /// Returns the identifiers of a namespace.
    pub fn ids(&self, nsid: u32) -> Ids {
        self.namespaces.get(&nsid).copied().unwrap_or_default()
    }
}

/// Facts about a volume that its record provides before the volume is opened.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Whether the volume is raw, whatever its guest has written into it.
    pub is_raw: bool,
    /// A process before has served the volume: files beside it are there, or it is unavailable.
    pub was_served: bool,
    /// Recorded block size in bytes, if there is a record.
    pub block_size: Option<u32>,
    /// Storage objects of the volume. Empty where they are not known, or must not be another's.
    pub media: Vec<String>,
}

/// Namespace with its open volume, for comparison with its record.
pub struct Open<'a> {
    pub nsid: u32,
    pub spec: &'a NamespaceSpec,
    /// Open volume; `None` if only its worker opens it.
    pub volume: Option<&'a dyn Volume>,
    /// Block size in bytes, if it differs from that of the volume.
    pub block_size: Option<u32>,
}

impl Open<'_> {
    fn block_size(&self) -> u32 {
        let own = || self.volume.map_or(512, |volume| volume.info().block_size);
        self.block_size.unwrap_or_else(|| own().max(512))
    }

    fn media(&self) -> Vec<String> {
        self.volume.map_or_else(Vec::new, Volume::media)
    }

    fn size(&self) -> u64 {
        self.volume.map_or(0, |volume| volume.info().size)
    }

    fn format(&self) -> String {
        let url = &*self.spec.volume;
        let named = url.rsplit_once('?').and_then(|(_, query)| {
            let mut options = query.split('&');
            options.find_map(|option| option.strip_prefix("format="))
        });
        let scheme = url.split_once("://").map(|(scheme, _)| scheme);
        let format = named.filter(|format| *format != "probe").or(scheme);
        format
            .filter(|format| *format != "file")
            .unwrap_or(RAW)
            .to_owned()
    }

    /// Returns the bytes that identify the volume within this process.
    fn key(&self, disk: &str, rule: IdentityRule) -> Vec<u8> {
        let own = self.volume.and_then(|volume| match volume.info().kind {
            Kind::Memory | Kind::Null if rule == IdentityRule::Machine => None,
            _ => Some(volume.own_id().unwrap_or_else(|| volume.id())),
        });
        own.unwrap_or_else(|| format!("{disk}\n{}", self.nsid).into_bytes())
    }
}

/// Disk with open volumes, for comparison with its record.
pub struct OpenDisk<'a> {
    pub name: &'a str,
    pub kind: &'static str,
    pub subsystem: Option<&'a str>,
    /// Configured serial number, if there is one.
    pub serial: Option<&'a str>,
    /// Configured subsystem NQN, if there is one.
    pub subnqn: Option<&'a str>,
    /// Files of the disk other than volumes, by their configuration keys.
    pub files: Vec<(&'static str, PathBuf)>,
    pub namespaces: Vec<Open<'a>>,
}

/// Identifiers of a namespace that is being served, in this process.
struct Served {
    ids: Ids,
    key: Vec<u8>,
}

/// Storage objects and size of each namespace that differs from its record, by NSID.
type Found = Vec<(u32, Vec<String>, u64)>;

#[derive(Default)]
struct State {
    all: All,
    /// Guests of the disks that are being opened, by disk name.
    guests: BTreeMap<String, Guest>,
    /// Names of the records of disks that a previous process has served.
    continued: BTreeSet<String>,
    served: BTreeMap<(String, u32), Served>,
    /// Disks whose volumes differ from the record, until the operator accepts them
    /// ([`Records::accept`]).
    refused: BTreeMap<String, Found>,
}

/// Records of all disks of the process, in memory and in their store.
pub struct Records {
    rule: IdentityRule,
    machine: Option<[u8; 16]>,
    /// Guard of the warning about a machine without an ID, which is logged once.
    warned: Once,
    store: Store,
    state: Mutex<State>,
}

impl Records {
    /// Reads the existing records of disks. Must be called before the sandbox is entered.
    pub fn open(options: &ServeOptions, keeper: &KeeperSession) -> Self {
        let (store, all) = Store::open(options.state.as_deref(), keeper);
        Self {
            rule: options.identity,
            machine: ids::machine(),
            warned: Once::new(),
            store,
            state: Mutex::new(State {
                all,
                ..State::default()
            }),
        }
    }

    /// Records that a previous process has served the disk, which this process continues.
    pub fn enter_continued(&self, disk: &DiskSpec) {
        let mut state = self.state.lock().unpoisoned();
        state.continued.insert(disk.name());
        state.continued.insert(subsystems::memory_owner(&**disk));
    }

    /// Begins to open a disk; `guest` is the guest that the previous process has left.
    pub fn begin(&self, disk: &str, guest: Guest) {
        let mut state = self.state.lock().unpoisoned();
        // A shared namespace has the guests of all disks of its subsystem.
        let known = state.guests.entry(disk.to_owned()).or_default();
        if guest.is_attached || !known.is_attached {
            *known = guest;
        }
    }

    /// Returns the facts about the volume of a namespace that is about to be opened. `owner` is the
    /// disk's name, or that of its subsystem ([`subsystems::memory_owner`]).
    pub fn known(&self, owner: &str, nsid: u32, spec: &NamespaceSpec) -> Known {
        let state = self.state.lock().unpoisoned();
        let record = state.find(owner, nsid);
        let namespace = record.and_then(|record| record.get(nsid));
        let namespace = namespace.filter(|namespace| namespace.volume == *spec.volume);
        let continued = state.continued.contains(owner);
        // A process without records has served what is configured.
        let was_served = continued && (record.is_none() || namespace.is_some());
        let guest = state.guests.get(owner);
        let is_attached = guest.is_some_and(|guest| guest.is_attached);
        let shown = guest.and_then(|guest| guest.namespace(nsid));
        Known {
            is_raw: was_served || namespace.is_some_and(|namespace| namespace.format == RAW),
            was_served,
            block_size: match namespace {
                Some(namespace) => Some(namespace.block_size),
                // Not the size that a guest has chosen: that is in the file of the format.
                None if was_served && spec.format_file.is_none() => {
                    shown.map(|shown| shown.block_size)
                }
                None => None,
            },
            media: match namespace {
                Some(namespace) if !is_attached => namespace.media.clone(),
                _ => Vec::new(),
            },
        }
    }

    /// Returns the recorded block size of a namespace.
    pub fn block_size(&self, disk: &str, nsid: u32) -> Option<u32> {
        let state = self.state.lock().unpoisoned();
        Some(state.all.get(disk)?.get(nsid)?.block_size)
    }

    /// Returns the recorded serial number of a disk.
    pub fn recorded_serial(&self, disk: &str) -> Option<String> {
        let state = self.state.lock().unpoisoned();
        Some(state.all.get(disk)?.serial.clone())
    }

    /// Returns the recorded NGUID of a namespace, if it has one.
    pub fn nguid(&self, disk: &str, nsid: u32) -> Option<[u8; 16]> {
        let state = self.state.lock().unpoisoned();
        let ids = state.all.get(disk)?.get(nsid)?.ids();
        (ids.nguid != [0; 16]).then_some(ids.nguid)
    }

    /// Compares a disk with its record, and records it. Returns its identity.
    ///
    /// # Errors
    /// A guest is attached, and a volume is not the one that the guest has; or another namespace of
    /// this process has one of the identifiers, and another volume.
    pub fn settle(&self, disk: &OpenDisk<'_>) -> Result<Shown> {
        let mut state = self.state.lock().unpoisoned();
        let guest = state.guests.get(disk.name).cloned().unwrap_or_default();
        let before = state.all.get(disk.name).cloned();
        if let Some(before) = &before {
            match compare(before, disk, guest.is_attached) {
                Ok(()) => drop(state.refused.remove(disk.name)),
                Err((found, error)) => {
                    state.refused.insert(disk.name.to_owned(), found);
                    return Err(error);
                }
            }
        }
        let record = self.record(&state, before.as_ref(), &guest, disk);
        let mut served = Vec::new();
        for open in &disk.namespaces {
            let ids = record.get(open.nsid).map(NamespaceRecord::ids);
            let ids = ids.unwrap_or_default();
            let key = open.key(&owner(disk), self.rule);
            state.ensure_unique(disk.name, open.nsid, &ids, &key)?;
            served.push(((disk.name.to_owned(), open.nsid), Served { ids, key }));
        }
        state.forget_served(disk.name);
        state.served.extend(served);
        state.guests.remove(disk.name);
        state.guests.remove(&owner(disk));
        let namespaces = record.namespace.iter();
        let shown = Shown {
            serial: record.serial.clone(),
            namespaces: namespaces.map(|ns| (ns.nsid, ns.ids())).collect(),
        };
        if before.as_ref() != Some(&record) {
            state.all.insert(disk.name.to_owned(), record.clone());
            self.store.write(disk.name, Some(&record), &state.all);
        }
        Ok(shown)
    }

    /// Creates the new record of a disk that was opened.
    fn record(
        &self,
        state: &State,
        before: Option<&Record>,
        guest: &Guest,
        disk: &OpenDisk<'_>,
    ) -> Record {
        let before = before.filter(|before| before.identity == self.rule);
        let sources = disk.namespaces.iter();
        let sources: Vec<Source> = sources
            .map(|open| Source::of(open.volume, self.rule, self.machine))
            .collect();
        let is_by_machine = |source: &Source| matches!(source, Source::Host(_));
        if self.machine.is_none()
            && self.rule == IdentityRule::Machine
            && sources.iter().any(is_by_machine)
        {
            self.warned.call_once(|| {
                tracing::warn!(
                    "/etc/machine-id has no ID of this machine: default serial numbers and \
                     identifiers of files are made from their paths alone, and another machine may \
                     have the same"
                );
            });
        }
        let mut record = Record::new(disk.name, disk.kind, self.rule);
        record.subsystem = disk.subsystem.map(str::to_owned);
        let files = disk.files.iter();
        record.files = files
            .map(|(key, path)| ((*key).to_owned(), path.clone()))
            .collect();
        record.serial = self.serial(before, guest, disk, &sources);
        record.subnqn = Some(match disk.subnqn {
            Some(subnqn) => subnqn.to_owned(),
            None => identity::subnqn(&record.serial),
        });
        for (open, source) in disk.namespaces.iter().zip(&sources) {
            let known = match disk.subsystem {
                // Disks of one subsystem show the same namespace.
                Some(_) => state.find(&owner(disk), open.nsid),
                None => before,
            };
            let known = known.and_then(|known| known.get(open.nsid));
            let known = known.filter(|known| is_same_volume(known, open));
            let ids = self.ids(known, guest, &record.serial, open, source);
            record.put(namespace_record(open, ids));
        }
        record
    }

    /// Returns the serial number of a disk: the configured one, or the one that its guest knows, or
    /// the recorded one if the disk still has one of its volumes, or else a new one.
    fn serial(
        &self,
        before: Option<&Record>,
        guest: &Guest,
        disk: &OpenDisk<'_>,
        sources: &[Source],
    ) -> String {
        if let Some(serial) = disk.serial {
            return serial.to_owned();
        }
        // The disk may have had other volumes when its guest saw it first.
        let shown = guest.shown.as_ref().map(|shown| &shown.serial);
        if let Some(known) = shown.filter(|known| identity::is_serial(known)) {
            return known.clone();
        }
        let is_same = |before: &&Record| {
            let is_kept = |open: &Open<'_>| {
                let known = before.get(open.nsid);
                known.is_some_and(|known| is_same_volume(known, open))
            };
            disk.namespaces.is_empty() || disk.namespaces.iter().any(is_kept)
        };
        let is_own = sources
            .iter()
            .all(|source| matches!(source, Source::Own(_)));
        let is_made_anew = is_own && !sources.is_empty() || disk.subsystem.is_some();
        if let Some(before) = before.filter(is_same)
            && !is_made_anew
            && identity::is_serial(&before.serial)
        {
            return before.serial.clone();
        }
        let machine = match (self.rule, self.machine) {
            (IdentityRule::Machine, Some(machine)) => Some(machine.to_vec()),
            _ => None,
        };
        if let Some(name) = disk.subsystem {
            let parts = [b"subsystem".to_vec(), name.as_bytes().to_vec()];
            return identity::serial(&parts.into_iter().chain(machine).collect::<Vec<_>>());
        }
        let mut parts: Vec<Vec<u8>> = sources.iter().map(Source::bytes).collect();
        if parts.is_empty() && self.rule == IdentityRule::Machine {
            // Two disks without volumes are two disks.
            parts.push([&b"disk:"[..], disk.name.as_bytes()].concat());
            parts.extend(machine);
        }
        identity::serial(&parts)
    }

    /// Returns the identifiers of a namespace. `known` is its record, if it is one of this volume.
    fn ids(
        &self,
        known: Option<&NamespaceRecord>,
        guest: &Guest,
        serial: &str,
        open: &Open<'_>,
        source: &Source,
    ) -> Ids {
        let new = || Ids::made(self.rule, serial, open.nsid, &source.bytes());
        let shown = guest.namespace(open.nsid).map(|shown| Ids {
            nguid: shown.nguid,
            eui64: shown.eui64,
            uuid: shown.uuid,
        });
        let configured = open.spec.nguid.as_ref();
        let configured = configured.and_then(|text| hex::<16>("nguid", text).ok());
        // The guest's state decides only where it can be of this volume: its record is lost, or was
        // made by an older version.
        let shown = shown.filter(|shown| {
            let id = open.volume.map_or_else(Vec::new, Volume::id);
            let old = Ids::made(IdentityRule::Path, serial, open.nsid, &id);
            known.is_some()
                || matches!(source, Source::Random(_))
                || [Some(new().nguid), Some(old.nguid), configured].contains(&Some(shown.nguid))
        });
        let made = match (shown, known, source) {
            (Some(shown), ..) => shown,
            (None, _, Source::Own(_)) | (None, None, _) => new(),
            (None, Some(known), _) => known.ids(),
        };
        let (eui64, uuid) = (&open.spec.eui64, &open.spec.uuid);
        let nguid = configured.unwrap_or(made.nguid);
        let default = if nguid == made.nguid || self.rule == IdentityRule::Path {
            made.uuid
        } else {
            identity::uuid(nguid)
        };
        Ids {
            nguid,
            eui64: eui64
                .as_ref()
                .and_then(|text| hex("eui64", text).ok())
                .unwrap_or(made.eui64),
            uuid: uuid
                .as_ref()
                .and_then(|text| hex("uuid", text).ok())
                .unwrap_or(default),
        }
    }

    /// Records a namespace that is about to be attached to a disk. Returns its identifiers.
    ///
    /// # Errors
    /// Another namespace has one of the identifiers, and another volume.
    pub fn attach(&self, disk: &str, serial: &str, open: &Open<'_>) -> Result<Ids> {
        let mut state = self.state.lock().unpoisoned();
        let source = Source::of(open.volume, self.rule, self.machine);
        let ids = self.ids(None, &Guest::default(), serial, open, &source);
        let key = open.key(disk, self.rule);
        state.ensure_unique(disk, open.nsid, &ids, &key)?;
        let served = Served { ids, key };
        state.served.insert((disk.to_owned(), open.nsid), served);
        self.change(&mut state, disk, |record| {
            record.put(namespace_record(open, ids));
        });
        Ok(ids)
    }

    /// Removes a detached namespace from the record of its disk.
    pub fn detach(&self, disk: &str, nsid: u32) {
        let mut state = self.state.lock().unpoisoned();
        state.served.remove(&(disk.to_owned(), nsid));
        self.change(&mut state, disk, |record| {
            record.namespace.retain(|namespace| namespace.nsid != nsid);
        });
    }

    /// Updates the record of a namespace after its volume was resized.
    pub fn refresh(&self, disk: &str, nsid: u32, volume: &dyn Volume) {
        let mut state = self.state.lock().unpoisoned();
        self.change(&mut state, disk, |record| {
            let mut namespaces = record.namespace.iter_mut();
            if let Some(namespace) = namespaces.find(|namespace| namespace.nsid == nsid) {
                namespace.size = volume.info().size;
                namespace.media = volume.media();
            }
        });
    }

    /// Removes the record of a disk that is removed.
    pub fn remove(&self, disk: &str) {
        let mut state = self.state.lock().unpoisoned();
        state.forget_served(disk);
        state.continued.remove(disk);
        state.guests.remove(disk);
        state.refused.remove(disk);
        if state.all.remove(disk).is_some() {
            self.store.write(disk, None, &state.all);
        }
    }

    /// Confirms that the volumes which a disk was found to have are to be its volumes.
    ///
    /// # Errors
    /// The disk does not wait for that.
    pub fn accept(&self, disk: &str) -> Result<()> {
        let mut state = self.state.lock().unpoisoned();
        let Some(found) = state.refused.remove(disk) else {
            bail!("\"{disk}\" has the volumes that its guest knows, or they cannot be opened");
        };
        self.change(&mut state, disk, |record| {
            for (nsid, media, size) in found {
                let mut namespaces = record.namespace.iter_mut();
                if let Some(namespace) = namespaces.find(|namespace| namespace.nsid == nsid) {
                    (namespace.media, namespace.size) = (media, size);
                }
            }
        });
        Ok(())
    }

    fn change(&self, state: &mut State, disk: &str, change: impl FnOnce(&mut Record)) {
        let Some(record) = state.all.get_mut(disk) else {
            return;
        };
        let before = record.clone();
        change(record);
        let record = record.clone();
        if record != before {
            self.store.write(disk, Some(&record), &state.all);
        }
    }
}

impl Guest {
    fn namespace(&self, nsid: u32) -> Option<ShownNamespace> {
        let shown = self.shown.as_ref()?;
        let mut namespaces = shown.namespaces.iter();
        namespaces.find(|ns| ns.nsid == nsid).copied()
    }
}

impl State {
    /// Returns the record of a disk, or that of a disk of a subsystem that has the namespace.
    fn find(&self, owner: &str, nsid: u32) -> Option<&Record> {
        let is_of = |record: &&Record| {
            let subsystem = record.subsystem.as_ref();
            subsystem.is_some_and(|name| subsystems::owner(name) == owner)
                && record.get(nsid).is_some()
        };
        let record = self.all.get(owner);
        record.or_else(|| self.all.values().find(is_of))
    }

    fn forget_served(&mut self, disk: &str) {
        self.served.retain(|(name, _), _| name != disk);
    }

    fn ensure_unique(&self, disk: &str, nsid: u32, ids: &Ids, key: &[u8]) -> Result<()> {
        for ((name, other), served) in &self.served {
            if (&**name, *other) == (disk, nsid) || served.key == key {
                continue;
            }
            let same = [
                (
                    "nguid",
                    served.ids.nguid == ids.nguid && ids.nguid != [0; 16],
                ),
                (
                    "eui64",
                    served.ids.eui64 == ids.eui64 && ids.eui64 != [0; 8],
                ),
                ("uuid", served.ids.uuid == ids.uuid && ids.uuid != [0; 16]),
            ];
            if let Some((field, _)) = same.into_iter().find(|(_, is_same)| *is_same) {
                bail!(
                    "namespace {nsid} has the {field} of namespace {other} of the disk {name}, and \
                     another volume: give it another {field}"
                );
            }
        }
        Ok(())
    }
}

fn owner(disk: &OpenDisk<'_>) -> String {
    match disk.subsystem {
        Some(name) => subsystems::owner(name),
        None => disk.name.to_owned(),
    }
}

fn is_same_volume(known: &NamespaceRecord, open: &Open<'_>) -> bool {
    let is_moved = !known.media.is_empty() && known.media == open.media();
    known.volume == *open.spec.volume || is_moved
}

fn namespace_record(open: &Open<'_>, ids: Ids) -> NamespaceRecord {
    let mut record = NamespaceRecord::new(open.nsid, &open.spec.volume, ids);
    record.format = open.format();
    record.block_size = open.block_size();
    record.size = open.size();
    record.media = open.media();
    let files = open.spec.kept_files().into_iter();
    record.files = files.map(|(key, path)| (key.to_owned(), path)).collect();
    record
}

/// Compares the open volumes of a disk with those in its record `before`.
fn compare(
    before: &Record,
    disk: &OpenDisk<'_>,
    is_attached: bool,
) -> Result<(), (Found, anyhow::Error)> {
    let (mut found, mut error) = (Vec::new(), None);
    for open in &disk.namespaces {
        let Some(known) = before.get(open.nsid) else {
            continue;
        };
        // A volume that is configured otherwise is another one, and the guest's state shows it.
        if known.volume != *open.spec.volume || is_within(&open.spec.volume) {
            continue;
        }
        let (media, size) = (open.media(), open.size());
        let is_other = known.media != media && !known.media.is_empty() && !media.is_empty();
        let why = match is_other {
            true => format!(
                "it is not the file or volume that its guest has, which is {}; there now is {}",
                known.media.join(" on "),
                media.join(" on ")
            ),
            false if size < known.size => format!(
                "it has {size} bytes, and the guest has a disk of {} bytes",
                known.size
            ),
            false => continue,
        };
        let url = &open.spec.volume;
        if !is_attached {
            tracing::info!(disk = disk.name, "{url}: no guest is attached, and {why}");
            continue;
        }
        found.push((open.nsid, media, size));
        error.get_or_insert_with(|| {
            anyhow!(
                "{url}: {why}. Put the former one back, or confirm the new one: vnvme accept {}",
                disk.name
            )
        });
    }
    error.map_or(Ok(()), |error| Err((found, error)))
}

#[cfg(test)]
mod tests;
