//! Tests that the commands, options and files in README.md and the documents exist.

use crate::bench::suites;
use crate::cli::Cli;
use clap::{CommandFactory, Parser};
use config::spec::read_config;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// The documents of a directory.
fn paths(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect()
}

/// README.md and every document of docs/, one after the other.
fn documents() -> String {
    let mut paths = paths(&root().join("docs"));
    paths.push(root().join("README.md"));
    paths.sort();
    let mut all = String::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).unwrap();
        let fences = text.matches("```").count();
        assert!(
            fences.is_multiple_of(2),
            "{}: a block has no end",
            path.display()
        );
        all += &text;
        all.push('\n');
    }
    all
}

/// Returns the blocks of code, each with its language.
fn blocks(documents: &str) -> Vec<(&str, &str)> {
    let parts = documents.split("```").skip(1).step_by(2);
    parts.filter_map(|block| block.split_once('\n')).collect()
}

/// The pieces of code in the running text, which may go on in the next line.
fn spans(documents: &str) -> Vec<String> {
    let prose: String = documents.split("```").step_by(2).collect();
    prose
        .split('`')
        .skip(1)
        .step_by(2)
        .map(|span| span.replace('\n', " "))
        .collect()
}

/// The words of a command line; those in single quotes are one.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for (i, part) in line.split('\'').enumerate() {
        let mut pieces = part.split(' ');
        if let (Some(last), Some(first)) = (words.last_mut(), pieces.next()) {
            last.push_str(if i % 2 == 1 { part } else { first });
        }
        if i % 2 == 0 {
            words.extend(pieces.map(str::to_owned));
        }
    }
    words.retain(|word| !word.is_empty());
    let end = words.iter().position(|word| word == "&" || word == "#");
    words.truncate(end.unwrap_or(words.len()));
    words
}

/// Returns the arguments of all calls of vnvme, each with whether the call is complete.
fn calls(documents: &str) -> Vec<(Vec<String>, bool)> {
    let lines = blocks(documents)
        .into_iter()
        .filter(|(language, _)| language.is_empty())
        .flat_map(|(_, block)| block.lines().map(str::to_owned));
    let all = lines
        .map(|line| (line, true))
        .chain(spans(documents).into_iter().map(|span| (span, false)));
    all.filter_map(|(line, whole)| {
        let words = words(&line);
        let call = words
            .first()
            .is_some_and(|word| word == "vnvme" || word.ends_with("/vnvme"));
        let whole = whole && !words.iter().any(|word| word == "...");
        call.then_some((words, whole))
    })
    .collect()
}

/// Whether one of the program's commands (or the one of this name) has an option.
fn has_option(command: Option<&str>, word: &str) -> bool {
    let name = word.trim_start_matches('-');
    // A value that may be left out is written `[=on|off]`.
    let name = name.split(['=', '[']).next().unwrap_or(name);
    let mut cli = Cli::command();
    cli.build();
    let mut commands = cli
        .get_subcommands()
        .filter(|sub| command.is_none_or(|name| name == sub.get_name()));
    commands.any(|sub| {
        let mut options = sub.get_arguments().filter_map(clap::Arg::get_long);
        options.any(|long| long == name)
    })
}

#[test]
fn documented_commands_and_options_exist() {
    let documents = documents();
    let calls = calls(&documents);
    assert!(calls.len() > 30, "the documents are not read: {calls:?}");
    for (words, whole) in calls {
        let Some(command) = words
            .get(1)
            .filter(|word| !word.starts_with('-') && *word != "COMMAND")
        else {
            continue;
        };
        let args = words.iter().skip(1).map(OsString::from);
        if suites::wanted(args).is_some() {
            // Another program's options.
            continue;
        }
        let known = Cli::command().find_subcommand(command).is_some();
        assert!(known, "no such command: {words:?}");
        for option in words.iter().filter(|word| word.starts_with("--")) {
            assert!(has_option(Some(command), option), "{option}: {words:?}");
        }
        if whole && let Err(error) = Cli::try_parse_from(&words) {
            panic!("{words:?}: {error}");
        }
    }
    let options: Vec<String> = spans(&documents)
        .into_iter()
        .filter(|span| span.starts_with("--"))
        .collect();
    assert!(
        options.len() > 20,
        "the documents are not read: {options:?}"
    );
    for span in options {
        for option in words(&span).iter().filter(|word| word.starts_with("--")) {
            assert!(has_option(None, option), "{option}: {span}");
        }
    }
}

#[test]
fn documented_configuration_files_parse() {
    let mut count = 0;
    let documents = documents();
    for (_, block) in blocks(&documents)
        .iter()
        .filter(|(language, _)| *language == "toml")
    {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vnvme.toml");
        std::fs::write(&path, block).unwrap();
        if let Err(error) = read_config(&path) {
            panic!("{error:#}: {block}");
        }
        count += 1;
    }
    assert!(count >= 3, "the documents are not read");
}

/// A heading's name in a link, as forges make it.
fn anchor(heading: &str) -> String {
    let words = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = words.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
        _ => None,
    });
    kept.collect()
}

/// The first questions of an operator come before features that few need.
#[test]
fn readme_has_maturity_duration_backup_and_limits_first() {
    let text = std::fs::read_to_string(root().join("README.md")).unwrap();
    let at = |words: &str| text.find(words).unwrap_or_else(|| panic!("{words}"));
    let order = [
        "**Maturity.**",
        "make demo\n",
        "takes about ten minutes",
        "| backup |",
        "| limits |",
        "FDP, ANA",
    ];
    let places = order.map(at);
    assert!(places.is_sorted(), "{places:?}");
    assert!(text.split_whitespace().count() <= 700);
}

#[test]
fn documented_links_exist() {
    let mut count = 0;
    for path in paths(&root())
        .into_iter()
        .chain(paths(&root().join("docs")))
    {
        let text = std::fs::read_to_string(&path).unwrap();
        for link in text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split_once(')'))
        {
            let (file, heading) = link.0.split_once('#').unwrap_or((link.0, ""));
            if file.contains("://") {
                continue;
            }
            count += 1;
            let target = match file {
                "" => path.clone(),
                file => path.with_file_name(file),
            };
            let from = path.display();
            assert!(target.exists(), "{from}: {file} does not exist");
            if !heading.is_empty() {
                let target = std::fs::read_to_string(&target).unwrap();
                let mut headings = target.lines().filter(|line| line.starts_with('#'));
                assert!(
                    headings.any(|line| anchor(line) == heading),
                    "{from}: {file} has no heading {heading}"
                );
            }
        }
    }
    assert!(count > 20, "no links were found");
}
