//! A TCP echo of as many bytes as a read has, without parsing commands or placing data in memory.
//! No initiator and target can be faster together.
//!
//! The bytes are those of a read of 4 KiB ("NVMe over TCP Transport 1.1", 3.6.2): a command
//! capsule, answered by a C2HData PDU with the data, whose SUCCESS flag stands for the completion.

use anyhow::{Context, Result, bail};
use load::lane::{Geometry, IoResult, Lane, Target};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

/// Size in bytes of a command capsule: the common header and the command.
const CAPSULE: usize = 8 + 64;
/// Size in bytes of a C2HData header.
const HEADER: usize = 24;
/// Size in bytes of a digest, for a header or data.
const DIGEST: usize = 4;
/// Size in bytes of the receive buffer, as in our own initiator and target.
const BUFFER: usize = 128 << 10;
/// Maximum number of answers in one send.
const MAX_BATCH: usize = 64;

/// Way in which both sides wait for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Both sides poll.
    Polling,
    /// Both sides sleep in the kernel.
    Blocking,
}

/// Sizes in bytes of a request and of its answer.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    request: usize,
    answer: usize,
}

/// An echo with a server thread on another CPU.
pub struct EchoTarget {
    pub wait: Wait,
    pub connections: u16,
    /// Whether the messages are longer by the size of digests.
    pub digests: bool,
    /// CPU of the server.
    pub cpu: usize,
}

impl Target for EchoTarget {
    type Lane = EchoLane;

    fn geometry(&self) -> Geometry {
        Geometry {
            size: 1 << 30,
            block_size: 512,
            description: format!("echo by TCP, {:?}", self.wait),
        }
    }

    fn lane(&self, _index: u16, depth: u16, bytes: usize) -> Result<EchoLane> {
        let digest = if self.digests { DIGEST } else { 0 };
        let sizes = Sizes {
            request: CAPSULE + digest,
            answer: HEADER + digest + bytes + digest,
        };
        let listener = TcpListener::bind("127.0.0.1:0").context("a socket for the echo")?;
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for _ in 0..self.connections {
            let stream = TcpStream::connect(listener.local_addr()?)?;
            there.push(Peer {
                stream: open(listener.accept()?.0, self.wait)?,
                partly: 0,
            });
            here.push(Connection {
                stream: open(stream, self.wait)?,
                slots: VecDeque::with_capacity(depth.into()),
                unsent: 0,
                partly: 0,
            });
        }
        let cpu = self.cpu;
        let server = std::thread::Builder::new().name("echo".into());
        let server = server.spawn(move || {
            load::pin(&[cpu], 0)?;
            serve(&mut there, sizes)
        })?;
        Ok(EchoLane {
            connections: here,
            server: Some(server),
            sizes,
            requests: vec![0x5a; usize::from(depth) * sizes.request],
            buffer: vec![0; BUFFER],
        })
    }
}

fn open(stream: TcpStream, wait: Wait) -> Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(wait == Wait::Polling)?;
    Ok(stream)
}

/// Sends all bytes, whether or not the socket is in blocking mode.
fn send(stream: &mut TcpStream, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Receives the available bytes; `None` if there are none.
fn receive(stream: &mut TcpStream, buffer: &mut [u8]) -> Result<Option<usize>> {
    match stream.read(buffer) {
        Ok(len) => Ok(Some(len)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A connection of the server.
struct Peer {
    stream: TcpStream,
    /// Number of bytes received of an incomplete request.
    partly: usize,
}

/// Answers requests until the other side has closed the connection.
fn serve(peers: &mut [Peer], sizes: Sizes) -> Result<()> {
    let answers = vec![0xa5; MAX_BATCH * sizes.answer];
    let mut buffer = vec![0; MAX_BATCH * sizes.request];
    loop {
        for peer in &mut *peers {
            match receive(&mut peer.stream, &mut buffer)? {
                None => std::hint::spin_loop(),
                Some(0) => return Ok(()),
                Some(len) => {
                    let bytes = peer.partly + len;
                    peer.partly = bytes % sizes.request;
                    let mut whole = bytes / sizes.request;
                    while whole > 0 {
                        let count = whole.min(MAX_BATCH);
                        whole -= count;
                        match send(&mut peer.stream, &answers[..count * sizes.answer]) {
                            Ok(()) => {}
                            // The connection ends with answers outstanding.
                            Err(_) => return Ok(()),
                        }
                    }
                }
            }
        }
    }
}

/// A connection of the client.
struct Connection {
    stream: TcpStream,
    /// Slots of the I/Os in flight, in the order of their answers.
    slots: VecDeque<u16>,
    /// Number of requests that have not been sent.
    unsent: usize,
    /// Number of bytes received of an incomplete answer.
    partly: usize,
}

/// The client of an echo, as a lane.
pub struct EchoLane {
    connections: Vec<Connection>,
    server: Option<JoinHandle<Result<()>>>,
    sizes: Sizes,
    requests: Vec<u8>,
    buffer: Vec<u8>,
}

impl Lane for EchoLane {
    fn submit(&mut self, slot: u16, _write: bool, _offset: u64) -> Result<()> {
        let count = self.connections.len();
        let connection = &mut self.connections[usize::from(slot) % count];
        connection.slots.push_back(slot);
        connection.unsent += 1;
        Ok(())
    }

    fn kick(&mut self) -> Result<()> {
        for connection in &mut self.connections {
            let unsent = std::mem::take(&mut connection.unsent);
            let bytes = &self.requests[..unsent * self.sizes.request];
            send(&mut connection.stream, bytes)?;
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        let mut ended = 0;
        for connection in &mut self.connections {
            if connection.slots.is_empty() {
                continue;
            }
            let Some(len) = receive(&mut connection.stream, &mut self.buffer)? else {
                continue;
            };
            if len == 0 {
                bail!("the echo has ended");
            }
            let bytes = connection.partly + len;
            connection.partly = bytes % self.sizes.answer;
            for _ in 0..bytes / self.sizes.answer {
                let slot = connection.slots.pop_front();
                done(slot.context("more answers than requests")?, Ok(()));
                ended += 1;
            }
        }
        Ok(ended)
    }

    fn wait(&mut self, _: Duration, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        self.poll(done)
    }

    fn put(&mut self, _: u16, _: &[u8]) {}

    fn get(&self, _: u16, _: &mut [u8]) {}
}

impl Drop for EchoLane {
    fn drop(&mut self) {
        for connection in &self.connections {
            let _ = connection.stream.shutdown(std::net::Shutdown::Both);
        }
        if let Some(server) = self.server.take() {
            match server.join() {
                Ok(Ok(())) => {}
                Ok(Err(error)) => eprintln!("  the echo's server: {error:#}"),
                Err(_) => eprintln!("  the echo's server ended by a bug"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use load::job::Job;

    #[test]
    fn echo_target_answers_with_request_length() {
        for (wait, connections, depth) in [
            (Wait::Polling, 1, 1),
            (Wait::Polling, 4, 128),
            (Wait::Blocking, 1, 32),
        ] {
            let target = EchoTarget {
                wait,
                connections,
                digests: connections == 4,
                cpu: 0,
            };
            let job = Job {
                depth,
                ios: Some(2000),
                ..Job::default()
            };
            let measured = load::run(&target, &job, &mut ()).unwrap();
            assert_eq!(measured.read.ios, 2000, "{wait:?}");
        }
    }
}
