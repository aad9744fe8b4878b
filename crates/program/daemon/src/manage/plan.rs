//! Application of a configuration: its changes are planned as text first, then done, or undone.

use super::Manager;
use super::ana;
use super::bounded::bounded;
use super::change::{VOLUME_TIMEOUT, attached, in_subsystem};
use super::refused::failed;
use super::table::{DiskRecord, Source};
use crate::front::kind::OpenedDisk;
use crate::open::OpenedVolume;
use crate::registry::settings::{DiskSettings, bare};
use config::disk::DiskSpec;
use config::spec::{ControllerSpec, NamespaceSpec, ProcessSpec, Specs};
use control::Error;
use control::api::{AnaState, Plan, Refusal};
use std::collections::BTreeMap;
use std::sync::Arc;
use sync::Unpoisoned;

/// Selects the disks that a configuration removes because it does not name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// All disks that the configuration does not name.
    All,
    /// Only disks that an earlier configuration has named, not those added at run time.
    OfConfig,
}

/// Step of the plan by which a new configuration is applied to a disk.
enum PlanStep {
    Add(DiskSpec),
    Remove(String),
    /// Changes the ANA states of a disk's groups.
    Ana(String, BTreeMap<u32, AnaState>),
    /// Changes limits, weights and error policies of open volumes.
    Settings(DiskSpec),
    /// Removes and adds a disk that has no client.
    Replace(DiskSpec),
    /// Attaches and detaches namespaces while the client stays attached.
    Namespaces {
        name: String,
        gone: Vec<u32>,
        new: Vec<NamespaceSpec>,
    },
}

/// Step of a plan that was executed, with the data to undo it.
enum AppliedStep {
    Added(String),
    /// ANA states of a disk's groups before the step.
    Ana(String, BTreeMap<u32, AnaState>),
    Removed(DiskSpec, Source),
    /// The disk and its settings before.
    Settings(String, Box<(DiskSpec, DiskSettings)>),
    /// An unavailable disk that was removed.
    Forgotten(Box<DiskRecord>),
    Attached(String, u32),
    Detached(String, NamespaceSpec),
}

impl Manager {
    /// Changes the served disks to those of a configuration, completely or not at all.
    pub(super) fn reconcile(
        self: &Arc<Self>,
        wanted: &Specs,
        scope: Scope,
        dry_run: bool,
    ) -> Result<Plan, Error> {
        let Ok(_applying) = self.applying.try_lock() else {
            return Err(Error::conflict("another configuration is being applied"));
        };
        let (mut plan, steps) = self.plan(wanted, scope)?;
        plan.dry_run = dry_run;
        if dry_run || !plan.refused.is_empty() {
            return Ok(plan);
        }
        let manager = self.clone();
        let source = match scope {
            Scope::All => Source::Runtime,
            Scope::OfConfig => Source::Config,
        };
        let mut done = Vec::new();
        let result = manager.do_all(steps, source, &mut done);
        let result = result.and_then(|()| match scope {
            Scope::All => Ok(()),
            Scope::OfConfig => self.adopt(wanted),
        });
        if let Err(error) = result {
            let undone = self.undo(done);
            return Err(if undone.is_empty() {
                Error {
                    message: format!("{}; nothing was changed", error.message),
                    ..error
                }
            } else {
                Error::failed(format!(
                    "{}; and this could not be undone: {}",
                    error.message,
                    undone.join("; ")
                ))
            });
        }
        for name in &plan.removed {
            self.registry().settings.retain(name, |_| false);
        }
        for done in done {
            // The disk's kept descriptors belong to another disk by now, or to none.
            if let AppliedStep::Forgotten(entry) = done {
                self.give_up(&entry.spec);
            }
        }
        self.worker_context.table.try_again();
        Ok(plan)
    }

    /// Makes a configuration that was read the one that a later reload compares with: its disks are
    /// those of the configuration by now, also those that were added by request.
    fn adopt(&self, wanted: &Specs) -> Result<(), Error> {
        let now = DiskSpec::by_name(wanted);
        let adopted = self.worker_context.table.adopt(now.keys());
        let before = std::mem::replace(&mut *self.file.lock().unpoisoned(), now);
        self.record().inspect_err(|_| {
            *self.file.lock().unpoisoned() = before;
            self.worker_context.table.unadopt(&adopted);
            self.keep_state();
        })
    }

