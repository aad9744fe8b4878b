//! Effects of an attack, and their bounds.

use std::time::Duration;

use serde_json::{Value, json};

use super::attacks::Attack;
use super::known::KNOWN;
use super::test_daemon::Footprint;

/// Bounds that must hold.
#[derive(Clone, Copy)]
pub(super) struct AttackLimits {
    /// Lowest ratio of the neighbour's throughput to that beside an equally busy honest client.
    ratio: f64,
    /// The neighbour's longest register read.
    read: Duration,
    /// The worker's longest wait, where the attack aims at that.
    blocked: Duration,
    /// Until a question at the control socket is answered.
    control: Duration,
    /// Time until a new client has read a register.
    newcomer: Duration,
    /// Time from SIGTERM to the end.
    end: Duration,
    /// Bytes of log in a second.
    log: f64,
}

impl AttackLimits {
    /// Bounds of a release build with a machine of its own.
    pub(super) const LONG: Self = Self {
        ratio: 0.8,
        read: Duration::from_millis(50),
        blocked: Duration::from_millis(10),
        control: Duration::from_secs(2),
        newcomer: Duration::from_secs(1),
        end: Duration::from_secs(5),
        log: 32_768.0,
    };
    /// Bounds of any build, on a machine that has other work: a daemon that fails these is broken.
    pub(super) const SHORT: Self = Self {
        ratio: 0.05,
        read: Duration::from_secs(2),
        blocked: Duration::from_millis(400),
        control: Duration::from_secs(5),
        newcomer: Duration::from_secs(5),
        end: Duration::from_secs(7),
        log: 262_144.0,
    };
}

/// Memory in KiB that may remain in use, beside a tenth of the former size: pages that an allocator
/// keeps.
const SLACK_KIB: u64 = 1024;
/// Descriptors that may come and go.
const SLACK_DESCRIPTORS: u64 = 2;

/// Measured effects of an attack. Values that could not be measured are `None`.
#[derive(Clone, Debug, Default)]
pub(super) struct AttackOutcome {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    waiting: bool,
    pub(super) skipped: Option<String>,
    /// The daemon served at all.
    pub(super) started: bool,
    /// Number of the attack's completed attempts.
    pub(super) tried: u64,
    /// Reads per second of the neighbour: beside an honest client, and under attack.
    pub(super) honest: Option<f64>,
    pub(super) attacked: Option<f64>,
    pub(super) longest_read: Option<Duration>,
    pub(super) blocked: Option<Duration>,
    /// The number of the system call that it waited in; -1 is a page fault.
    pub(super) blocked_in: Option<String>,
    pub(super) before: Option<Footprint>,
    pub(super) after: Option<Footprint>,
    pub(super) log_rate: Option<f64>,
    pub(super) asked_control: bool,
    pub(super) control: Option<Duration>,
    pub(super) newcomer: Option<Duration>,
    /// The daemon was alive when the client had disconnected.
    pub(super) alive: bool,
    pub(super) end: Option<Duration>,
    /// Durable writes of the neighbour, and whether one of them is not in the file.
    pub(super) kept: u64,
    pub(super) lost: Option<bool>,
    /// Something else did not hold.
    pub(super) broken: bool,
    pub(super) notes: Vec<String>,
}

impl AttackOutcome {
    pub(super) fn new(attack: &Attack) -> Self {
        Self {
            name: attack.name,
            what: attack.what,
            waiting: attack.waiting,
            ..Self::default()
        }
    }

    pub(super) fn note(&mut self, text: String) {
        self.notes.push(text);
    }

    /// Returns whether memory and descriptors are within a tenth of their former size.
    pub(super) fn is_freed(before: Footprint, after: Footprint) -> bool {
        Self::memory_is_freed(before, after) && Self::descriptors_are_freed(before, after)
    }

    fn memory_is_freed(before: Footprint, after: Footprint) -> bool {
        after.rss_kib <= before.rss_kib + before.rss_kib / 10 + SLACK_KIB
    }

