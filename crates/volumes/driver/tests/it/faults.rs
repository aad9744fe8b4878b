//! Faults: a controller that loses, repeats or invents completions, that is reset behind our back,
//! that fails, that disappears. Never a hang, never a panic, never a buffer returned that the
//! device may still write to.

use crate::common::*;
use controller::ControllerConfig;
use driver::transport::{DmaLimits, DoorbellCell, Mapping, Transport, TransportError};
use driver::{CommandError, Device, Event, Op, Options, QueueOptions, Request, Tap, TapResult};
use nvme::{Status, regs};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use volume::{Effect, Fault, FaultVolume, OpKind};

const MIB: u64 = 1 << 20;

/// A tap made of a closure that sees entries in order and says what becomes of them.
struct Tamper<F>(F);
impl<F: FnMut(nvme::Completion, bool) -> TapResult + Send> Tap for Tamper<F> {
    fn look(&mut self, entry: nvme::Completion, new: bool) -> TapResult {
        self.0(entry, new)
    }
}

/// Calls `spoil` with a count of the new entries, and nothing else.
fn each_new(
    mut spoil: impl FnMut(u64, nvme::Completion) -> TapResult + Send + 'static,
) -> Box<dyn Tap> {
    let mut seen = 0u64;
    Box::new(Tamper(move |entry, new: bool| {
        if !new {
            return TapResult::Nothing;
        }
        seen += 1;
        spoil(seen, entry)
    }))
}

/// Random I/O under a tap; the disk is right in the end, and the counters can be read.
fn under(tap: Box<dyn Tap>, options: Options, requests: u64) -> (driver::QueueCounters, Device) {
    let device = open(&disk(2 * MIB, 512), options);
    let mut queue = device
        .queue(
            1,
            QueueOptions {
                depth: 6,
                repeats: true,
                ..Default::default()
            },
        )
        .unwrap();
    queue.set_tap(Some(tap));
    let mut model = Exerciser::new(2 * MIB, 512, 64 << 10, 21);
    model.run(&device, &mut queue, requests, 8);
    queue.set_tap(None);
    model.verify(&mut queue);
    (queue.counters(), device)
}

#[test]
fn lost_completions_time_out_and_are_retried() {
    let tap = each_new(|n, entry| {
        if n % 100 == 50 {
            TapResult::Lost
        } else {
            TapResult::Entry(entry)
        }
    });
    let (counters, device) = under(tap, impatient(), 350);
    assert!(
        counters.aborts >= 1 && counters.retried >= 3,
        "{counters:?}"
    );
    assert!(device.resets() >= 1);
    assert_eq!(counters.recreated, device.resets());
}

/// With another status in every tenth completion.
fn failing(status: Status) -> Box<dyn Tap> {
    each_new(move |n, entry| {
        let mut entry = entry;
        if n % 10 == 5 {
            entry.set_status(status);
        }
        TapResult::Entry(entry)
    })
}

fn repeating() -> QueueOptions {
    QueueOptions {
        repeats: true,
        ..QueueOptions::default()
    }
}

fn flush() -> Request {
    Request {
        op: Op::Flush,
        lba: 0,
        blocks: 0,
        buffer: None,
        user_data: 0,
    }
}

#[test]
fn retryable_failures_are_repeated() {
    for status in [Status::DATA_TRANSFER_ERROR, Status::WRITE_FAULT] {
        let (counters, device) = under(failing(status), impatient(), 350);
        assert!(counters.retried >= 30, "{counters:?}");
        assert_eq!((counters.aborts, device.resets()), (0, 0));
    }
}

#[test]
fn permanent_failures_are_not_repeated() {
    let device = open(&disk(2 * MIB, 512), impatient());
    for status in [
        Status::DATA_TRANSFER_ERROR.with_dnr(true),
        Status::COMPARE_FAILURE,
        Status::RESERVATION_CONFLICT,
        Status::CONTROLLER_PATHING_ERROR,
    ] {
        let mut queue = device.queue(1, repeating()).unwrap();
        queue.set_tap(Some(each_new(move |_, mut entry| {
            entry.set_status(status);
            TapResult::Entry(entry)
        })));
        queue.submit(flush()).unwrap();
        let done = drain(&mut queue);
        assert_eq!(done[0].result, Err(CommandError::Status(status)));
        assert_eq!(queue.counters().retried, 0);
    }
}

