//! On a whole controller in this process, with a thread of its own: what is written is read, by two
//! guests on two slices, under resets; and a command allocates nothing.

use crate::counting;

use crate::common::*;
use controller::{Controller, ControllerConfig, NamespaceConfig};
use driver::transport::{DmaLimits, DoorbellCell, Mapping, Transport, TransportError};
use driver::{Device, Options};
use in_process::{Host, InProcess, spawn};
use mediate::Slice;
use nvme::{NvmOpcode, Status};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use volume::{Io, IoOptions, MemVolume, Volume};

const MIB: u64 = 1 << 20;

fn controller(size: u64, config: ControllerConfig) -> Arc<InProcess> {
    let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(size).unwrap());
    spawn(move || {
        let io = Io::new(IoOptions::default());
        let namespace = NamespaceConfig {
            block_size: 512,
            nguid: [1; 16],
            eui64: [1; 8],
            ..NamespaceConfig::new(1, volume)
        };
        Controller::new(0, config, vec![namespace], &io).map(|c| Host::new(c, io).unwrap())
    })
    .unwrap()
}

/// A transport whose status register is read without a message, which would allocate: the
/// driver looks at it at times.
#[derive(Debug)]
struct Quiet(Arc<InProcess>, AtomicBool, Vectors);

/// Whether a vector was given an eventfd, each time that one was changed.
type Vectors = Mutex<Vec<bool>>;

impl Transport for Quiet {
    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        if self.1.load(Ordering::Relaxed) && offset == nvme::regs::CSTS {
            return Ok(1);
        }
        self.0.read32(offset)
    }
    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.0.write32(offset, value)
    }
    fn doorbell(&self, offset: u64) -> Option<DoorbellCell> {
        self.0.doorbell(offset)
    }
    fn dma_limits(&self) -> DmaLimits {
        self.0.dma_limits()
    }
    fn map(&self, mapping: Mapping<'_>) -> Result<(), TransportError> {
        self.0.map(mapping)
    }
    fn unmap(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        self.0.unmap(iova, len)
    }
    fn msix_vectors(&self) -> u16 {
        self.0.msix_vectors()
    }
    fn set_msix(&self, eventfds: &[Option<BorrowedFd<'_>>]) -> Result<(), TransportError> {
        self.0.set_msix(eventfds)
    }
    fn set_vector(
        &self,
        vector: u16,
        eventfd: Option<BorrowedFd<'_>>,
    ) -> Result<(), TransportError> {
        if self.1.load(Ordering::Relaxed) {
            return Err(TransportError::Unsupported("messages"));
        }
        self.2.lock().unwrap().push(eventfd.is_some());
        self.0.set_vector(vector, eventfd)
    }
    fn set_bus_master(&self, enable: bool) -> Result<(), TransportError> {
        self.0.set_bus_master(enable)
    }
    fn reset(&self) -> Result<(), TransportError> {
        self.0.reset()
    }
}

