//! Reports of unreadable blocks: Get LBA Status ("NVM Command Set 1.1", 4.2.1), and the LBA Status
//! Information log page (4.1.4.5) with its alert and its feature (4.1.3.5, 5.2.1).
//!
//! The reported blocks are those marked by Write Uncorrectable; a scan finds no others. A block
//! that a volume could not read is in the error log, but is not tracked: the next read may succeed,
//! and a write to the block would not be noticed.

use super::{AdminOutcome, AdminResult, INVALID_FIELD};
use crate::control::Controller;
use crate::marks::{MAX_RANGES, MarkedRanges, count_ranges};
use crate::survival::Since;
use crate::survival::state::LbaStatusState;
use nvme::aen::{AsyncEvent, EventType, Notice};
use nvme::cmd::admin::{GetLbaStatusCdw13, GetLogPage, LbaStatusAction};
use nvme::feature::{AsyncEventConfig, LbaStatusAttributes};
use nvme::log::{
    LbaRangeDescriptor, LbaRangeStatus, LbaStatusCondition, LbaStatusDescriptor, LbaStatusElement,
    LbaStatusHeader, LbaStatusListHeader, Lid,
};
use nvme::{Command, Status};
use std::ops::Range;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// LBA Status Information Poll Interval, in units of 100 ms.
const POLL_INTERVAL: u16 = 10;
/// Returns the feature's value after the host has requested the report interval `lsiri`: that
/// interval, or the closest supported one.
pub(super) fn attributes(lsiri: u16) -> LbaStatusAttributes {
    LbaStatusAttributes::new()
        .with_lsiri(lsiri.max(POLL_INTERVAL))
        .with_lsipi(POLL_INTERVAL)
}

/// State of the LBA Status Information log page: the host's reading of it, and pending alerts.
pub(crate) struct LbaStatus {
    /// LBA Status Generation Counter of the log page.
    generation: u16,
    /// Whether blocks were marked after the host has read the page.
    news: bool,
    /// Whether the host was notified of these blocks.
    alerted: bool,
    /// Generation and contents of the page that the host is reading with Retain Asynchronous Event.
    reading: Option<(u16, MarkedRanges)>,
    /// Beginning of the current report interval.
    since: Since,
}

impl LbaStatus {
    pub fn new() -> Self {
        LbaStatus {
            generation: 0,
            news: false,
            alerted: false,
            reading: None,
            since: Since::now(),
        }
    }

    /// Handles a controller-level reset. The host begins to read the page anew, and a pending alert
    /// may be lost.
    pub fn reset(&mut self) {
        self.reading = None;
        self.alerted = false;
    }

    /// Records that blocks were marked.
    fn marked(&mut self) {
        // All marks until the host's next read belong to one generation.
        if !std::mem::replace(&mut self.news, true) {
            self.generation = self.generation.wrapping_add(1);
            self.alerted = false;
        }
    }

    /// Returns the time of the next alert; `None` unless blocks were marked and the host was not
    /// notified of them yet.
    pub fn alert_at(&self, attributes: LbaStatusAttributes) -> Option<Instant> {
        let interval = Duration::from_millis(100) * attributes.lsiri().into();
        (self.news && !self.alerted).then(|| self.since.instant() + interval)
    }

    pub fn save(&self, (marks, changes): (MarkedRanges, Vec<(u32, u64)>)) -> LbaStatusState {
        LbaStatusState {
            marks,
            changes,
            generation: self.generation,
            news: self.news,
            alerted: self.alerted,
            reading: self.reading.clone(),
            elsewhere: false,
            since: self.since.wall(),
        }
    }

    /// Restores the state saved by [`LbaStatus::save`]. [`Controller::restore_marks`] restores the
    /// marks themselves.
    pub fn restore(saved: &LbaStatusState) -> Self {
        let reading = saved.reading.clone();
        LbaStatus {
            generation: saved.generation,
            news: saved.news,
            alerted: saved.alerted,
            reading: reading.filter(|(_, marks)| count_ranges(marks) <= MAX_RANGES),
            since: Since::from_wall(saved.since),
        }
    }
}

/// Maximum number of blocks in a descriptor, which has a zero-based number of 32 bits.
const MAX_DESCRIPTOR_BLOCKS: u64 = 1 << 32;

