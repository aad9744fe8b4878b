//! Published packages: the fields that a registry shows, dependencies on published packages only,
//! and an example that is built from the packages alone.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::layers::packages;

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn published(packages: &[Value]) -> impl Iterator<Item = &Value> {
    packages
        .iter()
        .filter(|package| package["publish"].is_null())
}

#[test]
fn published_package_has_fields_that_registry_shows() {
    let packages = packages();
    let mut count = 0;
    for package in published(&packages) {
        let name = text(package, "name");
        assert!(name.starts_with("vnvme-"), "{name}: a name of this project");
        assert_eq!(text(package, "license"), "MIT OR Apache-2.0", "{name}");
        let long = text(package, "description").len();
        assert!((30..150).contains(&long), "{name}: description of {long}");
        for (key, most) in [("keywords", 5), ("categories", 5)] {
            let words = package[key].as_array().expect("a list");
            assert!((1..=most).contains(&words.len()), "{name}: {key}");
            // Rules of crates.io for keywords.
            let word = |word: &Value| word.as_str().is_some_and(|word| word.len() <= 30);
            assert!(words.iter().all(word), "{name}: {key}");
        }
        let folder = Path::new(text(package, "manifest_path")).parent().unwrap();
        for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            let text = std::fs::read_to_string(folder.join(file));
            assert!(text.is_ok_and(|text| text.len() > 100), "{name}: {file}");
        }
        assert!(package["metadata"]["docs"]["rs"].is_object(), "{name}");
        count += 1;
    }
    assert!(count >= 19, "{count} packages");
}

/// All packages are released together: a dependency names the very version, so that parts without a
/// promise of stability may change in any release.
#[test]
fn published_package_needs_published_packages_of_its_own_version() {
    let packages = packages();
    let names: BTreeSet<&str> = published(&packages).map(|p| text(p, "name")).collect();
    let ours: BTreeSet<&str> = packages.iter().map(|p| text(p, "name")).collect();
    for package in published(&packages) {
        let name = text(package, "name");
        let needs = package["dependencies"].as_array().unwrap().iter();
        for need in needs.filter(|need| ours.contains(text(need, "name"))) {
            let (needed, version) = (text(need, "name"), text(need, "req"));
            // Cargo removes development dependencies without a version from the package.
            if need["kind"] == "dev" && version == "*" {
                continue;
            }
            assert!(names.contains(needed), "{name} needs {needed}");
            let exact = format!("={}", text(package, "version"));
            assert_eq!(version, exact, "{name} needs {needed}");
        }
    }
}

/// Program that shows the crates in use; its package is made as an outside project's would be.
const EXAMPLE: &str = "vmm-device";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn cargo(folder: &Path, target: &Path, arguments: &[&str]) -> Output {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // Variables of the `cargo test` that runs this test would mean its package.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("CARGO_") && !["CARGO_HOME", "CARGO_NET_OFFLINE"].contains(&&*name) {
            command.env_remove(name);
        }
    }
    let command = command.args(arguments).current_dir(folder);
    command
        .env("CARGO_TARGET_DIR", target)
        .output()
        .expect("cargo is there")
}

fn succeeded(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Makes the packages in `target`, unpacks them in `into`, and returns the folder of each.
fn unpack(target: &Path, into: &Path) -> Vec<PathBuf> {
    let packages = packages();
    let mut names: Vec<&str> = published(&packages).map(|p| text(p, "name")).collect();
    names.push(EXAMPLE);
    let mut arguments = vec!["package", "--no-verify", "--allow-dirty", "--offline"];
    arguments.extend(names.iter().flat_map(|name| ["--package", name]));
    succeeded(&cargo(&root(), target, &arguments));
    let version = text(&packages[0], "version");
    let folders = names.iter().map(|name| {
        let package = target.join(format!("package/{name}-{version}.crate"));
        let mut tar = Command::new("tar");
        let tar = tar.arg("xzf").arg(&package).arg("-C").arg(into);
        assert!(tar.status().unwrap().success(), "{}", package.display());
        into.join(format!("{name}-{version}"))
    });
    folders.collect()
}

#[test]
#[ignore = "builds the library and an example from packages, for minutes"]
fn packages_alone_build_device_that_writes_and_reads_disk() {
    let temporary = tempfile::tempdir().unwrap();
    let place = temporary.path().canonicalize().unwrap();
    let target = place.join("target");
    let mut folders = unpack(&target, &place);
    let example = folders.pop().unwrap();
    // The registry's place is taken by what was packaged. Nothing else of the manifest changes.
    let mut config = String::from("[patch.crates-io]\n");
    for folder in &folders {
        let file = folder.file_name().unwrap().to_string_lossy();
        let name = file.rsplit_once('-').unwrap().0;
        config += &format!("{name} = {{ path = {folder:?} }}\n");
    }
    std::fs::create_dir(example.join(".cargo")).unwrap();
    std::fs::write(example.join(".cargo/config.toml"), config).unwrap();

    let metadata = cargo(
        &example,
        &target,
        &["metadata", "--format-version", "1", "--offline"],
    );
    let metadata: Value = serde_json::from_str(&succeeded(&metadata)).unwrap();
    let used = metadata["packages"].as_array().unwrap().iter();
    let used = used.filter(|package| text(package, "name").starts_with("vnvme-"));
    let mut count = 0;
    for package in used {
        let path = text(package, "manifest_path");
        assert!(Path::new(path).starts_with(&place), "{path}");
        count += 1;
    }
    assert_eq!(count, folders.len(), "the example uses all packages");

    let disk = place.join("disk.raw");
    std::fs::File::create(&disk)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let run = cargo(
        &example,
        &target,
        &["run", "--offline", "--", disk.to_str().unwrap()],
    );
    assert_eq!(succeeded(&run), "wrote and read 4096 bytes at block 8\n");
    let stored = std::fs::read(&disk).unwrap();
    let expected: Vec<u8> = (0..=255).cycle().take(4096).collect();
    assert_eq!(stored[8 * 512..][..4096], expected);
    succeeded(&cargo(&example, &target, &["test", "--offline"]));
}

#[test]
#[ignore = "asks the registry"]
fn registry_would_accept_every_package() {
    let target = tempfile::tempdir().unwrap();
    let arguments = [
        "publish",
        "--workspace",
        "--dry-run",
        "--no-verify",
        "--allow-dirty",
    ];
    let output = cargo(&root(), target.path(), &arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    // Only a registry that does not answer is no defect of the packages.
    if !output.status.success() && error.contains("crates-io-index") && error.contains("download") {
        return testkit::skip("testkit::published", "crates.io cannot be reached");
    }
    succeeded(&output);
    let packages = packages();
    for package in published(&packages) {
        let uploading = format!("Uploading {} v", text(package, "name"));
        assert!(error.contains(&uploading), "{uploading}");
    }
}
