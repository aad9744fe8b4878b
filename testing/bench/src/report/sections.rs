//! Sections of the report, one for each suite: text, tables and plots.

mod guest;
mod native;
mod processes;
mod share;

use super::chart::{Chart, Shape};
use super::documents;
use super::table::Table;
use crate::results::{Case, Results, Row, quotient};
use std::collections::BTreeSet;

/// Section of the report for one suite.
pub struct Section {
    pub id: &'static str,
    pub title: &'static str,
    pub intro: &'static str,
    pub tables: Vec<Table>,
    pub charts: Vec<Chart>,
}

/// Returns the sections of all suites with figures.
pub fn all(results: &Results) -> Vec<Section> {
    let makers: [fn(&Results) -> Section; 10] = [
        native::limit,
        native::doorbell,
        guest::guest,
        guest::driver,
        native::file,
        native::scale,
        guest::mediate,
        share::share,
        processes::processes,
        native::cost,
    ];
    let mut all: Vec<Section> = makers.iter().map(|make| make(results)).collect();
    for section in &mut all {
        section.tables.retain(|table| !table.rows.is_empty());
        for table in &mut section.tables {
            table.across = across(section.id, &table.columns);
        }
    }
    all.retain(|section| !section.tables.is_empty());
    all
}

/// Returns the quantity that numeric column names stand for; empty for columns with other names.
fn across(suite: &str, columns: &[String]) -> &'static str {
    let number = |text: &str| text.trim().parse::<u32>().is_ok();
    let numbers = |text: &String| text.split('\u{d7}').all(number);
    match (suite, columns.iter().any(|name| name.contains('\u{d7}'))) {
        _ if !columns.iter().all(numbers) => "",
        ("scale", _) => "how many",
        (_, true) => "depth \u{d7} queues",
        (_, false) => "depth",
    }
}

/// Function that formats a figure.
type Show = fn(f64) -> String;
/// Coordinates of a figure: depth and number of queues.
type Point = (u32, u32);

/// Access to the figures of one suite, at one distance.
#[derive(Clone)]
pub struct View<'a> {
    results: &'a Results,
    suite: &'static str,
    /// Round trip of the selected distance, for suites that distinguish distances.
    distance: Option<f64>,
    /// Depths and numbers of queues of the suite's loads.
    points: Vec<Point>,
}

impl<'a> View<'a> {
    /// Creates a view at the most frequent distance between the CPUs.
    pub fn new(results: &'a Results, suite: &'static str) -> Self {
        let distances = results.about.distances(suite);
        let most = distances.max_by(|one, other| one.share.total_cmp(&other.share));
        let mut view = Self {
            results,
            suite,
            distance: most.map(|d| d.round_trip),
            points: Vec::new(),
        };
        view.points = view.points(|case| !["pingpong", "copying"].contains(&case));
        view
    }

    /// Returns a view for each distance, nearest first, with its description. For a suite that does
    /// not distinguish distances, a single view with an empty description.
    fn by_distance(&self) -> Vec<(Self, String)> {
        let mut all = Vec::new();
        for found in self.results.about.distances(self.suite) {
            let (trip, share) = (found.round_trip, 100.0 * found.share);
            let mut view = self.clone();
            view.distance = Some(trip);
            let words = format!(" \u{2013} at {trip:.0} ns, {share:.0}% of the time");
            all.push((view, words));
        }
        if all.is_empty() {
            all.push((self.clone(), String::new()));
        }
        all
    }

    pub fn get(&self, case: &str, point: Point, metric: &str) -> Option<f64> {
        Some(self.figure(case, point, metric)?.value)
    }

