//! Kernel interface: the rings for control commands and for requests, and the mapped request
//! descriptors.
#![allow(unsafe_code)]

use crate::uapi;
use crate::uapi::{CtrlCmd, IoCmd, IoDesc, MAX_DEPTH};
use dma::{Memory, SegmentList};
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Interval of checks on whether to go on waiting for a control command.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// io_uring for control commands, which are executed one at a time.
pub(crate) struct ControlRing {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    device: OwnedFd,
    sequence: u64,
}

impl ControlRing {
    /// Creates an io_uring for commands to `device`, the open `/dev/ublk-control`.
    pub(crate) fn new(device: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            ring: IoUring::builder().build(4)?,
            device,
            sequence: 0,
        })
    }

    /// Executes a control command with a buffer. Returns the command's result.
    pub(crate) fn with_buffer(
        &mut self,
        op: u32,
        mut command: CtrlCmd,
        buffer: &mut [u8],
    ) -> io::Result<i32> {
        command.addr = buffer.as_mut_ptr() as u64;
        command.len = u16::try_from(buffer.len())
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        // The wait is unlimited: the kernel may use the buffer until the command ends.
        self.execute(op, command, &mut || true)
    }

    /// Executes a command without a buffer. Stops waiting when `sensible` returns `false`; the
    /// kernel may still execute the command.
    pub(crate) fn execute(
        &mut self,
        op: u32,
        command: CtrlCmd,
        sensible: &mut dyn FnMut() -> bool,
    ) -> io::Result<i32> {
        self.sequence += 1;
        let mut bytes = [0; 80];
        if let Some(place) = bytes.get_mut(..size_of::<CtrlCmd>()) {
            place.copy_from_slice(command.as_bytes());
        }
        let entry = opcode::UringCmd80::new(Fd(self.device.as_raw_fd()), op)
            .cmd(bytes)
            .build()
            .user_data(self.sequence);
        // SAFETY: the entry points only to the buffer of `with_buffer`, which waits for the
        // command's end.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| io::Error::from(io::ErrorKind::WouldBlock))?;
        let pause = Timespec::from(CHECK_INTERVAL);
        loop {
            let args = SubmitArgs::new().timespec(&pause);
            match self.ring.submitter().submit_with_args(1, &args) {
                Ok(_) => {}
                Err(error) if is_temporary(&error) => {}
                Err(error) => return Err(error),
            }
            // Completions of abandoned commands may arrive late.
            let mut over = self
                .ring
                .completion()
                .filter(|c| c.user_data() == self.sequence);
            if let Some(completion) = over.next() {
                let result = completion.result();
                return if result < 0 {
                    Err(io::Error::from_raw_os_error(-result))
                } else {
                    Ok(result)
                };
            }
            if !sensible() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY)
    )
}

/// Descriptors of a queue's requests in memory shared with the kernel. The kernel writes a
/// descriptor before the completion that announces it.
struct Descriptors {
    at: NonNull<IoDesc>,
    bytes: usize,
    depth: u16,
}

impl Descriptors {
    fn map(device: &OwnedFd, queue: u16, depth: u16) -> io::Result<Self> {
        let page = rustix::param::page_size();
        let all = |depth: u16| (usize::from(depth) * size_of::<IoDesc>()).next_multiple_of(page);
        let (bytes, offset) = (all(depth), u64::from(queue) * all(MAX_DEPTH) as u64);
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap(null_mut(), bytes, ProtFlags::READ, flags, device, offset) }?;
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { at, bytes, depth })
    }

    fn get(&self, tag: u16) -> Option<IoDesc> {
        if tag >= self.depth {
            return None;
        }
        // SAFETY: the mapping has `depth` descriptors.
        let at = unsafe { self.at.add(usize::from(tag)) };
        // SAFETY: in the mapping, aligned, any content is a valid descriptor; the kernel does not
        // write to it now.
        Some(unsafe { at.read_volatile() })
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, without references into it.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

/// Completion of a fetch command: the tag of a new request, and the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FetchCompletion {
    pub tag: u16,
    pub result: i32,
}