/// Splits a marked range into parts for one descriptor each: first block and zero-based number of
/// blocks.
fn parts(range: Range<u64>) -> impl Iterator<Item = (u64, u32)> {
    let end = range.end;
    let starts = range.step_by(MAX_DESCRIPTOR_BLOCKS as usize);
    starts.map(move |start| {
        let blocks = (end - start).min(MAX_DESCRIPTOR_BLOCKS);
        (
            start,
            u32::try_from(blocks.saturating_sub(1)).unwrap_or(u32::MAX),
        )
    })
}

impl Controller {
    /// Returns whether blocks can be marked, so that the host can request their status.
    pub(super) fn reports_lbas(&self) -> bool {
        self.config.offer().marks
    }

    // ---- Get LBA Status

    pub(super) fn get_lba_status(&mut self, command: &Command) -> AdminResult {
        let nsid = command.nsid.get();
        let cdw13 = GetLbaStatusCdw13::from_bits(command.cdw13.get());
        let index = self.engine.namespaces.index_of(nsid)?;
        if let Some(status) = self.engine.namespaces.unreached(nsid) {
            return Err(status);
        }
        let ns = self.engine.namespaces.get(index);
        let ns = ns.ok_or(Status::INTERNAL_ERROR)?;
        if let Some(status) = ns.closed {
            return Err(status);
        }
        if !matches!(
            cdw13.atype(),
            LbaStatusAction::SCAN | LbaStatusAction::TRACKED
        ) {
            return Err(INVALID_FIELD);
        }
        let slba = command.slba();
        let out_of_range = Status::LBA_OUT_OF_RANGE.with_dnr(true);
        let left = ns.blocks.checked_sub(slba).filter(|left| *left > 0);
        let left = left.ok_or(out_of_range)?;
        let length = match cdw13.rl() {
            0 => left,
            length => u64::from(length),
        };
        if length > left {
            return Err(out_of_range);
        }
        let found = ns.marks.within(slba..slba + length);
        let bytes = (u64::from(command.cdw12.get()) + 1) * 4;
        self.write_host(command, &descriptors(&found, bytes))?;
        Ok(AdminOutcome::Done(0))
    }

    // ---- the log page

    /// Prepares a read of the log page. The contents are frozen from a read with Retain
    /// Asynchronous Event until a read without it.
    pub(super) fn before_lba_status(&mut self, get: &GetLogPage) -> Result<bool, Status> {
        if !get.rae {
            self.admin.lba_status.reading = None;
        } else if self.admin.lba_status.reading.is_none() {
            let page = (self.admin.lba_status.generation, self.marks.table.listed());
            self.admin.lba_status.reading = Some(page);
            self.lba_status_known();
        }
        Ok(true)
    }

    pub(super) fn lba_status_log(&self) -> Vec<u8> {
        match &self.admin.lba_status.reading {
            Some((generation, marks)) => log_page(*generation, marks),
            None => log_page(self.admin.lba_status.generation, &self.marks.table.listed()),
        }
    }

    /// Records that the host has read the contents of the log page.
    fn lba_status_known(&mut self) {
        self.admin.lba_status.news = false;
        self.admin.rearm();
        self.touch();
    }

    /// Handles a read of the log page without Retain Asynchronous Event.
    pub(super) fn lba_status_read(&mut self) {
        self.admin.lba_status.since = Since::now();
        self.lba_status_known();
        self.clear_events(EventType::NOTICE);
    }

    // ---- the alert

    /// Handles new marks, set by the host of this controller or of another one.
    pub(crate) fn blocks_marked(&mut self) {
        self.touch();
        self.admin.lba_status.marked();
        self.admin.rearm();
    }

    /// Notifies the host of marked blocks, if the alert is due and enabled. Returns whether it was
    /// due.
    pub(super) fn check_lba_alert(&mut self) -> bool {
        if self.admin.alert_at().is_none_or(|at| self.now < at) {
            return false;
        }
        self.touch();
        self.admin.lba_status.alerted = true;
        let marks = self.marks.table.all();
        // All marked blocks may have been written meanwhile.
        if marks.iter().any(|(_, marks)| marks.any()) {
            let event = AsyncEvent::notice(Notice::LBA_STATUS_ALERT, Lid::LBA_STATUS);
            self.notify(event);
        }
        true
    }

