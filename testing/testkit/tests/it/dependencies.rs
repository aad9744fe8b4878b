//! What stands below this project: licences and sources that deny.toml allows, no crate that needs
//! a newer Rust than the workspace says, and a description of each of its own crates.
//!
//! cargo-deny (`make deny`) does the first two, too, and more; this is there without it.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All packages of Cargo.lock, this workspace's own among them: those have no source.
fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "metadata",
            "--format-version",
            "1",
            "--locked",
            "--all-features",
        ])
        .current_dir(root())
        .output()
        .expect("cargo is there");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo metadata: {text}");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages").clone();
    assert!(packages.len() > 100, "{} packages", packages.len());
    packages
}

fn text<'a>(package: &'a Value, key: &str) -> &'a str {
    package[key].as_str().unwrap_or_default()
}

fn strings(value: &toml::Value) -> BTreeSet<String> {
    let list = value.as_array().expect("a list");
    list.iter()
        .map(|item| item.as_str().expect("text").to_owned())
        .collect()
}

fn deny() -> toml::Table {
    let text = std::fs::read_to_string(root().join("deny.toml")).expect("deny.toml");
    text.parse().expect("TOML")
}

/// Whether an expression of the SPDX specification (annex D), or one of cargo's old form with `/`
/// for `OR`, is satisfied by allowed licences alone.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let verdict = either(&words, &mut at, allowed);
    verdict && at == words.len()
}

/// `A OR B`, which binds less than `AND`.
fn either(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut verdict = both(words, at, allowed);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        verdict |= both(words, at, allowed);
    }
    verdict
}

/// `A AND B`.
fn both(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut verdict = one(words, at, allowed);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        verdict &= one(words, at, allowed);
    }
    verdict
}

/// A licence, also `A WITH B`, or an expression in parentheses.
fn one(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let Some(word) = words.get(*at) else {
        return false;
    };
    *at += 1;
    if *word == "(" {
        let verdict = either(words, at, allowed);
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return verdict && closed;
    }
    let mut name = (*word).to_owned();
    if words.get(*at) == Some(&"WITH") {
        name = format!("{name} WITH {}", words.get(*at + 1).unwrap_or(&""));
        *at += 2;
    }
    allowed.contains(&name)
}

#[test]
fn spdx_expressions_are_parsed() {
    let allowed = BTreeSet::from(["MIT".to_owned(), "Unicode-3.0".to_owned()]);
    for good in [
        "MIT",
        "GPL-3.0 OR MIT",
        "Apache-2.0/MIT",
        "(MIT OR Apache-2.0) AND Unicode-3.0",
        "GPL-3.0 AND Zlib OR MIT",
        "Apache-2.0 WITH LLVM-exception OR MIT",
    ] {
        assert!(is_allowed(good, &allowed), "{good}");
    }
    for bad in [
        "",
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "MIT WITH GCC-exception-3.1",
        "(MIT OR Apache-2.0) AND Zlib",
        "(MIT",
        "MIT MIT",
    ] {
        assert!(!is_allowed(bad, &allowed), "{bad}");
    }
}

#[test]
fn every_licence_is_on_allowed_list() {
    let deny = deny();
    let allowed = strings(&deny["licenses"]["allow"]);
    let exceptions = deny["licenses"]["exceptions"].as_array().expect("a list");
    for package in packages() {
        let name = text(&package, "name");
        let mut allowed = allowed.clone();
        for exception in exceptions {
            if exception["crate"].as_str() == Some(name) {
                allowed.extend(strings(&exception["allow"]));
            }
        }
        let licence = text(&package, "license");
        assert!(
            is_allowed(licence, &allowed),
            "{name} has the licence {licence:?}, which deny.toml does not allow"
        );
    }
}

#[test]
fn every_package_comes_from_allowed_registry() {
    let allowed = strings(&deny()["sources"]["allow-registry"]);
    for package in packages() {
        let Some(source) = package["source"].as_str() else {
            continue;
        };
        let registry = source.strip_prefix("registry+");
        assert!(
            registry.is_some_and(|url| allowed.contains(url)),
            "{} comes from {source}",
            text(&package, "name")
        );
    }
}

/// Major, minor and patch of `1.90` or `1.90.0`.
fn version(text: &str) -> Option<[u32; 3]> {
    let mut parts = text.split('.').map(str::parse);
    let mut next = |default: Option<u32>| match parts.next() {
        Some(part) => part.ok(),
        None => default,
    };
    Some([next(None)?, next(None)?, next(Some(0))?])
}

#[test]
fn no_crate_needs_newer_rust_than_workspace() {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let manifest: toml::Table = manifest.parse().expect("TOML");
    let ours = manifest["workspace"]["package"]["rust-version"].as_str();
    let ours = ours.and_then(version).expect("a version");
    for package in packages() {
        let name = text(&package, "name");
        match package["rust_version"].as_str() {
            Some(needed) => {
                let needed = version(needed).expect("a version");
                assert!(needed <= ours, "{name} needs Rust {needed:?}");
            }
            None => assert!(package["source"].is_string(), "{name} has no rust-version"),
        }
    }
}

#[test]
fn every_crate_has_description() {
    let ours = packages();
    let ours = ours.iter().filter(|package| package["source"].is_null());
    let mut count = 0;
    for package in ours {
        let name = text(package, "name");
        let description = text(package, "description");
        assert!(description.len() > 20, "{name}: {description:?}");
        count += 1;
    }
    assert!(count >= 20, "{count} crates");
}
