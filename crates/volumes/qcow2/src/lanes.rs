//! Files of a chain on a worker's ring, and the tasks that use them.
//!
//! A request that takes more than one operation on one file is a task: a future that starts
//! operations and waits for them, for other tasks, or for threads. The worker polls the tasks that
//! have been woken in the rounds of their queue.

use crate::store::{Access, FileRole, IoOutcome, Store};
use dma::SegmentList;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use volume::{
    Completion, Inbox, Io, IoError, IoErrorKind, Lane, Op, OpenQueue, Request, VolumeError,
};

/// State of a file operation that a task has started.
enum Slot {
    Free,
    Busy {
        waker: Option<Waker>,
        /// Index of the file's queue in [`Lanes::files`].
        file: usize,
        op: Op,
        at: u64,
        len: u64,
        task: Option<Rc<TaskState>>,
        /// Whether the future that waited for the operation was dropped, so that its result is
        /// ignored.
        orphan: bool,
    },
    Done(IoOutcome),
}

/// State of a task that its operations refer to.
#[derive(Debug, Default)]
pub(crate) struct TaskState {
    cancelled: Cell<bool>,
    /// Number of guards that protect the task from cancellation.
    shields: Cell<u32>,
}

impl TaskState {
    /// Returns whether the task was cancelled and may end now, because no shield requires it to
    /// finish a change.
    fn is_cancelled(&self) -> bool {
        self.cancelled.get() && self.shields.get() == 0
    }

    pub(crate) fn is_shielded(&self) -> bool {
        self.shields.get() > 0
    }
}

/// Queues into the files of a backing chain on one worker's ring.
pub(crate) struct Lanes {
    lane: Lane,
    /// Queues into the files. The queues for data and for tables of a layer are adjacent.
    files: RefCell<Vec<OpenQueue>>,
    slots: RefCell<Vec<Slot>>,
    free: RefCell<Vec<usize>>,
    /// Operations that could not start because the ring had no room, with the index of their queue.
    parked: RefCell<VecDeque<(usize, Request)>>,
    /// Task that is being polled; operations that start belong to it.
    current: RefCell<Option<Rc<TaskState>>>,
    busy: Cell<usize>,
}

impl Lanes {
    /// Creates an empty list of queues on the worker of `io`.
    pub(crate) fn new(io: &Io) -> Result<Rc<Self>, VolumeError> {
        Ok(Rc::new(Self {
            lane: io.lane()?,
            files: RefCell::default(),
            slots: RefCell::default(),
            free: RefCell::default(),
            parked: RefCell::default(),
            current: RefCell::default(),
            busy: Cell::new(0),
        }))
    }

    /// Returns the `Io` on which the files' queues are opened.
    pub(crate) fn io(&self) -> &Io {
        self.lane.io()
    }

    /// Adds the two queues of a layer: for I/O to clusters, and for I/O to tables.
    pub(crate) fn add(&self, data: OpenQueue, tables: OpenQueue) {
        self.files.borrow_mut().extend([data, tables]);
    }

    /// Returns the number of outstanding operations on all files.
    pub(crate) fn busy(&self) -> usize {
        self.busy.get()
    }

    /// Returns whether there is work for which the worker receives no wake-up.
    pub(crate) fn has_news(&self) -> bool {
        self.lane.has_news() || !self.parked.borrow().is_empty() || {
            let files = self.files.borrow();
            let polls = |file: &OpenQueue| file.state().wake == volume::Wake::Poll;
            files.iter().any(polls)
        }
    }

    /// Processes completed operations, which wakes their tasks, and starts those that had no room.
    pub(crate) fn poll(&self) {
        if self.busy.get() == 0 {
            return;
        }
        let mut done = Vec::new();
        self.lane.poll(&mut |completion| done.push(completion));
        for file in self.files.borrow_mut().iter_mut() {
            file.poll(&mut |completion| done.push(completion));
        }
        done.into_iter()
            .for_each(|completion| self.finish(completion));
        // In the head of the loop, the borrow would last until the end of the loop.
        let parked = self.parked.borrow().len();
        for _ in 0..parked {
            let Some((file, request)) = self.parked.borrow_mut().pop_front() else {
                break;
            };
            self.submit(file, request);
        }
    }

