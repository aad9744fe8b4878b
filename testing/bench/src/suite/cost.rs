//! Suite `cost`: instructions for each I/O, counted by callgrind. The number hardly depends on the
//! machine, so the cost of a change is visible. A file holds a ceiling for each case, and a case
//! above its ceiling is an error. The ceilings are those of one build: the release build of `vnvme`
//! by itself, with the compiler that the file names.
//!
//! Each case runs twice, with few and with many I/Os; the difference leaves out the start and the
//! end. Driver, worker and controller are on one thread, so that the count is the same each time.
//! The load takes no latencies, because the number of I/Os for which it would read the clock
//! depends on the clock. The cases count:
//!
//! - `null read` and the like: the loop that production runs, `worker::Worker`, with its clock, its
//!   meter and the controller that it serves; from the doorbell to the completion. Two parts of a
//!   turn are left out: the check of the sockets, which is due by the time (a system call in 100
//!   us), and sleep.
//! - `null read, controller` and the like: the part of the controller with its volume. On an
//!   immediate volume that is the whole path of a command.
//! - `whole null read`: driver, worker, controller and load.
//! - A worker polls for outstanding requests of a disk a varying number of times, so a file has two
//!   cases of the controller: `file read, start` from the entry in hand to that of the ring, `file
//!   read, end` from the end of the request to the completion. The number of commands in a batch
//!   still depends on when the disk completes them, and a slow system call makes the next ones
//!   dearer: the minimum of several runs counts.
//! - `vhost-user-blk null read` and the like: requests of an export, see [`vhost`].
//! - `qcow2 read`, `NBD read`, `NVMe/TCP target, read` and the like: see [`volume`].

mod vhost;
mod volume;

use super::scratch::Scratch;
use super::{Plan, SuiteResults};
use crate::results::Case;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

const SUITE: &str = "cost";
/// Number of I/Os in the shorter run.
const SHORT_RUN_IOS: u64 = 4_000;
const LONG_RUN_IOS: u64 = 12_000;
/// Number of I/Os in the longer run when all instructions count. The cost of starting varies by
/// 300,000 instructions between runs (address space layout, hash seeds), which must be small
/// compared with the difference.
const MANY_WHOLE: u64 = 84_000;
/// Number of runs of a case whose count depends on more than the program. The minimum counts.
const RUNS: u32 = 4;
const DEPTH: u16 = 32;

/// Function whose instructions are counted, including its callees; `None`: all instructions. The
/// compiler must keep it as a separate function: one with a single caller may be inlined.
type CountedFunction = Option<&'static str>;

const WHOLE: CountedFunction = None;
/// Function for one step of the worker that serves a controller in this process.
const LOOP: CountedFunction = Some("in_process::Host::step");
/// Function by which a controller does its work in one round of a worker. callgrind counts the
/// instructions below it, whichever front-end has the controller.
const CONTROLLER: CountedFunction = Some("controller::control::Controller::poll_within");
/// Function in which a controller starts a batch of commands on a volume that does not complete
/// them immediately.
const START: CountedFunction = Some("controller::engine::run::Batch::start");
/// Function in which a controller completes one command.
const END: CountedFunction =
    Some("controller::engine::complete::<impl controller::engine::Engine>::complete");

/// Placeholder for a file that the suite creates.
const FILE: &str = "";
const DISK: &str = "disk.raw";
const FILE_SIZE: usize = 16 << 20;
const NULL: &str = "null://1T";
const MEMORY: &str = "mem://64M";

struct Cost {
    case: &'static str,
    target: &'static str,
    rw: &'static str,
    bs: &'static str,
    counted: CountedFunction,
}

const CASES: [Cost; 11] = [
    cost("null read", NULL, "randread", "4k", LOOP),
    cost("null write", NULL, "randwrite", "4k", LOOP),
    cost("memory read", MEMORY, "randread", "4k", LOOP),
    cost("null read 128k", NULL, "randread", "128k", LOOP),
    cost("null read, controller", NULL, "randread", "4k", CONTROLLER),
    cost(
        "null write, controller",
        NULL,
        "randwrite",
        "4k",
        CONTROLLER,
    ),
    cost(
        "memory read, controller",
        MEMORY,
        "randread",
        "4k",
        CONTROLLER,
    ),
    cost(
        "null read 128k, controller",
        NULL,
        "randread",
        "128k",
        CONTROLLER,
    ),
    cost("file read, start", FILE, "randread", "4k", START),
    cost("file read, end", FILE, "randread", "4k", END),
    cost("whole null read", NULL, "randread", "4k", WHOLE),
];

