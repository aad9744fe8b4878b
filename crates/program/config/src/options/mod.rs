//! Options, each defined once as a row of a table.
//!
//! Each kind of configured thing (controller, namespace, export, block device, process) has a table
//! in [`tables`]. A row has the option's key in the configuration file, its flags on the command
//! line, whether a volume's URL accepts it, the form of its value, its default, its help, and the
//! field that it sets. The rows generate the flags of commands with their `--help` ([`flags`]), the
//! parser of configuration files ([`mod@file`]), the options of URLs ([`url`]), and
//! docs/reference.md with the man pages (`reference`, a test).

pub mod file;
pub mod flags;
pub mod tables;
pub mod url;
mod value;

pub use value::{Bits, Names, Paths, Setting, Size, Url};

use std::ffi::OsStr;
use std::ops::RangeInclusive;

/// Command with flags from the option tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `vnvme serve`
    Serve,
    /// `vnvme ublk`
    Ublk,
    /// `vnvme daemon`: the process options of `vnvme serve`, and options of its own.
    Daemon,
}

/// Relation of a flag to `--config`, when the file (or a volume's URL) sets the option as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagEffect {
    /// The flag is the default for entries without the option.
    Default,
    /// The flag overrides the file.
    Overrides,
    /// The flag is refused beside a file, for this reason.
    Refused(&'static str),
}

/// Command line flag of an option.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// Name without the dashes. With `no-` before the row's key, the flag switches the option off.
    pub name: &'static str,
    /// Short form of the flag (one letter), if it has one.
    pub short: Option<char>,
    /// Effect of the flag together with `--config`.
    pub beside: FlagEffect,
    /// Name of another flag that must be given with this one.
    pub requires: Option<&'static str>,
    /// Help text of the flag, if it differs from that of the option.
    pub help: Option<&'static str>,
}

impl Flag {
    const fn new(name: &'static str, beside: FlagEffect) -> Self {
        Self {
            name,
            short: None,
            beside,
            requires: None,
            help: None,
        }
    }

    /// Creates a flag that sets a default beside a configuration file.
    pub const fn default(name: &'static str) -> Self {
        Self::new(name, FlagEffect::Default)
    }

    /// Creates a flag that overrides the configuration file.
    pub const fn overrides(name: &'static str) -> Self {
        Self::new(name, FlagEffect::Overrides)
    }

    /// Creates a flag that is refused beside a configuration file, for the reason `why`.
    pub const fn refused(name: &'static str, why: &'static str) -> Self {
        Self::new(name, FlagEffect::Refused(why))
    }

    /// Returns the flag with a one-letter form.
    pub const fn short(self, short: char) -> Self {
        Self {
            short: Some(short),
            ..self
        }
    }

    /// Returns the flag with the requirement that the flag `other` is given, too.
    pub const fn requires(self, other: &'static str) -> Self {
        Self {
            requires: Some(other),
            ..self
        }
    }

    /// Returns the flag with a help text of its own.
    pub const fn help(self, help: &'static str) -> Self {
        Self {
            help: Some(help),
            ..self
        }
    }
}

/// Option of a configured thing `S`: its key, its value and its flags.
pub struct Row<S: 'static> {
    /// Key of the option in the configuration file and in a URL.
    pub key: &'static str,
    /// Form of the value for help texts: alternatives (`on|off`), or the kind of value in capitals.
    pub form: &'static str,
    /// Help text; begins with a small letter, so that it may stand in a sentence.
    pub help: &'static str,
    /// Default value as text; empty if there is none.
    pub default: &'static str,
    /// Function that returns the field of `S` that the option sets.
    pub setting: fn(&mut S) -> &mut dyn Setting,
    /// Whether the configuration file must set the option.
    pub required: bool,
    /// Whether a volume's URL may set the option.
    pub url: bool,
    /// Smallest and largest value of an option that is a number.
    pub range: Option<(u32, u32)>,
    /// Flag of `vnvme serve` that sets the option.
    pub serve: Option<Flag>,
    /// Flag of `vnvme ublk` that sets the option.
    pub ublk: Option<Flag>,
    /// Flag of `vnvme daemon` that sets the option, if `vnvme serve` has none.
    pub daemon: Option<Flag>,
}

impl<S> Row<S> {
    /// Creates an option that can only be set in the configuration file.
    pub const fn new(
        key: &'static str,
        form: &'static str,
        help: &'static str,
        setting: fn(&mut S) -> &mut dyn Setting,
    ) -> Self {
        Self {
            key,
            form,
            help,
            default: "",
            setting,
            required: false,
            url: false,
            range: None,
            serve: None,
            ublk: None,
            daemon: None,
        }
    }

