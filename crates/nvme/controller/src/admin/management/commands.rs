//! Parsing and validation of Namespace Management and Namespace Attachment commands.

use super::{CONTROLLERS, DENIED, INVALID_NAMESPACE, ManagementOperation, Stage, Task};
use crate::admin::{AdminOutcome, AdminResult, INVALID_FIELD};
use crate::control::Controller;
use crate::formats::sizes_from;
use crate::pool::{NamespacePool, PooledNamespace};
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::admin::Csi;
use nvme::cmd::namespace::{
    AttachmentCdw10, AttachmentSelect, ManagementCdw10, ManagementCdw11, ManagementSelect,
    NewNamespace,
};
use nvme::identify::{ControllerList, Dps, Nmic};
use nvme::{Command, Status};
use zerocopy::{FromZeros, IntoBytes};

impl Controller {
    /// Starts Namespace Management or Namespace Attachment. These commands are executed one at a
    /// time.
    pub(in crate::admin) fn manage(&mut self, command: &Command) -> AdminResult {
        if let Some(status) = self.admin.erasure.hinders() {
            return Err(status);
        }
        let Some(pool) = self.config.pool.clone() else {
            return Err(Status::INVALID_OPCODE.with_dnr(true));
        };
        if self.admin.management.is_running() {
            self.admin.management.waiting.push_back(*command);
            self.touch();
            return Ok(AdminOutcome::Later);
        }
        let task = match command.admin_opcode() {
            nvme::AdminOpcode::NAMESPACE_MANAGEMENT => {
                match ManagementCdw10::from_bits(command.cdw10.get()).sel() {
                    ManagementSelect::CREATE => self.create_task(command, &*pool)?,
                    ManagementSelect::DELETE => self.delete_task(command, &*pool)?,
                    _ => return Err(INVALID_FIELD),
                }
            }
            _ => self.attachment_task(command, &*pool)?,
        };
        let nsid = match task {
            Task::Create { nsid, .. } => nsid,
            _ => command.nsid.get(),
        };
        if let Some(left_out) = self.engine.settings.log.allow("manages namespaces") {
            tracing::info!(nsid, ?task, left_out, "the host manages namespaces");
        }
        self.admin.management.running = Some(ManagementOperation {
            cid: Some(command.cid.get()),
            nsid,
            task,
            stage: Stage::Begin,
            failed: None,
            before: None,
        });
        self.admin.rearm();
        self.touch();
        Ok(AdminOutcome::Later)
    }

