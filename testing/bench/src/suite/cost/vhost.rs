//! Cases of vhost-user-blk exports, counted in the program `vnvme-export`: callgrind cannot follow
//! `vnvme serve`, which starts itself again as the receiver of descriptors.
//!
//! The client makes 32 requests available at once and waits until all have ended, so that the
//! export always fetches them together. All instructions of the worker's rounds count.

use super::{LONG_RUN_IOS, MEMORY, NULL, SHORT_RUN_IOS, counted};
use anyhow::{Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Case of an export.
pub struct Export {
    pub case: &'static str,
    volume: &'static str,
    direction: &'static str,
}

pub const CASES: [Export; 3] = [
    Export {
        case: "vhost-user-blk null read",
        volume: NULL,
        direction: "read",
    },
    Export {
        case: "vhost-user-blk null write",
        volume: NULL,
        direction: "write",
    },
    Export {
        case: "vhost-user-blk memory read",
        volume: MEMORY,
        direction: "read",
    },
];

/// Function in which the program runs a round of the worker.
const STEP: &str = "vnvme_export::step";
/// Name of the program beside `vnvme`.
const PROGRAM: &str = "vnvme-export";

/// Returns the path of the program that serves an export to itself.
pub fn program(vnvme: &Path) -> PathBuf {
    vnvme.with_file_name(PROGRAM)
}

/// Returns the number of instructions for a request.
pub fn instructions(program: &Path, export: &Export) -> Result<f64> {
    let collected = |ios: u64| {
        let mut command = Command::new(program);
        command.args([export.volume, export.direction, &ios.to_string()]);
        counted(Some(STEP), &command)
    };
    let (few, many) = (collected(SHORT_RUN_IOS)?, collected(LONG_RUN_IOS)?);
    ensure!(
        many > few,
        "callgrind counted {few} instructions, then {many}: is {STEP} still a function of its own?"
    );
    Ok((many - few) as f64 / (LONG_RUN_IOS - SHORT_RUN_IOS) as f64)
}
