//! Comparison of current figures with saved ones: `--keep DIR` and `--compare FILE`.
//!
//! The saved figures are medians, without their runs, in a file of the same form as `results.json`.
//! A folder has one file for each machine, named after its processors. Figures of two hours are no
//! ratios of one run: a shared machine adds differences of its own, and more the fewer slices a
//! median has. So a difference is shown from [`MAX_EQUAL_RATIO`] on, and is marked where one of the
//! two figures is unreliable. `--beside` decides whether a change made something faster.

use crate::distance::agree;
use crate::results::{FILE, Machine, Results, Row};
use anyhow::{Context, Result, bail};
use output::outln;
use std::path::{Path, PathBuf};

/// Maximum factor between two figures that count as equal.
const MAX_EQUAL_RATIO: f64 = 1.05;

/// Direction in which a figure improves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Better {
    More,
    Less,
}

/// Returns whether a figure of the program is better when higher or lower; `None` for figures of
/// the machine or of the measurement itself.
fn better(row: &Row) -> Option<Better> {
    match row.metric.as_str() {
        "iops" | "limited_iops" | "of_bare" | "of_limit" => Some(Better::More),
        "ns_per_io"
        | "p50_ns"
        | "p99_ns"
        | "added_ns"
        | "mmio_per_io"
        | "instructions_per_io"
        | "start"
        | "memory"
        | "idle_cpu"
        | "threads" => Some(Better::Less),
        _ => None,
    }
}

/// A saved figure and the current one.
#[derive(Clone, Debug, PartialEq)]
struct Pair<'a> {
    kept: &'a Row,
    today: &'a Row,
    /// Factor by which the current figure is better.
    times: f64,
}

impl Pair<'_> {
    fn is_doubtful(&self) -> bool {
        let doubtful = |row: &Row| row.slices.is_some_and(|slices| slices.is_doubtful());
        doubtful(self.kept) || doubtful(self.today)
    }
}

/// Pairs the figures that both results contain. Also returns the number of figures that only one of
/// them contains.
fn pairs<'a>(kept: &'a Results, today: &'a Results) -> (Vec<Pair<'a>>, usize) {
    let mut pairs = Vec::new();
    let mut alone = 0;
    for row in &today.rows {
        let Some(better) = better(row) else {
            continue;
        };
        let Some(kept) = kept.rows.iter().find(|kept| is_same(kept, row)) else {
            alone += 1;
            continue;
        };
        let quotient = row.value / kept.value;
        let times = match better {
            Better::More => quotient,
            Better::Less => 1.0 / quotient,
        };
        // Both figures are zero: an idle process, no register write.
        let times = if times.is_nan() { 1.0 } else { times };
        pairs.push(Pair {
            kept,
            today: row,
            times,
        });
    }
    (pairs, alone)
}

/// Returns whether two rows are the same figure at the same distance, even if the round trips
/// differ between the days.
fn is_same(one: &Row, other: &Row) -> bool {
    let at_one_distance = match (one.distance, other.distance) {
        (Some(one), Some(other)) => agree(one, other),
        (one, other) => one == other,
    };
    at_one_distance
        && one.suite == other.suite
        && one.case == other.case
        && one.metric == other.metric
        && (one.depth, one.queues) == (other.depth, other.queues)
}

/// Returns the file of saved figures for a path: the file itself, or this machine's file in a
/// directory.
fn kept_file(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.join(file_name(&Machine::here()))
    } else {
        path.to_owned()
    }
}

/// Returns the name of a machine's file, derived from its processors: "amd-epyc-2.json".
fn file_name(machine: &Machine) -> String {
    let words = machine.cpu.split(|c: char| !c.is_ascii_alphanumeric());
    let mut words: Vec<String> = words.map(str::to_ascii_lowercase).collect();
    words.push(machine.cpus.to_string());
    words.retain(|word| !word.is_empty());
    format!("{}.json", words.join("-"))
}