/// As often as is asked for, and no more.
#[test]
fn command_fails_after_last_retry() {
    let device = open(&disk(2 * MIB, 512), impatient());
    for (options, repeated) in [
        (repeating(), impatient().retries),
        (QueueOptions::default(), 0),
    ] {
        let mut queue = device.queue(1, options).unwrap();
        queue.set_tap(Some(each_new(|_, mut entry| {
            entry.set_status(Status::INTERNAL_ERROR);
            TapResult::Entry(entry)
        })));
        queue.submit(flush()).unwrap();
        let done = drain(&mut queue);
        let failed = Err(CommandError::Status(Status::INTERNAL_ERROR));
        assert_eq!(done[0].result, failed);
        assert_eq!(queue.counters().retried, u64::from(repeated));
    }
}

#[test]
fn stale_and_repeated_completions_are_recognised() {
    let mut before: Vec<nvme::Completion> = Vec::new();
    let tap = each_new(move |n, entry| {
        let look = match n % 10 {
            3 => TapResult::Both(entry, entry),
            // Entries of long ago, of every slot in turn: most of their slots are in use again,
            // under another identifier.
            5..9 => match before
                .len()
                .checked_sub(7 + n as usize % 13)
                .and_then(|at| before.get(at))
            {
                Some(old) => TapResult::Both(*old, entry),
                None => TapResult::Entry(entry),
            },
            _ => TapResult::Entry(entry),
        };
        before.push(entry);
        look
    });
    let (counters, device) = under(tap, Options::default(), 1000);
    assert!(counters.stale >= 400, "{counters:?}");
    assert_eq!((counters.retried, device.resets()), (0, 0));
}

#[test]
fn stale_cid_counts_as_lost_completion() {
    let mut last: Option<nvme::Completion> = None;
    let tap = each_new(move |n, entry| {
        let old = last.replace(entry);
        match old {
            Some(old) if n % 150 == 75 => {
                last = Some(old);
                TapResult::Entry(old)
            }
            _ => TapResult::Entry(entry),
        }
    });
    let (counters, device) = under(tap, impatient(), 400);
    assert!(counters.stale >= 2 && device.resets() >= 1, "{counters:?}");
}

/// Shows the controller's entries as they are, and calls `early` with a count of the looks at a
/// place where there is none yet.
fn each_old(
    mut early: impl FnMut(u64, nvme::Completion) -> TapResult + Send + 'static,
) -> Box<dyn Tap> {
    let mut looks = 0u64;
    Box::new(Tamper(move |entry, new: bool| {
        if new {
            return TapResult::Entry(entry);
        }
        looks += 1;
        early(looks, entry)
    }))
}

#[test]
fn forged_completions_are_ignored() {
    // An entry that the controller never wrote, two times, with a command identifier and a queue of
    // its own invention. The head is then ahead of the controller, and nothing is where it is
    // looked for until a reset.
    let tap = each_old(|looks, entry| {
        if !matches!(looks, 15 | 9000) {
            return TapResult::Nothing;
        }
        let mut forged = entry;
        forged.cid = (0x7abc ^ looks as u16).into();
        forged.sqid = (1 + looks as u16 % 2).into();
        TapResult::Both(forged, forged)
    });
    let (counters, device) = under(tap, impatient(), 200);
    assert!(counters.stale >= 2 && device.resets() > 0, "{counters:?}");
}

#[test]
fn stuck_phase_is_found_by_timeout() {
    let mut hidden = None;
    let tap = each_new(move |n, entry| {
        // The 20th entry stays invisible, so everything behind it does, until the queue is created
        // again: its memory is zeroed then.
        if n == 20 {
            hidden = Some(entry);
        }
        if hidden == Some(entry) {
            TapResult::Nothing
        } else {
            TapResult::Entry(entry)
        }
    });
    let (counters, device) = under(tap, impatient(), 200);
    assert!(device.resets() > 0 && counters.retried > 0, "{counters:?}");
}

#[test]
fn premature_phase_is_survived() {
    let tap = each_old(|looks, entry| {
        if looks == 20 {
            TapResult::Entry(entry)
        } else {
            TapResult::Nothing
        }
    });
    let (counters, device) = under(tap, impatient(), 200);
    assert!(counters.stale > 0 && device.resets() > 0, "{counters:?}");
}

