//! Connection of a front-end: negotiated features, memory, queues.

use crate::disk::Disk;
use crate::error::{ClientError, RequestRefusal};
use crate::eventfd::Signal;
use crate::import::FileImport;
use crate::inflight::Inflight;
use crate::log::DirtyLog;
use crate::memory::GuestMemory;
use crate::queue::{Negotiated, Queue};
use crate::run::untag;
use crate::stats::Stats;
use crate::stream::{Received, Stream};
use crate::virtio::feature;
use crate::wire::{self, BACKEND_CONFIG_CHANGE, Header, protocol};
use receive::Socket;
use rustix::net::SendFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;
use volume::{Budget, Completion};
use worker::Descriptors;
use zerocopy::IntoBytes;

/// Messages that are handled before the queues get their turn.
///
/// The number is small, since the cost of messages is known only afterwards, when the worker reads
/// the clock.
const MESSAGES_PER_TURN: u32 = 4;

/// Request of the front-end that is answered later.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pending {
    /// Request with memory files, handled when these are mapped.
    Import(Header),
    /// GET_VRING_BASE, answered when the queue's requests have completed.
    Base(Header, u16),
    /// Removal of memory, answered when no outstanding request can access it.
    Unmap(Header),
    /// RESET_DEVICE, answered when all requests have completed.
    Reset(Header),
}

/// State of a front-end's connection after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SessionStatus {
    /// The connection waits for an event.
    Open,
    /// The connection has more messages to read.
    More,
    /// The front-end has disconnected.
    Closed,
}

/// Connection of a front-end to the export.
pub(crate) struct Session {
    pub(crate) stream: Stream,
    pub(crate) descriptors: Descriptors,
    pub(crate) memory: GuestMemory,
    pub(crate) queues: Vec<Queue>,
    pub(crate) stats: Arc<Stats>,
    /// Virtio features that the driver has accepted.
    pub(crate) features: u64,
    /// vhost-user protocol features that the front-end has accepted.
    pub(crate) protocol: u64,
    pub(crate) inflight: Option<Inflight>,
    /// Dirty log of the front-end. Only marked with the feature LOG_ALL, or the flag of a ring.
    pub(crate) log: Option<Rc<DirtyLog>>,
    /// Eventfd that is signalled after pages were marked.
    pub(crate) log_signal: Option<Rc<Signal>>,
    /// Channel for the back-end's requests to the front-end, if there is one.
    pub(crate) backend_channel: Option<OwnedFd>,
    pub(crate) pending: Option<Pending>,
    /// Memory files of the pending request.
    pub(crate) import: Option<FileImport>,
    /// Waker of the worker, for the thread that maps memory files.
    pub(crate) waker: Waker,
    /// Index of the queue that the next round polls first.
    turn: usize,
    /// Number of memory faults of the process at the last check.
    faults: u64,
    /// Capacity that the front-end was told, in sectors.
    pub(crate) capacity: u64,
    /// Whether the log line about the first running queue was written.
    is_said: bool,
}

