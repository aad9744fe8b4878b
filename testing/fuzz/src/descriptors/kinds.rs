//! A descriptor of every kind that a client can have.

use std::io::Read as _;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, inotify, memfd_create, open,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

/// Length of the memory that has any, in bytes.
pub const LENGTH: u64 = 0x1_0000;

/// Use of a kind of descriptor by a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Memory,
    Eventfd,
    /// Only for writing, where a protocol has such a channel.
    Stream,
    Nothing,
}

/// Descriptors of each kind, in an order on which inputs depend.
pub struct Kinds {
    all: Vec<(Use, OwnedFd)>,
    /// Far ends of the sent pipe and socket; their end of file shows that the server has closed
    /// them.
    pipe: OwnedFd,
    stream: UnixStream,
}

fn memory(seals: SealFlags) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("client", flags)?;
    rustix::fs::ftruncate(&file, LENGTH)?;
    fcntl_add_seals(&file, seals)?;
    Ok(file)
}

impl Kinds {
    pub fn new() -> std::io::Result<Kinds> {
        let plain = memory(SealFlags::empty())?;
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&plain));
        let read_only = open(&*path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let only_path = open(&*path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let event = |value, flags| eventfd(value, flags | EventfdFlags::CLOEXEC);
        let full = event(0, EventfdFlags::empty())?;
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes())?;
        let (pipe, pipe_sent) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let (stream, stream_sent) = UnixStream::pair()?;
        let device = |name| open(name, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let directory = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let flags = SocketFlags::CLOEXEC;
        let packets = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?.0;
        let mut all = vec![
            (Use::Memory, memory(SealFlags::SHRINK)?),
            (
                Use::Memory,
                memory(SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)?,
            ),
            (Use::Memory, memory(SealFlags::FUTURE_WRITE)?),
            (Use::Memory, read_only),
            (Use::Memory, memfd_create("empty", MemfdFlags::CLOEXEC)?),
            (Use::Eventfd, event(0, EventfdFlags::NONBLOCK)?),
            (Use::Eventfd, event(0, EventfdFlags::empty())?),
            (Use::Eventfd, event(u32::MAX, EventfdFlags::SEMAPHORE)?),
            (Use::Eventfd, full),
            (Use::Stream, stream_sent.into()),
            (Use::Nothing, pipe_sent),
            (Use::Nothing, only_path),
            (Use::Nothing, device("/dev/null")?),
            (Use::Nothing, device("/dev/zero")?),
            (Use::Nothing, open("/", directory, Mode::empty())?),
            (
                Use::Nothing,
                open("/proc/self/stat", OFlags::CLOEXEC, Mode::empty())?,
            ),
            (Use::Nothing, UnixDatagram::pair()?.0.into()),
            (Use::Nothing, packets),
            (Use::Nothing, TcpListener::bind("127.0.0.1:0")?.into()),
            (Use::Nothing, epoll::create(epoll::CreateFlags::CLOEXEC)?),
            (Use::Nothing, inotify::init(inotify::CreateFlags::CLOEXEC)?),
            (
                Use::Nothing,
                timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?,
            ),
            (Use::Nothing, pidfd_open(getpid(), PidfdFlags::empty())?),
        ];
        all.insert(0, (Use::Memory, plain));
        rustix::io::ioctl_fionbio(&pipe, true)?;
        stream.set_nonblocking(true)?;
        Ok(Kinds { all, pipe, stream })
    }

    /// Returns a descriptor with its use.
    pub fn get(&self, index: u8) -> (Use, BorrowedFd<'_>) {
        let (kind, fd) = &self.all[usize::from(index) % self.all.len()];
        (*kind, fd.as_fd())
    }

    /// Checks that every kind is recognised.
    pub fn check(&self) {
        for (index, (kind, fd)) in self.all.iter().enumerate() {
            let is = [receive::kind::is_memory(fd), receive::kind::is_eventfd(fd)];
            let expected = [*kind == Use::Memory, *kind == Use::Eventfd];
            assert_eq!(is, expected, "descriptor {index}");
        }
    }

    /// Waits until the server has closed all descriptors that it cannot use. A separate thread
    /// closes those that a client leaves behind.
    pub fn gone(self) {
        drop(self.all);
        let (mut pipe, mut stream) = (std::fs::File::from(self.pipe), self.stream);
        let start = Instant::now();
        let mut byte = [0];
        let mut closed = |what: &str, read: &mut dyn FnMut(&mut [u8]) -> std::io::Result<usize>| {
            // A stream may also end by a shutdown, after the bytes that were written to it.
            while !matches!(read(&mut byte), Ok(0)) {
                assert!(
                    start.elapsed() < Duration::from_secs(10),
                    "somebody has the {what}"
                );
                std::thread::yield_now();
            }
        };
        closed("pipe", &mut |buf| pipe.read(buf));
        closed("stream", &mut |buf| stream.read(buf));
    }
}
