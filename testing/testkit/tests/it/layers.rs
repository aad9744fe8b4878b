//! Folders of crates are layers: a crate depends on its own folder and on those below it only.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folders from the lowest to the highest.
const LAYERS: &[&str] = &[
    "crates/base",
    "crates/data",
    "crates/nvme",
    "crates/protocols",
    "crates/volumes",
    "crates/front-ends",
    "crates/s390x",
    "crates/program",
    "examples",
    "testing",
];

/// Dependencies that point upwards.
const EXCEPTIONS: &[(&str, &str)] = &[
    // The load generator is `vnvme bench`.
    ("vnvme", "load"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The workspace's own packages.
pub fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["metadata", "--format-version", "1", "--locked", "--no-deps"]);
    let output = command
        .current_dir(root())
        .output()
        .expect("cargo is there");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo metadata: {text}");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    metadata["packages"].as_array().expect("packages").clone()
}

/// Index of each crate's folder in [`LAYERS`].
fn layers(packages: &[Value]) -> BTreeMap<&str, usize> {
    let root = root().canonicalize().unwrap();
    let layer = |package: &Value| {
        let manifest = Path::new(package["manifest_path"].as_str()?);
        let folder = manifest.parent()?.parent()?.strip_prefix(&root).ok()?;
        LAYERS.iter().position(|layer| Path::new(layer) == folder)
    };
    let name = |package: &Value| format!("{} is in no folder of a layer", package["name"]);
    let layers = packages.iter().map(|package| {
        let layer = layer(package).unwrap_or_else(|| panic!("{}", name(package)));
        (package["name"].as_str().unwrap(), layer)
    });
    layers.collect()
}

#[test]
fn crate_depends_on_its_own_and_lower_layers_only() {
    let packages = packages();
    let layers = layers(&packages);
    let mut upwards = Vec::new();
    for package in &packages {
        let name = package["name"].as_str().unwrap();
        let needs = package["dependencies"].as_array().unwrap().iter();
        // Tests may use anything.
        for need in needs.filter(|need| need["kind"] != "dev") {
            let need = need["name"].as_str().unwrap();
            if layers.get(need).is_some_and(|layer| *layer > layers[name]) {
                upwards.push((name, need));
            }
        }
    }
    upwards.sort_unstable();
    assert_eq!(upwards, EXCEPTIONS);
}

#[test]
fn each_folder_has_page_that_names_its_purpose() {
    for layer in LAYERS {
        let page = std::fs::read_to_string(root().join(layer).join("README.md")).unwrap();
        let lines = page.lines().filter(|line| !line.is_empty()).count();
        assert!((3..=8).contains(&lines), "{layer}: {lines} lines");
    }
}
