//! `results.json`: machine-readable figures.
//!
//! The file is a list of objects. The first one is of suite `about`: machine, commands, and the
//! cases that were left out, with reasons. The remaining ones are [`Row`]s. A suite that is run
//! again replaces its own rows and leaves those of further suites.

use crate::distance::{self, Distance};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// A measured figure of a case, with the figures of its runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub suite: String,
    /// Name of the case: words separated by single spaces.
    pub case: String,
    /// Number of I/Os in flight on each queue; 0 when not applicable.
    #[serde(default)]
    pub depth: u32,
    /// Number of queues over all controllers; 0 when not applicable.
    #[serde(default)]
    pub queues: u32,
    pub metric: String,
    /// Median of the figures of all runs, in the unit of the row.
    pub value: f64,
    pub unit: String,
    /// Figures of all runs, in order. For slices, only those needed for ratios.
    #[serde(default)]
    pub runs: Vec<f64>,
    /// Round trip of a cache line in nanoseconds, which identifies the distance of the figure;
    /// `None` when distances are not distinguished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distance: Option<f64>,
    /// Rounds of the slices in `runs`: only slices of the same round are compared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rounds: Vec<u32>,
    /// Number and spread of the slices that the median is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slices: Option<Slices>,
}

/// Number and spread of the slices behind a median.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Slices {
    pub count: usize,
    pub p10: f64,
    pub p90: f64,
}

impl Slices {
    /// Minimum number of slices for a reliable figure.
    const MIN_SLICES: usize = 5;

    /// Returns whether the figure is unreliable, because there were few slices or they differ
    /// widely.
    pub fn is_doubtful(&self) -> bool {
        self.count < Self::MIN_SLICES || self.p90 > 2.0 * self.p10
    }
}

/// Circumstances under which the results were measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RunInfo {
    pub machine: Machine,
    /// Commands that measured, oldest first, as one text.
    pub command: String,
    /// Commands that measured, as a list.
    pub commands: Vec<String>,
    pub left_out: Vec<LeftOut>,
    /// Distances between the CPUs, for each suite that distinguishes them.
    pub distances: Vec<SuiteDistance>,
}

/// A distance that the CPUs had during a suite.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct SuiteDistance {
    pub suite: String,
    #[serde(flatten)]
    pub distance: Distance,
}

/// A case of a suite that was not measured, with the reason.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct LeftOut {
    pub suite: String,
    pub what: String,
    pub why: String,
}

/// Description of the machine that measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    pub cpu: String,
    pub cpus: usize,
    pub memory_mib: u64,
    pub kernel: String,
    pub hypervisor: bool,
    /// Version of the benchmark program.
    pub version: String,
    /// Time of the measurement in seconds since 1970.
    pub time: u64,
    /// Load average of one minute before the measurement, caused by other processes.
    pub load: f64,
    /// Time to read the clock in nanoseconds, which is included in each timed I/O.
    pub clock_ns: f64,
    /// Share of the last suite's time, from 0 to 1, during which the host ran other guests on the
    /// CPUs.
    pub stolen: f64,
}

