//! A guest that does whatever it likes with its own virtual disk.

use crate::machine::{GUEST_MEMORY, Machine, reg};
use anyhow::Result;
use std::time::Duration;
use test_host::{Command, doorbell};

/// Opcodes of I/O commands that exist, so that not all commands end at the first check.
const IO: &[u8] = &[0, 1, 2, 4, 5, 8, 9, 0xc, 0xd, 0xe, 0x11, 0x15, 0x19];
/// Opcodes of admin commands that exist.
const ADMIN: &[u8] = &[
    0, 1, 2, 4, 5, 6, 8, 9, 0xa, 0xc, 0xd, 0x14, 0x15, 0x7c, 0x80, 0x84,
];

/// A hostile guest of one virtual disk.
#[derive(Debug)]
pub struct Hostile {
    seat: usize,
}

impl Hostile {
    /// Creates the guest of a virtual disk.
    pub fn new(seat: usize) -> Self {
        Self { seat }
    }

    /// Does something at random.
    ///
    /// # Errors
    /// A process refuses the state that the one before has left.
    pub fn act(&mut self, machine: &mut Machine) -> Result<()> {
        let seat = self.seat;
        machine.trace.count("hostile guest: action");
        let memory = machine.memory(seat)?;
        match machine.random.below(16) {
            0 => {
                // The registers of a host that means well, so that commands are fetched at all.
                let aqa = 0x001f_001f;
                machine.call(seat, |c| c.config_write(4, &6u16.to_le_bytes()))?;
                machine.write32(seat, reg::AQA, aqa)?;
                machine.write32(seat, reg::ASQ, 0x1000)?;
                machine.write32(seat, reg::ACQ, 0x2000)?;
                machine.write32(seat, reg::CC, 0x0046_0001)
            }
            1 => {
                let offset = machine.random.below(0x60) & !3;
                let value = machine.random.bits() as u32;
                machine
                    .trace
                    .say(|| format!("hostile: register {offset:#x} = {value:#x}"));
                machine.write32(seat, offset, value)
            }
            2 => {
                let offset = machine.random.below(64) * 4;
                let value = machine.random.bits() as u16;
                machine.call(seat, |c| c.config_write(offset, &value.to_le_bytes()))?;
                machine.call(seat, |c| c.config_write(4, &6u16.to_le_bytes()))
            }
            3 => {
                if machine.random.one_in(4) {
                    machine.call(seat, |c| c.reset())?;
                }
                Ok(())
            }
            4 => {
                // A page of memory, lists and rings among them.
                let at = machine.random.below(GUEST_MEMORY as u64 / 4096) * 4096;
                for word in 0..64 {
                    let value = match machine.random.below(3) {
                        0 => machine.random.bits(),
                        _ => machine.random.below(GUEST_MEMORY as u64 + 8192),
                    };
                    memory.write(at as usize + word * 8, &value.to_le_bytes())?;
                }
                Ok(())
            }
            5 => {
                let by = Duration::from_micros(machine.random.below(2000));
                machine.advance(by);
                Ok(())
            }
            6..=8 => {
                let queue = machine.random.below(6) as u16;
                let is_cq = machine.random.one_in(3);
                let value = match machine.random.below(3) {
                    0 => machine.random.bits() as u32,
                    _ => machine.random.below(40) as u32,
                };
                let offset = doorbell(queue, is_cq, 0);
                machine.write32(seat, offset, value)
            }
            _ => {
                let queue = machine.random.below(3);
                let ring = if queue == 0 {
                    0x1000
                } else {
                    0x1_0000 + queue * 0x2000
                };
                let slot = machine.random.below(32);
                let command = command(machine, queue == 0);
                let at = (ring + slot * 64) as usize;
                machine.trace.say(|| format!("hostile: {command:?}"));
                for n in 0..16 {
                    memory.write(at + n * 4, &command.dword(n).to_le_bytes())?;
                }
                Ok(())
            }
        }
    }
}

/// Returns a command of which some fields make sense.
fn command(machine: &mut Machine, is_admin: bool) -> Command {
    let random = &mut machine.random;
    let opcodes = if is_admin { ADMIN } else { IO };
    let opcode = random.pick(opcodes).copied().unwrap_or(0);
    let mut command = Command::new(opcode, 1);
    let page = |at: u64| at * 4096;
    let prp1 = match random.below(3) {
        // The first queues that this guest writes to.
        0 => 0x1_0000 + random.below(6) * 0x1000,
        _ => page(random.below(300)),
    };
    let prp2 = match random.below(3) {
        0 => 0,
        1 => page(random.below(300)),
        _ => random.bits(),
    };
    command = command.prp(prp1, prp2);
    for dword in 10..16 {
        let value = match random.below(5) {
            0 => random.bits() as u32,
            1 => random.below(64) as u32,
            2 => 0x001f_0001,
            3 => 0x0001_0001,
            _ => 1,
        };
        command = command.dw(dword, value);
    }
    if random.one_in(4) {
        let dword = random.below(16) as usize;
        let value = random.bits() as u32;
        command = command.dw(dword, value);
    }
    let cid = random.bits() as u16;
    command.with_cid(cid)
}
