//! What is shown of each suite: a few words, tables, plots.

use super::chart::{Chart, Series, Shape};
use super::documents;
use super::table::Table;
use crate::bench::progress::{nanos, quantity};
use crate::bench::results::Results;
use std::collections::BTreeSet;

/// One suite.
pub struct Section {
    pub id: &'static str,
    pub title: String,
    pub intro: String,
    pub tables: Vec<Table>,
    pub charts: Vec<Chart>,
}

/// Sections of all suites that have figures.
pub fn all(results: &Results) -> Vec<Section> {
    let makers: [fn(&Results) -> Section; 8] =
        [limit, doorbell, guest, driver, file, scale, mediate, cost];
    let sections = makers.iter().map(|make| make(results));
    sections
        .filter(|section| !section.tables.is_empty())
        .collect()
}

/// A point of a series: depth and queues.
type Point = (u32, u32);

/// A look at one suite.
struct View<'a> {
    results: &'a Results,
    suite: &'static str,
}

impl View<'_> {
    fn get(&self, case: &str, (depth, queues): Point, metric: &str) -> Option<f64> {
        self.results.value(self.suite, case, depth, queues, metric)
    }

    /// Depths and queues that there are figures for, of cases that `wanted` likes.
    fn points(&self, wanted: impl Fn(&str) -> bool) -> Vec<Point> {
        let rows = self.results.rows.iter();
        let rows = rows.filter(|r| r.suite == self.suite && wanted(&r.case));
        let set: BTreeSet<(u32, u32)> = rows.map(|r| (r.queues, r.depth)).collect();
        set.into_iter()
            .map(|(queues, depth)| (depth, queues))
            .collect()
    }

    fn has(&self, case: &str) -> bool {
        self.results
            .rows
            .iter()
            .any(|r| r.suite == self.suite && r.case == case)
    }

    fn row(
        &self,
        table: &mut Table,
        name: &str,
        case: &str,
        points: &[Point],
        metric: &str,
        show: fn(f64) -> String,
    ) {
        let cells = points.iter().map(|p| self.get(case, *p, metric).map(show));
        table.row(name, false, cells.collect());
    }

    /// Quotients of two cases.
    fn ratio(
        &self,
        table: &mut Table,
        name: &str,
        (over, under): (&str, &str),
        points: &[Point],
        metric: &str,
    ) {
        let cell = |p: &Point| {
            Some(times(
                self.get(over, *p, metric)? / self.get(under, *p, metric)?,
            ))
        };
        table.row(name, false, points.iter().map(cell).collect());
    }

    fn series(
        &self,
        name: &str,
        case: &str,
        points: &[Point],
        metric: &str,
        colour: usize,
    ) -> Series {
        Series {
            name: name.into(),
            quoted: false,
            values: points.iter().map(|p| self.get(case, *p, metric)).collect(),
            colour,
        }
    }
}

fn times(value: f64) -> String {
    format!("{value:.2}\u{d7}")
}

fn per_io(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        v if v < 0.01 => format!("{v:.5}"),
        v => format!("{v:.2}"),
    }
}

fn depth_names(points: &[Point]) -> Vec<String> {
    let name = |&(depth, queues): &Point| match queues {
        0 | 1 => depth.to_string(),
        queues => format!("{depth} \u{d7} {queues}"),
    };
    points.iter().map(name).collect()
}

fn quote(table: &mut Table, series: &documents::Series, points: &[Point], show: fn(f64) -> String) {
    let cells = points.iter().map(|p| quoted(series, *p).map(show));
    table.row(series.name, true, cells.collect());
}

fn quoted(series: &documents::Series, (depth, queues): Point) -> Option<f64> {
    let mut points = series.points.iter();
    let found = points.find(|(d, q, _)| *d == depth && *q == queues.max(1));
    found.map(|(_, _, value)| *value)
}

fn quoted_series(series: &documents::Series, points: &[Point], colour: usize) -> Series {
    Series {
        name: series.name.into(),
        quoted: true,
        values: points.iter().map(|p| quoted(series, *p)).collect(),
        colour,
    }
}

