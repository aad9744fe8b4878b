//! A front-end and a guest's driver for the tests: `vhost`'s own front-end speaks the protocol, the
//! virtqueues are driven here.

// Each test program uses its own part of this module.
#![allow(dead_code)]

pub mod driver;
pub mod raw;

#[allow(unused_imports)]
pub use driver::{Data, Driver, Req};

use dma::{Memory, MemoryLimits};
use rustix::event::EventfdFlags;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vhost_blk::{DiskOptions, Error, Export, Server, Stats};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use volume::{Io, IoOptions, Volume};
use worker::{ConnectRate, IdleWindow, Options};

/// Long enough for anything, on however slow a machine.
pub const TIMEOUT: Duration = Duration::from_secs(30);

pub const F_FLUSH: u64 = 1 << 9;
pub const F_CONFIG_WCE: u64 = 1 << 11;
pub const F_MQ: u64 = 1 << 12;
pub const F_DISCARD: u64 = 1 << 13;
pub const F_WRITE_ZEROES: u64 = 1 << 14;
pub const F_INDIRECT: u64 = 1 << 28;
pub const F_EVENT_IDX: u64 = 1 << 29;
pub const F_PROTOCOL: u64 = 1 << 30;
pub const F_VERSION_1: u64 = 1 << 32;

pub fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !is() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A server in a thread of its own.
pub struct Served {
    pub path: PathBuf,
    pub stats: Arc<Stats>,
    resized: Arc<OwnedFd>,
    stop: UnixStream,
    thread: Option<JoinHandle<Result<(), Error>>>,
    _dir: Option<tempfile::TempDir>,
}

impl Served {
    pub fn start(volume: Arc<dyn Volume>, disk: DiskOptions) -> Served {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let mut served = Served::at(path, volume, disk);
        served._dir = Some(dir);
        served
    }

    /// At a path, which may be an earlier server's. Nothing wakes it up by itself.
    pub fn at(path: PathBuf, volume: Arc<dyn Volume>, disk: DiskOptions) -> Served {
        Served::with(
            path,
            volume,
            disk,
            IdleWindow::default(),
            IoOptions::default(),
        )
    }

    pub fn with(
        path: PathBuf,
        volume: Arc<dyn Volume>,
        disk: DiskOptions,
        idle_window: IdleWindow,
        io: IoOptions,
    ) -> Served {
        Served::after(path, volume, disk, (idle_window, io), || ())
    }

    /// Its thread does something first.
    pub fn after(
        path: PathBuf,
        volume: Arc<dyn Volume>,
        disk: DiskOptions,
        (idle_window, io): (IdleWindow, IoOptions),
        first: impl FnOnce() + Send + 'static,
    ) -> Served {
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let resized = Arc::new(rustix::event::eventfd(0, flags).unwrap());
        let watched = resized.clone();
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            first();
            let export = Export {
                volume,
                disk,
                listener: listener.into(),
                connects: ConnectRate::UNLIMITED,
                max_in_flight: 1024,
                memory: MemoryLimits::DEFAULT,
                intake: None,
                attach: None,
                resized: Some(watched),
                span: tracing::Span::none(),
            };
            let options = Options {
                idle_window,
                stop: Some(stopped.into()),
                ..Options::default()
            };
            let mut server = Server::new(export, Io::new(io), options)?;
            tell.send(server.stats()).unwrap();
            server.run()
        });
        let stats = told.recv().expect("the server starts");
        Served {
            path,
            stats,
            resized,
            stop,
            thread: Some(thread),
            _dir: None,
        }
    }

    /// The volume has been resized.
    pub fn resized(&self) {
        rustix::io::write(&*self.resized, &1u64.to_ne_bytes()).unwrap();
    }

    /// Its thread has ended.
    pub fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// What its thread has panicked with.
    pub fn panicked(mut self) -> Box<dyn std::any::Any + Send> {
        let thread = self.thread.take().unwrap();
        thread.join().expect_err("it has ended in order")
    }

    /// Ends it, which must go well.
    pub fn stop(mut self) {
        self.end().unwrap();
    }

    fn end(&mut self) -> Result<(), Error> {
        let _ = self.stop.shutdown(std::net::Shutdown::Both);
        match self.thread.take() {
            Some(thread) => thread.join().expect("the server does not panic"),
            None => Ok(()),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = self.stop.shutdown(std::net::Shutdown::Both);
            let ended = thread.join();
            if !std::thread::panicking() {
                assert!(ended.is_ok(), "the server does not panic");
            }
        }
    }
}

/// Where the guest's memory lies: low, as the guest sees it, and somewhere
/// else, as the front-end does.
pub const USER_BASE: u64 = 0x7f00_0000_0000;
pub const MEMORY: usize = 8 << 20;
/// Bytes of memory for one queue's driver.
const PER_QUEUE: u64 = 1 << 20;

/// A front-end with its guest's memory.
pub struct Client {
    pub frontend: Frontend,
    /// The front-end's own socket, for messages with a reply that is not waited for at once.
    pub raw: raw::Raw,
    pub memory: Memory,
    pub features: u64,
    pub inflight: Option<(VhostUserInflight, std::fs::File)>,
}

