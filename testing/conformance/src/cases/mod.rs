//! Conformance cases, by subject.

mod abort;
mod atomic;
mod boot;
mod cmb;
mod events;
mod features;
mod identify;
mod interrupts;
mod io;
mod io_more;
mod lba_status;
mod logs;
mod metadata;
mod namespaces;
mod offered;
mod pairs;
mod pci;
mod placement;
mod pointers;
mod queues;
mod registers;
mod reservations;
mod resets;
mod rings;
mod self_test;
mod zone_areas;
mod zone_identify;
mod zone_management;
mod zone_reports;
mod zone_writes;
mod zoned;

use crate::case::Case;

/// Tables of all conformance cases, in the order in which they run.
pub const CASES: &[&[Case]] = &[
    pci::CASES,
    registers::CASES,
    identify::CASES,
    features::CASES,
    logs::CASES,
    queues::CASES,
    abort::CASES,
    events::CASES,
    self_test::CASES,
    offered::CASES,
    namespaces::CASES,
    io::CASES,
    io_more::CASES,
    lba_status::CASES,
    atomic::CASES,
    placement::CASES,
    metadata::CASES,
    zone_identify::CASES,
    zone_reports::CASES,
    zone_writes::CASES,
    zone_management::CASES,
    zone_areas::CASES,
    pointers::CASES,
    cmb::CASES,
    boot::CASES,
    rings::CASES,
    interrupts::CASES,
    resets::CASES,
    reservations::CASES,
    pairs::PAIR_CASES,
];
