//! What README.md tells newcomers to type exists.

use crate::bench::suites;
use crate::cli::Cli;
use crate::spec::read_config;
use clap::{CommandFactory, Parser};
use std::ffi::OsString;

const README: &str = include_str!("../../../README.md");

/// The blocks of code, each with what is said of its language.
fn blocks() -> Vec<(&'static str, &'static str)> {
    let parts = README.split("```").skip(1).step_by(2);
    parts.filter_map(|block| block.split_once('\n')).collect()
}

/// The pieces of code in the running text.
fn spans() -> Vec<String> {
    let prose: String = README.split("```").step_by(2).collect();
    prose
        .split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
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

/// The arguments of all calls of vnvme, each with whether it is said in full.
fn calls() -> Vec<(Vec<String>, bool)> {
    let lines = blocks()
        .into_iter()
        .filter(|(language, _)| language.is_empty())
        .flat_map(|(_, block)| block.lines().map(str::to_owned));
    let all = lines
        .map(|line| (line, true))
        .chain(spans().into_iter().map(|span| (span, false)));
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
    let name = name.split_once('=').map_or(name, |(name, _)| name);
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
fn commands_and_options_exist() {
    let calls = calls();
    assert!(calls.len() > 15, "the README is not read: {calls:?}");
    for (words, whole) in calls {
        let Some(command) = words.get(1).filter(|word| !word.starts_with('-')) else {
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
    let options: Vec<String> = spans()
        .into_iter()
        .filter(|span| span.starts_with("--"))
        .collect();
    assert!(options.len() > 8, "the README is not read: {options:?}");
    for span in options {
        for option in words(&span).iter().filter(|word| word.starts_with("--")) {
            assert!(has_option(None, option), "{option}: {span}");
        }
    }
}

#[test]
fn configuration_files_are_understood() {
    let mut count = 0;
    for (_, block) in blocks().iter().filter(|(language, _)| *language == "toml") {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vnvme.toml");
        std::fs::write(&path, block).unwrap();
        if let Err(error) = read_config(&path) {
            panic!("{error:#}: {block}");
        }
        count += 1;
    }
    assert!(count >= 3, "the README is not read");
}
