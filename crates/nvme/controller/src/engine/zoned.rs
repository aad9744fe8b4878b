//! Commands of zoned namespaces ("NVMe Zoned Namespace Command Set 1.1", 3.3 and 3.4).
//!
//! *Writes take effect on the zone when they are checked.* The write pointer moves behind a write
//! before the volume gets the request, so that several writes may be outstanding. If the write then
//! fails, the pointer stays there, with the blocks unwritten. The host sees the status, and
//! finishes or resets the zone (ibid., 2.1.1.2.1: a failed write does not move the pointer back).
//!
//! *Restart.* A command is recorded after it was checked and its location is known; a Zone Append
//! is recorded with that location. Then its zone's word is stored, and then the volume gets the
//! request. A record without its word is therefore the last one, and is applied on replay. A record
//! with its word is replayed at its location. A reset waits until no write of its zones is
//! outstanding, so that no older write is replayed over newer data.
//!
//! *Several workers* share the state of the zones. A worker holds the lock from the check of a
//! command until its record and the zones' words are stored, so that the rule about the last record
//! holds for all workers together. Writes are ordered by their checks. The next process has the
//! records of all workers without their order, which does not matter: a write whose word is stored
//! can be replayed at any time, and Zone Management Send continues after all commands were
//! replayed. A reset moves the write pointers of all its zones at once, after their data is gone.
//! Still under the lock, its record is then marked as applied
//! ([`Records::mark_applied`](super::journal::Records::mark_applied)), as for every change by Zone
//! Management Send, so that a replay does not undo later changes of the zone by other workers. A
//! write counts as outstanding until its record is removed.
//!
//! *Controllers of a subsystem* share the state in the same way, but record nothing, because they
//! end with their process. A reset waits for the writes of all of them, and checks in each round,
//! so that no wake-up is needed. The wait is short, because a write counts only while its volume
//! has it, whatever its guest does. When an engine is dropped, its outstanding requests end with it
//! ([`leave_zones`]), so that no reset waits for them.
//!
//! *A Zone Random Write Area* (ibid., ZRWA) only affects which writes a zone accepts, and the write
//! pointer after them. Data is written to the volume at once, and can be read and overwritten; the
//! host's flush of the area only moves the pointer. A write to the area, or an action that is
//! refused when repeated, is recorded only after its check, and the next process does not execute
//! it a second time.
//!
//! *Durability.* The words are in memory that is mapped from the table's file. Flush, Force Unit
//! Access and each change of a zone by Zone Management Send complete only after the file was
//! flushed, which follows the flush of the data. The write pointer is therefore never behind data
//! that was reported durable. The pointer may be ahead of it, by writes that no host has seen
//! complete.
//!
//! *A reset* zeroes the written blocks piece by piece before the zone becomes empty: a crash or
//! power loss in the middle leaves the write pointer unchanged. Blocks behind the write pointer
//! read as the volume has them.

use super::execution::{Extent, status_of};
use super::slots::{Kind, RemainingWork, Slot, Slots, ZoneWrite, ZoneWriteKind};
use super::{Execution, Namespace, NamespaceTable};
use crate::prefix;
use crate::zoned::ZonedState;
use dma::{Access, SegmentList};
use nvme::cmd::io::{RwCdw12, WriteZeroesCdw12};
use nvme::cmd::zone::{ReceiveCdw13, ReportHeader, SendCdw13, ZoneDescriptor, Zra, Zsa};
use nvme::{Command, NvmOpcode, Status};
use std::sync::Arc;
use std::time::Instant;
use volume::{Completion, Io, IoError, IoErrorKind, Op, OpenQueue, QueueState, Request};
use volume::{Volume, VolumeError, VolumeQueue};
use zerocopy::IntoBytes;
use zones::{Action, Filter, Reported, ZoneRefusal};

/// Maximum length in bytes of one request that zeroes a part of a zone during a reset.
const PIECE: u64 = 16 << 20;

/// Byte offset that identifies a flush of the table. Flushes of the namespace have offset 0.
const TABLE: u64 = u64::MAX;

