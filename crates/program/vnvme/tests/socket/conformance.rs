//! The conformance cases against this program: a disk of its own, one with a host that creates
//! namespaces, one with placement handles, one with metadata, one with zones, and two of one
//! subsystem. Each kind of disk has a program of its own: most cases wait, and so run side by side.

use conformance::CASES;
use conformance::served::{self, ServedProgram};
use conformance::suite::{self, CaseOutcome, TestTarget};
use std::path::Path;

/// Runs every case against a disk. At least `least` cases must pass: a case that does not apply is
/// no success.
fn every_applicable_case_passes(disk: fn(&ServedProgram) -> TestTarget, least: usize) {
    let mut program = served::start(Path::new(env!("CARGO_BIN_EXE_vnvme"))).unwrap();
    let target = disk(&program);
    let reports: Vec<_> = suite::chosen("")
        .map(|case| suite::run(case, &target))
        .collect();
    let failed = reports
        .iter()
        .filter(|report| matches!(report.outcome, CaseOutcome::Failed(_)));
    let failed: Vec<_> = failed.map(|report| report.line()).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    let cases: usize = CASES.iter().map(|cases| cases.len()).sum();
    let [passed, ..] = suite::count(&reports);
    assert!(passed >= least, "{passed} of {cases} cases have passed");
    assert!(program.is_running());
}

#[test]
fn plain_disk_passes_every_applicable_case() {
    every_applicable_case_passes(ServedProgram::alone, 250);
}

#[test]
fn disk_with_pool_passes_every_applicable_case() {
    every_applicable_case_passes(ServedProgram::pool, 240);
}

#[test]
fn disk_with_placement_passes_every_applicable_case() {
    every_applicable_case_passes(ServedProgram::placed, 253);
}

#[test]
fn disk_with_metadata_passes_every_applicable_case() {
    every_applicable_case_passes(ServedProgram::protected, 240);
}

#[test]
fn zoned_disk_passes_every_applicable_case() {
    every_applicable_case_passes(ServedProgram::zoned, 300);
}

#[test]
fn disks_of_one_subsystem_pass_every_applicable_case() {
    every_applicable_case_passes(ServedProgram::shared, 270);
}
