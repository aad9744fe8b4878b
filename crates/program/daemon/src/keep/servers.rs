//! Connections to servers of network volumes: they are the fence between a process and the one
//! before (`remote::end_previous`), and so are kept until they are over.

use super::disk::settled;
use super::session::KeeperSession;
use config::identity;
use remote::{ConnectionGuard, ConnectionKeeper, PreviousError, end_previous};
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sync::Unpoisoned;

/// Prefix of the connections' names. The server's name follows, then the numbers of this process
/// and of the connection.
const PREFIX: &str = "vnvme.n";

/// Connections to servers of network volumes that the keeper holds, so that the next process can
/// end them.
#[derive(Debug)]
pub struct KeptServers {
    keeper: Arc<KeeperSession>,
    /// Connections that the previous process has left, with the keeper's names for them, by server.
    left: Mutex<BTreeMap<String, Vec<(String, OwnedFd)>>>,
    last: AtomicU32,
    /// Time that a server may take to end a connection of the previous process.
    limit: Duration,
}

impl KeptServers {
    /// Creates the list of connections; `None` without a keeper.
    pub fn new(keeper: &Arc<KeeperSession>, limit: Duration) -> Option<Self> {
        keeper.link()?;
        let mut left = BTreeMap::<String, Vec<(String, OwnedFd)>>::new();
        for name in keeper.names() {
            if let Some(rest) = name.strip_prefix(PREFIX)
                && let Some((server, _)) = rest.split_once('.')
                && let Some(fd) = keeper.take(&name)
            {
                let all = left.entry(server.to_owned()).or_default();
                all.push((name, fd));
            }
        }
        Some(Self {
            keeper: keeper.clone(),
            left: Mutex::new(left),
            last: AtomicU32::new(0),
            limit,
        })
    }
}

impl ConnectionKeeper for KeptServers {
    fn end_previous(&self, server: &str) -> Result<(), PreviousError> {
        let left = &mut *self.left.lock().unpoisoned();
        let Some(left) = left.remove(&identity::server(server)) else {
            return Ok(());
        };
        let (names, fds): (Vec<_>, Vec<_>) = left.into_iter().unzip();
        // Should that fail, the keeper has them still, for another try.
        end_previous(server, fds, self.limit)?;
        if let Some(mut keeper_client) = self.keeper.client() {
            for name in names {
                let _ = keeper_client.remove(&name);
            }
            let _ = settled(&mut keeper_client);
        }
        Ok(())
    }

    fn keep(&self, server: &str, connection: BorrowedFd<'_>) -> Option<ConnectionGuard> {
        let (process, number) = (
            std::process::id(),
            self.last.fetch_add(1, Ordering::Relaxed),
        );
        let name = format!("{PREFIX}{}.{process}.{number}", identity::server(server));
        match self.keeper.store(&name, connection) {
            Ok(()) => Some(Box::new(Connection {
                keeper: self.keeper.clone(),
                name,
            })),
            Err(error) => {
                tracing::error!(
                    server, %error,
                    "a connection cannot be kept: should this process be killed, what it was sending \
                     may arrive later than what the next one sends"
                );
                None
            }
        }
    }
}

/// Connection to a server that the keeper holds until this value is dropped.
struct Connection {
    keeper: Arc<KeeperSession>,
    name: String,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // If the removal fails, the next process ends the connection once more.
        self.keeper.remove(&self.name);
    }
}
