//! Reports of fio, and of programs with the same format.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The figures of one job, reads and writes together.
pub struct JobFigures {
    /// I/Os that ended.
    pub ios: u64,
    /// I/Os per second.
    pub iops: f64,
    /// Median and 99th percentile of the completion latency in nanoseconds, of the
    /// direction with more I/Os.
    pub p50_ns: f64,
    /// The 99th percentile.
    pub p99_ns: f64,
}

impl JobFigures {
    /// Reads fio's JSON; whatever was printed before it is passed over.
    pub fn parse(text: &str) -> Result<JobFigures> {
        let json = text.get(text.find('{').unwrap_or(0)..).unwrap_or_default();
        let document: Value =
            serde_json::from_str(json).with_context(|| format!("fio's report: {text}"))?;
        let job = &document["jobs"][0];
        let ios = |flow: &Value| flow["total_ios"].as_u64().unwrap_or(0);
        let (read, write) = (&job["read"], &job["write"]);
        let more = if ios(write) > ios(read) { write } else { read };
        let percentile = |name: &str| more["clat_ns"]["percentile"][name].as_f64().unwrap_or(0.0);
        let report = JobFigures {
            ios: ios(read) + ios(write),
            iops: read["iops"].as_f64().unwrap_or(0.0) + write["iops"].as_f64().unwrap_or(0.0),
            p50_ns: percentile("50.000000"),
            p99_ns: percentile("99.000000"),
        };
        ensure!(report.ios > 0, "no I/O ended: {text}");
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_are_added() -> Result<()> {
        let text = r#"fio: a note {"jobs":[{"read":{"total_ios":2,"iops":1.5,"clat_ns":{"percentile":{"50.000000":7,"99.000000":9}}},
            "write":{"total_ios":1,"iops":0.5}}]}"#;
        let text = text.strip_prefix("fio: a note ").unwrap_or_default();
        let report = JobFigures::parse(&format!("a note\n{text}"))?;
        assert_eq!((report.ios, report.iops, report.p50_ns), (3, 2.0, 7.0));
        assert!(JobFigures::parse("{}").is_err());
        Ok(())
    }
}
