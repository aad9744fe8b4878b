//! A vhost-user-blk export against a hostile front-end and a guest that writes anything into its
//! rings.
//!
//! The input is a script: pieces of guest memory, requests, kicks, messages with arbitrary contents
//! and descriptors, raw bytes, and releases of requests that the volume holds. For any script, the
//! memory around the guest's remains unchanged, and the next front-end is served.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dma::Memory;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use vhost_blk::{DiskOptions, Export, Server};
use volume::{Effect, Fault, FaultVolume, Faults, Io, IoOptions, MemVolume, OpKind};

/// The guest's memory lies in the middle of its file, between foreign bytes.
const BEFORE: usize = 0x1_0000;
const GUEST: usize = 0x2_0000;
const AROUND: u8 = 0xa5;
const USER: u64 = 0x7000_0000_0000;
/// The first queue, and places that descriptors may name.
const SIZE: u32 = 16;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const PLACES: [u64; 8] = [0, AVAILABLE, USED, 0x3000, 0x4000, 0x4010, 0x5000, 0x1_fff0];
/// Everything that is offered.
const PROTOCOL: u64 = 0xb229;
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28 | 0x7e46;
/// Payload lengths of most messages: those of the structures, and invalid ones.
const LENGTHS: [usize; 8] = [0, 8, 8, 8, 20, 24, 40, 72];

pub(crate) struct Bench {
    server: Server,
    pub(crate) client: UnixStream,
    address: SocketAddr,
    memory: Memory,
    /// Descriptors for messages: another file, an eventfd, a pipe.
    fds: [OwnedFd; 3],
    kick: OwnedFd,
    faults: Arc<Faults>,
    next: u16,
    _stop: UnixStream,
}

pub(crate) fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn state(index: u32, num: u32) -> Vec<u8> {
    [index.to_ne_bytes(), num.to_ne_bytes()].concat()
}

/// A message, as it is sent.
pub(crate) fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut message = state(request, flags | 1);
    message.extend((payload.len() as u32).to_ne_bytes());
    message.extend(payload);
    message
}

impl Bench {
    pub(crate) fn new() -> Bench {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vnvme-fuzz-{}-{count}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let client = UnixStream::connect_addr(&address).unwrap();
        client.set_nonblocking(true).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let volume = FaultVolume::new(Arc::new(MemVolume::new(0x1_0000).unwrap()));
        let faults = volume.faults();
        let export = Export {
            volume: Arc::new(volume),
            disk: DiskOptions {
                queues: 4,
                ..DiskOptions::default()
            },
            listener: listener.into(),
            connects: worker::ConnectRate::UNLIMITED,
            max_in_flight: 1024,
            memory: dma::MemoryLimits::DEFAULT,
            intake: None,
            attach: None,
            resized: None,
            span: tracing::Span::none(),
        };
        let options = worker::Options {
            stop: Some(stopped.into()),
            ..worker::Options::default()
        };
        let server = Server::new(export, Io::new(IoOptions::default()), options).unwrap();
        let memory = Memory::anonymous(2 * BEFORE + GUEST).unwrap();
        memory.write(0, &[AROUND; BEFORE]).unwrap();
        memory.write(BEFORE + GUEST, &[AROUND; BEFORE]).unwrap();
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let other = Memory::anonymous(0x1_0000).unwrap();
        let fds = [
            other.fd().try_clone_to_owned().unwrap(),
            event(),
            rustix::pipe::pipe().unwrap().0,
        ];
        Bench {
            server,
            client,
            address,
            memory,
            fds,
            kick: event(),
            faults,
            next: 0,
            _stop: stop,
        }
    }

    /// The next front-end; the guest's rings are as they were.
    pub(crate) fn connect(&mut self) {
        self.client = UnixStream::connect_addr(&self.address).unwrap();
        self.client.set_nonblocking(true).unwrap();
    }

    pub(crate) fn send(&self, data: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        // A server that has hung up, or that does not read any more, is fine.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendmsg(&self.client, &[IoSlice::new(data)], &mut control, flags);
    }

