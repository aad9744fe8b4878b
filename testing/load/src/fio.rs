//! A job's figures in the layout of fio's JSON output (fio 3.x, `--output-format=json`), for
//! existing tools. Values that a load generator of this kind does not have (merges, disk
//! utilisation) are left out or zero, as in fio.

use crate::job::Job;
use crate::stats::{Flow, Measured};
use serde_json::{Map, Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// fio's default percentiles.
pub const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
    99.99,
];

/// Returns the whole JSON document. `bins`: whether to include the histogram of each direction, as
/// in fio's `json+`.
pub fn document(target: &str, job: &Job, measured: &Measured, bins: bool) -> Value {
    let now = SystemTime::now();
    let since = now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let elapsed = (job.ramp + measured.elapsed).as_secs_f64().ceil() as u64;
    let both = measured.both();
    let empty = Flow::default();
    let percent =
        |time: Duration| 100.0 * time.as_secs_f64() / measured.elapsed.as_secs_f64().max(1e-9);
    json!({
        "fio version": concat!("vnvme-", env!("CARGO_PKG_VERSION")),
        "timestamp": since.as_secs(),
        "timestamp_ms": since.as_millis() as u64,
        "jobs": [{
            "jobname": "vnvme",
            "groupid": 0,
            "job_start": since.saturating_sub(job.ramp + measured.elapsed).as_millis() as u64,
            "error": 0,
            "eta": 0,
            "elapsed": elapsed,
            "job options": options(target, job),
            "read": flow(&measured.read, measured, bins),
            "write": flow(&measured.write, measured, bins),
            "trim": flow(&measured.trim, measured, bins),
            "sync": {"total_ios": 0, "lat_ns": latency(&empty, false)},
            "job_runtime": millis(measured) * u64::from(job.queues),
            "usr_cpu": percent(measured.user),
            "sys_cpu": percent(measured.system),
            "ctx": 0,
            "majf": 0,
            "minf": 0,
            "iodepth_level": levels(u64::from(job.depth)),
            "iodepth_submit": levels(batch(measured)),
            "iodepth_complete": levels(batch(measured)),
            "latency_ns": within(&both, 1, &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000]),
            "latency_us": within(&both, 1000, &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000]),
            "latency_ms": within(&both, 1_000_000, &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000, 2000]),
            "latency_depth": job.depth,
            "latency_target": 0,
            "latency_percentile": 100.0,
            "latency_window": 0,
        }],
        "disk_util": [],
    })
}

fn options(target: &str, job: &Job) -> Value {
    let mut options = Map::new();
    let mut add = |name: &str, value: String| options.insert(name.into(), value.into());
    add("name", "vnvme".into());
    add("ioengine", "vnvme".into());
    add("filename", target.into());
    add("rw", job.rw.word().into());
    if job.rw.is_mixed() {
        add("rwmixread", job.mix_read.to_string());
    }
    add("bs", job.bs.to_string());
    add("iodepth", job.depth.to_string());
    add("numjobs", job.queues.to_string());
    match job.ios {
        Some(ios) => add("number_ios", ios.to_string()),
        None => {
            add("time_based", "1".into());
            add("runtime", format!("{}", job.runtime.as_secs_f64()));
            add("ramp_time", format!("{}", job.ramp.as_secs_f64()))
        }
    };
    add("randseed", job.seed.to_string());
    Value::Object(options)
}

fn millis(measured: &Measured) -> u64 {
    measured.elapsed.as_millis() as u64
}

fn flow(flow: &Flow, measured: &Measured, bins: bool) -> Value {
    let bytes_per_second = measured.rate(flow.bytes);
    let iops = measured.rate(flow.ios);
    let kib = (bytes_per_second / 1024.0) as u64;
    let samples = u64::from(flow.ios > 0);
    json!({
        "io_bytes": flow.bytes,
        "io_kbytes": flow.bytes / 1024,
        "bw_bytes": bytes_per_second as u64,
        "bw": kib,
        "iops": iops,
        "runtime": if flow.ios > 0 { millis(measured) } else { 0 },
        "total_ios": flow.ios,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": {"min": 0, "max": 0, "mean": 0.0, "stddev": 0.0, "N": 0},
        "clat_ns": latency(flow, bins),
        "lat_ns": latency(flow, false),
        "bw_min": kib, "bw_max": kib, "bw_agg": if flow.ios > 0 { 100.0 } else { 0.0 },
        "bw_mean": bytes_per_second / 1024.0, "bw_dev": 0.0, "bw_samples": samples,
        "iops_min": iops as u64, "iops_max": iops as u64, "iops_mean": iops, "iops_stddev": 0.0,
        "iops_samples": samples,
    })
}

