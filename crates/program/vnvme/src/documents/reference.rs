//! Generator of docs/reference.md and the man pages in docs/man, from the option tables, the
//! registry of volume kinds and the commands. The documents are committed: a test compares them,
//! and writes them when `VNVME_WRITE_DOCS` is set (`make docs`).

use crate::cli::Cli;
use clap::CommandFactory;
use config::disk_kinds;
use config::options::{Flag, FlagEffect, Row, Spec};
use config::spec::UblkSpec;
use daemon::open::devices::DeviceRegistry;
use daemon::open::kinds;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use volume::{Extras, UrlOption};

/// Command line options that have no key in the configuration file, each with the reason.
const ONLY_ON_THE_COMMAND_LINE: &[(&str, &str)] = &[
    ("help", "it prints"),
    ("version", "it prints"),
    (
        "log",
        "it takes effect before a file is read; VNVME_LOG sets it, too",
    ),
    ("log-format", "it takes effect before a file is read"),
    ("config", "it names the file"),
    ("vhost-user-blk", "a table [[vhost-user-blk]] is the same"),
    ("nvme-tcp", "a table [[nvme-tcp]] is the same"),
    (
        "end-with-parent",
        "for tests and supervisors: it names a process",
    ),
    ("remove", "it serves nothing"),
];

/// Names of the options that every command has.
const GLOBAL: [&str; 3] = ["help", "log", "log_format"];

/// Keys of a configuration file without a flag or URL option of the same name, and their
/// counterpart on the command line.
const NO_FLAG: &[(&str, &str)] = &[
    (
        "socket",
        "`--socket`, or the first word after `--vhost-user-blk`",
    ),
    ("volume", "the words that name volumes"),
    ("socket-owner", "`--socket-owner`, of all sockets"),
    ("socket-group", "`--socket-group`, of all sockets"),
    ("socket-mode", "`--socket-mode`, of all sockets"),
    ("name", "only in the file"),
    ("max-namespaces", "only in the file"),
    ("pool", "only in the file"),
    ("pool-capacity", "only in the file"),
    ("pool-block-size", "only in the file"),
    (
        "incoming",
        "only in the file; of vhost-user-blk exports in the volume's URL, too",
    ),
    ("subsystem", "only in the file"),
    ("cntlid", "only in the file"),
    ("host-id", "only in the file"),
    ("reservations", "only in the file"),
    ("ana-group", "only in the file"),
    ("ana-state", "only in the file"),
    ("listen", "the first word after `--nvme-tcp`"),
    ("hosts", "only in the file"),
    ("max-hosts", "only in the file"),
    // Keys of NVMe/TCP subsystems; only controllers have flags for them.
    ("io-queues", "only in the file"),
    ("queue-entries", "only in the file"),
];

