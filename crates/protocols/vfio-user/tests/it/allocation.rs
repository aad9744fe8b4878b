//! Doorbell writes and register reads allocate nothing once their connection is warm.
#![allow(unsafe_code)] // An allocator is unsafe to implement.

use crate::common::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use vfio_user::wire::flags;
use vfio_user::{
    Connection, ConnectionStatus, Device, DeviceInfo, DmaMapping, DmaUnmapping, Errno, IrqInfo,
    OperationOutcome, RegionInfo, SetIrqs, Unmapped,
};

struct Counting;

thread_local! {
    /// Of this thread: the one that runs the tests allocates when it likes.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is handed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Takes doorbells and remembers nothing but their number.
#[derive(Default)]
struct Doorbells(u64);

impl Device for Doorbells {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            reset: false,
            pci: true,
            num_regions: 9,
            num_irqs: 5,
        }
    }
    fn region(&self, _: u32) -> Option<RegionInfo<'_>> {
        Some(RegionInfo {
            size: 0x4000,
            read: true,
            write: true,
            mmap: None,
        })
    }
    fn region_read(&mut self, _: u32, _: u64, _: &mut [u8]) -> Result<(), Errno> {
        Ok(())
    }
    fn region_write(&mut self, _: u32, _: u64, _: &[u8]) -> Result<OperationOutcome, Errno> {
        self.0 += 1;
        Ok(OperationOutcome::Done)
    }
    fn irq(&self, _: u32) -> Option<IrqInfo> {
        None
    }
    fn set_irqs(&mut self, _: SetIrqs) -> Result<OperationOutcome, Errno> {
        Ok(OperationOutcome::Done)
    }
    fn dma_map(&mut self, _: DmaMapping, _: Option<OwnedFd>) -> Result<OperationOutcome, Errno> {
        Ok(OperationOutcome::Done)
    }
    fn dma_unmap(&mut self, _: DmaUnmapping) -> Result<Unmapped, Errno> {
        Ok(Unmapped {
            size: 0,
            outcome: OperationOutcome::Done,
        })
    }
    fn reset(&mut self) -> Result<OperationOutcome, Errno> {
        Ok(OperationOutcome::Done)
    }
    fn disconnected(&mut self) {}
}

#[test]
fn doorbells_allocate_no_memory() {
    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let mut connection = Connection::new(ours);
    let mut device = Doorbells::default();
    let version = bare_version(0);
    let posted = region_write(1, flags::NO_REPLY, BAR0, 0x1000, &[1, 0, 0, 0]);
    let waiting = region_write(2, 0, BAR0, 0x1000, &[1, 0, 0, 0]);
    let read = region_read(3, BAR0, 0x1c, 4);
    let mut replies = [0; 64];
    let mut before = 0;
    for round in 0..100 {
        let messages: &[&[u8]] = if round == 0 {
            &[&version]
        } else {
            &[&posted, &waiting, &read]
        };
        for message in messages {
            send(theirs.as_fd(), message, SendFlags::NOSIGNAL).unwrap();
            assert_eq!(connection.on_ready(&mut device), Ok(ConnectionStatus::Open));
            let _ = recv(theirs.as_fd(), &mut replies, RecvFlags::DONTWAIT);
        }
        if round == 1 {
            before = ALLOCATIONS.get();
        }
    }
    assert_eq!(ALLOCATIONS.get(), before);
    assert_eq!(device.0, 198);
}
