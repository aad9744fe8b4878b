//! `conformance`: runs the cases against a controller, prints how each ended, and fails if one did.

#![forbid(unsafe_code)]

use clap::Parser;
use conformance::suite::{self, CaseReport, TestTarget};
use conformance::{Need, matrix, served};
use output::outln;
use serde_json::json;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

/// Run NVMe conformance cases against a controller that is served over vfio-user. What is on its
/// namespaces is overwritten.
#[derive(Parser)]
#[command(name = "conformance")]
struct Arguments {
    /// vfio-user socket of the controller; nobody else may be connected to it.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Socket of a second controller of the same subsystem, for the cases with two hosts.
    #[arg(long, value_name = "PATH", requires = "socket")]
    second: Option<PathBuf>,
    /// Serve disks with this vnvme, and run all cases against each kind of them, instead.
    #[arg(long, value_name = "PROGRAM", conflicts_with = "socket")]
    vnvme: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Only the cases with this text in their name or title, or whose plan entry begins with it.
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// List the cases, and run none.
    #[arg(long)]
    list: bool,
    /// Print the matrix (docs/conformance.md), and run nothing.
    #[arg(long)]
    matrix: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("conformance: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool, Box<dyn Error>> {
    if arguments.matrix {
        outln!("{}", matrix::text().trim_end());
        return Ok(true);
    }
    if arguments.list {
        for case in suite::chosen(&arguments.filter) {
            let need = match case.need {
                Need::Always => "always",
                Need::If(capability) => capability,
            };
            outln!(
                "{:<38} {:<12} [{need}] {} ({})",
                case.name,
                case.plan.join(" "),
                case.title,
                case.section
            );
        }
        return Ok(true);
    }
    if let Some(socket) = &arguments.socket {
        let target = TestTarget {
            socket: socket.clone(),
            second: arguments.second.clone(),
        };
        return all(arguments, &target, &socket.display().to_string());
    }
    let Some(program) = &arguments.vnvme else {
        return Err("give --socket, or --vnvme".into());
    };
    let mut served = served::start(program)?;
    let mut good = true;
    for (target, name) in [
        (served.alone(), "a disk of its own"),
        (served.pool(), "a disk whose host makes namespaces"),
        (served.placed(), "a disk with placement handles"),
        (served.protected(), "a disk with metadata"),
        (served.zoned(), "a disk with zones"),
        (served.shared(), "two disks of one subsystem"),
    ] {
        good &= all(arguments, &target, name)?;
    }
    if !served.is_running() {
        return Err("the program has ended under the cases".into());
    }
    Ok(good)
}

fn all(arguments: &Arguments, target: &TestTarget, name: &str) -> Result<bool, Box<dyn Error>> {
    let mut reports: Vec<CaseReport> = Vec::new();
    for case in suite::chosen(&arguments.filter) {
        let report = suite::run(case, target);
        if !arguments.json {
            outln!("{}", report.line());
        }
        reports.push(report);
    }
    if reports.is_empty() {
        return Err("no case has that text".into());
    }
    let [passed, failed, other] = suite::count(&reports);
    if arguments.json {
        let cases: Vec<_> = reports.iter().map(CaseReport::json).collect();
        let told = json!({
            "target": name, "passed": passed, "failed": failed, "not applicable": other,
            "cases": cases,
        });
        outln!("{told}");
    } else {
        outln!("{name}: {passed} passed, {failed} failed, {other} not applicable\n");
    }
    Ok(failed == 0)
}
