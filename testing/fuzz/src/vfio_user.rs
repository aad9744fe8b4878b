//! The vfio-user server against a client that sends anything.
//!
//! The input is a script: pieces of raw bytes, well-formed messages with arbitrary contents,
//! descriptors attached to either, and completions of requests that the device left pending. The
//! device checks the guarantees of the protocol.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, recv, sendmsg, socketpair,
};
use vfio_user::{
    Connection, ConnectionStatus, Device, DeviceInfo, DmaMapping, DmaUnmapping, Errno, Interest,
    IrqData, IrqInfo, MmapArea, OperationOutcome, RegionInfo, RegionMmap, ServerLimits, SetIrqs,
    Unmapped,
};

/// Region sizes by index: BAR0, a read-only one that is huge, configuration space.
const REGIONS: [u64; 9] = [0x4000, 0, 1 << 40, 0, 0, 0, 0, 0x1000, 0];
/// Interrupts by type.
const IRQS: [u32; 5] = [1, 0, 33, 0, 0];
/// The version message of a client without capabilities: header and version 0.0.
const VERSION: [u32; 5] = [1 << 16, 20, 0, 0, 0];
/// Payload lengths of most messages: those of the structures, and invalid ones.
const LENGTHS: [usize; 8] = [0, 16, 17, 20, 24, 32, 40, 200];
/// No script makes a connection work longer than this many calls.
const MAX_CALLS: usize = 100_000;

/// Device that checks the server's guarantees; panics if one is broken.
struct Checker {
    file: OwnedFd,
    areas: [MmapArea; 1],
    defer: bool,
    pending: bool,
    /// Every so many calls fail.
    fail_every: u32,
    calls: u32,
    disconnected: bool,
}

impl Checker {
    fn called(&mut self) -> Result<(), Errno> {
        assert!(!self.disconnected, "called after the end");
        assert!(!self.pending, "called while an operation is pending");
        self.calls += 1;
        if self.fail_every != 0 && self.calls.is_multiple_of(self.fail_every) {
            return Err(Errno::IO);
        }
        Ok(())
    }

    fn outcome(&mut self) -> Result<OperationOutcome, Errno> {
        self.called()?;
        self.pending = self.defer;
        Ok(if self.defer {
            OperationOutcome::Pending
        } else {
            OperationOutcome::Done
        })
    }

    fn check_access(&self, index: u32, offset: u64, count: usize) {
        assert!(count > 0 && count <= 1 << 20);
        let size = REGIONS[index as usize];
        assert!(offset < size && count as u64 <= size - offset);
    }
}

impl Device for Checker {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            reset: true,
            pci: true,
            num_regions: 9,
            num_irqs: 5,
        }
    }

    fn region(&self, index: u32) -> Option<RegionInfo<'_>> {
        let size = *REGIONS.get(index as usize)?;
        let mmap = RegionMmap {
            fd: self.file.as_fd(),
            offset: 0,
            areas: &self.areas,
        };
        let mmap = (index == 0).then_some(mmap);
        Some(RegionInfo {
            size,
            read: true,
            write: index != 2,
            mmap,
        })
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        self.called()?;
        self.check_access(index, offset, data.len());
        assert!(data.iter().all(|byte| *byte == 0), "another message's data");
        data.fill(0xa5);
        Ok(())
    }

    fn region_write(
        &mut self,
        index: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<OperationOutcome, Errno> {
        self.called()?;
        self.check_access(index, offset, data.len());
        assert_ne!(index, 2, "read-only");
        Ok(OperationOutcome::Done)
    }

    fn irq(&self, index: u32) -> Option<IrqInfo> {
        let count = *IRQS.get(index as usize)?;
        Some(IrqInfo {
            count,
            eventfd: true,
            ..Default::default()
        })
    }

    fn set_irqs(&mut self, irqs: SetIrqs) -> Result<OperationOutcome, Errno> {
        let available = IRQS[irqs.index as usize];
        assert!(irqs.start <= available && irqs.count <= available - irqs.start);
        let count = irqs.count as usize;
        match irqs.data {
            IrqData::None => {}
            IrqData::Bool(chosen) => assert!(count > 0 && chosen.len() == count),
            IrqData::Eventfd(fds) => {
                assert!(count > 0 && fds.len() == count);
                assert!(fds.iter().all(|fd| fd.is_some() == fds[0].is_some()));
            }
        }
        self.outcome()
    }

    fn dma_map(
        &mut self,
        map: DmaMapping,
        _fd: Option<OwnedFd>,
    ) -> Result<OperationOutcome, Errno> {
        assert!(map.size > 0 && map.iova.checked_add(map.size - 1).is_some());
        assert!(i64::try_from(map.offset.checked_add(map.size).unwrap()).is_ok());
        assert!(map.read || map.write);
        self.outcome()
    }

    fn dma_unmap(&mut self, unmap: DmaUnmapping) -> Result<Unmapped, Errno> {
        if let DmaUnmapping::Range { iova, size } = unmap {
            assert!(size > 0 && iova.checked_add(size - 1).is_some());
        }
        let outcome = self.outcome()?;
        Ok(Unmapped { size: 0, outcome })
    }

    fn reset(&mut self) -> Result<OperationOutcome, Errno> {
        self.outcome()
    }

    fn disconnected(&mut self) {
        assert!(!self.disconnected, "ended twice");
        self.disconnected = true;
        self.pending = false;
    }
}