#[test]
fn guests_use_own_slices_under_resets() {
    for (mdts, sgl) in [(8, true), (1, false)] {
        let config = ControllerConfig {
            mdts,
            ..ControllerConfig::default()
        };
        let options = Options {
            sgl,
            ..Options::default()
        };
        let device = Device::open(controller(4 * MIB, config), options).unwrap();
        let namespace = device.namespace(1).unwrap();
        let mut guests = [(8u64, 3000u64), (3008, 5000)].map(|(first, blocks)| {
            let slice = Slice::new(&namespace, first, blocks, false).unwrap();
            (
                Guest::new(&device, slice, 4 * MIB),
                vec![0u8; blocks as usize * 512],
            )
        });
        let mut random = Random(41 + u64::from(mdts));
        for round in 0..1500u64 {
            let (guest, disk) = &mut guests[(round % 2) as usize];
            let most = if random.below(8) == 0 { 500 } else { 20 };
            let blocks = 1 + random.below(most);
            let lba = random.below(guest.slice.blocks() - blocks + 1);
            let len = (blocks * 512) as usize;
            let at = BASE + random.below(MIB / 4) * 4;
            let range = (lba * 512) as usize..(lba * 512) as usize + len;
            let write = random.below(2) == 0;
            let opcode = if write {
                NvmOpcode::WRITE
            } else {
                NvmOpcode::READ
            };
            let mut command = rw(opcode, lba, blocks as u32, 0, 0);
            prps(guest, &mut command, at, len as u64, BASE + 2 * MIB);
            if write {
                let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
                guest.write_memory(at, &bytes);
                disk[range.clone()].copy_from_slice(&bytes);
            }
            if round % 200 == 77 {
                // While it is in flight.
                let token = guest.submit(&command).unwrap();
                guest.queue.ring();
                device.reset().unwrap();
                assert_eq!(guest.wait(token).0, Status::SUCCESS);
            } else if round % 200 == 155 {
                let token = guest.submit(&command).unwrap();
                device.suspend().unwrap();
                guest.poll();
                device.resume().unwrap();
                assert_eq!(guest.wait(token).0, Status::SUCCESS);
            } else {
                assert_eq!(guest.run(&command), Status::SUCCESS);
            }
            if !write {
                assert!(guest.read_memory(at, len) == disk[range], "round {round}");
            }
        }
        // The whole device, as seen with read access to all of it.
        let slice = Slice::whole(&namespace, true).unwrap();
        let mut all = Guest::new(&device, slice, 4 * MIB);
        let mut expected = vec![0u8; 4 << 20];
        for (guest, disk) in &guests {
            let at = guest.slice.first_lba() as usize * 512;
            expected[at..at + disk.len()].copy_from_slice(disk);
        }
        for at in (0..4 * MIB).step_by(64 << 10) {
            let mut read = rw(NvmOpcode::READ, at / 512, 128, 0, 0);
            prps(&all, &mut read, BASE, 64 << 10, BASE + MIB);
            assert_eq!(all.run(&read), Status::SUCCESS);
            let seen = all.read_memory(BASE, 64 << 10);
            assert!(seen == expected[at as usize..][..64 << 10], "at {at}");
        }
    }
}

#[test]
fn worker_sleeps_until_device_interrupt() {
    let device = Device::open(
        controller(MIB, ControllerConfig::default()),
        Options::default(),
    )
    .unwrap();
    let slice = Slice::whole(&device.namespace(1).unwrap(), false).unwrap();
    let mut guest = Guest::new(&device, slice, MIB);
    let waker = guest.queue.waker().unwrap();
    let mut slept = 0;
    for _ in 0..500 {
        let token = guest.submit(&rw(NvmOpcode::READ, 0, 8, BASE, 0)).unwrap();
        guest.queue.ring();
        let start = Instant::now();
        while !guest.ended.contains_key(&token) {
            assert!(start.elapsed() < LIMIT);
            slept += u32::from(sleep(&waker));
            guest.poll();
        }
        guest.ended.clear();
    }
    assert!(slept > 100, "{slept}");
    assert!(waker.arm() == Some(true) && guest.queue.deadline().is_none());
    drop(guest);
    assert!(waker.arm().is_none());
}

/// Sleeps until the device interrupts; `false` when there is nothing to sleep for.
fn sleep(waker: &mediate::Waker) -> bool {
    if waker.arm() != Some(true) {
        return false;
    }
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(
        waker.event_fd(),
        rustix::event::PollFlags::IN,
    )];
    // Without the interrupt this would be noticed: it is far longer than any command.
    let limit = rustix::event::Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    assert_eq!(rustix::event::poll(&mut fds, Some(&limit)).unwrap(), 1);
    true
}