/// A document's gain, "on" over "off".
fn quote_gain(table: &mut Table, name: &str, [off, on]: &[documents::Series; 2], points: &[Point]) {
    let cell = |p: &Point| Some(times(quoted(on, *p)? / quoted(off, *p)?));
    table.row(name, true, points.iter().map(cell).collect());
}

fn chart(name: &str, title: &str, axis: &str, points: &[Point], log: bool, shape: Shape) -> Chart {
    Chart {
        name: name.into(),
        title: title.into(),
        axis: axis.into(),
        labels: depth_names(points),
        series: Vec::new(),
        shape,
        log,
        goal: None,
    }
}

fn limit(results: &Results) -> Section {
    let view = View {
        results,
        suite: "limit",
    };
    let points = view.points(|case| case != "pingpong");
    let cases = [
        "null mapped",
        "null shadow",
        "memory mapped",
        "memory shadow",
    ];
    let mut tables = Vec::new();
    let mut latency = Table::new("Time of one I/O, at depth", depth_names(&points));
    for case in cases {
        view.row(&mut latency, case, case, &points, "ns_per_io", nanos);
    }
    view.row(
        &mut latency,
        "ping-pong beside \u{201c}null mapped\u{201d}",
        "null mapped",
        &points,
        "rtt_ns",
        nanos,
    );
    view.row(
        &mut latency,
        "\u{201c}null mapped\u{201d} \u{f7} the goal",
        "null mapped",
        &points,
        "of_goal",
        times,
    );
    latency.note = "The goal, at a round trip R: 1.25 R + 200 ns at depth 1, 0.2 R + 90 ns at 32, 0.1 R + 80 ns at 128. \
                    The round trip is measured before and after each case, on the same two cores."
        .into();
    tables.push(latency);
    let mut rate = Table::new("IOPS, at depth", depth_names(&points));
    for case in cases {
        view.row(&mut rate, case, case, &points, "iops", quantity);
    }
    view.ratio(
        &mut rate,
        "shadow \u{f7} mapped (null)",
        ("null shadow", "null mapped"),
        &points,
        "iops",
    );
    tables.push(rate);
    let mut tail = Table::new(
        "Latency, median and 99th percentile, at depth",
        depth_names(&points),
    );
    for case in cases {
        view.row(
            &mut tail,
            &format!("{case}, p50"),
            case,
            &points,
            "p50_ns",
            nanos,
        );
        view.row(
            &mut tail,
            &format!("{case}, p99"),
            case,
            &points,
            "p99_ns",
            nanos,
        );
    }
    tables.push(tail);
    let mut ping = Table::new("A cache line from core to core and back", ["median"]);
    let at = |metric| view.get("pingpong", (1, 1), metric).map(nanos);
    ping.row("one word", false, vec![at("rtt_ns")]);
    ping.row(
        "64-byte entry there, 16-byte completion back",
        false,
        vec![at("entry_rtt_ns")],
    );
    tables.push(ping);
    let mut rate = chart("limit-iops", "IOPS", "depth", &points, true, Shape::Lines);
    let mut time = chart(
        "limit-time",
        "Time of one I/O, ns",
        "depth",
        &points,
        true,
        Shape::Lines,
    );
    for (i, case) in cases.iter().enumerate() {
        rate.series
            .push(view.series(case, case, &points, "iops", i));
        time.series
            .push(view.series(case, case, &points, "ns_per_io", i));
    }
    if let Some(rtt) = view.get("pingpong", (1, 1), "rtt_ns") {
        time.goal = Some((rtt, "ping-pong of one line".into()));
    }
    Section {
        id: "limit",
        title: "Limit: what a virtual controller costs".into(),
        intro: "4 KiB random reads, driver and controller in two processes, each on a core of its own. The null volume stores \
                nothing; the memory volume copies. Mapped: doorbells in a shared page; shadow: Doorbell Buffer Config, with \
                trapped doorbells."
            .into(),
        tables: filled(tables),
        charts: vec![rate, time],
    }
}