    fn submit(&self, file: usize, request: Request) {
        let submitted = match self.files.borrow_mut().get_mut(file) {
            Some(queue) => queue.submit(request),
            None => Some(request.complete(Err(IoErrorKind::Invalid.into()))),
        };
        if let Some(completion) = submitted {
            self.finish(completion);
        }
    }

    fn finish(&self, completion: Completion) {
        let Completion { tag, result, data } = completion;
        let number = tag as usize;
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get_mut(number) else {
            return;
        };
        let Slot::Busy {
            waker,
            file,
            op,
            at,
            len,
            task,
            orphan,
        } = slot
        else {
            return;
        };
        let wanted = !*orphan && task.as_ref().is_none_or(|task| !task.is_cancelled());
        if wanted && result.is_err_and(|error| error.kind == IoErrorKind::Busy) {
            let request = Request {
                tag,
                op: *op,
                offset: *at,
                len: *len,
                data,
            };
            self.parked.borrow_mut().push_back((*file, request));
            return;
        }
        self.busy.set(self.busy.get() - 1);
        let (waker, orphan) = (waker.take(), *orphan);
        *slot = if orphan {
            Slot::Free
        } else {
            Slot::Done((result, data))
        };
        drop(slots);
        if orphan {
            self.free.borrow_mut().push(number);
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Cancels the outstanding operations of a task.
    pub(crate) fn cancel(&self, task: &Rc<TaskState>) {
        task.cancelled.set(true);
        if task.is_shielded() {
            return;
        }
        let mut files = self.files.borrow_mut();
        let mut parked = Vec::new();
        for (number, slot) in self.slots.borrow().iter().enumerate() {
            let Slot::Busy {
                task: Some(owner),
                file,
                ..
            } = slot
            else {
                continue;
            };
            if Rc::ptr_eq(owner, task)
                && let Some(file) = files.get_mut(*file)
            {
                file.cancel(number as u64);
                parked.push(number as u64);
            }
        }
        drop(files);
        // Operations that were never submitted end here.
        let mut aborted = Vec::new();
        self.parked.borrow_mut().retain_mut(|(_, request)| {
            let ends = parked.contains(&request.tag);
            if ends {
                aborted.push((request.tag, std::mem::take(&mut request.data)));
            }
            !ends
        });
        for (tag, data) in aborted {
            let result = Err(IoErrorKind::Aborted.into());
            self.finish(Completion { tag, result, data });
        }
    }
}

/// Access of tasks to the chain's files through one worker's ring.
#[derive(Clone)]
pub(crate) struct TaskLanes(pub(crate) Rc<Lanes>);

impl Store for TaskLanes {
    type Shield = Shield;

    fn start(&self, access: Access) -> impl Future<Output = IoOutcome> + 'static {
        let lanes = &self.0;
        let file = access.layer * 2 + usize::from(access.part == FileRole::Tables);
        let task = lanes.current.borrow().clone();
        let number = lanes.free.borrow_mut().pop().unwrap_or_else(|| {
            let mut slots = lanes.slots.borrow_mut();
            slots.push(Slot::Free);
            slots.len() - 1
        });
        let cancelled = task.as_ref().is_some_and(|task| task.is_cancelled());
        let slot = if cancelled {
            Slot::Done((
                Err(IoErrorKind::Aborted.into()),
                // Not started.
                SegmentList::new(),
            ))
        } else {
            Slot::Busy {
                waker: None,
                file,
                op: access.op,
                at: access.at,
                len: access.len,
                task,
                orphan: false,
            }
        };
        if let Some(place) = lanes.slots.borrow_mut().get_mut(number) {
            *place = slot;
        }
        if !cancelled {
            lanes.busy.set(lanes.busy.get() + 1);
            let request = Request {
                tag: number as u64,
                op: access.op,
                offset: access.at,
                len: access.len,
                data: access.data,
            };
            lanes.submit(file, request);
        }
        Operation {
            lanes: lanes.clone(),
            number: Some(number),
        }
    }

    fn is_cancelled(&self) -> bool {
        let current = self.0.current.borrow();
        current.as_ref().is_some_and(|task| task.is_cancelled())
    }

    fn shield(&self) -> Shield {
        let task = self.0.current.borrow().clone();
        if let Some(task) = &task {
            task.shields.set(task.shields.get() + 1);
        }
        Shield(task)
    }
}

/// Guard that protects its task from cancellation until it is dropped.
pub(crate) struct Shield(Option<Rc<TaskState>>);

impl Drop for Shield {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.shields.set(task.shields.get().saturating_sub(1));
        }
    }
}