/// Contents of the results file: figures of all suites, and how they were measured.
#[derive(Clone, Debug, Default)]
pub struct Results {
    pub about: RunInfo,
    pub rows: Vec<Row>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Object {
    About(TaggedAbout),
    Row(Row),
}

#[derive(Serialize)]
struct TaggedAbout {
    suite: String,
    #[serde(flatten)]
    about: RunInfo,
}

/// Name of the results file in the output directory.
pub const FILE: &str = "results.json";

impl Results {
    /// Reads the file; returns empty results if it does not exist.
    pub fn read(path: &Path) -> Result<Results> {
        match std::fs::read(path) {
            Ok(bytes) => Results::parse(&bytes).with_context(|| format!("{}", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Results::default()),
            Err(error) => Err(error).with_context(|| format!("{}", path.display())),
        }
    }

    fn parse(bytes: &[u8]) -> Result<Results> {
        let mut results = Results::default();
        for object in serde_json::from_slice::<Vec<serde_json::Value>>(bytes)? {
            if object.get("suite").is_some_and(|suite| suite == "about") {
                results.about = serde_json::from_value(object)?;
            } else {
                results.rows.push(serde_json::from_value(object)?);
            }
        }
        Ok(results)
    }

    /// Writes the file atomically.
    pub fn write(&self, path: &Path) -> Result<()> {
        let about = Object::About(TaggedAbout {
            suite: "about".into(),
            about: self.about.clone(),
        });
        let rows = self.rows.iter().cloned().map(Object::Row);
        let objects: Vec<Object> = std::iter::once(about).chain(rows).collect();
        // Each object on a line: readable, and easy to compare.
        let mut text = String::from("[\n");
        for (i, object) in objects.iter().enumerate() {
            text.push_str(&serde_json::to_string(object)?);
            text.push_str(if i + 1 < objects.len() { ",\n" } else { "\n" });
        }
        text.push_str("]\n");
        let part = path.with_extension("part");
        std::fs::write(&part, text).with_context(|| format!("{}", part.display()))?;
        std::fs::rename(&part, path).with_context(|| format!("{}", path.display()))
    }

    /// Replaces the figures of a suite.
    pub fn replace(&mut self, suite: &str, figures: Figures, left_out: Vec<LeftOut>) {
        self.rows.retain(|row| row.suite != suite);
        self.rows.extend(figures.rows);
        self.about.distances.retain(|d| d.suite != suite);
        let of_suite = |distance| SuiteDistance {
            suite: suite.to_owned(),
            distance,
        };
        let distances = figures.distances.into_iter().map(of_suite);
        self.about.distances.extend(distances);
        self.about.left_out.retain(|l| l.suite != suite);
        self.about.left_out.extend(left_out);
    }

    /// Adds the suites of another file.
    pub fn merge(&mut self, other: Results) {
        let mut suites: Vec<&str> = other.rows.iter().map(|r| r.suite.as_str()).collect();
        suites.extend(other.about.left_out.iter().map(|l| l.suite.as_str()));
        suites.sort_unstable();
        suites.dedup();
        for suite in suites {
            let rows = other.rows.iter().filter(|r| r.suite == suite);
            let left = other.about.left_out.iter().filter(|l| l.suite == suite);
            let figures = Figures {
                rows: rows.cloned().collect(),
                distances: other.about.distances(suite).cloned().collect(),
            };
            self.replace(suite, figures, left.cloned().collect());
        }
        for command in other.about.commands {
            self.about.ran(&command);
        }
    }

    /// Returns the figure of a case at a distance, or without one for a suite that does not
    /// distinguish distances.
    pub fn row(&self, case: Case<'_>, metric: &str, distance: Option<f64>) -> Option<&Row> {
        let mut rows = self.rows.iter();
        rows.find(|r| r.is(case, metric) && r.suite == case.suite && r.distance == distance)
    }
}

impl Row {
    fn is(&self, case: Case<'_>, metric: &str) -> bool {
        self.case == case.case
            && self.depth == case.depth
            && self.queues == case.queues
            && self.metric == metric
    }
}

impl RunInfo {
    /// Returns the distances of a suite, nearest first.
    pub fn distances(&self, suite: &str) -> impl Iterator<Item = &Distance> {
        let all = self.distances.iter();
        all.filter(move |d| d.suite == suite).map(|d| &d.distance)
    }