fn filled(tables: Vec<Table>) -> Vec<Table> {
    tables.into_iter().filter(|t| !t.rows.is_empty()).collect()
}

fn doorbell(results: &Results) -> Section {
    let view = View {
        results,
        suite: "doorbell",
    };
    let points = view.points(|_| true);
    let names = depth_names(&points);
    let mut tables = Vec::new();
    let mut iops = Table::new("IOPS, at depth (\u{d7} queues)", names.clone());
    let mut mmio = Table::new("MMIO doorbells for each I/O", names.clone());
    let mut tail = Table::new("Latency, median", names);
    let ways = ["", " sleeping", " interrupt"];
    for way in ways {
        let (off, on) = (format!("shadow off{way}"), format!("shadow on{way}"));
        if !view.has(&on) {
            continue;
        }
        for case in [&off, &on] {
            view.row(&mut iops, case, case, &points, "iops", quantity);
            view.row(&mut mmio, case, case, &points, "mmio_per_io", per_io);
            view.row(&mut tail, case, case, &points, "p50_ns", nanos);
        }
        view.ratio(
            &mut iops,
            &format!("gain{way}"),
            (&on, &off),
            &points,
            "iops",
        );
    }
    if !iops.rows.is_empty() {
        for pair in [
            &documents::QEMU_IOPS,
            &documents::COLLABORA,
            &documents::LINUX,
        ] {
            for series in pair {
                quote(&mut iops, series, &points, quantity);
            }
        }
        quote_gain(
            &mut iops,
            "QEMU series: gain",
            &documents::QEMU_IOPS,
            &points,
        );
        quote_gain(&mut iops, "Collabora: gain", &documents::COLLABORA, &points);
        quote_gain(&mut iops, "Linux patch: gain", &documents::LINUX, &points);
        for series in &documents::QEMU_MMIO {
            quote(&mut mmio, series, &points, per_io);
        }
    }
    iops.note = "sleeping: the worker sleeps as soon as it has nothing to do. interrupt: and the host waits for interrupts.".into();
    tables.extend([iops, mmio, tail]);
    let mut rate = chart(
        "doorbell-iops",
        "IOPS, shadow doorbells off and on",
        "depth \u{d7} queues",
        &points,
        true,
        Shape::Lines,
    );
    let mut left = chart(
        "doorbell-mmio",
        "MMIO doorbells for each I/O",
        "depth \u{d7} queues",
        &points,
        false,
        Shape::Bars,
    );
    for (colour, case) in [(1, "shadow off"), (0, "shadow on")] {
        rate.series
            .push(view.series(&format!("vnvme: {case}"), case, &points, "iops", colour));
        left.series.push(view.series(
            &format!("vnvme: {case}"),
            case,
            &points,
            "mmio_per_io",
            colour,
        ));
    }
    for (colour, at) in [(1, 0), (0, 1)] {
        if let (Some(iops), Some(mmio)) =
            (documents::QEMU_IOPS.get(at), documents::QEMU_MMIO.get(at))
        {
            rate.series.push(quoted_series(iops, &points, colour));
            left.series.push(quoted_series(mmio, &points, colour));
        }
    }
    Section {
        id: "doorbell",
        title: "Shadow doorbells".into(),
        intro: "4 KiB random reads of a null volume, driver and controller in two processes. Without shadow doorbells each \
                ring is a message to the controller, as it is from a virtual machine. The driver polls for completions."
            .into(),
        tables: filled(tables),
        charts: vec![rate, left],
    }
}

fn guest(results: &Results) -> Section {
    let view = View {
        results,
        suite: "guest",
    };
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
    for case in cases {
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
                vnvme on a null volume, and QEMU's own controller on null-co. vnvme's worker polls between two I/Os, or as long as it \
                does by default, or sleeps at once. Where the guest is emulated instead of \
                virtualised, its own instructions take most of the time."
            .into(),
        tables: filled(vec![iops, mmio]),
        charts: vec![rate, left],
    }
}

