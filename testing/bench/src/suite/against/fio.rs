//! fio on a file or block device, through io_uring as it performs best.

use super::Run;
use anyhow::{Context, Result, ensure};
use load::job::{Extent, Job};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

fn path(volume: &str) -> &str {
    volume.strip_prefix("file://").unwrap_or(volume)
}

/// Refuses volumes that fio cannot load.
pub fn check(volume: &str) -> Result<()> {
    ensure!(
        Path::new(path(volume)).exists(),
        "{volume}: fio is compared on files and block devices"
    );
    Ok(())
}

/// Runs fio with the job.
pub fn run(program: &Path, volume: &str, job: &Job) -> Result<Run> {
    let output = Command::new(program)
        .args(arguments(path(volume), job))
        .stdin(Stdio::null())
        .output()
        .with_context(|| program.display().to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "fio: {}", said.trim());
    parse(&output.stdout).context("fio's results")
}

fn arguments(path: &str, job: &Job) -> Vec<String> {
    let cpus: Vec<String> = job.cpus.iter().map(usize::to_string).collect();
    let mut words = vec![
        "--name=vnvme".to_owned(),
        // A colon separates files.
        format!("--filename={}", path.replace(':', "\\:")),
        format!("--rw={}", job.rw.word()),
        format!("--rwmixread={}", job.mix_read),
        format!("--bs={}", job.bs),
        format!("--iodepth={}", job.depth),
        format!("--numjobs={}", job.queues),
        format!("--randseed={}", job.seed),
        format!("--cpus_allowed={}", cpus.join(",")),
        "--cpus_allowed_policy=split".to_owned(),
    ];
    match job.ios {
        Some(ios) => words.push(format!("--number_ios={ios}")),
        None => {
            words.push("--time_based".to_owned());
            words.push(format!("--runtime={}ms", job.runtime.as_millis()));
            words.push(format!("--ramp_time={}ms", job.ramp.as_millis()));
        }
    }
    match job.size {
        Some(Extent::Bytes(bytes)) => words.push(format!("--size={bytes}")),
        Some(Extent::Percent(percent)) => words.push(format!("--size={percent}%")),
        None => {}
    }
    let always = "--ioengine=io_uring --direct=1 --registerfiles --fixedbufs --group_reporting \
                  --output-format=json";
    words.extend(always.split_ascii_whitespace().map(String::from));
    words
}

/// Parses fio's JSON. A latency is that of the direction with more I/Os.
fn parse(text: &[u8]) -> Result<Run> {
    let document: Value = serde_json::from_slice(text)?;
    let job = document.pointer("/jobs/0").context("no job")?;
    let flows = ["read", "write", "trim"].map(|name| &job[name]);
    let iops = |flow: &Value| flow["iops"].as_f64().unwrap_or(0.0);
    let busiest = flows.into_iter().max_by(|a, b| iops(a).total_cmp(&iops(b)));
    let percentile = |name: &str| {
        let flow = busiest?.get("clat_ns")?.get("percentile")?;
        flow.get(name)?.as_f64()
    };
    let total: f64 = flows.into_iter().map(iops).sum();
    ensure!(total > 0.0, "no I/O ended");
    Ok(Run {
        iops: total,
        p50: percentile("50.000000").unwrap_or(f64::NAN),
        p99: percentile("99.000000").unwrap_or(f64::NAN),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use load::job::Rw;

    #[test]
    fn job_becomes_arguments_of_fio() {
        let job = Job {
            rw: Rw::RandWrite,
            depth: 32,
            size: Some(Extent::Percent(10)),
            cpus: vec![0, 2],
            ..Job::default()
        };
        let told = arguments("/a:b", &job).join(" ");
        for part in [
            "--filename=/a\\:b ",
            "--rw=randwrite ",
            "--iodepth=32 ",
            "--runtime=5000ms ",
            "--size=10% ",
            "--cpus_allowed=0,2 ",
        ] {
            assert!(told.contains(part), "{part} in {told}");
        }
        let counted = Job {
            ios: Some(7),
            ..job
        };
        let told = arguments("/a", &counted).join(" ");
        assert!(
            told.contains("--number_ios=7") && !told.contains("time_based"),
            "{told}"
        );
    }

    #[test]
    fn results_of_fio_are_parsed() {
        let text = r#"{"jobs": [{
            "read": {"iops": 30.5, "clat_ns": {"percentile": {"50.000000": 7, "99.000000": 9}}},
            "write": {"iops": 1.5, "clat_ns": {}}, "trim": {"iops": 0}}]}"#;
        let run = parse(text.as_bytes()).unwrap();
        assert_eq!((run.iops, run.p50, run.p99), (32.0, 7.0, 9.0));
        for wrong in ["", "{}", r#"{"jobs": [{"read": {"iops": 0}}]}"#] {
            assert!(parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