    fn plan(&self, wanted: &Specs, scope: Scope) -> Result<(Plan, Vec<PlanStep>), Error> {
        let mut plan = Plan::default();
        let mut steps = Vec::new();
        let disks = DiskSpec::all(wanted);
        let mut disks_by_name = BTreeMap::new();
        for disk in disks {
            let name = disk.name();
            if disks_by_name.insert(name.clone(), disk).is_some() {
                return Err(Error::invalid(format!(
                    "two disks are called \"{name}\": give one of them a name"
                )));
            }
        }
        let table: BTreeMap<String, DiskRecord> =
            self.worker_context.table.all().into_iter().collect();
        let mut refuse = |disk: &str, reason: String| {
            plan.refused.push(Refusal {
                disk: disk.to_owned(),
                reason,
            });
        };
        if let Some(what) = self.process_change(&wanted.process) {
            refuse("", what);
        }
        for (name, entry) in &table {
            let goes = scope == Scope::All || entry.source == Source::Config;
            if disks_by_name.contains_key(name) || !goes {
                continue;
            }
            match (&entry.running, entry.busy) {
                (_, Some(busy)) => refuse(name, format!("it is {busy}")),
                (Some(running), None) if self.is_attached(running) => {
                    refuse(name, attached(name).message);
                }
                _ => {
                    plan.removed.push(name.clone());
                    steps.push(PlanStep::Remove(name.clone()));
                }
            }
        }
        // More likely one that was cut off, or is being written.
        if *wanted == Specs::default() && !plan.removed.is_empty() {
            let why = "the configuration is empty, and would have every disk removed: if that is \
                       meant, remove them one by one";
            refuse("", why.to_owned());
        }
        let file = match scope {
            Scope::All => BTreeMap::new(),
            Scope::OfConfig => self.file.lock().unpoisoned().clone(),
        };
        for (name, disk) in disks_by_name {
            let before = file.get(&name);
            let Some(entry) = table.get(&name) else {
                if before == Some(&disk) {
                    tracing::info!(
                        disk = name,
                        "the disk was removed by request, and stays so: its configuration is as \
                         before"
                    );
                    continue;
                }
                match self.admit(&disk) {
                    Ok(()) => plan.added.push(name),
                    Err(error) => {
                        let reason = disk.origin().error("", error.message);
                        refuse(&name, reason.to_string());
                    }
                }
                steps.push(PlanStep::Add(disk));
                continue;
            };
            // A saved configuration has changed settings as options.
            let is_saved = || self.with_settings(&entry.spec) == disk;
            let disk = match before {
                _ if is_saved() => entry.spec.clone(),
                Some(before) => merged(before, &entry.spec, disk),
                None => disk,
            };
            // An unavailable disk is retried in any case.
            if entry.spec == disk {
                plan.unchanged.push(name);
                continue;
            }
            match self.change(&name, entry, disk) {
                Ok(of_disk) => {
                    plan.changed.push(name);
                    steps.extend(of_disk);
                }
                Err(error) => refuse(&name, error.message),
            }
        }
        // Values that have to be unique among all disks of the new configuration.
        if plan.refused.is_empty() {
            self.check_together(&table, &steps)?;
        }
        Ok((plan, steps))
    }

    fn check_together(
        &self,
        table: &BTreeMap<String, DiskRecord>,
        steps: &[PlanStep],
    ) -> Result<(), Error> {
        let mut all: BTreeMap<String, DiskSpec> = table
            .iter()
            .filter(|(_, entry)| entry.failed.is_none())
            .map(|(name, entry)| (name.clone(), entry.spec.clone()))
            .collect();
        for step in steps {
            match step {
                PlanStep::Add(spec) | PlanStep::Replace(spec) | PlanStep::Settings(spec) => {
                    all.insert(spec.name(), spec.clone());
                }
                PlanStep::Remove(name) => {
                    all.remove(name);
                }
                PlanStep::Ana(..) => {}
                PlanStep::Namespaces { name, gone, new } => {
                    if let Some(DiskSpec::Controller(spec)) = all.get_mut(name) {
                        let left =
                            |ns: &NamespaceSpec| ns.nsid.is_none_or(|id| !gone.contains(&id));
                        spec.namespaces.retain(left);
                        spec.namespaces.extend(new.iter().cloned());
                    }
                }
            }
        }
        self.check_all(all.values())
    }

