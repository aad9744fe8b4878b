//! Initialization of a remote controller: connection of its Admin queue, enabling, and Identify
//! data of the controller and the namespace.

use super::client::{Client, Data};
use super::error::{ConnectError, ConversationError};
use super::queue::{Portal, Queue, connect_queue};
use nvme::cmd::admin::{Cns, Csi, GetLogPage, IdentifyCdw10, IdentifyCdw11, SetFeaturesCdw10};
use nvme::fabrics::{Property, property};
use nvme::feature::{AsyncEventConfig, Fid, NumberOfQueues};
use nvme::identify::{
    Descriptor, IdentifyController, IdentifyNamespace, NamespaceDescriptors, NvmController,
};
use nvme::log::{AnaGroup, AnaHeader, AnaState, Lid, ana_groups};
use nvme::regs::{self, Cap, Cc, Csts, Shn, Shst};
use nvme::{AdminOpcode, Command};
use nvme_volume::Namespace;
use std::time::{Duration, Instant};
use volume::AtomicWrites;
use zerocopy::FromBytes;

/// Maximum number of data bytes of one command; longer requests are split.
const MAX_DATA_LEN: u32 = 1 << 20;
/// Maximum number of bytes that one command zeroes or deallocates. A controller may implement it by
/// writing, and must complete it in time.
const MAX_ZEROED_BYTES: u64 = 64 << 20;
/// Maximum number of ANA groups for which the log page is read.
const MAX_ANA_GROUPS: u32 = 4096;
/// Log Specific Parameter of Get Log Page: the ANA log page without NSIDs (Return Groups Only).
const GROUPS_ONLY: u8 = 1;
/// Interval of checks on whether the controller is ready.
const READY_LOOK: Duration = Duration::from_millis(10);

/// Properties that a controller has to have, and the number of I/O queues to request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ControllerRequirements {
    pub nsid: u32,
    pub kato: Duration,
    /// Number of I/O queues to request from the controller.
    pub queues: u16,
}

/// Properties of the namespace and the subsystem on which outstanding requests rely. A controller
/// that replaces another one must have the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamespaceProperties {
    pub namespace: Namespace,
    /// Namespace UUID; zeroes if there is none.
    pub uuid: [u8; 16],
    /// Serial number that the subsystem reports.
    pub serial: String,
    pub model: String,
    /// Maximum number of data bytes of a command, a multiple of the block size.
    pub max_data: u32,
    /// Maximum number of bytes that one command can zero.
    pub max_zeroed: u32,
    /// Maximum number of bytes that one command can deallocate.
    pub max_deallocated: u32,
    /// Writes that the controller promises to be atomic.
    pub atomic: AtomicWrites,
    pub write_zeroes: bool,
    pub dataset_management: bool,
    pub volatile_cache: bool,
}

/// Connected and enabled controller, with its Admin queue.
#[derive(Debug)]
pub(crate) struct Controller {
    pub client: Client,
    pub cntlid: u16,
    pub facts: NamespaceProperties,
    pub ana: AnaState,
    /// Number of I/O queues that the controller allows this host.
    pub queues: u16,
    /// Maximum number of entries of a queue that the controller supports.
    pub entries: u32,
    /// Maximum number of bytes of in-capsule data on an I/O queue.
    pub in_capsule: u32,
    pub kato: Duration,
    /// Time after the host's last sign of life during which the controller may still execute
    /// commands.
    pub lingers: Duration,
    /// Time after the connections are closed during which the controller may still execute
    /// commands.
    pub quiesces: Duration,
    nsid: u32,
    reports_ana: bool,
}

impl Controller {
    /// Connects to a portal, and enables and identifies the controller.
    pub(crate) fn bring_up(
        portal: &Portal,
        wanted: ControllerRequirements,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let admin = Queue::admin(wanted.kato);
        let (client, connected) = connect_queue(portal, admin, deadline)?;
        Self::with(client, connected.cntlid(), wanted, deadline)
            .map_err(|trouble| portal.trouble(trouble))
    }

