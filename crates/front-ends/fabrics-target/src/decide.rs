//! Checks of a host's commands before its controller executes them, and the commands by which this
//! side creates and deletes the controller's queues.

use crate::queue::{CommandDecision, Queue};
use crate::rings::Rings;
use controller::{Controller, KeepAlive};
use nvme::cmd::admin::{
    AbortCdw10, AbortResult, CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11, DeleteQueueCdw10,
    GetFeaturesCdw10, SetFeaturesCdw10,
};
use nvme::cmd::io::RwCdw12;
use nvme::fabrics::{self, Fctype, Property, status};
use nvme::feature::Fid;
use nvme::log::AnaState;
use nvme::regs::{self, Cap, Cc};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::time::{Duration, Instant};

/// Properties of the controller, and other state that commands on the Admin queue access.
pub(crate) struct Register<'a> {
    pub cc: &'a mut Cc,
    pub keep_alive: &'a mut KeepAlive,
    pub now: Instant,
    pub io: &'a [Queue],
    /// Whether the host has written the property CC.
    pub written: bool,
    pub entries: u16,
}

impl Register<'_> {
    /// Decides whether the controller or this crate executes a command on the Admin queue.
    pub(crate) fn decide(
        &mut self,
        command: &Command,
        controller: &mut Controller,
        resetting: bool,
    ) -> CommandDecision {
        let refused = |status: Status| CommandDecision::Answer(status.with_dnr(true), 0);
        match fabrics::fctype(command) {
            Some(Fctype::PROPERTY_GET) => return self.property_get(command, controller),
            Some(Fctype::PROPERTY_SET) => return self.property_set(command),
            // The queue is already connected.
            Some(Fctype::CONNECT) => return refused(Status::COMMAND_SEQUENCE_ERROR),
            Some(Fctype::DISCONNECT) => return refused(status::INVALID_QUEUE_TYPE),
            Some(_) => return refused(Status::INVALID_FIELD),
            None => {}
        }
        // Commands after a change of CC are answered without waiting for its effect.
        if self.written || !controller.is_ready() || resetting {
            return refused(Status::COMMAND_SEQUENCE_ERROR);
        }
        match command.admin_opcode() {
            AdminOpcode::CREATE_IO_SQ
            | AdminOpcode::CREATE_IO_CQ
            | AdminOpcode::DELETE_IO_SQ
            | AdminOpcode::DELETE_IO_CQ
            | AdminOpcode::DOORBELL_BUFFER_CONFIG => refused(Status::INVALID_OPCODE),
            AdminOpcode::KEEP_ALIVE => {
                self.keep_alive.restart(self.now);
                CommandDecision::Answer(Status::SUCCESS, 0)
            }
            AdminOpcode::SET_FEATURES => {
                let cdw10 = SetFeaturesCdw10::from_bits(command.cdw10.get());
                match cdw10.fid() {
                    Fid::KEEP_ALIVE_TIMER => {
                        let timeout = Duration::from_millis(command.cdw11.get().into());
                        self.keep_alive.set(timeout, self.now);
                        CommandDecision::Answer(Status::SUCCESS, 0)
                    }
                    // Connect carries the Host Identifier ("NVMe Base 2.1", 5.1.25.1.28).
                    Fid::HOST_IDENTIFIER => refused(Status::COMMAND_SEQUENCE_ERROR),
                    _ => CommandDecision::Pass,
                }
            }
            AdminOpcode::GET_FEATURES => {
                let cdw10 = GetFeaturesCdw10::from_bits(command.cdw10.get());
                let current = cdw10.sel() == nvme::cmd::admin::FeatureSelect::CURRENT;
                match cdw10.fid() {
                    Fid::KEEP_ALIVE_TIMER if current => {
                        let kato = u64::try_from(self.keep_alive.timeout().as_millis())
                            .unwrap_or(u64::MAX);
                        CommandDecision::Answer(Status::SUCCESS, kato)
                    }
                    _ => CommandDecision::Pass,
                }
            }
            AdminOpcode::ABORT => self.abort(command),
            _ => CommandDecision::Pass,
        }
    }

    /// Decides how to handle Abort. Its command identifier is converted from the host's to the
    /// controller's.
    fn abort(&self, command: &Command) -> CommandDecision {
        let cdw10 = AbortCdw10::from_bits(command.cdw10.get());
        let queue = self.io.iter().find(|queue| queue.qid == cdw10.sqid());
        let place = queue.and_then(|queue| queue.slots.named(cdw10.cid()));
        match place {
            Some(place) => {
                let mut command = *command;
                command.cdw10 = cdw10.with_cid(place).into_bits().into();
                CommandDecision::PassAs(command)
            }
            // The command has been answered, or has not arrived yet.
            None => {
                let result = AbortResult::new().with_ianp(true);
                CommandDecision::Answer(Status::SUCCESS, result.into_bits().into())
            }
        }
    }

    fn property_get(&self, command: &Command, controller: &mut Controller) -> CommandDecision {
        let property = Property::from_command(command);
        let mut bytes = [0; 8];
        let mut dword = |offset: u64| {
            let mut bytes = [0; 4];
            controller.bar0_read(offset, &mut bytes);
            u64::from(u32::from_le_bytes(bytes))
        };
        let value = match (u64::from(property.offset), property.is_64_bits) {
            (regs::CAP, true) => {
                controller.bar0_read(regs::CAP, &mut bytes);
                // Memory pages and doorbells are internal to this side.
                let cap = Cap::from_bits(u64::from_le_bytes(bytes))
                    .with_mqes_z(self.entries - 1)
                    .with_mpsmax(0)
                    .with_nssrs(false);
                cap.into_bits()
            }
            (offset @ (regs::VS | regs::CSTS | regs::CRTO), false) => dword(offset),
            (regs::CC, false) => self.cc.into_bits().into(),
            // No subsystem reset is offered (CAP.NSSRS).
            (regs::NSSR, false) => 0,
            _ => return CommandDecision::Answer(Status::INVALID_FIELD.with_dnr(true), 0),
        };
        CommandDecision::Answer(Status::SUCCESS, value)
    }

    fn property_set(&mut self, command: &Command) -> CommandDecision {
        let property = Property::from_command(command);
        let is_cc = u64::from(property.offset) == regs::CC;
        if !is_cc || property.is_64_bits || property.is_other {
            return CommandDecision::Answer(Status::INVALID_FIELD.with_dnr(true), 0);
        }
        *self.cc = Cc::from_bits(property.value as u32);
        self.keep_alive.restart(self.now);
        self.written = true;
        CommandDecision::Answer(Status::SUCCESS, 0)
    }
}

