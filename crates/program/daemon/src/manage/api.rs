//! Calls of the control API that read or change the served disks.

use super::plan::Scope;
use super::table::DiskRecord;
use super::{Manager, Source};
use crate::check::check;
use crate::open::pools::DiskPool;
use crate::open::subsystems::memory_owner;
use config::check::check_filled;
use config::disk::{Address, DiskSpec, device, to_file};
use config::options::file;
use config::request::{namespace_of, table_of};
use config::spec::{NamespaceSpec, Specs, parse_config, to_hex};
use control::Error;
use control::api::{Disk, DiskKind, DiskState, Namespace, OfGuest, PathChoice, Plan};
use controller::{NamespacePool, PooledNamespace};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Time that a client waits for the end of the start: less than its time limit for an answer.
const START: Duration = Duration::from_secs(5);

fn invalid(error: anyhow::Error) -> Error {
    Error::invalid(format!("{error:#}"))
}

impl Manager {
    /// Waits until all disks of the start are known.
    ///
    /// # Errors
    /// The start takes longer.
    pub fn wait_started(&self) -> Result<(), Error> {
        if self.worker_context.table.wait_complete(START) {
            Ok(())
        } else {
            Err(Error::busy(
                "the process is starting, and not all that it serves is open yet: ask again later",
            ))
        }
    }

    /// Returns all disks, sorted by name.
    pub fn disks(&self) -> Vec<Disk> {
        let table = self.worker_context.table.all();
        let disks = table.iter();
        disks
            .map(|(name, entry)| self.describe(name, entry))
            .collect()
    }

    /// Returns the disk with this name.
    ///
    /// # Errors
    /// There is no such disk.
    pub fn disk(&self, name: &str) -> Result<Disk, Error> {
        let entry = self.worker_context.table.get(name)?;
        Ok(self.describe(name, &entry))
    }

    fn describe(&self, name: &str, entry: &DiskRecord) -> Disk {
        let running = entry.running.as_ref();
        let device = match entry.spec.address() {
            Address::Device(Some(id)) => Some(device(id).display().to_string()),
            _ => None,
        };
        let sizes = &self.worker_context.opener.block_sizes;
        let records = &self.worker_context.opener.records;
        // Hosts see no identifiers of a volume that is a disk without namespaces.
        let has_ids = entry.spec.has_namespace_tables();
        let owner = memory_owner(&*entry.spec);
        let configured = entry.spec.numbered().map(|(nsid, spec)| {
            let recorded = || records.block_size(name, nsid);
            let chosen = sizes.of(name, nsid).or_else(recorded);
            let nguid = records.nguid(name, nsid);
            let nguid = nguid.or_else(|| records.nguid(&owner, nsid));
            Namespace {
                nguid: nguid.filter(|_| has_ids).map(|nguid| to_hex(&nguid)),
                ..describe_namespace(entry, nsid, spec, chosen)
            }
        });
        let mut described: Vec<Namespace> = configured.collect();
        if let Some(pool) = self.worker_context.opener.pools.of(name) {
            let pooled = pool.namespaces();
            described.extend(pooled.iter().map(|ns| describe_pooled(&pool, ns)));
            described.sort_by_key(|namespace| namespace.nsid);
        }
        let client = running.and_then(|running| self.client(running));
        let attached = client.is_some();
        let client = client.flatten();
        Disk {
            name: name.to_owned(),
            kind: entry.spec.kind(),
            socket: entry.spec.socket().map(|path| path.display().to_string()),
            device,
            not_kept: running.is_some() && self.keeper().has_lost_keeper(),
            not_yet_kept: running.is_some_and(|running| self.is_behind(running)),
            attached,
            state: match (&entry.failed, attached) {
                (Some(_), _) => DiskState::Unavailable,
                _ if self.is_incoming(entry.spec.socket()) => DiskState::Incoming,
                (None, true) => DiskState::Attached,
                (None, false) => DiskState::Free,
            },
            client_pid: client.as_ref().map(|client| client.pid),
            client,
            serial: records
                .recorded_serial(name)
                .filter(|serial| !serial.is_empty()),
            error: entry.failed.as_ref().map(|failed| failed.text()),
            namespaces: described,
        }
    }

