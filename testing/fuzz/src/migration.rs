//! State of a controller whose guest migrates here, as a hostile VMM may write it. The input
//! changes the state of an honest source, or replaces it.

use controller::{Controller, ControllerConfig, IrqSink, NamespaceConfig};
use dma::{Memory, Prot};
use nvme::cmd::NSID_BROADCAST;
use nvme::log::Lid;
use nvme::regs::{self, Aqa, Cc};
use nvme::{AdminOpcode, Command, NvmOpcode};
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{Io, IoOptions, MemVolume};
use zerocopy::IntoBytes;

const MEMORY: usize = 1 << 20;
const QUEUES: u16 = 3;
const ENTRIES: u32 = 8;
const ASQ: u64 = 0x1000;
const ACQ: u64 = 0x2000;
const SHADOW: u64 = 0x3000;
const RINGS: u64 = 0x1_0000;
const DATA: u64 = 0x8_0000;
/// Log pages of which the state has a part.
const LOG_PAGES: [Lid; 10] = [
    Lid::ERROR_INFORMATION,
    Lid::SMART,
    Lid::CHANGED_NAMESPACE_LIST,
    Lid::DEVICE_SELF_TEST,
    Lid::TELEMETRY_HOST,
    Lid::TELEMETRY_CONTROLLER,
    Lid::PERSISTENT_EVENT,
    Lid::LBA_STATUS,
    Lid::RESERVATION_NOTIFICATION,
    Lid::SANITIZE_STATUS,
];
/// Size of the stream's header: magic, version, length and checksum.
const HEADER: usize = 20;

struct Deaf;

impl IrqSink for Deaf {
    fn signal(&self) {}
}

struct Guest {
    controller: Controller,
    tails: [u32; QUEUES as usize + 1],
    cid: u16,
}

impl Guest {
    fn submit(&mut self, qid: u16, mut command: Command) {
        self.cid += 1;
        command.cid = self.cid.into();
        let entries = if qid == 0 { 32 } else { ENTRIES };
        let ring = if qid == 0 {
            ASQ
        } else {
            RINGS + u64::from(qid) * 0x2000
        };
        if let Some(tail) = self.tails.get_mut(usize::from(qid)) {
            let _ = self
                .controller
                .dma()
                .write(ring + u64::from(*tail) * 64, command.as_bytes());
            *tail = (*tail + 1) % entries;
            let offset = regs::doorbell_offset(qid, false, 0);
            self.controller.bar0_write(offset, &tail.to_le_bytes());
        }
    }

    fn poll(&mut self, io: &Io) {
        for _ in 0..6 {
            io.poll(&mut |completion| self.controller.complete(completion));
            self.controller.poll(Instant::now());
        }
    }
}

/// A controller in a VMM that has mapped this memory.
fn controller(memory: &Memory, io: &Io) -> Option<Controller> {
    let config = ControllerConfig {
        io_queues: QUEUES,
        max_in_flight: 8,
        ..ControllerConfig::default()
    };
    let namespace = NamespaceConfig {
        block_size: 512,
        nguid: [1; 16],
        ..NamespaceConfig::new(1, Arc::new(MemVolume::new(256 << 10).ok()?))
    };
    let mut controller = Controller::new(1, config, vec![namespace], io).ok()?;
    let backing = Some((memory.clone(), 0));
    controller
        .dma_map(0, MEMORY as u64, backing, Prot::RW)
        .ok()?;
    for vector in 0..controller.vectors() {
        controller.set_msix(vector, Some(Arc::new(Deaf)));
    }
    Some(controller)
}

/// Returns the state of an honest guest's controller, which has stopped, and the tails of its
/// queues.
fn honest(memory: &Memory, io: &Io) -> Option<(Vec<u8>, [u32; QUEUES as usize + 1])> {
    let mut guest = Guest {
        controller: controller(memory, io)?,
        tails: [0; QUEUES as usize + 1],
        cid: 0,
    };
    let c = &mut guest.controller;
    c.config_write(4, &[6, 0]);
    let aqa = Aqa::new().with_asqs_z(31).with_acqs_z(31);
    c.bar0_write(regs::AQA, &aqa.into_bits().to_le_bytes());
    c.bar0_write(regs::ASQ, &ASQ.to_le_bytes());
    c.bar0_write(regs::ACQ, &ACQ.to_le_bytes());
    let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
    c.bar0_write(regs::CC, &cc.into_bits().to_le_bytes());
    let mut command = Command::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0, 0);
    command.set_prps(SHADOW, SHADOW + 0x1000);
    guest.submit(0, command);
    for qid in 1..=QUEUES {
        for (opcode, cdw11, half) in [
            (AdminOpcode::CREATE_IO_CQ, 3 | u32::from(qid) << 16, 0x1000),
            (AdminOpcode::CREATE_IO_SQ, 1 | u32::from(qid) << 16, 0),
        ] {
            let mut command = Command::new(opcode.0, 0, 0);
            command.set_prps(RINGS + u64::from(qid) * 0x2000 + half, 0);
            command.cdw10 = (u32::from(qid) | (ENTRIES - 1) << 16).into();
            command.cdw11 = cdw11.into();
            guest.submit(0, command);
        }
    }
    for _ in 0..2 {
        guest.submit(0, Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0));
    }
    guest.poll(io);
    for qid in 1..=QUEUES {
        let mut command = Command::new(NvmOpcode::READ.0, 0, 1);
        command.set_prps(DATA, 0);
        guest.submit(qid, command);
    }
    guest.poll(io);
    guest.controller.pause();
    guest.poll(io);
    assert!(guest.controller.is_quiet());
    Some((guest.controller.save_stream().ok()?, guest.tails))
}

