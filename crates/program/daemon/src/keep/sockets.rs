//! Listening sockets that belong to no disk. A client that connects while no process serves waits
//! for the next process.

use super::session::KeeperSession;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use vfio_user::Listener;

/// Listening sockets of the process that belong to no disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessSocket {
    /// The control socket of the management API.
    Control,
    /// The control socket with read-only access.
    Questions,
    /// The TCP socket for Prometheus.
    Metrics,
}

/// Listening socket that a previous process has left.
#[derive(Debug)]
pub struct LeftSocket {
    pub(super) name: String,
    pub(super) socket: OwnedFd,
    /// Inode of the socket's file.
    pub(super) inode: u64,
}

impl LeftSocket {
    /// Returns the listening socket and the inode of its file.
    pub fn listener(&self) -> Option<(OwnedFd, u64)> {
        Some((self.socket.try_clone().ok()?, self.inode))
    }
}

impl KeeperSession {
    /// Takes the socket that a previous process has left under a name with this prefix, which ends
    /// with the inode of the socket's file.
    pub(super) fn take_socket(&self, prefix: &str) -> Option<LeftSocket> {
        let inode = |name: &str| name.strip_prefix(prefix)?.strip_prefix('.')?.parse().ok();
        let mut names = self.names().into_iter();
        let (inode, name) = names.find_map(|name| Some((inode(&name)?, name)))?;
        let socket = self.take(&name)?;
        Some(LeftSocket {
            name,
            socket,
            inode,
        })
    }

    /// Keeps a socket. `false`: there is no keeper, or it does not keep the socket.
    pub(super) fn keep_socket(&self, name: &str, fd: BorrowedFd<'_>) -> bool {
        let stored = self.store(name, fd);
        if let Err(error) = &stored {
            tracing::error!(socket = name, %error, "a socket is not kept");
        }
        self.is_kept() && stored.is_ok()
    }
}

impl ProcessSocket {
    fn prefix(self) -> &'static str {
        match self {
            Self::Control => "vnvme.control",
            Self::Questions => "vnvme.questions",
            Self::Metrics => "vnvme.metrics",
        }
    }

    /// Keeps a socket. The inode of its file shows later whether that is still there.
    fn keep(self, keeper: &KeeperSession, inode: u64, fd: BorrowedFd<'_>) {
        keeper.keep_socket(&format!("{}.{inode}", self.prefix()), fd);
    }

    /// Returns the listening socket at `path` that the previous process has left.
    pub fn left(self, keeper: &KeeperSession, path: &Path) -> Option<Listener> {
        let left = keeper.take_socket(self.prefix())?;
        match Listener::kept(left.socket, path, left.inode) {
            Ok(listener) => Some(listener.owned_if(keeper.owns_sockets())),
            Err(error) => {
                tracing::warn!(%error, "a kept socket cannot be used");
                // Clients that wait in it would wait for ever.
                keeper.remove_now(&left.name);
                None
            }
        }
    }

    /// Passes a listening socket to the keeper, if this process has created its file.
    pub fn keep_listener(self, keeper: &KeeperSession, listener: &Listener) {
        if let Some(inode) = listener.own_file() {
            self.keep(keeper, inode, listener.as_fd());
        }
    }

    /// Returns the TCP socket at `address` that the previous process has left.
    pub fn left_tcp(self, keeper: &KeeperSession, address: SocketAddr) -> Option<TcpListener> {
        let socket = TcpListener::from(keeper.take_socket(self.prefix())?.socket);
        let at = socket.local_addr().ok()?;
        let same = at.ip() == address.ip() && [0, at.port()].contains(&address.port());
        same.then_some(socket)
    }

    /// Passes a TCP listener to the keeper.
    pub fn keep_tcp(self, keeper: &KeeperSession, socket: &TcpListener) {
        self.keep(keeper, 0, socket.as_fd());
    }
}