pub fn region(memory: &Memory) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: memory.len() as u64,
        userspace_addr: USER_BASE,
        mmap_offset: 0,
        mmap_handle: memory.fd().as_raw_fd(),
    }
}

impl Client {
    /// Connects and negotiates everything but what is in `without`.
    pub fn connect(served: &Served, without: u64) -> Client {
        Client::with_memory(served, without, Memory::anonymous(MEMORY).unwrap())
    }

    pub fn with_memory(served: &Served, without: u64, memory: Memory) -> Client {
        Client::at(&served.path, without, memory)
    }

    /// Of whatever serves at a path.
    pub fn at(path: &std::path::Path, without: u64, memory: Memory) -> Client {
        let raw = raw::Raw(UnixStream::connect(path).unwrap());
        let mut frontend = Frontend::from_stream(raw.0.try_clone().unwrap(), 128);
        frontend.set_owner().unwrap();
        let features = frontend.get_features().unwrap() & !without;
        frontend.set_features(features).unwrap();
        let protocol = frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(protocol).unwrap();
        assert!(protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD));
        frontend.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_mem_table(&[region(&memory)]).unwrap();
        Client {
            frontend,
            raw,
            memory,
            features,
            inflight: None,
        }
    }

    /// Sends a message that is to be answered later, and waits until the server has taken it and
    /// was at its queues again: an answer that is sent too early is there by then. `alive` is a
    /// queue that runs.
    pub fn begin(&self, request: u32, payload: &[u8], alive: &mut Driver) {
        const NEED_REPLY: u32 = 8;
        self.raw
            .bytes(&raw::Raw::message(request, 1 | NEED_REPLY, payload), &[]);
        eventually("the server reads the message", || self.raw.unread() == 0);
        at_the_queues(alive);
    }

    pub fn config(&mut self, offset: u32, len: usize) -> Vec<u8> {
        let buf = vec![0; len];
        let flags = VhostUserConfigFlags::WRITABLE;
        let (_, bytes) = self
            .frontend
            .get_config(offset, len as u32, flags, &buf)
            .unwrap();
        bytes
    }

    pub fn capacity(&mut self) -> u64 {
        u64::from_le_bytes(self.config(0, 8).try_into().unwrap())
    }

    /// Asks for inflight tracking, or brings what an earlier connection had.
    pub fn track(&mut self, queues: u16, kept: Option<(VhostUserInflight, std::fs::File)>) {
        let (description, file) = kept.unwrap_or_else(|| {
            let asked = VhostUserInflight::new(0, 0, queues, driver::SIZE);
            self.frontend.get_inflight_fd(&asked).unwrap()
        });
        self.frontend
            .set_inflight_fd(&description, file.as_raw_fd())
            .unwrap();
        self.inflight = Some((description, file));
    }

    /// Starts a queue of this driver, from where it stands.
    pub fn start(&mut self, driver: &Driver, base: u16) {
        let index = driver.index;
        let user = |guest: u64| USER_BASE + guest;
        let config = VringConfigData {
            queue_max_size: driver::SIZE,
            queue_size: driver::SIZE,
            flags: 0,
            desc_table_addr: user(driver.descriptors()),
            used_ring_addr: user(driver.used()),
            avail_ring_addr: user(driver.available()),
            log_addr: None,
        };
        self.frontend.set_vring_num(index, driver::SIZE).unwrap();
        self.frontend.set_vring_base(index, base).unwrap();
        self.frontend.set_vring_addr(index, &config).unwrap();
        self.frontend.set_vring_call(index, &driver.call).unwrap();
        self.frontend.set_vring_err(index, &driver.err).unwrap();
        self.frontend.set_vring_kick(index, &driver.kick).unwrap();
        self.frontend.set_vring_enable(index, true).unwrap();
    }

    /// A new driver's queue, started.
    pub fn queue(&mut self, index: usize) -> Driver {
        let driver = Driver::new(&self.memory, index, index as u64 * PER_QUEUE, self.features);
        self.start(&driver, 0);
        driver
    }
}

/// Waits until the server's thread has been at its queues since this call: requests of one that
/// runs are completed.
pub fn at_the_queues(alive: &mut Driver) {
    for _ in 0..3 {
        alive.ok(Req::new(driver::GET_ID, 0, Data::In(20)));
    }
}

pub fn eventfd() -> EventFd {
    EventFd::new(EFD_NONBLOCK).unwrap()
}

pub fn file_volume(dir: &tempfile::TempDir, mib: u64) -> (PathBuf, Arc<dyn Volume>) {
    let path = dir.path().join("disk.raw");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(mib << 20)
        .unwrap();
    let volume = open(&path);
    (path, volume)
}

pub fn open(path: &std::path::Path) -> Arc<dyn Volume> {
    Arc::new(volume::FileVolume::open(path, volume::FileOptions::default()).unwrap())
}

/// Bytes that tell where they belong.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    })
    .take(len)
    .collect()
}

pub fn dup(memory: &Memory) -> OwnedFd {
    memory.fd().try_clone_to_owned().unwrap()
}