/// Returns a stream with this payload, whose header is right.
fn stream(payload: &[u8]) -> Vec<u8> {
    let mut stream = b"vnvmeMIG".to_vec();
    for number in [1, payload.len() as u32, crc32fast::hash(payload)] {
        stream.extend_from_slice(&number.to_le_bytes());
    }
    stream.extend_from_slice(payload);
    stream
}

/// Returns the stream that the input selects.
fn forged(honest: &[u8], input: &[u8]) -> Vec<u8> {
    let Some((&kind, rest)) = input.split_first() else {
        return honest.to_vec();
    };
    match kind % 3 {
        0 => rest.to_vec(),
        1 => stream(rest),
        _ => {
            let mut payload = honest.get(HEADER..).unwrap_or_default().to_vec();
            let len = payload.len().max(1);
            for patch in rest.chunks_exact(3) {
                if let [low, high, value] = *patch {
                    let at = usize::from(u16::from_le_bytes([low, high])) % len;
                    if let Some(byte) = payload.get_mut(at) {
                        *byte = value;
                    }
                }
            }
            stream(&payload)
        }
    }
}

/// A state that may be forged is loaded, and the controller serves the guest if it was accepted.
pub fn migration(input: &[u8]) {
    let _ = run(input);
}

fn run(input: &[u8]) -> Option<()> {
    let memory = Memory::anonymous(MEMORY).ok()?;
    let io = Io::new(IoOptions::default());
    let (honest, tails) = honest(&memory, &io)?;
    let mut guest = Guest {
        controller: controller(&memory, &io)?,
        tails,
        cid: 100,
    };
    guest.controller.pause();
    let loaded = guest.controller.load_stream(&forged(&honest, input));
    assert!(loaded.is_ok() || !input.is_empty(), "{loaded:?}");
    if loaded.is_ok() {
        guest.poll(&io);
        guest.controller.start_dirty_log();
        guest.controller.unpause();
        for qid in 0..=QUEUES {
            guest.submit(qid, Command::new(NvmOpcode::FLUSH.0, 0, 1));
        }
        guest.poll(&io);
        for lid in LOG_PAGES {
            let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, NSID_BROADCAST);
            // A page of 4 KiB, with Retain Asynchronous Event.
            command.cdw10 = (u32::from(lid.0) | 1 << 15 | 1023 << 16).into();
            command.set_prps(DATA, 0);
            guest.submit(0, command);
        }
        guest.poll(&io);
        let stats = guest.controller.stats();
        let admin = stats.queues.first().map_or(0, |q| q.commands.get());
        assert!(admin > LOG_PAGES.len() as u64 || !input.is_empty());
        guest.controller.take_dirty(0, MEMORY as u64, &mut |_| ());
        guest.controller.arm();
        guest.controller.pause();
        guest.poll(&io);
        let _ = guest.controller.save_stream();
    }
    let mut registers = [0; 0x40];
    guest.controller.bar0_read(0, &mut registers);
    guest.controller.config_read(0, &mut registers);
    guest.controller.reset();
    let limit = Instant::now() + Duration::from_secs(5);
    while guest.controller.is_resetting() {
        guest.poll(&io);
        assert!(Instant::now() < limit, "the reset does not end");
    }
    // The refused state does not hinder the next one.
    guest.controller.load_stream(&honest).ok()?;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::migration;
    use crate::chance::Chance;

    #[test]
    fn honest_state_is_accepted_and_forged_ones_are_harmless() {
        migration(&[]);
        let mut chance = Chance::new();
        for round in 0..300 {
            let mut input = vec![2];
            input.extend(chance.bytes(3 * (1 + round % 6)));
            migration(&input);
        }
    }
}
