//! Prometheus text exposition format 0.0.4:
//! <https://prometheus.io/docs/instrumenting/exposition_formats/>.

use crate::{Metric, Type};
use std::fmt::{Display, Write};

/// Media type of an [`Exposition`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Text in the exposition format, built by metric families.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
}

/// Writer for the samples of one metric.
pub struct Family<'a> {
    text: &'a mut String,
    metric: &'a Metric,
    begun: bool,
}

/// A label: its name, which is one of ours, and its value, which may be any text.
pub(crate) type Label<'a> = (&'a str, &'a str);

/// Appends to the text; writing to a string does not fail.
fn put(text: &mut String, what: impl Display) {
    let _ = write!(text, "{what}");
}

/// Appends a label value or a help text. Escapes backslashes and line feeds, and in labels also
/// quotation marks. Other UTF-8 characters need no escape.
pub(crate) fn escape(text: &mut String, value: &str, quotes: bool) {
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '"' if quotes => text.push_str("\\\""),
            c => text.push(c),
        }
    }
}

impl Exposition {
    /// Starts a family, which contains all samples of a metric. Writes nothing until the first
    /// sample.
    pub fn family<'a>(&'a mut self, metric: &'a Metric) -> Family<'a> {
        Family {
            text: &mut self.text,
            metric,
            begun: false,
        }
    }

    /// Returns the complete text, to be served with [`CONTENT_TYPE`].
    pub fn finish(self) -> String {
        self.text
    }
}

impl Family<'_> {
    fn begin(&mut self) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let Metric {
            name, kind, help, ..
        } = self.metric;
        put(self.text, format_args!("# HELP {name} "));
        escape(self.text, help, false);
        put(self.text, format_args!("\n# TYPE {name} {}\n", kind.name()));
    }

    fn line(&mut self, suffix: &str, labels: &[Label<'_>], le: Option<&str>, value: impl Display) {
        put(self.text, self.metric.name);
        self.text.push_str(suffix);
        let mut before = '{';
        for (name, value) in labels.iter().copied().chain(le.map(|le| ("le", le))) {
            self.text.push(before);
            before = ',';
            put(self.text, name);
            self.text.push_str("=\"");
            escape(self.text, value, true);
            self.text.push('"');
        }
        if before == ',' {
            self.text.push('}');
        }
        put(self.text, format_args!(" {value}\n"));
    }

    /// Writes a sample of a counter or a gauge.
    pub fn sample(&mut self, labels: &[Label<'_>], value: impl Display) {
        debug_assert!(self.metric.kind != Type::Histogram, "{}", self.metric.name);
        self.begin();
        self.line("", labels, None, value);
    }

    /// Writes a histogram: the number of values up to each bound, their total number, and their
    /// sum.
    pub fn histogram(
        &mut self,
        labels: &[Label<'_>],
        buckets: impl Iterator<Item = (&'static str, u64)>,
        count: u64,
        sum: impl Display,
    ) {
        debug_assert!(self.metric.kind == Type::Histogram, "{}", self.metric.name);
        self.begin();
        for (le, below) in buckets {
            self.line("_bucket", labels, Some(le), below);
        }
        self.line("_bucket", labels, Some("+Inf"), count);
        self.line("_sum", labels, None, sum);
        self.line("_count", labels, None, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTER: Metric = Metric {
        name: "vnvme_test_total",
        kind: Type::Counter,
        unit: "",
        labels: &["disk"],
        help: "A back\\slash\nand \"quotes\".",
    };
    const HISTOGRAM: Metric = Metric {
        name: "vnvme_test_seconds",
        kind: Type::Histogram,
        ..COUNTER
    };

    #[test]
    fn label_values_are_escaped() {
        let mut text = Exposition::default();
        let mut family = text.family(&COUNTER);
        family.sample(&[("disk", "a\"} 1\nevil{x=\"\\"), ("op", "léser 磁盘")], 7);
        family.sample(&[], u64::MAX);
        assert_eq!(
            text.finish(),
            "# HELP vnvme_test_total A back\\\\slash\\nand \"quotes\".\n\
             # TYPE vnvme_test_total counter\n\
             vnvme_test_total{disk=\"a\\\"} 1\\nevil{x=\\\"\\\\\",op=\"léser 磁盘\"} 7\n\
             vnvme_test_total 18446744073709551615\n"
        );
    }

    #[test]
    fn family_without_samples_is_omitted() {
        let mut text = Exposition::default();
        text.family(&COUNTER);
        assert_eq!(text.finish(), "");
    }

    #[test]
    fn histogram_ends_with_total() {
        let mut text = Exposition::default();
        let buckets = [("0.1", 1), ("1", 3)].into_iter();
        text.family(&HISTOGRAM)
            .histogram(&[("disk", "a")], buckets, 4, 2.5);
        let lines = text.finish();
        let lines: Vec<&str> = lines.lines().skip(2).collect();
        assert_eq!(
            lines,
            [
                "vnvme_test_seconds_bucket{disk=\"a\",le=\"0.1\"} 1",
                "vnvme_test_seconds_bucket{disk=\"a\",le=\"1\"} 3",
                "vnvme_test_seconds_bucket{disk=\"a\",le=\"+Inf\"} 4",
                "vnvme_test_seconds_sum{disk=\"a\"} 2.5",
                "vnvme_test_seconds_count{disk=\"a\"} 4",
            ]
        );
    }
}
