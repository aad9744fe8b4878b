//! Options for using a subsystem.

use crate::identity::HostIdentity;
use dhchap::Secrets;
use std::time::Duration;

/// Policy by which a path is chosen among those with the best ANA state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Policy {
    /// Use the paths in turn.
    #[default]
    RoundRobin,
    /// Use the path with the fewest outstanding commands.
    QueueDepth,
}

/// Options for using a namespace of a remote subsystem as a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FabricsOptions {
    /// Number of I/O queues that each worker has on each path, 1 to [`Self::MAX_QUEUES`].
    pub queues: u16,
    /// Maximum number of outstanding commands on each I/O queue, 1 to [`Self::MAX_DEPTH`].
    pub depth: u16,
    /// Whether to request header digests (CRC-32C of PDU headers).
    pub header_digest: bool,
    /// Whether to request data digests (CRC-32C of PDU data).
    pub data_digest: bool,
    /// Policy by which the path of each command is chosen.
    pub policy: Policy,
    /// Keep Alive Timeout (KATO). A controller that does not answer for half of it is considered
    /// lost. A controller that receives nothing for all of it ends the association.
    pub kato: Duration,
    /// Time limit of a command. After it the path's connections are closed and the command is sent
    /// again.
    pub timeout: Duration,
    /// Time for which requests wait while no path is usable. Afterwards they fail until a path is
    /// usable again.
    pub reconnect_delay: Duration,
    /// NQN and Host Identifier with which this host connects.
    pub identity: HostIdentity,
    /// DH-HMAC-CHAP secrets of this host, for controllers that require authentication. If a secret
    /// of the subsystem is included, its controllers must authenticate themselves, too.
    pub secrets: Option<Secrets>,
    /// Whether all writes are refused.
    pub read_only: bool,
    /// Minimum block size of requests in bytes; `None` if it is not known.
    pub block_size: Option<u32>,
}

impl FabricsOptions {
    /// Maximum number of I/O queues of one worker on each path.
    pub const MAX_QUEUES: u16 = 16;
    /// Maximum number of outstanding commands on an I/O queue.
    pub const MAX_DEPTH: u16 = 1024;
    /// Number of workers for which I/O queues are requested from a controller.
    pub(crate) const WORKERS: u16 = 64;

    /// Returns the default options, with this machine's NQN and Host Identifier.
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
