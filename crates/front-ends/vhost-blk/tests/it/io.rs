//! Verified I/O over a real socket, by a real front-end.

use crate::common::driver::{DISCARD, FLUSH, GET_ID, SLOTS, WRITE_ZEROES, segment};
use crate::common::*;
use std::sync::Arc;
use vhost::vhost_user::VhostUserFrontend;
use vhost_blk::DiskOptions;
use volume::{Effect, Fault, FaultVolume, IoErrorKind, MemVolume, NullVolume, OpKind, Volume};
use worker::IdleWindow;

fn mem(mib: u64) -> Arc<dyn Volume> {
    Arc::new(MemVolume::new(mib << 20).unwrap())
}

fn options() -> DiskOptions {
    DiskOptions {
        serial: "SERIAL-0123456789".into(),
        queues: 8,
        ..DiskOptions::default()
    }
}

/// Writes and reads back on several queues at once, with as many requests in
/// flight as there is room for.
fn verified(volume: Arc<dyn Volume>, without: u64) {
    let served = Served::start(volume, options());
    let mut client = Client::connect(&served, without);
    assert_eq!(client.frontend.get_queue_num().unwrap(), 8);
    let mut queues: Vec<Driver> = (0..4).map(|index| client.queue(index)).collect();
    for round in 0..20u64 {
        // Every queue has its own part of the disk; every request a block of 512 to 32768 bytes.
        let place = |queue: usize, i: u64| (queue as u64 * 1024 + i * 64, 512usize << (i % 7));
        for (q, queue) in queues.iter_mut().enumerate() {
            for i in 0..u64::from(SLOTS) {
                let (sector, len) = place(q, i);
                let data = pattern(round << 20 | sector, len);
                let req = Req::write(sector, &data);
                queue.post(if i % 2 == 0 { req } else { req.indirect() });
            }
            queue.ring();
        }
        for queue in &mut queues {
            for _ in 0..SLOTS {
                assert_eq!(queue.finish().1, 0);
            }
        }
        for (q, queue) in queues.iter_mut().enumerate() {
            let slots: Vec<u16> = (0..u64::from(SLOTS))
                .map(|i| {
                    let (sector, len) = place(q, i);
                    let req = Req::read(sector, len);
                    queue.post(if i % 3 == 0 { req } else { req.indirect() })
                })
                .collect();
            queue.ring();
            for _ in 0..SLOTS {
                let (slot, status, data) = queue.finish();
                assert_eq!(status, 0);
                let i = slots.iter().position(|s| *s == slot).unwrap() as u64;
                let (sector, len) = place(q, i);
                assert!(
                    data == pattern(round << 20 | sector, len),
                    "sector {sector}"
                );
            }
        }
    }
    for (q, stats) in served.stats.queues.iter().enumerate() {
        let used = q < 4;
        assert_eq!(stats.requests.get(), if used { 640 } else { 0 });
        assert_eq!(stats.io.bytes_read().get(), stats.io.bytes_written().get());
        assert_eq!(stats.io.bytes_read().get() > 0, used);
        assert_eq!(stats.io.all_failures(), 0);
        assert!(stats.notifications.get() <= 640);
    }
    served.stop();
}

#[test]
fn memory_disk_reads_back_writes() {
    verified(mem(4), 0);
}

#[test]
fn file_disk_reads_back_writes() {
    let dir = tempfile::tempdir().unwrap();
    let (_, volume) = file_volume(&dir, 4);
    verified(volume, 0);
}

#[test]
fn driver_without_event_idx_and_indirect_descriptors_works() {
    let dir = tempfile::tempdir().unwrap();
    let (_, volume) = file_volume(&dir, 4);
    verified(volume, F_EVENT_IDX | F_INDIRECT);
}