    pub fn figure(&self, case: &str, (depth, queues): Point, metric: &str) -> Option<&'a Row> {
        let case = Case {
            suite: self.suite,
            case,
            depth,
            queues,
        };
        let at = |distance| self.results.row(case, metric, distance);
        // A suite may also have figures without a distance.
        at(self.distance).or_else(|| at(None))
    }

    /// Returns the depths and numbers of queues with figures, for cases that `wanted` selects.
    pub fn points(&self, wanted: impl Fn(&str) -> bool) -> Vec<Point> {
        let rows = self.results.rows.iter();
        let rows = rows.filter(|r| r.suite == self.suite && wanted(&r.case));
        let set: BTreeSet<(u32, u32)> = rows.map(|r| (r.queues, r.depth)).collect();
        set.into_iter()
            .map(|(queues, depth)| (depth, queues))
            .collect()
    }

    /// Returns an empty table with a column for each point.
    fn table(&self, title: impl Into<String>) -> Table {
        Table::new(title, depth_names(&self.points))
    }

    /// Returns a chart without series, with a label for each point.
    fn chart(&self, name: &str, title: &str, shape: Shape) -> Chart {
        let labels = depth_names(&self.points);
        Chart::new(name, title, across(self.suite, &labels), labels, shape)
    }

    /// Returns a case's values at the points.
    fn values(&self, case: &str, metric: &str) -> Vec<Option<f64>> {
        let points = self.points.iter();
        points.map(|p| self.get(case, *p, metric)).collect()
    }

    /// Returns a case's values at the points as cells of a table; doubtful ones have a `?`.
    fn cells(&self, case: &str, metric: &str, show: Show) -> Vec<Option<String>> {
        let cell = |p: &Point| {
            let figure = self.figure(case, *p, metric)?;
            let doubtful = figure.slices.is_some_and(|slices| slices.is_doubtful());
            Some(show(figure.value) + if doubtful { "?" } else { "" })
        };
        self.points.iter().map(cell).collect()
    }

    /// Returns the ratios of two cases' IOPS: medians of the ratios within each run.
    fn ratios(&self, over: &str, under: &str) -> Vec<Option<String>> {
        let cell = |p: &Point| {
            let figure = |case| self.figure(case, *p, "iops");
            Some(times(quotient(figure(over)?, figure(under)?)))
        };
        self.points.iter().map(cell).collect()
    }

    /// Returns tables with the ratios to the compared program, of IOPS and of median latencies.
    fn beside(&self, cases: &[impl AsRef<str>], words: &str) -> [Table; 3] {
        let latency = "Median latency of the program beside \u{f7} that of this";
        let quotients = [
            ("IOPS \u{f7} those of the program beside it", "of_beside"),
            ("The same, outside gaps", "running_of_beside"),
            (latency, "p50_of_beside"),
        ];
        quotients.map(|(title, metric)| {
            let mut table = self.table(format!("{title}{words}"));
            for case in cases.iter().map(AsRef::as_ref) {
                table.row(case, self.cells(case, metric, times));
            }
            table
        })
    }

    /// Returns a document's values at the points.
    fn quoted(&self, series: &documents::Series) -> Vec<Option<f64>> {
        let quoted = |&(depth, queues): &Point| {
            let mut points = series.points.iter();
            let found = points.find(|(d, q, _)| *d == depth && *q == queues.max(1));
            found.map(|(_, _, value)| *value)
        };
        self.points.iter().map(quoted).collect()
    }

    /// Adds rows with a document's values to a table.
    fn quote(&self, table: &mut Table, pair: &[documents::Series; 2], show: Show) {
        for series in pair {
            table.quote(series.name, shown(self.quoted(series), show));
        }
    }

    /// Adds a row with a document's gain, the ratio of "on" to "off".
    fn quote_gain(&self, table: &mut Table, name: &str, [off, on]: &[documents::Series; 2]) {
        let pairs = self.quoted(on).into_iter().zip(self.quoted(off));
        let cells = pairs.map(|(on, off)| Some(times(on? / off?)));
        table.quote(name, cells.collect());
    }
}

/// Returns values as cells of a table.
fn shown(values: Vec<Option<f64>>, show: impl Fn(f64) -> String) -> Vec<Option<String>> {
    values.into_iter().map(|value| value.map(&show)).collect()
}

fn times(value: f64) -> String {
    format!("{value:.2}\u{d7}")
}

fn percent(value: f64) -> String {
    // A share that rounding has made less than nothing is nothing.
    format!("{:.1}%", (100.0 * value).max(0.0) + 0.0)
}

fn per_io(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        v if v < 0.01 => format!("{v:.5}"),
        v => format!("{v:.2}"),
    }
}

fn depth_names(points: &[Point]) -> Vec<String> {
    let name = |&(depth, queues): &Point| match queues {
        0 | 1 => depth.to_string(),
        queues => format!("{depth} \u{d7} {queues}"),
    };
    points.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Collector;

    fn results(suite: &str, rows: &[(&str, u32, u32, &str, f64)]) -> Results {
        let mut collector = Collector::default();
        for (case, depth, queues, metric, value) in rows {
            let case = Case {
                suite,
                case,
                depth: *depth,
                queues: *queues,
            };
            collector.add(case, metric, "", *value);
        }
        let mut results = Results::default();
        results.replace(suite, collector.figures(), Vec::new());
        results
    }

    #[test]
    fn empty_results_have_no_sections() {
        assert!(all(&Results::default()).is_empty());
    }

    #[test]
    fn document_figures_appear_beside_measured_ones() {
        let results = results(
            "doorbell",
            &[
                ("shadow off", 4, 1, "iops", 100_000.0),
                ("shadow on", 4, 1, "iops", 500_000.0),
                ("shadow on", 4, 1, "mmio_per_io", 0.001),
                ("shadow on", 32, 4, "iops", 2e6),
            ],
        );
        let sections = all(&results);
        let [section] = sections.as_slice() else {
            panic!("{} sections", sections.len());
        };
        let text = section.tables[0].text();
        let line = |name: &str| {
            text.lines()
                .find(|l| l.trim_start().starts_with(name))
                .unwrap()
                .to_owned()
        };
        assert!(line("gain ").contains("5.00\u{d7}"), "{text}");
        assert!(line("QEMU series: on").contains("99.8k"), "{text}");
        assert!(line("QEMU series: gain").contains("4.07\u{d7}"), "{text}");
        assert!(line("Linux patch: on").contains("1.00M"), "{text}");
        assert!(
            !text.contains("Collabora"),
            "no figure at depth 32 with one queue"
        );
        assert!(section.tables[1].text().contains("0.00100"));
    }

    #[test]
    fn driver_gains_are_percentages() {
        let results = results(
            "driver",
            &[
                ("randread libaio", 1, 1, "iops", 1000.0),
                ("randread vnvme", 1, 1, "iops", 1300.0),
            ],
        );
        let text = all(&results)[0].tables[0].text();
        assert!(text.contains("+30%") && text.contains("+12%"), "{text}");
    }
}
