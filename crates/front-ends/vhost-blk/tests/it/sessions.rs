//! Connections that come and go, memory that changes, volumes that grow.

use crate::common::driver::{FLUSH, SLOTS, UNTOUCHED};
use crate::common::*;
use dma::Memory;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use vhost::vhost_user::{
    Frontend, FrontendReqHandler, HandlerResult, VhostUserFrontend, VhostUserFrontendReqHandlerMut,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vhost_blk::DiskOptions;
use volume::{Effect, Fault, FaultVolume, Faults, MemVolume, OpKind, Volume};

fn options() -> DiskOptions {
    DiskOptions {
        queues: 4,
        ..DiskOptions::default()
    }
}

fn mem() -> Arc<dyn Volume> {
    Arc::new(MemVolume::new(4 << 20).unwrap())
}

/// A volume with requests that can be held.
fn held(kind: OpKind) -> (Arc<dyn Volume>, Arc<Faults>) {
    let volume = FaultVolume::new(mem());
    let faults = volume.faults();
    faults.add(Fault::always(kind, Effect::Hold));
    (Arc::new(volume), faults)
}

fn let_pass(faults: &Faults) {
    faults.clear();
    faults.release();
}

#[derive(Default)]
struct Changes(AtomicU32);

impl VhostUserFrontendReqHandlerMut for Changes {
    fn handle_config_change(&mut self) -> HandlerResult<u64> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(0)
    }
}

#[test]
fn grown_file_is_announced_and_usable() {
    let dir = tempfile::tempdir().unwrap();
    let (path, volume) = file_volume(&dir, 2);
    let served = Served::at(dir.path().join("s"), volume.clone(), options());
    let resized = || {
        assert!(volume.refresh().unwrap());
        served.resized();
    };
    let mut client = Client::connect(&served, 0);
    let handler = Arc::new(Mutex::new(Changes::default()));
    let mut channel = FrontendReqHandler::new(handler.clone()).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    struct Fd(std::os::fd::RawFd);
    impl std::os::fd::AsRawFd for Fd {
        fn as_raw_fd(&self) -> std::os::fd::RawFd {
            self.0
        }
    }
    let tx = Fd(channel.get_tx_raw_fd());
    client.frontend.set_backend_request_fd(&tx).unwrap();
    std::thread::spawn(move || while channel.handle_request().is_ok() && tell.send(()).is_ok() {});
    let mut queue = client.queue(0);
    assert_eq!(client.capacity(), 4096);
    assert_eq!(queue.run(Req::read(4096, 512)).0, 1);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(3 << 20).unwrap();
    resized();
    told.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(handler.lock().unwrap().0.load(Ordering::SeqCst), 1);
    assert_eq!(client.capacity(), 6144);
    queue.ok(Req::write(6143, &[9; 512]));
    assert_eq!(queue.ok(Req::read(6143, 512)), [9; 512]);
    // It shrinks: the guest is told, and requests beyond the new end fail.
    file.set_len(1 << 20).unwrap();
    resized();
    told.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(client.capacity(), 2048);
    assert_eq!(queue.run(Req::read(6143, 512)).0, 1);
    queue.ok(Req::read(2047, 512));
    served.stop();
}

/// A volume that counts how often it is asked for its size, which may take a device tens of
/// seconds.
#[derive(Debug)]
struct SizeCounter(Arc<dyn Volume>, AtomicU32);

impl Volume for SizeCounter {
    fn info(&self) -> volume::Info {
        self.0.info()
    }

    fn open(&self, io: &volume::Io) -> Result<volume::OpenQueue, volume::VolumeError> {
        self.0.open(io)
    }

    fn id(&self) -> Vec<u8> {
        self.0.id()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.0)
    }

    fn refresh(&self) -> Result<bool, volume::VolumeError> {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.refresh()
    }
}

