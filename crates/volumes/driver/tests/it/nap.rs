//! Queue pairs that are polled: their interrupts, where these are after another owner's reset, and
//! their rests between two looks.

use crate::common::*;
use dma::{Buffer, SegmentList};
use driver::transport::{DmaLimits, DoorbellCell, Mapping, Transport, TransportError};
use driver::{
    Device, DmaBuffer, NvmeVolume, Op, Options, QueueOptions, QueuePair, Request, Tap, TapResult,
};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use volume::{Effect, Fault, FaultVolume, Faults, Io, IoOptions, OpKind, Volume};

/// A transport with so many vectors, which notes those that have an eventfd.
#[derive(Debug)]
struct Noted {
    inner: Arc<in_process::InProcess>,
    vectors: u16,
    attached: Mutex<Vec<bool>>,
    changes: Mutex<Vec<(u16, bool)>>,
    pauses: AtomicU32,
    /// What happens while somebody pauses, once.
    meanwhile: Mutex<Option<Meanwhile>>,
}

/// What another owner does to the device.
struct Meanwhile(Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Meanwhile")
    }
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
    fn pause(&self) {
        self.pauses.fetch_add(1, Ordering::Relaxed);
        let meanwhile = self.meanwhile.lock().unwrap().take();
        if let Some(Meanwhile(deed)) = meanwhile {
            deed();
        }
        self.inner.pause();
    }
}

impl Noted {
    /// Pauses since the last call.
    fn paused(&self) -> u32 {
        self.pauses.swap(0, Ordering::Relaxed)
    }
}

fn noted(vectors: u16) -> (Arc<Noted>, Device) {
    noted_on(memory(1 << 20), vectors)
}

fn noted_on(volume: Arc<dyn Volume>, vectors: u16) -> (Arc<Noted>, Device) {
    let made = move || {
        let namespaces = vec![namespace(1, volume, 512)];
        Ok::<_, std::convert::Infallible>(host(Default::default(), namespaces))
    };
    let transport = Arc::new(Noted {
        inner: in_process::spawn(made).unwrap(),
        vectors,
        attached: Mutex::default(),
        changes: Mutex::default(),
        pauses: AtomicU32::new(0),
        meanwhile: Mutex::default(),
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
fn shared_interrupt_stays_attached() {
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
    fn look(&mut self, entry: nvme::Completion, new: bool) -> TapResult {
        if !new {
            return TapResult::Nothing;
        }
        self.1 = self.1.saturating_sub(1);
        if self.1 == 0 {
            self.1 = u32::MAX;
            self.0.reset().unwrap();
        }
        TapResult::Entry(entry)
    }
}

#[test]
fn interrupt_detached_across_reset_is_attached_again() {
    // Wherever the reset falls: also between the look at the entries and the moment when the
    // interrupt is sent.
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
        // Whether the command has completed before or not: a thread that sleeps now is woken.
        queue.arm();
        let vector = usize::from(queue.qid());
        assert!(transport.attached.lock().unwrap()[vector], "reset at {at}");
        buffer = drain(&mut queue).remove(0).buffer.unwrap();
    }
}

/// A device on a volume that holds reads.
fn holding() -> (Arc<Noted>, Device, Arc<Faults>) {
    let volume = FaultVolume::new(memory(1 << 20));
    let faults = volume.faults();
    let (transport, device) = noted_on(Arc::new(volume), 5);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    (transport, device, faults)
}

fn until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LIMIT, "nothing happens");
    }
}

#[test]
fn only_waiter_of_one_queue_pair_pauses() {
    let (transport, device, faults) = holding();
    let mut queue = polled(&device);
    let buffer = device.allocate(4096).unwrap();
    transport.paused();
    assert_eq!(queue.poll(|_| ()), 0);
    assert_eq!(transport.paused(), 1, "nothing can come");
    submit(&mut queue, buffer);
    assert_eq!(queue.poll_restless(|_| ()), 0);
    assert_eq!(transport.paused(), 0, "it rings, and looks");
    until(|| faults.held() == 1);
    for _ in 0..100 {
        assert_eq!(queue.poll_restless(|_| ()), 0);
    }
    assert_eq!(transport.paused(), 0, "there are others to be looked at");
    assert_eq!(queue.poll(|_| ()), 0);
    assert!(transport.paused() > 1);
    faults.clear();
    faults.release();
    until(|| queue.poll_restless(|_| ()) == 1);
    assert_eq!(transport.paused(), 0);
}

#[test]
fn completion_during_pause_is_delivered() {
    let (transport, device, faults) = holding();
    let mut queue = polled(&device);
    let mut buffer = device.allocate(4096).unwrap();
    for _ in 0..20 {
        submit(&mut queue, buffer);
        queue.ring();
        until(|| faults.held() == 1);
        let (inner, faults) = (transport.inner.clone(), faults.clone());
        let qid = usize::from(queue.qid());
        let completed = move || {
            faults.release();
            until(|| {
                let completions = move |host: &mut in_process::Host| {
                    let stats = host.controller().stats();
                    let queue = &stats.queues[qid];
                    queue.commands.get() == queue.completions.get()
                };
                inner.with(completions).unwrap()
            });
        };
        *transport.meanwhile.lock().unwrap() = Some(Meanwhile(Box::new(completed)));
        transport.paused();
        let mut done = Vec::new();
        assert_eq!(queue.poll(|completion| done.push(completion)), 1);
        assert_eq!(transport.paused(), 1, "it came in the first moment");
        buffer = done.remove(0).buffer.unwrap();
    }
}

#[test]
fn controller_reset_during_pause_is_noticed() {
    let (transport, device, faults) = holding();
    let mut queue = polled(&device);
    let buffer = device.allocate(4096).unwrap();
    submit(&mut queue, buffer);
    queue.ring();
    until(|| faults.held() == 1);
    faults.clear();
    let other = device.clone();
    let reset = move || other.reset().unwrap();
    *transport.meanwhile.lock().unwrap() = Some(Meanwhile(Box::new(reset)));
    // The same poll that rested sees to it.
    queue.poll(|completion| completion.result.unwrap());
    assert_eq!(queue.counters().recreated, 1);
    until(|| queue.poll(|completion| completion.result.unwrap()) == 1 || queue.in_flight() == 0);
    assert_eq!(queue.counters().completions, 1);
}

#[test]
fn volume_on_device_does_not_pause_worker() {
    let (transport, device, faults) = holding();
    let volume = NvmeVolume::new(device, 1, QueueOptions::default(), false, "test".into()).unwrap();
    let io = Io::new(IoOptions::default());
    let mut queue = volume.open(&io).unwrap();
    let request = volume::Request::transfer(
        7,
        volume::Op::Read,
        0,
        SegmentList::owned(Buffer::new(4096)),
    );
    assert!(queue.submit(request).is_none());
    until(|| {
        queue.poll(&mut |_| ());
        faults.held() == 1
    });
    transport.paused();
    for _ in 0..100 {
        assert_eq!(queue.poll(&mut |_| ()), 0);
    }
    assert_eq!(transport.paused(), 0);
    faults.clear();
    faults.release();
    let mut over = Vec::new();
    until(|| queue.poll(&mut |completion| over.push(completion.tag)) == 1);
    assert_eq!(over, [7]);
}
