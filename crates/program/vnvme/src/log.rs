//! `--log`: filter of log messages. A filter with a misspelled name, which would select nothing, is
//! refused.

use std::str::FromStr;
use tracing_subscriber::filter::{LevelFilter, Targets};

/// Names of the crates whose log messages a filter can select.
const PARTS: [&str; 17] = [
    "control",
    "controller",
    "driver",
    "fabrics",
    "fabrics_target",
    "mediate",
    "probes",
    "qcow2",
    "nbd",
    "rbd",
    "receive",
    "ublk",
    "vfio_user",
    "vhost_blk",
    "vnvme",
    "volume",
    "worker",
];

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
        for word in text.split(',').map(str::trim) {
            let (part, level) = match word.split_once('=') {
                Some((part, level)) => (part, Some(level)),
                None if is_level(word) => continue,
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
        }
        text.parse().map(Filter).map_err(|error| format!("{error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let name = table["package"]["name"].as_str().unwrap().replace('-', "_");
            assert!(PARTS.contains(&name.as_str()), "{name} logs");
        }
        assert_eq!(found, PARTS.len(), "one is named that does not log");
    }
}