    /// Records a command that measured.
    pub fn ran(&mut self, command: &str) {
        self.commands.retain(|c| c != command);
        self.commands.push(command.to_owned());
        self.command = self.commands.join("; ");
    }
}

impl Machine {
    /// Returns the description of this machine.
    pub fn here() -> Machine {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let info = read("/proc/cpuinfo");
        let field = |name: &str| {
            let line = info.lines().find(|l| l.starts_with(name));
            line.and_then(|l| l.split_once(':')).map(|(_, v)| v.trim())
        };
        let memory = read("/proc/meminfo");
        let total = memory.lines().find_map(|l| l.strip_prefix("MemTotal:"));
        let kib = total.and_then(|t| t.split_ascii_whitespace().next()?.parse::<u64>().ok());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Machine {
            cpu: field("model name").unwrap_or("unknown").to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, |n| n.get()),
            memory_mib: kib.unwrap_or(0) / 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            hypervisor: field("flags").is_some_and(|f| f.split(' ').any(|w| w == "hypervisor")),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            time: now.map_or(0, |d| d.as_secs()),
            load: read("/proc/loadavg")
                .split(' ')
                .next()
                .and_then(|l| l.parse().ok())
                .unwrap_or(0.0),
            clock_ns: clock(),
            stolen: 0.0,
        }
    }
}

/// Measures the time to read the clock in nanoseconds: the minimum of several attempts.
fn clock() -> f64 {
    const CLOCK_READINGS: u32 = 1000;
    let stretch = |_| {
        let start = Instant::now();
        (0..CLOCK_READINGS).for_each(|_| {
            std::hint::black_box(Instant::now());
        });
        start.elapsed().as_nanos() as f64 / f64::from(CLOCK_READINGS)
    };
    (0..20).map(stretch).fold(f64::INFINITY, f64::min)
}

/// Returns the ratio of two figures: the median of the ratios of their runs. Each run is compared
/// with the other figure's run next to it. If the numbers of runs differ, the result is the ratio
/// of the medians.
///
/// Slices are compared with those of the same round.
pub fn quotient(over: &Row, under: &Row) -> f64 {
    if !over.rounds.is_empty() && over.rounds.len() == over.runs.len() {
        let theirs: BTreeMap<u32, f64> = under
            .rounds
            .iter()
            .copied()
            .zip(under.runs.clone())
            .collect();
        let pairs = over.rounds.iter().zip(&over.runs);
        let quotients = pairs.filter_map(|(round, over)| Some(over / theirs.get(round)?));
        let quotients: Vec<f64> = quotients.collect();
        if !quotients.is_empty() {
            return median(&quotients);
        }
        return over.value / under.value;
    }
    if over.runs.is_empty() || over.runs.len() != under.runs.len() {
        return over.value / under.value;
    }
    let pairs = over.runs.iter().zip(&under.runs);
    median(&pairs.map(|(over, under)| over / under).collect::<Vec<_>>())
}

/// Returns the median: the middle value, or the mean of the two in the middle.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    let upper = sorted.get(half).copied().unwrap_or(f64::NAN);
    if sorted.len() % 2 == 1 {
        return upper;
    }
    match half.checked_sub(1).and_then(|i| sorted.get(i)) {
        Some(lower) => (lower + upper) / 2.0,
        None => upper,
    }
}

/// Returns the value that a given share (0 to 1) of the sorted values does not exceed.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len().saturating_sub(1) as f64 * share).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

/// Rounds a figure to four digits, because the rest is noise.
fn short(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

/// Collects the figures of all runs of a suite, and computes their medians.
#[derive(Clone, Default)]
pub struct Collector {
    rows: Vec<Row>,
    /// Figures with slices, in the order of their first occurrence.
    sliced: Vec<Sliced>,
}

/// Slices of one figure.
#[derive(Clone)]
struct Sliced {
    /// Row of the figure, without values.
    row: Row,
    slices: Vec<(SlicePosition, f64)>,
}

/// Round and distance of a measured slice.
#[derive(Clone, Copy, Debug)]
pub struct SlicePosition {
    pub round: u32,
    /// Round trip of a cache line in nanoseconds.
    pub round_trip: f64,
}

/// Results of one suite: its figures, and the distances between the CPUs.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    pub rows: Vec<Row>,
    /// Distances between the CPUs during the suite.
    pub distances: Vec<Distance>,
}

/// Identity of a measured figure: the case, its depth and its number of queues.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    pub suite: &'a str,
    pub case: &'a str,
    pub depth: u32,
    pub queues: u32,
}

