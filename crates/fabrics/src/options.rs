//! Options for using a subsystem.

use crate::identity::HostIdentity;
use dhchap::Secrets;
use std::time::Duration;

/// Choice of a path among equally good ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Policy {
    /// Paths take turns.
    #[default]
    RoundRobin,
    /// The one with the fewest commands.
    QueueDepth,
}

/// Options for using a subsystem.
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
    /// Policy for choosing the path of a command.
    pub policy: Policy,
    /// Keep Alive Timeout (KATO). A controller that is silent for half of it is considered lost. A
    /// controller that received nothing for all of it ends its work for this host.
    pub kato: Duration,
    /// A command that is not answered for so long ends its path's connections; it is sent again.
    pub timeout: Duration,
    /// Requests wait for so long while there is no path; then they fail until there is one.
    pub reconnect_delay: Duration,
    /// Identity of this host.
    pub identity: HostIdentity,
    /// Secrets of this host, for controllers that demand authentication (DH-HMAC-CHAP). With a
    /// secret of the subsystem, its controllers have to authenticate themselves, too.
    pub secrets: Option<Secrets>,
    /// Never write.
    pub read_only: bool,
    /// Smallest block that requests will use, if it is known. In bytes.
    pub block_size: Option<u32>,
}

impl FabricsOptions {
    /// Maximum number of I/O queues of a worker on a path.
    pub const MOST_QUEUES: u16 = 16;
    /// Maximum number of commands in flight on a queue.
    pub const MOST_DEPTH: u16 = 1024;
    /// Workers that a controller is asked to have queues for.
    pub(crate) const WORKERS: u16 = 64;

    /// Returns the default options, with this host's identity.
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
