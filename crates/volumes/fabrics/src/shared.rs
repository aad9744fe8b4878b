//! State of a volume, shared by its queues and threads.

use crate::connect::{
    ConnectError, Controller, ControllerRequirements, NamespaceProperties, Portal,
};
use crate::options::FabricsOptions;
use crate::path::Path;
use crate::queue::PathMessage;
use crate::subsystem::Subsystem;
use probes::LogLimit;
use remote::{ConnectionState, Reachable};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use volume::{Inbox, Info, Kind};

/// Time limit of one attempt to connect to a controller, including all its commands.
pub(crate) const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Inbox through which the threads of paths send connections and notices to a worker's queue.
pub(crate) type QueueInbox = Inbox<PathMessage>;

/// State of a remote namespace's volume, shared by its queues and threads.
pub(crate) struct SharedVolume {
    pub subsystem: Subsystem,
    pub options: FabricsOptions,
    /// Properties of the namespace when the volume was opened.
    pub facts: NamespaceProperties,
    /// Paths to the namespace, in the order of the portals.
    pub paths: Vec<Path>,
    /// Current size of the namespace in bytes.
    size: AtomicU64,
    /// Size of the namespace in bytes that was last reported.
    told: AtomicU64,
    /// Inboxes of the workers' queues. The index of a queue determines its queue identifiers.
    queues: Mutex<Vec<Option<Arc<QueueInbox>>>>,
    /// Number of users: the volume's handle and its queues. At 0 the paths' threads end.
    users: AtomicUsize,
    /// Number of associations that have ended so far.
    lost: AtomicU64,
    /// Whether requests fail because no path is usable, which was logged.
    overdue: AtomicBool,
    pub log: Log,
}

/// Rate limits of log messages that a subsystem can cause as often as it likes.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub broken: LogLimit,
    pub connected: LogLimit,
    pub sizes: LogLimit,
    pub states: LogLimit,
    pub threads: LogLimit,
    pub queues: LogLimit,
}

impl std::fmt::Debug for SharedVolume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("subsystem", &self.subsystem)
            .field("facts", &self.facts)
            .finish_non_exhaustive()
    }
}

impl SharedVolume {
    /// Creates the state of a volume with its first controller, which is on path `number`.
    pub(crate) fn new(
        subsystem: Subsystem,
        options: FabricsOptions,
        portals: Vec<Portal>,
        first: (usize, Controller),
    ) -> Arc<Self> {
        let (number, controller) = first;
        let facts = controller.facts.clone();
        let size = facts.namespace.bytes();
        let paths: Vec<Path> = portals.into_iter().map(Path::new).collect();
        if let Some(path) = paths.get(number) {
            path.keep(controller);
        }
        Arc::new(Self {
            subsystem,
            options,
            facts,
            paths,
            size: size.into(),
            told: size.into(),
            queues: Mutex::default(),
            users: AtomicUsize::new(1),
            lost: AtomicU64::new(0),
            overdue: AtomicBool::new(false),
            log: Log::default(),
        })
    }

    pub(crate) fn wanted(
        subsystem: &Subsystem,
        options: &FabricsOptions,
    ) -> ControllerRequirements {
        ControllerRequirements {
            nsid: subsystem.nsid,
            kato: options.kato,
            queues: options.queues.saturating_mul(FabricsOptions::WORKERS),
        }
    }

    /// Connects a controller within a time limit, and verifies that its namespace differs at most
    /// in size.
    pub(crate) fn connect(
        &self,
        portal: &Portal,
        limit: Duration,
    ) -> Result<Controller, ConnectError> {
        let now = Instant::now();
        let deadline = now.checked_add(limit).unwrap_or(now);
        let wanted = Self::wanted(&self.subsystem, &self.options);
        let controller = Controller::bring_up(portal, wanted, deadline)?;
        if let Some(what) = self.facts.differs(&controller.facts) {
            let portal = portal.place.to_string();
            return Err(ConnectError::Changed { portal, what });
        }
        self.set_size(controller.facts.namespace.bytes());
        Ok(controller)
    }

