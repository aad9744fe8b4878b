//! Suite `cost`: instructions for each I/O, counted by callgrind. The number hardly depends on the machine, so what a change
//! costs shows: a file holds a ceiling for each case, and a case above its ceiling is an error.
//!
//! Each case runs twice in one process with driver and controller on one thread, with few and with many I/Os; the difference
//! leaves out what it takes to begin and to end. `null read` and the like count the controller only, from finding the doorbell
//! to the completion; `whole null read` counts driver, controller and load. The load takes no
//! latencies meanwhile: for how many I/Os it would look at the clock depends on the clock. How
//! often a controller looks in vain for what a disk has not done yet is no constant, so a file has
//! two cases: `file read, start` from the entry in hand to that of the ring, `file read, end` from
//! the end of the request to the completion.

use super::scratch::Scratch;
use super::server::vnvme;
use super::{Outcome, Plan};
use crate::results::Case;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

const SUITE: &str = "cost";
/// I/Os of the two runs.
const FEW: u64 = 4_000;
const MANY: u64 = 12_000;
const DEPTH: u16 = 32;

/// The function below which a controller in this process works, doorbell to completion.
const CONTROLLER: Option<&str> = Some("in_process::Host::step");
/// That in which a controller starts a batch of commands on a volume that does not answer at once.
const START: Option<&str> = Some("controller::engine::run::Batch::start");
/// That in which it ends one of them.
const END: Option<&str> =
    Some("controller::engine::complete::<impl controller::engine::Engine>::complete");
/// Stands for a file that the suite makes.
const FILE: &str = "";
const DISK: &str = "disk.raw";
const FILE_SIZE: usize = 16 << 20;

struct Cost {
    case: &'static str,
    target: &'static str,
    rw: &'static str,
    bs: &'static str,
    /// The function whose instructions count, with what it calls; all do, when none is named.
    function: Option<&'static str>,
}

const CASES: [Cost; 7] = [
    cost("null read", "null://1T", "randread", "4k", CONTROLLER),
    cost("null write", "null://1T", "randwrite", "4k", CONTROLLER),
    cost("memory read", "mem://64M", "randread", "4k", CONTROLLER),
    cost(
        "null read 128k",
        "null://1T",
        "randread",
        "128k",
        CONTROLLER,
    ),
    cost("whole null read", "null://1T", "randread", "4k", None),
    cost("file read, start", FILE, "randread", "4k", START),
    cost("file read, end", FILE, "randread", "4k", END),
];

const fn cost(
    case: &'static str,
    target: &'static str,
    rw: &'static str,
    bs: &'static str,
    function: Option<&'static str>,
) -> Cost {
    Cost {
        case,
        target,
        rw,
        bs,
        function,
    }
}

pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    if !has_valgrind() {
        outcome.leave_out(
            "the suite",
            "valgrind is not installed (apt-get install valgrind)",
        );
        return Ok(outcome);
    }
    let ceilings = ceilings(&plan.ceilings)?;
    let mut above = Vec::new();
    let file = file(&plan.output)?;
    for cost in &CASES {
        let target = match cost.target {
            FILE => format!(
                "file://{}",
                file.path().canonicalize()?.join(DISK).display()
            ),
            other => other.to_owned(),
        };
        let value = match instructions(cost, &target) {
            Ok(value) => value,
            Err(error) => {
                outcome.leave_out(cost.case, format!("{error:#}"));
                continue;
            }
        };
        eprintln!("  {}: {value:.1}", cost.case);
        let case = Case {
            suite: SUITE,
            case: cost.case,
            depth: DEPTH.into(),
            queues: 1,
        };
        outcome
            .collector
            .add(case, "instructions_per_io", "1", value);
        if let Some(&ceiling) = ceilings.get(cost.case) {
            outcome.collector.add(case, "ceiling", "1", ceiling);
            if value > ceiling {
                above.push(format!(
                    "{} takes {value:.1} instructions, its ceiling is {ceiling}",
                    cost.case
                ));
            }
        }
    }
    if !above.is_empty() {
        outcome.complaint = Some(above.join("; "));
    }
    Ok(outcome)
}

/// A folder with a file that holds data, on a disk if the output is.
fn file(dir: &Path) -> Result<Scratch> {
    let scratch = Scratch::new_in(dir)?;
    let path = scratch.path().join(DISK);
    std::fs::write(&path, vec![1; FILE_SIZE])?;
    std::fs::File::open(&path)?.sync_all()?;
    Ok(scratch)
}

fn has_valgrind() -> bool {
    let mut command = Command::new("valgrind");
    command
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// `"null read" = 250`: a case and its ceiling, a line each. No file: no ceilings.
fn ceilings(path: &Path) -> Result<BTreeMap<String, f64>> {
    match std::fs::read_to_string(path) {
        Ok(text) => toml::from_str(&text).with_context(|| format!("{}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error).with_context(|| format!("{}", path.display())),
    }
}

fn instructions(cost: &Cost, target: &str) -> Result<f64> {
    let (few, many) = (
        collected(cost, target, FEW)?,
        collected(cost, target, MANY)?,
    );
    ensure!(
        many > few,
        "callgrind counted {few} instructions, then {many}"
    );
    Ok((many - few) as f64 / (MANY - FEW) as f64)
}

/// Instructions of a run with that many I/Os.
fn collected(cost: &Cost, target: &str, ios: u64) -> Result<u64> {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    if let Some(function) = cost.function {
        command.arg(format!("--toggle-collect={function}"));
    }
    command
        .arg(vnvme()?)
        .args([
            "bench", target, "--rw", cost.rw, "--bs", cost.bs, "--seed", "1", "--json",
        ])
        .args(["--iodepth", &DEPTH.to_string()])
        .args(["--ios", &ios.to_string(), "--sample", "0"]);
    let output = command.stdin(Stdio::null()).output().context("valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let last = text.lines().rev().find(|l| !l.trim().is_empty());
        bail!("the run in valgrind failed: {}", last.unwrap_or_default());
    }
    parse_collected(&text).context("callgrind did not say how much it collected")
}

/// `==123== Collected : 456`.
fn parse_collected(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.split_once("Collected :"))?;
    line.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callgrinds_words_are_understood() {
        let text = "==7== Events    : Ir\n==7== Collected : 1234567\n";
        assert_eq!(parse_collected(text), Some(1_234_567));
        assert_eq!(parse_collected("==7== nothing"), None);
    }

    #[test]
    fn ceilings_are_read_and_may_be_missing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "\"null read\" = 250\n\"null write\" = 260.5\n").unwrap();
        let read = ceilings(file.path()).unwrap();
        assert_eq!(read.get("null write"), Some(&260.5));
        assert!(ceilings(Path::new("/no/such/file")).unwrap().is_empty());
        std::fs::write(file.path(), "\"null read\" = \"many\"").unwrap();
        assert!(ceilings(file.path()).is_err());
    }
}