fn driver(results: &Results) -> Section {
    let view = View {
        results,
        suite: "driver",
    };
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

fn file(results: &Results) -> Section {
    let view = View {
        results,
        suite: "file",
    };
    let points = view.points(|_| true);
    let mut tables = Vec::new();
    let mut charts = Vec::new();
    for medium in ["tmpfs", "disk"] {
        let mut table = Table::new(format!("IOPS on {medium}, at depth"), depth_names(&points));
        let mut rate = chart(
            &format!("file-{medium}"),
            &format!("IOPS on {medium}"),
            "depth",
            &points,
            false,
            Shape::Bars,
        );
        for (colour, rw) in [(0, "randread"), (2, "randwrite")] {
            let (bare, ours) = (
                format!("{rw} bare {medium}"),
                format!("{rw} vnvme {medium}"),
            );
            view.row(&mut table, &bare, &bare, &points, "iops", quantity);
            view.row(&mut table, &ours, &ours, &points, "iops", quantity);
            view.ratio(
                &mut table,
                &format!("{rw}: vnvme \u{f7} bare"),
                (&ours, &bare),
                &points,
                "iops",
            );
            view.row(
                &mut table,
                &format!("{rw} bare, p99"),
                &bare,
                &points,
                "p99_ns",
                nanos,
            );
            view.row(
                &mut table,
                &format!("{rw} vnvme, p99"),
                &ours,
                &points,
                "p99_ns",
                nanos,
            );
            rate.series.push(Series {
                quoted: true,
                ..view.series(&format!("{rw} bare"), &bare, &points, "iops", colour)
            });
            rate.series
                .push(view.series(&format!("{rw} vnvme"), &ours, &points, "iops", colour));
        }
        if !table.rows.is_empty() {
            tables.push(table);
            charts.push(rate);
        }
    }
    Section {
        id: "file",
        title: "A file behind a controller".into(),
        intro: "4 KiB random I/O on one file: straight through io_uring on one core, and the same load through a controller on \
                that file, with the controller on a second core."
            .into(),
        tables,
        charts,
    }
}

fn scale(results: &Results) -> Section {
    let view = View {
        results,
        suite: "scale",
    };
    let mut tables = Vec::new();
    let mut charts = Vec::new();
    let depths: BTreeSet<u32> = view
        .points(|_| true)
        .into_iter()
        .map(|(depth, _)| depth)
        .collect();
    for (what, title) in [
        ("controllers", "Controllers on a worker"),
        ("queues", "Queues of one controller"),
    ] {
        let counts: BTreeSet<u32> = view
            .points(|case| case.starts_with(what))
            .into_iter()
            .map(|(_, queues)| queues)
            .collect();
        let labels: Vec<String> = counts.iter().map(u32::to_string).collect();
        let mut table = Table::new(format!("{title}: total IOPS"), labels.clone());
        let mut rate = Chart {
            labels,
            ..chart(
                &format!("scale-{what}"),
                &format!("{title}: total IOPS"),
                what,
                &[],
                false,
                Shape::Lines,
            )
        };
        for (suffix, quiet) in [("", false), (" one busy", false), (" two workers", false)] {
            for (colour, &depth) in (0..).zip(&depths) {
                let case = |count: u32| match (suffix, count) {
                    (" one busy", 1) => format!("{what} 1"),
                    _ => format!("{what} {count}{suffix}"),
                };
                let values: Vec<Option<f64>> = counts
                    .iter()
                    .map(|&n| view.get(&case(n), (depth, n), "iops"))
                    .collect();
                if values.iter().flatten().count() < 2 {
                    continue;
                }
                let name = format!("depth {depth}{suffix}");
                table.row(
                    name.clone(),
                    quiet,
                    values.iter().map(|v| v.map(quantity)).collect(),
                );
                let first = values.first().copied().flatten();
                let cell = |v: &Option<f64>| Some(times((*v)? / first?));
                table.row(
                    format!("{name}: of 1"),
                    quiet,
                    values.iter().map(cell).collect(),
                );
                rate.series.push(Series {
                    name,
                    quoted: suffix == " one busy",
                    values,
                    colour: colour + if suffix == " two workers" { 3 } else { 0 },
                });
            }
        }
        if !table.rows.is_empty() {
            tables.push(table);
            charts.push(rate);
        }
    }
    Section {
        id: "scale",
        title: "Scale".into(),
        intro: "4 KiB random reads of null volumes with shadow doorbells; one thread loads all queues, each at the depth that \
                is named. One busy: all queues exist, one is loaded."
            .into(),
        tables,
        charts,
    }
}

fn mediate(results: &Results) -> Section {
    let view = View {
        results,
        suite: "mediate",
    };
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

fn cost(results: &Results) -> Section {
    let view = View {
        results,
        suite: "cost",
    };
    let mut table = Table::new(
        "Instructions for each I/O, depth 32",
        ["instructions", "ceiling"],
    );
    let rows = results
        .rows
        .iter()
        .filter(|r| r.suite == "cost" && r.metric == "instructions_per_io");
    let mut bars = chart(
        "cost",
        "Instructions for each I/O",
        "",
        &[],
        false,
        Shape::Bars,
    );
    let mut values = Vec::new();
    let count = |v: f64| format!("{v:.1}");
    for row in rows {
        let ceiling = view.get(&row.case, (row.depth, row.queues), "ceiling");
        table.row(
            &row.case,
            false,
            vec![Some(count(row.value)), ceiling.map(count)],
        );
        bars.labels.push(row.case.clone());
        values.push(Some(row.value));
    }
    bars.series.push(Series {
        name: "instructions".into(),
        quoted: false,
        values,
        colour: 0,
    });
    table.note = "Counted by callgrind on one thread. The controller alone, from the doorbell to the completion; whole: driver, \
                  controller and load."
        .into();
    Section {
        id: "cost",
        title: "Instructions".into(),
        intro: "A number that hardly depends on the machine, so that a change which costs something shows.".into(),
        tables: filled(vec![table]),
        charts: vec![bars],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::results::{Case, Collector};

    fn results(suite: &str, rows: &[(&str, u32, u32, &str, f64)]) -> Results {
        let mut collector = Collector::default();
        for (case, depth, queues, metric, value) in rows {
            let case = Case {
                suite,
                case,
                depth: *depth,
                queues: *queues,
            };
            collector.add(case, metric, "", *value);
        }
        let mut results = Results::default();
        results.replace(suite, collector.rows(), Vec::new());
        results
    }

    #[test]
    fn nothing_measured_is_nothing_shown() {
        assert!(all(&Results::default()).is_empty());
    }

    #[test]
    fn the_documents_stand_beside_our_figures_at_the_same_depth() {
        let results = results(
            "doorbell",
            &[
                ("shadow off", 4, 1, "iops", 100_000.0),
                ("shadow on", 4, 1, "iops", 500_000.0),
                ("shadow on", 4, 1, "mmio_per_io", 0.001),
                ("shadow on", 32, 4, "iops", 2e6),
            ],
        );
        let sections = all(&results);
        let [section] = sections.as_slice() else {
            panic!("{} sections", sections.len());
        };
        let text = section.tables[0].text();
        let line = |name: &str| {
            text.lines()
                .find(|l| l.trim_start().starts_with(name))
                .unwrap()
                .to_owned()
        };
        assert!(line("gain ").contains("5.00\u{d7}"), "{text}");
        assert!(line("QEMU series: on").contains("99.8k"), "{text}");
        assert!(line("QEMU series: gain").contains("4.07\u{d7}"), "{text}");
        assert!(line("Linux patch: on").contains("1.00M"), "{text}");
        assert!(
            !text.contains("Collabora"),
            "no figure at depth 32 with one queue"
        );
        assert!(section.tables[1].text().contains("0.00100"));
    }

    #[test]
    fn gains_of_the_driver_are_percentages() {
        let results = results(
            "driver",
            &[
                ("randread libaio", 1, 1, "iops", 1000.0),
                ("randread vnvme", 1, 1, "iops", 1300.0),
            ],
        );
        let text = all(&results)[0].tables[0].text();
        assert!(text.contains("+30%") && text.contains("+12%"), "{text}");
    }
}
