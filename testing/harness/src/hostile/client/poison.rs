//! Descriptors that harm a process that takes them: sockets that wait at close, eventfds that
//! block, memory files of any size.

use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::Result;
use rustix::event::EventfdFlags;
use rustix::fs::{MemfdFlags, OFlags, fcntl_getfl, fcntl_setfl, memfd_create};
use rustix::net::sockopt::set_socket_linger;

/// Time for which a close would wait.
const LINGER: Duration = Duration::from_secs(3600);

/// Creates a TCP socket, and its peer, which reads nothing. The socket's last close waits as long
/// as the peer likes: SO_LINGER with data that cannot be sent (socket(7)).
pub(in crate::hostile) fn lingering() -> Result<(OwnedFd, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut socket = TcpStream::connect(listener.local_addr()?)?;
    let (peer, _) = listener.accept()?;
    socket.set_nonblocking(true)?;
    while socket.write(&[0; 64 << 10]).is_ok() {}
    set_socket_linger(&socket, Some(LINGER))?;
    Ok((socket.into(), peer))
}

/// An eventfd as every client has it.
pub(in crate::hostile) fn eventfd() -> Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(rustix::event::eventfd(0, flags)?)
}

/// Creates a semaphore eventfd that is readable nearly for ever.
pub(in crate::hostile) fn full_semaphore() -> Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
    let fd = rustix::event::eventfd(0, flags)?;
    rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes())?;
    Ok(fd)
}

/// Adds one to an eventfd's counter.
pub(in crate::hostile) fn signal(fd: &OwnedFd) -> Result<()> {
    match rustix::io::write(fd, &1u64.to_ne_bytes()) {
        Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Makes the next write to an eventfd wait: its counter is full, and the flag that would make the
/// write fail is cleared for all users of the file (eventfd(2)).
pub(in crate::hostile) fn block(fd: &OwnedFd) -> Result<()> {
    let flags = fcntl_getfl(fd)?;
    fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
    // Whatever has been added by now leaves room for less.
    let mut room = u64::MAX - 1;
    while room > 0 {
        if rustix::io::write(fd, &room.to_ne_bytes()).is_err() {
            room /= 2;
        }
    }
    Ok(fcntl_setfl(fd, flags - OFlags::NONBLOCK)?)
}

/// Creates a memory file; unwritten pages cost nothing.
pub(in crate::hostile) fn memfd(size: u64) -> Result<File> {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC)?);
    file.set_len(size)?;
    Ok(file)
}

/// Keeps a descriptor from being closed by this process before its end.
pub(in crate::hostile) fn keep(fd: impl AsFd + Into<OwnedFd>) {
    std::mem::forget(fd.into());
}
