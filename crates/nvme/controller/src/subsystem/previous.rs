//! State of shared namespaces that the controllers of the previous process have left. One of them
//! may be served long before the others, and must find the namespaces as all of them have left
//! them.

use super::{Erasing, Subsystem};
use crate::marks::Marks;
use crate::survival::state::ControlState;
use nvme::Status;
use state_memory::StateMemory;
use std::collections::BTreeMap;
use std::sync::Mutex;
use sync::Unpoisoned;

/// State that controllers have left of a namespace.
#[derive(Debug, Default)]
pub(super) struct LeftNamespace {
    /// Newest marks that any of the controllers has committed.
    pub marks: Marks,
    /// Erasure that one of the controllers continues.
    pub erasing: Erasing,
}

/// State of all namespaces that is left, by NSID.
#[derive(Debug, Default)]
pub(super) struct LeftNamespaces(Mutex<BTreeMap<u32, LeftNamespace>>);

impl LeftNamespaces {
    /// Takes the state of a namespace that is being added.
    pub fn take(&self, nsid: u32) -> LeftNamespace {
        self.0.lock().unpoisoned().remove(&nsid).unwrap_or_default()
    }
}

impl Subsystem {
    /// Takes notice of the state that a controller of the subsystem has left in the previous
    /// process. Called for each of them before the namespaces are added. Marks of blocks and the
    /// persistent event log are the newest ones of any controller: each change is committed by the
    /// controller that made it, before its command completes. A namespace that a controller was
    /// erasing stays closed until that controller is served.
    pub fn expect(&self, state: &StateMemory) {
        let Ok(saved) = ControlState::read(state) else {
            return;
        };
        if let Some(events) = &saved.logs.persistent_events {
            self.events.restore(events, saved.identity.cntlid);
        }
        let mut left = self.left.0.lock().unpoisoned();
        if let Some(lba_status) = &saved.logs.lba_status {
            for &(nsid, changes) in &lba_status.changes {
                let of = lba_status.marks.iter().find(|marked| marked.0 == nsid);
                let ranges = of.map_or(&[][..], |marked| &marked.1);
                let namespace = left.entry(nsid).or_default();
                if changes > namespace.marks.changes() {
                    namespace.marks = Marks::restore(changes, ranges);
                }
            }
        }
        let erasure = saved.logs.erasure.as_ref();
        if let Some(running) = erasure.and_then(|erasure| erasure.running.as_ref()) {
            for nsid in &running.nsids {
                let erasing = Erasing::left(saved.identity.cntlid, Status::FORMAT_IN_PROGRESS);
                left.entry(*nsid).or_default().erasing = erasing;
            }
        }
    }
}