#[test]
fn data_thread_never_queries_size() {
    let volume = Arc::new(SizeCounter(mem(), AtomicU32::new(0)));
    let served = Served::start(volume.clone(), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    for _ in 0..10 {
        queue.ok(Req::read(5, 4096));
        served.resized();
        client.capacity();
    }
    served.stop();
    assert_eq!(volume.1.load(Ordering::SeqCst), 0);
}

#[test]
fn stopped_queue_has_answered_everything() {
    let (volume, faults) = held(OpKind::Write);
    let served = Served::start(volume, options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    for sector in 0..4 {
        queue.post(Req::write(sector, &[1; 512]));
    }
    queue.ring();
    eventually("held", || faults.held() == 4);
    // The answer to GET_VRING_BASE is sent after the requests have ended.
    let mut alive = client.queue(1);
    let state = |index: u32, num: u32| [index.to_ne_bytes(), num.to_ne_bytes()].concat();
    client.begin(11, &state(0, 0), &mut alive);
    assert!(!client.raw.is_answered(), "answered too early");
    assert_eq!(queue.used_idx(), 0);
    let_pass(&faults);
    assert_eq!(client.raw.reply().unwrap(), state(0, 4));
    assert_eq!(queue.used_idx(), 4);
    // Nothing is fetched while it is stopped; it continues where it was.
    queue.post(Req::write(4, &[2; 512]));
    queue.kick();
    at_the_queues(&mut alive);
    assert_eq!(queue.used_idx(), 4);
    client.start(&queue, 4);
    for _ in 0..5 {
        assert_eq!(queue.finish().1, 0);
    }
    assert_eq!(queue.ok(Req::read(4, 512)), [2; 512]);
    served.stop();
}

#[test]
fn disabled_queue_handles_nothing() {
    let served = Served::start(mem(), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    queue.ok(Req::read(0, 512));
    let mut alive = client.queue(1);
    client.frontend.set_vring_enable(0, false).unwrap();
    queue.post(Req::read(0, 512));
    queue.kick();
    at_the_queues(&mut alive);
    assert_eq!(queue.used_idx(), 1);
    client.frontend.set_vring_enable(0, true).unwrap();
    assert_eq!(queue.finish().1, 0);
    served.stop();
}

#[test]
fn removed_memory_is_released_after_last_request() {
    let (volume, faults) = held(OpKind::Read);
    let served = Served::start(volume, options());
    let mut client = Client::connect(&served, 0);
    let second = Memory::anonymous(1 << 20).unwrap();
    let far = VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 32,
        userspace_addr: USER_BASE + (1 << 32),
        ..region(&second)
    };
    client.frontend.add_mem_region(&far).unwrap();
    let mut queue = client.queue(0);
    // A read into the second memory: header and status are in the first.
    let at = queue.slot(0);
    queue.poke(at, &[0; 16]);
    queue.describe(queue.descriptors(), 0, at, 16, 1, 1);
    queue.describe(queue.descriptors(), 1, 1 << 32, 4096, 3, 2);
    queue.describe(queue.descriptors(), 2, at + 64, 1, 2, 0);
    queue.offer(0);
    queue.kick();
    eventually("held", || faults.held() == 1);
    // REM_MEM_REG: padding, and the region.
    let words = [
        0,
        far.guest_phys_addr,
        far.memory_size,
        far.userspace_addr,
        0,
    ];
    let payload: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
    let mut alive = client.queue(1);
    client.begin(38, &payload, &mut alive);
    assert!(!client.raw.is_answered(), "answered too early");
    assert_eq!(queue.used_idx(), 0);
    let_pass(&faults);
    assert_eq!(client.raw.reply().unwrap(), [0; 8]);
    queue.wait_used(1);
    queue.seen = 1;
    // And it is gone.
    queue.offer(0);
    queue.kick();
    queue.wait_used(2);
    assert_eq!(queue.peek(at + 64, 1), [1], "IOERR");
    assert_eq!(served.stats.queues[0].io.all_failures(), 1);
    served.stop();
}

#[test]
fn memory_table_changes_while_queue_runs() {
    let served = Served::start(mem(), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    queue.ok(Req::write(0, &[5; 512]));
    let second = Memory::anonymous(1 << 20).unwrap();
    let far = VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 32,
        userspace_addr: USER_BASE + (1 << 32),
        ..region(&second)
    };
    for _ in 0..10 {
        let table = [region(&client.memory), far];
        client.frontend.set_mem_table(&table).unwrap();
        assert_eq!(queue.ok(Req::read(0, 512)), [5; 512]);
        client.frontend.set_mem_table(&table[..1]).unwrap();
        assert_eq!(queue.ok(Req::read(0, 512)), [5; 512]);
    }
    // Without its memory the queue stands still; with it, the queue continues.
    client.frontend.set_mem_table(&[far]).unwrap();
    queue.post(Req::read(0, 512));
    queue.kick();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(queue.used_idx(), queue.seen);
    client
        .frontend
        .set_mem_table(&[region(&client.memory)])
        .unwrap();
    queue.kick();
    assert_eq!(queue.finish().2, [5; 512]);
    served.stop();
}

#[test]
fn front_end_lost_during_io_leaves_disk_usable() {
    let (volume, faults) = held(OpKind::Write);
    let served = Served::start(volume, options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    let slot = queue.post(Req::write(0, &[7; 512]));
    queue.ring();
    eventually("held", || faults.held() == 1);
    let memory = client.memory.clone();
    drop(client);
    eventually("disconnected", || !served.stats.is_connected());
    // The next one is taken when the requests of the last one have completed.
    let path = served.path.clone();
    let connecting = std::thread::spawn(move || {
        let frontend = Frontend::connect(&path, 1).unwrap();
        frontend.get_features().unwrap()
    });
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(served.stats.connections.get(), 1);
    let_pass(&faults);
    connecting.join().unwrap();
    // Nobody was told.
    assert_eq!(queue.used_idx(), 0);
    let mut status = [0];
    memory
        .read(queue.slot(slot) as usize + 64, &mut status)
        .unwrap();
    assert_eq!(status, [UNTOUCHED]);
    eventually("the second one has gone", || !served.stats.is_connected());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    assert_eq!(queue.ok(Req::read(0, 512)), [7; 512]);
    served.stop();
}

/// What a front-end does when its back-end dies: it keeps the tracking memory, and continues from
/// the used index.
#[test]
fn new_back_end_repeats_requests_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let (volume, faults) = held(OpKind::Write);
    let first = Served::at(path.clone(), volume, options());
    let mut client = Client::connect(&first, 0);
    client.track(4, None);
    let mut queue = client.queue(1);
    let mut idle = client.queue(0);
    queue.ok(Req::read(0, 512));
    idle.ok(Req::read(0, 512));
    // Three writes in flight, a read that overtakes them, one request that is not even fetched.
    let slots: Vec<u16> = (0..3)
        .map(|sector| queue.post(Req::write(sector, &[sector as u8 + 1; 512])))
        .collect();
    queue.ring();
    eventually("held", || faults.held() == 3);
    queue.ok(Req::read(9, 512));
    let kept = client.inflight.take();
    let memory = client.memory.clone();
    drop(client);
    eventually("disconnected", || !first.stats.is_connected());
    let_pass(&faults);
    drop(first);
    let unfetched = queue.post(Req::write(3, &[4; 512]));

    let volume = mem();
    let second = Served::at(path, volume, options());
    let mut client = Client::with_memory(&second, 0, memory);
    client.track(4, kept);
    queue.reconnect();
    idle.reconnect();
    let base = queue.used_idx();
    assert_eq!(
        base, 2,
        "one index behind the other requests: three are missing in between"
    );
    client.start(&idle, idle.used_idx());
    client.start(&queue, base);
    let mut ended: Vec<u16> = (0..4)
        .map(|_| {
            let (slot, status, _) = queue.finish();
            assert_eq!(status, 0);
            slot
        })
        .collect();
    ended.sort_unstable();
    let mut all = [&slots[..], &[unfetched]].concat();
    all.sort_unstable();
    assert_eq!(ended, all, "each once");
    assert_eq!(second.stats.resubmitted.get(), 3);
    for sector in 0..4 {
        assert_eq!(queue.ok(Req::read(sector, 512)), [sector as u8 + 1; 512]);
    }
    idle.ok(Req::read(0, 512));
    second.stop();
}

/// The same, with a front-end that has no tracking and a back-end that has answered
/// everything before it ended.
#[test]
fn clean_back_end_end_leaves_nothing_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let (_, volume) = file_volume(&dir, 4);
    let path = dir.path().join("s");
    let first = Served::at(path.clone(), volume.clone(), options());
    let mut client = Client::connect(&first, 0);
    let mut queue = client.queue(0);
    let data = pattern(5, 16384);
    for i in 0..SLOTS {
        queue.post(Req::write(u64::from(i) * 32, &data));
    }
    queue.ring();
    let stats = first.stats.clone();
    eventually("begun", || stats.queues[0].requests.get() > 0);
    first.stop();
    let answered = queue.used_idx();
    assert!(answered > 0);
    assert_eq!(u64::from(answered), stats.queues[0].requests.get());
    let memory = client.memory.clone();
    drop(client);
    let second = Served::at(path, volume, options());
    let mut client = Client::with_memory(&second, 0, memory);
    queue.reconnect();
    client.start(&queue, answered);
    for _ in 0..SLOTS {
        assert_eq!(queue.finish().1, 0);
    }
    assert!(queue.ok(Req::read(0, 16384)) == data);
    second.stop();
}

#[test]
fn write_cache_state_survives_back_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let first = Served::at(path.clone(), mem(), options());
    let mut client = Client::connect(&first, 0);
    client.track(1, None);
    let flags = vhost::vhost_user::message::VhostUserConfigFlags::WRITABLE;
    client.frontend.set_config(32, flags, &[0]).unwrap();
    let kept = client.inflight.take();
    first.stop();
    let second = Served::at(path, mem(), options());
    let mut client = Client::connect(&second, 0);
    assert_eq!(client.config(32, 1), [1]);
    client.track(1, kept);
    assert_eq!(client.config(32, 1), [0]);
    second.stop();
}

