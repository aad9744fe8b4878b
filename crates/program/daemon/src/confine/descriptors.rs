//! Limits on open descriptors of this process and of each client. The limits of all clients
//! together leave enough for the rest of the process, so that no client can exhaust the descriptors
//! of another.

use crate::front::kind::front_end;
use crate::serve::options::ClientLimits;
use anyhow::{Result, ensure};
use config::disk::DiskSpec;
use config::spec::{ControllerSpec, Specs};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Number of descriptors of the process itself: output, signals, the control socket with its
/// clients, the receiver process, NVMe devices of volumes.
const OWN: u64 = 128;
/// Number of descriptors of each worker: its ring, its epoll set, its wake-up eventfd, and a reply
/// of the receiver process.
const WORKER: u64 = 48;
/// Number of descriptors of each listening socket, without those that clients send: the socket, one
/// accepted connection and one that is refused, the connection to the receiver process, the disk's
/// volumes.
pub const SOCKET: u64 = 24;
/// Minimum number of memory files of a client. A common VMM has one for each NUMA node of its
/// guest, and one for each piece of device memory.
const FEWEST_FILES: u64 = 16;
/// Minimum number of disks that can be added after the start. A daemon reserves descriptors for as
/// many additional disks as it starts with, but at least for this number.
const MORE: usize = 64;
/// Usual number of descriptors of a client besides its memory files: interrupts of its queues.
const USUAL: u64 = 8;

/// Limit of open descriptors and number of workers, from which it follows how many disks fit.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    limit: Option<u64>,
    workers: usize,
}

impl Room {
    /// Checks that the limit allows the descriptors of all these disks.
    ///
    /// # Errors
    /// A message for the user when they exceed the limit.
    /// A sentence for the user.
    pub fn check(&self, specs: &Specs) -> Result<()> {
        let Some(limit) = self.limit else {
            return Ok(());
        };
        let clients = clients(specs);
        let needed =
            OWN + self.workers as u64 * WORKER + clients as u64 * (SOCKET + FEWEST_FILES + USUAL);
        ensure!(
            needed <= limit,
            "{clients} disks with their clients may need {needed} descriptors, more than the \
             limit of {limit} (raise it with ulimit -Hn or LimitNOFILE=)"
        );
        Ok(())
    }
}

/// Raises this process's descriptor limit to the maximum. Lowers the limit of each client if the
/// descriptors of all clients together would exceed it.
pub fn limit_clients(
    specs: &Specs,
    workers: usize,
    grows: bool,
    limits: &mut ClientLimits,
) -> Room {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let now = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(error) => {
            tracing::debug!(%error, "limit of open descriptors stays as it is");
            limit.current
        }
    };
    let wanted = limits.memory.mappings;
    let room = Room {
        limit: now,
        workers,
    };
    let Some(limit) = now else {
        return room;
    };
    let mut planned = specs.clone();
    if grows {
        let more = clients(specs).max(MORE);
        let more = vec![ControllerSpec::default(); more];
        planned.controllers.extend(more);
    }
    let files = files_of_each(&planned, workers, limit).min(wanted);
    if files < wanted {
        tracing::warn!(
            limit,
            "the limit of open descriptors is low (ulimit -Hn, LimitNOFILE=): each client may map \
             {files} memory files instead of {wanted}"
        );
        limits.memory.mappings = files;
    }
    room
}

/// Returns the number of disks whose clients send descriptors.
fn clients(specs: &Specs) -> usize {
    specs.iter().filter_map(|disk| disk.socket()).count()
}

/// Returns the number of memory files that each client may map if the process's limit is `limit`.
fn files_of_each(specs: &Specs, workers: usize, limit: u64) -> u64 {
    let clients = clients(specs);
    let left = limit.saturating_sub(taken(specs, workers));
    (left / clients.max(1) as u64).max(FEWEST_FILES)
}

/// Returns the number of descriptors that the disks need, except for clients' memory files.
fn taken(specs: &Specs, workers: usize) -> u64 {
    let disks = DiskSpec::all(specs);
    let disks = disks.iter().map(|disk| front_end(disk).descriptors());
    disks.sum::<u64>() + OWN + workers as u64 * WORKER
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::spec::VhostBlkSpec;

    #[test]
    fn clients_share_remaining_descriptors() {
        let specs = Specs {
            controllers: vec![ControllerSpec::default(); 4],
            vhost_user_blk: vec![VhostBlkSpec::default(); 4],
            ..Specs::default()
        };
        let files = |limit| files_of_each(&specs, 2, limit);
        let (some, more) = (files(8192), files(16_384));
        assert_eq!(more - some, 1024);
        // All clients at once, with everything that they may send.
        let all = |files| 8 * files + 4 * (64 + 2) + 4 * 128 * 3;
        assert!(all(some) < 8192 && all(some) > 6000, "{some}");
        assert_eq!(files(256), FEWEST_FILES);
        assert_eq!(files_of_each(&Specs::default(), 1, 0), FEWEST_FILES);
    }
}
