//! Paths, modules and items named in the developers' documents exist.
//!
//! Three kinds of names in backticks are checked: paths from the root of the tree
//! (`crates/data/dma/src/map.rs`), module paths that begin with a crate (`controller::engine`,
//! `volume::Budget`), and members of a type of this tree (`Engine::fetch`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Documents whose names are checked, beside every page of `docs/internals`.
const PAGES: &[&str] = &[
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "docs/embedding.md",
    "docs/one-read.md",
    "docs/testing.md",
];

/// Top-level directories: a name that begins with one of them is a path of the tree.
const DIRECTORIES: &[&str] = &[
    ".ci/",
    ".config/",
    "crates/",
    "docs/",
    "examples/",
    "packaging/",
    "testing/",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Source files and crates of the tree.
struct Tree {
    /// Text of each Rust file, by its path from the root.
    sources: BTreeMap<String, String>,
    /// Directory of each crate, by the name that code uses.
    crates: BTreeMap<String, String>,
}

impl Tree {
    fn read() -> Self {
        let mut tree = Self {
            sources: BTreeMap::new(),
            crates: BTreeMap::new(),
        };
        for directory in ["crates", "examples", "testing"] {
            tree.visit(directory);
        }
        tree
    }

    fn visit(&mut self, directory: &str) {
        for entry in std::fs::read_dir(root().join(directory)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let path = format!("{directory}/{name}");
            if entry.file_type().unwrap().is_dir() {
                if name != "target" {
                    self.visit(&path);
                }
            } else if name == "Cargo.toml" {
                let (_, name) = directory.rsplit_once('/').unwrap_or(("", directory));
                self.crates
                    .insert(name.replace('-', "_"), directory.to_owned());
            } else if name.ends_with(".rs") {
                let text = std::fs::read_to_string(entry.path()).unwrap();
                self.sources.insert(path, text);
            }
        }
    }

    /// Files of a module and of its submodules that define `name`, implement it, or re-export it.
    /// `module` is a path without its ending; all files are searched if it is empty.
    fn definitions(&self, module: &str, name: &str) -> Vec<&str> {
        let files = self.sources.iter();
        let within = |path: &str| {
            let rest = path.strip_prefix(module);
            rest.is_some_and(|rest| module.is_empty() || rest.starts_with(['.', '/']))
        };
        files
            .filter(|(path, text)| within(path) && defines(text, name))
            .map(|(_, text)| text.as_str())
            .collect()
    }

    /// Says why `name` is broken; `None` if it exists, or is none of the checked kinds.
    fn defect(&self, name: &str) -> Option<String> {
        if is_path(name) {
            let exists = root().join(name).exists();
            return (!exists).then(|| "no such file or directory".to_owned());
        }
        if name.ends_with(".rs") && is_word(name.trim_end_matches(".rs")) {
            let suffix = format!("/{name}");
            let exists = self.sources.keys().any(|path| path.ends_with(&suffix));
            return (!exists).then(|| "no file of this name".to_owned());
        }
        let name = name.split('(').next().unwrap_or(name);
        let segments: Vec<&str> = name.split("::").collect();
        if segments.len() < 2 || !segments.iter().all(|segment| is_word(segment)) {
            return None;
        }
        match self.crates.get(segments[0]) {
            Some(directory) => self.module_defect(&format!("{directory}/src"), &segments[1..]),
            None => self.item_defect("", &segments),
        }
    }

    /// Says why a path within a crate is broken: modules with files, an item, its member.
    fn module_defect(&self, source: &str, segments: &[&str]) -> Option<String> {
        let mut directory = source.to_owned();
        let mut rest = segments;
        while let Some((module, after)) = rest.split_first() {
            let path = format!("{directory}/{module}");
            let files = [format!("{path}.rs"), format!("{path}/mod.rs")];
            if !files.iter().any(|file| self.sources.contains_key(file)) {
                break;
            }
            directory = path;
            rest = after;
        }
        match rest {
            [] => None,
            items => self.item_defect(&directory, items),
        }
    }

    /// Says why an item of `module`, followed by its members, does not exist.
    fn item_defect(&self, module: &str, segments: &[&str]) -> Option<String> {
        let (item, members) = segments.split_first()?;
        let files = self.definitions(module, item);
        if files.is_empty() {
            return Some(format!("{item} is no module and no item"));
        }
        let missing = members
            .iter()
            .find(|member| !files.iter().any(|text| has_word(text, member)))?;
        Some(format!("{item} has no {missing}"))
    }
}

/// Whether a name is a path of the tree: neither absolute, nor made by a build, nor a pattern.
fn is_path(name: &str) -> bool {
    let plain = name
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
    let ending = ["/", ".rs", ".md", ".toml", ".sh"]
        .iter()
        .any(|ending| name.ends_with(ending));
    let known = DIRECTORIES.iter().any(|start| name.starts_with(start));
    let foreign = name.starts_with(['/', '-']) || name.starts_with("target/");
    plain && name.contains('/') && !foreign && (ending || known)
}

fn is_word(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic())
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn is_part_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Positions of a whole word in a text.
fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let found = text.match_indices(word).map(|(at, _)| at);
    found.filter(move |&at| {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        !before.ends_with(is_part_of_word) && !after.starts_with(is_part_of_word)
    })
}

