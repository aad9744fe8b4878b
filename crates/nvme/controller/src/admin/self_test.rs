//! Device Self-test ("NVMe Base 2.1", 5.1.5), which tests whether the volumes can be read; a
//! virtual disk has nothing else to test. The short operation reads samples of each namespace, and
//! the extended one reads all blocks.
//!
//! At most one read is outstanding, and it is begun only while a round's budget has room, so that
//! commands of hosts have priority. The extended operation survives a controller-level reset. Both
//! operations continue in the next process after a restart.

use super::{AdminOutcome, AdminResult, INVALID_FIELD};
use crate::control::Controller;
use crate::engine::{OwnRequest, status_of};
use crate::survival::state::{SelfTestState, TestRunning};
use dma::{Buffer, SegmentList};
use nvme::cmd::NSID_BROADCAST;
use nvme::log::{
    SelfTestCode as Code, SelfTestLog, SelfTestOutcome, SelfTestResult, SelfTestStatus,
    ValidDiagnostics,
};
use nvme::{Command, Status};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use volume::{Budget, Op};
use zerocopy::{FromBytes, IntoBytes};

/// Number of past results that the Device Self-test log page contains.
const RESULTS: usize = 20;
/// Maximum size in bytes of one read of a device self-test.
const PIECE: u64 = 64 << 10;
/// Number of reads from each namespace in the short device self-test.
const SAMPLES: u64 = 64;
/// Maximum number of retries of a self-test read that the volume reports as interrupted.
const MAX_RETRIES: u32 = 16;
/// Minimum duration of an operation. Hosts read the percentage once per second, and nvme-cli
/// considers an operation hung if the percentage was never above zero.
const MIN_DURATION: Duration = Duration::from_secs(3);
/// Assumed speed in bytes per minute, for the duration of the extended operation in Identify
/// Controller.
const PER_MINUTE: u128 = 60 * (512 << 20);
/// Segment number that a self-test result reports for a failed read. Each operation has one
/// segment.
const SEGMENT: u8 = 1;

/// Device self-test: the operation in progress, and the results of earlier ones.
#[derive(Default)]
pub(crate) struct SelfTest {
    running: Option<RunningTest>,
    /// Results of earlier self-tests, newest first.
    results: VecDeque<SelfTestResult>,
}

struct RunningTest {
    code: Code,
    /// NSID of the Device Self-test command, possibly the broadcast NSID.
    nsid: u32,
    /// Number of reads that the self-test has completed.
    done: u64,
    /// Time at which this process continued the operation, and number of pieces read until then.
    begun: Option<(Instant, u64)>,
    /// Blocks of the outstanding read, and the number of its volume request.
    reading: Option<(TestRange, u64)>,
    tries: u32,
    /// Blocks whose read has failed, and the status. Smaller reads then find the unreadable block.
    bad: Option<(TestRange, Status)>,
}

/// Range of blocks in a namespace that a self-test reads at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct TestRange {
    nsid: u32,
    /// Block size as a power of two.
    shift: u32,
    /// First block that the self-test reads.
    slba: u64,
    /// Number of blocks that the self-test reads.
    blocks: u64,
}

impl TestRange {
    fn halves(self) -> (Self, Self) {
        let half = self.blocks / 2;
        let first = TestRange {
            blocks: half,
            ..self
        };
        let second = TestRange {
            slba: self.slba + half,
            blocks: self.blocks - half,
            ..self
        };
        (first, second)
    }
}

/// Selects the self-tests to end when namespaces are erased.
pub(crate) enum TestSelection<'a> {
    All,
    /// Any self-test that reads at least one of these namespaces.
    Some(&'a [u32]),
}

/// Next step of a self-test after one of its reads has completed.
#[derive(PartialEq, Eq, Debug)]
enum NextStep {
    GoOn,
    /// The block cannot be read; the self-test ends with this status.
    Bad(TestRange, Status),
    /// The read failed for a reason other than unreadable blocks; the self-test ends with this
    /// status.
    Hindered(TestRange, Status),
}

