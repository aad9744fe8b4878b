//! Connections on a ring: at most one operation in each direction, and the memory that it uses.
//!
//! As with slots, the memory to which an entry points (the message's header, the vectors, and
//! through them bytes and segments) belongs to the stream's half until the kernel has posted the
//! completion.
//!
//! Bytes for which the socket has room are sent at once by a system call of their own. For sockets
//! whose bytes usually arrive soon after they were asked for, a polling worker tries to receive
//! directly ([`Tries`]). With an operation in the ring, the kernel would enter the socket's wait
//! queue and leave it again for each message. The ring gets the operations that take longer, and
//! all operations while the worker sleeps.

use super::{MAX_FAILURES, Mode, NO_SLOT, RingCore, name};
use crate::io::stream::{Incoming, Outgoing};
use io_uring::{opcode, squeue, types};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

/// Bit that distinguishes the numbers of streams from those of slots. No slot has so high a number.
pub(super) const STREAM: usize = 1 << 31;
/// Bit of `user_data` that distinguishes receiving from sending on a connection.
const RECEIVES: usize = 1 << 30;

/// Maximum time for which a socket is tried before the receive is passed to the ring.
const WINDOW: Duration = Duration::from_micros(50);
/// Minimum time for which repeated attempts to receive from a socket are worthwhile.
const MIN_WINDOW: Duration = Duration::from_micros(2);
/// Maximum number of sockets tried in one round, each by a system call. Receives of further sockets
/// are passed to the ring.
const MAX_TRIED: usize = 8;

/// State of one direction (sending or receiving) of a connection.
struct Half<T> {
    state: State<T>,
    vectors: Vec<libc::iovec>,
    header: Box<libc::msghdr>,
    /// Number of bytes that were sent directly, before the rest was passed to the ring.
    moved: i32,
}

enum State<T> {
    Idle,
    /// A receive for which the socket is tried directly, before the ring is used.
    Tried(T),
    Busy(T),
    Ended(T, i32),
}

/// Time for which a socket is tried: as long as its bytes usually arrive within [`WINDOW`].
#[derive(Debug, Clone, Copy)]
struct Tries {
    /// Time in cycles for which the socket is tried after a receive was started; 0 to use the ring
    /// at once.
    window: u64,
    /// Time in cycles at which the receive was started.
    since: u64,
}

impl Tries {
    /// Adapts the time after bytes have arrived; `window` is [`WINDOW`] in cycles.
    fn came(&mut self, now: u64, window: u64) {
        if now.wrapping_sub(self.since) <= window {
            self.window = window;
        }
    }

    /// Halves the time after no bytes arrived within it. `shortest` is [`MIN_WINDOW`] in cycles.
    fn missed(&mut self, shortest: u64) {
        self.window /= 2;
        if self.window < shortest {
            self.window = 0;
        }
    }
}

impl<T> Half<T> {
    fn new() -> Self {
        // SAFETY: a `msghdr` is numbers and pointers, for which zeroes are a value: nothing.
        let header = unsafe { std::mem::zeroed() };
        Self {
            state: State::Idle,
            vectors: Vec::new(),
            header: Box::new(header),
            moved: 0,
        }
    }

    fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle)
    }

    fn is_busy(&self) -> bool {
        matches!(self.state, State::Busy(_))
    }

    fn is_tried(&self) -> bool {
        matches!(self.state, State::Tried(_))
    }

    fn has_ended(&self) -> bool {
        matches!(self.state, State::Ended(..))
    }

    /// Returns the message header (`msghdr`) to pass to the kernel.
    fn message(&mut self) -> *mut libc::msghdr {
        self.header.msg_iov = self.vectors.as_mut_ptr();
        self.header.msg_iovlen = self.vectors.len() as _;
        &raw mut *self.header
    }

    fn answered(&mut self, answer: i32) {
        let moved = std::mem::take(&mut self.moved);
        self.state = match std::mem::replace(&mut self.state, State::Idle) {
            // An error after some bytes: those count, and the next call meets with it again.
            State::Busy(what) | State::Tried(what) if moved > 0 => {
                State::Ended(what, moved.saturating_add(answer.max(0)))
            }
            State::Busy(what) | State::Tried(what) => State::Ended(what, answer),
            other => other,
        };
    }

    /// Returns the memory of an operation for which the ring has no room, to the caller.
    fn reclaim(&mut self) -> Option<T> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Busy(what) => Some(what),
            other => {
                self.state = other;
                None
            }
        }
    }

    fn take(&mut self) -> Option<(T, io::Result<u64>)> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Ended(what, answer) => {
                let result = match u64::try_from(answer) {
                    Ok(len) => Ok(len),
                    Err(_) => Err(io::Error::from_raw_os_error(answer.wrapping_neg())),
                };
                Some((what, result))
            }
            other => {
                self.state = other;
                None
            }
        }
    }
}

