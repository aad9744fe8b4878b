//! The control half's state as data.

use super::state::{
    AdminCommands, AdminQueue, ControlState, Counters, CqPlace, HeldCommand, Identity, LogState,
    NamespaceIdentity, STATE_VERSION, SqPlace,
};
use crate::control::{BootImage, Controller};
use crate::engine::{SavedCq, SavedSq};

impl Controller {
    /// Returns the state of the control half, and the locations of the data half's queues.
    pub(crate) fn control_state(&self) -> ControlState {
        ControlState {
            version: STATE_VERSION,
            identity: self.identity(),
            registers: self.save_registers(),
            pci: self.pci.save(),
            interrupts: self.engine.irqs.save(),
            features: self.admin.features.save(self.keep_alive()),
            admin_queue: self.admin_queue(),
            cqs: self.queues.cqs().map(cq_place).collect(),
            sqs: self.queues.sqs().map(sq_place).collect(),
            shadow: self.engine.queues.shadow_buffers(),
            commands: self.admin_commands(),
            logs: self.log_state(),
            sharing: self.save_sharing(),
        }
    }

    pub(super) fn identity(&self) -> Identity {
        let config = &self.config;
        let pci = config.pci;
        Identity {
            model: config.model.clone(),
            serial: config.serial.clone(),
            subnqn: config.subnqn.clone(),
            pci: (
                pci.vendor,
                pci.device,
                pci.subsystem_vendor,
                pci.subsystem,
                pci.revision,
            ),
            cntlid: config.cntlid,
            io_queues: config.io_queues,
            queue_entries: config.queue_entries,
            mdts: config.mdts,
            mapped_doorbells: config.mapped_doorbells,
            shadow_doorbells: config.shadow_doorbells,
            max_namespaces: config.max_namespaces,
            namespaces: self.namespace_identities(),
            cmb_size: config.cmb_size,
            boot_size: config.boot.as_ref().map(BootImage::size),
        }
    }

    fn namespace_identities(&self) -> Vec<NamespaceIdentity> {
        let identity = |ns: &crate::engine::Namespace| NamespaceIdentity {
            nsid: ns.config.nsid,
            block_size: ns.config.block_size,
            blocks: ns.blocks,
            nguid: ns.config.nguid,
            eui64: ns.config.eui64,
            uuid: ns.config.uuid,
            format: Some(ns.config.format().into()),
        };
        self.active().map(identity).collect()
    }

    fn admin_queue(&self) -> Option<AdminQueue> {
        let mut admin = self.engine.admin_queue()?;
        admin.posting.extend(&self.endings);
        Some(admin)
    }

    fn admin_commands(&self) -> AdminCommands {
        let (parked, pending, masked) = self.admin.events.save();
        AdminCommands {
            parked,
            pending,
            masked,
            aborts: self.admin.aborts.save(),
            deletions: self.admin.deletions.clone(),
            cache_flushes: self.admin.cache_flushes.clone(),
            configuring: self.migration.configuring().collect(),
            held: self.admission.held().map(HeldCommand::new).collect(),
            management: self.admin.management.save(),
        }
    }

    fn log_state(&self) -> LogState {
        let stats = &self.engine.stats;
        let (errors, changed, powered_on) = self.admin.logs.save();
        LogState {
            errors,
            changed,
            powered_on,
            telemetry: Some(self.admin.telemetry.save()),
            self_test: Some(self.admin.self_test.save()),
            erasure: Some(self.admin.erasure.save()),
            persistent_events: Some(self.admin.persistent_events.save()),
            lba_status: Some(self.admin.lba_status.save(self.marks.table.saved())),
            notifications: Some(self.admin.notifications.save()),
            counters: Counters {
                media_errors: stats.media_errors.get(),
                error_log_entries: stats.error_log_entries.get(),
                power_cycles: stats.power_cycles.get(),
                unsafe_shutdowns: stats.unsafe_shutdowns.get(),
                reads: stats.host_reads(),
                writes: stats.host_writes(),
                bytes_read: stats.bytes_read(),
                bytes_written: stats.bytes_written(),
                busy_ns: stats.busy_ns(),
            },
        }
    }
}

fn cq_place(cq: &SavedCq) -> CqPlace {
    CqPlace {
        qid: cq.qid,
        iova: cq.iova,
        size: cq.size,
        vector: cq.vector,
    }
}

fn sq_place(sq: &SavedSq) -> SqPlace {
    SqPlace {
        qid: sq.qid,
        cqid: sq.cqid,
        iova: sq.iova,
        size: sq.size,
    }
}