/// Decides whether the controller or this crate executes a command on an I/O queue.
pub(crate) fn decide_io(
    command: &Command,
    state: AnaState,
    namespaces: &[controller::NamespaceConfig],
) -> CommandDecision {
    let refused = |status: Status| CommandDecision::Answer(status.with_dnr(true), 0);
    match fabrics::fctype(command) {
        // These commands are not supported.
        Some(Fctype::DISCONNECT) => return refused(Status::INVALID_OPCODE),
        Some(Fctype::CONNECT) => return refused(Status::COMMAND_SEQUENCE_ERROR),
        Some(_) => return refused(Status::INVALID_FIELD),
        None => {}
    }
    // Another path may execute the command ("NVMe Base 2.1", 8.1.1.3), so Do Not Retry is clear.
    match state {
        AnaState::OPTIMIZED | AnaState::NON_OPTIMIZED => {}
        AnaState::INACCESSIBLE => return CommandDecision::Answer(Status::ANA_INACCESSIBLE, 0),
        AnaState::PERSISTENT_LOSS => {
            return CommandDecision::Answer(Status::ANA_PERSISTENT_LOSS, 0);
        }
        _ => return CommandDecision::Answer(Status::ANA_TRANSITION, 0),
    }
    if matches!(
        command.nvm_opcode(),
        NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE
    ) {
        let nsid = command.nsid.get();
        let namespace = namespaces.iter().find(|ns| ns.nsid == nsid);
        let blocks = u64::from(RwCdw12::from_bits(command.cdw12.get()).nlb());
        // Commands for a missing namespace are answered by the controller.
        if let Some(namespace) = namespace
            && u64::from(command.sgl1().length.get()) != blocks * u64::from(namespace.block_size)
        {
            return refused(Status::DATA_SGL_LENGTH_INVALID);
        }
    }
    CommandDecision::Pass
}

/// Returns the two commands that create the rings of I/O queue `qid` in the controller.
pub(crate) fn create(rings: &Rings, qid: u16) -> [Command; 2] {
    let size = CreateQueueCdw10::new()
        .with_qid(qid)
        .with_qsize_z(rings.entries() - 1);
    let mut cq = Command::new(AdminOpcode::CREATE_IO_CQ.0, 0, 0);
    cq.set_prps(rings.cq(), 0);
    cq.cdw10 = size.into_bits().into();
    cq.cdw11 = CreateCqCdw11::new().with_pc(true).into_bits().into();
    let mut sq = Command::new(AdminOpcode::CREATE_IO_SQ.0, 0, 0);
    sq.set_prps(rings.sq(), 0);
    sq.cdw10 = size.into_bits().into();
    let cdw11 = CreateSqCdw11::new().with_pc(true).with_cqid(qid);
    sq.cdw11 = cdw11.into_bits().into();
    [cq, sq]
}

/// Returns the command that deletes one ring of I/O queue `qid` in the controller.
pub(crate) fn delete(opcode: AdminOpcode, qid: u16) -> Command {
    let mut command = Command::new(opcode.0, 0, 0);
    command.cdw10 = DeleteQueueCdw10::new().with_qid(qid).into_bits().into();
    command
}