    fn message(&self, request: u32, flags: u32, payload: &[u8], fd: Option<BorrowedFd<'_>>) {
        self.send(&message(request, flags, payload), fd.as_slice());
    }

    /// Sets the connection up as a front-end does before its guest runs. `how` leaves features out.
    fn set_up(&mut self, how: u8) {
        let features = FEATURES & !(u64::from(how & 3) << 28);
        self.message(16, 0, &bytes(&[PROTOCOL]), None);
        self.message(2, 0, &bytes(&[features]), None);
        let table = [1, 0, GUEST as u64, USER, BEFORE as u64];
        self.message(5, 0, &bytes(&table), Some(self.memory.fd()));
        if how & 4 != 0 {
            // Tracking memory that was another's.
            let inflight = [0x1000, 0, u64::from(SIZE) << 16 | 4];
            self.message(32, 0, &bytes(&inflight), Some(self.fds[0].as_fd()));
        }
        self.message(8, 0, &state(0, SIZE), None);
        self.message(10, 0, &state(0, 0), None);
        let rings = [0, USER, USER + USED, USER + AVAILABLE, 0];
        self.message(9, 0, &bytes(&rings), None);
        self.message(13, 0, &bytes(&[0]), Some(self.fds[1].as_fd()));
        self.message(12, 0, &bytes(&[0]), Some(self.kick.as_fd()));
        self.message(18, 0, &state(0, 1), None);
    }

    fn poke(&self, guest: u64, data: &[u8]) {
        let room = GUEST.saturating_sub(guest as usize);
        let data = data.get(..room).unwrap_or(data);
        let _ = self.memory.write(BEFORE + guest as usize, data);
    }

    /// Makes a chain available.
    fn offer(&mut self, head: u8) {
        let entry = AVAILABLE + 4 + u64::from(self.next % SIZE as u16) * 2;
        self.poke(entry, &u16::from(head % 20).to_le_bytes());
        self.next = self.next.wrapping_add(1);
        self.poke(AVAILABLE + 2, &self.next.to_le_bytes());
    }

    /// A request with a header, two pieces of data and a status; `how` chooses.
    fn request(&mut self, kind: u8, how: u8, sector: u8) {
        let kind = [0, 1, 4, 8, 11, 13, 1, kind][usize::from(kind % 8)];
        let mut header = u32::from(kind).to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(u64::from(sector).to_le_bytes());
        self.poke(0x4000, &header);
        let (table, head) = if how & 1 != 0 {
            (0x3000, 0)
        } else {
            (0, how >> 4 & 7)
        };
        let data = u64::from(matches!(kind, 0 | 8)) << 1;
        let len = if matches!(kind, 11 | 13) { 16 } else { 512 };
        let place = PLACES[usize::from(how >> 1 & 7)];
        let pieces = [
            (0x4000u64, 16u32, 1u64),
            (place, len, 1 | data),
            (0x6000, len, 1 | data),
            (0x5000, 1, 2),
        ];
        for (i, (addr, len, flags)) in pieces.into_iter().enumerate() {
            let index = head + i as u8;
            let word = u64::from(len) | flags << 32 | u64::from(index + 1) << 48;
            self.poke(table + u64::from(index) * 16, &bytes(&[addr, word]));
        }
        if table != 0 {
            self.poke(0, &bytes(&[table, 64 | 4 << 32]));
        }
        self.offer(head);
    }

    /// Once round the worker's loop, and once more when a memory file was mapped meanwhile.
    pub(crate) fn poll(&mut self) {
        self.server.poll().unwrap();
        while dma::wait_for_mappings() {
            self.server.poll().unwrap();
        }
    }

    fn turn(&mut self) {
        self.poll();
        // Answers are not looked at, but for their room.
        let mut sink = [0; 4096];
        let _ = recv(&self.client, &mut sink[..], RecvFlags::DONTWAIT);
    }

