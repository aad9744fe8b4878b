//! The conformance cases against this program: a disk of its own, one with a host that creates
//! namespaces, one with placement handles, one with metadata, one with zones, and two of one
//! subsystem.

use conformance::CASES;
use conformance::served;
use conformance::suite::{self, CaseOutcome, TestTarget};
use std::path::Path;

/// Runs every case. Returns the failures, and the number of cases that passed.
fn run(target: &TestTarget) -> (Vec<String>, usize) {
    let reports: Vec<_> = suite::chosen("")
        .map(|case| suite::run(case, target))
        .collect();
    let failed = reports
        .iter()
        .filter(|report| matches!(report.outcome, CaseOutcome::Failed(_)));
    let [passed, ..] = suite::count(&reports);
    (failed.map(|report| report.line()).collect(), passed)
}

#[test]
fn every_applicable_case_passes() {
    let mut program = served::start(Path::new(env!("CARGO_BIN_EXE_vnvme"))).unwrap();
    let cases: usize = CASES.iter().map(|cases| cases.len()).sum();
    let targets = [
        (program.alone(), 250),
        (program.pool(), 240),
        (program.placed(), 253),
        (program.protected(), 240),
        (program.zoned(), 300),
        (program.shared(), 270),
    ];
    for (target, least) in targets {
        let (failed, passed) = run(&target);
        assert!(failed.is_empty(), "{}", failed.join("\n"));
        // A case that does not apply is no success: most of them must apply.
        assert!(passed >= least, "{passed} of {cases} cases have passed");
    }
    assert!(program.is_running());
}
