//! Persistent Event log page ("NVMe Base 2.1", 5.1.12.1.14): a history of the controller that
//! survives resets and restarts of the process. The controllers of a subsystem share one log, in
//! which each event has the ID of its controller.
//!
//! A host reads a context: a copy of the log from the time when the context was established. Each
//! controller has a context of its own, so that hosts cannot block each other.

use super::{INVALID_FIELD, erase};
use crate::config::ControllerConfig;
use crate::control::Controller;
use crate::pool::PooledNamespace;
use crate::survival::state::{PersistentEventState, SavedEvent};
use nvme::Status;
use nvme::cmd::admin::GetLogPage;
use nvme::identify::{Fna, Nmic};
use nvme::log::{
    ChangeNamespace, FormatCompletion, FormatStart, HardwareError, HardwareErrorCode, Lid,
    PersistentEvent, PersistentEventAction as Action, PersistentEventHeader,
    PersistentEventType as Type, PowerOnOrReset, ReportingContext, SanitizeCompletion,
    SanitizeStart, SanitizeStatus, TimestampChange,
};
use std::collections::{BTreeMap, VecDeque};
use std::iter::once;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Maximum number of events. The oldest ones are dropped when a host keeps resetting the
/// controller.
const EVENTS: usize = 64;
/// Supported types of persistent events, each with the revision of its format.
const TYPES: [(Type, u8); 9] = [
    (Type::SMART, 1),
    (Type::TIMESTAMP_CHANGE, 1),
    (Type::POWER_ON_OR_RESET, 1),
    (Type::HARDWARE_ERROR, 1),
    (Type::CHANGE_NAMESPACE, 1),
    (Type::FORMAT_START, 1),
    (Type::FORMAT_COMPLETION, 1),
    (Type::SANITIZE_START, 1),
    (Type::SANITIZE_COMPLETION, 1),
];
/// Persistent Event Log Size (PELS) of Identify Controller, in units of 64 KiB; an upper limit of
/// the log's size.
pub(super) const SIZE_64K: u32 = 1;

/// A persistent event, with the ID of the controller that recorded it.
#[derive(Clone, Debug)]
struct Recorded {
    cntlid: u16,
    event: SavedEvent,
}

/// Persistent event log of a controller or a subsystem, newest event first.
#[derive(Debug, Default)]
pub(crate) struct EventLog(Mutex<Events>);

#[derive(Debug, Default)]
struct Events {
    /// Events, newest first.
    all: VecDeque<Recorded>,
    /// Number of all events so far, also in earlier processes.
    count: u64,
}

impl EventLog {
    /// Adds an event. If the log is full, the oldest event of the controller with the most events
    /// is dropped, so that no host can displace the events of another one.
    fn push(&self, cntlid: u16, event: SavedEvent) {
        let mut log = self.0.lock().unpoisoned();
        log.count += 1;
        let events = &mut log.all;
        events.push_front(Recorded { cntlid, event });
        if events.len() <= EVENTS {
            return;
        }
        let mut counts: BTreeMap<u16, usize> = BTreeMap::new();
        for event in events.iter() {
            *counts.entry(event.cntlid).or_default() += 1;
        }
        let most = counts.values().max();
        let oldest = events
            .iter()
            .rposition(|event| counts.get(&event.cntlid) == most);
        oldest.map(|at| events.remove(at));
    }

    fn all(&self) -> Vec<Recorded> {
        self.0.lock().unpoisoned().all.iter().cloned().collect()
    }

    /// Removes the newest event of a controller.
    fn undo(&self, cntlid: u16) {
        let events = &mut self.0.lock().unpoisoned().all;
        let newest = events.iter().position(|event| event.cntlid == cntlid);
        newest.map(|at| events.remove(at));
    }

    /// Restores the events that controller `cntlid` has saved, up to the limit, unless the log has
    /// newer ones of another controller of its subsystem.
    pub fn restore(&self, saved: &PersistentEventState, cntlid: u16) {
        let mut log = self.0.lock().unpoisoned();
        if saved.count < log.count {
            return;
        }
        let events = saved.events.iter().filter(|event| event.data.len() <= 512);
        let events = events.take(EVENTS).cloned();
        let events = events.map(|event| Recorded {
            cntlid: event.cntlid.unwrap_or(cntlid),
            event,
        });
        log.all = events.collect();
        log.count = saved.count;
    }
}

/// State of one controller for the Persistent Event log page: the log, and the host's context.
#[derive(Default)]
pub(crate) struct PersistentEvents {
    log: Arc<EventLog>,
    /// Generation number of the Persistent Event log, which changes whenever the host establishes a
    /// context.
    generation: u16,
    /// Log page as of the time when the context was established; `None` without a context.
    context: Option<Vec<u8>>,
}

impl PersistentEvents {
    /// Creates the state of a controller. The log is that of its subsystem, if it belongs to one.
    pub fn of(config: &ControllerConfig) -> Self {
        let place = config.subsystem.as_ref();
        let log = place.map(|place| place.subsystem.events().clone());
        PersistentEvents {
            log: log.unwrap_or_default(),
            ..Self::default()
        }
    }

