//! Admin commands without end.

use anyhow::Result;
use nvme::cmd::admin::DeleteQueueCdw10;
use nvme::{AdminOpcode, Command};

use super::Context;
use crate::hostile::attacks::work::transfer;
use crate::hostile::client::nvme::{AT_DATA, ENTRIES, Guest, RAM_BASE, pair};
use crate::hostile::test_daemon::MEMORY_NSID;
use nvme::NvmOpcode;

pub(super) fn flood(context: &Context) -> Result<()> {
    let mut guest = Guest::attach(&context.nvme())?;
    guest.enable()?;
    // No command has been sent since the enable: the queue's head is 0.
    guest.fill(0, &mut |at| {
        let opcode = match at % 8 {
            0 => AdminOpcode::ASYNC_EVENT_REQUEST,
            1 | 2 => AdminOpcode::IDENTIFY,
            3 | 4 => AdminOpcode::GET_LOG_PAGE,
            5 => AdminOpcode::GET_FEATURES,
            6 => AdminOpcode::SET_FEATURES,
            _ => AdminOpcode::KEEP_ALIVE,
        };
        let mut command = Command::new(opcode.0, 0, u32::from(at % 3));
        command.set_prps(RAM_BASE + AT_DATA, RAM_BASE + AT_DATA + 4096);
        let select = u32::from(at / 8);
        command.cdw10 = match opcode {
            AdminOpcode::IDENTIFY => select % 0x1d,
            AdminOpcode::GET_LOG_PAGE => 0x03ff_0000 | (1 + select % 8),
            _ => 1 + select % 12,
        }
        .into();
        command
    })?;
    guest.storm(0..=0, |count| context.did(count))
}

pub(super) fn aborts(context: &Context) -> Result<()> {
    let mut guest = Guest::up(&context.nvme(), 4)?;
    for qid in 1..=4 {
        guest.fill(qid, &mut |at| {
            transfer(NvmOpcode::READ, MEMORY_NSID, u64::from(at) * 8, 8, 0)
        })?;
    }
    guest.fill(0, &mut |at| {
        let mut command = Command::new(AdminOpcode::ABORT.0, 0, 0);
        command.cdw10 = (u32::from(at) << 16 | u32::from(at % 6)).into();
        command
    })?;
    guest.storm(0..=4, |count| context.did(count))
}

pub(super) fn queues(context: &Context) -> Result<()> {
    let mut guest = Guest::attach(&context.nvme())?;
    guest.enable()?;
    guest.fill(0, &mut |at| {
        let qid = at / 4 % 16 + 1;
        let [cq, sq] = pair(qid, ENTRIES).create(qid, None);
        let delete = |opcode: AdminOpcode| {
            let mut command = Command::new(opcode.0, 0, 0);
            let cdw10 = DeleteQueueCdw10::new().with_qid(qid);
            command.cdw10 = cdw10.into_bits().into();
            test_host::Command::of(&command)
        };
        match at % 4 {
            0 => cq,
            1 => sq,
            2 => delete(AdminOpcode::DELETE_IO_SQ),
            _ => delete(AdminOpcode::DELETE_IO_CQ),
        }
    })?;
    guest.storm(0..=0, |count| context.did(count))
}