    /// How a disk becomes another one.
    fn change(
        &self,
        name: &str,
        entry: &DiskRecord,
        wanted: DiskSpec,
    ) -> Result<Vec<PlanStep>, Error> {
        if entry.failed.is_some() {
            self.admit(&wanted)?;
            return Ok(vec![PlanStep::Replace(wanted)]);
        }
        let (Some(running), None) = (&entry.running, entry.busy) else {
            let busy = entry.busy.unwrap_or("not served");
            return Err(Error::conflict(format!("it is {busy}")));
        };
        if let (DiskSpec::Controller(now), DiskSpec::Controller(then)) = (&entry.spec, &wanted)
            && now.subsystem.is_some()
            && without_ana(now) == without_ana(then)
        {
            return Ok(vec![PlanStep::Ana(name.to_owned(), ana::groups(then))]);
        }
        if self.differs_in_settings(entry, &wanted)? {
            return Ok(vec![PlanStep::Settings(wanted)]);
        }
        if entry.spec.kind() != wanted.kind() || !self.is_attached(running) {
            if self.is_attached(running) {
                return Err(attached(name));
            }
            self.admit(&wanted)?;
            return Ok(vec![PlanStep::Replace(wanted)]);
        }
        let (DiskSpec::Controller(now), DiskSpec::Controller(then)) = (&entry.spec, &wanted) else {
            return Err(Error::conflict(format!(
                "a client is attached, and {} cannot change under it",
                differing(&entry.spec, &wanted)
            )));
        };
        let others = |spec: &ControllerSpec| {
            let namespaces = Vec::new();
            DiskSpec::Controller(ControllerSpec {
                namespaces,
                ..spec.clone()
            })
        };
        if others(now) != others(then) {
            return Err(Error::conflict(format!(
                "a client is attached, and {} cannot change under it",
                differing(&others(now), &others(then))
            )));
        }
        if entry.spec.is_in_subsystem() {
            return Err(in_subsystem(name));
        }
        let of = |spec: &ControllerSpec, nsid| {
            let mut namespaces = spec.namespaces.iter();
            namespaces.find(|ns| ns.nsid == nsid).cloned()
        };
        let (mut new, mut kept_ones) = (Vec::new(), now.clone());
        for namespace in &then.namespaces {
            match of(now, namespace.nsid) {
                None => {
                    self.wait_answer_of(name, namespace)?;
                    self.allow.check_volume(&namespace.volume)?;
                    new.push(namespace.clone());
                }
                Some(same) if same == *namespace => {}
                Some(same) if bare(&same) == bare(namespace) => {
                    let mut own = kept_ones.namespaces.iter_mut();
                    if let Some(own) = own.find(|own| own.nsid == namespace.nsid) {
                        own.clone_from(namespace);
                    }
                }
                Some(_) => {
                    return Err(Error::conflict(format!(
                        "a client is attached, and namespace {} cannot become another one under \
                         it: detach it first",
                        namespace.nsid.unwrap_or(0)
                    )));
                }
            }
        }
        let kept = |ns: &&NamespaceSpec| of(then, ns.nsid).is_none();
        let gone = now.namespaces.iter().filter(kept);
        let mut steps = Vec::new();
        let kept_ones = DiskSpec::Controller(kept_ones);
        if kept_ones != entry.spec {
            self.differs_in_settings(entry, &kept_ones)?;
            steps.push(PlanStep::Settings(kept_ones));
        }
        steps.push(PlanStep::Namespaces {
            name: name.to_owned(),
            gone: gone.filter_map(|ns| ns.nsid).collect(),
            new,
        });
        Ok(steps)
    }

    /// Returns the process options that differ, which take effect at the next start; `None` if none
    /// do.
    fn process_change(&self, wanted: &ProcessSpec) -> Option<String> {
        // A configuration without a process table does not change the process.
        if [&self.process, &self.said, &ProcessSpec::default()].contains(&wanted) {
            return None;
        }
        let now = config::options::file::to_table(&self.said);
        let then = config::options::file::to_table(wanted);
        let keys = differing_keys(&now, &then);
        Some(format!(
            "[process]: {keys} cannot change while the process runs: start it again"
        ))
    }

