//! Asymmetric namespace access (ANA) of a subsystem's disks: reads and changes the state of each
//! group.

use super::Manager;
use super::table::{DiskRecord, Next};
use config::disk::DiskSpec;
use config::spec::ControllerSpec;
use control::Error;
use control::api::{self, AnaChange, AnaStatus, EventKind};
use std::collections::BTreeMap;
use std::time::Duration;

/// Maximum time for the commands outstanding before a change of ANA states to complete.
const IN_FLIGHT: Duration = Duration::from_secs(10);

impl Manager {
    /// Changes ANA states, and returns the states of the selected groups.
    ///
    /// # Errors
    /// See [`control::Daemon::ana`].
    pub fn ana(&self, change: &AnaChange) -> Result<Vec<AnaStatus>, Error> {
        change.check().map_err(Error::invalid)?;
        let Some(name) = &change.disk else {
            let table = self.worker_context.table.served();
            let disks = table.iter().flat_map(|(name, entry)| states(name, entry));
            return Ok(disks.collect());
        };
        let mut meant = states(name, &self.worker_context.table.get(name)?);
        if meant.is_empty() {
            return Err(Error::conflict(format!(
                "\"{name}\" is in no subsystem: only disks that share their namespaces with others \
                 are paths (subsystem and cntlid in the configuration)"
            )));
        }
        if let Some(group) = change.group {
            let there: Vec<String> = meant.iter().map(|one| one.group.to_string()).collect();
            meant.retain(|one| one.group == group);
            if meant.is_empty() {
                return Err(Error::not_found(format!(
                    "\"{name}\" has no namespace in the ANA group {group}: its groups are {}",
                    there.join(", ")
                )));
            }
        }
        let Some(state) = change.state else {
            return Ok(meant);
        };
        let groups = meant.iter().map(|one| (one.group, state)).collect();
        self.set_ana(name, &groups)?;
        meant.iter_mut().for_each(|one| one.state = state);
        Ok(meant)
    }

    /// Sets the ANA states of a disk's groups, and waits for outstanding commands.
    pub(super) fn set_ana(
        &self,
        name: &str,
        groups: &BTreeMap<u32, api::AnaState>,
    ) -> Result<(), Error> {
        let mut taken = self.worker_context.table.take(name, "being changed")?;
        let DiskSpec::Controller(spec) = &mut taken.spec else {
            return Err(Error::conflict(format!(
                "\"{name}\" is no controller, and only controllers have ANA states"
            )));
        };
        let subsystem = self
            .worker_context
            .opener
            .subsystems
            .of(spec, self.keeper());
        let (Some(subsystem), Some(cntlid)) = (subsystem, spec.cntlid) else {
            return Err(Error::conflict(format!("\"{name}\" is in no subsystem")));
        };
        for namespace in &mut spec.namespaces {
            if let Some(state) = groups.get(&namespace.ana_group()) {
                // The default state is written as no state at all.
                let is_usual = *state == api::AnaState::default();
                namespace.ana_state = (!is_usual).then(|| (*state).into());
            }
        }
        let next = Next::As(Box::new(taken.spec.clone()));
        let intent = self.intend(name, next)?;
        taken.changed();
        intent.done();
        let said: Vec<String> = groups
            .iter()
            .map(|(group, state)| format!("ANA group {group} is {}", state.name()))
            .collect();
        let said = said.join(", ");
        tracing::info!(disk = name, "{said}");
        let changes: Vec<_> = groups
            .iter()
            .map(|(group, state)| {
                let state = config::ana::AnaState::from(*state);
                subsystem.set_ana_state(cntlid, *group, state.into())
            })
            .collect();
        let events = &self.worker_context.registry.events;
        events.send(EventKind::Changed, name, None, Some(said));
        self.keep_state();
        // Another change need not wait for commands that do not end.
        drop(taken);
        if !changes.iter().all(|change| change.wait(IN_FLIGHT)) {
            return Err(Error::failed(format!(
                "the state has changed, and its host is told; but commands that came before have \
                 not ended for {} s: what they write may still come",
                IN_FLIGHT.as_secs()
            )));
        }
        Ok(())
    }
}

/// The groups of a disk by their numbers, with their states; none of one that shares nothing.
pub(super) fn groups(spec: &ControllerSpec) -> BTreeMap<u32, api::AnaState> {
    let namespaces = spec.namespaces.iter();
    let groups = namespaces.map(|namespace| {
        let state = namespace.ana_state.unwrap_or_default();
        (namespace.ana_group(), state.into())
    });
    match spec.subsystem {
        Some(_) => groups.collect(),
        None => BTreeMap::new(),
    }
}

/// Returns the ANA states of a disk.
fn states(name: &str, entry: &DiskRecord) -> Vec<AnaStatus> {
    let DiskSpec::Controller(spec) = &entry.spec else {
        return Vec::new();
    };
    let groups = groups(spec).into_iter();
    let told = groups.map(|(group, state)| {
        let of = |(namespace, place): (&config::spec::NamespaceSpec, u32)| {
            let nsid = namespace.nsid.unwrap_or(place);
            (namespace.ana_group() == group).then_some(nsid)
        };
        AnaStatus {
            disk: name.to_owned(),
            subsystem: spec.subsystem.clone().unwrap_or_default(),
            cntlid: spec.cntlid.unwrap_or_default(),
            group,
            state,
            nsids: spec.namespaces.iter().zip(1..).filter_map(of).collect(),
        }
    });
    told.collect()
}
