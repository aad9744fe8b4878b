//! `make bench`, the part in a guest: suite `driver`. The kernel's driver with libaio and
//! with io_uring against ours through VFIO, on two of QEMU's own NVMe controllers with null
//! devices in one guest, in turn.
//!
//! The guest has a virtual IOMMU, for VFIO; the kernel's driver bypasses it
//! (`iommu.passthrough=1`), so that it does not pay for mappings that ours does not make either.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use harness::progress::say;
use harness::{BenchOptions, Guest};
use serde_json::{Value, json};

/// Size of the null devices in bytes.
const SIZE: u64 = 1 << 30;
const DEPTHS: [u32; 2] = [1, 4];
const PATTERNS: [&str; 3] = ["randread", "randwrite", "randrw"];
const ENGINES: [&str; 3] = ["libaio", "io_uring", "vnvme"];

fn main() {
    if let Err(error) = run() {
        eprintln!("bench: driver: {error:#}");
        std::process::exit(1);
    }
}

/// Measured values of a case.
#[derive(Clone, Copy, Default)]
struct Figure {
    iops: f64,
    p50_ns: f64,
    p99_ns: f64,
}

fn run() -> Result<()> {
    let options = BenchOptions::parse("bench_driver", 2, std::env::args().skip(1))?;
    let guest = boot()?;
    let mut runs: Vec<Vec<Figure>> =
        vec![Vec::new(); PATTERNS.len() * DEPTHS.len() * ENGINES.len()];
    for round in 0..options.runs {
        say(format!(
            "bench: driver, run {} of {}",
            round + 1,
            options.runs
        ));
        let cells = PATTERNS
            .iter()
            .flat_map(|p| DEPTHS.iter().map(move |d| (p, *d)));
        let cases = cells.flat_map(|(p, d)| ENGINES.iter().map(move |e| (*p, d, *e)));
        for (case, (pattern, depth, engine)) in runs.iter_mut().zip(cases) {
            case.push(measure(&guest, pattern, depth, engine, options.runtime)?);
        }
    }
    guest.poweroff()?;
    report(&options, &runs)
}

fn boot() -> Result<Guest> {
    let mut args: Vec<String> = Vec::new();
    for id in ["kernel", "vfio"] {
        args.extend([
            "-drive".into(),
            format!("id={id},if=none,format=raw,file.driver=null-co,file.read-zeroes=on,file.size={SIZE}"),
            "-device".into(),
            format!("nvme,serial={id},drive={id}"),
        ]);
    }
    // A single processor: the other core is the device's.
    let guest = Guest::builder("bench-driver")
        .cpus(1)
        .memory_mib(1024)
        .viommu()
        .append("iommu.passthrough=1")
        .qemu_args(args)
        .boot()?;
    guest.push_programs(&[harness::daemon::program()?])?;
    guest.run_for(
        Duration::from_secs(60),
        &format!("{FIND}\n/tmp/vnvme bind $(bdf vfio)"),
    )?;
    Ok(guest)
}