    fn do_all(
        self: &Arc<Self>,
        steps: Vec<PlanStep>,
        source: Source,
        done: &mut Vec<AppliedStep>,
    ) -> Result<(), Error> {
        // Everything new is opened before anything is removed: it may not exist. Only a volume or
        // socket that is opened a second time waits until it is closed.
        let mut ready: BTreeMap<String, OpenedDisk> = BTreeMap::new();
        let mut namespaces: BTreeMap<(String, u32), OpenedVolume> = BTreeMap::new();
        for step in &steps {
            match step {
                PlanStep::Add(spec) if !self.is_in_use(spec) => {
                    ready.insert(spec.name(), self.open_bounded(spec)?);
                }
                PlanStep::Namespaces { name, new, .. } => {
                    for spec in new {
                        let opened = self.open_namespace(spec, name)?;
                        namespaces.insert((name.clone(), spec.nsid.unwrap_or(1)), opened);
                    }
                }
                _ => {}
            }
        }
        for step in &steps {
            match step {
                PlanStep::Remove(name) => self.remove_undoably(name, done)?,
                PlanStep::Replace(spec) => self.remove_undoably(&spec.name(), done)?,
                _ => {}
            }
        }
        for step in steps {
            match step {
                PlanStep::Remove(_) => {}
                PlanStep::Ana(name, groups) => {
                    if let DiskSpec::Controller(spec) = self.worker_context.table.get(&name)?.spec {
                        done.push(AppliedStep::Ana(name.clone(), ana::groups(&spec)));
                    }
                    self.set_ana(&name, &groups)?;
                }
                PlanStep::Settings(spec) => {
                    let name = spec.name();
                    let before = self.reconfigure(&name, &spec)?;
                    done.push(AppliedStep::Settings(name, Box::new(before)));
                }
                PlanStep::Add(spec) | PlanStep::Replace(spec) => {
                    let name = self.add_ready(ready.remove(&spec.name()), spec, source)?;
                    done.push(AppliedStep::Added(name));
                }
                PlanStep::Namespaces { name, gone, new } => {
                    for nsid in gone {
                        let entry = self.worker_context.table.get(&name)?;
                        self.detach_namespace(&name, nsid)?;
                        if let DiskSpec::Controller(spec) = entry.spec
                            && let Some(old) =
                                spec.namespaces.into_iter().find(|ns| ns.nsid == Some(nsid))
                        {
                            done.push(AppliedStep::Detached(name.clone(), old));
                        }
                    }
                    for spec in new {
                        let nsid = spec.nsid.unwrap_or(1);
                        let opened = namespaces.remove(&(name.clone(), nsid));
                        self.attach_ready(&name, spec, opened)?;
                        done.push(AppliedStep::Attached(name.clone(), nsid));
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns whether another disk has one of the disk's volumes or identifiers, or its socket, so
    /// that it has to be removed first.
    fn is_in_use(&self, spec: &DiskSpec) -> bool {
        let table = self.worker_context.table.served();
        table.iter().any(|(_, entry)| {
            let volumes = entry.spec.volumes();
            let shares = spec.volumes().iter().any(|url| volumes.contains(url));
            let identifiers = entry.spec.identifiers();
            let is_moved = spec.identifiers().iter().any(|id| identifiers.contains(id));
            shares || is_moved || (spec.socket().is_some() && spec.socket() == entry.spec.socket())
        })
    }

    fn open_bounded(self: &Arc<Self>, spec: &DiskSpec) -> Result<OpenedDisk, Error> {
        let (manager, spec) = (self.clone(), spec.clone());
        bounded(
            &format!("opening \"{}\"", spec.name()),
            VOLUME_TIMEOUT,
            move |_| manager.open(&spec),
        )
    }

    fn open_namespace(
        self: &Arc<Self>,
        spec: &NamespaceSpec,
        disk: &str,
    ) -> Result<OpenedVolume, Error> {
        let (manager, spec, disk) = (self.clone(), spec.clone(), disk.to_owned());
        bounded(
            &format!("opening {}", spec.volume),
            VOLUME_TIMEOUT,
            move |_| {
                let nsid = spec.nsid.unwrap_or(1);
                let opened = manager.worker_context.opener.open(&spec, &disk, nsid);
                spec.origin.place("volume", opened).map_err(failed)
            },
        )
    }

    fn add_ready(
        self: &Arc<Self>,
        ready: Option<OpenedDisk>,
        spec: DiskSpec,
        source: Source,
    ) -> Result<String, Error> {
        let Some(ready) = ready else {
            return self.add_disk(spec, source);
        };
        let reserved = self.worker_context.table.reserve(spec.clone(), source)?;
        self.worker_context.registry.described.add(&spec);
        let manager = self.clone();
        bounded(
            &format!("adding \"{}\"", spec.name()),
            VOLUME_TIMEOUT,
            move |decision| {
                let served = manager.serve_reserved(ready, reserved, decision);
                if served.is_err() {
                    manager.worker_context.opener.records.remove(&spec.name());
                }
                served
            },
        )
    }

    fn attach_ready(
        self: &Arc<Self>,
        name: &str,
        spec: NamespaceSpec,
        opened: Option<OpenedVolume>,
    ) -> Result<(), Error> {
        let Some(opened) = opened else {
            return self.attach_namespace(name, spec).map(drop);
        };
        let taken = self.worker_context.table.take(name, "being changed")?;
        let DiskSpec::Controller(mut together) = taken.spec.clone() else {
            return Err(Error::conflict(format!(
                "\"{name}\" has become another disk"
            )));
        };
        together.namespaces.push(spec.clone());
        let together = DiskSpec::Controller(together);
        let attached = self.attach_opened(taken, together, spec, opened);
        attached.map(drop)
    }

    fn remove_undoably(
        self: &Arc<Self>,
        name: &str,
        done: &mut Vec<AppliedStep>,
    ) -> Result<(), Error> {
        let entry = self.worker_context.table.get(name)?;
        if entry.failed.is_some() && self.forget_unavailable(name)?.is_some() {
            done.push(AppliedStep::Forgotten(Box::new(entry)));
            return Ok(());
        }
        self.remove_disk(name, false)?;
        done.push(AppliedStep::Removed(entry.spec, entry.source));
        Ok(())
    }

    /// Undoes executed steps, the last first. Returns the steps that could not be undone.
    fn undo(self: &Arc<Self>, done: Vec<AppliedStep>) -> Vec<String> {
        let mut left = Vec::new();
        for done in done.into_iter().rev() {
            let undone = match done {
                AppliedStep::Added(name) => self.remove_disk(&name, true),
                AppliedStep::Ana(name, groups) => self.set_ana(&name, &groups),
                AppliedStep::Settings(name, before) => self.restore(&name, *before),
                AppliedStep::Removed(spec, source) => self.add_disk(spec, source).map(drop),
                AppliedStep::Forgotten(entry) => {
                    let name = entry.spec.name();
                    self.worker_context.table.remember(*entry);
                    self.retry_in_background(&name);
                    self.keep_state();
                    Ok(())
                }
                AppliedStep::Attached(name, nsid) => self.detach_namespace(&name, nsid),
                AppliedStep::Detached(name, spec) => self.attach_namespace(&name, spec).map(drop),
            };
            left.extend(undone.err().map(|error| error.message));
        }
        left
    }
}

/// Returns a disk as a changed configuration wants it: what the configuration did not change stays
/// as it is by now. `before` is the disk in the configuration that was read before, `now` the
/// served one, and `then` the one in the new configuration.
fn merged(before: &DiskSpec, now: &DiskSpec, then: DiskSpec) -> DiskSpec {
    if *before == then {
        return now.clone();
    }
    let (DiskSpec::Controller(before), DiskSpec::Controller(now), DiskSpec::Controller(mut then)) =
        (before, now, then.clone())
    else {
        return then;
    };
    let wanted = std::mem::take(&mut then.namespaces);
    let find = |namespaces: &[NamespaceSpec], nsid| {
        let mut namespaces = namespaces.iter();
        namespaces.find(|ns| ns.nsid == nsid).cloned()
    };
    for namespace in &wanted {
        let nsid = namespace.nsid;
        let (before, now) = (find(&before.namespaces, nsid), find(&now.namespaces, nsid));
        then.namespaces.extend(match (before, now) {
            // The namespace was detached, or replaced, by request.
            (Some(before), now) if before == *namespace => now,
            // The configuration keeps the state that was set by request.
            (Some(before), Some(now)) if before.ana_state == namespace.ana_state => {
                let ana_state = now.ana_state;
                Some(NamespaceSpec {
                    ana_state,
                    ..namespace.clone()
                })
            }
            _ => Some(namespace.clone()),
        });
    }
    for namespace in &now.namespaces {
        let is_wanted = find(&wanted, namespace.nsid).is_some();
        let is_configured = find(&before.namespaces, namespace.nsid)
            .is_some_and(|before| without_state(&before) == without_state(namespace));
        // The rest was attached by request.
        if !is_wanted && !is_configured {
            then.namespaces.push(namespace.clone());
        }
    }
    DiskSpec::Controller(then)
}

fn without_state(namespace: &NamespaceSpec) -> NamespaceSpec {
    NamespaceSpec {
        ana_state: None,
        ..namespace.clone()
    }
}

/// Returns the disk without the ANA states of its namespaces.
fn without_ana(spec: &ControllerSpec) -> ControllerSpec {
    let mut same = spec.clone();
    let namespaces = same.namespaces.iter_mut();
    namespaces.for_each(|namespace| namespace.ana_state = None);
    same
}

fn differing(now: &DiskSpec, then: &DiskSpec) -> String {
    differing_keys(&now.to_table(), &then.to_table())
}

/// Returns the names of the keys with different values in two tables.
fn differing_keys(now: &toml::Table, then: &toml::Table) -> String {
    let mut keys: Vec<&String> = now.keys().chain(then.keys()).collect();
    keys.sort();
    keys.dedup();
    keys.retain(|key| now.get(*key) != then.get(*key));
    let keys: Vec<&str> = keys.into_iter().map(String::as_str).collect();
    keys.join(", ")
}
