//! Listening sockets that belong to no disk. A client that connects while no process serves waits
//! for the next process.

use super::disk::settled;
use super::life::owns_sockets;
use super::pool::kept;
use keeper::KeeperClient;
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

/// Takes the socket that a previous process has left under a name with this prefix: the name, the
/// socket, and the inode of its file, with which the name ends.
pub(super) fn take_socket(prefix: &str) -> Option<(String, OwnedFd, u64)> {
    let kept = kept()?;
    let file = |name: &str| name.strip_prefix(prefix)?.strip_prefix('.')?.parse().ok();
    for name in kept.names() {
        if let Some(file) = file(&name) {
            let socket = kept.take(&name)?;
            return Some((name, socket, file));
        }
    }
    None
}

/// Keeps a socket. `false`: there is no keeper, or it does not keep the socket.
pub(super) fn keep_socket(name: &str, fd: BorrowedFd<'_>) -> bool {
    let Some(kept) = kept() else {
        return false;
    };
    let mut keeper_client = KeeperClient::new(kept.link());
    let stored = keeper_client.store(name, fd);
    let stored = stored.and_then(|()| settled(&mut keeper_client));
    if let Err(error) = &stored {
        tracing::error!(socket = name, %error, "a socket is not kept");
    }
    stored.is_ok()
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

    fn keep(self, file: u64, fd: BorrowedFd<'_>) {
        keep_socket(&self.name(file), fd);
    }

    /// Returns the listening socket at `path` that the previous process has left.
    pub fn left(self, path: &Path) -> Option<Listener> {
        let (name, fd, file) = take_socket(self.prefix())?;
        match Listener::kept(fd, path, file) {
            Ok(listener) => Some(listener.owned_if(owns_sockets())),
            Err(error) => {
                tracing::warn!(%error, "a kept socket cannot be used");
                // Clients that wait in it would wait for ever.
                let mut keeper_client = KeeperClient::new(kept()?.link());
                let _ = keeper_client.remove(&name);
                let _ = settled(&mut keeper_client);
                None
            }
        }
    }

    /// Passes a listening socket to the keeper, if this process has created its file.
    pub fn keep_listener(self, listener: &Listener) {
        if let Some(file) = listener.own_file() {
            self.keep(file, listener.as_fd());
        }
    }

    /// Returns the TCP socket at `address` that the previous process has left.
    pub fn left_tcp(self, address: SocketAddr) -> Option<TcpListener> {
        let (_, socket, _) = take_socket(self.prefix())?;
        let socket = TcpListener::from(socket);
        let at = socket.local_addr().ok()?;
        let same = at.ip() == address.ip() && [0, at.port()].contains(&address.port());
        same.then_some(socket)
    }

    /// Passes a TCP listener to the keeper.
    pub fn keep_tcp(self, socket: &TcpListener) {
        self.keep(0, socket.as_fd());
    }
}
