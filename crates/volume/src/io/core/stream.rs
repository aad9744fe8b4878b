//! Connections: an operation of each direction, and what it points to.
//!
//! As with slots: what an entry points to (the message's header, the vectors, and through them
//! bytes and segments) belongs to the stream's half until the kernel has posted the completion.

use super::{MAX_FAILURES, NO_SLOT, RingCore, name};
use crate::io::stream::{Incoming, Outgoing};
use io_uring::{opcode, squeue, types};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Tells names of streams from those of slots: no slot has so high a number.
pub(super) const STREAM: usize = 1 << 31;
/// Tells the two halves apart.
const RECEIVES: usize = 1 << 30;

/// One direction of a connection.
struct Half<T> {
    state: State<T>,
    vectors: Vec<libc::iovec>,
    header: Box<libc::msghdr>,
}

enum State<T> {
    Idle,
    Busy(T),
    Ended(T, i32),
}

impl<T> Half<T> {
    fn new() -> Self {
        // SAFETY: a `msghdr` is numbers and pointers, for which zeroes are a value: nothing.
        let header = unsafe { std::mem::zeroed() };
        Self {
            state: State::Idle,
            vectors: Vec::new(),
            header: Box::new(header),
        }
    }

    fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle)
    }

    fn is_busy(&self) -> bool {
        matches!(self.state, State::Busy(_))
    }

    fn has_ended(&self) -> bool {
        matches!(self.state, State::Ended(..))
    }

    /// The message that the kernel is to see.
    fn message(&mut self) -> *mut libc::msghdr {
        self.header.msg_iov = self.vectors.as_mut_ptr();
        self.header.msg_iovlen = self.vectors.len() as _;
        &raw mut *self.header
    }

    fn answered(&mut self, answer: i32) {
        self.state = match std::mem::replace(&mut self.state, State::Idle) {
            State::Busy(what) => State::Ended(what, answer),
            other => other,
        };
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
    /// Nobody has it any more.
    closed: bool,
}

impl Stream {
    fn is_busy(&self) -> bool {
        self.sends.is_busy() || self.receives.is_busy()
    }
}

/// The connections of a ring.
#[derive(Default)]
pub(super) struct Streams {
    places: Vec<Option<Stream>>,
    generation: u32,
}

impl Streams {
    fn get(&mut self, stream: usize) -> Option<&mut Stream> {
        self.places.get_mut(stream)?.as_mut()
    }

    /// The kernel works on one of them.
    pub(super) fn is_busy(&self) -> bool {
        self.places.iter().flatten().any(Stream::is_busy)
    }

    /// The kernel's answer to an operation that is no slot's.
    pub(super) fn answered(&mut self, user_data: u64, answer: i32) {
        let index = user_data as u32 as usize;
        if user_data == NO_SLOT || index & STREAM == 0 {
            return;
        }
        let place = index & !(STREAM | RECEIVES);
        let Some(stream) = self.get(place) else {
            return;
        };
        if name(index, stream.generation) != user_data {
            return;
        }
        match index & RECEIVES {
            0 => stream.sends.answered(answer),
            _ => stream.receives.answered(answer),
        }
        if stream.closed && !stream.is_busy() {
            self.vacate(place);
        }
    }

    fn vacate(&mut self, place: usize) {
        if let Some(vacant) = self.places.get_mut(place) {
            *vacant = None;
        }
    }
}