    /// Returns whether another process may write the volume of the disk with this socket.
    pub(super) fn is_incoming(&self, socket: Option<&Path>) -> bool {
        socket.is_some_and(|socket| self.worker_context.registry.is_incoming(socket))
    }

    /// Adds a disk from its configuration table and serves it.
    ///
    /// # Errors
    /// See [`control::Daemon::add`].
    pub fn add(self: &Arc<Self>, kind: DiskKind, table: Map<String, Value>) -> Result<Disk, Error> {
        let spec = DiskSpec::of(kind, table).map_err(invalid)?;
        check_filled(&DiskSpec::specs(std::iter::once(&spec))).map_err(invalid)?;
        let name = self.add_disk(spec, Source::Runtime)?;
        self.disk(&name)
    }

    /// Stops serving a disk and removes it.
    ///
    /// # Errors
    /// See [`control::Daemon::remove`].
    pub fn remove(self: &Arc<Self>, name: &str, force: bool) -> Result<(), Error> {
        self.remove_disk(name, force)
    }

    /// Confirms that the volumes at the places of an unavailable disk's volumes are to be its
    /// volumes, and tries the disk again.
    ///
    /// # Errors
    /// See [`control::Daemon::accept`].
    pub fn accept(&self, name: &str) -> Result<(), Error> {
        self.worker_context.table.get(name)?;
        let accepted = self.worker_context.opener.records.accept(name);
        accepted.map_err(|error| Error::conflict(format!("{error:#}")))?;
        tracing::warn!(
            disk = name,
            "the volumes that the disk has now were accepted"
        );
        self.worker_context.table.try_again();
        Ok(())
    }

