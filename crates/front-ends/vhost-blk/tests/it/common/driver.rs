//! A guest's driver of one virtqueue: it writes descriptors, rings when it is asked
//! to, and reads what was used.

use super::{F_EVENT_IDX, F_INDIRECT, TIMEOUT, eventfd, eventually};
use dma::Memory;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// Entries of a ring.
pub const SIZE: u16 = 64;
/// Descriptors of a request's own.
const DESCRIPTORS: u16 = 4;
/// Requests that can be in flight.
pub const SLOTS: u16 = SIZE / DESCRIPTORS;
/// Bytes of a request's own: header, status, indirect table, data.
const PER_SLOT: u64 = 48 << 10;
const STATUS: u64 = 64;
const TABLE: u64 = 1024;
const DATA: u64 = 4096;

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

/// What a status byte holds before the device writes it.
pub const UNTOUCHED: u8 = 0xee;

/// A request's data.
#[derive(Clone, Copy)]
pub enum Data<'a> {
    None,
    Out(&'a [u8]),
    In(usize),
}

/// A request to be made.
#[derive(Clone, Copy)]
pub struct Req<'a> {
    pub kind: u32,
    pub sector: u64,
    pub data: Data<'a>,
    pub indirect: bool,
}

impl<'a> Req<'a> {
    pub fn new(kind: u32, sector: u64, data: Data<'a>) -> Req<'a> {
        Req {
            kind,
            sector,
            data,
            indirect: false,
        }
    }

    pub fn read(sector: u64, len: usize) -> Req<'a> {
        Req::new(IN, sector, Data::In(len))
    }

    pub fn write(sector: u64, data: &'a [u8]) -> Req<'a> {
        Req::new(OUT, sector, Data::Out(data))
    }

    pub fn indirect(self) -> Req<'a> {
        Req {
            indirect: true,
            ..self
        }
    }
}

/// The segment of a discard or write-zeroes request.
pub fn segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

pub struct Driver {
    memory: Memory,
    /// Pages that the guest itself has written, for a test that copies them.
    pub written: RefCell<BTreeSet<u64>>,
    pub index: usize,
    base: u64,
    event_idx: bool,
    indirect: bool,
    pub next: u16,
    rung: u16,
    pub seen: u16,
    free: Vec<u16>,
    /// Data length wanted by the request of each slot.
    wanted: Vec<usize>,
    pub kicks: u64,
    pub kick: EventFd,
    pub call: EventFd,
    pub err: EventFd,
}

impl Driver {
    pub fn new(memory: &Memory, index: usize, base: u64, features: u64) -> Driver {
        Driver {
            memory: memory.clone(),
            written: RefCell::default(),
            index,
            base,
            event_idx: features & F_EVENT_IDX != 0,
            indirect: features & F_INDIRECT != 0,
            next: 0,
            rung: 0,
            seen: 0,
            free: (0..SLOTS).collect(),
            wanted: vec![0; usize::from(SLOTS)],
            kicks: 0,
            kick: eventfd(),
            call: eventfd(),
            err: eventfd(),
        }
    }

    pub fn descriptors(&self) -> u64 {
        self.base
    }

    pub fn available(&self) -> u64 {
        self.base + 0x1000
    }

    pub fn used(&self) -> u64 {
        self.base + 0x2000
    }

    /// Guest-physical address of a slot's memory.
    pub fn slot(&self, slot: u16) -> u64 {
        self.base + 0x4000 + u64::from(slot) * PER_SLOT
    }

    pub fn poke(&self, at: u64, bytes: &[u8]) {
        self.memory.write(at as usize, bytes).unwrap();
        let end = at + bytes.len() as u64;
        self.written
            .borrow_mut()
            .extend(at / 4096..end.div_ceil(4096));
    }

    /// Continues with a copy of the guest's memory, on another connection.
    pub fn move_to(&mut self, memory: &Memory) {
        self.memory = memory.clone();
        self.reconnect();
    }

    pub fn peek(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(at as usize, &mut bytes).unwrap();
        bytes
    }

    pub fn peek16(&self, at: u64) -> u16 {
        u16::from_le_bytes(self.peek(at, 2).try_into().unwrap())
    }

    /// Writes a descriptor into a table.
    pub fn describe(&self, table: u64, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.poke(table + u64::from(index) * 16, &bytes);
    }

    /// Prepares a request and makes it available, without ringing.
    pub fn post(&mut self, req: Req<'_>) -> u16 {
        assert!(!self.free.is_empty(), "no free slot");
        // The one that has rested longest: what was left of a request is not
        // covered up by the next one.
        let slot = self.free.remove(0);
        let at = self.slot(slot);
        let mut header = req.kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(req.sector.to_le_bytes());
        self.poke(at, &header);
        self.poke(at + STATUS, &[UNTOUCHED]);
        // Address, length, writable.
        let mut buffers = vec![(at, 16, false)];
        self.wanted[usize::from(slot)] = 0;
        match req.data {
            Data::None => {}
            Data::Out(bytes) => {
                self.poke(at + DATA, bytes);
                buffers.push((at + DATA, bytes.len() as u32, false));
            }
            Data::In(len) => {
                self.poke(at + DATA, &vec![0x55; len]);
                self.wanted[usize::from(slot)] = len;
                buffers.push((at + DATA, len as u32, true));
            }
        }
        buffers.push((at + STATUS, 1, true));
        let head = slot * DESCRIPTORS;
        if req.indirect && self.indirect {
            self.chain(at + TABLE, 0, &buffers);
            let bytes = buffers.len() as u32 * 16;
            self.describe(self.descriptors(), head, at + TABLE, bytes, 4, 0);
        } else {
            self.chain(self.descriptors(), head, &buffers);
        }
        self.offer(head);
        slot
    }