impl RunningTest {
    fn new(code: Code, nsid: u32) -> Self {
        RunningTest {
            code,
            nsid,
            done: 0,
            begun: None,
            reading: None,
            tries: 0,
            bad: None,
        }
    }

    /// Returns the time at which the next of `all` pieces may be read, or the operation may end.
    fn due(&self, all: u64) -> Option<Instant> {
        let (begun, before) = self.begun?;
        let read = self.done.saturating_sub(before).min(all);
        let share = u128::from(read) * MIN_DURATION.as_micros() / u128::from(all.max(1));
        // The value is at most `MIN_DURATION`, so the conversion does not truncate.
        Some(begun + Duration::from_micros(share as u64))
    }

    fn is_about(&self, nsid: u32) -> bool {
        self.nsid == NSID_BROADCAST || self.nsid == nsid
    }

    /// Handles the completion of the self-test's outstanding read.
    fn ended(&mut self, status: Status) -> NextStep {
        let Some((read, _)) = self.reading.take() else {
            return NextStep::GoOn;
        };
        if status.is(Status::ABORT_REQUESTED) || status.is(Status::COMMAND_INTERRUPTED) {
            self.tries += 1;
            return if self.tries < MAX_RETRIES {
                NextStep::GoOn
            } else {
                NextStep::Hindered(read, status)
            };
        }
        self.tries = 0;
        let (bad, why) = match (self.bad, status.is_success()) {
            (None, true) => {
                self.done += 1;
                return NextStep::GoOn;
            }
            // The first half is readable, so the bad block is in the second half.
            (Some((bad, why)), true) => (bad.halves().1, why),
            (_, false) => (read, status),
        };
        self.bad = Some((bad, why));
        match bad.blocks {
            1 => NextStep::Bad(bad, why),
            _ => NextStep::GoOn,
        }
    }
}

/// Returns the number of reads that a self-test of type `code` makes in a namespace.
fn pieces(code: Code, blocks: u64, shift: u32) -> u64 {
    let all = blocks.div_ceil(PIECE >> shift);
    match code {
        Code::EXTENDED => all,
        _ => all.min(SAMPLES),
    }
}

/// Returns the blocks of the self-test's read number `index` in a namespace.
fn piece(code: Code, nsid: u32, blocks: u64, shift: u32, index: u64) -> TestRange {
    let each = PIECE >> shift;
    let all = blocks.div_ceil(each);
    let at = match code {
        Code::EXTENDED => index,
        _ if all <= SAMPLES => index,
        // The samples include the first and the last piece.
        _ => (u128::from(index) * u128::from(all - 1) / u128::from(SAMPLES - 1)) as u64,
    };
    let slba = at * each;
    TestRange {
        nsid,
        shift,
        slba,
        blocks: each.min(blocks - slba),
    }
}

impl SelfTest {
    pub fn save(&self) -> SelfTestState {
        let results = self.results.iter().flat_map(|result| result.as_bytes());
        SelfTestState {
            results: results.copied().collect(),
            running: self.running.as_ref().map(|running| TestRunning {
                code: running.code.0,
                nsid: running.nsid,
                done: running.done,
            }),
        }
    }

    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Restores the state saved by [`SelfTest::save`], up to the maximum number of results.
    pub fn restore(saved: &SelfTestState) -> Self {
        let entries = saved.results.chunks_exact(size_of::<SelfTestResult>());
        let results = entries.filter_map(|entry| SelfTestResult::read_from_bytes(entry).ok());
        let running = saved.running.as_ref().map(|saved| RunningTest {
            done: saved.done,
            ..RunningTest::new(Code(saved.code), saved.nsid)
        });
        SelfTest {
            running: running.filter(|test| matches!(test.code, Code::SHORT | Code::EXTENDED)),
            results: results.take(RESULTS).collect(),
        }
    }

