//! Format NVM ("NVMe Base 2.1", 5.1.10; "NVM Command Set 1.1", 4.1.2) and Sanitize ("NVMe Base
//! 2.1", 5.1.22 and 8.1.24), which both erase namespaces.
//!
//! 1. The namespaces are closed in every engine: commands for them end with Format In Progress or
//!    Sanitize In Progress.
//! 2. The controller flushes all namespaces. The end of the flush shows that no earlier command is
//!    outstanding.
//! 3. The namespaces are erased by one request at a time, and only while a round's budget has room,
//!    so that commands of other hosts have priority.
//! 4. A flush makes the erasure durable.
//! 5. If the command changes formats ([`mod@format`]), the new formats are stored.
//! 6. The end is committed. Only in the next round the namespaces open with new blocks, and the
//!    command completes. Therefore no later process erases data written since.
//!
//! A controller-level reset aborts a format, unless a new format may have been stored already. A
//! sanitize operation continues when the controller is enabled again, and in the next process after
//! a restart. A failed operation leaves the namespaces closed until another one succeeds or the
//! host exits the failure mode.
//!
//! The erasure covers the storage that is accessible through the volumes. Blocks in holes of a file
//! system and overwritten blocks inside a device are not accessible.

mod format;

use super::answers::Answers;
use super::self_test::TestSelection;
use super::{AdminOutcome, AdminResult, INVALID_FIELD};
use crate::control::Controller;
use crate::engine::{Namespace, Order, OwnRequest, status_of};
use crate::formats::{BlockFormat, SavedFormat};
use crate::metadata::MetadataState;
use crate::subsystem::{AwaitedRelease, SharedNamespace};
use crate::survival::state::{EraseRunning, EraseState};
use dma::{Buffer, SegmentList};
use nvme::aen::{AsyncEvent, EventType, IoCommandEvent};
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::admin::{SanitizeAction as Action, SanitizeCdw10};
use nvme::identify::{Fpi, Sanicap};
use nvme::log::{Lid, SanitizeLog, SanitizeOutcome, SanitizeStatus, SelfTestOutcome};
use nvme::{Command, Status};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Instant;
use volume::{Budget, IoError, IoErrorKind, Op};
use zerocopy::IntoBytes;

/// Maximum length in bytes of one request that zeroes or deallocates blocks during an erasure.
const ZEROED: u64 = 4 << 20;
/// Maximum length in bytes of one request that writes zeroes or a pattern during an erasure.
const WRITTEN: u64 = 256 << 10;
/// Cost of one zeroing request, in units of a worker round's budget.
const ZEROES_UNITS: u32 = 16;
/// Maximum number of retries of an erase request that the volume has aborted or refused as busy.
const MAX_RETRIES: u32 = 64;

/// Admin command that causes an erasure of namespaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cause {
    /// Format NVM command; the value is its command identifier.
    Format(u16),
    /// Sanitize command; the values are its dword 10 and the overwrite pattern.
    Sanitize(SanitizeCdw10, u32),
}

impl Cause {
    /// Returns the status with which other commands for the namespaces fail during the erasure.
    fn closes_with(self) -> Status {
        match self {
            Cause::Format(_) => Status::FORMAT_IN_PROGRESS,
            Cause::Sanitize(..) => Status::SANITIZE_IN_PROGRESS,
        }
    }

