//! An export of an NBD server as a [`Volume`].

use crate::connect::{ConnectError, Connected, Inbox, NbdServer, connect};
use crate::protocol::Export;
use crate::protocol::wire::export_flags as flags;
use crate::queue;
use probes::LogLimit;
use remote::{ConnectionGuard, ConnectionKeeper, ConnectionState, ReachWatch, Reachable};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sync::Unpoisoned;
use volume::{Extent, Info, Io, Kind, OpenQueue, Volume, VolumeError};

/// Time limit of one attempt to connect to the server, including the handshake.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Options for using an export of an NBD server as a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NbdOptions {
    /// Number of connections of each worker that uses the volume. More than one is used only if the
    /// server announces that its connections share their cache (`NBD_FLAG_CAN_MULTI_CONN`).
    pub connections: usize,
    /// A request that is not answered for so long ends its connection; it is sent again.
    pub timeout: Duration,
    /// Requests wait for a server that is lost for so long; then they fail until it is back.
    pub reconnect_delay: Duration,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Minimum block size of requests in bytes; `None` if it is not known.
    pub block_size: Option<u32>,
}

impl NbdOptions {
    /// Maximum number of connections that a worker makes to the server.
    pub const MAX_CONNECTIONS: usize = 16;
}

impl Default for NbdOptions {
    fn default() -> Self {
        Self {
            connections: 1,
            timeout: Duration::from_secs(30),
            reconnect_delay: Duration::from_secs(300),
            read_only: false,
            block_size: None,
        }
    }
}

/// State of an NBD volume, shared by its queues and connecting threads.
#[derive(Debug)]
pub(crate) struct SharedExport {
    pub(crate) server: NbdServer,
    /// Keeper that is informed of each connection, so that the next process can end it.
    keeper: Option<Arc<dyn ConnectionKeeper>>,
    addresses: Vec<SocketAddr>,
    pub(crate) options: NbdOptions,
    /// Properties of the export when the volume was opened, which later connections must have, too.
    pub(crate) export: Export,
    /// Current size of the export in bytes.
    size: AtomicU64,
    /// Size of the export in bytes that was last reported.
    told: AtomicU64,
    /// Connection by which the volume was opened, until the first queue uses it.
    first: Mutex<Option<Connected>>,
    queues: AtomicUsize,
    /// Whether the volume is closed, although threads that connect may still run.
    closed: AtomicBool,
    /// Number of connections that are down and that workers wait for.
    awaited: AtomicUsize,
    /// Number of connections that have ended so far.
    lost: AtomicU64,
    /// Whether requests fail because the server is unreachable, which was logged.
    overdue: AtomicBool,
    log: Log,
}

/// Rate limits of log lines that servers can cause as often as they want.
#[derive(Debug, Default)]
struct Log {
    broken: LogLimit,
    connected: LogLimit,
    sizes: LogLimit,
    threads: LogLimit,
}

impl Reachable for SharedExport {
    fn reach(&self) -> Option<ConnectionState> {
        let queues = self.queues.load(Ordering::Relaxed);
        let is_used = queues > 0 || !self.closed.load(Ordering::Relaxed);
        is_used.then(|| ConnectionState {
            server: self.server.to_string(),
            connected: self.awaited.load(Ordering::Relaxed) == 0,
            lost: self.lost.load(Ordering::Relaxed),
        })
    }
}

impl SharedExport {
    /// Connects to the export, and verifies that it has not changed except perhaps in size.
    pub(crate) fn connect(&self) -> Result<Connected, ConnectError> {
        let mut connected = connect(&self.server, &self.addresses, CONNECT_LIMIT)?;
        let (was, is) = (&self.export, &connected.export);
        // Features that outstanding requests rely on must still be available.
        let needed = flags::SEND_FLUSH
            | flags::SEND_FUA
            | flags::SEND_TRIM
            | flags::SEND_WRITE_ZEROES
            | flags::CAN_MULTI_CONN;
        let what = if was.flags & !is.flags & needed != 0 {
            Some("it can do less (flags of the export)")
        } else if is.minimum > was.minimum || is.maximum < was.maximum {
            Some("its block sizes")
        } else if is.has(flags::READ_ONLY) && !self.is_read_only() {
            Some("it is read-only")
        } else {
            None
        };
        if let Some(what) = what {
            let server = self.server.to_string();
            return Err(ConnectError::Changed { server, what });
        }
        let size = whole_blocks(is.size, self.block_size());
        let before = self.size.swap(size, Ordering::Relaxed);
        if before != size {
            self.log.sizes.line(|left_out| {
                let server = &self.server;
                tracing::warn!(
                    left_out,
                    "{server}: size changed from {before} to {size} bytes"
                );
            });
        }
        connected.kept = kept(self.keeper.as_deref(), &self.server, &connected);
        Ok(connected)
    }