/// Reads the script.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

/// A connection, its device, the client's end of the socket, and descriptors to send.
struct Bench {
    connection: Connection,
    device: Checker,
    peer: OwnedFd,
    files: [OwnedFd; 3],
    /// Whether to send messages that end the connection: raw bytes, more descriptors than are
    /// allowed.
    rude: bool,
}

impl Bench {
    fn new(setup: u8) -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, peer) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let limits = ServerLimits {
            work_per_call: 1 + u32::from(setup >> 4),
            max_data_xfer_size: if setup & 8 != 0 { 4096 } else { 1 << 20 },
            ..ServerLimits::default()
        };
        let device = Checker {
            file: memfd_create("region", MemfdFlags::CLOEXEC)?,
            areas: [MmapArea {
                offset: 0x1000,
                size: 0x1000,
            }],
            defer: setup & 2 != 0,
            pending: false,
            fail_every: if setup & 4 != 0 { 3 } else { 0 },
            calls: 0,
            disconnected: false,
        };
        let files = [
            open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?,
            memfd_create("client", MemfdFlags::CLOEXEC)?,
            eventfd(0, EventfdFlags::CLOEXEC)?,
        ];
        Ok(Self {
            connection: Connection::with_limits(ours, limits),
            device,
            peer,
            files,
            rude: setup & 0x80 != 0,
        })
    }

    /// Sends as many bytes as the socket accepts, with up to 19 descriptors: 16 are allowed.
    fn send(&mut self, bytes: &[u8], fds: u8) {
        let count = match fds {
            0..=5 => 0,
            6..=10 => 1,
            11..=13 => usize::from(fds - 9),
            14 => 16,
            _ if self.rude => 19,
            _ => 16,
        };
        let fds: Vec<_> = (0..count)
            .map(|i| self.files[i % self.files.len()].as_fd())
            .collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // A full or a closed socket is a case like any other.
        let _ = sendmsg(&self.peer, &[IoSlice::new(bytes)], &mut control, flags);
    }

    /// Lets the server work until it waits.
    fn work(&mut self) {
        for _ in 0..MAX_CALLS {
            let result = self.connection.on_ready(&mut self.device);
            self.check(&result);
            if !matches!(result, Ok(ConnectionStatus::MoreWork)) {
                return;
            }
        }
        panic!("endless loop");
    }

    fn complete(&mut self, result: Result<(), Errno>) {
        self.device.pending = false;
        let result = self.connection.complete(&mut self.device, result);
        self.check(&result);
    }

    fn check(&self, result: &Result<ConnectionStatus, vfio_user::ConnectionError>) {
        let closed = matches!(result, Ok(ConnectionStatus::Closed) | Err(_));
        assert_eq!(closed, self.device.disconnected);
        assert_eq!(
            self.device.pending,
            matches!(result, Ok(ConnectionStatus::Pending))
        );
        if closed {
            assert_eq!(self.connection.interest(), Interest::None);
        }
    }

    /// Throws the replies away.
    fn drain(&mut self) {
        let mut buf = [0; 4096];
        while recv(&self.peer, &mut buf[..], RecvFlags::DONTWAIT).is_ok_and(|(n, _)| n > 0) {}
    }
}

/// Feeds a connection with the script.
///
/// # Panics
///
/// If the server breaks a promise.
pub fn vfio_user_stream(data: &[u8]) {
    run(data);
}