    /// Records the volumes of all disks as they are now, since a size has changed.
    pub fn refresh_records(self: &Arc<Self>) {
        let manager = self.clone();
        // Files are written, which the caller must not wait for.
        let refresh = move || {
            for (name, entry) in manager.worker_context.table.all() {
                let volumes = entry.running.into_iter().flat_map(|it| it.volumes);
                for (nsid, volume) in volumes {
                    if let Some(volume) = volume.upgrade() {
                        manager
                            .worker_context
                            .opener
                            .records
                            .refresh(&name, nsid, &*volume);
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("records".into());
        if let Err(error) = thread.spawn(refresh) {
            tracing::warn!(%error, "a changed size is not recorded");
        }
    }

    /// Applies a configuration: adds, changes and removes disks until it is met.
    ///
    /// # Errors
    /// See [`control::Daemon::apply`].
    pub fn apply(
        self: &Arc<Self>,
        config: Map<String, Value>,
        dry_run: bool,
    ) -> Result<Plan, Error> {
        let table = toml::Value::Table(table_of(config));
        let mut specs =
            Specs::deserialize(table).map_err(|error| Error::invalid(error.to_string()))?;
        specs.take_url_options().map_err(invalid)?;
        self.reconcile(&specs, Scope::All, dry_run)
    }

    /// Attaches a namespace to a controller.
    ///
    /// # Errors
    /// See [`control::Daemon::attach`].
    pub fn attach(
        self: &Arc<Self>,
        name: &str,
        namespace: Map<String, Value>,
    ) -> Result<Namespace, Error> {
        let spec = namespace_of(namespace).map_err(invalid)?;
        let nsid = self.attach_namespace(name, spec)?;
        self.namespace(name, nsid)
    }

    /// Detaches a namespace.
    ///
    /// # Errors
    /// See [`control::Daemon::detach`].
    pub fn detach(self: &Arc<Self>, name: &str, nsid: u32) -> Result<(), Error> {
        self.detach_namespace(name, nsid)
    }

    /// Resizes a namespace's volume.
    ///
    /// # Errors
    /// See [`control::Daemon::resize`].
    pub fn resize(self: &Arc<Self>, name: &str, nsid: u32, bytes: u64) -> Result<Namespace, Error> {
        self.resize_namespace(name, nsid, bytes)?;
        self.namespace(name, nsid)
    }

    fn namespace(&self, name: &str, nsid: u32) -> Result<Namespace, Error> {
        let disk = self.disk(name)?;
        let mut namespaces = disk.namespaces.into_iter();
        let found = namespaces.find(|namespace| namespace.nsid == nsid);
        found
            .ok_or_else(|| Error::not_found(format!("\"{name}\" has no namespace {nsid} any more")))
    }

    /// Returns the running configuration as the text of a configuration file.
    ///
    /// # Errors
    /// The configuration cannot be written as a file.
    pub fn save(&self) -> Result<String, Error> {
        let (served, unavailable): (Vec<_>, Vec<_>) = self
            .worker_context
            .table
            .all()
            .into_iter()
            .partition(|(_, entry)| entry.failed.is_none());
        let served = served.into_iter();
        let mut disks: Vec<DiskSpec> = served
            .map(|(_, entry)| self.with_settings(&entry.spec))
            .collect();
        let options = &self.worker_context.options;
        let check = |specs: &Specs| check(specs, options.control.as_deref(), &options.answers);
        // An unavailable disk that conflicts with another disk by now is not written.
        for (_, entry) in unavailable {
            disks.push(self.with_settings(&entry.spec));
            if check(&DiskSpec::specs(disks.iter())).is_err() {
                disks.pop();
            }
        }
        let process = file::to_table(&self.process);
        let saved = to_file((!process.is_empty()).then_some(process), disks.iter());
        let checked = saved.and_then(|text| {
            let again = parse_config(Path::new("the configuration"), &text)?;
            check(&again)?;
            Ok(text)
        });
        checked.map_err(|error| Error::failed(format!("{error:#}")))
    }
}

/// Returns the API's description of a namespace that the guest has created in a pool.
fn describe_pooled(pool: &DiskPool, namespace: &PooledNamespace) -> Namespace {
    Namespace {
        nsid: namespace.nsid,
        volume: pool.file(namespace).display().to_string(),
        bytes: namespace.bytes(),
        block_size: namespace.block_size,
        atomic_unit: None,
        nguid: Some(to_hex(&namespace.nguid)),
        encrypted: false,
        read_only: false,
        path: None,
        ana_group: None,
        ana_state: None,
        trouble: namespace
            .volume
            .as_ref()
            .and_then(crate::registry::on_error::trouble),
        of_guest: Some(if namespace.attached.is_empty() {
            OfGuest::Allocated
        } else {
            OfGuest::Attached
        }),
    }
}

/// Returns the API's description of a namespace; `chosen` is the block size that its guest has
/// chosen, in bytes.
fn describe_namespace(
    entry: &DiskRecord,
    nsid: u32,
    spec: &NamespaceSpec,
    chosen: Option<u32>,
) -> Namespace {
    let volumes = entry.running.iter().flat_map(|running| &running.volumes);
    let volume = volumes.into_iter().find(|(id, _)| *id == nsid);
    let volume = volume.and_then(|(_, volume)| volume.upgrade());
    let info = volume.as_ref().map(|volume| volume.info());
    let is_shared = entry.spec.is_in_subsystem();
    let block = info.as_ref().map_or(512, |info| info.block_size.max(512));
    let block = chosen.or(spec.block_size).unwrap_or(block);
    let trouble = volume.as_ref().and_then(crate::registry::on_error::trouble);
    let encrypted = volume.as_ref().is_some_and(|volume| volume.is_encrypted());
    let atomic = volume.map_or(0, |volume| volume.atomic_writes().unit_of_blocks(block));
    Namespace {
        nsid,
        volume: spec.volume.to_string(),
        bytes: info.as_ref().map_or(0, |info| info.size),
        block_size: block,
        atomic_unit: (atomic > 0).then_some(atomic),
        nguid: None,
        encrypted,
        read_only: spec.is_read_only() || info.is_some_and(|info| info.read_only),
        path: spec.path.map(|path| match path {
            config::choices::PathChoice::Direct => PathChoice::Direct,
            config::choices::PathChoice::Generic => PathChoice::Generic,
        }),
        ana_group: is_shared.then(|| spec.ana_group()),
        ana_state: is_shared.then(|| spec.ana_state.unwrap_or_default().into()),
        of_guest: None,
        trouble,
    }
}
