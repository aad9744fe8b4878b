//! Source locations (file and line) of configuration tables and keys, for errors that are found
//! after the file was read.

use crate::spec::Specs;
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
    let controllers = tables(document, "controller");
    for (spec, (table, start)) in specs.controllers.iter_mut().zip(controllers) {
        let what = format!("controller {}", spec.socket.display());
        let namespaces = tables(table, "namespace");
        for ((namespace, (table, start)), n) in spec.namespaces.iter_mut().zip(namespaces).zip(1..)
        {
            let what = match n {
                1 => what.clone(),
                _ => format!("{what}, namespace {n}"),
            };
            namespace.origin = finder.origin(what, table, start);
        }
        spec.origin = finder.origin(what, table, start);
    }
    let exports = tables(document, "vhost-user-blk");
    for (spec, (table, start)) in specs.vhost_user_blk.iter_mut().zip(exports) {
        let what = format!("vhost-user-blk {}", spec.socket.display());
        spec.origin = finder.origin(what, table, start);
    }
    let targets = tables(document, "nvme-tcp");
    for (spec, (table, start)) in specs.nvme_tcp.iter_mut().zip(targets) {
        let what = format!("nvme-tcp {}", spec.listen());
        let namespaces = tables(table, "namespace");
        for (namespace, (table, start)) in spec.namespaces.iter_mut().zip(namespaces) {
            namespace.origin = finder.origin(what.clone(), table, start);
        }
        spec.origin = finder.origin(what, table, start);
    }
    for (spec, (table, start)) in specs.ublk.iter_mut().zip(tables(document, "ublk")) {
        let what = format!("ublk {}", spec.volume);
        spec.origin = finder.origin(what, table, start);
    }
}

/// Removes all source locations, because the text was not written by a user.
pub fn forget(specs: &mut Specs) {
    for spec in &mut specs.controllers {
        spec.origin = Origin::default();
        spec.namespaces
            .iter_mut()
            .for_each(|namespace| namespace.origin = Origin::default());
    }
    for spec in &mut specs.nvme_tcp {
        spec.origin = Origin::default();
        spec.namespaces
            .iter_mut()
            .for_each(|namespace| namespace.origin = Origin::default());
    }
    let exports = specs.vhost_user_blk.iter_mut();
    exports.for_each(|spec| spec.origin = Origin::default());
    let disks = specs.ublk.iter_mut();
    disks.for_each(|spec| spec.origin = Origin::default());
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
