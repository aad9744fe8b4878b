//! Memory files whose mapping the kernel holds up. Other clients of the worker are served
//! meanwhile.
//!
//! mmap(2) waits for a lock of the file, which other processes may hold for long. A tracer that
//! stops the thread that maps files stands for the kernel here; the last test has the real attack.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::process::{Signal, kill_process};
use vfio_user::DmaUnmapping;
use vfio_user::client::{Client, RawClient};
use vfio_user::wire;
use zerocopy::IntoBytes;

use crate::bad_messages::{message, version};
use crate::common::*;
use crate::keeper::{serving, start};
use crate::vhost_blk::{break_queue, features_of};

/// Thread that maps memory files (proc(5), `comm`).
const THREAD: &str = "map-memory";

/// Returns a file of the thread of that name below /proc.
fn thread_file(process: u32, name: &str, file: &str) -> Option<String> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).ok()?;
    let is_it =
        |path: &Path| fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim() == name);
    let task = tasks
        .flatten()
        .map(|task| task.path())
        .find(|path| is_it(path))?;
    fs::read_to_string(task.join(file)).ok()
}

/// Stops the thread that maps files while it has nothing to do.
fn stop_mapping(process: u32) -> Result<Frozen, String> {
    eventually("the thread waits", || {
        let stat = thread_file(process, THREAD, "stat").unwrap_or_default();
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim().starts_with('S'))
    });
    Frozen::stop(process, THREAD)
}

/// Writes the configuration of two controllers, the second with a volume in a file.
fn two_controllers(test_dir: &TestDir) -> String {
    let disk = test_dir.disk("disk.raw", 4 << 20);
    let controller = |socket: &Path, volume: &str| {
        let socket = text(socket);
        format!(
            "[[controller]]\nsocket = \"{socket}\"\nnamespace = [{{ volume = \"{volume}\" }}]\n"
        )
    };
    let config = test_dir.path("vnvme.toml");
    let first = controller(&test_dir.path("first.sock"), "mem://4M");
    fs::write(&config, first + &controller(&test_dir.socket(), &disk)).unwrap();
    text(&config)
}

/// A daemon with one worker and two controllers.
fn serve_two(test_dir: &TestDir) -> Daemon {
    let config = two_controllers(test_dir);
    let daemon = Daemon::spawn(&["serve", "--workers", "1", "--config", &config]);
    daemon.wait_listening(&test_dir.path("first.sock"));
    daemon.wait_listening(&test_dir.socket());
    daemon
}

/// A client without a thread: its requests are sent, and answered at some time.
struct Asker(RawClient);

impl Asker {
    fn connect(socket: &Path) -> Self {
        let mut raw = RawClient::connect(socket, WAIT_TIMEOUT).unwrap();
        raw.send(&version(0, b"{}\0"), &[]).unwrap();
        assert_eq!(raw.recv().unwrap().header.error, 0);
        Self(raw)
    }

    /// Asks to map a file.
    fn map(&mut self, iova: u64, file: &File) {
        let map = wire::DmaMap {
            argsz: size_of::<wire::DmaMap>() as u32,
            flags: wire::dma::READ | wire::dma::WRITE,
            offset: 0,
            address: iova,
            size: 1 << 20,
        };
        let bytes = message(wire::Command::DMA_MAP.0, 0, None, map.as_bytes());
        self.0.send(&bytes, &[file.as_fd()]).unwrap();
    }

    /// Asks for the device's properties.
    fn info(&mut self) {
        let info = [16u32, 0, 0, 0].map(u32::to_ne_bytes).concat();
        let bytes = message(wire::Command::DEVICE_GET_INFO.0, 0, None, &info);
        self.0.send(&bytes, &[]).unwrap();
    }

    fn is_answered(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut fds, Some(&Default::default())).unwrap() > 0
    }

    /// Waits for the answer to a command.
    fn answer(&mut self, command: wire::Command) {
        let header = self.0.recv().unwrap().header;
        assert_eq!((header.command, header.error), (command, 0));
    }
}

