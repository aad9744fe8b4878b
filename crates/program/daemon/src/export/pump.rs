//! Front-end that executes the requests of an export's clients on a worker.

use crate::serve::peers::Assignment;
use dma::{Buffer, SegmentList};
use std::any::Any;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, mpsc};
use std::task::Waker;
use std::time::Instant;
use sync::Unpoisoned;
use volume::{
    Budget, Completion, IoError, IoErrorKind, Op, OpenQueue, Request, Volume, VolumeError, Wake,
};
use worker::{Context, Frontend};

/// Maximum length in bytes of a read or write: as much as a volume executes within a call.
pub const PIECE: usize = 128 << 10;
/// Maximum number of requests of an export that are outstanding at its volume.
const DEPTH: u16 = 16;

/// Result of an [`Order`].
pub struct Done {
    /// Number of the order among those of its sender.
    pub index: usize,
    pub result: Result<(), IoError>,
    /// Memory of the order.
    pub buffer: Option<Buffer>,
}

/// Obligation to report the result of an order. Dropping it reports that the volume is gone.
struct Ticket {
    index: usize,
    done: Option<mpsc::Sender<Done>>,
}

impl Ticket {
    fn report(mut self, result: Result<(), IoError>, buffer: Option<Buffer>) {
        let index = self.index;
        if let Some(done) = self.done.take() {
            // A client that has gone meanwhile needs no result.
            let _ = done.send(Done {
                index,
                result,
                buffer,
            });
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            let _ = done.send(Done {
                index: self.index,
                result: Err(IoErrorKind::Gone.into()),
                buffer: None,
            });
        }
    }
}

/// Request of an export's client to the volume.
pub struct Order {
    op: Op,
    offset: u64,
    len: u64,
    buffer: Option<Buffer>,
    ticket: Ticket,
}

impl Order {
    /// Creates a read or write of all of `buffer`. `done` gets its result under the number `index`.
    pub fn transfer(
        op: Op,
        offset: u64,
        buffer: Buffer,
        index: usize,
        done: &mpsc::Sender<Done>,
    ) -> Self {
        let len = buffer.len() as u64;
        Self {
            buffer: Some(buffer),
            ..Self::without_data(op, offset, len, index, done)
        }
    }

    /// Creates a request without data.
    pub fn without_data(
        op: Op,
        offset: u64,
        len: u64,
        index: usize,
        done: &mpsc::Sender<Done>,
    ) -> Self {
        let done = Some(done.clone());
        Self {
            op,
            offset,
            len,
            buffer: None,
            ticket: Ticket { index, done },
        }
    }
}

struct Inbox {
    orders: Vec<Order>,
    /// Exported volume; `None` once the export is being ended. Threads of clients, which may be
    /// stuck, have no other reference to it.
    volume: Option<Arc<dyn Volume>>,
    /// Whether the export is being ended, or its worker is.
    closed: bool,
}

/// Connection of an export's threads to its [`Pump`].
pub struct PumpLink {
    inbox: Mutex<Inbox>,
    waker: Waker,
}

impl PumpLink {
    /// Has orders executed. After the end of the pump each gets the error that the volume is gone.
    pub fn send(&self, orders: Vec<Order>) {
        let mut inbox = self.inbox.lock().unpoisoned();
        if inbox.closed {
            drop(inbox);
            // Their tickets say so.
            drop(orders);
            return;
        }
        inbox.orders.extend(orders);
        drop(inbox);
        self.waker.wake_by_ref();
    }

    /// Returns the exported volume, unless the export is being ended. Callers keep it for a moment
    /// only.
    pub fn volume(&self) -> Option<Arc<dyn Volume>> {
        self.inbox.lock().unpoisoned().volume.clone()
    }

    /// Ends the pump, after its outstanding requests, and gives the volume up.
    pub fn close(&self) {
        let volume = self.inbox.lock().unpoisoned().volume.take();
        drop(volume);
        self.end();
        self.waker.wake_by_ref();
    }

    /// Refuses all orders from now on.
    fn end(&self) {
        let orders = {
            let mut inbox = self.inbox.lock().unpoisoned();
            inbox.closed = true;
            std::mem::take(&mut inbox.orders)
        };
        drop(orders);
    }
}

/// Front-end that executes the requests of an export's clients.
pub struct Pump {
    link: Arc<PumpLink>,
    queue: OpenQueue,
    owner: u16,
    /// Orders that wait for room at the volume. Each connection has a bounded number of orders.
    waiting: VecDeque<Order>,
    /// Orders that are outstanding at the volume, by the lower bits of their tags.
    outstanding: Vec<Option<Ticket>>,
    free: Vec<u16>,
    closed: bool,
    _assignment: Assignment,
    /// Dropped after the queue, when no request is outstanding any more.
    _until_end: Option<Box<dyn Any + Send>>,
    /// Dropped last: tells the export that the volume is not used any more.
    _ended: mpsc::Sender<Infallible>,
}