struct Stream {
    fd: OwnedFd,
    generation: u32,
    sends: Half<Outgoing>,
    receives: Half<Incoming>,
    tries: Tries,
    /// Whether the owner of the connection has closed it.
    closed: bool,
}

/// Converts the result of a system call to the form used by the ring: a number of bytes, or a
/// negative error number.
fn answer(result: isize) -> i32 {
    match result {
        // A call moves less than 2 GiB.
        0.. => i32::try_from(result).unwrap_or(i32::MAX),
        _ => io::Error::last_os_error()
            .raw_os_error()
            .map_or(-libc::EIO, |errno| -errno),
    }
}

/// Returns whether the result says that the socket has no bytes, or no room, for now.
const fn is_later(answer: i32) -> bool {
    answer == -libc::EAGAIN || answer == -libc::EINTR
}

impl Stream {
    /// Sends as many bytes as the socket accepts without waiting.
    fn send_now(&mut self) -> i32 {
        let message = self.sends.message();
        // SAFETY: the message's vectors point to bytes and segments that the half has, or is given
        // before anything else happens; the call only reads them.
        let sent = unsafe {
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            libc::sendmsg(self.fd.as_raw_fd(), message, flags)
        };
        answer(sent)
    }

    /// Receives the bytes that are available without waiting.
    fn receive_now(&mut self) -> i32 {
        let message = self.receives.message();
        // SAFETY: the message's vectors point to the buffer and the segments that the half holds;
        // no reference to these bytes exists during the call.
        let received = unsafe { libc::recvmsg(self.fd.as_raw_fd(), message, libc::MSG_DONTWAIT) };
        answer(received)
    }

    fn is_busy(&self) -> bool {
        self.sends.is_busy() || self.receives.is_busy()
    }
}

/// Network connections on which a worker's ring sends and receives.
#[derive(Default)]
pub(super) struct Streams {
    places: Vec<Option<Stream>>,
    generation: u32,
    /// Number of sockets from which the worker tries to receive directly.
    tried: usize,
    /// Values of [`WINDOW`] and [`MIN_WINDOW`] in cycles of this processor.
    window: u64,
    shortest: u64,
}

impl Streams {
    pub(super) fn new(cycles_per_second: f64) -> Self {
        let cycles = |time: Duration| (time.as_secs_f64() * cycles_per_second) as u64;
        Self {
            window: cycles(WINDOW),
            shortest: cycles(MIN_WINDOW),
            ..Self::default()
        }
    }

    fn get(&mut self, stream: usize) -> Option<&mut Stream> {
        self.places.get_mut(stream)?.as_mut()
    }

    /// Returns whether the kernel is executing a send or receive of any connection.
    pub(super) fn is_busy(&self) -> bool {
        self.places.iter().flatten().any(Stream::is_busy)
    }

    /// Processes the result of a send or receive; `user_data` names the connection and direction.
    pub(super) fn answered(&mut self, user_data: u64, answer: i32) {
        let index = user_data as u32 as usize;
        if user_data == NO_SLOT || index & STREAM == 0 {
            return;
        }
        let place = index & !(STREAM | RECEIVES);
        let window = self.window;
        let Some(stream) = self.get(place) else {
            return;
        };
        if name(index, stream.generation) != user_data {
            return;
        }
        match index & RECEIVES {
            0 => stream.sends.answered(answer),
            _ => {
                // Bytes asked for before the worker slept arrived after that, or late.
                stream.tries.came(probes::cycles(), window);
                stream.receives.answered(answer);
            }
        }
        if stream.closed && !stream.is_busy() {
            self.vacate(place);
        }
    }

    fn vacate(&mut self, place: usize) {
        if let Some(vacant) = self.places.get_mut(place) {
            let tried = vacant.as_ref().is_some_and(|open| open.receives.is_tried());
            self.tried -= usize::from(tried);
            *vacant = None;
        }
    }
}

impl RingCore {
    /// Adds a connection to the ring. Returns the number that names it in later calls.
    pub(in crate::io) fn open_stream(&mut self, fd: OwnedFd) -> usize {
        self.streams.generation = self.streams.generation.wrapping_add(1);
        let stream = Stream {
            fd,
            generation: self.streams.generation,
            sends: Half::new(),
            receives: Half::new(),
            tries: Tries {
                window: self.streams.window,
                since: 0,
            },
            closed: false,
        };
        let mut places = self.streams.places.iter_mut().enumerate();
        if let Some((index, place)) = places.find(|(_, place)| place.is_none()) {
            *place = Some(stream);
            return index;
        }
        self.streams.places.push(Some(stream));
        self.streams.places.len() - 1
    }

