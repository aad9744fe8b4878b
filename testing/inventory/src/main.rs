//! Inventory of the program: a bill of materials (CycloneDX 1.5, JSON) and the licence texts of all
//! crates that are linked into it for one target.
//!
//! ```text
//! inventory TARGET TIMESTAMP DIRECTORY
//! ```
//!
//! writes `sbom.cdx.json` and `LICENSES-dependencies.txt` to DIRECTORY. The output depends on
//! Cargo.lock, the target, the compiler's version and TIMESTAMP (RFC 3339) only. Build scripts and
//! procedural macros are left out: they are not part of the program.

mod bill;
mod crates;
mod licences;

use anyhow::{Context, Result, bail};
use std::path::Path;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [target, timestamp, directory] = arguments.as_slice() else {
        bail!("usage: inventory TARGET TIMESTAMP DIRECTORY");
    };
    let directory = Path::new(directory);
    let program = crates::read(target)?;
    let files = [
        ("sbom.cdx.json", bill::write(&program, timestamp)?),
        ("LICENSES-dependencies.txt", licences::write(&program)?),
    ];
    for (name, text) in files {
        let path = directory.join(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}