impl Pump {
    /// Opens a queue into a volume on the worker of `context`. `until_end` is dropped when the last
    /// request has ended, then the receiver is disconnected.
    ///
    /// # Errors
    /// The volume cannot be opened on this worker.
    pub fn new(
        volume: Arc<dyn Volume>,
        context: &Context<'_>,
        assignment: Assignment,
        until_end: Option<Box<dyn Any + Send>>,
    ) -> Result<(Self, Arc<PumpLink>, mpsc::Receiver<Infallible>), VolumeError> {
        let queue = volume.open(context.io)?;
        let inbox = Inbox {
            orders: Vec::new(),
            volume: Some(volume),
            closed: false,
        };
        let link = Arc::new(PumpLink {
            inbox: Mutex::new(inbox),
            waker: context.waker.clone(),
        });
        let (ended, end) = mpsc::channel();
        let pump = Self {
            link: link.clone(),
            queue,
            owner: context.owner,
            waiting: VecDeque::new(),
            outstanding: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH).rev().collect(),
            closed: false,
            _assignment: assignment,
            _until_end: until_end,
            _ended: ended,
        };
        Ok((pump, link, end))
    }

    fn start(&mut self, order: Order, slot: u16) {
        let Order {
            op,
            offset,
            len,
            buffer,
            ticket,
        } = order;
        if let Some(entry) = self.outstanding.get_mut(usize::from(slot)) {
            *entry = Some(ticket);
        }
        let tag = u64::from(self.owner) << 48 | u64::from(slot);
        let request = match buffer {
            Some(buffer) => Request::transfer(tag, op, offset, SegmentList::owned(buffer)),
            None => Request::without_data(tag, op, offset, len),
        };
        if let Some(completion) = self.queue.submit(request) {
            self.complete(completion);
        }
    }
}

impl Frontend for Pump {
    type Error = Infallible;

    fn poll(&mut self, _: Instant, budget: &mut Budget) -> bool {
        let mut worked = false;
        while !budget.is_spent()
            && !self.waiting.is_empty()
            && let Some(slot) = self.free.pop()
        {
            let Some(order) = self.waiting.pop_front() else {
                break;
            };
            let bytes = order.buffer.as_ref().map_or(0, |buffer| buffer.len());
            budget.spend(1 + Budget::units_of(bytes as u64, 1));
            self.start(order, slot);
            worked = true;
        }
        if worked {
            self.queue.push();
        }
        worked
    }

    fn complete(&mut self, completion: Completion) {
        // The tag's lower bits are those that `start` has given it.
        let slot = (completion.tag & 0xffff) as u16;
        let entry = self.outstanding.get_mut(usize::from(slot));
        if let Some(ticket) = entry.and_then(Option::take) {
            self.free.push(slot);
            ticket.report(completion.result, completion.data.into_buffer());
        }
    }

    fn poll_volumes(&mut self, out: &mut Vec<Completion>) {
        self.queue.poll(&mut |completion| out.push(completion));
    }

    fn has_news(&self) -> bool {
        !self.waiting.is_empty() && !self.free.is_empty()
    }

    fn in_flight(&self) -> usize {
        self.outstanding.len() - self.free.len()
    }

    fn must_poll(&self) -> bool {
        self.queue.state().wake == Wake::Poll
    }

    fn arm(&mut self) -> bool {
        self.has_news()
    }

    fn deadline(&self) -> Option<Instant> {
        self.queue.state().wake.deadline(Instant::now)
    }

    fn drain_messages(&mut self) -> bool {
        let mut inbox = self.link.inbox.lock().unpoisoned();
        let orders = std::mem::take(&mut inbox.orders);
        self.closed |= inbox.closed;
        drop(inbox);
        if self.closed {
            // Their tickets say that the volume is gone.
            self.waiting.clear();
            return true;
        }
        let has_orders = !orders.is_empty();
        self.waiting.extend(orders);
        has_orders
    }

    fn update_volumes(&mut self) {
        self.queue.update();
    }

    fn flush(&mut self) {
        // Data of a writable export is made durable by its clients' flushes, and by the flush of
        // the disk's own front-end.
        self.link.end();
        self.closed = true;
        self.waiting.clear();
    }

    fn is_drained(&self) -> bool {
        self.in_flight() == 0
    }

    fn has_ended(&self) -> bool {
        self.closed && self.in_flight() == 0
    }
}