    /// Returns the option with the text of its default.
    pub const fn or(self, default: &'static str) -> Self {
        Self { default, ..self }
    }

    /// Returns the option as required in the configuration file.
    pub const fn required(self) -> Self {
        Self {
            required: true,
            ..self
        }
    }

    /// Returns the option as one that a volume's URL may set, too.
    pub const fn in_url(self) -> Self {
        Self { url: true, ..self }
    }

    /// Returns the option with values restricted to `first` to `last`, inclusive.
    pub const fn range(self, first: u32, last: u32) -> Self {
        Self {
            range: Some((first, last)),
            ..self
        }
    }

    /// Returns the option with a flag of `vnvme serve`.
    pub const fn serve(self, flag: Flag) -> Self {
        Self {
            serve: Some(flag),
            ..self
        }
    }

    /// Returns the option with a flag of `vnvme ublk`.
    pub const fn ublk(self, flag: Flag) -> Self {
        Self {
            ublk: Some(flag),
            ..self
        }
    }

    /// Returns the option with a flag that only `vnvme daemon` has.
    pub const fn daemon(self, flag: Flag) -> Self {
        Self {
            daemon: Some(flag),
            ..self
        }
    }

    /// Returns the flag of `command` that sets the option, if there is one.
    pub fn flag(&self, command: Command) -> Option<&Flag> {
        match command {
            Command::Serve => self.serve.as_ref(),
            Command::Ublk => self.ublk.as_ref(),
            Command::Daemon => self.daemon.as_ref().or(self.serve.as_ref()),
        }
    }

    /// Returns the help text of the option with its default: `[default: ...]`.
    pub fn help_with_default(&self) -> String {
        match self.default {
            "" => self.help.to_owned(),
            default => format!("{} [default: {default}]", self.help),
        }
    }

    /// Sets the field from text of the command line or a URL.
    ///
    /// # Errors
    /// A text for the user when the value is invalid.
    pub fn set_text(&self, spec: &mut S, text: &OsStr) -> Result<(), String> {
        if let Some(number) = text.to_str().and_then(|text| text.parse().ok()) {
            self.check_range(number)?;
        }
        (self.setting)(spec).set_text(text)
    }

    /// Returns the field's value as in a configuration file; `None` if it is not set.
    pub fn to_toml(&self, spec: &mut S) -> Option<toml::Value> {
        (self.setting)(spec).to_toml()
    }

    /// Sets the field from a value of a configuration file.
    ///
    /// # Errors
    /// A text for the user when the value is invalid.
    pub fn set_toml(&self, spec: &mut S, value: toml::Value) -> Result<(), String> {
        if let toml::Value::Integer(number) = value {
            self.check_range(number)?;
        }
        (self.setting)(spec).set_toml(value)
    }

    fn check_range(&self, number: i64) -> Result<(), String> {
        match self.range {
            Some((first, last))
                if !RangeInclusive::new(i64::from(first), last.into()).contains(&number) =>
            {
                Err(format!("{number} is not in {first}..={last}"))
            }
            _ => Ok(()),
        }
    }
}

/// Thing that a table of the configuration file describes, such as a controller or the process.
pub trait Spec: Default + 'static {
    /// Name of the table in the configuration file, such as `controller`.
    const TABLE: &'static str;
    /// Plural name of what the table describes, for messages, such as "namespaces".
    const NAMES: &'static str;
    /// Description of the table in the reference.
    const ABOUT: &'static str;
    /// Options that the table may have.
    const ROWS: &'static [Row<Self>];
    /// Keys of nested tables, and whether each is required; see [`Spec::nested`].
    const NESTED: &'static [(&'static str, bool)] = &[];
    /// Flags that cannot be used with this table, each with the reason.
    const REFUSED: &'static [(&'static str, &'static str)] = &[];
    /// Flags of the process that affect only what this table describes.
    const PROCESS_FLAGS: &'static [&'static str] = &[];

    /// Reads the nested table with this key.
    ///
    /// # Errors
    /// The file's content is invalid.
    fn nested<'de, A: serde::de::MapAccess<'de>>(
        &mut self,
        _key: &str,
        _map: &mut A,
    ) -> Result<(), A::Error> {
        Ok(())
    }

    /// Returns the volume whose URL may set options, if the thing has one.
    fn volume(&mut self) -> Option<&mut Url> {
        None
    }

    /// Returns the option with this key, if the table has one.
    fn row(key: &str) -> Option<&'static Row<Self>> {
        Self::ROWS.iter().find(|row| row.key == key)
    }
}
