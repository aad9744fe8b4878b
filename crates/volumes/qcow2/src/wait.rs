//! Primitives for tasks on several workers that wait for each other. No lock of this module is held
//! while waiting for a file, except where a comment says so.

use crate::store::Store;
use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;
use std::sync::Mutex;
use std::task::{Context, Poll, Waker};
use sync::Unpoisoned;
use volume::{IoError, IoErrorKind};

/// Waits until `ready` returns a value. `ready` must store the waker where it will be woken. Ends
/// early when the request is cancelled.
pub(crate) async fn wait<T>(
    store: &impl Store,
    mut ready: impl FnMut(&mut Context<'_>) -> Poll<T>,
) -> Result<T, IoError> {
    poll_fn(|context| match ready(context) {
        Poll::Ready(value) => Poll::Ready(Ok(value)),
        Poll::Pending if store.is_cancelled() => Poll::Ready(Err(IoErrorKind::Aborted.into())),
        Poll::Pending => Poll::Pending,
    })
    .await
}

/// Lets the other tasks of the worker run once.
pub(crate) async fn pause() {
    let mut paused = false;
    poll_fn(|context| {
        if std::mem::replace(&mut paused, true) {
            Poll::Ready(())
        } else {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

/// Waits for two futures that run concurrently, and returns both results.
pub(crate) async fn both<A, B>(
    one: impl Future<Output = A>,
    two: impl Future<Output = B>,
) -> (A, B) {
    let (mut one, mut two) = (pin!(one), pin!(two));
    let (mut first, mut second) = (None, None);
    poll_fn(|context| {
        if first.is_none()
            && let Poll::Ready(value) = one.as_mut().poll(context)
        {
            first = Some(value);
        }
        if second.is_none()
            && let Poll::Ready(value) = two.as_mut().poll(context)
        {
            second = Some(value);
        }
        match (first.take(), second.take()) {
            (Some(first), Some(second)) => Poll::Ready((first, second)),
            (one, two) => {
                (first, second) = (one, two);
                Poll::Pending
            }
        }
    })
    .await
}

/// Locks on ranges of numbers (of guest clusters), which tasks wait for.
#[derive(Debug, Default)]
pub(crate) struct RangeLocks(Mutex<LockedRanges>);

#[derive(Debug, Default)]
struct LockedRanges {
    ranges: Vec<Range<u64>>,
    waiters: Vec<Waker>,
}

/// Locked range of numbers, which is unlocked when this guard is dropped.
#[derive(Debug)]
#[must_use = "dropping it releases the range"]
pub(crate) struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    range: Range<u64>,
}

impl RangeLocks {
    /// Locks a range, once no other task holds any of its numbers.
    pub(crate) async fn lock(
        &self,
        store: &impl Store,
        range: Range<u64>,
    ) -> Result<RangeGuard<'_>, IoError> {
        wait(store, |context| {
            let mut held = self.0.lock().unpoisoned();
            let overlaps = |one: &Range<u64>| one.start < range.end && range.start < one.end;
            if held.ranges.iter().any(overlaps) {
                held.waiters.push(context.waker().clone());
                return Poll::Pending;
            }
            held.ranges.push(range.clone());
            Poll::Ready(())
        })
        .await?;
        Ok(RangeGuard { locks: self, range })
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut held = self.locks.0.lock().unpoisoned();
        if let Some(at) = held.ranges.iter().position(|range| *range == self.range) {
            held.ranges.swap_remove(at);
        }
        held.waiters.drain(..).for_each(Waker::wake);
    }
}