impl Session {
    pub(crate) fn new(
        socket: Socket,
        (descriptors, waker): (Descriptors, Waker),
        memory: GuestMemory,
        stats: Arc<Stats>,
        disk: &Disk,
    ) -> Session {
        Session {
            stream: Stream::new(socket),
            descriptors,
            memory,
            queues: Vec::new(),
            stats,
            features: 0,
            protocol: 0,
            inflight: None,
            log: None,
            log_signal: None,
            backend_channel: None,
            pending: None,
            import: None,
            waker,
            turn: 0,
            faults: dma::sigbus::faults(),
            capacity: disk.capacity(),
            is_said: false,
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Returns whether the socket has to become writable before more can be sent.
    pub(crate) fn wants_to_write(&self) -> bool {
        self.stream.is_blocked()
    }

    /// Returns whether a reply is sent again at the deadline: no event of the socket allows it.
    pub(crate) fn is_crowded(&self) -> bool {
        self.stream.is_crowded()
    }

    /// Returns whether the receiver process reads the socket, which must not be waited for.
    pub(crate) fn is_receiving(&self) -> bool {
        self.stream.is_receiving()
    }

    /// Returns the time at which the session must be served without an event.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.stream.deadline()
    }

    /// Returns whether memory waits to be pinned and no answer is pending; front-ends that wait for
    /// one are served first.
    pub(crate) fn is_pinning(&self) -> bool {
        self.memory.is_pinning() && self.pending.is_none() && !self.wants_to_write()
    }

    /// Reads messages of the front-end and handles them.
    pub(crate) fn on_ready(&mut self, disk: &mut Disk) -> Result<SessionStatus, ClientError> {
        for _ in 0..MESSAGES_PER_TURN {
            if !self.stream.flush()? || self.pending.is_some() {
                return Ok(SessionStatus::Open);
            }
            match self.stream.receive()? {
                Received::Message(message) => self.handle(message, disk)?,
                Received::Blocked => return Ok(SessionStatus::Open),
                Received::Eof => return Ok(SessionStatus::Closed),
            }
        }
        Ok(SessionStatus::More)
    }

    /// Sends the pending answer, if it is due. Returns whether it was sent.
    pub(crate) fn finish_pending(&mut self, disk: &mut Disk) -> Result<bool, ClientError> {
        let Some(pending) = self.pending else {
            return Ok(false);
        };
        match pending {
            Pending::Import(header) => return Ok(!self.finish_import(&header, disk)?),
            Pending::Base(header, index) => {
                let Some(queue) = self.queues.get_mut(usize::from(index)) else {
                    self.pending = None;
                    return Ok(false);
                };
                if queue.is_busy() {
                    return Ok(false);
                }
                let state = wire::VringState {
                    index: u32::from(index),
                    num: u32::from(queue.end()),
                };
                if self.is_releasing(disk) {
                    return Ok(false);
                }
                self.pending = None;
                self.stream.reply(header.request, state.as_bytes(), None)?;
            }
            Pending::Unmap(header) => {
                if !self.memory.quiesced() {
                    return Ok(false);
                }
                self.pending = None;
                self.acknowledge(&header, Ok(()))?;
            }
            Pending::Reset(header) => {
                if self.queues.iter().any(Queue::is_busy) {
                    return Ok(false);
                }
                self.queues.iter_mut().for_each(Queue::reset);
                self.pending = None;
                disk.reset();
                disk.negotiated(self.features);
                self.acknowledge(&header, Ok(()))?;
            }
        }
        Ok(true)
    }

    /// Returns whether the volume's release has to end before the last stopped queue is reported:
    /// the destination of the migration may start the disk at once then.
    fn is_releasing(&self, disk: &mut Disk) -> bool {
        let is_logging = self.log.is_some() && self.features & feature::LOG_ALL != 0;
        if !is_logging || self.queues.iter().any(|queue| queue.run.is_some()) {
            return false;
        }
        disk.release();
        disk.ownership.is_releasing(Instant::now())
    }

    /// Applies the dirty log to all queues.
    pub(crate) fn apply_log(&mut self) {
        let all = self.log.as_ref();
        let all = all.filter(|_| self.features & feature::LOG_ALL != 0);
        let rings = self.log.clone().map(|log| (log, self.log_signal.clone()));
        for queue in &mut self.queues {
            queue.set_log(all, rings.as_ref());
        }
    }

    /// Starts the queues that have waited for the volume.
    pub(crate) fn begin_all(&mut self, disk: &mut Disk) -> Result<(), ClientError> {
        for index in 0..self.queues.len() as u16 {
            self.begin(index, disk)
                .map_err(|why| ClientError::Refused {
                    request: wire::request::SET_VRING_KICK,
                    why,
                })?;
        }
        Ok(())
    }

    /// Fetches requests from all queues and starts them, within the budget. Returns whether there
    /// were any.
    pub(crate) fn fetch(&mut self, disk: &mut Disk, budget: &mut Budget) -> bool {
        let faults = dma::sigbus::faults();
        if faults != self.faults {
            self.faults = faults;
            let is_lost = self.log.as_ref().is_some_and(|log| log.is_poisoned());
            for queue in &mut self.queues {
                queue.check_memory(is_lost);
            }
        }
        // The first queue changes each round, so that no queue starves when the volume has no room
        // for all.
        self.turn = (self.turn + 1).checked_rem(self.queues.len()).unwrap_or(0);
        let turn = self.turn;
        let (later, first) = self.queues.split_at_mut(turn);
        let mut worked = false;
        for queue in first.iter_mut().chain(later) {
            worked |= queue.fetch(disk, &self.memory, budget);
            if budget.is_spent() {
                // The next round begins with another queue.
                break;
            }
        }
        worked
    }

    /// Handles the completion of a request by the volume.
    pub(crate) fn complete(&mut self, completion: Completion, disk: &mut Disk) {
        let (queue, slot) = untag(completion.tag);
        if let Some(queue) = self.queues.get_mut(usize::from(queue)) {
            queue.complete(slot, completion, disk, &self.memory);
        }
    }

    /// Publishes the requests that have completed in this round to the guest.
    pub(crate) fn publish(&mut self) {
        self.queues.iter_mut().for_each(Queue::publish);
    }

    /// Asks the guest to signal new requests on all queues. Returns whether requests have arrived
    /// already.
    pub(crate) fn arm(&mut self) -> bool {
        let mut raced = false;
        for queue in &mut self.queues {
            raced |= queue.arm();
        }
        raced
    }

    /// Returns whether the guest has added requests that were not fetched.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.queues.iter().any(Queue::has_news)
    }