    /// Polls until a condition holds: requests that a front-end left outstanding may take some time
    /// on a busy machine.
    fn until(&mut self, what: &str, mut so: impl FnMut(&mut Bench) -> bool) {
        let start = Instant::now();
        while !so(self) {
            assert!(start.elapsed().as_secs() < 10, "{what}");
            self.server.poll().unwrap();
        }
    }

    /// Disconnects the front-end, and checks that the guest's surroundings are unchanged and the
    /// next front-end is served.
    pub(crate) fn finish(mut self) {
        self.faults.clear();
        self.faults.release();
        self.turn();
        let _ = self.client.shutdown(std::net::Shutdown::Both);
        let stats = self.server.stats();
        self.until("the front-end has gone", |_| !stats.is_connected());
        let mut around = [0; BEFORE];
        for offset in [0, BEFORE + GUEST] {
            self.memory.read(offset, &mut around).unwrap();
            assert!(around.iter().all(|byte| *byte == AROUND), "not the guest's");
        }
        self.connect();
        self.message(1, 0, &[], None);
        let mut answer = [0; 64];
        let mut length = 0;
        self.until("the next one is served", |bench| {
            let received = recv(&bench.client, &mut answer[..], RecvFlags::DONTWAIT);
            length = received.map_or(0, |(_, length)| length);
            length != 0
        });
        assert_eq!(length, 20, "the next one's answer");
    }
}

/// The export against any front-end and any guest.
pub fn vhost_blk(data: &[u8]) {
    run(data);
}

/// Runs a script; answers how many requests were fetched.
fn run(data: &[u8]) -> u64 {
    let mut bench = Bench::new();
    let stats = bench.server.stats();
    let mut script = data.iter().copied();
    let mut next = || script.next();
    if let Some(how) = next().filter(|how| how & 0x80 == 0) {
        bench.set_up(how);
        bench.turn();
        bench.turn();
    }
    while let (Some(what), Some(a), Some(b), Some(c)) = (next(), next(), next(), next()) {
        let mut piece = |length: usize| -> Vec<u8> { (0..length).map_while(|_| next()).collect() };
        match what % 16 {
            0 | 1 => bench.poke(
                PLACES[usize::from(a % 8)] + u64::from(b),
                &piece(usize::from(c % 64)),
            ),
            2..=6 => bench.request(a, b, c),
            7..=9 => {
                bench.offer(a);
                let _ = rustix::io::write(&bench.kick, &1u64.to_ne_bytes());
            }
            10 | 11 => {
                let fd = match b % 8 {
                    0..3 => Some(bench.fds[usize::from(b % 8)].as_fd()),
                    _ => None,
                };
                let mut payload = piece(LENGTHS[usize::from(c % 8)]);
                payload.resize(LENGTHS[usize::from(c % 8)], 0);
                bench.message(u32::from(a % 46), u32::from(b & 8), &payload, fd);
            }
            12 => bench.send(&piece(usize::from(a % 32)), &[]),
            13 => bench.faults.add(Fault::always(OpKind::Any, Effect::Hold)),
            14 => {
                bench.faults.clear();
                bench.faults.release();
            }
            // Stop the queue, and start it again.
            _ => {
                bench.message(11, 0, &state(u32::from(a % 2), 0), None);
                if b & 1 != 0 {
                    bench.set_up(c & 7);
                }
            }
        }
        for _ in 0..what >> 6 {
            bench.turn();
        }
        if !stats.is_connected() && what & 16 != 0 {
            bench.connect();
            bench.set_up(a & 7);
        }
    }
    bench.turn();
    let requests = stats.queues.iter().map(|queue| queue.requests.get()).sum();
    bench.finish();
    requests
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    #[test]
    fn random_scripts_complete_requests() {
        let mut chance = Chance::new();
        let mut requests = 0;
        for _ in 0..1000 {
            // Mostly set up: little happens otherwise.
            let data = chance.script(400, |setup| *setup &= 0x7f);
            requests += run(&data);
        }
        assert!(
            requests > 5000,
            "only {requests} requests: the scripts try nothing"
        );
    }
}
