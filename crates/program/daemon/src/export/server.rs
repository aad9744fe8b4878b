//! Threads of an export: one that accepts clients, and one for each client.

use super::pump::PumpLink;
use super::storage::VolumeStorage;
use anyhow::{Context, Result};
use nbd_protocol::server::{ExportInfo, MAX_REQUEST, ServeError, negotiate, transmit};
use probes::LogLimit;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use vfio_user::Listener;
use volume::Info;

/// Maximum number of clients that are connected to an export at a time.
const MAX_CLIENTS: usize = 8;
/// Maximum number of refused clients whose sockets are being closed at a time.
const MAX_REFUSED: usize = 8;
/// Maximum duration of a client's handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a client could not be accepted or was refused.
const PAUSE: Duration = Duration::from_millis(100);
/// Maximum time to wait for the end of exports and their outstanding requests.
pub const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Description of an export.
#[derive(Clone)]
pub struct Exported {
    /// Name of the disk, and of the export.
    pub name: String,
    /// Whether clients may change the volume.
    pub writable: bool,
}

impl Exported {
    /// Returns the properties that a new client sees.
    fn info(&self, info: &Info) -> ExportInfo {
        let block_size = info.block_size.max(1);
        let optimal = info.optimal_io.clamp(4096, MAX_REQUEST);
        ExportInfo {
            name: self.name.clone(),
            description: format!("disk {} of vnvme", self.name),
            size: info.size,
            block_size,
            preferred: optimal.next_power_of_two().max(block_size),
            read_only: !self.writable || info.read_only,
        }
    }
}

/// Connected clients.
#[derive(Default)]
struct Clients {
    /// Sockets of the clients, which their threads close: a `close` may block as long as a client
    /// likes, because of descriptors that it has sent.
    sockets: Mutex<Vec<Weak<UnixStream>>>,
    /// Counted reference of each client, which it drops after its socket.
    connected: Arc<()>,
    /// Counted reference of each refused client, which it drops after its socket.
    refused: Arc<()>,
}

impl Clients {
    /// Returns the number of connected clients.
    fn connected(&self) -> usize {
        Arc::strong_count(&self.connected) - 1
    }

    /// Adds a client, unless there are too many. Called by one thread only.
    fn add(&self, socket: &Arc<UnixStream>) -> Option<Arc<()>> {
        let mut sockets = self.sockets.lock().unpoisoned();
        sockets.retain(|other| other.strong_count() > 0);
        if self.connected() >= MAX_CLIENTS {
            return None;
        }
        sockets.push(Arc::downgrade(socket));
        Some(self.connected.clone())
    }

    /// Returns whether refused clients keep their sockets from being closed.
    fn is_crowded(&self) -> bool {
        Arc::strong_count(&self.refused) > MAX_REFUSED
    }

    fn refuse(&self, socket: Arc<UnixStream>) {
        let _ = shutdown(&*socket, Shutdown::Both);
        // Fields of a tuple are dropped in order.
        sync::discard((socket, self.refused.clone()));
    }

    fn disconnect(&self) {
        let sockets = self.sockets.lock().unpoisoned();
        for socket in sockets.iter().filter_map(Weak::upgrade) {
            let _ = shutdown(&*socket, Shutdown::Both);
            // This may be the last reference by now.
            sync::discard(socket);
        }
    }
}

/// Server of an export. Dropping it disconnects the clients and removes the socket.
pub struct ExportServer {
    stop: Arc<OwnedFd>,
    clients: Arc<Clients>,
    link: Arc<PumpLink>,
    /// Disconnected when the socket is removed.
    removed: Receiver<Infallible>,
    /// Disconnected when the pump has ended.
    end: Receiver<Infallible>,
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
        let backlog = listener.as_fd().try_clone_to_owned();
        let backlog = backlog.context("the listening socket")?;
        let (removes, removed) = mpsc::channel();
        let server = Self {
            stop: stop.clone(),
            clients: Arc::default(),
            link: link.clone(),
            removed,
            end,
        };
        let span = tracing::error_span!("export", disk = exported.name);
        let accepting = Accepting {
            exported,
            link,
            clients: server.clients.clone(),
            span,
            log: Arc::default(),
            listener,
            _removes: removes,
            _backlog: backlog,
        };
        let builder = std::thread::Builder::new().name("export".into());
        let thread = builder.spawn(move || accepting.run(&stop));
        // Not joined: it may hang when it closes the sockets of waiting clients.
        thread.context("thread \"export\"")?;
        Ok(server)
    }

    /// Begins to end the export: no further request is executed.
    pub fn close(&self) {
        self.link.close();
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
    }

    /// Waits until the socket of a closed export is removed, and disconnects the clients.
    pub fn disconnect(&self, until: Instant) {
        let limit = until.saturating_duration_since(Instant::now());
        let _ = self.removed.recv_timeout(limit);
        self.clients.disconnect();
    }

    /// Waits for the end of a closed export's outstanding requests. Returns whether they have
    /// ended.
    pub fn wait_end(&self, until: Instant) -> bool {
        let limit = until.saturating_duration_since(Instant::now());
        // The pump sends nothing: it disconnects when it ends, or hangs with its volume.
        self.end.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected)
    }

    /// Returns the number of connected clients.
    pub fn clients(&self) -> usize {
        self.clients.connected()
    }

    /// Returns whether the worker of the export has ended it.
    pub fn has_ended(&self) -> bool {
        self.wait_end(Instant::now())
    }
}