#[test]
fn hanging_command_is_aborted_and_times_out() {
    let faulty = FaultVolume::new(memory(MIB));
    let faults = faulty.faults();
    let transport = local(
        ControllerConfig::default(),
        vec![namespace(1, Arc::new(faulty), 512)],
    );
    let options = Options {
        retries: 0,
        ..impatient()
    };
    let device = open(&transport, options);
    let mut queue = device.queue(1, QueueOptions::default()).unwrap();
    faults.add(Fault::nth(OpKind::Read, 0, Effect::Hold));
    queue
        .submit_read(0, 1, device.allocate(512).unwrap(), 1)
        .unwrap();
    // The device keeps the read until the driver has given up on it.
    let (start, mut done) = (Instant::now(), Vec::new());
    while queue.counters().aborts == 0 {
        queue.poll(|completion| done.push(completion));
        assert!(start.elapsed() < LIMIT, "no abort: {:?}", queue.counters());
    }
    faults.release();
    done.extend(drain(&mut queue));
    let done = done.remove(0);
    assert!(
        matches!(
            done.result,
            Err(CommandError::TimedOut | CommandError::Reset)
        ),
        "{:?}",
        done.result
    );
    assert!(
        done.buffer.is_some(),
        "the controller was stopped, so the buffer is free"
    );
    // The disk works again.
    let read = Request {
        op: Op::Read,
        lba: 0,
        blocks: 1,
        buffer: device.allocate(512).ok(),
        user_data: 2,
    };
    assert!(queue.execute(read).unwrap().result.is_ok());
}

/// A transport that can be cut, and that makes the controller look sick.
#[derive(Debug)]
struct Sick {
    inner: Arc<in_process::InProcess>,
    gone: AtomicBool,
    unmaps_fail: AtomicBool,
    csts_or: AtomicU32,
    /// Accesses for which the registers are not there: they read 0, and writes are lost.
    away: AtomicU32,
    /// The same until the function's memory space is switched on.
    off: AtomicBool,
    /// Times that somebody resets the function right after it was enabled.
    forgets: AtomicU32,
    resets: AtomicU32,
    mapped: Mutex<Vec<(u64, u64)>>,
    maps: AtomicU64,
}

impl Sick {
    fn new(inner: Arc<in_process::InProcess>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            gone: AtomicBool::new(false),
            unmaps_fail: AtomicBool::new(false),
            csts_or: AtomicU32::new(0),
            away: AtomicU32::new(0),
            off: AtomicBool::new(false),
            forgets: AtomicU32::new(0),
            resets: AtomicU32::new(0),
            mapped: Mutex::default(),
            maps: AtomicU64::new(0),
        })
    }
    fn is_away(&self) -> bool {
        let less = |left: u32| left.checked_sub(1);
        let order = Ordering::Relaxed;
        self.off.load(order) || self.away.fetch_update(order, order, less).is_ok()
    }
    fn check(&self) -> Result<(), TransportError> {
        if self.gone.load(Ordering::Relaxed) {
            return Err(TransportError::Gone("pulled".into()));
        }
        Ok(())
    }
}

impl Transport for Sick {
    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        if self.gone.load(Ordering::Relaxed) {
            // As PCIe does it.
            return Ok(u32::MAX);
        }
        if self.is_away() {
            return Ok(0);
        }
        let value = self.inner.read32(offset)?;
        Ok(if offset == regs::CSTS {
            value | self.csts_or.load(Ordering::Relaxed)
        } else {
            value
        })
    }
    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        if self.gone.load(Ordering::Relaxed) {
            return Ok(());
        }
        if self.is_away() {
            return Ok(());
        }
        if offset == regs::CC && value & 1 == 0 {
            self.csts_or.store(0, Ordering::Relaxed);
        }
        self.inner.write32(offset, value)?;
        let (order, less) = (Ordering::Relaxed, |left: u32| left.checked_sub(1));
        if offset == regs::CC
            && value & 1 != 0
            && self.forgets.fetch_update(order, order, less).is_ok()
        {
            self.inner.reset()?;
            self.inner.set_bus_master(true)?;
        }
        Ok(())
    }
    fn doorbell(&self, _: u64) -> Option<DoorbellCell> {
        None
    }
    fn dma_limits(&self) -> DmaLimits {
        self.inner.dma_limits()
    }
    fn map(&self, mapping: Mapping<'_>) -> Result<(), TransportError> {
        self.check()?;
        self.maps.fetch_add(1, Ordering::Relaxed);
        self.mapped
            .lock()
            .unwrap()
            .push((mapping.iova, mapping.len));
        self.inner.map(mapping)
    }
    fn unmap(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        if self.unmaps_fail.load(Ordering::Relaxed) {
            return Err(TransportError::Gone("nobody answers".into()));
        }
        self.mapped.lock().unwrap().retain(|m| *m != (iova, len));
        self.inner.unmap(iova, len)
    }
    fn msix_vectors(&self) -> u16 {
        self.inner.msix_vectors()
    }
    fn set_msix(&self, fds: &[Option<BorrowedFd<'_>>]) -> Result<(), TransportError> {
        self.inner.set_msix(fds)
    }
    fn set_bus_master(&self, on: bool) -> Result<(), TransportError> {
        self.check()?;
        self.off.store(false, Ordering::Relaxed);
        self.inner.set_bus_master(on)
    }
    fn reset(&self) -> Result<(), TransportError> {
        self.check()?;
        self.resets.fetch_add(1, Ordering::Relaxed);
        self.inner.reset()
    }
    fn pause(&self) {
        // What has failed fatally executes nothing.
        if !self.gone.load(Ordering::Relaxed) && self.csts_or.load(Ordering::Relaxed) == 0 {
            self.inner.pause();
        }
    }
    fn is_stepped(&self) -> bool {
        true
    }
}

