//! Licence texts of the crates that the program is made of.

use crate::crates::{Crate, Id, Program};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

const INTRODUCTION: &str = "\
The program vnvme contains the crates listed below, and the Rust standard library. Each crate is
followed by its licence, and the licence texts of its package come after the list. A text that
several crates have is printed once.
";

/// Licence files of a crate's folder, by their names, with lines that end as everywhere here.
fn texts(folder: &Path) -> Result<Vec<String>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("{}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.to_uppercase();
        let starts = [
            "LICENSE",
            "LICENCE",
            "COPYING",
            "COPYRIGHT",
            "NOTICE",
            "UNLICENSE",
        ];
        if starts.iter().any(|start| name.starts_with(start)) && path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    paths
        .iter()
        .map(|path| {
            let text = fs::read(path).with_context(|| format!("{}", path.display()))?;
            let text = String::from_utf8_lossy(&text).replace("\r\n", "\n");
            Ok(text.trim_end().trim_start_matches('\n').to_owned())
        })
        .collect()
}

/// Standard texts for a package without licence files, from those of this project.
fn standard(id: &Id, described: &Crate) -> Result<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let license = described.license.as_str();
    let file = ["Apache-2.0", "MIT"]
        .into_iter()
        .zip(["LICENSE-APACHE", "LICENSE-MIT"])
        .find(|(name, _)| license.contains(name))
        .map(|(_, file)| file);
    let file = file.with_context(|| format!("{} {}: no text of {license}", id.0, id.1))?;
    let text = fs::read_to_string(root.join(file))?;
    // The notice of copyright is this project's.
    let lines = text.trim().lines();
    let lines = lines.filter(|line| !line.starts_with("Copyright"));
    let mut text = lines.collect::<Vec<_>>().join("\n").trim().to_owned();
    if !described.authors.is_empty() {
        text = format!("Copyright {}\n\n{text}", described.authors.join(", "));
    }
    Ok(text)
}

/// Writes the list of crates and all texts.
pub fn write(program: &Program) -> Result<String> {
    let mut output = String::from(INTRODUCTION);
    writeln!(output, "\nrust-std {}: MIT OR Apache-2.0", program.rust)?;
    let mut users: BTreeMap<String, Vec<String>> = BTreeMap::new();
    // The compiler's package has no text of its own where everybody has it installed.
    let apache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../LICENSE-APACHE");
    let apache = fs::read_to_string(apache)?.trim().to_owned();
    users.entry(apache).or_default().push("rust-std".to_owned());
    for (id, described) in &program.crates {
        // The licences of this project are in files of their own.
        if described.checksum.is_none() {
            continue;
        }
        let name = format!("{} {}", id.0, id.1);
        writeln!(output, "{name}: {}", described.license)?;
        let mut found = texts(&described.folder)?;
        if found.is_empty() {
            found.push(standard(id, described)?);
        }
        for text in found {
            ensure!(!text.is_empty(), "{name}: an empty licence file");
            users.entry(text).or_default().push(name.clone());
        }
    }
    let mut texts: Vec<(Vec<String>, String)> = users
        .into_iter()
        .map(|(text, users)| (users, text))
        .collect();
    texts.sort();
    for (users, text) in texts {
        write!(
            output,
            "\n{}\n{}\n\n{text}\n",
            "=".repeat(80),
            users.join(", ")
        )?;
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crate_has_a_text() {
        let program = crate::crates::read("x86_64-unknown-linux-gnu").unwrap();
        let output = write(&program).unwrap();
        for ((name, version), described) in &program.crates {
            let count = output.matches(&format!("{name} {version}")).count();
            if described.checksum.is_some() {
                assert!(count >= 2, "{name}: listed {count} times");
            }
        }
    }

    #[test]
    fn package_without_files_gets_the_text_of_its_expression() {
        let described = |license: &str| Crate {
            license: license.to_owned(),
            folder: tempfile::tempdir().unwrap().keep(),
            authors: vec!["A. Author".to_owned()],
            repository: None,
            checksum: None,
            uses: Default::default(),
        };
        let id = ("some".to_owned(), "1.0.0".to_owned());
        let text = standard(&id, &described("MIT")).unwrap();
        assert!(text.contains("Copyright A. Author"), "{text}");
        assert!(text.contains("without restriction"), "{text}");
        assert!(!text.contains("vnvme"), "{text}");
        assert!(standard(&id, &described("Zlib")).is_err());
    }
}