    pub(crate) fn must_poll(&self) -> bool {
        self.queues.iter().any(Queue::must_poll)
    }

    /// Returns whether any queue is running, so that the guest may submit requests.
    pub(crate) fn is_fetching(&self) -> bool {
        self.queues.iter().any(Queue::is_fetching)
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.queues.iter().any(Queue::is_busy)
    }

    /// Counts a notification of the guest for the queue with this index.
    pub(crate) fn kicked(&self, index: usize) {
        if let Some(stats) = self.queues.get(index).and_then(Queue::stats) {
            stats.kicks.add(1);
        }
    }

    /// Stops fetching requests from all queues.
    pub(crate) fn stop(&mut self) {
        self.queues.iter_mut().for_each(Queue::stop);
    }

    /// Abandons a disconnected front-end without any further message. The caller waits for
    /// outstanding requests.
    pub(crate) fn abandon(&mut self) {
        self.queues.iter_mut().for_each(Queue::abandon);
        self.pending = None;
        self.import = None;
        self.backend_channel = None;
        self.inflight = None;
        self.log = None;
        self.memory.clear();
    }

    /// Notifies the front-end of a new size of the volume. Returns `false` when that must be tried
    /// again.
    pub(crate) fn announce_size(&mut self, capacity: u64) -> bool {
        if capacity == self.capacity {
            return true;
        }
        let Some(channel) = &self.backend_channel else {
            // The front-end has no channel for notifications; it may query the size.
            self.capacity = capacity;
            return true;
        };
        let header = Header {
            request: BACKEND_CONFIG_CHANGE,
            flags: wire::flags::VERSION,
            size: 0,
        };
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(channel, header.as_bytes(), flags) {
            Ok(sent) if sent == header.as_bytes().len() => {
                let say = |left_out| {
                    tracing::info!(
                        sectors = capacity,
                        left_out,
                        "notified the front-end of the new size"
                    )
                };
                self.stats.log.line("new size", say);
                self.capacity = capacity;
                true
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => false,
            // A partial or failed send makes the channel unusable.
            other => {
                let say = |left_out| {
                    tracing::warn!(
                        ?other,
                        left_out,
                        "the front-end cannot be notified of the new size"
                    )
                };
                self.stats.log.line("new size failed", say);
                self.backend_channel = None;
                true
            }
        }
    }

    /// Starts the queue with this index, if the front-end has set it up completely.
    /// While another process has the volume, [`Session::begin_all`] does it later.
    pub(crate) fn begin(&mut self, index: u16, disk: &mut Disk) -> Result<(), RequestRefusal> {
        let queue = self.queues.get(usize::from(index));
        if queue.is_some_and(Queue::is_started) && !disk.ownership.take() {
            return Ok(());
        }
        let with = Negotiated {
            features: self.features,
            inflight: self.inflight.as_ref(),
            memory: &self.memory,
        };
        let Some(queue) = self.queues.get_mut(usize::from(index)) else {
            return Err(RequestRefusal::Ring(index.into()));
        };
        queue.begin(&with)?;
        let is_running = queue.run.is_some();
        self.apply_log();
        if is_running && !std::mem::replace(&mut self.is_said, true) {
            let log = &self.stats.log;
            log.line("served", |left_out| {
                tracing::info!(left_out, "front-end is served")
            });
        }
        Ok(())
    }

    /// Lets all queues find their memory again after a change of guest memory.
    pub(crate) fn memory_changed(&mut self) {
        for queue in &mut self.queues {
            queue.memory_changed(self.features, &self.memory);
        }
    }

    /// Acknowledges a request without a payload of its own, if the front-end wants that. Otherwise
    /// a refusal ends the connection, because the front-end would continue as if the request had
    /// succeeded.
    pub(crate) fn acknowledge(
        &mut self,
        header: &Header,
        result: Result<(), RequestRefusal>,
    ) -> Result<(), ClientError> {
        let request = header.request;
        let wanted =
            self.protocol & protocol::REPLY_ACK != 0 && header.flags & wire::flags::NEED_REPLY != 0;
        match result {
            Err(why) if !wanted => Err(ClientError::Refused { request, why }),
            Err(why) => {
                self.stats.log.line("refused", |left_out| {
                    tracing::warn!(request, %why, left_out, "refused the front-end");
                });
                self.stream.reply(request, 1u64.as_bytes(), None)
            }
            Ok(()) if wanted => self.stream.reply(request, 0u64.as_bytes(), None),
            Ok(()) => Ok(()),
        }
    }
}
