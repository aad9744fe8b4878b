//! Orders of the control half to an engine, one for each control operation.
//!
//! The controller's own engine applies an order at once, an engine on another worker when that
//! worker drains its messages; both by [`Engine::apply`]. All engines, the controller's own
//! included, answer by [`Event`]s, so that the sender of an order need not know the engine.
//!
//! [`Event`]: super::Event

use super::queue::Cq;
use super::{Coalescing, Engine, MigratingQueues, Sq};
use crate::config::NamespaceConfig;
use crate::formats::BlockFormat;
use crate::irq::IrqSink;
use crate::metadata::MetadataState;
use dma::{DmaMap, MapError, Memory, Prot, SharedPages};
use nvme::Status;
use std::sync::Arc;

/// Order of the control half to an engine.
///
/// Orders are applied in the order in which they were given, and there is no other rule. A queue
/// installed after an unmap finds the memory gone; a queue that left before has released it when
/// the unmap is answered.
pub(crate) enum Order {
    // ---- to the one engine that the queue is in, or is to be in
    /// A new completion queue.
    InstallCq(u16, Box<Cq>),
    /// A new submission queue, where its completion queue is.
    InstallSq(u16, Box<Sq>),
    /// Answered by `Event::SqDrained`.
    DeleteSq(u16),
    DeleteCq(u16),
    /// Answered by `Event::AbortDone` or `Event::AbortMissed`.
    Abort {
        sqid: u16,
        cid: u16,
    },
    /// This completion queue migrates, with its submission queues: answered by `Event::Released` or
    /// `Event::MigrationCancelled`.
    Migrate(u16),
    /// The migration is cancelled, if the queue was not released yet: answered by the one of the
    /// two events that applies.
    CancelMigration,
    /// A command that changes marks ends, with this status or its own.
    EndMarking(u64, Option<Status>),
    /// Queues that another engine has released.
    InstallMigrated(Box<MigratingQueues>),

    // ---- to every engine
    /// Guest memory is mapped or unmapped.
    Memory(MemoryChange),
    /// The page of the doorbell registers is another one. There are no queues.
    Doorbells(Arc<SharedPages>),
    /// The controller memory buffer is at this address for commands, or is not there.
    DeviceMemory(Option<(u64, Memory)>),
    /// Bus Master Enable, and how often it was set so far. Clearing it takes memory away.
    Master {
        on: bool,
        masterings: u64,
    },
    /// Doorbell Buffer Config.
    Shadow {
        shadow: u64,
        eventidx: u64,
    },
    /// Commands in flight are to end early: Bus Master Enable was cleared a while ago.
    EndCommandsEarly,
    /// The namespace of this index is hidden from new commands; it is released when those in
    /// flight have ended ([`Engine::tidy`]).
    Detach(usize),
    /// Commands on detached namespaces are to end early.
    EndDetachedEarly,
    /// The namespace of this index has a new number of blocks.
    Resized {
        index: usize,
        blocks: u64,
    },
    /// The namespace of this index, which is closed, has a new format.
    Reformatted {
        index: usize,
        format: BlockFormat,
        metadata: Option<Arc<MetadataState>>,
        blocks: u64,
    },
    /// The namespace of this index is closed with this status for its commands; `None`: it is
    /// open again.
    Close {
        index: usize,
        status: Option<Status>,
    },
    /// Blocks of the namespace of this index were marked, or lost their marks.
    LookAtMarks(usize),
    /// The receiver of a vector's interrupts.
    Vector(u16, Option<Arc<dyn IrqSink>>),
    ForgetSinks,
    Features {
        write_cache: bool,
        coalescing: Coalescing,
        copy_formats: u16,
        lbafee: bool,
    },
    /// The controller was enabled.
    Enable {
        page_size: u64,
    },
    StopFetching,
    /// A flush on the controller's own account, by number: answered by `Event::Flushed`.
    Flush(u64),
    /// A controller-level reset, by number: it has ended when [`Engine::drained`] returns `true`.
    Stop(u64),

    // ---- to remote engines, which take them themselves
    /// A namespace is opened under this index. One that cannot be opened there is counted
    /// (`Progress::refused`).
    Attach(usize, Box<NamespaceConfig>),
    /// The controller was dropped: the engine ends once nothing is in flight.
    End,
}