/// Progress of a Zone Management Send command.
#[derive(Default)]
pub(super) struct ZoneSend {
    /// Zones that the Zone Management Send command resets.
    resets: Vec<Reset>,
    /// Index of the first zone to handle; earlier ones have no outstanding write, or no data.
    next: usize,
    /// Whether writes to the zones of the command may still be outstanding.
    waits: bool,
    /// Whether the table that stores the states of zones is being flushed.
    flushing: bool,
}

/// Action of a Zone Management Send command.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ZoneSendAction {
    Act(Action),
    /// Open Zone with a random write area (ZRWAA).
    OpenWithZrwa,
    /// Flush Explicit ZRWA Range: moves the write pointer to the end of the flushed range.
    Flush,
    Reset,
}

/// A zone that is being reset.
struct Reset {
    zone: u32,
    /// Byte offset and length of the data that is left to zero.
    offset: u64,
    left: u64,
}

impl ZoneSend {
    /// Returns the zone to reset now, if any is left.
    fn reset(&self) -> Option<&Reset> {
        self.resets.get(self.next)
    }
}

impl Reset {
    fn piece(&self) -> u64 {
        self.left.min(PIECE)
    }
}

impl Execution<'_> {
    /// Starts Write, Write Zeroes or Zone Append on a zoned namespace.
    pub(super) fn zoned_write(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let opcode = command.nvm_opcode();
        let (zeroes, append) = (
            opcode == NvmOpcode::WRITE_ZEROES,
            opcode == NvmOpcode::ZONE_APPEND,
        );
        let cdw12 = RwCdw12::from_bits(command.cdw12.get());
        let blocks = u64::from(cdw12.nlb());
        let index = self.namespaces.index_of(command.nsid.get())?;
        let zoned = self.namespaces.zones_of(index)?;
        let ns = self.namespaces.get(index).ok_or(Status::INTERNAL_ERROR)?;
        let shift = ns.shift;
        if ns.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
        }
        let len = blocks << shift;
        if !zeroes && len > self.settings.max_transfer {
            return Err(Status::INVALID_FIELD.with_dnr(true));
        }
        // The zones are not locked here, because guest memory may have to be waited for.
        let mut list = std::mem::take(&mut self.slots.spare);
        let walked = if zeroes {
            Ok(())
        } else {
            self.walk(command, len, Access::Read, &mut list)
        };
        let started = self.take_write(sqid, command, (index, &zoned), (zeroes, append), walked);
        let (slot, slba) = match started {
            Ok(started) => started,
            Err(status) => {
                list.clear();
                self.slots.spare = list;
                return Err(status);
            }
        };
        crash::point!("controller.zone.taken");
        let fua = cdw12.fua() || !self.settings.features.write_cache;
        let (op, kind) = if zeroes {
            let deallocate = WriteZeroesCdw12::from_bits(command.cdw12.get()).deac();
            (Op::WriteZeroes { deallocate, fua }, Kind::Other)
        } else {
            (Op::Write { fua }, Kind::of_transfer(Op::Write { fua }))
        };
        if let Some(slot) = self.slots.get(slot) {
            let spare = std::mem::replace(&mut slot.list, list);
            self.slots.spare = spare;
        }
        let extent = Extent {
            ns: index,
            slba,
            offset: slba << shift,
            len,
        };
        self.start(slot, extent, op, kind);
        Ok(())
    }

    /// Under the lock of the zones, checks a write, records it, and moves the write pointer.
    /// Returns its slot and its first block.
    fn take_write(
        &mut self,
        sqid: u16,
        command: &Command,
        (index, zoned): (usize, &ZonedState),
        (zeroes, append): (bool, bool),
        walked: Result<(), Status>,
    ) -> Result<(u16, u64), Status> {
        let ns = self.namespaces.get(index).ok_or(Status::INTERNAL_ERROR)?;
        let blocks = RwCdw12::from_bits(command.cdw12.get()).nlb();
        let count = u64::from(blocks);
        // The lock keeps other workers from using blocks of the zone meanwhile.
        let mut zones = zoned.lock();
        let slba = command.slba();
        let replayed = self.slots.is_reserved();
        let taken = replayed && zones.is_taken(slba, count);
        let placed = match append && !replayed {
            true => zones.check_append(slba, count),
            false if taken => Ok(slba),
            false if !ns.covers(slba, count) => Err(ZoneRefusal::OutOfRange),
            false => zones.check_write(slba, count).map(|()| slba),
        };
        let slba = placed.map_err(ZoneRefusal::status)?;
        let zone = zoned.geometry().zone_of(slba);
        let zone = zone.ok_or(ZoneRefusal::OutOfRange.status())?;
        walked?;
        let mut recorded = *command;
        recorded.set_slba(slba);
        let slot = self.slot_for(sqid, &recorded, index)?;
        crash::point!("controller.zone.recorded");
        if !taken {
            zones.write(slba, count).map_err(ZoneRefusal::status)?;
            zoned.keep(&mut zones);
        }
        zoned.begin_write(&mut zones, zone);
        if let Some(slot) = self.slots.get(slot) {
            let kind = match (zeroes, append) {
                (true, _) => ZoneWriteKind::Zeroes(blocks),
                (_, true) => ZoneWriteKind::Append,
                _ => ZoneWriteKind::Write,
            };
            slot.work = RemainingWork::ZoneWrite(ZoneWrite { zone, kind });
        }
        Ok((slot, slba))
    }

    // ---- Zone Management Receive

    /// Executes Zone Management Receive, which reports zones. Zone descriptor extensions are not
    /// supported.
    pub(super) fn zone_receive(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let invalid = Status::INVALID_FIELD.with_dnr(true);
        let cdw13 = ReceiveCdw13::from_bits(command.cdw13.get());
        let bytes = (u64::from(command.cdw12.get()) + 1) * 4;
        let index = self.namespaces.index_of(command.nsid.get())?;
        let zoned = self.namespaces.zones_of(index)?;
        if cdw13.zra() != Zra::REPORT || bytes > self.settings.max_transfer {
            return Err(invalid);
        }
        let filter = Filter::of(cdw13.zrasf()).ok_or(invalid)?;
        let slot = self.slot_for(sqid, command, index)?;
        let mut list = SegmentList::new();
        self.walk(command, bytes, Access::Write, &mut list)?;
        let slba = command.slba();
        if slba >= zoned.geometry().blocks() {
            return Err(Status::LBA_OUT_OF_RANGE.with_dnr(true));
        }
        let room = bytes.saturating_sub(64) / 64;
        let zones = zoned.lock();
        let found: Vec<Reported> = zones.report(slba, filter).take(room as usize).collect();
        let count = if cdw13.partial() {
            found.len()
        } else {
            zones.report(slba, filter).count()
        };
        // The lock is released here, because guest memory may have to be waited for.
        drop(zones);
        let mut at = 64;
        for zone in &found {
            list.copy_from(at, descriptor(zone).as_bytes());
            at += 64;
        }
        let header = ReportHeader {
            zones: (count as u64).into(),
            ..Default::default()
        };
        list.copy_from(0, prefix(header.as_bytes(), bytes as usize));
        drop(list);
        if let Some(slot) = self.slots.get(slot) {
            slot.bytes = at.min(bytes);
        }
        self.end(slot);
        Ok(())
    }

    // ---- Zone Management Send

    /// Starts Zone Management Send.
    pub(super) fn zone_send(&mut self, sqid: u16, command: &Command) -> Result<(), Status> {
        let cdw13 = SendCdw13::from_bits(command.cdw13.get());
        let index = self.namespaces.index_of(command.nsid.get())?;
        let zoned = self.namespaces.zones_of(index)?;
        let ns = self.namespaces.get(index).ok_or(Status::INTERNAL_ERROR)?;
        let shift = ns.shift;
        if ns.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
        }
        let all = cdw13.select_all();
        let of_zrwa = !all && zoned.geometry().zrwa.is_some();
        let action = match cdw13.zsa() {
            Zsa::CLOSE => ZoneSendAction::Act(Action::Close),
            Zsa::FINISH => ZoneSendAction::Act(Action::Finish),
            Zsa::OPEN if !cdw13.zsaso() => ZoneSendAction::Act(Action::Open),
            // Select All would apply only to closed zones, which cannot get a random write area.
            Zsa::OPEN if of_zrwa => ZoneSendAction::OpenWithZrwa,
            Zsa::OFFLINE => ZoneSendAction::Act(Action::Offline),
            Zsa::RESET => ZoneSendAction::Reset,
            Zsa::FLUSH_ZRWA if of_zrwa => ZoneSendAction::Flush,
            // Zone descriptor extensions are not supported.
            _ => return Err(Status::INVALID_FIELD.with_dnr(true)),
        };
        let slba = command.slba();
        let mut zones = zoned.lock();
        let zone = if all || action == ZoneSendAction::Flush {
            None
        } else {
            Some(zones.zone_at(slba).map_err(ZoneRefusal::status)?)
        };
        let allowed = match (action, zone) {
            (ZoneSendAction::OpenWithZrwa, Some(zone)) => zones.check_open_with_zrwa(zone),
            (ZoneSendAction::Flush, _) => zones.check_flush(slba),
            _ => Ok(()),
        };
        // The previous process has executed the action if its record says so, or if the action was
        // recorded and is not allowed any more.
        let again = self.slots.is_reserved();
        let taken = self.slots.is_applied() || (allowed.is_err() && again);
        if !taken {
            allowed.map_err(ZoneRefusal::status)?;
        }
        let slot = self.slot_for(sqid, command, index)?;
        crash::point!("controller.zone.sent");
        let mut sending = ZoneSend::default();
        match (action, zone) {
            _ if taken => {}
            (ZoneSendAction::Act(action), Some(zone)) => {
                zones.act(zone, action).map_err(ZoneRefusal::status)?
            }
            (ZoneSendAction::Act(action), None) => {
                zones.act_on_all(action).map_err(ZoneRefusal::status)?
            }
            (ZoneSendAction::OpenWithZrwa, Some(zone)) => {
                zones.open_with_zrwa(zone).map_err(ZoneRefusal::status)?;
            }
            (ZoneSendAction::OpenWithZrwa | ZoneSendAction::Flush, _) => {
                zones.flush(slba).map_err(ZoneRefusal::status)?
            }
            (ZoneSendAction::Reset, zone) => {
                let all = match zone {
                    Some(zone) => vec![zone],
                    None => zones.resettable().map_err(ZoneRefusal::status)?,
                };
                for zone in all {
                    // With Select All no zone is refused, because all were just checked.
                    let (lba, blocks) = zones.begin_reset(zone).map_err(ZoneRefusal::status)?;
                    sending.resets.push(Reset {
                        zone,
                        offset: lba << shift,
                        left: blocks << shift,
                    });
                }
                sending.waits = true;
            }
        }
        zoned.keep(&mut zones);
        crash::point!("controller.zone.changed");
        // A reset is applied at its end.
        if !sending.waits {
            self.slots.mark_applied(slot);
        }
        drop(zones);
        if let Some(slot) = self.slots.get(slot) {
            slot.kind = Kind::Other;
            slot.slba = command.slba();
            slot.work = RemainingWork::ZoneSend(Box::new(sending));
        }
        // A replayed command continues after all commands of the previous process were replayed,
        // because later ones may have written its zones.
        if again || self.next_send(slot) {
            self.slots.parked.push_back(slot);
        }
        Ok(())
    }

    /// Executes the next step of Zone Management Send. Returns `true` when the command has to wait
    /// for others, and is continued in a later round.
    #[must_use]
    pub(super) fn next_send(&mut self, index: u16) -> bool {
        let Some(slot) = self.slots.get(index) else {
            self.broken("Zone Management Send goes on without its slot");
            return false;
        };
        let (ns, failed) = (slot.ns, !slot.status.is_success());
        let RemainingWork::ZoneSend(sending) = &mut slot.work else {
            self.broken("Zone Management Send goes on in another command's slot");
            return false;
        };
        let mut sending = std::mem::take(&mut **sending);
        let Ok(zoned) = self.namespaces.zones_of(ns) else {
            self.broken("a zone changes where there are none");
            return false;
        };
        if failed {
            let mut zones = zoned.lock();
            let done = if sending.waits { 0 } else { sending.next };
            for (number, reset) in sending.resets.iter().enumerate() {
                if number < done {
                    zones.end_reset(reset.zone)
                } else {
                    zones.cancel_reset(reset.zone)
                }
            }
            zoned.keep(&mut zones);
            drop(zones);
            self.end(index);
            return false;
        }
        if sending.waits {
            let writes = |reset: &Reset| zoned.is_written_to(reset.zone);
            let rest = sending.resets.iter().skip(sending.next);
            if let Some(more) = rest.into_iter().position(writes) {
                sending.next += more;
                self.put_back(index, sending);
                return true;
            }
            (sending.next, sending.waits) = (0, false);
        }
        while sending.reset().is_some_and(|reset| reset.left == 0) {
            sending.next += 1;
        }
        if sending.reset().is_none() && !sending.resets.is_empty() {
            let mut zones = zoned.lock();
            for reset in sending.resets.drain(..) {
                zones.end_reset(reset.zone);
            }
            zoned.keep(&mut zones);
            crash::point!("controller.zone.reset");
            // Other workers may write to the zones as soon as the lock is released.
            self.slots.mark_applied(index);
        }
        let (op, offset, len) = match sending.reset() {
            Some(reset) => {
                let zero = Op::WriteZeroes {
                    deallocate: true,
                    fua: false,
                };
                (zero, reset.offset, reset.piece())
            }
            None => match zoned.table() {
                None => {
                    self.end(index);
                    return false;
                }
                Some(table) if table.is_lost() => {
                    if let Some(slot) = self.slots.get(index) {
                        slot.status = Status::WRITE_FAULT;
                    }
                    self.end(index);
                    return false;
                }
                Some(_) => {
                    sending.flushing = true;
                    (Op::Flush, TABLE, 0)
                }
            },
        };
        let (flushing, tag) = (sending.flushing, self.slots.tag(index));
        self.put_back(index, sending);
        let Some(ns) = self.namespaces.get_mut(ns) else {
            self.broken("a slot's namespace is not there");
            return false;
        };
        let request = Request::without_data(tag, op, offset, len);
        if let Some(completion) = ns.queue.submit(request) {
            if flushing {
                self.zone_sent(index, completion.result)
            } else {
                self.zone_piece_done(index, completion.result);
                self.slots.parked.push_front(index);
            }
        }
        false
    }

    fn put_back(&mut self, index: u16, sending: ZoneSend) {
        if let Some(slot) = self.slots.get(index)
            && let RemainingWork::ZoneSend(place) = &mut slot.work
        {
            **place = sending;
        }
    }

    /// Handles the completion of a volume request of Zone Management Send.
    pub(super) fn zone_sent(&mut self, index: u16, result: Result<(), IoError>) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("Zone Management Send goes on without its slot");
        };
        if let RemainingWork::ZoneSend(sending) = &slot.work
            && sending.flushing
        {
            if let Err(error) = result {
                slot.status = status_of(error, true);
            }
            return self.end(index);
        }
        self.zone_piece_done(index, result);
        self.end_early(index);
        if self.next_send(index) {
            self.slots.parked.push_back(index);
        }
    }

    fn zone_piece_done(&mut self, index: u16, result: Result<(), IoError>) {
        let Some(slot) = self.slots.get(index) else {
            return;
        };
        match result {
            // The old data remains behind the write pointer.
            Err(error) if error.kind != IoErrorKind::Unsupported => {
                slot.status = status_of(error, true);
                return;
            }
            _ => {}
        }
        if let RemainingWork::ZoneSend(sending) = &mut slot.work
            && let Some(reset) = sending.resets.get_mut(sending.next)
        {
            let piece = reset.piece();
            reset.offset += piece;
            reset.left -= piece;
        }
    }

    // ---- the table

    /// Flushes the namespace's table (of zones or metadata) before a command completes that has to
    /// be durable. Returns `false` when no flush is needed.
    pub(super) fn waits_for_table(&mut self, index: u16, completion: &mut Completion) -> bool {
        let Some(slot) = self.slots.get(index) else {
            return false;
        };
        if std::mem::take(&mut slot.table) || completion.result.is_err() || !makes_durable(slot) {
            return false;
        }
        let (ns, own) = (slot.ns, matches!(slot.work, RemainingWork::OwnFlush));
        let namespace = self.namespaces.get(ns);
        let Some((_, lost)) = namespace.and_then(|ns| ns.config.table()) else {
            return false;
        };
        // A table that is about to be recreated has nothing to make durable.
        if lost && own && namespace.is_some_and(Namespace::loses_table) {
            return false;
        }
        if lost {
            completion.result = Err(IoErrorKind::NotDurable.into());
            return false;
        }
        if let Some(slot) = self.slots.get(index) {
            slot.table = true;
            if completion.data.buffer().is_none() {
                slot.list = std::mem::take(&mut completion.data);
            }
        }
        self.submit(index, ns, Op::Flush, TABLE, 0, SegmentList::new());
        true
    }
}

