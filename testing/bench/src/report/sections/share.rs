//! Report section of suite `share`.

use super::super::table::Table;
use super::{Section, View, percent};
use crate::results::Results;
use load::progress::{nanos, quantity};

/// Returns the section on the share that a slice receives, compared with its due share.
pub fn share(results: &Results) -> Section {
    let view = View::new(results, "share");
    let mut shares = Table::new(
        "The first slice's share of the device",
        ["due", "share", "IOPS of both"],
    );
    let cases = [
        ("equal without weights", 4, None),
        ("equal", 4, Some(0.5)),
        ("weights 1:3", 64, Some(0.25)),
        ("weights 1:3, unequal load", 64, Some(0.25)),
    ];
    let mut add = |case: String, depth, due: Option<f64>| {
        let at = |metric| view.get(&case, (depth, 1), metric);
        let share = at("share").map(percent);
        let due = share.as_ref().and(due).map(percent);
        let cells = vec![due, share, at("iops").map(quantity)];
        shares.row(case, cells);
    };
    for placement in ["one worker", "two workers"] {
        for (name, depth, due) in cases {
            add(format!("{name}, {placement}"), depth, due);
        }
    }
    for case in ["equal, NVMe and virtio", "equal, virtio and NVMe"] {
        add(case.to_owned(), 4, Some(0.5));
    }
    shares.note = "Equal: 4 I/Os in flight against 64. Weights: 64 against 64, and 64 against 16. Virtio: a vhost-user-blk export.";
    let mut limit = Table::new(
        "A slice limited to 2,000 IOPS for ten seconds, and its neighbour",
        ["IOPS", "of the limit", "neighbour's p99", "without it"],
    );
    let at = |metric| view.get("limited", (4, 1), metric);
    let [beside, alone] = ["p99_beside_ns", "p99_alone_ns"].map(|metric| at(metric).map(nanos));
    let (iops, share) = (
        at("limited_iops").map(quantity),
        at("of_limit").map(percent),
    );
    limit.row("limited", vec![iops, share, beside, alone]);
    Section {
        id: "share",
        title: "Shares, weights, limits",
        intro: "Two slices of one device, each behind a controller and loaded by a client of its own. The device is \
                simulated: 250 \u{b5}s a request, two at a time for the shares, 64 for the limit.",
        tables: vec![shares, limit],
        charts: Vec::new(),
    }
}
