//! How a volume uses its subsystem.

use crate::identity::HostIdentity;
use dhchap::Secrets;
use std::time::Duration;

/// How paths are chosen among those that are as good as each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Policy {
    /// One after the other.
    #[default]
    RoundRobin,
    /// The one with the fewest commands.
    QueueDepth,
}

/// How a volume uses its subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FabricsOptions {
    /// I/O queues of each worker on each path, 1 to [`Self::MOST_QUEUES`].
    pub queues: u16,
    /// Commands in flight on a queue, 1 to [`Self::MOST_DEPTH`].
    pub depth: u16,
    /// Headers have digests.
    pub header_digest: bool,
    /// Data has digests.
    pub data_digest: bool,
    /// Which path a command takes.
    pub policy: Policy,
    /// Keep Alive Timeout: a controller that is silent for half of it is lost, and one that has not
    /// been spoken to for all of it ends what it does for this host.
    pub kato: Duration,
    /// A command that is not answered for so long ends its path's connections; it is sent again.
    pub timeout: Duration,
    /// Requests wait for so long while there is no path; then they fail until there is one.
    pub reconnect_delay: Duration,
    /// Who this host is.
    pub identity: HostIdentity,
    /// By which this host proves who it is, where a controller demands that (DH-HMAC-CHAP); with a
    /// secret of the subsystem's, its controllers have to prove who they are.
    pub secrets: Option<Secrets>,
    /// Never write.
    pub read_only: bool,
    /// Smallest block that requests will use, if it is known. In bytes.
    pub block_size: Option<u32>,
}

impl FabricsOptions {
    /// Most I/O queues of a worker on a path.
    pub const MOST_QUEUES: u16 = 16;
    /// Most commands in flight on a queue.
    pub const MOST_DEPTH: u16 = 1024;
    /// Workers that a controller is asked to have queues for.
    pub(crate) const WORKERS: u16 = 64;

    /// Those of this host.
    pub fn new() -> Self {
        Self {
            queues: 1,
            depth: 128,
            header_digest: false,
            data_digest: false,
            policy: Policy::default(),
            kato: Duration::from_secs(5),
            timeout: Duration::from_secs(30),
            reconnect_delay: Duration::from_secs(300),
            identity: crate::identity::local().clone(),
            secrets: None,
            read_only: false,
            block_size: None,
        }
    }
}

impl Default for FabricsOptions {
    fn default() -> Self {
        Self::new()
    }
}
