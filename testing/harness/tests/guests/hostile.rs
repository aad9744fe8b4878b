//! Every attack of the hostile-client suite, briefly, with bounds that any machine keeps:
//! `harness::hostile` has them, and `cargo run --release -p harness --bin hostile -- --long` says
//! more.

use std::process::Command;

use anyhow::{Context, Result, ensure};

#[test]
fn hostile_client_harms_only_itself() -> Result<()> {
    let program = harness::daemon::program()?;
    let suite = Command::new(env!("CARGO_BIN_EXE_hostile"))
        .arg("--vnvme")
        .arg(program)
        .args(["--at-once", "2"])
        .output()
        .context("the suite")?;
    let text = String::from_utf8_lossy(&suite.stdout);
    println!("{text}");
    let errors = String::from_utf8_lossy(&suite.stderr);
    ensure!(suite.status.success(), "{text}\n{errors}");
    Ok(())
}
