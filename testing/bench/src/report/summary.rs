//! Summary of the figures in a few sentences, for the top of the page.

use super::sections::View;
use crate::results::{Results, quotient};
use load::progress::{nanos, quantity};

/// Returns sentences about the measured and the missing figures.
pub fn sentences(results: &Results) -> Vec<String> {
    let each = [limit, doorbell, file, scale, cost];
    let mut all: Vec<String> = each.iter().filter_map(|of| of(results)).collect();
    let left = results.about.left_out.len();
    if left > 0 && !all.is_empty() {
        all.push(format!(
            "Left out, each with its reason at the end: {left}."
        ));
    }
    all
}

/// Returns the sentence on the number of runs of each case.
pub fn runs(results: &Results) -> &'static str {
    let of_row = |row: &crate::results::Row| match row.slices {
        Some(slices) => slices.count,
        None => row.runs.len(),
    };
    match results.rows.iter().map(of_row).max() {
        Some(0 | 1) => {
            "Each figure is of one run: nothing says how far another run would be from it. "
        }
        _ => {
            "Figures are medians of several runs, interleaved, so that a machine that is slow for \
             a while is slow for all; ratios are medians of those within each run. Where a host \
             moves the CPUs from one distance to another, figures are medians of short slices, for \
             each distance. "
        }
    }
}

fn limit(results: &Results) -> Option<String> {
    let view = View::new(results, "limit");
    let at = |depth| view.get("null mapped", (depth, 1), "ns_per_io");
    let points = view.points(|case| case == "null mapped");
    let deepest = points.iter().map(|(depth, _)| *depth).max()?;
    let missed = results.rows.iter();
    let missed = missed.filter(|row| row.suite == "limit" && row.metric == "of_goal");
    let missed = missed.filter(|row| row.value > 1.0).count();
    let goals = match missed {
        0 => String::new(),
        missed => format!("; {missed} goals are missed"),
    };
    Some(format!(
        "A read of 4 KiB through a virtual controller takes {} at depth 1 and {} at depth \
         {deepest} (a volume that stores nothing, doorbells in a mapped page){goals}.",
        nanos(at(1)?),
        nanos(at(deepest)?)
    ))
}

fn doorbell(results: &Results) -> Option<String> {
    let view = View::new(results, "doorbell");
    let points = view.points(|case| case == "shadow on");
    let point = points
        .into_iter()
        .filter(|(_, queues)| *queues <= 1)
        .max()?;
    let figure = |case| view.figure(case, point, "iops");
    let gain = quotient(figure("shadow on")?, figure("shadow off")?);
    let iops = quantity(view.get("shadow on", point, "iops")?);
    Some(format!(
        "Shadow doorbells give {gain:.1} times the IOPS at depth {}: {iops}.",
        point.0
    ))
}

fn file(results: &Results) -> Option<String> {
    let view = View::new(results, "file");
    let of = |medium: &str| {
        let case = |way: &str| format!("randread {way} {medium}");
        let point = view
            .points(|found| found == case("vnvme"))
            .into_iter()
            .max()?;
        let figure = |way| view.figure(&case(way), point, "iops");
        let share = 100.0 * quotient(figure("vnvme")?, figure("bare")?);
        Some(format!("{share:.0}% on {medium} at depth {}", point.0))
    };
    let parts: Vec<String> = ["tmpfs", "disk"].into_iter().filter_map(of).collect();
    (!parts.is_empty()).then(|| {
        format!(
            "A file behind a controller has, of the IOPS of the same file by io_uring alone, {}.",
            parts.join(" and ")
        )
    })
}

fn scale(results: &Results) -> Option<String> {
    let view = View::new(results, "scale");
    let points = view.points(|case| case.starts_with("controllers"));
    let most = points.iter().map(|(_, count)| *count).max()?;
    let (depth, _) = points
        .into_iter()
        .filter(|(_, count)| *count == most)
        .max()?;
    let get = |count: u32| view.figure(&format!("controllers {count}"), (depth, count), "iops");
    let quotient = quotient(get(most)?, get(1)?);
    Some(format!(
        "{most} controllers on a worker have {quotient:.2} times the IOPS of one, together, at \
         depth {depth}."
    ))
}

fn cost(results: &Results) -> Option<String> {
    let rows = results.rows.iter().filter(|row| row.suite == "cost");
    let (mut values, mut above) = (Vec::new(), 0);
    let view = View::new(results, "cost");
    for row in rows.filter(|row| row.metric == "instructions_per_io") {
        let ceiling = view.get(&row.case, (row.depth, row.queues), "ceiling");
        above += usize::from(ceiling.is_some_and(|ceiling| row.value > ceiling));
        values.push(row.value);
    }
    let low = values.iter().copied().reduce(f64::min)?;
    let high = values.iter().copied().reduce(f64::max)?;
    let ceilings = match above {
        0 => "none above its ceiling".to_owned(),
        above => format!("{above} above their ceilings"),
    };
    Some(format!(
        "Instructions for each I/O: {low:.0} to {high:.0} in {} cases, {ceilings}.",
        values.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Case, Collector};

    fn results(runs: usize) -> Results {
        let mut collector = Collector::default();
        let rows = [
            ("limit", "null mapped", 1, 1, "ns_per_io", 400.0),
            ("limit", "null mapped", 128, 1, "ns_per_io", 90.0),
            ("limit", "null mapped", 128, 1, "of_goal", 1.2),
            ("doorbell", "shadow off", 32, 1, "iops", 100_000.0),
            ("doorbell", "shadow on", 32, 1, "iops", 500_000.0),
            ("file", "randread bare disk", 32, 1, "iops", 200_000.0),
            ("file", "randread vnvme disk", 32, 1, "iops", 190_000.0),
            ("cost", "a loop", 32, 1, "instructions_per_io", 310.0),
            ("cost", "a loop", 32, 1, "ceiling", 300.0),
        ];
        for _ in 0..runs {
            for (suite, case, depth, queues, metric, value) in rows {
                let case = Case {
                    suite,
                    case,
                    depth,
                    queues,
                };
                collector.add(case, metric, "", value);
            }
        }
        let mut results = Results::default();
        // Figures of all suites at once.
        results.replace("limit", collector.figures(), Vec::new());
        results
    }

    #[test]
    fn summary_states_results() {
        let text = sentences(&results(3)).join("\n");
        for words in [
            "takes 400 ns at depth 1 and 90 ns at depth 128",
            "1 goals are missed",
            "5.0 times the IOPS at depth 32",
            "95% on disk at depth 32",
            "310 to 310 in 1 cases, 1 above their ceilings",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(sentences(&Results::default()).is_empty());
    }

    #[test]
    fn single_run_has_no_median() {
        assert!(runs(&results(1)).contains("one run"));
        assert!(runs(&results(3)).contains("medians"));
    }
}