/// Gives up the zones when an engine is dropped: its writes are no longer outstanding, and its
/// unfinished resets are cancelled. Other users of the zones continue.
pub(super) fn leave_zones(namespaces: &mut NamespaceTable, slots: &Slots) {
    if !namespaces.iter().any(Namespace::is_zoned) {
        return;
    }
    // The volume queues are dropped first, which waits until the kernel has finished their
    // requests.
    let namespaces = std::mem::take(&mut namespaces.list).into_iter();
    let zones: Vec<_> = namespaces.map(|ns| ns.config.zones.clone()).collect();
    for (ns, work) in slots.in_flight() {
        let Some(Some(zoned)) = zones.get(ns) else {
            continue;
        };
        match work {
            RemainingWork::ZoneWrite(write) => zoned.end_write(write.zone),
            RemainingWork::ZoneSend(sending) => {
                zoned.cancel_resets(sending.resets.iter().map(|reset| reset.zone));
            }
            _ => {}
        }
    }
}

/// Returns whether a command's changes have to be durable when the command completes.
fn makes_durable(slot: &Slot) -> bool {
    if let RemainingWork::Metadata(moving) = &slot.work {
        return moving.makes_durable();
    }
    if let RemainingWork::Copy(copying) = &slot.work {
        return copying.makes_durable();
    }
    let zeroes = ZoneWriteKind::is_zeroes;
    matches!(
        slot.work,
        RemainingWork::FlushAll(_) | RemainingWork::OwnFlush
    ) || matches!(&slot.work, RemainingWork::ZoneWrite(write) if zeroes(write.kind))
        || matches!(slot.kind, Kind::Flush | Kind::DurableWrite)
}

