//! The vhost-user side: an export of a volume. Its acknowledgements show the accepted descriptors.

use std::os::fd::BorrowedFd;

use rustix::net::{RecvFlags, recv};

use super::Message;
use super::kinds::{LENGTH, Use};
use crate::vhost_blk::{Bench, bytes, message};

/// Protocol features that descriptors need, with acknowledgements: MQ, REPLY_ACK, BACKEND_REQ,
/// INFLIGHT_SHMFD, CONFIGURE_MEM_SLOTS. Features: VERSION_1 and PROTOCOL_FEATURES.
const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 12 | 1 << 15;
const FEATURES: u64 = 1 << 32 | 1 << 30;
/// Flag of a message: it is to be acknowledged.
const NEED_REPLY: u32 = 8;
/// Messages with a descriptor.
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_BACKEND_REQ_FD: u32 = 21;
const SET_INFLIGHT_FD: u32 = 32;
const ADD_MEM_REG: u32 = 37;

pub struct Server {
    bench: Bench,
    /// Use of the only descriptor of the last message.
    came: Option<Use>,
    taken: u32,
}

impl Server {
    pub fn new() -> Server {
        Server {
            bench: Bench::new(),
            came: None,
            taken: 0,
        }
    }

    /// Encodes a message. The first one sets the connection up.
    pub fn message(&self, step: Message) -> Vec<u8> {
        let Message { what, a, b, fds } = step;
        let page = |byte: u8| u64::from(byte) << 12;
        let size = page(b & 15);
        let region = [page(a), size, page(a), page(b >> 6)];
        // Index of a queue; its eighth bit means that there is no descriptor.
        let queue = bytes(&[u64::from(b & 3) | u64::from(b & 128) << 1]);
        let (request, payload) = match what % 8 {
            0 => {
                let mut set_up = message(16, 0, &bytes(&[PROTOCOL]));
                set_up.extend(message(2, 0, &bytes(&[FEATURES])));
                return set_up;
            }
            1 => {
                let regions = u64::from(fds.min(8));
                let mut table = vec![regions];
                for index in 0..regions {
                    table.extend([page(a) + index * LENGTH, size, page(a) + index * LENGTH, 0]);
                }
                (SET_MEM_TABLE, bytes(&table))
            }
            2 => {
                let padded = [&[0], &region[..]].concat();
                (ADD_MEM_REG, bytes(&padded))
            }
            3 => (SET_VRING_KICK, queue),
            4 => (SET_VRING_CALL, queue),
            5 => (SET_VRING_ERR, queue),
            6 if a & 1 == 0 => (SET_BACKEND_REQ_FD, Vec::new()),
            6 => {
                let inflight = [u64::from(b) << 8, page(a >> 6), 16 << 16 | 4];
                (SET_INFLIGHT_FD, bytes(&inflight))
            }
            _ => (u32::from(a % 46), bytes(&[u64::from(b), 0, 0, 0])),
        };
        message(request, NEED_REPLY, &payload)
    }

    /// Remembers the descriptor of the next message.
    pub fn expect(&mut self, step: Message, first: Use) {
        // A message for a queue may claim to have no descriptor; an attached one is then closed.
        let none = matches!(step.what % 8, 3..=5) && step.b & 128 != 0;
        self.came = (step.fds == 1 && !none).then_some(first);
    }

    pub fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        self.bench.send(bytes, fds);
    }

    pub fn work(&mut self) {
        // A message that unmaps memory is answered a little later, and so are the following ones.
        (0..4).for_each(|_| self.bench.poll());
        let mut answers = [0; 4096];
        let received = recv(&self.bench.client, &mut answers[..], RecvFlags::DONTWAIT);
        if matches!(received, Ok((_, 0))) {
            // The server has disconnected; connect the next front-end.
            self.bench.connect();
            let set_up = self.message(super::VERSION);
            self.send(&set_up, &[]);
        }
        let count = received.map_or(0, |(_, count)| count);
        // Other replies are longer, or have another type.
        for answer in answers[..count].chunks_exact(20) {
            let word = |at: usize| u32::from_ne_bytes(answer[at..at + 4].try_into().unwrap());
            let (request, size) = (word(0), word(8));
            if size == 8 && word(12) == 0 && word(16) == 0 {
                self.acknowledged(request);
            }
        }
    }

    fn acknowledged(&mut self, request: u32) {
        let Some(came) = self.came else { return };
        let wanted = match request {
            SET_MEM_TABLE | ADD_MEM_REG | SET_INFLIGHT_FD => Use::Memory,
            SET_VRING_KICK | SET_VRING_CALL => Use::Eventfd,
            SET_BACKEND_REQ_FD => Use::Stream,
            _ => return,
        };
        assert_eq!(came, wanted, "taken by request {request}");
        self.taken += 1;
    }

    /// Disconnects the front-end; returns the number of accepted descriptors.
    pub fn end(self) -> u32 {
        self.bench.finish();
        self.taken
    }
}
