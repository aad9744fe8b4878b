//! `--log`: filter of log messages. A filter with a misspelled name, which would select nothing, is
//! refused.

use std::str::FromStr;
use tracing_subscriber::filter::{LevelFilter, Targets};

/// Names of the crates whose log messages a filter can select.
const PARTS: [&str; 20] = [
    "control",
    "controller",
    "daemon",
    "driver",
    "fabrics",
    "fabrics_target",
    "mediate",
    "probes",
    "qcow2",
    "namespace_files",
    "nbd",
    "rbd",
    "receive",
    "remote",
    "ublk",
    "vfio_user",
    "vhost_blk",
    "vnvme",
    "volume",
    "worker",
];

/// Part that stands for the whole program, whose messages come from several crates.
const PROGRAM: &str = "vnvme";
/// Crates of the program that log, beside the one of its name.
const CRATES_OF_PROGRAM: [&str; 2] = ["daemon", "namespace_files"];

/// Filter of log messages, by level and part of the program.
#[derive(Clone, Debug)]
pub struct Filter(pub Targets);

impl Filter {
    /// Creates a filter for messages of all crates from this level on.
    pub fn level(level: LevelFilter) -> Self {
        Self(Targets::new().with_default(level))
    }
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // An empty word would parse as the level error.
        let is_level = |text: &str| !text.is_empty() && text.parse::<LevelFilter>().is_ok();
        // The parser accepts any word as the name of a crate, and then logs nothing.
        let mut words: Vec<String> = Vec::new();
        for word in text.split(',').map(str::trim) {
            let (part, level) = match word.split_once('=') {
                Some((part, level)) => (part, Some(level)),
                None if is_level(word) => {
                    words.push(word.to_owned());
                    continue;
                }
                None => (word, None),
            };
            let level = level.filter(|level| !is_level(level));
            let name = part.split("::").next().unwrap_or(part);
            if level.is_some() || !PARTS.contains(&name) {
                return Err(format!(
                    "\"{}\" is not known: levels are off, error, warn, info, debug and trace; PART=LEVEL is for one of {}",
                    level.unwrap_or(part),
                    PARTS.join(", ")
                ));
            }
            if name == PROGRAM {
                let rest = word.strip_prefix(PROGRAM).unwrap_or_default();
                words.extend(CRATES_OF_PROGRAM.map(|name| format!("{name}{rest}")));
            }
            words.push(word.to_owned());
        }
        let filter = words.join(",");
        filter
            .parse()
            .map(Filter)
            .map_err(|error| format!("{error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn misspelled_log_filter_is_refused() {
        for good in [
            "info",
            "OFF",
            "trace",
            "info,controller=trace",
            "vnvme::doorbell=trace",
            "vhost_blk",
            "warn, volume=debug",
        ] {
            assert!(good.parse::<Filter>().is_ok(), "{good}");
        }
        for (bad, named) in [
            ("debg", "\"debg\""),
            ("", "\"\""),
            ("info,", "\"\""),
            ("info,controler=trace", "\"controler\""),
            ("controller=trce", "\"trce\""),
            ("controller=", "\"\""),
            ("info=trace", "\"info\""),
            ("a=b=c", "\"b=c\""),
        ] {
            let error = bad.parse::<Filter>().unwrap_err();
            assert!(error.starts_with(named), "{bad}: {error}");
            assert!(error.contains("error, warn, info, debug"), "{error}");
        }
    }

    #[test]
    fn filter_of_program_selects_all_of_its_crates() {
        let enabled = |filter: &str, target: &str, level| {
            let Filter(targets) = filter.parse().unwrap();
            targets.would_enable(target, &level)
        };
        for target in ["vnvme::cli", "daemon::serve", "daemon"] {
            for filter in ["vnvme=debug", "warn, vnvme=debug", "vnvme"] {
                assert!(enabled(filter, target, Level::DEBUG), "{filter}: {target}");
            }
            assert!(!enabled("vnvme=info", target, Level::DEBUG), "{target}");
            assert!(!enabled("info,vnvme=off", target, Level::ERROR), "{target}");
        }
        let some = "daemon::keep=trace,vnvme=info";
        assert!(enabled(some, "daemon::keep::session", Level::TRACE));
        assert!(!enabled(some, "daemon::manage", Level::DEBUG));
        assert!(enabled(
            "vnvme::manage=debug",
            "daemon::manage::plan",
            Level::DEBUG
        ));
        assert!(!enabled(
            "vnvme::manage=debug",
            "daemon::serve",
            Level::ERROR
        ));
        assert!(!enabled("vnvme=debug", "volume::file", Level::ERROR));
    }

    /// Checks that every crate of the workspace that logs is listed.
    #[test]
    fn all_log_targets_are_known() {
        let folders = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let folders = std::fs::read_dir(folders).unwrap();
        let crates = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
        let mut found = 0;
        for entry in crates {
            let manifest = entry.unwrap().path().join("Cargo.toml");
            let Ok(text) = std::fs::read_to_string(&manifest) else {
                continue;
            };
            let table: toml::Table = text.parse().unwrap();
            let needs = table
                .get("dependencies")
                .and_then(|needs| needs.get("tracing"));
            if needs.is_none() {
                continue;
            }
            found += 1;
            // Messages have the name of the library, which a published package is not named by.
            let named = table.get("lib").and_then(|lib| lib.get("name"));
            let name = named.unwrap_or(&table["package"]["name"]);
            let name = name.as_str().unwrap().replace('-', "_");
            assert!(PARTS.contains(&name.as_str()), "{name} logs");
            let path = manifest.components().rev().nth(2).unwrap();
            let is_own = path.as_os_str() == "program" && !["control", PROGRAM].contains(&&*name);
            let is_listed = CRATES_OF_PROGRAM.contains(&name.as_str());
            assert_eq!(is_own, is_listed, "{name}: messages of {PROGRAM}");
        }
        assert_eq!(found, PARTS.len(), "one is named that does not log");
    }
}