/// A neighbour reads registers, writes, flushes and reads its volume.
fn goes_on(host: &mut Host, seed: u64) {
    for round in 0..50 {
        let data = pattern(seed + round, 4096);
        assert_ne!(host.read32(0x8), 0);
        host.write(1, round * 8, &data);
        assert!(host.read(1, round * 8, data.len()) == data);
    }
    host.flush(1);
}

#[test]
fn mapping_that_waits_leaves_neighbour_served() {
    let test_dir = TestDir::new();
    let daemon = serve_two(&test_dir);
    let mut host = Host::up(&test_dir.socket());
    let mut client = Asker::connect(&test_dir.path("first.sock"));
    let before = daemon.settled_descriptors();
    let stopped = match stop_mapping(daemon.pid()) {
        Ok(stopped) => stopped,
        Err(why) => {
            let test = "vnvme::mapping::mapping_that_waits_leaves_neighbour_served";
            return testkit::skip(test, why);
        }
    };
    let file = memfd(1 << 20);
    client.map(0, &file);
    client.info();
    goes_on(&mut host, 1);
    // A known file needs no mapping.
    let (size, ram) = (RAM_SIZE, host.ram.try_clone().unwrap());
    host.link.map(1 << 40, size, ram.as_fd()).unwrap();
    let range = DmaUnmapping::Range {
        iova: 1 << 40,
        size,
    };
    assert_eq!(host.client.dma_unmap(range).unwrap(), size);
    assert!(!client.is_answered());
    drop(stopped);
    client.answer(wire::Command::DMA_MAP);
    client.answer(wire::Command::DEVICE_GET_INFO);

    // A client leaves before its file is mapped: the file is closed, and the next client served.
    let stopped = stop_mapping(daemon.pid()).unwrap();
    client.map(1 << 30, &memfd(1 << 20));
    goes_on(&mut host, 2);
    assert!(!client.is_answered());
    drop(client);
    let mut client = Asker::connect(&test_dir.path("first.sock"));
    client.info();
    client.answer(wire::Command::DEVICE_GET_INFO);
    daemon.wait_descriptors(before);
    drop(stopped);
    client.map(0, &file);
    client.answer(wire::Command::DMA_MAP);

    // The end of the process does not wait for it, either.
    let stopped = stop_mapping(daemon.pid()).unwrap();
    client.map(1 << 30, &memfd(1 << 20));
    goes_on(&mut host, 3);
    drop(host);
    daemon.signal(Signal::TERM);
    stopped.wait_for_its_end();
    let ended = daemon.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:#?}");
}

#[test]
fn memory_table_that_waits_leaves_neighbour_served() {
    let test_dir = TestDir::new();
    let (disk, export) = (test_dir.disk("disk.raw", 4 << 20), test_dir.path("v.sock"));
    let (socket, path) = (text(&test_dir.socket()), text(&export));
    let first = ["serve", "--workers", "1", "--socket", &socket, &disk];
    let daemon = Daemon::spawn(&[&first[..], &["--vhost-user-blk", &path, "mem://1M"]].concat());
    daemon.wait_listening(&test_dir.socket());
    daemon.wait_listening(&export);
    let mut host = Host::up(&test_dir.socket());
    let connect = || {
        let stream = UnixStream::connect(&export).unwrap();
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        features_of(&stream);
        stream
    };
    let stopped = match stop_mapping(daemon.pid()) {
        Ok(stopped) => stopped,
        Err(why) => {
            let test = "vnvme::mapping::memory_table_that_waits_leaves_neighbour_served";
            return testkit::skip(test, why);
        }
    };
    // A front-end leaves before its memory is mapped, and the next one connects.
    let (gone, error) = (connect(), new_eventfd());
    break_queue(&gone, error.as_fd());
    goes_on(&mut host, 1);
    drop(gone);
    let stream = connect();
    break_queue(&stream, error.as_fd());
    goes_on(&mut host, 2);
    let is_broken = |error: &OwnedFd| rustix::io::read(error, &mut [0; 8]).is_ok();
    assert!(!is_broken(&error));
    drop(stopped);
    eventually("its queue is broken", || is_broken(&error));
    features_of(&stream);
    drop((host, stream));
    daemon.end();
}

