//! Controllers that hosts reach over a network ("NVMe Base 2.1", NVMe over Fabrics): their
//! additional Identify data, and the ANA state of their namespaces.
//!
//! The embedding program implements the transport. It creates the controller's queues in its own
//! memory, forwards commands from capsules, and sends posted completions. It also refuses commands
//! that network hosts must not send (creation of queues by Admin commands, doorbell writes).

use crate::ana;
use crate::control::Controller;
use nvme::aen::{AsyncEvent, Notice};
use nvme::cmd::admin::GetLogPage;
use nvme::feature::AsyncEventConfig;
use nvme::identify::{IdentifyController, IdentifyNamespace, IndependentNamespace, Nmic};
use nvme::log::{AnaState, Lid};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// ANA group that contains all namespaces of a controller that hosts reach over a network.
const GROUP: u32 = ana::FIRST_GROUP;

/// ANA state of a network port, shared by all controllers that hosts reach through the port.
#[derive(Debug)]
pub struct AnaGroup {
    state: AtomicU8,
    changes: AtomicU64,
}

impl AnaGroup {
    /// Creates the ANA state of a port.
    pub fn new(state: AnaState) -> Self {
        Self {
            state: AtomicU8::new(state.0),
            changes: AtomicU64::new(1),
        }
    }

    /// Returns the ANA state that the port reports to hosts.
    #[inline]
    pub fn state(&self) -> AnaState {
        AnaState(self.state.load(Ordering::Relaxed))
    }

    /// Sets the ANA state. When it returns `true`, the state has changed and the caller has to call
    /// [`Controller::ana_changed`] of each controller.
    pub fn set(&self, state: AnaState) -> bool {
        let changed = self.state.swap(state.0, Ordering::Relaxed) != state.0;
        if changed {
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
        changed
    }

    /// Returns how many times the ANA state of the port has changed, plus one.
    fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }
}

/// Properties that a controller reports to hosts that reach it over a network.
#[derive(Clone, Debug)]
pub struct FabricsConfig {
    /// Maximum number of in-capsule data bytes of an I/O queue, a multiple of 16 (IOCCSZ).
    pub in_capsule: u32,
    /// Maximum number of queue entries that is reported to hosts. The controller's own limit may be
    /// larger.
    pub queue_entries: u16,
    /// ANA state of the port, which applies to all namespaces.
    pub ana: Arc<AnaGroup>,
}

impl FabricsConfig {
    /// Sets the fields of Identify Controller that only a controller for network hosts reports.
    pub(crate) fn describe(&self, page: &mut IdentifyController) {
        // A controller reached over a network has no PCI vendor ID.
        page.vid = 0.into();
        page.ssvid = 0.into();
        page.maxcmd = self.queue_entries.into();
        ana::describe(page, GROUP);
        page.sgls = page.sgls.with_ofs(true).with_tsdbd(true);
        // IOCCSZ is in units of 16 bytes: a submission queue entry, and the in-capsule data.
        page.ioccsz = (64 / 16 + self.in_capsule / 16).into();
        page.iorcsz = 1.into();
        page.msdbd = 1;
    }

    /// Sets the fields of Identify Namespace for hosts that reach the namespace over a network.
    pub(crate) fn describe_namespace(page: &mut IdentifyNamespace) {
        page.nmic = Nmic::new().with_shrns(true);
        page.anagrpid = GROUP.into();
    }

    /// Sets the fields of the I/O Command Set Independent Identify Namespace structure for hosts
    /// that reach the namespace over a network.
    pub(crate) fn describe_independent(page: &mut IndependentNamespace) {
        page.nmic = Nmic::new().with_shrns(true);
        page.anagrpid = GROUP.into();
    }
}

impl Controller {
    /// Notifies the host, if enabled, that the ANA state of the namespaces has changed ("NVMe
    /// Base 2.1", 5.1.2.1, Asymmetric Namespace Access Change).
    pub fn ana_changed(&mut self) {
        let wanted = AsyncEventConfig::from_bits(self.admin.features.event_config).anacn();
        if wanted && (self.config.fabrics.is_some() || self.is_shared()) {
            self.notify(AsyncEvent::notice(Notice::ANA_CHANGE, Lid::ANA));
        }
    }

    /// Returns the ANA log page; `None` when the controller neither serves hosts over a network nor
    /// belongs to a subsystem.
    pub(crate) fn ana_log(&self, get: &GetLogPage) -> Option<Vec<u8>> {
        let groups_only = get.lsp & ana::RGO != 0;
        let Some(fabrics) = &self.config.fabrics else {
            return self.shared_ana_log(groups_only);
        };
        let mut nsids: Vec<u32> = self.active().map(|ns| ns.config.nsid).collect();
        nsids.sort_unstable();
        if groups_only {
            nsids.clear();
        }
        let changes = fabrics.ana.changes();
        let group = ana::AnaGroupEntry {
            group: GROUP,
            state: fabrics.ana.state(),
            changes,
            nsids,
        };
        Some(ana::log_page(changes, &[group]))
    }
}
