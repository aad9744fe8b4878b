//! Get Log Page ("NVMe Base 2.1", 5.1.12), and the contents of the log pages.

use super::{AdminOutcome, AdminResult, INVALID_FIELD, features, table};
use crate::control::Controller;
use crate::engine;
use crate::engine::commands::Offer;
use crate::prefix;
use crate::survival::Since;
use crate::survival::state::HeldCommand;
use nvme::aen::{AsyncEvent, ErrorEvent, EventType, SmartEvent};
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::admin::{Csi, GetLogPage};
use nvme::feature::Fid;
use nvme::identify::{Lpa, NsidList};
use nvme::log::{
    ActiveFirmware, CommandsSupported, CriticalWarning, ErrorInformation, FeatureEffects,
    FeaturesSupported, FirmwareSlot, Lid, LidSupported, ParameterErrorLocation, Smart,
    SupportedLogPages, data_units,
};
use nvme::status::StatusCodeType;
use nvme::{Command, Status};
use std::borrow::Cow;
use std::collections::{BTreeSet, VecDeque};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Number of entries of the Error Information log. (ELPE of Identify Controller is this value minus
/// one.)
pub(super) const ERROR_ENTRIES: usize = 64;
/// Composite temperature of SMART data in kelvins, a constant for a virtual disk.
const TEMPERATURE: u16 = 310;
/// Maximum number of bytes per Get Log Page command, unless the page itself is larger.
const MAX_LOG_BYTES: usize = 16384;

/// Table row of a log page. It determines Get Log Page, the Supported Log Pages log page, and LPA
/// of Identify Controller.
struct LogPage {
    lid: Lid,
    content: Content,
    /// Check and preparation before the page is read. Returns `false` when the page is not to be
    /// read.
    before: fn(&mut Controller, &GetLogPage) -> Result<bool, Status>,
    /// Function called after the host has read the page with Retain Asynchronous Event cleared.
    after: fn(&mut Controller),
    /// Bit of Log Page Attributes (LPA) in Identify Controller that reports support of the page.
    lpa: Lpa,
    /// Function that returns whether a controller supports the page.
    offered: fn(&Controller) -> bool,
}

/// Source of the contents of a log page.
enum Content {
    /// Function that builds the page for each Get Log Page command.
    Made(fn(&Controller, &GetLogPage, nsid: u32) -> Result<Vec<u8>, Status>),
    /// Function that returns a page that the controller stores, possibly a long one.
    There(fn(&Controller) -> &[u8]),
}

impl LogPage {
    const fn new(
        lid: Lid,
        content: fn(&Controller, &GetLogPage, nsid: u32) -> Result<Vec<u8>, Status>,
    ) -> Self {
        Self::of(lid, Content::Made(content))
    }

    const fn of(lid: Lid, content: Content) -> Self {
        LogPage {
            lid,
            content,
            before: |_, _| Ok(true),
            after: |_| {},
            lpa: Lpa::new(),
            offered: |_| true,
        }
    }

    const fn before(
        self,
        before: fn(&mut Controller, &GetLogPage) -> Result<bool, Status>,
    ) -> Self {
        LogPage { before, ..self }
    }

    const fn after(self, after: fn(&mut Controller)) -> Self {
        LogPage { after, ..self }
    }

    const fn lpa(self, lpa: Lpa) -> Self {
        LogPage { lpa, ..self }
    }

    const fn offered_if(self, offered: fn(&Controller) -> bool) -> Self {
        LogPage { offered, ..self }
    }
}

/// Table of all log pages that Get Log Page supports.
static LOG_PAGES: &[LogPage] = &[
    LogPage::new(Lid::SUPPORTED_LOG_PAGES, |c, _, _| {
        Ok(supported_log_pages(c))
    })
    .lpa(Lpa::new().with_mlps(true)),
    LogPage::new(Lid::ERROR_INFORMATION, |c, _, _| Ok(c.error_log()))
        .after(|c| c.clear_events(EventType::ERROR)),
    LogPage::new(Lid::SMART, |c, _, nsid| c.smart_log(nsid))
        .after(|c| c.clear_events(EventType::SMART)),
    LogPage::new(Lid::FIRMWARE_SLOT, |c, _, _| Ok(c.firmware_slots())),
    LogPage::new(Lid::CHANGED_NAMESPACE_LIST, |c, _, _| {
        Ok(c.changed_namespaces())
    })
    .after(|c| {
        c.admin.logs.changed.clear();
        c.clear_events(EventType::NOTICE);
    }),
    LogPage::new(Lid::COMMANDS_SUPPORTED, |c, get, _| {
        Ok(c.commands_supported(get.csi))
    })
    .lpa(Lpa::new().with_cses(true).with_mlps(true)),
    LogPage::new(Lid::DEVICE_SELF_TEST, |c, _, _| Ok(c.self_test_log())),
    LogPage::new(Lid::TELEMETRY_HOST, |c, get, _| {
        Ok(c.admin.telemetry.page(get.lid))
    })
    .before(Controller::before_telemetry)
    .lpa(Lpa::new().with_ts(true)),
    LogPage::new(Lid::TELEMETRY_CONTROLLER, |c, get, _| {
        Ok(c.admin.telemetry.page(get.lid))
    })
    .before(Controller::before_telemetry)
    .after(|c| {
        c.telemetry_read();
        c.clear_events(EventType::NOTICE);
    })
    .lpa(Lpa::new().with_ts(true)),
    LogPage::new(Lid::ENDURANCE_GROUP, |c, get, _| c.endurance_group_log(get))
        .offered_if(Controller::has_placement),
    LogPage::new(Lid::PERSISTENT_EVENT, |c, get, _| {
        c.persistent_event_log(get)
    })
    .before(Controller::before_persistent_events)
    .lpa(Lpa::new().with_pes(true)),
    LogPage::new(Lid::ANA, |c, get, _| {
        c.ana_log(get).ok_or(Status::INVALID_LOG_PAGE)
    })
    .after(|c| c.clear_events(EventType::NOTICE))
    .offered_if(|c| c.config.fabrics.is_some() || c.is_shared()),
    LogPage::new(Lid::LBA_STATUS, |c, _, _| Ok(c.lba_status_log()))
        .before(Controller::before_lba_status)
        .after(Controller::lba_status_read)
        .offered_if(Controller::reports_lbas),
    LogPage::of(
        Lid::BOOT_PARTITION,
        Content::There(Controller::boot_partition_log),
    )
    .offered_if(|c| c.config.boot.is_some()),
    LogPage::new(Lid::FEATURES_SUPPORTED, |c, _, _| {
        Ok(features_supported(c.engine.offer()))
    })
    .lpa(Lpa::new().with_mlps(true)),
    LogPage::new(Lid::FDP_CONFIGURATIONS, |c, get, _| {
        c.fdp_configurations(get)
    })
    .offered_if(Controller::has_placement),
    LogPage::new(Lid::RECLAIM_UNIT_HANDLE_USAGE, |c, get, _| {
        c.handle_usage(get)
    })
    .offered_if(Controller::has_placement),
    LogPage::new(Lid::FDP_STATISTICS, |c, get, _| c.fdp_statistics(get))
        .offered_if(Controller::has_placement),
    LogPage::new(Lid::FDP_EVENTS, |c, get, _| c.fdp_events(get))
        .offered_if(Controller::has_placement),
    LogPage::new(Lid::SANITIZE_STATUS, |c, _, _| Ok(c.sanitize_log()))
        .after(|c| c.clear_events(EventType::IO_COMMAND_SPECIFIC))
        .offered_if(|c| c.config.sanitizes()),
    LogPage::new(Lid::RESERVATION_NOTIFICATION, |c, _, _| {
        Ok(c.notification_log())
    })
    .after(Controller::notification_read)
    .offered_if(Controller::is_shared),
];

/// Returns the Log Page Attributes of Identify Controller.
pub(super) fn lpa() -> Lpa {
    // Get Log Page supports 32-bit lengths and an offset (extended data).
    let command = Lpa::new().with_lpeds(true).into_bits();
    let pages = LOG_PAGES.iter().map(|page| page.lpa.into_bits());
    Lpa::from_bits(pages.fold(command, |all, bits| all | bits))
}

/// Logs of a controller: errors, changed namespaces and power-on times. A controller reset does not
/// clear them.
pub(crate) struct Logs {
    errors: VecDeque<ErrorInformation>,
    changed: BTreeSet<u32>,
    powered_on: Since,
    /// Command Specific Information for the error log, if the current admin command fails.
    pub information: u64,
}

impl Logs {
    pub fn new() -> Self {
        Logs {
            errors: VecDeque::new(),
            changed: BTreeSet::new(),
            powered_on: Since::now(),
            information: 0,
        }
    }
}

impl Logs {
    /// Returns the logs for the next process: error entries, changed namespaces, and the wall clock
    /// time of power-on.
    pub fn save(&self) -> (Vec<HeldCommand>, Vec<u32>, u64) {
        let errors = self.errors.iter().map(|entry| {
            let bytes: &[u8; 64] = zerocopy::transmute_ref!(entry);
            HeldCommand(*bytes)
        });
        let changed = self.changed.iter().copied();
        (errors.collect(), changed.collect(), self.powered_on.wall())
    }

    /// Restores the logs saved by [`Logs::save`], up to the maximum number of entries.
    pub fn restore(errors: &[HeldCommand], changed: &[u32], powered_on: u64) -> Self {
        let entry = |raw: &HeldCommand| ErrorInformation::read_from_bytes(&raw.0).ok();
        Logs {
            errors: errors
                .iter()
                .take(ERROR_ENTRIES)
                .filter_map(entry)
                .collect(),
            changed: changed.iter().copied().filter(|n| *n <= 1024).collect(),
            powered_on: Since::from_wall(powered_on),
            information: 0,
        }
    }

    pub(super) fn powered_on(&self) -> Since {
        self.powered_on
    }

    pub(super) fn power_on_hours(&self) -> u64 {
        self.powered_on.elapsed().as_secs() / 3600
    }

    /// Adds a namespace to the Changed Attached Namespace List log page.
    pub(super) fn changed(&mut self, nsid: u32) {
        self.changed.insert(nsid);
    }
}

impl Controller {
    pub(super) fn get_log_page(&mut self, command: &Command) -> AdminResult {
        let get = GetLogPage::from_command(command);
        if get.ot {
            // None of the pages supports index offsets.
            return Err(INVALID_FIELD);
        }
        let row = log_pages(self).find(|row| row.lid == get.lid);
        let row = row.ok_or(Status::INVALID_LOG_PAGE.with_dnr(true))?;
        if !(row.before)(self, &get)? {
            return Ok(AdminOutcome::Done(0));
        }
        let page = match row.content {
            Content::Made(make) => Cow::Owned(make(self, &get, command.nsid.get())?),
            Content::There(page) => Cow::Borrowed(page(self)),
        };
        let len = usize::try_from(get.bytes()).map_err(|_| INVALID_FIELD)?;
        let offset = usize::try_from(get.lpo).map_err(|_| INVALID_FIELD)?;
        let rest = page.get(offset..).filter(|_| offset.is_multiple_of(4));
        let rest = rest.ok_or(INVALID_FIELD)?;
        // Bytes beyond the end of the page read as zeroes, for requests of reasonable length.
        let largest = page.len().min(self.config.max_transfer() as usize);
        if len > MAX_LOG_BYTES.max(largest) {
            return Err(INVALID_FIELD);
        }
        let mut data = prefix(rest, len).to_vec();
        data.resize(len, 0);
        self.write_host(command, &data)?;
        if !get.rae {
            (row.after)(self);
        }
        Ok(AdminOutcome::Done(0))
    }

    /// Returns the error log, newest entry first. Unused entries are zero.
    fn error_log(&self) -> Vec<u8> {
        let mut page = vec![0; ERROR_ENTRIES * size_of::<ErrorInformation>()];
        for (slot, entry) in page
            .chunks_exact_mut(size_of::<ErrorInformation>())
            .zip(&self.admin.logs.errors)
        {
            slot.copy_from_slice(entry.as_bytes());
        }
        page
    }

    fn smart_log(&self, nsid: u32) -> Result<Vec<u8>, Status> {
        // The SMART log is per controller (LPA bit 0 is clear).
        if nsid != 0 && nsid != NSID_BROADCAST {
            return Err(INVALID_FIELD);
        }
        Ok(self.smart().as_bytes().to_vec())
    }

    fn changed_namespaces(&self) -> Vec<u8> {
        let changed = self.admin.logs.changed.iter().copied();
        NsidList::from_iter(changed).as_bytes().to_vec()
    }

    pub(super) fn smart(&self) -> Smart {
        let stats = &self.engine.stats;
        let mut smart = Smart::new_zeroed();
        smart.cw = self.critical_warning();
        smart.ctemp = TEMPERATURE.into();
        smart.avsp = 100;
        smart.avspt = 10;
        smart.dur = data_units(stats.bytes_read().into()).into();
        smart.duw = data_units(stats.bytes_written().into()).into();
        smart.hrc = u128::from(stats.host_reads()).into();
        smart.hwc = u128::from(stats.host_writes()).into();
        // Controller busy time in minutes; the power-on time below is in hours.
        smart.cbt = u128::from(stats.busy_ns() / 60_000_000_000).into();
        smart.poh = u128::from(self.admin.logs.power_on_hours()).into();
        smart.pwrc = u128::from(stats.power_cycles.get()).into();
        smart.upl = u128::from(stats.unsafe_shutdowns.get()).into();
        smart.mdie = u128::from(stats.media_errors.get()).into();
        smart.neile = u128::from(stats.error_log_entries.get()).into();
        smart
    }

    fn critical_warning(&self) -> CriticalWarning {
        let [over, under] = self.admin.features.thresholds;
        CriticalWarning::new().with_ttc(TEMPERATURE >= over || TEMPERATURE <= under)
    }

    /// Notifies the host if the temperature is outside the thresholds. Called after a change of a
    /// threshold or of the event configuration.
    pub(super) fn check_temperature(&mut self) {
        let warning = self.critical_warning();
        let enabled = self.admin.features.event_config as u8;
        if warning.ttc() && warning.into_bits() & enabled != 0 {
            self.notify(AsyncEvent::smart(SmartEvent::TEMPERATURE_THRESHOLD));
        }
    }

    fn firmware_slots(&self) -> Vec<u8> {
        let mut log = FirmwareSlot::new_zeroed();
        log.afi = ActiveFirmware::new().with_current(1);
        log.frs[0] = self.config.fr();
        log.as_bytes().to_vec()
    }

    pub(super) fn commands_supported(&self, csi: Csi) -> Vec<u8> {
        let mut log = CommandsSupported::new_zeroed();
        for (opcode, effects) in table::effects(self) {
            set(&mut log.acs, opcode.0, effects);
        }
        // Tools request the page for every possible command set. It is empty for command sets
        // without commands.
        let zoned = csi == Csi::ZONED && self.has_zones();
        if csi != Csi::NVM && !zoned {
            return log.as_bytes().to_vec();
        }
        for (opcode, effects) in engine::commands::effects(self.engine.offer(), zoned) {
            set(&mut log.iocs, opcode.0, effects);
        }
        log.as_bytes().to_vec()
    }

    /// Records the failure of a command, see [`Controller::command_failed`].
    pub(crate) fn failed(&mut self, sqid: u16, cid: u16, status: Status, nsid: u32, lba: u64) {
        self.command_failed((sqid, cid), status, (nsid, lba), false);
    }

    /// Records the failure of a command at a block, which may be marked: counts the failure, adds
    /// it to the error log, and logs a line within the rate limit. A block that a host has marked
    /// unreadable is not counted as media error: the standard leaves that to the controller ("NVMe
    /// Base 2.1", 5.1.12.1.3).
    pub(crate) fn command_failed(
        &mut self,
        (sqid, cid): (u16, u16),
        status: Status,
        (nsid, lba): (u32, u64),
        marked: bool,
    ) {
        if status.is(Status::ABORT_REQUESTED) {
            return;
        }
        let media = status.sct() == StatusCodeType::MEDIA && !marked;
        if media && !status.is(Status::COMPARE_FAILURE) {
            self.engine.stats.media_errors.add(1);
            self.capture("a media or data integrity error");
        }
        let information = std::mem::take(&mut self.admin.logs.information);
        self.add_error(ErrorInformation {
            sqid: sqid.into(),
            cid: cid.into(),
            lba: lba.into(),
            nsid: nsid.into(),
            csinfo: information.into(),
            ..entry(status)
        });
        if let Some(left_out) = self.engine.settings.log.allow("command failed") {
            tracing::debug!(sqid, cid, %status, nsid, lba, left_out, "command failed");
        }
    }

    fn add_error(&mut self, mut entry: ErrorInformation) {
        self.touch();
        self.engine.stats.error_log_entries.add(1);
        entry.error_count = self.engine.stats.error_log_entries.get().into();
        let errors = &mut self.admin.logs.errors;
        errors.truncate(ERROR_ENTRIES - 1);
        errors.push_front(entry);
    }

    /// Reports a write to a doorbell that belongs to no queue.
    pub(crate) fn invalid_doorbell_register(&mut self, index: usize, value: u32) {
        self.doorbell_error(ErrorEvent::INVALID_DOORBELL_REGISTER, index, value);
    }

    /// Reports a doorbell value outside the queue, which is not used.
    pub(crate) fn invalid_doorbell_value(&mut self, qid: u16, cq: bool, value: u32) {
        let index = usize::from(qid) * 2 + usize::from(cq);
        self.doorbell_error(ErrorEvent::INVALID_DOORBELL_VALUE, index, value);
    }

    fn doorbell_error(&mut self, event: ErrorEvent, index: usize, value: u32) {
        let qid = (index / 2) as u16;
        // The entry concerns no command: its SQID and CID are all ones ("NVMe Base 2.1",
        // 5.1.12.1.2).
        self.add_error(ErrorInformation {
            sqid: 0xffff.into(),
            cid: 0xffff.into(),
            ..entry(Status::INVALID_FIELD)
        });
        if let Some(left_out) = self.engine.settings.log.allow("doorbell") {
            tracing::debug!(qid, cq = index % 2 == 1, value, left_out, "{event}");
        }
        self.notify(AsyncEvent::error(event));
    }
}

fn entry(status: Status) -> ErrorInformation {
    let mut entry = ErrorInformation::new_zeroed();
    entry.set_status(status);
    entry.pel = ParameterErrorLocation::NONE;
    entry
}

/// Sets entry `at` of a log page that has 256 entries.
fn set<T>(entries: &mut [T; 256], at: u8, value: T) {
    if let Some(entry) = entries.get_mut(usize::from(at)) {
        *entry = value;
    }
}

/// Returns the log pages that the controller supports.
fn log_pages(controller: &Controller) -> impl Iterator<Item = &'static LogPage> {
    let pages = LOG_PAGES.iter();
    pages.filter(|page| (page.offered)(controller))
}

fn supported_log_pages(controller: &Controller) -> Vec<u8> {
    let mut log = SupportedLogPages::new_zeroed();
    for LogPage { lid, .. } in log_pages(controller) {
        set(&mut log.lids, lid.0, LidSupported::new().with_lsupp(true));
    }
    log.as_bytes().to_vec()
}

fn features_supported(offer: Offer) -> Vec<u8> {
    let mut log = FeaturesSupported::new_zeroed();
    for (fid, capabilities) in features::supported(offer) {
        // Scope: bit 0 namespace, bit 1 controller, bit 3 Endurance Group.
        let scope = match fid {
            Fid::FLEXIBLE_DATA_PLACEMENT => 8,
            _ if capabilities.namespace_specific() => 1,
            _ => 2,
        };
        let effects = FeatureEffects::new().with_fsupp(true).with_fsp(scope);
        set(&mut log.fids, fid.0, effects);
    }
    log.as_bytes().to_vec()
}