/// Number of a client's memory files that a process has open.
fn memory_files(process: u32) -> usize {
    let open = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let links = open.flatten().map(|fd| fs::read_link(fd.path()));
    let links = links.filter(|link| {
        link.as_ref()
            .is_ok_and(|link| text(link).contains("memfd:ram"))
    });
    links.count()
}

/// The serving process is killed while it maps a client's file; the next one maps and answers.
#[test]
fn mapping_that_waits_outlives_process() {
    let test_dir = TestDir::new();
    let config = two_controllers(&test_dir);
    let args = ["serve", "--workers", "1", "--keeper", "process"];
    let daemon = start(&test_dir, &[&args[..], &["--config", &config]].concat());
    let mut client = Asker::connect(&test_dir.path("first.sock"));
    client.map(0, &memfd(1 << 20));
    client.answer(wire::Command::DMA_MAP);
    let mut neighbour = Host::up(&test_dir.socket());
    let process = serving(daemon.pid()).unwrap();
    let number = process.as_raw_nonzero().get() as u32;
    let stopped = match stop_mapping(number) {
        Ok(stopped) => stopped,
        Err(why) => {
            let test = "vnvme::mapping::mapping_that_waits_outlives_process";
            return testkit::skip(test, why);
        }
    };
    let before = memory_files(number);
    client.map(1 << 30, &memfd(1 << 20));
    client.info();
    // The worker has handled the request when it answers the neighbour after that.
    eventually("the file has arrived", || memory_files(number) > before);
    goes_on(&mut neighbour, 1);
    assert!(!client.is_answered());
    kill_process(process, Signal::KILL).unwrap();
    stopped.wait_for_its_end();
    eventually("another process follows", || {
        serving(daemon.pid()).is_some_and(|next| next != process)
    });
    client.answer(wire::Command::DMA_MAP);
    client.answer(wire::Command::DEVICE_GET_INFO);
    goes_on(&mut neighbour, 2);
    drop((client, neighbour));
    daemon.end();
}

/// Path of the file that a process is to map and to punch.
const PUNCHES: &str = "VNVME_TEST_PUNCHES";
/// Processes that map a client's memory file, and mappings of each.
const PUNCHERS: usize = 7;
const MAPPINGS: usize = 60_000;
const PUNCHED: u64 = 64 << 20;

/// Time of the measurement with the attack, and without.
const MEASURED: Duration = Duration::from_secs(20);

/// Not a test of its own: a process that maps a file very often, and punches holes without end.
#[test]
#[allow(unsafe_code)] // Thousands of mappings, more than a `dma::Memory` each may have.
fn punching_process() {
    let Some(path) = std::env::var_os(PUNCHES) else {
        return;
    };
    let file = File::options().read(true).write(true).open(path).unwrap();
    let (prot, flags) = (ProtFlags::READ, MapFlags::SHARED);
    for _ in 0..MAPPINGS {
        // SAFETY: a new mapping at an address of the kernel's choice, which is not accessed.
        let mapped = unsafe { mmap(null_mut(), PUNCHED as usize, prot, flags, &file, 0) };
        mapped.unwrap();
    }
    println!("mapped");
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    while fallocate(&file, punch, 0, PUNCHED).is_ok() {}
}

/// A process that ends with this value, and its output, which is not to be closed before.
struct Puncher {
    child: Child,
    _output: BufReader<ChildStdout>,
}

