//! Attacks a running daemon by clients of every hostile kind, and reports the effects on a good
//! neighbour: `cargo run --release -p harness --bin hostile -- --long`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Result;

fn main() -> Result<ExitCode> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    harness::hostile::main(&words)
}