/// A change of the guest's memory as the controller sees it.
#[derive(Clone)]
pub(crate) enum MemoryChange {
    Map {
        iova: u64,
        len: u64,
        /// `None` for memory that is not shared with this process.
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
    /// Returns whether the order takes memory away. Commands in flight may still touch that
    /// memory, until `Engine::dma.quiesced()` returns `true`.
    pub fn takes_memory_away(&self) -> bool {
        match self {
            Order::Memory(change) => !matches!(change, MemoryChange::Map { .. }),
            Order::Master { on, .. } => !on,
            _ => false,
        }
    }
}

impl Engine {
    /// Applies an order. Returns the bytes that a change of memory concerned, otherwise 0.
    ///
    /// # Errors
    /// [`MapError`] when a change of memory fails. Only the controller's own engine can fail,
    /// because it checks the change first.
    pub fn apply(&mut self, order: Order) -> Result<u64, MapError> {
        match order {
            Order::InstallCq(qid, cq) => self.install_cq(qid, *cq),
            Order::InstallSq(qid, sq) => self.install_sq(qid, *sq),
            Order::DeleteSq(qid) => self.delete_sq(qid),
            Order::DeleteCq(qid) => self.delete_cq(qid),
            Order::Abort { sqid, cid } => self.abort(sqid, cid),
            Order::Migrate(cqid) => self.begin_migration(cqid),
            Order::CancelMigration => self.cancel_migration(),
            Order::InstallMigrated(queues) => self.install_migrated(*queues),
            Order::Memory(change) => return self.change_memory(change),
            Order::Doorbells(page) => self.doorbells.replace(page),
            Order::DeviceMemory(at) => return self.set_device_memory(at).map(|()| 0),
            Order::Master { on, masterings } => self.set_master(on, masterings),
            Order::Shadow { shadow, eventidx } => self.configure_shadow(shadow, eventidx),
            Order::EndCommandsEarly => self.end_commands_early(),
            Order::Resized { index, blocks } => match self.namespaces.get_mut(index) {
                Some(ns) => ns.resized(blocks),
                None => self.broken("a namespace was resized that is not there"),
            },
            Order::Reformatted {
                index,
                format,
                metadata,
                blocks,
            } => match self.namespaces.get_mut(index) {
                Some(ns) => ns.reformatted(format, metadata, blocks),
                None => self.broken("a namespace was formatted that is not there"),
            },
            Order::Close { index, status } => self.close(index, status),
            Order::LookAtMarks(index) => self.look_at_marks(index),
            Order::EndMarking(tag, status) => self.end_marking(tag, status),
            Order::Vector(vector, sink) => self.irqs.set_vector(vector, sink),
            Order::ForgetSinks => self.irqs.forget_sinks(),
            Order::Features {
                write_cache,
                coalescing,
                copy_formats,
                lbafee,
            } => {
                self.write_cache = write_cache;
                self.coalescing = coalescing;
                self.copy_formats = copy_formats;
                self.enable_formats(lbafee);
            }
            Order::Enable { page_size } => self.enable(page_size),
            Order::StopFetching => self.stop_fetching(),
            Order::Flush(number) => self.flush_all(number),
            Order::Stop(_) => self.stop(),
            Order::Detach(index) => self.detach(index),
            Order::EndDetachedEarly => self.end_detached_early(),
            // The remote engine handles these itself; the controller's own engine gets none.
            Order::Attach(..) | Order::End => {}
        }
        Ok(0)
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

    /// Sets the location of the controller memory buffer, and looks up queues and shadow buffers
    /// again that lie in it, or in guest memory that it hides.
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

    /// Returns the orders that give a new engine without queues the state of this one.
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
            on: self.is_master(),
            masterings: self.masterings(),
        });
        orders.push(Order::Features {
            write_cache: self.write_cache,
            coalescing: self.coalescing,
            copy_formats: self.copy_formats,
            lbafee: self.lbafee,
        });
        orders.push(Order::Enable {
            page_size: self.page_size,
        });
        for (index, ns) in self.namespaces.iter().enumerate() {
            if ns.closed.is_some() {
                let status = ns.closed;
                orders.push(Order::Close { index, status });
            }
        }
        if let Some((shadow, eventidx)) = self.shadow_buffers() {
            orders.push(Order::Shadow { shadow, eventidx });
        }
        if self.halted() {
            orders.push(Order::StopFetching);
        }
        orders
    }
}
