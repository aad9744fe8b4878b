//! Clients that come and go, and such that come all at once.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::Context;
use super::memory::raise_limit;
use super::work::{io, transfer};
use crate::hostile::client::nvme::Guest;
use crate::hostile::client::virtio::Raw;
use crate::hostile::test_daemon::{FILE_NSID, MEMORY_NSID};

pub(super) fn storm(context: &Context) -> Result<()> {
    // A first client that is served makes all further ones second clients.
    let _served = UnixStream::connect(context.vhost())?;
    while context.did(2) {
        drop(UnixStream::connect(context.nvme())?);
        drop(UnixStream::connect(context.vhost())?);
    }
    Ok(())
}

pub(super) fn garbage(context: &Context) -> Result<()> {
    let mut byte = 0u8;
    while context.did(2) {
        byte = byte.wrapping_add(41);
        let garbage = [byte; 256];
        // The daemon may hang up first.
        let _ = Raw::connect(&context.nvme())?.bytes(&garbage, &[]);
        let _ = Raw::connect(&context.vhost())?.bytes(&garbage, &[]);
    }
    Ok(())
}

pub(super) fn crowd(context: &Context) -> Result<()> {
    raise_limit()?;
    let mut crowd = Vec::new();
    for _ in 0..3000 {
        for socket in [context.nvme(), context.vhost(), context.control()] {
            let one = rustix::net::socket_with(
                rustix::net::AddressFamily::UNIX,
                rustix::net::SocketType::STREAM,
                rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK,
                None,
            )?;
            let address = rustix::net::SocketAddrUnix::new(&socket)?;
            // The listen queue may be full.
            if rustix::net::connect(&one, &address).is_ok() {
                crowd.push(one);
            }
        }
        if !context.did(1) {
            break;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    context.rest();
    Ok(())
}

pub(super) fn gone(context: &Context) -> Result<()> {
    let mut guest = Guest::up(&context.nvme(), 8)?;
    for qid in 1..=8 {
        let nsid = if qid % 2 == 0 { MEMORY_NSID } else { FILE_NSID };
        guest.fill(qid, &mut |at| {
            transfer(io(at), nsid, u64::from(at) * 32, 32, u64::from(at) * 16384)
        })?;
    }
    let deadline = Instant::now() + Duration::from_millis(20);
    guest.storm(1..=8, |count| {
        context.did(count) && Instant::now() < deadline
    })
}