impl Puncher {
    fn start(file: &File) -> Self {
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let mut child = Command::new("/proc/self/exe")
            .args(["--exact", "mapping::punching_process", "--nocapture"])
            .env(PUNCHES, path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut lines = output.by_ref().lines();
        assert!(lines.any(|line| line.unwrap().ends_with("mapped")));
        Self {
            child,
            _output: output,
        }
    }
}

impl Drop for Puncher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the longest time for which the worker stood in the kernel, sampled each millisecond.
fn longest_standstill(process: u32, goes_on: &AtomicBool) -> Duration {
    let (mut longest, mut since) = (Duration::ZERO, None);
    while goes_on.load(Ordering::Relaxed) {
        let stat = thread_file(process, "worker-0", "stat").unwrap_or_default();
        let stands = stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim().starts_with('D'));
        let now = Instant::now();
        since = stands.then(|| since.unwrap_or(now));
        longest = longest.max(since.map_or(Duration::ZERO, |since| now - since));
        std::thread::sleep(Duration::from_millis(1));
    }
    longest
}

/// Measures a neighbour for some seconds, and prints the longest of everything.
fn measure(what: &str, host: &mut Host, process: u32) {
    let goes_on = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let sampler = scope.spawn(|| longest_standstill(process, &goes_on));
        let (mut register, mut read) = (Duration::ZERO, Duration::ZERO);
        let (begin, mut reads) = (Instant::now(), 0);
        while begin.elapsed() < MEASURED {
            let start = Instant::now();
            host.read32(0x8);
            register = register.max(start.elapsed());
            let start = Instant::now();
            host.read(1, reads % 64 * 8, 4096);
            read = read.max(start.elapsed());
            reads += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        goes_on.store(false, Ordering::Relaxed);
        let stood = sampler.join().unwrap();
        println!(
            "{what}: {reads} register reads and reads of 4 KiB, the longest {register:.1?} and \
             {read:.1?}; the worker stood in the kernel for {stood:.1?} at most"
        );
    });
}

/// Prints the figures of docs/hostile-clients.md; `VNVME_BIN` measures another program.
#[test]
#[ignore = "measures, on a machine without other work: make test-long"]
fn neighbour_beside_punched_memory_is_measured() {
    let test_dir = TestDir::new();
    let built = std::env::var_os("VNVME_BIN").filter(|path| !path.is_empty());
    let program = built.unwrap_or_else(|| env!("CARGO_BIN_EXE_vnvme").into());
    let config = two_controllers(&test_dir);
    let args = ["serve", "--workers", "1", "--config", &config];
    let daemon = Daemon::spawn_program(Path::new(&program), &args);
    daemon.wait_listening(&test_dir.path("first.sock"));
    daemon.wait_listening(&test_dir.socket());
    let mut host = Host::up(&test_dir.socket());
    measure("alone", &mut host, daemon.pid());
    let file = memfd(PUNCHED);
    let punchers: Vec<Puncher> = (0..PUNCHERS).map(|_| Puncher::start(&file)).collect();
    measure("beside seven processes that punch", &mut host, daemon.pid());
    let goes_on = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let attack = scope.spawn(|| {
            let timeout = Duration::from_secs(600);
            let mut client = Client::connect(test_dir.path("first.sock"), timeout).unwrap();
            let (mut count, mut longest) = (0, Duration::ZERO);
            while goes_on.load(Ordering::Relaxed) {
                let map = window(0, PUNCHED);
                let start = Instant::now();
                client.dma_map(map, Some(file.as_fd())).unwrap();
                longest = longest.max(start.elapsed());
                client.dma_unmap(DmaUnmapping::All).unwrap();
                count += 1;
            }
            println!("the client has mapped {count} times, the longest {longest:.1?}");
        });
        measure(
            "beside their client, which maps and unmaps",
            &mut host,
            daemon.pid(),
        );
        goes_on.store(false, Ordering::Relaxed);
        drop(punchers);
        attack.join().unwrap();
    });
    drop(host);
    daemon.end();
}