    /// Returns the connection by which the volume was opened; `None` after the first call.
    pub(crate) fn take_first(&self) -> Option<Connected> {
        self.first.lock().unpoisoned().take()
    }

    pub(crate) fn has(&self, flag: u16) -> bool {
        self.export.has(flag)
    }

    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    fn is_read_only(&self) -> bool {
        self.options.read_only || self.has(flags::READ_ONLY)
    }

    fn block_size(&self) -> u32 {
        self.export.minimum
    }

    pub(crate) fn info(&self) -> Info {
        let read_only = self.is_read_only();
        let deallocate = self.has(flags::SEND_TRIM) && !read_only;
        let several = if self.has(flags::CAN_MULTI_CONN) {
            "several connections"
        } else {
            "one connection"
        };
        let replies = if self.export.structured {
            "structured"
        } else {
            "simple"
        };
        Info {
            size: self.size(),
            block_size: self.block_size(),
            optimal_io: self.export.preferred.max(4096),
            read_only,
            volatile_cache: self.has(flags::SEND_FLUSH),
            deallocate,
            deallocate_granularity: if deallocate { self.export.preferred } else { 0 },
            zeroes_after_deallocate: false,
            write_zeroes: self.has(flags::SEND_WRITE_ZEROES),
            kind: Kind::BlockDevice,
            description: format!("{} ({replies} replies, {several})", self.server),
        }
    }

    /// Adds to the number of connections that workers wait for.
    pub(crate) fn awaits(&self, connections: usize) {
        self.awaited.fetch_add(connections, Ordering::Relaxed);
    }

    /// Counts a connection that was made, and ends the state in which requests fail.
    pub(crate) fn connected(&self) {
        self.awaited.fetch_sub(1, Ordering::Relaxed);
        self.overdue.store(false, Ordering::Relaxed);
    }

