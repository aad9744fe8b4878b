//! Trees of unpacked Debian packages, and programs run from them on the host.
//!
//! A program of a tree runs through the tree's own dynamic linker with the tree's own libraries, so
//! a program from a newer Debian runs on an older one without a chroot and without being installed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::apt::{AMD64, Apt, Package, is_not_served};
use crate::cache::{self, Cache};
use crate::elf::Elf;
use crate::progress::say;

/// Changes when the way a tree is made changes.
const RECIPE: &str = "tree-1";
/// When mirrors are asked again that do not serve something.
const MIRROR_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// Packages of a tree.
#[derive(Clone, Copy, Debug)]
pub struct PackageSet {
    /// Name of the artefact in the cache.
    pub name: &'static str,
    /// Suites of Debian, all offered to apt at once.
    pub suites: &'static [&'static str],
    /// The suite that is preferred (apt's `-t`).
    pub release: Option<&'static str>,
    /// The packages; their dependencies come along.
    pub packages: &'static [&'static str],
    /// Packages not to fetch, by prefix: those that only maintainer scripts and unused parts of
    /// other packages need. A library that is missing after all is an error when the program is
    /// prepared, not a surprise in the guest.
    pub without: &'static [&'static str],
}

impl PackageSet {
    fn recipe(&self) -> String {
        let what = (self.suites, self.release, self.packages, self.without);
        cache::key(&[RECIPE, &format!("{what:?}")])
    }

    /// Returns the file that names the package versions, and therefore the directory, of the wish:
    /// with it a second run needs no network.
    fn pointer(&self, cache: &Cache) -> PathBuf {
        cache.path(format!("{}.{}", self.name, self.recipe()))
    }
}

/// An unpacked tree.
#[derive(Clone, Debug)]
pub struct Tree {
    root: PathBuf,
    libraries: BTreeMap<String, PathBuf>,
}

impl Tree {
    /// The tree for `wish` from the cache, fetched if it is not there. `accept` sees the package
    /// list before the download and refuses it by an error (for example a QEMU that is too old).
    pub fn fetch(
        cache: &Cache,
        wish: &PackageSet,
        accept: impl Fn(&[Package]) -> Result<()>,
    ) -> Result<Tree> {
        Tree::fetch_for(cache, wish, AMD64, accept)
    }

    /// Fetches packages of another architecture. Their programs run in a guest, not here.
    pub fn fetch_for(
        cache: &Cache,
        wish: &PackageSet,
        architecture: &'static str,
        accept: impl Fn(&[Package]) -> Result<()>,
    ) -> Result<Tree> {
        let refresh = std::env::var_os("VNVME_HARNESS_REFRESH").is_some_and(|v| v == "1");
        let current = || Tree::cached(cache, wish).filter(|_| !refresh);
        if let Some(dir) = current() {
            return Tree::open(dir);
        }
        let _lock = cache.lock("apt")?;
        if let Some(dir) = current() {
            return Tree::open(dir);
        }
        // A mirror that is being changed lacks for a moment files that its lists name.
        let first = Tree::fetch_now(cache, wish, architecture, &accept);
        match first {
            Err(error) if architecture == AMD64 && is_not_served(&error) => {
                say(format!(
                    "apt: {error:#}; once more in {} s",
                    MIRROR_RETRY_INTERVAL.as_secs()
                ));
                std::thread::sleep(MIRROR_RETRY_INTERVAL);
                Tree::fetch_now(cache, wish, architecture, &accept)
            }
            first => first,
        }
    }

    fn fetch_now(
        cache: &Cache,
        wish: &PackageSet,
        architecture: &'static str,
        accept: impl Fn(&[Package]) -> Result<()>,
    ) -> Result<Tree> {
        let apt = Apt::open_for(cache, wish.suites, architecture)?;
        let mut packages = apt.closure(wish.release, wish.packages)?;
        packages.retain(|p| !wish.without.iter().any(|w| p.name.starts_with(w)));
        accept(&packages)?;
        let list: String = packages
            .iter()
            .map(|p| format!("{} {}\n", p.name, p.version))
            .collect();
        let key = cache::key(&[&wish.recipe(), &list]);
        let dir = cache.artefact(wish.name, &key, |part| {
            apt.unpack(&packages, part)?;
            fs::write(part.join("packages.txt"), &list)?;
            Ok(())
        })?;
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let pointer = wish.pointer(cache);
        let part = pointer.with_extension("part");
        fs::write(&part, name.as_bytes())?;
        fs::rename(&part, &pointer)?;
        cache.prune(wish.name, &dir)?;
        say(format!("apt: {name} is ready"));
        Tree::open(dir)
    }

