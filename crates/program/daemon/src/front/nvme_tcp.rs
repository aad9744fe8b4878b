//! Volumes for other hosts, by NVMe over TCP: a listener at an address, and an association for each
//! host, on whichever worker has the fewest front-ends.

use crate::front::{Front, Worker};
use crate::registry::guarded_list::ListEntry;
use crate::registry::{ControllerEntry, Registry};
use crate::serve::peers::{Assignment, Peers};
use control::EventSender;
use control::api::EventKind;
use controller::ControllerStats;
use fabrics_target::{Association, AssociationError, NewAssociation, TargetListener};
use probes::LogLimit;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use worker::{AcceptStats, Context};

/// Front-end of the listening socket of an NVMe/TCP subsystem.
pub struct NvmeTcpListener {
    target_listener: TargetListener,
    _assignment: Assignment,
}

impl NvmeTcpListener {
    pub fn new(target_listener: TargetListener, assignment: Assignment) -> Self {
        Self {
            target_listener,
            _assignment: assignment,
        }
    }

    /// Returns whether any host is connected to the subsystem.
    pub fn has_client(&self) -> bool {
        !self.target_listener.target().hosts().is_empty()
    }

    /// Stops listening, and disconnects all hosts of the subsystem.
    pub fn dismiss(&mut self) {
        self.target_listener.dismiss();
    }

    /// Returns the listening socket, which another thread may close.
    pub fn into_remains(self) -> OwnedFd {
        self.target_listener.into_listener()
    }
}

impl Deref for NvmeTcpListener {
    type Target = TargetListener;

    fn deref(&self) -> &TargetListener {
        &self.target_listener
    }
}

impl DerefMut for NvmeTcpListener {
    fn deref_mut(&mut self) -> &mut TargetListener {
        &mut self.target_listener
    }
}

/// Front-end of the association of one NVMe/TCP host.
pub struct NvmeTcpHost {
    association: Association,
    events: EventSender,
    /// Name of the disk, for events about the host.
    disk: String,
    host: String,
    _entered: ListEntry<Arc<ControllerStats>>,
    _entry: ListEntry<ControllerEntry>,
    _assignment: Assignment,
}

/// Information by which a disk's associations are registered and assigned to workers.
#[derive(Clone)]
pub struct Hosts {
    pub peers: Arc<Peers>,
    pub registry: Registry,
    /// Name of the disk (the subsystem).
    pub name: String,
    /// Where its hosts connect.
    pub address: PathBuf,
    /// Limit for log lines about hosts that cannot be served.
    pub log: Arc<LogLimit>,
}

impl Hosts {
    /// Serves a new association on the worker with the fewest front-ends.
    pub fn launch(&self, new: NewAssociation) {
        let (worker, assignment) = self.peers.assign_any();
        let Some(handle) = self.peers.handle(worker) else {
            return;
        };
        let hosts = self.clone();
        // A worker that ends drops its jobs: the host is refused then.
        handle.post(move |thread| hosts.serve(thread, worker, new, assignment));
    }

    fn serve(
        self,
        thread: &mut Worker,
        worker: usize,
        new: NewAssociation,
        assignment: Assignment,
    ) {
        let name = format!("{} at {}", new.hostnqn(), self.address.display());
        let log = self.log.clone();
        let added = thread.add(|context| {
            let host = self.host(context, worker, new, assignment)?;
            Ok::<_, AssociationError>(Front::NvmeTcpHost(Box::new(host)))
        });
        match added {
            Ok(Some(owner)) => thread.handle().set_name(owner, name),
            Ok(None) => log.line(|left_out| {
                tracing::warn!(left_out, "{name} is refused: worker {worker} is full");
            }),
            Err(error) => log.line(|left_out| {
                tracing::warn!(left_out, "{name} is refused: {error}");
            }),
        }
    }

    fn host(
        self,
        context: &Context<'_>,
        worker: usize,
        new: NewAssociation,
        assignment: Assignment,
    ) -> Result<NvmeTcpHost, AssociationError> {
        let host = new.hostnqn().to_owned();
        let mut association = new.make(context)?;
        if let Some(handle) = self.peers.handle(worker) {
            association.set_worker(worker as u16, handle.waker());
        }
        let stats = association.stats();
        let address = self.address.join(association.cntlid().to_string());
        let accepts = Arc::new(AcceptStats::default());
        let events = self.registry.events.clone();
        events.send(EventKind::Attached, &self.name, None, Some(host.clone()));
        Ok(NvmeTcpHost {
            _entered: self.peers.enter(stats.clone()),
            _entry: self.registry.enter(Path::new(&address), stats, accepts),
            _assignment: assignment,
            association,
            events,
            disk: self.name,
            host,
        })
    }
}

impl Deref for NvmeTcpHost {
    type Target = Association;

    fn deref(&self) -> &Association {
        &self.association
    }
}

impl DerefMut for NvmeTcpHost {
    fn deref_mut(&mut self) -> &mut Association {
        &mut self.association
    }
}

impl Drop for NvmeTcpHost {
    fn drop(&mut self) {
        let host = std::mem::take(&mut self.host);
        self.events
            .send(EventKind::Detached, &self.disk, None, Some(host));
    }
}