/// Saves the figures in `output` to this machine's file in a directory.
///
/// # Errors
/// An error when there are no figures, or they cannot be written.
pub fn keep(output: &Path, folder: &Path) -> Result<()> {
    let mut results = Results::read(&output.join(FILE))?;
    if results.rows.is_empty() {
        bail!("--keep: {} has no figures yet", output.display());
    }
    for row in &mut results.rows {
        row.runs = Vec::new();
        row.rounds = Vec::new();
    }
    std::fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
    let file = folder.join(file_name(&Machine::here()));
    results.write(&file)?;
    outln!("kept: {}", file.display());
    Ok(())
}

/// Prints the differences between the figures in `output` and saved ones, optionally of a single
/// suite.
///
/// # Errors
/// An error when either side has no figures or cannot be read.
pub fn compare(output: &Path, with: &Path, only: Option<&str>) -> Result<()> {
    let file = kept_file(with);
    if !file.exists() && with.is_dir() {
        outln!("\n{}: nothing was kept of this machine yet", with.display());
        return Ok(());
    }
    if !file.exists() {
        bail!("--compare {}: there is no such file", file.display());
    }
    let kept = Results::read(&file)?;
    let mut today = Results::read(&output.join(FILE))?;
    today
        .rows
        .retain(|row| only.is_none_or(|suite| row.suite == suite));
    for (results, path) in [(&kept, file.as_path()), (&today, output)] {
        if results.rows.is_empty() {
            bail!("--compare: {} has no figures", path.display());
        }
    }
    for line in lines(&kept, &today, &file) {
        outln!("{line}");
    }
    Ok(())
}

fn lines(kept: &Results, today: &Results, file: &Path) -> Vec<String> {
    let mut lines = vec![format!("\nbeside {}", file.display())];
    let (then, now) = (&kept.about.machine, &today.about.machine);
    if (&then.cpu, then.cpus) != (&now.cpu, now.cpus) {
        lines.push(format!(
            "those are of another machine: {}, {} CPUs; this one: {}, {} CPUs",
            then.cpu, then.cpus, now.cpu, now.cpus
        ));
    }
    let (mut pairs, alone) = pairs(kept, today);
    let all = pairs.len();
    pairs.retain(|pair| !(1.0 / MAX_EQUAL_RATIO..=MAX_EQUAL_RATIO).contains(&pair.times));
    // The worst first.
    pairs.sort_by(|one, other| one.times.total_cmp(&other.times));
    let names: Vec<String> = pairs.iter().map(|pair| name(pair.today)).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0);
    for (pair, name) in pairs.iter().zip(&names) {
        let word = if pair.times < 1.0 { "worse" } else { "better" };
        let doubt = if pair.is_doubtful() {
            " (few or scattered slices)"
        } else {
            ""
        };
        lines.push(format!(
            "  {name:width$}  {:>9} -> {:>9} {:4} {:5.2} times as good: {word}{doubt}",
            figure(pair.kept.value),
            figure(pair.today.value),
            unit(&pair.today.unit),
            pair.times,
        ));
    }
    let worse = pairs.iter().filter(|pair| pair.times < 1.0).count();
    lines.push(format!(
        "{all} figures of both: {worse} worse, {} better, {} within {:.0}%; {alone} of today only",
        pairs.len() - worse,
        all - pairs.len(),
        (MAX_EQUAL_RATIO - 1.0) * 100.0
    ));
    lines
}

fn name(row: &Row) -> String {
    let mut name = format!("{} {}", row.suite, row.case);
    if row.depth > 0 {
        name.push_str(&format!(", depth {}", row.depth));
    }
    if row.queues > 1 {
        name.push_str(&format!(", {} queues", row.queues));
    }
    if let Some(distance) = row.distance {
        name.push_str(&format!(", at {distance:.0} ns"));
    }
    format!("{name}: {}", row.metric)
}

fn unit(unit: &str) -> &str {
    if unit == "1" { "" } else { unit }
}

