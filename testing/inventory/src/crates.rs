//! Crates that are linked into the program, as cargo resolves them.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Package that has the program.
const PROGRAM: &str = "vnvme";

/// Name and version: unique within the program.
pub type Id = (String, String);

/// A crate of the program.
#[derive(Debug)]
pub struct Crate {
    /// SPDX expression.
    pub license: String,
    /// Folder of the manifest.
    pub folder: PathBuf,
    /// Names in the manifest; often empty.
    pub authors: Vec<String>,
    /// Address of the sources.
    pub repository: Option<String>,
    /// SHA-256 of the `.crate` file, of Cargo.lock. None for crates of this workspace.
    pub checksum: Option<String>,
    /// Crates of the program that this one uses.
    pub uses: BTreeSet<Id>,
}

/// The program for one target.
#[derive(Debug)]
pub struct Program {
    /// The package [`PROGRAM`].
    pub id: Id,
    /// All crates, the program's own included.
    pub crates: BTreeMap<Id, Crate>,
    /// Version of the compiler, which is that of the standard library.
    pub rust: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(root())
        .output()
        .with_context(|| format!("running {program}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program}: {error}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Asks cargo for the crates of the program.
pub fn read(target: &str) -> Result<Program> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    // The features of this program alone: the whole workspace may have others.
    let tree = output(
        &cargo,
        &[
            "tree",
            "--locked",
            "--package",
            PROGRAM,
            "--target",
            target,
            "--edges",
            "normal,no-proc-macro",
            "--prefix",
            "none",
            "--format",
            "{p}",
        ],
    )?;
    let linked = linked(&tree)?;
    let metadata = output(
        &cargo,
        &[
            "metadata",
            "--locked",
            "--format-version",
            "1",
            "--filter-platform",
            target,
        ],
    )?;
    let metadata: Value = serde_json::from_str(&metadata)?;
    let lock: toml::Table = std::fs::read_to_string(root().join("Cargo.lock"))?.parse()?;
    let crates = describe(&linked, &metadata, &lock)?;
    let id = crates.keys().find(|(name, _)| name == PROGRAM).cloned();
    let rustc = output("rustc", &["--version"])?;
    let rust = rustc.split_whitespace().nth(1);
    Ok(Program {
        id: id.context("cargo tree has no program")?,
        crates,
        rust: rust.context("rustc has no version")?.to_owned(),
    })
}

/// Reads lines `name v1.2.3 (...)` of `cargo tree`.
fn linked(tree: &str) -> Result<BTreeSet<Id>> {
    let lines = tree.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            let mut words = line.split_whitespace();
            let name = words.next();
            let version = words.next().and_then(|version| version.strip_prefix('v'));
            let id = name.zip(version);
            let (name, version) = id.with_context(|| format!("cargo tree: {line}"))?;
            Ok((name.to_owned(), version.to_owned()))
        })
        .collect()
}

fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key).and_then(Value::as_str).map(str::to_owned)
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    let list = value.get(key).and_then(Value::as_array);
    list.map(Vec::as_slice).unwrap_or_default()
}

fn id(package: &Value) -> Option<Id> {
    Some((text(package, "name")?, text(package, "version")?))
}

/// Joins the list of crates with their manifests, their dependencies and their checksums.
fn describe(
    linked: &BTreeSet<Id>,
    metadata: &Value,
    lock: &toml::Table,
) -> Result<BTreeMap<Id, Crate>> {
    let locked = lock.get("package").and_then(toml::Value::as_array);
    let checksums: BTreeMap<(&str, &str), &str> = locked
        .into_iter()
        .flatten()
        .filter_map(|package| {
            let field = |key| package.get(key).and_then(toml::Value::as_str);
            Some(((field("name")?, field("version")?), field("checksum")?))
        })
        .collect();
    let packages = list(metadata, "packages");
    let by_key: BTreeMap<String, Id> = packages
        .iter()
        .filter_map(|package| Some((text(package, "id")?, id(package)?)))
        .collect();
    let nodes = metadata.get("resolve").map(|value| list(value, "nodes"));
    let mut uses: BTreeMap<Id, BTreeSet<Id>> = BTreeMap::new();
    for node in nodes.unwrap_or_default() {
        let Some(user) = text(node, "id").and_then(|key| by_key.get(&key)) else {
            continue;
        };
        let used = list(node, "deps").iter().filter(|used| {
            let mut kinds = list(used, "dep_kinds").iter();
            // null: neither `dev` nor `build`.
            kinds.any(|kind| kind.get("kind").is_some_and(Value::is_null))
        });
        let used = used.filter_map(|used| by_key.get(&text(used, "pkg")?));
        let used = used.filter(|id| linked.contains(*id)).cloned();
        uses.entry(user.clone()).or_default().extend(used);
    }
    let mut crates = BTreeMap::new();
    for package in packages {
        let Some(id) = id(package).filter(|id| linked.contains(id)) else {
            continue;
        };
        let name = format!("{} {}", id.0, id.1);
        let manifest = text(package, "manifest_path").map(PathBuf::from);
        let folder = manifest.and_then(|path| path.parent().map(Path::to_owned));
        let checksum = checksums.get(&(&*id.0, &*id.1));
        let described = Crate {
            license: text(package, "license").with_context(|| format!("{name}: no licence"))?,
            folder: folder.with_context(|| format!("{name}: no folder"))?,
            authors: list(package, "authors")
                .iter()
                .filter_map(|author| author.as_str().map(str::to_owned))
                .collect(),
            repository: text(package, "repository"),
            checksum: checksum.map(|&checksum| checksum.to_owned()),
            uses: uses.remove(&id).unwrap_or_default(),
        };
        crates.insert(id, described);
    }
    for id in linked {
        ensure!(crates.contains_key(id), "{} {}: no metadata", id.0, id.1);
    }
    Ok(crates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_has_its_linked_crates_only() {
        let program = read("aarch64-unknown-linux-gnu").unwrap();
        let find = |name: &str| program.crates.iter().find(|((found, _), _)| found == name);
        assert_eq!(program.id.0, "vnvme");
        for linked in ["vnvme", "daemon", "io-uring", "rustix"] {
            assert!(find(linked).is_some(), "{linked}");
        }
        // Tests, procedural macros, and crates of other systems.
        for left_out in [
            "testkit",
            "harness",
            "proptest",
            "thiserror-impl",
            "windows-sys",
        ] {
            assert!(find(left_out).is_none(), "{left_out}");
        }
        let (_, rustix) = find("rustix").unwrap();
        assert_eq!(rustix.checksum.as_deref().map(str::len), Some(64));
        let (_, daemon) = find("daemon").unwrap();
        assert_eq!(daemon.checksum, None);
        assert!(daemon.uses.iter().any(|(name, _)| name == "vnvme-worker"));
    }
}
