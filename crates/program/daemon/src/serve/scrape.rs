//! `/metrics` on a TCP address, for clients that cannot reach the control socket. Only this path is
//! served, to any client that reaches the address.
//!
//! Each client has a thread of its own and a time limit. If all places are taken, another client
//! displaces one: a silent one before one that has sent its request, then one of the address with
//! the most clients, then the oldest.

use crate::confine::{Unconfined, tcp};
use crate::keep::{KeeperSession, ProcessSocket};
use crate::registry::Registry;
use anyhow::{Context, Result};
use probes::LogLimit;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, SocketFlags, acceptfrom_with, send, shutdown};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Maximum number of clients of the metrics address that are connected at a time.
const MAX_CLIENTS: usize = 8;
/// Maximum time in which a client sends its request and receives the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long it is waited for the end of a client's sending, after the answer.
const LINGER: Duration = Duration::from_secs(1);
/// Maximum length of an HTTP request in bytes.
const REQUEST_MAX: usize = 8192;
/// Pause after a client could not be accepted.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Pause after a client was displaced, so that a flood of connections costs little processor time.
const DISPLACED_PAUSE: Duration = Duration::from_millis(10);

/// Listening TCP socket for Prometheus.
pub struct MetricsListener {
    socket: TcpListener,
    stop: Arc<OwnedFd>,
}

/// Ends the thread that answers when it is dropped. Clients that are being answered are not waited
/// for.
pub struct MetricsServer(Arc<OwnedFd>);

impl Drop for MetricsServer {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

/// HTTP client that is being served.
struct Client {
    address: Option<IpAddr>,
    socket: OwnedFd,
    /// Whether the request of the client has arrived.
    has_asked: AtomicBool,
}

/// HTTP clients that are being served, oldest first.
#[derive(Clone, Default)]
struct Clients(Arc<Mutex<Vec<Arc<Client>>>>);

impl Clients {
    /// Adds a client. Returns whether another one was displaced.
    fn add(&self, client: &Arc<Client>) -> bool {
        let mut clients = self.0.lock().unpoisoned();
        let displaced = (clients.len() >= MAX_CLIENTS)
            .then(|| Self::weakest(&clients))
            .flatten();
        if let Some(index) = displaced {
            // The thread of the client notices and ends.
            let _ = shutdown(&clients.remove(index).socket, Shutdown::Both);
        }
        clients.push(client.clone());
        displaced.is_some()
    }

    /// Returns the index of the client that is disconnected first to make room for another.
    fn weakest(clients: &[Arc<Client>]) -> Option<usize> {
        let from = |address| {
            clients
                .iter()
                .filter(|client| client.address == address)
                .count()
        };
        let rank = |client: &Client| {
            let is_silent = !client.has_asked.load(Ordering::Relaxed);
            (is_silent, from(client.address))
        };
        let oldest_last = clients.iter().enumerate().rev();
        oldest_last
            .max_by_key(|(_, client)| rank(client))
            .map(|(index, _)| index)
    }

    fn remove(&self, client: &Arc<Client>) {
        let mut clients = self.0.lock().unpoisoned();
        clients.retain(|other| !Arc::ptr_eq(other, client));
    }
}

impl MetricsListener {
    /// Opens the listening socket at `address`.
    pub fn bind(
        _outside: &Unconfined,
        address: SocketAddr,
        keeper: &KeeperSession,
    ) -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let socket = match ProcessSocket::Metrics.left_tcp(keeper, address) {
            Some(socket) => socket,
            None => {
                let socket = tcp::listen(address);
                let socket =
                    socket.with_context(|| format!("metrics: cannot listen on {address}"))?;
                ProcessSocket::Metrics.keep_tcp(keeper, &socket);
                socket
            }
        };
        socket.set_nonblocking(true).context("metrics")?;
        Ok(Self {
            socket,
            stop: Arc::new(eventfd(0, flags).context("eventfd")?),
        })
    }

    /// Returns the address of the listening socket, with the port that the kernel has chosen if it
    /// was 0.
    pub fn address(&self) -> Result<SocketAddr> {
        self.socket.local_addr().context("metrics")
    }

