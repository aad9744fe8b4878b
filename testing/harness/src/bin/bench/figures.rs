//! Figures of many runs, and their form in `results.json`.

use serde_json::{Value, json};

/// All runs of a figure.
struct Figure {
    case: String,
    depth: u32,
    metric: &'static str,
    unit: &'static str,
    runs: Vec<f64>,
}

/// The figures of one suite, and why any are missing.
pub struct Figures {
    suite: &'static str,
    all: Vec<Figure>,
    left_out: Vec<(String, String)>,
}

impl Figures {
    /// None yet.
    pub fn new(suite: &'static str) -> Figures {
        Figures {
            suite,
            all: Vec::new(),
            left_out: Vec::new(),
        }
    }

    /// Adds the figure of one run.
    pub fn add(
        &mut self,
        case: &str,
        depth: u32,
        metric: &'static str,
        unit: &'static str,
        value: f64,
    ) {
        let same = |f: &&mut Figure| f.case == case && f.depth == depth && f.metric == metric;
        match self.all.iter_mut().find(same) {
            Some(figure) => figure.runs.push(value),
            None => self.all.push(Figure {
                case: case.into(),
                depth,
                metric,
                unit,
                runs: vec![value],
            }),
        }
    }

    /// Something was not measured.
    pub fn leave_out(&mut self, what: &str, why: String) {
        eprintln!("left out of {}: {what}: {why}", self.suite);
        self.left_out.push((what.into(), why));
    }

    /// Returns the figures left out, with the reasons, for the object `about`.
    pub fn left_out(&self) -> Vec<Value> {
        let one =
            |(what, why): &(String, String)| json!({"suite": self.suite, "what": what, "why": why});
        self.left_out.iter().map(one).collect()
    }

    /// The medians.
    pub fn rows(&self) -> Vec<Value> {
        let row = |figure: &Figure| {
            let mut sorted = figure.runs.clone();
            sorted.sort_by(f64::total_cmp);
            let upper = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
            let lower = sorted.get((sorted.len() - 1) / 2).copied().unwrap_or(0.0);
            json!({
                "suite": self.suite, "case": figure.case, "depth": figure.depth, "queues": 1,
                "metric": figure.metric, "unit": figure.unit, "value": (upper + lower) / 2.0, "runs": figure.runs,
            })
        };
        self.all.iter().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_runs_become_medians() {
        let mut figures = Figures::new("guest");
        for value in [3.0, 1.0, 2.0, 9.0] {
            figures.add("a", 1, "iops", "1/s", value);
            figures.add("a", 2, "iops", "1/s", value);
        }
        let rows = figures.rows();
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0]["value"], 2.5);
        assert_eq!(rows[1]["runs"].as_array().map(Vec::len), Some(4));
    }
}
