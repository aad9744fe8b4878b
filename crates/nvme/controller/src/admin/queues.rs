//! Create and Delete I/O Completion and Submission Queue ("NVMe over PCIe Transport 1.1", 3.3), and
//! Doorbell Buffer Config ("NVMe Base 2.1", 5.2.5).

use super::{AdminOutcome, AdminResult, INVALID_FIELD};
use crate::control::Controller;
use nvme::cmd::admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11, DeleteQueueCdw10};
use nvme::{Command, Completion, Status};

const INVALID_QID: Status = Status::INVALID_QUEUE_IDENTIFIER.with_dnr(true);
const INVALID_SIZE: Status = Status::INVALID_QUEUE_SIZE.with_dnr(true);

impl Controller {
    /// Checks the fields that both kinds of queues have; `entry` is the size of an entry in bytes.
    fn check_queue(
        &self,
        command: &Command,
        exists: bool,
        contiguous: bool,
        entry: u64,
    ) -> Result<(u16, u32), Status> {
        let cdw10 = CreateQueueCdw10::from_bits(command.cdw10.get());
        let qid = cdw10.qid();
        // Without a request for a number of queues, all are available: SeaBIOS creates queues
        // without such a request.
        if qid == 0 || qid > self.config.io_queues || exists {
            return Err(INVALID_QID);
        }
        let size = cdw10.qsize();
        if size < 2 || size > self.config.queue_entries {
            return Err(INVALID_SIZE);
        }
        // CAP.CQR: queues are physically contiguous and aligned to a page.
        if !contiguous {
            return Err(INVALID_FIELD);
        }
        if !command
            .prp1()
            .is_multiple_of(self.engine.settings.page_size)
        {
            return Err(Status::PRP_OFFSET_INVALID.with_dnr(true));
        }
        // CMBLOC.CQMMS is 0: a queue is either in the controller memory buffer or outside.
        if self
            .engine
            .dma
            .is_mixed(command.prp1(), u64::from(size) * entry)
        {
            return Err(Status::INVALID_USE_OF_CMB.with_dnr(true));
        }
        Ok((qid, size))
    }

    pub(super) fn create_io_cq(&mut self, command: &Command) -> AdminResult {
        let cdw11 = CreateCqCdw11::from_bits(command.cdw11.get());
        let qid = CreateQueueCdw10::from_bits(command.cdw10.get()).qid();
        let exists = self.cq_exists(qid);
        let (qid, size) = self.check_queue(command, exists, cdw11.pc(), 16)?;
        if self.cc.iocqes() != Completion::SIZE_LOG2 {
            return Err(INVALID_SIZE);
        }
        if cdw11.ien() && cdw11.iv() >= self.engine.irqs.vectors() {
            return Err(Status::INVALID_INTERRUPT_VECTOR.with_dnr(true));
        }
        let vector = cdw11.ien().then_some(cdw11.iv());
        if !self.create_cq(qid, command.prp1(), size, vector) {
            return Err(Status::DATA_TRANSFER_ERROR);
        }
        tracing::debug!(qid, size, ?vector, "completion queue created");
        Ok(AdminOutcome::Done(0))
    }

    pub(super) fn create_io_sq(&mut self, command: &Command) -> AdminResult {
        let cdw11 = CreateSqCdw11::from_bits(command.cdw11.get());
        let qid = CreateQueueCdw10::from_bits(command.cdw10.get()).qid();
        let exists = self.sq_exists(qid);
        let (qid, size) = self.check_queue(command, exists, cdw11.pc(), 64)?;
        let cqid = cdw11.cqid();
        if cqid == 0 || cqid > self.config.io_queues {
            return Err(INVALID_QID);
        }
        if !self.cq_exists(cqid) {
            return Err(Status::COMPLETION_QUEUE_INVALID.with_dnr(true));
        }
        if self.cc.iosqes() != Command::SIZE_LOG2 {
            return Err(INVALID_SIZE);
        }
        if !self.create_sq(qid, cqid, command.prp1(), size) {
            return Err(Status::DATA_TRANSFER_ERROR);
        }
        tracing::debug!(qid, cqid, size, "submission queue created");
        Ok(AdminOutcome::Done(0))
    }

    pub(super) fn delete_io_cq(&mut self, command: &Command) -> AdminResult {
        let qid = DeleteQueueCdw10::from_bits(command.cdw10.get()).qid();
        if qid == 0 || !self.cq_exists(qid) {
            return Err(INVALID_QID);
        }
        if self.cq_in_use(qid) {
            return Err(Status::INVALID_QUEUE_DELETION.with_dnr(true));
        }
        self.delete_cq(qid);
        Ok(AdminOutcome::Done(0))
    }

    pub(super) fn delete_io_sq(&mut self, command: &Command) -> AdminResult {
        let qid = DeleteQueueCdw10::from_bits(command.cdw10.get()).qid();
        let deleting = self.admin.deletions.iter().any(|&(q, _)| q == qid);
        if qid == 0 || deleting || !self.sq_exists(qid) {
            return Err(INVALID_QID);
        }
        self.admin.deletions.push((qid, command.cid.get()));
        self.delete_sq(qid);
        Ok(AdminOutcome::Later)
    }

    /// Completes the deletion of a submission queue, which has no outstanding command any more.
    pub(crate) fn sq_deleted(&mut self, qid: u16) {
        self.queues.remove_sq(qid);
        if let Some(at) = self.admin.deletions.iter().position(|&(q, _)| q == qid) {
            let (_, cid) = self.admin.deletions.swap_remove(at);
            self.finish_admin(cid, Status::SUCCESS, 0);
        }
    }

    pub(super) fn doorbell_buffer_config(&mut self, command: &Command) -> AdminResult {
        let (shadow, eventidx) = (command.prp1(), command.prp2());
        let page = self.engine.settings.page_size;
        if shadow % page != 0 || eventidx % page != 0 {
            return Err(INVALID_FIELD);
        }
        let done = self.configure_shadow(command.cid.get(), shadow, eventidx);
        let done = done.ok_or(INVALID_FIELD)?;
        tracing::debug!(shadow, eventidx, "shadow doorbells configured");
        Ok(if done {
            AdminOutcome::Done(0)
        } else {
            AdminOutcome::Later
        })
    }
}