    /// Counts a system call that the ring did not make, such as a direct receive.
    fn count_call(&mut self) {
        self.counters.system_calls += 1;
        self.untold = true;
    }

    /// Starts to send; returns `outgoing` as the error when sending is not possible now.
    pub(in crate::io) fn stream_send(
        &mut self,
        stream: usize,
        outgoing: Outgoing,
    ) -> Result<(), Outgoing> {
        // A thread of the kernel spares this one the call.
        let calls = self.mode != Mode::Polled;
        let Some(open) = self.streams.get(stream).filter(|s| s.sends.is_idle()) else {
            return Err(outgoing);
        };
        outgoing.vectors(0, &mut open.sends.vectors);
        if calls {
            let sent = open.send_now();
            let all = u64::try_from(sent).is_ok_and(|sent| sent >= outgoing.left());
            if all || (sent < 0 && !is_later(sent)) {
                open.sends.state = State::Ended(outgoing, sent);
                self.count_call();
                self.counters.operations += 1;
                return Ok(());
            }
            open.sends.moved = sent.max(0);
            let moved = u64::try_from(sent).unwrap_or(0);
            outgoing.vectors(moved, &mut open.sends.vectors);
        }
        // All of it, or the connection has ended; a signal to the process must not come of that.
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        let entry = opcode::SendMsg::new(types::Fd(open.fd.as_raw_fd()), open.sends.message())
            .flags(flags as u32)
            .build()
            .user_data(name(STREAM | stream, open.generation));
        // The half has it before the kernel does.
        open.sends.state = State::Busy(outgoing);
        if calls {
            self.count_call();
        }
        if self.push_stream(&entry) {
            return Ok(());
        }
        let Some(open) = self.streams.get(stream) else {
            return Ok(());
        };
        match open.sends.moved {
            0 => open.sends.reclaim().map_or(Ok(()), Err),
            // A part was sent: its sender sends the rest.
            _ => {
                open.sends.answered(0);
                Ok(())
            }
        }
    }

    /// Returns the message of a completed send and the number of bytes sent, or the error.
    pub(in crate::io) fn stream_sent(
        &mut self,
        stream: usize,
    ) -> Option<(Outgoing, io::Result<u64>)> {
        self.streams.get(stream)?.sends.take()
    }

    /// Starts to receive; returns `incoming` as the error when receiving is not possible now.
    pub(in crate::io) fn stream_receive(
        &mut self,
        stream: usize,
        mut incoming: Incoming,
    ) -> Result<(), Incoming> {
        let calls = self.mode != Mode::Polled && self.streams.tried < MAX_TRIED;
        let Some(open) = self.streams.get(stream).filter(|s| s.receives.is_idle()) else {
            return Err(incoming);
        };
        incoming.vectors(&mut open.receives.vectors);
        if open.receives.vectors.is_empty() {
            return Err(incoming);
        }
        open.tries.since = probes::cycles();
        if calls && open.tries.window > 0 {
            open.receives.state = State::Tried(incoming);
            self.streams.tried += 1;
            return Ok(());
        }
        open.receives.state = State::Busy(incoming);
        if self.wait_on_ring(stream) {
            return Ok(());
        }
        let open = self.streams.get(stream);
        let incoming = open.and_then(|open| open.receives.reclaim());
        incoming.map_or(Ok(()), Err)
    }

    /// Passes the receive of a connection to the ring. Returns `false` when the ring is full.
    fn wait_on_ring(&mut self, stream: usize) -> bool {
        let Some(open) = self.streams.get(stream) else {
            return true;
        };
        let entry = opcode::RecvMsg::new(types::Fd(open.fd.as_raw_fd()), open.receives.message())
            .build()
            .user_data(name(STREAM | RECEIVES | stream, open.generation));
        self.push_stream(&entry)
    }

    /// Returns whether there is a socket from which the worker tries to receive directly.
    #[inline]
    pub(in crate::io) fn has_tried_streams(&self) -> bool {
        self.streams.tried > 0
    }

