//! Set-up of a remote engine, before it moves to its worker's thread.

use super::report::{CLOSED, OPEN};
use super::{EngineReport, Progress, RemoteEngine};
use crate::config::{ConfigError, NamespaceConfig};
use crate::engine::{Engine, EngineConfig, Namespace, Order};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender};
use std::task::Waker;
use volume::Io;

/// Ends of the channels between a remote engine and the control half that the engine owns.
pub(crate) struct Connection {
    pub orders: Receiver<Order>,
    pub reports: SyncSender<EngineReport>,
    pub progress: Arc<Progress>,
    /// Waker of the controller's own worker.
    pub controller: Waker,
    pub mapped_doorbells: bool,
    /// Number of the controller's last reset when the engine was created.
    pub epoch: u64,
}

/// Parts of a [`RemoteEngine`], which
/// [`Controller::remote_engine`](crate::Controller::remote_engine) returns to be sent to the
/// worker's thread.
pub struct RemoteEngineSetup {
    pub(crate) config: EngineConfig,
    pub(crate) namespaces: Vec<NamespaceConfig>,
    pub(crate) connection: Connection,
}

impl RemoteEngineSetup {
    /// Opens the controller's volumes for this thread. `id` identifies the engine in the tags of
    /// its volume requests, see [`tag_owner`](crate::tag_owner); `io` is the ring of this worker.
    ///
    /// # Errors
    /// [`ConfigError`] when a volume cannot be opened a second time. The controller then runs
    /// without this worker.
    pub fn open(self, id: u16, io: &Rc<Io>) -> Result<RemoteEngine, ConfigError> {
        let RemoteEngineSetup {
            config,
            namespaces,
            connection,
        } = self;
        let open = |ns| Namespace::open_or_vacant(ns, io, &config.io);
        let opened = namespaces.into_iter().map(open);
        let opened = opened.collect::<Result<Vec<_>, _>>();
        let (progress, controller) = (connection.progress.clone(), connection.controller.clone());
        let remote = opened.and_then(|namespaces| {
            let engine = Engine::new(EngineConfig { id, ..config }, namespaces)?;
            let mut remote = RemoteEngine::new(engine, connection, io);
            remote.drain_messages();
            Ok(remote)
        });
        let state = if remote.is_ok() { OPEN } else { CLOSED };
        progress.state.store(state, Ordering::Release);
        controller.wake_by_ref();
        remote
    }
}