/// Shell functions: the controller with a serial number, its address, its disk.
const FIND: &str = r#"
export LD_LIBRARY_PATH=/tools/lib:/tmp
bdf() {
    [ -e /tmp/bdf-$1 ] || for s in /sys/class/nvme/*/serial; do
        read -r found <$s; [ "$found" = $1 ] && basename $(readlink -f ${s%/serial}/device) >/tmp/bdf-$1
    done
    cat /tmp/bdf-$1
}
disk() { for s in /sys/class/nvme/*/serial; do read -r found <$s; [ "$found" = $1 ] && c=${s%/serial} && echo /dev/${c##*/}n1; done; }
"#;

fn measure(guest: &Guest, pattern: &str, depth: u32, engine: &str, runtime: u32) -> Result<Figure> {
    let script = if engine == "vnvme" {
        format!(
            "{FIND}\n/tmp/vnvme --log error bench nvme://$(bdf vfio)/1 --rw {pattern} --bs 4k --iodepth {depth} \
             --runtime {runtime} --destroy-data --json"
        )
    } else {
        format!(
            "{FIND}\nfio --name=bench --filename=$(disk kernel) --ioengine={engine} --thread=1 --direct=1 --verify=0 \
             --rw={pattern} --bs=4k --iodepth={depth} --time_based --runtime={runtime} --output-format=json"
        )
    };
    let limit = Duration::from_secs(60 + u64::from(runtime) * 4);
    let text = guest.run_for(limit, &script)?;
    let json = text.get(text.find('{').unwrap_or(0)..).unwrap_or_default();
    let report: Value =
        serde_json::from_str(json).with_context(|| format!("{engine}'s report: {text}"))?;
    let job = &report["jobs"][0];
    let sides = [&job["read"], &job["write"]];
    let iops: f64 = sides.iter().filter_map(|s| s["iops"].as_f64()).sum();
    // For a mixture, the reads' latency.
    let side = if pattern == "randwrite" {
        sides[1]
    } else {
        sides[0]
    };
    let percentile = |name: &str| side["clat_ns"]["percentile"][name].as_f64().unwrap_or(0.0);
    if iops <= 0.0 {
        bail!("{engine}, {pattern}: nothing was done: {text}");
    }
    Ok(Figure {
        iops,
        p50_ns: percentile("50.000000"),
        p99_ns: percentile("99.000000"),
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = |i: usize| values.get(i).copied().unwrap_or(0.0);
    (at(values.len() / 2) + at(values.len().saturating_sub(1) / 2)) / 2.0
}

fn report(options: &BenchOptions, runs: &[Vec<Figure>]) -> Result<()> {
    let mut rows = Vec::new();
    let mut table = vec![vec![0.0; ENGINES.len()]; PATTERNS.len() * DEPTHS.len()];
    for (i, figures) in runs.iter().enumerate() {
        let (cell, engine) = (i / ENGINES.len(), i % ENGINES.len());
        let (pattern, depth) = (PATTERNS[cell / DEPTHS.len()], DEPTHS[cell % DEPTHS.len()]);
        let mut row = |metric: &str, unit: &str, value: fn(&Figure) -> f64| {
            let values: Vec<f64> = figures.iter().map(value).collect();
            let middle = median(values.clone());
            rows.push(json!({
                "suite": "driver", "case": format!("{pattern} {}", ENGINES[engine]), "depth": depth, "queues": 1,
                "metric": metric, "unit": unit, "value": middle, "runs": values,
            }));
            middle
        };
        table[cell][engine] = row("iops", "1/s", |f| f.iops);
        row("p50_ns", "ns", |f| f.p50_ns);
        row("p99_ns", "ns", |f| f.p99_ns);
    }
    // The document's own figures: the gain of its driver over linux-aio.
    let document = ["+12%", "+20%", "+22%", "+12%", "+3%", "+22%"];
    println!(
        "\n{:<20} {:>9} {:>9} {:>9} {:>12} {:>12} {:>10}",
        "IOPS", "libaio", "io_uring", "vnvme", "over libaio", "over io_uring", "document"
    );
    for (cell, figures) in table.iter().enumerate() {
        let name = format!(
            "{}, depth {}",
            PATTERNS[cell / DEPTHS.len()],
            DEPTHS[cell % DEPTHS.len()]
        );
        let [aio, uring, ours] = [figures[0], figures[1], figures[2]];
        let over = |other: f64| format!("{:+.0}%", (ours / other - 1.0) * 100.0);
        println!(
            "{name:<20} {aio:>9.0} {uring:>9.0} {ours:>9.0} {:>12} {:>12} {:>10}",
            over(aio),
            over(uring),
            document[cell]
        );
    }
    fs::write(&options.output, serde_json::to_string_pretty(&rows)?)
        .with_context(|| options.output.display().to_string())
}
