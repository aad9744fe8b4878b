//! Client sockets of a protocol without descriptors.

use crate::error::ReadError;
use crate::listener_link::ListenerLink;
use crate::socket::{Read, SocketContent, look, take};
use rustix::net::{Shutdown, shutdown};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// A client's Unix stream socket that carries bytes and no descriptors. A client that sends
/// descriptors is no longer read: the receiver process closes its socket with all unread data.
///
/// The socket may have a type with its own way of closing, for example an event loop's.
#[derive(Debug)]
pub struct PlainSocket<S: AsFd + Send + 'static = OwnedFd> {
    /// Socket of the client; `None` only inside `drop`.
    socket: Option<S>,
    closing: Closing,
}

#[derive(Debug)]
enum Closing {
    /// This process closes the socket, because the client is trusted.
    Here,
    /// The receiver process closes the socket, or another thread if that process has no duplicate.
    Elsewhere {
        link: Arc<Mutex<ListenerLink>>,
        client: Option<u64>,
    },
}

impl<S: AsFd + Send + 'static> PlainSocket<S> {
    pub(crate) fn in_place(socket: S) -> Self {
        Self {
            socket: Some(socket),
            closing: Closing::Here,
        }
    }

    pub(crate) fn received(socket: S, link: &Arc<Mutex<ListenerLink>>) -> Self {
        let client = link.lock().unpoisoned().enter_plain(socket.as_fd());
        let link = link.clone();
        Self {
            socket: Some(socket),
            closing: Closing::Elsewhere { link, client },
        }
    }

    /// Returns the socket, to be polled and written to.
    pub fn get_ref(&self) -> &S {
        match &self.socket {
            Some(socket) => socket,
            None => unreachable!("only a dropped client has no socket"),
        }
    }

    /// Reads once into `buf`, which must not be empty; never [`Read::Waiting`].
    ///
    /// # Errors
    /// [`ReadError::TooManyFds`] when the client has sent descriptors; [`ReadError::System`] when a
    /// system call fails.
    pub fn read(&self, buf: &mut [u8]) -> Result<Read, ReadError> {
        match look(self.as_fd(), 0, buf)? {
            SocketContent::Nothing => Ok(Read::Blocked),
            SocketContent::Eof => Ok(Read::Eof),
            SocketContent::Bytes(len) => take(self.as_fd(), buf, len),
            SocketContent::WithFds(_) => Err(ReadError::TooManyFds),
        }
    }
}

impl<S: AsFd + Send + 'static> AsFd for PlainSocket<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.get_ref().as_fd()
    }
}

impl<S: AsFd + Send + 'static> Drop for PlainSocket<S> {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else {
            return;
        };
        let Closing::Elsewhere { link, client } = &self.closing else {
            return;
        };
        // The client sees the end now, even if closing takes time.
        let _ = shutdown(&socket, Shutdown::Both);
        let mut link = link.lock().unpoisoned();
        match client.filter(|client| link.leave_plain(*client)) {
            Some(client) => {
                // The receiver process has a duplicate until it is notified, so this is not the
                // last close.
                drop(socket);
                link.end(client);
            }
            None => sync::discard(socket),
        }
    }
}
