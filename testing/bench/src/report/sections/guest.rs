//! Report sections of suites that run in a guest or on a device.

use super::{Point, Section, View, per_io, shown};
use crate::report::chart::{Chart, Shape};
use crate::report::documents;
use crate::report::table::Table;
use crate::results::Results;
use load::progress::{nanos, quantity};

pub fn guest(results: &Results) -> Section {
    let view = View::new(results, "guest");
    let mut iops = view.table("IOPS in the guest, at depth");
    let mut mmio = view.table("MMIO doorbells for each I/O");
    let title = "An idle controller in the same guest";
    let mut idle = Table::new(title, ["CPU time, of one core"]);
    let mut rate = view.chart("guest-iops", "IOPS in the guest", Shape::Bars);
    let title = "MMIO doorbells for each I/O";
    let mut left = view.chart("guest-mmio", title, Shape::Bars);
    let cases = [
        ("vnvme shadow off", Some(1)),
        ("vnvme shadow on", Some(0)),
        ("qemu dbcs off", Some(6)),
        ("qemu dbcs on", Some(2)),
        ("vnvme shadow on sleeping", None),
    ];
    for (case, colour) in cases {
        iops.row(case, view.cells(case, "iops", quantity));
        mmio.row(case, view.cells(case, "mmio_per_io", per_io));
        let used = view.get(case, (1, 1), "idle_cpu");
        idle.row(case, shown(vec![used], |v| format!("{v:.2}%")));
        if let Some(colour) = colour {
            rate.add(case, colour, view.values(case, "iops"));
            left.add(case, colour, view.values(case, "mmio_per_io"));
        }
    }
    let ratios = view.ratios("vnvme shadow on", "qemu dbcs on");
    iops.row("vnvme on \u{f7} qemu on", ratios);
    if !iops.rows.is_empty() {
        view.quote(&mut iops, &documents::QEMU_IOPS, quantity);
        view.quote(&mut mmio, &documents::QEMU_MMIO, per_io);
    }
    Section {
        id: "guest",
        title: "In a Linux guest",
        intro: "fio with libaio, 4 KiB direct random reads, on the stock nvme driver of a Linux guest with one virtual CPU: \
                vnvme on a null volume, and QEMU's own controller on null-co. vnvme's worker polls as long as it \
                does when nothing is said, where its window follows the guest; sleeping: not at all. Where the \
                guest is emulated instead of virtualised, its own instructions take most of the time.",
        tables: vec![iops, mmio, idle],
        charts: vec![rate, left],
    }
}

pub fn driver(results: &Results) -> Section {
    let view = View::new(results, "driver");
    let loads = ["randread", "randwrite", "randrw"].into_iter();
    let columns = loads.flat_map(|load| view.points.iter().map(move |p| (load, *p)));
    let columns: Vec<(&str, Point)> = columns.collect();
    let names = columns
        .iter()
        .map(|(load, (depth, _))| format!("{load} {depth}"));
    let names: Vec<String> = names.collect();
    let mut iops = Table::new("IOPS, by load and depth", names.clone());
    let mut tail = Table::new("Latency, median", names.clone());
    let mut rate = Chart::new("driver-iops", "IOPS", "load and depth", names, Shape::Bars);
    let values = |way: &str, metric: &str| {
        let value =
            |(load, point): &(&str, Point)| view.get(&format!("{load} {way}"), *point, metric);
        columns.iter().map(value).collect::<Vec<_>>()
    };
    for (colour, way) in [(6, "libaio"), (1, "io_uring"), (0, "vnvme")] {
        iops.row(way, shown(values(way, "iops"), quantity));
        tail.row(way, shown(values(way, "p50_ns"), nanos));
        rate.add(way, colour, values(way, "iops"));
    }
    let percent = |value: f64| format!("{:+.0}%", value * 100.0);
    for under in ["libaio", "io_uring"] {
        let pairs = values("vnvme", "iops")
            .into_iter()
            .zip(values(under, "iops"));
        let gains = pairs.map(|(over, under)| Some(percent(over? / under? - 1.0)));
        iops.row(format!("gain over {under}"), gains.collect());
    }
    if !iops.rows.is_empty() {
        let stated = |(load, (depth, _)): &(&str, Point)| {
            let mut all = documents::DRIVER.iter();
            let found = all.find(|(l, d, _)| l == load && d == depth);
            found.map(|(_, _, gain)| percent(*gain))
        };
        let cells = columns.iter().map(stated).collect();
        iops.quote("QEMU's nvme:// over linux-aio", cells);
    }
    Section {
        id: "driver",
        title: "The userspace driver",
        intro: "The same device in the same guest: the kernel's driver with libaio and with io_uring, and ours through VFIO.",
        tables: vec![iops, tail],
        charts: vec![rate],
    }
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
    let cells = |[iops, latency, deep, cycles @ ..]: [Option<f64>; 6]| {
        let mut cells = vec![iops.map(quantity), latency.map(nanos), deep.map(quantity)];
        cells.extend(shown(cycles.into(), |v| format!("{v:.0}")));
        cells
    };
    for document in &documents::MDEV {
        let at = |depth, metric| view.get(document.case, (depth, 1), metric);
        let cycles = ["translate_cycles", "complete_cycles", "interrupt_cycles"];
        let [translate, complete, interrupt] = cycles.map(|metric| at(1, metric));
        let (iops, latency, deep) = (at(1, "iops"), at(1, "p50_ns"), at(32, "iops"));
        let figures = [iops, latency, deep, translate, complete, interrupt];
        table.row(document.case, cells(figures));
    }
    if !table.rows.is_empty() {
        for document in &documents::MDEV {
            let (iops, latency) = (Some(document.iops), Some(document.latency_us * 1000.0));
            let (translate, complete) = (document.translate, document.complete);
            let figures = [iops, latency, None, translate, complete, document.interrupt];
            table.quote(format!("nvme-mdev: {}", document.case), cells(figures));
        }
    }
    let labels = ["polling", "interrupts"].map(String::from).to_vec();
    let title = "IOPS at depth 1";
    let mut rate = Chart::new("mediate-iops", title, "", labels, Shape::Bars);
    for (colour, case) in [(6, "bare"), (0, "direct"), (1, "generic")] {
        let cases = [case.to_owned(), format!("{case} interrupt")];
        let stated = |case: &String| {
            let found = documents::MDEV.iter().find(|d| d.case == *case);
            found.map(|d| d.iops)
        };
        let measured = cases.iter().map(|case| view.get(case, (1, 1), "iops"));
        rate.add(case, colour, measured.collect());
        let stated = cases.iter().map(stated).collect();
        rate.quote(format!("nvme-mdev: {case}"), colour, stated);
    }
    Section {
        id: "mediate",
        title: "One device, shared",
        intro: "The driver on a device alone, and through mediation: direct (queue to queue, translated) and generic.",
        tables: vec![table],
        charts: vec![rate],
    }
}
