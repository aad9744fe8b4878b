//! From a request to its answer.

use super::clock::{Clock, Phase};
use super::listen::AnswerBody;
use super::pace::Pace;
use super::route::{Access as Wants, Arguments, Reply, Route, Run, find};
use super::{Access, BODY_MAX, MAX_CHANGES, MAX_LISTENERS, MAX_QUESTIONS};
use crate::api::ErrorBody;
use crate::daemon::Daemon;
use crate::error::{Error, ErrorKind};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use std::convert::Infallible;
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, sleep_until};

/// Content security policy for browsers: the page loads nothing from elsewhere.
const CONTENT_POLICY: &str = "default-src 'self' 'unsafe-inline' data:; frame-ancestors 'none'";

/// Limits of the number of requests in progress, for all sockets together.
pub(super) struct RequestSlots {
    questions: Arc<Semaphore>,
    changes: Arc<Semaphore>,
}

impl RequestSlots {
    pub(super) fn new() -> Self {
        Self {
            questions: Arc::new(Semaphore::new(MAX_QUESTIONS)),
            changes: Arc::new(Semaphore::new(MAX_CHANGES)),
        }
    }
}

/// State of a socket that its clients' requests share.
pub(super) struct ServerState {
    daemon: Arc<dyn Daemon>,
    limits: Rc<RequestSlots>,
    access: Access,
    listeners: Arc<Semaphore>,
    /// Queue of requests, which pass one by one, in turn. A client that disconnects leaves the
    /// queue.
    pace: Mutex<Pace>,
}

impl ServerState {
    pub(super) fn new(
        daemon: Arc<dyn Daemon>,
        limits: Rc<RequestSlots>,
        access: Access,
        rate: u32,
    ) -> Self {
        Self {
            daemon,
            limits,
            access,
            listeners: Arc::new(Semaphore::new(MAX_LISTENERS)),
            pace: Mutex::new(Pace::new(rate)),
        }
    }

    /// Waits until the request rate permits another request.
    async fn wait_turn(&self) {
        let mut pace = self.pace.lock().await;
        let now = Instant::now();
        let next = Instant::from(pace.next(now.into()));
        if next > now {
            sleep_until(next).await;
        }
        pace.take(next.into());
    }
}

/// Request that is refused, with the HTTP status and message.
struct RefusedRequest {
    status: StatusCode,
    message: String,
    /// HTTP methods that the resource supports, for a refused method.
    allow: Option<String>,
}

impl RefusedRequest {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            allow: None,
        }
    }
}

impl From<Error> for RefusedRequest {
    fn from(error: Error) -> Self {
        let status = match error.kind {
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
            ErrorKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
            ErrorKind::Busy => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self::new(status, error.message)
    }
}

/// Answers an HTTP request. `clock` decides when a slow client is disconnected.
pub(super) async fn answer(
    shared: Rc<ServerState>,
    clock: Rc<Clock>,
    request: Request<Incoming>,
) -> Result<Response<AnswerBody>, Infallible> {
    clock.enter(Phase::Waiting);
    shared.wait_turn().await;
    let answer = respond(&shared, &clock, request).await;
    if clock.phase() != Phase::Listening {
        clock.enter(Phase::Answering);
    }
    let mut response = answer.unwrap_or_else(|refused| {
        let RefusedRequest {
            status,
            message,
            allow,
        } = refused;
        let body = serde_json::to_vec(&ErrorBody { error: message }).unwrap_or_default();
        let reply = Reply {
            status,
            content_type: "application/json",
            body,
        };
        let mut response = whole(reply, &clock);
        let allow = allow.and_then(|methods| HeaderValue::try_from(methods).ok());
        if let Some(allow) = allow {
            response.headers_mut().insert(header::ALLOW, allow);
        }
        response
    });
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let policy = HeaderValue::from_static(CONTENT_POLICY);
    headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    let options = HeaderValue::from_static("nosniff");
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, options);
    Ok(response)
}

fn whole(reply: Reply, clock: &Rc<Clock>) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::whole(reply.body, clock));
    *response.status_mut() = reply.status;
    let kind = HeaderValue::from_static(reply.content_type);
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

