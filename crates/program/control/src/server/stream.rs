//! A client's socket, as hyper reads and writes it.

use super::clock::Clock;
use hyper::rt::{Read, ReadBufCursor, Write};
use receive::PlainSocket;
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Bytes that are read at once.
const PIECE: usize = 8 << 10;

/// A client's socket. Reading it takes no descriptors: one that has some sent cannot be read on.
pub(super) struct Stream {
    socket: PlainSocket<UnixStream>,
    clock: Rc<Clock>,
}

impl Stream {
    pub(super) fn new(socket: PlainSocket<UnixStream>, clock: Rc<Clock>) -> Self {
        Self { socket, clock }
    }
}

impl Read for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut piece = [0; PIECE];
        let room = piece.len().min(buf.remaining());
        let piece = piece.get_mut(..room).unwrap_or_default();
        if piece.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let waited = self.socket.get_ref();
        loop {
            ready!(waited.poll_read_ready(cx))?;
            let read = waited.try_io(Interest::READABLE, || match self.socket.read(piece) {
                Ok(receive::Read::Bytes { len, .. }) => Ok(len),
                Ok(receive::Read::Eof) => Ok(0),
                Ok(receive::Read::Blocked | receive::Read::Waiting) => {
                    Err(io::ErrorKind::WouldBlock.into())
                }
                Err(error) => Err(io::Error::other(error)),
            });
            let len = match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                read => read?,
            };
            if len > 0 {
                self.clock.read();
            }
            buf.put_slice(piece.get(..len).unwrap_or_default());
            return Poll::Ready(Ok(()));
        }
    }
}

impl Write for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let waited = self.socket.get_ref();
        loop {
            if waited.poll_write_ready(cx)?.is_pending() {
                self.clock.blocked();
                return Poll::Pending;
            }
            let sent = waited.try_io(Interest::WRITABLE, || Ok(send(waited, bytes, flags)?));
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => return Poll::Ready(sent),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.clock.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match shutdown(&self.socket, Shutdown::Write) {
            Ok(()) | Err(Errno::NOTCONN) => Poll::Ready(Ok(())),
            Err(errno) => Poll::Ready(Err(errno.into())),
        }
    }
}
