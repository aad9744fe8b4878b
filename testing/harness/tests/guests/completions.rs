//! The files of completions, read by the shells that they are for.

use std::path::Path;

use anyhow::{Result, ensure};
use harness::cache::Cache;
use harness::progress::skip;
use harness::tree::{PackageSet, Tree};

/// Shell and file.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "vnvme.bash"),
    ("zsh", "_vnvme"),
    ("fish", "vnvme.fish"),
];

const SHELLS: PackageSet = PackageSet {
    name: "shells",
    suites: &["trixie"],
    release: None,
    packages: &["bash", "zsh", "fish"],
    without: &["fish-common", "zsh-common", "bsdextrautils", "man-db"],
};

/// A shell that only reads the file (`-n`) says what is wrong with it, as it does with a wrong one.
#[test]
fn shells_accept_completion_scripts() -> Result<()> {
    let found = Cache::open().and_then(|cache| Tree::fetch(&cache, &SHELLS, |_| Ok(())));
    let tree = match found {
        Ok(tree) => tree,
        Err(error) => {
            skip("completions", format!("no shells: {error:#}"));
            return Ok(());
        }
    };
    let wrong = tempfile::NamedTempFile::new()?;
    std::fs::write(wrong.path(), "case x in\n")?;
    let completions = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/completions");
    for (shell, file) in COMPLETIONS {
        let file = completions.join(file);
        let out = tree.tool(shell)?.arg("-n").arg(&file).output()?;
        let told = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "{shell} {}: {told}", file.display());
        let out = tree.tool(shell)?.arg("-n").arg(wrong.path()).output()?;
        ensure!(!out.status.success(), "{shell} takes what is no script");
    }
    Ok(())
}
