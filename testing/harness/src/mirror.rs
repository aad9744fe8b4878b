//! Mirrors of Debian packages for this machine, and the keyring that verifies their signatures.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::apt::{Apt, capture};
use crate::cache::{self, Cache};
use crate::progress::say;

/// Debian's ordinary public mirror.
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";

/// Paths of Debian's archive keyring in distributions; the extension changed with trixie.
const KEYRINGS: [&str; 2] = [
    "usr/share/keyrings/debian-archive-keyring.pgp",
    "usr/share/keyrings/debian-archive-keyring.gpg",
];

/// Mirrors to try, best first: the one that the user names, the machine's own, Debian's public one.
pub fn mirrors() -> Vec<String> {
    if let Ok(mirror) = std::env::var("VNVME_DEBIAN_MIRROR") {
        return vec![mirror];
    }
    let mut mirrors: Vec<String> = machine_mirror().into_iter().collect();
    if !mirrors.iter().any(|m| m == DEFAULT_MIRROR) {
        mirrors.push(DEFAULT_MIRROR.to_string());
    }
    mirrors
}

/// The mirror that a Debian machine is configured to use, from apt itself, whatever file
/// and format it is written in.
fn machine_mirror() -> Option<String> {
    let release = fs::read_to_string("/etc/os-release").ok()?;
    let field = |name: &str| {
        release.lines().find_map(|line| {
            let value = line.strip_prefix(name)?.strip_prefix('=')?;
            Some(value.trim_matches('"').to_string())
        })
    };
    if field("ID")? != "debian" {
        return None;
    }
    let out = Command::new("apt-get")
        .args(["indextargets", "--format"])
        .arg("$(CREATED_BY) $(COMPONENT) $(RELEASE) $(REPO_URI)")
        .output()
        .ok()?;
    let targets = String::from_utf8_lossy(&out.stdout).into_owned();
    choose_mirror(&targets, &field("VERSION_CODENAME").unwrap_or_default())
}

/// The repository of the machine's own release, else the first that looks like Debian's archive.
fn choose_mirror(targets: &str, codename: &str) -> Option<String> {
    let mut likely = None;
    for line in targets.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let &["Packages", "main", release, uri] = words.as_slice() else {
            continue;
        };
        let uri = uri.trim_end_matches('/').to_string();
        if !codename.is_empty() && release == codename {
            return Some(uri);
        }
        if uri.ends_with("/debian") {
            likely.get_or_insert(uri);
        }
    }
    likely
}

/// A release of Debian with an index that older keyrings verify, and a keyring package that knows
/// the newer releases.
pub const OLDER: &str = "bullseye";

/// A keyring with newer keys than the machine's, verified with the machine's.
pub fn newer_keyring(cache: &Cache) -> Result<PathBuf> {
    say("apt: the machine's Debian keyring is too old for this suite; fetching a newer one");
    let apt = Apt::open(cache, &[OLDER])?;
    let packages = apt.closure(None, &["debian-archive-keyring"])?;
    let into = cache.artefact(
        "keyring",
        &cache::key(&[&format!("{packages:?}")]),
        |part| apt.unpack(&packages, part),
    )?;
    find_keyring(&into).context("the package debian-archive-keyring holds no keyring")
}

fn find_keyring(root: &Path) -> Option<PathBuf> {
    let mut paths = KEYRINGS.iter().map(|k| root.join(k));
    paths.find(|path| path.is_file())
}

/// Debian's archive keyring: the machine's, else one fetched from the machine's
/// own archive and unpacked.
pub fn keyring(cache: &Cache) -> Result<PathBuf> {
    let fetched = cache.path("keyring");
    if let Some(path) = find_keyring(Path::new("/")).or_else(|| find_keyring(&fetched)) {
        return Ok(path);
    }
    say("apt: this machine has no Debian archive keyring; fetching it from its own archive");
    if let Err(e) = fetch_keyring(cache, &fetched) {
        bail!(
            "no keyring to check Debian's signatures with, and it could not be fetched ({e:#}); this line installs it: \
             sudo apt-get update && sudo apt-get install -y debian-archive-keyring"
        );
    }
    find_keyring(&fetched).context("the package debian-archive-keyring holds no keyring")
}

/// Fetches `debian-archive-keyring` as the machine's own apt verifies it, with
/// package lists below the cache.
fn fetch_keyring(cache: &Cache, into: &Path) -> Result<()> {
    let dir = cache.path("apt-machine");
    for sub in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(dir.join(sub))?;
    }
    let options = [
        format!("Dir::State::lists={}", dir.join("lists").display()),
        format!("Dir::Cache={}", dir.join("cache").display()),
        "Debug::NoLocking=true".into(),
        "APT::Sandbox::User=root".into(),
        "Acquire::Languages=none".into(),
    ];
    let apt = |words: &[&str]| {
        let mut command = Command::new("apt-get");
        command.current_dir(&dir);
        for option in &options {
            command.args(["-o", option]);
        }
        capture(command.args(words))
    };
    // Hooks that need root make `update` fail after its work is done; the download shows whether it
    // was enough.
    let updated = apt(&["update"]);
    if let Err(e) = apt(&["download", "debian-archive-keyring"]) {
        updated?;
        return Err(e);
    }
    let deb = fs::read_dir(&dir)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "deb"))
        .context("apt-get download left no file")?;
    capture(Command::new("dpkg-deb").arg("-x").arg(deb).arg(into))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirror_of_own_release_is_chosen() {
        let targets = "Packages main cloud-sdk https://elsewhere/apt/\n\
                       Packages main bookworm-security http://one/debian-security/\n\
                       Packages contrib bookworm http://two/debian/\n\
                       Packages main bookworm http://three/debian/\n";
        assert_eq!(
            choose_mirror(targets, "bookworm").as_deref(),
            Some("http://three/debian")
        );
        let other = "Packages main stable http://four/debian/\n";
        assert_eq!(
            choose_mirror(other, "bookworm").as_deref(),
            Some("http://four/debian")
        );
        assert_eq!(choose_mirror("", "bookworm"), None);
    }
}