    pub(crate) fn set_size(&self, size: u64) {
        let before = self.size.swap(size, Ordering::Relaxed);
        if before != size {
            self.tell_all(&PathMessage::Look);
            self.log.sizes.line(|left_out| {
                let subsystem = &self.subsystem;
                tracing::warn!(
                    left_out,
                    "{subsystem}: size changed from {before} to {size} bytes"
                );
            });
        }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Returns whether the size has changed since the last call.
    pub(crate) fn is_resized(&self) -> bool {
        let size = self.size();
        self.told.swap(size, Ordering::Relaxed) != size
    }

    pub(crate) fn info(&self) -> Info {
        let NamespaceProperties {
            namespace, model, ..
        } = &self.facts;
        let read_only = self.options.read_only || namespace.write_protected;
        let deallocate = self.facts.dataset_management && !read_only;
        let block = namespace.block_size();
        let granularity = namespace
            .deallocate_granularity
            .max(1)
            .saturating_mul(block);
        let granularity = granularity.checked_next_power_of_two().unwrap_or(block);
        let paths = match self.paths.len() {
            1 => "one path".to_owned(),
            paths => format!("{paths} paths"),
        };
        Info {
            size: self.size(),
            block_size: block,
            optimal_io: block.max(4096),
            read_only,
            volatile_cache: self.facts.volatile_cache,
            deallocate,
            deallocate_granularity: if deallocate { granularity } else { 0 },
            zeroes_after_deallocate: namespace.zeroes_after_deallocate,
            write_zeroes: self.facts.write_zeroes,
            kind: Kind::BlockDevice,
            description: format!("{} ({model}, {paths})", self.subsystem),
        }
    }

    // ---- users

    /// Adds the queue of a worker, and returns its index.
    pub(crate) fn enter(self: &Arc<Self>, inbox: &Arc<QueueInbox>) -> usize {
        self.users.fetch_add(1, Ordering::SeqCst);
        let mut queues = self.queues.lock().unpoisoned();
        let place = match queues.iter().position(Option::is_none) {
            Some(place) => place,
            None => {
                queues.push(None);
                queues.len() - 1
            }
        };
        if let Some(vacant) = queues.get_mut(place) {
            *vacant = Some(inbox.clone());
        }
        drop(queues);
        for number in 0..self.paths.len() {
            self.serve(number);
        }
        place
    }

    /// Removes the queue of a worker.
    pub(crate) fn leave(&self, place: usize) {
        if let Some(entry) = self.queues.lock().unpoisoned().get_mut(place) {
            *entry = None;
        }
        self.end_use();
    }

    /// Removes a user of the volume. The threads of paths end after the last one.
    pub(crate) fn end_use(&self) {
        self.users.fetch_sub(1, Ordering::SeqCst);
        self.paths.iter().for_each(Path::wake);
    }

    pub(crate) fn is_used(&self) -> bool {
        self.users.load(Ordering::SeqCst) > 0
    }

    /// Starts the thread of path `number`, unless it runs, and wakes it.
    pub(crate) fn serve(self: &Arc<Self>, number: usize) {
        let Some(path) = self.paths.get(number) else {
            return;
        };
        if let Err(error) = path.start(self, number) {
            self.log.threads.line(|left_out| {
                let portal = &path.portal.place;
                tracing::error!(
                    left_out,
                    "{portal}: no thread for the path ({error}); retrying"
                );
            });
        }
        path.wake();
    }

    /// Returns the inboxes of all workers' queues, with the queues' indices.
    pub(crate) fn queues(&self) -> Vec<(usize, Arc<QueueInbox>)> {
        let queues = self.queues.lock().unpoisoned();
        let queues = queues.iter().enumerate();
        queues
            .filter_map(|(place, inbox)| Some((place, inbox.clone()?)))
            .collect()
    }

    pub(crate) fn tell_all(&self, message: &PathMessage) {
        for (_, inbox) in self.queues() {
            if let Some(copy) = message.copy() {
                inbox.put(copy);
            }
        }
    }

    // ---- log messages

    /// Records that a path is usable again, so that requests no longer fail.
    pub(crate) fn has_path(&self) {
        self.overdue.store(false, Ordering::Relaxed);
    }

    /// Counts and logs the end of an association on path `number`.
    pub(crate) fn has_lost(&self, number: usize, why: &dyn std::error::Error) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        self.log.broken.line(|left_out| {
            let portal = self
                .paths
                .get(number)
                .map(|path| path.portal.place.to_string());
            let portal = portal.unwrap_or_default();
            tracing::warn!(
                left_out,
                "{}: the path by {portal} is lost: {why}; connecting again",
                self.subsystem
            );
        });
    }

    /// Logs, once, that requests fail because no path is usable.
    pub(crate) fn is_overdue(&self) {
        if !self.overdue.swap(true, Ordering::Relaxed) {
            let (subsystem, delay) = (&self.subsystem, self.options.reconnect_delay);
            tracing::error!(
                "{subsystem}: not reached for {delay:?} (reconnect-delay); requests fail until it \
                 is back"
            );
        }
    }
}

impl Reachable for SharedVolume {
    fn reach(&self) -> Option<ConnectionState> {
        // Threads may run for a moment after the last user.
        self.is_used().then(|| ConnectionState {
            server: self.subsystem.to_string(),
            connected: self.paths.iter().all(Path::is_connected),
            lost: self.lost.load(Ordering::Relaxed),
        })
    }
}
