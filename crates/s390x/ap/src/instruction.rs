//! Execution of NQAP, DQAP and PQAP on a machine without AP instructions: from registers and
//! storage to the mediated device, and back.
//!
//! Registers as Linux uses them (arch/s390/include/asm/ap.h). NQAP: the R1 pair holds the message
//! identifier, the R2 pair address and length. DQAP is similar; general register 2 receives the
//! remaining length of a reply that exceeds the buffer.

use alloc::vec;

use crate::command::{Facilities, Function, InterruptControl, Pqap, ProgramException};
use crate::matrix::Apqn;
use crate::mediated::Mediated;
use crate::outside::{Clock, Pages, Queues, RequestPart, Subclasses};
use crate::status::{QueueStatus, Response};

/// The processor that executes the instruction.
pub trait Cpu {
    /// Returns a general register.
    fn gr(&self, register: u8) -> u64;

    /// Sets a general register.
    fn set_gr(&mut self, register: u8, value: u64);

    /// Returns the left half of the PSW.
    fn psw_mask(&self) -> u64;

    /// Loads bytes from a logical address, or raises an exception without loading any.
    fn load(&mut self, address: u64, into: &mut [u8]) -> Result<(), ProgramException>;

    /// Stores bytes at a logical address, or raises an exception without storing any.
    fn store(&mut self, address: u64, bytes: &[u8]) -> Result<(), ProgramException>;
}

/// Bit 15 of the PSW: problem state.
pub const PSW_PROBLEM: u64 = 1 << 48;
/// Bits 31 and 32 of the PSW, both set in 64-bit addressing mode.
const PSW_EXTENDED: u64 = 1 << 32;
const PSW_BASIC: u64 = 1 << 31;

/// Operation code of NQAP.
pub const NQAP: u16 = 0xb2ad;
/// Operation code of DQAP.
pub const DQAP: u16 = 0xb2ae;
/// Operation code of PQAP.
pub const PQAP: u16 = 0xb2af;

/// Maximum length in bytes of a message or buffer in a guest's storage that is accessed. Cards
/// accept less.
pub const LARGEST_MESSAGE: u64 = 64 * 1024;

/// General register 0 of NQAP: this is the last part of the message.
const LAST_PART: u64 = 0x4000_0000;
/// General register 0 of NQAP: a special command.
const SPECIAL: u64 = 0x0040_0000;
/// General register 0 of DQAP: start with a new reply instead of continuing the last one.
const NEW_REPLY: u64 = 0x8000_0000;
/// Set in general register 0 by a DQAP that left part of the reply, because Linux continues only
/// with a register that is not zero.
const GOES_ON: u64 = 0x4000_0000;

/// Returns whether the first half-word of an instruction is an AP operation code.
pub const fn is_ap(operation: u16) -> bool {
    matches!(operation, NQAP | DQAP | PQAP)
}

/// Executes an AP instruction and returns the condition code. An exception suppresses the
/// instruction, which then has no effect.
pub fn execute<U, P, S, C, Q>(
    cpu: &mut U,
    instruction: [u8; 4],
    facilities: Facilities,
    ap: &mut Mediated<P, S, C, Q>,
) -> Result<u8, ProgramException>
where
    U: Cpu,
    P: Pages,
    S: Subclasses,
    C: Clock,
    Q: Queues,
{
    let [high, low, _, registers] = instruction;
    let operation = u16::from_be_bytes([high, low]);
    let problem_state = cpu.psw_mask() & PSW_PROBLEM != 0;
    if operation == PQAP {
        let pqap = Pqap::decode(cpu.gr(0), facilities, problem_state)?;
        return Execution { cpu, ap }.pqap(pqap);
    }
    if !facilities.instructions || !is_ap(operation) {
        return Err(ProgramException::Operation);
    }
    if problem_state {
        return Err(ProgramException::PrivilegedOperation);
    }
    let (r1, r2) = (registers >> 4, registers & 15);
    let extended = cpu.gr(0) & 0xc0f0 != 0 && !facilities.configuration;
    if r1 % 2 != 0 || r2 % 2 != 0 || extended {
        return Err(ProgramException::Specification);
    }
    let execution = Execution { cpu, ap };
    if operation == NQAP {
        execution.enqueue(r1, r2)
    } else {
        execution.dequeue(r1, r2)
    }
}

/// A processor that executes an instruction on its AP queues.
struct Execution<'a, U, P, S, C, Q> {
    cpu: &'a mut U,
    ap: &'a mut Mediated<P, S, C, Q>,
}

