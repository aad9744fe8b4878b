//! Restoring a controller from the state of another process.

use super::state::{
    AdminCompletion, AdminQueue, ControlState, FormatState, Identity, STATE_OLDEST_READ,
};
use super::stream::MovedState;
use super::{RestoreError, RetainedObjects, STATE_VERSION};
use crate::admin::{
    AsyncEvents, Erasure, Features, LbaStatus, Logs, Management, Notifications, SelfTest, Telemetry,
};
use crate::config::{ConfigError, ControllerConfig, NamespaceConfig};
use crate::control::{Controller, DoorbellPage};
use crate::engine::{MemoryChange, Order, Recovery, SavedCq, SavedSq};
use crate::stats::Counter;
use dma::Prot;
use nvme::Status;
use state_memory::StateMemory;
use std::num::NonZeroU32;
use volume::Io;

impl ControlState {
    pub(crate) fn read(state: &StateMemory) -> Result<Self, RestoreError> {
        let bytes = state.control().read()?.ok_or(RestoreError::Nothing)?;
        let form = |error: minicbor::decode::Error| RestoreError::Form(error.to_string());
        let mut saved: ControlState = minicbor::decode(&bytes).map_err(form)?;
        let version = saved.version;
        if version > STATE_VERSION {
            return Err(RestoreError::TooNew { version });
        }
        if version < STATE_OLDEST_READ {
            return Err(RestoreError::Contradiction("its version is none"));
        }
        if let Some(marks) = saved.logs.lba_status.as_mut().filter(|s| s.elsewhere) {
            let many = state.marks().map(|many| many.read()).transpose()?.flatten();
            let missing = RestoreError::Contradiction("the marked blocks are missing");
            marks.put_many(&many.ok_or(missing)?).map_err(form)?;
        }
        Ok(saved)
    }
}

fn same<T: PartialEq + std::fmt::Debug>(
    what: &'static str,
    before: &T,
    now: &T,
) -> Result<(), RestoreError> {
    if before == now {
        return Ok(());
    }
    Err(RestoreError::Differs {
        what,
        before: format!("{before:?}"),
        now: format!("{now:?}"),
    })
}

/// Returns why a state is not that of a controller that has stopped for a migration; `None` if it
/// is one.
fn not_movable(saved: &ControlState) -> Option<&'static str> {
    let commands = &saved.commands;
    let logs = &saved.logs;
    let erasure = logs.erasure.as_ref();
    let self_test = logs.self_test.as_ref();
    // Numbers of `LifecycleState::Resetting` and `Shutdown::Occurring`.
    let changes = saved.registers.state == 2 || saved.registers.shutdown == 1;
    let waits = !commands.aborts.is_empty()
        || !commands.deletions.is_empty()
        || !commands.cache_flushes.is_empty()
        || !commands.configuring.is_empty()
        || !commands.held.is_empty();
    if saved.sharing.is_some() {
        Some("it belongs to a subsystem")
    } else if commands.management.is_some() {
        Some("namespaces are being managed")
    } else if erasure.is_some_and(|e| e.running.is_some() || !e.locked.is_empty()) {
        Some("namespaces are being erased")
    } else if self_test.is_some_and(|test| test.running.is_some()) {
        Some("a self-test is running")
    } else if logs
        .lba_status
        .as_ref()
        .is_some_and(|status| status.elsewhere)
    {
        Some("the marked blocks are missing")
    } else if changes || waits || saved.registers.cmbmsc.is_some() {
        Some("the controller has not stopped")
    } else {
        None
    }
}

/// Identifiers of a controller and its namespaces, as their host knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShownIdentity {
    /// Serial number that the controller reports to its host.
    pub serial: String,
    /// Namespaces that are attached to the controller.
    pub namespaces: Vec<ShownNamespace>,
}