fn sick(size: u64) -> (Arc<Sick>, Device) {
    let transport = Sick::new(disk(size, 512));
    let device = Device::open(transport.clone(), impatient()).unwrap();
    (transport, device)
}

#[test]
fn pulled_device_fails_commands_and_returns_buffers() {
    let (transport, device) = sick(MIB);
    let mut queue = device.queue(1, QueueOptions::default()).unwrap();
    for i in 0..50 {
        queue
            .submit_read(i, 1, device.allocate(512).unwrap(), i)
            .unwrap();
    }
    let large = Request {
        op: Op::Write { fua: false },
        lba: 0,
        blocks: 2048,
        buffer: device.allocate(MIB as usize).ok(),
        user_data: 99,
    };
    queue.submit(large).unwrap();
    transport.gone.store(true, Ordering::Relaxed);
    let done = drain(&mut queue);
    assert_eq!(done.len(), 51);
    for completion in &done {
        assert_eq!(completion.result, Err(CommandError::Gone));
        // Its mappings could be taken away, so it is certain that nothing is written any more.
        assert!(completion.buffer.is_some());
    }
    assert!(transport.mapped.lock().unwrap().is_empty());
    assert!(device.is_gone());
    assert!(matches!(device.health(), Err(driver::Error::Gone)));
    assert!(device.queue(1, QueueOptions::default()).is_err());
    assert!(
        device.allocate(64 << 20).is_err(),
        "nothing can be mapped any more"
    );
}

#[test]
fn buffers_reachable_by_lost_device_are_never_returned() {
    let (transport, device) = sick(MIB);
    let mut queue = device.queue(1, QueueOptions::default()).unwrap();
    for i in 0..20 {
        queue
            .submit_read(i, 1, device.allocate(512).unwrap(), i)
            .unwrap();
    }
    queue.ring();
    transport.gone.store(true, Ordering::Relaxed);
    transport.unmaps_fail.store(true, Ordering::Relaxed);
    let done = drain(&mut queue);
    assert_eq!(done.len(), 20);
    assert!(done.iter().all(|c| c.buffer.is_none()));
    // The process behind the socket was alive after all, and continues to write: into memory that
    // nobody else has.
    let fresh = dma::Memory::anonymous(1 << 20).unwrap();
    drop(queue);
    let before = device.mapper().counters();
    assert_eq!(before.lost, 0, "nothing was released yet");
    drop(device);
    for _ in 0..100 {
        transport.inner.pause();
    }
    let mut bytes = vec![0; 1 << 20];
    fresh.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&b| b == 0));
}

#[test]
fn fatal_controller_is_reset_and_recovers() {
    let (transport, device) = sick(2 * MIB);
    let mut queue = device
        .queue(
            1,
            QueueOptions {
                depth: 8,
                ..Default::default()
            },
        )
        .unwrap();
    let mut model = Exerciser::new(2 * MIB, 512, 64 << 10, 3);
    let cfs = regs::Csts::new().with_cfs(true).into_bits();
    let mut next = 30;
    model.run_with(&device, &mut queue, 120, 10, |done, _| {
        if done >= next {
            next = done + 30;
            transport.csts_or.store(cfs, Ordering::Relaxed);
        }
    });
    model.verify(&mut queue);
    assert!(device.resets() >= 3, "{:?}", queue.counters());
}

