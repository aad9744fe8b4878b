//! Commands that a physical device executes unchanged ([`Passthrough`](crate::Passthrough)).

use super::run::{Batch, BatchOutcome};
use super::slots::{Kind, Plain, Slots};
use crate::passthrough::PassthroughResult;
use nvme::cmd::io::RwCdw12;
use nvme::{Command, NvmOpcode};

impl Batch<'_> {
    /// Begins a batch with the pass-through device. Returns how many commands the device takes now;
    /// `None` when the volume has to execute all of them.
    pub(super) fn begin_passing(&mut self) -> Option<usize> {
        let passthrough = self.ns.passthrough.as_mut()?;
        passthrough.begin(self.qid, self.page_size, self.write_cache)
    }

    /// Offers the entries of the batch to the device. `number` is the number of commands fetched
    /// before. Returns how many were fetched.
    pub(super) fn pass(
        &mut self,
        slots: &mut Slots,
        room: usize,
        number: u64,
    ) -> (u32, BatchOutcome) {
        let mut fetched = 0;
        for entry in self.entries.iter().take(room) {
            let command: &Command = zerocopy::transmute_ref!(entry);
            let Some(passthrough) = self.ns.passthrough.as_mut() else {
                break;
            };
            if command.nsid.get() != self.nsid || self.long.is_over() {
                break;
            }
            let (kind, moves) = match command.nvm_opcode() {
                NvmOpcode::READ | NvmOpcode::COMPARE => (Kind::Read, true),
                NvmOpcode::WRITE => (Kind::Write, true),
                NvmOpcode::VERIFY => (Kind::Verify, true),
                NvmOpcode::FLUSH => (Kind::Flush, false),
                _ => (Kind::Other, false),
            };
            let nlb = RwCdw12::from_bits(command.cdw12.get()).nlb();
            let plain = Plain {
                command,
                number: number + u64::from(fetched),
                sqid: self.qid,
                cid: command.cid.get(),
                ns: self.index.into(),
                nsid: self.nsid,
                slba: command.slba(),
                bytes: if moves {
                    u64::from(nlb) << self.ns.shift
                } else {
                    0
                },
                kind,
            };
            self.long.spend(plain.bytes);
            let Some(tag) = slots.alloc_passed(plain) else {
                break;
            };
            fetched += 1;
            if !kind.io_kind().is_sampled() {
                slots.time(tag);
            }
            let next = match passthrough.submit(self.qid, command, self.dma, tag) {
                PassthroughResult::Taken => continue,
                PassthroughResult::NotMine => BatchOutcome::General(*command),
                PassthroughResult::Refused(status) => BatchOutcome::Failed(*command, status),
            };
            if let Some(index) = slots.of_tag(tag) {
                slots.release(index);
            }
            return (fetched, next);
        }
        (fetched, BatchOutcome::Idle)
    }
}