    /// Starts the thread that answers requests for metrics.
    pub fn start(self, registry: &Registry) -> Result<MetricsServer> {
        let address = self.address()?;
        let (registry, stop) = (registry.clone(), self.stop.clone());
        let builder = std::thread::Builder::new().name("metrics".into());
        let thread = builder.spawn(move || self.run(&registry));
        thread.context("thread \"metrics\"")?;
        tracing::info!(%address, "metrics are served to everybody who can connect there");
        Ok(MetricsServer(stop))
    }

    fn run(&self, registry: &Registry) {
        let (clients, log) = (Clients::default(), LogLimit::default());
        loop {
            match self.next() {
                Ok(NextClient::Stop) => return,
                Ok(NextClient::Nobody) => {}
                Ok(NextClient::Client(client)) => {
                    let client = Arc::new(client);
                    if clients.add(&client) {
                        std::thread::sleep(DISPLACED_PAUSE);
                    }
                    let (registry, mine, its) = (registry.clone(), clients.clone(), client.clone());
                    let builder = std::thread::Builder::new().name("scrape".into());
                    let thread = builder.spawn(move || {
                        // Errors of a client that has disconnected or was too slow need no message.
                        let _ = serve(&its, &registry).and_then(|()| close(&its.socket));
                        mine.remove(&its);
                    });
                    if thread.is_err() {
                        // Without a thread the client is disconnected.
                        clients.remove(&client);
                    }
                }
                Err(error) => {
                    log.line(|left_out| tracing::warn!(%error, left_out, "metrics"));
                    std::thread::sleep(RETRY_INTERVAL);
                }
            }
        }
    }

    fn next(&self) -> Result<NextClient, Errno> {
        let mut fds = [
            PollFd::new(&*self.stop, PollFlags::IN),
            PollFd::new(&self.socket, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(NextClient::Nobody),
            Err(error) => return Err(error),
        }
        let [stop, client] = fds.map(|fd| !fd.revents().is_empty());
        if stop {
            return Ok(NextClient::Stop);
        }
        if !client {
            return Ok(NextClient::Nobody);
        }
        match acceptfrom_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok((socket, peer)) => {
                let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                Ok(NextClient::Client(Client {
                    address: peer.map(|peer| peer.ip().to_canonical()),
                    socket,
                    has_asked: AtomicBool::new(false),
                }))
            }
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(NextClient::Nobody),
            Err(error) => Err(error),
        }
    }
}

enum NextClient {
    Stop,
    Nobody,
    Client(Client),
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()) as _,
    }
}

/// Waits until the client's socket is ready for `flags`, at most `until` that time.
fn wait(socket: &OwnedFd, flags: PollFlags, until: Instant) -> Result<(), Errno> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Errno::TIMEDOUT);
        }
        let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), flags)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Reads the HTTP request of a client, and answers it.