/// Identifiers and block size of a namespace, as its host knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShownNamespace {
    /// Namespace ID (NSID) under which the host knows the namespace.
    pub nsid: u32,
    /// Logical block size of the namespace in bytes.
    pub block_size: u32,
    /// Namespace Globally Unique Identifier; zeroes if the namespace has none.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier; zeroes if the namespace has none.
    pub eui64: [u8; 8],
    /// Namespace UUID; zeroes if the namespace has none.
    pub uuid: [u8; 16],
}

/// Returns the identity that the process which wrote `state` has shown to the controller's host;
/// `None` where the controller has not been shown to a host, or the state cannot be read.
pub fn shown_identity(state: &StateMemory) -> Option<ShownIdentity> {
    let saved = ControlState::read(state).ok()?;
    let namespaces = saved.identity.namespaces.iter();
    let namespaces = namespaces.map(|ns| ShownNamespace {
        nsid: ns.nsid,
        block_size: ns.block_size,
        nguid: ns.nguid,
        eui64: ns.eui64,
        uuid: ns.uuid,
    });
    Some(ShownIdentity {
        namespaces: namespaces.collect(),
        serial: saved.identity.serial,
    })
}

impl Identity {
    /// Checks that the configured disk is the one that the host knows; the `changing` namespaces
    /// may have their new formats by now. A namespace that is not configured any more was being
    /// detached when the previous process ended.
    fn check(&self, now: &Identity, changing: &[(u32, FormatState)]) -> Result<(), RestoreError> {
        same("model number", &self.model, &now.model)?;
        same("serial number", &self.serial, &now.serial)?;
        same("NQN", &self.subnqn, &now.subnqn)?;
        same("PCI IDs", &self.pci, &now.pci)?;
        same("controller ID", &self.cntlid, &now.cntlid)?;
        same("number of I/O queues", &self.io_queues, &now.io_queues)?;
        same("entries of queues", &self.queue_entries, &now.queue_entries)?;
        same("MDTS", &self.mdts, &now.mdts)?;
        let (before, after) = (&self.mapped_doorbells, &now.mapped_doorbells);
        same("mapped doorbells", before, after)?;
        let (before, after) = (&self.shadow_doorbells, &now.shadow_doorbells);
        same("shadow doorbells", before, after)?;
        let (before, after) = (&self.max_namespaces, &now.max_namespaces);
        same("number of namespaces", before, after)?;
        let (before, after) = (&self.cmb_size, &now.cmb_size);
        same("controller memory buffer", before, after)?;
        same("Boot Partitions", &self.boot_size, &now.boot_size)?;
        for before in &self.namespaces {
            let mut namespaces = now.namespaces.iter();
            let Some(now) = namespaces.find(|ns| ns.nsid == before.nsid) else {
                continue;
            };
            // The new format of an unfinished Format NVM may be stored already.
            let format = now.format.map(|format| (now.nsid, format));
            if !format.is_some_and(|format| changing.contains(&format)) {
                same("block size", &before.block_size, &now.block_size)?;
                if before.format.is_some() {
                    same("LBA format", &before.format, &now.format)?;
                }
            }
            same("NGUID", &before.nguid, &now.nguid)?;
            same("EUI-64", &before.eui64, &now.eui64)?;
            same("UUID", &before.uuid, &now.uuid)?;
        }
        Ok(())
    }
}

