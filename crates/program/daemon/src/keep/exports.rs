//! Kept listening sockets of vhost-user-blk exports. A front-end that reconnects while no process
//! serves waits for the next process. All other state of an export is held by its front-end: guest
//! memory, rings, and the requests in flight (`vhost_blk`, inflight tracking).

use super::session::KeeperSession;
use super::sockets::LeftSocket;
use config::disk::DiskSpec;
use config::identity;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use vfio_user::Listener;

/// Prefix of the sockets' names. A digest of the path follows, then the inode of the socket's file.
const PREFIX: &str = "vnvme.blk-";

fn prefix(path: &Path) -> String {
    format!("{PREFIX}{}", identity::export(path))
}

impl KeeperSession {
    /// Returns whether a previous process has left the listening socket of an export at this path.
    pub(crate) fn export_listens_at(&self, path: &Path) -> bool {
        let prefix = format!("{}.", prefix(path));
        self.names().iter().any(|name| name.starts_with(&prefix))
    }

    /// Returns the socket that a previous process has left at this path.
    pub(crate) fn left_socket(&self, path: &Path) -> Option<LeftSocket> {
        self.take_socket(&prefix(path))
    }

    /// Closes the socket of a disk that is unavailable, and removes the socket's file.
    pub(super) fn give_up_export(&self, disk: &DiskSpec) {
        let DiskSpec::VhostUserBlk(spec) = disk else {
            return;
        };
        if let Some(left) = self.left_socket(&spec.socket) {
            self.remove_now(&left.name);
            drop(Listener::kept(left.socket, &spec.socket, left.inode));
        }
    }
}

/// Returns whether the descriptor kept under this name is the socket of this disk.
pub(super) fn is_of(name: &str, disk: &DiskSpec) -> bool {
    let DiskSpec::VhostUserBlk(spec) = disk else {
        return false;
    };
    name.starts_with(&format!("{}.", prefix(&spec.socket)))
}

/// A socket that is kept until this value is dropped. Drop this value before the socket is closed:
/// clients that wait to be accepted must not be closed by the keeper.
#[derive(Debug)]
pub struct KeptSocket {
    name: String,
    keeper: Arc<KeeperSession>,
}

impl KeptSocket {
    /// Keeps the listening socket of a path. `left` is the socket that the previous process has
    /// left there, which may be the same one. `None`: the socket is not kept, or another process
    /// has it, too.
    pub fn new(
        keeper: &Arc<KeeperSession>,
        listener: &Listener,
        left: Option<LeftSocket>,
    ) -> Option<Self> {
        let own = listener.own_file();
        let name = own.map(|inode| format!("{}.{inode}", prefix(listener.path())));
        let kept = |name| Self {
            name,
            keeper: keeper.clone(),
        };
        match left {
            Some(left) if Some(&left.name) == name.as_ref() => return name.map(kept),
            Some(left) => {
                keeper.remove_now(&left.name);
                sync::discard(left.socket);
            }
            None => {}
        }
        let name = name?;
        let stored = keeper.keep_socket(&name, listener.as_fd());
        stored.then(|| kept(name))
    }
}

impl Drop for KeptSocket {
    fn drop(&mut self) {
        self.keeper.remove_now(&self.name);
    }
}