/// Wraps text at 100 columns; the second and later lines begin with `indent`.
fn wrapped(text: &str, indent: &str) -> String {
    let (mut lines, mut line) = (String::new(), String::new());
    for word in text.split_whitespace() {
        if !line.trim().is_empty() && line.chars().count() + 1 + word.chars().count() > 100 {
            lines += &line;
            lines.push('\n');
            line = indent.to_owned();
        } else if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    lines + &line + "\n"
}

fn url_option(out: &mut String, option: &UrlOption) {
    let text = format!("- `{}={}`: {}", option.name, option.form, option.help);
    *out += &wrapped(&text, "  ");
}

/// Returns how an option is written on the command line: `-s`, `--socket <PATH>`.
fn written(arg: &clap::Arg) -> String {
    let short = arg.get_short().map(|short| format!("`-{short}`, "));
    let names = arg
        .get_value_names()
        .filter(|_| arg.get_action().takes_values());
    let values = names.into_iter().flatten();
    let values: String = values.map(|name| format!(" <{name}>")).collect();
    let short = short.unwrap_or_default();
    match arg.get_long() {
        Some(long) if is_switch(arg) => format!("{short}`--{long}[=on|off]`"),
        Some(long) => format!("{short}`--{long}{values}`"),
        None => format!("`{}`", values.trim()),
    }
}

/// Returns whether the value of the option may be omitted.
fn is_switch(arg: &clap::Arg) -> bool {
    let values = arg.get_num_args();
    arg.get_action().takes_values() && values.is_some_and(|count| count.min_values() == 0)
}

fn command(out: &mut String, command: &clap::Command) {
    let about = command.get_about().map(ToString::to_string);
    let _ = writeln!(out, "### vnvme {}\n", command.get_name());
    *out += &wrapped(&format!("{}.", about.unwrap_or_default()), "");
    out.push('\n');
    let shown = |arg: &&clap::Arg| !arg.is_hide_set() && !GLOBAL.contains(&arg.get_id().as_str());
    for arg in command.get_arguments().filter(shown) {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let mut text = format!("- {}: {help}", written(arg));
        let choices = arg.get_possible_values();
        let choices = choices.iter().filter(|choice| !choice.is_hide_set());
        let names: Vec<String> = choices.map(|c| format!("`{}`", c.get_name())).collect();
        if !names.is_empty() && arg.get_action().takes_values() && !is_switch(arg) {
            let _ = write!(text, "; one of {}", names.join(", "));
        }
        let defaults = arg.get_default_values();
        if let (Some(default), true) = (defaults.first(), arg.get_action().takes_values()) {
            let _ = write!(text, " [default: {}]", default.to_string_lossy());
        }
        *out += &wrapped(&text, "  ");
    }
    out.push('\n');
}

/// Returns the possible values of an option, or the form of its value.
fn form<S: Spec>(row: &Row<S>) -> String {
    let mut scratch = S::default();
    let setting = (row.setting)(&mut scratch);
    let choices = setting.choices();
    let choices = choices.iter().filter(|choice| !choice.is_hide_set());
    let names: Vec<&str> = choices
        .map(clap::builder::PossibleValue::get_name)
        .collect();
    match (setting.is_switch(), names.is_empty()) {
        (true, _) => "true or false".into(),
        (false, false) => names.join(" or "),
        _ => row.form.replace('|', " or "),
    }
}

/// Returns the help text of an option in a configuration file, with its default.
fn help<S: Spec>(row: &Row<S>) -> String {
    let mut scratch = S::default();
    let default = match ((row.setting)(&mut scratch).is_switch(), row.default) {
        (true, "on") => "true",
        (true, "off") => "false",
        (_, default) => default,
    };
    Row { default, ..*row }.help_with_default()
}

fn beside(flag: &Flag) -> String {
    match flag.beside {
        FlagEffect::Default => "is the default of entries without the key".into(),
        FlagEffect::Overrides => "overrides the file".into(),
        FlagEffect::Refused(why) => format!("is refused beside `--config`: it {why}"),
    }
}

/// Repeats an expression for the type `$table` of each table of a configuration file: the first
/// kind of disk, its namespaces, the other kinds, the process.
macro_rules! each_table {
    (
        { $table:ident => $do:expr }
        $(#[$about:meta])* $first:ident($one:ident), $ones:ident;
        $($(#[$doc:meta])* $kind:ident($spec:ident), $list:ident;)*
    ) => {
        each_table!(@ $table => $do, $one, NamespaceSpec, $($spec,)* ProcessSpec,);
    };
    (@ $table:ident => $do:expr, $($spec:ident,)*) => {$({
        type $table = config::spec::$spec;
        $do;
    })*};
}

fn table<S: Spec>(out: &mut String) {
    let _ = writeln!(out, "### {}\n", S::TABLE);
    *out += &wrapped(S::ABOUT, "");
    out.push('\n');
    for row in S::ROWS {
        let required = if row.required { ", required" } else { "" };
        let mut text = format!("- `{}` ({}{required}): {}", row.key, form(row), help(row));
        if let Some((first, last)) = row.range {
            let _ = write!(text, ", {first} to {last}");
        }
        text.push('.');
        if row.url {
            text += " Also in the volume's URL.";
        }
        if let Some(flag) = &row.serve {
            let _ = write!(text, " `vnvme serve --{}` {}.", flag.name, beside(flag));
        }
        if let Some(flag) = row.ublk.as_ref().filter(|_| S::TABLE == UblkSpec::TABLE) {
            let _ = write!(text, " `vnvme ublk --{}`.", flag.name);
        }
        *out += &wrapped(&text, "  ");
    }
    for (flag, why) in S::REFUSED {
        *out += &wrapped(
            &format!("- `--{flag}` is refused: {} {why}.", S::TABLE),
            "  ",
        );
    }
    out.push('\n');
}

/// Appends the reference of all configuration file tables to `out`.
fn tables(out: &mut String) {
    disk_kinds!(each_table Table => table::<Table>(out));
}

fn reference() -> String {
    let mut cli = Cli::command();
    cli.build();
    let mut out = String::from(
        "# Reference\n\n<!-- Made by `make docs`: change the tables in crates/program/config/src/options \
         instead. -->\n\n",
    );
    out += &wrapped(
        "This page lists every option of the commands, of a configuration file, and of a volume's \
         URL. `vnvme COMMAND --help` and the man pages in [man](man) have the same texts.",
        "",
    );
    out += "\n## Commands\n\n";
    out += &wrapped(
        "Each command has `--help`, `--log <FILTER>` (or the variable `VNVME_LOG`), the log filter \
         for standard error, and `--log-format <FORMAT>`: `text`, `json` or `journal`.",
        "",
    );
    out.push('\n');
    let commands = cli.get_subcommands();
    for one in commands.filter(|one| one.get_name() != "help" && !one.is_hide_set()) {
        command(&mut out, one);
    }
    out += "## The configuration file\n\n";
    out += &wrapped(
        "`vnvme serve --config FILE` reads TOML. Keys have the names of the options; a switch is \
         true or false. Unknown keys are errors. Options beside `--config` apply to all entries of \
         the file, or are refused; none is ignored.",
        "",
    );
    out.push('\n');
    tables(&mut out);
    out += "## Volumes\n\n";
    out += &wrapped(
        "A volume is a path or a URL. Options follow as `?key=value&key=value`; in a configuration \
         file they may be keys of a table, `volume = { url = \"disk.raw\", iops = 1000 }`.",
        "",
    );
    let kinds = kinds(DeviceRegistry::default());
    for scheme in kinds.schemes() {
        let _ = writeln!(out, "\n### {}\n", scheme.url());
        out += &wrapped_example(scheme);
        for option in scheme.options {
            url_option(&mut out, option);
        }
    }
    out += "\n### Options of every volume\n\n";
    for option in Extras::OPTIONS {
        url_option(&mut out, option);
    }
    out
}

fn wrapped_example(scheme: &volume::Scheme) -> String {
    wrapped(&format!("`{}`: {}.", scheme.example, scheme.help), "") + "\n"
}

/// Escapes text for roff.
fn roff(text: &str) -> String {
    text.replace('\\', "\\e")
        .replace('-', "\\-")
        .replace("`", "")
}

fn man_of<S: Spec>(out: &mut String) {
    let _ = writeln!(out, ".SH \"{}\"", S::TABLE);
    for row in S::ROWS {
        let (key, form, help) = (roff(row.key), roff(&form(row)), roff(&help(row)));
        let _ = writeln!(out, ".TP\n\\fB{key}\\fR = \\fI{form}\\fR\n{help}");
    }
}

/// Returns the manual page vnvme.toml(5) in roff format.
fn man_of_file() -> String {
    let mut out = String::from(
        ".TH vnvme.toml 5\n.SH NAME\nvnvme.toml \\- configuration file of vnvme serve \\-\\-config\n\
         .SH DESCRIPTION\nTOML: the tables below, with these keys.\n",
    );
    disk_kinds!(each_table Table => man_of::<Table>(&mut out));
    out + ".SH \"SEE ALSO\"\nvnvme(1), vnvme\\-serve(1)\n"
}

/// Returns all generated documents with their paths below docs/.
fn documents() -> Vec<(PathBuf, String)> {
    let directory = tempfile::tempdir().unwrap();
    clap_mangen::generate_to(
        Cli::command().disable_help_subcommand(true),
        directory.path(),
    )
    .unwrap();
    let mut all = vec![
        ("reference.md".into(), reference()),
        ("man/vnvme.toml.5".into(), man_of_file()),
    ];
    for entry in std::fs::read_dir(directory.path()).unwrap() {
        let path = entry.unwrap().path();
        let name = Path::new("man").join(path.file_name().unwrap());
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        all.push((name, lines.join("\n") + "\n"));
    }
    all
}

#[test]
fn committed_documents_match_generated() {
    let docs = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs"));
    let all = documents();
    if std::env::var_os("VNVME_WRITE_DOCS").is_some() {
        let _ = std::fs::remove_dir_all(docs.join("man"));
        std::fs::create_dir_all(docs.join("man")).unwrap();
        for (name, text) in &all {
            std::fs::write(docs.join(name), text).unwrap();
        }
    }
    for (name, text) in &all {
        let committed = std::fs::read_to_string(docs.join(name)).unwrap_or_default();
        let differs = committed.lines().zip(text.lines()).find(|(a, b)| a != b);
        assert!(
            committed == *text,
            "docs/{} is not what the options say; run `make docs`: {differs:?}",
            name.display()
        );
    }
    let pages = std::fs::read_dir(docs.join("man")).unwrap().count();
    assert_eq!(pages, all.len() - 1, "docs/man has pages of no command");
}

/// All flags of the tables, and all keys, are documented.
fn flags_and_keys<S: Spec>(flags: &mut Vec<&str>, keys: &mut Vec<&str>) {
    for row in S::ROWS {
        let own = [row.serve.as_ref(), row.ublk.as_ref(), row.daemon.as_ref()];
        let own: Vec<&str> = own.into_iter().flatten().map(|flag| flag.name).collect();
        for name in &own {
            assert!(
                name.trim_start_matches("no-") == row.key,
                "--{name} sets {}",
                row.key
            );
        }
        let said = row.url || !own.is_empty() || NO_FLAG.iter().any(|(key, _)| *key == row.key);
        assert!(
            said,
            "{} of {}: how does the command line say it?",
            row.key,
            S::TABLE
        );
        flags.extend(own);
        keys.push(row.key);
    }
}

#[test]
fn options_and_keys_correspond() {
    let (mut flags, mut keys) = (Vec::new(), Vec::new());
    disk_kinds!(each_table Table => flags_and_keys::<Table>(&mut flags, &mut keys));
    let mut cli = Cli::command();
    cli.build();
    for name in ["serve", "ublk", "daemon"] {
        let command = cli.find_subcommand(name).unwrap();
        for option in command.get_arguments().filter_map(clap::Arg::get_long) {
            let alone = ONLY_ON_THE_COMMAND_LINE
                .iter()
                .any(|(only, _)| *only == option);
            let has_key = flags.contains(&option) || keys.contains(&option);
            assert!(alone != has_key, "vnvme {name} --{option}: has it a key?");
        }
    }
}

#[test]
fn reference_lists_every_option() {
    let text = reference();
    let mut cli = Cli::command();
    cli.build();
    for command in cli.get_subcommands().filter(|one| one.get_name() != "help") {
        let heading = format!("### vnvme {}\n", command.get_name());
        let section = text.split(&heading).nth(1).expect(&heading);
        let section = section.split("\n##").next().unwrap();
        let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
        for option in shown.filter_map(clap::Arg::get_long) {
            let is_there = section.contains(&format!("`--{option}"));
            assert!(
                is_there || GLOBAL.contains(&&*option.replace('-', "_")),
                "{heading}{option}"
            );
        }
    }
    let (mut flags, mut keys) = (Vec::new(), Vec::new());
    disk_kinds!(each_table Table => flags_and_keys::<Table>(&mut flags, &mut keys));
    let file = text.split("## The configuration file").nth(1).unwrap();
    for key in keys {
        assert!(file.contains(&format!("- `{key}` (")), "{key}");
    }
    let kinds = kinds(DeviceRegistry::default());
    for scheme in kinds.schemes() {
        assert!(
            text.contains(&format!("### {}", scheme.url())),
            "{}",
            scheme.name
        );
        for option in scheme.options.iter().chain(Extras::OPTIONS) {
            assert!(
                text.contains(&format!("- `{}=", option.name)),
                "{}",
                option.name
            );
        }
    }
}

#[cfg(feature = "vhost-user-blk")]
#[test]
fn documented_defaults_match_code() {
    use config::spec::{ControllerSpec, ProcessSpec, VhostBlkSpec};
    let controller = controller::ControllerConfig::default();
    let of = |key| ControllerSpec::row(key).unwrap().default;
    assert_eq!(of("io-queues"), controller.io_queues.to_string());
    assert_eq!(of("queue-entries"), controller.queue_entries.to_string());
    assert_eq!(of("mdts"), controller.mdts.to_string());
    assert_eq!(of("model"), controller.model);
    assert!(controller.shadow_doorbells && controller.write_cache);
    assert!(!controller.mapped_doorbells);
    let disk = vhost_blk::DiskOptions::default();
    let of = |key| VhostBlkSpec::row(key).unwrap().default;
    assert_eq!(of("queues"), disk.queues.to_string());
    assert_eq!(of("queue-size"), disk.queue_size.to_string());
    assert!(disk.write_cache);
    let disk = UblkSpec::default();
    let of = |key| UblkSpec::row(key).unwrap().default;
    assert_eq!(of("queues"), disk.queues().to_string());
    assert_eq!(of("depth"), disk.depth().to_string());
    let process = daemon::serve::options::ServeOptions::new(ProcessSpec::default(), 1);
    assert_eq!(process.polling.idle_window, worker::IdleWindow::Adaptive);
    let interval = worker::DEFAULT_MAX_POLL_INTERVAL.as_micros();
    let row = ProcessSpec::row("max-poll-interval").unwrap();
    assert_eq!(row.default, interval.to_string());
    assert_eq!(process.spread, config::choices::Spread::Auto);
}