#[test]
fn ring_indices_wrap() {
    let served = Served::start(mem(1), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    let data = pattern(1, 512);
    // 65,536 entries and some: nothing of it may be lost or doubled.
    for round in 0..4200u32 {
        for _ in 0..SLOTS {
            queue.post(Req::write(u64::from(round % 64), &data));
        }
        queue.ring();
        for _ in 0..SLOTS {
            assert_eq!(queue.finish().1, 0);
        }
    }
    assert_eq!(
        served.stats.queues[0].requests.get(),
        4200 * u64::from(SLOTS)
    );
    served.stop();
}

#[test]
fn guest_rings_only_sleeping_device_once() {
    let served = Served::start(mem(1), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    let stats = &served.stats.queues[0];
    for round in 1..=20u64 {
        // It sleeps: it has been armed, and the next request rings.
        let arms = stats.arms.get();
        eventually("armed", || stats.arms.get() >= arms.max(round));
        queue.ok(Req::read(0, 512));
    }
    assert!(stats.kicks.get() <= 21, "{}", stats.kicks.get());
    assert!(queue.kicks <= 21);
    // It is interrupted when it wants to be: once, with the last of them.
    let before = stats.notifications.get();
    queue.interrupt_after(queue.next + SLOTS - 1);
    for _ in 0..SLOTS {
        queue.post(Req::read(0, 512));
        queue.ring();
        queue.wait_used(queue.next);
    }
    eventually("an interrupt", || stats.notifications.get() > before);
    assert_eq!(stats.notifications.get() - before, 1);
    served.stop();
}

#[test]
fn discard_frees_space_and_write_zeroes_zeroes() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let (path, volume) = file_volume(&dir, 4);
    let served = Served::start(volume, options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    let data = pattern(7, 32 << 10);
    for sector in (0..1024).step_by(64) {
        queue.ok(Req::write(sector, &data));
    }
    queue.ok(Req::new(FLUSH, 0, Data::None));
    let blocks = || path.metadata().unwrap().blocks();
    assert_eq!(blocks(), 1024);
    // Two segments in one request.
    let segments = [segment(0, 128, 0), segment(256, 64, 0)].concat();
    queue.ok(Req::new(DISCARD, 0, Data::Out(&segments)));
    assert_eq!(blocks(), 1024 - 192);
    assert!(queue.ok(Req::read(0, 512)).iter().all(|b| *b == 0));
    assert!(queue.ok(Req::read(128, 32 << 10)) == data);
    assert!(queue.ok(Req::read(256, 32 << 10)).iter().all(|b| *b == 0));
    let zeroes = segment(128, 64, 0);
    queue.ok(Req::new(WRITE_ZEROES, 0, Data::Out(&zeroes)));
    assert!(queue.ok(Req::read(128, 32 << 10)).iter().all(|b| *b == 0));
    let unmap = segment(512, 64, 1);
    let before = blocks();
    queue.ok(Req::new(WRITE_ZEROES, 0, Data::Out(&unmap)));
    assert_eq!(blocks(), before - 64);
    assert!(queue.ok(Req::read(512, 32 << 10)).iter().all(|b| *b == 0));
    served.stop();
}

#[test]
fn invalid_requests_get_virtio_status_and_change_nothing() {
    let served = Served::start(mem(1), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    let data = pattern(3, 512);
    queue.ok(Req::write(0, &data));
    queue.ok(Req::write(2047, &data));
    let (ioerr, unsupported) = (1, 2);
    let mut status =
        |kind, sector, data: Data<'_>| -> u8 { queue.run(Req::new(kind, sector, data)).0 };
    assert_eq!(status(99, 0, Data::None), unsupported);
    assert_eq!(status(0, 2048, Data::In(512)), ioerr, "behind the end");
    assert_eq!(status(0, 2047, Data::In(1024)), ioerr, "over the end");
    assert_eq!(status(0, u64::MAX, Data::In(512)), ioerr);
    assert_eq!(status(0, u64::MAX / 512 + 1, Data::In(512)), ioerr, "wraps");
    assert_eq!(status(1, 2047, Data::Out(&[0; 1024])), ioerr);
    assert_eq!(status(1, 0, Data::Out(&[0; 100])), ioerr, "no whole sector");
    let mut ranges =
        |kind, bytes: &[u8]| -> u8 { queue.run(Req::new(kind, 0, Data::Out(bytes))).0 };
    assert_eq!(ranges(DISCARD, &segment(0, 1, 1)), unsupported, "unmap");
    assert_eq!(
        ranges(WRITE_ZEROES, &segment(0, 1, 2)),
        unsupported,
        "unknown flag"
    );
    assert_eq!(ranges(WRITE_ZEROES, &segment(2048, 1, 0)), ioerr);
    assert_eq!(ranges(WRITE_ZEROES, &segment(u64::MAX, u32::MAX, 0)), ioerr);
    assert_eq!(ranges(WRITE_ZEROES, &segment(0, 1, 0)[..15]), ioerr);
    assert_eq!(ranges(DISCARD, &[]), ioerr);
    assert_eq!(
        ranges(DISCARD, &segment(0, 1, 0).repeat(17)),
        ioerr,
        "too many"
    );
    // One wrong segment, and none is executed.
    let mixed = [segment(0, 1, 0), segment(0, 1, 4)].concat();
    assert_eq!(ranges(WRITE_ZEROES, &mixed), unsupported);
    assert!(queue.ok(Req::read(0, 512)) == data);
    assert!(queue.ok(Req::read(2047, 512)) == data);
    assert_eq!(served.stats.queues[0].io.all_failures(), 15);
    served.stop();
}

#[test]
fn get_id_returns_serial() {
    let served = Served::start(mem(1), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    let id = queue.ok(Req::new(GET_ID, 0, Data::In(20)));
    assert_eq!(&id[..17], b"SERIAL-0123456789");
    assert_eq!(id[17..], [0; 3]);
    let longer = queue.ok(Req::new(GET_ID, 0, Data::In(32)));
    assert_eq!(longer[20..], [0x55; 12], "not touched");
    assert_eq!(queue.ok(Req::new(GET_ID, 0, Data::In(6))), b"SERIAL");
    served.stop();
}

#[test]
fn read_only_volume_is_reported_and_refuses_writes() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = file_volume(&dir, 1);
    let read_only = volume::FileOptions {
        read_only: true,
        ..volume::FileOptions::default()
    };
    let volume = Arc::new(volume::FileVolume::open(&path, read_only).unwrap());
    let served = Served::start(volume, options());
    let mut client = Client::connect(&served, 0);
    assert_ne!(client.features & 1 << 5, 0);
    assert_eq!(
        client.features & (F_DISCARD | F_WRITE_ZEROES | F_CONFIG_WCE),
        0
    );
    let mut queue = client.queue(0);
    queue.ok(Req::read(0, 512));
    assert_eq!(queue.run(Req::write(0, &[1; 512])).0, 1);
    let zeroes = segment(0, 1, 0);
    assert_eq!(
        queue.run(Req::new(WRITE_ZEROES, 0, Data::Out(&zeroes))).0,
        2
    );
    queue.ok(Req::new(FLUSH, 0, Data::None));
    served.stop();
}

/// With the write cache off every write has to be durable by itself; the volume is asked for that.
/// A fault on such writes shows which they are: the one that a volume without FUA would not see.
#[test]
fn writes_are_durable_without_cache_or_flush() {
    use volume::{
        Completion, Info, Io, Op, OpenQueue, QueueState, Request, VolumeError, VolumeQueue,
    };
    #[derive(Debug)]
    struct Watching(MemVolume, Arc<std::sync::Mutex<Vec<bool>>>);
    struct Queue(OpenQueue, Arc<std::sync::Mutex<Vec<bool>>>);
    impl Volume for Watching {
        fn info(&self) -> Info {
            self.0.info()
        }
        fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
            Ok(OpenQueue::new(Queue(self.0.open(io)?, self.1.clone())))
        }
        fn id(&self) -> Vec<u8> {
            self.0.id()
        }
        fn inner(&self) -> Option<&dyn Volume> {
            Some(&self.0)
        }
    }
    impl VolumeQueue for Queue {
        fn submit(&mut self, request: Request) -> Option<Completion> {
            if let Op::Write { fua } | Op::WriteZeroes { fua, .. } = request.op {
                self.1.lock().unwrap().push(fua);
            }
            self.0.submit(request)
        }
        fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
            self.0.poll(done)
        }
        fn state(&self) -> QueueState {
            self.0.state()
        }
        fn cancel(&mut self, tag: u64) {
            self.0.cancel(tag);
        }
    }
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let volume = Arc::new(Watching(MemVolume::new(1 << 20).unwrap(), seen.clone()));
    let served = Served::start(volume, options());
    let zeroes = segment(0, 1, 0);
    let fua = |queue: &mut Driver| {
        queue.ok(Req::write(0, &[1; 512]));
        queue.ok(Req::new(WRITE_ZEROES, 0, Data::Out(&zeroes)));
        std::mem::take(&mut *seen.lock().unwrap())
    };
    let flags = vhost::vhost_user::message::VhostUserConfigFlags::WRITABLE;
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    assert_eq!(client.config(32, 1), [1]);
    assert_eq!(fua(&mut queue), [false, false]);
    client.frontend.set_config(32, flags, &[0]).unwrap();
    assert_eq!(client.config(32, 1), [0]);
    assert_eq!(fua(&mut queue), [true, true]);
    client.frontend.set_config(32, flags, &[1]).unwrap();
    assert_eq!(fua(&mut queue), [false, false]);
    assert!(
        client.frontend.set_config(0, flags, &[1]).is_err(),
        "not a driver's field"
    );
    drop(client);
    // A driver that cannot flush.
    let mut client = Client::connect(&served, F_FLUSH);
    let mut queue = client.queue(0);
    assert_eq!(fua(&mut queue), [true, true]);
    drop(client);
    served.stop();
    // An export that begins without a cache.
    let volume = Arc::new(Watching(MemVolume::new(1 << 20).unwrap(), seen.clone()));
    let off = DiskOptions {
        write_cache: false,
        ..options()
    };
    let served = Served::start(volume, off);
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    assert_eq!(fua(&mut queue), [true, true]);
    served.stop();
}

#[test]
fn failing_volume_returns_errors_only() {
    let volume = FaultVolume::new(mem(1));
    let faults = volume.faults();
    faults.add(Fault::nth(
        OpKind::Write,
        2,
        Effect::Fail(IoErrorKind::NoSpace.into()),
    ));
    faults.add(Fault::nth(
        OpKind::Deallocate,
        2,
        Effect::Fail(IoErrorKind::MediaWrite.into()),
    ));
    faults.add(Fault::nth(
        OpKind::Flush,
        1,
        Effect::Fail(IoErrorKind::MediaWrite.into()),
    ));
    let served = Served::start(Arc::new(volume), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    queue.ok(Req::write(0, &[1; 512]));
    assert_eq!(queue.run(Req::write(0, &[2; 512])).0, 1);
    assert_eq!(queue.ok(Req::read(0, 512)), [1; 512]);
    // Of three segments the second fails; the third is not tried.
    queue.ok(Req::write(2, &[3; 512]));
    let three = [segment(0, 1, 0), segment(1, 1, 0), segment(2, 1, 0)].concat();
    assert_eq!(queue.run(Req::new(DISCARD, 0, Data::Out(&three))).0, 1);
    assert_eq!(queue.ok(Req::read(0, 512)), [0; 512]);
    assert_eq!(queue.ok(Req::read(2, 512)), [3; 512]);
    assert_eq!(queue.run(Req::new(FLUSH, 0, Data::None)).0, 1);
    queue.ok(Req::new(FLUSH, 0, Data::None));
    served.stop();
}

/// Requests of a volume that is stopped wait until it is resumed.
#[test]
fn stopped_volume_continues_after_resume() {
    use volume::{ErrorAction, OnError, OnErrorVolume};
    for fail in [Effect::Fail, Effect::FailLater] {
        let faulty = FaultVolume::new(mem(1));
        let faults = faulty.faults();
        let stop = OnError {
            write: ErrorAction::EnospcStop,
            ..OnError::default()
        };
        let volume = OnErrorVolume::new(Arc::new(faulty), stop, "test");
        let handle = volume.handle();
        let served = Served::start(Arc::new(volume), options());
        let mut client = Client::connect(&served, 0);
        let mut queue = client.queue(0);
        let no_space = IoErrorKind::NoSpace.into();
        faults.add(Fault::nth(OpKind::Write, 1, fail(no_space)));
        let first = queue.post(Req::write(3, &[1; 512]));
        queue.ring();
        eventually("it stops", || handle.status().held == 1);
        let second = queue.post(Req::read(3, 512));
        queue.ring();
        eventually("both wait", || handle.status().held == 2);
        handle.resume();
        let ended = [queue.finish(), queue.finish()];
        assert_eq!((ended[0].0, ended[0].1), (first, 0));
        assert_eq!((ended[1].0, ended[1].1), (second, 0));
        assert_eq!(ended[1].2, [1; 512]);
        // Other errors are the guest's.
        let other = IoErrorKind::MediaWrite.into();
        faults.add(Fault::nth(OpKind::Write, 1, fail(other)));
        assert_eq!(queue.run(Req::write(3, &[2; 512])).0, 1);
        // Nobody waits for what a client has left behind.
        faults.add(Fault::nth(OpKind::Write, 1, fail(no_space)));
        queue.post(Req::write(3, &[3; 512]));
        queue.ring();
        eventually("it stops", || handle.status().held == 1);
        drop((queue, client));
        handle.set(OnError::default());
        served.stop();
    }
}

#[test]
fn volume_with_latency_is_waited_for() {
    let null = volume::NullOptions {
        size: 1 << 30,
        latency: std::time::Duration::from_millis(2),
        ..volume::NullOptions::default()
    };
    let served = Served::start(Arc::new(NullVolume::new(null).unwrap()), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    for _ in 0..10 {
        queue.ok(Req::read(5, 4096));
    }
    served.stop();
}

/// The server sleeps at once, the driver kicks at any moment while it falls asleep: no wake-up may
/// be lost.
fn woken(without: u64) {
    let dir = tempfile::tempdir().unwrap();
    let at_once = IdleWindow::Fixed(std::time::Duration::ZERO);
    let socket = dir.path().join("s");
    let served = Served::with(socket, mem(1), options(), at_once, Default::default());
    let mut client = Client::connect(&served, without);
    let mut queue = client.queue(0);
    queue.post(Req::read(0, 512));
    for round in 0..60_000u32 {
        queue.ring();
        let started = std::time::Instant::now();
        while queue.used_idx() != queue.next {
            assert!(started.elapsed() < TIMEOUT, "round {round}: asleep");
            std::hint::spin_loop();
        }
        // About what it takes to fall asleep.
        for _ in 0..round.wrapping_mul(2_654_435_761) >> 25 {
            std::hint::spin_loop();
        }
        // The same request again.
        queue.offer(0);
    }
    served.stop();
}

#[test]
fn wake_up_is_never_lost() {
    woken(0);
}

#[test]
fn wake_up_without_event_idx_is_never_lost() {
    woken(F_EVENT_IDX);
}

/// The volume has room for few requests, and one queue has more than that, always.
#[test]
fn greedy_queue_leaves_room_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let null = volume::NullOptions {
        size: 1 << 30,
        latency: std::time::Duration::from_millis(2),
        ..volume::NullOptions::default()
    };
    let volume = Arc::new(NullVolume::new(null).unwrap());
    let few = volume::IoOptions {
        capacity: 4,
        ..volume::IoOptions::default()
    };
    let served = Served::with(
        dir.path().join("s"),
        volume,
        options(),
        IdleWindow::default(),
        few,
    );
    let mut client = Client::connect(&served, 0);
    let mut greedy = client.queue(0);
    let mut modest = client.queue(1);
    for _ in 0..SLOTS {
        greedy.post(Req::read(0, 512));
    }
    greedy.ring();
    modest.post(Req::read(0, 512));
    modest.ring();
    let mut rounds = 0;
    while modest.used_idx() == 0 {
        greedy.finish();
        greedy.post(Req::read(0, 512));
        greedy.ring();
        rounds += 1;
        assert!(rounds < 500, "starved");
    }
    served.stop();
}

/// A front-end of few words: no protocol features, no acknowledgements, no descriptor to ring on.
#[test]
fn queue_without_kick_descriptor_is_polled() {
    use std::os::fd::AsFd;
    let served = Served::start(mem(1), options());
    let mut raw = crate::common::raw::Raw::connect(&served);
    let memory = dma::Memory::anonymous(MEMORY).unwrap();
    let mut queue = Driver::new(&memory, 0, 0, 0);
    let words = |words: &[u64]| -> Vec<u8> { words.iter().flat_map(|w| w.to_ne_bytes()).collect() };
    let state = |index: u32, num: u32| [index.to_ne_bytes(), num.to_ne_bytes()].concat();
    let user = |guest: u64| USER_BASE + guest;
    raw.send(2, &words(&[F_VERSION_1]), &[]);
    raw.send(
        5,
        &words(&[1, 0, MEMORY as u64, USER_BASE, 0]),
        &[memory.fd()],
    );
    raw.send(8, &state(0, u32::from(crate::common::driver::SIZE)), &[]);
    raw.send(10, &state(0, 0), &[]);
    let rings = [
        user(queue.descriptors()),
        user(queue.used()),
        user(queue.available()),
        0,
    ];
    raw.send(9, &words(&[&[0], &rings[..]].concat()), &[]);
    let call = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    raw.send(13, &words(&[0]), &[call.as_fd()]);
    raw.send(12, &words(&[0x100]), &[]);
    for sector in 0..100 {
        queue.post(Req::write(sector, &[sector as u8; 512]));
        queue.wait_used(queue.next);
        queue.finish();
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    assert_eq!(served.stats.queues[0].requests.get(), 100);
    // Stopped, it is not polled any more.
    raw.send(11, &state(0, 0), &[]);
    assert_eq!(raw.reply().unwrap(), state(0, 100));
    served.stop();
}

/// A volume refuses requests beyond its room, so none is submitted.
#[test]
fn requests_beyond_volume_room_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (_, volume) = file_volume(&dir, 1);
    let few = volume::IoOptions {
        capacity: 2,
        ..volume::IoOptions::default()
    };
    let served = Served::with(
        dir.path().join("s"),
        volume,
        options(),
        IdleWindow::default(),
        few,
    );
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    for _ in 0..50 {
        for sector in 0..u64::from(SLOTS) {
            queue.post(Req::write(sector, &[1; 512]));
        }
        queue.ring();
        for _ in 0..SLOTS {
            assert_eq!(queue.finish().1, 0);
        }
    }
    served.stop();
}
