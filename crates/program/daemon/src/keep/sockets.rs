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

impl KeeperSession {
    /// Takes the socket that a previous process has left under a name with this prefix: the name,
    /// the socket, and the inode of its file, with which the name ends.
    pub(super) fn take_socket(&self, prefix: &str) -> Option<(String, OwnedFd, u64)> {
        let file = |name: &str| name.strip_prefix(prefix)?.strip_prefix('.')?.parse().ok();
        for name in self.names() {
            if let Some(file) = file(&name) {
                let socket = self.take(&name)?;
                return Some((name, socket, file));
            }
        }
        None
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

    /// `file`: the inode of its file, so that it is known whether that is still there.
    fn name(self, file: u64) -> String {
        format!("{}.{file}", self.prefix())
    }

    fn keep(self, keeper: &KeeperSession, file: u64, fd: BorrowedFd<'_>) {
        keeper.keep_socket(&self.name(file), fd);
    }

    /// Returns the listening socket at `path` that the previous process has left.
    pub fn left(self, keeper: &KeeperSession, path: &Path) -> Option<Listener> {
        let (name, fd, file) = keeper.take_socket(self.prefix())?;
        match Listener::kept(fd, path, file) {
            Ok(listener) => Some(listener.owned_if(keeper.owns_sockets())),
            Err(error) => {
                tracing::warn!(%error, "a kept socket cannot be used");
                // Clients that wait in it would wait for ever.
                keeper.remove_now(&name);
                None
            }
        }
    }

    /// Passes a listening socket to the keeper, if this process has created its file.
    pub fn keep_listener(self, keeper: &KeeperSession, listener: &Listener) {
        if let Some(file) = listener.own_file() {
            self.keep(keeper, file, listener.as_fd());
        }
    }

    /// Returns the TCP socket at `address` that the previous process has left.
    pub fn left_tcp(self, keeper: &KeeperSession, address: SocketAddr) -> Option<TcpListener> {
        let (_, socket, _) = keeper.take_socket(self.prefix())?;
        let socket = TcpListener::from(socket);
        let at = socket.local_addr().ok()?;
        let same = at.ip() == address.ip() && [0, at.port()].contains(&address.port());
        same.then_some(socket)
    }

    /// Passes a TCP listener to the keeper.
    pub fn keep_tcp(self, keeper: &KeeperSession, socket: &TcpListener) {
        self.keep(keeper, 0, socket.as_fd());
    }
}
