//! Interrupts of queue pairs that are polled: whose they are, and where they are after somebody else's reset.

mod common;

use common::*;
use driver::transport::{DmaLimits, DoorbellCell, Mapping, Transport, TransportError};
use driver::{Device, DmaBuffer, Look, Op, Options, QueueOptions, QueuePair, Request, Tap};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

/// A transport with so many vectors, which notes those that have an eventfd.
#[derive(Debug)]
struct Noted {
    inner: Arc<driver::in_process::InProcess>,
    vectors: u16,
    attached: Mutex<Vec<bool>>,
    changes: Mutex<Vec<(u16, bool)>>,
}

impl Transport for Noted {
    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        self.inner.read32(offset)
    }
    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.inner.write32(offset, value)
    }
    fn doorbell(&self, offset: u64) -> Option<DoorbellCell> {
        self.inner.doorbell(offset)
    }
    fn dma_limits(&self) -> DmaLimits {
        self.inner.dma_limits()
    }
    fn map(&self, mapping: Mapping<'_>) -> Result<(), TransportError> {
        self.inner.map(mapping)
    }
    fn unmap(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        self.inner.unmap(iova, len)
    }
    fn msix_vectors(&self) -> u16 {
        self.vectors
    }
    fn set_msix(&self, eventfds: &[Option<BorrowedFd<'_>>]) -> Result<(), TransportError> {
        *self.attached.lock().unwrap() = eventfds.iter().map(Option::is_some).collect();
        self.inner.set_msix(eventfds)
    }
    fn set_vector(
        &self,
        vector: u16,
        eventfd: Option<BorrowedFd<'_>>,
    ) -> Result<(), TransportError> {
        self.attached.lock().unwrap()[usize::from(vector)] = eventfd.is_some();
        self.changes
            .lock()
            .unwrap()
            .push((vector, eventfd.is_some()));
        self.inner.set_vector(vector, eventfd)
    }
    fn set_bus_master(&self, enable: bool) -> Result<(), TransportError> {
        self.inner.set_bus_master(enable)
    }
    fn reset(&self) -> Result<(), TransportError> {
        self.inner.reset()
    }
}

fn noted(vectors: u16) -> (Arc<Noted>, Device) {
    let volume = memory(1 << 20);
    let made = move || {
        let namespaces = vec![namespace(1, volume, 512)];
        Ok::<_, std::convert::Infallible>(host(Default::default(), namespaces))
    };
    let transport = Arc::new(Noted {
        inner: driver::in_process::spawn(made).unwrap(),
        vectors,
        attached: Mutex::default(),
        changes: Mutex::default(),
    });
    let options = Options {
        io_queues: 4,
        ..Options::default()
    };
    let device = Device::open(transport.clone(), options).unwrap();
    (transport, device)
}

fn polled(device: &Device) -> QueuePair {
    let options = QueueOptions {
        polled: true,
        ..QueueOptions::default()
    };
    device.queue(1, options).unwrap()
}

fn submit(queue: &mut QueuePair, buffer: DmaBuffer) {
    let request = Request {
        op: Op::Read,
        lba: 0,
        blocks: 8,
        buffer: Some(buffer),
        user_data: 0,
    };
    queue.submit(request).unwrap();
}

/// A read, submitted and polled for.
fn read(queue: &mut QueuePair, buffer: DmaBuffer) -> DmaBuffer {
    submit(queue, buffer);
    drain(queue).remove(0).buffer.unwrap()
}

#[test]
fn an_interrupt_that_queue_pairs_share_is_not_let_go_of() {
    // One for the Admin queue, and one for all the others.
    let (transport, device) = noted(2);
    let mut queue = polled(&device);
    assert!(!queue.can_wake());
    let mut buffer = device.allocate(4096).unwrap();
    for _ in 0..1000 {
        buffer = read(&mut queue, buffer);
    }
    drop(queue);
    assert_eq!(*transport.attached.lock().unwrap(), [true, true]);
    assert!(transport.changes.lock().unwrap().is_empty());
}

/// Resets the device when so many entries were seen.
struct Resets(Device, u32);

impl Tap for Resets {
    fn look(&mut self, entry: nvme::Completion, new: bool) -> Look {
        if !new {
            return Look::Nothing;
        }
        self.1 = self.1.saturating_sub(1);
        if self.1 == 0 {
            self.1 = u32::MAX;
            self.0.reset().unwrap();
        }
        Look::Entry(entry)
    }
}

#[test]
fn an_interrupt_that_was_let_go_of_after_anothers_reset_is_taken_back() {
    // Wherever the reset falls: also between the look at the entries and the moment when the interrupt goes.
    let (transport, device) = noted(5);
    let mut buffer = device.allocate(4096).unwrap();
    for at in 254..259 {
        let mut queue = polled(&device);
        assert!(queue.can_wake());
        queue.set_tap(Some(Box::new(Resets(device.clone(), at))));
        for _ in 0..260 {
            buffer = read(&mut queue, buffer);
        }
        queue.set_tap(None);
        submit(&mut queue, buffer);
        // Whether it is over before or not: who sleeps now is woken.
        queue.arm();
        let vector = usize::from(queue.qid());
        assert!(transport.attached.lock().unwrap()[vector], "reset at {at}");
        buffer = drain(&mut queue).remove(0).buffer.unwrap();
    }
}