fn has_word(text: &str, word: &str) -> bool {
    words(text, word).next().is_some()
}

/// Whether code defines, implements or re-exports a name. Comments do not count.
fn defines(text: &str, name: &str) -> bool {
    const BEFORE: &[&str] = &[
        "struct",
        "enum",
        "trait",
        "type",
        "union",
        "fn",
        "mod",
        "const",
        "static",
        "impl",
        "macro_rules!",
    ];
    words(text, name).any(|at| {
        let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let line = text[start..at].trim_start();
        if line.starts_with("//") {
            return false;
        }
        let last = line.split_whitespace().next_back().unwrap_or_default();
        // `impl<'a> Name`, `pub use a::{Other, Name}`, also over several lines.
        BEFORE.contains(&last)
            || (line.starts_with("impl") && last == "for")
            || (line.starts_with("impl<") && line.trim_end().ends_with('>'))
            || statement(text, at).starts_with("pub use ")
    })
}

/// The part of the statement around `at` that stands before it.
fn statement(text: &str, at: usize) -> &str {
    let before = &text[..at];
    let start = before.rfind(';').map_or(0, |end| end + 1);
    let statement = &before[start..];
    statement
        .rfind("pub use ")
        .map_or("", |start| &statement[start..])
}

/// Text in backticks outside of code blocks; it may continue in the next line.
fn names(document: &str) -> Vec<String> {
    let prose: String = document.split("```").step_by(2).collect();
    let spans = prose.split('`').skip(1).step_by(2);
    spans.map(|span| span.replace('\n', " ")).collect()
}

fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<PathBuf> = PAGES.iter().map(|page| root().join(page)).collect();
    for entry in std::fs::read_dir(root().join("docs/internals")).unwrap() {
        pages.push(entry.unwrap().path());
    }
    pages
}

#[test]
fn named_paths_and_items_exist() {
    let tree = Tree::read();
    // Each name, with the first page that has it.
    let mut all = BTreeMap::new();
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for name in names(&text) {
            all.entry(name).or_insert_with(|| page.clone());
        }
    }
    let checked = all
        .keys()
        .filter(|name| is_path(name) || name.contains("::"))
        .count();
    assert!(checked > 300, "only {checked} names were found");
    let defects: Vec<String> = all
        .iter()
        .filter_map(|(name, page)| {
            let defect = tree.defect(name)?;
            Some(format!("{}: `{name}`: {defect}", page.display()))
        })
        .collect();
    assert!(defects.is_empty(), "{}", defects.join("\n"));
}

#[test]
fn broken_names_are_detected() {
    let tree = Tree::read();
    for name in [
        "crates/program/vnvme/src/eventfd.rs",
        "crates/data/volume/src/mem.rs",
        "docs/nothing.md",
        "testing/harness/nothing/",
        "nothing_of_this_name.rs",
        "controller::enginee",
        "controller::engine::no_such_module",
        "volume::NoBudget",
        "Engine::no_such_function",
        "NoSuchType::new",
    ] {
        assert!(tree.defect(name).is_some(), "{name}");
    }
    for name in [
        "crates/program/daemon/src/front/irq_eventfd.rs",
        "crates/nvme/controller/src/engine/",
        "controller::engine::run",
        "volume::Budget",
        "worker::Worker",
        "Engine::fetch",
        "make test",
        "target/bench",
    ] {
        assert_eq!(tree.defect(name), None, "{name}");
    }
}

#[test]
fn architecture_lists_every_crate() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    for (name, directory) in Tree::read().crates {
        let package = directory.rsplit('/').next().unwrap_or(&name);
        let named = text.contains(&format!("`{package}`")) || text.contains(&directory);
        assert!(named, "ARCHITECTURE.md does not name {directory}");
    }
}

#[test]
fn links_of_internal_pages_exist() {
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        let links = text.split("](").skip(1);
        for (link, _) in links.filter_map(|rest| rest.split_once(')')) {
            let file = link.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") {
                continue;
            }
            let exists = page.with_file_name(file).exists();
            assert!(exists, "{}: {file} does not exist", page.display());
        }
    }
}
