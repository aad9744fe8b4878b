//! Raw NVMe commands, as mediation of a guest's queues submits them, next to requests.
//!
//! The owner of the queue pair has checked and translated a raw command, which usually is a
//! guest's. The queue pair assigns a command identifier, describes the data by PRPs or an SGL in
//! its own list pages, keeps the command for replay after a reset, and enforces its time-out. It
//! does not hold the memory: the submitter keeps every address mapped for the device, and its
//! memory in place, until the completion. After dropping the queue pair it must do so until the
//! device certainly has no access any more ([`QueuePair::is_wild`]).

use std::time::Duration;

use nvme::Command;
use nvme::cmd::DataPointer;
use zerocopy::little_endian::{U16, U32};

pub use super::data::{IovaRange, Method};

use super::core::QueueCore;
use super::request::Sink;
use super::slots::SINGLE;
use super::{Completion, QueuePair};
use crate::buffer::DmaBuffer;
use crate::control::DeviceState;
use crate::error::{CommandError, SubmitRefusal};

/// Location of a raw command's data, in device addresses (IOVAs).
#[derive(Clone, Copy, Debug)]
pub enum RawData<'a> {
    /// The command has no data.
    None,
    /// Contiguous data of `len` bytes.
    At {
        /// First device address of the data.
        iova: u64,
        /// Length of the data in bytes.
        len: u64,
    },
    /// Scattered data: `len` bytes from byte `skip` of the ranges, with a data pointer type from
    /// [`QueuePair::method`].
    Ranges {
        /// Form of the data pointer: PRP or SGL.
        method: Method,
        /// Ranges of device addresses of the whole transfer.
        ranges: &'a [IovaRange],
        /// Number of bytes of the transfer that precede this command's data.
        skip: u64,
        /// Length of this command's data in bytes.
        len: u64,
    },
    /// The data itself as 64-bit words, at most a memory page; copied into a page of the queue
    /// pair.
    Words(&'a [u64]),
}

impl QueueCore {
    /// Submits a raw command. Only opcode, namespace and command dwords 10 to 15 of `command` are
    /// used.
    #[inline]
    pub fn push_raw(
        &mut self,
        command: &Command,
        data: RawData<'_>,
        user_data: u64,
    ) -> Result<u16, SubmitRefusal> {
        if self.dead {
            return Err(SubmitRefusal::Gone);
        }
        let Some(index) = self.slots.next() else {
            return Err(SubmitRefusal::Full);
        };
        let list = usize::from(index);
        let (shape, most) = (self.shape(), self.max_bytes());
        let (flags, dptr) = match data {
            RawData::None => Default::default(),
            RawData::At { iova, len } if (1..=most).contains(&len) => {
                shape.contiguous(iova, len, &self.lists, list)
            }
            RawData::Ranges {
                method,
                ranges,
                skip,
                len,
            } if (1..=most).contains(&len) => {
                shape.scattered(method, ranges, skip, len, &self.lists, list)
            }
            RawData::Words(words) if words.len() as u64 <= shape.page / 8 => {
                for (i, word) in words.iter().enumerate() {
                    self.lists.set(list, i, *word);
                }
                let page = DataPointer::prp(self.lists.iova(list, 0), 0);
                (Default::default(), page)
            }
            _ => return Err(SubmitRefusal::Range),
        };
        let tick = self.tick;
        let Some(slot) = self.slots.begin(index) else {
            return Err(SubmitRefusal::Full);
        };
        slot.command = Command {
            opcode: command.opcode,
            flags,
            cid: U16::new(slot.cid),
            nsid: command.nsid,
            cdw2: U32::ZERO,
            cdw3: U32::ZERO,
            mptr: Default::default(),
            dptr,
            cdw10: command.cdw10,
            cdw11: command.cdw11,
            cdw12: command.cdw12,
            cdw13: command.cdw13,
            cdw14: command.cdw14,
            cdw15: command.cdw15,
        };
        slot.user_data = user_data;
        slot.parent = SINGLE;
        slot.tick = tick;
        self.sq.put(self.tail, &slot.command);
        self.advance_tail();
        Ok(index)
    }

    /// Returns the maximum number of data bytes of one command.
    #[inline]
    fn max_bytes(&self) -> u64 {
        u64::from(self.max_blocks()) << self.block_shift
    }
}

/// Receiver of completed raw commands.
pub trait RawCompletionHandler {
    /// Handles a successful command. `dw0` is dword 0 of its completion.
    fn worked(&mut self, user_data: u64, dw0: u32);