fn serve(client: &Client, registry: &Registry) -> Result<(), Errno> {
    let socket = &client.socket;
    let until = Instant::now() + CLIENT_TIMEOUT;
    let mut request = Vec::new();
    while !is_whole(&request) {
        if request.len() >= REQUEST_MAX {
            return write(
                socket,
                &answer("431 Request Header Fields Too Large", ""),
                until,
            );
        }
        wait(socket, PollFlags::IN, until)?;
        let mut bytes = [0; 1024];
        match rustix::io::read(socket, &mut bytes) {
            Ok(0) => return Ok(()),
            Ok(read) => request.extend(bytes.iter().take(read)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    client.has_asked.store(true, Ordering::Relaxed);
    let answer = match route(&request) {
        Ok(with_body) => {
            let text = registry.numbers().prometheus();
            let head = head("200 OK", metrics::CONTENT_TYPE, text.len());
            head + if with_body { &text } else { "" }
        }
        Err(status) => answer(status, status),
    };
    write(socket, &answer, until)
}

/// Ends the connection so that the client gets the whole answer: unread data from the client would
/// reset it.
fn close(socket: &OwnedFd) -> Result<(), Errno> {
    shutdown(socket, Shutdown::Write)?;
    let until = Instant::now() + LINGER;
    let mut left = REQUEST_MAX;
    while left > 0 {
        wait(socket, PollFlags::IN, until)?;
        match rustix::io::read(socket, &mut [0; 1024]) {
            Ok(0) => return Ok(()),
            Ok(read) => left = left.saturating_sub(read),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns whether the header of the HTTP request has arrived completely.
fn is_whole(request: &[u8]) -> bool {
    request.windows(4).any(|four| four == b"\r\n\r\n")
        || request.windows(2).any(|two| two == b"\n\n")
}

/// Whether the answer to a request has a body, or the status that refuses it.
fn route(request: &[u8]) -> Result<bool, &'static str> {
    let line = request.split(|byte| matches!(byte, b'\r' | b'\n')).next();
    let line = std::str::from_utf8(line.unwrap_or_default()).map_err(|_| "400 Bad Request")?;
    let [method, target, version] = *line.split(' ').collect::<Vec<_>>() else {
        return Err("400 Bad Request");
    };
    if !version.starts_with("HTTP/1.") {
        return Err("400 Bad Request");
    }
    let path = target.split('?').next().unwrap_or_default();
    match (method, path) {
        ("GET", "/metrics") => Ok(true),
        ("HEAD", "/metrics") => Ok(false),
        (_, "/metrics") => Err("405 Method Not Allowed"),
        _ => Err("404 Not Found"),
    }
}

fn head(status: &str, kind: &str, len: usize) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len}\r\n\
         Connection: close\r\nX-Content-Type-Options: nosniff\r\n\r\n"
    )
}

fn answer(status: &str, text: &str) -> String {
    head(status, "text/plain; charset=utf-8", text.len()) + text
}

fn write(socket: &OwnedFd, text: &str, until: Instant) -> Result<(), Errno> {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        wait(socket, PollFlags::OUT, until)?;
        match send(socket, rest, SendFlags::NOSIGNAL) {
            Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn oldest_silent_client_of_address_with_most_is_displaced_first() {
        let client = |&(host, has_asked): &(u8, bool)| {
            let (socket, _) = UnixStream::pair().unwrap();
            Arc::new(Client {
                address: Some([127, 0, 0, host].into()),
                socket: socket.into(),
                has_asked: AtomicBool::new(has_asked),
            })
        };
        let weakest = |clients: &[(u8, bool)]| {
            let clients: Vec<Arc<Client>> = clients.iter().map(client).collect();
            Clients::weakest(&clients)
        };
        assert_eq!(weakest(&[(1, true), (1, true), (2, false)]), Some(2));
        assert_eq!(weakest(&[(1, false), (2, false), (2, false)]), Some(1));
        assert_eq!(weakest(&[(1, false), (2, false)]), Some(0));
        assert_eq!(weakest(&[(1, true), (2, true), (2, true)]), Some(1));
        assert_eq!(weakest(&[]), None);
    }

    #[test]
    fn scrape_answers_get_metrics_only() {
        for (line, found) in [
            ("GET /metrics HTTP/1.1", Ok(true)),
            ("GET /metrics?name[]=a HTTP/1.0", Ok(true)),
            ("HEAD /metrics HTTP/1.1", Ok(false)),
            ("POST /metrics HTTP/1.1", Err("405 Method Not Allowed")),
            ("GET / HTTP/1.1", Err("404 Not Found")),
            ("GET /v1/stats HTTP/1.1", Err("404 Not Found")),
            ("GET /metrics/../v1/disks HTTP/1.1", Err("404 Not Found")),
            ("GET  /metrics HTTP/1.1", Err("400 Bad Request")),
            ("GET /metrics", Err("400 Bad Request")),
            ("GET /metrics HTTP/2", Err("400 Bad Request")),
            ("\u{0}", Err("400 Bad Request")),
            ("", Err("400 Bad Request")),
        ] {
            let request = format!("{line}\r\nHost: a\r\n\r\n");
            assert_eq!(route(request.as_bytes()), found, "{line:?}");
        }
        assert_eq!(
            route(b"\xff\xfe / HTTP/1.1\r\n\r\n"),
            Err("400 Bad Request")
        );
    }
}