    fn with(
        mut client: Client,
        cntlid: u16,
        wanted: ControllerRequirements,
        deadline: Instant,
    ) -> Result<Self, ConversationError> {
        let cap = enable(&mut client, deadline)?;
        let page = identify(&mut client, Cns::CONTROLLER, 0)?;
        let id = IdentifyController::read_from_bytes(&page);
        let id = id.map_err(|_| ConversationError::Unusable("Identify Controller is too short"))?;
        if id.kas.get() == 0 {
            return Err(ConversationError::Unusable("it has no Keep Alive"));
        }
        if id.ioccsz.get() < 4 || id.iorcsz.get() < 1 {
            return Err(ConversationError::Unusable(
                "it gives no I/O queues: no size of capsules",
            ));
        }
        let queues = set_queues(&mut client, wanted.queues)?;
        let reports_ana = id.cmic.anars();
        configure_events(&mut client, &id)?;
        let page = 4096u32 << cap.mpsmin();
        let mdts = id.mdts_bytes(page).unwrap_or(u64::MAX);
        let facts = facts(&mut client, &id, wanted.nsid, page, mdts)?;
        let entries = u32::from(cap.mqes_z()) + 1;
        let mut controller = Self {
            client,
            cntlid,
            ana: AnaState::OPTIMIZED,
            queues,
            entries: match id.maxcmd.get() {
                0 => entries,
                most => entries.min(u32::from(most).max(2)),
            },
            in_capsule: id.ioccsz.get().saturating_mul(16).saturating_sub(64),
            kato: wanted.kato,
            lingers: lingers(&id, wanted.kato),
            quiesces: quiesces(&id),
            facts,
            nsid: wanted.nsid,
            reports_ana,
        };
        controller.read_ana()?;
        controller.client.request_event()?;
        Ok(controller)
    }

    /// Reads the ANA state of the namespace from the controller's log page.
    pub(crate) fn read_ana(&mut self) -> Result<(), ConversationError> {
        if !self.reports_ana {
            return Ok(());
        }
        let id = identify_namespace(&mut self.client, self.nsid)?;
        self.ana = ana_state(&mut self.client, id.anagrpid.get())?;
        Ok(())
    }

    /// Reads the current size of the namespace in bytes; 0 while the namespace is unusable.
    pub(crate) fn read_size(&mut self) -> Result<u64, ConversationError> {
        let id = identify_namespace(&mut self.client, self.nsid)?;
        match Namespace::parse(self.nsid, &id) {
            Ok(found) if found.block_shift == self.facts.namespace.block_shift => Ok(found.bytes()),
            Ok(_) => Err(ConversationError::Unusable(
                "the namespace's blocks have another size",
            )),
            // The namespace was deleted, or is temporarily unusable.
            Err(_) => Ok(0),
        }
    }

    /// Handles reported events. Returns `true` if one concerned the namespace: its size and state
    /// must then be read again.
    pub(crate) fn handle_events(&mut self) -> Result<bool, ConversationError> {
        use nvme::aen::{EventType, Notice};
        let mut concerns = false;
        while let Some(event) = self.client.next_event() {
            tracing::debug!(?event, "asynchronous event");
            let notice = (event.aet() == EventType::NOTICE).then_some(Notice(event.aei()));
            let len = match notice {
                Some(Notice::NAMESPACE_ATTRIBUTE_CHANGED | Notice::ANA_CHANGE) => {
                    concerns = true;
                    4096
                }
                _ => 512,
            };
            // Reading the log page of an event clears it, so that the next one can be reported. The
            // ANA log page is read completely later, together with the state, which also clears its
            // event.
            if event.lid() != Lid::SUPPORTED_LOG_PAGES && notice != Some(Notice::ANA_CHANGE) {
                let read = log_page(&mut self.client, event.lid(), 0, len, false);
                match read {
                    Ok(_) | Err(ConversationError::Status { .. }) => {}
                    Err(trouble) => return Err(trouble),
                }
            }
        }
        if self.client.event_requests() == 0 {
            self.client.request_event()?;
        }
        Ok(concerns)
    }

