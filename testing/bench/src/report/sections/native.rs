//! Report sections of suites that need no guest.

use super::{Section, Show, View, per_io, percent, shown, times};
use crate::report::chart::{Chart, Shape};
use crate::report::documents;
use crate::report::table::Table;
use crate::results::{Results, quotient};
use load::progress::{nanos, quantity};
use std::collections::BTreeSet;

/// Cases of suite `limit`.
const LIMIT: [&str; 4] = [
    "null mapped",
    "null shadow",
    "memory mapped",
    "memory shadow",
];

pub fn limit(results: &Results) -> Section {
    let view = View::new(results, "limit");
    let by_distance = view.by_distance();
    let tables = by_distance
        .iter()
        .flat_map(|(view, words)| limit_at(view, words));
    let mut tables: Vec<Table> = tables.collect();
    let title = "A cache line from core to core and back, whatever the distance";
    let mut ping = Table::new(title, ["time"]);
    let at = |case, metric| vec![view.get(case, (1, 1), metric).map(nanos)];
    ping.row("one word", at("pingpong", "rtt_ns"));
    let there = "64-byte entry there, 16-byte completion back";
    ping.row(there, at("pingpong", "entry_rtt_ns"));
    let copying = "copying 4 KiB, on one core, without a queue";
    ping.row(copying, at("copying", "copy_ns"));
    if view.get("pingpong", (1, 1), "far_rtt_ns").is_some() {
        let far = "one word, in the farthest memory seen";
        ping.row(far, at("pingpong", "far_rtt_ns"));
        ping.note = "Queues, data and ping-pong are in memory that is near both CPUs, by measurement (--memory near). A line \
                     whose memory belongs to another socket, say, takes longer from core to core.";
    }
    tables.push(ping);
    let mut rate = view.chart("limit-iops", "IOPS", Shape::LogLines);
    let mut time = view.chart("limit-time", "Time of one I/O, ns", Shape::LogLines);
    for (i, case) in LIMIT.into_iter().enumerate() {
        rate.add(case, i, view.values(case, "iops"));
        time.add(case, i, view.values(case, "ns_per_io"));
    }
    time.goal = view.distance.map(|rtt| (rtt, "ping-pong of one line"));
    Section {
        id: "limit",
        title: "Limit: what a virtual controller costs",
        intro: "4 KiB random reads, driver and controller in two processes, each on a core of its own. The null volume stores \
                nothing; the memory volume copies. Mapped: doorbells in a shared page; shadow: Doorbell Buffer Config, with \
                trapped doorbells.",
        tables,
        charts: vec![rate, time],
    }
}

/// Returns the tables of suite `limit` at one distance.
fn limit_at(view: &View<'_>, words: &str) -> Vec<Table> {
    let mut time = view.table(format!("Time of one I/O, at depth{words}"));
    for case in LIMIT {
        time.row(case, view.cells(case, "ns_per_io", nanos));
    }
    for case in ["null mapped", "null shadow"] {
        let rows: [(&str, &str, Show); 4] = [
            ("outside gaps", "ns_running", nanos),
            ("share of gaps", "gap_share", percent),
            ("the same, of the ping-pong", "ping_gap_share", percent),
            ("\u{f7} the goal", "of_goal", of_goal),
        ];
        for (name, metric, show) in rows {
            time.row(format!("{case}, {name}"), view.cells(case, metric, show));
        }
    }
    time.note = "The goal, at a round trip R: 1.25 R + 200 ns at depth 1, 0.2 R + 90 ns at 32, \
                 0.1 R + 80 ns at 128; (missed) is more. The round trip is measured before and \
                 after each slice, on the same two cores. A gap is a stretch of more than 250 us \
                 in which nothing ended: the machine's host had taken a CPU; the goal is of the \
                 time outside gaps, as the ping-pong's round trip is. With ?: of few slices, or \
                 of slices that have little in common.";
    let mut rate = view.table(format!("IOPS, at depth{words}"));
    for case in LIMIT {
        rate.row(case, view.cells(case, "iops", quantity));
    }
    let ratios = view.ratios("null shadow", "null mapped");
    rate.row("shadow \u{f7} mapped (null)", ratios);
    let title = format!("Latency, median and 99th percentile, at depth{words}");
    let mut tail = view.table(title);
    for case in LIMIT {
        for (name, metric) in [("p50", "p50_ns"), ("p99", "p99_ns")] {
            tail.row(format!("{case}, {name}"), view.cells(case, metric, nanos));
        }
    }
    let beside = view.beside(&LIMIT, words);
    [time, rate, tail].into_iter().chain(beside).collect()
}