    /// Returns the time at which the next alert about marked blocks is due.
    pub(crate) fn lba_alert_deadline(&self) -> Option<Instant> {
        self.admin.alert_at()
    }
}

impl super::Admin {
    fn alert_at(&self) -> Option<Instant> {
        let wanted = AsyncEventConfig::from_bits(self.features.event_config).lsian();
        let at = self.lba_status.alert_at(attributes(self.features.lsiri));
        at.filter(|_| wanted)
    }

    /// Returns the earliest time of the keep alive timer, the alert about marked blocks, and a
    /// requested reset.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        let timers = [
            self.keep_alive.deadline(),
            self.alert_at(),
            self.subsystem_reset,
        ];
        timers.into_iter().flatten().min()
    }
}

/// Builds the LBA Status Information log page for these marks.
fn log_page(generation: u16, marks: &MarkedRanges) -> Vec<u8> {
    let (mut elements, mut unreadable) = (Vec::new(), 0u64);
    for (nsid, ranges) in marks {
        let mut descriptors = Vec::new();
        for &(slba, blocks) in ranges {
            unreadable = unreadable.saturating_add(blocks);
            descriptors.extend(parts(slba..slba.saturating_add(blocks)));
        }
        let element = LbaStatusElement {
            neid: (*nsid).into(),
            nlrd: (descriptors.len() as u32).into(),
            ratype: LbaStatusAction::TRACKED,
            ..Default::default()
        };
        elements.extend_from_slice(element.as_bytes());
        for (rslba, rnlb_z) in descriptors {
            let descriptor = LbaRangeDescriptor {
                rslba: rslba.into(),
                rnlb_z: rnlb_z.into(),
                ..Default::default()
            };
            elements.extend_from_slice(descriptor.as_bytes());
        }
    }
    let header = LbaStatusHeader {
        lslplen: ((size_of::<LbaStatusHeader>() + elements.len()) as u32).into(),
        nlslne: (marks.len() as u32).into(),
        estulb: u32::try_from(unreadable).unwrap_or(u32::MAX - 1).into(),
        lsgc: generation.into(),
        ..Default::default()
    };
    let mut page = header.as_bytes().to_vec();
    page.append(&mut elements);
    page
}

/// Builds the LBA Status Descriptor List of marked ranges, with at most `bytes` bytes.
fn descriptors(found: &[Range<u64>], bytes: u64) -> Vec<u8> {
    let room = bytes.saturating_sub(size_of::<LbaStatusListHeader>() as u64);
    let room = usize::try_from(room).unwrap_or(usize::MAX) / size_of::<LbaStatusDescriptor>();
    let mut all = found.iter().cloned().flat_map(parts);
    let listed: Vec<(u64, u32)> = all.by_ref().take(room).collect();
    let header = LbaStatusListHeader {
        nlsd: (listed.len() as u32).into(),
        cmpc: if all.next().is_none() {
            LbaStatusCondition::COMPLETE
        } else {
            LbaStatusCondition::INCOMPLETE
        },
        ..Default::default()
    };
    let mut list = header.as_bytes().to_vec();
    for (dslba, nlb_z) in listed {
        let descriptor = LbaStatusDescriptor {
            dslba: dslba.into(),
            nlb_z: nlb_z.into(),
            stas: LbaRangeStatus::WRITE_UNCORRECTABLE,
            ..Default::default()
        };
        list.extend_from_slice(descriptor.as_bytes());
    }
    list.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_of_more_than_32_bits_has_several_descriptors() {
        let range = 5..(1 << 33) + 6;
        let expected = [(5, u32::MAX), ((1 << 32) + 5, u32::MAX), ((1 << 33) + 5, 0)];
        assert!(parts(range.clone()).eq(expected));
        assert_eq!(parts(7..7).count(), 0);
        // A list with room for two descriptors is incomplete.
        let list = descriptors(std::slice::from_ref(&range), 8 + 40);
        assert_eq!((list.len(), list[0], list[4]), (8 + 32, 2, 1));
        let page = log_page(3, &vec![(1, vec![(5, (1 << 33) + 1)])]);
        assert_eq!((page.len(), page[16 + 4]), (16 + 16 + 3 * 16, 3));
        assert_eq!(
            page[page.len() - 16..][..8],
            ((1u64 << 33) + 5).to_le_bytes()
        );
    }
}
