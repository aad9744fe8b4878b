//! Each row of the tables of docs/survival.md that say what happens names the test that shows it,
//! in a comment at the end of the row (`<!-- module::function -->`).

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Calls `each` with every Rust file below a directory.
fn sources(directory: &Path, each: &mut impl FnMut(&Path)) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, each);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            each(&path);
        }
    }
}

/// Returns the rows of tables whose first column says what happens.
fn rows(page: &str) -> Vec<&str> {
    let mut is_within = false;
    let rows = page.lines().filter(|line| {
        let is_head = line.starts_with("| what happens |");
        is_within = line.starts_with('|') && (is_head || is_within);
        is_within && !is_head && !line.starts_with("|---")
    });
    rows.collect()
}

/// Returns the test that a row names.
fn named(row: &str) -> Option<(&str, &str)> {
    let (_, comment) = row.strip_suffix(" --> |")?.rsplit_once("<!-- ")?;
    comment.split_once("::")
}

/// Returns whether code has a test of this name.
fn has_test(code: &str, name: &str) -> bool {
    let signature = format!("\nfn {name}()");
    code.match_indices(&signature)
        .any(|(at, _)| code[..at].ends_with("#[test]"))
}

#[test]
fn rows_of_survival_page_name_existing_tests() {
    let page = std::fs::read_to_string(root().join("docs/survival.md")).unwrap();
    let mut files = Vec::new();
    for directory in ["crates", "testing/harness/tests"] {
        sources(&root().join(directory), &mut |path| {
            files.push(path.to_owned())
        });
    }
    let is_there = |module: &str, name: &str| {
        let of_module = files
            .iter()
            .filter(|path| path.file_stem() == Some(module.as_ref()));
        let mut texts = of_module.map(|path| std::fs::read_to_string(path).unwrap());
        texts.any(|text| has_test(&text, name))
    };
    let rows = rows(&page);
    assert!(rows.len() > 40, "only {} rows were found", rows.len());
    let defects = rows.into_iter().filter_map(|row| match named(row) {
        None => Some(format!("no test is named: {row}")),
        Some((module, name)) if !is_there(module, name) => {
            Some(format!("there is no test {module}::{name}: {row}"))
        }
        Some(_) => None,
    });
    let defects: Vec<String> = defects.collect();
    assert!(defects.is_empty(), "{}", defects.join("\n"));
}
