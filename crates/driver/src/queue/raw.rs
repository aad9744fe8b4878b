//! Commands that another layer made: mediation's way into a queue pair, next to requests.
//!
//! A raw command is a guest's, checked and translated by its owner. The queue pair gives it an
//! identifier with a sequence, names its data by PRPs or an SGL in list pages of its own, keeps it
//! for replay after a reset, and looks after its time, as with any other command. What it does not
//! do is keep the memory: the submitter keeps every address accessible to the device, and its
//! memory in place, until the completion, or until the queue pair is dropped and the device is
//! known not to be wild ([`QueuePair::is_wild`]).

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
use crate::control::State;
use crate::error::{CommandError, Refusal};

/// Where a raw command's data is, in addresses of the device.
#[derive(Clone, Copy, Debug)]
pub enum RawData<'a> {
    /// There is none.
    None,
    /// `len` bytes in one piece.
    At {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// `len` bytes from byte `skip` of the ranges on, which
    /// [`QueuePair::method`] found a method for.
    Ranges {
        /// How they are named.
        method: Method,
        /// All of the transfer.
        ranges: &'a [IovaRange],
        /// Bytes of it that other commands carry, before this one.
        skip: u64,
        /// Bytes that this command carries.
        len: u64,
    },
    /// The data themselves, as 64-bit words: they are copied into a page of the queue pair's
    /// own. At most a memory page.
    Words(&'a [u64]),
}

impl QueueCore {
    /// Submits a command. Of `command` the opcode, the namespace and command dwords 10 to
    /// 15 are taken, nothing else.
    #[inline]
    pub fn push_raw(
        &mut self,
        command: &Command,
        data: RawData<'_>,
        user_data: u64,
    ) -> Result<u16, Refusal> {
        if self.dead {
            return Err(Refusal::Gone);
        }
        let Some(index) = self.slots.next() else {
            return Err(Refusal::Full);
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
            _ => return Err(Refusal::Range),
        };
        let tick = self.tick;
        let Some(slot) = self.slots.begin(index) else {
            return Err(Refusal::Full);
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

    /// Bytes of data that one command carries at most.
    #[inline]
    fn max_bytes(&self) -> u64 {
        u64::from(self.max_blocks()) << self.block_shift
    }
}

/// Who is told of raw commands that have completed.
pub trait Ended {
    /// One has worked. Dword 0 is of its completion.
    fn worked(&mut self, user_data: u64, dw0: u32);

    /// One has failed.
    fn failed(&mut self, user_data: u64, error: CommandError, dw0: u32);
}

/// Raw commands have no buffers.
struct Raw<'a, E>(&'a mut E);

impl<E: Ended> Sink for Raw<'_, E> {
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
    /// Submits a command that the caller made, to any namespace of the device. Its opcode,
    /// namespace and command dwords 10 to 15 go to the device as they are; nothing in them is
    /// checked here, nor any address of `data`. Nothing is rung before [`QueuePair::ring`] or
    /// [`QueuePair::poll`]. Commands must be such that executing them twice is the same as once,
    /// for they are repeated after a reset.
    ///
    /// # Errors
    /// [`Refusal::Full`], [`Refusal::Gone`], or [`Refusal::Range`] for more data
    /// than a command can carry.
    #[inline]
    pub fn submit_raw(
        &mut self,
        command: &Command,
        data: RawData<'_>,
        user_data: u64,
    ) -> Result<(), Refusal> {
        let core = self.core().ok_or(Refusal::Gone)?;
        core.push_raw(command, data, user_data).map(drop)
    }

    /// As [`QueuePair::poll`], without a rest when nothing has completed: for a thread that looks
    /// at other things too, and whose commands are raw.
    #[inline]
    pub fn look(&mut self, ended: &mut impl Ended) -> usize {
        match self.core.as_deref_mut() {
            Some(core) => core.look(&mut Raw(ended), false),
            None => 0,
        }
    }

    /// No command is taken any more, whatever room there is: [`Refusal::Gone`].
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.core.as_ref().is_none_or(|core| core.dead)
    }

    /// Commands that can be submitted now.
    #[inline]
    pub fn room(&self) -> usize {
        self.core
            .as_ref()
            .map_or(0, |core| core.slots.count() - core.slots.in_flight())
    }

    /// How a scattered transfer can be named to this device; `None` when it cannot, and must
    /// be copied to where it can.
    #[inline]
    pub fn method(&self, ranges: &[IovaRange]) -> Option<Method> {
        let core = self.core.as_ref()?;
        core.shape().method(ranges, core.lists.each())
    }

    /// Bytes of data that one command carries at most.
    pub fn max_bytes(&self) -> u64 {
        self.core.as_ref().map_or(0, |core| core.max_bytes())
    }

    /// The device's memory page in bytes (CC.MPS).
    pub fn page_size(&self) -> u64 {
        self.core.as_ref().map_or(4096, |core| core.shape().page)
    }

    /// Before the owner sleeps on [`QueuePair::eventfd`]: consumes what was signalled so far.
    /// `true`: nothing waits here, and what completes from now on signals. `false`: poll again.
    pub fn arm(&mut self) -> bool {
        self.core().is_none_or(QueueCore::arm)
    }

    /// Whether [`QueuePair::arm`] can say yes while commands are in flight: the queue pair
    /// has an interrupt to itself.
    pub fn can_wake(&self) -> bool {
        self.core.as_ref().is_some_and(|core| core.can_wake())
    }

    /// After how long to poll again at the latest although nothing was signalled: a command may
    /// have reached its time-out.
    pub fn until_tick(&self) -> Option<Duration> {
        let core = self.core.as_ref()?;
        (core.slots.in_flight() > 0).then(|| core.tick_len())
    }

    /// The device is gone and may still touch the memory of commands that were in flight: that
    /// memory must never be used for anything else.
    #[inline]
    pub fn is_wild(&self) -> bool {
        self.core
            .as_ref()
            .is_some_and(|core| core.shared.state() == State::GoneWild)
    }
}
