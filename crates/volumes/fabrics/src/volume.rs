//! A namespace of a remote subsystem as a [`Volume`].

use crate::connect::{ConnectError, Controller, NamespaceProperties, Portal};
use crate::options::FabricsOptions;
use crate::queue;
use crate::shared::{CONNECT_LIMIT, QueueInbox, SharedVolume};
use crate::subsystem::Subsystem;
use nvme_tcp::Host;
use remote::ReachWatch;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use volume::{AtomicWrites, Extent, Info, Io, OpenQueue, Volume, VolumeError};

/// Namespace of a remote NVMe/TCP subsystem, as a volume.
#[derive(Debug)]
pub struct FabricsVolume(Arc<SharedVolume>);

impl FabricsVolume {
    /// Connects to a subsystem by the first of its portals that answers, and opens its namespace.
    /// The other paths are made when a worker opens its queue.
    ///
    /// # Errors
    /// Words that name the portals.
    pub fn open(
        subsystem: Subsystem,
        options: FabricsOptions,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let host = Host {
            header_digest: options.header_digest,
            data_digest: options.data_digest,
        };
        let portals = subsystem.portals.iter().map(|place| {
            let secrets = options.secrets.clone();
            Portal::new(
                place.clone(),
                &subsystem.nqn,
                &options.identity,
                host,
                secrets,
            )
        });
        let portals: Vec<Portal> = portals.collect::<Result<_, _>>()?;
        let (number, controller) = first(&subsystem, &options, &portals)?;
        check(&subsystem, &options, &controller.facts)?;
        let first = (number, controller);
        Ok(Self(SharedVolume::new(subsystem, options, portals, first)))
    }

    /// Returns a handle by which the state of the connections can be watched.
    pub fn watch(&self) -> ReachWatch {
        ReachWatch::new(self.0.clone())
    }

    fn error(&self, what: &'static str, error: std::io::Error) -> VolumeError {
        VolumeError::System {
            path: PathBuf::from(self.0.subsystem.to_string()),
            what,
            error,
        }
    }
}

/// Connects to the first portal that has a usable controller, and returns the controller.
fn first(
    subsystem: &Subsystem,
    options: &FabricsOptions,
    portals: &[Portal],
) -> Result<(usize, Controller), Box<dyn std::error::Error + Send + Sync>> {
    let wanted = SharedVolume::wanted(subsystem, options);
    let mut errors = Vec::new();
    for (number, portal) in portals.iter().enumerate() {
        let now = Instant::now();
        let deadline = now.checked_add(CONNECT_LIMIT).unwrap_or(now);
        match Controller::bring_up(portal, wanted, deadline) {
            Ok(controller) => return Ok((number, controller)),
            Err(error) => errors.push(error),
        }
    }
    let words: Vec<String> = errors.iter().map(ConnectError::to_string).collect();
    Err(format!("{subsystem}: {}", words.join("; ")).into())
}

/// Checks that the options of the volume are compatible with the namespace.
fn check(
    subsystem: &Subsystem,
    options: &FabricsOptions,
    facts: &NamespaceProperties,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let block = facts.namespace.block_size();
    if let Some(wanted) = options.block_size
        && wanted < block
    {
        return Err(format!(
            "{subsystem}: its blocks have {block} bytes; serve it with blocks of that size, not of \
             {wanted}"
        )
        .into());
    }
    Ok(())
}

impl Drop for FabricsVolume {
    fn drop(&mut self) {
        self.0.end_use();
    }
}

impl Volume for FabricsVolume {
    fn info(&self) -> Info {
        self.0.info()
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        let streams = io.streams()?;
        let inbox = QueueInbox::new(io);
        let inbox =
            inbox.map_err(|error| self.error("has no event descriptor for connections", error))?;
        // From here on the queue counts itself out.
        let queue = queue::open(self.0.clone(), streams, inbox, io.ending_watch());
        Ok(OpenQueue::with_fast_path(queue))
    }

    fn id(&self) -> Vec<u8> {
        let facts = &self.0.facts;
        let namespace = &facts.namespace;
        for id in [facts.uuid, namespace.nguid] {
            if id != [0; 16] {
                return id.to_vec();
            }
        }
        let Subsystem { nqn, nsid, .. } = &self.0.subsystem;
        format!("{nqn}/{nsid}").into_bytes()
    }

    fn own_id(&self) -> Option<Vec<u8>> {
        Some(self.id())
    }

    fn media(&self) -> Vec<String> {
        let id = self.id();
        let id = id.iter().map(|byte| format!("{byte:02x}"));
        vec![format!("namespace {}", id.collect::<String>())]
    }

    /// Returns the atomicity that the subsystem promises for one command. A write within it is one
    /// command on any path.
    fn atomic_writes(&self) -> AtomicWrites {
        self.0.facts.atomic
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    fn extent(&self) -> Option<Extent> {
        let Subsystem { nqn, nsid, .. } = &self.0.subsystem;
        Some(Extent::whole(format!("{nqn}/{nsid}")))
    }

    fn refresh(&self) -> Result<bool, VolumeError> {
        Ok(self.0.is_resized())
    }
}
