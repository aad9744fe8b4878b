//! Command-line flags of `vnvme serve`, `vnvme ublk` and `vnvme daemon`, generated from the option
//! tables.

use super::{Command, Flag, FlagEffect, Row, Spec};
use crate::disk::{Disk, Specs};
use crate::disk_kinds;
use crate::spec::{NamespaceSpec, ProcessSpec};
use crate::usage_error::UsageError;
use anyhow::{Result, anyhow};
use clap::builder::{OsStringValueParser, PossibleValuesParser, TypedValueParser, ValueParser};
use clap::{Arg, ArgAction, ArgMatches};
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// Repeats an expression for the type `$table` of each table with options: namespaces, disks of
/// each kind, the process.
macro_rules! each_table {
    ({ $table:ident => $do:expr } $($(#[$doc:meta])* $kind:ident($spec:ident), $list:ident;)*) => {
        {
            type $table = NamespaceSpec;
            $do;
        }
        $({
            type $table = crate::disk::$spec;
            $do;
        })*
        {
            type $table = ProcessSpec;
            $do;
        }
    };
}

/// Repeats an expression for the list `$disks` of the disks of each kind in `$specs`.
macro_rules! each_list {
    (
        { $disks:ident in $specs:ident => $do:expr }
        $($(#[$doc:meta])* $kind:ident($spec:ident), $list:ident;)*
    ) => {$({
        let $disks = &mut $specs.$list;
        $do;
    })*};
}

/// Adds the flags of `command` to its definition for clap.
pub fn augment(command: Command, mut cli: clap::Command) -> clap::Command {
    if command == Command::Daemon {
        return augment_of::<ProcessSpec>(command, cli);
    }
    disk_kinds!(each_table Table => cli = augment_of::<Table>(command, cli));
    cli
}

fn augment_of<S: Spec>(command: Command, mut cli: clap::Command) -> clap::Command {
    for row in S::ROWS {
        let Some(flag) = row.flag(command) else {
            continue;
        };
        // Several tables may have the flag.
        if cli.get_arguments().all(|arg| arg.get_id() != flag.name) {
            cli = cli.arg(arg(row, flag));
            if flag.name != row.key {
                let off = flag.name;
                cli = cli.arg(switch(row).conflicts_with(off).long_help(format!(
                    "{}; off is the same as --{off}",
                    sentence(&row.help_with_default())
                )));
            }
        }
    }
    cli
}

/// Returns the definition of an on-off flag: `--pin-memory`, or `--pin-memory=off`.
fn switch<S: Spec>(row: &'static Row<S>) -> Arg {
    Arg::new(row.key)
        .long(row.key)
        .help(sentence(&row.help_with_default()))
        .value_name("on|off")
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("on")
        .value_parser(PossibleValuesParser::new(["on", "off"]).map(OsString::from))
        .hide_possible_values(true)
}

fn arg<S: Spec>(row: &'static Row<S>, flag: &Flag) -> Arg {
    let mut scratch = S::default();
    let setting = (row.setting)(&mut scratch);
    let help = match flag.help {
        // The flag's own help names its default, if it differs.
        Some(help) if setting.is_switch() || help.contains("[default: ") => help.to_owned(),
        Some(help) => Row { help, ..*row }.help_with_default(),
        None if setting.is_switch() => row.help.to_owned(),
        None => row.help_with_default(),
    };
    let mut arg = if setting.is_switch() && flag.name == row.key {
        switch(row)
    } else {
        Arg::new(flag.name).long(flag.name)
    };
    arg = arg.help(sentence(&help));
    if let Some(short) = flag.short {
        arg = arg.short(short);
    }
    if let Some(other) = flag.requires {
        arg = arg.requires(other);
    }
    if setting.is_switch() {
        return if flag.name == row.key {
            arg
        } else {
            arg.action(ArgAction::SetTrue)
        };
    }
    let choices = setting.choices();
    let parser: ValueParser = if choices.is_empty() {
        let check = |text: OsString| -> Result<OsString, String> {
            row.set_text(&mut S::default(), &text)?;
            Ok(text)
        };
        OsStringValueParser::new().try_map(check).into()
    } else {
        PossibleValuesParser::new(choices)
            .map(OsString::from)
            .into()
    };
    if setting.is_list() {
        arg = arg.action(ArgAction::Append);
    }
    arg.value_name(row.form).value_parser(parser)
}

/// Capitalizes the first letter.
pub fn sentence(help: &str) -> String {
    let mut letters = help.chars();
    let first = letters.next().map(|first| first.to_uppercase().to_string());
    first.unwrap_or_default() + letters.as_str()
}

/// Flags of the option tables that a command line contains, with their values.
#[derive(Debug)]
pub struct GivenFlags {
    command: Command,
    flags: Vec<GivenFlag>,
}

#[derive(Debug)]
struct GivenFlag {
    /// Name of the [`Flag`] in the tables.
    name: &'static str,
    /// Flag as written by the user: `write-cache` for `--write-cache=off`, which is also
    /// `no-write-cache`.
    written: &'static str,
    value: OsString,
}

impl GivenFlags {
    /// Collects the flags of the option tables from the parsed command line `matches`.
    pub fn of(command: Command, matches: &ArgMatches) -> Self {
        let mut given = Self {
            command,
            flags: Vec::new(),
        };
        if command == Command::Daemon {
            given.find::<ProcessSpec>(matches);
            return given;
        }
        disk_kinds!(each_table Table => given.find::<Table>(matches));
        given
    }

    fn find<S: Spec>(&mut self, matches: &ArgMatches) {
        for row in S::ROWS {
            let Some(flag) = row.flag(self.command) else {
                continue;
            };
            if self.value(flag.name).is_some() {
                continue;
            }
            let values_of = |name: &'static str| {
                let values = matches.get_many::<OsString>(name)?;
                let values: Vec<&OsStr> = values.map(OsString::as_os_str).collect();
                Some((name, values.join(OsStr::new(","))))
            };
            let given = if flag.name == row.key {
                values_of(row.key)
            } else if matches.get_flag(flag.name) {
                Some((flag.name, "off".into()))
            } else {
                values_of(row.key)
            };
            self.flags.extend(given.map(|(written, value)| GivenFlag {
                name: flag.name,
                written,
                value,
            }));
        }
    }

    fn given(&self, name: &str) -> Option<&GivenFlag> {
        self.flags.iter().find(|flag| flag.name == name)
    }

    fn value(&self, name: &str) -> Option<&OsStr> {
        Some(&self.given(name)?.value)
    }

    /// Merges the flags into the disks of the configuration file (`config`) or of the command line.
    /// Each flag applies to everything of its kind, or is refused; none is ignored.
    ///
    /// # Errors
    /// A usage error that names the refused flag.
    pub fn merge(&self, config: Option<&Path>, specs: &mut Specs) -> Result<()> {
        if let Some(path) = config {
            disk_kinds!(each_table Table => self.refuse_beside::<Table>(path)?);
        }
        let namespaces = specs.iter().map(|disk| disk.namespace_tables().len());
        let mut counts = vec![self.reach::<NamespaceSpec>(namespaces.sum())?];
        disk_kinds!(each_list disks in specs => counts.push(self.reach_all(disks)?));
        counts.push(self.reach::<ProcessSpec>(1)?);
        for GivenFlag { name, written, .. } in &self.flags {
            let mut of = counts.iter().filter(|reach| reach.flags.contains(name));
            let names = of.clone().next().map_or("", |reach| reach.names);
            let reaches = of.any(|reach| reach.count > 0);
            let alone = counts
                .iter()
                .find(|reach| reach.process_flags.contains(name));
            let missing = match alone {
                Some(reach) if reach.count == 0 => Some(reach.names),
                _ => (!reaches).then_some(names),
            };
            if let Some(names) = missing {
                return Err(UsageError::error(format!(
                    "--{written} applies to {names}, and none is given"
                )));
            }
        }
        disk_kinds!(each_list disks in specs => self.apply_all(disks)?);
        self.apply(&mut specs.process)
    }

    /// Merges the flags of the process into its options from the configuration file.
    ///
    /// # Errors
    /// A value that cannot be parsed.
    pub fn merge_process(&self, specs: &mut Specs) -> Result<()> {
        self.apply(&mut specs.process)
    }

    fn refuse_beside<S: Spec>(&self, config: &Path) -> Result<()> {
        for row in S::ROWS {
            if let Some(flag) = row.flag(self.command)
                && let FlagEffect::Refused(why) = flag.beside
                && self.value(flag.name).is_some()
            {
                let (name, key, table) = (flag.name, row.key, S::TABLE);
                return Err(UsageError::error(format!(
                    "--{name} {why}; with --config, set {key} = \"...\" in its {table} table in {}",
                    config.display()
                )));
            }
        }
        Ok(())
    }

    /// Returns the flags that apply to a kind of thing, of which there are `count`.
    fn reach<S: Spec>(&self, count: usize) -> Result<FlagScope> {
        // Only a flag that switches something off is refused here.
        let mut refused = S::REFUSED.iter().filter_map(|(name, why)| {
            let flag = self.given(name).filter(|flag| flag.value == "off");
            Some((flag?.written, why))
        });
        if let Some((written, why)) = refused.next().filter(|_| count > 0) {
            return Err(UsageError::error(format!(
                "--{written}: {} {why}",
                S::TABLE
            )));
        }
        let flags = S::ROWS.iter().filter_map(|row| row.flag(self.command));
        Ok(FlagScope {
            names: S::NAMES,
            count,
            flags: flags.map(|flag| flag.name).collect(),
            process_flags: S::PROCESS_FLAGS,
        })
    }

    /// Returns the flags that apply to disks of one kind.
    fn reach_all<S: Spec>(&self, disks: &[S]) -> Result<FlagScope> {
        self.reach::<S>(disks.len())
    }

    fn apply_all<S: Spec + Disk>(&self, disks: &mut [S]) -> Result<()> {
        for disk in disks {
            if disk.has_namespace_tables() {
                let mut namespaces = disk.namespaces_mut().iter_mut();
                namespaces.try_for_each(|namespace| self.apply(namespace))?;
            }
            self.apply(disk)?;
        }
        Ok(())
    }

    fn apply<S: Spec>(&self, spec: &mut S) -> Result<()> {
        for row in S::ROWS {
            if let Some(flag) = row.flag(self.command)
                && let Some(value) = self.value(flag.name)
                && (flag.beside == FlagEffect::Overrides || (row.setting)(spec).is_empty())
            {
                row.set_text(spec, value).map_err(|why| anyhow!(why))?;
            }
        }
        Ok(())
    }
}

/// Scope of a flag that applies to all configured disks of one kind.
struct FlagScope {
    names: &'static str,
    /// Number of configured disks of that kind.
    count: usize,
    flags: Vec<&'static str>,
    process_flags: &'static [&'static str],
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ControllerSpec, UblkSpec, VhostBlkSpec};

    /// Returns a command line with `vnvme serve` and `vnvme ublk`: their flags, and words for
    /// volumes.
    fn cli() -> clap::Command {
        let command = |name: &'static str, command| {
            let volumes = Arg::new("volumes").num_args(0..);
            augment(command, clap::Command::new(name).arg(volumes))
        };
        let file = Arg::new("config").long("config");
        let socket = Arg::new("socket").long("socket").short('s');
        clap::Command::new("vnvme")
            .subcommand(command("serve", Command::Serve).args([file, socket]))
            .subcommand(command("ublk", Command::Ublk))
    }

    /// Returns one entry of each kind without any option.
    fn specs() -> Specs {
        let controller = ControllerSpec {
            namespaces: vec![NamespaceSpec::default()],
            ..ControllerSpec::default()
        };
        Specs {
            controllers: vec![controller],
            vhost_user_blk: vec![VhostBlkSpec::default()],
            ublk: vec![UblkSpec::default()],
            ..Specs::default()
        }
    }

    /// Returns two values of an option.
    fn values<S: Spec>(row: &Row<S>) -> [String; 2] {
        let mut scratch = S::default();
        let choices = (row.setting)(&mut scratch).choices();
        if let [first, second, ..] = choices.as_slice() {
            return [first, second].map(|choice| choice.get_name().to_owned());
        }
        match row.form {
            "512|4096" => ["512", "4096"],
            "N" | "MICROSECONDS" | "SECONDS" | "LIST" | "SIZE" => ["2", "3"],
            "TEXT" | "NQN" | "PATH" | "USER" | "GROUP" => ["one", "other"],
            "MODE" => ["0660", "0600"],
            "CLOUD" => ["azure", "google:data-1"],
            "ADDRESS:PORT" => ["127.0.0.1:9469", "[::1]:9469"],
            form => panic!("values of the form {form}?"),
        }
        .map(str::to_owned)
    }

    /// Every flag of a kind sets all entries without the option, and overrides or keeps those with
    /// it as its row says; or it is refused, with exit status 2.
    fn check<S: Spec>(of: fn(&mut Specs) -> &mut S) -> usize {
        let flags = S::ROWS.iter().filter_map(|row| Some((row, row.serve?)));
        let mut count = 0;
        for (row, flag) in flags {
            count += 1;
            let mut args = vec![
                "vnvme".to_owned(),
                "serve".into(),
                "--config".into(),
                "f".into(),
            ];
            args.push(format!("--{}", flag.name));
            let mut scratch = S::default();
            let is_switch = (row.setting)(&mut scratch).is_switch();
            let [value, other] = match (is_switch, flag.name == row.key) {
                (true, true) => ["on", "off"].map(str::to_owned),
                (true, false) => ["off", "on"].map(str::to_owned),
                _ => values(row),
            };
            args.extend((!is_switch).then(|| value.clone()));
            let matches = cli().try_get_matches_from(&args).unwrap();
            let given = GivenFlags::of(Command::Serve, matches.subcommand().unwrap().1);
            let file = Some(Path::new("f"));
            let shown = |text: &str| {
                let mut scratch = S::default();
                row.set_text(&mut scratch, text.as_ref()).unwrap();
                (row.setting)(&mut scratch).shown()
            };
            for says in [None, Some(&other)] {
                let mut specs = specs();
                if S::REFUSED.is_empty() && UblkSpec::REFUSED.iter().any(|(no, _)| *no == flag.name)
                {
                    let error = given.merge(file, &mut specs).unwrap_err();
                    assert!(error.is::<UsageError>(), "exit status 2: {args:?}");
                    specs.ublk.clear();
                }
                if let Some(text) = says {
                    row.set_text(of(&mut specs), text.as_ref()).unwrap();
                }
                let merged = given.merge(file, &mut specs);
                let wanted = match (flag.beside, says) {
                    (FlagEffect::Refused(why), _) => {
                        let error = merged.unwrap_err();
                        assert!(error.is::<UsageError>(), "exit status 2: {args:?}");
                        assert!(error.to_string().contains(why), "{args:?}: {error}");
                        continue;
                    }
                    (FlagEffect::Default, Some(other)) => shown(other),
                    _ => shown(&value),
                };
                merged.unwrap();
                let found = (row.setting)(of(&mut specs)).shown();
                assert_eq!(
                    found,
                    wanted,
                    "{args:?} to {}, which says {says:?}",
                    S::TABLE
                );
            }
        }
        count
    }

    #[test]
    fn each_flag_with_file_applies_or_is_refused() {
        let counts = [
            check::<ControllerSpec>(|specs| &mut specs.controllers[0]),
            check::<NamespaceSpec>(|specs| &mut specs.controllers[0].namespaces[0]),
            check::<VhostBlkSpec>(|specs| &mut specs.vhost_user_blk[0]),
            check::<UblkSpec>(|specs| &mut specs.ublk[0]),
            check::<ProcessSpec>(|specs| &mut specs.process),
        ];
        assert_eq!(counts, [16, 4, 8, 4, 19]);
    }

    #[test]
    fn flags_of_unserved_kind_are_refused() {
        for row in ControllerSpec::ROWS {
            // Flags that exports have, too.
            let others = [
                "no-write-cache",
                "socket-owner",
                "socket-group",
                "socket-mode",
            ];
            let Some(flag) = row.serve.filter(|flag| !others.contains(&flag.name)) else {
                continue;
            };
            let value = if flag.name.starts_with("no-") {
                "off".to_owned()
            } else {
                values(row)[0].clone()
            };
            let given = GivenFlags {
                command: Command::Serve,
                flags: vec![GivenFlag {
                    name: flag.name,
                    written: flag.name,
                    value: value.into(),
                }],
            };
            let mut specs = specs();
            specs.controllers.clear();
            let error = given.merge(None, &mut specs).unwrap_err();
            let text = format!("--{} applies to NVMe controllers, and none", flag.name);
            assert!(
                error.is::<UsageError>() && error.to_string().contains(&text),
                "{error}"
            );
        }
    }

    /// Switches on the command line have the names of their keys in the file.
    #[test]
    fn switch_has_name_of_its_key() {
        let merged = |args: &[&str]| {
            let args = [&["vnvme", "serve", "--config", "f"], args].concat();
            let matches = cli().try_get_matches_from(&args).unwrap();
            let given = GivenFlags::of(Command::Serve, matches.subcommand().unwrap().1);
            let mut specs = specs();
            specs.ublk.clear();
            given.merge(Some(Path::new("f")), &mut specs).unwrap();
            specs
        };
        for (args, wanted) in [
            (&["--write-cache=off"][..], Some(false)),
            (&["--no-write-cache"], Some(false)),
            (&["--write-cache"], Some(true)),
            (&["--write-cache=on"], Some(true)),
            (&[], None),
        ] {
            let specs = merged(args);
            assert_eq!(specs.controllers[0].write_cache, wanted, "{args:?}");
            assert_eq!(specs.vhost_user_blk[0].write_cache, wanted, "{args:?}");
        }
        assert_eq!(
            merged(&["--pin-memory=off"]).process.pin_memory,
            Some(false)
        );
        let twice = ["vnvme", "serve", "--write-cache=on", "--no-write-cache"];
        assert!(cli().try_get_matches_from(twice).is_err());
        let volume = ["vnvme", "serve", "-s", "s", "--read-only", "on"];
        let matches = cli().try_get_matches_from(volume).unwrap();
        let volumes = matches.subcommand().unwrap().1.get_one::<String>("volumes");
        assert_eq!(volumes.unwrap(), "on", "a word behind a switch is a volume");
    }

    #[test]
    fn list_options_may_be_repeated() {
        let args = ["vnvme", "ublk", "a", "--cpus", "2,3", "--cpus", "4"];
        let matches = cli().try_get_matches_from(args).unwrap();
        let given = GivenFlags::of(Command::Ublk, matches.subcommand().unwrap().1);
        let mut specs = specs();
        given.merge(None, &mut specs).unwrap();
        assert_eq!(specs.process.cpus, Some(vec![2, 3, 4]));
    }
}