impl Controller {
    /// Restores a controller from the `state` of another process. That process and all its volume
    /// requests must have ended: commands in flight are given to the volumes again, and a late
    /// request of the old process would overtake newer ones. `page` is its doorbell page; `kept`
    /// finds guest memory and receivers of interrupts. All commands that were in flight are
    /// started again when this returns; [`Recovery`] has their number.
    ///
    /// # Errors
    /// [`RestoreError`] when the state is missing or unreadable, or does not fit the
    /// configuration. The client is to be disconnected then, and the controller created anew,
    /// with another state memory.
    pub fn restore(
        id: u16,
        config: ControllerConfig,
        namespaces: Vec<NamespaceConfig>,
        io: &Io,
        page: DoorbellPage,
        state: StateMemory,
        kept: &mut dyn RetainedObjects,
    ) -> Result<(Self, Recovery), RestoreError> {
        let saved = ControlState::read(&state)?;
        let mut controller = Self::make(id, config, namespaces, io, page, Some(state))?;
        let identity = controller.identity();
        let erasure = saved.logs.erasure.as_ref();
        let running = erasure.and_then(|erasure| erasure.running.as_ref());
        let changing = running.map_or_else(Vec::new, |running| running.changes());
        if changing.iter().any(|(_, format)| format.check().is_err()) {
            return Err(RestoreError::Contradiction("there can be no such format"));
        }
        let changing = changing.into_iter().map(|(nsid, to)| (nsid, to.into()));
        let mut changing: Vec<(u32, FormatState)> = changing.collect();
        if let Some(sharing) = &saved.sharing {
            let host = controller.host().map(|host| *host.bytes());
            same("Host Identifier", &Some(sharing.host), &host)?;
            // Another controller may have chosen the format of a shared namespace.
            let now = identity.namespaces.iter();
            changing.extend(now.filter_map(|ns| Some((ns.nsid, ns.format?))));
        }
        saved.identity.check(&identity, &changing)?;
        controller.restore_memory(kept)?;
        controller.restore_interrupts(&saved, kept)?;
        controller.restore_control(&saved)?;
        controller.restore_memory_buffer(&saved, kept)?;
        let recovery = controller.restore_queues(&saved)?;
        controller.restore_commands(&saved)?;
        if let Some(sharing) = &saved.sharing {
            controller.restore_sharing(sharing);
        }
        controller.compare_namespaces(&saved.identity, &identity);
        controller.settle();
        controller.engine.resume();
        Ok((controller, recovery))
    }

    /// Takes over the state of a guest that has migrated here.
    pub(crate) fn load(&mut self, moved: &mut MovedState) -> Result<(), RestoreError> {
        if let Some(why) = not_movable(&moved.control) {
            return Err(RestoreError::Contradiction(why));
        }
        let identity = self.identity();
        moved.limit(&identity)?;
        let saved = &moved.control;
        saved.identity.check(&identity, &[])?;
        let count = identity.namespaces.len();
        same(
            "number of namespaces",
            &saved.identity.namespaces.len(),
            &count,
        )?;
        let nsids: Vec<u32> = identity.namespaces.iter().map(|ns| ns.nsid).collect();
        // Marks of an earlier guest are not this one's.
        self.unmark_all(&nsids);
        self.engine.irqs.restore(&saved.interrupts);
        self.restore_control(saved)?;
        if let Some((shadow, eventidx)) = saved.shadow {
            self.engine.restore_shadow(shadow, eventidx);
        }
        let (cqs, sqs) = self.check_queues(saved)?;
        let contradiction = RestoreError::Contradiction("a queue is not where it was");
        let installed = self.engine.install_moved(&cqs, &sqs, &moved.queues);
        installed.ok_or(contradiction)?;
        cqs.into_iter().for_each(|cq| self.queues.add_cq(cq));
        sqs.into_iter().for_each(|sq| self.queues.add_sq(sq));
        if let Some(admin) = &saved.admin_queue {
            self.engine.journal.restore_admin(admin.posted);
        }
        self.restore_commands(saved)?;
        self.compare_namespaces(&saved.identity, &identity);
        Ok(())
    }

    fn restore_memory(&mut self, kept: &mut dyn RetainedObjects) -> Result<(), RestoreError> {
        let windows = self.survival.iter().flat_map(|s| s.windows());
        for window in windows.collect::<Vec<_>>() {
            let iova = window.iova;
            let backing = match window.memory {
                None => None,
                Some(memory) => {
                    let what = "a file of guest memory";
                    let number = memory.number.ok_or(RestoreError::NotKept { what })?;
                    let end = memory.offset.checked_add(window.len);
                    let end = end.ok_or(RestoreError::Contradiction("a window overflows"))?;
                    let found = kept.memory(number, end, window.write);
                    let found = found.ok_or(RestoreError::NotKept { what })?;
                    Some((found, memory.offset))
                }
            };
            let map = Order::Memory(MemoryChange::Map {
                iova,
                len: window.len,
                backing,
                prot: Prot {
                    read: window.read,
                    write: window.write,
                },
            });
            let mapped = self.engine.apply(map);
            mapped.map_err(|error| RestoreError::Window { iova, error })?;
        }
        Ok(())
    }