impl<U, P, S, C, Q> Execution<'_, U, P, S, C, Q>
where
    U: Cpu,
    P: Pages,
    S: Subclasses,
    C: Clock,
    Q: Queues,
{
    fn pqap(self, pqap: Pqap) -> Result<u8, ProgramException> {
        let Self { cpu, ap } = self;
        let status = match pqap.function {
            Function::Tapq { facilities } => {
                let (status, hardware) = ap.tapq(pqap.apqn);
                cpu.set_gr(2, hardware.register(facilities));
                status
            }
            Function::Rapq => ap.rapq(pqap.apqn),
            Function::Zapq => ap.zapq(pqap.apqn),
            Function::Aqic => {
                let notification = address(cpu, cpu.gr(2));
                ap.aqic(pqap.apqn, InterruptControl::decode(cpu.gr(1), notification))
            }
            Function::Qci => {
                let block = ap.qci().to_bytes();
                cpu.store(address(cpu, cpu.gr(2)), &block)?;
                return Ok(0);
            }
        };
        Ok(finish(cpu, status))
    }

    fn enqueue(self, r1: u8, r2: u8) -> Result<u8, ProgramException> {
        let Self { cpu, ap } = self;
        let gr0 = cpu.gr(0);
        let apqn = Apqn::from_register(gr0);
        if !ap.owns(apqn) {
            return Ok(finish(cpu, QueueStatus::of(Response::QUEUE_NOT_AVAILABLE)));
        }
        let (from, length) = (cpu.gr(r2), length(cpu, r2));
        if length > LARGEST_MESSAGE {
            return Ok(finish(cpu, QueueStatus::of(Response::MESSAGE_TOO_BIG)));
        }
        let mut data = vec![0; usize::try_from(length).unwrap_or(0)];
        cpu.load(address(cpu, from), &mut data)?;
        let last = gr0 & LAST_PART != 0;
        let part = RequestPart {
            id: cpu.gr(r1) << 32 | cpu.gr(r1 + 1) & 0xffff_ffff,
            data: &data,
            last,
            special: gr0 & SPECIAL != 0,
        };
        let status = ap.nqap(apqn, part);
        let cc = finish(cpu, status);
        if cc != 0 {
            return Ok(cc);
        }
        advance(cpu, r2, length);
        Ok(if last { 0 } else { 1 })
    }

    fn dequeue(self, r1: u8, r2: u8) -> Result<u8, ProgramException> {
        let Self { cpu, ap } = self;
        let gr0 = cpu.gr(0);
        let apqn = Apqn::from_register(gr0);
        if !ap.owns(apqn) {
            return Ok(finish(cpu, QueueStatus::of(Response::QUEUE_NOT_AVAILABLE)));
        }
        let (to, room) = (cpu.gr(r2), length(cpu, r2).min(LARGEST_MESSAGE));
        let room = usize::try_from(room).unwrap_or(0);
        // The reply is removed from its queue below, so access to the buffer is checked first.
        cpu.load(address(cpu, to), &mut vec![0; room])?;
        let (status, reply) = ap.dqap(apqn, room, gr0 & NEW_REPLY == 0);
        let Some(reply) = reply else {
            return Ok(finish(cpu, status));
        };
        cpu.store(address(cpu, to), &reply.data)?;
        advance(cpu, r2, reply.data.len() as u64);
        cpu.set_gr(2, reply.residual as u64);
        if reply.residual > 0 {
            cpu.set_gr(0, gr0 & !NEW_REPLY | GOES_ON);
            return Ok(1);
        }
        cpu.set_gr(r1, reply.id >> 32);
        cpu.set_gr(r1 + 1, reply.id & 0xffff_ffff);
        Ok(finish(cpu, status))
    }
}

fn finish(cpu: &mut impl Cpu, status: QueueStatus) -> u8 {
    cpu.set_gr(1, u64::from(status.word()));
    status.condition_code()
}

fn is_64_bit(cpu: &impl Cpu) -> bool {
    cpu.psw_mask() & PSW_EXTENDED != 0
}

/// Returns a register's value as an address in the current addressing mode.
fn address(cpu: &impl Cpu, register: u64) -> u64 {
    if is_64_bit(cpu) {
        register
    } else if cpu.psw_mask() & PSW_BASIC != 0 {
        register & 0x7fff_ffff
    } else {
        register & 0x00ff_ffff
    }
}

/// Returns the length in the odd register of a pair.
fn length(cpu: &impl Cpu, r: u8) -> u64 {
    let length = cpu.gr(r + 1);
    if is_64_bit(cpu) {
        length
    } else {
        length & 0xffff_ffff
    }
}

/// Moves an address and length pair past the processed bytes.
fn advance(cpu: &mut impl Cpu, r: u8, by: u64) {
    let (address, length) = (cpu.gr(r), cpu.gr(r + 1));
    let (next, left) = (address.wrapping_add(by), length.wrapping_sub(by));
    if is_64_bit(cpu) {
        cpu.set_gr(r, next);
        cpu.set_gr(r + 1, left);
    } else {
        let high = 0xffff_ffff_0000_0000;
        cpu.set_gr(r, address & high | next & 0x7fff_ffff);
        cpu.set_gr(r + 1, length & high | left & 0xffff_ffff);
    }
}