    /// Returns how many times each namespace is overwritten or zeroed.
    fn passes(self) -> u8 {
        match self {
            Cause::Sanitize(cdw10, _) if cdw10.sanact() == Action::OVERWRITE => cdw10.passes(),
            _ => 1,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Stage {
    /// The flush that waits for outstanding commands has yet to be ordered.
    Close,
    /// The flush that waits for outstanding commands is in progress on this controller.
    Closing,
    /// Other controllers of the subsystem still have outstanding commands on the namespaces.
    Others,
    Erase,
    /// All blocks are erased; the flush that makes this durable has yet to be ordered.
    Flush,
    Flushing,
    /// The next new format of a namespace has yet to be stored.
    Keep,
    /// A change of a format is being stored; contains the number of the awaited answer.
    Keeping(u64),
    /// All steps are done; the end has yet to be committed to the state memory.
    Done,
    /// The end of the operation is committed to the state memory.
    Over,
    /// The namespaces are open here. Contains, for each remote engine, the number of the order that
    /// opens them.
    Opening(Vec<u64>),
}

struct EraseOperation {
    cause: Cause,
    nsids: Vec<u32>,
    stage: Stage,
    /// Number of completed passes over all namespaces.
    pass: u8,
    /// Index in `nsids` of the namespace that is being erased.
    at: usize,
    /// Number of bytes of the current namespace that are erased in this pass.
    offset: u64,
    /// Number and length in bytes of the outstanding erase request, if any.
    request: Option<(u64, u64)>,
    /// Whether zeroes are written as data, because the current volume cannot zero a range by
    /// itself.
    writes: bool,
    tries: u32,
    failed: Option<Status>,
    /// New block format of each namespace, by NSID; empty unless Format NVM changes formats.
    changes: Vec<(u32, BlockFormat)>,
    /// Number of new formats in `changes` that are stored.
    kept: usize,
    /// New metadata state of the namespaces whose format is stored, as far as this process created
    /// it.
    metadata: Vec<Option<Arc<MetadataState>>>,
    /// Whether a controller reset has dropped the Format NVM command, so that no completion is
    /// posted.
    abandoned: bool,
    /// Reference that expires when all other controllers have closed or reopened the namespaces.
    others: Weak<AwaitedRelease>,
}

impl EraseOperation {
    fn new(cause: Cause, nsids: Vec<u32>) -> Self {
        EraseOperation {
            cause,
            nsids,
            stage: Stage::Close,
            pass: 0,
            at: 0,
            offset: 0,
            request: None,
            writes: false,
            tries: 0,
            failed: None,
            changes: Vec::new(),
            kept: 0,
            metadata: Vec::new(),
            abandoned: false,
            others: Weak::new(),
        }
    }

    /// Returns whether other controllers of the subsystem still have to close or reopen the
    /// namespaces.
    fn waits_for_others(&self) -> bool {
        self.others.strong_count() > 0
    }

    /// Moves on to the next namespace of the operation, or to the next pass.
    fn next_namespace(&mut self) {
        (self.offset, self.writes) = (0, false);
        self.at += 1;
        if self.at >= self.nsids.len() {
            self.at = 0;
            self.pass += 1;
        }
    }

    fn is_erased(&self) -> bool {
        self.nsids.is_empty() || self.pass >= self.cause.passes()
    }

    /// Returns the four-byte pattern to write in this pass; `None` when the namespace is zeroed.
    fn pattern(&self) -> Option<[u8; 4]> {
        let Cause::Sanitize(cdw10, pattern) = self.cause else {
            return self.writes.then_some([0; 4]);
        };
        if cdw10.sanact() != Action::OVERWRITE {
            return self.writes.then_some([0; 4]);
        }
        // The last pass writes the pattern itself, without inversion ("NVMe Base 2.1", 8.1.24).
        let later = cdw10.passes().saturating_sub(1 + self.pass);
        let inverted = cdw10.oipbp() && later % 2 == 1;
        Some(if inverted { !pattern } else { pattern }.to_le_bytes())
    }

    /// Handles the completion of the outstanding erase request, which covered `len` bytes.
    fn ended(&mut self, len: u64, result: Result<(), IoError>) {
        let Err(error) = result else {
            self.tries = 0;
            self.offset += len;
            return;
        };
        match error.kind {
            IoErrorKind::Unsupported if !self.writes && self.pattern().is_none() => {
                self.writes = true;
            }
            IoErrorKind::Aborted | IoErrorKind::Busy if self.tries < MAX_RETRIES => self.tries += 1,
            _ => self.fail(status_of(error, true)),
        }
    }

    /// Ends the erasure with an error; `status` is the completion status of the command.
    fn fail(&mut self, status: Status) {
        self.failed.get_or_insert(status);
        self.stage = Stage::Done;
    }

    /// Handles a controller-level reset. Flushes are repeated, because the end of earlier ones may
    /// never be reported.
    fn reset(&mut self) {
        match self.stage {
            Stage::Closing => self.stage = Stage::Close,
            Stage::Flushing => self.stage = Stage::Flush,
            _ => {}
        }
    }
}

/// Erasure by Format NVM or Sanitize: the operation in progress, and the outcome of the last
/// Sanitize.
#[derive(Default)]
pub(crate) struct Erasure {
    running: Option<EraseOperation>,
    /// Dword 10 of the last Sanitize command that began an operation.
    last: SanitizeCdw10,
    outcome: SanitizeOutcome,
    /// Number of overwrite passes that the last sanitize operation has completed.
    passes: u8,
    /// NSIDs of the namespaces that a failed sanitize operation has left closed (failure mode).
    locked: Vec<u32>,
    /// NSIDs of the namespaces whose stored format is unknown to this process. The next process
    /// reads it.
    unknown: Vec<u32>,
    /// Shared namespaces of an operation that a reset has ended. They open when none of its
    /// requests is outstanding.
    left: Vec<u32>,
    /// Results of format stores, by the number of the request.
    answers: Arc<Answers<SavedFormat>>,
    /// Number of the last request to store a format.
    number: u64,
}

impl Erasure {
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Returns whether the namespace is being erased, or was erased and is not open yet.
    pub fn erases(&self, nsid: u32) -> bool {
        let running = self.running.as_ref();
        running.is_some_and(|running| running.nsids.contains(&nsid)) || self.left.contains(&nsid)
    }

    /// Sets the waker that wakes the controller's worker when a new format is stored.
    pub fn set_waker(&self, waker: Waker) {
        self.answers.set_waker(waker);
    }

    /// Returns the command identifier of the Format NVM command in progress, if any.
    pub fn format(&self) -> Option<u16> {
        let running = self.running.as_ref()?;
        match running.cause {
            Cause::Format(cid) if !running.abandoned => Some(cid),
            Cause::Format(_) | Cause::Sanitize(..) => None,
        }
    }

    /// Returns the Operation in Progress field of a Power-on or Reset event.
    pub(super) fn operation(&self) -> u8 {
        match self.running.as_ref().map(|running| running.cause) {
            Some(Cause::Format(_)) => 1,
            Some(Cause::Sanitize(..)) => 2,
            None => 0,
        }
    }

    /// Returns the status with which other commands fail while the erasure is in progress; `None`
    /// if all are allowed.
    pub(super) fn hinders(&self) -> Option<Status> {
        match &self.running {
            Some(running) => Some(running.cause.closes_with()),
            None if self.has_failed() => Some(Status::SANITIZE_FAILED),
            None => None,
        }
    }

    /// Returns whether the failure mode is active: a failed operation has left namespaces closed,
    /// and the host has not exited the mode.
    fn has_failed(&self) -> bool {
        !self.locked.is_empty()
    }

    pub fn save(&self) -> EraseState {
        let running = self.running.as_ref().map(|running| EraseRunning {
            format: match running.cause {
                Cause::Format(cid) => Some(cid),
                Cause::Sanitize(..) => None,
            },
            pattern: match running.cause {
                Cause::Format(_) => 0,
                Cause::Sanitize(_, pattern) => pattern,
            },
            nsids: running.nsids.clone(),
            pass: running.pass,
            at: running.at as u32,
            offset: running.offset,
            over: matches!(running.stage, Stage::Done | Stage::Over | Stage::Opening(_)),
            failed: running.failed.map(Status::into_bits),
            changes: plain_changes(&running.changes),
            formats: running
                .changes
                .iter()
                .map(|change| change.1.into())
                .collect(),
            kept: running.kept as u32,
            abandoned: running.abandoned,
        });
        EraseState {
            last: self.last.into_bits(),
            outcome: self.outcome.0,
            passes: self.passes,
            locked: self.locked.clone(),
            running,
        }
    }

    /// Restores the state saved by [`Erasure::save`]. [`Controller::restore_erasure`] then closes
    /// the namespaces.
    pub fn restore(saved: &EraseState) -> Self {
        let last = SanitizeCdw10::from_bits(saved.last);
        let running = saved.running.as_ref().map(|saved| {
            let cause = match saved.format {
                Some(cid) => Cause::Format(cid),
                None => Cause::Sanitize(last, saved.pattern),
            };
            EraseOperation {
                stage: if saved.over {
                    Stage::Done
                } else {
                    Stage::Close
                },
                pass: saved.pass,
                at: (saved.at as usize).min(saved.nsids.len().saturating_sub(1)),
                offset: saved.offset,
                failed: saved.failed.map(Status::from_bits),
                kept: if saved.over {
                    (saved.kept as usize).min(saved.changes.len())
                } else {
                    // Changes of formats that were stored already are erased and stored again.
                    0
                },
                changes: saved.changes(),
                abandoned: saved.abandoned,
                ..EraseOperation::new(cause, saved.nsids.clone())
            }
        });
        Erasure {
            running,
            last,
            outcome: SanitizeOutcome(saved.outcome),
            passes: saved.passes,
            locked: saved.locked.clone(),
            ..Erasure::default()
        }
    }
}

/// Returns the changes of formats, each reduced to its block size.
fn plain_changes(changes: &[(u32, BlockFormat)]) -> Vec<(u32, u32)> {
    let sizes = changes.iter().map(|(nsid, format)| (*nsid, format.block));
    sizes.collect()
}

/// Returns the Sanitize Capabilities (SANICAP) of Identify Controller.
pub(super) fn sanicap() -> Sanicap {
    Sanicap::new().with_bes(true).with_ows(true).with_nodmmas(1)
}

/// Returns the number of bytes to erase. If the block size may change, they include the rest of the
/// volume after the last block.
fn size_of(ns: &Namespace) -> u64 {
    let blocks = ns.blocks << ns.shift;
    match ns.config.formats {
        Some(_) => blocks.max(ns.config.volume.info().size),
        None => blocks,
    }
}

impl Controller {
    pub(super) fn sanitize(&mut self, command: &Command) -> AdminResult {
        let cdw10 = SanitizeCdw10::from_bits(command.cdw10.get());
        if cdw10.emvs() {
            return Err(INVALID_FIELD);
        }
        let erasure = &self.admin.erasure;
        // Without Allow Unrestricted Sanitize Exit, only another restricted operation ends the
        // failure mode.
        let restricted = erasure.has_failed() && !erasure.last.ause();
        let running = erasure.running.as_ref().map(|r| r.cause.closes_with());
        match cdw10.sanact() {
            Action::EXIT_FAILURE_MODE => {
                if let Some(status) = running {
                    return Err(status);
                }
                if restricted {
                    return Err(Status::SANITIZE_FAILED.with_dnr(true));
                }
                self.unlock();
                Ok(AdminOutcome::Done(0))
            }
            Action::BLOCK_ERASE | Action::OVERWRITE => {
                if restricted && cdw10.ause() {
                    return Err(Status::SANITIZE_FAILED.with_dnr(true));
                }
                let nsids = self.active().map(|ns| ns.config.nsid).collect();
                let cause = Cause::Sanitize(cdw10, command.cdw11.get());
                self.begin_erasing(EraseOperation::new(cause, nsids))?;
                let erasure = &mut self.admin.erasure;
                erasure.last = cdw10;
                erasure.outcome = SanitizeOutcome::IN_PROGRESS;
                erasure.passes = 0;
                erasure.locked.clear();
                self.record_sanitize_start(command.cdw10.get(), command.cdw11.get());
                Ok(AdminOutcome::Done(0))
            }
            _ => Err(INVALID_FIELD),
        }
    }

    /// Closes the namespaces and begins an erasure. Its requests follow from the next round on.
    fn begin_erasing(&mut self, running: EraseOperation) -> Result<(), Status> {
        let (cause, nsids) = (running.cause, running.nsids.clone());
        let sanitizes = matches!(cause, Cause::Sanitize(..));
        match self.admin.erasure.hinders() {
            Some(status) if status.is(Status::SANITIZE_FAILED) && sanitizes => {}
            Some(status) => return Err(status),
            None => {}
        }
        let protected = |nsid: &u32| {
            let ns = self.engine.namespaces.of_nsid(*nsid);
            ns.is_some_and(|ns| ns.read_only)
        };
        if nsids.iter().any(protected) {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true));
        }
        let others = self.close_to_others(&nsids, cause.closes_with())?;
        let (outcome, about) = if sanitizes {
            (SelfTestOutcome::SANITIZED, TestSelection::All)
        } else {
            (SelfTestOutcome::FORMATTED, TestSelection::Some(&nsids))
        };
        self.end_test_of(outcome, about);
        self.close(&nsids, Some(cause.closes_with()));
        if let Some(left_out) = self.engine.settings.log.allow("erasing") {
            tracing::info!(?nsids, ?cause, left_out, "erasing");
        }
        self.admin.erasure.running = Some(EraseOperation { others, ..running });
        self.admin.rearm();
        self.touch();
        Ok(())
    }

    /// Closes namespaces, so that their commands end with `status`. `None` opens the namespaces
    /// with a known format.
    pub(crate) fn close(&mut self, nsids: &[u32], status: Option<Status>) {
        for nsid in nsids {
            let status = status.or_else(|| self.admin.erasure.at_rest(*nsid));
            if let Ok(index) = self.engine.namespaces.index_of(*nsid) {
                self.order_all(|| Order::Close { index, status });
            }
        }
    }

    fn unlock(&mut self) {
        let locked = std::mem::take(&mut self.admin.erasure.locked);
        self.close(&locked, None);
        self.touch();
    }

    /// Closes the namespaces again after the saved state was restored.
    pub(crate) fn restore_erasure(&mut self) {
        if let Some(running) = &self.admin.erasure.running {
            let (nsids, status) = (running.nsids.clone(), running.cause.closes_with());
            self.close(&nsids, Some(status));
        }
        let locked = self.admin.erasure.locked.clone();
        self.close(&locked, Some(Status::SANITIZE_FAILED));
        self.admin.rearm();
    }

    /// Ends a format in a controller-level reset. None of its requests is outstanding when the host
    /// can send commands again.
    pub(crate) fn reset_erasure(&mut self) {
        match &mut self.admin.erasure.running {
            Some(running) if matches!(running.cause, Cause::Sanitize(..)) => running.reset(),
            Some(running) if running.may_be_kept() => running.abandoned = true,
            running => {
                if let Some(EraseOperation { nsids, .. }) = running.take() {
                    self.admin.erasure.left = nsids;
                }
            }
        }
        self.admin.rearm();
    }

    /// Opens the namespaces of an operation that a reset has ended, once none of its requests is
    /// outstanding.
    pub(crate) fn open_left(&mut self) {
        let nsids = std::mem::take(&mut self.admin.erasure.left);
        self.open_erased(&nsids);
    }

    /// Handles the end of a flush that the controller itself has requested; `failed` is its error
    /// status.
    pub(crate) fn erasure_flushed(&mut self, failed: Option<Status>) {
        let erasure = &self.admin.erasure;
        let running = erasure.running.as_ref();
        if failed.is_none() && running.is_some_and(|running| running.stage == Stage::Flushing) {
            self.renew_lost();
        }
        let Some(running) = &mut self.admin.erasure.running else {
            return;
        };
        match running.stage {
            // A failed flush is ignored here, because the data is erased anyway.
            Stage::Closing => running.stage = Stage::Others,
            Stage::Flushing => {
                if let Some(status) = failed {
                    running.failed.get_or_insert(status);
                }
                running.stage = running.keeps_next();
            }
            _ => {}
        }
    }

    /// Empties zones and metadata of the namespaces. No outstanding command can change them, and
    /// the final flush makes their tables durable, too.
    fn empty_zones(&mut self, nsids: &[u32]) {
        let mut refused = false;
        let namespaces = self.active();
        let erased = namespaces.filter(|ns| nsids.contains(&ns.config.nsid));
        for ns in erased {
            if let Some(zones) = &ns.config.zones {
                refused |= zones.empty().is_err();
            }
            if let Some(metadata) = &ns.config.metadata {
                metadata.forget();
            }
        }
        if refused {
            self.engine
                .broken("a zone of an erased namespace is being reset");
        }
    }

    /// Advances the erasure by at most one request. Returns whether there was anything to do.
    pub(super) fn go_on_erasing(&mut self, budget: &mut Budget) -> bool {
        let Some(running) = &mut self.admin.erasure.running else {
            return false;
        };
        let mut worked = false;
        if let Some((number, len)) = running.request
            && let Some(result) = self.engine.slots.own.take(number)
        {
            worked = true;
            running.request = None;
            running.ended(len, result);
        }
        match &running.stage {
            Stage::Closing | Stage::Flushing => worked,
            Stage::Others if running.waits_for_others() => worked,
            Stage::Others => {
                running.stage = Stage::Erase;
                let nsids = running.nsids.clone();
                self.empty_zones(&nsids);
                true
            }
            Stage::Keep => worked | self.keep_format(),
            Stage::Keeping(number) => {
                let number = *number;
                worked | self.format_kept(number)
            }
            Stage::Opening(orders) => {
                let known = self.migration.has_applied(orders) && !running.waits_for_others();
                if known {
                    self.end_erasing();
                }
                worked | known
            }
            Stage::Close => worked | self.order_flush(Stage::Closing),
            Stage::Flush => worked | self.order_flush(Stage::Flushing),
            Stage::Erase => worked | self.erase_piece(budget),
            // The operation has ended while a request is outstanding.
            Stage::Done if running.request.is_some() => worked,
            Stage::Done => {
                running.stage = Stage::Over;
                self.touch();
                true
            }
            Stage::Over => {
                match running.cause {
                    Cause::Format(_) => self.open_formatted(),
                    Cause::Sanitize(..) => self.end_erasing(),
                }
                true
            }
        }
    }

    /// Orders a flush of all namespaces at the controller's own request, if that is possible now.
    fn order_flush(&mut self, stage: Stage) -> bool {
        if !self.may_go_on() {
            return false;
        }
        if let Some(running) = &mut self.admin.erasure.running {
            running.stage = stage;
        }
        self.flush_everywhere();
        true
    }

    /// Returns whether the erasure may proceed now. On shared namespaces it does not wait until
    /// this controller's host enables the controller, because the erasure keeps other hosts out.
    fn may_go_on(&self) -> bool {
        self.is_shared() || self.may_test()
    }

    /// Starts the next erase request within `budget`. Returns whether there was anything to do.
    fn erase_piece(&mut self, budget: &mut Budget) -> bool {
        if budget.is_spent() || !self.may_go_on() || !self.engine.may_begin_own() {
            return false;
        }
        let Some(running) = &mut self.admin.erasure.running else {
            return false;
        };
        if running.request.is_some() {
            return false;
        }
        if running.is_erased() {
            running.stage = Stage::Flush;
            return true;
        }
        let Some(&nsid) = running.nsids.get(running.at) else {
            running.fail(Status::INTERNAL_ERROR);
            self.engine.broken("an erasure has no namespace left");
            return true;
        };
        let cause = running.cause;
        let mine = self.may_still_erase(nsid);
        let ns = self.engine.namespaces.of_nsid(nsid);
        let Some(running) = &mut self.admin.erasure.running else {
            return false;
        };
        // A namespace that was attached in place of another one must not be erased.
        let Some(ns) = ns.filter(|ns| ns.closed == Some(cause.closes_with()) && mine) else {
            running.fail(Status::INVALID_NAMESPACE_OR_FORMAT);
            return true;
        };
        let size = size_of(ns);
        if running.offset >= size {
            running.next_namespace();
            return true;
        }
        let left = size - running.offset;
        let deallocate = match running.cause {
            Cause::Format(_) => true,
            Cause::Sanitize(cdw10, _) => !cdw10.ndas(),
        };
        let (op, len, data) = match running.pattern() {
            None => {
                let fua = false;
                let op = Op::WriteZeroes { deallocate, fua };
                (op, left.min(ZEROED), SegmentList::new())
            }
            Some(pattern) => {
                let len = left.min(WRITTEN);
                let data = Buffer::from_slice(&pattern.repeat(len as usize / pattern.len()));
                (Op::Write { fua: false }, len, SegmentList::owned(data))
            }
        };
        budget.spend(match op {
            Op::Write { .. } => 1 + Budget::units_of(len, 0),
            _ => ZEROES_UNITS,
        });
        let offset = running.offset;
        self.tell_progress();
        let number = self.engine.begin_own(OwnRequest {
            nsid,
            op,
            offset,
            len,
            data,
        });
        if let Some(running) = &mut self.admin.erasure.running {
            running.request = number.map(|number| (number, len));
        }
        number.is_some()
    }

    /// Publishes the progress of the erasure to the other controllers.
    fn tell_progress(&self) {
        if let Some(running) = &self.admin.erasure.running
            && self.is_shared()
        {
            let left = self.percent_left(running);
            for nsid in &running.nsids {
                self.tell_of_progress(*nsid, left);
            }
        }
    }

    /// Returns the percentage of the namespaces that is left to be erased, at least 1.
    fn percent_left(&self, running: &EraseOperation) -> u8 {
        let (done, all) = self.erased(running);
        let left = all.saturating_sub(done) * 100 / all.max(1);
        left.clamp(1, 100) as u8
    }

    /// Ends the erasure early with this status, if it concerns any of the selected namespaces and
    /// no new format may have been stored.
    pub(crate) fn end_erasing_early(
        &mut self,
        status: Status,
        such: impl Fn(&SharedNamespace) -> bool,
    ) {
        let of_those: Vec<u32> = self.shared_where(such);
        let Some(running) = &mut self.admin.erasure.running else {
            return;
        };
        let concerned = running.nsids.iter().any(|nsid| of_those.contains(nsid));
        let over = matches!(running.stage, Stage::Done | Stage::Over | Stage::Opening(_));
        if !over && !running.may_be_kept() && concerned {
            running.fail(status);
            self.admin.rearm();
        }
    }

    /// Completes the operation, after its end is committed and formatted namespaces are open.
    fn end_erasing(&mut self) {
        let Some(running) = self.admin.erasure.running.take() else {
            return;
        };
        let (done, all) = self.erased(&running);
        let left = all.saturating_sub(done) * 100 / all.max(1);
        let erasure = &mut self.admin.erasure;
        let EraseOperation {
            cause,
            nsids,
            pass,
            failed,
            abandoned,
            ..
        } = running;
        match failed {
            None => self.engine.settings.log.line("erased", |left_out| {
                tracing::info!(?nsids, ?cause, left_out, "erased");
            }),
            Some(status) => self.engine.settings.log.line("not erased", |left_out| {
                tracing::warn!(?nsids, ?cause, %status, left_out, "could not be erased");
            }),
        }
        match cause {
            Cause::Format(cid) => {
                if let Some(status) = failed.filter(|_| !abandoned) {
                    // Without namespaces, the error concerns none of them (NSID 0).
                    let nsid = nsids.first().copied().unwrap_or(0);
                    self.failed(0, cid, status, nsid, 0);
                }
                let asked = match nsids.as_slice() {
                    [nsid] => *nsid,
                    _ => NSID_BROADCAST,
                };
                let status = failed.unwrap_or(Status::SUCCESS);
                self.record_format_end(asked, left.min(100) as u8, status);
                if !abandoned && self.may_complete() {
                    self.finish_admin(cid, status, 0);
                }
            }
            Cause::Sanitize(cdw10, _) => {
                if cdw10.sanact() == Action::OVERWRITE {
                    erasure.passes = pass;
                }
                match failed {
                    None => {
                        erasure.outcome = SanitizeOutcome::COMPLETED;
                        self.unmark_all(&nsids);
                        self.close(&nsids, None);
                    }
                    Some(_) => {
                        erasure.outcome = SanitizeOutcome::FAILED;
                        erasure.locked.clone_from(&nsids);
                        self.close(&nsids, Some(Status::SANITIZE_FAILED));
                    }
                }
                let log = self.sanitize_status();
                self.record_sanitize_end(log.sprog.get(), log.sstat);
                self.notify(AsyncEvent::of(
                    EventType::IO_COMMAND_SPECIFIC,
                    IoCommandEvent::SANITIZE_COMPLETED.0,
                    Lid::SANITIZE_STATUS,
                ));
            }
        }
        self.admin.rearm();
        self.touch();
    }

    /// Returns the number of bytes erased so far in all passes, and the total number to erase.
    fn erased(&self, running: &EraseOperation) -> (u128, u128) {
        let size = |nsid: &u32| {
            let ns = self.engine.namespaces.of_nsid(*nsid);
            // A namespace that was detached meanwhile has nothing left to erase.
            ns.map_or(0, |ns| u128::from(size_of(ns)))
        };
        let each: u128 = running.nsids.iter().map(size).sum();
        let before: u128 = running.nsids.iter().take(running.at).map(size).sum();
        let done = each * u128::from(running.pass) + before + u128::from(running.offset);
        (done, each * u128::from(running.cause.passes()))
    }

    pub(super) fn sanitize_log(&self) -> Vec<u8> {
        self.sanitize_status().as_bytes().to_vec()
    }

    fn sanitize_status(&self) -> SanitizeLog {
        let erasure = &self.admin.erasure;
        let mut log = SanitizeLog::at_rest();
        let mut passes = erasure.passes;
        if let Some(running) = &erasure.running
            && let Cause::Sanitize(cdw10, _) = running.cause
        {
            let (done, all) = self.erased(running);
            let parts = (done << 16) / all.max(1);
            log.sprog = (parts.min(0xfffe) as u16).into();
            if cdw10.sanact() == Action::OVERWRITE {
                passes = running.pass;
            }
        }
        log.sstat = SanitizeStatus::new()
            .with_sos(erasure.outcome)
            .with_opc(passes);
        log.scdw10 = erasure.last.into_bits().into();
        log
    }

    /// Returns the Format Progress Indicator of a namespace.
    pub(super) fn format_progress(&self, nsid: u32) -> Fpi {
        let idle = Fpi::new().with_fpis(true);
        match &self.admin.erasure.running {
            Some(running)
                if matches!(running.cause, Cause::Format(_)) && running.nsids.contains(&nsid) =>
            {
                idle.with_fpr(self.percent_left(running))
            }
            _ => idle.with_fpr(self.left_by_others(nsid).unwrap_or(0)),
        }
    }

    /// Returns the time at which the erasure continues even if no event occurs.
    pub(crate) fn erase_deadline(&self) -> Option<Instant> {
        let running = self.admin.erasure.running.as_ref()?;
        let due = match running.stage {
            // An event wakes the worker at the end of these stages.
            Stage::Closing | Stage::Flushing | Stage::Keeping(_) | Stage::Opening(_) => false,
            Stage::Others => !running.waits_for_others(),
            Stage::Keep => self.may_keep(),
            Stage::Close | Stage::Flush => self.may_go_on(),
            Stage::Erase => {
                running.request.is_none() && self.may_go_on() && self.engine.may_begin_own()
            }
            Stage::Done => running.request.is_none(),
            Stage::Over => true,
        };
        due.then_some(self.now)
    }
}