    fn restore_memory_buffer(
        &mut self,
        saved: &ControlState,
        kept: &mut dyn RetainedObjects,
    ) -> Result<(), RestoreError> {
        if self.cmb.is_none() {
            return Ok(());
        }
        let what = "the controller memory buffer";
        let contradiction = RestoreError::Contradiction("CMBMSC is not there");
        let cmbmsc = saved.registers.cmbmsc.ok_or(contradiction)?;
        let file = kept.memory_buffer().ok_or(RestoreError::NotKept { what })?;
        self.restore_cmb(cmbmsc, file)
            .map_err(|error| RestoreError::Config(ConfigError::MemoryBuffer(error)))
    }

    fn restore_interrupts(
        &mut self,
        saved: &ControlState,
        kept: &mut dyn RetainedObjects,
    ) -> Result<(), RestoreError> {
        let mut receiver = |number: u32| {
            let found = NonZeroU32::new(number).and_then(|number| kept.receiver(number));
            let what = "a receiver of interrupts";
            found.ok_or(RestoreError::NotKept { what })
        };
        for &(vector, number) in &saved.interrupts.vectors {
            let sink = receiver(number)?;
            let _ = self.engine.apply(Order::Vector(vector, Some(sink)));
        }
        if let Some(number) = saved.interrupts.pin {
            let sink = receiver(number)?;
            self.engine.irqs.set_pin(Some(sink));
        }
        self.engine.irqs.restore(&saved.interrupts);
        Ok(())
    }

    /// Restores the parts of the control state that depend on no other part.
    fn restore_control(&mut self, saved: &ControlState) -> Result<(), RestoreError> {
        self.pci.restore(&saved.pci);
        self.obey_command_register();
        self.admin.features = Features::restore(&saved.features);
        self.apply_features();
        self.set_keep_alive(saved.features.keep_alive);
        let logs = &saved.logs;
        self.admin.logs = Logs::restore(&logs.errors, &logs.changed, logs.powered_on);
        if let Some(saved) = &logs.telemetry {
            self.admin.telemetry = Telemetry::restore(saved);
        }
        if let Some(saved) = &logs.self_test {
            self.admin.self_test = SelfTest::restore(saved);
        }
        if let Some(saved) = &logs.erasure {
            self.admin.erasure = Erasure::restore(saved);
            self.restore_erasure();
        }
        if let Some(saved) = &logs.persistent_events {
            self.restore_persistent_events(saved);
        }
        if let Some(saved) = &logs.notifications {
            self.admin.notifications = Notifications::restore(saved);
        }
        if let Some(saved) = &logs.lba_status {
            self.admin.lba_status = LbaStatus::restore(saved);
            self.restore_marks(&saved.marks);
        }
        let stats = &self.engine.stats;
        let counters = logs.counters;
        stats.media_errors.set(counters.media_errors);
        stats.error_log_entries.set(counters.error_log_entries);
        stats.power_cycles.set(counters.power_cycles);
        stats.unsafe_shutdowns.set(counters.unsafe_shutdowns);
        // The saved counts may include those of this process, from which the guest once migrated.
        let before = &stats.before;
        let add = |before: &Counter, saved: u64, now: u64| {
            before.set(before.get().wrapping_add(saved).wrapping_sub(now));
        };
        add(&before.reads, counters.reads, stats.host_reads());
        add(&before.writes, counters.writes, stats.host_writes());
        add(&before.bytes_read, counters.bytes_read, stats.bytes_read());
        add(
            &before.bytes_written,
            counters.bytes_written,
            stats.bytes_written(),
        );
        add(&before.busy_ns, counters.busy_ns, stats.busy_ns());
        let commands = &saved.commands;
        let (parked, pending) = (&commands.parked, &commands.pending);
        self.admin.events = AsyncEvents::restore(parked, pending, commands.masked);
        self.admin.cache_flushes = commands.cache_flushes.clone();
        self.admin.rearm();
        self.restore_registers(&saved.registers)
            .ok_or(RestoreError::Contradiction("there is no such state"))
    }