    /// Shuts the controller down in order, if it answers before the client's deadline.
    pub(crate) fn shut_down(&mut self) -> Result<(), ConversationError> {
        let cc = property_get(&mut self.client, regs::CC, false)?;
        let cc = Cc::from_bits(cc as u32).with_shn(Shn::NORMAL);
        property_set(&mut self.client, regs::CC, cc.into_bits())?;
        loop {
            let csts = property_get(&mut self.client, regs::CSTS, false)?;
            if Csts::from_bits(csts as u32).shst() == Shst::COMPLETE {
                return Ok(());
            }
            std::thread::sleep(READY_LOOK);
        }
    }
}

/// Returns the maximum time after the host's last sign of life during which a controller may still
/// execute commands ("NVMe Base 2.1", 9.6.2). It is the keep-alive time-out, plus the time that the
/// controller needs to end commands. The time-out counts twice if every command counts as a sign of
/// life, because the controller then checks only once per time-out.
fn lingers(id: &IdentifyController, kato: Duration) -> Duration {
    let granularity = Duration::from_millis(100) * u32::from(id.kas.get());
    let granularity = granularity.max(Duration::from_millis(100));
    let units = kato.as_millis().div_ceil(granularity.as_millis().max(1));
    let rounded = granularity.saturating_mul(u32::try_from(units).unwrap_or(u32::MAX));
    let times = if id.ctratt.tbkas() { 2 } else { 1 };
    rounded.saturating_mul(times) + quiesces(id)
}

/// Returns the time that the controller needs to end outstanding commands (Command Quiesce Time,
/// CQT).
fn quiesces(id: &IdentifyController) -> Duration {
    Duration::from_millis(id.cqt.get().into())
}

pub(super) fn property_get(
    client: &mut Client,
    at: u64,
    wide: bool,
) -> Result<u64, ConversationError> {
    let command = Property::get(0, at as u32, wide);
    let (entry, _) = client.execute("Property Get", command, Data::None)?;
    Ok(property(&entry))
}

fn property_set(client: &mut Client, at: u64, value: u32) -> Result<(), ConversationError> {
    let command = Property::set(0, at as u32, value);
    client
        .execute("Property Set", command, Data::None)
        .map(drop)
}

/// Enables the controller, waits until it is ready, and returns its capabilities (CAP).
pub(crate) fn enable(client: &mut Client, deadline: Instant) -> Result<Cap, ConversationError> {
    let cap = Cap::from_bits(property_get(client, regs::CAP, true)?);
    let cc = Cc::new()
        .with_en(true)
        .with_mps(cap.mpsmin())
        .with_iosqes(Command::SIZE_LOG2)
        .with_iocqes(nvme::Completion::SIZE_LOG2);
    property_set(client, regs::CC, cc.into_bits())?;
    loop {
        let bits = property_get(client, regs::CSTS, false)? as u32;
        let csts = Csts::from_bits(bits);
        if csts.rdy() && !csts.cfs() {
            return Ok(cap);
        }
        if csts.cfs() || Instant::now() >= deadline {
            return Err(ConversationError::NotReady(bits));
        }
        std::thread::sleep(READY_LOOK);
    }
}

fn identify(client: &mut Client, cns: Cns, nsid: u32) -> Result<Vec<u8>, ConversationError> {
    let mut command = Command::new(AdminOpcode::IDENTIFY.0, 0, nsid);
    command.cdw10 = IdentifyCdw10::new().with_cns(cns).into_bits().into();
    command.cdw11 = IdentifyCdw11::new().with_csi(Csi::NVM).into_bits().into();
    let (_, page) = client.execute("Identify", command, Data::In(4096))?;
    Ok(page)
}

