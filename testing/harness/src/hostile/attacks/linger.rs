//! TCP sockets that wait at close, passed wherever a descriptor is accepted, with the daemon's copy
//! as the last.

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Result;
use vfio_user::client::{Client, RawClient};
use vfio_user::wire::{self, Command, HEADER_SIZE, Header, flags};
use vhost_blk::wire::{Region, TableHeader, request};
use zerocopy::IntoBytes;

use super::Context;
use crate::hostile::client::nvme::{ANSWER, MSIX, RAM_BASE, connect};
use crate::hostile::client::poison::lingering;
use crate::hostile::client::virtio::Raw;

/// Sockets at most; more of them harm nobody else.
const MAX_SOCKETS: u64 = 48;

/// Sends lingering sockets by `send`, which has to drop the socket.
fn each(context: &Context, mut send: impl FnMut(OwnedFd) -> Result<()>) -> Result<()> {
    // The peers stay open until this process ends: the close waits for the peer.
    let mut peers: Vec<TcpStream> = Vec::new();
    for _ in 0..MAX_SOCKETS {
        let (socket, peer) = lingering()?;
        peers.push(peer);
        if !context.did(1) {
            break;
        }
        // A server may hang up on such a message; a server that does not answer has been hit.
        if let Err(error) = send(socket) {
            println!("refused {error:#}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    context.rest();
    Ok(())
}

/// Closes this side's copy, which must not be the last one; if it is, a thread waits.
fn forget(socket: OwnedFd) {
    std::thread::spawn(move || drop(socket));
}

/// Sends a message in two parts, the descriptor with the first: the daemon does nothing about it
/// until this side's copy is closed, and then has the last one.
fn in_two(raw: &mut RawClient, message: &[u8], socket: OwnedFd) -> Result<()> {
    let (first, rest) = message.split_at(1);
    raw.send(first, &[socket.as_fd()])?;
    drop(socket);
    Ok(raw.send(rest, &[])?)
}

/// Sends a message in two parts to an export.
fn in_two_at(raw: &Raw, message: &[u8], socket: OwnedFd) -> Result<()> {
    let (first, rest) = message.split_at(1);
    raw.bytes(first, &[socket.as_fd()])?;
    drop(socket);
    raw.bytes(rest, &[])
}

fn message(command: Command, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        message_id: 1,
        command,
        message_size: (HEADER_SIZE + payload.len()) as u32,
        flags: flags::COMMAND,
        error: 0,
    };
    [header.as_bytes(), payload].concat()
}

fn dma_map_message() -> Vec<u8> {
    let map = wire::DmaMap {
        argsz: size_of::<wire::DmaMap>() as u32,
        flags: wire::dma::READ | wire::dma::WRITE,
        offset: 0,
        address: RAM_BASE,
        size: 4096,
    };
    message(Command::DMA_MAP, map.as_bytes())
}

fn set_irqs_message() -> Vec<u8> {
    let set = wire::IrqSet {
        argsz: size_of::<wire::IrqSet>() as u32,
        flags: wire::irq_set::ACTION_TRIGGER | wire::irq_set::DATA_EVENTFD,
        index: MSIX,
        start: 0,
        count: 1,
    };
    message(Command::DEVICE_SET_IRQS, set.as_bytes())
}

/// Sends the message with each socket, over one connection as long as that is served.
fn negotiated(context: &Context, message: &[u8]) -> Result<()> {
    let mut client: Option<Client> = None;
    each(context, |socket| {
        let mut now = match client.take() {
            Some(client) => client,
            None => connect(&context.nvme())?,
        };
        in_two(now.raw(), message, socket)?;
        now.raw().recv()?;
        client = Some(now);
        Ok(())
    })
}

pub(super) fn dma_map(context: &Context) -> Result<()> {
    negotiated(context, &dma_map_message())
}

pub(super) fn set_irqs(context: &Context) -> Result<()> {
    negotiated(context, &set_irqs_message())
}

pub(super) fn before_version(context: &Context) -> Result<()> {
    each(context, |socket| {
        let mut raw = RawClient::connect(&context.nvme(), ANSWER)?;
        in_two(&mut raw, &dma_map_message(), socket)?;
        let _ = raw.recv();
        Ok(())
    })
}

/// A second client is refused without a look at its message, which the kernel closes with its
/// socket.
pub(super) fn second_client(context: &Context) -> Result<()> {
    let _first = connect(&context.nvme())?;
    each(context, |socket| {
        let mut raw = RawClient::connect(&context.nvme(), ANSWER)?;
        let version = [&[0u8; 4][..], b"{}\0"].concat();
        raw.send(&message(Command::VERSION, &version), &[socket.as_fd()])?;
        forget(socket);
        let _ = raw.recv();
        Ok(())
    })
}

/// The connection ends at the first message; the kernel closes the descriptors of later ones when
/// the socket is closed.
pub(super) fn unread(context: &Context) -> Result<()> {
    let mut turn = 0;
    each(context, |socket| {
        turn += 1;
        let fds = [socket.as_fd()];
        if turn % 2 == 0 {
            let mut raw = RawClient::connect(&context.nvme(), ANSWER)?;
            raw.send(&[0xff; 1 << 10], &[])?;
            for _ in 0..8 {
                raw.send(&[0; 64], &fds)?;
            }
        } else {
            let raw = Raw::connect(&context.vhost())?;
            raw.bytes(&[0xff; 1 << 10], &[])?;
            for _ in 0..8 {
                raw.bytes(&[0; 64], &fds)?;
            }
        }
        forget(socket);
        Ok(())
    })
}

pub(super) fn vhost(context: &Context) -> Result<()> {
    let header = TableHeader {
        regions: 1,
        padding: 0,
    };
    let region = Region {
        guest_address: 0,
        size: 4096,
        user_address: 0,
        mmap_offset: 0,
    };
    let table = [header.as_bytes(), region.as_bytes()].concat();
    let index = 0u64.to_ne_bytes();
    let messages = [
        Raw::message(request::SET_MEM_TABLE, &table),
        Raw::message(request::SET_VRING_CALL, &index),
        Raw::message(request::SET_VRING_KICK, &index),
        Raw::message(request::SET_BACKEND_REQ_FD, &[]),
        Raw::message(request::GET_FEATURES, &[]),
    ];
    let mut turn = 0;
    each(context, |socket| {
        let mut raw = Raw::connect(&context.vhost())?;
        let message = &messages[turn % messages.len()];
        turn += 1;
        // The last message is sent before the negotiation.
        if turn % messages.len() != 0 {
            raw.negotiate()?;
        }
        in_two_at(&raw, message, socket)?;
        let _ = raw.ask(request::GET_FEATURES);
        Ok(())
    })
}

/// The control server asks for no descriptors: the kernel closes them when the bytes are read.
pub(super) fn control(context: &Context) -> Result<()> {
    each(context, |socket| {
        let raw = Raw::connect(&context.control())?;
        raw.bytes(b"GET /v1/stats", &[socket.as_fd()])?;
        forget(socket);
        let mut stream = UnixStream::connect(context.control())?;
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n")?;
        std::mem::forget(raw);
        Ok(())
    })
}
