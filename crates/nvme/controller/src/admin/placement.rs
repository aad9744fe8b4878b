//! The control half of Flexible Data Placement ("NVMe Base 2.1", 8.1.10): log pages, features, and
//! the Data Placement directive (ibid., 8.1.8).
//!
//! Each namespace with placement handles is an Endurance Group by itself, identified by its NSID,
//! with one reclaim group and one configuration. The host can change the configuration only while
//! the group has no namespace, therefore never ("NVMe Base 2.1", 5.1.25.1, Flexible Data Placement:
//! Command Sequence Error). The directive is initially enabled, as hosts expect; they may disable
//! it.
//!
//! Values that hosts set are stored with the counts, and survive resets. No asynchronous event
//! announces the FDP Events log page: hosts poll it.

use super::{AdminOutcome, AdminResult, INVALID_FIELD};
use crate::control::Controller;
use crate::engine::Namespace;
use crate::placed::PlacementState;
use crate::prefix;
use nvme::cmd::admin::{
    DirectiveCdw11, DirectiveParameters, EnableDirectiveCdw12, FeatureSelect, GetFeaturesCdw10,
    GetLogPage,
};
use nvme::cmd::io::DirectiveType;
use nvme::feature::{FdpEventDescriptor, FdpEventsCdw11, FdpMode};
use nvme::identify::EnduranceGroupList;
use nvme::log::{
    EnduranceGroup, FDP_EVENTS, FdpAttributes, FdpConfiguration, FdpConfigurations, FdpEvent,
    FdpEventFlags, FdpEventType, FdpEventsHeader, FdpStatistics, HandleUsage, HandleUsageHeader,
    ReclaimUnitHandle, ReclaimUnitHandleAttributes, ReclaimUnitHandleType,
};
use nvme::{Command, Status};
use placement::{EventSet, SUPPORTED_EVENTS};
use zerocopy::{FromZeros, IntoBytes};

/// Value of the Flexible Data Placement feature, which is always enabled (FDPE).
const MODE: FdpMode = FdpMode::new().with_fdpe(true);

/// Returns the bit mask of these directive types, as Directive Receive reports it.
fn directives(types: &[DirectiveType]) -> [u8; 32] {
    let mut bits = [0; 32];
    if let Some(first) = bits.first_mut() {
        *first = types.iter().fold(0, |all, ty| all | 1 << (ty.0 & 7));
    }
    bits
}

/// Returns the ID of a namespace's Endurance Group (ENDGID); 0 when it belongs to none.
pub(super) fn group_of(ns: &Namespace) -> u16 {
    let group = ns.is_placed().then(|| u16::try_from(ns.config.nsid).ok());
    group.flatten().unwrap_or(0)
}

impl Controller {
    /// Returns whether any namespace has placement handles.
    pub(super) fn has_placement(&self) -> bool {
        self.engine.offer().placed
    }

    /// Returns the IDs of the Endurance Groups, starting at `from`.
    pub(super) fn endurance_groups(&self, from: u16) -> EnduranceGroupList {
        let groups = self.active().map(group_of);
        let mut groups: Vec<u16> = groups.filter(|group| *group >= from.max(1)).collect();
        groups.sort_unstable();
        EnduranceGroupList::from_iter(groups)
    }

    /// Returns the namespace that forms this Endurance Group, and its data placement state.
    fn group(&self, endgid: u16) -> Result<(&Namespace, &PlacementState), Status> {
        let mut namespaces = self.active();
        let found = namespaces.find(|ns| endgid != 0 && group_of(ns) == endgid);
        let state = found.and_then(|ns| Some((ns, ns.config.placement.as_deref()?)));
        state.ok_or(INVALID_FIELD)
    }

    /// Returns the data placement state of a namespace, or FDP Disabled if it has no placement
    /// handles.
    fn placement_under(&self, nsid: u32) -> Result<&PlacementState, Status> {
        let index = self.engine.namespaces.index_of(nsid)?;
        let ns = self.engine.namespaces.get(index);
        let state = ns.and_then(|ns| ns.config.placement.as_deref());
        state.ok_or(Status::FDP_DISABLED.with_dnr(true))
    }

    // ---- log pages

    /// Returns the Endurance Group Information log page. Reads are counted only for the whole
    /// controller (SMART).
    pub(super) fn endurance_group_log(&self, get: &GetLogPage) -> Result<Vec<u8>, Status> {
        let (ns, state) = self.group(get.lsi)?;
        let placement = state.get();
        let units = |bytes: u64| EnduranceGroup::units(bytes.into()).into();
        let mut log = EnduranceGroup::new_zeroed();
        log.avsp = 100;
        log.avspt = 10;
        log.duw = units(placement.host_bytes());
        log.muw = units(placement.media_bytes());
        log.tegcap = (u128::from(ns.blocks) << ns.shift).into();
        Ok(log.as_bytes().to_vec())
    }