    /// The directory that a wish led to last time, if it is complete.
    pub fn cached(cache: &Cache, wish: &PackageSet) -> Option<PathBuf> {
        let name = fs::read_to_string(wish.pointer(cache)).ok()?;
        let dir = cache.path(name.trim());
        dir.is_dir().then_some(dir)
    }

    /// Opens an unpacked tree.
    pub fn open(root: PathBuf) -> Result<Tree> {
        let mut libraries = BTreeMap::new();
        // The second one: of releases before usr and the root became one.
        for dir in [
            "usr/lib/x86_64-linux-gnu",
            "lib/x86_64-linux-gnu",
            "usr/lib64",
            "usr/lib",
            "lib64",
        ] {
            index_libraries(&root.join(dir), 0, &mut libraries)?;
        }
        Ok(Tree { root, libraries })
    }

    /// The root directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The name of the tree in the cache, which changes whenever its content does.
    pub fn id(&self) -> String {
        let name = self.root.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// A program of the tree.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        ["usr/bin", "usr/sbin", "bin", "sbin"]
            .iter()
            .map(|dir| self.root.join(dir).join(name))
            .find(|path| path.is_file())
            .with_context(|| format!("{} holds no program {name}", self.root.display()))
    }

    /// The dynamic linker of the tree.
    pub fn linker(&self) -> Result<&Path> {
        let linker = self.libraries.get(LINKER);
        linker
            .map(PathBuf::as_path)
            .with_context(|| format!("{} holds no {LINKER}", self.root.display()))
    }

    /// The libraries that a program or library needs, by their names, all levels down, the dynamic
    /// linker included for a program that is not static.
    pub fn libraries_of(&self, file: &Path) -> Result<BTreeMap<String, PathBuf>> {
        let mut found = BTreeMap::new();
        let mut queue = VecDeque::from([file.to_path_buf()]);
        while let Some(path) = queue.pop_front() {
            let bytes = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
            let needed = Elf::parse(&bytes)
                .and_then(|elf| elf.needed())
                .with_context(|| format!("{} is not a program", path.display()))?;
            for name in needed {
                if found.contains_key(&name) {
                    continue;
                }
                let Some(library) = self.libraries.get(&name) else {
                    bail!(
                        "{} needs {name}, which no fetched package holds",
                        path.display()
                    );
                };
                found.insert(name, library.clone());
                queue.push_back(library.clone());
            }
        }
        if !found.is_empty() {
            found.insert(LINKER.to_string(), self.linker()?.to_path_buf());
        }
        Ok(found)
    }

    /// A command that runs a program of this tree on the host.
    pub fn tool(&self, name: &str) -> Result<Command> {
        let words = self.tool_words(&self.program(name)?)?;
        let (first, rest) = words.split_first().context("an empty command")?;
        let mut command = Command::new(first);
        command.args(rest);
        Ok(command)
    }

    /// The words that start a program of this tree on the host: linker, library path, program.
    pub fn tool_words(&self, program: &Path) -> Result<Vec<String>> {
        let libraries = self.libraries_of(program)?;
        let program = program.display().to_string();
        if libraries.is_empty() {
            return Ok(vec![program]);
        }
        let dirs: BTreeSet<String> = libraries
            .values()
            .filter_map(|library| Some(library.parent()?.display().to_string()))
            .collect();
        Ok(vec![
            self.linker()?.display().to_string(),
            "--library-path".into(),
            dirs.into_iter().collect::<Vec<_>>().join(":"),
            program,
        ])
    }

    /// Runs a program of this tree on the host to its end; fails with its output if it fails.
    pub fn run(&self, name: &str, args: &[&str]) -> Result<Vec<u8>> {
        let out = self
            .tool(name)?
            .args(args)
            .output()
            .with_context(|| format!("running {name}"))?;
        if !out.status.success() {
            bail!(
                "{name} {} failed ({}):\n{}{}",
                args.join(" "),
                out.status,
                String::from_utf8_lossy(&out.stdout),
                String::from_utf8_lossy(&out.stderr)
            );
        }
        Ok(out.stdout)
    }
}

/// The dynamic linker of amd64.
pub const LINKER: &str = "ld-linux-x86-64.so.2";

/// Notes every shared library of a directory and, two levels down, of its subdirectories;
/// the first of a name wins.
fn index_libraries(dir: &Path, depth: u32, into: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Ok(());
    };
    let mut below = Vec::new();
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            below.push(path);
        } else if name.contains(".so") && path.is_file() {
            into.entry(name).or_insert(path);
        }
    }
    if depth < 2 {
        below.sort();
        for dir in below {
            index_libraries(&dir, depth + 1, into)?;
        }
    }
    Ok(())
}
