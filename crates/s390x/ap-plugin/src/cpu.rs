// SPDX-License-Identifier: GPL-2.0-or-later

//! The processor and the storage of the machine, as `ap` wants them.

use ap::ProgramException;
use ap::instruction::Cpu;
use ap::interruption::Absolute;

use crate::ffi::{self, Register, Vcpu};

/// Returns the value of base register `number` in an address; register 0 counts as zero.
pub(crate) fn base(vcpu: &Vcpu, number: u8) -> u64 {
    match number {
        0 => 0,
        number => vcpu.read(Register::General(number)),
    }
}

/// A virtual processor that executes an AP instruction.
pub(crate) struct ExecutingCpu<'a> {
    /// Access to the virtual processor in its callback.
    pub(crate) vcpu: &'a mut Vcpu,
    /// The left half of the processor's PSW (program status word).
    pub(crate) mask: u64,
}

impl Cpu for ExecutingCpu<'_> {
    fn gr(&self, register: u8) -> u64 {
        self.vcpu.read(Register::General(register))
    }

    fn set_gr(&mut self, register: u8, value: u64) {
        self.vcpu.write(Register::General(register), value);
    }

    fn psw_mask(&self) -> u64 {
        self.mask
    }

    fn load(&mut self, address: u64, into: &mut [u8]) -> Result<(), ProgramException> {
        let done = self.vcpu.load(address, into);
        done.then_some(()).ok_or(ProgramException::Addressing)
    }

    fn store(&mut self, address: u64, bytes: &[u8]) -> Result<(), ProgramException> {
        let done = self.vcpu.store(address, bytes);
        done.then_some(()).ok_or(ProgramException::Addressing)
    }
}

/// Absolute storage of the guest, accessed through the processor that is in a callback.
pub(crate) struct Storage;

impl Absolute for Storage {
    fn load(&mut self, address: u64, into: &mut [u8]) -> bool {
        ffi::load_absolute(address, into)
    }

    fn store(&mut self, address: u64, bytes: &[u8]) -> bool {
        ffi::store_absolute(address, bytes)
    }
}
