//! Report sections of suites that run in a guest or on a device.

use super::{Point, Section, View, chart, depth_names, filled, per_io, quote};
use crate::report::chart::{Chart, Series, Shape};
use crate::report::documents;
use crate::report::table::Table;
use crate::results::Results;
use load::progress::{nanos, quantity};

pub fn guest(results: &Results) -> Section {
    let view = View::new(results, "guest");
    let points = view.points(|_| true);
    let names = depth_names(&points);
    let mut iops = Table::new("IOPS in the guest, at depth", names.clone());
    let mut mmio = Table::new("MMIO doorbells for each I/O", names);
    let cases = [
        "vnvme shadow off",
        "vnvme shadow on",
        "qemu dbcs off",
        "qemu dbcs on",
    ];
    let more = ["vnvme shadow on sleeping"];
    for case in cases.into_iter().chain(more) {
        view.row(&mut iops, case, case, &points, "iops", quantity);
        view.row(&mut mmio, case, case, &points, "mmio_per_io", per_io);
    }
    view.ratio(
        &mut iops,
        "vnvme on \u{f7} qemu on",
        ("vnvme shadow on", "qemu dbcs on"),
        &points,
        "iops",
    );
    if !iops.rows.is_empty() {
        for series in &documents::QEMU_IOPS {
            quote(&mut iops, series, &points, quantity);
        }
        for series in &documents::QEMU_MMIO {
            quote(&mut mmio, series, &points, per_io);
        }
    }
    let mut idle = Table::new(
        "An idle controller in the same guest",
        ["CPU time, of one core"],
    );
    for case in cases.into_iter().chain(more) {
        let used = view.get(case, (1, 1), "idle_cpu");
        if used.is_some() {
            idle.row(case, false, vec![used.map(|v| format!("{v:.2}%"))]);
        }
    }
    let mut rate = chart(
        "guest-iops",
        "IOPS in the guest",
        "depth",
        &points,
        false,
        Shape::Bars,
    );
    let mut left = chart(
        "guest-mmio",
        "MMIO doorbells for each I/O",
        "depth",
        &points,
        false,
        Shape::Bars,
    );
    for (colour, case) in [(1, cases[0]), (0, cases[1]), (6, cases[2]), (2, cases[3])] {
        rate.series
            .push(view.series(case, case, &points, "iops", colour));
        left.series
            .push(view.series(case, case, &points, "mmio_per_io", colour));
    }
    Section {
        id: "guest",
        title: "In a Linux guest".into(),
        intro: "fio with libaio, 4 KiB direct random reads, on the stock nvme driver of a Linux guest with one virtual CPU: \
                vnvme on a null volume, and QEMU's own controller on null-co. vnvme's worker polls as long as it \
                does when nothing is said, where its window follows the guest; sleeping: not at all. Where the \
                guest is emulated instead of virtualised, its own instructions take most of the time."
            .into(),
        tables: filled(vec![iops, mmio, idle]),
        charts: vec![rate, left],
    }
}

