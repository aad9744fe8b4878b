//! What is in flight on a physical queue pair, and whose it is.

use dma::Pin;
use driver::Device;
use driver::iova::Tables;
use nvme::Status;

use crate::bounce::{Bounces, copy};
use crate::entry::{Done, Entry};

/// Looks at the physical queue pair after which one that asked for room in vain, and has not asked again, is taken to want
/// none.
const PATIENCE: u64 = 1024;

/// A virtual queue pair, as the lane knows it.
#[derive(Debug, Default)]
pub(crate) struct Client {
    pub open: bool,
    pub in_flight: usize,
    /// When it asked for room last and got none, in rounds of the lane.
    pub hungry: Option<u64>,
    /// Its commands that ended while another one polled.
    pub inbox: Vec<Done>,
}

impl Client {
    pub fn at_work(&self, round: u64) -> bool {
        let waits = |since: u64| round.wrapping_sub(since) < PATIENCE;
        self.in_flight > 0 || self.hungry.is_some_and(waits)
    }
}

/// The commands in flight, what they hold, and the virtual queue pairs that they are of.
#[derive(Debug)]
pub(crate) struct Flight {
    pub entries: Vec<Entry>,
    /// Numbers of entries that are not in use.
    pub free: Vec<u16>,
    pub tables: Tables,
    pub bounces: Bounces,
    pub clients: Vec<Client>,
}

impl Flight {
    pub fn new(device: &Device, depth: usize) -> Self {
        Self {
            entries: (0..depth).map(|_| Entry::new()).collect(),
            free: (0..depth as u16).rev().collect(),
            tables: Tables::new(device.mapper()),
            bounces: Bounces::new(device.clone()),
            clients: Vec::new(),
        }
    }

    /// A part of a command is over. Whose command is over with it, if it was the last.
    #[inline]
    pub fn part_over(
        &mut self,
        index: u16,
        status: Status,
        dw0: u32,
        wild: bool,
    ) -> Option<(usize, Done)> {
        let entry = self.entries.get_mut(usize::from(index))?;
        if !entry.busy {
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
        entry.busy = false;
        let pin = entry.pin.take();
        if wild || entry.bounce.is_some() {
            rare(entry, &mut self.bounces, pin, wild);
        }
        let done = Done {
            token: entry.token,
            status: entry.status,
            dw0: entry.dw0,
        };
        let owner = entry.client;
        self.tables.release(entry.table);
        self.free.push(index);
        if let Some(client) = self.clients.get_mut(owner) {
            client.in_flight = client.in_flight.saturating_sub(1);
        }
        Some((owner, done))
    }

    /// Hands a command's end to its owner: into `out` if that is `client`, else into the owner's inbox.
    #[inline]
    pub fn deliver(&mut self, owner: usize, done: Done, client: usize, out: &mut Vec<Done>) {
        if owner == client {
            out.push(done);
        } else if let Some(owner) = self.clients.get_mut(owner)
            && owner.open
        {
            owner.inbox.push(done);
        }
    }
}

/// The end of a command whose data went through a copy, or whose memory the device may still write: nobody else may have
/// that, ever.
#[cold]
fn rare(entry: &mut Entry, bounces: &mut Bounces, pin: Option<Pin>, wild: bool) {
    if wild {
        std::mem::forget(pin);
        std::mem::forget(entry.bounce.take());
    } else if let Some((buffer, data)) = entry.bounce.take() {
        let wanted = entry.read && entry.status.is_success();
        if wanted && !copy(&data, &buffer, false) {
            entry.status = Status::DATA_TRANSFER_ERROR;
        }
        bounces.give_back(buffer);
    }
}