/// Returns the names of all cases.
fn names() -> impl Iterator<Item = &'static str> {
    let exports = vhost::CASES.iter().map(|export| export.case);
    let volumes = volume::CASES.iter().map(|volume| volume.case);
    CASES
        .iter()
        .map(|cost| cost.case)
        .chain(exports)
        .chain(volumes)
}

const fn cost(
    case: &'static str,
    target: &'static str,
    rw: &'static str,
    bs: &'static str,
    counted: CountedFunction,
) -> Cost {
    Cost {
        case,
        target,
        rw,
        bs,
        counted,
    }
}

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let mut outcome = SuiteResults::default();
    if !has_valgrind() {
        outcome.leave_out(
            "the suite",
            "valgrind is not installed (apt-get install valgrind)",
        );
        return Ok(outcome);
    }
    let ceilings = plan.ceilings.as_deref().map(ceilings).transpose()?;
    let file = file(&plan.output)?;
    let mut complaints = Vec::new();
    for cost in &CASES {
        let target = match cost.target {
            FILE => format!(
                "file://{}",
                file.path().canonicalize()?.join(DISK).display()
            ),
            other => other.to_owned(),
        };
        add(
            (cost.case, DEPTH),
            instructions(&plan.vnvme.path, cost, &target),
            ceilings.as_ref(),
            &mut outcome,
            &mut complaints,
        );
    }
    let program = vhost::program(&plan.vnvme.path);
    for export in &vhost::CASES {
        let value =
            vhost::instructions(&program, export).with_context(|| format!("{}", program.display()));
        add(
            (export.case, DEPTH),
            value,
            ceilings.as_ref(),
            &mut outcome,
            &mut complaints,
        );
    }
    let program = volume::program(&plan.vnvme.path);
    for volume in &volume::CASES {
        let dir = Scratch::new_in(&plan.output)?;
        if let Some(reason) = volume.missing(dir.path())? {
            outcome.leave_out(volume.case, reason);
            continue;
        }
        let value = volume::instructions(&program, volume, dir.path())
            .with_context(|| format!("{}", program.display()));
        add(
            (volume.case, volume.depth()),
            value,
            ceilings.as_ref(),
            &mut outcome,
            &mut complaints,
        );
    }
    if !complaints.is_empty() {
        outcome.complaint = Some(complaints.join("; "));
    }
    Ok(outcome)
}

/// Adds the figure of a case to the results, and a message to `complaints` if it exceeds its
/// ceiling.
fn add(
    (name, depth): (&'static str, u16),
    value: Result<f64>,
    ceilings: Option<&BTreeMap<String, f64>>,
    outcome: &mut SuiteResults,
    complaints: &mut Vec<String>,
) {
    let value = match value {
        Ok(value) => value,
        Err(error) => {
            complaints.push(format!("{name}: {error:#}"));
            outcome.leave_out(name, format!("{error:#}"));
            return;
        }
    };
    eprintln!("  {name}: {value:.1}");
    let case = Case {
        suite: SUITE,
        case: name,
        depth: depth.into(),
        queues: 1,
    };
    let collector = &mut outcome.collector;
    collector.add(case, "instructions_per_io", "1", value);
    let Some(ceilings) = ceilings else {
        return;
    };
    if let Some(&ceiling) = ceilings.get(name) {
        collector.add(case, "ceiling", "1", ceiling);
    }
    complaints.extend(complaint(name, value, ceilings));
}

/// Returns an error message if a case's figure exceeds its ceiling.
fn complaint(case: &str, value: f64, ceilings: &BTreeMap<String, f64>) -> Option<String> {
    match ceilings.get(case) {
        None => Some(format!(
            "{case} takes {value:.1} instructions, and has no ceiling"
        )),
        Some(ceiling) if value > *ceiling => Some(format!(
            "{case} takes {value:.1} instructions, its ceiling is {ceiling}"
        )),
        Some(_) => None,
    }
}

/// Creates a directory with a file full of data, on the same disk as the output.
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

/// Parses the ceilings: lines of a case and its ceiling, such as `"null read" = 250`.
fn ceilings(path: &Path) -> Result<BTreeMap<String, f64>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let read: BTreeMap<String, f64> =
        toml::from_str(&text).with_context(|| format!("{}", path.display()))?;
    for case in read.keys() {
        let known = names().any(|name| name == case);
        ensure!(known, "{}: there is no case \"{case}\"", path.display());
    }
    Ok(read)
}

