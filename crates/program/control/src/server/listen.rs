//! The answer to a listener: events as they happen (server-sent events, HTML Living Standard 9.2).

use super::clock::{Clock, Complete};
use crate::api::Event;
use crate::events::{EventReceiver, Received};
use bytes::Bytes;
use hyper::body::{Body, Frame};
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Interval, MissedTickBehavior, interval};

/// Interval of empty lines on a stream without events. A failed send shows that the listener has
/// disconnected.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

type NextEvent = Pin<Box<dyn Future<Output = (Option<Received>, EventReceiver)>>>;

/// Body of an HTTP answer: known bytes, or a stream of events.
pub(super) enum AnswerBody {
    /// Body that is known completely.
    Whole {
        bytes: Option<Bytes>,
        /// Marks the answer as complete when it is dropped with the body.
        _complete: Complete,
    },
    /// Stream of events without an end.
    Events(Box<Listener>),
}

/// Stream of events for one client that listens.
pub(super) struct Listener {
    next: NextEvent,
    alive: Interval,
    _permit: OwnedSemaphorePermit,
}

impl AnswerBody {
    pub(super) fn whole(text: impl Into<Bytes>, clock: &Rc<Clock>) -> Self {
        let text = text.into();
        Self::Whole {
            bytes: (!text.is_empty()).then_some(text),
            _complete: Complete(clock.clone()),
        }
    }

    pub(super) fn events(receiver: EventReceiver, permit: OwnedSemaphorePermit) -> Self {
        let mut alive = interval(SIGN_OF_LIFE);
        alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self::Events(Box::new(Listener {
            next: next(receiver),
            alive,
            _permit: permit,
        }))
    }
}

fn next(mut receiver: EventReceiver) -> NextEvent {
    Box::pin(async move { (receiver.next().await, receiver) })
}

/// Returns an event in the form in which it is sent to clients.
fn written(event: &Event) -> String {
    // JSON escapes control characters in strings, so the text contains no line feed.
    let data = serde_json::to_string(event).unwrap_or_default();
    format!(
        "id: {}\nevent: {}\ndata: {data}\n\n",
        event.sequence,
        event.kind.name()
    )
}

impl Listener {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if let Poll::Ready((received, receiver)) = self.next.as_mut().poll(cx) {
            self.next = next(receiver);
            return Poll::Ready(received.map(|received| match received {
                Received::Event(event) => written(&event).into(),
                Received::Lost(lost) => {
                    format!("event: lost\ndata: {{\"lost\":{lost}}}\n\n").into()
                }
            }));
        }
        // The first tick is at once: the listener knows that it listens.
        self.alive
            .poll_tick(cx)
            .map(|_| Some(Bytes::from_static(b": \n\n")))
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let data = match &mut *self {
            Self::Whole { bytes, .. } => Poll::Ready(bytes.take()),
            Self::Events(listener) => listener.poll(cx),
        };
        data.map(|data| data.map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole { bytes: None, .. })
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Whole { bytes, .. } => {
                let len = bytes.as_ref().map_or(0, Bytes::len);
                hyper::body::SizeHint::with_exact(len as u64)
            }
            Self::Events(_) => hyper::body::SizeHint::default(),
        }
    }
}