    fn restore_queues(&mut self, saved: &ControlState) -> Result<Recovery, RestoreError> {
        if let Some((shadow, eventidx)) = saved.shadow {
            self.engine.restore_shadow(shadow, eventidx);
        }
        let (cqs, sqs) = self.check_queues(saved)?;
        let fetched = saved.admin_queue.as_ref().map_or(0, |admin| admin.fetched);
        let contradiction = RestoreError::Contradiction("a queue is not where it was");
        let recovered = self.engine.recover(&cqs, &sqs, fetched);
        let recovered = recovered.ok_or(contradiction)?;
        cqs.into_iter().for_each(|cq| self.queues.add_cq(cq));
        sqs.into_iter().for_each(|sq| self.queues.add_sq(sq));
        let contradiction = RestoreError::Contradiction("too many commands were in flight");
        self.engine.replay(recovered).ok_or(contradiction)
    }

    /// Checks that the saved queues are ones that this controller can have.
    fn check_queues(
        &self,
        saved: &ControlState,
    ) -> Result<(Vec<SavedCq>, Vec<SavedSq>), RestoreError> {
        let contradiction = RestoreError::Contradiction("there can be no such queue");
        let largest = |qid: u16| match qid {
            0 => 4096,
            _ => self.config.queue_entries,
        };
        let fits = |qid, size| qid <= self.config.io_queues && (2..=largest(qid)).contains(&size);
        let cqs = saved.cqs.iter().map(|cq| SavedCq {
            qid: cq.qid,
            iova: cq.iova,
            size: cq.size,
            vector: cq.vector,
        });
        let sqs = saved.sqs.iter().map(|sq| SavedSq {
            qid: sq.qid,
            cqid: sq.cqid,
            iova: sq.iova,
            size: sq.size,
        });
        let (cqs, sqs): (Vec<_>, Vec<_>) = (cqs.collect(), sqs.collect());
        let mut numbers: Vec<u16> = cqs.iter().map(|cq| cq.qid).collect();
        let mut sq_numbers: Vec<u16> = sqs.iter().map(|sq| sq.qid).collect();
        let ordered = |numbers: &mut Vec<u16>| {
            numbers.sort_unstable();
            numbers.windows(2).all(|pair| pair.first() != pair.last())
        };
        let vectors = self.engine.irqs.vectors();
        let sane = ordered(&mut numbers)
            && ordered(&mut sq_numbers)
            && cqs
                .iter()
                .all(|cq| fits(cq.qid, cq.size) && cq.vector.is_none_or(|vector| vector < vectors))
            && sqs.iter().all(|sq| {
                fits(sq.qid, sq.size)
                    && numbers.binary_search(&sq.cqid).is_ok()
                    && (sq.qid == 0) == (sq.cqid == 0)
            })
            && (self.has_queues() || (cqs.is_empty() && sqs.is_empty()))
            && saved.admin_queue.is_some() == sq_numbers.first().is_some_and(|qid| *qid == 0)
            && (saved.admin_queue.is_some() || !self.is_ready_state());
        if sane {
            Ok((cqs, sqs))
        } else {
            Err(contradiction)
        }
    }

