//! Sockets of unavailable disks: made at the start, when their access can still be set, and held
//! until the disk is served. A client that connects meanwhile waits.

use crate::open::prepare::{ListenContext, listen_at};
use anyhow::Result;
use config::disk::{Address, DiskSpec};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Mutex;
use sync::Unpoisoned;
use vfio_user::Listener;

/// Listening socket of an unavailable disk, at which no client is served.
#[derive(Debug)]
enum IdleSocket {
    Unix(Listener),
    Tcp(SocketAddr, TcpListener),
}

/// Listening sockets of the disks that are unavailable.
#[derive(Debug, Default)]
pub struct IdleSockets(Mutex<Vec<IdleSocket>>);

impl IdleSockets {
    /// Makes the socket of a disk, unless there is one: a service manager's, or one that is kept.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn hold(&self, disk: &DiskSpec, context: &ListenContext<'_>) -> Result<()> {
        let held = match disk.address() {
            Address::Device(_) => return Ok(()),
            Address::Tcp(address) => {
                let listener = disk.origin().place("listen", listen_at(address))?;
                IdleSocket::Tcp(address, listener)
            }
            Address::Socket(socket, access) => {
                let keeper = &context.opener.keeper;
                if keeper.listens_at(socket) || keeper.inherited.is_there(socket) {
                    return Ok(());
                }
                IdleSocket::Unix(context.bind(socket, access, disk.origin(), None)?)
            }
        };
        self.0.lock().unpoisoned().push(held);
        Ok(())
    }

    /// Returns whether an unavailable disk has a listening socket at this path.
    pub fn is_held(&self, path: &Path) -> bool {
        let held = self.0.lock().unpoisoned();
        held.iter()
            .any(|held| matches!(held, IdleSocket::Unix(listener) if listener.path() == path))
    }

    /// Returns the socket that is held at this path, which is not held any more.
    pub fn take(&self, path: &Path) -> Option<Listener> {
        let mut all = self.0.lock().unpoisoned();
        let is_it = |held: &IdleSocket| matches!(held, IdleSocket::Unix(listener) if listener.path() == path);
        let place = all.iter().position(is_it)?;
        match all.remove(place) {
            IdleSocket::Unix(listener) => Some(listener),
            IdleSocket::Tcp(..) => None,
        }
    }

    /// Returns the socket that is held at this address, which is not held any more.
    pub fn take_tcp(&self, address: SocketAddr) -> Option<TcpListener> {
        let mut all = self.0.lock().unpoisoned();
        let is_it = |held: &IdleSocket| matches!(held, IdleSocket::Tcp(at, _) if *at == address);
        let place = all.iter().position(is_it)?;
        match all.remove(place) {
            IdleSocket::Tcp(_, listener) => Some(listener),
            IdleSocket::Unix(_) => None,
        }
    }

    /// Closes the socket of a disk that is removed, and removes the socket's file.
    pub fn release(&self, disk: &DiskSpec) {
        match disk.address() {
            Address::Socket(path, _) => drop(self.take(path)),
            Address::Tcp(address) => drop(self.take_tcp(address)),
            Address::Device(_) => {}
        }
    }

    /// Closes the sockets of all unavailable disks, at the end of the process.
    pub fn release_all(&self) {
        drop(std::mem::take(&mut *self.0.lock().unpoisoned()));
    }
}