    fn create_task(&mut self, command: &Command, pool: &dyn NamespacePool) -> Result<Task, Status> {
        if command.nsid.get() != 0 {
            return Err(INVALID_FIELD);
        }
        if ManagementCdw11::from_bits(command.cdw11.get()).csi() != Csi::NVM {
            return Err(Status::IO_COMMAND_SET_NOT_SUPPORTED.with_dnr(true));
        }
        let mut new = NewNamespace::new_zeroed();
        self.read_host(command, new.as_mut_bytes())?;
        // The pool's namespaces have no metadata, and so no protection information.
        let sizes = sizes_from(pool.block_size());
        let block_size = sizes.get(usize::from(new.flbas.into_bits())).copied();
        let block_size = block_size.filter(|_| new.dps == Dps::new());
        let block_size = block_size.ok_or(Status::INVALID_FORMAT.with_dnr(true))?;
        let shared = new.nmic.shrns();
        if !new.reserved_is_zero() || new.nmic != Nmic::new().with_shrns(shared) {
            return Err(INVALID_FIELD);
        }
        if new.anagrpid.get() != 0 {
            return Err(Status::ANA_GROUP_IDENTIFIER_INVALID.with_dnr(true));
        }
        let sets = [new.nvmsetid, new.endgid, new.nphndls];
        if sets.iter().any(|id| id.get() != 0) || new.lbstm.get() != 0 {
            return Err(INVALID_FIELD);
        }
        let blocks = new.nsze.get();
        if blocks == 0 || new.ncap.get() > blocks {
            return Err(INVALID_FIELD);
        }
        if new.ncap.get() != blocks {
            return Err(Status::THIN_PROVISIONING_NOT_SUPPORTED.with_dnr(true));
        }
        let bytes = u128::from(blocks) * u128::from(block_size);
        if bytes > u128::from(pool.capacity().saturating_sub(pool.used())) {
            self.admin.logs.information = u64::try_from(bytes).unwrap_or(u64::MAX);
            return Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY.with_dnr(true));
        }
        let taken = pool.namespaces();
        let is_free = |nsid: &u32| {
            !self.has_or_awaits(*nsid) && taken.iter().all(|other| other.nsid != *nsid)
        };
        let nsid = (1..=self.config.max_namespaces).find(is_free);
        let nsid = nsid.ok_or(Status::NAMESPACE_IDENTIFIER_UNAVAILABLE.with_dnr(true))?;
        Ok(Task::Create {
            nsid,
            blocks,
            block_size,
            nguid: pool.new_nguid().ok_or(Status::INTERNAL_ERROR)?,
            shared,
        })
    }

    fn delete_task(&self, command: &Command, pool: &dyn NamespacePool) -> Result<Task, Status> {
        let nsid = command.nsid.get();
        if nsid != NSID_BROADCAST {
            let found = self.pooled_or_denied(nsid, pool)?;
            return Ok(Task::Delete([found.nguid].into()));
        }
        let pooled = pool.namespaces();
        let is_pooled = |nsid: u32| pooled.iter().any(|ns| ns.nsid == nsid);
        // The command applies to all namespaces or to none.
        if !self.active().all(|ns| is_pooled(ns.config.nsid)) {
            return Err(DENIED);
        }
        Ok(Task::Delete(pooled.iter().map(|ns| ns.nguid).collect()))
    }

    fn attachment_task(&self, command: &Command, pool: &dyn NamespacePool) -> Result<Task, Status> {
        let attaches = match AttachmentCdw10::from_bits(command.cdw10.get()).sel() {
            AttachmentSelect::ATTACH => true,
            AttachmentSelect::DETACH => false,
            _ => return Err(INVALID_FIELD),
        };
        let nsid = command.nsid.get();
        let found = match self.pooled_or_denied(nsid, pool) {
            Err(status) if status == DENIED && attaches => {
                return Err(Status::NAMESPACE_ALREADY_ATTACHED.with_dnr(true));
            }
            found => found?,
        };
        let mut list = ControllerList::new_zeroed();
        self.read_host(command, list.as_mut_bytes())?;
        // The controller is the only one of its subsystem.
        if list.numid.get() != 1 || list.iter().next() != Some(self.config.cntlid) {
            return Err(CONTROLLERS);
        }
        let is_attached = found.attached.contains(&self.config.cntlid);
        match (attaches, is_attached) {
            (true, false) => Ok(Task::Attach(found.nguid)),
            (false, true) => Ok(Task::Detach(found.nguid)),
            (true, true) => Err(Status::NAMESPACE_ALREADY_ATTACHED.with_dnr(true)),
            (false, false) => Err(Status::NAMESPACE_NOT_ATTACHED.with_dnr(true)),
        }
    }

    /// Returns the pool's namespace with this ID. Operation Denied when the namespace belongs to
    /// the configuration, which the host may not change.
    fn pooled_or_denied(
        &self,
        nsid: u32,
        pool: &dyn NamespacePool,
    ) -> Result<PooledNamespace, Status> {
        if nsid == NSID_BROADCAST {
            return Err(INVALID_FIELD);
        }
        if nsid == 0 || nsid > self.config.max_namespaces {
            return Err(INVALID_NAMESPACE);
        }
        let found = pool.namespaces().into_iter().find(|ns| ns.nsid == nsid);
        match found {
            Some(found) => Ok(found),
            None if self.has_or_awaits(nsid) => Err(DENIED),
            None => Err(INVALID_FIELD),
        }
    }
}
