//! Section on volumes of `vnvme serve --help`, generated from the registry of volume kinds.

use config::options::{Spec, url};
use config::spec::{NamespaceSpec, UblkSpec, VhostBlkSpec};
use daemon::open::devices::DeviceRegistry;
use daemon::open::kinds;
use volume::{Extras, READ_ONLY, Scheme, UrlOption};

/// Width of the help text in columns.
const WIDTH: usize = 80;
/// Column in which the description of an option begins.
const COLUMN: usize = 32;

/// Formats every kind of volume with its options, and the options common to all of them.
pub fn volume_help() -> String {
    let kinds = kinds(DeviceRegistry::default());
    let schemes: Vec<&Scheme> = kinds.schemes().collect();
    let mut help = String::from("Volumes:\n");
    for (at, scheme) in schemes.iter().enumerate() {
        help += &entry(2, scheme.example, scheme.help);
        // Kinds that have the same options stand together before them.
        if schemes.get(at + 1).map(|next| next.options) != Some(scheme.options) {
            help += &options(scheme.options.iter().filter(|option| **option != READ_ONLY));
        }
    }
    help += "  Options, as ?key=value&..., of every volume:\n";
    help += &options([READ_ONLY].iter().chain(Extras::OPTIONS));
    help += "  Of a namespace:\n";
    help += &shown::<NamespaceSpec>();
    help += "  Of a vhost-user-blk export:\n";
    help += &shown::<VhostBlkSpec>();
    help += "  Of a block device of the host:\n";
    help += &shown::<UblkSpec>();
    help
}

/// Returns the help text about the URL options of a namespace, export or block device.
fn shown<S: Spec>() -> String {
    let options = url::options::<S>();
    options.map(|(name, help)| entry(6, &name, &help)).collect()
}

fn options<'a>(options: impl IntoIterator<Item = &'a UrlOption>) -> String {
    let lines = options
        .into_iter()
        .map(|option| entry(6, &format!("{}={}", option.name, option.form), option.help));
    lines.collect()
}

/// Formats a name with its description beside it.
fn entry(indent: usize, name: &str, help: &str) -> String {
    let width = COLUMN - indent - 1;
    let mut text = String::new();
    let mut line = format!("{:indent$}{name:<width$}", "");
    if name.len() > width {
        text = line + "\n";
        line = " ".repeat(COLUMN - 1);
    }
    for word in help.split(' ') {
        if line.chars().count() + 1 + word.chars().count() > WIDTH {
            text += &line;
            text.push('\n');
            line = " ".repeat(COLUMN - 1);
        }
        line.push(' ');
        line += word;
    }
    text + &line + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::volumes::KINDS;

    #[test]
    fn volume_help_lists_every_kind_and_option() {
        let help = volume_help();
        let kinds = kinds(DeviceRegistry::default());
        let names: Vec<&str> = kinds.schemes().map(|scheme| scheme.name).collect();
        let others = KINDS.iter().flat_map(|kind| kind.schemes());
        let expected: Vec<&str> = ["file", "mem", "null"]
            .into_iter()
            .chain(others.map(|scheme| scheme.name))
            .collect();
        assert_eq!(names, expected);
        for scheme in kinds.schemes() {
            let own = scheme.options.contains(&READ_ONLY);
            assert!(own || scheme.is_prefix(), "{}", scheme.name);
            for example in scheme.example.split(", ") {
                assert!(help.contains(&format!("  {}", scheme.example)), "{example}");
            }
            let all = scheme.options.iter().chain(Extras::OPTIONS);
            let all = all.map(|option| format!("{}={}", option.name, option.form));
            let shown = url::options::<NamespaceSpec>().chain(url::options::<VhostBlkSpec>());
            for option in all.chain(shown.map(|(name, _)| name)) {
                let line = format!("      {option}");
                let is_named = help.lines().any(|one| {
                    one.strip_prefix(&line)
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
                });
                assert!(is_named, "{line}");
            }
        }
        // A device's options stand once, though two kinds have them.
        assert_eq!(help.matches(" status-interval=").count(), 1);
        for line in help.lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
        }
    }

    #[test]
    fn help_lines_are_broken_between_words() {
        let help = "word ".repeat(30);
        let lines = entry(6, &"n".repeat(40), help.trim());
        assert_eq!(lines.split_whitespace().count(), 31);
        assert!(lines.lines().count() > 1);
        assert!(
            lines
                .lines()
                .all(|line| line.len() <= WIDTH && line.ends_with(['d', 'n']))
        );
    }
}
