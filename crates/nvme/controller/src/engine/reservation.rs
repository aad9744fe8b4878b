//! Reservation commands ("NVMe Base 2.1", 7.5 to 7.8), on the engine's side: this module reads
//! their fields and data. The control half executes them and reports their end.

use super::slots::{Kind, RemainingWork};
use super::{Event, Execution};
use crate::prefix;
use dma::{Access, SegmentList};
use nvme::cmd::reservation::{
    AcquireCdw10, AcquireData, RegisterCdw10, RegisterData, ReleaseCdw10, ReleaseData, ReportCdw11,
};
use nvme::{Command, NvmOpcode, Status};
use reservations::{Operation, ReservationRefusal};
use std::hash::{BuildHasher, Hasher, RandomState};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Parsed reservation command: an operation that changes reservations, or a request for a report.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReservationRequest {
    Operation(Operation),
    /// Reservation Report, which returns the reservation status.
    Report {
        extended: bool,
    },
}

/// Reservation command that was fetched and is passed to the control half, which executes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReservationCommand {
    /// Tag of the command in the engine.
    pub tag: u64,
    /// Number that no other command has, in this process or another one.
    pub number: u64,
    /// Whether the previous process may have executed the command.
    pub is_repeated: bool,
    pub command: Command,
    pub asked: ReservationRequest,
}

/// Outcome of a reservation command: data or an error status.
pub(crate) struct ReservationEnd {
    pub command: ReservationCommand,
    /// Data for the host, which is cut to the length that the command requests, or an error status.
    pub result: Result<Vec<u8>, Status>,
}

/// Returns a number that no other command has, in this process or another one, unless two random
/// numbers of 64 bits are equal.
fn unique_number() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn status(refusal: ReservationRefusal) -> Status {
    refusal.status()
}

impl Execution<'_> {
    /// Starts a reservation command: the control half receives [`Event::Reservation`].
    pub(super) fn reservation(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let ns = self.namespaces.index_of(command.nsid.get())?;
        let cdw10 = command.cdw10.get();
        let asked = match command.nvm_opcode() {
            NvmOpcode::RESERVATION_REGISTER => {
                let data: RegisterData = self.read_data(command)?;
                let cdw10 = RegisterCdw10::from_bits(cdw10);
                ReservationRequest::Operation(Operation::register(cdw10, &data).map_err(status)?)
            }
            NvmOpcode::RESERVATION_ACQUIRE => {
                let data: AcquireData = self.read_data(command)?;
                let cdw10 = AcquireCdw10::from_bits(cdw10);
                ReservationRequest::Operation(Operation::acquire(cdw10, &data).map_err(status)?)
            }
            NvmOpcode::RESERVATION_RELEASE => {
                let data: ReleaseData = self.read_data(command)?;
                let cdw10 = ReleaseCdw10::from_bits(cdw10);
                ReservationRequest::Operation(Operation::release(cdw10, &data).map_err(status)?)
            }
            _ => {
                let extended = ReportCdw11::from_bits(command.cdw11.get()).eds();
                ReservationRequest::Report { extended }
            }
        };
        // The number is in the record, in dwords that reservation commands do not use.
        let is_repeated = self.slots.is_reserved();
        let number = if is_repeated {
            u64::from(command.cdw13.get()) << 32 | u64::from(command.cdw12.get())
        } else {
            unique_number()
        };
        let mut recorded = *command;
        recorded.cdw12 = (number as u32).into();
        recorded.cdw13 = ((number >> 32) as u32).into();
        let index = self.slot_for(sqid, &recorded, ns)?;
        if let Some(slot) = self.slots.get(index) {
            slot.kind = Kind::Other;
            slot.work = RemainingWork::Reservation;
        }
        let event = ReservationCommand {
            tag: self.slots.tag(index),
            number,
            is_repeated,
            command: *command,
            asked,
        };
        self.events.push_back(Event::Reservation(Box::new(event)));
        Ok(())
    }

    /// Reads the command's data from guest memory, once.
    fn read_data<T>(&self, command: &Command) -> Result<T, Status>
    where
        T: FromBytes + IntoBytes + Immutable + KnownLayout + Default,
    {
        let mut data = T::default();
        let mut list = SegmentList::new();
        self.walk(command, size_of::<T>() as u64, Access::Read, &mut list)?;
        list.copy_to(0, data.as_mut_bytes());
        Ok(data)
    }

    /// Ends a reservation command, if it is still outstanding.
    pub fn end_reservation(&mut self, end: ReservationEnd) {
        let ReservationEnd { command, result } = end;
        let Some((index, slot)) = self.slots.tagged(command.tag) else {
            return;
        };
        if !matches!(slot.work, RemainingWork::Reservation) {
            return;
        }
        let result = if self.bus_master.is_enabled {
            result.and_then(|data| self.write_data(&command.command, &data))
        } else {
            // Guest memory must not be accessed without Bus Master Enable.
            Err(Status::COMMAND_INTERRUPTED)
        };
        if let Some(slot) = self.slots.get(index) {
            match result {
                Ok(bytes) => slot.bytes = bytes,
                Err(status) => slot.status = status,
            }
        }
        self.end(index);
    }

    /// Copies `data` to the host, at most the length that the command requests (NUMD). Returns the
    /// number of bytes copied.
    fn write_data(&self, command: &Command, data: &[u8]) -> Result<u64, Status> {
        if command.nvm_opcode() != NvmOpcode::RESERVATION_REPORT {
            return Ok(0);
        }
        let wanted = (u64::from(command.cdw10.get()) + 1) * 4;
        let bytes = wanted.min(data.len() as u64);
        let mut list = SegmentList::new();
        self.walk(command, bytes, Access::Write, &mut list)?;
        list.copy_from(0, prefix(data, bytes as usize));
        Ok(bytes)
    }
}
