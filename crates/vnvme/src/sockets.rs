//! Sockets of unavailable disks: made at the start, when their access can still be set, and held
//! until the disk is served. A client that connects meanwhile waits.

use crate::access::SocketAccess;
use crate::inherited;
use crate::keep;
use crate::manage::DiskSpec;
use crate::prepare::{bind, listen_at};
use anyhow::Result;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Mutex;
use sync::Unpoisoned;
use vfio_user::Listener;

/// A socket at which no client is served.
enum Held {
    Unix(Listener),
    Tcp(SocketAddr, TcpListener),
}

static HELD: Mutex<Vec<Held>> = Mutex::new(Vec::new());

/// Makes the socket of a disk, unless there is one: a service manager's, or one that is kept.
/// `usual` is the access control of disks that have none of their own.
///
/// # Errors
/// A sentence for the user.
pub fn hold(disk: &DiskSpec, usual: &SocketAccess) -> Result<()> {
    let held = match disk {
        DiskSpec::Ublk(_) => return Ok(()),
        DiskSpec::NvmeTcp(spec) => {
            let listener = spec.origin.place("listen", listen_at(spec.listen()))?;
            Held::Tcp(spec.listen(), listener)
        }
        DiskSpec::Controller(_) | DiskSpec::VhostBlk(_) => {
            let (Some(socket), Some(access)) = (disk.socket(), disk.access()) else {
                return Ok(());
            };
            let is_kept = keep::listens_at(socket) || keep::export_listens_at(socket);
            if is_kept || inherited::is_there(socket) {
                return Ok(());
            }
            Held::Unix(bind(socket, &access.or(usual), disk.origin(), None)?)
        }
    };
    HELD.lock().unpoisoned().push(held);
    Ok(())
}

/// Returns whether a socket is held at this path.
pub fn is_held(path: &Path) -> bool {
    let held = HELD.lock().unpoisoned();
    held.iter()
        .any(|held| matches!(held, Held::Unix(listener) if listener.path() == path))
}

/// Returns the socket that is held at this path, which is not held any more.
pub fn take(path: &Path) -> Option<Listener> {
    let mut all = HELD.lock().unpoisoned();
    let is_it = |held: &Held| matches!(held, Held::Unix(listener) if listener.path() == path);
    let place = all.iter().position(is_it)?;
    match all.remove(place) {
        Held::Unix(listener) => Some(listener),
        Held::Tcp(..) => None,
    }
}

/// Returns the socket that is held at this address, which is not held any more.
pub fn take_tcp(address: SocketAddr) -> Option<TcpListener> {
    let mut all = HELD.lock().unpoisoned();
    let is_it = |held: &Held| matches!(held, Held::Tcp(at, _) if *at == address);
    let place = all.iter().position(is_it)?;
    match all.remove(place) {
        Held::Tcp(_, listener) => Some(listener),
        Held::Unix(_) => None,
    }
}

/// Closes the socket of a disk that is removed, and removes the socket's file.
pub fn release(disk: &DiskSpec) {
    drop(disk.socket().and_then(take));
    if let DiskSpec::NvmeTcp(spec) = disk {
        drop(take_tcp(spec.listen()));
    }
}

/// Closes all that are held, at the end of the process.
pub fn release_all() {
    let all = std::mem::take(&mut *HELD.lock().unpoisoned());
    drop(all);
}