/// Started operation on a file, as a future that yields its result.
struct Operation {
    lanes: Rc<Lanes>,
    number: Option<usize>,
}

impl Future for Operation {
    type Output = IoOutcome;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoOutcome> {
        let aborted = || (Err(IoErrorKind::Aborted.into()), SegmentList::new());
        let Some(number) = self.number else {
            return Poll::Ready(aborted());
        };
        let outcome = match self.lanes.slots.borrow_mut().get_mut(number) {
            Some(Slot::Busy { waker, .. }) => {
                *waker = Some(context.waker().clone());
                return Poll::Pending;
            }
            Some(slot) => match std::mem::replace(slot, Slot::Free) {
                Slot::Done(outcome) => outcome,
                _ => aborted(),
            },
            None => aborted(),
        };
        self.number = None;
        self.lanes.free.borrow_mut().push(number);
        Poll::Ready(outcome)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let Some(number) = self.number else {
            return;
        };
        let mut slots = self.lanes.slots.borrow_mut();
        match slots.get_mut(number) {
            Some(Slot::Busy { orphan, waker, .. }) => {
                *orphan = true;
                *waker = None;
            }
            Some(slot) => {
                *slot = Slot::Free;
                self.lanes.free.borrow_mut().push(number);
            }
            None => {}
        }
    }
}

/// Recipient of a task's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum For {
    /// The caller of the request with this tag.
    Guest(u64),
    /// No recipient, because the queue has started the task for itself.
    Nobody,
}

type TaskFuture = Pin<Box<dyn Future<Output = Result<(), IoError>>>>;

struct Task {
    work: TaskFuture,
    whose: For,
    data: Option<Rc<SegmentList>>,
    state: Rc<TaskState>,
    /// Lowest bit of the epoch in which the task began.
    parity: usize,
    waker: Waker,
    generation: u32,
}

/// Waker of a task, which any thread may use.
struct TaskWaker {
    inbox: Arc<Inbox<(u32, u32)>>,
    place: (u32, u32),
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.inbox.put(self.place);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.inbox.put(self.place);
    }
}

/// Tasks (requests that take several operations) of one queue.
pub(crate) struct Tasks {
    /// The tasks. Declared first, so that they are dropped before the lanes with their operations.
    places: Vec<Option<Task>>,
    free: Vec<usize>,
    generation: u32,
    /// Index and generation of each task that was woken.
    inbox: Arc<Inbox<(u32, u32)>>,
    ready: VecDeque<(u32, u32)>,
    count: usize,
    /// Number of tasks that began in even and in odd epochs.
    of_parity: [usize; 2],
    pub(crate) lanes: Rc<Lanes>,
}

impl Tasks {
    pub(crate) fn new(io: &Io, lanes: Rc<Lanes>) -> std::io::Result<Self> {
        Ok(Self {
            places: Vec::new(),
            free: Vec::new(),
            generation: 0,
            inbox: Inbox::new(io)?,
            ready: VecDeque::new(),
            count: 0,
            of_parity: [0; 2],
            lanes,
        })
    }