    /// Ends the self-test in progress, and adds its result to the log; `found` is an unreadable
    /// block and the status of its read.
    fn end(&mut self, outcome: SelfTestOutcome, hours: u64, found: Option<(TestRange, Status)>) {
        let Some(running) = self.running.take() else {
            return;
        };
        let mut result = SelfTestResult {
            status: SelfTestStatus::new()
                .with_code(running.code)
                .with_outcome(outcome),
            poh: hours.into(),
            nsid: running.nsid.into(),
            valid: ValidDiagnostics::new().with_nsid(running.nsid != 0),
            ..Default::default()
        };
        if let Some((at, status)) = found {
            result.valid = result
                .valid
                .with_nsid(true)
                .with_flba(true)
                .with_sct(true)
                .with_sc(true);
            result.segment = SEGMENT;
            result.nsid = at.nsid.into();
            result.flba = at.slba.into();
            (result.sct, result.sc) = (status.sct().0, status.sc());
        }
        self.results.truncate(RESULTS - 1);
        self.results.push_front(result);
    }

    /// Aborts a short self-test in a controller-level reset. An extended one continues.
    pub(super) fn reset(&mut self, hours: u64) {
        if let Some(running) = &self.running
            && running.code == Code::SHORT
        {
            self.end(SelfTestOutcome::RESET, hours, None);
        }
    }
}

/// Returns the Extended Device Self-test Time (EDSTT) of Identify Controller, in minutes, for
/// `capacity` bytes.
pub(super) fn extended_minutes(capacity: u128) -> u16 {
    let minutes = capacity.div_ceil(PER_MINUTE).max(1);
    u16::try_from(minutes).unwrap_or(u16::MAX)
}