    fn descriptors_are_freed(before: Footprint, after: Footprint) -> bool {
        after.descriptors <= before.descriptors + before.descriptors / 10 + SLACK_DESCRIPTORS
    }

    /// The neighbour's throughput under attack as a part of that beside an honest client.
    pub(super) fn ratio(&self) -> Option<f64> {
        let honest = self.honest.filter(|rate| *rate > 0.0)?;
        Some(self.attacked? / honest)
    }

    /// Returns the bounds that do not hold.
    pub(super) fn failures(&self, limits: AttackLimits) -> Vec<&'static str> {
        if self.skipped.is_some() {
            return Vec::new();
        }
        if !self.started {
            return vec!["starts"];
        }
        let mut failures = Vec::new();
        let mut must = |name, holds: bool| {
            if !holds {
                failures.push(name);
            }
        };
        must("tried", self.tried > 0);
        must("alive", self.alive);
        must("ratio", self.ratio().is_some_and(|r| r >= limits.ratio));
        must("read", self.longest_read.is_some_and(|t| t < limits.read));
        if self.waiting {
            must("blocked", self.blocked.is_none_or(|t| t < limits.blocked));
        }
        if let (Some(before), Some(after), true) = (self.before, self.after, self.alive) {
            must("memory", Self::memory_is_freed(before, after));
            must("descriptors", Self::descriptors_are_freed(before, after));
        }
        must("log", self.log_rate.is_none_or(|rate| rate < limits.log));
        if self.asked_control {
            must("control", self.control.is_some_and(|t| t < limits.control));
        }
        must(
            "newcomer",
            self.newcomer.is_some_and(|t| t < limits.newcomer),
        );
        must("end", self.end.is_some_and(|t| t < limits.end));
        must("flushed", self.kept > 0 && self.lost == Some(false));
        must("after", !self.broken);
        failures
    }

    /// Returns the new failures, and the known ones that no longer occur.
    pub(super) fn verdict(&self, limits: AttackLimits) -> (Vec<&'static str>, Vec<&'static str>) {
        let known: Vec<&str> = KNOWN
            .iter()
            .filter(|known| known.attack == self.name)
            .flat_map(|known| known.fails)
            .copied()
            .collect();
        let fails = self.failures(limits);
        let new = fails.iter().copied().filter(|f| !known.contains(f));
        let new: Vec<&'static str> = new.collect();
        let mended = if self.skipped.is_some() || fails.iter().any(|f| known.contains(f)) {
            Vec::new()
        } else {
            KNOWN
                .iter()
                .filter(|known| known.attack == self.name && known.always)
                .flat_map(|known| known.fails)
                .copied()
                .collect()
        };
        (new, mended)
    }

    /// All of it, for another program.
    pub(super) fn json(&self, limits: AttackLimits) -> Value {
        let millis = |time: Option<Duration>| time.map(|t| t.as_secs_f64() * 1e3);
        json!({
            "attack": self.name,
            "what": self.what,
            "skipped": self.skipped,
            "fails": self.failures(limits),
            "tried": self.tried,
            "honest_iops": self.honest,
            "attacked_iops": self.attacked,
            "ratio": self.ratio(),
            "longest_read_ms": millis(self.longest_read),
            "blocked_ms": millis(self.blocked),
            "blocked_in": self.blocked_in,
            "rss_kib_before": self.before.map(|f| f.rss_kib),
            "rss_kib_after": self.after.map(|f| f.rss_kib),
            "descriptors_before": self.before.map(|f| f.descriptors),
            "descriptors_after": self.after.map(|f| f.descriptors),
            "log_bytes_per_second": self.log_rate,
            "control_ms": millis(self.control),
            "newcomer_ms": millis(self.newcomer),
            "alive": self.alive,
            "end_ms": millis(self.end),
            "kept": self.kept,
            "lost": self.lost,
            "notes": self.notes,
        })
    }
}
