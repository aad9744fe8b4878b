//! Report section of suite `processes`.

use super::super::table::Table;
use super::{Section, View, percent};
use crate::results::Results;
use load::progress::quantity;

/// Returns the section on the cost of a process for each disk.
pub fn processes(results: &Results) -> Section {
    let view = View::new(results, "processes");
    let number = |value: f64| format!("{value:.1}");
    let mut cost = Table::new(
        "8 disks",
        ["memory, MiB", "processes", "threads", "start, ms", "IOPS"],
    );
    let mut weights = Table::new("The first slice's share of a file, weights 1:3", ["share"]);
    for way in ["one process", "a process each"] {
        let case = format!("8 disks, {way}");
        let at = |metric| view.get(&case, (4, 0), metric);
        let cells =
            ["memory", "processes", "threads", "start"].map(|metric| at(metric).map(number));
        let cells = cells.into_iter().chain([at("iops").map(quantity)]);
        cost.row(way, cells.collect());
        let share = view.get(&format!("weights 1:3, {way}"), (64, 0), "share");
        weights.row(way, vec![share.map(percent)]);
    }
    cost.note =
        "Memory of idle disks. Start: of one process. IOPS: of all, with 4 I/Os in flight on each.";
    Section {
        id: "processes",
        title: "A process for each disk",
        intro: "The same disks behind the controllers of one process, and in a process each. They store nothing, but for \
                the weights, where two slices of a file are read.",
        tables: vec![cost, weights],
        charts: Vec::new(),
    }
}