impl Controller {
    pub(super) fn device_self_test(&mut self, command: &Command) -> AdminResult {
        // Self-test Code (STC): bits 3:0 of dword 10.
        let code = Code(command.cdw10.get() as u8 & 0xf);
        let nsid = command.nsid.get();
        match code {
            Code::SHORT | Code::EXTENDED => {}
            Code::ABORT => {
                self.end_self_test(SelfTestOutcome::ABORTED, None);
                return Ok(AdminOutcome::Done(0));
            }
            _ => return Err(INVALID_FIELD),
        }
        if nsid != 0 && nsid != NSID_BROADCAST {
            self.engine.namespaces.index_of(nsid)?;
        }
        if let Some(status) = self.admin.erasure.hinders() {
            return Err(status);
        }
        if self.others_erase(nsid) {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        let test = &mut self.admin.self_test;
        if test.running.is_some() {
            return Err(Status::SELF_TEST_IN_PROGRESS);
        }
        test.running = Some(RunningTest::new(code, nsid));
        self.touch();
        Ok(AdminOutcome::Done(0))
    }

    pub(super) fn self_test_log(&self) -> Vec<u8> {
        let test = &self.admin.self_test;
        let mut log = SelfTestLog {
            results: [SelfTestResult::unused(); RESULTS],
            ..Default::default()
        };
        if let Some(running) = &test.running {
            let all = self.pieces_to_read(running).max(1);
            log.current = running.code;
            log.completion = (u128::from(running.done) * 100 / u128::from(all)).min(99) as u8;
        }
        let entries = log.results.iter_mut().zip(&test.results);
        entries.for_each(|(entry, result)| *entry = *result);
        log.as_bytes().to_vec()
    }

    fn pieces_to_read(&self, running: &RunningTest) -> u64 {
        let active = self.active();
        let concerned = active.filter(|ns| running.is_about(ns.config.nsid));
        concerned
            .map(|ns| pieces(running.code, ns.blocks, ns.shift))
            .sum()
    }

    /// Returns the blocks of the self-test's next read; `None` after the last one.
    fn next_piece(&self, running: &RunningTest) -> Option<TestRange> {
        if let Some((bad, _)) = running.bad {
            return Some(bad.halves().0);
        }
        let mut index = running.done;
        for ns in self.active() {
            let nsid = ns.config.nsid;
            if !running.is_about(nsid) {
                continue;
            }
            let count = pieces(running.code, ns.blocks, ns.shift);
            if index < count {
                return Some(piece(running.code, nsid, ns.blocks, ns.shift, index));
            }
            index -= count;
        }
        None
    }

    fn end_self_test(&mut self, outcome: SelfTestOutcome, found: Option<(TestRange, Status)>) {
        let hours = self.admin.logs.power_on_hours();
        self.admin.self_test.end(outcome, hours, found);
        self.touch();
        if let Some((TestRange { nsid, slba, .. }, status)) = found {
            if let Some(left_out) = self.engine.settings.log.allow("self-test") {
                tracing::warn!(nsid, slba, %status, left_out, "device self-test: cannot be read");
            }
            self.capture("device self-test failed");
        }
    }

    /// Ends tests of namespaces that are about to be erased.
    pub(crate) fn end_test_of(&mut self, outcome: SelfTestOutcome, about: TestSelection) {
        let concerned = |running: &RunningTest| match about {
            TestSelection::All => true,
            TestSelection::Some(nsids) => nsids.iter().any(|nsid| running.is_about(*nsid)),
        };
        if self.admin.self_test.running.as_ref().is_some_and(concerned) {
            self.end_self_test(outcome, None);
        }
    }

    /// Advances the self-test by at most one read. Returns whether there was anything to do.
    pub(super) fn go_on_testing(&mut self, budget: &mut Budget) -> bool {
        let mut worked = false;
        if let Some(running) = &mut self.admin.self_test.running
            && let Some((read, number)) = running.reading
            && let Some(result) = self.engine.slots.own.take(number)
        {
            worked = true;
            let status = match result {
                Err(error) => status_of(error, false),
                Ok(())
                    if self
                        .marks
                        .table
                        .of(read.nsid)
                        .first(read.slba, read.blocks)
                        .is_some() =>
                {
                    Status::UNRECOVERED_READ_ERROR
                }
                Ok(()) => Status::SUCCESS,
            };
            match running.ended(status) {
                NextStep::GoOn => {}
                NextStep::Bad(at, status) => {
                    self.end_self_test(SelfTestOutcome::FAILED_SEGMENT, Some((at, status)));
                }
                NextStep::Hindered(at, status) => {
                    self.end_self_test(SelfTestOutcome::UNKNOWN_ERROR, Some((at, status)));
                }
            }
        }
        let Some(running) = &self.admin.self_test.running else {
            return worked;
        };
        if running.reading.is_some() || budget.is_spent() || !self.may_test() {
            return worked;
        }
        let all = self.pieces_to_read(running);
        if running.due(all).is_some_and(|due| self.now < due) {
            return worked;
        }
        let nsid = running.nsid;
        if nsid != 0 && nsid != NSID_BROADCAST && self.engine.namespaces.index_of(nsid).is_err() {
            self.end_self_test(SelfTestOutcome::NAMESPACE_REMOVED, None);
            return true;
        }
        let Some(piece) = self.next_piece(running) else {
            self.end_self_test(SelfTestOutcome::PASSED, None);
            return true;
        };
        if !self.engine.may_begin_own() {
            return worked;
        }
        let len = piece.blocks << piece.shift;
        let begun = self.engine.begin_own(OwnRequest {
            nsid: piece.nsid,
            op: Op::Read,
            offset: piece.slba << piece.shift,
            len,
            data: SegmentList::owned(Buffer::new(len as usize)),
        });
        let Some(number) = begun else {
            return worked;
        };
        budget.spend(1 + Budget::units_of(len, 0));
        if let Some(running) = &mut self.admin.self_test.running {
            running.begun.get_or_insert((self.now, running.done));
            running.reading = Some((piece, number));
        }
        true
    }

    /// Returns the time at which the self-test continues even if no event occurs.
    pub(crate) fn self_test_deadline(&self) -> Option<Instant> {
        let running = self.admin.self_test.running.as_ref()?;
        if running.reading.is_some() || !self.may_test() || !self.engine.may_begin_own() {
            return None;
        }
        running.due(self.pieces_to_read(running))
    }
}
