//! Source locations (file and line) of configuration tables and keys, for errors that are found
//! after the file was read.

use crate::disk::{KINDS, Specs};
use anyhow::Result;
use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::path::Path;
use std::sync::Arc;
use toml::de::{DeTable, DeValue};

/// Location of a table in a configuration file; empty for values of the command line. All locations
/// compare as equal, so that equal tables are equal wherever they stand.
#[derive(Clone, Debug, Default)]
pub struct Origin(Option<Arc<TableLocation>>);

#[derive(Debug)]
struct TableLocation {
    file: String,
    /// Description of the disk or table: `controller /run/vnvme/vm0.sock`.
    what: String,
    line: usize,
    /// Line number of each key of the table.
    lines: BTreeMap<String, usize>,
}

impl PartialEq for Origin {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Origin {}

impl fmt::Display for Origin {
    /// `FILE, line N`, of the table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(told) => write!(f, "{}, line {}", told.file, told.line),
            None => Ok(()),
        }
    }
}

impl Origin {
    /// Returns the prefix of an error message, `FILE, line N, WHAT: `; empty without a file.
    fn prefix(&self, key: &str) -> String {
        let Some(told) = &self.0 else {
            return String::new();
        };
        let line = told.lines.get(key).unwrap_or(&told.line);
        format!("{}, line {line}, {}: ", told.file, told.what)
    }

    /// Returns whether the table is from a file.
    pub fn is_known(&self) -> bool {
        self.0.is_some()
    }

    /// An error about a key, or about the table if it has no such key, with its place.
    pub fn error(&self, key: &str, why: impl Display) -> anyhow::Error {
        anyhow::Error::msg(format!("{}{why}", self.prefix(key)))
    }

    /// Adds the file and line of `key` to the error of `result`.
    pub fn place<T>(&self, key: &str, result: Result<T>) -> Result<T> {
        result.map_err(|error| match self.0 {
            None => error,
            // The error stays as the cause, since callers look for it in the chain.
            Some(_) => {
                let prefix = self.prefix(key);
                error.context(prefix.trim_end_matches([':', ' ']).to_owned())
            }
        })
    }
}

/// Notes in everything that a file describes where it does so. The file's text was read as `specs`.
pub fn note(specs: &mut Specs, file: &Path, text: &str) {
    let Ok(document) = DeTable::parse(text) else {
        return;
    };
    let finder = Finder {
        file: file.display().to_string(),
        text,
    };
    let document = document.get_ref();
    let described = KINDS.iter().flat_map(|kind| {
        let tables = tables(document, kind.name()).into_iter();
        tables.map(move |table| (kind, table))
    });
    for (disk, (kind, (table, start))) in specs.iter_mut().zip(described) {
        let what = format!("{kind} {}", disk.label());
        let own = finder.origin(what.clone(), table, start);
        if disk.has_namespace_tables() {
            let namespaces = disk.namespaces_mut().iter_mut();
            let tables = tables(table, "namespace");
            for ((namespace, (table, start)), n) in namespaces.zip(tables).zip(1..) {
                let what = match n {
                    1 => what.clone(),
                    _ => format!("{what}, namespace {n}"),
                };
                namespace.origin = finder.origin(what, table, start);
            }
        } else {
            let namespaces = disk.namespaces_mut().iter_mut();
            namespaces.for_each(|namespace| namespace.origin = own.clone());
        }
        *disk.origin_mut() = own;
    }
}

/// Removes all source locations, because the text was not written by a user.
pub fn forget(specs: &mut Specs) {
    for disk in specs.iter_mut() {
        *disk.origin_mut() = Origin::default();
        let namespaces = disk.namespaces_mut().iter_mut();
        namespaces.for_each(|namespace| namespace.origin = Origin::default());
    }
}

/// The tables of an array of tables, each with where it begins in the text.
fn tables<'a, 'i>(table: &'a DeTable<'i>, key: &str) -> Vec<(&'a DeTable<'i>, usize)> {
    let Some(DeValue::Array(array)) = table.get(key).map(|value| value.get_ref()) else {
        return Vec::new();
    };
    let found = array.iter().filter_map(|item| match item.get_ref() {
        DeValue::Table(table) => Some((table, item.span().start)),
        _ => None,
    });
    found.collect()
}

struct Finder<'a> {
    file: String,
    text: &'a str,
}

impl Finder<'_> {
    fn line(&self, at: usize) -> usize {
        let before = self.text.as_bytes().iter().take(at);
        1 + before.filter(|byte| **byte == b'\n').count()
    }

    fn origin(&self, what: String, table: &DeTable<'_>, start: usize) -> Origin {
        let lines = table.iter().map(|(key, _)| {
            let line = self.line(key.span().start);
            (key.get_ref().to_string(), line)
        });
        Origin(Some(Arc::new(TableLocation {
            file: self.file.clone(),
            what,
            line: self.line(start),
            lines: lines.collect(),
        })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# A comment\n[process]\nworkers = 2\n\n[[controller]]\nsocket = \
    \"/run/a\"\n\
        [[controller.namespace]]\nvolume = \"a\"\n[[controller.namespace]]\nvolume = \"b\"\n\
        nsid = 7\n[[controller]]\nserial = \"S\"\nsocket = \"/run/b\"\n\
        namespace = [\n  { volume = \"c\" },\n]\n[[vhost-user-blk]]\nsocket = \"/run/c\"\n\
        volume = \"d\"\n[[ublk]]\nqueues = 1\nvolume = \"e\"\n";

    #[test]
    fn each_table_and_key_has_line() {
        let mut specs: Specs = toml::from_str(TEXT).unwrap();
        note(&mut specs, Path::new("f.toml"), TEXT);
        let [first, second] = specs.controllers.as_slice() else {
            panic!("two controllers");
        };
        for (origin, key, wanted) in [
            (&first.origin, "", "f.toml, line 5, controller /run/a: x"),
            (
                &first.origin,
                "socket",
                "f.toml, line 6, controller /run/a: x",
            ),
            (
                &second.origin,
                "serial",
                "f.toml, line 13, controller /run/b: x",
            ),
            (
                &first.namespaces[1].origin,
                "nsid",
                "f.toml, line 11, controller /run/a, namespace 2: x",
            ),
            (
                &second.namespaces[0].origin,
                "volume",
                "f.toml, line 16, controller /run/b: x",
            ),
            (
                &specs.vhost_user_blk[0].origin,
                "volume",
                "f.toml, line 20, vhost-user-blk /run/c: x",
            ),
            (
                &specs.ublk[0].origin,
                "queues",
                "f.toml, line 22, ublk e: x",
            ),
            (&Origin::default(), "queues", "x"),
        ] {
            assert_eq!(origin.error(key, "x").to_string(), wanted);
            let placed = origin.place::<()>(key, Err(anyhow::anyhow!("x")));
            assert_eq!(format!("{:#}", placed.unwrap_err()), wanted);
        }
    }
}
