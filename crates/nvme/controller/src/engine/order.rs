//! Orders of the control half to an engine, one variant for each control operation.
//!
//! The controller's own engine applies an order at once. An engine on another worker does so when
//! that worker drains its messages. Both use [`Engine::apply`]. All engines, including the
//! controller's own, answer with [`Event`]s, so the sender of an order need not know the engine.
//!
//! [`Event`]: super::Event

use super::queue::Cq;
use super::{Engine, EngineFeatures, Event, MigratingQueues, Namespace, Sq};
use crate::config::NamespaceConfig;
use crate::formats::BlockFormat;
use crate::irq::IrqSink;
use crate::metadata::MetadataState;
use dma::{DmaMap, MapError, Memory, Prot, SharedPages};
use nvme::Status;
use std::sync::Arc;

/// Order of the control half to an engine.
///
/// Each engine applies orders in the order in which they were sent; there is no other rule. A queue
/// installed after an unmap finds its memory unmapped. A queue released before has given up the
/// memory when the unmap is answered.
pub(crate) enum Order {
    // ---- to the one engine that the queue is in, or is to be in
    /// Installs a new completion queue.
    InstallCq(u16, Box<Cq>),
    /// Installs a new submission queue in the engine of its completion queue.
    InstallSq(u16, Box<Sq>),
    /// Deletes a submission queue. `Event::SqDrained` reports the end.
    DeleteSq(u16),
    DeleteCq(u16),
    /// Aborts a command. `Event::AbortDone` or `Event::AbortMissed` reports the outcome.
    Abort {
        sqid: u16,
        cid: u16,
    },
    /// Migrates this completion queue with its submission queues. `Event::Released` or
    /// `Event::MigrationCancelled` reports the outcome.
    Migrate(u16),
    /// Cancels a migration if the queue was not released yet. `Event::Released` or
    /// `Event::MigrationCancelled` reports which of the two applies.
    CancelMigration,
    /// Ends the command with this tag after its marks were changed, with this status or with its
    /// own.
    EndMarking(u64, Option<Status>),
    /// Installs queues that another engine has released.
    InstallMigrated(Box<MigratingQueues>),

    // ---- to every engine
    /// Maps or unmaps guest memory.
    Memory(MemoryChange),
    /// Replaces the page of the doorbell registers, while there are no queues.
    Doorbells(Arc<SharedPages>),
    /// Sets the address at which commands find the controller memory buffer, or removes the buffer.
    DeviceMemory(Option<(u64, Memory)>),
    /// Sets or clears Bus Master Enable; includes the number of times that it was set. Clearing
    /// removes memory.
    Master {
        on: bool,
        masterings: u64,
    },
    /// Applies Doorbell Buffer Config.
    Shadow {
        shadow: u64,
        eventidx: u64,
    },
    /// Requests that outstanding commands end early, a while after Bus Master Enable was cleared.
    EndCommandsEarly,
    /// Hides the namespace at this index from new commands. It is released when its outstanding
    /// commands have ended ([`Engine::tidy`]).
    Detach(usize),
    /// Requests that commands on detached namespaces end early.
    EndDetachedEarly,
    /// Sets a new number of blocks of the namespace at this index.
    Resized {
        index: usize,
        blocks: u64,
    },
    /// Sets a new format of the namespace at this index, which is closed.
    Reformatted {
        index: usize,
        format: BlockFormat,
        metadata: Option<Arc<MetadataState>>,
        blocks: u64,
    },
    /// Closes the namespace at this index, so that its commands end with this status; `None` opens
    /// it.
    Close {
        index: usize,
        status: Option<Status>,
    },
    /// Requests a check of the marks of the namespace at this index, which have changed.
    LookAtMarks(usize),
    /// Sets or removes the interrupt receiver of an MSI-X vector.
    Vector(u16, Option<Arc<dyn IrqSink>>),
    ForgetSinks,
    /// Sets the values of features.
    Features(EngineFeatures),
    /// Enables the engine, because the controller was enabled.
    Enable {
        page_size: u64,
    },
    StopFetching,
    /// Flushes all namespaces at the controller's own request. `Event::Flushed` reports this
    /// number.
    Flush(u64),
    /// Begins a controller-level reset with this number. [`Engine::drained`] returns `true` at its
    /// end.
    Stop(u64),

