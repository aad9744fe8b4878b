//! A branch before it is on its worker's thread.

use super::report::{CLOSED, OPEN};
use super::{Branch, Progress, Report};
use crate::config::{ConfigError, NamespaceConfig};
use crate::engine::{Engine, EngineConfig, Namespace, Order};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender};
use std::task::Waker;
use volume::Io;

/// A branch's ends of what connects it with the control half.
pub(crate) struct Parts {
    pub orders: Receiver<Order>,
    pub reports: SyncSender<Report>,
    pub progress: Arc<Progress>,
    pub home: Waker,
    pub mapped_doorbells: bool,
    /// The last controller-level reset.
    pub epoch: u64,
}

/// What a [`Branch`] is made of, on the way to its worker's thread: see [`Controller::branch`](crate::Controller::branch).
pub struct BranchSeed {
    pub(crate) config: EngineConfig,
    pub(crate) namespaces: Vec<NamespaceConfig>,
    pub(crate) parts: Parts,
}

impl BranchSeed {
    /// Opens the controller's volumes for this thread. `id` names the branch in the tags of its volume requests, see
    /// [`tag_owner`](crate::tag_owner); `io` is this worker's.
    ///
    /// # Errors
    /// A volume that cannot be opened a second time. The controller then does without this worker.
    pub fn open(self, id: u16, io: &Io) -> Result<Branch, ConfigError> {
        let BranchSeed {
            config,
            namespaces,
            parts,
        } = self;
        let opened = namespaces.into_iter().map(|ns| Namespace::open(ns, io));
        let opened = opened.collect::<Result<Vec<_>, _>>();
        let state = if opened.is_ok() { OPEN } else { CLOSED };
        let (progress, home) = (parts.progress.clone(), parts.home.clone());
        let branch = opened.map(|namespaces| {
            let engine = Engine::new(EngineConfig { id, ..config }, namespaces);
            let mut branch = Branch::new(engine, parts, io.pinner());
            branch.hear();
            branch
        });
        progress.state.store(state, Ordering::Release);
        home.wake_by_ref();
        branch
    }
}