    /// Counts and logs the loss of a connection with `unanswered` outstanding requests; its
    /// replacement is awaited.
    pub(crate) fn broken(&self, why: &dyn std::fmt::Display, unanswered: usize) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        self.awaits(1);
        self.log.broken.line(|left_out| {
            let server = &self.server;
            tracing::warn!(
                left_out,
                "{server}: {why}; connecting again ({unanswered} requests wait)"
            );
        });
    }

    /// Logs a replaced connection, and the time that it took.
    pub(crate) fn made_again(&self, took: Duration) {
        self.log.connected.line(|left_out| {
            tracing::info!(left_out, "{}: connected after {took:.1?}", self.server);
        });
    }

    /// Logs that no thread could be started for connecting to the server.
    pub(crate) fn no_thread(&self, error: &std::io::Error) {
        self.log.threads.line(|left_out| {
            let server = &self.server;
            tracing::error!(
                left_out,
                "{server}: no thread to connect ({error}); retrying"
            );
        });
    }

    /// Logs, once, that requests fail because the server is unreachable.
    pub(crate) fn overdue(&self) {
        if !self.overdue.swap(true, Ordering::Relaxed) {
            let (server, delay) = (&self.server, self.options.reconnect_delay);
            tracing::error!(
                "{server}: not reached for {delay:?} (reconnect-delay); requests fail until it is \
                 back"
            );
        }
    }

    /// Records the end of a queue that was waiting for `awaited` connections.
    pub(crate) fn close_queue(&self, awaited: usize) {
        self.awaited.fetch_sub(awaited, Ordering::Relaxed);
        self.queues.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Informs the keeper of a connection, before anything is sent on it.
fn kept(
    keeper: Option<&dyn ConnectionKeeper>,
    server: &NbdServer,
    connected: &Connected,
) -> Option<ConnectionGuard> {
    keeper?.keep(&server.to_string(), connected.fd.as_fd())
}

/// Returns `size` rounded down to whole blocks, in bytes.
fn whole_blocks(size: u64, block_size: u32) -> u64 {
    size - size % u64::from(block_size.max(1))
}

/// Export of an NBD server, as a volume.
#[derive(Debug)]
pub struct NbdVolume(Arc<SharedExport>);

impl NbdVolume {
    /// Connects to a server, and opens its export.
    ///
    /// # Errors
    /// Words that name the server, after ten seconds at the latest.
    pub fn open(
        server: NbdServer,
        options: NbdOptions,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        Self::open_kept(server, options, None)
    }

    /// Opens a volume as [`NbdVolume::open`] does, with a keeper of connections for the next
    /// process. It ends the connections of the previous process first.
    ///
    /// # Errors
    /// As [`NbdVolume::open`].
    pub fn open_kept(
        server: NbdServer,
        options: NbdOptions,
        keeper: Option<Arc<dyn ConnectionKeeper>>,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let addresses = server.resolve().map_err(|error| ConnectError::Name {
            server: server.to_string(),
            error,
        })?;
        if let Some(keeper) = &keeper {
            keeper.end_previous(&server.to_string())?;
        }
        let mut connected = connect(&server, &addresses, CONNECT_LIMIT)?;
        let export = connected.export;
        let block = options.block_size.unwrap_or(512).max(export.minimum);
        if !export.size.is_multiple_of(block.into()) || export.size == 0 {
            let size = export.size;
            return Err(format!(
                "{server}: its size of {size} bytes is zero or not a multiple of the block size \
                 of {block} bytes; change it at the server"
            )
            .into());
        }
        if options.connections > 1 && !export.has(flags::CAN_MULTI_CONN) {
            return Err(format!(
                "{server}: the server does not allow several connections to an export \
                 (NBD_FLAG_CAN_MULTI_CONN); leave connections= out"
            )
            .into());
        }
        connected.kept = kept(keeper.as_deref(), &server, &connected);
        Ok(Self(Arc::new(SharedExport {
            keeper,
            size: export.size.into(),
            told: export.size.into(),
            first: Mutex::new(Some(connected)),
            queues: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            awaited: AtomicUsize::new(0),
            lost: AtomicU64::new(0),
            overdue: AtomicBool::new(false),
            log: Log::default(),
            server,
            addresses,
            options,
            export,
        })))
    }

    /// Returns a handle by which the state of the connections can be watched.
    pub fn watch(&self) -> ReachWatch {
        ReachWatch::new(self.0.clone())
    }

    fn error(&self, what: &'static str, error: std::io::Error) -> VolumeError {
        VolumeError::System {
            path: PathBuf::from(self.0.server.to_string()),
            what,
            error,
        }
    }
}

impl Drop for NbdVolume {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::Relaxed);
    }
}

impl Volume for NbdVolume {
    fn info(&self) -> Info {
        self.0.info()
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        let streams = io.streams()?;
        let inbox = Inbox::new(io);
        let inbox =
            inbox.map_err(|error| self.error("has no event descriptor for connections", error))?;
        if self.0.queues.fetch_add(1, Ordering::Relaxed) > 0 && !self.0.has(flags::CAN_MULTI_CONN) {
            self.0.close_queue(0);
            let error = std::io::Error::other(
                "several workers or queues would need a connection each, which the server does \
                 not allow (NBD_FLAG_CAN_MULTI_CONN)",
            );
            return Err(self.error("is in use", error));
        }
        // From here on the queue counts itself out.
        let queue = queue::open(self.0.clone(), streams, inbox, io.ending_watch());
        Ok(OpenQueue::with_fast_path(queue))
    }

    fn id(&self) -> Vec<u8> {
        self.0.server.to_string().into_bytes()
    }

    /// Returns the size of the export as its name, because an export has no identifier.
    fn media(&self) -> Vec<String> {
        vec![format!("export of {} bytes", self.0.size())]
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    fn extent(&self) -> Option<Extent> {
        Some(Extent::whole(self.0.server.to_string()))
    }

    fn refresh(&self) -> Result<bool, VolumeError> {
        let size = self.0.size();
        Ok(self.0.told.swap(size, Ordering::Relaxed) != size)
    }
}
