//! Limits of the open descriptors of this process and of each client. Together they leave enough
//! for everything else, so that no client can take the descriptors of another.

use crate::spec::{ClientLimits, ControllerSpec, Specs};
use anyhow::{Result, ensure};
use controller::DEFAULT_IO_QUEUES;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vfio_user::wire::MAX_MSG_FDS;

/// Descriptors of the process itself: output, signals, the control socket with its clients, the
/// receiver process, devices below.
const OWN: u64 = 128;
/// Descriptors of each worker: its ring, its epoll set, its wake-up, and an answer of the receiver
/// process.
const WORKER: u64 = 48;
/// Descriptors of each socket that clients connect to, without those that clients send: the
/// listening socket, one connection and one that is refused, the connection to the receiver
/// process, the volumes below.
const SOCKET: u64 = 24;
/// Descriptors that a controller's client has sent in incomplete messages.
const INCOMPLETE: u64 = 3 * MAX_MSG_FDS as u64;
/// Default number of request queues of an export, and descriptors of each.
const EXPORT_QUEUES: u64 = 128;
const QUEUE: u64 = 3;
/// Descriptors that a front-end has sent in an incomplete message.
const INCOMPLETE_REQUEST: u64 = 32;
/// Default number of hosts of a subsystem, and I/O queues of each.
const HOSTS: u64 = 64;
const HOST_QUEUES: u64 = 16;
/// Descriptors of a queue's connection: on the ring, and in the epoll set.
const HOST_QUEUE: u64 = 2;
/// Descriptors of a host beside those: events, memory.
const HOST: u64 = 8;
/// Connections that have not identified themselves, and discoveries.
const NEWCOMERS: u64 = 96;
/// Minimum of memory files for a client. A common VMM has one for each NUMA node of its guest, and
/// one for each piece of device memory.
const FEWEST_FILES: u64 = 16;
/// A daemon leaves room for as many disks again as it has at the start, and for so many at least.
const MORE: usize = 64;
/// Descriptors that a client takes as a rule, beside its memory files: its queues' interrupts.
const USUAL: u64 = 8;

/// Limit of the process's descriptors, and the number of workers, to check whether disks fit.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    limit: Option<u64>,
    workers: usize,
}

impl Room {
    /// Refuses more than there are descriptors for.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn check(&self, specs: &Specs) -> Result<()> {
        let Some(limit) = self.limit else {
            return Ok(());
        };
        let clients = specs.controllers.len() + specs.vhost_user_blk.len();
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

/// Raises this process's limit of open descriptors to the maximum. Lowers the limits of each client
/// if the clients' descriptors together would exceed it.
pub fn limit_clients(
    specs: &Specs,
    workers: usize,
    grows: bool,
    clients: &mut ClientLimits,
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
    let wanted = clients.memory.mappings;
    let room = Room {
        limit: now,
        workers,
    };
    let Some(limit) = now else {
        return room;
    };
    let mut planned = specs.clone();
    if grows {
        let more = (specs.controllers.len() + specs.vhost_user_blk.len()).max(MORE);
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
        clients.memory.mappings = files;
    }
    room
}

/// Memory files that each client may have mapped where the process may have so many descriptors.
fn files_of_each(specs: &Specs, workers: usize, limit: u64) -> u64 {
    let clients = specs.controllers.len() + specs.vhost_user_blk.len();
    let left = limit.saturating_sub(taken(specs, workers));
    (left / clients.max(1) as u64).max(FEWEST_FILES)
}

/// Descriptors of everything but the clients' memory files.
fn taken(specs: &Specs, workers: usize) -> u64 {
    let controllers = specs.controllers.iter().map(|spec| {
        // A vector for each queue pair, that of the admin queue among them, and the pin.
        let vectors = u64::from(spec.io_queues.unwrap_or(DEFAULT_IO_QUEUES)) + 2;
        SOCKET + INCOMPLETE + vectors
    });
    let exports = specs.vhost_user_blk.iter().map(|spec| {
        let queues = spec.queues.map_or(EXPORT_QUEUES, u64::from);
        SOCKET + INCOMPLETE_REQUEST + queues * QUEUE
    });
    let targets = specs.nvme_tcp.iter().map(|spec| {
        let queues = spec.io_queues.map_or(HOST_QUEUES, u64::from) + 1;
        let hosts = spec.max_hosts.map_or(HOSTS, u64::from);
        SOCKET + NEWCOMERS + hosts * (queues * HOST_QUEUE + HOST)
    });
    controllers.chain(exports).chain(targets).sum::<u64>() + OWN + workers as u64 * WORKER
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::VhostBlkSpec;

    #[test]
    fn clients_share_what_is_left() {
        let specs = Specs {
            controllers: vec![ControllerSpec::default(); 4],
            vhost_user_blk: vec![VhostBlkSpec::default(); 4],
            ..Specs::default()
        };
        let files = |limit| files_of_each(&specs, 2, limit);
        let (some, more) = (files(8192), files(16_384));
        assert_eq!(more - some, 1024);
        // All of them at once, with everything that they may send.
        let all = |files| 8 * files + 4 * (64 + 2) + 4 * 128 * 3;
        assert!(all(some) < 8192 && all(some) > 6000, "{some}");
        assert_eq!(files(256), FEWEST_FILES);
        assert_eq!(files_of_each(&Specs::default(), 1, 0), FEWEST_FILES);
    }
}