    // ---- to remote engines, which take them themselves
    /// Opens a namespace at this index. `Progress::refused` counts those that cannot be opened.
    Attach(usize, Box<NamespaceConfig>),
    /// Ends the engine once no command is outstanding, because the controller was dropped.
    End,
}

/// Change of the map from guest addresses (IOVAs) to memory of this process.
#[derive(Clone)]
pub(crate) enum MemoryChange {
    Map {
        iova: u64,
        len: u64,
        /// Memory that backs the window, with the offset in it; `None` when this process cannot
        /// access the window.
        backing: Option<(Memory, u64)>,
        prot: Prot,
    },
    Unmap {
        iova: u64,
        len: u64,
    },
    UnmapAll,
}

impl Order {
    /// Returns whether the order removes memory. Outstanding commands may still access that memory
    /// until `Engine::dma.quiesced()` returns `true`.
    pub fn takes_memory_away(&self) -> bool {
        match self {
            Order::Memory(change) => !matches!(change, MemoryChange::Map { .. }),
            Order::Master { on, .. } => !on,
            _ => false,
        }
    }
}

impl Engine {
    /// Applies an order. Returns the number of bytes that a change of memory has affected,
    /// otherwise 0.
    ///
    /// # Errors
    /// [`MapError`] when a change of memory fails. Only the controller's own engine, which checks
    /// each change first, can return it.
    pub fn apply(&mut self, order: Order) -> Result<u64, MapError> {
        // The order may remove a queue, or its memory.
        self.log_queues();
        let Self {
            queues,
            slots,
            namespaces,
            journal,
            dma,
            irqs,
            settings,
            events,
            ..
        } = self;
        match order {
            Order::InstallCq(qid, cq) => self.install_cq(qid, *cq),
            Order::InstallSq(qid, sq) => self.install_sq(qid, *sq),
            Order::DeleteSq(qid) => queues.delete_sq(qid, slots, events),
            Order::DeleteCq(qid) => queues.delete_cq(qid),
            Order::Abort { sqid, cid } => {
                if !queues.abort(slots, namespaces, (sqid, cid)) {
                    events.push_back(Event::AbortMissed { sqid, cid });
                }
            }
            Order::Migrate(cqid) => queues.begin_migration(cqid, events),
            Order::CancelMigration => queues.cancel_migration(events),
            Order::InstallMigrated(migrated) => self.install_migrated(*migrated),
            Order::Memory(change) => return self.change_memory(change),
            Order::Doorbells(page) => queues.doorbells.replace(page),
            Order::DeviceMemory(at) => return self.set_device_memory(at).map(|()| 0),
            Order::Master { on, masterings } => self.set_master(on, masterings),
            Order::Shadow { shadow, eventidx } => {
                queues.configure_shadow((shadow, eventidx), dma, journal, events);
            }
            Order::EndCommandsEarly => {
                queues.bus_master.ends_commands = true;
                namespaces.end_early(slots, settings.offer.shared, false);
            }
            Order::Resized { index, blocks } => match namespaces.get_mut(index) {
                Some(ns) => ns.resized(blocks),
                None => self.broken("a namespace was resized that is not there"),
            },
            Order::Reformatted {
                index,
                format,
                metadata,
                blocks,
            } => match namespaces.get_mut(index) {
                Some(ns) => ns.reformatted(format, metadata, blocks),
                None => self.broken("a namespace was formatted that is not there"),
            },
            Order::Close { index, status } => self.set_access(index, |ns| ns.closed = status),
            Order::LookAtMarks(index) => self.look_at_marks(index),
            Order::EndMarking(tag, status) => {
                self.execution().end_marking(tag, status);
                self.settle();
            }
            Order::Vector(vector, sink) => irqs.set_vector(vector, sink),
            Order::ForgetSinks => irqs.forget_sinks(),
            Order::Features(features) => {
                settings.features = features;
                namespaces.enable_formats(features.lbafee);
            }
            Order::Enable { page_size } => {
                queues.halted = false;
                settings.page_size = page_size;
            }
            Order::StopFetching => queues.stop_fetching(),
            Order::Flush(number) => self.flush_all(number),
            Order::Stop(_) => {
                // Until the reset has ended ([`Engine::drained`]), commands may still access guest
                // memory.
                queues.delete_all();
                events.clear();
                slots.release_all_kept();
                slots.discard_control_commands();
                slots.orphan_all();
                namespaces.end_early(slots, settings.offer.shared, false);
            }
            Order::Detach(index) => namespaces.detach(index),
            Order::EndDetachedEarly => namespaces.end_early(slots, settings.offer.shared, true),
            // Remote engines handle these orders themselves. The controller's own engine never gets
            // them.
            Order::Attach(..) | Order::End => {}
        }
        Ok(0)
    }