#[test]
fn second_front_end_is_refused_unnoticed_by_first() {
    let served = Served::start(mem(), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    let mut second = crate::common::raw::Raw::connect(&served);
    assert_eq!(second.ask(1), None, "hung up");
    queue.ok(Req::read(0, 512));
    assert_eq!(served.stats.connections.get(), 1);
    served.stop();
}

#[test]
fn reset_device_starts_anew() {
    let served = Served::start(mem(), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    queue.ok(Req::write(0, &[3; 512]));
    client.frontend.reset_device().unwrap();
    queue.post(Req::read(0, 512));
    queue.kick();
    at_the_queues(&mut client.queue(1));
    assert_eq!(queue.used_idx(), 1);
    let mut queue = Driver::new(&client.memory, 0, 2 << 20, client.features);
    client.start(&queue, 0);
    assert_eq!(queue.ok(Req::read(0, 512)), [3; 512]);
    served.stop();
}

#[test]
fn end_flushes_and_reports_failure() {
    let volume = FaultVolume::new(mem());
    let faults = volume.faults();
    let error = volume::IoErrorKind::MediaWrite.into();
    faults.add(Fault::nth(OpKind::Flush, 2, Effect::Fail(error)));
    let served = Served::start(Arc::new(volume), options());
    let mut client = Client::connect(&served, 0);
    let mut queue = client.queue(0);
    queue.ok(Req::write(0, &[1; 512]));
    queue.ok(Req::new(FLUSH, 0, Data::None));
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| served.stop()));
    assert!(ended.is_err(), "the flush at the end failed");
}

/// KiB of memory that the kernel has pinned for this process.
fn pinned_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPin"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok())
        .unwrap()
}

#[test]
fn guest_memory_is_pinned_when_configured() {
    let dir = tempfile::tempdir().unwrap();
    let (_, volume) = file_volume(&dir, 4);
    let io = volume::IoOptions {
        fixed_buffers: true,
        ..volume::IoOptions::default()
    };
    let served = Served::with(
        dir.path().join("s"),
        volume,
        options(),
        worker::IdleWindow::default(),
        io,
    );
    let all = (MEMORY >> 10) as u64;
    for _ in 0..2 {
        let mut client = Client::connect(&served, 0);
        // No answer waits for it.
        eventually("it is pinned", || pinned_kib() >= all);
        let mut queue = client.queue(0);
        let data = pattern(3, 64 << 10);
        queue.ok(Req::write(0, &data));
        assert!(queue.ok(Req::read(0, data.len())) == data);
        // The same memory in another table stays pinned.
        client
            .frontend
            .set_mem_table(&[region(&client.memory)])
            .unwrap();
        assert!(pinned_kib() >= all);
        drop(client);
        eventually("nothing stays pinned", || pinned_kib() == 0);
    }
    served.stop();
}
