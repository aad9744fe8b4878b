//! Runner of cases, and their outcomes.

use crate::case::{Case, Need, Run, Setup};
use crate::cases::CASES;
use crate::host::Host;
use crate::verdict::{Check, Verdict};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Sockets of the controllers that the conformance cases test.
#[derive(Clone, Debug)]
pub struct TestTarget {
    /// vfio-user socket of the controller to test.
    pub socket: PathBuf,
    /// vfio-user socket of a second controller of the same subsystem, if there is one.
    pub second: Option<PathBuf>,
}

/// Outcome of a conformance case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CaseOutcome {
    /// The controller meets the requirement.
    Passed,
    /// The controller violates the requirement; the text has the expected and the actual result.
    Failed(String),
    /// The controller lacks the feature that the case tests, for this reason.
    NotApplicable(String),
}

/// Report about a conformance case that has run.
pub struct CaseReport {
    /// Conformance case that has run.
    pub case: &'static Case,
    /// Outcome of the case.
    pub outcome: CaseOutcome,
    /// Duration of the case.
    pub took: Duration,
}

/// Returns the cases for which name, plan entry or title contains the filter.
pub fn chosen(filter: &str) -> impl Iterator<Item = &'static Case> {
    CASES.iter().copied().flatten().filter(move |case| {
        case.name.contains(filter)
            || case.title.contains(filter)
            || case.plan.iter().any(|entry| entry.starts_with(filter))
    })
}

/// Runs one conformance case against a target.
pub fn run(case: &'static Case, target: &TestTarget) -> CaseReport {
    let begun = Instant::now();
    let outcome = match attempt(case, target) {
        Ok(()) => CaseOutcome::Passed,
        Err(Verdict::Failed(text)) => CaseOutcome::Failed(text),
        Err(Verdict::NotApplicable(reason)) => CaseOutcome::NotApplicable(reason),
    };
    CaseReport {
        case,
        outcome,
        took: begun.elapsed(),
    }
}

fn attempt(case: &Case, target: &TestTarget) -> Check {
    let mut host = Host::attach(&target.socket)?;
    match case.run {
        Run::One(run) => {
            prepare(&mut host, case.setup)?;
            run(&mut host)
        }
        Run::Two(run) => {
            let Some(second) = &target.second else {
                return crate::verdict::not_applicable("there is no second controller (--second)");
            };
            let mut other = Host::attach(second)?;
            prepare(&mut host, case.setup)?;
            prepare(&mut other, case.setup)?;
            run(&mut host, &mut other)
        }
    }
}

fn prepare(host: &mut Host, setup: Setup) -> Check {
    if setup != Setup::Disabled {
        host.enable()?;
    }
    if matches!(setup, Setup::Io | Setup::Pair) {
        let entries = host.io_entries();
        host.create_pair(1, entries)?;
    }
    Ok(())
}

impl CaseReport {
    /// Returns the report as a line of text.
    pub fn line(&self) -> String {
        let (name, plan) = (self.case.name, self.case.plan.join(" "));
        match &self.outcome {
            CaseOutcome::Passed => format!("passed  {name:<38} {plan}"),
            CaseOutcome::Failed(text) => format!("FAILED  {name:<38} {plan}\n        {text}"),
            CaseOutcome::NotApplicable(reason) => format!("n/a     {name:<38} {plan}  ({reason})"),
        }
    }

    /// Returns the report as a JSON value.
    pub fn json(&self) -> Value {
        let (outcome, text) = match &self.outcome {
            CaseOutcome::Passed => ("passed", None),
            CaseOutcome::Failed(text) => ("failed", Some(text)),
            CaseOutcome::NotApplicable(reason) => ("not applicable", Some(reason)),
        };
        let need = match self.case.need {
            Need::Always => "always",
            Need::If(capability) => capability,
        };
        json!({
            "name": self.case.name,
            "plan": self.case.plan,
            "title": self.case.title,
            "section": self.case.section,
            "need": need,
            "outcome": outcome,
            "text": text,
            "milliseconds": self.took.as_millis() as u64,
        })
    }
}

/// Returns the numbers of passed, failed and not applicable cases.
pub fn count(reports: &[CaseReport]) -> [usize; 3] {
    let count = |is: fn(&CaseOutcome) -> bool| reports.iter().filter(|r| is(&r.outcome)).count();
    [
        count(|o| matches!(o, CaseOutcome::Passed)),
        count(|o| matches!(o, CaseOutcome::Failed(_))),
        count(|o| matches!(o, CaseOutcome::NotApplicable(_))),
    ]
}
