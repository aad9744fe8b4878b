//! Set-up of a remote engine, before it is on its worker's thread.

use super::report::{CLOSED, OPEN};
use super::{Progress, RemoteEngine, Report};
use crate::config::{ConfigError, NamespaceConfig};
use crate::engine::{Engine, EngineConfig, Namespace, Order};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender};
use std::task::Waker;
use volume::Io;

/// A remote engine's ends of its channels to the control half.
pub(crate) struct Connection {
    pub orders: Receiver<Order>,
    pub reports: SyncSender<Report>,
    pub progress: Arc<Progress>,
    /// Wakes the controller's own worker.
    pub controller: Waker,
    pub mapped_doorbells: bool,
    /// Number of the last controller-level reset.
    pub epoch: u64,
}

/// Parts of a [`RemoteEngine`], to be sent to its worker's thread: see
/// [`Controller::remote_engine`](crate::Controller::remote_engine).
pub struct RemoteEngineSetup {
    pub(crate) config: EngineConfig,
    pub(crate) namespaces: Vec<NamespaceConfig>,
    pub(crate) connection: Connection,
}

impl RemoteEngineSetup {
    /// Opens the controller's volumes for this thread. `id` names the engine in the tags of its
    /// volume requests, see [`tag_owner`](crate::tag_owner); `io` is this worker's.
    ///
    /// # Errors
    /// [`ConfigError`] when a volume cannot be opened a second time. The controller then does
    /// without this worker.
    pub fn open(self, id: u16, io: &Rc<Io>) -> Result<RemoteEngine, ConfigError> {
        let RemoteEngineSetup {
            config,
            namespaces,
            connection,
        } = self;
        let share = config.stats.shares.get(usize::from(config.share)).cloned();
        let share = share.unwrap_or_default();
        let open = |ns| Namespace::open_or_vacant(ns, io, &share);
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