async fn respond(
    shared: &ServerState,
    clock: &Rc<Clock>,
    request: Request<Incoming>,
) -> Result<Response<AnswerBody>, RefusedRequest> {
    let (head, body) = request.into_parts();
    let is_head = head.method == Method::HEAD;
    let method = if is_head { "GET" } else { head.method.as_str() };
    let (route, mut arguments) = find(method, &head.uri).map_err(|missing| {
        let mut refused = RefusedRequest::from(missing.error);
        if let Some(methods) = missing.allow {
            refused.status = StatusCode::METHOD_NOT_ALLOWED;
            refused.allow = Some(methods);
        }
        refused
    })?;
    if route.access == Wants::Change && shared.access == Access::ReadOnly {
        let message = "this socket is read-only: send changes to the control socket";
        return Err(RefusedRequest::new(StatusCode::FORBIDDEN, message));
    }
    if route.body {
        clock.enter(Phase::Asking);
        arguments.body = whole_body(body).await?;
        clock.enter(Phase::Waiting);
    }
    match route.run {
        Run::Events if is_head => Ok(events(AnswerBody::whole("", clock))),
        Run::Events => {
            let permit = shared.listeners.clone().try_acquire_owned();
            let permit = permit.map_err(|_| {
                let message = format!(
                    "{MAX_LISTENERS} clients already listen to events, the \
                                       maximum"
                );
                RefusedRequest::new(StatusCode::SERVICE_UNAVAILABLE, message)
            })?;
            let daemon = shared.daemon.clone();
            let question = shared.limits.questions.clone().acquire_owned().await;
            let begin = tokio::task::spawn_blocking(move || {
                let receiver = daemon.events();
                drop(question);
                receiver
            });
            let receiver = begin.await.map_err(|_| bug())?;
            clock.enter(Phase::Listening);
            Ok(events(AnswerBody::events(receiver, permit)))
        }
        Run::Call(call) => {
            let reply = work(shared, route, call, arguments).await?;
            Ok(whole(reply, clock))
        }
    }
}

fn events(body: AnswerBody) -> Response<AnswerBody> {
    let mut response = Response::new(body);
    let kind = HeaderValue::from_static("text/event-stream");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// Reads the whole body of an HTTP request, up to the maximum length.
async fn whole_body(mut body: Incoming) -> Result<Vec<u8>, RefusedRequest> {
    let too_large = || {
        let message = format!("the request is longer than {BODY_MAX} bytes");
        RefusedRequest::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    if body.size_hint().lower() > BODY_MAX as u64 {
        return Err(too_large());
    }
    // The body is one buffer and not a list of frames: a client that sends small chunks would
    // occupy a piece of memory for each of them, and leave the memory fragmented.
    let mut whole = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame
            .map_err(|error| RefusedRequest::new(StatusCode::BAD_REQUEST, error.to_string()))?;
        // Trailers are ignored.
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if whole.len() + data.len() > BODY_MAX {
            return Err(too_large());
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole)
}

/// Returns the answer for a request during which the daemon has panicked.
fn bug() -> RefusedRequest {
    let message = "the request failed by a bug of vnvme: see its log";
    RefusedRequest::new(StatusCode::INTERNAL_SERVER_ERROR, message)
}

/// Runs the handler of a request on a thread of its own, because it may block.
async fn work(
    shared: &ServerState,
    route: &'static Route,
    call: fn(&dyn Daemon, &Arguments) -> Result<Reply, Error>,
    arguments: Arguments,
) -> Result<Reply, RefusedRequest> {
    let busy = || {
        let message = format!("{MAX_CHANGES} changes are in progress: retry later");
        RefusedRequest::new(StatusCode::SERVICE_UNAVAILABLE, message)
    };
    let limits = &shared.limits;
    let permit = match route.access {
        Wants::Question => limits.questions.clone().acquire_owned().await.ok(),
        Wants::Change => limits.changes.clone().try_acquire_owned().ok(),
    };
    let permit = permit.ok_or_else(busy)?;
    let daemon = shared.daemon.clone();
    let task = tokio::task::spawn_blocking(move || {
        let reply = call(&*daemon, &arguments);
        // The permit is also dropped if the client has disconnected meanwhile.
        drop(permit);
        reply
    });
    match task.await {
        Ok(reply) => Ok(reply?),
        Err(_) => Err(bug()),
    }
}