    /// Returns the FDP Configurations log page, which has one configuration.
    pub(super) fn fdp_configurations(&self, get: &GetLogPage) -> Result<Vec<u8>, Status> {
        let (ns, state) = self.group(get.lsi)?;
        let geometry = state.get().geometry();
        let handle = ReclaimUnitHandle {
            ruht: ReclaimUnitHandleType::INITIALLY_ISOLATED,
            ..Default::default()
        };
        let handles = usize::from(geometry.handles);
        let size = size_of::<FdpConfiguration>() + handles * size_of::<ReclaimUnitHandle>();
        // The size is at most 576 bytes.
        let size = size.next_multiple_of(8) as u16;
        let configuration = FdpConfiguration {
            dsze: size.into(),
            fdpa: FdpAttributes::new()
                .with_fdpvwc(ns.volatile_cache)
                .with_fdpcv(true),
            nrg: 1.into(),
            nruh: geometry.handles.into(),
            maxpids_z: (geometry.handles - 1).into(),
            nns: 1.into(),
            runs: geometry.unit_bytes().into(),
            ..Default::default()
        };
        let whole = size_of::<FdpConfigurations>() + usize::from(size);
        let header = FdpConfigurations {
            sze: (whole as u32).into(),
            ..Default::default()
        };
        let mut page = [header.as_bytes(), configuration.as_bytes()].concat();
        page.extend(handle.as_bytes().repeat(handles));
        page.resize(whole, 0);
        Ok(page)
    }

    /// Returns the Reclaim Unit Handle Usage log page. All handles belong to the namespace.
    pub(super) fn handle_usage(&self, get: &GetLogPage) -> Result<Vec<u8>, Status> {
        let (_, state) = self.group(get.lsi)?;
        let handles = state.get().geometry().handles;
        let header = HandleUsageHeader {
            nruh: handles.into(),
            ..Default::default()
        };
        let usage = HandleUsage {
            ruha: ReclaimUnitHandleAttributes::HOST_SPECIFIED,
            ..Default::default()
        };
        let mut page = header.as_bytes().to_vec();
        page.extend(usage.as_bytes().repeat(handles.into()));
        Ok(page)
    }

    /// Returns the FDP Statistics log page. The controller itself only writes copied data; it moves
    /// and erases nothing.
    pub(super) fn fdp_statistics(&self, get: &GetLogPage) -> Result<Vec<u8>, Status> {
        let (_, state) = self.group(get.lsi)?;
        let log = FdpStatistics {
            hbmw: u128::from(state.get().host_bytes()).into(),
            mbmw: u128::from(state.get().media_bytes()).into(),
            ..Default::default()
        };
        Ok(log.as_bytes().to_vec())
    }

    /// Returns the FDP Events log page for host events or for controller events, of which there are
    /// none.
    pub(super) fn fdp_events(&self, get: &GetLogPage) -> Result<Vec<u8>, Status> {
        let (_, state) = self.group(get.lsi)?;
        let host = get.lsp & 1 != 0;
        let events = state.get().events();
        let events = events.into_iter();
        let of_host = |event: &placement::Event| event.ty < FdpEventType::MEDIA_REALLOCATED;
        let events: Vec<FdpEvent> = events
            .filter(|event| of_host(event) == host)
            .map(|event| self.fdp_event(&event))
            .collect();
        let header = FdpEventsHeader {
            numfdpe: (events.len() as u32).into(),
            ..Default::default()
        };
        let mut page = header.as_bytes().to_vec();
        page.extend_from_slice(events.as_bytes());
        page.resize((1 + FDP_EVENTS) * size_of::<FdpEvent>(), 0);
        Ok(page)
    }

    fn fdp_event(&self, event: &placement::Event) -> FdpEvent {
        FdpEvent {
            fdpet: event.ty,
            fdpef: FdpEventFlags::new()
                .with_piv(true)
                .with_nsidv(true)
                .with_lv(true),
            pid: event.identifier.into(),
            timestamp: self.admin.features.timestamp_at(event.at),
            nsid: event.nsid.into(),
            ruhid: event.handle.into(),
            ..Default::default()
        }
    }

    // ---- features

    /// Returns the Flexible Data Placement feature of an Endurance Group.
    pub(super) fn fdp_mode(&self, command: &Command) -> Result<u32, Status> {
        self.group(command.cdw11.get() as u16)?;
        Ok(MODE.into_bits())
    }