    /// Returns the number of unfinished tasks.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Returns the number of tasks that began in an epoch with this lowest bit.
    pub(crate) fn of_parity(&self, parity: usize) -> usize {
        self.of_parity.get(parity).copied().unwrap_or(0)
    }

    /// Returns whether any task was woken and can continue.
    #[inline]
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty() || self.inbox.has_news()
    }

    /// Starts a task. Returns its completion if it has ended at once.
    pub(crate) fn spawn(
        &mut self,
        whose: For,
        data: SegmentList,
        parity: usize,
        make: impl FnOnce(TaskLanes, Rc<SegmentList>) -> TaskFuture,
    ) -> Option<Completion> {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.generation = self.generation.wrapping_add(1);
        let data = Rc::new(data);
        let waker = Waker::from(Arc::new(TaskWaker {
            inbox: self.inbox.clone(),
            place: (place as u32, self.generation),
        }));
        let task = Task {
            work: make(TaskLanes(self.lanes.clone()), data.clone()),
            whose,
            data: Some(data),
            state: Rc::default(),
            parity,
            waker,
            generation: self.generation,
        };
        if let Some(free) = self.places.get_mut(place) {
            *free = Some(task);
        }
        self.count += 1;
        if let Some(count) = self.of_parity.get_mut(parity) {
            *count += 1;
        }
        self.run(place as u32, self.generation)
    }

    /// Polls the task with this index. Returns its completion if it has ended.
    fn run(&mut self, place: u32, generation: u32) -> Option<Completion> {
        let slot = self.places.get_mut(place as usize)?;
        let task = slot.as_mut().filter(|task| task.generation == generation)?;
        *self.lanes.current.borrow_mut() = Some(task.state.clone());
        let polled = task
            .work
            .as_mut()
            .poll(&mut Context::from_waker(&task.waker));
        *self.lanes.current.borrow_mut() = None;
        let Poll::Ready(result) = polled else {
            return None;
        };
        let Task {
            work,
            whose,
            data,
            parity,
            ..
        } = slot.take()?;
        drop(work);
        self.free.push(place as usize);
        self.count -= 1;
        if let Some(count) = self.of_parity.get_mut(parity) {
            *count -= 1;
        }
        match whose {
            For::Guest(tag) => Some(Completion {
                tag,
                result,
                data: data
                    .and_then(|data| Rc::try_unwrap(data).ok())
                    .unwrap_or_default(),
            }),
            For::Nobody => None,
        }
    }

    /// Polls at most `most` tasks that were woken. Returns the number of completions passed to
    /// `done`.
    pub(crate) fn poll(&mut self, most: usize, done: &mut dyn FnMut(Completion)) {
        self.lanes.poll();
        if self.inbox.has_news() {
            self.ready.extend(self.inbox.take());
        }
        for _ in 0..most {
            let Some((place, generation)) = self.ready.pop_front() else {
                break;
            };
            if let Some(completion) = self.run(place, generation) {
                done(completion);
            }
        }
    }

    /// Cancels a request, which ends as soon as no operation uses its memory. Returns the
    /// completion when the request ended here; its task continues with the part that has to be
    /// finished.
    pub(crate) fn cancel(&mut self, tag: u64) -> Option<Completion> {
        let mut tasks = self.places.iter_mut().flatten();
        let task = tasks.find(|task| task.whose == For::Guest(tag))?;
        self.lanes.cancel(&task.state);
        if task.state.is_shielded() {
            task.whose = For::Nobody;
            let data = task.data.take();
            return Some(Completion {
                tag,
                result: Err(IoErrorKind::Aborted.into()),
                data: data
                    .and_then(|data| Rc::try_unwrap(data).ok())
                    .unwrap_or_default(),
            });
        }
        task.waker.wake_by_ref();
        None
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        // Waits for the operations that the kernel has under way: another queue that then gets the
        // tasks' locks may write the same tables.
        let files = std::mem::take(&mut *self.lanes.files.borrow_mut());
        drop(files);
        // Futures are dropped before the lanes and the inbox that they use.
        self.places.clear();
        self.inbox.close();
    }
}
