//! `make bench`, the part in a guest: suite `mediate_guest`. Kernel VFIO, a virtual IOMMU and
//! QEMU's own NVMe controllers underneath; our driver on such a controller alone, and as the client
//! of our daemon that mediates it, direct and generic. Data is verified on a controller with a
//! disk, figures are of one with a null device.
//!
//! The guest's two processors and QEMU's thread for the device share the machine's processors. The
//! client therefore waits for interrupts, where it would poll on a machine with processors enough;
//! with two, the figures depend on the order of scheduling.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use harness::progress::say;
use harness::{BenchOptions, Guest};
use serde_json::{Value, json};

/// Bytes of each device.
const SIZE: u64 = 256 << 20;
const DEPTHS: [u32; 2] = [1, 32];
const WAYS: [&str; 3] = ["bare", "direct", "generic"];

fn main() {
    if let Err(error) = run() {
        eprintln!("bench: mediate in a guest: {error:#}");
        std::process::exit(1);
    }
}

fn run() -> Result<()> {
    let options = BenchOptions::parse("bench_mediate", 1, std::env::args().skip(1))?;
    let scratch = tempfile::tempdir()?;
    let disk = scratch.path().join("disk.raw");
    fs::File::create(&disk)?.set_len(SIZE)?;
    let guest = boot(&disk)?;
    for way in WAYS {
        verify(&guest, way)?;
    }
    let mut rows = Rows::default();
    for round in 0..options.runs {
        say(format!(
            "bench: mediate in a guest, run {} of {}",
            round + 1,
            options.runs
        ));
        for depth in DEPTHS {
            for way in WAYS {
                measure(&guest, way, depth, options.runtime, &mut rows)?;
            }
        }
    }
    guest.poweroff()?;
    rows.print();
    fs::write(&options.output, serde_json::to_string_pretty(&rows.json())?)
        .with_context(|| options.output.display().to_string())
}

fn boot(disk: &Path) -> Result<Guest> {
    let drives = [
        (
            "null",
            format!("file.driver=null-co,file.read-zeroes=on,file.size={SIZE}"),
        ),
        ("disk", format!("file={}", disk.display())),
    ];
    let mut args: Vec<String> = Vec::new();
    for (id, file) in drives {
        args.extend([
            "-drive".into(),
            format!("id={id},if=none,format=raw,{file}"),
            "-device".into(),
            format!("nvme,serial={id},drive={id}"),
        ]);
    }
    let guest = Guest::builder("bench-mediate")
        .cpus(2)
        .memory_mib(1024)
        .viommu()
        .qemu_args(args)
        .boot()?;
    guest.push_programs(&[harness::daemon::program()?])?;
    let limit = Duration::from_secs(60);
    guest.run_for(limit, &format!("{LIB}\nbind null\nbind disk"))?;
    Ok(guest)
}