/// Formats a figure with four digits.
fn figure(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let before_point = value.abs().log10().floor() as i32 + 1;
    let digits = usize::try_from(4 - before_point).unwrap_or(0);
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Slices;

    fn row(case: &str, metric: &str, value: f64, distance: Option<f64>) -> Row {
        Row {
            suite: "limit".to_owned(),
            case: case.to_owned(),
            depth: 32,
            queues: 1,
            metric: metric.to_owned(),
            value,
            distance,
            runs: vec![value; 3],
            rounds: vec![0, 1, 2],
            ..Row::default()
        }
    }

    fn results(rows: Vec<Row>) -> Results {
        Results {
            rows,
            ..Results::default()
        }
    }

    #[test]
    fn comparison_respects_measure_and_distance() {
        let kept = results(vec![
            row("null", "iops", 100.0, Some(110.0)),
            row("null", "iops", 40.0, Some(500.0)),
            row("null", "p50_ns", 100.0, None),
            row("null", "rtt_ns", 1.0, None),
        ]);
        let today = results(vec![
            row("null", "iops", 200.0, Some(120.0)),
            row("null", "iops", 20.0, Some(520.0)),
            row("null", "p50_ns", 400.0, None),
            row("null", "rtt_ns", 9.0, None),
            row("null", "iops", 1.0, Some(250.0)),
        ]);
        let (pairs, alone) = pairs(&kept, &today);
        let times: Vec<f64> = pairs.iter().map(|pair| pair.times).collect();
        assert_eq!((times, alone), (vec![2.0, 0.5, 0.25], 1));
    }

    #[test]
    fn comparison_lists_worst_first() {
        let mut doubtful = row("c", "iops", 50.0, None);
        doubtful.slices = Some(Slices {
            count: 2,
            p10: 1.0,
            p90: 1.0,
        });
        let kept = results(vec![
            row("a", "iops", 100.0, None),
            row("b", "p99_ns", 100.0, None),
            row("c", "iops", 100.0, None),
            row("d", "mmio_per_io", 0.0, None),
        ]);
        let today = results(vec![
            row("a", "iops", 104.0, None),
            row("b", "p99_ns", 50.0, None),
            doubtful,
            row("d", "mmio_per_io", 0.0, None),
        ]);
        let lines = lines(&kept, &today, Path::new("old.json"));
        let [_, worst, best, sum] = lines.as_slice() else {
            panic!("{lines:#?}");
        };
        assert!(worst.contains("limit c, depth 32: iops"), "{worst}");
        assert!(worst.contains("0.50 times as good: worse (few"), "{worst}");
        assert!(best.contains("2.00 times as good: better"), "{best}");
        assert!(!best.contains("(few"), "{best}");
        let said = "4 figures of both: 1 worse, 1 better, 2 within 5%; 0 of today only";
        assert_eq!(sum, said);
    }

    #[test]
    fn comparison_names_other_machine() {
        let mut kept = results(vec![row("a", "iops", 1.0, None)]);
        kept.about.machine.cpu = "Other".to_owned();
        let lines = lines(
            &kept,
            &results(vec![row("a", "iops", 1.0, None)]),
            Path::new("f"),
        );
        assert!(
            lines
                .iter()
                .any(|line| line.contains("another machine: Other"))
        );
    }

    #[test]
    fn baseline_is_kept_per_machine() {
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("bench");
        let folder = dir.path().join("kept");
        assert!(keep(&output, &folder).is_err(), "nothing to keep");
        std::fs::create_dir(&output).unwrap();
        let found = results(vec![row("a", "iops", 7.0, None)]);
        found.write(&output.join(FILE)).unwrap();
        assert!(compare(&output, &folder, None).is_err(), "nothing kept");
        std::fs::create_dir(&folder).unwrap();
        compare(&output, &folder, None).unwrap();
        keep(&output, &folder).unwrap();
        let file = kept_file(&folder);
        let kept = Results::read(&file).unwrap();
        assert_eq!(kept.rows[0].value, 7.0);
        assert!(kept.rows[0].runs.is_empty() && kept.rows[0].rounds.is_empty());
        compare(&output, &folder, None).unwrap();
        compare(&output, &file, Some("limit")).unwrap();
        assert!(compare(&output, &file, Some("file")).is_err());
        let machine = Machine {
            cpu: "AMD EPYC (x) 9B14".to_owned(),
            cpus: 2,
            ..Machine::default()
        };
        assert_eq!(file_name(&machine), "amd-epyc-x-9b14-2.json");
    }

    #[test]
    fn figures_have_four_significant_digits() {
        let shown = [0.0, 0.012_34, 3.876, 123.4, 123_456.0].map(figure);
        assert_eq!(shown, ["0", "0.01234", "3.876", "123.4", "123456"]);
    }
}
