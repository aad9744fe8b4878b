//! Connection state of a remote volume, for status displays.

use std::sync::{Arc, Weak};

/// State of a network volume's connections to its server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionState {
    /// Server of the volume, as a URL without options.
    pub server: String,
    /// Whether all connections are established. Otherwise requests may be delayed.
    pub connected: bool,
    /// Number of connections that have ended so far.
    pub lost: u64,
}

/// A remote volume that can report its connection state.
pub trait Reachable: Send + Sync {
    /// Returns the state of the connections; `None` when the volume is no longer used.
    fn reach(&self) -> Option<ConnectionState>;
}

/// Weak handle that reports the connection state of a remote volume while the volume exists.
#[derive(Clone)]
pub struct ReachWatch(Weak<dyn Reachable>);

impl ReachWatch {
    /// Creates a handle for watching this volume, without keeping it open.
    pub fn new(volume: Arc<dyn Reachable>) -> Self {
        Self(Arc::downgrade(&volume))
    }

    /// Returns the state of the volume's connections; `None` if the volume is closed.
    pub fn look(&self) -> Option<ConnectionState> {
        self.0.upgrade()?.reach()
    }
}

impl std::fmt::Debug for ReachWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ReachWatch").field(&self.look()).finish()
    }
}
