//! Attaching and detaching namespaces while the controller runs ("NVMe Base 2.1", 5.1.2.1). The
//! host is notified (Attached Namespace Attribute Changed) and reads the Changed Attached Namespace
//! List log page. No reset is needed.
//!
//! A namespace becomes visible to the host only after every worker that may have queues of the
//! controller has opened it, because the host may send a command through any of them.

use super::Controller;
use super::migration::Migration;
use crate::config::{ConfigError, NamespaceConfig};
use crate::engine::{Namespace, Order};
use std::sync::atomic::Ordering;
use volume::Io;

/// A namespace that is being attached; some workers have yet to open it.
pub(super) struct Attaching {
    index: usize,
    namespace: Namespace,
    /// Number of namespaces that other workers had failed to open before this attachment began.
    refused: u64,
}

/// Progress of an attachment that [`Controller::attach`] has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attach {
    /// At least one other worker has yet to open the namespace.
    Under,
    /// The namespace is attached and visible to the host.
    Done,
    /// Another worker could not open the namespace, which therefore is not attached.
    Refused,
}

impl Migration {
    /// Returns whether every remote engine has applied the latest orders to attach or detach
    /// namespaces.
    fn namespaces_known(&self) -> bool {
        let knows = |link: &super::migration::Link| link.handled() >= link.namespaces;
        self.links().all(|link| !link.is_open() || knows(link))
    }

    /// Returns how many times remote engines have failed to open a namespace so far.
    fn namespaces_refused(&self) -> u64 {
        let counts = self.links().map(|link| &link.progress.refused);
        counts.map(|count| count.load(Ordering::Acquire)).sum()
    }

    /// Returns whether a remote engine still has a detached namespace with outstanding commands.
    fn namespaces_leaving(&self) -> bool {
        let leaving = |link: &super::migration::Link| {
            link.handled() < link.namespaces || link.progress.leaving.load(Ordering::Acquire) > 0
        };
        self.links().any(|link| link.is_open() && leaving(link))
    }
}

impl Controller {
    /// Begins to attach a namespace. `io` is the ring of the controller's worker. The namespace
    /// becomes visible, and the host is notified, when all workers have opened it;
    /// [`Controller::attaching`] returns the progress.
    ///
    /// # Errors
    /// [`ConfigError`] when the namespace cannot be opened, when its ID is in use or larger than
    /// [`max_namespaces`](crate::ControllerConfig::max_namespaces), or when another namespace is
    /// being attached. Nothing has changed then.
    pub fn attach(&mut self, config: NamespaceConfig, io: &Io) -> Result<(), ConfigError> {
        let nsid = config.nsid;
        if self.active().any(|ns| ns.config.nsid == nsid) {
            return Err(ConfigError::DuplicateNamespace(nsid));
        }
        if nsid > self.config.max_namespaces {
            return Err(ConfigError::NoRoom {
                nsid,
                max: self.config.max_namespaces,
            });
        }
        if self.attaching.is_some() {
            return Err(ConfigError::Attaching);
        }
        config.check_for(&self.config)?;
        if let Some(zones) = &config.zones {
            zones.begin();
        }
        let namespace = Namespace::open(config.clone(), io, &self.engine.counters.io)?;
        let index = self.vacant_index();
        if index >= usize::from(u16::MAX) {
            return Err(ConfigError::Attaching);
        }
        // The index is reserved until the namespace is attached.
        self.engine.namespaces.attach(index, Namespace::vacant(io)?);
        self.share(&config, index)?;
        let refused = self.migration.namespaces_refused();
        self.migration.set_namespace(index, config.clone());
        self.migration
            .send_all(|| Order::Attach(index, Box::new(config.clone())));
        self.attaching = Some(Attaching {
            index,
            namespace,
            refused,
        });
        self.finish_attaching();
        self.settle();
        Ok(())
    }

    /// Returns whether a namespace with this ID is attached or being attached.
    pub(crate) fn has_or_awaits(&self, nsid: u32) -> bool {
        let attaching = self.attaching.as_ref();
        self.engine.namespaces.index_of(nsid).is_ok()
            || attaching.is_some_and(|attaching| attaching.namespace.config.nsid == nsid)
    }