    /// Tries to receive from each socket that is read directly instead of through the ring.
    pub(in crate::io) fn try_streams(&mut self) {
        let (window, shortest) = (self.streams.window, self.streams.shortest);
        for stream in 0..self.streams.places.len() {
            let Some(open) = self.streams.get(stream).filter(|s| s.receives.is_tried()) else {
                continue;
            };
            let received = open.receive_now();
            let now = probes::cycles();
            if !is_later(received) {
                open.tries.came(now, window);
                open.receives.answered(received);
                self.streams.tried -= 1;
                self.counters.operations += 1;
            } else if now.wrapping_sub(open.tries.since) >= open.tries.window {
                open.tries.missed(shortest);
                self.leave_to_ring(stream);
            }
            self.count_call();
        }
    }

    /// Passes all receives to the ring, because the worker is about to sleep. Returns `false` when
    /// the ring is full.
    pub(in crate::io) fn leave_streams_to_ring(&mut self) -> bool {
        for stream in 0..self.streams.places.len() {
            if self.streams.tried == 0 {
                return true;
            }
            let open = self.streams.get(stream);
            if open.is_some_and(|open| open.receives.is_tried()) {
                self.leave_to_ring(stream);
            }
        }
        self.streams.tried == 0
    }

    fn leave_to_ring(&mut self, stream: usize) {
        // Where the ring has no room, the socket is asked again.
        if !self.wait_on_ring(stream) {
            return;
        }
        if let Some(open) = self.streams.get(stream) {
            open.receives.state = match std::mem::replace(&mut open.receives.state, State::Idle) {
                State::Tried(incoming) => State::Busy(incoming),
                other => other,
            };
            self.streams.tried -= 1;
        }
    }

    /// Cancels the operations in flight, but keeps the connection. Each result is the number of
    /// bytes moved by then, or `ECANCELED`.
    pub(in crate::io) fn stream_cancel(&mut self, stream: usize) {
        let Some(open) = self.streams.get(stream) else {
            return;
        };
        if open.receives.is_tried() {
            open.receives.answered(-libc::ECANCELED);
            self.streams.tried -= 1;
        }
        let Some(open) = self.streams.get(stream) else {
            return;
        };
        let sends = open.sends.is_busy().then_some(STREAM);
        let receives = open.receives.is_busy().then_some(STREAM | RECEIVES);
        let generation = open.generation;
        for half in [sends, receives].into_iter().flatten() {
            let target = name(half | stream, generation);
            // Without room for the cancellation, the operation ends with the connection.
            let _ = self.push(&opcode::AsyncCancel::new(target).build().user_data(NO_SLOT));
        }
    }

    /// Returns the memory of a completed receive and the number of bytes received, or the error.
    pub(in crate::io) fn stream_received(
        &mut self,
        stream: usize,
    ) -> Option<(Incoming, io::Result<u64>)> {
        self.streams.get(stream)?.receives.take()
    }

    /// Returns whether a send or a receive of the connection has ended.
    pub(in crate::io) fn stream_has_news(&self, stream: usize) -> bool {
        let open = self.streams.places.get(stream).and_then(Option::as_ref);
        open.is_some_and(|open| open.sends.has_ended() || open.receives.has_ended())
    }

    /// Shuts down a connection or one of its directions.
    pub(in crate::io) fn stream_shut_down(&mut self, stream: usize, how: rustix::net::Shutdown) {
        if let Some(open) = self.streams.get(stream) {
            // An error means that the socket is not connected any more: its operations have ended,
            // too.
            let _ = rustix::net::shutdown(&open.fd, how);
        }
    }

    /// Closes a stream. It is removed when none of its operations is in flight.
    pub(in crate::io) fn close_stream(&mut self, stream: usize) {
        self.stream_shut_down(stream, rustix::net::Shutdown::Both);
        let Some(open) = self.streams.get(stream) else {
            return;
        };
        open.closed = true;
        if !open.is_busy() {
            self.streams.vacate(stream);
        }
    }

    fn push_stream(&mut self, entry: &squeue::Entry) -> bool {
        let pushed = self.push(entry).is_ok();
        self.counters.operations += u64::from(pushed);
        pushed
    }

    /// Ends all connections, and waits until the kernel has completed their operations.
    pub(super) fn finish_streams(&mut self) {
        for stream in 0..self.streams.places.len() {
            self.close_stream(stream);
        }
        let mut failures = 0;
        while self.streams.is_busy() {
            self.counters.system_calls += 1;
            let result = self.uring.submitter().submit_and_wait(1);
            failures = if result.is_ok() { 0 } else { failures + 1 };
            self.sent(result.map(drop));
            while let Some((user_data, result)) = self.posted() {
                // No slot is in use any more.
                self.streams.answered(user_data, result);
            }
            if failures > MAX_FAILURES {
                tracing::error!("io_uring: connections do not end; leaking their memory");
                std::mem::forget(std::mem::take(&mut self.streams));
            }
        }
    }
}