impl Collector {
    /// Adds the figure of a run.
    pub fn add(&mut self, case: Case<'_>, metric: &str, unit: &str, value: f64) {
        match self.rows.iter_mut().find(|r| r.is(case, metric)) {
            Some(row) => row.runs.push(value),
            None => self.rows.push(Row {
                runs: vec![value],
                ..Row::new(case, metric, unit)
            }),
        }
    }

    /// Adds the figure of a slice.
    pub fn add_at(
        &mut self,
        case: Case<'_>,
        metric: &str,
        unit: &str,
        value: f64,
        taken: SlicePosition,
    ) {
        let slice = (taken, value);
        match self.sliced.iter_mut().find(|s| s.row.is(case, metric)) {
            Some(sliced) => sliced.slices.push(slice),
            None => self.sliced.push(Sliced {
                row: Row::new(case, metric, unit),
                slices: vec![slice],
            }),
        }
    }

    /// Computes the medians of all figures, for slices separately at each distance.
    pub fn figures(mut self) -> Figures {
        for row in &mut self.rows {
            row.value = median(&row.runs);
        }
        let trips = self.sliced.iter().flat_map(|s| &s.slices);
        let trips: Vec<f64> = trips.map(|(taken, _)| taken.round_trip).collect();
        let distances = distance::found(&trips);
        for sliced in &self.sliced {
            let rows = distances.iter().filter_map(|distance| sliced.at(distance));
            self.rows.extend(rows);
        }
        Figures {
            rows: self.rows,
            distances,
        }
    }
}

impl Row {
    fn new(case: Case<'_>, metric: &str, unit: &str) -> Self {
        Row {
            suite: case.suite.to_owned(),
            case: case.case.to_owned(),
            depth: case.depth,
            queues: case.queues,
            metric: metric.to_owned(),
            unit: unit.to_owned(),
            ..Row::default()
        }
    }
}

impl Sliced {
    /// Returns the figure at a distance; `None` when no slice was measured at it.
    fn at(&self, distance: &Distance) -> Option<Row> {
        let here = self
            .slices
            .iter()
            .filter(|(t, _)| distance.holds(t.round_trip));
        let (rounds, values): (Vec<u32>, Vec<f64>) = here.map(|(t, v)| (t.round, *v)).unzip();
        if values.is_empty() {
            return None;
        }
        let mut row = Row {
            value: short(median(&values)),
            distance: Some(distance.round_trip),
            slices: Some(Slices {
                count: values.len(),
                p10: short(quantile(&values, 0.1)),
                p90: short(quantile(&values, 0.9)),
            }),
            ..self.row.clone()
        };
        // Runs of further metrics are not divided by each other, and would make the file long.
        if row.metric == "iops" {
            row.runs = values.into_iter().map(short).collect();
            row.rounds = rounds;
        }
        Some(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASE: Case<'static> = Case {
        suite: "limit",
        case: "null mapped",
        depth: 1,
        queues: 1,
    };

    #[test]
    fn quotient_pairs_runs() {
        let row = |runs: &[f64]| Row {
            value: median(runs),
            runs: runs.to_vec(),
            ..Row::default()
        };
        // 0.5, 1.2, 0.95; of the medians it would be 1.2.
        let (over, under) = (row(&[50.0, 120.0, 190.0]), row(&[100.0, 100.0, 200.0]));
        assert_eq!(quotient(&over, &under), 0.95);
        assert_eq!(quotient(&row(&[50.0]), &row(&[100.0, 100.0])), 0.5);
        let bare = Row {
            value: 4.0,
            ..Row::default()
        };
        assert_eq!(
            quotient(
                &Row {
                    value: 2.0,
                    ..bare.clone()
                },
                &bare
            ),
            0.5
        );
    }

    #[test]
    fn median_of_odd_even_and_empty_lists() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn repeated_suite_replaces_own_rows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let mut results = Results::default();
        results.about.ran("vnvme bench --suite limit");
        for value in [1.0, 3.0, 2.0] {
            let mut collector = Collector::default();
            collector.add(CASE, "iops", "1/s", value);
            collector.add(CASE, "iops", "1/s", value);
            results.replace("limit", collector.figures(), Vec::new());
        }
        let mut collector = Collector::default();
        collector.add(
            Case {
                suite: "file",
                ..CASE
            },
            "iops",
            "1/s",
            9.0,
        );
        let left = LeftOut {
            suite: "file".into(),
            what: "disk".into(),
            why: "no disk".into(),
        };
        results.replace("file", collector.figures(), vec![left.clone()]);
        results.write(&path).unwrap();
        let read = Results::read(&path).unwrap();
        assert_eq!(read.rows, results.rows);
        assert_eq!(read.rows.len(), 2);
        let row = read.row(CASE, "iops", None);
        assert_eq!(row.map(|row| row.value), Some(2.0));
        assert_eq!(read.about.left_out, [left]);
        assert_eq!(read.about.command, "vnvme bench --suite limit");
        let text = std::fs::read_to_string(&path).unwrap();
        let first = text.lines().nth(1).unwrap();
        assert!(first.starts_with("{\"suite\":\"about\""), "{first}");
    }