fn identify_namespace(
    client: &mut Client,
    nsid: u32,
) -> Result<IdentifyNamespace, ConversationError> {
    let page = identify(client, Cns::NAMESPACE, nsid)?;
    IdentifyNamespace::read_from_bytes(&page)
        .map_err(|_| ConversationError::Unusable("Identify Namespace is too short"))
}

/// Reads the first bytes of a log page, as a whole number of dwords.
pub(crate) fn log_page(
    client: &mut Client,
    lid: Lid,
    lpo: u64,
    len: u32,
    retain: bool,
) -> Result<Vec<u8>, ConversationError> {
    log_page_with(
        client,
        GetLogPage {
            lid,
            lpo,
            rae: retain,
            ..GetLogPage::default()
        },
        len,
    )
}

fn log_page_with(
    client: &mut Client,
    log: GetLogPage,
    len: u32,
) -> Result<Vec<u8>, ConversationError> {
    let log = GetLogPage {
        numd_z: (len / 4).saturating_sub(1),
        ..log
    };
    let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, nvme::cmd::NSID_BROADCAST);
    log.apply(&mut command);
    let (_, page) = client.execute("Get Log Page", command, Data::In(len))?;
    Ok(page)
}

/// Returns the state of one ANA group from the ANA log page.
fn ana_state(client: &mut Client, group: u32) -> Result<AnaState, ConversationError> {
    let header = size_of::<AnaHeader>() as u32;
    let log = GetLogPage {
        lid: Lid::ANA,
        lsp: GROUPS_ONLY,
        ..GetLogPage::default()
    };
    let page = log_page_with(client, log, header)?;
    let groups = AnaHeader::read_from_prefix(&page).map_or(0, |(header, _)| header.nagd.get());
    let groups = u32::from(groups).min(MAX_ANA_GROUPS);
    let len = header + groups * size_of::<AnaGroup>() as u32;
    let page = log_page_with(client, log, len)?;
    let found = ana_groups(&page).find(|(found, _)| found.agid.get() == group);
    // A group that is missing from the list will appear soon.
    Ok(found.map_or(AnaState::CHANGE, |(group, _)| group.state.anas()))
}

fn set_queues(client: &mut Client, wanted: u16) -> Result<u16, ConversationError> {
    let wanted = wanted.clamp(1, 0xfffe) - 1;
    let ask = NumberOfQueues::new().with_nsq_z(wanted).with_ncq_z(wanted);
    let got = set_feature(client, Fid::NUMBER_OF_QUEUES, ask.into_bits())?;
    let got = NumberOfQueues::from_bits(got);
    Ok(got.nsq_z().min(got.ncq_z()).saturating_add(1))
}

fn set_feature(client: &mut Client, fid: Fid, value: u32) -> Result<u32, ConversationError> {
    let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    command.cdw10 = SetFeaturesCdw10::new().with_fid(fid).into_bits().into();
    command.cdw11 = value.into();
    let (entry, _) = client.execute("Set Features", command, Data::None)?;
    Ok(entry.dw0.get())
}

/// Enables the asynchronous events about changed namespaces and ANA states.
fn configure_events(client: &mut Client, id: &IdentifyController) -> Result<(), ConversationError> {
    let events = AsyncEventConfig::new()
        .with_nan(id.oaes.nsan())
        .with_anacn(id.oaes.anacn());
    if events.into_bits() == 0 {
        return Ok(());
    }
    match set_feature(client, Fid::ASYNC_EVENT_CONFIG, events.into_bits()) {
        // A controller without this feature sends no such events.
        Ok(_) | Err(ConversationError::Status { .. }) => Ok(()),
        Err(trouble) => Err(trouble),
    }
}

