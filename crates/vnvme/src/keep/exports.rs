//! Listening sockets of vhost-user-blk exports, whose front-ends connect again: one that does while
//! no process serves waits for the next. What else an export needs its front-end has: the guest's
//! memory, the rings, and which requests are in flight (`vhost_blk`, inflight tracking).

use super::disk::settled;
use super::pool::kept;
use super::sockets::{keep_socket, take_socket};
use crate::identity;
use crate::manage::DiskSpec;
use keeper::Desk;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use vfio_user::Listener;

/// What their names begin with; a digest of the path follows, and the inode of the socket's file.
const PREFIX: &str = "vnvme.blk-";

fn prefix(path: &Path) -> String {
    format!("{PREFIX}{}", identity::export(path))
}

/// What a previous process has left at this path: the socket, and the inode of its file.
#[derive(Debug)]
pub struct LeftSocket {
    name: String,
    socket: OwnedFd,
    inode: u64,
}

/// Where one is listened on that a previous process has left.
pub fn export_listens_at(path: &Path) -> bool {
    let Some(kept) = kept() else {
        return false;
    };
    let prefix = format!("{}.", prefix(path));
    kept.names().iter().any(|name| name.starts_with(&prefix))
}

/// The socket at this path that a previous process has left.
pub fn left_socket(path: &Path) -> Option<LeftSocket> {
    let (name, socket, inode) = take_socket(&prefix(path))?;
    Some(LeftSocket {
        name,
        socket,
        inode,
    })
}

/// Whether what is kept under this name is the socket of this disk.
pub(super) fn is_of(name: &str, disk: &DiskSpec) -> bool {
    let DiskSpec::VhostBlk(spec) = disk else {
        return false;
    };
    name.starts_with(&format!("{}.", prefix(&spec.socket)))
}

/// Closes the socket of a disk that is unavailable, and removes the socket's file.
pub(super) fn give_up(disk: &DiskSpec) {
    let DiskSpec::VhostBlk(spec) = disk else {
        return;
    };
    if let Some(left) = left_socket(&spec.socket)
        && let Some(kept) = kept()
    {
        let mut desk = Desk::new(kept.link());
        let _ = desk.remove(&left.name);
        let _ = settled(&mut desk);
        drop(Listener::kept(left.socket, &spec.socket, left.inode));
    }
}

impl LeftSocket {
    /// To listen with.
    pub fn listener(&self) -> Option<(OwnedFd, u64)> {
        Some((self.socket.try_clone().ok()?, self.inode))
    }
}

/// A socket that is kept, until this is dropped. To be dropped first: what waits to be accepted is
/// not to be closed by the keeper.
#[derive(Debug)]
pub struct KeptSocket(String);

impl KeptSocket {
    /// Has the socket kept that is listened on at a path; `left` is what the previous process has
    /// left there, which it may be. `None`: it is not kept, or another process has it, too.
    pub fn new(listener: &Listener, left: Option<LeftSocket>) -> Option<Self> {
        let kept = kept()?;
        let own = listener.own_file();
        let name = own.map(|inode| format!("{}.{inode}", prefix(listener.path())));
        match left {
            Some(left) if Some(&left.name) == name.as_ref() => return name.map(Self),
            Some(left) => {
                let mut desk = Desk::new(kept.link());
                let _ = desk.remove(&left.name);
                let _ = settled(&mut desk);
                sync::discard(left.socket);
            }
            None => {}
        }
        let name = name?;
        let stored = keep_socket(&name, listener.as_fd());
        stored.then_some(Self(name))
    }
}

impl Drop for KeptSocket {
    fn drop(&mut self) {
        if let Some(kept) = kept() {
            let mut desk = Desk::new(kept.link());
            let _ = desk.remove(&self.0);
            let _ = settled(&mut desk);
        }
    }
}
