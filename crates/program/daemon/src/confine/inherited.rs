//! Sockets that a service manager has opened for this process (crate `inherit`). A disk that is
//! configured with the path of such a socket uses it instead of making its own. The sockets are
//! kept to the end, so that a disk that is removed and added again gets its socket again.

use anyhow::{Context, Result};
use config::access::SocketAccess;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, getsockname, sockopt};
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use vfio_user::Listener;

/// Descriptors that a service manager has passed to this process.
#[derive(Debug, Default)]
pub struct Inherited {
    sockets: Vec<Socket>,
    /// Numbers of inherited descriptors that are not listening Unix sockets.
    strange: Vec<i32>,
}

/// Inherited Unix stream socket that listens at a path.
#[derive(Debug)]
struct Socket {
    path: PathBuf,
    descriptor: OwnedFd,
    is_used: AtomicBool,
}

/// Returns the path at which a Unix stream socket listens.
fn listens_at(socket: &OwnedFd) -> Option<PathBuf> {
    let listens = sockopt::socket_domain(socket) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(socket) == Ok(SocketType::STREAM)
        && sockopt::socket_acceptconn(socket) == Ok(true);
    let address = listens.then(|| getsockname(socket).ok()).flatten()?;
    let address = SocketAddrUnix::try_from(address).ok()?;
    Some(OsStr::from_bytes(address.path_bytes()?).into())
}

impl Inherited {
    /// Sorts the inherited descriptors. Must be called before anything is opened.
    pub fn new(given: Vec<(String, OwnedFd)>) -> Self {
        let mut all = Self::default();
        for (_, descriptor) in given {
            match listens_at(&descriptor) {
                Some(path) => all.sockets.push(Socket {
                    path,
                    descriptor,
                    is_used: AtomicBool::new(false),
                }),
                None => all.strange.push(descriptor.as_raw_fd()),
            }
        }
        all
    }

    /// Passes the inherited sockets on to the program that this process executes next.
    pub fn pass_on(&self) {
        for socket in &self.sockets {
            let _ = fcntl_setfd(&socket.descriptor, FdFlags::empty());
        }
    }

    /// Returns the inherited socket that listens at the path, compared by file, not by name.
    fn find(&self, path: &Path) -> Option<&Socket> {
        let file = |path: &Path| {
            let file = path.symlink_metadata().ok()?;
            Some((file.dev(), file.ino()))
        };
        self.sockets.iter().find(|socket| {
            socket.path == path || (file(path).is_some() && file(path) == file(&socket.path))
        })
    }

    /// Returns whether an inherited socket listens at this path.
    pub fn is_there(&self, path: &Path) -> bool {
        self.find(path).is_some()
    }

    /// Returns the inherited listener at this path, if there is one. Its opener has set the access
    /// to it.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn listener(&self, path: &Path, access: &SocketAccess) -> Result<Option<Listener>> {
        let Some(socket) = self.find(path) else {
            return Ok(None);
        };
        if *access != SocketAccess::default() {
            tracing::warn!(
                socket = %path.display(),
                "the service manager has opened this socket; socket-owner, socket-group and \
                 socket-mode have no effect on it"
            );
        }
        socket.is_used.store(true, Ordering::Relaxed);
        let descriptor = socket.descriptor.try_clone();
        let descriptor = descriptor.context("a socket of the service manager's")?;
        Ok(Some(Listener::inherited(descriptor, path)?))
    }

    /// Logs a warning about inherited descriptors that the configuration does not use.
    pub fn warn_of_others(&self) {
        for descriptor in &self.strange {
            tracing::warn!(
                descriptor,
                "closing a descriptor of the service manager: not a listening Unix stream socket"
            );
        }
        let unused = |socket: &&Socket| !socket.is_used.load(Ordering::Relaxed);
        for socket in self.sockets.iter().filter(unused) {
            tracing::warn!(
                socket = %socket.path.display(),
                "the service manager has opened this socket, but no configured disk has its path"
            );
        }
    }
}
