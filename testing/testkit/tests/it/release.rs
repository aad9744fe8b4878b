//! What `make release` and `make book` need of the documents.

use std::path::Path;
use std::process::Command;

fn root() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn book_has_every_page() {
    let output = Command::new(root().join("packaging/book/build.sh"))
        .arg("summary")
        .output()
        .expect("the script runs");
    let missing = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{missing}");
    let summary = String::from_utf8_lossy(&output.stdout);
    assert!(!summary.contains("[]"), "a page without a title: {summary}");
}

#[test]
fn changelog_has_dated_section_of_version() {
    let version = env!("CARGO_PKG_VERSION");
    let text = std::fs::read_to_string(root().join("CHANGELOG.md")).expect("CHANGELOG.md");
    let heading = format!("## [{version}] - ");
    let date = text.lines().find_map(|line| line.strip_prefix(&heading));
    let date = date.unwrap_or_else(|| panic!("CHANGELOG.md has no {heading:?}"));
    let is_date = date.len() == 10 && date.split('-').all(|part| part.parse::<u16>().is_ok());
    assert!(is_date, "{date}");
}