#[test]
fn polled_queue_attaches_interrupt_only_to_sleep() {
    let transport = Arc::new(Quiet(
        controller(MIB, ControllerConfig::default()),
        AtomicBool::new(false),
        Vectors::default(),
    ));
    let device = Device::open(transport.clone(), Options::default()).unwrap();
    let slice = Slice::whole(&device.namespace(1).unwrap(), false).unwrap();
    let mut guest = Guest::new(&device, slice, MIB);
    let waker = guest.queue.waker().unwrap();
    let read = rw(NvmOpcode::READ, 0, 8, BASE, 0);
    let changes = || std::mem::take(&mut *transport.2.lock().unwrap());
    for _ in 0..3 {
        // Asleep for each of them: it stays.
        let mut slept = 0;
        for _ in 0..300 {
            let token = guest.submit(&read).unwrap();
            guest.queue.ring();
            while !guest.ended.contains_key(&token) {
                slept += u32::from(sleep(&waker));
                guest.poll();
            }
        }
        assert!(slept > 50 && changes().is_empty(), "{slept}");
        // Polled for: the device is to interrupt nobody, after a while.
        for _ in 0..1000 {
            assert_eq!(guest.run(&read), Status::SUCCESS);
        }
        assert_eq!(changes(), [false]);
        // With nothing in flight there is nothing to be woken for.
        assert_eq!(waker.arm(), Some(true));
        assert!(changes().is_empty());
        // It is found by chance that a command is not yet over when its owner wants to sleep.
        let mut round = 0;
        while transport.2.lock().unwrap().is_empty() {
            let token = guest.submit(&read).unwrap();
            guest.queue.ring();
            while !guest.ended.contains_key(&token) {
                sleep(&waker);
                guest.poll();
            }
            round += 1;
            assert!(round < 100_000);
        }
        assert_eq!(changes(), [true]);
    }
    // The next owner of the queue pair finds its interrupt in place.
    for _ in 0..1000 {
        assert_eq!(guest.run(&read), Status::SUCCESS);
    }
    assert_eq!(changes(), [false]);
    drop(guest);
    assert_eq!(changes(), [true]);
    device.reset().unwrap();
    let mut guest = Guest::new(&device, slice, MIB);
    for _ in 0..1000 {
        assert_eq!(guest.run(&read), Status::SUCCESS);
    }
    assert_eq!(changes(), [false]);
    // A reset brings all vectors back; the queue pair takes its own once more, for another may
    // have detached it meanwhile.
    device.reset().unwrap();
    for _ in 0..1000 {
        assert_eq!(guest.run(&read), Status::SUCCESS);
    }
    assert_eq!(changes(), [true, false]);
}

#[test]
fn commands_allocate_no_memory() {
    let config = ControllerConfig {
        mdts: 4,
        mapped_doorbells: true,
        ..ControllerConfig::default()
    };
    let transport = Arc::new(Quiet(
        controller(4 * MIB, config),
        AtomicBool::new(false),
        Vectors::default(),
    ));
    let device = Device::open(transport.clone(), Options::default()).unwrap();
    transport.1.store(true, Ordering::Relaxed);
    let slice = Slice::new(&device.namespace(1).unwrap(), 8, 4000, false).unwrap();
    let mut guest = Guest::new(&device, slice, 4 * MIB);
    let mut commands = Vec::new();
    // One page, two pages, a list, one that is split; scattered and not.
    for (i, (blocks, offset)) in [(8u32, 0u64), (8, 512), (64, 4), (512, 0)]
        .into_iter()
        .enumerate()
    {
        for opcode in [NvmOpcode::READ, NvmOpcode::WRITE] {
            let mut command = rw(opcode, 16, blocks, 0, 0);
            let list = BASE + 2 * MIB + i as u64 * 0x1_0000;
            prps(
                &guest,
                &mut command,
                BASE + offset,
                u64::from(blocks) * 512,
                list,
            );
            commands.push(command);
        }
    }
    commands.push(rw(NvmOpcode::READ, 0, 16, BASE + 0x5000, BASE + 0x1000));
    let mut counted = 0;
    for round in 0..400 {
        let before = counting::allocations();
        let mut left = 0;
        for command in &commands {
            while guest.queue.room() == 0 {
                left -= guest
                    .queue
                    .poll(&mut |_, status, _| assert!(status.is_success()));
            }
            guest.queue.submit(command, &guest.map, 0).unwrap();
            left += 1;
        }
        guest.queue.ring();
        let start = Instant::now();
        while left > 0 {
            left -= guest
                .queue
                .poll(&mut |_, status, _| assert!(status.is_success()));
            assert!(start.elapsed() < Duration::from_secs(60));
        }
        if round >= 100 {
            counted += counting::allocations() - before;
        }
    }
    assert_eq!(counted, 0);
    assert_eq!(guest.queue.stats().bounced(), 0);
    transport.1.store(false, Ordering::Relaxed);
    // The counter counts.
    let before = counting::allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(counting::allocations() - before, 1);
}