impl RingCore {
    /// Takes a connection; the result names it from now on.
    pub(in crate::io) fn open_stream(&mut self, fd: OwnedFd) -> usize {
        self.streams.generation = self.streams.generation.wrapping_add(1);
        let stream = Stream {
            fd,
            generation: self.streams.generation,
            sends: Half::new(),
            receives: Half::new(),
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

    /// Starts to send; it comes back when that is not possible now.
    pub(in crate::io) fn stream_send(
        &mut self,
        stream: usize,
        outgoing: Outgoing,
    ) -> Result<(), Outgoing> {
        let Some(open) = self.streams.get(stream).filter(|s| s.sends.is_idle()) else {
            return Err(outgoing);
        };
        outgoing.vectors(&mut open.sends.vectors);
        // All of it, or the connection has ended; a signal to the process must not come of that.
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        let entry = opcode::SendMsg::new(types::Fd(open.fd.as_raw_fd()), open.sends.message())
            .flags(flags as u32)
            .build()
            .user_data(name(STREAM | stream, open.generation));
        // The half has it before the kernel does.
        open.sends.state = State::Busy(outgoing);
        if self.push_stream(&entry) {
            return Ok(());
        }
        match self.streams.get(stream).map(|open| &mut open.sends.state) {
            Some(state) => match std::mem::replace(state, State::Idle) {
                State::Busy(outgoing) => Err(outgoing),
                _ => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// What was sent.
    pub(in crate::io) fn stream_sent(
        &mut self,
        stream: usize,
    ) -> Option<(Outgoing, io::Result<u64>)> {
        self.streams.get(stream)?.sends.take()
    }

    /// Starts to receive; it comes back when that is not possible now.
    pub(in crate::io) fn stream_receive(
        &mut self,
        stream: usize,
        mut incoming: Incoming,
    ) -> Result<(), Incoming> {
        let Some(open) = self.streams.get(stream).filter(|s| s.receives.is_idle()) else {
            return Err(incoming);
        };
        incoming.vectors(&mut open.receives.vectors);
        if open.receives.vectors.is_empty() {
            return Err(incoming);
        }
        let entry = opcode::RecvMsg::new(types::Fd(open.fd.as_raw_fd()), open.receives.message())
            .build()
            .user_data(name(STREAM | RECEIVES | stream, open.generation));
        open.receives.state = State::Busy(incoming);
        if self.push_stream(&entry) {
            return Ok(());
        }
        match self
            .streams
            .get(stream)
            .map(|open| &mut open.receives.state)
        {
            Some(state) => match std::mem::replace(state, State::Idle) {
                State::Busy(incoming) => Err(incoming),
                _ => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// Ends what is under way early, and not the connection. What was moved by then is reported, or
    /// `ECANCELED`.
    pub(in crate::io) fn stream_cancel(&mut self, stream: usize) {
        let Some(open) = self.streams.get(stream) else {
            return;
        };
        let sends = open.sends.is_busy().then_some(STREAM);
        let receives = open.receives.is_busy().then_some(STREAM | RECEIVES);
        let generation = open.generation;
        for half in [sends, receives].into_iter().flatten() {
            let target = name(half | stream, generation);
            // Not to be had for lack of room: it then ends with the connection.
            let _ = self.push(&opcode::AsyncCancel::new(target).build().user_data(NO_SLOT));
        }
    }

    /// What was received.
    pub(in crate::io) fn stream_received(
        &mut self,
        stream: usize,
    ) -> Option<(Incoming, io::Result<u64>)> {
        self.streams.get(stream)?.receives.take()
    }

    /// Something has ended.
    pub(in crate::io) fn stream_has_news(&self, stream: usize) -> bool {
        let open = self.streams.places.get(stream).and_then(Option::as_ref);
        open.is_some_and(|open| open.sends.has_ended() || open.receives.has_ended())
    }

    /// Ends a connection, or one direction of it.
    pub(in crate::io) fn stream_shut_down(&mut self, stream: usize, how: rustix::net::Shutdown) {
        if let Some(open) = self.streams.get(stream) {
            // Not connected any more: what is under way has ended, too.
            let _ = rustix::net::shutdown(&open.fd, how);
        }
    }

    /// Nobody has it any more: it is closed when nothing of it is under way.
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

    /// Ends all connections, and waits for the kernel.
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
                tracing::error!("io_uring: connections do not end; giving up their memory");
                std::mem::forget(std::mem::take(&mut self.streams));
            }
        }
    }
}