/// Runs a script; returns how often the device was called.
fn run(data: &[u8]) -> u32 {
    let mut script = Script(data);
    let Some(setup) = script.byte() else { return 0 };
    // Without descriptors nothing can be tried.
    let Ok(mut bench) = Bench::new(setup) else {
        return 0;
    };
    if setup & 1 != 0 {
        let version: Vec<u8> = VERSION.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bench.send(&version, 0);
    }
    while let (Some(kind), Some(how)) = (script.byte(), script.byte()) {
        let length = usize::from(script.byte().unwrap_or(0));
        match kind & 15 {
            0 if bench.rude => {
                let bytes = script.bytes(length);
                bench.send(bytes, how >> 4);
            }
            0 | 2.. => {
                let length = if length < 0xf0 {
                    LENGTHS[length % LENGTHS.len()]
                } else {
                    length
                };
                let command = kind >> 4;
                let mut payload = script.bytes(length).to_vec();
                let mut fds = how >> 4;
                if how & 8 != 0 {
                    make_plausible(command, &mut payload);
                    // Descriptors only where some may be; one matches an interrupt set of one.
                    fds = match command {
                        2 | 3 | 8 => fds.min(6),
                        _ => 0,
                    };
                }
                bench.send(&message(command, how, &payload), fds);
            }
            1 => bench.complete(if length & 1 != 0 {
                Err(Errno::IO)
            } else {
                Ok(())
            }),
        }
        if how & 1 != 0 {
            bench.work();
        }
        if how & 4 == 0 {
            bench.drain();
        }
    }
    bench.work();
    bench.connection.close(&mut bench.device);
    assert!(bench.device.disconnected);
    bench.device.calls
}

/// Sends a message with a valid header.
fn message(command: u8, how: u8, payload: &[u8]) -> Vec<u8> {
    let flags = if how & 2 != 0 { 16u32 } else { 0 };
    let header = [
        u32::from(command) << 16,
        16 + payload.len() as u32,
        flags,
        0,
    ];
    let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend_from_slice(payload);
    bytes
}

/// Changes a payload so that most checks are passed: long enough, small
/// numbers, flags that go together.
fn make_plausible(command: u8, payload: &mut Vec<u8>) {
    let structure = match command {
        2 | 5 => 32,
        3 => 24,
        4 | 6 | 7 | 9 => 16,
        8 => 20,
        10 => 17,
        15 => 32,
        _ => 0,
    };
    if payload.len() < structure {
        payload.resize(structure, 1);
    }
    let length = payload.len() as u32;
    let mut words: Vec<u32> = payload
        .chunks_exact(4)
        .map(|word| u32::from(word[0]))
        .collect();
    match (command, &mut words[..]) {
        (9 | 10, [_, high, region, count, ..]) => {
            *high = 0;
            *region = [0, 7, 2, *region][*region as usize % 4];
            *count = if command == 10 { length - 16 } else { *count };
            words.truncate(4);
        }
        (15, [count, high, entries @ ..]) => {
            (*count, *high) = ((length - 8) / 24, 0);
            for entry in entries.chunks_exact_mut(6) {
                entry[1] = 0;
                entry[2] = [0, 7, 2, entry[2]][entry[2] as usize % 4];
                entry[3] %= 10;
            }
        }
        (8, [argsz, flags, index, start, count, ..]) => {
            *argsz += 20;
            *flags = 1 << (*flags % 3) | 8 << (*flags >> 2 & 3).min(2);
            *index = [2, 0, 2, *index][*index as usize % 4];
            *start %= 40;
            *count = [1, 0, *count][*count as usize % 3];
        }
        (2 | 3, [argsz, flags, ..]) => {
            *argsz += 32;
            *flags = if command == 2 {
                *flags & 3
            } else {
                u32::from(*flags & 15 == 0)
            };
            for high in words.iter_mut().skip(3).step_by(2) {
                *high = 0;
            }
        }
        (_, [argsz, _, index, ..]) => {
            *argsz += 16;
            *index %= 10;
        }
        _ => {}
    }
    for (word, value) in payload.chunks_exact_mut(4).zip(words) {
        word.copy_from_slice(&value.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    #[test]
    fn random_scripts_reach_device() {
        let mut chance = Chance::new();
        let mut calls = 0;
        for _ in 0..4000 {
            // Mostly negotiated: little happens otherwise.
            let data = chance.script(1000, |setup| *setup |= 1);
            calls += run(&data);
        }
        assert!(calls > 4000, "only {calls} calls: the scripts try nothing");
    }
}