pub fn driver(results: &Results) -> Section {
    let view = View::new(results, "driver");
    let points = view.points(|_| true);
    let loads = ["randread", "randwrite", "randrw"];
    let columns: Vec<(&str, Point)> = loads
        .iter()
        .flat_map(|load| points.iter().map(move |p| (*load, *p)))
        .collect();
    let names: Vec<String> = columns
        .iter()
        .map(|(load, (depth, _))| format!("{load} {depth}"))
        .collect();
    let mut iops = Table::new("IOPS, by load and depth", names.clone());
    let mut tail = Table::new("Latency, median", names.clone());
    let mut rate = Chart {
        labels: names,
        ..chart(
            "driver-iops",
            "IOPS",
            "load and depth",
            &points,
            false,
            Shape::Bars,
        )
    };
    let value = |way: &str, column: &(&str, Point), metric: &str| {
        view.get(&format!("{} {way}", column.0), column.1, metric)
    };
    for (colour, way) in [(6, "libaio"), (1, "io_uring"), (0, "vnvme")] {
        let cells = |metric, show: fn(f64) -> String| {
            columns
                .iter()
                .map(|c| value(way, c, metric).map(show))
                .collect()
        };
        iops.row(way, false, cells("iops", quantity));
        tail.row(way, false, cells("p50_ns", nanos));
        rate.series.push(Series {
            name: way.into(),
            quoted: false,
            values: columns.iter().map(|c| value(way, c, "iops")).collect(),
            colour,
        });
    }
    let gain = |under: &'static str| {
        let cell = move |c: &(&str, Point)| {
            Some(percent(
                value("vnvme", c, "iops")? / value(under, c, "iops")? - 1.0,
            ))
        };
        columns.iter().map(cell).collect()
    };
    iops.row("gain over libaio", false, gain("libaio"));
    iops.row("gain over io_uring", false, gain("io_uring"));
    if !iops.rows.is_empty() {
        let stated = |c: &(&str, Point)| {
            let mut all = documents::DRIVER.iter();
            all.find(|(load, depth, _)| *load == c.0 && *depth == c.1.0)
                .map(|(_, _, gain)| percent(*gain))
        };
        iops.row(
            "QEMU's nvme:// over linux-aio",
            true,
            columns.iter().map(stated).collect(),
        );
    }
    Section {
        id: "driver",
        title: "The userspace driver".into(),
        intro: "The same device in the same guest: the kernel's driver with libaio and with io_uring, and ours through VFIO.".into(),
        tables: filled(vec![iops, tail]),
        charts: vec![rate],
    }
}

fn percent(value: f64) -> String {
    format!("{:+.0}%", value * 100.0)
}

pub fn mediate(results: &Results) -> Section {
    let view = View::new(results, "mediate");
    let columns = [
        "IOPS, depth 1",
        "latency, depth 1",
        "IOPS, depth 32",
        "translate, cycles",
        "complete, cycles",
        "interrupt, cycles",
    ];
    let mut table = Table::new("One device, shared", columns);
    let mut rate = Chart {
        labels: vec!["polling".into(), "interrupts".into()],
        ..chart(
            "mediate-iops",
            "IOPS at depth 1",
            "",
            &[],
            false,
            Shape::Bars,
        )
    };
    let count = |v: f64| format!("{v:.0}");
    for document in &documents::MDEV {
        let case = document.case;
        let at = |metric| view.get(case, (1, 1), metric);
        table.row(
            case,
            false,
            vec![
                at("iops").map(quantity),
                at("p50_ns").map(nanos),
                view.get(case, (32, 1), "iops").map(quantity),
                at("translate_cycles").map(count),
                at("complete_cycles").map(count),
                at("interrupt_cycles").map(count),
            ],
        );
    }
    if !table.rows.is_empty() {
        for document in &documents::MDEV {
            table.row(
                format!("nvme-mdev: {}", document.case),
                true,
                vec![
                    Some(quantity(document.iops)),
                    Some(nanos(document.latency_us * 1000.0)),
                    None,
                    document.translate.map(count),
                    document.complete.map(count),
                    document.interrupt.map(count),
                ],
            );
        }
    }
    for (colour, case) in [(6, "bare"), (0, "direct"), (1, "generic")] {
        let interrupt = format!("{case} interrupt");
        let stated = |case: &str| {
            documents::MDEV
                .iter()
                .find(|d| d.case == case)
                .map(|d| d.iops)
        };
        rate.series.push(Series {
            name: case.into(),
            quoted: false,
            values: vec![
                view.get(case, (1, 1), "iops"),
                view.get(&interrupt, (1, 1), "iops"),
            ],
            colour,
        });
        rate.series.push(Series {
            name: format!("nvme-mdev: {case}"),
            quoted: true,
            values: vec![stated(case), stated(&interrupt)],
            colour,
        });
    }
    Section {
        id: "mediate",
        title: "One device, shared".into(),
        intro: "The driver on a device alone, and through mediation: direct (queue to queue, translated) and generic.".into(),
        tables: filled(vec![table]),
        charts: vec![rate],
    }
}