    /// Changes the access of hosts to the namespace at this index.
    pub fn set_access(&mut self, index: usize, change: impl FnOnce(&mut Namespace)) {
        if !self.namespaces.change(index, change) {
            self.broken("the access to a namespace changes that is not there");
        }
    }

    /// Checks whether a namespace has any marks, see [`NamespaceTable::look_at_marks`].
    ///
    /// [`NamespaceTable::look_at_marks`]: super::NamespaceTable::look_at_marks
    pub fn look_at_marks(&mut self, index: usize) {
        if !self.namespaces.look_at_marks(index) {
            self.broken("blocks are marked of a namespace that is not there");
        }
    }

    /// Installs a completion queue, and looks up its memory in this engine's map.
    pub(super) fn install_cq(&mut self, qid: u16, cq: Cq) {
        if !self.queues.install_cq(qid, cq, &self.dma, &self.journal) {
            self.broken("a completion queue has no place");
        }
    }

    /// Installs a submission queue, and looks up its memory in this engine's map.
    pub(super) fn install_sq(&mut self, qid: u16, sq: Sq) {
        if !self.queues.install_sq(qid, sq, &self.dma, &self.journal) {
            return self.broken("a submission queue has no completion queue or no place");
        }
        if qid > 0 {
            self.open_records();
        }
    }

    /// Begins to record outstanding commands, if the controller has a state memory.
    pub(super) fn open_records(&mut self) {
        if self.slots.records.is_none() {
            self.slots.records = self.journal.records(self.slots.count());
        }
    }

    /// Installs queues that another engine of the controller has released.
    fn install_migrated(&mut self, queues: MigratingQueues) {
        let MigratingQueues {
            cqid,
            cq,
            sqs,
            masterings,
        } = queues;
        self.install_cq(cqid, cq);
        for (qid, sq) in sqs {
            self.install_sq(qid, sq);
        }
        // Bus Master Enable was cleared and set while the queue was between engines, neither of
        // which has signalled it.
        let queues = &mut self.queues;
        if queues.bus_master.is_enabled && masterings != queues.bus_master.count {
            queues.signal_unread(cqid, &mut self.irqs, &mut self.events);
        }
    }

    /// Releases the migrating queue, see [`Queues::release_migrating`].
    ///
    /// [`Queues::release_migrating`]: super::queues::Queues::release_migrating
    pub fn release_migrating(&mut self) -> Option<Box<MigratingQueues>> {
        let (irqs, events) = (&mut self.irqs, &mut self.events);
        self.queues.release_migrating(irqs, events)
    }

