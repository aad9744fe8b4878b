//! The documents for users and developers have one spelling for each command, unit and kind.

use std::path::{Path, PathBuf};

/// Spellings that no document has, and the one to use instead.
const SPELLINGS: &[(&str, &str)] = &[
    (
        "vnvme-bench --",
        "vnvme bench --suite NAME: the program is named, and the command is typed",
    ),
    ("vnvme add nvme ", "vnvme add controller"),
    ("kind `nvme`", "kind `controller`"),
    ("kind = \"nvme\"", "the table [[controller]]"),
    ("\"kind\":\"nvme\"", "\"kind\":\"controller\""),
];

/// Units of powers of ten, which the program prints nowhere, and those to use instead.
const UNITS: &[(&str, &str)] = &[
    ("kB", "KiB"),
    ("KB", "KiB"),
    ("MB", "MiB"),
    ("GB", "GiB"),
    ("TB", "TiB"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns all Markdown files at the root and below `docs`.
fn documents() -> Vec<PathBuf> {
    let mut folders = vec![root().join("docs")];
    let mut found = Vec::new();
    let markdown = |path: &Path| path.extension().is_some_and(|end| end == "md");
    let list = |folder: &Path| {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().path())
    };
    found.extend(list(&root()).filter(|path| markdown(path)));
    while let Some(folder) = folders.pop() {
        for path in list(&folder) {
            if path.is_dir() {
                folders.push(path);
            } else if markdown(&path) {
                found.push(path);
            }
        }
    }
    found
}

/// Returns the reasons why a line has a spelling of its own.
fn faults(line: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for (wrong, right) in SPELLINGS {
        if line.contains(wrong) {
            faults.push(format!("\"{wrong}\": write {right}"));
        }
    }
    let words = line.split(|c: char| !(c.is_alphanumeric() || ".,".contains(c)));
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    for (at, word) in words.iter().enumerate() {
        let before = at.checked_sub(1).and_then(|before| words.get(before));
        let before = before.copied().unwrap_or_default();
        let digits = word.trim_end_matches(|c: char| c.is_alphabetic() || ".,".contains(c));
        let (number, unit) = if digits.is_empty() {
            (before, *word)
        } else {
            word.split_at(digits.len())
        };
        let unit = unit.trim_end_matches(['.', ',']);
        let number = number.trim_end_matches(['.', ',']).replace(',', "");
        if !number.starts_with(|c: char| c.is_ascii_digit()) {
            continue;
        }
        if let Some((wrong, right)) = UNITS.iter().find(|(wrong, _)| *wrong == unit) {
            faults.push(format!("{number} {wrong}: write {right}"));
        }
        let is_whole_milliseconds = number.len() > 3 && number.ends_with("000");
        if unit == "us" && is_whole_milliseconds && number.bytes().all(|c| c.is_ascii_digit()) {
            faults.push(format!("{number} us: write it in ms"));
        }
        if ["MiB", "GiB", "TiB"].contains(&unit) && number == "0" {
            faults.push(format!("0 {unit}: write the size in a smaller unit"));
        }
    }
    faults
}

#[test]
fn documents_have_one_spelling_of_commands_units_and_kinds() {
    let documents = documents();
    assert!(documents.len() > 30, "{}", documents.len());
    let mut wrong = Vec::new();
    for path in documents {
        let text = std::fs::read_to_string(&path).unwrap();
        for (number, line) in text.lines().enumerate() {
            let found = faults(line).into_iter();
            wrong.extend(found.map(|why| format!("{}:{}: {why}", path.display(), number + 1)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_wrong_spelling_is_found() {
    for (line, count) in [
        (
            "`vnvme-bench` starts servers; `vnvme bench --suite scale` runs it",
            0,
        ),
        ("run `vnvme-bench --suite scale`", 1),
        ("vnvme add nvme socket=a mem://1M", 1),
        ("its kind `nvme`, or 16GB of 2.5 MB", 3),
        ("16 GiB, 2.5 MiB and 512 bytes: USB, CMB 3, 3 CMB", 0),
        ("a burst of 50000 us, or 1,000 us, not 1,474 us", 2),
        ("0 MB, 0 MiB", 2),
        ("10 MiB, 0.5 GiB, 0.000 s", 0),
    ] {
        assert_eq!(faults(line).len(), count, "{line}: {:?}", faults(line));
    }
}