impl Drop for ExportServer {
    fn drop(&mut self) {
        self.close();
        self.disconnect(Instant::now() + END_TIMEOUT);
    }
}

/// Thread that accepts the clients of an export. It closes no socket of a client while the export
/// is served or others wait for its end.
struct Accepting {
    exported: Exported,
    link: Arc<PumpLink>,
    clients: Arc<Clients>,
    span: tracing::Span,
    log: Arc<LogLimit>,
    /// The socket's file is removed when this is dropped, before the next fields.
    listener: Listener,
    _removes: mpsc::Sender<Infallible>,
    /// Duplicate of the listening socket: the last to close it also closes the clients that wait to
    /// be accepted.
    _backlog: OwnedFd,
}

impl Accepting {
    fn run(self, stop: &OwnedFd) {
        let _entered = self.span.clone().entered();
        loop {
            let is_crowded = self.clients.is_crowded();
            let wanted = if is_crowded {
                PollFlags::empty()
            } else {
                PollFlags::IN
            };
            let mut fds = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::from_borrowed_fd(self.listener.as_fd(), wanted),
            ];
            let pause = Timespec::try_from(PAUSE).ok();
            match poll(&mut fds, pause.as_ref().filter(|_| is_crowded)) {
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
        let Some(connected) = self.clients.add(&socket) else {
            self.clients.refuse(socket);
            anyhow::bail!("refused a client: {MAX_CLIENTS} are connected");
        };
        let client = Client {
            exported: self.exported.clone(),
            link: self.link.clone(),
            socket,
            _connected: connected,
        };
        let (span, log) = (self.span.clone(), self.log.clone());
        let (give, given) = mpsc::channel::<Client>();
        let builder = std::thread::Builder::new().name("nbd".into());
        let thread = builder.spawn(move || {
            let Ok(client) = given.recv() else {
                return;
            };
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
        if let Err(mpsc::SendError(client)) = give.send(client) {
            sync::discard(client);
        }
        thread?;
        Ok(())
    }
}

/// Client of an export, on its own thread.
struct Client {
    exported: Exported,
    link: Arc<PumpLink>,
    /// Dropped before the place that it takes among the clients.
    socket: Arc<UnixStream>,
    _connected: Arc<()>,
}

impl Client {
    fn serve(&self) -> Result<(), ServeError> {
        let Some(volume) = self.link.volume() else {
            return Ok(());
        };
        let info = self.exported.info(&volume.info());
        // A client may keep this thread as long as it likes.
        drop(volume);
        let mut handshake = Handshake {
            socket: &self.socket,
            deadline: Instant::now() + HANDSHAKE_TIMEOUT,
        };
        let Some(negotiated) = negotiate(&mut handshake, &info)? else {
            return Ok(());
        };
        self.socket.set_read_timeout(None)?;
        self.socket.set_write_timeout(None)?;
        let mut storage = VolumeStorage::new(self.link.clone());
        transmit(&mut &*self.socket, &info, negotiated, &mut storage)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = shutdown(&*self.socket, Shutdown::Both);
    }
}

/// Stream of a client's handshake, all of whose messages have one deadline.
struct Handshake<'a> {
    socket: &'a UnixStream,
    deadline: Instant,
}

impl Handshake<'_> {
    fn time_left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Some(left))
    }
}

impl Read for Handshake<'_> {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(self.time_left()?)?;
        self.socket.read(data)
    }
}

impl Write for Handshake<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.time_left()?)?;
        self.socket.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volume::{MemVolume, Volume};

    #[test]
    fn preferred_size_is_power_of_two_within_maximum() {
        let exported = Exported {
            name: "vm0".into(),
            writable: false,
        };
        let mut info = MemVolume::new(1 << 20).unwrap().info();
        for (optimal, preferred) in [(0, 4096), (192 << 10, 256 << 10), (1 << 30, 32 << 20)] {
            info.optimal_io = optimal;
            assert_eq!(exported.info(&info).preferred, preferred);
        }
    }
}