    /// Sets Bus Master Enable. After it is cleared, outstanding commands may still transfer data,
    /// until `self.dma.quiesced()` returns `true`. `masterings` counts how many times the control
    /// half has set the bit.
    fn set_master(&mut self, on: bool, masterings: u64) {
        let bus_master = &mut self.queues.bus_master;
        bus_master.count = masterings;
        if bus_master.is_enabled == on {
            return;
        }
        self.irqs.set_messages(on);
        if !on {
            self.queues.end_mastering(&self.journal, &mut self.events);
            return self.dma.fence();
        }
        bus_master.is_enabled = true;
        bus_master.ends_commands = false;
        self.mapped(0, u64::MAX);
        // The next round polls every queue.
        self.queues.polled.poll_all();
        self.post_backlogs();
        self.queues
            .signal_all_unread(&mut self.irqs, &mut self.events);
    }

    fn unmapped(&mut self, iova: u64, len: u64) {
        let (journal, events) = (&self.journal, &mut self.events);
        self.queues.unmapped((iova, len), journal, events);
    }

    fn mapped(&mut self, iova: u64, len: u64) {
        let (dma, journal, events) = (&self.dma, &self.journal, &mut self.events);
        self.queues.mapped((iova, len), dma, journal, events);
    }

    fn change_memory(&mut self, change: MemoryChange) -> Result<u64, MapError> {
        match change {
            MemoryChange::Map {
                iova,
                len,
                backing,
                prot,
            } => {
                self.dma.map(iova, len, backing, prot)?;
                self.mapped(iova, len);
                Ok(len)
            }
            MemoryChange::Unmap { iova, len } => {
                let bytes = self.dma.unmap(iova, len)?;
                // A VMM with a virtual IOMMU sends hundreds of unmaps for ranges that are not
                // mapped.
                if bytes > 0 {
                    self.unmapped(iova, len);
                }
                Ok(bytes)
            }
            MemoryChange::UnmapAll => {
                let bytes = self.dma.unmap_all();
                self.unmapped(0, u64::MAX);
                Ok(bytes)
            }
        }
    }

    /// Sets the address of the controller memory buffer, and looks up again the queues and shadow
    /// buffers that are in the buffer, or in guest memory covered by it.
    fn set_device_memory(&mut self, at: Option<(u64, Memory)>) -> Result<(), MapError> {
        let place = |dma: &DmaMap| {
            let (iova, memory) = dma.device_memory()?;
            Some((iova, memory.len() as u64))
        };
        let old = place(&self.dma);
        self.dma.set_device_memory(at)?;
        let places = [old, place(&self.dma)].into_iter().flatten();
        for (iova, len) in places.clone() {
            self.unmapped(iova, len);
        }
        for (iova, len) in places {
            self.mapped(iova, len);
        }
        Ok(())
    }

    /// Returns the orders that put a new engine without queues into the state of this one.
    pub fn catch_up(&self) -> Vec<Order> {
        let windows = self.dma.windows().map(|window| {
            Order::Memory(MemoryChange::Map {
                iova: window.iova,
                len: window.len,
                backing: window.backing,
                prot: window.prot,
            })
        });
        let sinks = self.irqs.sinks();
        let sinks = sinks.map(|(vector, sink)| Order::Vector(vector, Some(sink)));
        let mut orders: Vec<Order> = windows.chain(sinks).collect();
        if let Some((iova, memory)) = self.dma.device_memory() {
            orders.push(Order::DeviceMemory(Some((iova, memory.clone()))));
        }
        orders.push(Order::Master {
            on: self.queues.is_master(),
            masterings: self.queues.masterings(),
        });
        orders.push(Order::Features(self.settings.features));
        orders.push(Order::Enable {
            page_size: self.settings.page_size,
        });
        for (index, ns) in self.namespaces.iter().enumerate() {
            if ns.closed.is_some() {
                let status = ns.closed;
                orders.push(Order::Close { index, status });
            }
        }
        if let Some((shadow, eventidx)) = self.queues.shadow_buffers() {
            orders.push(Order::Shadow { shadow, eventidx });
        }
        if self.queues.halted() {
            orders.push(Order::StopFetching);
        }
        orders
    }
}