    /// Restores admin commands without a completion, and restarts the work they wait for.
    fn restore_commands(&mut self, saved: &ControlState) -> Result<(), RestoreError> {
        let commands = &saved.commands;
        let (posting, posted) = match &saved.admin_queue {
            Some(admin) => self.not_posted(admin)?,
            None => (&[][..], self.engine.journal.admin_posted),
        };
        self.engine.journal.restore_admin(posted);
        self.endings.extend(posting);
        if let Some(saved) = &commands.management {
            let contradiction =
                RestoreError::Contradiction("namespaces were managed in no known way");
            self.admin.management = Management::restore(saved).ok_or(contradiction)?;
            self.admin.rearm();
        }
        let outstanding = posting.len()
            + self.admin.events.parked()
            + commands.aborts.len()
            + commands.deletions.len()
            + commands.cache_flushes.len()
            + commands.configuring.len()
            + usize::from(self.admin.erasure.format().is_some())
            + self.admin.management.outstanding()
            + commands.held.len()
            + saved
                .sharing
                .as_ref()
                .map_or(0, |sharing| sharing.persistence.len());
        // The engine's bound applies; without a queue, no command is outstanding.
        let most = saved.admin_queue.as_ref().map_or(0, |_| 4096);
        if outstanding > most {
            let many = "more admin commands wait than there can be";
            return Err(RestoreError::Contradiction(many));
        }
        self.engine.restore_admin_outstanding(outstanding as u32);
        for held in &commands.held {
            if let Some(command) = held.command() {
                self.admission.hold(command);
            }
        }
        // The engines use the buffers by now.
        for &cid in &commands.configuring {
            self.finish_admin(cid, Status::SUCCESS, 0);
        }
        for &(qid, cid) in &commands.deletions {
            self.admin.deletions.push((qid, cid));
            if self.sq_exists(qid) {
                self.delete_sq(qid);
            } else {
                self.sq_deleted(qid);
            }
        }
        self.restore_aborts(&commands.aborts);
        self.resume_life();
        Ok(())
    }

    /// Returns the admin completions that the host does not have yet, and the number posted
    /// before. Those posted since the commit are the first of them. All were counted, except
    /// possibly the last, which the tail shows.
    fn not_posted<'a>(
        &self,
        admin: &'a AdminQueue,
    ) -> Result<(&'a [AdminCompletion], u64), RestoreError> {
        let contradiction = RestoreError::Contradiction("the admin queue is not where it was");
        let (Some((tail, phase)), Some(size)) = (
            self.engine.queues.admin_tail(),
            self.queues.cqs().next().map(|cq| cq.size),
        ) else {
            return Err(contradiction);
        };
        if admin.tail >= size {
            return Err(contradiction);
        }
        // Positions are within two turns of the ring, after which the phase repeats.
        let turns = u64::from(2 * size);
        let place = |tail: u32, phase: bool| u64::from(if phase { tail } else { tail + size });
        let behind = |posted: u64| (place(admin.tail, admin.phase) + posted) % turns;
        let counted = self.engine.journal.admin_posted.checked_sub(admin.posted);
        let most = admin.posting.len() as u64;
        let counted = counted.filter(|counted| *counted <= most);
        let found = counted
            .into_iter()
            .flat_map(|counted| counted..=counted + 1);
        let posted = found
            .into_iter()
            .find(|posted| behind(*posted) == place(tail, phase));
        let posted = posted.ok_or(contradiction)?;
        match admin.posting.get(posted as usize..) {
            Some(rest) => Ok((rest, admin.posted.saturating_add(posted))),
            None => Err(RestoreError::Contradiction(
                "more was posted than there was",
            )),
        }
    }

    /// Handles namespaces that were resized or added while no process served them, or that the
    /// previous process has stored a new format of.
    fn compare_namespaces(&mut self, before: &Identity, now: &Identity) {
        for ns in &now.namespaces {
            let known = before.namespaces.iter().find(|old| old.nsid == ns.nsid);
            let reformatted = known.is_some_and(|old| old.is_reformatted(ns));
            if reformatted && !self.is_shared() {
                // Marks of blocks that no longer exist are removed.
                self.unmark_all(&[ns.nsid]);
            }
            if reformatted || known.is_none_or(|old| old.blocks != ns.blocks) {
                self.tell_changed(ns.nsid);
            }
        }
        for old in &before.namespaces {
            if now.namespaces.iter().all(|ns| ns.nsid != old.nsid) {
                self.forget_namespace(old.nsid);
            }
        }
    }
}
