//! `results.json`: figures that a program can compare.
//!
//! A list of objects. The first one is of suite `about`: machine, commands, what was left out and
//! why. The others are [`Row`]s. A suite that is run again replaces its own rows and leaves the
//! others'.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// One figure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub suite: String,
    /// Words separated by single spaces.
    pub case: String,
    /// I/Os in flight on each queue; 0 where that means nothing.
    #[serde(default)]
    pub depth: u32,
    /// Queues, over all controllers; 0 where that means nothing.
    #[serde(default)]
    pub queues: u32,
    pub metric: String,
    /// The median of `runs`.
    pub value: f64,
    pub unit: String,
    /// All runs in their order.
    #[serde(default)]
    pub runs: Vec<f64>,
}

/// Where and how it was measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct About {
    pub machine: Machine,
    /// The commands that measured, oldest first.
    pub command: String,
    /// The same, one by one.
    pub commands: Vec<String>,
    pub left_out: Vec<LeftOut>,
}

/// What was not measured.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct LeftOut {
    pub suite: String,
    pub what: String,
    pub why: String,
}

/// A machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    pub cpu: String,
    pub cpus: usize,
    pub memory_mib: u64,
    pub kernel: String,
    pub hypervisor: bool,
    /// Of this program.
    pub version: String,
    /// Seconds since 1970.
    pub time: u64,
    /// One-minute load average before measuring: what else the machine did.
    pub load: f64,
}

/// The whole file.
#[derive(Clone, Debug, Default)]
pub struct Results {
    pub about: About,
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
    about: About,
}

/// The name of the file in the output directory.
pub const FILE: &str = "results.json";

impl Results {
    /// What the file holds; nothing when there is no file.
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

    /// Writes the file, whole or not at all.
    pub fn write(&self, path: &Path) -> Result<()> {
        let about = Object::About(TaggedAbout {
            suite: "about".into(),
            about: self.about.clone(),
        });
        let rows = self.rows.iter().cloned().map(Object::Row);
        let objects: Vec<Object> = std::iter::once(about).chain(rows).collect();
        // One line each: readable, and easy to compare.
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

    /// Takes a suite's figures in; its old ones go.
    pub fn replace(&mut self, suite: &str, rows: Vec<Row>, left_out: Vec<LeftOut>) {
        self.rows.retain(|row| row.suite != suite);
        self.rows.extend(rows);
        self.about.left_out.retain(|l| l.suite != suite);
        self.about.left_out.extend(left_out);
    }

    /// Takes another file's suites in.
    pub fn merge(&mut self, other: Results) {
        let mut suites: Vec<&str> = other.rows.iter().map(|r| r.suite.as_str()).collect();
        suites.extend(other.about.left_out.iter().map(|l| l.suite.as_str()));
        suites.sort_unstable();
        suites.dedup();
        for suite in suites {
            let rows = other.rows.iter().filter(|r| r.suite == suite);
            let left = other.about.left_out.iter().filter(|l| l.suite == suite);
            self.replace(suite, rows.cloned().collect(), left.cloned().collect());
        }
        for command in other.about.commands {
            self.about.ran(&command);
        }
    }

    /// A figure with its runs.
    pub fn row(
        &self,
        suite: &str,
        case: &str,
        depth: u32,
        queues: u32,
        metric: &str,
    ) -> Option<&Row> {
        self.rows.iter().find(|r| {
            r.suite == suite
                && r.case == case
                && r.depth == depth
                && r.queues == queues
                && r.metric == metric
        })
    }
}

impl About {
    /// A command measured.
    pub fn ran(&mut self, command: &str) {
        self.commands.retain(|c| c != command);
        self.commands.push(command.to_owned());
        self.command = self.commands.join("; ");
    }
}

impl Machine {
    /// This one.
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
        }
    }
}

/// The quotient of two figures: the median of its runs' quotients, since what a run of one is to be
/// compared with is that run of the other, not another hour's. Of the medians, where there are not
/// as many runs of both.
pub fn quotient(over: &Row, under: &Row) -> f64 {
    if over.runs.is_empty() || over.runs.len() != under.runs.len() {
        return over.value / under.value;
    }
    let pairs = over.runs.iter().zip(&under.runs);
    median(&pairs.map(|(over, under)| over / under).collect::<Vec<_>>())
}

/// The middle one, or the mean of the two in the middle.
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

/// Collects the runs of figures.
#[derive(Clone, Default)]
pub struct Collector {
    rows: Vec<Row>,
}

/// What a figure is of.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    pub suite: &'a str,
    pub case: &'a str,
    pub depth: u32,
    pub queues: u32,
}

impl Collector {
    /// One run's figure.
    pub fn add(&mut self, case: Case<'_>, metric: &str, unit: &str, value: f64) {
        let found = self.rows.iter_mut().find(|r| {
            r.case == case.case
                && r.depth == case.depth
                && r.queues == case.queues
                && r.metric == metric
        });
        match found {
            Some(row) => row.runs.push(value),
            None => self.rows.push(Row {
                suite: case.suite.to_owned(),
                case: case.case.to_owned(),
                depth: case.depth,
                queues: case.queues,
                metric: metric.to_owned(),
                value: 0.0,
                unit: unit.to_owned(),
                runs: vec![value],
            }),
        }
    }

    /// The rows with their medians.
    pub fn rows(mut self) -> Vec<Row> {
        for row in &mut self.rows {
            row.value = median(&row.runs);
        }
        self.rows
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
    fn quotients_are_of_runs_with_each_other() {
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
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn a_suite_that_is_run_again_replaces_its_own_rows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let mut results = Results::default();
        results.about.ran("vnvme bench --suite limit");
        for value in [1.0, 3.0, 2.0] {
            let mut collector = Collector::default();
            collector.add(CASE, "iops", "1/s", value);
            collector.add(CASE, "iops", "1/s", value);
            results.replace("limit", collector.rows(), Vec::new());
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
        results.replace("file", collector.rows(), vec![left.clone()]);
        results.write(&path).unwrap();
        let read = Results::read(&path).unwrap();
        assert_eq!(read.rows, results.rows);
        assert_eq!(read.rows.len(), 2);
        let row = read.row("limit", "null mapped", 1, 1, "iops");
        assert_eq!(row.map(|row| row.value), Some(2.0));
        assert_eq!(read.about.left_out, [left]);
        assert_eq!(read.about.command, "vnvme bench --suite limit");
        let text = std::fs::read_to_string(&path).unwrap();
        let first = text.lines().nth(1).unwrap();
        assert!(first.starts_with("{\"suite\":\"about\""), "{first}");
    }

    #[test]
    fn nothing_yet_is_no_error() {
        assert!(
            Results::read(Path::new("/no/such/file"))
                .unwrap()
                .rows
                .is_empty()
        );
    }
}
