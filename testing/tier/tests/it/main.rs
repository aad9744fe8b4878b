//! The program `tier` over real tests: a crate of a few lines, whose tests fail as they are told.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod mutants;
mod repeats;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// A workspace of one crate without dependencies, in a repository of git.
struct Workspace(TempDir);

impl Workspace {
    fn new(library: &str) -> Self {
        let workspace = Self(tempfile::tempdir().unwrap());
        workspace.write(
            "Cargo.toml",
            "[package]\nname = \"tiny\"\nedition = \"2024\"\n",
        );
        workspace.write(".gitignore", "target\n");
        workspace.write("src/lib.rs", library);
        workspace
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn git(&self, arguments: &[&str]) {
        let author = ["-c", "user.name=tier", "-c", "user.email=tier@localhost"];
        let mut command = Command::new("git");
        command
            .args(author)
            .args(arguments)
            .current_dir(self.path());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// Runs `tier` with `cargo test` as the runner.
    fn tier(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tier"));
        command
            .args(arguments)
            .current_dir(self.path())
            .env("VNVME_RUNNER", "cargo")
            .env("CARGO_NET_OFFLINE", "true")
            .env_remove("VNVME_TIER")
            .env_remove("CARGO_TARGET_DIR");
        command.output().unwrap()
    }
}

/// What a program has printed, for a test that fails.
fn printed(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}