/// Returns the latency figures of a direction. Submission and completion are one step here, so
/// `clat` and `lat` are equal and `slat` is zero.
fn latency(flow: &Flow, bins: bool) -> Value {
    let histogram = &flow.latency;
    let value = json!({
        "min": if histogram.is_empty() { 0 } else { histogram.min() },
        "max": histogram.max(),
        "mean": flow.mean(),
        "stddev": flow.deviation(),
        "N": histogram.len(),
    });
    let Value::Object(mut value) = value else {
        return value;
    };
    if histogram.is_empty() {
        return value.into();
    }
    let percentiles = PERCENTILES
        .iter()
        .map(|&p| (format!("{p:.6}"), flow.percentile(p).into()));
    value.insert("percentile".into(), Value::Object(percentiles.collect()));
    if bins {
        let counts = histogram.iter_recorded().map(|step| {
            (
                step.value_iterated_to().to_string(),
                step.count_at_value().into(),
            )
        });
        value.insert("bins".into(), Value::Object(counts.collect()));
    }
    value.into()
}

/// Returns the average number of I/Os announced to the target together.
fn batch(measured: &Measured) -> u64 {
    (measured.submitted as f64 / measured.kicks.max(1) as f64).round() as u64
}

/// Returns fio's distribution over powers of two for a single value.
fn levels(value: u64) -> Value {
    let mut map = Map::new();
    for (name, range) in [
        ("1", 1..2),
        ("2", 2..4),
        ("4", 4..8),
        ("8", 8..16),
        ("16", 16..32),
        ("32", 32..64),
        (">=64", 64..u64::MAX),
    ] {
        let share = if range.contains(&value) { 100.0 } else { 0.0 };
        map.insert(name.into(), share.into());
    }
    Value::Object(map)
}

/// Returns the shares, in percent, of latencies up to each bound and above the one before. The last
/// one covers everything above.
fn within(flow: &Flow, unit: u64, bounds: &[u64]) -> Value {
    let total = flow.latency.len().max(1) as f64;
    let is_last_unit = unit == 1_000_000;
    let mut below = if unit == 1 { 0 } else { unit };
    let mut map = Map::new();
    for (i, &bound) in bounds.iter().enumerate() {
        let last = is_last_unit && i + 1 == bounds.len();
        let upper = if last { u64::MAX } else { bound * unit - 1 };
        let count = flow.latency.count_between(below, upper);
        let name = if last {
            format!(">={bound}")
        } else {
            bound.to_string()
        };
        map.insert(name, (100.0 * count as f64 / total).into());
        below = bound * unit;
    }
    Value::Object(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Measured {
        let mut measured = Measured {
            elapsed: Duration::from_secs(2),
            submitted: 40,
            kicks: 10,
            ..Measured::default()
        };
        measured.read.ios = 40;
        measured.read.bytes = 40 * 4096;
        for i in 1..=40 {
            measured.read.record(i * 100);
        }
        measured
    }

    /// Fields that fio's own tools and third-party ones read.
    #[test]
    fn json_layout_matches_fio() {
        let job = Job {
            depth: 32,
            queues: 2,
            ..Job::default()
        };
        let document = document("null://1T", &job, &measured(), true);
        let job = &document["jobs"][0];
        assert_eq!(job["read"]["iops"], 20.0);
        assert_eq!(job["read"]["bw"], 80);
        assert_eq!(job["read"]["total_ios"], 40);
        assert_eq!(job["read"]["clat_ns"]["N"], 40);
        let median = job["read"]["clat_ns"]["percentile"]["50.000000"]
            .as_u64()
            .unwrap();
        assert!((2000..2010).contains(&median), "{median}");
        assert!(job["read"]["clat_ns"]["percentile"]["99.990000"].is_u64());
        assert!(job["read"]["clat_ns"]["bins"].is_object());
        assert_eq!(job["write"]["total_ios"], 0);
        assert_eq!(job["job options"]["rw"], "randread");
        assert_eq!(job["iodepth_level"]["32"], 100.0);
        assert_eq!(job["iodepth_submit"]["4"], 100.0);
    }

    #[test]
    fn latency_shares_add_up_to_hundred() {
        let document = document("x", &Job::default(), &measured(), false);
        let job = &document["jobs"][0];
        let sum: f64 = ["latency_ns", "latency_us", "latency_ms"]
            .iter()
            .flat_map(|unit| job[*unit].as_object().unwrap().values())
            .map(|share| share.as_f64().unwrap())
            .sum();
        assert!((sum - 100.0).abs() < 0.01, "{sum}");
        assert_eq!(job["latency_us"]["750"], 0.0);
    }
}