/// Shell functions: the address of the controller with a serial number, once it was bound; a load
/// on it, alone or through a daemon, whose counters follow.
const LIB: &str = r#"
export LD_LIBRARY_PATH=/tools/lib:/tmp
bind() {
    for try in $(seq 100); do
        for s in /sys/class/nvme/*/serial; do
            read -r found <$s || continue
            [ "$found" = $1 ] && basename $(readlink -f ${s%/serial}/device) >/tmp/bdf-$1 && break 2
        done
        sleep 0.1
    done
    /tmp/vnvme bind $(cat /tmp/bdf-$1)
}
bare() { d=$1; shift; /tmp/vnvme --log error bench nvme://$(cat /tmp/bdf-$d)/1 "$@" --json; }
mediated() {
    way=$1; d=$2; shift 2
    rm -f /tmp/s.sock /tmp/c.sock /tmp/serve.log
    : >/tmp/serve.log
    /tmp/vnvme --log info serve --control /tmp/c.sock --socket /tmp/s.sock "nvme://$(cat /tmp/bdf-$d)/1?path=$way" 2>/tmp/serve.log &
    pid=$!
    for try in $(seq 300); do grep -q listening /tmp/serve.log && break; sleep 0.1; done
    status=0
    /tmp/vnvme --log error bench vfio-user:///tmp/s.sock/1 "$@" --json || status=$?
    echo; echo ==; /tmp/vnvme stats --json /tmp/c.sock
    kill $pid; wait $pid || { cat /tmp/serve.log; return 1; }
    return $status
}
"#;

/// A load; the report of the client, and the counters of the daemon if there was one.
fn load(
    guest: &Guest,
    way: &str,
    device: &str,
    load: &str,
    seconds: u32,
) -> Result<(Value, Value)> {
    let how = match way {
        "bare" => "bare".to_owned(),
        way => format!("mediated {way}"),
    };
    let limit = Duration::from_secs(120 + u64::from(seconds) * 4);
    let text = guest.run_for(limit, &format!("{LIB}\n{how} {device} {load}"))?;
    let (report, counters) = text.split_once("\n==\n").unwrap_or((&text, "{}"));
    let report = report
        .get(report.find('{').unwrap_or(0)..)
        .unwrap_or_default();
    Ok((
        serde_json::from_str(report).with_context(|| format!("{way}: {text}"))?,
        serde_json::from_str(counters).with_context(|| format!("{way}: {text}"))?,
    ))
}

/// Commands that the daemon passed on directly, and all.
fn passed(counters: &Value) -> (u64, u64) {
    let controller = &counters["controllers"][0];
    let direct = controller["direct"][0]["lanes"].as_array();
    let lanes = direct.into_iter().flatten();
    let queues = controller["queues"].as_array();
    (
        lanes.filter_map(|lane| lane["commands"].as_u64()).sum(),
        queues
            .into_iter()
            .flatten()
            .skip(1)
            .filter_map(|queue| queue["commands"].as_u64())
            .sum(),
    )
}

/// Checks that the commands took the expected path.
fn check_way(way: &str, counters: &Value) -> Result<()> {
    let (direct, all) = passed(counters);
    let right = match way {
        "direct" => direct > 0 && direct == all,
        "generic" => direct == 0 && all > 0,
        _ => true,
    };
    ensure!(right, "{way}: {direct} of {all} commands were direct");
    Ok(())
}

/// Random blocks of several sizes are written, read and compared.
fn verify(guest: &Guest, way: &str) -> Result<()> {
    for (bs, ios) in [("4k", 4000), ("256k", 200), ("2M", 40)] {
        let what = format!("--rw randrw --bs {bs} --iodepth 8 --ios {ios} --verify --destroy-data");
        let (_, counters) = load(guest, way, "disk", &what, 60)?;
        check_way(way, &counters)?;
    }
    say(format!("bench: mediate in a guest: {way}: data verified"));
    Ok(())
}

fn measure(guest: &Guest, way: &str, depth: u32, seconds: u32, rows: &mut Rows) -> Result<()> {
    let what = format!("--rw randread --bs 4k --iodepth {depth} --runtime {seconds} --interrupt");
    let (report, counters) = load(guest, way, "null", &what, seconds)?;
    check_way(way, &counters)?;
    let read = &report["jobs"][0]["read"];
    let iops = read["iops"].as_f64().filter(|iops| *iops > 0.0);
    rows.add(way, depth, "iops", "1/s", iops.context("nothing was done")?);
    let percentiles = &read["clat_ns"]["percentile"];
    for (metric, name) in [("p50_ns", "50.000000"), ("p99_ns", "99.000000")] {
        rows.add(
            way,
            depth,
            metric,
            "ns",
            percentiles[name].as_f64().unwrap_or(0.0),
        );
    }
    let lane = &counters["controllers"][0]["direct"][0]["lanes"][0];
    for (metric, what) in [
        ("translate_cycles", "translate"),
        ("complete_cycles", "complete"),
    ] {
        if let Some(average) = lane[what]["average"].as_f64().filter(|_| way == "direct") {
            rows.add(way, depth, metric, "cycles", average);
        }
    }
    Ok(())
}

/// Figures, each with its runs.
#[derive(Default)]
struct Rows(Vec<(String, u32, &'static str, &'static str, Vec<f64>)>);

impl Rows {
    fn add(
        &mut self,
        case: &str,
        depth: u32,
        metric: &'static str,
        unit: &'static str,
        value: f64,
    ) {
        let same = |row: &&mut (String, u32, &str, &str, Vec<f64>)| {
            row.0 == case && row.1 == depth && row.2 == metric
        };
        match self.0.iter_mut().find(same) {
            Some(row) => row.4.push(value),
            None => self.0.push((case.into(), depth, metric, unit, vec![value])),
        }
    }

    fn median(&self, case: &str, depth: u32, metric: &str) -> Option<f64> {
        let row = self
            .0
            .iter()
            .find(|row| row.0 == case && row.1 == depth && row.2 == metric)?;
        Some(middle(&row.4))
    }

    fn json(&self) -> Vec<Value> {
        let row = |(case, depth, metric, unit, runs): &(String, u32, &str, &str, Vec<f64>)| {
            json!({
                "suite": "mediate_guest", "case": case, "depth": depth, "queues": 1,
                "metric": metric, "unit": unit, "value": middle(runs), "runs": runs,
            })
        };
        self.0.iter().map(row).collect()
    }

    fn print(&self) {
        println!(
            "\n{:<24} {:>10} {:>9} {:>9} {:>11} {:>9} {:>9}",
            "QEMU's NVMe, in a guest",
            "IOPS, 1",
            "of bare",
            "p50, us",
            "IOPS, 32",
            "translate",
            "complete"
        );
        let text = |value: Option<f64>, digits: usize| {
            value.map_or("-".into(), |value| format!("{value:.digits$}"))
        };
        for way in WAYS {
            let iops = self.median(way, 1, "iops");
            let share = iops
                .zip(self.median("bare", 1, "iops"))
                .map(|(a, b)| 100.0 * a / b);
            println!(
                "{way:<24} {:>10} {:>8}% {:>9} {:>11} {:>9} {:>9}",
                text(iops, 0),
                text(share, 1),
                text(self.median(way, 1, "p50_ns").map(|ns| ns / 1000.0), 1),
                text(self.median(way, 32, "iops"), 0),
                text(self.median(way, 1, "translate_cycles"), 0),
                text(self.median(way, 1, "complete_cycles"), 0),
            );
        }
    }
}

fn middle(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = |i: usize| values.get(i).copied().unwrap_or(0.0);
    (at(values.len() / 2) + at(values.len().saturating_sub(1) / 2)) / 2.0
}
