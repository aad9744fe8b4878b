//! Outstanding commands of a physical queue pair, and their owners.

use driver::Device;
use driver::iova::Tables;
use nvme::Status;

use crate::bounce::{Bounces, copy};
use crate::entry::{CompletedCommand, Copied, EntryUse, InFlight};

/// Number of polls of the physical queue pair after which a virtual one that asked for room without
/// success, and has not asked again, no longer counts as waiting.
const WAITING_ROUNDS: u64 = 1024;

/// Virtual queue pair (of a guest) that uses a queue pair of the device.
#[derive(Debug, Default)]
pub(crate) struct Client {
    pub open: bool,
    pub in_flight: usize,
    /// Round of the lane in which the virtual queue pair last asked for room without success.
    pub hungry: Option<u64>,
    /// Results of commands that completed while another virtual queue pair was polled.
    pub inbox: Vec<CompletedCommand>,
}

impl Client {
    pub fn at_work(&self, round: u64) -> bool {
        let waits = |since: u64| round.wrapping_sub(since) < WAITING_ROUNDS;
        self.in_flight > 0 || self.hungry.is_some_and(waits)
    }
}

/// Outstanding commands on a queue pair of the device, and the virtual queue pairs they belong to.
#[derive(Debug)]
pub(crate) struct Flight {
    pub entries: Vec<InFlight>,
    /// Copies of guest data, for commands that the device executes on a copy.
    copies: Vec<Option<Copied>>,
    /// Indices of the unused entries.
    pub free: Vec<u16>,
    pub tables: Tables,
    pub bounces: Bounces,
    pub clients: Vec<Client>,
}

impl Flight {
    pub fn new(device: &Device, depth: usize) -> Self {
        Self {
            entries: (0..depth).map(|_| InFlight::new()).collect(),
            copies: (0..depth).map(|_| None).collect(),
            free: (0..depth as u16).rev().collect(),
            tables: Tables::new(device.mapper()),
            bounces: Bounces::new(device.clone()),
            clients: Vec::new(),
        }
    }

    /// Processes a command that the device completed successfully. Returns the owner and the result
    /// if it was a simple command.
    #[inline(always)]
    pub fn worked(&mut self, index: u16, dw0: u32) -> Option<(usize, CompletedCommand)> {
        let entry = self.entries.get_mut(usize::from(index))?;
        if entry.used != EntryUse::Simple {
            return self.part_over(index, Status::SUCCESS, dw0, false);
        }
        entry.used = EntryUse::Free;
        entry.pin = None;
        let done = CompletedCommand::new(entry.token, Status::SUCCESS, dw0);
        let (owner, table) = (entry.client, entry.table);
        self.free(index, owner, table);
        Some((owner, done))
    }

    /// Processes the completion of a part. Returns the owner and the result after the last part of
    /// a command.
    #[inline(never)]
    pub fn part_over(
        &mut self,
        index: u16,
        status: Status,
        dw0: u32,
        wild: bool,
    ) -> Option<(usize, CompletedCommand)> {
        let entry = self.entries.get_mut(usize::from(index))?;
        if entry.used == EntryUse::Free {
            return None;
        }
        if !status.is_success() && entry.status.is_success() {
            entry.status = status;
        }
        entry.dw0 = dw0;
        entry.parts = entry.parts.saturating_sub(1);
        if entry.parts > 0 {
            return None;
        }
        let pin = entry.pin.take();
        let copied = std::mem::take(&mut entry.copied)
            .then(|| {
                self.copies
                    .get_mut(usize::from(index))
                    .and_then(Option::take)
            })
            .flatten();
        if wild {
            // The device may still write there: that memory is never used again.
            std::mem::forget(pin);
            std::mem::forget(copied);
        } else if let Some((buffer, data)) = copied {
            let wanted = entry.read && entry.status.is_success();
            if wanted && !copy(&data, &buffer, false) {
                entry.status = Status::DATA_TRANSFER_ERROR;
            }
            self.bounces.recycle(buffer);
        }
        entry.used = EntryUse::Free;
        let done = CompletedCommand::new(entry.token, entry.status, dw0);
        let (owner, table) = (entry.client, entry.table);
        self.free(index, owner, table);
        Some((owner, done))
    }

    /// Frees the entry of a command that has ended.
    #[inline(always)]
    fn free(&mut self, index: u16, owner: usize, table: u64) {
        self.tables.release(table);
        self.free.push(index);
        if let Some(client) = self.clients.get_mut(owner) {
            client.in_flight = client.in_flight.saturating_sub(1);
        }
    }

    /// Stores the copy of the guest's data that the device works on.
    pub fn keep_copy(&mut self, index: u16, copied: Copied) {
        let at = usize::from(index);
        if let (Some(entry), Some(place)) = (self.entries.get_mut(at), self.copies.get_mut(at)) {
            entry.copied = true;
            *place = Some(copied);
        }
    }

    /// Drops the copy of data for a command that was not submitted.
    pub fn drop_copy(&mut self, index: u16) {
        let at = usize::from(index);
        if let Some(entry) = self.entries.get_mut(at)
            && std::mem::take(&mut entry.copied)
            && let Some((buffer, _)) = self.copies.get_mut(at).and_then(Option::take)
        {
            self.bounces.recycle(buffer);
        }
    }

    /// Delivers a command's result to its owner: into `out` if that is `client`, otherwise into the
    /// owner's inbox.
    #[inline(always)]
    pub fn deliver(
        &mut self,
        owner: usize,
        done: CompletedCommand,
        client: usize,
        out: &mut Vec<CompletedCommand>,
    ) {
        if owner == client {
            out.push(done);
        } else if let Some(owner) = self.clients.get_mut(owner)
            && owner.open
        {
            owner.inbox.push(done);
        }
    }
}
