//! Report sections of suites that need no guest.

use super::{
    Point, Section, View, chart, depth_names, filled, per_io, quote, quote_gain, quoted_series,
    times,
};
use crate::report::chart::{Chart, Series, Shape};
use crate::report::documents;
use crate::report::table::Table;
use crate::results::{Results, quotient};
use load::progress::{nanos, quantity};
use std::collections::BTreeSet;

pub fn limit(results: &Results) -> Section {
    let view = View::new(results, "limit");
    let points = view.points(|case| !["pingpong", "copying"].contains(&case));
    let cases = [
        "null mapped",
        "null shadow",
        "memory mapped",
        "memory shadow",
    ];
    let mut tables = Vec::new();
    for (view, words) in view.by_distance() {
        tables.extend(limit_at(&view, &words, &cases, &points));
    }
    let mut ping = Table::new(
        "A cache line from core to core and back, whatever the distance",
        ["time"],
    );
    let at = |metric| view.get("pingpong", (1, 1), metric).map(nanos);
    ping.row("one word", false, vec![at("rtt_ns")]);
    ping.row(
        "64-byte entry there, 16-byte completion back",
        false,
        vec![at("entry_rtt_ns")],
    );
    let copying = view.get("copying", (1, 1), "copy_ns").map(nanos);
    ping.row(
        "copying 4 KiB, on one core, without a queue",
        false,
        vec![copying],
    );
    if at("far_rtt_ns").is_some() {
        ping.row(
            "one word, in the farthest memory seen",
            false,
            vec![at("far_rtt_ns")],
        );
        ping.note = "Queues, data and ping-pong are in memory that is near both CPUs, by measurement (--memory near). A line \
                     whose memory belongs to another socket, say, takes longer from core to core."
            .into();
    }
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
    if let Some(rtt) = view.distance {
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

/// Returns the tables of suite `limit` at one distance.
fn limit_at(view: &View<'_>, words: &str, cases: &[&str], points: &[Point]) -> Vec<Table> {
    let names = || depth_names(points);
    let mut time = Table::new(format!("Time of one I/O, at depth{words}"), names());
    for case in cases {
        view.row(&mut time, case, case, points, "ns_per_io", nanos);
    }
    for case in ["null mapped", "null shadow"] {
        let [running, gaps, pings, goal] = [
            "outside gaps",
            "share of gaps",
            "the same, of the ping-pong",
            "\u{f7} the goal",
        ]
        .map(|words| format!("{case}, {words}"));
        view.row(&mut time, &running, case, points, "ns_running", nanos);
        view.row(&mut time, &gaps, case, points, "gap_share", percent);
        view.row(&mut time, &pings, case, points, "ping_gap_share", percent);
        view.row(&mut time, &goal, case, points, "of_goal", of_goal);
    }
    time.note = "The goal, at a round trip R: 1.25 R + 200 ns at depth 1, 0.2 R + 90 ns at 32, \
                 0.1 R + 80 ns at 128; (missed) is more. The round trip is measured before and \
                 after each slice, on the same two cores. A gap is a stretch of more than 250 us \
                 in which nothing ended: the machine's host had taken a CPU; the goal is of the \
                 time outside gaps, as the ping-pong's round trip is. With ?: of few slices, or \
                 of slices that have little in common."
        .into();
    let mut rate = Table::new(format!("IOPS, at depth{words}"), names());
    for case in cases {
        view.row(&mut rate, case, case, points, "iops", quantity);
    }
    view.ratio(
        &mut rate,
        "shadow \u{f7} mapped (null)",
        ("null shadow", "null mapped"),
        points,
        "iops",
    );
    let mut tail = Table::new(
        format!("Latency, median and 99th percentile, at depth{words}"),
        names(),
    );
    for case in cases {
        for (name, metric) in [("p50", "p50_ns"), ("p99", "p99_ns")] {
            let name = format!("{case}, {name}");
            view.row(&mut tail, &name, case, points, metric, nanos);
        }
    }
    let tables = [time, rate, tail];
    let beside = view.beside(cases, points, words);
    tables.into_iter().chain(beside).collect()
}

fn percent(value: f64) -> String {
    // A share that rounding has made less than nothing is nothing.
    format!("{:.1}%", (100.0 * value).max(0.0) + 0.0)
}

/// Formats a ratio to a goal that must not be exceeded.
fn of_goal(value: f64) -> String {
    let missed = if value > 1.0 { " (missed)" } else { "" };
    times(value) + missed
}

pub fn doorbell(results: &Results) -> Section {
    let view = View::new(results, "doorbell");
    let points = view.points(|_| true);
    let mut tables = Vec::new();
    for (view, words) in view.by_distance() {
        tables.extend(doorbell_at(&view, &words, &points));
    }
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

/// Suffixes of the case names in suite `doorbell`, one for each variant.
const DOORBELL_WAYS: [&str; 5] = [
    "",
    " batched",
    " sleeping",
    " sleeping batched",
    " interrupt",
];

/// Returns the tables of suite `doorbell` at one distance.
fn doorbell_at(view: &View<'_>, words: &str, points: &[Point]) -> Vec<Table> {
    let names = || depth_names(points);
    let mut iops = Table::new(format!("IOPS, at depth (\u{d7} queues){words}"), names());
    let mut mmio = Table::new("MMIO doorbells for each I/O", names());
    let mut tail = Table::new(format!("Latency, median{words}"), names());
    let mut cases = Vec::new();
    for way in DOORBELL_WAYS {
        let (off, on) = (format!("shadow off{way}"), format!("shadow on{way}"));
        if !view.has(&on) {
            continue;
        }
        for case in [&off, &on] {
            view.row(&mut iops, case, case, points, "iops", quantity);
            view.row(&mut mmio, case, case, points, "mmio_per_io", per_io);
            view.row(&mut tail, case, case, points, "p50_ns", nanos);
        }
        let gain = format!("gain{way}");
        view.ratio(&mut iops, &gain, (&on, &off), points, "iops");
        cases.extend([off, on]);
    }
    if !iops.rows.is_empty() {
        for pair in [
            &documents::QEMU_IOPS,
            &documents::COLLABORA,
            &documents::LINUX,
        ] {
            for series in pair {
                quote(&mut iops, series, points, quantity);
            }
        }
        quote_gain(
            &mut iops,
            "QEMU series: gain",
            &documents::QEMU_IOPS,
            points,
        );
        quote_gain(&mut iops, "Collabora: gain", &documents::COLLABORA, points);
        quote_gain(&mut iops, "Linux patch: gain", &documents::LINUX, points);
        for series in &documents::QEMU_MMIO {
            quote(&mut mmio, series, points, per_io);
        }
    }
    iops.note = "The host rings for each I/O that it submits, as fio does. batched: once for all \
                 that it can submit. sleeping: the worker sleeps as soon as it has nothing to do. \
                 interrupt: and the host waits for interrupts. With ?: of few slices, or of slices \
                 that have little in common."
        .into();
    let cases: Vec<&str> = cases.iter().map(String::as_str).collect();
    let tables = [iops, mmio, tail];
    let beside = view.beside(&cases, points, words);
    tables.into_iter().chain(beside).collect()
}

/// Additional ways to use a bare ring: the word in the case's name, the description, and the name
/// in a ratio.
const OTHER_WAYS: [(&str, &str, &str); 3] = [
    (
        "waiting",
        "waiting in the kernel",
        "that waits in the kernel",
    ),
    (
        "beside",
        "the other CPU polling",
        "with the other CPU polling",
    ),
    (
        "plain",
        "buffers not registered",
        "without registered buffers, as it is",
    ),
];

pub fn file(results: &Results) -> Section {
    let view = View::new(results, "file");
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
            // Cases that a medium does not have are left out.
            for (way, is, ratio) in OTHER_WAYS {
                let case = format!("{rw} {way} {medium}");
                let name = format!("{rw} bare {medium}, {is}");
                view.row(&mut table, &name, &case, &points, "iops", quantity);
                let name = format!("{rw}: vnvme \u{f7} bare {ratio}");
                view.ratio(&mut table, &name, (&ours, &case), &points, "iops");
            }
            if medium != "tmpfs" {
                let pinned = format!("{rw} pinned {medium}");
                let name = format!("{rw} vnvme --pin-memory {medium}");
                view.row(&mut table, &name, &pinned, &points, "iops", quantity);
                view.ratio(
                    &mut table,
                    &format!("{rw}: vnvme --pin-memory \u{f7} bare, both with registered buffers"),
                    (&pinned, &bare),
                    &points,
                    "iops",
                );
            }
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
            let name = format!("ping-pong of a cache line beside {rw}");
            view.row(&mut table, &name, &ours, &points, "rtt_ns", nanos);
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
        intro: "4 KiB random I/O on one file: straight through io_uring on one core (\u{201c}bare\u{201d}: its buffers registered \
                and its completions polled, unless it says otherwise; fio waits for them in the kernel), and the same load \
                through a controller on that file, with the controller on a second core. What is like bare with registered \
                buffers is a controller with --pin-memory. What was measured while something else had one of the CPUs for \
                more than 2% of the time was measured again."
            .into(),
        tables,
        charts,
    }
}

/// Suffix of the cases in suite `scale` with two workers on two CPUs, one of which also runs the
/// load.
const CROWDED: &str = " two workers, one on the load's CPU";

pub fn scale(results: &Results) -> Section {
    let view = View::new(results, "scale");
    let mut tables = Vec::new();
    let mut charts = Vec::new();
    let depths: BTreeSet<u32> = view
        .points(|_| true)
        .into_iter()
        .map(|(depth, _)| depth)
        .collect();
    let by_distance = view.by_distance();
    let each = by_distance.iter().flat_map(|(view, words)| {
        [
            ("controllers", "Controllers on a worker"),
            ("queues", "Queues of one controller"),
        ]
        .map(|(what, title)| (view, words, what, title))
    });
    for (at, words, what, title) in each {
        let counts: BTreeSet<u32> = view
            .points(|case| case.starts_with(what))
            .into_iter()
            .map(|(_, queues)| queues)
            .collect();
        let labels: Vec<String> = counts.iter().map(u32::to_string).collect();
        let mut table = Table::new(format!("{title}: total IOPS{words}"), labels.clone());
        let mut beside = Table::new(
            format!("{title}: IOPS \u{f7} those of the program beside it{words}"),
            labels.clone(),
        );
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
        for (suffix, quiet) in [
            ("", false),
            (" one busy", false),
            (" two workers", false),
            // Shows the cost of two workers where they cannot gain.
            (CROWDED, true),
        ] {
            for (colour, &depth) in (0..).zip(&depths) {
                let case = |count: u32| match (suffix, count) {
                    (" one busy", 1) => format!("{what} 1"),
                    _ => format!("{what} {count}{suffix}"),
                };
                let get = |n: u32, metric| at.get(&case(n), (depth, n), metric);
                let values: Vec<Option<f64>> = counts.iter().map(|&n| get(n, "iops")).collect();
                if values.iter().flatten().count() < 2 {
                    continue;
                }
                let name = format!("depth {depth}{suffix}");
                table.row(
                    name.clone(),
                    quiet,
                    values.iter().map(|v| v.map(quantity)).collect(),
                );
                let figure = |n: u32| at.figure(&case(n), (depth, n), "iops");
                let first = counts.first().and_then(|&n| figure(n));
                let cell = |&n: &u32| Some(times(quotient(figure(n)?, first?)));
                table.row(
                    format!("{name}: of 1"),
                    quiet,
                    counts.iter().map(cell).collect(),
                );
                let cell = |&n: &u32| get(n, "of_beside").map(times);
                beside.row(&name, false, counts.iter().map(cell).collect());
                rate.series.push(Series {
                    name,
                    quoted: suffix == " one busy" || suffix == CROWDED,
                    values,
                    colour: colour
                        + if suffix.starts_with(" two workers") {
                            3
                        } else {
                            0
                        },
                });
            }
        }
        if table.rows.is_empty() {
            continue;
        }
        tables.push(table);
        tables.push(beside);
        // Only one chart, for the distance that the CPUs had most of the time.
        if at.distance == view.distance {
            charts.push(rate);
        }
    }
    Section {
        id: "scale",
        title: "Scale".into(),
        intro: "4 KiB random reads of null volumes with shadow doorbells; one thread loads all queues, each at the depth that \
                is named. One busy: all queues exist, one is loaded. Two workers: queues go to the second one by themselves when \
                the first has too much to do, which is waited for. On the load's CPU: there was no third CPU, so that the second \
                worker and the load share one, and the figure says what two workers cost then, not what they gain."
            .into(),
        tables: filled(tables),
        charts,
    }
}

pub fn cost(results: &Results) -> Section {
    let view = View::new(results, "cost");
    let mut table = Table::new("Instructions for each I/O", ["instructions", "ceiling"]);
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
        Shape::Rows,
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
    table.note = "Counted by callgrind on one thread. The worker's loop with the controller, from the doorbell to the completion; \
                  the controller alone, with its volume; whole: driver, worker, controller and load. These at depth 32; qcow2 and RBD at depth 1, \
                  NBD and NVMe/TCP at depth 8, of the volume or the target alone."
        .into();
    Section {
        id: "cost",
        title: "Instructions".into(),
        intro: "A number that hardly depends on the machine, so that a change which costs something shows.".into(),
        tables: filled(vec![table]),
        charts: vec![bars],
    }
}
