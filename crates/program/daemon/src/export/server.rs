//! Threads of an export: one that accepts clients, and one for each client.

use super::pump::PumpLink;
use super::storage::VolumeStorage;
use anyhow::{Context, Result};
use nbd_protocol::server::{ExportInfo, ServeError, negotiate, transmit};
use probes::LogLimit;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use std::convert::Infallible;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use vfio_user::Listener;
use volume::Volume;

/// Maximum number of clients that are connected to an export at a time.
const MAX_CLIENTS: usize = 8;
/// Maximum time between two messages of a client's handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a client could not be accepted or was refused.
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum time to wait for the end of an export's clients and outstanding requests.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Description of an export.
#[derive(Clone)]
pub struct Exported {
    /// Name of the disk, and of the export.
    pub name: String,
    pub volume: Arc<dyn Volume>,
    /// Whether clients may change the volume.
    pub writable: bool,
}

impl Exported {
    /// Returns the properties that a new client sees.
    fn info(&self) -> ExportInfo {
        let info = self.volume.info();
        ExportInfo {
            name: self.name.clone(),
            description: format!("disk {} of vnvme", self.name),
            size: info.size,
            block_size: info.block_size.max(1),
            preferred: info.optimal_io.max(4096),
            read_only: !self.writable || info.read_only,
        }
    }
}

/// Sockets of connected clients.
#[derive(Default)]
struct Clients {
    sockets: Mutex<Vec<Arc<UnixStream>>>,
    left: Condvar,
}

impl Clients {
    /// Adds a client, unless there are too many.
    fn add(&self, socket: &Arc<UnixStream>) -> bool {
        let mut sockets = self.sockets.lock().unpoisoned();
        let has_room = sockets.len() < MAX_CLIENTS;
        if has_room {
            sockets.push(socket.clone());
        }
        has_room
    }

    fn remove(&self, socket: &Arc<UnixStream>) {
        let mut sockets = self.sockets.lock().unpoisoned();
        sockets.retain(|other| !Arc::ptr_eq(other, socket));
        self.left.notify_all();
    }

    fn disconnect(&self) {
        for socket in self.sockets.lock().unpoisoned().iter() {
            let _ = shutdown(&**socket, Shutdown::Both);
        }
    }

    /// Waits for the threads of disconnected clients for a limited time.
    fn wait_gone(&self) {
        let sockets = self.sockets.lock().unpoisoned();
        let waited = self
            .left
            .wait_timeout_while(sockets, END_TIMEOUT, |sockets| !sockets.is_empty());
        drop(waited);
    }
}

/// Server of an export. Dropping it disconnects the clients and removes the socket.
pub struct ExportServer {
    stop: Arc<OwnedFd>,
    clients: Arc<Clients>,
    link: Arc<PumpLink>,
    /// Disconnected when the pump has ended.
    end: Receiver<Infallible>,
    thread: Option<JoinHandle<()>>,
}

impl ExportServer {
    /// Begins to serve an export at a listening socket.
    ///
    /// # Errors
    /// There is no thread or descriptor to be had.
    pub fn start(
        exported: Exported,
        listener: Listener,
        link: Arc<PumpLink>,
        end: Receiver<Infallible>,
    ) -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(eventfd(0, flags).context("eventfd")?);
        let mut server = Self {
            stop: stop.clone(),
            clients: Arc::default(),
            link: link.clone(),
            end,
            thread: None,
        };
        let clients = server.clients.clone();
        let span = tracing::error_span!("export", disk = exported.name);
        let accepting = Accepting {
            exported,
            listener,
            link,
            clients,
            span,
            log: Arc::default(),
        };
        let builder = std::thread::Builder::new().name("export".into());
        let thread = builder.spawn(move || accepting.run(&stop));
        server.thread = Some(thread.context("thread \"export\"")?);
        Ok(server)
    }

    /// Removes the socket and disconnects the clients, without waiting for outstanding requests.
    pub fn close(&mut self) {
        self.link.close();
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // The thread only waits for the eventfd and for clients, and removes the socket.
            let _ = thread.join();
        }
        self.clients.disconnect();
    }

    /// Returns the number of connected clients.
    pub fn clients(&self) -> usize {
        self.clients.sockets.lock().unpoisoned().len()
    }

    /// Returns whether the worker of the export has ended it.
    pub fn has_ended(&self) -> bool {
        matches!(
            self.end.recv_timeout(Duration::ZERO),
            Err(RecvTimeoutError::Disconnected)
        )
    }
}

impl Drop for ExportServer {
    fn drop(&mut self) {
        self.close();
        self.clients.wait_gone();
        // The pump sends nothing: it disconnects when it ends, or hangs with its volume.
        if let Err(RecvTimeoutError::Timeout) = self.end.recv_timeout(END_TIMEOUT) {
            tracing::warn!("the volume of an export that has ended is still in use");
        }
    }
}

/// Thread that accepts the clients of an export.
struct Accepting {
    exported: Exported,
    listener: Listener,
    link: Arc<PumpLink>,
    clients: Arc<Clients>,
    span: tracing::Span,
    log: Arc<LogLimit>,
}

impl Accepting {
    fn run(self, stop: &OwnedFd) {
        let _entered = self.span.clone().entered();
        loop {
            let mut fds = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => {
                    self.log
                        .line(|left_out| tracing::error!(%error, left_out, "export"));
                    std::thread::sleep(PAUSE);
                    continue;
                }
            }
            let [stops, client] = fds.map(|fd| !fd.revents().is_empty());
            if stops {
                return;
            }
            if client && let Err(error) = self.accept() {
                self.log
                    .line(|left_out| tracing::warn!(%error, left_out, "no client can connect"));
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn accept(&self) -> Result<()> {
        let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(socket) => Arc::new(UnixStream::from(socket)),
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        anyhow::ensure!(
            self.clients.add(&socket),
            "refused a client: {MAX_CLIENTS} are connected"
        );
        let client = Client {
            exported: self.exported.clone(),
            link: self.link.clone(),
            socket: socket.clone(),
            clients: self.clients.clone(),
        };
        let (span, log) = (self.span.clone(), self.log.clone());
        let builder = std::thread::Builder::new().name("nbd".into());
        let thread = builder.spawn(move || {
            let _entered = span.entered();
            let began = Instant::now();
            match client.serve() {
                Ok(()) => {}
                // A client that disconnects without a farewell needs no message.
                Err(ServeError::Io(error)) => tracing::debug!(%error, "client disconnected"),
                Err(error) => log.line(|left_out| {
                    let seconds = began.elapsed().as_secs();
                    tracing::warn!(%error, seconds, left_out, "client disconnected");
                }),
            }
        });
        if let Err(error) = thread {
            self.clients.remove(&socket);
            return Err(error.into());
        }
        Ok(())
    }
}

/// Client of an export, on its own thread.
struct Client {
    exported: Exported,
    link: Arc<PumpLink>,
    socket: Arc<UnixStream>,
    clients: Arc<Clients>,
}

impl Client {
    fn serve(&self) -> Result<(), ServeError> {
        let mut stream = &*self.socket;
        let info = self.exported.info();
        stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
        let Some(negotiated) = negotiate(&mut stream, &info)? else {
            return Ok(());
        };
        stream.set_read_timeout(None)?;
        let volume = self.exported.volume.clone();
        let mut storage = VolumeStorage::new(volume, self.link.clone());
        transmit(&mut stream, &info, negotiated, &mut storage)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = shutdown(&*self.socket, Shutdown::Both);
        self.clients.remove(&self.socket);
    }
}