    /// Slices of two cases, mapped twice as fast as shadow in every round, at two distances.
    fn sliced() -> Results {
        let mut collector = Collector::default();
        for round in 0..20 {
            let round_trip = if round % 4 == 0 {
                300.0
            } else {
                100.0 + f64::from(round)
            };
            let taken = SlicePosition { round, round_trip };
            for (case, speed) in [("null mapped", 2.0), ("null shadow", 1.0)] {
                // The shadow case has no slice in every fifth round.
                if case == "null shadow" && round % 5 == 1 {
                    continue;
                }
                let value = speed * 1e9 / (round_trip + 200.0);
                collector.add_at(Case { case, ..CASE }, "iops", "1/s", value, taken);
            }
        }
        let mut results = Results::default();
        results.replace("limit", collector.figures(), Vec::new());
        results
    }

    #[test]
    fn slices_are_grouped_by_distance() {
        let results = sliced();
        let trips: Vec<f64> = results
            .about
            .distances("limit")
            .map(|d| d.round_trip)
            .collect();
        let [near, far] = trips[..] else {
            panic!("{trips:?}");
        };
        assert!((100.0..120.0).contains(&near) && far == 300.0, "{trips:?}");
        let at = |distance| results.row(CASE, "iops", Some(distance)).unwrap();
        assert_eq!((at(near).runs.len(), at(far).runs.len()), (15, 5));
        assert_eq!(at(far).value, 4e6);
        assert!(at(near).value > 1.5 * at(far).value, "{:?}", at(near));
        assert!(!at(far).slices.unwrap().is_doubtful());
        assert!(results.row(CASE, "iops", None).is_none(), "no mixture");
        // Survives the file, with its distances.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        results.write(&path).unwrap();
        let mut merged = Results::default();
        merged.merge(Results::read(&path).unwrap());
        assert_eq!(merged.rows, results.rows);
        assert_eq!(merged.about.distances, results.about.distances);
    }

    #[test]
    fn slice_quotient_uses_same_rounds() {
        let results = sliced();
        for distance in results.about.distances("limit") {
            let at = |case| results.row(Case { case, ..CASE }, "iops", Some(distance.round_trip));
            let (over, under) = (at("null mapped").unwrap(), at("null shadow").unwrap());
            assert_ne!(over.rounds, under.rounds);
            assert!((quotient(over, under) - 2.0).abs() < 0.01);
        }
    }

    #[test]
    fn results_of_few_or_scattered_slices_are_doubtful() {
        let of = |count, p10, p90| Slices { count, p10, p90 }.is_doubtful();
        assert!(of(4, 1.0, 1.0) && of(100, 1.0, 2.5));
        assert!(!of(5, 1.0, 2.0));
        assert_eq!(
            (short(123_456.0), short(0.012_344_9)),
            (123_500.0, 0.012_34)
        );
        assert_eq!(short(0.0), 0.0);
    }

    #[test]
    fn missing_results_file_is_empty() {
        assert!(
            Results::read(Path::new("/no/such/file"))
                .unwrap()
                .rows
                .is_empty()
        );
    }
}
