//! Attacks on the control socket and its directory, by users with the right to open them.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{FlockOperation, flock};

use super::Context;
use super::memory::raise_limit;
use crate::hostile::test_daemon;

/// Contents of a file that takes the control socket's place.
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
    let long = [
        b"GET /v1/stats HTTP/1.1\r\nX: ".to_vec(),
        vec![b'x'; 1 << 20],
    ]
    .concat();
    let begin = b"POST /v1/apply HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunks = [&begin[..], &b"8\r\n12345678\r\n".repeat(200_000)].concat();
    let requests: [&[u8]; 12] = [
        b"\n",
        b"{\"method\":\"stats\"}\n",
        b"GET /v1/stats",
        b"GET /v1/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"BREW / HTTP/1.1\r\n\r\n",
        b"PATCH /v1/limits HTTP/1.1\r\nHost: x\r\nContent-Length: 24\r\n\r\n\
          {\"volume\":{},\"iops\":-1}",
        b"POST /v1/devices/%00/suspend HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/apply HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n[",
        b"POST /v1/apply HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        &[b'['; 4096],
        &long,
        &chunks,
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

/// Requests one behind the other, as fast as they are taken; answers are read.
pub(super) fn pipeline(context: &Context) -> Result<()> {
    let requests = b"GET /v1/stats HTTP/1.1\r\nHost: x\r\n\r\n".repeat(100);
    let mut answer = vec![0; 1 << 16];
    while context.did(1) {
        let mut client = UnixStream::connect(context.control())?;
        client.set_nonblocking(true)?;
        // Until it is closed.
        while context.did(1) {
            let sent = client.write(&requests);
            let read = client.read(&mut answer);
            let is_open = |result: std::io::Result<usize>| match result {
                Ok(count) => count > 0,
                Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
            };
            if !(is_open(sent) && is_open(read)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

/// Clients that ask and are killed before they are answered, and some that listen to events and
/// never read.
pub(super) fn unread(context: &Context) -> Result<()> {
    let mut listeners = Vec::new();
    while context.did(1) {
        let mut client = UnixStream::connect(context.control())?;
        let listens = listeners.len() < 40;
        let path = if listens { "events" } else { "stats" };
        let request = format!("GET /v1/{path} HTTP/1.1\r\nHost: x\r\n\r\n");
        let _ = client.write_all(request.as_bytes());
        if listens {
            listeners.push(client);
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
    let path = test_daemon::control_socket(dir);
    let text = fs::read_to_string(path).context("the file was removed")?;
    ensure!(text == SOMEBODYS, "the file was changed");
    Ok(())
}

/// Locks a directory, as any user with read access may.
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