    fn chain(&self, table: u64, first: u16, buffers: &[(u64, u32, bool)]) {
        for (i, (addr, len, writable)) in buffers.iter().enumerate() {
            let last = i + 1 == buffers.len();
            let flags = u16::from(!last) | u16::from(*writable) << 1;
            let index = first + i as u16;
            self.describe(table, index, *addr, *len, flags, index + 1);
        }
    }

    /// Makes a head available.
    pub fn offer(&mut self, head: u16) {
        let entry = u64::from(self.next % SIZE) * 2;
        self.poke(self.available() + 4 + entry, &head.to_le_bytes());
        self.next = self.next.wrapping_add(1);
        fence(Ordering::SeqCst);
        self.poke(self.available() + 2, &self.next.to_le_bytes());
        fence(Ordering::SeqCst);
    }

    /// Rings, if the device asks for it.
    pub fn ring(&mut self) {
        let old = std::mem::replace(&mut self.rung, self.next);
        let wanted = if self.event_idx {
            let event = self.peek16(self.used() + 4 + u64::from(SIZE) * 8);
            self.next.wrapping_sub(event).wrapping_sub(1) < self.next.wrapping_sub(old)
        } else {
            self.peek16(self.used()) & 1 == 0
        };
        if wanted {
            self.kick();
        }
    }

    pub fn kick(&mut self) {
        self.kicks += 1;
        self.kick.write(1).unwrap();
    }

    pub fn used_idx(&self) -> u16 {
        let index = self.peek16(self.used() + 2);
        fence(Ordering::SeqCst);
        index
    }

    /// The next used entry, if there is one: head and length.
    pub fn used_entry(&mut self) -> Option<(u32, u32)> {
        if self.used_idx() == self.seen {
            return None;
        }
        let entry = self.peek(self.used() + 4 + u64::from(self.seen % SIZE) * 8, 8);
        self.seen = self.seen.wrapping_add(1);
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
        Some((word(0), word(4)))
    }

    /// Asks for an interrupt when the used index passes this one (`used_event`).
    pub fn interrupt_after(&self, index: u16) {
        let at = self.available() + 4 + u64::from(SIZE) * 2;
        self.poke(at, &index.to_le_bytes());
        fence(Ordering::SeqCst);
    }

    /// Sleeps until the device has used something, woken up by its interrupt alone.
    pub fn sleep(&self) {
        if self.event_idx {
            self.interrupt_after(self.seen);
        } else {
            self.poke(self.available(), &0u16.to_le_bytes());
        }
        fence(Ordering::SeqCst);
        let deadline = Instant::now() + TIMEOUT;
        while self.used_idx() == self.seen {
            // An interrupt is waited for, and only then it is looked again.
            while self.call.read().is_err() {
                assert!(Instant::now() < deadline, "no interrupt came");
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }

    /// Waits for a request to end: its slot, status, and data.
    pub fn finish(&mut self) -> (u16, u8, Vec<u8>) {
        self.sleep();
        let (head, len) = self.used_entry().unwrap();
        let slot = head as u16 / DESCRIPTORS;
        assert_eq!(head as u16 % DESCRIPTORS, 0, "no such request");
        assert!(!self.free.contains(&slot), "it ended twice");
        self.free.push(slot);
        let at = self.slot(slot);
        let wanted = self.wanted[usize::from(slot)];
        let status = self.peek(at + STATUS, 1)[0];
        assert!(len as usize <= wanted + 1, "more than there was room for");
        (slot, status, self.peek(at + DATA, wanted))
    }

    /// Makes one request and waits for it.
    pub fn run(&mut self, req: Req<'_>) -> (u8, Vec<u8>) {
        let slot = self.post(req);
        self.ring();
        let (ended, status, data) = self.finish();
        assert_eq!(slot, ended);
        (status, data)
    }

    /// Makes one request, which must succeed.
    pub fn ok(&mut self, req: Req<'_>) -> Vec<u8> {
        let (status, data) = self.run(req);
        assert_eq!(status, 0, "request {} at {}", req.kind, req.sector);
        data
    }

    /// Waits until so many have been used, without taking them.
    pub fn wait_used(&self, index: u16) {
        eventually("used", || self.used_idx() == index);
    }

    /// Continues with the same rings and memory, on another connection.
    pub fn reconnect(&mut self) {
        self.call = eventfd();
        self.kick = eventfd();
        self.err = eventfd();
    }

    pub fn free_slots(&self) -> usize {
        self.free.len()
    }
}