    pub fn save(&self) -> PersistentEventState {
        let log = self.log.0.lock().unpoisoned();
        let events = log.all.iter().map(|one| SavedEvent {
            cntlid: Some(one.cntlid),
            ..one.event.clone()
        });
        PersistentEventState {
            events: events.collect(),
            count: log.count,
            generation: self.generation,
            context: self.context.is_some(),
        }
    }

    /// Restores the events that controller `cntlid` has saved. Those of a subsystem are there
    /// already ([`Subsystem::expect`](crate::Subsystem::expect)).
    fn restore(&mut self, saved: &PersistentEventState, cntlid: u16, is_shared: bool) {
        // A controller that continues was not reset when this process made it.
        self.log.undo(cntlid);
        if !is_shared {
            self.log = Arc::default();
            self.log.restore(saved, cntlid);
        }
        self.generation = saved.generation;
    }

    /// Releases the reporting context of the host, as a controller-level reset does.
    pub(super) fn reset(&mut self) {
        self.context = None;
    }
}

impl Controller {
    /// Adds an event of this type to the Persistent Event log, with the present time.
    fn record_event(&mut self, ty: Type, data: &(impl IntoBytes + Immutable)) {
        let event = SavedEvent {
            ty: ty.0,
            timestamp: self.admin.features.timestamp_bytes(),
            cntlid: None,
            data: data.as_bytes().to_vec(),
        };
        let log = &self.admin.persistent_events.log;
        log.push(self.config.cntlid, event);
        self.touch();
    }

    /// Records a power-on event, or the end of a controller-level reset.
    pub(crate) fn record_reset(&mut self) {
        let mut fr = [b' '; 8];
        let version = self.config.firmware.bytes();
        fr.iter_mut().zip(version).for_each(|(to, from)| *to = from);
        let powered_on = self.admin.logs.powered_on().elapsed().as_millis();
        let data = PowerOnOrReset {
            fr,
            cntlid: self.config.cntlid.into(),
            operation: self.admin.erasure.operation(),
            power_cycle: (self.engine.stats.power_cycles.get() as u32).into(),
            power_on_ms: u64::try_from(powered_on).unwrap_or(u64::MAX).into(),
            timestamp: self.admin.features.timestamp_bytes(),
            ..Default::default()
        };
        self.record_event(Type::POWER_ON_OR_RESET, &data);
    }

    /// Records that the host has set the timestamp. `previous` is the value before.
    pub(super) fn record_timestamp(&mut self, previous: [u8; 8]) {
        let since = self.admin.last_reset.elapsed().as_millis();
        let data = TimestampChange {
            previous,
            since_reset: u64::try_from(since).unwrap_or(u64::MAX).into(),
        };
        self.record_event(Type::TIMESTAMP_CHANGE, &data);
    }

    pub(crate) fn record_hardware_error(&mut self, code: HardwareErrorCode) {
        let data = HardwareError {
            code: code.0.into(),
            ..Default::default()
        };
        self.record_event(Type::HARDWARE_ERROR, &data);
    }

    /// Records the creation or deletion of a namespace. `cdw10` is dword 10 of the command.
    pub(super) fn record_namespace_change(&mut self, cdw10: u32, namespace: &PooledNamespace) {
        let data = ChangeNamespace {
            cdw10: cdw10.into(),
            nsze: namespace.blocks.into(),
            ncap: namespace.blocks.into(),
            flbas: self.flbas_of(namespace),
            nmic: Nmic::new().with_shrns(namespace.shared),
            nsid: namespace.nsid.into(),
            ..Default::default()
        };
        self.record_event(Type::CHANGE_NAMESPACE, &data);
    }

    pub(super) fn record_format_start(&mut self, nsid: u32, cdw10: u32) {
        let data = FormatStart {
            nsid: nsid.into(),
            fna: Fna::new(),
            cdw10: cdw10.into(),
            ..Default::default()
        };
        self.record_event(Type::FORMAT_START, &data);
    }

    /// Records the end of a format; `left` is the percentage that was left to do.
    pub(super) fn record_format_end(&mut self, nsid: u32, left: u8, status: Status) {
        let data = FormatCompletion {
            nsid: nsid.into(),
            smallest_fpi: left,
            status: u8::from(!status.is_success()),
            status_field: u32::from(status.into_bits()).into(),
            ..Default::default()
        };
        self.record_event(Type::FORMAT_COMPLETION, &data);
    }

    pub(super) fn record_sanitize_start(&mut self, cdw10: u32, cdw11: u32) {
        let data = SanitizeStart {
            sanicap: erase::sanicap(),
            cdw10: cdw10.into(),
            cdw11: cdw11.into(),
        };
        self.record_event(Type::SANITIZE_START, &data);
    }