fn descriptor(zone: &Reported) -> ZoneDescriptor {
    ZoneDescriptor {
        zt: ZoneDescriptor::SEQUENTIAL_WRITE_REQUIRED,
        zs: zone.state.number() << 4,
        za: if zone.zrwa { ZoneDescriptor::ZRWAV } else { 0 },
        zcap: zone.capacity.into(),
        zslba: zone.start.into(),
        wp: zone.write_pointer.into(),
        ..Default::default()
    }
}

/// Queue of a namespace's volume, combined with a queue of its table, which gets the flushes with
/// offset [`TABLE`].
struct WithTable {
    data: OpenQueue,
    table: OpenQueue,
}

/// Returns a queue that combines the queue of the volume with one of the table's file.
pub(super) fn with_table(
    data: OpenQueue,
    table: &Arc<dyn Volume>,
    io: &Io,
) -> Result<OpenQueue, VolumeError> {
    let table = table.open(io)?;
    Ok(data.wrapped(|data| OpenQueue::new(WithTable { data, table })))
}

impl VolumeQueue for WithTable {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if request.op == Op::Flush && request.offset == TABLE {
            self.table.submit(Request {
                offset: 0,
                ..request
            })
        } else {
            self.data.submit(request)
        }
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        self.data.poll(done) + self.table.poll(done)
    }

    fn state(&self) -> QueueState {
        let (data, table) = (self.data.state(), self.table.state());
        QueueState {
            in_flight: data.in_flight + table.in_flight,
            wake: data.wake.earlier(table.wake, Instant::now),
        }
    }

    fn cancel(&mut self, tag: u64) {
        self.data.cancel(tag);
        self.table.cancel(tag);
    }
}