/// Formats a ratio to a goal that must not be exceeded.
fn of_goal(value: f64) -> String {
    times(value) + if value > 1.0 { " (missed)" } else { "" }
}

pub fn doorbell(results: &Results) -> Section {
    let view = View::new(results, "doorbell");
    let by_distance = view.by_distance();
    let tables = by_distance
        .iter()
        .flat_map(|(view, words)| doorbell_at(view, words));
    let tables: Vec<Table> = tables.collect();
    let title = "IOPS, shadow doorbells off and on";
    let mut rate = view.chart("doorbell-iops", title, Shape::LogLines);
    let title = "MMIO doorbells for each I/O";
    let mut left = view.chart("doorbell-mmio", title, Shape::Bars);
    for (colour, case) in [(1, "shadow off"), (0, "shadow on")] {
        let name = format!("vnvme: {case}");
        rate.add(&name, colour, view.values(case, "iops"));
        left.add(&name, colour, view.values(case, "mmio_per_io"));
    }
    let documents = documents::QEMU_IOPS.iter().zip(&documents::QEMU_MMIO);
    for (colour, (iops, mmio)) in [1, 0].into_iter().zip(documents) {
        rate.quote(iops.name, colour, view.quoted(iops));
        left.quote(mmio.name, colour, view.quoted(mmio));
    }
    Section {
        id: "doorbell",
        title: "Shadow doorbells",
        intro: "4 KiB random reads of a null volume, driver and controller in two processes. Without shadow doorbells each \
                ring is a message to the controller, as it is from a virtual machine. The driver polls for completions.",
        tables,
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
fn doorbell_at(view: &View<'_>, words: &str) -> Vec<Table> {
    let mut iops = view.table(format!("IOPS, at depth (\u{d7} queues){words}"));
    let mut mmio = view.table("MMIO doorbells for each I/O");
    let mut tail = view.table(format!("Latency, median{words}"));
    let mut cases = Vec::new();
    for way in DOORBELL_WAYS {
        let (off, on) = (format!("shadow off{way}"), format!("shadow on{way}"));
        if view.points(|case| case == on).is_empty() {
            continue;
        }
        for case in [&off, &on] {
            iops.row(case, view.cells(case, "iops", quantity));
            mmio.row(case, view.cells(case, "mmio_per_io", per_io));
            tail.row(case, view.cells(case, "p50_ns", nanos));
        }
        iops.row(format!("gain{way}"), view.ratios(&on, &off));
        cases.extend([off, on]);
    }
    if !iops.rows.is_empty() {
        let documents = [
            ("QEMU series: gain", &documents::QEMU_IOPS),
            ("Collabora: gain", &documents::COLLABORA),
            ("Linux patch: gain", &documents::LINUX),
        ];
        for (_, pair) in documents {
            view.quote(&mut iops, pair, quantity);
        }
        for (name, pair) in documents {
            view.quote_gain(&mut iops, name, pair);
        }
        view.quote(&mut mmio, &documents::QEMU_MMIO, per_io);
    }
    iops.note = "The host rings for each I/O that it submits, as fio does. batched: once for all \
                 that it can submit. sleeping: the worker sleeps as soon as it has nothing to do. \
                 interrupt: and the host waits for interrupts. With ?: of few slices, or of slices \
                 that have little in common.";
    let beside = view.beside(&cases, words);
    [iops, mmio, tail].into_iter().chain(beside).collect()
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
    let (mut tables, mut charts) = (Vec::new(), Vec::new());
    for medium in ["tmpfs", "disk"] {
        let title = format!("IOPS on {medium}");
        let mut table = view.table(format!("{title}, at depth"));
        let mut rate = view.chart(&format!("file-{medium}"), &title, Shape::Bars);
        for (colour, rw) in [(0, "randread"), (2, "randwrite")] {
            let case = |way: &str| format!("{rw} {way} {medium}");
            let iops = |way: &str| view.cells(&case(way), "iops", quantity);
            let ratios = |over: &str, under: &str| view.ratios(&case(over), &case(under));
            let ours = format!("{rw}: vnvme");
            table.row(case("bare"), iops("bare"));
            table.row(case("vnvme"), iops("vnvme"));
            table.row(format!("{ours} \u{f7} bare"), ratios("vnvme", "bare"));
            // Cases that a medium does not have are left out.
            for (way, is, ratio) in OTHER_WAYS {
                table.row(format!("{rw} bare {medium}, {is}"), iops(way));
                table.row(format!("{ours} \u{f7} bare {ratio}"), ratios("vnvme", way));
            }
            if medium != "tmpfs" {
                table.row(case("vnvme --pin-memory"), iops("pinned"));
                let name = "--pin-memory \u{f7} bare, both with registered buffers";
                table.row(format!("{ours} {name}"), ratios("pinned", "bare"));
            }
            for way in ["bare", "vnvme"] {
                let cells = view.cells(&case(way), "p99_ns", nanos);
                table.row(format!("{rw} {way}, p99"), cells);
            }
            let name = format!("ping-pong of a cache line beside {rw}");
            table.row(name, view.cells(&case("vnvme"), "rtt_ns", nanos));
            let values = |way: &str| view.values(&case(way), "iops");
            rate.quote(format!("{rw} bare"), colour, values("bare"));
            rate.add(format!("{rw} vnvme"), colour, values("vnvme"));
        }
        if !table.rows.is_empty() {
            tables.push(table);
            charts.push(rate);
        }
    }
    Section {
        id: "file",
        title: "A file behind a controller",
        intro: "4 KiB random I/O on one file: straight through io_uring on one core (\u{201c}bare\u{201d}: its buffers registered \
                and its completions polled, unless it says otherwise; fio waits for them in the kernel), and the same load \
                through a controller on that file, with the controller on a second core. What is like bare with registered \
                buffers is a controller with --pin-memory. What was measured while something else had one of the CPUs for \
                more than 2% of the time was measured again.",
        tables,
        charts,
    }
}

/// Suffix of the cases in suite `scale` with two workers on two CPUs, one of which also runs the
/// load.
const CROWDED: &str = " two workers, one on the load's CPU";

pub fn scale(results: &Results) -> Section {
    let view = View::new(results, "scale");
    let (mut tables, mut charts) = (Vec::new(), Vec::new());
    let depths: BTreeSet<u32> = view.points.iter().map(|(depth, _)| *depth).collect();
    let kinds = [
        ("controllers", "Controllers on a worker"),
        ("queues", "Queues of one controller"),
    ];
    let by_distance = view.by_distance();
    let each = by_distance
        .iter()
        .flat_map(|at| kinds.map(|kind| (at, kind)));
    for ((at, words), (what, title)) in each {
        let counts = view.points(|case| case.starts_with(what)).into_iter();
        let counts: BTreeSet<u32> = counts.map(|(_, queues)| queues).collect();
        let labels: Vec<String> = counts.iter().map(u32::to_string).collect();
        let title = format!("{title}: total IOPS");
        let mut table = Table::new(format!("{title}{words}"), labels.clone());
        let beside = title.replace("total IOPS", "IOPS \u{f7} those of the program beside it");
        let mut beside = Table::new(format!("{beside}{words}"), labels.clone());
        let name = format!("scale-{what}");
        let mut rate = Chart::new(&name, &title, what, labels, Shape::Lines);
        // The crowded cases show the cost of two workers where they cannot gain.
        for suffix in ["", " one busy", " two workers", CROWDED] {
            for (colour, &depth) in (0..).zip(&depths) {
                let case = |count: u32| match (suffix, count) {
                    (" one busy", 1) => format!("{what} 1"),
                    _ => format!("{what} {count}{suffix}"),
                };
                let figure = |n: u32| at.figure(&case(n), (depth, n), "iops");
                let values = counts.iter().map(|&n| Some(figure(n)?.value));
                let values: Vec<Option<f64>> = values.collect();
                if values.iter().flatten().count() < 2 {
                    continue;
                }
                let name = format!("depth {depth}{suffix}");
                let first = counts.first().and_then(|&n| figure(n));
                let of_first = counts
                    .iter()
                    .map(|&n| Some(times(quotient(figure(n)?, first?))));
                let of_first = (format!("{name}: of 1"), of_first.collect());
                for (name, cells) in [(name.clone(), shown(values.clone(), quantity)), of_first] {
                    if suffix == CROWDED {
                        table.quote(name, cells);
                    } else {
                        table.row(name, cells);
                    }
                }
                let of_beside = |&n: &u32| at.get(&case(n), (depth, n), "of_beside").map(times);
                beside.row(&name, counts.iter().map(of_beside).collect());
                let workers = if suffix.starts_with(" two workers") {
                    3
                } else {
                    0
                };
                if [" one busy", CROWDED].contains(&suffix) {
                    rate.quote(name, colour + workers, values);
                } else {
                    rate.add(name, colour + workers, values);
                }
            }
        }
        // Only one chart, for the distance that the CPUs had most of the time.
        if at.distance == view.distance && !table.rows.is_empty() {
            charts.push(rate);
        }
        tables.extend([table, beside]);
    }
    Section {
        id: "scale",
        title: "Scale",
        intro: "4 KiB random reads of null volumes with shadow doorbells; one thread loads all queues, each at the depth that \
                is named. One busy: all queues exist, one is loaded. Two workers: queues go to the second one by themselves when \
                the first has too much to do, which is waited for. On the load's CPU: there was no third CPU, so that the second \
                worker and the load share one, and the figure says what two workers cost then, not what they gain.",
        tables,
        charts,
    }
}

pub fn cost(results: &Results) -> Section {
    let view = View::new(results, "cost");
    let title = "Instructions for each I/O";
    let mut table = Table::new(title, ["instructions", "ceiling"]);
    let rows = results.rows.iter().filter(|r| r.suite == "cost");
    let rows = rows.filter(|r| r.metric == "instructions_per_io");
    let (mut labels, mut values) = (Vec::new(), Vec::new());
    for row in rows {
        let ceiling = view.get(&row.case, (row.depth, row.queues), "ceiling");
        let cells = shown(vec![Some(row.value), ceiling], |v| format!("{v:.1}"));
        table.row(&row.case, cells);
        labels.push(row.case.clone());
        values.push(Some(row.value));
    }
    let mut bars = Chart::new("cost", title, "", labels, Shape::Rows);
    bars.add("instructions", 0, values);
    table.note = "Counted by callgrind on one thread. The worker's loop with the controller, from the doorbell to the completion; \
                  the controller alone, with its volume; whole: driver, worker, controller and load. These at depth 32; qcow2 and RBD at depth 1, \
                  NBD and NVMe/TCP at depth 8, of the volume or the target alone.";
    Section {
        id: "cost",
        title: "Instructions",
        intro: "A number that hardly depends on the machine, so that a change which costs something shows.",
        tables: vec![table],
        charts: vec![bars],
    }
}
