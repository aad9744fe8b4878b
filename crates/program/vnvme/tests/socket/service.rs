//! The units for systemd: that systemd understands them, and how far they wall the process off.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Maximum exposure that `systemd-analyze security` may report, in tenths of its points of 10.
const EXPOSURE: &str = "15";

/// The daemon's, and that of a process for each VM.
const UNITS: [&str; 2] = ["vnvme.service", "vnvme@.service"];

fn unit(name: &str) -> PathBuf {
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../packaging/systemd");
    units.join(name)
}

/// `None` where systemd is not installed.
fn analyze(args: &[&str], file: &Path) -> Option<Output> {
    let output = Command::new("systemd-analyze")
        .args(args)
        .arg(file)
        .output();
    match output {
        Ok(output) => Some(output),
        Err(error) => {
            testkit::skip(
                "vnvme: unit for systemd",
                format!("systemd-analyze: {error}"),
            );
            None
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn service_units_are_understood_by_systemd() {
    UNITS.iter().for_each(|name| is_understood(name));
}

fn is_understood(name: &str) {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path().join(name);
    let unit = fs::read_to_string(unit(name)).unwrap();
    let installed = "=/usr/bin/vnvme ";
    assert!(unit.contains("ExecStart=/usr/bin/vnvme "));
    // Neither the program nor its manual are installed.
    let program = format!("={} ", env!("CARGO_BIN_EXE_vnvme"));
    let lines = unit
        .lines()
        .filter(|line| !line.starts_with("Documentation="));
    let lines: Vec<&str> = lines.collect();
    fs::write(&here, lines.join("\n").replace(installed, &program)).unwrap();
    let Some(output) = analyze(&["verify"], &here) else {
        return;
    };
    // Keys that it does not know are errors only in words.
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    assert!(output.status.success());
}

#[test]
fn service_unit_exposure_stays_below_threshold() {
    let threshold = format!("--threshold={EXPOSURE}");
    let args = ["security", "--offline=yes", "--no-pager", &threshold];
    for name in UNITS {
        if let Some(output) = analyze(&args, &unit(name)) {
            let found = text(&output.stdout);
            assert!(output.status.success(), "{found}{}", text(&output.stderr));
            assert!(found.contains("Overall exposure level"), "{found}");
        }
    }
}