    /// Returns the lowest index without a namespace in all engines, or the end of the list.
    fn vacant_index(&self) -> usize {
        let used = self.engine.namespaces.len();
        if self.engine.namespaces.detached() > 0 || self.migration.namespaces_leaving() {
            return used;
        }
        let mut places = self.engine.namespaces.iter();
        places.position(Namespace::is_vacant).unwrap_or(used)
    }

    /// Returns the progress of the last [`Controller::attach`].
    pub fn attaching(&mut self) -> Attach {
        self.finish_attaching();
        self.settle();
        match (&self.attaching, self.attach_refused) {
            (Some(_), _) => Attach::Under,
            (None, true) => Attach::Refused,
            (None, false) => Attach::Done,
        }
    }

    fn finish_attaching(&mut self) {
        if !self.migration.namespaces_known() {
            return;
        }
        let Some(attaching) = self.attaching.take() else {
            return;
        };
        let _disk = self.in_log();
        let index = attaching.index;
        self.attach_refused = self.migration.namespaces_refused() > attaching.refused;
        if self.attach_refused {
            self.migration.set_namespace(index, Namespace::nothing());
            self.order_all(|| Order::Detach(index));
            self.stop_sharing(attaching.namespace.config.nsid);
            return;
        }
        let nsid = attaching.namespace.config.nsid;
        self.engine.namespaces.attach(index, attaching.namespace);
        self.set_gates();
        if let Some(left_out) = self.engine.settings.log.allow("attached") {
            tracing::info!(nsid, left_out, "attached");
        }
        self.tell_changed(nsid);
    }

    /// Detaches a namespace: new commands no longer find it, and the host is notified. Outstanding
    /// commands run to completion, unless [`Controller::end_detached_early`] is called. Returns
    /// `false` when no namespace has this ID.
    pub fn detach(&mut self, nsid: u32) -> bool {
        let Ok(index) = self.engine.namespaces.index_of(nsid) else {
            return false;
        };
        let _disk = self.in_log();
        self.migration.set_namespace(index, Namespace::nothing());
        self.order_all(|| Order::Detach(index));
        self.stop_sharing(nsid);
        self.forget_namespace(nsid);
        self.settle();
        true
    }

    /// Forgets a namespace that was detached, and tells the host. A namespace that is attached
    /// under this ID later is a different one.
    pub(crate) fn forget_namespace(&mut self, nsid: u32) {
        self.marks.table.forget(nsid);
        self.admin.erasure.forget(nsid);
        if let Some(left_out) = self.engine.settings.log.allow("detached") {
            tracing::info!(nsid, left_out, "detached");
        }
        self.tell_changed(nsid);
    }

    /// Requests that outstanding commands on detached namespaces end early, because their volume
    /// does not respond.
    pub fn end_detached_early(&mut self) {
        self.order_all(|| Order::EndDetachedEarly);
    }

    /// Returns whether all detached namespaces have been released and their volumes closed.
    pub fn has_detached(&self) -> bool {
        self.engine.namespaces.detached() == 0 && !self.migration.namespaces_leaving()
    }

    /// Returns the namespaces that are visible to the host.
    pub fn namespaces(&self) -> impl Iterator<Item = &NamespaceConfig> {
        self.active().map(|ns| &ns.config)
    }

    /// Advances the work begun by [`Controller::attach`] and [`Controller::detach`], and the host's
    /// Namespace Management commands. Call it periodically and, with a pool, when messages woke the
    /// worker; `io` is the worker's ring.
    pub fn tidy(&mut self, io: &Io) {
        if self.attaching.is_some() {
            self.finish_attaching();
            self.settle();
        }
        self.show_pooled(io);
        if self.engine.namespaces.detached() > 0 {
            self.engine.tidy(io);
            if self.engine.namespaces.detached() == 0 {
                self.stopped_sharing();
            }
        }
    }
}