/// Another owner resets the function now and then; `also` happens to it besides. It is brought
/// up without another reset.
fn reset_by_another_owner(also: impl Fn(&Sick)) {
    let (transport, device) = sick(2 * MIB);
    let mut queue = device.queue(1, QueueOptions::default()).unwrap();
    let mut model = Exerciser::new(2 * MIB, 512, 64 << 10, 4);
    let mut next = 30;
    model.run_with(&device, &mut queue, 120, 10, |done, _| {
        if done >= next {
            next = done + 30;
            transport.inner.reset().unwrap();
            transport.inner.set_bus_master(true).unwrap();
            also(&transport);
        }
    });
    model.verify(&mut queue);
    assert!(device.resets() >= 3, "{:?}", queue.counters());
    let resets = transport.resets.load(Ordering::Relaxed);
    assert_eq!(resets, 0, "it was reset once more");
}

#[test]
fn function_reset_by_other_owner_recovers_when_registers_return() {
    reset_by_another_owner(|transport| transport.away.store(100, Ordering::Relaxed));
}

#[test]
fn function_with_absent_registers_is_powered_on() {
    reset_by_another_owner(|transport| transport.off.store(true, Ordering::Relaxed));
}

#[test]
fn function_reset_during_enable_is_enabled_again() {
    reset_by_another_owner(|transport| transport.forgets.store(2, Ordering::Relaxed));
}

#[test]
fn resets_under_load_lose_nothing() {
    for behind_our_back in [false, true] {
        let transport = disk(2 * MIB, 512);
        let device = open(&transport, impatient());
        let mut queue = device
            .queue(
                1,
                QueueOptions {
                    depth: 20,
                    ..Default::default()
                },
            )
            .unwrap();
        let mut model = Exerciser::new(2 * MIB, 512, 300 << 10, 4);
        let mut next = 20;
        let (other, controller) = (device.clone(), transport.clone());
        model.run_with(&device, &mut queue, 300, 30, |done, queue| {
            if done >= next {
                next = done + 40;
                queue.ring();
                if behind_our_back {
                    controller.reset().unwrap();
                } else {
                    other.reset().unwrap();
                }
            }
        });
        model.verify(&mut queue);
        assert!(device.resets() >= 5, "{}", device.resets());
        assert!(queue.counters().recreated >= 5);
        // Events are asked for again in each life.
        device.service().unwrap();
    }
}

#[test]
fn namespace_changes_are_noticed() {
    let transport = disk(MIB, 512);
    let device = open(&transport, Options::default());
    let mut queue = device.queue(1, QueueOptions::default()).unwrap();
    assert_eq!(device.namespace(1).unwrap().bytes(), MIB);
    assert_eq!(device.service().unwrap(), Vec::<Event>::new());
    let become_another = |namespaces: &'static [(u32, u64)]| {
        // The controller is another one from here on, with the same memory: as after
        // an upgrade of its process.
        let swapped = transport.with(move |old| {
            let volumes = namespaces
                .iter()
                .map(|&(nsid, size)| namespace(nsid, memory(size), 512));
            let mut new = host(ControllerConfig::default(), volumes.collect());
            for window in old.controller().dma().windows() {
                let controller = new.controller();
                controller
                    .dma_map(window.iova, window.len, window.backing, window.prot)
                    .unwrap();
            }
            *old = new;
        });
        swapped.unwrap();
        device.reset().unwrap();
        device.service().unwrap()
    };
    let events = become_another(&[(1, 2 * MIB), (3, MIB)]);
    assert!(
        matches!(&events[..], [Event::NamespaceChanged(one), Event::NamespaceChanged(three)]
            if one.bytes() == 2 * MIB && three.nsid == 3),
        "{events:?}"
    );
    // The queue pair continues, also in the part that was not there before.
    queue.write(4000, &[7; 512], false).unwrap();
    assert_eq!(
        become_another(&[(1, 2 * MIB)]),
        [Event::NamespaceRemoved(3)]
    );
    assert!(device.namespace(3).is_err());
    assert_eq!(device.rescan().unwrap().len(), 1);
}

#[test]
fn events_are_delivered_and_requested_again() {
    let transport = disk(MIB, 512);
    let device = open(&transport, Options::default());
    let queue = device.queue(1, QueueOptions::default()).unwrap();
    for _ in 0..3 {
        // A value outside the ring: the controller reports it (NVMe Base 2.1, 5.1.2.1).
        let tail = regs::doorbell_offset(queue.qid(), false, 0);
        transport.write32(tail, 0xffff).unwrap();
        let mut events = Vec::new();
        for _ in 0..100 {
            transport.pause();
            events.extend(device.service().unwrap());
        }
        assert_eq!(events.len(), 1, "{events:?}");
        assert!(
            matches!(events[0], Event::Other(event) if event.aet() == nvme::aen::EventType::ERROR)
        );
        transport.write32(tail, 0).unwrap();
        transport.pause();
    }
}