    /// Handles a failed command. `dw0` is dword 0 of its completion.
    fn failed(&mut self, user_data: u64, error: CommandError, dw0: u32);
}

/// Adapter that passes completions to a [`RawCompletionHandler`]. Raw commands have no buffers.
struct Raw<'a, E>(&'a mut E);

impl<E: RawCompletionHandler> Sink for Raw<'_, E> {
    #[inline(always)]
    fn single(
        &mut self,
        user_data: u64,
        result: Result<(), CommandError>,
        dw0: u32,
        _hold: &mut Option<DmaBuffer>,
    ) {
        match result {
            Ok(()) => self.0.worked(user_data, dw0),
            Err(error) => self.0.failed(user_data, error, dw0),
        }
    }

    fn other(&mut self, completion: Completion) {
        self.single(
            completion.user_data,
            completion.result,
            completion.dw0,
            &mut None,
        );
    }
}

impl QueuePair {
    /// Submits a raw command to any namespace of the device. Opcode, namespace and command dwords
    /// 10 to 15 are not checked, nor are the addresses in `data`. [`QueuePair::ring`] or
    /// [`QueuePair::poll`] rings the doorbell. Commands must be idempotent, because they are
    /// repeated after a reset.
    ///
    /// # Errors
    /// [`SubmitRefusal::Full`] when too many commands are outstanding; [`SubmitRefusal::Gone`] when
    /// the device is lost; [`SubmitRefusal::Range`] for more data than a command can carry.
    #[inline]
    pub fn submit_raw(
        &mut self,
        command: &Command,
        data: RawData<'_>,
        user_data: u64,
    ) -> Result<(), SubmitRefusal> {
        let core = self.core().ok_or(SubmitRefusal::Gone)?;
        core.push_raw(command, data, user_data).map(drop)
    }

    /// Polls for completed raw commands, and passes them to `ended`; does not pause when there are
    /// none. Returns their number.
    #[inline]
    pub fn look(&mut self, ended: &mut impl RawCompletionHandler) -> usize {
        match self.core.as_deref_mut() {
            Some(core) => core.look(&mut Raw(ended), false),
            None => 0,
        }
    }

    /// Returns whether the queue pair permanently refuses all further commands.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.core.as_ref().is_none_or(|core| core.dead)
    }

    /// Returns the number of commands that can be submitted now.
    #[inline]
    pub fn room(&self) -> usize {
        self.core
            .as_ref()
            .map_or(0, |core| core.slots.count() - core.slots.in_flight())
    }

    /// Returns the type of data pointer for a scattered transfer to this device. `None` if no type
    /// can describe it, and the data must be copied to suitable memory.
    #[inline]
    pub fn method(&self, ranges: &[IovaRange]) -> Option<Method> {
        let core = self.core.as_ref()?;
        core.shape().method(ranges, core.lists.each())
    }

    /// Returns the maximum number of data bytes of one command.
    pub fn max_bytes(&self) -> u64 {
        self.core.as_ref().map_or(0, |core| core.max_bytes())
    }

    /// Returns the device's memory page size in bytes (CC.MPS).
    pub fn page_size(&self) -> u64 {
        self.core.as_ref().map_or(4096, |core| core.shape().page)
    }

    /// Prepares the owner for sleep on [`QueuePair::eventfd`], consuming earlier signals. Returns
    /// `true` if nothing is pending and later completions will signal the eventfd; on `false`, poll
    /// again.
    pub fn arm(&mut self) -> bool {
        self.core().is_none_or(QueueCore::arm)
    }

    /// Returns whether the owner can sleep while commands are outstanding: the queue pair has an
    /// interrupt of its own, so [`QueuePair::arm`] can succeed.
    pub fn can_wake(&self) -> bool {
        self.core.as_ref().is_some_and(|core| core.can_wake())
    }

    /// Returns the maximum time to sleep before polling again without a signal, because a command
    /// may have timed out. `None` if no command is outstanding.
    pub fn until_tick(&self) -> Option<Duration> {
        let core = self.core.as_ref()?;
        (core.slots.in_flight() > 0).then(|| core.tick_len())
    }

    /// Returns whether the device is lost and may still access the memory of outstanding commands.
    /// In that case the memory must never be reused.
    #[inline]
    pub fn is_wild(&self) -> bool {
        self.core
            .as_ref()
            .is_some_and(|core| core.shared.state() == DeviceState::GoneWild)
    }
}
