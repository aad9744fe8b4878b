//! Sockets of unavailable disks: made at the start, when their access can still be set, and held
//! until the disk is served. A client that connects meanwhile waits.

use crate::confine::inherited;
use crate::keep;
use crate::open::prepare::{bind, listen_at};
use anyhow::Result;
use config::access::SocketAccess;
use config::disk::{Address, DiskSpec};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Mutex;
use sync::Unpoisoned;
use vfio_user::Listener;

/// Listening socket of an unavailable disk, at which no client is served.
enum IdleSocket {
    Unix(Listener),
    Tcp(SocketAddr, TcpListener),
}

static IDLE_SOCKETS: Mutex<Vec<IdleSocket>> = Mutex::new(Vec::new());

/// Makes the socket of a disk, unless there is one: a service manager's, or one that is kept.
/// `usual` is the access control of disks that have none of their own.
///
/// # Errors
/// A sentence for the user.
pub fn hold(disk: &DiskSpec, usual: &SocketAccess) -> Result<()> {
    let held = match disk.address() {
        Address::Device(_) => return Ok(()),
        Address::Tcp(address) => {
            let listener = disk.origin().place("listen", listen_at(address))?;
            IdleSocket::Tcp(address, listener)
        }
        Address::Socket(socket, access) => {
            let is_kept = keep::listens_at(socket) || keep::export_listens_at(socket);
            if is_kept || inherited::is_there(socket) {
                return Ok(());
            }
            IdleSocket::Unix(bind(socket, &access.or(usual), disk.origin(), None, None)?)
        }
    };
    IDLE_SOCKETS.lock().unpoisoned().push(held);
    Ok(())
}

/// Returns whether an unavailable disk has a listening socket at this path.
pub fn is_held(path: &Path) -> bool {
    let held = IDLE_SOCKETS.lock().unpoisoned();
    held.iter()
        .any(|held| matches!(held, IdleSocket::Unix(listener) if listener.path() == path))
}

/// Returns the socket that is held at this path, which is not held any more.
pub fn take(path: &Path) -> Option<Listener> {
    let mut all = IDLE_SOCKETS.lock().unpoisoned();
    let is_it =
        |held: &IdleSocket| matches!(held, IdleSocket::Unix(listener) if listener.path() == path);
    let place = all.iter().position(is_it)?;
    match all.remove(place) {
        IdleSocket::Unix(listener) => Some(listener),
        IdleSocket::Tcp(..) => None,
    }
}

/// Returns the socket that is held at this address, which is not held any more.
pub fn take_tcp(address: SocketAddr) -> Option<TcpListener> {
    let mut all = IDLE_SOCKETS.lock().unpoisoned();
    let is_it = |held: &IdleSocket| matches!(held, IdleSocket::Tcp(at, _) if *at == address);
    let place = all.iter().position(is_it)?;
    match all.remove(place) {
        IdleSocket::Tcp(_, listener) => Some(listener),
        IdleSocket::Unix(_) => None,
    }
}

/// Closes the socket of a disk that is removed, and removes the socket's file.
pub fn release(disk: &DiskSpec) {
    match disk.address() {
        Address::Socket(path, _) => drop(take(path)),
        Address::Tcp(address) => drop(take_tcp(address)),
        Address::Device(_) => {}
    }
}

/// Closes the sockets of all unavailable disks, at the end of the process.
pub fn release_all() {
    let all = std::mem::take(&mut *IDLE_SOCKETS.lock().unpoisoned());
    drop(all);
}
