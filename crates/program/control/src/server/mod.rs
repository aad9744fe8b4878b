//! The server: HTTP/1.1 on Unix sockets, by hyper, in one thread of its own.
//!
//! The thread serves all its clients concurrently and waits for none of them. Calls of the daemon
//! may block, and run on a bounded number of further threads. An untrusted client costs at most the
//! following, whatever it does:
//!
//! | what | bound |
//! |---|---|
//! | clients of a socket at a time | [`MAX_CLIENTS`]; of too many an idle one is dropped, else the slowest |
//! | clients, and requests, of a socket in a second | [`Endpoint::rate`] each; more wait |
//! | a request, and taking the answer | [`REQUEST_TIME`] each |
//! | line and headers, their number | [`HEAD_MAX`] bytes, [`MAX_HEADERS`] |
//! | body | [`BODY_MAX`] bytes |
//! | listeners to events | [`MAX_LISTENERS`]; one that takes nothing for [`REQUEST_TIME`] is dropped |
//! | requests that the daemon works for | [`MAX_QUESTIONS`] and [`MAX_CHANGES`] |
//!
//! Descriptors that clients send are left in their sockets (crate `receive`): such a client is
//! dropped, and the receiver process closes what it has sent.

mod accept;
mod answer;
mod calls;
mod clock;
mod listen;
mod openapi;
mod pace;
mod route;
mod stream;

use crate::daemon::Daemon;
use accept::Acceptor;
use answer::RequestSlots;
use receive::Intake;
use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::LocalSet;

/// Maximum number of clients that are connected to one socket.
pub const MAX_CLIENTS: usize = 64;
/// Maximum number of clients of a socket that listen to events.
pub const MAX_LISTENERS: usize = 16;
/// Time limit for a client to send its request, and again to read the answer.
pub const REQUEST_TIME: Duration = Duration::from_secs(2);
/// Time limit of a connection on which the client sends no request.
pub const IDLE_TIME: Duration = Duration::from_secs(30);
/// Maximum length in bytes of a request line with its headers.
pub const HEAD_MAX: usize = 16 << 10;
/// Maximum number of headers of a request.
pub const MAX_HEADERS: usize = 64;
/// Maximum length in bytes of a request's body, enough for a configuration of some thousand disks.
pub const BODY_MAX: usize = 1 << 20;
/// Maximum number of requests without changes that the daemon executes at a time; more wait.
pub const MAX_QUESTIONS: usize = 4;
/// Maximum number of requests with changes that the daemon executes at a time; more are refused.
pub const MAX_CHANGES: usize = 8;

/// Maximum time that the end of the server waits for its thread.
const END_LIMIT: Duration = Duration::from_secs(1);

/// Requests that the clients of a socket are permitted to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// All requests.
    Full,
    /// Requests that change nothing.
    ReadOnly,
}

/// A listening socket, non-blocking. Its file, if it has one, is removed when it is dropped.
pub trait Listening: AsFd + Send + 'static {}

impl<T: AsFd + Send + 'static> Listening for T {}

/// Socket on which the management API is served.
pub struct Endpoint {
    /// The listening socket. The field precedes `intake`, which must be dropped after it: the last
    /// to close a listening socket also closes clients that wait to be accepted.
    pub listener: Box<dyn Listening>,
    /// Connection to the receiver process, which receives descriptors that clients send.
    pub intake: Intake,
    /// Requests that the socket's clients are permitted to send.
    pub access: Access,
    /// Maximum rate of connections, and of requests of all clients, per second.
    pub rate: u32,
}

/// Server of the management API before it is started. Clients that connect wait.
pub struct Server {
    runtime: Runtime,
    endpoints: Vec<Endpoint>,
}

/// A server that runs; it ends, and its sockets are closed, when this is dropped.
pub struct RunningServer {
    /// Sender that ends the server when it is dropped.
    stop: Option<oneshot::Sender<()>>,
    /// Receiver that is closed when the server's thread has ended.
    ended: mpsc::Receiver<()>,
}

impl Server {
    /// Serves on these sockets, as soon as it is started.
    ///
    /// # Errors
    /// There is no epoll set or eventfd to be had.
    pub fn new(endpoints: Vec<Endpoint>) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(MAX_QUESTIONS + MAX_CHANGES)
            .thread_name("control-call")
            .build()?;
        Ok(Self { runtime, endpoints })
    }

    /// Starts the thread that serves the API.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(self, daemon: Arc<dyn Daemon>) -> io::Result<RunningServer> {
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = mpsc::channel::<()>();
        let builder = std::thread::Builder::new().name("control".into());
        builder.spawn(move || {
            let Self { runtime, endpoints } = self;
            let local = LocalSet::new();
            local.block_on(&runtime, serve(endpoints, daemon, stopped));
            // Clients first: their sockets are the runtime's to watch.
            drop(local);
            // A call of the daemon's may hang: it is not waited for.
            runtime.shutdown_background();
            drop(end);
        })?;
        Ok(RunningServer {
            stop: Some(stop),
            ended,
        })
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        // Without it a socket's file stays, and the next server replaces it.
        let _ = self.ended.recv_timeout(END_LIMIT);
    }
}

async fn serve(endpoints: Vec<Endpoint>, daemon: Arc<dyn Daemon>, stopped: oneshot::Receiver<()>) {
    let limits = Rc::new(RequestSlots::new());
    let mut tasks = tokio::task::JoinSet::new();
    for endpoint in endpoints {
        match Acceptor::new(endpoint, daemon.clone(), limits.clone()) {
            Ok(acceptor) => {
                tasks.spawn_local(acceptor.run());
            }
            Err(error) => tracing::error!(%error, "control socket"),
        }
    }
    // An error means that the sender was dropped, which also means the end.
    let _ = stopped.await;
    tasks.shutdown().await;
}