fn facts(
    client: &mut Client,
    id: &IdentifyController,
    nsid: u32,
    page: u32,
    mdts: u64,
) -> Result<NamespaceProperties, ConversationError> {
    let namespace = identify_namespace(client, nsid)?;
    let namespace = Namespace::parse(nsid, &namespace).map_err(ConversationError::Unusable)?;
    let block = namespace.block_size();
    let uuid = match identify(client, Cns::NAMESPACE_DESCRIPTORS, nsid) {
        Ok(list) => uuid(&list),
        Err(ConversationError::Status { .. }) => [0; 16],
        Err(trouble) => return Err(trouble),
    };
    let limits = match identify(client, Cns::IOCS_CONTROLLER, 0) {
        Ok(list) => NvmController::read_from_bytes(&list).unwrap_or_default(),
        // Before NVMe 2.0 this structure did not exist, and neither did such limits.
        Err(ConversationError::Status { .. }) => NvmController::default(),
        Err(trouble) => return Err(trouble),
    };
    // Rounds down to whole blocks, at least one.
    let whole = |bytes: u64, most: u64| -> u32 {
        let bytes = bytes.min(most) / u64::from(block) * u64::from(block);
        u32::try_from(bytes.max(block.into())).unwrap_or(block)
    };
    let blocks = 1u64 << (16 + namespace.block_shift);
    let pages = |limit: u8| match limit {
        0 => u64::MAX,
        limit => u64::from(page)
            .checked_shl(limit.into())
            .unwrap_or(u64::MAX),
    };
    let deallocated = match limits.dmrsl.get() {
        0 => u64::MAX,
        most => u64::from(most) << namespace.block_shift,
    };
    let sized = match limits.dmsl.get() {
        0 => u64::MAX,
        most => most.saturating_mul(block.into()),
    };
    let max_data = whole(mdts.min(blocks), MAX_DATA_LEN.into());
    Ok(NamespaceProperties {
        uuid,
        atomic: namespace.atomic_writes(id, max_data.into()),
        max_data,
        serial: String::from_utf8_lossy(id.sn.trimmed()).into_owned(),
        model: remote::printable(id.mn.trimmed()),
        max_zeroed: whole(pages(limits.wzsl).min(blocks), MAX_ZEROED_BYTES),
        max_deallocated: whole(deallocated.min(sized), MAX_ZEROED_BYTES),
        write_zeroes: id.oncs.nvmwzsv(),
        dataset_management: id.oncs.nvmdsmsv(),
        volatile_cache: id.vwc.vwcp(),
        namespace,
    })
}

fn uuid(list: &[u8]) -> [u8; 16] {
    let list = NamespaceDescriptors::read_from_bytes(list).unwrap_or_default();
    let found = list.iter().find_map(|descriptor| match descriptor {
        Descriptor::Uuid(uuid) => Some(uuid),
        _ => None,
    });
    found.unwrap_or_default()
}

impl NamespaceProperties {
    /// Returns the name of a property that differs, so that outstanding requests cannot continue on
    /// the other controller.
    pub(crate) fn differs(&self, other: &Self) -> Option<&'static str> {
        let (was, is) = (&self.namespace, &other.namespace);
        let names = |facts: &Self| (facts.namespace.nguid, facts.namespace.eui64, facts.uuid);
        let less = |was: bool, is: bool| was && !is;
        if names(self) != names(other) {
            Some("another namespace (NGUID, EUI-64 or UUID)")
        } else if names(self) == ([0; 16], [0; 8], [0; 16]) && self.serial != other.serial {
            Some("another subsystem (serial number), and its namespaces have no identifiers")
        } else if was.block_shift != is.block_shift {
            Some("the size of its blocks")
        } else if less(self.write_zeroes, other.write_zeroes)
            || less(self.dataset_management, other.dataset_management)
        {
            Some("it can do less (Write Zeroes or Dataset Management)")
        } else if less(other.volatile_cache, self.volatile_cache) {
            Some("it has a volatile write cache")
        } else if less(is.write_protected, was.write_protected) {
            Some("it is write protected")
        } else if other.max_data < self.max_data
            || other.max_zeroed < self.max_zeroed
            || other.max_deallocated < self.max_deallocated
        {
            Some("the controller's maximum command is too short")
        } else if other.atomic.unit() < self.atomic.unit() {
            Some("fewer of its writes are atomic")
        } else {
            None
        }
    }
}