fn instructions(vnvme: &Path, cost: &Cost, target: &str) -> Result<f64> {
    let more = if cost.counted == WHOLE {
        MANY_WHOLE
    } else {
        LONG_RUN_IOS
    };
    let runs = if cost.target == FILE { RUNS } else { 1 };
    let least = |ios| {
        let counts = (0..runs).map(|_| collected(vnvme, cost, target, ios));
        let counts = counts.collect::<Result<Vec<u64>>>()?;
        counts.into_iter().min().context("no run")
    };
    let (few, many) = (least(SHORT_RUN_IOS)?, least(more)?);
    ensure!(
        many > few,
        "callgrind counted {few} instructions, then {many}: is {} still a function of its own?",
        cost.counted.unwrap_or("the program")
    );
    Ok((many - few) as f64 / (more - SHORT_RUN_IOS) as f64)
}

/// Runs a case with this many I/Os, and returns the number of instructions.
fn collected(vnvme: &Path, cost: &Cost, target: &str, ios: u64) -> Result<u64> {
    let mut command = Command::new(vnvme);
    command
        .args([
            "bench", target, "--rw", cost.rw, "--bs", cost.bs, "--seed", "1", "--json",
        ])
        .args(["--iodepth", &DEPTH.to_string()])
        .args(["--ios", &ios.to_string(), "--sample", "0"]);
    counted(cost.counted, &command)
}

/// Runs a command in callgrind, and returns the number of instructions that it executed: of all, or
/// of one function. Functions within that one that are named as well are left out.
fn counted<'a>(functions: impl IntoIterator<Item = &'a str>, program: &Command) -> Result<u64> {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    for function in functions {
        command.arg(format!("--toggle-collect={function}"));
    }
    command.arg(program.get_program()).args(program.get_args());
    let variables = program.get_envs();
    command.envs(variables.filter_map(|(name, value)| Some((name, value?))));
    let output = command.stdin(Stdio::null()).output().context("valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let last = text.lines().rev().find(|l| !l.trim().is_empty());
        bail!("the run in valgrind failed: {}", last.unwrap_or_default());
    }
    parse_collected(&text).context("callgrind did not say how much it collected")
}

/// Parses callgrind's output `==123== Collected : 456`.
fn parse_collected(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.split_once("Collected :"))?;
    line.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callgrind_output_is_parsed() {
        let text = "==7== Events    : Ir\n==7== Collected : 1234567\n";
        assert_eq!(parse_collected(text), Some(1_234_567));
        assert_eq!(parse_collected("==7== nothing"), None);
    }

    #[test]
    fn ceilings_belong_to_known_cases() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "\"null read\" = 250\n\"null write\" = 260.5\n").unwrap();
        let read = ceilings(file.path()).unwrap();
        assert_eq!(read.get("null write"), Some(&260.5));
        assert!(ceilings(Path::new("/no/such/file")).is_err());
        for wrong in ["\"null read\" = \"many\"", "\"nul read\" = 250"] {
            std::fs::write(file.path(), wrong).unwrap();
            assert!(ceilings(file.path()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn cost_above_or_without_ceiling_is_reported() {
        let ceilings = BTreeMap::from([("null read".to_owned(), 230.0)]);
        assert_eq!(complaint("null read", 230.0, &ceilings), None);
        let above = complaint("null read", 230.1, &ceilings).unwrap();
        assert!(above.contains("its ceiling is 230"), "{above}");
        let missing = complaint("null write", 1.0, &ceilings).unwrap();
        assert!(missing.contains("has no ceiling"), "{missing}");
    }

    #[test]
    fn every_cost_case_has_ceiling() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testing/bench/ceilings.toml");
        let read = ceilings(&path).unwrap();
        for name in names() {
            assert!(read.contains_key(name), "{name}");
        }
    }
}
