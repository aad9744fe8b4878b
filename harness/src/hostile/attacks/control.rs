//! The control socket and its directory, by those who may open them.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{FlockOperation, flock};

use super::Context;
use super::memory::raise_limit;
use crate::hostile::place;

/// What stands in a file that takes the control socket's place.
const SOMEBODYS: &str = "not the daemon's";

pub(super) fn slow(context: &Context) -> Result<()> {
    let mut clients = (0..4)
        .map(|_| UnixStream::connect(context.control()))
        .collect::<Result<Vec<_>, _>>()?;
    let mut turn = 0;
    while context.did(1) {
        for client in &mut clients {
            if turn % 100 == 0 && client.write_all(b" ").is_err() {
                *client = UnixStream::connect(context.control())?;
            }
        }
        turn += 1;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

pub(super) fn crowd(context: &Context) -> Result<()> {
    raise_limit()?;
    let mut clients = Vec::new();
    while clients.len() < 1000 && context.did(1) {
        let address = rustix::net::SocketAddrUnix::new(context.control())?;
        let one = rustix::net::socket_with(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK,
            None,
        )?;
        match rustix::net::connect(&one, &address) {
            Ok(()) => clients.push(one),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    context.rest();
    Ok(())
}

pub(super) fn garbage(context: &Context) -> Result<()> {
    let requests: [&[u8]; 6] = [
        b"\n",
        b"{}\n",
        b"{\"method\":\"stats\"",
        b"{\"method\":\"limits\",\"volume\":{},\"iops\":-1}\n",
        b"{\"method\":\"device\",\"device\":\"\\u0000\",\"action\":\"suspend\"}\n",
        &[b'['; 4096],
    ];
    for request in requests {
        let mut client = UnixStream::connect(context.control())?;
        client.set_read_timeout(Some(Duration::from_millis(200)))?;
        let _ = client.write_all(request);
        let _ = client.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer);
        if !context.did(1) {
            break;
        }
    }
    Ok(())
}

pub(super) fn replace(context: &Context) -> Result<()> {
    let path = context.control();
    // The daemon still has its socket; the name stands for another file now.
    if fs::read_to_string(&path).is_err() {
        let other = context.dir.join("somebodys");
        fs::write(&other, SOMEBODYS)?;
        fs::rename(&other, &path)?;
    }
    context.did(1);
    context.rest();
    Ok(())
}

pub(super) fn is_still_there(dir: &Path) -> Result<()> {
    let path = place::control_socket(dir);
    let text = fs::read_to_string(path).context("the file was removed")?;
    ensure!(text == SOMEBODYS, "the file was changed");
    Ok(())
}

/// Any user who may read a directory may lock it.
pub(super) fn lock_directory(dir: &Path) -> Result<Vec<File>> {
    let directory = File::open(dir)?;
    flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
    Ok(vec![directory])
}

pub(super) fn nothing(context: &Context) -> Result<()> {
    context.did(1);
    context.rest();
    Ok(())
}
