//! The targets under libFuzzer. `FUZZ_TARGET` chooses one; without it their
//! names are printed. See run.sh.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]
#![no_main]

use std::sync::OnceLock;

use fuzz::{TARGETS, Target};
use libfuzzer_sys::fuzz_target;

static CHOSEN: OnceLock<Target> = OnceLock::new();

/// Chooses the target, or ends the process.
fn choose() {
    let Ok(wanted) = std::env::var("FUZZ_TARGET") else {
        for (name, _) in TARGETS {
            println!("{name}");
        }
        std::process::exit(0);
    };
    let Some((_, target)) = TARGETS.iter().find(|(name, _)| *name == wanted) else {
        eprintln!("FUZZ_TARGET={wanted}: no such target");
        std::process::exit(2);
    };
    CHOSEN.get_or_init(|| *target);
}

fuzz_target!(init: choose(), |data: &[u8]| {
    if let Some(target) = CHOSEN.get() {
        target(data);
    }
});