/// Ring of a queue, which fetches requests and commits their results. It belongs to one thread,
/// because the kernel accepts a queue's commands only from the thread that sent the first.
pub(crate) struct QueueRing {
    ring: IoUring,
    device: Arc<OwnedFd>,
    queue: u16,
    descriptors: Descriptors,
    /// Memory with the data buffers of all tags.
    memory: Memory,
    buffers: SegmentList,
    buffer_bytes: u64,
    /// Number of commands that the kernel executes. It may write to the memory until they have
    /// completed.
    held: usize,
}

impl QueueRing {
    /// Creates the ring of queue `queue`. `device` is its open `/dev/ublkcN`; `memory` has
    /// `buffer_bytes` for each tag.
    pub(crate) fn new(
        device: Arc<OwnedFd>,
        queue: u16,
        depth: u16,
        memory: Memory,
        buffer_bytes: u64,
    ) -> io::Result<Self> {
        let entries = u32::from(depth) + 8;
        let ring = IoUring::builder()
            .dontfork()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .build(entries);
        let ring = match ring {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries)?,
            ring => ring?,
        };
        let buffers = memory
            .segments(0, memory.len())
            .ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            descriptors: Descriptors::map(&device, queue, depth)?,
            ring,
            device,
            queue,
            memory,
            buffers,
            buffer_bytes,
            held: 0,
        })
    }

    /// Returns the kernel's description of a tag's request, which must have arrived.
    pub(crate) fn descriptor(&self, tag: u16) -> Option<IoDesc> {
        self.descriptors.get(tag)
    }

    /// Points `list` at the first `len` bytes of a tag's buffer; returns `false` if the buffer is
    /// shorter.
    pub(crate) fn data(&self, tag: u16, len: u64, list: &mut SegmentList) -> bool {
        let start = u64::from(tag) * self.buffer_bytes;
        len <= self.buffer_bytes && self.buffers.slice(start, len, list) == len
    }

    /// Asks the kernel for the first request of a tag.
    pub(crate) fn fetch(&mut self, tag: u16) -> io::Result<()> {
        self.command(uapi::FETCH_REQ, tag, -1)
    }

    /// Reports the result of a tag's request to the kernel, and asks for the tag's next request.
    pub(crate) fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
        self.command(uapi::COMMIT_AND_FETCH_REQ, tag, result)
    }

    fn command(&mut self, op: u32, tag: u16, result: i32) -> io::Result<()> {
        let start = usize::from(tag) * self.buffer_bytes as usize;
        let buffer = self.buffers.segments().first();
        let base = buffer.map_or(0, |segment| segment.as_ptr().addr());
        let command = IoCmd {
            q_id: self.queue,
            tag,
            result,
            addr: (base + start) as u64,
        };
        let mut bytes = [0; 16];
        bytes.copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd16::new(Fd(self.device.as_raw_fd()), op)
            .cmd(bytes)
            .build()
            .user_data(tag.into());
        self.push(&entry)?;
        self.held += 1;
        Ok(())
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        for _ in 0..2 {
            // SAFETY: a tag's buffer is part of `memory`, which is kept (or, in `drop`, given up)
            // as long as the kernel has commands that name it.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.submit()?;
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Submits the queued commands to the kernel.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        let waiting = !self.ring.submission().is_empty();
        let due = self.ring.submission().taskrun();
        if !waiting && !due {
            return Ok(());
        }
        temporary(self.ring.submit().map(drop))
    }

    /// Returns the descriptor that is readable while requests or completions are available.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring keeps its descriptor open as long as it lives.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// Returns whether completions are available.
    pub(crate) fn has_arrivals(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    /// Returns the next completion of a fetch command, if there is one.
    pub(crate) fn next(&mut self) -> Option<FetchCompletion> {
        loop {
            let entry = self.ring.completion().next()?;
            self.held = self.held.saturating_sub(1);
            if let Ok(tag) = u16::try_from(entry.user_data()) {
                let result = entry.result();
                return Some(FetchCompletion { tag, result });
            }
        }
    }
}

fn temporary(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if is_temporary(&error) => Ok(()),
        result => result,
    }
}

impl Drop for QueueRing {
    fn drop(&mut self) {
        if self.held > 0 {
            // The kernel may still write there: that memory is never used again.
            std::mem::forget(self.memory.clone());
        }
    }
}