    pub(super) fn record_sanitize_end(&mut self, sprog: u16, sstat: SanitizeStatus) {
        let data = SanitizeCompletion {
            sprog: sprog.into(),
            sstat,
            ..Default::default()
        };
        self.record_event(Type::SANITIZE_COMPLETION, &data);
    }

    /// Executes the command's action on the context, before the page is read. Returns `false` when
    /// the page is not to be read.
    pub(super) fn before_persistent_events(&mut self, get: &GetLogPage) -> Result<bool, Status> {
        let action = Action(get.lsp & 3);
        let establishes = matches!(
            action,
            Action::ESTABLISH_AND_READ | Action::ESTABLISH_AND_READ_HEADER
        );
        let exists = self.admin.persistent_events.context.is_some();
        if action == Action::RELEASE {
            self.admin.persistent_events.context = None;
            self.touch();
            return Ok(false);
        }
        if establishes == exists {
            return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr(true));
        }
        let header = size_of::<PersistentEventHeader>() as u64;
        if action == Action::ESTABLISH_AND_READ_HEADER && (get.bytes() != header || get.lpo != 0) {
            return Err(INVALID_FIELD);
        }
        if establishes {
            self.establish_context();
        }
        Ok(true)
    }

    fn establish_context(&mut self) {
        let log = &mut self.admin.persistent_events;
        log.generation = log.generation.wrapping_add(1);
        let context = self.persistent_event_page();
        self.admin.persistent_events.context = Some(context);
        self.touch();
    }

    /// Restores the log. If there was a context, it is established again from the present events.
    pub(crate) fn restore_persistent_events(&mut self, saved: &PersistentEventState) {
        let (is_shared, cntlid) = (self.is_shared(), self.config.cntlid);
        let events = &mut self.admin.persistent_events;
        events.restore(saved, cntlid, is_shared);
        if saved.context {
            self.establish_context();
        }
    }

    /// Returns the part of the Persistent Event log page in the host's context that `get` requests.
    ///
    /// # Errors
    /// Command Sequence Error when the host has no context.
    pub(super) fn persistent_event_log(&self, get: &GetLogPage) -> Result<Vec<u8>, Status> {
        let context = self.admin.persistent_events.context.clone();
        let mut page = context.ok_or(Status::COMMAND_SEQUENCE_ERROR.with_dnr(true))?;
        if Action(get.lsp & 3) == Action::READ
            && let Ok((header, _)) = PersistentEventHeader::mut_from_prefix(&mut page)
        {
            header.rci = header.rci.with_rce(true);
        }
        Ok(page)
    }

    fn persistent_event_page(&self) -> Vec<u8> {
        let (config, cntlid) = (&self.config, self.config.cntlid);
        let recorded = self.admin.persistent_events.log.all();
        let now = self.admin.features.timestamp_bytes();
        // The first event is a snapshot of the controller's present state.
        let event = SavedEvent {
            cntlid: None,
            ty: Type::SMART.0,
            timestamp: now,
            data: self.smart().as_bytes().to_vec(),
        };
        let snapshot = Recorded { cntlid, event };
        let mut events = Vec::new();
        for Recorded { cntlid, event } in once(&snapshot).chain(&recorded) {
            let revision = TYPES.iter().find(|(ty, _)| ty.0 == event.ty);
            let header = PersistentEvent {
                etype: Type(event.ty),
                // A newer version may have recorded types that this one does not know.
                etr: revision.map_or(0, |(_, revision)| *revision),
                ehl: PersistentEvent::LENGTH,
                cntlid: (*cntlid).into(),
                ets: event.timestamp,
                el: (event.data.len() as u16).into(),
                ..Default::default()
            };
            events.extend_from_slice(header.as_bytes());
            events.extend_from_slice(&event.data);
        }
        let size = size_of::<PersistentEventHeader>() + events.len();
        let mut header = PersistentEventHeader {
            lid: Lid::PERSISTENT_EVENT,
            tnev: (1 + recorded.len() as u32).into(),
            tll: (size as u64).into(),
            rv: PersistentEventHeader::REVISION,
            lhl: PersistentEventHeader::LENGTH.into(),
            ts: now,
            poh: u128::from(self.admin.logs.power_on_hours()).into(),
            pcc: self.engine.stats.power_cycles.get().into(),
            vid: config.pci.vendor.into(),
            ssvid: config.pci.subsystem_vendor.into(),
            sn: config.sn(),
            mn: config.mn(),
            subnqn: self.subnqn(),
            gnum: self.admin.persistent_events.generation.into(),
            rci: ReportingContext::new().with_rcpit(1),
            ..Default::default()
        };
        let can_be = |ty: &Type| *ty != Type::CHANGE_NAMESPACE || config.pool.is_some();
        let types = TYPES.iter().map(|(ty, _)| ty);
        types
            .filter(|ty| can_be(ty))
            .for_each(|ty| header.support(*ty));
        let mut page = header.as_bytes().to_vec();
        page.extend_from_slice(&events);
        page
    }
}
