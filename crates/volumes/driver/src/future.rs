//! An asynchronous interface to a queue pair, independent of any async runtime.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::error::RefusedRequest;
use crate::queue::{Completion, QueuePair, Request};

enum State {
    Waiting(Option<Waker>),
    Done(Completion),
    /// The future was dropped: the request continues, and its result is dropped.
    Abandoned,
}

struct Inner {
    queue: QueuePair,
    requests: HashMap<u64, State>,
    next: u64,
}

/// Asynchronous queue pair: each request is a future. It belongs to one thread; clone it for every
/// task of that thread.
///
/// The program must call [`AsyncQueue::drive`]: from an executor's idle hook, from a task that
/// waits for [`AsyncQueue::eventfd`], or by [`AsyncQueue::block_on`].
#[derive(Clone)]
pub struct AsyncQueue(Rc<RefCell<Inner>>);

impl std::fmt::Debug for AsyncQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AsyncQueue")
    }
}

impl AsyncQueue {
    /// Creates an asynchronous interface to a queue pair without outstanding requests.
    pub fn new(queue: QueuePair) -> Self {
        Self(Rc::new(RefCell::new(Inner {
            queue,
            requests: HashMap::new(),
            next: 0,
        })))
    }

    /// Starts a request; its `user_data` is replaced. The future need not be polled for the
    /// request to be executed, and dropping it does not stop it: the request owns its
    /// buffer until it has completed.
    ///
    /// # Errors
    /// [`RefusedRequest`]: with [`SubmitRefusal::Full`](crate::SubmitRefusal::Full), drive and try
    /// again.
    pub fn request(&self, mut request: Request) -> Result<Pending, RefusedRequest> {
        let mut inner = self.0.borrow_mut();
        let token = inner.next;
        inner.next = token.wrapping_add(1);
        request.user_data = token;
        inner.queue.submit(request)?;
        inner.requests.insert(token, State::Waiting(None));
        drop(inner);
        Ok(Pending {
            queue: self.clone(),
            token,
        })
    }

    /// Rings the doorbell, takes completions, and wakes the tasks that wait for them. Returns the
    /// number of completions.
    pub fn drive(&self) -> usize {
        let mut wake = Vec::new();
        let mut inner = self.0.borrow_mut();
        let Inner {
            queue, requests, ..
        } = &mut *inner;
        // The thread has other tasks, and other queues.
        let count = queue.poll_restless(|completion| {
            let token = completion.user_data;
            match requests.insert(token, State::Done(completion)) {
                Some(State::Waiting(waker)) => wake.extend(waker),
                _ => drop(requests.remove(&token)),
            }
        });
        drop(inner);
        wake.into_iter().for_each(Waker::wake);
        count
    }

    /// Returns the eventfd of the queue's interrupt, for an executor's reactor; see
    /// [`QueuePair::eventfd`].
    pub fn eventfd(&self) -> Option<OwnedFd> {
        let inner = self.0.borrow();
        inner.queue.eventfd()?.try_clone_to_owned().ok()
    }

    /// Returns the number of outstanding requests.
    pub fn in_flight(&self) -> usize {
        self.0.borrow().queue.in_flight()
    }

    /// Polls the queue and a future in turn until the future is ready: a minimal executor.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let mut future = std::pin::pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            self.drive();
        }
    }
}

/// Future of an outstanding request; its output is the request's completion.
#[must_use = "the result of the request would be lost"]
#[derive(Debug)]
pub struct Pending {
    queue: AsyncQueue,
    token: u64,
}

impl Future for Pending {
    type Output = Completion;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Completion> {
        let mut inner = self.queue.0.borrow_mut();
        match inner.requests.remove(&self.token) {
            Some(State::Done(completion)) => Poll::Ready(completion),
            _ => {
                let waker = Some(context.waker().clone());
                inner.requests.insert(self.token, State::Waiting(waker));
                Poll::Pending
            }
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut inner = self.queue.0.borrow_mut();
        if let Some(State::Waiting(_)) = inner.requests.remove(&self.token) {
            inner.requests.insert(self.token, State::Abandoned);
        }
    }
}