    /// Executes Set Features for Flexible Data Placement. The value cannot be changed.
    pub(super) fn set_fdp_mode(&self, command: &Command) -> Result<(), Status> {
        self.group(command.cdw11.get() as u16)?;
        if FdpMode::from_bits(command.cdw12.get()) == MODE {
            Ok(())
        } else {
            Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr(true))
        }
    }

    /// Copies the event types of a placement handle to the host, each with its enabled state.
    /// Returns the number of descriptors.
    pub(super) fn fdp_event_types(&self, command: &Command) -> Result<u32, Status> {
        let (state, handle, wanted) = self.fdp_event_command(command)?;
        let select = GetFeaturesCdw10::from_bits(command.cdw10.get()).sel();
        let enabled = match select {
            FeatureSelect::DEFAULT => EventSet::NONE,
            _ => state.get().recorded(handle),
        };
        let descriptors = SUPPORTED_EVENTS.map(|fdpet| FdpEventDescriptor {
            fdpet,
            fdpeta: enabled.contains(fdpet).into(),
        });
        // The host may limit the number of descriptors.
        let room = match wanted {
            0 => descriptors.len(),
            room => room,
        };
        self.write_host(command, prefix(&descriptors, room).as_bytes())?;
        Ok(SUPPORTED_EVENTS.len() as u32)
    }

    /// Executes Set Features for FDP Events, which enables or disables event types of a handle.
    pub(super) fn set_fdp_event_types(&self, command: &Command) -> Result<(), Status> {
        let (state, handle, count) = self.fdp_event_command(command)?;
        let mut types = vec![0; count];
        if count > 0 {
            self.read_host(command, &mut types)?;
        }
        let mut types = types.into_iter().map(FdpEventType);
        let set = types.try_fold(EventSet::NONE, EventSet::with);
        let on = command.cdw12.get() & 1 != 0;
        let set = set.ok_or(INVALID_FIELD)?;
        state.get().record_events(handle, set, on);
        Ok(())
    }

    /// Returns the placement handle of an FDP Events command, and its number of event types.
    fn fdp_event_command(
        &self,
        command: &Command,
    ) -> Result<(&PlacementState, u16, usize), Status> {
        let cdw11 = FdpEventsCdw11::from_bits(command.cdw11.get());
        let state = self.placement_under(command.nsid.get())?;
        let geometry = state.get().geometry();
        let handle = geometry.handle_of(cdw11.phndl()).ok_or(INVALID_FIELD)?;
        Ok((state, handle, cdw11.noet().into()))
    }

    // ---- directives

    /// Executes Directive Receive, which returns the supported and the enabled directives.
    pub(super) fn directive_receive(&mut self, command: &Command) -> AdminResult {
        let cdw11 = DirectiveCdw11::from_bits(command.cdw11.get());
        let index = self.engine.namespaces.index_of(command.nsid.get())?;
        let parameters = cdw11.doper() == DirectiveCdw11::RETURN_PARAMETERS;
        if cdw11.dtype() != DirectiveType::IDENTIFY || !parameters {
            return Err(INVALID_FIELD);
        }
        let ns = self.engine.namespaces.get(index);
        let state = ns.and_then(|ns| ns.config.placement.as_deref());
        let both = &[DirectiveType::IDENTIFY, DirectiveType::DATA_PLACEMENT];
        let [first, ..] = both;
        let identify = std::slice::from_ref(first);
        let mut data = DirectiveParameters::new_zeroed();
        data.supported = directives(state.map_or(identify, |_| both));
        data.enabled = directives(match state {
            Some(state) if state.get().is_enabled() => both,
            _ => identify,
        });
        if state.is_some() {
            data.persistent = directives(&[DirectiveType::DATA_PLACEMENT]);
        }
        let bytes = data.as_bytes();
        let wanted = (u64::from(command.cdw10.get()) + 1) * 4;
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        self.write_host(command, bytes.get(..wanted).unwrap_or(bytes))?;
        Ok(AdminOutcome::Done(0))
    }

    /// Executes Directive Send, which enables or disables the Data Placement directive.
    pub(super) fn directive_send(&mut self, command: &Command) -> AdminResult {
        let cdw11 = DirectiveCdw11::from_bits(command.cdw11.get());
        let cdw12 = EnableDirectiveCdw12::from_bits(command.cdw12.get());
        let enable = cdw11.doper() == DirectiveCdw11::ENABLE;
        let identify = cdw11.dtype() == DirectiveType::IDENTIFY;
        self.engine.namespaces.index_of(command.nsid.get())?;
        if !identify || !enable || cdw12.dtype() != DirectiveType::DATA_PLACEMENT {
            return Err(INVALID_FIELD);
        }
        let state = self.placement_under(command.nsid.get())?;
        state.get().enable(cdw12.endir());
        Ok(AdminOutcome::Done(0))
    }
}
