//! NBD server of zeroes on the client's thread. Reads get a structured reply of one chunk, as those
//! of qemu-nbd and nbdkit do; written data is dropped.

use anyhow::{Context, Result, ensure};
use nbd::protocol::wire;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};

/// Size in bytes of a request without its data.
const REQUEST: usize = 28;
const FLAGS: u16 = wire::export_flags::HAS_FLAGS
    | wire::export_flags::SEND_FLUSH
    | wire::export_flags::SEND_FUA
    | wire::export_flags::CAN_MULTI_CONN;

/// A connection after its handshake.
struct Connection {
    stream: UnixStream,
    received: Vec<u8>,
    /// Replies that the socket has had no space for.
    unsent: Vec<u8>,
}

pub struct NbdServer {
    connections: Vec<Connection>,
    accepted: Receiver<UnixStream>,
}

impl NbdServer {
    /// Starts a thread that accepts connections. Returns the export's URL, and the server.
    pub fn start(socket: &Path, size: u64) -> Result<(String, Self)> {
        let listener = UnixListener::bind(socket)?;
        let (sender, accepted) = channel();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let is_ready = handshake(&mut stream, size).is_ok();
                if is_ready && stream.set_nonblocking(true).is_ok() && sender.send(stream).is_err()
                {
                    return;
                }
            }
        });
        let server = Self {
            connections: Vec::new(),
            accepted,
        };
        let url = format!("nbd+unix:///?socket={}", socket.display());
        Ok((url, server))
    }

    /// Answers all requests that have arrived.
    pub fn turn(&mut self) -> Result<()> {
        let new = self.accepted.try_iter().map(|stream| Connection {
            stream,
            received: Vec::new(),
            unsent: Vec::new(),
        });
        self.connections.extend(new);
        self.connections.iter_mut().try_for_each(Connection::turn)
    }
}

impl Connection {
    fn turn(&mut self) -> Result<()> {
        let mut chunk = [0; 64 << 10];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => break,
                Ok(len) => self.received.extend_from_slice(&chunk[..len]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error).context("an NBD client"),
            }
        }
        let mut used = 0;
        while let Some(taken) = reply(&self.received[used..], &mut self.unsent)? {
            used += taken;
        }
        self.received.drain(..used);
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error).context("an NBD client"),
            }
        }
        Ok(())
    }
}

/// Appends the reply to the first request. Returns the request's length; `None` if it is not
/// complete.
fn reply(received: &[u8], replies: &mut Vec<u8>) -> Result<Option<usize>> {
    let Some(head) = received.get(..REQUEST) else {
        return Ok(None);
    };
    ensure!(wire::u32_at(head, 0) == Some(wire::REQUEST), "no request");
    let kind = wire::u16_at(head, 6).unwrap();
    let (cookie, offset) = (&head[8..16], &head[16..24]);
    let len = wire::u32_at(head, 24).unwrap();
    let data = match kind {
        wire::command::WRITE => len as usize,
        _ => 0,
    };
    if received.len() < REQUEST + data {
        return Ok(None);
    }
    if kind == wire::command::READ {
        replies.extend(wire::STRUCTURED_REPLY.to_be_bytes());
        replies.extend(wire::chunk::DONE.to_be_bytes());
        replies.extend(wire::chunk::OFFSET_DATA.to_be_bytes());
        replies.extend(cookie);
        replies.extend((8 + len).to_be_bytes());
        replies.extend(offset);
        replies.resize(replies.len() + len as usize, 0);
    } else if kind != wire::command::DISCONNECT {
        replies.extend(wire::SIMPLE_REPLY.to_be_bytes());
        replies.extend([0; 4]);
        replies.extend(cookie);
    }
    Ok(Some(REQUEST + data))
}

fn handshake(stream: &mut UnixStream, size: u64) -> Result<()> {
    stream.write_all(&wire::INIT_PASSWD)?;
    stream.write_all(&wire::IHAVEOPT.to_be_bytes())?;
    let flags = wire::handshake_flags::FIXED_NEWSTYLE | wire::handshake_flags::NO_ZEROES;
    stream.write_all(&flags.to_be_bytes())?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let option = wire::u32_at(&head, 8).unwrap();
        let mut data = vec![0; wire::u32_at(&head, 12).unwrap() as usize];
        stream.read_exact(&mut data)?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut bytes = wire::OPTION_REPLY.to_be_bytes().to_vec();
            bytes.extend(option.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            stream.write_all(&bytes)
        };
        match option {
            wire::option::STRUCTURED_REPLY => reply(wire::option_reply::ACK, &[])?,
            wire::option::GO => {
                let kind = wire::info::EXPORT.to_be_bytes();
                let export = [&kind[..], &size.to_be_bytes(), &FLAGS.to_be_bytes()].concat();
                reply(wire::option_reply::INFO, &export)?;
                reply(wire::option_reply::ACK, &[])?;
                return Ok(());
            }
            _ => reply(wire::option_reply::UNSUPPORTED, &[])?,
        }
    }
}
